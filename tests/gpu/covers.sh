#!/bin/sh
# covers.sh HEADER: does every operation that the header declares appear in the checks (tests/kernels) and in the timings?
# What is no operation: contexts, memory, streams, questions about sizes, lambda on the host.
set -eu
header=$1 here=$(dirname "$0") missing=0
operations=$(sed -n 's/^mz_kstatus \(mz_[a-z_]*\)(.*/\1/p' "$header" |
    grep -vxE 'mz_kernels_(open|failure|alloc|memory|sync|wait|mark|elapsed)')
[ "$(echo "$operations" | wc -l)" -ge 20 ] || { echo "covers.sh: the header declares too few operations"; exit 1; }
for operation in $operations; do
    for where in "tests/kernels: check_*.c" "tests/gpu: operations.c backward.c"; do
        folder=${where%%:*} files=${where#*: }
        # shellcheck disable=SC2086
        (cd "$here/../../$folder" && cat $files) | grep -q "[^a-z_]$operation(" ||
            { echo "covers.sh: $folder does not call $operation"; missing=1; }
    done
done
exit $missing
