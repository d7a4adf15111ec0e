/* Calibration: fits recover what made the samples, and a small run on the host measures every kind
 * there is. */
#include "kernels/backend.h"
#include "replay/calibrate_inside.h"
#include "sim/model/optimizer.h"
#include "common/base/rng.h"
#include "tests/replay/small_machine.h"

#include <math.h>
#include <stdlib.h>

static void near(double value, double wanted, double off) {
    if (!(fabs(value - wanted) <= off * fabs(wanted)))
        fail_msg("%.17g instead of %.17g", value, wanted);
}

/* Samples of known terms, without noise: the terms come back. */
static void fits_recover_terms(void **state) {
    (void)state;
    static const double wanted[2][MZ_FIT_TERMS] = {{1e-6, 2e-8, 3e-10}, {1e-6, 2e-10, 0, 4e-12}};
    static const mz_work works[2] = {MZ_WORK_PACK, MZ_WORK_FORWARD};
    mz_rng rng = mz_rng_make(7, 1);
    for (int w = 0; w < 2; w++) {
        mz_fit_sample sample[40] = {0};
        mz_fit fit = {.samples = 40, .sample = sample};
        mz_err err;
        for (int i = 0; i < 40; i++) {
            double feature[MZ_FIT_TERMS] = {0};
            for (int k = 0; k < MZ_FIT_SIZES; k++)
                sample[i].size[k] = 1 + floor(exp(8 * mz_rng_uniform(&rng)));
            const int32_t terms = mz_fit_features(works[w], sample[i].size, feature);
            for (int t = 0; t < terms; t++)
                sample[i].seconds += wanted[w][t] * feature[t];
        }
        assert_ok(mz_fit_terms(&fit, works[w], &err), &err);
        for (int t = 0; t < 4 && wanted[w][t] > 0; t++)
            near(fit.term[t], wanted[w][t], 1e-6);
        for (int i = 0; i < 40; i++)
            near(sample[i].ratio, 1, 1e-6);
    }
}

/* A term that would be negative is left out; the correction still gives the samples back. */
static void terms_are_not_negative(void **state) {
    (void)state;
    mz_fit_sample sample[12] = {0};
    mz_fit fit = {.samples = 12, .sample = sample};
    mz_err err;
    for (int i = 0; i < 12; i++) {
        sample[i].size[0] = 1 + 10 * i;
        sample[i].size[1] = 1;
        sample[i].size[2] = 1 + (i * 37 % 100);
        sample[i].seconds = 1 + 2e-3 * sample[i].size[2] - 5e-3 * sample[i].size[0];
    }
    assert_ok(mz_fit_terms(&fit, MZ_WORK_PACK, &err), &err);
    for (int t = 0; t < 3; t++)
        assert_true(fit.term[t] >= 0);
    assert_true(fit.term[1] == 0);
    for (int i = 0; i < 12; i++)
        near(mz_fit_seconds(&fit, MZ_WORK_PACK, sample[i].size), sample[i].seconds, 1e-12);
}

static void one_sample_is_a_rate(void **state) {
    (void)state;
    mz_fit_sample sample = {.size = {4, 5, 60}, .seconds = 3};
    mz_fit fit = {.samples = 1, .sample = &sample};
    mz_err err;
    assert_ok(mz_fit_terms(&fit, MZ_WORK_PACK, &err), &err);
    near(fit.term[2], 0.05, 1e-12);
    near(mz_fit_seconds(&fit, MZ_WORK_PACK, (const double[3]){8, 5, 120}), 6, 1e-12);
}

/* Of so many columns and bytes a row? */
static bool has_sample(const mz_fit *fit, double cols, double bytes) {
    for (int32_t i = 0; i < fit->samples; i++)
        if (fit->sample[i].size[1] == cols &&
            fit->sample[i].size[2] == bytes * fit->sample[i].size[0])
            return true;
    return false;
}

/* Two processes of two ranks: 12 + 12 + 12 ms against 10 + 20 + 0 are a stretch of 33 in the mean,
 * then 30 against 50 one of 40; 1 against 2 are none yet. */
static void the_slower_process_lags(void **state) {
    static const double sample[][2] = {{12, 10}, {12, 20}, {12, 0}, {30, 50}, {1, 2}};
    double all[4], stretch[2] = {0};
    mz_transport transport = {.ranks = 4, .processes = 2};
    calibration c = {.transport = &transport, .all = all, .stretch = stretch};
    mz_err err;
    for (size_t i = 0; i < sizeof sample / sizeof sample[0]; i++) {
        for (int r = 0; r < 4; r++)
            all[r] = 1e-3 * sample[i][r / 2];
        assert_ok(calibrate_note_lag(&c, &err), &err);
    }
    assert_int_equal(c.lag.count, 2);
    near(c.lag.value[0], 36.0 / 33 - 1, 1e-12);
    near(c.lag.value[1], 0.25, 1e-12);
    near(stretch[1], 2e-3, 1e-12);
    free(c.lag.value);
}

