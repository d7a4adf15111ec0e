#include "common/io/catalog.h"

#include "common/base/opt.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char suffix[] = ".json";

static bool ends_in_json(const char *name) {
    size_t n = strlen(name), s = sizeof suffix - 1;
    return n > s && strcmp(name + n - s, suffix) == 0;
}

static int by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* The names of an open folder into a growing array of arena strings. */
static mz_code read_names(DIR *folder, mz_arena *arena, char ***list, size_t *count, mz_err *err) {
    size_t cap = 0;
    for (struct dirent *entry = readdir(folder); entry; entry = readdir(folder)) {
        if (entry->d_name[0] == '.' || !ends_in_json(entry->d_name))
            continue;
        char *name = mz_arena_strdup(arena, entry->d_name);
        if (!name || !mz_grow((void **)list, &cap, *count + 1, sizeof **list))
            return mz_fail_nomem(err, "the list of shipped files");
        name[strlen(name) - (sizeof suffix - 1)] = '\0';
        (*list)[(*count)++] = name;
    }
    return MZ_OK;
}

mz_code mz_catalog_list(const char *folder, mz_arena *arena, char ***names, int *count,
                        mz_err *err) {
    *names = NULL;
    *count = 0;
    DIR *dir = opendir(folder);
    if (!dir)
        return mz_fail(err, MZ_EINPUT, "%s: cannot read the folder of shipped files: %s", folder,
                       strerror(errno));
    char **list = NULL;
    size_t n = 0;
    mz_code code = read_names(dir, arena, &list, &n, err);
    closedir(dir);
    if (code == MZ_OK) {
        *names = MZ_NEW(arena, char *, n);
        if (!*names)
            code = mz_fail_nomem(err, "the list of shipped files");
    }
    if (code == MZ_OK && n) {
        qsort(list, n, sizeof *list, by_name);
        memcpy(*names, list, n * sizeof *list);
        *count = (int)n;
    }
    free(list);
    return code;
}

static mz_code unknown(const char *name, const char *folder, const char *kind, mz_err *err) {
    mz_arena arena = {0};
    struct stat info;
    if (name[0] && stat(name, &info) == 0)
        return mz_fail(err, MZ_EINPUT,
                       "no shipped %s \"%s\"; for the %s of that name here write ./%s", kind, name,
                       S_ISDIR(info.st_mode) ? "folder" : "file", name);
    char **names;
    int count;
    mz_code code = mz_catalog_list(folder, &arena, &names, &count, err);
    if (code == MZ_OK) {
        char text[512] = "";
        size_t used = 0;
        for (int i = 0; i < count && used < sizeof text; i++)
            used +=
                (size_t)snprintf(text + used, sizeof text - used, "%s%s", i ? ", " : "", names[i]);
        const char *near = mz_nearest(name, (const char *const *)names, count);
        code = mz_fail(
            err, MZ_EINPUT, "no shipped %s \"%s\"%s%s%s; give a path to a .json file or one of %s",
            kind, name, near ? " (did you mean " : "", near ? near : "", near ? "?)" : "", text);
    }
    mz_arena_free(&arena);
    return code;
}

mz_code mz_catalog_find(const char *name, const char *folder, const char *kind, char *path,
                        size_t size, mz_err *err) {
    struct stat info;
    int n;
    if (strchr(name, '/') || ends_in_json(name)) {
        if (stat(name, &info) != 0)
            return mz_fail(err, MZ_EINPUT, "%s: cannot read the %s: %s", name, kind,
                           strerror(errno));
        n = snprintf(path, size, S_ISDIR(info.st_mode) ? "%s/config.json" : "%s", name);
    } else {
        n = snprintf(path, size, "%s/%s%s", folder, name, suffix);
    }
    if (n < 0 || (size_t)n >= size)
        return mz_fail(err, MZ_EINPUT, "%s: the path is too long", name);
    if (strchr(name, '/') == NULL && !ends_in_json(name) && stat(path, &info) != 0)
        return unknown(name, folder, kind, err);
    return MZ_OK;
}
