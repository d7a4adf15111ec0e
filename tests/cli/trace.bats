#!/usr/bin/env bats
# mizan trace: info, check, synth, import, cut from the command line.

load common

setup() { enter_tmpdir; }

synth() { # synth FILE [OPTION...]: a small trace
    local file=$1
    shift
    "$mizan" trace synth -q --layers 2 --experts 8 --top-k 2 --ranks 4 --tokens 64 --sequence 16 --steps 3 \
        "$@" -o "$file"
}

@test "synth, check and info go together" {
    synth t.h5 --load hot-rank
    only_files t.h5
    run --separate-stderr "$mizan" trace check t.h5
    [ "$status" -eq 0 ]
    [ "$output" = "t.h5: sound" ]
    [ -z "$stderr" ]
    run --separate-stderr "$mizan" trace info t.h5
    [ "$status" -eq 0 ]
    [ -z "$stderr" ]
    [[ $output == *"synthetic-hot-rank: 2 MoE layers, 8 experts, top-k 2"* ]]
    [[ $output == *"24 calls, 768 tokens, 3072 pairs, 48 sequences"* ]]
    [ "$(printf '%s\n' "$output" | awk '{ if (length > max) max = length } END { print max }')" -le 100 ]
}

@test "every load that is listed can be made, in both kinds, and is sound" {
    loads=$("$mizan" trace synth --list | awk '{ print $1 }')
    [ "$(echo $loads | wc -w)" -eq 9 ]
    for load in $loads; do
        for kind in pairs counts; do
            synth "$load-$kind.h5" --load "$load" --kind "$kind"
            "$mizan" trace check "$load-$kind.h5"
        done
    done
}

@test "the same seed gives the same bytes, another seed others" {
    synth a.h5 --seed 5
    synth b.h5 --seed 5
    synth c.h5 --seed 6
    cmp a.h5 b.h5
    ! cmp -s a.h5 c.h5
}

@test "more steps only add steps" {
    synth short.h5
    "$mizan" trace synth -q --layers 2 --experts 8 --top-k 2 --ranks 4 --tokens 64 --sequence 16 --steps 5 -o long.h5
    "$python" - <<'EOF'
import h5py
a, b = h5py.File("short.h5"), h5py.File("long.h5")
n = len(a["pairs/expert"])
assert n * 5 == len(b["pairs/expert"]) * 3
for name in "pairs/expert", "pairs/weight":
    assert (a[name][:] == b[name][:n]).all()
EOF
}

@test "info --json is one object with the figures of the table" {
    synth t.h5 --load hot-rank
    "$mizan" trace info --json --ranks 4 t.h5 >info.json
    "$python" - <<'EOF'
import json, h5py, numpy as np
info = json.load(open("info.json"))
assert info["schema"] == "mizan-trace-info/1"
assert info["calls"] == 24 and info["tokens"] == 768 and info["pairs"] == 3072
f = h5py.File("t.h5")
layer = np.repeat(f["calls/layer"][:], f["calls/pairs"][:])
for row in info["layers"]:
    n = np.bincount(f["pairs/expert"][:][layer == row["layer"]], minlength=8)
    ranks = n.reshape(4, 2).sum(1)
    gini = abs(n[:, None] - n[None]).sum() / (2 * 8 * n.sum())
    assert abs(row["expert_max_over_mean"] - n.max() / n.mean()) < 1e-12
    assert abs(row["expert_cv"] - n.std() / n.mean()) < 1e-12
    assert abs(row["expert_gini"] - gini) < 1e-12
    assert abs(row["rank_max_over_mean"] - ranks.max() / ranks.mean()) < 1e-12
EOF
    "$mizan" trace info --json --from-step 1 --to-step 1 t.h5 | "$python" -c '
import json, sys
info = json.load(sys.stdin)
assert info["steps"] == 1 and info["first_step"] == info["last_step"] == 1'
    fails 2 "--ranks: 9 ranks for 8 experts" "$mizan" trace info --ranks 9 t.h5
}

@test "a file name with a line break stays one line, in tables as in messages" {
    name=$'two\nlines.h5'
    synth "$name"
    run --separate-stderr "$mizan" trace info --summary "$name"
    [ "${lines[0]}" = "two?lines.h5" ]
    run --separate-stderr "$mizan" trace check "$name"
    [ "$output" = "two?lines.h5: sound" ]
    run --separate-stderr "$mizan" trace cut "$name" -o t.h5
    [ "$stderr" = "wrote t.h5" ]
    run --separate-stderr "$mizan" trace cut t.h5 -o "$name"
    [ "$stderr" = "wrote two?lines.h5" ]
    fails 2 "two?lines.h5: nothing is left" "$mizan" trace cut --max-tokens 1 "$name" -o d.h5
}

