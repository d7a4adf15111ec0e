/* A check as one page that opens offline: bars, heat maps and a scatter as inline SVG, and the
 * numbers behind each in a table. */
#include "analysis/check.h"

#include <math.h>
#include <string.h>

static const char style[] =
    "body{font:15px/1.45 sans-serif;margin:2em auto;max-width:1080px;color:#222;padding:0 1em}"
    "h1{font-size:1.5em}h2{font-size:1.2em;margin-top:2em}"
    "table{border-collapse:collapse;font-size:13px;margin:.6em 0}"
    "td,th{border-bottom:1px solid #ddd;padding:2px 9px;text-align:right}"
    "td:first-child,th:first-child{text-align:left}"
    ".pass{color:#176b37}.fail{color:#b3261e;font-weight:bold}"
    "details{margin:.4em 0}svg{display:block;max-width:100%;height:auto}"
    "text{font:11px sans-serif;fill:#333}";

static void escape(const char *text, FILE *out) {
    for (; *text; text++) {
        const char *named = *text == '&'   ? "&amp;"
                            : *text == '<' ? "&lt;"
                            : *text == '>' ? "&gt;"
                            : *text == '"' ? "&quot;"
                                           : NULL;
        if (named)
            fputs(named, out);
        else
            fputc(*text, out);
    }
}

static void percent_cell(double value, FILE *out) {
    if (isfinite(value))
        fprintf(out, "<td>%+.2f</td>", value * 100);
    else
        fputs("<td>-</td>", out);
}

static void interval_cells(check_interval i, FILE *out) {
    if (isfinite(i.low))
        fprintf(out, "<td>%.5g</td><td>%.5g</td>", i.low * 1e3, i.high * 1e3);
    else
        fputs("<td>-</td><td>-</td>", out);
}

static void value_cells(const check_value *v, double unit, FILE *out) {
    fprintf(out, "<td>%.5g</td><td>%.5g</td>", v->predicted * unit, v->measured * unit);
    percent_cell(v->error, out);
}

/* ---- targets, steps ----------------------------------------------------------------------------
 */

static void verdict(const check_result *r, FILE *out) {
    fprintf(out, "<p class=\"%s\">", r->passed ? "pass" : "fail");
    escape(r->verdict, out);
    fputs("</p><table><tr><th>target</th><th>found</th><th></th></tr>", out);
    for (int i = 0; i < r->targets; i++) {
        const check_target *t = &r->target[i];
        fputs("<tr><td>", out);
        escape(t->what, out);
        fputs("</td><td>", out);
        escape(t->found, out);
        fprintf(out, "</td><td class=\"%s\">%s</td></tr>", t->passed ? "pass" : "fail",
                t->passed ? "pass" : "fail");
    }
    fputs("</table>", out);
    check_extrapolated(r, "<p>", "</p>", escape, out);
    check_speed(r, "<p>", "</p>", out);
}

/* In brackets what decides nothing. */
static void noise_cell(const check_result *r, const check_policy *p, FILE *out) {
    if (check_beside(r, p))
        fprintf(out,
                "<td title=\"halves of its records: two runs of a policy decide\">(%+.2f)</td>",
                p->noise * 100);
    else
        percent_cell(p->noise, out);
}

static void steps_table(const check_result *r, FILE *out) {
    fputs("<table><tr><th>policy</th><th>predicted, ms</th><th>measured, ms</th><th>error, %</th>"
          "<th>at calibrated speed, %</th><th>95 % from</th><th>to, ms</th><th>noise, "
          "%</th><th>steps</th>"
          "<th>peak predicted, MiB</th><th>measured, MiB</th><th>error, %</th></tr>",
          out);
    for (int i = 0; i < r->policies; i++) {
        const check_policy *p = &r->policy[i];
        fputs("<tr><td>", out);
        escape(p->name, out);
        fputs("</td>", out);
        value_cells(&p->step, 1e3, out);
        percent_cell(check_probed(r) ? p->at_speed : NAN, out);
        interval_cells(p->interval, out);
        noise_cell(r, p, out);
        fprintf(out, "<td>%lld</td>", (long long)p->records);
        value_cells(&p->peak, 1 / 1048576.0, out);
        fputs("</tr>", out);
    }
    fputs("</table>", out);
}

