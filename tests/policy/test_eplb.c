/* EPLB: the vectors of balancing-systems.md 10.3, the sweep of 9.6, history, movement, shapes. */
#include "fixture.h"
#include "sim/policy/eplb.h"
#include "sweep.h"

/* Slots of the planner itself. */
static void solve(int32_t ranks, int32_t experts, int32_t each, int32_t domain_size, int32_t groups,
                  const int64_t *total, int32_t *slot) {
    rig r;
    mz_eplb *planner;
    int32_t *room = calloc((size_t)ranks, sizeof *room);
    for (int32_t i = 0; i < ranks; i++)
        room[i] = each;
    rig_prepare(&r, ranks, experts, domain_size);
    assert_int_equal(mz_eplb_create(&r.arena, &r.env, groups, room, &planner, &r.err), MZ_OK);
    assert_int_equal(mz_eplb_solve(planner, total, slot, &r.err), MZ_OK);
    free(room);
    rig_close(&r);
}

static const int64_t first_layer[12] = {90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86};
static const int64_t second_layer[12] = {20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27};

static void published_vectors(void **unused) {
    static const int32_t first[16] = {5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1};
    static const int32_t second[16] = {7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1};
    static const int32_t global[16] = {10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1};
    int32_t slot[16];
    solve(8, 12, 2, 4, 4, first_layer, slot);
    assert_memory_equal(slot, first, sizeof slot);
    solve(8, 12, 2, 4, 4, second_layer, slot);
    assert_memory_equal(slot, second, sizeof slot);
    solve(8, 12, 2, 4, 0, first_layer, slot);
    assert_memory_equal(slot, global, sizeof slot);
}

/* One slot per rank and one expert per slot: the identity, whatever the loads. */
static void one_slot_each_is_the_identity(void **unused) {
    int32_t slot[12];
    solve(12, 12, 1, 0, 0, first_layer, slot);
    for (int32_t i = 0; i < 12; i++)
        assert_int_equal(slot[i], i);
}

/* Nodes that are not blocks of ranks: the slots follow the node's own ranks. */
static void nodes_need_not_be_blocks(void **unused) {
    rig r;
    mz_load *load = load_even(8, 12, first_layer);
    rig_prepare(&r, 8, 12, 4);
    for (int32_t i = 0; i < 8; i++)
        r.domain[i] = i % 2;
    r.env.expert_groups = 4;
    assert_int_equal(rig_start(&r, "eplb[slots=2]"), MZ_OK);
    rig_call(&r, load, load, NULL, NULL);
    /* Experts of node 0 are those of slots 0-7 of the vector. */
    static const int32_t node[12] = {1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1};
    for (int32_t e = 0; e < 12; e++)
        for (int32_t i = r.plan->begin[e]; i < r.plan->begin[e + 1]; i++)
            assert_int_equal(r.domain[r.plan->rank[i]], node[e]);
    rig_close(&r);
    load_free(load);
}

/* 9.6: EPLB on a history of exponent 1.3; random draws differ from the table's. */
static void slot_sweep(void **unused) {
    static const double table[2][4] = {{1.06, 1.06, 1.05, 1.02}, {2.95, 2.88, 2.84, 2.87}};
    mz_load *load = sweep_load(1.5, SWEEP_PLACE, 1);
    mz_load *history = sweep_load(1.3, SWEEP_PLACE, 2);
    for (int extra = 1; extra <= 4; extra++)
        for (int hierarchy = 0; hierarchy < 2; hierarchy++) {
            char text[64];
            rig r;
            snprintf(text, sizeof text, "eplb[slots=%d,mode=%s,groups=4]", 20 + extra,
                     hierarchy ? "hierarchical" : "global");
            rig_open(&r, text, SWEEP_RANKS, SWEEP_EXPERTS, SWEEP_NODE);
            rig_call(&r, load, history, NULL, NULL);
            const double want = table[hierarchy][extra - 1];
            print_message("%s: %.3f (table %.2f)\n", text, sweep_imbalance(r.plan, load), want);
            assert_true(fabs(sweep_imbalance(r.plan, load) - want) < (hierarchy ? 0.08 : 0.03));
            rig_close(&r);
        }
    load_free(load);
    load_free(history);
}

