/* Contexts of two devices side by side in one thread, and in turn in several: each works on its own
 * device, whichever was the thread's before. And what the run-time refused is said once. */
#include "tests/harness.h"
#include "kernels/kernels.h"
#include "tests/shim/cuda_runtime_api.h"

#include <pthread.h>

static mz_kernels *open_on(int32_t device) {
    const mz_kernels_options options = {.backend = MZ_BACKEND_CUDA, .device = device, .streams = 2};
    mz_kernels *k = NULL;
    char message[300] = "";
    if (mz_kernels_open(&options, &k, message, sizeof message) != MZ_K_OK)
        fail_msg("device %d: %s", (int)device, message);
    return k;
}

/* Memory, a copy, two kernels on streams that wait, marks: of the context's device. */
static void *use(void *context) {
    mz_kernels *k = context;
    float row[4] = {1, 2, 3, 4}, norm = 0, *on_device;
    void *memory;
    double seconds;
    assert_int_equal(mz_kernels_alloc(k, 2 * sizeof row, &memory), MZ_K_OK);
    on_device = memory;
    assert_int_equal(mz_kernels_copy(k, 0, MZ_COPY_IN, on_device, row, sizeof row), MZ_K_OK);
    assert_int_equal(mz_kernels_mark(k, 0, 0), MZ_K_OK);
    assert_int_equal(mz_kernels_zero(k, 0, on_device + 4, sizeof row), MZ_K_OK);
    assert_int_equal(mz_kernels_wait(k, 1, 0), MZ_K_OK);
    const mz_norms norms = {MZ_F32, on_device, 1, 4, 4, on_device + 4};
    assert_int_equal(mz_row_norms(k, 1, &norms), MZ_K_OK);
    assert_int_equal(mz_kernels_copy(k, 1, MZ_COPY_OUT, &norm, on_device + 4, 4), MZ_K_OK);
    assert_int_equal(mz_kernels_sync(k, 1), MZ_K_OK);
    assert_int_equal(mz_kernels_mark(k, 0, 1), MZ_K_OK);
    assert_int_equal(mz_kernels_elapsed(k, 0, 1, &seconds), MZ_K_OK);
    assert_true(norm == 30);
    return memory;
}

static void each_on_its_own_device(void **state) {
    mz_kernels *k[2] = {open_on(0), open_on(1)};
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < 2; i++) {
            void *memory = use(k[i]);
            assert_int_equal(cuemu_device_of(memory), i);
            mz_kernels_free(k[1 - i], NULL);
            mz_kernels_free(k[i], memory);
            assert_int_equal(cuemu_device_of(memory), -1);
        }
    size_t all[2], available[2];
    void *memory;
    assert_int_equal(mz_kernels_alloc(k[0], 1 << 20, &memory), MZ_K_OK);
    for (int i = 0; i < 2; i++)
        assert_int_equal(mz_kernels_memory(k[i], &all[i], &available[i]), MZ_K_OK);
    assert_true(all[0] - available[0] == 1 << 20 && available[1] == all[1]);
    mz_kernels_free(k[0], memory);
    mz_kernels_close(&k[0]);
    mz_kernels_close(&k[1]);
}

/* A new thread's device is the first. */
static void from_another_thread(void **state) {
    mz_kernels *k = open_on(1);
    pthread_t thread;
    void *memory = NULL;
    assert_int_equal(pthread_create(&thread, NULL, use, k), 0);
    assert_int_equal(pthread_join(thread, &memory), 0);
    assert_int_equal(cuemu_device_of(memory), 1);
    mz_kernels_free(k, memory);
    mz_kernels_close(&k);
}

static void refusals_do_not_surface_again(void **state) {
    mz_kernels *k = open_on(0);
    void *memory = NULL;
    char host[8];
    assert_int_equal(mz_kernels_alloc(k, (size_t)1 << 50, &memory), MZ_K_ENOMEM);
    assert_non_null(strstr(mz_kernels_error(k), "bytes"));
    memory = use(k);
    assert_int_equal(mz_kernels_copy(k, 0, MZ_COPY_IN, host, host, 8), MZ_K_EINVAL);
    mz_kernels_free(k, memory);
    mz_kernels_free(k, use(k));
    mz_kernels_close(&k);
    const mz_kernels_options third = {.backend = MZ_BACKEND_CUDA, .device = 2, .streams = 1};
    char message[300] = "", far[1000];
    assert_int_equal(mz_kernels_open(&third, &k, message, sizeof message), MZ_K_EHARDWARE);
    assert_string_equal(message, "GPU 2 of 2 on this machine");
    memset(far, 'x', sizeof far);
    far[sizeof far - 1] = '\0';
    const mz_kernels_options long_path = {
        .backend = MZ_BACKEND_CUDA, .streams = 1, .library_dir = far};
    assert_int_equal(mz_kernels_open(&long_path, &k, message, sizeof message), MZ_K_EINVAL);
    assert_non_null(strstr(message, "library_dir"));
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(each_on_its_own_device),
                                       cmocka_unit_test(from_another_thread),
                                       cmocka_unit_test(refusals_do_not_surface_again)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
