/* The CUDA backend where there is no GPU: refused with the status for missing hardware and one line
 * that says what is missing; the host backend works all the same. With a GPU it opens. */
#include "tests/harness.h"
#include "kernels/kernels.h"

static void without_a_device(void **state) {
    const mz_kernels_options options = {.backend = MZ_BACKEND_CUDA, .streams = 1};
    mz_kernels *k = NULL;
    char message[200] = "";
    const mz_kstatus status = mz_kernels_open(&options, &k, message, sizeof message);
    if (status == MZ_K_OK) {
        assert_non_null(strstr(mz_kernels_describe(k), "sm_"));
        mz_kernels_close(&k);
        skip();
    }
    assert_int_equal(status, MZ_K_EHARDWARE);
    assert_null(k);
    assert_true(strlen(message) > 20);
    assert_null(strchr(message, '\n'));
    assert_true(strstr(message, "driver") || strstr(message, "no CUDA kernels") ||
                strstr(message, "GPU"));
}

static void host_all_the_same(void **state) {
    const mz_kernels_options options = {.backend = MZ_BACKEND_HOST, .threads = 1, .streams = 1};
    mz_kernels *k = NULL;
    assert_int_equal(mz_kernels_open(&options, &k, NULL, 0), MZ_K_OK);
    mz_kernels_close(&k);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(without_a_device),
                                       cmocka_unit_test(host_all_the_same)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
