/* What the stand-in for NCCL was asked, and when it refuses. */
#ifndef MIZAN_TESTS_REPLAY_FAKE_NCCL_H
#define MIZAN_TESTS_REPLAY_FAKE_NCCL_H

#include <stdbool.h>
#include <stddef.h>

struct fake_nccl {
    int begun, ended; /* groups */
    int sent;         /* sends asked for */
    int fails_at;     /* the n-th send is refused; 0: none */
    bool group_fails; /* no group can be begun */
};

extern struct fake_nccl fake_nccl;

#endif
