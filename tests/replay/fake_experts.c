/* Experts with fixed weights: every instance computes with its expert's weights and has a gradient
 * of its own, which is added to the expert's sum after each call. Replicas of bf16 experts have
 * fp32 gradients. Takes nothing from the heap, so what the heap counts is the engine's own. Stands
 * in for replay/experts.c in tests of the engine alone. */
#include "tests/replay/fake_experts.h"

#include "common/base/arena.h"
#include "replay/data.h"
#include "replay/inside.h"

#include <stdlib.h>
#include <string.h>

enum { ARRAYS = 6 }; /* up, down, grad_up, grad_down, wide_up, wide_down */

typedef struct rank_groups {
    mz_expert_groups groups;
    void *arrays; /* context: [ARRAYS][count] */
} rank_groups;

struct mz_experts {
    mz_engine *e;
    int64_t up, values;  /* of an expert */
    void **weight;       /* [layers][E] context */
    double *sum;         /* [layers][E][values] */
    double *of_instance; /* [layers][instances][values] of the last call */
    rank_groups *rank;   /* [local] */
    int32_t *instance;   /* [local][instances] */
    int32_t *expert;     /* the same */
    void **gradient;     /* [instances] of the call at hand, of local ranks */
};

static int64_t size_of(mz_dtype type) {
    return type == MZ_BF16 ? 2 : 4;
}

static void *fresh(mz_experts *x, int64_t bytes, const void *data) {
    void *memory = NULL;
    mz_kernels_alloc(x->e->kernels, (size_t)bytes, &memory);
    if (memory && data)
        mz_kernels_copy(x->e->kernels, 0, MZ_COPY_IN, memory, data, (size_t)bytes);
    else if (memory)
        mz_kernels_zero(x->e->kernels, 0, memory, (size_t)bytes);
    return memory;
}

static void *weights_of(mz_experts *x, int32_t layer, int32_t expert, float *scratch) {
    const mz_replay_job *j = &x->e->job;
    mz_data_weights(j, layer, expert, MZ_DATA_UP, scratch);
    mz_data_weights(j, layer, expert, MZ_DATA_DOWN, scratch + x->up);
    void *wide = fresh(x, 4 * x->values, scratch);
    void *memory = fresh(x, size_of(j->type) * x->values, NULL);
    mz_convert(x->e->kernels, 0, j->type, memory, MZ_F32, wide, x->values);
    mz_kernels_free(x->e->kernels, wide);
    return memory;
}

mz_code mz_experts_create(mz_engine *e, mz_experts **out, mz_err *err) {
    const mz_replay_job *j = &e->job;
    mz_experts *x = mz_calloc(1, sizeof *x);
    *x = (mz_experts){.e = e, .up = 2 * j->intermediate * j->hidden};
    x->values = x->up / 2 * 3;
    const size_t all = (size_t)j->layers * (size_t)j->experts;
    x->weight = mz_calloc(all, sizeof *x->weight);
    x->sum = mz_calloc(all * (size_t)x->values, sizeof *x->sum);
    x->of_instance = mz_calloc((size_t)j->layers * (size_t)j->instances * (size_t)x->values,
                               sizeof *x->of_instance);
    x->rank = mz_calloc((size_t)e->local, sizeof *x->rank);
    x->instance = mz_calloc((size_t)e->local * (size_t)j->instances, sizeof *x->instance);
    x->expert = mz_calloc((size_t)e->local * (size_t)j->instances, sizeof *x->expert);
    x->gradient = mz_calloc((size_t)j->instances, sizeof *x->gradient);
    float *scratch = mz_calloc((size_t)x->values, sizeof *scratch);
    for (size_t i = 0; i < all; i++)
        x->weight[i] = weights_of(x, (int32_t)i / j->experts, (int32_t)i % j->experts, scratch);
    free(scratch);
    *out = x;
    return MZ_OK;
}

static void drop_call(mz_experts *x) {
    for (int32_t r = 0; r < x->e->local; r++) {
        mz_kernels_free(x->e->kernels, x->rank[r].arrays);
        x->rank[r].arrays = NULL;
    }
    for (int32_t i = 0; i < x->e->job.instances; i++) {
        mz_kernels_free(x->e->kernels, x->gradient[i]);
        x->gradient[i] = NULL;
    }
}

void mz_experts_free(mz_experts **experts) {
    mz_experts *x = *experts;
    drop_call(x);
    for (int32_t i = 0; i < x->e->job.layers * x->e->job.experts; i++)
        mz_kernels_free(x->e->kernels, x->weight[i]);
    free(x->weight);
    free(x->sum);
    free(x->of_instance);
    free(x->rank);
    free(x->instance);
    free(x->expert);
    free(x->gradient);
    free(x);
    *experts = NULL;
}

mz_code mz_experts_begin_step(mz_experts *x, mz_err *err) {
    const size_t all = (size_t)x->e->job.layers * (size_t)x->e->job.experts;
    memset(x->sum, 0, sizeof *x->sum * all * (size_t)x->values);
    return MZ_OK;
}

