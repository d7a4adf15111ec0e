#include "traces/csv.h"

#include <stdlib.h>
#include <string.h>

/* Splits `line` in place into at most MZ_CSV_COLUMNS fields; -1 when it does not parse. */
static int split(char *line, char **field) {
    int count = 0;
    for (char *in = line;;) {
        if (count == MZ_CSV_COLUMNS)
            return -1;
        char *out = in;
        field[count++] = out;
        if (*in == '"') {
            for (in++; *in != '"' || in[1] == '"'; in++) {
                if (*in == '\0')
                    return -1;
                if (*in == '"')
                    in++;
                *out++ = *in;
            }
            in++;
            if (*in != ',' && *in != '\0')
                return -1;
        } else {
            in += strcspn(in, ",");
            out = in;
        }
        bool last = *in == '\0';
        *out = '\0';
        if (last)
            return count;
        in++;
    }
}

mz_code mz_csv_open(const char *path, mz_csv *csv, mz_err *err) {
    *csv = (mz_csv){0};
    char *line = NULL, *field[MZ_CSV_COLUMNS];
    size_t length;
    mz_code code = mz_input_open(path, &csv->input, err);
    if (!code)
        code = mz_input_line(csv->input, &line, &length, err);
    if (!code && !line)
        code = mz_fail(err, MZ_EINPUT, "%s: the file is empty", path);
    if (!code) {
        csv->names = strdup(line);
        if (!csv->names)
            code = mz_fail_nomem(err, "a CSV header");
    }
    if (!code) {
        csv->columns = split(csv->names, field);
        if (csv->columns < 0)
            code = mz_fail(err, MZ_EINPUT, "%s: line 1: no valid CSV header of at most %d columns",
                           path, MZ_CSV_COLUMNS);
    }
    if (code) {
        mz_csv_close(csv);
        return code;
    }
    for (int i = 0; i < csv->columns; i++)
        csv->name[i] = field[i];
    return MZ_OK;
}

mz_code mz_csv_column(const mz_csv *csv, const char *name, int *column, mz_err *err) {
    *column = -1;
    for (int i = 0; i < csv->columns; i++) {
        if (strcmp(csv->name[i], name) != 0)
            continue;
        if (*column >= 0)
            return mz_fail(err, MZ_EINPUT, "%s: line 1: two columns named %s: rename one",
                           mz_input_path(csv->input), name);
        *column = i;
    }
    return MZ_OK;
}

mz_code mz_csv_need(const mz_csv *csv, const char *name, int *column, mz_err *err) {
    mz_code code = mz_csv_column(csv, name, column, err);
    if (!code && *column < 0)
        return mz_fail(err, MZ_EINPUT, "%s: line 1: no column named %s", mz_input_path(csv->input),
                       name);
    return code;
}

mz_code mz_csv_next(mz_csv *csv, bool *end, mz_err *err) {
    char *line;
    size_t length;
    do {
        mz_code code = mz_input_line(csv->input, &line, &length, err);
        if (code)
            return code;
        *end = line == NULL;
        if (*end)
            return MZ_OK;
    } while (length == 0);
    int fields = split(line, csv->field);
    if (fields != csv->columns)
        return mz_fail(
            err, MZ_EINPUT,
            "%s: line %lld: the header has %d columns, this row does not: is it truncated?",
            mz_input_path(csv->input), (long long)mz_input_line_number(csv->input), csv->columns);
    return MZ_OK;
}

mz_code mz_csv_int(const mz_csv *csv, int column, int64_t high, int64_t *value, mz_err *err) {
    const char *text = csv->field[column];
    char *end;
    double number = strtod(text, &end);
    if (end == text || *end != '\0' || !(number >= 0 && number <= (double)high) ||
        (double)(int64_t)number != number)
        return mz_fail(err, MZ_EINPUT,
                       "%s: line %lld: %s is '%.40s', not a whole number from 0 to %lld",
                       mz_input_path(csv->input), (long long)mz_input_line_number(csv->input),
                       csv->name[column], text, (long long)high);
    *value = (int64_t)number;
    return MZ_OK;
}

void mz_csv_close(mz_csv *csv) {
    if (csv->input)
        mz_input_close(&csv->input);
    free(csv->names);
    csv->names = NULL;
}
