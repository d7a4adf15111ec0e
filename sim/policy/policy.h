/* Policies: placement, replication, quotas. A policy is one file and one line in table.c;
 * simulator, replay and `mizan place` run the same code.
 *
 * A policy is asked in two steps, so that it cannot use what it may not know:
 *   decide  sees exactly the loads it declared (`sees`, with lag, window, interval) and sets hosts,
 *           quotas, per-host totals and transfers;
 *   route   sees the exact current counts (and pairs), as any dispatcher does, and spreads them
 * over the hosts: the sparse assignment q, drops, the kept pairs of backward. The caller validates
 * every plan (mz_plan_check); an invalid one is MZ_EINTERNAL with the name of the policy.
 *
 * Terms: an *instance* is one slot that holds an expert: mains first, then replicas. n_e pairs of
 * expert e in this call; q_e its backward quota; W bytes of one expert's weights.
 * Memory: every array of a plan is allocated once by mz_plan_create at its largest size; decide and
 * route allocate nothing (but lrmoe's scratch for scores, which grows to the largest call).
 * Threads: one state belongs to one thread. */
#ifndef MIZAN_SIM_POLICY_POLICY_H
#define MIZAN_SIM_POLICY_POLICY_H

#include "common/base/arena.h"
#include "common/base/err.h"
#include "common/base/load.h"
#include "common/base/opt.h"

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

enum { MZ_SEES_CURRENT = 1, MZ_SEES_HISTORY = 2 };

typedef enum mz_move_kind { MZ_MOVE_WEIGHTS, MZ_MOVE_GRADIENTS, MZ_MOVE_OPTIMIZER } mz_move_kind;

/* When a transfer happens, and what it may hide behind. */
typedef enum mz_move_phase {
    MZ_MOVE_FORWARD,    /* before this call's expert products in forward */
    MZ_MOVE_BACKWARD,   /* before them in backward */
    MZ_MOVE_REDUCE,     /* after this call's backward products (replica gradients to the main) */
    MZ_MOVE_STEP,       /* once per step, after the optimizer (placement change, fresh weights) */
    MZ_MOVE_REDUCE_STEP /* once per step, after the last micro-batch's backward products of this
                           layer (gradients accumulated over micro-batches) */
} mz_move_phase;
typedef enum mz_move_hide {
    MZ_HIDE_NOTHING,  /* blocks the rank */
    MZ_HIDE_PACK,     /* runs beside packing; dispatch waits for it */
    MZ_HIDE_DISPATCH, /* runs beside pack and dispatch; the products wait */
    MZ_HIDE_LAYERS,   /* runs beside the work of other layers; only its own use waits */
    MZ_HIDE_FREE      /* no cost on the wire (merged with traffic counted elsewhere) */
} mz_move_hide;

/* One transfer. A ring all-reduce over m ranks is m moves from neighbour to neighbour of
 * 2 (m-1)/m times the buffer each. src or dst may be MZ_EVERY_RANK, for state that is sharded
 * evenly over the group: `bytes` then come from (go to) all ranks in equal parts, and the part that
 * the other end holds itself does not travel. MZ_MOVE_STEP and MZ_MOVE_REDUCE_STEP moves happen
 * once per step: those in the plan of micro-batch 0 count. A plan that outlives its step (interval
 * > 1) repeats its moves in every step but those marked `change`. */
enum { MZ_EVERY_RANK = -1 };
typedef struct mz_move {
    mz_move_kind kind;
    mz_move_phase phase;
    mz_move_hide hide;
    int32_t expert, src, dst; /* src, dst: ranks of the group */
    int64_t bytes;            /* sent from src to dst */
    int32_t round;            /* latency rounds: transfers of equal round run together */
    bool change;              /* of a placement change: only in the step that decided it */
} mz_move;

