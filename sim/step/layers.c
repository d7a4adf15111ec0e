/* Routed experts alone, one phase after another, as a replay executes them (replay/README.md says
 * what runs in each phase and what it moves; the bytes here are those of that table).
 *
 * The machine: a process per device, which runs its ranks' part of a phase one rank after another
 * and waits for it before the next. So time is a clock per device. What is enqueued for one rank
 * and phase takes a launch, then its kernels or the launches behind the first, whichever is longer,
 * then the host's synchronisation. An exchange: every rank's messages from ranks of its own process
 * are copied, its own included, by the receiver; then all processes have entered, and the rest
 * travels between devices, one member each. A rank is charged its copies and an equal share of the
 * rest of its process's time in the exchange, waiting included, as the replay charges it. */
#include "sim/policy/lrmoe.h"
#include "sim/step/inside.h"

#include <math.h>
#include <string.h>

enum { VALUE_BYTES = 2 }; /* bf16 rows, weights, gradients */

/* ---- create, begin -----------------------------------------------------------------------------
 */

mz_code layers_create(mz_step *s, mz_err *err) {
    mz_arena *a = &s->arena;
    s->clock = MZ_NEW(a, double, s->ranks);
    s->copy_lanes = MZ_NEW(a, int64_t, s->ranks);
    s->copy_bytes = MZ_NEW(a, double, s->ranks);
    s->of_expert = MZ_NEW(a, int64_t, s->ep);
    s->kept_of_expert = MZ_NEW(a, int64_t, s->ep);
    if (!s->clock || !s->copy_lanes || !s->copy_bytes || !s->of_expert || !s->kept_of_expert)
        return mz_fail_nomem(err, "a step");
    return mz_ports_create(&s->cluster->topology, &s->ports, err);
}

mz_code layers_begin(mz_step *s, int64_t works, mz_err *err) {
    if (!mz_grow((void **)&s->alone, &s->alone_cap, (size_t)works, sizeof *s->alone))
        return mz_fail_nomem(err, "the calls of a step");
    return MZ_OK;
}

/* ---- lanes and products of a call --------------------------------------------------------------
 */

/* Rows of one (source, instance): from `source` to the instance's rank, or the other way. */
static void add_lane(layers_lanes *lanes, int64_t rows) {
    lanes->lanes += rows > 0;
    lanes->rows += rows;
}

static bool same_process(const mz_step *s, const step_at *at, int32_t a, int32_t b) {
    const int32_t *device = s->cluster->topology.device + at->first;
    return device[a] == device[b];
}

static void forward_lanes(mz_step *s, const mz_plan *plan, const step_at *at, layers_work *work) {
    for (int32_t i = 0; i < plan->begin[plan->experts]; i++)
        for (int64_t k = plan->entry_begin[i]; k < plan->entry_begin[i + 1]; k++) {
            const int32_t source = plan->entry_source[k], rank = plan->rank[i];
            if (!same_process(s, at, source, rank))
                continue;
            add_lane(&work[rank].in, plan->entry_pairs[k]);
            add_lane(&work[source].out, plan->entry_pairs[k]);
        }
}

void layers_expect(mz_step *s, const mz_plan *plan, int32_t expert) {
    memset(s->of_expert, 0, sizeof *s->of_expert * (size_t)s->ep);
    memset(s->kept_of_expert, 0, sizeof *s->kept_of_expert * (size_t)s->ep);
    for (int32_t i = plan->begin[expert]; i < plan->begin[expert + 1]; i++) {
        for (int64_t k = plan->entry_begin[i]; k < plan->entry_begin[i + 1]; k++)
            s->of_expert[plan->entry_source[k]] += plan->entry_pairs[k];
        for (int64_t k = plan->back_begin[i]; k < plan->back_begin[i + 1]; k++)
            s->kept_of_expert[plan->back_source[k]] += plan->back_pairs[k];
    }
}

