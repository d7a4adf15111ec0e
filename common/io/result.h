/* The result file that simulator and replay write: one schema, JSON on stdout and HDF5 on disk.
 * Keys are a contract (mizan-result/1): they never change meaning. Bytes are bytes, times seconds.
 */
#ifndef MIZAN_IO_RESULT_H
#define MIZAN_IO_RESULT_H

#include "common/base/err.h"
#include "common/io/memcat.h"
#include "common/io/speed.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef struct mz_stat {
    double mean, p50, p95, max;
} mz_stat;

/* Mean, median (of an even count: the mean of the middle two), 95th percentile (nearest rank) and
 * maximum; values is sorted in place. All NaN for count 0. */
mz_stat mz_stat_of(double *values, int64_t count);

enum { MZ_PHASES_MAX = 32 };

typedef struct mz_run {
    char policy[256];          /* as the user wrote it, options included */
    char system[64];           /* "LRMoE (our reading)" where that matters, else "" */
    bool lossy;                /* drops pairs or gradient: ranked apart */
    mz_stat step_time_s;       /* over steps */
    double moe_time_s;         /* mean over steps: the worst rank's time inside MoE layers */
    double tokens_per_s;       /* whole job */
    double layer_calls;        /* MoE layers times micro-batches, mean per step */
    int64_t peak_memory_bytes; /* worst rank */
    int64_t memory_bytes[MZ_MEM_CATEGORIES]; /* at that rank's peak; adds up to the peak */
    int64_t capacity_bytes;
    int64_t over_budget_calls; /* layer calls where even the smallest quotas broke a budget */
    char over_budget[192];     /* the first of them: which budget, "" none */
    bool fits;
    char oom[256];     /* "" or what did not fit: category, bytes, layer, rank, what to shrink */
    char peak_at[256]; /* what made the peak */
    mz_stat rank_imbalance; /* max/mean of computed pairs per layer call, forward; p50 unused */
    bool bounds;            /* the next two are there */
    mz_stat imbalance_bound_hosts; /* the same if pairs were spread best over each plan's hosts */
    mz_stat imbalance_bound_any;   /* a proven lower bound over all placements with its slots */
    /* off-rank bytes summed over ranks, layers and micro-batches, mean per step */
    int64_t dispatch_bytes, combine_bytes, backward_dispatch_bytes, backward_combine_bytes;
    int64_t transfer_bytes; /* weights, gradients, optimizer state moved by the policy */
    bool split;             /* the next two are there: all of these bytes by who they went to */
    int64_t within_process_bytes;  /* another rank of the sender's process */
    int64_t between_process_bytes; /* a rank of another process */
    double kept_pairs_fraction;
    double kept_score_mass; /* NaN: null */
    char score_source[64];  /* "trace", "gate weights", "" (none) */
    double dropped_pairs_fraction;
    const char *phase_name[MZ_PHASES_MAX]; /* static strings */
    double phase_s[MZ_PHASES_MAX];         /* mean per step, worst-rank busy time of each phase */
    int phases;
    double planner_s;          /* charged, mean per step */
    double planner_hidden_s;   /* of planning beside the step, not in its time */
    double planner_measured_s; /* only printed with --timing */
    /* per step and per rank detail for the HDF5 file; NULL when not kept */
    int64_t steps;
    double *step_s; /* [steps], owned by the caller */
    int32_t ranks;
    double *rank_busy_s;              /* [ranks] mean compute busy time per step */
    int64_t *rank_peak_bytes;         /* [ranks] */
    const int64_t *rank_memory_bytes; /* [ranks][MZ_MEM_CATEGORIES] the most of each, or NULL */
    const int64_t *step_ordinal; /* [steps] which step of the window a record is, where a replay
                                    repeats them; NULL: 0, 1, 2, ... */
    const double *probe_s[MZ_SPEEDS]; /* [steps] the machine's speeds before each record
                                         (replay/probe.h), or NULL */
    int32_t detail_layers;            /* of detail_s; the last one stands for the whole step */
    const double *detail_s;           /* [steps][detail_layers][ranks][phases] busy time, or NULL */
} mz_run;

typedef struct mz_result {
    json_t *trace, *model, *cluster, *settings; /* resolved configuration; owned by the result */
    mz_run *run; /* [runs], from malloc; owned by the result (what its pointers show is not) */
    int runs;
    bool timing;
    bool phases;         /* the table has one of phases below it; JSON always has them */
    bool detail;         /* JSON has what HDF5 always has: figures by step, layer, rank, phase */
    const char *kind;    /* "prediction", "measurement", or NULL: of a whole step */
    char prediction[80]; /* of a measurement: digest of the prediction read before it, "" none */
} mz_result;

json_t *mz_result_json(const mz_result *result); /* NULL when memory is short */
mz_code mz_result_print_json(const mz_result *result, FILE *out, mz_err *err);
/* Lossless policies first, then the lossy ones, each in the order given. Columns named with units
 * and direction; widths fit 100 columns, but for the name of a policy that is longer. */
void mz_result_print_table(const mz_result *result, FILE *out);
/* HDF5, written whole or not at all; the JSON text, without detail, is stored beside the datasets.
 */
mz_code mz_result_write(const mz_result *result, const char *path, const char *producer,
                        mz_err *err);
void mz_result_free(mz_result *result);

#endif
