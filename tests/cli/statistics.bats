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

# odd NAME KIND E K LAYERS RANKS CALLS...: NAME.h5 from lines of Python that fill `calls` (step, micro_batch, layer, rank, first
# token, tokens) and `ids` or `counts`, and may fill `bounds` of sequences and change `trace`, on standard input.
odd() {
    PYTHONPATH=$root/tests/traces "$python" - "$@" 3<&0 <<'EOF'
import os, sys
import numpy as np
from make_conformance import CALLS, Trace
name, kind, experts, top_k, layers, ranks = sys.argv[1:2] + sys.argv[2:3] + [int(n) for n in sys.argv[3:7]]
trace, rng = Trace(kind), np.random.default_rng(3)
calls, ids, counts, bounds = [], [], [], None
exec(os.fdopen(3).read())
trace.model.update(layers=layers, experts=experts, top_k=top_k)
trace.run["ranks"] = ranks
pairs = [int(np.sum(c)) for c in counts] if kind == "counts" else [c[5] * top_k for c in calls]
trace.calls = {n: [c[i] for c in calls] for i, n in enumerate(CALLS[:6])}
trace.calls["pairs"] = pairs
trace.data = {"counts": np.array(counts, "<u4").reshape(-1, experts)} if kind == "counts" else {
    "pairs/expert": np.array(ids, "<u2").ravel()}
if bounds is not None:
    trace.data["sequences/token_begin"], trace.data["sequences/tokens"] = np.array(bounds, "<i8").T.copy()
trace.write(name + ".h5")
EOF
    "$mizan" trace check -q "$1.h5"
}

# of FILE EXPRESSION: true of `info`, the JSON of mizan trace info; further words are its options.
of() {
    local file=$1 expression=$2
    shift 2
    "$mizan" trace info -q --json "$@" "$file" >info.json
    "$python" -c 'import json, sys
info = json.load(open("info.json")); stats = info.get("statistics")
mean = lambda name: stats[name] and stats[name]["mean"]
sys.exit(0 if eval(sys.argv[1]) else print(sys.argv[1], "is not true of", stats and {k: mean(k) for k in stats}) or 1)' "$expression"
}

@test "info: tokens and sequences of ranks that lack layers, and of a window" {
    odd absent pairs 6 2 3 2 <<'EOF'
for s in range(5):
    for l in range(3):
        for r in range(2):
            if (l, r) not in ((2, 0), (0, 1)):
                calls.append((s, 0, l, r, (2 * s + r) * 40, 40))
                ids.append([rng.permutation(6)[:2] for _ in range(40)])
bounds = [(b, 20) for b in range(0, 400, 20)]
EOF
    of absent.h5 "info['tokens'] == 400 and info['sequences'] == 20"
    of absent.h5 "info['tokens'] == 160 and info['sequences'] == 8" --from-step 1 --to-step 2
    fails 2 "absent.h5: no recorded step from --from-step 7 to --to-step 9: the trace has steps from 0 to 4" \
        "$mizan" trace info --from-step 7 --to-step 9 absent.h5
    fails 2 "absent.h5: --ranks: 7 ranks for 6 experts: pass at most 6" "$mizan" trace compare -r 7 absent.h5 absent.h5
    fails 2 "absent.h5: the sequence at token 0 has calls for 2 of 3 layers" \
        "$mizan" trace synth -q --like absent.h5 -o b.h5
    fails 2 "absent.h5: step 0, micro-batch 0: not every rank has all 3 layers" \
        "$mizan" trace export -q -f npy absent.h5 -o out
}

@test "info: steps that are numbered by time" {
    odd late pairs 4 2 1 1 <<'EOF'
for s in range(3):
    calls.append((1760000000000000000 + s, 0, 0, 0, 50 * s, 50))
    ids.append([rng.permutation(4)[:2] for _ in range(50)])
EOF
    of late.h5 "info['steps'] == 3 and info['tokens'] == 150"
    of late.h5 "info['steps'] == 2" --from-step 1760000000000000001
}

