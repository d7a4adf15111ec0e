/* What published claims say about plans, measured on this program's policies: the numbers behind
 * tests/bench/claims, one "key value" a line on stdout.
 *
 *   claims_plans sweep            TopoEP's slot sweep (claims C4, C12)
 *   claims_plans zipf             UltraEP's generator (C1, C2)
 *   claims_plans skew             a router with a fixed bias (C5)
 *   claims_plans bandwidth        SYMI's traffic formula (C8)
 *   claims_plans flow             FineMoE on Zipf loads (C15)
 *   claims_plans history COUNTS   SmartMoE's recorded history as .npy: drops (C7)
 *   claims_plans shadows COUNTS   the same: what FasterMoE shadows (C12)
 *   claims_plans churn COUNTS     the same: how the hot experts change (C16)
 *
 * Loads that are drawn are drawn with several seeds; keys end in the seed's number then. Nothing is
 * judged here. */
#include "tests/policy/sweep.h"
#include "tests/policy/zipf.h"

enum { SEEDS = 5 };

static double imbalance(const rig *r, const mz_load *load) {
    return (double)r->plan->peak_forward * r->env.ranks / (double)load->pairs;
}

/* Ranks beyond the first that hold an expert; several instances on one rank count once. */
static int32_t copies(const mz_plan *plan) {
    int32_t n = 0;
    for (int32_t e = 0; e < plan->experts; e++)
        for (int32_t i = plan->begin[e] + 1; i < plan->begin[e + 1]; i++) {
            bool again = false;
            for (int32_t j = plan->begin[e]; j < i; j++)
                again = again || plan->rank[j] == plan->rank[i];
            n += !again;
        }
    return n;
}

static double crossing_domains(const rig *r, const mz_load *load) {
    const mz_plan *p = r->plan;
    int64_t sum = 0;
    for (int32_t i = 0; i < p->begin[p->experts]; i++)
        for (int64_t j = p->entry_begin[i]; j < p->entry_begin[i + 1]; j++)
            sum += r->domain[p->entry_source[j]] != r->domain[p->rank[i]] ? p->entry_pairs[j] : 0;
    return (double)sum / (double)load->pairs;
}

/* ---- TopoEP's slot sweep ---------------------------------------------------------------------
 */
static void sweep_one(const char *key, const char *text, uint64_t seed, const mz_load *load,
                      const mz_load *history) {
    rig r;
    rig_prepare(&r, SWEEP_RANKS, SWEEP_EXPERTS, SWEEP_NODE);
    r.env.weight_bytes = SWEEP_WEIGHT_BYTES;
    r.env.token_bytes = SWEEP_TOKEN_BYTES;
    if (rig_start(&r, text) != MZ_OK)
        fail_msg("%s: %s", text, r.err.msg);
    rig_call(&r, load, history, NULL, NULL);
    printf("sweep.%s.imbalance.%d %.5f\n", key, (int)seed, imbalance(&r, load));
    printf("sweep.%s.copies.%d %d\n", key, (int)seed, copies(r.plan));
    printf("sweep.%s.crossing.%d %.5f\n", key, (int)seed, crossing_domains(&r, load));
    rig_close(&r);
}

static void sweep_slots(int extra, uint64_t seed, const mz_load *load, const mz_load *by_place,
                        const mz_load *history) {
    static const struct {
        const char *key, *text;
        bool by_place; /* groups experts by id and keeps no mains; plans on the history */
    } row[] = {{"topoep", "topoep[slots=%d]", false},
               {"flexmoe", "flexmoe[form=scale-eplb,slots=%d]", false},
               {"fastermoe", "fastermoe[rule=port,slots=%d]", false},
               {"ultraep", "ultraep[slots=%d,scope=group]", false},
               {"eplb-hierarchical", "eplb[slots=%d,mode=hierarchical,groups=4]", true},
               {"eplb-global", "eplb[slots=%d,mode=global]", true}};
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        char text[64], key[64];
        snprintf(text, sizeof text, row[i].text, SWEEP_EXPERTS / SWEEP_RANKS + extra);
        snprintf(key, sizeof key, "%s.%d", row[i].key, extra);
        sweep_one(key, text, seed, row[i].by_place ? by_place : load, history);
    }
}

