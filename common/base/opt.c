#include "common/base/opt.h"

#include <ctype.h>
#include <string.h>
#include <strings.h>

#include <stdlib.h>

enum { WORD_MAX = 64, HELP_COLUMN = 26, HELP_WIDTH = 96 };

static const double INT_LIMIT = 9007199254740992.0; /* 2^53: bounds are doubles */

/* ---- nearest name -----------------------------------------------------------------------------
 */

/* Edits (insert, delete, replace, swap of neighbours) between two words below WORD_MAX letters. */
static int edit_distance(const char *a, const char *b) {
    int rows[3][WORD_MAX + 1];
    int na = (int)strlen(a), nb = (int)strlen(b);
    for (int j = 0; j <= nb; j++)
        rows[0][j] = j;
    for (int i = 1; i <= na; i++) {
        int *now = rows[i % 3], *last = rows[(i + 2) % 3], *before = rows[(i + 1) % 3];
        now[0] = i;
        for (int j = 1; j <= nb; j++) {
            bool same = tolower((unsigned char)a[i - 1]) == tolower((unsigned char)b[j - 1]);
            int best = last[j - 1] + !same;
            best = last[j] + 1 < best ? last[j] + 1 : best;
            best = now[j - 1] + 1 < best ? now[j - 1] + 1 : best;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                before[j - 2] + 1 < best)
                best = before[j - 2] + 1;
            now[j] = best;
        }
    }
    return rows[na % 3][nb];
}

/* "h100" means "h100-80gb", although "h200" is nearer by edits: the shortest name that goes on from
 * the word, or NULL. */
static const char *continued(const char *word, size_t length, const char *const *names, int count) {
    const char *found = NULL;
    for (int i = 0; i < count; i++)
        if (strncasecmp(word, names[i], length) == 0 &&
            (!found || strlen(names[i]) < strlen(found)))
            found = names[i];
    return found;
}

const char *mz_nearest(const char *word, const char *const *names, int count) {
    size_t length = strlen(word);
    if (length <= 2 || length >= WORD_MAX) /* every two-letter word is one edit from many */
        return NULL;
    const char *found = continued(word, length, names, count);
    if (found)
        return found;
    int best = 1 + (int)length / 4;
    best = best > 3 ? 3 : best;
    best++;
    for (int i = 0; i < count; i++) {
        if (strlen(names[i]) >= WORD_MAX)
            continue;
        int distance = edit_distance(word, names[i]);
        if (distance < best && distance < (int)length) {
            best = distance;
            found = names[i];
        }
    }
    return found;
}

static const char *nearest_row(const mz_opt *table, int count, const char *word) {
    const char *found = NULL;
    for (int i = 0; i < count; i++) {
        const char *pair[2] = {found ? found : table[i].name, table[i].name};
        const char *better = mz_nearest(word, pair, 2);
        found = better ? better : found;
    }
    return found;
}

/* ---- values -----------------------------------------------------------------------------------
 */

static mz_code set_enum(const mz_opt *row, const char *text, const char *what, int *value,
                        mz_err *err) {
    size_t length = strlen(text);
    const char *choice = row->meta;
    for (int index = 0; choice; index++) {
        const char *bar = strchr(choice, '|');
        size_t n = bar ? (size_t)(bar - choice) : strlen(choice);
        if (n == length && memcmp(choice, text, n) == 0) {
            *value = index;
            return MZ_OK;
        }
        choice = bar ? bar + 1 : NULL;
    }
    return mz_fail(err, MZ_EINPUT, "%s: '%s' is not one of %s", what, text, row->meta);
}

static mz_code set_real(const mz_opt *row, const char *text, const char *what, double *value,
                        mz_err *err) {
    bool negative = row->low < 0 && text[0] == '-';
    double number;
    mz_code code = mz_unit_parse(text + negative, row->unit, what, &number, err);
    if (code)
        return code;
    number = negative ? -number : number;
    if ((row->low != 0 || row->high != 0) && (number < row->low || number > row->high))
        return mz_fail(err, MZ_EINPUT, "%s: %s is outside [%g, %g]", what, text, row->low,
                       row->high);
    *value = number;
    return MZ_OK;
}

static mz_code set_flag(const char *text, const char *what, bool *value, mz_err *err) {
    if (strcmp(text, "yes") != 0 && strcmp(text, "no") != 0)
        return mz_fail(err, MZ_EINPUT, "%s: '%s' is not yes or no", what, text);
    *value = strcmp(text, "yes") == 0;
    return MZ_OK;
}

