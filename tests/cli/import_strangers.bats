#!/usr/bin/env bats
# Every importer on files of another format that have the right name: one clear line, exit code 2, and
# nothing written, whatever the importer was told.

load common

setup() { enter_tmpdir; }

# The name of a file that the importer expects.
name_for() {
    case $1 in
    smartmoe-log) echo table_iter1_rank0.log ;;
    smartmoe-npy | npy-ids | moe-infinity | router-logits) echo ids.npy ;;
    gpt-oss-json | sglang-json | routed-json) echo trace.json ;;
    laer-csv | counts-csv) echo table.csv ;;
    megatron-route) echo router_trace_rank0.jsonl ;;
    megatron-tpe) echo rank0.jsonl ;;
    nf4-jsonl | vllm-logger | speculative | moe-balance) echo log.jsonl ;;
    esft-text) echo expert_weights_1.txt ;;
    trt-stat) echo rank0.safetensors ;;
    sglang-stat | sglang-records) echo expert_distribution_recorder_1.5_0.pt ;;
    slime-pt) echo rollout_3.pt ;;
    verl-pt) echo batch.pt ;;
    imatrix) echo m.gguf ;;
    hrtr) echo t.hrtr ;;
    ultraep) echo t.manifest.json ;;
    *) echo "no name for importer $1" && return 1 ;;
    esac
}

# Files that are of none of the formats, or of one that the name does not promise.
strangers() {
    "$python" - <<'EOF'
import io, json, pickle, zipfile
import h5py, numpy as np

def put(name, data):
    open(name, "wb").write(data)

put("empty", b"")
put("text", b"not a recording at all\n" * 20)
put("object", b'{"a": [1, 2, {"b": null}]}\n')
put("objects", b'{"a": 1}\n{"a": 2}\n')
put("list", b"[[1, 2], [3, 4]]\n")
put("number", b"7\n")
put("deep", b"[" * 100000)
put("table", b"x,y,z\n1,2,3\n4,5,6\n")
put("binary", bytes(range(256)) * 16)
put("huge_header", b"\xff" * 64)
put("html", b"<!DOCTYPE html><html><body>404: not found</body></html>\n")
put("lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n")
put("gguf", b"GGUF" + bytes([3, 0, 0, 0]) + bytes(16))
put("half_gzip", b"\x1f\x8b\x08\x00" + bytes(20))
put("half_xz", b"\xfd7zXZ\x00" + bytes(20))
put("pickle", pickle.dumps({"records": [1, 2], "x": "y"}, 2))
out = io.BytesIO()
np.save(out, np.array(["a", "b"]))
put("strings_npy", out.getvalue())
out = io.BytesIO()
np.save(out, np.float64(1.5))
put("scalar_npy", out.getvalue())
with zipfile.ZipFile("zip", "w") as z:
    z.writestr("hello.txt", "hello")
with h5py.File("hdf5", "w") as f:
    f["x"] = [1, 2, 3]
put("safetensors", (2).to_bytes(8, "little") + b"{}")
EOF
}

@test "no importer takes a file of another format with the right name" {
    mkdir strange right
    (cd strange && strangers)
    answers=(--experts 8 --top-k 2 --phase decode --scores none --ep-size 1 --ranks-hold same --padding none --filler-last no
        --layers 2 --id-bytes 4 --tokens 4 --method m)
    seen=0
    for importer in $("$mizan" trace import --list | awk '{ print $1 }'); do
        name=$(name_for "$importer")
        said=()
        reads=" $("$mizan" trace import --list | sed -n "s/^$importer .*; reads//p") --phase "
        for ((i = 0; i < ${#answers[@]}; i += 2)); do
            [[ $reads == *" ${answers[i]} "* ]] && said+=("${answers[@]:i:2}")
        done
        for stranger in strange/*; do
            cp "$stranger" "right/$name"
            for forced in "" --force; do
                echo "$importer, $stranger $forced"
                fails 2 "" "$mizan" trace import -q -f "$importer" $forced "right/$name" "${said[@]}" -o out.h5
                [ "$(ls | xargs)" = "right strange" ]
            done
            rm "right/$name"
        done
        seen=$((seen + 1))
    done
    [ "$seen" -ge 25 ]
}

@test "no importer is found for such files" {
    mkdir strange
    (cd strange && strangers)
    for stranger in strange/*; do
        echo "$stranger"
        fails 2 "" "$mizan" trace import -q "$stranger" --experts 8 --top-k 2 --phase decode -o out.h5
        [ "$(ls | xargs)" = strange ]
    done
}
