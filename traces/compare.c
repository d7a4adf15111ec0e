#include "traces/compare.h"

#include "common/io/json.h"

#include <math.h>
#include <string.h>

int mz_stats_compare(const mz_trace_stats *a, const mz_trace_stats *b,
                     mz_stats_difference *differences) {
    int outside = 0;
    for (int m = 0; m < MZ_STATS_METRICS; m++) {
        const mz_stats_name *name = &mz_stats_names[m];
        mz_stats_difference *d = &differences[m];
        *d = (mz_stats_difference){.a = a->mean[m], .b = b->mean[m], .within = true};
        d->difference = d->b - d->a;
        d->compared = isfinite(d->a) && isfinite(d->b);
        if (!d->compared)
            continue;
        double scale = name->relative ? fmax(fabs(d->a), fabs(d->b)) : 1;
        d->within = fabs(d->difference) <= name->tolerance * scale;
        outside += !d->within;
    }
    return outside;
}

static void print_value(const mz_stats_name *name, double value, FILE *out) {
    if (!isfinite(value))
        fprintf(out, "%11s", "- ");
    else if (name->percent)
        fprintf(out, "%10.*f%%", name->digits, 100 * value);
    else
        fprintf(out, "%10.*f ", name->digits, value);
}

void mz_stats_compare_print(const mz_stats_difference *differences, FILE *out) {
    const char *group = "";
    int compared = 0, outside = 0;
    for (int m = 0; m < MZ_STATS_METRICS; m++) {
        const mz_stats_name *name = &mz_stats_names[m];
        const mz_stats_difference *d = &differences[m];
        if (!isfinite(d->a) && !isfinite(d->b))
            continue;
        if (strcmp(group, name->group) != 0)
            fprintf(out, "\n%-46s     first     second  difference\n", name->group);
        group = name->group;
        fprintf(out, "%c %-40s", !d->compared ? '-' : d->within ? ' ' : '*', name->label);
        print_value(name, d->a, out);
        print_value(name, d->b, out);
        print_value(name, d->difference, out);
        fputc('\n', out);
        compared += d->compared;
        outside += !d->within;
    }
    fprintf(out,
            "\n%d of %d statistics differ by more than their tolerance (*); - only one has it\n",
            outside, compared);
}

json_t *mz_stats_compare_json(const char *path_a, const char *path_b,
                              const mz_stats_difference *differences, int outside) {
    json_t *all = json_object();
    for (int m = 0; m < MZ_STATS_METRICS; m++) {
        const mz_stats_name *name = &mz_stats_names[m];
        const mz_stats_difference *d = &differences[m];
        json_object_set_new(all, name->key,
                            json_pack("{s:o, s:o, s:o, s:f, s:b, s:o}", "first",
                                      mz_json_number(d->a), "second", mz_json_number(d->b),
                                      "difference", mz_json_number(d->difference), "tolerance",
                                      name->tolerance, "relative", (int)name->relative, "within",
                                      d->compared ? json_boolean(d->within) : json_null()));
    }
    return json_pack("{s:s, s:o, s:o, s:i, s:o}", "schema", "mizan-trace-compare/1", "first",
                     mz_json_text(path_a), "second", mz_json_text(path_b), "outside", outside,
                     "statistics", all);
}
