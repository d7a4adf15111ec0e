/* mizan replay: the MoE layers of a trace executed under each policy. */
#include "common/base/opt.h"
#include "common/io/input.h"
#include "common/io/json.h"
#include "common/io/result_match.h"
#include "replay/cmd.h"
#include "replay/kernel_code.h"
#include "replay/run.h"
#include "sim/model/match.h"
#include "sim/model/resize.h"
#include "traces/cmd.h"
#include "traces/describe.h"
#include "traces/stream.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { POLICIES_MAX = 64 };
/* A window longer than that is not warmed up whole unless it is asked for: by then buffers of most
 * sizes are there, and the time is better spent measuring. */
enum { WARMUP_MOST = 16 };

typedef struct replay_args {
    const char *trace, *model, *cluster, *policy, *transport, *optimizer, *output, *prediction;
    int64_t ranks, threads, hidden, inter, layers, seq, step_tokens, tokens_per_rank, first_step,
        steps, repeat, warmup, seed;
    double timeout;
    int backend, type, recompute, order, verify;
    bool json, detail, digest, quiet, verbose;
} replay_args;

#define AT(field) offsetof(replay_args, field)

static const mz_opt replay_options[] = {
    {"trace", 't', MZ_OPT_STR, AT(trace), NULL, "FILE", "recorded routing (mizan trace makes it)"},
    {"model", 'm', MZ_OPT_STR, AT(model), NULL, "NAME|FILE",
     "shipped model or a Hugging Face config.json"},
    {"policy", 'p', MZ_OPT_STR, AT(policy), "static", "A,B[K=V]",
     "policies, options in brackets (mizan sim --list)"},
    {"ranks", 'r', MZ_OPT_INT, AT(ranks), "0", "R",
     "ranks of the expert-parallel group; 0: the cluster's, else the trace's", 0, 4096},
    {"cluster", 'c', MZ_OPT_STR, AT(cluster), NULL, "NAME|FILE:GPUS",
     "what policies are told of the machine; default: a100-80gb:1xR"},
    {"transport", 0, MZ_OPT_STR, AT(transport), NULL, "NAME",
     "local, mpi or nccl; default: mpi under mpirun (nccl with --backend cuda), else local"},
    {"backend", 0, MZ_OPT_ENUM, AT(backend), "host", "host|cuda", "kernels to run"},
    {"threads", 0, MZ_OPT_INT, AT(threads), "0", "N",
     "host threads of a process; 0: its share of the processors", 0, 1024},
    {"hidden", 0, MZ_OPT_INT, AT(hidden), "0", "H",
     "hidden size; 0: on a GPU the model's, else so that a step takes 1 to 3 s", 0, 1 << 22},
    {"inter", 0, MZ_OPT_INT, AT(inter), "0", "I", "intermediate size of an expert; 0: as --hidden",
     0, 1 << 22},
    {"layers", 0, MZ_OPT_INT, AT(layers), "0", "N", "the first N MoE layers; 0: as --hidden", 0,
     4096},
    {"seq", 0, MZ_OPT_INT, AT(seq), "0", "L", "sequence length; 0: as recorded", 0, 1 << 30},
    {"step-tokens", 0, MZ_OPT_INT, AT(step_tokens), "0", "T",
     "tokens of one step of the whole job; 0: as recorded", 0, 1e15},
    {"tokens-per-rank", 0, MZ_OPT_INT, AT(tokens_per_rank), "0", "T",
     "resample whole sequences until each rank has T tokens", 0, 1e12},
    {"first-step", 0, MZ_OPT_INT, AT(first_step), "0", "I", "skip this many recorded steps", 0,
     1e15},
    {"steps", 'n', MZ_OPT_INT, AT(steps), "3", "N", "window: this many steps; 0: all", 0, 1e15},
    {"repeat", 0, MZ_OPT_INT, AT(repeat), "1", "N", "measure the window this many times", 1, 1e6},
    {"warmup", 0, MZ_OPT_INT, AT(warmup), NULL, "N",
     "steps that are run first and not recorded, at most the window; default: it, at most 16", 0,
     1e6},
    {"order", 0, MZ_OPT_ENUM, AT(order), "auto", "auto|steps|policies",
     "policies take turns step by step, or run one after another; auto: turns if memory allows"},
    {"type", 0, MZ_OPT_ENUM, AT(type), "bf16", "f32|bf16", "rows, weights and gradients"},
    {"recompute", 0, MZ_OPT_ENUM, AT(recompute), "none", "none|full", "activation recomputation"},
    {"optimizer", 0, MZ_OPT_STR, AT(optimizer), "adamw", "NAME[K=V]",
     "optimizer, options in brackets (mizan sim --list)"},
    {"verify", 0, MZ_OPT_ENUM, AT(verify), "on", "off|on",
     "compare samples of every step with a plain reference"},
    {"digest", 0, MZ_OPT_FLAG, AT(digest), NULL, NULL,
     "add a digest of all results of each step: outputs, gradients, weights"},
    {"seed", 0, MZ_OPT_INT, AT(seed), "1", "N", "for data, weights, resampling, selections", 0,
     1e15},
    {"prediction", 0, MZ_OPT_STR, AT(prediction), NULL, "FILE",
     "result of mizan sim --scope layers; its digest goes into this result"},
    {"output", 'o', MZ_OPT_STR, AT(output), NULL, "FILE", "write a result file (HDF5)"},
    {"json", 0, MZ_OPT_FLAG, AT(json), NULL, NULL, "one JSON object on stdout (mizan-result/1)"},
    {"detail", 0, MZ_OPT_FLAG, AT(detail), NULL, NULL,
     "with --json: seconds by step, layer, rank and phase"},
    {"timeout", 0, MZ_OPT_REAL, AT(timeout), "20", "S",
     "give a process up that has sent nothing for so long", 0.1, 1e6, MZ_UNIT_SECONDS},
    MZ_OPT_COMMON_ROWS(replay_args),
};