static mz_code set_value(const mz_opt *row, const char *text, const char *what, void *dst,
                         mz_err *err) {
    void *field = (char *)dst + row->offset;
    switch (row->type) {
    case MZ_OPT_FLAG:
        return set_flag(text, what, field, err);
    case MZ_OPT_STR:
        *(const char **)field = text;
        return MZ_OK;
    case MZ_OPT_INT: {
        bool bounded = row->low != 0 || row->high != 0;
        double low = bounded ? row->low : -INT_LIMIT, high = bounded ? row->high : INT_LIMIT;
        return mz_int_parse(text, what, (int64_t)low, (int64_t)high, field, err);
    }
    case MZ_OPT_REAL:
        return set_real(row, text, what, field, err);
    case MZ_OPT_ENUM:
        return set_enum(row, text, what, field, err);
    }
    return mz_fail(err, MZ_EINTERNAL, "%s: option of unknown type %d", what, (int)row->type);
}

static void clear_value(const mz_opt *row, void *dst) {
    static const size_t size[] = {[MZ_OPT_FLAG] = sizeof(bool),
                                  [MZ_OPT_STR] = sizeof(const char *),
                                  [MZ_OPT_INT] = sizeof(int64_t),
                                  [MZ_OPT_REAL] = sizeof(double),
                                  [MZ_OPT_ENUM] = sizeof(int)};
    memset((char *)dst + row->offset, 0, size[row->type]);
}

static mz_code set_defaults(const mz_opt *table, int count, const char *owner, void *dst,
                            mz_err *err) {
    for (int i = 0; i < count; i++) {
        clear_value(&table[i], dst);
        if (table[i].dflt && set_value(&table[i], table[i].dflt, table[i].name, dst, err)) {
            err->code = MZ_EINTERNAL;
            return mz_err_prefix(err, "%s: default of option %s", owner, table[i].name);
        }
    }
    return MZ_OK;
}

/* ---- command line -----------------------------------------------------------------------------
 */

static const mz_opt *find_row(const mz_opt *table, int count, const char *name, size_t length) {
    for (int i = 0; i < count; i++)
        if (strlen(table[i].name) == length && memcmp(table[i].name, name, length) == 0)
            return &table[i];
    return NULL;
}

static const mz_opt *find_letter(const mz_opt *table, int count, char letter) {
    for (int i = 0; i < count; i++)
        if (table[i].letter && table[i].letter == letter)
            return &table[i];
    return NULL;
}

static bool asks_help(int argc, char **argv) {
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
            return true;
    return false;
}

static mz_code unknown_option(const mz_opt_spec *spec, const char *arg, mz_err *err) {
    char word[WORD_MAX];
    const char *bare = arg + strspn(arg, "-");
    snprintf(word, sizeof word, "%.*s", (int)strcspn(bare, "="), bare);
    const char *near = nearest_row(spec->table, spec->count, word);
    if (near)
        return mz_fail(err, MZ_EINPUT, "unknown option '%s'; did you mean --%s?", arg, near);
    return mz_fail(err, MZ_EINPUT, "unknown option '%s'; '%s --help' lists the options", arg,
                   spec->command);
}

/* "-1" and "-" may be values; "--trace" after "--model" is a forgotten value. */
static bool looks_like_option(const char *arg) {
    return arg[0] == '-' && arg[1] && !isdigit((unsigned char)arg[1]) && arg[1] != '.';
}

/* One option at argv[*at]; moves *at over a value taken from the next argument. */
static mz_code parse_option(const mz_opt_spec *spec, void *dst, int argc, char **argv, int *at,
                            bool *seen, mz_err *err) {
    char *arg = argv[*at];
    const mz_opt *row;
    const char *value = NULL;
    if (arg[1] == '-') {
        size_t length = strcspn(arg + 2, "=");
        row = find_row(spec->table, spec->count, arg + 2, length);
        value = arg[2 + length] == '=' ? arg + 2 + length + 1 : NULL;
    } else {
        row = arg[2] ? NULL : find_letter(spec->table, spec->count, arg[1]);
    }
    if (!row)
        return unknown_option(spec, arg, err);
    if (seen)
        seen[row - spec->table] = true;
    char what[WORD_MAX + 8];
    snprintf(what, sizeof what, "--%s", row->name);
    if (row->type == MZ_OPT_FLAG) {
        if (value)
            return mz_fail(err, MZ_EINPUT, "%s takes no value", what);
        *(bool *)((char *)dst + row->offset) = true;
        return MZ_OK;
    }
    if (!value) {
        if (*at + 1 >= argc || looks_like_option(argv[*at + 1]))
            return mz_fail(err, MZ_EINPUT, "%s needs a value: %s", what,
                           row->meta ? row->meta : "VALUE");
        value = argv[++*at];
    }
    return set_value(row, value, what, dst, err);
}

