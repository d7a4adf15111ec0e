/* What the files of this room share: the condensed form of a plan, the builder of tasks, sizes.
 * Nothing here is used outside sim/step.
 *
 * One mz_step holds, between begin and finish, one record per (micro-batch, MoE layer, group): the
 * integer rows of every rank, its traffic, and the time of its expert products. finish turns the
 * records into tasks. Ranks are global unless called local (0 .. ep-1 inside a group). */
#ifndef MIZAN_SIM_STEP_INSIDE_H
#define MIZAN_SIM_STEP_INSIDE_H

#include "common/base/rng.h"
#include "sim/cost/work.h"
#include "sim/engine/port.h"
#include "sim/step/step.h"

/* Device queues of a rank when order matters (effects.fifo); otherwise one per phase. ZeRO's
 * gathers and reductions have one of their own, so that a policy's transfers do not queue behind
 * them. */
typedef enum step_stream {
    STREAM_COMPUTE,
    STREAM_COMM,
    STREAM_MOVE,
    STREAM_STATE,
    STREAMS
} step_stream;

/* One fp32 number that travels with a kept pair of a lossy plan besides its rows: the weight w when
 * activations are re-sent, the router's gradient with the backward combine (lrmoe.md section 2). */
enum { PAIR_NUMBER_BYTES = 4 };

/* Rows by the way they take: ports inside and between domains; `copied` are those that this source
 * sends to other ranks of its own device, copies in its memory. */
typedef struct step_lanes {
    int64_t send_in, recv_in, send_out, recv_out, copied;
} step_lanes;

/* One rank's part of one layer call. Rows are pairs, or tokens per destination where dispatch sends
 * a token once; padded rows included when the policy pads to capacity. */
typedef struct step_rank_work {
    int64_t pairs;           /* of this source's tokens */
    int64_t rows, back_rows; /* pairs computed here */
    int64_t again_rows;      /* of back_rows: gate and up are computed again from a re-sent x */
    int64_t packed, back_packed, again_packed; /* rows this source sends, to itself included */
    step_lanes forward, backward, again;
    double expert_s, back_expert_s;
    int32_t hosted;    /* replicas here: instances that are not their expert's first */
    int32_t instances; /* all of them */
} step_rank_work;

/* One rank's share of one chunk of a call, where the policy overlaps chunks (traits.chunks > 1). A
 * lossless call's backward has the same chunks; that of a lossy one is not cut. */
typedef struct step_chunk {
    int64_t rows;
    step_lanes lanes;
    double expert_s, back_expert_s;
} step_chunk;

/* Traffic between two ranks of one call; kept only for the flow network. */
typedef struct step_message {
    int32_t src, dst;
    int64_t rows, again;
} step_message;

typedef struct step_call {
    bool present, lossy; /* lossy: backward differs from forward, so scores and selection run */
    uint32_t move_mask;  /* step_move_bit of the moves there are */
    int64_t off_rows, back_off_rows, again_off_rows;        /* rows that leave their rank */
    int64_t message, messages, back_message, back_messages; /* ranges of step->message */
    int64_t chunk_message; /* with the flow network: chunk c's are step->message from
                              chunk_end[c - 1] (the first from here) to chunk_end[c] */
    int64_t move, moves;   /* range of step->move */
    /* scope layers */
    int64_t further, furthers; /* range of step->further */
    int32_t instances;
} step_call;

static inline uint32_t step_move_bit(mz_move_phase phase, mz_move_hide hide) {
    return UINT32_C(1) << (5 * phase + hide);
}
_Static_assert(MZ_HIDE_FREE < 5 && 5 * MZ_MOVE_REDUCE_STEP + MZ_HIDE_FREE < 32,
               "every phase and hide rule has a bit");

/* Kernel times of one rank and micro-batch that follow from its tokens alone, and their launches.
 */
typedef struct step_token_times {
    double attention, attention_back, router, router_back, dense, dense_back, shared, shared_back;
    double embed, embed_back, loss, score, selective;
    double scores, scores_back, window_scores, window_scores_back; /* of full and windowed layers */
} step_token_times;

/* Values per token: query, key and value rows, attention's output; gate and up together per pair.
 */
typedef struct step_widths {
    int64_t query, key, value, output, up;
} step_widths;

typedef struct step_launches {
    int attention, attention_back, router, router_back, ffn, ffn_back;
} step_launches;

