/* Routed experts alone, one phase after another, as a replay executes them (replay/README.md says
 * what runs in each phase and what it moves; the bytes here are those of that table).
 *
 * The machine: a process per device, which runs its ranks' part of a phase one rank after another
 * and waits for it before the next. So time is a clock per device. What is enqueued for one rank
 * and phase takes a launch, then its kernels or the launches behind the first, whichever is longer,
 * then the host's synchronisation. An exchange: every rank's messages from ranks of its own process
 * are copied, its own included, by the receiver; then all processes have entered - any of them may
 * be the slow one, by as much of the time since they last met as calibration found - and the rest
 * travels between devices. A rank is charged its copies and an equal share of the
 * rest of its process's time in the exchange, waiting included, as the replay charges it. */
#include "sim/policy/lrmoe.h"
#include "sim/step/inside.h"

#include <math.h>
#include <string.h>

enum {
    VALUE_BYTES = 2, /* bf16 rows, weights, gradients */
    NORM_VALUES = 2  /* an fp32 norm is as wide as so many of them */
};

/* ---- create, begin -----------------------------------------------------------------------------
 */

mz_code layers_create(mz_step *s, mz_err *err) {
    mz_arena *a = &s->arena;
    s->clock = MZ_NEW(a, double, s->ranks);
    s->met = MZ_NEW(a, double, s->ranks);
    s->copy_lanes = MZ_NEW(a, int64_t, s->ranks);
    s->copy_bytes = MZ_NEW(a, double, s->ranks);
    s->far_lanes = MZ_NEW(a, int64_t, s->ranks);
    s->between = MZ_NEW(a, bool, (int64_t)layers_devices(s) * layers_devices(s));
    s->of_expert = MZ_NEW(a, int64_t, s->ep);
    s->kept_of_expert = MZ_NEW(a, int64_t, s->ep);
    if (!s->clock || !s->met || !s->copy_lanes || !s->copy_bytes || !s->far_lanes || !s->between ||
        !s->of_expert || !s->kept_of_expert)
        return mz_fail_nomem(err, "a step");
    const mz_code code = layers_create_moves(s, err);
    return code == MZ_OK ? mz_ports_create(&s->cluster->topology, &s->ports, err) : code;
}

mz_code layers_begin(mz_step *s, int64_t works, mz_err *err) {
    if (!mz_grow((void **)&s->alone, &s->alone_cap, (size_t)works, sizeof *s->alone))
        return mz_fail_nomem(err, "the calls of a step");
    return MZ_OK;
}

/* ---- clocks ------------------------------------------------------------------------------------
 */

static void charge(mz_step *s, int32_t rank, mz_phase phase, int32_t layer, double seconds) {
    *step_detail_at(s, layer, rank, phase) += seconds;
    s->clock[s->cluster->topology.device[rank]] += seconds;
}

static void tell(const mz_step *s, mz_step_event event, mz_phase phase, int32_t layer,
                 int64_t messages) {
    if (s->happened)
        s->happened(s->happened_self, event, phase, layer, messages);
}

void layers_meet(mz_step *s) {
    memcpy(s->met, s->clock, sizeof *s->met * (size_t)layers_devices(s));
    if (layers_devices(s) > 1)
        tell(s, MZ_STEP_MEET, MZ_PHASE_LAUNCH_WAIT, s->layers, 0);
}

/* When a device's clock will stand there, by as much slower or faster than the mean as stated. */
static double clock_at(const mz_step *s, int32_t device, bool since_met, double slower) {
    const double passed = s->clock[device] - s->met[device];
    return (since_met ? 0 : s->met[device]) + (1 + slower) * passed;
}

/* When the last device is where all are to meet next. Clocks are of mean speeds: the mean over who
 * is slow, the others then as much faster together. */
static double last_of(const mz_step *s, bool since_met) {
    const mz_measured *measured = s->cluster->device.measured;
    const int32_t devices = layers_devices(s);
    const double slower = measured && devices > 1 ? measured->uneven : 0;
    double others = 0, sum = 0;
    for (int32_t d = 0; d < devices; d++)
        others = fmax(others, clock_at(s, d, since_met, devices > 1 ? -slower / (devices - 1) : 0));
    for (int32_t d = 0; d < devices; d++)
        sum += fmax(others, clock_at(s, d, since_met, slower));
    return sum / devices;
}

