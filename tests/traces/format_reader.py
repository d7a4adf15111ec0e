"""A reader of traces written from traces/FORMAT.md alone, down to the bytes of chunks, beside Mizan's own.

usage: format_reader.py MIZAN FILE...            the same facts, sums and loads as `mizan trace info --json`
       format_reader.py --verdicts FOLDER        the verdicts of FOLDER/verdicts.tsv

h5py gives the objects, their attributes and raw chunks; filters, checksums and every rule are done here."""
import csv, json, os, subprocess, sys, zlib

import h5py
import numpy as np

INTEGERS = {"u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"}
IDS, NORMS, REALS = {"u1", "u2"}, {"f2", "f4"}, {"f4", "f8"}
CALLS = ("step", "micro_batch", "layer", "rank", "token_begin", "tokens", "pairs")
TYPES = {**{"calls/" + n: INTEGERS for n in CALLS}, "pairs/expert": IDS, "pairs/weight": NORMS, "pairs/hidden_norm2": NORMS,
         "rows/pairs": IDS, "rows/grad_norm2": NORMS, "rows/input_norm2": NORMS, "counts": {"u1", "u2", "u4", "u8"},
         "sequences/token_begin": INTEGERS, "sequences/tokens": INTEGERS, "sequences/domain": INTEGERS, "steps/step": INTEGERS,
         "steps/loss": REALS, "steps/learning_rate": REALS, "steps/wall_time": REALS}
TEXTS = {"": dict(producer=127, source=255, licence=127), "model": dict(name=127, router=63, group_note=127),
         "run": dict(import_notes=255)}
MOST = 2147483647
NUMBERS = {"": dict(complete=(0, 1, 1)),  # least, largest, what a missing one is
           "model": dict(layers=(1, 65536, None), model_layers=(0, MOST, 0), experts=(1, 65536, None), top_k=(0, 65535, None),
                         shared_experts=(0, MOST, 0), hidden=(0, MOST, 0), intermediate=(0, MOST, 0),
                         weights_normalized=(0, 1, 0)),
           "run": dict(ranks=(1, 1048576, None), sequence_length=(0, None, 0), step_stride=(1, None, 1))}
WORDS = dict(kind={"pairs", "counts"}, phase={"train", "prefill", "decode"}, step={"iteration", "forward", "none"})


class Refused(Exception):
    pass


def need(truth, *words):
    if not truth:
        raise Refused(" ".join(map(str, words)))


def inside(f, name):
    """The object, unless it is behind a soft or external link; None where there is none."""
    parts = name.split("/")
    for n in range(1, len(parts) + 1):
        if not isinstance(f.get("/".join(parts[:n]), getlink=True), h5py.HardLink):
            return None
    return f[name]


def text(value):
    return value.decode() if isinstance(value, bytes) else value if isinstance(value, str) else None


def fletcher32(data):
    if not any(data):
        return 0
    w = np.frombuffer(data + b"\0" * (len(data) % 2), ">u2").astype(np.uint64)
    s1 = int(w.sum()) % 65535
    s2 = sum(int(n) for n in (np.arange(len(w), 0, -1, dtype=np.uint64) * w) % 65535) % 65535
    return (s2 or 65535) << 16 | (s1 or 65535)


def column(name, d, experts):
    """All rows of a dataset from its raw chunks."""
    width = (experts,) if name == "counts" else ()
    need(d.dtype.str[0] != ">" and d.dtype.str[1:] in TYPES[name], name, "type", d.dtype)
    need(d.ndim == 1 + len(width) and d.shape[1:] == width, name, "shape", d.shape)
    need(d.chunks and d.chunks[1:] == width and np.prod(d.chunks) * d.dtype.itemsize <= 16 << 20, name, "chunks", d.chunks)
    plist = d.id.get_create_plist()
    filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
    need(len(set(filters)) == len(filters) and set(filters) <= {1, 2, 3}, name, "filters", filters)
    need(3 in filters, name, "has no Fletcher-32")
    out = np.zeros(d.shape, d.dtype)
    for begin in range(0, d.shape[0], d.chunks[0]):
        mask, data = d.id.read_direct_chunk((begin,) + (0,) * len(width))
        for i in reversed(range(len(filters))):
            if mask >> i & 1:
                continue
            if filters[i] == 3:
                data, tail = data[:-4], data[-4:]
                need(fletcher32(data) == int.from_bytes(tail, "little"), name, "checksum of the chunk from row", begin)
            elif filters[i] == 1:
                data = zlib.decompress(data)
            else:
                whole = len(data) // d.dtype.itemsize * d.dtype.itemsize
                data = np.frombuffer(data[:whole], "u1").reshape(d.dtype.itemsize, -1).T.tobytes() + data[whole:]
        rows = np.frombuffer(data, d.dtype).reshape(d.chunks)
        out[begin:begin + d.chunks[0]] = rows[:d.shape[0] - begin]
    return out


