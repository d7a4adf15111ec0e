/* A prediction held against a measurement: two result files and nothing else (DESIGN section 7).
 *
 * Error of a time: (predicted - measured) / measured, signed. A policy's time: per step of the
 * window the middle mean of its records, mean over the steps. The middle mean leaves out the
 * fastest and the slowest seventh: the statistic of calibration (replay/calibrate.h). A median
 * would not do: a step is made of many kernels, so slow episodes of a shared machine are in every
 * step in proportion, in few kernels each. Confidence interval of a step, a phase, a layer, a rank:
 * percentiles of the bootstrap that draws each step's records anew (Efron and Tibshirani, 1993,
 * chapter 13). Noise: how far two runs of the same policy lie apart; where none was run twice, two
 * halves of one, which has the machine's drift in it. Where one was, halves decide nothing. Both
 * sides have the same steps of the window.
 *
 * Speeds: a probe's seconds while the machine was calibrated over their middle mean in the
 * measurement (replay/probe.h; records without a probe have 0 and do not count), of products, of
 * memory and of rows in a cache; 1 where either has no product, and rows go with products where
 * either has none of them. A shared machine that runs at 0.95 of it makes every prediction 5 % too
 * short, so the errors of steps and phases stand a second time at the calibrated speed: a phase's
 * at the speed of what its kernels do, of rows by the bytes of one call on one rank as `mizan
 * calibrate --refresh` has it, a step's at those of its phases, by their predicted times.
 * What is judged is the error as it is; where that fails and a speed was another, the verdict says
 * so.
 *
 * A phase's time is its busy time summed over ranks and layers, so that a machine which runs its
 * ranks one after another spends it all; planning, which stands at every rank of a process, counts
 * once per process. Waiting (launch_wait) is shown and is no work: it is in no share, layer or
 * rank. Memory of a category is the most on any rank. */
#ifndef MIZAN_ANALYSIS_CHECK_H
#define MIZAN_ANALYSIS_CHECK_H

#include "common/io/result_file.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>

/* Targets; a check of two files fails where one is missed. */
#define CHECK_MEAN 0.03  /* mean error of step times */
#define CHECK_WORST 0.05 /* worst */
#define CHECK_PHASE 0.10 /* of a phase that is at least CHECK_SHARE of the step */
#define CHECK_SHARE 0.05
#define CHECK_MEMORY 0.01 /* of peak memory */
#define CHECK_APART 0.03  /* policies whose times differ by more have an order */
#define CHECK_NOISE 0.015 /* of the same policy repeated */
#define CHECK_SPEED 0.015 /* of either of the machine's speeds since its calibration */
#define CHECK_BYTES 0.01  /* of each kind of traffic; within and between processes none */
#define CHECK_TIE 1e-9    /* what a rule says of two policies is the same within this */
/* Bytes by what they are for, then all of them by who they went to. */
enum { CHECK_RECORDS = 15, CHECK_KINDS = 5, CHECK_TRAFFIC = CHECK_KINDS + 2 };
extern const char *const check_traffic[CHECK_TRAFFIC]; /* their keys in a result */

typedef struct check_value {
    double predicted, measured, error; /* error NaN where nothing was measured */
} check_value;

/* 95 % of a measured time, s; NaN below CHECK_RECORDS records. */
typedef struct check_interval {
    double low, high;
} check_interval;

typedef struct check_policy {
    const char *name;
    bool lossy;
    const mz_run_file *predicted; /* measured: all runs of this name */
    int64_t ranks_each;           /* ranks of one process */
    int64_t records;              /* of all runs of this policy */
    double *ratio;                /* [records] measured over predicted, in order: to be drawn */
    check_value step;
    double at_speed; /* the step's error at the calibrated speed */
    check_interval interval;
    double noise;  /* of repetition; NaN: no step was measured twice */
    bool repeated; /* noise is of two runs, else of the halves of one */
    check_value phase[MZ_PHASES];
    check_interval phase_interval[MZ_PHASES]; /* NaN below CHECK_SHARE of the step */
    double phase_at_speed[MZ_PHASES];         /* error, as at_speed */
    double share[MZ_PHASES]; /* of the measured time of all phases but launch_wait */
    int32_t layers, ranks;
    check_value *layer; /* [layers] the last: of the whole step */
    check_value *rank;  /* [ranks] */
    check_value *cell;  /* [layers][ranks] */
    check_interval *layer_interval, *rank_interval;
    check_value peak;
    check_value memory[MZ_MEM_CATEGORIES];
    check_value traffic[CHECK_TRAFFIC]; /* bytes a step: equal where the plans are */
    bool exact; /* nothing but its plans decides who sends to whom: a lossless policy, every step
                   of the window measured as often */
} check_policy;

