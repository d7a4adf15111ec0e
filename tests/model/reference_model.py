#!/usr/bin/env python3
"""Checks `mizan model --json` against an independent account of the same models.

Tensors follow the module definitions of Hugging Face transformers (modeling_*.py of each family),
written as modules with their parameters; optimizer states follow the update rules of the SkewAdam
study and the papers, state array by state array. Nothing here reads the C sources.

usage: reference_model.py MIZAN CONFIG_FOLDER
"""
import json
import os
import subprocess
import sys
from math import prod


class Net:
    """A list of (name, shape, dtype, tier, trainable)."""

    def __init__(self, config):
        self.tensors = []
        self.config = config
        self.dtype = config.get("torch_dtype") or config.get("dtype") or "bfloat16"

    def put(self, name, shape, tier="backbone", dtype=None, trainable=True):
        self.tensors.append((name, tuple(shape), dtype or self.dtype, tier, trainable))

    def linear(self, name, inputs, outputs, bias=False, tier="backbone", dtype=None):
        self.put(name + ".weight", (outputs, inputs), tier, dtype)
        if bias:
            self.put(name + ".bias", (outputs,), tier, dtype)

    def swiglu(self, name, hidden, size, tier="backbone", gated=True):
        if gated:
            self.linear(name + ".gate_proj", hidden, size, tier=tier)
        self.linear(name + ".up_proj", hidden, size, tier=tier)
        self.linear(name + ".down_proj", size, hidden, tier=tier)

    def attention(self, at, qkv_bias=False, o_bias=False, norm=None):
        """Grouped-query attention; norm: None, "head" (per head) or "whole" (per projection)."""
        c = self.config
        hidden, heads = c["hidden_size"], c["num_attention_heads"]
        groups = c.get("num_key_value_heads") or heads
        size = c.get("head_dim") or hidden // heads
        self.linear(at + ".q_proj", hidden, heads * size, qkv_bias)
        self.linear(at + ".k_proj", hidden, groups * size, qkv_bias)
        self.linear(at + ".v_proj", hidden, groups * size, qkv_bias)
        self.linear(at + ".o_proj", heads * size, hidden, o_bias)
        if norm:
            self.put(at + ".q_norm.weight", (size if norm == "head" else heads * size,))
            self.put(at + ".k_norm.weight", (size if norm == "head" else groups * size,))

    def experts(self, at, count, size, tier="experts", gated=True):
        for e in range(count):
            self.swiglu(f"{at}.{e}", self.config["hidden_size"], size, tier, gated)

    def norms(self, at):
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.put(f"{at}.{name}.weight", (self.config["hidden_size"],))


def decoder(config, layer):
    """Embedding, layers, final norm, head unless tied."""
    net = Net(config)
    hidden = config["hidden_size"]
    net.put("model.embed_tokens.weight", (config["vocab_size"], hidden))
    for i in range(config["num_hidden_layers"]):
        layer(net, config, i, f"model.layers.{i}")
    net.put("model.norm.weight", (hidden,))
    if not config.get("tie_word_embeddings", False):
        net.linear("lm_head", hidden, config["vocab_size"])
    return net


def mixtral_layer(net, c, i, at):
    net.attention(at + ".self_attn")
    moe, hidden, size = at + ".block_sparse_moe", c["hidden_size"], c["intermediate_size"]
    net.linear(moe + ".gate", hidden, c["num_local_experts"], tier="router")
    for e in range(c["num_local_experts"]):
        net.linear(f"{moe}.experts.{e}.w1", hidden, size, tier="experts")
        net.linear(f"{moe}.experts.{e}.w2", size, hidden, tier="experts")
        net.linear(f"{moe}.experts.{e}.w3", hidden, size, tier="experts")
    net.norms(at)


def sparse(c, i):
    return i not in c.get("mlp_only_layers", []) and (i + 1) % c.get("decoder_sparse_step", 1) == 0


def qwen3_layer(net, c, i, at):
    bias = c.get("attention_bias", False)
    net.attention(at + ".self_attn", bias, bias, "head")
    if sparse(c, i):
        net.linear(at + ".mlp.gate", c["hidden_size"], c["num_experts"], tier="router")
        net.experts(at + ".mlp.experts", c["num_experts"], c["moe_intermediate_size"])
    else:
        net.swiglu(at + ".mlp", c["hidden_size"], c["intermediate_size"])
    net.norms(at)