def read_facts(f):
    facts = {}
    for group in ("", "model", "run"):
        attrs = f.attrs if group == "" else inside(f, group).attrs if inside(f, group) else {}
        for name, longest in TEXTS[group].items():
            facts[name] = text(attrs[name]) if name in attrs else "" if name in ("group_note", "import_notes") else "unknown"
            need(facts[name] is not None and len(facts[name].encode()) <= longest and
                 all(c >= " " and c != "\x7f" for c in facts[name]), "attribute", name)
        for name, (low, high, default) in NUMBERS[group].items():
            need(name in attrs or default is not None, "attribute", name, "is missing")
            value = attrs[name] if name in attrs else default
            need(np.ndim(value) == 0 and isinstance(value, (int, np.integer, np.bool_)), "attribute", name, "is no integer")
            facts[name] = int(value)
            need(low <= facts[name] and (high is None or facts[name] <= high), "attribute", name, facts[name])
        for name in WORDS if group == "run" else ():
            facts[name] = text(attrs.get(name))
            need(facts[name] in WORDS[name], "attribute", name, facts[name])
    need(facts["top_k"] <= facts["experts"], "top_k", facts["top_k"], "of", facts["experts"], "experts")
    return facts


class Trace:
    def __init__(self, path):
        try:
            f = h5py.File(path, "r")
        except OSError:
            f = h5py.File(path, "r", swmr=True)
        with f:
            need(text(f.attrs.get("format")) == "mizan-trace", "attribute format")
            need(f.attrs.get("format_version", 0) == 1, "format version", f.attrs.get("format_version"))
            self.facts = read_facts(f)
            pairs, k = self.facts["kind"] == "pairs", self.facts["top_k"]
            unused = {n for n in TYPES if n.split("/")[0] in ({"counts"} if pairs else {"pairs", "rows"})}
            unused |= {"rows/pairs"} if k else set()
            self.data = {n: column(n, inside(f, n), self.facts["experts"]) for n in TYPES
                         if n not in unused and inside(f, n) is not None}
        for name in (["calls/" + n for n in CALLS] + (["pairs/expert"] if pairs else ["counts"]) +
                     (["rows/pairs"] if pairs and k == 0 else []) +
                     (["sequences/tokens"] if "sequences/token_begin" in self.data else [])):
            need(name in self.data, name, "is missing")
        self.read_calls()
        self.check_calls()
        self.check_data()
        self.check_tables()

    def lengths(self, group, short):
        names = [n for n in self.data if n.startswith(group + "/")]
        for n in names:
            need(short or len(self.data[n]) == len(self.data[names[0]]), n, "is as long as no other")
        return min((len(self.data[n]) for n in names), default=0)

    def read_calls(self):
        cut = not self.facts["complete"]
        rows = self.lengths("calls", cut)
        self.call = {n: self.data["calls/" + n][:rows].astype(np.int64) for n in CALLS}
        if cut:
            c, whole = self.call, np.ones(rows, bool)
            for name, d in self.data.items():
                group = name.split("/")[0]
                if group in ("pairs", "rows"):
                    whole &= np.cumsum(c["pairs" if group == "pairs" else "tokens"]) <= len(d)
                elif name == "counts":
                    whole &= np.arange(rows) < len(d)
            rows = rows if whole.all() else int(np.argmin(whole))
            last = [i for i in range(rows) if all(c[n][i] == c[n][rows - 1] for n in ("step", "micro_batch"))]
            ends = [c["layer"][i] for i in last]
            if rows and ends.count(self.facts["layers"] - 1) != ends.count(ends[0]):
                rows = last[0]
            self.call = {n: v[:rows] for n, v in c.items()}

    def check_calls(self):
        c, f = self.call, self.facts
        for name, high in (("layer", f["layers"]), ("rank", f["ranks"])):
            need((c[name] < high).all(), "calls/" + name)
        for name, values in c.items():
            need((values >= 0).all(), "calls/" + name, "is negative")
        need((c["micro_batch"] <= MOST).all(), "calls/micro_batch")
        keys = list(zip(*(c[n].tolist() for n in ("step", "micro_batch", "layer", "rank"))))
        need(all(a < b for a, b in zip(keys, keys[1:])), "calls are not sorted")
        self.block = {}
        for i, (step, batch, _, rank) in enumerate(keys):
            tokens = int(c["token_begin"][i]), int(c["tokens"][i])
            need(self.block.setdefault((step, batch, rank), tokens) == tokens, "calls/token_begin of call", i)
        self.ranges = sorted((b, b + n) for b, n in self.block.values() if n)
        need(all(a[1] <= b[0] for a, b in zip(self.ranges, self.ranges[1:])), "calls/token_begin: tokens twice")
        need((c["pairs"][c["tokens"] == 0] == 0).all(), "calls/pairs without tokens")
        if f["kind"] == "pairs" and f["top_k"]:
            need((c["pairs"] == c["tokens"] * f["top_k"]).all(), "calls/pairs")

    def check_data(self):
        c, f, calls = self.call, self.facts, len(self.call["step"])
        sums = {"pairs": int(c["pairs"].sum()), "rows": int(c["tokens"].sum()), "counts": calls}
        for name in [n for n in self.data if n.split("/")[0] in sums]:
            rows = sums[name.split("/")[0]]
            need(len(self.data[name]) == rows or (not f["complete"] and len(self.data[name]) > rows), name, "rows")
            self.data[name] = self.data[name][:rows]
            if self.data[name].dtype.kind == "f":
                need((np.isfinite(self.data[name]) & (self.data[name] >= 0)).all(), name, "is not finite and at least 0")
        of_pair = np.repeat(np.arange(calls), c["pairs"])
        self.load = np.zeros((calls, f["experts"]), np.int64)
        if f["kind"] == "counts":
            self.load[:] = self.data["counts"]
            need((self.load.sum(1) == c["pairs"]).all(), "counts do not add up")
            return
        need((self.data["pairs/expert"] < f["experts"]).all(), "pairs/expert")
        np.add.at(self.load, (of_pair, self.data["pairs/expert"]), 1)
        if f["top_k"] == 0:
            of_row = np.repeat(np.arange(calls), c["tokens"])
            need((np.bincount(of_row, self.data["rows/pairs"], calls) == c["pairs"]).all(), "rows/pairs do not add up")

    def check_tables(self):
        cut = not self.facts["complete"]
        n, last, self.sequences = self.lengths("sequences", cut), 0, 0
        table = [self.data["sequences/" + x][:n].tolist() for x in ("token_begin", "tokens")] if n else [[], []]
        for begin, tokens in zip(*table):
            need(tokens > 0 and begin >= last, "sequences", begin, tokens)
            last = begin + tokens
            within = any(a <= begin and last <= b for a, b in self.ranges)
            need(within or cut, "sequences", begin, tokens, "not within a block")
            self.sequences += within
        n = self.lengths("steps", cut)
        steps = self.data["steps/step"][:n].astype(np.int64) if n else np.zeros(0)
        need((np.diff(steps) > 0).all() and (steps >= 0).all(), "steps/step")


