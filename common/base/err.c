#include "common/base/err.h"

#include <stdio.h>
#include <string.h>

void mz_vformat_line(char *buffer, size_t size, const char *fmt, va_list args) {
    int n = vsnprintf(buffer, size, fmt, args);
    if (n < 0)
        snprintf(buffer, size, "(message could not be formatted)");
    else if ((size_t)n >= size)
        memcpy(buffer + size - 4, "...", 4);
    for (unsigned char *c = (unsigned char *)buffer; *c; c++)
        if (*c < 0x20 || *c == 0x7f)
            *c = '?';
}

void mz_format_line(char *buffer, size_t size, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    mz_vformat_line(buffer, size, fmt, args);
    va_end(args);
}

mz_code mz_fail(mz_err *err, mz_code code, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    err->code = code;
    mz_vformat_line(err->msg, sizeof err->msg, fmt, args);
    va_end(args);
    return code;
}

mz_code mz_err_prefix(mz_err *err, const char *fmt, ...) {
    char head[MZ_ERR_MAX];
    char tail[MZ_ERR_MAX];
    va_list args;
    va_start(args, fmt);
    mz_vformat_line(head, sizeof head, fmt, args);
    va_end(args);
    memcpy(tail, err->msg, sizeof tail);
    return mz_fail(err, err->code, "%s: %s", head, tail);
}

mz_code mz_fail_nomem(mz_err *err, const char *what) {
    return mz_fail(err, MZ_ENOMEM, "out of memory while allocating %s", what);
}

int mz_exit_code(mz_code code) {
    switch (code) {
    case MZ_ENOMEM:
        return MZ_EINTERNAL;
    case MZ_EABORTED:
        return 130;
    default:
        return (int)code;
    }
}
