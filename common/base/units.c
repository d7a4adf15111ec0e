#include "common/base/units.h"

#include <ctype.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KI 1024.0
#define MI (KI * KI)
#define GI (KI * MI)
#define TI (KI * GI)

/* value = number * factor / divisor: both exact in binary, so that "5 us" is the double nearest to
 * 5e-6. */
typedef struct suffix {
    const char *name;
    double factor, divisor;
} suffix;

static const suffix plain_suffix[] = {{"k", 1e3, 1}, {"K", 1e3, 1},  {"M", 1e6, 1},
                                      {"G", 1e9, 1}, {"T", 1e12, 1}, {NULL, 0, 0}};

static const suffix bytes_suffix[] = {
    {"B", 1, 1},    {"kB", 1e3, 1}, {"KB", 1e3, 1}, {"MB", 1e6, 1}, {"GB", 1e9, 1}, {"TB", 1e12, 1},
    {"KiB", KI, 1}, {"MiB", MI, 1}, {"GiB", GI, 1}, {"TiB", TI, 1}, {NULL, 0, 0}};

static const suffix rate_suffix[] = {
    {"B/s", 1, 1},    {"kB/s", 1e3, 1},  {"KB/s", 1e3, 1},  {"MB/s", 1e6, 1},
    {"GB/s", 1e9, 1}, {"TB/s", 1e12, 1}, {"KiB/s", KI, 1},  {"MiB/s", MI, 1},
    {"GiB/s", GI, 1}, {"TiB/s", TI, 1},  {"b/s", 1, 8},     {"kb/s", 1e3, 8},
    {"Mb/s", 1e6, 8}, {"Gb/s", 1e9, 8},  {"Tb/s", 1e12, 8}, {NULL, 0, 0}};

static const suffix flops_suffix[] = {
    {"FLOP/s", 1, 1},     {"kFLOP/s", 1e3, 1},  {"MFLOP/s", 1e6, 1}, {"GFLOP/s", 1e9, 1},
    {"TFLOP/s", 1e12, 1}, {"PFLOP/s", 1e15, 1}, {"GFLOPS", 1e9, 1},  {"TFLOPS", 1e12, 1},
    {"PFLOPS", 1e15, 1},  {NULL, 0, 0}};

static const suffix seconds_suffix[] = {{"s", 1, 1},    {"ms", 1, 1e3}, {"us", 1, 1e6},
                                        {"µs", 1, 1e6}, {"ns", 1, 1e9}, {NULL, 0, 0}};

static const suffix hertz_suffix[] = {
    {"Hz", 1, 1}, {"kHz", 1e3, 1}, {"MHz", 1e6, 1}, {"GHz", 1e9, 1}, {NULL, 0, 0}};

static const struct {
    const suffix *table;
    const char *accepted;
} units[] = {
    [MZ_UNIT_NONE] = {plain_suffix, "a number like 0.5 or 32k"},
    [MZ_UNIT_BYTES] = {bytes_suffix, "bytes like \"80 GiB\", \"96 MB\" or 1024"},
    [MZ_UNIT_RATE] = {rate_suffix, "a rate like \"400 GB/s\", \"25 GiB/s\" or \"100 Gb/s\" (bits)"},
    [MZ_UNIT_FLOPS] = {flops_suffix, "a speed like \"312 TFLOP/s\""},
    [MZ_UNIT_SECONDS] = {seconds_suffix, "a time like \"5 us\", \"0.3 ms\" or \"2 s\""},
    [MZ_UNIT_HERTZ] = {hertz_suffix, "a frequency like \"1410 MHz\""},
};

static const char *skip_space(const char *p) {
    while (isspace((unsigned char)*p))
        p++;
    return p;
}

/* The row whose name is all of `text` but trailing space. */
static const suffix *find_suffix(const suffix *table, const char *text) {
    size_t n = strlen(text);
    while (n && isspace((unsigned char)text[n - 1]))
        n--;
    for (; table->name; table++)
        if (strlen(table->name) == n && memcmp(table->name, text, n) == 0)
            return table;
    return NULL;
}

mz_code mz_unit_parse(const char *text, mz_unit unit, const char *what, double *value,
                      mz_err *err) {
    const char *p = skip_space(text);
    const char *digits = *p == '+' || *p == '-' ? p + 1 : p;
    /* Decimal numbers only: strtod alone would take "inf", "nan" and hexadecimal. */
    bool decimal = isdigit((unsigned char)digits[0]) ||
                   (digits[0] == '.' && isdigit((unsigned char)digits[1]));
    if (!decimal || (digits[0] == '0' && (digits[1] == 'x' || digits[1] == 'X')))
        return mz_fail(err, MZ_EINPUT, "%s: '%s' is not %s", what, text, units[unit].accepted);
    char *end;
    double number = strtod(p, &end);
    const char *rest = skip_space(end);
    if (*rest) {
        const suffix *found = find_suffix(units[unit].table, rest);
        if (!found)
            return mz_fail(err, MZ_EINPUT, "%s: '%s' is not %s", what, text, units[unit].accepted);
        number = number * found->factor / found->divisor;
    }
    if (!isfinite(number))
        return mz_fail(err, MZ_EINPUT, "%s: '%s' is too large", what, text);
    if (number < 0)
        return mz_fail(err, MZ_EINPUT, "%s: '%s' is negative", what, text);
    *value = number;
    return MZ_OK;
}

