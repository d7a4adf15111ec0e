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

@test "conformance: verdicts of the Python package" {
    PYTHONPATH=$root/traces/python "$python" - "$set" <<'PYTHON'
import csv, os, sys
import mizan
for row in csv.DictReader(open(os.path.join(sys.argv[1], "verdicts.tsv")), delimiter="\t"):
    try:
        with mizan.open(os.path.join(sys.argv[1], row["file"])) as trace:
            assert len(trace.calls) == 8, row["file"]
            for step in trace:
                for call in step:
                    call.counts(), call.ids, call.weights, call.token_pairs, call.grad_norm2, call.hidden_norm2
        verdict = "valid"
    except mizan.TraceError as refused:
        verdict, said = "invalid", str(refused)
        print(said)
        assert row["file"] in said and row["names"] in said and "\n" not in said
    assert verdict == row["verdict"], row["file"]
PYTHON
}

@test "conformance: verdicts of a reader written from the specification alone" {
    "$python" "$root/tests/traces/format_reader.py" --verdicts "$set"
}

@test "conformance: that reader and mizan trace info read the same" {
    enter_tmpdir
    shape=(--layers 3 --experts 20 --top-k 3 --ranks 3 --tokens 3000 --sequence 70 --steps 3 --micro-batches 2 --hidden 8)
    "$mizan" trace synth -q "${shape[@]}" -o pairs.h5
    "$mizan" trace synth -q "${shape[@]}" --deflate 0 --half -o plain.h5
    "$mizan" trace synth -q "${shape[@]}" --deflate 9 --experts 300 -o wide.h5
    "$mizan" trace synth -q "${shape[@]}" --kind counts --load empty -o counts.h5
    "$mizan" trace cut -q pairs.h5 --first-step 1 --layers 2 --ranks 2 -o cut.h5
    mapfile -t valid < <(awk -F '\t' -v set="$set" '$2 == "valid" { print set "/" $1 }' "$set/verdicts.tsv")
    "$python" "$root/tests/traces/format_reader.py" "$mizan" "${valid[@]}" "$root/traces/example/olmoe-8r.h5" ./*.h5
    # It can tell: one expert changed is one checksum that does not fit.
    "$python" -c 'import h5py; f = h5py.File("plain.h5", "r+"); print(f["pairs/expert"].id.get_chunk_info(0).byte_offset)' >at
    printf '\7' | dd of=plain.h5 bs=1 seek="$(($(cat at) + 5))" conv=notrunc status=none
    run "$python" "$root/tests/traces/format_reader.py" "$mizan" plain.h5
    [ "$status" -ne 0 ]
}

@test "conformance: the files are what make_conformance.py makes" {
    enter_tmpdir
    "$python" "$root/tests/traces/make_conformance.py" .
    cmp verdicts.tsv "$set/verdicts.tsv"
    for file in *.h5; do
        h5diff "$file" "$set/$file"
    done
}