int64_t layers_kept_here(const mz_step *s, int32_t source, int64_t forward) {
    const double all = (double)s->of_expert[source];
    return all > 0 ? llround((double)s->kept_of_expert[source] * (double)forward / all) : 0;
}

/* A kept pair whose x goes again is in a message apart from those that stay. */
static void backward_instance(mz_step *s, const mz_plan *plan, const step_at *at, int32_t i,
                              layers_work *work) {
    const int32_t rank = plan->rank[i];
    for (int64_t k = plan->entry_begin[i]; k < plan->entry_begin[i + 1]; k++)
        s->source_rows[plan->entry_source[k]] += plan->entry_pairs[k];
    for (int64_t k = plan->back_begin[i]; k < plan->back_begin[i + 1]; k++) {
        const int32_t source = plan->back_source[k];
        const int64_t rows = plan->back_pairs[k];
        int64_t stay = s->traits.resend ? 0 : layers_kept_here(s, source, s->source_rows[source]);
        stay = stay < rows ? stay : rows;
        if (!same_process(s, at, source, rank))
            continue;
        add_lane(&work[rank].back_in, stay);
        add_lane(&work[source].back_out, stay);
        add_lane(&work[rank].back_in, rows - stay);
        add_lane(&work[source].back_out, rows - stay);
        add_lane(&work[rank].again_in, rows - stay);
    }
    for (int64_t k = plan->entry_begin[i]; k < plan->entry_begin[i + 1]; k++)
        s->source_rows[plan->entry_source[k]] = 0;
}

static void backward_lanes(mz_step *s, const mz_plan *plan, const step_at *at, layers_work *work) {
    for (int32_t e = 0; e < plan->experts; e++) {
        layers_expect(s, plan, e);
        for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++)
            backward_instance(s, plan, at, i, work);
    }
}

static double product(const mz_step *s, mz_gemm_kind kind, int32_t groups, int64_t n, int64_t k) {
    return mz_cost_grouped_gemm(&s->cluster->device, s->cost, kind, s->expert_rows, groups, n, k);
}

static double up_product(const mz_step *s, int32_t groups) {
    return mz_cost_expert_up(&s->cluster->device, s->cost, s->expert_rows, groups,
                             s->model->expert_intermediate, s->model->hidden);
}

static void time_products(mz_step *s, const mz_plan *plan, const step_call *call, int32_t rank,
                          const step_rank_work *rows, layers_work *work) {
    const int64_t h = s->model->hidden, inter = s->model->expert_intermediate;
    int32_t groups = step_product_rows(s, plan->forward, rank, rows->rows);
    work->up_s = up_product(s, groups);
    work->down_s = rows->rows > 0 ? product(s, MZ_GEMM_FORWARD, groups, h, inter) : 0;
    if (call->lossy)
        groups = step_product_rows(s, plan->backward, rank, rows->back_rows);
    work->back_s = product(s, MZ_GEMM_WGRAD, groups, h, inter) +
                   product(s, MZ_GEMM_WGRAD, groups, 2 * inter, h);
    if (rows->back_rows > 0)
        work->back_s += product(s, MZ_GEMM_DGRAD, groups, h, inter) +
                        product(s, MZ_GEMM_DGRAD, groups, 2 * inter, h);
    if (rows->again_rows > 0) {
        groups = step_product_rows(s, s->instance_again, rank, rows->again_rows);
        work->again_s = up_product(s, groups);
    }
}

void layers_condense(mz_step *s, const mz_plan *plan, const step_at *at) {
    layers_work *work = layers_work_at(s, at->micro_batch, at->moe) + at->first;
    memset(work, 0, sizeof *work * (size_t)s->ep);
    forward_lanes(s, plan, at, work);
    if (at->call->lossy)
        backward_lanes(s, plan, at, work);
    for (int32_t r = 0; r < s->ep; r++) {
        if (!at->call->lossy) {
            work[r].back_in = work[r].in;
            work[r].back_out = work[r].out;
        }
        work[r].dropped = at->work[r].packed < at->work[r].pairs;
        time_products(s, plan, at->call, r, &at->work[r], &work[r]);
    }
}

