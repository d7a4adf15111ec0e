#include "tests/harness.h"

#include "common/io/input.h"

#include <lzma.h>
#include <sys/stat.h>
#include <zlib.h>

typedef struct fixture {
    char directory[512], path[1024];
} fixture;

static int setup(void **state) {
    fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    make_directory(f->directory, sizeof f->directory);
    snprintf(f->path, sizeof f->path, "%s/data", f->directory);
    *state = f;
    return 0;
}

static int teardown(void **state) {
    fixture *f = *state;
    remove_directory(f->directory);
    free(f);
    return 0;
}

/* Text that packs well but not to nothing: size bytes. */
static unsigned char *make_text(size_t size) {
    unsigned char *text = malloc(size + 1);
    assert_non_null(text);
    uint32_t x = 12345;
    for (size_t i = 0; i < size; i++) {
        x = x * 1664525u + 1013904223u;
        text[i] = (unsigned char)(x >> 28 ? 'a' + (x >> 28) : '\n');
    }
    text[size] = 0;
    return text;
}

static size_t pack_gzip(const void *data, size_t size, unsigned char *out, size_t room) {
    z_stream z = {0};
    assert_int_equal(deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
    z.next_in = (Bytef *)(uintptr_t)data;
    z.avail_in = (uInt)size;
    z.next_out = out;
    z.avail_out = (uInt)room;
    assert_int_equal(deflate(&z, Z_FINISH), Z_STREAM_END);
    size_t packed = room - z.avail_out;
    deflateEnd(&z);
    return packed;
}

static size_t pack_xz(const void *data, size_t size, unsigned char *out, size_t room) {
    size_t packed = 0;
    assert_int_equal(
        lzma_easy_buffer_encode(1, LZMA_CHECK_CRC64, NULL, data, size, out, &packed, room),
        LZMA_OK);
    return packed;
}

typedef size_t (*packer)(const void *, size_t, unsigned char *, size_t);

static size_t pack_plain(const void *data, size_t size, unsigned char *out, size_t room) {
    assert_true(size <= room);
    memcpy(out, data, size);
    return size;
}

static const packer packers[] = {pack_plain, pack_gzip, pack_xz};

static mz_code read_through(const char *path, unsigned char *out, size_t room, size_t step,
                            size_t *total, mz_err *err) {
    mz_input *input;
    mz_code code = mz_input_open(path, &input, err);
    *total = 0;
    size_t got = step;
    while (!code && got == step) {
        assert_true(*total + step <= room);
        code = mz_input_read(input, out + *total, step, &got, err);
        *total += got;
    }
    mz_input_close(&input);
    assert_null(input);
    return code;
}

static void every_form_gives_the_same_bytes(void **state) {
    fixture *f = *state;
    enum { SIZE = 700001, ROOM = 1 << 20 };
    unsigned char *text = make_text(SIZE), *packed = malloc(ROOM), *back = malloc(ROOM);
    static const size_t steps[] = {1 << 18, 4097, 300000};
    for (int k = 0; k < COUNT_OF(packers); k++) {
        write_bytes(f->path, packed, packers[k](text, SIZE, packed, ROOM));
        for (int s = 0; s < COUNT_OF(steps); s++) {
            size_t total;
            mz_err err = {0};
            assert_ok(read_through(f->path, back, ROOM, steps[s], &total, &err), &err);
            assert_int_equal(total, SIZE);
            assert_memory_equal(back, text, SIZE);
        }
    }
    free(text);
    free(packed);
    free(back);
}

static void several_members_are_one_stream(void **state) {
    fixture *f = *state;
    enum { ROOM = 1 << 16 };
    unsigned char packed[ROOM], back[ROOM];
    for (int k = 1; k < COUNT_OF(packers); k++) {
        size_t n = packers[k]("left ", 5, packed, ROOM);
        n += packers[k]("right", 5, packed + n, ROOM - n);
        memset(packed + n, 0, 8); /* padding that both formats allow */
        write_bytes(f->path, packed, n + 8);
        size_t total;
        mz_err err = {0};
        assert_ok(read_through(f->path, back, ROOM, 100, &total, &err), &err);
        assert_int_equal(total, 10);
        assert_memory_equal(back, "left right", 10);
    }
}

/* Cut anywhere, a packed file is refused; no byte may be changed without notice where the format
 * has a checksum over it. */
static void truncated_and_damaged_files(void **state) {
    fixture *f = *state;
    enum { SIZE = 3000, ROOM = 1 << 14 };
    unsigned char *text = make_text(SIZE), packed[ROOM], back[ROOM];
    for (int k = 1; k < COUNT_OF(packers); k++) {
        size_t n = packers[k](text, SIZE, packed, ROOM);
        size_t total;
        mz_err err;
        for (size_t cut = 10; cut < n; cut += 1 + cut / 16) {
            write_bytes(f->path, packed, cut);
            assert_fails(read_through(f->path, back, ROOM, 1000, &total, &err), MZ_EINPUT,
                         k == 1 ? "truncated gzip" : "truncated xz", &err);
            assert_ptr_equal(strstr(err.msg, f->path), err.msg);
        }
        for (size_t at = 12; at < n; at += 1 + n / 200) {
            packed[at] ^= 0x41;
            write_bytes(f->path, packed, n);
            memset(&err, 0, sizeof err);
            mz_code code = read_through(f->path, back, ROOM, 1000, &total, &err);
            if (code == MZ_OK)
                fail_msg("form %d: changed byte %zu went unnoticed", k, at);
            assert_int_equal(code, MZ_EINPUT);
            packed[at] ^= 0x41;
        }
        memcpy(packed + n, "garbage after the end", 21);
        write_bytes(f->path, packed, n + 21);
        assert_fails(read_through(f->path, back, ROOM, 1000, &total, &err), MZ_EINPUT, "damaged",
                     &err);
    }
    free(text);
}

static void lines(void **state) {
    fixture *f = *state;
    static const char text[] = "first\r\n\nthird line\nlast without newline";
    static const char *const wanted[] = {"first", "", "third line", "last without newline"};
    unsigned char packed[1 << 14];
    for (int k = 0; k < COUNT_OF(packers); k++) {
        write_bytes(f->path, packed, packers[k](text, sizeof text - 1, packed, sizeof packed));
        mz_input *input;
        mz_err err = {0};
        char *line;
        size_t length;
        assert_ok(mz_input_open(f->path, &input, &err), &err);
        assert_string_equal(mz_input_path(input), f->path);
        for (int i = 0; i < COUNT_OF(wanted); i++) {
            assert_ok(mz_input_line(input, &line, &length, &err), &err);
            assert_string_equal(line, wanted[i]);
            assert_int_equal(length, strlen(wanted[i]));
            assert_int_equal(mz_input_line_number(input), i + 1);
        }
        assert_ok(mz_input_line(input, &line, &length, &err), &err);
        assert_null(line);
        mz_input_close(&input);
    }
}

static void long_lines(void **state) {
    fixture *f = *state;
    const size_t limit = (size_t)64 << 20;
    char *text = malloc(limit + 2);
    assert_non_null(text);
    memset(text, 'x', limit + 1);
    mz_input *input;
    mz_err err = {0};
    char *line;
    size_t length;
    write_bytes(f->path, text, limit - 1);
    assert_ok(mz_input_open(f->path, &input, &err), &err);
    assert_ok(mz_input_line(input, &line, &length, &err), &err);
    assert_int_equal(length, limit - 1);
    mz_input_close(&input);
    write_bytes(f->path, text, limit + 1);
    assert_ok(mz_input_open(f->path, &input, &err), &err);
    assert_fails(mz_input_line(input, &line, &length, &err), MZ_EINPUT, "line 1 is longer", &err);
    mz_input_close(&input);
    free(text);
}

static void peeking_consumes_nothing(void **state) {
    fixture *f = *state;
    enum { SIZE = 300000, ROOM = 1 << 20 };
    unsigned char *text = make_text(SIZE), *packed = malloc(ROOM), *back = malloc(ROOM);
    for (int k = 0; k < COUNT_OF(packers); k++) {
        write_bytes(f->path, packed, packers[k](text, SIZE, packed, ROOM));
        mz_input *input;
        mz_err err = {0};
        const unsigned char *head;
        size_t size, got;
        assert_ok(mz_input_open(f->path, &input, &err), &err);
        assert_ok(mz_input_peek(input, &head, &size, &err), &err);
        assert_int_equal(size, 4096);
        assert_memory_equal(head, text, size);
        assert_ok(mz_input_read(input, back, 261000, &got, &err), &err);
        assert_memory_equal(back, text, 261000);
        assert_ok(mz_input_peek(input, &head, &size, &err), &err);
        assert_int_equal(size, 4096);
        assert_memory_equal(head, text + 261000, size);
        assert_ok(mz_input_read(input, back, ROOM, &got, &err), &err);
        assert_int_equal(got, SIZE - 261000);
        assert_ok(mz_input_peek(input, &head, &size, &err), &err);
        assert_int_equal(size, 0);
        mz_input_close(&input);
    }
    free(text);
    free(packed);
    free(back);
}

static void what_cannot_be_read(void **state) {
    fixture *f = *state;
    mz_input *input;
    mz_err err;
    assert_fails(mz_input_open(f->path, &input, &err), MZ_EINPUT, "No such file", &err);
    assert_null(input);
    assert_fails(mz_input_open(f->directory, &input, &err), MZ_EINPUT, "directory", &err);
    write_bytes(f->path, "", 0);
    assert_fails(mz_input_open(f->path, &input, &err), MZ_EINPUT, "empty", &err);
    unsigned char packed[200];
    write_bytes(f->path, packed, pack_gzip("", 0, packed, sizeof packed));
    assert_fails(mz_input_open(f->path, &input, &err), MZ_EINPUT, "empty", &err);
    mz_input_close(&input);
}

static void output_appears_whole_or_not_at_all(void **state) {
    fixture *f = *state;
    mz_output output;
    mz_err err = {0};
    size_t size;
    assert_ok(mz_output_begin(&output, f->path, &err), &err);
    assert_int_equal(access(f->path, F_OK), -1);
    write_bytes(output.partial, "new", 3);
    assert_ok(mz_output_commit(&output, &err), &err);
    char *back = read_bytes(f->path, &size);
    assert_string_equal(back, "new");
    free(back);
    /* An abandoned second version leaves the first. */
    assert_ok(mz_output_begin(&output, f->path, &err), &err);
    char partial[4200];
    memcpy(partial, output.partial, sizeof partial);
    write_bytes(output.partial, "half", 4);
    mz_output_abandon(&output);
    assert_int_equal(access(partial, F_OK), -1);
    mz_output_abandon(&output);
    back = read_bytes(f->path, &size);
    assert_string_equal(back, "new");
    free(back);
}

static void output_that_cannot_be(void **state) {
    fixture *f = *state;
    mz_output output;
    mz_err err;
    char path[5000];
    snprintf(path, sizeof path, "%s/none/file", f->directory);
    assert_fails(mz_output_begin(&output, path, &err), MZ_EINPUT, "No such file", &err);
    mz_output_abandon(&output);
    assert_fails(mz_output_begin(&output, f->directory, &err), MZ_EINPUT, "not a regular file",
                 &err);
    assert_fails(mz_output_begin(&output, "/dev/null", &err), MZ_EINPUT, "not a regular file",
                 &err);
    assert_fails(mz_output_begin(&output, "", &err), MZ_EINPUT, "empty", &err);
    memset(path, 'x', sizeof path);
    path[sizeof path - 1] = 0;
    assert_fails(mz_output_begin(&output, path, &err), MZ_EINPUT, "longer than", &err);
    /* The partial file vanishes under our hands. */
    mz_err ok = {0};
    assert_ok(mz_output_begin(&output, f->path, &ok), &ok);
    assert_int_equal(unlink(output.partial), 0);
    assert_fails(mz_output_commit(&output, &err), MZ_EINTERNAL, "cannot write", &err);
    assert_int_equal(access(f->path, F_OK), -1);
}

static void output_replaces_what_a_link_names(void **state) {
    fixture *f = *state;
    char link[1100];
    struct stat info;
    mz_output output;
    mz_err err = {0};
    size_t size;
    snprintf(link, sizeof link, "%s/link", f->directory);
    write_bytes(f->path, "old", 3);
    assert_int_equal(symlink(f->path, link), 0);
    assert_ok(mz_output_begin(&output, link, &err), &err);
    write_bytes(output.partial, "new", 3);
    assert_ok(mz_output_commit(&output, &err), &err);
    assert_int_equal(lstat(link, &info), 0);
    assert_true(S_ISLNK(info.st_mode));
    char *back = read_bytes(f->path, &size);
    assert_string_equal(back, "new");
    free(back);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(every_form_gives_the_same_bytes),
        TEST(several_members_are_one_stream),
        TEST(truncated_and_damaged_files),
        TEST(lines),
        TEST(long_lines),
        TEST(peeking_consumes_nothing),
        TEST(what_cannot_be_read),
        TEST(output_appears_whole_or_not_at_all),
        TEST(output_that_cannot_be),
        TEST(output_replaces_what_a_link_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
