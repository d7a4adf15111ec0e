/* One typed table of options: the parser, --help, the printed defaults and the options in brackets
 * of a policy ("lrmoe[keep=0.5,quota=ratio]") all walk it.
 *
 * Spellings: --name VALUE, --name=VALUE, -x VALUE; flags take no value; "--" ends options; a lone
 * "-" is a positional. Unknown names are MZ_EINPUT with the nearest known name as a suggestion.
 * Ownership: string values point into argv (or into the bracket text given). */
#ifndef MIZAN_BASE_OPT_H
#define MIZAN_BASE_OPT_H

#include "common/base/err.h"
#include "common/base/units.h"

#include <stdbool.h>

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef enum mz_opt_type {
    MZ_OPT_FLAG, /* bool */
    MZ_OPT_STR,  /* const char * */
    MZ_OPT_INT,  /* int64_t, within [low, high] */
    MZ_OPT_REAL, /* double, within [low, high]; `unit` applies */
    MZ_OPT_ENUM  /* int: index into choices "a|b|c" */
} mz_opt_type;

typedef struct mz_opt {
    const char *name; /* without dashes */
    char letter;      /* short form or 0 */
    mz_opt_type type;
    size_t offset;    /* of the field in the options struct */
    const char *dflt; /* default as text, parsed like a value; NULL: zero/NULL/false */
    const char *meta; /* name of the value in help: "FILE", "N"; for ENUM the choices "a|b|c" */
    const char *help; /* one line */
    double low, high; /* bounds for INT and REAL; both 0: unbounded below 2^53 */
    mz_unit unit;     /* for REAL */
} mz_opt;

typedef struct mz_opt_spec {
    const char *command;  /* "mizan sim" */
    const char *synopsis; /* "--trace FILE --model NAME ..." */
    const char *about;    /* one or two lines */
    const char *example;  /* shown by --help */
    const mz_opt *table;
    int count;
    int min_args, max_args; /* positionals; max_args < 0: any number */
} mz_opt_spec;

/* Fills every field of *dst with its default, then from argv[1..]; positionals are moved to the
 * front of argv[1..] in order and counted in *nargs. When --help is given prints help on `out`,
 * sets *help and returns MZ_OK. `seen` (may be NULL) gets one bool per table row: given by the
 * user. */
mz_code mz_opt_parse(const mz_opt_spec *spec, void *dst, int argc, char **argv, int *nargs,
                     bool *help, bool *seen, FILE *out, mz_err *err);

/* MZ_EINPUT "--NAME is missing: HINT" where the user gave no value (NULL). */
mz_code mz_opt_need(const char *value, const char *name, const char *hint, mz_err *err);

/* Defaults, then "key=value,key=value" (empty text: defaults only). A FLAG key stands alone or with
 * =yes|no, a key once. Values may not contain ',' or ']'. `text` is modified and must outlive the
 * strings. */
mz_code mz_opt_parse_list(const mz_opt *table, int count, const char *owner, char *text, void *dst,
                          mz_err *err);

/* "name[key=value,...]" in place: `text` keeps the name, *options points behind the bracket, ""
 * without one. `what` names the thing in messages: "policy". */
mz_code mz_opt_split_name(char *text, const char *what, char **options, mz_err *err);

void mz_opt_help(const mz_opt_spec *spec, FILE *out);

/* Nearest of `names` to `word` by edit distance, or NULL when none is near. */
const char *mz_nearest(const char *word, const char *const *names, int count);

/* Splits "a,b[c=1,d=2],./e.so" at commas outside brackets, in place. *parts (capacity max) point
 * into text. MZ_EINPUT on unbalanced brackets, empty parts or more than max parts. */
mz_code mz_split_list(char *text, char **parts, int max, int *count, mz_err *err);

/* Rows every command has; the options struct `type` holds `bool quiet, verbose`, which the command
 * hands to mz_log_choose (common/base/log.h). */
#define MZ_OPT_COMMON_ROWS(type)                                                                   \
    {"quiet", 'q', MZ_OPT_FLAG, offsetof(type, quiet), NULL, NULL, "warnings and errors only",     \
     0,       0,   MZ_UNIT_NONE},                                                                  \
    {                                                                                              \
        "verbose", 'v', MZ_OPT_FLAG, offsetof(type, verbose), NULL, NULL, "say more on the way",   \
            0, 0, MZ_UNIT_NONE                                                                     \
    }

#endif