static void sweep(void) {
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        mz_load *load = sweep_load(1.5, SWEEP_MODULO, seed);
        mz_load *by_place = sweep_load(1.5, SWEEP_PLACE, seed);
        mz_load *history = sweep_load(1.3, SWEEP_PLACE, 1000 + seed);
        sweep_one("static", "static", seed, load, NULL);
        sweep_one("llep", "llep", seed, load, NULL);
        sweep_one("fastermoe.free", "fastermoe[rule=port,slots=200]", seed, load, NULL);
        for (int extra = 1; extra <= 4; extra++)
            sweep_slots(extra, seed, load, by_place, history);
        load_free(load);
        load_free(by_place);
        load_free(history);
    }
}

/* ---- UltraEP's generator -----------------------------------------------------------------------
 */
static void zipf_one(const char *key, const char *text, int32_t experts, const mz_load *load,
                     int seed) {
    rig r;
    rig_open(&r, text, ZIPF_RANKS, experts, 0);
    rig_call(&r, load, load, NULL, NULL);
    printf("%s.imbalance.%d %.5f\n", key, seed, imbalance(&r, load));
    printf("%s.copies.%d %d\n", key, seed, copies(r.plan));
    printf("%s.crossing.%d %.5f\n", key, seed,
           1 - (double)local_pairs(r.plan) / (double)load->pairs);
    rig_close(&r);
}

static void zipf_case(int32_t experts, int extra, double target, int seed) {
    static const struct {
        const char *key, *text;
    } row[] = {{"static", "static"},
               {"ultraep", "ultraep[slots=%d]"},
               {"ultraep-blind", "ultraep[slots=%d,locality=no]"},
               {"eplb-exact", "eplb[slots=%d,mode=global,lag=0]"}};
    mz_load *load = zipf_load(experts, target, 11 + (uint64_t)seed);
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        char text[64], key[64];
        snprintf(text, sizeof text, row[i].text, experts / ZIPF_RANKS + extra);
        snprintf(key, sizeof key, "zipf.%d.%d.%.2f.%s", experts, extra, target, row[i].key);
        zipf_one(key, text, experts, load, seed);
    }
    load_free(load);
}

static void zipf(void) {
    static const struct {
        int32_t experts;
        int extra;
        double target;
    } row[] = {{256, 2, 1.30}, {128, 2, 2.23}, {128, 2, 2.86}, {256, 4, 2.06},
               {256, 4, 3.09}, {256, 4, 3.68}, {256, 4, 4.01}, {256, 2, 1.51},
               {256, 2, 2.01}, {256, 2, 3.03}, {128, 1, 6.00}, {128, 1, 8.00}};
    for (size_t i = 0; i < sizeof row / sizeof *row; i++)
        for (int seed = 0; seed < SEEDS; seed++)
            zipf_case(row[i].experts, row[i].extra, row[i].target, seed);
}

/* ---- a router with a fixed bias per expert ------------------------------------------------------
 * Logits: standard normal per token, plus `skew` times a standard normal per expert; the top k of
 * them. */
static double normal(mz_rng *rng) {
    const double u = mz_rng_uniform(rng), v = mz_rng_uniform(rng);
    return sqrt(-2 * log(1 - u)) * cos(2 * 3.14159265358979323846 * v);
}

static void top_k(const double *logit, int32_t experts, int32_t k, int64_t *row) {
    double best[16];
    int32_t at[16], n = 0;
    for (int32_t e = 0; e < experts; e++) {
        if (n == k && logit[e] <= best[k - 1])
            continue;
        int32_t i = n < k ? n++ : k - 1;
        for (; i > 0 && best[i - 1] < logit[e]; i--) {
            best[i] = best[i - 1];
            at[i] = at[i - 1];
        }
        best[i] = logit[e];
        at[i] = e;
    }
    for (int32_t i = 0; i < n; i++)
        row[at[i]]++;
}

/* Every eighth of 4,096 tokens a rank is drawn and counts eight times. */
static mz_load *biased_load(int32_t ranks, int32_t experts, int32_t k, double skew, uint64_t seed) {
    enum { TOKENS = 4096, DRAWN = 8 };
    double bias[512], logit[512];
    mz_load *load = load_new(ranks, experts);
    mz_rng rng = mz_rng_make(seed, 5);
    for (int32_t e = 0; e < experts; e++)
        bias[e] = skew * normal(&rng);
    for (int32_t s = 0; s < ranks; s++) {
        int64_t *row = load->count + (int64_t)s * experts;
        for (int t = 0; t < TOKENS / DRAWN; t++) {
            for (int32_t e = 0; e < experts; e++)
                logit[e] = bias[e] + normal(&rng);
            top_k(logit, experts, k, row);
        }
        for (int32_t e = 0; e < experts; e++)
            row[e] *= DRAWN;
    }
    mz_load_sum(load);
    return load;
}

