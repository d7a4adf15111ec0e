/* The operations of kernels.h in double precision: plain loops written from the formulas
 * (kernels.h, lrmoe.md, moe-variants-and-optimizers.md), not from an implementation. */
#ifndef MIZAN_TESTS_KERNELS_REFERENCE_H
#define MIZAN_TESTS_KERNELS_REFERENCE_H

#include "kernels/kernels.h"

double ref_bf16(double x);                  /* nearest bf16, ties to even */
double ref_stored(mz_dtype type, double x); /* nearest fp32 or bf16 */
/* Philox4x32-10 of counter (a low, a high, b, c) under key seed. */
void ref_philox(uint64_t seed, uint64_t a, uint32_t b, uint32_t c, uint32_t out[4]);
/* The number in (0, 1] that is drawn for a pair, of 24 bits. */
double ref_draw(uint64_t seed, uint64_t pair);
/* The 16 random bits of an element of a parameter. */
uint32_t ref_element_bits(uint64_t seed, uint64_t tensor, uint64_t step, uint64_t element);

double ref_dot(const double *a, const double *b, int64_t n);
double ref_silu(double u);
double ref_silu_slope(double u);

/* Positions 0 .. n-1 by falling value, ties to the lower position. */
void ref_order(const double *value, int64_t n, int64_t *order);

/* c[m][n] = a[m][k] w[n][k]^T; c[m][k] = a[m][n] w[n][k]; w[n][k] += a[m][n]^T c[m][k]. */
void ref_forward(int64_t m, int64_t n, int64_t k, const double *a, const double *w, double *c);
void ref_dgrad(int64_t m, int64_t n, int64_t k, const double *a, const double *w, double *c);
void ref_wgrad(int64_t m, int64_t n, int64_t k, const double *a, const double *c, double *w);

/* A router of host arrays in double. Active pairs are dense: weight[t][e], chosen[t][e] the slot
 * (fixed kinds: 0 = best; variable: place in the list) or -1. */
typedef struct ref_router {
    const mz_router *args; /* settings; its arrays are not read */
    const double *logits, *bias, *gain, *token_share;
    const int64_t *count;
    double *weight; /* [tokens][E] */
    int32_t *slot;  /* [tokens][E] */
} ref_router;
void ref_route(ref_router *r); /* chooses and weighs */
void ref_weigh(ref_router *r); /* weighs again, keeps the choice */
double ref_balance(const ref_router *r);
double ref_z(const ref_router *r);

/* Matrices of an optimizer and their state, [matrices][rows][cols], row [matrices][rows], col
 * [matrices][cols]; what the settings do not keep may be NULL. g: already scaled. */
typedef struct ref_update {
    const mz_update *args;
    double *p, *g, *m, *v, *row, *col;
    double *u;      /* the update of the last step, without rate and decay */
    double divisor; /* of the last clip */
} ref_update;

/* Step t of all kinds but Muon, from 1. */
void ref_step(ref_update *s, int64_t t);

#endif