/* ---- what a sample calls -----------------------------------------------------------------------
 */

/* A context whose table notes: c, p: an input is made by a copy, by a kernel; b, r: bound, run. */
typedef struct noting {
    mz_backend_ops ops; /* first: a context's table is this */
    const mz_backend_ops *real;
    char happened[256];
    int64_t count, made_bytes;
    char *part[64], *made_to;
    int64_t parts;
} noting;

static noting noted;

static void note(char what) {
    assert_true(noted.count < (int64_t)sizeof noted.happened - 1);
    noted.happened[noted.count++] = what;
}

static mz_kstatus noted_copy(mz_kernels *k, mz_kstream stream, mz_copy kind, void *to,
                             const void *from, size_t bytes) {
    assert_int_equal(kind, MZ_COPY_INSIDE);
    note('c');
    noted.made_to = noted.made_bytes == 0 ? to : noted.made_to;
    noted.made_bytes += (int64_t)bytes;
    return noted.real->copy(k, stream, kind, to, from, bytes);
}

static mz_kstatus noted_pack(mz_kernels *k, mz_kstream stream, const mz_pack *a) {
    note('p');
    noted.made_to = a->out;
    noted.made_bytes += a->rows * a->hidden * 2;
    return noted.real->pack_rows(k, stream, a);
}

static mz_kstatus noted_bind(calibration *c, const void *sizes, char *in, char *out) {
    note('b');
    return MZ_K_OK;
}

static mz_kstatus noted_run(calibration *c, const void *sizes, char *in, char *out) {
    note('r');
    noted.part[noted.parts++] = in;
    return MZ_K_OK;
}

/* What happens in one round's sample of a process with three ranks. */
static void sample(calibrate_call call, int32_t round, const char *wanted) {
    enum { POOL = 4 << 20, LIST = 1 << 14 };
    double mine[3], all[3], seconds = 0;
    mz_err err;
    mz_transport *transport = NULL;
    mz_kernels *kernels = NULL;
    mz_app app = {0};
    const mz_transport_options to = {.name = "local", .ranks = 3, .timeout_s = 10};
    const mz_kernels_options ko = {.backend = MZ_BACKEND_HOST, .threads = 1, .streams = 1};
    assert_ok(mz_transport_open(&to, &transport, &err), &err);
    assert_int_equal(mz_kernels_open(&ko, &kernels, NULL, 0), MZ_K_OK);
    calibration c = {.kernels = kernels,
                     .transport = transport,
                     .options = {.rounds = 3, .pool_bytes = POOL},
                     .app = &app,
                     .round = round,
                     .inputs = calloc(1, POOL),
                     .results = calloc(1, POOL),
                     .counting = calloc(LIST, sizeof(int64_t)),
                     .mine = mine,
                     .all = all};
    assert_true(c.inputs && c.results && c.counting);
    for (int64_t i = 0; i < LIST; i++)
        c.counting[i] = i;
    noted = (noting){.ops = *kernels->ops, .real = kernels->ops};
    noted.ops.copy = noted_copy;
    noted.ops.pack_rows = noted_pack;
    kernels->ops = &noted.ops;
    call.run = noted_run;
    assert_ok(calibrate_sample(&c, &call, &seconds, &err), &err);
    assert_string_equal(noted.happened, wanted);
    kernels->ops = noted.real;
    free(c.inputs);
    free(c.results);
    free(c.counting);
    mz_kernels_close(&kernels);
    mz_transport_close(&transport);
}

/* Rows that every rank of a process has: all inputs are made, then each call comes on its own part,
 * small ones thrice, once more where nothing is warm yet. What is made are whole lines of 256 bytes
 * of what was asked for. */
static void samples_as_phases_run(void **state) {
    const calibrate_call rows = {.in_bytes = 70000,
                                 .out_bytes = 1000,
                                 .made_at = 300,
                                 .made_bytes = 69000,
                                 .each_rank = true};
    calibrate_call received = rows, alone = rows, long_one = rows, huge = rows;
    sample(rows, 1, "ppprrrppprrrppprrr");
    assert_int_equal(noted.made_bytes, 9 * (69300 / 256 * 256 - 512));
    assert_true(noted.part[0] != noted.part[1] && noted.part[1] != noted.part[2]);
    assert_true(noted.made_to == noted.part[8] + 512);
    sample(rows, 0, "ppprrrppprrrppprrrppprrr");
    /* Messages of 32 KiB. */
    received.received = true;
    sample(received, 1, "cccccccccrrrcccccccccrrrcccccccccrrr");
    assert_int_equal(noted.made_bytes, 9 * (69300 / 256 * 256 - 512));
    /* No rank's: call by call, bound when its input is made. */
    alone.each_rank = false;
    alone.bind = noted_bind;
    sample(alone, 1, "pbrpbrpbr");
    /* Once where it takes long; what is more than a quarter of the pool is left as it lies. */
    long_one.in_bytes = 3 << 19;
    sample(long_one, 1, "ppprrr");
    huge.in_bytes = huge.made_bytes = 3 << 19;
    huge.made_at = 0;
    sample(huge, 1, "rrr");
}

