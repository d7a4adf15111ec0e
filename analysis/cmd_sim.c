/* mizan sim: policies compared on a recorded trace. */
#include "analysis/cmd.h"
#include "analysis/match.h"
#include "common/base/arena.h"
#include "common/base/opt.h"
#include "common/io/input.h"
#include "common/io/json.h"
#include "common/io/result.h"
#include "sim/model/resize.h"
#include "sim/step/run.h"
#include "traces/cmd.h"
#include "traces/describe.h"
#include "traces/stream.h"
#include "traces/trace.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { POLICIES_MAX = 64 };

typedef struct sim_args {
    const char *trace, *model, *cluster, *policy, *output, *effects;
    int64_t ranks, ep, seq, step_tokens, tokens_per_rank, first_step, steps, zero, seed;
    double budget_memory, budget_network, accuracy;
    int64_t loss_tokens;
    int scope, dispatch, network, recompute, attention, temporaries, allocator;
    int64_t hidden, inter, layers;
    const char *optimizer;
    bool json, detail, phases, bounds, timing, list, quiet, verbose;
} sim_args;

#define AT(field) offsetof(sim_args, field)

static const mz_opt sim_options[] = {
    {"trace", 't', MZ_OPT_STR, AT(trace), NULL, "FILE", "recorded routing (mizan trace makes it)"},
    {"model", 'm', MZ_OPT_STR, AT(model), NULL, "NAME|FILE",
     "shipped model or a Hugging Face config.json"},
    {"cluster", 'c', MZ_OPT_STR, AT(cluster), NULL, "NAME|FILE:GPUS",
     "hardware profile and number of GPUs"},
    {"policy", 'p', MZ_OPT_STR, AT(policy), "static", "A,B[K=V]",
     "policies, options in brackets; --list names them"},
    {"scope", 0, MZ_OPT_ENUM, AT(scope), "step", "step|layers",
     "a whole step, or its routed experts alone as mizan replay runs them"},
    {"hidden", 0, MZ_OPT_INT, AT(hidden), "0", "H", "scope layers: hidden size; 0: the model's", 0,
     1 << 22},
    {"inter", 0, MZ_OPT_INT, AT(inter), "0", "I",
     "scope layers: intermediate size of an expert; 0: the model's", 0, 1 << 22},
    {"layers", 0, MZ_OPT_INT, AT(layers), "0", "N", "scope layers: the first N MoE layers; 0: all",
     0, 4096},
    {"ranks", 'r', MZ_OPT_INT, AT(ranks), "0", "R", "ranks of the job; 0: the cluster's GPUs", 0,
     1 << 20},
    {"ep", 0, MZ_OPT_INT, AT(ep), "0", "N", "ranks of one expert-parallel group; 0: all", 0,
     1 << 20},
    {"zero", 0, MZ_OPT_INT, AT(zero), "1", "STAGE", "ZeRO stage of the data parallelism", 0, 3},
    {"seq", 0, MZ_OPT_INT, AT(seq), "0", "L", "sequence length; 0: as recorded", 0, 1 << 30},
    {"step-tokens", 0, MZ_OPT_INT, AT(step_tokens), "0", "T",
     "tokens of one step of the whole job; 0: as recorded", 0, 1e15},
    {"tokens-per-rank", 0, MZ_OPT_INT, AT(tokens_per_rank), "0", "T",
     "resample whole sequences until each rank has T tokens", 0, 1e12},
    {"first-step", 0, MZ_OPT_INT, AT(first_step), "0", "I", "skip this many recorded steps", 0,
     1e15},
    {"steps", 'n', MZ_OPT_INT, AT(steps), "0", "N", "simulate this many steps; 0: all", 0, 1e15},
    {"dispatch", 0, MZ_OPT_ENUM, AT(dispatch), "pair", "pair|rank|node",
     "a token's row crosses once per pair, destination rank or node"},
    {"network", 0, MZ_OPT_ENUM, AT(network), "port", "port|flow",
     "aggregate ports, or max-min fair flows"},
    {"accuracy", 0, MZ_OPT_REAL, AT(accuracy), "0", "X",
     "flow: relative error allowed when close events are merged", 0, 0.5},
    {"recompute", 0, MZ_OPT_ENUM, AT(recompute), "none", "none|selective|full",
     "activation recomputation"},
    {"attention", 0, MZ_OPT_ENUM, AT(attention), "flash", "flash|eager",
     "eager writes and keeps the attention probabilities"},
    {"loss-tokens", 0, MZ_OPT_INT, AT(loss_tokens), "0", "N",
     "logits and loss for so many tokens at a time; 0: all at once", 0, 1 << 30},
    {"optimizer", 0, MZ_OPT_STR, AT(optimizer), "adamw", "NAME[K=V]",
     "optimizer, options in brackets; --list names them"},
    {"temporaries", 0, MZ_OPT_ENUM, AT(temporaries), "fused", "fused|chunked|unfused",
     "temporaries of the optimizer's update"},
    {"allocator", 0, MZ_OPT_ENUM, AT(allocator), "exact", "exact|caching",
     "memory as requested, or what a caching allocator reserves"},
    {"budget-memory", 0, MZ_OPT_REAL, AT(budget_memory), NULL, "BYTES",
     "memory for one layer's backward on a rank (quotas); default: what is left", 0, 0,
     MZ_UNIT_BYTES},
    {"budget-network", 0, MZ_OPT_REAL, AT(budget_network), NULL, "BYTES",
     "bytes a rank may send in one layer's backward (quotas); default: none", 0, 0, MZ_UNIT_BYTES},
    {"effects", 0, MZ_OPT_STR, AT(effects), "", "A,no-B",
     "switch effects: launches fifo tiles noise other-work recompute-exchange planner"},
    {"seed", 0, MZ_OPT_INT, AT(seed), "1", "N", "for resampling, noise and random selections", 0,
     1e15},
    {"output", 'o', MZ_OPT_STR, AT(output), NULL, "FILE", "write a result file (HDF5)"},
    {"json", 0, MZ_OPT_FLAG, AT(json), NULL, NULL, "one JSON object on stdout (mizan-result/1)"},
    {"detail", 0, MZ_OPT_FLAG, AT(detail), NULL, NULL,
     "add seconds by step, layer, rank and phase"},
    {"phases", 0, MZ_OPT_FLAG, AT(phases), NULL, NULL,
     "add a table of what each phase takes, policies side by side"},
    {"bounds", 0, MZ_OPT_FLAG, AT(bounds), NULL, NULL,
     "add how balanced each call could be: over the plan's hosts, over any"},
    {"timing", 0, MZ_OPT_FLAG, AT(timing), NULL, NULL, "add what the planners really took here"},
    {"list", 0, MZ_OPT_FLAG, AT(list), NULL, NULL,
     "name the shipped models, clusters, policies, optimizers"},
    MZ_OPT_COMMON_ROWS(sim_args),
};

