/* Scope layers: what of one call a process copies within itself, what its products take, what is
 * summed where an expert has several instances on one rank. Lanes and rows are those of the
 * replay's layouts. */
#include "sim/step/inside.h"

#include <math.h>
#include <string.h>

/* ---- lanes and products of a call --------------------------------------------------------------
 */

typedef void (*lanes_adder)(layers_lanes *lanes, int64_t rows);

/* Rows of one (source, instance): from `source` to the instance's rank, or the other way. */
static void add_lane(layers_lanes *lanes, int64_t rows) {
    lanes->lanes += rows > 0;
    lanes->rows += rows;
}

/* The same from a rank of another process. */
static void add_far(layers_lanes *lanes, int64_t rows) {
    lanes->far += rows > 0;
}

/* How `rows` between the two are added. */
static lanes_adder note_rows(const mz_step *s, const step_at *at, int32_t source, int32_t rank,
                             int64_t rows) {
    const int32_t *device = s->cluster->topology.device + at->first;
    if (device[source] == device[rank])
        return add_lane;
    if (rows > 0)
        s->between[(int64_t)device[source] * layers_devices(s) + device[rank]] = true;
    return add_far;
}

static void clear_between(const mz_step *s) {
    const size_t devices = (size_t)layers_devices(s);
    memset(s->between, 0, sizeof *s->between * devices * devices);
}

/* Between whom rows go, at the first ranks of both: `in` where they come to instances, `out` where
 * they come back to sources. */
static void count_senders(const mz_step *s, layers_work *work, bool backward) {
    const int32_t devices = layers_devices(s), each = s->cluster->ranks_per_device;
    for (int32_t from = 0; from < devices; from++)
        for (int32_t to = 0; to < devices; to++) {
            const bool any = s->between[(int64_t)from * devices + to];
            layers_work *source = &work[from * each], *there = &work[to * each];
            (backward ? &there->back_in : &there->in)->senders += any;
            (backward ? &source->back_out : &source->out)->senders += any;
        }
}

static void add_forward(const mz_step *s, const step_at *at, int32_t source, int32_t rank,
                        int64_t rows, layers_work *work) {
    const lanes_adder add = note_rows(s, at, source, rank, rows);
    add(&work[rank].in, rows);
    add(&work[source].out, rows);
}

/* Padded buffers go from every source to every expert, used or not. */
static void forward_lanes(mz_step *s, const mz_plan *plan, const step_at *at, layers_work *work) {
    clear_between(s);
    for (int32_t i = 0; i < plan->begin[plan->experts]; i++) {
        for (int32_t r = 0; s->traits.capacity_padded && r < s->ep; r++)
            add_forward(s, at, r, plan->rank[i], s->capacity[r], work);
        for (int64_t k = plan->entry_begin[i];
             !s->traits.capacity_padded && k < plan->entry_begin[i + 1]; k++)
            add_forward(s, at, plan->entry_source[k], plan->rank[i], plan->entry_pairs[k], work);
    }
    count_senders(s, work, false);
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
        const lanes_adder add = note_rows(s, at, source, rank, rows);
        add(&work[rank].back_in, stay);
        add(&work[source].back_out, stay);
        add(&work[rank].back_in, rows - stay);
        add(&work[source].back_out, rows - stay);
        add(&work[rank].again_in, rows - stay);
    }
    for (int64_t k = plan->entry_begin[i]; k < plan->entry_begin[i + 1]; k++)
        s->source_rows[plan->entry_source[k]] = 0;
}

static void backward_lanes(mz_step *s, const mz_plan *plan, const step_at *at, layers_work *work) {
    clear_between(s);
    for (int32_t e = 0; e < plan->experts; e++) {
        layers_expect(s, plan, e);
        for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++)
            backward_instance(s, plan, at, i, work);
    }
    count_senders(s, work, true);
}

/* ---- products ----------------------------------------------------------------------------------
 */

/* One product of a rank's groups, as many rows of each as s->expert_rows says; n, k: sides of its
 * weights. */
typedef struct rank_product {
    mz_phase phase;
    mz_work work;
    int32_t rank, layer, groups;
    int64_t n, k;
} rank_product;

static void tell_products(const mz_step *s, const rank_product *p) {
    for (int32_t g = 0; s->charged && g < p->groups; g++)
        if (s->expert_rows[g] > 0 || p->work == MZ_WORK_WGRAD)
            layers_tell(s, &(mz_step_charge){p->phase, p->layer, p->rank, p->work,
                                             s->expert_rows[g], p->n, p->k});
}

static double product(const mz_step *s, const rank_product *p) {
    const mz_device *d = &s->cluster->device;
    int64_t rows = 0;
    for (int32_t g = 0; g < p->groups; g++)
        rows += s->expert_rows[g];
    tell_products(s, p);
    if (p->work == MZ_WORK_UP)
        return mz_cost_expert_up(d, s->cost, s->expert_rows, p->groups, p->n / 2, p->k,
                                 s->expert_turn);
    const mz_gemm_kind kind = p->work == MZ_WORK_WGRAD   ? MZ_GEMM_WGRAD
                              : p->work == MZ_WORK_DGRAD ? MZ_GEMM_DGRAD
                                                         : MZ_GEMM_FORWARD;
    if (rows == 0 && p->work != MZ_WORK_WGRAD)
        return 0;
    return mz_cost_grouped_gemm(d, s->cost, kind, s->expert_rows, p->groups, p->n, p->k,
                                s->expert_turn);
}

