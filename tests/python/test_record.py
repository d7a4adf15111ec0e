"""The recorder on small, randomly initialised models of Hugging Face's MoE classes.

Needs torch, transformers and h5py; where this Python lacks them, MIZAN_TORCH_PYTHON may name one
that has them; otherwise the test skips (exit code 77) and says so.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import unittest

if any(importlib.util.find_spec(name) is None for name in ("h5py", "torch", "transformers")):
    other = os.environ.pop("MIZAN_TORCH_PYTHON", None)
    if other:
        os.execv(other, [other, *sys.argv])
    print(
        "skipped: no torch, transformers and h5py here; "
        "MIZAN_TORCH_PYTHON may name a Python that has them"
    )
    sys.exit(77)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

if int(transformers.__version__.split(".")[0]) < 5:
    print(f"skipped: transformers {transformers.__version__} is older than 5.0")
    sys.exit(77)

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "traces", "python"))

import mizan  # noqa: E402
from mizan.recorder import chosen, find_blocks  # noqa: E402

PROGRAM = os.environ.get("MIZAN", os.path.join(ROOT, "build", "demo", "mizan"))
torch.set_num_threads(1)
COMMON = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    num_hidden_layers=3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    moe_intermediate_size=16,
    n_shared_experts=1,
    n_routed_experts=8,
    num_experts_per_tok=3,
    first_k_dense_replace=1,
)
#: name: (class, config, MoE layers, experts, top_k, router, shared experts, weights sum to 1)
MODELS = {
    "Mixtral": (dict(num_local_experts=4, num_experts_per_tok=2), 3, 4, 2, "softmax", 0, True),
    "Olmoe": (dict(num_experts=8, num_experts_per_tok=3), 3, 8, 3, "softmax", 0, False),
    "Qwen2Moe": (
        dict(
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        3,
        8,
        2,
        "softmax",
        1,
        False,
    ),
    "Qwen3Moe": (
        dict(
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            head_dim=8,
            norm_topk_prob=True,
        ),
        3,
        8,
        2,
        "softmax",
        0,
        True,
    ),
    "DeepseekV2": (
        dict(LATENT, topk_method="greedy", routed_scaling_factor=1.0),
        2,
        8,
        3,
        "softmax",
        1,
        False,
    ),
    "DeepseekV3": (
        dict(LATENT, n_group=2, topk_group=1, routed_scaling_factor=2.5),
        2,
        8,
        3,
        "sigmoid",
        1,
        False,
    ),
    "Glm4Moe": (
        dict(
            moe_intermediate_size=16,
            n_shared_experts=1,
            n_routed_experts=8,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            head_dim=8,
        ),
        2,
        8,
        2,
        "sigmoid",
        1,
        True,
    ),
    "GptOss": (
        dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8),
        3,
        4,
        2,
        "softmax",
        0,
        True,
    ),
    "GraniteMoe": (dict(num_local_experts=8, num_experts_per_tok=2), 3, 8, 2, "softmax", 0, True),
}


def build(name, **more):
    options = MODELS[name][0]
    config = getattr(transformers, name + "Config")(**{**COMMON, **options, **more})
    torch.manual_seed(7)
    model = getattr(transformers, name + "ForCausalLM")(config)
    with torch.no_grad():
        for block, router in find_blocks(model):  # some initialise routers with zeros
            getattr(router, "layer", router).weight.normal_()
            bias = getattr(router, "e_score_correction_bias", None)
            if bias is not None:
                bias.normal_()
    return model


class Witness:
    """What the experts of every block were given, and the blocks' inputs and outputs: other
    hooks."""

    def __init__(self, model):
        self.given, self.inputs, self.outputs = [], [], []
        for block, _ in find_blocks(model):
            block.experts.register_forward_pre_hook(self._experts)
            block.register_forward_hook(self._block)

    def _experts(self, module, args):
        self.given.append((args[1].clone(), args[2].detach().clone()))

    def _block(self, module, args, output):
        output = output[0] if isinstance(output, tuple) else output
        if output.requires_grad:
            output.retain_grad()
        self.inputs.append(args[0].detach().clone())
        self.outputs.append(output)


def tokens(batch=2, length=12, seed=1):
    return torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(seed))


class InFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder, self.path = folder.name, os.path.join(folder.name, "t.h5")

    def check(self, *paths):
        done = subprocess.run([PROGRAM, "trace", "check", *paths], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def same(self, trace, witness, keep=slice(None)):
        calls = [call for step in trace for call in step]
        self.assertEqual(len(calls), len(witness.given))
        for call, (ids, weights) in zip(calls, witness.given):
            np.testing.assert_array_equal(call.ids, ids.numpy()[keep])
            np.testing.assert_array_equal(call.weights, weights.float().numpy()[keep])


class EveryModel(InFolder):
    def forward_of(self, name):
        _, layers, experts, top_k, router, shared, normalized = MODELS[name]
        model = build(name).eval()
        witness = Witness(model)
        with mizan.record(model, self.path, phase="prefill", input_norms=True), torch.no_grad():
            for seed in range(2):
                model(input_ids=tokens(seed=seed))
        self.check(self.path)
        with mizan.open(self.path) as trace:
            self.same(trace, witness)
            facts = dict(
                layers=layers,
                experts=experts,
                top_k=top_k,
                router=router,
                shared_experts=shared,
                weights_normalized=int(normalized),
                phase="prefill",
                step="forward",
                hidden=32,
            )
            self.assertEqual({n: trace.facts[n] for n in facts}, facts)
            self.assertEqual(trace.sequences["token_begin"].tolist(), [0, 12, 24, 36])
            for call, given in zip((c for step in trace for c in step), witness.inputs):
                want = given.double().pow(2).sum(-1).reshape(-1).numpy()
                np.testing.assert_allclose(call.input_norm2, want, rtol=1e-5)

    def training_of(self, name):
        model = build(name).train()
        witness = Witness(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mizan.record(model, self.path, gradient_norms=True) as rec:
            for step in range(2):
                for micro_batch in range(2):
                    batch = tokens(seed=10 * step + micro_batch)
                    loss = model(input_ids=batch, labels=batch).loss
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                rec.step(loss=loss.item(), learning_rate=0.1)
        self.check(self.path)
        with mizan.open(self.path) as trace:
            self.same(trace, witness)
            self.assertEqual([len(step) for step in trace], [2 * MODELS[name][1]] * 2)
            self.assertEqual(trace.steps["learning_rate"].tolist(), [0.1, 0.1])
            for call, output in zip((c for step in trace for c in step), witness.outputs):
                want = output.grad.double().pow(2).sum(-1).reshape(-1).numpy()
                np.testing.assert_allclose(call.grad_norm2, want, rtol=1e-5)
                self.assertGreater(call.grad_norm2.max(), 0)


for model_name in MODELS:
    setattr(
        EveryModel, f"test_forward_{model_name}", lambda self, n=model_name: self.forward_of(n)
    )
    setattr(
        EveryModel, f"test_training_{model_name}", lambda self, n=model_name: self.training_of(n)
    )


class Hidden(InFolder):
    def hidden_of(self, name):
        """Against the norms of what the model's own products take in."""
        model = build(name, experts_implementation="eager").eval()
        witness = Witness(model)
        seen = []
        linear, matmul = torch.nn.functional.linear, torch.Tensor.__matmul__
        downs = {block.experts.down_proj.data_ptr(): block for block, _ in find_blocks(model)}

        def note(value, weight):
            base = weight._base if weight._base is not None else weight
            if base.data_ptr() in downs and base.dim() == 3:
                seen.append(value.double().pow(2).sum(-1).numpy())

        def spy_linear(value, weight, bias=None):
            note(value, weight)
            return linear(value, weight, bias)

        def spy_matmul(value, weight):
            note(value, weight)
            return matmul(value, weight)

        with mizan.record(model, self.path, phase="prefill", hidden_norms=True), torch.no_grad():
            torch.nn.functional.linear, torch.Tensor.__matmul__ = spy_linear, spy_matmul
            try:
                model(input_ids=tokens())
            finally:
                torch.nn.functional.linear, torch.Tensor.__matmul__ = linear, matmul
        self.check(self.path)
        with mizan.open(self.path) as trace:
            self.same(trace, witness)
            for call in (call for step in trace for call in step):
                for expert in np.unique(call.ids):  # in this order, a product each
                    place, token = np.where(call.ids.T == expert)
                    want, got = seen.pop(0), np.asarray(call.hidden_norm2).reshape(call.ids.shape)
                    np.testing.assert_allclose(got[token, place], want, rtol=1e-4)
        self.assertEqual(seen, [])

    def test_experts_that_are_modules_are_refused(self):
        block, layer = torch.nn.Module(), torch.nn.Linear(4, 4)
        block.gate, block.experts = layer, torch.nn.ModuleList([layer])
        with self.assertRaisesRegex(ValueError, "hidden norms: Module does not keep"):
            mizan.record(block, self.path, hidden_norms=True)