/* ---- clocks ------------------------------------------------------------------------------------
 */

/* What is enqueued for one rank in one phase. */
typedef struct burst {
    double seconds;
    int launches;
} burst;

static void add_seconds(burst *b, double seconds, int launches) {
    b->seconds += seconds;
    b->launches += seconds > 0 ? launches : 0;
}

static void add_work(const mz_step *s, burst *b, mz_work work, int64_t rows, int64_t cols) {
    add_seconds(b, step_kernel(s, work, rows, cols, 0), 1);
}

static void charge(mz_step *s, int32_t rank, mz_phase phase, int32_t layer, double seconds) {
    *step_detail_at(s, layer, rank, phase) += seconds;
    s->clock[s->cluster->topology.device[rank]] += seconds;
}

static void run(mz_step *s, int32_t rank, mz_phase phase, int32_t layer, burst b) {
    const mz_device *d = &s->cluster->device;
    if (b.launches == 0)
        return;
    double seconds = b.seconds * step_noise(s, rank);
    if (s->options.effects.launches)
        seconds = d->launch_s + fmax(seconds, (b.launches - 1) * d->launch_s) + d->sync_s;
    charge(s, rank, phase, layer, seconds);
}

/* Messages to `rank` from ranks of its own process; `lanes` of them, `bytes` in all. */
static void collect_copies(mz_step *s, int32_t rank, int64_t lanes, double bytes) {
    s->copy_lanes[rank] += lanes;
    s->copy_bytes[rank] += bytes;
}

/* Bytes between devices in s->lane_out by rank become those of one member per device. */
static mz_exchange fold_devices(mz_step *s, int32_t devices) {
    const int32_t each = s->cluster->ranks_per_device;
    for (int32_t d = 0; d < devices; d++) {
        s->member[d] = d * each;
        for (int i = 0; i < 4; i++) {
            double sum = 0;
            for (int32_t r = d * each; r < (d + 1) * each; r++)
                sum += s->lane_out[i][r];
            s->lane_out[i][d] = sum;
        }
    }
    for (int32_t d = 0; d < devices; d++) {
        s->sent += s->lane_out[0][d] + s->lane_out[2][d];
        s->received += s->lane_out[1][d] + s->lane_out[3][d];
    }
    return (mz_exchange){.members = devices,
                         .rank = s->member,
                         .send_inside = s->lane_out[0],
                         .recv_inside = s->lane_out[1],
                         .send_outside = s->lane_out[2],
                         .recv_outside = s->lane_out[3],
                         .rounds = 1};
}

/* Runs the exchange collected: s->copy_*, and s->lane_out by rank. */
static void exchange(mz_step *s, mz_phase phase, int32_t layer) {
    const int32_t each = s->cluster->ranks_per_device, devices = s->ranks / each;
    for (int32_t r = 0; r < s->ranks; r++) {
        burst b = {0};
        const int64_t lanes = s->copy_lanes[r], bytes = (int64_t)s->copy_bytes[r];
        add_seconds(&b,
                    mz_cost_work(&s->cluster->device, MZ_WORK_COPY, lanes, bytes,
                                 mz_work_bytes(MZ_WORK_COPY, lanes, bytes, 0)),
                    (int)lanes);
        run(s, r, phase, layer, b);
        s->copy_lanes[r] = 0;
        s->copy_bytes[r] = 0;
    }
    if (devices == 1)
        return;
    const mz_exchange x = fold_devices(s, devices);
    double *finish = s->busy, ready = 0; /* busy is filled at the end of the step */
    for (int32_t d = 0; d < devices; d++)
        ready = fmax(ready, s->clock[d]);
    mz_ports_clear(s->ports);
    mz_ports_serve(s->ports, &x, 0, finish);
    for (int32_t d = 0; d < devices; d++) {
        const double rest = ready + finish[d] - s->clock[d];
        for (int32_t r = d * each; r < (d + 1) * each; r++)
            charge(s, r, phase, layer, rest / each);
    }
}

