#include "replay/calibrate_inside.h"

#include "common/base/rng.h"
#include "common/base/stat.h"
#include "replay/kernel_code.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

mz_calibration_options mz_calibration_defaults(void) {
    return (mz_calibration_options){.rounds = 7, .limit_s = 110, .pool_bytes = INT64_C(256) << 20};
}

mz_code calibrate_failed(calibration *c, const char *what, mz_err *err) {
    if (c->exchange_err.code != MZ_OK)
        *err = c->exchange_err;
    else
        mz_kernel_code(c->kernels, mz_kernels_failure(c->kernels), err);
    return mz_err_prefix(err, "calibration of %s", what);
}

mz_code calibrate_scratch(calibration *c, size_t bytes, mz_err *err) {
    if (bytes <= c->scratch_bytes)
        return MZ_OK;
    mz_kernels_free(c->kernels, c->scratch);
    c->scratch = NULL;
    c->scratch_bytes = 0;
    if (mz_kernels_alloc(c->kernels, bytes, &c->scratch) != MZ_K_OK)
        return calibrate_failed(c, "an operation's scratch", err);
    c->scratch_bytes = bytes;
    return MZ_OK;
}

/* The next part of a pool; parts follow each other and start again at its front. */
static char *next_part(const calibration *c, char *pool, int64_t *at, int64_t bytes) {
    const int64_t size = (bytes + 255) / 256 * 256;
    if (*at + size > c->options.pool_bytes)
        *at = 0;
    char *part = pool + *at;
    *at += size;
    return part;
}

/* The same of blocks, where it fits one and there are any. */
static char *next_short(const calibration *c, calibrate_blocks *b, int64_t bytes) {
    const int64_t size = (bytes + 255) / 256 * 256;
    if (c->blocks == 0 || size > CALIBRATE_BLOCK)
        return NULL;
    if (b->at % CALIBRATE_BLOCK + size > CALIBRATE_BLOCK)
        b->at += CALIBRATE_BLOCK - b->at % CALIBRATE_BLOCK;
    char *part = b->block[b->at / CALIBRATE_BLOCK % c->blocks] + b->at % CALIBRATE_BLOCK;
    b->at += size;
    return part;
}

static char *next_input(calibration *c, int64_t bytes) {
    char *part = next_short(c, &c->short_inputs, bytes);
    return part ? part : next_part(c, c->inputs, &c->input_at, bytes);
}

static char *next_result(calibration *c, int64_t bytes) {
    char *part = next_short(c, &c->short_results, bytes);
    return part ? part : next_part(c, c->results, &c->result_at, bytes);
}

/* Beyond so much memory nothing is left of it in any cache. */
enum { CACHED_MOST = 64 << 20, TOGETHER_MOST = 16 };

/* Calls that are timed together: a phase has one for every rank of the process. */
static int32_t together(const calibration *c, const calibrate_call *call) {
    const int64_t local = c->transport->end - c->transport->first;
    int64_t n = CACHED_MOST / (call->in_bytes + call->made_bytes + call->out_bytes + 1);
    n = n < local ? n : local;
    n = n < TOGETHER_MOST ? n : TOGETHER_MOST;
    return call->each_rank && n > 1 ? (int32_t)n : 1;
}

/* Copies rows as a kernel of the step writes them. */
static mz_kstatus pass_kernel(calibration *c, char *to, const char *from, int64_t bytes) {
    enum { WIDTH = 128, ROW = 2 * WIDTH };
    const mz_pack p = {.type = MZ_BF16,
                       .x = from,
                       .hidden = WIDTH,
                       .rows = bytes / ROW,
                       .row_pair = c->counting,
                       .k = 1,
                       .out = to};
    return mz_pack_rows(c->kernels, 0, &p);
}

/* The same as messages of an exchange bring them. */
static mz_kstatus pass_messages(calibration *c, char *to, const char *from, int64_t bytes) {
    enum { MESSAGE = 32 << 10 };
    mz_kstatus status = MZ_K_OK;
    for (int64_t at = 0; status == MZ_K_OK && at < bytes; at += MESSAGE)
        status = mz_kernels_copy(c->kernels, 0, MZ_COPY_INSIDE, to + at, from + at,
                                 (size_t)(bytes - at < MESSAGE ? bytes - at : MESSAGE));
    return status;
}

