"""check_json.py FILE: is FILE what tests/gpu/run says it writes? Every check of every list passed, every row
of the timings has its keys and a verdict that its numbers bear out, every operation is there on every shape."""
import json
import sys

VERDICTS = {"met", "missed", "no goal", "not known", "not run", "wrong", "not held"}
# cuBLAS need not take bf16 operands with fp32 gradients; its stand-in does not.
REFUSED = "cuBLAS grouped up wgrad, fp32"
NUMBERS = ["seconds", "flops", "bytes", "floor_seconds", "values_checked", "goal", "reached"]


def must(condition, *what):
    if not condition:
        sys.exit("check_json.py: " + " ".join(str(w) for w in what))


def is_number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def check_row(row, emulated):
    name = row.get("operation"), row.get("shape")
    must(all(isinstance(n, str) and n for n in name), "a row without a name", row)
    for key in NUMBERS:
        must(key in row and (row[key] is None or is_number(row[key])), name, "has no number or null", key)
    must(row.get("verdict") in VERDICTS, name, "has the verdict", row.get("verdict"))
    if row["seconds"] is None:
        must(row["verdict"] in ("not run", "wrong"), name, "has no time, but the verdict", row["verdict"])
        must(row.get("message"), name, "has neither a time nor a reason")
        must(not emulated or name[0] == REFUSED, name, "was not run, though nothing lacks here:", row["message"])
        return
    must(row["verdict"] != "not held" and row["values_checked"] > 0, name, "has a time, but nothing holds its results")
    must(row["seconds"] > 0 and row["bytes"] > 0 and row["flops"] >= 0, name, "costs nothing")
    must((row["goal"] is None) == ("goal_is" not in row), name, "has half a goal")
    must((row["verdict"] in ("met", "missed", "not known")) <= (row["goal"] is not None), name, "is judged without a goal")
    if row["goal"] is not None and row["reached"] is not None and row["verdict"] != "wrong":
        short = row["goal_is"].endswith("at most")
        good = row["reached"] <= row["goal"] if short else row["reached"] >= row["goal"]
        must(row["verdict"] == ("met" if good else "missed"), name, "reached", row["reached"], "but is", row["verdict"])


def check_timings(timings):
    rows = timings["operations"]
    for row in rows:
        check_row(row, timings["emulated"])
    names = [(row["operation"], row["shape"]) for row in rows]
    must(len(set(names)) == len(names), "an operation is there twice")
    operations, shapes = {n[0] for n in names}, {n[1] for n in names}
    must(len(names) == len(operations) * len(shapes), "an operation lacks on a shape")
    for key, verdict in (("goals_met", "met"), ("goals_missed", "missed"), ("operations_wrong", "wrong"),
                         ("operations_not_held", "not held")):
        count = sum(row["verdict"] == verdict for row in rows)
        must(timings[key] == count, key, timings[key], "but rows say", count)
    must(timings["complete"] is True, "the timings were cut short")
    must(timings["operations_wrong"] == 0, "wrong results:", [r for r in rows if r["verdict"] == "wrong"])
    print(f"{len(operations)} operations on {len(shapes)} shapes, {sum(r['values_checked'] for r in rows)} values checked")


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        # JSON has no NaN, though Python's reader takes it.
        run = json.load(file, parse_constant=lambda x: sys.exit(f"check_json.py: {x} is no JSON"))
    for key in ("date", "machine", "seed", "checks", "plan", "timings", "peers"):
        must(key in run, "no", key)
    checks = [c for part in run["checks"] for c in part]
    must(checks and all(c["passed"] is True for c in checks), "checks failed or none ran")
    check_timings(run["timings"])
    # 340 s, less what the build takes where there are more processors than here, and checks that are not a formality.
    plan = run["plan"]
    must(plan["rows"] >= 5 * 60 and plan["timings_seconds"] <= 170, "the timings do not fit in six minutes:", plan)


main()
