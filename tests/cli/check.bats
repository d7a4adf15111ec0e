#!/usr/bin/env bats
# mizan sim --scope layers and mizan check: what is written, compared, refused.

load common

setup() {
    enter_tmpdir
    example=$root/traces/example/olmoe-8r.h5
}

predict() { # OUTPUT OPTION...
    local output=$1
    shift
    "$mizan" -q sim --scope layers --trace "$example" --model olmoe-1b-7b --cluster a100-80gb:1x8 --steps 2 \
        --hidden 64 --inter 32 --layers 2 --policy 'static,ultraep,lrmoe[keep=0.5]' "$@" >"$output"
}

# A prediction p.json and what would measure it m.json.
pair() { # KEY=VALUE...
    predict p.json --json --detail
    digest=unknown
    measure m.json
    digest=$(digest_of p.json m.json)
    measure m.json "$@"
}

digest_of() { # PREDICTION MEASUREMENT: the prediction's, as check says it
    "$mizan" -q check "$@" --json 2>/dev/null | sed -n 's/.*"prediction_digest": "\(.*\)".*/\1/p'
}

measure() { # OUTPUT KEY=VALUE...
    local output=$1
    shift
    "$python" "$BATS_TEST_DIRNAME/measured.py" p.json "$digest" "$@" >"$output"
}

@test "scope layers: the same bytes from the same input, in HDF5 and JSON; detail on request" {
    predict a.json --json -o a.h5
    predict b.json --json -o b.h5
    cmp a.json b.json
    cmp a.h5 b.h5
    predict c.json --json --detail
    ! grep -q '"detail"' a.json
    grep -q '"detail"' c.json
    grep -q '"kind": "prediction"' a.json
    grep -q '"scope": "layers"' a.json
    grep -q '"digest": "sha256:' a.json
    cp c.json p.json
    digest=unknown
    measure m.json
    digest=$(digest_of a.h5 m.json)
    [ -n "$digest" ]
    [ "$digest" = "$(digest_of c.json m.json)" ]
}

# What the digest is of is written in common/io/result_file.h; here it is computed from the HDF5 file by other means.
@test "a prediction's digest is that of its text and its arrays" {
    predict a.txt -o a.h5
    predict p.json --json --detail
    digest=unknown
    measure m.json
    digest=$(digest_of a.h5 m.json)
    "$python" - "$digest" <<'PY'
import hashlib, sys
import h5py, numpy
file = h5py.File("a.h5")
text = file["json"][()]
sha = hashlib.sha256(text if isinstance(text, bytes) else text.encode())
def add(name, value):
    sha.update(name.encode() + b"\0")
    sha.update(numpy.array([value.ndim, *value.shape], "<i8").tobytes())
    sha.update(numpy.ascontiguousarray(value).tobytes())
for name in sorted(file["runs"]):
    run = file["runs"][name]
    steps = run["step_time_s"][()]
    add("step_time_s", steps.astype("<f8"))
    add("step_ordinal", numpy.arange(len(steps), dtype="<i8"))
    add("rank_busy_s", run["rank_busy_s"][()].astype("<f8"))
    add("rank_memory_bytes", run["rank_memory_bytes"][()].astype("<i8"))
    detail = run["detail_s"]
    for k, phase in enumerate(detail.attrs["columns"].decode().split(",")):
        if detail[..., k].any():
            add(phase, detail[..., k].astype("<f8"))
assert sys.argv[1] == "sha256/2:" + sha.hexdigest(), sys.argv[1]
PY
}

@test "a prediction that is rewritten after the replay was not fixed before it, or is refused" {
    pair
    rewrite() { # STATEMENT
        "$python" -c '
import json, sys
r = json.load(open("p.json")); run = r["runs"][0]; detail = run["detail"]
exec(sys.argv[1])
json.dump(r, open("q.json", "w"))' "$@"
    }
    late() { # STATEMENT
        rewrite "$1"
        run "$mizan" check q.json m.json --json
        [ "$status" -eq 1 ]
        grep -q '"fixed_before": false' <<<"$output"
    }
    rewrite ''
    "$mizan" -q check q.json m.json --json | grep -q '"fixed_before": true'
    late 'a = detail["step_time_s"]; a[0], a[1] = a[1], a[0]'
    late 'detail["step_ordinal"] = [1, 0]'
    late 'a = detail["rank_memory_bytes"][3]; a[0] += 1'
    late 'a = detail["detail_s"]; a[0], a[1] = a[1], a[0]'
    rewrite 'detail["step_time_s"][0] *= 1.01'
    fails 2 "q.json: step_time_s of static is" "$mizan" check q.json m.json
    rewrite 'a = [x for layer in detail["detail_s"][0] for x in layer]
k = list(run["phases_s"]).index("experts")
for x in a: x[k] *= 1.01'
    fails 2 "q.json: experts of static is" "$mizan" check q.json m.json
}

