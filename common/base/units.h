/* Numbers with units, as people write them in options, profiles and cluster files. */
#ifndef MIZAN_BASE_UNITS_H
#define MIZAN_BASE_UNITS_H

#include "common/base/err.h"

#include <stddef.h>
#include <stdint.h>

typedef enum mz_unit {
    MZ_UNIT_NONE,    /* plain number; suffixes k, M, G, T (powers of 1000) allowed: "32k" */
    MZ_UNIT_BYTES,   /* "80 GiB", "96 MB", "1024" (bytes) */
    MZ_UNIT_RATE,    /* bytes per second: "400 GB/s", "100 Gb/s" (bits), "25 GiB/s" */
    MZ_UNIT_FLOPS,   /* operations per second: "312 TFLOP/s", "19.5 TFLOP/s" */
    MZ_UNIT_SECONDS, /* "5 us", "0.3 ms", "2 s", "90 ns" */
    MZ_UNIT_HERTZ    /* "1410 MHz" */
} mz_unit;

/* Parses text into the unit's base (bytes, bytes/s, flop/s, seconds, hertz). A bare number is
 * accepted for every unit. MZ_EINPUT with the accepted spellings when it does not parse, is not
 * finite or is negative. `what` names the field in the message. */
mz_code mz_unit_parse(const char *text, mz_unit unit, const char *what, double *value, mz_err *err);

/* The same, exact and whole: for counts and byte sizes up to 2^63-1. "32k" is 32000. */
mz_code mz_int_parse(const char *text, const char *what, int64_t low, int64_t high, int64_t *value,
                     mz_err *err);

/* Human forms for tables: "31.33 GiB", "1.25 ms", "400 GB/s". Returns `buffer`. */
const char *mz_format_bytes(double bytes, char *buffer, size_t size);
const char *mz_format_seconds(double seconds, char *buffer, size_t size);
const char *mz_format_rate(double bytes_per_s, char *buffer, size_t size);

#endif
