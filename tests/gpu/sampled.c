#include "tests/gpu/sampled.h"

#include "tests/kernels/reference.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- probes -------------------------------------------------------------------------------------
 */

bool probe_going(const probe *p) {
    return p->status == MZ_K_OK && !p->wrong;
}

uint64_t probe_bits(probe *p) { /* splitmix64 (Steele, Lea and Flood, 2014) */
    uint64_t z = p->random += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

int64_t probe_below(probe *p, int64_t n) {
    return (int64_t)(probe_bits(p) % (uint64_t)n);
}

void probe_poison(probe *p, void *memory, size_t bytes) {
    mz_kernels *k = p->l->kernels;
    const size_t piece = bytes < (size_t)1 << 20 ? bytes : (size_t)1 << 20;
    void *image = malloc(piece + 1);
    if (!image && p->status == MZ_K_OK)
        p->status = MZ_K_ENOMEM;
    if (image)
        memset(image, 0xff, piece);
    size_t done = piece;
    if (probe_going(p))
        p->status = mz_kernels_copy(k, 0, MZ_COPY_IN, memory, image, piece);
    while (done < bytes && probe_going(p)) { /* as much again as is poison already */
        const size_t more = bytes - done < done ? bytes - done : done;
        p->status = mz_kernels_copy(k, 0, MZ_COPY_INSIDE, (char *)memory + done, memory, more);
        done += more;
    }
    if (probe_going(p))
        p->status = mz_kernels_sync(k, 0);
    free(image);
}

void probe_run(probe *p) {
    cost c = {0, 0};
    if (probe_going(p))
        p->status = p->run(p->l, &c);
    if (p->status == MZ_K_OK)
        p->status = mz_kernels_sync(p->l->kernels, 0);
}

void *probe_room(probe *p, size_t bytes) {
    const bool full = p->copies == (int)(sizeof p->host / sizeof *p->host);
    void *room = probe_going(p) && !full ? calloc(bytes + 8, 1) : NULL;
    if (room)
        p->host[p->copies++] = room;
    else if (p->status == MZ_K_OK)
        p->status = MZ_K_ENOMEM;
    return room;
}

void probe_forget(probe *p, int copies) {
    while (p->copies > copies)
        free(p->host[--p->copies]);
}

void *probe_bytes(probe *p, const void *memory, size_t offset, size_t bytes) {
    mz_kernels *k = p->l->kernels;
    void *copy = probe_room(p, bytes);
    if (copy)
        p->status = mz_kernels_copy(k, 0, MZ_COPY_OUT, copy, (const char *)memory + offset, bytes);
    if (copy && p->status == MZ_K_OK)
        p->status = mz_kernels_sync(k, 0);
    return copy && p->status == MZ_K_OK ? copy : NULL;
}

static double widened(uint16_t x) {
    const uint32_t wide = (uint32_t)x << 16;
    float value;
    memcpy(&value, &wide, 4);
    return (double)value;
}

double *probe_values(probe *p, mz_dtype type, const void *memory, int64_t first, int64_t n) {
    const size_t width = type == MZ_F32 ? 4 : 2;
    const void *raw = probe_bytes(p, memory, width * (size_t)first, width * (size_t)n);
    double *values = raw ? probe_room(p, sizeof *values * (size_t)n) : NULL;
    for (int64_t i = 0; i < n && values; i++)
        values[i] =
            type == MZ_F32 ? (double)((const float *)raw)[i] : widened(((const uint16_t *)raw)[i]);
    return values;
}

int64_t *probe_integers(probe *p, const int64_t *memory, int64_t n) {
    return probe_bytes(p, memory, 0, sizeof *memory * (size_t)n);
}

void probe_near(probe *p, const char *what, int64_t i, int64_t j, double got, double want,
                double bound) {
    p->checked++;
    if (p->wrong || fabs(got - want) <= bound)
        return;
    p->wrong = true;
    snprintf(p->message, sizeof p->message, "%s[%lld][%lld] is %.7g, not %.7g (+- %.2g)", what,
             (long long)i, (long long)j, got, want, bound);
}

void probe_same(probe *p, const char *what, int64_t i, int64_t got, int64_t want) {
    p->checked++;
    if (p->wrong || got == want)
        return;
    p->wrong = true;
    snprintf(p->message, sizeof p->message, "%s[%lld] is %lld, not %lld", what, (long long)i,
             (long long)got, (long long)want);
}

int32_t probe_expert(const probe *p, int64_t row) {
    int32_t e = 0;
    while (row >= p->l->begin_host[e + 1])
        e++;
    return e;
}

int64_t probe_row(probe *p, int sample, int64_t rows) {
    if (sample < 2)
        return sample ? rows - 1 : 0;
    const int64_t any = probe_below(p, rows);
    if (sample % 3 || rows != p->l->pairs)
        return any;
    const int32_t e = probe_expert(p, any);
    return sample % 2 ? p->l->begin_host[e] : p->l->begin_host[e + 1] - 1;
}

/* ---- rows ---------------------------------------------------------------------------------------
 */

/* Values at drawn places of two buffers. */
static void same_values(probe *p, mz_dtype to, const void *got, mz_dtype from, const void *want,
                        int64_t n) {
    for (int i = 0; i < SAMPLES && probe_going(p); i++) {
        const int copies = p->copies;
        const int64_t few = n < 8 ? n : 8,
                      at = i < 2 ? (i ? n - few : 0) : probe_below(p, n - few + 1);
        const double *g = probe_values(p, to, got, at, few);
        const double *w = want ? probe_values(p, from, want, at, few) : probe_room(p, 8 * 8);
        for (int64_t j = 0; j < few && g && w; j++)
            probe_near(p, "value", at + j, 0, g[j], to == MZ_BF16 ? ref_bf16(w[j]) : w[j], 0);
        probe_forget(p, copies);
    }
}

void check_copy(probe *p) {
    const int64_t n = p->l->pairs * p->l->shape.hidden;
    probe_poison(p, p->l->out, 2 * (size_t)n);
    probe_run(p);
    same_values(p, MZ_BF16, p->l->out, MZ_BF16, p->l->packed, n);
}
void check_zero(probe *p) {
    const int64_t n = p->l->pairs * p->l->shape.hidden;
    probe_poison(p, p->l->out, 2 * (size_t)n);
    probe_run(p);
    same_values(p, MZ_BF16, p->l->out, MZ_BF16, NULL, n);
}
void check_widen(probe *p) {
    const int64_t n = p->l->pairs * p->l->shape.intermediate;
    probe_poison(p, p->l->dgate_up, 4 * (size_t)n);
    probe_run(p);
    same_values(p, MZ_F32, p->l->dgate_up, MZ_BF16, p->l->hidden, n);
}
void check_narrow(probe *p) {
    const int64_t n = p->l->pairs * p->l->shape.intermediate;
    probe_poison(p, p->l->dhidden, 2 * (size_t)n);
    probe_run(p);
    same_values(p, MZ_BF16, p->l->dhidden, MZ_F32, p->l->dgate_up, n);
}

/* out[i] = <a row, b row>, in any order of fp32 sums. */
static void dots(probe *p, const void *a, const void *b, int64_t rows, int64_t cols, float *out) {
    probe_poison(p, out, 4 * (size_t)rows);
    probe_run(p);
    for (int i = 0; i < SAMPLES && probe_going(p); i++) {
        const int copies = p->copies;
        const int64_t row = probe_row(p, i, rows);
        const double *x = probe_values(p, MZ_BF16, a, row * cols, cols);
        const double *y = probe_values(p, MZ_BF16, b, row * cols, cols);
        const double *got = probe_values(p, MZ_F32, out, row, 1);
        double size = 0;
        for (int64_t j = 0; j < cols && got; j++)
            size += fabs(x[j] * y[j]);
        if (got)
            probe_near(p, "row", row, 0, *got, ref_dot(x, y, cols), 2e-6 * size);
        probe_forget(p, copies);
    }
}
void check_norms(probe *p) {
    dots(p, p->l->packed, p->l->packed, p->l->pairs, p->l->shape.hidden, p->l->norm);
}
void check_dots(probe *p) {
    dots(p, p->l->packed, p->l->out, p->l->pairs, p->l->shape.hidden, p->l->dot);
}

/* Rows of `to` in expert order are those of the pairs' tokens, weighted or not. */
static void packed_rows(probe *p, const void *x, const float *scale, void *to) {
    const layer *l = p->l;
    const int64_t H = l->shape.hidden;
    probe_poison(p, to, 2 * (size_t)(l->pairs * H));
    probe_run(p);
    for (int i = 0; i < SAMPLES && probe_going(p); i++) {
        const int copies = p->copies;
        const int64_t row = probe_row(p, i, l->pairs);
        const int64_t *pair = probe_bytes(p, l->order, 8 * (size_t)row, 8);
        const double *w = pair && scale ? probe_values(p, MZ_F32, scale, *pair, 1) : NULL;
        const double *want = pair ? probe_values(p, MZ_BF16, x, *pair / l->shape.k * H, H) : NULL;
        const double *got = probe_values(p, MZ_BF16, to, row * H, H);
        for (int64_t j = 0; j < H && got && want; j++)
            probe_near(p, "row", row, j, got[j],
                       w ? ref_bf16((double)(float)(*w * want[j])) : want[j], 0);
        probe_forget(p, copies);
    }
}
void check_packed(probe *p) {
    packed_rows(p, p->l->x, NULL, p->l->packed);
}
void check_scaled(probe *p) {
    packed_rows(p, p->l->dy, p->l->router_weight, p->l->rows_x);
}

void check_unpacked(probe *p) {
    const layer *l = p->l;
    const int64_t H = l->shape.hidden;
    probe_poison(p, l->out, 2 * (size_t)(l->pairs * H));
    probe_run(p);
    for (int i = 0; i < SAMPLES && probe_going(p); i++) {
        const int copies = p->copies;
        const int64_t pair = probe_row(p, i, l->pairs);
        const int64_t *row = probe_bytes(p, l->position, 8 * (size_t)pair, 8);
        const double *want = row ? probe_values(p, MZ_BF16, l->packed, *row * H, H) : NULL;
        const double *got = probe_values(p, MZ_BF16, l->out, pair * H, H);
        for (int64_t j = 0; j < H && got && want; j++)
            probe_near(p, "pair", pair, j, got[j], want[j], 0);
        probe_forget(p, copies);
    }
}

void check_combined(probe *p) {
    const layer *l = p->l;
    const int64_t H = l->shape.hidden, k = l->shape.k;
    probe_poison(p, l->out, 2 * (size_t)(l->shape.tokens * H));
    probe_run(p);
    for (int i = 0; i < SAMPLES && probe_going(p); i++) {
        const int copies = p->copies;
        const int64_t t = probe_row(p, i, l->shape.tokens);
        const int64_t *row = probe_bytes(p, l->position, 8 * (size_t)(t * k), 8 * (size_t)k);
        const double *w = probe_values(p, MZ_F32, l->router_weight, t * k, k);
        const double *got = probe_values(p, MZ_BF16, l->out, t * H, H);
        double *sum = probe_room(p, 8 * (size_t)H), *size = probe_room(p, 8 * (size_t)H);
        for (int64_t j = 0; j < k && probe_going(p); j++) {
            const double *r = probe_values(p, MZ_BF16, l->packed, row[j] * H, H);
            for (int64_t h = 0; h < H && r; h++) {
                sum[h] += w[j] * r[h];
                size[h] += fabs(w[j] * r[h]);
            }
        }
        for (int64_t h = 0; h < H && probe_going(p); h++)
            probe_near(p, "token", t, h, got[h], sum[h], 0x1p-8 * fabs(sum[h]) + 1e-6 * size[h]);
        probe_forget(p, copies);
    }
}

/* h of gate and up, and its norm: `stored` is what h was stored as. */
static void held_hidden(probe *p, int64_t row, const double *gate_up, const double *stored,
                        const float *norm2) {
    const int64_t I = p->l->shape.intermediate;
    double sum = 0;
    const double *got = probe_values(p, MZ_F32, norm2, row, 1);
    for (int64_t j = 0; j < I && got; j++) {
        const double want = ref_silu(gate_up[j]) * gate_up[I + j];
        probe_near(p, "h", row, j, stored[j], want, 0x1p-8 * fabs(want) + 1e-30);
        sum += stored[j] * stored[j];
    }
    if (got)
        probe_near(p, "norm", row, 0, *got, sum, 4e-6 * sum);
}

void check_swiglu_forward(probe *p) {
    const layer *l = p->l;
    const int64_t I = l->shape.intermediate;
    probe_poison(p, l->hidden, 2 * (size_t)(l->pairs * I));
    probe_poison(p, l->norm, 4 * (size_t)l->pairs);
    probe_run(p);
    for (int i = 0; i < SAMPLES && probe_going(p); i++) {
        const int copies = p->copies;
        const int64_t row = probe_row(p, i, l->pairs);
        const double *gate_up = probe_values(p, MZ_BF16, l->gate_up, row * 2 * I, 2 * I);
        const double *h = probe_values(p, MZ_BF16, l->hidden, row * I, I);
        if (gate_up && h)
            held_hidden(p, row, gate_up, h, l->norm);
        probe_forget(p, copies);
    }
}

void check_swiglu_backward(probe *p) {
    const layer *l = p->l;
    const int64_t I = l->shape.intermediate;
    probe_poison(p, l->dgate_up, 4 * (size_t)(l->pairs * I));
    probe_run(p);
    for (int i = 0; i < SAMPLES && probe_going(p); i++) {
        const int copies = p->copies;
        const int64_t row = probe_row(p, i, l->pairs);
        const double *x = probe_values(p, MZ_BF16, l->gate_up, row * 2 * I, 2 * I);
        const double *dh = probe_values(p, MZ_BF16, l->dhidden, row * I, I);
        const double *got = probe_values(p, MZ_BF16, l->dgate_up, row * 2 * I, 2 * I);
        for (int64_t j = 0; j < I && x && dh && got; j++) {
            const double du = dh[j] * x[I + j] * ref_silu_slope(x[j]), dv = dh[j] * ref_silu(x[j]);
            probe_near(p, "gradient of gate", row, j, got[j], du, 0x1p-8 * fabs(du) + 1e-9);
            probe_near(p, "gradient of up", row, j, got[I + j], dv, 0x1p-8 * fabs(dv) + 1e-9);
        }
        probe_forget(p, copies);
    }
}

/* ---- scores and lists ---------------------------------------------------------------------------
 * Lists are held as a whole: a number out of place anywhere is a row of someone else. */

/* w^2 |g|^2 |h|^2 of every pair. */
static const double *down_scores(probe *p) {
    const layer *l = p->l;
    const double *w = probe_values(p, MZ_F32, l->router_weight, 0, l->pairs);
    const double *g = probe_values(p, MZ_F32, l->norm, 0, l->shape.tokens);
    const double *h = probe_values(p, MZ_F32, l->score, 0, l->pairs);
    double *down = probe_room(p, sizeof *down * (size_t)l->pairs);
    for (int64_t i = 0; i < l->pairs && probe_going(p); i++)
        down[i] = w[i] * w[i] * g[i / l->shape.k] * h[i];
    return down;
}

static void held_scores(probe *p, mz_score kind) {
    const mz_score_args args = scores_of(p->l, kind);
    probe_poison(p, args.score, sizeof *args.score * (size_t)args.pairs);
    probe_run(p);
    const double *got = probe_values(p, MZ_F32, args.score, 0, args.pairs);
    const double *down = down_scores(p);
    for (int64_t i = 0; i < args.pairs && probe_going(p); i++) {
        const double want =
            kind == MZ_SCORED_SAMPLE ? sqrt(down[i]) / ref_draw(args.seed, (uint64_t)i) : down[i];
        probe_near(p, "score", i, 0, got[i], want, 1e-6 * want + 1e-37);
    }
}
void check_scores(probe *p) {
    held_scores(p, MZ_SCORED_DOWN);
}
void check_drawn_scores(probe *p) {
    held_scores(p, MZ_SCORED_SAMPLE);
}

void check_grouping(probe *p) {
    const layer *l = p->l;
    const int32_t E = l->shape.experts;
    probe_poison(p, l->begin, 8 * (size_t)(E + 1));
    probe_poison(p, l->order, 8 * (size_t)l->pairs);
    probe_run(p);
    const int32_t *expert = probe_bytes(p, l->expert, 0, 4 * (size_t)l->pairs);
    const int64_t *begin = probe_integers(p, l->begin, E + 1);
    const int64_t *order = probe_integers(p, l->order, l->pairs);
    int64_t *next = probe_room(p, 8 * (size_t)E);
    for (int32_t e = 0; e <= E && probe_going(p); e++)
        probe_same(p, "begin", e, begin[e], l->begin_host[e]);
    for (int32_t e = 0; e < E && probe_going(p); e++)
        next[e] = l->begin_host[e];
    for (int64_t i = 0; i < l->pairs && probe_going(p); i++)
        probe_same(p, "order", next[expert[i]], order[next[expert[i]]], i), next[expert[i]]++;
}

void check_counts(probe *p) {
    const layer *l = p->l;
    probe_poison(p, l->count, 8 * (size_t)l->shape.experts);
    probe_run(p);
    const int64_t *count = probe_integers(p, l->count, l->shape.experts);
    for (int32_t e = 0; e < l->shape.experts && probe_going(p); e++)
        probe_same(p, "count", e, count[e], l->begin_host[e + 1] - l->begin_host[e]);
}

void check_sums(probe *p) {
    const layer *l = p->l;
    probe_poison(p, l->sums, 8 * (size_t)(l->pairs + 1));
    probe_run(p);
    const int64_t *length = probe_integers(p, l->length, l->pairs);
    const int64_t *got = probe_integers(p, l->sums, l->pairs + 1);
    int64_t sum = 0;
    for (int64_t i = 0; i <= l->pairs && probe_going(p); i++) {
        probe_same(p, "sum", i, got[i], sum);
        sum += i < l->pairs ? length[i] : 0;
    }
}

void check_places(probe *p) {
    const layer *l = p->l;
    probe_poison(p, l->position, 8 * (size_t)l->pairs);
    probe_run(p);
    const int64_t *order = probe_integers(p, l->order, l->pairs);
    const int64_t *position = probe_integers(p, l->position, l->pairs);
    for (int64_t i = 0; i < l->pairs && probe_going(p); i++)
        probe_same(p, "position", order[i], position[order[i]], i);
}

void check_arranged(probe *p) {
    const layer *l = p->l;
    const int64_t segments = 2 * (int64_t)l->shape.experts;
    probe_poison(p, l->arranged, 8 * (size_t)l->pairs);
    probe_run(p);
    const int64_t *order = probe_integers(p, l->order, l->pairs);
    const int64_t *got = probe_integers(p, l->arranged, l->pairs);
    const mz_segment *s = probe_bytes(p, l->segment, 0, sizeof *s * (size_t)segments);
    for (int64_t i = 0; i < segments && probe_going(p); i++)
        for (int64_t j = 0; j < s[i].length; j++)
            probe_same(p, "arranged", s[i].to + j, got[s[i].to + j], order[s[i].from + j]);
}

/* Of one expert: as many as the quota says, in their order, none of the others better, equal ones
 * earlier. */
static void held_choice(probe *p, const double *score, const int64_t *order, int64_t n,
                        const int64_t *kept, int64_t quota) {
    double least = INFINITY, most = -1;
    int64_t taken = 0, last_least = -1, first_most = n;
    for (int64_t i = 0; i < n; i++) {
        const double x = score[order[i]];
        const bool is_kept = taken < quota && kept[taken] == order[i];
        if (is_kept && x <= least) {
            least = x;
            last_least = i;
        }
        if (!is_kept && x > most) {
            most = x;
            first_most = i;
        }
        taken += is_kept;
    }
    probe_same(p, "pairs kept in order", 0, taken, quota);
    if (taken == quota && quota > 0 && most >= 0)
        probe_same(p, "best are kept", 0,
                   least > most || (least >= most && last_least < first_most), 1);
}

void poison_selection(probe *p) {
    const layer *l = p->l;
    probe_poison(p, l->kept, sizeof *l->kept * (size_t)l->pairs);
    probe_poison(p, l->kept_begin, sizeof *l->kept_begin * ((size_t)l->shape.experts + 1));
}

void held_selection(probe *p, const float *scores) {
    const layer *l = p->l;
    const int32_t E = l->shape.experts;
    const double *score = probe_values(p, MZ_F32, scores, 0, l->pairs);
    const int64_t *order = probe_integers(p, l->order, l->pairs);
    const int64_t *kept = probe_integers(p, l->kept, l->pairs);
    const int64_t *kept_begin = probe_integers(p, l->kept_begin, E + 1);
    int64_t before = 0;
    for (int32_t e = 0; e < E && probe_going(p); e++) {
        const int64_t first = l->begin_host[e], n = l->begin_host[e + 1] - first, q = (n + 1) / 2;
        probe_same(p, "kept_begin", e, kept_begin[e], before);
        if (probe_going(p))
            held_choice(p, score, order + first, n, kept + before, q);
        before += q;
    }
    if (probe_going(p))
        probe_same(p, "kept_begin", E, kept_begin[E], before);
}

void check_selection(probe *p) {
    poison_selection(p);
    probe_run(p);
    held_selection(p, p->l->score);
}

const uint8_t *chosen_pairs(probe *p) {
    const layer *l = p->l;
    const int64_t *kept = probe_integers(p, l->kept, l->pairs);
    uint8_t *keep = probe_room(p, (size_t)l->pairs);
    int64_t many = 0;
    for (int32_t e = 0; e < l->shape.experts; e++)
        many += (l->begin_host[e + 1] - l->begin_host[e] + 1) / 2;
    for (int64_t i = 0; i < many && probe_going(p); i++)
        keep[kept[i]] = 1;
    return keep;
}

/* By pair. */
typedef struct sample {
    const double *down, *drawn, *weight, *scaled;
    const uint8_t *keep;
} sample;

/* Of one expert: what each of its pairs counts for; nothing is written of those left out. */
static void held_scales(probe *p, const sample *s, const int64_t *order, int64_t n) {
    double threshold = 0;
    for (int64_t i = 0; i < n; i++)
        threshold = s->keep[order[i]] ? threshold : fmax(threshold, s->drawn[order[i]]);
    for (int64_t i = 0; i < n && probe_going(p); i++) {
        const int64_t pair = order[i];
        const double want = s->weight[pair] * fmax(1, threshold / sqrt(s->down[pair]));
        if (s->keep[pair])
            probe_near(p, "scaled", pair, 0, s->scaled[pair], want, 1e-6 * fabs(want));
        else
            probe_same(p, "scaled is left alone", pair, isnan(s->scaled[pair]), 1);
    }
}

/* Scores are drawn anew: what they are made of has been written over since. */
void check_scaled_selection(probe *p) {
    const layer *l = p->l;
    const mz_score_args drawing = scores_of(l, MZ_SCORED_SAMPLE);
    if (probe_going(p))
        p->status = mz_score_pairs(l->kernels, 0, &drawing);
    poison_selection(p);
    probe_poison(p, l->dot, sizeof *l->dot * (size_t)l->pairs);
    probe_run(p);
    held_selection(p, l->drawn);
    const int64_t *order = probe_integers(p, l->order, l->pairs);
    const sample s = {.down = down_scores(p),
                      .drawn = probe_values(p, MZ_F32, l->drawn, 0, l->pairs),
                      .weight = probe_values(p, MZ_F32, l->router_weight, 0, l->pairs),
                      .scaled = probe_values(p, MZ_F32, l->dot, 0, l->pairs),
                      .keep = chosen_pairs(p)};
    for (int32_t e = 0; e < l->shape.experts && probe_going(p); e++)
        held_scales(p, &s, order + l->begin_host[e], l->begin_host[e + 1] - l->begin_host[e]);
}

/* ---- products -----------------------------------------------------------------------------------
 */

/* One value of a product, with the size of what was summed. */
typedef struct sum {
    double value, size;
} sum;
static sum dot_of(const double *a, int64_t a_step, const double *b, int64_t b_step, int64_t n) {
    sum s = {0, 0};
    for (int64_t i = 0; i < n; i++) {
        s.value += a[i * a_step] * b[i * b_step];
        s.size += fabs(a[i * a_step] * b[i * b_step]);
    }
    return s;
}
static void near_sum(probe *p, const char *what, int64_t i, int64_t j, double got, sum want) {
    probe_near(p, what, i, j, got, want.value, 0x1p-8 * fabs(want.value) + 4e-6 * want.size);
}

/* Experts that are looked at: the one with the most rows, the one with the fewest, any others. */
enum { EXPERTS = 4 };
static int32_t drawn_expert(probe *p, int sample) {
    const layer *l = p->l;
    int32_t best = (int32_t)probe_below(p, l->shape.experts);
    for (int32_t e = 0; e < l->shape.experts && sample < 2; e++) {
        const int64_t n = l->begin_host[e + 1] - l->begin_host[e];
        const int64_t of_best = l->begin_host[best + 1] - l->begin_host[best];
        if (sample == 0 ? n > of_best : n < of_best)
            best = e;
    }
    return best;
}

/* Rows of the drawn experts: out [rows][n] = a [rows][k] with a matrix of [n][k], or, through, out
 * [rows][k] = a [rows][n] with it. */
static void product_rows(probe *p, int64_t n, int64_t k, const void *a, const void *weights,
                         void *out, bool through) {
    const layer *l = p->l;
    const int64_t in = through ? n : k, to = through ? k : n;
    probe_poison(p, out, 2 * (size_t)(l->pairs * to));
    probe_run(p);
    for (int s = 0; s < EXPERTS && probe_going(p); s++) {
        const int copies = p->copies;
        const int32_t e = drawn_expert(p, s);
        const int64_t first = l->begin_host[e], rows = l->begin_host[e + 1] - first;
        const double *w = probe_values(p, MZ_BF16, weights, e * n * k, n * k);
        for (int i = 0; i < SAMPLES / EXPERTS && rows > 0 && probe_going(p); i++) {
            const int mark = p->copies;
            const int64_t row = first + (i < 2 ? (i ? rows - 1 : 0) : probe_below(p, rows));
            const double *x = probe_values(p, MZ_BF16, a, row * in, in);
            const double *got = probe_values(p, MZ_BF16, out, row * to, to);
            for (int c = 0; c < COLUMNS && x && got; c++) {
                const int64_t j = c < 2 ? (c ? to - 1 : 0) : probe_below(p, to);
                near_sum(p, "product", row, j, got[j],
                         through ? dot_of(x, 1, w + j, k, n) : dot_of(x, 1, w + j * k, 1, k));
            }
            probe_forget(p, mark);
        }
        probe_forget(p, copies);
    }
}

/* Gradients of the drawn experts' weights [n][k], of all their rows. */
static void product_weights(probe *p, int64_t n, int64_t k, const void *a, const void *c,
                            mz_dtype type, void *out) {
    const layer *l = p->l;
    probe_poison(p, out, (type == MZ_F32 ? 4 : 2) * (size_t)(l->shape.experts * n * k));
    probe_run(p);
    for (int s = 0; s < EXPERTS && probe_going(p); s++) {
        const int copies = p->copies;
        const int32_t e = drawn_expert(p, s);
        const int64_t first = l->begin_host[e], rows = l->begin_host[e + 1] - first;
        const double *x = probe_values(p, MZ_BF16, a, first * n, rows * n);
        const double *y = probe_values(p, MZ_BF16, c, first * k, rows * k);
        for (int i = 0; i < SAMPLES && probe_going(p); i++) {
            const int mark = p->copies;
            const int64_t row = i < 2 ? (i ? n - 1 : 0) : probe_below(p, n);
            const int64_t col = i < 2 ? (i ? k - 1 : 0) : probe_below(p, k);
            const double *got = probe_values(p, type, out, (e * n + row) * k + col, 1);
            if (got)
                near_sum(p, "gradient", e * n + row, col, *got,
                         dot_of(x + row, n, y + col, k, rows));
            probe_forget(p, mark);
        }
        probe_forget(p, copies);
    }
}

void check_up_forward(probe *p) {
    const layer *l = p->l;
    product_rows(p, 2 * l->shape.intermediate, l->shape.hidden, l->packed, l->parameters,
                 l->dgate_up, false);
}
void check_up_dgrad(probe *p) {
    const layer *l = p->l;
    product_rows(p, 2 * l->shape.intermediate, l->shape.hidden, l->gate_up, l->parameters, l->out,
                 true);
}
void check_up_wgrad(probe *p) {
    const layer *l = p->l;
    product_weights(p, 2 * l->shape.intermediate, l->shape.hidden, l->gate_up, l->packed, MZ_BF16,
                    l->gradients);
}
void check_up_wgrad_wide(probe *p) {
    const layer *l = p->l;
    product_weights(p, 2 * l->shape.intermediate, l->shape.hidden, l->gate_up, l->packed, MZ_F32,
                    l->wide_gradients);
}
void check_down_forward(probe *p) {
    const layer *l = p->l;
    product_rows(p, l->shape.hidden, l->shape.intermediate, l->hidden, l->down_parameters, l->out,
                 false);
}
void check_down_dgrad(probe *p) {
    const layer *l = p->l;
    product_rows(p, l->shape.hidden, l->shape.intermediate, l->out, l->down_parameters, l->dhidden,
                 true);
}
void check_down_wgrad(probe *p) {
    const layer *l = p->l;
    product_weights(p, l->shape.hidden, l->shape.intermediate, l->out, l->hidden, MZ_BF16,
                    l->down_gradients);
}

void check_plain(probe *p) {
    const layer *l = p->l;
    const int64_t n = 2 * l->shape.intermediate * l->shape.k, k = l->shape.hidden;
    probe_poison(p, l->dgate_up, 2 * (size_t)(l->shape.tokens * n));
    probe_run(p);
    for (int i = 0; i < SAMPLES && probe_going(p); i++) {
        const int copies = p->copies;
        const int64_t t = probe_row(p, i, l->shape.tokens),
                      j = i < 2 ? i * (n - 1) : probe_below(p, n);
        const double *x = probe_values(p, MZ_BF16, l->x, t * k, k);
        const double *w = probe_values(p, MZ_BF16, l->parameters, j * k, k);
        const double *got = probe_values(p, MZ_BF16, l->dgate_up, t * n + j, 1);
        if (x && w && got)
            near_sum(p, "product", t, j, *got, dot_of(x, 1, w, 1, k));
        probe_forget(p, copies);
    }
}

/* The product of the rows, and what was made of it as it was stored. */
void check_expert_up(probe *p) {
    const layer *l = p->l;
    const int64_t I = l->shape.intermediate;
    probe_poison(p, l->dhidden, 2 * (size_t)(l->pairs * I));
    probe_poison(p, l->norm, 4 * (size_t)l->pairs);
    check_up_forward(p);
    for (int i = 0; i < SAMPLES && probe_going(p); i++) {
        const int copies = p->copies;
        const int64_t row = probe_row(p, i, l->pairs);
        const double *gate_up = probe_values(p, MZ_BF16, l->dgate_up, row * 2 * I, 2 * I);
        const double *h = probe_values(p, MZ_BF16, l->dhidden, row * I, I);
        for (int64_t j = 0; j < I && gate_up && h; j++) { /* h may be of sums not yet rounded */
            const double want = ref_silu(gate_up[j]) * gate_up[I + j];
            probe_near(p, "h", row, j, h[j], want, 0x1p-6 * fabs(want) + 1e-9);
        }
        const double *norm = probe_values(p, MZ_F32, l->norm, row, 1);
        if (h && norm)
            probe_near(p, "norm", row, 0, *norm, ref_dot(h, h, I), 4e-6 * ref_dot(h, h, I));
        probe_forget(p, copies);
    }
}
