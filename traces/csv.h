/* Comma-separated text with a header row, as tools write it: fields may be quoted ("" is a quote),
 * rows may not span lines. Errors name file and line. */
#ifndef MIZAN_TRACES_CSV_H
#define MIZAN_TRACES_CSV_H

#include "common/base/err.h"
#include "common/io/input.h"

#include <stdbool.h>
#include <stdint.h>

enum { MZ_CSV_COLUMNS = 64 };

typedef struct mz_csv {
    mz_input *input;
    char *names; /* the header row, split; owned */
    const char *name[MZ_CSV_COLUMNS];
    int columns;
    char *field[MZ_CSV_COLUMNS]; /* of the current row, valid until the next one */
} mz_csv;

/* MZ_EINPUT: no header row. */
mz_code mz_csv_open(const char *path, mz_csv *csv, mz_err *err);
/* The column of a name, -1: there is none. MZ_EINPUT: there are two, and which one is meant nobody
 * knows. */
mz_code mz_csv_column(const mz_csv *csv, const char *name, int *column, mz_err *err);
/* The same; a missing column is MZ_EINPUT. */
mz_code mz_csv_need(const mz_csv *csv, const char *name, int *column, mz_err *err);
/* Next row into csv->field; *end at the end of the file. Empty lines are skipped; a row with
 * another number of fields than the header is MZ_EINPUT. */
mz_code mz_csv_next(mz_csv *csv, bool *end, mz_err *err);
/* A field of the current row as a whole number in [0, high]; "123.0" is accepted. */
mz_code mz_csv_int(const mz_csv *csv, int column, int64_t high, int64_t *value, mz_err *err);
void mz_csv_close(mz_csv *csv);

#endif
