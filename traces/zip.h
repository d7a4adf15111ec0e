/* Members of a zip file that are stored, not deflated: what torch.save and numpy.savez write.
 * 64-bit sizes are understood; encrypted and multi-disk archives are not. A deflated member is
 * MZ_EINPUT only when it is asked for. */
#ifndef MIZAN_TRACES_ZIP_H
#define MIZAN_TRACES_ZIP_H

#include "common/base/arena.h"
#include "traces/datafile.h"

typedef struct mz_zip_member {
    const char *name;     /* whole */
    const char *key;      /* name behind the first slash, or all of it */
    int64_t header, size; /* byte of its local header; bytes stored */
    int method;           /* 0: stored */
} mz_zip_member;

typedef struct mz_zip {
    mz_datafile *file;     /* not owned */
    mz_zip_member *member; /* sorted by key */
    int64_t count;
    mz_arena arena;
} mz_zip;

/* Reads the directory of `file`, which must stay open while the zip is used. */
mz_code mz_zip_open(mz_datafile *file, mz_zip *zip, mz_err *err);
/* The member called `key`, or "FOLDER/key" with one leading folder; NULL: there is none. */
const mz_zip_member *mz_zip_find(const mz_zip *zip, const char *key);
/* Where the member's bytes begin in the file; MZ_EINPUT if it is deflated or beyond the end. */
mz_code mz_zip_place(const mz_zip *zip, const mz_zip_member *member, int64_t *offset, mz_err *err);
/* An array of a .npz: the member "name.npy" as a tensor of the file, checked. */
mz_code mz_zip_npy(const mz_zip *zip, const char *name, mz_tensor *tensor, mz_err *err);
void mz_zip_close(mz_zip *zip);

#endif
