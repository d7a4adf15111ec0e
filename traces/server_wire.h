/* What the reader and its HDF5 child say to each other: one record per message of a
 * sequenced-packet socket. Private to server.c and server_child.c. */
#ifndef MIZAN_TRACES_SERVER_WIRE_H
#define MIZAN_TRACES_SERVER_WIRE_H

#include "traces/chunk.h"
#include "traces/server.h"

typedef enum mz_wire_op { MZ_WIRE_OPEN, MZ_WIRE_ATTR, MZ_WIRE_DATASET, MZ_WIRE_CHUNK } mz_wire_op;

typedef struct mz_wire_request {
    int32_t op, column;
    int64_t row;
    char group[64], name[64];
} mz_wire_request;

typedef struct mz_wire_reply {
    int32_t op, column;
    int32_t failed; /* text says why */
    int64_t row, size;
    uint32_t mask;
    mz_dataset dataset;
    mz_attr attr;
    char text[256];
} mz_wire_reply;

/* A slot of shared memory per column; pages are taken only when touched. */
static inline size_t mz_wire_slot_size(void) {
    return (mz_chunk_bound(MZ_CHUNK_MAX) + 4095) / 4096 * 4096;
}

/* Runs in the child until the other side has gone. */
void mz_server_child(int fd, uint8_t *slots, const char *path);

#endif
