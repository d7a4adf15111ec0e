/* A plan becomes, for every rank, integer rows, traffic by port and the time of its expert
 * products. Cost O(entries + instances) per call; nothing of size ranks x ranks is kept with the
 * port network. */
#include "sim/step/inside.h"

#include <string.h>

/* Room for the plan's instances, and for mains where those stand for free replicas. */
static mz_code grow_instances(mz_step *s, const mz_plan *plan, mz_err *err) {
    const int64_t instances = plan->begin[plan->experts];
    const size_t need = (size_t)(instances > s->mains ? instances : s->mains);
    size_t cap[4] = {s->instance_cap, s->instance_cap, s->instance_cap, s->instance_cap};
    if (!mz_grow((void **)&s->by_rank, &cap[0], need, sizeof *s->by_rank) ||
        !mz_grow((void **)&s->expert_rows, &cap[1], need, sizeof *s->expert_rows) ||
        !mz_grow((void **)&s->chunk_rows, &cap[2], need, sizeof *s->chunk_rows) ||
        !mz_grow((void **)&s->expert_turn, &cap[3], need, sizeof *s->expert_turn) ||
        !mz_grow((void **)&s->instance_again, &s->instance_cap, need, sizeof *s->instance_again))
        return mz_fail_nomem(err, "the instances of a plan");
    return MZ_OK;
}

/* Instances of each local rank, in expert order: s->by_rank[s->rank_begin[r] .. rank_begin[r+1]).
 */
static void sort_instances(mz_step *s, const mz_plan *plan) {
    const int32_t instances = plan->begin[plan->experts];
    int32_t *begin = s->rank_begin;
    memset(begin, 0, sizeof *begin * (size_t)(s->ep + 1));
    for (int32_t i = 0; i < instances; i++)
        begin[plan->rank[i] + 1]++;
    for (int32_t r = 0; r < s->ep; r++)
        begin[r + 1] += begin[r];
    for (int32_t i = 0; i < instances; i++)
        s->by_rank[begin[plan->rank[i]]++] = i;
    for (int32_t r = s->ep; r > 0; r--)
        begin[r] = begin[r - 1];
    begin[0] = 0;
}

typedef struct pair_sum {
    mz_step *s;
    const int32_t *domain, *device; /* [ep] of the group's ranks */
    int32_t first;                  /* the group's first rank */
    step_rank_work *work;
    step_call *call;
} pair_sum;

static step_tally *clear_tally(const pair_sum *p, int64_t *matrix) {
    step_tally *t = &p->s->tally;
    const size_t size = sizeof(int64_t) * (size_t)p->s->ep;
    memset(t->packed, 0, size);
    memset(t->send_in, 0, size);
    memset(t->send_out, 0, size);
    memset(t->copied, 0, size);
    t->off_rows = 0;
    t->matrix = matrix;
    return t;
}

/* Rows of a source for an instance on `rank`: by source in the tally, received ones in `to`. */
static inline void add_rows(const pair_sum *p, step_tally *t, int32_t source, int32_t rank,
                            int64_t rows, step_lanes *to) {
    t->packed[source] += rows;
    if (source == rank)
        return;
    t->off_rows += rows;
    if (t->matrix)
        t->matrix[(int64_t)source * p->s->ep + rank] += rows;
    if (p->device[source] == p->device[rank]) {
        t->copied[source] += rows;
        return;
    }
    if (p->domain[source] == p->domain[rank]) {
        t->send_in[source] += rows;
        to->recv_in += rows;
    } else {
        t->send_out[source] += rows;
        to->recv_out += rows;
    }
}

/* Off-diagonal cells become the call's messages, sorted by (source, destination); then zeroed. */
static mz_code keep_matrix(mz_step *s, int32_t first, bool with_again, int64_t *begin,
                           int64_t *count, mz_err *err) {
    const int64_t n = s->ep;
    if (!mz_grow((void **)&s->message, &s->message_cap, s->messages + (size_t)(n * n),
                 sizeof *s->message))
        return mz_fail_nomem(err, "messages of a layer call");
    *begin = (int64_t)s->messages;
    for (int64_t i = 0; i < n * n; i++) {
        const int64_t rows = s->matrix[i], again = with_again ? s->matrix_again[i] : 0;
        s->matrix[i] = 0;
        if (with_again)
            s->matrix_again[i] = 0;
        if (rows + again > 0 && i / n != i % n)
            s->message[s->messages++] = (step_message){.src = first + (int32_t)(i / n),
                                                       .dst = first + (int32_t)(i % n),
                                                       .rows = rows,
                                                       .again = again};
    }
    *count = (int64_t)s->messages - *begin;
    return MZ_OK;
}