/* What an exchange among the samples said, not what kernels did not say. */
static void a_failed_exchange_has_its_error(void **state) {
    (void)state;
    calibration c = {0};
    mz_err err;
    mz_fail(&c.exchange_err, MZ_ENOMEM, "no memory for lanes");
    assert_fails(calibrate_failed(&c, "a sample", &err), MZ_ENOMEM,
                 "calibration of a sample: no memory for lanes", &err);
}

/* Rows copied one by one, the last ones: inputs that samples make, rows that are gathered. */
enum { NOTED_COPIES = 64, PACKED_MOST = 1 << 18, EACH_MOST = 4, PACKED_POOL = 1 << 20 };
static struct {
    const void *to;
    int64_t bytes;
} copied[NOTED_COPIES];
static int64_t copies, packs[2][EACH_MOST + 1]; /* with weights or not, by rows of a token */
static int64_t sent;                            /* messages from the front of what was made last */

/* Of what is packed there, all has just been written, unless it is too much or too little. */
static void is_made(const void *x, int64_t bytes) {
    const int64_t made = bytes / 256 * 256;
    if (made == 0 || made > PACKED_POOL / 4)
        return;
    for (int64_t i = copies; i-- > 0 && i >= copies - NOTED_COPIES;)
        if (copied[i % NOTED_COPIES].to == x) {
            assert_int_equal(copied[i % NOTED_COPIES].bytes, made);
            return;
        }
    fail_msg("an input of %lld bytes was not made", (long long)bytes);
}

/* Pairs by 32 experts, of each in order of tokens; all four of every token, or one of every second
 * one. */
static void is_sent(const mz_pack *a) {
    static uint8_t seen[PACKED_MOST], of_token[PACKED_MOST];
    enum { EXPERTS = 32 };
    int64_t descents = 0;
    memset(seen, 0, sizeof seen);
    memset(of_token, 0, sizeof of_token);
    for (int64_t i = 0; i < a->rows; i++) {
        const int64_t pair = a->row_pair[i];
        assert_in_range(pair, 0, PACKED_MOST - 1);
        assert_int_equal(seen[pair]++, 0);
        of_token[pair / a->k]++;
        descents += i > 0 && pair < a->row_pair[i - 1];
    }
    const int64_t each = of_token[a->row_pair[0] / a->k];
    for (int64_t i = 0; i < a->rows; i++)
        assert_int_equal(of_token[a->row_pair[i] / a->k], each);
    assert_true(each == EACH_MOST || each == 1);
    if (a->rows >= 1024)
        assert_int_equal(descents, EXPERTS - 1);
    is_made(a->x, (each == EACH_MOST ? a->rows / EACH_MOST : 2 * a->rows) * a->hidden * 2);
    packs[a->scale != NULL][each]++;
}

static mz_kstatus checked_pack(mz_kernels *k, mz_kstream stream, const mz_pack *a) {
    if (a->k == 1) {
        copied[copies % NOTED_COPIES].to = a->out;
        copied[copies++ % NOTED_COPIES].bytes = a->rows * a->hidden * 2;
    } else {
        is_sent(a);
    }
    return noted.real->pack_rows(k, stream, a);
}

/* Inputs are made for both ranks, then each sends. */
static mz_kstatus checked_copy(mz_kernels *k, mz_kstream stream, mz_copy kind, void *to,
                               const void *from, size_t bytes) {
    for (int64_t i = copies; kind == MZ_COPY_INSIDE && i-- > 0 && i >= copies - 2;)
        sent += copied[i % NOTED_COPIES].to == from;
    return noted.real->copy(k, stream, kind, to, from, bytes);
}

