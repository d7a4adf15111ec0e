/* One process of an MPI job that exchanges random lanes and compares with what everybody knows was
 * sent. Arguments: lib_dir ranks [die|hang|leave|big|many PROCESS]. Exit code 0: everything
 * arrived. */
#include "common/base/log.h"
#include "common/base/rng.h"
#include "replay/transport.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ROUNDS = 20, LANES = 300, MOST = 40000 };

static volatile sig_atomic_t stop_requested;

static void request_stop(int signal_number) {
    (void)signal_number;
    stop_requested = 1;
}

static unsigned char byte_of(int round, int lane, size_t at) {
    return (unsigned char)(mz_rng_stream((uint64_t)round, (uint64_t)lane, at / 8, 5) >>
                           (8 * (at % 8)));
}

typedef struct area {
    unsigned char *send, *receive;
    mz_lane lane[LANES];
} area;

static int local(const mz_transport *t, int32_t rank) {
    return rank >= t->first && rank < t->end;
}

/* Lanes that this process has an end of; sizes around the limit of short ones, some empty. */
static int64_t make_lanes(const mz_transport *t, area *a, int round, int *number) {
    mz_rng rng = mz_rng_make(3, (uint64_t)round);
    const uint64_t some = round % 4 == 3 ? 2 : (uint64_t)t->ranks; /* nothing for most */
    int64_t lanes = 0;
    for (int i = 0; i < LANES; i++) {
        const int32_t from = (int32_t)mz_rng_below(&rng, some);
        const int32_t to = (int32_t)mz_rng_below(&rng, some);
        const size_t bytes = i % 7 ? (size_t)mz_rng_below(&rng, i % 3 ? 600 : MOST) : 0;
        if (!local(t, from) && !local(t, to))
            continue;
        unsigned char *send = a->send + (size_t)i * MOST, *receive = a->receive + (size_t)i * MOST;
        for (size_t b = 0; local(t, from) && b < bytes; b++)
            send[b] = byte_of(round, i, b);
        number[lanes] = i;
        a->lane[lanes++] =
            (mz_lane){from, to, local(t, from) ? send : NULL, local(t, to) ? receive : NULL, bytes};
    }
    return lanes;
}

static int compare(const mz_transport *t, const area *a, int64_t lanes, const int *number,
                   int round) {
    int wrong = 0;
    for (int64_t i = 0; i < lanes; i++)
        for (size_t b = 0; local(t, a->lane[i].to) && b < a->lane[i].bytes; b++)
            wrong += ((unsigned char *)a->lane[i].receive)[b] != byte_of(round, number[i], b);
    return wrong;
}

static mz_code rounds(mz_transport *t, area *a, const char *fault, mz_err *err) {
    static int number[LANES];
    double seconds[64];
    for (int round = 0; round < ROUNDS; round++) {
        if (fault && round == ROUNDS / 2 && strcmp(fault, "die") == 0)
            raise(SIGKILL);
        if (fault && round == ROUNDS / 2 && strcmp(fault, "hang") == 0)
            raise(SIGSTOP);
        if (fault && round == ROUNDS / 2 && strcmp(fault, "leave") == 0)
            return mz_fail(err, MZ_EINTERNAL, "this process leaves");
        const int64_t lanes = make_lanes(t, a, round, number);
        if (lanes == 0)
            continue; /* an exchange may be left out by who has no part in it */
        t->doing = "dispatch";
        t->layer = round;
        mz_code code = mz_transport_exchange(t, a->lane, lanes, seconds, err);
        if (code != MZ_OK)
            return code;
        if (compare(t, a, lanes, number, round) > 0)
            return mz_fail(err, MZ_ECHECK, "wrong bytes in round %d", round);
    }
    return MZ_OK;
}

/* A lane longer than the pieces it is cut into, both ways. */
static mz_code big(mz_transport *t, mz_err *err) {
    const size_t bytes = ((size_t)150 << 20) + 13;
    unsigned char *send = malloc(bytes), *receive = calloc(1, bytes);
    if (!send || !receive)
        return mz_fail_nomem(err, "a long lane");
    memset(send, 40 + t->process, bytes);
    send[bytes - 1] = 99;
    const int32_t last = t->ranks - 1;
    const mz_lane lane[] = {{0, last, send, receive, bytes}, {last, 0, send, receive, bytes}};
    mz_code code = mz_transport_exchange(t, lane, 2, NULL, err);
    if (code == MZ_OK && (t->process == 0 || t->process == t->processes - 1))
        for (size_t i = 0; i < bytes && code == MZ_OK; i++)
            if (receive[i] != (i + 1 == bytes ? 99 : 40 + t->processes - 1 - t->process))
                code = mz_fail(err, MZ_ECHECK, "wrong byte %zu of a long lane", i);
    free(send);
    free(receive);
    return code;
}

/* So many messages at once that MPI keeps some of what tells that they have arrived until it is
 * called again: who then works for long without it must not be waited for. */
