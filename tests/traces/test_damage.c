/* Wrong files: damaged, cut short, contradictory, hostile. Each gives one message that names what
 * is wrong, and never a crash. */
#include "tests/traces/trace_fixture.h"

#include "traces/check.h"
#include "traces/reader.h"

#include <fcntl.h>
#include <hdf5.h>
#include <math.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

typedef struct place {
    char directory[256], good[300], bad[300];
    fixture *f;
} place;

static const fixture_shape pairs_shape = {MZ_TRACE_PAIRS, 2, 1, 2, 3, 16, 0, 30, true, true};
static const fixture_shape fixed_shape = {MZ_TRACE_PAIRS, 2, 1, 2, 3, 16, 2, 30, true, true};
static const fixture_shape counts_shape = {MZ_TRACE_COUNTS, 2, 1, 2, 3, 16, 2, 30, false, false};

static place setup_place(fixture_shape shape, int deflate) {
    place p;
    make_directory(p.directory, sizeof p.directory);
    snprintf(p.good, sizeof p.good, "%s/good.h5", p.directory);
    snprintf(p.bad, sizeof p.bad, "%s/bad.h5", p.directory);
    p.f = fixture_make(21, shape);
    fixture_write(p.f, p.good, deflate, false);
    return p;
}

static void free_place(place *p) {
    fixture_free(p->f);
    remove_directory(p->directory);
}

static void copy_good(const place *p) {
    size_t size;
    char *data = read_bytes(p->good, &size);
    write_bytes(p->bad, data, size);
    free(data);
}

/* Opens and reads everything; the first error, or MZ_OK. */
static mz_code read_all(const char *path, mz_err *err) {
    mz_trace *trace;
    mz_code code = mz_trace_open(path, &trace, err);
    if (code != MZ_OK)
        return code;
    const mz_trace_facts *f = mz_trace_facts_of(trace);
    const mz_trace_call *calls;
    int64_t n = mz_trace_calls(trace, &calls);
    int64_t *count = calloc((size_t)f->experts, sizeof *count);
    for (int64_t i = 0; i < n && code == MZ_OK; i++) {
        code = mz_trace_add_counts(trace, i, count, err);
        if (code != MZ_OK || f->kind == MZ_TRACE_COUNTS || calls[i].pairs > 1 << 20 ||
            calls[i].tokens > 1 << 20)
            continue;
        size_t pairs = (size_t)calls[i].pairs + 1, tokens = (size_t)calls[i].tokens + 1;
        mz_trace_pairs_out out = {malloc(2 * pairs),
                                  f->has_weight ? malloc(4 * pairs) : NULL,
                                  f->has_hidden_norm2 ? malloc(4 * pairs) : NULL,
                                  malloc(2 * tokens),
                                  f->has_grad_norm2 ? malloc(4 * tokens) : NULL,
                                  f->has_input_norm2 ? malloc(4 * tokens) : NULL};
        code = mz_trace_read_pairs(trace, i, 0, calls[i].tokens, &out, err);
        free(out.expert);
        free(out.weight);
        free(out.hidden_norm2);
        free(out.token_pairs);
        free(out.grad_norm2);
        free(out.input_norm2);
    }
    free(count);
    mz_trace_close(&trace);
    return code;
}

/* Text of the check and its number of problems; the caller frees it. */
static char *check_text(const char *path, int64_t limit, int64_t *faults) {
    char *text = NULL;
    size_t size = 0;
    mz_err err;
    FILE *out = open_memstream(&text, &size);
    mz_code code = mz_trace_check(NULL, path, limit, out, faults, &err);
    if (code != MZ_OK) {
        assert_int_equal(code, MZ_EINPUT);
        fprintf(out, "%s\n", err.msg);
        ++*faults;
    }
    fclose(out);
    return text;
}

/* Reading fails with a message that has `text` in it, and the check says so too. */
static void must_name(const place *p, const char *text) {
    mz_err err = {0};
    int64_t faults;
    mz_code code = read_all(p->bad, &err);
    if (code != MZ_EINPUT || !strstr(err.msg, text) || !strstr(err.msg, p->bad))
        fail_msg("expected '%s' from reading, got %d '%s'", text, code, err.msg);
    char *list = check_text(p->bad, 100, &faults);
    if (faults < 1 || !strstr(list, text))
        fail_msg("expected '%s' from the check, got '%s'", text, list);
    free(list);
}

