/* The event queue: pending events in order of (time, sequence of insertion).
 *
 * Times are finite, non-negative doubles (seconds) and never earlier than the last one popped.
 * The queue allocates at creation only: pushing beyond the capacity is MZ_EINTERNAL.
 * Cost (tests/bench/bench_evq): push + pop + handler; DESIGN section 9 asks for 20 million/s with
 * 1,000 pending and 8 million/s with 65,536 pending on one core. */
#ifndef MIZAN_SIM_ENGINE_EVQ_H
#define MIZAN_SIM_ENGINE_EVQ_H

#include "common/base/err.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct mz_evq mz_evq;

typedef struct mz_event {
    double time;
    uint32_t kind;    /* the owner's meaning */
    uint32_t subject; /* task, flow, rank */
} mz_event;

mz_code mz_evq_create(int64_t capacity, mz_evq **queue, mz_err *err);
void mz_evq_free(mz_evq **queue);
bool mz_evq_push(mz_evq *queue, mz_event event); /* false: full, or not such a time */
bool mz_evq_pop(mz_evq *queue, mz_event *event); /* false: empty */
double mz_evq_next(mz_evq *queue);               /* time of the next event: infinity when empty */
int64_t mz_evq_pending(const mz_evq *queue);
uint64_t mz_evq_popped(const mz_evq *queue); /* events handled so far */
void mz_evq_clear(mz_evq *queue);            /* empty, time 0 again */

#endif
