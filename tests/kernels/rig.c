#include "tests/kernels/rig.h"
#include "tests/kernels/reference.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SANITIZE_ADDRESS__)
#define RIG_ADDRESS
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define RIG_ADDRESS
#endif
#endif
#ifdef RIG_ADDRESS
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

enum { GUARD = 256, GUARD_BYTE = 0xa5, POISON = 0xff };

struct rig_block {
    struct rig_block *next;
    char *memory; /* GUARD bytes, `bytes`, GUARD bytes */
    size_t bytes;
};

struct rig_memory {
    struct rig_memory *next;
    size_t bytes; /* keeps what follows aligned */
};

_Noreturn void rig_fail(rig *r, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(r->message, sizeof r->message, format, args);
    va_end(args);
    longjmp(r->escape, 1);
}

void rig_status(rig *r, const char *call, mz_kstatus status) {
    if (status != MZ_K_OK)
        rig_fail(r, "%.200s: status %d: %s", call, (int)status, mz_kernels_error(r->kernels));
}

/* ---- memory -------------------------------------------------------------------------------------
 */

void *rig_host(rig *r, size_t bytes) {
    struct rig_memory *m = calloc(1, sizeof *m + bytes);
    if (!m)
        rig_fail(r, "no memory for %zu bytes", bytes);
    m->next = r->host;
    m->bytes = bytes;
    r->host = m;
    return m + 1;
}

/* Guards of host memory are closed to reads as well where the address sanitizer is there. */
static void guards(const rig *r, const struct rig_block *b, bool closed) {
    char *after = b->memory + GUARD + b->bytes;
    if (mz_kernels_backend(r->kernels) != MZ_BACKEND_HOST)
        return;
    if (closed) {
        ASAN_POISON_MEMORY_REGION(b->memory, GUARD);
        ASAN_POISON_MEMORY_REGION(after, GUARD);
    } else {
        ASAN_UNPOISON_MEMORY_REGION(b->memory, GUARD);
        ASAN_UNPOISON_MEMORY_REGION(after, GUARD);
    }
}

static void *block(rig *r, const void *data, size_t bytes) {
    struct rig_block *b = rig_host(r, sizeof *b);
    unsigned char *image = malloc(bytes + 2 * GUARD);
    if (!image)
        rig_fail(r, "no memory for %zu bytes", bytes);
    memset(image, GUARD_BYTE, bytes + 2 * GUARD);
    if (data)
        memcpy(image + GUARD, data, bytes);
    else
        memset(image + GUARD, POISON, bytes);
    void *memory;
    mz_kstatus status = mz_kernels_alloc(r->kernels, bytes + 2 * GUARD, &memory);
    if (status == MZ_K_OK) {
        *b = (struct rig_block){r->block, memory, bytes};
        r->block = b;
        status = mz_kernels_copy(r->kernels, 0, MZ_COPY_IN, memory, image, bytes + 2 * GUARD);
    }
    if (status == MZ_K_OK)
        status = mz_kernels_sync(r->kernels, 0);
    free(image);
    rig_status(r, "memory", status);
    guards(r, b, true);
    return b->memory + GUARD;
}

void *rig_in(rig *r, const void *data, size_t bytes) {
    return block(r, data, bytes);
}

void *rig_out(rig *r, size_t bytes) {
    return block(r, NULL, bytes);
}

void *rig_workspace(rig *r, size_t bytes) {
    return bytes > 0 ? block(r, NULL, bytes) : NULL;
}

static const struct rig_block *block_of(const rig *r, const void *memory) {
    for (const struct rig_block *b = r->block; b; b = b->next)
        if (b->memory + GUARD == (const char *)memory)
            return b;
    return NULL;
}

static void copy_out(rig *r, void *to, const char *from, size_t bytes) {
    RIG_OK(r, mz_kernels_copy(r->kernels, 0, MZ_COPY_OUT, to, from, bytes));
    RIG_OK(r, mz_kernels_sync(r->kernels, 0));
}

static void check_guards(rig *r, const struct rig_block *b) {
    unsigned char image[2 * GUARD];
    guards(r, b, false);
    copy_out(r, image, b->memory, GUARD);
    copy_out(r, image + GUARD, b->memory + GUARD + b->bytes, GUARD);
    guards(r, b, true);
    for (int i = 0; i < 2 * GUARD; i++)
        if (image[i] != GUARD_BYTE)
            rig_fail(r, "written outside of %zu bytes", b->bytes);
}

