/* Parts that the policies of this room share: block layout of mains, spreading of pairs over hosts,
 * redistribution as a flow, replica plans, selection of pairs.
 *
 * Row matrices are [S][E] row-major with S = ranks of the group. Nothing here allocates after its
 * create function; all objects live in the arena given there and belong to one thread. */
#ifndef MIZAN_SIM_POLICY_PARTS_H
#define MIZAN_SIM_POLICY_PARTS_H

#include "sim/policy/policy.h"

/* ---- remainder.c: mz_largest_remainder for many totals over the same weights
 * ---------------------*/
typedef struct mz_shares {
    const int64_t *weight; /* borrowed */
    int64_t sum, product_limit;
    double inverse;
    int32_t n, shift;
} mz_shares;
mz_shares mz_shares_of(const int64_t *weight, int32_t n);
void mz_shares_split(const mz_shares *shares, int64_t total, int64_t *share, uint64_t *scratch);

/* The least whole number not below x, where x is a product of a few binary fractions: 1.1 times 50
 * is 55. Exact up to 2^48. */
int64_t mz_rows_up(double x);
/* The greatest common divisor of a and b >= 0; the other one where one is 0. */
int64_t mz_common_divisor(int64_t a, int64_t b);

/* ---- order.c
 * order: the indices 0..n-1 by falling key, equal keys by index. scratch has n elements. No key is
 * a NaN. Loads below 2^53 are exact as keys. O(n log n). */
void mz_order_falling(const double *key, int32_t n, int32_t *order, int32_t *scratch);

/* ---- layout.c: mains ---------------------------------------------------------------------------
 * Block layout: expert e on rank e div (E/R). Where R does not divide E, the first E mod R ranks
 * hold one expert more; with R > E the first E ranks hold one each and the rest none. */
int32_t mz_mains_per_rank(int32_t ranks, int32_t experts); /* of the fullest rank */
void mz_layout_mains(int32_t ranks, int32_t experts, int32_t *main_rank);

/* Slots per rank, mains included: `wanted`, or where that is 0 the mains plus two. MZ_EINPUT names
 * the policy when the mains do not fit. */
mz_code mz_slots(const char *policy, const mz_policy_env *env, int64_t wanted, int32_t *slots,
                 mz_err *err);

/* A copy of env->domain in the arena. */
mz_code mz_copy_domains(const mz_policy_env *env, mz_arena *arena, int32_t **domain, mz_err *err);

/* One replica: `rows` pairs of the expert are meant for `rank`. */
typedef struct mz_replica {
    int32_t expert, rank;
    int64_t rows;
} mz_replica;

/* Hosts of a plan from fixed mains and a replica list (plan order): per expert the main first, then
 * its replicas. target: what total[e] leaves for the main, the replica's rows. count is scratch of
 * E elements. MZ_EINTERNAL when the plan has no room. */
mz_code mz_plan_hosts(mz_plan *plan, const int32_t *main_rank, const int64_t *total,
                      const mz_replica *replica, int32_t replicas, int32_t *count, mz_err *err);

/* Empties the plan and gives every expert its main alone; targets -1. */
void mz_plan_mains(mz_plan *plan, const int32_t *main_rank);

/* What every lossless route states: nothing dropped, all pairs kept, quota = n_e. */
void mz_plan_lossless(mz_plan *plan, const mz_load *load);
/* Fills peak_forward and peak_backward from the totals per instance. */
void mz_plan_peaks(mz_plan *plan);

mz_code mz_plan_add_move(mz_plan *plan, mz_move move, mz_err *err);

/* ---- replicate.c: UltraEP's quota solver (balancing-systems.md 8.2)
 * ------------------------------*/
