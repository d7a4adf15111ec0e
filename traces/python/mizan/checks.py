"""What a reader refuses: the rules of FORMAT.md, sections 1 to 4. Every function raises a
TraceError that names the file, the attribute or dataset, and the first index at fault."""

import h5py
import numpy as np

from . import schema


class TraceError(ValueError):
    """The file is no trace, or holds what the format does not allow."""


def _refuse(path, what):
    raise TraceError(f"{path}: {what}")


def _first(path, wrong, name, values, rule, begin=0):
    """Refuses the first value that is marked as wrong."""
    if wrong.any():
        i = int(np.argmax(wrong))
        _refuse(path, f"/{name}[{begin + i}] is {values[i]}, {rule}")


def fact(path, group, name, value):
    """One attribute that is there."""
    where = f"attribute '{name}' of /{group.strip('/')}"
    if name in schema.CHOICES:
        if value not in schema.CHOICES[name]:
            _refuse(path, f"{where} is {value!r}, must be one of {', '.join(schema.CHOICES[name])}")
        return
    longest = schema.FACTS[group][name][1]
    if longest is not None:
        text = isinstance(value, str) and all(c >= " " and c != "\x7f" for c in value)
        if not text or len(value.encode(errors="replace")) > longest:
            _refuse(
                path, f"{where} must be text of at most {longest} bytes without control characters"
            )
        return
    low, high = schema.RANGES.get(name, (0, None))
    if not isinstance(value, int):
        _refuse(path, f"{where} must be one integer")
    if value < low or (high is not None and value > high):
        limit = "or more" if high is None else f"to {high}"
        _refuse(path, f"{where} is {value}, must be {low} {limit}")


def facts(path, full):
    """All attributes, and what they say of each other."""
    for group, attributes in schema.FACTS.items():
        for name in attributes:
            fact(path, group, name, full[name])
    if full["top_k"] > full["experts"]:
        _refuse(path, f"top_k is {full['top_k']}, more than {full['experts']} experts")


def dataset(path, name, found, experts):
    """Type, shape, chunks and filters of a dataset."""
    kinds, width = schema.TYPES[name], (experts,) if name == "counts" else ()
    if found.dtype.newbyteorder("<").str[1:] not in kinds or found.dtype.byteorder == ">":
        _refuse(path, f"/{name}: holds {found.dtype}, must be one of {', '.join(kinds)}")
    if found.ndim != 1 + len(width) or found.shape[1:] != width:
        _refuse(path, f"/{name}: has the shape {found.shape}, must be {('rows', *width)}")
    chunk = found.chunks
    if not chunk or chunk[1:] != width:
        _refuse(path, f"/{name}: must be stored in chunks of whole rows")
    if int(np.prod(chunk)) * found.dtype.itemsize > schema.CHUNK_MAX:
        _refuse(path, f"/{name}: a chunk must hold at most {schema.CHUNK_MAX} bytes")
    plist = found.id.get_create_plist()
    filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
    known = {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32}
    if not set(filters) <= known or len(set(filters)) < len(filters):
        _refuse(path, f"/{name}: filters other than shuffle, deflate and Fletcher-32, once each")
    if h5py.h5z.FILTER_FLETCHER32 not in filters:
        _refuse(path, f"/{name}: has no Fletcher-32 checksums")


def blocks(calls):
    """Token ranges [(begin, end)] of every (step, micro_batch, rank), by begin, without empty
    ones; and the index of a call whose range is not its block's, or None."""
    order = np.lexsort((calls["rank"], calls["micro_batch"], calls["step"]))
    by = calls[order]
    same = np.ones(max(len(by) - 1, 0), bool)
    for name in ("step", "micro_batch", "rank"):
        same &= by[name][1:] == by[name][:-1]
    differ = same & (
        (by["token_begin"][1:] != by["token_begin"][:-1]) | (by["tokens"][1:] != by["tokens"][:-1])
    )
    own = by[np.concatenate(([True], ~same))] if len(by) else by
    own = np.sort(own[own["tokens"] > 0], order="token_begin")
    ranges = np.stack([own["token_begin"], own["token_begin"] + own["tokens"]], 1)
    return ranges, int(order[1:][differ].min()) if differ.any() else None


