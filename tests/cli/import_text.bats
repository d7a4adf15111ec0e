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
    takes megatron-route router_trace_rank1.jsonl router_trace_rank0.jsonl --experts 8 --phase train
    [[ $stderr == *"8 rows left out: lines of multi-token prediction"* ]]
    [[ $(note) == *"layers=0,2; ids within a token=as routed"* ]]
    bad "pass --experts" router_trace_rank0.jsonl --phase train
    cp router_trace_rank0.jsonl again_rank0.jsonl
    bad "two files of rank 0" router_trace_rank0.jsonl again_rank0.jsonl --experts 8 --phase train
    bad "top-2 in the file, but --top-k 3" router_trace_rank0.jsonl --experts 8 --top-k 3 --phase train
    bad "is not below the number of experts" router_trace_rank0.jsonl --experts 2 --phase train
    good=router_trace_rank0.jsonl
    head -c 1500 $good >cut.jsonl
    bad "cut.jsonl: line" cut.jsonl --experts 8 --phase train
    sed '2s/"num_tokens": 5/"num_tokens": 6/' $good >a.jsonl
    bad 'a.jsonl: line 2: 5 rows of top-2, not 6' a.jsonl --experts 8 --phase train
    sed '2s/"layer": 2/"layer": "two"/' $good >b.jsonl
    bad 'b.jsonl: line 2: "layer" is not a whole number' b.jsonl --experts 8 --phase train
    sed '2s/"layer": 2, //' $good >c.jsonl
    bad 'c.jsonl: line 2: no member "layer"' c.jsonl --experts 8 --phase train
    sed '2s/"top_indices": \[\[[0-9]*, /"top_indices": [[/' $good >dropped.jsonl
    bad 'dropped.jsonl: line 2: top_indices[0] lists 1 expert ids, not 2: the choice after dropping' dropped.jsonl --experts 8 --phase train
    sed '1s/"step": 3/"step": 9/' $good >d.jsonl
    bad "d.jsonl: line 2: step 3 after step 9" d.jsonl --experts 8 --phase train
    sed '4d' $good >e.jsonl
    bad "micro-batch 1, rank 0: 1 of 2 layers" e.jsonl --experts 8 --phase train
    echo '{"full_text": "x", "original_prompt": "y"}' >router_trace_rank7.jsonl
    bad "no router_data" router_trace_rank7.jsonl --experts 8 --phase train
    bad "does not look like format megatron-route" -f megatron-route router_trace_rank7.jsonl --experts 8 --phase train
}

@test "Megatron router trace of pipeline stages" {
    make megatron_router_stages
    takes megatron-route router_trace_rank?.jsonl --experts 8 --layer-offsets 0:0,2:3 --phase train
    [[ $(note) == *"layers=0,2,3,5"* ]]
    bad "the same number of ranks" router_trace_rank[012].jsonl --experts 8 --layer-offsets 0:0,2:3 --phase train
    bad "'0:0,2' is not RANK:NUMBER" router_trace_rank?.jsonl --experts 8 --layer-offsets 0:0,2 --phase train
    sed -i 's/"layer": 2/"layer": 1/' router_trace_rank[23].jsonl
    bad "pass --layer-offsets" router_trace_rank?.jsonl --experts 8 --phase train
}

@test "Megatron router trace: a rank that begins after the first step" {
    line() { echo "{\"step\":$1,\"stage\":\"pre_dispatch\",\"block\":\"decoder\",\"layer\":$2,\"rank\":$3," \
        "\"num_tokens\":1,\"topk\":2,\"top_indices\":[[0,$4]]}"; }
    { line 2 0 0 3; line 2 1 0 4; } >router_trace_rank0.jsonl
    { line 1 0 1 5; line 1 1 1 6; line 2 0 1 7; line 2 1 1 1; } >router_trace_rank1.jsonl
    run "$mizan" trace import router_trace_rank?.jsonl --experts 8 --phase train -o t.h5
    [ "$status" -eq 0 ]
    [[ $output == *"6 calls, 3 tokens, 12 pairs"* ]]
    [[ $output == *"nothing where others did, 1 times (first rank 0 in step 1)"* ]]
    { line 1 0 0 3; line 1 1 0 4; line 2 0 0 3; line 2 1 0 4; } >router_trace_rank0.jsonl
    run "$mizan" trace import router_trace_rank?.jsonl --experts 8 --phase train -o t.h5
    [ "$status" -eq 0 ]
    [[ $output != *"nothing where others did"* ]]
    { line 1 2 1 5; line 1 3 1 6; } >router_trace_rank2.jsonl
    sed -i 's/"rank":1/"rank":2/' router_trace_rank2.jsonl
    bad "router_trace_rank0.jsonl and router_trace_rank2.jsonl record different layers" router_trace_rank?.jsonl --experts 8 --phase train
}