/* ---- files that are no traces -----------------------------------------------------------------
 */

static void test_not_a_trace(void **state) {
    place p = setup_place(pairs_shape, 4);
    mz_err err;
    mz_trace *trace;
    char path[300];
    assert_fails(mz_trace_open("/nonexistent.h5", &trace, &err), MZ_EINPUT, "No such file", &err);
    assert_fails(mz_trace_open(p.directory, &trace, &err), MZ_EINPUT, "directory", &err);
    write_bytes(p.bad, "", 0);
    must_name(&p, "empty");
    write_bytes(p.bad, "step,layer,expert\n1,2,3\n", 24);
    must_name(&p, "not an HDF5 file");
    snprintf(path, sizeof path, "%s/pipe", p.directory);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_fails(mz_trace_open(path, &trace, &err), MZ_EINPUT, "pipe", &err);
    hid_t file = H5Fcreate(p.bad, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    H5Fclose(file);
    must_name(&p, "not a Mizan trace");
    free_place(&p);
}

static void test_cut_short(void **state) {
    place p = setup_place(pairs_shape, 4);
    size_t size;
    char *data = read_bytes(p.good, &size);
    for (int i = 0; i < 20; i++) {
        mz_err err;
        size_t n = size * (size_t)i / 20 + (i ? 1 : 0);
        write_bytes(p.bad, data, n);
        assert_int_equal(read_all(p.bad, &err), MZ_EINPUT);
        assert_non_null(strstr(err.msg, p.bad));
    }
    write_bytes(p.bad, data, size - 1);
    must_name(&p, "cut short");
    free(data);
    free_place(&p);
}

/* ---- flipped bytes ----------------------------------------------------------------------------
 */

typedef struct chunk_place {
    char name[64];
    int64_t row;
    haddr_t at;
    hsize_t size;
} chunk_place;

static int find_chunks(const char *path, chunk_place *list, int most) {
    int n = 0;
    hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    assert_true(file >= 0);
    for (int id = 0; id < MZ_COLUMNS; id++) {
        char name[64];
        mz_column_path((mz_column_id)id, name);
        hid_t set = H5Dopen2(file, name, H5P_DEFAULT);
        if (set < 0)
            continue;
        hid_t space = H5Dget_space(set);
        hsize_t chunks = 0, offset[2];
        assert_true(H5Dget_num_chunks(set, space, &chunks) >= 0);
        for (hsize_t c = 0; c < chunks; c++) {
            assert_true(n < most);
            unsigned mask;
            memcpy(list[n].name, name, sizeof name);
            assert_true(
                H5Dget_chunk_info(set, space, c, offset, &mask, &list[n].at, &list[n].size) >= 0);
            list[n++].row = (int64_t)offset[0];
        }
        H5Sclose(space);
        H5Dclose(set);
    }
    H5Fclose(file);
    return n;
}

static void flip_in_every_chunk(fixture_shape shape, int deflate, int least) {
    static chunk_place chunk[256];
    place p = setup_place(shape, deflate);
    int n = find_chunks(p.good, chunk, 256);
    assert_true(n >= least);
    size_t size;
    char *data = read_bytes(p.good, &size);
    for (int i = 0; i < n; i++) {
        char want[128];
        size_t at = chunk[i].at + chunk[i].size * (size_t)(i % 7) / 7;
        snprintf(want, sizeof want, "%.63s: chunk ", chunk[i].name);
        data[at] ^= 0x40;
        write_bytes(p.bad, data, size);
        data[at] ^= 0x40;
        int64_t faults;
        char *list = check_text(p.bad, 100, &faults);
        if (faults != 1 || !strstr(list, want))
            fail_msg("expected one '%s', got %d: '%s'", want, (int)faults, list);
        free(list);
        mz_err err;
        assert_int_equal(read_all(p.bad, &err), MZ_EINPUT);
        assert_non_null(strstr(err.msg, want));
    }
    free(data);
    free_place(&p);
}

static void test_flipped_byte(void **state) {
    flip_in_every_chunk(pairs_shape, 4, 20);
    flip_in_every_chunk(pairs_shape, 0, 20);
    flip_in_every_chunk(counts_shape, 4, 12);
}

static void test_many_faults(void **state) {
    static chunk_place chunk[256];
    place p = setup_place(pairs_shape, 4);
    int n = find_chunks(p.good, chunk, 256);
    size_t size;
    char *data = read_bytes(p.good, &size);
    for (int i = 0; i < n; i++)
        data[chunk[i].at] ^= 1;
    write_bytes(p.bad, data, size);
    int64_t faults;
    char *list = check_text(p.bad, 5, &faults);
    assert_int_equal(faults, n); /* every dataset is listed, not only the first */
    int lines = 0;
    for (char *c = list; *c; c++)
        lines += *c == '\n';
    assert_int_equal(lines, 6);
    char more[32];
    snprintf(more, sizeof more, "and %d more", n - 5);
    assert_non_null(strstr(list, more));
    free(list);
    free(data);
    free_place(&p);
}

/* ---- contradictions ---------------------------------------------------------------------------
 */

static hid_t open_bad(const place *p) {
    copy_good(p);
    hid_t file = H5Fopen(p->bad, H5F_ACC_RDWR, H5P_DEFAULT);
    assert_true(file >= 0);
    return file;
}

/* Overwrites element `row` (or [row][column]) of a dataset. */
static void poke(const place *p, const char *name, hsize_t row, hid_t type, const void *value) {
    hid_t file = open_bad(p);
    hid_t set = H5Dopen2(file, name, H5P_DEFAULT), space = H5Dget_space(set);
    hsize_t start[2] = {row, 3}, one[2] = {1, 1};
    hid_t memory = H5Screate_simple(1, one, NULL);
    assert_true(H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, one, NULL) >= 0);
    assert_true(H5Dwrite(set, type, memory, space, H5P_DEFAULT, value) >= 0);
    H5Sclose(memory);
    H5Sclose(space);
    H5Dclose(set);
    H5Fclose(file);
}

