#!/usr/bin/env bats
# mizan sim from end to end on the shipped example.

load common

setup() {
    enter_tmpdir
    example=$(ls "$root"/traces/example/*.h5 | head -n 1)
    sim=("$mizan" sim --trace "$example" --model olmoe-1b-7b --cluster a100-80gb:8)
}

all='static,capacity,symi,ultraep,lrmoe[keep=0.5],lrmoe[keep=0.25],ideal'

@test "the JSON has every key of the contract, with its type and range" {
    "${sim[@]}" --policy "$all" --json >out.json
    "$python" - <<'EOF'
import json
r = json.load(open("out.json"))
assert r["schema"] == "mizan-result/1"
assert isinstance(r["trace"], dict) and isinstance(r["cluster"], dict)
assert [x["policy"] for x in r["runs"]] == ["static", "capacity", "symi", "ultraep", "lrmoe[keep=0.5]", "lrmoe[keep=0.25]", "ideal"]
categories = "weights gradients optimizer_state replicas activations token_buffers temporaries workspace communication context".split()
for run in r["runs"]:
    name = run["policy"]
    t = run["step_time_s"]
    assert 0 < t["p50"] <= t["p95"] and t["mean"] > 0, name
    assert 0 < run["moe_time_s"] <= t["mean"] * 1.0000001, name
    assert run["tokens_per_s"] > 0, name
    assert run["layer_calls"] == r["trace"]["layers"], name # one micro-batch
    assert list(run["memory_bytes"]) == categories, name
    assert sum(run["memory_bytes"].values()) == run["peak_memory_bytes"], name
    assert all(isinstance(v, int) and v >= 0 for v in run["memory_bytes"].values()), name
    assert run["fits"] is True and run["out_of_memory"] is None, name
    i = run["rank_imbalance"]
    assert 1 <= i["mean"] <= i["max"] and i["p95"] <= i["max"], name
    for key in ("dispatch_bytes", "combine_bytes", "backward_dispatch_bytes"):
        assert isinstance(run[key], int) and run[key] >= 0, (name, key)
    assert 0 <= run["dropped_pairs_fraction"] < 1, name
    assert 0 < run["kept_pairs_fraction"] <= 1, name
    assert run["kept_score_mass"] is None or 0 < run["kept_score_mass"] <= 1, name
    assert all(v >= 0 for v in run["phases_s"].values()), name
    assert run["planner_s"] >= 0, name
    assert "planner_measured_s" not in run
by = {x["policy"]: x for x in r["runs"]}
assert by["ideal"]["step_time_s"]["mean"] <= by["static"]["step_time_s"]["mean"]
assert by["ideal"]["rank_imbalance"]["max"] < 1.01
assert by["static"]["kept_pairs_fraction"] == 1 and by["static"]["dropped_pairs_fraction"] == 0
assert by["lrmoe[keep=0.25]"]["kept_pairs_fraction"] < by["lrmoe[keep=0.5]"]["kept_pairs_fraction"] < 1
for name in ("lrmoe[keep=0.5]", "capacity"):
    assert by[name]["lossy"], name
for name in ("static", "ultraep", "ideal"):
    assert not by[name]["lossy"], name
assert 0.5 < by["lrmoe[keep=0.5]"]["kept_score_mass"] and by["lrmoe[keep=0.5]"]["score_source"]
assert by["static"]["kept_score_mass"] is None and by["static"]["score_source"] is None
EOF
}

@test "the same input gives the same bytes, on stdout and in the file" {
    "${sim[@]}" --policy "$all" --json -o a.h5 >a.json
    "${sim[@]}" --policy "$all" --json -o b.h5 >b.json
    cmp a.json b.json
    cmp a.h5 b.h5
    "${sim[@]}" --policy "$all" >a.txt
    "${sim[@]}" --policy "$all" >b.txt
    cmp a.txt b.txt
    only_files a.json b.json a.h5 b.h5 a.txt b.txt
}

@test "the result file holds the JSON and the detail per step and rank" {
    "${sim[@]}" --policy static,symi --json -o out.h5 >out.json
    "$python" - <<'EOF'
import h5py, json
f = h5py.File("out.h5", "r")
text = lambda v: v.decode() if isinstance(v, bytes) else v
assert text(f.attrs["format"]) == "mizan-result" and f.attrs["format_version"] == 1
assert text(f.attrs["producer"]).startswith("mizan ")
assert text(f["json"][()]) == open("out.json").read()
runs = json.load(open("out.json"))["runs"]
for i, run in enumerate(runs):
    g = f["runs/%04d" % i]
    assert text(g.attrs["policy"]) == run["policy"]
    steps = g["step_time_s"][...]
    assert len(steps) == run["steps"]
    assert abs(steps.mean() - run["step_time_s"]["mean"]) <= 1e-12 * steps.mean()
    assert g["rank_peak_bytes"][...].max() == run["peak_memory_bytes"]
    assert len(g["rank_busy_s"]) == len(g["rank_peak_bytes"]) == 8
    for d in g.values():
        assert "units" in d.attrs and "long_name" in d.attrs
EOF
    h5dump -H out.h5 >/dev/null
}

@test "the table has a row per policy and fits 100 columns" {
    run --separate-stderr "${sim[@]}" --policy "$all"
    [ "$status" -eq 0 ]
    for policy in static capacity symi ultraep 'lrmoe[keep=0.5]' 'lrmoe[keep=0.25]' ideal; do
        [[ $'\n'$output == *$'\n'"$policy"* ]]
    done
    [ "$(printf '%s\n' "$output" | awk '{ if (length > max) max = length } END { print max }')" -le 100 ]
}

@test "each order and company of policies gives a policy the same numbers" {
    "${sim[@]}" --policy 'symi' --json >one.json
    "${sim[@]}" --policy 'lrmoe[keep=0.5],symi,static' --json >many.json
    "$python" - <<'EOF'
import json
one = json.load(open("one.json"))["runs"][0]
many = json.load(open("many.json"))["runs"][1]
assert one == many
EOF
}

@test "a window beyond what was recorded is all of it" {
    "${sim[@]}" --json --policy 'eplb[window=1000000,interval=1]' >a.json
    "${sim[@]}" --json --policy 'eplb[window=6,interval=1]' >b.json
    diff <(grep -v window a.json) <(grep -v window b.json)
}

@test "--timing adds measured planner time and changes nothing else" {
    "${sim[@]}" --policy symi,ultraep --json >plain.json
    "${sim[@]}" --policy symi,ultraep --json --timing >timed.json
    "$python" - <<'EOF'
import json
a, b = json.load(open("plain.json")), json.load(open("timed.json"))
for run in b["runs"]:
    assert run.pop("planner_measured_s") >= 0
a["settings"] = b["settings"] = None
assert a == b
EOF
}

@test "--bounds adds what balance was possible, in a second table too, and changes nothing else" {
    "${sim[@]}" --policy static,ultraep,ideal --json >plain.json
    "${sim[@]}" --policy static,ultraep,ideal --json --bounds >bounds.json
    "$python" - <<'EOF'
import json
plain, bounds = json.load(open("plain.json")), json.load(open("bounds.json"))
for run in bounds["runs"]:
    hosts, some = run.pop("imbalance_bound_hosts"), run.pop("imbalance_bound_any")
    for key in ("mean", "p95", "max"):
        assert 1 <= some[key] <= hosts[key] <= run["rank_imbalance"][key], (run["policy"], key)
assert plain == bounds
EOF
    "${sim[@]}" --policy static,ultraep --bounds >table
    grep -q "^imbalance, max/mean .*as planned .*its hosts at best .*bound, any hosts" table
    [ "$(grep -c '^ultraep ' table)" -eq 2 ]
    [ -z "$(awk 'length > 100' table)" ]
}

@test "--phases adds a table of what the JSON has, and changes nothing else" {
    for policies in 'static,symi,lrmoe[keep=0.5],lrmoe[keep=0.25],ultraep,ideal' static; do
        "${sim[@]}" --policy "$policies" >plain
        "${sim[@]}" --policy "$policies" --phases >table
        [ -z "$(awk 'length > 100' table)" ]
        "${sim[@]}" --policy "$policies" --json >plain.json
        "${sim[@]}" --policy "$policies" --json --phases >phases.json
        cmp plain.json phases.json
        "$python" - <<'EOF'
import json
want = {run["policy"]: run["phases_s"] for run in json.load(open("plain.json"))["runs"]}
lines = open("table").read().splitlines()
at = next(i for i, line in enumerate(lines) if line.startswith("phases, "))
found, names, end = {}, None, at + 1
while end < len(lines) and lines[end].split()[0] in {"phase", *want["static"]}:
    name, *cells = lines[end].split()
    if name == "phase":
        names = cells
    else:
        found.update(((policy, name), float(cell)) for policy, cell in zip(names, cells, strict=True))
    end += 1
assert lines[:at] + lines[end:] == open("plain").read().splitlines()
kept = {phase for phases in want.values() for phase, s in phases.items() if s > 0}
assert len(want) > 1 or 0 < len(kept) < len(want["static"])
assert set(found) == {(policy, phase) for policy in want for phase in kept}, found
for (policy, phase), ms in found.items():
    assert abs(ms - 1e3 * want[policy][phase]) <= 0.0005 + 0.5e-3 * ms, (policy, phase, ms)
EOF
    done
}

@test "--list names every shipped model and cluster, the policies and the optimizers" {
    run --separate-stderr "$mizan" sim --list
    [ "$status" -eq 0 ]
    for name in a100-80gb h100-80gb h200 gb200-nvl72 rtx4090-pcie mixtral-8x7b qwen3-30b-a3b glm-4.5-air \
        deepseek-v3 smartmoe-32e2k laer-groups static capacity symi ultraep lrmoe ideal adamw skewadam; do
        [[ $output == *"  $name"* ]] || { echo "$name is missing" && false; }
    done
}

@test "a model that does not fit is a result" {
    run --separate-stderr "${sim[@]}" --cluster rtx4090-pcie:1 --policy static --json
    [ "$status" -eq 0 ]
    printf '%s\n' "$output" >out.json
    "$python" - <<'EOF'
import json
run = json.load(open("out.json"))["runs"][0]
assert run["fits"] is False and run["out_of_memory"]
assert run["peak_memory_bytes"] > run["capacity_bytes"]
EOF
}

@test "ranks of one GPU share its memory and its time" {
    "${sim[@]}" --cluster a100-80gb:16 -n 1 --policy static --json >apart.json
    "${sim[@]}" --cluster a100-80gb:1x16 -n 1 --policy static --json >shared.json
    "$python" - <<'EOF'
import json
apart, shared = (json.load(open(f))["runs"][0] for f in ("apart.json", "shared.json"))
assert abs(16 * shared["capacity_bytes"] - apart["capacity_bytes"]) < 16
assert apart["fits"] is True and shared["fits"] is False
assert shared["peak_memory_bytes"] > shared["capacity_bytes"]
compute = "attention experts backward_experts loss optimizer"
assert shared["step_time_s"]["mean"] > 16 * max(shared["phases_s"][k] for k in compute.split())
EOF
}

@test "unknown names suggest the nearest" {
    fails 2 "olmoe-1b-7b" "${sim[@]}" --model olmoe-1b-7 --policy static
    fails 2 "a100-80gb" "${sim[@]}" --cluster a100-80g:8 --policy static
    fails 2 "did you mean h100-80gb?" "${sim[@]}" --cluster h100:8 --policy static
    fails 2 "symi" "${sim[@]}" --policy simi
    fails 2 "keep" "${sim[@]}" --policy 'lrmoe[kep=0.5]'
    fails 2 "adamw" "${sim[@]}" --optimizer adamv --policy static
    fails 2 "did you mean" "${sim[@]}" --effects tles --policy static
    only_files
}

@test "a trace and a model that disagree say what to pass" {
    fails 2 "--model" "${sim[@]}" --model mixtral-8x7b --policy static -o out.h5
    only_files
    for layers in 8 32; do
        sed "s/\"num_hidden_layers\": 16/\"num_hidden_layers\": $layers/" "$root/sim/model/configs/olmoe-1b-7b.json" >$layers.json
    done
    fails 2 "or cut the trace" "${sim[@]}" --model 8.json --policy static
    fails 2 "with fewer layers" "${sim[@]}" --model 32.json --policy static # cutting would not help
}

@test "bad numbers of ranks, groups and clusters" {
    fails 2 "--ep" "${sim[@]}" --ep 3 --policy static
    fails 2 "GPUs" "${sim[@]}" --cluster a100-80gb --policy static
    fails 2 "" "${sim[@]}" --cluster a100-80gb:0 --policy static
    for gpus in x x8 8x "8                                  x"; do
        fails 2 "after the colon belong GPUs" "${sim[@]}" --cluster "a100-80gb:$gpus" --policy static
    done
    fails 2 "--ranks" "${sim[@]}" --ranks 7 --policy static
    fails 2 "missing" "$mizan" sim --model olmoe-1b-7b --cluster a100-80gb:8
}

@test "bad policies: empty, unbalanced, out of range" {
    fails 2 "--policy" "${sim[@]}" --policy ''
    fails 2 "unbalanced" "${sim[@]}" --policy 'lrmoe[keep=0.5'
    fails 2 "keep" "${sim[@]}" --policy 'lrmoe[keep=-1]'
    fails 2 "keep" "${sim[@]}" --policy 'lrmoe[keep=nan]'
    fails 2 "./mine.so" "${sim[@]}" --policy ./mine.so
}

@test "a profile with a missing, misspelt or impossible field" {
    profile="$root/sim/cluster/profiles/a100-80gb.json"
    for name in '' 'two\\nlines' '\\u001b[31mred'; do
        sed "s/\"name\": \"a100-80gb\"/\"name\": \"$name\"/" "$profile" >named.json
        fails 2 "'name' is empty or holds control characters" "${sim[@]}" --cluster named.json:8 --policy static
    done
    "$python" - "$profile" <<'EOF'
import json, sys
whole = json.load(open(sys.argv[1]))
def paths(value, path=()):
    for key, member in value.items():
        if key.startswith("_") or key in ("source", "sources", "comment"):
            continue
        if path != ("planner",):  # its keys are names of policies
            yield path + (key,)
        if isinstance(member, dict):
            yield from paths(member, path + (key,))
def copy(path, change):
    profile = json.loads(json.dumps(whole))
    at = profile
    for key in path[:-1]:
        at = at[key]
    change(at, path[-1])
    return profile
def misspell(at, key):
    at[key + "x"] = at.pop(key)
for i, path in enumerate(paths(whole)):
    json.dump(copy(path, misspell), open("misspelt-%03d.json" % i, "w"))
    open("misspelt-%03d.key" % i, "w").write(path[-1])
    if path[-1] == "value":
        for k, wrong in enumerate((-1, "5 parsecs", [])):
            json.dump(copy(path, lambda at, key: at.update({key: wrong})), open("wrong-%03d-%d.json" % (i, k), "w"))
EOF
    for file in misspelt-*.json; do
        echo "$file: $(cat "${file%.json}.key")"
        fails 2 "$(cat "${file%.json}.key")" "${sim[@]}" --cluster "$file:8" --policy static
    done
    for file in wrong-*.json; do
        fails 2 "$file" "${sim[@]}" --cluster "$file:8" --policy static
    done
    printf '{' >broken.json
    fails 2 "broken.json:1:" "${sim[@]}" --cluster broken.json:8 --policy static
}

@test "an output that cannot be written is refused before the work" {
    fails 2 "no-such-directory" "${sim[@]}" --policy static -o no-such-directory/out.h5
    mkdir dir.h5
    fails 2 "not a regular file" "${sim[@]}" --policy static -o dir.h5
    fails 2 "not a regular file" "${sim[@]}" --policy static -o /dev/null
    [ -c /dev/null ]
    only_files dir.h5
}

@test "a trace packed with gzip or xz, where HDF5 needs the file itself, is refused or read, never a crash" {
    gzip -c "$example" >packed.h5.gz
    run --separate-stderr "$mizan" sim --trace packed.h5.gz --model olmoe-1b-7b --cluster a100-80gb:8 --policy static
    [ "$status" -eq 0 ] || [ "$status" -eq 2 ]
}

@test "a result file that the disk has no room for is one line, and nothing of it stays" {
    limited() { (ulimit -f 2 && exec "${sim[@]}" -q --policy static --steps 1 --detail -o r.h5 >table); }
    fails 4 "r.h5: the result file could not be written" limited
    only_files table
}

@test "every option of sim and trace is in its man page" {
    for command in sim trace; do
        page=$(find "$root/analysis" "$root/traces" -name "mizan-$command.1.scd")
        subcommands=("")
        [ $command = sim ] || subcommands=(info check synth import cut)
        for sub in "${subcommands[@]}"; do
            for option in $("$mizan" $command $sub --help | grep -oE '^ .{0,6}--[a-z0-9-]+' | grep -oE -- '--[a-z0-9-]+'); do
                grep -q -- "\*$option\*" "$page" || { echo "$command $sub: $option is not in $page" && false; }
            done
        done
    done
}
