"""Reading traces with h5py: facts, calls and their arrays, finished or cut off by a killed
writer."""

import os

import h5py
import numpy as np

from . import schema

_CALL = np.dtype(
    [(name, "<i8") for name in schema.CALL_COLUMNS] + [("row_begin", "<i8"), ("pair_begin", "<i8")]
)
_PER_PAIR = ("pairs/expert", "pairs/weight", "pairs/hidden_norm2")
_PER_ROW = ("rows/pairs", "rows/grad_norm2", "rows/input_norm2")


class TraceError(ValueError):
    """The file is no trace, or holds what the format does not allow."""


class Call:
    """What one MoE layer did for the tokens of one rank in one micro-batch of one step.

    ``step``, ``micro_batch``, ``layer``, ``rank``, ``token_begin``, ``tokens`` and ``pairs`` are
    integers; the arrays are read when they are asked for and are None where they were not
    recorded.
    """

    def __init__(self, trace, index):
        self._trace = trace
        self.index = index
        for name in schema.CALL_COLUMNS:
            setattr(self, name, int(trace.calls[name][index]))

    def _pairs(self, name):
        dataset = self._trace._data.get(name)
        if dataset is None:
            return None
        begin = int(self._trace.calls["pair_begin"][self.index])
        flat = dataset[begin : begin + self.pairs]
        top_k = self._trace.facts["top_k"]
        return flat.reshape(self.tokens, top_k) if top_k else flat

    def _rows(self, name):
        dataset = self._trace._data.get(name)
        begin = int(self._trace.calls["row_begin"][self.index])
        return None if dataset is None else dataset[begin : begin + self.tokens]

    @property
    def ids(self):
        """Experts, [tokens, top_k]; [pairs] where top_k varies (see token_pairs)."""
        return self._pairs("pairs/expert")

    @property
    def weights(self):
        """Gate weights, of the shape of ids."""
        return self._pairs("pairs/weight")

    @property
    def hidden_norm2(self):
        """Squared norms of the down projections' inputs, of the shape of ids."""
        return self._pairs("pairs/hidden_norm2")

    @property
    def token_pairs(self):
        """Experts of each token, where top_k varies."""
        return self._rows("rows/pairs")

    @property
    def grad_norm2(self):
        """Squared norm of the gradient of the layer's output, per token."""
        return self._rows("rows/grad_norm2")

    @property
    def input_norm2(self):
        """Squared norm of the layer's input, per token."""
        return self._rows("rows/input_norm2")

    def counts(self):
        """Pairs to each expert, [experts]; of both kinds of trace."""
        counts = self._trace._data.get("counts")
        if counts is not None:
            return counts[self.index].astype(np.int64)
        return np.bincount(self.ids.ravel(), minlength=self._trace.facts["experts"])

    def __repr__(self):
        return (
            f"Call(step={self.step}, micro_batch={self.micro_batch}, layer={self.layer}, "
            f"rank={self.rank}, tokens={self.tokens}, pairs={self.pairs})"
        )


