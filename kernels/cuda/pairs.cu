/* Operations on pairs: scores, grouping by expert, prefix sums, selection, arrangement. All are
 * bound by latency more than by bytes; results do not depend on the order in which threads run. */
#include "kernels/cuda/device.cuh"
#include "kernels/scores.h"

/* ---- scores -------------------------------------------------------------------------------------
 */

/* k pairs a token: a thread per pair. Bytes of "down": 12 a pair and 4 a token; random draws are
 * ten rounds of four products. */
__global__ static void __launch_bounds__(CU_BLOCK) score_kernel(mz_score_args a) {
    const int64_t step = (int64_t)gridDim.x * CU_BLOCK;
    for (int64_t i = (int64_t)blockIdx.x * CU_BLOCK + threadIdx.x; i < a.pairs; i += step)
        a.score[i] = mz_score_of(&a, i / a.k, i);
}

/* Any number of pairs a token: a warp per token. */
__global__ static void __launch_bounds__(CU_BLOCK) score_listed_kernel(mz_score_args a) {
    for (int64_t t = cu_first_row<32>(); t < a.tokens; t += cu_row_step<32>())
        for (int64_t i = a.token_begin[t] + threadIdx.x % 32; i < a.token_begin[t + 1]; i += 32)
            a.score[i] = mz_score_of(&a, t, i);
}

extern "C" int mz_cuda_score_pairs(const mz_cuda_device *d, void *stream, const mz_score_args *a) {
    if (a->token_begin)
        return CU_LAUNCH(score_listed_kernel, cu_blocks(d, a->tokens, CU_WARPS), CU_BLOCK, 0,
                         stream, *a);
    return CU_LAUNCH(score_kernel, cu_blocks(d, a->pairs, CU_BLOCK), CU_BLOCK, 0, stream, *a);
}

/* ---- prefix sums --------------------------------------------------------------------------------
 * By one block: lists of experts and of tokens are short. */

enum { SCAN = CU_BLOCK, SCAN_EACH = 4 };

/* The sum of the values of the threads before this one, over a block of THREADS; *all: of all
 * threads. All must call it. */
