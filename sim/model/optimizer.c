/* Optimizer state, traffic, products and temporaries per tensor.
 *
 * Sources: the SkewAdam study (arXiv 2607.19058, nuemaan/skewadam) for the rules as it codes them;
 * Adafactor 1804.04235, AdamW 1711.05101, Lion 2302.06675, GaLore 2403.03507, Muon (Jordan, 2024),
 * 8-bit Adam 2110.02861 as in bitsandbytes.
 *
 * State is fp32 unless said. A factored second moment of an n x m matrix keeps n row and m column
 * means, 4(n+m) bytes; vectors keep a full one. Experts stacked in one tensor are factored per
 * expert, as the study and Adafactor do for three dimensions; stacked biases count as vectors.
 *
 *   adamw      two moments; fp32 master weights unless master=none ("adamw-bf16")
 *   skewadam   backbone: momentum and factored; experts: factored; router: full second moment
 *   adafactor  factored, no momentum
 *   lion, sgdm one momentum
 *   muon       matrices: momentum, orthogonalised by Newton-Schulz; vectors, tables of words and
 *              positions, head and router: Adam. state=tabulated counts one momentum for all
 *   galore     n x m gradient as U' g V (r x r) through Adam: U, V and two r x r moments; vectors
 *              Adam. sides=one: the original's r x max(n,m), projector on the smaller side, layers'
 *              matrices only
 *   adam8bit   two 8-bit moments with an fp32 scale per block each; tensors below 4096 values fp32
 *
 * Temporaries of an unfused update are the fp32 copies alive at the write-back: the gradient (where
 * it is not fp32 already), those of the rule, and for the dithered write of bf16 weights: weights,
 * rounding unit, noise twice. This gives the study's 7 for AdamW, 6 SkewAdam and GaLore, 7 Lion, 8
 * Muon's Adam, 4 Adafactor (its write rounds to nearest: weights only). With master weights there
 * is no dither. A factored matrix has two more pairs of row and column vectors.
 *
 * Unfused traffic counts the rule's operations one by one: an operation reads each operand and
 * writes its result once; `sweeps` are these passes over fp32 values. The counts are read off the
 * rules as written, not measured. */
#include "sim/model/optimizer.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum { SMALLEST_8BIT = 4096, SCALE_BYTES = 4 };

/* What one copy needs; bytes unless said. */
typedef struct needs {
    int64_t value_state; /* divides with the values */
    int64_t row_state;   /* per row */
    int64_t whole_state; /* by every part that holds some of the copy */
    int64_t summed;      /* summed over the parts of a cut copy in every step */
    bool whole;          /* a part needs the gradient of the whole copy */
    double extra;        /* fused traffic beyond gradient, weights, and state in and out once */
    double products;     /* traffic of matrix products, fused or not */
    double sweeps;       /* unfused: passes over fp32 values */
    double flops;
    int copies;          /* unfused: fp32 copies of the rule itself */
    int64_t vectors;     /* unfused: temporaries of rows and columns */
    int64_t matrix_work; /* temporaries in any mode */
} needs;

typedef enum write_back { WRITE_DITHERED, WRITE_NEAREST, WRITE_MASTER, WRITE_FP32 } write_back;

static int64_t values(const mz_tensor *t) {
    return t->trainable ? t->rows * t->cols : 0;
}

static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static int64_t share(int64_t amount, int64_t parts) {
    return amount / parts + (amount % parts != 0);
}

/* ---- rules -------------------------------------------------------------------------------------
 */

static needs adam(const mz_tensor *t, int64_t bytes) {
    return (needs){.value_state = bytes * values(t), .sweeps = 19, .copies = 2};
}

static needs one_momentum(const mz_tensor *t, double sweeps, int copies) {
    return (needs){.value_state = 4 * values(t), .sweeps = sweeps, .copies = copies};
}

/* Adds a second moment, factored where it can be. The row and column means must be complete before
 * the update's norm can be known, and the norm before the update is applied. Plainly that is three
 * passes over the gradient; two where the norm is summed along with the means, by column and each
 * row weighted by its mean (kernels/host/update.c); one where a matrix stays in the cache. The last
 * pass of several takes the momentum where there is one. */
static void add_factored(needs *n, const mz_tensor *t, int64_t passes, bool momentum) {
    const double gradient = (double)(t->bytes_per_value * values(t));
    n->row_state = 4;
    n->whole_state = 4 * t->cols;
    n->summed = 4 * t->cols;
    n->vectors = 8 * (t->rows + t->cols);
    if (passes >= 2)
        n->extra += momentum ? 4.0 * (double)values(t) : gradient;
    if (passes >= 3)
        n->extra += gradient;
}

