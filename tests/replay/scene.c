#include "tests/replay/scene.h"

#include "replay/data.h"
#include "tests/harness.h"

#include <math.h>

scene_options scene_usual(const char *policy, mz_dtype type) {
    return (scene_options){.policy = policy,
                           .ranks = 4,
                           .experts = 8,
                           .k = 2,
                           .hidden = 32,
                           .intermediate = 24,
                           .tokens = 40,
                           .type = type,
                           .one_expert = -1,
                           .idle_rank = -1,
                           .lone_rank = -1,
                           .weights = true,
                           .norms = true};
}

static void make_tokens(scene *s, mz_rng *rng) {
    const scene_options *o = &s->o;
    s->token_begin = calloc((size_t)o->ranks + 1, sizeof *s->token_begin);
    s->pair_begin = calloc((size_t)o->ranks + 1, sizeof *s->pair_begin);
    s->token_pairs = calloc((size_t)(o->ranks * o->tokens) + 1, sizeof *s->token_pairs);
    for (int32_t r = 0; r < o->ranks; r++) {
        int64_t tokens = (int64_t)mz_rng_below(rng, (uint64_t)o->tokens + 1);
        if (r == o->idle_rank || (o->lone_rank >= 0 && r != o->lone_rank))
            tokens = 0;
        int64_t pairs = 0;
        for (int64_t t = 0; t < tokens; t++) {
            const int64_t n = o->k > 0 ? o->k : (int64_t)mz_rng_below(rng, 4);
            s->token_pairs[s->token_begin[r] + t] = (uint16_t)n;
            pairs += n;
        }
        s->token_begin[r + 1] = s->token_begin[r] + tokens;
        s->pair_begin[r + 1] = s->pair_begin[r] + pairs;
    }
}

/* Skewed choices; experts of a token differ. */
static void make_pairs(scene *s, int32_t l, mz_rng *rng) {
    const scene_options *o = &s->o;
    const int64_t pairs = s->pair_begin[o->ranks], tokens = s->token_begin[o->ranks];
    s->expert[l] = calloc((size_t)pairs + 1, sizeof *s->expert[l]);
    s->gate[l] = calloc((size_t)pairs + 1, sizeof *s->gate[l]);
    s->x2[l] = calloc((size_t)tokens + 1, sizeof *s->x2[l]);
    s->g2[l] = calloc((size_t)tokens + 1, sizeof *s->g2[l]);
    s->load[l] = load_new(o->ranks, o->experts);
    int64_t p = 0;
    for (int32_t r = 0; r < o->ranks; r++)
        for (int64_t t = s->token_begin[r]; t < s->token_begin[r + 1]; t++) {
            s->x2[l][t] = (float)((0.5 + mz_rng_uniform(rng)) * (double)o->hidden);
            s->g2[l][t] = (float)(mz_rng_uniform(rng) * (double)o->hidden);
            const double u = mz_rng_uniform(rng);
            const int32_t first = (int32_t)(u * u * u * o->experts);
            for (int32_t j = 0; j < s->token_pairs[t]; j++, p++) {
                const int32_t e = o->one_expert >= 0 ? o->one_expert : (first + j) % o->experts;
                s->expert[l][p] = (uint16_t)e;
                s->gate[l][p] = (float)(0.05 + mz_rng_uniform(rng));
                s->load[l]->count[(int64_t)r * o->experts + e]++;
            }
        }
    mz_load_sum(s->load[l]);
}

static void plan_layer(scene *s, int32_t l) {
    const scene_options *o = &s->o;
    rig *r = &s->policy[l];
    rig_prepare(r, o->ranks, o->experts, o->domain_size);
    r->env.hidden = o->hidden;
    r->env.intermediate = o->intermediate;
    r->env.expert_parameters = 3 * o->hidden * o->intermediate;
    r->env.weight_bytes = 2 * r->env.expert_parameters;
    r->env.expert_state_bytes = 12 * r->env.expert_parameters; /* of AdamW with master weights */
    r->env.token_bytes = 2 * o->hidden;
    if (rig_start(r, o->policy) != MZ_OK)
        fail_msg("%s: %s", o->policy, r->err.msg);
    r->layer = l;
    mz_replay_call *c = &s->at[l].call;
    *c = (mz_replay_call){.step = 3, .layer = l, .load = *s->load[l]};
    c->pairs = (mz_pairs){.sources = o->ranks,
                          .top_k = o->k,
                          .tokens = s->token_begin[o->ranks],
                          .pairs = s->pair_begin[o->ranks],
                          .token_begin = s->token_begin,
                          .pair_begin = s->pair_begin,
                          .token_pairs = o->k > 0 ? NULL : s->token_pairs,
                          .expert = s->expert[l],
                          .weight = o->weights ? s->gate[l] : NULL,
                          .input_norm2 = o->norms ? s->x2[l] : NULL,
                          .grad_norm2 = o->norms ? s->g2[l] : NULL};
    rig_call(r, s->load[l], NULL, NULL, &c->pairs);
    s->at[l].plan = r->plan;
}

