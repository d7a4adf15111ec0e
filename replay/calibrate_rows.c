/* Kernels that memory binds. */
#include "replay/calibrate_inside.h"
#include "common/base/rng.h"
#include "sim/cost/work.h"

#include <stdlib.h>

enum { VALUE = 2, SEGMENTS = 256 };
/* As in a backward that leaves pairs out: one of so many rows is taken. */
enum { SPREAD = 2 };
/* That a source's rows are packed by. */
enum { PACK_EXPERTS = 32 };

/* tokens: that the rows are of. */
typedef struct row_sizes {
    int64_t rows, cols, tokens;
} row_sizes;

/* Bytes in the pools: per row and column, and per row; of the input, how much at its end the kernel
 * before has made. */
typedef struct row_kind {
    mz_work work;
    calibrate_run run;
    int64_t in_value, made_value, out_value, out_row;
    const int64_t *cols; /* list, 0 at its end */
    int64_t spread;      /* tokens of which one has a row; 0: each has CALIBRATE_TOP_K rows */
    bool of_tokens;      /* the input has a row for every token, not for every row */
} row_kind;

static mz_kstatus run_group(calibration *c, const void *sizes, char *in, char *out) {
    const row_sizes *s = sizes;
    const mz_grouping g = {.expert = c->expert,
                           .pairs = s->rows,
                           .experts = (int32_t)s->cols,
                           .count = (int64_t *)(void *)out,
                           .begin = (int64_t *)(void *)(out + 8192),
                           .order = (int64_t *)(void *)(out + 16384)};
    return mz_group_pairs(c->kernels, 0, &g, c->scratch);
}

static mz_kstatus run_arrange(calibration *c, const void *sizes, char *in, char *out) {
    const row_sizes *s = sizes;
    const int64_t n = s->rows < SEGMENTS ? s->rows : SEGMENTS;
    return mz_arrange(c->kernels, 0, c->scratch, n, c->counting, (int64_t *)(void *)out);
}

static mz_kstatus run_invert(calibration *c, const void *sizes, char *in, char *out) {
    const row_sizes *s = sizes;
    return mz_invert(c->kernels, 0, c->counting, s->rows, s->rows, (int64_t *)(void *)out);
}

/* Weights are there for CALIBRATE_PAIRS pairs. */
static int32_t pairs_of_token(const row_sizes *s) {
    const int64_t most = CALIBRATE_PAIRS / s->tokens;
    return most < CALIBRATE_TOP_K ? (int32_t)most : CALIBRATE_TOP_K;
}

static mz_pack pack_of(calibration *c, const row_sizes *s, const char *in, char *out) {
    return (mz_pack){.type = MZ_BF16,
                     .x = in,
                     .hidden = s->cols,
                     .rows = s->rows,
                     .row_pair = c->scratch,
                     .k = pairs_of_token(s),
                     .out = out};
}

static mz_kstatus run_pack(calibration *c, const void *sizes, char *in, char *out) {
    const mz_pack p = pack_of(c, sizes, in, out);
    return mz_pack_rows(c->kernels, 0, &p);
}

static mz_kstatus run_pack_scaled(calibration *c, const void *sizes, char *in, char *out) {
    mz_pack p = pack_of(c, sizes, in, out);
    p.scale = c->weight;
    return mz_pack_rows(c->kernels, 0, &p);
}

/* Some rows of a forward long past, in their order. */
static mz_kstatus run_gather(calibration *c, const void *sizes, char *in, char *out) {
    mz_pack p = pack_of(c, sizes, in, out);
    p.k = 1;
    return mz_pack_rows(c->kernels, 0, &p);
}

static mz_kstatus run_combine(calibration *c, const void *sizes, char *in, char *out) {
    const row_sizes *s = sizes;
    const mz_combine a = {.type = MZ_BF16,
                          .row = in,
                          .hidden = s->cols,
                          .tokens = s->rows / CALIBRATE_TOP_K,
                          .k = CALIBRATE_TOP_K,
                          .position = c->counting,
                          .scale = c->weight,
                          .out = out};
    return mz_combine_rows(c->kernels, 0, &a);
}

/* Of some pairs alone, as in a backward that leaves pairs out: each token looks for all of its. */
static mz_kstatus run_combine_some(calibration *c, const void *sizes, char *in, char *out) {
    const row_sizes *s = sizes;
    const mz_combine a = {.type = MZ_BF16,
                          .row = in,
                          .hidden = s->cols,
                          .tokens = s->tokens,
                          .k = CALIBRATE_TOP_K,
                          .position = c->scratch,
                          .out = out};
    return mz_combine_rows(c->kernels, 0, &a);
}

