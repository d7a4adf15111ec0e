"""Makes the conformance set of the trace format from FORMAT.md alone: small files, valid and not.

    make_conformance.py FOLDER    writes the files and verdicts.tsv: file, verdict, what a reader must
                                  find (the name of the dataset or attribute at fault)

Uses h5py and numpy only. The files are shipped in traces/conformance so that a reader in another
language can be tried without Python; a test makes them again and compares their contents.
"""

import os
import sys

import h5py
import numpy as np

CALLS = ("step", "micro_batch", "layer", "rank", "token_begin", "tokens", "pairs")
TYPES = dict(zip(CALLS, ("<i8", "<i4", "<i4", "<i4", "<i8", "<i8", "<i8")))


class Trace:
    """What a valid file holds; a case changes it before it is written."""

    def __init__(self, kind="pairs", top_k=2):
        rng = np.random.default_rng(5)
        self.root = {"format": "mizan-trace", "format_version": 1}
        self.model = {"name": "conformance", "layers": 2, "experts": 4, "top_k": top_k}
        self.run = {"kind": kind, "phase": "train", "step": "iteration", "ranks": 2}
        rows = [(s, 0, l, r, 5 * s + 3 * r, 3 - r) for s in (1, 2) for l in (0, 1) for r in (0, 1)]
        tokens = [row[5] for row in rows]
        per_token = [np.full(n, top_k) if top_k else rng.integers(0, 4, n) for n in tokens]
        self.calls = {name: [row[i] for row in rows] for i, name in enumerate(CALLS[:6])}
        self.calls["pairs"] = [int(p.sum()) for p in per_token]
        self.data = {}
        self.last = lambda file: None  # what is done to the file in the end
        if kind == "counts":
            cells = [rng.multinomial(n, [0.4, 0.3, 0.2, 0.1]) for n in self.calls["pairs"]]
            self.data["counts"] = np.array(cells, "<u4")
            return
        chosen = [rng.permutation(4)[:k] for p in per_token for k in p]
        self.data["pairs/expert"] = np.concatenate(chosen).astype("u1")
        self.data["pairs/weight"] = rng.random(sum(self.calls["pairs"])).astype("<f4")
        if top_k == 0:
            self.data["rows/pairs"] = np.concatenate(per_token).astype("<u2")
        self.data["sequences/token_begin"] = np.array([5, 8, 10, 13], "<i8")
        self.data["sequences/tokens"] = np.array([3, 2, 3, 2], "<i8")

    def write(self, path, checksum=True):
        with h5py.File(path, "w") as f:
            f.attrs.update(self.root)
            for group, facts in (("model", self.model), ("run", self.run)):
                f.create_group(group).attrs.update(facts)
            for name, values in self.calls.items():
                self.put(f, "calls/" + name, np.array(values, TYPES[name]), checksum)
            for name, values in self.data.items():
                self.put(f, name, values, checksum)
            self.last(f)

    @staticmethod
    def put(f, name, values, checksum):
        f.create_dataset(name, data=values, chunks=(64,) + values.shape[1:],
                         maxshape=(None,) + values.shape[1:], fletcher32=checksum, shuffle=True,
                         compression="gzip", track_times=False)


def counts():
    return Trace("counts")


def variable():
    return Trace(top_k=0)


def half():
    t = Trace()
    t.data["pairs/weight"] = t.data["pairs/weight"].astype("<f2")
    return t


def norms():
    t = Trace()
    t.data["rows/grad_norm2"] = np.linspace(0, 1, sum(t.calls["tokens"]), dtype="<f4")
    t.data["rows/input_norm2"] = np.linspace(1, 2, sum(t.calls["tokens"]), dtype="<f4")
    t.data["pairs/hidden_norm2"] = np.linspace(0, 3, sum(t.calls["pairs"]), dtype="<f4")
    return t


