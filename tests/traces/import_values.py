"""import_values.py MIZAN: hostile and unusual values in recordings. What a format can hold must come out right; the rest
is refused with exit code 2 and one line. Cases for every importer (packed, empty, with a byte order mark, with CR LF) are
derived from the table of good files; cases of single formats stand in VALUES."""
import base64
import os
import subprocess
import sys

import h5py
import numpy as np

import import_table as table
from import_table import IDS, Tensor, array, document, line, lines, put, raw, route, swap, text, whole

TEXT = {"smartmoe-log", "gpt-oss-json", "laer-csv", "megatron-route", "megatron-tpe", "sglang-json", "nf4-jsonl", "vllm-logger",
        "speculative", "moe-balance", "routed-json", "esft-text", "counts-csv"}
STREAMED = TEXT | {"smartmoe-npy", "npy-ids", "hrtr", "moe-infinity", "ultraep"}  # the others are read at many places
DOCUMENTS = {"gpt-oss-json", "sglang-json"}
EMPTY_LINE = TEXT - DOCUMENTS - {"esft-text"}  # where a line is a record of its own


def contents():
    held = {}
    with h5py.File("out.h5") as f:
        f.visititems(lambda name, o: held.update({name: o[()].tolist()}) if isinstance(o, h5py.Dataset) else None)
        for group in "model", "run":
            held.update({f"{group}.{k}": v for k, v in f[group].attrs.items()})
    os.remove("out.h5")
    return held


def general(mizan, row, wanted):
    """Changes of the first file that change nothing, or that are refused, in every format."""
    name = row.files[0]
    same = [("xz", lambda: table.packed(name, "xz")), ("gzip", lambda: table.packed(name, "gzip"))]
    if row.name in TEXT:
        same += [("byte order mark", raw(name, lambda d: b"\xef\xbb\xbf" + d)),
                 ("CR LF", raw(name, lambda d: d.replace(b"\n", b"\r\n") if b"\n" in d else d + b"\r\n")),
                 ("no last newline", raw(name, lambda d: d.rstrip(b"\n") if d.endswith(b"\n") else d + b"\n"))]
    if row.name in EMPTY_LINE:
        same += [("empty lines", raw(name, lambda d: d.replace(b"\n", b"\n\n")))]
    for what, edit in same:
        with table.folder():
            row.make()
            edit()
            done = table.Import(mizan, None, row.files, row.options)
            if row.name not in STREAMED:
                wrong = table.Import(mizan, row.name, row.files, row.options + ["--force", "-q"]).refusal_fault("unpack it first")
            elif done.code:
                wrong = "refused"
            else:
                wrong = None if contents() == wanted else "another trace"
            if wrong:
                yield f"{row.name}, {what}: {wrong}: {done.said}"
    for what, data in [("empty", b""), ("one byte", b"\n"), ("NUL bytes", bytes(600)), ("deep", b"[" * 200000),
                       ("deep object", b'{"a":' * 100000), ("half a number", b"1e"), ("half of gzip", b"\x1f\x8b\x08"),
                       ("a byte order mark alone", b"\xef\xbb\xbf")]:
        with table.folder():
            row.make()
            open(name, "wb").write(data)
            done = table.Import(mizan, row.name, row.files, row.options + ["--force", "-q"])
            wrong = done.refusal_fault(name if row.name != "trt-stat" or what != "empty" else "")
            if wrong:
                yield f"{row.name}, {what}: {wrong}: {done.said}"


