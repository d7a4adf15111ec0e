#include "traces/schema.h"

#define BIT(e) (1u << MZ_ELEM_##e)

enum {
    ANY_UNSIGNED = BIT(U8) | BIT(U16) | BIT(U32) | BIT(U64),
    ANY_INT = ANY_UNSIGNED | BIT(I8) | BIT(I16) | BIT(I32) | BIT(I64),
    SMALL_ID = BIT(U8) | BIT(U16),
    NORM = BIT(F16) | BIT(F32),
    REAL = BIT(F32) | BIT(F64),
    CALL_ROWS = 4096,
    SEQUENCE_ROWS = 2048,
    STEP_ROWS = 512
};

const mz_column mz_columns[MZ_COLUMNS] = {
    [MZ_COL_STEP] = {"/calls", "step", "1", "training step or forward pass of the call",
                     MZ_ELEM_I64, ANY_INT, CALL_ROWS},
    [MZ_COL_MICRO_BATCH] = {"/calls", "micro_batch", "1", "micro-batch within the step",
                            MZ_ELEM_I32, ANY_INT, CALL_ROWS},
    [MZ_COL_LAYER] = {"/calls", "layer", "1", "MoE layer, counted from 0", MZ_ELEM_I32, ANY_INT,
                      CALL_ROWS},
    [MZ_COL_RANK] = {"/calls", "rank", "1", "source rank that holds the tokens", MZ_ELEM_I32,
                     ANY_INT, CALL_ROWS},
    [MZ_COL_TOKEN_BEGIN] = {"/calls", "token_begin", "tokens",
                            "first token of the call on the global token axis", MZ_ELEM_I64,
                            ANY_INT, CALL_ROWS},
    [MZ_COL_TOKENS] = {"/calls", "tokens", "tokens", "tokens of the call", MZ_ELEM_I64, ANY_INT,
                       CALL_ROWS},
    [MZ_COL_PAIRS] = {"/calls", "pairs", "pairs", "(token, expert) pairs of the call", MZ_ELEM_I64,
                      ANY_INT, CALL_ROWS},
    [MZ_COL_EXPERT] = {"/pairs", "expert", "1", "routed expert of the pair, counted from 0",
                       MZ_ELEM_U16, SMALL_ID, 0},
    [MZ_COL_WEIGHT] = {"/pairs", "weight", "1", "gate weight of the pair", MZ_ELEM_F32, NORM, 0},
    [MZ_COL_HIDDEN_NORM2] = {"/pairs", "hidden_norm2", "1",
                             "squared norm of the input of the expert's down projection",
                             MZ_ELEM_F32, NORM, 0},
    [MZ_COL_ROW_PAIRS] = {"/rows", "pairs", "pairs", "experts chosen by the token in this call",
                          MZ_ELEM_U16, SMALL_ID, 0},
    [MZ_COL_GRAD_NORM2] = {"/rows", "grad_norm2", "1",
                           "squared norm of the gradient of the layer's output", MZ_ELEM_F32, NORM,
                           0},
    [MZ_COL_INPUT_NORM2] = {"/rows", "input_norm2", "1", "squared norm of the layer's input",
                            MZ_ELEM_F32, NORM, 0},
    [MZ_COL_COUNTS] = {"/", "counts", "pairs", "pairs of the call to each expert", MZ_ELEM_U32,
                       ANY_UNSIGNED, 0},
    [MZ_COL_SEQ_TOKEN_BEGIN] = {"/sequences", "token_begin", "tokens",
                                "first token of the sequence on the global token axis", MZ_ELEM_I64,
                                ANY_INT, SEQUENCE_ROWS},
    [MZ_COL_SEQ_TOKENS] = {"/sequences", "tokens", "tokens", "tokens of the sequence", MZ_ELEM_I64,
                           ANY_INT, SEQUENCE_ROWS},
    [MZ_COL_SEQ_DOMAIN] = {"/sequences", "domain", "1", "text domain of the sequence, -1 unknown",
                           MZ_ELEM_I32, ANY_INT, SEQUENCE_ROWS},
    [MZ_COL_STEPS_STEP] = {"/steps", "step", "1", "step that the row describes", MZ_ELEM_I64,
                           ANY_INT, STEP_ROWS},
    [MZ_COL_LOSS] = {"/steps", "loss", "nat/token", "training loss, NaN unknown", MZ_ELEM_F64, REAL,
                     STEP_ROWS},
    [MZ_COL_LEARNING_RATE] = {"/steps", "learning_rate", "1", "learning rate, NaN unknown",
                              MZ_ELEM_F64, REAL, STEP_ROWS},
    [MZ_COL_WALL_TIME] = {"/steps", "wall_time", "s", "duration of the step, NaN unknown",
                          MZ_ELEM_F64, REAL, STEP_ROWS},
};

const char *const mz_kind_names[2] = {"pairs", "counts"};
const char *const mz_phase_names[3] = {"train", "prefill", "decode"};
const char *const mz_step_names[3] = {"iteration", "forward", "none"};

size_t mz_elem_size(mz_elem elem) {
    static const size_t sizes[] = {0, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8};
    return sizes[elem];
}

const char *mz_elem_name(mz_elem elem) {
    static const char *const names[] = {"another type", "uint8",   "uint16",  "uint32",
                                        "uint64",       "int8",    "int16",   "int32",
                                        "int64",        "float16", "float32", "float64"};
    return names[elem];
}

bool mz_column_wanted(mz_column_id id, const mz_trace_facts *facts) {
    bool pairs = facts->kind == MZ_TRACE_PAIRS;
    switch (id) {
    case MZ_COL_EXPERT:
        return pairs;
    case MZ_COL_WEIGHT:
        return pairs && facts->has_weight;
    case MZ_COL_HIDDEN_NORM2:
        return pairs && facts->has_hidden_norm2;
    case MZ_COL_ROW_PAIRS:
        return pairs && facts->top_k == 0;
    case MZ_COL_GRAD_NORM2:
        return pairs && facts->has_grad_norm2;
    case MZ_COL_INPUT_NORM2:
        return pairs && facts->has_input_norm2;
    case MZ_COL_COUNTS:
        return !pairs;
    case MZ_COL_SEQ_TOKEN_BEGIN:
    case MZ_COL_SEQ_TOKENS:
    case MZ_COL_SEQ_DOMAIN:
        return facts->has_sequences;
    default:
        return true;
    }
}

static bool is_tail(unsigned char c) {
    return (c & 0xc0) == 0x80;
}

bool mz_text_is_clean(const char *text) {
    const unsigned char *c = (const unsigned char *)text;
    while (*c) {
        if (*c < 0x20 || *c == 0x7f)
            return false;
        int tails = *c < 0x80                 ? 0
                    : *c >= 0xc2 && *c < 0xe0 ? 1
                    : *c >= 0xe0 && *c < 0xf0 ? 2
                    : *c >= 0xf0 && *c < 0xf5 ? 3
                                              : -1;
        if (tails < 0)
            return false;
        if ((*c == 0xe0 && c[1] < 0xa0) || (*c == 0xed && c[1] > 0x9f) ||
            (*c == 0xf0 && c[1] < 0x90) || (*c == 0xf4 && c[1] > 0x8f))
            return false;
        for (int i = 1; i <= tails; i++)
            if (!is_tail(c[i]))
                return false;
        c += tails + 1;
    }
    return true;
}
