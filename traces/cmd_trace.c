/* mizan trace: info, compare, check, synth, import, export, cut. */
#include "traces/cmd.h"

#include "common/base/arena.h"
#include "common/io/input.h"
#include "common/io/json.h"
#include "traces/check.h"
#include "traces/compare.h"
#include "traces/cut.h"
#include "traces/exporter.h"
#include "traces/importer.h"
#include "traces/info.h"
#include "traces/npy.h"
#include "traces/schema.h"
#include "traces/stats.h"
#include "traces/synth.h"
#include "traces/synth_profile.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define COUNT(table) ((int)(sizeof(table) / sizeof((table)[0])))

/* Whether the user gave an option. */
static bool was_given(const mz_opt *table, int count, const bool *seen, const char *name) {
    for (int i = 0; i < count; i++)
        if (strcmp(table[i].name, name) == 0)
            return seen[i];
    return false;
}

/* Whether `name` is one of the words. */
static bool is_word(const char *words, const char *name) {
    size_t length = strlen(name);
    for (const char *p = words; (p = strstr(p, name)) != NULL; p += length)
        if ((p == words || p[-1] == ' ') && (p[length] == ' ' || p[length] == '\0'))
            return true;
    return false;
}

const char *mz_unread_option(const mz_opt_spec *spec, const bool *seen, const char *of_all,
                             const char *of_format) {
    for (int i = 0; i < spec->count; i++) {
        const char *name = spec->table[i].name;
        if (seen[i] && !is_word(of_all, name) && !is_word(of_format, name))
            return name;
    }
    return NULL;
}

mz_code mz_keep_input(const char *input, const char *output, mz_err *err) {
    struct stat in, out;
    if (!input || !output)
        return MZ_OK;
    if (strcmp(input, output) != 0 && (stat(input, &in) != 0 || stat(output, &out) != 0 ||
                                       in.st_dev != out.st_dev || in.st_ino != out.st_ino))
        return MZ_OK;
    return mz_fail(err, MZ_EINPUT, "%s: the output would replace the input: name another file",
                   input);
}

mz_code mz_keep_inputs(const char *const *input, int count, const char *output, mz_err *err) {
    mz_code code = MZ_OK;
    for (int i = 0; code == MZ_OK && i < count; i++)
        code = mz_keep_input(input[i], output, err);
    return code;
}

/* ---- info ------------------------------------------------------------------------------------ */

typedef struct info_args {
    int64_t ranks, from_step, to_step;
    bool json, summary, loads, quiet, verbose;
} info_args;

#define AT(field) offsetof(info_args, field)
static const mz_opt info_table[] = {
    {"ranks", 'r', MZ_OPT_INT, AT(ranks), "0", "R",
     "ranks of the contiguous placement; 0: as recorded", 0, MZ_RANKS_MAX},
    {"from-step", 0, MZ_OPT_INT, AT(from_step), "0", "STEP", "first recorded step to look at", 0,
     9e18},
    {"to-step", 0, MZ_OPT_INT, AT(to_step), NULL, "STEP",
     "last recorded step to look at; default: the last", 0, 9e18},
    {"summary", 0, MZ_OPT_FLAG, AT(summary), NULL, NULL, "no row per layer"},
    {"loads-only", 0, MZ_OPT_FLAG, AT(loads), NULL, NULL,
     "loads alone: no statistics over steps, sequences and layers"},
    {"json", 0, MZ_OPT_FLAG, AT(json), NULL, NULL, "one JSON object (mizan-trace-info/1)"},
    MZ_OPT_COMMON_ROWS(info_args),
};
#undef AT

static const mz_opt_spec info_spec = {
    .command = "mizan trace info",
    .synopsis = "[OPTIONS] TRACE",
    .about = "What a trace holds: facts, sizes, and how uneven its loads are.",
    .example = "mizan trace info --ranks 8 trace.h5",
    .table = info_table,
    .count = COUNT(info_table),
    .min_args = 1,
    .max_args = 1,
};

/* A window without any step is a mistake, unless the trace has none at all. */
static mz_code check_window(const mz_trace *trace, const mz_trace_info *info,
                            const mz_info_options *options, mz_err *err) {
    const mz_trace_call *calls;
    int64_t count = mz_trace_calls(trace, &calls);
    if (info->calls || !count)
        return MZ_OK;
    return mz_fail(err, MZ_EINPUT,
                   "%s: no recorded step from --from-step %lld to --to-step %lld: the trace has "
                   "steps from %lld to %lld",
                   mz_trace_path(trace), (long long)options->from_step, (long long)options->to_step,
                   (long long)calls[0].step, (long long)calls[count - 1].step);
}

static mz_code print_info(mz_app *app, const info_args *args, const char *path, mz_err *err) {
    mz_trace *trace = NULL;
    mz_trace_info info = {0};
    mz_trace_stats stats = {0};
    mz_info_options options = {
        .ranks = (int32_t)args->ranks, .from_step = args->from_step, .to_step = args->to_step};
    mz_code code = mz_trace_open(path, &trace, err);
    if (!code)
        code = mz_trace_info_read(app, trace, &options, &info, err);
    if (!code)
        code = check_window(trace, &info, &options, err);
    if (!code && !args->loads)
        code = mz_trace_stats_read(app, trace, &options, &stats, err);
    if (!code && args->json) {
        json_t *json = mz_trace_info_json(trace, &info);
        bool good = json && (args->loads || json_object_set_new(json, "statistics",
                                                                mz_trace_stats_json(&stats)) == 0);
        code = good ? mz_json_write(json, app->out, err) : mz_fail_nomem(err, "the JSON text");
        json_decref(json);
    } else if (!code) {
        mz_trace_info_print(trace, &info, !args->summary, app->out);
        if (!args->loads)
            mz_trace_stats_print(&stats, false, app->out);
    }
    mz_trace_info_free(&info);
    mz_trace_stats_free(&stats);
    if (trace)
        mz_trace_close(&trace);
    return code;
}

