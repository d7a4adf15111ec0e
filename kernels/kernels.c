/* The interface: argument checks in one place for all backends, then the backend's function. */
#include "kernels/backend.h"
#include "kernels/settings.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

mz_kstatus mz_kernels_fail(mz_kernels *k, mz_kstatus status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(k->error, sizeof k->error, format, args);
    va_end(args);
    for (char *c = k->error; *c; c++)
        if ((unsigned char)*c < ' ')
            *c = '?';
    k->failure = status;
    if (status == MZ_K_EFAILED)
        k->failed = true;
    return status;
}

/* ---- contexts -----------------------------------------------------------------------------------
 */

static mz_kstatus tell(char *message, size_t size, mz_kstatus status, const char *text) {
    if (message && size > 0)
        snprintf(message, size, "%s", text);
    return status;
}

mz_kstatus mz_kernels_open(const mz_kernels_options *options, mz_kernels **context, char *message,
                           size_t message_size) {
    if (context)
        *context = NULL;
    if (!options || !context)
        return tell(message, message_size, MZ_K_EINVAL,
                    "no options, or nowhere to put the context");
    if (options->streams < 1 || options->streams > MZ_KERNEL_STREAMS_MAX)
        return tell(message, message_size, MZ_K_EINVAL, "streams must be from 1 to 16");
    if (options->threads < 0 || options->threads > MZ_KERNEL_THREADS_MAX)
        return tell(message, message_size, MZ_K_EINVAL, "threads must be from 0 to 1024");
    if (options->backend != MZ_BACKEND_HOST && options->backend != MZ_BACKEND_CUDA)
        return tell(message, message_size, MZ_K_EINVAL, "unknown backend");
    const mz_backend_ops *ops = options->backend == MZ_BACKEND_CUDA ? mz_cuda_ops() : &mz_host_ops;
    if (!ops)
        return tell(message, message_size, MZ_K_EHARDWARE,
                    "this build has no CUDA kernels; build where nvcc is");
    mz_kernels *k = calloc(1, sizeof *k);
    if (!k)
        return tell(message, message_size, MZ_K_ENOMEM, "no memory for a context");
    k->ops = ops;
    k->backend = options->backend;
    k->streams = options->streams;
    mz_kstatus status = ops->open(k, options);
    if (status != MZ_K_OK) {
        tell(message, message_size, status, k->error);
        free(k);
        return status;
    }
    *context = k;
    return MZ_K_OK;
}

void mz_kernels_close(mz_kernels **context) {
    mz_kernels *k = context ? *context : NULL;
    if (!k)
        return;
    if (k->ops->bind)
        k->ops->bind(k);
    k->ops->close(k);
    free(*context);
    *context = NULL;
}

const char *mz_kernels_error(const mz_kernels *k) {
    return k ? k->error : "no context";
}

mz_kstatus mz_kernels_failure(const mz_kernels *k) {
    return k ? k->failure : MZ_K_EINVAL;
}

const char *mz_kernels_describe(const mz_kernels *k) {
    return k ? k->describe : "no context";
}

mz_backend mz_kernels_backend(const mz_kernels *k) {
    return k ? k->backend : MZ_BACKEND_HOST;
}

void *mz_kernels_native_stream(const mz_kernels *k, mz_kstream stream) {
    return k && k->ops->native_stream && stream >= 0 && stream < k->streams
               ? k->ops->native_stream(k, stream)
               : NULL;
}

/* ---- checks -------------------------------------------------------------------------------------
 * Each returns from the calling function with MZ_K_EINVAL and what is wrong. */

#define REQUIRE(condition, ...)                                                                    \
    do {                                                                                           \
        if (!(condition))                                                                          \
            return mz_kernels_fail(k, MZ_K_EINVAL, __VA_ARGS__);                                   \
    } while (0)

/* The calling thread works on the context's device from here on. */
static mz_kstatus bind_device(mz_kernels *k) {
    if (!k)
        return MZ_K_EINVAL;
    if (k->failed)
        return MZ_K_EFAILED;
    return k->ops->bind ? k->ops->bind(k) : MZ_K_OK;
}

#define REQUIRE_READY(name)                                                                        \
    do {                                                                                           \
        const mz_kstatus bound = bind_device(k);                                                   \
        if (bound != MZ_K_OK)                                                                      \
            return bound;                                                                          \
        REQUIRE(stream >= 0 && stream < k->streams, "%s: stream %d of %d", name, (int)stream,      \
                (int)k->streams);                                                                  \
    } while (0)

#define REQUIRE_CALL(name)                                                                         \
    do {                                                                                           \
        REQUIRE_READY(name);                                                                       \
        REQUIRE(a, "%s: no arguments", name);                                                      \
    } while (0)

