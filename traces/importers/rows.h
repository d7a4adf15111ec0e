/* Rows of binary dumps on their way into calls: values checked, physical ids folded, rows that are
 * no data left out and counted. */
#ifndef MIZAN_TRACES_IMPORTERS_ROWS_H
#define MIZAN_TRACES_IMPORTERS_ROWS_H

#include "traces/importers/gather.h"

/* Logical expert of every physical one, per recorded layer. */
typedef struct mz_physical_map {
    int64_t layers, slots;
    int32_t logical; /* experts: the largest id + 1 */
    int32_t *expert; /* [layers][slots] */
} mz_physical_map;

/* Checks `map` [layers][slots] as a file holds it and takes it over: every entry within [0, 65536),
 * every expert of a layer below the largest present. MZ_EINPUT names `what`. */
mz_code mz_physical_map_make(const char *path, const char *what, const int64_t *entries,
                             int64_t layers, int64_t slots, mz_physical_map *map, mz_err *err);
void mz_physical_map_free(mz_physical_map *map);

/* Counts `rows` that are left out for `reason`, which the note of the report then names. */
void mz_rows_skip(mz_import_report *report, int64_t rows, const char *reason);

/* Adds a row of facts->experts counts as one call. A row of zeros is what a dense layer leaves (or
 * a rank without tokens): left out and counted. MZ_EINPUT: a count that is negative or beyond 32
 * bits, or pairs that are no multiple of top-k (unless options->dropped). */
mz_code mz_rows_count(mz_gather *gather, const mz_gather_key *key, const int64_t *row,
                      const mz_import_options *options, mz_import_report *report, mz_err *err);

/* Adds tokens x top_k ids (rows `stride` elements apart) as one call; `map` (may be NULL) folds
 * them for layer `map_layer`. MZ_EINPUT: an id out of range or twice in one token. */
mz_code mz_rows_ids(mz_gather *gather, const mz_gather_key *key, const int64_t *ids, int64_t tokens,
                    int64_t stride, const mz_physical_map *map, int64_t map_layer, mz_err *err);

/* Ids of all layers of a model, [tokens][layers][top_k], where dense layers are rows of zeros. */
typedef struct mz_id_rows {
    int64_t layers, kept; /* recorded, and those that are not dense */
    int32_t top_k, experts;
    bool *dense; /* [layers] */
} mz_id_rows;

/* Finds the dense layers: those that are zero in the first token that is not zero everywhere, or
 * what --dense-layers says. With one expert per token zeros in all `count` tokens are ambiguous:
 * MZ_EINPUT that asks. */
mz_code mz_id_rows_make(const char *path, const int64_t *tokens, int64_t count, int64_t layers,
                        int32_t top_k, const mz_import_options *options, mz_id_rows *rows,
                        mz_err *err);
void mz_id_rows_free(mz_id_rows *rows);
/* Whether a token [layers][top_k] is zero in every layer. */
bool mz_rows_zero(const mz_id_rows *rows, const int64_t *token);
/* The first of `count` tokens that is not zero in every layer, `row` = layers x top_k; `count`:
 * there is none. */
int64_t mz_rows_first(const int64_t *tokens, int64_t count, int64_t row);
/* One token to expert[kept * top_k]; NULL, or what is wrong with the id at token[*at]. */
const char *mz_rows_take(const mz_id_rows *rows, const int64_t *token, uint16_t *expert,
                         int64_t *at);
/* A sequence of `count` tokens into the block; tokens that are zero in every layer are left out and
 * counted, a sequence of nothing else is none. MZ_EINPUT names [token, layer, place]. */
mz_code mz_rows_sequence(const mz_id_rows *rows, const int64_t *tokens, int64_t count,
                         mz_block *block, mz_trace_writer *writer, mz_import_report *report,
                         mz_err *err);

/* The rank in a name that ends in PREFIX{R}SUFFIX (prefix may be ""); -1: no such name. */
int64_t mz_rows_rank_of(const char *path, const char *prefix, const char *suffix);

#endif