/* What one rank holds of one tensor row between steps, and what its update needs. */
typedef struct step_tensor {
    int64_t weights, gradients, optimizer, temporaries;
    double update_bytes, update_flops, update_exchange;
} step_tensor;

/* Bytes on one rank; formulas in sizes.c. */
typedef struct step_sizes {
    /* per token, from forward to the layer's backward; input: of the layer, all that full
     * recomputation keeps */
    int64_t input, attention, dense, shared, router;
    /* per token, inside one part of backward */
    int64_t attention_work, dense_work, shared_work, logits, loss_work;
    /* per pair of (query, key) of one layer, all heads: kept from forward to backward; while
     * attention runs forward, backward; 0 with flash attention */
    int64_t scores, scores_work, scores_back;
    /* per pair: a row, gate and up, the activation */
    int64_t row, gate_up, act;
    /* for the whole step */
    int64_t weights, gradients, optimizer, replicas, workspace, communication, context;
    int64_t resident;    /* their sum */
    int64_t buffers;     /* of gradients: what the policy asks for besides */
    int64_t own_experts; /* of weights and gradients: routed experts */
    int64_t temporaries; /* of the optimizer's update */
    /* replicas held from forward to the layer's backward: weights, and gradients in backward; 0:
     * slots are resident */
    int64_t replica_weights, replica_gradients;
    /* all slots of one layer where experts are sharded: weights, gradients */
    int64_t slot_weights, slot_gradients;
    int32_t ahead; /* layers whose slots are restored before their turn */
    /* weight bytes of each layer, and at [layers] of embedding, final norm and head: those that all
     * ranks hold alike, and those of the rank's experts */
    int64_t *dense_layer, *expert_layer;
    int64_t dense_weights, expert_weights; /* sums of these */
    double update_bytes;                   /* of the optimizer through the rank's memory */
    double update_flops;                   /* of its matrix products (Muon, GaLore) */
    /* the same for one replica of one layer, where replicas have optimizer state */
    double slot_update_bytes, slot_update_flops;
    /* that the update receives of matrices cut between all ranks, between those of a group, and
     * between copies of experts */
    double exchange_all, exchange_group, exchange_copies;
    int64_t shard_gradients; /* read once more for the gradient norm */
} step_sizes;

/* Rows of one kind of traffic while a call is condensed, by local source. */
typedef struct step_tally {
    int64_t *packed, *send_in, *send_out, *copied; /* [ep] */
    int64_t off_rows;
    int64_t *matrix; /* [ep][ep] or NULL */
} step_tally;

typedef struct step_exchange_mark {
    mz_task first;
    int32_t members;
} step_exchange_mark;

typedef struct step_span {
    mz_task first, last;
} step_span;

enum { NEEDS = 6 };
/* What the next compute task of a rank must wait for, besides the one before it. */
typedef struct step_needs {
    mz_task task[NEEDS];
    int count;
} step_needs;

typedef struct step_interval {
    double begin, end;
} step_interval;

/* Scope layers. Rows that reach a rank from ranks of its own device, itself included, and the
 * messages that they come in: one per (source, instance); messages that reach it from elsewhere.
 * senders: at the first rank of a device, devices that such come from to any of its ranks. */
typedef struct layers_lanes {
    int64_t lanes, rows, far, senders;
} layers_lanes;

/* One rank's part of one layer call beyond step_rank_work: what its exchanges copy within the
 * device, and the time of its products. */
typedef struct layers_work {
    layers_lanes in, out; /* of dispatch, to its instances; of combine, back to it as a source */
    layers_lanes back_in, back_out, again_in;
    int64_t listed;       /* of the source's pairs, those that are not dropped */
    int32_t again_groups; /* instances with rows computed again */
    int32_t owned;        /* experts whose first instance is here */
    int32_t back_launches;
    double up_s, down_s, back_s, again_s;
    int64_t arrived_bytes;    /* experts that its placement brings to the rank */
    int64_t reduced_bytes[2]; /* most that its reductions hold: of the call; of the step
                                 (micro-batch 0's) */
} layers_work;

/* `count` instances of an expert on `rank` beside the first. */
typedef struct layers_further {
    int32_t rank, count;
} layers_further;