/* All entries of one instance; the inner loop of everything, so what it touches is kept apart. */
static void add_instance(const pair_sum *p, step_tally *t, step_entries in, int32_t instance,
                         int32_t rank, step_lanes *to) {
    const int32_t *restrict domain = p->domain, *restrict device = p->device;
    int64_t *restrict packed = t->packed, *restrict send_in = t->send_in;
    int64_t *restrict send_out = t->send_out, *restrict copied = t->copied;
    const int32_t own_domain = domain[rank], own_device = device[rank];
    const int64_t end = in.begin[instance + 1];
    int64_t own = 0, all = 0, recv_in = 0, recv_out = 0;
    for (int64_t k = in.begin[instance]; k < end; k++) {
        const int32_t source = in.source[k];
        const int64_t rows = in.pairs[k];
        packed[source] += rows;
        all += rows;
        if (source == rank) {
            own += rows;
        } else if (device[source] == own_device) {
            copied[source] += rows;
        } else if (domain[source] == own_domain) {
            send_in[source] += rows;
            recv_in += rows;
        } else {
            send_out[source] += rows;
            recv_out += rows;
        }
    }
    to->recv_in += recv_in;
    to->recv_out += recv_out;
    t->off_rows += all - own;
    for (int64_t k = in.begin[instance]; t->matrix && k < end; k++)
        t->matrix[(int64_t)in.source[k] * p->s->ep + rank] += in.pairs[k];
}

static void keep_lanes(const step_tally *t, int32_t source, step_lanes *lanes) {
    lanes->send_in = t->send_in[source];
    lanes->send_out = t->send_out[source];
    lanes->copied = t->copied[source];
}

static step_entries forward_entries(const mz_plan *plan) {
    return (step_entries){plan->entry_begin, plan->entry_pairs, plan->entry_source};
}

static step_entries backward_entries(const mz_plan *plan) {
    return (step_entries){plan->back_begin, plan->back_pairs, plan->back_source};
}

static void keep_forward(const pair_sum *p, const step_tally *t) {
    for (int32_t r = 0; r < p->s->ep; r++) {
        p->work[r].packed = t->packed[r];
        keep_lanes(t, r, &p->work[r].forward);
    }
    p->call->off_rows = t->off_rows;
}

/* Forward by pair dispatch: one row per pair. */
static void forward_pairs(const pair_sum *p, const mz_plan *plan) {
    step_tally *t = clear_tally(p, p->s->matrix);
    const int32_t instances = plan->begin[plan->experts];
    for (int32_t i = 0; i < instances; i++) {
        const int32_t rank = plan->rank[i];
        p->work[rank].rows += plan->forward[i];
        add_instance(p, t, forward_entries(plan), i, rank, &p->work[rank].forward);
    }
    keep_forward(p, t);
}

/* Every source sends a full buffer per expert, used or not, to the expert's first instance
 * (balancing-systems 10.2). */
static void forward_padded(const pair_sum *p, const mz_load *load, const mz_plan *plan) {
    step_tally *t = clear_tally(p, p->s->matrix);
    for (int32_t src = 0; src < load->sources; src++)
        p->s->capacity[src] = mz_capacity_rows(&p->s->traits, load, src);
    for (int32_t e = 0; e < plan->experts; e++) {
        const int32_t rank = plan->rank[plan->begin[e]];
        for (int32_t src = 0; src < load->sources; src++) {
            p->work[rank].rows += p->s->capacity[src];
            add_rows(p, t, src, rank, p->s->capacity[src], &p->work[rank].forward);
        }
    }
    keep_forward(p, t);
}

/* The mirror of forward: same rows, same ports. */
static void backward_as_forward(mz_step *s, step_call *call, step_rank_work *work) {
    for (int32_t r = 0; r < s->ep; r++) {
        work[r].back_rows = work[r].rows;
        work[r].back_packed = work[r].packed;
        work[r].backward = work[r].forward;
    }
    call->back_off_rows = call->off_rows;
    call->back_message = call->message;
    call->back_messages = call->messages;
}

/* Kept rows of one row per pair. */
static void kept_pairs(const pair_sum *p, const mz_plan *plan) {
    step_tally *t = clear_tally(p, p->s->matrix);
    for (int32_t i = 0; i < plan->begin[plan->experts]; i++) {
        const int32_t rank = plan->rank[i];
        add_instance(p, t, backward_entries(plan), i, rank, &p->work[rank].backward);
    }
    for (int32_t r = 0; r < p->s->ep; r++) {
        p->work[r].back_packed = t->packed[r];
        keep_lanes(t, r, &p->work[r].backward);
    }
    p->call->back_off_rows = t->off_rows;
}