static const mz_opt_spec sim_spec = {
    .command = "mizan sim",
    .synopsis = "--trace FILE --model NAME --cluster PROFILE:GPUS --policy A,B [options]",
    .about = "Simulates every step of a recorded trace under each policy and compares them.",
    .example = "mizan sim --trace traces/example/olmoe-8r.h5 --model olmoe-1b-7b \\\n"
               "    --cluster a100-80gb:8 --policy 'static,symi,ultraep,lrmoe[keep=0.5]'",
    .table = sim_options,
    .count = sizeof sim_options / sizeof sim_options[0],
    .max_args = 0,
};

/* Everything one run holds, so that one function releases it. */
typedef struct sim_job {
    sim_args args;
    char *policies[POLICIES_MAX];
    int count;
    char *policy_text;
    mz_trace *trace;
    mz_model *model;
    mz_cluster *cluster;
    mz_stream *stream;
    mz_sim *sim;
    mz_step_options options;
    mz_optimizer optimizer;
    mz_result result;
} sim_job;

static void free_job(sim_job *job) {
    mz_result_free(&job->result);
    mz_sim_free(&job->sim);
    mz_stream_close(&job->stream);
    mz_trace_close(&job->trace);
    mz_model_free(&job->model);
    mz_cluster_free(&job->cluster);
    free(job->policy_text);
}

/* ---- --list ------------------------------------------------------------------------------------
 */

typedef mz_code (*list_fn)(const char *data_dir, mz_arena *arena, char ***names, int *count,
                           mz_err *err);

