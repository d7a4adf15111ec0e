/* What every cmocka test includes, and files for the tests that need some. */
#ifndef MIZAN_TESTS_HARNESS_H
#define MIZAN_TESTS_HARNESS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/err.h"

#define COUNT_OF(array) ((int)(sizeof(array) / sizeof(array)[0]))

/* Fails with the error's text when `call` does not return MZ_OK. */
#define assert_ok(call, err)                                                                       \
    do {                                                                                           \
        if ((call) != MZ_OK)                                                                       \
            fail_msg("%s: %s", #call, (err)->msg);                                                 \
    } while (0)

/* The call must fail with `code` and a message that contains `text`. */
#define assert_fails(call, wanted, text, err)                                                      \
    do {                                                                                           \
        memset((err), 0, sizeof *(err));                                                           \
        assert_int_equal((call), (wanted));                                                        \
        assert_int_equal((err)->code, (wanted));                                                   \
        if (!strstr((err)->msg, (text)))                                                           \
            fail_msg("%s: the message lacks '%s': %s", #call, (text), (err)->msg);                 \
    } while (0)

/* A new directory for a test's files; the caller removes it with remove_directory. */
static inline void make_directory(char *path, size_t size) {
    const char *base = getenv("TMPDIR");
    snprintf(path, size, "%s/mizan-test-XXXXXX", base && *base ? base : P_tmpdir);
    assert_non_null(mkdtemp(path));
}

static inline void remove_directory(const char *path) {
    char command[4200];
    snprintf(command, sizeof command, "rm -rf -- '%s'", path);
    assert_int_equal(system(command), 0);
}

static inline void write_bytes(const char *path, const void *data, size_t size) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

/* The whole file, NUL-terminated, from malloc. */
static inline char *read_bytes(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    char *data = NULL;
    size_t got = 1;
    *size = 0;
    while (got) {
        data = realloc(data, *size + 65536 + 1);
        assert_non_null(data);
        got = fread(data + *size, 1, 65536, file);
        *size += got;
    }
    data[*size] = 0;
    fclose(file);
    return data;
}

#endif