layers_burst layers_burst_of(mz_step *s, int32_t rank, mz_phase phase, int32_t layer) {
    return (layers_burst){.s = s, .rank = rank, .phase = phase, .layer = layer};
}

void layers_add_seconds(layers_burst *b, double seconds, int64_t launches) {
    b->seconds += seconds;
    b->launches += seconds > 0 ? launches : 0;
}

void layers_add(layers_burst *b, mz_work work, int64_t rows, int64_t cols, int64_t more) {
    if (rows <= 0 || cols <= 0)
        return;
    layers_tell(b->s, &(mz_step_charge){b->phase, b->layer, b->rank, work, rows, cols, more});
    layers_add_seconds(b, step_kernel(b->s, work, rows, cols, more),
                       work == MZ_WORK_COPY || work == MZ_WORK_SEND ? rows : 1);
}

void layers_end(layers_burst *b) {
    const mz_device *d = &b->s->cluster->device;
    if (b->launches == 0)
        return;
    double seconds = b->seconds * step_noise(b->s, b->rank);
    if (b->s->options.effects.launches)
        seconds = d->launch_s + fmax(seconds, (double)(b->launches - 1) * d->launch_s) + d->sync_s;
    charge(b->s, b->rank, b->phase, b->layer, seconds);
}

void layers_kernel(mz_step *s, int32_t rank, mz_phase phase, int32_t layer, mz_work work,
                   int64_t rows, int64_t cols) {
    layers_burst b = layers_burst_of(s, rank, phase, layer);
    layers_add(&b, work, rows, cols, 0);
    layers_end(&b);
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

/* Most that a device receives of it, in messages and bytes. */
static double most_received(const mz_step *s, const mz_exchange *x, int64_t *lanes) {
    const int32_t each = s->cluster->ranks_per_device;
    double bytes = 0;
    *lanes = 0;
    for (int32_t d = 0; d < x->members; d++) {
        int64_t sum = 0;
        for (int32_t r = d * each; r < (d + 1) * each; r++)
            sum += s->far_lanes[r];
        *lanes = sum > *lanes ? sum : *lanes;
        bytes = fmax(bytes, x->recv_inside[d] + x->recv_outside[d]);
    }
    return bytes;
}

/* When each device is done with messages that all start at once: where it was measured, by number
 * and bytes, none of them before the one that receives most. */
static void pass_messages(mz_step *s, const mz_exchange *x, int64_t lanes, int64_t bytes,
                          double *finish) {
    const mz_measured *measured = s->cluster->device.measured;
    if (!measured || measured->fit[MZ_WORK_EXCHANGE].samples == 0) {
        mz_ports_clear(s->ports);
        mz_ports_serve(s->ports, x, 0, finish);
        return;
    }
    const double seconds = mz_cost_work(&s->cluster->device, MZ_WORK_EXCHANGE, lanes, bytes,
                                        mz_work_bytes(MZ_WORK_EXCHANGE, lanes, bytes, 0));
    for (int32_t d = 0; d < x->members; d++)
        finish[d] = seconds;
}

/* What a dispatch sends has just been packed; what comes back has lain there while other ranks had
 * their products, weights and gradients longer still. */
static mz_work copies_of(mz_phase phase) {
    return phase == MZ_PHASE_DISPATCH || phase == MZ_PHASE_BACKWARD_DISPATCH ? MZ_WORK_SEND
                                                                             : MZ_WORK_COPY;
}

/* Runs the exchange collected: s->copy_*, and s->lane_out and s->far_lanes by rank. Without bytes
 * between them devices do not meet. */
void layers_exchange(mz_step *s, mz_phase phase, int32_t layer) {
    const int32_t each = s->cluster->ranks_per_device, devices = layers_devices(s);
    for (int32_t r = 0; r < s->ranks; r++) {
        layers_burst b = layers_burst_of(s, r, phase, layer);
        layers_add(&b, copies_of(phase), s->copy_lanes[r], (int64_t)s->copy_bytes[r], 0);
        layers_end(&b);
        s->copy_lanes[r] = 0;
        s->copy_bytes[r] = 0;
    }
    if (devices == 1)
        return;
    const mz_exchange x = fold_devices(s, devices);
    double *finish = s->busy; /* filled at the end of the step */
    int64_t lanes;
    const int64_t bytes = (int64_t)most_received(s, &x, &lanes);
    if (bytes <= 0)
        return;
    tell(s, MZ_STEP_EXCHANGE, phase, layer, lanes);
    const double ready = last_of(s, true);
    pass_messages(s, &x, lanes, bytes, finish);
    for (int32_t d = 0; d < devices; d++) {
        const double rest = s->met[d] + ready + finish[d] - s->clock[d];
        for (int32_t r = d * each; r < (d + 1) * each; r++)
            charge(s, r, phase, layer, rest / each);
    }
    layers_meet(s);
}

void layers_no_lanes(mz_step *s) {
    for (int i = 0; i < 4; i++)
        memset(s->lane_out[i], 0, sizeof *s->lane_out[i] * (size_t)s->ranks);
    memset(s->far_lanes, 0, sizeof *s->far_lanes * (size_t)s->ranks);
}

/* ---- exchanges of a call -----------------------------------------------------------------------
 */

/* Rows, and beside those of a call with scores or a router's gradient one number per pair, in
 * messages of their own: a process copies each; what one device sends another of them is so short
 * that the transport packs it into one. */
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
        s->far_lanes[r] = l.far + (parts > 1 ? l.senders : 0);
        if (traffic == TRAFFIC_BACK_DISPATCH) {
            collect_copies(s, r, w->again_in.lanes, again * (double)w->again_in.rows);
            s->far_lanes[r] += w->again_in.far;
        }
        step_fill_lanes(s, at, traffic, WHOLE_CALL, r);
        s->between_bytes += (int64_t)(s->lane_out[0][r] + s->lane_out[2][r]);
    }
    step_count_traffic(s, at->call, traffic);
    layers_exchange(s, phase, at->layer);
}

