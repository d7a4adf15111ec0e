#!/usr/bin/env bats
# The house rules that a compiler does not check: which room includes which, headers that stand alone,
# what may lie at the top, no words that do not belong in the sources.

bats_require_minimum_version 1.5.0

setup() {
    cd "$BATS_TEST_DIRNAME/.." || return 1
}

# What each room may include besides itself.
allowed() {
    local base="common/base" common="common/base common/io"
    case $1 in
    common/base) echo "" ;;
    common/io) echo "$base" ;;
    traces | sim/engine | sim/model | sim/memory) echo "$common" ;;
    sim/cluster) echo "$common sim/engine" ;; # its networks are the engine's
    sim/cost) echo "$common sim/cluster sim/model" ;;
    sim/policy) echo "$common sim/cluster sim/model sim/cost" ;;
    sim/step) echo "$common sim/engine sim/cluster sim/model sim/memory sim/cost sim/policy" ;;
    kernels) echo "$base" ;;
    replay) echo "$common traces kernels sim/cluster sim/model sim/memory sim/cost sim/policy" ;;
    analysis) echo "$common traces sim/engine sim/cluster sim/model sim/memory sim/cost sim/policy sim/step" ;;
    esac
}

rooms="common/base common/io traces sim/engine sim/cluster sim/model sim/memory sim/cost sim/policy sim/step kernels replay analysis"

room_of() { # the room of a path
    local room
    for room in $rooms; do
        case $1 in "$room"/*) echo "$room" && return ;; esac
    done
    echo "${1%/*}"
}

sources() {
    find $rooms -name '*.[ch]'
}

@test "a room includes only the rooms that it may use" {
    local wrong="" file include room
    for file in $(sources); do
        room=$(room_of "$file")
        for include in $(sed -n 's/^ *# *include *"\([^"]*\)".*/\1/p' "$file"); do
            case " $room $(allowed "$room") " in
            *" $(room_of "$include") "*) ;;
            *) wrong+="$file includes $include"$'\n' ;;
            esac
        done
    done
    echo "$wrong"
    [ -z "$wrong" ]
}

@test "every include names its file from the root and the file exists" {
    local wrong="" file include
    for file in mizan.c $(sources) $(find tests -name '*.[ch]'); do
        for include in $(sed -n 's/^ *# *include *"\([^"]*\)".*/\1/p' "$file"); do
            # Tests may share a file with their neighbours.
            [ -f "$include" ] || [ -f "tests/$(basename "$(dirname "$file")")/$include" ] ||
                wrong+="$file includes $include"$'\n'
        done
    done
    echo "$wrong"
    [ -z "$wrong" ]
}

@test "every header compiles alone with gcc and clang" {
    local flags cc header
    flags="-std=c17 -D_GNU_SOURCE -I. -Wall -Wextra -Werror -Wno-unused-parameter -fsyntax-only -x c"
    flags+=" $(pkg-config --cflags hdf5-serial jansson) $(pkg-config --cflags ompi-c) -Wno-psabi"
    for cc in gcc clang; do
        # portable.h is C++ for nvcc or for the emulation of the tests.
        for header in $(sources | grep '\.h$' | grep -v '^kernels/cuda/portable.h$'); do
            echo "$cc $header"
            # Through an including file: a header as the main file warns about its own unused statics.
            echo "#include \"$header\"" | $cc $flags -
        done
    done
}

@test "every header has a guard named after its path" {
    local header guard wrong=""
    for header in $(sources | grep '\.h$'); do
        guard=MIZAN_$(echo "${header#common/}" | sed 's,^sim/,SIM_,' | tr 'a-z/.' 'A-Z__')
        grep -q "^#ifndef $guard\$" "$header" && grep -q "^#define $guard\$" "$header" ||
            wrong+="$header lacks $guard"$'\n'
    done
    echo "$wrong"
    [ -z "$wrong" ]
}

@test "only main exits, and nothing is left unfinished" {
    local wrong
    wrong=$(grep -nE '\b(exit|abort|_exit|_Exit)\(' $(sources) | grep -v '^common/base/child.c.*_exit(' || true)
    wrong+=$(grep -nE '\b(TODO|FIXME|XXX|HACK)\b' mizan.c $(sources) || true)
    echo "$wrong"
    [ -z "$wrong" ]
}

@test "the top level holds the house and nothing else" {
    local entry wrong=""
    for entry in $(ls -A); do
        case $entry in
        meson.build | meson_options.txt | common | sim | replay | kernels | traces | analysis | tests) ;;
        README.md | LICENSE | bootstrap | packages.txt | mizan.c | build | .ci | .git | .clang-format) ;;
        .gitignore | .gitattributes) ;;
        *) git check-ignore -q "$entry" 2>/dev/null || wrong+="$entry " ;;
        esac
    done
    echo "unexpected: $wrong"
    [ -z "$wrong" ]
}
