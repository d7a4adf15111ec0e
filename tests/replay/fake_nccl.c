/* As much of NCCL, and of the CUDA driver, as the transport asks for, without a device: it counts
 * groups, and refuses a send when it is told to. */
#include "tests/replay/fake_nccl.h"

#include <string.h>

enum { SUCCESS = 0, FAILURE = 5 };

typedef struct id {
    char internal[128];
} id;

struct fake_nccl fake_nccl;

int ncclGetVersion(int *version);
int ncclGetUniqueId(id *out);
int ncclCommInitRankConfig(void **comm, int ranks, id from, int rank, void *config);
int ncclCommAbort(void *comm);
int ncclCommDestroy(void *comm);
int ncclCommGetAsyncError(void *comm, int *error);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclSend(const void *memory, size_t count, int type, int peer, void *comm, void *stream);
int ncclRecv(void *memory, size_t count, int type, int peer, void *comm, void *stream);
const char *ncclGetErrorString(int status);
int cuStreamQuery(void *stream);

int ncclGetVersion(int *version) {
    *version = 21400;
    return SUCCESS;
}

int ncclGetUniqueId(id *out) {
    memset(out, 1, sizeof *out);
    return SUCCESS;
}

int ncclCommInitRankConfig(void **comm, int ranks, id from, int rank, void *config) {
    *comm = &fake_nccl;
    return SUCCESS;
}

int ncclCommAbort(void *comm) {
    return SUCCESS;
}

int ncclCommDestroy(void *comm) {
    return SUCCESS;
}

int ncclCommGetAsyncError(void *comm, int *error) {
    *error = SUCCESS;
    return SUCCESS;
}

int ncclGroupStart(void) {
    if (fake_nccl.group_fails)
        return FAILURE;
    fake_nccl.begun++;
    return SUCCESS;
}

int ncclGroupEnd(void) {
    fake_nccl.ended++;
    return SUCCESS;
}

int ncclSend(const void *memory, size_t count, int type, int peer, void *comm, void *stream) {
    return ++fake_nccl.sent == fake_nccl.fails_at ? FAILURE : SUCCESS;
}

int ncclRecv(void *memory, size_t count, int type, int peer, void *comm, void *stream) {
    return SUCCESS;
}

const char *ncclGetErrorString(int status) {
    return "refused";
}

int cuStreamQuery(void *stream) {
    return SUCCESS;
}
