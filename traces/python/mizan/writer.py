"""Writing traces with h5py, as FORMAT.md demands: everything created first, then SWMR."""

import os

import h5py
import numpy as np

from . import checks, schema

_CHUNK_BYTES = 1 << 20


class Writer:
    """Writes a trace to PATH.partial-PID and gives it its name at ``close``.

    facts: at least layers, experts, top_k and phase; see ``mizan.schema.FACTS``. The keyword
    arguments say which optional datasets there will be. Calls come in the order (step,
    micro_batch, layer, rank).
    """

    def __init__(
        self,
        path,
        facts,
        *,
        weights=False,
        hidden_norms=False,
        gradient_norms=False,
        input_norms=False,
        sequences=False,
        deflate=4,
    ):
        self.path = output_path(path)
        self.partial = f"{self.path}.partial-{os.getpid()}"
        self.facts = _complete(self.path, facts)
        self._deflate = deflate
        self._rows = {}
        self._waiting = {}
        self._last = None
        self._blocks = {}  # rank: (step, micro_batch), (token_begin, tokens) of its last call
        self._sequence_end = self._described = 0
        self._file = _create_file(self.partial)
        try:
            self._create(weights, hidden_norms, gradient_norms, input_norms, sequences)
            self._file.swmr_mode = True
        except Exception:
            self.abandon()
            raise

    def _create(self, weights, hidden_norms, gradient_norms, input_norms, sequences):
        file, pairs = self._file, self.facts["kind"] == "pairs"
        wanted = {
            "pairs/expert": pairs,
            "pairs/weight": pairs and weights,
            "pairs/hidden_norm2": pairs and hidden_norms,
            "rows/pairs": pairs and self.facts["top_k"] == 0,
            "rows/grad_norm2": pairs and gradient_norms,
            "rows/input_norm2": pairs and input_norms,
            "counts": not pairs,
        }
        names = [
            name
            for name in schema.COLUMNS
            if wanted.get(name, sequences if name.startswith("sequences/") else True)
        ]
        file.attrs["format"] = "mizan-trace"
        file.attrs["format_version"] = schema.VERSION
        file.attrs["complete"] = 0
        for group in ("model", "run", *sorted({n.split("/")[0] for n in names if "/" in n})):
            _create_group(file, group)
        for group, attributes in schema.FACTS.items():
            for name in attributes:
                file[group].attrs[name] = self.facts[name]
        for name in names:
            self._create_dataset(name)

    def _create_dataset(self, name):
        kind, rows, units, long_name = schema.COLUMNS[name]
        kind = np.dtype(kind or ("<u1" if self.facts["experts"] <= 256 else "<u2"))
        width = (self.facts["experts"],) if name == "counts" else ()
        rows = rows or max(1, _CHUNK_BYTES // (kind.itemsize * int(np.prod(width, dtype=int))))
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((rows, *width))
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        plist.set_obj_track_times(False)
        if self._deflate:
            plist.set_shuffle()
            plist.set_deflate(self._deflate)
        plist.set_fletcher32()
        space = h5py.h5s.create_simple((0, *width), (h5py.h5s.UNLIMITED, *width))
        dataset = h5py.Dataset(
            h5py.h5d.create(self._file.id, name.encode(), h5py.h5t.py_create(kind), space, plist)
        )
        dataset.attrs["units"] = units
        dataset.attrs["long_name"] = long_name
        self._rows[name] = 0
        self._waiting[name] = []

    def _put(self, name, values):
        dataset = self._file[name]
        values = np.asarray(values)
        if values.dtype != dataset.dtype:
            values = values.astype(dataset.dtype)
        if len(values):
            self._waiting[name].append(values)

    def call(
        self,
        step,
        micro_batch,
        layer,
        rank,
        token_begin,
        tokens,
        *,
        ids=None,
        weights=None,
        token_pairs=None,
        hidden_norm2=None,
        grad_norm2=None,
        input_norm2=None,
        counts=None,
    ):
        """Adds one call. ids [tokens, top_k] (or [pairs] and token_pairs), or counts [experts]."""
        key = (int(step), int(micro_batch), int(layer), int(rank))
        if self._last is not None and key <= self._last:
            raise ValueError(
                f"call {key} does not follow {self._last} in (step, micro_batch, layer, rank)"
            )
        for name, value, most in (("layer", key[2], "layers"), ("rank", key[3], "ranks")):
            if not 0 <= value < self.facts[most]:
                raise ValueError(f"call {key}: {name} {value} of {self.facts[most]}")
        if min(key[0], key[1], int(token_begin), int(tokens)) < 0:
            raise ValueError(f"call {key}: step, micro-batch and tokens are 0 or more")
        block = (key[:2], (int(token_begin), int(tokens)))
        before = self._blocks.get(key[3], block)
        if before[0] == block[0] and before[1] != block[1]:
            raise ValueError(f"call {key}: tokens differ from those of the layer before")
        data = {}  # nothing is added until all of it is known to be right
        if counts is None:
            self._check(key, int(tokens), ids, token_pairs)
            pairs = np.asarray(ids).size
        else:
            self._check_counts(key, np.asarray(counts))
            pairs = int(np.sum(counts))
            data["counts"] = np.asarray(counts)[None]
        given = {
            "pairs/expert": ids,
            "pairs/weight": weights,
            "pairs/hidden_norm2": hidden_norm2,
            "rows/pairs": token_pairs,
            "rows/grad_norm2": grad_norm2,
            "rows/input_norm2": input_norm2,
        }
        for name, values in given.items():
            if name not in self._waiting:
                continue
            if values is None:
                raise ValueError(f"call {key}: {name} is missing")
            values = np.asarray(values).ravel()
            if len(values) != (pairs if name.startswith("pairs/") else tokens):
                raise ValueError(f"call {key}: {name} has {len(values)} values")
            if not (np.isfinite(values) & (values >= 0)).all():
                raise ValueError(
                    f"call {key}: {name} holds a value that is not finite and at least 0"
                )
            data[name] = values
        if pairs and not tokens:
            raise ValueError(f"call {key}: {pairs} pairs of no tokens")
        for name, values in data.items():
            self._put(name, values)
        for name, value in zip(schema.CALL_COLUMNS, (*key, token_begin, tokens, pairs)):
            self._put("calls/" + name, [value])
        self._last, self._blocks[key[3]] = key, block

    def _check_counts(self, key, counts):
        experts = self.facts["experts"]
        if "counts" not in self._waiting:
            raise ValueError(f"call {key}: counts in a trace of pairs: pass ids")
        if counts.shape != (experts,) or counts.dtype.kind not in "iu":
            raise ValueError(f"call {key}: counts are not {experts} integers")
        if counts.min() < 0 or counts.max() >= 1 << 32:
            raise ValueError(f"call {key}: a count is not within 0 to 2^32 - 1")

    def _check(self, key, tokens, ids, token_pairs):
        if ids is None:
            raise ValueError(f"call {key}: neither ids nor counts")
        ids, top_k = np.asarray(ids), self.facts["top_k"]
        if "pairs/expert" not in self._waiting:
            raise ValueError(f"call {key}: ids in a trace of counts: pass counts")
        if ids.size and ids.dtype.kind not in "iu":
            raise ValueError(f"call {key}: ids are {ids.dtype}, not integers")
        if not top_k and token_pairs is None:
            raise ValueError(f"call {key}: rows/pairs is missing: pass token_pairs")
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.facts["experts"]:
            raise ValueError(
                f"call {key}: an expert is not within 0 to {self.facts['experts'] - 1}"
            )
        if not top_k and np.max(token_pairs, initial=0) > 65535:
            raise ValueError(f"call {key}: a token has more than 65535 pairs")
        wanted = tokens * top_k if top_k else int(np.sum(token_pairs))
        if ids.size != wanted:
            raise ValueError(f"call {key}: {ids.size} pairs, not {wanted}")

    def sequence(self, token_begin, tokens, domain=-1):
        """Adds a sequence, in the order of token_begin; it lies within the tokens of one rank's
        micro-batch."""
        if "sequences/tokens" not in self._waiting:
            raise ValueError("a sequence in a trace without: pass sequences=True to the Writer")
        if token_begin < self._sequence_end or tokens < 1:
            raise ValueError(
                f"sequence of {tokens} tokens from {token_begin}: sequences hold tokens and begin "
                f"at or after the end of the one before, {self._sequence_end}"
            )
        self._sequence_end = token_begin + tokens
        for name, value in (("token_begin", token_begin), ("tokens", tokens), ("domain", domain)):
            self._put("sequences/" + name, [value])

    def step(self, step, loss=None, learning_rate=None, wall_time=None):
        """Describes a step, in ascending order."""
        if step < self._described:
            raise ValueError(f"step {step}: steps ascend, the next is {self._described} or later")
        self._described = step + 1
        values = {"loss": loss, "learning_rate": learning_rate, "wall_time": wall_time}
        self._put("steps/step", [step])
        for name, value in values.items():
            self._put("steps/" + name, [np.nan if value is None else float(value)])

    def flush(self):
        """Makes every call so far readable, even if this process dies: data first, calls last."""
        for calls in (False, True):
            for name in self._waiting:
                if name.startswith("calls/") == calls:
                    self._extend(name)
            self._file.flush()

    def _extend(self, name):
        parts, self._waiting[name] = self._waiting[name], []
        if not parts:
            return
        dataset, begin = self._file[name], self._rows[name]
        self._rows[name] = begin + sum(len(p) for p in parts)
        dataset.resize(self._rows[name], axis=0)
        dataset[begin:] = np.concatenate(parts)
        dataset.flush()

    def close(self):
        """Writes what waits, marks the trace as complete and gives it its name."""
        self.flush()
        self._file.close()
        with h5py.File(self.partial, "r+", libver=("v110", "v110")) as file:
            file.attrs.modify("complete", np.int64(1))
        with open(self.partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self.partial, self.path)

    def abandon(self):
        """Removes what was written."""
        if self._file:
            self._file.close()
        if os.path.exists(self.partial):
            os.unlink(self.partial)


def output_path(path):
    """The file behind `path`; what cannot be written is refused before any work."""
    path = os.fspath(path)
    if not path:
        raise ValueError("the output path is empty")
    real = os.path.realpath(path)
    if os.path.exists(real) and not os.path.isfile(real):
        raise ValueError(f"{path}: cannot write: it exists and is not a regular file")
    if not os.path.isdir(os.path.dirname(real)):
        raise FileNotFoundError(f"{path}: cannot write: no folder {os.path.dirname(real)}")
    return real


def check_choice(name, value):
    """Refuses a fact that is none of its few words."""
    if value not in schema.CHOICES[name]:
        raise ValueError(f"{name} is {value!r}, must be one of {', '.join(schema.CHOICES[name])}")


def _complete(path, facts):
    """Facts with every default filled in, checked; strings cut to their longest."""
    known = {name: entry for group in schema.FACTS.values() for name, entry in group.items()}
    unknown = set(facts) - set(known)
    if unknown:
        raise ValueError(f"unknown facts: {', '.join(sorted(unknown))}")
    full = {}
    for name, (default, most) in known.items():
        value = facts.get(name, default)
        if value is None:
            raise ValueError(f"the fact '{name}' is missing")
        if most is None:
            full[name] = int(value)
        else:
            text = "".join(c if c.isprintable() else "?" for c in str(value))
            full[name] = text.encode()[:most].decode(errors="ignore")
    for name in schema.CHOICES:
        check_choice(name, full[name])
    checks.facts(path, full)
    return full


def _create_file(path):
    """A new file without time stamps, in the form of HDF5 1.10: the oldest that knows SWMR."""
    creation, access = h5py.h5p.create(h5py.h5p.FILE_CREATE), h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    creation.set_obj_track_times(False)
    access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_V110)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    return h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_TRUNC, creation, access))


def _create_group(file, name):
    plist = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    plist.set_obj_track_times(False)
    return h5py.Group(h5py.h5g.create(file.id, name.encode(), gcpl=plist))
