#!/usr/bin/env bats
# mizan model: tables, JSON, tensors, optimizers, refusals.

load common

setup() { enter_tmpdir; }

# json EXPRESSION COMMAND...: evaluates EXPRESSION over the command's JSON object d.
json() {
    local expression=$1
    shift
    "$@" >out.json || return 1
    "$python" -c "import json, sys; d = json.load(open('out.json')); print($expression)"
}

# A small model that loads; further arguments replace or add "key": value, or remove "key":.
config() {
    "$python" - "$@" <<'PY' >bad.json
import json, sys
c = {"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100,
     "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32,
     "num_local_experts": 4, "num_experts_per_tok": 2}
for pair in sys.argv[1:]:
    key, value = pair.split("=", 1)
    if value == "":
        del c[key]
    else:
        c[key] = json.loads(value)
print(json.dumps(c))
PY
}

@test "every shipped model equals an independent account: tensors, tiers, bytes, optimizer states" {
    run "$python" "$root/tests/model/reference_model.py" "$mizan" "$root/sim/model/configs"
    echo "$output"
    [ "$status" -eq 0 ]
    [ "$(printf '%s\n' "$output" | grep -c ': equal$')" -eq "$(ls "$root"/sim/model/configs/*.json | wc -l)" ]
}

@test "the independent account notices a changed config" {
    mkdir configs
    sed 's/"vocab_size": 32000/"vocab_size": 32001/' "$root/sim/model/configs/mixtral-8x7b.json" >changed.json
    cat >mizan-changed <<PY
#!/bin/sh
shift 2
exec "$mizan" model "$PWD/changed.json" "\$@"
PY
    chmod +x mizan-changed
    cp "$root/sim/model/configs/mixtral-8x7b.json" configs
    run "$python" "$root/tests/model/reference_model.py" ./mizan-changed configs
    echo "$output"
    [ "$status" -eq 1 ]
    [[ $output == *"model.embed_tokens.weight"* ]]
}

@test "random configs of every family equal the independent account" {
    mkdir configs
    "$python" - <<'PY'
import json, random
r = random.Random(5)
def pick(*a): return r.choice(a)
for i in range(90):
    kind = pick("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe",
                "gpt_oss", "granitemoe", "mizan_moe", "mizan_layernorm_moe")
    heads = pick(1, 2, 4, 6, 12)
    layers, experts = r.randint(1, 5), r.randint(1, 9)
    c = {"model_type": kind, "hidden_size": heads * pick(1, 8, 24), "num_hidden_layers": layers,
         "vocab_size": r.randint(1, 3000), "num_attention_heads": heads,
         "num_key_value_heads": pick(*[k for k in (1, 2, 3, heads) if heads % k == 0]),
         "num_experts_per_tok": r.randint(1, experts), "intermediate_size": r.randint(1, 90),
         "tie_word_embeddings": pick(True, False), "torch_dtype": pick("bfloat16", "float32", "float16")}
    if pick(0, 1):
        c["head_dim"] = pick(1, 5, 16)
    dense = r.randint(0, layers - 1)
    if kind in ("mixtral", "gpt_oss", "granitemoe"):
        c["num_local_experts"] = experts
    if kind in ("deepseek_v2", "deepseek_v3", "glm4_moe"):
        c |= {"n_routed_experts": experts, "n_shared_experts": r.randint(0, 3), "moe_intermediate_size": r.randint(1, 90),
              "first_k_dense_replace": dense, "use_qk_norm": pick(True, False)}
    if kind.startswith("deepseek"):
        c |= {"q_lora_rank": pick(None, 1, 12), "kv_lora_rank": r.randint(1, 20), "qk_nope_head_dim": r.randint(1, 20),
              "qk_rope_head_dim": r.randint(1, 9), "v_head_dim": r.randint(1, 20)}
    if kind in ("qwen3_moe", "qwen2_moe", "olmoe") or kind.startswith("mizan"):
        c |= {"num_experts": experts, "moe_intermediate_size": r.randint(1, 90)}
    if kind.startswith("qwen"):
        c |= {"decoder_sparse_step": pick(1, 1, layers), "mlp_only_layers": pick([], [0] if layers > 1 else [])}
        if not any((l + 1) % c["decoder_sparse_step"] == 0 and l not in c["mlp_only_layers"] for l in range(layers)):
            c["mlp_only_layers"] = []
    if kind == "qwen2_moe":
        c["shared_expert_intermediate_size"] = r.randint(1, 60)
    if kind not in ("mixtral", "qwen2_moe", "mizan_layernorm_moe"):
        c["attention_bias"] = pick(True, False)
    if kind == "gpt_oss":
        c |= {"sliding_window": 16, "layer_types": [pick("sliding_attention", "full_attention") for _ in range(layers)]}
    if kind.startswith("mizan"):
        c["first_k_dense_replace"] = dense
    if kind == "mizan_moe":
        c |= {"gated": pick(True, False), "experts_per_group": r.randint(1, 3), "num_shared_experts": r.randint(0, 2)}
    if kind == "mizan_layernorm_moe":
        c["max_position_embeddings"] = r.randint(1, 50)
    for key in ("attention_bias", "use_qk_norm", "tie_word_embeddings", "torch_dtype"):
        if pick(0, 0, 1):
            c.pop(key, None)  # the families' defaults
    json.dump(c, open(f"configs/{i:02}-{kind}.json", "w"))
PY
    run "$python" "$root/tests/model/reference_model.py" "$mizan" configs
    echo "$output"
    [ "$status" -eq 0 ]
    [ "$(printf '%s\n' "$output" | grep -c ': equal$')" -eq 90 ]
}

