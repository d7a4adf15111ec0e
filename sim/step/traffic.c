/* Exchanges of one layer call: counts, rows, transfers of the plan. */
#include "sim/step/inside.h"

#include <string.h>

step_at step_at_of(const mz_step *s, int32_t micro_batch, int32_t moe, int32_t group) {
    const bool cut = s->chunks > 1;
    const int64_t ordinal = ((int64_t)micro_batch * s->moe + moe) * s->groups + group;
    return (step_at){.micro_batch = micro_batch,
                     .moe = moe,
                     .group = group,
                     .layer = s->moe_layer[moe],
                     .first = group * s->ep,
                     .end = (group + 1) * s->ep,
                     .call = step_call_at(s, micro_batch, moe, group),
                     .work = step_work_at(s, micro_batch, moe) + (int64_t)group * s->ep,
                     .chunk = cut ? step_chunk_at(s, micro_batch, moe, group * s->ep) : NULL,
                     .chunk_end = cut ? s->chunk_end + ordinal * s->chunks : NULL};
}

/* What a replay sends beside a row: ||h||^2 with combine where scores have it; the row number of
 * the saved activations with what is kept of them; the gate weight's gradient with every row back.
 */
static int64_t number_bytes(const mz_step *s, const step_call *call, step_traffic traffic) {
    enum { PLACE_BYTES = 8 };
    switch (traffic) {
    case TRAFFIC_COMBINE:
        return call->lossy ? s->traits.score_combine_bytes : 0;
    case TRAFFIC_BACK_DISPATCH:
        return call->lossy && !s->traits.resend ? PLACE_BYTES : 0;
    case TRAFFIC_BACK_COMBINE:
        return PAIR_NUMBER_BYTES;
    default:
        return 0;
    }
}

int64_t step_row_bytes(const mz_step *s, const step_call *call, step_traffic traffic) {
    const int64_t row = s->sizes.row;
    const mz_policy_traits *t = &s->traits;
    if (step_alone(s))
        return row + number_bytes(s, call, traffic);
    switch (traffic) {
    case TRAFFIC_COMBINE:
        return row + (call->lossy ? t->score_combine_bytes : 0);
    case TRAFFIC_SCORES:
        return t->score_home_bytes;
    case TRAFFIC_BACK_DISPATCH:
        return row + (call->lossy && t->resend ? PAIR_NUMBER_BYTES : 0);
    case TRAFFIC_BACK_COMBINE:
        return row + (call->lossy && !t->router_gradient_kept ? PAIR_NUMBER_BYTES : 0);
    case TRAFFIC_DISPATCH:
        break;
    }
    return row;
}

int64_t step_again_bytes(const mz_step *s, const step_call *call, step_traffic traffic) {
    return traffic == TRAFFIC_BACK_DISPATCH && call->lossy ? s->sizes.row : 0;
}

static bool is_backward(step_traffic traffic) {
    return traffic == TRAFFIC_BACK_DISPATCH || traffic == TRAFFIC_BACK_COMBINE;
}

static bool is_mirrored(step_traffic traffic) {
    return traffic == TRAFFIC_COMBINE || traffic == TRAFFIC_BACK_COMBINE;
}

/* The messages of the call or of one chunk as bytes; mirrored ones sorted again by their new
 * source. */
