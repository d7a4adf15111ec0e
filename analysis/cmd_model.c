/* mizan model: what a model consists of, and what optimizers keep for it. */
#include "analysis/cmd.h"
#include "common/base/arena.h"
#include "common/base/opt.h"
#include "common/io/json.h"
#include "sim/model/model.h"
#include "sim/model/optimizer.h"

#include <stdlib.h>
#include <string.h>

enum { OPTIMIZERS_MAX = 64, TIERS = MZ_TIER_SHARED + 1, TOTAL = TIERS };

static const char *const tier_names[] = {"backbone", "experts", "router", "shared", "total"};

static const char *const temporaries_names[] = {"fused", "chunked", "unfused"};

typedef struct model_args {
    const char *optimizer;
    int64_t parts;
    int temporaries;
    bool tensors, json, list, quiet, verbose;
} model_args;

#define AT(field) offsetof(model_args, field)

static const mz_opt model_options[] = {
    {"tensors", 0, MZ_OPT_FLAG, AT(tensors), NULL, NULL,
     "list every tensor of the checkpoint: name, shape, type, tier"},
    {"optimizer", 0, MZ_OPT_STR, AT(optimizer), NULL, "A,B[K=V]",
     "state and update of these optimizers, options in brackets; all: every one"},
    {"parts", 0, MZ_OPT_INT, AT(parts), "1", "N",
     "ranks that share every tensor's state; numbers are of the fullest", 1, 1 << 20},
    {"temporaries", 0, MZ_OPT_ENUM, AT(temporaries), "fused", "fused|chunked|unfused",
     "how an update is executed"},
    {"list", 0, MZ_OPT_FLAG, AT(list), NULL, NULL,
     "shipped models with their published parameter counts"},
    {"json", 0, MZ_OPT_FLAG, AT(json), NULL, NULL, "one JSON object on stdout (mizan-model/1)"},
    MZ_OPT_COMMON_ROWS(model_args),
};

static const mz_opt_spec model_spec = {
    .command = "mizan model",
    .synopsis = "NAME|FILE [--tensors] [--optimizer A,B] [--json]",
    .about = "Shows a model's parameters in total, per token, by tier and by layer, its tensors, "
             "and the state of\noptimizers.",
    .example = "mizan model skewadam-6.8b --optimizer 'adamw-bf16,skewadam,muon'",
    .table = model_options,
    .count = sizeof model_options / sizeof model_options[0],
    .max_args = 1,
};

/* Everything of one optimizer for the whole model, by tier and in total. */
typedef struct optimizer_sums {
    mz_optimizer optimizer;
    int64_t state[TIERS + 1], replicated;
    double traffic[TIERS + 1], flops[TIERS + 1], exchange;
    int64_t temporary; /* largest of any tensor */
} optimizer_sums;

typedef struct model_job {
    model_args args;
    mz_model *model;
    mz_arena arena;
    optimizer_sums *sums; /* [count] */
    int count;
} model_job;

/* Layers of one kind in a row. */
typedef struct layer_run {
    int32_t first, last;
    int64_t parameters[TIERS + 1];
} layer_run;

/* ---- sums --------------------------------------------------------------------------------------
 */

static void add_up(const model_job *job, optimizer_sums *sums) {
    const mz_model *m = job->model;
    for (int64_t i = 0; i < m->tensors; i++) {
        const mz_tensor *t = &m->tensor[i];
        const mz_update_cost u = mz_optimizer_update(&sums->optimizer, t, t->count, job->args.parts,
                                                     (mz_temporaries)job->args.temporaries);
        sums->state[t->tier] += u.state_bytes;
        sums->state[TOTAL] += u.state_bytes;
        sums->replicated += u.replicated_bytes;
        sums->traffic[t->tier] += u.traffic_bytes;
        sums->traffic[TOTAL] += u.traffic_bytes;
        sums->flops[t->tier] += u.flops;
        sums->flops[TOTAL] += u.flops;
        sums->exchange += u.exchange_bytes;
        if (u.temporary_bytes > sums->temporary)
            sums->temporary = u.temporary_bytes;
    }
}