/* Scratch of `need` bytes; that there are so many is the caller's word. */
#define REQUIRE_WORKSPACE(name, need)                                                              \
    do {                                                                                           \
        const uintptr_t unit = k->backend == MZ_BACKEND_HOST ? 16 : 256;                           \
        const size_t bytes = (need);                                                               \
        REQUIRE(workspace || bytes == 0, "%s: no workspace of %zu bytes", name, bytes);            \
        REQUIRE((uintptr_t)workspace % unit == 0 || bytes == 0,                                    \
                "%s: the workspace is not %d-byte aligned", name, (int)unit);                      \
    } while (0)

/* Most elements of one array: their byte offsets stay within 64 bits. */
static const int64_t MOST = INT64_C(1) << 58;

static bool sizes_fit(int64_t rows, int64_t cols) {
    return rows >= 0 && cols >= 0 && cols <= MOST && rows <= MOST / (cols > 0 ? cols : 1);
}

mz_product_tiles mz_kernels_tiles(const mz_kernels *k, mz_product op) {
    const mz_product_tiles none = {0, 0, 0, 0};
    return k && op >= MZ_PRODUCT_FORWARD && op <= MZ_PRODUCT_WGRAD ? k->ops->tiles(k, op) : none;
}

mz_product_tiles mz_kernels_up_tiles(const mz_kernels *k, int64_t intermediate) {
    const mz_product_tiles none = {0, 0, 0, 0};
    return k && intermediate > 0 && intermediate <= MOST / 2 ? k->ops->up_tiles(k, intermediate)
                                                             : none;
}

static bool is_type(mz_dtype type) {
    return type == MZ_F32 || type == MZ_BF16;
}

static bool there(const void *memory, int64_t n) {
    return n == 0 || memory != NULL;
}

/* ---- memory and streams -------------------------------------------------------------------------
 */

mz_kstatus mz_kernels_alloc(mz_kernels *k, size_t bytes, void **memory) {
    if (memory)
        *memory = NULL;
    const mz_kstatus bound = bind_device(k);
    if (bound != MZ_K_OK)
        return bound;
    REQUIRE(memory, "alloc: nowhere to put the address");
    REQUIRE(bytes <= (size_t)MOST, "alloc: %zu bytes", bytes);
    return k->ops->alloc(k, bytes > 0 ? bytes : 1, memory);
}

void mz_kernels_free(mz_kernels *k, void *memory) {
    if (!k || !memory)
        return;
    (void)bind_device(k); /* what a failed context has is freed as well */
    k->ops->free(k, memory);
}

mz_kstatus mz_kernels_memory(mz_kernels *k, size_t *all, size_t *available) {
    size_t bytes[2] = {0, 0};
    mz_kstatus status = bind_device(k);
    if (status == MZ_K_OK)
        status = k->ops->memory(k, &bytes[0], &bytes[1]);
    if (all)
        *all = bytes[0];
    if (available)
        *available = bytes[1];
    return status;
}

mz_kstatus mz_kernels_copy(mz_kernels *k, mz_kstream stream, mz_copy kind, void *to,
                           const void *from, size_t bytes) {
    REQUIRE_READY("copy");
    REQUIRE(kind >= MZ_COPY_IN && kind <= MZ_COPY_INSIDE, "copy: unknown kind %d", (int)kind);
    REQUIRE(bytes == 0 || (to && from), "copy: %zu bytes %s NULL", bytes, to ? "from" : "to");
    return bytes == 0 ? MZ_K_OK : k->ops->copy(k, stream, kind, to, from, bytes);
}

mz_kstatus mz_kernels_zero(mz_kernels *k, mz_kstream stream, void *memory, size_t bytes) {
    REQUIRE_READY("zero");
    REQUIRE(bytes == 0 || memory, "zero: %zu bytes at NULL", bytes);
    return bytes == 0 ? MZ_K_OK : k->ops->zero(k, stream, memory, bytes);
}

mz_kstatus mz_kernels_sync(mz_kernels *k, mz_kstream stream) {
    REQUIRE_READY("sync");
    return k->ops->sync(k, stream);
}

mz_kstatus mz_kernels_wait(mz_kernels *k, mz_kstream waiter, mz_kstream stream) {
    REQUIRE_READY("wait");
    REQUIRE(waiter >= 0 && waiter < k->streams, "wait: stream %d of %d", (int)waiter,
            (int)k->streams);
    return waiter == stream ? MZ_K_OK : k->ops->wait(k, waiter, stream);
}