/* Leaves the rows of the groups that are replicas, or of those that are not; how many. */
static int32_t keep_groups(mz_step *s, const mz_plan *plan, int32_t rank, bool replicas) {
    const int32_t *mine = s->by_rank + s->rank_begin[rank];
    const int32_t groups = s->rank_begin[rank + 1] - s->rank_begin[rank];
    int32_t n = 0, e = 0;
    for (int32_t g = 0; g < groups; g++) { /* by_rank ascends, so experts do */
        while (plan->begin[e + 1] <= mine[g])
            e++;
        if ((mine[g] > plan->begin[e]) == replicas)
            s->expert_rows[n++] = s->expert_rows[g];
    }
    return n;
}

/* Backward rows of the rank's groups into s->expert_rows. */
static int32_t backward_rows(mz_step *s, const mz_plan *plan, const step_call *call, int32_t rank,
                             const step_rank_work *rows) {
    return call->lossy ? step_product_rows(s, plan->backward, rank, rows->back_rows)
                       : step_forward_rows(s, plan, rank, rows->rows);
}

/* Gradients of one weight matrix. Where replicas have theirs in fp32 a second call writes these, 2
 * bytes more a value, read and written. */
static double weight_gradients(mz_step *s, const mz_plan *plan, const step_call *call,
                               rank_product p, const step_rank_work *rows, layers_work *work) {
    p.work = MZ_WORK_WGRAD;
    p.groups = backward_rows(s, plan, call, p.rank, rows);
    work->back_launches++;
    if (!layers_wide(s))
        return product(s, &p);
    p.groups = keep_groups(s, plan, p.rank, false);
    double seconds = product(s, &p);
    backward_rows(s, plan, call, p.rank, rows);
    p.groups = keep_groups(s, plan, p.rank, true);
    if (p.groups == 0)
        return seconds;
    work->back_launches++;
    const double more = 4.0 * (double)p.groups * (double)p.n * (double)p.k;
    return seconds + product(s, &p) + mz_cost_memory(&s->cluster->device, more);
}

static void time_backward(mz_step *s, const mz_plan *plan, const step_at *at, int32_t rank,
                          const step_rank_work *rows, layers_work *work) {
    const int64_t h = s->model->hidden, inter = s->model->expert_intermediate;
    rank_product down = {.phase = MZ_PHASE_BACKWARD_EXPERTS,
                         .work = MZ_WORK_DGRAD,
                         .rank = rank,
                         .layer = at->layer,
                         .n = h,
                         .k = inter};
    rank_product up = down;
    up.n = 2 * inter;
    up.k = h;
    work->back_launches = 2;
    work->back_s = weight_gradients(s, plan, at->call, down, rows, work) +
                   weight_gradients(s, plan, at->call, up, rows, work);
    down.groups = up.groups = backward_rows(s, plan, at->call, rank, rows);
    work->back_s += product(s, &down) + product(s, &up);
}

static void time_products(mz_step *s, const mz_plan *plan, const step_at *at, int32_t rank,
                          const step_rank_work *rows, layers_work *work) {
    const int64_t h = s->model->hidden, inter = s->model->expert_intermediate;
    rank_product up = {.phase = MZ_PHASE_EXPERTS,
                       .work = MZ_WORK_UP,
                       .rank = rank,
                       .layer = at->layer,
                       .groups = step_forward_rows(s, plan, rank, rows->rows),
                       .n = 2 * inter,
                       .k = h};
    rank_product down = up;
    down.work = MZ_WORK_FORWARD;
    down.n = h;
    down.k = inter;
    work->up_s = product(s, &up);
    work->down_s = product(s, &down);
    time_backward(s, plan, at, rank, rows, work);
    if (rows->again_rows == 0)
        return;
    up.phase = MZ_PHASE_BACKWARD_EXPERTS;
    up.groups = step_product_rows(s, s->instance_again, rank, rows->again_rows);
    for (int32_t g = 0; g < up.groups; g++)
        work->again_groups += s->expert_rows[g] > 0;
    work->again_s = product(s, &up);
}

/* ---- a call ------------------------------------------------------------------------------------
 */

/* Sums over instances of one expert on one rank, which its own copies go into. */
static mz_code keep_further(mz_step *s, const mz_plan *plan, const step_at *at, mz_err *err) {
    at->call->further = (int64_t)s->furthers;
    for (int32_t e = 0; e < plan->experts; e++)
        for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++) {
            const int32_t rank = plan->rank[i];
            int32_t before = 0, after = 0;
            for (int32_t k = plan->begin[e]; k < plan->begin[e + 1]; k++)
                *(k < i ? &before : &after) += k != i && plan->rank[k] == rank;
            if (before > 0 || after == 0)
                continue;
            if (!mz_grow((void **)&s->further, &s->further_cap, s->furthers + 1,
                         sizeof *s->further))
                return mz_fail_nomem(err, "sums of a layer call");
            s->further[s->furthers++] = (layers_further){at->first + rank, after};
        }
    at->call->furthers = (int64_t)s->furthers - at->call->further;
    return MZ_OK;
}

mz_code layers_condense(mz_step *s, const mz_plan *plan, const step_at *at, mz_err *err) {
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
        work[r].listed = at->work[r].pairs;
        for (int32_t e = 0; plan->has_drops && e < plan->experts; e++)
            work[r].listed -= plan->dropped[(int64_t)r * plan->experts + e];
        time_products(s, plan, at, r, &at->work[r], &work[r]);
    }
    for (int32_t e = 0; e < plan->experts; e++)
        work[plan->rank[plan->begin[e]]].owned++;
    at->call->instances = plan->begin[plan->experts];
    layers_note_places(s, plan, at);
    return keep_further(s, plan, at, err);
}
