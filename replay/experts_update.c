/* After the last backward: the gradient's norm, the optimizer, fresh weights. And what a check
 * reads. */
#include "replay/experts_inside.h"

#include "common/base/log.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Slots [first, first + count) of a rank that lie side by side. */
typedef struct run {
    int32_t first, count;
} run;

/* Slots with weights of their own; with `owners` those of first instances alone. */
static bool counts(const mz_experts *x, int32_t layer, int32_t rank, int32_t slot, bool owners) {
    const int32_t e = experts_held(x, layer, rank)[slot];
    return e >= 0 && (!owners || mz_experts_owner(x, layer, e) == rank);
}

/* The next run from `at` on of at most `most` slots; false: there is none. */
static bool next_run(const mz_experts *x, int32_t layer, int32_t rank, int32_t at, bool owners,
                     int32_t most, run *out) {
    const int32_t mains = experts_mains(x, rank);
    while (at < x->slots && !counts(x, layer, rank, at, owners))
        at++;
    if (at >= x->slots)
        return false;
    *out = (run){at, 1};
    while (out->count < most && at + out->count < x->slots && at + out->count != mains &&
           counts(x, layer, rank, at + out->count, owners))
        out->count++;
    return true;
}

/* ---- norm
 * ----------------------------------------------------------------------------------------*/

/* Adds the squares of [rows][cols] of gradients. */
static mz_code add_squares(mz_experts *x, int32_t layer, int32_t rank, const void *from,
                           int64_t rows, int64_t cols, double *sum, mz_err *err) {
    mz_kernels *k = x->e->kernels;
    const size_t bytes = sizeof(float) * (size_t)rows;
    mz_buffer out = {0};
    if (!mz_grow((void **)&x->row_norm, &x->row_norm_cap, (size_t)rows, sizeof *x->row_norm))
        return mz_fail_nomem(err, "the gradient's norm");
    mz_code code = mz_heap_take(x->e->heap, rank, MZ_MEM_TEMPORARIES, (int64_t)bytes,
                                "layer %d gradient norms", layer, &out, err);
    if (code != MZ_OK)
        return code;
    const mz_norms norms = {.type = x->e->job.type,
                            .x = from,
                            .rows = rows,
                            .cols = cols,
                            .stride = cols,
                            .out = out.memory};
    mz_kstatus status = mz_row_norms(k, 0, &norms);
    if (status == MZ_K_OK)
        status = mz_kernels_copy(k, 0, MZ_COPY_OUT, x->row_norm, out.memory, bytes);
    if (status == MZ_K_OK)
        status = mz_kernels_sync(k, 0);
    for (int64_t i = 0; status == MZ_K_OK && i < rows; i++)
        *sum += x->row_norm[i];
    mz_heap_give(x->e->heap, &out);
    return engine_kernel(x->e, status, "norm of gradients", rank, layer, err);
}

static mz_code square_layer(mz_experts *x, int32_t layer, int32_t rank, double *sum, mz_err *err) {
    if (x->mode == EXPERTS_CUT) {
        const int64_t n = experts_cut_begin(x, rank + 1) - experts_cut_begin(x, rank);
        return n == 0 ? MZ_OK
                      : add_squares(x, layer, rank, experts_cut_gradient(x, layer, rank),
                                    x->e->job.experts, n, sum, err);
    }
    mz_code code = MZ_OK;
    run r = {0};
    while (code == MZ_OK && next_run(x, layer, rank, r.first + r.count, true, x->slots, &r)) {
        const experts_memory m = experts_slot_memory(x, layer, rank, r.first);
        for (int k = 0; code == MZ_OK && k < EXPERTS_MATRICES; k++)
            code = add_squares(x, layer, rank, m.gradient[k], r.count * x->rows[k], x->cols[k], sum,
                               err);
    }
    return code;
}

/* Clipping to norm 1 would be part of a training run; here the norm is measured and must be a
 * number. */