/* `bytes` of every rank, which the host has, to all processes: once to each. */
static void gather_all(mz_step *s, double bytes, mz_phase phase, int32_t layer) {
    const int32_t each = s->cluster->ranks_per_device;
    for (int32_t r = 0; r < s->ranks; r++) {
        s->lane_out[0][r] = s->lane_out[1][r] = bytes * s->peers_in[r] / each;
        s->lane_out[2][r] = s->lane_out[3][r] = bytes * s->peers_out[r] / each;
        s->far_lanes[r] = r % each == 0 ? (s->peers_in[r] + s->peers_out[r]) / each : 0;
    }
    layers_exchange(s, phase, layer);
}

void layers_message(mz_step *s, int32_t src, int32_t dst, int64_t messages, double bytes) {
    const mz_topology *t = &s->cluster->topology;
    if (t->device[src] == t->device[dst]) {
        collect_copies(s, dst, messages, bytes);
        return;
    }
    const int out = t->domain[src] != t->domain[dst] ? 2 : 0;
    s->lane_out[out][src] += bytes;
    s->lane_out[out + 1][dst] += bytes;
    s->far_lanes[dst] += messages;
}

/* ---- phases of a call --------------------------------------------------------------------------
 */

static int64_t tokens_of(const mz_step *s, const step_at *at, int32_t r) {
    return s->tokens[(int64_t)at->micro_batch * s->ranks + r];
}

static void group(mz_step *s, const step_at *at) {
    for (int32_t r = 0; r < s->ranks; r++)
        layers_kernel(s, r, MZ_PHASE_ROUTER, at->layer, MZ_WORK_GROUP_PAIRS, at->work[r].pairs,
                      s->model->experts);
}

static void plan_call(mz_step *s, const step_at *at) {
    const bool decided = step_decided(s, at->micro_batch);
    const double seconds = (decided ? s->decide_cost + s->hidden_cost : 0) + s->route_cost;
    for (int32_t r = 0; r < s->ranks; r++) /* once per process; it stands at every rank */
        *step_detail_at(s, at->layer, r, MZ_PHASE_PLANNER) += seconds;
    for (int32_t d = 0; d < layers_devices(s); d++)
        s->clock[d] += seconds;
    s->planner_s += seconds;
}

