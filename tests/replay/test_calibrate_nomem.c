/* A calibration with allocations failing once, and with all failing from one on: an error of memory
 * in one line, nothing half-written, nothing left behind. Kernels but for copies do nothing here,
 * so that a calibration takes a tenth of a second; their memory is really allocated, and so is
 * GSL's where this program asks for it. Of many allocations every so-many-th fails; how many there
 * are hangs on times, as fits drop terms. */
#include "kernels/backend.h"
#include "replay/cmd.h"
#include "tests/harness.h"
#include "tests/replay/nomem.h"
#include "tests/replay/nomem_command.h"
#include "tests/replay/small_machine.h"

#include <gsl/gsl_multifit.h>
#include <jansson.h>

/* ---- kernels that do nothing -------------------------------------------------------------------
 */

static mz_kstatus idle_zero(mz_kernels *k, mz_kstream stream, void *memory, size_t bytes) {
    return MZ_K_OK;
}
static mz_kstatus idle_convert(mz_kernels *k, mz_kstream stream, mz_dtype to_type, void *to,
                               mz_dtype from_type, const void *from, int64_t n) {
    return MZ_K_OK;
}
static mz_kstatus idle_norms(mz_kernels *k, mz_kstream stream, const mz_norms *args) {
    return MZ_K_OK;
}
static mz_kstatus idle_score(mz_kernels *k, mz_kstream stream, const mz_score_args *args) {
    return MZ_K_OK;
}
static mz_kstatus idle_group(mz_kernels *k, mz_kstream stream, const mz_grouping *args,
                             void *workspace) {
    return MZ_K_OK;
}
static mz_kstatus idle_select(mz_kernels *k, mz_kstream stream, const mz_selection *args,
                              void *workspace) {
    return MZ_K_OK;
}
static mz_kstatus idle_arrange(mz_kernels *k, mz_kstream stream, const mz_segment *segment,
                               int64_t segments, const int64_t *in, int64_t *out) {
    return MZ_K_OK;
}
static mz_kstatus idle_invert(mz_kernels *k, mz_kstream stream, const int64_t *row_pair,
                              int64_t rows, int64_t pairs, int64_t *position) {
    return MZ_K_OK;
}
static mz_kstatus idle_pack(mz_kernels *k, mz_kstream stream, const mz_pack *args) {
    return MZ_K_OK;
}
static mz_kstatus idle_combine(mz_kernels *k, mz_kstream stream, const mz_combine *args) {
    return MZ_K_OK;
}
static mz_kstatus idle_product(mz_kernels *k, mz_kstream stream, const mz_product_args *args,
                               void *workspace) {
    return MZ_K_OK;
}
static mz_kstatus idle_up(mz_kernels *k, mz_kstream stream, const mz_expert_up *args,
                          void *workspace) {
    return MZ_K_OK;
}
static mz_kstatus idle_swiglu(mz_kernels *k, mz_kstream stream, const mz_swiglu *args) {
    return MZ_K_OK;
}
static mz_kstatus idle_update(mz_kernels *k, mz_kstream stream, const mz_update *args,
                              void *workspace) {
    return MZ_K_OK;
}

mz_kstatus __real_mz_kernels_open(const mz_kernels_options *options, mz_kernels **kernels,
                                  char *message, size_t size);
mz_kstatus __wrap_mz_kernels_open(const mz_kernels_options *options, mz_kernels **kernels,
                                  char *message, size_t size);

mz_kstatus __wrap_mz_kernels_open(const mz_kernels_options *options, mz_kernels **kernels,
                                  char *message, size_t size) {
    static mz_backend_ops idle;
    const mz_kstatus status = __real_mz_kernels_open(options, kernels, message, size);
    if (status != MZ_K_OK)
        return status;
    idle = *(*kernels)->ops;
    idle.zero = idle_zero;
    idle.convert = idle_convert;
    idle.row_norms = idle_norms;
    idle.score_pairs = idle_score;
    idle.group_pairs = idle_group;
    idle.select_pairs = idle_select;
    idle.arrange = idle_arrange;
    idle.invert = idle_invert;
    idle.pack_rows = idle_pack;
    idle.combine_rows = idle_combine;
    idle.grouped_gemm = idle_product;
    idle.expert_up_forward = idle_up;
    idle.swiglu_backward = idle_swiglu;
    idle.update_step = idle_update;
    (*kernels)->ops = &idle;
    return status;
}

/* ---- memory of fits ----------------------------------------------------------------------------
 */

gsl_matrix *__real_gsl_matrix_alloc(size_t rows, size_t cols);
gsl_matrix *__wrap_gsl_matrix_alloc(size_t rows, size_t cols);
gsl_vector *__real_gsl_vector_alloc(size_t n);
gsl_vector *__wrap_gsl_vector_alloc(size_t n);
gsl_multifit_linear_workspace *__real_gsl_multifit_linear_alloc(size_t rows, size_t cols);
gsl_multifit_linear_workspace *__wrap_gsl_multifit_linear_alloc(size_t rows, size_t cols);

gsl_matrix *__wrap_gsl_matrix_alloc(size_t rows, size_t cols) {
    return nomem_refuses() ? NULL : __real_gsl_matrix_alloc(rows, cols);
}

gsl_vector *__wrap_gsl_vector_alloc(size_t n) {
    return nomem_refuses() ? NULL : __real_gsl_vector_alloc(n);
}