static mz_code print_names(mz_app *app, const char *title, list_fn list, mz_arena *arena,
                           mz_err *err) {
    char **names = NULL;
    int count = 0;
    mz_code code = list(app->data_dir, arena, &names, &count, err);
    if (code != MZ_OK)
        return code;
    fprintf(app->out, "%s\n", title);
    for (int i = 0; i < count; i++)
        fprintf(app->out, "  %s\n", names[i]);
    return MZ_OK;
}

static void print_option(FILE *out, const mz_opt *o) {
    char value[160];
    snprintf(value, sizeof value, "%s=%s", o->name, o->dflt ? o->dflt : o->meta ? o->meta : "");
    fprintf(out, "    %-22s %s", value, o->help);
    if (o->type == MZ_OPT_ENUM)
        fprintf(out, " (%s)", o->meta);
    fputc('\n', out);
}

static mz_code list_all(mz_app *app, mz_err *err) {
    mz_arena arena = {0};
    mz_code code = print_names(app, "models (--model)", mz_model_list, &arena, err);
    if (code == MZ_OK)
        code = print_names(app, "clusters (--cluster NAME:GPUS)", mz_cluster_list, &arena, err);
    mz_arena_free(&arena);
    if (code != MZ_OK)
        return code;
    fprintf(app->out, "policies (--policy), options in brackets with their defaults\n");
    for (const mz_policy *const *p = mz_policies; *p; p++) {
        fprintf(app->out, "  %-10s %s\n", (*p)->name, (*p)->summary);
        for (int k = 0; k < (*p)->option_count; k++)
            print_option(app->out, &(*p)->options[k]);
    }
    int count = 0;
    const mz_optimizer *const *optimizer = mz_optimizers(&count);
    fprintf(app->out, "optimizers (--optimizer), options in brackets with their defaults\n");
    for (int i = 0; i < count; i++) {
        fprintf(app->out, "  %-10s %s\n", optimizer[i]->name, optimizer[i]->summary);
        for (int k = 0; k < optimizer[i]->table_count; k++)
            print_option(app->out, &optimizer[i]->table[k]);
    }
    return MZ_OK;
}

/* ---- options to settings -----------------------------------------------------------------------
 */

static mz_code set_effect(char *word, mz_step_effects *effects, mz_err *err) {
    const struct {
        const char *name;
        bool *field;
    } table[] = {
        {"launches", &effects->launches},     {"fifo", &effects->fifo},
        {"tiles", &effects->tiles},           {"noise", &effects->noise},
        {"other-work", &effects->other_work}, {"recompute-exchange", &effects->recompute_exchange},
        {"planner", &effects->planner},
    };
    enum { COUNT = sizeof table / sizeof table[0] };
    const bool on = strncmp(word, "no-", 3) != 0;
    const char *name = on ? word : word + 3;
    const char *names[COUNT];
    for (int i = 0; i < COUNT; i++) {
        names[i] = table[i].name;
        if (strcmp(name, table[i].name) == 0) {
            *table[i].field = on;
            return MZ_OK;
        }
    }
    const char *near = mz_nearest(name, names, COUNT);
    return mz_fail(
        err, MZ_EINPUT,
        "--effects %s: unknown effect%s%s%s; use launches, fifo, tiles, noise, other-work, "
        "recompute-exchange, planner, each with no- to switch it off",
        word, near ? " (did you mean " : "", near ? near : "", near ? "?)" : "");
}

static mz_code set_effects(const char *text, mz_step_effects *effects, mz_err *err) {
    char copy[512];
    if (!text || !*text)
        return MZ_OK;
    if (snprintf(copy, sizeof copy, "%s", text) >= (int)sizeof copy)
        return mz_fail(err, MZ_EINPUT, "--effects: the list is too long");
    char *words[32];
    int count = 0;
    mz_code code = mz_split_list(copy, words, 32, &count, err);
    for (int i = 0; code == MZ_OK && i < count; i++)
        code = set_effect(words[i], effects, err);
    return code;
}