NUMBERS = ["NaN", "-1", "9223372036854775808", "1e308", "0.5", "null", "[[]]"]
WEIGHTS = ["NaN", "-Infinity", "1e400", "-1e-300", "1e308", "null"]
# Where a number stands in a recording: importer, the file's text around it, what must not stand there.
PLACES = [
    ("megatron-route", "router_trace_rank1.jsonl", '"top_indices": [[2,', '"top_indices": [[{},', NUMBERS + ["65536", "4294967298"]),
    ("megatron-route", "router_trace_rank1.jsonl", '"layer": 1', '"layer": {}', NUMBERS + ["65537"]),
    ("megatron-route", "router_trace_rank1.jsonl", '"step": 4', '"step": {}', NUMBERS),
    ("megatron-route", "router_trace_rank1.jsonl", '"rank": 1', '"rank": {}', NUMBERS + ["4294967297"]),
    ("megatron-route", "router_trace_rank1.jsonl", '"num_tokens": 3', '"num_tokens": {}', NUMBERS + ["0", "2", "4294967299"]),
    ("megatron-route", "router_trace_rank1.jsonl", '"topk": 2', '"topk": {}', NUMBERS + ["0", "1", "3", "4294967298"]),
    ("megatron-tpe", "rank1.jsonl", '"tpe": [[4,', '"tpe": [[{},', [n for n in NUMBERS if n != "null"] + ["4294967296", "5"]),
    ("megatron-tpe", "rank1.jsonl", '"iter": 100', '"iter": {}', NUMBERS),
    ("sglang-json", "counts.json", "[[[2,", "[[[{},", NUMBERS + ["4294967296"]),
    ("nf4-jsonl", "a.jsonl", '"0": [4,', '"0": [{},', NUMBERS + ["8", "65535"]),
    ("nf4-jsonl", "a.jsonl", '"top_k": 2', '"top_k": {}', NUMBERS + ["0", "1", "3", "5000"]),
    ("nf4-jsonl", "a.jsonl", '"layers": 2', '"layers": {}', NUMBERS + ["0", "1", "3", "65537"]),
    ("nf4-jsonl", "a.jsonl", '"n_experts": 8', '"n_experts": {}', NUMBERS + ["0", "7", "65537"]),
    ("vllm-logger", "log.jsonl", '"topk_ids": [4,', '"topk_ids": [{},', NUMBERS + ["8", "65535", "65540"]),
    ("vllm-logger", "log.jsonl", '"topk_weights": [0.75,', '"topk_weights": [{},', WEIGHTS),
    ("vllm-logger", "log.jsonl", '"token_idx": 1', '"token_idx": {}', NUMBERS + ["0"]),
    ("vllm-logger", "log.jsonl", '"layer": 1', '"layer": {}', NUMBERS + ["65537"]),
    ("speculative", "log.jsonl", '"experts": [4,', '"experts": [{},', NUMBERS + ["5", "8"]),
    ("speculative", "log.jsonl", '"gating_probs": [0.5,', '"gating_probs": [{},', WEIGHTS),
    ("moe-balance", "log.jsonl", '"origin_rows": [0,', '"origin_rows": [{},', NUMBERS + ["1048576"]),
    ("moe-balance", "log.jsonl", '"batch_id": 0', '"batch_id": {}', NUMBERS),
    ("moe-balance", "log.jsonl", '"topk_weights": [[0.75,', '"topk_weights": [[{},', WEIGHTS),
    ("routed-json", "answers.json", '"routed_experts": [[[0,', '"routed_experts": [[[{},', NUMBERS + ["8", "65535"]),
    ("routed-json", "answers.json", '"shape": [3,', '"shape": [{},', NUMBERS + ["0", "2", "6"]),
    ("gpt-oss-json", "prints.json", '"selected_experts": [4,', '"selected_experts": [{},', NUMBERS + ["5", "8"]),
    ("gpt-oss-json", "prints.json", '"selected_probs": [0.75,', '"selected_probs": [{},', WEIGHTS),
    ("ultraep", "t.manifest.json", '"num_global_logical_experts": 3', '"num_global_logical_experts": {}', NUMBERS + ["0", "2", "65537"]),
    ("ultraep", "t.manifest.json", '"chunks": 2', '"chunks": {}', NUMBERS + ["0", "3"]),
    ("trt-stat", "meta_info.json", '"num_experts": 8', '"num_experts": {}', NUMBERS + ["0", "7", "65537"]),
    ("trt-stat", "meta_info.json", '"num_experts_per_token": 2', '"num_experts_per_token": {}', NUMBERS + ["0", "1", "3"]),
    ("trt-stat", "rank0_raw.safetensors", '"100_3"', '"{}_3"', ["-1", "x", "1e3", "NaN", ""]),
    ("trt-stat", "rank0_raw.safetensors", '"shape": [3,', '"shape": [{},', ["-1", "0", "2", "9223372036854775807", "9", "[]", "1.5"]),
    ("trt-stat", "rank0_raw.safetensors", '"data_offsets": [0,', '"data_offsets": [{},', ["-1", "1", "9223372036854775807", "null"]),
    ("smartmoe-log", "table_iter1_rank1.log", "0:[[1.0,", "0:[[{},", ["NaN", "inf", "-1", "0.5", "1e308", "9223372036854775808", "x", "",
                                                                      "[1]", "2", "0x", "1 2"]),
    ("laer-csv", "loads.csv", "0,laer,m,0,0,6", "0,laer,m,0,0,{}", ["NaN", "inf", "-1", "6.5", "1e308", "9223372036854775808", "", "7", "0x"]),
    ("laer-csv", "loads.csv", "0,laer,m,0,0,6", "{},laer,m,0,0,6", ["NaN", "-1", "2", "65535", "1e30", ""]),
    ("laer-csv", "loads.csv", "0,laer,m,0,0,6", "0,laer,m,0,{},6", ["NaN", "-1", "2", "1099511627776", "1e30", ""]),
    ("counts-csv", "table.csv", "10,0,1,4", "10,0,1,{}", ["NaN", "inf", "-1", "4.5", "1e308", "9223372036854775808", "", "5"]),
    ("counts-csv", "table.csv", "10,0,1,4", "10,0,{},4", ["NaN", "-1", "0", "4", "65536", "1e30", ""]),
    ("counts-csv", "table.csv", "10,0,1,4", "10,{},1,4", ["NaN", "-1", "65537", "99999999999999999999", ""]),
    ("counts-csv", "table.csv", "10,0,1,4", "{},0,1,4", ["NaN", "-1", "11", "1e300", ""]),
    ("esft-text", "expert_weights_2.txt", "2\t3\t", "{}\t3\t", ["3", "8", "-1", "65538", "9223372036854775808", "2.0", "", "NaN"]),
    ("esft-text", "expert_weights_2.txt", "\t\t0.25", "\t\t{}", ["NaN", "-1", "inf", "1e308", "1e400", "", "x", "0.25\t0.25"]),
]


def places(mizan):
    for name, path, old, new, numbers in PLACES:
        row = table.ROWS[name]
        for number in numbers:
            with table.folder():
                row.make()
                swap(path, old, new.format(number))()
                done = table.Import(mizan, name, row.files, row.options + ["--force", "-q"])
                named = [one for one in (*row.files, "t.chunk00000") if one in done.said]
                wrong = done.refusal_fault(*named) if named else "no file is named"
                if wrong:
                    yield f"{name}, {new.format(number)}: {wrong}: {done.said}"


def bad_array(name, path, change, *words):
    return name, f"{path}: {words[0]}", array(path, change), words, None


def filled(value, place, kind):
    def change(a):
        a = a.astype(kind)
        a[place] = value
        return a
    return change


def holds(**wanted):
    """Of a trace that is imported: its datasets and attributes."""
    def look(held):
        for key, value in wanted.items():
            have = held.get(key.replace("__", "/").replace("_of_", "."))
            if have != value:
                return f"{key} is {have}, not {value}"
        return None
    return look