@test "published counts: every difference is 0" {
    run json "[m['name'] for m in d['models'] if m['published'] and m['published']['difference']]" \
        "$mizan" model --list --json
    [ "$output" = "[]" ]
    run json "sum(m['published'] is not None for m in d['models']), len(d['models'])" "$mizan" model --list --json
    [ "$output" = "16 19" ]
    run "$mizan" model --list
    [ "$status" -eq 0 ]
    [[ $output == *"671,026,419,200"* ]]
}

@test "tables of the README are what the commands print" {
    run "$python" - "$root" "$mizan" <<'PY'
import re, subprocess, sys
root, mizan = sys.argv[1:]
text = open(root + "/sim/model/README.md").read()
blocks = re.findall(r"```\n\$ mizan (.*?)\n(.*?)```", text, re.S)
print(len(blocks), "tables")
for command, want in blocks:
    have = subprocess.run(f"'{mizan}' {command}", shell=True, stdout=subprocess.PIPE, text=True, check=True).stdout
    if have.strip() != want.strip():
        print("mizan", command, "prints", have, sep="\n")
        sys.exit(1)
sys.exit(len(blocks) < 3)
PY
    echo "$output"
    [ "$status" -eq 0 ]
}

@test "the table of a model: tiers, tokens, published count, runs of layers" {
    run --separate-stderr "$mizan" model glm-4.5-air
    [ "$status" -eq 0 ]
    [ -z "$stderr" ]
    [[ $output =~ "total      106,852,251,264 100.000 %" ]]
    [[ $output =~ "left out     3,616,573,568  the multi-token-prediction layer" ]]
    [[ $output == *$'\n'"difference"*" 0"* ]]
    [[ $output == *$'\n'"1-45      moe"* ]]
    [[ $output != *"tensor  "* ]]
    # Columns of tiers that a model lacks are left out.
    run "$mizan" model qwen3-30b-a3b --optimizer adamw
    [[ $output != *shared* ]]
}

@test "tensors have the checkpoint's names" {
    run "$mizan" model mixtral-8x7b --tensors
    [ "$status" -eq 0 ]
    [[ $output == *$'\n'"model.layers.31.block_sparse_moe.experts.7.w2.weight"*"4096 x 14336"*"bfloat16"*"experts"* ]]
    [ "$(printf '%s\n' "$output" | grep -c '^model\.\|^lm_head')" -eq 995 ]
    [[ $output != *"*"* ]]
    run "$mizan" model deepseek-v3 --tensors
    [[ $output == *"e_score_correction_bias"*"256"*"float32"*"router, not trained"* ]]
    run json "d['tensor_count'] == len(d['tensors']) == len({t['name'] for t in d['tensors']})" \
        "$mizan" model gpt-oss-20b --tensors --json
    [ "$output" = True ]
}

