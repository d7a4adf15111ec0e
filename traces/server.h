/* The child process in which the HDF5 library meets a file that is not trusted.
 *
 * The child opens the file and answers requests over a socket; raw chunks come back through shared
 * memory. When it crashes, hangs for a minute or is killed, the request under way and every later
 * one fail with MZ_EINPUT. The child ends with its server, and with the thread that started it.
 * Threads: one server belongs to one thread at a time. Private to this room. */
#ifndef MIZAN_TRACES_SERVER_H
#define MIZAN_TRACES_SERVER_H

#include "traces/schema.h"

#include <sys/types.h>

typedef struct mz_server mz_server;

enum { MZ_SERVER_TEXT = 512, MZ_SERVER_DIMS = 2, MZ_SERVER_FILTERS = 8 };

typedef enum mz_attr_kind {
    MZ_ATTR_MISSING,
    MZ_ATTR_INT,
    MZ_ATTR_REAL,
    MZ_ATTR_TEXT,
    MZ_ATTR_OTHER
} mz_attr_kind;

typedef struct mz_attr {
    mz_attr_kind kind;
    int64_t integer;
    double real;
    char text[MZ_SERVER_TEXT];
} mz_attr;

/* A dataset as the file describes it; nothing here is checked. */
typedef struct mz_dataset {
    bool exists, chunked, whole_edges; /* whole_edges: partial chunks are filtered as others are */
    mz_elem elem;
    int32_t dims, filters;
    int64_t dim[MZ_SERVER_DIMS], chunk[MZ_SERVER_DIMS];
    int32_t filter[MZ_SERVER_FILTERS];
    int64_t stored; /* bytes of its chunks in the file */
    char other_type[64];
} mz_dataset;

typedef struct mz_chunk_reply {
    int32_t column; /* dataset and row of the request that is answered */
    int64_t row;
    int64_t size;      /* bytes in the column's slot; 0: the chunk was never written */
    uint32_t mask;     /* filters that were left out */
    const char *wrong; /* NULL, or what HDF5 says; valid until the next wait */
} mz_chunk_reply;

/* Starts the child and opens the file. MZ_EINPUT when HDF5 cannot open it. */
mz_code mz_server_start(const char *path, mz_server **server, mz_err *err);
void mz_server_stop(mz_server **server);

mz_code mz_server_attr(mz_server *server, const char *group, const char *name, mz_attr *attr,
                       mz_err *err);
/* Describes the dataset of a column and keeps it open for chunk requests. */
mz_code mz_server_dataset(mz_server *server, mz_column_id id, mz_dataset *dataset, mz_err *err);

/* Asks for the raw chunk that begins at `row` of a column's dataset; at most one request per column
 * may be under way, its bytes arrive in the column's slot. Replies come in the order of requests.
 */
mz_code mz_server_request(mz_server *server, mz_column_id id, int64_t row, mz_err *err);
mz_code mz_server_wait(mz_server *server, mz_chunk_reply *reply, mz_err *err);
const uint8_t *mz_server_slot(const mz_server *server, mz_column_id id);

pid_t mz_server_pid(const mz_server *server); /* 0 when it has ended */

/* How long a request may take before the child counts as hung; a minute unless set. */
void mz_server_set_patience(mz_server *server, int milliseconds);

#endif
