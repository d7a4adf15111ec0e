#include "sim/cluster/cluster.h"

#include "common/base/units.h"
#include "common/io/catalog.h"
#include "common/io/speed.h"
#include "sim/cluster/profile.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS_MAX = 1 << 20 };

/* "NAME:GPUS" or "NAME:GPUSxRANKS"; ranks 0 where not given. */
typedef struct cluster_spec {
    char profile[4096];
    int64_t gpus, ranks_per_device;
} cluster_spec;

static mz_code parse_spec(const char *text, cluster_spec *spec, mz_err *err) {
    const char *colon = strrchr(text, ':');
    if (!colon || colon == text || colon[1] == '\0')
        return mz_fail(err, MZ_EINPUT, "cluster \"%s\": say how many GPUs, as in \"h100-80gb:64\"",
                       text);
    if ((size_t)(colon - text) >= sizeof spec->profile)
        return mz_fail(err, MZ_EINPUT, "cluster \"%.64s...\": the path is too long", text);
    snprintf(spec->profile, sizeof spec->profile, "%.*s", (int)(colon - text), text);
    char gpus[32];
    const int length = snprintf(gpus, sizeof gpus, "%s", colon + 1);
    char *times = strchr(gpus, 'x');
    if (length >= (int)sizeof gpus || times == gpus || (times && times[1] == '\0'))
        return mz_fail(
            err, MZ_EINPUT,
            "cluster \"%s\": after the colon belong GPUs, as in \"h100-80gb:64\", or GPUs "
            "and ranks on each, as in \"h100-80gb:1x8\"",
            text);
    if (times)
        *times = '\0';
    spec->ranks_per_device = 0;
    mz_code code = mz_int_parse(gpus, "the GPUs of --cluster", 1, RANKS_MAX, &spec->gpus, err);
    if (code == MZ_OK && times)
        code = mz_int_parse(times + 1, "the ranks per device of --cluster", 1, 4096,
                            &spec->ranks_per_device, err);
    return code;
}

static void set_device(const mz_profile *profile, mz_device *device) {
    const double *value = profile->value;
    device->memory_bytes = value[MZ_FIELD_MEMORY];
    device->memory_bytes_per_s = value[MZ_FIELD_MEMORY_BANDWIDTH];
    device->memory_efficiency = value[MZ_FIELD_MEMORY_EFFICIENCY];
    device->bf16_flops = value[MZ_FIELD_BF16];
    device->gemm_efficiency = value[MZ_FIELD_GEMM_EFFICIENCY];
    device->attention_efficiency = value[MZ_FIELD_ATTENTION_EFFICIENCY];
    device->attention_backward_efficiency = value[MZ_FIELD_ATTENTION_BACKWARD_EFFICIENCY];
    device->sms = (int32_t)value[MZ_FIELD_SMS];
    device->tile_m = (int32_t)value[MZ_FIELD_TILE_M];
    device->tile_n = (int32_t)value[MZ_FIELD_TILE_N];
    device->row_alignment = (int32_t)value[MZ_FIELD_ROW_ALIGNMENT];
    device->launch_s = value[MZ_FIELD_LAUNCH];
    device->sync_s = value[MZ_FIELD_SYNC];
    device->context_bytes = value[MZ_FIELD_CONTEXT];
    device->communicator_bytes = value[MZ_FIELD_COMMUNICATOR];
    device->workspace_bytes = value[MZ_FIELD_WORKSPACE];
    device->noise_persistent = value[MZ_FIELD_NOISE_PERSISTENT];
    device->noise_jitter = value[MZ_FIELD_NOISE_JITTER];
    device->speed = value[MZ_FIELD_SPEED];
}

/* What a result keeps of how fast the machine was when it was measured. */
static bool put_speeds(json_t *resolved, const mz_measured *m) {
    const double mean[MZ_SPEEDS] = {[MZ_SPEED_PRODUCT] = m->probe_mean_s,
                                    [MZ_SPEED_MEMORY] = m->rows_mean_s,
                                    [MZ_SPEED_CACHE] = m->cache_mean_s};
    bool good =
        m->probe_s == 0 || json_object_set_new(resolved, "probe_s", json_real(m->probe_s)) == 0;
    for (int k = 0; k < MZ_SPEEDS && good; k++)
        good = mean[k] == 0 || json_object_set_new(resolved, mz_speed_mean_key((mz_speed)k),
                                                   json_real(mean[k])) == 0;
    return good;
}

