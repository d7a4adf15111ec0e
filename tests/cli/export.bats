#!/usr/bin/env bats
# mizan trace export: each format read by an independent script, imported again where an importer exists,
# and replayed by SimGrid where it is installed.

load common

setup() { enter_tmpdir; }

synth() { # synth FILE [OPTION...]: 3 layers, 8 experts, 4 ranks, 2 steps of 2 micro-batches of 32 tokens
    local file=$1
    shift
    "$mizan" trace synth -q --layers 3 --experts 8 --top-k 2 --ranks 4 --tokens 32 --sequence 16 --steps 2 \
        --micro-batches 2 --hidden 64 "$@" -o "$file"
}

export_as() { # export_as FORMAT OUTPUT ARGUMENT...: what it says ends up in $stderr
    local format=$1 output=$2
    shift 2
    run --separate-stderr "$mizan" trace export --format "$format" "$@" -o "$output"
    echo "exit code $status; stderr: $stderr"
    [ "$status" -eq 0 ]
    [ -z "$output" ] || [ -e "$output" ]
}

# calls.py: the calls of a trace as {(step, micro-batch, rank, layer): (ids [tokens, k], weights or None)}.
reader() {
    cat >calls.py <<'END'
import h5py
import numpy as np


def calls(path):
    f = h5py.File(path)
    pairs = np.concatenate(([0], np.cumsum(f["calls/pairs"][:])))
    k = f["model"].attrs["top_k"]
    weight = f["pairs/weight"] if "weight" in f["pairs"] else None
    found = {}
    for i, key in enumerate(zip(*(f["calls/" + n][:].tolist() for n in ("step", "micro_batch", "rank", "layer")))):
        part = slice(pairs[i], pairs[i + 1])
        found[key] = (f["pairs/expert"][part].reshape(-1, k), None if weight is None else weight[part].reshape(-1, k))
    return found


def rows(path):  # token-major [T, L, k] in the order of (step, micro-batch, rank)
    found = calls(path)
    layers = 1 + max(key[3] for key in found)
    keys = sorted({key[:3] for key in found})
    return [np.concatenate([np.stack([found[key + (l,)][i] for l in range(layers)], 1) for key in keys]) for i in (0, 1)]
END
}

@test "npy: arrays are the trace's, and import gives them back" {
    reader
    synth t.h5
    export_as npy out t.h5
    [[ $stderr == *"npy does not carry: steps; micro-batches; source ranks"* ]]
    [[ $stderr == *"48 calls, 512 tokens, 3072 pairs"* ]]
    [ "$(ls out | xargs)" = "ids.npy sequences.csv weights.npy" ]
    "$mizan" trace import -q out/ids.npy --weights out/weights.npy --sequences out/sequences.csv --experts 8 \
        --phase train -o back.h5
    "$mizan" trace check back.h5
    "$python" - <<'EOF'
import h5py, numpy as np
from calls import rows
ids, weights = rows("t.h5")
assert (np.load("out/ids.npy") == ids).all() and np.load("out/ids.npy").dtype == np.uint8
assert (np.load("out/weights.npy") == weights).all() and weights.dtype == np.float32
back = rows("back.h5")
assert (back[0] == ids).all() and (back[1] == weights).all()
t, b = h5py.File("t.h5"), h5py.File("back.h5")
assert (t["sequences/tokens"][:] == b["sequences/tokens"][:]).all()
table = np.loadtxt("out/sequences.csv", delimiter=",", skiprows=1, dtype=int)
assert (table[:, 0] == np.arange(32) * 16).all() and (table[:, 2] == t["sequences/domain"][:]).all()
EOF
    export_as npy one t.h5 --first-step 1 --steps 1
    "$python" -c '
import numpy as np
assert (np.load("one/ids.npy") == np.load("out/ids.npy")[256:]).all()
assert open("one/sequences.csv").read().splitlines()[1].startswith("0,16,")'
}

