/* Devices, links and topologies; hardware profiles are JSON files in sim/cluster/profiles/
 * (README.md there explains every field; each value carries its public source). `mizan calibrate`
 * writes the same format. Units in strings: "400 GB/s", "80 GiB", "312 TFLOP/s", "5 us". Unknown
 * fields are errors. */
#ifndef MIZAN_SIM_CLUSTER_CLUSTER_H
#define MIZAN_SIM_CLUSTER_CLUSTER_H

#include "common/base/arena.h"
#include "common/base/err.h"
#include "sim/cluster/measured.h"
#include "sim/engine/network.h"

#include <jansson.h>
#include <stdint.h>

typedef struct mz_device {
    char name[64];             /* the profile's name */
    double memory_bytes;       /* what the runtime reports as the device's total */
    double memory_bytes_per_s; /* data sheet; times memory_efficiency for kernels */
    double memory_efficiency;
    double bf16_flops;           /* dense tensor peak */
    double gemm_efficiency;      /* fraction of peak of one large product */
    double attention_efficiency; /* fraction of peak of flash attention, forward / backward */
    double attention_backward_efficiency;
    int32_t sms;
    int32_t tile_m, tile_n;    /* grouped-GEMM tile: 128 x 128 */
    int32_t row_alignment;     /* rows are padded to this by the back end (1: none) */
    double launch_s;           /* host cost of one kernel launch */
    double sync_s;             /* host cost of one count copy + stream synchronisation */
    double context_bytes;      /* CUDA context and library state */
    double communicator_bytes; /* per communicator */
    double workspace_bytes;    /* GEMM library workspace, per stream that runs products */
    double noise_persistent, noise_jitter; /* relative standard deviations; used when noise is on */
    double speed;                          /* factor on every kernel's rate, 1 nominal */
    const mz_measured *measured; /* by `mizan calibrate`; NULL: formulas alone. The cluster's */
} mz_device;

/* Time model of a planner on the host or device: seconds = fixed + per_cell * ranks * experts. One
 * entry per policy; a missing entry is an error that names `mizan calibrate`. */
typedef struct mz_planner_cost {
    char policy[32];
    double fixed_s, per_cell_s;
} mz_planner_cost;

typedef struct mz_cluster {
    char name[128];                     /* the profile's */
    char source[512];                   /* its description */
    int32_t gpus, gpus_per_node, nodes; /* a node is one scale-up domain: a server, or a rack */
    int32_t ranks; /* gpus * ranks_per_device; rank r on device r / ranks_per_device */
    int32_t ranks_per_device;
    mz_device device;             /* the whole device, whoever shares it */
    double host_link_bytes_per_s; /* device to host memory, each direction */
    mz_topology topology;         /* arrays live in arena; bandwidths times their efficiencies */
    mz_planner_cost *planner;     /* [planners] */
    int32_t planners;
    json_t *resolved; /* every value used, base units, for the result file */
    mz_arena arena;
} mz_cluster;

/* spec: "h100-80gb:64", "path/to/profile.json:8", or with several ranks on each device
 * "h200:1x8" (1 GPU, 8 ranks). GPUs must be whole nodes or a part of one node. data_dir is where
 * shipped profiles are. A wrong spec or profile: MZ_EINPUT naming file and field. */
mz_code mz_cluster_load(const char *spec, const char *data_dir, mz_cluster **cluster, mz_err *err);
void mz_cluster_free(mz_cluster **cluster);
/* MZ_EINPUT, with what to do, unless the cluster of this spec has as many ranks; 0: any. */
mz_code mz_cluster_need_ranks(const mz_cluster *cluster, const char *spec, int64_t ranks,
                              mz_err *err);
/* Names of the shipped profiles, sorted; arena-owned strings. */
mz_code mz_cluster_list(const char *data_dir, mz_arena *arena, char ***names, int *count,
                        mz_err *err);

#endif