static void poke_int(const place *p, const char *name, hsize_t row, int64_t value) {
    poke(p, name, row, H5T_NATIVE_INT64, &value);
}

static void poke_real(const place *p, const char *name, hsize_t row, double value) {
    poke(p, name, row, H5T_NATIVE_DOUBLE, &value);
}

static void set_attr(const place *p, const char *group, const char *name, int64_t value) {
    hid_t file = open_bad(p);
    hid_t object = H5Oopen(file, group, H5P_DEFAULT), space = H5Screate(H5S_SCALAR);
    assert_true(H5Adelete(object, name) >= 0);
    hid_t attr = H5Acreate2(object, name, H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT);
    if (attr < 0 || H5Awrite(attr, H5T_NATIVE_INT64, &value) < 0)
        fail_msg("cannot set %s of %s", name, group);
    H5Aclose(attr);
    H5Sclose(space);
    H5Oclose(object);
    H5Fclose(file);
}

static void remove_object(const place *p, const char *path, const char *attr) {
    hid_t file = open_bad(p);
    if (attr)
        assert_true(H5Adelete_by_name(file, path, attr, H5P_DEFAULT) >= 0);
    else
        assert_true(H5Ldelete(file, path, H5P_DEFAULT) >= 0);
    H5Fclose(file);
}

static void test_values(void **state) {
    place p = setup_place(pairs_shape, 4);
    poke_int(&p, "pairs/expert", 7, 16);
    must_name(&p, "/pairs/expert[7] is 16, must be below 16");
    poke_real(&p, "pairs/weight", 5, NAN);
    must_name(&p, "/pairs/weight[5] is not finite");
    poke_real(&p, "pairs/weight", 9, -0.25);
    must_name(&p, "/pairs/weight[9] is -0.25");
    poke_real(&p, "pairs/hidden_norm2", 2, INFINITY);
    must_name(&p, "/pairs/hidden_norm2[2] is not finite");
    poke_real(&p, "rows/grad_norm2", 3, -1);
    must_name(&p, "/rows/grad_norm2[3] is -1");
    poke_real(&p, "rows/input_norm2", 4, NAN);
    must_name(&p, "/rows/input_norm2[4] is not finite");
    poke_int(&p, "rows/pairs", 0, p.f->call[0].token_pairs[0] + 1);
    must_name(&p, "/rows/pairs of call 0");
    free_place(&p);
}

