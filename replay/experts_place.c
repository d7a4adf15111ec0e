/* Placements that last: which slot holds which expert, and what a changed placement moves. */
#include "replay/experts_inside.h"

#include <string.h>

enum { NOWHERE = -1 };

/* ---- slots
 * ---------------------------------------------------------------------------------------*/

/* Where only some slots have optimizer state, first instances need one of these and others leave
 * them alone. */
static bool slot_suits(const mz_experts *x, int32_t slot, bool owner) {
    if (x->mode == EXPERTS_CUT || x->state_slots == x->slots)
        return true;
    return (slot < x->state_slots) == owner;
}

/* A suitable slot whose former holder is `mark` and which is not taken yet, or -1. */
static int32_t find_slot(const mz_experts *x, int32_t layer, int32_t rank, int32_t mark,
                         bool owner) {
    const int32_t *held = experts_held(x, layer, rank), *former = x->former + rank * x->slots;
    for (int32_t j = 0; j < x->slots; j++)
        if (former[j] == mark && held[j] == NOWHERE && slot_suits(x, j, owner))
            return j;
    return -1;
}

static int32_t free_slot(const mz_experts *x, int32_t layer, int32_t rank, bool owner) {
    const int32_t *held = experts_held(x, layer, rank);
    for (int32_t j = 0; j < x->slots; j++)
        if (held[j] == NOWHERE && slot_suits(x, j, owner))
            return j;
    return -1;
}

/* The slot that held the expert's weights before, or -1. */
static int32_t former_slot(const mz_experts *x, int32_t rank, int32_t expert) {
    const int32_t *former = x->former + rank * x->slots;
    for (int32_t j = 0; j < x->slots; j++)
        if (former[j] == expert)
            return j;
    return -1;
}

/* Instances that find their expert where it was keep their slots; x->instance[i].slot. */
static void keep_slots(mz_experts *x, int32_t layer, const mz_plan *plan) {
    const size_t all = (size_t)x->e->job.ranks * (size_t)x->slots;
    int32_t *held = experts_held(x, layer, 0);
    memcpy(x->former, held, sizeof *held * all);
    for (size_t j = 0; j < all; j++)
        held[j] = NOWHERE;
    for (int32_t e = 0; e < plan->experts; e++)
        for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++) {
            const int32_t rank = plan->rank[i];
            const bool first = experts_first(plan, e, rank) == i;
            const int32_t mark = first ? e : -2 - e;
            const int32_t slot = find_slot(x, layer, rank, mark, i == plan->begin[e]);
            x->instance[i].slot = slot;
            x->instance[i].arrived = slot < 0;
            if (slot >= 0)
                experts_held(x, layer, rank)[slot] = mark;
        }
}

/* ---- where an arrival comes from
 * -----------------------------------------------------------------*/

/* The change's move that brings the expert's weights, and all bytes stated for it; false: none. */
static bool change_of(const mz_experts *x, const mz_plan *plan, experts_arrival *a,
                      bool *whole_step) {
    bool found = false;
    for (int32_t i = 0; i < plan->moves; i++) {
        const mz_move *m = &plan->move[i];
        if (!m->change || m->expert != a->expert || m->dst != a->rank || m->src < 0 ||
            m->kind == MZ_MOVE_GRADIENTS)
            continue;
        a->budget += m->hide == MZ_HIDE_FREE ? 0 : experts_stated(x, m);
        *whole_step = *whole_step || m->phase == MZ_MOVE_STEP;
        if (m->kind == MZ_MOVE_WEIGHTS && !found) {
            a->weights = m->src;
            found = true;
        }
    }
    return found;
}

/* Does the rank get the expert's weights after every step? */
static bool refreshed(const mz_plan *plan, int32_t expert, int32_t rank) {
    for (int32_t i = 0; i < plan->moves; i++) {
        const mz_move *m = &plan->move[i];
        if (m->kind == MZ_MOVE_WEIGHTS && m->phase == MZ_MOVE_STEP && !m->change &&
            m->expert == expert && m->dst == rank)
            return true;
    }
    return false;
}