/* Pairs whose x is sent again and whose activations are computed again: all kept ones where the
 * policy does so; with saved activations those that were not computed on this instance in forward.
 * Entries of one instance hold a source once, so a source's surplus over forward is what moved. */
static void again_of_instance(const pair_sum *p, const mz_plan *plan, step_tally *t, int32_t i) {
    mz_step *s = p->s;
    const int32_t rank = plan->rank[i];
    for (int64_t k = plan->entry_begin[i]; k < plan->entry_begin[i + 1]; k++)
        s->source_rows[plan->entry_source[k]] += plan->entry_pairs[k];
    s->instance_again[i] = 0;
    for (int64_t k = plan->back_begin[i]; k < plan->back_begin[i + 1]; k++) {
        const int32_t source = plan->back_source[k];
        const int64_t forward = s->source_rows[source];
        const int64_t here = s->traits.resend ? 0
                             : step_alone(s)  ? layers_kept_here(s, source, forward)
                                              : forward;
        const int64_t again = plan->back_pairs[k] - here;
        if (again <= 0)
            continue;
        add_rows(p, t, source, rank, again, &p->work[rank].again);
        s->instance_again[i] += again;
    }
    p->work[rank].again_rows += s->instance_again[i];
    p->work[rank].back_rows += plan->backward[i];
    for (int64_t k = plan->entry_begin[i]; k < plan->entry_begin[i + 1]; k++)
        s->source_rows[plan->entry_source[k]] = 0;
}

static void again_pairs(const pair_sum *p, const mz_plan *plan) {
    mz_step *s = p->s;
    step_tally *t = clear_tally(p, s->matrix_again);
    for (int32_t e = 0; e < plan->experts; e++) {
        if (step_alone(s))
            layers_expect(s, plan, e);
        for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++)
            again_of_instance(p, plan, t, i);
    }
    for (int32_t r = 0; r < s->ep; r++) {
        p->work[r].again_packed = t->packed[r];
        keep_lanes(t, r, &p->work[r].again);
    }
    p->call->again_off_rows = t->off_rows;
}

/* A token's x goes once per destination with its g, so x's rows are g's. */
static void again_as_backward(mz_step *s, step_call *call, step_rank_work *work) {
    for (int32_t r = 0; r < s->ep; r++) {
        work[r].again_packed = work[r].back_packed;
        work[r].again = work[r].backward;
    }
    call->again_off_rows = call->back_off_rows;
    if (s->matrix)
        memcpy(s->matrix_again, s->matrix, sizeof *s->matrix * (size_t)s->ep * (size_t)s->ep);
}

static mz_code traffic_of_tokens(const pair_sum *p, const mz_load *load, const mz_pairs *pairs,
                                 const mz_plan *plan, bool backward, mz_err *err) {
    if (!pairs)
        return mz_fail(err, MZ_EINPUT,
                       "--dispatch rank and node need a trace with pairs; this one has counts only "
                       "(use --dispatch pair)");
    const step_spread to = {
        .first = p->first, .backward = backward, .call = p->call, .work = p->work};
    return step_spread_tokens(p->s, load, pairs, plan,
                              backward ? backward_entries(plan) : forward_entries(plan), &to, err);
}

static mz_code condense_forward(const pair_sum *p, const mz_load *load, const mz_pairs *pairs,
                                const mz_plan *plan, mz_err *err) {
    mz_step *s = p->s;
    mz_code code = MZ_OK;
    if (s->traits.capacity_padded) {
        forward_padded(p, load, plan);
    } else if (s->options.dispatch == MZ_DISPATCH_PAIR) {
        forward_pairs(p, plan);
    } else {
        for (int32_t i = 0; i < plan->begin[plan->experts]; i++)
            p->work[plan->rank[i]].rows += plan->forward[i];
        code = traffic_of_tokens(p, load, pairs, plan, false, err);
    }
    if (code == MZ_OK && s->matrix)
        code = keep_matrix(s, p->first, false, &p->call->message, &p->call->messages, err);
    return code;
}

