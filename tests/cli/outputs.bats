#!/usr/bin/env bats
# Files that cannot be written: a disk that is full, a folder that is closed or not there, a file that is read. One line,
# an exit code, nothing half-written, and what was there before is there still.

load common

setup() {
    enter_tmpdir
    unset OMPI_COMM_WORLD_SIZE MIZAN_REPLAY_FAULT
    "$mizan" trace synth -q --load hot-rank --ranks 2 --experts 4 --layers 1 --steps 2 --tokens 16 --top-k 2 -o t.h5
    cat >config.json <<'EOF2'
{"model_type": "mixtral", "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4,
 "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 100}
EOF2
    job=(-q --trace t.h5 --model config.json --policy static --steps 1)
    sim=("$mizan" sim "${job[@]}" --scope layers --cluster a100-80gb:1x2)
    replay=("$mizan" replay "${job[@]}" --threads 1)
    calibrate=("$mizan" calibrate -q --repeats 3 --pool 1MiB --threads 1 --ranks 2)
    "${sim[@]}" -o sim.h5 >/dev/null
    "${replay[@]}" --repeat 2 -o replay.h5 >/dev/null
    check=("$mizan" check sim.h5 replay.h5)
    place=("$mizan" place -q --policy eplb --trace t.h5 --ranks 2)
    inputs=(t.h5 config.json sim.h5 replay.h5)
    sha256sum "${inputs[@]}" >../before
}

teardown() {
    [ ! -e ../before ] || sha256sum --quiet -c ../before
}

# full COMMAND...: with room for one block in a file.
full() { (ulimit -f 1 && exec "$@"); }

@test "a disk that is full" {
    echo old >old
    for out in new old; do
        fails 4 "$out: the result file could not be written" full "${sim[@]}" -o $out
        fails 4 "$out: the result file could not be written" full "${replay[@]}" --detail -o $out
        fails 4 "$out: cannot write: " full "${check[@]}" --html $out
    done
    [ "$(cat old)" = old ]
    only_files "${inputs[@]}" old
}

@test "a profile on a disk that is full" {
    echo old >old
    fails 4 "old: cannot write" full "${calibrate[@]}" -o old
    [ "$(cat old)" = old ]
    only_files "${inputs[@]}" old
}

@test "standard output that is full" {
    for name in sim replay check; do
        local -n command=$name
        run --separate-stderr bash -c '"$@" --json >/dev/full' - "${command[@]}"
        echo "$name: $status $stderr"
        [ "$status" -eq 4 ]
        [ "$(printf '%s\n' "$stderr" | wc -l)" -eq 1 ]
        [[ $stderr == mizan:*"No space left"* ]]
    done
    only_files "${inputs[@]}"
}

@test "a folder that is not there, or no folder, or closed" {
    echo old >file
    mkdir closed
    chmod 500 closed
    for out in nowhere/out file/out closed/out .; do
        [ "$out" = closed/out ] && [ "$(id -u)" -eq 0 ] && continue # root may
        for name in sim replay calibrate place; do
            local -n command=$name
            fails 2 "$out" "${command[@]}" -o $out
        done
        fails 2 "$out" "${check[@]}" --html $out
    done
    only_files "${inputs[@]}" file closed
}

@test "a file that is read is not written" {
    ln t.h5 other.h5
    for out in t.h5 ./t.h5 other.h5 config.json; do
        fails 2 "the output would replace the input" "${sim[@]}" -o $out
        fails 2 "the output would replace the input" "${replay[@]}" -o $out
    done
    fails 2 "the output would replace the input" "${place[@]}" -o other.h5
    fails 2 "the output would replace the input" "${replay[@]}" --prediction sim.h5 -o sim.h5
    fails 2 "the output would replace the input" "${check[@]}" --html sim.h5
    fails 2 "the output would replace the input" "${check[@]}" --html ./replay.h5
    only_files "${inputs[@]}" other.h5
}

# Profiles and plug-ins are named with more than their path; links of either kind are the file itself.
@test "profiles and plug-ins are read and not written" {
    cp "$root"/sim/cluster/profiles/a100-80gb.json here.json
    ln -s here.json soft.json
    ln here.json hard.json
    echo nothing >mine.so
    sha256sum here.json mine.so >>../before
    local sim=("$mizan" sim -q --trace t.h5 --model config.json --steps 1 --scope layers)
    for out in here.json ./here.json soft.json hard.json "$PWD/here.json"; do
        fails 2 "the output would replace the input" "${sim[@]}" --policy static --cluster ./here.json:1x2 -o $out
        fails 2 "the output would replace the input" "${replay[@]}" --cluster soft.json:1x2 -o $out
        fails 2 "the output would replace the input" "${place[@]}" --cluster ./here.json:2 -o $out
        fails 2 "the output would replace the input" "${calibrate[@]}" --refresh here.json -o $out
    done
    for policy in ./mine.so 'mine.so[depth=2]'; do
        fails 2 "the output would replace the input" "${sim[@]}" --policy "static,$policy" --cluster a100-80gb:1x2 -o mine.so
        fails 2 "the output would replace the input" "$mizan" replay -q --trace t.h5 --model config.json --policy "$policy" -o mine.so
        fails 2 "the output would replace the input" "$mizan" place -q --policy "$policy" --trace t.h5 --ranks 2 -o mine.so
    done
    fails 2 "the output would replace the input" "${place[@]}" --model config.json -o config.json
    only_files "${inputs[@]}" here.json soft.json hard.json mine.so
}