/* Slots for experts 0..3 with loads 6 1 1 1 on 3 ranks of 2: 6 -> 3 3 -> 2 2 2. Packed by weight:
 * copies of expert 0 on ranks 0, 1, 2, then experts 1, 2, 3. */
static void small_case_by_hand(void **unused) {
    static const int64_t total[4] = {6, 1, 1, 1};
    static const int32_t want[6] = {0, 1, 0, 2, 0, 3};
    int32_t slot[6];
    solve(3, 4, 2, 0, 0, total, slot);
    assert_memory_equal(slot, want, sizeof slot);
}

static void before_history_slots_lie_in_order(void **unused) {
    rig r;
    mz_load *load = load_random(LOAD_RANDOM, 3, 4, 1);
    rig_open(&r, "eplb[slots=2]", 3, 4, 0);
    assert_int_equal(r.traits.interval, 3);
    assert_int_equal(r.traits.window, 3);
    assert_int_equal(r.traits.lag, 1);
    assert_true(r.traits.replica_optimizer && r.traits.sees == MZ_SEES_HISTORY);
    rig_call(&r, load, NULL, NULL, NULL);
    static const int32_t begin[5] = {0, 2, 4, 5, 6}, rank[6] = {0, 2, 0, 2, 1, 1};
    assert_memory_equal(r.plan->begin, begin, sizeof begin);
    assert_memory_equal(r.plan->rank, rank, sizeof rank);
    rig_close(&r);
    load_free(load);
}

static int64_t sum_moves(const mz_plan *plan, mz_move_phase phase, bool change, int32_t *count) {
    int64_t bytes = 0;
    *count = 0;
    for (int32_t i = 0; i < plan->moves; i++)
        if (plan->move[i].phase == phase && plan->move[i].change == change) {
            bytes += plan->move[i].bytes;
            ++*count;
        }
    return bytes;
}

/* Experts 0..3 start on {0,2} {0,2} {1} {1}; then 0 on {0,1,2}, 1 on 0, 2 on 1, 3 on 2: expert 0
 * reaches rank 1 and expert 3 rank 2. The ring of expert 0 has 3 hosts: 3 moves of 4/3 W. */
static void movement(void **unused) {
    static const int64_t total[4] = {6, 1, 1, 1};
    rig r;
    int32_t count;
    mz_load *load = load_even(3, 4, total);
    rig_open(&r, "eplb[slots=2]", 3, 4, 0);
    const int64_t W = r.env.weight_bytes, parameters = r.env.expert_parameters;
    rig_call(&r, load, NULL, NULL, NULL);
    assert_int_equal(sum_moves(r.plan, MZ_MOVE_STEP, true, &count), 0);
    assert_int_equal(sum_moves(r.plan, MZ_MOVE_REDUCE_STEP, false, &count), 4 * W);
    rig_call(&r, load, load, NULL, NULL);
    assert_int_equal(sum_moves(r.plan, MZ_MOVE_STEP, true, &count), 2 * 18 * parameters);
    assert_int_equal(count, 2);
    assert_int_equal(r.plan->move[0].expert, 0);
    assert_int_equal(r.plan->move[0].src, 0);
    assert_int_equal(r.plan->move[0].dst, 1);
    assert_int_equal(r.plan->move[1].expert, 3);
    assert_int_equal(r.plan->move[1].src, 1);
    assert_int_equal(r.plan->move[1].dst, 2);
    assert_int_equal(sum_moves(r.plan, MZ_MOVE_REDUCE_STEP, false, &count), 3 * (4 * W / 3));
    assert_int_equal(count, 3);
    /* Further micro-batches of the step keep the placement and move nothing more. */
    r.micro_batch = 1;
    rig_call(&r, load, NULL, NULL, NULL);
    assert_int_equal(sum_moves(r.plan, MZ_MOVE_STEP, true, &count), 0);
    assert_int_equal(sum_moves(r.plan, MZ_MOVE_REDUCE_STEP, false, &count), 3 * (4 * W / 3));
    rig_close(&r);
    load_free(load);
}

