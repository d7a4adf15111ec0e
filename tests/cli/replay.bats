#!/usr/bin/env bats
# mizan replay in one process: results, plans of the simulator, bad input.

load common

setup() {
    enter_tmpdir
    example=$(ls "$root"/traces/example/*.h5 | head -n 1)
    unset OMPI_COMM_WORLD_SIZE MIZAN_REPLAY_FAULT
    replay=("$mizan" replay --trace "$example" --model olmoe-1b-7b --threads 1 -q)
    small=(--hidden 64 --inter 32 --layers 2 --steps 2)
}

all='static,symi,ultraep,lrmoe[keep=0.5]'

@test "the JSON has the keys of the contract; what is counted is what the plan says" {
    "${replay[@]}" "${small[@]}" --policy "$all" --repeat 2 --json --detail >out.json
    "$mizan" sim --scope layers --trace "$example" --model olmoe-1b-7b --cluster a100-80gb:1x8 --policy "$all" \
        "${small[@]}" --json >sim.json
    "$python" - <<'EOF2'
import json, os
r, s = json.load(open("out.json")), json.load(open("sim.json"))
# a rank's part of the machine that ran it, whatever the policies were told
room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
assert all(x["capacity_bytes"] == room // 8 for x in r["runs"]) and s["runs"][0]["capacity_bytes"] != room // 8
assert r["schema"] == "mizan-result/1" and r["kind"] == "measurement" and s["kind"] == "prediction"
assert r["trace"]["digest"] == s["trace"]["digest"] and r["model"] == s["model"]
for key in ("ranks", "optimizer", "recompute", "seed", "first_step", "steps", "step_tokens", "tokens_per_rank", "sequence_length"):
    assert r["settings"][key] == s["settings"][key], key
assert r["settings"]["transport"] == "local" and r["settings"]["processes"] == 1
assert r["settings"]["window_steps"] == 2 and r["settings"]["repeat"] == 2
assert r["settings"]["verified"]["values"] > 1000 and 0 < r["settings"]["verified"]["largest"] <= 1
for a, b in zip(r["runs"], s["runs"]):
    name = a["policy"]
    assert name == b["policy"] and [k for k in a if k != "detail"] == list(b), name
    assert a["steps"] == 4 and b["steps"] == 2
    # the same plans: the same rows, pairs and bytes
    for key in ("rank_imbalance", "layer_calls", "kept_pairs_fraction", "dropped_pairs_fraction", "kept_score_mass",
                "dispatch_bytes", "combine_bytes", "backward_combine_bytes", "lossy", "system", "score_source",
                "between_process_bytes"):
        assert a[key] == b[key], (name, key, a[key], b[key])
    moved = sum(a[key] for key in ("dispatch_bytes", "combine_bytes", "backward_dispatch_bytes", "backward_combine_bytes",
                                   "transfer_bytes"))
    assert abs(a["within_process_bytes"] - moved) <= 3 and a["between_process_bytes"] == 0, name
    assert a["lossy"] or a["within_process_bytes"] == b["within_process_bytes"] > 0, name
    t = a["step_time_s"]
    assert 0 < t["p50"] <= t["p95"], name
    assert 0 < a["moe_time_s"] <= t["mean"], name
    assert sum(a["memory_bytes"].values()) == a["peak_memory_bytes"] > 0, name
    p = a["phases_s"]
    for phase in ("router", "count_exchange", "planner", "pack", "dispatch", "experts", "combine", "unpack",
                  "backward_pack", "backward_dispatch", "backward_experts", "backward_combine", "backward_other",
                  "optimizer", "launch_wait"):
        assert p[phase] > 0, (name, phase)
    for phase in ("attention", "dense", "loss", "parameter_gather"):
        assert p[phase] == 0, (name, phase)
    assert (p["score"] > 0) == (name == "lrmoe[keep=0.5]"), name
by = {x["policy"]: x for x in r["runs"]}
assert by["lrmoe[keep=0.5]"]["backward_dispatch_bytes"] < by["static"]["backward_dispatch_bytes"]
assert by["static"]["transfer_bytes"] == 0 < by["symi"]["transfer_bytes"]
EOF2
}

# A load whose hot experts change, so that placements do; two micro-batches, whose last one reduces for the step.
@test "memory is predicted to the byte: reductions stage by stage, experts that arrive" {
    "$mizan" trace synth -q --load rotating --ranks 4 --experts 8 --top-k 2 --layers 2 --tokens 12 --steps 4 --micro-batches 2 \
        -o rotating.h5
    cat >config.json <<'EOF2'
{"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
 "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 100}
EOF2
    local job=(-q --trace rotating.h5 --model config.json --steps 4 --json --policy
        'static,capacity,symi,ultraep,eplb[interval=1],flexmoe,smartmoe[interval=1],lplb,fastermoe,finemoe,llep,topoep[chunks=1],lrmoe[keep=0.5,placement=static]')
    "$mizan" sim --scope layers --cluster a100-80gb:1x4 "${job[@]}" >sim.json
    "$mizan" replay --threads 1 --warmup 0 "${job[@]}" >out.json
    "$python" - <<'EOF2'
import json
r, s = json.load(open("out.json")), json.load(open("sim.json"))
for a, b in zip(r["runs"], s["runs"]):
    name = a["policy"]
    assert a["peak_memory_bytes"] == b["peak_memory_bytes"], (name, a["peak_memory_bytes"], b["peak_memory_bytes"])
    assert a["memory_bytes"] == b["memory_bytes"], (name, a["memory_bytes"], b["memory_bytes"])
runs = {a["policy"]: a for a in r["runs"]}
assert "stated" in runs["eplb[interval=1]"]["peak_at"]
assert all("reduction" in runs[name]["peak_at"] for name in ("ultraep", "symi"))
EOF2
}

@test "the detail of a rank adds up to its step" {
    "${replay[@]}" "${small[@]}" --policy static --json --detail -o out.h5 >out.json
    "$python" - <<'EOF2'
import json, h5py, numpy
run = h5py.File("out.h5")["runs/0000"]
detail = run["detail_s"][()] if "detail_s" in run else None
assert detail is not None, list(run)
step = run["step_time_s"][()]
r = json.load(open("out.json"))["runs"][0]
# the machine's speeds before each: 0.54 GFLOP, 32 MiB and 256 KiB take that long anywhere
for key, least in ("probe_s", 1e-5), ("memory_probe_s", 1e-4), ("cache_probe_s", 1e-7):
    assert run[key].shape == (2,) and (run[key][()] == r["detail"][key]).all() and (run[key][()] > least).all(), key
detail = detail.reshape(2, 3, 8, -1)
names = list(r["phases_s"])
per = detail.sum(axis=1)  # [steps][ranks][phases]
for i, name in enumerate(names):
    assert abs(per[:, :, i].max(axis=1).mean() - r["phases_s"][name]) < 1e-9, name
# Ranks take turns: what all of them did one after another, and planning, fill most of the step and are no more than it.
planner, wait = per[:, :, names.index("planner")], per[:, :, names.index("launch_wait")]
own = per.sum(axis=2) - planner - wait
done = own.sum(axis=1) + planner.max(axis=1)
assert (done <= step * (1 + 1e-9)).all() and (done > step / 2).all(), (done, step)
# A rank waits while the others of its process have their turns.
assert (wait > 0).all() and numpy.allclose(wait, step[:, None] - own, rtol=1e-6), (wait, step, own)
EOF2
}

@test "passes repeat: the same digests in each, others for another seed" {
    "${replay[@]}" "${small[@]}" --policy 'static,lrmoe[keep=0.25]' --repeat 2 --digest --json >out.json
    "${replay[@]}" "${small[@]}" --policy 'static,lrmoe[keep=0.25]' --order policies --threads 2 --digest --json >order.json
    "${replay[@]}" "${small[@]}" --policy static --seed 2 --digest --json >seed.json
    "$python" - <<'EOF2'
import json
a, b, c = (json.load(open(f)) for f in ("out.json", "order.json", "seed.json"))
assert a["settings"]["order"] == "steps" and b["settings"]["order"] == "policies"
a, b, c = (x["settings"]["digests"] for x in (a, b, c))
assert [x["policy"] for x in a] == ["static", "lrmoe[keep=0.25]"]
for x, y in zip(a, b):
    digests = x["sha256"]
    assert len(digests) == 4 and digests[:2] == digests[2:] and digests[0] != digests[1], x
    assert x["policy"] == y["policy"] and digests[:2] == y["sha256"], (x, y)
assert a[0]["sha256"][0] != c[0]["sha256"][0] and a[0]["sha256"][0] != a[1]["sha256"][0]
EOF2
}

@test "recomputation and fp32 change memory, not what is verified" {
    "${replay[@]}" "${small[@]}" --policy static --recompute full --json >full.json
    "${replay[@]}" "${small[@]}" --policy static --json >none.json
    "${replay[@]}" "${small[@]}" --policy static --type f32 --json >f32.json
    "$python" - <<'EOF2'
import json
full, none, f32 = (json.load(open(f))["runs"][0] for f in ("full.json", "none.json", "f32.json"))
assert full["peak_memory_bytes"] < none["peak_memory_bytes"] < f32["peak_memory_bytes"]
assert full["dispatch_bytes"] > none["dispatch_bytes"] and f32["dispatch_bytes"] == 2 * none["dispatch_bytes"]
EOF2
}

@test "a trace of counts is replayed, and said to be" {
    "$mizan" trace synth -q --load hot-rank --ranks 4 --experts 16 --layers 2 --steps 2 --tokens 256 --top-k 2 --micro-batches 2 --kind counts \
        -o counts.h5
    cat >config.json <<'EOF2'
{"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
 "num_key_value_heads": 4, "num_local_experts": 16, "num_experts_per_tok": 2, "vocab_size": 1000}
EOF2
    run "$mizan" replay --trace counts.h5 --model config.json --policy static -q
    echo "$output"
    [ "$status" -eq 0 ]
    [[ $output == *"pairs were dealt to tokens"* ]]
}

warmup_of() { # OPTION...: as the result has it
    "${replay[@]}" --policy static --json "$@" >warmup.json
    "$python" -c 'import json; r = json.load(open("warmup.json")); print(r["settings"]["warmup"], r["runs"][0]["steps"])'
}

@test "the whole window is run first unless that is long, or what is asked for" {
    [ "$(warmup_of "${small[@]}")" = "2 2" ]
    [ "$(warmup_of "${small[@]}" --steps 1)" = "1 1" ]
    [ "$(warmup_of "${small[@]}" --warmup 0)" = "0 2" ]
    [ "$(warmup_of "${small[@]}" --warmup 1)" = "1 2" ]
    [ "$(warmup_of "${small[@]}" --warmup 9)" = "2 2" ]
    "$mizan" trace synth -q --load hot-rank --ranks 8 --experts 64 --layers 16 --steps 18 --tokens 128 --top-k 8 --kind counts -o long.h5
    [ "$(warmup_of --trace long.h5 --hidden 64 --inter 32 --layers 1 --steps 0)" = "16 18" ]
}

@test "sizes for a CPU are chosen and said, unless given" {
    run --separate-stderr "$mizan" replay --trace "$example" --model olmoe-1b-7b --policy static --steps 1 --warmup 0
    echo "$stderr"
    [ "$status" -eq 0 ]
    [[ $stderr == *"sizes for a CPU: --hidden "* ]]
}

@test "a prediction must be there and be one; its digest is kept" {
    fails 2 "nothing.h5" "${replay[@]}" "${small[@]}" --prediction nothing.h5
    echo '{}' >empty.json
    fails 2 "--prediction" "${replay[@]}" "${small[@]}" --prediction empty.json
    "$mizan" sim --scope layers --trace "$example" --model olmoe-1b-7b --cluster a100-80gb:1x8 --policy static "${small[@]}" -o p.h5 >/dev/null
    "${replay[@]}" "${small[@]}" --policy static --prediction p.h5 --json >out.json
    grep -q '"prediction_digest": "sha256/2:' out.json
    fails 2 "--prediction p.h5: the files do not belong together: policy symi is in the measurement alone" "${replay[@]}" "${small[@]}" --policy static,symi --prediction p.h5
    "$mizan" sim --scope layers --trace "$example" --model olmoe-1b-7b --cluster a100-80gb:1x8 --policy symi,static \
        "${small[@]}" -o both.h5 >/dev/null
    fails 2 "policy static is in the prediction alone" "${replay[@]}" "${small[@]}" --policy symi --prediction both.h5
    # whatever a check would refuse afterwards, before the first step
    "${replay[@]}" "${small[@]}" --policy static -o m.h5 >/dev/null
    other() { # WHAT OPTION...
        local what=$1
        shift
        fails 2 "$what" "${replay[@]}" "${small[@]}" --policy static --repeat 1000000 "$@"
    }
    other "first file is a measurement" --prediction m.h5
    other "settings.steps is 2 in the prediction, 1 in the measurement" --prediction p.h5 --steps 1
    other "model.hidden is 64 in the prediction, 128 in the measurement" --prediction p.h5 --hidden 128
    other "settings.seed is 1 in the prediction, 2 in the measurement" --prediction p.h5 --seed 2
    other "--type f32" --prediction p.h5 --type f32
    "$mizan" trace synth -q --load hot-rank --ranks 8 --experts 64 --layers 16 --steps 2 --tokens 128 --top-k 8 -o other.h5
    other "trace." --prediction p.h5 --trace other.h5
    "$mizan" sim --scope layers --trace "$example" --model olmoe-1b-7b --cluster a100-80gb:1x8 --policy static "${small[@]}" --json >thin.json
    other "write it with --output, or with --json --detail" --prediction thin.json
}

@test "bad input is one line" {
    fails 2 "--trace is missing" "$mizan" replay
    fails 2 "--model is missing" "$mizan" replay --trace "$example"
    fails 2 "did you mean \"static\"?" "${replay[@]}" "${small[@]}" --policy statik
    fails 2 "--transport pigeon" "${replay[@]}" "${small[@]}" --transport pigeon
    fails 2 "cluster a100-80gb:1x8 has 8 ranks; pass --cluster with 4 GPUs" "${replay[@]}" "${small[@]}" --ranks 4 --cluster a100-80gb:1x8
    fails 2 "a replay cannot do that" "${replay[@]}" "${small[@]}" --policy ideal
    fails 2 "a replay cannot do that" "${replay[@]}" "${small[@]}" --policy laer
    # known before the work, which would take hours
    fails 2 "nowhere/out.h5" timeout 60 "${replay[@]}" "${small[@]}" --repeat 1000000 -o nowhere/out.h5
    fails 2 "layers" "${replay[@]}" --layers 99
    # which of its slots are too few depends on the load
    "$mizan" trace synth -q --load empty --ranks 4 --experts 16 --top-k 2 --layers 2 --tokens 64 --sequence 8 --steps 3 -o empty.h5
    sed 's/"num_experts": 64/"num_experts": 16/; s/"num_experts_per_tok": 8/"num_experts_per_tok": 2/; s/"num_hidden_layers": 16/"num_hidden_layers": 2/' \
        "$root/sim/model/configs/olmoe-1b-7b.json" >config.json
    fails 2 "choose optimizer=replicated" "$mizan" replay -q --trace empty.h5 --model config.json --hidden 16 --inter 16 --policy 'eplb[lag=0]'
    rm empty.h5 config.json
    # more than any machine has, said before any of it is asked for
    fails 2 "GiB are free: give smaller --hidden" "${replay[@]}" --hidden 262144 --inter 262144 --layers 2 --steps 1
    "$python" - "${replay[@]}" <<'EOF2'
import re, subprocess, sys
# 64 experts of 2 layers, weights and gradients: two bytes more of either
more = 2 * 2 * 64 * 2 * 3 * 262144 ** 2 / 2 ** 30
need = {}
for type in ("bf16", "f32"):
    r = subprocess.run(sys.argv[1:] + ["--hidden", "262144", "--inter", "262144", "--layers", "2", "--steps", "1", "--type", type], capture_output=True, text=True)
    need[type] = float(re.search(r"take ([\d.]+) GiB here", r.stderr)[1])
assert abs(need["f32"] - need["bf16"] - more) < 1, (need, more)
EOF2
    fails 2 "--policy" "${replay[@]}" "${small[@]}" --policy 'static,'
    MIZAN_REPLAY_FAULT=kill:nowhere:0:0 fails 2 "not kill, hang or corrupt" "${replay[@]}" "${small[@]}"
    only_files
}

@test "what is not replayed as it is meant is said in a warning" {
    run --separate-stderr "${replay[@]}" "${small[@]}" --policy 'static,lrmoe[keep=0.5,scope=global],lrmoe[keep=0.5,score=sample]'
    echo "$stderr"
    [ "$status" -eq 0 ]
    [[ $stderr == *"lrmoe[keep=0.5,scope=global]: scores do not travel to the experts"* ]]
    [[ $stderr != *sample* ]] # drawn, as it is meant
    [[ $stderr != *static* ]]
}

@test "what the machine lacks is one line and exit code 3" {
    if [ ! -e /dev/nvidia0 ]; then
        fails 3 "--backend cuda" "${replay[@]}" "${small[@]}" --backend cuda
        fails 3 "--transport nccl" "${replay[@]}" "${small[@]}" --transport nccl
    fi
    mkdir alone
    ln "$mizan" alone/mizan 2>/dev/null || cp "$mizan" alone/mizan
    fails 3 "needs Open MPI" env MIZAN_DATA="$root" LD_LIBRARY_PATH= alone/mizan "${replay[@]:1}" "${small[@]}" --transport mpi
}

@test "memory that is short anywhere is one line and leaves nothing" {
    local n=1 ended=0 text
    while [ "$n" -lt 100000 ]; do
        run --separate-stderr env MIZAN_REPLAY_FAULT="oom:$n:0" "${replay[@]}" --hidden 64 --inter 32 --layers 1 --steps 1 --warmup 0 \
            --policy 'lrmoe[keep=0.5]' --digest
        [ "$status" -ne 2 ] || { ended=$n && break; }
        text="oom:$n: exit code $status; stdout: $output; stderr: $stderr"
        [ "$status" -eq 4 ] && [ -z "$output" ] && [[ $stderr == "mizan: replay: "*"no memory for"*"rank"* ]] &&
            [ "$(printf '%s\n' "$stderr" | wc -l)" -eq 1 ] || { echo "$text" && false; }
        n=$((n + (n < 40 ? 3 : 17)))
    done
    echo "allocations: below $ended: $stderr"
    [ "$ended" -gt 50 ]
    [[ $stderr == *"did not happen: rank 0's process had fewer than $ended allocations for policy lrmoe[keep=0.5]" ]]
    only_files
}

# corrupted PHASE POLICY [OPTION...]: verification ends the run, and says where and by how much.
corrupted() {
    local phase=$1 policy=$2
    shift 2
    MIZAN_REPLAY_FAULT="corrupt:$phase:0:0" fails 1 "policy $policy, step 0: verification failed in step 0" "${replay[@]}" --hidden 64 \
        --inter 32 --layers 3 --steps 1 --warmup 0 --policy "$policy" "$@"
    [[ $stderr =~ "times the error allowed)"|"times as much)"|"its owner's on rank "[0-9]+" "[-0-9.] ]]
}

@test "a corrupted message of whatever moves between ranks is caught by verification" {
    local phase policy seed
    for phase in dispatch combine backward_dispatch backward_combine gradient_reduce; do
        corrupted $phase 'lrmoe[keep=0.5]'
        corrupted $phase ultraep --recompute full
    done
    for policy in ultraep symi lplb 'eplb[lag=0,optimizer=replicated]'; do
        corrupted replica_reduce "$policy"
        corrupted replica_reduce "$policy" --type f32
    done
    corrupted weight_move ultraep
    # weights of a layer that are charged to the whole step: those of the layer that is looked at, whichever a seed makes it
    for seed in 1 2 3 4 5; do
        corrupted weight_move symi --seed "$seed"
    done
    corrupted weight_move lplb
    [[ $stderr == *": its copy's weight of "* ]]
    MIZAN_REPLAY_FAULT=corrupt:count_exchange:0:0 fails 2 "layer 0: rank 0 has " "${replay[@]}" "${small[@]}" --layers 1 --policy static --warmup 0
    [[ $stderr == *"the trace counts "* ]]
}

@test "an update that is done twice is caught by verification, whatever the optimizer keeps" {
    local what
    while IFS='|' read -r policy optimizer type what; do
        corrupted optimizer "$policy" --optimizer "$optimizer" --type "$type"
        [[ $stderr == *"after the optimizer's step the $what of "* ]]
    done <<'EOF2'
static|adamw|bf16|second moment
symi|adamw|bf16|second moment
eplb[lag=0,optimizer=replicated]|adamw|f32|second moment
lrmoe[keep=0.5]|adamw-bf16|bf16|second moment
static|lion|bf16|first moment
symi|lion[master=fp32]|bf16|first moment
static|skewadam[experts=momentum]|bf16|first moment
static|muon[iterations=3]|bf16|first moment
EOF2
}

@test "a fault that did not happen ends the run with one line" {
    local fault
    for fault in corrupt:weight_move:0:0 corrupt:replica_reduce:0:0 corrupt:dispatch:0:3 kill:attention:0:0 hang:score:0:0 kill:experts:0:2; do
        MIZAN_REPLAY_FAULT=$fault fails 2 "did not happen: of 2 steps executed" "${replay[@]}" "${small[@]}" --policy static --warmup 0 -o out.h5
    done
    MIZAN_REPLAY_FAULT=corrupt:optimizer:0:9 fails 2 "step 9 had no optimizer" "${replay[@]}" "${small[@]}" --policy static
    MIZAN_REPLAY_FAULT=oom:1000000:7 fails 2 "rank 7's process had fewer than 1000000 allocations for policy static" \
        "${replay[@]}" "${small[@]}" --policy static,symi
    MIZAN_REPLAY_FAULT=corrupt:experts:0:0 fails 2 "nothing travels in experts" "${replay[@]}" "${small[@]}" --policy static
    only_files
}

@test "a fault that verification cannot find is refused" {
    local optimizer
    for optimizer in adafactor skewadam 'skewadam[master=fp32]'; do
        MIZAN_REPLAY_FAULT=corrupt:optimizer:0:0 fails 2 "compares nothing of the updates of --optimizer $optimizer" \
            "${replay[@]}" "${small[@]}" --policy static --optimizer "$optimizer" --type bf16
    done
}

@test "a process that hung and goes on ends as if nothing had been" {
    MIZAN_REPLAY_FAULT=hang:experts:0:0 "${replay[@]}" "${small[@]}" --policy static --json >out 2>err 3>&- &
    local pid=$! state=
    for _ in {1..300}; do
        state=$(ps -o stat= -p $pid)
        [[ $state == [RSD]* ]] || break
        sleep 0.1
    done
    [[ $state == T* ]]
    kill -CONT $pid
    for _ in {1..300}; do
        state=$(ps -o stat= -p $pid) || break
        [[ $state == [RSD]* ]] || break
        sleep 0.1
    done
    [[ $state != T* ]] || { kill -KILL $pid && false; } # a second time
    wait $pid
    cat err
    [ ! -s err ]
    [ -s out ]
}

interrupted() { # interrupted PID SECONDS: it says so with its exit code
    local code=0
    sleep "$2"
    kill -INT "$1"
    wait "$1" || code=$?
    cat err
    [ "$code" -eq 130 ]
}

@test "an interrupt leaves the result of the completed steps" {
    "${replay[@]}" --hidden 64 --inter 32 --layers 2 --steps 2 --repeat 2000 --policy static --json -v >out.json 2>err &
    interrupted $! 4
    "$python" -c 'import json; assert json.load(open("out.json"))["runs"][0]["steps"] >= 1'
}

@test "an interrupt between policies keeps those that are done, and names the first that is left out" {
    "${replay[@]}" --hidden 64 --inter 32 --layers 1 --steps 1 --repeat 300 --order policies --policy 'static,symi,ultraep,static,symi,ultraep' \
        --json >out.json 2>err &
    interrupted $! 3
    "$python" - <<'EOF2'
import json, re
runs = json.load(open("out.json"))["runs"]
assert 1 <= len(runs) < 6 and all(r["steps"] == 300 for r in runs[:-1]) and runs[-1]["steps"] >= 1
left = ["static", "symi", "ultraep"][len(runs) % 3]
assert re.search(f"of {len(runs)} of 6 policies, those from {left} on are left out", open("err").read())
EOF2
}

@test "one policy after another needs the memory of one" {
    for order in steps policies; do
        "${replay[@]}" "${small[@]}" --policy static,static,static --order $order --json >$order.json
    done
    "$python" - <<'EOF2'
import json
steps, policies = (json.load(open(f"{o}.json"))["settings"]["reserved_bytes"] for o in ("steps", "policies"))
assert steps == 3 * policies > 0, (steps, policies)
assert json.load(open("steps.json"))["settings"]["device_bytes"] is None
EOF2
}

@test "faults that could not happen are refused" {
    for fault in kill:experts:8:0 oom:0:1 kill:experts:99999999999:0 oom:1; do
        export MIZAN_REPLAY_FAULT=$fault
        fails 2 "MIZAN_REPLAY_FAULT" "${replay[@]}" "${small[@]}"
    done
}
