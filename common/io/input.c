#include "common/io/input.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <lzma.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

enum { RAW_SIZE = 1 << 16, DATA_SIZE = 1 << 18, PEEK_SIZE = 4096 };

static const size_t LINE_MAX_BYTES = (size_t)64 << 20;
static const uint64_t XZ_MEMORY = (uint64_t)1 << 30; /* the largest preset needs 65 MiB */

typedef enum form { FORM_PLAIN, FORM_GZIP, FORM_XZ } form;

struct mz_input {
    char *path;
    int fd;
    form form;
    bool raw_end;  /* the file has been read to its end */
    bool data_end; /* nothing more will be decoded */
    bool member;   /* gzip: inside a member */
    int64_t raw_read;
    unsigned char raw[RAW_SIZE];
    size_t raw_begin, raw_count;
    unsigned char data[DATA_SIZE]; /* decoded bytes not yet handed out */
    size_t begin, end;
    z_stream gzip;
    lzma_stream xz;
    char *line;
    size_t line_size;
    int64_t line_number;
};

/* ---- raw bytes --------------------------------------------------------------------------------
 */

/* More raw bytes behind those that are left; sets raw_end at the end of the file. */
static mz_code read_raw(mz_input *in, mz_err *err) {
    memmove(in->raw, in->raw + in->raw_begin, in->raw_count);
    in->raw_begin = 0;
    while (in->raw_count < RAW_SIZE && !in->raw_end) {
        ssize_t n = read(in->fd, in->raw + in->raw_count, RAW_SIZE - in->raw_count);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return mz_fail(err, MZ_EINPUT, "%s: cannot read: %s", in->path, strerror(errno));
        in->raw_end = n == 0;
        in->raw_count += (size_t)n;
        in->raw_read += n;
    }
    return MZ_OK;
}

static void take_raw(mz_input *in, size_t count) {
    in->raw_begin += count;
    in->raw_count -= count;
}

static mz_code damaged(const mz_input *in, const char *what, mz_err *err) {
    return mz_fail(err, MZ_EINPUT, "%s: %s near byte %lld of the compressed file; get it again",
                   in->path, what, (long long)(in->raw_read - (int64_t)in->raw_count));
}

/* ---- decoders: each appends to in->data and sets data_end -------------------------------------
 */

static mz_code fill_plain(mz_input *in, mz_err *err) {
    size_t room = DATA_SIZE - in->end;
    size_t count = in->raw_count < room ? in->raw_count : room;
    memcpy(in->data + in->end, in->raw + in->raw_begin, count);
    in->end += count;
    take_raw(in, count);
    in->data_end = in->raw_end && in->raw_count == 0;
    return MZ_OK;
}

/* Between members: another member, zero padding up to the end, or an error. */
static mz_code next_member(mz_input *in, mz_err *err) {
    while (in->raw_count && in->raw[in->raw_begin] == 0)
        take_raw(in, 1);
    if (in->raw_count == 0) {
        in->data_end = in->raw_end;
        return MZ_OK;
    }
    if (inflateReset(&in->gzip) != Z_OK)
        return mz_fail(err, MZ_EINTERNAL, "%s: zlib cannot restart", in->path);
    in->member = true;
    return MZ_OK;
}

static mz_code fill_gzip(mz_input *in, mz_err *err) {
    if (!in->member) {
        mz_code code = next_member(in, err);
        if (code || !in->member)
            return code;
    }
    in->gzip.next_in = in->raw + in->raw_begin;
    in->gzip.avail_in = (uInt)in->raw_count;
    in->gzip.next_out = in->data + in->end;
    in->gzip.avail_out = (uInt)(DATA_SIZE - in->end);
    int status = inflate(&in->gzip, Z_NO_FLUSH);
    take_raw(in, in->raw_count - in->gzip.avail_in);
    in->end = DATA_SIZE - in->gzip.avail_out;
    if (status == Z_STREAM_END) {
        in->member = false;
        return MZ_OK;
    }
    if (status == Z_MEM_ERROR)
        return mz_fail_nomem(err, "gzip decoder");
    if (status != Z_OK && status != Z_BUF_ERROR)
        return damaged(in, "damaged gzip data", err);
    if (in->raw_end && in->raw_count == 0 && in->gzip.avail_out > 0)
        return damaged(in, "truncated gzip data", err);
    return MZ_OK;
}

