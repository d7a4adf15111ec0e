/* What `mizan calibrate` measured of a machine: per kind of work a fitted model and the samples
 * behind it. README.md in profiles/ has the JSON.
 *
 * A fit: seconds = sum of term[i] * feature[i], times a correction. The features of a call are
 * (1, rows, bytes) for kernels that memory binds and (1, n k, m (n + k), m n k) for one tile of m
 * rows of a product; terms are not negative. The correction is what the samples near in the
 * logarithms of the sizes say of measured over fitted, in one of two ways:
 * - between samples: a mean weighted by the inverse fourth power of the distance d (Shepard, 1968),
 *   exact at samples, the nearest one's outside. For kinds whose ratios are a matter of size;
 * - smooth: the level here of a plane through the logarithms of the ratios by least squares with
 *   weights 1 / (1 + d^2)^2 (Cleveland, 1979), outside the sizes sampled as at their border. For
 *   kinds whose ratios are noise, as those of products are on a machine that others share: it
 *   averages many of them, where the nearest one's error would be that of every prediction.
 * A fit is smooth where that tells samples it has not seen at least as well, but for a twentieth of
 * the root of the mean squared error of logarithms, each sample left out in turn. Below
 * MZ_FIT_SMOOTHED_LEAST samples: between them. A profile may have MZ_FIT_SAMPLES_MOST of a kind. */
#ifndef MIZAN_SIM_CLUSTER_MEASURED_H
#define MIZAN_SIM_CLUSTER_MEASURED_H

#include "common/base/arena.h"
#include "common/base/err.h"
#include "sim/cluster/work.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

enum { MZ_FIT_TERMS = 4, MZ_FIT_SIZES = 3, MZ_FIT_SMOOTHED_LEAST = 16, MZ_FIT_SAMPLES_MOST = 4096 };

typedef struct mz_fit_sample {
    double size[MZ_FIT_SIZES];  /* rows, cols, bytes; or m, n, k */
    double place[MZ_FIT_SIZES]; /* log(1 + size) */
    double seconds, ratio;      /* measured; measured over fitted */
    double log_ratio;
} mz_fit_sample;

typedef struct mz_fit {
    double term[MZ_FIT_TERMS];
    int32_t samples; /* 0: not measured */
    mz_fit_sample *sample;
    /* of mz_fit_finish */
    bool smooth;                                    /* the correction's way */
    double least[MZ_FIT_SIZES], most[MZ_FIT_SIZES]; /* places of samples */
} mz_fit;

/* How a product is cut into tiles that the workers take in turn: at most so many rows of a group,
 * so much of its weight's sides n and k; 0: all. */
typedef struct mz_tiling {
    int32_t rows, n, k;
} mz_tiling;

/* What `mizan calibrate --refresh` made of the seconds since they were measured. */
typedef struct mz_rescaled {
    char at[32];                 /* time of the last one, UTC; empty: never */
    double product, rows, cache; /* factors of all together */
} mz_rescaled;

typedef struct mz_measured {
    char machine[256], backend[16], transport[16];
    int32_t rounds;             /* over all samples; 0: not known */
    double spent_s;             /* by them; 0: not known */
    int32_t processes, workers; /* workers: threads or SMs that take tiles side by side */
    double alone;   /* part of its time that a tile takes while the other workers idle: (0, 1] */
    double call_s;  /* of one product beside its tiles */
    double probe_s; /* replay/probe.h, median while all was measured; 0: not probed */
    /* means of it, of rows packed from memory to memory and of short rows packed out of a cache
       (replay/probe.h); 0: not known */
    double probe_mean_s, rows_mean_s, cache_mean_s;
    double uneven; /* by how much of the mean the slowest process lags behind it after some 30 ms of
                      equal work of all; 0: one process, or not known */
    mz_rescaled rescaled;
    mz_fit fit[MZ_WORKS];
    mz_tiling tiling[MZ_WORKS]; /* of products */
} mz_measured;

/* Features of sizes as above; returns their number. */
int32_t mz_fit_features(mz_work work, const double size[MZ_FIT_SIZES],
                        double feature[MZ_FIT_TERMS]);
/* Places and ratios of the samples from sizes, seconds and terms; the correction's way.
 * O(samples^2), some ms for products. */
void mz_fit_finish(mz_fit *fit, mz_work work);
/* Seconds of one call (one tile) of a finished fit with samples. O(samples). */
double mz_fit_seconds(const mz_fit *fit, mz_work work, const double size[MZ_FIT_SIZES]);

bool mz_on_host(const mz_measured *measured); /* its products are those of kernels/host */

/* A side of a product cut in `count` tiles of `part` and, where it does not come out even, a rest.
 * most: of a tile; 0: all of the side. CUDA cuts whole tiles, the host (kernels/host/product.c) as
 * few as it takes, as equal as multiples of 8 let them be. */
typedef struct mz_cut {
    int64_t count[2], part[2]; /* whole ones; the rest */
} mz_cut;
mz_cut mz_cut_side(const mz_measured *measured, int64_t side, int32_t most);

/* Whether there are samples of about such a size: no side of a product's weight [n][k], or of the
 * part of it in a tile, is less than half of the least one sampled or more than twice the greatest.
 * A kind that was not measured has nothing to go beyond. O(samples). */
bool mz_measured_reaches(const mz_measured *measured, mz_work product, int64_t n, int64_t k);

/* The most rows met in a call of each kind of kernel whose size are its rows, in a tile of each
 * kind of product; 0: none were. */
typedef struct mz_rows_met {
    int64_t most[MZ_WORKS];
} mz_rows_met;

/* Notes a call of so many rows, of a product as it is cut into tiles; as the kind whose samples it
 * is timed by. Kinds with other sizes (copies, sums, conversions, updates) are not noted. O(1). */
void mz_rows_meet(mz_rows_met *met, const mz_measured *measured, mz_work work, int64_t rows);
/* Whether some kind's largest call has less than half of the least rows sampled or more than twice
 * the most. Smaller calls beside it say nothing: they take no longer than the least sample, and the
 * larger ones take the time. Writes the kind that is farthest out, what it met and what was
 * sampled, and how many others there are: "pack of 70000 rows (16 to 4096 calibrated) and 2 other
 * kinds". O(samples). */
bool mz_measured_rows_outside(const mz_measured *measured, const mz_rows_met *met, char *text,
                              size_t size);

/* The object "measured" of a profile. Unknown kinds and fields, negative numbers, lists of unequal
 * length: MZ_EINPUT with the place. */
mz_code mz_measured_read(json_t *object, const char *where, mz_arena *arena, mz_measured **measured,
                         mz_err *err);
json_t *mz_measured_json(const mz_measured *measured); /* NULL when memory is short */

#endif
