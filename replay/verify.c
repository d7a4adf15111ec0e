#include "replay/verify.h"

#include "common/base/arena.h"
#include "common/base/rng.h"
#include "kernels/arithmetic.h"
#include "kernels/kernels.h"
#include "replay/data.h"
#include "replay/kernel_code.h"
#include "replay/verify_update.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    LAYER_STREAM = 0x6c617965,
    TOKEN_STREAM = 0x746f6b65,
    VALUE_STREAM = 0x76616c75,
    EXPERT_STREAM = 0x65787065,
    SELECTION_STREAM = 0x73656c65
};
/* Of the pairs of one (source, expert), those that a quota kept and those that it left out: scores
 * that are computed again at most, of the fewer and of the more. */
enum { FEWER_SCORES = 1024, MORE_SCORES = 96 };

/* Pairs of one micro-batch, [R][most] with most the pairs of the fullest rank: what multiplied
 * their gradient, the gate weight or what a drawn pair counts for; LEFT_OUT: they have none. */
#define LEFT_OUT (-1.0f)
typedef struct kept_pairs {
    float *weight;
    int64_t most, room;
    bool seen;
} kept_pairs;

struct mz_verify {
    mz_replay_job job;
    mz_verify_options options;
    mz_engine *engine;
    mz_transport *transport;
    mz_experts *experts;
    double tolerance;
    int64_t ordinal;
    int32_t layer, micro_batches;
    int32_t updated; /* the expert whose update is looked at */
    bool *several;   /* [E] several ranks had rows of it in the layer in this step */
    verify_update update;
    float *base;        /* [MZ_DATA_ROWS][H] */
    float *weight;      /* [E][2I*H + H*I] of the layer as the step began */
    float *gradient;    /* [2I*H + H*I] */
    double *x, *g, *dx; /* [H] */
    double *u, *v, *h, *dh, *sum, *square;
    void *row;        /* [H] in the job's type, from context memory */
    kept_pairs *kept; /* [micro_batches] */
    int32_t kept_room;
    int64_t *count; /* [E] kept pairs of the rank at hand */
    double *norm2;  /* [R] */
    mz_verified figures;
    mz_arena arena;
};

mz_verify_options mz_verify_defaults(void) {
    return (mz_verify_options){.tokens = 3, .gradients = 2, .values = 4};
}

mz_verified mz_verify_figures(const mz_verify *v) {
    return v->figures;
}

static int64_t expert_values(const mz_verify *v) {
    return 3 * v->job.hidden * v->job.intermediate;
}

static mz_code watch(void *self, const mz_engine_seen *seen, mz_err *err);

mz_code mz_verify_create(const mz_replay_job *job, mz_engine *engine, mz_transport *transport,
                         const mz_verify_options *options, mz_verify **verify, mz_err *err) {
    const int64_t H = job->hidden, I = job->intermediate;
    *verify = NULL;
    mz_verify *v = mz_calloc(1, sizeof *v);
    if (!v)
        return mz_fail_nomem(err, "the verification");
    *v = (mz_verify){.job = *job,
                     .options = *options,
                     .engine = engine,
                     .transport = transport,
                     .experts = mz_engine_experts(engine),
                     .tolerance = job->type == MZ_BF16 ? 1.0 / 32 : 1.0 / 16384,
                     .layer = -1};
    v->base = MZ_NEW(&v->arena, float, MZ_DATA_ROWS *H);
    v->weight = MZ_NEW(&v->arena, float, job->experts *expert_values(v));
    v->gradient = MZ_NEW(&v->arena, float, expert_values(v));
    double **const rows[] = {&v->x, &v->g, &v->dx, &v->sum, &v->square};
    double **const inner[] = {&v->u, &v->v, &v->h, &v->dh};
    bool all = v->base && v->weight && v->gradient;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        all = (*rows[i] = MZ_NEW(&v->arena, double, H)) && all;
    for (size_t i = 0; i < sizeof inner / sizeof inner[0]; i++)
        all = (*inner[i] = MZ_NEW(&v->arena, double, I)) && all;
    v->row = MZ_NEW(&v->arena, float, H);
    v->count = MZ_NEW(&v->arena, int64_t, job->experts);
    v->several = MZ_NEW(&v->arena, bool, job->experts);
    v->norm2 = MZ_NEW(&v->arena, double, job->ranks);
    if (!all || !v->row || !v->count || !v->several || !v->norm2) {
        mz_verify_free(&v);
        return mz_fail_nomem(err, "the verification's weights of one layer");
    }
    if (verify_update_create(&v->job, &v->arena, &v->update, err) != MZ_OK) {
        mz_verify_free(&v);
        return err->code;
    }
    mz_data_base(job, v->base);
    mz_engine_set_watch(engine, watch, v);
    *verify = v;
    return MZ_OK;
}

void mz_verify_free(mz_verify **verify) {
    mz_verify *v = *verify;
    if (!v)
        return;
    for (int32_t m = 0; m < v->kept_room; m++)
        free(v->kept[m].weight);
    free(v->kept);
    mz_arena_free(&v->arena);
    free(v);
    *verify = NULL;
}

/* ---- the reference ------------------------------------------------------------------------------
 */