def many_experts(path, id):
    return lambda: lines(path, dict(meta=dict(model="m", prompt="p", steps=1, layers=1, top_k=2, n_experts=65536)),
                         dict(step=0, routed={"0": [0, id]}))


def one_token():
    lines("log.jsonl", route(token_idx=0, layer=0, topk_ids=[3, 1]))


def no_tokens():
    lines("router_trace_rank1.jsonl", *(dict(step=s, block="decoder", layer=l, rank=1, num_tokens=0, topk=2, top_indices=[])
                                        for s in (4, 5) for l in range(2)))


def duplicate_key():
    text("log.jsonl", '{"type": "route", "req_id": "r", "token_idx": 0, "layer": 0, "layer": 1, "topk_ids": [0, 1]}')


INF, NAN = np.inf, np.nan
VALUES = [  # importer, what, the edit, words of the refusal or None, a look at the trace or None, more options
    bad_array("router-logits", "logits.npy", filled(NAN, (1, 2, 3), np.float32), "layer 1, token 2: a logit is not finite"),
    bad_array("router-logits", "logits.npy", filled(INF, (0, 0, 0), np.float16), "layer 0, token 0: a logit is not finite"),
    bad_array("router-logits", "logits.npy", filled(1e308, (0, 0, 0), np.float64), "layer 0, token 0: a logit is not finite"),
    bad_array("router-logits", "logits.npy", lambda a: a[:, :0], "not a float array"),
    bad_array("moe-infinity", "matrices.npy", filled(NAN, (2, 1, 0), np.float32), "[2, 1, 0]: nan is no count"),
    bad_array("moe-infinity", "matrices.npy", filled(-2, (2, 1, 0), np.float32), "[2, 1, 0]: -2 is no count"),
    bad_array("moe-infinity", "matrices.npy", filled(1e308, (2, 1, 0), np.float64), "[2, 1, 0]: inf is no count"),
    bad_array("moe-infinity", "matrices.npy", filled(2 ** 32, (2, 1, 0), np.float64), "[2, 1, 0]:", "is no count"),
    bad_array("npy-ids", "ids.npy", filled(-1, (1, 1, 0), np.int8), "[1, 1, 0]: expert id -1 is negative"),
    bad_array("npy-ids", "ids.npy", filled(2 ** 63, (1, 1, 0), np.uint64), "element 6 is too large"),
    bad_array("npy-ids", "ids.npy", filled(2 ** 32 + 1, (1, 1, 0), np.int64), "[1, 1, 0]: expert id 4294967297", "--experts"),
    bad_array("npy-ids", "ids.npy", filled(0, (1, 1, 0), np.int32), "[1, 1, 1]: expert id 0 stands twice"),
    bad_array("npy-ids", "ids.npy", lambda a: a[:0], "the array is empty"),
    bad_array("npy-ids", "ids.npy", lambda a: a[..., :0], "the array is empty"),
    bad_array("smartmoe-npy", "history.npy", filled(-2, (0, 1, 0, 0, 0), np.int16), "step 1, layer 1, rank 0", "count -2 is negative"),
    bad_array("smartmoe-npy", "history.npy", filled(2 ** 63, (0, 1, 0, 0, 0), np.uint64), "is too large"),
    bad_array("smartmoe-npy", "history.npy", filled(2 ** 62, (0, 1, 0, 0, 0), np.int64), "step 1, layer 1, rank 0"),
    bad_array("smartmoe-npy", "history.npy", filled(3, (0, 1, 0, 0, 0), np.uint16), "no multiple of top-2"),
    ("nf4-jsonl", "65,536 experts", many_experts("a.jsonl", 65535), None, holds(pairs__expert=[0, 65535])),
    ("nf4-jsonl", "id 65536", many_experts("a.jsonl", 65536), ("expert id 65536",), None),
    ("nf4-jsonl", "id 2^63", many_experts("a.jsonl", 1 << 63), ("a.jsonl: line 2",), None),
    ("nf4-jsonl", "ids twice", line("a.jsonl", 3, put("routed", "1", [4, 4])), ("routed.1[1]: expert id 4 stands twice",), None),
    ("nf4-jsonl", "one id too many", line("a.jsonl", 3, put("routed", "1", [4, 5, 6])), ("routed.1 does not list 2 expert ids",), None),
    ("vllm-logger", "one token", one_token, None, holds(pairs__expert=[3, 1], calls__tokens=[1])),
    ("vllm-logger", "more ids", line("log.jsonl", 3, put("topk_ids", [1, 2, 3])), ("topk_ids does not list 2 expert ids",), None),
    ("vllm-logger", "fewer ids", line("log.jsonl", 3, put("topk_ids", [1])), ("topk_ids does not list 2 expert ids",), None),
    ("vllm-logger", "a key twice", duplicate_key, ("line 1", "duplicate"), None),
    ("vllm-logger", "weights that are zero", line("log.jsonl", 3, put("topk_weights", [0, 0.0])), None,
     holds(model_of_weights_normalized=0)),
    ("vllm-logger", "a weight of 1e30", line("log.jsonl", 3, put("topk_weights", [1e30, 0.5])), None, holds(calls__tokens=[3, 3])),
    ("vllm-logger", "a sequence's name of 1 MB", line("log.jsonl", 3, put("req_id", "x" * 1000000)), None, holds(calls__tokens=[2, 2])),
    ("vllm-logger", "token 2^62", line("log.jsonl", 3, put("token_idx", (1 << 62) - 1)), None, holds(calls__tokens=[2, 2])),
    ("megatron-route", "no token on a rank", no_tokens, None, holds(calls__tokens=[3, 0] * 4)),
    ("megatron-route", "offsets beyond 2^31", lambda: None, ("is not RANK:NUMBER",), None, "--layer-offsets", "0:9223372036854775807"),
    ("megatron-route", "ids twice", line("router_trace_rank1.jsonl", 2, put("top_indices", 1, [4, 4])),
     ("top_indices[1][1]: expert id 4 stands twice",), None),
    ("megatron-route", "--experts 65536", lambda: None, None, holds(model_of_experts=65536), "--experts", "65536"),
    ("megatron-route", "--experts 65537", lambda: None, ("--experts",), None, "--experts", "65537"),
    ("routed-json", "token counts beyond 2^63", line("answers.json", 1, put("usage", dict(prompt_tokens=(1 << 63) - 1, completion_tokens=3))),
     ("prompt_tokens",), None),
    ("routed-json", "negative token counts", line("answers.json", 1, put("usage", dict(prompt_tokens=-5, completion_tokens=3))),
     ("prompt_tokens",), None),
    ("routed-json", "ragged rows", line("answers.json", 1, put("choices", 0, "routed_experts", 1, [[0, 1]])), ("row 1 does not list 2 layers",),
     None),
    ("sglang-json", "ragged layers", whole("counts.json", put("logical_count", 1, [[1, 1, 2]])), ("logical_count[1] does not list 2 layers",),
     None),
    ("sglang-json", "NaN is no JSON", swap("counts.json", "[[[2,", "[[[NaN,"), ("logical_count[0]: not valid JSON",), None),
    ("sglang-json", "a comma too many", swap("counts.json", "]]]", "]],]"), ("logical_count[2]: not valid JSON",), None),
    ("sglang-json", "the list twice", swap("counts.json", "{", '{"logical_count": [], '), ("duplicate",), None),
    ("sglang-json", "the key within a text", swap("counts.json", "{", '{"a\\"logical_count": "\\"logical_count\\": [", '), None,
     holds(counts=[[2, 2, 0], [1, 1, 2], [4, 0, 4], [3, 3, 2]])),
    ("sglang-json", "rubbish behind the document", raw("counts.json", lambda d: d + b"x"), ("not valid JSON",), None),
    ("gpt-oss-json", "positions far away", swap("prints.json", '"token_6"', '"token_9223372036854775807"'), ("router_data[1]",), None),
    ("gpt-oss-json", "no token", whole("prints.json", put("router_data", [])), ("no router_data, or no token in it",), None),
    ("gpt-oss-json", "a token that is a number", whole("prints.json", put("router_data", 1, 5)), ("router_data[1]: not an object",), None),
    ("moe-balance", "a device of its own", line("log.jsonl", 1, put("origin_rows", [0, 1, 1048575])),
     ("log.jsonl", "step 0, micro-batch 0, layer 1, rank 0: another number of tokens"), None),
    ("moe-balance", "no token", line("log.jsonl", 1, put("topk_experts", [])), ("lists no token",), None),
    ("counts-csv", "quoted fields", swap("table.csv", "10,0,1,4", '"10","0","1","4"'), None, holds(calls__step=[10, 10, 20, 20])),
    ("counts-csv", "an open quote", swap("table.csv", "10,0,1,4", '"10,0,1,4'), ("line 3",), None),
    ("hrtr", "65,536 experts", lambda: table.hrtr(np.where(IDS == 7, 65535, IDS), (0x52545248, 1, 4, 65536, 2, 2)), None,
     holds(model_of_experts=65536)),
    ("hrtr", "65,537 experts", lambda: table.hrtr(head=(0x52545248, 1, 4, 65537, 2, 2)), ("65537 experts", "not plausible"), None),
    ("hrtr", "2^32 - 1 layers", lambda: table.hrtr(head=(0x52545248, 1, 2 ** 32 - 1, 8, 2, 2 ** 32 - 1)), ("not plausible",), None),
    ("hrtr", "one token", lambda: table.hrtr(IDS[:1]), None, holds(pairs__expert=[0, 1, 2, 3])),
    ("hrtr", "ids twice", lambda: table.hrtr(np.where(IDS == 7, 2, IDS)), ("token 2, layer 0, place 1", "stands twice"), None),
    ("imatrix", "NaN", lambda: table.imatrix(lambda t: t.update({n: a * np.float32(NAN) for n, a in t.items()})), ("is no exact count",), None),
    ("imatrix", "Infinity", lambda: table.imatrix(lambda t: t.update({n: a + np.float32(INF) for n, a in t.items()})), ("is no exact count",), None),
    ("slime-pt", "id -1", lambda: table.slime_pt(lambda r: r["samples"][0]["rollout_routed_experts"].array.__setitem__((1, 0, 0), -1)),
     ("samples[0]: [1, 0, 0]: expert id -1 is negative",), None),
    ("slime-pt", "no token", lambda: table.slime_pt(lambda r: [s.update(rollout_routed_experts=Tensor(IDS[:0])) for s in r["samples"]]),
     ("no sample has rollout_routed_experts",), None),
    ("slime-pt", "one token", lambda: table.slime_pt(lambda r: r["samples"][0].update(tokens=[1, 2], rollout_routed_experts=Tensor(IDS[:1]))),
     None, holds(sequences__tokens=[1, 3])),
    ("verl-pt", "id -1", lambda: table.verl_pt(lambda r: r["routed_experts"].array.__setitem__((0, 1, 0, 0), -1)), ("is negative",), None),
    ("verl-pt", "ids twice", lambda: table.verl_pt(lambda r: r["routed_experts"].array.__setitem__((0, 1, 0, 0), 5)), ("stands twice",), None),
    ("trt-stat", "id -1", lambda: table.trt_stat(lambda a: a["100_3"].__setitem__((1, 0), -1)), ("is negative",), None),
    ("trt-stat", "ids twice", lambda: table.trt_stat(lambda a: a["100_3"].__setitem__((1, 0), 5)), ("stands twice",), None),
    ("sglang-stat", "2^32", lambda: table.sglang_stat(lambda r: r.update(logical_count=Tensor(np.full((1, 2, 3), 1 << 32)))), ("is no count",), None),
    ("sglang-records", "a pass of 2^62", lambda: table.sglang_records(lambda r: r["records"][1].update(forward_pass_id=1 << 62)), None,
     holds(calls__step=[3, 3, 3, 3, 4, 4, 1 << 62, 1 << 62])),
    ("sglang-records", "a pass beyond 2^63", lambda: table.sglang_records(lambda r: r["records"][1].update(forward_pass_id=1 << 63)),
     ("beyond 64 bits",), None),
    ("sglang-records", "a rank of 2^40", lambda: table.sglang_records(lambda r: r["records"][1].update(rank=1 << 40)),
     ("records[1]", "no forward_pass_id or rank"), None),
    ("ultraep", "layers of 2^62", lambda: table.ultraep_chunk(1, layers=np.array([3, 4, 3, 1 << 62])), ("of 3 layers",), None),
    ("ultraep", "loads of 2^32", lambda: table.ultraep_chunk(1, pre_logical_loads=np.full((4, 3), 1 << 32)), ("is no count",), None),
    ("smartmoe-log", "nested lists", swap("table_iter1_rank1.log", "[[1.0", "[[[[[[1.0"), ("not a list of lists",), None),
    ("smartmoe-log", "a hundred thousand brackets", raw("table_iter1_rank1.log", lambda d: b"0:" + b"[" * 100000), ("line 1",), None),
    ("esft-text", "ragged", swap("expert_weights_2.txt", "2\t3\t", "2\t"), ("are no whole tokens of top-2",), None),
    ("laer-csv", "quoted fields", swap("loads.csv", "0,laer,m,0,0,6", '0,"laer",m,0,0,6'), None, holds(model_of_experts=2)),
]


