"""import_faults.py MIZAN [IMPORTER...]: every importer of the registry against five faults of a file: truncated, a
wrong type, an id out of range, a missing field, another format under the right name. Each must be refused with
exit code 2 and one line that names the file, the place, what is wrong and what is to be done, and leave nothing
behind. A fault that a format cannot have says why. An importer without its row fails the test."""
import os
import shutil
import sys

import numpy as np

import import_table as table
from import_table import Tensor, array, cut, drop, line, put, swap, whole, without

FAULTS = "truncated", "wrong type", "id out of range", "missing field", "another format"


class Cannot:
    """Why a format cannot have the fault."""

    def __init__(self, reason):
        self.reason = reason


class Bad:
    """An edit of the good files, and what the message must hold; `name`: the file it must name."""

    def __init__(self, edit, *words, name=None):
        self.edit, self.words, self.name = edit, words, name


def other(importer, says):
    """The first file of another importer's row under the name of this row's first file. With --force the importer
    itself must say what is missing (`says`)."""
    def edit(name):
        table.ROWS[importer].make()
        shutil.move(table.ROWS[importer].files[0], name + ".other")
        shutil.move(name + ".other", name)
    return Bad(edit, says)


def npz_of_integers():
    np.savez("logits", a=np.arange(3))
    os.replace("logits.npz", "logits.npy")


POSITIONS = Cannot("counts stand at the place of their expert: there are no ids")

