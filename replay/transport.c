/* The table of transports, and what all have in common: copies between ranks of one process, the
 * time of each rank, counters, the place of a failure. */
#include "replay/transport.h"

#include "common/base/arena.h"
#include "common/base/log.h"
#include "common/base/opt.h"
#include "replay/kernel_code.h"
#include "replay/transport_kind.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct kind_entry {
    const char *name;
    const mz_transport_kind *kind; /* or NULL: in a module, as `symbol` */
    const char *module, *symbol;
    const char *needs; /* what a user installs */
} kind_entry;

static const kind_entry kinds[] = {
    {"local", &mz_transport_local, NULL, NULL, NULL},
    {"mpi", NULL, "mizan-mpi.so", "mz_transport_mpi", "Open MPI"},
    {"nccl", NULL, "mizan-mpi.so", "mz_transport_nccl", "Open MPI and NCCL"},
};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

const char *mz_transport_names(void) {
    return "local, mpi, nccl";
}

/* Lanes of one exchange, sorted: those within the process by receiving rank, and the others. */
typedef struct exchange_scratch {
    mz_lane *inside, *outside;
    size_t inside_cap, outside_cap;
    int64_t *begin; /* [ranks+1] of inside */
} exchange_scratch;

/* ---- opening -----------------------------------------------------------------------------------
 */

static void *open_in(const char *folder, int length, const char *module) {
    char path[4096];
    const int n = snprintf(path, sizeof path, "%.*s/%s", length, folder, module);
    return n > 0 && (size_t)n < sizeof path ? dlopen(path, RTLD_NOW | RTLD_GLOBAL) : NULL;
}

/* The program's own folder (a build tree), and where modules are installed. */
static void default_folders(char *folders, size_t size) {
    char program[3000];
    const ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    program[length > 0 ? length : 0] = 0;
    char *slash = strrchr(program, '/');
    if (slash)
        *slash = 0;
    snprintf(folders, size, "%s:%s", program, MZ_MODULE_DIR);
}

/* The module is found in the folders given or by the loader; `why` receives the last reason. */
static void *open_module(const char *module, const char *given, char *why, size_t size) {
    char defaults[4096];
    const char *reason = NULL, *folders = given ? given : defaults;
    default_folders(defaults, sizeof defaults);
    snprintf(why, size, "not found");
    while (*folders) {
        const size_t length = strcspn(folders, ":");
        void *library = open_in(folders, (int)length, module);
        if (library)
            return library;
        reason = dlerror();
        /* A module that is there but lacks its own library says more than one that is not. */
        if (reason && !strstr(reason, module))
            snprintf(why, size, "%s", reason);
        folders += length + (folders[length] == ':');
    }
    return dlopen(module, RTLD_NOW | RTLD_GLOBAL);
}

static mz_code find_kind(mz_transport *t, const mz_transport_options *options, mz_err *err) {
    const char *names[KINDS];
    for (int i = 0; i < KINDS; i++) {
        const kind_entry *k = &kinds[i];
        names[i] = k->name;
        if (strcmp(k->name, options->name) != 0)
            continue;
        t->name = k->name;
        t->kind = k->kind;
        if (k->kind)
            return MZ_OK;
        char why[256];
        t->library = open_module(k->module, options->lib_dir, why, sizeof why);
        if (t->library)
            t->kind = (const mz_transport_kind *)dlsym(t->library, k->symbol);
        if (t->kind)
            return MZ_OK;
        return mz_fail(err, MZ_EHARDWARE,
                       "--transport %s needs %s: %s could not be loaded (%s); install it and "
                       "build again, or pass --transport local",
                       k->name, k->needs, k->module, why);
    }
    const char *near = mz_nearest(options->name, names, KINDS);
    return mz_fail(err, MZ_EINPUT, "--transport %s: unknown%s%s%s; there are %s", options->name,
                   near ? " (did you mean " : "", near ? near : "", near ? "?)" : "",
                   mz_transport_names());
}