static double stored(const mz_verify *v, double value) {
    return mz_data_round(v->job.type, (float)value);
}

static void make_row(const mz_verify *v, const mz_replay_call *call, mz_data_kind kind,
                     int32_t rank, int64_t token, double *row) {
    const mz_data_row of = mz_data_of(&v->job, call, kind, rank, token);
    const float *base = v->base + of.base * v->job.hidden;
    for (int64_t j = 0; j < v->job.hidden; j++)
        row[j] = mz_data_round(v->job.type, of.scale * base[j]);
}

static const float *up_of(const mz_verify *v, int32_t expert) {
    return v->weight + expert * expert_values(v);
}

static const float *down_of(const mz_verify *v, int32_t expert) {
    return up_of(v, expert) + 2 * v->job.hidden * v->job.intermediate;
}

/* Several sums at a time, which do not wait for each other. */
static double dot(const float *w, const double *x, int64_t n) {
    enum { SUMS = 8 };
    double sum[SUMS] = {0}, all = 0;
    int64_t j = 0;
    for (; j + SUMS <= n; j += SUMS)
        for (int k = 0; k < SUMS; k++)
            sum[k] += (double)w[j + k] * x[j + k];
    for (; j < n; j++)
        all += (double)w[j] * x[j];
    for (int k = 0; k < SUMS; k++)
        all += sum[k];
    return all;
}

/* gate, up and activation of unit i for row x, as stored. */
static void unit_forward(const mz_verify *v, int32_t expert, int64_t i, const double *x, double *u,
                         double *up, double *h) {
    const int64_t H = v->job.hidden;
    const float *w = up_of(v, expert);
    *u = stored(v, dot(w + i * H, x, H));
    *up = stored(v, dot(w + (v->job.intermediate + i) * H, x, H));
    *h = stored(v, *u / (1 + exp(-*u)) * *up);
}

/* Gradients of gate and up of unit i from that of its activation, as stored. */
static void unit_backward(const mz_verify *v, double u, double up, double dh, double *du,
                          double *dup) {
    const double s = 1 / (1 + exp(-u));
    *du = stored(v, dh * up * s * (1 + u * (1 - s)));
    *dup = stored(v, dh * u * s);
}

/* dh of unit i: column i of down times the row's gradient. */
static double unit_gradient(const mz_verify *v, int32_t expert, int64_t i, const double *g) {
    const int64_t H = v->job.hidden, I = v->job.intermediate;
    const float *w = down_of(v, expert) + i;
    double sum = 0;
    for (int64_t j = 0; j < H; j++)
        sum += (double)w[j * I] * g[j];
    return stored(v, sum);
}

static void all_units_forward(mz_verify *v, int32_t expert, const double *x) {
    for (int64_t i = 0; i < v->job.intermediate; i++)
        unit_forward(v, expert, i, x, &v->u[i], &v->v[i], &v->h[i]);
}

/* ---- comparing ----------------------------------------------------------------------------------
 */

/* Error over what is allowed. Not a number counts as infinite. */
static double excess(mz_verify *v, double value, double wanted, double scale) {
    const double ratio = fabs(value - wanted) / (v->tolerance * (fabs(wanted) + scale) + 1e-30);
    const double error = isnan(ratio) ? INFINITY : ratio;
    v->figures.largest = error > v->figures.largest ? error : v->figures.largest;
    v->figures.values++;
    return error;
}

static mz_code wrong(const mz_verify *v, const mz_replay_call *call, int32_t rank, const char *what,
                     int64_t a, int64_t b, double value, double wanted, double error, mz_err *err) {
    return mz_fail(err, MZ_ECHECK,
                   "verification failed in step %lld, micro-batch %d, layer %d, rank %d: %s [%lld]"
                   "[%lld] is %.6g, the reference says %.6g (%.3g times the error allowed)",
                   (long long)call->step, call->micro_batch, v->layer, rank, what, (long long)a,
                   (long long)b, value, wanted, error);
}

/* Row `token` of context memory [tokens][H] against v->sum, whose scale per value is the root of
 * v->square. */
static mz_code compare_row(mz_verify *v, const mz_engine_seen *seen, const void *rows,
                           int64_t token, const char *what, mz_err *err) {
    const int64_t H = v->job.hidden;
    const bool narrow = v->job.type == MZ_BF16;
    const size_t bytes = (size_t)H * (narrow ? 2 : 4);
    mz_kernels *k = v->transport->kernels;
    mz_kstatus status = mz_kernels_copy(k, 0, MZ_COPY_OUT, v->row,
                                        (const char *)rows + token * (int64_t)bytes, bytes);
    if (status == MZ_K_OK)
        status = mz_kernels_sync(k, 0);
    if (mz_kernel_code(k, status, err) != MZ_OK)
        return mz_err_prefix(err, "verification");
    double mean = 0;
    for (int64_t j = 0; j < H; j++)
        mean += v->square[j] / (double)H;
    for (int64_t j = 0; j < H; j++) {
        const double value =
            narrow ? mz_from_bf16(((const uint16_t *)v->row)[j]) : ((const float *)v->row)[j];
        const double error = excess(v, value, v->sum[j], sqrt(mean));
        if (error > 1)
            return wrong(v, seen->call, seen->rank, what, token, j, value, v->sum[j], error, err);
    }
    return MZ_OK;
}

