/* Never built with -fsanitize=thread, like the scheduler. */
#include "warpgroup.h"
#include "scheduler.h"

#include <algorithm>
#include <map>

namespace cuemu {

enum : unsigned { FULL = 0xffffffffu, ADDRESSES = 1u << 18 };

/* What a warp's product multiplies: its 16 lines of A, all of B. */
static struct Tile {
    float a[16][16];  /* [line][depth] */
    float b[16][256]; /* [depth][column] */
    float sum[16][256];
} tiles[32];

static Tile &tile_of_warp() {
    return tiles[current->number / 32];
}

static void nothing(void *const *, unsigned) {
}

static void aligned(const char *name, bool orders_memory = false) {
    int none = 0;
    collective(name, nothing, FULL, &none, orders_memory);
}

/* ---- descriptors --------------------------------------------------------------------------------
 */

static unsigned field(uint64_t descriptor, int bit) {
    return (unsigned)(descriptor >> bit & 0x3fff) << 4;
}

static void check_descriptor(uint64_t d) {
    const uint64_t reserved =
        UINT64_C(3) << 14 | UINT64_C(3) << 30 | UINT64_C(7) << 46 | UINT64_C(0x3ff) << 52;
    if (d & reserved)
        die("wgmma: a descriptor with reserved bits set");
    if (d >> 49 & 7)
        die("wgmma: a descriptor with a base offset, which this emulation does not have");
}

/* The shared address of the 16 bytes from (line, depth) on: the canonical layouts of 9.7.15.5.1.2,
 * then the swizzle. */
static unsigned chunk_address(uint64_t d, bool along_lines, unsigned line, unsigned depth) {
    const unsigned start = field(d, 0), leading = field(d, 16), stride = field(d, 32);
    const unsigned mode = (unsigned)(d >> 62), width = mode ? 256 >> mode : 16;
    unsigned at;
    if (!along_lines)
        at = line / 8 * stride + line % 8 * width + depth / 8 * (mode ? 16 : leading);
    else if (mode)
        at = line / 8 / (width / 16) * leading + line / 8 % (width / 16) * 16 + depth / 8 * stride +
             depth % 8 * width;
    else
        at = line / 8 * stride + depth / 8 * leading + depth % 8 * 16;
    at = (start + at) % ADDRESSES;
    return at ^ (at >> 3 & (width - 16));
}

static Chunk chunk_of(uint64_t d, bool along_lines, int line, int depth, bool of_b) {
    const unsigned address = chunk_address(d, along_lines, (unsigned)line, (unsigned)depth);
    return Chunk{shared_pointer(address), line, depth, of_b};
}

Chunks chunks_of_lane(const Wgmma &p) {
    const int lane = current->number % 32, first = (int)(current->number / 32 % 4) * 16;
    Chunks mine = {};
    mine.chunk[mine.n++] = p.a_lines ? chunk_of(p.a, true, first + lane % 2 * 8, lane / 2, false)
                                     : chunk_of(p.a, false, first + lane / 2, lane % 2 * 8, false);
    for (int i = lane; i < 2 * p.n; i += 32)
        mine.chunk[mine.n++] = p.b_lines ? chunk_of(p.b, true, i / 16 * 8, i % 16, true)
                                         : chunk_of(p.b, false, i / 2, i % 2 * 8, true);
    return mine;
}

/* ---- products -----------------------------------------------------------------------------------
 */

static size_t products_of_lanes;

/* wgmma and setmaxnreg are of sm_90a, which no other device runs. */
static bool has_warpgroups;

static void need_warpgroups() {
    if (!has_warpgroups)
        die("wgmma or setmaxnreg on a device that is not of compute capability 9.0");
}

/* All four warps of a warpgroup run the same products. */
static std::map<unsigned, std::vector<Wgmma>> issued;

static bool same(const Wgmma &a, const Wgmma &b) {
    return a.a == b.a && a.b == b.b && a.n == b.n && a.a_lines == b.a_lines &&
           a.b_lines == b.b_lines;
}

static void compare_warps(const Wgmma &product) {
    std::vector<Wgmma> &all = issued[current->number / 128];
    const size_t i = current->warpgroup.issued++;
    if (i == all.size())
        all.push_back(product);
    else if (!same(all[i], product))
        die("wgmma: the warps of a warpgroup ask for different products");
}

void wgmma_start(float *sums, const Wgmma &product) {
    const Unwatched unwatched;
    Warpgroup &w = current->warpgroup;
    need_warpgroups();
    products_of_lanes++;
    check_descriptor(product.a);
    check_descriptor(product.b);
    if (product.n < 8 || product.n > 256 || product.n % 8)
        die("wgmma: no such number of columns");
    compare_warps(product);
    aligned("wgmma");
    if (!w.sums) {
        if (!w.fenced)
            die("wgmma: no wgmma.fence since its sums were last used");
        w.sums = sums;
        w.shadow.assign(sums, sums + product.n / 2);
        memset(sums, 0xff, w.shadow.size() * sizeof *sums);
    } else if (w.sums != sums || w.products.back().n != product.n) {
        die("wgmma: products in flight on other sums, which this emulation does not have");
    }
    w.products.push_back(product);
}

void wgmma_operand(const Chunk &chunk, bool along_lines, const uint16_t value[8]) {
    Tile &t = tile_of_warp();
    for (int i = 0; i < 8; i++) {
        const uint32_t bits = (uint32_t)value[i] << 16;
        const int line = chunk.line + (along_lines ? i : 0);
        const int depth = chunk.depth + (along_lines ? 0 : i);
        memcpy(chunk.of_b ? &t.b[depth][line] : &t.a[line % 16][depth], &bits, sizeof bits);
    }
}

struct Share {
    const Wgmma *product;
    float *shadow;
};

static void resolve_wgmma(void *const data[32], unsigned) {
    const Unwatched unwatched; /* of memset too */
    Tile &t = tile_of_warp();
    const int n = static_cast<Share *>(data[0])->product->n;
    for (int line = 0; line < 16; line++) {
        float *sum = t.sum[line];
        std::fill(sum, sum + n, 0.0f);
        for (int depth = 0; depth < 16; depth++)
            for (int col = 0; col < n; col++)
                sum[col] += t.a[line][depth] * t.b[depth][col];
    }
    for (int lane = 0; lane < 32; lane++) {
        float *d = static_cast<Share *>(data[lane])->shadow;
        for (int i = 0; i < n / 2; i++)
            d[i] += t.sum[lane / 4 + i % 4 / 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
    }
}

void wgmma_multiply(const Wgmma &product) {
    Share share = {&product, current->warpgroup.shadow.data()};
    collective("wgmma's end", resolve_wgmma, FULL, &share, false);
}

void wgmma_deliver() {
    Warpgroup &w = current->warpgroup;
    aligned("wgmma.wait_group", true); /* the warp's reads are over, whichever lane says so */
    if (!w.sums || !w.products.empty())
        return;
    const size_t bytes = w.shadow.size() * sizeof *w.sums;
    const unsigned char *now = reinterpret_cast<const unsigned char *>(w.sums);
    if (std::any_of(now, now + bytes, [](unsigned char byte) { return byte != 0xff; }))
        die("wgmma: sums were written while a product that adds to them was in flight");
    memcpy(w.sums, w.shadow.data(), bytes);
    w.sums = nullptr;
    w.fenced = false;
}

void wgmma_commit() {
    aligned("wgmma.commit_group");
    current->warpgroup.groups.push_back(current->warpgroup.products.size());
}

void wgmma_fence() {
    aligned("wgmma.fence");
    current->warpgroup.fenced = true;
}

/* ---- threads and blocks -------------------------------------------------------------------------
 */

/* What a launch with __launch_bounds__ of this many threads gives each of them at most. */
static int registers_launched() {
    const unsigned threads = block_dim.x * block_dim.y * block_dim.z;
    return (int)std::min(65536 / threads / 8 * 8, 255u);
}

void set_registers(int n, bool more) {
    Warpgroup &w = current->warpgroup;
    const int launched = registers_launched();
    need_warpgroups();
    if (n < 24 || n > 256 || n % 8)
        die("setmaxnreg: not a multiple of 8 from 24 to 256");
    const int now = w.registers ? w.registers : launched;
    if (more ? n < now : n > now)
        die("setmaxnreg: more is fewer, or fewer more");
    aligned("setmaxnreg");
    w.registers = n;
}

void warpgroups_begin() {
    issued.clear();
    has_warpgroups = device().capability == 90;
}

void warpgroup_thread_begins(Warpgroup &w) {
    w.products.clear();
    w.groups.clear();
    w.shadow.clear();
    w.sums = nullptr;
    w.issued = 0;
    w.proxy_fence = 0;
    w.registers = 0;
    w.fenced = false;
}

void warpgroup_thread_ends() {
    if (!current->warpgroup.products.empty())
        die("a thread exits with a wgmma in flight");
}

void warpgroups_end() {
    const std::vector<Fiber> &fibers = fibers_of_block();
    const size_t launched = (size_t)registers_launched();
    size_t registers = 0;
    bool moved = false;
    for (const Fiber &f : fibers) {
        const auto all = issued.find(f.number / 128);
        if (all != issued.end() && all->second.size() != f.warpgroup.issued)
            die("wgmma: the warps of a warpgroup ran different numbers of products");
        moved |= f.warpgroup.registers > 0;
        registers += f.warpgroup.registers ? (size_t)f.warpgroup.registers : launched;
    }
    if (moved && registers > launched * fibers.size())
        die("setmaxnreg: more registers than the block has");
}

} /* namespace cuemu */

size_t cuemu_wgmmas() {
    return cuemu::products_of_lanes;
}
