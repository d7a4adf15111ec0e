/* What plugin.c and the process that holds the plug-in say to each other: requests and replies over
 * a socket, matrices and lists in shared memory. Nothing that comes back is trusted. Private to
 * plugin.c and plugin_child.c. */
#ifndef MIZAN_SIM_POLICY_PLUGIN_WIRE_H
#define MIZAN_SIM_POLICY_PLUGIN_WIRE_H

#include "sim/policy/plugin.h"

enum { MZ_PLUGIN_TEXT = 256, MZ_PLUGIN_NAME = 32 };

typedef enum mz_plugin_op {
    MZ_PLUGIN_OP_LOAD,
    MZ_PLUGIN_OP_MAP,
    MZ_PLUGIN_OP_DECIDE,
    MZ_PLUGIN_OP_ROUTE,
    MZ_PLUGIN_OP_RELEASE
} mz_plugin_op;

typedef struct mz_plugin_request {
    int64_t step;
    int32_t op, micro_batch, layer;
    int32_t slots;       /* MAP */
    int32_t has_load[2]; /* DECIDE: current, history */
    int64_t pairs[2];    /* of both */
} mz_plugin_request;

typedef struct mz_plugin_reply {
    int32_t failed;            /* text says why */
    int32_t has_route;         /* LOAD */
    int32_t instances, moves;  /* DECIDE: used places of the lists */
    mz_plugin_traits traits;   /* LOAD */
    char name[MZ_PLUGIN_NAME]; /* LOAD */
    char why[MZ_PLUGIN_TEXT], text[MZ_PLUGIN_TEXT];
} mz_plugin_reply;

/* The shared memory: lists of the largest plan that the slots allow. */
typedef struct mz_plugin_area {
    int32_t instances, moves;         /* room */
    int64_t *count[2], *total[2];     /* current (or the call's), history */
    int32_t *host_expert, *host_rank; /* [instances] in the order given */
    int64_t *host_pairs;              /* [instances] */
    int64_t *quota;                   /* [experts], -1: none */
    mz_plugin_move *move;             /* [moves] */
    int32_t *begin, *rank;            /* the hosts for route: [experts+1], [instances] */
    int64_t *target;                  /* [instances] */
    int64_t *sent;                    /* [instances][ranks] */
    int64_t *dropped;                 /* [ranks][experts] */
    size_t size;                      /* bytes of all */
} mz_plugin_area;

/* Places of everything in memory that begins at base (NULL: only the size is of use). */
mz_plugin_area mz_plugin_area_at(void *base, int32_t ranks, int32_t experts, int32_t slots);

/* What the child starts with; it lives in memory copied by fork. */
typedef struct mz_plugin_child {
    const char *path; /* with a slash, as dlopen wants it */
    const mz_plugin_option *option;
    int32_t options;
    int memory; /* descriptor of the shared memory */
    mz_plugin_env env;
    mz_plugin_traits traits; /* the defaults */
} mz_plugin_child;

/* Serves requests until the other side has gone. `context` is a mz_plugin_child. */
void mz_plugin_serve(void *context, int fd);

#endif
