/* mizan calibrate: this machine as a hardware profile. */
#include "common/base/opt.h"
#include "common/io/input.h"
#include "common/io/json.h"
#include "replay/calibrate.h"
#include "replay/calibrate_planners.h"
#include "replay/cmd.h"
#include "replay/kernel_code.h"
#include "replay/refresh.h"
#include "sim/cluster/profile.h"
#include "traces/cmd.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct calibrate_args {
    const char *output, *transport, *name, *refresh;
    int64_t ranks, threads, repeats, hidden, inter;
    double timeout, limit, pool;
    int backend;
    bool quiet, verbose;
} calibrate_args;

#define AT(field) offsetof(calibrate_args, field)

static const mz_opt calibrate_options[] = {
    {"output", 'o', MZ_OPT_STR, AT(output), NULL, "FILE", "the profile (JSON); default: stdout"},
    {"refresh", 0, MZ_OPT_STR, AT(refresh), NULL, "PROFILE",
     "measure only how fast the machine is now, and write that profile at this speed"},
    {"name", 0, MZ_OPT_STR, AT(name), "calibrated", "NAME", "name in the profile"},
    {"ranks", 'r', MZ_OPT_INT, AT(ranks), "8", "R", "ranks that share the machine's devices", 1,
     4096},
    {"backend", 0, MZ_OPT_ENUM, AT(backend), "host", "host|cuda", "kernels to measure"},
    {"threads", 0, MZ_OPT_INT, AT(threads), "0", "N", "host threads of a process; 0: all", 0, 1024},
    {"transport", 0, MZ_OPT_STR, AT(transport), "local", "NAME",
     "local, or mpi or nccl under mpirun"},
    {"hidden", 0, MZ_OPT_INT, AT(hidden), "0", "H", "measure products of this shape, too", 0,
     1 << 20},
    {"inter", 0, MZ_OPT_INT, AT(inter), "0", "I", "with --hidden: the experts' intermediate size",
     0, 1 << 20},
    {"repeats", 0, MZ_OPT_INT, AT(repeats), "7", "N", "rounds over all samples", 3, 1001},
    {"limit", 0, MZ_OPT_REAL, AT(limit), "110", "S",
     "begin no round, after three, that would end later than this", 0, 1e6, MZ_UNIT_SECONDS},
    {"pool", 0, MZ_OPT_REAL, AT(pool), "256 MiB", "BYTES",
     "memory that operands are taken from, thrice; larger samples are left out", 1 << 20, 1e13,
     MZ_UNIT_BYTES},
    {"timeout", 0, MZ_OPT_REAL, AT(timeout), "20", "S", "give a silent process up after this", 0.1,
     1e6, MZ_UNIT_SECONDS},
    MZ_OPT_COMMON_ROWS(calibrate_args),
};

static const mz_opt_spec calibrate_spec = {
    .command = "mizan calibrate",
    .synopsis = "-o FILE [--ranks R] [--transport NAME] [options]",
    .about = "Measures this machine's kernels, products, copies and planners, and writes a "
             "hardware\nprofile that `mizan sim --cluster FILE:GPUS` takes. Some two minutes; "
             "--refresh some\n15 seconds.",
    .example = "mizan calibrate -o here.json --ranks 8",
    .table = calibrate_options,
    .count = sizeof calibrate_options / sizeof calibrate_options[0],
    .max_args = 0,
};

/* ---- the profile -------------------------------------------------------------------------------
 */

static void put(json_t *section, const char *key, json_t *value, const char *source) {
    json_object_set_new(section, key, json_pack("{s:o,s:s}", "value", value, "source", source));
}

/* NULL where a field could not be had. */
static json_t *whole(json_t *section, size_t fields) {
    return mz_json_whole(section, json_object_size(section) != fields);
}

static const char *const measured_source = "mizan calibrate";
static const char *const host_source = "one machine without accelerators: does not apply";

/* FLOP/s of the fastest sample of forward products, all workers together. */
static double best_product(const mz_measured *m) {
    const mz_fit *fit = &m->fit[MZ_WORK_FORWARD];
    double best = 1;
    for (int32_t i = 0; i < fit->samples; i++) {
        const mz_fit_sample *s = &fit->sample[i];
        best = fmax(best, 2 * s->size[0] * s->size[1] * s->size[2] / s->seconds * m->workers);
    }
    return best;
}

