/* mizan place: load in, placement out, by any policy. */
#include "analysis/cmd.h"
#include "analysis/place.h"
#include "common/base/opt.h"
#include "common/io/input.h"
#include "sim/cluster/cluster.h"
#include "sim/model/model.h"
#include "traces/cmd.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS_MAX = 16384 };

typedef struct place_args {
    const char *counts, *trace, *policy, *model, *cluster, *output;
    int64_t ranks, nodes, slots, groups, first_step, steps, step_tokens, dense_layers, seed;
    int axes, format;
    bool sum, json, hosts, quiet, verbose;
} place_args;

#define AT(field) offsetof(place_args, field)

static const mz_opt place_options[] = {
    {"counts", 0, MZ_OPT_STR, AT(counts), NULL, "FILE",
     "loads: CSV, JSON, .npy, SGLang's logical_count, or a trace"},
    {"trace", 't', MZ_OPT_STR, AT(trace), NULL, "FILE", "loads: a recorded trace"},
    {"policy", 'p', MZ_OPT_STR, AT(policy), NULL, "NAME[K=V]",
     "planner, options in brackets (mizan sim --list names them), or a plug-in"},
    {"ranks", 'r', MZ_OPT_INT, AT(ranks), "0", "R",
     "ranks that share the experts; 0: the cluster's, or as recorded", 0, RANKS_MAX},
    {"nodes", 0, MZ_OPT_INT, AT(nodes), "0", "M", "nodes they lie on; 0: the cluster's, or one", 0,
     RANKS_MAX},
    {"slots", 0, MZ_OPT_INT, AT(slots), "0", "S",
     "experts that a rank can hold, its own included; 0: the policy's default", 0, 65536},
    {"groups", 0, MZ_OPT_INT, AT(groups), "0", "G",
     "expert groups of the router; 0: the model's, or one", 0, 65536},
    {"model", 'm', MZ_OPT_STR, AT(model), NULL, "NAME|FILE",
     "for sizes, groups and the numbers of layers"},
    {"cluster", 'c', MZ_OPT_STR, AT(cluster), NULL, "NAME|FILE:GPUS",
     "for ranks, nodes, and planners that weigh bytes"},
    {"axes", 0, MZ_OPT_ENUM, AT(axes), "auto",
     "auto|layers,experts|layers,sources,experts|steps,layers,experts|steps,layers,sources,experts",
     "what the axes of the counts are"},
    {"first-step", 0, MZ_OPT_INT, AT(first_step), "0", "I",
     "first step of the window that is placed; history lies before it", 0, 1e15},
    {"steps", 'n', MZ_OPT_INT, AT(steps), "0", "N", "steps of the window; 0: all that follow", 0,
     1e15},
    {"sum", 0, MZ_OPT_FLAG, AT(sum), NULL, NULL, "add the window's steps up instead of their mean"},
    {"step-tokens", 0, MZ_OPT_INT, AT(step_tokens), "0", "T",
     "tokens of one step, for traces without steps", 0, 1e15},
    {"dense-layers", 0, MZ_OPT_INT, AT(dense_layers), "0", "N",
     "dense layers before the first MoE layer, where there is no --model", 0, 65536},
    {"seed", 0, MZ_OPT_INT, AT(seed), "1", "N", "for reshaped traces and random planners", 0, 1e15},
    {"format", 0, MZ_OPT_ENUM, AT(format), "none", "none|sglang|vllm|tensorrt-llm|deepspeed",
     "write what that program reads"},
    {"output", 'o', MZ_OPT_STR, AT(output), NULL, "FILE",
     "where --format, or else the JSON report, goes"},
    {"json", 0, MZ_OPT_FLAG, AT(json), NULL, NULL, "the JSON report on stdout, not the table"},
    {"hosts", 0, MZ_OPT_FLAG, AT(hosts), NULL, NULL, "list the experts of every rank and layer"},
    MZ_OPT_COMMON_ROWS(place_args),
};

