/* The eight loads of the balancing literature's mechanism tests, and the table of all loads. */
#include "traces/synth_private.h"

/* How much busier a hot expert is than a normal one. */
#define HEAT 4.0
#define HOT_SET_HEAT 8.0

static void all_even(const mz_synth *synth, double *weight) {
    for (int64_t e = 0; e < synth->options.experts; e++)
        weight[e] = 1.0;
}

/* The rank that is hot (or empty), by seed alone. */
static int64_t chosen_rank(const mz_synth *synth) {
    mz_rng rng = mz_synth_rng(synth, MZ_DRAW_HOT, 0, 0, 0, 0);
    return (int64_t)mz_rng_below(&rng, (uint64_t)synth->options.ranks);
}

static void heat_rank(const mz_synth *synth, int64_t rank, double heat, double *weight) {
    int32_t first, last;
    mz_synth_block(synth, rank, &first, &last);
    all_even(synth, weight);
    for (int32_t e = first; e < last; e++)
        weight[e] = heat;
}

static void hot_experts(const mz_synth *synth, int64_t step, int32_t layer, double *weight) {
    int64_t experts = synth->options.experts, hot = experts >= 16 ? experts / 16 : 1;
    mz_rng rng = mz_synth_rng(synth, MZ_DRAW_HOT, 1, layer, 0, 0);
    all_even(synth, weight);
    while (hot > 0) {
        uint64_t e = mz_rng_below(&rng, (uint64_t)experts);
        if (weight[e] == 1.0) {
            weight[e] = HOT_SET_HEAT;
            hot--;
        }
    }
}

static void hot_rank(const mz_synth *synth, int64_t step, int32_t layer, double *weight) {
    heat_rank(synth, chosen_rank(synth), HEAT, weight);
}

/* As many hot experts as hot-rank has, dealt out over the ranks. */
static void spread_heat(const mz_synth *synth, int64_t step, int32_t layer, double *weight) {
    int32_t first, last;
    int64_t ranks = synth->options.ranks, rank = chosen_rank(synth);
    mz_rng rng = mz_synth_rng(synth, MZ_DRAW_HOT, 1, layer, 0, 0);
    mz_synth_block(synth, rank, &first, &last);
    all_even(synth, weight);
    for (int32_t left = last - first; left > 0; left--, rank = (rank + 1) % ranks) {
        mz_synth_block(synth, rank, &first, &last);
        int32_t e = first + (int32_t)mz_rng_below(&rng, (uint64_t)(last - first));
        for (int32_t i = first; i < last && weight[e] != 1.0; i++)
            e = e + 1 < last ? e + 1 : first;
        weight[e] = HEAT;
    }
}

static void rotating(const mz_synth *synth, int64_t step, int32_t layer, double *weight) {
    heat_rank(synth, (chosen_rank(synth) + step) % synth->options.ranks, HEAT, weight);
}

static void burst(const mz_synth *synth, int64_t step, int32_t layer, double *weight) {
    mz_rng rng = mz_synth_rng(synth, MZ_DRAW_HOT, 2, 0, 0, 0);
    int64_t phase = (int64_t)mz_rng_below(&rng, 4);
    if ((step + phase) % 4 == 3)
        heat_rank(synth, chosen_rank(synth), HOT_SET_HEAT, weight);
    else
        all_even(synth, weight);
}

/* All experts of one rank and random others get nothing, a quarter in all. */
static void empty_experts(const mz_synth *synth, int64_t step, int32_t layer, double *weight) {
    int32_t first = 0, last = 0;
    int64_t experts = synth->options.experts, cold = experts / 4;
    if (cold > experts - synth->options.top_k)
        cold = experts - synth->options.top_k;
    mz_rng rng = mz_synth_rng(synth, MZ_DRAW_HOT, 1, layer, 0, 0);
    all_even(synth, weight);
    if (synth->options.ranks > 1)
        mz_synth_block(synth, chosen_rank(synth), &first, &last);
    for (int32_t e = first; e < last && cold > 0; e++, cold--)
        weight[e] = 0.0;
    while (cold > 0) {
        uint64_t e = mz_rng_below(&rng, (uint64_t)experts);
        if (weight[e] != 0.0) {
            weight[e] = 0.0;
            cold--;
        }
    }
}

/* A quarter of the ranks, at least one of several, hold no tokens: those behind the chosen one. */
static int64_t empty_tokens(const mz_synth *synth, int32_t rank) {
    int64_t ranks = synth->options.ranks, none = ranks >= 4 ? ranks / 4 : ranks - 1;
    int64_t distance = (rank - chosen_rank(synth) + ranks) % ranks;
    return distance < none ? 0 : synth->options.tokens;
}

/* From a quarter of the mean to seven quarters, evenly spaced, in an order drawn once. */
static int64_t ragged_tokens(const mz_synth *synth, int32_t rank) {
    int64_t ranks = synth->options.ranks;
    mz_rng rng = mz_synth_rng(synth, MZ_DRAW_HOT, 3, 0, 0, 0);
    int64_t stride = 1;
    for (int64_t tries = 0; tries < 64 && ranks > 2; tries++) {
        int64_t a = 1 + (int64_t)mz_rng_below(&rng, (uint64_t)(ranks - 1)), b = ranks, x = a;
        while (b) {
            int64_t rest = x % b;
            x = b;
            b = rest;
        }
        if (x == 1) { /* coprime: rank * stride visits every place once */
            stride = a;
            break;
        }
    }
    int64_t place = ranks > 1 ? rank * stride % ranks : 0;
    double share = ranks > 1 ? 0.25 + 1.5 * (double)place / (double)(ranks - 1) : 1.0;
    return (int64_t)((double)synth->options.tokens * share + 0.5);
}

static const mz_synth_load load_balanced = {.name = "balanced",
                                            .summary = "every expert and rank the same load"};
static const mz_synth_load load_hot_experts = {
    .name = "hot-experts",
    .summary = "a sixteenth of the experts, anywhere, 8 times as busy",
    .popularity = hot_experts};
static const mz_synth_load load_hot_rank = {.name = "hot-rank",
                                            .summary = "all experts of one rank 4 times as busy",
                                            .popularity = hot_rank};
static const mz_synth_load load_spread_heat = {
    .name = "spread-heat",
    .summary = "the hot experts of hot-rank, dealt out over the ranks",
    .popularity = spread_heat};
static const mz_synth_load load_ragged = {
    .name = "ragged",
    .summary = "source ranks hold from 1/4 to 7/4 of the mean tokens",
    .tokens = ragged_tokens};
static const mz_synth_load load_empty = {
    .name = "empty",
    .summary = "a quarter of the experts unused, one rank's all among them; a quarter of the ranks "
               "without tokens",
    .tokens = empty_tokens,
    .popularity = empty_experts};
static const mz_synth_load load_rotating = {.name = "rotating",
                                            .summary = "the hot rank moves on by one every step",
                                            .popularity = rotating};
static const mz_synth_load load_burst = {
    .name = "burst",
    .summary = "even load, but every fourth step one rank's experts 8 times as busy",
    .popularity = burst};
static const mz_synth_load load_realistic = {
    .name = "realistic",
    .summary = "popularity, sequences, teams and drift as in recorded traces",
    .realistic = true};

const mz_synth_load *const mz_synth_loads[] = {
    &load_balanced, &load_hot_experts, &load_hot_rank, &load_spread_heat, &load_ragged,
    &load_empty,    &load_rotating,    &load_burst,    &load_realistic,   NULL};