static mz_code gradient_norm(mz_experts *x, mz_err *err) {
    mz_engine *e = x->e;
    const int32_t R = e->job.ranks;
    double *mine = x->norm2 + R, total = 0;
    mz_code code = MZ_OK;
    for (int32_t r = e->first; code == MZ_OK && r < e->end; r++) {
        const double start = mz_now();
        mine[r - e->first] = 0;
        for (int32_t l = 0; code == MZ_OK && l < e->job.layers; l++)
            code = square_layer(x, l, r, &mine[r - e->first], err);
        if (code == MZ_OK)
            code = engine_charge(e, r, MZ_PHASE_OPTIMIZER, e->job.layers, start, err);
    }
    if (code == MZ_OK)
        code = engine_gather(e, mine, sizeof *mine, x->norm2, MZ_PHASE_GRADIENT_REDUCE,
                             e->job.layers, mz_now(), err);
    for (int32_t r = 0; code == MZ_OK && r < R; r++) {
        total += x->norm2[r];
        if (!isfinite(total))
            return mz_fail(err, MZ_EINTERNAL,
                           "step %lld: the squared norm of the gradients of rank %d is %g: a "
                           "buffer was read before it was written, or a message was corrupted",
                           (long long)e->ordinal, r, x->norm2[r]);
    }
    x->norm = sqrt(total);
    return code;
}

/* ---- optimizer
 * -----------------------------------------------------------------------------------*/

static mz_code run_update(mz_experts *x, int32_t layer, int32_t rank, const mz_update_call *call,
                          mz_err *err) {
    mz_buffer scratch = {0};
    mz_code code = mz_heap_take(x->e->heap, rank, MZ_MEM_WORKSPACE,
                                (int64_t)mz_update_scratch(x->e->kernels, call),
                                "layer %d optimizer update", layer, &scratch, err);
    if (code != MZ_OK)
        return code;
    for (int i = 0; code == MZ_OK && i <= x->repeat; i++)
        code = engine_kernel(x->e, mz_update_run(x->e->kernels, call, scratch.memory), "update",
                             rank, layer, err);
    x->repeated = x->repeated || x->repeat;
    mz_heap_give(x->e->heap, &scratch);
    return code;
}

/* One matrix kind of a run of slots. Copies of one expert must be written with the same random
 * bits: they are then updated one by one, each with the expert's own. */
static mz_code update_run(mz_experts *x, int32_t layer, int32_t rank, run r, bool alone, int k,
                          mz_err *err) {
    const mz_replay_job *job = &x->e->job;
    const experts_memory m = experts_slot_memory(x, layer, rank, r.first);
    const int32_t who = alone ? experts_held(x, layer, rank)[r.first] : rank;
    const int32_t of = job->experts > job->ranks ? job->experts : job->ranks;
    const mz_update_call call = {
        .optimizer = job->optimizer,
        .type = job->type,
        .held = experts_state_slots(x, rank),
        .first = r.first,
        .matrices = r.count,
        .rows = x->rows[k],
        .cols = x->cols[k],
        .step = x->e->ordinal + 1,
        .seed = job->seed,
        .tensor = ((uint64_t)layer * (uint64_t)of + (uint64_t)who) * EXPERTS_MATRICES + (uint64_t)k,
        .weights = m.weight[k],
        .block = experts_layer_of(x, layer, rank)->state[k].memory,
        .gradient = m.gradient[k]};
    return run_update(x, layer, rank, &call, err);
}

static mz_code update_rank(mz_experts *x, int32_t rank, mz_err *err) {
    const mz_replay_job *job = &x->e->job;
    const bool copies = job->traits->replica_optimizer;
    const bool alone = copies && mz_update_is_dithered(job->optimizer, job->type);
    const double start = mz_now();
    mz_code code = MZ_OK;
    for (int32_t l = 0; l < job->layers; l++) {
        run r = {0};
        while (code == MZ_OK &&
               next_run(x, l, rank, r.first + r.count, !copies, alone ? 1 : x->slots, &r))
            for (int k = 0; code == MZ_OK && k < EXPERTS_MATRICES; k++)
                code = update_run(x, l, rank, r, alone, k, err);
    }
    return code == MZ_OK ? engine_charge(x->e, rank, MZ_PHASE_OPTIMIZER, job->layers, start, err)
                         : code;
}

/* ---- fresh weights of slots that have no optimizer state
 * -----------------------------------------*/

static bool is_fresh(const mz_move *m) {
    return m->kind == MZ_MOVE_WEIGHTS && m->phase == MZ_MOVE_STEP && !m->change;
}