static void make_room(scene *s, int32_t l) {
    const scene_options *o = &s->o;
    scene_call *at = &s->at[l];
    const size_t rows = (size_t)(s->token_begin[o->ranks] * o->hidden) + 1;
    const size_t pairs = (size_t)s->pair_begin[o->ranks] + 1;
    at->y = calloc(rows, sizeof(double));
    at->dx = calloc(rows, sizeof(double));
    at->y_got = calloc(rows, sizeof(double));
    at->dx_got = calloc(rows, sizeof(double));
    at->out = calloc(pairs * (size_t)o->hidden, sizeof(double));
    at->dweight = calloc(pairs, sizeof(double));
    at->dweight_got = calloc(pairs, sizeof(double));
    at->score = calloc(pairs, sizeof(double));
    at->computed = calloc(pairs, 1);
    at->kept = calloc(pairs, 1);
    at->gradient =
        calloc((size_t)o->experts * 3 * (size_t)(o->hidden * o->intermediate), sizeof(double));
}

static void make_weights(scene *s) {
    const scene_options *o = &s->o;
    const int64_t up = 2 * o->hidden * o->intermediate, all = up / 2 * 3;
    s->weight = calloc((size_t)(SCENE_LAYERS * o->experts), sizeof *s->weight);
    float *value = calloc((size_t)all, sizeof *value);
    for (int32_t i = 0; i < SCENE_LAYERS * o->experts; i++) {
        s->weight[i] = calloc((size_t)all, sizeof **s->weight);
        mz_data_weights(&s->job, i / o->experts, i % o->experts, MZ_DATA_UP, value);
        mz_data_weights(&s->job, i / o->experts, i % o->experts, MZ_DATA_DOWN, value + up);
        for (int64_t j = 0; j < all; j++)
            s->weight[i][j] = value[j];
    }
    free(value);
    s->base = calloc((size_t)(MZ_DATA_ROWS * o->hidden), sizeof *s->base);
    mz_data_base(&s->job, s->base);
}

void scene_open(scene *s, const scene_options *o, uint64_t seed) {
    *s = (scene){.o = *o};
    mz_rng rng = mz_rng_make(seed, 0);
    make_tokens(s, &rng);
    int32_t instances = 0;
    for (int32_t l = 0; l < SCENE_LAYERS; l++) {
        make_pairs(s, l, &rng);
        plan_layer(s, l);
        make_room(s, l);
        instances = s->at[l].plan->instance_cap;
    }
    mz_err err;
    if (mz_optimizer_parse("adamw", &s->optimizer, &err) != MZ_OK)
        fail_msg("%s", err.msg);
    s->job = (mz_replay_job){.ranks = o->ranks,
                             .layers = SCENE_LAYERS,
                             .experts = o->experts,
                             .top_k = o->k,
                             .hidden = o->hidden,
                             .intermediate = o->intermediate,
                             .type = o->type,
                             .recompute = o->recompute,
                             .traits = &s->policy[0].traits,
                             .optimizer = &s->optimizer,
                             .instances = instances,
                             .seed = seed};
    make_weights(s);
}

void scene_close(scene *s) {
    for (int32_t l = 0; l < SCENE_LAYERS; l++) {
        scene_call *a = &s->at[l];
        void *arrays[] = {a->y,        a->dx,        a->dweight,     a->out,      a->score,
                          a->y_got,    a->dx_got,    a->dweight_got, a->computed, a->kept,
                          a->gradient, s->expert[l], s->gate[l],     s->x2[l],    s->g2[l]};
        for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
            free(arrays[i]);
        load_free(s->load[l]);
        rig_close(&s->policy[l]);
    }
    for (int32_t i = 0; i < SCENE_LAYERS * s->o.experts; i++)
        free(s->weight[i]);
    free(s->weight);
    free(s->base);
    free(s->token_begin);
    free(s->pair_begin);
    free(s->token_pairs);
}

