#include "replay/probe.h"

#include "common/base/arena.h"
#include "common/base/log.h"
#include "common/base/stat.h"
#include "replay/kernel_code.h"

#include <stdlib.h>

enum { GROUPS = 8, ROWS = 128, SIDE = 512, VALUE = 2, DEVICE_CALLS = 50 };
enum { WEIGHT = SIDE * SIDE * VALUE, BLOCK = GROUPS * ROWS * SIDE * VALUE };
/* Rows from memory: PICKS / LONG_ROWS of the numbers that a row is drawn by are one row's. */
enum { LONG_ROWS = 4096, LONG_WIDTH = 2048, PICKS = 1 << 18 };
/* Rows in a cache: of so many calls, so many times. */
enum { SHORT_ROWS = 128, SHORT_WIDTH = 512, CALLS = 16, TIMES = 3 };
enum { LONG = LONG_ROWS * LONG_WIDTH * VALUE, SHORT = SHORT_ROWS * SHORT_WIDTH * VALUE };
_Static_assert(MZ_PROBE_LONG == 2 * LONG && MZ_PROBE_SHORT == 2 * SHORT, "as the header says");

struct mz_probe {
    mz_kernels *kernels;
    mz_transport *transport;
    char *x, *y, *weights; /* context memory: rows, results, [groups][side][side] */
    void *begin, *weight;  /* context memory: of groups */
    void *scratch;
    int64_t *pick, *counting; /* context memory: LONG_ROWS rows drawn, SHORT_ROWS in order */
    mz_probe_room room;
    bool owned; /* the room */
    int64_t in_at, out_at;
    double *mine, *all; /* [local ranks], [ranks] */
};

static mz_code failed(const mz_probe *p, mz_err *err) {
    mz_kernel_code(p->kernels, mz_kernels_failure(p->kernels), err);
    return mz_err_prefix(err, "a probe of the machine's speed");
}

static mz_product_args args_of(const mz_probe *p) {
    return (mz_product_args){.op = MZ_PRODUCT_FORWARD,
                             .groups = {p->begin, GROUPS, GROUPS * ROWS, NULL},
                             .n = SIDE,
                             .k = SIDE,
                             .type = MZ_BF16,
                             .gradient_type = MZ_BF16,
                             .a = p->x,
                             .weight = p->weight,
                             .c = p->y};
}

static bool copy_in(const mz_probe *p, void *to, const void *from, size_t bytes) {
    return mz_kernels_copy(p->kernels, 0, MZ_COPY_IN, to, from, bytes) == MZ_K_OK;
}

/* The lists are read once before they go. */
static bool fill_lists(const mz_probe *p) {
    int64_t pick[LONG_ROWS], counting[SHORT_ROWS];
    mz_rng rng = mz_rng_make(1, 9);
    for (int64_t i = 0; i < LONG_ROWS; i++)
        pick[i] = (int64_t)mz_rng_below(&rng, PICKS);
    for (int64_t i = 0; i < SHORT_ROWS; i++)
        counting[i] = i;
    return copy_in(p, p->pick, pick, sizeof pick) &&
           copy_in(p, p->counting, counting, sizeof counting) &&
           mz_kernels_sync(p->kernels, 0) == MZ_K_OK;
}

/* Both halves are written, so that all their pages are there. */
static bool fill_room(const mz_probe *p, const char *value, int64_t bytes) {
    bool filled = mz_kernels_zero(p->kernels, 0, p->room.out, (size_t)p->room.bytes) == MZ_K_OK;
    for (int64_t at = 0; filled && at < p->room.bytes; at += bytes)
        filled = copy_in(p, p->room.in + at, value, (size_t)bytes);
    return filled;
}

static mz_code fill(const mz_probe *p, mz_err *err) {
    const size_t bytes = (size_t)GROUPS * WEIGHT;
    uint16_t *value = malloc(bytes);
    int64_t begin[GROUPS + 1];
    void *weight[GROUPS];
    if (!value)
        return mz_fail_nomem(err, "a probe of the machine's speed");
    mz_rng rng = mz_rng_make(1, 5);
    for (size_t i = 0; i < bytes / VALUE; i++)
        value[i] = mz_probe_operand(&rng);
    for (int64_t g = 0; g <= GROUPS; g++)
        begin[g] = g * ROWS;
    for (int64_t g = 0; g < GROUPS; g++)
        weight[g] = p->weights + g * WEIGHT;
    const bool filled = copy_in(p, p->x, value, BLOCK) && copy_in(p, p->weights, value, bytes) &&
                        copy_in(p, p->begin, begin, sizeof begin) &&
                        copy_in(p, p->weight, weight, sizeof weight) && fill_lists(p) &&
                        (!p->owned || fill_room(p, (const char *)value, (int64_t)bytes)) &&
                        mz_kernels_sync(p->kernels, 0) == MZ_K_OK;
    free(value);
    return filled ? MZ_OK : failed(p, err);
}

