/* What checks of sampled results stand on (sampled*.c): memory of the device poisoned, run over and
 * copied back; values drawn and compared. A probe that failed does nothing more. */
#ifndef MIZAN_TESTS_GPU_SAMPLED_H
#define MIZAN_TESTS_GPU_SAMPLED_H

#include "tests/gpu/gpu.h"

enum { SAMPLES = 32, COLUMNS = 8 }; /* rows of a result, values of a row */

bool probe_going(const probe *p); /* nothing has failed yet, and no value is wrong */
uint64_t probe_bits(probe *p);
int64_t probe_below(probe *p, int64_t n); /* n > 0 */
/* Every byte 0xff: NaN, -1. */
void probe_poison(probe *p, void *memory, size_t bytes);
/* The operation once, and done. */
void probe_run(probe *p);
/* Copies on the host, freed with the probe; NULL: failed. `first` counts values. */
void *probe_bytes(probe *p, const void *memory, size_t offset, size_t bytes);
void *probe_room(probe *p, size_t bytes); /* zeros */
double *probe_values(probe *p, mz_dtype type, const void *memory, int64_t first, int64_t n);
int64_t *probe_integers(probe *p, const int64_t *memory, int64_t n);
/* Counts a value; notes the first that is not within `bound` of what is wanted (NaN never is). */
void probe_near(probe *p, const char *what, int64_t i, int64_t j, double got, double want,
                double bound);
void probe_same(probe *p, const char *what, int64_t i, int64_t got, int64_t want);
/* Frees the copies made since there were `copies` of them. */
void probe_forget(probe *p, int copies);
/* The expert of a row in expert order. */
int32_t probe_expert(const probe *p, int64_t row);
/* A sample's row: the first and the last, the first and last of an expert, or any. */
int64_t probe_row(probe *p, int sample, int64_t rows);
/* What a selection writes into the layer: poisoned; held against scores and quotas; as a flag of
 * every pair, once it was held. */
void poison_selection(probe *p);
void held_selection(probe *p, const float *scores);
const uint8_t *chosen_pairs(probe *p);

#endif