@test "Megatron router trace with logits" {
    make megatron_router_logits
    bad "pass --scores softmax-chosen" router_trace_rank?.jsonl --phase train
    takes megatron-route router_trace_rank?.jsonl --scores softmax-chosen --phase train
    "$mizan" trace import -q router_trace_rank?.jsonl --scores none --phase train -o none.h5
    truncate -s 800 logits_rank1.bin
    bad "of a file of 800: it is truncated" router_trace_rank?.jsonl --scores softmax-all --phase train
    make megatron_router_short logits
    for scores in softmax-chosen sigmoid; do
        bad "pass --scores softmax-all or none with --dropped" router_trace_rank?.jsonl --dropped --scores $scores --phase train
    done
    takes megatron-route router_trace_rank?.jsonl --dropped --scores softmax-all --phase train
    make megatron_router_logits
    rm logits_rank1.bin
    bad "logits_rank1.bin, which cannot be read" router_trace_rank?.jsonl --scores softmax-all --phase train
}

@test "Megatron router trace with padding and dropped pairs" {
    make megatron_router_short padding
    takes megatron-route router_trace_rank?.jsonl --experts 8 --phase train
    [[ $stderr == *"8 rows left out: tokens without an expert in any layer (padding)"* ]]
    make megatron_router_short dropped
    bad "lists 1 expert ids, not 2: the choice after dropping" router_trace_rank?.jsonl --experts 8 --phase train
    takes megatron-route router_trace_rank?.jsonl --experts 8 --dropped --phase train
    [[ $stderr == *"8 rows left out: tokens without an expert in any layer (padding)"* ]]
    [[ $(note) == *"pairs=after dropping; top-k before=2"* ]]
    # Whole rows that were dropped in one layer alone are no padding.
    sed 's/\[[0-9]\]/[]/g' -i router_trace_rank?.jsonl
    bad "token 0 has 0 of 2 experts, so pairs were dropped: pass --dropped" router_trace_rank?.jsonl --experts 8 --phase train
    "$mizan" trace import -q router_trace_rank?.jsonl --experts 8 --dropped --phase train -o empty.h5
    "$mizan" trace check empty.h5
}

@test "Megatron tokens per expert" {
    make megatron_tpe
    bad "pass --ep-size N" rank?.jsonl --top-k 2
    bad "pass --top-k" rank?.jsonl --ep-size 2
    takes megatron-tpe rank?.jsonl --top-k 2 --ep-size 2 --layer-offsets 0:0,4:2
    [[ $stderr == *"16 rows left out: lines of multi-token prediction"* ]]
    [[ $(note) == *"layers=0-3; ep size=2; layer offsets=0:0,4:2; counts=after dropping; sources=dealt evenly"* ]]
    # The same, with the places told: ranks 0 and 2 change theirs, so their experts do.
    "$mizan" trace import -q rank?.jsonl --top-k 2 --ep-size 2 --layer-offsets 0:0,4:2 \
        --ep-ranks 0:0,1:1,2:0,3:1,4:0,5:1,6:0,7:1 -o u.h5
    make check u.h5
    bad "place 2 of rank 1" rank?.jsonl --top-k 2 --ep-size 2 --ep-ranks 0:0,1:2,2:0,3:1,4:0,5:1,6:0,7:1
    bad "says nothing of rank 1" rank?.jsonl --top-k 2 --ep-size 2 --ep-ranks 0:0
    bad "the files of ranks 1, 3 are missing: with --ep-size 2" rank[02].jsonl --top-k 2 --ep-size 2
    bad "the files of ranks 3 are missing: with --ep-size 2" rank[012].jsonl --top-k 2 --ep-size 2
    bad "--experts 8, but 2 ranks with 3 experts each" rank?.jsonl --top-k 2 --ep-size 2 --experts 8
    cp rank0.jsonl trace0.jsonl
    bad "the rank must stand in the file's name" trace0.jsonl --top-k 2 --ep-size 1
    ok="--top-k 2 --ep-size 1"
    bad "no multiple of top-2" rank0.jsonl $ok
    head -c 100 rank0.jsonl >cut_rank0.jsonl
    bad "cut_rank0.jsonl: line 2: column" cut_rank0.jsonl $ok
    sed '1s/"tpe": \[\[[0-9]*/"tpe": [[-1/' rank0.jsonl >a_rank0.jsonl
    bad "a_rank0.jsonl: line 1: tpe[0]: entry 0 is not a count" a_rank0.jsonl $ok
    sed '1s/"iter": 100/"iter": "a"/' rank0.jsonl >b_rank0.jsonl
    bad 'b_rank0.jsonl: line 1: "iter" is not a whole number' b_rank0.jsonl $ok
    sed '2s/"tpe": \[\[[0-9]*, /"tpe": [[/' rank0.jsonl >c_rank0.jsonl
    bad "c_rank0.jsonl: line 2: tpe[0]: entry 0 does not have as many entries" c_rank0.jsonl $ok --dropped
    sed '2s/"layer": 1, //' rank0.jsonl >d_rank0.jsonl
    bad 'd_rank0.jsonl: line 2: no member "layer"' d_rank0.jsonl $ok --dropped
}