/* The stated move to (expert, rank); `any`: whether the layer has moves of this kind at all. */
static const mz_move *fresh_move(const mz_experts *x, int32_t layer, int32_t expert, int32_t rank,
                                 bool *any) {
    const mz_move *found = NULL;
    *any = false;
    for (int32_t i = 0; i < x->onces[layer]; i++) {
        const mz_move *m = &x->once[layer][i];
        if (!is_fresh(m))
            continue;
        *any = true;
        if (m->expert == expert && m->dst == rank)
            found = m;
    }
    return found;
}

static mz_code refresh_slot(mz_experts *x, int32_t layer, int32_t rank, int32_t slot, mz_err *err) {
    const int32_t e = experts_held(x, layer, rank)[slot];
    const int32_t owner = mz_experts_owner(x, layer, e);
    bool any;
    const mz_move *m = fresh_move(x, layer, e, rank, &any);
    if (any && (!m || m->src != owner))
        return experts_bug(layer, e, rank, "no move from its main brings fresh weights", err);
    int64_t budget = m && m->hide != MZ_HIDE_FREE ? experts_stated(x, m) : 0;
    const experts_memory from =
        experts_slot_memory(x, layer, owner, experts_slot(x, layer, owner, e));
    const experts_memory to = experts_slot_memory(x, layer, rank, slot);
    mz_code code = experts_add_values(x, owner, rank, from.weight, to.weight, x->value_bytes, 0,
                                      x->all, &budget, err);
    return code == MZ_OK ? experts_add_padding(x, owner, rank, budget, layer, err) : code;
}

/* Where a policy states no fresh weights at all, its optimizer lies elsewhere and they come
 * uncharged. */
static mz_code refresh(mz_experts *x, mz_err *err) {
    const mz_replay_job *job = &x->e->job;
    mz_code code = MZ_OK;
    for (int32_t l = 0; l < job->layers; l++)
        for (int32_t r = 0; r < job->ranks; r++)
            for (int32_t j = 0; code == MZ_OK && j < x->slots; j++)
                if (counts(x, l, r, j, false) && !counts(x, l, r, j, true) &&
                    !job->traits->replica_optimizer)
                    code = refresh_slot(x, l, r, j, err);
    return code == MZ_OK
               ? experts_run_pieces(x, MZ_PHASE_WEIGHT_MOVE, job->layers, job->layers, err)
               : code;
}

/* ---- an optimizer that is cut over the group
 * -----------------------------------------------------*/

/* Weights of the parts, [E][n] on every local rank; without master weights they are what is
 * updated, and come from the slots. */
static mz_code take_weights(mz_experts *x, int32_t layer, mz_err *err) {
    const mz_replay_job *job = &x->e->job;
    const bool master = mz_update_has_master(job->optimizer, job->type);
    mz_code code = MZ_OK;
    for (int32_t r = 0; code == MZ_OK && r < job->ranks; r++) {
        const int64_t low = experts_cut_begin(x, r), n = experts_cut_begin(x, r + 1) - low;
        mz_buffer *part = experts_local(x, r) ? &x->fresh[r - x->e->first] : NULL;
        if (part)
            code =
                mz_heap_take(x->e->heap, r, MZ_MEM_TEMPORARIES, job->experts * n * x->value_bytes,
                             "layer %d fresh weights", layer, part, err);
        for (int32_t e = 0; code == MZ_OK && !master && e < job->experts; e++) {
            const int32_t owner = mz_experts_owner(x, layer, e);
            const experts_memory from =
                experts_slot_memory(x, layer, owner, experts_slot(x, layer, owner, e));
            char *line = experts_at(part ? part->memory : NULL, e * n * x->value_bytes);
            int64_t none = 0;
            code = experts_add_line(x, owner, r, EXPERTS_COLLECT, from.weight, line, low, low + n,
                                    &none, err);
        }
    }
    return code == MZ_OK ? experts_run_pieces(x, MZ_PHASE_WEIGHT_MOVE, layer, job->layers, err)
                         : code;
}