mz_kstatus mz_kernels_mark(mz_kernels *k, mz_kstream stream, int32_t slot) {
    REQUIRE_READY("mark");
    REQUIRE(slot >= 0 && slot < MZ_KERNEL_MARKS, "mark: slot %d of %d", (int)slot, MZ_KERNEL_MARKS);
    return k->ops->mark(k, stream, slot);
}

mz_kstatus mz_kernels_elapsed(mz_kernels *k, int32_t from_slot, int32_t to_slot, double *seconds) {
    if (seconds)
        *seconds = 0;
    const mz_kstatus bound = bind_device(k);
    if (bound != MZ_K_OK)
        return bound;
    REQUIRE(seconds, "elapsed: nowhere to put the seconds");
    REQUIRE(from_slot >= 0 && from_slot < MZ_KERNEL_MARKS && to_slot >= 0 &&
                to_slot < MZ_KERNEL_MARKS,
            "elapsed: slots %d and %d of %d", (int)from_slot, (int)to_slot, MZ_KERNEL_MARKS);
    return k->ops->elapsed(k, from_slot, to_slot, seconds);
}

mz_kstatus mz_convert(mz_kernels *k, mz_kstream stream, mz_dtype to_type, void *to,
                      mz_dtype from_type, const void *from, int64_t n) {
    REQUIRE_READY("convert");
    REQUIRE(is_type(to_type) && is_type(from_type), "convert: unknown type");
    REQUIRE(n >= 0 && n <= MOST, "convert: %lld values", (long long)n);
    REQUIRE(there(to, n) && there(from, n), "convert: NULL");
    return n == 0 ? MZ_K_OK : k->ops->convert(k, stream, to_type, to, from_type, from, n);
}

/* ---- norms and scores ---------------------------------------------------------------------------
 */

mz_kstatus mz_row_norms(mz_kernels *k, mz_kstream stream, const mz_norms *a) {
    REQUIRE_CALL("row_norms");
    REQUIRE(is_type(a->type), "row_norms: unknown type");
    REQUIRE(a->cols >= 0 && a->stride >= a->cols && sizes_fit(a->rows, a->stride),
            "row_norms: %lld rows of %lld, stride %lld", (long long)a->rows, (long long)a->cols,
            (long long)a->stride);
    REQUIRE(there(a->x, a->rows * a->cols) && there(a->out, a->rows), "row_norms: NULL");
    return a->rows == 0 ? MZ_K_OK : k->ops->row_norms(k, stream, a);
}

mz_kstatus mz_row_dots(mz_kernels *k, mz_kstream stream, const mz_dots *a) {
    REQUIRE_CALL("row_dots");
    REQUIRE(is_type(a->type), "row_dots: unknown type");
    REQUIRE(a->cols >= 0 && a->a_stride >= a->cols && a->b_stride >= a->cols &&
                sizes_fit(a->rows, a->a_stride) && sizes_fit(a->rows, a->b_stride),
            "row_dots: %lld rows of %lld", (long long)a->rows, (long long)a->cols);
    REQUIRE(there(a->a, a->rows * a->cols) && there(a->b, a->rows * a->cols) &&
                there(a->out, a->rows),
            "row_dots: NULL");
    return a->rows == 0 ? MZ_K_OK : k->ops->row_dots(k, stream, a);
}

/* Which factors a kind of score reads. */
static bool score_needs(mz_score kind, bool *weight, bool *grad, bool *input, bool *hidden) {
    *weight = *grad = *input = *hidden = false;
    switch (kind) {
    case MZ_SCORED_DOWN:
    case MZ_SCORED_SAMPLE:
        *weight = *grad = *hidden = true;
        return true;
    case MZ_SCORED_UP:
        *weight = *grad = *input = true;
        return true;
    case MZ_SCORED_W:
        *weight = true;
        return true;
    case MZ_SCORED_WH:
        *weight = *hidden = true;
        return true;
    case MZ_SCORED_G:
        *grad = true;
        return true;
    case MZ_SCORED_H:
        *hidden = true;
        return true;
    case MZ_SCORED_RANDOM:
        return true;
    }
    return false;
}

