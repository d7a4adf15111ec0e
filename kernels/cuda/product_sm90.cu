/* Grouped GEMM with wgmma for compute capability 9.0: bf16 in, fp32 sums.
 *
 * A block is three warpgroups on one multiprocessor. The first fetches: its threads copy the next
 * stages of both operands, 16 bytes at a time and swizzled, into a ring in shared memory; what lies
 * outside the group is filled with zeros and not read. The two others multiply and store. A slot of
 * the ring has two barriers: `full`, which the copies of every fetching thread arrive at, and
 * `empty`, which every multiplying warp arrives at once its products of that slot are complete.
 * Fetching runs on into the next tile while the sums of this one are stored.
 *
 * Tiles are 128 x 256, a warpgroup 64 lines of them; where groups have few lines 64 x 256, a
 * warpgroup 128 columns. FLOPs and bytes as product.cu; a tile of 128 x 256 moves 1 byte through L2
 * for 85 FLOPs, and 48 KiB into shared memory for the 1,024 cycles that its products take at least.
 */
#include "kernels/cuda/product.cuh"
#include "kernels/cuda/warpgroup.cuh"

namespace {

using namespace mz_grouped;

enum : int {
    DEPTH = 64, /* of a stage: 128 bytes, the width of the swizzle */
    COLS = 256, /* of a tile; of up: 128 of the gate and the same 128 of up */
    STAGES = 4,
    GROUP = 128, /* threads of a warpgroup */
    THREADS = 3 * GROUP,
    WARPS = 2 * GROUP / 32, /* that multiply */
    /* A launch gives 168 to every thread; 3 x 168 = 56 + 2 x 224. */
    FETCH_REGISTERS = 56,
    MULTIPLY_REGISTERS = 224,
    ALIGNMENT = 1024,   /* bytes after which the swizzle repeats */
    ROW = 2 * DEPTH,    /* bytes of a row of the swizzle */
    PANEL = ROW * DEPTH /* bytes of DEPTH rows: 64 lines of an operand, whichever way they lie */
};

/* Of a stage: LINES of the first operand, COLS of the second. */
template <int LINES> constexpr int STAGE_BYTES = (LINES + COLS) / 64 * PANEL;

/* A place in the ring of stages. Both sides walk it alike; parity flips with every round. */
struct Slot {
    int at;
    unsigned parity;
};

__device__ void advance(Slot &slot) {
    slot.at = slot.at == STAGES - 1 ? 0 : slot.at + 1;
    slot.parity ^= slot.at == 0;
}

/* ---- fetching -----------------------------------------------------------------------------------
 * An operand's stage is panels of 64 lines. BY_LINE (and GATE_UP): a row of 128 bytes is one line;
 * BY_DEPTH: it is 64 lines of one depth. Chunks of 16 bytes are swizzled by the row's low three
 * bits. */

/* Bytes from the start of an operand's stage to the chunk of this line and depth. */
template <Layout layout> __device__ int chunk_at(int line, int depth) {
    if (layout == BY_DEPTH)
        return line / 64 * PANEL + depth * ROW + ((line / 8 ^ depth) & 7) * 16;
    return line * ROW + ((depth / 8 ^ line) & 7) * 16;
}

/* What one thread copies of one operand: a chunk in each of several rounds, stage after stage. */
struct Feed {
    const uint16_t *from, *valid; /* its next chunk; an address that may always be named */
    int64_t round, stage;         /* elements from round to round and from stage to stage */
    int64_t lines, depth;         /* what is left of the operand from its first chunk on */
};

template <Layout layout, int LINES> struct Rounds {
    static constexpr int CHUNKS = layout == BY_DEPTH ? LINES / 8 : DEPTH / 8; /* side by side */
    static constexpr int STEP = GROUP / CHUNKS; /* rows from round to round */
    static constexpr int COUNT = (layout == BY_DEPTH ? DEPTH : LINES) / STEP;
    static_assert(GROUP % CHUNKS == 0 && COUNT * STEP == (layout == BY_DEPTH ? DEPTH : LINES),
                  "whole rounds");
};

/* The feed of lines `line`.. of an operand of `lines` x `depth`. */
template <Layout layout, int LINES>
__device__ Feed feed(const uint16_t *operand, int64_t stride, int64_t line, int64_t lines,
                     int64_t depth) {
    using R = Rounds<layout, LINES>;
    const int row = (int)threadIdx.x / R::CHUNKS, chunk = (int)threadIdx.x % R::CHUNKS * 8;
    if (layout == BY_DEPTH)
        return Feed{operand + row * stride + line + chunk,
                    operand,
                    R::STEP * stride,
                    DEPTH * stride,
                    lines - line - chunk,
                    depth - row};
    if (layout == BY_LINE)
        return Feed{operand + (line + row) * stride + chunk,
                    operand,
                    R::STEP * stride,
                    DEPTH,
                    lines - line - row,
                    depth - chunk};
    /* A round is eight lines of the gate and the same eight of up. */
    static_assert(layout != GATE_UP || R::STEP == 16, "eight and eight lines a round");
    const int64_t first = line + row % 8;
    return Feed{operand + (first + row / 8 * lines) * stride + chunk,
                operand,
                8 * stride,
                DEPTH,
                lines - first,
                depth - chunk};
}

/* Starts the copies of the feed's next stage. */
template <Layout layout, int LINES> __device__ void fetch(char *stage, Feed &f) {
    using R = Rounds<layout, LINES>;
    constexpr int LINE_STEP = layout == GATE_UP ? 8 : R::STEP;
    const int row = (int)threadIdx.x / R::CHUNKS, chunk = (int)threadIdx.x % R::CHUNKS * 8;
    const uint16_t *from = f.from;
#pragma unroll
    for (int round = 0; round < R::COUNT; round++) {
        const int at = row + round * R::STEP;
        const bool there = layout == BY_DEPTH ? f.lines > 0 && round * R::STEP < f.depth
                                              : f.depth > 0 && round * LINE_STEP < f.lines;
        cu_copy_async16(stage + (layout == BY_DEPTH ? chunk_at<layout>(chunk, at)
                                                    : chunk_at<layout>(at, chunk)),
                        there ? from : f.valid, there);
        from += f.round;
    }
    f.from += f.stage;
    f.depth -= DEPTH;
}

template <Kind kind, int LINES>
__device__ void fetch_tiles(const Product &p, char *ring, uint64_t *full, uint64_t *empty) {
    constexpr Layout A = layout_a(kind), B = layout_b(kind);
    Walk walk = {0, 0};
    Place place;
    Slot slot = {0, 0};
    for (int64_t tile = blockIdx.x;
         find(walk, p, kind, tile, LINES, kind == UP ? COLS / 2 : COLS, place); tile += gridDim.x) {
        const Operands<uint16_t> o = operands<kind, uint16_t>(p, place.group);
        Feed a = feed<A, LINES>(o.a, o.a_stride, place.line, o.lines, o.depth);
        Feed b = feed<B, COLS>(o.b, o.b_stride, place.col, o.cols, o.depth);
        for (int64_t at = 0; at < o.depth; at += DEPTH) {
            char *stage = ring + slot.at * STAGE_BYTES<LINES>;
            cu_barrier_wait(&empty[slot.at], slot.parity ^ 1);
            fetch<A, LINES>(stage, a);
            fetch<B, COLS>(stage + LINES / 64 * PANEL, b);
            cu_barrier_arrive_copied(&full[slot.at]);
            advance(slot);
        }
    }
    /* Nothing is promised of the copies of threads that have exited: these stay until every slot
     * has been used. */
    for (int i = 0; i < STAGES; i++, advance(slot))
        cu_barrier_wait(&empty[slot.at], slot.parity ^ 1);
}

/* ---- multiplying --------------------------------------------------------------------------------
 */

/* Describes an operand with 128-byte swizzle that starts at a shared address; the leading offset
 * counts where memory runs along the lines, 1 stands for none. */
template <Layout layout> __device__ uint64_t descriptor(unsigned address) {
    constexpr uint64_t eight_rows = 8 * ROW / 16, swizzle_128 = 1;
    constexpr uint64_t leading = layout == BY_DEPTH ? PANEL / 16 : 1;
    return address / 16 | leading << 16 | eight_rows << 32 | swizzle_128 << 62;
}

/* In units of 16 bytes, what a descriptor moves by for the next 16 depths. */
constexpr __device__ int step_of(Layout layout) {
    return layout == BY_DEPTH ? 16 * ROW / 16 : 16 * 2 / 16;
}

template <Kind kind, int BLOCKS>
__device__ void multiply_stage(float (&sum)[BLOCKS][4], uint64_t a, uint64_t b) {
    constexpr Layout A = layout_a(kind), B = layout_b(kind);
    cu_wgmma_fence();
#pragma unroll
    for (int i = 0; i < DEPTH / 16; i++)
        cu_wgmma<A == BY_DEPTH, B == BY_DEPTH>(sum, a + i * step_of(A), b + i * step_of(B));
    cu_wgmma_commit();
}

/* The sums of a warpgroup's part of a tile. `a`, `b`: its descriptors in the ring's first slot. One
 * stage's products stay in flight while the next one's start. */
template <Kind kind, int STAGE, int BLOCKS>
__device__ void sum_tile(float (&sum)[BLOCKS][4], uint64_t a, uint64_t b, int64_t depth, Slot &slot,
                         uint64_t *full, uint64_t *empty) {
    int before = -1; /* the slot whose products are in flight */
    for (int64_t at = 0; at < depth; at += DEPTH) {
        cu_barrier_wait(&full[slot.at], slot.parity);
        cu_fence_async_proxy();
        multiply_stage<kind>(sum, a + slot.at * (STAGE / 16), b + slot.at * (STAGE / 16));
        cu_wgmma_wait<1>();
        if (before >= 0 && threadIdx.x % 32 == 0)
            cu_barrier_arrive(&empty[before]);
        before = slot.at;
        advance(slot);
    }
    cu_wgmma_finish(sum);
    if (before >= 0 && threadIdx.x % 32 == 0)
        cu_barrier_arrive(&empty[before]);
}

template <Kind kind, int LINES>
__device__ void multiply_tiles(const Product &p, const char *ring, uint64_t *full,
                               uint64_t *empty) {
    constexpr int STAGE = STAGE_BYTES<LINES>, WIDE = kind == UP ? COLS / 2 : COLS;
    constexpr int BLOCKS = LINES / 64 * COLS / 16; /* of 8 columns */
    constexpr int PIECES = BLOCKS / (PIECE / 8), STORED = kind == UP ? UP_PIECE : PIECE;
    /* The same in all lanes, which the descriptors' registers want to know. */
    const int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / GROUP - 1, 0);
    const int lane = threadIdx.x % 32;
    const int down = LINES == 64 ? 0 : group, right = LINES == 64 ? group : 0;
    const unsigned start = cu_shared_address(ring);
    const uint64_t a = descriptor<layout_a(kind)>(start + down * PANEL);
    const uint64_t b =
        descriptor<layout_b(kind)>(start + (LINES + right * (COLS / 2)) / 64 * PANEL);
    Walk walk = {0, 0};
    Place place;
    Slot slot = {0, 0};
    for (int64_t tile = blockIdx.x; find(walk, p, kind, tile, LINES, WIDE, place);
         tile += gridDim.x) {
        const Operands<uint16_t> o = operands<kind, uint16_t>(p, place.group);
        float sum[BLOCKS][4] = {};
        sum_tile<kind, STAGE>(sum, a, b, o.depth, slot, full, empty);
        const int64_t line = place.line + down * 64 + (int)threadIdx.x % GROUP / 32 * 16 + lane / 4;
        const int64_t col = place.col + right * (WIDE / 2);
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                store_row<kind>(p, o, place, line + 8 * half, col + piece * STORED,
                                sum + piece * (PIECE / 8), half);
    }
}

