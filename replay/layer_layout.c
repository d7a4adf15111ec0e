/* Which rows lie where in send buffers and on the ranks that compute them. */
#include "replay/layer.h"

#include "common/base/arena.h"

#include <stdlib.h>
#include <string.h>

static bool room(void *array, size_t *cap, int64_t n, size_t size) {
    return mz_grow((void **)array, cap, (size_t)n, size);
}

static mz_code make_room(layer_layout *l, int32_t ranks, int32_t instances, int64_t blocks,
                         mz_err *err) {
    if (room(&l->block, &l->caps[0], blocks, sizeof *l->block) &&
        room(&l->begin, &l->caps[1], instances + 1, sizeof *l->begin) &&
        room(&l->row, &l->caps[2], instances, sizeof *l->row) &&
        room(&l->again_row, &l->caps[3], instances, sizeof *l->again_row) &&
        room(&l->rows, &l->caps[4], ranks, sizeof *l->rows) &&
        room(&l->again_rows, &l->caps[5], ranks, sizeof *l->again_rows) &&
        room(&l->sent, &l->caps[6], ranks, sizeof *l->sent) &&
        room(&l->again_sent, &l->caps[7], ranks, sizeof *l->again_sent) &&
        room(&l->by_rank, &l->caps[8], instances, sizeof *l->by_rank) &&
        room(&l->rank_begin, &l->caps[9], ranks + 1, sizeof *l->rank_begin) &&
        room(&l->of_source, &l->caps[10], blocks, sizeof *l->of_source) &&
        room(&l->source_begin, &l->caps[11], ranks + 1, sizeof *l->source_begin))
        return MZ_OK;
    return mz_fail_nomem(err, "the layout of a layer call");
}

void layout_free(layer_layout *l) {
    void *arrays[] = {l->block,   l->begin,      l->row,       l->again_row,
                      l->rows,    l->again_rows, l->sent,      l->again_sent,
                      l->by_rank, l->rank_begin, l->of_source, l->source_begin};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        free(arrays[i]);
    *l = (layer_layout){0};
}

/* Instances by rank, ascending. */
static void sort_instances(layer_layout *l, const mz_plan *plan) {
    int32_t *begin = l->rank_begin;
    memset(begin, 0, sizeof *begin * (size_t)(plan->ranks + 1));
    for (int32_t i = 0; i < l->instances; i++)
        begin[plan->rank[i] + 1]++;
    for (int32_t r = 0; r < plan->ranks; r++)
        begin[r + 1] += begin[r];
    for (int32_t i = 0; i < l->instances; i++)
        l->by_rank[begin[plan->rank[i]]++] = i;
    memmove(begin + 1, begin, sizeof *begin * (size_t)plan->ranks);
    begin[0] = 0;
}

/* Blocks by source, in order of instances. */
static void sort_blocks(layer_layout *l, int32_t ranks) {
    int64_t *begin = l->source_begin;
    const int64_t blocks = l->begin[l->instances];
    memset(begin, 0, sizeof *begin * (size_t)(ranks + 1));
    for (int64_t i = 0; i < blocks; i++)
        begin[l->block[i].source + 1]++;
    for (int32_t r = 0; r < ranks; r++)
        begin[r + 1] += begin[r];
    for (int64_t i = 0; i < blocks; i++)
        l->of_source[begin[l->block[i].source]++] = i;
    memmove(begin + 1, begin, sizeof *begin * (size_t)ranks);
    begin[0] = 0;
}

/* An expert's blocks take its pairs in order of instances. */
static void lay_runs(const mz_engine *e, const mz_plan *plan, layer_layout *l) {
    int64_t *taken = e->shared->taken;
    for (int32_t x = 0; x < plan->experts; x++) {
        memset(taken, 0, sizeof *taken * (size_t)plan->ranks);
        for (int64_t i = l->begin[plan->begin[x]]; i < l->begin[plan->begin[x + 1]]; i++) {
            layer_block *b = &l->block[i];
            b->from = taken[b->source];
            taken[b->source] += b->pairs;
        }
    }
}

static void lay_rows(const mz_plan *plan, layer_layout *l) {
    const size_t size = sizeof(int64_t) * (size_t)plan->ranks;
    memset(l->rows, 0, size);
    memset(l->again_rows, 0, size);
    memset(l->sent, 0, size);
    memset(l->again_sent, 0, size);
    for (int32_t k = 0; k < l->instances; k++) {
        const int32_t i = l->by_rank[k], rank = plan->rank[i];
        l->row[i] = l->rows[rank];
        l->again_row[i] = l->again_rows[rank];
        for (int64_t j = l->begin[i]; j < l->begin[i + 1]; j++) {
            layer_block *b = &l->block[j];
            b->receive = l->rows[rank];
            b->send = l->sent[b->source];
            l->rows[rank] += b->rows;
            l->sent[b->source] += b->rows;
            if (!b->moved)
                continue;
            b->again_receive = l->again_rows[rank];
            b->again_send = l->again_sent[b->source];
            l->again_rows[rank] += b->rows;
            l->again_sent[b->source] += b->rows;
        }
    }
}