static void test_calls(void **state) {
    place p = setup_place(fixed_shape, 4);
    const mz_trace_call_data *c = p.f->call;
    poke_int(&p, "calls/layer", 1, 2);
    must_name(&p, "/calls/layer[1] is 2, must be 0 to 1");
    poke_int(&p, "calls/rank", 0, -1);
    must_name(&p, "/calls/rank[0] is -1");
    poke_int(&p, "calls/pairs", 2, c[2].pairs + 1);
    must_name(&p, "/calls/pairs[2]");
    poke_int(&p, "calls/tokens", 0, c[0].tokens + 1);
    must_name(&p, "/calls/pairs[0]");
    poke_int(&p, "calls/step", 0, 1000);
    must_name(&p, "/calls[1]: step");
    poke_int(&p, "calls/token_begin", (hsize_t)p.f->calls - 1, 0);
    must_name(&p, "/calls/token_begin[");
    poke_int(&p, "calls/step", 0, -3);
    must_name(&p, "/calls/step[0] is -3");
    poke_int(&p, "sequences/tokens", 0, 0);
    must_name(&p, "/sequences[0]");
    poke_int(&p, "sequences/token_begin", 1, 1000000);
    must_name(&p, "/sequences[1]");
    poke_int(&p, "sequences/domain", 1, -2);
    must_name(&p, "/sequences/domain[1]");
    poke_int(&p, "steps/step", 0, -2);
    must_name(&p, "/steps/step[0]");
    free_place(&p);
    p = setup_place(counts_shape, 4);
    poke_int(&p, "counts", 1, p.f->call[1].count[3] + 2);
    must_name(&p, "/counts");
    poke_int(&p, "calls/pairs", 0, p.f->call[0].pairs + 5);
    must_name(&p, "/calls/pairs[0] says");
    free_place(&p);
}

static void test_attributes(void **state) {
    place p = setup_place(pairs_shape, 4);
    set_attr(&p, "/", "format_version", 2);
    must_name(&p, "version 2");
    set_attr(&p, "/model", "experts", 0);
    must_name(&p, "experts of /model is 0");
    set_attr(&p, "/model", "experts", 1000000);
    must_name(&p, "experts of /model is 1000000");
    set_attr(&p, "/model", "top_k", 17);
    must_name(&p, "top_k of /model is 17");
    set_attr(&p, "/model", "top_k", 3);
    must_name(&p, "/calls/pairs[0]");
    set_attr(&p, "/run", "ranks", -1);
    must_name(&p, "ranks of /run");
    set_attr(&p, "/model", "weights_normalized", 2);
    must_name(&p, "weights_normalized");
    remove_object(&p, "/model", "layers");
    must_name(&p, "layers of /model is missing");
    remove_object(&p, "/run", "kind");
    must_name(&p, "kind of /run is missing");
    remove_object(&p, "/", "format");
    must_name(&p, "not a Mizan trace");
    remove_object(&p, "/run", NULL);
    must_name(&p, "of /run is missing");
    hid_t file = open_bad(&p);
    H5Adelete_by_name(file, "/model", "experts", H5P_DEFAULT);
    hid_t space = H5Screate(H5S_SCALAR);
    hid_t attr = H5Acreate_by_name(file, "/model", "experts", H5T_IEEE_F64LE, space, H5P_DEFAULT,
                                   H5P_DEFAULT, H5P_DEFAULT);
    double value = 16;
    H5Awrite(attr, H5T_NATIVE_DOUBLE, &value);
    H5Aclose(attr);
    H5Sclose(space);
    H5Fclose(file);
    must_name(&p, "experts of /model must be one integer");
    free_place(&p);
}

/* Replaces a dataset by one of another type, shape or layout. */
static void replace(const place *p, const char *name, hid_t type, int dims, hsize_t rows,
                    bool fletcher, bool chunked, int extra_filter) {
    hid_t file = open_bad(p);
    hsize_t shape[2] = {rows, 4}, chunk[2] = {16, 4}, most[2] = {H5S_UNLIMITED, 4};
    assert_true(H5Ldelete(file, name, H5P_DEFAULT) >= 0);
    hid_t space = H5Screate_simple(dims, shape, chunked ? most : NULL),
          plist = H5Pcreate(H5P_DATASET_CREATE);
    if (chunked)
        H5Pset_chunk(plist, dims, chunk);
    if (extra_filter)
        H5Pset_filter(plist, extra_filter, H5Z_FLAG_OPTIONAL, 0, NULL);
    if (fletcher)
        H5Pset_fletcher32(plist);
    hid_t set = H5Dcreate2(file, name, type, space, H5P_DEFAULT, plist, H5P_DEFAULT);
    assert_true(set >= 0);
    H5Dclose(set);
    H5Pclose(plist);
    H5Sclose(space);
    H5Fclose(file);
}

