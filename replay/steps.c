#include "replay/steps.h"

#include "replay/deal.h"

#include <stdlib.h>
#include <string.h>

struct mz_replay_steps {
    int32_t top_k;
    mz_arena arena; /* of the step at hand */
    mz_dealt dealt;
};

mz_code mz_replay_steps_create(int32_t top_k, mz_replay_steps **out, mz_err *err) {
    mz_replay_steps *s = *out = mz_calloc(1, sizeof *s);
    if (!s)
        return mz_fail_nomem(err, "a step");
    s->top_k = top_k;
    return MZ_OK;
}

void mz_replay_steps_free(mz_replay_steps **steps) {
    if (!*steps)
        return;
    mz_arena_free(&(*steps)->arena);
    mz_dealt_free(&(*steps)->dealt);
    free(*steps);
    *steps = NULL;
}

/* A copy in the step's memory; NULL stays NULL. */
static bool keep(mz_arena *arena, const void *from, int64_t count, size_t size, const void **to) {
    *to = NULL;
    if (!from)
        return true;
    void *copy = mz_arena_alloc(arena, (size_t)count, size);
    if (copy && count > 0)
        memcpy(copy, from, (size_t)count * size);
    *to = copy;
    return copy != NULL;
}

#define KEEP(field, count)                                                                         \
    keep(arena, from->field, count, sizeof *from->field, (const void **)&to->field)

static bool keep_load(mz_arena *arena, const mz_load *from, mz_load *to) {
    *to = *from;
    return KEEP(count, (int64_t)from->sources * from->experts) && KEEP(total, from->experts) &&
           KEEP(source, from->sources);
}

/* Offsets count from the call's first token and pair, whoever recorded them. */
static bool keep_pairs(mz_arena *arena, const mz_pairs *from, mz_pairs *to) {
    *to = *from;
    return KEEP(token_begin, from->sources + 1) && KEEP(pair_begin, from->sources + 1) &&
           KEEP(token_pairs, from->tokens) && KEEP(expert, from->pairs) &&
           KEEP(weight, from->pairs) && KEEP(grad_norm2, from->tokens) &&
           KEEP(input_norm2, from->tokens) && KEEP(hidden_norm2, from->pairs);
}

static mz_code keep_call(mz_replay_steps *s, const mz_layer_call *from, int64_t step,
                         mz_replay_call *to, mz_err *err) {
    mz_pairs dealt;
    const mz_pairs *pairs = from->pairs;
    if (!pairs) {
        mz_code code = mz_deal_pairs(&s->dealt, from->load, s->top_k, &dealt, err);
        if (code != MZ_OK)
            return code;
        pairs = &dealt;
    }
    to->step = step;
    to->micro_batch = from->micro_batch;
    to->layer = from->layer;
    if (!keep_load(&s->arena, from->load, &to->load) || !keep_pairs(&s->arena, pairs, &to->pairs))
        return mz_fail_nomem(err, "the calls of a step");
    return MZ_OK;
}

mz_code mz_replay_steps_next(mz_replay_steps *s, const mz_load_source *source, mz_replay_step *step,
                             bool *end, mz_err *err) {
    mz_step_head head;
    mz_arena_free(&s->arena);
    *step = (mz_replay_step){0};
    mz_code code = source->next_step(source->self, &head, end, err);
    if (code != MZ_OK || *end)
        return code;
    const int64_t calls = (int64_t)head.micro_batches * head.layers;
    mz_replay_call *call = MZ_NEW(&s->arena, mz_replay_call, calls);
    if (!call)
        return mz_fail_nomem(err, "the calls of a step");
    *step = (mz_replay_step){.step = head.step,
                             .micro_batches = head.micro_batches,
                             .layers = head.layers,
                             .call = call};
    for (int64_t i = 0; i < (int64_t)head.micro_batches * source->ranks; i++)
        step->tokens += head.tokens[i];
    for (int64_t c = 0; code == MZ_OK && c < calls; c++) {
        mz_layer_call now;
        code = source->next_call(source->self, &now, err);
        if (code == MZ_OK) {
            step->dealt = step->dealt || !now.pairs;
            code = keep_call(s, &now, head.step, &call[c], err);
        }
    }
    return code;
}