@test "Megatron tokens per expert after dropping" {
    make megatron_tpe_dropped
    bad "need --dropped or --tokens" rank?.jsonl --top-k 2 --ep-size 2 --layer-offsets 0:0,4:2
    takes megatron-tpe rank?.jsonl --top-k 2 --ep-size 2 --layer-offsets 0:0,4:2 --dropped
    "$mizan" trace import -q rank?.jsonl --top-k 2 --ep-size 2 --layer-offsets 0:0,4:2 --tokens 12 -o t12.h5
    "$python" -c 'import h5py; assert set(h5py.File("t12.h5")["calls/tokens"]) == {12}'
    bad "--tokens 3 at top-2 make no more than 6" rank?.jsonl --top-k 2 --ep-size 2 --tokens 3
}

@test "SGLang logical_count" {
    make sglang_json 3
    bad "pass --top-k" counts.json --phase decode
    bad "pass --phase" counts.json --top-k 2
    takes sglang-json counts.json --top-k 2 --phase decode
    [[ $stderr == *"9 rows left out: rows of zeros"* ]]
    [[ $(note) == *"layers=1,2,4"* ]]
    make sglang_json 1
    takes sglang-json counts.json --top-k 2 --phase prefill
    ok="--top-k 2 --phase decode"
    bad "6 experts in the file, but --experts 8" counts.json $ok --experts 8
    bad "no multiple of top-4" counts.json --top-k 4 --phase decode
    head -c 60 counts.json >cut.json
    bad "cut.json" cut.json $ok
    for text in '[1, 2]' '[]' '[[]]' '{}' '[[[]]]' '"a"'; do
        echo "{\"logical_count\": $text}" >a.json
        bad "logical_count is not" a.json $ok
    done
    echo '{"logical_count": [[1, 1], [2, -2]]}' >b.json
    bad "logical_count[1]: entry 1 is not a count" b.json $ok
    echo '{"logical_count": [[1, 1], [2, 2, 3]]}' >c.json
    bad "logical_count[1]: entry 0 does not have as many" c.json $ok
    echo '{"logical_count": [[1, 1], [2, 2]]}' >d.json
    bad "other tokens than in the layers before" d.json $ok
    echo '{"logical_count": [[0, 0], [0, 0]]}' >e.json
    bad "all counts are 0" e.json $ok
    echo '{"other": 1, "x": "\"logical_count\""}' >f.json
    bad "f.json" f.json -f sglang-json $ok
    echo '{"logical_count": [[1, 1]]}' >g.json
    bad "unlike the files before" counts.json g.json $ok
}