def qwen2_layer(net, c, i, at):
    net.attention(at + ".self_attn", True)
    if sparse(c, i):
        net.linear(at + ".mlp.gate", c["hidden_size"], c["num_experts"], tier="router")
        net.experts(at + ".mlp.experts", c["num_experts"], c["moe_intermediate_size"])
        net.swiglu(at + ".mlp.shared_expert", c["hidden_size"],
                   c["shared_expert_intermediate_size"], "shared")
        net.linear(at + ".mlp.shared_expert_gate", c["hidden_size"], 1, tier="shared")
    else:
        net.swiglu(at + ".mlp", c["hidden_size"], c["intermediate_size"])
    net.norms(at)


def olmoe_layer(net, c, i, at):
    bias = c.get("attention_bias", False)
    net.attention(at + ".self_attn", bias, bias, "whole")
    net.linear(at + ".mlp.gate", c["hidden_size"], c["num_experts"], tier="router")
    net.experts(at + ".mlp.experts", c["num_experts"], c["intermediate_size"])
    net.norms(at)


def latent_attention(net, c, at):
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    head = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    bias = c.get("attention_bias", False)
    if c.get("q_lora_rank"):
        net.linear(at + ".q_a_proj", hidden, c["q_lora_rank"], bias)
        net.put(at + ".q_a_layernorm.weight", (c["q_lora_rank"],))
        net.linear(at + ".q_b_proj", c["q_lora_rank"], heads * head)
    else:
        net.linear(at + ".q_proj", hidden, heads * head)
    net.linear(at + ".kv_a_proj_with_mqa", hidden, c["kv_lora_rank"] + c["qk_rope_head_dim"], bias)
    net.put(at + ".kv_a_layernorm.weight", (c["kv_lora_rank"],))
    net.linear(at + ".kv_b_proj", c["kv_lora_rank"],
               heads * (c["qk_nope_head_dim"] + c["v_head_dim"]))
    net.linear(at + ".o_proj", heads * c["v_head_dim"], hidden, bias)


def shared_and_routed(net, c, i, at, correction):
    if i < c.get("first_k_dense_replace", 0):
        net.swiglu(at + ".mlp", c["hidden_size"], c["intermediate_size"])
        return
    net.linear(at + ".mlp.gate", c["hidden_size"], c["n_routed_experts"], tier="router")
    if correction:
        net.put(at + ".mlp.gate.e_score_correction_bias", (c["n_routed_experts"],), "router",
                "float32", False)
    net.experts(at + ".mlp.experts", c["n_routed_experts"], c["moe_intermediate_size"])
    if c.get("n_shared_experts"):
        net.swiglu(at + ".mlp.shared_experts", c["hidden_size"],
                   c["moe_intermediate_size"] * c["n_shared_experts"], "shared")


def deepseek_layer(correction):
    def layer(net, c, i, at):
        latent_attention(net, c, at + ".self_attn")
        shared_and_routed(net, c, i, at, correction)
        net.norms(at)
    return layer


def glm4_layer(net, c, i, at):
    net.attention(at + ".self_attn", c.get("attention_bias", False), False,
                  "head" if c.get("use_qk_norm") else None)
    shared_and_routed(net, c, i, at, True)
    net.norms(at)


def gpt_oss_layer(net, c, i, at):
    bias = c.get("attention_bias", True)
    net.attention(at + ".self_attn", bias, bias)
    net.put(at + ".self_attn.sinks", (c["num_attention_heads"],))
    hidden, size, n = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    net.put(at + ".mlp.router.weight", (n, hidden), "router")
    net.put(at + ".mlp.router.bias", (n,), "router")
    net.put(at + ".mlp.experts.gate_up_proj", (n, hidden, 2 * size), "experts")
    net.put(at + ".mlp.experts.gate_up_proj_bias", (n, 2 * size), "experts")
    net.put(at + ".mlp.experts.down_proj", (n, size, hidden), "experts")
    net.put(at + ".mlp.experts.down_proj_bias", (n, hidden), "experts")
    net.norms(at)