static bool allocate(mz_probe *p) {
    mz_kernels *k = p->kernels;
    const struct {
        void **to;
        size_t bytes;
    } list[] = {{(void **)&p->x, BLOCK},
                {(void **)&p->y, BLOCK},
                {(void **)&p->weights, (size_t)GROUPS * WEIGHT},
                {&p->begin, (GROUPS + 1) * sizeof(int64_t)},
                {&p->weight, GROUPS * sizeof(void *)},
                {(void **)&p->pick, LONG_ROWS * sizeof *p->pick},
                {(void **)&p->counting, SHORT_ROWS * sizeof *p->counting},
                {(void **)&p->room.in, p->owned ? MZ_PROBE_ROOM : 0},
                {(void **)&p->room.out, p->owned ? MZ_PROBE_ROOM : 0}};
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)
        if (list[i].bytes > 0 && mz_kernels_alloc(k, list[i].bytes, list[i].to) != MZ_K_OK)
            return false;
    const mz_product_args a = args_of(p);
    const size_t scratch = mz_grouped_gemm_workspace(k, &a);
    return scratch == 0 || mz_kernels_alloc(k, scratch, &p->scratch) == MZ_K_OK;
}

mz_code mz_probe_create(mz_kernels *kernels, mz_transport *transport, const mz_probe_room *lent,
                        mz_probe **probe, mz_err *err) {
    mz_probe *p = *probe = mz_calloc(1, sizeof *p);
    if (!p)
        return mz_fail_nomem(err, "a probe of the machine's speed");
    p->kernels = kernels;
    p->transport = transport;
    p->owned = !lent;
    p->room = lent ? *lent : (mz_probe_room){.bytes = MZ_PROBE_ROOM};
    p->mine = mz_calloc((size_t)(transport->end - transport->first) + 1, sizeof *p->mine);
    p->all = mz_calloc((size_t)transport->ranks, sizeof *p->all);
    mz_code code = MZ_OK;
    if (!p->mine || !p->all)
        code = mz_fail_nomem(err, "a probe of the machine's speed");
    else
        code = allocate(p) ? fill(p, err) : failed(p, err);
    if (code != MZ_OK)
        mz_probe_free(probe);
    return code;
}

void mz_probe_free(mz_probe **probe) {
    mz_probe *p = *probe;
    if (!p)
        return;
    void *const all[] = {p->x,
                         p->y,
                         p->weights,
                         p->begin,
                         p->weight,
                         p->scratch,
                         p->pick,
                         p->counting,
                         p->owned ? p->room.in : NULL,
                         p->owned ? p->room.out : NULL};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        mz_kernels_free(p->kernels, all[i]);
    free(p->mine);
    free(p->all);
    free(p);
    *probe = NULL;
}

/* ---- what is timed -----------------------------------------------------------------------------
 */

static bool on_host(const mz_probe *p) {
    return mz_kernels_backend(p->kernels) == MZ_BACKEND_HOST;
}

typedef mz_kstatus (*one_call)(mz_probe *p);

/* A call goes before those that are timed. Accelerators are done with one before they have begun:
 * they are given many. */
static mz_kstatus time_call(mz_probe *p, one_call call, double *seconds) {
    const int calls = on_host(p) ? 1 : DEVICE_CALLS;
    mz_kstatus status = call(p);
    if (status == MZ_K_OK)
        status = mz_kernels_sync(p->kernels, 0);
    const double start = mz_now();
    for (int i = 0; i < calls && status == MZ_K_OK; i++)
        status = call(p);
    if (status == MZ_K_OK)
        status = mz_kernels_sync(p->kernels, 0);
    *seconds = (mz_now() - start) / calls;
    return status;
}

static mz_kstatus multiply(mz_probe *p) {
    const mz_product_args a = args_of(p);
    return mz_grouped_gemm(p->kernels, 0, &a, p->scratch);
}