static const mz_opt_spec place_spec = {
    .command = "mizan place",
    .synopsis = "--counts FILE|--trace FILE --policy NAME --ranks R [options]",
    .about = "Places experts on ranks for given loads, with any planner that mizan sim knows.",
    .example =
        "printf '90,132,40,61,104,165,39,4,73,56,183,86\\n' >load.csv\n"
        "  mizan place --policy eplb --counts load.csv --ranks 8 --nodes 2 --slots 2 --groups 4",
    .table = place_options,
    .count = sizeof place_options / sizeof place_options[0],
    .max_args = 0,
};

/* Everything one run holds, so that one function releases it. */
typedef struct place_job {
    place_args args;
    mz_arena arena;
    mz_model *model;
    mz_cluster *cluster;
    place_counts counts;
    place_source *source;
    place_facts facts;
    mz_policy_env env;
    const mz_policy *policy;
    void *state;
    mz_policy_traits traits;
    place_loads loads;
    place_result result;
} place_job;

static void free_job(place_job *job) {
    if (job->state && job->policy->release)
        job->policy->release(job->state);
    place_source_close(&job->source);
    mz_model_free(&job->model);
    mz_cluster_free(&job->cluster);
    mz_arena_free(&job->arena);
}

/* ---- input -------------------------------------------------------------------------------------
 */

static mz_code check_args(const place_args *a, mz_err *err) {
    if (!a->counts == !a->trace)
        return mz_fail(err, MZ_EINPUT, "%s",
                       a->counts ? "--counts and --trace: give one of them"
                                 : "--counts or --trace is missing: the loads to place");
    if (!a->policy)
        return mz_fail(err, MZ_EINPUT,
                       "--policy is missing: a planner such as eplb (mizan sim --list names all)");
    for (const char *at = a->policy; *at && *at != '['; at++)
        if (*at == ',')
            return mz_fail(err, MZ_EINPUT, "--policy %s: mizan place takes one policy", a->policy);
    if (a->format && a->json && !a->output)
        return mz_fail(err, MZ_EINPUT,
                       "--format and --json both want standard output: give -o FILE for the first");
    if (a->trace && a->axes)
        return mz_fail(err, MZ_EINPUT, "--axes is for files of counts, --trace knows its own");
    return MZ_OK;
}

static mz_code open_loads(place_job *job, mz_err *err) {
    const place_args *a = &job->args;
    bool trace = false;
    mz_code code = MZ_OK;
    if (a->counts)
        code = place_read_file(a->counts, (place_axes)a->axes, a->ranks, &job->arena, &job->counts,
                               &trace, err);
    if (code == MZ_OK)
        code = place_source_open(a->trace ? a->trace : a->counts,
                                 a->counts && !trace ? &job->counts : NULL, &job->source, err);
    if (code == MZ_OK && a->counts && !trace && a->step_tokens)
        code = mz_fail(err, MZ_EINPUT, "--step-tokens is for traces, %s holds counts", a->counts);
    if (code == MZ_OK)
        job->facts = place_source_facts(job->source);
    return code;
}

static mz_code load_machine(place_job *job, mz_app *app, mz_err *err) {
    const place_args *a = &job->args;
    mz_code code = a->model ? mz_model_load(a->model, app->data_dir, &job->model, err) : MZ_OK;
    if (code == MZ_OK && a->cluster)
        code = mz_cluster_load(a->cluster, app->data_dir, &job->cluster, err);
    if (code != MZ_OK)
        return code;
    if (job->model && job->model->experts != job->facts.experts)
        return mz_fail(err, MZ_EINPUT,
                       "%s has %d experts per layer, model %s has %d: pass --model that fits",
                       a->trace ? a->trace : a->counts, job->facts.experts, job->model->name,
                       job->model->experts);
    return MZ_OK;
}

/* ---- ranks, nodes, groups ----------------------------------------------------------------------
 */