/* What the call finds of its input where it has just been written, from rows that lie elsewhere. */
static mz_kstatus make_input(calibration *c, const calibrate_call *call, char *in) {
    enum { UNIT = 256 };
    const int64_t begin = (call->made_at + UNIT - 1) / UNIT * UNIT;
    const int64_t bytes = (call->made_at + call->made_bytes) / UNIT * UNIT - begin;
    if (bytes <= 0 || bytes > CACHED_MOST || bytes > c->options.pool_bytes / 4)
        return MZ_K_OK;
    const char *from = next_input(c, bytes);
    const mz_kstatus status =
        (call->received ? pass_messages : pass_kernel)(c, in + begin, from, bytes);
    return status == MZ_K_OK ? mz_kernels_sync(c->kernels, 0) : status;
}

/* The mean of some calls, each waited for as in a replay. */
static mz_kstatus time_together(calibration *c, const calibrate_call *call, double *seconds) {
    const int32_t n = together(c, call);
    char *in[TOGETHER_MOST], *out[TOGETHER_MOST];
    mz_kstatus status = MZ_K_OK;
    for (int32_t i = 0; status == MZ_K_OK && i < n; i++) {
        in[i] = next_input(c, call->in_bytes);
        out[i] = next_result(c, call->out_bytes);
        status = make_input(c, call, in[i]);
    }
    if (status == MZ_K_OK && call->bind)
        status = call->bind(c, call->sizes, in[0], out[0]);
    double sum = 0;
    for (int32_t i = 0; status == MZ_K_OK && i < n; i++) {
        if (call->each_rank)
            mz_probe_work_alone();
        const double start = mz_now();
        status = call->run(c, call->sizes, in[i], out[i]);
        if (status == MZ_K_OK)
            status = mz_kernels_sync(c->kernels, 0);
        sum += mz_now() - start;
    }
    *seconds = sum / n;
    return status;
}

/* Calls of one sample, the first of all warms up. Small ones, which a stray interrupt hits hardest,
 * thrice; the number depends on sizes alone, as calls may be collective. */
static mz_code time_calls(calibration *c, const calibrate_call *call, double *seconds,
                          mz_err *err) {
    enum { SMALL = 1 << 20, CALLS = 3 };
    const int calls = call->in_bytes + call->out_bytes <= SMALL ? CALLS : 1;
    double times[CALLS];
    for (int i = c->round == 0 ? -1 : 0; i < calls; i++)
        if (time_together(c, call, i < 0 ? &times[0] : &times[i]) != MZ_K_OK)
            return calibrate_failed(c, "a sample", err);
    mz_sort(times, calls);
    *seconds = times[calls / 2];
    return MZ_OK;
}

mz_code calibrate_go_on(const calibration *c, mz_err *err) {
    return c->app->stop && *c->app->stop ? mz_fail(err, MZ_EABORTED, "interrupted") : MZ_OK;
}

mz_code calibrate_sample(calibration *c, const calibrate_call *call, double *seconds, mz_err *err) {
    const int32_t local = c->transport->end - c->transport->first;
    double own = 0, sum = 0;
    if (call->in_bytes > c->options.pool_bytes || call->out_bytes > c->options.pool_bytes)
        return mz_fail(err, MZ_EINTERNAL, "a sample larger than the pools");
    mz_code code = mz_transport_barrier(c->transport, err);
    if (code == MZ_OK)
        code = calibrate_go_on(c, err);
    if (code == MZ_OK)
        code = time_calls(c, call, &own, err);
    if (code != MZ_OK)
        return code;
    for (int32_t r = 0; r < local; r++)
        c->mine[r] = own;
    code = mz_transport_gather(c->transport, c->mine, sizeof *c->mine, c->all, err);
    for (int32_t r = 0; r < c->transport->ranks; r++)
        sum += c->all[r];
    *seconds = sum / c->transport->ranks;
    return code == MZ_OK ? calibrate_note_lag(c, err) : code;
}

/* The probes stand among the samples, one after the other in turn. */
mz_code calibrate_time(calibration *c, const calibrate_call *call, double *seconds, mz_err *err) {
    enum { PROBE_EVERY = 6 };
    const int64_t turn = c->calls++;
    const mz_code code = turn % PROBE_EVERY == 0
                             ? calibrate_probe(c, (mz_speed)(turn / PROBE_EVERY % MZ_SPEEDS), err)
                             : MZ_OK;
    return code == MZ_OK ? calibrate_sample(c, call, seconds, err) : code;
}

static mz_fit *fit_of(calibration *c, int kind) {
    return kind >= MZ_WORKS ? &c->beside[kind - MZ_WORKS] : &c->measured->fit[kind];
}

/* Products of several shapes may be cut into the same tiles, updates come several times a round: so
 * many values at most. */
enum { SHAPES_OF_SAMPLE = 16 };