static mz_code update_parts(mz_experts *x, int32_t layer, int32_t rank, mz_err *err) {
    const mz_replay_job *job = &x->e->job;
    const int64_t n = experts_cut_begin(x, rank + 1) - experts_cut_begin(x, rank);
    if (n == 0)
        return MZ_OK;
    const mz_update_call call = {.optimizer = job->optimizer,
                                 .type = job->type,
                                 .held = 1,
                                 .matrices = 1,
                                 .rows = n * job->experts,
                                 .cols = 1,
                                 .step = x->e->ordinal + 1,
                                 .seed = job->seed,
                                 .tensor = (uint64_t)layer * (uint64_t)job->ranks + (uint64_t)rank,
                                 .weights = x->fresh[rank - x->e->first].memory,
                                 .block = experts_layer_of(x, layer, rank)->state[0].memory,
                                 .gradient = experts_cut_gradient(x, layer, rank)};
    const double start = mz_now();
    const mz_code code = run_update(x, layer, rank, &call, err);
    return code == MZ_OK ? engine_charge(x->e, rank, MZ_PHASE_OPTIMIZER, job->layers, start, err)
                         : code;
}

/* All parts of e's fresh weights to a slot. */
static mz_code fill_slot(mz_experts *x, int32_t layer, int32_t rank, int32_t slot, int32_t e,
                         bool free, mz_err *err) {
    const experts_memory to = experts_slot_memory(x, layer, rank, slot);
    mz_code code = MZ_OK;
    for (int32_t q = 0; code == MZ_OK && q < x->e->job.ranks; q++) {
        const int64_t low = experts_cut_begin(x, q), n = experts_cut_begin(x, q + 1) - low;
        char *part = experts_local(x, q) ? x->fresh[q - x->e->first].memory : NULL;
        int64_t budget = free ? 0 : n * x->value_bytes;
        code =
            experts_add_line(x, q, rank, EXPERTS_SPREAD, to.weight,
                             experts_at(part, e * n * x->value_bytes), low, low + n, &budget, err);
    }
    return code;
}

static mz_code spread_weights(mz_experts *x, int32_t layer, mz_err *err) {
    mz_code code = MZ_OK;
    for (int32_t r = 0; r < x->e->job.ranks; r++)
        for (int32_t j = 0; code == MZ_OK && j < x->slots; j++) {
            const int32_t mark = experts_held(x, layer, r)[j];
            if (mark == -1)
                continue;
            const int32_t e = mark < 0 ? -2 - mark : mark;
            bool any;
            const mz_move *m = fresh_move(x, layer, e, r, &any);
            if (!m)
                return experts_bug(layer, e, r, "no move brings fresh weights", err);
            code = fill_slot(x, layer, r, j, e, m->hide == MZ_HIDE_FREE, err);
        }
    return code == MZ_OK ? experts_run_pieces(x, MZ_PHASE_WEIGHT_MOVE, layer, x->e->job.layers, err)
                         : code;
}

static mz_code update_cut(mz_experts *x, int32_t layer, mz_err *err) {
    mz_code code = take_weights(x, layer, err);
    for (int32_t r = x->e->first; code == MZ_OK && r < x->e->end; r++)
        code = update_parts(x, layer, r, err);
    if (code == MZ_OK)
        code = spread_weights(x, layer, err);
    for (int32_t r = 0; r < x->e->local; r++)
        mz_heap_give(x->e->heap, &x->fresh[r]);
    return code;
}

/* ---- the step
 * ------------------------------------------------------------------------------------*/

static mz_code update_all(mz_experts *x, mz_err *err) {
    mz_code code = MZ_OK;
    if (x->mode == EXPERTS_CUT) {
        for (int32_t l = 0; code == MZ_OK && l < x->e->job.layers; l++)
            code = update_cut(x, l, err);
        return code;
    }
    for (int32_t r = x->e->first; code == MZ_OK && r < x->e->end; r++)
        code = update_rank(x, r, err);
    return code == MZ_OK && x->mode == EXPERTS_LAST ? refresh(x, err) : code;
}

mz_code mz_experts_update(mz_experts *x, mz_err *err) {
    x->repeat = x->repeated = false;
    mz_code code = gradient_norm(x, err);
    if (code == MZ_OK)
        code = update_all(x, err);
    x->repeat = false;
    return code;
}

void mz_experts_repeat_update(mz_experts *x) {
    x->repeat = true;
}

bool mz_experts_repeated(const mz_experts *x) {
    return x->repeated;
}

