/* Products of a rank's experts. */
#include "replay/layer.h"

#include <string.h>

mz_code layer_workspace(const layer_call *c, int32_t rank, size_t bytes, void **memory) {
    const mz_code code = layer_take(c, rank, CALL_WORKSPACE, (int64_t)bytes);
    *memory = code == MZ_OK ? layer_memory(c, rank, CALL_WORKSPACE) : NULL;
    return code;
}

mz_code layer_groups(const layer_call *c, int32_t rank, const layer_layout *l, bool again,
                     mz_groups *groups) {
    const mz_expert_groups *hosted = mz_experts_groups(c->e->experts, rank);
    const int32_t *mine = l->by_rank + l->rank_begin[rank];
    const int32_t count = l->rank_begin[rank + 1] - l->rank_begin[rank];
    bool same = hosted->count == count;
    for (int32_t g = 0; same && g < count; g++)
        same = hosted->instance[g] == mine[g];
    if (!same)
        return mz_fail(c->err, MZ_EINTERNAL,
                       "layer %d, rank %d: the weights that are there are not the plan's",
                       c->call->layer, rank);
    int64_t *begin = c->e->shared->group_begin[again];
    for (int32_t g = 0; g < count; g++)
        begin[g] = again ? l->again_row[mine[g]] : l->row[mine[g]];
    begin[count] = again ? l->again_rows[rank] : l->rows[rank];
    const layer_buffer b = again ? CALL_GROUPS_AGAIN : CALL_GROUPS;
    const mz_code code = layer_put(c, rank, b, begin, (int64_t)sizeof *begin * (count + 1));
    *groups = (mz_groups){.begin = layer_memory(c, rank, b),
                          .groups = count,
                          .rows_max = begin[count],
                          .begin_host = begin};
    return code;
}

mz_code layer_product(const layer_call *c, int32_t rank, const char *what,
                      const mz_product_args *args) {
    void *work;
    mz_code code = layer_workspace(c, rank, mz_grouped_gemm_workspace(c->e->kernels, args), &work);
    if (code == MZ_OK)
        code = layer_kernel(c, rank, what, mz_grouped_gemm(c->e->kernels, 0, args, work));
    layer_give(c, rank, CALL_WORKSPACE);
    return code;
}

mz_code layer_up(const layer_call *c, int32_t rank, const mz_expert_up *args) {
    void *work;
    mz_code code = layer_workspace(c, rank, mz_expert_up_workspace(c->e->kernels, args), &work);
    if (code == MZ_OK)
        code = layer_kernel(c, rank, "gate and up",
                            mz_expert_up_forward(c->e->kernels, 0, args, work));
    layer_give(c, rank, CALL_WORKSPACE);
    return code;
}