static mz_code fill_xz(mz_input *in, mz_err *err) {
    in->xz.next_in = in->raw + in->raw_begin;
    in->xz.avail_in = in->raw_count;
    in->xz.next_out = in->data + in->end;
    in->xz.avail_out = DATA_SIZE - in->end;
    lzma_ret status = lzma_code(&in->xz, in->raw_end ? LZMA_FINISH : LZMA_RUN);
    take_raw(in, in->raw_count - in->xz.avail_in);
    in->end = DATA_SIZE - in->xz.avail_out;
    switch (status) {
    case LZMA_OK:
        return MZ_OK;
    case LZMA_STREAM_END:
        in->data_end = true;
        return MZ_OK;
    case LZMA_BUF_ERROR:
        return in->raw_end ? damaged(in, "truncated xz data", err) : MZ_OK;
    case LZMA_MEM_ERROR:
        return mz_fail_nomem(err, "xz decoder");
    case LZMA_MEMLIMIT_ERROR:
        return mz_fail(err, MZ_EINPUT, "%s: xz dictionary needs more than 1 GiB; pack it again",
                       in->path);
    default:
        return damaged(in, "damaged xz data", err);
    }
}

/* Decodes until at least `need` bytes are at hand or the data ends; need <= PEEK_SIZE. */
static mz_code fill(mz_input *in, size_t need, mz_err *err) {
    while (in->end - in->begin < need && !in->data_end) {
        memmove(in->data, in->data + in->begin, in->end - in->begin);
        in->end -= in->begin;
        in->begin = 0;
        mz_code code = in->raw_count == 0 && !in->raw_end ? read_raw(in, err) : MZ_OK;
        if (code)
            return code;
        switch (in->form) {
        case FORM_PLAIN:
            code = fill_plain(in, err);
            break;
        case FORM_GZIP:
            code = fill_gzip(in, err);
            break;
        case FORM_XZ:
            code = fill_xz(in, err);
            break;
        }
        if (code)
            return code;
    }
    return MZ_OK;
}

/* ---- opening and closing ----------------------------------------------------------------------
 */

static mz_code open_file(mz_input *in, mz_err *err) {
    if (in->fd == STDIN_FILENO)
        return MZ_OK;
    in->fd = open(in->path, O_RDONLY | O_CLOEXEC);
    if (in->fd < 0)
        return mz_fail(err, MZ_EINPUT, "%s: cannot open: %s%s", in->path, strerror(errno),
                       errno == EMFILE ? "; 'ulimit -n' sets how many" : "");
    struct stat info;
    if (fstat(in->fd, &info) == 0 && S_ISDIR(info.st_mode))
        return mz_fail(err, MZ_EINPUT, "%s: is a directory, a file is needed", in->path);
    return MZ_OK;
}

static mz_code start_decoder(mz_input *in, mz_err *err) {
    static const unsigned char gzip_magic[] = {0x1f, 0x8b};
    static const unsigned char xz_magic[] = {0xfd, '7', 'z', 'X', 'Z', 0};
    if (in->raw_count >= sizeof gzip_magic && !memcmp(in->raw, gzip_magic, sizeof gzip_magic)) {
        if (inflateInit2(&in->gzip, 15 + 16) != Z_OK)
            return mz_fail_nomem(err, "gzip decoder");
        in->form = FORM_GZIP;
        in->member = true;
    } else if (in->raw_count >= sizeof xz_magic && !memcmp(in->raw, xz_magic, sizeof xz_magic)) {
        if (lzma_stream_decoder(&in->xz, XZ_MEMORY, LZMA_CONCATENATED) != LZMA_OK)
            return mz_fail_nomem(err, "xz decoder");
        in->form = FORM_XZ;
    }
    return MZ_OK;
}

