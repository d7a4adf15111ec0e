#!/usr/bin/env bats
# Damaged and wrong traces: one clear line, exit code 2, nothing written, never a crash.

load common

setup() {
    enter_tmpdir
    example=$(ls "$root"/traces/example/*.h5 | head -n 1)
    damage="$root/tests/cli/damage.py"
}

# Both readers of traces must refuse the file: the checker and the simulator.
refused() { # refused FILE TEXT
    fails 2 "$1" "$mizan" sim --trace "$1" --model "${model:-olmoe-1b-7b}" --cluster a100-80gb:8 \
        --policy 'static,lrmoe[keep=0.5]' -o out.h5 # lrmoe reads the gate weights, too
    [[ $stderr == *"$2"* ]]
    [ ! -e out.h5 ]
    run --separate-stderr "$mizan" trace check "$1"
    echo "check: $status; $output; $stderr"
    [ "$status" -eq 2 ]
    [ "$(printf '%s\n' "$stderr" | wc -l)" -eq 1 ]
    [[ "$output$stderr" == *"$2"* ]]
}

@test "a flipped bit in any dataset is noticed and the dataset named" {
    for name in $("$python" "$damage" "$example" --datasets); do
        "$python" "$damage" "$example" bad.h5 flip "$name"
        echo "dataset $name"
        refused bad.h5 "$name"
    done
}

@test "a truncated file is noticed" {
    for share in 0.001 0.1 0.5 0.9 0.999; do
        "$python" "$damage" "$example" bad.h5 truncate "$share"
        echo "share $share"
        refused bad.h5 ""
    done
}

@test "an expert out of range is named with dataset and index" {
    "$python" "$damage" "$example" bad.h5 expert-out-of-range
    refused bad.h5 "pairs/expert"
    [[ "$output$stderr" == *5* ]]
}

@test "NaN and negative weights are named with dataset and index" {
    for kind in weight-nan weight-negative; do
        "$python" "$damage" "$example" bad.h5 "$kind"
        refused bad.h5 "pairs/weight"
    done
}

@test "counts that do not add up, calls out of order, ranks out of range" {
    for kind in pairs-do-not-add-up calls-out-of-order rank-out-of-range; do
        "$python" "$damage" "$example" bad.h5 "$kind"
        refused bad.h5 "calls"
    done
}

@test "a trace without a single token" {
    "$python" "$damage" "$example" bad.h5 no-tokens
    fails 2 "token" "$mizan" sim --trace bad.h5 --model olmoe-1b-7b --cluster a100-80gb:8
}

@test "a missing dataset is named" {
    for name in calls/tokens pairs/expert; do
        "$python" "$damage" "$example" bad.h5 delete "$name"
        refused bad.h5 "$name"
    done
}

@test "a newer format version says so" {
    "$python" "$damage" "$example" bad.h5 version 99
    refused bad.h5 "99"
}

@test "files that are no traces" {
    printf 'not HDF5 at all' >text.h5
    refused text.h5 ""
    : >empty.h5
    refused empty.h5 ""
    mkdir dir.h5
    refused dir.h5 ""
    refused missing.h5 ""
    head -c 100000 /dev/urandom >noise.h5
    refused noise.h5 ""
    "$python" -c "import h5py; h5py.File('other.h5', 'w')['x'] = [1, 2, 3]"
    refused other.h5 ""
}

@test "random damage anywhere never crashes the program" {
    cp "$example" good.h5
    for seed in $(seq 1 40); do
        "$python" - "$seed" <<'EOF'
import random, sys
random.seed(int(sys.argv[1]))
data = bytearray(open("good.h5", "rb").read())
for _ in range(random.choice((1, 4, 64))):
    where = random.choice((2048, len(data)))  # metadata is dense at the start
    data[random.randrange(min(where, len(data)))] = random.randrange(256)
open("bad.h5", "wb").write(data)
EOF
        run --separate-stderr timeout 100 "$mizan" trace check bad.h5
        echo "seed $seed: exit $status; $stderr"
        [ "$status" -le 2 ]
    done
}