static void no_lanes(mz_step *s) {
    for (int i = 0; i < 4; i++)
        memset(s->lane_out[i], 0, sizeof *s->lane_out[i] * (size_t)s->ranks);
}

/* ---- exchanges of a call -----------------------------------------------------------------------
 */

/* Rows, and beside those of a call with scores or a router's gradient one number per pair, in
 * messages of their own. */
static void exchange_rows(mz_step *s, const step_at *at, step_traffic traffic, mz_phase phase) {
    const layers_work *work = layers_work_at(s, at->micro_batch, at->moe);
    const double row = (double)step_row_bytes(s, at->call, traffic);
    const int64_t parts = row > (double)s->sizes.row ? 2 : 1;
    const double again = (double)s->sizes.row;
    for (int32_t r = 0; r < s->ranks; r++) {
        const layers_work *w = &work[r];
        const layers_lanes l = traffic == TRAFFIC_DISPATCH        ? w->in
                               : traffic == TRAFFIC_COMBINE       ? w->out
                               : traffic == TRAFFIC_BACK_DISPATCH ? w->back_in
                                                                  : w->back_out;
        collect_copies(s, r, parts * l.lanes, row * (double)l.rows);
        if (traffic == TRAFFIC_BACK_DISPATCH)
            collect_copies(s, r, w->again_in.lanes, again * (double)w->again_in.rows);
        step_fill_lanes(s, at, traffic, WHOLE_CALL, r);
    }
    step_count_traffic(s, at->call, traffic);
    exchange(s, phase, at->layer);
}

/* `bytes` of every rank to all processes; its own has them where it copies them from. */
static void gather_all(mz_step *s, double bytes, mz_phase phase, int32_t layer) {
    for (int32_t r = 0; r < s->ranks; r++) {
        collect_copies(s, r, 1, bytes);
        s->lane_out[0][r] = s->lane_out[1][r] = bytes * s->peers_in[r];
        s->lane_out[2][r] = s->lane_out[3][r] = bytes * s->peers_out[r];
    }
    exchange(s, phase, layer);
}

/* One message of `bytes` between two ranks. */
static void collect_message(mz_step *s, int32_t src, int32_t dst, double bytes) {
    const mz_topology *t = &s->cluster->topology;
    if (t->device[src] == t->device[dst]) {
        collect_copies(s, dst, 1, bytes);
        return;
    }
    const int out = t->domain[src] != t->domain[dst] ? 2 : 0;
    s->lane_out[out][src] += bytes;
    s->lane_out[out + 1][dst] += bytes;
}

/* Both matrices of an expert go apart. What is sharded goes to a rank in the parts of all ranks,
 * its own copied; a gradient's parts leave the rank's own where it is. */
static void collect_move(mz_step *s, const mz_move *m) {
    enum { MATRICES = 2 };
    if (m->src != MZ_EVERY_RANK && m->dst != MZ_EVERY_RANK) {
        collect_message(s, m->src, m->dst, (double)m->bytes / MATRICES);
        collect_message(s, m->src, m->dst, (double)m->bytes / MATRICES);
        s->transfer_bytes += m->bytes;
        return;
    }
    const bool to_one = m->src == MZ_EVERY_RANK;
    const int32_t end = to_one ? m->dst : m->src;
    for (int32_t r = 0; r < s->ranks; r++)
        if (to_one || r != end)
            collect_message(s, to_one ? r : end, to_one ? end : r, (double)m->bytes / s->ranks);
    s->transfer_bytes += m->bytes - m->bytes / s->ranks;
}

static void add_kernel(mz_step *s, int32_t rank, mz_phase phase, int32_t layer, mz_work work,
                       int64_t rows, int64_t cols) {
    burst b = {0};
    add_work(s, &b, work, rows, cols);
    run(s, rank, phase, layer, b);
}

