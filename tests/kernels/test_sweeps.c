/* How often an optimizer's step reads the gradient and the momentum, and that it takes no memory:
 * test_sweeps [cuda]. The memory that is watched is closed; a page opens when it is touched, which
 * counts, and the page that has been open longest closes. Pages that are read again while they are
 * open (in a cache, that is) count once; a second sweep over an array finds them closed. With
 * "cuda" the library is one with an emulated device. */
#include "tests/harness.h"
#include "kernels/kernels.h"

#include <signal.h>
#include <sys/mman.h>

/* Blocks of rows and values begin with pages: no page belongs to two. */
enum { PAGE = 4096, MATRICES = 3, ROWS = 512, COLS = 1024, VALUES = MATRICES * ROWS * COLS };
/* Pages open at a time: on the host those of the rows that are read beside each other, far fewer
 * than a block has. The emulation runs one thread of a block after the other, so there a whole
 * block's, of which a matrix has sixteen. */
enum { OPEN_HOST = 6, OPEN_EMULATED = 48 };

static struct {
    char *memory; /* PAGE-aligned */
    int64_t pages, opened;
    int64_t open[OPEN_EMULATED]; /* pages, the one opened k-th at k modulo the most that are open */
    int *count;                  /* [pages]: how often each was opened */
} watched;
static mz_backend backend = MZ_BACKEND_HOST;

static void touched(int number, siginfo_t *info, void *context) {
    const int64_t page = ((char *)info->si_addr - watched.memory) / PAGE;
    if ((char *)info->si_addr < watched.memory || page >= watched.pages)
        abort();
    const int64_t most = backend == MZ_BACKEND_HOST ? OPEN_HOST : OPEN_EMULATED;
    int64_t *place = &watched.open[watched.opened++ % most];
    if (watched.opened > most)
        mprotect(watched.memory + *place * PAGE, PAGE, PROT_NONE);
    *place = page;
    watched.count[page]++;
    mprotect(watched.memory + page * PAGE, PAGE, PROT_READ | PROT_WRITE);
}

static void watch(void *memory, size_t bytes) {
    watched.memory = memory;
    watched.pages = (int64_t)(bytes / PAGE);
    watched.opened = 0;
    watched.count = calloc(bytes / PAGE, sizeof *watched.count);
    assert_non_null(watched.count);
    const struct sigaction action = {.sa_sigaction = touched, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    assert_int_equal(sigaction(SIGSEGV, &action, NULL), 0);
    assert_int_equal(mprotect(memory, bytes, PROT_NONE), 0);
}

typedef struct sweeps {
    int least, most; /* of any page */
} sweeps;

static sweeps end_watch(void) {
    assert_int_equal(mprotect(watched.memory, (size_t)watched.pages * PAGE, PROT_READ | PROT_WRITE),
                     0);
    signal(SIGSEGV, SIG_DFL);
    sweeps s = {watched.count[0], watched.count[0]};
    for (int64_t i = 0; i < watched.pages; i++) {
        s.least = watched.count[i] < s.least ? watched.count[i] : s.least;
        s.most = watched.count[i] > s.most ? watched.count[i] : s.most;
    }
    free(watched.count);
    return s;
}

/* Zeros, in pages of their own. */
static void *take(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    return memory;
}

/* ---- memory that a step takes -------------------------------------------------------------------
 * The linker leads the library's calls here (meson.build). */
static bool counting;
static int64_t taken;

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
void *__real_aligned_alloc(size_t alignment, size_t bytes);
void *__real_mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset);

static void count_bytes(size_t bytes) {
    taken += counting ? (int64_t)bytes : 0;
}
void *__wrap_malloc(size_t bytes) {
    count_bytes(bytes);
    return __real_malloc(bytes);
}
void *__wrap_calloc(size_t n, size_t bytes) {
    count_bytes(n * bytes);
    return __real_calloc(n, bytes);
}
void *__wrap_realloc(void *memory, size_t bytes) {
    count_bytes(bytes);
    return __real_realloc(memory, bytes);
}
void *__wrap_aligned_alloc(size_t alignment, size_t bytes) {
    count_bytes(bytes);
    return __real_aligned_alloc(alignment, bytes);
}
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset) {
    count_bytes(bytes);
    return __real_mmap(at, bytes, protection, flags, file, offset);
}

/* ---- one step -----------------------------------------------------------------------------------
 */

typedef enum gradients { EVEN, NONE } gradients;

/* bf16 of one size and every sign, or nothing but zeros. */
static void fill(uint16_t *g, gradients kind) {
    uint32_t state = 1;
    for (int64_t i = 0; kind == EVEN && i < VALUES; i++) {
        state = state * 1664525u + 1013904223u;
        g[i] = (uint16_t)(0x3c00u | (state >> 16 & 0x807fu));
    }
}

typedef enum array { GRADIENT, MOMENTUM } array;