CELLS = {
    "smartmoe-log": {
        "truncated": [Bad(cut("table_iter1_rank1.log", -12), "line 2", "not a list of lists", "truncated"),
                      Bad(drop("table_iter1_rank1.log", 2), "1 layers x", "but the first file has", "truncated")],
        "wrong type": Bad(swap("table_iter1_rank1.log", "1.0", "one"), "line 1", "whole numbers"),
        "id out of range": Bad(swap("table_iter1_rank1.log", "1:", "7:"), "line 2", "expected '1:[[...]]'"),
        "missing field": Bad(swap("table_iter1_rank1.log", "[2.0, 2.0, 0.0]", "[2.0, 2.0]"), "line 1",
                             "micro-batch 1 lists 2 experts, not 3"),
        "another format": other("counts-csv", "expected '0:[[...]]'"),
    },
    "smartmoe-npy": {
        "truncated": Bad(cut("history.npy", -5), "ends", "truncated"),
        "wrong type": Bad(array("history.npy", lambda a: a * 1.5), "not an integer array [steps, layers, ranks"),
        "id out of range": POSITIONS,
        "missing field": Bad(swap("history.npy", "'shape'", "'size_'"), "header lacks descr, fortran_order or shape"),
        "another format": other("npy-ids", "not an integer array [steps, layers, ranks"),
    },
    "npy-ids": {
        "truncated": Bad(cut("ids.npy", -5), "ends", "truncated"),
        "wrong type": Bad(array("ids.npy", lambda a: a * 1.5), "not an integer array [tokens, layers, top_k]"),
        "id out of range": Bad(array("ids.npy", lambda a: a + (a == 7)), "[2, 0, 1]", "expert id 8", "--experts"),
        "missing field": Bad(swap("ids.npy", "'descr'", "'dtype'"), "header lacks descr, fortran_order or shape"),
        "another format": other("router-logits", "not an integer array [tokens, layers, top_k]"),
    },
    "gpt-oss-json": {
        "truncated": Bad(cut("prints.json", -30), "ends within router_data[2]", "truncated"),
        "wrong type": Bad(whole("prints.json", put("router_data", 1, "token_6", "layer_1", "selected_experts", 0, "a")),
                          "router_data[1].token_6.layer_1", "selected_experts[0]", "is not a whole number"),
        "id out of range": Bad(whole("prints.json", put("router_data", 1, "token_6", "layer_1", "selected_experts", 0, 8)),
                               "router_data[1].token_6.layer_1", "selected_experts[0]", "expert id 8", "--experts"),
        "missing field": Bad(whole("prints.json", without("router_data", 1, "token_6", "layer_1", "selected_probs")),
                             "router_data[1].token_6.layer_1", "selected_probs must list 2 entries"),
        "another format": other("sglang-json", "no router_data"),
    },
    "laer-csv": {
        "truncated": [Bad(cut("loads.csv", -6), "line 9", "this row does not"),
                      Bad(drop("loads.csv", 9), "7 rows for 2 iterations x 2 layers x 2 ranks", "missing")],
        "wrong type": Bad(swap("loads.csv", "0,laer,m,0,0,6", "0,laer,m,0,0,six"), "line 2", "token_num is 'six'",
                          "not a whole number"),
        "id out of range": Bad(swap("loads.csv", "0,laer,m,0,0,6", "70000,laer,m,0,0,6"), "line 2", "rank is '70000'",
                               "from 0 to 65535"),
        "missing field": Bad(swap("loads.csv", "iter", "iteration"), "line 1", "no column named iter"),
        "another format": other("counts-csv", "no column named rank"),
    },
    "megatron-route": {
        "truncated": [Bad(cut("router_trace_rank1.jsonl", -30), "line 4", "no valid JSON", "truncated"),
                      Bad(drop("router_trace_rank1.jsonl", 4), "step 5", "rank 1", "1 of 2 layers", "incomplete")],
        "wrong type": Bad(line("router_trace_rank1.jsonl", 2, put("top_indices", 1, 0, "3")), "line 2",
                          "top_indices[1][0]", "is not a whole number"),
        "id out of range": Bad(line("router_trace_rank1.jsonl", 2, put("top_indices", 1, 0, 8)), "line 2",
                               "top_indices[1][0]: expert id 8", "--experts"),
        "missing field": Bad(line("router_trace_rank1.jsonl", 2, without("top_indices")), "line 2",
                             'no member "top_indices"'),
        "another format": other("megatron-tpe", 'no member "step"'),
    },
    "megatron-tpe": {
        "truncated": [Bad(cut("rank1.jsonl", -10), "line 4", "no valid JSON", "truncated"),
                      Bad(drop("rank1.jsonl", 4), "iteration 200, layer 1", "place 1 of expert group 0", "missing")],
        "wrong type": Bad(line("rank1.jsonl", 2, put("tpe", 1, 0, "2")), "line 2", "tpe[1]: entry 0 is not a count"),
        "id out of range": Bad(line("rank1.jsonl", 2, put("layer", 70000)), "line 2", '"layer"', "from 0 to 65536"),
        "missing field": Bad(line("rank1.jsonl", 2, without("tpe")), "line 2", 'no member "tpe"'),
        "another format": other("megatron-route", 'no member "iter"'),
    },
    "sglang-json": {
        "truncated": Bad(cut("counts.json", -8), "ends within logical_count[1]", "truncated"),
        "wrong type": Bad(whole("counts.json", put("logical_count", 1, 0, 2, "4")), "logical_count[1][0]: entry 2",
                          "is not a count"),
        "id out of range": POSITIONS,
        "missing field": [Bad(whole("counts.json", lambda v: v.update(count=v.pop("logical_count"))),
                              'no member "logical_count"'),
                          Bad(whole("counts.json", lambda v: v["logical_count"][1][0].pop()), "logical_count[1][0]",
                              "as many entries")],
        "another format": other("gpt-oss-json", 'no member "logical_count"'),
    },
    "nf4-jsonl": {
        "truncated": [Bad(cut("a.jsonl", -10), "line 4", "no valid JSON", "truncated"),
                      Bad(drop("a.jsonl", 4), "2 tokens, but the meta line says 3", "truncated")],
        "wrong type": Bad(line("a.jsonl", 3, put("routed", "1", 0, "1")), "line 3", "routed.1[0]", "is not a whole number"),
        "id out of range": Bad(line("a.jsonl", 3, put("routed", "1", 0, 8)), "line 3", "routed.1[0]: expert id 8",
                               "--experts"),
        "missing field": Bad(line("a.jsonl", 3, without("routed", "1")), "line 3", "not an object of 2 layers"),
        "another format": other("vllm-logger", 'not a line {"meta"'),
    },
    "vllm-logger": {
        "truncated": Bad(cut("log.jsonl", -10), "line 7", "no valid JSON", "truncated"),
        "wrong type": Bad(line("log.jsonl", 3, put("topk_ids", 0, 2.5)), "line 3", "topk_ids[0]", "is not a whole number"),
        "id out of range": Bad(line("log.jsonl", 3, put("topk_ids", 0, 8)), "line 3", "topk_ids[0]: expert id 8",
                               "--experts"),
        "missing field": Bad(line("log.jsonl", 3, without("token_idx")), "line 3", 'no member "token_idx"'),
        "another format": other("nf4-jsonl", '"topk_ids" is not a list'),
    },
    "speculative": {
        "truncated": Bad(cut("log.jsonl", -10), "line 6", "no valid JSON", "truncated"),
        "wrong type": Bad(line("log.jsonl", 3, put("gating_probs", 1, "x")), "line 3", "gating_probs[1]",
                          "is not a number"),
        "id out of range": Bad(line("log.jsonl", 3, put("experts", 0, 8)), "line 3", "experts[0]: expert id 8",
                               "--experts"),
        "missing field": Bad(line("log.jsonl", 3, without("layer")), "line 3", 'no member "layer"'),
        "another format": other("vllm-logger", '"experts" is not a list'),
    },
    "moe-balance": {
        "truncated": [Bad(cut("log.jsonl", -10), "line 4", "no valid JSON", "truncated"),
                      Bad(drop("log.jsonl", 4), "step 1", "1 of 2 layers", "incomplete")],
        "wrong type": Bad(line("log.jsonl", 3, put("topk_experts", 2, 1, None)), "line 3", "topk_experts[2][1]",
                          "is not a whole number"),
        "id out of range": [Bad(line("log.jsonl", 3, put("topk_experts", 2, 1, 8)), "line 3",
                                "topk_experts[2][1]: expert id 8", "--experts"),
                            Bad(line("log.jsonl", 3, put("origin_rows", 2, 1 << 21)), "line 3", "origin_rows[2]",
                                "from 0 to 1048575")],
        "missing field": Bad(line("log.jsonl", 3, without("batch_id")), "line 3", 'no member "batch_id"'),
        "another format": other("speculative", 'no member "batch_id"'),
    },
    "routed-json": {
        "truncated": Bad(cut("answers.json", -10), "line 2", "no valid JSON", "truncated"),
        "wrong type": Bad(line("answers.json", 1, put("choices", 0, "routed_experts", 1, 0, 1, "x")), "answer 1",
                          "row 1, layer 0", "not a whole number"),
        "id out of range": Bad(line("answers.json", 1, put("choices", 0, "routed_experts", 1, 0, 1, 8)), "answer 1",
                               "expert id 8", "--experts"),
        "missing field": Bad(line("answers.json", 2, without("choices", 0, "routed_experts")), "answer 2",
                             "no routed experts in it"),
        "another format": other("sglang-json", "no routed experts in it"),
    },
    "esft-text": {
        "truncated": [Bad(cut("expert_weights_2.txt", -8), "line 2", "not as many weights as ids", "truncated"),
                      Bad(drop("expert_weights_2.txt", 2), "has fewer lines than", "truncated")],
        "wrong type": Bad(swap("expert_weights_2.txt", "0.25", "much"), "line 1", "token 0", "weight 'much'",
                          "is not a number"),
        "id out of range": Bad(swap("expert_weights_2.txt", "2\t3", "8\t3"), "line 1", "token 0", "id '8'", "--experts"),
        "missing field": Bad(swap("expert_weights_2.txt", "\t\t", "\t"), "line 1", "no two tabs"),
        "another format": other("counts-csv", "no two tabs"),
    },
    "counts-csv": {
        "truncated": Bad(cut("table.csv", -4), "line 17", "this row does not"),
        "wrong type": Bad(swap("table.csv", "10,0,1,4", "10,0,1,four"), "line 3", "count is 'four'", "not a number"),
        "id out of range": Bad(swap("table.csv", "10,0,1,4", "10,0,65536,4"), "line 3", "expert is '65536'",
                               "from 0 to 65535"),
        "missing field": Bad(swap("table.csv", "expert", "ex"), "line 1", "no column named expert"),
        "another format": other("laer-csv", "no column named expert"),
    },
    "trt-stat": {
        "truncated": [Bad(cut("rank0_raw.safetensors", -5), "reach beyond the end", "truncated"),
                      Bad(cut("rank0_raw.safetensors", 40), "ends within its header", "truncated")],
        "wrong type": Bad(lambda: table.trt_stat(lambda a: a.update({"100_3": a["100_3"].astype(np.float32)})),
                          "100_3: dtype is not that of whole numbers"),
        "id out of range": Bad(lambda: table.trt_stat(lambda a: a["100_3"].__setitem__((1, 0), 8)),
                               "step 100, layer 3, token 1, place 0: expert id 8", "--experts"),
        "missing field": [Bad(swap("rank0_raw.safetensors", '"shape"', '"sizes"'), "100_3", "data_offsets"),
                          Bad(whole("meta_info.json", without("num_experts")), "'num_experts' is missing",
                              name="meta_info.json")],
        "another format": other("hrtr", "no safetensors file"),
    },
    "sglang-stat": {
        "truncated": Bad(cut("expert_distribution_recorder_1.5.pt", -30), "zip", "truncated"),
        "wrong type": Bad(lambda: table.sglang_stat(lambda r: r.update(logical_count=Tensor(np.ones((2, 2, 3))))),
                          "logical_count", "floats where integers are expected"),
        "id out of range": POSITIONS,
        "missing field": Bad(lambda: table.sglang_stat(lambda r: r.pop("logical_count")), 'no array "logical_count"'),
        "another format": other("slime-pt", 'no array "logical_count"'),
    },
    "sglang-records": {
        "truncated": Bad(cut("recorder_7.5_0.pt", -30), "zip", "truncated"),
        "wrong type": Bad(lambda: table.sglang_records(
            lambda r: r["records"][1].update(topk_ids_of_layer=Tensor(np.ones((2, 3, 8))))),
            "topk_ids_of_layer", "floats where integers are expected"),
        "id out of range": [Bad(lambda: table.sglang_records(
            lambda r: r["records"][1]["topk_ids_of_layer"].array.__setitem__((1, 2, 0), 6)),
            "forward pass 4", "layer 1, token 2, place 0: expert id 6", "no physical expert of the map"),
            Bad(lambda: table.sglang_records(lambda r: r["last_physical_to_logical_map"].array.__setitem__((1, 0), 65536)),
                "last_physical_to_logical_map[1][0]: 65536 is no expert")],
        "missing field": [Bad(lambda: table.sglang_records(lambda r: r["records"][1].pop("forward_pass_id")),
                              "records[1]", "no forward_pass_id"),
                          Bad(lambda: table.sglang_records(lambda r: r.pop("last_physical_to_logical_map")),
                              "no last_physical_to_logical_map")],
        "another format": other("sglang-stat", 'no list "records"'),
    },
    "slime-pt": {
        "truncated": Bad(cut("rollout_3.pt", -30), "zip", "truncated"),
        "wrong type": Bad(lambda: table.slime_pt(lambda r: r["samples"][1].update(rollout_routed_experts=Tensor(table.IDS * 1.5))),
                          "samples[1]", "floats where integers are expected"),
        "id out of range": Bad(lambda: table.slime_pt(
            lambda r: r["samples"][1]["rollout_routed_experts"].array.__setitem__((1, 0, 0), 8)),
            "samples[1]: [1, 0, 0]: expert id 8", "--experts"),
        "missing field": [Bad(lambda: table.slime_pt(lambda r: r.pop("samples")), 'no list "samples"'),
                          Bad(lambda: table.slime_pt(lambda r: [s.pop("rollout_routed_experts") for s in r["samples"]]),
                              "no sample has rollout_routed_experts")],
        "another format": other("sglang-records", 'no list "samples"'),
    },
    "verl-pt": {
        "truncated": Bad(cut("batch.pt", -30), "zip", "truncated"),
        "wrong type": Bad(lambda: table.verl_pt(lambda r: r.update(routed_experts=Tensor(np.ones((2, 3, 2, 2))))),
                          "routed_experts", "floats where integers are expected"),
        "id out of range": Bad(lambda: table.verl_pt(lambda r: r["routed_experts"].array.__setitem__((1, 1, 0, 0), 8)),
                               "sequence 1", "[1, 0, 0]: expert id 8", "--experts"),
        "missing field": Bad(lambda: table.verl_pt(lambda r: r.update(experts=r.pop("routed_experts"))),
                             'no array "routed_experts"'),
        "another format": other("slime-pt", 'no array "routed_experts"'),
    },
    "imatrix": {
        "truncated": [Bad(cut("m.gguf", -9), "beyond the end", "truncated"),
                      Bad(cut("m.gguf", 100), "the file has 100 bytes", "truncated")],
        "wrong type": Bad(lambda: table.imatrix(lambda t: t.update(
            {n: a.astype(np.float16) for n, a in t.items() if "gate" in n})), "blk.1.ffn_gate_exps.weight.counts",
            "not a row of 32-bit floats"),
        "id out of range": POSITIONS,
        "missing field": [Bad(lambda: table.imatrix(lambda t: [t.pop(n) for n in list(t)]), "no tensor blk.N"),
                          Bad(lambda: table.imatrix(keys={}), "no imatrix (general.type)")],
        "another format": other("trt-stat", "not a GGUF file"),
    },
    "hrtr": {
        "truncated": [Bad(cut("t.hrtr", -3), "within token 2", "truncated"),
                      Bad(cut("t.hrtr", 20), "no .hrtr header of 24 bytes")],
        "wrong type": Cannot("all numbers are unsigned 16-bit ones: any bytes are ids"),
        "id out of range": Bad(lambda: table.hrtr(np.where(table.IDS == 7, 8, table.IDS)), "token 2, layer 0, place 1",
                               "expert id 8", "below the number of experts"),
        "missing field": Bad(lambda: table.hrtr(head=(0x52545248, 1, 4, 8, 0, 2)), "top-0 are not plausible"),
        "another format": other("imatrix", "no .hrtr header"),
    },
    "router-logits": {
        "truncated": Bad(cut("logits.npy", -5), "reach beyond the end", "truncated"),
        "wrong type": Bad(array("logits.npy", lambda a: a.astype(np.int32)), "not a float array [layers, tokens, experts]"),
        "id out of range": Cannot("logits stand at the place of their expert: the importer makes the choice"),
        "missing field": [Bad(swap("logits.npy", "'shape'", "'size_'"), "header lacks descr, fortran_order or shape"),
                          Bad(npz_of_integers, "0 float arrays of 3 or 4 axes")],
        "another format": other("npy-ids", "not a float array [layers, tokens, experts]"),
    },
    "moe-infinity": {
        "truncated": Bad(cut("matrices.npy", -5), "ends", "truncated"),
        "wrong type": Bad(array("matrices.npy", lambda a: a.astype(np.int32)), "not a float array [requests, layers, experts]"),
        "id out of range": POSITIONS,
        "missing field": Bad(swap("matrices.npy", "'descr'", "'dtype'"), "header lacks descr, fortran_order or shape"),
        "another format": other("npy-ids", "not a float array [requests, layers, experts]"),
    },
    "ultraep": {
        "truncated": [Bad(cut("t.manifest.json", -8), "t.manifest.json:1:", "not valid JSON", "truncated"),
                      Bad(cut("t.chunk000001.npz", -30), "zip", "truncated", name="t.chunk000001.npz")],
        "wrong type": [Bad(lambda: table.ultraep_chunk(1, pre_logical_loads=np.ones((4, 3))), "pre_logical_loads",
                           "floats where integers are expected", name="t.chunk000001.npz"),
                       Bad(whole("t.manifest.json", put("chunks", "two")), "'chunks' is a string, must be a whole number")],
        "id out of range": Bad(lambda: table.ultraep_chunk(1, layers=np.array([3, 4, 3, -4])), "layers[3] is negative",
                               name="t.chunk000001.npz"),
        "missing field": [Bad(lambda: table.ultraep_chunk(1, layers=None), "no array called layers", name="t.chunk000001.npz"),
                          Bad(whole("t.manifest.json", without("chunks")), "'chunks' is missing")],
        "another format": other("gpt-oss-json", "'schema' is missing"),
    },
}