/* Bytes/s, read and written, of the longest copy in one piece. */
static double copy_rate(const mz_measured *m) {
    const mz_fit *fit = &m->fit[MZ_WORK_COPY];
    double rate = 1, longest = 0;
    for (int32_t i = 0; i < fit->samples; i++)
        if (fit->sample[i].size[0] == 1 && fit->sample[i].size[2] > longest) {
            longest = fit->sample[i].size[2];
            rate = longest / fit->sample[i].seconds;
        }
    return rate;
}

static json_t *device_section(const mz_measured *m, int32_t ranks_per_device, double memory) {
    json_t *d = json_object();
    put(d, "memory", json_real(memory), "the GPU's, or the process's share of the machine's");
    put(d, "memory_bandwidth", json_real(copy_rate(m)), measured_source);
    put(d, "memory_efficiency", json_real(1), "the bandwidth is what copies attain");
    put(d, "bf16", json_real(best_product(m)), "fastest product measured");
    put(d, "gemm_efficiency", json_real(1), "as bf16");
    put(d, "attention_efficiency", json_real(0.5), "assumption: not measured, not replayed");
    put(d, "attention_backward_efficiency", json_real(0.5), "as attention_efficiency");
    put(d, "sms", json_integer(m->workers), "workers that take tiles of products in turn");
    put(d, "tile_m", json_integer(128), "assumption: measured products have their own tiles");
    put(d, "tile_n", json_integer(128), "as tile_m");
    put(d, "row_alignment", json_integer(1), "no padding");
    put(d, "launch", json_real(0), "part of every measured call");
    put(d, "sync", json_real(0), "part of every measured call");
    put(d, "context", json_real(0), "not counted by a replay");
    put(d, "communicator", json_real(0), "not counted by a replay");
    put(d, "workspace", json_real(0), "not counted by a replay");
    put(d, "noise_persistent", json_real(0), "one machine");
    put(d, "noise_jitter", json_real(0.01), "assumption");
    put(d, "speed", json_real(1), "nominal");
    put(d, "ranks_per_device", json_integer(ranks_per_device), "as asked for");
    return whole(d, 20);
}

static json_t *node_section(int32_t devices, double bytes_per_s, double latency_s,
                            const char *source) {
    json_t *n = json_object();
    put(n, "gpus", json_integer(devices), "processes that measured");
    put(n, "bandwidth", json_real(bytes_per_s), source);
    put(n, "efficiency", json_real(1), source);
    put(n, "latency", json_real(latency_s), source);
    put(n, "half_duplex", json_false(), source);
    put(n, "gpus_per_bridge", json_integer(0), host_source);
    put(n, "bridge_bandwidth", json_real(0), host_source);
    put(n, "host_link", json_real(bytes_per_s), source);
    return whole(n, 8);
}

static json_t *outside_section(void) {
    json_t *o = json_object();
    put(o, "nics", json_integer(0), "one machine");
    put(o, "nic_bandwidth", json_real(1), "one machine");
    put(o, "efficiency", json_real(1), "one machine");
    put(o, "latency", json_real(0), "one machine");
    put(o, "rails", json_false(), "one machine");
    put(o, "nodes_per_leaf", json_integer(1), "one machine");
    put(o, "spine_oversubscription", json_real(1), "one machine");
    return whole(o, 7);
}

/* ---- the run -----------------------------------------------------------------------------------
 */

typedef struct calibrate_job {
    calibrate_args args;
    mz_transport *transport;
    mz_kernels *kernels;
    mz_measured measured;
    mz_wire wire;
    mz_refresh refresh;
    json_t *profile;
    mz_arena arena;
} calibrate_job;

static mz_code open_kernels(calibrate_job *job, mz_err *err) {
    char message[320] = "";
    const mz_kernels_options options = {
        .backend = job->args.backend == 0 ? MZ_BACKEND_HOST : MZ_BACKEND_CUDA,
        .device = job->transport->device,
        .threads = mz_transport_threads(job->transport, job->args.threads),
        .streams = 1};
    const mz_kstatus status = mz_kernels_open(&options, &job->kernels, message, sizeof message);
    if (status == MZ_K_OK)
        return mz_transport_attach(job->transport, job->kernels, err);
    return mz_fail(err, mz_kstatus_code(status), "%s", message);
}

