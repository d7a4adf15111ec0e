#!/usr/bin/env bats
# What an import is told: what a format does not carry is asked for by name, answers are kept in the trace, and answers that
# the recording contradicts are refused.

load common

setup() { enter_tmpdir; }

# make IMPORTER: the good files of its row of tests/traces/import_table.py; prints them.
make() { "$python" -B -c 'import sys; sys.path.insert(0, sys.argv[1])
import import_table as table
table.ROWS[sys.argv[2]].make(); print(*table.ROWS[sys.argv[2]].files)' "$root/tests/traces" "$1"; }

options() { "$python" -B -c 'import sys; sys.path.insert(0, sys.argv[1])
import import_table as table; print(*table.ROWS[sys.argv[2]].options)' "$root/tests/traces" "$1"; }

run_of() { "$python" -c 'import h5py, sys; print(h5py.File("t.h5")["run"].attrs.get(sys.argv[1], b"").decode())' "$1"; }

@test "the phase is asked for unless every recording of the format has the same" {
    fixed=" smartmoe-log:train smartmoe-npy:train gpt-oss-json:decode laer-csv:train megatron-tpe:train nf4-jsonl:decode imatrix:prefill "
    seen=0
    for importer in $("$mizan" trace import --list | awk '{ print $1 }'); do
        said=$(options "$importer" | sed -E 's/--phase [a-z]+//')
        mkdir "$importer"
        cd "$importer"
        files=$(make "$importer")
        echo "$importer: $files $said"
        if [[ $fixed =~ \ $importer:([a-z]*)\  ]]; then
            phase=${BASH_REMATCH[1]}
            "$mizan" trace import $files $said -o t.h5 2>said
            grep -q "^phase $phase, as of all $importer files (--phase says otherwise)$" said
            [ "$(run_of phase)" = "$phase" ]
            [[ $(run_of import_notes) == "phase=$phase by format"* ]]
            "$mizan" trace import --list | grep "^$importer .*; phase $phase"
        else
            fails 2 "the phase is not in $importer files" "$mizan" trace import -q $files $said -o t.h5
            [ ! -e t.h5 ]
            "$mizan" trace import --list | grep "^$importer .*; needs --phase"
        fi
        "$mizan" trace import $files $said --phase prefill -o t.h5 2>said
        [ "$(run_of phase)" = prefill ]
        [[ $(run_of import_notes) != *"by format"* ]]
        run grep "as of all" said
        [ "$status" -eq 1 ]
        cd ..
        seen=$((seen + 1))
    done
    [ "$seen" -eq "$("$python" -B -c 'import sys; sys.path.insert(0, sys.argv[1])
import import_table as table; print(len(table.ROWS))' "$root/tests/traces")" ]
}

@test "answers are kept in the trace, and what does not fit is marked" {
    make megatron-tpe
    "$mizan" trace import -q rank?.jsonl --top-k 2 --ep-size 2 --tokens 100 --layer-offsets 0:3 -o t.h5
    [[ $(run_of import_notes) == "phase=train by format; tokens=100; layers=3-4; ep size=2; layer offsets=0:3; counts="* ]]
    "$mizan" trace import -q rank?.jsonl --top-k 2 --ep-size 2 --dropped -o t.h5
    [[ $(run_of import_notes) == *"; dropped=yes; "* ]]
    long=0:3$(printf ',%d:3' {2..80})
    "$mizan" trace import -q rank?.jsonl --top-k 2 --ep-size 2 --layer-offsets "$long" -o t.h5
    [ "$(run_of import_notes)" = "phase=train by format; layers=3-4; ep size=2; ..." ]
    "$mizan" trace check t.h5
    # Nothing follows the mark, not even where nothing stands before it.
    "$python" -c 'import numpy as np; np.save("ids.npy", np.array([[[0, 0], [3, 1]]]))'
    "$mizan" trace import -q ids.npy --experts 8 --phase decode --dense-layers 0$(printf ',0%.0s' {1..150}) --filler-last no -o t.h5
    [ "$(run_of import_notes)" = "..." ]
}

@test "--normalized is held against the weights" {
    for importer in vllm-logger moe-balance gpt-oss-json; do
        files=$(make $importer) # weights 0.75 and 0.25
        "$mizan" trace import -q $files $(options $importer) --normalized yes -o t.h5
        "$mizan" trace import $files $(options $importer) --normalized no -o t.h5 2>said
        grep -q "warning: the weights of every token sum to 1, but --normalized no was said" said
        "$mizan" trace import $files $(options $importer) -o t.h5 2>said
        run grep "normalized" said
        [ "$status" -eq 1 ]
    done
    for importer in speculative:"log.jsonl: line 1: gating_probs" esft-text:"expert_weights_1.txt: line 1: token 0: the weights"; do
        files=$(make ${importer%%:*}) # weights that sum to less
        said=$(options ${importer%%:*})
        fails 2 "${importer#*:} sum to " "$mizan" trace import -q $files $said --normalized yes -o u.h5
        "$mizan" trace import $files $said --normalized no -o t.h5 2>said
        run grep "normalized" said
        [ "$status" -eq 1 ]
    done
    make moe-balance
    sed '4s/0.25\]\]/0.5]]/' log.jsonl >off.jsonl
    fails 2 "off.jsonl: line 4: topk_weights[2] sum to 1.25, not to 1" \
        "$mizan" trace import -q off.jsonl --experts 8 --phase decode --normalized yes -o u.h5
    # A later token than those that were looked at.
    "$python" -c 'import numpy as np
np.save("ids.npy", np.tile(np.array([3, 1], np.uint8), (9000, 2, 1)))
w = np.full((9000, 2, 2), 0.5, np.float32)
w[8500, 1, 0] = 0.75
np.save("w.npy", w)'
    said="--experts 4 --phase decode --weights w.npy"
    for more in "" "--normalized yes"; do
        fails 2 "w.npy: [8500, 1]: the weights sum to 1.25, not to 1" "$mizan" trace import -q ids.npy $said $more -o u.h5
    done
    "$mizan" trace import -q ids.npy $said --normalized no -o t.h5
    for name in vllm-logger moe-balance speculative; do
        make $name
        "$python" -c 'import json
for line in open("log.jsonl"):
    print(json.dumps({k: v for k, v in json.loads(line).items() if k not in ("topk_weights", "gating_probs")}))' >$name.jsonl
        "$mizan" trace import -q $name.jsonl $(options $name) -o t.h5
        "$python" -c 'import h5py; assert not h5py.File("t.h5")["model"].attrs["weights_normalized"]'
    done
    for name in vllm-logger.jsonl moe-balance.jsonl speculative.jsonl ids.npy; do
        for said in yes no; do
            fails 2 "$name: --normalized says something of weights, and there are none: leave it out" \
                "$mizan" trace import -q $name --experts 8 --phase decode --normalized $said -o u.h5
        done
    done
    [ ! -e u.h5 ]
}

@test "weights that do not sum to 1 are named by their place in their file" {
    "$python" -c 'import numpy as np
ids = np.tile(np.array([[0, 0], [3, 1], [2, 1]], np.uint8), (9, 1, 1)) # a dense layer
ids[1] = 0 # a filler
w = np.full(ids.shape, 0.5, np.float32)
w[:, 0] = w[1] = 0
w[3] = 0 # a token that was not weighed
np.save("ids.npy", ids)
np.save("w.npy", w)
w[7, 2, 0] = 0.75
np.save("off.npy", w)
bits = np.random.default_rng(3).dirichlet(np.ones(2), ids.shape[:2]).astype(np.float32).view(np.uint32) & 0xffff0000
np.save("bf16.npy", bits.view(np.float32))
assert 0.003 < abs(bits.view(np.float32).sum(2) - 1).max() < 0.0079'
    said="--experts 4 --phase decode --weights"
    for weights in w.npy bf16.npy; do
        for more in "" "--normalized yes"; do
            "$mizan" trace import -q ids.npy $said $weights $more -o t.h5
            "$python" -c 'import h5py; f = h5py.File("t.h5"); assert f["model"].attrs["weights_normalized"] and list(f["calls/tokens"]) == [8, 8]'
        done
    done
    fails 2 "trace: off.npy: [7, 2]: the weights sum to 1.25, not to 1" \
        "$mizan" trace import -q ids.npy $said off.npy --normalized yes -o u.h5
    printf '1\t2\t3\t4\t\t0.5\t0.5\t0.5\t0.5\n1\t2\t3\t4\t\t0.5\t0.5\t0\t0\n' >expert_weights_3.txt
    sed '2s/0$/0.25/' expert_weights_3.txt >expert_weights_7.txt
    fails 2 "trace: expert_weights_7.txt: line 2: token 1: the weights sum to 0.25, not to 1" \
        "$mizan" trace import -q expert_weights_3.txt expert_weights_7.txt --experts 8 --top-k 2 --phase decode -o u.h5
    make gpt-oss-json
    "$python" -c 'import json
r = json.load(open("prints.json"))
r["router_data"][1]["token_6"]["layer_1"]["selected_probs"] = [0.5, 0.25]
json.dump(r, open("more.json", "w"))'
    fails 2 "trace: more.json: router_data[1].token_6.layer_1: selected_probs sum to 0.75, not to 1" \
        "$mizan" trace import -q prints.json more.json --experts 8 -o u.h5
    [ ! -e u.h5 ]
}

@test "weights of rows that are left out are not held against --normalized yes" {
    make vllm-logger
    said="--experts 8 --phase decode --normalized yes"
    sed '2s/0.75/0.5/' log.jsonl >off.jsonl
    fails 2 "trace: off.jsonl: line 2: topk_weights sum to 0.75, not to 1" "$mizan" trace import -q off.jsonl $said -o u.h5
    "$mizan" trace import -q off.jsonl $said --skip-rows 2 -o t.h5
    # A profiling run: many rows like the first one.
    { for ((i = 0; i < 40; i++)); do sed -n 2p off.jsonl; done && sed 1d log.jsonl; } >profiled.jsonl
    "$mizan" trace import -q profiled.jsonl $said -o t.h5
    "$python" -c 'import h5py; assert list(h5py.File("t.h5")["calls/tokens"]) == [3, 3]'
    [ ! -e u.h5 ]
}

@test "an expert that is counted more often than there are tokens is refused" {
    echo '{"logical_count": [[[2, 1, 1], [1, 1, 2]], [[3, 1, 0], [2, 2, 0]]]}' >counts.json
    said="--phase decode --top-k 2"
    fails 2 "counts.json: step 1, micro-batch 0, layer 0, rank 0: expert 0 is counted 3 times, but there are 2 tokens" \
        "$mizan" trace import -q counts.json $said -o t.h5
    fails 2 "expert 0 is counted 3 times, but there are 2 tokens" "$mizan" trace import -q counts.json $said --tokens 2 -o t.h5
    "$mizan" trace import -q counts.json $said --tokens 3 -o t.h5
    "$mizan" trace import -q counts.json $said --dropped -o t.h5 # no fewer tokens than the fullest expert has
    "$python" -c 'import h5py; assert list(h5py.File("t.h5")["calls/tokens"]) == [2, 2, 3, 3]'
    rm t.h5
    "$python" -c 'import numpy as np; np.save("h.npy", np.array([1, 1, 2, 0, 3, 1, 0, 0], np.uint16).reshape(1, 1, 2, 1, 4))'
    fails 2 "h.npy: index 0: step 1, layer 0, rank 1, micro-batch 0: expert 0 is counted 3 times, but there are 2 tokens" \
        "$mizan" trace import -q h.npy --top-k 2 -o t.h5
    [[ $stderr == *", and none chooses an expert twice: check --top-k" ]]
    [ ! -e t.h5 ]
}

@test "a file that is given twice is refused, under whatever name" {
    make nf4-jsonl
    ln a.jsonl hard.jsonl
    ln -s a.jsonl soft.jsonl
    fails 2 "a.jsonl: given twice: give each file once (a copy of it if both are meant)" "$mizan" trace import -q a.jsonl a.jsonl -o t.h5
    for other in hard.jsonl soft.jsonl ./a.jsonl; do
        fails 2 "a.jsonl and $other are one file: give each file once (a copy of it if both are meant)" "$mizan" trace import -q a.jsonl $other -o t.h5
    done
    cp a.jsonl b.jsonl
    "$mizan" trace import -q a.jsonl b.jsonl -o t.h5 # other sequences, as far as anyone can tell
    make npy-ids
    fails 2 "given twice" "$mizan" trace import -q ids.npy ids.npy --experts 8 --phase decode -o u.h5
    make gpt-oss-json
    fails 2 "given twice" "$mizan" trace import -q prints.json prints.json --experts 8 -o u.h5
    [ ! -e u.h5 ]
}

@test "what is concluded from a file is said and kept" {
    "$python" -c 'import json
json.dump(dict(router_data=[{"token_0": {f"layer_{l}": dict(selected_experts=[1, 0], selected_probs=[.5, .5]) for l in range(24)}}]),
          open("prints.json", "w"))'
    "$mizan" trace import prints.json -o t.h5 2>said
    grep -q "^taken for gpt-oss-20b with 32 experts, by its 24 layers (--experts says otherwise)$" said
    [[ $(run_of import_notes) == *"model=gpt-oss-20b, by its 24 layers"* ]]
    "$mizan" trace import prints.json --experts 32 -o t.h5 2>said
    run grep "taken for" said
    [ "$status" -eq 1 ]
    printf '%s\n' rank,method,model_name,layer,iter,token_num 0,a,x-e4k2,0,0,2 1,a,x-e4k2,0,0,6 >loads.csv
    "$mizan" trace import loads.csv -o t.h5 2>said
    grep -q "within blocks of 2 ranks; top-k by the model's name (--top-k says otherwise)$" said
    [[ $(run_of import_notes) == *"top-k=2 by the model's name; sources=dealt evenly within blocks of 2 ranks" ]]
    "$mizan" trace import loads.csv --top-k 2 -o t.h5 2>said
    grep -q "within blocks of 2 ranks$" said
}
