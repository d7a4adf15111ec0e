#!/usr/bin/env bats
# mizan calibrate: the profile it writes is one that the simulator takes; bad input; the man page.

load common

setup() {
    enter_tmpdir
}

calibrate() { "$mizan" calibrate "$@"; }

@test "the profile that calibrate writes is taken by sim, and says what was measured" {
    calibrate -o here.json --ranks 4 --pool 2MiB --repeats 5 --threads 1 -q
    "$python" - <<'END'
import json, math, os
p = json.load(open("here.json"))
m = p["measured"]
assert m["rounds"] == 5 and 0 < m["spent"] < 1000, (m["rounds"], m["spent"])
assert m["backend"] == "host" and m["transport"] == "local" and m["processes"] == 1 and m["workers"] == 1, m
assert p["device"]["ranks_per_device"]["value"] == 4
assert p["device"]["memory"]["value"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE"), p["device"]["memory"]
for name in ("pack", "combine", "swiglu_backward", "select", "copy", "update_adamw", "product_wgrad", "product_up"):
    kind = m["kinds"][name]
    sizes = ("m", "n", "k") if name.startswith("product") else ("rows", "cols", "bytes")
    count = len(kind["seconds"])
    assert count > 0 and all(len(kind[s]) == count for s in sizes), name
    assert all(t >= 0 for t in kind["terms"]) and kind["residual"] >= 0, name
    # the residual is the root of the mean squared relative error of terms alone
    errors = []
    for i in range(count):
        a, b, c = (kind[s][i] for s in sizes)
        feature = (1, b * c, a * (b + c), a * b * c) if name.startswith("product") else (1, a, c)
        fitted = sum(t * f for t, f in zip(kind["terms"], feature))
        errors.append((kind["seconds"][i] / fitted - 1) ** 2)
    assert math.isclose(kind["residual"], math.sqrt(sum(errors) / count), rel_tol=1e-6), (name, kind["residual"])
END
    "$mizan" sim --scope layers -t "$root"/traces/example/olmoe-8r.h5 -m olmoe-1b-7b --ranks 4 -c ./here.json:1 \
        --hidden 128 --inter 64 --layers 2 --step-tokens 512 --policy static,symi,ultraep,lrmoe --json >sim.json 2>said
    "$python" -c 'import json; r = json.load(open("sim.json")); assert all(x["step_time_s"]["mean"] > 0 for x in r["runs"])
assert not {"extrapolated", "outside"} & set(r["cluster"]["measured"])'
    run ! grep extrapolated said
    "$mizan" sim --scope layers -t "$root"/traces/example/olmoe-8r.h5 -m olmoe-1b-7b --ranks 4 -c ./here.json:1 -q \
        --hidden 16 --inter 8 --layers 2 --step-tokens 512 --policy static --json >sim.json 2>said
    cat said
    [ "$(wc -l <said)" -eq 1 ]
    grep -q 'hidden 16 and intermediate 8 .*extrapolated.*mizan calibrate --hidden 16 --inter 8 adds' said
    "$python" -c 'import json; m = json.load(open("sim.json"))["cluster"]["measured"]
assert m["extrapolated"] is True and m["outside"] == "products of experts with hidden 16 and intermediate 8", m["outside"]'
    # four times the tokens: the fullest rank of a layer has more rows than fitted that pool, and no other kernel is that far out
    "$mizan" sim --scope layers -t "$root"/traces/example/olmoe-8r.h5 -m olmoe-1b-7b --ranks 4 -c ./here.json:1 -q \
        --hidden 128 --inter 64 --layers 2 --policy static --json >sim.json 2>said
    cat said
    [ "$(wc -l <said)" -eq 1 ]
    "$python" - "$root"/traces/example/olmoe-8r.h5 <<'END'
import h5py, json, numpy, sys
trace = h5py.File(sys.argv[1])
layer, step, pairs = (trace["calls/" + key][:] for key in ("layer", "step", "pairs"))
begin = numpy.cumsum(pairs) - pairs  # calls lie one behind another
rank = trace["pairs/expert"][:] // (64 // 4)
most = max(sum(numpy.bincount(rank[begin[c]:begin[c] + pairs[c]], minlength=4) for c in numpy.flatnonzero((layer == l) & (step == s))).max()
           for l in range(2) for s in set(step))
sampled = json.load(open("here.json"))["measured"]["kinds"]["swiglu_backward"]["rows"]
words = "swiglu_backward of %d rows (%d to %d calibrated)" % (most, min(sampled), max(sampled))
outside = json.load(open("sim.json"))["cluster"]["measured"]["outside"]
assert most > 2 * max(sampled) and outside.startswith(words), (words, outside)
assert outside + ": far from all that was calibrated" in open("said").read()
END
}

@test "no round is begun that would end after the limit, but for three; the profile says how many there were" {
    calibrate -o here.json --ranks 4 --pool 2MiB --repeats 7 --threads 1 --limit 0.001 2>said
    cat said
    grep -q 'measured 3 of 7 rounds in [0-9]* s; the next one would have ended after more than 0.001 s' said
    "$python" -c 'import json; m = json.load(open("here.json"))["measured"]; assert m["rounds"] == 3 and 0.001 < m["spent"] < 1000, (m["rounds"], m["spent"])
assert len(m["kinds"]) > 20, m["kinds"].keys()'
    "$mizan" sim --scope layers -t "$root"/traces/example/olmoe-8r.h5 -m olmoe-1b-7b --ranks 4 -c ./here.json:1 -q \
        --hidden 128 --inter 64 --layers 2 --step-tokens 512 --policy static --json >sim.json
    # what is refreshed was measured in as many rounds as before
    calibrate --refresh here.json -o now.json --ranks 4 --threads 1 --repeats 5 --pool 2MiB --limit 1000 2>said
    cat said
    grep -q 'measured 5 of 5 rounds in [0-9]* s$' said
    "$python" -c 'import json; a, b = (json.load(open(p))["measured"] for p in ("here.json", "now.json"))
assert b["rounds"] == 3 and a["spent"] == b["spent"], (b["rounds"], a["spent"], b["spent"])'
}

@test "bad input of calibrate" {
    local line
    while IFS='|' read -r arguments words; do
        # shellcheck disable=SC2086
        run --separate-stderr calibrate $arguments
        [ "$status" -eq 2 ] || { echo "$arguments: $status" && false; }
        [ "${#stderr_lines[@]}" -eq 1 ]
        [[ $stderr == *"$words"* ]] || { echo "$arguments: $stderr" && false; }
    done <<'END'
--hidden 64|--hidden and --inter go together
--repeats 2|repeats
--repeats 0|repeats
--transport carrier-pigeon|carrier-pigeon
--pool 1KiB|pool
surplus|surplus
-o /nowhere/here.json|/nowhere
END
    # a name that no profile can have, before minutes of work
    for name in '' $'two\nlines' $'\t' $'caf\xe9'; do
        fails 2 "--name is empty, holds control characters or is not UTF-8" timeout 20 "$mizan" calibrate -o here.json --name "$name"
    done
    only_files
}

# The product alone where the profile has no other time; memory where it has that; a record of it.
@test "a refreshed profile has the seconds of the machine as it is now" {
    calibrate -o here.json --ranks 4 --pool 2MiB --repeats 3 --threads 1 -q
    "$python" - <<'END'
import json
p = json.load(open("here.json"))
assert p["measured"]["probe_mean"] > 0 and p["measured"]["rows_mean"] == 0, p["measured"]
p["measured"]["rows_mean"] = 1000.0 # no machine is that slow
json.dump(p, open("slow.json", "w"))
END
    calibrate --refresh here.json -o now.json --ranks 4 --threads 1 --repeats 3 -q
    calibrate --refresh slow.json -o fast.json --ranks 4 --threads 1 --repeats 3
    "$python" - <<'END'
import json, math, re
def measured(path):
    return json.load(open(path))["measured"]
here, now, fast = measured("here.json"), measured("now.json"), measured("fast.json")
near = lambda a, b: math.isclose(a, b, rel_tol=1e-9)
for new in (now, fast):
    f = new["rescaled"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", f["at"]), f
    assert near(f["products"], new["probe_mean"] / here["probe_mean"]), f
    for name, kind in new["kinds"].items():
        factor = f["products" if name.startswith("product") or name == "update_muon" else "memory"]
        assert all(near(a, b * factor) for a, b in zip(kind["seconds"], here["kinds"][name]["seconds"])), name
        assert all(near(a, b * factor) for a, b in zip(kind["terms"], here["kinds"][name]["terms"])), name
        assert near(kind["residual"], here["kinds"][name]["residual"]), name
    assert near(new["call"], here["call"] * f["products"]) and new["alone"] == here["alone"]
assert now["rescaled"]["memory"] == 1 and now["rows_mean"] == 0
assert 0 < fast["rescaled"]["memory"] < 0.01 and near(fast["rescaled"]["memory"], fast["rows_mean"] / 1000)
old, new = json.load(open("here.json")), json.load(open("now.json"))
assert near(new["device"]["bf16"]["value"] * new["measured"]["rescaled"]["products"], old["device"]["bf16"]["value"])
for section in ("name", "description", "node", "planner"):
    assert old[section] == new[section]
END
    "$python" - <<'END'
import json
p = json.load(open("fast.json"))
p["measured"]["cache_mean"] = 2e-5
json.dump(p, open("all.json", "w"))
END
    local name
    for name in now all; do
        "$mizan" sim --scope layers -t "$root"/traces/example/olmoe-8r.h5 -m olmoe-1b-7b --ranks 4 -c ./$name.json:1 \
            --hidden 128 --inter 64 --layers 2 --policy static --json >sim.$name.json
    done
    "$python" - <<'END'
import json
for name, rows in ("now", False), ("all", True):
    cluster, m = json.load(open(f"sim.{name}.json"))["cluster"], json.load(open(f"{name}.json"))["measured"]
    assert cluster["probe_s"] == m["probe"] and cluster["probe_mean_s"] == m["probe_mean"]
    for key in "rows_mean", "cache_mean": # what is not known is not there
        assert cluster.get(key + "_s") == (m[key] if rows else None), key
END
}

@test "a profile of another machine or another way to measure is not refreshed" {
    calibrate -o here.json --ranks 4 --pool 2MiB --repeats 3 --threads 1 -q
    while IFS='|' read -r arguments words; do
        # shellcheck disable=SC2086
        fails 2 "$words" calibrate --refresh $arguments -o new.json --pool 2MiB
    done <<'END'
here.json --threads 1|--ranks was 4 when it was measured and is 8 now
here.json --threads 2 --ranks 4|workers (--threads) was 1
here.json --threads 1 --ranks 4 --name other|--name is of a new calibration
here.json --threads 1 --ranks 4 --hidden 64 --inter 64|--hidden is of a new calibration
absent.json --threads 1 --ranks 4|absent.json
END
    "$python" - <<'END'
import json
p = json.load(open("here.json"))
p["measured"]["machine"] = "another"
json.dump(p, open("other.json", "w"))
p["measured"]["backend"] = "cuda"
json.dump(p, open("cuda.json", "w"))
del p["measured"]
json.dump(p, open("plain.json", "w"))
END
    fails 2 "other.json: the machine was another when" calibrate --refresh other.json -o new.json --ranks 4 --threads 1
    fails 2 "the backend was cuda when" calibrate --refresh cuda.json -o new.json --ranks 4 --threads 1
    fails 2 "nothing in it was measured" calibrate --refresh plain.json -o new.json --ranks 4 --threads 1
    only_files here.json other.json cuda.json plain.json
}

@test "without a GPU the cuda backend is missing hardware" {
    command -v nvidia-smi >/dev/null && skip "there may be a GPU"
    run --separate-stderr calibrate --backend cuda
    [ "$status" -eq 3 ]
    [ "${#stderr_lines[@]}" -eq 1 ]
}

@test "an interrupt leaves no profile" {
    "$mizan" calibrate -o here.json --repeats 1001 -q &
    local job=$!
    sleep 1
    kill -TERM "$job"
    local status=0
    wait "$job" || status=$?
    [ "$status" -eq 130 ] || { echo "$status" && false; }
    [ -z "$(ls -A)" ]
}

@test "an interrupt leaves nothing of a profile that is refreshed" {
    calibrate -o here.json --ranks 4 --pool 2MiB --repeats 3 --threads 1 -q
    cp here.json before.json
    "$mizan" calibrate --refresh here.json -o new.json --ranks 4 --pool 2MiB --threads 1 --repeats 1001 -q 2>said &
    local job=$!
    sleep 1
    kill -INT "$job" 2>/dev/null
    kill -TERM "$job" # jobs in the background may be deaf to the other
    local status=0
    wait "$job" || status=$?
    [ "$status" -eq 130 ] || { echo "$status" && false; }
    [ "$(wc -l <said)" -eq 1 ] && grep -q interrupted said
    cmp here.json before.json
    [ "$(ls -A | tr '\n' ' ')" = "before.json here.json said " ]
}

@test "every option of calibrate is in its man page" {
    for option in $(calibrate --help | grep -o -- '--[a-z-]*' | sort -u); do
        [ "$option" = --help ] || grep -q -- "\*$option\*" "$root/replay/mizan-calibrate.1.scd" || { echo "$option" && false; }
    done
}