static mz_kstatus run_norms(calibration *c, const void *sizes, char *in, char *out) {
    const row_sizes *s = sizes;
    const mz_norms a = {MZ_BF16, in, s->rows, s->cols, s->cols, (float *)(void *)out};
    return mz_row_norms(c->kernels, 0, &a);
}

static mz_kstatus run_score(calibration *c, const void *sizes, char *in, char *out) {
    const row_sizes *s = sizes;
    const mz_score_args a = {.kind = MZ_SCORED_DOWN,
                             .tokens = s->rows / CALIBRATE_TOP_K,
                             .pairs = s->rows,
                             .k = CALIBRATE_TOP_K,
                             .weight = c->weight,
                             .grad_norm2 = c->weight,
                             .hidden_norm2 = c->weight,
                             .score = (float *)(void *)out};
    return mz_score_pairs(c->kernels, 0, &a);
}

/* Half of every expert's pairs. */
static mz_kstatus run_select(calibration *c, const void *sizes, char *in, char *out) {
    const row_sizes *s = sizes;
    const mz_selection a = {.score = c->weight,
                            .order = c->counting,
                            .begin = c->begin,
                            .quota = c->quota,
                            .pairs = s->rows,
                            .experts = (int32_t)s->cols,
                            .kept = (int64_t *)(void *)(out + 8192),
                            .kept_begin = (int64_t *)(void *)out,
                            .keep = (uint8_t *)out + 8192 + 8 * s->rows};
    return mz_select_pairs(c->kernels, 0, &a, c->scratch);
}

static mz_kstatus run_swiglu(calibration *c, const void *sizes, char *in, char *out) {
    const row_sizes *s = sizes;
    const mz_swiglu a = {
        .type = MZ_BF16, .rows = s->rows, .intermediate = s->cols, .gate_up = in, .h = out};
    return mz_swiglu_forward(c->kernels, 0, &a);
}

static mz_kstatus run_swiglu_back(calibration *c, const void *sizes, char *in, char *out) {
    const row_sizes *s = sizes;
    const mz_swiglu a = {.type = MZ_BF16,
                         .rows = s->rows,
                         .intermediate = s->cols,
                         .gate_up = in,
                         .dh = in + s->rows * s->cols * 2 * VALUE,
                         .dot = (float *)(void *)(out + s->rows * s->cols * 2 * VALUE),
                         .dgate_up = out};
    return mz_swiglu_backward(c->kernels, 0, &a);
}

/* As reductions convert: a gradient into a buffer that is used again and again, and back. */
static mz_kstatus run_convert(calibration *c, const void *sizes, char *in, char *out) {
    const row_sizes *s = sizes;
    const mz_kstatus status = mz_convert(c->kernels, 0, MZ_F32, c->scratch, MZ_BF16, out, s->cols);
    return status == MZ_K_OK ? mz_convert(c->kernels, 0, MZ_BF16, out, MZ_F32, c->scratch, s->cols)
                             : status;
}

static mz_kstatus run_zero(calibration *c, const void *sizes, char *in, char *out) {
    const row_sizes *s = sizes;
    return mz_kernels_zero(c->kernels, 0, out, (size_t)s->cols);
}

/* As reductions add: rows of one received buffer onto their place. */
static mz_kstatus run_add(calibration *c, const void *sizes, char *in, char *out) {
    enum { WIDTH = 1024 };
    const row_sizes *s = sizes;
    const mz_combine a = {.type = MZ_BF16,
                          .row = in,
                          .hidden = WIDTH,
                          .tokens = s->cols / WIDTH,
                          .k = 1,
                          .position = c->counting,
                          .accumulate = true,
                          .out = out};
    return mz_combine_rows(c->kernels, 0, &a);
}

/* Packed are norms, too, two bf16 wide. */
static const int64_t widths[] = {128, 512, 1024, 2048, 0}, single[] = {1, 0},
                     packed_widths[] = {2, 128, 512, 1024, 2048, 0}, experts[] = {8, 32, 128, 0};
static const int64_t lengths[] = {4096, 65536, 1 << 19, 1 << 22, 1 << 24, 0};
static const int64_t row_counts[] = {16, 128, 1024, 4096, 16384, 65536, 0};