static mz_code run_info(mz_app *app, int argc, char **argv, mz_err *err) {
    info_args args;
    int nargs;
    bool help = false, seen[COUNT(info_table)];
    mz_code code = mz_opt_parse(&info_spec, &args, argc, argv, &nargs, &help, seen, app->out, err);
    if (code || help)
        return code;
    mz_log_choose(&app->log, args.quiet, args.verbose);
    if (!was_given(info_table, COUNT(info_table), seen, "to-step"))
        args.to_step = INT64_MAX;
    return print_info(app, &args, argv[1], err);
}

/* ---- compare --------------------------------------------------------------------------------- */

typedef struct compare_args {
    int64_t ranks;
    bool json, strict, quiet, verbose;
} compare_args;

#define AT(field) offsetof(compare_args, field)
static const mz_opt compare_table[] = {
    {"ranks", 'r', MZ_OPT_INT, AT(ranks), "0", "R",
     "ranks of the contiguous placement; 0: as recorded", 0, MZ_RANKS_MAX},
    {"strict", 0, MZ_OPT_FLAG, AT(strict), NULL, NULL, "exit with 1 when a statistic differs"},
    {"json", 0, MZ_OPT_FLAG, AT(json), NULL, NULL, "one JSON object (mizan-trace-compare/1)"},
    MZ_OPT_COMMON_ROWS(compare_args),
};
#undef AT

static const mz_opt_spec compare_spec = {
    .command = "mizan trace compare",
    .synopsis = "[OPTIONS] TRACE TRACE",
    .about = "In which statistics two traces differ, and by how much: loads, drift, sequences, "
             "layers, teams,\nweights. Means over layers.",
    .example = "mizan trace compare recorded.h5 synthetic.h5",
    .table = compare_table,
    .count = COUNT(compare_table),
    .min_args = 2,
    .max_args = 2,
};

static mz_code read_stats(mz_app *app, const char *path, int32_t ranks, mz_trace_stats *stats,
                          mz_err *err) {
    mz_trace *trace = NULL;
    mz_info_options options = {.ranks = ranks, .to_step = INT64_MAX};
    mz_code code = mz_trace_open(path, &trace, err);
    if (!code)
        code = mz_trace_stats_read(app, trace, &options, stats, err);
    if (trace)
        mz_trace_close(&trace);
    return code;
}

static mz_code run_compare(mz_app *app, int argc, char **argv, mz_err *err) {
    compare_args args;
    int nargs, outside = 0;
    bool help = false;
    mz_trace_stats stats[2] = {0};
    mz_stats_difference differences[MZ_STATS_METRICS];
    mz_code code =
        mz_opt_parse(&compare_spec, &args, argc, argv, &nargs, &help, NULL, app->out, err);
    if (code || help)
        return code;
    mz_log_choose(&app->log, args.quiet, args.verbose);
    for (int i = 0; i < 2 && !code; i++)
        code = read_stats(app, argv[1 + i], (int32_t)args.ranks, &stats[i], err);
    if (!code) {
        outside = mz_stats_compare(&stats[0], &stats[1], differences);
        if (args.json) {
            json_t *json = mz_stats_compare_json(argv[1], argv[2], differences, outside);
            code = json ? mz_json_write(json, app->out, err) : mz_fail_nomem(err, "the JSON text");
            json_decref(json);
        } else {
            mz_stats_compare_print(differences, app->out);
        }
    }
    mz_trace_stats_free(&stats[0]);
    mz_trace_stats_free(&stats[1]);
    if (!code && args.strict && outside)
        return mz_fail(err, MZ_ECHECK, "%d statistics differ by more than their tolerance",
                       outside);
    return code;
}

/* ---- synth ----------------------------------------------------------------------------------- */

typedef struct synth_args {
    const char *load, *like, *shuffle, *name, *output;
    int64_t layers, experts, top_k, ranks, tokens, sequence, steps, micro_batches, seed, hidden;
    int64_t intermediate, deflate;
    int kind, profile;
    bool half, list, quiet, verbose;
} synth_args;

#define AT(field) offsetof(synth_args, field)
static const mz_opt synth_table[] = {
    {"load", 0, MZ_OPT_STR, AT(load), "realistic", "NAME", "which load; --list describes them"},
    {"like", 0, MZ_OPT_STR, AT(like), NULL, "TRACE",
     "fit a model to this trace; --ranks, --tokens, --steps, --micro-batches as there unless "
     "given"},
    {"profile", 0, MZ_OPT_ENUM, AT(profile), "none", "none|mixed|one-domain|collapse|balanced",
     "from parameters: pairs of mixed text or one domain, counts of training"},
    {"shuffle", 0, MZ_OPT_STR, AT(shuffle), NULL, "LIST",
     "with --like or a profile of pairs, take apart: sequences, layers or both"},
    {"list", 0, MZ_OPT_FLAG, AT(list), NULL, NULL, "describe the loads"},
    {"layers", 0, MZ_OPT_INT, AT(layers), "16", "L", "MoE layers", 1, MZ_LAYERS_MAX},
    {"experts", 0, MZ_OPT_INT, AT(experts), "64", "E", "routed experts per layer", 1,
     MZ_EXPERTS_MAX},
    {"top-k", 0, MZ_OPT_INT, AT(top_k), "8", "K", "experts per token", 1, MZ_EXPERTS_MAX},
    {"ranks", 'r', MZ_OPT_INT, AT(ranks), "8", "R", "source ranks", 1, MZ_RANKS_MAX},
    {"tokens", 't', MZ_OPT_INT, AT(tokens), "1024", "T", "tokens per rank and micro-batch", 1,
     1e12},
    {"sequence", 0, MZ_OPT_INT, AT(sequence), "256", "T", "tokens per sequence", 1, 1e12},
    {"steps", 'n', MZ_OPT_INT, AT(steps), "8", "N", "steps", 1, 1e12},
    {"micro-batches", 0, MZ_OPT_INT, AT(micro_batches), "1", "M", "micro-batches per step", 1, 1e9},
    {"seed", 0, MZ_OPT_INT, AT(seed), "1", "N", "the same seed gives the same trace", 0, 1e15},
    {"kind", 0, MZ_OPT_ENUM, AT(kind), "pairs", "pairs|counts",
     "every token's experts and weights, or counts alone"},
    {"model-name", 0, MZ_OPT_STR, AT(name), NULL, "NAME",
     "model's name in the trace; default: synthetic-LOAD"},
    {"hidden", 0, MZ_OPT_INT, AT(hidden), "0", "H", "model's hidden size; 0: not said", 0, 1e9},
    {"intermediate", 0, MZ_OPT_INT, AT(intermediate), "0", "I",
     "experts' intermediate size; 0: not said", 0, 1e9},
    {"deflate", 0, MZ_OPT_INT, AT(deflate), "4", "N", "compression, 0 (none) to 9", 0, 9},
    {"half", 0, MZ_OPT_FLAG, AT(half), NULL, NULL, "store weights in half precision"},
    {"output", 'o', MZ_OPT_STR, AT(output), NULL, "FILE", "the trace to write"},
    MZ_OPT_COMMON_ROWS(synth_args),
};
#undef AT