@test "JSON: the documented keys, tiers that add up, layers that cover the model" {
    run json "sorted(d)" "$mizan" model skewadam-6.8b --json
    [ "$output" = "['architecture', 'layers', 'model_type', 'name', 'parameters', 'published', 'schema', 'tensor_count', 'weight_bytes']" ]
    run json "d['schema'], d['parameters']" "$mizan" model skewadam-6.8b --json
    [ "$output" = "mizan-model/1 {'total': 6784327680, 'backbone': 341352448, 'experts': 6442450944, 'router': 524288, 'shared': 0, 'active': 442540032}" ]
    cat >check.py <<'PY'
import json, sys
d = json.load(open("out.json"))
tiers = ("backbone", "experts", "router", "shared")
def adds_up(x): return x["total"] == sum(x[t] for t in tiers)
assert adds_up(d["parameters"]) and adds_up(d["weight_bytes"])
total, at = dict.fromkeys(tiers, 0), -1
for run in d["layers"]:
    assert run["first"] == at and run["last"] >= at and adds_up(run["parameters"])
    for t in tiers:
        total[t] += run["parameters"][t] * (run["last"] - run["first"] + 1)
    at = run["last"] + 1
assert at == d["architecture"]["layers"]
assert all(total[t] == d["parameters"][t] for t in tiers)
for o in d["optimizers"]:
    assert adds_up(o["state_bytes"]), o
    assert abs(o["traffic_bytes"]["total"] - sum(o["traffic_bytes"][t] for t in tiers)) < 1, o
    assert abs(o["flops"]["total"] - sum(o["flops"][t] for t in tiers)) < 1, o
    assert o["flops"]["router"] == 0 or o["name"] != "muon", o
assert len(d["optimizers"]) >= 9
PY
    for name in $(ls "$root/sim/model/configs" | sed 's/\.json$//'); do
        "$mizan" model "$name" --json --optimizer all >out.json
        "$python" check.py || { echo "$name" && return 1; }
    done
}

@test "optimizers with options, shared by ranks, unfused" {
    run json "[o['state_bytes']['total'] for o in d['optimizers']]" \
        "$mizan" model skewadam-6.8b --json --optimizer 'skewadam,skewadam[uniform],muon[state=tabulated],galore[rank=128]'
    [ "$output" = "[1380800000, 27150620672, 27137310720, 1735196672]" ]
    run json "[(o['parts'], o['temporaries'], o['replicated_bytes'] > 0, o['temporary_bytes']) for o in d['optimizers']]" \
        "$mizan" model skewadam-6.8b --json --optimizer 'adamw-bf16,skewadam' --parts 8 --temporaries unfused
    [ "$output" = "[(8, 'unfused', False, 721158144), (8, 'unfused', True, 618570752)]" ]
    run "$mizan" model skewadam-6.8b --optimizer all --parts 8
    [[ $output == *"replicated"*"exchange"* ]]
    [[ $output == *"every tensor shared by 8 ranks"* ]]
    run "$mizan" sim --list
    [[ $output == *"muon"* && $output == *"iterations=5"* ]]
}

@test "a folder, a file, a path without .json" {
    config
    mkdir small && cp bad.json small/config.json
    run "$mizan" model small/
    [ "$status" -eq 0 ]
    [[ $output == "small (mixtral)"* ]]
    run "$mizan" model ./bad.json
    [ "$status" -eq 0 ]
}

@test "same input, same bytes" {
    "$mizan" model deepseek-v3 --json --tensors --optimizer all >a
    "$mizan" model deepseek-v3 --json --tensors --optimizer all >b
    cmp a b
}