template <Kind kind, int LINES>
__global__ void __launch_bounds__(THREADS, 1) warpgroup_product(const Product p) {
    CU_SHARED(uint64_t, barriers, [2 * STAGES]);
    CU_DYN_SHARED(char, shared);
    uint64_t *full = barriers, *empty = barriers + STAGES;
    char *ring = shared + (ALIGNMENT - cu_shared_address(shared) % ALIGNMENT) % ALIGNMENT;
    if (threadIdx.x == 0)
        for (int i = 0; i < STAGES; i++) {
            cu_barrier_init(&full[i], GROUP);
            cu_barrier_init(&empty[i], WARPS);
        }
    __syncthreads();
    if (threadIdx.x < GROUP) {
        cu_fewer_registers<FETCH_REGISTERS>();
        fetch_tiles<kind, LINES>(p, ring, full, empty);
    } else {
        cu_more_registers<MULTIPLY_REGISTERS>();
        multiply_tiles<kind, LINES>(p, ring, full, empty);
    }
}

template <Kind kind, int LINES>
int launch(const mz_cuda_device *d, void *stream, const mz_groups *g, const Product &p) {
    constexpr int BYTES = STAGES * STAGE_BYTES<LINES> + ALIGNMENT;
    static_assert(BYTES + 2 * STAGES * 8 <= 227 * 1024, "what a block may have");
    auto *kernel = &warpgroup_product<kind, LINES>;
    if (BYTES > d->shared_most)
        return cudaErrorInvalidConfiguration;
    const unsigned grid =
        blocks(g, kind, p, LINES, kind == UP ? COLS / 2 : COLS, d->multiprocessors);
    const int error = cu_allow_shared(kernel, BYTES);
    return error ? error : CU_LAUNCH(kernel, grid, THREADS, BYTES, stream, p);
}

template <Kind kind>
int launch_lines(const mz_cuda_device *d, void *stream, const mz_groups *g, const Product &p) {
    return lines_of(kind, g, p) <= 64 ? launch<kind, 64>(d, stream, g, p)
                                      : launch<kind, 128>(d, stream, g, p);
}

} /* namespace */

int mz_grouped::launch_sm90(const mz_cuda_device *d, void *stream, Kind kind, const mz_groups *g,
                            const Product &p) {
    switch (kind) {
    case FORWARD:
        return launch_lines<FORWARD>(d, stream, g, p);
    case DGRAD:
        return launch_lines<DGRAD>(d, stream, g, p);
    case WGRAD:
        return launch_lines<WGRAD>(d, stream, g, p);
    case UP:
        break;
    }
    return launch_lines<UP>(d, stream, g, p);
}
