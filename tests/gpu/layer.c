#include "tests/gpu/gpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint64_t bits(uint64_t *state) { /* splitmix64 (Steele, Lea and Flood, 2014) */
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static double unit(uint64_t *state) {
    return (double)(bits(state) >> 11) * 0x1p-53;
}

/* ---- memory -------------------------------------------------------------------------------------
 */

static mz_kstatus room(layer *l, size_t bytes, void *at) {
    void *memory = NULL;
    mz_kstatus status = mz_kernels_alloc(l->kernels, bytes ? bytes : 16, &memory);
    if (status == MZ_K_OK)
        l->buffer[l->buffers++] = memory;
    memcpy(at, &memory, sizeof memory);
    return status;
}

static mz_kstatus given(layer *l, const void *data, size_t bytes, void *at) {
    mz_kstatus status = room(l, bytes, at);
    void *memory;
    memcpy(&memory, at, sizeof memory);
    if (status == MZ_K_OK)
        status = mz_kernels_copy(l->kernels, 0, MZ_COPY_IN, memory, data, bytes);
    return status == MZ_K_OK ? mz_kernels_sync(l->kernels, 0) : status;
}

/* A piece of random bf16 values of magnitude 2^-6 to 2^-3, laid end to end; read as fp32 they have
 * about the same magnitudes. Sixteen times a prime is its length: rows and matrices that are a
 * power of two apart differ, so that a wrong one is noticed. */
static mz_kstatus random_room(layer *l, uint64_t *state, size_t bytes, void *at) {
    const size_t most = (size_t)16 * 1048573, piece = bytes < most ? bytes : most;
    uint64_t *image = malloc(piece + 8);
    if (!image)
        return MZ_K_ENOMEM;
    for (size_t i = 0; i < piece / 8 + 1; i++)
        image[i] = (bits(state) & UINT64_C(0x81ff81ff81ff81ff)) | UINT64_C(0x3c803c803c803c80);
    mz_kstatus status = room(l, bytes, at);
    char *memory;
    memcpy(&memory, at, sizeof memory);
    for (size_t i = 0; i < bytes && status == MZ_K_OK; i += piece)
        status = mz_kernels_copy(l->kernels, 0, i ? MZ_COPY_INSIDE : MZ_COPY_IN, memory + i,
                                 i ? memory : (const char *)image,
                                 bytes - i < piece ? bytes - i : piece);
    if (status == MZ_K_OK)
        status = mz_kernels_sync(l->kernels, 0);
    free(image);
    return status;
}

/* ---- routing ------------------------------------------------------------------------------------
 */

bool draw_pairs(const shape *s, uint64_t *state, int32_t *expert, int64_t *begin) {
    double *upto = malloc(sizeof *upto * (size_t)s->experts), sum = 0;
    if (!upto)
        return false;
    memset(begin, 0, sizeof *begin * ((size_t)s->experts + 1));
    for (int32_t e = 0; e < s->experts; e++)
        upto[e] = sum += s->skewed ? pow(e + 1, -0.8) : 1;
    for (int64_t p = 0; p < s->tokens * s->k; p++) {
        const double at = unit(state) * sum;
        int32_t low = 0, high = s->experts - 1;
        while (low < high) {
            const int32_t middle = (low + high) / 2;
            if (upto[middle] > at)
                high = middle;
            else
                low = middle + 1;
        }
        expert[p] = low;
        begin[low + 1]++;
    }
    for (int32_t e = 0; e < s->experts; e++)
        begin[e + 1] += begin[e];
    free(upto);
    return true;
}

/* The host knows the groups, as the vendor's product wants. */
static mz_kstatus place_pairs(layer *l, uint64_t *state) {
    int32_t *expert = malloc(sizeof *expert * (size_t)l->pairs);
    l->begin_host = malloc(sizeof *l->begin_host * ((size_t)l->shape.experts + 1));
    mz_kstatus status = MZ_K_ENOMEM;
    if (expert && l->begin_host && draw_pairs(&l->shape, state, expert, l->begin_host))
        status = given(l, expert, sizeof *expert * (size_t)l->pairs, &l->expert);
    free(expert);
    return status;
}

static mz_kstatus set_quotas(layer *l) {
    const int32_t experts = l->shape.experts;
    int64_t *quota = malloc(sizeof *quota * (size_t)experts);
    if (!quota)
        return MZ_K_ENOMEM;
    for (int32_t e = 0; e < experts; e++)
        quota[e] = (l->begin_host[e + 1] - l->begin_host[e] + 1) / 2;
    mz_kstatus status = given(l, quota, sizeof *quota * (size_t)experts, &l->quota);
    free(quota);
    return status;
}

/* Every expert has two hosts of eight, each with half of its pairs: the send buffer of a plan with
 * replicas, by destination and expert. */
