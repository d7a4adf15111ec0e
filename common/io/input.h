/* Reading files as they are: plain, gzip or xz, recognised by their first bytes, streamed. */
#ifndef MIZAN_IO_INPUT_H
#define MIZAN_IO_INPUT_H

#include "common/base/err.h"

#include <stddef.h>
#include <stdint.h>

typedef struct mz_input mz_input;

/* "-" is standard input. Directories, missing and empty files: MZ_EINPUT. A UTF-8 byte order mark
 * at the beginning is passed over. */
mz_code mz_input_open(const char *path, mz_input **input, mz_err *err);
/* Up to `size` bytes; *got < size only at the end. A truncated or damaged stream: MZ_EINPUT. */
mz_code mz_input_read(mz_input *input, void *data, size_t size, size_t *got, mz_err *err);
/* Next line without its newline, NUL-terminated, valid until the next call; *line NULL at the end.
 * Lines longer than 64 MiB: MZ_EINPUT. CR LF is accepted. */
mz_code mz_input_line(mz_input *input, char **line, size_t *length, mz_err *err);
int64_t mz_input_line_number(const mz_input *input);
/* Looks at the first bytes without consuming them (at most 4096). */
mz_code mz_input_peek(mz_input *input, const unsigned char **data, size_t *size, mz_err *err);
const char *mz_input_path(const mz_input *input);
void mz_input_close(mz_input **input);

/* Output that appears whole or not at all: writes PATH.partial-PID, fsyncs, renames on commit,
 * unlinks on abandon. The directory must be writable; an existing PATH is replaced by commit only.
 */
typedef struct mz_output {
    char path[4096], partial[4200];
} mz_output;

mz_code mz_output_begin(mz_output *output, const char *path, mz_err *err);
mz_code mz_output_commit(mz_output *output, mz_err *err);
void mz_output_abandon(mz_output *output);
/* Begins and abandons: a file that cannot be written is known before long work, not after it. */
mz_code mz_output_try(const char *path, mz_err *err);

#endif