/* Two passes at most: the first brings the moments up to date and sums the norm. */
static void add_full(needs *n, const mz_tensor *t, int64_t passes, bool momentum) {
    n->value_state += 4 * values(t);
    if (passes >= 2)
        n->extra += (double)((momentum ? 8 : t->bytes_per_value + 4) * values(t));
}

static needs skewadam(const mz_optimizer_options *o, const mz_tensor *t) {
    bool momentum = true, factored = true;
    if (t->tier == MZ_TIER_EXPERT || (t->tier == MZ_TIER_SHARED && o->shared))
        momentum = o->experts || o->uniform;
    if (t->tier == MZ_TIER_ROUTER) {
        momentum = o->router == 2 || o->uniform;
        factored = o->router > 0 || o->uniform;
    }
    factored = factored && !t->vector;
    needs n = {.copies = 1, .sweeps = (factored ? 15 : 19) + (momentum ? 5 : 0)};
    if (momentum)
        n.value_state = 4 * values(t);
    if (factored)
        add_factored(&n, t, o->sweeps, momentum);
    else
        add_full(&n, t, o->sweeps, momentum);
    return n;
}

static needs adafactor(const mz_optimizer_options *o, const mz_tensor *t) {
    needs n = {.copies = 2, .sweeps = 17};
    if (t->vector)
        add_full(&n, t, o->sweeps, false);
    else
        add_factored(&n, t, o->sweeps, false);
    return n;
}

/* Newton-Schulz on X of n x m, n <= m, in bf16: A = XX', B = bA + cA^2, X = aX + BX. Products 2nnm,
 * 2nnn, 2nnm; memory X in, A out; A in, B out; B and X in, X out. Held: X twice, A, A^2, B. */
static needs muon(const mz_optimizer_options *o, const mz_tensor *t) {
    const bool adam_branch = t->vector || t->role != MZ_ROLE_MAP || t->tier == MZ_TIER_ROUTER;
    if (adam_branch)
        return (needs){.value_state = (o->state ? 4 : 8) * values(t), .sweeps = 21, .copies = 3};
    const int64_t small = smaller(t->rows, t->cols), large = larger(t->rows, t->cols);
    const double n = (double)small, m = (double)large, times = (double)o->iterations;
    return (needs){.value_state = 4 * values(t),
                   .whole = true,
                   .extra = 4 * n * m,
                   .products = times * (6 * n * m + 8 * n * n),
                   .sweeps = 8,
                   .flops = times * (4 * n * n * m + 2 * n * n * n),
                   .copies = 1,
                   .matrix_work = 4 * small * large + 6 * small * small};
}

/* The projectors are fixed: read down and up instead of read and written. Their computation (an
 * SVD, once in the study, every some hundred steps in the original) is not counted. */
static needs galore(const mz_optimizer_options *o, const mz_tensor *t) {
    if (t->vector || (o->sides && t->role != MZ_ROLE_MAP))
        return adam(t, 8);
    const int64_t r = smaller(o->rank, smaller(t->rows, t->cols));
    const double n = (double)t->rows, m = (double)t->cols, k = (double)r;
    needs need = {.sweeps = 2,
                  .flops = 4 * k * n * m,
                  .copies = 1,
                  .matrix_work = 4 * r * (larger(t->rows, t->cols) + r)};
    if (!o->sides) {
        need.row_state = 4 * r;
        need.whole_state = 4 * r * t->cols + 8 * r * r;
        need.summed = 4 * r * r;
        need.flops += 2 * k * k * (n + m);
    } else if (t->rows >= t->cols) { /* the projector belongs to the smaller side */
        need.row_state = 8 * r;
        need.whole_state = 4 * r * t->cols;
    } else {
        need.row_state = 4 * r;
        need.whole_state = 8 * r * t->cols;
        need.summed = 4 * r * t->cols;
    }
    return need;
}

static needs adam8bit(const mz_optimizer_options *o, const mz_tensor *t) {
    const int64_t whole = values(t) * (t->stacked ? t->count : 1);
    if (whole < SMALLEST_8BIT || (o->embedding && t->role == MZ_ROLE_EMBEDDING))
        return (needs){.value_state = 8 * values(t)};
    return (needs){.value_state = 2 * values(t) + 2 * SCALE_BYTES * share(values(t), o->block)};
}

