/* mizan memory: what a rank holds, its peak, and the largest micro-batch that fits. The model of
 * memory is the step's own (sim/step), run without its clock. */
#include "analysis/cmd.h"
#include "analysis/loads.h"
#include "analysis/match.h"
#include "common/base/opt.h"
#include "common/io/json.h"
#include "sim/step/run.h"
#include "traces/stream.h"

#include <string.h>

enum {
    DEFAULT_SEQUENCE = 4096,
    SEQUENCES_MAX = 1 << 20, /* of a micro-batch */
    TOKENS_MAX = 1 << 30     /* of a micro-batch */
};

typedef struct memory_args {
    const char *model, *cluster, *optimizer, *policy, *trace;
    int64_t loss_tokens, ep, zero, seq, micro_batch, micro_batches, step_tokens, first_step, steps;
    double imbalance;
    int recompute, temporaries, attention, allocator;
    bool keep_logits, no_search, json, quiet, verbose;
} memory_args;

#define AT(field) offsetof(memory_args, field)

static const mz_opt memory_options[] = {
    {"model", 'm', MZ_OPT_STR, AT(model), NULL, "NAME|FILE",
     "shipped model or a Hugging Face config.json"},
    {"cluster", 'c', MZ_OPT_STR, AT(cluster), NULL, "NAME|FILE:GPUS",
     "hardware profile and number of GPUs"},
    {"optimizer", 0, MZ_OPT_STR, AT(optimizer), "adamw", "NAME[K=V]",
     "optimizer; mizan sim --list names them"},
    {"ep", 0, MZ_OPT_INT, AT(ep), "0", "N", "ranks of one expert-parallel group; 0: all", 0,
     1 << 20},
    {"zero", 0, MZ_OPT_INT, AT(zero), "1", "STAGE", "ZeRO stage of the data parallelism", 0, 3},
    {"policy", 'p', MZ_OPT_STR, AT(policy), "static", "NAME[K=V]",
     "one policy; mizan sim --list names them"},
    {"trace", 't', MZ_OPT_STR, AT(trace), NULL, "FILE",
     "recorded routing; without one every expert is chosen equally often, see --imbalance"},
    {"seq", 0, MZ_OPT_INT, AT(seq), "0", "L", "sequence length; 0: the trace's, or 4096", 0,
     1 << 24},
    {"micro-batch", 0, MZ_OPT_INT, AT(micro_batch), "0", "SEQUENCES",
     "sequences of a rank's micro-batch; 0: as recorded, or 1", 0, SEQUENCES_MAX},
    {"micro-batches", 0, MZ_OPT_INT, AT(micro_batches), "1", "N",
     "micro-batches of a step, without a trace", 1, 1 << 16},
    {"imbalance", 0, MZ_OPT_REAL, AT(imbalance), "1", "X",
     "without a trace: rows of a group's first rank over the mean", 1, 1e6},
    {"recompute", 0, MZ_OPT_ENUM, AT(recompute), "none", "none|selective|full",
     "activation recomputation"},
    {"attention", 0, MZ_OPT_ENUM, AT(attention), "flash", "flash|eager",
     "eager keeps the attention probabilities"},
    {"temporaries", 0, MZ_OPT_ENUM, AT(temporaries), "fused", "unfused|chunked|fused",
     "temporaries of the optimizer's update"},
    {"loss-tokens", 0, MZ_OPT_INT, AT(loss_tokens), "0", "N",
     "logits and loss for so many tokens at a time; 0: all at once", 0, TOKENS_MAX},
    {"keep-logits", 0, MZ_OPT_FLAG, AT(keep_logits), NULL, NULL,
     "the training loop holds the last logits until the next ones are there"},
    {"allocator", 0, MZ_OPT_ENUM, AT(allocator), "exact", "exact|caching",
     "memory as requested, or what a caching allocator reserves"},
    {"step-tokens", 0, MZ_OPT_INT, AT(step_tokens), "0", "T",
     "of the trace: tokens of one step of the whole job; 0: as recorded", 0, 1e15},
    {"first-step", 0, MZ_OPT_INT, AT(first_step), "0", "I", "of the trace: skip so many steps", 0,
     1e15},
    {"steps", 'n', MZ_OPT_INT, AT(steps), "0", "N", "of the trace: look at so many steps; 0: all",
     0, 1e15},
    {"no-search", 0, MZ_OPT_FLAG, AT(no_search), NULL, NULL,
     "leave out the largest micro-batch, which takes a dozen passes over a trace"},
    {"json", 0, MZ_OPT_FLAG, AT(json), NULL, NULL, "one JSON object on stdout (mizan-memory/1)"},
    MZ_OPT_COMMON_ROWS(memory_args),
};