def answers(layers, weights=(0.75, 0.25)):
    table.document("prints.json", dict(router_data=[
        {"token_5": {f"layer_{l}": dict(selected_experts=[1, 0], selected_probs=list(weights)) for l in range(layers)}}]))


def nf4_layers(*names, **meta):
    lines("a.jsonl", dict(meta=dict(dict(steps=1, layers=len(names), top_k=2, n_experts=8), **meta)),
          dict(step=0, routed={name: [2 * i, 2 * i + 1] for i, name in enumerate(names)}))


def counts_table(header, *rows):
    return lambda: text("table.csv", header, *rows)


def layers_of_counts(column, *of_layer):
    """Two steps; `of_layer` is what each of four experts of a layer has."""
    return counts_table(f"step,layer,expert,{column}", *(f"{s},{l},{e},{n}" for s in range(2) for l, n in enumerate(of_layer)
                                                         for e in range(4)))


def laer_loads(*loads):
    return lambda: text("loads.csv", "rank,method,model_name,layer,iter,token_num",
                        *(f"{r},laer,m,0,0,{load}" for r, load in enumerate(loads)))


def header_alone(path, descr, shape, data=b""):
    """A .npy file that states more than it holds."""
    head = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return lambda: open(path, "wb").write(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode() + data)


