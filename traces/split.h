/* Splitting counts at random. Private to this room. */
#ifndef MIZAN_TRACES_SPLIT_H
#define MIZAN_TRACES_SPLIT_H

#include "common/base/rng.h"

#include <stdint.h>

/* Successes among `draws` drawn without replacement from `total`, of which `good` are successes. */
int64_t mz_hypergeometric(mz_rng *rng, int64_t good, int64_t total, int64_t draws);

/* Moves `draws` pairs drawn without replacement from urn[0..n) (which holds `total`) to part[0..n),
 * adding to what is there: a multivariate hypergeometric draw. */
void mz_split_counts(mz_rng *rng, int64_t *urn, int32_t n, int64_t total, int64_t draws,
                     int64_t *part);

#endif