static const mz_opt_spec memory_spec = {
    .command = "mizan memory",
    .synopsis = "--model NAME --cluster PROFILE:GPUS --optimizer NAME [options]",
    .about = "Memory of a rank in a training step: resident, at the peak, by category, and the "
             "largest micro-batch\nthat fits. With --trace the token buffers are those of the "
             "recorded routing under the policy.",
    .example = "mizan memory --model qwen3-30b-a3b --cluster h100-80gb:64 --optimizer skewadam "
               "--ep 8",
    .table = memory_options,
    .count = sizeof memory_options / sizeof memory_options[0],
    .max_args = 0,
};

typedef struct memory_job {
    memory_args args;
    mz_model *model;
    mz_cluster *cluster;
    mz_trace *trace; /* NULL: loads as stated */
    mz_optimizer optimizer;
    mz_step_options options;
    mz_app *app;
    /* results */
    int64_t parameters[4], active, state[4]; /* by tier */
    int64_t resident[MZ_MEM_CATEGORIES], resident_total, own_experts;
    mz_sized replicas, token_buffers;
    mz_run run;
    int64_t *rank_peak; /* [shown] the ranks of a group, or of the job with a trace */
    int32_t shown;
    int64_t max_micro_batch;
    mz_arena arena;
} memory_job;

/* ---- input -------------------------------------------------------------------------------------
 */

static mz_code step_options(memory_job *job, mz_err *err) {
    static const mz_temporaries temporaries[] = {MZ_TEMPORARIES_UNFUSED, MZ_TEMPORARIES_CHUNKED,
                                                 MZ_TEMPORARIES_FUSED};
    const memory_args *a = &job->args;
    const int32_t ranks = job->cluster->ranks;
    mz_step_options *o = &job->options;
    *o = mz_step_defaults(ranks);
    o->stop = job->app->stop;
    o->zero = (int32_t)a->zero;
    o->ep = a->ep ? (int32_t)a->ep : ranks;
    if (o->ep > ranks || ranks % o->ep != 0)
        return mz_fail(err, MZ_EINPUT, "--ep %d: must divide the %d ranks", o->ep, ranks);
    if (!a->ep && ranks > job->model->experts)
        return mz_fail(err, MZ_EINPUT,
                       "%d ranks are more than the %d experts of %s: pass --ep with the ranks of "
                       "one expert-parallel group",
                       ranks, job->model->experts, job->model->name);
    o->sequence_length = a->seq;
    if (!a->seq && job->trace)
        o->sequence_length = mz_trace_facts_of(job->trace)->sequence_length;
    if (o->sequence_length == 0)
        o->sequence_length = DEFAULT_SEQUENCE;
    if (a->micro_batch > TOKENS_MAX / o->sequence_length)
        return mz_fail(err, MZ_EINPUT,
                       "--micro-batch %lld: with sequences of %lld tokens more than 2^30 tokens",
                       (long long)a->micro_batch, (long long)o->sequence_length);
    o->recompute = (mz_recompute)a->recompute;
    o->attention = (mz_attention)a->attention;
    o->temporaries = temporaries[a->temporaries];
    o->allocator = (mz_allocator)a->allocator;
    o->keep_logits = a->keep_logits;
    o->loss_tokens = a->loss_tokens;
    o->memory_only = true;
    o->one_group = !job->trace;
    o->optimizer = &job->optimizer;
    return mz_optimizer_parse(a->optimizer, &job->optimizer, err);
}