/* ---- machine ------------------------------------------------------------------------------------
 */

void machine_open(machine *m, const scene *s, int threads) {
    *m = (machine){0};
    const mz_kernels_options options = {
        .backend = SCENE_BACKEND, .threads = threads, .streams = threads};
    char why[256];
    if (mz_kernels_open(&options, &m->kernels, why, sizeof why) != MZ_K_OK)
        fail_msg("%s", why);
    const mz_transport_options local = {.name = "local", .ranks = s->o.ranks, .timeout_s = 30};
    assert_ok(mz_transport_open(&local, &m->transport, &m->err), &m->err);
    assert_ok(mz_transport_attach(m->transport, m->kernels, &m->err), &m->err);
    assert_ok(mz_heap_create(m->kernels, 0, s->o.ranks, &m->heap, &m->err), &m->err);
}

void machine_engine(machine *m, const scene *s) {
    assert_ok(mz_engine_create(&s->job, m->kernels, m->transport, m->heap, &m->engine, &m->err),
              &m->err);
}

void machine_close(machine *m) {
    mz_engine_free(&m->engine);
    mz_heap_free(&m->heap);
    mz_transport_close(&m->transport);
    mz_kernels_close(&m->kernels);
}

/* ---- running ------------------------------------------------------------------------------------
 */

static void read_rows(mz_kernels *k, const scene *s, const void *memory, int64_t n, double *out) {
    const size_t size = s->o.type == MZ_BF16 ? 2 : 4;
    void *raw = calloc((size_t)n + 1, size);
    mz_kernels_copy(k, 0, MZ_COPY_OUT, raw, memory, (size_t)n * size);
    mz_kernels_sync(k, 0);
    for (int64_t i = 0; i < n; i++) {
        float value = 0;
        if (size == 2) {
            const uint32_t bits = (uint32_t)((uint16_t *)raw)[i] << 16;
            memcpy(&value, &bits, sizeof value);
        } else {
            value = ((float *)raw)[i];
        }
        out[i] = value;
    }
    free(raw);
}

mz_code scene_watch(void *self, const mz_engine_seen *seen, mz_err *err) {
    const scene_watcher *w = self;
    scene *s = w->s;
    scene_call *at = &s->at[seen->call->layer];
    const int64_t first = s->token_begin[seen->rank] * s->o.hidden;
    const int64_t begin = s->pair_begin[seen->rank];
    const int64_t pairs = s->pair_begin[seen->rank + 1] - begin;
    assert_ptr_equal(seen->plan, at->plan);
    assert_int_equal(seen->tokens, s->token_begin[seen->rank + 1] - s->token_begin[seen->rank]);
    const bool forward = seen->tokens > 0 ? seen->y != NULL : !seen->dweight;
    assert_true(seen->tokens == 0 || !seen->y != !seen->dx);
    read_rows(w->kernels, s, forward ? seen->y : seen->dx, seen->tokens * s->o.hidden,
              (forward ? at->y_got : at->dx_got) + first);
    uint8_t *keep = (forward ? at->computed : at->kept) + begin;
    for (int64_t p = 0; p < pairs; p++) {
        keep[p] = seen->keep ? seen->keep[p] : 1;
        if (!forward)
            at->dweight_got[begin + p] = seen->dweight[p];
    }
    return MZ_OK;
}

mz_code scene_run(scene *s, mz_engine *e, mz_err *err) {
    mz_code code = mz_engine_begin_step(e, 0, err);
    for (int32_t l = 0; code == MZ_OK && l < SCENE_LAYERS; l++)
        code = mz_engine_forward(e, &s->at[l].call, s->at[l].plan, err);
    for (int32_t l = SCENE_LAYERS - 1; code == MZ_OK && l >= 0; l--)
        code = mz_engine_backward(e, &s->at[l].call, s->at[l].plan, true, err);
    return code;
}

/* ---- reference ----------------------------------------------------------------------------------
 */

int32_t scene_expert(const scene *s, int32_t layer, int64_t pair) {
    return s->expert[layer][pair];
}

/* x or g of a token: a row of the base times a factor, both rounded as stored. */
static void row_of(const scene *s, int32_t l, mz_data_kind kind, int32_t rank, int64_t t,
                   double *out) {
    const mz_data_row row = mz_data_of(&s->job, &s->at[l].call, kind, rank, t);
    for (int64_t j = 0; j < s->o.hidden; j++)
        out[j] = mz_data_round(s->o.type, s->base[row.base * s->o.hidden + j] * row.scale);
}