void mz_experts_norms(const mz_experts *x, const double **all, const double **mine) {
    *all = x->norm2;
    *mine = x->norm2 + x->e->job.ranks;
}

/* ---- reading
 * -------------------------------------------------------------------------------------*/

int32_t mz_experts_owner(const mz_experts *x, int32_t layer, int32_t expert) {
    return x->owner[(int64_t)layer * x->e->job.experts + expert];
}

/* The expert's values end to end in `line`, context memory of every process. */
static mz_code collect_expert(mz_experts *x, int32_t layer, int32_t expert, bool gradient,
                              char *line, mz_err *err) {
    const mz_engine *e = x->e;
    const int32_t each = e->job.ranks / e->transport->processes;
    const int32_t owner = mz_experts_owner(x, layer, expert);
    const experts_memory m =
        experts_slot_memory(x, layer, owner, experts_slot(x, layer, owner, expert));
    mz_code code = MZ_OK;
    for (int32_t to = 0; code == MZ_OK && to < e->job.ranks; to += each) {
        char *at = to == e->first ? line : NULL;
        int64_t none = 0;
        if (!gradient || x->mode != EXPERTS_CUT) {
            code = experts_add_line(x, owner, to, EXPERTS_COLLECT, gradient ? m.gradient : m.weight,
                                    at, 0, x->all, &none, err);
            continue;
        }
        for (int32_t q = 0; code == MZ_OK && q < e->job.ranks; q++) {
            const int64_t low = experts_cut_begin(x, q), n = experts_cut_begin(x, q + 1) - low;
            char *part = experts_local(x, q) ? experts_cut_gradient(x, layer, q) : NULL;
            code = experts_add_piece(x, q, to, experts_at(part, expert * n * x->value_bytes),
                                     experts_at(at, low * x->value_bytes), n * x->value_bytes,
                                     &none, err);
        }
    }
    return code == MZ_OK ? experts_run_uncharged(x, err) : code;
}

/* A part of the expert's optimizer state end to end in `line`, likewise. */
static mz_code collect_state(mz_experts *x, int32_t layer, int32_t expert, int which, int32_t to,
                             char *line, mz_err *err) {
    enum { SIZE = sizeof(float) };
    const mz_replay_job *job = &x->e->job;
    const bool is_cut = x->mode == EXPERTS_CUT;
    const int32_t owner = mz_experts_owner(x, layer, expert);
    const int32_t slots = experts_state_slots(x, owner),
                  slot = experts_slot(x, layer, owner, expert);
    const int32_t spans = is_cut ? job->ranks : EXPERTS_MATRICES;
    int64_t part[MZ_UPDATE_STATES], low = 0, none = 0;
    mz_code code = MZ_OK;
    for (int32_t i = 0; code == MZ_OK && i < spans; i++) {
        const int32_t from = is_cut ? i : owner;
        const int64_t n =
            is_cut ? experts_cut_begin(x, i + 1) - experts_cut_begin(x, i) : x->values[i];
        mz_update_parts(job->optimizer, job->type, is_cut ? n * job->experts : x->rows[i],
                        is_cut ? 1 : x->cols[i], part);
        int64_t before = 0;
        for (int k = 0; k < which; k++)
            before += part[k];
        const int64_t at = is_cut ? before + expert * n : before * slots + slot * n;
        const experts_layer *l = experts_local(x, from) ? experts_layer_of(x, layer, from) : NULL;
        code = experts_add_piece(x, from, to,
                                 experts_at(l ? l->state[is_cut ? 0 : i].memory : NULL, at * SIZE),
                                 experts_at(line, low * SIZE), n * SIZE, &none, err);
        low += n;
    }
    return code;
}

mz_code mz_experts_read_state(mz_experts *x, int32_t layer, int32_t expert, int part, float *value,
                              mz_err *err) {
    const mz_engine *e = x->e;
    const int32_t each = e->job.ranks / e->transport->processes;
    const size_t bytes = sizeof *value * (size_t)x->all;
    void *line = NULL;
    mz_kstatus status = mz_kernels_alloc(e->kernels, bytes, &line);
    mz_code code = engine_kernel(x->e, status, "memory of a check", e->first, layer, err);
    for (int32_t to = 0; code == MZ_OK && to < e->job.ranks; to += each)
        code = collect_state(x, layer, expert, part, to, to == e->first ? line : NULL, err);
    if (code == MZ_OK)
        code = experts_run_uncharged(x, err);
    if (code == MZ_OK) {
        status = mz_kernels_copy(e->kernels, 0, MZ_COPY_OUT, value, line, bytes);
        if (status == MZ_K_OK)
            status = mz_kernels_sync(e->kernels, 0);
        code = engine_kernel(x->e, status, "reading an optimizer's state", e->first, layer, err);
    }
    mz_kernels_free(e->kernels, line);
    return code;
}