static mz_code check_positionals(const mz_opt_spec *spec, char **argv, int nargs, mz_err *err) {
    if (nargs < spec->min_args)
        return mz_fail(err, MZ_EINPUT, "missing argument; usage: %s %s", spec->command,
                       spec->synopsis);
    if (spec->max_args >= 0 && nargs > spec->max_args)
        return mz_fail(err, MZ_EINPUT, "unexpected argument '%s'; usage: %s %s",
                       argv[spec->max_args + 1], spec->command, spec->synopsis);
    return MZ_OK;
}

mz_code mz_opt_parse(const mz_opt_spec *spec, void *dst, int argc, char **argv, int *nargs,
                     bool *help, bool *seen, FILE *out, mz_err *err) {
    *nargs = 0;
    *help = false;
    if (seen)
        memset(seen, 0, sizeof *seen * (size_t)spec->count);
    mz_code code = set_defaults(spec->table, spec->count, spec->command, dst, err);
    if (code)
        return code;
    if (asks_help(argc, argv)) {
        *help = true;
        mz_opt_help(spec, out);
        return MZ_OK;
    }
    bool options = true;
    for (int i = 1; i < argc; i++) {
        if (options && strcmp(argv[i], "--") == 0) {
            options = false;
        } else if (options && argv[i][0] == '-' && argv[i][1]) {
            code = parse_option(spec, dst, argc, argv, &i, seen, err);
            if (code)
                return code;
        } else {
            argv[1 + (*nargs)++] = argv[i];
        }
    }
    return check_positionals(spec, argv, *nargs, err);
}

/* ---- options in brackets ----------------------------------------------------------------------
 */

static mz_code unknown_key(const mz_opt *table, int count, const char *owner, const char *key,
                           mz_err *err) {
    const char *near = nearest_row(table, count, key);
    if (near)
        return mz_fail(err, MZ_EINPUT, "%s: unknown option '%s'; did you mean '%s'?", owner, key,
                       near);
    char known[400] = "";
    for (int i = 0, n = 0; i < count && n < (int)sizeof known; i++)
        n += snprintf(known + n, sizeof known - (size_t)n, "%s%s", i ? ", " : "", table[i].name);
    return mz_fail(err, MZ_EINPUT, "%s: unknown option '%s'; it has %s", owner, key,
                   count ? known : "none");
}

static char *trim(char *text) {
    while (isspace((unsigned char)*text))
        text++;
    size_t n = strlen(text);
    while (n && isspace((unsigned char)text[n - 1]))
        text[--n] = 0;
    return text;
}

enum { LIST_ROWS = 64 };

/* given: a bit for each row of the table that the list had so far. */
static mz_code parse_pair(const mz_opt *table, int count, const char *owner, char *pair, void *dst,
                          uint64_t *given, mz_err *err) {
    char *value = strchr(pair, '=');
    if (value)
        *value++ = 0;
    char *key = trim(pair);
    const mz_opt *row = find_row(table, count, key, strlen(key));
    if (!row)
        return unknown_key(table, count, owner, key, err);
    if (!value && row->type != MZ_OPT_FLAG)
        return mz_fail(err, MZ_EINPUT, "%s: option '%s' needs a value: %s=%s", owner, key, key,
                       row->meta ? row->meta : "VALUE");
    const uint64_t bit = UINT64_C(1) << (row - table);
    if (*given & bit)
        return mz_fail(err, MZ_EINPUT, "%s: option '%s' is given twice", owner, key);
    *given |= bit;
    char what[WORD_MAX + 256];
    snprintf(what, sizeof what, "%s: %s", owner, key);
    return set_value(row, value ? trim(value) : "yes", what, dst, err);
}

mz_code mz_opt_parse_list(const mz_opt *table, int count, const char *owner, char *text, void *dst,
                          mz_err *err) {
    uint64_t given = 0;
    if (count > LIST_ROWS)
        return mz_fail(err, MZ_EINTERNAL, "%s has more than %d options", owner, LIST_ROWS);
    mz_code code = set_defaults(table, count, owner, dst, err);
    while (!code && *text) {
        char *comma = strchr(text, ',');
        if (comma)
            *comma = 0;
        code = parse_pair(table, count, owner, text, dst, &given, err);
        if (!code && comma && !comma[1])
            code = mz_fail(err, MZ_EINPUT, "%s: option list ends with a comma", owner);
        text = comma ? comma + 1 : text + strlen(text);
    }
    return code;
}

