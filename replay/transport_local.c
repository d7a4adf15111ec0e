/* One process holds all ranks: nothing crosses processes. */
#include "replay/transport_kind.h"

#include <stdlib.h>

/* Started by mpirun, every process would replay the whole job and write the same file. */
static mz_code local_open(mz_transport *t, const mz_transport_options *options, mz_err *err) {
    const char *size = getenv("OMPI_COMM_WORLD_SIZE");
    if (size && atoi(size) > 1)
        return mz_fail(err, MZ_EINPUT,
                       "--transport local is one process, mpirun started %s: pass --transport mpi "
                       "(or nccl)",
                       size);
    return MZ_OK;
}

const mz_transport_kind mz_transport_local = {.open = local_open};