def calls(path, table, facts):
    """The columns of /calls by themselves and among each other."""
    for name in schema.CALL_COLUMNS:
        _first(path, table[name] < 0, "calls/" + name, table[name], "must be 0 or more")
    limits = {"micro_batch": 1 << 31, "layer": facts["layers"], "rank": facts["ranks"]}
    for name, most in limits.items():
        _first(path, table[name] >= most, "calls/" + name, table[name], f"must be below {most}")
    order = np.zeros(max(len(table) - 1, 0), np.int64)
    for name in ("step", "micro_batch", "layer", "rank"):
        order = np.where(order == 0, np.sign(table[name][1:] - table[name][:-1]), order)
    if (order <= 0).any():
        i = int(np.argmax(order <= 0)) + 1
        _refuse(path, f"/calls[{i}]: does not come after the call before it; calls must be sorted")
    pairs, tokens, top_k = table["pairs"], table["tokens"], facts["top_k"]
    if facts["kind"] == "pairs" and top_k:
        _first(path, pairs != tokens * top_k, "calls/pairs", pairs, "must be tokens times top_k")
    _first(path, (pairs > 0) & (tokens == 0), "calls/pairs", pairs, "but the call has no tokens")
    ranges, differs = blocks(table)
    if differs is not None:
        _refuse(path, f"/calls/token_begin[{differs}]: tokens differ from those of another layer")
    overlap = ranges[1:, 0] < ranges[:-1, 1]
    if overlap.any():
        token = ranges[1:, 0][overlap][0]
        _refuse(path, f"/calls/token_begin: token {token} is of two ranks, micro-batches or steps")


def inside(ranges, table):
    """Which sequences lie within one of the ranges."""
    end = table["token_begin"] + table["tokens"]
    if not len(ranges):
        return np.zeros(len(table), bool)
    at = np.searchsorted(ranges[:, 0], table["token_begin"], side="right") - 1
    return (at >= 0) & (end <= ranges[np.maximum(at, 0), 1])


def sequences(path, table, ranges):
    """Sequences come in order, hold tokens, do not overlap, and lie within one block each."""
    begin, tokens = table["token_begin"], table["tokens"]
    _first(path, tokens <= 0, "sequences/tokens", tokens, "must be above 0")
    late = np.concatenate(([False], begin[1:] < begin[:-1] + tokens[:-1])) if len(table) else tokens
    _first(path, late > 0, "sequences/token_begin", begin, "must come after the sequence before it")
    _first(path, table["domain"] < -1, "sequences/domain", table["domain"], "must be -1 or more")
    rule = "but the sequence does not lie within one rank's micro-batch"
    _first(path, ~inside(ranges, table), "sequences/token_begin", begin, rule)


def steps(path, table):
    """Described steps come in order."""
    step = table["step"]
    late = np.concatenate(([False], step[1:] <= step[:-1])) if len(step) else step
    _first(path, (step < 0) | (late > 0), "steps/step", step, "must be 0 or more and come in order")


def values(path, name, found, begin, facts):
    """Values of a bulk dataset from row `begin` on."""
    if name == "pairs/expert":
        most = facts["experts"]
        _first(path, found >= most, name, found, f"must be below {most}", begin)
    elif found.dtype.kind == "f":
        bad = ~(np.isfinite(found) & (found >= 0))
        _first(path, bad, name, found, "must be finite and at least 0", begin)


def total(path, name, index, found, pairs):
    """What is to add up to the pairs of a call."""
    if int(found) != pairs:
        _refuse(path, f"/{name} of call {index} adds up to {found}, /calls/pairs says {pairs}")
