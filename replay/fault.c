/* Faults that tests ask for. */
#include "replay/run.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static bool take_number(const char **text, int64_t *value) {
    char *end = NULL;
    if (**text < '0' || **text > '9')
        return false;
    *value = strtoll(*text, &end, 10);
    *text = end;
    return *value < INT32_MAX;
}

static bool take_colon(const char **text) {
    const bool there = **text == ':';
    *text += there;
    return there;
}

static bool take_word(const char **text, const char *word) {
    const size_t length = strlen(word);
    const bool there = strncmp(*text, word, length) == 0 && (*text)[length] == ':';
    *text += there ? length + 1 : 0;
    return there;
}

static bool take_phase(const char **text, mz_phase *phase) {
    for (int p = 0; p < MZ_PHASES; p++)
        if (take_word(text, mz_phase_name((mz_phase)p))) {
            *phase = (mz_phase)p;
            return true;
        }
    return false;
}

/* Phases in which something comes from other ranks, and the optimizer's: its updates are done
 * twice. */
static bool can_corrupt(mz_phase phase) {
    switch (phase) {
    case MZ_PHASE_COUNT_EXCHANGE:
    case MZ_PHASE_WEIGHT_MOVE:
    case MZ_PHASE_DISPATCH:
    case MZ_PHASE_COMBINE:
    case MZ_PHASE_BACKWARD_DISPATCH:
    case MZ_PHASE_BACKWARD_COMBINE:
    case MZ_PHASE_REPLICA_REDUCE:
    case MZ_PHASE_GRADIENT_REDUCE:
    case MZ_PHASE_OPTIMIZER:
        return true;
    default:
        return false;
    }
}

static bool take_fault(const char *text, mz_fault *fault) {
    int64_t rank = 0;
    if (take_word(&text, "oom")) {
        fault->kind = MZ_FAULT_MEMORY;
        if (!take_number(&text, &fault->step) || fault->step < 1 || !take_colon(&text) ||
            !take_number(&text, &rank))
            return false;
    } else {
        fault->kind = take_word(&text, "kill")      ? MZ_FAULT_KILL
                      : take_word(&text, "hang")    ? MZ_FAULT_HANG
                      : take_word(&text, "corrupt") ? MZ_FAULT_CORRUPT
                                                    : MZ_FAULT_NONE;
        if (fault->kind == MZ_FAULT_NONE || !take_phase(&text, &fault->phase) ||
            !take_number(&text, &rank) || !take_colon(&text) || !take_number(&text, &fault->step))
            return false;
    }
    fault->rank = (int32_t)rank;
    return *text == 0;
}

mz_code mz_fault_parse(const char *text, mz_fault *fault, mz_err *err) {
    *fault = (mz_fault){.kind = MZ_FAULT_NONE};
    if (!text || !*text)
        return MZ_OK;
    if (take_fault(text, fault)) {
        if (fault->kind != MZ_FAULT_CORRUPT || can_corrupt(fault->phase))
            return MZ_OK;
        return mz_fail(err, MZ_EINPUT,
                       "MIZAN_REPLAY_FAULT=%s: nothing travels in %s; corrupt takes "
                       "count_exchange, weight_move, dispatch, combine, backward_dispatch, "
                       "backward_combine, replica_reduce, gradient_reduce or optimizer",
                       text, mz_phase_name(fault->phase));
    }
    return mz_fail(err, MZ_EINPUT,
                   "MIZAN_REPLAY_FAULT=%s: not kill, hang or corrupt:PHASE:RANK:STEP, nor "
                   "oom:N:RANK",
                   text);
}