mz_kstatus mz_score_pairs(mz_kernels *k, mz_kstream stream, const mz_score_args *a) {
    REQUIRE_CALL("score_pairs");
    bool weight, grad, input, hidden;
    REQUIRE(score_needs(a->kind, &weight, &grad, &input, &hidden), "score_pairs: unknown kind %d",
            (int)a->kind);
    REQUIRE(a->tokens >= 0 && a->tokens <= MOST && a->pairs >= 0 && a->pairs <= MOST,
            "score_pairs: %lld tokens, %lld pairs", (long long)a->tokens, (long long)a->pairs);
    REQUIRE(a->token_begin ||
                (a->k >= 0 && sizes_fit(a->tokens, a->k) && a->tokens * a->k == a->pairs),
            "score_pairs: %lld pairs are not %lld tokens with %d each", (long long)a->pairs,
            (long long)a->tokens, (int)a->k);
    REQUIRE((!weight || there(a->weight, a->pairs)) &&
                (!hidden || there(a->hidden_norm2, a->pairs)),
            "score_pairs: this kind needs %s", weight && !a->weight ? "weight" : "hidden_norm2");
    REQUIRE(
        (!grad || there(a->grad_norm2, a->pairs)) && (!input || there(a->input_norm2, a->pairs)),
        "score_pairs: this kind needs %s", grad && !a->grad_norm2 ? "grad_norm2" : "input_norm2");
    REQUIRE(there(a->score, a->pairs), "score_pairs: score is NULL");
    return a->pairs == 0 ? MZ_K_OK : k->ops->score_pairs(k, stream, a);
}

/* ---- counts, grouping, selection ----------------------------------------------------------------
 */

static bool grouping_fits(const mz_grouping *a) {
    return a->pairs >= 0 && a->pairs <= MOST && a->experts >= 0;
}

size_t mz_group_pairs_workspace(const mz_kernels *k, const mz_grouping *args) {
    return k && args && grouping_fits(args) ? k->ops->group_pairs_workspace(k, args) : 0;
}

mz_kstatus mz_group_pairs(mz_kernels *k, mz_kstream stream, const mz_grouping *a, void *workspace) {
    REQUIRE_CALL("group_pairs");
    REQUIRE(grouping_fits(a), "group_pairs: %lld pairs, %d experts", (long long)a->pairs,
            (int)a->experts);
    REQUIRE(there(a->expert, a->pairs), "group_pairs: expert is NULL");
    REQUIRE_WORKSPACE("group_pairs", mz_group_pairs_workspace(k, a));
    return k->ops->group_pairs(k, stream, a, workspace);
}

size_t mz_prefix_sums_workspace(const mz_kernels *k, int64_t n) {
    return k && n >= 0 && n <= MOST ? k->ops->prefix_sums_workspace(k, n) : 0;
}

mz_kstatus mz_prefix_sums(mz_kernels *k, mz_kstream stream, const int64_t *count, int64_t n,
                          int64_t *begin, void *workspace) {
    REQUIRE_READY("prefix_sums");
    REQUIRE(n >= 0 && n <= MOST, "prefix_sums: %lld counts", (long long)n);
    REQUIRE(there(count, n) && begin, "prefix_sums: NULL");
    REQUIRE(n == 0 || count != begin, "prefix_sums: begin must not be count");
    REQUIRE_WORKSPACE("prefix_sums", mz_prefix_sums_workspace(k, n));
    return k->ops->prefix_sums(k, stream, count, n, begin, workspace);
}

static bool selection_fits(const mz_selection *a) {
    return a->pairs >= 0 && a->pairs <= MOST && a->experts >= 0;
}

size_t mz_select_workspace(const mz_kernels *k, const mz_selection *args) {
    return k && args && selection_fits(args) ? k->ops->select_workspace(k, args) : 0;
}

mz_kstatus mz_select_pairs(mz_kernels *k, mz_kstream stream, const mz_selection *a,
                           void *workspace) {
    REQUIRE_CALL("select_pairs");
    REQUIRE(selection_fits(a), "select_pairs: %lld pairs, %d experts", (long long)a->pairs,
            (int)a->experts);
    REQUIRE(there(a->score, a->pairs) && there(a->order, a->pairs) && there(a->quota, a->experts) &&
                a->begin,
            "select_pairs: NULL");
    REQUIRE(!a->kept == !a->kept_begin, "select_pairs: kept and kept_begin go together");
    REQUIRE(!a->scaled || a->kept, "select_pairs: scaled needs kept");
    REQUIRE_WORKSPACE("select_pairs", mz_select_workspace(k, a));
    return k->ops->select_pairs(k, stream, a, workspace);
}

/* ---- packing and combining ----------------------------------------------------------------------
 */

mz_kstatus mz_arrange(mz_kernels *k, mz_kstream stream, const mz_segment *segment, int64_t segments,
                      const int64_t *in, int64_t *out) {
    REQUIRE_READY("arrange");
    REQUIRE(segments >= 0 && segments <= MOST, "arrange: %lld segments", (long long)segments);
    REQUIRE(there(segment, segments) && there(in, segments) && there(out, segments),
            "arrange: NULL");
    return segments == 0 ? MZ_K_OK : k->ops->arrange(k, stream, segment, segments, in, out);
}