static mz_code sum_optimizers(model_job *job, mz_err *err) {
    int known, count = 0;
    const mz_optimizer *const *table = mz_optimizers(&known);
    char *parts[OPTIMIZERS_MAX];
    mz_code code = MZ_OK;
    if (!job->args.optimizer)
        return MZ_OK;
    const bool all = strcmp(job->args.optimizer, "all") == 0;
    char *text = mz_arena_strdup(&job->arena, job->args.optimizer);
    if (text && !all)
        code = mz_split_list(text, parts, OPTIMIZERS_MAX, &count, err);
    if (code != MZ_OK)
        return mz_err_prefix(err, "--optimizer");
    count = all ? known : count;
    job->sums = MZ_NEW(&job->arena, optimizer_sums, count);
    if (!text || !job->sums)
        return mz_fail_nomem(err, "the optimizers");
    for (int i = 0; i < count && code == MZ_OK; i++) {
        code = mz_optimizer_parse(all ? table[i]->name : parts[i], &job->sums[i].optimizer, err);
        if (code == MZ_OK)
            add_up(job, &job->sums[i]);
    }
    job->count = count;
    return code;
}

/* layer -1 is what lies outside the layers. */
static layer_run run_of(const mz_model *m, int32_t layer) {
    layer_run run = {.first = layer, .last = layer};
    for (int tier = 0; tier < TIERS; tier++) {
        run.parameters[tier] = mz_model_layer_parameters(m, layer, (mz_tier)tier);
        run.parameters[TOTAL] += run.parameters[tier];
    }
    return run;
}

/* The next run of equal layers from `layer` on. */
static layer_run next_run(const mz_model *m, int32_t layer) {
    layer_run run = run_of(m, layer);
    while (layer >= 0 && run.last + 1 < m->layers) {
        const layer_run next = run_of(m, run.last + 1);
        if (memcmp(next.parameters, run.parameters, sizeof run.parameters) != 0 ||
            m->is_moe[next.first] != m->is_moe[layer])
            break;
        run.last++;
    }
    return run;
}

static int64_t published_difference(const mz_model *m) {
    return mz_model_total(m) - (m->published.parameters - m->published.left_out);
}

static int64_t checkpoint_tensors(const mz_model *m) {
    int64_t tensors = 0;
    for (int64_t i = 0; i < m->tensors; i++)
        tensors += mz_tensor_parts(&m->tensor[i]);
    return tensors;
}

static const char *layer_kind(const mz_model *m, int32_t layer) {
    return layer < 0 ? "outside" : m->is_moe[layer] ? "moe" : "dense";
}

/* ---- JSON --------------------------------------------------------------------------------------
 */

/* The total first. Takes over what `of` makes of each sum. */
static json_t *by_tier(const void *sums, json_t *(*of)(const void *sums, int tier)) {
    json_t *object = json_object();
    bool failed = !object;
    for (int i = 0; i <= TIERS && !failed; i++) {
        const int tier = (i + TOTAL) % (TIERS + 1);
        failed = json_object_set_new(object, tier_names[tier], of(sums, tier)) != 0;
    }
    if (!failed)
        return object;
    json_decref(object);
    return NULL;
}

static json_t *whole_of(const void *sums, int tier) {
    return json_integer(((const int64_t *)sums)[tier]);
}

static json_t *real_of(const void *sums, int tier) {
    return json_real(((const double *)sums)[tier]);
}

static json_t *parameters_json(const mz_model *m) {
    int64_t sums[TIERS + 1] = {0};
    for (int tier = 0; tier < TIERS; tier++)
        sums[tier] = mz_model_parameters(m, (mz_tier)tier);
    sums[TOTAL] = mz_model_total(m);
    json_t *object = by_tier(sums, whole_of);
    if (object &&
        json_object_set_new(object, "active", json_integer(mz_model_active_parameters(m))) == 0)
        return object;
    json_decref(object);
    return NULL;
}

static json_t *bytes_json(const mz_model *m) {
    int64_t sums[TIERS + 1] = {0};
    for (int tier = 0; tier < TIERS; tier++)
        sums[TOTAL] += sums[tier] = mz_model_bytes(m, (mz_tier)tier);
    return by_tier(sums, whole_of);
}

static json_t *published_json(const mz_model *m) {
    const mz_published *p = &m->published;
    if (!p->parameters)
        return json_null();
    return json_pack("{s:I, s:I, s:I, s:o, s:o}", "parameters", (json_int_t)p->parameters,
                     "left_out", (json_int_t)p->left_out, "difference",
                     (json_int_t)published_difference(m), "left_out_is",
                     mz_json_text(p->left_out_is), "source", mz_json_text(p->source));
}

static json_t *layers_json(const mz_model *m) {
    json_t *list = json_array();
    for (int32_t layer = -1; list && layer < m->layers;) {
        const layer_run run = next_run(m, layer);
        json_t *item =
            json_pack("{s:i, s:i, s:s, s:o}", "first", run.first, "last", run.last, "kind",
                      layer_kind(m, run.first), "parameters", by_tier(run.parameters, whole_of));
        if (json_array_append_new(list, item) != 0) {
            json_decref(list);
            return NULL;
        }
        layer = run.last + 1;
    }
    return list;
}

