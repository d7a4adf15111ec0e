#include "traces/exporters/table.h"

#include <stddef.h>

const mz_exporter *const mz_exporters[] = {&mz_export_npy,
                                           &mz_export_megatron_jsonl,
                                           &mz_export_sglang_json,
                                           &mz_export_nccl_alltoallv,
                                           &mz_export_smpi_ti,
                                           &mz_export_perfetto,
                                           NULL};
