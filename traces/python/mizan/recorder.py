"""Recording the routing of a PyTorch mixture-of-experts model by hooks.

Works on models whose MoE blocks hold a router named ``gate`` or ``router``, as those of Hugging
Face do (Mixtral, OLMoE, Qwen2/3-MoE, DeepSeek V2/V3, GLM-4-MoE, GPT-OSS, Granite-MoE). What is
recorded is what the router hands to the experts; where it returns logits alone, the block's own
rule is applied to them.
"""

import os
import time
import warnings

import numpy as np

from .writer import Writer, check_choice, output_path

_ROUTERS = ("gate", "router")


def record(
    model,
    path,
    *,
    phase="train",
    gradient_norms=False,
    input_norms=False,
    hidden_norms=False,
    rank=None,
    ranks=None,
    drop_padding=False,
    first_step=0,
    facts=None,
    deflate=4,
    flush_seconds=1.0,
):
    """Records ``model`` into a trace while the ``with`` block runs; gives a ``Recorder``.

    phase           "train": each forward pass is a micro-batch, and ``rec.step()`` ends the step;
                    "prefill" or "decode": each forward pass is a step, and those with one new
                    token per sequence belong to decode, the others to prefill; the other phase is
                    left out
    gradient_norms  squared norms of the gradient of each MoE block's output (after ``backward``)
    input_norms     squared norms of each MoE block's input
    hidden_norms    of every pair, the squared norm of what enters the expert's down projection; it
                    is computed once more from the block's input, which costs two thirds of the
                    experts' forward pass. For experts that Transformers 5 keeps as stacked weights
    rank, ranks     of this process; default: torch.distributed's, where it runs. With several
                    ranks each writes PATH.rankN, to be joined with ``mizan.merge``
    drop_padding    leave out the tokens that the attention mask hides; they are kept otherwise,
                    outside every sequence, because the model routes them too
    facts           attributes of the trace that replace what the model's config says
    flush_seconds   steps are written to disk when the last time is this long ago; 0: every step.
                    A kill costs what came since, and the unfinished step
    """
    return Recorder(
        model,
        path,
        phase=phase,
        gradient_norms=gradient_norms,
        input_norms=input_norms,
        hidden_norms=hidden_norms,
        rank=rank,
        ranks=ranks,
        drop_padding=drop_padding,
        first_step=first_step,
        facts=facts,
        deflate=deflate,
        flush_seconds=flush_seconds,
    )