@test "grouped-nf4 recordings" {
    make nf4
    bad "a.jsonl: the number of experts is not in the file" a.jsonl b.jsonl
    takes nf4-jsonl a.jsonl b.jsonl --experts 7
    [[ $(note) == "phase=decode by format; layers=1-3; ids within a token=ascending" ]]
    "$python" -c 'import h5py; assert h5py.File("t.h5")["model"].attrs["name"] == b"tiny"'
    bad "is not below the number of experts" a.jsonl --experts 5
    bad "3 experts per token recorded, but --top-k 2" a.jsonl --experts 7 --top-k 2
    bad "3 experts per token recorded, the model's own top-k is 2" a.jsonl --experts 7 --native-k 2
    "$mizan" trace import -q a.jsonl b.jsonl --experts 7 --native-k 2 --top-k 3 -o u.h5
    head -n 5 a.jsonl >cut.jsonl
    bad "cut.jsonl: 4 tokens, but the meta line says 9: the file is truncated" cut.jsonl --experts 7
    "$mizan" trace import -q cut.jsonl --experts 7 --force -o v.h5
    head -c 500 a.jsonl >torn.jsonl
    bad "torn.jsonl: line" torn.jsonl --experts 7
    sed '4s/"2": \[[0-9]*/"2": ["x"/' a.jsonl >c.jsonl
    bad "c.jsonl: line 4: routed.2[0]: the expert id is not a whole number" c.jsonl --experts 7
    sed '3s/"step": 1/"step": 5/' a.jsonl >d.jsonl
    bad 'd.jsonl: line 3: "step" is not a whole number from 1 to 1' d.jsonl --experts 7
    sed '1s/"layers": 3, //' a.jsonl >e.jsonl
    bad 'e.jsonl: line 1: meta: no "layers"' e.jsonl --experts 7
    sed '1s/"layers": 3/"layers": 4/' a.jsonl >f.jsonl
    bad 'f.jsonl: line 2: "routed" has 3 layers, but meta says 4' f.jsonl --experts 7
    sed '3s/"1": /"9": /' a.jsonl >g.jsonl
    bad "g.jsonl: line 3: routed.1 does not list 3 expert ids" g.jsonl --experts 7
    sed '1s/"top_k": 3/"top_k": "3"/' a.jsonl >h.jsonl
    bad 'h.jsonl: line 1: meta: "top_k" is not a whole number' h.jsonl --experts 7
    make nf4 4 '{"n_experts": 7, "top_k_overridden": true}'
    bad "pass --native-k" a.jsonl
    make nf4 4 '{"n_experts": 7, "top_k_overridden": true, "top_k_native": 2}'
    bad "pass --top-k 4 to take all as chosen" a.jsonl
    takes nf4-jsonl a.jsonl b.jsonl --top-k 4
}

@test "recorded grouped-nf4 files, where they are" {
    traces=${MIZAN_TRACES:-$root/../shared/traces}/decode-traces
    [ -d "$traces" ] || skip "no $traces (set MIZAN_TRACES)"
    make nf4_recorded "$traces"/olmoe_{code,prose}.jsonl.xz
    takes nf4-jsonl "$traces"/olmoe_{code,prose}.jsonl.xz
    make nf4_recorded "$traces"/granite_prose.jsonl.xz
    bad "pass --experts" "$traces"/granite_prose.jsonl.xz
    takes nf4-jsonl "$traces"/granite_prose.jsonl.xz --experts 40
    make nf4_recorded "$traces"/gptoss_k16_prose.jsonl.xz
    bad "16 experts per token recorded, the model's own top-k is 4" "$traces"/gptoss_k16_prose.jsonl.xz
    takes nf4-jsonl "$traces"/gptoss_k16_prose.jsonl.xz --top-k 16
    make nf4_recorded "$traces"/qwen_prose.jsonl.xz
    takes nf4-jsonl "$traces"/qwen_prose.jsonl.xz
}