/* Every record of every policy: measured over predicted. */
static void scatter(const check_result *r, FILE *out) {
    enum { WIDTH = 1000, ROW = 26, LEFT = 270 };
    double most = 0.06;
    for (int i = 0; i < r->policies; i++)
        for (int64_t k = 0; k < r->policy[i].records; k++)
            most = fmax(most, fabs(r->policy[i].ratio[k] - 1));
    const double middle = LEFT + (WIDTH - LEFT) / 2.0, scale = (WIDTH - LEFT) / 2.1 / most;
    const int height = ROW * (r->policies + 1);
    fprintf(out, "<svg viewBox=\"0 0 %d %d\" role=\"img\"><title>steps</title>", WIDTH, height);
    fprintf(out, "<rect x=\"%.1f\" y=\"0\" width=\"%.1f\" height=\"%d\" fill=\"#e6f2ea\"/>",
            middle - CHECK_WORST * scale, 2 * CHECK_WORST * scale, height - ROW);
    fprintf(out, "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"0\" y2=\"%d\" stroke=\"#666\"/>", middle,
            middle, height - ROW);
    for (int i = 0; i < r->policies; i++) {
        const check_policy *p = &r->policy[i];
        const double y = ROW * (i + 0.5);
        fprintf(out, "<text x=\"4\" y=\"%.1f\">", y + 4);
        escape(p->name, out);
        fputs("</text>", out);
        for (int64_t k = 0; k < p->records; k++)
            fprintf(out,
                    "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"2.6\" fill=\"#1f5fa8\" "
                    "fill-opacity=\"0.5\"/>",
                    middle + (p->ratio[k] - 1) * scale, y);
    }
    fprintf(out,
            "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">measured over predicted, less 1; "
            "green: within 5 %%; edge: %.1f %%</text></svg>",
            middle, height - 8, most * 105);
}

static void scatter_table(const check_result *r, FILE *out) {
    fputs("<details><summary>numbers</summary><table><tr><th>policy</th><th>measured over "
          "predicted, in order of steps</th></tr>",
          out);
    for (int i = 0; i < r->policies; i++) {
        fputs("<tr><td>", out);
        escape(r->policy[i].name, out);
        fputs("</td><td>", out);
        for (int64_t k = 0; k < r->policy[i].records; k++)
            fprintf(out, "%s%.4f", k ? ", " : "", r->policy[i].ratio[k]);
        fputs("</td></tr>", out);
    }
    fputs("</table></details>", out);
}

/* ---- phases ------------------------------------------------------------------------------------
 */

static bool shown(const check_policy *p, int phase) {
    return p->phase[phase].predicted > 0 || p->phase[phase].measured > 0;
}

static void phase_bars(const check_policy *p, FILE *out) {
    enum { WIDTH = 1000, ROW = 30, LEFT = 170 };
    double most = 0;
    int rows = 0;
    for (int k = 0; k < MZ_PHASES; k++) {
        most = fmax(most, fmax(p->phase[k].predicted, p->phase[k].measured));
        rows += shown(p, k);
    }
    fprintf(out, "<svg viewBox=\"0 0 %d %d\" role=\"img\"><title>phases</title>", WIDTH,
            ROW * (rows > 0 ? rows : 1));
    for (int k = 0, row = 0; k < MZ_PHASES; k++) {
        if (!shown(p, k))
            continue;
        const double scale = (WIDTH - LEFT - 90) / most, y = ROW * row++;
        fprintf(out, "<text x=\"4\" y=\"%.1f\">%s</text>", y + 18, mz_phase_name((mz_phase)k));
        fprintf(out,
                "<rect x=\"%d\" y=\"%.1f\" width=\"%.1f\" height=\"10\" fill=\"#1f5fa8\"/>"
                "<rect x=\"%d\" y=\"%.1f\" width=\"%.1f\" height=\"10\" fill=\"#e08a2e\"/>",
                LEFT, y + 3, p->phase[k].predicted * scale, LEFT, y + 14,
                p->phase[k].measured * scale);
        if (isfinite(p->phase[k].error))
            fprintf(out, "<text x=\"%.1f\" y=\"%.1f\">%+.1f %%</text>",
                    LEFT + 6 + fmax(p->phase[k].predicted, p->phase[k].measured) * scale, y + 18,
                    p->phase[k].error * 100);
    }
    fputs("</svg>", out);
}

