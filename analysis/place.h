/* The parts of `mizan place`: loads from files and traces, placements by a policy, reports, and the
 * files that other programs read. Private to this room. */
#ifndef MIZAN_ANALYSIS_PLACE_H
#define MIZAN_ANALYSIS_PLACE_H

#include "common/base/app.h"
#include "common/base/arena.h"
#include "sim/policy/policy.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* What the axes of a file of counts are. */
typedef enum place_axes {
    PLACE_AXES_AUTO, /* by the number of dimensions, where that is unambiguous */
    PLACE_AXES_LE,   /* layers, experts */
    PLACE_AXES_LSE,  /* layers, sources, experts */
    PLACE_AXES_SLE,  /* steps, layers, experts */
    PLACE_AXES_SLSE  /* steps, layers, sources, experts */
} place_axes;

/* Counts of a file, whole: [steps][layers][sources][experts]. sources 1: not recorded. */
typedef struct place_counts {
    int32_t layers, sources, experts;
    int64_t steps;
    int64_t *count;
    int32_t *number; /* [layers] in the model, where the file says; else NULL */
    int32_t rows;    /* layers of the file, those left out included */
} place_counts;

/* Reads CSV, JSON, .npy (place_files.c). Every count is whole, from 0 to 2^32-1. *trace is set, and
 * nothing read, when the file is a trace. What is no such file, ragged, out of range: MZ_EINPUT
 * naming file and place. ranks: of the job, or 0 (a CSV by sources has as many). */
mz_code place_read_file(const char *path, place_axes axes, int64_t ranks, mz_arena *arena,
                        place_counts *counts, bool *trace, mz_err *err);

/* ---- place_loads.c -----------------------------------------------------------------------------
 * Loads as a policy may see them. The window of steps is averaged (rows rounded by largest
 * remainder) or summed; what lies before it is history. */
typedef struct place_window {
    int64_t first_step, steps; /* steps 0: all from first_step on */
    int64_t step_tokens;       /* for traces without steps */
    bool sum;
    uint64_t seed;
    const volatile sig_atomic_t *stop; /* or NULL: once it is set, MZ_EABORTED */
} place_window;

typedef struct place_source place_source;
typedef struct place_facts {
    int32_t layers, experts;
    int32_t sources;       /* recorded; 1: not by source */
    int32_t top_k;         /* 0: varies or not known */
    const int32_t *number; /* [layers] in the model, or NULL: not known */
    int32_t rows;          /* layers of the model that the input covers, dense ones included */
} place_facts;

/* A trace (counts NULL) or counts of a file, which must outlive the source. */
mz_code place_source_open(const char *trace, const place_counts *counts, place_source **source,
                          mz_err *err);
void place_source_close(place_source **source);
place_facts place_source_facts(const place_source *source);

typedef struct place_loads {
    int32_t layers, ranks, experts;
    mz_load *current, *history; /* [layers] both for `ranks` sources; never NULL */
    char shown[256];            /* what the policy's decide was shown, in words */
    bool reshaped;
} place_loads;
mz_code place_source_read(place_source *source, int32_t ranks, const place_window *window,
                          const mz_policy_traits *traits, mz_arena *arena, place_loads *loads,
                          mz_err *err);

/* ---- place_plan.c ------------------------------------------------------------------------------
 * One placement per layer. Everything lives in the arena given. */
typedef struct place_layer {
    int32_t number;      /* in the model */
    const mz_load *load; /* the counts placed */
    int32_t *begin;      /* [E+1] hosts of expert e are rank[begin[e]] .. */
    int32_t *rank;       /* main first */
    int64_t *pairs;      /* computed on each host */
    int64_t *quota;      /* [E] pairs of each expert that are computed and kept for backward */
    int64_t *rank_load;  /* [R] */
    int32_t *rank_used;  /* [R] slots in use */
    int64_t dropped;
    double imbalance, imbalance_static, bound, bound_hosts;
    char why[256];
} place_layer;

typedef struct place_result {
    const char *policy; /* as the user wrote it */
    const char *shown;
    int32_t ranks, nodes, experts, groups, layers;
    int32_t slots;       /* per rank, mains included; 0: the policy knows no limit */
    int32_t slots_given; /* --slots, or 0 */
    int32_t rows;        /* layers of the model, dense ones included */
    bool lossy, lasting; /* lasting: hosts hold one expert copy each, so a file can say it */
    bool reshaped;
    place_layer *layer; /* [layers] */
    double planner_measured_s;
} place_result;

/* MZ_EABORTED once *stop is set (NULL: never). */
mz_code place_plan(const mz_policy *policy, void *state, const mz_policy_traits *traits,
                   const mz_policy_env *env, const place_loads *loads,
                   const volatile sig_atomic_t *stop, mz_arena *arena, place_result *result,
                   mz_err *err);

/* ---- place_out.c, place_formats.c --------------------------------------------------------------
 */
json_t *place_int_list(const int32_t *value, int64_t n);
mz_code place_print_json(const place_result *result, FILE *out, mz_err *err);
void place_print_table(const place_result *result, bool hosts, FILE *out);

typedef enum place_format {
    PLACE_NO_FORMAT,
    PLACE_SGLANG,
    PLACE_VLLM,
    PLACE_TENSORRT,
    PLACE_DEEPSPEED
} place_format;
/* MZ_EINPUT when a placement cannot be said in that format. What the reader of the file should know
 * goes to the log. */
mz_code place_print_format(const place_result *result, place_format format, const mz_log *log,
                           FILE *out, mz_err *err);

#endif
