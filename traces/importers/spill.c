#include "traces/importers/spill.h"

#include "common/base/arena.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { RUNS_MAX = 2048, RUN_BYTES = 16 << 10 };

struct mz_spill_run {
    int64_t begin, end, at; /* bytes of the file; next to be read */
    unsigned char *data;
    size_t used, count; /* records of `data` that were handed out, and that are there */
};

mz_spill mz_spill_make(size_t size, int (*order)(const void *, const void *), const char *beside) {
    return (mz_spill){
        .size = size, .order = order, .beside = beside, .most = MZ_SPILL_BYTES, .fd = -1};
}

/* ---- the file -------------------------------------------------------------------------------- */

static mz_code open_file(mz_spill *spill, mz_err *err) {
    char name[PATH_MAX];
    const char *slash = strrchr(spill->beside, '/');
    int length = snprintf(name, sizeof name, "%.*s.mizan-sort-XXXXXX",
                          slash ? (int)(slash - spill->beside) + 1 : 0, spill->beside);
    if (length < 0 || (size_t)length >= sizeof name)
        return mz_fail(err, MZ_EINPUT, "%s: the path is too long", spill->beside);
    spill->fd = mkstemp(name);
    if (spill->fd < 0)
        return mz_fail(err, MZ_EINPUT, "%s: no file for sorting can be made beside it: %s",
                       spill->beside, strerror(errno));
    unlink(name);
    return MZ_OK;
}

