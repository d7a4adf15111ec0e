/* How fast the machine was while it was measured: the probe's product, which arithmetic binds, and
 * rows packed from memory to memory. A later run of the same two says by how much seconds of either
 * kind have grown. */
#include "replay/calibrate_inside.h"

#include "common/base/stat.h"
#include "sim/cost/work.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 4096, WIDTH = 2048, VALUE = 2, PART = ROWS * WIDTH * VALUE };
/* Parts in a pool before one comes again: more than a cache holds. */
enum { PARTS_LEAST = 8, DEVICE_CALLS = 64, PIECES = 112 };

static mz_code keep(calibrate_seconds *s, double seconds, mz_err *err) {
    if (!mz_grow((void **)&s->value, &s->cap, s->count + 1, sizeof *s->value))
        return mz_fail_nomem(err, "calibration");
    s->value[s->count++] = seconds;
    return MZ_OK;
}

/* Accelerators are done with one part before they have begun: they take many. */
static mz_kstatus run_rows(calibration *c, const void *sizes, char *in, char *out) {
    const int calls = mz_kernels_backend(c->kernels) == MZ_BACKEND_HOST ? 1 : DEVICE_CALLS;
    mz_kstatus status = MZ_K_OK;
    for (int i = 0; status == MZ_K_OK && i < calls; i++) {
        const int64_t at = (int64_t)(i % PARTS_LEAST) * PART;
        const mz_pack p = {.type = MZ_BF16,
                           .x = i == 0 ? in : c->inputs + at,
                           .hidden = WIDTH,
                           .rows = ROWS,
                           .row_pair = c->shuffled,
                           .k = CALIBRATE_PAIRS / ROWS,
                           .out = i == 0 ? out : c->results + at};
        status = mz_pack_rows(c->kernels, 0, &p);
    }
    return status;
}

mz_code calibrate_probe_product(calibration *c, mz_err *err) {
    double seconds = 0;
    mz_code code = mz_probe_run(c->probe, &seconds, err);
    if (code != MZ_OK)
        return code;
    memcpy(c->all, mz_probe_ranks(c->probe), sizeof *c->all * (size_t)c->transport->ranks);
    code = calibrate_note_lag(c, err);
    return code == MZ_OK ? keep(&c->probed, seconds, err) : code;
}

mz_code calibrate_probe_rows(calibration *c, mz_err *err) {
    double seconds = 0;
    if (c->options.pool_bytes / PART < PARTS_LEAST)
        return MZ_OK;
    const calibrate_call call = {.run = run_rows, .in_bytes = PART, .out_bytes = PART};
    const mz_code code = calibrate_sample(c, &call, &seconds, err);
    return code == MZ_OK ? keep(&c->packed, seconds, err) : code;
}

mz_code calibrate_note_lag(calibration *c, mz_err *err) {
    enum { STRETCH_MS = 30 };
    const int32_t processes = c->transport->processes, each = c->transport->ranks / processes;
    double sum = 0, most = 0;
    if (processes == 1)
        return MZ_OK;
    for (int32_t p = 0; p < processes; p++) {
        c->stretch[p] += c->all[p * each];
        sum += c->stretch[p];
        most = fmax(most, c->stretch[p]);
    }
    if (sum / processes < 1e-3 * STRETCH_MS)
        return MZ_OK;
    memset(c->stretch, 0, sizeof *c->stretch * (size_t)processes);
    return keep(&c->lag, most * processes / sum - 1, err);
}

/* As of a sample of seven rounds the fastest and the slowest are left out, so are the fastest and
 * the slowest seventh here. 0: never probed. */
static double mean_of(const calibrate_seconds *s) {
    const int64_t count = (int64_t)s->count, off = count / 7;
    return count > 0 ? mz_middle_mean(s->value, count, off > 0 ? off : count >= 3) : 0;
}

void calibrate_references(calibration *c) {
    mz_measured *m = c->measured;
    m->probe_mean_s = mean_of(&c->probed); /* sorts */
    m->rows_mean_s = mean_of(&c->packed);
    /* All wait for every lag, the longest too: none is left out. */
    m->uneven = c->lag.count > 0 ? mz_middle_mean(c->lag.value, (int64_t)c->lag.count, 0) : 0;
    m->probe_s = c->probed.count > 0 ? c->probed.value[c->probed.count / 2] : 0;
}

mz_code calibrate_pieces(calibration *c, mz_err *err) {
    mz_code code = MZ_OK;
    for (int i = 0; code == MZ_OK && i < PIECES; i++) {
        code = calibrate_probe_product(c, err);
        if (code == MZ_OK)
            code = calibrate_probe_rows(c, err);
    }
    return code;
}

/* ---- what was measured, at another speed --------------------------------------------------------
 */

/* Products, and updates that are products. */
static bool computes(int work) {
    return work >= MZ_WORK_FORWARD || work == (int)mz_work_update(MZ_RULE_MUON);
}

static void scale(mz_fit *fit, double factor) {
    for (int t = 0; t < MZ_FIT_TERMS; t++)
        fit->term[t] *= factor;
    for (int32_t i = 0; i < fit->samples; i++)
        fit->sample[i].seconds *= factor;
}

mz_code mz_calibrate_rescale(mz_measured *m, const mz_measured *now, mz_factors *factors,
                             mz_err *err) {
    /* Means of both, or where a profile has none of them medians of both. */
    const bool means = m->probe_mean_s > 0;
    const double product = means ? now->probe_mean_s / m->probe_mean_s : now->probe_s / m->probe_s;
    const double rows =
        m->rows_mean_s > 0 && now->rows_mean_s > 0 ? now->rows_mean_s / m->rows_mean_s : 1;
    if (!(product > 0 && isfinite(product) && rows > 0 && isfinite(rows)))
        return mz_fail(err, MZ_EINPUT, "no probe of the machine's speed to compare with");
    for (int work = 0; work < MZ_WORKS; work++)
        scale(&m->fit[work], computes(work) ? product : rows);
    m->call_s *= product;
    m->probe_s = now->probe_s;
    m->probe_mean_s = now->probe_mean_s;
    m->rows_mean_s = m->rows_mean_s > 0 ? now->rows_mean_s : 0;
    m->uneven = now->uneven > 0 ? now->uneven : m->uneven;
    *factors = (mz_factors){product, rows};
    return MZ_OK;
}