/* ---- tokens -------------------------------------------------------------------------------------
 */

typedef struct token_pairs {
    int64_t first, count; /* in call->pairs */
} token_pairs;

static int64_t pairs_of_token(const mz_pairs *p, int32_t rank, int64_t token) {
    return p->top_k > 0 ? p->top_k : p->token_pairs[p->token_begin[rank] + token];
}

static token_pairs pairs_of(const mz_pairs *p, int32_t rank, int64_t token) {
    int64_t first = p->pair_begin[rank];
    if (p->top_k > 0)
        first += token * p->top_k;
    for (int64_t t = 0; p->top_k <= 0 && t < token; t++)
        first += pairs_of_token(p, rank, t);
    return (token_pairs){first, pairs_of_token(p, rank, token)};
}

static bool has(const mz_engine_seen *seen, const mz_pairs *p, int64_t pair) {
    return !seen->keep || seen->keep[pair - p->pair_begin[seen->rank]];
}

/* What multiplies a kept pair's gradient. */
static float weight_of(const mz_verify *v, const mz_engine_seen *seen, int64_t pair) {
    return seen->drawn ? seen->drawn[pair - seen->call->pairs.pair_begin[seen->rank]]
                       : mz_data_weight(&v->job, seen->call, pair);
}

static mz_code check_forward(mz_verify *v, const mz_engine_seen *seen, int64_t token, mz_err *err) {
    const mz_pairs *p = &seen->call->pairs;
    const token_pairs own = pairs_of(p, seen->rank, token);
    const int64_t H = v->job.hidden, I = v->job.intermediate;
    make_row(v, seen->call, MZ_DATA_INPUT, seen->rank, token, v->x);
    memset(v->sum, 0, sizeof *v->sum * (size_t)H);
    memset(v->square, 0, sizeof *v->square * (size_t)H);
    for (int64_t i = own.first; i < own.first + own.count; i++) {
        const double w = mz_data_weight(&v->job, seen->call, i);
        if (!has(seen, p, i))
            continue;
        all_units_forward(v, p->expert[i], v->x);
        for (int64_t j = 0; j < H; j++) {
            const double out = w * stored(v, dot(down_of(v, p->expert[i]) + j * I, v->h, I));
            v->sum[j] += out;
            v->square[j] += out * out;
        }
    }
    return compare_row(v, seen, seen->y, token, "y", err);
}

/* Adds one pair's dx to v->sum; *gate: the gradient of its gate weight. */
static void add_pair_backward(mz_verify *v, int32_t expert, double w, double *gate,
                              double *gate_scale) {
    const int64_t H = v->job.hidden, I = v->job.intermediate;
    const float *up = up_of(v, expert);
    double norm_h = 0, norm_dh = 0;
    *gate = 0;
    memset(v->dx, 0, sizeof *v->dx * (size_t)H);
    for (int64_t i = 0; i < I; i++) {
        double du, dup;
        unit_forward(v, expert, i, v->x, &v->u[i], &v->v[i], &v->h[i]);
        v->dh[i] = unit_gradient(v, expert, i, v->g);
        unit_backward(v, v->u[i], v->v[i], v->dh[i], &du, &dup);
        *gate += v->dh[i] * v->h[i];
        norm_h += v->h[i] * v->h[i];
        norm_dh += v->dh[i] * v->dh[i];
        for (int64_t j = 0; j < H; j++)
            v->dx[j] += (double)up[i * H + j] * du + (double)up[(I + i) * H + j] * dup;
    }
    *gate = w > 0 ? *gate / w : 0;
    *gate_scale = w > 0 ? sqrt(norm_h * norm_dh / (double)I) / w : 0;
    for (int64_t j = 0; j < H; j++) {
        const double out = stored(v, v->dx[j]);
        v->sum[j] += out;
        v->square[j] += out * out;
    }
}

static mz_code check_backward(mz_verify *v, const mz_engine_seen *seen, int64_t token,
                              mz_err *err) {
    const mz_pairs *p = &seen->call->pairs;
    const token_pairs own = pairs_of(p, seen->rank, token);
    const int64_t H = v->job.hidden;
    make_row(v, seen->call, MZ_DATA_INPUT, seen->rank, token, v->x);
    memset(v->sum, 0, sizeof *v->sum * (size_t)H);
    memset(v->square, 0, sizeof *v->square * (size_t)H);
    for (int64_t i = own.first; i < own.first + own.count; i++) {
        const float w = mz_data_weight(&v->job, seen->call, i);
        double gate, scale;
        if (!has(seen, p, i))
            continue;
        make_row(v, seen->call, MZ_DATA_GRADIENT, seen->rank, token, v->g);
        const float by = weight_of(v, seen, i);
        for (int64_t j = 0; j < H; j++)
            v->g[j] = mz_data_round(v->job.type, by * (float)v->g[j]);
        add_pair_backward(v, p->expert[i], w, &gate, &scale);
        if (!seen->dweight)
            continue;
        const double value = seen->dweight[i - p->pair_begin[seen->rank]];
        const double error = excess(v, value, gate, scale);
        if (error > 1)
            return wrong(v, seen->call, seen->rank, "gradient of the gate weight", token,
                         i - own.first, value, gate, error, err);
    }
    return compare_row(v, seen, seen->dx, token, "dx", err);
}

