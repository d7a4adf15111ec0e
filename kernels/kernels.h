/* libmizan-kernels: the operations of an MoE layer with a budgeted backward, its routers and its
 * optimizers, on the host or on a CUDA device, behind one interface. Self-contained: nothing else
 * to include, C11 and C++.
 *
 * Contexts. mz_kernels_open gives a context for one backend and device; every operation takes it,
 * a stream, and one argument struct. "Context memory" is what mz_kernels_alloc returns: host memory
 * of the host backend, device memory of the CUDA one. All pointers in arguments are context memory
 * unless marked (host). Structs, and arrays marked (host), are read before the call returns.
 * Memory: no operation allocates, but for OpenBLAS, which maps buffers of its own (128 MiB of
 * address space a thread) in the first product of a process on the host, and cannot say so where
 * there is no room for them. Where an operation needs scratch, it has a `..._workspace` twin that
 * returns its bytes for the same arguments (0 for sizes that are refused); pass that many bytes,
 * 256-byte aligned (on the host 16), as `workspace`; for 0 bytes NULL will do. Scratch is free for
 * other use once the operation has completed on its stream. Streams. Operations of one stream run
 * in order; the CUDA backend enqueues and returns, the host backend has done the work when the call
 * returns (its streams are numbers). No operation waits for the device, and none copies sizes back
 * to the host: row counts that only the device knows are read there (mz_groups.begin); the host
 * passes upper bounds. Shapes. Matrices are row-major; sizes, strides and offsets are 64-bit
 * elements. Weights of a product are [out][in], as checkpoints have them. H hidden size, I expert
 * intermediate size, T tokens, k pairs per token, E experts; a pair is one (token, expert) choice,
 * numbered token by token, and `rows` are pairs in the order of a buffer. Numbers. MZ_F32 or
 * MZ_BF16 storage; sums are fp32 (trees fixed by the shape, so results do not depend on threads or
 * scheduling). bf16 results are rounded to nearest even unless an optimizer is told otherwise.
 * Alignment: rows start at multiples of 16 bytes (of one element on the host). Fields that are not
 * set should be 0: a struct that is zeroed first means the defaults where a comment names none, but
 * `scale` and `update_scale`, factors, must then be set to 1, and an optimizer's `eps` above 0
 * where a second moment may be 0: without it an expert that nobody chose divides 0 by 0. Its betas
 * are below 1. Errors: MZ_K_EINVAL says which argument; mz_kernels_error(context) is one line. An
 * asynchronous device error surfaces at mz_kernels_sync. After MZ_K_EFAILED a context can only be
 * closed. Checked: a context, an argument struct or an array that is needed and NULL; negative
 * sizes, and those whose product no memory holds; types, kinds, streams; groups.begin where the
 * host can read it; the alignment of scratch. A refused call writes nothing. Without a context the
 * status is MZ_K_EINVAL and mz_kernels_error(NULL) a line. Not checked, the caller's word: that an
 * array is as long as its comment says and holds the type named, its alignment, and what index
 * arrays contain, which a device would have to be waited for: order, begin, token_begin, row_pair,
 * token, position, segments and a router backward's expert must stay within what they index
 * (mz_group_pairs alone leaves out experts that do not exist, and a quota may be anything). Outputs
 * overlap neither inputs nor each other unless a comment says so. Infinity and NaN are values: they
 * spread to the results that depend on them, and never decide where memory is touched. Scores alone
 * are finite: the largest number there is instead. Threads: a context belongs to one thread at a
 * time; contexts are independent. Calls make the context's device the thread's current one (CUDA),
 * and leave it so. */
#ifndef MIZAN_KERNELS_KERNELS_H
#define MIZAN_KERNELS_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MZ_KERNELS_VERSION 1

typedef enum mz_kstatus {
    MZ_K_OK = 0,
    MZ_K_EINVAL = 2,    /* an argument; nothing was enqueued */
    MZ_K_EHARDWARE = 3, /* no such device, driver or library */
    MZ_K_EFAILED = 4,   /* the device reported an error */
    MZ_K_ENOMEM = 5
} mz_kstatus;

typedef enum mz_backend { MZ_BACKEND_HOST, MZ_BACKEND_CUDA } mz_backend;
typedef enum mz_dtype { MZ_F32, MZ_BF16 } mz_dtype;