static mz_code step_options(sim_job *job, mz_err *err) {
    const sim_args *a = &job->args;
    const int32_t ranks = job->cluster->ranks;
    mz_step_options *o = &job->options;
    *o = mz_step_defaults(ranks);
    o->scope = (mz_scope)a->scope;
    o->detail = a->detail;
    o->zero = (int32_t)a->zero;
    o->ep = a->ep ? (int32_t)a->ep : ranks;
    if (o->ep > ranks || ranks % o->ep != 0)
        return mz_fail(err, MZ_EINPUT, "--ep %d: must divide the %d ranks", o->ep, ranks);
    o->sequence_length = a->seq ? a->seq : mz_trace_facts_of(job->trace)->sequence_length;
    o->dispatch = (mz_dispatch)a->dispatch;
    o->recompute = (mz_recompute)a->recompute;
    o->attention = (mz_attention)a->attention;
    o->loss_tokens = a->loss_tokens;
    o->temporaries = (mz_temporaries)a->temporaries;
    o->network = (mz_network_model)a->network;
    o->flow_accuracy = a->accuracy;
    o->allocator = (mz_allocator)a->allocator;
    o->seed = (uint64_t)a->seed;
    o->budget_memory_bytes = a->budget_memory;
    o->budget_network_bytes = a->budget_network;
    mz_code code = mz_optimizer_parse(a->optimizer, &job->optimizer, err);
    o->optimizer = &job->optimizer;
    return code == MZ_OK ? set_effects(a->effects, &o->effects, err) : code;
}

static mz_code check_dispatch(const sim_job *job, mz_err *err) {
    if (job->options.dispatch == MZ_DISPATCH_PAIR ||
        mz_trace_facts_of(job->trace)->kind != MZ_TRACE_COUNTS)
        return MZ_OK;
    return mz_fail(err, MZ_EINPUT,
                   "--dispatch %s needs a trace of pairs, %s holds counts: pass --dispatch pair",
                   job->options.dispatch == MZ_DISPATCH_RANK ? "rank" : "node", job->args.trace);
}

static mz_code load_cluster(sim_job *job, mz_app *app, mz_err *err) {
    mz_code code = mz_cluster_load(job->args.cluster, app->data_dir, &job->cluster, err);
    return code == MZ_OK
               ? mz_cluster_need_ranks(job->cluster, job->args.cluster, job->args.ranks, err)
               : code;
}

/* Scope layers: the trace's model without all but its routed experts, at the sizes asked for. */
static mz_code choose_experts(sim_job *job, mz_err *err) {
    const sim_args *a = &job->args;
    const mz_model_size size = {a->hidden, a->inter, (int32_t)a->layers};
    if (a->scope == MZ_SCOPE_STEP)
        return a->hidden || a->inter || a->layers
                   ? mz_fail(err, MZ_EINPUT,
                             "--hidden, --inter and --layers go with --scope layers")
                   : MZ_OK;
    mz_model *experts = NULL;
    const mz_code code = mz_model_resize(job->model, &size, &experts, err);
    if (code != MZ_OK)
        return code;
    mz_model_free(&job->model);
    job->model = experts;
    return MZ_OK;
}

static mz_code load_inputs(sim_job *job, mz_app *app, mz_err *err) {
    const sim_args *a = &job->args;
    mz_code code =
        mz_opt_need(a->trace, "trace", "a trace file (mizan trace import or synth makes one)", err);
    if (code == MZ_OK)
        code = mz_opt_need(a->model, "model", "a config.json or a shipped name (mizan sim --list)",
                           err);
    if (code == MZ_OK)
        code = mz_opt_need(a->cluster, "cluster", "PROFILE:GPUS (mizan sim --list)", err);
    if (code == MZ_OK)
        code = mz_model_load(a->model, app->data_dir, &job->model, err);
    if (code == MZ_OK)
        code = load_cluster(job, app, err);
    if (code == MZ_OK)
        code = mz_trace_open(a->trace, &job->trace, err);
    if (code == MZ_OK)
        code = step_options(job, err);
    if (code == MZ_OK)
        code = mz_match_model(job->trace, a->trace, job->model, err);
    if (code == MZ_OK)
        code = check_dispatch(job, err);
    if (code == MZ_OK)
        code = choose_experts(job, err);
    return code;
}

/* Recorded sequences are cut, never joined: a longer --seq would change nothing without a word. */
static void warn_short_sequences(const sim_job *job, const mz_log *log) {
    const mz_trace_sequence *sequence;
    const int64_t count = mz_trace_sequences(job->trace, &sequence);
    int64_t longest = 0;
    for (int64_t i = 0; i < count; i++)
        longest = sequence[i].tokens > longest ? sequence[i].tokens : longest;
    if (longest > 0 && job->args.seq > longest)
        mz_warn(log,
                "--seq %lld: the longest recorded sequence has %lld tokens, and sequences are cut, "
                "never joined: attention goes by the recorded ones",
                (long long)job->args.seq, (long long)longest);
}

