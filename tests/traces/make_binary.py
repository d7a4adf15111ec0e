#!/usr/bin/env python3
"""Binary routing dumps, written from the formats' descriptions, and the traces they must become.

make_binary.py MIZAN CASE: makes the files of a case in the current directory, imports them with the
program MIZAN, compares every dataset with what the case expects, then damages the files: each bad
file must be refused with one clear line and leave nothing behind, and random damage may be refused
or read but must never crash. Uses numpy and h5py alone.
"""
import io
import json
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import types
import zipfile
from collections import OrderedDict

import h5py
import numpy as np

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


class Expect:
    """Calls and sequences as the trace must hold them."""

    def __init__(self, experts, top_k, **facts):
        self.experts, self.top_k, self.facts = experts, top_k, facts
        self.calls, self.sequences = {}, None

    def pairs(self, step, micro_batch, layer, rank, ids, weights=None):
        self.calls[step, micro_batch, layer, rank] = (np.asarray(ids), weights)

    def counts(self, step, micro_batch, layer, rank, row):
        self.calls[step, micro_batch, layer, rank] = (np.asarray(row), None)

    def compare(self, path, kind):
        f = h5py.File(path)
        read = lambda name: f["calls/" + name][:]
        keys = list(zip(*(read(n).tolist() for n in ("step", "micro_batch", "layer", "rank"))))
        assert keys == sorted(self.calls), (keys[:8], sorted(self.calls)[:8])
        model, run = f["model"].attrs, f["run"].attrs
        assert (model["experts"], model["top_k"]) == (self.experts, self.top_k)
        for name, value in self.facts.items():
            have = model[name] if name in model else run[name]
            have = have.decode() if isinstance(have, bytes) else have
            assert (value in have if name == "import_notes" else value == have), (name, have)
        tokens, pairs, first = read("tokens"), read("pairs"), 0
        for c, key in enumerate(keys):
            wanted, weights = self.calls[key]
            if kind == "counts":
                assert (f["counts"][c] == wanted).all(), (key, f["counts"][c], wanted)
                assert pairs[c] == wanted.sum(), key
                continue
            assert tokens[c] == len(wanted) and pairs[c] == wanted.size, key
            have = f["pairs/expert"][first:first + pairs[c]].reshape(wanted.shape)
            assert (have == wanted).all(), (key, have[:4], wanted[:4])
            if weights is not None:
                have = f["pairs/weight"][first:first + pairs[c]].reshape(wanted.shape)
                np.testing.assert_allclose(have, weights, rtol=2e-6)
            first += pairs[c]
        if self.sequences is not None:
            have = f["sequences/tokens"][:].tolist() if "sequences" in f else []
            assert have == self.sequences, (have, self.sequences)


class Runner:
    def __init__(self, mizan):
        self.mizan, self.random, self.phase = mizan, random.Random(5), "decode"

    def run(self, files, options, output="out.h5"):
        phase = [] if "--phase" in options else ["--phase", self.phase]
        command = [self.mizan, "trace", "import", *files, *options, *phase, "-o", output]
        return subprocess.run(command, capture_output=True, text=True, errors="replace")

    def good(self, files, options, expect, kind, says=""):
        done = self.run(files, options)
        assert done.returncode == 0, done
        assert says in done.stderr, (says, done.stderr)
        expect.compare("out.h5", kind)
        check = subprocess.run([self.mizan, "trace", "check", "out.h5"], capture_output=True, text=True)
        assert check.returncode == 0, check
        os.remove("out.h5")

    def bad(self, files, options, text):
        done = self.run(files, options + ["-q"])
        assert done.returncode == 2, (text, done)
        assert done.stderr.count("\n") == 1 and text in done.stderr, (text, done.stderr)
        left = [name for name in os.listdir() if name.startswith("out.h5")]
        assert not left, left

    def damage(self, name, files, options, rounds=40):
        """Cuts and flips `name`: no crash, no output of a refused file."""
        whole = open(name, "rb").read()
        for i in range(rounds):
            data = bytearray(whole)
            if i % 4 == 0:
                data = data[:self.random.randrange(1, len(data))]
            else:
                low = 0 if i % 2 else max(0, len(data) - 512)
                for _ in range(self.random.randrange(1, 4)):
                    data[self.random.randrange(low, len(data))] = self.random.randrange(256)
            open(name, "wb").write(data)
            done = self.run(files, options + ["-q"])
            assert done.returncode in (0, 2) and done.stderr.count("\n") <= 1, (i, done)
            if os.path.exists("out.h5"):
                assert done.returncode == 0
                os.remove("out.h5")
        open(name, "wb").write(whole)


def choices(rng, tokens, experts, top_k):
    return np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k]


def bincount(ids, experts):
    return np.bincount(np.asarray(ids).ravel(), minlength=experts)


# ---- TensorRT-LLM ----------------------------------------------------------------------------------


def safetensors(path, arrays, **change):
    names = {"int64": "I64", "int32": "I32", "int16": "I16", "float32": "F32"}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for key, array in arrays.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[key] = {"dtype": names[str(array.dtype)], "shape": list(array.shape),
                       "data_offsets": [len(data), len(data) + len(raw)]}
        header[key].update(change)
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    open(path, "wb").write(struct.pack("<Q", len(text)) + text + data)


def meta(**members):
    json.dump(members, open("meta_info.json", "w"))


