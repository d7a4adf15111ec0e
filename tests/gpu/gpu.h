/* The program of tests/gpu/run: checks (main.c) and timings (layer.c, timing.c) of the CUDA backend
 * on a device, or on the emulated one with small shapes. */
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
    int32_t *expert, *chosen;                                       /* [pairs] */
    float *score, *norm, *logits, *router_weight;                   /* fp32 */
    void *x, *packed, *gate_up, *hidden, *dhidden, *dgate_up, *out; /* rows as their names say */
    void **up, **down, **gradient, **wide_gradient;                 /* [experts] pointers */
    void *parameters, *gradients, *wide_gradients;                  /* of `up`, one piece */
    float *m, *v, *row, *col;
    void *workspace;
    size_t workspace_bytes;
} layer;

/* Every pair's expert by the shape's distribution, and where each expert's pairs begin; arrays of
 * [tokens * k] and [experts+1]. False: no memory. */
bool draw_pairs(const shape *s, uint64_t *state, int32_t *expert, int64_t *begin);
mz_kstatus layer_open(mz_kernels *k, const shape *s, uint64_t seed, layer *l);
void layer_close(layer *l);

/* ---- timings (timing.c) -------------------------------------------------------------------------
 */
/* What an operation is to reach at least. */
typedef struct goal {
    enum { GOAL_NONE, GOAL_COPY_SHARE, GOAL_FLOPS } kind;
    double value; /* of the measured copy's bytes/s; FLOP/s */
} goal;

typedef struct timing {
    const char *operation, *shape;
    goal goal;
    double seconds;      /* NaN: refused, `message` says why */
    double flops, bytes; /* of one call: the least possible */
    char message[160];
} timing;

enum { TIMINGS_MOST = 256 };
typedef struct timings {
    timing at[TIMINGS_MOST];
    int n;
    double copy_rate, matrix_rate; /* measured bytes/s (both ways) and FLOP/s; 0: not */
    bool cut;                      /* out of time */
} timings;

/* Times all operations on the shapes until `deadline` (now_seconds). small: one call each. failed:
 * lists of checks that failed, each between spaces; what they check is not timed. */
mz_kstatus time_all(mz_kernels *k, bool small, uint64_t seed, double deadline, const char *failed,
                    timings *t);
double now_seconds(void);
/* The shapes timed, and their counts for peers: one line each, name, sizes, then pairs of every
 * expert, tab-separated. */
bool write_counts(bool small, uint64_t seed, FILE *file);

#endif
