#!/usr/bin/env bats
# The README's examples print what it shows: tests/cli/readme.py runs them.

load common

example() {
    run "$python" "$root/tests/cli/readme.py" "$mizan" "$@"
    echo "$output"
    [ "$status" -eq 0 ]
}

@test "examples of the shipped trace and of options alone print what the README shows" {
    example demo phases place memory
    [[ $output != *"left out"* ]]
}

@test "examples of recordings print what the README shows" {
    export MIZAN_TRACES=${MIZAN_TRACES:-$root/../shared/traces}
    [ -d "$MIZAN_TRACES" ] || skip "no $MIZAN_TRACES (set MIZAN_TRACES)"
    ! grep -q __asan_init "$mizan" || skip "501 steps of seven policies take the sanitizer minutes"
    example smartmoe gptoss laer
    [[ $output != *"left out"* ]]
}

@test "an example that prints something else is seen, one that is not there is named" {
    cd "$BATS_TEST_TMPDIR"
    mkdir -p copy/tests/cli && cp -r "$root/README.md" copy && cp "$root/tests/cli/readme.py" copy/tests/cli
    ln -s "$root/traces" copy/traces
    sed -i 's/^capacity 79.11 GiB: fits/capacity 79.12 GiB: fits/' copy/README.md
    run "$python" copy/tests/cli/readme.py "$mizan" memory
    echo "$output"
    [ "$status" -eq 1 ]
    [[ $output == *"-capacity 79.12 GiB"*"+capacity 79.11 GiB"* ]]
    run "$python" copy/tests/cli/readme.py "$mizan" nothing
    [ "$status" -eq 2 ]
    [[ $output == *"no example nothing"* ]]
    "$python" copy/tests/cli/readme.py --write "$mizan" memory
    cmp copy/README.md "$root/README.md"
}
