/* Links and ports of a cluster.
 *
 * Links of a device: into the scale-up switch and out of it (one link for both where the profile is
 * half duplex). GPUs behind host bridges cross their bridge up and the other's down, also within
 * one bridge, since without peer access everything passes the host; so does what goes to a NIC.
 * Links of a NIC: out and in; GPU i of a node uses NIC i * nics / gpus, and its share of several.
 * Links of a leaf: up to and down from the spine, as wide as its NICs divided by the
 * oversubscription. With rails, NIC i of every node of a pod hangs on leaf i, else one leaf serves
 * a pod's nodes. */
#include "sim/cluster/profile.h"

#include <math.h>

/* Where a device's traffic goes; link numbers, -1 none. */
typedef struct device_ports {
    int32_t node;
    int32_t inside_out, inside_in;
    int32_t bridge_up, bridge_down;
    int32_t nic_out, nic_in;
    int32_t leaf, leaf_up, leaf_down;
} device_ports;

typedef struct fabric {
    const int32_t *device; /* [ranks] */
    device_ports *ports;   /* [devices] */
} fabric;

static int add_hop(int32_t *links, int count, int32_t link) {
    if (link >= 0)
        links[count++] = link;
    return count;
}

static int route(const void *self, int32_t src, int32_t dst, int32_t *links) {
    const fabric *f = self;
    int32_t from = f->device[src], to = f->device[dst];
    if (from == to)
        return 0;
    const device_ports *a = &f->ports[from], *b = &f->ports[to];
    int n = 0;
    if (a->node == b->node) {
        links[n++] = a->inside_out;
        n = add_hop(links, n, a->bridge_up);
        n = add_hop(links, n, b->bridge_down);
        links[n++] = b->inside_in;
        return n;
    }
    if (a->bridge_up >= 0) {
        links[n++] = a->inside_out;
        links[n++] = a->bridge_up;
    }
    links[n++] = a->nic_out;
    if (a->leaf != b->leaf) {
        links[n++] = a->leaf_up;
        links[n++] = b->leaf_down;
    }
    links[n++] = b->nic_in;
    if (b->bridge_down >= 0) {
        links[n++] = b->bridge_down;
        links[n++] = b->inside_in;
    }
    return n;
}

/* Numbers of everything, and where each kind of link starts. */
typedef struct plan {
    int32_t gpus_per_node, nodes, devices;
    int32_t bridges_per_node, gpus_per_bridge;
    int32_t nics_per_node, pods, leaves_per_pod, nodes_per_leaf;
    bool half_duplex;
    int32_t inside, bridge, nic, leaf, links;
} plan;

static plan count_links(const mz_profile *profile, const mz_cluster *cluster) {
    const double *value = profile->value;
    plan p = {.gpus_per_node = cluster->gpus_per_node,
              .nodes = cluster->nodes,
              .devices = cluster->gpus,
              .gpus_per_bridge = (int32_t)value[MZ_FIELD_GPUS_PER_BRIDGE],
              .nodes_per_leaf = (int32_t)value[MZ_FIELD_NODES_PER_LEAF],
              .half_duplex = value[MZ_FIELD_HALF_DUPLEX] > 0};
    int32_t nics = (int32_t)value[MZ_FIELD_NICS];
    if (p.gpus_per_bridge)
        p.bridges_per_node = p.gpus_per_node / p.gpus_per_bridge;
    /* Several NICs of one GPU act as one of their bandwidth. */
    p.nics_per_node = nics > p.gpus_per_node ? p.gpus_per_node : nics;
    if (p.nodes < 2)
        p.nics_per_node = 0;
    p.pods = (p.nodes + p.nodes_per_leaf - 1) / p.nodes_per_leaf;
    p.leaves_per_pod = value[MZ_FIELD_RAILS] > 0 ? p.nics_per_node : 1;
    if (p.nics_per_node == 0)
        p.leaves_per_pod = 0;
    p.bridge = p.inside + p.devices * (p.half_duplex ? 1 : 2);
    p.nic = p.bridge + 2 * p.bridges_per_node * p.nodes;
    p.leaf = p.nic + 2 * p.nics_per_node * p.nodes;
    p.links = p.leaf + 2 * p.leaves_per_pod * p.pods;
    return p;
}

static device_ports place_device(const plan *p, int32_t device) {
    int32_t node = device / p->gpus_per_node, local = device % p->gpus_per_node;
    device_ports ports = {.node = node,
                          .bridge_up = -1,
                          .bridge_down = -1,
                          .nic_out = -1,
                          .nic_in = -1,
                          .leaf = -1,
                          .leaf_up = -1,
                          .leaf_down = -1};
    ports.inside_out = p->inside + (p->half_duplex ? device : 2 * device);
    ports.inside_in = p->half_duplex ? ports.inside_out : ports.inside_out + 1;
    if (p->bridges_per_node) {
        int32_t bridge = node * p->bridges_per_node + local / p->gpus_per_bridge;
        ports.bridge_up = p->bridge + 2 * bridge;
        ports.bridge_down = ports.bridge_up + 1;
    }
    if (p->nics_per_node) {
        int32_t rail = (int32_t)((int64_t)local * p->nics_per_node / p->gpus_per_node);
        int32_t pod = node / p->nodes_per_leaf;
        ports.nic_out = p->nic + 2 * (node * p->nics_per_node + rail);
        ports.nic_in = ports.nic_out + 1;
        ports.leaf = pod * p->leaves_per_pod + (p->leaves_per_pod > 1 ? rail : 0);
        ports.leaf_up = p->leaf + 2 * ports.leaf;
        ports.leaf_down = ports.leaf_up + 1;
    }
    return ports;
}