mz_code mz_opt_split_name(char *text, const char *what, char **options, mz_err *err) {
    char *open = strchr(text, '[');
    size_t length = strlen(text);
    *options = text + length;
    if (!open && strchr(text, ']'))
        return mz_fail(err, MZ_EINPUT, "%s \"%s\": ']' without '['", what, text);
    if (!open)
        return MZ_OK;
    if (text[length - 1] != ']')
        return mz_fail(err, MZ_EINPUT, "%s \"%s\": write options as name[key=value,...]", what,
                       text);
    text[length - 1] = 0;
    *open = 0;
    *options = open + 1;
    return MZ_OK;
}

mz_code mz_opt_need(const char *value, const char *name, const char *hint, mz_err *err) {
    return value ? MZ_OK : mz_fail(err, MZ_EINPUT, "--%s is missing: %s", name, hint);
}

mz_code mz_split_list(char *text, char **parts, int max, int *count, mz_err *err) {
    int depth = 0;
    char *start = text;
    *count = 0;
    for (char *p = text;; p++) {
        char c = *p;
        depth += (c == '[') - (c == ']');
        if (depth < 0 || depth > 1 || (c == 0 && depth))
            return mz_fail(err, MZ_EINPUT, "unbalanced brackets in '%s'", start);
        if (c && (c != ',' || depth))
            continue;
        *p = 0;
        char *part = trim(start);
        if (!*part)
            return mz_fail(err, MZ_EINPUT, "empty item %d in a list", *count + 1);
        if (*count >= max)
            return mz_fail(err, MZ_EINPUT, "a list has more than %d items", max);
        parts[(*count)++] = part;
        if (!c)
            return MZ_OK;
        start = p + 1;
    }
}

/* ---- help -------------------------------------------------------------------------------------
 */

/* Prints words from column `column` on, broken before HELP_WIDTH. */
static void print_wrapped(const char *text, int column, FILE *out) {
    int at = column;
    while (*text) {
        int n = (int)strcspn(text, " ");
        if (at > column && at + n > HELP_WIDTH) {
            fprintf(out, "\n%*s", column, "");
            at = column;
        }
        fprintf(out, "%.*s", n, text);
        at += n;
        text += n;
        if (*text == ' ') {
            fputc(' ', out);
            at++;
            text++;
        }
    }
    fputc('\n', out);
}

/* Choices that fill more than a line are broken behind a '|'. */
static void print_left(const char *left, FILE *out) {
    enum { INDENT = 10 };
    while (strlen(left) > HELP_WIDTH) {
        int n = HELP_WIDTH;
        while (n > 0 && left[n - 1] != '|')
            n--;
        if (n == 0)
            break;
        fprintf(out, "%.*s\n%*s", n, left, INDENT, "");
        left += n;
    }
    fprintf(out, "%s\n%*s", left, HELP_COLUMN, "");
}

static void print_row(const mz_opt *row, FILE *out) {
    char left[160], right[1024];
    int n = row->letter ? snprintf(left, sizeof left, "  -%c, --%s", row->letter, row->name)
                        : snprintf(left, sizeof left, "      --%s", row->name);
    if (row->type != MZ_OPT_FLAG && n < (int)sizeof left)
        n += snprintf(left + n, sizeof left - (size_t)n, " %s", row->meta ? row->meta : "VALUE");
    if (row->dflt && *row->dflt)
        snprintf(right, sizeof right, "%s (default: %s)", row->help, row->dflt);
    else
        snprintf(right, sizeof right, "%s", row->help);
    if (n + 2 > HELP_COLUMN)
        print_left(left, out);
    else
        fprintf(out, "%-*s", HELP_COLUMN, left);
    print_wrapped(right, HELP_COLUMN, out);
}

void mz_opt_help(const mz_opt_spec *spec, FILE *out) {
    fprintf(out, "usage: %s %s\n\n%s\n\noptions:\n", spec->command, spec->synopsis, spec->about);
    for (int i = 0; i < spec->count; i++)
        print_row(&spec->table[i], out);
    static const mz_opt help = {.name = "help", .letter = 'h', .help = "show this text"};
    print_row(&help, out);
    if (spec->example)
        fprintf(out, "\nexample:\n  %s\n", spec->example);
}