def dense_with_weights():
    ids = np.concatenate([IDS[:, :1] * 0, IDS], 1)  # a dense layer and a filler, which have no weights
    ids[0] = 0
    weights = np.full(ids.shape, 0.5, np.float32)
    weights[:, 0] = weights[0] = 0
    np.save("ids.npy", ids)
    np.save("weights.npy", weights)


def bounds(*rows):
    return lambda: text("s.csv", "first_row,num_tokens", *rows)


def both(*edits):
    return lambda: [edit() for edit in edits]


def imatrix_of(**tensors):
    return lambda: table.gguf("m.gguf", {f"blk.{n}_exps.weight.counts": np.full((4, 1), v, np.float32) for n, v in tensors.items()})


VALUES += [
    ("gpt-oss-json", "a first position of 2^63 - 1", swap("prints.json", '"token_5"', '"token_9223372036854775807"'), ("router_data[0]",), None),
    ("gpt-oss-json", "a position behind a blank", swap("prints.json", '"token_5"', '"token_ 5"'), ("router_data[0]",), None),
    ("gpt-oss-json", "another top-k", lambda: None, ("top-2 in the file, but --top-k 3",), None, "--top-k", "3"),
    ("gpt-oss-json", "weights over all experts", lambda: answers(2, (0.3, 0.1)), None, holds(model_of_weights_normalized=0)),
    ("gpt-oss-json", "as many layers as gpt-oss-20b", lambda: answers(24), None,
     holds(model_of_name=b"unknown", model_of_experts=8, model_of_hidden=7), "--hidden", "7"),
    ("gpt-oss-json", "gpt-oss-20b", lambda: answers(24), None,
     holds(model_of_name=b"gpt-oss-20b", model_of_weights_normalized=1, model_of_hidden=7, model_of_intermediate=2880),
     "--experts", "32", "--hidden", "7"),
    ("nf4-jsonl", "a layer under two names", lambda: nf4_layers("1", "01"), ('routed: "1" and "01" are one layer',), None),
    ("nf4-jsonl", "layers with a gap", lambda: nf4_layers("1", "3", top_k_native=1), None,
     holds(run_of_import_notes=b"phase=decode by format; layers=2 of those up to 3; ids within a token=ascending; native top-k=1", model_of_name=b"unknown"),
     "--top-k", "2"),
    ("nf4-jsonl", "more experts per token than there are", lambda: nf4_layers("0", n_experts=1), ("a.jsonl: line 1: top-2 of 1 experts",), None),
    ("counts-csv", "epochs from 1, steps that go on", counts_table("epoch,step,layer,expert,count", "1,0,0,0,2", "1,0,0,1,2", "2,1,0,0,2",
                                                                   "2,1,0,1,2"), None, holds(calls__step=[0, 1])),
    ("counts-csv", "epochs alone", counts_table("epoch,layer,expert,count", "1,0,0,2", "1,0,1,2", "2,0,0,2", "2,0,1,2"), None,
     holds(calls__step=[1, 2], run_of_step=b"iteration"), "--phase", "train"),
    ("counts-csv", "floats", swap("table.csv", "10,0,1,4", "10.0,0.0,1.0,4.0"), None, holds(calls__step=[10, 10, 20, 20])),
    ("counts-csv", "a share that is rounded up beyond 1/k", counts_table("layer,expert,prob", "0,0,0.504", "0,1,0.3", "0,2,0.198"), None,
     holds(counts=[[100, 60, 40]]), "--tokens", "100", "--phase", "train"),
    ("counts-csv", "dense layers", layers_of_counts("count", 0, 2, 2), None, holds(calls__step=[0, 0, 1, 1], counts=[[2] * 4] * 4)),
    ("counts-csv", "dense layers before counts that could be shares", layers_of_counts("token_distr", 0, 2, 2), None,
     holds(counts=[[2] * 4] * 4)),
    ("counts-csv", "zeros alone", layers_of_counts("count", 0, 0), ("table.csv: count is 0 everywhere",), None),
    ("counts-csv", "more experts per token than there are", lambda: None, ("table.csv: --top-k 5, but there are 4 experts",), None,
     "--top-k", "5", "--dropped"),
    ("laer-csv", "zeros alone", laer_loads(0, 0), ("loads.csv: no token in it",), None),
    ("laer-csv", "fewer ranks than experts per token", laer_loads(4), ("loads.csv: top-2", "one group of experts per rank: 1"), None),
    ("laer-csv", "more than 32 bits of pairs", laer_loads(1 << 33, 1 << 33), ("loads.csv: call of step 0",), None),
    ("laer-csv", "65,536 ranks", laer_loads(*[4] * 65536), ("loads.csv: 1 layers x 65536 ranks",), None),
    ("hrtr", "more than memory holds of one token", lambda: table.hrtr(head=(0x52545248, 1, 65536, 65536, 4096, 65536)),
     ("t.hrtr: 1 tokens of 65536 layers x top-4096",), None),
    ("moe-balance", "weights that sum to 1", lambda: None, None, holds(model_of_weights_normalized=1)),
    ("moe-balance", "weights that do not", line("log.jsonl", 4, put("topk_weights", 2, [0.75, 0.5])), None,
     holds(model_of_weights_normalized=0)),
    ("moe-balance", "weights that come later", line("log.jsonl", 1, put("topk_weights", None)),
     ('line 2: "topk_weights", which the first line has not',), None),
    ("moe-balance", "empty lines alone", lambda: text("log.jsonl", "", ""), ("log.jsonl: no line in it",), None),
    bad_array("moe-infinity", "matrices.npy", filled(2 ** 24, (2, 1, 0), np.float64), "[2, 1, 0]: 16777216 is no count"),
    bad_array("moe-infinity", "matrices.npy", filled(2048, (2, 1, 0), np.float16), "[2, 1, 0]: 2048 is no count"),
    ("moe-infinity", "a matrix beyond memory", header_alone("matrices.npy", "<f4", (1, 65536, 65536)), ("are not plausible",), None),
    ("npy-ids", "weights of dense layers and fillers are none", dense_with_weights, None,
     holds(model_of_weights_normalized=1, calls__tokens=[2, 2]), "--weights", "weights.npy"),
    ("npy-ids", "no sequence", bounds(), ("ids.npy: no token in it",), None, "--sequences", "s.csv"),
    ("npy-ids", "a sequence beyond memory", both(bounds(f"0,{1 << 40}"), header_alone("ids.npy", "<i4", (1 << 40, 1, 8),
                                                                                    np.arange(800, dtype="<i4").tobytes())),
     ("ids.npy: 1099511627776 tokens of 1 layers x top-8",), None, "--experts", "1000", "--sequences", "s.csv"),
    ("esft-text", "a NUL byte", raw("expert_weights_2.txt", lambda d: d.replace(b"0.25", b"0\x00.25", 1)), ("line 1: a NUL byte in it",), None),
    ("megatron-tpe", "a line twice", raw("rank1.jsonl", lambda d: d.replace(b"\n", b"\n" + d.splitlines(True)[0], 1)),
     ("rank1.jsonl: iteration 100", "recorded twice"), None),
    ("megatron-tpe", "no micro-batch", lambda: [lines(f"rank{r}.jsonl", dict(iter=1 + r, layer=0, tpe=[[2, 2]] * r)) for r in range(2)],
     ('rank0.jsonl: line 1: "tpe" lists no micro-batch',), None, "--ep-size", "1"),
    ("megatron-tpe", "zeros alone", lambda: [lines(f"rank{r}.jsonl", dict(iter=1, layer=0, tpe=[[0, 0]])) for r in range(2)],
     ("rank1.jsonl: no token in it",), None),
    ("imatrix", "counts of different tensors", imatrix_of(**{"0.ffn_gate": 2, "1.ffn_up": 2}), ("2 layers have counts", "only 1 of ffn_gate_exps"),
     None),
    ("imatrix", "a negative layer", imatrix_of(**{"-1.ffn_gate": 2}), ("no tensor blk.N",), None),
    ("imatrix", "zeros alone", imatrix_of(**{"0.ffn_gate": 0}), ("m.gguf: all counts are 0",), None),
    ("imatrix", "more experts per token than there are", lambda: None, ("m.gguf: --top-k 5, but there are 4 experts",), None, "--top-k", "5"),
]