mz_code calibrate_begin(calibration *c, int kind, int32_t most, mz_err *err) {
    mz_fit *fit = fit_of(c, kind);
    if (fit->sample)
        return MZ_OK;
    calibrate_series *s = &c->series[kind];
    *fit = (mz_fit){.sample = MZ_NEW(c->arena, mz_fit_sample, most)};
    const int32_t each = SHAPES_OF_SAMPLE * c->options.rounds;
    *s = (calibrate_series){.value = MZ_NEW(c->arena, double, (int64_t)most *each),
                            .count = MZ_NEW(c->arena, int32_t, most),
                            .most = most,
                            .each = each};
    return fit->sample && s->value && s->count ? MZ_OK : mz_fail_nomem(err, "samples");
}

/* A later round may add a sample that an earlier one left out, and leave out one that was there. */
void calibrate_add(calibration *c, int kind, double a, double b, double bytes, double seconds) {
    mz_fit *fit = fit_of(c, kind);
    calibrate_series *s = &c->series[kind];
    int32_t i = 0;
    while (i < fit->samples && (fit->sample[i].size[0] != a || fit->sample[i].size[1] != b ||
                                fit->sample[i].size[2] != bytes))
        i++;
    if (i == s->most)
        return;
    if (i == fit->samples)
        fit->sample[fit->samples++] = (mz_fit_sample){.size = {a, b, bytes}};
    if (s->count[i] < s->each)
        s->value[(int64_t)i * s->each + s->count[i]++] = seconds > 1e-9 ? seconds : 1e-9;
}

double calibrate_mean(calibration *c, int kind, int32_t i) {
    const calibrate_series *s = &c->series[kind];
    return mz_middle_mean(s->value + (int64_t)i * s->each, s->count[i], s->count[i] >= 3);
}

static void finish_series(calibration *c, int kind) {
    mz_fit *fit = fit_of(c, kind);
    for (int32_t i = 0; i < fit->samples; i++)
        fit->sample[i].seconds = calibrate_mean(c, kind, i);
}

enum { PIECE = 1 << 16, PIECE_BYTES = PIECE * 2 };

static mz_kstatus fill(const calibration *c, char *to, int64_t bytes, const uint16_t *piece) {
    mz_kstatus status = MZ_K_OK;
    for (int64_t at = 0; status == MZ_K_OK && at + PIECE_BYTES <= bytes; at += PIECE_BYTES) {
        status = mz_kernels_copy(c->kernels, 0, MZ_COPY_IN, to + at, piece, PIECE_BYTES);
        if (status == MZ_K_OK)
            status = mz_kernels_sync(c->kernels, 0);
    }
    return status;
}

/* bf16 values in +-1 over the whole input memory: read as fp32 they are finite as well. */
static mz_code fill_inputs(calibration *c, mz_err *err) {
    uint16_t *piece = malloc(PIECE_BYTES);
    if (!piece)
        return mz_fail_nomem(err, "calibration data");
    mz_rng rng = mz_rng_make(1, 1);
    for (int32_t i = 0; i < PIECE; i++)
        piece[i] = mz_probe_operand(&rng);
    mz_kstatus status = fill(c, c->inputs, c->options.pool_bytes, piece);
    for (int32_t i = 0; status == MZ_K_OK && i < c->blocks; i++)
        status = fill(c, c->short_inputs.block[i], CALIBRATE_BLOCK, piece);
    free(piece);
    return status == MZ_K_OK ? MZ_OK : calibrate_failed(c, "its data", err);
}

mz_code calibrate_experts(calibration *c, int32_t experts, mz_err *err) {
    const size_t bytes = CALIBRATE_PAIRS * sizeof(int32_t);
    int32_t *expert = malloc(bytes);
    if (!expert)
        return mz_fail_nomem(err, "calibration data");
    mz_rng rng = mz_rng_make(1, 3);
    for (size_t i = 0; i < CALIBRATE_PAIRS; i++)
        expert[i] = (int32_t)mz_rng_below(&rng, (uint64_t)experts);
    const bool copied =
        mz_kernels_copy(c->kernels, 0, MZ_COPY_IN, c->expert, expert, bytes) == MZ_K_OK &&
        mz_kernels_sync(c->kernels, 0) == MZ_K_OK;
    free(expert);
    return copied ? MZ_OK : calibrate_failed(c, "its lists", err);
}