typedef struct pair_work {
    double *u, *v, *h, *dh, *du, *dv; /* [I] */
} pair_work;

/* h and the expert's output of one row. */
static void expert_forward(const scene *s, const double *w, const double *x, pair_work *k,
                           double *out) {
    const int64_t H = s->o.hidden, I = s->o.intermediate;
    const double *down = w + 2 * I * H;
    for (int64_t i = 0; i < I; i++) {
        k->u[i] = k->v[i] = 0;
        for (int64_t j = 0; j < H; j++) {
            k->u[i] += w[i * H + j] * x[j];
            k->v[i] += w[(I + i) * H + j] * x[j];
        }
        k->h[i] = k->u[i] / (1 + exp(-k->u[i])) * k->v[i];
    }
    for (int64_t j = 0; j < H; j++) {
        out[j] = 0;
        for (int64_t i = 0; i < I; i++)
            out[j] += down[j * I + i] * k->h[i];
    }
}

static void expert_backward(const scene *s, const double *w, const double *x, const double *dy,
                            pair_work *k, double *gradient, double *dx) {
    const int64_t H = s->o.hidden, I = s->o.intermediate;
    const double *down = w + 2 * I * H;
    for (int64_t i = 0; i < I; i++) {
        k->dh[i] = 0;
        for (int64_t j = 0; j < H; j++) {
            k->dh[i] += down[j * I + i] * dy[j];
            gradient[2 * I * H + j * I + i] += dy[j] * k->h[i];
        }
        const double sigma = 1 / (1 + exp(-k->u[i]));
        k->du[i] = k->dh[i] * k->v[i] * sigma * (1 + k->u[i] * (1 - sigma));
        k->dv[i] = k->dh[i] * k->u[i] * sigma;
        for (int64_t j = 0; j < H; j++) {
            gradient[i * H + j] += k->du[i] * x[j];
            gradient[(I + i) * H + j] += k->dv[i] * x[j];
            dx[j] += w[i * H + j] * k->du[i] + w[(I + i) * H + j] * k->dv[i];
        }
    }
}

static double norm2(const double *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    return sum;
}

static double score_of(int kind, double w, double g2, double x2, double h2) {
    switch (kind) {
    case MZ_SCORE_DOWN:
        return w * w * g2 * h2;
    case MZ_SCORE_UP:
        return w * w * g2 * x2;
    case MZ_SCORE_W:
        return w * w;
    case MZ_SCORE_WH:
        return w * w * h2;
    case MZ_SCORE_G:
        return g2;
    case MZ_SCORE_SAMPLE:
        return sqrt(w * w * g2 * h2);
    default:
        return h2;
    }
}

/* What a pair of a sample draws, uniform in (0, 1]. */
static double draw_of(const scene *s, int32_t l, int64_t p) {
    const mz_replay_call *call = &s->at[l].call;
    const uint64_t seed = mz_rng_stream(s->job.seed, (uint64_t)call->step,
                                        (uint64_t)call->micro_batch, (uint64_t)call->layer);
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t at[4] = {(uint32_t)p, 0, 0x70616972u, 0};
    uint32_t word[4];
    mz_philox(at, key, word);
    return ((word[0] >> 8) + 1.0) / 16777216;
}

/* One over the chance that a kept pair of a sample had, given the best pair that was left out. */
static double sample_scale(const scene *s, int32_t l, int32_t rank, int64_t p) {
    const scene_call *at = &s->at[l];
    double left = 0;
    if (s->job.traits->score_kind != MZ_SCORE_SAMPLE || !at->plan->has_backward)
        return 1;
    for (int64_t q = s->pair_begin[rank]; q < s->pair_begin[rank + 1]; q++)
        if (s->expert[l][q] == s->expert[l][p] && at->computed[q] && !at->kept[q])
            left = fmax(left, at->score[q]);
    return fmax(1, left / (at->score[p] * draw_of(s, l, p)));
}

static void token_scores(scene *s, int32_t l, int32_t rank, int64_t t, int64_t pair, pair_work *k) {
    const int64_t H = s->o.hidden, I = s->o.intermediate;
    const int kind = s->job.traits->score_kind;
    scene_call *at = &s->at[l];
    double *x = calloc((size_t)(3 * H), sizeof *x), *g = x + H, *out = g + H;
    row_of(s, l, MZ_DATA_INPUT, rank, t, x);
    row_of(s, l, MZ_DATA_GRADIENT, rank, t, g);
    for (int64_t p = pair; p < pair + s->token_pairs[s->token_begin[rank] + t]; p++) {
        const double gate = mz_data_weight(&s->job, &at->call, p);
        if (!at->computed[p])
            continue;
        expert_forward(s, s->weight[l * s->o.experts + s->expert[l][p]], x, k, out);
        at->score[p] = score_of(kind, gate, norm2(g, H), norm2(x, H), norm2(k->h, I));
        if (kind == MZ_SCORE_SAMPLE)
            at->score[p] /= draw_of(s, l, p);
    }
    free(x);
}