/* ---- contexts, memory, streams ------------------------------------------------------------------
 */

typedef struct mz_kernels mz_kernels;
typedef int32_t mz_kstream; /* 0 .. streams-1 of the context */

typedef struct mz_kernels_options {
    mz_backend backend;
    int32_t device;  /* CUDA ordinal */
    int32_t threads; /* host, at most 1024; 0: as many as this process may use processors */
    int32_t streams; /* 1 to 16 */
    /* Where the library and its peers may be looked for beyond the loader's own folders; NULL:
     * nowhere else. */
    const char *library_dir; /* (host) */
} mz_kernels_options;

/* `message` (may be NULL) receives one line when there is no context to ask. */
mz_kstatus mz_kernels_open(const mz_kernels_options *options, mz_kernels **context, char *message,
                           size_t message_size);
/* Sets *context to NULL; closing that again does nothing. Memory of the context is freed before. */
void mz_kernels_close(mz_kernels **context);
const char *mz_kernels_error(const mz_kernels *context);  /* of the last call that failed */
mz_kstatus mz_kernels_failure(const mz_kernels *context); /* its status; MZ_K_OK: none failed */
/* "host, 2 threads, avx512" or "NVIDIA H200, sm_90, driver ..."; owned by the context. */
const char *mz_kernels_describe(const mz_kernels *context);
mz_backend mz_kernels_backend(const mz_kernels *context); /* without one: of the host */
/* The stream as the device's own libraries take it (cudaStream_t), NULL on the host. */
void *mz_kernels_native_stream(const mz_kernels *context, mz_kstream stream);

mz_kstatus mz_kernels_alloc(mz_kernels *context, size_t bytes,
                            void **memory); /* 256-byte aligned */
void mz_kernels_free(mz_kernels *context, void *memory);
/* What mz_kernels_alloc takes from, bytes: all of it (the device's memory, the machine's), and what
 * is free of it now (of the machine's what processes could get without swapping). Other processes
 * take from the same. Either may be NULL. */
mz_kstatus mz_kernels_memory(mz_kernels *context, size_t *all, size_t *available);
/* Host memory must stay until the copy has completed; of memory that is not page-locked CUDA may
 * wait for the device. */
typedef enum mz_copy { MZ_COPY_IN, MZ_COPY_OUT, MZ_COPY_INSIDE } mz_copy; /* to, from, within */
mz_kstatus mz_kernels_copy(mz_kernels *context, mz_kstream stream, mz_copy kind, void *to,
                           const void *from, size_t bytes);
mz_kstatus mz_kernels_zero(mz_kernels *context, mz_kstream stream, void *memory, size_t bytes);
mz_kstatus mz_kernels_sync(mz_kernels *context, mz_kstream stream);
/* What was enqueued on `stream` so far has completed before what `waiter` does next. */
mz_kstatus mz_kernels_wait(mz_kernels *context, mz_kstream waiter, mz_kstream stream);
/* Marks for timing: seconds between two marks of one stream, after a sync. slot: 0 .. 63. */
mz_kstatus mz_kernels_mark(mz_kernels *context, mz_kstream stream, int32_t slot);
mz_kstatus mz_kernels_elapsed(mz_kernels *context, int32_t from_slot, int32_t to_slot,
                              double *seconds);

/* Storage conversion, nearest even; n values. */
mz_kstatus mz_convert(mz_kernels *context, mz_kstream stream, mz_dtype to_type, void *to,
                      mz_dtype from_type, const void *from, int64_t n);

/* ---- norms and scores ---------------------------------------------------------------------------
 */

/* out[i] = sum_j x[i][j]^2. Bytes: rows * (cols * size + 4). */
typedef struct mz_norms {
    mz_dtype type;
    const void *x;
    int64_t rows, cols, stride; /* stride: elements from row to row */
    float *out;                 /* [rows] */
} mz_norms;
mz_kstatus mz_row_norms(mz_kernels *context, mz_kstream stream, const mz_norms *args);

/* out[i] = sum_j a[i][j] * b[i][j]: the router's gradient of a pair's weight, <dh, h>. */
typedef struct mz_dots {
    mz_dtype type;
    const void *a, *b;
    int64_t rows, cols, a_stride, b_stride;
    float *out; /* [rows] */
} mz_dots;
mz_kstatus mz_row_dots(mz_kernels *context, mz_kstream stream, const mz_dots *args);