/* A received gradient is added to the target's, in fp32 where that is what replicas have and the
 * main has not. Parts of all experts are copied to where the update reads them. */
static void add_reduced(mz_step *s, const step_at *at, mz_move_phase phase) {
    const int64_t h = s->model->hidden, values = 3 * h * s->model->expert_intermediate;
    const bool wide = s->traits.replica_gradient_bytes == 4 * values;
    bool parts = false;
    for (int64_t i = at->call->move; i < at->call->move + at->call->moves; i++) {
        const mz_move *m = &s->move[i];
        parts = parts || (m->phase == phase && m->dst == MZ_EVERY_RANK);
        if (m->phase != phase || m->dst == MZ_EVERY_RANK)
            continue;
        burst b = {0};
        if (wide) {
            add_work(s, &b, MZ_WORK_CONVERT, 1, values);
            add_work(s, &b, MZ_WORK_CONVERT, 1, values);
        }
        add_work(s, &b, MZ_WORK_ADD, (wide ? 2 : 1) * values / h, h);
        run(s, m->dst, MZ_PHASE_REPLICA_REDUCE, at->layer, b);
    }
    for (int32_t r = 0; parts && r < s->ranks; r++)
        add_kernel(s, r, MZ_PHASE_REPLICA_REDUCE, at->layer, MZ_WORK_COPY, 1,
                   VALUE_BYTES * values * s->model->experts / s->ranks);
}

/* All moves of a phase at once, whatever they could hide behind: nothing runs beside them. */
static void move(mz_step *s, const step_at *at, mz_move_phase phase) {
    int64_t moves = 0;
    const bool reduces = phase == MZ_MOVE_REDUCE || phase == MZ_MOVE_REDUCE_STEP;
    no_lanes(s);
    for (int64_t i = at->call->move; i < at->call->move + at->call->moves; i++)
        if (s->move[i].phase == phase) {
            collect_move(s, &s->move[i]);
            moves++;
        }
    if (moves == 0)
        return;
    exchange(s, reduces ? MZ_PHASE_REPLICA_REDUCE : MZ_PHASE_WEIGHT_MOVE, at->layer);
    if (reduces)
        add_reduced(s, at, phase);
}

/* ---- phases of a call --------------------------------------------------------------------------
 */

static int64_t tokens_of(const mz_step *s, const step_at *at, int32_t r) {
    return s->tokens[(int64_t)at->micro_batch * s->ranks + r];
}

static void group(mz_step *s, const step_at *at) {
    for (int32_t r = 0; r < s->ranks; r++)
        add_kernel(s, r, MZ_PHASE_ROUTER, at->layer, MZ_WORK_GROUP_PAIRS, at->work[r].pairs,
                   s->model->experts);
}

static void plan_call(mz_step *s, const step_at *at) {
    const bool decided = step_decided(s, at->micro_batch);
    const double seconds = (decided ? s->decide_cost + s->hidden_cost : 0) + s->route_cost;
    for (int32_t r = 0; r < s->ranks; r++) /* once per process; it stands at every rank */
        *step_detail_at(s, at->layer, r, MZ_PHASE_PLANNER) += seconds;
    for (int32_t d = 0; d < s->ranks / s->cluster->ranks_per_device; d++)
        s->clock[d] += seconds;
    s->planner_s += seconds;
}

/* A source's pairs by expert, once more where that is not at hand; without dropped ones. */
static void add_list(const mz_step *s, burst *b, const step_rank_work *w, const layers_work *l,
                     bool again) {
    if (again)
        add_work(s, b, MZ_WORK_GROUP_PAIRS, w->pairs, s->model->experts);
    if (l->dropped && s->traits.drop_by_weight)
        add_work(s, b, MZ_WORK_SELECT, w->pairs, s->model->experts);
    else if (l->dropped)
        add_work(s, b, MZ_WORK_ARRANGE, w->packed, 1);
}

