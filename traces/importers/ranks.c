#include "traces/importers/ranks.h"

#include "traces/importers/common.h"

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
    return rank <= MZ_RANKS_MAX ? rank : -1;
}

/* One number; *end is behind it. */
static bool number(const char *text, char **end, int64_t *value) {
    errno = 0;
    *value = strtoll(text, end, 10);
    return *end != text && errno == 0 && *value >= 0;
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
                return mz_fail(err, MZ_EINPUT, "two files of rank %lld", (long long)file[i].rank);
            members += file[j].offset == file[i].offset;
            file[i].source += file[j].offset == file[i].offset && file[j].rank < file[i].rank;
        }
        if (i > 0 && members != *sources)
            return mz_fail(err, MZ_EINPUT,
                           "%d ranks with layer offset %lld, but %d with another: every pipeline "
                           "stage must have the same number of ranks",
                           members, (long long)file[i].offset, *sources);
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