typedef enum mz_score {
    MZ_SCORED_DOWN,   /* w^2 ||g||^2 ||h||^2 */
    MZ_SCORED_UP,     /* w^2 ||g||^2 ||x||^2 */
    MZ_SCORED_W,      /* w^2 */
    MZ_SCORED_WH,     /* w^2 ||h||^2 */
    MZ_SCORED_G,      /* ||g||^2 */
    MZ_SCORED_H,      /* ||h||^2 */
    MZ_SCORED_RANDOM, /* uniform (0, 1], drawn from (seed, pair) */
    MZ_SCORED_SAMPLE  /* sqrt(down) / u, u from (seed, pair): priority sampling (Duffield, Lund and
                         Thorup, 2007), exactly q pairs; unbiased when a kept pair is scaled by
                         max(1, threshold / sqrt(down)), threshold the largest score left out:
                         mz_selection.scaled */
} mz_score;
/* score[pair] >= 0 and finite for finite input; products are taken left to right in fp32 and
 * clamped to FLT_MAX, so that host and device agree bit by bit. Unused inputs may be NULL. */
typedef struct mz_score_args {
    mz_score kind;
    int64_t tokens, pairs;
    const int64_t *token_begin; /* [tokens+1] first pair of each token, or NULL: k pairs each */
    int32_t k;
    const float *weight;       /* [pairs] w */
    const float *grad_norm2;   /* [tokens] ||g||^2 */
    const float *input_norm2;  /* [tokens] ||x||^2 */
    const float *hidden_norm2; /* [pairs] ||h||^2, by pair: mz_unpack_rows with hidden 1 brings the
                                  norms of rows there */
    uint64_t seed, first_pair; /* first_pair: number of pair 0 in the whole batch */
    float *score;              /* [pairs] */
} mz_score_args;
mz_kstatus mz_score_pairs(mz_kernels *context, mz_kstream stream, const mz_score_args *args);

/* ---- counts, grouping, selection ----------------------------------------------------------------
 */

/* Stable counting sort of pairs by expert: begin[e] .. begin[e+1] are the positions of expert e in
 * `order`, which lists pair numbers, ascending within an expert. Pairs with an expert outside
 * [0, experts) are left out. count, begin, order: any may be NULL. */
typedef struct mz_grouping {
    const int32_t *expert; /* [pairs] */
    int64_t pairs;
    int32_t experts;
    int64_t *count; /* [experts] */
    int64_t *begin; /* [experts+1] */
    int64_t *order; /* [pairs] */
} mz_grouping;
size_t mz_group_pairs_workspace(const mz_kernels *context, const mz_grouping *args);
mz_kstatus mz_group_pairs(mz_kernels *context, mz_kstream stream, const mz_grouping *args,
                          void *workspace);

/* begin[0] = 0, begin[i+1] = begin[i] + count[i]. In place where begin == count is not allowed. */
size_t mz_prefix_sums_workspace(const mz_kernels *context, int64_t n);
mz_kstatus mz_prefix_sums(mz_kernels *context, mz_kstream stream, const int64_t *count, int64_t n,
                          int64_t *begin, void *workspace);

/* Exact top-quota selection: of the pairs order[begin[e] .. begin[e+1]) of each expert, the
 * quota[e] of largest score; ties go to the earlier position. Scores are finite and >= 0.
 * kept lists the chosen pair numbers, expert by expert, in the order they had; kept_begin[e] is
 * min-sum of the quotas before e. keep[pair] is 1 for chosen pairs and 0 for others listed in
 * order; either output may be NULL. `quota` above the number of pairs keeps all, one below 0 none.
 * A score's sign is not looked at, NaN counts as larger than infinity. With `threshold` not NULL it
 * receives the largest score left out of each expert (0 where none is).
 * With `scaled` not NULL, of scores that MZ_SCORED_SAMPLE drew: scaled[pair] = weight[pair] *
 * max(1, t / sqrt(down)) for each kept pair, t the largest score left out of its expert (1 where
 * none is): sums over kept pairs of what is proportional to `scaled` are unbiased. sqrt(down) is
 * score[pair] * u, with the u that (seed, first_pair + pair) gave the score; fp32, one rounding a
 * step, bit by bit the same on both backends. Other pairs' values are left alone. */
