"""Makes a measurement of a prediction (mizan sim --scope layers --json --detail): every step eight
times, one pass after another, with the changes asked for.

usage: measured.py PREDICTION DIGEST [KEY=VALUE...] >MEASUREMENT
  scale.POLICY=F   its steps and phases times F
  phase.NAME=F     this phase times F in every policy
  peak=F           peak memory times F, and what every rank held at most
  seed=N           settings.seed
"""
import json
import math
import statistics
import sys

PASSES = 8


def summarize(run):
    """What the summary says of step times and phases follows from the detail."""
    detail = run["detail"]
    times = sorted(detail["step_time_s"])
    run["step_time_s"] = {"mean": sum(times) / len(times), "p50": statistics.median(times),
                          "p95": times[math.ceil(0.95 * len(times)) - 1]}
    for k, name in enumerate(run["phases_s"]):
        worst = [max(sum(layer[rank][k] for layer in step) for rank in range(len(step[0])))
                 for step in detail["detail_s"]]
        run["phases_s"][name] = sum(worst) / len(worst)


def main():
    with open(sys.argv[1]) as file:
        root = json.load(file)
    change = dict(word.split("=") for word in sys.argv[3:])
    root["kind"] = "measurement"
    root["prediction_digest"] = sys.argv[2]
    root["settings"]["transport"] = "local"
    root["settings"]["backend"] = "host"
    if "seed" in change:
        root["settings"]["seed"] = int(change["seed"])
    for run in root["runs"]:
        detail = run["detail"]
        factor = float(change.get("scale." + run["policy"], 1))
        names = list(run["phases_s"])
        by_phase = [factor * float(change.get("phase." + name, 1)) for name in names]
        steps = len(detail["step_time_s"])
        seconds, times = [], []
        for step in range(steps):
            cells = detail["detail_s"][step]
            new = [[[x * f for x, f in zip(rank, by_phase)] for rank in layer] for layer in cells]
            before = sum(x for layer in cells for rank in layer for x in rank)
            after = sum(x for layer in new for rank in layer for x in rank)
            seconds.append(new)
            times.append(detail["step_time_s"][step] * after / before)
        run["steps"] = steps * PASSES
        detail["step_time_s"] = times * PASSES
        detail["step_ordinal"] = list(range(steps)) * PASSES
        detail["detail_s"] = seconds * PASSES
        factor = float(change.get("peak", 1))
        run["peak_memory_bytes"] = int(run["peak_memory_bytes"] * factor)
        for rank in detail["rank_memory_bytes"]:
            rank[:] = [math.ceil(x * factor) for x in rank]
        run["memory_bytes"] = {key: int(x * factor) for key, x in run["memory_bytes"].items()}
        summarize(run)
    json.dump(root, sys.stdout)


main()
