#!/usr/bin/env python3
"""Binary routing dumps, written from the formats' descriptions, and the traces they must become.

make_binary.py MIZAN CASE: makes the files of a case in the current directory, imports them with the
program MIZAN, compares every dataset with what the case expects, then damages the files: each bad
file must be refused with one clear line and leave nothing behind, and random damage may be refused
or read but must never crash. Uses numpy and h5py alone.
"""
import json
import os
import random
import shutil
import struct
import subprocess
import sys

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
        self.mizan, self.random = mizan, random.Random(5)

    def run(self, files, options, output="out.h5"):
        command = [self.mizan, "trace", "import", *files, *options, "-o", output]
        return subprocess.run(command, capture_output=True, text=True)

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
    run.bad(stat[:2], [], "the ranks must be 0 to 0")
    run.bad(["meta_info.json"], [], ".safetensors files")
    run.bad(stat, ["--experts", "17"], "but --experts 17")
    run.bad(stat + ids[1:], [], "each once")
    run.damage("rank0.safetensors", stat, [])
    run.damage("rank1_raw.safetensors", ids, [])
    one = np.array([2, 1, 1] + [0] * 13)
    for text, arrays, change in [
            ("not that of whole numbers", {"1_3": one.astype(np.float32)}, {}),
            ("{iteration}_{layer}", {"1_3": one, "layer3": one}, {}),
            ("15 values a row", {"1_3": one[:15]}, {}),
            ("no multiple of top-4", {"1_3": one + 1 - np.eye(16, dtype=int)[0]}, {}),
            ("is no count", {"1_3": one - 2 * np.eye(16, dtype=int)[4]}, {}),
            ("1 of 2 layers", {"1_3": one, "1_4": one, "2_3": one}, {}),
            ("no such layer", {"1_3": one, "2_3": one, "2_4": one}, {}),
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
    safetensors("other.safetensors", {"1_3": one})
    run.bad(["other.safetensors", "meta_info.json"], [], "rank{R}.safetensors")
    safetensors("rank0.safetensors", {"model.weight": one.astype(np.float32)})
    run.bad(["rank0.safetensors"], ["--experts", "16", "--top-k", "4"], "not in a format that is known")
    safetensors("rank0.safetensors", {"1_3": one})
    meta(num_experts=experts)
    run.bad(["rank0.safetensors", "meta_info.json"], [], "'num_experts_per_token' is missing")
    meta(num_experts="many", num_experts_per_token=k)
    run.bad(["rank0.safetensors", "meta_info.json"], [], "must be a whole number")


if __name__ == "__main__":
    for name in sys.argv[2:]:
        shutil.rmtree(name, ignore_errors=True)
        os.mkdir(name)
        os.chdir(name)
        CASES[name](Runner(os.path.abspath(os.path.join("..", sys.argv[1]))))
        os.chdir("..")
