"""Several ranks' parts into one trace."""

import os
import warnings

from .reader import open_trace
from .writer import Writer

_SAME = ("layers", "experts", "top_k", "kind", "phase", "step", "ranks")


def merge(parts, path, *, deflate=4):
    """Merges the parts that ranks wrote into one trace at PATH.

    Each rank stands in one part only. Where a part was cut off by a kill, the steps that it does
    not have are left out, with a warning. Memory: the tables of all parts and one step of data.
    """
    traces = []
    try:
        traces = [open_trace(part) for part in parts]
        if not traces:
            raise ValueError("no parts to merge")
        if any(os.path.realpath(trace.path) == os.path.realpath(path) for trace in traces):
            raise ValueError(f"{path}: the output would replace a part")
        _check(traces)
        _write(traces, path, deflate)
    finally:
        for trace in traces:
            trace.close()


def _check(traces):
    first, seen = traces[0], {}
    for trace in traces:
        for name in _SAME:
            if trace.facts[name] != first.facts[name]:
                raise ValueError(
                    f"{trace.path}: {name} is {trace.facts[name]}, but "
                    f"{first.facts[name]} in {first.path}"
                )
        if set(trace._data) != set(first._data):
            raise ValueError(f"{trace.path}: records other datasets than {first.path}")
        for rank in set(trace.calls["rank"].tolist()):
            if rank in seen:
                raise ValueError(f"{trace.path}: rank {rank} is in {seen[rank]} too")
            seen[rank] = trace.path


def _last_step(traces):
    """The last step that every part has, as far as parts were cut off."""
    last = {trace: int(trace.calls["step"][-1]) if len(trace.calls) else -1 for trace in traces}
    cut = [last[trace] for trace in traces if not trace.complete]
    if cut and min(cut) < max(last.values()):
        warnings.warn(
            f"steps after {min(cut)} are left out: a part was cut off there", stacklevel=3
        )
    return min(cut) if cut else max(last.values())


def _calls(traces, last):
    """All calls as (step, micro_batch, layer, rank, part, index), in order."""
    keys = []
    for part, trace in enumerate(traces):
        columns = (trace.calls[n].tolist() for n in ("step", "micro_batch", "layer", "rank"))
        keys += [(*key, part, i) for i, key in enumerate(zip(*columns)) if key[0] <= last]
    return sorted(keys)


def _place(traces, calls):
    """New first token, old one, tokens and part of every (step, micro_batch, rank), in order."""
    place, token = {}, 0
    for step, micro_batch, rank, part, i in sorted(
        {(k[0], k[1], k[3], k[4], k[5]) for k in calls}
    ):
        if (step, micro_batch, rank) not in place:
            tokens = int(traces[part].calls["tokens"][i])
            place[step, micro_batch, rank] = (
                token,
                int(traces[part].calls["token_begin"][i]),
                tokens,
                part,
            )
            token += tokens
    return place


def _sequences(traces, place):
    """Sequences on the new token axis, in its order."""
    moved = []
    for token, old, tokens, part in place.values():
        table = traces[part].sequences
        low, high = table["token_begin"].searchsorted([old, old + tokens])
        for begin, length, domain in table[low:high].tolist():
            moved.append((begin - old + token, length, domain))
    return sorted(moved)


def _write(traces, path, deflate):
    first = traces[0]
    has = first._data.__contains__
    calls = _calls(traces, _last_step(traces))
    place = _place(traces, calls)
    writer = Writer(
        path,
        first.facts,
        weights=has("pairs/weight"),
        hidden_norms=has("pairs/hidden_norm2"),
        gradient_norms=has("rows/grad_norm2"),
        input_norms=has("rows/input_norm2"),
        sequences=has("sequences/tokens"),
        deflate=deflate,
    )
    try:
        before = None
        for step, micro_batch, layer, rank, part, index in calls:
            if before is not None and step != before:
                writer.flush()
            before = step
            call = traces[part].call(index)
            data = (
                {"counts": call.counts()}
                if has("counts")
                else {
                    "ids": call.ids,
                    "weights": call.weights,
                    "token_pairs": call.token_pairs,
                    "hidden_norm2": call.hidden_norm2,
                    "grad_norm2": call.grad_norm2,
                    "input_norm2": call.input_norm2,
                }
            )
            writer.call(
                step,
                micro_batch,
                layer,
                rank,
                place[step, micro_batch, rank][0],
                call.tokens,
                **data,
            )
        for sequence in _sequences(traces, place):
            writer.sequence(*sequence)
        for row in _steps(traces, before):
            writer.step(*row)
        writer.close()
    except BaseException:
        writer.abandon()
        raise


def _steps(traces, last):
    """What is known of each step; of several parts the first counts."""
    rows = {}
    for trace in traces:
        for row in trace.steps.tolist():
            if last is not None and row[0] <= last:
                rows.setdefault(row[0], row)
    return [rows[step] for step in sorted(rows)]