static void pack(mz_step *s, const step_at *at, bool again) {
    const layers_work *work = layers_work_at(s, at->micro_batch, at->moe);
    for (int32_t r = 0; r < s->ranks; r++) {
        const int64_t rows = at->work[r].packed;
        burst b = {0};
        add_list(s, &b, &at->work[r], &work[r], again);
        add_work(s, &b, MZ_WORK_ARRANGE, rows, 1);
        if (!again)
            add_work(s, &b, MZ_WORK_INVERT, rows, 1);
        add_work(s, &b, MZ_WORK_PACK, rows, s->model->hidden);
        run(s, r, MZ_PHASE_PACK, at->layer, b);
    }
}

static void experts(mz_step *s, const step_at *at, bool again) {
    const layers_work *work = layers_work_at(s, at->micro_batch, at->moe);
    for (int32_t r = 0; r < s->ranks; r++) {
        burst b = {0};
        add_seconds(&b, work[r].up_s, 1);
        if (!again)
            add_seconds(&b, work[r].down_s, 1);
        run(s, r, MZ_PHASE_EXPERTS, at->layer, b);
    }
}

static void combine_rows(mz_step *s, const step_at *at, int32_t r, int64_t rows, mz_phase phase) {
    burst b = {0};
    if (phase == MZ_PHASE_UNPACK && at->call->lossy && s->traits.score_combine_bytes > 0)
        add_work(s, &b, MZ_WORK_PACK, at->work[r].pairs, 1); /* norms, by pair */
    add_seconds(&b, step_kernel(s, MZ_WORK_COMBINE, rows, s->model->hidden, tokens_of(s, at, r)),
                1);
    run(s, r, phase, at->layer, b);
}

static void forward_call(mz_step *s, const step_at *at) {
    group(s, at);
    gather_all(s, 8.0 * s->model->experts, MZ_PHASE_COUNT_EXCHANGE, at->layer);
    plan_call(s, at);
    move(s, at, MZ_MOVE_FORWARD);
    pack(s, at, false);
    exchange_rows(s, at, TRAFFIC_DISPATCH, MZ_PHASE_DISPATCH);
    experts(s, at, false);
    exchange_rows(s, at, TRAFFIC_COMBINE, MZ_PHASE_COMBINE);
    for (int32_t r = 0; r < s->ranks; r++)
        combine_rows(s, at, r, at->work[r].packed, MZ_PHASE_UNPACK);
}

/* Norms that the score has: of g, of x. Without ||h||^2 at hand gate weights decide alone. */
static int score_norms(const mz_policy_traits *t) {
    switch ((mz_score_kind)t->score_kind) {
    case MZ_SCORE_UP:
        return 2;
    case MZ_SCORE_G:
        return 1;
    case MZ_SCORE_DOWN:
    case MZ_SCORE_SAMPLE:
        return t->score_combine_bytes > 0;
    default:
        return 0;
    }
}

static void score(mz_step *s, const step_at *at) {
    const layers_work *work = layers_work_at(s, at->micro_batch, at->moe);
    for (int32_t r = 0; r < s->ranks; r++) {
        const int64_t pairs = at->work[r].pairs, tokens = tokens_of(s, at, r);
        burst b = {0};
        add_list(s, &b, &at->work[r], &work[r], true);
        for (int i = 0; i < score_norms(&s->traits); i++)
            add_work(s, &b, MZ_WORK_ROW_NORMS, tokens, s->model->hidden);
        add_work(s, &b, MZ_WORK_SCORE, pairs, 1);
        add_work(s, &b, MZ_WORK_SELECT, pairs, s->model->experts);
        run(s, r, MZ_PHASE_SCORE, at->layer, b);
    }
}