static const row_kind row_kinds[] = {
    {MZ_WORK_GROUP_PAIRS, run_group, 0, 0, 0, 8, experts, 0, false},
    {MZ_WORK_ARRANGE, run_arrange, 0, 0, 0, 8, single, 0, false},
    {MZ_WORK_INVERT, run_invert, 0, 0, 0, 8, single, 0, false},
    {MZ_WORK_PACK, run_pack, VALUE, VALUE, VALUE, 0, widths, 0, true},
    {MZ_WORK_PACK, run_pack, VALUE, VALUE, VALUE, 0, packed_widths, SPREAD, true},
    {MZ_WORK_PACK_SCALED, run_pack_scaled, VALUE, VALUE, VALUE, 0, widths, 0, true},
    {MZ_WORK_PACK_SCALED, run_pack_scaled, VALUE, VALUE, VALUE, 0, widths, SPREAD, true},
    {MZ_WORK_GATHER, run_gather, VALUE, 0, VALUE, 0, widths, SPREAD, true},
    {MZ_WORK_COMBINE, run_combine, VALUE, VALUE, VALUE, 0, widths, 0, false},
    {MZ_WORK_ROW_NORMS, run_norms, VALUE, VALUE, 0, 4, widths, 0, false},
    {MZ_WORK_SCORE, run_score, 0, 0, 0, 4, single, 0, false},
    {MZ_WORK_SELECT, run_select, 0, 0, 0, 16, experts, 0, false},
    {MZ_WORK_SWIGLU_FORWARD, run_swiglu, 2 * VALUE, 2 * VALUE, VALUE, 0, widths, 0, false},
    {MZ_WORK_SWIGLU_BACKWARD, run_swiglu_back, 3 * VALUE, VALUE, 2 * VALUE, 4, widths, 0, false},
};
enum { ROW_KINDS = sizeof row_kinds / sizeof row_kinds[0], SAMPLES_MOST = 56, HEAD = 1 << 15 };

/* Segments of equal length for the selection, half of each kept. */
static mz_code set_segments(calibration *c, const row_sizes *s, mz_err *err) {
    int64_t begin[CALIBRATE_EXPERTS + 1], quota[CALIBRATE_EXPERTS];
    for (int64_t e = 0; e <= s->cols; e++)
        begin[e] = s->rows * e / s->cols;
    for (int64_t e = 0; e < s->cols; e++)
        quota[e] = (begin[e + 1] - begin[e]) / 2;
    if (mz_kernels_copy(c->kernels, 0, MZ_COPY_IN, c->begin, begin,
                        sizeof begin[0] * (size_t)(s->cols + 1)) != MZ_K_OK ||
        mz_kernels_copy(c->kernels, 0, MZ_COPY_IN, c->quota, quota,
                        sizeof quota[0] * (size_t)s->cols) != MZ_K_OK)
        return calibrate_failed(c, "selection", err);
    const mz_selection a = {.score = c->weight,
                            .order = c->counting,
                            .begin = c->begin,
                            .quota = c->quota,
                            .pairs = s->rows,
                            .experts = (int32_t)s->cols};
    return calibrate_scratch(c, mz_select_workspace(c->kernels, &a), err);
}

/* What an operation reads from the scratch. */
static mz_code set_scratch(calibration *c, const void *data, size_t bytes, const char *what,
                           mz_err *err) {
    const mz_code code = calibrate_scratch(c, bytes, err);
    if (code == MZ_OK &&
        (mz_kernels_copy(c->kernels, 0, MZ_COPY_IN, c->scratch, data, bytes) != MZ_K_OK ||
         mz_kernels_sync(c->kernels, 0) != MZ_K_OK))
        return calibrate_failed(c, what, err);
    return code;
}

/* As many equal segments, each to its own place. */
static mz_code set_arrangement(calibration *c, int64_t rows, mz_err *err) {
    mz_segment segment[SEGMENTS];
    const int64_t n = rows < SEGMENTS ? rows : SEGMENTS;
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = rows * i / n;
        segment[i] = (mz_segment){at, at, rows * (i + 1) / n - at};
    }
    return set_scratch(c, segment, sizeof segment[0] * (size_t)n, "arrangement", err);
}

/* The pair that row `row` is of before rows are ordered, ascending, and its expert. Tokens have
 * rows of all their k pairs, each of another part of the experts, or one of `spread` tokens of one.
 */
static int64_t draw_pair(mz_rng *rng, int64_t row, int32_t k, int64_t spread, int64_t *expert) {
    if (spread == 0) {
        *expert =
            row % k * (PACK_EXPERTS / k) + (int64_t)mz_rng_below(rng, PACK_EXPERTS / (uint64_t)k);
        return row;
    }
    const int64_t token = row * spread + (int64_t)mz_rng_below(rng, (uint64_t)spread);
    *expert = (int64_t)mz_rng_below(rng, PACK_EXPERTS);
    return token * k + (int64_t)mz_rng_below(rng, (uint64_t)k);
}