mz_kstatus mz_invert(mz_kernels *k, mz_kstream stream, const int64_t *row_pair, int64_t rows,
                     int64_t pairs, int64_t *position) {
    REQUIRE_READY("invert");
    REQUIRE(rows >= 0 && rows <= MOST && pairs >= 0 && pairs <= MOST,
            "invert: %lld rows, %lld pairs", (long long)rows, (long long)pairs);
    REQUIRE(there(row_pair, rows) && there(position, pairs), "invert: NULL");
    return pairs == 0 ? MZ_K_OK : k->ops->invert(k, stream, row_pair, rows, pairs, position);
}

mz_kstatus mz_pack_rows(mz_kernels *k, mz_kstream stream, const mz_pack *a) {
    REQUIRE_CALL("pack_rows");
    REQUIRE(is_type(a->type), "pack_rows: unknown type");
    REQUIRE(sizes_fit(a->rows, a->hidden), "pack_rows: %lld rows of %lld", (long long)a->rows,
            (long long)a->hidden);
    REQUIRE(a->token || a->k > 0, "pack_rows: neither token nor k");
    const int64_t n = a->rows * a->hidden;
    REQUIRE(there(a->x, n) && there(a->out, n) && there(a->row_pair, a->rows), "pack_rows: NULL");
    return n == 0 ? MZ_K_OK : k->ops->pack_rows(k, stream, a);
}

mz_kstatus mz_unpack_rows(mz_kernels *k, mz_kstream stream, const mz_unpack *a) {
    REQUIRE_CALL("unpack_rows");
    REQUIRE(is_type(a->type), "unpack_rows: unknown type");
    REQUIRE(sizes_fit(a->pairs, a->hidden), "unpack_rows: %lld pairs of %lld", (long long)a->pairs,
            (long long)a->hidden);
    const int64_t n = a->pairs * a->hidden;
    REQUIRE(there(a->position, a->pairs) && there(a->out, n), "unpack_rows: NULL");
    return n == 0 ? MZ_K_OK : k->ops->unpack_rows(k, stream, a);
}

mz_kstatus mz_combine_rows(mz_kernels *k, mz_kstream stream, const mz_combine *a) {
    REQUIRE_CALL("combine_rows");
    REQUIRE(is_type(a->type), "combine_rows: unknown type");
    REQUIRE(sizes_fit(a->tokens, a->hidden), "combine_rows: %lld tokens of %lld",
            (long long)a->tokens, (long long)a->hidden);
    REQUIRE(a->token_begin || sizes_fit(a->tokens, a->k), "combine_rows: %lld tokens with %d each",
            (long long)a->tokens, (int)a->k);
    const int64_t n = a->tokens * a->hidden;
    REQUIRE(there(a->out, n), "combine_rows: out is NULL");
    REQUIRE(a->position || a->tokens == 0 || (!a->token_begin && a->k == 0),
            "combine_rows: position is NULL");
    return n == 0 ? MZ_K_OK : k->ops->combine_rows(k, stream, a);
}

/* ---- grouped GEMM, SwiGLU -----------------------------------------------------------------------
 */

static mz_kstatus check_begin(mz_kernels *k, const char *name, const mz_groups *g,
                              const int64_t *begin) {
    REQUIRE(begin[0] == 0, "%s: groups begin at row %lld, not at 0", name, (long long)begin[0]);
    for (int32_t i = 0; i < g->groups; i++)
        REQUIRE(begin[i] <= begin[i + 1], "%s: group %d ends before it begins", name, (int)i);
    REQUIRE(begin[g->groups] <= g->rows_max, "%s: more rows than rows_max", name);
    return MZ_K_OK;
}

static mz_kstatus check_groups(mz_kernels *k, const char *name, const mz_groups *g) {
    REQUIRE(g->groups >= 0 && g->rows_max >= 0 && g->rows_max <= MOST,
            "%s: %d groups of at most %lld rows", name, (int)g->groups, (long long)g->rows_max);
    REQUIRE(there(g->begin, g->groups), "%s: groups.begin is NULL", name);
    mz_kstatus status = MZ_K_OK;
    if (g->begin_host)
        status = check_begin(k, name, g, g->begin_host);
    if (status == MZ_K_OK && k->backend == MZ_BACKEND_HOST && g->groups > 0)
        status = check_begin(k, name, g, g->begin);
    return status;
}

static bool product_fits(const mz_product_args *a) {
    const mz_groups *g = &a->groups;
    return a->n > 0 && a->k > 0 && g->groups >= 0 && sizes_fit(a->n, a->k) &&
           sizes_fit(g->rows_max, a->n) && sizes_fit(g->rows_max, a->k);
}

size_t mz_grouped_gemm_workspace(const mz_kernels *k, const mz_product_args *args) {
    return k && args && product_fits(args) ? k->ops->grouped_gemm_workspace(k, args) : 0;
}

