/* One training step under one policy: from plans to a task graph, its run, and the memory it takes.
 *
 * Use, per policy: mz_step_create once; then per step mz_step_begin, for every layer call and group
 * in order (micro-batch, layer, group) mz_step_budget (only for policies with quotas) and
 * mz_step_add_call with the validated plan, then mz_step_finish, which builds the graph of the
 * whole step, runs it, and fills an outcome. Memory is reused from step to step.
 *
 * The graph (DESIGN section 4): per rank a host thread, a compute stream, and communication streams
 * for tokens, for what the policy moves, and for ZeRO's gathers and reductions of layers. (A count
 * copy to the host is part of the device's sync_s; the copy engine has no task of its own yet.)
 * Micro-batches run one after another (gradient accumulation), each forward through all layers and
 * backward; then gradient reduction, optimizer, parameter redistribution. Consecutive kernels of
 * one phase are one task with the sum of their times and launches. Every effect with a switch is a
 * field of mz_step_effects.
 *
 * Where formulas are: kernels.c (times of kernels), sizes.c, timeline*.c and budget.c (memory),
 * build_*.c (order and dependencies), layers.c (scope layers), traffic.c (bytes on the wire),
 * builder.c (rings), spread.c (which pair goes where, for --dispatch rank and node), outcome.c
 * (what a phase's time is).
 *
 * Threads: one mz_step belongs to one thread at a time. */
#ifndef MIZAN_SIM_STEP_STEP_H
#define MIZAN_SIM_STEP_STEP_H

#include "common/base/err.h"
#include "common/base/load.h"
#include "common/io/memcat.h"
#include "common/io/phase.h"
#include "sim/cluster/cluster.h"
#include "sim/cluster/work.h"
#include "sim/cost/cost.h"
#include "sim/engine/graph.h"
#include "sim/memory/memory.h"
#include "sim/model/model.h"
#include "sim/model/optimizer.h"
#include "sim/policy/policy.h"

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

typedef enum mz_dispatch { MZ_DISPATCH_PAIR, MZ_DISPATCH_RANK, MZ_DISPATCH_NODE } mz_dispatch;
/* What is simulated: a whole training step, or its routed experts alone, one phase after another,
 * as `mizan replay` executes them (replay/README.md; layers.c, timeline_layers.c). The model is
 * then what mz_model_resize makes, the step has one expert-parallel group, and nothing of the
 * machine runs beside anything else: ranks of one device take turns, exchanges meet all devices. */
typedef enum mz_scope { MZ_SCOPE_STEP, MZ_SCOPE_LAYERS } mz_scope;
typedef enum mz_recompute {
    MZ_RECOMPUTE_NONE,
    MZ_RECOMPUTE_SELECTIVE,
    MZ_RECOMPUTE_FULL
} mz_recompute;
/* Flash: scores never leave the chip. Eager: the framework's own operations, which write and keep
 * them. */
typedef enum mz_attention { MZ_ATTENTION_FLASH, MZ_ATTENTION_EAGER } mz_attention;

/* The starred effects of DESIGN section 4; all on but noise by default. */
typedef struct mz_step_effects {
    bool launches;   /* host launch costs and synchronisation points */
    bool fifo;       /* off: one queue per phase and rank, so issue order does not block */
    bool tiles;      /* grouped-GEMM tile and wave quantisation, weight-byte floor */
    bool noise;      /* seeded: persistent per device plus jitter per kernel; exchanges have none */
    bool other_work; /* attention by sequence bounds, logits and loss, norms, permutation, casts,
                        optimizer */
    bool recompute_exchange; /* recomputation that crosses the dispatch repeats its all-to-alls */
    bool planner;            /* charge planning time */
} mz_step_effects;

typedef struct mz_step_options {
    mz_scope scope;
    bool detail;  /* outcomes hold detail_s */
    int32_t zero; /* ZeRO stage 0-3 for everything but routed experts over the data-parallel
                     ranks; experts over their copies in other groups */
    int32_t ep;   /* ranks of one expert-parallel group; divides ranks */
    int64_t sequence_length; /* for attention; 0: the trace's, else 4096 */
    mz_dispatch dispatch;
    mz_recompute recompute;
    mz_attention attention;
    int64_t
        loss_tokens;  /* logits and their loss are computed for so many tokens at a time, as fused
                         linear cross-entropy does (Liger kernels, arXiv 2410.10989); 0: all */
    bool keep_logits; /* the training loop still holds a micro-batch's logits until the next ones
                         are there: through the optimizer's update */
    mz_temporaries temporaries;
    mz_network_model network;
    double flow_accuracy;
    mz_allocator allocator;
    bool
        memory_only; /* nothing is timed: no graph, no planner's cost; outcomes hold memory alone */
    bool one_group;  /* with memory_only: all groups have the loads and plans of group 0, the only
                        one that is planned, added and looked at */
    const mz_optimizer *optimizer;
    mz_step_effects effects;
    uint64_t seed;
    /* budgets of lossy policies, per rank and layer backward; < 0: what memory leaves / none */
    double budget_memory_bytes;
    double budget_network_bytes;
    const volatile sig_atomic_t *stop; /* once set, a policy's plug-in is not waited for; or NULL */
} mz_step_options;

/* The defaults: ZeRO 1, ep = ranks, AdamW, port network, pair dispatch, no recomputation. */
mz_step_options mz_step_defaults(int32_t ranks);

