/* Every exporter, for the table. */
#ifndef MIZAN_TRACES_EXPORTERS_TABLE_H
#define MIZAN_TRACES_EXPORTERS_TABLE_H

#include "traces/exporter.h"

extern const mz_exporter mz_export_npy;
extern const mz_exporter mz_export_megatron_jsonl;
extern const mz_exporter mz_export_sglang_json;
extern const mz_exporter mz_export_nccl_alltoallv;
extern const mz_exporter mz_export_smpi_ti;
extern const mz_exporter mz_export_perfetto;

#endif
