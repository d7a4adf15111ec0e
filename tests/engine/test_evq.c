/* The event queue against a stable sort: order by (time, sequence of insertion). */
#include "tests/harness.h"

#include "common/base/rng.h"
#include "sim/engine/evq.h"

#include <math.h>

enum { EVENTS = 20000 };

typedef struct reference {
    double time;
    uint32_t sequence;
} reference;

/* Increments of the kinds that hurt bucket queues: smooth, equal, zero, two scales far apart,
 * powers of two (bits far apart), steps of one unit in the last place. */
static double increment(mz_rng *rng, int kind, double now) {
    double u = mz_rng_uniform(rng);
    switch (kind) {
    case 0:
        return -log1p(-u);
    case 1:
        return 1;
    case 2:
        return 0;
    case 3:
        return u < 0.5 ? u * 1e-9 : u * 1e6;
    case 4:
        return ldexp(1, (int)(u * 200) - 100);
    case 5:
        return nextafter(now, INFINITY) - now;
    default:
        return u < 0.3 ? 0 : floor(4 * u);
    }
}

static bool sooner(const reference *a, const reference *b) {
    return a->time < b->time || (a->time == b->time && a->sequence < b->sequence);
}

/* Heap of indices into `all`, the plainest exact queue there is. */
typedef struct plain {
    reference *all;
    uint32_t heap[EVENTS + 1];
    int count;
} plain;

static void plain_push(plain *p, uint32_t index) {
    int at = p->count++;
    for (; at > 0 && sooner(&p->all[index], &p->all[p->heap[(at - 1) / 2]]); at = (at - 1) / 2) {
        p->heap[at] = p->heap[(at - 1) / 2];
    }
    p->heap[at] = index;
}

static uint32_t plain_pop(plain *p) {
    uint32_t first = p->heap[0], last = p->heap[--p->count];
    int at = 0;
    for (int child; (child = 2 * at + 1) < p->count; at = child) {
        if (child + 1 < p->count && sooner(&p->all[p->heap[child + 1]], &p->all[p->heap[child]])) {
            child++;
        }
        if (!sooner(&p->all[p->heap[child]], &p->all[last])) {
            break;
        }
        p->heap[at] = p->heap[child];
    }
    p->heap[at] = last;
    return first;
}

static void check_kind(int kind, int pending, uint64_t seed) {
    static reference all[EVENTS];
    static plain queue;
    mz_rng rng = mz_rng_make(seed, (uint64_t)kind);
    mz_evq *tested;
    mz_err err;
    uint32_t made = 0;
    double now = 0;
    queue = (plain){.all = all};
    assert_ok(mz_evq_create(pending, &tested, &err), &err);
    while (made < EVENTS || queue.count > 0) {
        bool room = queue.count < pending && made < EVENTS;
        if (room && (queue.count == 0 || mz_rng_below(&rng, 16) < 9)) {
            all[made] = (reference){now + increment(&rng, kind, now), made};
            assert_true(mz_evq_push(tested, (mz_event){all[made].time, made ^ 5u, made}));
            plain_push(&queue, made++);
            continue;
        }
        mz_event event;
        const reference *want = &all[plain_pop(&queue)];
        if (mz_rng_below(&rng, 3) == 0) {
            assert_true(mz_evq_next(tested) == want->time);
        }
        assert_true(mz_evq_pop(tested, &event));
        assert_true(event.time == want->time);
        assert_int_equal(event.subject, want->sequence);
        assert_int_equal(event.kind, want->sequence ^ 5u);
        now = event.time;
        assert_int_equal(mz_evq_pending(tested), queue.count);
    }
    assert_int_equal(mz_evq_popped(tested), EVENTS);
    assert_true(mz_evq_next(tested) == INFINITY);
    mz_evq_free(&tested);
    assert_null(tested);
}

static void test_order(void **state) {
    (void)state;
    for (int kind = 0; kind < 7; kind++) {
        check_kind(kind, 1, 1);
        check_kind(kind, 40, 2);
        check_kind(kind, 3000, 3);
    }
}

static void test_limits(void **state) {
    (void)state;
    mz_evq *queue;
    mz_err err;
    mz_event event;
    assert_fails(mz_evq_create(0, &queue, &err), MZ_EINTERNAL, "capacity", &err);
    assert_ok(mz_evq_create(2, &queue, &err), &err);
    assert_false(mz_evq_pop(queue, &event));
    assert_false(mz_evq_push(queue, (mz_event){-1, 0, 0}));
    assert_false(mz_evq_push(queue, (mz_event){NAN, 0, 0}));
    assert_false(mz_evq_push(queue, (mz_event){INFINITY, 0, 0}));
    assert_true(mz_evq_push(queue, (mz_event){-0.0, 0, 7}));
    assert_true(mz_evq_push(queue, (mz_event){0, 0, 8}));
    assert_false(mz_evq_push(queue, (mz_event){1, 0, 9})); /* full */
    assert_true(mz_evq_pop(queue, &event) && event.subject == 7);
    assert_true(mz_evq_push(queue, (mz_event){1e308, 0, 9}));
    assert_true(mz_evq_pop(queue, &event) && event.subject == 8);
    assert_true(mz_evq_pop(queue, &event) && event.time == 1e308);
    assert_false(mz_evq_push(queue, (mz_event){1, 0, 9})); /* in the past */
    mz_evq_clear(queue);
    assert_true(mz_evq_push(queue, (mz_event){1, 0, 9}));
    assert_int_equal(mz_evq_pending(queue), 1);
    mz_evq_free(&queue);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_order), cmocka_unit_test(test_limits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