static needs needs_of(const mz_optimizer *optimizer, const mz_tensor *t) {
    const mz_optimizer_options *o = &optimizer->options;
    switch (optimizer->rule) {
    case MZ_RULE_ADAMW:
        return adam(t, o->moments ? 4 : 8);
    case MZ_RULE_SKEWADAM:
        return skewadam(o, t);
    case MZ_RULE_ADAFACTOR:
        return adafactor(o, t);
    case MZ_RULE_LION:
        return one_momentum(t, 12, 2);
    case MZ_RULE_MUON:
        return muon(o, t);
    case MZ_RULE_GALORE:
        return galore(o, t);
    case MZ_RULE_ADAM8BIT:
        return adam8bit(o, t);
    case MZ_RULE_SGDM:
        break;
    }
    return one_momentum(t, 5, 0);
}

/* ---- what all rules share ----------------------------------------------------------------------
 */

static write_back write_of(const mz_optimizer *optimizer, const mz_tensor *t) {
    if (t->bytes_per_value >= 4)
        return WRITE_FP32;
    if (optimizer->options.master)
        return WRITE_MASTER;
    return optimizer->rule == MZ_RULE_ADAFACTOR || optimizer->rule == MZ_RULE_SGDM ? WRITE_NEAREST
                                                                                   : WRITE_DITHERED;
}

/* Per value: the gradient to fp32, decay of the weights, the write-back. Dithered: weights to fp32,
 * the update added, |p|, times 2^-7, noise, less a half, times the unit, added, back. */
static double common_bytes(write_back write, double b) {
    switch (write) {
    case WRITE_DITHERED:
        return (b + 4) + 2 * b + (2 * b + 72);
    case WRITE_NEAREST:
        return (b + 4) + 2 * b + (2 * b + 20);
    case WRITE_MASTER:
        return (b + 4) + 8 + 12 + (4 + b);
    case WRITE_FP32:
        break;
    }
    return 2 * b + 12;
}

/* fp32 copies beside the rule's own: gradient; weights, unit, noise twice. */
static int common_copies(write_back write) {
    switch (write) {
    case WRITE_DITHERED:
        return 5;
    case WRITE_NEAREST:
        return 2;
    case WRITE_MASTER:
        return 1;
    case WRITE_FP32:
        break;
    }
    return 0;
}

/* How `copies` copies lie in `parts` pieces: the fullest touches `touched` copies, of which `cut`
 * are not wholly its own. With a/b = copies/parts in lowest terms, piece k covers [ka/b, (k+1)a/b);
 * the remainder of ka by b takes every value, and b - 1 makes it touch most. With b = 2 one of its
 * ends lies between copies. */
typedef struct piece {
    double copies;
    int64_t touched, cut;
} piece;

static piece piece_of(int64_t copies, int64_t parts) {
    int64_t divisor = copies, rest = parts;
    while (rest) {
        int64_t next = divisor % rest;
        divisor = rest;
        rest = next;
    }
    const int64_t a = copies / divisor, b = parts / divisor, touched = (a + 2 * b - 2) / b;
    const int64_t broken_ends = b == 1 ? 0 : b == 2 ? 1 : 2;
    return (piece){(double)copies / (double)parts, touched, smaller(touched, broken_ends)};
}

static double fused_bytes(const needs *n, const mz_tensor *t, write_back write, piece p) {
    const double b = t->bytes_per_value, v = (double)values(t);
    const double rows = (double)(n->row_state * t->rows);
    const double once = (write == WRITE_MASTER ? 2 : 3) * b * v; /* master: weights only written */
    return p.copies * (once + 2 * ((double)n->value_state + rows) + n->extra) +
           2 * (double)p.touched * (double)n->whole_state;
}

static double unfused_bytes(const needs *n, const mz_tensor *t, write_back write, piece p) {
    const double v = (double)values(t);
    return p.copies * v * (common_bytes(write, t->bytes_per_value) + 4 * n->sweeps) +
           2 * p.copies * (double)(n->row_state * t->rows) +
           2 * (double)p.touched * (double)n->whole_state;
}

static int64_t temporaries(const needs *n, const mz_tensor *t, write_back write, piece p,
                           int64_t held, mz_temporaries how) {
    if (how == MZ_TEMPORARIES_FUSED)
        return n->matrix_work;
    int64_t length = t->stacked ? held : smaller(held, values(t));
    if (how == MZ_TEMPORARIES_CHUNKED)
        length = smaller(length, MZ_UPDATE_CHUNK);
    const int gradient = write != WRITE_FP32;
    const int64_t vectors = n->vectors * (t->stacked ? p.touched : 1);
    return larger(4 * length * (n->copies + common_copies(write)) + vectors,
                  4 * length * gradient + n->matrix_work);
}