class Recorder:
    """Hooks on a model's MoE blocks; see ``record``. This process writes the file ``path``."""

    def __init__(
        self,
        model,
        path,
        *,
        phase="train",
        gradient_norms=False,
        input_norms=False,
        hidden_norms=False,
        rank=None,
        ranks=None,
        drop_padding=False,
        first_step=0,
        facts=None,
        deflate=4,
        flush_seconds=1.0,
    ):
        import torch

        self._torch = torch
        self._rank, self._ranks = _place(torch, rank, ranks)
        self.path = os.fspath(path) + (f".rank{self._rank}" if self._ranks > 1 else "")
        output_path(self.path)
        check_choice("phase", phase)
        self._blocks = find_blocks(model)
        if not self._blocks:
            raise ValueError(
                "no MoE block found: a block is a module with experts and a router named "
                "'gate' or 'router'"
            )
        if gradient_norms and phase != "train":
            raise ValueError("gradient norms can be recorded in phase 'train' only")
        self._model, self._phase = model, phase
        self._want_gradient, self._want_input = gradient_norms, input_norms
        self._want_hidden = hidden_norms
        if hidden_norms:
            for block, _ in self._blocks:
                _check_stacked(block)
        self._drop_padding, self._deflate = drop_padding, deflate
        self._given = dict(facts or {})
        self._step = first_step
        self._token = 0
        self._pending = []  # micro-batches of the current step
        self._current = None  # the one whose forward pass runs
        self._writer = None
        self._handles = []
        self._flush_seconds, self._flushed = flush_seconds, time.monotonic()

    # -- the with block

    def __enter__(self):
        hook = self._handles.append
        hook(self._model.register_forward_pre_hook(self._begin, with_kwargs=True))
        hook(self._model.register_forward_hook(self._end))
        for layer, (block, router) in enumerate(self._blocks):
            hook(router.register_forward_hook(self._router_hook(layer, block, router)))
            if self._want_hidden:
                hook(block.experts.register_forward_pre_hook(self._experts_hook(layer)))
            if self._want_gradient or self._want_input:
                hook(block.register_forward_hook(self._block_hook(layer)))
        return self

    def __exit__(self, kind, *_):
        for handle in self._handles:
            handle.remove()
        self._handles = []
        try:
            if kind is None and self._pending:
                self.step()
        finally:  # the steps before are good, whatever is wrong with the last
            self._pending = []
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()
        if kind is None and writer is None:
            warnings.warn(
                f"{self.path} is not written: no step of phase {self._phase!r} was recorded",
                stacklevel=2,
            )

    def step(self, loss=None, learning_rate=None, wall_time=None):
        """Ends the step: its forward passes go to the trace."""
        batches, self._pending = self._pending, []
        batches = [b.arrays(self._want_gradient, self._step, i) for i, b in enumerate(batches)]
        if self._writer is None and batches:
            self._writer = self._create(batches[0])
        for number, batch in enumerate(batches):
            self._write(number, batch)
        if self._writer is not None:
            self._writer.step(self._step, loss, learning_rate, wall_time)
            if time.monotonic() - self._flushed >= self._flush_seconds:
                self._writer.flush()
                self._flushed = time.monotonic()
        self._step += 1

    # -- hooks

    def _begin(self, module, args, kwargs):
        # A forward pass that failed never came to its end: what it left goes.
        self._current = _Batch(len(self._blocks), *_tokens_of(args, kwargs))

    def _end(self, module, args, output):
        batch, self._current = self._current, None
        if batch is None or not any(ids is not None for ids in batch.ids):
            return
        one_token = batch.shape is not None and batch.shape[1] == 1
        if self._phase == "train":
            self._pending.append(batch)
        elif one_token == (self._phase == "decode"):
            self._pending.append(batch)
            self.step()

    def _router_hook(self, layer, block, router):
        torch = self._torch

        def hook(module, args, output):
            # Outside a forward pass of the model this is a recomputation in the backward pass.
            if self._current is not None:
                with torch.no_grad():
                    ids, weights = chosen(torch, block, router, output)
                    self._current.ids[layer] = ids.to(torch.int32)
                    self._current.weights[layer] = weights.detach().float().clone()
                    self._current.experts = _experts(block, router, output)

        return hook

    def _block_hook(self, layer):
        def norms(tensor):
            return tensor.detach().float().pow(2).sum(-1).reshape(-1)

        def hook(module, args, output):
            output = output[0] if isinstance(output, tuple) else output
            batch = self._current
            if batch is not None and self._want_input:
                batch.inputs[layer] = norms(args[0])
            if not self._want_gradient or not output.requires_grad:
                return
            if batch is None:  # recomputed in the backward pass
                batch = self._lacking(layer)
            if batch is not None:
                batch.hooked[layer] = True
                output.register_hook(lambda grad: batch.gradients.__setitem__(layer, norms(grad)))

        return hook

    def _experts_hook(self, layer):
        torch = self._torch

        def hook(experts, args):
            if self._current is not None:
                with torch.no_grad():
                    self._current.hidden[layer] = hidden_norms_of(torch, experts, *args[:2])

        return hook

    def _lacking(self, layer):
        """The micro-batch whose gradient at this layer a recomputed output will bring."""
        batches = [batch for batch in self._pending if not batch.hooked[layer]]
        if len(batches) > 1:
            raise RuntimeError(
                "gradient norms: with several forward passes before a backward pass, "
                "layers must be recomputed with use_reentrant=False"
            )
        return batches[0] if batches else None

    # -- writing

    def _create(self, batch):
        facts = config_facts(self._model, self._blocks)
        sums = np.concatenate([w.sum(1) for w in batch.weights])
        facts.update(
            layers=len(self._blocks),
            experts=batch.experts,
            top_k=batch.ids[0].shape[1],
            phase=self._phase,
            kind="pairs",
            step="iteration" if self._phase == "train" else "forward",
            ranks=self._ranks,
            source="recorded from a PyTorch model",
            # Half precision: a few roundings of 2^-8 at most.
            weights_normalized=int(bool(len(sums)) and bool((np.abs(sums - 1) < 0.02).all())),
        )
        facts.update(self._given)
        return Writer(
            self.path,
            facts,
            weights=True,
            gradient_norms=self._want_gradient,
            input_norms=self._want_input,
            hidden_norms=self._want_hidden,
            sequences=self._phase != "decode",
            deflate=self._deflate,
        )

    def _write(self, number, batch):
        keep = batch.mask.ravel() if self._drop_padding and batch.mask is not None else None

        def cut(values):
            return values if keep is None or values is None else values[keep]

        tokens = len(cut(batch.ids[0]))
        for layer in range(len(self._blocks)):
            self._writer.call(
                self._step,
                number,
                layer,
                self._rank,
                self._token,
                tokens,
                ids=cut(batch.ids[layer]),
                weights=cut(batch.weights[layer]),
                grad_norm2=cut(batch.gradients[layer]),
                input_norm2=cut(batch.inputs[layer]),
                hidden_norm2=cut(batch.hidden[layer]),
            )
        if self._phase != "decode":
            for begin, length in batch.sequences(self._drop_padding):
                self._writer.sequence(self._token + begin, length)
        self._token += tokens


