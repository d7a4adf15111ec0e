/* What the files of calibration share. */
#ifndef MIZAN_REPLAY_CALIBRATE_INSIDE_H
#define MIZAN_REPLAY_CALIBRATE_INSIDE_H

#include "replay/calibrate.h"

typedef struct calibration {
    mz_kernels *kernels;
    mz_transport *transport;
    mz_calibration_options options;
    mz_app *app;
    mz_arena *arena;
    mz_measured *measured;
    char *inputs, *results; /* pools; results are zero at first, inputs never written */
    int64_t input_at, result_at;
    void *scratch; /* workspace of operations */
    size_t scratch_bytes;
    /* lists of pair numbers, most of them: 0, 1, 2, ...; in a random order; experts of pairs */
    int64_t *counting, *shuffled, *begin, *quota;
    int32_t *expert;
    float *weight;
    double *times;      /* [repeats] */
    double *mine, *all; /* [local ranks], [ranks] */
} calibration;

enum { CALIBRATE_PAIRS = 1 << 18, CALIBRATE_EXPERTS = 512, CALIBRATE_TOP_K = 4 };

/* One call of an operation; in and out lie in the pools. */
typedef mz_kstatus (*calibrate_run)(calibration *c, const void *sizes, char *in, char *out);

/* Median over repetitions, mean over processes. in_bytes, out_bytes: what the call touches. */
mz_code calibrate_time(calibration *c, calibrate_run run, const void *sizes, int64_t in_bytes,
                       int64_t out_bytes, double *seconds, mz_err *err);

/* Room for `most` samples of a kind. */
mz_code calibrate_begin(calibration *c, mz_work work, int32_t most, mz_err *err);
void calibrate_add(calibration *c, mz_work work, double a, double b, double bytes, double seconds);

/* Experts of the pairs, drawn from [0, experts). */
mz_code calibrate_experts(calibration *c, int32_t experts, mz_err *err);

/* Scratch of at least `bytes`. */
mz_code calibrate_scratch(calibration *c, size_t bytes, mz_err *err);
mz_code calibrate_failed(calibration *c, const char *what, mz_err *err);

mz_code calibrate_rows(calibration *c, mz_err *err);     /* calibrate_rows.c */
mz_code calibrate_products(calibration *c, mz_err *err); /* calibrate_products.c */
mz_code calibrate_copies(calibration *c, mz_err *err);   /* calibrate_rows.c: lanes */
mz_code calibrate_updates(calibration *c, mz_err *err);  /* calibrate_updates.c */
mz_code calibrate_wire(calibration *c, mz_wire *wire, mz_err *err);

#endif