static const mz_opt_spec replay_spec = {
    .command = "mizan replay",
    .synopsis = "--trace FILE --model NAME --policy A,B [--ranks R] [options]\n"
                "       mpirun -n P mizan replay ...",
    .about = "Executes the routed experts of a recorded trace under each policy and measures them.",
    .example = "mizan replay --trace traces/example/olmoe-8r.h5 --model olmoe-1b-7b \\\n"
               "    --policy 'static,lrmoe[keep=0.5]' --steps 2",
    .table = replay_options,
    .count = sizeof replay_options / sizeof replay_options[0],
    .max_args = 0,
};

/* Everything one run holds, so that one function releases it. */
typedef struct replay_job {
    replay_args args;
    char *policy_text, *policies[POLICIES_MAX];
    int count;
    mz_trace *trace;
    mz_stream *stream;
    mz_model *model; /* at the sizes that run */
    mz_cluster *cluster;
    mz_optimizer optimizer;
    mz_transport *transport;
    mz_kernels *kernels;
    mz_replay *replay;
    mz_fault fault;
    bool steps_given, warmup_given;
    int64_t norm_hidden;
    const volatile sig_atomic_t *stop;
    mz_result_file predicted; /* --prediction, or zeros */
    mz_result result;
} replay_job;

static void free_job(replay_job *job) {
    mz_result_free(&job->result);
    mz_result_file_free(&job->predicted);
    mz_replay_free(&job->replay);
    mz_kernels_close(&job->kernels);
    mz_transport_close(&job->transport);
    mz_stream_close(&job->stream);
    mz_trace_close(&job->trace);
    mz_model_free(&job->model);
    mz_cluster_free(&job->cluster);
    free(job->policy_text);
}

/* ---- input -------------------------------------------------------------------------------------
 */

static mz_code split_policies(replay_job *job, mz_err *err) {
    job->policy_text = strdup(job->args.policy);
    if (!job->policy_text)
        return mz_fail_nomem(err, "the list of policies");
    mz_code code = mz_split_list(job->policy_text, job->policies, POLICIES_MAX, &job->count, err);
    return code == MZ_OK ? MZ_OK : mz_err_prefix(err, "--policy");
}