typedef struct mz_step_outcome {
    double time_s;             /* of the whole step */
    double moe_s;              /* worst rank: sum of its MoE-layer spans */
    double phase_s[MZ_PHASES]; /* worst rank's busy time in each phase; see outcome.c. An
                                       exchange counts from when all have entered; "launch_wait" is
                                       when a rank neither computes nor exchanges */
    double planner_s;          /* charged, critical path */
    double planner_hidden_s;   /* the same beside the step */
    int64_t tokens;            /* of the whole job */
    int64_t dispatch_bytes, combine_bytes, backward_dispatch_bytes, backward_combine_bytes;
    int64_t transfer_bytes; /* off-rank, all ranks and layers */
    int64_t between_bytes;  /* of these five, between devices; scope layers, where a device is a
                               process of a replay */
    int64_t sent_bytes, received_bytes; /* all exchanges; equal (conservation tests) */
    const double *rank_busy_s;          /* [ranks] compute stream */
    const double *detail_s; /* with options.detail: [layers + 1][ranks][MZ_PHASES] busy time; row
                               `layers`: of the whole step */
    uint64_t events;
    /* memory of this step */
    int32_t worst_rank;
    int64_t peak_bytes, at_peak[MZ_MEM_CATEGORIES], resident_bytes;
    int64_t idle_at_peak; /* of at_peak's workspace: what the caching allocator reserves
                             and no block uses */
    /* [ranks]; with one_group those of group 0, repeated: the peak; the most of two categories */
    const int64_t *rank_peak_bytes, *rank_replica_bytes, *rank_token_buffer_bytes;
    const int64_t *rank_memory_bytes; /* [ranks][MZ_MEM_CATEGORIES] the most of each */
    char peak_label[128];
    bool fits;
    char oom[256];
} mz_step_outcome;

typedef struct mz_step mz_step;

/* groups = ranks / ep. traits: of the policy, the same for all groups. */
mz_code mz_step_create(const mz_model *model, const mz_cluster *cluster,
                       const mz_step_options *options, const char *policy_name,
                       const mz_policy_traits *traits, mz_step **step, mz_err *err);
void mz_step_free(mz_step **step);

mz_code mz_step_begin(mz_step *step, const mz_step_head *head, mz_err *err);
/* Budget for the backward of this call; `load` is the group's slice. rank_rows lives until the next
 * call. */
mz_code mz_step_budget(mz_step *step, int32_t group, int32_t micro_batch, int32_t layer,
                       const mz_load *load, mz_budget *budget, mz_err *err);
/* load: the group's slice (sources = ep); pairs: the group's slice too (offsets into the job's
 * arrays) or NULL; needed for rank and node dispatch. layer counts MoE layers from 0, as everywhere
 * here. */
mz_code mz_step_add_call(mz_step *step, int32_t group, int32_t micro_batch, int32_t layer,
                         const mz_load *load, const mz_pairs *pairs, const mz_plan *plan,
                         mz_err *err);
/* One kernel that scope layers charges time for, or the copies of one exchange to a rank (work
 * MZ_WORK_COPY or MZ_WORK_SEND, rows messages of cols bytes in all). Rows and cols as
 * sim/cluster/work.h has them; products one by one for every group. */
typedef struct mz_step_charge {
    mz_phase phase;
    int32_t layer, rank; /* layer `layers`: of the whole step */
    mz_work work;
    int64_t rows, cols;
    int64_t more; /* products: k. MZ_WORK_COMBINE: rows written, MZ_WORK_INVERT: pairs */
} mz_step_charge;
/* Tells each as it is charged: products in add_call, all else in finish. For what a profile is to
 * have been calibrated for, and for tests that hold a replay's kernels against it. */
typedef void (*mz_step_charged)(void *self, const mz_step_charge *charge);
void mz_step_watch(mz_step *step, mz_step_charged charged, void *self);
/* What scope layers does between them, in finish: time of products, told before, is charged to a
 * rank; an exchange between devices; all devices are in one place, as after such an exchange, or
 * where a replay's processes meet off its clock. messages: of an exchange, the most that a device
 * receives; the numbers that go beside rows are one from every device that sends any. For tests
 * that hold these against it. */
typedef enum mz_step_event { MZ_STEP_PRODUCTS, MZ_STEP_EXCHANGE, MZ_STEP_MEET } mz_step_event;
typedef void (*mz_step_happened)(void *self, mz_step_event event, mz_phase phase, int32_t layer,
                                 int64_t messages);
void mz_step_watch_events(mz_step *step, mz_step_happened happened, void *self);

/* The outcome's pointers live until the next begin or free. */
mz_code mz_step_finish(mz_step *step, mz_step_outcome *outcome, mz_err *err);

/* Bytes that every rank holds between steps, by category; requested, before any rounding. */
void mz_step_resident(const mz_step *step, int64_t bytes[MZ_MEM_CATEGORIES]);
/* Of its weights and gradients, those of the routed experts that it owns. */
int64_t mz_step_own_experts(const mz_step *step);
/* Allocations of one rank in the step whose calls were all added, into `memory`, which the caller
 * made with mz_memory_init and ends with mz_memory_free. */
mz_code mz_step_timeline(mz_step *step, int32_t rank, mz_memory *memory, mz_err *err);

#endif
