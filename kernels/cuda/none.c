/* A build without the CUDA sources. */
#include "kernels/backend.h"

const mz_backend_ops *mz_cuda_ops(void) {
    return NULL;
}