static void skew(void) {
    static const struct {
        const char *key;
        int32_t ranks, experts, k;
        int64_t hidden, intermediate;
    } model[] = {{"qwen3-30b-a3b", 32, 128, 8, 2048, 768},
                 {"glm-4.5-air", 16, 128, 8, 4096, 1408},
                 {"deepseek-v2", 16, 160, 6, 5120, 1536}};
    static const char *const policy[] = {"static", "topoep"};
    for (size_t m = 0; m < sizeof model / sizeof *model; m++)
        for (int level = 0; level <= 4; level += 4)
            for (int seed = 0; seed < SEEDS; seed++) {
                mz_load *load = biased_load(model[m].ranks, model[m].experts, model[m].k, level,
                                            (uint64_t)seed);
                for (int p = 0; p < 2; p++) {
                    rig r;
                    rig_prepare(&r, model[m].ranks, model[m].experts, 8);
                    r.env.weight_bytes = 6 * model[m].hidden * model[m].intermediate;
                    r.env.token_bytes = 2 * model[m].hidden;
                    if (rig_start(&r, policy[p]) != MZ_OK)
                        fail_msg("%s: %s", policy[p], r.err.msg);
                    rig_call(&r, load, NULL, NULL, NULL);
                    printf("skew.%s.%d.%s.imbalance.%d %.5f\n", model[m].key, level, policy[p],
                           seed, imbalance(&r, load));
                    printf("skew.%s.%d.%s.crossing.%d %.5f\n", model[m].key, level, policy[p], seed,
                           crossing_domains(&r, load));
                    rig_close(&r);
                }
                load_free(load);
            }
}

/* ---- SYMI's traffic
 * ------------------------------------------------------------------------------
 * GPT3-175B-like: 3.375 GB of gradients and of weights an expert, 64 experts, 2,048 ranks of two
 * slots, 64 GB/s to the host and 400 Gb/s between ranks. */
static void bandwidth(void) {
    const mz_symi_traffic phase = mz_symi_phase_bytes(64, 2048, 2, 3.375e9);
    const double host = 64e9, network = 50e9;
    printf("bandwidth.static_s %.6f\n", 2 * (phase.host / host + phase.network_static / network));
    printf("bandwidth.symi_s %.6f\n", 2 * (phase.host / host + phase.network_symi / network));
    printf("bandwidth.overhead_resident %.6f\n", phase.network_symi / phase.network_static - 1);
}

/* ---- FineMoE on Zipf loads ---------------------------------------------------------------------
 */
static void flow_one(int32_t ranks, int32_t experts, int hundredth) {
    double worst = 0, sum = 0;
    int perfect = 0;
    enum { ORDERS = 20 };
    for (uint64_t seed = 0; seed < ORDERS; seed++) {
        int64_t total[128];
        int32_t order[128];
        mz_rng rng = mz_rng_make(seed, 15);
        for (int32_t e = 0; e < experts; e++) {
            const int32_t at = (int32_t)mz_rng_below(&rng, (uint64_t)e + 1);
            order[e] = order[at];
            order[at] = e;
        }
        for (int32_t e = 0; e < experts; e++)
            total[order[e]] = (int64_t)(1e7 * pow(e + 1, -hundredth / 100.0));
        rig r;
        mz_load *load = load_even(ranks, experts, total);
        rig_open(&r, "finemoe", ranks, experts, 0);
        rig_call(&r, load, NULL, NULL, NULL);
        const double ratio = imbalance(&r, load);
        worst = fmax(worst, ratio);
        sum += ratio;
        perfect += ratio < 1.005;
        rig_close(&r);
        load_free(load);
    }
    double all = 0;
    for (int32_t e = 0; e < experts; e++)
        all += pow(e + 1, -hundredth / 100.0);
    /* The hottest expert alone on two ranks. */
    printf("flow.%d.%d.%d.least %.5f\n", ranks, experts, hundredth, ranks / all / 2);
    printf("flow.%d.%d.%d.mean %.5f\n", ranks, experts, hundredth, sum / ORDERS);
    printf("flow.%d.%d.%d.worst %.5f\n", ranks, experts, hundredth, worst);
    printf("flow.%d.%d.%d.perfect %.3f\n", ranks, experts, hundredth, (double)perfect / ORDERS);
}