class _Batch:
    """What one forward pass routed, per layer; tensors stay on their device meanwhile."""

    def __init__(self, layers, shape, mask, positions):
        self.shape, self.mask, self.positions = shape, mask, positions
        self.ids = [None] * layers
        self.weights = [None] * layers
        self.gradients = [None] * layers
        self.inputs = [None] * layers
        self.hidden = [None] * layers
        self.hooked = [False] * layers
        self.experts = 0

    def arrays(self, want_gradient, step, number):
        """This batch with NumPy arrays; every layer must have been called with the same tokens."""
        where = f"step {step}, micro-batch {number}"
        for layer, ids in enumerate(self.ids):
            if ids is None:
                raise ValueError(f"{where}: layer {layer} was not called")
            if len(ids) != len(self.ids[0]):
                raise ValueError(
                    f"{where}: layer {layer} has {len(ids)} tokens, layer 0 {len(self.ids[0])}"
                )
            if want_gradient and self.gradients[layer] is None:
                raise ValueError(
                    f"{where}: no gradient reached layer {layer}: call backward() before "
                    "rec.step(), or record without gradient norms"
                )
        for name in "ids", "weights", "gradients", "inputs", "hidden":
            values = getattr(self, name)
            setattr(self, name, [None if v is None else v.cpu().numpy() for v in values])
        rows = len(self.ids[0])
        known = self.shape is not None and self.shape[0] * self.shape[1] == rows
        self.shape = self.shape if known else None
        self.mask = _array(self.mask, self.shape)
        self.positions = _array(self.positions, self.shape)
        return self

    def sequences(self, dropped):
        """(first row, rows) of each sequence: unmasked runs, cut where positions start again."""
        if self.shape is None:
            return
        row = 0
        for b in range(self.shape[0]):
            mask = np.ones(self.shape[1], bool) if self.mask is None else self.mask[b]
            starts = np.concatenate(([True], ~mask[:-1])) & mask
            if self.positions is not None:
                positions = self.positions[b]
                starts |= mask & np.concatenate(([False], positions[1:] != positions[:-1] + 1))
            index = np.arange(len(mask)) if not dropped else np.cumsum(mask) - 1
            ends = np.flatnonzero(mask & np.concatenate((starts[1:] | ~mask[1:], [True])))
            for first, last in zip(np.flatnonzero(starts), ends):
                yield row + int(index[first]), int(last - first + 1)
            row += int(mask.sum()) if dropped else len(mask)


def _array(tensor, shape):
    """A [batch, length] tensor as an array of that shape; None where it does not fit."""
    if tensor is None or shape is None or tensor.dim() != 2 or tensor.shape[1] < shape[1]:
        return None
    array = tensor[:, -shape[1] :].cpu().numpy()  # with a cache the mask spans what came before
    array = np.broadcast_to(array, shape) if array.shape[0] in (1, shape[0]) else None
    return array.astype(bool) if array is not None and array.dtype.kind == "b" else array


def _tokens_of(args, kwargs):
    """[batch, length] of a forward pass, its attention mask and positions, where they are told."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is None:
        ids = kwargs.get("inputs_embeds")
    shape = tuple(ids.shape[:2]) if ids is not None and ids.dim() >= 2 else None
    mask = kwargs.get("attention_mask")
    mask = (
        mask.detach().bool()
        if mask is not None and hasattr(mask, "dim") and mask.dim() == 2
        else None
    )
    positions = kwargs.get("position_ids")
    return (
        shape,
        mask,
        positions.detach() if positions is not None and positions.dim() == 2 else None,
    )


def _place(torch, rank, ranks):
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    if rank is None:
        rank = torch.distributed.get_rank() if running else 0
    if ranks is None:
        ranks = torch.distributed.get_world_size() if running else rank + 1
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}")
    return rank, ranks


def find_blocks(model):
    """(block, router) of every MoE layer, in the order of the model's modules."""
    blocks = []
    for block in model.modules():
        children = dict(block.named_children())
        router = next((children[name] for name in _ROUTERS if name in children), None)
        if router is not None and ("experts" in children or "input_linear" in children):
            blocks.append((block, router))
    return blocks


