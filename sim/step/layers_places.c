/* Scope layers, placements that last: which rank has which expert from call to call, and so what a
 * new placement brings to a rank. A replay receives all of it beside the slots before it stores
 * any, whether its bytes are charged or not: what a slot holds may be on its way elsewhere
 * (replay/experts_place.c). Where a plan states more bytes than that, as for an expert that comes
 * to several slots of a rank, both ends hold the rest, too. */
#include "sim/step/inside.h"

#include <string.h>

/* OWNED: the expert's first instance. */
enum { ABSENT, HOSTED, OWNED };

mz_code layers_create_places(mz_step *s, mz_err *err) {
    const int64_t cells = (int64_t)s->ep * s->model->experts;
    s->place = MZ_NEW(&s->arena, uint8_t, s->moe * cells);
    s->place_now = MZ_NEW(&s->arena, uint8_t, s->ep);
    s->placed = MZ_NEW(&s->arena, bool, s->moe);
    s->stated = MZ_NEW(&s->arena, int64_t, cells);
    s->stated_from = MZ_NEW(&s->arena, int32_t, cells);
    return s->place && s->place_now && s->placed && s->stated && s->stated_from
               ? MZ_OK
               : mz_fail_nomem(err, "a step");
}

/* Optimizer state of one expert of one layer: of all slots that have their own. */
static int64_t state_bytes(const mz_step *s) {
    const mz_policy_traits *t = &s->traits;
    const bool every = t->replica_optimizer && t->slots > s->mains;
    return s->sizes.optimizer / ((every ? t->slots : s->mains) * s->moe);
}

/* What comes to a rank that had the expert as `before` and has it as `now`. Where only some slots
 * have optimizer state, the first instance needs one of these and others leave them alone. */
static int64_t arriving(const mz_step *s, int before, int now, int32_t micro_batch) {
    const mz_policy_traits *t = &s->traits;
    const int64_t weights = 2 * mz_model_expert_parameters(s->model);
    const bool alike = t->sharded_optimizer || t->replica_optimizer || t->slots <= s->mains;
    const bool stays = before != ABSENT && (alike || before == now);
    const bool state = !t->sharded_optimizer && (t->replica_optimizer || now == OWNED);
    int64_t bytes = stays ? 0 : weights + (state ? state_bytes(s) : 0);
    if (micro_batch > 0 && now == OWNED && before != OWNED)
        bytes += weights; /* gradients summed so far */
    return bytes;
}

/* Bytes that moves of the call's change of placement bring to (expert, rank), and whence its
 * weights: -1 where none come. */
static void note_stated(mz_step *s, const step_call *call) {
    const int64_t cells = (int64_t)s->model->experts * s->ep;
    memset(s->stated, 0, sizeof *s->stated * (size_t)cells);
    for (int64_t i = 0; i < cells; i++)
        s->stated_from[i] = -1;
    for (int64_t i = call->move + call->moves; i-- > call->move;) {
        const mz_move *m = &s->move[i];
        if (!m->change || m->src < 0 || m->dst < 0 || m->kind == MZ_MOVE_GRADIENTS)
            continue;
        const int64_t cell = (int64_t)m->expert * s->ep + m->dst;
        s->stated[cell] += m->bytes;
        if (m->kind == MZ_MOVE_WEIGHTS)
            s->stated_from[cell] = m->src;
    }
}

/* One expert's arrivals. */
static void note_arrivals(mz_step *s, const step_at *at, int32_t expert, const uint8_t *before) {
    layers_work *work = layers_work_at(s, at->micro_batch, at->moe);
    for (int32_t r = 0; r < s->ep; r++) {
        const int64_t cell = (int64_t)expert * s->ep + r;
        const int64_t bytes = s->place_now[r] == ABSENT
                                  ? 0
                                  : arriving(s, before[r], s->place_now[r], at->micro_batch);
        const int64_t rest = bytes > 0 ? s->stated[cell] - bytes : 0;
        work[r].arrived_bytes += bytes;
        if (rest <= 0 || s->stated_from[cell] < 0)
            continue;
        work[r].arrived_bytes += rest;
        work[s->stated_from[cell]].arrived_bytes += rest;
    }
}

void layers_note_places(mz_step *s, const mz_plan *plan, const step_at *at) {
    uint8_t *place = s->place + (int64_t)at->moe * plan->experts * s->ep;
    if (layers_per_call(s))
        return;
    note_stated(s, at->call);
    for (int32_t e = 0; e < plan->experts; e++, place += s->ep) {
        memset(s->place_now, ABSENT, (size_t)s->ep);
        for (int32_t i = plan->begin[e + 1]; i-- > plan->begin[e];)
            s->place_now[plan->rank[i]] = i == plan->begin[e] ? OWNED : HOSTED;
        if (s->placed[at->moe])
            note_arrivals(s, at, e, place);
        memcpy(place, s->place_now, (size_t)s->ep);
    }
    s->placed[at->moe] = true;
}