static mz_code many(mz_transport *t, mz_err *err) {
    enum { MESSAGES = 400, BYTES = 64 << 10, PAUSE_MS = 1500 };
    unsigned char *send = calloc(MESSAGES, BYTES), *receive = calloc(MESSAGES, BYTES);
    mz_lane *lane = calloc(2 * MESSAGES, sizeof *lane);
    const int32_t last = t->ranks - 1;
    mz_code code = send && receive && lane ? MZ_OK : mz_fail_nomem(err, "many lanes");
    for (size_t i = 0; code == MZ_OK && i < MESSAGES; i++) {
        lane[2 * i] = (mz_lane){0, last, send + i * BYTES, receive + i * BYTES, BYTES};
        lane[2 * i + 1] = (mz_lane){last, 0, send + i * BYTES, receive + i * BYTES, BYTES};
    }
    int slow = 0; /* rounds; the first one is not timed, one may be somebody else's doing */
    for (int round = 0; code == MZ_OK && round < 6; round++) {
        code = mz_transport_barrier(t, err);
        const double start = mz_now();
        if (code == MZ_OK)
            code = mz_transport_exchange(t, lane, 2 * MESSAGES, NULL, err);
        const double took = mz_now() - start;
        slow += round > 0 && took > 0.9e-3 * PAUSE_MS;
        if (code == MZ_OK && slow > 1)
            code = mz_fail(err, MZ_ECHECK, "round %d took %.3f s: another's pause", round, took);
        if (t->process == round % 2)
            usleep(1000 * PAUSE_MS);
    }
    free(send);
    free(receive);
    free(lane);
    return code;
}

static mz_code gather(mz_transport *t, mz_err *err) {
    int32_t mine[64], all[64];
    for (int32_t r = t->first; r < t->end; r++)
        mine[r - t->first] = 7 * r + 1;
    mz_code code = mz_transport_gather(t, mine, sizeof mine[0], all, err);
    for (int32_t r = 0; code == MZ_OK && r < t->ranks; r++)
        if (all[r] != 7 * r + 1)
            code = mz_fail(err, MZ_ECHECK, "gather: rank %d", r);
    return code == MZ_OK ? mz_transport_barrier(t, err) : code;
}

/* What all processes moved; a gather counts by rank, so each rank reports its share. */
static mz_code report(mz_transport *t, mz_err *err) {
    int64_t mine[64] = {0}, all[64], sum = 0;
    mine[0] = t->moved.within + t->moved.between;
    mz_code code = mz_transport_gather(t, mine, sizeof mine[0], all, err);
    for (int32_t r = 0; code == MZ_OK && r < t->ranks; r++)
        sum += all[r];
    if (code == MZ_OK && t->process == 0)
        printf("%d processes, %lld bytes\n", t->processes, (long long)sum);
    return code;
}

static mz_code work(mz_transport *t, mz_kernels *kernels, const char *fault, mz_err *err) {
    area *a = calloc(1, sizeof *a);
    a->send = malloc((size_t)LANES * MOST);
    a->receive = malloc((size_t)LANES * MOST);
    mz_code code = mz_transport_attach(t, kernels, err);
    if (code == MZ_OK)
        code = gather(t, err);
    if (code == MZ_OK)
        code = fault && strcmp(fault, "big") == 0    ? big(t, err)
               : fault && strcmp(fault, "many") == 0 ? many(t, err)
                                                     : rounds(t, a, fault, err);
    if (code == MZ_OK)
        code = report(t, err);
    free(a->send);
    free(a->receive);
    free(a);
    return code;
}

int main(int argc, char **argv) {
    struct sigaction action = {.sa_handler = request_stop, .sa_flags = SA_RESETHAND};
    sigaction(SIGTERM, &action, NULL);
    const mz_kernels_options device = {.backend = MZ_BACKEND_HOST, .threads = 1, .streams = 1};
    const mz_transport_options options = {.name = "mpi",
                                          .ranks = atoi(argv[2]),
                                          .timeout_s = 4,
                                          .lib_dir = argv[1],
                                          .stop = &stop_requested};
    mz_kernels *kernels = NULL;
    mz_transport *t = NULL;
    mz_err err;
    mz_code code = mz_transport_open(&options, &t, &err);
    if (code == MZ_OK && mz_kernels_open(&device, &kernels, NULL, 0) == MZ_K_OK) {
        const char *whole = argc == 4 ? argv[3] : NULL; /* of all processes; else a fault of one */
        code = work(t, kernels, argc > 4 && atoi(argv[4]) == t->process ? argv[3] : whole, &err);
    }
    if (code != MZ_OK) {
        fprintf(stderr, "peer: %s\n", err.msg);
        mz_transport_abort(t);
    }
    mz_transport_close(&t);
    mz_kernels_close(&kernels);
    return mz_exit_code(code);
}