@case
def trt(run):
    rng, experts, k = np.random.default_rng(1), 16, 4
    expect_counts, expect_ids = Expect(experts, k, ranks=2, layers=3), Expect(experts, k, ranks=2)
    for rank in range(2):
        counts, raw = {}, {}
        for step in (100, 7, 20):
            for layer in (3, 10, 4):
                ids = choices(rng, 5 + rank + step % 3, experts, k)
                counts[f"{step}_{layer}"] = bincount(ids, experts).astype(np.int64)
                raw[f"{step}_{layer}"] = ids.astype(np.int32)
                place = (step, 0, [3, 4, 10].index(layer), rank)
                expect_counts.counts(*place, bincount(ids, experts))
                expect_ids.pairs(*place, ids)
        safetensors(f"rank{rank}.safetensors", counts)
        safetensors(f"rank{rank}_raw.safetensors", raw)
    meta(num_experts=experts, num_experts_per_token=k)
    stat = ["rank1.safetensors", "meta_info.json", "rank0.safetensors"]
    ids = ["meta_info.json", "rank0_raw.safetensors", "rank1_raw.safetensors"]
    run.good(stat, [], expect_counts, "counts", "importing as trt-stat")
    run.good(ids, ["--phase", "prefill"], expect_ids, "pairs")
    run.good(stat[::2], ["--experts", "16", "--top-k", "4"], expect_counts, "counts")
    run.bad(stat[::2], [], "pass --experts E --top-k K")
    run.bad(["meta_info.json"], [], ".safetensors files")
    run.bad(stat, ["--experts", "17"], "but --experts 17")
    run.bad(stat + ids[1:], [], "pass each rank once")
    run.damage("rank0.safetensors", stat, [])
    run.damage("rank1_raw.safetensors", ids, [])
    one = np.array([1] * 4 + [0] * 12)
    for text, arrays, change in [
            ("not that of whole numbers", {"1_3": one.astype(np.float32)}, {}),
            ("{iteration}_{layer}", {"1_3": one, "layer3": one}, {}),
            ("15 values a row", {"1_3": one[:15]}, {}),
            ("no multiple of top-4", {"1_3": one + 1 - np.eye(16, dtype=int)[0]}, {}),
            ("is no count", {"1_3": one - 2 * np.eye(16, dtype=int)[4]}, {}),
            ("1 of 2 layers", {"1_3": one, "1_4": one, "2_3": one}, {}),
            ("no such layer; every step must hold the same layers: leave this one out", {"1_3": one, "2_3": one, "2_4": one}, {}),
            ("no selection", {"1_3": one * 0}, {}),
            ("do not fit", {"1_3": one}, {"data_offsets": [0, 64]}),
            ("beyond the end", {"1_3": one}, {"shape": [160], "data_offsets": [0, 1280]}),
            ("do not fit", {"1_3": one}, {"data_offsets": [1 << 62, (1 << 62) + 128]}),
            ("do not fit", {"1_3": one}, {"shape": [1 << 60]}),
            ("below the number of experts", {"1_3": np.array([[0, 1, 2, 16]])}, {}),
            ("is negative", {"1_3": np.array([[0, 1, 2, -1]])}, {}),
            ("stands twice", {"1_3": np.array([[0, 1, 2, 1]])}, {}),
            ("cannot be mixed", {"1_3": one, "1_4": np.array([[0, 1, 2, 3]])}, {})]:
        safetensors("rank0.safetensors", arrays, **change)
        run.bad(["meta_info.json", "rank0.safetensors"], [], text)
    full, expect = np.array([[0, 1, 2, 3], [3, 4, 5, 6]]), Expect(experts, k, ranks=1)
    expect.pairs(0, 0, 0, 0, full[:0])
    expect.pairs(1, 0, 0, 0, full)
    place = {"0_3": dict(dtype="I64", shape=[0, 4], data_offsets=[0, 0]),  # no tokens: it lies where the next one begins
             "1_3": dict(dtype="I64", shape=[2, 4], data_offsets=[0, 64])}
    for keys in ("0_3", "1_3"), ("1_3", "0_3"):
        header = json.dumps({key: place[key] for key in keys}).encode()
        open("rank0.safetensors", "wb").write(struct.pack("<Q", len(header)) + header + full.tobytes())
        run.good(["meta_info.json", "rank0.safetensors"], [], expect, "pairs")
    safetensors("other.safetensors", {"1_3": one})
    run.bad(["other.safetensors", "meta_info.json"], [], "rank{R}.safetensors")
    safetensors("rank0.safetensors", {"model.weight": one.astype(np.float32)})
    run.bad(["rank0.safetensors"], ["--experts", "16", "--top-k", "4"], "not in a format that is known")
    safetensors("rank0.safetensors", {"1_3": one})
    meta(num_experts=experts)
    run.bad(["rank0.safetensors", "meta_info.json"], [], "'num_experts_per_token' is missing")
    meta(num_experts="many", num_experts_per_token=k)
    run.bad(["rank0.safetensors", "meta_info.json"], [], "must be a whole number")

# ---- torch.save files without torch ---------------------------------------------------------------


class Storage:
    def __init__(self, array, location="cpu"):
        self.array, self.location = array, location