static mz_code write_all(mz_spill *spill, const unsigned char *data, size_t size, int64_t at,
                         mz_err *err) {
    for (size_t done = 0; done < size;) {
        ssize_t n = pwrite(spill->fd, data + done, size - done, at + (int64_t)done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return mz_fail(err, MZ_EINPUT,
                           "%s: the file for sorting beside it cannot be written: %s",
                           spill->beside, n < 0 ? strerror(errno) : "no room");
        done += (size_t)n;
    }
    return MZ_OK;
}

static mz_code read_all(mz_spill *spill, unsigned char *data, size_t size, int64_t at,
                        mz_err *err) {
    for (size_t done = 0; done < size;) {
        ssize_t n = pread(spill->fd, data + done, size - done, at + (int64_t)done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return mz_fail(err, MZ_EINTERNAL, "%s: the file for sorting cannot be read: %s",
                           spill->beside, n < 0 ? strerror(errno) : "it became shorter");
        done += (size_t)n;
    }
    return MZ_OK;
}

/* Sorts what is held and moves it to the file. */
static mz_code write_run(mz_spill *spill, mz_err *err) {
    int64_t begin = spill->runs ? spill->run[spill->runs - 1].end : 0;
    size_t bytes = spill->used * spill->size;
    if (spill->runs == RUNS_MAX)
        return mz_fail(err, MZ_EINPUT, "more than %lld rows; import the recording in parts",
                       (long long)spill->records);
    mz_code code = spill->fd < 0 ? open_file(spill, err) : MZ_OK;
    if (code)
        return code;
    if (!mz_grow((void **)&spill->run, &spill->run_room, spill->runs + 1, sizeof *spill->run))
        return mz_fail_nomem(err, "rows to be sorted");
    qsort(spill->held, spill->used, spill->size, spill->order);
    code = write_all(spill, spill->held, bytes, begin, err);
    spill->run[spill->runs++] = (mz_spill_run){.begin = begin, .end = begin + (int64_t)bytes};
    spill->used = 0;
    return code;
}

mz_code mz_spill_add(mz_spill *spill, const void *record, mz_err *err) {
    if (spill->used > 0 && (spill->used + 1) * spill->size > spill->most) {
        mz_code code = write_run(spill, err);
        if (code)
            return code;
    }
    if (!mz_grow((void **)&spill->held, &spill->room, spill->used + 1, spill->size))
        return mz_fail_nomem(err, "rows to be sorted");
    memcpy(spill->held + spill->used++ * spill->size, record, spill->size);
    spill->records++;
    return MZ_OK;
}

static void free_runs(mz_spill *spill) {
    for (size_t i = 0; i < spill->runs; i++)
        free(spill->run[i].data);
    spill->runs = 0;
}

/* ---- merging --------------------------------------------------------------------------------- */

static const unsigned char *head_of(const mz_spill *spill, size_t run) {
    const mz_spill_run *r = &spill->run[run];
    return r->data + r->used * spill->size;
}

/* Of equal records that of the earlier run comes first. */
static bool before(const mz_spill *spill, size_t a, size_t b) {
    int order = spill->order(head_of(spill, a), head_of(spill, b));
    return order != 0 ? order < 0 : a < b;
}

static void sink(mz_spill *spill, size_t at) {
    for (size_t child; (child = 2 * at + 1) < spill->heap_size; at = child) {
        if (child + 1 < spill->heap_size &&
            before(spill, spill->heap[child + 1], spill->heap[child]))
            child++;
        if (!before(spill, spill->heap[child], spill->heap[at]))
            return;
        size_t run = spill->heap[at];
        spill->heap[at] = spill->heap[child];
        spill->heap[child] = run;
    }
}

/* More records of a run; none left: count 0. */
static mz_code fill_run(mz_spill *spill, mz_spill_run *run, mz_err *err) {
    size_t most = RUN_BYTES / spill->size ? RUN_BYTES / spill->size : 1;
    size_t left = (size_t)(run->end - run->at) / spill->size;
    run->used = 0;
    run->count = left < most ? left : most;
    if (!run->data && !(run->data = mz_calloc(most, spill->size)))
        return mz_fail_nomem(err, "rows to be merged");
    mz_code code = read_all(spill, run->data, run->count * spill->size, run->at, err);
    run->at += (int64_t)(run->count * spill->size);
    return code;
}

mz_code mz_spill_rewind(mz_spill *spill, mz_err *err) {
    mz_code code = MZ_OK;
    spill->next = 0;
    spill->heap_size = 0;
    if (spill->runs == 0) {
        if (spill->used > 0)
            qsort(spill->held, spill->used, spill->size, spill->order);
        return MZ_OK;
    }
    if (spill->used > 0)
        code = write_run(spill, err);
    free(spill->held); /* its room goes to the runs */
    spill->held = NULL;
    spill->room = 0;
    free(spill->heap);
    spill->heap = mz_calloc(spill->runs, sizeof *spill->heap);
    if (!code && !spill->heap)
        code = mz_fail_nomem(err, "rows to be merged");
    for (size_t i = 0; i < spill->runs && !code; i++) {
        spill->run[i].at = spill->run[i].begin;
        code = fill_run(spill, &spill->run[i], err);
        spill->heap[spill->heap_size++] = i;
    }
    for (size_t i = spill->heap_size / 2; i-- > 0 && !code;)
        sink(spill, i);
    return code;
}

mz_code mz_spill_next(mz_spill *spill, const void **record, mz_err *err) {
    *record = NULL;
    if (spill->runs == 0) {
        if (spill->next < spill->used)
            *record = spill->held + spill->next++ * spill->size;
        return MZ_OK;
    }
    if (spill->next > 0 && spill->heap_size > 0) {
        mz_spill_run *run = &spill->run[spill->heap[0]];
        run->used++;
        mz_code code = run->used == run->count ? fill_run(spill, run, err) : MZ_OK;
        if (code)
            return code;
        if (run->count == 0)
            spill->heap[0] = spill->heap[--spill->heap_size];
        sink(spill, 0);
    }
    spill->next = 1;
    if (spill->heap_size > 0)
        *record = head_of(spill, spill->heap[0]);
    return MZ_OK;
}

void mz_spill_free(mz_spill *spill) {
    free_runs(spill);
    if (spill->size > 0 && spill->fd >= 0)
        close(spill->fd);
    free(spill->run);
    free(spill->held);
    free(spill->heap);
    *spill = (mz_spill){.fd = -1};
}