/* Counts go to the host, which tells them to the others. */
static void tell_counts(mz_step *s, const step_at *at) {
    const double bytes = 8.0 * s->model->experts;
    for (int32_t r = 0; r < s->ranks; r++) {
        layers_burst b = layers_burst_of(s, r, MZ_PHASE_COUNT_EXCHANGE, at->layer);
        layers_add_seconds(&b, mz_cost_memory(&s->cluster->device, 2 * bytes), 1);
        layers_end(&b);
    }
    gather_all(s, bytes, MZ_PHASE_COUNT_EXCHANGE, at->layer);
}

/* A source's pairs by expert, once more where that is not at hand; without dropped ones. */
static void add_list(layers_burst *b, const step_rank_work *w, const layers_work *l, bool again) {
    const mz_step *s = b->s;
    if (again)
        layers_add(b, MZ_WORK_GROUP_PAIRS, w->pairs, s->model->experts, 0);
    if (l->listed < w->pairs && l->listed > 0 && s->traits.drop_by_weight)
        layers_add(b, MZ_WORK_SELECT, w->pairs, s->model->experts, 0);
    else if (l->listed < w->pairs)
        layers_add(b, MZ_WORK_ARRANGE, l->listed, 1, 0);
}

/* Rows into the send buffer; without tokens they are padded ones alone. */
static void add_pack(layers_burst *b, mz_work work, const step_at *at, int64_t rows) {
    const int64_t h = b->s->model->hidden;
    if (tokens_of(b->s, at, b->rank) > 0)
        layers_add(b, work, rows, h, tokens_of(b->s, at, b->rank));
    else
        layers_add(b, MZ_WORK_ZERO, 1, VALUE_BYTES * rows * h, 0);
}

/* The row of every pair; without pairs nothing runs. */
static void add_places(layers_burst *b, const step_rank_work *w, int64_t rows) {
    layers_add(b, MZ_WORK_INVERT, w->pairs > 0 ? rows : 0, 1, w->pairs);
}

static void pack(mz_step *s, const step_at *at, bool again) {
    const layers_work *work = layers_work_at(s, at->micro_batch, at->moe);
    for (int32_t r = 0; r < s->ranks; r++) {
        const step_rank_work *w = &at->work[r];
        layers_burst b = layers_burst_of(s, r, MZ_PHASE_PACK, at->layer);
        add_list(&b, w, &work[r], again);
        layers_add(&b, MZ_WORK_ARRANGE, w->packed, 1, 0);
        if (!again)
            add_places(&b, w, w->packed);
        add_pack(&b, MZ_WORK_PACK, at, w->packed);
        layers_end(&b);
    }
}

/* They were told one by one before the step ran: here that their time is charged. */
static void add_products(layers_burst *b, double seconds, int64_t launches) {
    if (seconds > 0)
        tell(b->s, MZ_STEP_PRODUCTS, b->phase, b->layer, 0);
    layers_add_seconds(b, seconds, launches);
}

static void experts(mz_step *s, const step_at *at, bool again) {
    const layers_work *work = layers_work_at(s, at->micro_batch, at->moe);
    for (int32_t r = 0; r < s->ranks; r++) {
        layers_burst b = layers_burst_of(s, r, MZ_PHASE_EXPERTS, at->layer);
        add_products(&b, work[r].up_s, 1);
        if (!again)
            add_products(&b, work[r].down_s, 1);
        layers_end(&b);
    }
}

static void combine_rows(mz_step *s, const step_at *at, int32_t r, int64_t rows, mz_phase phase) {
    const int64_t tokens = tokens_of(s, at, r);
    layers_burst b = layers_burst_of(s, r, phase, at->layer);
    if (phase == MZ_PHASE_UNPACK && at->call->lossy && s->traits.score_combine_bytes > 0)
        layers_add(&b, MZ_WORK_PACK, at->work[r].pairs, NORM_VALUES, 0); /* norms, by pair */
    if (tokens > 0)
        layers_add(&b, MZ_WORK_COMBINE, rows, s->model->hidden, tokens);
    layers_end(&b);
}

