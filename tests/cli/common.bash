# Shared by the tests of the command line. MIZAN names the program to test.

bats_require_minimum_version 1.5.0

root=$(cd "$BATS_TEST_DIRNAME/../.." && pwd -P)
mizan=${MIZAN:-$root/build/demo/mizan}
python=/usr/bin/python3 # Debian's, which has h5py and numpy
[ -x "$python" ] || python=python3

enter_tmpdir() {
    [ -x "$mizan" ] || { echo "no program at $mizan; run ./bootstrap build or set MIZAN" && return 1; }
    mkdir "$BATS_TEST_TMPDIR/here" && cd "$BATS_TEST_TMPDIR/here" || return 1
}

# fails CODE TEXT COMMAND...: exit code, one line on stderr that contains TEXT, nothing on stdout.
fails() {
    local code=$1 text=$2
    shift 2
    run --separate-stderr "$@"
    echo "exit code $status, wanted $code; stdout: $output; stderr: $stderr"
    [ "$status" -eq "$code" ]
    [ -z "$output" ]
    [ "$(printf '%s\n' "$stderr" | wc -l)" -eq 1 ]
    [[ $stderr == *"$text"* ]]
    [[ $stderr == mizan:* ]]
}

# Nothing was left in the directory but the files named.
only_files() {
    local have
    have=$(ls -A | LC_ALL=C sort | xargs)
    echo "files: $have"
    [ "$have" = "$(printf '%s\n' "$@" | LC_ALL=C sort | xargs)" ]
}