static mz_calibration_options measuring(const calibrate_args *a) {
    mz_calibration_options options = mz_calibration_defaults();
    options.rounds = (int32_t)a->repeats;
    options.limit_s = a->limit;
    options.pool_bytes = (int64_t)a->pool / 256 * 256;
    options.hidden = a->hidden;
    options.intermediate = a->inter;
    return options;
}

static const char *backend_name(const calibrate_args *a) {
    return a->backend == 0 ? "host" : "cuda";
}

static mz_code measure(calibrate_job *job, mz_app *app, mz_err *err) {
    const mz_calibration_options options = measuring(&job->args);
    mz_measured *m = &job->measured;
    snprintf(m->machine, sizeof m->machine, "%s", mz_kernels_describe(job->kernels));
    snprintf(m->backend, sizeof m->backend, "%s", backend_name(&job->args));
    snprintf(m->transport, sizeof m->transport, "%s", job->transport->name);
    return mz_calibrate(job->kernels, job->transport, &options, app, &job->arena, m, &job->wire,
                        err);
}

/* ---- an existing profile at the speed of now ----------------------------------------------------
 */

static mz_code check_same(const calibrate_job *job, mz_err *err) {
    mz_refresh_here here = {.machine = mz_kernels_describe(job->kernels),
                            .backend = backend_name(&job->args),
                            .transport = job->transport->name,
                            .processes = job->transport->processes,
                            .workers = mz_kernels_tiles(job->kernels, MZ_PRODUCT_FORWARD).workers,
                            .ranks = job->args.ranks};
    const mz_code code = mz_transport_room(job->transport, &here.memory, err);
    return code == MZ_OK ? mz_refresh_same(&job->refresh, &here, err) : code;
}