/* A slot's weights, end to end, in host memory. */
static mz_code read_slot(mz_experts *x, int32_t layer, int32_t rank, int32_t slot, void *wide,
                         float *value, mz_err *err) {
    mz_kernels *k = x->e->kernels;
    const experts_memory m = experts_slot_memory(x, layer, rank, slot);
    mz_kstatus status = MZ_K_OK;
    int64_t at = 0;
    for (int i = 0; status == MZ_K_OK && i < EXPERTS_MATRICES; i++) {
        status =
            mz_convert(k, 0, MZ_F32, (float *)wide + at, x->e->job.type, m.weight[i], x->values[i]);
        at += x->values[i];
    }
    if (status == MZ_K_OK)
        status = mz_kernels_copy(k, 0, MZ_COPY_OUT, value, wide, sizeof *value * (size_t)x->all);
    if (status == MZ_K_OK)
        status = mz_kernels_sync(k, 0);
    return engine_kernel(x->e, status, "reading a copy of an expert", rank, layer, err);
}

mz_code mz_experts_compare(mz_experts *x, int32_t layer, int32_t expert, const float *value,
                           mz_experts_copy *differs, mz_err *err) {
    mz_kernels *k = x->e->kernels;
    const size_t bytes = sizeof *value * (size_t)x->all;
    const double start = mz_now();
    void *wide = NULL;
    float *copy = malloc(bytes);
    *differs = (mz_experts_copy){.rank = -1};
    mz_code code = copy ? MZ_OK : mz_fail_nomem(err, "memory of a check");
    if (code == MZ_OK)
        code = engine_kernel(x->e, mz_kernels_alloc(k, bytes, &wide), "memory of a check",
                             x->e->first, layer, err);
    for (int32_t r = x->e->first; code == MZ_OK && differs->rank < 0 && r < x->e->end; r++) {
        const int32_t slot = experts_slot(x, layer, r, expert);
        if (slot < 0)
            continue;
        code = read_slot(x, layer, r, slot, wide, copy, err);
        for (int64_t i = 0; code == MZ_OK && differs->rank < 0 && i < x->all; i++)
            if (memcmp(&copy[i], &value[i], sizeof *copy) != 0)
                *differs = (mz_experts_copy){r, i, copy[i]};
    }
    mz_kernels_free(k, wide);
    free(copy);
    engine_untimed(x->e, start);
    return code;
}

mz_code mz_experts_read(mz_experts *x, int32_t layer, int32_t expert, bool gradient, float *value,
                        mz_err *err) {
    mz_kernels *k = x->e->kernels;
    const size_t wide_bytes = sizeof *value * (size_t)x->all;
    void *line = NULL, *wide = NULL;
    /* Beside the heap: what a check needs is not the replay's memory. */
    mz_kstatus status = mz_kernels_alloc(k, (size_t)(x->all * x->value_bytes), &line);
    if (status == MZ_K_OK)
        status = mz_kernels_alloc(k, wide_bytes, &wide);
    mz_code code = engine_kernel(x->e, status, "memory of a check", x->e->first, layer, err);
    if (code == MZ_OK)
        code = collect_expert(x, layer, expert, gradient, line, err);
    if (code == MZ_OK) {
        status = mz_convert(k, 0, MZ_F32, wide, x->e->job.type, line, x->all);
        if (status == MZ_K_OK)
            status = mz_kernels_copy(k, 0, MZ_COPY_OUT, value, wide, wide_bytes);
        if (status == MZ_K_OK)
            status = mz_kernels_sync(k, 0);
        code = engine_kernel(x->e, status, "reading an expert", x->e->first, layer, err);
    }
    mz_kernels_free(k, wide);
    mz_kernels_free(k, line);
    return code;
}