/* lag=0: exact counts at every call, weights alone, before the products. */
static void exact_counts(void **unused) {
    static const int64_t total[4] = {6, 1, 1, 1}, other[4] = {1, 1, 6, 1};
    rig r;
    int32_t count;
    mz_load *load = load_even(3, 4, total), *next = load_even(3, 4, other);
    rig_open(&r, "eplb[slots=2,lag=0]", 3, 4, 0);
    assert_true(r.traits.sees == MZ_SEES_CURRENT && r.traits.interval == 1);
    assert_false(r.traits.replica_optimizer);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_int_equal(r.plan->peak_forward, 3);
    r.micro_batch = 1;
    rig_call(&r, next, NULL, NULL, NULL);
    assert_int_equal(r.plan->peak_forward, 3);
    const int64_t bytes = sum_moves(r.plan, MZ_MOVE_FORWARD, true, &count);
    assert_true(count > 0);
    assert_int_equal(bytes, count * r.env.weight_bytes);
    rig_close(&r);
    load_free(load);
    load_free(next);
}

/* Every slot is used, every expert has one, no rank more than its slots (mz_plan_check). */
static void awkward_shapes(void **unused) {
    static const int32_t shapes[][4] = {{1, 1, 0, 0},      {1, 5, 0, 7},  {5, 13, 2, 0},
                                        {7, 3, 0, 4},      {13, 5, 4, 1}, {3, 2, 0, 5},
                                        {1024, 256, 8, 2}, {6, 12, 3, 0}, {4, 6, 2, 2}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int kind = 0; kind < LOAD_KINDS; kind++)
            for (int lag = 0; lag < 2; lag++) {
                const int32_t ranks = shapes[s][0], experts = shapes[s][1];
                if (ranks > 100 && kind != LOAD_ZIPF)
                    continue;
                char text[64];
                rig r;
                mz_load *load = load_random(kind, ranks, experts, 3);
                snprintf(text, sizeof text, "eplb[slots=%d,lag=%d,groups=%d]", shapes[s][3], lag,
                         experts % 6 == 0 ? 6 : 0);
                rig_open(&r, text, ranks, experts, shapes[s][2]);
                rig_call(&r, load, load, NULL, NULL);
                assert_int_equal(r.plan->begin[experts], r.traits.slots * ranks);
                rig_close(&r);
                load_free(load);
            }
}

/* A history without load counts as equal load: replicas are even to one. */
static void idle_history(void **unused) {
    rig r;
    mz_load *load = load_random(LOAD_RANDOM, 4, 7, 1), *idle = load_random(LOAD_NOTHING, 4, 7, 1);
    rig_open(&r, "eplb[slots=4]", 4, 7, 0);
    rig_call(&r, load, idle, NULL, NULL);
    for (int32_t e = 0; e < 7; e++)
        assert_in_range(r.plan->begin[e + 1] - r.plan->begin[e], 2, 3);
    rig_close(&r);
    load_free(load);
    load_free(idle);
}

static void refusals(void **unused) {
    static const struct {
        const char *text, *part;
    } bad[] = {{"eplb[mode=hierarchical,groups=3]", "multiple of their number"},
               {"eplb[groups=5]", "does not divide the 12 experts"},
               {"eplb[slots=1]", "too few for 12 experts on 8 ranks"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        rig r;
        assert_int_equal(rig_try(&r, bad[i].text, 8, 12, 4), MZ_EINPUT);
        assert_non_null(strstr(r.err.msg, bad[i].part));
        rig_close(&r);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_vectors),
        cmocka_unit_test(one_slot_each_is_the_identity),
        cmocka_unit_test(nodes_need_not_be_blocks),
        cmocka_unit_test(slot_sweep),
        cmocka_unit_test(small_case_by_hand),
        cmocka_unit_test(before_history_slots_lie_in_order),
        cmocka_unit_test(movement),
        cmocka_unit_test(exact_counts),
        cmocka_unit_test(awkward_shapes),
        cmocka_unit_test(idle_history),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