static mz_code open_stream(mz_input *in, mz_err *err) {
    mz_code code = open_file(in, err);
    if (!code)
        code = read_raw(in, err);
    if (!code)
        code = start_decoder(in, err);
    if (!code)
        code = fill(in, 3, err);
    if (!code && in->end - in->begin >= 3 && memcmp(in->data + in->begin, "\xef\xbb\xbf", 3) == 0)
        in->begin += 3;
    if (!code)
        code = fill(in, 1, err);
    if (!code && in->end == in->begin)
        code = mz_fail(err, MZ_EINPUT, "%s: is empty", in->path);
    return code;
}

mz_code mz_input_open(const char *path, mz_input **input, mz_err *err) {
    *input = NULL;
    bool standard = strcmp(path, "-") == 0;
    mz_input *in = calloc(1, sizeof *in);
    char *name = strdup(standard ? "standard input" : path);
    if (!in || !name) {
        free(in);
        free(name);
        return mz_fail_nomem(err, "an input buffer");
    }
    in->path = name;
    in->fd = standard ? STDIN_FILENO : -1;
    in->xz = (lzma_stream)LZMA_STREAM_INIT;
    mz_code code = open_stream(in, err);
    if (code)
        mz_input_close(&in);
    *input = in;
    return code;
}

void mz_input_close(mz_input **input) {
    mz_input *in = *input;
    *input = NULL;
    if (!in)
        return;
    if (in->form == FORM_GZIP)
        inflateEnd(&in->gzip);
    lzma_end(&in->xz);
    if (in->fd > STDIN_FILENO)
        close(in->fd);
    free(in->line);
    free(in->path);
    free(in);
}

/* ---- reading ----------------------------------------------------------------------------------
 */

mz_code mz_input_read(mz_input *in, void *data, size_t size, size_t *got, mz_err *err) {
    *got = 0;
    while (*got < size) {
        mz_code code = fill(in, 1, err);
        if (code)
            return code;
        size_t have = in->end - in->begin;
        if (have == 0)
            break;
        size_t count = have < size - *got ? have : size - *got;
        memcpy((char *)data + *got, in->data + in->begin, count);
        in->begin += count;
        *got += count;
    }
    return MZ_OK;
}

static mz_code append_line(mz_input *in, size_t length, size_t count, mz_err *err) {
    size_t need = length + count + 1;
    if (need > LINE_MAX_BYTES)
        return mz_fail(err, MZ_EINPUT, "%s: line %lld is longer than 64 MiB", in->path,
                       (long long)in->line_number + 1);
    if (need > in->line_size) {
        size_t size = in->line_size ? in->line_size : 256;
        while (size < need)
            size *= 2;
        char *grown = realloc(in->line, size);
        if (!grown)
            return mz_fail_nomem(err, "a line");
        in->line = grown;
        in->line_size = size;
    }
    memcpy(in->line + length, in->data + in->begin, count);
    return MZ_OK;
}

mz_code mz_input_line(mz_input *in, char **line, size_t *length, mz_err *err) {
    size_t total = 0;
    bool complete = false, any = false;
    *line = NULL;
    *length = 0;
    while (!complete) {
        mz_code code = fill(in, 1, err);
        if (code)
            return code;
        size_t have = in->end - in->begin;
        if (have == 0)
            break;
        const unsigned char *start = in->data + in->begin;
        const unsigned char *newline = memchr(start, '\n', have);
        size_t count = newline ? (size_t)(newline - start) : have;
        code = append_line(in, total, count, err);
        if (code)
            return code;
        total += count;
        in->begin += count + (newline != NULL);
        complete = newline != NULL;
        any = true;
    }
    if (!any)
        return MZ_OK;
    in->line_number++;
    if (total && in->line[total - 1] == '\r')
        total--;
    in->line[total] = 0;
    *line = in->line;
    *length = total;
    return MZ_OK;
}

