#!/usr/bin/python3
"""Makes a damaged copy of a trace: damage.py IN OUT KIND [ARGUMENT], or damage.py IN --datasets.

Uses h5py alone, so that a mistake in our own reader and writer cannot hide itself."""
import shutil
import sys

import h5py
import numpy as np


def datasets(path):
    names = []
    with h5py.File(path, "r") as f:
        f.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) and item.size else None)
    return names


def flip(path, name):
    """One bit in the middle of the stored bytes of the dataset's first chunk."""
    with h5py.File(path, "r") as f:
        dataset = f[name].id
        if dataset.get_num_chunks():
            chunk = dataset.get_chunk_info(0)
            at = chunk.byte_offset + chunk.size // 2
        else:
            at = dataset.get_offset() + dataset.get_storage_size() // 2
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 0x10]))


def truncate(path, share):
    with open(path, "r+b") as f:
        f.truncate(int(f.seek(0, 2) * float(share)))


def put(path, name, index, value):
    with h5py.File(path, "r+") as f:
        f[name][index] = value


def no_tokens(path, _):
    """Every call stays, with no token in it."""
    with h5py.File(path, "r+") as f:
        f["calls/tokens"][...] = 0
        f["calls/pairs"][...] = 0
        f["calls/token_begin"][...] = 0
        for group in ("pairs", "rows", "sequences"):
            for name in f.get(group, {}):
                f[group][name].resize(0, axis=0)
        if "counts" in f:
            f["counts"][...] = 0


def delete(path, name):
    with h5py.File(path, "r+") as f:
        del f[name]


def version(path, value):
    with h5py.File(path, "r+") as f:
        kind = f.attrs["format_version"].dtype
        f.attrs["format_version"] = np.array(int(value), dtype=kind)


def experts(path):
    with h5py.File(path, "r") as f:
        return int(f["model"].attrs["experts"])


KINDS = {
    "flip": flip,
    "truncate": truncate,
    "delete": delete,
    "version": version,
    "no-tokens": no_tokens,
    "expert-out-of-range": lambda p, _: put(p, "pairs/expert", 5, experts(p)),
    "weight-nan": lambda p, _: put(p, "pairs/weight", 5, np.nan),
    "weight-negative": lambda p, _: put(p, "pairs/weight", 5, -0.5),
    "pairs-do-not-add-up": lambda p, _: put(p, "calls/pairs", 1, 1),
    "calls-out-of-order": lambda p, _: put(p, "calls/layer", 0, 10000),
    "rank-out-of-range": lambda p, _: put(p, "calls/rank", 0, 10000),
}


def main():
    if sys.argv[2] == "--datasets":
        print("\n".join(datasets(sys.argv[1])))
        return
    source, target, kind = sys.argv[1:4]
    shutil.copyfile(source, target)
    KINDS[kind](target, sys.argv[4] if len(sys.argv) > 4 else None)


main()
