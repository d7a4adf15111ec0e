/* A plan becomes, for every rank, integer rows, traffic by port and the time of its expert
 * products. Cost O(entries + instances) per call; nothing of size ranks x ranks is kept with the
 * port network. */
#include "sim/step/inside.h"

#include <string.h>

/* Rows src -> dst (global ranks) on the ports they use. */
static inline void lane_rows(const mz_topology *t, int32_t src, int32_t dst, int64_t rows,
                             step_lanes *from, step_lanes *to) {
    if (t->device[src] == t->device[dst])
        return;
    if (t->domain[src] == t->domain[dst]) {
        from->send_in += rows;
        to->recv_in += rows;
    } else {
        from->send_out += rows;
        to->recv_out += rows;
    }
}

void step_lane_rows(const mz_step *s, int32_t src, int32_t dst, int64_t rows, step_lanes *from,
                    step_lanes *to) {
    lane_rows(&s->cluster->topology, src, dst, rows, from, to);
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

/* Rows each source sends to each instance, with what adds them up. */
typedef struct pair_sum {
    mz_step *s;
    const mz_topology *topology;
    int32_t first; /* the group's first rank */
    step_rank_work *work;
    step_call *call;
    int64_t *matrix; /* [ep][ep] or NULL */
} pair_sum;

static inline void add_forward(const pair_sum *p, int32_t source, int32_t rank, int64_t rows) {
    step_rank_work *from = &p->work[source], *to = &p->work[rank];
    from->packed += rows;
    if (source == rank)
        return;
    p->call->off_rows += rows;
    lane_rows(p->topology, p->first + source, p->first + rank, rows, &from->forward, &to->forward);
    if (p->matrix)
        p->matrix[(int64_t)source * p->s->ep + rank] += rows;
}

static inline void add_backward(const pair_sum *p, int32_t source, int32_t rank, int64_t rows) {
    step_rank_work *from = &p->work[source], *to = &p->work[rank];
    from->back_packed += rows;
    if (source == rank)
        return;
    p->call->back_off_rows += rows;
    lane_rows(p->topology, p->first + source, p->first + rank, rows, &from->backward,
              &to->backward);
    if (p->matrix)
        p->matrix[(int64_t)source * p->s->ep + rank] += rows;
}

/* x of pairs that the rank cannot take from its own forward. */
static inline void add_again(const pair_sum *p, int32_t source, int32_t rank, int64_t rows) {
    step_rank_work *from = &p->work[source], *to = &p->work[rank];
    if (rows <= 0)
        return;
    from->again_packed += rows;
    if (source == rank)
        return;
    p->call->again_off_rows += rows;
    lane_rows(p->topology, p->first + source, p->first + rank, rows, &from->again, &to->again);
    if (p->matrix)
        p->s->matrix_again[(int64_t)source * p->s->ep + rank] += rows;
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

/* Forward by pair dispatch: one row per pair. */
static void forward_pairs(const pair_sum *p, const mz_plan *plan) {
    const int32_t instances = plan->begin[plan->experts];
    for (int32_t i = 0; i < instances; i++) {
        p->work[plan->rank[i]].rows += plan->forward[i];
        for (int64_t k = plan->entry_begin[i]; k < plan->entry_begin[i + 1]; k++)
            add_forward(p, plan->entry_source[k], plan->rank[i], plan->entry_pairs[k]);
    }
}

/* Every source sends a full buffer per expert, used or not, to the expert's first instance
 * (balancing-systems 10.2). */
static void forward_padded(const pair_sum *p, const mz_load *load, const mz_plan *plan) {
    for (int32_t src = 0; src < load->sources; src++)
        p->s->capacity[src] = mz_capacity_rows(&p->s->traits, load, src);
    for (int32_t e = 0; e < plan->experts; e++)
        for (int32_t src = 0; src < load->sources; src++) {
            const int32_t rank = plan->rank[plan->begin[e]];
            p->work[rank].rows += p->s->capacity[src];
            add_forward(p, src, rank, p->s->capacity[src]);
        }
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

/* Kept rows; with saved activations, a pair that was not computed on this instance in forward is
 * re-sent with its x and its activations are computed again. Entries of one instance hold a source
 * once, so the surplus of a source over forward is what moved. */
static void backward_pairs(const pair_sum *p, const mz_plan *plan) {
    mz_step *s = p->s;
    const bool all_again = s->traits.resend;
    const int32_t instances = plan->begin[plan->experts];
    for (int32_t i = 0; i < instances; i++) {
        const int32_t rank = plan->rank[i];
        for (int64_t k = plan->entry_begin[i]; k < plan->entry_begin[i + 1]; k++)
            s->source_rows[plan->entry_source[k]] += plan->entry_pairs[k];
        p->work[rank].back_rows += plan->backward[i];
        s->instance_again[i] = 0;
        for (int64_t k = plan->back_begin[i]; k < plan->back_begin[i + 1]; k++) {
            const int32_t source = plan->back_source[k];
            const int64_t rows = plan->back_pairs[k];
            int64_t again = all_again ? rows : rows - s->source_rows[source];
            again = again > 0 ? again : 0;
            if (s->options.dispatch == MZ_DISPATCH_PAIR)
                add_backward(p, source, rank, rows);
            if (s->options.dispatch == MZ_DISPATCH_PAIR || !all_again)
                add_again(p, source, rank, again);
            s->instance_again[i] += again;
        }
        p->work[rank].again_rows += s->instance_again[i];
        for (int64_t k = plan->entry_begin[i]; k < plan->entry_begin[i + 1]; k++)
            s->source_rows[plan->entry_source[k]] = 0;
    }
}

static step_entries forward_entries(const mz_plan *plan) {
    return (step_entries){plan->entry_begin, plan->entry_pairs, plan->entry_source};
}

static step_entries backward_entries(const mz_plan *plan) {
    return (step_entries){plan->back_begin, plan->back_pairs, plan->back_source};
}

/* A token's x goes once per destination with its g, so x's rows are g's. */
static void again_as_backward(mz_step *s, step_call *call, step_rank_work *work) {
    for (int32_t r = 0; r < s->ep; r++) {
        work[r].again_packed = work[r].back_packed;
        work[r].again = work[r].backward;
    }
    call->again_off_rows = call->back_off_rows;
    for (int64_t i = 0; s->matrix && i < (int64_t)s->ep * s->ep; i++)
        s->matrix_again[i] = s->matrix[i];
}

static mz_code traffic_of_tokens(const pair_sum *p, const mz_load *load, const mz_pairs *pairs,
                                 const mz_plan *plan, bool backward, mz_err *err) {
    if (!pairs)
        return mz_fail(err, MZ_EINPUT,
                       "--dispatch rank and node need a trace with pairs; this one has counts only "
                       "(use --dispatch pair)");
    return step_spread_tokens(p->s, load, pairs, plan,
                              backward ? backward_entries(plan) : forward_entries(plan), p->first,
                              backward, p->call, p->work, err);
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
    if (code == MZ_OK && p->matrix)
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
    backward_pairs(p, plan);
    mz_code code = MZ_OK;
    if (s->options.dispatch != MZ_DISPATCH_PAIR) {
        code = traffic_of_tokens(p, load, pairs, plan, true, err);
        if (code == MZ_OK && s->traits.resend)
            again_as_backward(s, p->call, p->work);
    }
    if (code == MZ_OK && p->matrix)
        code = keep_matrix(s, p->first, true, &p->call->back_message, &p->call->back_messages, err);
    return code;
}

/* The rank's rows per expert product. Free replicas count nothing: the rows are then those of as
 * many experts as the rank owns, evenly. */
static int32_t product_rows(mz_step *s, const int64_t *of_instance, int32_t rank, int64_t total) {
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

static void time_rank(mz_step *s, const mz_plan *plan, const step_call *call, int32_t rank,
                      step_rank_work *work) {
    int64_t *rows = s->expert_rows;
    int32_t groups = product_rows(s, plan->forward, rank, work->rows);
    if (s->traits.capacity_padded) {
        int64_t padded = 0; /* one expert's full buffers */
        for (int32_t r = 0; r < s->ep; r++)
            padded += s->capacity[r];
        for (int32_t g = 0; g < groups; g++)
            rows[g] = padded;
    }
    work->expert_s = step_expert_forward(s, rows, groups, work->rows);
    if (call->lossy)
        groups = product_rows(s, plan->backward, rank, work->back_rows);
    work->back_expert_s = step_expert_backward(s, rows, groups, work->back_rows);
    if (work->again_rows > 0) {
        groups = product_rows(s, s->instance_again, rank, work->again_rows);
        work->back_expert_s += step_expert_again(s, rows, groups, work->again_rows);
    }
}

static int32_t global_rank(int32_t first, int32_t rank) {
    return rank == MZ_EVERY_RANK ? rank : first + rank;
}

static mz_code keep_moves(mz_step *s, const mz_plan *plan, int32_t first, step_call *call,
                          mz_err *err) {
    if (!mz_grow((void **)&s->move, &s->move_cap, s->moves + (size_t)plan->moves, sizeof *s->move))
        return mz_fail_nomem(err, "transfers of a layer call");
    call->move = (int64_t)s->moves;
    for (int32_t i = 0; i < plan->moves; i++) {
        const mz_move *m = &plan->move[i];
        if (m->hide == MZ_HIDE_FREE || m->src == m->dst || m->bytes <= 0)
            continue;
        if (m->phase == MZ_MOVE_STEP && !step_moves_decided(s))
            continue;
        call->move_mask |= 1u << (8 * m->phase + m->hide);
        s->move[s->moves] = *m;
        s->move[s->moves].src = global_rank(first, m->src);
        s->move[s->moves++].dst = global_rank(first, m->dst);
    }
    call->moves = (int64_t)s->moves - call->move;
    return MZ_OK;
}

mz_code step_condense(mz_step *s, const mz_load *load, const mz_pairs *pairs, const mz_plan *plan,
                      int32_t group, step_call *call, step_rank_work *work, mz_err *err) {
    const pair_sum p = {s, &s->cluster->topology, group * s->ep, work, call, s->matrix};
    if (plan->begin[plan->experts] > s->instance_cap)
        return mz_fail(err, MZ_EINTERNAL, "a plan with %d instances; the step expects at most %d",
                       plan->begin[plan->experts], s->instance_cap);
    *call = (step_call){.present = true, .lossy = plan->has_backward};
    memset(work, 0, sizeof *work * (size_t)s->ep);
    sort_instances(s, plan);
    mz_code code = condense_forward(&p, load, pairs, plan, err);
    if (code == MZ_OK)
        code = condense_backward(&p, load, pairs, plan, err);
    if (code == MZ_OK)
        code = keep_moves(s, plan, p.first, call, err);
    if (code != MZ_OK)
        return code;
    for (int32_t e = 0; e < plan->experts && !s->traits.free_replicas; e++)
        for (int32_t i = plan->begin[e] + 1; i < plan->begin[e + 1]; i++)
            work[plan->rank[i]].hosted++;
    for (int32_t r = 0; r < s->ep; r++)
        time_rank(s, plan, call, r, &work[r]);
    return MZ_OK;
}
