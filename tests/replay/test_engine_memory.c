/* Bytes that the engine takes, against the list of buffers of replay/README.md added up by hand.
 * The experts are those of fake_experts.c, which take nothing. */
#include "replay/heap.h"
#include "tests/harness.h"
#include "tests/replay/scene.h"

/* One rank in one layer. */
typedef struct rank_sizes {
    int64_t tokens, pairs, groups;
    int64_t rows, sent, back_rows, back_sent, again_rows, again_sent, back_segments;
    int64_t listed, segments, pad; /* pairs not dropped; runs of them; places of padded rows */
    int64_t counts;                /* bytes of begins and counts of the experts */
    int64_t of_score;              /* bytes of norms per token */
    bool lossy, saved, stay, norms, by_weight;
} rank_sizes;

typedef struct widths {
    int64_t row, gate_up, act;
} widths;

static void forward_sizes(const scene *s, int32_t l, int32_t rank, rank_sizes *z) {
    const mz_plan *plan = s->at[l].plan;
    for (int32_t i = 0; i < plan->begin[plan->experts]; i++) {
        z->groups += plan->rank[i] == rank;
        for (int64_t k = plan->entry_begin[i]; k < plan->entry_begin[i + 1]; k++) {
            z->rows += plan->rank[i] == rank ? plan->entry_pairs[k] : 0;
            z->sent += plan->entry_source[k] == rank ? plan->entry_pairs[k] : 0;
            z->segments += plan->entry_source[k] == rank && plan->entry_pairs[k] > 0;
        }
    }
    z->listed = z->sent;
    if (!s->job.traits->capacity_padded)
        return;
    z->pad = mz_capacity_rows(s->job.traits, s->load[l], rank);
    for (int32_t e = 0; e < plan->experts; e++) {
        const int64_t cell = (int64_t)rank * plan->experts + e;
        z->segments += s->load[l]->count[cell] < z->pad;
    }
    z->rows = z->sent = 0; /* a full buffer of every source for every expert */
    for (int32_t e = 0; e < plan->experts; e++)
        for (int32_t r = 0; r < plan->ranks; r++) {
            const int64_t full = mz_capacity_rows(s->job.traits, s->load[l], r);
            z->rows += plan->rank[e] == rank ? full : 0;
            z->sent += r == rank ? full : 0;
        }
}

/* Kept pairs of a source that instance i computed in forward. */
static int64_t kept_here(const scene *s, int32_t l, int32_t source, int32_t i) {
    int64_t n = 0;
    for (int64_t p = s->pair_begin[source]; p < s->pair_begin[source + 1]; p++)
        n += s->at[l].kept[p] && scene_instance(s, l, source, p) == i;
    return n;
}

static void backward_sizes(const scene *s, int32_t l, int32_t rank, rank_sizes *z) {
    const mz_plan *plan = s->at[l].plan;
    for (int32_t i = 0; i < plan->begin[plan->experts]; i++)
        for (int64_t k = plan->back_begin[i]; k < plan->back_begin[i + 1]; k++) {
            const int32_t source = plan->back_source[k];
            const int64_t pairs = plan->back_pairs[k];
            const int64_t here = s->job.traits->resend ? 0 : kept_here(s, l, source, i);
            const int64_t again = pairs > here ? pairs - here : 0;
            z->back_rows += plan->rank[i] == rank ? pairs : 0;
            z->again_rows += plan->rank[i] == rank ? again : 0;
            z->back_sent += source == rank ? pairs : 0;
            z->back_segments += source == rank && pairs > 0;
            z->again_sent += source == rank ? again : 0;
        }
}

