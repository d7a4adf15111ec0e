/* Optimizers: the published states and peaks of the SkewAdam study's model, the rules tensor by
 * tensor, and what the parts of a shared tensor hold. */
#include "tests/harness.h"

#include "common/base/rng.h"
#include "sim/model/optimizer.h"

#include <math.h>

static const double GIB = 1 << 30;

static mz_optimizer get(const char *name) {
    mz_optimizer optimizer;
    mz_err err;
    if (mz_optimizer_parse(name, &optimizer, &err))
        fail_msg("%s", err.msg);
    return optimizer;
}

static mz_model *load(const char *name) {
    mz_model *model;
    mz_err err;
    if (mz_model_load(name, MZ_SOURCE_DIR, &model, &err))
        fail_msg("%s: %s", name, err.msg);
    return model;
}

/* State of a tier, or of all with tier < 0. */
static int64_t tier_state(const mz_model *model, const char *name, int tier) {
    const mz_optimizer optimizer = get(name);
    int64_t bytes = 0;
    for (int64_t i = 0; i < model->tensors; i++) {
        const mz_tensor *t = &model->tensor[i];
        if (tier < 0 || (int)t->tier == tier)
            bytes += t->count * mz_optimizer_state_bytes(&optimizer, t);
    }
    return bytes;
}

static void near(double value, double expected, double tolerance) {
    if (!(fabs(value - expected) <= tolerance))
        fail_msg("%.9g is not %.9g within %g", value, expected, tolerance);
}

/* Published: AdamW 50.54718 GiB = 8 bytes of each parameter, Lion half of it, SkewAdam 1.28597 GiB,
 * and so on, to 1e-5 GiB; the exact bytes follow from the study's table of components. */
static void published_states(void **state) {
    static const struct {
        const char *name;
        double gib;
        int64_t bytes; /* 0: not stated */
    } known[] = {
        {"adamw-bf16", 50.54718, 8 * 6784327680},
        {"adamw[master=none]", 50.54718, 8 * 6784327680},
        {"lion", 25.27359, 4 * 6784327680},
        {"muon[state=tabulated]", 25.27359, 4 * 6784327680},
        {"muon", 26.04718, 0},
        {"muon[state=coded]", 26.04718, 0},
        {"skewadam", 1.28597, 1380800000},
        {"skewadam[experts=momentum]", 25.28597, 1380800000 + 4 * 6442450944},
        {"skewadam[router=factored]", 1.28403, 0},
        {"skewadam[uniform]", 25.28599, 0},
        {"adafactor", 0.01240, 13309952},
        {"galore", 1.61603, 0},
        {"galore[rank=128,sides=two]", 1.61603, 0},
    };
    mz_model *model = load("skewadam-6.8b");
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        const int64_t bytes = tier_state(model, known[i].name, -1);
        near((double)bytes / GIB, known[i].gib, 1e-5);
        if (known[i].bytes)
            assert_int_equal(bytes, known[i].bytes);
    }
    near((double)tier_state(model, "skewadam", MZ_TIER_BACKBONE) / GIB, 1.27230, 1e-5);
    assert_int_equal(tier_state(model, "skewadam", MZ_TIER_EXPERT), 12 << 20);
    assert_int_equal(tier_state(model, "skewadam", MZ_TIER_ROUTER), 2 << 20);
    near(100 * (1 - (double)tier_state(model, "skewadam", -1) /
                        (double)tier_state(model, "adamw-bf16", -1)),
         97.46, 0.005);
    /* Master weights for all but the 565,248 fp32 parameters. */
    assert_int_equal(tier_state(model, "adamw", -1), 12 * 6784327680 - 4 * 565248);
    mz_model_free(&model);
}

/* Weights, gradients, state, the unfused update's temporaries, and one constant of the platform
 * (logits of the last micro-batch, library workspaces): the study's logged peaks. Lion's is the one
 * of step 1000; 0.518 GiB that came later are not the optimizer's. */
