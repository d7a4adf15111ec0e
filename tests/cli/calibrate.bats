#!/usr/bin/env bats
# mizan calibrate: the profile it writes is one that the simulator takes; bad input; the man page.

load common

setup() {
    enter_tmpdir
}

calibrate() { "$mizan" calibrate "$@"; }

@test "the profile that calibrate writes is taken by sim, and says what was measured" {
    calibrate -o here.json --ranks 4 --pool 2MiB --repeats 5 --threads 1 -q
    "$python" - <<'END'
import json, math, os
p = json.load(open("here.json"))
m = p["measured"]
assert m["backend"] == "host" and m["transport"] == "local" and m["processes"] == 1 and m["workers"] == 1, m
assert p["device"]["ranks_per_device"]["value"] == 4
assert p["device"]["memory"]["value"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE"), p["device"]["memory"]
for name in ("pack", "combine", "swiglu_backward", "select", "copy", "update_adamw", "product_wgrad", "product_up"):
    kind = m["kinds"][name]
    sizes = ("m", "n", "k") if name.startswith("product") else ("rows", "cols", "bytes")
    count = len(kind["seconds"])
    assert count > 0 and all(len(kind[s]) == count for s in sizes), name
    assert all(t >= 0 for t in kind["terms"]) and kind["residual"] >= 0, name
    # the residual is the root of the mean squared relative error of terms alone
    errors = []
    for i in range(count):
        a, b, c = (kind[s][i] for s in sizes)
        feature = (1, b * c, a * (b + c), a * b * c) if name.startswith("product") else (1, a, c)
        fitted = sum(t * f for t, f in zip(kind["terms"], feature))
        errors.append((kind["seconds"][i] / fitted - 1) ** 2)
    assert math.isclose(kind["residual"], math.sqrt(sum(errors) / count), rel_tol=1e-6), (name, kind["residual"])
END
    "$mizan" sim --scope layers -t "$root"/traces/example/olmoe-8r.h5 -m olmoe-1b-7b --ranks 4 -c ./here.json:1 \
        --hidden 128 --inter 64 --layers 2 --policy static,symi,ultraep,lrmoe --json >sim.json
    "$python" -c 'import json; r = json.load(open("sim.json")); assert all(x["step_time_s"]["mean"] > 0 for x in r["runs"])'
}

@test "bad input of calibrate" {
    local line
    while IFS='|' read -r arguments words; do
        # shellcheck disable=SC2086
        run --separate-stderr calibrate $arguments
        [ "$status" -eq 2 ] || { echo "$arguments: $status" && false; }
        [ "${#stderr_lines[@]}" -eq 1 ]
        [[ $stderr == *"$words"* ]] || { echo "$arguments: $stderr" && false; }
    done <<'END'
--hidden 64|--hidden and --inter go together
--repeats 2|repeats
--repeats 0|repeats
--transport carrier-pigeon|carrier-pigeon
--pool 1KiB|pool
surplus|surplus
-o /nowhere/here.json --pool 1MiB --repeats 5 -q|/nowhere
END
}

@test "without a GPU the cuda backend is missing hardware" {
    command -v nvidia-smi >/dev/null && skip "there may be a GPU"
    run --separate-stderr calibrate --backend cuda
    [ "$status" -eq 3 ]
    [ "${#stderr_lines[@]}" -eq 1 ]
}

@test "an interrupt leaves no profile" {
    "$mizan" calibrate -o here.json --repeats 1001 -q &
    local job=$!
    sleep 1
    kill -TERM "$job"
    local status=0
    wait "$job" || status=$?
    [ "$status" -eq 130 ] || { echo "$status" && false; }
    [ -z "$(ls -A)" ]
}

@test "every option of calibrate is in its man page" {
    for option in $(calibrate --help | grep -o -- '--[a-z-]*' | sort -u); do
        [ "$option" = --help ] || grep -q -- "\*$option\*" "$root/replay/mizan-calibrate.1.scd" || { echo "$option" && false; }
    done
}