struct mz_step {
    const mz_model *model;
    const mz_cluster *cluster;
    mz_step_options options;
    mz_policy_traits traits;
    int32_t ranks, ep, groups, layers, moe;
    int32_t *moe_layer;               /* [moe] model layer of each MoE layer */
    int32_t full_layer, window_layer; /* one of each kind; equal when there is but one */
    int64_t sequence, mains;
    mz_cost_effects cost;
    double decide_cost, route_cost; /* of planning one call; decide's 0 where it is hidden */
    double hidden_cost;             /* decide's where it runs beside the step */
    int32_t chunks;
    int32_t prefetch; /* layers ahead that hidden transfers are issued: 1 or 2 */
    step_launches launches;
    step_widths width;
    step_sizes sizes;

    /* this step */
    int64_t number, ordinal; /* as the trace numbers it; 0, 1, 2, ... */
    int32_t micro_batches;
    int64_t *tokens; /* [micro_batches][ranks] */
    size_t tokens_cap;
    double *score_flops; /* [micro_batches][ranks][2] of attention, full and windowed layers */
    size_t score_flops_cap;
    step_call *call; /* [micro_batches][moe][groups] */
    size_t call_cap;
    step_rank_work *work; /* [micro_batches][moe][ranks] */
    size_t work_cap;
    step_chunk *chunk; /* [micro_batches][moe][ranks][chunks] where chunks > 1 */
    size_t chunk_cap;
    int64_t *chunk_end; /* [micro_batches][moe][groups][chunks], ends of messages */
    size_t chunk_end_cap;
    step_message *message;
    size_t messages, message_cap;
    mz_move *move; /* global ranks */
    size_t moves, move_cap;
    int64_t
        *saved; /* [ranks] token buffers and replicas kept by the calls so far of a micro-batch */
    int32_t saved_micro_batch;
    int64_t *caps;  /* [ep] answer of mz_step_budget */
    mz_block *held; /* [layers + 1][buffers] of the rank whose timeline runs; see timeline.c */

    /* scratch of condense, sized for one group */
    int32_t *by_rank, *rank_begin; /* instances sorted by rank */
    step_tally tally;
    int64_t *expert_rows;      /* rows of a rank's instances */
    mz_cost_turn *expert_turn; /* of them, when their tiles are taken */
    size_t instance_cap;
    int64_t *matrix, *matrix_again; /* [ep][ep] when a matrix is needed */
    int64_t *source_rows;           /* [ep] forward pairs of one instance by source; zero between */
    int64_t *instance_again;        /* [instances] rows computed again */
    int64_t *capacity;              /* [ep] padded rows of one expert by source */
    int64_t *chunk_rows;            /* [instances] rows of one chunk */
    int64_t *cell;                  /* [ep * experts + 1] entries by (source, expert) */
    size_t cell_cap;
    int32_t *cell_rank; /* [entries] */
    int64_t *cell_pairs;
    size_t entry_cap;
    int64_t *stamp; /* [2 * ep] last token seen by rank, by domain */

    /* builder */
    mz_graph *graph;
    mz_queue *queue; /* [ranks][queues] */
    int32_t queues;
    mz_code code;
    mz_err *err;
    step_token_times *times;      /* [ranks] of the micro-batch being built */
    double *persistent;           /* [ranks] noise factor of the device */
    int64_t *drawn;               /* [ranks] jitters drawn */
    mz_task *last;                /* [ranks] last compute task */
    mz_task *device_last;         /* [ranks] by device: the last compute task of any of its ranks */
    step_needs *needs;            /* [ranks] */
    mz_task *joined;              /* [ranks] tasks of the last exchange */
    mz_task *span_first, *beside; /* [ranks] first task of a span; work beside an exchange */
    mz_task *before_dispatch, *before_products, *before_end; /* [ranks] moves awaited there */
    mz_task *prefetched[2], *due;  /* [ranks] moves ahead of time: of call m in [m % 2]; of this
                                      call */
    mz_task *arrived;              /* [chunks][ranks] dispatches of the call's chunks */
    mz_task *counted;              /* [ranks] count exchange of the rows to come, or -1 */
    mz_task *gathered;             /* [ranks] weights of the next layer (ZeRO 3) */
    mz_task *reduced, *scattered;  /* [ranks] last replica and gradient reductions that only the
                                 optimizer awaits */
    int32_t *all_ranks;            /* [ranks] 0, 1, 2, ... */
    int32_t *member;               /* [ranks] members of an exchange being collected */
    int32_t *peers_in, *peers_out; /* [ranks] other devices of the group in and out of the domain */
    double *lane[4];     /* [ranks] bytes by global rank: send/recv inside, send/recv outside */
    double *copied;      /* [ranks] bytes to other ranks of the same device */
    double *lane_out[4]; /* [ranks] the same, by member */
    bool *touched;       /* [ranks] */
    double *every[2];    /* [ranks] parts sent to, received from every rank of the group */
    bool every_used;
    mz_message *sending;
    size_t sending_cap, sendings;
    step_exchange_mark *mark;
    size_t marks, mark_cap;
    step_span *span;
    size_t spans, span_cap;
    double planner_s, hidden_s, sent, received;
    int64_t transfer_bytes, traffic_bytes[5]; /* by step_traffic */
    int64_t between_bytes;                    /* of these between devices, in scope layers */