static const mz_opt_spec synth_spec = {
    .command = "mizan trace synth",
    .synopsis = "--load NAME | --like TRACE | --profile NAME [OPTIONS] -o FILE",
    .about =
        "Makes a synthetic trace: one of eight loads that each test one mechanism, a realistic "
        "one,\none like a recorded trace, or one of a profile's parameters.",
    .example = "mizan trace synth --load hot-rank --ranks 8 --tokens 4096 -o hot.h5",
    .table = synth_table,
    .count = COUNT(synth_table),
};

static mz_code need_output(const char *output, mz_err *err) {
    if (!output)
        return mz_fail(err, MZ_EINPUT, "no output file: pass -o FILE");
    return mz_output_try(output, err);
}

static mz_code parse_shuffle(const char *list, mz_model_shuffle *shuffle, mz_err *err) {
    char text[64], *parts[2];
    int count = 0;
    mz_code code = MZ_OK;
    if (!list)
        return MZ_OK;
    snprintf(text, sizeof text, "%s", list);
    code = mz_split_list(text, parts, 2, &count, err);
    for (int i = 0; i < count && !code; i++) {
        if (strcmp(parts[i], "sequences") == 0)
            shuffle->sequences = true;
        else if (strcmp(parts[i], "layers") == 0)
            shuffle->layers = true;
        else
            code = mz_fail(err, MZ_EINPUT, "--shuffle: '%.40s' is neither sequences nor layers",
                           parts[i]);
    }
    return code;
}

/* A value that the user gave, 0 otherwise. */
static int64_t given(const bool *seen, const char *name, int64_t value) {
    return was_given(synth_table, COUNT(synth_table), seen, name) ? value : 0;
}

/* Refuses what the user gave although it changes nothing. names: NULL-terminated. */
static mz_code refuse(const bool *seen, const char *const *names, const char *with, mz_err *err) {
    for (; *names; names++)
        if (was_given(synth_table, COUNT(synth_table), seen, *names))
            return mz_fail(err, MZ_EINPUT, "--%s: has no meaning with %s: leave it out", *names,
                           with);
    return MZ_OK;
}

/* Whether the profile chosen makes counts; without a profile false. */
static bool profile_of_counts(const synth_args *args) {
    return args->profile - 1 == MZ_PROFILE_COLLAPSE || args->profile - 1 == MZ_PROFILE_BALANCED;
}

static mz_code check_synth(const synth_args *args, const bool *seen, mz_err *err) {
    static const char *const of_like[] = {"profile",      "load",     "layers",     "experts",
                                          "top-k",        "sequence", "model-name", "hidden",
                                          "intermediate", NULL};
    static const char *const of_counts[] = {"load", "shuffle", "sequence", "half", NULL};
    static const char *const of_pairs[] = {"load", NULL}, *const of_load[] = {"shuffle", NULL};
    bool counts = profile_of_counts(args);
    if (args->like)
        return refuse(seen, of_like, "--like, which follows the trace", err);
    if (!args->profile)
        return refuse(seen, of_load, "--load, which says what is drawn", err);
    if (was_given(synth_table, COUNT(synth_table), seen, "kind") &&
        (args->kind == MZ_TRACE_COUNTS) != counts)
        return mz_fail(err, MZ_EINPUT, "--kind: this profile makes %s: leave it out",
                       counts ? "counts" : "pairs");
    return counts ? refuse(seen, of_counts, "a profile of counts", err)
                  : refuse(seen, of_pairs, "--profile", err);
}

static mz_code synth_like(mz_app *app, const synth_args *args, const bool *seen,
                          const mz_trace_write_options *write, mz_err *err) {
    mz_trace *trace = NULL;
    mz_synth_model model = {0};
    mz_synth_history history = {0};
    mz_model_options options = {.ranks = given(seen, "ranks", args->ranks),
                                .steps = given(seen, "steps", args->steps),
                                .micro_batches = given(seen, "micro-batches", args->micro_batches),
                                .tokens = given(seen, "tokens", args->tokens),
                                .seed = (uint64_t)args->seed};
    mz_code code = parse_shuffle(args->shuffle, &options.shuffle, err);
    if (!code)
        code = mz_trace_open(args->like, &trace, err);
    bool counts = !code && (args->kind || mz_trace_facts_of(trace)->kind == MZ_TRACE_COUNTS);
    if (counts && args->shuffle)
        code = mz_fail(err, MZ_EINPUT, "--shuffle: counts have no sequences to take apart");
    if (!code && counts)
        code = mz_history_fit(app, trace, &history, err);
    else if (!code)
        code = mz_synth_fit(app, trace, options.seed, &model, err);
    if (!code)
        code = counts ? mz_history_write(app, &history, &options, args->output, write, err)
                      : mz_synth_model_write(app, &model, &options, args->output, write, err);
    mz_history_free(&history);
    mz_synth_model_free(&model);
    if (trace)
        mz_trace_close(&trace);
    return code;
}