@test "info: what is exactly even is 0, and what cannot be told is null" {
    odd even pairs 3 1 2 1 <<'EOF'
for s in range(5):
    for l in range(2):
        calls.append((s, 0, l, 0, 60 * s, 60))
        ids.append([t // 3 ** l % 3 for t in range(60)])
bounds = [(60 * s, 60) for s in range(5)]
EOF
    # The halves of the sequences of layer 0 have the mix of all, up to rounding: no deviation to correlate.
    of even.h5 "stats['half_correlation_same']['layers'][0] is None"
    run "$mizan" trace info even.h5
    [[ ! $output =~ -0\.0+[\ %] ]]
    [[ $output != *nan* ]]
    # Ten experts in two layers, every pair of them as often: no information, and never less than none.
    odd free pairs 10 1 2 1 <<'EOF'
for l in range(2):
    calls.append((0, 0, l, 0, 0, 100))
    ids.append([t // 10 ** l % 10 for t in range(100)])
EOF
    of free.h5 "0 <= mean('layer_information_bits') < 1e-9"
}

@test "info: a rank alone in its step does not scatter" {
    odd alone counts 4 1 1 2 <<'EOF'
for s in range(6):
    for r in range(2):
        n = rng.multinomial(100, [.4, .3, .2, .1]) * (s % 2 == r)
        calls.append((s, 0, 0, r, (2 * s + r) * 100, int(n.sum())))
        counts.append(n)
EOF
    of alone.h5 "stats['scatter_rank'] is None and stats['scatter_rank_micro_batch'] is None"
}

@test "the statistics refuse more layers and experts than fit into memory" {
    odd wide pairs 65536 1 65536 1 <<'EOF'
calls.append((0, 0, 0, 0, 0, 1))
ids.append([7])
EOF
    fails 2 "wide.h5: 65536 layers of 65536 experts are too many for these statistics" \
        "$mizan" trace compare -q wide.h5 wide.h5
}

@test "synth --like: counts keep the pairs of a token, ragged or dropped, and steps without pairs count for nothing" {
    odd ragged counts 8 2 1 3 <<'EOF'
for s in range(9):
    for r in range(3):
        n = (1, 2, 2)[r]
        calls.append((s, 0, 0, r, (3 * s + r) * 10, n))
        counts.append(np.bincount(rng.integers(0, 8, 2 * n), minlength=8))
EOF
    for tokens in "" "--tokens 7"; do
        "$mizan" trace synth -q --like ragged.h5 $tokens -o b.h5
        of b.h5 "info['pairs'] == 2 * info['tokens']"
    done
    odd dropped counts 8 2 1 1 <<'EOF'
for s in range(9):
    calls.append((s, 0, 0, 0, 200 * s, 200))
    counts.append(rng.multinomial(50, [1 / 8] * 8))
EOF
    "$mizan" trace synth -q --like dropped.h5 --tokens 400 -o b.h5
    of b.h5 "info['pairs'] == 9 * 100"
    odd gaps counts 8 1 1 1 <<'EOF'
for s in range(60):
    n = rng.multinomial(1000, [.79] + [.03] * 7) * (s % 2 == 0)
    calls.append((s, 0, 0, 0, 1000 * s, int(n.sum())))
    counts.append(n)
trace.run["import_notes"] = "answer=yes"
EOF
    "$mizan" trace synth -q --like gaps.h5 -o b.h5
    of b.h5 "abs(mean('expert_top1_share') - .79) < .03 and info['facts']['import_notes'] == ''"
}

@test "synth --like: what cannot be fitted says what can" {
    odd empty counts 8 2 1 1 <<<'calls.append((0, 0, 0, 0, 0, 10)); counts.append([0] * 8)'
    fails 2 "empty.h5: holds no pairs: there is nothing to fit" "$mizan" trace synth -q --like empty.h5 -o b.h5
    odd loose pairs 4 1 1 1 <<<'calls.append((0, 0, 0, 0, 0, 1)); ids.append([1])'
    fails 2 "--kind counts fits the loads of steps alone" "$mizan" trace synth -q --like loose.h5 -o b.h5
    odd nosteps counts 4 1 1 1 <<<'trace.run["step"] = "none"; calls.append((0, 0, 0, 0, 0, 1)); counts.append([0, 1, 0, 0])'
    fails 2 "nosteps.h5: counts are fitted over steps, and this trace has none" \
        "$mizan" trace synth -q --like nosteps.h5 -o b.h5
}

@test "synth refuses options that would change nothing, and to replace its trace" {
    make -o a.h5
    for option in "--layers 3" "--experts 9" "--top-k 1" "--sequence 9" "--model-name x" "--hidden 8" "--intermediate 8" \
        "--load balanced"; do
        fails 2 "${option% *}: has no meaning with --like" "$mizan" trace synth -q --like a.h5 $option -o b.h5
    done
    fails 2 "--shuffle: has no meaning with --load" "$mizan" trace synth -q --shuffle layers -o b.h5
    fails 2 "--load: has no meaning with --profile" "$mizan" trace synth -q --profile mixed --load balanced -o b.h5
    fails 2 "--sequence: has no meaning with a profile of counts" "$mizan" trace synth -q --profile collapse --sequence 9 -o b.h5
    fails 2 "--kind: this profile makes pairs" "$mizan" trace synth -q --profile mixed --kind counts -o b.h5
    fails 2 "--kind: this profile makes counts" "$mizan" trace synth -q --profile balanced --kind pairs -o b.h5
    fails 2 "--list describes them" "$mizan" trace synth -q --load qqqqqqqq -o b.h5
    long=$(printf '%0200d' 0)
    fails 2 "--model-name: longer than 127 characters" "$mizan" trace synth -q --model-name "$long" -o b.h5
    fails 2 "--model-name: longer than 127 characters" "$mizan" trace synth -q --profile mixed --model-name "$long" -o b.h5
    cp a.h5 kept.h5
    fails 2 "the output would replace the input" "$mizan" trace synth -q --like a.h5 -o ./a.h5
    cmp a.h5 kept.h5
    only_files a.h5 kept.h5
}

@test "profile mixed: layers differ in skew, whatever their number" {
    for layers in 7 14 16; do
        "$mizan" trace synth -q --profile mixed --layers $layers --experts 32 --top-k 2 --ranks 1 --tokens 4000 --steps 1 -o a.h5
        of a.h5 "stats['expert_cv']['high'] > 1.8 * stats['expert_cv']['low']"
    done
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
