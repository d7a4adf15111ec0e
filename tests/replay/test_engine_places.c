/* Which pair is computed where: the gradient of every instance is that of the pairs which README's
 * rule gives it. The experts are those of fake_experts.c. */
#include "tests/harness.h"
#include "tests/replay/fake_experts.h"
#include "tests/replay/scene.h"

#include <math.h>

/* Values of all instances of a layer; how many of them have several hosts' pairs is returned. */
static int check_layer(scene *s, const machine *m, int32_t l) {
    const mz_plan *plan = s->at[l].plan;
    const int64_t values = 3 * s->o.hidden * s->o.intermediate;
    int shared = 0;
    for (int32_t e = 0; e < plan->experts; e++)
        for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++) {
            double *want = s->at[l].gradient + e * values, error = 0, norm = 0;
            memset(want, 0, sizeof *want * (size_t)values);
            scene_reference_of(s, l, i);
            const double *got = fake_instance_gradient(mz_engine_experts(m->engine), l, i);
            for (int64_t j = 0; j < values; j++) {
                error += (got[j] - want[j]) * (got[j] - want[j]);
                norm += want[j] * want[j];
            }
            if (!(sqrt(error) <= 2e-5 * sqrt(norm)))
                fail_msg("%s, layer %d, expert %d, instance %d: its gradient is off by %g of %g",
                         s->o.policy, l, e, i, sqrt(error), sqrt(norm));
            shared += norm > 0 && plan->begin[e + 1] - plan->begin[e] > 1;
        }
    return shared;
}

static void pairs_go_where_the_rule_says(void **state) {
    static const char *const policy[] = {
        "static", "ultraep[slots=4,u_min=1]", "ultraep[slots=4,u_min=1,locality=no]",
        "llep",   "lrmoe[quota=none]",        "symi[cf=0.9]"};
    for (int i = 0; i < COUNT_OF(policy); i++) {
        int shared = 0;
        for (uint64_t seed = 1; seed < 4; seed++) {
            scene s;
            machine m;
            scene_watcher watcher;
            const scene_options o = scene_usual(policy[i], MZ_F32);
            scene_open(&s, &o, seed);
            machine_open(&m, &s, 1);
            machine_engine(&m, &s);
            watcher = (scene_watcher){&s, m.kernels};
            mz_engine_set_watch(m.engine, scene_watch, &watcher);
            assert_ok(scene_run(&s, m.engine, &m.err), &m.err);
            for (int32_t l = 0; l < SCENE_LAYERS; l++)
                shared += check_layer(&s, &m, l);
            machine_close(&m);
            scene_close(&s);
        }
        assert_true(i == 0 ? shared == 0 : shared > 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(pairs_go_where_the_rule_says)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