static void phase_table(const check_result *r, const check_policy *p, FILE *out) {
    fputs("<details><summary>numbers</summary><table><tr><th>phase</th><th>predicted, ms</th>"
          "<th>measured, ms</th><th>error, %</th><th>at calibrated speed, %</th>"
          "<th>95 % from</th><th>to, ms</th><th>share, %</th><th></th></tr>",
          out);
    for (int k = 0; k < MZ_PHASES; k++) {
        if (!shown(p, k))
            continue;
        fprintf(out, "<tr><td>%s</td>", mz_phase_name((mz_phase)k));
        value_cells(&p->phase[k], 1e3, out);
        percent_cell(check_probed(r) ? p->phase_at_speed[k] : NAN, out);
        interval_cells(p->phase_interval[k], out);
        fprintf(out, "<td>%.1f</td><td>%s</td></tr>", p->share[k] * 100,
                check_unproven(r, (mz_phase)k) ? "extrapolated" : "validated");
    }
    fputs("</table>", out);
    check_reasons(r, "<p>", "</p>", escape, out);
    fputs("</details>", out);
}

/* ---- layers and ranks --------------------------------------------------------------------------
 */

/* Blue where too little was predicted, red where too much; full colour from 10 % on. */
static void heat_colour(double error, char text[8]) {
    const double x = isfinite(error) ? fmax(-1, fmin(1, error / CHECK_PHASE)) : 0;
    const int weak = (int)lround(255 - 175 * fabs(x));
    snprintf(text, 8, "#%02x%02x%02x", x < 0 ? weak : 255 - (int)lround(40 * x), weak,
             x < 0 ? 255 + (int)lround(40 * x) : weak);
}

static void heat_map(const check_policy *p, FILE *out) {
    enum { CELL = 26, LEFT = 90, TOP = 20 };
    fprintf(out,
            "<svg viewBox=\"0 0 %d %d\" style=\"width:%dpx\" role=\"img\"><title>layers and "
            "ranks</title>",
            LEFT + CELL * p->ranks, TOP + CELL * p->layers, LEFT + CELL * p->ranks);
    for (int32_t k = 0; k < p->ranks; k++)
        fprintf(out, "<text x=\"%d\" y=\"13\" text-anchor=\"middle\">%d</text>",
                LEFT + CELL * k + CELL / 2, (int)k);
    for (int32_t l = 0; l < p->layers; l++) {
        if (l + 1 < p->layers)
            fprintf(out, "<text x=\"4\" y=\"%d\">layer %d</text>", TOP + CELL * l + 17, (int)l);
        else
            fprintf(out, "<text x=\"4\" y=\"%d\">whole step</text>", TOP + CELL * l + 17);
        for (int32_t k = 0; k < p->ranks; k++) {
            char colour[8];
            const check_value *v = &p->cell[(int64_t)l * p->ranks + k];
            heat_colour(v->error, colour);
            fprintf(out,
                    "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"%s\"><title>%+.1f "
                    "%%</title></rect>",
                    LEFT + CELL * k, TOP + CELL * l, CELL - 1, CELL - 1, colour,
                    isfinite(v->error) ? v->error * 100 : 0);
        }
    }
    fputs("</svg>", out);
}

static void heat_table(const check_policy *p, FILE *out) {
    fputs("<details><summary>numbers: error of busy time, %</summary><table><tr><th></th>", out);
    for (int32_t k = 0; k < p->ranks; k++)
        fprintf(out, "<th>rank %d</th>", (int)k);
    fputs("<th>all</th></tr>", out);
    for (int32_t l = 0; l < p->layers; l++) {
        if (l + 1 < p->layers)
            fprintf(out, "<tr><td>layer %d</td>", (int)l);
        else
            fputs("<tr><td>whole step</td>", out);
        for (int32_t k = 0; k < p->ranks; k++)
            percent_cell(p->cell[(int64_t)l * p->ranks + k].error, out);
        percent_cell(p->layer[l].error, out);
        fputs("</tr>", out);
    }
    fputs("<tr><td>all</td>", out);
    for (int32_t k = 0; k < p->ranks; k++)
        percent_cell(p->rank[k].error, out);
    percent_cell(p->step.error, out);
    fputs("</tr></table></details>", out);
}