static void fill_messages(mz_step *s, const step_at *at, step_traffic traffic, int32_t chunk,
                          mz_exchange *x) {
    const bool back = is_backward(traffic), mirrored = is_mirrored(traffic);
    int64_t begin = back ? at->call->back_message : at->call->message;
    int64_t count = back ? at->call->back_messages : at->call->messages;
    if (chunk != WHOLE_CALL) {
        begin = chunk > 0 ? at->chunk_end[chunk - 1] : at->call->chunk_message;
        count = at->chunk_end[chunk] - begin;
    }
    const step_message *in = s->message + begin;
    const double row = (double)step_row_bytes(s, at->call, traffic);
    const double again = (double)step_again_bytes(s, at->call, traffic);
    if (!mz_grow((void **)&s->sending, &s->sending_cap, (size_t)count, sizeof *s->sending)) {
        s->code = mz_fail_nomem(s->err, "messages of an exchange");
        return;
    }
    int32_t *next = s->rank_begin;
    memset(next, 0, sizeof *next * (size_t)(s->ep + 1));
    for (int64_t i = 0; mirrored && i < count; i++)
        next[in[i].dst - at->first + 1]++;
    for (int32_t r = 0; mirrored && r < s->ep; r++)
        next[r + 1] += next[r];
    for (int64_t i = 0; i < count; i++) {
        const mz_message m = {mirrored ? in[i].dst : in[i].src, mirrored ? in[i].src : in[i].dst,
                              row * (double)in[i].rows + again * (double)in[i].again};
        s->sending[mirrored ? next[in[i].dst - at->first]++ : i] = m;
    }
    x->message = s->sending;
    x->messages = count;
}

double step_fill_lanes(mz_step *s, const step_at *at, step_traffic traffic, int32_t chunk,
                       int32_t r) {
    static const step_lanes none = {0};
    const bool back = is_backward(traffic), mirrored = is_mirrored(traffic);
    const int64_t row = step_row_bytes(s, at->call, traffic);
    const int64_t again = step_again_bytes(s, at->call, traffic);
    const step_lanes *l = back ? &at->work[r].backward : &at->work[r].forward;
    const step_lanes *a = &at->work[r].again;
    if (chunk != WHOLE_CALL) {
        l = &at->chunk[(int64_t)r * s->chunks + chunk].lanes;
        a = &none;
    }
    /* Mirrored: what was sent comes back. */
    s->lane_out[mirrored][r] = (double)(row * l->send_in + again * a->send_in);
    s->lane_out[!mirrored][r] = (double)(row * l->recv_in + again * a->recv_in);
    s->lane_out[2 + mirrored][r] = (double)(row * l->send_out + again * a->send_out);
    s->lane_out[2 + !mirrored][r] = (double)(row * l->recv_out + again * a->recv_out);
    return (double)(row * l->copied + again * a->copied);
}

void step_count_traffic(mz_step *s, const step_call *call, step_traffic traffic) {
    s->traffic_bytes[traffic] += step_row_bytes(s, call, traffic) *
                                     (is_backward(traffic) ? call->back_off_rows : call->off_rows) +
                                 step_again_bytes(s, call, traffic) * call->again_off_rows;
}

void step_build_rows(mz_step *s, const step_at *at, step_traffic traffic, mz_phase phase,
                     int32_t chunk, const mz_task *also) {
    if (s->code != MZ_OK || s->ep == 1)
        return;
    const bool sized = traffic == TRAFFIC_DISPATCH || traffic == TRAFFIC_BACK_DISPATCH;
    const step_join join = {STREAM_COMM, phase, at->layer, true, also, sized ? s->counted : NULL};
    for (int32_t r = 0; r < s->ep; r++) {
        const double copied = step_fill_lanes(s, at, traffic, chunk, r);
        if (copied > 0)
            step_copy(s, at->first + r, copied, join);
    }
    mz_exchange x = {.members = s->ep,
                     .rank = s->all_ranks + at->first,
                     .send_inside = s->lane_out[0],
                     .recv_inside = s->lane_out[1],
                     .send_outside = s->lane_out[2],
                     .recv_outside = s->lane_out[3],
                     .rounds = 1};
    if (s->options.network == MZ_NETWORK_FLOW)
        fill_messages(s, at, traffic, chunk, &x);
    step_exchange(s, &x, join);
    if (chunk <= 0) /* the first chunk counts for all */
        step_count_traffic(s, at->call, traffic);
}