typedef struct mz_replicate_rule {
    double eps;       /* aimed peak over the mean, minus one */
    double threshold; /* bt: do nothing below this ratio */
    int64_t rows_min; /* u_min: smallest quota of a replica outside the fast path */
    bool empty_mains; /* a main may give all its rows away */
    bool whole_group; /* one solve for the group instead of one per domain */
} mz_replicate_rule;
/* The defaults of the source: 0.01, 1, 1024, false, false. */
mz_replicate_rule mz_replicate_defaults(void);

typedef struct mz_replicate mz_replicate;
/* slots: the largest number per rank, mains included. */
mz_code mz_replicate_create(mz_arena *arena, const mz_policy_env *env, int32_t slots,
                            mz_replicate **replicate, mz_err *err);
/* Replicas for rows total[e], at most `extra` per rank, in plan order; *replica belongs to the
 * solver and lives until the next solve. Returns their number. */
int32_t mz_replicate_solve(mz_replicate *replicate, const mz_replicate_rule *rule, int32_t extra,
                           const int64_t *total, const mz_replica **replica);
/* Solves and sets the hosts of the plan. */
mz_code mz_replicate_plan(mz_replicate *replicate, const mz_replicate_rule *rule, int32_t extra,
                          const int64_t *total, mz_plan *plan, mz_err *err);

/* ---- moves.c ------------------------------------------------------------------------------------
 * What replicas beside fixed mains move per layer call (balancing-systems.md 8.5): weights from the
 * main, weights again before backward where `again`, gradients back to the main. With relay,
 * experts of 4 replicas and more are sent in two rounds: to min(8, floor(sqrt n)) relays, and from
 * these to the others; gradients take the same way back and are summed at the relays. */
typedef struct mz_replica_moves {
    int64_t weight_bytes, gradient_bytes;
    bool again; /* the slots are shared by the layers: weights travel again for backward */
    bool relay;
    mz_move_hide hide, hide_again, hide_gradients;
} mz_replica_moves;
/* sent: scratch of R elements. */
mz_code mz_plan_replica_moves(mz_plan *plan, const mz_replica_moves *how, int64_t *sent,
                              mz_err *err);
/* Ranks of the largest domain. */
int32_t mz_largest_domain(const mz_policy_env *env);

/* ---- placement.c: placements that last, what they cost every step and what changing them moves
 * ---- For policies whose experts live where the plan says until the next plan (SmartMoE, FlexMoE,
 * EPLB).
 */
typedef struct mz_placement mz_placement; /* hosts of every layer as its last plan left them */
mz_code mz_placement_create(mz_arena *arena, const mz_policy_env *env, int32_t slots,
                            mz_placement **placement, mz_err *err);
/* Hosts remembered for `layer`: instances of expert e are [begin[e], begin[e+1]) in rank, or NULL
 * before the first. */
const int32_t *mz_placement_hosts(const mz_placement *placement, int32_t layer,
                                  const int32_t **begin);
/* Sets the plan's hosts to those remembered, targets -1; false before there are any. */
bool mz_placement_restore(const mz_placement *placement, int32_t layer, mz_plan *plan);
/* One move marked `change` for every (expert, rank) of the plan that did not host the expert
 * before: weight_bytes + state_bytes from the nearest former host (same domain first, then the
 * lowest rank), in `phase` (MZ_MOVE_STEP where the placement outlives the micro-batch,
 * MZ_MOVE_FORWARD where every call may change it), blocking where `hide` is MZ_HIDE_NOTHING. The
 * plan's hosts are then remembered. The first placement of a layer moves nothing: training starts
 * with it. *moved counts the copies. */
mz_code mz_placement_change(mz_placement *placement, int32_t layer, int64_t weight_bytes,
                            int64_t state_bytes, mz_move_phase phase, mz_move_hide hide,
                            mz_plan *plan, int32_t *moved, mz_err *err);
/* moves.c: ring all-reduce of `bytes` over the distinct hosts (by ascending rank) of every expert
 * that has several. */
mz_code mz_plan_ring_moves(mz_plan *plan, int64_t bytes, mz_move_phase phase, mz_move_hide hide,
                           mz_err *err);