template <int THREADS, class T> __device__ static inline T sum_before(T value, T *all) {
    CU_SHARED(T, part, [THREADS / 32]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T up_to = value;
    for (int apart = 1; apart < 32; apart *= 2) {
        const T other = __shfl_up_sync(CU_FULL, up_to, apart);
        if (lane >= apart)
            up_to += other;
    }
    if (lane == 31)
        part[warp] = up_to;
    __syncthreads();
    T before = 0, sum = 0;
#pragma unroll 4
    for (int w = 0; w < THREADS / 32; w++) {
        if (w < warp)
            before += part[w];
        sum += part[w];
    }
    __syncthreads();
    *all = sum;
    return before + up_to - value;
}

/* What prefix sums are taken of. */
struct plain_counts {
    const int64_t *count;
    __device__ int64_t operator()(int64_t i) const {
        return count[i];
    }
};

/* How many pairs of expert e stay. */
__device__ static inline int64_t kept_of(const mz_selection &s, int64_t e) {
    const int64_t n = s.begin[e + 1] - s.begin[e], quota = s.quota[e];
    return quota < 0 ? 0 : quota < n ? quota : n;
}
struct kept_counts {
    mz_selection selection;
    __device__ int64_t operator()(int64_t e) const {
        return kept_of(selection, e);
    }
};

/* Bytes: 16 n. */
template <class Counts>
__global__ static void __launch_bounds__(SCAN)
    prefix_kernel(Counts count, int64_t n, int64_t *begin) {
    int64_t at = 0;
    for (int64_t first = 0; first < n; first += SCAN * SCAN_EACH) {
        const int64_t mine = first + (int64_t)threadIdx.x * SCAN_EACH;
        int64_t value[SCAN_EACH], sum = 0, all;
        for (int j = 0; j < SCAN_EACH; j++) {
            value[j] = mine + j < n ? count(mine + j) : 0;
            sum += value[j];
        }
        int64_t before = at + sum_before<SCAN>(sum, &all);
        for (int j = 0; j < SCAN_EACH; j++) {
            if (mine + j < n)
                begin[mine + j] = before;
            before += value[j];
        }
        at += all;
    }
    if (threadIdx.x == 0)
        begin[n] = at;
}

extern "C" size_t mz_cuda_prefix_sums_workspace(const mz_cuda_device *, int64_t) {
    return 0;
}

extern "C" int mz_cuda_prefix_sums(const mz_cuda_device *, void *stream, const int64_t *count,
                                   int64_t n, int64_t *begin, void *) {
    return CU_LAUNCH(prefix_kernel<plain_counts>, 1, SCAN, 0, stream, plain_counts{count}, n,
                     begin);
}

/* ---- grouping: a counting sort in tiles of pairs, a warp per tile -------------------------------
 * Workspace: place[tile][expert], begin[experts + 1], total[experts]. */

static const int64_t TILE_LEAST = 256, TILES_MOST = 1024;

struct sorting {
    mz_grouping args;
    int64_t tiles, tile; /* how many, pairs of each */
    int64_t *place;      /* pairs of an expert in a tile, then where its next one goes */
    int64_t *begin, *total;
};

static int64_t tiles_of(int64_t pairs) {
    const int64_t tiles = (pairs + TILE_LEAST - 1) / TILE_LEAST;
    return tiles < 1 ? 1 : tiles < TILES_MOST ? tiles : TILES_MOST;
}

/* Goes through a tile in order; of each 32 pairs the first lane of every expert takes the place of
 * them all. */
template <bool PLACE> __device__ static void walk_tile(const sorting &s, int64_t tile) {
    const int lane = threadIdx.x % 32;
    const unsigned before = (1u << lane) - 1u;
    int64_t *place = s.place + tile * s.args.experts;
    const int64_t first = tile * s.tile, end = first + s.tile;
    for (int64_t i = first + lane; i - lane < end && i - lane < s.args.pairs; i += 32) {
        int32_t e = i < end && i < s.args.pairs ? s.args.expert[i] : -1;
        if (e < 0 || e >= s.args.experts)
            e = -1;
        const unsigned same = __match_any_sync(CU_FULL, e);
        const int leader = __ffs((int)same) - 1;
        int64_t at = 0;
        if (e >= 0 && lane == leader) {
            at = place[e];
            place[e] = at + __popc(same);
        }
        if (PLACE) {
            at = __shfl_sync(CU_FULL, at, leader);
            if (e >= 0)
                s.args.order[at + __popc(same & before)] = i;
        }
        __syncwarp();
    }
}

/* Bytes: 4 a pair, 8 E a tile. */
__global__ static void __launch_bounds__(CU_BLOCK) count_kernel(sorting s) {
    for (int64_t t = cu_first_row<32>(); t < s.tiles; t += cu_row_step<32>()) {
        for (int64_t e = threadIdx.x % 32; e < s.args.experts; e += 32)
            s.place[t * s.args.experts + e] = 0;
        __syncwarp();
        walk_tile<false>(s, t);
    }
}

/* Counts of tiles become places within the expert. Bytes: 16 E a tile. */
__global__ static void __launch_bounds__(CU_BLOCK) total_kernel(sorting s) {
    const int64_t step = (int64_t)gridDim.x * CU_BLOCK;
    for (int64_t e = (int64_t)blockIdx.x * CU_BLOCK + threadIdx.x; e < s.args.experts; e += step) {
        int64_t at = 0;
        for (int64_t t = 0; t < s.tiles; t++) {
            int64_t *place = s.place + t * s.args.experts + e;
            const int64_t n = *place;
            *place = at;
            at += n;
        }
        s.total[e] = at;
        if (s.args.count)
            s.args.count[e] = at;
    }
}

/* Bytes: 12 a pair, 16 E a tile. */
__global__ static void __launch_bounds__(CU_BLOCK) place_kernel(sorting s) {
    for (int64_t t = cu_first_row<32>(); t < s.tiles; t += cu_row_step<32>()) {
        for (int64_t e = threadIdx.x % 32; e < s.args.experts; e += 32)
            s.place[t * s.args.experts + e] += s.begin[e];
        __syncwarp();
        walk_tile<true>(s, t);
    }
}

extern "C" size_t mz_cuda_group_pairs_workspace(const mz_cuda_device *, const mz_grouping *a) {
    return sizeof(int64_t) * (size_t)((tiles_of(a->pairs) + 2) * a->experts + 1);
}

extern "C" int mz_cuda_group_pairs(const mz_cuda_device *d, void *stream, const mz_grouping *a,
                                   void *workspace) {
    sorting s = {*a, tiles_of(a->pairs), 0, (int64_t *)workspace, NULL, NULL};
    s.tile = ((a->pairs + s.tiles - 1) / s.tiles + 31) / 32 * 32;
    s.total = s.place + s.tiles * a->experts;
    s.begin = a->begin ? a->begin : s.total + a->experts;
    const unsigned blocks = cu_blocks(d, s.tiles, CU_WARPS);
    int error = CU_LAUNCH(count_kernel, blocks, CU_BLOCK, 0, stream, s);
    if (!error)
        error = CU_LAUNCH(total_kernel, cu_blocks(d, a->experts, CU_BLOCK), CU_BLOCK, 0, stream, s);
    if (!error)
        error = CU_LAUNCH(prefix_kernel<plain_counts>, 1, SCAN, 0, stream, plain_counts{s.total},
                          (int64_t)a->experts, s.begin);
    if (!error && a->order)
        error = CU_LAUNCH(place_kernel, blocks, CU_BLOCK, 0, stream, s);
    return error;
}

/* ---- selection: a block per expert, a radix search for the last score that stays ----------------
 * Scores are not negative, so their bits order them; -0 counts as 0. */

enum { DIGIT = 8, DIGITS = 4, BINS = 1 << DIGIT };
/* Threads of a block where no expert has more than SHORT pairs, and else. */
enum { SHORT = 4096, SHORT_THREADS = 128, LONG_THREADS = 1024 };

__device__ static inline uint32_t key_of(const mz_selection &s, int64_t position) {
    return mz_float_bits(s.score[s.order[position]]) & 0x7fffffffu;
}

/* Counts by their digit at `shift` the keys of [begin, end) that agree with `prefix` above it. Of a
 * warp's equal digits one lane adds them all: most scores share their first digit. */
template <int THREADS>
__device__ static void count_digits(const mz_selection &s, int64_t begin, int64_t end,
                                    uint32_t prefix, int shift, unsigned *bin) {
    for (int i = threadIdx.x; i < BINS; i += THREADS)
        bin[i] = 0;
    __syncthreads();
    const int lane = threadIdx.x % 32, above = shift + DIGIT;
    for (int64_t i = begin + threadIdx.x; i - lane < end; i += THREADS) {
        const uint32_t key = i < end ? key_of(s, i) : 0;
        const bool counts = i < end && (above >= 32 || key >> above == prefix >> above);
        const int digit = counts ? (int)(key >> shift & (BINS - 1)) : -1;
        const unsigned same = __match_any_sync(CU_FULL, digit);
        if (counts && lane == __ffs((int)same) - 1)
            atomicAdd(&bin[digit], (unsigned)__popc(same));
    }
    __syncthreads();
}

/* The digit, from the largest down, with which `quota` keys are reached, and how many of it are
 * still wanted. */
template <int THREADS>
__device__ static void find_digit(const unsigned *bin, unsigned quota, unsigned chosen[2]) {
    constexpr int EACH = THREADS < BINS ? BINS / THREADS : 1;
    const int first = BINS - 1 - (int)threadIdx.x * EACH;
    unsigned mine = 0, all;
    for (int j = 0; j < EACH && first >= 0; j++)
        mine += bin[first - j];
    unsigned above = sum_before<THREADS>(mine, &all);
    if (above < quota && quota <= above + mine) {
        int digit = first;
        for (; quota > above + bin[digit]; digit--)
            above += bin[digit];
        chosen[0] = (unsigned)digit;
        chosen[1] = quota - above;
    }
    __syncthreads();
}

/* The key of which some stay: those above do all; *equal of that key, the first ones, stay. All
 * threads get both. 0 < quota < end - begin. */
template <int THREADS>
__device__ static uint32_t last_key(const mz_selection &s, int64_t begin, int64_t end,
                                    unsigned quota, unsigned *equal) {
    CU_SHARED(unsigned, bin, [BINS]);
    CU_SHARED(unsigned, chosen, [2]); /* digit, how many still wanted of it */
    uint32_t prefix = 0;
    for (int d = DIGITS - 1; d >= 0; d--) {
        count_digits<THREADS>(s, begin, end, prefix, d * DIGIT, bin);
        find_digit<THREADS>(bin, quota, chosen);
        prefix |= chosen[0] << (d * DIGIT);
        quota = chosen[1];
        __syncthreads();
    }
    *equal = quota;
    return prefix;
}

/* Writes what stays of [begin, end) in order; the largest key left out that this thread saw. */
template <int THREADS>
__device__ static uint32_t write_kept(const mz_selection &s, int64_t begin, int64_t end,
                                      uint32_t last, unsigned equal, int64_t *kept) {
    uint32_t out = 0;
    unsigned equals = 0, stayed = 0, now;
    for (int64_t first = begin; first < end; first += THREADS) {
        const int64_t i = first + threadIdx.x;
        const uint32_t key = i < end ? key_of(s, i) : 0;
        const bool is_last = i < end && key == last;
        const unsigned rank = equals + sum_before<THREADS>((unsigned)is_last, &now);
        equals += now;
        const bool stays = i < end && (key > last || (is_last && rank < equal));
        const unsigned to = stayed + sum_before<THREADS>((unsigned)stays, &now);
        stayed += now;
        if (i >= end)
            continue;
        const int64_t pair = s.order[i];
        if (stays && kept)
            kept[to] = pair;
        if (s.keep)
            s.keep[pair] = stays;
        if (!stays && key > out)
            out = key;
    }
    return out;
}

/* Bytes: 12 a pair (its number, its score) and 9 of what is written, 8 of them where it stays; five
 * passes read them, four from L2. A scaled sample: 20 more where it stays, and a draw. */
template <int THREADS>
__global__ static void __launch_bounds__(THREADS, LONG_THREADS / THREADS)
    select_kernel(mz_selection s) {
    for (int64_t e = blockIdx.x; e < s.experts; e += gridDim.x) {
        const int64_t begin = s.begin[e], end = s.begin[e + 1], quota = kept_of(s, e);
        uint32_t last = quota == 0 ? UINT32_MAX : 0; /* all stay: the key 0 and all above */
        unsigned equal = (unsigned)quota;
        if (quota > 0 && quota < end - begin)
            last = last_key<THREADS>(s, begin, end, (unsigned)quota, &equal);
        uint32_t out = write_kept<THREADS>(s, begin, end, last, equal,
                                           s.kept ? s.kept + s.kept_begin[e] : NULL);
        if (!s.threshold && !s.scaled)
            continue;
        CU_SHARED(uint32_t, most, [THREADS / 32]);
        out = __reduce_max_sync(CU_FULL, out);
        if (threadIdx.x % 32 == 0)
            most[threadIdx.x / 32] = out;
        __syncthreads();
#pragma unroll 4
        for (int w = 0; w < THREADS / 32; w++)
            out = most[w] > out ? most[w] : out;
        const float threshold = mz_bits_float(out);
        if (threadIdx.x == 0 && s.threshold)
            s.threshold[e] = threshold;
        for (int64_t i = threadIdx.x; s.scaled && i < quota; i += THREADS) {
            const int64_t pair = s.kept[s.kept_begin[e] + i];
            s.scaled[pair] = mz_sample_scale(&s, pair, threshold);
        }
        __syncthreads();
    }
}

extern "C" size_t mz_cuda_select_pairs_workspace(const mz_cuda_device *, const mz_selection *) {
    return 0;
}

extern "C" int mz_cuda_select_pairs(const mz_cuda_device *d, void *stream, const mz_selection *a,
                                    void *) {
    int error = 0;
    if (a->kept)
        error = CU_LAUNCH(prefix_kernel<kept_counts>, 1, SCAN, 0, stream, kept_counts{*a},
                          (int64_t)a->experts, a->kept_begin);
    if (error || a->experts == 0)
        return error;
    const unsigned blocks = cu_blocks(d, a->experts, 1);
    if (a->pairs <= SHORT)
        return CU_LAUNCH(select_kernel<SHORT_THREADS>, blocks, SHORT_THREADS, 0, stream, *a);
    return CU_LAUNCH(select_kernel<LONG_THREADS>, blocks, LONG_THREADS, 0, stream, *a);
}

/* ---- arrangement --------------------------------------------------------------------------------
 */

/* A block per segment. Bytes: 16 a number, 24 a segment. */
__global__ static void __launch_bounds__(CU_BLOCK)
    arrange_kernel(const mz_segment *segment, int64_t segments, const int64_t *in, int64_t *out) {
    for (int64_t s = blockIdx.x; s < segments; s += gridDim.x) {
        const mz_segment part = segment[s];
        for (int64_t i = threadIdx.x; i < part.length; i += CU_BLOCK)
            out[part.to + i] = in[part.from + i];
    }
}

extern "C" int mz_cuda_arrange(const mz_cuda_device *d, void *stream, const mz_segment *segment,
                               int64_t segments, const int64_t *in, int64_t *out) {
    return CU_LAUNCH(arrange_kernel, cu_blocks(d, segments, 1), CU_BLOCK, 0, stream, segment,
                     segments, in, out);
}

/* Bytes: 16 a row, after 8 a pair of the fill. */
__global__ static void __launch_bounds__(CU_BLOCK)
    invert_kernel(const int64_t *row_pair, int64_t rows, int64_t *position) {
    const int64_t step = (int64_t)gridDim.x * CU_BLOCK;
    for (int64_t i = (int64_t)blockIdx.x * CU_BLOCK + threadIdx.x; i < rows; i += step)
        if (row_pair[i] >= 0)
            position[row_pair[i]] = i;
}

extern "C" int mz_cuda_invert(const mz_cuda_device *d, void *stream, const int64_t *row_pair,
                              int64_t rows, int64_t pairs, int64_t *position) {
    const int error = (int)cudaMemsetAsync(position, 0xff, sizeof *position * (size_t)pairs,
                                           (cudaStream_t)stream);
    if (error || rows == 0)
        return error;
    return CU_LAUNCH(invert_kernel, cu_blocks(d, rows, CU_BLOCK), CU_BLOCK, 0, stream, row_pair,
                     rows, position);
}