/* Sweeps of a step over one array. */
static sweeps step(mz_update a, gradients kind, array which) {
    const mz_kernels_options options = {.backend = backend, .threads = 1, .streams = 1};
    mz_kernels *k;
    taken = 0;
    counting = true;
    const mz_kstatus opened = mz_kernels_open(&options, &k, NULL, 0);
    counting = false;
    assert_int_equal(opened, MZ_K_OK);
    assert_true(taken > 0); /* the counters are reached */
    a.matrices = MATRICES;
    a.rows = ROWS;
    a.cols = COLS;
    a.type = a.gradient_type = MZ_BF16;
    a.rate = 1e-2f;
    a.beta1 = 0.9f;
    a.beta2 = 0.999f;
    a.eps = 1e-8f;
    a.step = 1;
    a.clip_rms = true;
    a.parameter = take(2 * VALUES);
    uint16_t *g = take(2 * VALUES);
    fill(g, kind);
    a.gradient = g;
    a.m = take(4 * VALUES);
    a.v = take(4 * VALUES);
    a.row = take(4 * MATRICES * ROWS);
    a.col = take(4 * MATRICES * COLS);
    const size_t scratch = mz_update_workspace(k, &a);
    void *workspace = take(scratch + 1);
    if (which == GRADIENT)
        watch(g, 2 * VALUES);
    else
        watch(a.m, 4 * VALUES);
    taken = 0;
    counting = true;
    const mz_kstatus status = mz_update_step(k, 0, &a, workspace);
    counting = false;
    const sweeps s = end_watch();
    assert_int_equal(status, MZ_K_OK);
    if (backend == MZ_BACKEND_HOST) /* the emulation takes memory for its threads */
        assert_int_equal(taken, 0);
    void *const all[] = {a.parameter, g, a.m, a.v};
    for (int i = 0; i < 4; i++)
        munmap(all[i], (i < 2 ? 2 : 4) * (size_t)VALUES);
    munmap(a.row, 4 * MATRICES * ROWS);
    munmap(a.col, 4 * MATRICES * COLS);
    munmap(workspace, scratch + 1);
    mz_kernels_close(&k);
    return s;
}

static void expect(const char *what, sweeps got, int wanted) {
    if (got.least != wanted || got.most != wanted)
        fail_msg("%s: pages are read %d to %d times, not %d", what, got.least, got.most, wanted);
}

/* Plain sweeps are counted as what they are. */
static void test_counter(void **state) {
    (void)state;
    for (int wanted = 1; wanted <= 3; wanted++) {
        char *memory = take(VALUES);
        watch(memory, VALUES);
        for (int i = 0; i < wanted; i++)
            for (int64_t at = 0; at < VALUES; at += 64)
                (void)*(volatile char *)(memory + at);
        expect("counter", end_watch(), wanted);
        munmap(memory, VALUES);
    }
}

/* Scratch for the study's largest tensors beside their gradient: no temporary has the tensor's
 * size. At the least two rows of fp32 for sixteen of bf16, of a few matrices (CUDA). */
static void test_scratch(void **state) {
    (void)state;
    const int64_t shapes[][3] = {{1, 50304, 4096}, {4, 4096, 4096}, {3 * 128, 4096, 4096}};
    const size_t part[] = {32, 3, 64}; /* of the gradient's bytes, at most one of so many */
    const mz_kernels_options options = {.backend = backend, .threads = 2, .streams = 1};
    mz_kernels *k;
    assert_int_equal(mz_kernels_open(&options, &k, NULL, 0), MZ_K_OK);
    for (int i = 0; i < 3 * 4; i++) {
        const int64_t *shape = shapes[i / 4], values = shape[0] * shape[1] * shape[2];
        const mz_update a = {.kind = MZ_UPDATE_SKEWADAM,
                             .matrices = shape[0],
                             .rows = shape[1],
                             .cols = shape[2],
                             .type = MZ_BF16,
                             .gradient_type = MZ_BF16,
                             .momentum = i & 1,
                             .factored = i & 2,
                             .clip_rms = true};
        assert_true(mz_update_workspace(k, &a) <= 2 * (size_t)values / part[i / 4]);
    }
    mz_kernels_close(&k);
}

/* Without momentum the update is made of the gradient, with it of the momentum. */
static void test_skewadam(void **state) {
    (void)state;
    for (int tier = 0; tier < 4; tier++)
        for (int tensor = 0; tensor < 2; tensor++) {
            const mz_update a = {.kind = MZ_UPDATE_SKEWADAM,
                                 .momentum = tier & 1,
                                 .factored = tier & 2,
                                 .clip_tensor = tensor,
                                 .rounding = MZ_ROUND_DITHER};
            expect("gradient", step(a, EVEN, GRADIENT), a.momentum ? 1 : 2);
            if (a.momentum)
                expect("momentum", step(a, EVEN, MOMENTUM), 2);
        }
}

/* Matrices that never had a gradient are under every floor, and no reason for another sweep. */
static void test_idle(void **state) {
    (void)state;
    const mz_update a = {.kind = MZ_UPDATE_SKEWADAM, .factored = true};
    expect("idle", step(a, NONE, GRADIENT), 2);
}

static void test_one_sweep(void **state) {
    (void)state;
    const mz_update adamw = {.kind = MZ_UPDATE_ADAMW}, lion = {.kind = MZ_UPDATE_LION};
    expect("adamw", step(adamw, EVEN, GRADIENT), 1);
    expect("lion", step(lion, EVEN, GRADIENT), 1);
}

int main(int argc, char **argv) {
    static char stack[1 << 16]; /* the emulation's threads have small ones */
    const stack_t own = {.ss_sp = stack, .ss_size = sizeof stack};
    if (argc > 1 && strcmp(argv[1], "cuda") == 0)
        backend = MZ_BACKEND_CUDA;
    if (sysconf(_SC_PAGESIZE) != PAGE) {
        print_message("pages here are not of 4096 bytes: skipped\n");
        return 77;
    }
    if (sigaltstack(&own, NULL) != 0)
        return 1;
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_counter),
                                       cmocka_unit_test(test_scratch),
                                       cmocka_unit_test(test_skewadam), cmocka_unit_test(test_idle),
                                       cmocka_unit_test(test_one_sweep)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