static mz_code condense_backward(const pair_sum *p, const mz_load *load, const mz_pairs *pairs,
                                 const mz_plan *plan, mz_err *err) {
    mz_step *s = p->s;
    if (!p->call->lossy) {
        backward_as_forward(s, p->call, p->work);
        return MZ_OK;
    }
    again_pairs(p, plan);
    mz_code code = MZ_OK;
    if (s->options.dispatch == MZ_DISPATCH_PAIR) {
        kept_pairs(p, plan);
    } else {
        code = traffic_of_tokens(p, load, pairs, plan, true, err);
        if (code == MZ_OK && s->traits.resend)
            again_as_backward(s, p->call, p->work);
    }
    if (code == MZ_OK && s->matrix)
        code = keep_matrix(s, p->first, true, &p->call->back_message, &p->call->back_messages, err);
    return code;
}

/* Free replicas count nothing: the rows are then those of as
 * many experts as the rank owns, evenly. */
int32_t step_product_rows(mz_step *s, const int64_t *of_instance, int32_t rank, int64_t total) {
    int64_t *rows = s->expert_rows;
    if (s->traits.free_replicas) {
        for (int64_t g = 0; g < s->mains; g++)
            rows[g] = total / s->mains + (g < total % s->mains);
        return (int32_t)s->mains;
    }
    const int32_t *mine = s->by_rank + s->rank_begin[rank];
    const int32_t groups = s->rank_begin[rank + 1] - s->rank_begin[rank];
    for (int32_t g = 0; g < groups; g++)
        rows[g] = of_instance[mine[g]];
    return groups;
}

/* With padding every group has one expert's full buffers. */
int32_t step_forward_rows(mz_step *s, const mz_plan *plan, int32_t rank, int64_t total) {
    const int32_t groups = step_product_rows(s, plan->forward, rank, total);
    int64_t padded = 0;
    for (int32_t r = 0; s->traits.capacity_padded && r < s->ep; r++)
        padded += s->capacity[r];
    for (int32_t g = 0; s->traits.capacity_padded && g < groups; g++)
        s->expert_rows[g] = padded;
    return groups;
}

static void time_rank(mz_step *s, const mz_plan *plan, const step_call *call, int32_t rank,
                      step_rank_work *work) {
    int64_t *rows = s->expert_rows;
    int32_t groups = step_forward_rows(s, plan, rank, work->rows);
    work->expert_s = step_expert_forward(s, rows, groups, work->rows);
    if (call->lossy)
        groups = step_product_rows(s, plan->backward, rank, work->back_rows);
    work->back_expert_s = step_expert_backward(s, rows, groups, work->back_rows);
    if (work->again_rows > 0) {
        groups = step_product_rows(s, s->instance_again, rank, work->again_rows);
        work->back_expert_s += step_expert_again(s, rows, groups, work->again_rows);
    }
}

/* ---- chunks: traffic and products of every part of the forward rows (the backward of a lossless
 * call mirrors them)
 * ------------------------------------------------------------------------------- */

/* One row per pair: every entry is cut. */
static void chunk_pairs(const pair_sum *p, const mz_plan *plan, step_chunk *chunk, int32_t c) {
    const int32_t chunks = p->s->chunks;
    step_tally *t = clear_tally(p, p->s->matrix);
    for (int32_t i = 0; i < plan->begin[plan->experts]; i++) {
        const int32_t rank = plan->rank[i];
        for (int64_t k = plan->entry_begin[i]; k < plan->entry_begin[i + 1]; k++)
            add_rows(p, t, plan->entry_source[k], rank,
                     step_part(plan->entry_pairs[k], c, chunks, k),
                     &chunk[(int64_t)rank * chunks + c].lanes);
    }
    for (int32_t r = 0; r < p->s->ep; r++)
        keep_lanes(t, r, &chunk[(int64_t)r * chunks + c].lanes);
}

static void time_chunk(mz_step *s, const mz_plan *plan, step_chunk *chunk, int32_t c) {
    for (int32_t i = 0; i < plan->begin[plan->experts]; i++) {
        int64_t rows = 0;
        for (int64_t k = plan->entry_begin[i]; k < plan->entry_begin[i + 1]; k++)
            rows += step_part(plan->entry_pairs[k], c, s->chunks, k);
        s->chunk_rows[i] = rows;
        chunk[(int64_t)plan->rank[i] * s->chunks + c].rows += rows;
    }
    for (int32_t r = 0; r < s->ep; r++) {
        step_chunk *mine = &chunk[(int64_t)r * s->chunks + c];
        const int32_t groups = step_product_rows(s, s->chunk_rows, r, mine->rows);
        mine->expert_s = step_expert_forward(s, s->expert_rows, groups, mine->rows);
        mine->back_expert_s = step_expert_backward(s, s->expert_rows, groups, mine->rows);
    }
}