@test "vLLM routing logger" {
    make vllm_logger 100
    bad "pass --phase" log.jsonl --experts 8
    bad "pass --experts" log.jsonl --phase decode
    ok="--experts 8 --phase decode"
    takes vllm-logger log.jsonl $ok
    [[ $stderr == *"100 rows left out: 100 at the start (profiling), 0 of tokens that lack a layer"* ]]
    [[ $(note) == *"rows left out at the start=100; layers=2 of those up to 5"* ]]
    "$python" -c 'import h5py; a = h5py.File("t.h5")["model"].attrs; assert a["name"] == b"org/tiny" and a["weights_normalized"]'
    # A short run of equal rows may be real; --skip-rows says what is not.
    make vllm_logger 20
    takes vllm-logger log.jsonl $ok --skip-rows 20
    head -n -1 log.jsonl >short.jsonl
    "$mizan" trace import short.jsonl $ok --skip-rows 20 -o u.h5 2>warning
    grep -q "1 of tokens that lack a layer" warning
    head -n 101 <(make vllm_logger 100 && cat log.jsonl) >equal.jsonl
    bad "no row but the 100 equal ones" equal.jsonl $ok
    make vllm_logger 0
    bad "top-2 in the file, but --top-k 3" log.jsonl $ok --top-k 3
    bad "is not below the number of experts" log.jsonl --phase decode --experts 3
    cat log.jsonl log.jsonl >twice.jsonl
    bad "sequence r0, token 0, layer 3: recorded twice" twice.jsonl $ok
    head -c 700 log.jsonl >cut.jsonl
    bad "cut.jsonl: line" cut.jsonl $ok
    sed '3s/"topk_weights": \[/"topk_weights": [-/' log.jsonl >a.jsonl
    bad "a.jsonl: line 3: topk_weights[0] is not a number of at least 0" a.jsonl $ok
    sed '3s/, "topk_weights": .*/}/' log.jsonl >b.jsonl
    bad "b.jsonl: line 3: topk_weights does not list 2 weights" b.jsonl $ok
    sed '3s/"token_idx": [0-9]*, //' log.jsonl >c.jsonl
    bad 'c.jsonl: line 3: no member "token_idx"' c.jsonl $ok
    sed '3s/"route"/"rout"/' log.jsonl >d.jsonl
    bad 'd.jsonl: line 3: type "rout" is neither' d.jsonl $ok
    sed '3s/"req_id": "r[0-9]", //' log.jsonl >e.jsonl
    bad 'e.jsonl: line 3: "req_id" is missing' e.jsonl $ok
}

@test "speculative-moe log" {
    make speculative
    ok="--experts 8 --phase decode"
    bad "pass --phase" log.jsonl --experts 8
    bad "pass --experts" log.jsonl --phase decode
    takes speculative log.jsonl $ok
    "$python" -c 'import h5py; assert not h5py.File("t.h5")["model"].attrs["weights_normalized"]'
    cat log.jsonl log.jsonl >twice.jsonl
    bad 'sequence gsm/1, token 0, layer 0: recorded twice' twice.jsonl $ok
    head -c 700 log.jsonl >cut.jsonl
    bad "cut.jsonl: line" cut.jsonl $ok
    sed '3s/"experts": \[[0-9]*/"experts": [true/' log.jsonl >a.jsonl
    bad "a.jsonl: line 3: experts[0]: the expert id is not a whole number" a.jsonl $ok
    sed '3s/"dataset": "[a-z]*", //' log.jsonl >b.jsonl
    bad 'b.jsonl: line 3: no member "dataset"' b.jsonl $ok
    sed '3s/"problem_id": [0-9]*, //' log.jsonl >c.jsonl
    bad 'c.jsonl: line 3: "problem_id" is missing' c.jsonl $ok
    sed '3s/"gating_probs"/"probs"/' log.jsonl >d.jsonl
    bad "d.jsonl: line 3: gating_probs does not list 2 weights" d.jsonl $ok
    sed '3s/"experts": \[[0-9]*/"experts": [8/' log.jsonl >e.jsonl
    bad "e.jsonl: line 3: experts[0]: expert id 8 is not below" e.jsonl $ok
}

