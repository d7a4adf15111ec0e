/* What the files of calibration share. */
#ifndef MIZAN_REPLAY_CALIBRATE_INSIDE_H
#define MIZAN_REPLAY_CALIBRATE_INSIDE_H

#include "replay/calibrate.h"
#include "replay/probe.h"

/* Times of the samples of a kind in all rounds. */
typedef struct calibrate_series {
    double *value;  /* [most][each] */
    int32_t *count; /* [most] values so far */
    int32_t most, each;
} calibrate_series;

typedef struct calibrate_seconds {
    double *value;
    size_t count, cap;
} calibrate_seconds;

/* Beside the kinds of work: messages between processes; products on one worker, sizes kind, n, k;
 * few tiles and many of one size, size tiles of a worker. */
enum { CALIBRATE_WIRE = MZ_WORKS, CALIBRATE_ALONE, CALIBRATE_CALL, CALIBRATE_KINDS };

/* Blocks of which short parts are taken: as a replay's own they are too short for the huge pages
 * that an allocator has for long ones. */
enum { CALIBRATE_BLOCK = 15 << 20, CALIBRATE_BLOCKS = 8 };

typedef struct calibrate_blocks {
    char *block[CALIBRATE_BLOCKS];
    int64_t at; /* bytes through all of them */
} calibrate_blocks;

typedef struct calibration {
    mz_kernels *kernels;
    mz_transport *transport;
    mz_calibration_options options;
    mz_app *app;
    mz_arena *arena;
    mz_measured *measured;
    char *inputs, *results; /* pools; results are zero at first */
    int64_t input_at, result_at;
    calibrate_blocks short_inputs, short_results; /* likewise */
    int32_t blocks;                               /* of each; 0: two do not fit beside the pools */
    void *scratch;                                /* workspace of operations */
    size_t scratch_bytes;
    /* lists of pair numbers, most of them: 0, 1, 2, ...; in a random order; experts of pairs */
    int64_t *counting, *shuffled, *begin, *quota;
    int32_t *expert;
    float *weight;
    double *mine, *all; /* [local ranks], [ranks] */
    int32_t round;
    double spent_s; /* by all rounds so far and what came before */
    calibrate_series series[CALIBRATE_KINDS];
    mz_fit beside[CALIBRATE_KINDS - MZ_WORKS];
    mz_probe *probe;
    calibrate_seconds probed[MZ_SPEEDS]; /* so far */
    calibrate_seconds lag; /* of the slowest process, of the mean, stretch by stretch */
    double *stretch;       /* [processes] seconds of the samples since the last one */
    int64_t calls;         /* samples so far */
    mz_err exchange_err;   /* of an exchange among the samples that failed */
    double single_call_s;  /* of a product beside its only tile */
} calibration;

enum { CALIBRATE_PAIRS = 1 << 18, CALIBRATE_EXPERTS = 512, CALIBRATE_TOP_K = 4 };

/* One call of an operation; in and out lie in the pools. */
typedef mz_kstatus (*calibrate_run)(calibration *c, const void *sizes, char *in, char *out);

/* What is timed. Operands lie where nobody has been for long, but for what the kernel before has
 * made of the input; results where nobody will be soon. */
typedef struct calibrate_call {
    calibrate_run bind; /* prepares a call on these parts, outside the clock; NULL: nothing to do */
    calibrate_run run;
    const void *sizes;
    int64_t in_bytes, out_bytes; /* what a call touches */
    int64_t made_at, made_bytes; /* of the input */
    bool received;               /* made by the messages of an exchange, not by a kernel */
    bool each_rank;              /* timed as a phase of a step has it: all inputs are made, then
                                    comes a call for every rank of the process, the host
                                    on its own for a moment before each; no bind */
} calibrate_call;

/* MZ_EABORTED once the user has asked for the end. */
mz_code calibrate_go_on(const calibration *c, mz_err *err);
/* One sample of this round: mean over processes. */
mz_code calibrate_time(calibration *c, const calibrate_call *call, double *seconds, mz_err *err);

/* The same without probes in between. */
mz_code calibrate_sample(calibration *c, const calibrate_call *call, double *seconds, mz_err *err);

/* Room for `most` samples of a kind, the first time. kind: of mz_work, or CALIBRATE_... */
mz_code calibrate_begin(calibration *c, int kind, int32_t most, mz_err *err);
/* A round's time of the sample of these sizes. */
void calibrate_add(calibration *c, int kind, double a, double b, double bytes, double seconds);
/* Of sample i in the rounds so far, the fastest and the slowest of three or more left out. */
double calibrate_mean(calibration *c, int kind, int32_t i);

/* Experts of the pairs, drawn from [0, experts). */
mz_code calibrate_experts(calibration *c, int32_t experts, mz_err *err);

/* Scratch of at least `bytes`. */
mz_code calibrate_scratch(calibration *c, size_t bytes, mz_err *err);
mz_code calibrate_failed(calibration *c, const char *what, mz_err *err);

mz_code calibrate_rows(calibration *c, mz_err *err);     /* calibrate_rows.c */
mz_code calibrate_products(calibration *c, mz_err *err); /* calibrate_products.c */
void calibrate_alone(calibration *c);                    /* calibrate_products.c */
mz_code calibrate_updates(calibration *c, mz_err *err);  /* calibrate_updates.c */
mz_code calibrate_copies(calibration *c, mz_err *err);   /* calibrate_lanes.c */
mz_code calibrate_wire(calibration *c, mz_err *err);     /* calibrate_lanes.c */

/* calibrate_speed.c: one more time of a probe; many of all in turn; what they come to. Rows are
 * left out where pools are too small for them. */
mz_code calibrate_probe(calibration *c, mz_speed speed, mz_err *err);
mz_code calibrate_pieces(calibration *c, mz_err *err);
/* After every sample: how far the slowest process lags behind the mean, over stretches of as much
 * work as stands between two exchanges of a layer. */
mz_code calibrate_note_lag(calibration *c, mz_err *err);
void calibrate_references(calibration *c);

#endif