static void test_datasets(void **state) {
    place p = setup_place(pairs_shape, 4);
    hsize_t pairs = 0;
    for (int i = 0; i < p.f->calls; i++)
        pairs += (hsize_t)p.f->call[i].pairs;
    remove_object(&p, "/pairs/expert", NULL);
    must_name(&p, "/pairs/expert: is missing");
    remove_object(&p, "/calls/tokens", NULL);
    must_name(&p, "/calls/tokens: is missing");
    remove_object(&p, "/sequences/tokens", NULL);
    must_name(&p, "/sequences/tokens: is missing");
    replace(&p, "/pairs/expert", H5T_IEEE_F32LE, 1, pairs, true, true, 0);
    must_name(&p, "/pairs/expert: holds float32, must be one of uint8, uint16");
    replace(&p, "/pairs/weight", H5T_IEEE_F32BE, 1, pairs, true, true, 0);
    must_name(&p, "/pairs/weight: holds float of 4 bytes, big-endian");
    replace(&p, "/pairs/expert", H5T_STD_U8LE, 2, pairs, true, true, 0);
    must_name(&p, "/pairs/expert: has 2 dimensions");
    replace(&p, "/pairs/expert", H5T_STD_U8LE, 1, pairs, false, true, 0);
    must_name(&p, "/pairs/expert: has no Fletcher-32");
    replace(&p, "/pairs/expert", H5T_STD_U8LE, 1, pairs, false, false, 0);
    must_name(&p, "/pairs/expert: must be stored in chunks");
    replace(&p, "/pairs/expert", H5T_STD_U8LE, 1, pairs, true, true, H5Z_FILTER_NBIT);
    must_name(&p, "/pairs/expert: filter 0 (number 5)");
    replace(&p, "/pairs/expert", H5T_STD_U8LE, 1, pairs, true, true, 0);
    must_name(&p, "/pairs/expert: chunk 0 (from row 0): its data was never written");
    replace(&p, "/pairs/expert", H5T_STD_U8LE, 1, pairs + 1, true, true, 0);
    must_name(&p, "/pairs/expert: ");
    replace(&p, "/pairs/expert", H5T_STD_U8LE, 1, (hsize_t)1 << 60, true, true, 0);
    must_name(&p, "/pairs/expert: claims 1152921504606846976 rows");
    replace(&p, "/calls/step", H5T_STD_U8LE, 1, (hsize_t)p.f->calls + 1, true, true, 0);
    must_name(&p, "/calls/");
    free_place(&p);
}

static void test_no_tokens(void **state) {
    place p = setup_place(counts_shape, 0);
    mz_err err;
    mz_trace_writer *writer;
    mz_trace_facts facts = {.layers = 1, .experts = 4, .top_k = 1, .ranks = 1, .step_stride = 1};
    assert_ok(mz_trace_create(p.bad, &facts, NULL, &writer, &err), &err);
    mz_trace_call_data call = {0};
    assert_ok(mz_trace_write_call(writer, &call, &err), &err);
    assert_ok(mz_trace_writer_close(&writer, &err), &err);
    assert_ok(read_all(p.bad, &err), &err); /* readable, but */
    int64_t faults;
    char *list = check_text(p.bad, 10, &faults);
    assert_int_equal(faults, 1);
    assert_non_null(strstr(list, "holds no token"));
    free(list);
    free_place(&p);
}

/* ---- hostile files ----------------------------------------------------------------------------
 */

