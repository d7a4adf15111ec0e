#include "sim/engine/exchange.h"

#include <math.h>
#include <string.h>

void mz_exchange_aggregate(const mz_topology *topology, mz_exchange *exchange, double *send_inside,
                           double *recv_inside, double *send_outside, double *recv_outside) {
    size_t size = (size_t)exchange->members * sizeof *send_inside;
    memset(send_inside, 0, size);
    memset(recv_inside, 0, size);
    memset(send_outside, 0, size);
    memset(recv_outside, 0, size);
    int32_t from = 0, to = 0;
    for (int64_t i = 0; i < exchange->messages; i++) {
        const mz_message *message = &exchange->message[i];
        from = mz_exchange_member(exchange, message->src, from);
        to = mz_exchange_member(exchange, message->dst, to + 1);
        if (topology->device[message->src] == topology->device[message->dst]) {
            continue;
        }
        if (topology->domain[message->src] == topology->domain[message->dst]) {
            send_inside[from] += message->bytes;
            recv_inside[to] += message->bytes;
        } else {
            send_outside[from] += message->bytes;
            recv_outside[to] += message->bytes;
        }
    }
    exchange->send_inside = send_inside;
    exchange->recv_inside = recv_inside;
    exchange->send_outside = send_outside;
    exchange->recv_outside = recv_outside;
}

static mz_code check_port(int32_t rank, double bytes, double bytes_per_s, const char *where,
                          mz_err *err) {
    if (!isfinite(bytes) || bytes < 0) {
        return mz_fail(err, MZ_EINPUT, "exchange: rank %d has %g bytes %s its domain", (int)rank,
                       bytes, where);
    }
    if (bytes > 0 && !(bytes_per_s > 0)) {
        return mz_fail(err, MZ_EINPUT,
                       "exchange: rank %d has traffic %s its domain but no bandwidth there; "
                       "check the cluster profile",
                       (int)rank, where);
    }
    return MZ_OK;
}

static mz_code check_ports(const mz_topology *topology, const mz_exchange *exchange, int32_t m,
                           mz_err *err) {
    int32_t rank = exchange->rank[m];
    double inside = topology->inside_bytes_per_s[rank];
    double outside = topology->outside_bytes_per_s[rank];
    mz_code code = check_port(rank, exchange->send_inside[m], inside, "inside", err);
    if (code == MZ_OK) {
        code = check_port(rank, exchange->recv_inside[m], inside, "inside", err);
    }
    if (code == MZ_OK) {
        code = check_port(rank, exchange->send_outside[m], outside, "outside", err);
    }
    if (code == MZ_OK) {
        code = check_port(rank, exchange->recv_outside[m], outside, "outside", err);
    }
    return code;
}

static mz_code check_messages(const mz_exchange *exchange, mz_err *err) {
    const mz_message *before = NULL;
    int32_t from = 0, to = 0;
    for (int64_t i = 0; i < exchange->messages && exchange->message != NULL; i++) {
        const mz_message *message = &exchange->message[i];
        bool sorted = before == NULL || before->src < message->src ||
                      (before->src == message->src && before->dst < message->dst);
        from = mz_exchange_member(exchange, message->src, from);
        to = mz_exchange_member(exchange, message->dst, to + 1);
        if (!sorted || from < 0 || to < 0 || !isfinite(message->bytes) || message->bytes < 0) {
            return mz_fail(err, MZ_EINPUT,
                           "exchange: message %lld (%d to %d, %g bytes) is out of order, not "
                           "between members, or not a size",
                           (long long)i, (int)message->src, (int)message->dst, message->bytes);
        }
        before = message;
    }
    return MZ_OK;
}

mz_code mz_exchange_check(const mz_topology *topology, const mz_exchange *exchange, mz_err *err) {
    if (exchange->members < 1 || !isfinite(exchange->rounds) || exchange->rounds < 0) {
        return mz_fail(err, MZ_EINPUT, "exchange: %d members, %g rounds", (int)exchange->members,
                       exchange->rounds);
    }
    for (int32_t m = 0; m < exchange->members; m++) {
        int32_t rank = exchange->rank[m];
        if (rank < 0 || rank >= topology->ranks || (m > 0 && rank <= exchange->rank[m - 1])) {
            return mz_fail(err, MZ_EINPUT,
                           "exchange: member %d is rank %d; ranks must ascend below %d", (int)m,
                           (int)rank, (int)topology->ranks);
        }
        if (exchange->send_inside != NULL) {
            mz_code code = check_ports(topology, exchange, m, err);
            if (code != MZ_OK) {
                return code;
            }
        }
    }
    return check_messages(exchange, err);
}