static mz_code load_cluster(replay_job *job, mz_app *app, mz_err *err) {
    replay_args *a = &job->args;
    char spec[64];
    if (a->ranks == 0 && !a->cluster)
        a->ranks = mz_trace_facts_of(job->trace)->ranks;
    snprintf(spec, sizeof spec, "a100-80gb:1x%lld", (long long)a->ranks);
    mz_code code =
        mz_cluster_load(a->cluster ? a->cluster : spec, app->data_dir, &job->cluster, err);
    if (code == MZ_OK)
        code = mz_cluster_need_ranks(job->cluster, a->cluster ? a->cluster : spec, a->ranks, err);
    if (code == MZ_OK)
        a->ranks = job->cluster->ranks;
    return code;
}

/* What a person may want to know before a step takes minutes. */
enum { CPU_FLOPS_STEP = 80 }; /* GFLOP: 1 to 3 s on two cores */
enum { LEAST_HIDDEN = 64, LEAST_INTER = 32 };

/* Pairs of one step of one layer, as far as options and the first recorded step tell. */
static double pairs_of_step(const replay_job *job) {
    const replay_args *a = &job->args;
    const mz_trace_facts *t = mz_trace_facts_of(job->trace);
    const mz_trace_call *call;
    const int64_t calls = mz_trace_calls(job->trace, &call);
    double pairs = 0, tokens = 0;
    for (int64_t i = 0; i < calls && call[i].step == call[0].step; i++) {
        pairs += (double)call[i].pairs / t->layers;
        tokens += (double)call[i].tokens / t->layers;
    }
    const double each = tokens > 0 ? pairs / tokens : 1;
    if (a->step_tokens > 0)
        return each * (double)a->step_tokens;
    const double least = each * (double)a->tokens_per_rank * (double)a->ranks;
    return pairs > least ? pairs : least;
}

static int64_t shrink(int64_t size, int64_t by, int64_t least) {
    const int64_t small = size / by / least * least;
    return small < least ? (size < least ? size : least) : small;
}

/* Sizes that were not given: on a CPU so that a step takes 1 to 3 s. */
static mz_model_size choose_sizes(const replay_job *job, const mz_model *model, const mz_log *log) {
    const replay_args *a = &job->args;
    const int64_t hidden = model->hidden, inter = model->expert_intermediate;
    mz_model_size s = {a->hidden ? a->hidden : hidden, a->inter ? a->inter : inter,
                       a->layers ? (int32_t)a->layers : model->moe_layers};
    if (a->backend != MZ_BACKEND_HOST || a->hidden || a->inter || a->layers)
        return s;
    const double most = CPU_FLOPS_STEP * 1e9 / (18 * pairs_of_step(job));
    for (int64_t by = 2; by <= 1 << 16; by *= 2) {
        if ((double)s.hidden * (double)s.intermediate * s.layers <= most)
            break;
        s.hidden = shrink(hidden, by, LEAST_HIDDEN);
        s.intermediate = shrink(inter, by, LEAST_INTER);
    }
    while (s.layers > 1 && (double)s.hidden * (double)s.intermediate * s.layers > most)
        s.layers--;
    if (s.hidden != hidden || s.intermediate != inter || s.layers != model->moe_layers)
        mz_info(log,
                "sizes for a CPU: --hidden %lld --inter %lld --layers %d (the model's: %lld, %lld, "
                "%d); mizan sim --scope layers takes the same options",
                (long long)s.hidden, (long long)s.intermediate, s.layers, (long long)hidden,
                (long long)inter, model->moe_layers);
    return s;
}

static mz_code load_model(replay_job *job, mz_app *app, mz_err *err) {
    const mz_trace_facts *t = mz_trace_facts_of(job->trace);
    const mz_recorded recorded = {job->args.trace, t->name,  t->experts,
                                  t->layers,       t->top_k, t->hidden};
    mz_model *whole = NULL;
    mz_code code = mz_model_load(job->args.model, app->data_dir, &whole, err);
    if (code == MZ_OK)
        code = mz_model_match(whole, &recorded, err);
    if (code == MZ_OK) {
        const char *process = getenv("OMPI_COMM_WORLD_RANK");
        const mz_log silent = mz_log_make(NULL, -1);
        const mz_model_size size =
            choose_sizes(job, whole, process && atoi(process) > 0 ? &silent : &app->log);
        job->norm_hidden = t->hidden > 0 ? t->hidden : whole->hidden;
        code = mz_model_resize(whole, &size, &job->model, err);
    }
    mz_model_free(&whole);
    return code;
}