def granite_layer(net, c, i, at):
    bias = c.get("attention_bias", False)
    net.attention(at + ".self_attn", bias, bias)
    moe, hidden, size = at + ".block_sparse_moe", c["hidden_size"], c["intermediate_size"]
    n = c["num_local_experts"]
    net.put(moe + ".input_linear.weight", (n, 2 * size, hidden), "experts")
    net.put(moe + ".output_linear.weight", (n, hidden, size), "experts")
    net.linear(moe + ".router.layer", hidden, n, tier="router")
    net.norms(at)


def mizan_layer(net, c, i, at):
    bias = c.get("attention_bias", False)
    net.attention(at + ".self_attn", bias, bias)
    gated = c.get("gated", True)
    if i < c.get("first_k_dense_replace", 0):
        net.swiglu(at + ".mlp", c["hidden_size"], c["intermediate_size"], gated=gated)
    else:
        n = c["num_experts"] * c.get("experts_per_group", 1)
        net.linear(at + ".mlp.gate", c["hidden_size"], n, tier="router")
        net.experts(at + ".mlp.experts", n, c["moe_intermediate_size"], gated=gated)
        if c.get("num_shared_experts"):
            net.swiglu(at + ".mlp.shared_experts", c["hidden_size"],
                       c["moe_intermediate_size"] * c["num_shared_experts"], "shared", gated)
    net.norms(at)


def study(c):
    """Section 6.1 of the study: LayerNorm with biases and router in fp32, positions, tied head."""
    net = Net(c)
    hidden = c["hidden_size"]

    def norm(name):
        net.put(name + ".weight", (hidden,), dtype="float32")
        net.put(name + ".bias", (hidden,), dtype="float32")

    net.put("model.embed_tokens.weight", (c["vocab_size"], hidden))
    net.put("model.embed_positions.weight", (c["max_position_embeddings"], hidden))
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        norm(at + ".input_layernorm")
        norm(at + ".post_attention_layernorm")
        net.attention(at + ".self_attn")
        if i < c.get("first_k_dense_replace", 0):
            net.swiglu(at + ".mlp", hidden, c["intermediate_size"])
        else:
            net.linear(at + ".mlp.gate", hidden, c["num_experts"], tier="router", dtype="float32")
            net.experts(at + ".mlp.experts", c["num_experts"], c["moe_intermediate_size"])
    norm("model.norm")
    if not c.get("tie_word_embeddings"):
        net.linear("lm_head", hidden, c["vocab_size"])
    return net


LAYERS = {
    "mixtral": mixtral_layer, "qwen3_moe": qwen3_layer, "qwen2_moe": qwen2_layer,
    "olmoe": olmoe_layer, "deepseek_v2": deepseek_layer(False), "deepseek_v3": deepseek_layer(True),
    "glm4_moe": glm4_layer, "gpt_oss": gpt_oss_layer, "granitemoe": granite_layer,
    "mizan_moe": mizan_layer,
}


def build(config):
    if config["model_type"] == "mizan_layernorm_moe":
        return study(config)
    return decoder(config, LAYERS[config["model_type"]])


# ---- optimizer states, array by array; every function returns bytes ------------------------------


def matrices(name, shape):
    """(number, shape of one): slices of stacked experts are matrices or vectors of their own."""
    stacked = len(shape) == 3 or name.endswith(("gate_up_proj_bias", "down_proj_bias"))
    return (shape[0], shape[1:]) if stacked else (1, shape)


def factored(name, shape):
    n, one = matrices(name, shape)
    return n * 4 * (one[0] if len(one) == 1 else sum(one))


def is_table(name):
    return "embed_tokens" in name or "embed_positions" in name or name.startswith("lm_head")


def skewadam(experts=False, router="full", uniform=False):
    def state(name, shape, dtype, tier):
        full = 4 * prod(shape)
        if tier == "experts":
            return factored(name, shape) + (full if experts or uniform else 0)
        if tier == "router":
            if uniform:
                return full + factored(name, shape)
            return full if router == "full" else factored(name, shape)
        return full + factored(name, shape)
    return state


def muon(name, shape, dtype, tier):
    n, one = matrices(name, shape)
    adam = len(one) == 1 or is_table(name) or tier == "router"
    return 4 * prod(shape) * (2 if adam else 1)