static mz_code share_ranks(mz_transport *t, mz_err *err) {
    if (t->ranks % t->processes != 0)
        return mz_fail(err, MZ_EINPUT,
                       "%d ranks cannot be spread over %d processes evenly: start a number of "
                       "processes that divides the ranks",
                       t->ranks, t->processes);
    const int32_t local = t->ranks / t->processes;
    t->first = t->process * local;
    t->end = t->first + local;
    exchange_scratch *s = t->scratch;
    s->begin = mz_calloc((size_t)local + 1, sizeof *s->begin);
    return s->begin ? MZ_OK : mz_fail_nomem(err, "a transport");
}

mz_code mz_transport_open(const mz_transport_options *options, mz_transport **out, mz_err *err) {
    *out = NULL;
    mz_transport *t = mz_calloc(1, sizeof *t);
    exchange_scratch *scratch = mz_calloc(1, sizeof *scratch);
    if (!t || !scratch) {
        free(t);
        free(scratch);
        return mz_fail_nomem(err, "a transport");
    }
    t->scratch = scratch;
    t->ranks = options->ranks;
    t->processes = t->neighbours = 1;
    t->timeout_s = options->timeout_s;
    t->stop = options->stop;
    t->layer = -1;
    mz_code code = find_kind(t, options, err);
    if (code == MZ_OK)
        code = t->kind->open(t, options, err);
    if (code == MZ_OK)
        code = share_ranks(t, err);
    if (code != MZ_OK) {
        mz_transport_abort(t);
        mz_transport_close(&t);
        return code;
    }
    *out = t;
    return MZ_OK;
}

mz_code mz_transport_attach(mz_transport *t, mz_kernels *kernels, mz_err *err) {
    const bool host = mz_kernels_backend(kernels) == MZ_BACKEND_HOST;
    if (t->kind->memory == MZ_TRANSPORT_HOST && !host)
        return mz_fail(err, MZ_EINPUT,
                       "--transport %s moves host memory: with --backend cuda pass --transport "
                       "nccl, or local for all ranks on one device",
                       t->name);
    if (t->kind->memory == MZ_TRANSPORT_DEVICE && host)
        return mz_fail(err, MZ_EINPUT,
                       "--transport %s moves device memory: pass --backend cuda, or --transport "
                       "mpi",
                       t->name);
    t->kernels = kernels;
    t->stream = mz_kernels_native_stream(kernels, 0);
    return t->kind->attach ? t->kind->attach(t, err) : MZ_OK;
}

/* The module stays loaded: libraries below it do not survive being closed and opened again. */
void mz_transport_close(mz_transport **transport) {
    mz_transport *t = *transport;
    if (!t)
        return;
    if (t->kind && t->kind->close)
        t->kind->close(t);
    exchange_scratch *s = t->scratch;
    free(s->inside);
    free(s->outside);
    free(s->begin);
    free(s);
    free(t);
    *transport = NULL;
}

void mz_transport_abort(mz_transport *t) {
    if (t && t->kind && t->kind->end_others && t->processes > 1)
        t->kind->end_others(t);
}

/* ---- exchanges ---------------------------------------------------------------------------------
 */

/* Where it happened: "process 1 (ranks 4 to 7), dispatch of layer 3". Alone it is one process. */
static mz_code place(mz_transport *t, mz_err *err) {
    char where[96] = "";
    t->placed = t->processes > 1;
    if (t->doing && t->layer >= 0)
        snprintf(where, sizeof where, "%s of layer %d", t->doing, t->layer);
    else if (t->doing)
        snprintf(where, sizeof where, "%s", t->doing);
    if (t->placed)
        return mz_err_prefix(err, "process %d of %d (ranks %d to %d)%s%s", t->process, t->processes,
                             t->first, t->end - 1, where[0] ? ", " : "", where);
    return where[0] ? mz_err_prefix(err, "%s", where) : err->code;
}