mz_kstatus mz_grouped_gemm(mz_kernels *k, mz_kstream stream, const mz_product_args *a,
                           void *workspace) {
    REQUIRE_CALL("grouped_gemm");
    REQUIRE(is_type(a->type) && is_type(a->gradient_type), "grouped_gemm: unknown type");
    REQUIRE(a->op >= MZ_PRODUCT_FORWARD && a->op <= MZ_PRODUCT_WGRAD, "grouped_gemm: unknown op");
    REQUIRE(a->engine >= MZ_ENGINE_OWN && a->engine <= MZ_ENGINE_OWN_MMA,
            "grouped_gemm: unknown engine");
    mz_kstatus status = check_groups(k, "grouped_gemm", &a->groups);
    if (status != MZ_K_OK)
        return status;
    REQUIRE(product_fits(a), "grouped_gemm: n %lld, k %lld, rows %lld", (long long)a->n,
            (long long)a->k, (long long)a->groups.rows_max);
    REQUIRE(a->op == MZ_PRODUCT_WGRAD || !a->accumulate, "grouped_gemm: only wgrad accumulates");
    REQUIRE(a->engine != MZ_ENGINE_VENDOR || a->groups.begin_host || k->backend == MZ_BACKEND_HOST,
            "grouped_gemm: the vendor's engine needs begin_host");
    REQUIRE(there(a->weight, a->groups.groups) && there(a->a, a->groups.rows_max) &&
                there(a->c, a->groups.rows_max),
            "grouped_gemm: NULL");
    REQUIRE_WORKSPACE("grouped_gemm", mz_grouped_gemm_workspace(k, a));
    return a->groups.groups == 0 ? MZ_K_OK : k->ops->grouped_gemm(k, stream, a, workspace);
}

static bool up_fits(const mz_expert_up *a) {
    const mz_groups *g = &a->groups;
    return a->hidden > 0 && a->intermediate > 0 && a->intermediate <= MOST / 2 && g->groups >= 0 &&
           sizes_fit(2 * a->intermediate, a->hidden) &&
           sizes_fit(g->rows_max, 2 * a->intermediate) && sizes_fit(g->rows_max, a->hidden);
}

size_t mz_expert_up_workspace(const mz_kernels *k, const mz_expert_up *args) {
    return k && args && up_fits(args) ? k->ops->expert_up_workspace(k, args) : 0;
}

mz_kstatus mz_expert_up_forward(mz_kernels *k, mz_kstream stream, const mz_expert_up *a,
                                void *workspace) {
    REQUIRE_CALL("expert_up");
    REQUIRE(is_type(a->type), "expert_up: unknown type");
    REQUIRE(a->engine == MZ_ENGINE_OWN || a->engine == MZ_ENGINE_OWN_MMA,
            "expert_up: only own engines fuse the activation");
    mz_kstatus status = check_groups(k, "expert_up", &a->groups);
    if (status != MZ_K_OK)
        return status;
    REQUIRE(up_fits(a), "expert_up: hidden %lld, intermediate %lld", (long long)a->hidden,
            (long long)a->intermediate);
    REQUIRE(there(a->weight, a->groups.groups) && there(a->x, a->groups.rows_max) &&
                there(a->h, a->groups.rows_max),
            "expert_up: NULL");
    REQUIRE_WORKSPACE("expert_up", mz_expert_up_workspace(k, a));
    return a->groups.groups == 0 ? MZ_K_OK : k->ops->expert_up_forward(k, stream, a, workspace);
}

static mz_kstatus check_swiglu(mz_kernels *k, const char *name, const mz_swiglu *a) {
    REQUIRE(is_type(a->type), "%s: unknown type", name);
    REQUIRE(a->intermediate >= 0 && a->intermediate <= MOST / 2 &&
                sizes_fit(a->rows, 2 * a->intermediate),
            "%s: %lld rows of %lld", name, (long long)a->rows, (long long)a->intermediate);
    REQUIRE(there(a->gate_up, a->rows * a->intermediate), "%s: gate_up is NULL", name);
    return MZ_K_OK;
}

mz_kstatus mz_swiglu_forward(mz_kernels *k, mz_kstream stream, const mz_swiglu *a) {
    REQUIRE_CALL("swiglu_forward");
    mz_kstatus status = check_swiglu(k, "swiglu_forward", a);
    if (status != MZ_K_OK)
        return status;
    REQUIRE(there(a->h, a->rows * a->intermediate), "swiglu_forward: h is NULL");
    return a->rows == 0 ? MZ_K_OK : k->ops->swiglu_forward(k, stream, a);
}