void *rig_get(rig *r, const void *memory) {
    const struct rig_block *b = block_of(r, memory);
    if (!b)
        rig_fail(r, "not memory of this rig");
    check_guards(r, b);
    void *image = rig_host(r, b->bytes);
    if (b->bytes > 0)
        copy_out(r, image, b->memory + GUARD, b->bytes);
    return image;
}

size_t rig_size(const rig *r, const void *memory) {
    const struct rig_block *b = block_of(r, memory);
    return b ? b->bytes : 0;
}

bool rig_untouched(rig *r, const void *memory) {
    const unsigned char *image = rig_get(r, memory);
    for (size_t i = 0; i < rig_size(r, memory); i++)
        if (image[i] != POISON)
            return false;
    return true;
}

static void release(rig *r) {
    for (; r->block; r->block = r->block->next) {
        guards(r, r->block, false);
        mz_kernels_free(r->kernels, r->block->memory);
    }
    while (r->host) {
        struct rig_memory *next = r->host->next;
        free(r->host);
        r->host = next;
    }
}

void rig_clear(rig *r) {
    for (const struct rig_block *b = r->block; b; b = b->next)
        check_guards(r, b);
    release(r);
}

bool rig_run(rig *r, const check *c, uint64_t seed) {
    volatile bool passed = false;
    r->random = seed;
    r->message[0] = 0;
    if (setjmp(r->escape) == 0) {
        c->run(r);
        rig_clear(r);
        passed = true;
    }
    release(r);
    return passed;
}

/* ---- values -------------------------------------------------------------------------------------
 */

uint64_t rig_bits(rig *r) { /* splitmix64 (Steele, Lea and Flood, 2014) */
    uint64_t z = r->random += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

double rig_uniform(rig *r) {
    return (double)(rig_bits(r) >> 11) * 0x1p-53;
}

double rig_normal(rig *r) {
    const double u = 1 - rig_uniform(r), v = rig_uniform(r);
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

int64_t rig_below(rig *r, int64_t n) {
    return (int64_t)(rig_uniform(r) * (double)n);
}

size_t rig_width(mz_dtype type) {
    return type == MZ_BF16 ? 2 : 4;
}

double *rig_normals(rig *r, mz_dtype type, int64_t n, double size) {
    double *values = rig_host(r, sizeof *values * (size_t)n);
    for (int64_t i = 0; i < n; i++)
        values[i] = ref_stored(type, size * rig_normal(r));
    return values;
}

void *rig_put(rig *r, mz_dtype type, const double *values, int64_t n) {
    char *image = rig_host(r, rig_width(type) * (size_t)n);
    for (int64_t i = 0; i < n; i++) {
        const float value = (float)values[i];
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        const uint16_t upper = (uint16_t)(bits >> 16);
        if (type == MZ_BF16)
            memcpy(image + 2 * i, &upper, 2);
        else
            memcpy(image + 4 * i, &bits, 4);
    }
    return rig_in(r, image, rig_width(type) * (size_t)n);
}

void *rig_put_floats(rig *r, const double *values, int64_t n) {
    return rig_put(r, MZ_F32, values, n);
}

void *rig_room(rig *r, mz_dtype type, int64_t n) {
    return rig_out(r, rig_width(type) * (size_t)n);
}

double *rig_values(rig *r, mz_dtype type, const void *memory) {
    const int64_t n = (int64_t)(rig_size(r, memory) / rig_width(type));
    const char *image = rig_get(r, memory);
    double *values = rig_host(r, sizeof *values * (size_t)n);
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = 0;
        uint16_t upper;
        float value;
        if (type == MZ_BF16) {
            memcpy(&upper, image + 2 * i, 2);
            bits = (uint32_t)upper << 16;
        } else {
            memcpy(&bits, image + 4 * i, 4);
        }
        memcpy(&value, &bits, sizeof value);
        values[i] = value;
    }
    return values;
}

float *rig_floats(rig *r, const void *memory) {
    return rig_get(r, memory);
}

bool rig_same(double got, double want, double bound) {
    if (isnan(want) || isinf(want))
        return isnan(want) ? isnan(got) : got == want;
    return fabs(got - want) <= bound;
}

void rig_near(rig *r, const char *what, const double *got, const double *want, int64_t n,
              double relative, double absolute) {
    for (int64_t i = 0; i < n; i++)
        if (!(fabs(got[i] - want[i]) <= relative * fabs(want[i]) + absolute))
            rig_fail(r, "%s: value %lld of %lld is %.9g, wanted %.9g", what, (long long)i,
                     (long long)n, got[i], want[i]);
}