@test "cut keeps what was asked for" {
    synth t.h5
    run --separate-stderr "$mizan" trace cut --first-step 1 --steps 1 --layers 1 --first-rank 2 t.h5 -o c.h5
    [ "$status" -eq 0 ]
    [ -z "$output" ]
    "$mizan" trace check c.h5
    "$python" - <<'EOF'
import h5py
a, b = h5py.File("t.h5"), h5py.File("c.h5")
assert list(b["calls/step"][:]) == [1, 1] and list(b["calls/rank"][:]) == [0, 1]
begin = (1 * 2 * 4 + 2) * 128 # one step of two layers and four ranks, then two ranks
assert (b["pairs/expert"][:] == a["pairs/expert"][begin:begin + 256]).all()
EOF
    fails 2 "" "$mizan" trace cut --first-step 9 t.h5 -o d.h5
    fails 2 "the output would replace the input" "$mizan" trace cut t.h5 -o t.h5
    ln -s t.h5 same.h5
    fails 2 "the output would replace the input" "$mizan" trace cut t.h5 -o same.h5
    rm same.h5
    fails 2 "t.h5: nothing is left: no tokens in what is asked for; take more steps" "$mizan" trace cut --max-tokens 1 t.h5 -o d.h5
    only_files c.h5 t.h5
}

@test "an import says which format it took and stores the answers" {
    "$python" - <<'EOF'
import numpy as np
rng = np.random.default_rng(1)
ids = np.stack([rng.permutation(8)[:2] for _ in range(300 * 3)]).reshape(300, 3, 2).astype(np.int16)
weights = rng.random((300, 3, 2), dtype=np.float32)
np.save("ids.npy", ids)
np.save("weights.npy", weights)
open("s.csv", "w").write("first_row,num_tokens,dataset\n0,100,a\n100,200,b\n")
EOF
    xz -k ids.npy
    gzip -k weights.npy
    run --separate-stderr "$mizan" trace import ids.npy.xz --weights weights.npy.gz --sequences s.csv --experts 8 \
        --phase prefill --name tiny --licence CC0-1.0 -o t.h5
    echo "$stderr"
    [ "$status" -eq 0 ]
    [ -z "$output" ]
    [[ $stderr == *"importing as npy-ids"* ]]
    [[ $stderr == *"3 calls, 300 tokens, 1800 pairs"* ]]
    "$mizan" trace check t.h5
    "$mizan" trace info --json t.h5 | "$python" -c '
import json, sys
facts = json.load(sys.stdin)["facts"]
assert facts["name"] == "tiny" and facts["phase"] == "prefill" and facts["licence"] == "CC0-1.0"
assert facts["experts"] == 8 and facts["top_k"] == 2 and not facts["weights_normalized"]'
    "$python" - <<'EOF'
import h5py, numpy as np
f, ids, weights = h5py.File("t.h5"), np.load("ids.npy"), np.load("weights.npy")
assert (f["pairs/expert"][:].reshape(3, 300, 2) == ids.transpose(1, 0, 2)).all()
assert (f["pairs/weight"][:].reshape(3, 300, 2) == weights.transpose(1, 0, 2)).all()
assert list(f["sequences/tokens"][:]) == [100, 200]
EOF
}