/* The prediction is there before anything is measured. */
static mz_code read_prediction(replay_job *job, mz_err *err) {
    const char *path = job->args.prediction;
    if (!path)
        return MZ_OK;
    mz_code code = mz_result_load(path, &job->predicted, err);
    for (int i = 0; code == MZ_OK && i < job->predicted.runs; i++)
        code = mz_result_detailed(&job->predicted.run[i], "prediction", err);
    return code == MZ_OK ? MZ_OK : mz_err_prefix(err, "--prediction");
}

static mz_code load_inputs(replay_job *job, mz_app *app, mz_err *err) {
    const replay_args *a = &job->args;
    const char *const file[] = {a->trace, a->model, a->prediction};
    mz_code code = split_policies(job, err);
    const mz_job_inputs in = {file, 3, a->cluster, job->policies, job->count};
    if (code == MZ_OK)
        code = mz_keep_job(&in, a->output, err);
    if (code == MZ_OK)
        code = mz_opt_need(a->trace, "trace",
                           "a trace file (mizan trace import or synth makes one)", err);
    if (code == MZ_OK)
        code = mz_opt_need(a->model, "model", "a config.json or a shipped name (mizan sim --list)",
                           err);
    if (code == MZ_OK)
        code = mz_fault_parse(getenv("MIZAN_REPLAY_FAULT"), &job->fault, err);
    if (code == MZ_OK)
        code = mz_optimizer_parse(a->optimizer, &job->optimizer, err);
    if (code == MZ_OK)
        code = read_prediction(job, err);
    if (code == MZ_OK)
        code = mz_trace_open(a->trace, &job->trace, err);
    if (code == MZ_OK)
        code = load_cluster(job, app, err);
    if (code == MZ_OK)
        code = load_model(job, app, err);
    return code;
}

/* ---- the machine -------------------------------------------------------------------------------
 */

static const char *transport_name(const replay_args *a) {
    const char *size = getenv("OMPI_COMM_WORLD_SIZE");
    if (a->transport)
        return a->transport;
    return !size || atoi(size) < 2 ? "local" : a->backend == MZ_BACKEND_CUDA ? "nccl" : "mpi";
}

static mz_code open_kernels(replay_job *job, mz_err *err) {
    const bool nccl = job->args.backend == MZ_BACKEND_CUDA && job->transport->processes > 1;
    const mz_kernels_options options = {.backend = (mz_backend)job->args.backend,
                                        .device = nccl ? job->transport->device : 0,
                                        .threads =
                                            mz_transport_threads(job->transport, job->args.threads),
                                        .streams = 1};
    char message[256] = "";
    const mz_kstatus status = mz_kernels_open(&options, &job->kernels, message, sizeof message);
    if (status == MZ_K_OK)
        return mz_transport_attach(job->transport, job->kernels, err);
    return mz_fail(err, mz_kstatus_code(status), "--backend %s: %s",
                   job->args.backend == MZ_BACKEND_CUDA ? "cuda" : "host", message);
}

static mz_code open_transport(replay_job *job, mz_app *app, mz_err *err) {
    const mz_transport_options options = {.name = transport_name(&job->args),
                                          .ranks = (int32_t)job->args.ranks,
                                          .timeout_s = job->args.timeout,
                                          .stop = app->stop};
    mz_code code = mz_transport_open(&options, &job->transport, err);
    if (code == MZ_OK && job->transport->process > 0)
        app->log.stream = NULL;
    return code == MZ_OK ? open_kernels(job, err) : code;
}

/* ---- the run -----------------------------------------------------------------------------------
 */

static mz_code restart(void *self, mz_load_source *source, mz_err *err) {
    replay_job *job = self;
    const replay_args *a = &job->args;
    const mz_stream_options options = {.ranks = (int32_t)a->ranks,
                                       .layers = job->model->moe_layers,
                                       .step_tokens = a->step_tokens,
                                       .tokens_per_rank = a->tokens_per_rank,
                                       .sequence_length = a->seq,
                                       .first_step = a->first_step,
                                       .steps = a->steps,
                                       .seed = (uint64_t)a->seed,
                                       .want_pairs = true,
                                       .want_weights = true,
                                       .stop = job->stop};
    mz_stream_close(&job->stream);
    const mz_code code = mz_stream_open(job->trace, &options, &job->stream, err);
    if (code == MZ_OK)
        *source = mz_stream_source(job->stream);
    return code;
}

