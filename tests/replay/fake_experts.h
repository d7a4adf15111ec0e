/* What tests may ask the experts of fake_experts.c besides. */
#ifndef MIZAN_TESTS_REPLAY_FAKE_EXPERTS_H
#define MIZAN_TESTS_REPLAY_FAKE_EXPERTS_H

#include "replay/experts.h"

/* Gradient of an instance in the last backward of the layer, [3HI]: up, then down. */
const double *fake_instance_gradient(const mz_experts *experts, int32_t layer, int32_t instance);

#endif