int64_t mz_input_line_number(const mz_input *in) {
    return in->line_number;
}

mz_code mz_input_peek(mz_input *in, const unsigned char **data, size_t *size, mz_err *err) {
    *data = NULL;
    *size = 0;
    mz_code code = fill(in, PEEK_SIZE, err);
    if (code)
        return code;
    size_t have = in->end - in->begin;
    *data = in->data + in->begin;
    *size = have < PEEK_SIZE ? have : PEEK_SIZE;
    return MZ_OK;
}

const char *mz_input_path(const mz_input *in) {
    return in->path;
}

/* ---- output -----------------------------------------------------------------------------------
 */

/* Follows links, so that a linked file is replaced, not the link. */
static mz_code resolve_output(mz_output *output, const char *path, mz_err *err) {
    struct stat info;
    char real[PATH_MAX];
    if (stat(path, &info) == 0) {
        if (!S_ISREG(info.st_mode))
            return mz_fail(err, MZ_EINPUT, "%s: cannot write: it exists and is not a regular file",
                           path);
        if (!realpath(path, real))
            return mz_fail(err, MZ_EINPUT, "%s: cannot write: %s", path, strerror(errno));
        path = real;
    }
    int n = snprintf(output->path, sizeof output->path, "%s", path);
    if (n < 0 || (size_t)n >= sizeof output->path)
        return mz_fail(err, MZ_EINPUT, "output path is longer than %zu bytes",
                       sizeof output->path - 1);
    snprintf(output->partial, sizeof output->partial, "%s.partial-%ld", output->path,
             (long)getpid());
    return MZ_OK;
}

mz_code mz_output_begin(mz_output *output, const char *path, mz_err *err) {
    *output = (mz_output){{0}, {0}};
    if (!*path)
        return mz_fail(err, MZ_EINPUT, "the output path is empty");
    mz_code code = resolve_output(output, path, err);
    if (code) {
        output->partial[0] = 0;
        return code;
    }
    /* Created now, so that a directory that cannot be written is found before the work. */
    int fd = open(output->partial, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) {
        code = mz_fail(err, MZ_EINPUT, "%s: cannot write: %s", path, strerror(errno));
        output->partial[0] = 0;
        return code;
    }
    close(fd);
    return MZ_OK;
}

static void sync_directory(const char *path) {
    char directory[PATH_MAX];
    const char *slash = strrchr(path, '/');
    size_t n = slash ? (size_t)(slash - path) : 0;
    if (n >= sizeof directory)
        return;
    memcpy(directory, path, n);
    directory[n] = 0;
    int fd = open(n ? directory : slash ? "/" : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
}

mz_code mz_output_commit(mz_output *output, mz_err *err) {
    int fd = open(output->partial, O_RDONLY | O_CLOEXEC);
    bool synced = fd >= 0 && fsync(fd) == 0;
    int reason = errno;
    if (fd >= 0)
        close(fd);
    if (synced && rename(output->partial, output->path) == 0) {
        output->partial[0] = 0;
        sync_directory(output->path);
        return MZ_OK;
    }
    reason = synced ? errno : reason;
    mz_fail(err, MZ_EINTERNAL, "%s: cannot write: %s", output->path, strerror(reason));
    mz_output_abandon(output);
    return err->code;
}

void mz_output_abandon(mz_output *output) {
    if (output->partial[0])
        unlink(output->partial);
    output->partial[0] = 0;
}

mz_code mz_output_try(const char *path, mz_err *err) {
    mz_output output;
    mz_code code = mz_output_begin(&output, path, err);
    if (code == MZ_OK)
        mz_output_abandon(&output);
    return code;
}
