#!/usr/bin/env bats
# The program as such: help, version, exit codes, messages, standard streams.

load common

setup() { enter_tmpdir; }

@test "help names every command and the exit codes" {
    run --separate-stderr "$mizan" --help
    [ "$status" -eq 0 ]
    [ -z "$stderr" ]
    [[ $output == *"usage: mizan"* ]]
    [[ $output == *"  trace "* ]]
    [[ $output == *"  sim "* ]]
    [[ $output == *"2 bad input"* ]]
    long=$output
    run "$mizan" -h
    [ "$output" = "$long" ]
    run "$mizan" help
    [ "$output" = "$long" ]
}

@test "every command has help that fits 100 columns" {
    for command in "" sim place trace "trace info" "trace check" "trace synth" "trace import" "trace cut"; do
        run "$mizan" $command --help
        echo "$command: $output"
        [ "$status" -eq 0 ]
        [[ $output == *"usage: mizan"* ]]
        [ "$(printf '%s\n' "$output" | awk '{ if (length > max) max = length } END { print max }')" -le 100 ]
    done
}

@test "version" {
    run --separate-stderr "$mizan" --version
    [ "$status" -eq 0 ]
    [[ $output =~ ^mizan\ [0-9]+\.[0-9]+\.[0-9]+$ ]]
}

@test "unknown commands and options suggest the nearest" {
    fails 2 "did you mean 'trace'?" "$mizan" tarce
    fails 2 "did you mean 'sim'?" "$mizan" sym
    fails 2 "'mizan --help' lists the commands" "$mizan" zebra
    fails 2 "did you mean --version?" "$mizan" --verison
    fails 2 "no command given" "$mizan"
    fails 2 "did you mean --trace?" "$mizan" sim --trce x
    fails 2 "did you mean" "$mizan" trace inof
}

@test "errors are one line that starts with the program and the command" {
    fails 2 "" "$mizan" sim --trace no-such-file.h5 --model mixtral-8x7b --cluster a100-80gb:8
    [[ $stderr == "mizan: sim: "* ]]
    [[ $stderr == *no-such-file.h5* ]]
    [[ $stderr != *$'\033'* ]]
    fails 2 "" "$mizan" trace info $'two\nlines'
    [[ $stderr == "mizan: trace"* ]]
}

@test "output that cannot be written is an error" {
    run --separate-stderr bash -c '"$0" --help >/dev/full' "$mizan"
    [ "$status" -eq 4 ]
    [[ $stderr == *"cannot write to standard output"* ]]
    run --separate-stderr bash -c '"$0" --version >&-' "$mizan"
    [ "$status" -eq 4 ]
    [[ $stderr == *"cannot write to standard output"* ]]
    run --separate-stderr bash -c 'set -o pipefail; (sleep 0.3; exec "$0" --help) | true' "$mizan"
    [ "$status" -eq 4 ]
    [[ $stderr == *"Broken pipe"* ]]
}

@test "a closed stderr or stdin does no harm" {
    run bash -c '"$0" --version 2>&- <&-' "$mizan"
    [ "$status" -eq 0 ]
    run bash -c '"$0" tarce 2>&-' "$mizan"
    [ "$status" -eq 2 ]
}

@test "little address space does not make a command wait for ever at its end" {
    ! nm -D "$mizan" | grep -q __asan_ || skip "the address sanitizer needs all of it"
    run --separate-stderr timeout -s KILL 60 bash -c 'ulimit -v 150000; "$0" --version' "$mizan"
    [ "$status" -eq 0 ]
    [[ $output == "mizan "* ]]
}

@test "works from any directory and with any locale" {
    cd /
    run "$mizan" sim --list
    [ "$status" -eq 0 ]
    list=$output
    LC_ALL=C run "$mizan" sim --list
    [ "$output" = "$list" ]
}

@test "MIZAN_DATA that holds nothing is reported" {
    MIZAN_DATA=$BATS_TEST_TMPDIR fails 2 "" "$mizan" sim --trace x --model mixtral-8x7b --cluster h200:8
}