/* A replay has the counts before it has made x, and plans then. */
static void forward_call(mz_step *s, const step_at *at) {
    plan_call(s, at);
    layers_meet(s);
    group(s, at);
    tell_counts(s, at);
    layers_place(s, at);
    layers_move_weights(s, at, MZ_MOVE_FORWARD);
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

static bool is_saved(const mz_step *s, const step_at *at) {
    return at->call->lossy && !s->traits.resend;
}

/* The host looks up where each kept pair's activations are: a random access per listed pair, and
 * two per kept one. What such an access takes is the same as when rows of pairs are noted. */
static void add_lookup(layers_burst *b, const step_rank_work *w, const layers_work *l) {
    layers_add_seconds(b, step_kernel(b->s, MZ_WORK_INVERT, l->listed, 1, w->pairs), 1);
    layers_add_seconds(b, 2 * step_kernel(b->s, MZ_WORK_INVERT, w->back_packed, 1, 0), 1);
}

static void score(mz_step *s, const step_at *at) {
    const layers_work *work = layers_work_at(s, at->micro_batch, at->moe);
    for (int32_t r = 0; r < s->ranks; r++) {
        const int64_t pairs = at->work[r].pairs, tokens = tokens_of(s, at, r);
        layers_burst b = layers_burst_of(s, r, MZ_PHASE_SCORE, at->layer);
        add_list(&b, &at->work[r], &work[r], true);
        for (int i = 0; i < score_norms(&s->traits); i++)
            layers_add(&b, MZ_WORK_ROW_NORMS, tokens, s->model->hidden, 0);
        layers_add(&b, MZ_WORK_SCORE, pairs, 1, 0);
        if (work[r].listed > 0)
            layers_add(&b, MZ_WORK_SELECT, pairs, s->model->experts, 0);
        layers_end(&b);
    }
}

/* Saved activations where experts have several instances: how many pairs move is told to all. */
static void count_moved(mz_step *s, const step_at *at) {
    const layers_work *work = layers_work_at(s, at->micro_batch, at->moe);
    if (!is_saved(s, at) || at->call->instances <= s->model->experts)
        return;
    for (int32_t r = 0; r < s->ranks; r++) {
        layers_burst b = layers_burst_of(s, r, MZ_PHASE_SCORE, at->layer);
        add_lookup(&b, &at->work[r], &work[r]);
        layers_end(&b);
    }
    gather_all(s, 8.0 * at->call->instances, MZ_PHASE_COUNT_EXCHANGE, at->layer);
}

/* Saved activations: the host puts the kept pairs where their activations are. */
static void back_pack(mz_step *s, const step_at *at) {
    const layers_work *work = layers_work_at(s, at->micro_batch, at->moe);
    for (int32_t r = 0; r < s->ranks; r++) {
        const step_rank_work *w = &at->work[r];
        layers_burst b = layers_burst_of(s, r, MZ_PHASE_BACKWARD_PACK, at->layer);
        if (!at->call->lossy)
            add_list(&b, w, &work[r], true);
        if (is_saved(s, at)) {
            add_lookup(&b, w, &work[r]);
            layers_add_seconds(&b, 2 * step_kernel(s, MZ_WORK_INVERT, w->back_packed, 1, 0), 1);
        } else {
            layers_add(&b, MZ_WORK_ARRANGE, w->back_packed, 1, 0);
        }
        add_places(&b, w, w->back_packed);
        add_pack(&b, MZ_WORK_PACK_SCALED, at, w->back_packed);
        add_pack(&b, MZ_WORK_PACK, at, w->again_packed);
        layers_end(&b);
    }
}

/* Saved x, gate and up, h of the kept rows side by side, those computed again copied behind. */
static void gather_saved(layers_burst *b, const step_at *at) {
    const step_rank_work *w = &at->work[b->rank];
    const layers_work *l = &layers_work_at(b->s, at->micro_batch, at->moe)[b->rank];
    const int64_t inter = b->s->model->expert_intermediate;
    const int64_t cols[] = {b->s->model->hidden, 2 * inter, inter};
    for (int i = 0; is_saved(b->s, at) && w->rows > 0 && i < 3; i++)
        layers_add(b, MZ_WORK_GATHER, w->back_rows, cols[i], 0);
    for (int i = 0; is_saved(b->s, at) && i < 3; i++)
        layers_add(b, MZ_WORK_COPY, l->again_groups, VALUE_BYTES * w->again_rows * cols[i], 0);
}

static void back_experts(mz_step *s, const step_at *at) {
    const layers_work *work = layers_work_at(s, at->micro_batch, at->moe);
    const int64_t inter = s->model->expert_intermediate;
    for (int32_t r = 0; r < s->ranks; r++) {
        layers_burst b = layers_burst_of(s, r, MZ_PHASE_BACKWARD_EXPERTS, at->layer);
        add_products(&b, work[r].again_s, 1);
        gather_saved(&b, at);
        add_products(&b, work[r].back_s, work[r].back_launches);
        layers_add(&b, MZ_WORK_SWIGLU_BACKWARD, at->work[r].back_rows, inter, 0);
        layers_end(&b);
    }
}

static void recompute(mz_step *s, const step_at *at) {
    layers_meet(s);
    pack(s, at, true);
    if (s->options.effects.recompute_exchange)
        exchange_rows(s, at, TRAFFIC_DISPATCH, MZ_PHASE_DISPATCH);
    experts(s, at, true);
}

/* Weights that only backward needs again come first: recomputation reads them. */
static void backward_call(mz_step *s, const step_at *at) {
    layers_meet(s);
    layers_move_weights(s, at, MZ_MOVE_BACKWARD);
    if (s->options.recompute == MZ_RECOMPUTE_FULL && !(at->call->lossy && s->traits.resend))
        recompute(s, at);
    layers_meet(s);
    if (at->call->lossy)
        score(s, at);
    count_moved(s, at);
    back_pack(s, at);
    exchange_rows(s, at, TRAFFIC_BACK_DISPATCH, MZ_PHASE_BACKWARD_DISPATCH);
    back_experts(s, at);
    exchange_rows(s, at, TRAFFIC_BACK_COMBINE, MZ_PHASE_BACKWARD_COMBINE);
    for (int32_t r = 0; r < s->ranks; r++)
        combine_rows(s, at, r, at->work[r].back_packed, MZ_PHASE_BACKWARD_OTHER);
    layers_meet(s);
    layers_reduce(s, at, MZ_MOVE_REDUCE);
    if (at->micro_batch + 1 < s->micro_batches)
        return;
    const step_at first = step_at_of(s, 0, at->moe, at->group);
    layers_reduce(s, &first, MZ_MOVE_REDUCE_STEP);
}

/* ---- the tail ----------------------------------------------------------------------------------
 */

/* Squared norms of all gradients: matrix kind by matrix kind, or, where the optimizer is cut, the
 * rank's parts of a layer's experts. */
static void norms(mz_step *s) {
    const int64_t h = s->model->hidden, inter = s->model->expert_intermediate;
    for (int32_t r = 0; r < s->ranks; r++) {
        layers_burst b = layers_burst_of(s, r, MZ_PHASE_OPTIMIZER, s->layers);
        const int64_t part = layers_cut(s, r + 1) - layers_cut(s, r);
        for (int32_t l = 0; l < s->moe; l++) {
            if (s->traits.sharded_optimizer) {
                layers_add(&b, MZ_WORK_ROW_NORMS, s->model->experts, part, 0);
                continue;
            }
            const int64_t mains = layers_work_at(s, 0, l)[r].owned;
            layers_add(&b, MZ_WORK_ROW_NORMS, mains * 2 * inter, h, 0);
            layers_add(&b, MZ_WORK_ROW_NORMS, mains * h, inter, 0);
        }
        layers_end(&b);
    }
}

/* Bytes and FLOPs of updating the part of a rank's tensor that `values` of it are. */
static void add_update(layers_burst *b, const mz_tensor *t, int64_t matrices, int64_t values,
                       double part) {
    const mz_step *s = b->s;
    const step_tensor size = step_tensor_of(s, t);
    const mz_optimizer_rule rule = s->options.optimizer->rule;
    layers_tell(s, &(mz_step_charge){b->phase, b->layer, b->rank, mz_work_update(rule), matrices,
                                     values, 0});
    layers_add_seconds(b,
                       mz_cost_update(&s->cluster->device, rule, matrices, values,
                                      part * size.update_bytes, part * size.update_flops),
                       2);
}

/* Experts that a rank has; several instances of one there share its weights. */
static int64_t hosted(const mz_step *s, int32_t rank, int32_t layer) {
    const step_at at = step_at_of(s, 0, layer, 0);
    int64_t n = at.work[rank].instances;
    for (int64_t i = at.call->further; i < at.call->further + at.call->furthers; i++)
        n -= s->further[i].rank == rank ? s->further[i].count : 0;
    return n;
}

/* Matrices that a rank updates: of experts whose first instance it has, or of all that it has where
 * these have optimizer state. */
static void update_whole(layers_burst *b, int32_t layer) {
    const mz_step *s = b->s;
    const int64_t matrices = s->traits.replica_optimizer
                                 ? hosted(s, b->rank, layer)
                                 : layers_work_at(s, 0, layer)[b->rank].owned;
    for (int64_t i = 0; i < s->model->tensors; i++) {
        const mz_tensor *t = &s->model->tensor[i];
        if (t->layer == layer && matrices > 0)
            add_update(b, t, matrices, t->rows * t->cols, (double)matrices / (double)s->mains);
    }
}

/* Both kinds' parts of all experts of a layer in one. */
static void update_parts(layers_burst *b, int32_t layer) {
    const mz_step *s = b->s;
    const int64_t part = layers_cut(s, b->rank + 1) - layers_cut(s, b->rank);
    const mz_tensor *kind[2] = {NULL, NULL};
    double bytes = 0;
    for (int64_t i = 0; i < s->model->tensors; i++)
        if (s->model->tensor[i].layer == layer) {
            kind[kind[0] != NULL] = &s->model->tensor[i];
            bytes += step_tensor_of(s, &s->model->tensor[i]).update_bytes;
        }
    if (part > 0 && kind[0])
        add_update(b, kind[0], 1, part * s->model->experts,
                   bytes / step_tensor_of(s, kind[0]).update_bytes);
}

/* Of MoE layers [first, end). */
static void update_layers(mz_step *s, int32_t first, int32_t end) {
    for (int32_t r = 0; r < s->ranks; r++) {
        layers_burst b = layers_burst_of(s, r, MZ_PHASE_OPTIMIZER, s->layers);
        for (int32_t l = first; l < end; l++)
            if (s->traits.sharded_optimizer || s->traits.sharded_weights)
                update_parts(&b, l);
            else
                update_whole(&b, l);
        layers_end(&b);
    }
    layers_refresh(s, first, end);
}

/* An optimizer that is cut goes layer by layer: its fresh weights need room. */
static void update(mz_step *s) {
    const int32_t each = s->traits.sharded_optimizer ? 1 : s->moe;
    norms(s);
    gather_all(s, 8, MZ_PHASE_GRADIENT_REDUCE, s->layers);
    for (int32_t l = 0; l < s->moe; l += each)
        update_layers(s, l, l + each);
}

/* ---- the step ----------------------------------------------------------------------------------
 */

/* A rank waits while others of its device run; planning is within that, as a replay has it. */
static void fill_outcome(mz_step *s, mz_step_outcome *o) {
    o->time_s = last_of(s, false);
    for (int32_t r = 0; r < s->ranks; r++) {
        double covered = 0;
        s->busy[r] = 0;
        for (int p = 0; p < MZ_PHASES; p++) {
            double sum = 0;
            for (int32_t l = 0; l <= s->layers; l++)
                sum += *step_detail_at(s, l, r, (mz_phase)p);
            o->phase_s[p] = fmax(o->phase_s[p], sum);
            s->busy[r] += mz_phase_computes((mz_phase)p) ? sum : 0;
            covered += p == MZ_PHASE_PLANNER ? 0 : sum;
        }
        *step_detail_at(s, s->layers, r, MZ_PHASE_LAUNCH_WAIT) = fmax(o->time_s - covered, 0);
        o->phase_s[MZ_PHASE_LAUNCH_WAIT] =
            fmax(o->phase_s[MZ_PHASE_LAUNCH_WAIT], o->time_s - covered);
    }
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
    memset(s->met, 0, sizeof *s->met * (size_t)s->ranks);
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
    outcome->moe_s = last_of(s, false);
    update(s);
    fill_outcome(s, outcome);
}