static mz_code synth_profile(mz_app *app, const synth_args *args,
                             const mz_trace_write_options *write, mz_err *err) {
    mz_profile profile = (mz_profile)(args->profile - 1);
    bool counts = profile_of_counts(args);
    mz_synth_model model = {0};
    mz_synth_history history = {0};
    mz_model_options options = {.ranks = args->ranks,
                                .steps = args->steps,
                                .micro_batches = args->micro_batches,
                                .tokens = args->tokens,
                                .seed = (uint64_t)args->seed};
    mz_trace_facts facts = {.phase = MZ_PHASE_TRAIN,
                            .step_meaning = MZ_STEP_ITERATION,
                            .layers = (int32_t)args->layers,
                            .experts = (int32_t)args->experts,
                            .top_k = (int32_t)args->top_k,
                            .ranks = (int32_t)args->ranks,
                            .hidden = args->hidden,
                            .intermediate = args->intermediate,
                            .step_stride = profile == MZ_PROFILE_COLLAPSE ? 10 : 1,
                            .licence = "CC0-1.0",
                            .router = "softmax",
                            .has_weight = !counts,
                            .weights_normalized = !counts};
    const char *name = args->name ? args->name : "synthetic-profile";
    mz_code code = parse_shuffle(args->shuffle, &options.shuffle, err);
    if (!code)
        code = mz_synth_name(&facts, name, "", err);
    if (!code && args->top_k > args->experts)
        code = mz_fail(err, MZ_EINPUT, "--top-k: %lld of %lld experts", (long long)args->top_k,
                       (long long)args->experts);
    if (!code && counts)
        code = mz_profile_history(app, profile, &facts, args->steps, args->tokens, options.seed,
                                  &history, err);
    else if (!code)
        code = mz_profile_model(app, profile, &facts, args->sequence, options.seed, &model, err);
    if (!code)
        code = counts ? mz_history_write(app, &history, &options, args->output, write, err)
                      : mz_synth_model_write(app, &model, &options, args->output, write, err);
    mz_history_free(&history);
    mz_synth_model_free(&model);
    return code;
}

static mz_code run_synth(mz_app *app, int argc, char **argv, mz_err *err) {
    synth_args args;
    int nargs;
    bool help = false, seen[COUNT(synth_table)];
    mz_code code = mz_opt_parse(&synth_spec, &args, argc, argv, &nargs, &help, seen, app->out, err);
    if (code || help)
        return code;
    mz_log_choose(&app->log, args.quiet, args.verbose);
    for (int i = 0; args.list && mz_synth_loads[i]; i++)
        fprintf(app->out, "%-12s  %s\n", mz_synth_loads[i]->name, mz_synth_loads[i]->summary);
    if (args.list)
        return MZ_OK;
    code = check_synth(&args, seen, err);
    if (!code)
        code = need_output(args.output, err);
    if (!code)
        code = mz_keep_input(args.like, args.output, err);
    if (code)
        return code;
    mz_synth_options options = {.load = args.load,
                                .name = args.name,
                                .layers = args.layers,
                                .experts = args.experts,
                                .top_k = args.top_k,
                                .ranks = args.ranks,
                                .tokens = args.tokens,
                                .sequence = args.sequence,
                                .steps = args.steps,
                                .micro_batches = args.micro_batches,
                                .hidden = args.hidden,
                                .intermediate = args.intermediate,
                                .seed = (uint64_t)args.seed,
                                .kind = args.kind ? MZ_TRACE_COUNTS : MZ_TRACE_PAIRS};
    mz_trace_write_options write = {.deflate = (int)args.deflate, .half_weights = args.half};
    code = args.like      ? synth_like(app, &args, seen, &write, err)
           : args.profile ? synth_profile(app, &args, &write, err)
                          : mz_synth_write(app, &options, args.output, &write, err);
    if (!code)
        mz_info(&app->log, "wrote %s", args.output);
    return code;
}

/* ---- import ---------------------------------------------------------------------------------- */

typedef struct import_args {
    const char *format, *output;
    mz_import_options import;
    int64_t deflate;
    int normalized;
    bool half, list, quiet, verbose;
} import_args;

