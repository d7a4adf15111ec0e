/* What the grouped GEMMs of product.cu and product_sm90.cu share: their arguments, the walk over
 * the tiles of all groups, and how a warp stores its sums.
 *
 * One persistent grid walks the output tiles of all groups; which tile is whose follows from the
 * prefix sums of the groups' rows on the device, so the host never learns them. Nothing is padded:
 * what lies outside a group is read as zero and not written. Every element is summed by one warp in
 * the order of the depth, so results depend on the arguments alone. */
#ifndef MIZAN_KERNELS_CUDA_PRODUCT_CUH
#define MIZAN_KERNELS_CUDA_PRODUCT_CUH

#include "kernels/arithmetic.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/portable.h"

namespace mz_grouped {

enum Kind { FORWARD, DGRAD, WGRAD, UP };

enum : int {
    BAND = 16, /* tiles down before the next tile to the right */
    PIECE =
        64, /* columns that a warp stores at once; of up: 32 of the gate and the same 32 of up */
    UP_PIECE = PIECE / 2
};

/* The arguments of all four kinds. Output columns are `cols`; sums run over `depth`, which for
 * wgrad is the group's number of rows; wgrad's output rows are `lines`. */
struct Product {
    const int64_t *begin;
    int32_t groups;
    int64_t lines, cols, depth;
    const void *a, *b; /* b: wgrad's second operand, else the weights */
    void *const *weight;
    void *out;      /* not of wgrad */
    void *gate_up;  /* up, or NULL */
    float *partial; /* up: [rows][parts] sums of squares, or NULL */
    int64_t parts;
    bool accumulate, wide; /* wgrad: add to the weight; it is fp32 */
};

enum Layout {
    BY_LINE,  /* memory runs along the depth */
    BY_DEPTH, /* memory runs along the lines */
    GATE_UP   /* by line; eight lines of the gate, the same eight of up, and so on */
};

constexpr __device__ inline Layout layout_a(Kind kind) {
    return kind == WGRAD ? BY_DEPTH : BY_LINE;
}
constexpr __device__ inline Layout layout_b(Kind kind) {
    return kind == UP ? GATE_UP : kind == FORWARD ? BY_LINE : BY_DEPTH;
}

/* ---- which tile ---------------------------------------------------------------------------------
 */

/* Where a block is in the list of all tiles; tile numbers it asks for only rise. */
struct Walk {
    int64_t before; /* tiles of the groups before `base` */
    int32_t base;
};

struct Place {
    int32_t group;
    int64_t line, col; /* of the tile's first output */
};

__device__ inline int64_t tiles_down(const Product &p, Kind kind, int32_t group, int lines) {
    if (group >= p.groups || !p.weight[group])
        return 0;
    const int64_t n = kind == WGRAD ? p.lines : p.begin[group + 1] - p.begin[group];
    return (n + lines - 1) / lines;
}

/* Inside a group: bands of BAND tiles down, in a band column by column. */
__device__ inline Place place_in(int32_t group, int64_t tile, int64_t down, int64_t across,
                                 int lines, int cols) {
    const int64_t band = tile / (BAND * across), first = band * BAND;
    const int64_t height = down - first < BAND ? down - first : (int64_t)BAND;
    const int64_t in = tile - first * across;
    return Place{group, (first + in % height) * lines, in / height * cols};
}

/* Finds tile number `tile`, 32 groups at a time; every warp of the block for itself. False: there
 * are fewer. */
__device__ inline bool find(Walk &walk, const Product &p, Kind kind, int64_t tile, int lines,
                            int cols, Place &place) {
    const int lane = threadIdx.x % 32;
    const int64_t across = (p.cols + cols - 1) / cols;
    for (; walk.base < p.groups; walk.base += 32) {
        const int64_t down = tiles_down(p, kind, walk.base + lane, lines);
        int64_t upto = down * across;
        for (int d = 1; d < 32; d *= 2) {
            const int64_t left = __shfl_up_sync(0xffffffffu, upto, d);
            if (lane >= d)
                upto += left;
        }
        const unsigned past = __ballot_sync(0xffffffffu, tile < walk.before + upto);
        if (past) {
            const int owner = __ffs((int)past) - 1;
            const int64_t from = __shfl_sync(0xffffffffu, upto - down * across, owner);
            place = place_in(walk.base + owner, tile - walk.before - from,
                             __shfl_sync(0xffffffffu, down, owner), across, lines, cols);
            return true;
        }
        walk.before += __shfl_sync(0xffffffffu, upto, 31);
    }
    return false;
}

/* One group's product: out[lines][cols] = sum over depth of a * b. */
template <class T> struct Operands {
    const T *a, *b;
    int64_t a_stride, b_stride; /* elements from row to row as they lie in memory */
    int64_t lines, cols, depth;
    int64_t row; /* first row of the group in the buffers */
};

template <Kind kind, class T> __device__ Operands<T> operands(const Product &p, int32_t group) {
    const int64_t row = p.begin[group], rows = p.begin[group + 1] - row;
    const T *a = static_cast<const T *>(p.a), *b = static_cast<const T *>(p.b);
    if (kind == WGRAD)
        return Operands<T>{a + row * p.lines, b + row * p.cols, p.lines, p.cols,
                           p.lines,           p.cols,           rows,    row};
    const T *weight = static_cast<const T *>(p.weight[group]);
    return Operands<T>{
        a + row * p.depth, weight, p.depth, kind == DGRAD ? p.cols : p.depth, rows, p.cols,
        p.depth,           row};
}

/* ---- results ------------------------------------------------------------------------------------
 * A thread has columns 2q and 2q + 1 of every 8 (q its place among four lanes) of two rows of
 * every 16. */

__device__ inline unsigned pack(float low, float high) {
    return mz_to_bf16(low) | (unsigned)mz_to_bf16(high) << 16;
}

/* Turns "word i of lane q is word q of block i" into "word i is word i of block q": each lane then
 * holds the 16 bytes of one block of 8 columns. */
__device__ inline void transpose4(unsigned w[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    const unsigned s0 = __shfl_xor_sync(0xffffffffu, odd ? w[0] : w[1], 1);
    const unsigned s1 = __shfl_xor_sync(0xffffffffu, odd ? w[2] : w[3], 1);
    w[0] = odd ? s0 : w[0]; /* selects: an index known at run time would cost local memory */
    w[1] = odd ? w[1] : s0;
    w[2] = odd ? s1 : w[2];
    w[3] = odd ? w[3] : s1;
    const unsigned t0 = __shfl_xor_sync(0xffffffffu, high ? w[0] : w[2], 2);
    const unsigned t1 = __shfl_xor_sync(0xffffffffu, high ? w[1] : w[3], 2);
    w[0] = high ? t0 : w[0];
    w[1] = high ? t1 : w[1];
    w[2] = high ? w[2] : t0;
    w[3] = high ? w[3] : t1;
}

__device__ inline void store16(void *to, const unsigned w[4]) {
    *static_cast<uint4 *>(to) = make_uint4(w[0], w[1], w[2], w[3]);
}

/* bf16, 16 bytes a lane. */
__device__ inline void store_narrow(uint16_t *row, int64_t col, int64_t cols,
                                    float sum[PIECE / 8][4], int half, bool there) {
#pragma unroll
    for (int j = 0; j < PIECE / 8; j += 4) {
        unsigned w[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            w[i] = pack(sum[j + i][2 * half], sum[j + i][2 * half + 1]);
        transpose4(w);
        const int64_t at = col + 8 * (j + (int)threadIdx.x % 4);
        if (there && at < cols)
            store16(row + at, w);
    }
}

/* fp32, or bf16 that is added to: a lane's own two columns, 32 or 16 bytes of a row together. */
__device__ inline void store_sum(void *row, int64_t col, int64_t cols,
                                 const float sum[PIECE / 8][4], int half, bool wide,
                                 bool accumulate) {
#pragma unroll
    for (int j = 0; j < PIECE / 8; j++) {
        const int64_t at = col + 8 * j + (int)threadIdx.x % 4 * 2;
        float x = sum[j][2 * half], y = sum[j][2 * half + 1];
        if (at >= cols)
            break;
        if (wide) {
            float2 *to = reinterpret_cast<float2 *>(static_cast<float *>(row) + at);
            const float2 old = accumulate ? *to : make_float2(0, 0);
            *to = make_float2(old.x + x, old.y + y);
        } else {
            unsigned *to = reinterpret_cast<unsigned *>(static_cast<uint16_t *>(row) + at);
            *to = pack(x + mz_from_bf16((uint16_t)*to), y + mz_from_bf16((uint16_t)(*to >> 16)));
        }
    }
}

/* u and v are rounded to what is stored before the activation, so that h is the same whether they
 * are kept or computed again. Returns the lane's part of the row's sum of squares. */
__device__ inline float store_up(const Product &p, int64_t row, int64_t col,
                                 float sum[PIECE / 8][4], int half, bool there) {
    unsigned gate[4], up[4], hidden[4];
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint16_t u[2], v[2], h[2];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            u[c] = mz_to_bf16(sum[2 * i][2 * half + c]);
            v[c] = mz_to_bf16(sum[2 * i + 1][2 * half + c]);
            h[c] = mz_to_bf16(mz_silu(mz_from_bf16(u[c])) * mz_from_bf16(v[c]));
            squares = fmaf(mz_from_bf16(h[c]), mz_from_bf16(h[c]), squares);
        }
        gate[i] = u[0] | (unsigned)u[1] << 16;
        up[i] = v[0] | (unsigned)v[1] << 16;
        hidden[i] = h[0] | (unsigned)h[1] << 16;
    }
    transpose4(gate);
    transpose4(up);
    transpose4(hidden);
    col += 8 * ((int)threadIdx.x % 4);
    if (there && col < p.cols) {
        store16(static_cast<uint16_t *>(p.out) + row * p.cols + col, hidden);
        if (p.gate_up) {
            uint16_t *kept = static_cast<uint16_t *>(p.gate_up) + row * 2 * p.cols + col;
            store16(kept, gate);
            store16(kept + p.cols, up);
        }
    }
    squares += __shfl_xor_sync(0xffffffffu, squares, 1);
    return squares + __shfl_xor_sync(0xffffffffu, squares, 2);
}

/* A row's part of one piece of columns, `col` the first of them (of h for up). */
template <Kind kind>
__device__ void store_row(const Product &p, const Operands<uint16_t> &o, const Place &place,
                          int64_t line, int64_t col, float sum[PIECE / 8][4], int half) {
    const bool there = line < o.lines;
    const int64_t row = o.row + line;
    if (kind == UP) {
        const float squares = store_up(p, row, col, sum, half, there);
        if (p.partial && there && threadIdx.x % 4 == 0 && col / UP_PIECE < p.parts)
            p.partial[row * p.parts + col / UP_PIECE] = squares;
        return;
    }
    if (kind != WGRAD) {
        store_narrow(static_cast<uint16_t *>(p.out) + row * p.cols, col, p.cols, sum, half, there);
        return;
    }
    void *weight = p.weight[place.group];
    if (!p.wide && !p.accumulate)
        store_narrow(static_cast<uint16_t *>(weight) + line * p.cols, col, p.cols, sum, half,
                     there);
    else if (there)
        store_sum(static_cast<char *>(weight) + line * p.cols * (p.wide ? 4 : 2), col, p.cols, sum,
                  half, p.wide, p.accumulate);
}

/* ---- launching ----------------------------------------------------------------------------------
 */

/* As many blocks as there can be tiles, at most `most`. */
inline unsigned blocks(const mz_groups *g, Kind kind, const Product &p, int lines, int cols,
                       int64_t most) {
    const int64_t across = (p.cols + cols - 1) / cols;
    const int64_t down = kind == WGRAD ? (int64_t)g->groups * ((p.lines + lines - 1) / lines)
                                       : g->rows_max / lines + g->groups;
    return (unsigned)(down >= (most + across - 1) / across ? most : down * across);
}

/* Lines of a group on average; of wgrad in every group. */
inline int64_t lines_of(Kind kind, const mz_groups *g, const Product &p) {
    return kind == WGRAD ? p.lines : g->rows_max / g->groups;
}

/* product_sm90.cu: bf16 products with wgmma, on a device of compute capability 9.0 alone. */
__attribute__((visibility("hidden"))) /* the library shows its interface alone */
int launch_sm90(const mz_cuda_device *d, void *stream, Kind kind, const mz_groups *g,
                const Product &p);

} /* namespace mz_grouped */

#endif