/* Without --steps a short trace is all of the window. */
static mz_code first_window(replay_job *job, mz_load_source *source, mz_err *err) {
    const int64_t steps = job->args.steps;
    if (job->steps_given)
        return restart(job, source, err);
    job->args.steps = 0;
    const mz_code code = restart(job, source, err);
    if (code != MZ_OK || mz_stream_steps(job->stream) <= steps)
        return code;
    job->args.steps = steps;
    return restart(job, source, err);
}

static int64_t warmup_of(const replay_job *job) {
    const int64_t window = mz_stream_steps(job->stream);
    const int64_t most = job->warmup_given ? job->args.warmup : WARMUP_MOST;
    return most < window ? most : window;
}

/* The keys that mizan sim has, too, mean the same there. NULL when memory is short. */
static json_t *shared_settings(const replay_job *job) {
    const replay_args *a = &job->args;
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:s, s:I}", "ranks", (json_int_t)a->ranks,
                     "sequence_length",
                     (json_int_t)(a->seq ? a->seq : mz_trace_facts_of(job->trace)->sequence_length),
                     "step_tokens", (json_int_t)a->step_tokens, "tokens_per_rank",
                     (json_int_t)a->tokens_per_rank, "first_step", (json_int_t)a->first_step,
                     "steps", (json_int_t)a->steps, "recompute", a->recompute ? "full" : "none",
                     "optimizer", job->optimizer.name, "seed", (json_int_t)a->seed);
}

/* ---- the prediction -----------------------------------------------------------------------------
 */

static json_t *policies_json(const replay_job *job) {
    json_t *list = json_array();
    bool failed = !list;
    for (int i = 0; i < job->count; i++)
        failed |= json_array_append_new(
                      list, json_pack("{s:o}", "policy", mz_json_text(job->policies[i]))) != 0;
    return mz_json_whole(list, failed);
}

/* As a check will find when the time is spent: is it of what is about to be measured? */
static mz_code match_prediction(replay_job *job, mz_err *err) {
    if (!job->args.prediction)
        return MZ_OK;
    mz_code code = mz_trace_describe(job->trace, job->args.trace, mz_stream_reshaped(job->stream),
                                     true, &job->result.trace, err);
    if (code != MZ_OK)
        return code;
    json_t *settings = shared_settings(job);
    json_t *claim =
        json_pack("{s:s, s:O, s:O, s:o, s:o}", "kind", "measurement", "trace", job->result.trace,
                  "model", job->model->resolved, "settings", settings, "runs", policies_json(job));
    settings = json_object_get(claim, "settings");
    if (!claim ||
        json_object_set_new(settings, "type",
                            json_string(job->args.type == MZ_F32 ? "f32" : "bf16")) != 0 ||
        json_object_set_new(settings, "processes", json_integer(job->transport->processes)) != 0)
        code = mz_fail_nomem(err, "the settings of a replay");
    if (code == MZ_OK && mz_result_belong(job->predicted.root, claim, err) != MZ_OK)
        code = mz_err_prefix(err, "--prediction %s", job->args.prediction);
    json_decref(claim);
    return code;
}

/* ---- the steps ----------------------------------------------------------------------------------
 */

static mz_code execute(replay_job *job, mz_app *app, mz_err *err) {
    replay_args *a = &job->args;
    mz_load_source first;
    job->stop = app->stop;
    mz_code code = first_window(job, &first, err);
    if (code == MZ_OK)
        code = match_prediction(job, err);
    if (code != MZ_OK)
        return code;
    a->warmup = warmup_of(job);
    const mz_replay_options options = {.model = job->model,
                                       .cluster = job->cluster,
                                       .optimizer = &job->optimizer,
                                       .type = (mz_dtype)a->type,
                                       .recompute = a->recompute == 1,
                                       .norm_hidden = job->norm_hidden,
                                       .repeat = a->repeat,
                                       .warmup = a->warmup,
                                       .order = (mz_replay_order)a->order,
                                       .verify = a->verify == 1,
                                       .digest = a->digest,
                                       .seed = (uint64_t)a->seed,
                                       .fault = job->fault,
                                       .stop = app->stop};
    code = mz_replay_create(&options, job->policies, job->count, job->kernels, job->transport,
                            &job->replay, err);
    if (code != MZ_OK)
        return code;
    const mz_replay_window window = {job, restart, mz_stream_steps(job->stream)};
    return mz_replay_run(job->replay, &window, app, err);
}

