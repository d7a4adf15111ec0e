/* Messages: copies between ranks of one process, and what goes between processes. */
#include "replay/calibrate_inside.h"
#include "sim/cost/work.h"

enum { LANES_MOST = 1024, SAMPLES_MOST = 40 };

typedef struct lane_sizes {
    int64_t lanes, bytes; /* bytes: of all lanes; between processes, of each to the next */
    mz_lane *lane;
} lane_sizes;

static mz_kstatus exchange(calibration *c, const lane_sizes *s, int64_t lanes) {
    const mz_code code =
        mz_transport_exchange(c->transport, s->lane, lanes, NULL, &c->exchange_err);
    return code == MZ_OK ? MZ_K_OK : MZ_K_EFAILED;
}

static mz_code take_lanes(calibration *c, int64_t most, mz_lane **lane, mz_err *err) {
    *lane = MZ_NEW(c->arena, mz_lane, most);
    return *lane ? MZ_OK : mz_fail_nomem(err, "lanes");
}

/* ---- within a process --------------------------------------------------------------------------
 */

static mz_kstatus run_copies(calibration *c, const void *sizes, char *in, char *out) {
    const lane_sizes *s = sizes;
    const int64_t each = s->bytes / s->lanes;
    const int32_t rank = c->transport->first;
    for (int64_t i = 0; i < s->lanes; i++)
        s->lane[i] = (mz_lane){rank, rank, in + i * each, out + i * each, (size_t)each};
    return exchange(c, s, s->lanes);
}

/* Of what lies where nobody has been for long, or of rows that have just been packed. */
static mz_code sample_copies(calibration *c, mz_work work, const lane_sizes *s, mz_err *err) {
    const bool packed = work == MZ_WORK_SEND;
    double seconds = 0;
    const calibrate_call call = {.run = run_copies,
                                 .sizes = s,
                                 .in_bytes = s->bytes,
                                 .out_bytes = s->bytes,
                                 .made_bytes = packed ? s->bytes : 0,
                                 .each_rank = packed};
    const mz_code code = calibrate_time(c, &call, &seconds, err);
    if (code == MZ_OK)
        calibrate_add(c, work, (double)s->lanes, (double)s->bytes,
                      mz_work_bytes(work, s->lanes, s->bytes, 0), seconds);
    return code;
}

mz_code calibrate_copies(calibration *c, mz_err *err) {
    static const mz_work works[] = {MZ_WORK_COPY, MZ_WORK_SEND};
    static const int64_t lanes[] = {1, 16, 128, LANES_MOST, 0};
    static const int64_t bytes[] = {1 << 12, 1 << 16, 1 << 19, 1 << 22,
                                    1 << 23, 1 << 24, 1 << 26, 0};
    mz_lane *lane = NULL;
    mz_code code = take_lanes(c, LANES_MOST, &lane, err);
    for (int i = 0; code == MZ_OK && i < 2; i++) {
        code = calibrate_begin(c, works[i], SAMPLES_MOST, err);
        for (const int64_t *l = lanes; code == MZ_OK && *l; l++)
            for (const int64_t *b = bytes; code == MZ_OK && *b; b++)
                if (*b <= c->options.pool_bytes)
                    code = sample_copies(c, works[i], &(lane_sizes){*l, *b, lane}, err);
    }
    return code;
}

/* ---- between processes -------------------------------------------------------------------------
 */

/* Every process to the next one at once, the first ranks of both; alone: to itself. */
static mz_kstatus run_ring(calibration *c, const void *sizes, char *in, char *out) {
    const lane_sizes *s = sizes;
    const mz_transport *t = c->transport;
    const int32_t ranks = t->end - t->first;
    const int64_t each = s->bytes / s->lanes;
    int64_t n = 0;
    for (int32_t p = 0; p < t->processes; p++)
        for (int64_t i = 0; i < s->lanes; i++)
            s->lane[n++] = (mz_lane){p * ranks, (p + 1) % t->processes * ranks, in + i * each,
                                     out + i * each, (size_t)each};
    return exchange(c, s, n);
}

static mz_code sample_ring(calibration *c, const lane_sizes *s, mz_err *err) {
    double seconds = 0;
    const calibrate_call call = {
        .run = run_ring, .sizes = s, .in_bytes = s->bytes, .out_bytes = s->bytes};
    const mz_code code = calibrate_time(c, &call, &seconds, err);
    if (code != MZ_OK)
        return code;
    if (s->lanes == 1)
        calibrate_add(c, CALIBRATE_WIRE, 0, 1, (double)s->bytes, seconds);
    if (c->transport->processes > 1)
        calibrate_add(c, MZ_WORK_EXCHANGE, (double)s->lanes, (double)s->bytes,
                      mz_work_bytes(MZ_WORK_EXCHANGE, s->lanes, s->bytes, 0), seconds);
    return MZ_OK;
}

mz_code calibrate_wire(calibration *c, mz_err *err) {
    enum { LANES = 256, SHORTEST = 256 };
    static const int64_t lanes[] = {1, 4, 16, 64, LANES, 0};
    /* Up to what comes from short blocks: messages are read page by page of their sender. */
    static const int64_t bytes[] = {1 << 8,  1 << 12, 1 << 14, 1 << 16, 1 << 18,
                                    1 << 20, 1 << 22, 1 << 23, 0};
    mz_lane *lane = NULL;
    mz_code code = calibrate_begin(c, CALIBRATE_WIRE, SAMPLES_MOST, err);
    if (code == MZ_OK && c->transport->processes > 1)
        code = calibrate_begin(c, MZ_WORK_EXCHANGE, SAMPLES_MOST, err);
    if (code == MZ_OK)
        code = take_lanes(c, (int64_t)LANES * c->transport->processes, &lane, err);
    for (const int64_t *l = lanes; code == MZ_OK && *l; l++)
        for (const int64_t *b = bytes; code == MZ_OK && *b; b++) {
            const lane_sizes s = {*l, *b, lane};
            if (*b <= c->options.pool_bytes && *b / *l >= SHORTEST &&
                (*l == 1 || c->transport->processes > 1))
                code = sample_ring(c, &s, err);
        }
    return code;
}