static mz_code add_arrival(mz_experts *x, const mz_replay_call *call, const mz_plan *plan,
                           int32_t i, int32_t slot, bool *whole_step, mz_err *err) {
    const int32_t e = x->instance[i].expert, rank = plan->rank[i], layer = call->layer;
    const int32_t owner = mz_experts_owner(x, layer, e);
    const bool owns = i == plan->begin[e];
    experts_arrival a = {.expert = e, .rank = rank, .slot = slot, .state = -1, .gradient = -1};
    const bool changes = change_of(x, plan, &a, whole_step);
    if (!changes) {
        a.weights = former_slot(x, rank, e) >= 0 ? rank : owner;
        if (a.weights != rank && !refreshed(plan, e, rank))
            return experts_bug(layer, e, rank, "the plan has it there, but nothing moves it", err);
    }
    const int32_t from = former_slot(x, a.weights, e);
    if (from < 0)
        return experts_bug(layer, e, a.weights, "it is to send weights that it does not have", err);
    if (x->mode == EXPERTS_LAST && (owns || x->state_slots == x->slots))
        a.state = from < x->state_slots ? a.weights : owner;
    if (!changes && a.state >= 0 && a.state != rank)
        return experts_bug(layer, e, rank, "nothing moves its optimizer state there", err);
    if (owns && call->micro_batch > 0)
        a.gradient = owner;
    if (!mz_grow((void **)&x->arrival, &x->arrival_cap, (size_t)x->arrivals + 1,
                 sizeof *x->arrival))
        return mz_fail_nomem(err, "experts that move");
    x->arrival[x->arrivals++] = a;
    return MZ_OK;
}

static mz_code no_slot(const mz_experts *x, int32_t layer, int32_t expert, int32_t rank, bool owner,
                       mz_err *err) {
    if (x->state_slots == x->slots)
        return experts_bug(layer, expert, rank, "there is no slot for it", err);
    return mz_fail(err, MZ_EINPUT,
                   "the policy's optimizer state lies elsewhere than its experts (rank %d would "
                   "%s more than %d of layer %d), which a replay does not do; choose "
                   "optimizer=replicated",
                   rank, owner ? "update" : "hold copies of",
                   owner ? x->state_slots : x->slots - x->state_slots, layer);
}

/* The other instances get a slot that is free. */
static mz_code fill_slots(mz_experts *x, const mz_replay_call *call, const mz_plan *plan,
                          bool *whole_step, mz_err *err) {
    const int32_t layer = call->layer;
    mz_code code = MZ_OK;
    for (int32_t e = 0; code == MZ_OK && e < plan->experts; e++)
        for (int32_t i = plan->begin[e]; code == MZ_OK && i < plan->begin[e + 1]; i++) {
            experts_instance *at = &x->instance[i];
            const int32_t rank = plan->rank[i];
            const bool first = experts_first(plan, e, rank) == i;
            at->expert = e;
            if (at->slot >= 0)
                continue;
            at->slot = free_slot(x, layer, rank, i == plan->begin[e]);
            if (at->slot < 0)
                return no_slot(x, layer, e, rank, i == plan->begin[e], err);
            experts_held(x, layer, rank)[at->slot] = first ? e : -2 - e;
            if (first && x->placed[layer])
                code = add_arrival(x, call, plan, i, at->slot, whole_step, err);
            else if (first && experts_local(x, rank))
                code = experts_start_slot(x, layer, rank, at->slot, e, err);
        }
    return code;
}

/* Gradients summed so far follow where an instance becomes the first one in the middle of a step.
 */
static mz_code follow_owners(mz_experts *x, const mz_replay_call *call, const mz_plan *plan,
                             mz_err *err) {
    int32_t *owner = x->owner + (int64_t)call->layer * plan->experts;
    for (int32_t e = 0; e < plan->experts; e++) {
        const int32_t i = plan->begin[e], rank = plan->rank[i], before = owner[e];
        owner[e] = rank;
        if (rank == before || call->micro_batch == 0 || former_slot(x, rank, e) < 0)
            continue;
        if (!mz_grow((void **)&x->arrival, &x->arrival_cap, (size_t)x->arrivals + 1,
                     sizeof *x->arrival))
            return mz_fail_nomem(err, "experts that move");
        x->arrival[x->arrivals++] = (experts_arrival){.expert = e,
                                                      .rank = rank,
                                                      .slot = x->instance[i].slot,
                                                      .weights = -1,
                                                      .state = -1,
                                                      .gradient = before};
    }
    return MZ_OK;
}