/* ---- results -----------------------------------------------------------------------------------
 */

/* The most that this process held, as the system counts it. */
static int64_t process_peak_bytes(void) {
    FILE *file = fopen("/proc/self/status", "r");
    char line[256];
    long long kib = 0;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "VmHWM: %lld kB", &kib) == 1)
            break;
    if (file)
        fclose(file);
    return (int64_t)kib * 1024;
}

/* What a process says of itself at the end, gathered by its first rank. */
typedef struct process_end {
    int64_t peak_bytes, reserved_bytes;
    int64_t device_bytes; /* 0: not available */
    mz_verified verified;
} process_end;

static mz_code gather_ends(replay_job *job, process_end *sum, mz_err *err) {
    const mz_transport *t = job->transport;
    const int32_t local = t->end - t->first;
    process_end *all = mz_calloc((size_t)(t->ranks + local), sizeof *all);
    if (!all)
        return mz_fail_nomem(err, "the result");
    all[t->ranks] =
        (process_end){process_peak_bytes(), mz_replay_reserved(job->replay),
                      mz_replay_device_bytes(job->replay), mz_replay_verified(job->replay)};
    const mz_code code = mz_transport_gather(job->transport, all + t->ranks, sizeof *all, all, err);
    for (int32_t r = 0; r < t->ranks; r++) {
        sum->peak_bytes = all[r].peak_bytes > sum->peak_bytes ? all[r].peak_bytes : sum->peak_bytes;
        sum->reserved_bytes += all[r].reserved_bytes;
        if (all[r].device_bytes > sum->device_bytes)
            sum->device_bytes = all[r].device_bytes;
        sum->verified.tokens += all[r].verified.tokens;
        sum->verified.values += all[r].verified.values;
        sum->verified.selections += all[r].verified.selections;
        if (all[r].verified.largest > sum->verified.largest)
            sum->verified.largest = all[r].verified.largest;
    }
    free(all);
    return code;
}

/* One list per run: a policy may be given twice. NULL when memory is short. */
static json_t *digests_json(const replay_job *job) {
    json_t *all = json_array();
    int failed = 0;
    for (int k = 0; k < job->result.runs; k++) {
        json_t *list = json_array();
        for (int64_t s = 0; s < job->result.run[k].steps; s++)
            failed +=
                json_array_append_new(list, json_string(mz_replay_digest(job->replay, k, s))) != 0;
        failed += json_array_append_new(all, json_pack("{s:s, s:o}", "policy", job->policies[k],
                                                       "sha256", list)) != 0;
    }
    if (failed == 0)
        return all;
    json_decref(all);
    return NULL;
}

static json_t *settings_json(const replay_job *job, const process_end *end) {
    const replay_args *a = &job->args;
    json_t *verified =
        a->verify == 1
            ? json_pack("{s:I, s:I, s:I, s:f}", "tokens", (json_int_t)end->verified.tokens,
                        "values", (json_int_t)end->verified.values, "selections",
                        (json_int_t)end->verified.selections, "largest", end->verified.largest)
            : json_null();
    json_t *json = shared_settings(job);
    json_t *own = json_pack(
        "{s:s, s:i, s:s, s:o, s:I, s:s, s:I, s:I, s:s, s:b, s:I, s:I, s:o, s:o, s:o}", "transport",
        job->transport->name, "processes", job->transport->processes, "backend",
        a->backend == MZ_BACKEND_CUDA ? "cuda" : "host", "machine",
        mz_json_text(mz_kernels_describe(job->kernels)), "window_steps",
        (json_int_t)mz_stream_steps(job->stream), "type", a->type == MZ_F32 ? "f32" : "bf16",
        "repeat", (json_int_t)a->repeat, "warmup", (json_int_t)a->warmup, "order",
        mz_replay_side_by_side(job->replay) ? "steps" : "policies", "pairs_dealt",
        (int)mz_replay_dealt(job->replay), "process_peak_bytes", (json_int_t)end->peak_bytes,
        "reserved_bytes", (json_int_t)end->reserved_bytes, "device_bytes",
        end->device_bytes > 0 ? json_integer(end->device_bytes) : json_null(), "verified", verified,
        "digests", a->digest ? digests_json(job) : json_null());
    if (!json || !own || json_object_update(json, own) != 0) {
        json_decref(json);
        json = NULL;
    }
    json_decref(own);
    return json;
}