static mz_code refresh(calibrate_job *job, mz_app *app, mz_err *err) {
    const mz_calibration_options options = measuring(&job->args);
    mz_factors factors;
    char at[32];
    const time_t now = time(NULL);
    struct tm utc;
    mz_code code = check_same(job, err);
    if (code == MZ_OK)
        code = mz_calibrate_speed(job->kernels, job->transport, &options, app, &job->arena,
                                  &job->measured, err);
    strftime(at, sizeof at, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    if (code == MZ_OK)
        code = mz_refresh_apply(&job->refresh, &job->measured, at, &factors, err);
    if (code != MZ_OK)
        return code;
    job->profile = json_incref(job->refresh.profile);
    if (job->transport->process == 0)
        mz_info(
            &app->log,
            "products take %.3f of their seconds in %s, what memory binds %.3f, short rows in a "
            "cache %.3f",
            factors.product, job->args.refresh, factors.rows, factors.cache);
    return MZ_OK;
}

/* ---- the job ------------------------------------------------------------------------------------
 */

static mz_code build_profile(calibrate_job *job, mz_err *err) {
    const int32_t processes = job->transport->processes;
    double memory = 0;
    json_t *planner = json_object();
    mz_code code = mz_transport_room(job->transport, &memory, err);
    if (code == MZ_OK)
        code = mz_calibrate_planners(planner, err);
    char about[400];
    snprintf(about, sizeof about, "%s; %d process%s, transport %s", job->measured.machine,
             processes, processes == 1 ? "" : "es", job->transport->name);
    job->profile = json_pack(
        "{s:s,s:o,s:o,s:o,s:o,s:o,s:o}", "name", job->args.name, "description", mz_json_text(about),
        "device", device_section(&job->measured, (int32_t)job->args.ranks / processes, memory),
        "node",
        node_section(processes, job->wire.bytes_per_s, job->wire.latency_s, measured_source),
        "scale_out", outside_section(), "planner", planner, "measured",
        mz_measured_json(&job->measured));
    return code == MZ_OK && !job->profile ? mz_fail_nomem(err, "the profile") : code;
}

static mz_code write_profile(const calibrate_job *job, mz_app *app, mz_err *err) {
    if (!job->args.output)
        return mz_json_write(job->profile, app->out, err);
    mz_output output;
    mz_code code = mz_output_begin(&output, job->args.output, err);
    if (code != MZ_OK)
        return code;
    FILE *out = fopen(output.partial, "w");
    code = out ? mz_json_write(job->profile, out, err)
               : mz_fail(err, MZ_EINTERNAL, "cannot write: %s", strerror(errno));
    if (out && fclose(out) != 0 && code == MZ_OK)
        code = mz_fail(err, MZ_EINTERNAL, "cannot write: %s", strerror(errno));
    if (code != MZ_OK)
        mz_err_prefix(err, "%s", job->args.output);
    if (code == MZ_OK)
        return mz_output_commit(&output, err);
    mz_output_abandon(&output);
    return code;
}

static mz_code run_job(calibrate_job *job, mz_app *app, mz_err *err) {
    const mz_transport_options options = {.name = job->args.transport,
                                          .ranks = (int32_t)job->args.ranks,
                                          .timeout_s = job->args.timeout,
                                          .stop = app->stop};
    mz_code code = mz_transport_open(&options, &job->transport, err);
    if (code == MZ_OK && job->args.output && job->transport->process == 0)
        code = mz_output_try(job->args.output, err);
    if (code == MZ_OK)
        code = open_kernels(job, err);
    if (code == MZ_OK)
        code = job->args.refresh ? refresh(job, app, err) : measure(job, app, err);
    if (code == MZ_OK && job->transport->process == 0 && !job->args.refresh)
        code = build_profile(job, err);
    if (code == MZ_OK && job->transport->process == 0)
        code = write_profile(job, app, err);
    if (code != MZ_OK && job->transport)
        mz_transport_abort(job->transport);
    return code;
}

/* Before minutes of work: a profile that is not called so would be refused when it is read. */
static mz_code check_name(const char *name, mz_err *err) {
    errno = 0;
    json_t *text = json_string(name); /* NULL where it is not UTF-8 */
    const bool no_memory = !text && errno == ENOMEM, good = text && mz_profile_is_name(name);
    json_decref(text);
    if (no_memory)
        return mz_fail_nomem(err, "the profile");
    return good ? MZ_OK
                : mz_fail(err, MZ_EINPUT,
                          "--name is empty, holds control characters or is not UTF-8; give one "
                          "line of text");
}

static mz_code check_args(const calibrate_args *a, const bool *seen, mz_err *err) {
    for (int i = 0; a->refresh && i < calibrate_spec.count; i++)
        if (seen[i] &&
            (calibrate_options[i].offset == AT(name) || calibrate_options[i].offset == AT(hidden) ||
             calibrate_options[i].offset == AT(inter)))
            return mz_fail(err, MZ_EINPUT,
                           "--%s is of a new calibration: --refresh keeps what the profile has",
                           calibrate_options[i].name);
    if ((a->hidden > 0) != (a->inter > 0))
        return mz_fail(err, MZ_EINPUT, "--hidden and --inter go together: a shape has both");
    return check_name(a->name, err);
}

mz_code mz_cmd_calibrate(mz_app *app, int argc, char **argv, mz_err *err) {
    calibrate_job job = {0};
    bool help = false;
    bool seen[sizeof calibrate_options / sizeof calibrate_options[0]] = {false};
    int nargs = 0;
    mz_code code =
        mz_opt_parse(&calibrate_spec, &job.args, argc, argv, &nargs, &help, seen, app->out, err);
    if (code != MZ_OK || help)
        return code;
    mz_log_choose(&app->log, job.args.quiet, job.args.verbose);
    code = check_args(&job.args, seen, err);
    if (code == MZ_OK)
        code = mz_keep_input(job.args.refresh, job.args.output, err);
    if (code == MZ_OK && job.args.refresh)
        code = mz_refresh_load(job.args.refresh, &job.arena, &job.refresh, err);
    if (code == MZ_OK)
        code = run_job(&job, app, err);
    json_decref(job.profile);
    mz_refresh_free(&job.refresh);
    mz_kernels_close(&job.kernels);
    mz_transport_close(&job.transport);
    mz_arena_free(&job.arena);
    return code;
}
