/* The routed experts of a model alone, at the sizes of a run: what `mizan replay` executes and
 * `mizan sim --scope layers` predicts. */
#ifndef MIZAN_SIM_MODEL_RESIZE_H
#define MIZAN_SIM_MODEL_RESIZE_H

#include "sim/model/model.h"

typedef struct mz_model_size {
    int64_t hidden, intermediate; /* of an expert; 0: the model's */
    int32_t layers;               /* the first so many MoE layers; 0: all */
} mz_model_size;

/* A model whose every layer is an MoE layer and whose only tensors are its experts', in bf16, as
 * the kernels have them: gate above up, [2I][H], and down, [H][I]. Experts are SwiGLU without
 * biases, whatever the model's are; a routed unit of several experts counts as one of the given
 * sizes. Name, experts and top-k stay. MZ_EINPUT: a size that is not positive or beyond what a
 * config may have, more layers than the model has. The result stands alone. */
mz_code mz_model_resize(const mz_model *model, const mz_model_size *size, mz_model **resized,
                        mz_err *err);

#endif