mz_update_cost mz_optimizer_update(const mz_optimizer *optimizer, const mz_tensor *tensor,
                                   int64_t copies, int64_t parts, mz_temporaries how) {
    if (!tensor->trainable)
        return (mz_update_cost){0};
    const write_back write = write_of(optimizer, tensor);
    const piece p = piece_of(copies, parts);
    needs n = needs_of(optimizer, tensor);
    if (write == WRITE_MASTER)
        n.value_state += 4 * values(tensor);
    mz_update_cost u = {.values = share(copies * values(tensor), parts)};
    u.state_bytes = share(copies * n.value_state, parts) +
                    n.row_state * share(copies * tensor->rows, parts) + n.whole_state * p.touched;
    u.replicated_bytes = n.whole_state * p.cut;
    u.flops = (n.whole ? (double)p.touched : p.copies) * n.flops;
    u.exchange_bytes = (double)(n.summed * p.cut);
    if (n.whole)
        u.exchange_bytes += 2 * (double)(p.touched * values(tensor) - u.values);
    /* The library's 8-bit update is one kernel. */
    if (optimizer->rule == MZ_RULE_ADAM8BIT)
        how = MZ_TEMPORARIES_FUSED;
    u.traffic_bytes = how == MZ_TEMPORARIES_FUSED ? fused_bytes(&n, tensor, write, p)
                                                  : unfused_bytes(&n, tensor, write, p);
    u.traffic_bytes += (n.whole ? (double)p.touched : p.copies) * n.products;
    u.temporary_bytes = temporaries(&n, tensor, write, p, u.values, how);
    return u;
}

int64_t mz_optimizer_state_bytes(const mz_optimizer *optimizer, const mz_tensor *tensor) {
    return mz_optimizer_update(optimizer, tensor, 1, 1, MZ_TEMPORARIES_FUSED).state_bytes;
}

/* ---- the table ---------------------------------------------------------------------------------
 */

#define AT(field) offsetof(mz_optimizer_options, field)
#define MASTER(dflt)                                                                               \
    { "master", 0, MZ_OPT_ENUM, AT(master), dflt, "none|fp32", "fp32 copy of bf16 weights" }

static const mz_opt adamw_options[] = {
    MASTER("fp32"),
    {"moments", 0, MZ_OPT_ENUM, AT(moments), "fp32", "fp32|bf16", "type of the two moments"},
};
static const mz_opt adamw_bf16_options[] = {
    MASTER("none"),
    {"moments", 0, MZ_OPT_ENUM, AT(moments), "fp32", "fp32|bf16", "type of the two moments"},
};
static const mz_opt skewadam_options[] = {
    MASTER("none"),
    {"experts", 0, MZ_OPT_ENUM, AT(experts), "factored", "factored|momentum",
     "experts: factored second moment, or momentum too"},
    {"router", 0, MZ_OPT_ENUM, AT(router), "full", "full|factored|momentum",
     "router: full, factored, or factored with momentum"},
    {"shared", 0, MZ_OPT_ENUM, AT(shared), "backbone", "backbone|experts",
     "tier that shared experts are treated as"},
    {"uniform", 0, MZ_OPT_FLAG, AT(uniform), "no", NULL,
     "momentum and factored second moment in every tier"},
    {"sweeps", 0, MZ_OPT_INT, AT(sweeps), "2", "N",
     "passes of a fused update over the gradient that reach memory", 1, 3},
};
static const mz_opt adafactor_options[] = {
    MASTER("none"),
    {"sweeps", 0, MZ_OPT_INT, AT(sweeps), "2", "N",
     "passes of a fused update over the gradient that reach memory", 1, 3},
};
static const mz_opt plain_options[] = {MASTER("none")};
static const mz_opt muon_options[] = {
    MASTER("none"),
    {"state", 0, MZ_OPT_ENUM, AT(state), "coded", "coded|tabulated",
     "Adam's two moments where Adam is used, or one for every value"},
    {"iterations", 0, MZ_OPT_INT, AT(iterations), "5", "N", "Newton-Schulz iterations", 1, 100},
};
static const mz_opt galore_options[] = {
    MASTER("none"),
    {"rank", 0, MZ_OPT_INT, AT(rank), "128", "R", "rank of the projection", 1, 1 << 20},
    {"sides", 0, MZ_OPT_ENUM, AT(sides), "two", "two|one",
     "project both sides of every matrix, or one of the layers' matrices"},
};
static const mz_opt adam8bit_options[] = {
    MASTER("none"),
    {"block", 0, MZ_OPT_INT, AT(block), "256", "N", "values that share a scale", 1, 1 << 20},
    {"embedding", 0, MZ_OPT_ENUM, AT(embedding), "8bit", "8bit|fp32", "moments of the embedding"},
};