class Trace:
    """An open trace. ``mizan.open(path)`` makes one; use it in ``with`` or close it.

    facts      dict of the attributes of /, /model and /run; "step" is what one step means
    complete   False where the writer is at work or was killed: what is here is what it flushed
    calls      structured array: the columns of /calls, and row_begin and pair_begin
    sequences  structured array (token_begin, tokens, domain), empty where none are recorded
    steps      structured array (step, loss, learning_rate, wall_time), likewise
    """

    def __init__(self, path):
        self.path = os.fspath(path)
        self._file = _open_file(self.path)
        try:
            self.facts, self.complete = _read_facts(self._file, self.path)
            self._data = {
                name: self._file[name] for name in schema.COLUMNS if _has(self._file, name)
            }
            self.calls = self._read_calls()
            self.sequences = self._read_sequences()
            self.steps = self._table("steps", ("step", "loss", "learning_rate", "wall_time"))
        except (KeyError, OSError) as problem:
            self.close()
            raise TraceError(f"{self.path}: {problem}") from None
        except Exception:
            self.close()
            raise

    def close(self):
        """Closes the file; arrays that were read stay."""
        self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __len__(self):
        return len(self.calls)

    def call(self, index):
        """The call of this index in ``calls``."""
        return Call(self, range(len(self.calls))[index])

    def __iter__(self):
        """Steps in order, each a list of its calls by (micro_batch, layer, rank)."""
        _, first = np.unique(self.calls["step"], return_index=True)
        for begin, end in zip(first, [*first[1:], len(self.calls)]):
            yield [Call(self, i) for i in range(begin, end)]

    def _table(self, group, names):
        columns = {n: self._data[f"{group}/{n}"][:] for n in names if f"{group}/{n}" in self._data}
        rows = min((len(c) for c in columns.values()), default=0)
        table = np.zeros(rows, [(n, schema.COLUMNS[f"{group}/{n}"][0]) for n in names])
        for name in names:
            if name in columns:
                table[name] = columns[name][:rows]
            elif rows:
                table[name] = -1 if name == "domain" else np.nan
        return table

    def _read_calls(self):
        columns = {
            name: self._file["calls/" + name][:].astype("<i8") for name in schema.CALL_COLUMNS
        }
        lengths = {len(c) for c in columns.values()}
        if self.complete and len(lengths) > 1:
            raise TraceError(f"{self.path}: /calls: columns of different length")
        rows = min(lengths)
        calls = np.zeros(rows, _CALL)
        for name, column in columns.items():
            calls[name] = column[:rows]
        calls["row_begin"] = np.cumsum(calls["tokens"]) - calls["tokens"]
        calls["pair_begin"] = np.cumsum(calls["pairs"]) - calls["pairs"]
        held = min([rows] + [self._held(calls, name) for name in self._data])
        if self.complete and held < rows:
            raise TraceError(f"{self.path}: the data of call {held} is missing")
        return calls if self.complete else self._whole(calls[:held])

    def _held(self, calls, name):
        """How many calls have all their data in this dataset."""
        ends = {
            "pairs": calls["pair_begin"] + calls["pairs"],
            "rows": calls["row_begin"] + calls["tokens"],
        }
        group = name.split("/")[0]
        if name in _PER_PAIR or name in _PER_ROW:
            return int(np.searchsorted(ends[group], len(self._data[name]), side="right"))
        return len(self._data[name]) if name == "counts" else len(calls)

    def _whole(self, calls):
        """Without a last micro-batch that lacks layers or ranks."""
        if not len(calls):
            return calls
        last = calls[-1]
        tail = calls[
            (calls["step"] == last["step"]) & (calls["micro_batch"] == last["micro_batch"])
        ]
        ranks = int((tail["layer"] == tail["layer"][0]).sum())
        end = int((tail["layer"] == self.facts["layers"] - 1).sum())
        return calls if end == ranks else calls[: len(calls) - len(tail)]

    def _read_sequences(self):
        table = self._table("sequences", ("token_begin", "tokens", "domain"))
        if self.complete or not len(table):
            return table
        order = np.argsort(self.calls["token_begin"], kind="stable")
        begin, tokens = (self.calls[name][order] for name in ("token_begin", "tokens"))
        at = np.searchsorted(begin, table["token_begin"], side="right") - 1
        inside = (at >= 0) & (
            table["token_begin"] + table["tokens"] <= (begin + tokens)[np.maximum(at, 0)]
            if len(begin)
            else False
        )
        return table[inside]


def _open_file(path):
    try:
        return h5py.File(path, "r")
    except OSError as problem:
        # The flag of a writer that is at work, or was killed.
        try:
            return h5py.File(path, "r", swmr=True)
        except OSError:
            if not os.path.exists(path):
                raise FileNotFoundError(f"{path}: no such file") from None
            raise TraceError(f"{path}: {problem}") from None


def _has(file, name):
    return name in file and isinstance(file[name], h5py.Dataset)


def _value(attribute):
    if isinstance(attribute, bytes):
        return attribute.decode()
    return attribute.item() if isinstance(attribute, np.generic) else attribute


def _read_facts(file, path):
    if _value(file.attrs.get("format", "")) != "mizan-trace":
        raise TraceError(
            f"{path}: not a Mizan trace: attribute 'format' of / is not 'mizan-trace'"
        )
    version = int(file.attrs.get("format_version", 0))
    if not 1 <= version <= schema.VERSION:
        raise TraceError(
            f"{path}: format version {version}, but this reader knows 1 to {schema.VERSION}"
        )
    facts = {}
    for group, attributes in schema.FACTS.items():
        for name, (default, _) in attributes.items():
            value = _value(file[group].attrs.get(name, default))
            if value is None:
                raise TraceError(f"{path}: /{group.strip('/')}: attribute '{name}' is missing")
            facts[name] = value
    return facts, bool(file.attrs.get("complete", 1))


def open_trace(path):
    """Opens a trace for reading; one of a killed or working writer shows what was flushed."""
    return Trace(path)