/* ---- kept pairs ---------------------------------------------------------------------------------
 */

/* What a pair draws, uniform in (0, 1]: the first word of Philox under the call's seed at the
 * pair's number in the call and the letters "pair" (kernels.h promises no more than that it is
 * one). */
static double draw_of(const mz_verify *v, const mz_engine_seen *seen, int64_t pair) {
    const mz_replay_call *call = seen->call;
    const uint64_t seed = mz_rng_stream(v->job.seed, (uint64_t)call->step,
                                        (uint64_t)call->micro_batch, (uint64_t)call->layer);
    const uint64_t number = (uint64_t)(pair - call->pairs.pair_begin[0]);
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t at[4] = {(uint32_t)number, (uint32_t)(number >> 32), 0x70616972u, 0};
    uint32_t word[4];
    mz_philox(at, key, word);
    return ((double)(word[0] >> 8) + 1) * 0x1p-24;
}

static double score_of(mz_verify *v, const mz_engine_seen *seen, int64_t token, int64_t pair) {
    const mz_score kind = mz_data_score(&v->job);
    const mz_pairs *p = &seen->call->pairs;
    const double w = mz_data_weight(&v->job, seen->call, pair);
    double x2 = 0, g2 = 0, h2 = 0;
    make_row(v, seen->call, MZ_DATA_INPUT, seen->rank, token, v->x);
    make_row(v, seen->call, MZ_DATA_GRADIENT, seen->rank, token, v->g);
    for (int64_t j = 0; j < v->job.hidden; j++) {
        x2 += v->x[j] * v->x[j];
        g2 += v->g[j] * v->g[j];
    }
    const bool hidden = kind == MZ_SCORED_DOWN || kind == MZ_SCORED_WH || kind == MZ_SCORED_H ||
                        kind == MZ_SCORED_SAMPLE;
    if (hidden)
        all_units_forward(v, p->expert[pair], v->x);
    for (int64_t i = 0; hidden && i < v->job.intermediate; i++)
        h2 += v->h[i] * v->h[i];
    const double all[] = {[MZ_SCORED_DOWN] = w * w * g2 * h2,
                          [MZ_SCORED_UP] = w * w * g2 * x2,
                          [MZ_SCORED_W] = w * w,
                          [MZ_SCORED_WH] = w * w * h2,
                          [MZ_SCORED_G] = g2,
                          [MZ_SCORED_H] = h2,
                          [MZ_SCORED_SAMPLE] = sqrt(w * w * g2 * h2) / draw_of(v, seen, pair)};
    return all[kind];
}

/* v->count: kept pairs of the rank by expert. They must be as many as the plan says. */
static mz_code check_counts(mz_verify *v, const mz_engine_seen *seen, mz_err *err) {
    const mz_pairs *p = &seen->call->pairs;
    const int32_t E = v->job.experts;
    const int64_t cell = (int64_t)seen->rank * E;
    memset(v->count, 0, sizeof *v->count * (size_t)E);
    for (int64_t i = p->pair_begin[seen->rank]; i < p->pair_begin[seen->rank + 1]; i++)
        v->count[p->expert[i]] += has(seen, p, i);
    for (int32_t e = 0; e < E; e++)
        if (v->count[e] != seen->plan->kept[cell + e])
            return wrong(v, seen->call, seen->rank, "kept pairs of expert", e,
                         seen->call->load.count[cell + e], (double)v->count[e],
                         (double)seen->plan->kept[cell + e], INFINITY, err);
    return MZ_OK;
}

/* One of the experts of which the rank's pairs are kept in part; -1: none. Where pairs were dropped
 * in forward there was less to choose from. */
static int32_t draw_expert(const mz_verify *v, const mz_engine_seen *seen, mz_rng *rng) {
    const int32_t E = v->job.experts;
    const int64_t cell = (int64_t)seen->rank * E;
    const int64_t *all = seen->call->load.count + cell;
    const int64_t *dropped = seen->plan->has_drops ? seen->plan->dropped + cell : NULL;
    int32_t drawn = -1;
    for (int32_t e = 0, n = 0; e < E; e++)
        if (v->count[e] > 0 && v->count[e] < all[e] && (!dropped || dropped[e] == 0) &&
            mz_rng_below(rng, (uint64_t)++n) == 0)
            drawn = e;
    return drawn;
}

/* Pairs of one (source, expert) that were kept, or left out. */
typedef struct score_side {
    int64_t pairs, wanted; /* not walked over yet; how many of them are scored */
    double score;          /* the lowest kept, the highest left out */
    int64_t token;         /* of equal ones the last kept, the first left out */
    int64_t pair;          /* its */
} score_side;