static void published_peaks(void **state) {
    static const double h200 = 164.38, mi300x = 252.38; /* MiB */
    static const struct {
        const char *name;
        double constant, gib;
    } known[] = {
        {"adamw-bf16", h200, 81.3564},
        {"muon", h200, 57.6240},
        {"lion", h200, 56.0829},
        {"skewadam", h200, 31.3281},
        {"galore", h200, 31.658},
        {"skewadam", mi300x, 31.414},
        {"skewadam[experts=momentum]", mi300x, 55.414},
        {"skewadam[router=factored]", mi300x, 31.411},
        {"skewadam[uniform]", mi300x, 55.414},
        {"adamw-bf16", mi300x, 81.4425},
        {"adafactor", mi300x, 28.6058},
    };
    mz_model *model = load("skewadam-6.8b");
    int64_t weights = 0;
    for (int tier = 0; tier <= MZ_TIER_SHARED; tier++)
        weights += mz_model_bytes(model, (mz_tier)tier);
    near((double)weights / GIB, 12.637848, 1e-6);
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        const mz_optimizer optimizer = get(known[i].name);
        int64_t temporary = 0;
        for (int64_t k = 0; k < model->tensors; k++) {
            const mz_tensor *t = &model->tensor[k];
            const mz_update_cost u =
                mz_optimizer_update(&optimizer, t, t->count, 1, MZ_TEMPORARIES_UNFUSED);
            temporary = u.temporary_bytes > temporary ? u.temporary_bytes : temporary;
        }
        const int64_t bytes = 2 * weights + tier_state(model, known[i].name, -1) + temporary;
        near((double)bytes / GIB + known[i].constant / 1024, known[i].gib, 0.002);
    }
    mz_model_free(&model);
}

/* Live fp32 copies of a bf16 matrix in an unfused update, as the study's code has them. */
static void temporaries_of_updates(void **state) {
    static const struct {
        const char *name;
        int bf16, fp32; /* copies for bf16 and for fp32 weights */
        bool factored;  /* two pairs of row and column vectors beside */
    } known[] = {
        {"adamw-bf16", 7, 2, false}, {"adamw", 3, 2, false},    {"skewadam", 6, 1, true},
        {"adafactor", 4, 2, true},   {"lion", 7, 2, false},     {"sgdm", 2, 0, false},
        {"galore", 6, 1, false},     {"adam8bit", 0, 0, false}, {"lion[master=fp32]", 3, 2, false},
    };
    mz_tensor big = {.rows = 8192, .cols = 4096, .count = 1, .trainable = true};
    const int64_t values = 8192 * 4096, chunk = 16 << 20;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        const mz_optimizer optimizer = get(known[i].name);
        const int64_t vectors = known[i].factored ? 2 * 4 * (8192 + 4096) : 0;
        for (int bytes = 2; bytes <= 4; bytes += 2) {
            const int copies = bytes == 2 ? known[i].bf16 : known[i].fp32;
            big.bytes_per_value = bytes;
            int64_t have[3];
            for (int how = 0; how < 3; how++)
                have[how] = mz_optimizer_update(&optimizer, &big, 1, 1, (mz_temporaries)how)
                                .temporary_bytes;
            if (optimizer.rule != MZ_RULE_GALORE) /* whose products leave something */
                assert_int_equal(have[MZ_TEMPORARIES_FUSED], 0);
            assert_int_equal(have[MZ_TEMPORARIES_UNFUSED], 4 * copies * values + vectors);
            assert_int_equal(have[MZ_TEMPORARIES_CHUNKED], 4 * copies * chunk + vectors);
        }
    }
    /* Muon: Adam's eight for tables; for matrices X and its successor in bf16, A, A^2 and B. */
    const mz_optimizer muon = get("muon");
    big.bytes_per_value = 2;
    big.role = MZ_ROLE_EMBEDDING;
    assert_int_equal(mz_optimizer_update(&muon, &big, 1, 1, MZ_TEMPORARIES_UNFUSED).temporary_bytes,
                     8 * 4 * values);
    big.role = MZ_ROLE_MAP;
    assert_int_equal(mz_optimizer_update(&muon, &big, 1, 1, MZ_TEMPORARIES_FUSED).temporary_bytes,
                     2 * 2 * values + 3 * 2 * 4096 * 4096);
    /* Stacked experts are one tensor: all that a part holds is alive at once. */
    big.stacked = true;
    big.count = 16;
    const mz_optimizer skew = get("skewadam");
    assert_int_equal(
        mz_optimizer_update(&skew, &big, 16, 4, MZ_TEMPORARIES_UNFUSED).temporary_bytes,
        4 * (6 * 4 * values + 2 * 4 * (8192 + 4096)));
}

