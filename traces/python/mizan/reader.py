"""Reading traces with h5py: facts, calls and their arrays, finished or cut off by a killed
writer."""

import os

import h5py
import numpy as np

from . import checks, schema
from .checks import TraceError

_CALL = np.dtype(
    [(name, "<i8") for name in schema.CALL_COLUMNS] + [("row_begin", "<i8"), ("pair_begin", "<i8")]
)
_PER_PAIR = ("pairs/expert", "pairs/weight", "pairs/hidden_norm2")
_PER_ROW = ("rows/pairs", "rows/grad_norm2", "rows/input_norm2")


class Call:
    """What one MoE layer did for the tokens of one rank in one micro-batch of one step.

    ``step``, ``micro_batch``, ``layer``, ``rank``, ``token_begin``, ``tokens`` and ``pairs`` are
    integers; the arrays are read, and checked, when they are asked for and are None where they
    were not recorded.
    """

    def __init__(self, trace, index):
        self._trace = trace
        self.index = index
        for name in schema.CALL_COLUMNS:
            setattr(self, name, int(trace.calls[name][index]))

    def _pairs(self, name):
        begin = int(self._trace.calls["pair_begin"][self.index])
        flat = self._trace._read(name, begin, begin + self.pairs)
        top_k = self._trace.facts["top_k"]
        return flat.reshape(self.tokens, top_k) if flat is not None and top_k else flat

    def _rows(self, name):
        begin = int(self._trace.calls["row_begin"][self.index])
        return self._trace._read(name, begin, begin + self.tokens)

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
        rows = self._rows("rows/pairs")
        if rows is not None:
            checks.total(self._trace.path, "rows/pairs", self.index, rows.sum(), self.pairs)
        return rows

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
        counts = self._trace._read("counts", self.index, self.index + 1)
        if counts is not None:
            checks.total(self._trace.path, "counts", self.index, counts.sum(), self.pairs)
            return counts[0].astype(np.int64)
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
            self._data = _find_data(self._file, self.facts, self.path)
            self.calls = self._read_calls()
            self.sequences = self._read_sequences()
            self.steps = self._table("steps", ("step", "loss", "learning_rate", "wall_time"))
            checks.steps(self.path, self.steps)
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

    def _read(self, name, begin, end):
        """Rows of a bulk dataset, checked; None where it was not recorded."""
        dataset = self._data.get(name)
        if dataset is None:
            return None
        try:
            found = dataset[begin:end]
        except OSError as problem:
            raise TraceError(f"{self.path}: /{name}, rows {begin} to {end}: {problem}") from None
        checks.values(self.path, name, found, begin, self.facts)
        return found

    def _rows_of(self, group, columns):
        """Rows that all columns have; in a finished file they are equally long."""
        lengths = [len(c) for c in columns.values()]
        for name, length in zip(columns, lengths):
            if self.complete and length != lengths[0]:
                raise TraceError(f"{self.path}: /{group}/{name}: {length} rows, not {lengths[0]}")
        return min(lengths, default=0)

    def _table(self, group, names):
        """Without rows where the first column, which the others describe, is missing."""
        columns = {n: self._data[f"{group}/{n}"][:] for n in names if f"{group}/{n}" in self._data}
        rows = self._rows_of(group, columns) if names[0] in columns else 0
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
        rows = self._rows_of("calls", columns)
        calls = np.zeros(rows, _CALL)
        for name, column in columns.items():
            calls[name] = column[:rows]
        calls["row_begin"] = np.cumsum(calls["tokens"]) - calls["tokens"]
        calls["pair_begin"] = np.cumsum(calls["pairs"]) - calls["pairs"]
        if not self.complete:
            held = min([rows] + [self._held(calls, name) for name in self._data])
            calls = self._whole(calls[:held])
        checks.calls(self.path, calls, self.facts)
        for name in self._data if self.complete else ():
            self._check_length(calls, name)
        return calls

    def _check_length(self, calls, name):
        """A finished file holds the data of its calls, and no more."""
        column = "pairs" if name in _PER_PAIR else "tokens" if name in _PER_ROW else None
        rows = int(calls[column].sum()) if column else len(calls)
        if (column or name == "counts") and len(self._data[name]) != rows:
            raise TraceError(f"{self.path}: /{name}: {len(self._data[name])} rows, not {rows}")

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
        ranges, _ = checks.blocks(self.calls)
        if not self.complete:
            table = table[checks.inside(ranges, table)]
        checks.sequences(self.path, table, ranges)
        return table