static void flow(void) {
    static const int exponent[] = {50, 60, 70, 80, 90, 99};
    for (size_t i = 0; i < sizeof exponent / sizeof *exponent; i++) {
        flow_one(8, 64, exponent[i]);
        flow_one(32, 128, exponent[i]);
    }
}

/* ---- SmartMoE's recorded history
 * ----------------------------------------------------------------- Counts
 * [iteration][layer][rank][micro-batch][expert] of 16 bits. */
enum { H_RANKS = 16, H_EXPERTS = 32, H_SLOTS = 4 };

typedef struct history {
    FILE *file;
    int steps, layers, micro_batches;
    uint16_t *buffer;
    mz_load **load; /* one per layer, sums over micro-batches of the step read last */
} history;

static size_t history_cells(const history *h) {
    return (size_t)h->layers * H_RANKS * (size_t)h->micro_batches * H_EXPERTS;
}

static bool history_open(history *h, const char *path) {
    char head[512] = "";
    unsigned char magic[10];
    int ranks = 0, experts = 0;
    *h = (history){.file = fopen(path, "rb")};
    if (!h->file || fread(magic, 1, 10, h->file) != 10)
        return false;
    const size_t n = magic[8] + 256u * magic[9];
    const char *shape;
    if (n >= sizeof head || fread(head, 1, n, h->file) != n || !strstr(head, "'<u2'") ||
        !(shape = strstr(head, "'shape': (")) ||
        sscanf(shape, "'shape': (%d, %d, %d, %d, %d)", &h->steps, &h->layers, &ranks,
               &h->micro_batches, &experts) != 5)
        return false;
    if (ranks != H_RANKS || experts != H_EXPERTS || h->layers < 1 || h->micro_batches < 1)
        return false;
    h->buffer = calloc(history_cells(h), 2);
    h->load = calloc((size_t)h->layers, sizeof(mz_load *));
    for (int l = 0; l < h->layers; l++)
        h->load[l] = load_new(H_RANKS, H_EXPERTS);
    return true;
}

static void history_close(history *h) {
    for (int l = 0; l < h->layers; l++)
        load_free(h->load[l]);
    free(h->load);
    free(h->buffer);
    fclose(h->file);
}

/* Micro-batches first to last - 1 of a layer of the step read last. */
static void history_load(const history *h, int layer, int first, int last, mz_load *load) {
    memset(load->count, 0, sizeof(int64_t) * H_RANKS * H_EXPERTS);
    for (int s = 0; s < H_RANKS; s++)
        for (int m = first; m < last; m++)
            for (int e = 0; e < H_EXPERTS; e++)
                load->count[s * H_EXPERTS + e] +=
                    h->buffer[((layer * H_RANKS + s) * h->micro_batches + m) * H_EXPERTS + e];
    mz_load_sum(load);
}

static bool history_next(history *h) {
    if (fread(h->buffer, 2, history_cells(h), h->file) != history_cells(h))
        return false;
    for (int l = 0; l < h->layers; l++)
        history_load(h, l, 0, h->micro_batches, h->load[l]);
    return true;
}

/* Pairs beyond slot capacity (all pairs over all slots) times an expert's slots. */
static int64_t beyond(const mz_load *load, const int32_t *slots) {
    int64_t sum = 0;
    for (int32_t e = 0; e < H_EXPERTS; e++) {
        const double room = (double)load->pairs / (H_RANKS * H_SLOTS) * slots[e];
        sum += (double)load->total[e] > room ? load->total[e] - (int64_t)room : 0;
    }
    return sum;
}

/* A policy that decides slots per expert on the step before, every `interval` steps. */
typedef struct slot_owner {
    const char *key, *text;
    int interval;
    rig r;
    int32_t (*slots)[H_EXPERTS]; /* of every layer; equal before the first decision */
    int64_t dropped;
} slot_owner;

static void owner_open(slot_owner *o, const history *h) {
    rig_prepare(&o->r, H_RANKS, H_EXPERTS, 8);
    o->r.env.layers = h->layers;
    if (rig_start(&o->r, o->text) != MZ_OK)
        fail_msg("%s: %s", o->text, o->r.err.msg);
    o->slots = calloc((size_t)h->layers, sizeof *o->slots);
    for (int l = 0; l < h->layers; l++)
        for (int e = 0; e < H_EXPERTS; e++)
            o->slots[l][e] = H_RANKS * H_SLOTS / H_EXPERTS;
}