static mz_code set_shape(const mz_profile *profile, const cluster_spec *spec, mz_cluster *cluster,
                         mz_err *err) {
    int64_t node = (int64_t)profile->value[MZ_FIELD_GPUS];
    int64_t shared = spec->ranks_per_device ? spec->ranks_per_device
                                            : (int64_t)profile->value[MZ_FIELD_RANKS_PER_DEVICE];
    if (spec->gpus > node && spec->gpus % node)
        return mz_fail(
            err, MZ_EINPUT, "cluster %s: %lld GPUs are not whole nodes of %lld; use %lld or %lld",
            spec->profile, (long long)spec->gpus, (long long)node,
            (long long)(spec->gpus / node * node), (long long)((spec->gpus / node + 1) * node));
    if (spec->gpus > node && profile->value[MZ_FIELD_NICS] < 1)
        return mz_fail(err, MZ_EINPUT,
                       "cluster %s: scale_out.nics is 0, so it has one node of %lld GPUs at most",
                       spec->profile, (long long)node);
    if (spec->gpus * shared > RANKS_MAX)
        return mz_fail(err, MZ_EINPUT, "cluster %s: %lld ranks are more than %d", spec->profile,
                       (long long)(spec->gpus * shared), RANKS_MAX);
    const mz_measured *measured = cluster->device.measured;
    cluster->gpus = (int32_t)spec->gpus;
    cluster->gpus_per_node = (int32_t)node;
    cluster->nodes = (int32_t)((spec->gpus + node - 1) / node);
    cluster->ranks_per_device = (int32_t)shared;
    cluster->ranks = (int32_t)(spec->gpus * shared);
    if (json_object_set_new(cluster->resolved, "gpus", json_integer(cluster->gpus)) ||
        json_object_set_new(cluster->resolved, "nodes", json_integer(cluster->nodes)) ||
        json_object_set_new(cluster->resolved, "ranks", json_integer(cluster->ranks)) ||
        json_object_set_new(cluster->resolved, "ranks_per_device", json_integer(shared)) ||
        (measured && !put_speeds(cluster->resolved, measured)))
        return mz_fail_nomem(err, "a cluster's values");
    return MZ_OK;
}

static void profiles_folder(const char *data_dir, char *folder, size_t size) {
    snprintf(folder, size, "%s/sim/cluster/profiles", data_dir);
}

mz_code mz_cluster_load(const char *spec, const char *data_dir, mz_cluster **cluster, mz_err *err) {
    char folder[4096], path[4096];
    cluster_spec parsed;
    mz_profile profile;
    *cluster = NULL;
    mz_code code = parse_spec(spec, &parsed, err);
    profiles_folder(data_dir, folder, sizeof folder);
    if (code == MZ_OK)
        code = mz_catalog_find(parsed.profile, folder, "cluster profile", path, sizeof path, err);
    if (code)
        return code;
    mz_cluster *made = calloc(1, sizeof *made);
    if (!made)
        return mz_fail_nomem(err, "a cluster");
    code = mz_profile_read(path, &profile, made, err);
    if (code == MZ_OK)
        code = set_shape(&profile, &parsed, made, err);
    if (code == MZ_OK) {
        set_device(&profile, &made->device);
        made->host_link_bytes_per_s = profile.value[MZ_FIELD_HOST_LINK];
        code = mz_topology_build(&profile, made, err);
    }
    if (code)
        mz_cluster_free(&made);
    *cluster = made;
    return code;
}

mz_code mz_cluster_need_ranks(const mz_cluster *cluster, const char *spec, int64_t ranks,
                              mz_err *err) {
    if (ranks == 0 || ranks == cluster->ranks)
        return MZ_OK;
    return mz_fail(err, MZ_EINPUT,
                   "--ranks %lld: cluster %s has %d ranks; pass --cluster with %lld GPUs, or a "
                   "profile whose ranks_per_device puts several ranks on one GPU",
                   (long long)ranks, spec, cluster->ranks, (long long)ranks);
}

void mz_cluster_free(mz_cluster **cluster) {
    if (!*cluster)
        return;
    json_decref((*cluster)->resolved);
    mz_arena_free(&(*cluster)->arena);
    free(*cluster);
    *cluster = NULL;
}

mz_code mz_cluster_list(const char *data_dir, mz_arena *arena, char ***names, int *count,
                        mz_err *err) {
    char folder[4096];
    profiles_folder(data_dir, folder, sizeof folder);
    return mz_catalog_list(folder, arena, names, count, err);
}