typedef struct mz_selection {
    const float *score;   /* [pairs] by pair number */
    const int64_t *order; /* [pairs] */
    const int64_t *begin; /* [experts+1] */
    const int64_t *quota; /* [experts] */
    int64_t pairs;
    int32_t experts;
    int64_t *kept;             /* [sum of min(quota, n)], caller's bound: pairs */
    int64_t *kept_begin;       /* [experts+1] */
    uint8_t *keep;             /* [pairs] */
    float *threshold;          /* [experts] */
    float *scaled;             /* [pairs] or NULL; needs kept; may be weight */
    const float *weight;       /* [pairs] or NULL: 1 */
    uint64_t seed, first_pair; /* as in mz_score_args */
} mz_selection;
size_t mz_select_workspace(const mz_kernels *context, const mz_selection *args);
mz_kstatus mz_select_pairs(mz_kernels *context, mz_kstream stream, const mz_selection *args,
                           void *workspace);

/* ---- packing and combining ----------------------------------------------------------------------
 */

/* The layout of a send buffer: segment i copies `length` pair numbers from `from` in a list grouped
 * by expert to `to` in the list grouped by (destination, expert). Positions no segment names are
 * left alone; a length below 1 copies nothing. */
typedef struct mz_segment {
    int64_t from, to, length;
} mz_segment;
mz_kstatus mz_arrange(mz_kernels *context, mz_kstream stream, const mz_segment *segment,
                      int64_t segments, const int64_t *in, int64_t *out);

/* position[row_pair[i]] = i for i < rows, no pair twice; a negative row_pair[i] is no pair; -1 for
 * the pairs that are not named. */
mz_kstatus mz_invert(mz_kernels *context, mz_kstream stream, const int64_t *row_pair, int64_t rows,
                     int64_t pairs, int64_t *position);

/* Pack: out[i] = scale[p] * x[token of p], p = row_pair[i] (a negative p gives a row of zeros). The
 * token of p is p / k, or token[p] where that is given; scale NULL: 1. Rows on the device may be
 * fewer than `rows`: *rows_used, where not NULL, says how many. Bytes: rows * 2 * H * size. */
typedef struct mz_pack {
    mz_dtype type;
    const void *x; /* [tokens][H] */
    int64_t hidden, rows;
    const int64_t *rows_used; /* [1] or NULL */
    const int64_t *row_pair;  /* [rows] */
    int32_t k;
    const int32_t *token; /* [pairs] or NULL */
    const float *scale;   /* [pairs] or NULL */
    void *out;            /* [rows][H] */
} mz_pack;
mz_kstatus mz_pack_rows(mz_kernels *context, mz_kstream stream, const mz_pack *args);

/* Unpack: the inverse of mz_pack_rows with scale NULL onto pairs: out[p] = rows[position[p]],
 * exactly zero where position[p] < 0. `row` may be NULL where every position is negative. */
typedef struct mz_unpack {
    mz_dtype type;
    const void *row; /* [rows][H] */
    int64_t hidden, pairs;
    const int64_t *position; /* [pairs] */
    void *out;               /* [pairs][H] */
} mz_unpack;
mz_kstatus mz_unpack_rows(mz_kernels *context, mz_kstream stream, const mz_unpack *args);

/* Combine: out[t] = (accumulate ? out[t] : 0) + sum over the pairs p of t, in order, of
 * scale[p] * row[position[p]]; positions < 0 add nothing, and where all are, `row` may be NULL.
 * fp32 sums, one rounding. */
typedef struct mz_combine {
    mz_dtype type;
    const void *row; /* [rows][H] */
    int64_t hidden, tokens;
    const int64_t *token_begin; /* [tokens+1] or NULL: k pairs each */
    int32_t k;
    const int64_t *position; /* [pairs] */
    const float *scale;      /* [pairs] or NULL: 1 */
    bool accumulate;
    void *out; /* [tokens][H] */
} mz_combine;
mz_kstatus mz_combine_rows(mz_kernels *context, mz_kstream stream, const mz_combine *args);

/* ---- grouped GEMM -------------------------------------------------------------------------------
 * Rows of group g are [begin[g], begin[g+1]) of one buffer; begin[0] = 0. Empty groups are fine. No
 * padding: nothing outside these rows is read or written. */
