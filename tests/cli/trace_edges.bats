#!/usr/bin/env bats
# mizan trace at its edges: facts that no reader takes, signals, a file size limit.

load common

setup() { enter_tmpdir; }

@test "facts that no reader would take are refused, and what is there stays" {
    "$python" -c 'import numpy; numpy.save("ids.npy", numpy.tile(numpy.array([1, 2], "<i4"), (10, 4, 1)))'
    for name in $'two\nlines' $'\x01' $'\xff' $'\xc3'; do
        fails 2 "must be UTF-8 text without control characters" \
            "$mizan" -q trace import ids.npy --experts 8 --phase decode --name "$name" -o t.h5
    done
    fails 2 "licence must be UTF-8" "$mizan" -q trace import ids.npy --experts 8 --phase decode --licence $'\x7f' -o t.h5
    only_files ids.npy
    "$mizan" -q trace import ids.npy --experts 8 --phase decode --name $'\xc3\xa9\xe2\x82\xac' -o t.h5
    "$mizan" trace check t.h5
}

@test "an element type that is not supported is named, and no more" {
    "$python" -c 'import numpy; numpy.save("ids.npy", numpy.full((4, 2, 2), "word"))'
    fails 2 "element type '<U4' is not supported" "$mizan" -q trace import ids.npy --experts 8 --phase decode -o t.h5
    only_files ids.npy
}

@test "a hang-up ends a command cleanly, but not one under nohup" {
    "$python" - "$mizan" <<'EOF2'
import os, signal, subprocess, sys, time

def start(handler, *options):
    command = [sys.argv[1], "-q", "trace", "synth", *options, "-o", "t.h5"]
    set_handler = lambda: signal.signal(signal.SIGHUP, handler)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=set_handler)
    while process.poll() is None and not os.listdir():
        time.sleep(0.01)
    assert process.poll() is None, "it ended before the signal"
    process.send_signal(signal.SIGHUP)
    return process.communicate(timeout=60)[1], process.returncode

assert start(signal.SIG_DFL, "--steps", "1000000") == ("mizan: trace: interrupted; nothing was written\n", 130)
assert os.listdir() == []
assert start(signal.SIG_IGN, "--steps", "4") == ("", 0)
assert os.listdir() == ["t.h5"]
EOF2
}

@test "a file size limit is one line, and leaves nothing" {
    limited() { (ulimit -f 20 && exec "$mizan" -q trace synth -o t.h5); }
    fails 4 "HDF5 failed while" limited
    only_files
}

@test "a compressed .npz is told how to be written" {
    "$python" -c 'import numpy; numpy.savez_compressed("l.npz", logits=numpy.linspace(-1, 1, 96).reshape(2, 6, 8))'
    fails 2 "logits.npy is compressed; write it uncompressed (numpy.savez" \
        "$mizan" -q trace import l.npz --top-k 2 --scores none --phase prefill -o t.h5
    only_files l.npz
}

@test "a twin's tokens are bounded, and what is made before the first call can be interrupted" {
    "$mizan" -q trace synth --layers 2 --experts 8 --top-k 2 --ranks 2 --tokens 64 --sequence 16 --steps 3 -o t.h5
    fails 2 "a call may have 2^28 pairs" "$mizan" -q trace synth --like t.h5 --tokens 1e12 -o twin.h5
    fails 2 "a call may have 2^28 pairs" "$mizan" -q trace synth --profile mixed --tokens 1e12 -o twin.h5
    "$python" - "$mizan" <<'EOF2'
import os, signal, subprocess, sys, time

for options in (["mixed", "--experts", "65536"], ["one-domain", "--layers", "65536"], ["collapse", "--layers", "65536"]):
    command = [sys.argv[1], "-q", "trace", "synth", "--profile", *options, "-o", "twin.h5"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10)[1] == "mizan: trace: interrupted; nothing was written\n", options
    assert process.returncode == 130
EOF2
    only_files t.h5
}

@test "a trace given to import is told to be one" {
    "$mizan" -q trace synth --layers 1 --experts 4 --top-k 1 --ranks 1 --tokens 8 --steps 1 -o t.h5
    fails 2 "t.h5: an HDF5 file: if 'mizan trace check' finds it sound" "$mizan" -q trace import t.h5 -o copy.h5
    only_files t.h5
}

@test "more files than may be open at once: the message says what sets the limit" {
    for rank in $(seq 0 39); do
        echo '{"step":0,"stage":"pre_dispatch","block":"decoder","layer":0,"rank":'"$rank"',"num_tokens":1,"topk":1,"top_indices":[[0]]}' \
            >"router_trace_rank$rank.jsonl"
    done
    fails 2 "Too many open files; 'ulimit -n' sets how many" \
        bash -c 'ulimit -n 30; exec "$0" -q trace import router_trace_rank*.jsonl --experts 2 --phase train -o t.h5' "$mizan"
    [ ! -e t.h5 ]
}
