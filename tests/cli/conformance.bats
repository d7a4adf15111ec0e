# The conformance set of the trace format: every file gets the verdict written beside it.

load common

set=$root/traces/conformance

@test "conformance: verdicts of trace check" {
    files=0
    while IFS=$'\t' read -r file verdict names; do
        run "$mizan" trace check "$set/$file"
        echo "$file, $verdict ($names): exit code $status: $output"
        if [ "$verdict" = valid ]; then
            [ "$status" -eq 0 ]
        else
            [ "$status" -eq 2 ]
            [[ $output == *"$names"* ]]
        fi
        files=$((files + 1))
    done < <(tail -n +2 "$set/verdicts.tsv")
    [ "$files" -eq "$(find "$set" -name '*.h5' | wc -l)" ]
}

@test "conformance: the Python reader reads every valid file" {
    PYTHONPATH=$root/traces/python "$python" - "$set" <<'PYTHON'
import csv, os, sys
import mizan
for row in csv.DictReader(open(os.path.join(sys.argv[1], "verdicts.tsv")), delimiter="\t"):
    if row["verdict"] == "valid":
        with mizan.open(os.path.join(sys.argv[1], row["file"])) as trace:
            assert len(trace.calls) == 8, row["file"]
PYTHON
}

@test "conformance: the files are what make_conformance.py makes" {
    enter_tmpdir
    "$python" "$root/tests/traces/make_conformance.py" .
    cmp verdicts.tsv "$set/verdicts.tsv"
    for file in *.h5; do
        h5diff "$file" "$set/$file"
    done
}