@test "npy: more than 256 experts, no weights, tokens outside sequences, a token axis out of order" {
    "$python" - <<'EOF'
import h5py, numpy as np
f = h5py.File("t.h5", "w")
f.attrs.update(format="mizan-trace", format_version=1)
f.create_group("model").attrs.update(layers=2, experts=1000, top_k=3)
f.create_group("run").attrs.update(kind="pairs", phase="train", step="iteration", ranks=2)
def put(name, data, dtype):
    f.create_dataset(name, data=np.asarray(data, dtype), chunks=(64,), maxshape=(None,), fletcher32=True)
columns = dict(step=[4] * 4, micro_batch=[0] * 4, layer=[0, 0, 1, 1], rank=[0, 1, 0, 1], token_begin=[70, 5, 70, 5],
               tokens=[2, 4, 2, 4], pairs=[6, 12, 6, 12])
for name, data in columns.items():
    put("calls/" + name, data, "<i8")
put("pairs/expert", np.arange(36) * 7 + 300, "<u2")
put("sequences/token_begin", [6, 70], "<i8")
put("sequences/tokens", [3, 2], "<i8")
EOF
    "$mizan" trace check t.h5
    export_as npy out t.h5
    [[ $stderr == *"1 rows belong to no sequence"* ]]
    "$python" - <<'EOF'
import numpy as np
ids = np.load("out/ids.npy")
assert ids.dtype == np.dtype("<u2") and ids.shape == (6, 2, 3)
p = np.arange(36) * 7 + 300
first, second = p[:18].reshape(6, 3), p[18:].reshape(6, 3) # layers; rank 0 comes first
assert (ids[:, 0] == first).all() and (ids[:, 1] == second).all()
assert open("out/sequences.csv").read() == "first_row,num_tokens\n0,2\n3,3\n"
EOF
    [ "$(ls out | xargs)" = "ids.npy sequences.csv" ]
}

@test "megatron-jsonl: one file per rank, and import gives the calls back" {
    reader
    synth t.h5
    export_as megatron-jsonl out t.h5
    [[ $stderr == *"does not carry: gate weights; bounds of sequences"* ]]
    "$python" - <<'EOF'
import json
from calls import calls
found, seen = calls("t.h5"), 0
for rank in range(4):
    count = {}
    for line in map(json.loads, open(f"out/router_trace_rank{rank}.jsonl")):
        assert line["stage"] == "pre_dispatch" and line["block"] == "decoder" and line["rank"] == rank
        m = count[line["step"], line["layer"]] = count.get((line["step"], line["layer"]), -1) + 1
        ids = found[line["step"], m, rank, line["layer"]][0]
        assert line["top_indices"] == ids.tolist() and line["num_tokens"] == len(ids) and line["topk"] == 2
        seen += 1
assert seen == len(found)
EOF
    "$mizan" trace import -q out/router_trace_rank?.jsonl --experts 8 --phase train -o back.h5
    "$mizan" trace check back.h5
    "$python" - <<'EOF'
import h5py
a, b = h5py.File("t.h5"), h5py.File("back.h5")
for name in "step", "micro_batch", "layer", "rank", "tokens", "pairs":
    assert (a["calls/" + name][:] == b["calls/" + name][:]).all(), name
assert (a["pairs/expert"][:] == b["pairs/expert"][:]).all()
EOF
}