    /* scope layers */
    layers_work *alone; /* [micro_batches][moe][ranks] */
    size_t alone_cap;
    mz_ports *ports;     /* one exchange at a time */
    double *clock;       /* [ranks] by device: when it is free */
    double *met;         /* [ranks] likewise: its clock when all were last in one place */
    int64_t *copy_lanes; /* [ranks] of the exchange being collected, by receiver */
    int64_t *far_lanes;  /* [ranks] likewise, from other devices */
    bool *between;       /* [devices][devices] of sources and of instances: rows between them */
    double *copy_bytes;
    layers_further *further;
    size_t furthers, further_cap;
    int32_t *depth;       /* [experts][ep] of a phase's moves: the longest way to the rank */
    int32_t *in, *out;    /* [experts][ep] moves to, from the rank */
    int64_t *done;        /* [experts] values of a part that are there */
    bool *ring;           /* [experts] do its moves go round? */
    uint8_t *place;       /* [moe][experts][ep] how the rank has the expert; see layers_places.c */
    uint8_t *place_now;   /* [ep] of the expert at hand */
    bool *placed;         /* [moe] some plan was there before */
    int64_t *stated;      /* [experts][ep] bytes that a change of placement is to bring there */
    int32_t *stated_from; /* whence weights come with it */
    int64_t *held_sums, *held_sum; /* [ranks] bytes of sums collected; most of one beside them */
    mz_step_charged charged;
    void *charged_self;
    mz_step_happened happened;
    void *happened_self;
    int64_t *of_expert, *kept_of_expert; /* [ep] by source, while a call is condensed */

    /* outcome */
    double *detail;                        /* [layers + 1][ranks][MZ_PHASES], or NULL */
    int64_t *rank_memory;                  /* [ranks][MZ_MEM_CATEGORIES] */
    double *busy;                          /* [ranks] */
    double *phase;                         /* [ranks][MZ_PHASES] */
    double *moe_span;                      /* [ranks] */
    int64_t *rank_peak;                    /* [ranks] */
    int64_t *rank_replicas, *rank_buffers; /* [ranks] most of these categories */
    double *begin;                         /* [tasks] */
    size_t begin_cap;
    step_interval *interval;
    size_t interval_cap;
    int32_t *order; /* tasks sorted by rank */
    size_t order_cap;
    int64_t *order_begin; /* [ranks + 1] */
    mz_arena arena;
};

/* ---- records -----------------------------------------------------------------------------------
 */

static inline step_call *step_call_at(const mz_step *s, int32_t micro_batch, int32_t moe,
                                      int32_t group) {
    return s->call + ((int64_t)micro_batch * s->moe + moe) * s->groups + group;
}
static inline step_rank_work *step_work_at(const mz_step *s, int32_t micro_batch, int32_t moe) {
    return s->work + ((int64_t)micro_batch * s->moe + moe) * s->ranks;
}
static inline step_chunk *step_chunk_at(const mz_step *s, int32_t micro_batch, int32_t moe,
                                        int32_t rank) {
    return s->chunk + (((int64_t)micro_batch * s->moe + moe) * s->ranks + rank) * s->chunks;
}
/* Did the policy decide for this micro-batch of the step? With an interval its plans last: it is
 * asked in every interval'th step, for the first micro-batch. */
static inline bool step_decided(const mz_step *s, int32_t micro_batch) {
    return s->traits.interval <= 1 || (micro_batch == 0 && s->ordinal % s->traits.interval == 0);
}
/* Part `index` of `parts` of n; spread shifts what is left over, so that many small numbers do not
 * all leave it in the same part. The parts add up to n. */
