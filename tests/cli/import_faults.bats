#!/usr/bin/env bats
# Every importer of the registry against tables of bad files, of hostile values and of missing ranks: the tables are
# in tests/traces, and an importer without a row in them fails.

load common

setup() { enter_tmpdir; }

table() { "$python" -B "$root/tests/traces/$1.py" "$(realpath "$mizan")" "${@:2}"; }

@test "every importer refuses every kind of bad file with one clear line" { table import_faults; }

@test "files of missing ranks are named, files of ranks given twice refused" { table import_ranks; }

@test "hostile and unusual values come out right or are refused with one clear line" { table import_values; }

@test "a log beyond what is held in memory is sorted in parts" { table import_large; }
