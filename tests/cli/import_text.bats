#!/usr/bin/env bats
# mizan trace import of text formats: files that tests/traces/make_text.py writes from the formats'
# descriptions, compared with what it says they hold; and the ways in which such files are bad.

load common

setup() { enter_tmpdir; }

make() { "$python" "$root/tests/traces/make_text.py" "$@"; }

# takes FORMAT ARGUMENT...: the import says FORMAT, the trace is sound and holds what it must.
takes() {
    local format=$1
    shift
    run --separate-stderr "$mizan" trace import "$@" -o t.h5
    echo "exit code $status; stderr: $stderr"
    [ "$status" -eq 0 ]
    [ -z "$output" ]
    [[ $stderr == *"importing as $format:"* ]]
    "$mizan" trace check t.h5
    make check t.h5
}

# bad TEXT ARGUMENT...: refused with one line that holds TEXT, and nothing is written.
bad() {
    local text=$1 before
    shift
    before=$(ls -A)
    fails 2 "$text" "$mizan" trace import -q "$@" -o bad.h5
    [ "$(ls -A)" = "$before" ]
}

note() { "$python" -c 'import h5py, sys; print(h5py.File("t.h5")["run"].attrs["import_notes"].decode())'; }

@test "Megatron router trace" {
    make megatron_router
    takes megatron-route router_trace_rank1.jsonl router_trace_rank0.jsonl --experts 8
    [[ $stderr == *"8 rows left out: lines of multi-token prediction"* ]]
    [[ $(note) == *"layers=0,2; ids within a token=as routed"* ]]
    bad "pass --experts" router_trace_rank0.jsonl
    bad "two files of rank 0" router_trace_rank0.jsonl router_trace_rank0.jsonl --experts 8
    bad "top-2 in the file, but --top-k 3" router_trace_rank0.jsonl --experts 8 --top-k 3
    bad "is not below the number of experts" router_trace_rank0.jsonl --experts 2
    good=router_trace_rank0.jsonl
    head -c 1500 $good >cut.jsonl
    bad "cut.jsonl: line" cut.jsonl --experts 8
    sed '2s/"num_tokens": 5/"num_tokens": 6/' $good >a.jsonl
    bad 'a.jsonl: line 2: 5 rows of top-2, not 6' a.jsonl --experts 8
    sed '2s/"layer": 2/"layer": "two"/' $good >b.jsonl
    bad 'b.jsonl: line 2: "layer" is not a whole number' b.jsonl --experts 8
    sed '2s/"layer": 2, //' $good >c.jsonl
    bad 'c.jsonl: line 2: no member "layer"' c.jsonl --experts 8
    sed '1s/"step": 3/"step": 9/' $good >d.jsonl
    bad "d.jsonl: line 2: step 3 after step 9" d.jsonl --experts 8
    sed '4d' $good >e.jsonl
    bad "micro-batch 1, rank 0: 1 of 2 layers" e.jsonl --experts 8
    echo '{"full_text": "x", "original_prompt": "y"}' >router_trace_rank7.jsonl
    bad "no router_data" router_trace_rank7.jsonl --experts 8
    bad "does not look like format megatron-route" -f megatron-route router_trace_rank7.jsonl --experts 8
}

@test "Megatron router trace of pipeline stages" {
    make megatron_router_stages
    takes megatron-route router_trace_rank?.jsonl --experts 8 --layer-offsets 0:0,2:3
    [[ $(note) == *"layers=0,2,3,5"* ]]
    bad "the same number of ranks" router_trace_rank[012].jsonl --experts 8 --layer-offsets 0:0,2:3
    bad "'0:0,2' is not RANK:NUMBER" router_trace_rank?.jsonl --experts 8 --layer-offsets 0:0,2
    sed -i 's/"layer": 2/"layer": 1/' router_trace_rank[23].jsonl
    bad "pass --layer-offsets" router_trace_rank?.jsonl --experts 8
}

@test "Megatron router trace with logits" {
    make megatron_router_logits
    bad "pass --scores softmax-chosen" router_trace_rank?.jsonl
    takes megatron-route router_trace_rank?.jsonl --scores softmax-chosen
    "$mizan" trace import -q router_trace_rank?.jsonl --scores none -o none.h5
    truncate -s 800 logits_rank1.bin
    bad "of a file of 800: it is truncated" router_trace_rank?.jsonl --scores softmax-all
    rm logits_rank1.bin
    bad "logits_rank1.bin, which cannot be read" router_trace_rank?.jsonl --scores softmax-all
}
