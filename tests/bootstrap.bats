#!/usr/bin/env bats
# ./bootstrap where the system lacks things: stand-ins for the package tools, in a path with spaces.

bats_require_minimum_version 1.5.0

setup() {
    dir="$BATS_TEST_TMPDIR/a path with spaces"
    fake="$dir/fake bin"
    mkdir -p "$fake"
    cp "$BATS_TEST_DIRNAME/../bootstrap" "$BATS_TEST_DIRNAME/../packages.txt" "$dir/"
    for tool in bash env awk mkdir dirname grep tail cat rm ls tr; do
        ln -s "$(command -v $tool)" "$fake/$tool"
    done
    cd / || return 1
}

stand_in() { # stand_in NAME SCRIPT
    printf '#!/bin/bash\n%s\n' "$2" >"$fake/$1"
    chmod +x "$fake/$1"
}

bootstrap() {
    run --separate-stderr env -u MIZAN_SKIP_PACKAGES PATH="$fake" "$dir/bootstrap" "$@"
    echo "exit $status; stdout: $output; stderr: $stderr"
}

@test "usage: help, no command, unknown command, too much" {
    bootstrap help
    [ "$status" -eq 0 ]
    [[ $output == *"usage: ./bootstrap"* ]]
    bootstrap
    [ "$status" -eq 2 ]
    bootstrap tset
    [ "$status" -eq 2 ]
    [[ $stderr == *"unknown command 'tset'"* ]]
    bootstrap demo now
    [ "$status" -eq 2 ]
}

@test "another system: names the packages and stops with 3" {
    bootstrap demo
    [ "$status" -eq 3 ]
    [[ $stderr == *"not Debian or Ubuntu"* ]]
    [[ $stderr == *libhdf5-dev* ]]
    [[ $stderr != *libcmocka-dev* ]]
    [ "$(printf '%s\n' "$stderr" | wc -l)" -eq 1 ]
    bootstrap test
    [ "$status" -eq 3 ]
    [[ $stderr == *libcmocka-dev* ]]
    [ "${lines[-1]}" = "0 passed, 1 failed" ]
}

@test "no root and no sudo: names what is missing and stops with 3" {
    stand_in id 'echo 1000'
    stand_in apt-get 'exit 1'
    stand_in dpkg-query '[[ $* == *meson* ]] && exit 1; echo "install ok installed"'
    bootstrap build
    [ "$status" -eq 3 ]
    [ "$stderr" = "bootstrap: no root and no sudo; have these installed: meson" ]
}

@test "packages are asked for once, without recommendations, with lists fetched when that fails" {
    stand_in id 'echo 0'
    stand_in apt-get 'echo "$DEBIAN_FRONTEND $*" >>"${0%/*}/calls"; [[ $* == *update* ]]'
    stand_in dpkg-query '[[ $* == *scdoc* || $* == *bats* ]] && exit 1; echo "install ok installed"'
    bootstrap test
    [ "$status" -eq 3 ]
    [[ $stderr == *"packages could not be installed (log: build/log/packages.log)"* ]]
    [ "${lines[-1]}" = "0 passed, 1 failed" ]
    cat "$fake/calls"
    [ "$(grep -c ' update$' "$fake/calls")" -eq 1 ]
    grep -q '^noninteractive .*install --no-install-recommends bats scdoc$' "$fake/calls"
}

@test "when nothing is missing apt-get is not called" {
    stand_in id 'echo 0'
    stand_in apt-get 'touch "${0%/*}/called"'
    stand_in dpkg-query 'echo "install ok installed"'
    stand_in meson 'exit 1'
    stand_in gcc 'exit 1'
    bootstrap build
    [ "$status" -eq 4 ]
    [[ $stderr == *"configuring failed (log: build/log/demo-configure.log)"* ]]
    [ ! -e "$fake/called" ]
}