static mz_code choose_ranks(place_job *job, mz_err *err) {
    const place_args *a = &job->args;
    int64_t ranks = a->ranks;
    if (job->cluster && mz_cluster_need_ranks(job->cluster, a->cluster, ranks, err) != MZ_OK)
        return err->code;
    if (!ranks)
        ranks = job->cluster ? job->cluster->ranks : job->facts.sources;
    if (!a->ranks && !job->cluster && job->facts.sources == 1)
        return mz_fail(err, MZ_EINPUT,
                       "--ranks is missing: the loads do not say how many ranks share the experts");
    if (ranks > RANKS_MAX)
        return mz_fail(err, MZ_EINPUT, "%lld ranks are too many; at most %d", (long long)ranks,
                       RANKS_MAX);
    if (a->slots && a->slots * ranks < job->facts.experts)
        return mz_fail(err, MZ_EINPUT,
                       "--slots %lld: %lld ranks hold %lld experts, a layer has %d: give at least "
                       "%lld",
                       (long long)a->slots, (long long)ranks, (long long)(a->slots * ranks),
                       job->facts.experts, (long long)((job->facts.experts + ranks - 1) / ranks));
    job->env.ranks = (int32_t)ranks;
    return MZ_OK;
}

static mz_code choose_nodes(place_job *job, mz_err *err) {
    const place_args *a = &job->args;
    const int32_t ranks = job->env.ranks;
    if (job->cluster && a->nodes && a->nodes != job->cluster->topology.domains)
        return mz_fail(err, MZ_EINPUT, "--nodes %lld: cluster %s has %d", (long long)a->nodes,
                       a->cluster, job->cluster->topology.domains);
    if (job->cluster)
        return MZ_OK; /* mz_policy_env_of, or copied from it */
    const int32_t nodes = a->nodes ? (int32_t)a->nodes : 1;
    if (ranks % nodes != 0)
        return mz_fail(err, MZ_EINPUT, "--nodes %d does not divide the %d ranks", nodes, ranks);
    int32_t *domain = MZ_NEW(&job->arena, int32_t, ranks);
    if (!domain)
        return mz_fail_nomem(err, "the nodes");
    for (int32_t r = 0; r < ranks; r++)
        domain[r] = r / (ranks / nodes);
    job->env.domain = domain;
    job->env.domains = nodes;
    return MZ_OK;
}

/* A planner that does not weigh bytes is told of an expert of one value, on a machine of one byte a
 * second: nothing follows from them. */
static mz_code fill_env(place_job *job, mz_err *err) {
    const place_args *a = &job->args;
    mz_code code = choose_ranks(job, err);
    const int32_t ranks = job->env.ranks;
    if (code == MZ_OK && job->model && job->cluster) {
        const mz_policy_job machine = {
            .model = job->model, .cluster = job->cluster, .ep = ranks, .seed = (uint64_t)a->seed};
        code = mz_policy_env_of(&machine, 0, &job->arena, &job->env, err);
    } else if (code == MZ_OK) {
        job->env = (mz_policy_env){.ranks = ranks,
                                   .experts = job->facts.experts,
                                   .top_k = job->facts.top_k,
                                   .hidden = 1,
                                   .intermediate = 1,
                                   .expert_parameters = 1,
                                   .weight_bytes = 2,
                                   .token_bytes = 2,
                                   .expert_state_bytes = 12,
                                   .pair_seconds = 1,
                                   .inside_bytes_s = 1,
                                   .outside_bytes_s = 1,
                                   .seed = (uint64_t)a->seed};
        if (job->cluster) {
            job->env.domain = job->cluster->topology.domain;
            job->env.domains = job->cluster->topology.domains;
        }
    }
    if (code == MZ_OK)
        code = choose_nodes(job, err);
    job->env.layers = job->facts.layers;
    const int32_t groups = a->groups    ? (int32_t)a->groups
                           : job->model ? job->model->router_groups
                                        : 1;
    job->env.expert_groups = groups > 1 ? groups : 1;
    if (code == MZ_OK && job->facts.experts % job->env.expert_groups != 0)
        return mz_fail(err, MZ_EINPUT, "--groups %d does not divide the %d experts",
                       job->env.expert_groups, job->facts.experts);
    return code;
}

/* ---- the policy --------------------------------------------------------------------------------
 */

/* The value of "slots" in the brackets of `text`, or -1. */
static int64_t slots_in(const char *text) {
    for (const char *at = strchr(text, '['); at; at = strchr(at, ',')) {
        at++;
        if (strncmp(at, "slots=", 6) == 0)
            return strtoll(at + 6, NULL, 10);
    }
    return -1;
}

