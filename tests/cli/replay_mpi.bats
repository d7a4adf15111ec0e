#!/usr/bin/env bats
# mizan replay under mpirun: the same results whatever the number of processes; whatever happens to one, all end soon,
# each that can with one line.

load common

setup() {
    enter_tmpdir
    command -v mpirun >/dev/null || skip "no mpirun"
    [ -e "${mizan%/*}/mizan-mpi.so" ] || skip "built without Open MPI"
    example=$(ls "$root"/traces/example/*.h5 | head -n 1)
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 # containers
    export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_btl=self,vader OMPI_MCA_btl_vader_single_copy_mechanism=none
    # Open MPI's own memory is not ours to watch.
    export ASAN_OPTIONS=${ASAN_OPTIONS:-}:detect_leaks=0
    unset MIZAN_REPLAY_FAULT
    replay=("$mizan" replay --trace "$example" --model olmoe-1b-7b --threads 1 -q --hidden 64 --inter 32 --layers 2)
}

# broken FAULT PROCESSES LINES POLICY: ends within 30 s, not with 0, with at least LINES lines and one per process at most.
broken() {
    local fault=$1 processes=$2 least=$3 policy=$4 start=$SECONDS lines
    run --separate-stderr env MIZAN_REPLAY_FAULT="$fault" timeout 60 mpirun --quiet -n "$processes" "${replay[@]}" --steps 1 --warmup 0 \
        --policy "$policy" --timeout 3
    echo "$fault: exit code $status after $((SECONDS - start)) s; stdout: $output; stderr: $stderr"
    [ "$status" -ne 0 ]
    [ "$status" -ne 124 ]
    [ $((SECONDS - start)) -lt 30 ]
    [ -z "$output" ]
    lines=$(printf '%s\n' "$stderr" | grep -c '^mizan: replay: ')
    [ "$lines" -ge "$least" ]
    [ "$lines" -le "$processes" ]
    [[ $stderr == *"process "*" of $processes (ranks "* ]]
    ! pgrep -f "^$mizan replay --trace $example .*--timeout 3$" >/dev/null
}

@test "1, 2, 4 and 8 processes compute the same bytes and count the same" {
    "${replay[@]}" --steps 2 --policy 'static,symi,ultraep,lrmoe[keep=0.5]' --digest --json >0.json
    for processes in 1 2 4 8; do
        mpirun --quiet -n $processes "${replay[@]}" --steps 2 --policy 'static,symi,ultraep,lrmoe[keep=0.5]' --transport mpi \
            --digest --json >$processes.json
        "$mizan" -q sim --scope layers --trace "$example" --model olmoe-1b-7b --cluster a100-80gb:${processes}x$((8 / processes)) \
            --hidden 64 --inter 32 --layers 2 --steps 2 --policy 'static,symi,ultraep,lrmoe[keep=0.5]' --json >sim$processes.json
    done
    "$python" - <<'EOF2'
import json
alone = json.load(open("0.json"))
last = alone["runs"]
for p in (1, 2, 4, 8):
    r = json.load(open(f"{p}.json"))
    assert r["settings"]["processes"] == p and r["settings"]["transport"] == "mpi"
    assert r["settings"]["digests"] == alone["settings"]["digests"], p
    assert r["settings"]["verified"] == alone["settings"]["verified"], (p, r["settings"]["verified"], alone["settings"]["verified"])
    assert all(alone["settings"]["verified"][key] > 0 for key in ("tokens", "values", "selections", "largest"))
    for a, b in zip(alone["runs"], r["runs"]):
        for key in ("peak_memory_bytes", "memory_bytes", "dispatch_bytes", "combine_bytes", "backward_dispatch_bytes",
                    "backward_combine_bytes", "transfer_bytes", "kept_pairs_fraction", "dropped_pairs_fraction", "rank_imbalance"):
            assert a[key] == b[key], (p, a["policy"], key, a[key], b[key])
    # fewer ranks share a process: less within, all the same in all, and as it was predicted
    for before, a, b, s in zip(last, alone["runs"], r["runs"], json.load(open(f"sim{p}.json"))["runs"]):
        within, between = b["within_process_bytes"], b["between_process_bytes"]
        assert abs(within + between - a["within_process_bytes"]) <= 1 and a["between_process_bytes"] == 0, (p, a["policy"])
        assert within == a["within_process_bytes"] if p == 1 else 0 < between and within < before["within_process_bytes"], p
        assert p < 8 or within == 0
        assert a["lossy"] or (s["within_process_bytes"], s["between_process_bytes"]) == (within, between), (p, a["policy"])
    last = r["runs"]
EOF2
}

@test "without --transport mpirun means mpi, and only process 0 speaks" {
    mpirun --quiet -n 2 "${replay[@]}" --steps 1 --policy static -o out.h5 >out
    grep -q "8 ranks in 2 processes, transport mpi" out
    [ "$(grep -c '^lossless' out)" -eq 1 ]
    [ -s out.h5 ]
}

@test "what does not fit is refused by every process" {
    run mpirun --quiet -n 3 "${replay[@]}" --steps 1 --policy static
    echo "$output"
    [ "$status" -eq 2 ]
    [[ $output == *"8 ranks cannot be spread over 3 processes"* ]]
    run mpirun --quiet -n 2 "${replay[@]}" --steps 1 --policy static --transport local
    echo "$output"
    [ "$status" -eq 2 ]
    [[ $output == *"pass --transport mpi"* ]]
    [ -e /dev/nvidia0 ] && return
    run mpirun --quiet -n 2 "${replay[@]}" --steps 1 --policy static --transport nccl
    echo "$output"
    [ "$status" -eq 3 ]
    [[ $output == *"--transport nccl needs"* ]]
}

@test "which process it was is said, whatever else the error speaks of" {
    run --separate-stderr mpirun --quiet -n 2 "${replay[@]}" --steps 1 --policy static --timeout 3 -o 'no process here/out.h5'
    echo "$stderr"
    [ "$status" -eq 2 ]
    [[ $stderr == *"mizan: replay: process 0 of 2 (ranks 0 to 3): "*"no process here"* ]]
}

@test "a process is killed in each phase" {
    local phases
    phases=$("${replay[@]}" --steps 1 --policy ultraep --json |
        "$python" -c 'import json, sys; p = json.load(sys.stdin)["runs"][0]["phases_s"]; print(*(k for k in p if p[k] > 0 and k != "launch_wait"))')
    echo "$phases"
    [ "$(wc -w <<<"$phases")" -eq 17 ] # all of the README but score
    for phase in $phases; do
        broken "kill:$phase:5:0" 2 1 ultraep
    done
    broken "kill:score:5:0" 2 1 'lrmoe[keep=0.5]'
    broken "kill:experts:3:0" 4 1 'lrmoe[keep=0.5]'
}

@test "a process hangs" {
    broken "hang:experts:5:0" 4 1 ultraep
    broken "hang:gradient_reduce:0:0" 2 1 static
}

# Of a calibration nothing but a signal makes a process hang: its second one is stopped once it has begun to measure.
@test "with the timeout that nobody gave, a job whose process hangs is over within 30 seconds" {
    local start=$SECONDS name="hangs-$$-$BATS_TEST_NUMBER" code
    {
        code=0
        env MIZAN_REPLAY_FAULT=hang:experts:5:0 timeout 60 mpirun --quiet -n 2 "${replay[@]}" --steps 1 --warmup 0 --policy static >out 2>err || code=$?
        echo "$code $((SECONDS - start))" >ended
    } &
    local replay_pid=$!
    timeout 60 mpirun --quiet -n 2 "$mizan" calibrate -q --transport mpi --ranks 2 --threads 1 --pool 8MiB --name "$name" -o here.json 2>calibrate.err &
    local calibrate_pid=$!
    local process= hung took
    for _ in {1..100}; do # until both are there
        process=$(pgrep -f "^$mizan calibrate .*--name $name") || true
        [ "$(wc -w <<<"$process")" -lt 2 ] || break
        sleep 0.1
    done
    [ "$(wc -w <<<"$process")" -eq 2 ]
    sleep 2
    kill -STOP "$(tail -n 1 <<<"$process")"
    hung=$SECONDS
    code=0 && wait $calibrate_pid || code=$?
    echo "calibrate: exit code $code $((SECONDS - hung)) s after it hung"; cat calibrate.err
    [ "$code" -eq 4 ]
    [ $((SECONDS - hung)) -lt 30 ]
    [ ! -e here.json ]
    [[ $(cat calibrate.err) == *"--timeout waits longer"* ]]
    wait $replay_pid
    read -r code took <ended
    echo "replay: exit code $code after $took s"; cat err
    [ "$code" -eq 4 ]
    [ "$took" -lt 30 ]
    [[ $(cat err) == *"--timeout waits longer"* ]]
}

@test "memory is short in one process, before the first step and within it" {
    broken "oom:1:3" 4 1 static
    [[ $stderr == *"no memory for "*"rank"* ]]
    for n in 30 225 325; do # weights, forward, backward
        broken "oom:$n:3" 2 1 'lrmoe[keep=0.5]'
        [[ $stderr == *"no memory for "*"rank"* ]]
    done
}

# Where the program must not wait for OpenBLAS's threads at its end it still ends the others itself. What mpirun shows of that
# is a race of its own: of two processes that end at once it may show the other one alone. So until it has shown this one.
@test "with little address space a process that fails tells MPI so" {
    ! grep -q __asan_init "$mizan" || skip "the sanitizer needs address space"
    for _ in {1..20}; do
        run env MIZAN_REPLAY_FAULT=oom:30:3 timeout 60 mpirun -n 2 prlimit --as=20000000000 "${replay[@]}" --steps 1 --policy static
        echo "$output"
        [ "$status" -eq 4 ]
        [[ $output == *"no memory for "*"rank"* ]]
        [[ $output != *"MPI_ABORT was invoked"*"errorcode 4"* ]] || break
    done
    [[ $output == *"MPI_ABORT was invoked"*"errorcode 4"* ]]
}

@test "a message between processes is corrupted, in whatever phase" {
    local phase rank
    # replicas' gradients are looked at of one expert: one whose gradient all ranks have a part of
    for phase in dispatch combine backward_dispatch backward_combine gradient_reduce weight_move replica_reduce; do
        for rank in 1 5; do
            broken "corrupt:$phase:$rank:0" 2 1 "$([ $phase = replica_reduce ] && echo symi || echo ultraep)"
            [ "$status" -eq 1 ]
            [[ $stderr == *": verification failed in step 0"* ]]
        done
    done
    broken corrupt:optimizer:5:0 2 1 symi
    [[ $stderr == *"after the optimizer's step the second moment of "* ]]
    broken corrupt:count_exchange:5:0 2 1 ultraep
    [ "$status" -eq 2 ]
    [[ $stderr == *"the trace counts"* ]]
}

@test "a fault that did not happen is said by every process that speaks" {
    broken corrupt:replica_reduce:5:0 2 1 static
    [ "$status" -eq 2 ]
    [[ $stderr == *"did not happen: of 1 steps executed step 0 had no replica_reduce"* ]]
}

@test "a job that is ended from outside leaves nobody" {
    mpirun --quiet -n 2 "${replay[@]}" --steps 1 --repeat 5000 --policy static --timeout 3 >out 2>err &
    pid=$!
    sleep 4
    kill -TERM $pid
    wait $pid || true
    sleep 2
    cat err
    [ ! -s out ]
    ! pgrep -f "^$mizan replay --trace $example .*--timeout 3$" >/dev/null
}

# Each by its own clock they would not agree, and one would wait for the other.
@test "how many rounds a calibration has, its first process says" {
    local calibrate=("$mizan" calibrate -q --transport mpi --ranks 2 --threads 1 --repeats 4 --pool 1MiB --timeout 5 -o here.json --limit)
    mpirun --quiet -n 1 "${calibrate[@]}" 0 : -n 1 "${calibrate[@]}" 1000
    "$python" -c 'import json; m = json.load(open("here.json"))["measured"]; assert m["rounds"] == 3 and m["processes"] == 2, (m["rounds"], m["processes"])'
}

# An address space that does not hold the pools; sanitizers reserve more than that at once.
@test "a process of a calibration that runs out of memory ends all of it: one line, no profile" {
    ! grep -q __asan_init "$mizan" || skip "the sanitizer needs address space"
    local start=$SECONDS calibrate=("$mizan" calibrate -q --transport mpi --ranks 2 --threads 1 --repeats 3 --pool 512MiB -o here.json)
    run --separate-stderr timeout 60 mpirun --quiet -n 1 "${calibrate[@]}" : -n 1 prlimit --as=900000000 "${calibrate[@]}"
    echo "exit code $status; stdout: $output; stderr: $stderr"
    [ "$status" -eq 4 ]
    [ $((SECONDS - start)) -lt 30 ]
    [ -z "$output" ]
    [ "$(printf '%s\n' "$stderr" | grep -c '^mizan: calibrate: .*memory')" -eq 1 ]
    only_files
}