static mz_code load_inputs(memory_job *job, mz_err *err) {
    const memory_args *a = &job->args;
    const char *data = job->app->data_dir;
    mz_code code =
        mz_opt_need(a->model, "model", "a config.json or a shipped name (mizan model --list)", err);
    if (code == MZ_OK)
        code = mz_opt_need(a->cluster, "cluster", "PROFILE:GPUS (mizan sim --list)", err);
    if (code == MZ_OK)
        code = mz_model_load(a->model, data, &job->model, err);
    if (code == MZ_OK)
        code = mz_cluster_load(a->cluster, data, &job->cluster, err);
    if (code == MZ_OK && a->trace)
        code = mz_trace_open(a->trace, &job->trace, err);
    if (code == MZ_OK && a->trace)
        code = mz_match_model(job->trace, a->trace, job->model, err);
    return code == MZ_OK ? step_options(job, err) : code;
}

static void free_job(memory_job *job) {
    mz_trace_close(&job->trace);
    mz_model_free(&job->model);
    mz_cluster_free(&job->cluster);
    mz_arena_free(&job->arena);
}

/* ---- one run -----------------------------------------------------------------------------------
 */

/* What one run holds, so that one function releases it. */
typedef struct memory_run {
    mz_stream *stream;
    mz_loads *loads;
    mz_sim *sim;
    mz_load_source recorded;
} memory_run;

static mz_code open_trace(const memory_job *job, memory_run *r, mz_err *err) {
    const memory_args *a = &job->args;
    const mz_stream_options options = {.ranks = job->cluster->ranks,
                                       .step_tokens = a->step_tokens,
                                       .sequence_length = a->seq,
                                       .first_step = a->first_step,
                                       .steps = a->steps,
                                       .seed = 1,
                                       .want_pairs = mz_sim_wants_pairs(r->sim),
                                       .want_weights = mz_sim_wants_weights(r->sim),
                                       .read_ahead = true,
                                       .stop = job->app->stop};
    mz_code code = mz_stream_open(job->trace, &options, &r->stream, err);
    if (code == MZ_OK)
        r->recorded = mz_stream_source(r->stream);
    return code;
}

/* Two steps where policies look back and loads are uneven; otherwise every step is like the first.
 */
static mz_code open_loads(const memory_job *job, int64_t micro_batch, memory_run *r, mz_err *err) {
    const memory_args *a = &job->args;
    const mz_model *m = job->model;
    mz_loads_options options = {.ranks = job->cluster->ranks,
                                .ep = job->options.ep,
                                .experts = m->experts,
                                .layers = m->moe_layers,
                                .top_k = m->top_k,
                                .steps = a->imbalance > 1 ? 2 : 1,
                                .micro_batches = (int32_t)a->micro_batches,
                                .tokens = micro_batch * job->options.sequence_length,
                                .imbalance = a->imbalance};
    mz_code code = job->trace ? open_trace(job, r, err) : MZ_OK;
    options.shape = job->trace ? &r->recorded : NULL;
    return code == MZ_OK ? mz_loads_create(&options, &r->loads, err) : code;
}

static mz_code keep_result(memory_job *job, const memory_run *r, mz_err *err) {
    mz_code code = mz_sim_results(r->sim, &job->run, err);
    if (code != MZ_OK)
        return code;
    job->shown = job->options.one_group ? job->options.ep : job->cluster->ranks;
    job->rank_peak = MZ_NEW(&job->arena, int64_t, job->shown);
    if (!job->rank_peak)
        return mz_fail_nomem(err, "peaks of ranks");
    memcpy(job->rank_peak, job->run.rank_peak_bytes, sizeof *job->rank_peak * (size_t)job->shown);
    mz_sim_sizing(r->sim, 0, &job->replicas, &job->token_buffers);
    job->own_experts = mz_step_own_experts(mz_sim_step(r->sim, 0));
    mz_step_resident(mz_sim_step(r->sim, 0), job->resident);
    for (int c = 0; c < MZ_MEM_CATEGORIES; c++)
        job->resident_total += job->resident[c];
    return MZ_OK;
}