/* Pairs in the order in which a source sends their rows: by expert, of each in order of tokens. */
static mz_code set_packed(calibration *c, const row_sizes *s, int64_t spread, mz_err *err) {
    const size_t bytes = sizeof(int64_t) * (size_t)s->rows;
    const int32_t k = pairs_of_token(s);
    int64_t begin[PACK_EXPERTS + 1] = {0}, expert;
    int64_t *pair = malloc(bytes);
    if (!pair)
        return mz_fail_nomem(err, "calibration data");
    mz_rng rng = mz_rng_make(1, 8), again = rng;
    for (int64_t i = 0; i < s->rows; i++) {
        draw_pair(&rng, i, k, spread, &expert);
        begin[expert + 1]++;
    }
    for (int e = 0; e < PACK_EXPERTS; e++)
        begin[e + 1] += begin[e];
    for (int64_t i = 0; i < s->rows; i++) {
        const int64_t drawn = draw_pair(&again, i, k, spread, &expert);
        pair[begin[expert]++] = drawn;
    }
    const mz_code code = set_scratch(c, pair, bytes, "rows to pack", err);
    free(pair);
    return code;
}

/* One of SPREAD rows each, drawn by seed. */
static mz_code set_gathered(calibration *c, int64_t rows, mz_err *err) {
    const size_t bytes = sizeof(int64_t) * (size_t)rows;
    int64_t *row = malloc(bytes);
    if (!row)
        return mz_fail_nomem(err, "calibration data");
    mz_rng rng = mz_rng_make(1, 7);
    for (int64_t i = 0; i < rows; i++)
        row[i] = SPREAD * i + (int64_t)mz_rng_below(&rng, SPREAD);
    const mz_code code = set_scratch(c, row, bytes, "rows to gather", err);
    free(row);
    return code;
}

static mz_code prepare_kind(calibration *c, const row_kind *kind, const row_sizes *s, mz_err *err) {
    if (kind->work == MZ_WORK_SELECT)
        return set_segments(c, s, err);
    if (kind->work == MZ_WORK_ARRANGE)
        return set_arrangement(c, s->rows, err);
    if (kind->work == MZ_WORK_GATHER)
        return set_gathered(c, s->rows, err);
    if (kind->run == run_pack || kind->run == run_pack_scaled)
        return set_packed(c, s, kind->spread, err);
    if (kind->work != MZ_WORK_GROUP_PAIRS)
        return MZ_OK;
    const mz_grouping g = {.expert = c->expert, .pairs = s->rows, .experts = (int32_t)s->cols};
    mz_code code = calibrate_experts(c, (int32_t)s->cols, err);
    return code != MZ_OK ? code
                         : calibrate_scratch(c, mz_group_pairs_workspace(c->kernels, &g), err);
}

static mz_code sample_rows(calibration *c, const row_kind *kind, row_sizes s, mz_err *err) {
    s.tokens = kind->spread > 0 ? s.rows * kind->spread : s.rows / CALIBRATE_TOP_K;
    const int64_t inputs = (kind->of_tokens ? s.tokens : s.rows) * s.cols;
    const int64_t in = inputs * kind->in_value + HEAD;
    const int64_t out = s.rows * (s.cols * kind->out_value + kind->out_row) + HEAD;
    double seconds = 0;
    if (in > c->options.pool_bytes / 2 || out > c->options.pool_bytes / 2)
        return MZ_OK;
    const calibrate_call call = {.run = kind->run,
                                 .sizes = &s,
                                 .in_bytes = in,
                                 .out_bytes = out,
                                 .made_at = inputs * (kind->in_value - kind->made_value),
                                 .made_bytes = inputs * kind->made_value,
                                 .received = kind->work == MZ_WORK_COMBINE,
                                 .each_rank = true};
    mz_code code = prepare_kind(c, kind, &s, err);
    if (code == MZ_OK)
        code = calibrate_time(c, &call, &seconds, err);
    if (code == MZ_OK)
        calibrate_add(c, kind->work, (double)s.rows, (double)s.cols,
                      mz_work_bytes(kind->work, s.rows, s.cols, s.tokens), seconds);
    return code;
}