typedef struct mz_plan {
    int32_t ranks, experts;
    int32_t instance_cap, move_cap;
    int64_t entry_cap;
    /* hosts: instances of expert e are [begin[e], begin[e+1]), main first when mains are fixed.
     * The same rank may appear twice (SYMI). */
    int32_t *begin;  /* [E+1] */
    int32_t *rank;   /* [instances] */
    int64_t *target; /* [instances] pairs that decide meant for it; -1: route decides */
    /* route's result, forward: entries of instance i are [entry_begin[i], entry_begin[i+1]) */
    int64_t *forward;     /* [instances] pairs computed in forward */
    int64_t *entry_begin; /* [instances+1] */
    int32_t *entry_source;
    int64_t *entry_pairs;
    /* route's result, backward: kept pairs on the same instances. has_backward false: as forward.
     */
    bool has_backward;
    int64_t *backward;
    int64_t *back_begin;
    int32_t *back_source;
    int64_t *back_pairs;
    int64_t *quota; /* [E] q_e; equal to n_e minus drops where there is no quota */
    int64_t *kept;  /* [S][E] kept pairs of each source when has_backward */
    bool has_drops;
    int64_t *dropped;                         /* [S][E] pairs not computed at all, when has_drops */
    int64_t pairs, dropped_pairs, kept_pairs; /* kept counts pairs with gradient */
    double kept_score, total_score;           /* sums of scores; total 0: no scores */
    mz_move *move;
    int32_t moves;
    /* why: predicted peak row counts, reason text for reports */
    int64_t peak_forward, peak_backward;
    bool over_budget; /* even the smallest quotas do not fit the budget; `why` says which */
    char why[256];
    int64_t *scratch; /* of mz_plan_check */
} mz_plan;

/* slots: of traits. The arrays start as mz_plan_reset leaves them. */
mz_code mz_plan_create(int32_t ranks, int32_t experts, int32_t slots, mz_plan **plan, mz_err *err);
void mz_plan_free(mz_plan **plan);
/* Empties a plan for the next decide (which calls it): no instances, moves, entries, drops. */
void mz_plan_reset(mz_plan *plan);
/* A plan that outlives the next decide. Both were created with the same arguments (MZ_EINTERNAL
 * otherwise). O(what the plan holds). */
mz_code mz_plan_copy(const mz_plan *from, mz_plan *to, mz_err *err);

/* What the policy is told once. One environment per expert-parallel group. */
typedef struct mz_policy_env {
    int32_t ranks, experts, top_k, layers; /* of one group; layers: MoE layers */
    const int32_t *domain;                 /* [ranks] node or scale-up domain */
    int32_t domains;
    int64_t hidden, intermediate;
    int64_t expert_parameters;
    int64_t weight_bytes; /* W: one expert in bf16 */
    int64_t token_bytes;  /* one row on the wire: 2H */
    bool recompute;
    uint64_t seed;
    int32_t expert_groups; /* of the router (DeepSeek's n_group), E a multiple; 1: none */
    int64_t
        expert_state_bytes; /* the run's optimizer state of one expert, master weights included */
    /* The simulator's own link and compute model, for rules that weigh bytes against work. */
    double pair_seconds;    /* forward products of one pair where an expert has many rows */
    double inside_bytes_s;  /* attained by one rank towards ranks of its own domain, bytes/s */
    double outside_bytes_s; /* towards ranks of other domains; equal to inside where there is one */
    const volatile sig_atomic_t *stop; /* once set, a plug-in's answer is not waited for; or NULL */
} mz_policy_env;

/* The environment of one expert-parallel group of a job (env.c). Simulator, replay and `mizan
 * place` fill it here, so that a policy sees the same numbers in all of them. */
struct mz_model;
struct mz_cluster;
struct mz_optimizer;
typedef struct mz_policy_job {
    const struct mz_model *model;
    const struct mz_cluster *cluster;     /* its ranks are the job's */
    const struct mz_optimizer *optimizer; /* NULL: 12 bytes a parameter (AdamW on bf16 weights) */
    int32_t ep;                           /* ranks of one group; divides the cluster's ranks */
    bool recompute;
    uint64_t seed;
    const volatile sig_atomic_t *stop; /* as in mz_policy_env */
} mz_policy_job;
/* env->domain lives in arena; domains of the group are numbered from 0 in order of rank.
 * O(ep + tensors). MZ_ENOMEM alone. */
mz_code mz_policy_env_of(const mz_policy_job *job, int32_t group, mz_arena *arena,
                         mz_policy_env *env, mz_err *err);