/* micro_batch 0: the trace's own rows. keep: the result goes into the job, else only *fits. */
static mz_code run_once(memory_job *job, int64_t micro_batch, bool keep, bool *fits, mz_err *err) {
    memory_run r = {0};
    mz_run run;
    char *policy = (char *)job->args.policy;
    mz_app quiet = *job->app;
    quiet.log = mz_log_make(NULL, 0);
    mz_code code = mz_sim_create(job->model, job->cluster, &job->options, &policy, 1, &r.sim, err);
    if (code == MZ_OK)
        code = open_loads(job, micro_batch, &r, err);
    if (code == MZ_OK) {
        const mz_load_source source = mz_loads_source(r.loads);
        const int64_t steps = job->trace ? mz_stream_steps(r.stream) : 2;
        code = mz_sim_run(r.sim, &source, &quiet, steps, err);
    }
    if (code == MZ_OK)
        code = keep ? keep_result(job, &r, err) : mz_sim_results(r.sim, &run, err);
    if (code == MZ_OK)
        *fits = keep ? job->run.fits : run.fits;
    mz_loads_free(&r.loads);
    mz_stream_close(&r.stream);
    mz_sim_free(&r.sim);
    return code;
}

/* Largest number of sequences that fits, up to the limits above: doubled until it does not fit,
 * then halved in between. */
static mz_code find_largest(memory_job *job, mz_err *err) {
    const int64_t by_tokens = TOKENS_MAX / job->options.sequence_length;
    const int64_t limit = by_tokens < SEQUENCES_MAX ? by_tokens : SEQUENCES_MAX;
    int64_t fitting = 0, too_many = limit + 1;
    mz_code code = MZ_OK;
    for (int64_t n = 1; code == MZ_OK && too_many - fitting > 1;) {
        bool fits = false;
        code = run_once(job, n, false, &fits, err);
        if (fits)
            fitting = n;
        else
            too_many = n;
        const int64_t doubled = 2 * fitting < limit ? 2 * fitting : limit;
        n = too_many > limit && fitting > 0 ? doubled : fitting + (too_many - fitting) / 2;
    }
    job->max_micro_batch = fitting;
    return code;
}

static void count_parameters(memory_job *job) {
    const mz_model *m = job->model;
    for (int64_t i = 0; i < m->tensors; i++) {
        const mz_tensor *t = &m->tensor[i];
        job->parameters[t->tier] += t->rows * t->cols * t->count;
        job->state[t->tier] += mz_optimizer_state_bytes(&job->optimizer, t) * t->count;
    }
    job->active = mz_model_active_parameters(m);
}

static mz_code work(memory_job *job, mz_err *err) {
    bool fits;
    int64_t micro_batch = job->args.micro_batch;
    if (micro_batch == 0 && !job->trace)
        micro_batch = 1;
    count_parameters(job);
    mz_code code = run_once(job, micro_batch, true, &fits, err);
    return code == MZ_OK && !job->args.no_search ? find_largest(job, err) : code;
}

/* ---- output ------------------------------------------------------------------------------------
 */

static const char *const recompute_names[] = {"none", "selective", "full"};
static const char *const temporaries_names[] = {"unfused", "chunked", "fused"};
static const char *const attention_names[] = {"flash", "eager"};
static const char *const allocator_names[] = {"exact", "caching"};

/* Where the rows come from. */
static void describe_load(const memory_job *job, char *text, size_t size) {
    const memory_args *a = &job->args;
    const long long seq = (long long)job->options.sequence_length;
    if (job->trace && a->micro_batch == 0)
        snprintf(text, size, "rows as recorded in %s", a->trace);
    else if (job->trace)
        snprintf(text, size, "recorded rows of %s scaled to %lld x %lld tokens per rank", a->trace,
                 (long long)a->micro_batch, seq);
    else if (a->imbalance > 1)
        snprintf(text, size,
                 "stated load: the first rank has %g times the mean; %lld x %lld tokens per rank",
                 a->imbalance, (long long)(a->micro_batch ? a->micro_batch : 1), seq);
    else
        snprintf(text, size, "balanced load, %lld x %lld tokens per rank",
                 (long long)(a->micro_batch ? a->micro_batch : 1), seq);
}

