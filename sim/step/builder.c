/* Tasks and exchanges of the step being built. Errors stick: after the first, every call is a no-op
 * and mz_step_finish returns the code. */
#include "sim/step/inside.h"

#include "common/base/sort.h"

#include <math.h>

/* Tags: phase in the low 8 bits, model layer above. */
static uint32_t tag_of(mz_phase phase, int32_t layer) {
    return (uint32_t)phase | (uint32_t)layer << 8;
}

static mz_queue queue_of(const mz_step *s, int32_t rank, step_stream stream, mz_phase phase) {
    const int32_t index = s->options.effects.fifo ? (int32_t)stream : (int32_t)phase;
    return s->queue[(int64_t)rank * s->queues + index];
}

static double launch_cost(const mz_step *s, int launches) {
    return s->options.effects.launches ? launches * s->cluster->device.launch_s : 0;
}

/* Jitter of one kernel: draw number n of the rank's stream in this step. Half a standard normal is
 * the most that a relative deviation may take away, so that times stay positive. */
double step_noise(mz_step *s, int32_t rank) {
    if (!s->options.effects.noise)
        return 1;
    const uint64_t n = (uint64_t)s->drawn[rank]++;
    mz_rng rng =
        mz_rng_make(s->options.seed, mz_rng_stream((uint64_t)s->number, (uint64_t)rank, n, 1));
    double factor = 1 + s->cluster->device.noise_jitter * mz_rng_normal(&rng);
    return s->persistent[rank] * (factor < 0.5 ? 0.5 : factor);
}

static void wait_for(mz_step *s, mz_task task, mz_task dep) {
    if (s->code == MZ_OK && task >= 0 && dep >= 0)
        s->code = mz_graph_wait(s->graph, task, dep, s->err);
}

/* Ranks of one device run one at a time, in the order in which the step is built. */
static void share_device(mz_step *s, int32_t rank, mz_task task) {
    if (s->cluster->ranks_per_device == 1)
        return;
    mz_task *last = &s->device_last[s->cluster->topology.device[rank]];
    wait_for(s, task, *last);
    *last = task;
}

static mz_task kernel(mz_step *s, int32_t rank, mz_phase phase, int32_t layer, double seconds,
                      int launches) {
    mz_task task = -1;
    if (s->code == MZ_OK)
        s->code = mz_graph_task(s->graph, queue_of(s, rank, STREAM_COMPUTE, phase),
                                seconds * step_noise(s, rank), launch_cost(s, launches),
                                tag_of(phase, layer), &task, s->err);
    /* On one stream the order of issue is the order of work; apart, it has to be said. */
    if (!s->options.effects.fifo)
        wait_for(s, task, s->last[rank]);
    share_device(s, rank, task);
    return s->code == MZ_OK ? task : -1;
}

mz_task step_emit(mz_step *s, int32_t rank, mz_phase phase, int32_t layer, double seconds,
                  int launches) {
    mz_task task = kernel(s, rank, phase, layer, seconds, launches);
    step_needs *needs = &s->needs[rank];
    for (int i = 0; i < needs->count; i++)
        wait_for(s, task, needs->task[i]);
    needs->count = 0;
    if (task >= 0)
        s->last[rank] = task;
    return task;
}

mz_task step_emit_other(mz_step *s, int32_t rank, mz_phase phase, int32_t layer, double seconds,
                        int launches) {
    const bool on = s->options.effects.other_work;
    return step_emit(s, rank, phase, layer, on ? seconds : 0, on ? launches : 0);
}

mz_task step_emit_aside(mz_step *s, int32_t rank, mz_phase phase, int32_t layer, double seconds,
                        int launches) {
    const bool on = s->options.effects.other_work;
    return kernel(s, rank, phase, layer, on ? seconds : 0, on ? launches : 0);
}

void step_need(mz_step *s, int32_t rank, mz_task task) {
    step_needs *needs = &s->needs[rank];
    if (task < 0 || s->code != MZ_OK)
        return;
    if (needs->count == NEEDS)
        s->code = mz_fail(s->err, MZ_EINTERNAL, "rank %d has more than %d pending dependencies",
                          rank, NEEDS);
    else
        needs->task[needs->count++] = task;
}

