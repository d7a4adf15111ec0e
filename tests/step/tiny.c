#include "tests/step/tiny.h"

static int route(const void *self, int32_t src, int32_t dst, int32_t *links) {
    const tiny *t = self;
    if (t->device[src] == t->device[dst])
        return 0;
    const bool outside = t->domain[src] != t->domain[dst];
    links[0] = 4 * src + 2 * outside;
    links[1] = 4 * dst + 2 * outside + 1;
    return 2;
}

static void add_tensor(tiny *t, const char *name, int64_t rows, int64_t cols, int64_t count,
                       int32_t layer, mz_tier tier) {
    mz_tensor *x = &t->tensor[t->model.tensors++];
    *x = (mz_tensor){.rows = rows,
                     .cols = cols,
                     .count = count,
                     .layer = layer,
                     .tier = tier,
                     .bytes_per_value = 2,
                     .trainable = true};
    snprintf(x->name, sizeof x->name, "%s", name);
}

static void make_model(tiny *t, const char *layers) {
    mz_model *m = &t->model;
    *m = (mz_model){.name = "tiny",
                    .is_moe = t->is_moe,
                    .is_sliding = t->is_sliding,
                    .experts = TINY_EXPERTS,
                    .top_k = 2,
                    .expert_group = 1,
                    .hidden = TINY_H,
                    .expert_intermediate = TINY_I,
                    .dense_intermediate = 96,
                    .vocab = TINY_VOCAB,
                    .heads = 2,
                    .kv_heads = 2,
                    .head_dim = 32,
                    .v_head_dim = 32,
                    .gated = true,
                    .tensor = t->tensor};
    add_tensor(t, "embedding", TINY_VOCAB, TINY_H, 1, -1, MZ_TIER_BACKBONE);
    for (; layers[m->layers]; m->layers++) {
        const int32_t l = m->layers;
        t->is_moe[l] = layers[l] == 'm';
        m->moe_layers += t->is_moe[l];
        add_tensor(t, "attention", 4 * TINY_H, TINY_H, 1, l, MZ_TIER_BACKBONE);
        if (t->is_moe[l]) {
            add_tensor(t, "router", TINY_EXPERTS, TINY_H, 1, l, MZ_TIER_ROUTER);
            add_tensor(t, "experts", 3 * TINY_I, TINY_H, TINY_EXPERTS, l, MZ_TIER_EXPERT);
        } else {
            add_tensor(t, "dense", 3 * 96, TINY_H, 1, l, MZ_TIER_BACKBONE);
        }
    }
    add_tensor(t, "head", TINY_VOCAB, TINY_H, 1, -1, MZ_TIER_BACKBONE);
}

static void make_cluster(tiny *t, int32_t ranks, int32_t ranks_per_domain) {
    mz_cluster *c = &t->cluster;
    for (int32_t r = 0; r < ranks; r++) {
        t->domain[r] = r / ranks_per_domain;
        t->device[r] = r;
        t->inside[r] = 1e10;
        t->outside[r] = 1e9;
        t->uplink[r] = 1e9 * ranks_per_domain;
        for (int i = 0; i < 4; i++) {
            t->link_bytes_per_s[4 * r + i] = i < 2 ? 1e10 : 1e9;
            t->link_latency_s[4 * r + i] = i < 2 ? 0.5e-6 : 2.5e-6;
        }
    }
    snprintf(c->name, sizeof c->name, "tiny");
    c->gpus = c->ranks = ranks;
    c->ranks_per_device = 1;
    c->device = (mz_device){.memory_bytes = 1e9,
                            .memory_bytes_per_s = 1e11,
                            .memory_efficiency = 1,
                            .bf16_flops = 1e12,
                            .gemm_efficiency = 1,
                            .attention_efficiency = 1,
                            .attention_backward_efficiency = 1,
                            .sms = 4,
                            .tile_m = 128,
                            .tile_n = 128,
                            .row_alignment = 1,
                            .launch_s = 2e-6,
                            .sync_s = 10e-6,
                            .context_bytes = 1000,
                            .communicator_bytes = 100,
                            .workspace_bytes = 10,
                            .noise_persistent = 0.02,
                            .noise_jitter = 0.01,
                            .speed = 1};
    c->topology = (mz_topology){.ranks = ranks,
                                .links = 4 * ranks,
                                .link_bytes_per_s = t->link_bytes_per_s,
                                .link_latency_s = t->link_latency_s,
                                .self = t,
                                .route = route,
                                .domain = t->domain,
                                .domains = (ranks + ranks_per_domain - 1) / ranks_per_domain,
                                .device = t->device,
                                .inside_bytes_per_s = t->inside,
                                .outside_bytes_per_s = t->outside,
                                .uplink_bytes_per_s = t->uplink,
                                .inside_latency_s = 1e-6,
                                .outside_latency_s = 5e-6};
    t->planner[0] = (mz_planner_cost){.policy = "static", .fixed_s = 7e-6};
    c->planner = t->planner;
    c->planners = 1;
}