static mz_code make_lists(calibration *c, mz_err *err) {
    const size_t n = CALIBRATE_PAIRS;
    int64_t *shuffled = MZ_NEW(c->arena, int64_t, n), *counting = MZ_NEW(c->arena, int64_t, n);
    float *weight = MZ_NEW(c->arena, float, n);
    if (!shuffled || !counting || !weight)
        return mz_fail_nomem(err, "calibration data");
    mz_rng rng = mz_rng_make(1, 2);
    for (size_t i = 0; i < n; i++) {
        const size_t other = mz_rng_u32(&rng) % (i + 1);
        counting[i] = (int64_t)i;
        shuffled[i] = shuffled[other];
        shuffled[other] = (int64_t)i;
        weight[i] = (float)(mz_rng_u32(&rng) >> 8) / (float)(1 << 24);
    }
    const struct {
        void **to;
        const void *from;
        size_t bytes;
    } list[] = {{(void **)&c->counting, counting, n * sizeof *counting},
                {(void **)&c->shuffled, shuffled, n * sizeof *shuffled},
                {(void **)&c->expert, counting, n * sizeof *c->expert},
                {(void **)&c->weight, weight, n * sizeof *weight},
                {(void **)&c->begin, counting, (CALIBRATE_EXPERTS + 1) * sizeof *c->begin},
                {(void **)&c->quota, counting, CALIBRATE_EXPERTS * sizeof *c->quota}};
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)
        if (mz_kernels_alloc(c->kernels, list[i].bytes, list[i].to) != MZ_K_OK ||
            mz_kernels_copy(c->kernels, 0, MZ_COPY_IN, *list[i].to, list[i].from, list[i].bytes) !=
                MZ_K_OK)
            return calibrate_failed(c, "its lists", err);
    return mz_kernels_sync(c->kernels, 0) == MZ_K_OK ? MZ_OK
                                                     : calibrate_failed(c, "its lists", err);
}

static mz_kstatus take_memory(calibration *c) {
    const int64_t bytes = c->options.pool_bytes, most = bytes / 2 / CALIBRATE_BLOCK;
    mz_kernels *k = c->kernels;
    mz_kstatus status = mz_kernels_alloc(k, (size_t)bytes, (void **)&c->inputs);
    if (status == MZ_K_OK)
        status = mz_kernels_alloc(k, (size_t)bytes, (void **)&c->results);
    if (status == MZ_K_OK)
        status = mz_kernels_zero(k, 0, c->results, (size_t)bytes);
    /* In a single one the part of a call would lie in that of the call before. */
    c->blocks = most < 2 ? 0 : most < CALIBRATE_BLOCKS ? (int32_t)most : CALIBRATE_BLOCKS;
    for (int32_t i = 0; status == MZ_K_OK && i < c->blocks; i++) {
        status = mz_kernels_alloc(k, CALIBRATE_BLOCK, (void **)&c->short_inputs.block[i]);
        if (status == MZ_K_OK)
            status = mz_kernels_alloc(k, CALIBRATE_BLOCK, (void **)&c->short_results.block[i]);
        if (status == MZ_K_OK)
            status = mz_kernels_zero(k, 0, c->short_results.block[i], CALIBRATE_BLOCK);
    }
    return status;
}

static mz_code prepare(calibration *c, mz_err *err) {
    c->all = MZ_NEW(c->arena, double, c->transport->ranks);
    c->mine = MZ_NEW(c->arena, double, c->transport->end - c->transport->first);
    c->stretch = MZ_NEW(c->arena, double, c->transport->processes);
    if (!c->all || !c->mine || !c->stretch)
        return mz_fail_nomem(err, "calibration");
    if (take_memory(c) != MZ_K_OK)
        return calibrate_failed(c, "its pools", err);
    mz_code code = fill_inputs(c, err);
    if (code == MZ_OK)
        code = make_lists(c, err);
    const mz_probe_room room = {c->inputs, c->results, c->options.pool_bytes};
    return code == MZ_OK ? mz_probe_create(c->kernels, c->transport, &room, &c->probe, err) : code;
}

/* Updates are few and follow each other closely, so they are spread over a round. */
static mz_code one_round(calibration *c, mz_err *err) {
    mz_code code = calibrate_updates(c, err);
    if (code == MZ_OK)
        code = calibrate_products(c, err);
    if (code == MZ_OK)
        code = calibrate_updates(c, err);
    if (code == MZ_OK)
        code = calibrate_rows(c, err);
    if (code == MZ_OK)
        code = calibrate_updates(c, err);
    if (code == MZ_OK)
        code = calibrate_copies(c, err);
    return code == MZ_OK ? calibrate_wire(c, err) : code;
}

