/* A multi-level bucket queue on the bits of the time.
 *
 * Non-negative doubles order like their bit patterns, and popped times never decrease, so the queue
 * is a radix heap: an event lies in bucket (level, digit), where level is the highest 6-bit digit
 * in which its bits differ from those of the last popped time, and digit is its own digit there.
 * When the last popped time moves into the lowest occupied bucket, all other events stay where they
 * are; that bucket alone is dealt out to lower levels. An event moves at most once per level, so no
 * pattern of times is bad. Buckets are first-in first-out and dealt out in order, which keeps equal
 * times in order of insertion without a sequence number. */
#include "sim/engine/evq.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { DIGIT_BITS = 6, DIGITS = 1 << DIGIT_BITS, LEVELS = 11, NONE = -1 };

/* What dealing out reads and writes, four to a cache line; the subjects lie apart. */
typedef struct node {
    double time;
    int32_t next;
    uint32_t kind;
} node;

typedef struct bucket {
    int32_t head, tail;
} bucket;

struct mz_evq {
    uint64_t last;       /* bits of the last popped time */
    uint32_t level_mask; /* levels that hold events */
    int32_t free, fresh; /* list of returned nodes, first node never used */
    bucket now;          /* events at exactly `last` */
    int64_t pending, capacity;
    uint64_t popped;
    double next;     /* time of the next event, where known */
    bool next_known; /* only then a push has to keep it up */
    node *pool;
    uint32_t *subject;           /* [capacity] */
    uint64_t digit_mask[LEVELS]; /* digits of each level that hold events */
    bucket buckets[LEVELS][DIGITS];
};

static inline uint64_t time_bits(double time) {
    uint64_t bits;
    memcpy(&bits, &time, sizeof bits);
    return bits;
}

mz_code mz_evq_create(int64_t capacity, mz_evq **queue, mz_err *err) {
    *queue = NULL;
    if (capacity < 1 || capacity > INT32_MAX) {
        return mz_fail(err, MZ_EINTERNAL, "event queue: capacity %lld is not in 1..%d",
                       (long long)capacity, INT32_MAX);
    }
    mz_evq *made = calloc(1, sizeof *made);
    if (made != NULL) {
        made->pool = malloc((size_t)capacity * sizeof *made->pool);
        made->subject = malloc((size_t)capacity * sizeof *made->subject);
    }
    if (made == NULL || made->pool == NULL || made->subject == NULL) {
        mz_evq_free(&made);
        return mz_fail_nomem(err, "pending events");
    }
    made->capacity = capacity;
    mz_evq_clear(made);
    *queue = made;
    return MZ_OK;
}

void mz_evq_free(mz_evq **queue) {
    if (*queue != NULL) {
        free((*queue)->pool);
        free((*queue)->subject);
        free(*queue);
        *queue = NULL;
    }
}

void mz_evq_clear(mz_evq *queue) {
    queue->last = 0;
    queue->level_mask = 0;
    memset(queue->digit_mask, 0, sizeof queue->digit_mask);
    queue->now = (bucket){NONE, NONE};
    queue->free = NONE;
    queue->fresh = 0;
    queue->pending = 0;
    queue->popped = 0;
    queue->next_known = false;
}

/* Puts a node with time bits `bits` > last at the end of its bucket. */
static inline void put(mz_evq *queue, int32_t index, uint64_t bits) {
    /* x / 6 as a product, exact for x < 64 */
    int level = ((63 - __builtin_clzll(bits ^ queue->last)) * 43) >> 8;
    int digit = (int)(bits >> (level * DIGIT_BITS)) & (DIGITS - 1);
    bucket *into = &queue->buckets[level][digit];
    uint64_t bit = (uint64_t)1 << digit;
    queue->pool[index].next = NONE;
    if ((queue->digit_mask[level] & bit) != 0) {
        queue->pool[into->tail].next = index;
    } else {
        queue->digit_mask[level] |= bit;
        queue->level_mask |= 1u << level;
        into->head = index;
    }
    into->tail = index;
}

