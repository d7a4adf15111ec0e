/* Values of a Python pickle (protocols 2 to 5), for data alone: None, bool, int, float, str, bytes,
 * list, tuple, dict, OrderedDict, PyTorch tensors (_rebuild_tensor_v2 over a storage) and NumPy
 * arrays of numbers. Nothing is ever executed; every other class or function is refused by name, as
 * are sets, extension codes and numbers beyond 64 bits.
 *
 * Reading uses no recursion and at most MZ_PICKLE_MEMORY bytes for the values. Values may share
 * members and may even contain themselves: walk them to a fixed depth. */
#ifndef MIZAN_TRACES_PICKLE_H
#define MIZAN_TRACES_PICKLE_H

#include "common/base/arena.h"
#include "traces/datafile.h"

#define MZ_PICKLE_MEMORY ((size_t)2 << 30)

typedef enum mz_value_type {
    MZ_VALUE_NONE,
    MZ_VALUE_BOOL,
    MZ_VALUE_INT,
    MZ_VALUE_REAL,
    MZ_VALUE_TEXT,
    MZ_VALUE_BYTES,
    MZ_VALUE_LIST, /* list and tuple */
    MZ_VALUE_DICT, /* dict and OrderedDict */
    MZ_VALUE_TENSOR,
    MZ_VALUE_OTHER /* a class, a storage: only within the reader */
} mz_value_type;

typedef struct mz_value mz_value;
struct mz_value {
    mz_value_type type;
    uint32_t count, room; /* items of a LIST; of a DICT twice its entries: key, value, key, ... */
    union {
        int64_t whole; /* BOOL, INT */
        double real;
        const char *text; /* TEXT (UTF-8, NUL-terminated), BYTES: `count` bytes */
        mz_value **item;
        mz_tensor *tensor;
        const void *other;
    };
};

/* Where the bytes of a storage lie: called for every persistent id of the form ("storage", class,
 * key, location, elements). */
typedef mz_code (*mz_storage_place)(void *context, const char *key, int64_t bytes, int64_t *offset,
                                    mz_err *err);

/* Reads one pickle. `file` is named in messages and is what tensors are checked against; `place`
 * may be NULL: storages are then refused. Values live in `arena`. */
mz_code mz_pickle_read(const mz_datafile *file, const unsigned char *data, size_t size,
                       mz_storage_place place, void *context, mz_arena *arena, mz_value **value,
                       mz_err *err);

/* Member of a DICT by its text key, or NULL; also NULL when `value` is NULL or no DICT. */
mz_value *mz_value_get(const mz_value *value, const char *key);
/* False: not a whole number. */
bool mz_value_int(const mz_value *value, int64_t *whole);

/* A file of torch.save (the zip form of PyTorch 1.6 and later). */
typedef struct mz_torch_file {
    mz_datafile *file;
    mz_value *value;
    mz_arena arena;
} mz_torch_file;

/* MZ_EINPUT with the reason for the older form, for big-endian files and for everything that the
 * reader refuses. Close it also after a failure. */
mz_code mz_torch_open(const char *path, mz_torch_file *torch, mz_err *err);
void mz_torch_close(mz_torch_file *torch);
/* Whether the first bytes are those of a torch file, of either form. */
bool mz_torch_head(const unsigned char *head, size_t size);

#endif