static void score_pair(mz_verify *v, const mz_engine_seen *seen, int64_t token, int64_t pair,
                       mz_rng *rng, score_side *side, bool kept) {
    const bool drawn = (int64_t)mz_rng_below(rng, (uint64_t)side->pairs) < side->wanted;
    side->pairs--;
    if (!drawn)
        return;
    side->wanted--;
    const double score = score_of(v, seen, token, pair);
    if (side->token >= 0 && (kept ? score > side->score : score <= side->score))
        return;
    side->score = score;
    side->token = token;
    side->pair = pair;
}

/* A pair that was left out has no higher score than one that was kept; of equal ones the first
 * stays. Equal in the engine, too, are gate weights alone. */
static mz_code compare_sides(mz_verify *v, const mz_engine_seen *seen, int32_t expert,
                             const score_side *kept, const score_side *left, mz_err *err) {
    const double more = left->score - kept->score;
    const double error = more / (v->tolerance * kept->score + 1e-30);
    const bool swapped =
        more == 0 && left->token < kept->token && mz_data_score(&v->job) == MZ_SCORED_W;
    v->figures.largest = error > v->figures.largest ? error : v->figures.largest;
    v->figures.selections++;
    if (error <= 1 && !swapped)
        return MZ_OK;
    return mz_fail(err, MZ_ECHECK,
                   "verification failed in step %lld, micro-batch %d, layer %d, rank %d: of expert "
                   "%d, token %lld with a score of %.6g is left out, and token %lld with %.6g is "
                   "kept (%.3g times the difference allowed%s)",
                   (long long)seen->call->step, seen->call->micro_batch, v->layer, seen->rank,
                   expert, (long long)left->token, left->score, (long long)kept->token, kept->score,
                   error, swapped ? "; of equal scores the first stays" : "");
}

/* The lowest kept pair of a sample counts for max(1, t / sqrt(s)), t the largest score left out;
 * where not all of those were looked at (`all`: they were), for no less than the largest seen says.
 * t is no higher than the pair's own score, whatever was looked at. */
static mz_code compare_drawn(mz_verify *v, const mz_engine_seen *seen, const score_side *kept,
                             const score_side *left, bool all, mz_err *err) {
    const double w = mz_data_weight(&v->job, seen->call, kept->pair);
    const double draw = draw_of(v, seen, kept->pair), root = kept->score * draw;
    const double lowest = w * (root >= left->score ? 1 : left->score / root), most = w / draw;
    const double value = weight_of(v, seen, kept->pair);
    const double wanted = all || value < lowest ? lowest : fmin(value, most);
    const double error = excess(v, value, wanted, 0);
    return error <= 1 ? MZ_OK
                      : wrong(v, seen->call, seen->rank, "weight of a drawn pair", kept->token,
                              kept->pair, value, wanted, error, err);
}

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static mz_code check_scores(mz_verify *v, const mz_engine_seen *seen, int32_t expert, mz_rng *rng,
                            mz_err *err) {
    const mz_pairs *p = &seen->call->pairs;
    const int64_t all = seen->call->load.count[(int64_t)seen->rank * v->job.experts + expert];
    const int64_t kept = v->count[expert], left = all - kept;
    const bool fewer = left < kept;
    score_side sides[] = {
        {left, least(left, fewer ? FEWER_SCORES : MORE_SCORES), 0, -1, 0},
        {kept, least(kept, fewer ? MORE_SCORES : FEWER_SCORES), 0, -1, 0},
    };
    const bool whole = sides[0].wanted == left;
    int64_t pair = p->pair_begin[seen->rank];
    for (int64_t t = 0; t < seen->tokens; t++)
        for (int64_t i = pairs_of_token(p, seen->rank, t); i > 0; i--, pair++)
            if (p->expert[pair] == expert) {
                const bool stays = has(seen, p, pair);
                score_pair(v, seen, t, pair, rng, &sides[stays], stays);
            }
    const mz_code code = compare_sides(v, seen, expert, &sides[1], &sides[0], err);
    return code == MZ_OK && seen->drawn ? compare_drawn(v, seen, &sides[1], &sides[0], whole, err)
                                        : code;
}

static mz_code check_selection(mz_verify *v, const mz_engine_seen *seen, mz_err *err) {
    const mz_score kind = mz_data_score(&v->job);
    mz_rng rng = mz_rng_make(v->job.seed, mz_rng_stream(SELECTION_STREAM, (uint64_t)v->ordinal,
                                                        (uint64_t)seen->call->micro_batch,
                                                        (uint64_t)seen->rank));
    const mz_code code = check_counts(v, seen, err);
    if (code != MZ_OK || kind == MZ_SCORED_RANDOM)
        return code;
    const int32_t expert = draw_expert(v, seen, &rng);
    return expert < 0 ? MZ_OK : check_scores(v, seen, expert, &rng, err);
}

static void keep_weights(mz_verify *v, const mz_engine_seen *seen) {
    const mz_pairs *p = &seen->call->pairs;
    kept_pairs *kept = &v->kept[seen->call->micro_batch];
    const int64_t n = p->pair_begin[seen->rank + 1] - p->pair_begin[seen->rank];
    const int64_t first = p->pair_begin[seen->rank];
    float *weight = kept->weight + (int64_t)seen->rank * kept->most;
    for (int64_t i = 0; i < n; i++)
        weight[i] = has(seen, p, first + i) ? weight_of(v, seen, first + i) : LEFT_OUT;
}