static void owner_decide(slot_owner *o, int step, int layer, const mz_load *before) {
    const mz_view view = {.step = step, .layer = layer, .history = before};
    if (o->r.policy->decide(o->r.state, &view, o->r.plan, &o->r.err) != MZ_OK)
        fail_msg("%s: %s", o->text, o->r.err.msg);
    for (int e = 0; e < H_EXPERTS; e++)
        o->slots[layer][e] = o->r.plan->begin[e + 1] - o->r.plan->begin[e];
}

/* C7. Drops under SYMI's capacity rule: equal slots (DeepSpeed), FlexMoE's decisions at three
 * intervals of 10 iterations, SYMI's at every snapshot. */
static void drops(history *h) {
    enum { OWNERS = 4 };
    /* Without a threshold: the port that SYMI's paper measures shifts whenever it is asked. */
    slot_owner owner[OWNERS] = {
        {.key = "flexmoe-100", .text = "flexmoe[slots=4,threshold=1]", .interval = 10},
        {.key = "flexmoe-50", .text = "flexmoe[slots=4,threshold=1]", .interval = 5},
        {.key = "flexmoe-10", .text = "flexmoe[slots=4,threshold=1]", .interval = 1},
        {.key = "symi", .text = "symi[slots=4]", .interval = 1}};
    int64_t equal = 0, pairs = 0;
    int32_t same[H_EXPERTS];
    for (int e = 0; e < H_EXPERTS; e++)
        same[e] = H_RANKS * H_SLOTS / H_EXPERTS;
    mz_load **before = calloc((size_t)h->layers, sizeof(mz_load *));
    for (int l = 0; l < h->layers; l++)
        before[l] = load_new(H_RANKS, H_EXPERTS);
    for (int i = 0; i < OWNERS; i++)
        owner_open(&owner[i], h);
    for (int step = 0; history_next(h); step++)
        for (int l = 0; l < h->layers; l++) {
            pairs += h->load[l]->pairs;
            equal += beyond(h->load[l], same);
            for (int i = 0; i < OWNERS; i++) {
                if (step > 0 && step % owner[i].interval == 0)
                    owner_decide(&owner[i], step, l, before[l]);
                owner[i].dropped += beyond(h->load[l], owner[i].slots[l]);
            }
            mz_load *swap = before[l];
            before[l] = h->load[l];
            h->load[l] = swap;
        }
    printf("history.drops.equal %.5f\n", (double)equal / (double)pairs);
    for (int i = 0; i < OWNERS; i++) {
        printf("history.drops.%s %.5f\n", owner[i].key, (double)owner[i].dropped / (double)pairs);
        rig_close(&owner[i].r);
        free(owner[i].slots);
    }
    for (int l = 0; l < h->layers; l++)
        load_free(before[l]);
    free(before);
}

/* C12. Shadowed experts in every tenth snapshot's micro-batches, by three rules; sizes and rates
 * are those that sim/model and sim/cluster give SmartMoE's run on A100s. */
static void shadows(history *h) {
    static const struct {
        const char *key, *text;
    } rule[] = {{"fastmoe", "fastermoe[rule=fastmoe,alpha=4,d=1024]"},
                {"prototype", "fastermoe[rule=prototype,alpha=4,d=1024]"},
                {"model", "fastermoe"}};
    enum { RULES = sizeof rule / sizeof *rule };
    rig r[RULES];
    double sum[RULES] = {0}, left[RULES] = {0};
    int most[RULES] = {0}, calls = 0;
    mz_load *load = load_new(H_RANKS, H_EXPERTS);
    for (int i = 0; i < RULES; i++) {
        rig_prepare(&r[i], H_RANKS, H_EXPERTS, 8);
        r[i].env.hidden = 1024;
        r[i].env.intermediate = 4096;
        r[i].env.weight_bytes = 4 * 1024 * 4096;
        r[i].env.token_bytes = 2 * 1024;
        r[i].env.pair_seconds = 4.0 * 1024 * 4096 / (0.8 * 312e12);
        r[i].env.inside_bytes_s = 216e9;
        r[i].env.outside_bytes_s = 22.25e9;
        if (rig_start(&r[i], rule[i].text) != MZ_OK)
            fail_msg("%s: %s", rule[i].text, r[i].err.msg);
    }
    for (int step = 0; history_next(h); step++)
        for (int l = 0; step % 10 == 0 && l < h->layers; l++)
            for (int m = 0; m < h->micro_batches; m++, calls++) {
                history_load(h, l, m, m + 1, load);
                for (int i = 0; i < RULES; i++) {
                    rig_call(&r[i], load, NULL, NULL, NULL);
                    const int n = copies(r[i].plan) / (H_RANKS - 1);
                    sum[i] += n;
                    most[i] = n > most[i] ? n : most[i];
                    left[i] += imbalance(&r[i], load);
                }
            }
    for (int i = 0; i < RULES; i++) {
        printf("shadows.%s.mean %.4f\n", rule[i].key, sum[i] / calls);
        printf("shadows.%s.most %d\n", rule[i].key, most[i]);
        printf("shadows.%s.imbalance %.4f\n", rule[i].key, left[i] / calls);
        rig_close(&r[i]);
    }
    load_free(load);
}

