/* The NCCL transport's groups, with stand-ins for NCCL and the driver: one that was begun is ended,
 * whatever was refused in it. Arguments: the folder of the transports' module, the stand-in for
 * NCCL, the one for the driver. One process of an MPI job. */
#include "tests/harness.h"

#include "replay/transport_kind.h"
#include "tests/replay/fake_nccl.h"

#include <dlfcn.h>

static const char *modules;
static struct fake_nccl *nccl;

static void groups_are_ended(void **state) {
    const struct {
        int fails_at;
        bool group_fails;
        int begun, sent;
        const char *said;
    } cases[] = {{0, false, 1, 3, NULL},
                 {2, false, 1, 2, "NCCL, a send: refused"},
                 {0, true, 0, 0, "NCCL, a group: refused"}};
    const mz_transport_options options = {
        .name = "nccl", .ranks = 2, .timeout_s = 3, .lib_dir = modules};
    mz_transport *t = NULL;
    mz_err err;
    assert_ok(mz_transport_open(&options, &t, &err), &err);
    assert_ok(t->kind->attach(t, &err), &err);
    /* Alone it would have nothing to send. */
    t->processes = 2;
    t->end = 1;
    char from[3], to[3];
    const mz_lane lane[] = {{0, 1, from, NULL, 1},
                            {0, 1, from + 1, NULL, 1},
                            {1, 0, NULL, to, 1},
                            {0, 1, from + 2, NULL, 1}};
    for (int i = 0; i < COUNT_OF(cases); i++) {
        *nccl =
            (struct fake_nccl){.fails_at = cases[i].fails_at, .group_fails = cases[i].group_fails};
        const mz_code code = t->kind->start(t, lane, COUNT_OF(lane), &err);
        assert_int_equal(code, cases[i].said ? MZ_EINTERNAL : MZ_OK);
        if (cases[i].said)
            assert_string_equal(err.msg, cases[i].said);
        assert_int_equal(nccl->begun, cases[i].begun);
        assert_int_equal(nccl->ended, cases[i].begun);
        assert_int_equal(nccl->sent, cases[i].sent);
    }
    /* What failed is not waited for when it is closed: MPI is told here that all is well. */
    t->processes = 1;
    t->end = 2;
    mz_transport_close(&t);
    int (*finalize)(void);
    void *symbol = dlsym(RTLD_DEFAULT, "MPI_Finalize");
    assert_non_null(symbol);
    memcpy(&finalize, &symbol, sizeof finalize);
    assert_int_equal(finalize(), 0);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(groups_are_ended)};
    if (argc < 4)
        return 2;
    modules = argv[1];
    void *library = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
    if (!library || !dlopen(argv[3], RTLD_NOW | RTLD_LOCAL) ||
        !(nccl = dlsym(library, "fake_nccl"))) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
