/* Transfers of replicas beside fixed mains. */
#include "sim/policy/parts.h"

#include <math.h>
#include <string.h>

enum { RELAY_FROM = 4, RELAYS_MOST = 8 };

int32_t mz_largest_domain(const mz_policy_env *env) {
    if (!env->domain || env->domains <= 1)
        return env->ranks;
    int32_t most = 0;
    for (int32_t d = 0; d < env->domains; d++) {
        int32_t n = 0;
        for (int32_t r = 0; r < env->ranks; r++)
            n += env->domain[r] == d;
        most = n > most ? n : most;
    }
    return most;
}

/* Relays for n replicas; 0: send directly. */
static int32_t relays_for(const mz_replica_moves *how, int32_t n) {
    if (!how->relay || n < RELAY_FROM)
        return 0;
    int32_t relays = (int32_t)sqrt((double)n);
    relays = relays < RELAYS_MOST ? relays : RELAYS_MOST;
    int32_t second = (n - relays + relays - 1) / relays;
    int32_t longest = relays > second ? relays : second;
    return n - longest >= 2 ? relays : 0;
}

/* One transfer of weights src -> dst in `round` of `rounds`, the repetition for backward, and the
 * gradients back in the opposite order of rounds. */
static mz_code move_replica(mz_plan *plan, const mz_replica_moves *how, int32_t e, int32_t src,
                            int32_t dst, int32_t round, int32_t rounds, mz_err *err) {
    mz_move weights = {
        MZ_MOVE_WEIGHTS, MZ_MOVE_FORWARD, how->hide, e, src, dst, how->weight_bytes, round};
    mz_move again = weights;
    again.phase = MZ_MOVE_BACKWARD;
    again.hide = how->hide_again;
    mz_move gradients = {MZ_MOVE_GRADIENTS,   MZ_MOVE_REDUCE,    how->hide_gradients, e, dst, src,
                         how->gradient_bytes, rounds - 1 - round};
    mz_code code = mz_plan_add_move(plan, weights, err);
    if (code == MZ_OK && how->again)
        code = mz_plan_add_move(plan, again, err);
    return code == MZ_OK ? mz_plan_add_move(plan, gradients, err) : code;
}

/* Puts the `relays` replicas whose ranks send least (ties: lower rank) first; instances [i, i+n).
 */
static void choose_relays(mz_plan *plan, int32_t first, int32_t n, int32_t relays, int64_t *sent,
                          const mz_replica_moves *how, int32_t *order) {
    for (int32_t k = 0; k < n; k++)
        order[k] = plan->rank[first + k];
    for (int32_t k = 0; k < relays; k++) {
        int32_t best = k;
        for (int32_t j = k + 1; j < n; j++)
            if (sent[order[j]] < sent[order[best]] ||
                (sent[order[j]] == sent[order[best]] && order[j] < order[best]))
                best = j;
        int32_t t = order[k];
        order[k] = order[best];
        order[best] = t;
    }
    for (int32_t k = relays; k < n; k++)
        sent[order[(k - relays) % relays]] += how->weight_bytes;
}

/* plan->scratch holds the ranks of the replicas while they are ordered (n <= R distinct ranks). */
static mz_code move_relayed(mz_plan *plan, const mz_replica_moves *how, int32_t e, int32_t relays,
                            int64_t *sent, mz_err *err) {
    int32_t first = plan->begin[e] + 1, n = plan->begin[e + 1] - first;
    int32_t *order = (int32_t *)plan->scratch;
    choose_relays(plan, first, n, relays, sent, how, order);
    mz_code code = MZ_OK;
    for (int32_t k = 0; code == MZ_OK && k < n; k++) {
        int32_t src = k < relays ? plan->rank[first - 1] : order[(k - relays) % relays];
        code = move_replica(plan, how, e, src, order[k], k >= relays, 2, err);
    }
    return code;
}

mz_code mz_plan_replica_moves(mz_plan *plan, const mz_replica_moves *how, int64_t *sent,
                              mz_err *err) {
    memset(sent, 0, sizeof(int64_t) * (size_t)plan->ranks);
    for (int32_t e = 0; e < plan->experts; e++) {
        int32_t n = plan->begin[e + 1] - plan->begin[e] - 1;
        int32_t relays = n > 0 ? relays_for(how, n) : 0;
        if (n > 0)
            sent[plan->rank[plan->begin[e]]] += how->weight_bytes * (relays ? relays : n);
    }
    mz_code code = MZ_OK;
    for (int32_t e = 0; code == MZ_OK && e < plan->experts; e++) {
        int32_t first = plan->begin[e] + 1, n = plan->begin[e + 1] - first;
        int32_t relays = n > 0 ? relays_for(how, n) : 0;
        if (relays > 0)
            code = move_relayed(plan, how, e, relays, sent, err);
        for (int32_t k = 0; code == MZ_OK && relays == 0 && k < n; k++)
            code =
                move_replica(plan, how, e, plan->rank[first - 1], plan->rank[first + k], 0, 1, err);
    }
    return code;
}

/* Distinct hosts of one expert by ascending rank in plan->scratch; returns their number. Hosts come
 * nearly in order, so insertion is quick. */
static int32_t sorted_hosts(mz_plan *plan, int32_t e) {
    int64_t *host = plan->scratch;
    int32_t m = 0;
    for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++) {
        const int32_t rank = plan->rank[i];
        int32_t at = m;
        while (at > 0 && host[at - 1] > rank)
            at--;
        if (at > 0 && host[at - 1] == rank)
            continue;
        memmove(host + at + 1, host + at, sizeof(int64_t) * (size_t)(m - at));
        host[at] = rank;
        m++;
    }
    return m;
}

mz_code mz_plan_ring_moves(mz_plan *plan, int64_t bytes, mz_move_phase phase, mz_move_hide hide,
                           mz_err *err) {
    for (int32_t e = 0; e < plan->experts; e++) {
        const int32_t m = plan->begin[e + 1] - plan->begin[e] < 2 ? 1 : sorted_hosts(plan, e);
        for (int32_t i = 0; m > 1 && i < m; i++) {
            mz_move ring = {.kind = MZ_MOVE_GRADIENTS,
                            .phase = phase,
                            .hide = hide,
                            .expert = e,
                            .src = (int32_t)plan->scratch[i],
                            .dst = (int32_t)plan->scratch[i + 1 < m ? i + 1 : 0],
                            .bytes = 2 * (m - 1) * bytes / m};
            mz_code code = mz_plan_add_move(plan, ring, err);
            if (code != MZ_OK)
                return code;
        }
    }
    return MZ_OK;
}