void step_host_sync(mz_step *s, int32_t rank, mz_task after, double seconds, int32_t layer) {
    if (s->code == MZ_OK)
        s->code = mz_graph_sync(s->graph, rank, after, seconds, tag_of(MZ_PHASE_LAUNCH_WAIT, layer),
                                s->err);
}

void step_span_add(mz_step *s, mz_task first, mz_task last) {
    if (s->code != MZ_OK || first < 0 || last < 0)
        return;
    if (!mz_grow((void **)&s->span, &s->span_cap, s->spans + 1, sizeof *s->span))
        s->code = mz_fail_nomem(s->err, "spans of MoE layers");
    else
        s->span[s->spans++] = (step_span){first, last};
}

void step_copy(mz_step *s, int32_t rank, double bytes, step_join join) {
    const double seconds = mz_cost_memory(&s->cluster->device, 2 * bytes);
    mz_task task = -1;
    if (s->code != MZ_OK)
        return;
    s->code = mz_graph_task(s->graph, queue_of(s, rank, join.stream, join.phase), seconds,
                            launch_cost(s, join.launched ? 0 : 1), tag_of(join.phase, join.layer),
                            &task, s->err);
    if (join.after_compute)
        wait_for(s, task, s->last[rank]);
    if (join.also)
        wait_for(s, task, join.also[rank]);
    if (join.counts && !s->options.effects.fifo)
        wait_for(s, task, join.counts[rank]);
    share_device(s, rank, task);
}

/* ---- exchanges
 * ----------------------------------------------------------------------------------- */

static void add_up(mz_step *s, const mz_exchange *x) {
    for (int32_t m = 0; m < x->members; m++) {
        s->sent += x->send_inside[m] + x->send_outside[m];
        s->received += x->recv_inside[m] + x->recv_outside[m];
    }
}

void step_exchange(mz_step *s, const mz_exchange *x, step_join join) {
    int32_t id = -1;
    if (s->code != MZ_OK)
        return;
    s->code = mz_graph_exchange(s->graph, x, &id, s->err);
    if (s->code == MZ_OK &&
        !mz_grow((void **)&s->mark, &s->mark_cap, s->marks + 1, sizeof *s->mark))
        s->code = mz_fail_nomem(s->err, "exchanges");
    const mz_task first = (mz_task)mz_graph_tasks(s->graph);
    for (int32_t m = 0; m < x->members && s->code == MZ_OK; m++) {
        const int32_t rank = x->rank[m];
        mz_task task = -1;
        s->code = mz_graph_join(s->graph, queue_of(s, rank, join.stream, join.phase), id, m,
                                launch_cost(s, join.launched ? 0 : 1),
                                tag_of(join.phase, join.layer), &task, s->err);
        if (join.after_compute)
            wait_for(s, task, s->last[rank]);
        if (join.also)
            wait_for(s, task, join.also[rank]);
        if (join.counts && !s->options.effects.fifo) /* one queue keeps them in order */
            wait_for(s, task, join.counts[rank]);
        s->joined[rank] = task;
    }
    if (s->code != MZ_OK)
        return;
    s->mark[s->marks++] = (step_exchange_mark){first, x->members};
    add_up(s, x);
}

static void add_message(mz_step *s, int32_t src, int32_t dst, double bytes) {
    if (!mz_grow((void **)&s->sending, &s->sending_cap, s->sendings + 1, sizeof *s->sending)) {
        s->code = mz_fail_nomem(s->err, "messages of an exchange");
        return;
    }
    s->sending[s->sendings++] = (mz_message){src, dst, bytes};
}

void step_collect(mz_step *s, int32_t src, int32_t dst, double bytes) {
    const mz_topology *t = &s->cluster->topology;
    if (s->code != MZ_OK || src == dst || bytes <= 0)
        return;
    s->touched[src] = s->touched[dst] = true;
    if (s->options.network == MZ_NETWORK_FLOW)
        add_message(s, src, dst, bytes);
    if (t->device[src] == t->device[dst]) {
        s->copied[src] += bytes;
        return;
    }
    const int out = t->domain[src] != t->domain[dst];
    s->lane[2 * out][src] += bytes;
    s->lane[2 * out + 1][dst] += bytes;
}