static void halve(const layer *l, mz_segment *segment) {
    const int32_t experts = l->shape.experts, hosts = experts < 8 ? experts : 8;
    int64_t to = 0;
    int32_t n = 0;
    for (int32_t host = 0; host < hosts; host++)
        for (int32_t e = 0; e < experts; e++) {
            const int64_t first = l->begin_host[e], all = l->begin_host[e + 1] - first;
            const int32_t home = e % hosts, other = (e / hosts + 1 + e) % hosts;
            if (home == host)
                segment[n++] = (mz_segment){first, to, (all + 1) / 2};
            to += home == host ? (all + 1) / 2 : 0;
            if (other == host)
                segment[n++] = (mz_segment){first + (all + 1) / 2, to, all / 2};
            to += other == host ? all / 2 : 0;
        }
}

bool scratch_fits(layer *l, size_t bytes) {
    if (bytes > l->workspace_bytes)
        l->short_of = bytes;
    return bytes <= l->workspace_bytes;
}

mz_kstatus run_product(layer *l, const mz_product_args *args) {
    if (!scratch_fits(l, mz_grouped_gemm_workspace(l->kernels, args)))
        return MZ_K_EINVAL;
    return mz_grouped_gemm(l->kernels, 0, args, l->workspace);
}

/* What counts, sums and segments are made from. */
static mz_kstatus make_lists(layer *l, uint64_t *state) {
    const size_t experts = (size_t)l->shape.experts, pairs = (size_t)l->pairs;
    const size_t dense = (size_t)l->shape.tokens * experts;
    mz_segment *segment = malloc(sizeof *segment * 2 * experts);
    int64_t *length = malloc(sizeof *length * pairs);
    float *logit = malloc(sizeof *logit * dense);
    mz_kstatus status = segment && length && logit ? MZ_K_OK : MZ_K_ENOMEM;
    if (status == MZ_K_OK) {
        halve(l, segment);
        for (size_t i = 0; i < pairs; i++)
            length[i] = (int64_t)(bits(state) % 1000);
        for (size_t i = 0; i < dense; i++) { /* about k of a token's are above 0 */
            const double size = 0.01 + unit(state);
            logit[i] = (float)(unit(state) * (double)experts < l->shape.k ? size : -size);
        }
        status = given(l, segment, sizeof *segment * 2 * experts, &l->segment);
    }
    if (status == MZ_K_OK)
        status = given(l, length, sizeof *length * pairs, &l->length);
    if (status == MZ_K_OK)
        status = given(l, logit, sizeof *logit * dense, &l->few_logits);
    free(segment);
    free(length);
    free(logit);
    return status;
}

/* Where each pair lies in expert order, as the 32-bit numbers that a gather takes. */
static mz_kstatus place_rows(layer *l) {
    const size_t pairs = (size_t)l->pairs;
    int64_t *position = malloc(sizeof *position * pairs);
    int32_t *place = malloc(sizeof *place * pairs);
    mz_kstatus status = position && place ? mz_kernels_copy(l->kernels, 0, MZ_COPY_OUT, position,
                                                            l->position, sizeof *position * pairs)
                                          : MZ_K_ENOMEM;
    if (status == MZ_K_OK)
        status = mz_kernels_sync(l->kernels, 0);
    for (size_t i = 0; i < pairs && status == MZ_K_OK; i++)
        place[i] = (int32_t)position[i];
    if (status == MZ_K_OK)
        status = given(l, place, sizeof *place * pairs, &l->place);
    free(position);
    free(place);
    return status;
}

/* Pairs in expert order, and where each lies there. */
static mz_kstatus order_pairs(layer *l) {
    const mz_grouping args = {.expert = l->expert,
                              .pairs = l->pairs,
                              .experts = l->shape.experts,
                              .begin = l->begin,
                              .order = l->order};
    if (!scratch_fits(l, mz_group_pairs_workspace(l->kernels, &args)))
        return MZ_K_EINVAL;
    mz_kstatus status = mz_group_pairs(l->kernels, 0, &args, l->workspace);
    return status == MZ_K_OK ? mz_invert(l->kernels, 0, l->order, l->pairs, l->pairs, l->position)
                             : status;
}

/* ---- the layer ----------------------------------------------------------------------------------
 */

/* [experts] pointers to equal pieces of `memory`. */
static mz_kstatus point(layer *l, void *memory, size_t each, void *at) {
    const int32_t experts = l->shape.experts;
    void **pointer = malloc(sizeof *pointer * (size_t)experts);
    if (!pointer)
        return MZ_K_ENOMEM;
    for (int32_t e = 0; e < experts; e++)
        pointer[e] = (char *)memory + each * (size_t)e;
    mz_kstatus status = given(l, pointer, sizeof *pointer * (size_t)experts, at);
    free(pointer);
    return status;
}