static mz_code fit_all(calibration *c, mz_wire *wire, mz_err *err) {
    mz_fit *message = &c->beside[CALIBRATE_WIRE - MZ_WORKS];
    mz_code code = MZ_OK;
    for (int kind = 0; kind < CALIBRATE_KINDS; kind++)
        finish_series(c, kind);
    for (int w = 0; code == MZ_OK && w < MZ_WORKS; w++)
        if (c->measured->fit[w].samples > 0)
            code = mz_fit_terms(&c->measured->fit[w], (mz_work)w, err);
    if (code == MZ_OK)
        code = mz_fit_terms(message, MZ_WORK_ZERO, err); /* fixed and bytes */
    wire->latency_s = message->term[0];
    wire->bytes_per_s = message->term[2] > 0 ? 1 / message->term[2] : 1e12;
    calibrate_alone(c);
    calibrate_references(c);
    return code;
}

typedef mz_code (*calibrate_round)(calibration *c, mz_err *err);

/* On a busy machine rounds take longer; fewer of them are still a profile. The first process says
 * so to all, by its clock and its limit. */
static mz_code want_round(calibration *c, double longest, bool *want, mz_err *err) {
    enum { ROUNDS_LEAST = 3 };
    *want = c->round < c->options.rounds;
    if (!*want || c->round < ROUNDS_LEAST)
        return MZ_OK;
    for (int32_t r = 0; r < c->transport->end - c->transport->first; r++)
        c->mine[r] = c->spent_s + longest <= c->options.limit_s;
    const mz_code code = mz_transport_gather(c->transport, c->mine, sizeof *c->mine, c->all, err);
    *want = code == MZ_OK && c->all[0] > 0;
    return code;
}

static void say_rounds(const calibration *c) {
    if (c->transport->process > 0)
        return;
    if (c->round == c->options.rounds)
        mz_info(&c->app->log, "measured %d of %d rounds in %.0f s", c->round, c->options.rounds,
                c->spent_s);
    else
        mz_info(&c->app->log,
                "measured %d of %d rounds in %.0f s; the next one would have ended after more than "
                "%g s",
                c->round, c->options.rounds, c->spent_s, c->options.limit_s);
}

static mz_code in_rounds(calibration *c, calibrate_round round, mz_err *err) {
    const double start = mz_now();
    double longest = 0;
    bool want = true;
    mz_progress progress =
        mz_progress_start(&c->app->log, "measuring", "rounds", c->options.rounds);
    mz_code code = prepare(c, err);
    while (code == MZ_OK && want) {
        const double begin = mz_now();
        code = round(c, err);
        longest = fmax(longest, mz_now() - begin);
        c->spent_s = mz_now() - start;
        mz_progress_update(&progress, ++c->round);
        if (code == MZ_OK)
            code = want_round(c, longest, &want, err);
    }
    mz_progress_end(&progress);
    if (code == MZ_OK)
        say_rounds(c);
    return code;
}

static void release(calibration *c) {
    void *const all[] = {c->inputs,   c->results, c->scratch, c->counting, c->expert,
                         c->shuffled, c->weight,  c->begin,   c->quota};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        mz_kernels_free(c->kernels, all[i]);
    for (int32_t i = 0; i < c->blocks; i++) {
        mz_kernels_free(c->kernels, c->short_inputs.block[i]);
        mz_kernels_free(c->kernels, c->short_results.block[i]);
    }
    mz_probe_free(&c->probe);
    for (int k = 0; k < MZ_SPEEDS; k++)
        free(c->probed[k].value);
    free(c->lag.value);
}

mz_code mz_calibrate(mz_kernels *kernels, mz_transport *transport,
                     const mz_calibration_options *options, mz_app *app, mz_arena *arena,
                     mz_measured *measured, mz_wire *wire, mz_err *err) {
    calibration c = {.kernels = kernels,
                     .transport = transport,
                     .options = *options,
                     .app = app,
                     .arena = arena,
                     .measured = measured};
    measured->processes = transport->processes;
    mz_code code = in_rounds(&c, one_round, err);
    measured->rounds = c.round;
    measured->spent_s = c.spent_s;
    if (code == MZ_OK)
        code = fit_all(&c, wire, err);
    release(&c);
    return code;
}

mz_code mz_calibrate_speed(mz_kernels *kernels, mz_transport *transport,
                           const mz_calibration_options *options, mz_app *app, mz_arena *arena,
                           mz_measured *now, mz_err *err) {
    calibration c = {.kernels = kernels,
                     .transport = transport,
                     .options = *options,
                     .app = app,
                     .arena = arena,
                     .measured = now};
    const mz_code code = in_rounds(&c, calibrate_pieces, err);
    if (code == MZ_OK)
        calibrate_references(&c);
    release(&c);
    return code;
}