def answer(**members):
    return lambda: lines("answers.json", members)


def choice(routed, **members):
    return answer(choices=[dict(routed_experts=routed)], **members)


def text64(data):
    return base64.b64encode(data).decode()


def masked(kind):
    ids = IDS.copy()
    ids[1] = -1
    return table.npy_bytes(ids.astype(kind))  # the largest number where there is no sign


def batch(*sequences):
    return lambda: table.verl_pt(lambda root: root.update(routed_experts=Tensor(np.stack(sequences).astype(np.int16))))


def every_record(change):
    return lambda: table.sglang_records(lambda root: [change(record) for record in root["records"]], ranks=(0, 1))


def passes_of_experts():
    def counts(root):
        for record in root["records"]:
            del record["topk_ids_of_layer"]
            record["global_physical_count"] = Tensor(np.array([[2, 2, 2, 2, 0, 0], [1, 1, 2, 2, 1, 1]]))
        if root["records"][0]["rank"] == 1:
            root["records"].pop()
    table.sglang_records(counts, ranks=(0, 1))


def logits_among(**others):
    def edit():
        logits = np.linspace(-2, 2, 24).reshape(2, 3, 4).astype(np.float32)
        np.savez("l.npz", **{others.pop("name", "logits"): logits}, **others)
        os.replace("l.npz", "logits.npy")
    return edit