/* The result says that times are extrapolated, and what of. */
static mz_code mark_extrapolated(sim_job *job, const char *what, mz_err *err) {
    json_t *measured = json_object_get(job->cluster->resolved, "measured");
    const char *before = json_string_value(json_object_get(measured, "outside"));
    json_t *outside = before ? json_sprintf("%s; %s", before, what) : json_string(what);
    return json_object_set_new(measured, "outside", outside) == 0 &&
                   json_object_set_new(measured, "extrapolated", json_true()) == 0
               ? MZ_OK
               : mz_fail_nomem(err, "a cluster's values");
}

/* Experts whose products no sample of the profile's is like. */
static mz_code mark_sides(sim_job *job, const mz_log *log, mz_err *err) {
    const mz_measured *m = job->cluster->device.measured;
    const int64_t hidden = job->model->hidden, inter = job->model->expert_intermediate;
    char what[128];
    if (!m || inter < 1 ||
        (mz_measured_reaches(m, MZ_WORK_UP, 2 * inter, hidden) &&
         mz_measured_reaches(m, MZ_WORK_FORWARD, hidden, inter) &&
         mz_measured_reaches(m, MZ_WORK_DGRAD, hidden, inter) &&
         mz_measured_reaches(m, MZ_WORK_DGRAD, 2 * inter, hidden) &&
         mz_measured_reaches(m, MZ_WORK_WGRAD, hidden, inter) &&
         mz_measured_reaches(m, MZ_WORK_WGRAD, 2 * inter, hidden)))
        return MZ_OK;
    snprintf(what, sizeof what, "products of experts with hidden %lld and intermediate %lld",
             (long long)hidden, (long long)inter);
    mz_warn(log,
            "%s: %s are far from all that was calibrated, their times are extrapolated: mizan "
            "calibrate --hidden %lld --inter %lld adds the shape",
            job->args.cluster, what, (long long)hidden, (long long)inter);
    return mark_extrapolated(job, what, err);
}

/* Calls of more rows than any sample, or all of fewer than any; known when the steps are timed. */
static mz_code mark_rows(sim_job *job, const mz_log *log, mz_err *err) {
    const mz_measured *m = job->cluster->device.measured;
    char what[160];
    if (!m || !mz_measured_rows_outside(m, mz_sim_rows_met(job->sim), what, sizeof what))
        return MZ_OK;
    mz_warn(
        log,
        "%s: %s: far from all that was calibrated, such times are extrapolated; a larger --pool "
        "of mizan calibrate has samples of more rows",
        job->args.cluster, what);
    return mark_extrapolated(job, what, err);
}

static mz_code split_policies(sim_job *job, mz_err *err) {
    job->policy_text = strdup(job->args.policy);
    if (!job->policy_text)
        return mz_fail_nomem(err, "the list of policies");
    mz_code code = mz_split_list(job->policy_text, job->policies, POLICIES_MAX, &job->count, err);
    return code == MZ_OK ? MZ_OK : mz_err_prefix(err, "--policy");
}

static mz_code open_stream(sim_job *job, const mz_app *app, mz_err *err) {
    const sim_args *a = &job->args;
    const mz_stream_options options = {.ranks = job->cluster->ranks,
                                       .layers = job->model->moe_layers,
                                       .step_tokens = a->step_tokens,
                                       .tokens_per_rank = a->tokens_per_rank,
                                       .sequence_length = a->seq,
                                       .first_step = a->first_step,
                                       .steps = a->steps,
                                       .seed = (uint64_t)a->seed,
                                       .want_pairs = mz_sim_wants_pairs(job->sim),
                                       .want_weights = mz_sim_wants_weights(job->sim),
                                       .read_ahead = true,
                                       .stop = app->stop};
    return mz_stream_open(job->trace, &options, &job->stream, err);
}

/* ---- results -----------------------------------------------------------------------------------
 */