@test "moe-balance log" {
    make moe_balance
    ok="--experts 8 --phase prefill"
    bad "pass --phase" log.jsonl --experts 8
    bad "pass --experts" log.jsonl --phase decode
    takes moe-balance log.jsonl $ok
    [[ $(note) == "layers=1-2; ranks=highest source device + 1" ]]
    make moe_balance no
    takes moe-balance log.jsonl $ok
    head -c 700 log.jsonl >cut.jsonl
    bad "cut.jsonl: line 4: column" cut.jsonl $ok
    head -n 3 log.jsonl >short.jsonl
    bad "1 of 2 layers; the recording is incomplete" short.jsonl $ok
    sed '2s/"origin_rows": \[[0-9]*, /"origin_rows": [/' log.jsonl >a.jsonl
    bad "a.jsonl: line 2: 11 origin_rows for 12 tokens" a.jsonl $ok
    sed '2s/"origin_rows": \[[0-9]*/"origin_rows": [-1/' log.jsonl >b.jsonl
    bad "b.jsonl: line 2: origin_rows[0] is not a device" b.jsonl $ok
    sed '2s/"topk_experts": \[\[[0-9]*/"topk_experts": [["1"/' log.jsonl >c.jsonl
    bad "c.jsonl: line 2: topk_experts[" c.jsonl $ok
    sed '2s/"topk_experts": \[\[[0-9]*/"topk_experts": [[9/' log.jsonl >d.jsonl
    bad "expert id 9 is not below" d.jsonl $ok
    sed '2s/"batch_id": [0-9]*, //' log.jsonl >e.jsonl
    bad 'e.jsonl: line 2: no member "batch_id"' e.jsonl $ok
    cat log.jsonl log.jsonl >twice.jsonl
    bad "rank 0: recorded twice" twice.jsonl $ok
}

@test "routed experts in answers of SGLang" {
    make routed_sglang meta_info
    ok="--experts 300 --phase decode --layers 4 --top-k 3"
    bad "pass --phase" answers.json --experts 300
    bad "pass --experts" answers.json --phase decode
    bad "answer 1: 336 bytes of routed experts without a shape: pass --layers" answers.json --experts 300 --phase decode
    takes routed-json answers.json $ok
    [[ $stderr == *"14 rows left out: 13 of dense layers, 1 of filler tokens"* ]]
    [[ $(note) == "layers=3 from 1 to 3 of 4" ]]
    bad "no whole rows of 5 layers x top-3 x 4 bytes" answers.json --experts 300 --phase decode --layers 5 --top-k 3
    bad "is not from 0 to 99" answers.json --experts 100 --phase decode --layers 4 --top-k 3
    bad "14 rows for 8 tokens" answers.json $ok --id-bytes 2
    make routed_sglang meta_info 213 # ids whose base64 has all characters
    grep -q '[+]' answers.json
    grep -q / answers.json
    takes routed-json answers.json --experts 65000 --phase decode --layers 4 --top-k 3
    make routed_sglang sgl_ext
    takes routed-json answers.json $ok
    "$python" -c 'import h5py; assert h5py.File("t.h5")["model"].attrs["name"] == b"m"'
    # As many rows as tokens: whether the last one is a token must be told.
    sed 's/"completion_tokens": 7/"completion_tokens": 6/' answers.json >full.json
    bad "7 rows for 7 tokens, but the last token is never routed: pass --filler-last yes" full.json $ok
    "$mizan" trace import -q full.json $ok --filler-last no -o no.h5
    make check no.h5
    "$mizan" trace import -q full.json $ok --filler-last yes -o yes.h5
    "$python" -c 'import h5py; assert list(h5py.File("yes.h5")["sequences/tokens"]) == [6, 1, 5]'
    bad "'maybe' is neither yes nor no" full.json $ok --filler-last maybe
    head -c 500 answers.json >cut.json
    bad "cut.json" cut.json $ok
    sed 's/"routed_experts": "..../"routed_experts": "*!?,/' answers.json >a.json
    bad "a.json: answer 1: routed experts are not valid base64" a.json $ok
    sed '0,/"routed_experts"/s//"routed"/' answers.json >b.json
    bad "b.json: answer 1: no routed experts in it" b.json $ok
    sed 's/"routed_experts": ".*"/"routed_experts": 5/' answers.json >c.json
    bad "c.json: answer 1: routed experts are neither base64" c.json $ok
    echo '{"meta_info": {}, "routed_experts": [[[0, 0, 0], [0, 0, 0]]]}' >d.json
    bad "d.json: no row with experts" d.json --experts 9 --phase decode
    echo '{"meta_info": {}, "routed_experts": [[[0, 1], [2, 2]]]}' >e.json
    bad "row 0, layer 1: expert id 2 stands twice" e.json --experts 9 --phase decode
    echo '{"meta_info": {}, "routed_experts": [[[0, 1], [2, 3]], [[0, 1]]]}' >f.json
    bad "row 1 does not list 2 layers" f.json --experts 9 --phase decode
    echo '{"meta_info": {}, "routed_experts": [[[0], [4]], [[0], [0]]]}' >top1.json
    bad "layer 0: with one expert per token zeros may be expert 0 or a dense layer" top1.json --experts 9 --phase decode
    "$mizan" trace import -q top1.json --experts 9 --phase decode --dense-layers 0 -o one.h5
    "$python" -c 'import h5py; assert list(h5py.File("one.h5")["pairs/expert"]) == [4, 0]'
    "$mizan" trace import -q top1.json --experts 9 --phase decode --dense-layers none -o two.h5
    "$python" -c 'import h5py; assert list(h5py.File("two.h5")["pairs/expert"]) == [0, 0, 4, 0]'
    bad "is not none or a list of layers below 2" top1.json --experts 9 --phase decode --dense-layers 2
    echo '{"meta_info": {}, "routed_experts": [[[0, 1], [4, 5]], [[0, 1], [0, 0]]]}' >g.json
    bad "row 1: 1 of 2 layers have no experts" g.json --experts 9 --phase decode
}