@test "bad imports are one line and write nothing" {
    printf '0:[[1, 1]]\n' >table_iter1_rank0.log
    printf 'nothing that is known\n' >text
    "$python" -c "
import numpy as np
np.save('f.npy', np.asfortranarray(np.zeros((4, 3, 2), np.int16)))
np.save('b.npy', np.zeros((4, 3, 2), '>i2'))
np.save('twice.npy', np.ones((4, 3, 2), np.int16))
np.save('ids.npy', np.zeros((4, 3, 2), np.int16))
np.save('turned.npy', np.tile(np.arange(2, dtype=np.int16), (4, 300, 1)))"
    head -c 140 ids.npy >cut.npy
    xz -k ids.npy
    head -c 60 ids.npy.xz >cut.npy.xz
    before=$(ls -A | xargs)
    fails 2 "pass --top-k" "$mizan" trace import -q table_iter1_rank0.log -o t.h5
    fails 2 "not in a format that is known" "$mizan" trace import -q text -o t.h5
    fails 2 "ascontiguousarray" "$mizan" trace import -q --format npy-ids --force --experts 4 --phase decode f.npy -o t.h5
    fails 2 "ascontiguousarray" "$mizan" trace import -q --experts 4 --phase decode f.npy -o t.h5
    fails 2 "big-endian" "$mizan" trace import -q --experts 4 --phase decode b.npy -o t.h5
    fails 2 "every row of every layer is zero" "$mizan" trace import -q --experts 4 --phase decode ids.npy -o t.h5
    fails 2 "axes must be tokens, layers, top_k" "$mizan" trace import -q --experts 4 --phase decode turned.npy -o t.h5
    fails 2 "stands twice in one token" "$mizan" trace import -q --experts 4 --phase decode twice.npy -o t.h5
    fails 2 "does not look like format laer-csv" "$mizan" trace import -q --format laer-csv ids.npy -o t.h5
    fails 2 "did you mean 'npy-ids'?" "$mizan" trace import -q --format npy-id ids.npy -o t.h5
    fails 2 "cut.npy" "$mizan" trace import -q --experts 4 --phase decode cut.npy -o t.h5
    fails 2 "cut.npy.xz" "$mizan" trace import -q --experts 4 --phase decode cut.npy.xz -o t.h5
    fails 2 "no output file" "$mizan" trace import -q --experts 4 --phase decode ids.npy
    fails 2 "no file to import" "$mizan" trace import -q -o t.h5
    fails 2 "would replace the input" "$mizan" trace import -q --experts 4 --phase decode ids.npy -o ./ids.npy
    fails 2 "would replace the input" "$mizan" trace import -q --experts 4 --phase decode ids.npy --weights cut.npy -o ./cut.npy
    fails 2 "would replace the input" "$mizan" trace import -q --experts 4 --phase decode ids.npy --sequences cut.npy -o ./cut.npy
    fails 2 "--ep-size: has no meaning with npy-ids files" "$mizan" trace import -q --experts 4 --phase decode --ep-size 2 ids.npy -o t.h5
    fails 2 "missing.npy" "$mizan" trace import -q --experts 4 --phase decode missing.npy -o t.h5
    fails 2 "no/such/place" "$mizan" trace synth -q --tokens 1 -o no/such/place/t.h5
    fails 2 "--top-k: 9" "$mizan" trace synth -q --experts 8 --top-k 9 -o t.h5
    fails 2 "did you mean 'rotating'?" "$mizan" trace synth -q --load rotatin -o t.h5
    fails 2 "did you mean 'synth'?" "$mizan" trace synt
    [ "$(ls -A | xargs)" = "$before" ]
}

@test "check lists what is wrong, on stdout, and exits with 2" {
    synth t.h5 --deflate 0
    "$python" - <<'EOF'
import h5py
f = h5py.File("t.h5", "r+")
f["pairs/expert"][5] = 200
f["pairs/weight"][7] = float("nan")
EOF
    run --separate-stderr "$mizan" trace check t.h5
    echo "$status $output $stderr"
    [ "$status" -eq 2 ]
    [[ $output == *"pairs/expert"* ]]
    [[ $output == *"pairs/weight"* ]]
    [[ $stderr == "mizan: trace: t.h5: this trace is wrong" ]]
    synth good.h5
    run --separate-stderr "$mizan" trace check good.h5 t.h5
    [ "$status" -eq 2 ]
    [[ $stderr == *"1 of 2 traces are wrong"* ]]
}

@test "the recorded traces import, where they are" {
    traces=${MIZAN_TRACES:-$root/../shared/traces}
    [ -d "$traces" ] || skip "no $traces (set MIZAN_TRACES)"
    csv=$traces/laer-moe-training-rank-tokens/token_analysis_backup.csv.xz
    fails 2 "FSDP mixtral-8x7b-e16k4" "$mizan" trace import -q "$csv" -o l.h5
    "$mizan" trace import -q "$csv" --method FSDP --model-name mixtral-8x7b-e16k4 -o l.h5
    "$mizan" trace info --json l.h5 | "$python" -c '
import json, sys
value = json.load(sys.stdin)["mean"]["call_rank_max_over_mean"]
assert abs(value - 1.7287845) < 1e-6, value'
}

@test "synth and import find an output that cannot be written before they read their input" {
    for command in "synth --like nowhere.h5" "import nowhere.jsonl"; do
        run "$mizan" trace $command -o missing/x.h5
        [ "$status" -eq 2 ]
        [[ $output == *"missing/x.h5: cannot write"* ]]
        run "$mizan" trace $command -o x.h5
        [ "$status" -eq 2 ]
        [[ $output == *"nowhere"* ]]
        [ -z "$(ls | grep x.h5)" ]
    done
}
