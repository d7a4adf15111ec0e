#include "traces/importers/ranks.h"

#include "common/base/arena.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

int64_t mz_rank_of_name(const char *path) {
    int64_t rank = -1;
    for (const char *p = mz_base_name(path); (p = strstr(p, "rank")) != NULL;) {
        p += strlen("rank");
        p += *p == '_';
        if (isdigit((unsigned char)*p))
            rank = strtoll(p, NULL, 10);
    }
    return rank < MZ_RANKS_MAX ? rank : -1;
}

/* One number; *end is behind it. */
static bool number(const char *text, char **end, int64_t *value) {
    errno = 0;
    *value = strtoll(text, end, 10);
    return *end != text && errno == 0 && *value >= 0 && *value <= INT32_MAX;
}

mz_code mz_rank_value(const char *option, const char *list, int64_t rank, bool exact,
                      int64_t *value, mz_err *err) {
    int64_t best = -1;
    for (const char *p = list;;) {
        int64_t from, here;
        char *end;
        if (!number(p, &end, &from) || *end != ':' || !number(end + 1, &end, &here) ||
            (*end != ',' && *end != '\0'))
            return mz_fail(err, MZ_EINPUT, "--%s: '%.60s' is not RANK:NUMBER,RANK:NUMBER,...",
                           option, list);
        if (from <= rank && from > best && (!exact || from == rank)) {
            best = from;
            *value = here;
        }
        if (*end == '\0')
            break;
        p = end + 1;
    }
    if (best < 0)
        return mz_fail(err, MZ_EINPUT, "--%s: '%.60s' says nothing of rank %lld", option, list,
                       (long long)rank);
    return MZ_OK;
}

int mz_number_order(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Appends [first, last] to a list of ranges. */
static void add_range(char *text, size_t size, int64_t first, int64_t last) {
    size_t used = strlen(text);
    char range[56];
    if (first == last)
        snprintf(range, sizeof range, "%s%lld", used ? ", " : "", (long long)first);
    else
        snprintf(range, sizeof range, "%s%lld-%lld", used ? ", " : "", (long long)first,
                 (long long)last);
    if (used + strlen(range) + sizeof ", ..." <= size)
        strcat(text, range);
    else if (used > 0 && text[used - 1] != '.')
        strcat(text, ", ...");
}

mz_code mz_ranks_missing(const int64_t *rank, size_t count, int64_t world, int64_t *missing,
                         char *text, size_t size, mz_err *err) {
    int64_t *sorted = mz_calloc(count + 1, sizeof *sorted), next = 0;
    if (!sorted)
        return mz_fail_nomem(err, "ranks");
    memcpy(sorted, rank, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, mz_number_order);
    sorted[count] = count > 0 && sorted[count - 1] >= world ? sorted[count - 1] + 1 : world;
    *missing = 0;
    text[0] = '\0';
    for (size_t i = 0; i <= count; i++) {
        if (sorted[i] > next) {
            *missing += sorted[i] - next;
            add_range(text, size, next, sorted[i] - 1);
        }
        next = sorted[i] + 1;
    }
    free(sorted);
    return MZ_OK;
}

mz_code mz_ranks_note(mz_import_report *report, mz_trace_facts *facts, const int64_t *rank,
                      size_t count, int64_t world, mz_err *err) {
    int64_t missing;
    mz_code code = mz_ranks_missing(rank, count, world, &missing, report->missing,
                                    sizeof report->missing, err);
    if (!code && missing)
        mz_import_note(facts, "missing ranks=%s", report->missing);
    return code;
}

/* The ranks of files, to be freed; NULL when memory is short. */
static int64_t *ranks_of(const mz_rank_file *file, int count) {
    int64_t *rank = mz_calloc((size_t)count, sizeof *rank);
    for (int i = 0; rank && i < count; i++)
        rank[i] = file[i].rank;
    return rank;
}

mz_code mz_rank_files_missing(const mz_rank_file *file, int count, int64_t world, int64_t *missing,
                              char *text, size_t size, mz_err *err) {
    int64_t *rank = ranks_of(file, count);
    mz_code code = rank ? mz_ranks_missing(rank, (size_t)count, world, missing, text, size, err)
                        : mz_fail_nomem(err, "ranks");
    free(rank);
    return code;
}

mz_code mz_rank_files_note(mz_import_report *report, mz_trace_facts *facts,
                           const mz_rank_file *file, int count, mz_err *err) {
    int64_t *rank = ranks_of(file, count);
    mz_code code = rank ? mz_ranks_note(report, facts, rank, (size_t)count, 0, err)
                        : mz_fail_nomem(err, "ranks");
    free(rank);
    return code;
}

/* Why the stages differ in size, if it is that files are missing. */
static mz_code stages_differ(const mz_rank_file *file, int count, int64_t offset, int32_t members,
                             int32_t before, mz_err *err) {
    char text[64];
    int64_t missing;
    mz_code code = mz_rank_files_missing(file, count, 0, &missing, text, sizeof text, err);
    return code ? code
                : mz_fail(err, MZ_EINPUT,
                          "%d ranks with layer offset %lld, but %d with another: every pipeline "
                          "stage must have the same number of ranks%s%s",
                          members, (long long)offset, before,
                          missing ? "; there is no file of rank " : "", text);
}

mz_code mz_rank_stages(mz_rank_file *file, int count, const char *layer_offsets, int32_t *sources,
                       mz_err *err) {
    for (int i = 0; i < count; i++) {
        file[i].offset = 0;
        mz_code code = layer_offsets ? mz_rank_value("layer-offsets", layer_offsets, file[i].rank,
                                                     false, &file[i].offset, err)
                                     : MZ_OK;
        if (code)
            return code;
    }
    for (int i = 0; i < count; i++) {
        int32_t members = 0;
        file[i].source = 0;
        for (int j = 0; j < count; j++) {
            if (i != j && file[j].rank == file[i].rank)
                return mz_fail(err, MZ_EINPUT, "%s: one of two files of rank %lld: give each once",
                               file[i].path, (long long)file[i].rank);
            members += file[j].offset == file[i].offset;
            file[i].source += file[j].offset == file[i].offset && file[j].rank < file[i].rank;
        }
        if (i > 0 && members != *sources)
            return stages_differ(file, count, file[i].offset, members, *sources, err);
        *sources = members;
    }
    return MZ_OK;
}

mz_code mz_megatron_next(mz_jsonl *lines, const char *key, int64_t *step, int64_t *skipped,
                         mz_err *err) {
    int64_t before = *step;
    for (;;) {
        const char *block = "decoder";
        mz_code code = mz_jsonl_next(lines, err);
        if (!code && lines->object && json_object_get(lines->object, "block"))
            code = mz_jsonl_text(lines, "block", &block, err);
        if (code || !lines->object)
            return code;
        if (strcmp(block, "decoder") == 0)
            break;
        if (strcmp(block, "mtp") != 0)
            return mz_jsonl_fail(lines, err, "block \"%.40s\" is neither decoder nor mtp", block);
        ++*skipped;
    }
    mz_code code = mz_jsonl_int(lines, key, 0, INT64_MAX / 2, step, err);
    if (!code && *step < before)
        return mz_jsonl_fail(lines, err, "%s %lld after %s %lld", key, (long long)*step, key,
                             (long long)before);
    return code;
}