static mz_kstatus time_product(mz_probe *p, double *seconds) {
    return time_call(p, multiply, seconds);
}

/* Parts follow each other and start again at the front. */
static char *next_part(const mz_probe *p, char *pool, int64_t *at, int64_t bytes) {
    if (*at + bytes > p->room.bytes)
        *at = 0;
    char *part = pool + *at;
    *at += bytes;
    return part;
}

static mz_kstatus pack_long(mz_probe *p) {
    const mz_pack a = {.type = MZ_BF16,
                       .x = next_part(p, p->room.in, &p->in_at, LONG),
                       .hidden = LONG_WIDTH,
                       .rows = LONG_ROWS,
                       .row_pair = p->pick,
                       .k = PICKS / LONG_ROWS,
                       .out = next_part(p, p->room.out, &p->out_at, LONG)};
    return mz_pack_rows(p->kernels, 0, &a);
}

/* After a step the last cache is full of lines that are still to be written to memory, between two
 * probes of a calibration it is not: the call before leaves its own lines in both. */
static mz_kstatus time_long_rows(mz_probe *p, double *seconds) {
    return time_call(p, pack_long, seconds);
}

void mz_probe_work_alone(void) {
    static const double seconds = 20e-6;
    const double start = mz_now();
    while (mz_now() - start < seconds)
        ;
}

static mz_kstatus pack_short(mz_probe *p, const char *in, char *out) {
    const mz_pack a = {.type = MZ_BF16,
                       .x = in,
                       .hidden = SHORT_WIDTH,
                       .rows = SHORT_ROWS,
                       .row_pair = p->counting,
                       .k = 1,
                       .out = out};
    return mz_pack_rows(p->kernels, 0, &a);
}

/* Rows of all calls are written before the first call, as the kernel before writes those of all
 * ranks. */
static mz_kstatus time_calls(mz_probe *p, double *seconds) {
    char *in[CALLS];
    double sum = 0;
    mz_kstatus status = MZ_K_OK;
    for (int i = 0; i < CALLS && status == MZ_K_OK; i++) {
        const char *from = next_part(p, p->room.in, &p->in_at, SHORT);
        in[i] = next_part(p, p->room.in, &p->in_at, SHORT);
        status = pack_short(p, from, in[i]);
    }
    if (status == MZ_K_OK)
        status = mz_kernels_sync(p->kernels, 0);
    for (int i = 0; i < CALLS && status == MZ_K_OK; i++) {
        char *out = next_part(p, p->room.out, &p->out_at, SHORT);
        mz_probe_work_alone();
        const double start = mz_now();
        status = pack_short(p, in[i], out);
        if (status == MZ_K_OK)
            status = mz_kernels_sync(p->kernels, 0);
        sum += mz_now() - start;
    }
    *seconds = sum / CALLS;
    return status;
}

static mz_kstatus time_short_rows(mz_probe *p, double *seconds) {
    double times[TIMES];
    mz_kstatus status = MZ_K_OK;
    for (int i = 0; i < TIMES && status == MZ_K_OK; i++)
        status = time_calls(p, &times[i]);
    if (status != MZ_K_OK)
        return status;
    mz_sort(times, TIMES);
    *seconds = times[TIMES / 2];
    return MZ_K_OK;
}

mz_code mz_probe_run(mz_probe *p, mz_speed speed, double *seconds, mz_err *err) {
    static mz_kstatus (*const timed[MZ_SPEEDS])(mz_probe *,
                                                double *) = {[MZ_SPEED_PRODUCT] = time_product,
                                                             [MZ_SPEED_MEMORY] = time_long_rows,
                                                             [MZ_SPEED_CACHE] = time_short_rows};
    const int32_t local = p->transport->end - p->transport->first;
    double own = 0;
    *seconds = 0;
    mz_code code = mz_transport_barrier(p->transport, err);
    if (code != MZ_OK)
        return code;
    if (timed[speed](p, &own) != MZ_K_OK)
        return failed(p, err);
    for (int32_t r = 0; r < local; r++)
        p->mine[r] = own;
    code = mz_transport_gather(p->transport, p->mine, sizeof *p->mine, p->all, err);
    for (int32_t r = 0; code == MZ_OK && r < p->transport->ranks; r++)
        *seconds += p->all[r] / p->transport->ranks;
    return code;
}

const double *mz_probe_ranks(const mz_probe *p) {
    return p->all;
}