/* Rank `rank` receives from (sends to) every other rank of its group an equal part of `bytes`. */
void step_collect_every(mz_step *s, int32_t rank, double bytes, bool from_every) {
    s->every[from_every][rank] += bytes / s->ep;
    s->every_used = true;
}

/* Equal parts from or to all ranks of one group: sums per device and domain, so O(ranks). With the
 * flow network each part is a message. */
static void expand_every(mz_step *s, int32_t first, double *part, bool from_every) {
    const mz_topology *t = &s->cluster->topology;
    const int32_t end = first + s->ep;
    const int here = from_every ? 1 : 0; /* lane of the rank itself: it receives or sends */
    double total = 0;
    for (int32_t r = first; r < end; r++)
        total += part[r];
    if (total == 0)
        return;
    for (int32_t low = first, high; low < end; low = high) {
        double domain_sum = 0;
        for (high = low; high < end && t->domain[high] == t->domain[low]; high++)
            domain_sum += part[high];
        for (int32_t a = low, b; a < high; a = b) {
            double device_sum = 0;
            for (b = a; b < high && t->device[b] == t->device[a]; b++)
                device_sum += part[b];
            for (int32_t r = a; r < b; r++) {
                s->touched[r] = true;
                s->copied[r] += part[r] * (b - a - 1);
                s->lane[0 + here][r] += part[r] * (high - low - (b - a));
                s->lane[2 + here][r] += part[r] * (s->ep - (high - low));
                s->lane[0 + !here][r] += domain_sum - device_sum;
                s->lane[2 + !here][r] += total - domain_sum;
            }
        }
    }
    for (int32_t r = first; s->options.network == MZ_NETWORK_FLOW && r < end; r++)
        for (int32_t q = first; q < end && part[r] > 0; q++)
            if (q != r)
                add_message(s, from_every ? q : r, from_every ? r : q, part[r]);
}

static void expand_all(mz_step *s, int32_t first, int32_t end) {
    for (int way = 0; s->every_used && way < 2; way++) {
        for (int32_t g = first; g < end; g += s->ep)
            expand_every(s, g, s->every[way], way == 1);
        for (int32_t r = first; r < end; r++)
            s->every[way][r] = 0;
    }
    s->every_used = false;
}

static int by_ends(const void *a, const void *b) {
    const mz_message *x = a, *y = b;
    if (x->src != y->src)
        return x->src < y->src ? -1 : 1;
    return x->dst < y->dst ? -1 : x->dst > y->dst;
}