/* Policies with records: an interrupt may leave the last ones without. */
static mz_code fill_runs(replay_job *job, mz_err *err) {
    mz_result *r = &job->result;
    r->run = mz_calloc((size_t)job->count, sizeof *r->run);
    if (!r->run)
        return mz_fail_nomem(err, "the result");
    mz_code code = MZ_OK;
    while (code == MZ_OK && r->runs < job->count && mz_replay_records(job->replay, r->runs) > 0) {
        code = mz_replay_result(job->replay, r->runs, &r->run[r->runs], err);
        r->runs++;
    }
    if (code == MZ_OK && r->runs == 0)
        return mz_fail(err, MZ_EINPUT, "no step was completed, so there is no result");
    return code;
}

static mz_code fill_result(replay_job *job, const process_end *end, mz_err *err) {
    mz_result *r = &job->result;
    r->kind = "measurement";
    r->detail = job->args.detail;
    memcpy(r->prediction, job->predicted.digest, sizeof r->prediction);
    mz_code code = fill_runs(job, err);
    if (code == MZ_OK && !r->trace)
        code = mz_trace_describe(job->trace, job->args.trace, mz_stream_reshaped(job->stream), true,
                                 &r->trace, err);
    if (code != MZ_OK)
        return code;
    r->model = json_incref(job->model->resolved);
    r->cluster = json_incref(job->cluster->resolved);
    r->settings = settings_json(job, end);
    return r->settings ? MZ_OK : mz_fail_nomem(err, "the result");
}

/* What the figures of the table depend on and a reader cannot see in them. */
static void print_setting(const replay_job *job, FILE *out) {
    const mz_transport *t = job->transport;
    const replay_args *a = &job->args;
    fprintf(out, "%s, routed experts alone: %d layers, hidden %lld, intermediate %lld, %s%s%s\n",
            job->model->name, job->model->moe_layers, (long long)job->model->hidden,
            (long long)job->model->expert_intermediate, a->type == MZ_F32 ? "fp32" : "bf16",
            a->recompute ? ", full recomputation" : "",
            mz_stream_reshaped(job->stream) ? ", trace reshaped" : "");
    fprintf(out, "%d ranks in %d process%s, transport %s; %s; %s\n", t->ranks, t->processes,
            t->processes == 1 ? "" : "es", t->name, mz_kernels_describe(job->kernels),
            job->optimizer.name);
    fprintf(out, "%lld steps measured %lld time%s after %lld of warm-up%s\n",
            (long long)mz_stream_steps(job->stream), (long long)a->repeat,
            a->repeat == 1 ? "" : "s", (long long)a->warmup,
            job->count < 2                        ? ""
            : mz_replay_side_by_side(job->replay) ? ", policies in turns step by step"
                                                  : ", one policy after another");
    if (mz_replay_dealt(job->replay))
        fputs("the trace holds counts: pairs were dealt to tokens\n", out);
}

/* What the transport moved. */
static void print_bytes(const replay_job *job, FILE *out) {
    for (int k = 0; k < job->result.runs; k++) {
        const mz_run *run = &job->result.run[k];
        fprintf(out,
                "moved a step between ranks: %.3f MiB within %s, %.3f MiB between processes (%s)\n",
                (double)run->within_process_bytes / 1048576.0,
                job->transport->processes == 1 ? "the process" : "processes",
                (double)run->between_process_bytes / 1048576.0, run->policy);
    }
}

