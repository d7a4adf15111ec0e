#!/usr/bin/env bats
# mizan place: known placements, every input and output form, every kind of bad input.

load common

setup() {
    enter_tmpdir
    example=$(ls "$root"/traces/example/*.h5 | head -n 1)
    reader=$root/tests/cli/read_placement.py
    # The example of DeepSeek's EPLB repository, two layers.
    printf '90,132,40,61,104,165,39,4,73,56,183,86\n20,107,104,64,19,197,187,157,172,86,16,27\n' >eplb.csv
    # Ranks of four with loads 1000 400 100 100.
    echo 900,100,300,100,50,50,60,40 >small.csv
    # The same by source, as the specification's vector for TopoEP has them.
    printf '0,%d,%s\n' 0 300,20,30,10,10,10,10,10 1 250,30,60,20,10,10,10,10 2 200,20,100,30,20,10,20,10 \
        3 150,30,110,40,10,20,20,10 >source.csv
}

place() { "$mizan" place "$@"; }

# Policies of the table that need no sizes, and those that do.
policies() { # sized|unsized
    local name
    for name in $("$mizan" sim --list | awk '/^policies/ { on = 1; next } /^[a-z]/ { on = 0 } on && /^  [a-z]/ { print $1 }'); do
        if "$mizan" place -q --counts small.csv --ranks 4 --policy "$name" >/dev/null 2>err; then
            [ "$1" = unsized ] && echo "$name"
        elif grep -q 'give --model and --cluster' err; then
            [ "$1" = sized ] && echo "$name"
        else
            echo "broken:$name"
        fi
    done
}

field() { # field EXPRESSION FILE: of the JSON r
    "$python" -c "import json, sys; r = json.load(open(sys.argv[2])); print(eval(sys.argv[1]))" "$1" "$2"
}

# ---- known answers

@test "EPLB, hierarchical: the published placement of both layers" {
    place --policy eplb --counts eplb.csv --ranks 8 --nodes 2 --slots 2 --groups 4 --json >out.json
    "$python" "$reader" report out.json
    # Published as slots, rank after rank; which of a rank's two slots an expert has is of no account.
    "$python" - <<'PY'
import json
want = ["5 6 5 7 8 4 3 4 10 9 10 2 0 1 11 1", "7 10 6 8 6 11 8 9 2 4 5 1 5 0 3 1"]
r = json.load(open("out.json"))
for layer, text in zip(r["layers"], want):
    slots = [int(x) for x in text.split()]
    for rank in range(8):
        have = sorted(e["id"] for e in layer["experts"] for h in e["hosts"] if h == rank)
        assert have == sorted(slots[2 * rank:2 * rank + 2]), (rank, have)
PY
}

@test "EPLB, global: the published placement" {
    head -n 1 eplb.csv >first.csv
    place --policy eplb --counts first.csv --ranks 8 --slots 2 --format tensorrt-llm >out.yaml
    "$python" - <<'PY'
slots = eval([l for l in open("out.yaml") if l.startswith("  0:")][0].split(":")[1])
want = [int(x) for x in "10 6 10 7 0 2 11 4 5 9 5 4 8 3 1 1".split()]
assert [sorted(slots[i:i + 2]) for i in range(0, 16, 2)] == [sorted(want[i:i + 2]) for i in range(0, 16, 2)], slots
PY
}

@test "UltraEP: loads 404 400 404 392, and with eps 0 four times 400" {
    place --policy 'ultraep[eps=0.01]' --counts small.csv --ranks 4 --slots 3 --json >a.json
    [ "$(field '[x["load"] for x in r["layers"][0]["ranks"]]' a.json)" = "[404, 400, 404, 392]" ]
    [ "$(field 'r["layers"][0]["experts"][0]["hosts"]' a.json)" = "[0, 2, 3]" ]
    [ "$(field 'r["layers"][0]["experts"][0]["pairs"]' a.json)" = "[304, 304, 292]" ]
    place --policy 'ultraep[eps=0]' --counts small.csv --ranks 4 --slots 3 --json >b.json
    [ "$(field '[x["load"] for x in r["layers"][0]["ranks"]]' b.json)" = "[400, 400, 400, 400]" ]
    [ "$(field 'r["layers"][0]["imbalance"], r["layers"][0]["imbalance_bound"]' b.json)" = "(1.0, 1.0)" ]
    [ "$(field 'r["layers"][0]["imbalance_static"]' b.json)" = "2.5" ]
}

@test "SYMI: counts 5 1 1 1 1 1 1 1, and those of its paper's rule by hand" {
    place --policy 'symi[drop=no]' --counts small.csv --ranks 4 --slots 3 --json >a.json
    [ "$(field '[e["replicas"] for e in r["layers"][0]["experts"]]' a.json)" = "[5, 1, 1, 1, 1, 1, 1, 1]" ]
    echo 100,50,25,25 >b.csv
    place --policy 'symi[drop=no]' --counts b.csv --ranks 4 --slots 2 --json >b.json
    [ "$(field '[e["replicas"] for e in r["layers"][0]["experts"]]' b.json)" = "[4, 2, 1, 1]" ]
    echo 0,0,0,40 >c.csv
    place --policy 'symi[drop=no]' --counts c.csv --ranks 4 --slots 2 --json >c.json
    [ "$(field '[e["replicas"] for e in r["layers"][0]["experts"]]' c.json)" = "[1, 1, 1, 5]" ]
}

@test "LLEP with alpha 1 and chunks of 1: four times 400" {
    place --policy 'llep[alpha=1,m=1]' --counts small.csv --ranks 4 --json >a.json
    [ "$(field '[x["load"] for x in r["layers"][0]["ranks"]]' a.json)" = "[400, 400, 400, 400]" ]
    [ "$(field 'sum(e["replicas"] for e in r["layers"][0]["experts"])' a.json)" = 10 ]
}

@test "static: the table by hand" {
    run place --policy static --counts small.csv --ranks 4
    [ "$status" -eq 0 ]
    [[ $output == *"  2.500     2.500      2.500       2.250"* ]] # 8 slots for 8 experts: 900 pairs stay together
    [[ $output == *"rank   0        1000 pairs  experts 0 1"* ]]
}

# ---- every policy

@test "every policy: valid reports by an independent count, the same bytes twice, every format read back" {
    run policies unsized
    [[ $output == *eplb* && $output != *broken* ]]
    for name in $output; do
        for input in "eplb.csv --ranks 4 --nodes 2 --groups 4" "small.csv --ranks 4" "small.csv --ranks 3" "small.csv --ranks 11" \
            "source.csv --ranks 4"; do
            echo "$name: $input"
            place -q --policy "$name" --counts $input --json >a.json
            place -q --policy "$name" --counts $input --json >b.json
            "$python" "$reader" report a.json
            diff <(grep -v planner_measured_s a.json) <(grep -v planner_measured_s b.json)
            for format in sglang tensorrt-llm deepspeed vllm; do
                [ "$name" != ideal ] || continue
                if ! place -q --policy "$name" --counts $input --format $format >out 2>err; then
                    # Only this may stand in the way: SYMI likes an expert twice on a rank.
                    [ $format = vllm ] && grep -q 'which vLLM.s file cannot say' err
                    continue
                fi
                place -q --policy "$name" --counts $input --format $format >again
                cmp out again
                "$python" "$reader" $format out a.json
            done
        done
    done
}

@test "policies that weigh bytes ask for a model and a cluster, and place with them" {
    run policies sized
    [[ $output == *topoep* ]]
    for name in $output; do
        echo "$name"
        fails 2 "give --model and --cluster" place --policy "$name" --trace "$example" --ranks 8
        place -q --policy "$name" --trace "$example" --model olmoe-1b-7b --cluster a100-80gb:8 --json >a.json
        "$python" "$reader" report a.json
    done
}

@test "one slot for one expert: the report with every policy that has slots" {
    for name in eplb ultraep symi; do
        place --policy "$name" --counts eplb.csv --ranks 12 --slots 1 --json >a.json
        "$python" "$reader" report a.json
        [ "$(field 'max(x["slots_used"] for l in r["layers"] for x in l["ranks"])' a.json)" = 1 ]
    done
}

# ---- inputs

@test "CSV, JSON, .npy, logical_count and gzip of the same counts place alike" {
    place --policy eplb --counts eplb.csv --ranks 4 --json | grep -v measured >csv.out
    "$python" - <<'PY'
import json, numpy
rows = [[int(x) for x in line.split(",")] for line in open("eplb.csv")]
json.dump(rows, open("list.json", "w"))
json.dump({"logical_count": rows}, open("logical.json", "w"))
for kind in ("<i8", "<u4", "<i2"):
    numpy.save(kind[1:] + ".npy", numpy.array(rows, dtype=kind))
PY
    gzip -c eplb.csv >eplb.csv.gz
    sed 's/,/ , /g; s/$/\r/' eplb.csv >blanks.csv
    for file in list.json logical.json i8.npy u4.npy i2.npy eplb.csv.gz blanks.csv; do
        place --policy eplb --counts $file --ranks 4 --json | grep -v measured | diff - csv.out
    done
    place --policy eplb --counts - --ranks 4 --json <eplb.csv | grep -v measured | diff - csv.out
    printf '\xef\xbb\xbf' | cat - eplb.csv >mark.csv
    place --policy eplb --counts mark.csv --ranks 4 --json | grep -v measured | diff - csv.out
}

@test "loads by source: by their columns, their header and --axes, in any order" {
    place --policy static --counts source.csv --ranks 4 --json | grep -v measured >a.out
    # The specification's totals are the small vector's: 900 100 300 100 50 50 60 40.
    place --policy static --counts small.csv --ranks 4 --json | grep -v measured | diff - a.out
    { echo layer,source,e0; tac source.csv; } >header.csv
    place --policy static --counts header.csv --ranks 4 --json | grep -v measured | diff - a.out
    place --policy static --counts source.csv --ranks 4 --axes layers,sources,experts --json | grep -v measured | diff - a.out
    # The same text read as four layers of ten experts.
    place --policy static --counts source.csv --ranks 4 --axes layers,experts --json >plain.json
    [ "$(field 'len(r["layers"]), r["experts"]' plain.json)" = "(4, 10)" ]
    # One source could be anything: two cold experts come first here.
    echo 0,0,5,7 >cold.csv
    place --policy static --counts cold.csv --ranks 2 --json >cold.json
    [ "$(field 'r["experts"]' cold.json)" = 4 ]
    # Four sources on two ranks are merged in order.
    place --policy static --counts source.csv --ranks 2 --json >two.json
    [ "$(field 'r["ranks"], len(r["layers"][0]["ranks"])' two.json)" = "(2, 2)" ]
    fails 2 "do not merge to 3 ranks" place --policy static --counts source.csv --ranks 3 --axes layers,sources,experts
    # Who sends what decides TopoEP: the specification's loads.
    run --separate-stderr place --policy 'topoep' --counts source.csv --ranks 4
    [ "$status" -eq 2 ]
}

@test "three axes are asked for, and mean what --axes says" {
    "$python" - <<'PY'
import json, numpy
counts = numpy.arange(24).reshape(2, 3, 4)
numpy.save("cube.npy", counts)
json.dump(counts.tolist(), open("cube.json", "w"))
json.dump({"logical_count": counts.tolist()}, open("steps.json", "w"))
PY
    for file in cube.npy cube.json; do
        fails 2 "say what they are with --axes" place --policy static --counts $file --ranks 3
        place --policy static --counts $file --ranks 3 --axes layers,sources,experts --json >a.json
        [ "$(field '[[e["load"] for e in l["experts"]] for l in r["layers"]]' a.json)" = "[[12, 15, 18, 21], [48, 51, 54, 57]]" ]
        # Mean of two steps, each row rounded as a whole: (0..3 + 12..15) / 2 and so on.
        place --policy static --counts $file --ranks 3 --axes steps,layers,experts --json >b.json
        [ "$(field '[[e["load"] for e in l["experts"]] for l in r["layers"]]' b.json)" = "[[6, 7, 8, 9], [10, 11, 12, 13], [14, 15, 16, 17]]" ]
        place --policy static --counts $file --ranks 3 --axes steps,layers,experts --sum --first-step 1 --json >c.json
        [ "$(field '[e["load"] for e in r["layers"][0]["experts"]]' c.json)" = "[12, 13, 14, 15]" ]
    done
    place --policy static --counts steps.json --ranks 3 --json >d.json
    [ "$(field 'len(r["layers"])' d.json)" = 3 ]
    fails 2 "it has 3 axes, --axes layers,experts has 2" place --policy static --counts cube.npy --ranks 3 --axes layers,experts
}

@test "history is what lies before the window, and the report says so" {
    "$python" - <<'PY'
import json
steps = [[[8, 0, 0, 0]], [[0, 8, 0, 0]], [[0, 0, 8, 0]], [[0, 0, 0, 8]]]
json.dump({"logical_count": steps}, open("moving.json", "w"))
PY
    shown() { field 'r["shown"]' "$1"; }
    # EPLB with one spare slot gives it to the expert that was hot: here the one of the step before.
    place --policy 'eplb[lag=1,window=1]' --counts moving.json --ranks 2 --slots 3 --first-step 2 --steps 1 --json >a.json
    [ "$(field '[e["replicas"] for e in r["layers"][0]["experts"]]' a.json)" = "[1, 2, 1, 1]" ] ||
        [ "$(field 'max(range(4), key=lambda e: r["layers"][0]["experts"][e]["replicas"])' a.json)" = 1 ]
    [ "$(field 'r["layers"][0]["experts"][2]["load"]' a.json)" = 8 ]
    [[ $(shown a.json) == *"mean of 1 steps, steps 1 to 1"* ]]
    place --policy 'eplb[lag=2,window=1]' --counts moving.json --ranks 2 --slots 3 --first-step 2 --steps 1 --json >b.json
    [ "$(field 'max(range(4), key=lambda e: r["layers"][0]["experts"][e]["replicas"])' b.json)" = 0 ]
    [[ $(shown b.json) == *"steps 0 to 0"* ]]
    place --policy 'eplb[lag=1,window=10]' --counts moving.json --ranks 2 --slots 3 --first-step 3 --json >c.json
    [[ $(shown c.json) == *"mean of 3 steps, steps 0 to 2"* ]]
    place --policy 'eplb[lag=1,window=1]' --counts moving.json --ranks 2 --slots 3 --json >d.json
    [[ $(shown d.json) == "the mean of steps 0 to 3, as history too: nothing lies before" ]]
    place --policy ultraep --counts moving.json --ranks 2 --slots 3 --first-step 1 --steps 2 --json >e.json
    [ "$(shown e.json)" = "the mean of steps 1 to 2" ]
    place --policy static --counts moving.json --ranks 2 --json >f.json
    [ "$(shown f.json)" = "nothing" ]
    fails 2 "the file has 4 steps of counts" place --policy static --counts moving.json --ranks 2 --first-step 4
    fails 2 "the file has 4 steps of counts" place --policy static --counts moving.json --ranks 2 --first-step 3 --steps 2
}

@test "traces: as recorded, reshaped, a window, through --counts too" {
    place --policy eplb --trace "$example" --json >a.json
    "$python" "$reader" report a.json
    [ "$(field 'r["ranks"], len(r["layers"]), r["experts"], r["reshaped"]' a.json)" = "(8, 16, 64, False)" ]
    place --policy eplb --counts "$example" --json | grep -v measured | diff - <(grep -v measured a.json)
    place --policy eplb --trace "$example" --ranks 4 --json >b.json
    [ "$(field 'r["ranks"], r["reshaped"]' b.json)" = "(4, True)" ]
    # The loads of a window are those that h5py reads.
    place --policy 'eplb[window=1]' --trace "$example" --first-step 2 --steps 1 --json >c.json
    [[ $(field 'r["shown"]' c.json) == *"steps 1 to 1"* ]]
    "$python" - "$example" <<'PY'
import h5py, json, numpy, sys
f = h5py.File(sys.argv[1])
calls = {k: f["calls"][k][:] for k in ("step", "layer", "pairs")}
begin = numpy.concatenate([[0], numpy.cumsum(calls["pairs"])])
step = sorted(set(calls["step"]))[2]
r = json.load(open("c.json"))
for layer in range(16):
    rows = [i for i in range(len(calls["step"])) if calls["step"][i] == step and calls["layer"][i] == layer]
    count = sum(numpy.bincount(f["pairs/expert"][begin[i]:begin[i + 1]], minlength=64) for i in rows)
    assert [e["load"] for e in r["layers"][layer]["experts"]] == count.tolist(), layer
PY
    fails 2 "" place --policy eplb --trace "$example" --first-step 99
    # A window beyond what was recorded is all of it.
    place --policy 'eplb[window=1000000]' --trace "$example" --first-step 4 --json >d.json
    place --policy 'eplb[window=4]' --trace "$example" --first-step 4 --json >e.json
    diff <(grep -v 'measured\|"policy"' d.json) <(grep -v 'measured\|"policy"' e.json)
}

# ---- numbers of layers

@test "dense layers keep their rows and numbers in the files of serving programs" {
    echo '{"logical_count": [[0,0,0,0],[5,4,1,1],[1,4,5,1]]}' >dense.json
    place --policy eplb --counts dense.json --ranks 2 --slots 3 --json >a.json
    [ "$(field '[l["layer"] for l in r["layers"]]' a.json)" = "[1, 2]" ]
    for format in sglang tensorrt-llm vllm; do
        place -q --policy eplb --counts dense.json --ranks 2 --slots 3 --format $format >$format.out
        "$python" "$reader" $format $format.out a.json 1
    done
    printf '5,4,1,1\n1,4,5,1\n' >moe.csv
    for format in sglang tensorrt-llm vllm; do
        place -q --policy eplb --counts moe.csv --ranks 2 --slots 3 --dense-layers 1 --format $format | cmp - $format.out
    done
    fails 2 "the file of counts says which layers are dense" place --policy eplb --counts dense.json --ranks 2 --dense-layers 1
    # DeepSeek-V2-Lite: 27 layers, the first one dense.
    "$python" -c 'print("\n".join(",".join(str(1 + (l * e) % 7) for e in range(64)) for l in range(1, 27)))' >lite.csv
    place -q --policy eplb --counts lite.csv --ranks 8 --model deepseek-v2-lite --json >lite.json
    [ "$(field '[l["layer"] for l in r["layers"]] == list(range(1, 27))' lite.json)" = True ]
    place -q --policy eplb --counts lite.csv --ranks 8 --model deepseek-v2-lite --format sglang >lite.out
    "$python" "$reader" sglang lite.out lite.json 1
    fails 2 "pass --model that fits" place --policy eplb --counts moe.csv --ranks 2 --model deepseek-v2-lite
    head -n 3 lite.csv >three.csv
    fails 2 "the loads have 3 MoE layers, model deepseek-v2-lite has 26" place --policy eplb --counts three.csv --ranks 8 \
        --model deepseek-v2-lite --format sglang
}

@test "empty slots are filled so that every rank has as many, and the message says how many" {
    run --separate-stderr place --policy 'ultraep' --counts small.csv --ranks 4 --slots 3 --format sglang
    [ "$status" -eq 0 ]
    [[ $stderr == *"2 of 12 slots were empty"* ]]
    [[ $stderr == *"copies share evenly in SGLang: imbalance "* ]]
    printf '%s' "$output" >out
    place --policy 'ultraep' --counts small.csv --ranks 4 --slots 3 --json >a.json
    run "$python" "$reader" sglang out a.json
    [ "$output" = "filled 2" ]
}

# ---- outputs

@test "-o writes the whole file or none; --json beside a format" {
    place --policy eplb --counts eplb.csv --ranks 8 --nodes 2 --groups 4 --slots 2 --format vllm -o map.json --json >report.json 2>/dev/null
    "$python" "$reader" vllm map.json report.json
    place --policy eplb --counts eplb.csv --ranks 4 -o report2.json >table
    "$python" "$reader" report report2.json
    grep -q 'best of all' table
    rm -f ./*
    echo 3,4 >two.csv
    fails 2 "" place --policy ideal --counts two.csv --ranks 2 --format sglang -o out.json
    only_files two.csv
    fails 2 "both want standard output" place --policy eplb --counts two.csv --ranks 2 --format sglang --json
    fails 2 "" place --policy eplb --counts two.csv --ranks 2 -o nowhere/out.json
    only_files two.csv
    run place --policy eplb --counts two.csv --ranks 2 --json
    [ "$status" -eq 0 ]
    (trap '' XFSZ && ulimit -f 1 && exec "$mizan" place -q --policy eplb --counts two.csv --ranks 2 --slots 3000 \
        --format tensorrt-llm -o map.yaml 2>err) && false
    grep -q 'map.yaml: cannot write: File too large' err
    rm err
    only_files two.csv
    "$mizan" place --policy eplb --counts two.csv --ranks 2 --json >/dev/full 2>err && false
    grep -q 'cannot write' err
}

@test "the table of a policy that drops pairs says what its columns are of" {
    place --policy capacity --counts small.csv --ranks 4 | grep -q 'placed: of the pairs computed, the others of all$'
    place --policy eplb --counts small.csv --ranks 4 >table
    grep -q '^imbalance: pairs of the busiest rank over the mean$' table
}

@test "every key of the report is in the man page" {
    place --policy 'lrmoe[keep=0.5]' --counts small.csv --ranks 4 --json >a.json
    for key in $(grep -o '"[a-z_]*":' a.json | tr -d '":' | sort -u); do
        grep -q "_${key}_" "$root/analysis/mizan-place.1.scd" || { echo "$key is not documented" && false; }
    done
    for option in $("$mizan" place --help | grep -oE '^ .{0,6}--[a-z0-9-]+' | grep -oE -- '--[a-z0-9-]+'); do
        grep -q -- "\*$option\*" "$root/analysis/mizan-place.1.scd" || { echo "$option is not in the page" && false; }
    done
}

# ---- bad input

@test "every kind of bad counts is one line, exit 2, no output" {
    bad() { # bad TEXT CONTENT
        printf "$2" >bad.csv
        fails 2 "$1" place --policy eplb --counts bad.csv --ranks 2
    }
    bad "line 1: field 2 is '-4'" '3,-4,5\n'
    bad "line 2: field 1 is '1.5'" '3,4\n1.5,2\n'
    bad "field 1 is 'nan'" 'nan,4\n'
    bad "field 2 is '1e3'" '4,1e3\n'
    bad "field 1 is '4294967296'" '4294967296,1\n'
    bad "field 2 is '99999999999999999999999'" '1,99999999999999999999999\n'
    bad "line 2: 3 fields, the lines before have 2" '1,2\n1,2,3\n'
    bad "field 2 is ''" '1,\n'
    bad "field 1 is ''" ',1\n'
    bad "field 1 is 'layer'" 'layer,expert\n1,2\n'
    bad "empty" ''
    bad "empty" '\n\n'
    bad "one line for every source" 'layer,source,a,b\n0,0,1,2\n0,2,1,2\n'
    bad "one line for every source" 'layer,source,a,b\n0,0,1,2\n0,0,1,2\n'
    bad "a byte 0" '1,2\0003\n'
    head -c 5000 /dev/urandom >bad.csv
    fails 2 "" place --policy eplb --counts bad.csv --ranks 2
    head -c 100 /dev/zero >bad.csv
    fails 2 "" place --policy eplb --counts bad.csv --ranks 2
    fails 2 "" place --policy eplb --counts nowhere.csv --ranks 2
    fails 2 "" place --policy eplb --counts . --ranks 2
}

@test "every kind of bad JSON is one line, exit 2" {
    bad() { # bad TEXT CONTENT
        printf '%s' "$2" >bad.json
        fails 2 "$1" place --policy eplb --counts bad.json --ranks 2
    }
    bad "entry [1][0] is not a count" '[[1,2],[-1,2]]'
    bad "entry [0][1] is not a count" '[[1,2.5]]'
    bad "entry [0][1] is not a count" '[[1,"2"]]'
    bad "list [1] has 3 entries, the first has 2" '[[1,2],[1,2,3]]'
    bad "entry [1] is no list" '[[1,2],3]'
    bad "no layer, or no expert" '[]'
    bad "no layer, or no expert" '[[]]'
    bad "" '[[1,NaN]]'
    bad "" '[[1,99999999999999999999999999]]'
    bad "neither a list of counts" '{"logical_counts": [[1,2]]}'
    bad "entry logical_count[0][0] is not a count" '{"logical_count": [[null,2]]}'
    bad "all counts are 0" '{"logical_count": [[0,0],[0,0]]}'
    bad "more than 4 deep" '[[[[[1]]]]]'
    bad "" '[[1,2]'
    "$python" -c 'print("[" * 100000)' >bad.json
    fails 2 "" place --policy eplb --counts bad.json --ranks 2
    echo '[1,2]' | fails 2 "standard input: only CSV is read from a pipe" place --policy eplb --counts - --ranks 2
    mkfifo pipe
    echo '[1,2]' >pipe &
    fails 2 "pipe: only CSV is read from a pipe" place --policy eplb --counts pipe --ranks 2
    wait
}

@test "every kind of bad array is one line, exit 2" {
    "$python" - <<'PY'
import numpy
numpy.save("float.npy", numpy.array([[1.0, 2.0]]))
numpy.save("nan.npy", numpy.array([[1.0, numpy.nan]]))
numpy.save("negative.npy", numpy.array([[1, -2]]))
numpy.save("huge.npy", numpy.array([[1, 2 ** 40]]))
numpy.save("empty.npy", numpy.zeros((0, 4), dtype=int))
numpy.save("scalar.npy", numpy.array(3))
numpy.save("five.npy", numpy.zeros((1, 1, 1, 1, 1), dtype=int))
data = open("negative.npy", "rb").read()
open("short.npy", "wb").write(data[:-4])
open("long.npy", "wb").write(data + b"1234")
open("head.npy", "wb").write(data[:20])
open("file.pt", "wb").write(b"PK\x03\x04" + bytes(100))
PY
    fails 2 "holds floats" place --policy eplb --counts float.npy --ranks 2
    fails 2 "holds floats" place --policy eplb --counts nan.npy --ranks 2
    fails 2 "element 1 is -2, not a count" place --policy eplb --counts negative.npy --ranks 2
    fails 2 "element 1 is 1099511627776, not a count" place --policy eplb --counts huge.npy --ranks 2
    fails 2 "no layer, or no expert" place --policy eplb --counts empty.npy --ranks 2
    fails 2 "0 axes" place --policy eplb --counts scalar.npy --ranks 2
    fails 2 "5 axes" place --policy eplb --counts five.npy --ranks 2
    for file in short.npy long.npy head.npy; do
        fails 2 "" place --policy eplb --counts $file --ranks 2
    done
    fails 2 "mizan trace import" place --policy eplb --counts file.pt --ranks 2
}

@test "options that cannot be met say what to do" {
    fails 2 "--counts or --trace is missing" place --policy eplb --ranks 2
    fails 2 "--step-tokens is for traces, small.csv holds counts" place --policy eplb --counts small.csv --ranks 2 --step-tokens 9
    fails 2 "give one of them" place --policy eplb --ranks 2 --counts small.csv --trace "$example"
    fails 2 "--policy is missing" place --counts small.csv --ranks 2
    fails 2 "--ranks is missing" place --policy eplb --counts small.csv
    fails 2 "4 ranks hold 4 experts, a layer has 8: give at least 2" place --policy eplb --counts small.csv --ranks 4 --slots 1
    fails 2 "--nodes 3 does not divide the 4 ranks" place --policy eplb --counts small.csv --ranks 4 --nodes 3
    fails 2 "--groups 3 does not divide the 8 experts" place --policy eplb --counts small.csv --ranks 4 --groups 3
    fails 2 "cluster a100-80gb:8 has 8 ranks" place --policy eplb --trace "$example" --ranks 4 --cluster a100-80gb:8
    fails 2 "--nodes 2: cluster a100-80gb:8 has 1" place --policy eplb --trace "$example" --nodes 2 --cluster a100-80gb:8
    fails 2 "give one of them" place --policy 'ultraep[slots=4]' --slots 3 --counts small.csv --ranks 4
    place --policy 'ultraep[slots=3,eps=0]' --slots 3 --counts small.csv --ranks 4 >/dev/null
    fails 2 "slots=1 is too few" place --policy 'ultraep[slots=1]' --counts small.csv --ranks 4
    place --policy 'ultraep[]' --slots 3 --counts small.csv --ranks 4 >/dev/null
    fails 2 "takes one policy" place --policy eplb,symi --counts small.csv --ranks 4
    fails 2 "--format" place --policy eplb --counts small.csv --ranks 4 --format megatron
    fails 2 "did you mean" place --policy elpb --counts small.csv --ranks 4
    fails 2 "--ranks" place --policy eplb --counts small.csv --ranks -1
    fails 2 "--ranks" place --policy eplb --counts small.csv --ranks 99999999
    fails 2 "is a bound, not a placement" place --policy ideal --counts small.csv --ranks 4 --format sglang
    fails 2 "more than 2 slots" place --policy 'llep[alpha=1,m=1]' --counts small.csv --ranks 4 --slots 2 --format sglang
    fails 2 "twice on rank 0" place --policy symi --counts small.csv --ranks 4 --slots 3 --format vllm
    fails 2 "" place --policy eplb --counts small.csv --ranks 4 extra
}

# ---- what is written about policies

@test "every policy of the table has a row in the README and is a file; every option is in the list" {
    readme=$root/sim/policy/README.md
    "$mizan" sim --list >list
    names=$(sed -n '/^extern/,/;/p' "$root/sim/policy/table.c" | grep -o 'mz_policy_[a-z]*' | sed 's/mz_policy_//' | sort -u)
    [ "$(echo "$names" | wc -l)" -ge 14 ]
    for name in $names; do
        grep -q "^| \`$name\` |" "$readme" || { echo "$name has no row in the README" && false; }
        [ -f "$root/sim/policy/policy_$name.c" ]
        grep -q "^  $name " list
        # Options as the source spells them, between this policy's line and the next.
        sed -n "/^  $name /,/^  [a-z]/p" list >block
        for option in $(sed -n "/^static const mz_opt [a-z_]*\[\]/,/^};/p" "$root/sim/policy/policy_$name.c" |
            grep -oE '^    \{"[a-z_0-9]+"' | grep -oE '[a-z_0-9]+'); do
            grep -qE "^    $option=" block || { echo "$name: $option is not listed" && false; }
        done
    done
    # ... and no row is of a policy that is gone.
    for name in $(grep -oE '^\| `[a-z]+` \|' "$readme" | grep -oE '[a-z]+'); do
        echo "$names" | grep -qx "$name"
    done
}

# ---- plug-ins

build_plugin() { # build_plugin SOURCE OUTPUT FLAGS...: the line of the README
    cc -shared -fPIC -I"$root" "$1" -o "$2" "${@:3}"
}

@test "a plug-in built by the README's line: in mizan place and in mizan sim" {
    grep -qF 'cc -shared -fPIC -I. sim/policy/example/hottest.c -o hottest.so' "$root/sim/policy/README.md"
    build_plugin "$root/sim/policy/example/hottest.c" hottest.so
    # By hand: expert 0 (900) is shared by ranks 0, 2 and 3.
    place --policy './hottest.so[copies=2]' --counts small.csv --ranks 4 --json >a.json
    "$python" "$reader" report a.json
    [ "$(field '[x["load"] for x in r["layers"][0]["ranks"]], r["policy"]' a.json)" = "([400, 400, 400, 400], './hottest.so[copies=2]')" ]
    place --policy hottest.so --slots 4 --counts small.csv --ranks 4 --format sglang >out 2>/dev/null
    place --policy hottest.so --slots 4 --counts small.csv --ranks 4 --json >b.json
    "$python" "$reader" sglang out b.json
    fails 2 "uses 4 slots on a rank, --slots 3" place --policy hottest.so --slots 3 --counts small.csv --ranks 4
    sim=("$mizan" sim --trace "$example" --model olmoe-1b-7b --cluster a100-80gb:8)
    "${sim[@]}" --policy 'static,./hottest.so[copies=3],ideal' --json >s.json
    "${sim[@]}" --policy 'static,./hottest.so[copies=3],ideal' --json | cmp - s.json
    "$python" - <<'PY'
import json
static, hottest, ideal = json.load(open("s.json"))["runs"]
assert hottest["policy"] == "./hottest.so[copies=3]" and not hottest["lossy"]
assert ideal["rank_imbalance"]["mean"] < hottest["rank_imbalance"]["mean"] < static["rank_imbalance"]["mean"]
assert hottest["memory_bytes"]["replicas"] > 0
PY
}

@test "the header of plug-ins stands alone in C99 and C++" {
    echo '#include "sim/policy/plugin.h"' >alone.c
    cp alone.c alone.cpp
    cc -std=c99 -Wall -Wextra -Wpedantic -Werror -I"$root" -fsyntax-only alone.c
    c++ -std=c++11 -Wall -Wextra -Werror -I"$root" -fsyntax-only alone.cpp
}

@test "plug-ins that fail end the command with one line that names them" {
    build_plugin "$root/tests/policy/plugins/faulty.c" faulty.so -DROUTE
    build_plugin "$root/tests/policy/plugins/faulty.c" old.so -DABI=0
    build_plugin "$root/tests/policy/plugins/faulty.c" other.so -DSYMBOL=other
    bad() { # bad TEXT PLUG-IN
        fails 2 "plug-in $2" place --policy "$2$3" --counts small.csv --ranks 4
        [[ $stderr == *"$1"* ]]
        fails 2 "plug-in $2" "$mizan" sim --trace "$example" --model olmoe-1b-7b --cluster a100-80gb:8 --policy "static,$2$3"
        [[ $stderr == *"$1"* ]]
    }
    bad "it ended in decide (signal 11)" ./faulty.so '[what=crash]'
    bad "it ended in route (signal 6)" ./faulty.so '[what=abort,when=route]'
    bad "it ended while it was loaded (exit status 7)" ./faulty.so '[what=exit,when=init]'
    bad "(no answer for 0.2 s)" ./faulty.so '[what=loop,timeout=0.2]'
    bad "expert 0 has no host" ./faulty.so '[what=no-host]'
    bad "pairs assigned" ./faulty.so '[what=lose]'
    bad "says: not?with me" ./faulty.so '[what=refuse]'
    bad "plug-in interface 0" ./old.so
    bad "exports no variable mizan_plugin" ./other.so
    cp small.csv text.so
    bad "cannot be loaded" text.so
    bad "No such file" ./nowhere.so
    # What it prints does not get among the results.
    place --policy './faulty.so[what=print]' --counts small.csv --ranks 4 --json >a.json 2>err
    "$python" "$reader" report a.json
    grep -q 'a plug-in prints' err
}

# interrupted_while_busy TEXT COMMAND...: it ends soon, as by a signal, with one line that has TEXT, and leaves no process.
interrupted_while_busy() {
    local text=$1 code=0 i
    shift
    "$@" >out 2>err &
    local pid=$!
    for ((i = 0; i < 600; i++)); do
        ! grep -q 'a plug-in is busy' err || break
        sleep 0.05
    done
    [ "$i" -lt 600 ]
    local child
    child=$(pgrep -P "$pid")
    kill -INT "$pid"
    local begin=$SECONDS
    wait "$pid" || code=$?
    cat err
    [ "$code" -eq 130 ]
    [ $((SECONDS - begin)) -lt 20 ] # a plug-in may take 60 s
    [ "$(tail -n 1 err | grep -c "plug-in ./faulty.so: interrupted $text")" -eq 1 ]
    ! kill -0 "$child" 2>/dev/null
}

@test "an interrupt does not wait for a plug-in" {
    build_plugin "$root/tests/policy/plugins/faulty.c" faulty.so -DROUTE
    local sim=("$mizan" -q sim --trace "$example" --model olmoe-1b-7b --cluster a100-80gb:8)
    interrupted_while_busy "in decide" "$mizan" -q place --policy './faulty.so[what=busy]' --counts small.csv --ranks 4
    interrupted_while_busy "while it was loaded" "${sim[@]}" --policy './faulty.so[what=busy,when=init]'
    interrupted_while_busy "while it was loaded" "$mizan" -q replay --trace "$example" --model olmoe-1b-7b --threads 1 --hidden 64 --inter 32 \
        --layers 2 --steps 1 --policy './faulty.so[what=busy,when=init]'
    interrupted_while_busy "in route" "${sim[@]}" --policy './faulty.so[what=busy,when=route]'
}