for model_name in MODELS:
    setattr(Hidden, f"test_{model_name}", lambda self, n=model_name: self.hidden_of(n))


class Details(InFolder):
    def test_router_logits_of_the_model_give_the_same_choice(self):
        for name, renormalise in (("Mixtral", True), ("Olmoe", False)):
            model = build(name).eval()
            with mizan.record(model, self.path, phase="prefill"), torch.no_grad():
                logits = model(input_ids=tokens(), output_router_logits=True).router_logits
            with mizan.open(self.path) as trace:
                for call, layer in zip(trace.__iter__().__next__(), logits):
                    weights, ids = torch.softmax(layer.float(), -1).topk(MODELS[name][3], -1)
                    if renormalise:
                        weights = weights / weights.sum(-1, keepdim=True)
                    np.testing.assert_array_equal(call.ids, ids.numpy())
                    np.testing.assert_allclose(call.weights, weights.numpy(), rtol=1e-6)

    def test_routers_of_other_releases(self):
        """What routers returned in Transformers 4: logits, scores of all experts, sorted lists."""
        generator = torch.Generator().manual_seed(5)
        logits = torch.randn(20, 6, generator=generator)
        scores, best = torch.softmax(logits, -1).topk(2, -1)
        block, router = torch.nn.Module(), torch.nn.Linear(4, 6)
        block.top_k, block.num_experts, block.norm_topk_prob = 2, 6, False
        ids, weights = chosen(torch, block, router, logits)
        self.assertTrue(torch.equal(ids, best) and torch.equal(weights, scores))
        block.norm_topk_prob = True
        ids, weights = chosen(torch, block, router, logits)
        torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))
        # A weight for every expert, zero where it was not chosen, and the choice.
        dense = torch.zeros(20, 6).scatter(1, best, scores)
        ids, weights = chosen(torch, block, router, (dense, best))
        self.assertTrue(torch.equal(ids, best) and torch.equal(weights, scores))
        ids, weights = chosen(torch, block, router, (best, scores))
        self.assertTrue(torch.equal(ids, best) and torch.equal(weights, scores))
        # Pairs sorted by expert: tokens, gates, sizes; the logits stand last.
        router.top_k = 2
        top, best = logits.topk(2, -1)
        gates = torch.softmax(top, -1)
        order = best.flatten().argsort(stable=True)
        sizes = best.flatten().bincount(minlength=6).tolist()
        lists = (order, order // 2, gates.flatten()[order], sizes, logits)
        ids, weights = chosen(torch, block, router, lists)
        self.assertTrue(torch.equal(ids, best) and torch.equal(weights, gates))
        with self.assertRaisesRegex(ValueError, "cannot tell experts"):
            chosen(torch, block, router, (logits, logits))

    def test_padding(self):
        mask = torch.ones(3, 12, dtype=torch.long)
        mask[0, :5] = 0  # padded in front
        mask[1, 9:] = 0  # and behind
        keep = mask.bool().flatten().numpy()
        for drop in (False, True):
            model = build("Olmoe").eval()
            witness = Witness(model)
            with mizan.record(
                model, self.path, phase="prefill", drop_padding=drop
            ), torch.no_grad():
                model(input_ids=tokens(3), attention_mask=mask)
            self.check(self.path)
            with mizan.open(self.path) as trace:
                self.same(trace, witness, keep if drop else slice(None))
                self.assertEqual(trace.sequences["tokens"].tolist(), [7, 9, 12])
                begin = [0, 7, 16] if drop else [5, 12, 24]
                self.assertEqual(trace.sequences["token_begin"].tolist(), begin)

    def test_packed_sequences(self):
        model = build("Mixtral").eval()
        positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
        with mizan.record(model, self.path, phase="prefill"), torch.no_grad():
            model(input_ids=tokens(1), position_ids=positions)
        with mizan.open(self.path) as trace:
            self.assertEqual(trace.sequences["tokens"].tolist(), [5, 3, 4])

    def test_generation_is_told_apart_by_phase(self):
        for phase, steps, rows in (("prefill", 1, 2 * 12), ("decode", 5, 2)):
            model = build("Qwen3Moe").eval()
            with mizan.record(model, self.path, phase=phase):
                model.generate(
                    input_ids=tokens(),
                    attention_mask=torch.ones(2, 12, dtype=torch.long),
                    max_new_tokens=6,
                    min_new_tokens=6,
                    do_sample=False,
                )
            self.check(self.path)
            with mizan.open(self.path) as trace:
                self.assertEqual([len(step) for step in trace], [3] * steps)
                self.assertEqual(set(trace.calls["tokens"].tolist()), {rows})

    def test_recomputed_layers_are_recorded_once(self):
        for reentrant in (False, True):
            model = build("Olmoe").train()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
            plain = build("Olmoe").train()
            witness = Witness(plain)
            batch = tokens()
            plain(input_ids=batch, labels=batch).loss.backward()
            with mizan.record(model, self.path, gradient_norms=True) as rec:
                model(input_ids=batch, labels=batch).loss.backward()
                rec.step()
            self.check(self.path)
            with mizan.open(self.path) as trace:
                self.same(trace, witness)
                for call, output in zip(next(iter(trace)), witness.outputs):
                    want = output.grad.pow(2).sum(-1).reshape(-1).numpy()
                    np.testing.assert_allclose(call.grad_norm2, want, rtol=1e-4)

    def test_recomputation_that_cannot_be_told_apart_is_refused(self):
        model = build("Olmoe").train()
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
        with self.assertRaisesRegex(RuntimeError, "use_reentrant=False"):
            with mizan.record(model, self.path, gradient_norms=True):
                losses = [model(input_ids=b, labels=b).loss for b in (tokens(), tokens(seed=2))]
                sum(losses).backward()

    def test_half_precision(self):
        model = build("Mixtral").to(torch.bfloat16).eval()
        witness = Witness(model)
        with mizan.record(model, self.path, phase="prefill"), torch.no_grad():
            model(input_ids=tokens())
        with mizan.open(self.path) as trace:
            self.same(trace, witness)
            self.assertEqual(trace.facts["weights_normalized"], 1)

    def test_ranks_become_one_trace(self):
        parts, given = [], {}
        for rank in range(2):
            model = build("Mixtral").eval()
            witness = Witness(model)
            with mizan.record(
                model, self.path, phase="prefill", rank=rank, ranks=2
            ) as rec, torch.no_grad():
                for step in range(2):
                    model(input_ids=tokens(seed=5 * rank + step))
            parts.append(rec.path)
            given[rank] = witness.given
        self.assertEqual([os.path.basename(part) for part in parts], ["t.h5.rank0", "t.h5.rank1"])
        mizan.merge(parts, self.path)
        self.check(self.path, *parts)
        with mizan.open(self.path) as trace:
            self.assertEqual(trace.facts["ranks"], 2)
            for step in trace:
                for call in step:
                    ids, weights = given[call.rank][call.step * 3 + call.layer]
                    np.testing.assert_array_equal(call.ids, ids.numpy())
                    np.testing.assert_array_equal(call.weights, weights.numpy())
            self.assertEqual(trace.sequences["token_begin"].tolist(), list(range(0, 96, 12)))

    def test_what_cannot_be_recorded(self):
        with self.assertRaisesRegex(ValueError, "no MoE block"):
            mizan.record(torch.nn.Linear(2, 2), self.path)
        model = build("Mixtral")
        with self.assertRaisesRegex(ValueError, "no gradient reached layer 0"):
            with mizan.record(model, self.path, gradient_norms=True) as rec:
                model(input_ids=tokens())
                rec.step()
        with self.assertRaisesRegex(ValueError, "in phase 'train' only"):
            mizan.record(model, self.path, gradient_norms=True, phase="decode")
        with self.assertRaisesRegex(ValueError, "must be one of train, prefill, decode"):
            mizan.record(model, self.path, phase="training")
        with self.assertRaisesRegex(FileNotFoundError, "no folder"):
            mizan.record(model, os.path.join(self.folder, "missing", "t.h5"))
        self.assertEqual(os.listdir(self.folder), [])
        self.assertFalse(any(m._forward_hooks for m in model.modules()))

    def test_overhead(self):
        """Says what recording costs; fails only when it is out of all proportion."""
        size = dict(
            hidden_size=128,
            moe_intermediate_size=128,
            num_hidden_layers=2,
            num_experts=16,
            num_experts_per_tok=4,
            head_dim=32,
            vocab_size=500,
        )
        model = build("Qwen3Moe", **size).train()
        batch = torch.randint(3, 500, (2, 256), generator=torch.Generator().manual_seed(3))

        def seconds(rec=None):
            start = time.process_time()  # others may use this machine too
            model(input_ids=batch, labels=batch).loss.backward()
            if rec:
                rec.step()
            return time.process_time() - start

        seconds()
        plain = min(seconds() for _ in range(4))
        with mizan.record(model, self.path, gradient_norms=True, input_norms=True) as rec:
            recorded = min(seconds(rec) for _ in range(4))
        pairs = 4 * 2 * 4 * batch.numel()
        print(
            f"\noverhead: a training step of {batch.numel()} tokens, 2 layers, top-4 of 16, "
            f"hidden size 128, takes {plain * 1e3:.0f} ms of CPU time, recorded with both norms "
            f"{recorded * 1e3:.0f} ms; {os.path.getsize(self.path) / pairs:.1f} bytes per pair",
            file=sys.stderr,
        )
        self.assertLess(recorded, 2 * plain)


if __name__ == "__main__":
    unittest.main()
