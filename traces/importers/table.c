#include "traces/importers/table.h"

#include <stddef.h>

/* One line each: */
/* clang-format off */
const mz_importer *const mz_importers[] = {
    &mz_import_smartmoe_log,
    &mz_import_smartmoe_npy,
    &mz_import_npy_ids,
    &mz_import_gpt_oss_json,
    &mz_import_laer_csv,
    &mz_import_megatron_router,
    &mz_import_megatron_tpe,
    &mz_import_sglang_json,
    &mz_import_nf4_jsonl,
    &mz_import_vllm_logger,
    &mz_import_speculative_jsonl,
    &mz_import_moe_balance,
    &mz_import_routed_json,
    &mz_import_esft_text,
    &mz_import_counts_csv,
    &mz_import_trt_safetensors,
    &mz_import_sglang_stat,
    &mz_import_sglang_records,
                                           &mz_import_slime_pt,
                                           &mz_import_verl_pt, &mz_import_imatrix_gguf, &mz_import_hrtr, &mz_import_router_logits, &mz_import_moe_infinity, &mz_import_ultraep,
    NULL};
/* clang-format on */
