/* Optimizers: what each keeps, moves and computes per tensor, whole or divided among ranks. The
 * rules, their sources and the counts behind them are in optimizer.c; a table is in README.md.
 *
 * All numbers come from one tensor at a time: `copies` of it laid end to end and cut into `parts`
 * equal pieces, and what is reported is the fullest piece. So ZeRO is copies = those of the rank,
 * parts = the ranks that share them; SYMI and LAER, which cut every expert alone, are copies = 1,
 * parts = all ranks, times the number of experts. State that belongs to single values divides.
 * Row means divide by rows. Column means (and GaLore's second projector and moments) are needed
 * whole by every part that holds some rows of a matrix: they are replicated where a matrix is cut.
 */
#ifndef MIZAN_SIM_MODEL_OPTIMIZER_H
#define MIZAN_SIM_MODEL_OPTIMIZER_H

#include "common/base/err.h"
#include "common/base/opt.h"
#include "sim/model/model.h"

#include <stdbool.h>
#include <stdint.h>

/* How an update is executed: one kernel; the operations one by one on pieces of a tensor of
 * MZ_UPDATE_CHUNK values; the operations one by one on whole tensors. */
typedef enum mz_temporaries {
    MZ_TEMPORARIES_FUSED,
    MZ_TEMPORARIES_CHUNKED,
    MZ_TEMPORARIES_UNFUSED
} mz_temporaries;

enum { MZ_UPDATE_CHUNK = 16 << 20 };

/* Options of all optimizers; each takes those that its table lists. */
typedef struct mz_optimizer_options {
    int master;  /* fp32 copy of weights that are not fp32: 0 none, 1 kept */
    int moments; /* adamw: 0 fp32, 1 bf16 */
    bool uniform;
    int experts;        /* skewadam: 0 second moment only, 1 momentum too */
    int router;         /* skewadam: 0 full second moment, 1 factored, 2 momentum and factored */
    int shared;         /* skewadam: 0 as the backbone, 1 as routed experts */
    int64_t sweeps;     /* times that a fused update passes over a matrix's gradient */
    int state;          /* muon: 0 as coded, 1 as tabulated */
    int64_t iterations; /* muon: of Newton-Schulz */
    int64_t rank;       /* galore */
    int sides;          /* galore: 0 two, 1 one */
    int64_t block;      /* adam8bit: values that share a scale */
    int embedding;      /* adam8bit: 0 8 bit, 1 fp32 */
} mz_optimizer_options;

typedef enum mz_optimizer_rule {
    MZ_RULE_ADAMW,
    MZ_RULE_SKEWADAM,
    MZ_RULE_ADAFACTOR,
    MZ_RULE_LION,
    MZ_RULE_MUON,
    MZ_RULE_GALORE,
    MZ_RULE_ADAM8BIT,
    MZ_RULE_SGDM
} mz_optimizer_rule;

/* An optimizer with its options: a plain value. */
typedef struct mz_optimizer {
    char name[96]; /* as asked for: "skewadam[experts=momentum]" */
    mz_optimizer_rule rule;
    const char *summary;
    const mz_opt *table; /* [table_count] its options */
    int table_count;
    mz_optimizer_options options;
} mz_optimizer;

/* The table of names with default options, [count]; the first is the default. */
const mz_optimizer *const *mz_optimizers(int *count);
/* "muon" or "muon[iterations=3]". Unknown names, options and values: MZ_EINPUT that names the
 * nearest or the known ones. */
mz_code mz_optimizer_parse(const char *text, mz_optimizer *optimizer, mz_err *err);

/* One update of the fullest of `parts` pieces of `copies` copies of a tensor. */
typedef struct mz_update_cost {
    int64_t values;           /* parameters in the piece */
    int64_t state_bytes;      /* kept with it from step to step; master weights included */
    int64_t replicated_bytes; /* of these, what another piece keeps, too */
    double traffic_bytes;     /* read and written in device memory */
    double flops;             /* of matrix products: Muon's in bf16, GaLore's in fp32 */
    double exchange_bytes;    /* that it must receive from other pieces beyond reduced gradients:
                                 rest of a cut matrix (Muon), sums over a matrix's rows */
    int64_t temporary_bytes;  /* alive at once beside weights, gradients and state */
} mz_update_cost;

/* copies, parts >= 1. Nothing is needed for a tensor that is not trained. */
mz_update_cost mz_optimizer_update(const mz_optimizer *optimizer, const mz_tensor *tensor,
                                   int64_t copies, int64_t parts, mz_temporaries how);
/* State of one whole copy. */
int64_t mz_optimizer_state_bytes(const mz_optimizer *optimizer, const mz_tensor *tensor);

#endif