/* --slots becomes the policy's own option, where it has one. */
static mz_code with_slots(place_job *job, const char **text, mz_err *err) {
    const place_args *a = &job->args;
    bool option = false;
    for (int i = 0; i < job->policy->option_count; i++)
        option = option || strcmp(job->policy->options[i].name, "slots") == 0;
    const int64_t given = slots_in(a->policy);
    if (!a->slots || !option)
        return MZ_OK;
    if (given > 0 && given != a->slots)
        return mz_fail(err, MZ_EINPUT, "--slots %lld, but --policy %s: give one of them",
                       (long long)a->slots, a->policy);
    if (given > 0)
        return MZ_OK;
    const char *open = strchr(a->policy, '[');
    const int rest = open ? (int)strlen(open) - 2 : 0;
    *text = rest > 0
                ? mz_arena_printf(&job->arena, "%.*s[%.*s,slots=%lld]", (int)(open - a->policy),
                                  a->policy, rest, open + 1, (long long)a->slots)
                : mz_arena_printf(&job->arena, "%.*s[slots=%lld]", (int)strcspn(a->policy, "["),
                                  a->policy, (long long)a->slots);
    return *text ? MZ_OK : mz_fail_nomem(err, "a policy");
}

static mz_code start_policy(place_job *job, mz_err *err) {
    const place_args *a = &job->args;
    const char *text = a->policy;
    void *options = NULL;
    mz_code code = mz_policy_parse(text, &job->arena, &job->policy, &options, err);
    if (code == MZ_OK)
        code = with_slots(job, &text, err);
    if (code == MZ_OK && text != a->policy)
        code = mz_policy_parse(text, &job->arena, &job->policy, &options, err);
    if (code == MZ_OK && job->policy->needs_sizes && !(job->model && job->cluster))
        code = mz_fail(err, MZ_EINPUT,
                       "policy %s weighs bytes against time: give --model and --cluster",
                       job->policy->name);
    if (code == MZ_OK)
        code = job->policy->init(&job->env, options, &job->arena, &job->state, &job->traits, err);
    if (code != MZ_OK) {
        job->state = NULL;
        return code;
    }
    const mz_policy_traits *t = &job->traits;
    const bool limited = !t->free_replicas && !t->open_slots;
    if (a->slots && limited && t->slots > a->slots)
        return mz_fail(err, MZ_EINPUT,
                       "policy %s uses %d slots on a rank, --slots %lld: set its own options in "
                       "brackets",
                       a->policy, t->slots, (long long)a->slots);
    job->result.slots_given = (int32_t)a->slots;
    job->result.slots = !limited ? 0 : a->slots ? (int32_t)a->slots : t->slots;
    return MZ_OK;
}

/* ---- numbers of layers -------------------------------------------------------------------------
 */

/* Layers as the model numbers them: from the file, the model, or --dense-layers. */
static mz_code number_layers(place_job *job, mz_err *err) {
    const place_args *a = &job->args;
    const place_facts *f = &job->facts;
    const mz_model *m = job->model;
    const bool whole_model = a->format == PLACE_SGLANG || a->format == PLACE_TENSORRT;
    place_layer *layer = job->result.layer = MZ_NEW(&job->arena, place_layer, f->layers);
    if (!layer)
        return mz_fail_nomem(err, "the layers");
    if (a->dense_layers && (m || f->number))
        return mz_fail(err, MZ_EINPUT, "--dense-layers: %s says which layers are dense",
                       m ? "--model" : "the file of counts");
    const bool fits = m && (f->number ? m->layers == f->rows : m->moe_layers == f->layers);
    if (m && whole_model && !fits)
        return mz_fail(err, MZ_EINPUT,
                       "the loads have %d %slayers, model %s has %d: pass --model that fits",
                       f->number ? f->rows : f->layers, f->number ? "" : "MoE ", m->name,
                       f->number ? m->layers : m->moe_layers);
    job->result.rows = fits ? m->layers : f->rows + (int32_t)a->dense_layers;
    int32_t next = 0;
    for (int32_t l = 0; l < f->layers; l++, next++) {
        while (fits && !f->number && !m->is_moe[next])
            next++;
        layer[l].number = f->number ? f->number[l] : next + (int32_t)a->dense_layers;
    }
    return MZ_OK;
}

