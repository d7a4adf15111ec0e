/* SHA-256 against the examples of FIPS 180-4 and against itself cut in pieces. */
#include "tests/harness.h"

#include "common/base/digest.h"

static void assert_digest(const mz_digest *d, const char *expected) {
    unsigned char digest[MZ_DIGEST_BYTES];
    char text[MZ_DIGEST_TEXT];
    mz_digest_of(d, digest);
    mz_digest_text(digest, text);
    assert_string_equal(text, expected);
}

static void test_published(void **state) {
    mz_digest d = mz_digest_start();
    assert_digest(&d, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    mz_digest_add(&d, "abc", 3);
    assert_digest(&d, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    d = mz_digest_start();
    const char *two = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    mz_digest_add(&d, two, strlen(two));
    assert_digest(&d, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    d = mz_digest_start();
    char many[1000];
    memset(many, 'a', sizeof many);
    for (int i = 0; i < 1000; i++)
        mz_digest_add(&d, many, sizeof many);
    assert_digest(&d, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

/* Every length around the block and its padding, whole and in pieces. */
static void test_pieces(void **state) {
    unsigned char data[300], whole[MZ_DIGEST_BYTES], pieces[MZ_DIGEST_BYTES];
    for (int i = 0; i < 300; i++)
        data[i] = (unsigned char)(i * 37);
    for (size_t n = 0; n <= 300; n++) {
        mz_digest a = mz_digest_start(), b = mz_digest_start();
        mz_digest_add(&a, data, n);
        for (size_t at = 0, step = 1; at < n; at += step, step = step % 71 + 3)
            mz_digest_add(&b, data + at, at + step < n ? step : n - at);
        mz_digest_of(&a, whole);
        mz_digest_of(&b, pieces);
        assert_memory_equal(whole, pieces, sizeof whole);
    }
}

static void test_file(void **state) {
    char folder[256], path[300], text[MZ_DIGEST_TEXT];
    mz_err err;
    make_directory(folder, sizeof folder);
    snprintf(path, sizeof path, "%s/abc", folder);
    assert_fails(mz_digest_file(path, text, &err), MZ_EINPUT, path, &err);
    write_bytes(path, "abc", 3);
    assert_ok(mz_digest_file(path, text, &err), &err);
    assert_string_equal(text, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    assert_fails(mz_digest_file(folder, text, &err), MZ_EINPUT, folder, &err);
    remove_directory(folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_published),
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