void step_build_counts(mz_step *s, const step_at *at, int64_t bytes) {
    if (s->code != MZ_OK || s->ep == 1)
        return;
    for (int32_t r = 0; r < s->ep; r++) {
        s->lane_out[0][r] = s->lane_out[1][r] = (double)(bytes * s->peers_in[at->first + r]);
        s->lane_out[2][r] = s->lane_out[3][r] = (double)(bytes * s->peers_out[at->first + r]);
    }
    mz_exchange x = {.members = s->ep,
                     .rank = s->all_ranks + at->first,
                     .send_inside = s->lane_out[0],
                     .recv_inside = s->lane_out[1],
                     .send_outside = s->lane_out[2],
                     .recv_outside = s->lane_out[3],
                     .rounds = 1};
    const size_t all = (size_t)s->ep * (size_t)(s->ep - 1);
    if (s->options.network == MZ_NETWORK_FLOW) {
        if (!mz_grow((void **)&s->sending, &s->sending_cap, all, sizeof *s->sending)) {
            s->code = mz_fail_nomem(s->err, "messages of an exchange");
            return;
        }
        for (int32_t a = at->first; a < at->end; a++)
            for (int32_t b = at->first; b < at->end; b++)
                if (a != b)
                    s->sending[x.messages++] = (mz_message){a, b, (double)bytes};
        x.message = s->sending;
    }
    step_exchange(s, &x,
                  (step_join){STREAM_COMM, MZ_PHASE_COUNT_EXCHANGE, at->layer, true, NULL, NULL});
}

/* Adds one move to the exchange being collected. */
static void collect_move(mz_step *s, const mz_move *m, int32_t *rounds) {
    if (m->round + 1 > *rounds)
        *rounds = m->round + 1;
    if (m->src != MZ_EVERY_RANK && m->dst != MZ_EVERY_RANK) {
        step_collect(s, m->src, m->dst, (double)m->bytes);
        s->transfer_bytes += m->bytes;
        return;
    }
    const bool from_every = m->src == MZ_EVERY_RANK;
    step_collect_every(s, from_every ? m->dst : m->src, (double)m->bytes, from_every);
    s->transfer_bytes += m->bytes - m->bytes / s->ep;
}

int32_t step_build_moves(mz_step *s, const step_at *at, mz_move_phase phase, mz_move_hide hide,
                         const mz_task *also) {
    if (s->code != MZ_OK || !(at->call->move_mask & step_move_bit(phase, hide)))
        return 0;
    int32_t rounds = 1;
    for (int64_t i = at->call->move; i < at->call->move + at->call->moves; i++)
        if (s->move[i].phase == phase && s->move[i].hide == hide)
            collect_move(s, &s->move[i], &rounds);
    const bool reduces = phase == MZ_MOVE_REDUCE || phase == MZ_MOVE_REDUCE_STEP;
    const mz_phase tag = reduces ? MZ_PHASE_REPLICA_REDUCE : MZ_PHASE_WEIGHT_MOVE;
    return step_run_collected(s, at->first, at->end, rounds,
                              (step_join){.stream = STREAM_MOVE,
                                          .phase = tag,
                                          .layer = at->layer,
                                          .after_compute = true,
                                          .also = also,
                                          .beside = hide == MZ_HIDE_LAYERS});
}

/* Transfers after the optimizer, of all layers together: they are issued at once. */
void step_build_step_moves(mz_step *s, int32_t group) {
    int32_t rounds = 1;
    for (int32_t m = 0; m < s->moe; m++) {
        const step_call *call = step_call_at(s, 0, m, group);
        for (int64_t i = call->move; i < call->move + call->moves; i++)
            if (s->move[i].phase == MZ_MOVE_STEP)
                collect_move(s, &s->move[i], &rounds);
    }
    step_run_collected(s, group * s->ep, (group + 1) * s->ep, rounds,
                       (step_join){STREAM_MOVE, MZ_PHASE_WEIGHT_MOVE, s->layers, true, NULL, NULL});
}