static inline int64_t step_part(int64_t n, int32_t index, int32_t parts, int64_t spread) {
    const int64_t shift = spread % parts;
    return ((index + 1) * n + shift) / parts - (index * n + shift) / parts;
}

/* One layer call of one group. */
typedef struct step_at {
    int32_t micro_batch, moe, group, layer, first, end;
    step_call *call;
    step_rank_work *work; /* [ep] */
    step_chunk *chunk;    /* [ep][chunks], or NULL */
    int64_t *chunk_end;   /* [chunks], or NULL */
} step_at;
step_at step_at_of(const mz_step *s, int32_t micro_batch, int32_t moe, int32_t group);

static inline layers_work *layers_work_at(const mz_step *s, int32_t micro_batch, int32_t moe) {
    return s->alone + ((int64_t)micro_batch * s->moe + moe) * s->ranks;
}
static inline double *step_detail_at(const mz_step *s, int32_t layer, int32_t rank,
                                     mz_phase phase) {
    return s->detail + ((int64_t)layer * s->ranks + rank) * MZ_PHASES + phase;
}
static inline bool step_alone(const mz_step *s) {
    return s->options.scope == MZ_SCOPE_LAYERS;
}

/* ---- kernels (kernels.c) -----------------------------------------------------------------------
 */

step_widths step_widths_of(const mz_model *model);
step_launches step_count_launches(const mz_step *s);
void step_token_times_of(const mz_step *s, int64_t tokens, step_token_times *times);
/* FLOPs of attention's scores, forward, of `tokens` tokens of which sequences of lengths
 * length[0 .. count-1] are known; the rest lies in sequences of the usual length. */
double step_score_flops(const mz_step *s, int32_t layer, int64_t tokens, const int64_t *length,
                        int64_t count);
void step_score_times_of(const mz_step *s, int32_t micro_batch, int32_t rank,
                         step_token_times *times);
int64_t step_loss_piece(const mz_step *s,
                        int64_t tokens); /* tokens whose logits are made at once */
int step_loss_launches(const mz_step *s, int64_t tokens);
double step_product_rate(const mz_step *s); /* FLOP/s of large products */
double step_expert_forward(const mz_step *s, const int64_t *rows, int32_t groups, int64_t total);
double step_expert_backward(const mz_step *s, const int64_t *rows, int32_t groups, int64_t total);
double step_expert_again(const mz_step *s, const int64_t *rows, int32_t groups, int64_t total);
double step_select_time(const mz_step *s, int64_t pairs);
double step_row_copies(const mz_step *s, int64_t read, int64_t written);
/* One kernel that memory binds, by what it does (sim/cost/work.h); part of effects.other_work.
 * tokens: rows that MZ_WORK_COMBINE writes. */
double step_kernel(const mz_step *s, mz_work work, int64_t rows, int64_t cols, int64_t tokens);

/* ---- sizes (sizes.c) ---------------------------------------------------------------------------
 */

mz_code step_sizes_of(mz_step *s, mz_err *err);
step_tensor step_tensor_of(const mz_step *s, const mz_tensor *tensor);

/* ---- condense (condense.c, spread.c) -----------------------------------------------------------
 */

/* Fills the call, the ranks' work and chunks of `at`. */
mz_code step_condense(mz_step *s, const mz_load *load, const mz_pairs *pairs, const mz_plan *plan,
                      const step_at *at, mz_err *err);
/* Traffic when a token crosses once per destination rank or node; fills packed and lanes of `work`
 * and adds rows to `matrix`. entry_* are the plan's forward or backward entries. */
typedef struct step_entries {
    const int64_t *begin, *pairs;
    const int32_t *source;
} step_entries;
/* Where it counts: rows of the whole call, or, with `part`, the lanes of one chunk alone (tokens
 * are cut, in order, within each source). */
typedef struct step_spread {
    int32_t first;
    bool backward;
    step_call *call;
    step_rank_work *work;
    step_chunk *part; /* [ep][chunks] */
    int32_t chunk;
} step_spread;
mz_code step_spread_tokens(mz_step *s, const mz_load *load, const mz_pairs *pairs,
                           const mz_plan *plan, step_entries entries, const step_spread *to,
                           mz_err *err);