/* Budgets of one call for policies with quotas, filled by sim/step (memory.c there); < 0: none. */
typedef struct mz_budget {
    int64_t backward_rows;      /* most kept pairs a rank can hold in this layer's backward */
    int64_t backward_send_rows; /* most kept pairs a source may send */
    const int64_t *rank_rows;   /* [ranks] per-rank caps, NULL: backward_rows for all */
} mz_budget;

typedef struct mz_view {
    int64_t step;
    int32_t micro_batch, layer;
    const mz_load *current;  /* NULL unless MZ_SEES_CURRENT */
    const mz_load *history;  /* NULL unless MZ_SEES_HISTORY, and before there is any: the
                                sum over micro-batches of the step `lag` ago, or the mean over
                                `window` steps ending there (rounded by largest remainder). With
                                traits.history_calls the same over this layer's calls
                                (micro-batches): lag 1 is the call before this one */
    const mz_budget *budget; /* NULL: none */
} mz_view;

typedef struct mz_call {
    int64_t step;
    int32_t micro_batch, layer;
    const mz_load *load;
    const mz_pairs *pairs; /* NULL when not recorded */
} mz_call;

typedef enum mz_replica_memory {
    MZ_REPLICAS_NONE,
    MZ_REPLICAS_SHARED,    /* one set of slot buffers for all layers */
    MZ_REPLICAS_PER_LAYER, /* those in use, from forward to the layer's backward */
    MZ_REPLICAS_RESIDENT   /* slots - mains of every layer, always (placements that last) */
} mz_replica_memory;

/* What init answers: how to run the policy and what it costs in memory. */
typedef struct mz_policy_traits {
    unsigned sees;
    int32_t lag, window, interval; /* steps; interval 1: decide runs at every call; above, in the
                                      first micro-batch of every interval'th step */
    bool history_calls;            /* lag and window count this layer's calls instead of steps */
    bool plan_hidden;              /* decide runs beside the step: its time is not charged */
    bool route_plans;              /* route solves too: charged at every call as "NAME.route" */
    double planner_seconds; /* >= 0: charged per decide instead of the profile's entry (plug-ins);
                               set by init only where `planner_stated`; with route_plans charged
                               for route too */
    bool planner_stated;
    bool lossy;
    int32_t slots;      /* per rank, mains included */
    bool free_replicas; /* hosts beyond the mains cost and count nothing (ideal) */
    bool open_slots;    /* copies live for one call, in as many slots as a plan likes (LLEP);
                           `slots` does not limit them */
    mz_replica_memory replica_memory;
    int64_t replica_gradient_bytes; /* per replica slot: 0, W or 2W */
    bool replica_optimizer;         /* resident replicas carry optimizer state of their own */
    bool sharded_optimizer;         /* expert optimizer state spread over the whole group (SYMI) */
    bool sharded_weights;           /* expert weights and gradients too (LAER): every slot is a
                                       transient buffer of weights and gradients */
    int32_t prefetch;               /* sharded_weights: layers whose slots are restored ahead */
    int64_t buffer_bytes;           /* further resident bytes per rank (gradient accumulators) */
    int32_t chunks;       /* > 1: dispatch, products and combine run in so many overlapping parts */
    bool resend;          /* backward: activations recomputed at the destination */
    bool strided_pairs;   /* which of a source's pairs go where: mz_stride instead of their order */
    bool needs_weights;   /* wants gate weights in pairs when they are recorded */
    bool capacity_padded; /* buffers and messages are sized by capacity, not use */
    double capacity_factor;      /* 0: capacity is the largest count (nothing dropped) */
    int64_t capacity_min;        /* rows */
    int32_t score_combine_bytes; /* per pair, rides with combine: ||h||^2 back to the source */
    int32_t score_home_bytes;    /* per pair, to the expert's rank before backward (scope=global) */
    bool router_gradient_kept;   /* expert outputs of all pairs stay until backward */
    int score_kind;              /* lossy: the score that selects, an mz_score_kind (lrmoe.h), which
                                    numbers scores as the kernels do */
    bool drop_by_weight;         /* of a source's pairs of an expert those of least gate weight are
                                    dropped; else the last ones in order of tokens */
    const char *score_source;    /* "" none, "gate weights", "trace"; text owned by the state, set
                                    by the first call that has pairs */
    const char *label;           /* "LRMoE (our reading)" or NULL */
} mz_policy_traits;