def run_cell(mizan, row, fault, bad):
    """What is wrong with how one bad file is met, or None."""
    with table.folder():
        row.make()
        name = bad.name or row.files[0]
        if fault == "another format":
            bad.edit(name)
            done = table.Import(mizan, row.name, row.files, row.options + ["-q"])
            wrong = done.refusal_fault(name, f"does not look like format {row.name}", "--force")
            if wrong and done.refusal_fault(name, *bad.words):  # a .pt may hold its keys far from the beginning
                return f"{wrong}: {done.command}: {done.said}"
        else:
            bad.edit()
        # --force takes a truncated nf4 recording as it is; the others must refuse even then.
        force = [] if row.name == "nf4-jsonl" and fault != "another format" else ["--force"]
        done = table.Import(mizan, row.name, row.files, row.options + ["-q"] + force)
        wrong = done.refusal_fault(name, *bad.words)
        return wrong and f"{wrong}: {done.command}: {done.said}"


def check(mizan, names):
    faults = table.missing_rows(mizan, table.ROWS, "good files") + table.missing_rows(mizan, CELLS, "faults")
    cells = 0
    for name in names or CELLS:
        row = table.ROWS[name]
        with table.folder():
            row.make()
            done = table.Import(mizan, None, row.files, row.options)
            if done.code or f"importing as {name}:" not in done.said or done.left != ["out.h5"]:
                faults.append(f"{name}: its good files are not imported: {done.said} {done.left}")
        faults += [f"{name}: no cell for {f}" for f in FAULTS if f not in CELLS[name]]
        for fault, bads in CELLS[name].items():
            if isinstance(bads, Cannot):
                assert bads.reason
                continue
            for bad in bads if isinstance(bads, list) else [bads]:
                wrong = run_cell(mizan, row, fault, bad)
                cells += 1
                if wrong:
                    faults.append(f"{name}, {fault}: {wrong}")
    print(f"{cells} bad files of {len(names or CELLS)} importers, {len(faults)} faults")
    return faults


if __name__ == "__main__":
    found = check(sys.argv[1], sys.argv[2:])
    sys.exit("\n".join(found) if found else 0)
