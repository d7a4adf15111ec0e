#!/usr/bin/env bats
# mizan memory: the published peaks of the study, the contract's keys, what fits, and bad input.

load common

setup() {
    enter_tmpdir
    trace=$(ls "$root"/traces/example/*.h5 | head -n 1)
    small=(--model olmoe-1b-7b --cluster a100-80gb:8)
}

# One JSON object into out.json; further words are options.
memory() {
    "$mizan" -q memory "$@" --json >out.json
}

# python EXPRESSION must be true of r, the last result; m is its memory_bytes.
holds() {
    "$python" -c '
import json, sys
r = json.load(open("out.json")); m = r["memory_bytes"]; G = 2**30
ok = eval(sys.argv[1])
print(sys.argv[1], "->", ok)
sys.exit(0 if ok else 1)' "$1"
}

# The SkewAdam study (arXiv 2607.19058): 8 micro-batches of 8 x 128 tokens, checkpointing, updates operation by
# operation; its peaks are those of the framework's allocator, so without the device context.
study() {
    memory --model skewadam-6.8b --cluster h200:1 --seq 128 --micro-batch 8 --micro-batches 8 --recompute full \
        --temporaries unfused --keep-logits --optimizer "$1"
}

@test "peaks of the study: AdamW 81.3564, Muon 57.6240, Lion 56.0829, SkewAdam 31.3281 GiB" {
    for line in adamw-bf16:81.3564 muon:57.6240 lion:56.0829 skewadam:31.3281; do
        study "${line%:*}"
        holds "abs((r['peak_memory_bytes'] - m['context']) / G - ${line#*:}) < 0.002"
        holds "r['peak_at'] == \"temporaries of the optimizer's update\""
    done
}

@test "weights, gradients and states of the study, by tier" {
    for line in adamw-bf16:50.54718 lion:25.27359 'muon[state=tabulated]:25.27359' muon:26.04718 skewadam:1.28597 \
        'skewadam[experts=momentum]:25.28597' 'skewadam[router=factored]:1.28403' 'skewadam[uniform]:25.28599' \
        adafactor:0.01240 galore:1.61603; do
        study "${line%:*}"
        holds "abs(r['optimizer_state_bytes']['total'] / G - ${line##*:}) < 1e-5"
        holds "m['optimizer_state'] == r['optimizer_state_bytes']['total']"
        holds "abs(m['weights'] / G - 12.637848) < 1e-6 and m['gradients'] == m['weights']"
    done
    study skewadam
    holds "r['parameters'] == {'total': 6784327680, 'active': 442540032, 'backbone': 341352448, 'experts': 6442450944, 'router': 524288}"
    holds "abs(r['optimizer_state_bytes']['backbone'] / G - 1.27230) < 1e-5"
    holds "r['optimizer_state_bytes']['experts'] == 12 << 20 and r['optimizer_state_bytes']['router'] == 2 << 20"
}

@test "what the model adds to the study's formula: logits, two workspaces, ids; temporaries by optimizer" {
    # T: one fp32 copy of the embedding; SkewAdam's row and column vectors twice
    for line in adamw-bf16:7:0 muon:8:0 lion:7:0 skewadam:6:435200 adafactor:4:435200; do
        study "${line%%:*}"
        rest=${line#*:}
        holds "m['temporaries'] == ${rest%:*} * 4 * 50304 * 4096 + ${rest#*:}"
        holds "m['activations'] == 2 * 50304 * 1024 + 16 * 8192"
        holds "m['workspace'] == 64 << 20 and m['token_buffers'] == 0 and m['communication'] == 0"
    done
}

@test "fused and chunked updates and freed logits need less" {
    study skewadam && unfused=$("$python" -c 'import json; print(json.load(open("out.json"))["peak_memory_bytes"])')
    memory --model skewadam-6.8b --cluster h200:1 --seq 128 --micro-batch 8 --optimizer skewadam --recompute full \
        --temporaries chunked
    holds "m['temporaries'] == 6 * 4 * (16 << 20) + 435200 and r['peak_memory_bytes'] < $unfused"
    memory --model skewadam-6.8b --cluster h200:1 --seq 128 --micro-batch 8 --optimizer skewadam --recompute full
    holds "m['activations'] > 0 and r['peak_memory_bytes'] < $unfused - 4 * G and 'update' not in r['peak_at']"
}

@test "every key of the contract; categories add up; the page names them all" {
    memory "${small[@]}"
    holds "list(m) == 'weights gradients optimizer_state replicas activations token_buffers temporaries workspace communication context'.split()"
    holds "sum(m.values()) == r['peak_memory_bytes'] and sum(r['resident_memory_bytes'].values()) == r['resident_bytes']"
    holds "r['schema'] == 'mizan-memory/1' and r['fits'] is True and r['out_of_memory'] is None"
    holds "r['headroom_bytes'] == r['capacity_bytes'] - r['peak_memory_bytes'] and len(r['rank_peak_bytes']) == 8"
    holds "set(r['parameters']) == {'total', 'active', 'backbone', 'experts', 'router'} and r['parameters']['total'] == sum(r['parameters'][t] for t in ('backbone', 'experts', 'router'))"
    holds "set(r['optimizer_state_bytes']) == {'total', 'backbone', 'experts', 'router'} and isinstance(r['peak_at'], str)"
    for key in $("$python" -c 'import json; print(*json.load(open("out.json")))'); do
        [ "$key" = schema ] || grep -q -- "\*$key\*" "$root/analysis/mizan-memory.1.scd" || { echo "$key" && false; }
    done
    for option in $("$mizan" memory --help | grep -oE '^ .{0,6}--[a-z0-9-]+' | grep -oE -- '--[a-z0-9-]+'); do
        grep -q -- "\*$option\*" "$root/analysis/mizan-memory.1.scd" || { echo "$option" && false; }
    done
}

@test "the largest micro-batch fits, one sequence more does not" {
    memory "${small[@]}" --seq 2048
    n=$("$python" -c 'import json; print(json.load(open("out.json"))["max_micro_batch"])')
    [ "$n" -gt 0 ]
    memory "${small[@]}" --seq 2048 --micro-batch "$n"
    holds "r['fits'] and r['max_micro_batch'] == $n"
    memory "${small[@]}" --seq 2048 --micro-batch $((n + 1))
    holds "not r['fits'] and r['headroom_bytes'] < 0 and r['max_micro_batch'] == $n"
    run "$mizan" memory "${small[@]}" --seq 2048 --micro-batch $((n + 1))
    [ "$status" -eq 0 ]
    [[ $output == *"does not fit"*"GiB too much"*"try "* ]]
}

@test "a model that cannot fit at all has a largest micro-batch of 0" {
    memory --model deepseek-v3 --cluster a100-80gb:8
    holds "not r['fits'] and r['max_micro_batch'] == 0 and 'try' in r['out_of_memory']"
}

@test "every shipped model answers within a second and on stated sizes" {
    for config in "$root"/sim/model/configs/*.json; do
        name=$(basename "$config" .json)
        timeout 5 "$mizan" -q memory --model "$name" --cluster h100-80gb:64 --ep 8 --json >out.json
        holds "r['peak_memory_bytes'] > r['resident_bytes'] > 0"
    done
}

@test "the trace's rows: as recorded, scaled, and under a policy" {
    memory "${small[@]}" --trace "$trace"
    holds "'as recorded' in r['settings']['load'] and len(r['rank_peak_bytes']) == 8"
    # the same as the simulator's, other attention and loss, too
    for more in '' '--attention eager' '--loss-tokens 64 --recompute selective'; do
        memory "${small[@]}" --trace "$trace" $more
        "$mizan" -q sim "${small[@]}" --trace "$trace" --policy static $more --json >sim.json
        "$python" -c '
import json
s, r = json.load(open("sim.json"))["runs"][0], json.load(open("out.json"))
assert s["memory_bytes"] == r["memory_bytes"] and s["peak_memory_bytes"] == r["peak_memory_bytes"] and s["peak_at"] == r["peak_at"]'
    done
    memory "${small[@]}" --trace "$trace"
    x="r['expert_memory_bytes']"
    holds "$x['own'] == 2 * r['parameters']['experts'] // 8 * 2 and $x['replicas']['highwater']['sum'] == 0"
    holds "all($x['token_buffers']['dynamic'][k] <= $x['token_buffers']['highwater'][k] <= $x['token_buffers']['provisioned'][k] for k in ('sum', 'worst'))"
    memory "${small[@]}" --trace "$trace" --micro-batch 4 --seq 2048
    holds "'scaled' in r['settings']['load']"
    skewed=$("$python" -c 'import json; print(json.load(open("out.json"))["peak_memory_bytes"])')
    memory "${small[@]}" --micro-batch 4 --seq 2048
    holds "'balanced' in r['settings']['load'] and r['peak_memory_bytes'] < $skewed"
    memory "${small[@]}" --trace "$trace" --micro-batch 4 --seq 2048 --policy ultraep
    holds "m['replicas'] > 0 and m['token_buffers'] > 0"
}

@test "a stated imbalance makes the first rank's peak" {
    memory "${small[@]}"
    holds "max(r['rank_peak_bytes']) == min(r['rank_peak_bytes'])"
    # twice the mean: 64 experts, the first 8 on rank 0, 4096 x 8 pairs from each of 8 ranks
    memory "${small[@]}" --imbalance 2 --recompute full
    holds "r['expert_memory_bytes']['token_buffers']['highwater']['worst'] > 1.7 * r['expert_memory_bytes']['token_buffers']['highwater']['sum'] / 8"
    memory "${small[@]}" --imbalance 2
    holds "r['rank_peak_bytes'][0] == max(r['rank_peak_bytes']) > min(r['rank_peak_bytes'])"
    holds "'2 times the mean' in r['settings']['load']"
}

@test "eager attention, recomputation and the caching allocator change what they should" {
    peak() { "$python" -c 'import json; print(json.load(open("out.json"))["peak_memory_bytes"])'; }
    memory "${small[@]}" && flash=$(peak)
    memory "${small[@]}" --attention eager
    holds "r['peak_memory_bytes'] > $flash + 16 * 2 * 16 * 4096 * 4096 - G"
    memory "${small[@]}" --recompute selective && selective=$(peak)
    memory "${small[@]}" --recompute full && full=$(peak)
    [ "$full" -lt "$selective" ] && [ "$selective" -lt "$flash" ]
    memory "${small[@]}" --allocator caching
    holds "$flash <= r['peak_memory_bytes'] < 1.2 * $flash and sum(m.values()) == r['peak_memory_bytes']"
}

@test "a loss in pieces leaves one piece's logits" {
    memory "${small[@]}" --recompute full
    holds "r['peak_at'] == 'fp32 logits of the loss' and m['temporaries'] == (4 * 50304 + 4 * 2048) * 4096"
    memory "${small[@]}" --recompute full --loss-tokens 1024
    holds "r['peak_at'].startswith('layer') and m['temporaries'] < 2**30 // 10"
}

@test "the README's tables come from these commands" {
    "$root/tests/bench/memory-table" study "$mizan" >study.md
    sed -n '/<!-- example:memory-study -->/,/<!-- end:memory-study -->/p' "$root/README.md" | sed '1d;$d' >wanted.md
    diff study.md wanted.md
    run "$root/tests/bench/memory-claim" "$mizan" "$PWD/nowhere"
    [ "$status" -eq 0 ]
    [ "$(grep -c '^skipped: ' <<<"$output")" -eq 2 ]
}

@test "the same input gives the same bytes" {
    memory "${small[@]}" --policy 'lrmoe[keep=0.5]' --trace "$trace" && mv out.json first.json
    memory "${small[@]}" --policy 'lrmoe[keep=0.5]' --trace "$trace"
    cmp first.json out.json
}

@test "bad input: one line, exit code 2" {
    fails 2 "--model is missing" "$mizan" memory
    fails 2 "--cluster is missing" "$mizan" memory --model olmoe-1b-7b
    fails 2 "olmo" "$mizan" memory --model olmo --cluster h200:8
    fails 2 "adamv" "$mizan" memory "${small[@]}" --optimizer adamv
    fails 2 "--ep 3: must divide the 8 ranks" "$mizan" memory "${small[@]}" --ep 3
    fails 2 "pass --ep" "$mizan" memory --model mixtral-8x7b --cluster h200:64
    fails 2 "--zero" "$mizan" memory "${small[@]}" --zero 4
    fails 2 "impossible" "$mizan" memory "${small[@]}" --imbalance 9
    fails 2 "impossible" "$mizan" memory --model mixtral-8x7b --cluster h200:8 --imbalance 5
    fails 2 "exclude each other" "$mizan" memory "${small[@]}" --imbalance 2 --trace "$trace"
    fails 2 "exclude each other" "$mizan" memory "${small[@]}" --keep-logits --loss-tokens 64
    fails 2 "--steps belongs to --trace" "$mizan" memory "${small[@]}" --steps 2
    fails 2 "2^30 tokens" "$mizan" memory "${small[@]}" --micro-batch 1000000 --seq 100000
    fails 2 "2^30 tokens" "$mizan" memory "${small[@]}" --micro-batch 1000000
    for recompute in none selective full; do # 128 heads x 2^54 pairs of (query, key)
        fails 2 "more than can be counted" "$mizan" memory --model deepseek-v3 --cluster h200:8 --attention eager \
            --seq 16777216 --micro-batch 64 --recompute $recompute
    done
    fails 2 "experts per layer" "$mizan" memory --model mixtral-8x7b --cluster a100-80gb:8 --trace "$trace"
    fails 2 "nosuch" "$mizan" memory "${small[@]}" --policy nosuch
    fails 2 "missing.h5" "$mizan" memory "${small[@]}" --trace missing.h5
    only_files
}