static json_t *effects_json(const mz_step_effects *e) {
    return json_pack("{s:b, s:b, s:b, s:b, s:b, s:b, s:b}", "launches", (int)e->launches, "fifo",
                     (int)e->fifo, "tiles", (int)e->tiles, "noise", (int)e->noise, "other_work",
                     (int)e->other_work, "recompute_exchange", (int)e->recompute_exchange,
                     "planner", (int)e->planner);
}

static json_t *budget_json(double bytes) {
    return bytes < 0 ? json_null() : json_real(bytes);
}

static json_t *settings_json(const sim_job *job) {
    static const char *const dispatch[] = {"pair", "rank", "node"};
    static const char *const network[] = {"port", "flow"};
    static const char *const recompute[] = {"none", "selective", "full"};
    static const char *const attention[] = {"flash", "eager"};
    static const char *const temporaries[] = {"fused", "chunked", "unfused"};
    static const char *const allocator[] = {"exact", "caching"};
    const mz_step_options *o = &job->options;
    const sim_args *a = &job->args;
    json_t *settings = json_pack(
        "{s:i, s:i, s:i, s:I, s:I, s:I, s:I, s:I, s:s, s:s, s:f, s:s, s:s, s:I, s:s, "
        "s:s, s:s, s:o, "
        "s:o, s:I, s:o}",
        "ranks", job->cluster->ranks, "ep", o->ep, "zero", o->zero, "sequence_length",
        (json_int_t)o->sequence_length, "step_tokens", (json_int_t)a->step_tokens,
        "tokens_per_rank", (json_int_t)a->tokens_per_rank, "first_step", (json_int_t)a->first_step,
        "steps", (json_int_t)a->steps, "dispatch", dispatch[o->dispatch], "network",
        network[o->network], "flow_accuracy", o->flow_accuracy, "recompute",
        recompute[o->recompute], "attention", attention[o->attention], "loss_tokens",
        (json_int_t)o->loss_tokens, "optimizer", o->optimizer->name, "temporaries",
        temporaries[o->temporaries], "allocator", allocator[o->allocator], "budget_memory_bytes",
        budget_json(o->budget_memory_bytes), "budget_network_bytes",
        budget_json(o->budget_network_bytes), "seed", (json_int_t)o->seed, "effects",
        effects_json(&o->effects));
    if (o->scope == MZ_SCOPE_LAYERS &&
        json_object_set_new(settings, "scope", json_string("layers")) != 0)
        json_decref(settings), settings = NULL;
    return settings;
}

static mz_code fill_result(sim_job *job, mz_err *err) {
    mz_result *r = &job->result;
    const mz_code code =
        mz_trace_describe(job->trace, job->args.trace, mz_stream_reshaped(job->stream),
                          job->args.scope == MZ_SCOPE_LAYERS, &r->trace, err);
    if (code != MZ_OK)
        return code;
    r->settings = settings_json(job);
    r->model = json_incref(job->model->resolved);
    r->cluster = json_incref(job->cluster->resolved);
    r->run = mz_calloc((size_t)job->count, sizeof *r->run);
    r->runs = job->count;
    r->timing = job->args.timing;
    r->phases = job->args.phases;
    r->detail = job->args.detail;
    r->kind = job->args.scope == MZ_SCOPE_LAYERS ? "prediction" : NULL;
    if (!r->settings || !r->run)
        return mz_fail_nomem(err, "the result");
    return mz_sim_results(job->sim, r->run, err);
}

static void print_layers(const sim_job *job, FILE *out) {
    const mz_model *m = job->model;
    fprintf(out,
            "routed experts alone: %d layers, %d experts, hidden %lld, intermediate %lld; %d ranks "
            "on %d device%s, %s%s\n",
            m->layers, m->experts, (long long)m->hidden, (long long)m->expert_intermediate,
            job->cluster->ranks, job->cluster->gpus, job->cluster->gpus > 1 ? "s" : "",
            job->options.optimizer->name,
            job->options.recompute == MZ_RECOMPUTE_NONE ? "" : ", full recomputation");
}