def chosen(torch, block, router, output):
    """(ids, weights), [tokens, top_k] both, from what a router returned."""
    if torch.is_tensor(output):
        return _from_logits(torch, block, router, output.reshape(-1, output.shape[-1]))
    tensors = [t for t in output if torch.is_tensor(t)]
    if len(output) == 5:  # Granite's gating of Transformers 4: sorted lists, and the logits last
        top, ids = output[4].topk(router.top_k, dim=-1)
        return ids, torch.softmax(top.float(), dim=-1).to(output[2].dtype)
    ids = next((t for t in tensors if not t.is_floating_point() and t.dim() == 2), None)
    if ids is None:
        raise ValueError(f"cannot tell experts from what {type(router).__name__} returns")
    floats = [t for t in tensors if t.is_floating_point() and t.dim() == 2]
    fitting = [t for t in floats if t.shape == ids.shape]
    if len(fitting) > 1:  # as many experts as top_k: logits come first
        fitting = fitting[-1:]
    if fitting and (len(floats) > 1 or fitting[0].shape[1] != _experts(block, router, output)):
        return ids, fitting[0]
    return ids, floats[-1].gather(1, ids.long())  # a weight for every expert


def _from_logits(torch, block, router, logits):
    """Softmax and top-k as blocks do that call a plain linear router."""
    top_k = getattr(block, "top_k", None) or getattr(block, "num_experts_per_tok", None)
    if top_k is None:
        raise ValueError(f"{type(block).__name__} does not say its top_k")
    weights, ids = torch.softmax(logits.float(), dim=-1).topk(top_k, dim=-1)
    if getattr(block, "norm_topk_prob", "Mixtral" in type(block).__name__):
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights.to(logits.dtype)


def _check_stacked(block):
    experts = getattr(block, "experts", None)
    names = ("gate_up_proj", "down_proj", "_apply_gate", "is_transposed", "has_bias")
    if experts is None or not all(hasattr(experts, name) for name in names):
        raise ValueError(
            f"hidden norms: {type(block).__name__} does not keep its experts as stacked weights"
        )


def hidden_norms_of(torch, experts, tokens, ids):
    """[tokens, top_k] squared norms of what enters the down projections of the chosen experts."""
    norms = torch.zeros(ids.shape, dtype=torch.float32, device=tokens.device)
    for expert in ids.unique().tolist():
        token, place = torch.where(ids == expert)
        weight = experts.gate_up_proj[expert]
        both = tokens[token] @ (weight if experts.is_transposed else weight.T)
        if experts.has_bias:
            both = both + experts.gate_up_proj_bias[expert]
        norms[token, place] = experts._apply_gate(both).float().pow(2).sum(-1)
    return norms


def _experts(block, router, output):
    """The number of routed experts of a block."""
    for module in (router, block, getattr(block, "experts", None)):
        for name in ("num_experts", "n_routed_experts", "num_local_experts"):
            value = getattr(module, name, None)
            if isinstance(value, int):
                return value
    weight = getattr(router, "weight", None)
    if weight is not None:
        return int(weight.shape[0])
    return int(output.shape[-1])


def config_facts(model, blocks):
    """Facts that a Hugging Face config tells; nothing where there is none."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    if config is None:
        return {}

    def first(*names):
        values = (getattr(config, name, None) for name in names)
        return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), 0)

    block, router = blocks[0]
    shared = first("n_shared_experts", "num_shared_experts")
    sigmoid = (
        hasattr(router, "e_score_correction_bias")
        or getattr(config, "scoring_func", "") == "sigmoid"
    )
    return {
        "name": getattr(config, "_name_or_path", "") or getattr(config, "model_type", "unknown"),
        "router": "sigmoid" if sigmoid else "softmax",
        "model_layers": first("num_hidden_layers", "n_layer"),
        "hidden": first("hidden_size"),
        "intermediate": first(
            "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"
        ),
        "shared_experts": shared or int(hasattr(block, "shared_expert")),
    }