#define AT(field) offsetof(import_args, field)
#define IN(field) offsetof(import_args, import.field)
static const mz_opt import_table[] = {
    {"format", 'f', MZ_OPT_STR, AT(format), NULL, "NAME",
     "format of the files; default: found from their content"},
    {"list", 0, MZ_OPT_FLAG, AT(list), NULL, NULL, "describe the formats"},
    {"experts", 0, MZ_OPT_INT, IN(experts), "0", "E", "routed experts per layer; 0: in the file", 0,
     MZ_EXPERTS_MAX},
    {"top-k", 0, MZ_OPT_INT, IN(top_k), "0", "K", "experts per token; 0: in the file", 0, 4096},
    {"weights", 0, MZ_OPT_STR, IN(weights), NULL, "FILE", "gate weights beside the ids (npy-ids)"},
    {"sequences", 0, MZ_OPT_STR, IN(sequences), NULL, "CSV",
     "bounds of sequences: first_row, num_tokens (npy-ids)"},
    {"normalized", 0, MZ_OPT_ENUM, AT(normalized), "auto", "auto|no|yes",
     "weights of a token sum to 1 over its experts"},
    {"native-k", 0, MZ_OPT_INT, IN(native_k), "0", "K",
     "the model's own experts per token, where more were recorded; 0: in the file", 0, 4096},
    {"layers", 0, MZ_OPT_INT, IN(layers), "0", "L",
     "layers of a flat list of ids, dense ones included if recorded", 0, MZ_LAYERS_MAX},
    {"id-bytes", 0, MZ_OPT_INT, IN(id_bytes), "0", "N",
     "bytes of one id of a flat list: 1, 2 or 4; 0: by format", 0, 4},
    {"tokens", 0, MZ_OPT_INT, IN(tokens), "0", "T",
     "tokens of each call, where the file holds shares, or counts after dropping", 0, 1e12},
    {"dropped", 0, MZ_OPT_FLAG, IN(dropped), NULL, NULL,
     "counts are after dropping: the fullest layer tells a micro-batch's tokens"},
    {"ep-size", 0, MZ_OPT_INT, IN(ep_size), "0", "N",
     "ranks that hold all experts once, where experts are numbered per rank", 0, MZ_RANKS_MAX},
    {"ep-ranks", 0, MZ_OPT_STR, IN(ep_ranks), NULL, "RANK:PLACE,...",
     "place of each rank among them; default: rank mod --ep-size"},
    {"layer-offsets", 0, MZ_OPT_STR, IN(layer_offsets), NULL, "RANK:N,...",
     "pipeline stages: add N to the layer numbers of ranks from RANK on"},
    {"scores", 0, MZ_OPT_STR, IN(scores), NULL, "NAME",
     "weights from recorded logits: softmax-chosen, softmax-all, sigmoid or none"},
    {"filler-last", 0, MZ_OPT_STR, IN(filler_last), NULL, "yes|no",
     "whether the last row of a sequence is a filler, no token"},
    {"ranks-hold", 0, MZ_OPT_ENUM, IN(ranks_hold), "ask", "ask|same|tokens|experts",
     "the ranks' files count the same tokens, their own tokens, or their own experts"},
    {"padding", 0, MZ_OPT_ENUM, IN(padding), "ask", "ask|none|left|both",
     "where rows of zeros pad a sequence"},
    {"dense-layers", 0, MZ_OPT_STR, IN(dense_layers), NULL, "L,L,...",
     "layers recorded as rows of zeros, or none; needed only with one expert per token"},
    {"skip-rows", 0, MZ_OPT_INT, IN(skip_rows), "0", "N",
     "rows at the start to leave out; 0: a long run of equal rows (profiling)", 0, 1e12},
    {"method", 0, MZ_OPT_STR, IN(method), NULL, "NAME", "which run of the file (laer-csv)"},
    {"model-name", 0, MZ_OPT_STR, IN(model_name), NULL, "NAME",
     "which model of the file (laer-csv)"},
    {"phase", 0, MZ_OPT_STR, IN(phase), NULL, "NAME",
     "train, prefill or decode; asked for where a format does not tell (--list)"},
    {"step-meaning", 0, MZ_OPT_STR, IN(step_meaning), NULL, "NAME",
     "iteration, forward or none; default: by format"},
    {"step-stride", 0, MZ_OPT_INT, IN(step_stride), "0", "N",
     "iterations between recorded steps; 0: by format", 0, 1e12},
    {"name", 0, MZ_OPT_STR, IN(name), NULL, "NAME", "model's name; default: by format"},
    {"hidden", 0, MZ_OPT_INT, IN(hidden), "0", "H", "model's hidden size; 0: not known", 0, 1e9},
    {"intermediate", 0, MZ_OPT_INT, IN(intermediate), "0", "I",
     "experts' intermediate size; 0: not known", 0, 1e9},
    {"source", 0, MZ_OPT_STR, IN(source), NULL, "TEXT", "where the data come from"},
    {"licence", 0, MZ_OPT_STR, IN(licence), NULL, "TEXT", "licence of the data"},
    {"deflate", 0, MZ_OPT_INT, AT(deflate), "4", "N", "compression, 0 (none) to 9", 0, 9},
    {"half", 0, MZ_OPT_FLAG, AT(half), NULL, NULL, "store weights in half precision"},
    {"force", 0, MZ_OPT_FLAG, IN(force), NULL, NULL,
     "take --format even if the content looks different"},
    {"output", 'o', MZ_OPT_STR, AT(output), NULL, "FILE", "the trace to write"},
    MZ_OPT_COMMON_ROWS(import_args),
};
#undef IN
#undef AT

static const mz_opt_spec import_spec = {
    .command = "mizan trace import",
    .synopsis = "[OPTIONS] FILE... -o TRACE",
    .about = "Turns routing recorded by other programs into one trace. Files may be gzip or xz.",
    .example = "mizan trace import ids.npy.xz --weights weights.npy.xz --experts 32 --phase decode "
               "-o trace.h5",
    .table = import_table,
    .count = COUNT(import_table),
    .max_args = -1,
};

typedef struct file_seen {
    dev_t device;
    ino_t inode;
    int place; /* among the files given */
} file_seen;

static int by_inode(const void *a, const void *b) {
    const file_seen *x = a, *y = b;
    if (x->device != y->device)
        return x->device < y->device ? -1 : 1;
    if (x->inode != y->inode)
        return x->inode < y->inode ? -1 : 1;
    return (x->place > y->place) - (x->place < y->place);
}

/* MZ_EINPUT when a file is given twice, under one name or several: it would count twice. What is
 * no file its importer refuses. */