def differences(mizan, path):
    info = json.loads(subprocess.run([mizan, "trace", "info", "--json", path], capture_output=True, check=True).stdout)
    t, found = Trace(path), []
    c, f = t.call, dict(t.facts)

    def same(what, mine, its):
        if not (mine == its if not isinstance(mine, float) else abs(mine - its) <= 1e-9 * abs(mine)):
            found.append(f"{path}: {what}: {mine!r} here, {its!r} there")

    same("complete", bool(f.pop("complete")), info["complete"])
    f["step_meaning"] = f.pop("step")
    f["weights_normalized"] = bool(f["weights_normalized"])
    for member in ("pairs/weight", "pairs/hidden_norm2", "rows/grad_norm2", "rows/input_norm2"):
        f["has_" + member.split("/")[1]] = member in t.data
    f["has_sequences"] = "sequences/token_begin" in t.data
    for name, value in f.items():
        same(name, value, info["facts"][name])
    same("keys of facts", sorted(f), sorted(info["facts"]))
    same("calls", len(c["step"]), info["calls"])
    same("steps", len(set(c["step"])), info["steps"])
    same("micro-batches", len(set(zip(c["step"], c["micro_batch"]))), info["micro_batches"])
    same("tokens", sum(n for _, n in t.block.values()), info["tokens"])
    same("pairs", int(c["pairs"].sum()), info["pairs"])
    same("sequences", t.sequences, info["sequences"])
    for row in info["layers"]:
        load = t.load[c["layer"] == row["layer"]].sum(0).astype(float)
        if load.sum():
            same("max/mean", float(load.max() / load.mean()), row["expert_max_over_mean"])
            same("CV", float(load.std() / load.mean()), row["expert_cv"])
    return found


def verdicts(folder):
    found = []
    for row in csv.DictReader(open(os.path.join(folder, "verdicts.tsv")), delimiter="\t"):
        try:
            calls = len(Trace(os.path.join(folder, row["file"])).call["step"])
            said = "valid" if calls == 8 else f"{calls} calls"
        except Refused as reason:
            said = "invalid" if row["names"] in str(reason) else f"refused for {reason}"
        if said != row["verdict"]:
            found.append(f"{row['file']}: {said}, must be {row['verdict']}, {row['names']}")
    return found


wrong = verdicts(sys.argv[2]) if sys.argv[1] == "--verdicts" else sum((differences(sys.argv[1], p) for p in sys.argv[2:]), [])
print("\n".join(wrong) or "all the same")
sys.exit(1 if wrong else 0)