/* Counting sort of the lanes within the process by receiving rank; the others behind each other. */
static mz_code sort_lanes(mz_transport *t, const mz_lane *lane, int64_t lanes, int64_t *outside,
                          mz_err *err) {
    exchange_scratch *s = t->scratch;
    const int32_t local = t->end - t->first;
    int64_t inside = 0;
    *outside = 0;
    memset(s->begin, 0, sizeof *s->begin * ((size_t)local + 1));
    for (int64_t i = 0; i < lanes; i++) {
        const bool from = mz_transport_holds(t, lane[i].from),
                   to = mz_transport_holds(t, lane[i].to);
        if (lane[i].bytes == 0 || (!from && !to))
            continue;
        if (from && to)
            inside += 1, s->begin[lane[i].to - t->first + 1]++;
        else
            *outside += 1;
    }
    if (!mz_grow((void **)&s->inside, &s->inside_cap, (size_t)inside, sizeof *s->inside) ||
        !mz_grow((void **)&s->outside, &s->outside_cap, (size_t)*outside, sizeof *s->outside))
        return mz_fail_nomem(err, "the lanes of an exchange");
    for (int32_t r = 0; r < local; r++)
        s->begin[r + 1] += s->begin[r];
    int64_t out = 0;
    for (int64_t i = 0; i < lanes; i++) {
        const bool from = mz_transport_holds(t, lane[i].from),
                   to = mz_transport_holds(t, lane[i].to);
        if (lane[i].bytes == 0 || (!from && !to))
            continue;
        if (from && to)
            s->inside[s->begin[lane[i].to - t->first]++] = lane[i];
        else
            s->outside[out++] = lane[i];
    }
    for (int32_t r = local; r > 0; r--)
        s->begin[r] = s->begin[r - 1];
    s->begin[0] = 0;
    return MZ_OK;
}

/* Copies to one local rank, waited for. */
static mz_code copy_to(mz_transport *t, int32_t rank, mz_err *err) {
    const exchange_scratch *s = t->scratch;
    const int64_t begin = s->begin[rank - t->first], end = s->begin[rank - t->first + 1];
    mz_kstatus status = MZ_K_OK;
    for (int64_t i = begin; status == MZ_K_OK && i < end; i++) {
        const mz_lane *l = &s->inside[i];
        status = mz_kernels_copy(t->kernels, 0, MZ_COPY_INSIDE, l->receive, l->send, l->bytes);
        t->moved.within += l->from == l->to ? 0 : (int64_t)l->bytes;
    }
    if (status == MZ_K_OK && begin < end)
        status = mz_kernels_sync(t->kernels, 0);
    return mz_kernel_code(t->kernels, status, err);
}

static mz_code copy_inside(mz_transport *t, double *seconds, double *spent, mz_err *err) {
    mz_code code = MZ_OK;
    for (int32_t r = t->first; code == MZ_OK && r < t->end; r++) {
        const double start = mz_now();
        code = copy_to(t, r, err);
        const double passed = mz_now() - start;
        *spent += passed;
        if (seconds)
            seconds[r - t->first] += passed;
    }
    return code;
}

/* Flips the sign of every 16-bit value of a lane. */
static mz_code damage_lane(mz_transport *t, const mz_lane *lane, mz_err *err) {
    unsigned char *bytes = malloc(lane->bytes);
    if (!bytes)
        return mz_fail_nomem(err, "a corrupted message");
    mz_kstatus status =
        mz_kernels_copy(t->kernels, 0, MZ_COPY_OUT, bytes, lane->receive, lane->bytes);
    if (status == MZ_K_OK)
        status = mz_kernels_sync(t->kernels, 0);
    for (size_t i = 1; i < lane->bytes; i += 2)
        bytes[i] ^= 0x80;
    if (status == MZ_K_OK)
        status = mz_kernels_copy(t->kernels, 0, MZ_COPY_IN, lane->receive, bytes, lane->bytes);
    if (status == MZ_K_OK)
        status = mz_kernels_sync(t->kernels, 0);
    free(bytes);
    return mz_kernel_code(t->kernels, status, err);
}

/* Is it one that this process received, from another rank? */
static bool arrived(const mz_transport *t, const mz_lane *lane) {
    return mz_transport_holds(t, lane->to) && lane->from != lane->to;
}

/* What this process's ranks received: lanes of rows, that is the long ones. Short ones may hold
 * numbers of rows, and what is wrong with these a check of results is not there to find. */