static mz_code make_weights(mz_verify *v, const mz_replay_call *call, mz_err *err) {
    kept_pairs *kept = &v->kept[call->micro_batch];
    if (kept->seen)
        return MZ_OK;
    kept->most = 1;
    for (int32_t r = 0; r < v->job.ranks; r++) {
        const int64_t n = call->pairs.pair_begin[r + 1] - call->pairs.pair_begin[r];
        kept->most = n > kept->most ? n : kept->most;
    }
    const int64_t room = kept->most * v->job.ranks;
    if (room > kept->room) {
        free(kept->weight);
        kept->weight = mz_calloc((size_t)room, sizeof *kept->weight);
        kept->room = kept->weight ? room : 0;
    }
    kept->seen = kept->weight != NULL;
    return kept->seen ? MZ_OK : mz_fail_nomem(err, "kept pairs");
}

/* Experts whose gradient several ranks add to. */
static void note_replicated(mz_verify *v, const mz_plan *plan) {
    const int64_t *rows = plan->has_backward ? plan->backward : plan->forward;
    for (int32_t e = 0; e < plan->experts; e++)
        for (int32_t i = plan->begin[e], first = -1; i < plan->begin[e + 1]; i++) {
            if (rows[i] == 0)
                continue;
            first = first < 0 ? plan->rank[i] : first;
            v->several[e] = v->several[e] || plan->rank[i] != first;
        }
}

static mz_code watch(void *self, const mz_engine_seen *seen, mz_err *err) {
    mz_verify *v = self;
    if (seen->call->layer != v->layer)
        return MZ_OK;
    note_replicated(v, seen->plan);
    mz_code code = MZ_OK;
    if (seen->dx) {
        code = make_weights(v, seen->call, err);
        if (code == MZ_OK)
            keep_weights(v, seen);
        if (code == MZ_OK && seen->plan->has_backward)
            code = check_selection(v, seen, err);
    }
    mz_rng rng = mz_rng_make(v->job.seed, mz_rng_stream(TOKEN_STREAM, (uint64_t)v->ordinal,
                                                        (uint64_t)seen->call->micro_batch,
                                                        (uint64_t)seen->rank));
    for (int32_t i = 0; code == MZ_OK && seen->tokens > 0 && i < v->options.tokens; i++) {
        const int64_t token = (int64_t)mz_rng_below(&rng, (uint64_t)seen->tokens);
        code = seen->dx ? check_backward(v, seen, token, err) : check_forward(v, seen, token, err);
        v->figures.tokens++;
    }
    return code;
}

/* ---- weight gradients ---------------------------------------------------------------------------
 */

/* One value of an expert's gradient: of up (row below 2I) or down; sum and sum of squares. */
typedef struct gradient_value {
    bool down;
    int64_t row, col;
    double sum, square;
} gradient_value;

static void add_term(mz_verify *v, int32_t expert, gradient_value *at) {
    const int64_t I = v->job.intermediate;
    const int64_t unit = at->down ? at->col : at->row % I;
    double u, up, h, term;
    unit_forward(v, expert, unit, v->x, &u, &up, &h);
    if (at->down) {
        term = v->g[at->row] * h;
    } else {
        double du, dup;
        unit_backward(v, u, up, unit_gradient(v, expert, unit, v->g), &du, &dup);
        term = (at->row < I ? du : dup) * v->x[at->col];
    }
    at->sum += term;
    at->square += term * term;
}

static void add_rank(mz_verify *v, const mz_replay_call *call, int32_t rank, int32_t expert,
                     gradient_value *value, int32_t values) {
    const mz_pairs *p = &call->pairs;
    const kept_pairs *kept = &v->kept[call->micro_batch];
    int64_t pair = p->pair_begin[rank];
    const int64_t tokens = p->token_begin[rank + 1] - p->token_begin[rank];
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t i = pairs_of_token(p, rank, t); i > 0; i--, pair++) {
            const int64_t own = (int64_t)rank * kept->most + pair - p->pair_begin[rank];
            const float w = kept->weight[own];
            if (p->expert[pair] != expert || w == LEFT_OUT)
                continue;
            make_row(v, call, MZ_DATA_INPUT, rank, t, v->x);
            make_row(v, call, MZ_DATA_GRADIENT, rank, t, v->g);
            for (int64_t j = 0; j < v->job.hidden; j++)
                v->g[j] = mz_data_round(v->job.type, w * (float)v->g[j]);
            for (int32_t n = 0; n < values; n++)
                add_term(v, expert, &value[n]);
        }
    }
}