static uint64_t hottest(const mz_load *load, int n) {
    uint64_t set = 0;
    for (int k = 0; k < n; k++) {
        int best = -1;
        for (int e = 0; e < H_EXPERTS; e++)
            if (!(set >> e & 1) && (best < 0 || load->total[e] > load->total[best]))
                best = e;
        set |= (uint64_t)1 << best;
    }
    return set;
}

/* C16. Part of the 8 hottest experts that are not among the 8 hottest of the next micro-batch; the
 * larger over the smaller count of an expert in successive snapshots, where both are at least 64
 * pairs (below that draws scatter). */
static void churn(history *h) {
    enum { HOT = 8, LEAST = 64, BINS = 4096 };
    int64_t changed = 0, seen = 0, changes = 0, bin[BINS] = {0};
    double most = 0;
    mz_load *load = load_new(H_RANKS, H_EXPERTS);
    int64_t(*before)[H_EXPERTS] = calloc((size_t)h->layers, sizeof *before);
    for (int step = 0; history_next(h); step++)
        for (int l = 0; l < h->layers; l++) {
            uint64_t last = 0;
            for (int m = 0; m < h->micro_batches; m++, last = hottest(load, HOT)) {
                history_load(h, l, m, m + 1, load);
                changed += m > 0 ? __builtin_popcountll(last & ~hottest(load, HOT)) : 0;
                seen += m > 0 ? HOT : 0;
            }
            for (int e = 0; e < H_EXPERTS; e++) {
                const double a = (double)before[l][e], b = (double)h->load[l]->total[e];
                before[l][e] = h->load[l]->total[e];
                if (a < LEAST || b < LEAST)
                    continue;
                const double ratio = a > b ? a / b : b / a;
                most = fmax(most, ratio);
                bin[(int)fmin(BINS - 1, (ratio - 1) * 1000)]++;
                changes++;
            }
        }
    int64_t passed = 0;
    int median = 0;
    while (2 * (passed += bin[median]) < changes)
        median++;
    printf("churn.hot %.5f\nchurn.most %.3f\nchurn.median %.3f\n", (double)changed / (double)seen,
           most, 1 + median / 1000.0);
    load_free(load);
    free(before);
}

static int of_history(void (*part)(history *), const char *path) {
    history h;
    if (!history_open(&h, path)) {
        fprintf(stderr,
                "claims_plans: %s: not the recorded history (16 bits, 16 ranks, 32 experts)\n",
                path);
        return 2;
    }
    part(&h);
    history_close(&h);
    return 0;
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*drawn)(void);
        void (*recorded)(history *);
    } part[] = {{"sweep", sweep, NULL},         {"zipf", zipf, NULL},  {"skew", skew, NULL},
                {"bandwidth", bandwidth, NULL}, {"flow", flow, NULL},  {"history", NULL, drops},
                {"shadows", NULL, shadows},     {"churn", NULL, churn}};
    for (size_t i = 0; argc > 1 && i < sizeof part / sizeof *part; i++)
        if (strcmp(argv[1], part[i].name) == 0 && argc == (part[i].drawn ? 2 : 3)) {
            if (part[i].recorded)
                return of_history(part[i].recorded, argv[2]);
            part[i].drawn();
            return 0;
        }
    fprintf(stderr, "usage: claims_plans sweep|zipf|skew|bandwidth|flow\n"
                    "       claims_plans history|shadows|churn COUNTS.npy\n");
    return 2;
}