/* What the figures of the table depend on and a reader cannot see in them. */
static void print_setting(const sim_job *job, FILE *out) {
    static const char *const dispatch[] = {"pair", "rank", "node"};
    const mz_step_options *o = &job->options;
    fprintf(out, "%s on %s%s\n", job->model->name, job->cluster->name,
            mz_stream_reshaped(job->stream) ? ", trace reshaped" : "");
    if (o->scope == MZ_SCOPE_LAYERS) {
        print_layers(job, out);
        return;
    }
    fprintf(out, "%d ranks, EP %d, ZeRO %d, %s, %s dispatch, %s network%s\n", job->cluster->ranks,
            o->ep, o->zero, o->optimizer->name, dispatch[o->dispatch],
            o->network == MZ_NETWORK_PORT ? "port" : "flow",
            o->recompute == MZ_RECOMPUTE_NONE        ? ""
            : o->recompute == MZ_RECOMPUTE_SELECTIVE ? ", selective recomputation"
                                                     : ", full recomputation");
    if (o->attention == MZ_ATTENTION_EAGER)
        fputs("eager attention\n", out);
    if (o->loss_tokens)
        fprintf(out, "loss of %lld tokens at a time\n", (long long)o->loss_tokens);
}

static mz_code write_result(sim_job *job, mz_app *app, mz_err *err) {
    char producer[64];
    snprintf(producer, sizeof producer, "mizan %s", app->version);
    mz_code code = mark_rows(job, &app->log, err);
    if (code == MZ_OK)
        code = fill_result(job, err);
    if (code == MZ_OK && job->args.output)
        code = mz_result_write(&job->result, job->args.output, producer, err);
    if (code != MZ_OK)
        return code;
    if (job->args.json)
        return mz_result_print_json(&job->result, app->out, err);
    print_setting(job, app->out);
    mz_result_print_table(&job->result, app->out);
    return MZ_OK;
}

/* What is complete is written even when the user interrupts. */
static mz_code run_job(sim_job *job, mz_app *app, mz_err *err) {
    job->options.stop = app->stop;
    mz_code code = mz_sim_create(job->model, job->cluster, &job->options, job->policies, job->count,
                                 &job->sim, err);
    if (code == MZ_OK && job->args.bounds)
        code = mz_sim_want_bounds(job->sim, err);
    if (code == MZ_OK)
        code = open_stream(job, app, err);
    if (code != MZ_OK)
        return code;
    const mz_load_source source = mz_stream_source(job->stream);
    code = mz_sim_run(job->sim, &source, app, mz_stream_steps(job->stream), err);
    if (code == MZ_OK)
        return write_result(job, app, err);
    if (code == MZ_EABORTED) {
        mz_err ignored;
        if (write_result(job, app, &ignored) == MZ_OK)
            mz_warn(&app->log, "interrupted: the result covers the completed steps only");
    }
    return code;
}

/* Before the work: a file that cannot be written, or that is read. */
static mz_code try_output(const sim_job *job, mz_err *err) {
    const sim_args *a = &job->args;
    const char *const file[] = {a->trace, a->model};
    const mz_job_inputs in = {file, 2, a->cluster, job->policies, job->count};
    const mz_code code = mz_output_try(a->output, err);
    return code == MZ_OK ? mz_keep_job(&in, a->output, err) : code;
}

mz_code mz_cmd_sim(mz_app *app, int argc, char **argv, mz_err *err) {
    sim_job job = {0};
    int nargs = 0;
    bool help = false;
    bool seen[sizeof sim_options / sizeof sim_options[0]] = {false};
    mz_code code =
        mz_opt_parse(&sim_spec, &job.args, argc, argv, &nargs, &help, seen, app->out, err);
    if (code != MZ_OK || help)
        return code;
    if (job.args.list)
        return list_all(app, err);
    mz_log_choose(&app->log, job.args.quiet, job.args.verbose);
    for (int i = 0; i < sim_spec.count; i++) {
        if (sim_options[i].offset == AT(budget_memory) && !seen[i])
            job.args.budget_memory = -1;
        if (sim_options[i].offset == AT(budget_network) && !seen[i])
            job.args.budget_network = -1;
    }
    code = split_policies(&job, err);
    if (code == MZ_OK)
        code = job.args.output ? try_output(&job, err) : MZ_OK;
    if (code == MZ_OK)
        code = load_inputs(&job, app, err);
    if (code == MZ_OK)
        warn_short_sequences(&job, &app->log);
    if (code == MZ_OK)
        code = mark_sides(&job, &app->log, err);
    if (code == MZ_OK)
        code = run_job(&job, app, err);
    free_job(&job);
    return code;
}
