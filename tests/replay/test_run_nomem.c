/* A replay from opening the machine to its result, with each allocation failing once, and with all
 * failing from each on: an error of memory in one line that says where, nothing lost, nothing left
 * behind, and a later replay has the results that it always has. */
#include "common/base/digest.h"
#include "replay/kernel_code.h"
#include "replay/probe.h"
#include "replay/run.h"
#include "replay/transport_kind.h"
#include "sim/model/resize.h"
#include "tests/harness.h"
#include "tests/replay/nomem.h"
#include "tests/replay/scene.h"

/* The probes take longer than all else; commands have the real ones. */
mz_code mz_probe_create(mz_kernels *kernels, mz_transport *transport, const mz_probe_room *lent,
                        mz_probe **probe, mz_err *err) {
    *probe = NULL;
    return MZ_OK;
}

void mz_probe_free(mz_probe **probe) {
    *probe = NULL;
}

mz_code mz_probe_run(mz_probe *probe, mz_speed speed, double *seconds, mz_err *err) {
    *seconds = 1;
    return MZ_OK;
}

/* What is replayed: a scene's calls as one step of a trace. */
typedef struct window {
    scene scene;
    mz_model *model;
    mz_cluster *cluster;
    mz_optimizer optimizer;
    int64_t tokens[2];
    int32_t told; /* calls; -1: the step itself is still to come */
} window;

static mz_code next_step(void *self, mz_step_head *head, bool *end, mz_err *err) {
    window *w = self;
    *end = w->told >= 0;
    w->told = 0;
    *head =
        (mz_step_head){.step = 7, .micro_batches = 1, .layers = SCENE_LAYERS, .tokens = w->tokens};
    return MZ_OK;
}

static mz_code next_call(void *self, mz_layer_call *call, mz_err *err) {
    window *w = self;
    const mz_replay_call *c = &w->scene.at[w->told].call;
    *call = (mz_layer_call){.layer = w->told++, .load = &c->load, .pairs = &c->pairs};
    return MZ_OK;
}

static mz_code restart(void *self, mz_load_source *source, mz_err *err) {
    window *w = self;
    w->told = -1;
    *source = (mz_load_source){.self = w,
                               .ranks = w->scene.o.ranks,
                               .experts = w->scene.o.experts,
                               .layers = SCENE_LAYERS,
                               .next_step = next_step,
                               .next_call = next_call};
    return MZ_OK;
}

static void window_open(window *w, uint64_t seed) {
    static const char config[] =
        "{\"model_type\": \"mixtral\", \"hidden_size\": 16, \"intermediate_size\": 8, "
        "\"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 4, "
        "\"num_local_experts\": 4, \"num_experts_per_tok\": 2, \"vocab_size\": 100}";
    char folder[4096], path[4200];
    mz_err err = {0};
    mz_model *whole = NULL;
    const mz_model_size size = {16, 8, SCENE_LAYERS};
    *w = (window){0};
    scene_options o = scene_usual("static", MZ_BF16);
    o.ranks = 2;
    o.experts = 4;
    o.tokens = 6;
    o.hidden = size.hidden;
    o.intermediate = size.intermediate;
    scene_open(&w->scene, &o, seed);
    for (int32_t r = 0; r < o.ranks; r++)
        w->tokens[r] = w->scene.token_begin[r + 1] - w->scene.token_begin[r];
    make_directory(folder, sizeof folder);
    snprintf(path, sizeof path, "%s/config.json", folder);
    write_bytes(path, config, sizeof config - 1);
    assert_ok(mz_model_load(path, MZ_SOURCE_DIR, &whole, &err), &err);
    assert_ok(mz_model_resize(whole, &size, &w->model, &err), &err);
    mz_model_free(&whole);
    remove_directory(folder);
    assert_ok(mz_cluster_load("a100-80gb:1x2", MZ_SOURCE_DIR, &w->cluster, &err), &err);
    assert_ok(mz_optimizer_parse("adamw", &w->optimizer, &err), &err);
}

static void window_close(window *w) {
    mz_cluster_free(&w->cluster);
    mz_model_free(&w->model);
    scene_close(&w->scene);
}

/* A replay of some policies and what it holds. */
typedef struct job {
    window *window;
    char *policy[2];
    int policies;
    mz_kernels *kernels;
    mz_transport *transport;
    mz_replay *replay;
    char digest[2][MZ_DIGEST_TEXT];
    mz_err err;
} job;

static mz_code open_machine(job *j) {
    const mz_kernels_options options = {.backend = MZ_BACKEND_HOST, .threads = 1, .streams = 1};
    const mz_transport_options local = {
        .name = "local", .ranks = j->window->scene.o.ranks, .timeout_s = 30};
    char why[256] = "";
    const mz_kstatus status = mz_kernels_open(&options, &j->kernels, why, sizeof why);
    if (status != MZ_K_OK)
        return mz_fail(&j->err, mz_kstatus_code(status), "%s", why);
    const mz_code code = mz_transport_open(&local, &j->transport, &j->err);
    return code == MZ_OK ? mz_transport_attach(j->transport, j->kernels, &j->err) : code;
}

