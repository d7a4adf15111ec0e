/* Every allocation of a step fails once: each time there is an error with a message, nothing is
 * lost, and nothing is left behind. Linked so that the program's own allocations are counted
 * (meson.build: --wrap); libraries keep theirs. */
#include "replay/experts.h"
#include "tests/harness.h"
#include "tests/replay/nomem.h"
#include "tests/replay/scene.h"

#include <stdlib.h>

static mz_code open_machine(machine *m, const scene *s) {
    const mz_kernels_options options = {.backend = SCENE_BACKEND, .threads = 1, .streams = 1};
    const mz_transport_options local = {.name = "local", .ranks = s->o.ranks, .timeout_s = 30};
    char why[256] = "";
    if (mz_kernels_open(&options, &m->kernels, why, sizeof why) != MZ_K_OK)
        return mz_fail(&m->err, MZ_ENOMEM, "%s", why);
    mz_code code = mz_transport_open(&local, &m->transport, &m->err);
    if (code == MZ_OK)
        code = mz_transport_attach(m->transport, m->kernels, &m->err);
    if (code == MZ_OK)
        code = mz_heap_create(m->kernels, 0, s->o.ranks, &m->heap, &m->err);
    return code;
}

/* From opening the machine to reading a weight after the update. */
static mz_code whole_job(machine *m, scene *s, float *value) {
    mz_code code = open_machine(m, s);
    if (code == MZ_OK)
        code = mz_engine_create(&s->job, m->kernels, m->transport, m->heap, &m->engine, &m->err);
    if (code == MZ_OK)
        code = scene_run(s, m->engine, &m->err);
    if (code == MZ_OK)
        code = mz_engine_update(m->engine, &m->err);
    for (int gradient = 0; code == MZ_OK && gradient < 2; gradient++)
        code = mz_experts_read(mz_engine_experts(m->engine), 0, 0, gradient, value, &m->err);
    return code;
}

/* Number of allocations of a job; the at-th fails, 0: none. A buffer that is refused once may be
 * had after the heap gave back what lies idle; all else is an error. */
static int64_t run_job(scene *s, float *value, int64_t at, bool for_good) {
    machine m = {0};
    nomem_start(at, for_good);
    const mz_code code = whole_job(&m, s, value);
    const int64_t counted = nomem_end();
    if (at == 0)
        assert_ok(code, &m.err);
    else if (code == MZ_OK ? nomem_buffers() == 0 || for_good
                           : code != MZ_ENOMEM || m.err.code != code || !m.err.msg[0] ||
                                 strchr(m.err.msg, '\n'))
        fail_msg("%s: allocation %lld: code %d, \"%s\"", s->o.policy, (long long)at, code,
                 m.err.msg);
    if (m.engine)
        mz_engine_free(&m.engine);
    for (int32_t r = 0; m.heap && r < s->o.ranks; r++)
        assert_int_equal(mz_heap_of(m.heap, r)->total, 0);
    machine_close(&m);
    return counted;
}

static void every_allocation(void **state) {
    static const char *const policies[] = {"lrmoe[keep=0.5]", "lrmoe[keep=0.5,activations=resend]",
                                           "ultraep[slots=2,u_min=1]", "symi", "capacity[cf=0.8]"};
    for (int i = 0; i < COUNT_OF(policies); i++) {
        scene s;
        scene_options o = scene_usual(policies[i], i % 2 ? MZ_F32 : MZ_BF16);
        o.ranks = 2;
        o.experts = 4;
        o.tokens = 5;
        o.hidden = 16;
        o.intermediate = 8;
        o.recompute = i == 0;
        scene_open(&s, &o, (uint64_t)(3 + i));
        float *value = calloc((size_t)(3 * o.hidden * o.intermediate), sizeof *value);
        const int64_t all = run_job(&s, value, 0, false);
        assert_true(all > 50);
        for (int64_t at = 1; at <= all; at++)
            for (int good = 0; good < 2; good++)
                run_job(&s, value, at, good);
        print_message("%s: %lld allocations\n", policies[i], (long long)all);
        free(value);
        scene_close(&s);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_allocation)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