gsl_multifit_linear_workspace *__wrap_gsl_multifit_linear_alloc(size_t rows, size_t cols) {
    return nomem_refuses() ? NULL : __real_gsl_multifit_linear_alloc(rows, cols);
}

/* ---- a calibration -----------------------------------------------------------------------------
 */

static mz_code calibrate(small_machine *m, mz_arena *arena, bool speed, mz_err *err) {
    mz_app app = {.log = mz_log_make(NULL, -1), .version = "0"};
    mz_measured measured = {0};
    mz_wire wire;
    mz_code code = small_machine_open(m, 1, 3, 1 << 20, err);
    if (code == MZ_OK && speed)
        code =
            mz_calibrate_speed(m->kernels, m->transport, &m->options, &app, arena, &measured, err);
    else if (code == MZ_OK)
        code =
            mz_calibrate(m->kernels, m->transport, &m->options, &app, arena, &measured, &wire, err);
    return code;
}

/* Number of allocations; the at-th fails, 0: none. */
static long long run_job(bool speed, long long at, bool for_good) {
    small_machine m;
    mz_arena arena = {0};
    mz_err err = {0};
    nomem_start(at, for_good);
    const mz_code code = calibrate(&m, &arena, speed, &err);
    const long long all = nomem_end();
    small_machine_close(&m);
    mz_arena_free(&arena);
    if (at == 0 || nomem_refused() == 0)
        assert_ok(code, &err);
    else if (code != MZ_ENOMEM || err.code != code || !strstr(err.msg, "memory") ||
             strchr(err.msg, '\n'))
        fail_msg("allocation %lld%s: code %d, \"%s\"", at, for_good ? " and all that follow" : "",
                 code, err.msg);
    return all;
}

static void calibrations(void **state) {
    for (int speed = 0; speed < 2; speed++) {
        const long long all = run_job(speed, 0, false), stride = all / 12 + 1;
        assert_true(all > 20);
        for (int good = 0; good < 2; good++)
            for (long long at = 1 + good * stride / 2; at <= all; at += stride)
                run_job(speed, at, good);
        run_job(speed, 0, false);
        print_message("%s: %lld allocations\n", speed ? "speed" : "calibration", all);
    }
}

/* What was measured, at another speed: sizes whose factors differ are fitted anew. */
static mz_code rescale(mz_err *err) {
    const mz_measured now = {.probe_mean_s = 1, .rows_mean_s = 2, .cache_mean_s = 3};
    mz_fit_sample sample[4] = {{.size = {1, 1, 1e3}, .seconds = 1},
                               {.size = {2, 1, 1e5}, .seconds = 2},
                               {.size = {5, 1, 1e6}, .seconds = 3},
                               {.size = {9, 1, 1e9}, .seconds = 9}};
    mz_measured m = {.probe_mean_s = 1, .rows_mean_s = 1, .cache_mean_s = 1};
    mz_factors factors;
    m.fit[MZ_WORK_PACK] = (mz_fit){.samples = 4, .sample = sample};
    return mz_calibrate_rescale(&m, &now, &factors, err);
}

static void rescaled(void **state) {
    mz_err err = {0};
    nomem_start(0, false);
    assert_ok(rescale(&err), &err);
    const long long all = nomem_end();
    assert_true(all > 0);
    for (long long at = 1; at <= all; at++) {
        nomem_start(at, false);
        const mz_code code = rescale(&err);
        nomem_end();
        assert_int_equal(code, MZ_ENOMEM);
        assert_non_null(strstr(err.msg, "memory"));
    }
}

/* ---- the command -------------------------------------------------------------------------------
 */

#define CALIBRATE "calibrate -q --repeats 3 --pool 1MiB --threads 1 --ranks 2 "

static void refuse_some(const char *line, int tries) {
    outcome whole = run_command(mz_cmd_calibrate, line, 0, false);
    assert_ok(whole.code, &whole.err);
    unlink("out");
    const belongings before = belongings_now();
    const long long stride = whole.allocations / tries + 1;
    for (int good = 0; good < 2; good++)
        for (long long at = 1 + good * stride / 2; at <= whole.allocations; at += stride) {
            outcome o = run_command(mz_cmd_calibrate, line, at, good);
            if (o.refusals > 0 ? !is_short_of_memory(&o) : o.code != MZ_OK)
                fail_msg("%s: allocation %lld: code %d, \"%s\", %zu characters of output", line, at,
                         o.code, o.err.msg, strlen(o.text));
            if (o.refusals == 0)
                unlink("out");
            assert_nothing_left(&before);
            free(o.text);
        }
    print_message("%s: %lld allocations\n", line, whole.allocations);
    free(whole.text);
}

static void new_profiles(void **state) {
    refuse_some(CALIBRATE "-o out", 5);
}

static void refreshed_profiles(void **state) {
    outcome o = run_command(mz_cmd_calibrate, CALIBRATE "-o here.json", 0, false);
    assert_ok(o.code, &o.err);
    free(o.text);
    refuse_some(CALIBRATE "--refresh here.json -o out", 8);
    refuse_some(CALIBRATE "--refresh here.json", 2);
}

int main(void) {
    json_set_alloc_funcs(malloc, free);
    const struct CMUnitTest tests[] = {cmocka_unit_test(calibrations), cmocka_unit_test(rescaled),
                                       cmocka_unit_test(new_profiles),
                                       cmocka_unit_test(refreshed_profiles)};
    return cmocka_run_group_tests(tests, enter_folder, leave_folder);
}