static mz_tensor matrix(mz_tier tier, int32_t bytes) {
    return (mz_tensor){.rows = 30,
                       .cols = 50,
                       .count = 1,
                       .tier = tier,
                       .bytes_per_value = bytes,
                       .trainable = true};
}

static int64_t state_of(const char *name, mz_tensor tensor) {
    const mz_optimizer optimizer = get(name);
    return mz_optimizer_state_bytes(&optimizer, &tensor);
}

static double traffic_of(const char *name, mz_tensor tensor) {
    const mz_optimizer optimizer = get(name);
    return mz_optimizer_update(&optimizer, &tensor, 1, 1, MZ_TEMPORARIES_FUSED).traffic_bytes;
}

static void state_rules(void **state) {
    mz_tensor expert = matrix(MZ_TIER_EXPERT, 2), backbone = matrix(MZ_TIER_BACKBONE, 2);
    mz_tensor router = matrix(MZ_TIER_ROUTER, 4), bias = expert;
    bias.cols = 1;
    bias.vector = true;
    assert_int_equal(state_of("skewadam", expert), 4 * (30 + 50));
    assert_int_equal(state_of("skewadam", backbone), 4 * 1500 + 4 * (30 + 50));
    assert_int_equal(state_of("skewadam", router), 4 * 1500);
    assert_int_equal(state_of("skewadam", bias), 4 * 30);
    assert_int_equal(state_of("adafactor", router), 4 * (30 + 50));
    assert_int_equal(state_of("sgdm", expert), 4 * 1500);
    assert_int_equal(state_of("adamw", expert), 12 * 1500);
    assert_int_equal(state_of("adamw", router), 8 * 1500);
}

static void update_traffic(void **state) {
    mz_tensor expert = matrix(MZ_TIER_EXPERT, 2), router = matrix(MZ_TIER_ROUTER, 4);
    /* bf16: gradient 2, weights written 2, master and two moments read and written 24. */
    assert_true(traffic_of("adamw", expert) == 28.0 * 1500);
    /* fp32: gradient 4, weights 8, moments 16. */
    assert_true(traffic_of("adamw", router) == 28.0 * 1500);
    assert_true(traffic_of("adamw-bf16", expert) == 22.0 * 1500);
    assert_true(traffic_of("lion", expert) == 14.0 * 1500);
    /* gradient twice 4, weights 4, row and column means read and written 8 (n + m); three passes
     * read the gradient once more, one reads it once. */
    assert_true(traffic_of("skewadam", expert) == 8.0 * 1500 + 8 * 80);
    assert_true(traffic_of("adafactor", expert) == 8.0 * 1500 + 8 * 80);
    assert_true(traffic_of("skewadam[sweeps=3]", expert) == 10.0 * 1500 + 8 * 80);
    assert_true(traffic_of("skewadam[sweeps=1]", expert) == 6.0 * 1500 + 8 * 80);
    /* With momentum 14 at least; the second pass reads the momentum, three also read the gradient
     * twice. */
    mz_tensor backbone = matrix(MZ_TIER_BACKBONE, 2);
    assert_true(traffic_of("skewadam[sweeps=1]", backbone) == 14.0 * 1500 + 8 * 80);
    assert_true(traffic_of("skewadam", backbone) == 18.0 * 1500 + 8 * 80);
    assert_true(traffic_of("skewadam[sweeps=3]", backbone) == 20.0 * 1500 + 8 * 80);
    /* gradient and moment twice in, moment once out. */
    assert_true(traffic_of("skewadam", router) == (4 + 8 + 8 + 4 + 4.0) * 1500);
    /* A norm's weights: gradient once, both moments twice in and once out, weights in and out. */
    backbone.rows = 50;
    backbone.cols = 1;
    backbone.vector = true;
    assert_true(traffic_of("skewadam", backbone) == (2 + 4 * 6 + 4.0) * 50);
}