static json_t *categories_json(const int64_t bytes[MZ_MEM_CATEGORIES]) {
    json_t *o = json_object();
    for (int c = 0; o && c < MZ_MEM_CATEGORIES; c++)
        if (json_object_set_new(o, mz_memcat_name((mz_memcat)c), json_integer(bytes[c]))) {
            json_decref(o);
            return NULL;
        }
    return o;
}

/* The tiers as the contract names them: shared experts belong to the backbone. */
static json_t *tiers_json(const int64_t tier[4]) {
    const int64_t backbone = tier[MZ_TIER_BACKBONE] + tier[MZ_TIER_SHARED];
    return json_pack("{s:I, s:I, s:I, s:I}", "total",
                     (json_int_t)(backbone + tier[MZ_TIER_EXPERT] + tier[MZ_TIER_ROUTER]),
                     "backbone", (json_int_t)backbone, "experts", (json_int_t)tier[MZ_TIER_EXPERT],
                     "router", (json_int_t)tier[MZ_TIER_ROUTER]);
}

static json_t *settings_json(const memory_job *job, const char *load) {
    const memory_args *a = &job->args;
    const mz_step_options *o = &job->options;
    return json_pack(
        "{s:s, s:s, s:i, s:i, s:i, s:s, s:s, s:o, s:s, s:I, s:I, s:I, s:s, s:s, s:s, s:I, s:b, "
        "s:s}",
        "model", job->model->name, "cluster", job->cluster->name, "ranks", job->cluster->ranks,
        "ep", o->ep, "zero", o->zero, "optimizer", job->optimizer.name, "policy", a->policy,
        "trace", a->trace ? mz_json_text(a->trace) : json_null(), "load", load, "sequence_length",
        (json_int_t)o->sequence_length, "micro_batch", (json_int_t)a->micro_batch, "micro_batches",
        (json_int_t)a->micro_batches, "recompute", recompute_names[a->recompute], "attention",
        attention_names[a->attention], "temporaries", temporaries_names[a->temporaries],
        "loss_tokens", (json_int_t)a->loss_tokens, "keep_logits", (int)a->keep_logits, "allocator",
        allocator_names[a->allocator]);
}

static json_t *sized_json(const mz_sized *s) {
    return json_pack("{s:{s:f, s:f}, s:{s:I, s:I}, s:{s:I, s:I}}", "dynamic", "sum", s->dynamic_sum,
                     "worst", s->dynamic_worst, "highwater", "sum", (json_int_t)s->highwater_sum,
                     "worst", (json_int_t)s->highwater_worst, "provisioned", "sum",
                     (json_int_t)s->provisioned_sum, "worst", (json_int_t)s->provisioned_worst);
}

static json_t *experts_json(const memory_job *job) {
    return json_pack("{s:I, s:o, s:o}", "own", (json_int_t)job->own_experts, "replicas",
                     sized_json(&job->replicas), "token_buffers", sized_json(&job->token_buffers));
}

static json_t *ranks_json(const memory_job *job) {
    json_t *list = json_array();
    for (int32_t r = 0; list && r < job->shown; r++)
        json_array_append_new(list, json_integer(job->rank_peak[r]));
    return list;
}

