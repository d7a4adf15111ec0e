/* Warp collectives: each lane leaves a record, the last lane to arrive serves all of them. */
#ifndef MIZAN_TESTS_SHIM_WARP_H
#define MIZAN_TESTS_SHIM_WARP_H

#include "emulator.h"

#include <string.h>

namespace cuemu {

/* ---- shuffles -----------------------------------------------------------------------------------
 */

enum Shuffle { SHUFFLE, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_XOR };

template <class T> struct Shuffled {
    T value, result;
    int argument, width;
    Shuffle kind;
};

CUEMU_RUNTIME inline int shuffle_source(int lane, int argument, int width, Shuffle kind) {
    const int base = lane & ~(width - 1), inside = lane - base;
    switch (kind) {
    case SHUFFLE:
        return base + (argument & (width - 1));
    case SHUFFLE_UP:
        return inside >= argument ? lane - argument : lane;
    case SHUFFLE_DOWN:
        return inside + argument < width ? lane + argument : lane;
    case SHUFFLE_XOR:
        break;
    }
    return (lane ^ argument) < base + width ? (lane ^ argument) : lane;
}

template <class T> CUEMU_RUNTIME void resolve_shuffle(void *const data[32], unsigned mask) {
    for (int lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1))
            continue;
        Shuffled<T> *s = static_cast<Shuffled<T> *>(data[lane]);
        const int source = shuffle_source(lane, s->argument, s->width, s->kind);
        if (mask >> source & 1)
            s->result = static_cast<Shuffled<T> *>(data[source])->value;
        else /* an absent lane's value is undefined */
            memset(static_cast<void *>(&s->result), 0xff, sizeof s->result);
    }
}

template <class T> T shuffle(unsigned mask, T value, int argument, int width, Shuffle kind) {
    static const char *const name[4] = {"shfl", "shfl_up", "shfl_down", "shfl_xor"};
    Shuffled<T> s{value, value, argument, width, kind};
    collective(name[kind], resolve_shuffle<T>, mask, &s, false);
    return s.result;
}

/* ---- votes, reductions, matches -----------------------------------------------------------------
 */

struct Vote {
    int predicate;
    unsigned result;
};

CUEMU_RUNTIME inline void resolve_vote(void *const data[32], unsigned mask) {
    unsigned ballot = 0;
    for (int lane = 0; lane < 32; lane++)
        if ((mask >> lane & 1) && static_cast<Vote *>(data[lane])->predicate)
            ballot |= 1u << lane;
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1)
            static_cast<Vote *>(data[lane])->result = ballot;
}

inline unsigned ballot(unsigned mask, int predicate) {
    Vote v{predicate, 0};
    collective("ballot", resolve_vote, mask, &v, false);
    return v.result;
}

enum Reduction { SUM, LEAST, MOST, BITS_AND, BITS_OR };

template <class T> struct Reduced {
    T value, result;
    Reduction kind;
};

template <class T> CUEMU_RUNTIME T reduced(T a, T b, Reduction kind) {
    switch (kind) {
    case SUM:
        return a + b;
    case LEAST:
        return a < b ? a : b;
    case MOST:
        return a > b ? a : b;
    case BITS_AND:
        return a & b;
    case BITS_OR:
        break;
    }
    return a | b;
}

template <class T> CUEMU_RUNTIME void resolve_reduction(void *const data[32], unsigned mask) {
    T all{};
    bool first = true;
    for (int lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1))
            continue;
        const Reduced<T> *r = static_cast<Reduced<T> *>(data[lane]);
        all = first ? r->value : reduced(all, r->value, r->kind);
        first = false;
    }
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1)
            static_cast<Reduced<T> *>(data[lane])->result = all;
}

template <class T> T reduce(unsigned mask, T value, Reduction kind) {
    Reduced<T> r{value, value, kind};
    collective("reduce", resolve_reduction<T>, mask, &r, false);
    return r.result;
}

template <class T> struct Matched {
    T value;
    unsigned result;
};

template <class T> CUEMU_RUNTIME void resolve_match(void *const data[32], unsigned mask) {
    for (int lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1))
            continue;
        Matched<T> *mine = static_cast<Matched<T> *>(data[lane]);
        mine->result = 0;
        for (int other = 0; other < 32; other++)
            if ((mask >> other & 1) && static_cast<Matched<T> *>(data[other])->value == mine->value)
                mine->result |= 1u << other;
    }
}

template <class T> unsigned match_any(unsigned mask, T value) {
    Matched<T> m{value, 0};
    collective("match_any", resolve_match<T>, mask, &m, false);
    return m.result;
}

CUEMU_RUNTIME inline void resolve_nothing(void *const *, unsigned) {
}

inline void sync_warp(unsigned mask) {
    int none = 0;
    collective("syncwarp", resolve_nothing, mask, &none, true);
}

/* ---- tensor cores: mma.sync.m16n8k16 and ldmatrix, fragments as PTX's manual has them -----------
 */

struct Mma {
    uint32_t a[4], b[2];
    float d[4];
};

CUEMU_RUNTIME inline float bf16_half(uint32_t pair, int half) {
    const uint32_t bits = (half ? pair >> 16 : pair & 0xffff) << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

CUEMU_RUNTIME inline void resolve_mma(void *const data[32], unsigned) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const Mma *m = static_cast<Mma *>(data[lane]);
        const int group = lane >> 2, in = (lane & 3) * 2;
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < 4; i++)
                a[group + (i & 1) * 8][in + half + (i >> 1) * 8] = bf16_half(m->a[i], half);
            for (int i = 0; i < 2; i++)
                b[in + half + i * 8][group] = bf16_half(m->b[i], half);
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        Mma *m = static_cast<Mma *>(data[lane]);
        for (int i = 0; i < 4; i++) {
            const int row = (lane >> 2) + (i >> 1) * 8, col = (lane & 3) * 2 + (i & 1);
            for (int k = 0; k < 16; k++)
                m->d[i] += a[row][k] * b[k][col];
        }
    }
}

struct Matrices {
    uint16_t row[8]; /* the lane's own */
    uint32_t result[4];
    bool transposed;
};

CUEMU_RUNTIME inline void resolve_matrices(void *const data[32], unsigned) {
    for (int lane = 0; lane < 32; lane++) {
        Matrices *m = static_cast<Matrices *>(data[lane]);
        for (int tile = 0; tile < 4; tile++) {
            uint32_t half[2];
            for (int h = 0; h < 2; h++) {
                const int row = m->transposed ? (lane & 3) * 2 + h : lane >> 2;
                const int col = m->transposed ? lane >> 2 : (lane & 3) * 2 + h;
                half[h] = static_cast<Matrices *>(data[tile * 8 + row])->row[col];
            }
            m->result[tile] = half[0] | half[1] << 16;
        }
    }
}

/* Each lane reads the row whose address it gives, in the sight of the sanitizers. */
inline void load_matrices(unsigned r[4], const void *row, bool transposed) {
    Matrices m;
    if (reinterpret_cast<uintptr_t>(row) % 16)
        die("ldmatrix: a row that does not start at a multiple of 16 bytes");
    for (int i = 0; i < 8; i++)
        m.row[i] = static_cast<const uint16_t *>(row)[i];
    m.transposed = transposed;
    collective(transposed ? "ldmatrix.trans" : "ldmatrix", resolve_matrices, 0xffffffffu, &m,
               false);
    memcpy(r, m.result, sizeof m.result);
}

} /* namespace cuemu */

#endif