def _open_file(path):
    if os.path.exists(path) and not os.path.isfile(path):
        raise TraceError(f"{path}: not a regular file")
    try:
        return h5py.File(path, "r")
    except OSError as problem:
        # The flag of a writer that is at work, or was killed.
        try:
            return h5py.File(path, "r", swmr=True)
        except OSError:
            if not os.path.exists(path):
                raise FileNotFoundError(f"{path}: no such file") from None
            if os.access(path, os.R_OK) and not h5py.is_hdf5(path):
                raise TraceError(
                    f"{path}: not an HDF5 file; 'mizan trace import' makes traces of other "
                    "programs' recordings"
                ) from None
            raise TraceError(f"{path}: {problem}") from None


def _has(file, name):
    """Whether the dataset is in the file itself, not behind a soft or external link."""
    group = name.rpartition("/")[0]
    links = [part for part in (group, name) if part]
    if any(not isinstance(file.get(part, getlink=True), h5py.HardLink) for part in links):
        return False
    return isinstance(file[name], h5py.Dataset)


def _find_data(file, facts, path):
    """The datasets that are there, checked; those of /calls and of the kind must be."""
    pairs, top_k = facts["kind"] == "pairs", facts["top_k"]
    unused = [name for name in schema.COLUMNS if name.startswith(("pairs/", "rows/"))]
    unused = ["counts"] + (["rows/pairs"] if top_k else []) if pairs else unused
    data = {n: file[n] for n in schema.COLUMNS if n not in unused and _has(file, n)}
    wanted = ["calls/" + name for name in schema.CALL_COLUMNS]
    wanted += ["pairs/expert"] if pairs else ["counts"]
    wanted += ["rows/pairs"] if pairs and not top_k else []
    wanted += ["sequences/tokens"] if "sequences/token_begin" in data else []
    for name in wanted:
        if name not in data:
            raise TraceError(f"{path}: /{name} is missing")
    for name, dataset in data.items():
        checks.dataset(path, name, dataset, facts["experts"])
    return data


def _value(attribute):
    """A text or a number; whatever else it is, or text that is not UTF-8, stays no such thing."""
    if isinstance(attribute, np.ndarray):
        attribute = attribute.flat[0] if attribute.size == 1 else None
    if isinstance(attribute, str):
        attribute = attribute.encode(errors="surrogateescape")  # h5py's stand-ins for bad bytes
    if isinstance(attribute, bytes):
        try:
            return attribute.decode()
        except UnicodeDecodeError:
            return attribute
    return attribute.item() if isinstance(attribute, np.generic) else attribute


def _read_facts(file, path):
    if _value(file.attrs.get("format", "")) != "mizan-trace":
        raise TraceError(
            f"{path}: not a Mizan trace: attribute 'format' of / is not 'mizan-trace'"
        )
    version = _value(file.attrs.get("format_version", 0))
    if not isinstance(version, int) or not 1 <= version <= schema.VERSION:
        raise TraceError(
            f"{path}: format version {version}, but this reader knows 1 to {schema.VERSION}"
        )
    facts = {}
    for group, attributes in schema.FACTS.items():
        linked = group != "/" and not isinstance(file.get(group, getlink=True), h5py.HardLink)
        there = {} if linked else file[group].attrs
        for name, (default, _) in attributes.items():
            if name not in there and name in schema.REQUIRED:
                raise TraceError(f"{path}: /{group}: attribute '{name}' is missing")
            facts[name] = _value(there[name]) if name in there else default
    checks.facts(path, facts)
    complete = _value(file.attrs.get("complete", 1))
    if not isinstance(complete, int) or complete not in (0, 1):
        raise TraceError(f"{path}: attribute 'complete' of / is {complete!r}, must be 0 or 1")
    return facts, bool(complete)


def open_trace(path):
    """Opens a trace for reading; one of a killed or working writer shows what was flushed."""
    return Trace(path)