class Tensor:
    """Pickles as torch does: _rebuild_tensor_v2(storage, offset, size, stride, False, OrderedDict())."""

    def __init__(self, array, offset=0, size=None, stride=None, storage=None):
        self.array = np.ascontiguousarray(array)
        self.storage = storage or Storage(self.array)
        self.offset, self.size = offset, self.array.shape if size is None else size
        self.stride = tuple(s // self.array.itemsize for s in self.array.strides) if stride is None else stride

    def __reduce__(self):
        return (GLOBALS["_rebuild_tensor_v2"],
                (self.storage, self.offset, tuple(self.size), tuple(self.stride), False, OrderedDict()))


def stand_in(module, name):
    """A callable that pickles as MODULE.NAME."""
    def function(*arguments):
        raise AssertionError(name)
    function.__module__, function.__qualname__, function.__name__ = module, name, name
    sys.modules.setdefault(module, types.ModuleType(module))
    setattr(sys.modules[module], name, function)
    return function


for package in "torch", "torch._utils":
    sys.modules[package] = types.ModuleType(package)
GLOBALS = {"_rebuild_tensor_v2": stand_in("torch._utils", "_rebuild_tensor_v2")}
STORAGES = {dtype: stand_in("torch", name) for dtype, name in {
    "uint8": "ByteStorage", "bool": "BoolStorage", "int8": "CharStorage", "int16": "ShortStorage",
    "int32": "IntStorage", "int64": "LongStorage", "float16": "HalfStorage", "float32": "FloatStorage",
    "float64": "DoubleStorage"}.items()}


class TorchPickler(pickle._Pickler):
    def __init__(self, file, protocol):
        super().__init__(file, protocol, fix_imports=False)
        self.storages = []

    def persistent_id(self, value):
        if not isinstance(value, Storage):
            return None
        if value not in self.storages:
            self.storages.append(value)
        return ("storage", STORAGES[str(value.array.dtype)], str(self.storages.index(value)), value.location,
                value.array.size)


def torch_save(path, value, protocol=2, byteorder=b"little", folder="archive", cut=0, method=zipfile.ZIP_STORED):
    text = io.BytesIO()
    pickler = TorchPickler(text, protocol)
    pickler.dump(value)
    with zipfile.ZipFile(path, "w", method) as out:
        out.writestr(f"{folder}/data.pkl", text.getvalue())
        if byteorder:
            out.writestr(f"{folder}/byteorder", byteorder)
        for i, storage in enumerate(pickler.storages):
            data = np.ascontiguousarray(storage.array).tobytes()
            out.writestr(f"{folder}/data/{i}", data[:len(data) - cut])
        out.writestr(f"{folder}/version", b"3\n")


def torch_bad(run, name, root, options, bad):
    """What is refused in every torch file, whatever it holds. `bad` makes a root with a stranger."""
    torch_save(name, root, byteorder=b"big")
    run.bad([name], options, "big-endian")
    torch_save(name, root, cut=1)
    run.bad([name], options, "its tensor needs")
    torch_save(name, root, method=zipfile.ZIP_DEFLATED)
    run.bad([name], options + ["--force"], "compressed")
    for stranger, text in [
            (subprocess.Popen, "names subprocess.Popen"), (print, "print"), ({1, 2}, "builtins.set"),
            (1 << 70, "beyond 64 bits"), (np.arange(3, dtype=">i4"), "big-endian NumPy"),
            (np.asfortranarray(np.zeros((2, 3))), "Fortran"), (np.array(["x"]), "type U1"),
            (Tensor(np.zeros(4, np.int32), size=(5,), stride=(1,)), "larger than its storage"),
            (Tensor(np.zeros(4, np.int32), size=(2, 2), stride=(3, 1)), "larger than its storage"),
            (Tensor(np.zeros(4, np.int32), offset=1), "larger than its storage"),
            (Tensor(np.zeros(4, np.int32), size=(4, 2), stride=(1, 0)), "larger than its storage"),
            (Tensor(np.zeros(4, np.int32), size=(1 << 62,), stride=(0,)), "larger than its storage"),
            (Tensor(np.zeros(4, np.int32), size=(1,) * 9, stride=(1,) * 9), "8 dimensions")]:
        torch_save(name, bad(stranger))
        run.bad([name], options, text)
    magic = pickle.dumps(0x1950a86a20f9469cfc6c, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2)
    open(name, "wb").write(magic)
    run.bad([name], options, "PyTorch before 1.6")
    torch_save(name, root)
    run.damage(name, [name], options)
    whole = open(name, "rb").read()
    at = whole.index(b"data.pkl") + 8
    for i in range(60):  # damage in the pickle alone, which the zip's own checks do not see
        data = bytearray(whole)
        data[run.random.randrange(at, at + 400)] = run.random.randrange(256)
        open(name, "wb").write(data)
        done = run.run([name], options + ["-q"])
        assert done.returncode in (0, 2) and done.stderr.count("\n") <= 1, (i, done)
        if done.returncode == 0:
            os.remove("out.h5")
    open(name, "wb").write(whole)


@case
def sglang_stat(run):
    rng, experts, k, layers, steps = np.random.default_rng(2), 12, 3, 5, 4
    counts = np.zeros((steps, layers, experts), np.int32)
    expect = Expect(experts, k, layers=3, model_layers=5, ranks=1, step="forward",
                    import_notes="layers=1,2,4; counts=summed over all ranks")
    for s in (0, 1, 3):  # step 2 saw no token
        for l in (1, 2, 4):
            counts[s, l] = bincount(choices(rng, 7 + s, experts, k), experts)
            expect.counts(s, 0, (1, 2, 4).index(l), 0, counts[s, l])
    root = {"rank": 0, "logical_count": Tensor(counts), "average_utilization_rate_over_window": 0.5,
            "more": (None, True, [1, -2, 1 << 40, "text"], OrderedDict(), 2.5)}
    options = ["--top-k", "3"]
    name = "expert_distribution_recorder_1.5.pt"
    for protocol in 2, 3, 4, 5:
        torch_save(name, root, protocol)
        run.good([name], options, expect, "counts", "11 rows left out: layers without any selection")
    # A view of a larger storage, the steps reversed in memory; two files follow one another.
    wide = np.zeros((layers, steps + 1, experts), np.int64)
    wide[:, 1:] = counts.transpose(1, 0, 2)
    view = Tensor(wide, offset=experts, size=counts.shape, stride=(experts, (steps + 1) * experts, 1))
    torch_save("b.pt", {"rank": 0, "logical_count": view}, byteorder=None, folder="expert_distribution")
    for (s, m, l, r), (row, w) in list(expect.calls.items()):
        expect.counts(s + steps, m, l, r, row)
    run.good([name, "b.pt"], options + ["--experts", "12"], expect, "counts")
    run.bad([name], [], "pass --top-k N")
    run.bad([name], ["--top-k", "2"], "no multiple of top-2")
    run.bad([name], options + ["--experts", "13"], "but --experts 13")
    torch_save("b.pt", {"rank": 0, "logical_count": Tensor(counts[:, :4])})
    run.bad([name, "b.pt"], options, "unlike the files before")
    for value, text in [(counts[0], "not [steps, layers, experts]"), (counts * 0, "all counts are 0"),
                        (counts - 1, "is no count"), (counts.astype(np.float32), "floats where integers")]:
        torch_save("b.pt", {"rank": 0, "logical_count": Tensor(value)})
        run.bad(["b.pt"], options, text)
    torch_save("b.pt", {"rank": 0, "count": Tensor(counts)})
    run.bad(["b.pt"], options, 'no array "logical_count"')
    os.system(f"gzip -k {name}")
    run.bad([name + ".gz"], options, "unpack it first")
    torch_bad(run, name, root, options, lambda stranger: {**root, "stranger": stranger})


def recorder_file(path, records, physical):
    torch_save(path, {"records": records, "last_physical_to_logical_map": Tensor(physical)})


def physical_map(rng, layers, experts, slots):
    return np.stack([rng.permutation(np.concatenate([np.arange(experts), rng.integers(0, experts, slots - experts)]))
                     for _ in range(layers)])


@case
def sglang_pass(run):
    rng, layers, experts, slots, k, ranks = np.random.default_rng(3), 4, 8, 12, 2, 3
    physical = physical_map(rng, layers, experts, slots)
    own, summed, first = (Expect(experts, k, layers=3, ranks=n) for n in (ranks, 1, 1))
    records = [[] for _ in range(ranks)]
    for forward in (5, 2):
        for batch, key in enumerate(("primary", "child_b")):
            total = np.zeros((layers, experts), int)
            for rank in range(ranks):
                count = np.zeros((layers, slots), np.int64)
                for l in range(1, layers):
                    ids = np.stack([rng.choice(slots, k, False) for _ in range(4 + rank)])
                    count[l] = bincount(ids, slots)
                    folded = np.zeros(experts, int)
                    for p in range(slots):
                        folded[physical[l, p]] += count[l, p]
                    total[l] += folded
                    own.counts(forward, batch, l - 1, rank, folded)
                    if rank == 0:
                        first.counts(forward, batch, l - 1, 0, folded)
                records[rank].append({"forward_pass_id": forward, "rank": rank, "gatherer_key": key,
                                      "global_physical_count": Tensor(count), "misc_objects": []})
            for l in range(1, layers):
                summed.counts(forward, batch, l - 1, 0, total[l])
    files = [f"expert_distribution_recorder_7.5_{rank}.pt" for rank in range(ranks)]
    for rank, name in enumerate(files):
        recorder_file(name, records[rank], physical)
    options = ["--top-k", "2"]
    own.facts["import_notes"] = "ranks-hold=tokens; ids=physical, folded by last_physical_to_logical_map"
    run.good(files[::-1], options + ["--ranks-hold", "tokens"], own, "counts", "importing as sglang-records")
    run.good(files, options + ["--ranks-hold", "experts"], summed, "counts")
    run.good(files, options + ["--ranks-hold", "same"], first, "counts", "records of ranks that hold the same")
    run.good(files[:1], options, first, "counts")
    run.bad(files, options, "pass --ranks-hold same")
    run.bad(files[:1], [], "pass --top-k")
    run.bad(files[1:], options + ["--ranks-hold", "experts"], "the files of ranks 0 are missing")
    shutil.copy(files[0], "again.pt")
    run.bad(files + ["again.pt"], options + ["--ranks-hold", "tokens"], "recorded twice")
    run.bad(files[:1], options + ["--experts", "9"], "the map names 8 experts")
    good = records[0]
    change = lambda **members: [{**good[0], **members}]
    for recs, phys, text in [
            (good, physical[:2], "as large as the map"), (good, physical - 1, "is no expert"),
            (good, physical.ravel(), "no last_physical_to_logical_map"), ([], physical, "no record in it"),
            (change(forward_pass_id=None), physical, "no forward_pass_id"), ([7], physical, "no forward_pass_id"),
            (change(rank=-1), physical, "no forward_pass_id or rank"),
            (change(global_physical_count=Tensor(np.zeros((layers, slots), np.int64))), physical, "no record has a token"),
            (change(global_physical_count=Tensor(-np.ones((layers, slots), np.int64))), physical, "is no count"),
            (change(global_physical_count=[1, 2]), physical, "no global_physical_count")]:
        recorder_file("b.pt", recs, phys)
        run.bad(["b.pt"], options, text)
    torch_save("b.pt", {"records": good})
    run.bad(["b.pt"], options, "no last_physical_to_logical_map")
    run.damage(files[0], files, options + ["--ranks-hold", "tokens"])
    root = {"records": good, "last_physical_to_logical_map": Tensor(physical)}
    torch_bad(run, files[0], root, options, lambda stranger: {**root, "stranger": stranger})


@case
def sglang_token(run):
    rng, layers, experts, slots, k, ranks = np.random.default_rng(4), 3, 10, 14, 3, 2
    physical = physical_map(rng, layers, experts, slots)
    expect, records = Expect(experts, k, layers=2, ranks=ranks), [[] for _ in range(ranks)]
    expect.sequences = []
    for forward, lens in enumerate(([3, 5, 0, 2], None, [4])):
        for rank in range(ranks):
            tokens = sum(lens) if lens else 6 + rank
            ids = np.full((layers, tokens, 8), -1, np.int32)
            filler = np.zeros(tokens, bool)
            filler[-1] = forward == 0 or not lens  # a padded batch; -1 in every layer
            for l in (0, 2):  # layer 1 is dense
                choice = np.zeros((tokens, k), int)
                for t in range(tokens):
                    logical = rng.choice(experts, k, False)
                    choice[t] = logical
                    for j in range(k):
                        ids[l, t, j] = rng.choice(np.flatnonzero(physical[l] == logical[j]))
                ids[l, filler] = -1
                expect.pairs(forward, 0, l // 2, rank, choice[~filler])
            records[rank].append({
                "forward_pass_id": forward, "rank": rank, "gatherer_key": "primary",
                "input_ids": list(range(tokens)), "positions": list(range(tokens)), "extend_seq_lens": lens,
                "forward_mode": 1 if lens else 2, "topk_ids_of_layer": Tensor(ids), "misc_objects": [{"x": 1}]})
            if lens:
                kept = [n for n in lens if n]
                kept[-1] -= int(filler[-1])
                expect.sequences += kept
    files = ["r_0.pt", "r_1.pt"]
    for rank in range(ranks):
        recorder_file(files[rank], records[rank], physical)
    hold = ["--ranks-hold", "tokens"]
    run.good(files, hold, expect, "pairs", "rows of dense layers (-1); tokens without any expert (fillers)")
    run.bad(files, [], "pass --ranks-hold")
    run.bad(files, ["--ranks-hold", "experts"], "cannot be added up")
    run.bad(files, hold + ["--top-k", "9"], "fewer than --top-k 9")
    run.bad(files, hold + ["--top-k", "2"], "3 experts, not 2")
    good = records[0][0]["topk_ids_of_layer"].array

    def change(edit, **members):
        ids = good.copy()
        edit(ids)
        recorder_file("b.pt", [{**records[0][0], "topk_ids_of_layer": Tensor(ids), **members}], physical)

    def put(*place):
        return lambda ids: ids.__setitem__(place[:-1], place[-1])

    change(put(0, 1, 2, -1))
    run.bad(["b.pt"], [], "token 1: 2 experts, not 3")
    change(put(2, 1, slice(0, 8), -1))
    run.bad(["b.pt"], [], "in some layers only")
    change(put(0, 1, 1, 14))
    run.bad(["b.pt"], [], "no physical expert of the map")
    change(put(0, 1, 1, good[0, 1, 0]))
    run.bad(["b.pt"], [], "stands twice")
    change(put(0, 0, 0, good[0, 0, 0]), extend_seq_lens=[3, 8])
    run.bad(["b.pt"], [], "extend_seq_lens do not add up")
    change(put(slice(None), slice(None), slice(None), -1))
    run.bad(["b.pt"], [], "no token has an expert")
    full = np.broadcast_to(np.arange(8), (layers, 10, 8)).astype(np.int32)
    recorder_file("b.pt", [{**records[0][0], "topk_ids_of_layer": Tensor(full)}], np.stack([np.arange(14)] * 3))
    run.bad(["b.pt"], [], "pass --top-k K")
    eight = Expect(14, 8, layers=3)
    for l in range(3):
        eight.pairs(0, 0, l, 0, full[l])
    run.good(["b.pt"], ["--top-k", "8"], eight, "pairs")
    run.damage(files[0], files, hold)


# ---- ids of whole sequences -------------------------------------------------------------------------


def zero_dense(rng, tokens, layers, dense, experts, k):
    """Ids [tokens, layers, k] with zeros in the dense layers, and without them."""
    ids = np.stack([choices(rng, tokens, experts, k) for _ in range(layers)], 1)
    ids[:, dense] = 0
    return ids.astype(np.int32), np.delete(ids, dense, 1)


def one_block(expect, sequences):
    """Sequences [(tokens, layers, k)] that fit one block."""
    whole = np.concatenate(sequences)
    for l in range(whole.shape[1]):
        expect.pairs(0, 0, l, 0, whole[:, l])
    expect.sequences = [len(s) for s in sequences]


@case
def slime(run):
    rng, experts, k, layers = np.random.default_rng(6), 20, 4, 5
    samples, kept, expect = [], [], Expect(experts, k, layers=3, model_layers=5, step="none")
    for n in (7, 1, 12):
        ids, data = zero_dense(rng, n, layers, [0, 3], experts, k)
        kept.append(data)
        samples.append({"index": n, "prompt": "text", "tokens": list(range(n + 1)), "reward": np.float32(0.5), "n": np.int64(7),
                        "rollout_routed_experts": ids if n == 7 else Tensor(ids), "metadata": {"a": [1, None]}})
    samples.insert(1, {"tokens": [1, 2], "rollout_routed_experts": None})
    one_block(expect, kept)
    options = ["--experts", "20"]
    for protocol in 2, 4:
        torch_save("rollout_3.pt", {"rollout_id": 3, "samples": samples}, protocol)
        run.good(["rollout_3.pt"], options, expect, "pairs", "rows of dense layers (all zero); samples without")
    one_block(expect, kept * 2)
    shutil.copy("rollout_3.pt", "rollout_4.pt")
    run.good(["rollout_3.pt", "rollout_4.pt"], options, expect, "pairs", "importing as slime-pt")
    run.bad(["rollout_3.pt"], [], "pass --experts")
    run.bad(["rollout_3.pt"], options + ["--top-k", "3"], "but --top-k 3")
    run.bad(["rollout_3.pt"], ["--experts", "9"], "not below the number of experts")
    save = lambda *samples: torch_save("b.pt", {"rollout_id": 3, "samples": list(samples)})
    ids = samples[0]["rollout_routed_experts"]
    edit = lambda place, value: (a := ids.copy(), a.__setitem__(place, value))[0]
    sample = lambda array: {"tokens": list(range(8)), "rollout_routed_experts": Tensor(array)}
    for array, text in [(edit((1, 2, 0), -1), "[1, 2, 0]: expert id -1 is negative"),
                        (edit((2, 1, slice(None)), 0), "[2, 1, 1]: expert id 0 stands twice"),
                        (ids[:, 0], "not an array [tokens, layers, k]"), (ids * 0, "every row of every layer is zero"),
                        (ids * 1.0, "floats where integers"), (ids.repeat(2, 2)[:, :, :0], "not plausible")]:
        save(sample(array))
        run.bad(["b.pt"], options, text)
    save(sample(ids), sample(edit((0, 0, slice(None)), [1, 2, 3, 4])))
    run.bad(["b.pt"], options, "samples[1]: [0, 0, 0]: expert id 1 is data in a layer that was zero")
    save(sample(ids), sample(ids[:, :4]))
    run.bad(["b.pt"], options, "unlike the samples before")
    save({**sample(ids), "tokens": list(range(7))})
    run.bad(["b.pt"], options, "as many rows")
    save({"tokens": [1]})
    run.bad(["b.pt"], options, "no sample has rollout_routed_experts")
    save("text")
    run.bad(["b.pt"], options, "samples[0]: is no dict")
    torch_save("b.pt", {"rollout_id": 3, "samples": 4})
    run.bad(["b.pt"], options, 'no list "samples"')
    top1 = np.zeros((6, 2, 1), np.int32)
    top1[:, 1, 0] = range(6)
    save(sample(top1))
    run.bad(["b.pt"], options, "pass --dense-layers")
    run.bad(["b.pt"], options + ["--dense-layers", "2"], "list of layers below 2")
    for answer, data in ("none", top1), ("0", top1[:, 1:]):
        one = Expect(experts, 1, layers=data.shape[1])
        one_block(one, [data])
        run.good(["b.pt"], options + ["--dense-layers", answer], one, "pairs")
    root = {"rollout_id": 3, "samples": samples}
    torch_bad(run, "rollout_3.pt", root, options, lambda stranger: {**root, "stranger": stranger})


@case
def verl(run):
    rng, experts, k, layers, length = np.random.default_rng(7), 16, 2, 3, 12
    batch, left, both = np.zeros((4, length, layers, k), np.int16), [], []
    for b, (pad, end) in enumerate([(3, 12), (0, 12), (5, 9), (11, 12)]):
        ids, data = zero_dense(rng, end - pad, layers, [1], experts, k)
        ids[-1] = 0  # the filler
        batch[b, pad:end] = ids
        both.append(data[:-1])
        left.append(data[:-1])
    whole = Expect(experts, k, layers=2, import_notes="padding=both; filler-last=yes")
    one_block(whole, [s for s in both if len(s)])
    options = ["--experts", "16", "--filler-last", "yes", "--padding"]
    for root in (Tensor(batch), {"routed_experts": Tensor(batch), "other": Tensor(np.zeros(3, np.float32))}):
        torch_save("batch.pt", root)
        run.good(["batch.pt"], options + ["both", "--format", "verl-pt", "--force"], whole, "pairs", "rows of padding")
    run.good(["batch.pt"], options + ["both"], whole, "pairs", "importing as verl-pt")
    full = Expect(experts, k, layers=2, import_notes="padding=left; filler-last=no")
    data = np.stack([zero_dense(rng, length, layers, [1], experts, k)[0] for _ in range(3)]).astype(np.int16)
    data[1, :4] = 0
    one_block(full, [data[0][:, [0, 2]], data[1, 4:][:, [0, 2]], data[2][:, [0, 2]]])
    torch_save("full.pt", {"routed_experts": Tensor(data)})
    run.good(["full.pt"], ["--experts", "16", "--filler-last", "no", "--padding", "left"], full, "pairs")
    cut = Expect(experts, k, layers=2)
    one_block(cut, [data[0, :-1][:, [0, 2]], data[1, 4:-1][:, [0, 2]], data[2, :-1][:, [0, 2]]])
    run.good(["full.pt"], options + ["left"], cut, "pairs", "filler rows of last tokens")
    run.bad(["full.pt"], options[2:] + ["left"], "pass --experts")
    run.bad(["full.pt"], options[:2] + ["--padding", "left"], "pass --filler-last yes")
    run.bad(["full.pt"], options[:4], "pass --padding left")
    shutil.copy("full.pt", "again.pt")
    run.bad(["full.pt", "again.pt"], options + ["left"], "takes one file")
    run.bad(["full.pt"], options + ["left", "--experts", "9"], "not below the number of experts")
    run.bad(["full.pt"], options + ["left", "--top-k", "3"], "but --top-k 3")
    for root, text in [({"routed_experts": Tensor(data[0])}, "not [batch, sequence, layers, k]"),
                       ({"routed_experts": Tensor(data * 0)}, "every row of every layer is zero"),
                       ({"routed_experts": Tensor(data * 0.5)}, "floats where integers"),
                       ({"routed_experts": [1]}, 'no array "routed_experts"'),
                       ({"no_routed_experts": Tensor(data)}, 'no array "routed_experts"')]:
        torch_save("b.pt", root)
        run.bad(["b.pt"], options + ["left"], text)
    root = {"routed_experts": Tensor(data)}
    torch_bad(run, "full.pt", root, options + ["left"], lambda stranger: {**root, "stranger": stranger})



@case
def npy_ids(run):
    rng, experts, k, layers = np.random.default_rng(8), 24, 3, 4
    ids, data = zero_dense(rng, 10, layers, [0, 2], experts, k)
    weights = rng.random((10, layers, k)).astype(np.float32)
    options = ["--experts", "24"]
    for dtype in np.int16, np.int32:
        padded = np.concatenate([np.zeros((2, layers, k), int), ids, np.zeros((1, layers, k), int)])
        np.save("padded.npy", padded.astype(dtype))
        expect = Expect(experts, k, layers=2, model_layers=4, import_notes="dense layers=2 of 4 left out")
        one_block(expect, [data])
        expect.sequences = []
        run.good(["padded.npy"], options, expect, "pairs", "3 rows left out: tokens without any expert")
    np.save("ids.npy", ids)
    np.save("weights.npy", weights)
    expect = Expect(experts, k, layers=2)
    for l in range(2):
        expect.pairs(0, 0, l, 0, data[:, l], weights[:, [1, 3][l]])
    run.good(["ids.npy"], options + ["--weights", "weights.npy"], expect, "pairs", "importing as npy-ids")
    expect = Expect(experts, k, layers=2, import_notes="filler-last=yes")
    one_block(expect, [data[:5], data[6:9]])
    open("s.csv", "w").write("first_row,num_tokens\n0,6\n6,4\n")
    run.good(["ids.npy"], options + ["--sequences", "s.csv", "--filler-last", "yes"], expect, "pairs",
             "filler rows of last tokens")
    more, rest = zero_dense(rng, 4, layers, [0, 2], experts, k)
    np.save("more.npy", more)
    expect = Expect(experts, k, layers=2)
    one_block(expect, [data, rest, data])
    shutil.copy("ids.npy", "again.npy")
    run.good(["ids.npy", "more.npy", "again.npy"], options, expect, "pairs")
    run.bad(["ids.npy", "more.npy"], options + ["--weights", "weights.npy"], "belong to one file")
    run.bad(["ids.npy"], options + ["--filler-last", "maybe"], "not yes or no")
    np.save("b.npy", more[:, :3])
    run.bad(["ids.npy", "b.npy"], options, "b.npy: not [tokens, 4, 3] integers")
    bad = ids.copy()
    bad[4, 0] = [1, 2, 3]
    np.save("b.npy", bad)
    run.bad(["b.npy"], options, "[4, 0, 0]: expert id 1 is data in a layer that was zero")
    bad[4, 0] = 0
    bad[4, 1] = 0
    np.save("b.npy", bad)
    run.bad(["b.npy"], options, "[4, 1, 1]: expert id 0 stands twice")
    np.save("b.npy", ids * 0)
    run.bad(["b.npy"], options, "every row of every layer is zero")
    np.save("b.npy", np.arange(6).reshape(3, 2, 1) * [[[0], [1]]])
    run.bad(["b.npy"], options, "pass --dense-layers")
    run.damage("ids.npy", ["ids.npy"], options)
    run.damage("more.npy", ["ids.npy", "more.npy"], options)


# ---- counts -----------------------------------------------------------------------------------------


def gguf(path, tensors, keys=None, version=3, align=32):
    """GGUF: tensors {name: float32 array}, keys {name: (type, packed value)}."""
    text = lambda s: struct.pack("<Q", len(s)) + s.encode()
    keys = {"general.type": (8, text("imatrix")), "imatrix.chunk_count": (4, struct.pack("<I", 3)),
            "imatrix.datasets": (9, struct.pack("<IQ", 8, 2) + text("a.txt") + text("b")),
            "some.numbers": (9, struct.pack("<IQ", 5, 3) + bytes(12)),
            "general.alignment": (4, struct.pack("<I", align))} if keys is None else keys
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    for name, (kind, value) in keys.items():
        head += text(name) + struct.pack("<I", kind) + value
    data = b""
    for name, array in tensors.items():
        data += b"\0" * (-len(data) % align)
        head += text(name) + struct.pack("<I", array.ndim)
        head += b"".join(struct.pack("<Q", n) for n in array.shape[::-1])
        head += struct.pack("<IQ", 0 if array.dtype == np.float32 else 1, len(data))
        data += array.tobytes()
    open(path, "wb").write(head + b"\0" * (-len(head) % align) + data)


@case
def imatrix(run):
    run.phase = "prefill"
    rng, experts, k = np.random.default_rng(9), 12, 4
    tensors, expect = {}, Expect(experts, k, layers=3, ranks=1, step="none", phase="prefill",
                                 import_notes="layers=1,2,10; counts=of ffn_down_exps, whole run")
    for layer in (1, 10, 2):
        row = bincount(choices(rng, 50, experts, k), experts)
        expect.counts(0, 0, [1, 2, 10].index(layer), 0, row)
        for kind in "down", "gate", "up":
            name = f"blk.{layer}.ffn_{kind}_exps.weight"
            tensors[name + ".in_sum2"] = rng.random((experts, 6)).astype(np.float32)
            tensors[name + ".counts"] = row.astype(np.float32).reshape(experts, 1)
        tensors[f"blk.{layer}.attn_q.weight.counts"] = np.full((1, 1), 3, np.float32)
    options = ["--top-k", "4"]
    for align in 32, 64:
        gguf("m.gguf", tensors, align=align)
        run.good(["m.gguf"], options, expect, "counts", "importing as imatrix")
    run.bad(["m.gguf"], [], "pass --top-k")
    run.bad(["m.gguf"], ["--top-k", "7"], "no multiple of top-7")
    run.bad(["m.gguf"], options + ["--experts", "11"], "but --experts 11")
    shutil.copy("m.gguf", "again.gguf")
    run.bad(["m.gguf", "again.gguf"], options, "takes one file")
    run.damage("m.gguf", ["m.gguf"], options, 80)
    name, row = "blk.0.ffn_up_exps.weight.counts", np.full((4, 1), 3, np.float32)
    fewer = {name: row, name.replace("0", "1"): row - 1}
    less = Expect(4, 4, layers=2)
    less.counts(0, 0, 0, 0, [3] * 4)
    less.counts(0, 0, 1, 0, [2] * 4)
    gguf("b.gguf", fewer)
    run.good(["b.gguf"], options + ["--dropped"], less, "counts")
    run.bad(["b.gguf"], options, "b.gguf: step 0, micro-batch 0, layer 1, rank 0: other tokens than in the layers before; counts after "
            "dropping need --dropped or --tokens N")
    gguf("b.gguf", {name: np.array([[6], [1], [1]], np.float32)})
    run.bad(["b.gguf"], ["--top-k", "2"], "b.gguf: step 0, micro-batch 0, layer 0, rank 0: expert 0 is counted 6 times, but there are 4 tokens, "
            "and none chooses an expert twice: check --top-k; counts after dropping need --dropped or --tokens N")
    for change, text in [({name: row + 0.5}, "is no exact count"), ({name: row * -1}, "is no exact count"),
                         ({name: row + np.float32(2 ** 24)}, "is no exact count"),
                         ({name: row.astype(np.float16)}, "not a row of 32-bit floats"),
                         ({name: row, name.replace("0", "1"): row[:3]}, "3 experts, but 4"),
                         ({"blk.0.ffn_up.weight.counts": row}, "the model has no experts")]:
        gguf("b.gguf", change)
        run.bad(["b.gguf"], options, text)
    gguf("b.gguf", {name: row}, {"general.type": (8, struct.pack("<Q", 5) + b"model")})
    run.bad(["b.gguf"], options, "but no imatrix")
    gguf("b.gguf", {name: row}, {"x": (77, b"")})
    run.bad(["b.gguf"], options, "metadata type 77")
    gguf("b.gguf", {name: row}, version=1)
    run.bad(["b.gguf"], options, "GGUF version 1")
    old = struct.pack("<i", 2) + b"".join(
        struct.pack("<i", len(n)) + n + struct.pack("<ii", 3, 4) + bytes(16) for n in (b"blk.0.attn_q.weight", b"output.weight"))
    open("imatrix.dat", "wb").write(old)
    run.bad(["imatrix.dat"], options, "the counts cannot be recovered")


@case
def moe_infinity(run):
    rng, experts, k = np.random.default_rng(10), 8, 2
    data, expect = np.zeros((5, 3, experts), np.float32), Expect(experts, k, layers=3, step="forward")
    for request in (0, 1, 3):
        for l in range(3):
            row = bincount(choices(rng, 5 + request, experts, k), experts)
            data[request, l] = row
            expect.counts(request, 0, l, 0, row)
    options = ["--top-k", "2"]
    for dtype in np.float32, np.float64:
        np.save("m.npy", data.astype(dtype))
        run.good(["m.npy"], options, expect, "counts", "2 rows left out: unused places")
    run.bad(["m.npy"], [], "pass --top-k")
    run.bad(["m.npy"], ["--top-k", "3"], "no multiple of top-3")
    run.bad(["m.npy"], options + ["--experts", "9"], "but --experts 9")
    force = options + ["--format", "moe-infinity", "--force"]
    for array, text in [(data + 0.5, "is no count"), (-data, "is no count"), (data * np.nan, "is no count"),
                        (data * 0, "all counts are 0"), (data[0], "not a float array"),
                        (data.astype(np.int32), "not a float array")]:
        np.save("b.npy", array)
        run.bad(["b.npy"], force, text)
    np.save("b.npy", data * 0)
    run.bad(["b.npy"], options, "may be ")
    run.damage("m.npy", ["m.npy"], options)


def softmax(x):
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@case
def router_logits(run):
    run.phase = "prefill"
    rng, layers, tokens, experts, k = np.random.default_rng(11), 3, 9, 10, 3
    options = ["--top-k", "3", "--scores"]

    def wanted(logits, scores):
        """[L, T, E] to ids and weights [L, T, k]."""
        ids = np.argsort(-logits, axis=-1, kind="stable")[..., :k]
        score = softmax(logits) if scores.startswith("softmax") else 1 / (1 + np.exp(-logits.astype(np.float64)))
        weights = np.take_along_axis(score, ids, -1)
        return ids, weights if scores == "softmax-all" else weights / weights.sum(-1, keepdims=True)

    def expected(samples, scores, **facts):
        expect = Expect(experts, k, layers=layers, **facts)
        parts = [wanted(s, scores) for s in samples]
        for l in range(layers):
            ids = np.concatenate([p[0][l] for p in parts])
            expect.pairs(0, 0, l, 0, ids, None if scores == "none" else np.concatenate([p[1][l] for p in parts]))
        return expect

    for dtype in np.float32, np.float16, np.float64:
        logits = (3 * rng.standard_normal((layers, tokens, experts))).astype(dtype)
        logits[0, 0, 4] = logits[0, 0, 7] = 50  # a tie goes to the lower expert
        logits[1, 2] = 0  # as do ties for the last place
        np.save("l.npy", logits)
        np.savez("l.npz", router_logits=logits, input_ids=np.arange(5))
        for scores in "softmax-all", "softmax-chosen", "sigmoid":
            expect = expected([logits.astype(np.float32)], scores, weights_normalized=int(scores != "softmax-all"),
                              router=scores.split("-")[0])
            for name in "l.npy", "l.npz":
                run.good([name], options + [scores], expect, "pairs", "importing as router-logits")
    run.good(["l.npy"], options + ["none"], expected([logits.astype(np.float32)], "none"), "pairs")
    samples = rng.standard_normal((4, layers, tokens, experts)).astype(np.float32)
    np.save("s.npy", samples)
    expect = expected(samples, "softmax-all")
    expect.sequences = [tokens] * 4
    run.good(["s.npy"], options + ["softmax-all"], expect, "pairs")
    run.bad(["l.npy"], ["--top-k", "3"], "pass --scores")
    run.bad(["l.npy"], ["--scores", "softmax-all"], "pass --top-k")
    run.bad(["l.npy"], ["--top-k", "11", "--scores", "none"], "there are 10 experts")
    run.bad(["l.npy"], options + ["none", "--experts", "9"], "but --experts 9")
    options = options + ["none"]
    samples[2, 1, 4, 5] = np.nan
    np.save("b.npy", samples)
    run.bad(["b.npy"], options, "sample 2, layer 1, token 4: a logit is not finite")
    force = options + ["--format", "router-logits", "--force"]
    np.save("b.npy", samples[0, 0])
    run.bad(["b.npy"], force, "not a float array")
    np.save("b.npy", samples[:0])
    run.bad(["b.npy"], force, "not a float array")
    np.savez("b.npz", a=samples, b=samples)
    run.bad(["b.npz"], options, "2 float arrays")
    np.savez_compressed("b.npz", a=samples)
    run.bad(["b.npz"], force, "compressed")
    os.system("xz -k l.npy")
    run.bad(["l.npy.xz"], options, "unpack it first")
    for name in "s.npy", "l.npz":
        run.damage(name, [name], options, 60)


@case
def hrtr(run):
    rng, layers, experts, k, tokens = np.random.default_rng(12), 3, 300, 4, 8200
    ids = np.stack([choices(rng, tokens, experts, k) for _ in range(layers)], 1)
    expect = Expect(experts, k, layers=layers, model_layers=5)
    for block, (a, b) in enumerate([(0, 8192), (8192, tokens)]):
        for l in range(layers):
            expect.pairs(0, block, l, 0, ids[a:b, l])

    def save(path, ids, magic=0x52545248, version=1, model=5, experts=experts, k=k, layers=layers):
        head = struct.pack("<6I", magic, version, model, experts, k, layers)
        open(path, "wb").write(head + ids.astype("<u2").tobytes())

    save("t.hrtr", ids)
    assert open("t.hrtr", "rb").read(4) == b"HRTR"
    run.good(["t.hrtr"], [], expect, "pairs", "importing as hrtr")
    os.system("xz -k t.hrtr")
    run.good(["t.hrtr.xz"], [], expect, "pairs")
    run.bad(["t.hrtr"], ["--experts", "299"], "say otherwise")
    shutil.copy("t.hrtr", "again.hrtr")
    run.bad(["t.hrtr", "again.hrtr"], [], "takes one file")
    few = ids[:20]
    for change, text in [({"version": 2}, "version 2"), ({"experts": 9}, "not below the number of experts"),
                         ({"k": 0}, "not plausible"), ({"layers": 1 << 31}, "not plausible"), ({"k": 301}, "not plausible"),
                         ({"model": 2}, "not plausible"), ({"experts": 0}, "not plausible"), ({"k": 7}, "ends within token 11"),
                         ({"magic": 0x11223344}, "not in a format that is known")]:
        save("b.hrtr", few, **change)
        if text.startswith("ends"):
            save("b.hrtr", np.stack([choices(rng, 20, experts, k) for _ in range(layers)], 1) * 0 + np.arange(240).reshape(20, 3, 4),
                 **change)
        run.bad(["b.hrtr"], [], text)
    save("b.hrtr", few[:0])
    run.bad(["b.hrtr"], [], "no token in it")
    save("b.hrtr", np.where(np.arange(4) == 3, few[..., :1], few))
    run.bad(["b.hrtr"], [], "token 0, layer 0, place 3")
    save("b.hrtr", few)
    run.damage("b.hrtr", ["b.hrtr"], [])


@case
def ultraep(run):
    run.phase = "train"
    rng, experts, k = np.random.default_rng(13), 16, 2
    expect, records = Expect(experts, k, layers=2, step="forward", phase="train",
                             import_notes="layers=3-4; counts=whole expert group; step=micro-batch; lost records=1"), []
    for batch in range(7):
        for layer in (3, 4):
            row = bincount(choices(rng, 30, experts, k), experts)
            records.append((layer, batch, row))
            expect.counts(batch, 0, layer - 3, 0, row)

    def save(parts, **change):
        about = {"schema": "ultra_ep_trace_v1", "trace_id": "t", "ep_size": 4, "num_global_logical_experts": experts,
                 "num_layers": 2, "chunks": len(parts), "dropped_records": 1, **change}
        json.dump({n: v for n, v in about.items() if v is not None}, open("t.manifest.json", "w"), indent=2, sort_keys=True)
        for c, part in enumerate(parts):
            layers, batches, rows = zip(*part)
            np.savez(f"t.chunk{c:06d}.npz", metadata=np.asarray(json.dumps(about)), layers=np.asarray(layers, np.int32),
                     virtual_layers=np.asarray(layers, np.int32), microbatches=np.asarray(batches, np.int64),
                     pre_logical_loads=np.asarray(rows, np.int32), post_physical_loads=np.zeros((len(rows), 24), np.int32))

    options, name = ["--top-k", "2"], ["t.manifest.json"]
    save([records[:5], records[5:]])
    run.good(name, options, expect, "counts", "importing as ultraep")
    run.bad(name, [], "pass --top-k")
    run.bad(name, options + ["--experts", "15"], "but --experts 15")
    shutil.copy(name[0], "again.manifest.json")
    run.bad(name + ["again.manifest.json"], options, "takes one manifest")
    run.damage("t.chunk000001.npz", name, options, 80)
    run.damage(name[0], name, options, 20)
    os.rename("t.chunk000001.npz", "x")
    run.bad(name, options, "t.chunk000001.npz: cannot open")
    os.rename("x", "t.chunk000001.npz")
    for change, text in [({"schema": "ultra_ep_trace_v2"}, "ultra_ep_trace_v1 is read"), ({"chunks": 0}, "within [1"),
                         ({"num_global_logical_experts": None}, "is missing"), ({"num_global_logical_experts": 15}, "not [records, 15]")]:
        save([records], **change)
        run.bad(name, options, text)
    for part, text in [(records + records[:1], "recorded twice"), (records[:-1], "1 of 2 layers"),
                       ([(3, 0, records[0][2] - 9)], "is no count"), ([(-1, 0, records[0][2])], "layers[0] is negative"),
                       ([(3, 0, records[0][2] * 0)], "all loads are 0")]:
        save([part])
        run.bad(name, options, text)
    np.savez("t.chunk000000.npz", layers=np.zeros(1, int))
    run.bad(name, options, "no array called pre_logical_loads")
    np.savez("t.chunk000000.npz", layers=np.zeros(3, int), microbatches=np.zeros(1, int), pre_logical_loads=np.zeros((1, 16), int))
    run.bad(name, options, "layers does not hold 1 numbers")
    shutil.copy(name[0], "other.json")
    run.bad(["other.json"], options, "must be TRACE.manifest.json")



if __name__ == "__main__":
    for name in sys.argv[2:]:
        shutil.rmtree(name, ignore_errors=True)
        os.mkdir(name)
        os.chdir(name)
        CASES[name](Runner(os.path.abspath(os.path.join("..", sys.argv[1]))))
        os.chdir("..")