def empty_rank():
    """Rank 1 holds no token in step 2."""
    t = counts()
    for i in (6, 7):
        if t.calls["rank"][i] == 1:
            t.calls["tokens"][i] = t.calls["pairs"][i] = 0
            t.data["counts"][i] = 0
    i = 5
    t.calls["tokens"][i] = t.calls["pairs"][i] = 0
    t.data["counts"][i] = 0
    return t


def cut_off():
    """A killed writer's: the micro-batch of step 3 lacks its last call, and data and sequences of more were flushed. Its
    tokens come before all others on the axis."""
    t = Trace()
    t.root["complete"] = 0
    for name, values in zip(CALLS, ((3, 3, 3), (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 3, 0), (3, 2, 3), (6, 4, 6))):
        t.calls[name] += values
    t.calls["step"].append(3)  # the columns were flushed one after another
    for name, low in (("pairs/expert", 0), ("pairs/weight", 0)):
        t.data[name] = np.concatenate([t.data[name], t.data[name][:20]])
    t.data["sequences/token_begin"] = np.array([0, 5, 8, 10, 13], "<i8")
    t.data["sequences/tokens"] = np.array([3, 3, 2, 3, 2], "<i8")
    return t


def extras():
    """Members that the format does not name, and strings of variable length."""
    t = Trace()
    t.root["comment"] = "not of the format"

    def last(f):
        f["extra/numbers"] = np.arange(3)
        f.attrs["producer"] = "a program of ours, \u00fc"
    t.last = last
    return t


def stored_as(name, dtype=None, **options):
    """The dataset once more, stored otherwise."""
    def last(f):
        values = f[name][:]
        del f[name]
        f.create_dataset(name, data=values.astype(dtype or values.dtype), maxshape=(None,), track_times=False, **options)
    return lambda t: setattr(t, "last", last)


def n_bit(f):
    """A filter that every HDF5 library has, and the format does not."""
    values = f["pairs/expert"][:]
    del f["pairs/expert"]
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((64,))
    plist.set_filter(h5py.h5z.FILTER_NBIT, 0, ())
    plist.set_fletcher32()
    plist.set_obj_track_times(False)
    space = h5py.h5s.create_simple(values.shape, (h5py.h5s.UNLIMITED,))
    d = h5py.h5d.create(f.id, b"pairs/expert", h5py.h5t.py_create(values.dtype), space, plist)
    h5py.Dataset(d)[:] = values


def contiguous(f):
    values = f["pairs/weight"][:]
    del f["pairs/weight"]
    f.create_dataset("pairs/weight", data=values, track_times=False)


def linked(t):
    def last(f):
        f.move("pairs/expert", "elsewhere")
        f["pairs/expert"] = h5py.SoftLink("/elsewhere")
    t.last = last


def steps_backwards(t):
    t.data["steps/step"] = np.array([2, 1], "<i8")


def add_zero_row(t):
    t.data["pairs/expert"] = np.append(t.data["pairs/expert"], np.uint8(0))


def changed(change, make=Trace):
    def case():
        t = make()
        change(t)
        return t
    return case


def set_item(part, key, value):
    return lambda t: getattr(t, part).__setitem__(key, value)


def drop(part, key):
    return lambda t: getattr(t, part).pop(key)


def set_value(name, index, value):
    return lambda t: t.data[name].__setitem__(index, value)


def swap_calls(t):
    for values in t.calls.values():
        values[0], values[2] = values[2], values[0]


def move_count(t):
    t.data["counts"][3, 0] += 1


