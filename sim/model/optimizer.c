/* Optimizer state and update traffic per tensor.
 *
 * State is fp32. A factored second moment of an n x m matrix keeps n row and m column means, 4(n+m)
 * bytes (Shazeer and Stern, Adafactor, 2018); vectors keep a full one. SkewAdam (arXiv 2607.19058)
 * works by tier: backbone and shared experts keep momentum and a factored second moment, experts a
 * factored second moment only, routers a full second moment and no momentum.
 *
 * "adamw" is the usual mixed precision: bf16 weights with an fp32 master copy (4 + 4 + 4 bytes a
 * parameter; weights that are fp32 already need no master). All others, "adamw-bf16" too, write the
 * weights in their own type, as the SkewAdam study does.
 *
 * Temporaries of an unfused update: fp32 copies alive at once, counted in the study's code:
 * gradient, update, weights, rounding unit and noise twice; AdamW and Lion one more, Adafactor four
 * in all. Standard AdamW holds gradient, denominator and update; SGD the gradient and the update.
 */
#include "sim/model/model.h"

#include <stdio.h>
#include <string.h>

/* Numbers a gradient exists for. */
static int64_t values(const mz_tensor *tensor) {
    return tensor->trainable ? tensor->rows * tensor->cols : 0;
}

static bool is_matrix(const mz_tensor *tensor) {
    return tensor->rows > 1 && tensor->cols > 1;
}

static int64_t factored_bytes(const mz_tensor *tensor) {
    if (!is_matrix(tensor))
        return 4 * values(tensor);
    return tensor->trainable ? 4 * (tensor->rows + tensor->cols) : 0;
}

/* Gradient read, weights read and written, `state` bytes read and written. */
static double traffic(const mz_tensor *tensor, double state) {
    return 3.0 * tensor->bytes_per_value * (double)values(tensor) + 2 * state;
}

/* A factored second moment needs the gradient's row and column means before the update: the
 * gradient is read once more. */
static double factored_traffic(const mz_tensor *tensor, double state) {
    double again = is_matrix(tensor) ? (double)tensor->bytes_per_value * (double)values(tensor) : 0;
    return traffic(tensor, state) + again;
}

static int64_t adamw_bf16_state(const mz_tensor *tensor) {
    return 8 * values(tensor);
}

static double adamw_bf16_update(const mz_tensor *tensor) {
    return traffic(tensor, (double)adamw_bf16_state(tensor));
}

static int64_t adamw_state(const mz_tensor *tensor) {
    return (tensor->bytes_per_value < 4 ? 12 : 8) * values(tensor);
}

/* With a master copy the bf16 weights are only written. */
static double adamw_update(const mz_tensor *tensor) {
    double unread =
        tensor->bytes_per_value < 4 ? (double)tensor->bytes_per_value * (double)values(tensor) : 0;
    return traffic(tensor, (double)adamw_state(tensor)) - unread;
}

static int64_t skewadam_state(const mz_tensor *tensor) {
    switch (tensor->tier) {
    case MZ_TIER_EXPERT:
        return factored_bytes(tensor);
    case MZ_TIER_ROUTER:
        return 4 * values(tensor);
    case MZ_TIER_BACKBONE:
    case MZ_TIER_SHARED:
        break;
    }
    return 4 * values(tensor) + factored_bytes(tensor);
}

static double skewadam_update(const mz_tensor *tensor) {
    double state = (double)skewadam_state(tensor);
    return tensor->tier == MZ_TIER_ROUTER ? traffic(tensor, state)
                                          : factored_traffic(tensor, state);
}

static double adafactor_update(const mz_tensor *tensor) {
    return factored_traffic(tensor, (double)factored_bytes(tensor));
}

static int64_t momentum_state(const mz_tensor *tensor) {
    return 4 * values(tensor);
}

static double momentum_update(const mz_tensor *tensor) {
    return traffic(tensor, (double)momentum_state(tensor));
}

static const mz_optimizer adamw = {"adamw",
                                   "AdamW, mixed precision: fp32 master weights and two moments",
                                   adamw_state, adamw_update, 3};
static const mz_optimizer adamw_bf16 = {"adamw-bf16", "AdamW on bf16 weights: two fp32 moments",
                                        adamw_bf16_state, adamw_bf16_update, 7};
static const mz_optimizer skewadam = {"skewadam",
                                      "SkewAdam: state by tier, experts without momentum",
                                      skewadam_state, skewadam_update, 6};
static const mz_optimizer adafactor = {"adafactor",
                                       "Adafactor: factored second moment, no momentum",
                                       factored_bytes, adafactor_update, 4};
static const mz_optimizer lion = {"lion", "Lion: one fp32 momentum", momentum_state,
                                  momentum_update, 7};
static const mz_optimizer sgdm = {"sgdm", "SGD with fp32 momentum", momentum_state, momentum_update,
                                  2};

static const mz_optimizer *const table[] = {&adamw,     &adamw_bf16, &skewadam,
                                            &adafactor, &lion,       &sgdm};

enum { OPTIMIZERS = sizeof table / sizeof table[0] };

const mz_optimizer *const *mz_optimizers(int *count) {
    *count = OPTIMIZERS;
    return table;
}

mz_code mz_optimizer_find(const char *name, const mz_optimizer **optimizer, mz_err *err) {
    char text[256] = "";
    size_t used = 0;
    for (int i = 0; i < OPTIMIZERS; i++) {
        if (strcmp(table[i]->name, name) == 0) {
            *optimizer = table[i];
            return MZ_OK;
        }
        if (used < sizeof text)
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", i ? ", " : "",
                                     table[i]->name);
    }
    return mz_fail(err, MZ_EINPUT, "no optimizer \"%s\"; known are %s", name, text);
}