typedef struct mz_groups {
    const int64_t *begin; /* [groups+1]; on the CUDA backend in device memory */
    int32_t groups;
    int64_t rows_max;          /* begin[groups] is at most this */
    const int64_t *begin_host; /* (host) the same numbers where the host knows them, else NULL; the
                                  vendor's grouped GEMM needs them */
} mz_groups;

typedef enum mz_product {
    MZ_PRODUCT_FORWARD, /* c[m][n] = a[m][k] * w[n][k]^T */
    MZ_PRODUCT_DGRAD,   /* c[m][k] = a[m][n] * w[n][k] */
    MZ_PRODUCT_WGRAD /* w[n][k] (+)= a[m][n]^T * c[m][k]; a: gradient of the output, c: the input */
} mz_product;
typedef enum mz_product_engine {
    MZ_ENGINE_OWN,    /* on CUDA wgmma on compute capability 9.0, else mma.sync */
    MZ_ENGINE_VENDOR, /* cuBLAS grouped (needs begin_host; opened by the first product that asks for
                         it, with memory of its own), OpenBLAS per group; the host's OWN uses
                         OpenBLAS inside as well */
    MZ_ENGINE_OWN_MMA /* mma.sync on every CUDA device; on the host as OWN */
} mz_product_engine;
/* FLOPs: 2 * rows * n * k. */
typedef struct mz_product_args {
    mz_product op;
    mz_product_engine engine;
    mz_groups groups;
    int64_t n, k;
    mz_dtype type;          /* of rows and, for forward and dgrad, of weights */
    mz_dtype gradient_type; /* wgrad: of w; fp32 or bf16, sums in fp32 */
    bool accumulate;        /* wgrad: add to w; forward and dgrad: must be false */
    const void *a;          /* [rows][k] forward, [rows][n] dgrad and wgrad */
    void *const *weight;    /* [groups] pointers to [n][k]; the array is context memory too. wgrad
                               writes them; a NULL pointer skips its group, whose rows of c stay
                               as they are (with cuBLAS, only an empty group may have one) */
    void *c;                /* forward [rows][n], dgrad [rows][k]; wgrad: input [rows][k] */
} mz_product_args;
/* How a grouped product is cut for the workers (host threads, multiprocessors), which take tiles in
 * turn: at most `rows` rows of a group, `n` and `k` of the weight's sides; 0: all. CUDA cuts whole
 * tiles and a rest, group by group. The host cuts a side in as few parts as it takes, as equal as
 * multiples of 8 let them be, and takes groups with the longest tiles first. For models of its
 * time. mz_expert_up_forward has tiles of its own. Zeros for an unknown product or a size below 1.
 */
typedef struct mz_product_tiles {
    int32_t rows, n, k, workers;
} mz_product_tiles;
mz_product_tiles mz_kernels_tiles(const mz_kernels *context, mz_product op);
mz_product_tiles mz_kernels_up_tiles(const mz_kernels *context, int64_t intermediate);
size_t mz_grouped_gemm_workspace(const mz_kernels *context, const mz_product_args *args);
mz_kstatus mz_grouped_gemm(mz_kernels *context, mz_kstream stream, const mz_product_args *args,
                           void *workspace);

/* Expert up-projection with SwiGLU in the pass that writes: u = x * gate^T, v = x * up^T with
 * weight[g] = [gate; up] of shape [2I][H], h = silu(u) * v. gate_up (u and v, [rows][2I]) is kept
 * where not NULL; norm2 receives ||h||^2 of the stored h where not NULL. */
typedef struct mz_expert_up {
    mz_groups groups;
    int64_t hidden, intermediate;
    mz_dtype type;
    const void *x;            /* [rows][H] */
    void *const *weight;      /* [groups] */
    void *gate_up;            /* [rows][2I] or NULL */
    void *h;                  /* [rows][I] */
    float *norm2;             /* [rows] or NULL */
    mz_product_engine engine; /* not VENDOR */
} mz_expert_up;
size_t mz_expert_up_workspace(const mz_kernels *context, const mz_expert_up *args);
mz_kstatus mz_expert_up_forward(mz_kernels *context, mz_kstream stream, const mz_expert_up *args,
                                void *workspace);