@test "scope layers: sizes are told, and asked for only there" {
    predict a.txt
    grep -q 'routed experts alone: 2 layers, 64 experts, hidden 64, intermediate 32; 8 ranks on 1 device' a.txt
    fails 2 "go with --scope layers" "$mizan" sim --trace "$example" --model olmoe-1b-7b --cluster a100-80gb:8 --hidden 64
    fails 2 "--layers 17" "$mizan" sim --scope layers --trace "$example" --model olmoe-1b-7b --cluster a100-80gb:8 --layers 17
    fails 2 "leave --ep out" "$mizan" sim --scope layers --trace "$example" --model olmoe-1b-7b --cluster a100-80gb:8 --ep 4
    fails 2 "--network port" "$mizan" sim --scope layers --trace "$example" --model olmoe-1b-7b --cluster a100-80gb:8 --network flow
}

@test "detail of a whole step adds up to what its phases say" {
    "$mizan" -q sim --trace "$example" --model olmoe-1b-7b --cluster a100-80gb:8 --steps 1 --policy static,symi \
        --json --detail >a.json
    "$python" - <<'PY'
import json
for run in json.load(open("a.json"))["runs"]:
    step = run["detail"]["detail_s"][0]
    assert len(step) == 17 and len(step[0]) == 8
    for k, (name, seconds) in enumerate(run["phases_s"].items()):
        worst = max(sum(layer[r][k] for layer in step) for r in range(8))
        assert abs(worst - seconds) <= 1e-9 * max(seconds, 1e-6), (name, worst, seconds)
PY
}

@test "a perfect measurement passes, and the last line says so" {
    pair
    run --separate-stderr "$mizan" check p.json m.json --html page.html
    echo "$output"
    [ "$status" -eq 0 ]
    [ -z "$stderr" ]
    [ "${lines[-1]}" = "pass: all 10 targets are met" ]
    ! grep -q FAIL <<<"$output"
    grep -q '</html>' page.html
    ! grep -qE 'https?:|<script|src=' page.html
    run "$mizan" check p.json m.json --json
    [ "$status" -eq 0 ]
    "$python" -c 'import json, sys; r = json.loads(sys.argv[1]); assert r["passed"] and r["schema"] == "mizan-check/1"' "$output"
}

@test "a target that is missed: exit code 1, the line that says which" {
    pair phase.dispatch=0.8
    run --separate-stderr "$mizan" check p.json m.json
    echo "$output"
    [ "$status" -eq 1 ]
    grep -q '^FAIL  phases of at least 5 % of a step within 10 %: +25.00 % (dispatch of ' <<<"$output"
    [[ ${lines[-1]} == "fail: "*" of 10 targets are missed" ]]
    [[ $stderr == "mizan: check: fail: "* ]]
    measure m.json peak=0.98
    run --separate-stderr "$mizan" check p.json m.json
    [ "$status" -eq 1 ]
    grep -q '^FAIL  peak memory within 1 %' <<<"$output"
    measure m.json scale.static=0.9
    run --separate-stderr "$mizan" check p.json m.json
    [ "$status" -eq 1 ]
    grep -q '^FAIL  step time, worst error at most 5 %: +11.11 % (static)' <<<"$output"
}

@test "a prediction that the measurement does not know was not fixed before it" {
    pair
    digest=sha256/2:other
    measure m.json
    run --separate-stderr "$mizan" check p.json m.json
    [ "$status" -eq 1 ]
    grep -q 'prediction was not fixed before the replay' <<<"$output"
}

@test "files that do not belong together, or are no results" {
    pair seed=7
    fails 2 "settings.seed is 1 in the prediction, 7 in the measurement" "$mizan" check p.json m.json
    measure m.json
    predict other.json --json --detail --seed 1 --first-step 1
    fails 2 "settings.first_step" "$mizan" check other.json m.json
    fails 2 "first file is a measurement" "$mizan" check m.json p.json
    "$mizan" -q sim --trace "$example" --model olmoe-1b-7b --cluster a100-80gb:8 --steps 1 --json >step.json
    fails 2 "a simulation of whole steps" "$mizan" check step.json m.json
    predict thin.json --json
    fails 2 "write it with --output, or with --json --detail" "$mizan" check thin.json m.json
    fails 2 "no-such.json" "$mizan" check p.json no-such.json
    echo '{"schema": "mizan-result/1"' >cut.json
    fails 2 "cut.json" "$mizan" check p.json cut.json
    fails 2 "" "$mizan" check p.json
    fails 2 "" "$mizan" check p.json m.json --html no/such/folder.html
}