/* Replicas of bf16 experts. */
static bool is_wide(const mz_experts *x, const mz_plan *plan, int32_t instance, int32_t expert) {
    return x->e->job.type == MZ_BF16 && instance != plan->begin[expert];
}

/* The pointers of one rank: arrays[a][g]. */
static void point(mz_experts *x, const mz_plan *plan, int32_t layer, int32_t rank, bool backward) {
    rank_groups *r = &x->rank[rank - x->e->first];
    const int64_t most = x->e->job.instances, b = size_of(x->e->job.type);
    int32_t *instance = x->instance + (rank - x->e->first) * most;
    int32_t *expert = x->expert + (rank - x->e->first) * most;
    int32_t n = 0;
    bool wide = false;
    for (int32_t e = 0; e < plan->experts; e++)
        for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++)
            if (plan->rank[i] == rank) {
                wide = wide || is_wide(x, plan, i, e);
                instance[n] = i;
                expert[n++] = e;
            }
    char **p = mz_calloc((size_t)(ARRAYS * n + 1), sizeof *p);
    for (int32_t g = 0; g < n; g++) {
        p[g] = x->weight[layer * plan->experts + expert[g]];
        p[n + g] = p[g] + b * x->up;
        if (!backward)
            continue;
        const bool w = is_wide(x, plan, instance[g], expert[g]);
        const int64_t size = w ? 4 : b;
        char *gradient = x->gradient[instance[g]] = fresh(x, size * x->values, NULL);
        p[(w ? 4 : 2) * n + g] = gradient;
        p[(w ? 5 : 3) * n + g] = gradient + size * x->up;
    }
    r->arrays = fresh(x, (int64_t)sizeof *p * (ARRAYS * n + 1), p);
    free(p);
    void **a = r->arrays;
    r->groups = (mz_expert_groups){.count = n,
                                   .instance = instance,
                                   .expert = expert,
                                   .up = a,
                                   .down = a + n,
                                   .grad_up = a + 2 * n,
                                   .grad_down = a + 3 * n,
                                   .wide_up = wide ? a + 4 * n : NULL,
                                   .wide_down = wide ? a + 5 * n : NULL};
}

static mz_code point_all(mz_experts *x, const mz_replay_call *call, const mz_plan *plan,
                         bool backward) {
    drop_call(x);
    for (int32_t r = x->e->first; r < x->e->end; r++)
        point(x, plan, call->layer, r, backward);
    return MZ_OK;
}

mz_code mz_experts_forward(mz_experts *x, const mz_replay_call *call, const mz_plan *plan,
                           mz_err *err) {
    return point_all(x, call, plan, false);
}

const mz_expert_groups *mz_experts_groups(const mz_experts *x, int32_t rank) {
    return &x->rank[rank - x->e->first].groups;
}

mz_code mz_experts_backward(mz_experts *x, const mz_replay_call *call, const mz_plan *plan,
                            mz_err *err) {
    return point_all(x, call, plan, true);
}

mz_code mz_experts_reduce(mz_experts *x, const mz_replay_call *call, const mz_plan *plan,
                          bool last_micro_batch, mz_err *err) {
    mz_kernels *k = x->e->kernels;
    float *value = mz_calloc((size_t)x->values, sizeof *value);
    void *wide = fresh(x, 4 * x->values, NULL);
    for (int32_t e = 0; e < plan->experts; e++)
        for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++) {
            if (!x->gradient[i])
                continue;
            const mz_dtype type = is_wide(x, plan, i, e) ? MZ_F32 : x->e->job.type;
            mz_convert(k, 0, MZ_F32, wide, type, x->gradient[i], x->values);
            mz_kernels_copy(k, 0, MZ_COPY_OUT, value, wide, 4 * (size_t)x->values);
            mz_kernels_sync(k, 0);
            double *sum = x->sum + (call->layer * plan->experts + e) * x->values;
            double *own = x->of_instance + (call->layer * x->e->job.instances + i) * x->values;
            for (int64_t j = 0; j < x->values; j++) {
                own[j] = value[j];
                sum[j] += value[j];
            }
        }
    mz_kernels_free(k, wide);
    free(value);
    drop_call(x);
    return MZ_OK;
}

mz_code mz_experts_update(mz_experts *x, mz_err *err) {
    return MZ_OK;
}

mz_code mz_experts_read(mz_experts *x, int32_t layer, int32_t expert, bool gradient, float *value,
                        mz_err *err) {
    if (!gradient) {
        mz_data_weights(&x->e->job, layer, expert, MZ_DATA_UP, value);
        mz_data_weights(&x->e->job, layer, expert, MZ_DATA_DOWN, value + x->up);
        return MZ_OK;
    }
    const double *sum = x->sum + (layer * x->e->job.experts + expert) * x->values;
    for (int64_t j = 0; j < x->values; j++)
        value[j] = (float)sum[j];
    return MZ_OK;
}

const double *fake_instance_gradient(const mz_experts *x, int32_t layer, int32_t instance) {
    return x->of_instance + (layer * x->e->job.instances + instance) * x->values;
}