/* ---- moving
 * --------------------------------------------------------------------------------------*/

/* Pieces of memory of a slot; memory NULL on ranks elsewhere. */
typedef struct span {
    char *memory;
    int64_t bytes;
} span;
enum { SPANS = EXPERTS_MATRICES * MZ_UPDATE_STATES };
typedef enum content { WEIGHTS, STATE, GRADIENT, CONTENTS } content;

static int spans_of(const mz_experts *x, int32_t layer, int32_t rank, int32_t slot, content what,
                    span out[SPANS]) {
    const mz_replay_job *job = &x->e->job;
    const experts_memory m = experts_slot_memory(x, layer, rank, slot);
    int n = 0;
    for (int k = 0; k < EXPERTS_MATRICES; k++) {
        if (what != STATE) {
            out[n++] = (span){what == WEIGHTS ? m.weight[k] : m.gradient[k],
                              x->values[k] * x->value_bytes};
            continue;
        }
        int64_t part[MZ_UPDATE_STATES], before = 0;
        char *block =
            experts_local(x, rank) ? experts_layer_of(x, layer, rank)->state[k].memory : NULL;
        mz_update_parts(job->optimizer, job->type, x->rows[k], x->cols[k], part);
        for (int i = 0; i < MZ_UPDATE_STATES; i++) {
            const int64_t at = before * x->state_slots + slot * part[i];
            if (part[i] > 0)
                out[n++] = (span){experts_at(block, at * (int64_t)sizeof(float)),
                                  part[i] * (int64_t)sizeof(float)};
            before += part[i];
        }
    }
    return n;
}

static int32_t sender_of(const experts_arrival *a, content what) {
    return what == WEIGHTS ? a->weights : what == STATE ? a->state : a->gradient;
}

static int64_t bytes_of(const mz_experts *x, int32_t layer, const experts_arrival *a) {
    span s[SPANS];
    int64_t bytes = 0;
    for (content what = WEIGHTS; what < CONTENTS; what++) {
        const int n = spans_of(x, layer, a->rank, a->slot, what, s);
        for (int i = 0; sender_of(a, what) >= 0 && i < n; i++)
            bytes += s[i].bytes;
    }
    return bytes;
}

/* What arrives is received beside the slots: what they hold may be on its way elsewhere. */
static mz_code receive(mz_experts *x, int32_t layer, experts_arrival *a, mz_err *err) {
    mz_code code = MZ_OK;
    if (experts_local(x, a->rank))
        code = mz_heap_take(x->e->heap, a->rank, MZ_MEM_TEMPORARIES, bytes_of(x, layer, a),
                            "layer %d experts that arrive", layer, &a->received, err);
    int64_t at = 0, budget = a->budget;
    for (content what = WEIGHTS; what < CONTENTS; what++) {
        const int32_t from = sender_of(a, what);
        span s[SPANS];
        const int n =
            from < 0 ? 0 : spans_of(x, layer, from, former_slot(x, from, a->expert), what, s);
        int64_t none = 0;
        for (int i = 0; code == MZ_OK && i < n; i++) {
            code = experts_add_piece(x, from, a->rank, s[i].memory,
                                     experts_at(a->received.memory, at), s[i].bytes,
                                     from == a->weights && what != GRADIENT ? &budget : &none, err);
            at += s[i].bytes;
        }
    }
    if (code == MZ_OK && a->weights >= 0)
        code = experts_add_padding(x, a->weights, a->rank, budget, layer, err);
    return code;
}

static mz_code store(mz_experts *x, int32_t layer, experts_arrival *a, mz_err *err) {
    mz_kstatus status = MZ_K_OK;
    int64_t at = 0;
    for (content what = WEIGHTS; what < CONTENTS; what++) {
        span s[SPANS];
        const int n = sender_of(a, what) < 0 ? 0 : spans_of(x, layer, a->rank, a->slot, what, s);
        for (int i = 0; status == MZ_K_OK && i < n; i++) {
            status = mz_kernels_copy(x->e->kernels, 0, MZ_COPY_INSIDE, s[i].memory,
                                     (char *)a->received.memory + at, (size_t)s[i].bytes);
            at += s[i].bytes;
        }
    }
    return engine_kernel(x->e, status, "copies of experts", a->rank, layer, err);
}