static json_t *tensor_json(const mz_model *m, const mz_tensor *t, int64_t copy) {
    char name[160];
    int64_t shape[3];
    json_t *sizes = json_array();
    const int n = mz_tensor_shape(t, shape);
    for (int d = 0; sizes && d < n; d++)
        if (json_array_append_new(sizes, json_integer(shape[d])) != 0)
            return json_decref(sizes), NULL;
    return json_pack("{s:s, s:o, s:s, s:s, s:i, s:b}", "name",
                     mz_tensor_name(t, copy, name, sizeof name), "shape", sizes, "dtype",
                     mz_tensor_dtype(m, t), "tier", tier_names[t->tier], "layer", t->layer,
                     "trainable", (int)t->trainable);
}

static json_t *tensors_json(const mz_model *m) {
    json_t *list = json_array();
    for (int64_t i = 0; list && i < m->tensors; i++)
        for (int64_t k = 0; k < mz_tensor_parts(&m->tensor[i]); k++)
            if (json_array_append_new(list, tensor_json(m, &m->tensor[i], k)) != 0) {
                json_decref(list);
                return NULL;
            }
    return list;
}

static json_t *optimizers_json(const model_job *job) {
    json_t *list = json_array();
    for (int i = 0; list && i < job->count; i++) {
        const optimizer_sums *s = &job->sums[i];
        json_t *item = json_pack(
            "{s:s, s:I, s:s, s:o, s:I, s:o, s:o, s:f, s:I}", "name", s->optimizer.name, "parts",
            (json_int_t)job->args.parts, "temporaries", temporaries_names[job->args.temporaries],
            "state_bytes", by_tier(s->state, whole_of), "replicated_bytes",
            (json_int_t)s->replicated, "traffic_bytes", by_tier(s->traffic, real_of), "flops",
            by_tier(s->flops, real_of), "exchange_bytes", s->exchange, "temporary_bytes",
            (json_int_t)s->temporary);
        if (json_array_append_new(list, item) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

/* What --list shows of a model, too. */
static json_t *summary_json(const mz_model *m) {
    return json_pack("{s:o, s:s, s:I, s:o, s:o, s:o}", "name", mz_json_text(m->name), "model_type",
                     m->model_type, "tensor_count", (json_int_t)checkpoint_tensors(m), "parameters",
                     parameters_json(m), "weight_bytes", bytes_json(m), "published",
                     published_json(m));
}

static mz_code print_json(json_t *object, mz_app *app, mz_err *err) {
    mz_code code = object ? mz_json_write(object, app->out, err)
                          : mz_fail_nomem(err, "the description of a model");
    json_decref(object);
    return code;
}

static mz_code print_model_json(const model_job *job, mz_app *app, mz_err *err) {
    const mz_model *m = job->model;
    json_t *object = json_pack("{s:s}", "schema", "mizan-model/1");
    json_t *summary = summary_json(m);
    bool failed = !object || json_object_update(object, summary) != 0;
    json_decref(summary);
    failed = failed || json_object_set(object, "architecture", m->resolved) != 0;
    failed = failed || json_object_set_new(object, "layers", layers_json(m)) != 0;
    if (job->args.tensors)
        failed = failed || json_object_set_new(object, "tensors", tensors_json(m)) != 0;
    if (job->args.optimizer)
        failed = failed || json_object_set_new(object, "optimizers", optimizers_json(job)) != 0;
    if (failed) {
        json_decref(object);
        object = NULL;
    }
    return print_json(object, app, err);
}

/* ---- tables ------------------------------------------------------------------------------------
 */

typedef struct cell {
    char text[32];
} cell;

/* 6,784,327,680 */
static cell count_cell(int64_t n) {
    char digits[24];
    cell c = {""};
    const int length = snprintf(digits, sizeof digits, "%lld", (long long)n);
    int at = 0;
    for (int i = 0; i < length; i++) {
        if (i > (n < 0) && (length - i) % 3 == 0)
            c.text[at++] = ',';
        c.text[at++] = digits[i];
    }
    c.text[at] = 0;
    return c;
}

static cell bytes_cell(double bytes) {
    cell c;
    mz_format_bytes(bytes, c.text, sizeof c.text);
    return c;
}

static int width_of(const mz_model *m) {
    const int width = (int)strlen(count_cell(mz_model_total(m)).text);
    return width > 10 ? width : 10;
}

/* Columns of tiers are left out that the model lacks. */
static bool shows(const mz_model *m, int tier) {
    return tier == TOTAL || mz_model_parameters(m, (mz_tier)tier) > 0;
}

static void print_published(const mz_model *m, int width, FILE *out) {
    const mz_published *p = &m->published;
    if (!p->parameters)
        return;
    fprintf(out, "%-10s %*s  %s\n", "published", width, count_cell(p->parameters).text, p->source);
    if (p->left_out)
        fprintf(out, "%-10s %*s  %s\n", "left out", width, count_cell(p->left_out).text,
                p->left_out_is);
    fprintf(out, "%-10s %*s\n", "difference", width, count_cell(published_difference(m)).text);
}

static void print_parameters(const mz_model *m, FILE *out) {
    const int width = width_of(m);
    const int64_t total = mz_model_total(m), active = mz_model_active_parameters(m);
    int64_t bytes = 0;
    fprintf(out, "\n%-10s %*s %9s  %11s\n", "tier", width, "parameters", "share", "weights");
    for (int tier = 0; tier <= TIERS; tier++) {
        const int64_t n = tier == TOTAL ? total : mz_model_parameters(m, (mz_tier)tier);
        const int64_t held = tier == TOTAL ? bytes : mz_model_bytes(m, (mz_tier)tier);
        bytes += held;
        if (shows(m, tier))
            fprintf(out, "%-10s %*s %7.3f %%  %11s\n", tier_names[tier], width, count_cell(n).text,
                    100 * (double)n / (double)total, bytes_cell((double)held).text);
    }
    fprintf(out, "%-10s %*s %7.3f %%\n", "per token", width, count_cell(active).text,
            100 * (double)active / (double)total);
    print_published(m, width, out);
}

static void print_layers(const mz_model *m, FILE *out) {
    const int width = width_of(m);
    fprintf(out, "\n%-9s %-7s", "layers", "kind");
    for (int tier = 0; tier <= TIERS; tier++)
        if (shows(m, tier))
            fprintf(out, " %*s", width, tier_names[tier]);
    fputs("  (parameters of one layer)\n", out);
    for (int32_t layer = -1; layer < m->layers;) {
        const layer_run run = next_run(m, layer);
        char range[32] = "-";
        if (run.first >= 0 && run.first < run.last)
            snprintf(range, sizeof range, "%d-%d", run.first, run.last);
        else if (run.first >= 0)
            snprintf(range, sizeof range, "%d", run.first);
        fprintf(out, "%-9s %-7s", range, layer_kind(m, run.first));
        for (int tier = 0; tier <= TIERS; tier++)
            if (shows(m, tier))
                fprintf(out, " %*s", width, count_cell(run.parameters[tier]).text);
        fputc('\n', out);
        layer = run.last + 1;
    }
}

static void print_optimizer_head(const model_job *job, int width, FILE *out) {
    fprintf(out, "\n%-*s %11s", width, "optimizer", "state");
    for (int tier = 0; tier < TIERS; tier++)
        if (shows(job->model, tier))
            fprintf(out, " %11s", tier_names[tier]);
    fprintf(out, " %11s %11s %8s", "traffic", "temporaries", "TFLOP");
    if (job->args.parts > 1)
        fprintf(out, " %11s %11s", "replicated", "exchange");
    fputc('\n', out);
}

static void print_optimizers(const model_job *job, FILE *out) {
    int width = 10;
    for (int i = 0; i < job->count; i++) {
        const int length = (int)strlen(job->sums[i].optimizer.name);
        width = length > width ? length : width;
    }
    print_optimizer_head(job, width, out);
    for (int i = 0; i < job->count; i++) {
        const optimizer_sums *s = &job->sums[i];
        fprintf(out, "%-*s %11s", width, s->optimizer.name,
                bytes_cell((double)s->state[TOTAL]).text);
        for (int tier = 0; tier < TIERS; tier++)
            if (shows(job->model, tier))
                fprintf(out, " %11s", bytes_cell((double)s->state[tier]).text);
        fprintf(out, " %11s %11s %8.2f", bytes_cell(s->traffic[TOTAL]).text,
                bytes_cell((double)s->temporary).text, s->flops[TOTAL] / 1e12);
        if (job->args.parts > 1)
            fprintf(out, " %11s %11s", bytes_cell((double)s->replicated).text,
                    bytes_cell(s->exchange).text);
        fputc('\n', out);
    }
    fprintf(out, "one %s update", temporaries_names[job->args.temporaries]);
    if (job->args.parts > 1)
        fprintf(out, ", every tensor shared by %lld ranks: the fullest",
                (long long)job->args.parts);
    fputc('\n', out);
}

static void print_tensors(const mz_model *m, FILE *out) {
    char name[160], text[80];
    fprintf(out, "\n%-62s %-24s %-9s %s\n", "tensor", "shape", "type", "tier");
    for (int64_t i = 0; i < m->tensors; i++) {
        const mz_tensor *t = &m->tensor[i];
        int64_t shape[3];
        const int n = mz_tensor_shape(t, shape);
        int used = 0;
        for (int d = 0; d < n; d++)
            used += snprintf(text + used, sizeof text - (size_t)used, "%s%lld", d ? " x " : "",
                             (long long)shape[d]);
        for (int64_t k = 0; k < mz_tensor_parts(t); k++)
            fprintf(out, "%-62s %-24s %-9s %s%s\n", mz_tensor_name(t, k, name, sizeof name), text,
                    mz_tensor_dtype(m, t), tier_names[t->tier],
                    t->trainable ? "" : ", not trained");
    }
}

static void print_model(const model_job *job, FILE *out) {
    const mz_model *m = job->model;
    fprintf(out, "%s (%s): %d layers, %d with experts; %d experts", m->name, m->model_type,
            m->layers, m->moe_layers, m->experts);
    if (m->expert_group > 1)
        fprintf(out, " in groups of %d", m->expert_group);
    fprintf(out, ", top-%d, hidden %lld, %lld tensors\n", m->top_k, (long long)m->hidden,
            (long long)checkpoint_tensors(m));
    print_parameters(m, out);
    print_layers(m, out);
    if (job->args.optimizer)
        print_optimizers(job, out);
    if (job->args.tensors)
        print_tensors(m, out);
}

/* ---- --list ------------------------------------------------------------------------------------
 */

static void list_row(const mz_model *m, FILE *out) {
    const mz_published *p = &m->published;
    fprintf(out, "%-22s %16s %16s", m->name, count_cell(mz_model_total(m)).text,
            count_cell(mz_model_active_parameters(m)).text);
    if (p->parameters)
        fprintf(out, " %16s %14s %10s  %s\n", count_cell(p->parameters).text,
                p->left_out ? count_cell(p->left_out).text : "",
                count_cell(published_difference(m)).text, p->source);
    else
        fprintf(out, " %16s\n", "none");
}

static mz_code list_models(model_job *job, mz_app *app, mz_err *err) {
    char **names;
    int count;
    json_t *list = json_array();
    mz_code code = list ? mz_model_list(app->data_dir, &job->arena, &names, &count, err)
                        : mz_fail_nomem(err, "the list of models");
    if (code == MZ_OK && !job->args.json)
        fprintf(app->out, "%-22s %16s %16s %16s %14s %10s  %s\n", "model", "parameters",
                "per token", "published", "left out", "difference", "reference");
    for (int i = 0; code == MZ_OK && i < count; i++) {
        code = mz_model_load(names[i], app->data_dir, &job->model, err);
        if (code == MZ_OK && !job->args.json)
            list_row(job->model, app->out);
        else if (code == MZ_OK && json_array_append_new(list, summary_json(job->model)) != 0)
            code = mz_fail_nomem(err, "the list of models");
        mz_model_free(&job->model);
    }
    if (code != MZ_OK || !job->args.json) {
        json_decref(list);
        return code;
    }
    return print_json(json_pack("{s:s, s:o}", "schema", "mizan-model/1", "models", list), app, err);
}

mz_code mz_cmd_model(mz_app *app, int argc, char **argv, mz_err *err) {
    model_job job = {0};
    int nargs = 0;
    bool help = false;
    mz_code code =
        mz_opt_parse(&model_spec, &job.args, argc, argv, &nargs, &help, NULL, app->out, err);
    if (code != MZ_OK || help)
        return code;
    mz_log_choose(&app->log, job.args.quiet, job.args.verbose);
    if (job.args.list && nargs)
        return mz_fail(err, MZ_EINPUT, "--list shows all shipped models: leave out \"%s\"",
                       argv[1]);
    if (!job.args.list && !nargs)
        return mz_fail(err, MZ_EINPUT,
                       "no model given: a config.json or a shipped name (mizan model --list)");
    if (job.args.list) {
        code = list_models(&job, app, err);
    } else {
        code = mz_model_load(argv[1], app->data_dir, &job.model, err);
        if (code == MZ_OK)
            code = sum_optimizers(&job, err);
        if (code == MZ_OK && job.args.json)
            code = print_model_json(&job, app, err);
        else if (code == MZ_OK)
            print_model(&job, app->out);
    }
    mz_model_free(&job.model);
    mz_arena_free(&job.arena);
    return code;
}