/* Rows of each of a local rank's products into s->expert_rows, from rows by instance; how many. */
int32_t step_product_rows(mz_step *s, const int64_t *of_instance, int32_t rank, int64_t total);
/* Those of forward, padded ones included. */
int32_t step_forward_rows(mz_step *s, const mz_plan *plan, int32_t rank, int64_t total);

/* ---- builder (builder.c) -----------------------------------------------------------------------
 */

typedef struct step_join {
    step_stream stream;
    mz_phase phase;
    int32_t layer;
    bool after_compute;    /* members wait for their last compute task */
    const mz_task *also;   /* [ranks] further tasks to wait for, -1 none; or NULL */
    const mz_task *counts; /* the same: the exchange that says how many rows come */
    bool launched;         /* goes on with the kernel before it in the queue */
    bool beside;           /* other traffic does not wait for all of it: see builder.c */
} step_join;

/* A compute task of `rank`: waits for the one before and for the rank's needs. */
mz_task step_emit(mz_step *s, int32_t rank, mz_phase phase, int32_t layer, double seconds,
                  int launches);
/* The same for what effects.other_work covers: takes no time when that is off. */
mz_task step_emit_other(mz_step *s, int32_t rank, mz_phase phase, int32_t layer, double seconds,
                        int launches);
/* Other work beside the chain: it waits for the last compute task, later ones wait for it only
 * where the caller says so (or because they are behind it on the stream). */
mz_task step_emit_aside(mz_step *s, int32_t rank, mz_phase phase, int32_t layer, double seconds,
                        int launches);
void step_need(mz_step *s, int32_t rank, mz_task task);
void step_host_sync(mz_step *s, int32_t rank, mz_task after, double seconds, int32_t layer);
/* Rows or weights that stay on the rank's device: read and written once in its memory, ahead of the
 * exchange `join` of the same queue. */
void step_copy(mz_step *s, int32_t rank, double bytes, step_join join);
/* Joins all members at once; their tasks are in s->joined[rank] until the next exchange. */
void step_exchange(mz_step *s, const mz_exchange *exchange, step_join join);
/* Bytes from src to dst are added to the exchange being collected; with `every` an equal part of
 * bytes comes from (goes to) each rank of the rank's group. step_run_collected then builds it for
 * the ranks in [first, end), which must cover all ends, and clears; it returns the number of
 * members (0: nothing was collected, nothing is built) and leaves -1 in s->joined of those that
 * take no part.*/
void step_collect(mz_step *s, int32_t src, int32_t dst, double bytes);
void step_collect_every(mz_step *s, int32_t rank, double bytes, bool from_every);
int32_t step_run_collected(mz_step *s, int32_t first, int32_t end, double rounds, step_join join);
/* Ring over ranks first, first+stride, ...: every member sends `bytes` in `rounds` rounds. Where
 * the ring crosses domains of equal size, one ring per rank of a domain carries its part, as NCCL's
 * channels do, so all NICs share what leaves the domain. */
int32_t step_ring(mz_step *s, int32_t first, int32_t stride, int32_t members, double bytes,
                  double rounds, step_join join);
/* The same beside a layer's work: what gets ready in the meantime shares the ports with it. */
int32_t step_ring_beside(mz_step *s, int32_t first, int32_t stride, int32_t members, double bytes,
                         double rounds, step_join join);
void step_span_add(mz_step *s, mz_task first, mz_task last);
/* Factor of the next kernel of a rank. */
double step_noise(mz_step *s, int32_t rank);

/* ---- exchanges of a layer call (traffic.c)
 * ------------------------------------------------------- */

typedef enum step_traffic {
    TRAFFIC_DISPATCH,
    TRAFFIC_COMBINE,
    TRAFFIC_SCORES, /* of all pairs to their expert's rank, for a selection over all sources */
    TRAFFIC_BACK_DISPATCH,
    TRAFFIC_BACK_COMBINE
} step_traffic;

/* Bytes of one off-rank row, of one that is computed again. */
int64_t step_row_bytes(const mz_step *s, const step_call *call, step_traffic traffic);
int64_t step_again_bytes(const mz_step *s, const step_call *call, step_traffic traffic);
/* Bytes of a local rank by port into s->lane_out; returns those copied on its device. */
double step_fill_lanes(mz_step *s, const step_at *at, step_traffic traffic, int32_t chunk,
                       int32_t r);