static inline void put_now(mz_evq *queue, int32_t index) {
    queue->pool[index].next = NONE;
    if (queue->now.head == NONE) {
        queue->now.head = index;
    } else {
        queue->pool[queue->now.tail].next = index;
    }
    queue->now.tail = index;
}

bool mz_evq_push(mz_evq *queue, mz_event event) {
    event.time += 0.0; /* -0 becomes 0 */
    uint64_t bits = time_bits(event.time);
    if (queue->pending == queue->capacity || !isfinite(event.time) || bits < queue->last ||
        event.time < 0) {
        return false;
    }
    int32_t index = queue->free;
    if (index != NONE) {
        queue->free = queue->pool[index].next;
    } else {
        index = queue->fresh++;
    }
    node *made = &queue->pool[index];
    made->time = event.time;
    made->kind = event.kind;
    queue->subject[index] = event.subject;
    queue->pending++;
    if (event.time < queue->next) {
        queue->next = event.time;
    }
    if (bits == queue->last) {
        put_now(queue, index);
    } else {
        put(queue, index, bits);
    }
    return true;
}

/* Takes the lowest bucket out and moves `last` to its least time; a lone event is returned, several
 * are dealt out and NONE is returned: the least are then in `now`. */
static int32_t open_lowest(mz_evq *queue) {
    int level = __builtin_ctz(queue->level_mask);
    int digit = __builtin_ctzll(queue->digit_mask[level]);
    int32_t head = queue->buckets[level][digit].head;
    node *pool = queue->pool;
    queue->digit_mask[level] &= queue->digit_mask[level] - 1;
    if (queue->digit_mask[level] == 0) {
        queue->level_mask &= queue->level_mask - 1;
    }
    uint64_t least = time_bits(pool[head].time);
    if (pool[head].next == NONE) {
        queue->last = least;
        return head;
    }
    for (int32_t i = pool[head].next; i != NONE; i = pool[i].next) {
        uint64_t bits = time_bits(pool[i].time);
        least = bits < least ? bits : least;
    }
    queue->last = least;
    for (int32_t i = head, next; i != NONE; i = next) {
        uint64_t bits = time_bits(pool[i].time);
        next = pool[i].next;
        if (bits == least) {
            put_now(queue, i);
        } else {
            put(queue, i, bits);
        }
    }
    return NONE;
}

bool mz_evq_pop(mz_evq *queue, mz_event *event) {
    node *pool = queue->pool;
    int32_t index = NONE;
    if (queue->now.head == NONE) {
        if (queue->level_mask == 0) {
            return false;
        }
        index = open_lowest(queue);
    }
    if (index == NONE) {
        index = queue->now.head;
        queue->now.head = pool[index].next;
    }
    event->time = pool[index].time;
    event->kind = pool[index].kind;
    event->subject = queue->subject[index];
    pool[index].next = queue->free;
    queue->free = index;
    queue->pending--;
    queue->popped++;
    queue->next_known = false;
    return true;
}

double mz_evq_next(mz_evq *queue) {
    if (queue->next_known) {
        return queue->next;
    }
    queue->next = INFINITY;
    if (queue->now.head != NONE) {
        queue->next = queue->pool[queue->now.head].time;
    } else if (queue->level_mask != 0) {
        int level = __builtin_ctz(queue->level_mask);
        int digit = __builtin_ctzll(queue->digit_mask[level]);
        int32_t i = queue->buckets[level][digit].head;
        for (; i != NONE; i = queue->pool[i].next) {
            queue->next = fmin(queue->next, queue->pool[i].time);
        }
    }
    queue->next_known = true;
    return queue->next;
}

int64_t mz_evq_pending(const mz_evq *queue) {
    return queue->pending;
}

uint64_t mz_evq_popped(const mz_evq *queue) {
    return queue->popped;
}