mz_kstatus mz_swiglu_backward(mz_kernels *k, mz_kstream stream, const mz_swiglu *a) {
    REQUIRE_CALL("swiglu_backward");
    mz_kstatus status = check_swiglu(k, "swiglu_backward", a);
    if (status != MZ_K_OK)
        return status;
    const int64_t n = a->rows * a->intermediate;
    REQUIRE(there(a->dh, n) && there(a->dgate_up, n), "swiglu_backward: NULL");
    return a->rows == 0 ? MZ_K_OK : k->ops->swiglu_backward(k, stream, a);
}

/* ---- routers ------------------------------------------------------------------------------------
 */

static bool router_fits(const mz_router *a) {
    return a->experts > 0 && sizes_fit(a->tokens, a->experts);
}

static mz_kstatus check_router(mz_kernels *k, const char *name, const mz_router *a) {
    const bool variable = a->kind == MZ_ROUTER_RELU || a->kind == MZ_ROUTER_ROUTING_FREE;
    REQUIRE(a->kind >= MZ_ROUTER_SOFTMAX && a->kind <= MZ_ROUTER_ROUTING_FREE, "%s: unknown kind",
            name);
    REQUIRE(router_fits(a), "%s: %lld tokens, %d experts", name, (long long)a->tokens,
            (int)a->experts);
    REQUIRE(variable || (a->k > 0 && a->k <= a->experts), "%s: k %d of %d experts", name, (int)a->k,
            (int)a->experts);
    REQUIRE(a->kind != MZ_ROUTER_SIGMOID ||
                (a->n_group > 0 && a->experts % a->n_group == 0 && a->topk_group > 0 &&
                 a->topk_group <= a->n_group && a->k <= a->experts / a->n_group * a->topk_group),
            "%s: %d of %d groups for %d experts", name, (int)a->topk_group, (int)a->n_group,
            (int)a->experts);
    REQUIRE(there(a->logits, a->tokens) && there(a->expert, a->tokens) &&
                there(a->weight, a->tokens),
            "%s: NULL", name);
    REQUIRE(!variable || a->token_begin, "%s: token_begin is NULL", name);
    return MZ_K_OK;
}

size_t mz_router_workspace(const mz_kernels *k, const mz_router *args) {
    return k && args && router_fits(args) ? k->ops->router_workspace(k, args) : 0;
}

mz_kstatus mz_router_forward(mz_kernels *k, mz_kstream stream, const mz_router *a,
                             void *workspace) {
    REQUIRE_CALL("router_forward");
    mz_kstatus status = check_router(k, "router_forward", a);
    if (status != MZ_K_OK)
        return status;
    REQUIRE_WORKSPACE("router_forward", mz_router_workspace(k, a));
    return k->ops->router_forward(k, stream, a, workspace);
}

mz_kstatus mz_router_backward(mz_kernels *k, mz_kstream stream, const mz_router *a,
                              void *workspace) {
    REQUIRE_CALL("router_backward");
    mz_kstatus status = check_router(k, "router_backward", a);
    if (status != MZ_K_OK)
        return status;
    REQUIRE(there(a->dweight, a->tokens) && there(a->dlogits, a->tokens), "router_backward: NULL");
    REQUIRE(a->aux_factor == 0 || a->count, "router_backward: the balance loss needs count");
    REQUIRE(a->aux_factor == 0 || a->kind != MZ_ROUTER_RELU || a->k > 0,
            "router_backward: the balance loss needs k, the pairs wanted of a token");
    REQUIRE_WORKSPACE("router_backward", mz_router_workspace(k, a));
    return k->ops->router_backward(k, stream, a, workspace);
}

mz_kstatus mz_router_losses(mz_kernels *k, mz_kstream stream, const mz_router *a, float *loss,
                            void *workspace) {
    REQUIRE_CALL("router_losses");
    mz_kstatus status = check_router(k, "router_losses", a);
    if (status != MZ_K_OK)
        return status;
    REQUIRE(loss, "router_losses: loss is NULL");
    REQUIRE(a->count, "router_losses: count is NULL");
    REQUIRE(a->kind != MZ_ROUTER_RELU || a->k > 0,
            "router_losses: the balance loss needs k, the pairs wanted of a token");
    REQUIRE_WORKSPACE("router_losses", mz_router_workspace(k, a));
    return k->ops->router_losses(k, stream, a, loss, workspace);
}

mz_kstatus mz_gate_norms(mz_kernels *k, mz_kstream stream, mz_dtype type, const void *z,
                         int64_t tokens, int32_t experts, int64_t r, float *norm) {
    REQUIRE_READY("gate_norms");
    REQUIRE(is_type(type), "gate_norms: unknown type");
    REQUIRE(experts >= 0 && r >= 0 && sizes_fit(tokens, experts) && sizes_fit(tokens * experts, r),
            "gate_norms: %lld x %d x %lld", (long long)tokens, (int)experts, (long long)r);
    const int64_t n = tokens * experts;
    REQUIRE(there(z, n * r) && there(norm, n), "gate_norms: NULL");
    return n == 0 ? MZ_K_OK : k->ops->gate_norms(k, stream, type, z, tokens, experts, r, norm);
}