static mz_code print_json(const memory_job *job, const char *load, mz_err *err) {
    json_t *parameters = tiers_json(job->parameters);
    if (parameters)
        json_object_set_new(parameters, "active", json_integer(job->active));
    json_t *root = json_pack(
        "{s:s, s:o, s:o, s:o, s:o, s:o, s:I, s:I, s:s, s:I, s:I, s:b, s:o, s:o, s:o, s:o}",
        "schema", "mizan-memory/1", "settings", settings_json(job, load), "parameters", parameters,
        "optimizer_state_bytes", tiers_json(job->state), "resident_memory_bytes",
        categories_json(job->resident), "memory_bytes", categories_json(job->run.memory_bytes),
        "resident_bytes", (json_int_t)job->resident_total, "peak_memory_bytes",
        (json_int_t)job->run.peak_memory_bytes, "peak_at", job->run.peak_at, "capacity_bytes",
        (json_int_t)job->run.capacity_bytes, "headroom_bytes",
        (json_int_t)(job->run.capacity_bytes - job->run.peak_memory_bytes), "fits",
        (int)job->run.fits, "out_of_memory",
        job->run.fits ? json_null() : mz_json_text(job->run.oom), "max_micro_batch",
        job->args.no_search ? json_null() : json_integer(job->max_micro_batch),
        "expert_memory_bytes", experts_json(job), "rank_peak_bytes", ranks_json(job));
    if (!root)
        return mz_fail_nomem(err, "the result as JSON");
    mz_code code = mz_json_write(root, job->app->out, err);
    json_decref(root);
    return code;
}

static const double GIB = 1 << 30;

static double gib(int64_t bytes) {
    return (double)bytes / GIB;
}

static void print_setting(const memory_job *job, const char *load, FILE *out) {
    const memory_args *a = &job->args;
    fprintf(out, "%s on %s: %d ranks, EP %d, ZeRO %d, policy %s\n", job->model->name,
            job->cluster->name, job->cluster->ranks, job->options.ep, job->options.zero, a->policy);
    fprintf(out, "%s, %s update; recomputation %s; %s attention; %s allocator%s\n",
            job->optimizer.name, temporaries_names[a->temporaries], recompute_names[a->recompute],
            attention_names[a->attention], allocator_names[a->allocator],
            a->keep_logits ? "; logits kept" : "");
    if (a->loss_tokens)
        fprintf(out, "loss of %lld tokens at a time\n", (long long)a->loss_tokens);
    fprintf(out, "%s\n", load);
}

static void print_categories(const memory_job *job, FILE *out) {
    const mz_run *r = &job->run;
    fprintf(out, "%-18s %12s %12s\n", "GiB per rank", "resident", "at the peak");
    for (int c = 0; c < MZ_MEM_CATEGORIES; c++)
        if (job->resident[c] || r->memory_bytes[c])
            fprintf(out, "%-18s %12.4f %12.4f\n", mz_memcat_name((mz_memcat)c),
                    gib(job->resident[c]), gib(r->memory_bytes[c]));
    fprintf(out, "%-18s %12.4f %12.4f\n", "total", gib(job->resident_total),
            gib(r->peak_memory_bytes));
}

static void print_verdict(const memory_job *job, FILE *out) {
    const mz_run *r = &job->run;
    const int64_t room = r->capacity_bytes - r->peak_memory_bytes;
    int64_t least = INT64_MAX;
    for (int32_t i = 0; i < job->shown; i++)
        least = job->rank_peak[i] < least ? job->rank_peak[i] : least;
    fprintf(out, "capacity %.2f GiB: %s, %.2f GiB %s\n", gib(r->capacity_bytes),
            r->fits ? "fits" : "does not fit", gib(room < 0 ? -room : room),
            room < 0 ? "too much" : "left");
    if (!r->fits)
        fprintf(out, "%s\n", r->oom);
    fprintf(out, "peak made by: %s; ranks' peaks %.2f to %.2f GiB\n", r->peak_at, gib(least),
            gib(r->peak_memory_bytes));
    if (job->args.no_search)
        return;
    fprintf(out, "largest micro-batch that fits: %lld x %lld tokens%s\n",
            (long long)job->max_micro_batch, (long long)job->options.sequence_length,
            job->trace ? ", recorded rows scaled" : "");
}

