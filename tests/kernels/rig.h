/* What checks of kernels stand on: one context of any backend, memory with guards around it and
 * poison inside, random values, comparisons. Needs the library and libc alone, so the same checks
 * run under cmocka, on an emulated device, and on a machine that has nothing but a compiler. */
#ifndef MIZAN_TESTS_KERNELS_RIG_H
#define MIZAN_TESTS_KERNELS_RIG_H

#include "kernels/kernels.h"

#include <setjmp.h>

typedef struct rig {
    mz_kernels *kernels;
    bool small;               /* an emulated device: small shapes */
    mz_product_engine engine; /* of the products checked: the default, or OWN_MMA */
    uint64_t random;
    struct rig_block *block; /* context memory, newest first */
    struct rig_memory *host;
    jmp_buf escape;
    char message[512];
} rig;

typedef struct check {
    const char *name;
    void (*run)(rig *r);
} check;
/* Lists that end with a NULL name. */
extern const check checks_of_rows[], checks_of_pairs[], checks_of_products[], checks_of_routers[],
    checks_of_updates[], checks_of_arguments[], checks_of_offsets[];

/* Runs one check on a seed; false: it failed, r->message says how. Frees what it took. */
bool rig_run(rig *r, const check *c, uint64_t seed);
/* Ends the check. */
_Noreturn void rig_fail(rig *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
#define RIG_OK(r, call) rig_status(r, #call, call)
void rig_status(rig *r, const char *call, mz_kstatus status);
#define RIG_TRUE(r, condition)                                                                     \
    do {                                                                                           \
        if (!(condition))                                                                          \
            rig_fail(r, "%s:%d: %s", __FILE__, __LINE__, #condition);                              \
    } while (0)

/* Checks all guards and frees all memory: between the cases of one check. */
void rig_clear(rig *r);

/* ---- memory: freed with the check ---------------------------------------------------------------
 */
void *rig_host(rig *r, size_t bytes);                 /* host memory, zeroed */
void *rig_in(rig *r, const void *data, size_t bytes); /* context memory with a copy */
void *rig_out(rig *r, size_t bytes);                  /* context memory, every byte 0xff: NaN, -1 */
void *rig_workspace(rig *r, size_t bytes);            /* the same; NULL for 0 bytes */
void *rig_get(rig *r, const void *memory);         /* host copy of all of it; checks its guards */
size_t rig_size(const rig *r, const void *memory); /* bytes of context memory */
bool rig_untouched(rig *r, const void *memory);    /* all bytes still poison */

/* ---- values -------------------------------------------------------------------------------------
 */
uint64_t rig_bits(rig *r);
double rig_uniform(rig *r); /* [0, 1) */
double rig_normal(rig *r);
int64_t rig_below(rig *r, int64_t n);
/* n normal values of this size, rounded to what `type` stores. */
double *rig_normals(rig *r, mz_dtype type, int64_t n, double size);
void *rig_put(rig *r, mz_dtype type, const double *values, int64_t n); /* to context memory */
void *rig_put_floats(rig *r, const double *values, int64_t n);
void *rig_room(rig *r, mz_dtype type, int64_t n); /* rig_out of n values */
double *rig_values(rig *r, mz_dtype type, const void *memory);
float *rig_floats(rig *r, const void *memory);
/* NaN where NaN is wanted, an infinity of the same sign, or |got - want| <= bound. */
bool rig_same(double got, double want, double bound);
/* |got - want| <= relative * |want| + absolute for each; NaN fails. */
void rig_near(rig *r, const char *what, const double *got, const double *want, int64_t n,
              double relative, double absolute);
size_t rig_width(mz_dtype type);

#endif