/* ---- output ------------------------------------------------------------------------------------
 */

static mz_code print_file(const place_job *job, const mz_log *log, FILE *out, mz_err *err) {
    if (job->args.format)
        return place_print_format(&job->result, (place_format)job->args.format, log, out, err);
    return place_print_json(&job->result, out, err);
}

/* The file appears whole or not at all. */
static mz_code write_file(const place_job *job, const mz_log *log, mz_err *err) {
    mz_output output;
    mz_code code = mz_output_begin(&output, job->args.output, err);
    if (code != MZ_OK)
        return code;
    FILE *out = fopen(output.partial, "w");
    if (!out)
        code = mz_fail(err, MZ_EINPUT, "%s: cannot write: %s", job->args.output, strerror(errno));
    else
        code = print_file(job, log, out, err);
    const bool failed = out && ferror(out);
    if (out && (fclose(out) != 0 || failed) && code == MZ_OK)
        code =
            mz_fail(err, MZ_EINTERNAL, "%s: cannot write: %s", job->args.output, strerror(errno));
    if (code == MZ_OK)
        return mz_output_commit(&output, err);
    mz_output_abandon(&output);
    return code;
}

static mz_code report(const place_job *job, mz_app *app, mz_err *err) {
    const place_args *a = &job->args;
    if (a->output) {
        mz_code code = write_file(job, &app->log, err);
        if (code != MZ_OK)
            return code;
    } else if (a->format || a->json) {
        return print_file(job, &app->log, app->out, err);
    }
    if (a->json)
        return place_print_json(&job->result, app->out, err);
    place_print_table(&job->result, a->hosts || a->verbose, app->out);
    return MZ_OK;
}

static mz_code run_job(place_job *job, mz_app *app, mz_err *err) {
    const place_args *a = &job->args;
    const place_window window = {.first_step = a->first_step,
                                 .steps = a->steps,
                                 .step_tokens = a->step_tokens,
                                 .sum = a->sum,
                                 .seed = (uint64_t)a->seed,
                                 .stop = app->stop};
    const char *const file[] = {a->counts, a->trace, a->model};
    char *const policy = (char *)a->policy; /* read alone */
    const mz_job_inputs in = {file, 3, a->cluster, &policy, policy ? 1 : 0};
    mz_code code = mz_keep_job(&in, a->output, err);
    if (code == MZ_OK)
        code = open_loads(job, err);
    if (code == MZ_OK)
        code = load_machine(job, app, err);
    if (code == MZ_OK)
        code = fill_env(job, err);
    job->env.stop = app->stop;
    if (code == MZ_OK)
        code = start_policy(job, err);
    if (code == MZ_OK)
        code = number_layers(job, err);
    if (code == MZ_OK)
        code = place_source_read(job->source, job->env.ranks, &window, &job->traits, &job->arena,
                                 &job->loads, err);
    if (code != MZ_OK)
        return code;
    place_result *r = &job->result;
    r->policy = a->policy;
    r->shown = job->loads.shown;
    r->ranks = job->env.ranks;
    r->nodes = job->env.domains;
    r->experts = job->env.experts;
    r->groups = job->env.expert_groups;
    r->layers = job->loads.layers;
    r->lossy = job->traits.lossy;
    r->lasting = !job->traits.free_replicas;
    r->reshaped = job->loads.reshaped;
    code = place_plan(job->policy, job->state, &job->traits, &job->env, &job->loads, app->stop,
                      &job->arena, r, err);
    return code == MZ_OK ? report(job, app, err) : code;
}

mz_code mz_cmd_place(mz_app *app, int argc, char **argv, mz_err *err) {
    place_job job = {0};
    int nargs = 0;
    bool help = false;
    mz_code code =
        mz_opt_parse(&place_spec, &job.args, argc, argv, &nargs, &help, NULL, app->out, err);
    if (code != MZ_OK || help)
        return code;
    mz_log_choose(&app->log, job.args.quiet, job.args.verbose);
    code = check_args(&job.args, err);
    if (code == MZ_OK)
        code = run_job(&job, app, err);
    free_job(&job);
    return code;
}