/* h = silu(u) * v with u, v the halves of gate_up; norm2 as above. Bytes: rows * 3 * I * size. */
typedef struct mz_swiglu {
    mz_dtype type;
    int64_t rows, intermediate;
    const int64_t *rows_used; /* [1] or NULL */
    const void *gate_up;      /* [rows][2I] */
    void *h;                  /* [rows][I]; backward: written again where not NULL */
    float *norm2;             /* [rows] or NULL (forward) */
    const void *dh;           /* [rows][I] (backward) */
    const float *scale;       /* [rows] or NULL: dh is multiplied by it first (backward) */
    float *dot;               /* [rows] or NULL: <dh, h> before scaling (backward) */
    void *dgate_up;           /* [rows][2I]; may be gate_up (backward) */
} mz_swiglu;
mz_kstatus mz_swiglu_forward(mz_kernels *context, mz_kstream stream, const mz_swiglu *args);
mz_kstatus mz_swiglu_backward(mz_kernels *context, mz_kstream stream, const mz_swiglu *args);

/* ---- routers (formulas: README.md beside this file) ---------------------------------------------
 * Fixed k: expert, weight are [tokens][k], best first, ties to the lower expert. Variable (ReLU,
 * routing-free): pairs are listed token by token, experts ascending, token_begin says where; the
 * caller's bound is tokens * E pairs. Logits are fp32; NaN ranks last, and is never active. */
typedef enum mz_router_kind {
    MZ_ROUTER_SOFTMAX, /* softmax over all, k largest; `normalize`: divided by their sum */
    MZ_ROUTER_SIGMOID, /* sigmoid; chosen by sigmoid + bias among the best groups, weighted by
                          sigmoid (DeepSeek-V3): normalize, scale, n_group, topk_group */
    MZ_ROUTER_AOE,     /* input: norms ||x Wdown_i||; k largest, softmax over the chosen, or with
                          softmax_all over all norms and not renormalised (its released code) */
    MZ_ROUTER_RELU,    /* ReMoE: every positive logit, weighted by itself */
    MZ_ROUTER_ROUTING_FREE /* input: norms; s = gain_e * norm - bias_e, active where s >= theta */
} mz_router_kind;
typedef struct mz_router {
    mz_router_kind kind;
    int64_t tokens;
    int32_t experts, k; /* k: ReLU: pairs wanted of a token, of its balance loss alone */
    bool normalize, softmax_all;
    float scale;                 /* of the weights; 1: none */
    int32_t n_group, topk_group; /* sigmoid; 1, 1: no groups */
    float theta;
    const float *logits; /* [tokens][E], or norms */
    const float *bias;   /* [E] or NULL */
    const float *gain;   /* [E] or NULL: 1 (routing-free) */
    /* forward writes */
    int32_t *expert;      /* [pairs] */
    float *weight;        /* [pairs] */
    int64_t *token_begin; /* [tokens+1], variable kinds only */
    /* backward reads expert, weight, token_begin and */
    const float *dweight; /* [pairs] */
    const uint8_t *keep;  /* [pairs] or NULL: pairs without gradient count as dweight = 0 */
    /* and adds these losses' gradients where their factors are not 0 */
    float aux_factor;  /* load balance: factor * E * sum_e (mean p_e) * c_e / (T k); Switch's form
                          for  softmax and AoE, ReMoE's L1 for ReLU, routing-free: lambda * L_LB */
    float z_factor;    /* factor * mean logsumexp^2 (softmax) */
    float balance_mix; /* mu of routing-free */
    int32_t pool_experts;     /* routing-free: experts of all layers pooled in the losses; 0: E */
    const float *token_share; /* [tokens] active share of them per token; NULL: of this layer */
    bool proxy_paper; /* routing-free: G for 0 < s < theta counts in the losses (paper), else not */
    const int64_t *count; /* [E] pairs of each expert (losses) */
    float *dlogits;       /* [tokens][E], or of the norms; overwritten */
    float *dbias, *dgain; /* [E] or NULL; added to */
} mz_router;
size_t mz_router_workspace(const mz_kernels *context, const mz_router *args);
mz_kstatus mz_router_forward(mz_kernels *context, mz_kstream stream, const mz_router *args,
                             void *workspace);
mz_kstatus mz_router_backward(mz_kernels *context, mz_kstream stream, const mz_router *args,
                              void *workspace);
