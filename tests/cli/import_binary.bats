#!/usr/bin/env bats
# Binary routing dumps, made by a script that shares nothing with the importers: what they become,
# and that every bad file is refused with one line.

load common

setup() { enter_tmpdir; }

binary() { "$python" "$root/tests/traces/make_binary.py" "$mizan" "$@"; }

@test "TensorRT-LLM statistic" { binary trt; }

@test "SGLang recorder: stat" { binary sglang_stat; }

@test "SGLang recorder: per_pass" { binary sglang_pass; }

@test "SGLang recorder: per_token" { binary sglang_token; }

@test "slime rollout data" { binary slime; }

@test "verl routed experts" { binary verl; }

@test "vLLM and SGLang ids as .npy" { binary npy_ids; }

@test "llama.cpp importance matrix" { binary imatrix; }

@test "MoE-Infinity matrices" { binary moe_infinity; }

@test "router logits" { binary router_logits; }

@test "Hearth .hrtr" { binary hrtr; }

@test "UltraEP load profile" { binary ultraep; }

@test "a tensor by itself may be of another program" {
    "$python" -B -c 'import sys; sys.path.insert(0, sys.argv[1])
import numpy as np; from make_binary import Tensor, torch_save
torch_save("x.pt", Tensor(np.ones((1, 2, 2, 2), np.int16)))' "$root/tests/traces"
    fails 2 "if another program wrote the file pass --format" "$mizan" trace import -q x.pt --phase decode -o out.h5
    fails 2 "x.pt: the phase is not in sglang-stat files, which it is taken for (--format names another)" \
        "$mizan" trace import -q x.pt -o out.h5
}