static rank_sizes sizes_of(const scene *s, int32_t l, int32_t rank) {
    const mz_policy_traits *t = s->job.traits;
    rank_sizes z = {.tokens = s->token_begin[rank + 1] - s->token_begin[rank],
                    .pairs = s->pair_begin[rank + 1] - s->pair_begin[rank],
                    .lossy = s->at[l].plan->has_backward};
    const bool ups = t->score_kind == MZ_SCORE_UP, none = t->score_kind == MZ_SCORE_W;
    z.counts = 8 * (2 * s->o.experts + 1);
    z.of_score = none ? 0 : ups ? 8 : 4;
    z.by_weight = t->drop_by_weight;
    z.saved = z.lossy && !t->resend;
    z.stay = !s->o.recompute && !(z.lossy && t->resend);
    z.norms = z.lossy && t->score_combine_bytes > 0;
    forward_sizes(s, l, rank, &z);
    z.back_rows = z.lossy ? 0 : z.rows;
    z.back_sent = z.lossy ? 0 : z.sent;
    if (z.lossy)
        backward_sizes(s, l, rank, &z);
    return z;
}

static void at_least(int64_t *most, int64_t bytes) {
    *most = bytes > *most ? bytes : *most;
}

static int64_t kept_from_forward(const rank_sizes *z, widths w) {
    return z->tokens * w.row + (z->stay ? z->rows * (w.row + w.gate_up + w.act) : 0) +
           (z->norms ? 4 * z->pairs : 0);
}

/* Pairs by expert, without the dropped ones, in order of the send buffer. */
static void list_peak(const rank_sizes *z, int64_t before, int64_t *most) {
    const int64_t list = 8 * (z->listed + z->pad), all = 8 * (z->pairs + z->pad);
    at_least(most, before + all + z->counts + 4 * z->pairs);
    if (z->listed < z->pairs)
        at_least(most,
                 before + all + list + z->counts + (z->by_weight && z->listed > 0 ? z->counts : 0));
    at_least(most, before + list + z->counts + 8 * z->sent + 24 * z->segments);
}

static void forward_peak(const rank_sizes *z, widths w, int64_t before, int64_t *most) {
    const int64_t start = before + z->tokens * w.row + 4 * z->pairs; /* x, weights */
    const int64_t place = start + 8 * z->pairs;                      /* position */
    const int64_t saved = z->rows * (w.row + w.gate_up + w.act), norms = z->norms ? 4 : 0;
    list_peak(z, start, most);
    at_least(most, place + z->sent * (8 + w.row));
    at_least(most, place + (z->sent + z->rows) * w.row);
    at_least(most, place + saved + z->rows * (w.row + norms) + 8 * (z->groups + 1));
    const int64_t left = place + (z->stay ? saved : 0);
    at_least(most, left + (z->rows + z->sent) * (w.row + norms));
    at_least(most, left + z->sent * (w.row + norms) + z->tokens * w.row + norms * z->pairs);
}

/* Scores, the order of kept pairs, pack; `base` holds the gate weights. */
static void choice_peak(const rank_sizes *z, widths w, int64_t base, int64_t *most) {
    const int64_t sent = z->back_sent + z->again_sent;
    if (!z->lossy) {
        list_peak(z, base, most);
        at_least(most, base + 8 * z->pairs + sent * (8 + w.row));
        return;
    }
    const int64_t chosen = base + 12 * z->pairs, list = 8 * z->pairs;
    at_least(most, chosen + list + z->counts + 4 * z->pairs);
    at_least(most, chosen + list + 2 * z->counts + z->of_score * z->tokens);
    const int64_t order = z->saved ? 8 * (sent + z->back_sent) : 8 * z->back_sent;
    at_least(most, chosen + order + (z->saved ? list : 24 * z->back_segments));
    at_least(most, chosen + order + sent * w.row);
}