/* Placement, replicas and token buffers as the memory figure of LRMoE counts them. */
static void print_experts(const memory_job *job, FILE *out) {
    const mz_sized *r = &job->replicas, *b = &job->token_buffers;
    fprintf(out, "%-38s %10s %10s %12s\n", "GiB of the worst rank / of all ranks", "dynamic",
            "highwater", "provisioned");
    const struct {
        const char *name;
        const mz_sized *size;
    } row[] = {{"replicas", r}, {"token buffers", b}};
    for (int i = 0; i < 2; i++)
        fprintf(out, "  %-28s %8.2f / %.2f  %.2f / %.2f  %.2f / %.2f\n", row[i].name,
                row[i].size->dynamic_worst / GIB, row[i].size->dynamic_sum / GIB,
                gib(row[i].size->highwater_worst), gib(row[i].size->highwater_sum),
                gib(row[i].size->provisioned_worst), gib(row[i].size->provisioned_sum));
    fprintf(out, "  a rank's own experts (weights, gradients): %.2f\n", gib(job->own_experts));
}

static void print_model(const memory_job *job, FILE *out) {
    const int64_t *p = job->parameters, *s = job->state;
    fprintf(out,
            "whole model, parameters: %lld (%lld active per token): backbone %lld, experts %lld, "
            "router %lld\n",
            (long long)mz_model_total(job->model), (long long)job->active,
            (long long)(p[MZ_TIER_BACKBONE] + p[MZ_TIER_SHARED]), (long long)p[MZ_TIER_EXPERT],
            (long long)p[MZ_TIER_ROUTER]);
    const int64_t backbone = s[MZ_TIER_BACKBONE] + s[MZ_TIER_SHARED];
    fprintf(out,
            "whole model, optimizer state, GiB: %.5f: backbone %.5f, experts %.5f, router %.5f\n",
            gib(backbone + s[MZ_TIER_EXPERT] + s[MZ_TIER_ROUTER]), gib(backbone),
            gib(s[MZ_TIER_EXPERT]), gib(s[MZ_TIER_ROUTER]));
}

static mz_code print_result(const memory_job *job, mz_err *err) {
    char load[512];
    FILE *out = job->app->out;
    describe_load(job, load, sizeof load);
    if (job->args.json)
        return print_json(job, load, err);
    print_setting(job, load, out);
    print_categories(job, out);
    print_verdict(job, out);
    if (job->trace)
        print_experts(job, out);
    print_model(job, out);
    return MZ_OK;
}

static mz_code check_args(const memory_args *a, mz_err *err) {
    const struct {
        bool wrong;
        const char *text;
    } rule[] = {
        {!a->trace && a->step_tokens, "--step-tokens belongs to --trace"},
        {!a->trace && a->first_step, "--first-step belongs to --trace"},
        {!a->trace && a->steps, "--steps belongs to --trace"},
        {a->trace && a->imbalance > 1, "--imbalance and --trace exclude each other"},
        {a->trace && a->micro_batches > 1,
         "--micro-batches and --trace exclude each other: the trace has its own"},
        {a->keep_logits && a->loss_tokens, "--keep-logits and --loss-tokens exclude each other"},
    };
    for (size_t i = 0; i < sizeof rule / sizeof *rule; i++)
        if (rule[i].wrong)
            return mz_fail(err, MZ_EINPUT, "%s", rule[i].text);
    return MZ_OK;
}

mz_code mz_cmd_memory(mz_app *app, int argc, char **argv, mz_err *err) {
    memory_job job = {.app = app};
    int nargs = 0;
    bool help = false;
    mz_code code =
        mz_opt_parse(&memory_spec, &job.args, argc, argv, &nargs, &help, NULL, app->out, err);
    if (code != MZ_OK || help)
        return code;
    mz_log_choose(&app->log, job.args.quiet, job.args.verbose);
    code = check_args(&job.args, err);
    if (code == MZ_OK)
        code = load_inputs(&job, err);
    if (code == MZ_OK)
        code = work(&job, err);
    if (code == MZ_OK)
        code = print_result(&job, err);
    free_job(&job);
    return code;
}