# name: (how to make it, verdict, what the finding names)
CASES = {
    "pairs": (Trace, "valid", ""),
    "counts": (counts, "valid", ""),
    "variable-k": (variable, "valid", ""),
    "half-weights": (half, "valid", ""),
    "norms": (norms, "valid", ""),
    "empty-rank": (empty_rank, "valid", ""),
    "no-format": (changed(drop("root", "format")), "invalid", "format"),
    "other-format": (changed(set_item("root", "format", "other")), "invalid", "format"),
    "newer-version": (changed(set_item("root", "format_version", 2)), "invalid", "version"),
    "no-experts": (changed(drop("model", "experts")), "invalid", "experts"),
    "unknown-kind": (changed(set_item("run", "kind", "guesses")), "invalid", "kind"),
    "no-calls-rank": (changed(drop("calls", "rank")), "invalid", "rank"),
    "no-expert": (changed(drop("data", "pairs/expert")), "invalid", "expert"),
    "expert-out-of-range": (changed(set_value("pairs/expert", 7, 4)), "invalid", "expert"),
    "weight-nan": (changed(set_value("pairs/weight", 5, np.nan)), "invalid", "weight"),
    "weight-negative": (changed(set_value("pairs/weight", 5, -0.5)), "invalid", "weight"),
    "calls-unsorted": (changed(swap_calls), "invalid", "calls"),
    "rank-out-of-range": (changed(lambda t: t.calls["rank"].__setitem__(1, 2)), "invalid", "rank"),
    "pairs-do-not-add-up": (changed(lambda t: t.calls["pairs"].__setitem__(1, 6)), "invalid",
                            "pairs"),
    "counts-do-not-add-up": (changed(move_count, counts), "invalid", "counts"),
    "sequence-beyond": (changed(set_value("sequences/tokens", 3, 9)), "invalid", "sequences"),
    "no-checksum": (Trace, "invalid", "Fletcher"),
    "cut-off": (cut_off, "valid", ""),
    "extras": (extras, "valid", ""),
    "no-phase": (changed(drop("run", "phase")), "invalid", "phase"),
    "top-k-above-experts": (changed(set_item("model", "top_k", 5)), "invalid", "top_k"),
    "layers-differ": (changed(lambda t: t.calls["token_begin"].__setitem__(2, 4)), "invalid", "token_begin"),
    "tokens-overlap": (changed(lambda t: [t.calls["token_begin"].__setitem__(i, 4) for i in (1, 3)]), "invalid",
                       "token_begin"),
    "rows-do-not-add-up": (changed(lambda t: t.data["rows/pairs"].__iadd__(np.eye(1, 20, 4, dtype="<u2")[0]), variable),
                           "invalid", "rows/pairs"),
    "no-rows": (changed(drop("data", "rows/pairs"), variable), "invalid", "rows/pairs"),
    "surplus-pairs": (changed(add_zero_row), "invalid", "pairs/expert"),
    "sequences-overlap": (changed(set_value("sequences/token_begin", 1, 7)), "invalid", "sequences"),
    "sequence-empty": (changed(set_value("sequences/tokens", 1, 0)), "invalid", "sequences"),
    "steps-backwards": (changed(steps_backwards), "invalid", "steps/step"),
    "other-kind": (changed(lambda t: t.data.update({"pairs/expert": np.zeros(3, "u1")}), counts), "valid", ""),
    "one-column-short": (changed(lambda t: t.calls["rank"].pop()), "invalid", "rank"),
    "step-negative": (changed(lambda t: t.calls["step"].__setitem__(0, -1)), "invalid", "step"),
    "big-endian": (changed(stored_as("calls/tokens", dtype=">i8", chunks=(64,), fletcher32=True)), "invalid", "calls/tokens"),
    "other-filter": (changed(lambda t: setattr(t, "last", n_bit)), "invalid", "pairs/expert"),
    "not-chunked": (changed(lambda t: setattr(t, "last", contiguous)), "invalid", "pairs/weight"),
    "soft-link": (changed(linked), "invalid", "pairs/expert"),
}


def main(folder):
    with open(os.path.join(folder, "verdicts.tsv"), "w") as out:
        out.write("file\tverdict\tnames\n")
        for name, (make, verdict, names) in CASES.items():
            make().write(os.path.join(folder, name + ".h5"), checksum=name != "no-checksum")
            out.write("%s.h5\t%s\t%s\n" % (name, verdict, names))


if __name__ == "__main__":
    main(sys.argv[1])
