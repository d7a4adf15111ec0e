#include "replay/probe.h"

#include "common/base/arena.h"
#include "common/base/log.h"
#include "replay/kernel_code.h"

#include <stdlib.h>

enum { GROUPS = 8, ROWS = 128, SIDE = 512, VALUE = 2, DEVICE_CALLS = 50 };
enum { WEIGHT = SIDE * SIDE * VALUE, BLOCK = GROUPS * ROWS * SIDE * VALUE };

struct mz_probe {
    mz_kernels *kernels;
    mz_transport *transport;
    char *x, *y, *weights; /* context memory: rows, results, [groups][side][side] */
    void *begin, *weight;  /* context memory: of groups */
    void *scratch;
    double *mine, *all; /* [local ranks], [ranks] */
};

static mz_code failed(const mz_probe *p, mz_err *err) {
    mz_kernel_code(p->kernels, mz_kernels_failure(p->kernels), err);
    return mz_err_prefix(err, "a probe of the machine's speed");
}

static mz_product_args args_of(const mz_probe *p) {
    return (mz_product_args){.op = MZ_PRODUCT_FORWARD,
                             .groups = {p->begin, GROUPS, GROUPS * ROWS, NULL},
                             .n = SIDE,
                             .k = SIDE,
                             .type = MZ_BF16,
                             .gradient_type = MZ_BF16,
                             .a = p->x,
                             .weight = p->weight,
                             .c = p->y};
}

static mz_code fill(const mz_probe *p, mz_err *err) {
    const size_t bytes = (size_t)GROUPS * WEIGHT;
    uint16_t *value = malloc(bytes);
    int64_t begin[GROUPS + 1];
    void *weight[GROUPS];
    if (!value)
        return mz_fail_nomem(err, "a probe of the machine's speed");
    mz_rng rng = mz_rng_make(1, 5);
    for (size_t i = 0; i < bytes / VALUE; i++)
        value[i] = mz_probe_operand(&rng);
    for (int64_t g = 0; g <= GROUPS; g++)
        begin[g] = g * ROWS;
    for (int64_t g = 0; g < GROUPS; g++)
        weight[g] = p->weights + g * WEIGHT;
    mz_kernels *k = p->kernels;
    const bool filled =
        mz_kernels_copy(k, 0, MZ_COPY_IN, p->x, value, BLOCK) == MZ_K_OK &&
        mz_kernels_copy(k, 0, MZ_COPY_IN, p->weights, value, bytes) == MZ_K_OK &&
        mz_kernels_copy(k, 0, MZ_COPY_IN, p->begin, begin, sizeof begin) == MZ_K_OK &&
        mz_kernels_copy(k, 0, MZ_COPY_IN, p->weight, weight, sizeof weight) == MZ_K_OK &&
        mz_kernels_sync(k, 0) == MZ_K_OK;
    free(value);
    return filled ? MZ_OK : failed(p, err);
}

static bool allocate(mz_probe *p) {
    mz_kernels *k = p->kernels;
    if (mz_kernels_alloc(k, BLOCK, (void **)&p->x) != MZ_K_OK ||
        mz_kernels_alloc(k, BLOCK, (void **)&p->y) != MZ_K_OK ||
        mz_kernels_alloc(k, (size_t)GROUPS * WEIGHT, (void **)&p->weights) != MZ_K_OK ||
        mz_kernels_alloc(k, (GROUPS + 1) * sizeof(int64_t), &p->begin) != MZ_K_OK ||
        mz_kernels_alloc(k, GROUPS * sizeof(void *), &p->weight) != MZ_K_OK)
        return false;
    const mz_product_args a = args_of(p);
    const size_t scratch = mz_grouped_gemm_workspace(k, &a);
    return scratch == 0 || mz_kernels_alloc(k, scratch, &p->scratch) == MZ_K_OK;
}

mz_code mz_probe_create(mz_kernels *kernels, mz_transport *transport, mz_probe **probe,
                        mz_err *err) {
    mz_probe *p = *probe = mz_calloc(1, sizeof *p);
    if (!p)
        return mz_fail_nomem(err, "a probe of the machine's speed");
    p->kernels = kernels;
    p->transport = transport;
    p->mine = mz_calloc((size_t)(transport->end - transport->first) + 1, sizeof *p->mine);
    p->all = mz_calloc((size_t)transport->ranks, sizeof *p->all);
    mz_code code = MZ_OK;
    if (!p->mine || !p->all)
        code = mz_fail_nomem(err, "a probe of the machine's speed");
    else
        code = allocate(p) ? fill(p, err) : failed(p, err);
    if (code != MZ_OK)
        mz_probe_free(probe);
    return code;
}

void mz_probe_free(mz_probe **probe) {
    mz_probe *p = *probe;
    if (!p)
        return;
    void *const all[] = {p->x, p->y, p->weights, p->begin, p->weight, p->scratch};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        mz_kernels_free(p->kernels, all[i]);
    free(p->mine);
    free(p->all);
    free(p);
    *probe = NULL;
}

mz_code mz_probe_run(mz_probe *p, double *seconds, mz_err *err) {
    const mz_product_args a = args_of(p);
    const int calls = mz_kernels_backend(p->kernels) == MZ_BACKEND_HOST ? 1 : DEVICE_CALLS;
    const int32_t local = p->transport->end - p->transport->first;
    mz_code code = mz_transport_barrier(p->transport, err);
    if (code != MZ_OK)
        return code;
    mz_kstatus status = mz_grouped_gemm(p->kernels, 0, &a, p->scratch);
    if (status == MZ_K_OK)
        status = mz_kernels_sync(p->kernels, 0);
    const double start = mz_now();
    for (int i = 0; i < calls && status == MZ_K_OK; i++)
        status = mz_grouped_gemm(p->kernels, 0, &a, p->scratch);
    if (status == MZ_K_OK)
        status = mz_kernels_sync(p->kernels, 0);
    for (int32_t r = 0; r < local; r++)
        p->mine[r] = (mz_now() - start) / calls;
    if (status != MZ_K_OK)
        return failed(p, err);
    code = mz_transport_gather(p->transport, p->mine, sizeof *p->mine, p->all, err);
    *seconds = 0;
    for (int32_t r = 0; code == MZ_OK && r < p->transport->ranks; r++)
        *seconds += p->all[r] / p->transport->ranks;
    return code;
}

const double *mz_probe_ranks(const mz_probe *p) {
    return p->all;
}
