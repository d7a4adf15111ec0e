/* Kernels of planted.cu, each but planted_blocks launched as one block; 0 or a cudaError. */
#ifndef MIZAN_TESTS_SHIM_PLANTED_H
#define MIZAN_TESTS_SHIM_PLANTED_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

int planted_neighbours(const float *from, float *to, int rounds); /* 64 values each */
int planted_divergent(float *to);                                 /* 64 values */
int planted_write(float *to, bool default_stream);                /* 32 values */
int planted_blocks(unsigned *to, int blocks, bool atomic);        /* adds their number to *to */
int planted_absent(float *to);                                    /* 32 values */
int planted_copy(const float *from, float *to, bool wait);        /* 128 values each */
int planted_matrices(const unsigned *from, unsigned *to, bool transposed); /* 128 words each */
int planted_past_end(float *to);                                           /* 32 values */

/* A product over a pipeline of one slot: to[64][16] = the sum over 3 rounds of a[64][64]
 * b[16][64]^T, bf16, with one mistake. */
typedef enum planted_mistake {
    NO_MISTAKE,
    NO_FULL_WAIT,
    NO_EMPTY_WAIT,
    EARLY_RELEASE, /* of the slot, before its products were waited for */
    MISSING_ARRIVAL,
    NO_SYNC_OF_BARRIERS,
    NO_SWIZZLE,
    MISALIGNED_SLOT,
    WRONG_STRIDE,
    NO_PROXY_FENCE,
    NO_WGMMA_FENCE,
    NO_COMMIT,
    EARLY_READ,  /* of a sum in flight */
    EARLY_WRITE, /* to a sum in flight */
    WARPS_DIFFER,
    TOO_MANY_REGISTERS,
    MISTAKES
} planted_mistake;
enum { PLANTED_ROUNDS = 3, PLANTED_LINES = 64, PLANTED_COLS = 16, PLANTED_DEPTH = 64 };
int planted_product(const unsigned short *a, const unsigned short *b, float *to,
                    planted_mistake mistake);

#ifdef __cplusplus
}
#endif
#endif