#define OPTIONS(list) .table = list, .table_count = sizeof list / sizeof list[0]

static const mz_optimizer adamw = {
    .name = "adamw",
    .rule = MZ_RULE_ADAMW,
    .summary = "AdamW, mixed precision: fp32 master weights and two moments",
    OPTIONS(adamw_options),
    .options = {.master = 1}};
static const mz_optimizer adamw_bf16 = {.name = "adamw-bf16",
                                        .rule = MZ_RULE_ADAMW,
                                        .summary = "AdamW on bf16 weights: two fp32 moments",
                                        OPTIONS(adamw_bf16_options)};
static const mz_optimizer skewadam_row = {.name = "skewadam",
                                          .rule = MZ_RULE_SKEWADAM,
                                          .summary =
                                              "SkewAdam: state by tier, experts without momentum",
                                          OPTIONS(skewadam_options),
                                          .options = {.sweeps = 2}};
static const mz_optimizer adafactor_row = {.name = "adafactor",
                                           .rule = MZ_RULE_ADAFACTOR,
                                           .summary =
                                               "Adafactor: factored second moment, no momentum",
                                           OPTIONS(adafactor_options),
                                           .options = {.sweeps = 2}};
static const mz_optimizer lion = {.name = "lion",
                                  .rule = MZ_RULE_LION,
                                  .summary = "Lion: one fp32 momentum",
                                  OPTIONS(plain_options)};
static const mz_optimizer muon_row = {
    .name = "muon",
    .rule = MZ_RULE_MUON,
    .summary = "Muon: orthogonalised momentum; Adam for tables, head, router, vectors",
    OPTIONS(muon_options),
    .options = {.iterations = 5}};
static const mz_optimizer galore_row = {.name = "galore",
                                        .rule = MZ_RULE_GALORE,
                                        .summary = "GaLore: Adam on projected gradients",
                                        OPTIONS(galore_options),
                                        .options = {.rank = 128}};
static const mz_optimizer adam8bit_row = {.name = "adam8bit",
                                          .rule = MZ_RULE_ADAM8BIT,
                                          .summary = "Adam with two 8-bit moments and block scales",
                                          OPTIONS(adam8bit_options),
                                          .options = {.block = 256}};
static const mz_optimizer sgdm = {.name = "sgdm",
                                  .rule = MZ_RULE_SGDM,
                                  .summary = "SGD with fp32 momentum",
                                  OPTIONS(plain_options)};

static const mz_optimizer *const table[] = {&adamw,         &adamw_bf16,   &skewadam_row,
                                            &adafactor_row, &lion,         &muon_row,
                                            &galore_row,    &adam8bit_row, &sgdm};

enum { OPTIMIZERS = sizeof table / sizeof table[0] };

const mz_optimizer *const *mz_optimizers(int *count) {
    *count = OPTIMIZERS;
    return table;
}

static mz_code unknown(const char *name, mz_err *err) {
    const char *names[OPTIMIZERS];
    char list[256] = "";
    size_t used = 0;
    for (int i = 0; i < OPTIMIZERS; i++) {
        names[i] = table[i]->name;
        if (used < sizeof list)
            used +=
                (size_t)snprintf(list + used, sizeof list - used, "%s%s", i ? ", " : "", names[i]);
    }
    const char *near = mz_nearest(name, names, OPTIMIZERS);
    if (near)
        return mz_fail(err, MZ_EINPUT, "unknown optimizer \"%s\"; did you mean \"%s\"?", name,
                       near);
    return mz_fail(err, MZ_EINPUT, "unknown optimizer \"%s\"; known are %s", name, list);
}

mz_code mz_optimizer_parse(const char *text, mz_optimizer *optimizer, mz_err *err) {
    char copy[sizeof optimizer->name], owner[sizeof optimizer->name + 16], *options;
    if (snprintf(copy, sizeof copy, "%s", text) >= (int)sizeof copy)
        return mz_fail(err, MZ_EINPUT, "optimizer \"%.40s...\": longer than %zu letters", text,
                       sizeof copy - 1);
    mz_code code = mz_opt_split_name(copy, "optimizer", &options, err);
    if (code)
        return code;
    for (int i = 0; i < OPTIMIZERS; i++) {
        if (strcmp(table[i]->name, copy) != 0)
            continue;
        *optimizer = *table[i];
        snprintf(optimizer->name, sizeof optimizer->name, "%s", text);
        snprintf(owner, sizeof owner, "optimizer %s", table[i]->name);
        return mz_opt_parse_list(optimizer->table, optimizer->table_count, owner, options,
                                 &optimizer->options, err);
    }
    return unknown(copy, err);
}
