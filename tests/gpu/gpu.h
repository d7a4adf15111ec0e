/* The program of tests/gpu/run: checks (main.c) and timings of the CUDA backend (layer.c: what they
 * run on; operations.c, backward.c: what runs; timing.c, sampled.c, judge.c) on a device, or on the
 * emulated one with small shapes. */
#ifndef MIZAN_TESTS_GPU_GPU_H
#define MIZAN_TESTS_GPU_GPU_H

#include "tests/kernels/rig.h"

#include <stdio.h>

extern const check checks_of_vendor[]; /* check_vendor.c */

/* ---- a layer to time (layer.c) ------------------------------------------------------------------
 */
typedef struct shape {
    const char *name;
    int64_t tokens, hidden, intermediate;
    int32_t experts, k;
    bool skewed; /* expert e draws pairs in proportion to (e + 1)^-0.8, else all the same */
    bool large;  /* as the goals of products want it, or a small one that stands for it */
} shape;

enum { LAYER_BUFFERS = 64 };

/* Buffers of one MoE layer in context memory, bf16 unless said otherwise. */
typedef struct layer {
    mz_kernels *kernels;
    shape shape;
    int64_t pairs;
    void *buffer[LAYER_BUFFERS]; /* everything below, to free */
    int buffers;
    int64_t *begin_host; /* (host) [experts+1] */
    int64_t *begin, *order, *kept, *kept_begin, *quota, *position;
    int64_t *count, *length, *sums, *arranged; /* [experts], [pairs], [pairs+1], [pairs] */
    mz_segment *segment;                       /* [2 experts]: two hosts for every expert */
    int32_t *expert, *chosen;                  /* [pairs] */
    float *score, *drawn, *norm, *dot, *logits, *router_weight;     /* fp32 */
    void *x, *packed, *gate_up, *hidden, *dhidden, *dgate_up, *out; /* rows as their names say */
    /* routers with any number of pairs a token: [tokens * experts], [tokens+1]; few logits > 0 */
    float *few_logits, *listed_weight, *gate_norm, *bias, *loss;
    int32_t *listed;
    int64_t *token_begin;
    /* the whole backward pass: place [pairs] of each pair in expert order */
    void *dy, *rows_x, *rows_gate_up, *dx;
    int32_t *place;
    int64_t *row_position;
    float *grad_norm2;
    void **up, **down, **gradient, **down_gradient, **wide_gradient; /* [experts] pointers */
    void *parameters, *gradients, *wide_gradients;                   /* of `up`, one piece */
    void *down_parameters, *down_gradients;
    float *m, *v, *row, *col;
    float rate; /* of the optimizers' steps */
    void *workspace;
    size_t workspace_bytes;
    size_t short_of; /* bytes that an operation wants instead; 0: none does */
} layer;

/* Every pair's expert by the shape's distribution, and where each expert's pairs begin; arrays of
 * [tokens * k] and [experts+1]. False: no memory. */
bool draw_pairs(const shape *s, uint64_t *state, int32_t *expert, int64_t *begin);
mz_kstatus layer_open(mz_kernels *k, const shape *s, uint64_t seed, layer *l);
void layer_close(layer *l);
/* False: this much scratch was not set aside, which is a mistake of this program, not of a device
 * that has little memory; noted in short_of, and the operation is refused (MZ_K_EINVAL). */
bool scratch_fits(layer *l, size_t bytes);
mz_kstatus run_product(layer *l, const mz_product_args *args); /* where its scratch fits */

/* ---- operations (operations.c, backward.c) ------------------------------------------------------
 * Each enqueues itself once and says what it costs at least. */
typedef struct cost {
    double flops, bytes;
} cost;
typedef mz_kstatus operation_run(layer *l, cost *c);
operation_run backward_full, backward_kept, backward_resend;

/* ---- what they wrote, held against double precision (sampled.c) ---------------------------------
 */