static mz_code refuse_twice(char **files, int count, mz_err *err) {
    struct stat about;
    int known = 0;
    file_seen *seen = mz_calloc((size_t)count, sizeof *seen);
    if (!seen)
        return mz_fail_nomem(err, "the list of files");
    for (int i = 0; i < count; i++)
        if (stat(files[i], &about) == 0)
            seen[known++] = (file_seen){about.st_dev, about.st_ino, i};
    qsort(seen, (size_t)known, sizeof *seen, by_inode);
    mz_code code = MZ_OK;
    for (int i = 1; i < known && !code; i++) {
        const char *one = files[seen[i - 1].place], *other = files[seen[i].place];
        if (seen[i].device != seen[i - 1].device || seen[i].inode != seen[i - 1].inode)
            continue;
        code =
            strcmp(one, other) == 0
                ? mz_fail(err, MZ_EINPUT,
                          "%s: given twice: give each file once (a copy of it if both are meant)",
                          one)
                : mz_fail(err, MZ_EINPUT,
                          "%s and %s are one file: give each file once (a copy of it if both are "
                          "meant)",
                          one, other);
    }
    free(seen);
    return code;
}

/* First bytes of a file, for the importers to look at. */
static mz_code read_head(const char *path, unsigned char *head, size_t room, size_t *size,
                         mz_err *err) {
    mz_input *input = NULL;
    const unsigned char *data;
    if (strcmp(path, "-") == 0)
        return mz_fail(err, MZ_EINPUT, "import reads files, not standard input");
    struct stat about;
    if (stat(path, &about) == 0 && !S_ISREG(about.st_mode) && !S_ISDIR(about.st_mode))
        return mz_fail(err, MZ_EINPUT,
                       "%s: is a pipe or device, and import reads its files more than once", path);
    mz_code code = mz_input_open(path, &input, err);
    if (code)
        return code;
    code = mz_input_peek(input, &data, size, err);
    if (!code) {
        *size = *size < room ? *size : room;
        memcpy(head, data, *size);
    }
    mz_input_close(&input);
    return code;
}

static mz_code named_importer(const char *format, const mz_importer **found, mz_err *err) {
    const char *names[64];
    int count = 0;
    for (int i = 0; mz_importers[i]; i++) {
        names[count++] = mz_importers[i]->name;
        if (strcmp(format, mz_importers[i]->name) == 0) {
            *found = mz_importers[i];
            return MZ_OK;
        }
    }
    const char *near = mz_nearest(format, names, count);
    return mz_fail(err, MZ_EINPUT, "--format: there is no format '%.40s'%s%s%s", format,
                   near ? "; did you mean '" : " (--list describes them)", near ? near : "",
                   near ? "'?" : "");
}

/* *sure: the user says so, or the content does. */
static mz_code choose_importer(const import_args *args, const char *path, const mz_importer **found,
                               bool *sure, mz_err *err) {
    unsigned char head[4096];
    size_t size = 0;
    int best = 0;
    const char *other = NULL; /* another format that fits as well */
    *found = NULL;
    *sure = args->format != NULL;
    mz_code code = args->format ? named_importer(args->format, found, err) : MZ_OK;
    if (!code)
        code = read_head(path, head, sizeof head, &size, err);
    if (code)
        return code;
    if (*found) {
        if ((*found)->recognise(path, head, size) == 0 && !args->import.force)
            return mz_fail(err, MZ_EINPUT,
                           "%s: does not look like format %s; --force takes it all the same", path,
                           args->format);
        return MZ_OK;
    }
    for (int i = 0; mz_importers[i]; i++) {
        int confidence = mz_importers[i]->recognise(path, head, size);
        if (confidence > 0 && confidence == best)
            other = mz_importers[i]->name;
        if (confidence > best) {
            best = confidence;
            *found = mz_importers[i];
            other = NULL;
        }
    }
    if (other)
        return mz_fail(err, MZ_EINPUT, "%s: may be %s or %s: pass --format with one of them", path,
                       (*found)->name, other);
    *sure = best >= 50;
    if (*found)
        return MZ_OK;
    if (size >= 4 && memcmp(head, "\x89HDF", 4) == 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: an HDF5 file: if 'mizan trace check' finds it sound it is a trace "
                       "already, and no import reads others",
                       path);
    /* A .npy file that cannot be read at all has a better reason than an unknown format. */
    mz_npy_shape shape;
    if (size >= 6 && memcmp(head, "\x93NUMPY", 6) == 0 &&
        mz_npy_parse(path, head, size, &shape, err))
        return MZ_EINPUT;
    return mz_fail(err, MZ_EINPUT,
                   "%s: not in a format that is known; 'mizan trace import --list' describes "
                   "the formats",
                   path);
}

/* Refuses answers that the format does not ask for. */
static mz_code refuse_answers(const mz_importer *importer, const bool *seen, mz_err *err) {
    static const char of_all[] = "format list name source licence phase step-meaning step-stride "
                                 "hidden intermediate deflate half force output quiet verbose";
    const char *name = mz_unread_option(&import_spec, seen, of_all, importer->answers);
    if (!name)
        return MZ_OK;
    return mz_fail(err, MZ_EINPUT,
                   "--%s: has no meaning with %s files: leave it out (--list says what each format "
                   "reads)",
                   name, importer->name);
}

/* One line for each. */
static void list_importers(FILE *out) {
    for (int i = 0; mz_importers[i]; i++) {
        const char *p = mz_importers[i]->answers;
        fprintf(out, "%-15s %s; ", mz_importers[i]->name, mz_importers[i]->summary);
        if (mz_importers[i]->phase)
            fprintf(out, "phase %s", mz_importers[i]->phase);
        else
            fputs("needs --phase", out);
        fputs(*p ? "; reads" : "", out);
        for (size_t length; *p; p += length + (p[length] == ' ')) {
            length = strcspn(p, " ");
            fprintf(out, " --%.*s", (int)length, p);
        }
        fputc('\n', out);
    }
}

static void unset_to_minus_one(int64_t *value) {
    if (*value == 0)
        *value = -1;
}

