#include "traces/importers/names.h"

#include "common/base/arena.h"

#include <stdlib.h>
#include <string.h>

static const size_t TEXT_MAX = (size_t)256 << 20;

/* FNV-1a, whose low bits are good enough for a table. */
static size_t hash_of(const char *name) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (; *name; name++)
        hash = (hash ^ (unsigned char)*name) * UINT64_C(0x100000001b3);
    return (size_t)(hash ^ hash >> 32);
}

/* The slot that holds the name, or the free one where it belongs. */
static size_t find(const mz_names *names, const char *name) {
    size_t at = hash_of(name) & (names->slots - 1);
    while (names->slot[at] && strcmp(mz_names_text(names, names->slot[at] - 1), name) != 0)
        at = (at + 1) & (names->slots - 1);
    return at;
}

/* Keeps the table at most half full. */
static bool grow_table(mz_names *names) {
    if (2 * ((size_t)names->count + 1) <= names->slots)
        return true;
    size_t slots = names->slots ? 2 * names->slots : 64;
    int32_t *slot = mz_calloc(slots, sizeof *slot);
    if (!slot)
        return false;
    free(names->slot);
    names->slot = slot;
    names->slots = slots;
    for (int32_t i = 0; i < names->count; i++)
        slot[find(names, mz_names_text(names, i))] = i + 1;
    return true;
}

mz_code mz_names_number(mz_names *names, const char *name, int32_t *number, bool *fresh,
                        mz_err *err) {
    size_t length = strlen(name) + 1;
    if (!grow_table(names))
        return mz_fail_nomem(err, "names");
    size_t at = find(names, name);
    *fresh = names->slot[at] == 0;
    if (!*fresh) {
        *number = names->slot[at] - 1;
        return MZ_OK;
    }
    if (names->count == MZ_NAMES_MAX || length > TEXT_MAX - names->used)
        return mz_fail(err, MZ_EINPUT,
                       "more than %d different names, or %zu MiB of them: import it in parts",
                       MZ_NAMES_MAX, TEXT_MAX >> 20);
    if (!mz_grow((void **)&names->text, &names->text_room, names->used + length, 1) ||
        !mz_grow((void **)&names->begin, &names->begin_room, (size_t)names->count + 1,
                 sizeof *names->begin))
        return mz_fail_nomem(err, "names");
    memcpy(names->text + names->used, name, length);
    names->begin[names->count] = (int64_t)names->used;
    names->used += length;
    *number = names->count++;
    names->slot[at] = names->count;
    return MZ_OK;
}

const char *mz_names_text(const mz_names *names, int32_t number) {
    return names->text + names->begin[number];
}

void mz_names_free(mz_names *names) {
    free(names->text);
    free(names->begin);
    free(names->slot);
    *names = (mz_names){0};
}