/* Two policies, a before b. */
typedef struct check_pair {
    int a, b;
    double predicted, measured, error; /* log(Ta/Tb); difference of the two */
    bool apart, agrees;                /* measured apart; the same way round, not a tie */
} check_pair;

/* How well a rule orders the policies. */
typedef struct check_rule {
    const char *name, *what;
    double tau;       /* Kendall's, over the pairs that are apart; NaN: none are */
    double log_error; /* mean |error of log(Ta/Tb)| over all pairs; NaN: one policy */
    double regret;    /* time lost by taking its best */
    double *value;    /* [policies] seconds, or what orders like them */
} check_rule;

enum { CHECK_RULES = 4 }; /* ours, then those that know little */

typedef struct check_target {
    char what[160], found[160];
    bool passed;
} check_target;

enum { CHECK_TARGETS_MOST = 16 };

typedef struct check_result {
    const mz_result_file *predicted, *measured;
    const char *transport, *backend; /* of the measurement; "" not said */
    char elsewhere[320];             /* why the prediction is not of the machine that was measured;
                                        "" it is */
    bool fixed;                      /* the prediction was there before the replay */
    bool old_digest;                 /* the measurement's is of a prediction's text alone */
    bool extrapolated;               /* it has sizes far from all that was calibrated */
    const char *outside;             /* which, in words; "" not said */
    int policies;
    check_policy *policy;
    int pairs;
    check_pair *pair;
    check_rule rule[CHECK_RULES];
    double mean_error, worst_error;
    double noise;    /* that decides: of two runs where there are some; NaN: unknown */
    int noise_of;    /* the policy that it is of; -1: unknown */
    bool noise_runs; /* it is of two runs, else of halves */
    bool probed[MZ_SPEEDS];
    double speed[MZ_SPEEDS];
    double mean_at_speed, worst_at_speed; /* errors at the calibrated speed */
    check_target target[CHECK_TARGETS_MOST];
    int targets;
    bool noisy, passed;
    char verdict[200];
    mz_arena arena;
} check_result;

/* Compares; borrows the files. MZ_EINPUT where they do not belong together, naming the first
 * difference, or where a file lacks what is compared. Targets missed are no error. */
mz_code check_files(const mz_result_file *predicted, const mz_result_file *measured,
                    check_result *result, mz_err *err);
void check_free(check_result *result);

/* Why a phase's time is no evidence for other machines of this kind: the prediction was of another
 * machine, or ranks were not connected as they are there. NULL: it is evidence. */
const char *check_unproven(const check_result *result, mz_phase phase);

/* Of a result's JSON; 0 where there is no such number. */
static inline double check_number(const json_t *object, const char *key) {
    return json_number_value(json_object_get(object, key));
}
/* Tokens of a predicted step, of all ranks. */
static inline double check_tokens(const check_policy *policy) {
    const json_t *run = policy->predicted->json;
    return check_number(run, "tokens_per_s") *
           check_number(json_object_get(run, "step_time_s"), "mean");
}

/* Parts of check_files. */
mz_code check_measure(check_result *result, mz_err *err); /* policies: times, phases, memory */
mz_code check_order(check_result *result, mz_err *err);   /* pairs and rules */
void check_judge(check_result *result);                   /* targets, verdict */
/* Mean without the least and the greatest seventh of values, which are sorted; NaN of none. */
double check_middle_mean(double *value, int64_t count);

/* Output. */
/* A policy's noise stands in brackets where another's decides: that of two runs beside its halves'.
 */
static inline bool check_beside(const check_result *result, const check_policy *policy) {
    return result->noise_runs && !policy->repeated && !isnan(policy->noise);
}
/* Why phases are extrapolated, and which: one line for every reason. `put` writes what a file says.
 */
void check_reasons(const check_result *result, const char *before, const char *after,
                   void (*put)(const char *text, FILE *out), FILE *out);
/* The line on sizes that were not calibrated, where there are some; `put` writes what the file says
 * of them. */
void check_extrapolated(const check_result *result, const char *before, const char *after,
                        void (*put)(const char *text, FILE *out), FILE *out);
/* Whether errors at the calibrated speed are known. */
static inline bool check_probed(const check_result *result) {
    return result->probed[MZ_SPEED_PRODUCT];
}
/* The speed that is farthest from the calibrated one. */
double check_farthest(const check_result *result);
/* The line on the machine's speeds, where they are known. */
void check_speed(const check_result *result, const char *before, const char *after, FILE *out);
void check_print(const check_result *result, FILE *out);
json_t *check_json(const check_result *result); /* NULL when memory is short */
void check_html(const check_result *result, const char *predicted, const char *measured, FILE *out);

#endif
