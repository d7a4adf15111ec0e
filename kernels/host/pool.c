#include "kernels/host/host.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct mz_worker {
    mz_pool *pool;
    pthread_t thread;
    int32_t number;
} mz_worker;

struct mz_pool {
    pthread_mutex_t lock;
    pthread_cond_t start, done;
    mz_worker *worker; /* [threads - 1] */
    int32_t threads, started;
    /* under lock: the run of this number, whether workers may still join it, how many are in it */
    uint64_t run;
    bool open, stop;
    int32_t busy;
    mz_part part;
    void *argument;
    int64_t parts;
    int64_t next; /* atomic */
};

static void take_parts(mz_pool *p, mz_part part, void *argument, int64_t parts, int32_t thread) {
    for (;;) {
        const int64_t i = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED);
        if (i >= parts)
            return;
        part(argument, i, thread);
    }
}

static void *work(void *self) {
    const mz_worker *w = self;
    mz_pool *p = w->pool;
    uint64_t seen = 0;
    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (!p->stop && !(p->open && p->run != seen))
            pthread_cond_wait(&p->start, &p->lock);
        if (p->stop)
            break;
        seen = p->run;
        p->busy++;
        const mz_part part = p->part;
        void *argument = p->argument;
        const int64_t parts = p->parts;
        pthread_mutex_unlock(&p->lock);
        take_parts(p, part, argument, parts, w->number);
        pthread_mutex_lock(&p->lock);
        if (--p->busy == 0)
            pthread_cond_signal(&p->done);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

mz_pool *mz_pool_create(int32_t threads) {
    mz_pool *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->threads = threads;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->start, NULL);
    pthread_cond_init(&p->done, NULL);
    p->worker = calloc((size_t)threads, sizeof *p->worker);
    while (p->worker && p->started < threads - 1) {
        mz_worker *w = &p->worker[p->started];
        *w = (mz_worker){.pool = p, .number = p->started + 1};
        if (pthread_create(&w->thread, NULL, work, w) != 0)
            break;
        p->started++;
    }
    if (!p->worker || p->started < threads - 1)
        mz_pool_free(p);
    else
        return p;
    return NULL;
}

void mz_pool_free(mz_pool *p) {
    if (!p)
        return;
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    pthread_cond_broadcast(&p->start);
    pthread_mutex_unlock(&p->lock);
    for (int32_t i = 0; i < p->started; i++)
        pthread_join(p->worker[i].thread, NULL);
    pthread_cond_destroy(&p->start);
    pthread_cond_destroy(&p->done);
    pthread_mutex_destroy(&p->lock);
    free(p->worker);
    free(p);
}

int32_t mz_pool_threads(const mz_pool *p) {
    return p->threads;
}

void mz_pool_run(mz_pool *p, mz_part part, void *argument, int64_t parts) {
    if (parts <= 1 || p->started == 0) {
        for (int64_t i = 0; i < parts; i++)
            part(argument, i, 0);
        return;
    }
    pthread_mutex_lock(&p->lock);
    p->part = part;
    p->argument = argument;
    p->parts = parts;
    p->open = true;
    __atomic_store_n(&p->next, 0, __ATOMIC_RELAXED);
    p->run++;
    pthread_cond_broadcast(&p->start);
    pthread_mutex_unlock(&p->lock);
    take_parts(p, part, argument, parts, 0);
    /* All parts are taken: waits for workers that have some, not for those that come too late. */
    pthread_mutex_lock(&p->lock);
    p->open = false;
    while (p->busy > 0)
        pthread_cond_wait(&p->done, &p->lock);
    pthread_mutex_unlock(&p->lock);
}

/* ---- ranges -------------------------------------------------------------------------------------
 */

/* Enough to hide what a part costs to hand out, few enough to balance a pool of many threads. */
enum { PIECE_BYTES = 256 << 10, PIECES_MOST = 4096 };

typedef struct ranged {
    mz_range range;
    void *argument;
    int64_t n, piece;
} ranged;

static void run_piece(void *argument, int64_t part, int32_t thread) {
    (void)thread;
    const ranged *r = argument;
    const int64_t first = part * r->piece;
    r->range(r->argument, first, first + r->piece < r->n ? first + r->piece : r->n);
}

void mz_pool_range(mz_pool *p, mz_range range, void *argument, int64_t n, int64_t bytes) {
    int64_t piece = PIECE_BYTES / (bytes > 0 ? bytes : 1);
    if (piece < (n + PIECES_MOST - 1) / PIECES_MOST)
        piece = (n + PIECES_MOST - 1) / PIECES_MOST;
    ranged r = {range, argument, n, piece > 0 ? piece : 1};
    mz_pool_run(p, run_piece, &r, (n + r.piece - 1) / r.piece);
}
