/* A small job for the engine: loads with pairs, weights and norms, planned by a policy, and the
 * whole MoE layer in double precision beside it. */
#ifndef MIZAN_TESTS_REPLAY_SCENE_H
#define MIZAN_TESTS_REPLAY_SCENE_H

#include "replay/engine.h"
#include "tests/policy/fixture.h"

enum { SCENE_LAYERS = 2 };

/* Also built for the emulated device (tests/shim). */
#ifndef SCENE_BACKEND
#define SCENE_BACKEND MZ_BACKEND_HOST
#endif

typedef struct scene_options {
    const char *policy;
    int32_t ranks, experts, k;            /* k 0: any number from 0 to 3 */
    int64_t hidden, intermediate, tokens; /* tokens of a rank: 0 .. tokens */
    mz_dtype type;
    bool recompute;
    int32_t one_expert, idle_rank, lone_rank; /* -1: none. All pairs on that expert; a rank without
                                                 tokens; one rank with tokens */
    bool weights, norms;                      /* recorded */
    int32_t domain_size;
} scene_options;
scene_options scene_usual(const char *policy, mz_dtype type);

/* One layer's call with its plan, and what the engine and the reference made of it. */
typedef struct scene_call {
    mz_replay_call call;
    mz_plan *plan;
    double *y, *dx, *dweight, *out, *score; /* reference: [T][H] twice, [pairs], [pairs][H] */
    double *y_got, *dx_got, *dweight_got;
    uint8_t *computed, *kept; /* [pairs] as the engine said */
    double *gradient;         /* reference [E][3HI] */
} scene_call;

typedef struct scene {
    scene_options o;
    rig policy[SCENE_LAYERS]; /* a state of its own per layer: plans live as long as the call */
    mz_optimizer optimizer;
    mz_replay_job job;
    mz_load *load[SCENE_LAYERS];
    scene_call at[SCENE_LAYERS];
    float *base;     /* [MZ_DATA_ROWS][H] */
    double **weight; /* [layers][E] up then down */
    int64_t *token_begin, *pair_begin;
    uint16_t *token_pairs, *expert[SCENE_LAYERS];
    float *gate[SCENE_LAYERS], *x2[SCENE_LAYERS], *g2[SCENE_LAYERS];
} scene;

void scene_open(scene *s, const scene_options *o, uint64_t seed);
void scene_close(scene *s);
/* What an engine runs on, in one process. */
typedef struct machine {
    mz_kernels *kernels;
    mz_transport *transport;
    mz_heap *heap;
    mz_engine *engine;
    mz_err err;
} machine;
/* threads: of the host, and streams. */
void machine_open(machine *m, const scene *s, int threads);
void machine_engine(machine *m, const scene *s);
void machine_close(machine *m);

/* Keeps y, dx, kept pairs of what it sees in the scene; self is an mz_kernels and the scene. */
typedef struct scene_watcher {
    scene *s;
    mz_kernels *kernels;
} scene_watcher;
mz_code scene_watch(void *self, const mz_engine_seen *seen, mz_err *err);
/* Forward through the layers and backward with an engine. */
mz_code scene_run(scene *s, mz_engine *engine, mz_err *err);
/* Reference of a layer with the kept pairs that the engine chose. Gradients of weights are added to
 * those of earlier calls; of one instance's pairs alone where `instance` is not -1. */
void scene_reference(scene *s, int32_t layer);
void scene_reference_of(scene *s, int32_t layer, int32_t instance);
/* Instance that a pair is computed on in forward by the rule of README: entries in order. */
int32_t scene_instance(const scene *s, int32_t layer, int32_t rank, int64_t pair);
int32_t scene_expert(const scene *s, int32_t layer, int64_t pair);

#endif