/* Adds the off-rank bytes of this traffic of a call to the step's. */
void step_count_traffic(mz_step *s, const step_call *call, step_traffic traffic);
/* chunk: of the call's chunks, or WHOLE_CALL. */
enum { WHOLE_CALL = -1 };
void step_build_rows(mz_step *s, const step_at *at, step_traffic traffic, mz_phase phase,
                     int32_t chunk, const mz_task *also);
/* Every rank of the group sends `bytes` to every other. */
void step_build_counts(mz_step *s, const step_at *at, int64_t bytes);
/* Moves of one phase and hide rule, on the second communication stream, after the ranks' last
 * compute task and `also` (or NULL); number of members. */
int32_t step_build_moves(mz_step *s, const step_at *at, mz_move_phase phase, mz_move_hide hide,
                         const mz_task *also);
void step_build_step_moves(mz_step *s, int32_t group);

/* ---- parts of a step ---------------------------------------------------------------------------
 */

void step_build_forward(mz_step *s, int32_t micro_batch);
void step_build_backward(mz_step *s, int32_t micro_batch);
void step_build_tail(mz_step *s);
/* Pieces of forward that recomputation repeats; again: inside backward. */
void step_build_attention(mz_step *s, int32_t layer);
void step_build_dense(mz_step *s, int32_t layer);
void step_build_moe(mz_step *s, const step_at *at, bool again);
/* ZeRO 3: weights of a layer to all ranks, ahead of their use; ZeRO 2, 3: its gradients to shards.
 */
void step_build_layer_gather(mz_step *s, int32_t layer);
void step_build_layer_reduce(mz_step *s, int32_t layer);
void step_need_each(mz_step *s, int32_t first, int32_t end, const mz_task *task);
/* s->joined of the group into `to`, or -1 where there was no exchange. */
void step_keep_joined(mz_step *s, const step_at *at, int32_t members, mz_task *to);
/* The moves of a phase that the call's own work waits for: they block the rank, or
 * s->before_dispatch or s->before_products keep their tasks. */
void step_build_early_moves(mz_step *s, const step_at *at, mz_move_phase phase,
                            const mz_task *also);
/* The moves of call `moe` that hide behind other layers, issued now; tasks in s->prefetched. No
 * call: nothing. */
void step_prefetch(mz_step *s, int32_t micro_batch, int32_t moe, int32_t group,
                   mz_move_phase phase);
/* Those of this call, issued earlier, into s->due. */
void step_take_prefetched(mz_step *s, const step_at *at);

/* ---- routed experts alone (layers.c, timeline_layers.c)
 * ----------------------------------------------------------------------------------- */

mz_code layers_create(mz_step *s, mz_err *err);
/* Room for the calls of a step. */
mz_code layers_begin(mz_step *s, int64_t works, mz_err *err);
/* After step_condense: the ranks' lanes and products (layers_condense.c). */
mz_code layers_condense(mz_step *s, const mz_plan *plan, const step_at *at, mz_err *err);
/* A lossy call with saved activations: kept pairs of `source` that lie on an instance which had
 * `forward` of its pairs of the expert. Which pairs are kept follows from scores that nobody knows
 * here: they are taken to be spread as all of its pairs of the expert are. layers_expect first. */
void layers_expect(mz_step *s, const mz_plan *plan, int32_t expert);
int64_t layers_kept_here(const mz_step *s, int32_t source, int64_t forward);

/* What is enqueued for one rank in one phase of a layer (`layers`: of the whole step). */
typedef struct layers_burst {
    mz_step *s;
    int32_t rank;
    mz_phase phase;
    int32_t layer;
    double seconds;
    int64_t launches;
} layers_burst;
layers_burst layers_burst_of(mz_step *s, int32_t rank, mz_phase phase, int32_t layer);
void layers_add_seconds(layers_burst *b, double seconds, int64_t launches);
/* more: what mz_work_bytes calls so. Nothing where rows or cols are 0. */
void layers_add(layers_burst *b, mz_work work, int64_t rows, int64_t cols, int64_t more);
void layers_end(layers_burst *b); /* charges it */
void layers_kernel(mz_step *s, int32_t rank, mz_phase phase, int32_t layer, mz_work work,
                   int64_t rows, int64_t cols); /* a burst of one */
