/* Sorting beyond memory, against qsort of the same records; names against a brute-force table. */
#include "tests/harness.h"

#include "traces/importers/names.h"
#include "traces/importers/spill.h"

#include "common/base/rng.h"

#include <dirent.h>

typedef struct record {
    int64_t key, number; /* number: the place where it was added */
    unsigned char rest[8];
} record;

static int by_key(const void *a, const void *b) {
    const record *x = a, *y = b;
    if (x->key != y->key)
        return x->key < y->key ? -1 : 1;
    return (x->number > y->number) - (x->number < y->number);
}

static int setup(void **state) {
    static char directory[256];
    make_directory(directory, sizeof directory);
    *state = directory;
    return 0;
}

static int teardown(void **state) {
    remove_directory(*state);
    return 0;
}

static void no_file(const char *directory) {
    DIR *list = opendir(directory);
    assert_non_null(list);
    for (struct dirent *entry; (entry = readdir(list)) != NULL;)
        if (entry->d_name[0] != '.' || entry->d_name[1] > '.')
            fail_msg("%s is left behind", entry->d_name);
    closedir(list);
}

static record make_record(mz_rng *rng, int64_t number, int64_t range) {
    record one = {.key = (int64_t)mz_rng_below(rng, (uint64_t)range), .number = number};
    memset(one.rest, (int)(one.key ^ number), sizeof one.rest);
    return one;
}

/* Adds `count` records with keys below `range`, `most` bytes in memory; reads them twice. */
static void sorts(const char *directory, int64_t count, int64_t range, size_t most) {
    char path[300];
    mz_err err;
    snprintf(path, sizeof path, "%s/out.h5", directory);
    mz_spill spill = mz_spill_make(sizeof(record), by_key, path);
    record *all = calloc((size_t)count + 1, sizeof *all);
    assert_non_null(all);
    spill.most = most;
    mz_rng rng = mz_rng_make(7, (uint64_t)count);
    for (int64_t i = 0; i < count; i++) {
        all[i] = make_record(&rng, i, range);
        assert_ok(mz_spill_add(&spill, &all[i], &err), &err);
    }
    no_file(directory);
    assert_int_equal(spill.records, count);
    if (count > 0)
        qsort(all, (size_t)count, sizeof *all, by_key);
    for (int pass = 0; pass < 2; pass++) {
        const void *got;
        assert_ok(mz_spill_rewind(&spill, &err), &err);
        for (int64_t i = 0; i < count; i++) {
            assert_ok(mz_spill_next(&spill, &got, &err), &err);
            assert_non_null(got);
            assert_memory_equal(got, &all[i], sizeof(record));
        }
        assert_ok(mz_spill_next(&spill, &got, &err), &err);
        assert_null(got);
    }
    mz_spill_free(&spill);
    free(all);
}

static void sorts_beyond_memory(void **state) {
    static const int64_t counts[] = {0, 1, 2, 99, 100, 101, 200, 1234, 40000};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        for (int64_t range = 1; range <= 1000000; range *= 1000) {
            sorts(*state, counts[i], range, 100 * sizeof(record));
            sorts(*state, counts[i], range, (size_t)1 << 30);
        }
    sorts(*state, 50, 1000, 1); /* every record is a part */
}

static void refuses_what_it_cannot_write(void **state) {
    char path[300];
    mz_err err = {0};
    record one = {.key = 1};
    snprintf(path, sizeof path, "%s/none/out.h5", (char *)*state);
    mz_spill spill = mz_spill_make(sizeof(record), by_key, path);
    spill.most = 1;
    assert_ok(mz_spill_add(&spill, &one, &err), &err);
    assert_fails(mz_spill_add(&spill, &one, &err), MZ_EINPUT, "no file for sorting can be made",
                 &err);
    mz_spill_free(&spill);
}

static void numbers_names(void **state) {
    mz_names names = {0};
    mz_err err;
    bool fresh;
    int32_t number, seen[3000];
    (void)state;
    memset(seen, -1, sizeof seen);
    int32_t next = 0;
    mz_rng rng = mz_rng_make(3, 0);
    for (int i = 0; i < 20000; i++) {
        char name[32];
        int which = (int)mz_rng_below(&rng, 3000);
        if (which > 0)
            snprintf(name, sizeof name, "request-%d", which);
        else
            name[0] = '\0'; /* an empty name is one, too */
        assert_ok(mz_names_number(&names, name, &number, &fresh, &err), &err);
        assert_int_equal(fresh, seen[which] < 0);
        if (fresh)
            seen[which] = next++;
        assert_int_equal(number, seen[which]);
        assert_string_equal(mz_names_text(&names, number), name);
    }
    mz_names_free(&names);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(sorts_beyond_memory, setup, teardown),
        cmocka_unit_test_setup_teardown(refuses_what_it_cannot_write, setup, teardown),
        cmocka_unit_test(numbers_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