/* Saved activations: the host puts the kept pairs where their activations are. */
static void back_pack(mz_step *s, const step_at *at) {
    const layers_work *work = layers_work_at(s, at->micro_batch, at->moe);
    for (int32_t r = 0; r < s->ranks; r++) {
        const step_rank_work *w = &at->work[r];
        burst b = {0};
        if (!at->call->lossy)
            add_list(s, &b, w, &work[r], true);
        if (!at->call->lossy || s->traits.resend)
            add_work(s, &b, MZ_WORK_ARRANGE, w->back_packed, 1);
        add_work(s, &b, MZ_WORK_INVERT, w->back_packed, 1);
        add_work(s, &b, MZ_WORK_PACK_SCALED, w->back_packed, s->model->hidden);
        add_work(s, &b, MZ_WORK_PACK, w->again_packed, s->model->hidden);
        run(s, r, MZ_PHASE_BACKWARD_PACK, at->layer, b);
    }
}

/* Saved x, gate and up, h of the kept rows side by side, those computed again copied behind. */
static void gather_saved(mz_step *s, const step_at *at, burst *b, int32_t r) {
    const step_rank_work *w = &at->work[r];
    const int64_t inter = s->model->expert_intermediate;
    const int64_t cols[] = {s->model->hidden, 2 * inter, inter};
    if (!at->call->lossy || s->traits.resend)
        return;
    for (int i = 0; i < 3; i++) {
        add_work(s, b, MZ_WORK_PACK, w->back_rows, cols[i]);
        add_work(s, b, MZ_WORK_COPY, w->again_rows > 0, VALUE_BYTES * w->again_rows * cols[i]);
    }
}

static void back_experts(mz_step *s, const step_at *at) {
    const layers_work *work = layers_work_at(s, at->micro_batch, at->moe);
    const int64_t inter = s->model->expert_intermediate;
    for (int32_t r = 0; r < s->ranks; r++) {
        const int64_t rows = at->work[r].back_rows;
        burst b = {0};
        add_seconds(&b, work[r].again_s, 1);
        gather_saved(s, at, &b, r);
        add_seconds(&b, work[r].back_s, 4);
        add_work(s, &b, MZ_WORK_SWIGLU_BACKWARD, rows, inter);
        run(s, r, MZ_PHASE_BACKWARD_EXPERTS, at->layer, b);
    }
}

static void recompute(mz_step *s, const step_at *at) {
    pack(s, at, true);
    if (s->options.effects.recompute_exchange)
        exchange_rows(s, at, TRAFFIC_DISPATCH, MZ_PHASE_DISPATCH);
    experts(s, at, true);
}

static void backward_call(mz_step *s, const step_at *at) {
    if (s->options.recompute == MZ_RECOMPUTE_FULL && !(at->call->lossy && s->traits.resend))
        recompute(s, at);
    if (at->call->lossy)
        score(s, at);
    move(s, at, MZ_MOVE_BACKWARD);
    back_pack(s, at);
    exchange_rows(s, at, TRAFFIC_BACK_DISPATCH, MZ_PHASE_BACKWARD_DISPATCH);
    back_experts(s, at);
    exchange_rows(s, at, TRAFFIC_BACK_COMBINE, MZ_PHASE_BACKWARD_COMBINE);
    for (int32_t r = 0; r < s->ranks; r++)
        combine_rows(s, at, r, at->work[r].back_packed, MZ_PHASE_BACKWARD_OTHER);
    move(s, at, MZ_MOVE_REDUCE);
    if (at->micro_batch + 1 < s->micro_batches)
        return;
    const step_at first = step_at_of(s, 0, at->moe, at->group);
    move(s, &first, MZ_MOVE_REDUCE_STEP);
}

/* ---- the tail ----------------------------------------------------------------------------------
 */

/* One tensor row is one matrix kind of one layer. Squared norms of all gradients. */
static void norms(mz_step *s) {
    const bool cut = s->traits.sharded_optimizer;
    for (int32_t r = 0; r < s->ranks; r++) {
        burst b = {0};
        for (int64_t i = 0; i < s->model->tensors; i++) {
            const mz_tensor *t = &s->model->tensor[i];
            add_work(s, &b, MZ_WORK_ROW_NORMS, cut ? t->count : s->mains * t->rows,
                     cut ? t->rows * t->cols / s->ep : t->cols);
        }
        run(s, r, MZ_PHASE_OPTIMIZER, s->layers, b);
    }
}