void tiny_make(tiny *t, int32_t ranks, int32_t ranks_per_domain, const char *layers) {
    memset(t, 0, sizeof *t);
    make_model(t, layers);
    make_cluster(t, ranks, ranks_per_domain);
    t->options = mz_step_defaults(ranks);
    t->options.effects = (mz_step_effects){.fifo = true};
    t->options.sequence_length = 16;
    t->traits = (mz_policy_traits){.interval = 1, .score_source = ""};
}

void tiny_load(tiny *t, const int64_t *count) {
    t->ep = t->options.ep;
    memcpy(t->count, count, sizeof *count * (size_t)(t->ep * TINY_EXPERTS));
    t->load = (mz_load){.sources = t->ep,
                        .experts = TINY_EXPERTS,
                        .count = t->count,
                        .total = t->total,
                        .source = t->source};
    mz_load_sum(&t->load);
    for (int32_t r = 0; r < t->cluster.ranks; r++)
        t->tokens[r] = t->source[r % t->ep] / 2;
    for (int b = 1; b < 4; b++)
        memcpy(t->tokens + b * t->cluster.ranks, t->tokens,
               sizeof *t->tokens * (size_t)t->cluster.ranks);
}

static void fill_entries(const tiny *t, int instances, const int64_t *pairs, int64_t *total,
                         int64_t *begin, int32_t *source, int64_t *entry) {
    begin[0] = 0;
    for (int i = 0; i < instances; i++) {
        total[i] = 0;
        begin[i + 1] = begin[i];
        for (int32_t s = 0; s < t->ep; s++) {
            const int64_t n = pairs[s * instances + i];
            if (n == 0)
                continue;
            source[begin[i + 1]] = s;
            entry[begin[i + 1]++] = n;
            total[i] += n;
        }
    }
}

void tiny_plan(tiny *t, int instances, const int32_t *expert, const int32_t *rank,
               const int64_t *pairs, const int64_t *back) {
    mz_err err;
    mz_plan_free(&t->plan);
    const int32_t mains = (TINY_EXPERTS + t->ep - 1) / t->ep;
    if (t->traits.slots < mains)
        t->traits.slots = mains;
    assert_ok(mz_plan_create(t->ep, TINY_EXPERTS, t->traits.slots, &t->plan, &err), &err);
    mz_plan *p = t->plan;
    mz_plan_reset(p);
    for (int i = 0; i < instances; i++) {
        p->rank[i] = rank[i];
        for (int32_t e = expert[i]; e < TINY_EXPERTS; e++)
            p->begin[e + 1] = i + 1;
    }
    fill_entries(t, instances, pairs, p->forward, p->entry_begin, p->entry_source, p->entry_pairs);
    p->pairs = t->load.pairs;
    p->has_backward = back != NULL;
    if (back)
        fill_entries(t, instances, back, p->backward, p->back_begin, p->back_source, p->back_pairs);
}

void tiny_static_plan(tiny *t) {
    int32_t expert[TINY_EXPERTS], rank[TINY_EXPERTS];
    for (int32_t e = 0; e < TINY_EXPERTS; e++) {
        expert[e] = e;
        rank[e] = e * t->ep / TINY_EXPERTS;
    }
    tiny_plan(t, TINY_EXPERTS, expert, rank, t->count, NULL);
}

void tiny_step(tiny *t, int32_t micro_batches, mz_step **step, mz_step_outcome *outcome) {
    mz_err err;
    const mz_step_head head = {3, micro_batches, t->model.moe_layers, t->tokens};
    assert_ok(mz_step_create(&t->model, &t->cluster, &t->options, "static", &t->traits, step, &err),
              &err);
    assert_ok(mz_step_begin(*step, &head, &err), &err);
    for (int32_t b = 0; b < micro_batches; b++)
        for (int32_t l = 0; l < t->model.moe_layers; l++)
            for (int32_t g = 0; g < t->cluster.ranks / t->ep; g++)
                assert_ok(mz_step_add_call(*step, g, b, l, &t->load, NULL, t->plan, &err), &err);
    assert_ok(mz_step_finish(*step, outcome, &err), &err);
}

mz_step_outcome tiny_run(tiny *t, int32_t micro_batches) {
    mz_step *step;
    mz_step_outcome outcome;
    tiny_step(t, micro_batches, &step, &outcome);
    outcome.rank_busy_s = NULL;
    outcome.rank_peak_bytes = outcome.rank_replica_bytes = outcome.rank_token_buffer_bytes = NULL;
    mz_step_free(&step);
    return outcome;
}

void tiny_free(tiny *t) {
    mz_plan_free(&t->plan);
}

double tiny_gemm(double m, double n, double k) {
    return 2 * m * n * k / 1e12;
}

int tiny_phase(const char *name) {
    for (int p = 0; mz_phase_name((mz_phase)p); p++)
        if (strcmp(mz_phase_name((mz_phase)p), name) == 0)
            return p;
    fail_msg("no phase %s", name);
    return -1;
}