/* Positions of the pairs of tokens of which one in CALIBRATE_TOP_K has a row, drawn by seed. */
static mz_code set_positions(calibration *c, const row_sizes *s, mz_err *err) {
    const int64_t pairs = s->tokens * CALIBRATE_TOP_K;
    const size_t bytes = sizeof(int64_t) * (size_t)pairs;
    int64_t *position = malloc(bytes);
    if (!position)
        return mz_fail_nomem(err, "calibration data");
    mz_rng rng = mz_rng_make(1, 6);
    int64_t row = 0;
    for (int64_t p = 0; p < pairs; p++) /* of those left, as many as rows are left */
        position[p] =
            mz_rng_below(&rng, (uint64_t)(pairs - p)) < (uint64_t)(s->rows - row) ? row++ : -1;
    const mz_code code = set_scratch(c, position, bytes, "sums of tokens", err);
    free(position);
    return code;
}

static mz_code sample_combine_some(calibration *c, int64_t rows, int64_t cols, mz_err *err) {
    const row_sizes s = {rows, cols, rows};
    const int64_t bytes = rows * cols * VALUE;
    double seconds = 0;
    if (bytes > c->options.pool_bytes / 2)
        return MZ_OK;
    const calibrate_call call = {.run = run_combine_some,
                                 .sizes = &s,
                                 .in_bytes = bytes,
                                 .out_bytes = bytes,
                                 .made_bytes = bytes,
                                 .received = true,
                                 .each_rank = true};
    mz_code code = set_positions(c, &s, err);
    if (code == MZ_OK)
        code = calibrate_time(c, &call, &seconds, err);
    if (code == MZ_OK)
        calibrate_add(c, MZ_WORK_COMBINE, (double)rows, (double)cols,
                      mz_work_bytes(MZ_WORK_COMBINE, rows, cols, s.tokens), seconds);
    return code;
}

/* Bytes of a value: in the pools, and of scratch. */
typedef struct length_kind {
    mz_work work;
    calibrate_run run;
    int64_t in, out, scratch;
    int calls; /* of the kernel in a run */
} length_kind;

static const length_kind length_kinds[] = {
    {MZ_WORK_CONVERT, run_convert, 0, VALUE, 4, 2},
    {MZ_WORK_ADD, run_add, VALUE, VALUE, 0, 1},
    {MZ_WORK_ZERO, run_zero, 0, 1, 0, 1},
};
enum { LENGTH_KINDS = sizeof length_kinds / sizeof length_kinds[0] };

static mz_code sample_lengths(calibration *c, const length_kind *kind, mz_err *err) {
    mz_code code = calibrate_begin(c, kind->work, SAMPLES_MOST, err);
    for (const int64_t *n = lengths; code == MZ_OK && *n; n++) {
        const row_sizes s = {1, *n, 0};
        const calibrate_call call = {.run = kind->run,
                                     .sizes = &s,
                                     .in_bytes = kind->in * *n,
                                     .out_bytes = kind->out * *n,
                                     .made_bytes = kind->in * *n,
                                     .received = true,
                                     .each_rank = true};
        double seconds = 0;
        if ((kind->in + kind->out + kind->scratch) * *n > c->options.pool_bytes)
            break;
        code = calibrate_scratch(c, (size_t)(kind->scratch * *n), err);
        if (code == MZ_OK)
            code = calibrate_time(c, &call, &seconds, err);
        if (code == MZ_OK)
            calibrate_add(c, kind->work, 1, (double)*n, mz_work_bytes(kind->work, 1, *n, 0),
                          seconds / kind->calls);
    }
    return code;
}

mz_code calibrate_rows(calibration *c, mz_err *err) {
    mz_code code = MZ_OK;
    for (int i = 0; code == MZ_OK && i < ROW_KINDS; i++) {
        const row_kind *kind = &row_kinds[i];
        code = calibrate_begin(c, kind->work, SAMPLES_MOST, err);
        for (const int64_t *cols = kind->cols; code == MZ_OK && *cols; cols++)
            for (const int64_t *rows = row_counts; code == MZ_OK && *rows; rows++)
                code = sample_rows(c, kind, (row_sizes){*rows, *cols, 0}, err);
    }
    for (const int64_t *cols = widths; code == MZ_OK && *cols; cols++)
        for (const int64_t *rows = row_counts; code == MZ_OK && *rows; rows++)
            code = sample_combine_some(c, *rows, *cols, err);
    for (int i = 0; code == MZ_OK && i < LENGTH_KINDS; i++)
        code = sample_lengths(c, &length_kinds[i], err);
    return code;
}