static void print_end(const replay_job *job, const process_end *end, FILE *out) {
    fprintf(out, "measured; the process held %.3f GiB at most, buffers of all policies %.3f GiB, ",
            (double)end->peak_bytes / 1073741824.0, (double)end->reserved_bytes / 1073741824.0);
    if (end->device_bytes > 0)
        fprintf(out, "in use on the device %.3f GiB\n", (double)end->device_bytes / 1073741824.0);
    else
        fputs("device memory not available\n", out);
    if (job->args.verify == 1)
        fprintf(out,
                "verified: %lld values of %lld tokens, %lld selections; the largest error is %.2g "
                "of what is allowed\n",
                (long long)end->verified.values, (long long)end->verified.tokens,
                (long long)end->verified.selections, end->verified.largest);
    for (int k = 0; job->args.digest && k < job->result.runs; k++)
        for (int64_t s = 0; s < job->result.run[k].steps; s++)
            fprintf(out, "%s, record %lld: %s\n", job->policies[k], (long long)s,
                    mz_replay_digest(job->replay, k, s));
}

static mz_code write_result(replay_job *job, mz_app *app, mz_err *err) {
    process_end end = {0};
    mz_code code = gather_ends(job, &end, err);
    if (code != MZ_OK || job->transport->process > 0)
        return code;
    char producer[64];
    snprintf(producer, sizeof producer, "mizan %s", app->version);
    code = fill_result(job, &end, err);
    if (code == MZ_OK && job->args.output)
        code = mz_result_write(&job->result, job->args.output, producer, err);
    if (code != MZ_OK)
        return code;
    if (job->args.json)
        return mz_result_print_json(&job->result, app->out, err);
    print_setting(job, app->out);
    mz_result_print_table(&job->result, app->out);
    print_bytes(job, app->out);
    print_end(job, &end, app->out);
    return MZ_OK;
}

/* One process alone writes what is complete even when the user interrupts. */
static mz_code run_job(replay_job *job, mz_app *app, mz_err *err) {
    mz_code code = open_transport(job, app, err);
    if (code == MZ_OK && job->args.output && job->transport->process == 0)
        code = mz_output_try(job->args.output, err);
    if (code == MZ_OK)
        code = execute(job, app, err);
    if (code == MZ_OK)
        code = write_result(job, app, err);
    if (code == MZ_EABORTED && job->replay && job->transport->processes == 1) {
        mz_err why = {0};
        if (write_result(job, app, &why) != MZ_OK)
            mz_warn(&app->log, "interrupted: nothing was written: %s", why.msg);
        else if (job->result.runs == job->count)
            mz_warn(&app->log, "interrupted: the result covers the completed steps only");
        else
            mz_warn(&app->log,
                    "interrupted: the result covers the completed steps of %d of %d "
                    "policies, those from %s on are left out",
                    job->result.runs, job->count, job->policies[job->result.runs]);
    }
    if (code == MZ_OK || !job->transport)
        return code;
    const mz_transport *t = job->transport;
    if (t->processes > 1 && !t->placed) /* which one is in every line */
        mz_err_prefix(err, "process %d of %d (ranks %d to %d)", t->process, t->processes, t->first,
                      t->end - 1);
    mz_transport_abort(job->transport);
    return code;
}

mz_code mz_cmd_replay(mz_app *app, int argc, char **argv, mz_err *err) {
    replay_job job = {0};
    int nargs = 0;
    bool help = false, seen[sizeof replay_options / sizeof replay_options[0]] = {false};
    mz_code code =
        mz_opt_parse(&replay_spec, &job.args, argc, argv, &nargs, &help, seen, app->out, err);
    if (code != MZ_OK || help)
        return code;
    for (int i = 0; i < replay_spec.count; i++) {
        job.steps_given = job.steps_given || (replay_options[i].offset == AT(steps) && seen[i]);
        job.warmup_given = job.warmup_given || (replay_options[i].offset == AT(warmup) && seen[i]);
    }
    mz_log_choose(&app->log, job.args.quiet, job.args.verbose);
    code = load_inputs(&job, app, err);
    if (code == MZ_OK)
        code = run_job(&job, app, err);
    free_job(&job);
    return code;
}