/* Tensors that Muon gives to Adam, 8-bit Adam keeps in fp32, GaLore projects on one side. */
static void rules_of_tensors(void **state) {
    mz_tensor map = matrix(MZ_TIER_EXPERT, 2), table = matrix(MZ_TIER_BACKBONE, 2);
    mz_tensor router = matrix(MZ_TIER_ROUTER, 4), wide = map, tall = map;
    table.role = MZ_ROLE_EMBEDDING;
    wide.cols = 500;
    tall.rows = 500;
    assert_int_equal(state_of("muon", map), 4 * 1500);
    assert_int_equal(state_of("muon", table), 8 * 1500);
    assert_int_equal(state_of("muon", router), 8 * 1500);
    assert_int_equal(state_of("muon[state=tabulated]", table), 4 * 1500);
    /* 15,000 values in 59 blocks of 256 or 8 of 2048, two moments; 1500 are too few. */
    assert_int_equal(state_of("adam8bit", wide), 2 * (15000 + 59 * 4));
    assert_int_equal(state_of("adam8bit[block=2048]", wide), 2 * (15000 + 8 * 4));
    assert_int_equal(state_of("adam8bit", map), 8 * 1500);
    table.rows = 300;
    assert_int_equal(state_of("adam8bit", table), 2 * (15000 + 59 * 4));
    assert_int_equal(state_of("adam8bit[embedding=fp32]", table), 8 * 15000);
    /* Many small slices are one tensor of enough values. */
    map.stacked = true;
    map.count = 3;
    assert_int_equal(state_of("adam8bit", map), 2 * (1500 + 6 * 4));
    /* rank 8: U and V and two 8 x 8 moments; P on the side of 30, moments 8 x 500. */
    assert_int_equal(state_of("galore[rank=8]", wide), 4 * (8 * 530 + 2 * 64));
    assert_int_equal(state_of("galore[rank=8,sides=one]", wide), 4 * (8 * 30 + 2 * 8 * 500));
    assert_int_equal(state_of("galore[rank=8,sides=one]", tall), 4 * (8 * 50 + 2 * 8 * 500));
    assert_int_equal(state_of("galore[rank=8,sides=one]", table), 8 * 15000);
    /* no rank above the smaller side */
    assert_int_equal(state_of("galore", wide), 4 * (30 * 530 + 2 * 900));
    mz_tensor shared = matrix(MZ_TIER_SHARED, 2);
    assert_int_equal(state_of("skewadam", shared), 4 * 1500 + 4 * 80);
    assert_int_equal(state_of("skewadam[shared=experts]", shared), 4 * 80);
    assert_int_equal(state_of("skewadam[router=momentum]", router), 4 * 1500 + 4 * 80);
    assert_int_equal(state_of("adamw[moments=bf16]", shared), 8 * 1500);
}

/* Products: Muon 4nnm + 2nnn an iteration with n the smaller side; GaLore down and up. */
static void products(void **state) {
    mz_tensor t = matrix(MZ_TIER_EXPERT, 2), router = matrix(MZ_TIER_ROUTER, 4);
    const double n = 30, m = 50, k = 8;
    const mz_optimizer muon = get("muon[iterations=3]"), galore = get("galore[rank=8]");
    const mz_optimizer one = get("galore[rank=8,sides=one]"), adamw = get("adamw");
    mz_update_cost u = mz_optimizer_update(&muon, &t, 7, 1, MZ_TEMPORARIES_FUSED);
    near(u.flops, 7 * 3 * (4 * n * n * m + 2 * n * n * n), 0);
    u = mz_optimizer_update(&muon, &router, 1, 1, MZ_TEMPORARIES_FUSED);
    near(u.flops, 0, 0);
    /* gradient, weights in and out, momentum in and out; X out and in; per iteration X in, A out;
     * A in, B out; B and X in, X out */
    u = mz_optimizer_update(&muon, &t, 1, 1, MZ_TEMPORARIES_FUSED);
    near(u.traffic_bytes,
         1500 * (2 + 4 + 8 + 4) + 3 * 2 * (n * m + n * n + n * n + n * n + n * n + n * m + n * m),
         0);
    /* A matrix that two ranks share: each does all products, half of the rest. */
    const double iterations = 3 * 2 * (3 * n * m + 4 * n * n);
    for (int how = 0; how < 3; how++) {
        const double alone =
            mz_optimizer_update(&muon, &t, 1, 1, (mz_temporaries)how).traffic_bytes;
        u = mz_optimizer_update(&muon, &t, 1, 2, (mz_temporaries)how);
        near(u.traffic_bytes, (alone - iterations) / 2 + iterations, 1e-6);
    }
    /* U'g, (U'g)V, and back */
    u = mz_optimizer_update(&galore, &t, 1, 1, MZ_TEMPORARIES_FUSED);
    near(u.flops, 2 * k * n * m + 2 * k * m * k + 2 * n * k * k + 2 * n * k * m, 0);
    u = mz_optimizer_update(&one, &t, 1, 1, MZ_TEMPORARIES_FUSED);
    near(u.flops, 4 * k * n * m, 0);
    u = mz_optimizer_update(&adamw, &t, 1, 1, MZ_TEMPORARIES_FUSED);
    near(u.flops, 0, 0);
}

