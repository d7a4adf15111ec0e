/* A row of the tensor list as the checkpoint's tensors. */
#include "sim/model/model.h"

#include <stdio.h>
#include <string.h>

int64_t mz_tensor_parts(const mz_tensor *tensor) {
    return tensor->stacked ? 1 : tensor->count;
}

int mz_tensor_shape(const mz_tensor *tensor, int64_t shape[3]) {
    int dimensions = 0;
    if (tensor->stacked)
        shape[dimensions++] = tensor->count;
    shape[dimensions++] = tensor->rows;
    if (!tensor->vector)
        shape[dimensions++] = tensor->cols;
    return dimensions;
}

const char *mz_tensor_dtype(const mz_model *model, const mz_tensor *tensor) {
    return tensor->bytes_per_value >= 4 ? "float32" : model->dtype;
}

const char *mz_tensor_name(const mz_tensor *tensor, int64_t i, char *buffer, size_t size) {
    const char *star = strchr(tensor->name, '*');
    if (star)
        snprintf(buffer, size, "%.*s%lld%s", (int)(star - tensor->name), tensor->name, (long long)i,
                 star + 1);
    else
        snprintf(buffer, size, "%s", tensor->name);
    return buffer;
}