/* Every source has a full buffer for every expert, used or not. */
static void padded_blocks(const mz_engine *e, const mz_load *load, const mz_plan *plan,
                          layer_layout *l) {
    for (int32_t i = 0; i < l->instances; i++) {
        layer_block *b = l->block + l->begin[i];
        for (int32_t s = 0; s < plan->ranks; s++)
            b[s] = (layer_block){
                .source = s, .instance = i, .rows = mz_capacity_rows(e->job.traits, load, s)};
        for (int64_t k = plan->entry_begin[i]; k < plan->entry_begin[i + 1]; k++)
            b[plan->entry_source[k]].pairs = plan->entry_pairs[k];
    }
}

static void exact_blocks(const mz_plan *plan, layer_layout *l) {
    for (int32_t i = 0; i < l->instances; i++)
        for (int64_t k = plan->entry_begin[i]; k < plan->entry_begin[i + 1]; k++)
            l->block[k] = (layer_block){.source = plan->entry_source[k],
                                        .instance = i,
                                        .pairs = plan->entry_pairs[k],
                                        .rows = plan->entry_pairs[k]};
}

mz_code layout_forward(const mz_engine *e, const mz_replay_call *call, const mz_plan *plan,
                       layer_layout *l, mz_err *err) {
    const bool padded = e->job.traits->capacity_padded;
    const int32_t instances = plan->begin[plan->experts];
    const int64_t blocks = padded ? (int64_t)instances * plan->ranks : plan->entry_begin[instances];
    if (padded && (instances != plan->experts || plan->has_backward))
        return mz_fail(err, MZ_EINTERNAL,
                       "layer %d: buffers padded to capacity go with one host per expert and "
                       "with a full backward",
                       call->layer);
    const mz_code code = make_room(l, plan->ranks, instances, blocks, err);
    if (code != MZ_OK)
        return code;
    l->instances = instances;
    for (int32_t i = 0; i <= instances; i++)
        l->begin[i] = padded ? (int64_t)i * plan->ranks : plan->entry_begin[i];
    if (padded)
        padded_blocks(e, &call->load, plan, l);
    else
        exact_blocks(plan, l);
    sort_instances(l, plan);
    sort_blocks(l, plan->ranks);
    lay_runs(e, plan, l);
    lay_rows(plan, l);
    return MZ_OK;
}

mz_code layout_backward(const mz_engine *e, const mz_plan *plan, layer_layout *l, mz_err *err) {
    const int32_t instances = plan->begin[plan->experts];
    const mz_code code = make_room(l, plan->ranks, instances, 2 * plan->back_begin[instances], err);
    if (code != MZ_OK)
        return code;
    l->instances = instances;
    for (int32_t i = 0; i <= instances; i++)
        l->begin[i] = 2 * plan->back_begin[i];
    for (int32_t i = 0; i < instances; i++) {
        const int64_t n = plan->back_begin[i + 1] - plan->back_begin[i];
        for (int64_t k = 0; k < n; k++) {
            const int32_t source = plan->back_source[plan->back_begin[i] + k];
            layer_block *b = l->block + l->begin[i] + k;
            b[0] = (layer_block){.source = source,
                                 .instance = i,
                                 .pairs = plan->back_pairs[plan->back_begin[i] + k]};
            b[n] = (layer_block){.source = source, .instance = i, .moved = true};
        }
    }
    sort_instances(l, plan);
    sort_blocks(l, plan->ranks);
    return MZ_OK;
}

void layout_place(const mz_engine *e, const mz_plan *plan, const int64_t *moved, layer_layout *l) {
    for (int32_t i = 0; i < l->instances; i++) {
        const int64_t n = plan->back_begin[i + 1] - plan->back_begin[i];
        for (int64_t k = 0; k < n; k++) {
            layer_block *b = l->block + l->begin[i] + k;
            const int64_t pairs = plan->back_pairs[plan->back_begin[i] + k];
            const int64_t away = moved ? moved[(int64_t)b->source * l->instances + i] : pairs;
            b[0].pairs = b[0].rows = pairs - away;
            b[n].pairs = b[n].rows = away;
        }
    }
    lay_runs(e, plan, l);
    lay_rows(plan, l);
}
