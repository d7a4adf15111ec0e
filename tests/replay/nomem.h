/* The program's own allocations, counted, one of which fails: for tests that are linked with
 * --wrap (meson.build). Libraries keep theirs unless they are given malloc's name by the test. */
#ifndef MIZAN_TESTS_REPLAY_NOMEM_H
#define MIZAN_TESTS_REPLAY_NOMEM_H

#include <stdbool.h>

/* From here on the at-th allocation fails (0: none), and with for_good all that follow it. */
void nomem_start(long long at, bool for_good);
/* No allocation fails from here on. Allocations since the start. */
long long nomem_end(void);
long long nomem_refused(void); /* how many of these failed */
long long nomem_buffers(void); /* how many of those that failed were memory of kernels */
/* Counts an allocation of a library's as one of the program's own: whether it is to fail. */
bool nomem_refuses(void);

#endif