/* Values of the losses of the last forward's routing, loss[0] aux, loss[1] z, loss[2] density
 * (share of active pairs); fp32 in context memory. */
mz_kstatus mz_router_losses(mz_kernels *context, mz_kstream stream, const mz_router *args,
                            float *loss, void *workspace);
/* Norms of z [tokens][E][r] over r, and the gradient dz of them (z * dnorm / max(norm, tiny)). */
mz_kstatus mz_gate_norms(mz_kernels *context, mz_kstream stream, mz_dtype type, const void *z,
                         int64_t tokens, int32_t experts, int64_t r, float *norm);
mz_kstatus mz_gate_norms_backward(mz_kernels *context, mz_kstream stream, mz_dtype type,
                                  const void *z, const float *norm, const float *dnorm,
                                  int64_t tokens, int32_t experts, int64_t r, void *dz);
/* lambda after one step (host): routing-free min(lambda * (1+eta)^sign(rho - target), cap); ReMoE
 * has the same form with eta = alpha - 1 and no cap (cap = INFINITY), but for a density that equals
 * the target, where it would shrink. */
float mz_adapt_lambda(float lambda, float eta, float density, float target, float cap);

/* ---- optimizers (formulas: README.md) -----------------------------------------------------------
 * One call updates one tensor of `matrices` equal matrices [rows][cols] (experts of a layer: one
 * per expert). Decoupled decay first. Every optimizer reads the gradient times *grad_scale. */
typedef enum mz_update_kind {
    MZ_UPDATE_SKEWADAM, /* by tier: see `momentum`, `factored` */
    MZ_UPDATE_ADAMW,
    MZ_UPDATE_ADAFACTOR,
    MZ_UPDATE_LION,
    MZ_UPDATE_MUON /* Newton-Schulz on every matrix; the Adam branch is MZ_UPDATE_ADAMW */
} mz_update_kind;
typedef enum mz_rounding {
    MZ_ROUND_NEAREST,
    MZ_ROUND_DITHER,    /* q + (u - 1/2) |q| 2^-7, then nearest: the reference's, slightly biased */
    MZ_ROUND_STOCHASTIC /* unbiased: 16 random bits below the mantissa, then cut */
} mz_rounding;
typedef struct mz_update {
    mz_update_kind kind;
    int64_t matrices, rows, cols; /* cols == 1: a vector */
    mz_dtype type, gradient_type;
    void *parameter;
    const void *gradient;
    const float *grad_scale;  /* [1] in context memory, or NULL: 1 (global-norm clipping) */
    float rate, beta1, decay; /* beta1: of the momentum; muon's buf <- beta1 buf + g */
    float beta2;           /* of the second moment; lion: of m; adafactor: not read, 1 - t^-0.8 */
    float eps;             /* skewadam: floor inside the roots; adamw: added to the root;
                              adafactor: added to g^2 */
    int64_t step;          /* t, from 1 */
    bool momentum;         /* skewadam: keep m (backbone tier) */
    bool factored;         /* skewadam: R and C per matrix; else a full v */
    bool clip_rms;         /* u / max(1, RMS(u)) */
    bool clip_tensor;      /* over the whole tensor instead of per matrix */
    int32_t newton_schulz; /* muon: iterations, 3 in the study, 5 in the reference */
    bool nesterov;         /* muon */
    float update_scale;    /* muon: factor of the orthogonal update; 1 in the study */
    mz_rounding rounding;  /* bf16 parameters only */
    uint64_t seed, tensor; /* random bits are a function of (seed, step, tensor, element) */
    float *m;              /* [matrices][rows][cols] momentum, or NULL */
    float *v;              /* [matrices][rows][cols] second moment, or NULL */
    float *row, *col;      /* [matrices][rows], [matrices][cols], or NULL */
} mz_update;
/* Bytes of m, v, row and col together for these settings: what the tier policies promise; 0 for
 * sizes that mz_update_step refuses. State begins as zeros. */
int64_t mz_update_state_bytes(const mz_update *args);
/* SkewAdam: O(rows + cols) per matrix, no full-size temporary, two sweeps over the gradient. */
size_t mz_update_workspace(const mz_kernels *context, const mz_update *args);
mz_kstatus mz_update_step(mz_kernels *context, mz_kstream stream, const mz_update *args,
                          void *workspace);

#ifdef __cplusplus
}
#endif
#endif