/* Reading is collective; the process of the expert's owner compares. */
static mz_code check_gradient(mz_verify *v, const mz_replay_call *call, int32_t expert,
                              gradient_value *value, int32_t values, mz_err *err) {
    const int64_t H = v->job.hidden, I = v->job.intermediate;
    const int32_t owner = mz_experts_owner(v->experts, v->layer, expert);
    const bool own = mz_transport_holds(v->transport, owner);
    for (int32_t m = 0; own && m < v->micro_batches; m++)
        for (int32_t r = 0; r < v->job.ranks; r++)
            add_rank(v, call + (int64_t)m * v->job.layers + v->layer, r, expert, value, values);
    mz_code code = mz_experts_read(v->experts, v->layer, expert, true, v->gradient, err);
    for (int32_t n = 0; own && code == MZ_OK && n < values; n++) {
        const gradient_value *at = &value[n];
        const int64_t place = at->down ? 2 * I * H + at->row * I + at->col : at->row * H + at->col;
        const double got = v->gradient[place];
        const double error = excess(v, got, at->sum, sqrt(at->square));
        if (error > 1)
            return mz_fail(err, MZ_ECHECK,
                           "verification failed in step %lld, layer %d, expert %d: gradient of %s "
                           "[%lld][%lld] is %.6g, the reference says %.6g (%.3g times the error "
                           "allowed)",
                           (long long)call->step, v->layer, expert, at->down ? "down" : "gate/up",
                           (long long)at->row, (long long)at->col, got, at->sum, error);
    }
    return code;
}

/* ---- updates, copies ----------------------------------------------------------------------------
 */

/* Where `place` lies of an expert's values laid end to end. */
static const char *matrix_of(const mz_verify *v, int64_t place, int64_t *row, int64_t *col) {
    const int64_t H = v->job.hidden, I = v->job.intermediate;
    const bool down = place >= 2 * I * H;
    const int64_t at = down ? place - 2 * I * H : place, cols = down ? I : H;
    *row = at / cols;
    *col = at % cols;
    return down ? "down" : "gate/up";
}

/* v->gradient has the expert's. Its owner's process compares. */
static mz_code check_update(mz_verify *v, const mz_replay_call *call, mz_err *err) {
    const int32_t owner = mz_experts_owner(v->experts, v->layer, v->updated);
    verify_difference found;
    int64_t compared = 0, row, col;
    const mz_code code =
        verify_update_end(&v->update, v->experts, v->layer, v->updated, v->gradient, v->ordinal + 1,
                          mz_transport_holds(v->transport, owner), &found, &compared, err);
    v->figures.values += compared;
    v->figures.largest = found.error > v->figures.largest ? found.error : v->figures.largest;
    if (code != MZ_OK || !found.what)
        return code;
    if (found.place < 0)
        return mz_fail(err, MZ_ECHECK,
                       "verification failed in step %lld, layer %d, expert %d on rank %d: after "
                       "the optimizer's step the %s is %.3g standard deviations (%.3g times what "
                       "is allowed)",
                       (long long)call->step, v->layer, v->updated, owner, found.what, found.value,
                       found.error);
    const char *matrix = matrix_of(v, found.place, &row, &col);
    return mz_fail(err, MZ_ECHECK,
                   "verification failed in step %lld, layer %d, expert %d on rank %d: after the "
                   "optimizer's step the %s of %s [%lld][%lld] is %.8g, the reference says %.8g "
                   "(%.3g times the error allowed)",
                   (long long)call->step, v->layer, v->updated, owner, found.what, matrix,
                   (long long)row, (long long)col, found.value, found.wanted, found.error);
}

/* Slots that hold the expert have its owner's weights. v->gradient is used. */
static mz_code check_copies(mz_verify *v, const mz_replay_call *call, int32_t expert, mz_err *err) {
    mz_experts_copy differs;
    int64_t row, col;
    mz_code code = mz_experts_read(v->experts, v->layer, expert, false, v->gradient, err);
    if (code == MZ_OK)
        code = mz_experts_compare(v->experts, v->layer, expert, v->gradient, &differs, err);
    if (code != MZ_OK || differs.rank < 0)
        return code;
    const char *matrix = matrix_of(v, differs.place, &row, &col);
    return mz_fail(err, MZ_ECHECK,
                   "verification failed in step %lld, layer %d, expert %d on rank %d: its copy's "
                   "weight of %s [%lld][%lld] is %.8g after the step, its owner's on rank %d %.8g",
                   (long long)call->step, v->layer, expert, differs.rank, matrix, (long long)row,
                   (long long)col, differs.value, mz_experts_owner(v->experts, v->layer, expert),
                   v->gradient[differs.place]);
}

/* What every process was told of the others' part of the gradient's norm is what they have. */
static mz_code check_norms(mz_verify *v, const mz_replay_call *call, mz_err *err) {
    const double *all, *mine;
    mz_experts_norms(v->experts, &all, &mine);
    const mz_code code = mz_transport_gather(v->transport, mine, sizeof *mine, v->norm2, err);
    for (int32_t r = 0; code == MZ_OK && r < v->job.ranks; r++)
        if (all[r] != v->norm2[r])
            return mz_fail(err, MZ_ECHECK,
                           "verification failed in step %lld: the squared norm of rank %d's "
                           "gradients is %.6g there and arrived as %.6g (%.3g times as much)",
                           (long long)call->step, r, v->norm2[r], all[r], all[r] / v->norm2[r]);
    return code;
}

