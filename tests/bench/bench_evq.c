/* Event core: the hold model (pop the earliest event, let its handler push a successor).
 *
 * Prints the rows of DESIGN section 9 "event core": million events/s on one core, handler call and
 * (time, sequence) order included, for exponential increments and for the patterns that ruin other
 * queues (all equal, zero increments, two scales a million apart). Usage: bench_evq [events] */
#include "common/base/err.h"
#include "common/base/rng.h"
#include "sim/engine/evq.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { INCREMENTS = 1 << 12 }; /* indexed by the upper 12 bits of hold.next */

typedef struct hold {
    mz_evq *queue;
    const double *increment; /* [INCREMENTS] drawn beforehand: the generator is not measured */
    uint32_t next;
    uint64_t digest;
} hold;

typedef void handler(hold *hold, const mz_event *event);

static void successor(hold *state, const mz_event *event) {
    state->digest = state->digest * 31 + event->subject;
    state->next = state->next * 1664525 + 1013904223; /* no period that the queue could see */
    double step = state->increment[state->next >> 20];
    mz_evq_push(state->queue, (mz_event){event->time + step, event->kind, event->subject});
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void exponential(mz_rng *rng, double *out) {
    for (int i = 0; i < INCREMENTS; i++) {
        out[i] = -log1p(-mz_rng_uniform(rng));
    }
}

static void uniform(mz_rng *rng, double *out) {
    for (int i = 0; i < INCREMENTS; i++) {
        out[i] = 2 * mz_rng_uniform(rng);
    }
}

static void bimodal(mz_rng *rng, double *out) {
    for (int i = 0; i < INCREMENTS; i++) {
        out[i] = mz_rng_uniform(rng) * (mz_rng_below(rng, 10) == 0 ? 1e3 : 1e-3);
    }
}

static void one(mz_rng *rng, double *out) {
    for (int i = 0; i < INCREMENTS; i++) {
        out[i] = 1;
    }
}

static void zero(mz_rng *rng, double *out) {
    for (int i = 0; i < INCREMENTS; i++) {
        out[i] = 0;
    }
}

static int run(const char *name, void (*draw)(mz_rng *, double *), int pending, long events) {
    static double increment[INCREMENTS];
    mz_rng rng = mz_rng_make(1, 0);
    mz_err err;
    hold state = {.increment = increment};
    handler *volatile handle = successor; /* an indirect call, as in a simulator */
    draw(&rng, increment);
    if (mz_evq_create(pending, &state.queue, &err) != MZ_OK) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    for (int i = 0; i < pending; i++) {
        mz_evq_push(state.queue, (mz_event){increment[i & (INCREMENTS - 1)], 0, (uint32_t)i});
    }
    double begin = 0, best = 1e300;
    for (int part = 0; part < 4; part++) { /* the first part warms up */
        mz_event event;
        begin = seconds();
        for (long i = 0; i < events; i++) {
            mz_evq_pop(state.queue, &event);
            handle(&state, &event);
        }
        double took = seconds() - begin;
        best = part > 0 && took < best ? took : best;
    }
    printf("%-12s %8d pending  %7.2f million events/s  (digest %016llx)\n", name, pending,
           1e-6 * (double)events / best, (unsigned long long)state.digest);
    mz_evq_free(&state.queue);
    return 0;
}

int main(int argc, char **argv) {
    long events = argc > 1 ? atol(argv[1]) : 2000000;
    static const struct {
        const char *name;
        void (*draw)(mz_rng *, double *);
    } pattern[] = {{"exponential", exponential},
                   {"uniform", uniform},
                   {"bimodal", bimodal},
                   {"equal", one},
                   {"zero", zero}};
    int failed = events < 1;
    for (size_t i = 0; i < sizeof pattern / sizeof *pattern && !failed; i++) {
        failed |= run(pattern[i].name, pattern[i].draw, 1000, events);
        failed |= run(pattern[i].name, pattern[i].draw, 65536, events);
    }
    return failed;
}
