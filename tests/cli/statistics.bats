#!/usr/bin/env bats
# mizan trace info's statistics, compare, and synth --like and --profile.

load common

setup() { enter_tmpdir; }

make() {
    "$mizan" trace synth -q --profile mixed --layers 2 --experts 8 --top-k 2 --ranks 2 --tokens 600 --steps 1 \
        --sequence 100 "$@"
}

@test "info prints statistics, --loads-only does not" {
    make -o a.h5
    run "$mizan" trace info --summary a.h5
    [ "$status" -eq 0 ]
    [[ "$output" == *"mutual information, bits"* ]]
    run "$mizan" trace info --summary --loads-only a.h5
    [[ "$output" != *"mutual information"* ]]
    run "$mizan" trace info --json a.h5
    [[ "$output" == *'"reuse_lag_1": {'* ]]
    [[ "$output" == *'"scatter_rank"'* ]]
}

@test "the same seed gives the same bytes, another seed others" {
    make --seed 3 -o a.h5
    make --seed 3 -o b.h5
    make --seed 4 -o c.h5
    cmp a.h5 b.h5
    run cmp a.h5 c.h5
    [ "$status" -eq 1 ]
    run "$mizan" trace check a.h5
    [ "$status" -eq 0 ]
}

@test "compare: a trace is like itself, --strict fails on differences" {
    make -o a.h5
    run "$mizan" trace compare --strict a.h5 a.h5
    [ "$status" -eq 0 ]
    "$mizan" trace synth -q --profile balanced --layers 2 --experts 8 --top-k 2 --ranks 2 --steps 3 -o b.h5
    run "$mizan" trace compare a.h5 b.h5
    [ "$status" -eq 0 ]
    [[ "$output" == *"differ by more than their tolerance"* ]]
    run "$mizan" trace compare --strict a.h5 b.h5
    [ "$status" -eq 1 ]
    run "$mizan" trace compare --json a.h5 b.h5
    [[ "$output" == *'"mizan-trace-compare/1"'* ]]
}

@test "synth --like: as many tokens and ranks as told, sound, shuffled on demand" {
    make -o a.h5
    run "$mizan" trace synth -q --like a.h5 --ranks 3 --tokens 300 --steps 2 -o b.h5
    [ "$status" -eq 0 ]
    run "$mizan" trace check b.h5
    [ "$status" -eq 0 ]
    run "$mizan" trace info --json --loads-only b.h5
    [[ "$output" == *'"ranks": 3'* ]]
    [[ "$output" == *'"steps": 2'* ]]
    run "$mizan" trace synth -q --like a.h5 --shuffle sequences,layers -o c.h5
    [ "$status" -eq 0 ]
    "$mizan" trace synth -q --profile collapse --layers 2 --experts 8 --top-k 2 --ranks 2 --steps 30 -o d.h5
    "$mizan" trace synth -q --like d.h5 -o e.h5
    run "$mizan" trace check e.h5
    [ "$status" -eq 0 ]
}

@test "synth --like: what cannot be fitted is told in one line" {
    make -o a.h5
    run "$mizan" trace synth --like a.h5 --shuffle words -o b.h5
    [ "$status" -eq 2 ]
    [[ "$output" == *"neither sequences nor layers"* ]]
    run "$mizan" trace synth --like none.h5 -o b.h5
    [ "$status" -eq 2 ]
    run "$mizan" trace synth --like a.h5 --profile mixed -o b.h5
    [ "$status" -eq 2 ]
    "$mizan" trace synth -q --profile collapse --layers 2 --experts 8 --top-k 2 --ranks 2 --steps 3 -o d.h5
    run "$mizan" trace synth --like d.h5 --shuffle layers -o b.h5
    [ "$status" -eq 2 ]
    [ ! -e b.h5 ]
}

# interrupted SIGNAL MARK COMMAND...: sends SIGNAL once MARK stands in its messages or names a file; it must end soon, with 130
# and one line, and leave nothing behind.
interrupted() {
    local signal=$1 mark=$2 before code=0
    shift 2
    before=$(ls -A | xargs)
    "$@" 2>messages &
    local pid=$!
    for ((i = 0; i < 600; i++)); do
        grep -qe "$mark" messages || compgen -G "$mark" >/dev/null && break
        sleep 0.05
    done
    [ "$i" -lt 600 ]
    kill -s "$signal" "$pid"
    wait "$pid" || code=$?
    echo "exit code $code; $(tail -n 2 messages)"
    [ "$code" -eq 130 ]
    [[ $(tail -n 1 messages) == "mizan: trace: "*interrupted* ]]
    rm messages
    [ "$(ls -A | xargs)" = "$before" ]
}

@test "synth --like: interrupted while it fits or writes, it leaves nothing and what stood there stands" {
    make --layers 4 --experts 64 --tokens 20000 -o a.h5
    "$mizan" trace synth -q --profile collapse --layers 4 --experts 64 --top-k 2 --ranks 4 --steps 30 -o counts.h5
    echo kept >there.h5
    for signal in INT TERM; do
        interrupted $signal "layer 0: reuse" "$mizan" trace synth -v --like a.h5 -o b.h5
        interrupted $signal "b.h5.partial-*" "$mizan" trace synth -q --like a.h5 --steps 1000000 -o b.h5
        interrupted $signal "b.h5.partial-*" "$mizan" trace synth -q --like counts.h5 --steps 10000000 -o b.h5
        interrupted $signal "there.h5.partial-*" "$mizan" trace synth -q --like a.h5 --tokens 1000000 --steps 100 -o there.h5
        [ "$(cat there.h5)" = kept ]
    done
}

@test "every key of the JSON of info and compare is documented, and no other" {
    make -o a.h5
    "$mizan" trace synth -q --profile balanced --layers 2 --experts 8 --top-k 2 --ranks 2 --steps 3 -o b.h5
    "$mizan" trace info --json a.h5 >info.json
    "$mizan" trace info --json b.h5 >counts.json
    "$mizan" trace compare --json a.h5 b.h5 >compare.json
    "$python" "$root/tests/cli/documented_keys.py" "$root/traces/README.md" info.json counts.json compare.json
    # The check can fail: a page without one of them, and a page with one more.
    sed 's/`placement_ranks`/placement/' "$root/traces/README.md" >page
    run "$python" "$root/tests/cli/documented_keys.py" page info.json counts.json compare.json
    [ "$status" -eq 1 ]
    [ "$output" = "not documented: placement_ranks" ]
    { cat "$root/traces/README.md" && echo '| `old_key` | | gone |'; } >page
    run "$python" "$root/tests/cli/documented_keys.py" page info.json counts.json compare.json
    [ "$output" = "documented, never printed: old_key" ]
}