typedef struct rates {
    double inside, bridge, nic;
    double inside_latency, outside_latency, nic_latency, oversubscription;
} rates;

static rates read_rates(const mz_profile *profile, const plan *p) {
    const double *value = profile->value;
    double nics = value[MZ_FIELD_NICS];
    rates r = {.inside = value[MZ_FIELD_INSIDE_BANDWIDTH] * value[MZ_FIELD_INSIDE_EFFICIENCY],
               .bridge = value[MZ_FIELD_BRIDGE_BANDWIDTH],
               .nic = value[MZ_FIELD_NIC_BANDWIDTH] * value[MZ_FIELD_NIC_EFFICIENCY],
               .inside_latency = value[MZ_FIELD_INSIDE_LATENCY],
               .outside_latency = value[MZ_FIELD_OUTSIDE_LATENCY],
               .oversubscription = value[MZ_FIELD_SPINE_OVERSUBSCRIPTION]};
    /* Behind bridges a message to another node crosses two cards' links too; the NIC has the rest.
     */
    r.nic_latency = r.outside_latency - (p->bridges_per_node ? r.inside_latency : 0);
    if (p->nics_per_node && nics > p->nics_per_node)
        r.nic *= nics / p->nics_per_node;
    return r;
}

/* NICs on a leaf: the last pod may have fewer nodes. */
static int32_t leaf_nics(const plan *p, int32_t leaf) {
    int32_t pod = leaf / p->leaves_per_pod;
    int32_t nodes = p->nodes - pod * p->nodes_per_leaf;
    if (nodes > p->nodes_per_leaf)
        nodes = p->nodes_per_leaf;
    return nodes * (p->nics_per_node / p->leaves_per_pod);
}

/* The latency of a route lies on the first link of its kind; a half-duplex route crosses two links
 * that both may come first, so each holds half. */
static void fill_links(const plan *p, const rates *r, double *rate, double *latency) {
    for (int32_t i = p->inside; i < p->bridge; i++) {
        rate[i] = r->inside;
        if (p->half_duplex)
            latency[i] = r->inside_latency / 2;
        else
            latency[i] = (i - p->inside) % 2 == 0 ? r->inside_latency : 0;
    }
    for (int32_t i = p->bridge; i < p->nic; i++)
        rate[i] = r->bridge;
    for (int32_t i = p->nic; i < p->leaf; i++) {
        rate[i] = r->nic;
        latency[i] = (i - p->nic) % 2 == 0 ? r->nic_latency : 0;
    }
    for (int32_t i = p->leaf; i < p->links; i++)
        rate[i] = leaf_nics(p, (i - p->leaf) / 2) * r->nic / r->oversubscription;
}

static bool fill_ports(const plan *p, const rates *r, mz_cluster *cluster) {
    mz_topology *t = &cluster->topology;
    int32_t *domain = MZ_NEW(&cluster->arena, int32_t, t->ranks);
    double *inside = MZ_NEW(&cluster->arena, double, t->ranks);
    double *outside = MZ_NEW(&cluster->arena, double, t->ranks);
    double *uplink = MZ_NEW(&cluster->arena, double, t->domains);
    if (!domain || !inside || !outside || !uplink)
        return false;
    double switched = r->inside, external = p->nics_per_node ? r->nic : 0;
    if (p->bridges_per_node) {
        switched = fmin(switched, r->bridge / p->gpus_per_bridge);
        external = fmin(external, switched);
    }
    for (int32_t i = 0; i < t->ranks; i++) {
        domain[i] = t->device[i] / p->gpus_per_node;
        inside[i] = switched;
        outside[i] = external;
    }
    for (int32_t d = 0; d < t->domains; d++)
        uplink[d] = p->nics_per_node * r->nic;
    t->domain = domain;
    t->inside_bytes_per_s = inside;
    t->outside_bytes_per_s = outside;
    t->uplink_bytes_per_s = uplink;
    t->inside_latency_s = r->inside_latency;
    t->outside_latency_s = r->outside_latency;
    t->inside_half_duplex = p->half_duplex;
    if (p->leaves_per_pod * p->pods > 1 && r->oversubscription > 1)
        t->spine_bytes_per_s = p->nodes * p->nics_per_node * r->nic / r->oversubscription;
    return true;
}

mz_code mz_topology_build(const mz_profile *profile, mz_cluster *cluster, mz_err *err) {
    mz_topology *t = &cluster->topology;
    plan p = count_links(profile, cluster);
    rates r = read_rates(profile, &p);
    *t = (mz_topology){.ranks = cluster->ranks, .links = p.links, .domains = p.nodes};
    fabric *f = MZ_NEW(&cluster->arena, fabric, 1);
    int32_t *device = MZ_NEW(&cluster->arena, int32_t, t->ranks);
    device_ports *ports = MZ_NEW(&cluster->arena, device_ports, p.devices);
    double *rate = MZ_NEW(&cluster->arena, double, p.links);
    double *latency = MZ_NEW(&cluster->arena, double, p.links);
    if (!f || !device || !ports || !rate || !latency)
        return mz_fail_nomem(err, "a cluster's links");
    for (int32_t i = 0; i < t->ranks; i++)
        device[i] = i / cluster->ranks_per_device;
    for (int32_t i = 0; i < p.devices; i++)
        ports[i] = place_device(&p, i);
    fill_links(&p, &r, rate, latency);
    f->device = t->device = device;
    f->ports = ports;
    t->self = f;
    t->route = route;
    t->link_bytes_per_s = rate;
    t->link_latency_s = latency;
    return fill_ports(&p, &r, cluster) ? MZ_OK : mz_fail_nomem(err, "a cluster's ports");
}