static void token_reference(scene *s, int32_t l, int32_t rank, int64_t t, int64_t pair,
                            int32_t instance, pair_work *k) {
    const int64_t H = s->o.hidden, I = s->o.intermediate, row = s->token_begin[rank] + t;
    scene_call *at = &s->at[l];
    double *x = calloc((size_t)(3 * H), sizeof *x), *g = x + H, *dy = g + H;
    row_of(s, l, MZ_DATA_INPUT, rank, t, x);
    row_of(s, l, MZ_DATA_GRADIENT, rank, t, g);
    for (int64_t p = pair; p < pair + s->token_pairs[row]; p++) {
        const int32_t e = s->expert[l][p];
        const double *w = s->weight[l * s->o.experts + e];
        const double gate = mz_data_weight(&s->job, &at->call, p);
        if (!at->computed[p] || (instance >= 0 && scene_instance(s, l, rank, p) != instance))
            continue;
        double *out = at->out + p * H;
        expert_forward(s, w, x, k, out);
        for (int64_t j = 0; j < H; j++)
            at->y[row * H + j] += gate * out[j];
        if (!at->kept[p])
            continue;
        const double scale = sample_scale(s, l, rank, p);
        for (int64_t j = 0; j < H; j++) {
            dy[j] = scale * gate * g[j];
            at->dweight[p] += scale * g[j] * out[j];
        }
        expert_backward(s, w, x, dy, k, at->gradient + 3 * H * I * e, at->dx + row * H);
    }
    free(x);
}

void scene_reference(scene *s, int32_t l) {
    scene_reference_of(s, l, -1);
}

void scene_reference_of(scene *s, int32_t l, int32_t instance) {
    const int64_t I = s->o.intermediate;
    scene_call *at = &s->at[l];
    const size_t rows = sizeof(double) * (size_t)(at->call.pairs.tokens * s->o.hidden);
    memset(at->y, 0, rows);
    memset(at->dx, 0, rows);
    memset(at->dweight, 0, sizeof(double) * (size_t)at->call.pairs.pairs);
    double *room = calloc((size_t)(6 * I), sizeof *room);
    pair_work k = {room, room + I, room + 2 * I, room + 3 * I, room + 4 * I, room + 5 * I};
    for (int pass = 0; pass < 2; pass++) /* scores first: a sample's scales look at all of them */
        for (int32_t r = 0; r < s->o.ranks; r++) {
            int64_t pair = s->pair_begin[r];
            for (int64_t t = 0; t < s->token_begin[r + 1] - s->token_begin[r]; t++) {
                if (pass == 0)
                    token_scores(s, l, r, t, pair, &k);
                else
                    token_reference(s, l, r, t, pair, instance, &k);
                pair += s->token_pairs[s->token_begin[r] + t];
            }
        }
    free(room);
}

int32_t scene_instance(const scene *s, int32_t l, int32_t rank, int64_t pair) {
    const mz_plan *plan = s->at[l].plan;
    const int32_t e = s->expert[l][pair];
    int64_t index = 0, all = 0;
    for (int64_t p = s->pair_begin[rank]; p < s->pair_begin[rank + 1]; p++) {
        index += p < pair && s->expert[l][p] == e && s->at[l].computed[p];
        all += s->expert[l][p] == e;
    }
    int32_t hosts = 0;
    for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++)
        for (int64_t k = plan->entry_begin[i]; k < plan->entry_begin[i + 1]; k++)
            hosts += plan->entry_source[k] == rank;
    if (s->job.traits->strided_pairs && hosts > 1) {
        const mz_stride stride = mz_stride_of(all, e);
        index = mz_stride_place(&stride, index);
    }
    for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++)
        for (int64_t k = plan->entry_begin[i]; k < plan->entry_begin[i + 1]; k++) {
            if (plan->entry_source[k] != rank)
                continue;
            if (index < plan->entry_pairs[k])
                return i;
            index -= plan->entry_pairs[k];
        }
    return -1;
}