static mz_code condense_chunks(const pair_sum *p, const mz_load *load, const mz_pairs *pairs,
                               const mz_plan *plan, const step_at *at, mz_err *err) {
    mz_step *s = p->s;
    mz_code code = MZ_OK;
    if (s->chunks == 1)
        return MZ_OK;
    memset(at->chunk, 0, sizeof *at->chunk * (size_t)s->ep * (size_t)s->chunks);
    p->call->chunk_message = (int64_t)s->messages;
    for (int32_t c = 0; code == MZ_OK && c < s->chunks; c++) {
        const step_spread to = {
            .first = p->first, .call = p->call, .work = p->work, .part = at->chunk, .chunk = c};
        int64_t begin, count;
        if (s->options.dispatch == MZ_DISPATCH_PAIR)
            chunk_pairs(p, plan, at->chunk, c);
        else
            code = step_spread_tokens(s, load, pairs, plan, forward_entries(plan), &to, err);
        time_chunk(s, plan, at->chunk, c);
        if (code == MZ_OK && s->matrix)
            code = keep_matrix(s, p->first, false, &begin, &count, err);
        at->chunk_end[c] = (int64_t)s->messages;
    }
    return code;
}

static int32_t global_rank(int32_t first, int32_t rank) {
    return rank == MZ_EVERY_RANK ? rank : first + rank;
}

/* The moves that this call makes: what happens once per step stands in the plan of micro-batch 0;
 * what belongs to a change of placement is made when the change is decided. */
static mz_code keep_moves(mz_step *s, const mz_plan *plan, const step_at *at, mz_err *err) {
    step_call *call = at->call;
    const int32_t first = at->first, micro_batch = at->micro_batch;
    if (!mz_grow((void **)&s->move, &s->move_cap, s->moves + (size_t)plan->moves, sizeof *s->move))
        return mz_fail_nomem(err, "transfers of a layer call");
    call->move = (int64_t)s->moves;
    for (int32_t i = 0; i < plan->moves; i++) {
        const mz_move *m = &plan->move[i];
        const bool once = m->phase == MZ_MOVE_STEP || m->phase == MZ_MOVE_REDUCE_STEP;
        if (m->hide == MZ_HIDE_FREE || m->src == m->dst || m->bytes <= 0)
            continue;
        if ((once && micro_batch > 0) || (m->change && !step_decided(s, micro_batch)))
            continue;
        call->move_mask |= step_move_bit(m->phase, m->hide);
        s->move[s->moves] = *m;
        s->move[s->moves].src = global_rank(first, m->src);
        s->move[s->moves++].dst = global_rank(first, m->dst);
    }
    call->moves = (int64_t)s->moves - call->move;
    return MZ_OK;
}

mz_code step_condense(mz_step *s, const mz_load *load, const mz_pairs *pairs, const mz_plan *plan,
                      const step_at *at, mz_err *err) {
    const mz_topology *topology = &s->cluster->topology;
    const pair_sum p = {.s = s,
                        .domain = topology->domain + at->first,
                        .device = topology->device + at->first,
                        .first = at->first,
                        .work = at->work,
                        .call = at->call};
    *at->call = (step_call){.present = true, .lossy = plan->has_backward};
    memset(at->work, 0, sizeof *at->work * (size_t)s->ep);
    mz_code code = grow_instances(s, plan, err);
    if (code != MZ_OK)
        return code;
    sort_instances(s, plan);
    code = condense_forward(&p, load, pairs, plan, err);
    if (code == MZ_OK)
        code = condense_backward(&p, load, pairs, plan, err);
    if (code == MZ_OK)
        code = condense_chunks(&p, load, pairs, plan, at, err);
    if (code == MZ_OK)
        code = keep_moves(s, plan, at, err);
    if (code != MZ_OK)
        return code;
    for (int32_t e = 0; e < plan->experts && !s->traits.free_replicas; e++)
        for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++) {
            at->work[plan->rank[i]].hosted += i > plan->begin[e];
            at->work[plan->rank[i]].instances++;
        }
    for (int32_t r = 0; r < s->ep; r++)
        at->work[r].pairs = load->source[r];
    if (s->options.memory_only)
        return MZ_OK;
    if (step_alone(s))
        return layers_condense(s, plan, at, err);
    for (int32_t r = 0; r < s->ep; r++)
        time_rank(s, plan, at->call, r, &at->work[r]);
    return MZ_OK;
}
