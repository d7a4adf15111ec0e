/* Shared parts of lasting placements: packing, replica counts, remembered hosts, rings. */
#include "fixture.h"

/* Sets the hosts of a plan: lists of ranks per expert, -1 ends one. */
static void set_hosts(mz_plan *plan, const int32_t *list) {
    mz_plan_reset(plan);
    for (int32_t e = 0, at = 0; e < plan->experts; e++, list++) {
        for (; *list >= 0; list++)
            plan->rank[at++] = *list;
        plan->begin[e + 1] = at;
    }
}

static void changes_are_moved_from_the_nearest_host(void **unused) {
    static const int32_t before[] = {0, 3, -1, 1, -1, 2, 2, -1, -1};
    static const int32_t after[] = {3, 2, 1, -1, 1, 1, -1, 0, 0, -1, 3, -1};
    static const int32_t want[][3] = {{0, 3, 2}, {0, 0, 1}, {2, 2, 0}};
    rig r;
    mz_placement *placement;
    const int32_t *begin;
    int32_t moved;
    rig_open(&r, "symi[slots=3]", 4, 4, 2);
    assert_int_equal(mz_placement_create(&r.arena, &r.env, 3, &placement, &r.err), MZ_OK);
    assert_null(mz_placement_hosts(placement, 1, &begin));
    assert_false(mz_placement_restore(placement, 1, r.plan));
    set_hosts(r.plan, before);
    assert_int_equal(mz_placement_change(placement, 1, 10, 3, MZ_MOVE_STEP, MZ_HIDE_NOTHING, r.plan,
                                         &moved, &r.err),
                     MZ_OK);
    assert_int_equal(moved + r.plan->moves, 0);
    set_hosts(r.plan, after);
    assert_int_equal(mz_placement_change(placement, 1, 10, 3, MZ_MOVE_STEP, MZ_HIDE_LAYERS, r.plan,
                                         &moved, &r.err),
                     MZ_OK);
    /* Expert 0 to ranks 2 (from 3, same domain) and 1 (from 0); expert 1 stays; expert 2 to 0 from
     * 2; expert 3 had no host: nothing to copy. */
    assert_int_equal(moved, 3);
    assert_int_equal(r.plan->moves, 3);
    for (int i = 0; i < 3; i++) {
        const mz_move *m = &r.plan->move[i];
        assert_int_equal(m->expert, want[i][0]);
        assert_int_equal(m->src, want[i][1]);
        assert_int_equal(m->dst, want[i][2]);
        assert_int_equal(m->bytes, 13);
        assert_true(m->change && m->phase == MZ_MOVE_STEP && m->hide == MZ_HIDE_LAYERS);
    }
    mz_plan_reset(r.plan);
    assert_true(mz_placement_restore(placement, 1, r.plan));
    assert_int_equal(r.plan->begin[4], 8);
    assert_int_equal(r.plan->rank[1], 2);
    assert_int_equal(r.plan->target[1], -1);
    assert_null(mz_placement_hosts(placement, 0, &begin));
    rig_close(&r);
}

static void too_many_instances(void **unused) {
    static const int32_t many[] = {0, 1, 2, 3, -1, 0, 1, 2, 3, -1, -1, 0, -1};
    rig r;
    mz_placement *placement;
    int32_t moved;
    rig_open(&r, "symi[slots=3]", 4, 4, 2);
    assert_int_equal(mz_placement_create(&r.arena, &r.env, 2, &placement, &r.err), MZ_OK);
    set_hosts(r.plan, many);
    assert_int_equal(mz_placement_change(placement, 0, 1, 1, MZ_MOVE_STEP, MZ_HIDE_NOTHING, r.plan,
                                         &moved, &r.err),
                     MZ_EINTERNAL);
    rig_close(&r);
}

/* Hosts 3 0 3 1: a ring 0 -> 1 -> 3 -> 0 of 2 * 2/3 of the buffer; one host, or one rank twice: no
 * ring. */
static void rings(void **unused) {
    static const int32_t list[] = {3, 0, 3, 1, -1, 2, -1, 2, 2, -1, 1, 0, -1};
    static const int32_t want[][3] = {{0, 0, 1}, {0, 1, 3}, {0, 3, 0}, {3, 0, 1}, {3, 1, 0}};
    rig r;
    rig_open(&r, "symi[slots=3]", 4, 4, 2);
    set_hosts(r.plan, list);
    assert_int_equal(mz_plan_ring_moves(r.plan, 300, MZ_MOVE_REDUCE_STEP, MZ_HIDE_LAYERS, &r.err),
                     MZ_OK);
    assert_int_equal(r.plan->moves, 5);
    for (int i = 0; i < 5; i++) {
        const mz_move *m = &r.plan->move[i];
        assert_int_equal(m->expert, want[i][0]);
        assert_int_equal(m->src, want[i][1]);
        assert_int_equal(m->dst, want[i][2]);
        assert_int_equal(m->bytes, want[i][0] == 0 ? 400 : 300);
        assert_true(m->kind == MZ_MOVE_GRADIENTS && m->phase == MZ_MOVE_REDUCE_STEP && !m->change);
    }
    rig_close(&r);
}