# A step of another window, a model, a trace that are others; a phase that is missing or unknown; policies in another order
# are the same files.
@test "odd files: one line that says what is wrong" {
    pair
    edit() { # OUTPUT STATEMENT
        "$python" -c '
import json, sys
r = json.load(open("m.json")); run = r["runs"][0]
exec(sys.argv[2])
json.dump(r, open(sys.argv[1], "w"))' "$@"
    }
    edit trace.json 'r["trace"]["digest"] = "sha256:0"'
    fails 2 "trace.digest is" "$mizan" check p.json trace.json
    edit model.json 'r["model"]["hidden"] = 128'
    fails 2 "model.hidden is 64 in the prediction, 128 in the measurement" "$mizan" check p.json model.json
    edit window.json 'r["settings"]["steps"] = 3'
    fails 2 "settings.steps is 2 in the prediction, 3 in the measurement" "$mizan" check p.json window.json
    edit phase.json 'del run["phases_s"]["dispatch"]'
    fails 2 "phase.json: a list of its detail is missing or not as long as it should be" "$mizan" check p.json phase.json
    edit strange.json 'run["phases_s"]["lunch"] = 1.0'
    fails 2 "strange.json: phases_s is not as it should be" "$mizan" check p.json strange.json
    edit policy.json 'run["policy"] = "capacity"'
    fails 2 "policy static is in the prediction alone" "$mizan" check p.json policy.json
    edit detail.json 'run["detail"]["detail_s"] = run["detail"]["detail_s"][:1]'
    fails 2 "detail.json: detail_s does not fit the run" "$mizan" check p.json detail.json
    edit nan.json 'run["detail"]["step_time_s"][0] = float("nan")'
    fails 2 "not valid JSON: invalid token near 'NaN'" "$mizan" check p.json nan.json
    edit negative.json 'run["detail"]["step_time_s"][0] = -1.0'
    fails 2 "negative.json: step_time_s has a number that is no time" "$mizan" check p.json negative.json
    edit none.json 'r["runs"] = []'
    fails 2 "none.json: it holds no runs" "$mizan" check p.json none.json
    edit wrong.json 'r["runs"] = 3'
    fails 2 "wrong.json: its schema is not mizan-result/1" "$mizan" check p.json wrong.json
    # A prediction in place of a measurement, and the same measurement twice.
    predict other.json --json --detail --seed 2
    fails 2 "second file is a prediction" "$mizan" check p.json other.json
    head -c 3000 m.json >cut.json
    fails 2 "(is the file truncated?)" "$mizan" check p.json cut.json
    fails 2 "second file is a prediction, nothing was measured in it: pass what mizan replay wrote" "$mizan" check p.json p.json
    fails 2 "first file is a measurement" "$mizan" check m.json m.json
    predict p.h5.txt -o p.h5
    : >cut.h5
    fails 2 "cut.h5: is empty" "$mizan" check cut.h5 m.json
    for bytes in 100 2000 9000; do
        head -c $bytes p.h5 >cut.h5
        fails 2 "cut.h5: not a readable HDF5 file" "$mizan" check cut.h5 m.json
    done
    edit order.json 'r["runs"].reverse()'
    "$mizan" -q check p.json order.json --json >order.txt
    "$mizan" -q check p.json m.json --json >plain.txt
    cmp order.txt plain.txt
}

@test "every option and key of check is in its man page" {
    pair
    "$mizan" check p.json m.json --json >check.json
    for key in $("$python" -c '
import json
def keys(value, open=True):
    if isinstance(value, dict):
        for key, item in value.items():
            if open: print(key)
            keys(item, key not in ("phases_s", "memory_bytes"))
    elif isinstance(value, list):
        for item in value: keys(item)
keys(json.load(open("check.json")))' | sort -u); do
        grep -q -- "\*$key\*" "$root/analysis/mizan-check.1.scd" || { echo "$key" && false; }
    done
    # One line a target, but one for both of step times.
    targets=$("$python" -c 'import json; print(len(json.load(open("check.json"))["targets"]))')
    lines=$(sed -n '/^# TARGETS/,/^# OPTIONS/p' "$root/analysis/mizan-check.1.scd" | grep -c '^- ')
    [ "$lines" -eq $((targets - 1)) ]
    for option in $("$mizan" check --help | grep -oE '^ .{0,6}--[a-z0-9-]+' | grep -oE -- '--[a-z0-9-]+'); do
        grep -q -- "\*$option\*" "$root/analysis/mizan-check.1.scd" || { echo "$option" && false; }
    done
}