/* Decimal digits as whole * 10^exponent, exactly; false when they do not fit 63 bits. */
static bool read_digits(const char **text, int64_t *whole, int *exponent, bool *any) {
    const char *p = *text;
    bool point = false;
    *whole = 0;
    *exponent = 0;
    *any = false;
    for (; isdigit((unsigned char)*p) || (*p == '.' && !point); p++) {
        if (*p == '.') {
            point = true;
            continue;
        }
        *any = true;
        *exponent -= point;
        if (__builtin_mul_overflow(*whole, (int64_t)10, whole) ||
            __builtin_add_overflow(*whole, (int64_t)(*p - '0'), whole))
            return false;
    }
    if (*any && (*p == 'e' || *p == 'E') &&
        isdigit((unsigned char)p[1 + (p[1] == '+' || p[1] == '-')])) {
        char *end;
        long power = strtol(p + 1, &end, 10);
        if (power > 18 || power < -18)
            return false;
        *exponent += (int)power;
        p = end;
    }
    *text = p;
    return true;
}

/* Exact value of digits with a suffix; false when it is not a whole number below 2^63. */
static bool scale_whole(int64_t whole, int exponent, double factor, int64_t *value) {
    if (__builtin_mul_overflow(whole, (int64_t)factor, &whole))
        return false;
    for (; exponent > 0; exponent--)
        if (__builtin_mul_overflow(whole, (int64_t)10, &whole))
            return false;
    for (; exponent < 0; exponent++) {
        if (whole % 10)
            return false;
        whole /= 10;
    }
    *value = whole;
    return true;
}

mz_code mz_int_parse(const char *text, const char *what, int64_t low, int64_t high, int64_t *value,
                     mz_err *err) {
    const char *p = skip_space(text);
    bool negative = *p == '-';
    p += *p == '-' || *p == '+';
    int64_t whole;
    int exponent;
    bool any;
    double factor = 1;
    bool fits = read_digits(&p, &whole, &exponent, &any);
    if (fits) {
        const char *rest = skip_space(p);
        const suffix *found = NULL;
        if (*rest && !(found = find_suffix(plain_suffix, rest)))
            found = find_suffix(bytes_suffix, rest);
        if (!any || (*rest && !found))
            return mz_fail(err, MZ_EINPUT, "%s: '%s' is not a whole number like 32, 32k or 80 GiB",
                           what, text);
        factor = found ? found->factor : 1;
    }
    if (!fits || !scale_whole(whole, exponent, factor, &whole))
        return mz_fail(err, MZ_EINPUT, "%s: '%s' is not a whole number below 2^63", what, text);
    whole = negative ? -whole : whole;
    if (whole < low || whole > high)
        return mz_fail(err, MZ_EINPUT, "%s: %lld is outside [%lld, %lld]", what, (long long)whole,
                       (long long)low, (long long)high);
    *value = whole;
    return MZ_OK;
}

static const char *format_scaled(double value, double step, const char *const *names, int count,
                                 char *buffer, size_t size) {
    if (!isfinite(value)) {
        snprintf(buffer, size, "-");
        return buffer;
    }
    int i = 0;
    while (i < count - 1 && fabs(value) >= step) {
        value /= step;
        i++;
    }
    snprintf(buffer, size, fabs(value) < 1e4 ? "%.4g %s" : "%.0f %s", value, names[i]);
    return buffer;
}

const char *mz_format_bytes(double bytes, char *buffer, size_t size) {
    static const char *const names[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    return format_scaled(bytes, 1024, names, 6, buffer, size);
}

const char *mz_format_seconds(double seconds, char *buffer, size_t size) {
    static const char *const names[] = {"ns", "us", "ms", "s"};
    if (seconds == 0) {
        snprintf(buffer, size, "0 s");
        return buffer;
    }
    return format_scaled(seconds * 1e9, 1000, names, 4, buffer, size);
}

const char *mz_format_rate(double bytes_per_s, char *buffer, size_t size) {
    static const char *const names[] = {"B/s", "kB/s", "MB/s", "GB/s", "TB/s", "PB/s"};
    return format_scaled(bytes_per_s, 1000, names, 6, buffer, size);
}