static void backward_peak(const rank_sizes *z, widths w, int64_t before, int64_t *most) {
    const int64_t base = before + 2 * z->tokens * w.row, place = z->lossy ? 12 : 8;
    const int64_t saved = z->rows * (w.row + w.gate_up + w.act);
    const bool repeated = !z->stay && !(z->lossy && !z->saved);
    if (repeated) {
        const int64_t start = base + 4 * z->pairs;
        list_peak(z, start, most);
        at_least(most, start + z->sent * (8 + w.row));
        at_least(most, start + (z->sent + z->rows) * w.row);
        at_least(most, start + saved + 8 * (z->groups + 1));
    }
    const int64_t held = base + (repeated ? saved : 0), places = z->saved ? 8 : 0;
    choice_peak(z, w, held + 4 * z->pairs, most);
    const int64_t rows = held + place * z->pairs;
    at_least(most, rows + (z->back_sent + z->again_sent) * w.row + places * z->back_sent +
                       (z->again_rows + z->back_rows) * w.row + places * z->back_rows);
    at_least(most, rows + (z->again_rows + z->back_rows) * w.row + places * z->back_rows +
                       z->again_rows * (w.gate_up + w.act) +
                       z->back_rows * (w.act + w.gate_up + w.row + 4) +
                       8 * (z->groups + 1) * (z->lossy ? 2 : 1));
    const int64_t gone = z->lossy && !z->saved ? 0 : saved;
    at_least(most, rows - gone + (z->back_rows + z->back_sent) * (w.row + 4));
}

static int64_t peak_of(const scene *s, int32_t rank) {
    const int64_t b = s->o.type == MZ_BF16 ? 2 : 4;
    const widths w = {s->o.hidden * b, 2 * s->o.intermediate * b, s->o.intermediate * b};
    int64_t most = 0, held = 0;
    for (int32_t l = 0; l < SCENE_LAYERS; l++) {
        const rank_sizes z = sizes_of(s, l, rank);
        forward_peak(&z, w, held, &most);
        held += kept_from_forward(&z, w);
        backward_peak(&z, w, held, &most);
    }
    return most;
}

static void check(const char *policy, mz_dtype type, bool recompute, uint64_t seed) {
    scene s;
    machine m;
    scene_options o = scene_usual(policy, type);
    o.hidden = 96;
    o.intermediate = 56;
    o.recompute = recompute;
    scene_open(&s, &o, seed);
    machine_open(&m, &s, 1);
    machine_engine(&m, &s);
    scene_watcher watcher = {&s, m.kernels};
    mz_engine_set_watch(m.engine, scene_watch, &watcher);
    /* With other blocks idle than in the first step the second may get some more; what it leaves
     * goes when the third begins, and from then on nothing comes or goes. */
    enum { STEPS = 4 };
    for (int step = 0; step < STEPS; step++) {
        const int64_t reserved = mz_heap_reserved(m.heap);
        assert_ok(scene_run(&s, m.engine, &m.err), &m.err);
        assert_true(step < 3 || mz_heap_reserved(m.heap) == reserved);
        for (int32_t r = 0; r < o.ranks; r++) {
            if (mz_heap_of(m.heap, r)->peak != peak_of(&s, r))
                fail_msg("%s: rank %d: %lld bytes at most, %lld by hand", policy, r,
                         (long long)mz_heap_of(m.heap, r)->peak, (long long)peak_of(&s, r));
            assert_int_equal(mz_heap_of(m.heap, r)->total, 0);
        }
    }
    machine_close(&m);
    scene_close(&s);
}

static const char *const policies[] = {"static",
                                       "ultraep[slots=4,u_min=1]",
                                       "lrmoe[keep=1]",
                                       "lrmoe[keep=0.5]",
                                       "lrmoe[keep=0.5,activations=resend]",
                                       "lrmoe[keep=0.25,activations=resend,score=w]",
                                       "lrmoe[keep=0.3,placement=static]",
                                       "capacity[cf=0.8]",
                                       "symi"};

static void peaks_by_hand(void **state) {
    for (int i = 0; i < COUNT_OF(policies); i++) {
        check(policies[i], MZ_BF16, false, (uint64_t)(1 + i));
        check(policies[i], MZ_F32, false, (uint64_t)(20 + i));
    }
}

static void peaks_with_recomputation(void **state) {
    for (int i = 0; i < COUNT_OF(policies); i++)
        check(policies[i], MZ_BF16, true, (uint64_t)(40 + i));
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(peaks_by_hand),
                                       cmocka_unit_test(peaks_with_recomputation)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