/* The phase: what the user says, or that of all recordings of the format. */
static mz_code settle_phase(mz_app *app, const mz_importer *importer, bool sure, const char *path,
                            mz_import_options *options, mz_err *err) {
    if (options->phase)
        return MZ_OK;
    if (!importer->phase)
        return mz_fail(err, MZ_EINPUT,
                       "%s: the phase is not in %s files%s: pass --phase train, prefill or decode",
                       path, importer->name,
                       sure ? "" : ", which it is taken for (--format names another)");
    mz_info(&app->log, "phase %s, as of all %s files (--phase says otherwise)", importer->phase,
            importer->name);
    options->phase = importer->phase;
    options->phase_by_format = true;
    return MZ_OK;
}

/* What the user should know of an import that was done. */
static void say_report(mz_app *app, const import_args *args, const mz_import_report *report) {
    if (report->skipped)
        mz_warn(&app->log, "%lld rows left out: %s", (long long)report->skipped, report->note);
    else if (report->note[0])
        mz_info(&app->log, "%s", report->note);
    if (report->missing[0])
        mz_warn(
            &app->log,
            "files of ranks are missing (%s): the trace holds what the others recorded, numbered "
            "anew",
            report->missing);
    else if (report->absent)
        mz_warn(
            &app->log,
            "a rank recorded nothing where others did, %lld times (first rank %d in step %lld): it "
            "has no tokens there",
            (long long)report->absent, report->absent_rank, (long long)report->absent_step);
    if (args->import.weights_normalized == 0 && report->weight_rows && !report->weight_rows_off)
        mz_warn(&app->log, "the weights of every token sum to 1, but --normalized no was said: the "
                           "trace says that they do not");
    mz_info(&app->log, "wrote %s: %lld calls, %lld tokens, %lld pairs", args->output,
            (long long)report->calls, (long long)report->tokens, (long long)report->pairs);
}

static mz_code import_files(mz_app *app, import_args *args, const bool *seen, char **files,
                            int count, mz_err *err) {
    const mz_importer *importer;
    mz_import_report report = {0};
    mz_trace_write_options write = {.deflate = (int)args->deflate, .half_weights = args->half};
    bool sure;
    mz_code code = choose_importer(args, files[0], &importer, &sure, err);
    if (!code && sure)
        code = refuse_answers(importer, seen, err);
    if (code)
        return code;
    unset_to_minus_one(&args->import.experts);
    unset_to_minus_one(&args->import.top_k);
    unset_to_minus_one(&args->import.hidden);
    unset_to_minus_one(&args->import.intermediate);
    unset_to_minus_one(&args->import.step_stride);
    args->import.weights_normalized = args->normalized - 1;
    mz_info(&app->log, "importing as %s: %s", importer->name, importer->summary);
    code = settle_phase(app, importer, sure, files[0], &args->import, err);
    if (code)
        return code;
    code = importer->import(app, files, count, &args->import, args->output, &write, &report, err);
    if (!code)
        say_report(app, args, &report);
    return code;
}

static mz_code run_import(mz_app *app, int argc, char **argv, mz_err *err) {
    import_args args = {.format = NULL};
    int nargs;
    bool help = false, seen[COUNT(import_table)];
    mz_code code =
        mz_opt_parse(&import_spec, &args, argc, argv, &nargs, &help, seen, app->out, err);
    if (code || help)
        return code;
    mz_log_choose(&app->log, args.quiet, args.verbose);
    if (args.list) {
        list_importers(app->out);
        return MZ_OK;
    }
    if (nargs == 0)
        return mz_fail(err, MZ_EINPUT, "no file to import: pass FILE...");
    code = need_output(args.output, err);
    if (!code)
        code = mz_keep_inputs((const char *const *)argv + 1, nargs, args.output, err);
    if (!code)
        code = mz_keep_input(args.import.weights, args.output, err);
    if (!code)
        code = mz_keep_input(args.import.sequences, args.output, err);
    if (!code)
        code = refuse_twice(argv + 1, nargs, err);
    return code ? code : import_files(app, &args, seen, argv + 1, nargs, err);
}

/* ---- check ----------------------------------------------------------------------------------- */

typedef struct check_args {
    int64_t limit;
    bool quiet, verbose;
} check_args;

#define AT(field) offsetof(check_args, field)
static const mz_opt check_table[] = {
    {"limit", 0, MZ_OPT_INT, AT(limit), "100", "N", "problems listed at most per trace", 1, 1e9},
    MZ_OPT_COMMON_ROWS(check_args),
};
#undef AT

static const mz_opt_spec check_spec = {
    .command = "mizan trace check",
    .synopsis = "[OPTIONS] TRACE...",
    .about = "Reads traces from end to end and lists everything that is wrong.",
    .example = "mizan trace check trace.h5",
    .table = check_table,
    .count = COUNT(check_table),
    .min_args = 1,
    .max_args = -1,
};

static mz_code run_check(mz_app *app, int argc, char **argv, mz_err *err) {
    check_args args;
    char path[4096];
    int nargs, wrong = 0;
    bool help = false;
    mz_code code = mz_opt_parse(&check_spec, &args, argc, argv, &nargs, &help, NULL, app->out, err);
    if (code || help)
        return code;
    mz_log_choose(&app->log, args.quiet, args.verbose);
    for (int i = 1; i <= nargs && !code; i++) {
        int64_t faults = 0;
        code = mz_trace_check(app, argv[i], args.limit, app->out, &faults, err);
        if (!code && faults == 0) {
            mz_format_line(path, sizeof path, "%s", argv[i]);
            fprintf(app->out, "%s: sound\n", path);
        }
        wrong += faults > 0;
    }
    if (!code && wrong)
        return nargs > 1 ? mz_fail(err, MZ_EINPUT, "%d of %d traces are wrong", wrong, nargs)
                         : mz_fail(err, MZ_EINPUT, "%s: this trace is wrong", argv[1]);
    return code;
}