@test "bad names and options" {
    fails 2 "no model given" "$mizan" model
    fails 2 "did you mean mixtral-8x7b?" "$mizan" model mixtral-8x77b
    fails 2 "qwen3-30b-a3b" "$mizan" model zebra
    fails 2 "no-such.json" "$mizan" model no-such.json
    mkdir Mixtral-local
    fails 2 "the folder of that name here write ./Mixtral-local" "$mizan" model Mixtral-local
    rmdir Mixtral-local
    fails 2 "leave out" "$mizan" model --list mixtral-8x7b
    fails 2 "" "$mizan" model a b
    fails 2 "did you mean --tensors?" "$mizan" model mixtral-8x7b --tensor
    fails 2 "parts" "$mizan" model mixtral-8x7b --parts 0
    fails 2 "unfused" "$mizan" model mixtral-8x7b --temporaries none
    fails 2 "did you mean \"adamw\"?" "$mizan" model mixtral-8x7b --optimizer adam
    fails 2 "rank" "$mizan" model mixtral-8x7b --optimizer 'galore[rank=0]'
    fails 2 "brackets" "$mizan" model mixtral-8x7b --optimizer 'galore[rank=8'
    fails 2 "" "$mizan" model mixtral-8x7b --optimizer ''
    fails 2 "" "$mizan" model mixtral-8x7b --optimizer 'adamw,,lion'
}

@test "bad configs: one line that names the file and the key" {
    config hidden_size=
    fails 2 "bad.json: key 'hidden_size' is missing" "$mizan" model bad.json
    config num_local_experts=
    fails 2 "key 'num_local_experts' is missing" "$mizan" model bad.json
    config hidden_size='"64"'
    fails 2 "'hidden_size'" "$mizan" model bad.json
    config hidden_size=-64
    fails 2 "'hidden_size'" "$mizan" model bad.json
    config hidden_size=0
    fails 2 "'hidden_size'" "$mizan" model bad.json
    config hidden_size=64.5
    fails 2 "'hidden_size'" "$mizan" model bad.json
    config hidden_size=1e30
    fails 2 "'hidden_size'" "$mizan" model bad.json
    config hidden_size=99999999999999999999
    fails 2 "bad.json" "$mizan" model bad.json
    config num_hidden_layers=1000000000
    fails 2 "'num_hidden_layers'" "$mizan" model bad.json
    config num_local_experts=9007199254740993
    fails 2 "'num_local_experts'" "$mizan" model bad.json
    config num_experts_per_tok=5
    fails 2 "'num_experts_per_tok'" "$mizan" model bad.json
    config vocab_size=null
    fails 2 "'vocab_size'" "$mizan" model bad.json
    config tie_word_embeddings='"yes"'
    fails 2 "'tie_word_embeddings'" "$mizan" model bad.json
    config torch_dtype='"int8"'
    fails 2 "'torch_dtype'" "$mizan" model bad.json
    config model_type='"llama"'
    fails 2 "model_type \"llama\" is not supported" "$mizan" model bad.json
    config model_type='"mixtrall"'
    fails 2 "did you mean \"mixtral\"?" "$mizan" model bad.json
    config model_type=7
    fails 2 "'model_type'" "$mizan" model bad.json
    config _published='{"parameters": -1, "source": "x"}'
    fails 2 "_published" "$mizan" model bad.json
    config hidden_size=4194304 vocab_size=4194304 num_hidden_layers=4096 intermediate_size=4194304 num_local_experts=65536
    fails 2 "more than can be counted" "$mizan" model bad.json
}

@test "files that are no config" {
    printf '' >empty.json
    fails 2 "empty.json" "$mizan" model empty.json
    printf '{"model_type": "mixtral"' >cut.json
    fails 2 "cut.json" "$mizan" model cut.json
    printf '[1, 2]' >list.json
    fails 2 "list.json" "$mizan" model list.json
    printf 'null' >null.json
    fails 2 "null.json" "$mizan" model null.json
    head -c 4096 /dev/urandom >noise.json
    fails 2 "noise.json" "$mizan" model noise.json
    mkdir folder.json
    fails 2 "folder.json/config.json" "$mizan" model folder.json
    "$python" -c "print('[' * 100000)" >deep.json
    fails 2 "deep.json" "$mizan" model deep.json
    printf '{"model_type": "mix\ntral"}' >line.json
    fails 2 "line.json" "$mizan" model line.json
    [ -z "$(ls -A | grep -v '\.json$')" ]
}