@test "routed experts in answers of vLLM" {
    for form in npy shape lists; do
        make routed_vllm $form
        takes routed-json a.json b.json --experts 300 --phase prefill
    done
    make routed_vllm flat
    bad "pass --layers" a.json --experts 300 --phase prefill
    takes routed-json a.json b.json --experts 300 --phase prefill --layers 3 --top-k 3
    make routed_vllm shape
    sed 's/"shape": \[4, 3, 3\]/"shape": [5, 3, 3]/' a.json >c.json
    bad "shape [5, 3, 3] does not fit 72 bytes" c.json --experts 300 --phase prefill
    bad "rows of 3 layers x top-3, unlike --layers" a.json --experts 300 --phase prefill --layers 2
}

@test "ESFT text" {
    make esft
    ok="--experts 12 --top-k 3 --phase prefill"
    bad "pass --top-k" rank_0/expert_weights_1.txt --experts 12 --phase prefill
    bad "pass --experts" rank_0/expert_weights_1.txt --top-k 3 --phase prefill
    takes esft-text rank_*/*.txt $ok
    [[ $(note) == "layers=3 from 1 to 10" ]]
    bad "15 ids are no whole tokens of top-4" rank_*/*.txt --experts 12 --top-k 4 --phase prefill
    bad "is not below the number of experts" rank_*/*.txt --experts 6 --top-k 3 --phase prefill
    bad "every folder must have the same layers" rank_0/*.txt rank_1/*_{1,2}.txt $ok
    cp rank_0/expert_weights_1.txt rank_0/expert_weights_01.txt
    bad "layer 1 twice" rank_0/*_1.txt rank_0/*_01.txt $ok
    rm rank_0/expert_weights_01.txt
    cd rank_0
    cp expert_weights_1.txt good
    head -n 1 good >expert_weights_1.txt
    bad "expert_weights_1.txt has fewer lines than expert_weights_2.txt" expert_weights_*.txt $ok
    head -c 50 good >expert_weights_1.txt
    bad "expert_weights_1.txt: line 1: not as many weights as ids" expert_weights_*.txt $ok
    head -c 20 good >expert_weights_1.txt
    bad "expert_weights_1.txt: line 1: no two tabs" expert_weights_*.txt $ok
    sed '2s/^[0-9]*\t/x\t/' good >expert_weights_1.txt
    bad "line 2: token 0: id 'x' is not a whole number" -f esft-text --force expert_weights_*.txt $ok
    sed '1s/\t[0-9.e-]*$/\tnan/' good >expert_weights_1.txt
    bad "line 1: token 4: weight 'nan' is not a number" -f esft-text --force expert_weights_*.txt $ok
    sed '2d' good | cat - <(sed '1d' good | cut -f4-) >expert_weights_1.txt
    bad "expert_weights_1.txt: line 2: not as many weights as ids" expert_weights_*.txt $ok
    echo '{"meta": 1}' >expert_weights_1.txt
    bad "expert_weights_1.txt" expert_weights_*.txt $ok
    cp good weights.txt
    bad "the layer must stand in the file's name" -f esft-text --force weights.txt $ok
}

@test "tables of counts and shares" {
    make csv prob
    bad "pass --top-k" table.csv --phase train
    bad "prob holds shares; the number of tokens they are of is not in the file: pass --tokens" table.csv --top-k 2 --phase train
    takes counts-csv table.csv --top-k 2 --tokens 53 --phase train
    [[ $stderr == *"counts are shares of 53 tokens"* ]]
    [[ $(note) == "tokens=53; layers=1-2; column=prob; counts=shares of 53 tokens" ]]
    ok="--top-k 2 --tokens 53 --phase train"
    sed '3s/,[0-9.]*$/,0.9/' table.csv >a.csv
    bad "step 10, layer 1: shares sum to" a.csv $ok
    sed '3s/,[0-9.]*$/,much/' table.csv >b.csv
    bad "b.csv: line 3: prob is 'much', not a number" b.csv $ok
    sed '3s/,1,1,/,1,0,/' table.csv >c.csv
    bad "c.csv: line 3: expert 0 of layer 1 a second time in this step" c.csv $ok
    sed '3d' table.csv >d.csv
    bad "not every layer lists every expert" d.csv $ok
    sed '3s/,[0-9.]*$//' table.csv >e.csv
    bad "e.csv: line 3: the header has 4 columns" e.csv $ok
    sed '3s/^10,1,/10,one1x,/' table.csv >f.csv
    bad "f.csv: line 3: layer is 'one1x', not the number of a layer" f.csv $ok
    bad "line 6: expert 4, but --experts 4" table.csv $ok --experts 4
    head -n 20 table.csv | head -c -9 >cut.csv
    bad "cut.csv: line 20" cut.csv $ok
    printf 'step,layer,expert,prob\n0,0,0,1\n0,0,1,0\n' >g.csv
    bad "has a share of 1 of the pairs; at top-2 it cannot be more than 1/2" g.csv $ok
    printf 'step,layer,expert,prob\n' >h.csv
    bad "h.csv: no row" h.csv $ok
    make csv distr
    takes counts-csv table.csv $ok
    make csv epochs
    takes counts-csv table.csv --top-k 2 --phase train
    [[ $(note) == "step=epoch x 21 + step; layers=1-2; column=count" ]]
    bad "no multiple of top-3" table.csv --top-k 3 --phase train
    sed '2s/,[0-9]*$/,1.5/' table.csv >i.csv
    bad "line 2: 1.5 is not a whole number" i.csv --top-k 2 --phase train
    make csv domains
    bad "pass --phase" table.csv --top-k 2
    bad "choose with --method and --model-name one of: top2 m, top1 m" table.csv --top-k 2 --phase prefill
    takes counts-csv table.csv --top-k 2 --phase prefill --method top2
    bad "no row has --method top3 and --model-name (any)" table.csv --top-k 2 --phase prefill --method top3
}

@test "recorded counts of OLMoE and Mixtral, where they are" {
    csv=${MIZAN_TRACES:-$root/../shared/traces}/olmoe-mixtral-counts/expert_counts.csv
    [ -r "$csv" ] || skip "no $csv (set MIZAN_TRACES)"
    make csv_recorded "$csv" OLMoE-1B-7B-0924
    takes counts-csv "$csv" --top-k 8 --phase prefill --model-name OLMoE-1B-7B-0924 --method expert_counts
    make csv_recorded "$csv" Mixtral-8x7B-v0.1
    takes counts-csv "$csv" --top-k 2 --phase prefill --model-name Mixtral-8x7B-v0.1 --method expert_counts
}

@test "randomly damaged text files are one line, or still sound" {
    "$python" "$root/tests/traces/fuzz_text.py" "$(realpath "$mizan")" 12 5
}

@test "pipes and devices are refused at once, JSON too large to hold, too" {
    mkfifo pipe
    for file in pipe /dev/null /dev/zero; do
        fails 2 "$file: is a pipe or device" timeout 20 "$mizan" trace import -q -f nf4-jsonl "$file" --phase decode -o out.h5
    done
    "$python" -c '
with open("large.json", "w") as f:
    f.write("{\"logical_count\": [[")
    for i in range(257):
        f.write("1," * 524288)
    f.write("1]]}")'
    for importer in sglang-json routed-json gpt-oss-json; do
        fails 2 "more than 64 MiB in one" "$mizan" trace import -q -f "$importer" --force large.json --experts 8 --top-k 2 \
            --phase decode -o out.h5
    done
    fails 2 "longer than 64 MiB" "$mizan" trace import -q -f nf4-jsonl --force large.json --phase decode -o out.h5
    only_files pipe large.json
}