static void test_random_bytes(void **state) {
    static const fixture_shape small[] = {{MZ_TRACE_PAIRS, 1, 1, 2, 2, 16, 0, 9, true, true},
                                          {MZ_TRACE_COUNTS, 1, 1, 2, 2, 16, 2, 9, false, true}};
    int refused = 0;
    for (int s = 0; s < 2; s++) {
        place p = setup_place(small[s], 4);
        size_t size;
        char *data = read_bytes(p.good, &size), *copy = malloc(size);
        for (uint64_t seed = 0; seed < 100; seed++) {
            mz_rng rng = mz_rng_make(seed, 77);
            memcpy(copy, data, size);
            uint64_t changes = 1 + mz_rng_below(&rng, 8);
            /* Half of them near the front, where the structure lies. */
            for (uint64_t i = 0; i < changes; i++)
                copy[mz_rng_below(&rng, seed % 2 ? size : size / 4)] = (char)mz_rng_u32(&rng);
            write_bytes(p.bad, copy, size);
            mz_err err;
            mz_code code = read_all(p.bad, &err);
            assert_true(code == MZ_OK || code == MZ_EINPUT);
            refused += code == MZ_EINPUT;
            if (seed % 4)
                continue;
            int64_t faults;
            char *list = check_text(p.bad, 20, &faults);
            assert_true(code == MZ_OK || faults > 0);
            free(list);
        }
        free(data);
        free(copy);
        free_place(&p);
    }
    assert_true(refused > 100); /* most changes hit something */
}

/* What a crash inside the HDF5 library looks like from here: the child is gone. */
static void test_child_dies(void **state) {
    place p = setup_place(fixed_shape, 4);
    mz_err err;
    mz_trace *trace;
    int64_t count[16] = {0};
    const int deaths[] = {SIGSEGV, SIGABRT, SIGKILL};
    for (int i = 0; i < 3; i++) {
        char want[96];
        assert_ok(mz_trace_open(p.good, &trace, &err), &err);
        kill(mz_server_pid(trace->server), deaths[i]);
        snprintf(want, sizeof want, "the HDF5 library failed on this file (signal %d)", deaths[i]);
        assert_fails(mz_trace_add_counts(trace, 0, count, &err), MZ_EINPUT, want, &err);
        assert_fails(mz_trace_add_counts(trace, 1, count, &err), MZ_EINPUT, want, &err);
        mz_trace_close(&trace);
        assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    }
    assert_ok(mz_trace_open(p.good, &trace, &err), &err);
    mz_server_set_patience(trace->server, 50);
    kill(mz_server_pid(trace->server), SIGSTOP);
    assert_fails(mz_trace_add_counts(trace, 0, count, &err), MZ_EINPUT, "no answer for", &err);
    mz_trace_close(&trace);
    /* Signals that ask the program to stop do not take the child away from it. */
    assert_ok(mz_trace_open(p.good, &trace, &err), &err);
    kill(mz_server_pid(trace->server), SIGINT);
    kill(mz_server_pid(trace->server), SIGTERM);
    assert_ok(mz_trace_add_counts(trace, 0, count, &err), &err);
    mz_trace_close(&trace);
    free_place(&p);
}

/* The child of a program that dies without closing the trace does not live on. */
static void test_parent_dies(void **state) {
    place p = setup_place(fixed_shape, 4);
    int report[2];
    pid_t child = 0;
    assert_int_equal(pipe(report), 0);
    pid_t pid = fork();
    if (pid == 0) {
        mz_err err;
        mz_trace *trace;
        if (mz_trace_open(p.good, &trace, &err) == MZ_OK)
            child = mz_server_pid(trace->server);
        ssize_t n = write(report[1], &child, sizeof child);
        kill(getpid(), n == sizeof child ? SIGKILL : SIGABRT);
    }
    assert_int_equal(read(report[0], &child, sizeof child), sizeof child);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_true(child > 0);
    char path[64], state_of[64] = {0};
    snprintf(path, sizeof path, "/proc/%d/stat", (int)child);
    for (int i = 0; i < 500; i++) { /* gone, or dead and waiting for init */
        FILE *file = fopen(path, "r");
        if (!file)
            break;
        int got = fscanf(file, "%*d %*s %1s", state_of);
        fclose(file);
        if (got != 1 || state_of[0] == 'Z' || state_of[0] == 'X')
            break;
        usleep(10000);
        assert_int_not_equal(i, 499);
    }
    close(report[0]);
    close(report[1]);
    free_place(&p);
}

int main(void) {
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_not_a_trace),  cmocka_unit_test(test_cut_short),
        cmocka_unit_test(test_flipped_byte), cmocka_unit_test(test_many_faults),
        cmocka_unit_test(test_values),       cmocka_unit_test(test_calls),
        cmocka_unit_test(test_attributes),   cmocka_unit_test(test_datasets),
        cmocka_unit_test(test_no_tokens),    cmocka_unit_test(test_random_bytes),
        cmocka_unit_test(test_child_dies),   cmocka_unit_test(test_parent_dies)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