mz_kstatus mz_gate_norms_backward(mz_kernels *k, mz_kstream stream, mz_dtype type, const void *z,
                                  const float *norm, const float *dnorm, int64_t tokens,
                                  int32_t experts, int64_t r, void *dz) {
    REQUIRE_READY("gate_norms_backward");
    REQUIRE(is_type(type), "gate_norms_backward: unknown type");
    REQUIRE(experts >= 0 && r >= 0 && sizes_fit(tokens, experts) && sizes_fit(tokens * experts, r),
            "gate_norms_backward: %lld x %d x %lld", (long long)tokens, (int)experts, (long long)r);
    const int64_t n = tokens * experts;
    REQUIRE(there(z, n * r) && there(norm, n) && there(dnorm, n) && there(dz, n * r),
            "gate_norms_backward: NULL");
    return n * r == 0 ? MZ_K_OK
                      : k->ops->gate_norms_backward(k, stream, type, z, norm, dnorm, tokens,
                                                    experts, r, dz);
}

float mz_adapt_lambda(float lambda, float eta, float density, float target, float cap) {
    if (density > target)
        lambda *= 1.0f + eta;
    else if (density < target)
        lambda /= 1.0f + eta;
    else if (density != target)
        return NAN; /* one of them is */
    return lambda > cap ? cap : lambda;
}

/* ---- optimizers ---------------------------------------------------------------------------------
 */

static bool update_fits(const mz_update *a) {
    return a->cols > 0 && sizes_fit(a->rows, a->cols) &&
           sizes_fit(a->matrices, a->rows * a->cols) && sizes_fit(a->matrices, a->rows + a->cols);
}

int64_t mz_update_state_bytes(const mz_update *a) {
    if (!a || !update_fits(a))
        return 0;
    const int64_t full = 4 * a->matrices * a->rows * a->cols;
    const int64_t factors = 4 * a->matrices * (a->rows + a->cols);
    switch (a->kind) {
    case MZ_UPDATE_SKEWADAM:
        return (a->momentum ? full : 0) + (a->factored && a->cols > 1 ? factors : full);
    case MZ_UPDATE_ADAMW:
        return 2 * full;
    case MZ_UPDATE_ADAFACTOR:
        return a->cols > 1 ? factors : full;
    case MZ_UPDATE_LION:
    case MZ_UPDATE_MUON:
        break;
    }
    return full;
}

size_t mz_update_workspace(const mz_kernels *k, const mz_update *args) {
    return k && args && update_fits(args) ? k->ops->update_workspace(k, args) : 0;
}

mz_kstatus mz_update_step(mz_kernels *k, mz_kstream stream, const mz_update *a, void *workspace) {
    REQUIRE_CALL("update_step");
    REQUIRE(a->kind >= MZ_UPDATE_SKEWADAM && a->kind <= MZ_UPDATE_MUON,
            "update_step: unknown kind");
    REQUIRE(is_type(a->type) && is_type(a->gradient_type), "update_step: unknown type");
    REQUIRE(a->rounding >= MZ_ROUND_NEAREST && a->rounding <= MZ_ROUND_STOCHASTIC,
            "update_step: unknown rounding");
    REQUIRE(update_fits(a), "update_step: %lld x %lld x %lld", (long long)a->matrices,
            (long long)a->rows, (long long)a->cols);
    REQUIRE(a->step >= 1, "update_step: step %lld; the first is 1", (long long)a->step);
    REQUIRE(a->kind != MZ_UPDATE_MUON || (a->cols > 1 && a->newton_schulz >= 0),
            "update_step: muon is for matrices");
    const int64_t n = a->matrices * a->rows * a->cols;
    REQUIRE(there(a->parameter, n) && there(a->gradient, n), "update_step: NULL");
    REQUIRE(!mz_keeps_momentum(a) || there(a->m, n), "update_step: m is NULL");
    REQUIRE(!mz_keeps_full_v(a) || there(a->v, n), "update_step: v is NULL");
    REQUIRE(!mz_keeps_factors(a) || (there(a->row, n) && there(a->col, n)),
            "update_step: row or col is NULL");
    REQUIRE_WORKSPACE("update_step", mz_update_workspace(k, a));
    return n == 0 ? MZ_K_OK : k->ops->update_step(k, stream, a, workspace);
}