/* Small pools: the large samples stay out, every kind is still there and of sane size. */
static void a_small_run_measures_every_kind(void **state) {
    (void)state;
    mz_err err;
    small_machine m;
    mz_arena arena = {0};
    mz_measured measured = {0};
    mz_wire wire = {0};
    mz_app app = {0};
    assert_ok(small_machine_open(&m, 2, 3, PACKED_POOL, &err), &err);
    noted = (noting){.ops = *m.kernels->ops, .real = m.kernels->ops};
    noted.ops.pack_rows = checked_pack;
    noted.ops.copy = checked_copy;
    m.kernels->ops = &noted.ops;
    assert_ok(
        mz_calibrate(m.kernels, m.transport, &m.options, &app, &arena, &measured, &wire, &err),
        &err);
    for (int scaled = 0; scaled < 2; scaled++)
        assert_true(packs[scaled][1] > 0 && packs[scaled][EACH_MOST] > 0);
    /* Messages of 4 and 64 KiB in 1, 16, 128 or 1,024, three rounds of three calls of two ranks. */
    assert_true(sent >= 2 * 4 * 3 * 3 * 2);
    assert_int_equal(measured.workers, 2);
    assert_true(measured.call_s >= 0 && wire.bytes_per_s > 0); /* a busy machine hides a call */
    assert_true(measured.probe_s > 0 && measured.probe_s < 1);
    assert_true(measured.probe_mean_s > 0 && measured.probe_mean_s < 1);
    assert_true(measured.uneven == 0);                      /* one process */
    assert_true(measured.rows_mean_s == 0);                 /* such pools lie in a cache */
    const int unmeasured = MZ_WORK_UPDATE + MZ_RULE_GALORE; /* no kernels from here on */
    for (int w = 0; w < MZ_WORKS; w++) {
        const mz_fit *fit = &measured.fit[w];
        if ((w >= unmeasured && w < MZ_WORK_FORWARD) || w == MZ_WORK_EXCHANGE) /* one process */
            continue;
        if (fit->samples == 0)
            fail_msg("%s was not measured", mz_work_name((mz_work)w));
        for (int32_t i = 0; i < fit->samples; i++)
            if (!(fit->sample[i].seconds > 0 && fit->sample[i].seconds < 10))
                fail_msg("%s: %g s", mz_work_name((mz_work)w), fit->sample[i].seconds);
    }
    assert_true(has_sample(&measured.fit[MZ_WORK_PACK], 2, 8)); /* norms by pair */
    /* Tokens that have rows of all their pairs, and of one at most. */
    static const mz_work both[] = {MZ_WORK_PACK, MZ_WORK_PACK_SCALED, MZ_WORK_COMBINE};
    for (int i = 0; i < COUNT_OF(both); i++) {
        const mz_fit *fit = &measured.fit[both[i]];
        assert_true(has_sample(fit, 128, 2 * 1.25 * 128) && has_sample(fit, 128, 2 * 2 * 128));
    }
    m.kernels->ops = noted.real;
    small_machine_close(&m);
    mz_arena_free(&arena);
}

/* Blocks that a calibration with such pools takes before its first sample. */
static int64_t blocks_taken;

static mz_kstatus counted_alloc(mz_kernels *k, size_t bytes, void **memory) {
    blocks_taken += bytes == CALIBRATE_BLOCK;
    return noted.real->alloc(k, bytes, memory);
}

/* Half a pool beside it, in two blocks or none: in a single one a call's part would lie in that of
 * the call before. */
static void short_parts_have_several_blocks(void **state) {
    static const struct {
        int64_t pool_mib, blocks; /* for inputs and for results */
    } cases[] = {{29, 0}, {32, 0}, {59, 0}, {60, 2}, {100, 3}};
    const volatile sig_atomic_t stop = 1;
    (void)state;
    for (int i = 0; i < COUNT_OF(cases); i++) {
        mz_err err;
        small_machine m;
        mz_arena arena = {0};
        mz_measured measured = {0};
        mz_wire wire = {0};
        mz_app app = {.stop = &stop};
        assert_ok(small_machine_open(&m, 1, 3, cases[i].pool_mib << 20, &err), &err);
        noted = (noting){.ops = *m.kernels->ops, .real = m.kernels->ops};
        noted.ops.alloc = counted_alloc;
        m.kernels->ops = &noted.ops;
        blocks_taken = 0;
        assert_int_equal(
            mz_calibrate(m.kernels, m.transport, &m.options, &app, &arena, &measured, &wire, &err),
            MZ_EABORTED);
        assert_int_equal(blocks_taken, 2 * cases[i].blocks);
        m.kernels->ops = noted.real;
        small_machine_close(&m);
        mz_arena_free(&arena);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fits_recover_terms),
        cmocka_unit_test(terms_are_not_negative),
        cmocka_unit_test(one_sample_is_a_rate),
        cmocka_unit_test(the_slower_process_lags),
        cmocka_unit_test(a_failed_exchange_has_its_error),
        cmocka_unit_test(samples_as_phases_run),
        cmocka_unit_test(short_parts_have_several_blocks),
        cmocka_unit_test(a_small_run_measures_every_kind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