typedef struct probe {
    layer *l;
    operation_run *run;
    uint64_t random;
    mz_kstatus status; /* of what it asked of the device; MZ_K_ENOMEM also of the host's memory */
    void *host[128];   /* copies, to free */
    int copies;
    int checked;
    bool wrong;
    char message[160];
} probe;
/* Poisons what the operation writes, runs it, and compares values drawn with `random`. */
typedef void operation_check(probe *p);
operation_check check_copy, check_zero, check_widen, check_narrow, check_norms, check_dots,
    check_scores, check_drawn_scores, check_grouping, check_counts, check_sums, check_places,
    check_arranged, check_selection, check_scaled_selection, check_packed, check_scaled,
    check_unpacked, check_combined, check_swiglu_forward, check_swiglu_backward, check_gate_norms,
    check_gate_norms_backward, check_up_forward, check_up_dgrad, check_up_wgrad,
    check_up_wgrad_wide, check_down_forward, check_down_dgrad, check_down_wgrad, check_plain,
    check_expert_up, check_softmax, check_softmax_backward, check_sigmoid, check_sigmoid_backward,
    check_aoe, check_aoe_backward, check_relu, check_relu_backward, check_routing_free,
    check_routing_free_backward, check_losses, check_skewadam_factored, check_skewadam_momentum,
    check_skewadam_full, check_adamw, check_adafactor, check_lion, check_muon, check_backward_full,
    check_backward_kept, check_backward_resend;

/* ---- timings and what they are worth (judge.c)
 * ---------------------------------------------------
 */
/* What an operation is to reach. */
typedef struct goal {
    enum { GOAL_NONE, GOAL_COPY_SHARE, GOAL_FLOPS, GOAL_TIME_SHARE } kind;
    double value;   /* at least: of the measured copy's bytes/s; FLOP/s. At most: of `of`'s time */
    const char *of; /* the operation that a share of time is of, on the same shape */
} goal;

typedef struct timing {
    const char *operation, *shape;
    goal goal;
    double seconds;      /* NaN: not timed, `message` says why */
    double flops, bytes; /* of one call: the least possible */
    int checked;         /* values that were held against double precision afterwards */
    bool held;           /* all that were to be, and they are right; else it has no verdict */
    bool wrong;          /* one was not right, or it was refused: `message` says which */
    char message[160];
} timing;

enum { TIMINGS_MOST = 512 };
typedef struct timings {
    timing at[TIMINGS_MOST];
    int n;
    double copy_rate, matrix_rate; /* measured bytes/s (both ways) and FLOP/s; 0: not */
    bool cut;                      /* out of time */
} timings;

/* Seconds that the ceilings allow at least; 0: they say nothing. */
double floor_of(const timings *t, const timing *one);
/* How much of its goal's quantity an operation shows; NaN: not timed, or what it is held against.
 */
double reached(const timings *t, const timing *one);
/* "met", "missed", "no goal", "not known" (nothing to hold its time against), "not run", "wrong",
 * "not held" (a time, but of results that nothing vouches for). */
const char *verdict(const timings *t, const timing *one);
int count_verdicts(const timings *t, const char *which, bool with_goal); /* false: of all rows */
/* 1: a result is wrong or not held or, on a device that is none of the emulated (`small`), a goal
 * was missed. */
int exit_of(const timings *t, bool small);
/* peers: file of their times, or NULL. */
void print_table(FILE *file, const timings *t, const char *peers, bool small);
void print_json(FILE *json, const timings *t, bool small);
void print_text(FILE *json, const char *text); /* quoted */

/* ---- the table of operations (operations.c)
 * ------------------------------------------------------
 */
typedef struct operation {
    const char *name, *list; /* list: of the checks that it must have passed; NULL: none */
    operation_run *run;
    operation_check *check;
    const goal *goal; /* or NULL */
} operation;
extern const operation operations[];
extern const int operations_count;
goal goal_of(const layer *l, const operation *o);
int64_t gate_rank(const layer *l); /* r of mz_gate_norms */
enum { DRAW_SEED = 5 };            /* of scores that are drawn, and the weights of a sample */
/* On the layer's buffers. */
mz_score_args scores_of(const layer *l, mz_score kind);
mz_router router_of(const layer *l, mz_router_kind kind);

/* ---- measuring (timing.c) -----------------------------------------------------------------------
 */
/* Times all operations on the shapes until `deadline` (now_seconds). small: one call each. failed:
 * lists of checks that failed, each between spaces; what they check is not timed. */
mz_kstatus time_all(mz_kernels *k, bool small, uint64_t seed, double deadline, const char *failed,
                    timings *t);
double now_seconds(void);
/* Seconds that time_all is to take on a device like an H200, by the bytes and FLOPs of its rows. */
double time_planned(bool small, uint64_t seed, int *rows);
/* The shapes timed, and their counts for peers: one line each, name, sizes, then pairs of every
 * expert, tab-separated. */
bool write_counts(bool small, uint64_t seed, FILE *file);

#endif
