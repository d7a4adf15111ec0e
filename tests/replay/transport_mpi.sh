#!/usr/bin/env bash
# The transport between processes: everything arrives with one, two and four of them, in short and long lanes, and
# whatever happens to one process, all end soon, each that can with one line. Arguments: mpirun, the peer, the folder
# of the module.
set -u
mpirun=$1 peer=$2 modules=$3
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 # containers
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_btl=self,vader OMPI_MCA_btl_vader_single_copy_mechanism=none
# Open MPI's own memory is not ours to watch.
export ASAN_OPTIONS=${ASAN_OPTIONS:-}:detect_leaks=0
failed=0
sums=
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

peers() { # peers PROCESSES ARGUMENT...
    local processes=$1
    shift
    timeout 60 "$mpirun" --quiet -n "$processes" "$peer" "$modules" "$@" >"$scratch/out" 2>"$scratch/err"
}

expect() { # expect TEXT CONDITION...
    local text=$1
    shift
    "$@" && return
    echo "failed: $text"
    sed 's/^/    /' "$scratch/out" "$scratch/err"
    failed=1
}

for processes in 1 2 4; do
    peers $processes 8
    code=$?
    expect "$processes processes exchange: code $code" [ $code -eq 0 ]
    expect "$processes processes say so" grep -q "^$processes processes" "$scratch/out"
    # What moves does not depend on who hosts whom.
    sums+=" $(awk '{ print $3 }' "$scratch/out")"
done
expect "the same bytes in all:$sums" [ "$(echo $sums | tr ' ' '\n' | sort -u | wc -l)" -eq 1 ]

peers 2 2 big
code=$?
expect "long lanes: code $code" [ $code -eq 0 ]

# Read where they lie, where that is allowed: then as many as in a replay hold back what ends them.
OMPI_MCA_btl_vader_single_copy_mechanism=cma peers 2 2 many
code=$?
expect "many lanes: code $code" [ $code -eq 0 ]

peers 3 8
code=$?
expect "8 ranks over 3 processes: code $code" [ $code -eq 2 ]
expect "... and why" grep -q "cannot be spread over 3 processes" "$scratch/err"

for fault in die hang leave; do
    start=$SECONDS
    peers 4 8 $fault 2
    code=$?
    expect "$fault: code $code" [ $code -ne 0 ] && expect "$fault: code $code" [ $code -ne 124 ]
    expect "$fault: within 30 s" [ $((SECONDS - start)) -lt 30 ]
    lines=$(grep -c '^peer: ' "$scratch/err")
    expect "$fault: at most one line per process, $lines lines" [ "$lines" -ge 1 ] && expect "$fault" [ "$lines" -le 4 ]
    expect "$fault: says where" grep -qE '^peer: (process [0-9] of 4 \(ranks|this process leaves)' "$scratch/err"
    expect "$fault: nobody is left" [ -z "$(pgrep -f "^$peer $modules 8 $fault 2")" ]
done
exit $failed