/* The definition, step by step: heaviest item left (lowest index), lightest bin with room. */
static void slow_lpt(const double *weight, int32_t items, const int32_t *room, double *load,
                     int32_t bins, int32_t *bin) {
    int32_t taken[64] = {0};
    bool done[128] = {false};
    for (int32_t k = 0; k < items; k++) {
        int32_t i = -1, b = -1;
        for (int32_t j = 0; j < items; j++)
            if (!done[j] && (i < 0 || weight[j] > weight[i]))
                i = j;
        for (int32_t j = 0; j < bins; j++)
            if (taken[j] < room[j] && (b < 0 || load[j] < load[b]))
                b = j;
        done[i] = true;
        bin[i] = b;
        taken[b]++;
        load[b] += weight[i];
    }
}

static void packing_follows_its_definition(void **unused) {
    mz_arena arena = {0};
    mz_err err;
    mz_pack *pack;
    mz_rng rng = mz_rng_make(1, 1);
    assert_int_equal(mz_pack_create(&arena, 128, 64, &pack, &err), MZ_OK);
    for (int round = 0; round < 300; round++) {
        const int32_t bins = 1 + (int32_t)mz_rng_below(&rng, 20);
        double weight[128], load[64], slow[64];
        int32_t room[64], bin[128], place[128], want[128], places = 0, held[64] = {0};
        for (int32_t b = 0; b < bins; b++) {
            load[b] = slow[b] = round % 3 == 0 ? (double)mz_rng_below(&rng, 10) : 0;
            room[b] = (int32_t)mz_rng_below(&rng, 6);
            places += room[b];
        }
        const int32_t items = places > 0 ? (int32_t)mz_rng_below(&rng, (uint64_t)places + 1) : 0;
        for (int32_t i = 0; i < items; i++)
            weight[i] = (double)mz_rng_below(&rng, 8);
        slow_lpt(weight, items, room, slow, bins, want);
        assert_int_equal(mz_pack_lpt(pack, weight, items, room, load, bins, bin, place, &err),
                         MZ_OK);
        for (int32_t i = 0; i < items; i++) {
            assert_int_equal(bin[i], want[i]);
            assert_true(place[i] < room[bin[i]]);
            held[bin[i]]++;
        }
        for (int32_t b = 0; b < bins; b++) {
            assert_true(held[b] <= room[b]);
            assert_true(load[b] == slow[b]);
        }
    }
    const double one[2] = {1, 1};
    const int32_t room[1] = {1};
    double load[1] = {0};
    int32_t bin[2], place[2];
    assert_int_equal(mz_pack_lpt(pack, one, 2, room, load, 1, bin, place, &err), MZ_EINTERNAL);
    mz_arena_free(&arena);
}

/* Largest load per replica, in whole numbers. */
static void replication_follows_its_definition(void **unused) {
    mz_arena arena = {0};
    mz_err err;
    mz_pack *pack;
    mz_rng rng = mz_rng_make(2, 1);
    assert_int_equal(mz_pack_create(&arena, 128, 4, &pack, &err), MZ_OK);
    for (int round = 0; round < 300; round++) {
        const int32_t experts = 1 + (int32_t)mz_rng_below(&rng, 12);
        const int32_t slots = experts + (int32_t)mz_rng_below(&rng, 40);
        int64_t load[12];
        int32_t count[12], extra[64], want[12];
        for (int32_t e = 0; e < experts; e++) {
            load[e] = (int64_t)mz_rng_below(&rng, 30);
            want[e] = 1;
        }
        mz_pack_replicate(pack, load, experts, slots, count, extra);
        for (int32_t s = experts; s < slots; s++) {
            int32_t best = 0;
            for (int32_t e = 1; e < experts; e++)
                if (load[e] * want[best] > load[best] * want[e])
                    best = e;
            want[best]++;
            assert_int_equal(extra[s - experts], best);
        }
        assert_memory_equal(count, want, sizeof(int32_t) * (size_t)experts);
    }
    mz_arena_free(&arena);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(changes_are_moved_from_the_nearest_host),
        cmocka_unit_test(too_many_instances),
        cmocka_unit_test(rings),
        cmocka_unit_test(packing_follows_its_definition),
        cmocka_unit_test(replication_follows_its_definition),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