static mz_kstatus make_weights(layer *l, uint64_t *state) {
    const shape *s = &l->shape;
    const size_t each = (size_t)(2 * s->intermediate * s->hidden), all = each * (size_t)s->experts;
    mz_kstatus status = random_room(l, state, 2 * all, &l->parameters);
    if (status == MZ_K_OK)
        status = random_room(l, state, all, &l->down_parameters);
    if (status == MZ_K_OK)
        status = random_room(l, state, all, &l->down_gradients);
    if (status == MZ_K_OK)
        status = random_room(l, state, 2 * all, &l->gradients);
    if (status == MZ_K_OK)
        status = random_room(l, state, 4 * all, &l->wide_gradients);
    if (status == MZ_K_OK)
        status = point(l, l->parameters, 2 * each, &l->up);
    if (status == MZ_K_OK)
        status = point(l, l->down_parameters, each, &l->down);
    if (status == MZ_K_OK)
        status = point(l, l->down_gradients, each, &l->down_gradient);
    if (status == MZ_K_OK)
        status = point(l, l->gradients, 2 * each, &l->gradient);
    if (status == MZ_K_OK)
        status = point(l, l->wide_gradients, 4 * each, &l->wide_gradient);
    const struct {
        float **at;
        size_t n;
    } state_of[] = {{&l->m, all},
                    {&l->v, all},
                    {&l->row, (size_t)(2 * s->intermediate * s->experts)},
                    {&l->col, (size_t)(s->hidden * s->experts)}};
    for (int i = 0; i < 4 && status == MZ_K_OK; i++) {
        status = room(l, 4 * state_of[i].n, state_of[i].at);
        if (status == MZ_K_OK)
            status = mz_kernels_zero(l->kernels, 0, *state_of[i].at, 4 * state_of[i].n);
    }
    return status;
}

static mz_kstatus make_rows(layer *l, uint64_t *state) {
    const shape *s = &l->shape;
    const size_t pairs = (size_t)l->pairs, tokens = (size_t)s->tokens;
    const size_t hidden = 2 * (size_t)s->hidden, width = 2 * (size_t)s->intermediate;
    const size_t experts = (size_t)s->experts;
    const struct {
        void *at;
        size_t bytes;
    } rooms[] = {{&l->x, tokens * hidden},
                 {&l->packed, pairs * hidden},
                 {&l->out, pairs * hidden},
                 {&l->gate_up, pairs * 2 * width},
                 {&l->dgate_up, pairs * 2 * width},
                 {&l->hidden, pairs * width},
                 {&l->dhidden, pairs * width},
                 {&l->score, 4 * pairs},
                 {&l->drawn, 4 * pairs},
                 {&l->norm, 4 * pairs},
                 {&l->router_weight, 4 * pairs},
                 {&l->chosen, 4 * pairs},
                 {&l->logits, 4 * tokens * experts},
                 {&l->listed_weight, 4 * tokens * experts},
                 {&l->listed, 4 * tokens * experts},
                 {&l->gate_norm, 4 * tokens * experts},
                 {&l->bias, 4 * experts},
                 {&l->loss, 16},
                 {&l->dot, 4 * pairs},
                 {&l->grad_norm2, 4 * tokens},
                 {&l->token_begin, 8 * (tokens + 1)},
                 {&l->count, 8 * experts},
                 {&l->sums, 8 * (pairs + 1)},
                 {&l->arranged, 8 * pairs},
                 {&l->row_position, 8 * pairs},
                 {&l->dy, tokens * hidden},
                 {&l->dx, tokens * hidden},
                 {&l->rows_x, pairs * hidden},
                 {&l->rows_gate_up, pairs * 2 * width},
                 {&l->begin, 8 * (experts + 1)},
                 {&l->kept_begin, 8 * (experts + 1)},
                 {&l->order, 8 * pairs},
                 {&l->kept, 8 * pairs},
                 {&l->position, 8 * pairs}};
    mz_kstatus status = MZ_K_OK;
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms && status == MZ_K_OK; i++)
        status = random_room(l, state, rooms[i].bytes, rooms[i].at);
    if (status == MZ_K_OK) /* some expert, until a router has chosen */
        status = mz_kernels_zero(l->kernels, 0, l->chosen, 4 * pairs);
    if (status == MZ_K_OK) /* scores are not negative: squares of the random values' rows */
        status =
            mz_row_norms(l->kernels, 0,
                         &(mz_norms){MZ_BF16, l->packed, l->pairs, s->hidden, s->hidden, l->score});
    return status;
}

mz_kstatus layer_open(mz_kernels *k, const shape *s, uint64_t seed, layer *l) {
    *l = (layer){.kernels = k, .shape = *s, .pairs = s->tokens * s->k, .rate = 1e-6F};
    l->workspace_bytes = (size_t)1 << (s->tokens < 1024 ? 22 : 28);
    uint64_t state = seed;
    mz_kstatus status = room(l, l->workspace_bytes, &l->workspace);
    if (status == MZ_K_OK)
        status = place_pairs(l, &state);
    if (status == MZ_K_OK)
        status = set_quotas(l);
    if (status == MZ_K_OK)
        status = make_rows(l, &state);
    if (status == MZ_K_OK)
        status = make_weights(l, &state);
    if (status == MZ_K_OK)
        status = make_lists(l, &state);
    if (status == MZ_K_OK)
        status = order_pairs(l);
    if (status == MZ_K_OK)
        status = place_rows(l);
    return status == MZ_K_OK ? mz_kernels_sync(k, 0) : status;
}

void layer_close(layer *l) {
    while (l->buffers > 0)
        mz_kernels_free(l->kernels, l->buffer[--l->buffers]);
    free(l->begin_host);
    l->begin_host = NULL;
}