static void place_row(const char *name, const check_value *v, check_interval i, FILE *out) {
    fprintf(out, "<tr><td>%s</td>", name);
    value_cells(v, 1e3, out);
    interval_cells(i, out);
    fputs("</tr>", out);
}

static void places_table(const check_policy *p, FILE *out) {
    char name[32];
    fputs("<details><summary>numbers: busy time of layers and of ranks</summary><table><tr>"
          "<th></th><th>predicted, ms</th><th>measured, ms</th><th>error, %</th>"
          "<th>95 % from</th><th>to, ms</th></tr>",
          out);
    for (int32_t l = 0; l < p->layers; l++) {
        snprintf(name, sizeof name, "layer %d", (int)l);
        place_row(l + 1 < p->layers ? name : "whole step", &p->layer[l], p->layer_interval[l], out);
    }
    for (int32_t k = 0; k < p->ranks; k++) {
        snprintf(name, sizeof name, "rank %d", (int)k);
        place_row(name, &p->rank[k], p->rank_interval[k], out);
    }
    fputs("</table></details>", out);
}

static void memory_table(const check_policy *p, FILE *out) {
    fputs("<details><summary>memory by category</summary><table><tr><th>most on any rank</th>"
          "<th>predicted, MiB</th><th>measured, MiB</th><th>error, %</th></tr>",
          out);
    for (int c = 0; c < MZ_MEM_CATEGORIES; c++) {
        fprintf(out, "<tr><td>%s</td>", mz_memcat_name((mz_memcat)c));
        value_cells(&p->memory[c], 1 / 1048576.0, out);
        fputs("</tr>", out);
    }
    fputs("</table></details>", out);
}

static void rules_table(const check_result *r, FILE *out) {
    fputs("<table><tr><th>order by</th><th>tau</th><th>regret, %</th><th>mean error of "
          "log(Ta/Tb)</th></tr>",
          out);
    for (int k = 0; k < CHECK_RULES; k++) {
        const check_rule *rule = &r->rule[k];
        fprintf(out, "<tr><td>%s: %s</td>", rule->name, rule->what);
        if (isfinite(rule->tau))
            fprintf(out, "<td>%.3f</td>", rule->tau);
        else
            fputs("<td>-</td>", out);
        percent_cell(rule->regret, out);
        if (isfinite(rule->log_error))
            fprintf(out, "<td>%.4f</td></tr>", rule->log_error);
        else
            fputs("<td>-</td></tr>", out);
    }
    fputs("</table>", out);
}

void check_html(const check_result *r, const char *predicted, const char *measured, FILE *out) {
    fprintf(out,
            "<!DOCTYPE html><html lang=\"en\"><head><meta charset=\"utf-8\">"
            "<title>mizan check</title><style>%s</style></head><body><h1>Prediction against "
            "measurement</h1><p>",
            style);
    escape(predicted, out);
    fputs(" against ", out);
    escape(measured, out);
    fputs("</p>", out);
    verdict(r, out);
    fputs("<h2>Steps</h2>", out);
    scatter(r, out);
    scatter_table(r, out);
    steps_table(r, out);
    fputs("<h2>Order of policies</h2>", out);
    rules_table(r, out);
    for (int i = 0; i < r->policies; i++) {
        const check_policy *p = &r->policy[i];
        fputs("<h2>", out);
        escape(p->name, out);
        fputs("</h2><p>Phases: predicted blue, measured orange; busy time of all ranks.</p>", out);
        phase_bars(p, out);
        phase_table(r, p, out);
        fputs("<p>Error of busy time by layer and rank: blue too little, red too much, full colour "
              "from 10 % on.</p>",
              out);
        heat_map(p, out);
        heat_table(p, out);
        places_table(p, out);
        memory_table(p, out);
    }
    fputs("</body></html>\n", out);
}