/* One of the experts of which several ranks had rows, where there are some. */
static int32_t draw_replicated(const mz_verify *v, mz_rng *rng) {
    int32_t drawn = -1;
    for (int32_t e = 0, n = 0; e < v->job.experts; e++)
        if (v->several[e] && mz_rng_below(rng, (uint64_t)++n) == 0)
            drawn = e;
    return drawn >= 0 ? drawn : (int32_t)mz_rng_below(rng, (uint64_t)v->job.experts);
}

/* The expert that was drawn as the step began, and such as have replicas. */
static mz_code check_experts(mz_verify *v, const mz_replay_call *call, mz_err *err) {
    const uint64_t H = (uint64_t)v->job.hidden, I = (uint64_t)v->job.intermediate;
    const int32_t values = 2 * v->options.values;
    mz_rng rng = mz_rng_make(v->job.seed, mz_rng_stream(VALUE_STREAM, (uint64_t)v->ordinal, 0, 0));
    gradient_value *value = malloc(sizeof *value * (size_t)(values > 0 ? values : 1));
    if (!value)
        return mz_fail_nomem(err, "the verification");
    mz_code code = MZ_OK;
    for (int32_t i = 0; code == MZ_OK && i < v->options.gradients; i++) {
        const int32_t expert = i == 0 ? v->updated : draw_replicated(v, &rng);
        for (int32_t n = 0; n < values; n++) {
            const bool down = n % 2 == 0;
            value[n] = (gradient_value){.down = down,
                                        .row = (int64_t)mz_rng_below(&rng, down ? H : 2 * I),
                                        .col = (int64_t)mz_rng_below(&rng, down ? I : H)};
        }
        code = check_gradient(v, call, expert, value, values, err);
        if (code == MZ_OK && i == 0 && verify_update_looks(&v->update))
            code = check_update(v, call, err);
        if (code == MZ_OK)
            code = check_copies(v, call, expert, err);
    }
    free(value);
    return code;
}

/* ---- steps --------------------------------------------------------------------------------------
 */

static mz_code room_for(mz_verify *v, int32_t micro_batches, mz_err *err) {
    if (micro_batches <= v->kept_room)
        return MZ_OK;
    kept_pairs *more = realloc(v->kept, sizeof *more * (size_t)micro_batches);
    if (!more)
        return mz_fail_nomem(err, "kept pairs");
    memset(more + v->kept_room, 0, sizeof *more * (size_t)(micro_batches - v->kept_room));
    v->kept = more;
    v->kept_room = micro_batches;
    return MZ_OK;
}

mz_code mz_verify_begin_step(mz_verify *v, int64_t ordinal, int32_t micro_batches, mz_err *err) {
    mz_code code = room_for(v, micro_batches, err);
    mz_rng rng = mz_rng_make(v->job.seed, mz_rng_stream(LAYER_STREAM, (uint64_t)ordinal, 0, 0));
    v->ordinal = ordinal;
    v->micro_batches = micro_batches;
    v->layer = (int32_t)mz_rng_below(&rng, (uint64_t)v->job.layers);
    for (int32_t m = 0; code == MZ_OK && m < micro_batches; m++)
        v->kept[m].seen = false;
    for (int32_t e = 0; code == MZ_OK && e < v->job.experts; e++)
        code =
            mz_experts_read(v->experts, v->layer, e, false, v->weight + e * expert_values(v), err);
    rng = mz_rng_make(v->job.seed, mz_rng_stream(EXPERT_STREAM, (uint64_t)ordinal, 0, 0));
    v->updated = (int32_t)mz_rng_below(&rng, (uint64_t)v->job.experts);
    memset(v->several, 0, sizeof *v->several * (size_t)v->job.experts);
    if (code == MZ_OK && verify_update_looks(&v->update))
        code = verify_update_begin(&v->update, v->experts, v->layer, v->updated,
                                   up_of(v, v->updated), err);
    return code;
}

int32_t mz_verify_layer(const mz_verify *v) {
    return v->layer;
}

/* Every process gets the weights of all ranks. */
static mz_code gather_weights(mz_verify *v, const mz_replay_call *call, mz_err *err) {
    mz_code code = MZ_OK;
    for (int32_t m = 0; code == MZ_OK && m < v->micro_batches; m++) {
        code = make_weights(v, call + (int64_t)m * v->job.layers + v->layer, err);
        kept_pairs *kept = &v->kept[m];
        const size_t local = (size_t)(v->transport->end - v->transport->first);
        const size_t bytes = sizeof(float) * (size_t)kept->most;
        float *mine = code == MZ_OK ? malloc(local * bytes) : NULL;
        if (code == MZ_OK && !mine)
            code = mz_fail_nomem(err, "kept pairs");
        if (code != MZ_OK)
            break;
        memcpy(mine, kept->weight + v->transport->first * kept->most, local * bytes);
        code = mz_transport_gather(v->transport, mine, bytes, kept->weight, err);
        free(mine);
    }
    return code;
}

mz_code mz_verify_end_step(mz_verify *v, const mz_replay_call *call, mz_err *err) {
    mz_code code = v->transport->processes > 1 ? gather_weights(v, call, err) : MZ_OK;
    if (code == MZ_OK)
        code = check_norms(v, call, err);
    return code == MZ_OK ? check_experts(v, call, err) : code;
}