@test "megatron-jsonl: a rank that is absent from a micro-batch, from a step, and altogether" {
    "$python" - <<'EOF'
import h5py, numpy as np
f = h5py.File("t.h5", "w")
f.attrs.update(format="mizan-trace", format_version=1)
f.create_group("model").attrs.update(layers=1, experts=4, top_k=1)
f.create_group("run").attrs.update(kind="pairs", phase="train", step="iteration", ranks=4)
rows = [(0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 2, 0), (5, 0, 1), (6, 0, 0), (6, 0, 2)] # step, micro-batch, rank: two tokens each
for name, data in dict(step=[r[0] for r in rows], micro_batch=[r[1] for r in rows], layer=[0] * 7, rank=[r[2] for r in rows],
                       token_begin=range(0, 14, 2), tokens=[2] * 7, pairs=[2] * 7).items():
    f.create_dataset("calls/" + name, data=np.asarray(data, "<i8"), chunks=(64,), maxshape=(None,), fletcher32=True)
f.create_dataset("pairs/expert", data=np.arange(14, dtype="u1") % 4, chunks=(64,), maxshape=(None,), fletcher32=True)
EOF
    "$mizan" trace check t.h5
    export_as megatron-jsonl out t.h5
    "$python" - <<'EOF'
import json
lines = lambda rank: [(l["step"], sum(l["top_indices"], [])) for l in map(json.loads, open(f"out/router_trace_rank{rank}.jsonl"))]
assert lines(0) == [(0, [0, 1]), (0, []), (0, [2, 3]), (6, [2, 3])] # [2, 3] of step 0 must be the third micro-batch
assert lines(1) == [(0, [2, 3]), (0, [0, 1]), (5, [0, 1])]
assert lines(2) == [(0, []), (6, [0, 1])]
assert lines(3) == [(0, [])]
EOF
    "$mizan" trace import -q out/* --experts 4 --phase train -o back.h5
    "$mizan" trace info --json --loads-only back.h5 | grep -q '"ranks": 4'
}

@test "sglang-json: counts of both kinds of trace, per step and summed" {
    for kind in pairs counts; do
        synth t.h5 --kind $kind
        export_as sglang-json steps.json t.h5
        export_as sglang-json sum.json t.h5 --sum
        "$mizan" trace import -q steps.json --top-k 2 --phase train -o back.h5
        "$mizan" trace check back.h5
        "$python" - $kind <<'EOF'
import json, sys, h5py, numpy as np
f = h5py.File("t.h5")
step, layer, pairs = (f["calls/" + n][:] for n in ("step", "layer", "pairs"))
want = np.zeros((2, 3, 8), int)
if sys.argv[1] == "counts":
    np.add.at(want, (step, layer), f["counts"][:])
else:
    np.add.at(want, (np.repeat(step, pairs), np.repeat(layer, pairs), f["pairs/expert"][:]), 1)
assert json.load(open("steps.json")) == {"logical_count": want.tolist()}
assert json.load(open("sum.json")) == {"logical_count": want.sum(0).tolist()}
assert (h5py.File("back.h5")["counts"][:].reshape(2, 3, 8) == want).all()
EOF
    done
}

# again FORMAT FILES OPTION...: imports FILES (a glob) with the options, exports, imports what came out: the two traces are the
# same byte for byte, so every dataset and attribute is, and both are sound.
again() {
    local format=$1 files=$2
    shift 2
    rm -rf a.h5 b.h5 out
    "$mizan" trace import -q $files "$@" -o a.h5
    "$mizan" trace check -q a.h5
    export_as $format out a.h5
    if [ $format = npy ]; then
        set -- "${@/weights?.npy/out/weights.npy}"
        set -- "${@/bounds.csv/out/sequences.csv}"
        files=out/ids.npy
    elif [ -d out ]; then
        files=out/*
    else
        mv out out.json && files=out.json
    fi
    "$mizan" trace import -q $files "$@" -o b.h5
    cmp a.h5 b.h5
}

@test "import, export and import again: the same trace" {
    "$python" - <<'END'
import json
import numpy as np
rng = np.random.default_rng(3)
def tokens(n, experts, k):
    return np.argsort(-rng.random((n, experts)), -1)[:, :k]
for name, experts, k in ("ids8", 8, 2), ("ids1000", 1000, 3):
    np.save(name, np.stack([tokens(300, experts, k) for l in range(3)], 1).astype("<u2"))
weight = np.sort(rng.random((300, 3, 2)), -1)[..., ::-1]
np.save("weights4", (weight / weight.sum(-1, keepdims=True)).astype("<f4"))
np.save("weights2", weight.astype("<f2"))
open("bounds.csv", "w").write("first_row,num_tokens,dataset\n0,100,law\n100,50,code\n150,140,law\n")
for rank in range(3):
    with open(f"router_trace_rank{rank}.jsonl", "w") as f:
        for step, batch in [(3, 0), (3, 1), (7, 0), (7, 1), (7, 2)][:5 - rank]: # ranks with fewer micro-batches
            n = int(rng.integers(1, 40))
            for layer in range(3):
                print(json.dumps(dict(step=step, stage="pre_dispatch", block="decoder", layer=layer, rank=rank, num_tokens=n,
                                      topk=2, top_indices=tokens(n, 8, 2).tolist())), file=f)
loads = lambda *shape: np.stack([np.bincount(tokens(50, 8, 2).ravel(), minlength=8) for i in range(np.prod(shape))]).reshape(*shape, 8)
json.dump(dict(logical_count=loads(4, 3).tolist()), open("steps.json", "w"))
json.dump(dict(logical_count=loads(3).tolist()), open("sum.json", "w"))
END
    facts=(--phase train --name m --hidden 64 --intermediate 32 --source s --licence l)
    again npy ids8.npy --experts 8 --weights weights4.npy --sequences bounds.csv "${facts[@]}"
    again npy ids8.npy --experts 8 --weights weights2.npy --sequences bounds.csv --half "${facts[@]}"
    again npy ids8.npy --experts 9 "${facts[@]}" --phase decode
    again npy ids1000.npy --experts 1000 --sequences bounds.csv "${facts[@]}"
    again megatron-jsonl "router_trace_rank?.jsonl" --experts 8 "${facts[@]}"
    again sglang-json steps.json --top-k 2 "${facts[@]}"
    again sglang-json sum.json --top-k 2 "${facts[@]}"
    # cmp can tell: another fact, another trace.
    "$mizan" trace import -q out.json --top-k 2 "${facts[@]}" --name other -o c.h5
    run cmp b.h5 c.h5
    [ "$status" -eq 1 ]
}

@test "import, export and import again: recorded traces" {
    traces=${MIZAN_TRACES:-$root/../shared/traces}
    gpt=$traces/gpt-oss-20b smart=$traces/smartmoe-training-history
    [ -d "$gpt" ] && [ -d "$smart" ] || skip "no $traces (set MIZAN_TRACES)"
    xz -dc "$gpt/weights.npy.xz" >weights2.npy
    cp "$gpt/sequences.csv" bounds.csv
    again npy "$gpt/ids.npy.xz" --experts 32 --weights weights2.npy --sequences bounds.csv --half --deflate 1 --phase decode
    "$mizan" trace import -q "$smart"/counts_iter_layer_rank_microbatch_expert.u16.npy.xz --top-k 2 --deflate 1 -o smart.h5
    export_as sglang-json counts.json smart.h5 --steps 40
    "$mizan" trace import -q counts.json --top-k 2 --phase train -o back.h5
    export_as sglang-json again.json back.h5
    cmp counts.json again.json
    "$python" - "$smart" <<'END'
import io, json, lzma, sys
import h5py, numpy as np
with lzma.open(sys.argv[1] + "/counts_iter_layer_expert.u32.npy.xz") as f:
    counts = np.load(io.BytesIO(f.read()))[:40]
assert (np.array(json.load(open("counts.json"))["logical_count"]) == counts).all()
assert (h5py.File("back.h5")["counts"][:].reshape(counts.shape) == counts).all()
END
}

@test "nccl-alltoallv: bytes between ranks of one call" {
    reader
    synth t.h5
    export_as nccl-alltoallv matrix t.h5 --first-step 1 --micro-batch 1 --layer 2
    [[ $stderr == *"NCCL_TESTS_ALLTOALLV_MATRIX_FILE=matrix"* ]]
    export_as nccl-alltoallv two t.h5 --ranks 2 --hidden 100 --element-bytes 1
    for step in 0 1; do for batch in 0 1; do for layer in 0 1 2; do
        export_as nccl-alltoallv matrix.$step.$batch.$layer t.h5 --first-step $step --micro-batch $batch --layer $layer
    done; done; done
    cmp matrix matrix.1.1.2
    "$python" - <<'EOF'
import numpy as np
from calls import calls
found = calls("t.h5")
assert len(found) == 2 * 2 * 4 * 3
for (step, batch, rank, layer), (ids, _) in found.items():
    m = np.loadtxt(f"matrix.{step}.{batch}.{layer}", dtype=int)
    assert m.shape == (4, 4) and (m[rank] == np.bincount(ids.ravel() // 2, minlength=4) * 64 * 2).all()
two = np.loadtxt("two", dtype=int)
assert two.shape == (2, 2) and two.sum() == 4 * 32 * 2 * 100
owners = np.bincount(np.concatenate([found[0, 0, r, 0][0].ravel() for r in range(4)]) // 4, minlength=2)
assert (two.sum(0) == owners * 100).all()
EOF
}

@test "smpi-ti: dispatch and combine, and SimGrid replays it" {
    reader
    synth t.h5
    export_as smpi-ti ti t.h5
    [ "$(cat ti/replay)" = "$PWD/ti/actions" ]
    "$python" - <<'EOF'
import itertools
import numpy as np
from calls import calls
found = calls("t.h5")
lines = [line.split() for line in open("ti/actions")]
assert [l[1] for l in lines] == ["init"] * 4 + ["alltoallv"] * (2 * 2 * 3 * 2 * 4) + ["finalize"] * 4
assert [int(l[0]) for l in lines] == [0, 1, 2, 3] * (len(lines) // 4)
at = 4
for step, batch, layer in itertools.product(range(2), range(2), range(3)):
    m = np.stack([np.bincount(found[step, batch, r, layer][0].ravel() // 2, minlength=4) for r in range(4)]) * 128
    for matrix in m, m.T: # dispatch, combine
        for rank in range(4):
            sent, received = matrix[rank], matrix[:, rank]
            assert list(map(int, lines[at][2:])) == [sent.sum(), *sent, received.sum(), *received]
            at += 1
EOF
    command -v smpirun >/dev/null || skip "no smpirun (package libsimgrid-dev): the trace was not replayed"
    cat >platform.xml <<'EOF'
<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1"><cluster id="c" prefix="n" suffix="" radical="0-3" speed="1Gf" bw="10GBps" lat="1us"/></platform>
EOF
    printf 'n%d\n' 0 1 2 3 >hosts
    run timeout 60 smpirun -np 4 -platform platform.xml -hostfile hosts --log=smpi_replay.thresh:verbose -replay ti/replay
    [ "$status" -eq 0 ]
    [[ $output == *"Simulation time"* ]]
    [ "$(grep -c ' alltoallv ' <<<"$output")" -eq 96 ]
}

@test "perfetto: counters of both kinds of trace against numpy" {
    cat >counters.py <<'END'
import json, sys, h5py, numpy as np
f, out = h5py.File(sys.argv[1]), json.load(open("counters.json"))
ranks, first, steps, times = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5])
step, layer, pairs, tokens = (f["calls/" + n][:] for n in ("step", "layer", "pairs", "tokens"))
layers, experts, k = (int(f["model"].attrs[n]) for n in ("layers", "experts", "top_k"))
load = np.zeros((step.max() + 1, layers, experts), int)
if "counts" in f:
    np.add.at(load, (step, layer), f["counts"][:])
else:
    np.add.at(load, (np.repeat(step, pairs), np.repeat(layer, pairs), f["pairs/expert"][:]), 1)
assert out["otherData"]["schema"] == "mizan-trace-counters/1" and out["otherData"]["ranks"] == ranks
names = {e["pid"]: e["args"]["name"] for e in out["traceEvents"] if e["name"] == "process_name"}
assert names == {0: "steps", **{l + 1: f"MoE layer {l}" for l in range(layers)}}
have = {}
for e in out["traceEvents"]:
    if e["ph"] == "C":
        key = e["pid"], e["name"], e["ts"]
        assert key not in have and list(e["args"]) == ["value"]
        have[key] = e["args"]["value"]
want = {}
for i, s in enumerate(range(first, first + steps)):
    ts = times[i]
    want[0, "step", ts] = s
    want[0, "tokens", ts] = tokens[(step == s) & (layer == 0)].sum()
    if "steps" in f and len(f["steps/step"]):
        want[0, "loss, nat/token", ts], want[0, "wall time, s", ts] = f["steps/loss"][s], f["steps/wall_time"][s]
        want[0, "learning rate", ts] = f["steps/learning_rate"][s]
    for l in range(layers):
        x, n = load[s, l], tokens[(step == s) & (layer == l)].sum()
        p = x / max(x.sum(), 1)
        want[l + 1, "pairs", ts] = x.sum()
        if "counts" in f:
            want[l + 1, "dropped pairs", ts] = n * k - x.sum()
        if x.sum() == 0:
            continue
        want[l + 1, "experts: max/mean", ts] = x.max() / x.mean()
        want[l + 1, "experts: entropy / log E", ts] = -(p[p > 0] * np.log(p[p > 0])).sum() / np.log(experts)
        want[l + 1, "experts: share of the busiest", ts] = p.max()
        want[l + 1, "experts: share below 0.1 x mean", ts] = (x < 0.1 * x.mean()).mean()
        if ranks > 1:
            r = np.bincount(np.arange(experts) * ranks // experts, x, ranks)
            want[l + 1, "ranks: max/mean", ts] = r.max() / r.mean()
assert have.keys() == want.keys(), have.keys() ^ want.keys()
for key in want:
    assert abs(have[key] - want[key]) <= 1e-8 * max(1, abs(want[key])), (key, have[key], want[key])
END
    for kind in pairs counts; do
        synth t.h5 --kind $kind
        export_as perfetto counters.json t.h5
        [[ $stderr == *"ui.perfetto.dev; time: 1 ms per step number"* ]]
        "$python" counters.py t.h5 4 0 2 '[0, 1000]'
    done
    export_as perfetto counters.json t.h5 --first-step 1 --ranks 3
    "$python" counters.py t.h5 3 1 1 '[0]'
    # Dropped pairs, a layer without any, and recorded wall times.
    "$python" - <<'EOF'
import h5py, numpy as np
f = h5py.File("d.h5", "w")
f.attrs.update(format="mizan-trace", format_version=1)
f.create_group("model").attrs.update(layers=2, experts=5, top_k=2)
f.create_group("run").attrs.update(kind="counts", phase="train", step="iteration", ranks=1)
def put(name, data, dtype):
    f.create_dataset(name, data=np.asarray(data, dtype), chunks=(8,) + np.shape(data)[1:],
                     maxshape=(None,) + np.shape(data)[1:], fletcher32=True)
columns = dict(step=[0, 0, 1, 1], micro_batch=[0] * 4, layer=[0, 1, 0, 1], rank=[0] * 4, token_begin=[0, 0, 9, 9],
               tokens=[9, 9, 4, 4], pairs=[17, 12, 8, 0])
for name, data in columns.items():
    put("calls/" + name, data, "<i8")
put("counts", [[9, 8, 0, 0, 0], [4, 4, 4, 0, 0], [4, 1, 1, 1, 1], [0] * 5], "<u4")
for name, data in dict(step=[0, 1], loss=[2.5, 2.25], learning_rate=[1e-3, 5e-4], wall_time=[0.25, 0.5]).items():
    put("steps/" + name, data, "<i8" if name == "step" else "<f8")
EOF
    "$mizan" trace check d.h5
    export_as perfetto counters.json d.h5
    [[ $stderr == *"time: recorded wall times of steps"* ]]
    "$python" counters.py d.h5 1 0 2 '[0, 250000]'
}

@test "what a format cannot hold is said, and nothing is written" {
    synth t.h5
    synth counts.h5 --kind counts
    synth nohidden.h5 --hidden 0
    synth one.h5 --ranks 1
    "$mizan" trace cut -q t.h5 --steps 1 --deflate 0 -o cut.h5
    mkdir there
    before=$(ls -A | xargs)
    x() { fails 2 "$1" "$mizan" trace export -q "${@:2}"; }
    x "holds counts only; sglang-json takes it" -f npy counts.h5 -o out
    x "holds counts only" -f megatron-jsonl counts.h5 -o out
    x "pass --hidden H" -f nccl-alltoallv nohidden.h5 -o out
    x "recorded on one rank, which sends nothing: pass --ranks R" -f smpi-ti one.h5 -o out
    x "9 ranks for 8 experts" -f smpi-ti t.h5 --ranks 9 -o out
    x "no layer 3 of micro-batch 0" -f nccl-alltoallv t.h5 --layer 3 -o out
    x "no step from --first-step 2 on: there are 2" -f npy t.h5 --first-step 2 -o out
    x "no step from --first-step 2 on: there are 2" -f perfetto t.h5 --first-step 2 -o out
    x "9 ranks for 8 experts" -f perfetto t.h5 --ranks 9 -o out
    x "no step from --first-step 2 on: there are 2" -f sglang-json t.h5 --first-step 2 -o out
    x "more than the 2147483647 that SMPI can hold" -f smpi-ti t.h5 --hidden 1000000000 -o out
    x "there: it exists" -f npy t.h5 -o there
    x "no/such: cannot make the folder" -f npy t.h5 -o no/such
    x "not a regular file" -f sglang-json t.h5 -o there
    x "did you mean 'npy'?" -f npz t.h5 -o out
    x "pass --format NAME" t.h5 -o out
    x "pass -o PATH" -f npy t.h5
    x "pass TRACE" -f npy -o out
    x "--layer: has no meaning with format npy" -f npy t.h5 --layer 0 -o out
    x "--sum: has no meaning with format perfetto" -f perfetto t.h5 --sum -o out
    x "--steps: has no meaning with format nccl-alltoallv" -f nccl-alltoallv t.h5 --steps 1 -o out
    x "would replace the input" -f sglang-json t.h5 -o t.h5
    x "would replace the input" -f sglang-json t.h5 -o ./t.h5
    x "missing.h5" -f npy missing.h5 -o out
    "$python" - <<'EOF'
import h5py
f = h5py.File("cut.h5", "r+")
f["pairs/expert"][700] = 200
EOF
    x "pairs/expert" -f npy cut.h5 -o out
    x "pairs/expert" -f megatron-jsonl cut.h5 -o out
    x "pairs/expert" -f sglang-json cut.h5 -o out
    [ "$(ls -A | xargs)" = "$before" ]
    [ "$("$mizan" trace export --list | awk '{ print $1 }' | xargs)" = "npy megatron-jsonl sglang-json nccl-alltoallv smpi-ti perfetto" ]
}

@test "bytes and times beyond what numbers hold; tokens of a trace with a variable k" {
    "$python" -c 'import numpy as np; np.save("h.npy", np.full((1, 1, 2, 1, 4), 2**32 - 2, np.uint32))'
    "$mizan" trace import -q h.npy --top-k 2 --hidden 1000000000 -o big.h5
    for format in nccl-alltoallv smpi-ti; do
        fails 2 "bytes are more than 64 bits count: check --hidden" "$mizan" trace export -f $format --element-bytes 16 big.h5 -o out
        [ ! -e out ]
    done
    "$python" - <<'END'
import h5py, numpy as np
f = h5py.File("big.h5", "r+")
del f["steps"]
for name, value in dict(step=np.array([1]), loss=np.ones(1), learning_rate=np.ones(1), wall_time=np.array([1e305])).items():
    f.create_dataset("steps/" + name, data=value, chunks=(8,), maxshape=(None,), fletcher32=True)
END
    export_as perfetto out big.h5
    [[ $stderr == *"time: 1 ms per step number"* ]]
    "$python" -c 'import json; json.load(open("out"))'
    export_as nccl-alltoallv matrix "$root/traces/conformance/variable-k.h5" --hidden 8
    [[ $stderr == *"wrote matrix: 2 calls, 5 tokens, 9 pairs"* ]]
}