static mz_code create(job *j) {
    const window *w = j->window;
    const mz_replay_options options = {.model = w->model,
                                       .cluster = w->cluster,
                                       .optimizer = &w->optimizer,
                                       .type = MZ_BF16,
                                       .norm_hidden = w->model->hidden,
                                       .repeat = 1,
                                       .verify = true,
                                       .digest = true,
                                       .seed = 1};
    return mz_replay_create(&options, j->policy, j->policies, j->kernels, j->transport, &j->replay,
                            &j->err);
}

static mz_code whole_job(job *j, mz_app *app) {
    const mz_replay_window steps = {j->window, restart, 1};
    mz_run run;
    mz_code code = open_machine(j);
    if (code == MZ_OK)
        code = create(j);
    if (code == MZ_OK)
        code = mz_replay_run(j->replay, &steps, app, &j->err);
    for (int p = 0; code == MZ_OK && p < j->policies; p++) {
        code = mz_replay_result(j->replay, p, &run, &j->err);
        memcpy(j->digest[p], mz_replay_digest(j->replay, p, 0), MZ_DIGEST_TEXT);
    }
    return code;
}

/* Number of allocations; the at-th fails, 0: none. Memory of kernels that is refused once may be
 * had after heaps gave back what lies idle; all else is an error. */
static long long run_job(job *j, long long at, bool for_good) {
    mz_app app = {.log = mz_log_make(NULL, -1), .version = "0"};
    job now = *j;
    nomem_start(at, for_good);
    const mz_code code = whole_job(&now, &app);
    const long long counted = nomem_end();
    const char *msg = now.err.msg;
    mz_replay_free(&now.replay);
    mz_kernels_close(&now.kernels);
    mz_transport_close(&now.transport);
    if (at == 0)
        assert_ok(code, &now.err);
    else if (code == MZ_OK ? nomem_buffers() == 0 || for_good
                           : code != MZ_ENOMEM || now.err.code != code || !strstr(msg, "memory") ||
                                 strchr(msg, '\n'))
        fail_msg("%s: allocation %lld%s: code %d, \"%s\"", j->policy[0], at,
                 for_good ? " and all that follow" : "", code, msg);
    if (code == MZ_OK && j->digest[0][0])
        assert_memory_equal(now.digest, j->digest, sizeof now.digest);
    memcpy(j->digest, now.digest, code == MZ_OK ? sizeof j->digest : 0);
    return counted;
}

static void every_allocation(void **state) {
    static char *const policies[][2] = {{"static", NULL},
                                        {"lrmoe[keep=0.5]", NULL},
                                        {"ultraep[slots=2,u_min=1]", NULL},
                                        {"capacity[cf=0.8]", NULL},
                                        {"symi", "static"}};
    window w;
    window_open(&w, 5);
    for (int i = 0; i < COUNT_OF(policies); i++) {
        job j = {.window = &w,
                 .policy = {policies[i][0], policies[i][1]},
                 .policies = policies[i][1] ? 2 : 1};
        const long long all = run_job(&j, 0, false);
        assert_true(all > 100);
        for (long long at = 1; at <= all; at++)
            for (int good = 0; good < 2; good++)
                run_job(&j, at, good);
        run_job(&j, 0, false);
        print_message("%s: %lld allocations\n", policies[i][0], all);
    }
    window_close(&w);
}

/* ---- processes decide alike --------------------------------------------------------------------
 */

/* A transport whose other process, of the last rank, has so much available. */
static struct {
    mz_transport_kind kind;
    int32_t ranks;
    bool armed;
    double available;
} fake;

static mz_code fake_gather(mz_transport *t, const void *mine, size_t bytes, void *all,
                           mz_err *err) {
    if (bytes > 0) /* else a barrier */
        memcpy(all, mine, bytes);
    if (fake.armed && bytes == (size_t)fake.ranks * 2 * sizeof(double))
        ((double *)all)[2 * fake.ranks - 1] = fake.available;
    fake.armed = false;
    return MZ_OK;
}

/* What one process has no room for, none begins: the others would wait for it. */
static void no_room_elsewhere(void **state) {
    window w;
    window_open(&w, 5);
    for (int fits = 0; fits < 2; fits++) {
        mz_app app = {.log = mz_log_make(NULL, -1), .version = "0"};
        job j = {.window = &w, .policy = {"static"}, .policies = 1};
        assert_ok(open_machine(&j), &j.err);
        fake.kind = *j.transport->kind;
        fake.kind.gather = fake_gather;
        fake.ranks = j.transport->ranks;
        fake.available = fits ? 1e12 : 1;
        j.transport->kind = &fake.kind;
        assert_ok(create(&j), &j.err);
        fake.armed = true;
        const mz_replay_window steps = {&w, restart, 1};
        if (fits)
            assert_ok(mz_replay_run(j.replay, &steps, &app, &j.err), &j.err);
        else
            assert_fails(mz_replay_run(j.replay, &steps, &app, &j.err), MZ_EINPUT,
                         "0.0 GiB are free", &j.err);
        assert_false(fake.armed);
        mz_replay_free(&j.replay);
        mz_kernels_close(&j.kernels);
        mz_transport_close(&j.transport);
    }
    window_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_allocation),
                                       cmocka_unit_test(no_room_elsewhere)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