/* Matrices that a rank updates: its mains', with those of replicas that have optimizer state; one
 * of its parts of all, where the optimizer is cut. */
static void update_tensor(mz_step *s, const mz_tensor *t, int32_t rank, burst *b) {
    const step_tensor size = step_tensor_of(s, t);
    const bool cut = s->traits.sharded_optimizer || s->traits.sharded_weights;
    const int32_t instances = step_work_at(s, 0, t->layer)[rank].instances;
    const bool more = s->traits.replica_optimizer && instances > s->mains;
    const int64_t matrices = cut ? 1 : more ? instances : s->mains;
    const int64_t one = t->rows * t->cols * (cut ? t->count : 1) / (cut ? s->ep : 1);
    const double part = cut ? 1 : (double)matrices / (double)s->mains;
    add_seconds(b,
                mz_cost_update(&s->cluster->device, s->options.optimizer->rule, matrices, one,
                               part * size.update_bytes, part * size.update_flops),
                2);
}

static void update(mz_step *s) {
    norms(s);
    gather_all(s, 8, MZ_PHASE_GRADIENT_REDUCE, s->layers);
    for (int32_t r = 0; r < s->ranks; r++) {
        burst b = {0};
        for (int64_t i = 0; i < s->model->tensors; i++)
            update_tensor(s, &s->model->tensor[i], r, &b);
        run(s, r, MZ_PHASE_OPTIMIZER, s->layers, b);
    }
    int64_t moves = 0;
    no_lanes(s);
    for (int32_t m = 0; m < s->moe; m++) {
        const step_call *call = step_call_at(s, 0, m, 0);
        for (int64_t i = call->move; i < call->move + call->moves; i++)
            if (s->move[i].phase == MZ_MOVE_STEP) {
                collect_move(s, &s->move[i]);
                moves++;
            }
    }
    if (moves > 0)
        exchange(s, MZ_PHASE_WEIGHT_MOVE, s->layers);
}

/* ---- the step ----------------------------------------------------------------------------------
 */

static double latest(const mz_step *s) {
    double time = 0;
    for (int32_t d = 0; d < s->ranks / s->cluster->ranks_per_device; d++)
        time = fmax(time, s->clock[d]);
    return time;
}

static void fill_outcome(mz_step *s, mz_step_outcome *o) {
    for (int32_t r = 0; r < s->ranks; r++) {
        s->busy[r] = 0;
        for (int p = 0; p < MZ_PHASES; p++) {
            double sum = 0;
            for (int32_t l = 0; l <= s->layers; l++)
                sum += *step_detail_at(s, l, r, (mz_phase)p);
            o->phase_s[p] = fmax(o->phase_s[p], sum);
            s->busy[r] += mz_phase_computes((mz_phase)p) ? sum : 0;
        }
    }
    o->time_s = latest(s);
    for (int64_t i = 0; i < (int64_t)s->micro_batches * s->ranks; i++)
        o->tokens += s->tokens[i];
    o->planner_s = s->planner_s;
    o->rank_busy_s = s->busy;
    o->detail_s = s->detail;
    step_fill_traffic(s, o);
}

void layers_run(mz_step *s, mz_step_outcome *outcome) {
    memset(s->clock, 0, sizeof *s->clock * (size_t)s->ranks);
    step_clear_detail(s);
    s->planner_s = 0;
    for (int32_t b = 0; b < s->micro_batches; b++) {
        for (int32_t m = 0; m < s->moe; m++) {
            const step_at at = step_at_of(s, b, m, 0);
            forward_call(s, &at);
        }
        for (int32_t m = s->moe - 1; m >= 0; m--) {
            const step_at at = step_at_of(s, b, m, 0);
            backward_call(s, &at);
        }
    }
    outcome->moe_s = latest(s);
    update(s);
    fill_outcome(s, outcome);
}