static mz_code store_charged(mz_experts *x, int32_t layer, int32_t row, mz_err *err) {
    mz_code code = MZ_OK;
    for (int64_t i = 0; code == MZ_OK && i < x->arrivals; i++) {
        experts_arrival *a = &x->arrival[i];
        if (!experts_local(x, a->rank) || a->budget == 0)
            continue;
        const double start = mz_now();
        code = store(x, layer, a, err);
        if (code == MZ_OK)
            code = engine_charge(x->e, a->rank, MZ_PHASE_WEIGHT_MOVE, row, start, err);
    }
    return code;
}

static mz_code store_uncharged(mz_experts *x, int32_t layer, mz_err *err) {
    mz_code code = MZ_OK;
    bool any = false;
    const double start = mz_now();
    for (int64_t i = 0; code == MZ_OK && i < x->arrivals; i++) {
        experts_arrival *a = &x->arrival[i];
        any = any || a->budget == 0;
        if (experts_local(x, a->rank) && a->budget == 0)
            code = store(x, layer, a, err);
    }
    engine_untimed(x->e, start);
    return code == MZ_OK && any ? engine_meet(x->e, err) : code;
}

/* What nobody is charged for comes first, so that processes meet for it where they just met. */
static mz_code move_arrivals(mz_experts *x, int32_t layer, int32_t row, mz_err *err) {
    mz_engine *e = x->e;
    mz_code code = MZ_OK;
    for (int64_t i = 0; code == MZ_OK && i < x->arrivals; i++)
        code = receive(x, layer, &x->arrival[i], err);
    if (code == MZ_OK)
        code = experts_run_pieces(x, MZ_PHASE_WEIGHT_MOVE, layer, row, err);
    if (code == MZ_OK)
        code = store_uncharged(x, layer, err);
    if (code == MZ_OK)
        code = store_charged(x, layer, row, err);
    for (int64_t i = 0; i < x->arrivals; i++)
        mz_heap_give(e->heap, &x->arrival[i].received);
    x->arrivals = 0;
    return code;
}

/* In the middle of a step a slot has the gradient of who left it: whoever comes starts anew, unless
 * it brought the sum so far. */
static mz_code clear_arrived(mz_experts *x, const mz_replay_call *call, const mz_plan *plan,
                             mz_err *err) {
    mz_code code = MZ_OK;
    for (int32_t i = 0; call->micro_batch > 0 && i < plan->begin[plan->experts]; i++) {
        const experts_instance *at = &x->instance[i];
        const int32_t rank = plan->rank[i];
        if (!at->arrived || i == plan->begin[at->expert] || !experts_local(x, rank))
            continue;
        const experts_memory m = experts_slot_memory(x, call->layer, rank, at->slot);
        for (int k = 0; code == MZ_OK && k < EXPERTS_MATRICES; k++)
            code = experts_zero(x, m.gradient[k], x->values[k] * x->value_bytes, rank, call->layer,
                                err);
    }
    return code;
}

mz_code experts_place(mz_experts *x, const mz_replay_call *call, const mz_plan *plan, mz_err *err) {
    if (plan->begin[plan->experts] > x->e->job.instances)
        return mz_fail(err, MZ_EINTERNAL, "layer %d: a plan of %d instances, at most %d were said",
                       call->layer, plan->begin[plan->experts], x->e->job.instances);
    bool whole_step = false;
    const double start = mz_now();
    keep_slots(x, call->layer, plan);
    mz_code code = fill_slots(x, call, plan, &whole_step, err);
    if (code == MZ_OK)
        code = follow_owners(x, call, plan, err);
    engine_untimed(x->e, start);
    if (code == MZ_OK && !x->placed[call->layer]) /* weights were made */
        code = engine_meet(x->e, err);
    x->placed[call->layer] = true;
    if (code == MZ_OK)
        code = move_arrivals(x, call->layer, whole_step ? x->e->job.layers : call->layer, err);
    return code == MZ_OK ? clear_arrived(x, call, plan, err) : code;
}
