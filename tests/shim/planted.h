/* Kernels of planted.cu, each launched as one block; 0 or a cudaError. */
#ifndef MIZAN_TESTS_SHIM_PLANTED_H
#define MIZAN_TESTS_SHIM_PLANTED_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

int planted_neighbours(const float *from, float *to, int rounds);          /* 64 values each */
int planted_divergent(float *to);                                          /* 64 values */
int planted_absent(float *to);                                             /* 32 values */
int planted_copy(const float *from, float *to, bool wait);                 /* 128 values each */
int planted_matrices(const unsigned *from, unsigned *to, bool transposed); /* 128 words each */
int planted_past_end(float *to);                                           /* 32 values */

#ifdef __cplusplus
}
#endif
#endif