def log(path, *rows):
    return lambda: lines(path, *rows)


def said(**members):
    return dict(dict(dataset="d", problem_id=1, layer=0, token_idx=0, experts=[1, 2]), **members)


def profiled(name):
    return [route(req_id=name, token_idx=t, layer=0, topk_ids=[1, 2]) for t in range(40)] + \
           [route(req_id=name, token_idx=99, layer=0, topk_ids=[1, 3])]


def bare(**members):
    return {k: v for k, v in route(**members).items() if k != "topk_weights"}


FLAT = text64(IDS.astype("<i4").tobytes())
def overlapping_arrays():
    """Two keys of a safetensors header that name the same bytes."""
    table.trt_stat()
    raw("rank0_raw.safetensors", lambda d: d.replace(b"[24, 48]", b"[0, 24] "))()


def overlapping_tensors():
    """The second tensor of a GGUF header at the place of the first: the offset is the last member before the third name."""
    name = b"blk.1.ffn_down_exps.weight.counts"
    raw("m.gguf", lambda d: d[:d.index(name) - 16] + bytes(8) + d[d.index(name) - 8:])()


VALUES += [
    ("counts-csv", "a column twice", swap("table.csv", "step,layer,expert,count", "count,layer,expert,count"),
     ("table.csv: line 1: two columns named count: rename one",), None),
    ("counts-csv", "two columns that are not read", raw("table.csv", lambda d: d.replace(b"\n", b",x,x\n")), None, holds(calls__tokens=[6] * 4)),
    ("npy-ids", "more ids of a token than memory holds", header_alone("ids.npy", "<i4", (70000, 65536, 4096)),
     ("65536 layers and top-4096 are not plausible",), None),
    ("trt-stat", "arrays that share bytes", overlapping_arrays, ("the arrays", "overlap: the header is damaged"), None),
    ("imatrix", "tensors that share bytes", overlapping_tensors, ("overlaps a tensor before it",), None),
    ("routed-json", "the same rows in two places", answer(meta_info=dict(routed_experts=FLAT), sgl_ext=dict(routed_experts=FLAT)),
     ("answer 1: routed experts stand in it twice",), None, "--layers", "2", "--top-k", "2"),
    ("routed-json", "no data in int8", lambda: choice(text64(masked(np.int8)))(), None, holds(calls__tokens=[2, 2])),
    ("routed-json", "no id in uint16", lambda: choice(text64(masked(np.uint16)))(), ("answer 1: expert id 65535",), None),
    ("routed-json", "bytes behind a .npy", lambda: choice(text64(table.npy_bytes(IDS) + b"x"))(), ("no whole integer array",), None),
    ("routed-json", "a negative shape", choice(dict(data="AAAA", shape=[-1, 1, 1])), ("shape [-1, 1, 1] does not fit 3 bytes",), None),
    ("routed-json", "a start behind the end", answer(meta_info=dict(routed_experts=IDS.tolist(), prompt_tokens=3, completion_tokens=1,
                                                                    routed_experts_start_len=5)),
     ("routed_experts_start_len 5, but there are 4 tokens",), None),
    ("routed-json", "one expert and a dense layer of -1", choice([[[-1], [1]], [[-1], [0]]]), None, holds(pairs__expert=[1, 0])),
    ("routed-json", "fillers alone", choice([[[-1]], [[-1]]]), ("answers.json: no token in it",), None, "--dense-layers", "none"),
    ("routed-json", "a model's name that is no text", choice(IDS.tolist(), model="a\nb"), None, holds(model_of_name=b"unknown")),
    ("slime-pt", "more rows than tokens", lambda: table.slime_pt(lambda r: r["samples"][1].update(tokens=[1, 2])),
     ("samples[1]: 2 tokens and 3 rows",), None),
    ("slime-pt", "a first sample of zeros", lambda: table.slime_pt(lambda r: r["samples"][0].update(rollout_routed_experts=Tensor(0 * IDS))),
     None, holds(sequences__tokens=[3])),
    ("verl-pt", "a first sequence of zeros", batch(0 * IDS, IDS), None, holds(sequences__tokens=[3])),
    ("verl-pt", "a first sequence of padding", batch(0 * IDS, IDS), None, holds(sequences__tokens=[3]), "--padding", "left"),
    ("verl-pt", "fillers alone", batch(IDS[:1]), ("batch.pt: no token in it",), None, "--filler-last", "yes"),
    ("sglang-json", "a file of steps and one without", lambda: document("b.json", dict(logical_count=[[2, 2, 0], [1, 1, 2]])),
     ("b.json: counts of a whole run, unlike",), None, "b.json"),
    ("sglang-json", "layers that differ", whole("counts.json", put("logical_count", 1, 1, [4, 4, 4])), ("counts.json: step 1",), None),
    ("sglang-json", "more experts per token than there are", lambda: None, ("counts.json: --top-k 5, but there are 3 experts",), None,
     "--top-k", "5"),
    ("sglang-records", "no bounds", every_record(lambda r: r.update(extend_seq_lens=None)), None, holds(sequences__tokens=None)),
    ("sglang-records", "bounds of another kind", every_record(lambda r: r.update(extend_seq_lens=Tensor(np.array([2, 1])))),
     ("forward pass 3, rank 0: extend_seq_lens is no list",), None),
    ("sglang-records", "65 places", every_record(lambda r: r.update(topk_ids_of_layer=Tensor(np.zeros((2, 3, 65), np.int32)))),
     ("65 places per token",), None),
    ("sglang-records", "experts of a pass that a rank lacks", passes_of_experts, None,
     holds(calls__step=[3, 3], counts=[[4, 4, 4, 4], [4, 8, 2, 2]]), "--top-k", "2", "--ranks-hold", "experts"),
    ("trt-stat", "an iteration beyond 2^63", lambda: table.trt_stat(lambda a: a.update({"9" * 20 + "_3": a.pop("100_3")})),
     ("is not {iteration}_{layer}",), None),
    ("trt-stat", "a sign in a key", lambda: table.trt_stat(lambda a: a.update({"+100_3": a.pop("100_3")})),
     ("the key +100_3 is not {iteration}_{layer}",), None),
    ("trt-stat", "two tables of facts", lambda: document("m.json", dict(num_experts=9, num_experts_per_token=2)),
     ("m.json: a second .json file",), None, "m.json"),
    ("trt-stat", "a key twice", swap("rank0_raw.safetensors", '"101_3"', '"100_3"'), ("rank0_raw.safetensors", "duplicate"), None),
    ("ultraep", "a record twice", lambda: table.ultraep_chunk(1, microbatches=np.array([0, 0, 1, 1])),
     ("t.manifest.json: step 0, micro-batch 0, layer 3, rank 0: recorded twice",), None),
    ("router-logits", "arrays of other types beside", logits_among(mask=np.ones(3, bool), names=np.array(["a"])), None,
     holds(calls__tokens=[3, 3])),
    ("router-logits", "a name of 150 bytes", logits_among(name="x" * 150), ("an array with a name of 150 bytes",), None),
    ("smartmoe-npy", "a step beyond memory", header_alone("history.npy", "|u1", (1, 1 << 16, 1 << 20, 1, 1 << 16), bytes(64)),
     ("history.npy", "truncated"), None),
    ("smartmoe-npy", "zeros alone", array("history.npy", lambda a: 0 * a), ("history.npy: no token in it",), None),
    ("smartmoe-log", "a count of 2^32", swap("table_iter1_rank1.log", "[1.0, 1.0", "[4294967296.0, 2.0"),
     ("table_iter1_rank1.log: line 1", "from 0 to 2^32 - 1"), None),
    ("speculative", "weights that come later", log("log.jsonl", said(), said(token_idx=1, gating_probs=[0.5, 0.5])),
     ('line 2: "gating_probs", which the first row has not',), None),
    ("vllm-logger", "weights that come later", log("log.jsonl", bare(token_idx=0, layer=0, topk_ids=[1, 2]),
                                                   route(token_idx=1, layer=0, topk_ids=[1, 2])),
     ('line 2: "topk_weights", which the first row has not',), None),
    ("vllm-logger", "other experts than --experts", line("log.jsonl", 1, put("num_experts", 64)), ("64 experts in the file, but --experts 8",),
     None),
    ("vllm-logger", "a second meta line", log("log.jsonl", route(token_idx=0, layer=0, topk_ids=[1, 2]), dict(type="meta", top_k=4)),
     ('line 2: "top_k" 4',), None),
    ("vllm-logger", "a meta line alone", log("log.jsonl", dict(type="meta", top_k=2)), ("log.jsonl: no row in it",), None),
    ("vllm-logger", "all rows skipped", lambda: None, ("no row but the 6 left out: pass a smaller --skip-rows",), None,
     "--skip-rows", "9"),
    ("vllm-logger", "two servers' profiling", both(log("log.jsonl", *profiled("a")), log("b.jsonl", *profiled("b"))), None,
     holds(pairs__expert=[1, 3, 1, 3]), "b.jsonl"),
    ("vllm-logger", "few equal rows are no profiling", log("log.jsonl", *profiled("a")[20:]), None, holds(calls__tokens=[21])),
]


def values(mizan):
    for name, what, edit, words, look, *more in VALUES:
        row = table.ROWS[name]
        with table.folder():
            row.make()
            edit()
            force = [] if name == "nf4-jsonl" else ["--force"]
            done = table.Import(mizan, name, row.files, row.options + more + force + ["-q"])
            if words:
                wrong = done.refusal_fault(*words)
            elif done.code:
                wrong = "refused"
            else:
                wrong = None if subprocess.run([mizan, "trace", "check", "-q", "out.h5"], stdout=subprocess.DEVNULL).returncode == 0 else "not sound"
                wrong = wrong or look(contents())
            if wrong:
                yield f"{name}, {what}: {wrong}: {done.said}"


def check(mizan):
    faults = table.missing_rows(mizan, table.ROWS, "good files")
    for row in table.ROWS.values():
        with table.folder():
            row.make()
            done = table.Import(mizan, None, row.files, row.options)
            wanted = contents() if done.code == 0 else None
        faults += general(mizan, row, wanted)
    return faults + list(places(mizan)) + list(values(mizan))


if __name__ == "__main__":
    found = check(sys.argv[1])
    sys.exit("\n".join(found) if found else 0)