typedef struct mz_policy {
    const char *name;
    const char *summary;
    bool needs_sizes; /* its rule weighs bytes or times: env must come from a model and a cluster */
    const mz_opt *options;
    int option_count;
    size_t options_size; /* struct filled by mz_opt_parse_list */
    /* Allocates all state in arena. */
    mz_code (*init)(const mz_policy_env *env, const void *options, mz_arena *arena, void **state,
                    mz_policy_traits *traits, mz_err *err);
    mz_code (*decide)(void *state, const mz_view *view, mz_plan *plan, mz_err *err);
    mz_code (*route)(void *state, const mz_call *call, mz_plan *plan, mz_err *err);
    /* NULL: nothing. What of a routed call reports alone ask for: kept_score and total_score, where
     * the plan does not depend on them. No part of planning, and of its time. */
    mz_code (*account)(void *state, const mz_call *call, mz_plan *plan, mz_err *err);
    void (*release)(void *state); /* NULL: all state lies in the arena. Else to be called once, and
                                     before the arena goes, for every init that succeeded */
} mz_policy;

extern const mz_policy *const mz_policies[]; /* NULL-terminated; table.c */

/* "lrmoe[keep=0.5]" -> policy and its parsed options (in arena). Unknown names: MZ_EINPUT with the
 * nearest name. What has a slash or ends in .so is the path of a plug-in (plugin.h). */
mz_code mz_policy_parse(const char *text, mz_arena *arena, const mz_policy **policy, void **options,
                        mz_err *err);

/* ---- parts that policies share ----------------------------------------------------------------
 */

/* Legality (DESIGN section 5): every pair assigned once or dropped, hosts in range, slots
 * respected, quotas within [0, n_e], backward entries within forward's sources. MZ_EINTERNAL names
 * the first violation. O(entries + S*E). */
mz_code mz_plan_check(const mz_plan *plan, const mz_load *load, const mz_policy_traits *traits,
                      mz_err *err);

/* Exact redistribution (lrmoe.md section 4): x[i] pairs of quota[e] on each instance i so that the
 * peak of base + x per rank is minimal; ties: see there. Scratch is sized for (ranks, instances).
 */
typedef struct mz_balance mz_balance;
mz_code mz_balance_create(mz_arena *arena, int32_t ranks, int32_t experts, int32_t instances,
                          mz_balance **balance, mz_err *err);
mz_code mz_balance_solve(mz_balance *balance, int32_t ranks, int32_t experts, const int32_t *begin,
                         const int32_t *rank, const int64_t *quota, const int64_t *base, int64_t *x,
                         int64_t *peak, mz_err *err);

/* Shares of `total` proportional to weight[0..n-1]: floor, then largest remainder, ties to the
 * lower index (lrmoe.md section 2). All weights 0: equal weights. share may be weight; scratch has
 * n elements. */
void mz_largest_remainder(int64_t total, const int64_t *weight, int32_t n, int64_t *share,
                          uint64_t *scratch);

/* UltraEP's order of the n pairs that a source has for one expert (balancing-systems.md 8.4): pair
 * `index` takes place (index * stride + offset) mod n, and the instance whose entries hold that
 * place; n >= 1. Every place is taken once, and neighbours in the list part. */
typedef struct mz_stride {
    int64_t pairs, stride, offset;
} mz_stride;
mz_stride mz_stride_of(int64_t pairs, int32_t expert);
int64_t mz_stride_place(const mz_stride *stride, int64_t index);

/* Rows of one (source, expert) buffer under a capacity policy: max(ceil(pairs of the source / E *
 * factor), minimum); with factor 0 the largest count of the load. */
int64_t mz_capacity_rows(const mz_policy_traits *traits, const mz_load *load, int32_t source);

/* Bounds on the rows of the busiest rank: the exact optimum for the plan's own hosts (max-flow),
 * and a proven lower bound over all placements with `slots` slots per rank, mains included (0: as
 * many as one likes; bound.c has the proof; scratch: E elements). Rows, not ratios. */
mz_code mz_bound_hosts(mz_balance *balance, const mz_plan *plan, const mz_load *load, int64_t *rows,
                       mz_err *err);
int64_t mz_bound_any(const mz_load *load, int32_t ranks, int32_t slots, int64_t *scratch);

#endif