static inline void layers_tell(const mz_step *s, const mz_step_charge *charge) {
    if (s->charged)
        s->charged(s->charged_self, charge);
}
static inline int32_t layers_devices(const mz_step *s) {
    return s->ranks / s->cluster->ranks_per_device;
}
/* Exchanges: from no_lanes on messages are collected, `bytes` in so many messages between two
 * ranks; then the exchange runs. */
void layers_no_lanes(mz_step *s);
void layers_message(mz_step *s, int32_t src, int32_t dst, int64_t messages, double bytes);
void layers_exchange(mz_step *s, mz_phase phase, int32_t layer);
/* From here on all devices are in one place. In a replay they meet off its clock, too, and nobody
 * is charged for waiting there: replay/README.md, "Where processes meet", says where. */
void layers_meet(mz_step *s);

/* layers_places.c: the placement of a call after those before it; fills arrived_bytes. */
mz_code layers_create_places(mz_step *s, mz_err *err);
void layers_note_places(mz_step *s, const mz_plan *plan, const step_at *at);

/* layers_moves.c */
mz_code layers_create_moves(mz_step *s, mz_err *err);
bool layers_per_call(const mz_step *s); /* replicas live for a call; else what a plan says stays */
bool layers_wide(const mz_step *s); /* gradients of replicas are fp32 beside bf16 ones of mains */
int64_t layers_cut(const mz_step *s, int32_t rank);
/* That part of all experts of a layer, in bf16. */
int64_t layers_cut_bytes(const mz_step *s, int32_t rank);
/* Before a call's forward, once, before move_weights: an expert that its placement brings is
 * received beside the slots, then stored. */
void layers_place(mz_step *s, const step_at *at);
void layers_move_weights(mz_step *s, const step_at *at, mz_move_phase phase);
void layers_reduce(mz_step *s, const step_at *at, mz_move_phase phase);
/* After the update of MoE layers [first, end): fresh weights of slots without optimizer state. */
void layers_refresh(mz_step *s, int32_t first, int32_t end);

/* Runs the step and fills all of the outcome but memory. */
void layers_run(mz_step *s, mz_step_outcome *outcome);

/* ---- memory (timeline.c, budget.c) -------------------------------------------------------------
 */

mz_code step_timeline_init(mz_step *s, mz_err *err);
/* Bytes that stay from forward to backward of one MoE call besides per-token activations. */
int64_t step_saved_of_call(const mz_step *s, const step_call *call, const step_rank_work *work);
/* Pairs of (query, key) in the attention scores of a rank's micro-batch. */
int64_t step_score_pairs(const mz_step *s, int32_t micro_batch, int32_t rank);
/* More than all activations of one rank's micro-batch, `row` counted over micro-batches and ranks,
 * take; more than all buffers of so many pairs in every layer take. */
double step_most_token_bytes(const mz_step *s, int64_t row);
double step_most_pair_bytes(const mz_step *s, int64_t pairs);
/* Kept for a rank's tokens from a layer's forward to its backward without recomputation, pairs and
 * attention scores apart; kept through the whole step. */
int64_t step_layer_tokens(const mz_step *s, int32_t layer, int64_t tokens);
int64_t step_held_all_step(const mz_step *s, int32_t micro_batch, int32_t rank);
int64_t step_saved_per_pair(const mz_step *s);
/* Per pair of a source where a quota binds: from forward on, and in the layer's backward. */
int64_t step_selection_per_pair(const mz_step *s);
/* ZeRO 2, 3: a layer's full gradient before it is scattered. ZeRO 3: its full weights. */
int64_t step_unscattered(const mz_step *s, int32_t layer);
int64_t step_gathered(const mz_step *s, int32_t layer);
int64_t step_capacity(const mz_step *s); /* device memory that one rank may use */
mz_code step_memory(mz_step *s, mz_step_outcome *outcome, mz_err *err);
/* Kept pairs for which a rank has room in the backward of a layer whose plan is yet to be made. */
int64_t step_rank_budget(const mz_step *s, int32_t group, int32_t micro_batch, int32_t layer,
                         const mz_load *load, int32_t rank);

/* ---- outcome (outcome.c) -----------------------------------------------------------------------
 */

void step_clear_detail(mz_step *s);
void step_fill_traffic(const mz_step *s, mz_step_outcome *outcome);

mz_code step_collect_outcome(mz_step *s, const mz_graph_result *result, mz_step_outcome *outcome,
                             mz_err *err);

#endif