/* Sums of bytes do not depend on the order in which messages were added. */
static int by_ends_and_bytes(const void *a, const void *b) {
    const mz_message *x = a, *y = b;
    const int ends = by_ends(a, b);
    return ends != 0 ? ends : (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

/* Sorted, messages between the same two ranks joined into one. */
static void merge_messages(mz_step *s) {
    size_t kept = 0;
    if (s->sendings == 0)
        return;
    mz_sort_in_place(s->sending, s->sendings, sizeof *s->sending, by_ends_and_bytes);
    for (size_t i = 1; i < s->sendings; i++) {
        if (by_ends(&s->sending[kept], &s->sending[i]) == 0)
            s->sending[kept].bytes += s->sending[i].bytes;
        else
            s->sending[++kept] = s->sending[i];
    }
    s->sendings = kept + 1;
}

/* Ports serve one exchange after another. A transfer that runs beside other work is cut, so that
 * the exchanges of that work get in between, as sharing would let them; flows share anyway. */
static int exchange_pieces(const mz_step *s, const mz_exchange *x, step_join join) {
    enum { PIECES_MOST = 16 };
    const double piece_s = 0.5e-3; /* what others wait at most, by order of size */
    const mz_topology *t = &s->cluster->topology;
    if (!join.beside || s->options.network != MZ_NETWORK_PORT)
        return 1;
    double longest = 0;
    for (int i = 0; i < 4; i++)
        for (int32_t m = 0; m < x->members; m++) {
            const int32_t rank = x->rank[m];
            const double rate = i < 2 ? t->inside_bytes_per_s[rank] : t->outside_bytes_per_s[rank];
            if (s->lane_out[i][m] > longest * rate)
                longest = s->lane_out[i][m] / rate;
        }
    const double pieces = ceil(longest / piece_s);
    return pieces > PIECES_MOST ? PIECES_MOST : pieces > 1 ? (int)pieces : 1;
}

static void run_pieces(mz_step *s, mz_exchange *x, step_join join) {
    const int pieces = exchange_pieces(s, x, join);
    for (int i = 0; pieces > 1 && i < 4; i++)
        for (int32_t m = 0; m < x->members; m++)
            s->lane_out[i][m] /= pieces;
    for (int i = 0; i < pieces; i++) {
        step_exchange(s, x, join);
        join.launched = true;
        x->rounds = 0;
    }
}

int32_t step_run_collected(mz_step *s, int32_t first, int32_t end, double rounds, step_join join) {
    mz_exchange x = {.rank = s->member, .rounds = rounds};
    expand_all(s, first, end);
    for (int32_t r = first; r < end; r++) {
        s->joined[r] = -1;
        if (s->copied[r] > 0)
            step_copy(s, r, s->copied[r], join);
        s->copied[r] = 0;
        if (s->touched[r]) {
            for (int i = 0; i < 4; i++)
                s->lane_out[i][x.members] = s->lane[i][r];
            s->member[x.members++] = r;
        }
        s->touched[r] = false;
        for (int i = 0; i < 4; i++)
            s->lane[i][r] = 0;
    }
    x.send_inside = s->lane_out[0];
    x.recv_inside = s->lane_out[1];
    x.send_outside = s->lane_out[2];
    x.recv_outside = s->lane_out[3];
    if (s->options.network == MZ_NETWORK_FLOW) {
        merge_messages(s);
        x.message = s->sending;
        x.messages = (int64_t)s->sendings;
    }
    if (x.members > 0)
        run_pieces(s, &x, join);
    s->sendings = 0;
    return x.members;
}

/* How many of the `members` ranks from `first` on share the first one's domain, if every domain in
 * the ring has as many and they are consecutive; 0 otherwise. */
static int32_t ring_block(const mz_step *s, int32_t first, int32_t stride, int32_t members) {
    const int32_t *domain = s->cluster->topology.domain;
    int32_t block = 1;
    while (block < members && domain[first + block * stride] == domain[first])
        block++;
    if (members % block != 0)
        return 0;
    for (int32_t i = 0; i < members; i++) {
        const int32_t head = i - i % block;
        if (domain[first + i * stride] != domain[first + head * stride])
            return 0;
        if (i == head && i > 0 && domain[first + i * stride] == domain[first + (i - 1) * stride])
            return 0;
    }
    return block;
}

int32_t step_ring(mz_step *s, int32_t first, int32_t stride, int32_t members, double bytes,
                  double rounds, step_join join) {
    if (members < 2 || bytes <= 0)
        return 0;
    const int32_t block = ring_block(s, first, stride, members);
    const bool rails = block > 1 && block < members;
    for (int32_t i = 0; i < members; i++) {
        const int32_t rank = first + i * stride;
        if (!rails) {
            step_collect(s, rank, first + (i + 1) % members * stride, bytes);
            continue;
        }
        /* One ring per rank of the domain, each leaving the domain at another rank. */
        const int32_t head = i - i % block, place = (i + 1) % block;
        step_collect(s, rank, first + (head + place) * stride, bytes * (block - 1) / block);
        step_collect(s, rank, first + (head + block + place) % members * stride, bytes / block);
    }
    return step_run_collected(s, first, first + (members - 1) * stride + 1, rounds, join);
}

/* Ports serve one exchange after another, so a ring that is cut into groups of its rounds lets
 * others in between, as sharing would; flows share anyway. */
int32_t step_ring_beside(mz_step *s, int32_t first, int32_t stride, int32_t members, double bytes,
                         double rounds, step_join join) {
    enum { PARTS = 4 };
    const int parts = s->options.network == MZ_NETWORK_PORT ? PARTS : 1;
    int32_t joined = 0;
    for (int i = 0; i < parts; i++) {
        joined = step_ring(s, first, stride, members, bytes / parts, rounds / parts, join);
        join.launched = true;
    }
    return joined;
}
