/* What the files of the generator share. Private to this room. */
#ifndef MIZAN_TRACES_SYNTH_PRIVATE_H
#define MIZAN_TRACES_SYNTH_PRIVATE_H

#include "common/base/rng.h"
#include "traces/synth.h"

enum { MZ_GATE_SHAPES = 64 };

/* Names of the random streams: what is drawn. */
typedef enum mz_synth_draw {
    MZ_DRAW_ORDER = 1, /* order of experts */
    MZ_DRAW_TOKENS,    /* choices of tokens */
    MZ_DRAW_HOT,       /* which experts or ranks are hot, cold or empty */
    MZ_DRAW_GATE,      /* shapes of gate weights */
    MZ_DRAW_LAYER,     /* constants of a layer */
    MZ_DRAW_DRIFT,     /* popularity */
    MZ_DRAW_TEAM,      /* experts of a topic */
    MZ_DRAW_SEQUENCE,  /* topics of a sequence */
    MZ_DRAW_BIAS,      /* a sequence's own taste */
    MZ_DRAW_TOPIC      /* topics of tokens */
} mz_synth_draw;

typedef struct mz_realistic mz_realistic;

struct mz_synth {
    mz_synth_options options;
    const mz_synth_load *load;
    int64_t *token_begin;    /* [ranks+1] running sum of the ranks' tokens */
    float *gate;             /* [MZ_GATE_SHAPES][top_k] gate weights, each row sums to 1 */
    double *weight;          /* [experts] scratch */
    double *edge;            /* [experts+1] scratch: running sum of inclusion probabilities */
    int32_t *order;          /* [experts] scratch */
    int32_t *guide;          /* [guides+1] scratch: first place to look for a value */
    mz_realistic *realistic; /* NULL for the simple loads */
};

/* The stream for a draw at up to five coordinates. */
mz_rng mz_synth_rng(const mz_synth *synth, mz_synth_draw draw, int64_t a, int64_t b, int64_t c,
                    int64_t d);

/* Random order of 0..count-1. */
void mz_synth_shuffle(mz_rng *rng, int32_t *order, int32_t count);

/* First and one past the last expert that static placement gives `rank`; at least one. */
void mz_synth_block(const mz_synth *synth, int64_t rank, int32_t *first, int32_t *last);

mz_code mz_realistic_open(const mz_synth *synth, mz_realistic **realistic, mz_err *err);
void mz_realistic_close(mz_realistic **realistic);
void mz_realistic_call(mz_synth *synth, int64_t step, int32_t micro_batch, int32_t layer,
                       int32_t rank, uint16_t *expert);
int32_t mz_realistic_domain(const mz_synth *synth, int64_t step, int32_t micro_batch, int32_t rank,
                            int64_t index);

#endif