/* ---- pack.c: balanced packing and replica counts
 * --------------------------------------------------*/
typedef struct mz_pack mz_pack;
mz_code mz_pack_create(mz_arena *arena, int32_t items, int32_t bins, mz_pack **pack, mz_err *err);
/* LPT with caps: items by weight descending (ties: lower item), each to the lightest bin with a
 * free place (ties: lower bin). room[b]: places of bin b; load[b]: what it carries before, and
 * after. bin[i], place[i]: where item i went and its number there. MZ_EINTERNAL where there are
 * fewer places than items. O(items log(items * bins)). */
mz_code mz_pack_lpt(mz_pack *pack, const double *weight, int32_t items, const int32_t *room,
                    double *load, int32_t bins, int32_t *bin, int32_t *place, mz_err *err);
/* One replica each, then for every further slot one more to the largest load per replica (ties:
 * lower expert). extra (may be NULL) gets the experts of the slots beyond E in that order. experts
 * is at most `items` of create. O(slots log E). */
void mz_pack_replicate(mz_pack *pack, const int64_t *load, int32_t experts, int32_t slots,
                       int32_t *count, int32_t *extra);

/* ---- policy_symi.c
 * ------------------------------------------------------------------------------*/

/* SYMI's Algorithm 1: replicas of each expert for `slots` slots in all (>= E). popularity all zero
 * counts as equal. diff: scratch of E elements. O(E + corrections * E). */
void mz_symi_counts(const int64_t *popularity, int32_t experts, int32_t slots, int32_t *count,
                    int64_t *diff);
/* Hosts of the counts, expert by expert, slot j on rank j / slots_per_rank; targets -1. */
mz_code mz_symi_place(const int32_t *count, int32_t slots_per_rank, mz_plan *plan, mz_err *err);
/* The movement of one step: call for micro-batch 0. */
mz_code mz_symi_moves(mz_plan *plan, int64_t weight_bytes, int64_t gradient_bytes, mz_err *err);

/* Bytes per rank of one phase (gradients in, or weights out) of the paper's cost model (4.6):
 * over the host link, and over the network for static placement and for SYMI. */
typedef struct mz_symi_traffic {
    double host, network_static, network_symi;
} mz_symi_traffic;
mz_symi_traffic mz_symi_phase_bytes(int32_t experts, int32_t ranks, int32_t slots_per_rank,
                                    double expert_bytes);

/* ---- policy_laer.c
 * ------------------------------------------------------------------------------------------------
 * Fully sharded experts: every instance's weights come from all ranks before forward and before
 * backward, its gradients go back to all ranks, under the work of other layers. */
mz_code mz_restore_moves(mz_plan *plan, int64_t weight_bytes, mz_err *err);

/* ---- expand.c: from rows per instance to rows per source
 * ----------------------------------------*/
typedef enum mz_spread {
    MZ_SPREAD_EXACT,       /* instance totals equal `target`: a source's rows go to its own rank
                              first, then inside its domain, then sources in order to instances in
                              order */
    MZ_SPREAD_SHARE_LOCAL, /* balancing-systems.md 8.4: own rank first, the rest of each source in
                              proportion to what the instances still take (largest remainder);
                              totals can differ from `target` by a few rows */
    MZ_SPREAD_SHARE,       /* the same without the first stage */
    MZ_SPREAD_ORDER,       /* instance totals equal `target`: the first rows in order of sources to
                              the first instance, the next to the second */
    MZ_SPREAD_NEAR,        /* each source evenly over the instances of its domain, or over all where
                              there are none; rows left over to the first of them. `target` is not
                              used */
    MZ_SPREAD_OWN,         /* every instance takes the rows of its own rank: for experts whose
                              instances are one, or one on every rank. `target` is not used */
    MZ_SPREAD_DEAL         /* round robin over the instances, source after source: totals are even
                              to one row; `target` is not used */
} mz_spread;