/* Cuts copies laid end to end in equal pieces, by brute force: the most copies that a piece
 * touches, and the most that it shares. */
static void cut(int copies, int parts, int *touched, int *shared) {
    *touched = *shared = 0;
    for (int k = 0; k < parts; k++) {
        int here = 0, broken = 0;
        for (int j = 0; j < copies; j++) { /* in units of 1/parts of a copy */
            int from = j * parts, to = from + parts, low = k * copies, high = low + copies;
            if (to <= low || from >= high)
                continue;
            here++;
            broken += from < low || to > high;
        }
        *touched = here > *touched ? here : *touched;
        *shared = broken > *shared ? broken : *shared;
    }
}

static int64_t ceil_of(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

static void parts_of_matrices(void **state) {
    mz_tensor t = matrix(MZ_TIER_EXPERT, 2);
    const mz_optimizer factored = get("adafactor"), muon = get("muon"), adamw = get("adamw");
    const mz_optimizer galore = get("galore[rank=8]");
    for (int copies = 1; copies <= 13; copies++)
        for (int parts = 1; parts <= 13; parts++) {
            int touched, shared;
            cut(copies, parts, &touched, &shared);
            mz_update_cost u =
                mz_optimizer_update(&factored, &t, copies, parts, MZ_TEMPORARIES_FUSED);
            assert_int_equal(u.values, ceil_of(1500 * copies, parts));
            assert_int_equal(u.state_bytes, 4 * ceil_of(30 * copies, parts) + 4 * 50 * touched);
            assert_int_equal(u.replicated_bytes, 4 * 50 * shared);
            assert_true(u.exchange_bytes == 4 * 50 * shared);
            u = mz_optimizer_update(&adamw, &t, copies, parts, MZ_TEMPORARIES_UNFUSED);
            assert_int_equal(u.state_bytes, ceil_of(12 * 1500 * copies, parts));
            assert_int_equal(u.replicated_bytes, 0);
            /* Ranks times shards are the unsharded total, but for rounding up. */
            assert_true(u.state_bytes * parts - 12 * 1500 * copies < parts);
            assert_int_equal(u.temporary_bytes, 3 * 4 * (u.values < 1500 ? u.values : 1500));
            /* Every part that holds some of a matrix orthogonalises all of it. */
            u = mz_optimizer_update(&muon, &t, copies, parts, MZ_TEMPORARIES_FUSED);
            near(u.flops, touched * 5 * (4.0 * 900 * 50 + 2.0 * 27000), 0);
            assert_int_equal(u.state_bytes, ceil_of(4 * 1500 * copies, parts));
            near(u.exchange_bytes, 2.0 * (double)(1500 * touched - u.values), 0);
            u = mz_optimizer_update(&galore, &t, copies, parts, MZ_TEMPORARIES_FUSED);
            assert_int_equal(u.state_bytes,
                             4 * 8 * ceil_of(30 * copies, parts) + (4 * 8 * 50 + 8 * 64) * touched);
        }
}

/* Seeded random tensors: state of all parts is at least the whole, at most the whole and what is
 * replicated; more parts never hold more each; every number is finite and not negative. */
static void properties_of_parts(void **state) {
    int count;
    const mz_optimizer *const *table = mz_optimizers(&count);
    for (uint64_t trial = 0; trial < 400; trial++) {
        mz_rng rng = mz_rng_make(11, trial);
        mz_tensor t = {.rows = 1 + (int64_t)mz_rng_below(&rng, 9000),
                       .cols = 1 + (int64_t)mz_rng_below(&rng, 9000),
                       .count = 1 + (int64_t)mz_rng_below(&rng, 64),
                       .tier = (mz_tier)mz_rng_below(&rng, 4),
                       .bytes_per_value = mz_rng_below(&rng, 2) ? 2 : 4,
                       .stacked = mz_rng_below(&rng, 4) == 0,
                       .role = (mz_role)mz_rng_below(&rng, 3),
                       .trainable = true};
        t.vector = mz_rng_below(&rng, 4) == 0;
        if (t.vector)
            t.cols = 1;
        for (int i = 0; i < count; i++) {
            const int64_t whole = t.count * mz_optimizer_state_bytes(table[i], &t);
            int64_t last = whole;
            for (int64_t parts = 1; parts <= 256; parts *= 2) {
                const mz_update_cost u =
                    mz_optimizer_update(table[i], &t, t.count, parts, MZ_TEMPORARIES_UNFUSED);
                assert_true(u.state_bytes * parts >= whole);
                assert_true(u.state_bytes <= last);
                assert_true(u.replicated_bytes >= 0 && u.replicated_bytes <= u.state_bytes);
                assert_true(u.traffic_bytes > 0 && u.flops >= 0 && u.exchange_bytes >= 0);
                assert_true(u.temporary_bytes >= 0);
                last = u.state_bytes;
            }
            /* SYMI and LAER cut every copy alone: what divides does not change. */
            const mz_update_cost each =
                mz_optimizer_update(table[i], &t, 1, 16, MZ_TEMPORARIES_FUSED);
            assert_true(t.count * each.state_bytes * 16 >= whole);
        }
    }
}

static void nothing_for_what_is_not_trained(void **state) {
    int count;
    const mz_optimizer *const *table = mz_optimizers(&count);
    mz_tensor frozen = matrix(MZ_TIER_BACKBONE, 4);
    frozen.trainable = false;
    assert_true(count >= 9);
    for (int i = 0; i < count; i++) {
        const mz_update_cost u =
            mz_optimizer_update(table[i], &frozen, 1, 1, MZ_TEMPORARIES_UNFUSED);
        assert_int_equal(u.state_bytes, 0);
        assert_true(u.traffic_bytes == 0);
        assert_int_equal(u.temporary_bytes, 0);
    }
}

/* The table holds the options that parsing the bare name gives. */
static void defaults(void **state) {
    int count;
    const mz_optimizer *const *table = mz_optimizers(&count);
    for (int i = 0; i < count; i++) {
        const mz_optimizer parsed = get(table[i]->name);
        assert_string_equal(parsed.name, table[i]->name);
        assert_int_equal(parsed.rule, table[i]->rule);
        assert_memory_equal(&parsed.options, &table[i]->options, sizeof parsed.options);
    }
}

static void refuses(const char *text, const char *word) {
    mz_optimizer optimizer;
    mz_err err = {0};
    assert_fails(mz_optimizer_parse(text, &optimizer, &err), MZ_EINPUT, word, &err);
}

static void bad_names_and_options(void **state) {
    refuses("adam", "adamw");
    refuses("zebra", "skewadam");
    refuses("", "known are");
    refuses("galore[rank=0]", "rank");
    refuses("galore[rnk=8]", "rank");
    refuses("lion[rank=8]", "lion");
    refuses("muon[state=x]", "coded");
    refuses("muon[state=coded", "name[key=value");
    refuses("muon]", "without '['");
    refuses("adamw[master=fp32,]", "comma");
    refuses("skewadam[experts=momentum,experts=momentum,experts=momentum,experts=momentum,"
            "experts=momentum,experts=momentum]",
            "longer");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_states),
        cmocka_unit_test(published_peaks),
        cmocka_unit_test(temporaries_of_updates),
        cmocka_unit_test(state_rules),
        cmocka_unit_test(update_traffic),
        cmocka_unit_test(rules_of_tensors),
        cmocka_unit_test(products),
        cmocka_unit_test(parts_of_matrices),
        cmocka_unit_test(properties_of_parts),
        cmocka_unit_test(nothing_for_what_is_not_trained),
        cmocka_unit_test(defaults),
        cmocka_unit_test(bad_names_and_options),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