def galore(rank):
    def state(name, shape, dtype, tier):
        n, one = matrices(name, shape)
        if len(one) == 1:
            return 8 * prod(shape)
        r = min(rank, *one)
        return n * 4 * (r * one[0] + r * one[1] + 2 * r * r)
    return state


def galore_one_sided(rank):
    def state(name, shape, dtype, tier):
        n, one = matrices(name, shape)
        if len(one) == 1 or is_table(name):
            return 8 * prod(shape)
        r = min(rank, *one)
        return n * 4 * (r * min(one) + 2 * r * max(one))
    return state


def adam8bit(name, shape, dtype, tier):
    n, one = matrices(name, shape)
    if prod(shape) < 4096:
        return 8 * prod(shape)
    blocks = -(-prod(one) // 256)
    return n * 2 * (prod(one) + 4 * blocks)


def plain(bytes_per_value, master=False):
    def state(name, shape, dtype, tier):
        copy = 4 if master and dtype != "float32" else 0
        return (bytes_per_value + copy) * prod(shape)
    return state


OPTIMIZERS = {
    "adamw": plain(8, True), "adamw-bf16": plain(8), "adamw[moments=bf16]": plain(4, True),
    "lion": plain(4), "sgdm": plain(4), "lion[master=fp32]": plain(4, True),
    "skewadam": skewadam(), "skewadam[experts=momentum]": skewadam(experts=True),
    "skewadam[router=factored]": skewadam(router="factored"),
    "skewadam[uniform]": skewadam(uniform=True),
    "adafactor": lambda name, shape, dtype, tier: factored(name, shape),
    "muon": muon, "muon[state=tabulated]": plain(4),
    "galore": galore(128), "galore[rank=8]": galore(8),
    "galore[rank=64,sides=one]": galore_one_sided(64), "adam8bit": adam8bit,
}

TIERS = ("backbone", "experts", "router", "shared")


def compare(what, have, want, wrong):
    if have != want:
        wrong.append(f"{what}: mizan {have}, reference {want}")


def check(program, path):
    config = json.load(open(path))
    net = build(config)
    out = subprocess.run([program, "model", path, "--json", "--tensors", "--optimizer",
                          ",".join(OPTIMIZERS)], stdout=subprocess.PIPE, check=True).stdout
    have = json.loads(out)
    wrong = []
    total = sum(prod(t[1]) for t in net.tensors)
    compare("total", have["parameters"]["total"], total, wrong)
    for tier in TIERS:
        mine = [t for t in net.tensors if t[3] == tier]
        compare(tier, have["parameters"][tier], sum(prod(t[1]) for t in mine), wrong)
        compare(tier + " bytes", have["weight_bytes"][tier],
                sum(prod(t[1]) * (4 if t[2] == "float32" else 2) for t in mine), wrong)
    theirs = {t["name"]: (tuple(t["shape"]), t["dtype"], t["tier"], t["trainable"])
              for t in have["tensors"]}
    compare("tensors", have["tensor_count"], len(net.tensors), wrong)
    compare("names that occur once", len(theirs), len(have["tensors"]), wrong)
    for t in net.tensors:
        compare(t[0], theirs.pop(t[0], None), t[1:], wrong)
    for name in theirs:
        wrong.append(f"{name}: only mizan has it")
    for optimizer, rule in OPTIMIZERS.items():
        entry = next(o for o in have["optimizers"] if o["name"] == optimizer)
        for tier in TIERS:
            compare(f"{optimizer}, {tier}", entry["state_bytes"][tier],
                    sum(rule(*t[:4]) for t in net.tensors if t[3] == tier and t[4]), wrong)
    return total, wrong


def main():
    program, folder = sys.argv[1:3]
    failed = False
    for file in sorted(os.listdir(folder)):
        if not file.endswith(".json"):
            continue
        total, wrong = check(program, os.path.join(folder, file))
        print(f"{file[:-5]:22} {total:16,} parameters, {len(OPTIMIZERS)} optimizers: "
              f"{'differs' if wrong else 'equal'}")
        for line in wrong[:10]:
            print("   ", line)
        failed = failed or bool(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