/* ---- cut ------------------------------------------------------------------------------------- */

typedef struct cut_args {
    int64_t first_step, steps, first_layer, layers, first_rank, ranks, max_tokens, deflate;
    const char *output;
    bool half, quiet, verbose;
} cut_args;

#define AT(field) offsetof(cut_args, field)
static const mz_opt cut_table[] = {
    {"first-step", 0, MZ_OPT_INT, AT(first_step), "0", "I", "skip this many recorded steps", 0,
     1e15},
    {"steps", 'n', MZ_OPT_INT, AT(steps), "0", "N", "keep this many steps; 0: to the end", 0, 1e15},
    {"first-layer", 0, MZ_OPT_INT, AT(first_layer), "0", "L", "first MoE layer to keep", 0,
     MZ_LAYERS_MAX},
    {"layers", 0, MZ_OPT_INT, AT(layers), "0", "N", "keep this many layers; 0: to the last", 0,
     MZ_LAYERS_MAX},
    {"first-rank", 0, MZ_OPT_INT, AT(first_rank), "0", "R", "first source rank to keep", 0,
     MZ_RANKS_MAX},
    {"ranks", 'r', MZ_OPT_INT, AT(ranks), "0", "N", "keep this many ranks; 0: to the last", 0,
     MZ_RANKS_MAX},
    {"max-tokens", 0, MZ_OPT_INT, AT(max_tokens), "0", "T",
     "stop before there are more tokens; 0: no limit", 0, 1e15},
    {"deflate", 0, MZ_OPT_INT, AT(deflate), "4", "N", "compression, 0 (none) to 9", 0, 9},
    {"half", 0, MZ_OPT_FLAG, AT(half), NULL, NULL, "store weights in half precision"},
    {"output", 'o', MZ_OPT_STR, AT(output), NULL, "FILE", "the trace to write"},
    MZ_OPT_COMMON_ROWS(cut_args),
};
#undef AT

static const mz_opt_spec cut_spec = {
    .command = "mizan trace cut",
    .synopsis = "[OPTIONS] TRACE -o FILE",
    .about =
        "Copies some steps, layers or ranks to a new trace; what is kept is renumbered from 0, "
        "steps keep\ntheir numbers.",
    .example = "mizan trace cut --first-step 50 --steps 10 trace.h5 -o short.h5",
    .table = cut_table,
    .count = COUNT(cut_table),
    .min_args = 1,
    .max_args = 1,
};

static mz_code run_cut(mz_app *app, int argc, char **argv, mz_err *err) {
    cut_args args;
    int nargs;
    bool help = false;
    mz_trace *trace = NULL;
    mz_code code = mz_opt_parse(&cut_spec, &args, argc, argv, &nargs, &help, NULL, app->out, err);
    if (code || help)
        return code;
    mz_log_choose(&app->log, args.quiet, args.verbose);
    mz_cut_options options = {.first_step = args.first_step,
                              .steps = args.steps,
                              .first_layer = (int32_t)args.first_layer,
                              .layers = (int32_t)args.layers,
                              .first_rank = (int32_t)args.first_rank,
                              .ranks = (int32_t)args.ranks,
                              .max_tokens = args.max_tokens};
    mz_trace_write_options write = {.deflate = (int)args.deflate, .half_weights = args.half};
    code = need_output(args.output, err);
    if (!code)
        code = mz_keep_input(argv[1], args.output, err);
    if (!code)
        code = mz_trace_open(argv[1], &trace, err);
    if (!code)
        code = mz_trace_cut(app, trace, &options, args.output, &write, err);
    if (!code)
        mz_info(&app->log, "wrote %s", args.output);
    if (trace)
        mz_trace_close(&trace);
    return code;
}

/* ---- mizan trace ----------------------------------------------------------------------------- */

static const mz_command trace_commands[] = {
    {"info", "facts, sizes and how uneven the loads are", run_info},
    {"compare", "say in which statistics two traces differ", run_compare},
    {"check", "list everything that is wrong with a trace", run_check},
    {"synth", "make a synthetic trace", run_synth},
    {"import", "turn routing recorded by other programs into a trace", run_import},
    {"export", "write a trace in the formats of other programs", mz_cmd_trace_export},
    {"cut", "copy some steps, layers or ranks to a new trace", run_cut},
};

static void print_help(FILE *out) {
    fprintf(out,
            "usage: mizan trace COMMAND [ARGUMENT...]\n\n"
            "Looks at, checks, makes, imports, exports and cuts routing traces.\n\ncommands:\n");
    for (int i = 0; i < COUNT(trace_commands); i++)
        fprintf(out, "  %-8s %s\n", trace_commands[i].name, trace_commands[i].summary);
    fprintf(out, "\n'mizan trace COMMAND --help' shows the options of a command.\n"
                 "example: mizan trace synth --load realistic -o trace.h5\n");
}

mz_code mz_cmd_trace(mz_app *app, int argc, char **argv, mz_err *err) {
    const char *names[COUNT(trace_commands)], *name = argc > 1 ? argv[1] : NULL;
    if (!name)
        return mz_fail(err, MZ_EINPUT, "no command given; 'mizan trace --help' lists them");
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || strcmp(name, "help") == 0) {
        print_help(app->out);
        return MZ_OK;
    }
    for (int i = 0; i < COUNT(trace_commands); i++) {
        names[i] = trace_commands[i].name;
        if (strcmp(name, names[i]) == 0)
            return trace_commands[i].run(app, argc - 1, argv + 1, err);
    }
    const char *near = mz_nearest(name, names, COUNT(trace_commands));
    return mz_fail(err, MZ_EINPUT, "there is no command '%.40s'%s%s%s", name,
                   near ? "; did you mean '" : "; 'mizan trace --help' lists them",
                   near ? near : "", near ? "'?" : "");
}
