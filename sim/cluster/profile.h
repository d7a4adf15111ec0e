/* A hardware profile as its file has it: one value per field, in base units. */
#ifndef MIZAN_SIM_CLUSTER_PROFILE_H
#define MIZAN_SIM_CLUSTER_PROFILE_H

#include "sim/cluster/cluster.h"

/* Every field, in the order of the table in profile.c; README.md in profiles/ explains each. */
typedef enum mz_field {
    /* device */
    MZ_FIELD_MEMORY,
    MZ_FIELD_MEMORY_BANDWIDTH,
    MZ_FIELD_MEMORY_EFFICIENCY,
    MZ_FIELD_BF16,
    MZ_FIELD_GEMM_EFFICIENCY,
    MZ_FIELD_ATTENTION_EFFICIENCY,
    MZ_FIELD_ATTENTION_BACKWARD_EFFICIENCY,
    MZ_FIELD_SMS,
    MZ_FIELD_TILE_M,
    MZ_FIELD_TILE_N,
    MZ_FIELD_ROW_ALIGNMENT,
    MZ_FIELD_LAUNCH,
    MZ_FIELD_SYNC,
    MZ_FIELD_CONTEXT,
    MZ_FIELD_COMMUNICATOR,
    MZ_FIELD_WORKSPACE,
    MZ_FIELD_NOISE_PERSISTENT,
    MZ_FIELD_NOISE_JITTER,
    MZ_FIELD_SPEED,
    MZ_FIELD_RANKS_PER_DEVICE,
    /* node */
    MZ_FIELD_GPUS,
    MZ_FIELD_INSIDE_BANDWIDTH,
    MZ_FIELD_INSIDE_EFFICIENCY,
    MZ_FIELD_INSIDE_LATENCY,
    MZ_FIELD_HALF_DUPLEX,
    MZ_FIELD_GPUS_PER_BRIDGE,
    MZ_FIELD_BRIDGE_BANDWIDTH,
    MZ_FIELD_HOST_LINK,
    /* scale_out */
    MZ_FIELD_NICS,
    MZ_FIELD_NIC_BANDWIDTH,
    MZ_FIELD_NIC_EFFICIENCY,
    MZ_FIELD_OUTSIDE_LATENCY,
    MZ_FIELD_RAILS,
    MZ_FIELD_NODES_PER_LEAF,
    MZ_FIELD_SPINE_OVERSUBSCRIPTION,
    MZ_FIELDS
} mz_field;

typedef struct mz_profile {
    double value[MZ_FIELDS];
} mz_profile;

/* Whether a profile may be called so: a line of text, not empty, as tables print it as it is. */
bool mz_profile_is_name(const char *text);

/* Reads the file into `profile` and the name, description, planner table and resolved values of
 * `cluster`. */
mz_code mz_profile_read(const char *path, mz_profile *profile, mz_cluster *cluster, mz_err *err);

/* Fills cluster->topology from the profile; gpus, nodes and ranks are set. */
mz_code mz_topology_build(const mz_profile *profile, mz_cluster *cluster, mz_err *err);

#endif
