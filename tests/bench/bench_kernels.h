/* Parts of bench_kernels: memory, time, checks of what was timed, a layer's backward pass. */
#ifndef MIZAN_TESTS_BENCH_KERNELS_H
#define MIZAN_TESTS_BENCH_KERNELS_H

#include "kernels/kernels.h"

typedef struct bench {
    mz_kernels *kernels; /* as many threads as OpenBLAS would use */
    int threads;
} bench;

double bench_seconds(void);
/* Ends the program where a call failed. */
void bench_must(const bench *b, mz_kstatus status);
/* Context memory of the program's life, touched; random values in [-1/2, 1/2). */
void *bench_room(const bench *b, size_t bytes, int fill);
float *bench_floats(const bench *b, int64_t n);
void *bench_halves(const bench *b, int64_t n);

/* Plain loops in double precision beside what was timed, on some of the rows; a difference ends the
 * program with exit code 1. */
void check_product(const mz_product_args *args);
void check_norms(const mz_norms *args);
void check_scores(const mz_score_args *args);
void check_selection(const mz_selection *args);
void check_pack(const mz_pack *args);
void check_unpack(const mz_unpack *args);
void check_combine(const mz_combine *args);
void check_swiglu(const mz_swiglu *args);
/* gate_up before it was overwritten in place */
void check_swiglu_back(const mz_swiglu *args, const uint16_t *gate_up);
/* One step from `before` and no state, bf16; all of the first and last matrix. */
void check_update(const mz_update *args, const uint16_t *before);

/* The whole backward pass of a layer, full and of kept pairs alone. */
void bench_layer(const bench *b);

#endif
