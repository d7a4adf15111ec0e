/* Grouped GEMM on tensor cores (mma.sync m16n8k16, bf16 in, fp32 sums), and on fp32 cores for fp32
 * operands. On a device of compute capability 9.0 product_sm90.cu takes the bf16 products.
 *
 * Per launch, with R rows: 2 R n k FLOPs. Least bytes (every operand once, S its size): forward and
 * dgrad S (R n + R k + groups n k), wgrad the same with the weight's own size, twice that of the
 * weight where it accumulates. A tile of L x C outputs reads S depth (L + C) through L2: 128 x 128
 * needs 1 byte per 64 FLOPs. Bands of BAND tiles down keep what neighbours share in L2. */
#include "kernels/cuda/product.cuh"

namespace {

using namespace mz_grouped;

enum : int {
    DEPTH = 64, /* of a stage of the pipeline */
    STAGES = 3, /* 96 KiB for 128 x 128: two blocks on a multiprocessor */
    COLS = 128, /* of a tile: two warps; of up: 64 of the gate and the same 64 of up */
    THREADS = 128,
    SIDE = 64, /* of a tile of fp32 */
    FP32_DEPTH = 16,
    FP32_THREADS = 256
};

/* ---- shared memory ------------------------------------------------------------------------------
 * A stage holds DEPTH x LINES values of an operand as chunks of 8, either line by line or depth by
 * depth, as memory has them. The low three bits of a chunk's place are flipped by its row, so that
 * the eight rows of an ldmatrix tile lie in different banks. */

template <Layout layout, int LINES> __device__ int chunk_at(int line, int depth) {
    if (layout == BY_DEPTH)
        return depth * LINES + ((line / 8 ^ (depth & 7)) * 8);
    return line * DEPTH + ((depth / 8 ^ (line & 7)) * 8);
}

/* Starts the copy of lines `line`.. and depths `at`.. of an operand of `lines` x `depth`. */
template <Layout layout, int LINES>
__device__ void fetch(uint16_t *stage, const uint16_t *from, int64_t stride, int64_t line,
                      int64_t lines, int64_t at, int64_t depth) {
    constexpr int CHUNKS = layout == BY_DEPTH ? LINES / 8 : DEPTH / 8;
    constexpr int ROWS = layout == BY_DEPTH ? DEPTH : LINES, STEP = THREADS / CHUNKS;
    static_assert(THREADS % CHUNKS == 0 && ROWS % STEP == 0, "whole rounds of copies");
    const int first = (int)threadIdx.x / CHUNKS, chunk = (int)threadIdx.x % CHUNKS;
#pragma unroll
    for (int round = 0; round < ROWS / STEP; round++) {
        const int row = first + round * STEP;
        const int l = layout == BY_DEPTH ? chunk * 8 : row,
                  d = layout == BY_DEPTH ? row : chunk * 8;
        int64_t in = line + l;
        if (layout == GATE_UP)
            in = line + l / 16 * 8 + l % 8;
        const bool valid = in < lines && at + d < depth;
        if (layout == GATE_UP && l / 8 % 2)
            in += lines;
        const int64_t element = layout == BY_DEPTH ? (at + d) * stride + in : in * stride + at + d;
        cu_copy_async16(stage + chunk_at<layout, LINES>(l, d), from + (valid ? element : 0), valid);
    }
}

/* Fragments of 16 lines x 16 depths from (line, depth) on. */
template <Layout layout, int LINES>
__device__ void fragment_a(unsigned f[4], const uint16_t *stage, int line, int depth) {
    const int lane = threadIdx.x % 32;
    if (layout == BY_DEPTH)
        cu_ldmatrix_x4_transposed(f, stage +
                                         chunk_at<layout, LINES>(line + lane / 8 % 2 * 8,
                                                                 depth + lane % 8 + lane / 16 * 8));
    else
        cu_ldmatrix_x4(f, stage + chunk_at<layout, LINES>(line + lane % 16, depth + lane / 16 * 8));
}

/* f[0..1] of the first 8 lines, f[2..3] of the others. */
template <Layout layout, int LINES>
__device__ void fragment_b(unsigned f[4], const uint16_t *stage, int line, int depth) {
    const int lane = threadIdx.x % 32;
    if (layout == BY_DEPTH)
        cu_ldmatrix_x4_transposed(
            f, stage + chunk_at<layout, LINES>(line + lane / 16 * 8, depth + lane % 16));
    else
        cu_ldmatrix_x4(f, stage + chunk_at<layout, LINES>(line + lane % 8 + lane / 16 * 8,
                                                          depth + lane / 8 % 2 * 8));
}

/* ---- sums of a tile -----------------------------------------------------------------------------
 */

/* Two by two warps; a warp has LINES / 2 x PIECE of the tile. */
template <Kind kind, int LINES>
__device__ void multiply_stage(float sum[LINES / 32][PIECE / 8][4], const uint16_t *a,
                               const uint16_t *b) {
    const int warp = threadIdx.x / 32, line = warp / 2 * (LINES / 2), col = warp % 2 * PIECE;
#pragma unroll
    for (int depth = 0; depth < DEPTH; depth += 16) {
        unsigned fa[LINES / 32][4], fb[PIECE / 16][4];
#pragma unroll
        for (int i = 0; i < LINES / 32; i++)
            fragment_a<layout_a(kind), LINES>(fa[i], a, line + 16 * i, depth);
#pragma unroll
        for (int j = 0; j < PIECE / 16; j++)
            fragment_b<layout_b(kind), COLS>(fb[j], b, col + 16 * j, depth);
#pragma unroll
        for (int i = 0; i < LINES / 32; i++)
#pragma unroll
            for (int j = 0; j < PIECE / 8; j++)
                cu_mma_m16n8k16_bf16(sum[i][j], fa[i], fb[j / 2] + j % 2 * 2);
    }
}

template <Kind kind, int LINES>
__device__ void sum_tile(float sum[LINES / 32][PIECE / 8][4], uint16_t *shared,
                         const Operands<uint16_t> &o, const Place &place) {
    constexpr int STAGE = DEPTH * (LINES + COLS);
    const int64_t steps = (o.depth + DEPTH - 1) / DEPTH;
    const auto start = [&](int64_t step, int slot) {
        uint16_t *stage = shared + slot * STAGE;
        if (step < steps) {
            fetch<layout_a(kind), LINES>(stage, o.a, o.a_stride, place.line, o.lines, step * DEPTH,
                                         o.depth);
            fetch<layout_b(kind), COLS>(stage + DEPTH * LINES, o.b, o.b_stride, place.col, o.cols,
                                        step * DEPTH, o.depth);
        }
        cu_copy_commit();
    };
    for (int step = 0; step < STAGES - 1; step++)
        start(step, step);
    int slot = 0, ahead = STAGES - 1;
    for (int64_t step = 0; step < steps; step++) {
        cu_copy_wait<STAGES - 2>();
        __syncthreads(); /* this stage is there for all, and all have left the one before */
        start(step + STAGES - 1, ahead);
        const uint16_t *stage = shared + slot * STAGE;
        multiply_stage<kind, LINES>(sum, stage, stage + DEPTH * LINES);
        slot = slot == STAGES - 1 ? 0 : slot + 1;
        ahead = ahead == STAGES - 1 ? 0 : ahead + 1;
    }
    cu_copy_wait<0>();
    __syncthreads();
}

template <Kind kind, int LINES>
__global__ void __launch_bounds__(THREADS, 2) tensor_product(const Product p) {
    CU_DYN_SHARED(uint16_t, shared);
    constexpr int STEP = kind == UP ? COLS / 2 : COLS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Walk walk = {0, 0};
    Place place;
    for (int64_t tile = blockIdx.x; find(walk, p, kind, tile, LINES, STEP, place);
         tile += gridDim.x) {
        const Operands<uint16_t> o = operands<kind, uint16_t>(p, place.group);
        float sum[LINES / 32][PIECE / 8][4] = {};
        sum_tile<kind, LINES>(sum, shared, o, place);
#pragma unroll
        for (int i = 0; i < LINES / 32; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                store_row<kind>(
                    p, o, place, place.line + warp / 2 * (LINES / 2) + 16 * i + 8 * half + lane / 4,
                    place.col + warp % 2 * (kind == UP ? UP_PIECE : PIECE), sum[i], half);
    }
}

/* ---- fp32 operands ------------------------------------------------------------------------------
 * 64 x 64 outputs by 256 threads of 4 x 4, no tensor cores: fp32 is here to check against. Up:
 * columns of gate and up alternate. */

template <Kind kind>
__device__ float element_a(const Operands<float> &o, int64_t line, int64_t depth) {
    if (line >= o.lines || depth >= o.depth)
        return 0;
    return kind == WGRAD ? o.a[depth * o.a_stride + line] : o.a[line * o.a_stride + depth];
}

/* Column `c` of the tile that starts at `col`. */
template <Kind kind>
__device__ float element_b(const Operands<float> &o, int64_t col, int c, int64_t depth) {
    int64_t in = kind == UP ? col + c / 2 : col + c;
    if (in >= o.cols || depth >= o.depth)
        return 0;
    if (kind == UP && c % 2)
        in += o.cols;
    return kind == FORWARD || kind == UP ? o.b[in * o.b_stride + depth]
                                         : o.b[depth * o.b_stride + in];
}

/* The thread's four columns of one row. */
template <Kind kind>
__device__ void store_fp32(const Product &p, const Operands<float> &o, const Place &place,
                           int64_t line, int c, const float sum[4]) {
    const int64_t row = o.row + line;
    void *out = kind == WGRAD ? p.weight[place.group] : p.out;
    for (int j = 0; line < o.lines && kind != UP && j < 4 && place.col + c + j < p.cols; j++) {
        const int64_t at = (kind == WGRAD ? line : row) * p.cols + place.col + c + j;
        if (kind != WGRAD || p.wide) {
            float *to = static_cast<float *>(out) + at;
            *to = sum[j] + (p.accumulate ? *to : 0);
        } else {
            uint16_t *to = static_cast<uint16_t *>(out) + at;
            *to = mz_to_bf16(sum[j] + (p.accumulate ? mz_from_bf16(*to) : 0));
        }
    }
    if (kind != UP)
        return;
    float squares = 0;
    for (int j = 0; line < o.lines && j < 2 && place.col + c / 2 + j < p.cols; j++) {
        const int64_t col = place.col + c / 2 + j;
        const float u = sum[2 * j], v = sum[2 * j + 1], h = mz_silu(u) * v;
        static_cast<float *>(p.out)[row * p.cols + col] = h;
        squares = fmaf(h, h, squares);
        if (p.gate_up) {
            static_cast<float *>(p.gate_up)[row * 2 * p.cols + col] = u;
            static_cast<float *>(p.gate_up)[row * 2 * p.cols + p.cols + col] = v;
        }
    }
    for (int d = 1; d < 16; d *= 2)
        squares += __shfl_xor_sync(0xffffffffu, squares, d);
    if (p.partial && line < o.lines && c == 0)
        p.partial[row * p.parts + place.col / (SIDE / 2)] = squares;
}

template <Kind kind> __global__ void __launch_bounds__(FP32_THREADS) fp32_product(const Product p) {
    CU_SHARED(float, a, [FP32_DEPTH][SIDE + 4]);
    CU_SHARED(float, b, [FP32_DEPTH][SIDE + 4]);
    const int down = threadIdx.x / 16 * 4, right = threadIdx.x % 16 * 4;
    Walk walk = {0, 0};
    Place place;
    for (int64_t tile = blockIdx.x;
         find(walk, p, kind, tile, SIDE, kind == UP ? SIDE / 2 : SIDE, place); tile += gridDim.x) {
        const Operands<float> o = operands<kind, float>(p, place.group);
        float sum[4][4] = {};
        for (int64_t at = 0; at < o.depth; at += FP32_DEPTH) {
            for (int i = threadIdx.x; i < FP32_DEPTH * SIDE; i += FP32_THREADS) {
                const int d = kind == WGRAD ? i / SIDE : i % FP32_DEPTH;
                const int l = kind == WGRAD ? i % SIDE : i / FP32_DEPTH;
                a[d][l] = element_a<kind>(o, place.line + l, at + d);
                b[d][l] = element_b<kind>(o, place.col, l, at + d);
            }
            __syncthreads();
            for (int d = 0; d < FP32_DEPTH; d++)
                for (int i = 0; i < 4; i++)
                    for (int j = 0; j < 4; j++)
                        sum[i][j] = fmaf(a[d][down + i], b[d][right + j], sum[i][j]);
            __syncthreads();
        }
        for (int i = 0; i < 4; i++)
            store_fp32<kind>(p, o, place, place.line + down + i, right, sum[i]);
    }
}

/* ---- ||h||^2 ------------------------------------------------------------------------------------
 * A warp per row adds its parts: lanes by stride, then halves. Bytes: rows * (parts + 1) * 4. */

enum : int { NORM_ROWS = 8 };

__global__ void __launch_bounds__(32 * NORM_ROWS) add_parts(const Product p, float *norm2) {
    const int lane = threadIdx.x % 32;
    Walk walk = {0, 0};
    Place place;
    for (int64_t tile = blockIdx.x; find(walk, p, UP, tile, NORM_ROWS, 1, place);
         tile += gridDim.x) {
        const int64_t row = p.begin[place.group] + place.line + threadIdx.x / 32;
        if (row >= p.begin[place.group + 1])
            continue;
        float sum = 0;
        for (int64_t i = lane; i < p.parts; i += 32)
            sum += p.partial[row * p.parts + i];
        for (int d = 16; d > 0; d /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, d);
        if (lane == 0)
            norm2[row] = sum;
    }
}

/* ---- for the vendor's grouped GEMM --------------------------------------------------------------
 * A block per group writes where its operands are, in cuBLAS's order and without the empty groups;
 * an empty group's gradient, which cuBLAS then never sees, is zeroed here. */

enum : int { POINTER_THREADS = 256 };

__device__ void zero_gradient(const mz_product_args &args, void *weight) {
    const int64_t words = args.n * args.k * (args.gradient_type == MZ_BF16 ? 2 : 4) / 16;
    for (int64_t i = threadIdx.x; i < words; i += POINTER_THREADS)
        static_cast<uint4 *>(weight)[i] = make_uint4(0, 0, 0, 0);
}

/* How many groups before this one have rows; of a whole warp. */
__device__ int groups_before(const int64_t *begin, int group) {
    int before = 0;
    for (int g = threadIdx.x % 32; g < group; g += 32)
        before += begin[g] < begin[g + 1];
    for (int d = 16; d > 0; d /= 2)
        before += __shfl_xor_sync(0xffffffffu, before, d);
    return before;
}

__global__ void __launch_bounds__(POINTER_THREADS)
    vendor_pointers(const mz_product_args args, void **pointers) {
    const int64_t *begin = args.groups.begin;
    const int group = blockIdx.x;
    const bool forward = args.op == MZ_PRODUCT_FORWARD, wgrad = args.op == MZ_PRODUCT_WGRAD;
    void *weight = args.weight[group];
    if (begin[group] == begin[group + 1]) {
        if (wgrad && !args.accumulate && weight)
            zero_gradient(args, weight);
        return;
    }
    if (threadIdx.x >= 32)
        return;
    void **to = pointers + groups_before(begin, group);
    const int64_t row = begin[group] * (args.type == MZ_BF16 ? 2 : 4);
    char *a = static_cast<char *>(const_cast<void *>(args.a)) + row * (forward ? args.k : args.n);
    char *c = static_cast<char *>(args.c) + row * (forward ? args.n : args.k);
    if (threadIdx.x == 0) {
        to[0] = wgrad ? c : weight;
        to[args.groups.groups] = a;
        to[2 * args.groups.groups] = wgrad ? weight : c;
    }
}

/* ---- launching ----------------------------------------------------------------------------------
 */

template <Kind kind, int LINES>
int launch_tensor(const mz_cuda_device *d, void *stream, const mz_groups *g, const Product &p) {
    constexpr int BYTES = STAGES * DEPTH * (LINES + COLS) * (int)sizeof(uint16_t);
    static_assert(2 * BYTES <= 227 * 1024, "two blocks on a multiprocessor");
    auto *kernel = &tensor_product<kind, LINES>;
    if (BYTES > d->shared_most)
        return cudaErrorInvalidConfiguration;
    const unsigned grid =
        blocks(g, kind, p, LINES, kind == UP ? COLS / 2 : COLS, 2 * (int64_t)d->multiprocessors);
    const int error = cu_allow_shared(kernel, BYTES);
    return error ? error : CU_LAUNCH(kernel, grid, THREADS, BYTES, stream, p);
}

/* Tiles of 64 lines where groups have few rows on average. */
template <Kind kind>
int launch(const mz_cuda_device *d, void *stream, mz_dtype type, mz_product_engine engine,
           const mz_groups *g, const Product &p) {
    if (type == MZ_F32) {
        auto *kernel = &fp32_product<kind>;
        const unsigned grid =
            blocks(g, kind, p, SIDE, kind == UP ? SIDE / 2 : SIDE, 2 * (int64_t)d->multiprocessors);
        return CU_LAUNCH(kernel, grid, FP32_THREADS, 0, stream, p);
    }
    if (engine == MZ_ENGINE_OWN && d->capability == 90)
        return launch_sm90(d, stream, kind, g, p);
    return lines_of(kind, g, p) <= 64 ? launch_tensor<kind, 64>(d, stream, g, p)
                                      : launch_tensor<kind, 128>(d, stream, g, p);
}

/* Sums of squares per row: one of each tile of fp32, two (one a warp) of each of bf16, whichever
 * engine runs. */
int64_t parts_of(const mz_expert_up *args) {
    if (args->type == MZ_F32)
        return (args->intermediate + SIDE / 2 - 1) / (SIDE / 2);
    return (args->intermediate + COLS / 2 - 1) / (COLS / 2) * (COLS / PIECE);
}

} /* namespace */

size_t mz_cuda_grouped_gemm_workspace(const mz_cuda_device *, const mz_product_args *) {
    return 0;
}

int mz_cuda_grouped_gemm(const mz_cuda_device *d, void *stream, const mz_product_args *args,
                         void *) {
    const bool forward = args->op == MZ_PRODUCT_FORWARD, wgrad = args->op == MZ_PRODUCT_WGRAD;
    Product p = {};
    p.begin = args->groups.begin;
    p.groups = args->groups.groups;
    p.lines = args->n;
    p.cols = forward ? args->n : args->k;
    p.depth = forward ? args->k : args->n;
    p.a = args->a;
    p.b = wgrad ? args->c : NULL;
    p.weight = args->weight;
    p.out = wgrad ? NULL : args->c;
    p.accumulate = args->accumulate;
    p.wide = args->gradient_type == MZ_F32;
    if (wgrad)
        return launch<WGRAD>(d, stream, args->type, args->engine, &args->groups, p);
    if (args->groups.rows_max == 0)
        return cudaSuccess;
    return forward ? launch<FORWARD>(d, stream, args->type, args->engine, &args->groups, p)
                   : launch<DGRAD>(d, stream, args->type, args->engine, &args->groups, p);
}

size_t mz_cuda_expert_up_workspace(const mz_cuda_device *, const mz_expert_up *args) {
    return args->norm2 ? sizeof(float) * (size_t)(args->groups.rows_max * parts_of(args)) : 0;
}

/* Beside the product's (n = 2 I, without the store of gate_up where that is not kept): rows * I
 * activations, and with norm2 rows * parts * 4 bytes written and read. */
int mz_cuda_expert_up(const mz_cuda_device *d, void *stream, const mz_expert_up *args,
                      void *workspace) {
    if (args->groups.rows_max == 0)
        return cudaSuccess;
    Product p = {};
    p.begin = args->groups.begin;
    p.groups = args->groups.groups;
    p.cols = args->intermediate;
    p.depth = args->hidden;
    p.a = args->x;
    p.weight = args->weight;
    p.out = args->h;
    p.gate_up = args->gate_up;
    p.partial = args->norm2 ? static_cast<float *>(workspace) : NULL;
    p.parts = parts_of(args);
    const int error = launch<UP>(d, stream, args->type, args->engine, &args->groups, p);
    if (error || !args->norm2)
        return error;
    p.cols = 1; /* a tile is NORM_ROWS rows */
    const unsigned grid =
        blocks(&args->groups, UP, p, NORM_ROWS, 1, 8 * (int64_t)d->multiprocessors);
    return CU_LAUNCH(add_parts, grid, 32 * NORM_ROWS, 0, stream, p, args->norm2);
}

int mz_cuda_vendor_pointers(void *stream, const mz_product_args *args, void *workspace) {
    return CU_LAUNCH(vendor_pointers, (unsigned)args->groups.groups, POINTER_THREADS, 0, stream,
                     *args, static_cast<void **>(workspace));
}
