"""The datasets and attributes of a trace as tables, in the words of FORMAT.md."""

VERSION = 1
PRODUCER = "mizan-python 0.1.0"

#: group of the file: {attribute: (default, largest number of bytes of a string or None)}
FACTS = {
    "/": {"producer": (PRODUCER, 127), "source": ("unknown", 255), "licence": ("unknown", 127)},
    "model": {
        "name": ("unknown", 127),
        "router": ("unknown", 63),
        "group_note": ("", 127),
        "layers": (None, None),
        "model_layers": (0, None),
        "experts": (None, None),
        "top_k": (None, None),
        "shared_experts": (0, None),
        "hidden": (0, None),
        "intermediate": (0, None),
        "weights_normalized": (0, None),
    },
    "run": {
        "kind": ("pairs", 15),
        "phase": (None, 15),
        "step": ("iteration", 15),
        "ranks": (1, None),
        "sequence_length": (0, None),
        "step_stride": (1, None),
        "import_notes": ("", 255),
    },
}

#: what a file must say; a writer fills in defaults
REQUIRED = ("layers", "experts", "top_k", "kind", "phase", "step", "ranks")
CHOICES = {
    "kind": ("pairs", "counts"),
    "phase": ("train", "prefill", "decode"),
    "step": ("iteration", "forward", "none"),
}
#: least and largest integer, where that is not 0 and none
RANGES = {
    "layers": (1, 65536),
    "experts": (1, 65536),
    "top_k": (0, 65535),
    **{n: (0, (1 << 31) - 1) for n in ("model_layers", "shared_experts", "hidden", "intermediate")},
    "weights_normalized": (0, 1),
    "ranks": (1, 1 << 20),
    "step_stride": (1, None),
}
CHUNK_MAX = 16 << 20

CALL_COLUMNS = ("step", "micro_batch", "layer", "rank", "token_begin", "tokens", "pairs")

#: name: (type, rows of a chunk or 0 for one of 1 MiB, units, long name)
COLUMNS = {
    "calls/step": ("<i8", 4096, "1", "training step or forward pass of the call"),
    "calls/micro_batch": ("<i4", 4096, "1", "micro-batch within the step"),
    "calls/layer": ("<i4", 4096, "1", "MoE layer, counted from 0"),
    "calls/rank": ("<i4", 4096, "1", "source rank that holds the tokens"),
    "calls/token_begin": (
        "<i8",
        4096,
        "tokens",
        "first token of the call on the global token axis",
    ),
    "calls/tokens": ("<i8", 4096, "tokens", "tokens of the call"),
    "calls/pairs": ("<i8", 4096, "pairs", "(token, expert) pairs of the call"),
    "pairs/expert": (None, 0, "1", "routed expert of the pair, counted from 0"),
    "pairs/weight": ("<f4", 0, "1", "gate weight of the pair"),
    "pairs/hidden_norm2": (
        "<f4",
        0,
        "1",
        "squared norm of the input of the expert's down projection",
    ),
    "rows/pairs": ("<u2", 0, "pairs", "experts chosen by the token in this call"),
    "rows/grad_norm2": ("<f4", 0, "1", "squared norm of the gradient of the layer's output"),
    "rows/input_norm2": ("<f4", 0, "1", "squared norm of the layer's input"),
    "counts": ("<u4", 0, "pairs", "pairs of the call to each expert"),
    "sequences/token_begin": (
        "<i8",
        2048,
        "tokens",
        "first token of the sequence on the global token axis",
    ),
    "sequences/tokens": ("<i8", 2048, "tokens", "tokens of the sequence"),
    "sequences/domain": ("<i4", 2048, "1", "text domain of the sequence, -1 unknown"),
    "steps/step": ("<i8", 512, "1", "step that the row describes"),
    "steps/loss": ("<f8", 512, "nat/token", "training loss, NaN unknown"),
    "steps/learning_rate": ("<f8", 512, "1", "learning rate, NaN unknown"),
    "steps/wall_time": ("<f8", 512, "s", "duration of the step, NaN unknown"),
}

_ANY = ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8")
#: name: types that a reader takes
TYPES = {
    **{name: _ANY for name in COLUMNS if name.startswith(("calls/", "sequences/"))},
    "steps/step": _ANY,
    "counts": _ANY[:4],
    **{name: ("u1", "u2") for name in ("pairs/expert", "rows/pairs")},
    **{name: ("f2", "f4") for name in COLUMNS if name.endswith(("weight", "_norm2"))},
    **{f"steps/{name}": ("f4", "f8") for name in ("loss", "learning_rate", "wall_time")},
}