static mz_code damage(mz_transport *t, const mz_lane *lane, int64_t lanes, mz_err *err) {
    size_t longest = 0;
    mz_code code = MZ_OK;
    for (int64_t i = 0; i < lanes; i++)
        if (arrived(t, &lane[i]) && lane[i].bytes > longest)
            longest = lane[i].bytes;
    for (int64_t i = 0; code == MZ_OK && i < lanes; i++)
        if (arrived(t, &lane[i]) && lane[i].bytes > longest / 4)
            code = damage_lane(t, &lane[i], err);
    if (longest > 0) {
        t->corrupt = false;
        t->corrupted = true;
    }
    return code;
}

/* The same of host memory [ranks][bytes]: what came from other processes; alone, all. */
static void damage_gathered(mz_transport *t, size_t bytes, unsigned char *all) {
    for (int32_t r = 0; r < t->ranks; r++) {
        if (t->processes > 1 && mz_transport_holds(t, r))
            continue;
        for (size_t i = 1; i < bytes; i += 2)
            all[(size_t)r * bytes + i] ^= 0x80;
        t->corrupt = t->corrupt && bytes < 2;
        t->corrupted = t->corrupted || bytes >= 2;
    }
}

static mz_code exchange(mz_transport *t, const mz_lane *lane, int64_t lanes, double *seconds,
                        mz_err *err) {
    exchange_scratch *s = t->scratch;
    const double start = mz_now();
    double copies = 0;
    int64_t outside = 0;
    mz_code code = mz_kernel_code(t->kernels, mz_kernels_sync(t->kernels, 0), err);
    if (code == MZ_OK)
        code = sort_lanes(t, lane, lanes, &outside, err);
    for (int64_t i = 0; code == MZ_OK && i < outside; i++)
        if (mz_transport_holds(t, s->outside[i].from))
            t->moved.between += (int64_t)s->outside[i].bytes;
    if (code == MZ_OK && t->kind->start)
        code = t->kind->start(t, s->outside, outside, err);
    const bool started = code == MZ_OK;
    if (code == MZ_OK)
        code = copy_inside(t, seconds, &copies, err);
    if (code == MZ_OK && t->kind->finish)
        code = t->kind->finish(t, err);
    if (code == MZ_OK && t->corrupt)
        code = damage(t, lane, lanes, err);
    if (code != MZ_OK && started)
        mz_transport_abort(t); /* messages are under way that nobody will wait for */
    const double rest = (mz_now() - start - copies) / (t->end - t->first);
    for (int32_t r = 0; seconds && r < t->end - t->first; r++)
        seconds[r] += rest;
    return code;
}

mz_code mz_transport_exchange(mz_transport *t, const mz_lane *lane, int64_t lanes, double *seconds,
                              mz_err *err) {
    return exchange(t, lane, lanes, seconds, err) == MZ_OK ? MZ_OK : place(t, err);
}

mz_code mz_transport_gather(mz_transport *t, const void *mine, size_t bytes, void *all,
                            mz_err *err) {
    const size_t own = bytes * (size_t)(t->end - t->first);
    if (!t->kind->gather && own > 0)
        memcpy(all, mine, own);
    if (t->kind->gather && t->kind->gather(t, mine, own, all, err) != MZ_OK)
        return place(t, err);
    if (t->corrupt)
        damage_gathered(t, bytes, all);
    return MZ_OK;
}

mz_code mz_transport_barrier(mz_transport *t, mz_err *err) {
    return mz_transport_gather(t, NULL, 0, NULL, err);
}

int32_t mz_transport_threads(const mz_transport *t, int64_t asked) {
    const int32_t share = (int32_t)sysconf(_SC_NPROCESSORS_ONLN) / t->neighbours;
    if (asked > 0)
        return (int32_t)asked;
    return t->processes == 1 ? 0 : share < 1 ? 1 : share;
}

int32_t mz_transport_sharing(const mz_transport *t) {
    return mz_kernels_backend(t->kernels) == MZ_BACKEND_HOST ? t->neighbours : 1;
}

mz_code mz_transport_room(const mz_transport *t, double *bytes, mz_err *err) {
    size_t all = 0;
    const mz_kstatus status = mz_kernels_memory(t->kernels, &all, NULL);
    *bytes = (double)all / mz_transport_sharing(t);
    return mz_kernel_code(t->kernels, status, err);
}