typedef struct mz_entries { /* arrays of a plan */
    int64_t *total, *begin; /* [instances], [instances+1] */
    int32_t *source;
    int64_t *pairs;
} mz_entries;
mz_entries mz_plan_forward_entries(mz_plan *plan);
mz_entries mz_plan_backward_entries(mz_plan *plan);

typedef struct mz_expand mz_expand;
/* hosts: the largest number of instances of one expert. */
mz_code mz_expand_create(mz_arena *arena, const mz_policy_env *env, int32_t hosts,
                         mz_expand **expand, mz_err *err);
/* Spreads rows - minus (minus may be NULL) over the instances of the plan. O(S*E + S*instances). */
mz_code mz_expand_rows(mz_expand *expand, const mz_plan *plan, const int64_t *rows,
                       const int64_t *minus, const int64_t *target, mz_spread spread,
                       mz_entries out, mz_err *err);

/* Entries from rows that the policy has split itself: given[i] are the rows of instance i by source
 * ([S]), NULL where the instance is the only host of its expert. */
mz_code mz_expand_given(mz_expand *expand, const mz_plan *plan, const int64_t *rows,
                        const int64_t *const *given, mz_entries out, mz_err *err);

/* ---- balance.c: the flow behind mz_balance_solve
 * -------------------------------------------------*/

/* Takes the hosts of a plan; the other functions work on them until the next call. */
mz_code mz_balance_hosts(mz_balance *balance, int32_t ranks, int32_t experts, const int32_t *begin,
                         const int32_t *rank, mz_err *err);
/* Can the quotas be carried with at most cap[r] rows on rank r? base may be NULL. Exact. */
bool mz_balance_fits(mz_balance *balance, const int64_t *quota, const int64_t *base,
                     const int64_t *cap);
/* Greedy use: start with empty ranks of the given caps, then push rows of experts in any order;
 * push answers how many of them fit beside everything pushed before (which may move to other
 * hosts). */
void mz_balance_start(mz_balance *balance, const int64_t *cap);
int64_t mz_balance_push(mz_balance *balance, int32_t expert, int64_t rows);
/* mz_balance_solve on the hosts taken, where limit is not NULL with at most limit[r] rows on a rank
 * (MZ_EINTERNAL when the limits cannot carry the rows), and with wishes: local[i] rows of instance
 * i's expert have their source on its rank, near[i] in its domain (both may be NULL; so may x).
 * Among plans of least peak, local rows are placed first, then near ones, then the rest by lowest
 * rank (greedy in expert order: the peak is exact, the locality is not claimed to be the largest
 * possible). */
mz_code mz_balance_spread(mz_balance *balance, const int64_t *quota, const int64_t *base,
                          const int64_t *limit, const int64_t *local, const int64_t *near,
                          int64_t *x, int64_t *peak, mz_err *err);

/* ---- gate.c: two of each token's recorded choices, by FasterMoE's gates
 * (balancing-systems.md 6.2)
 * ---------------------------------------------------------------------------------------------- */
typedef struct mz_gate mz_gate;
typedef struct mz_kept {
    int64_t *pairs;            /* [S][E] kept pairs; owner: the caller */
    double score, total_score; /* sums of squared gate weights of kept and of all pairs */
    int64_t short_tokens;      /* tokens of two choices and more that keep fewer than two */
} mz_kept;
/* The two largest weights of each token (without weights: the first two). With `topology`, where at
 * least floor(fraction * tokens) first choices of a source lie outside its domain, its tokens keep
 * their best two inside, and that many of the largest outside first choices return as second. */
mz_code mz_gate_create(mz_arena *arena, const mz_policy_env *env, bool topology, double fraction,
                       mz_gate **gate, mz_err *err);
/* MZ_EINPUT where there are no pairs, or, with `topology`, no weights or fewer than 3 choices a
 * token. O(pairs). */
mz_code mz_gate_choose(const mz_gate *gate, const mz_pairs *pairs, mz_kept *kept, mz_err *err);

#endif
