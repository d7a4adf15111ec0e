"""One row per importer: a small good recording in its format, made from the format's description, and what
`mizan trace import` must be told to read it. The tests of bad files and of hostile values start from these."""
import base64
import contextlib
import gzip
import io
import json
import lzma
import os
import subprocess
import tempfile

import numpy as np

from make_binary import Tensor, gguf, safetensors, torch_save

ROWS = {}


class Row:
    """`make` writes the good files into the current directory; the first one is that which is damaged."""

    def __init__(self, name, files, options, make):
        self.name, self.files, self.options, self.make = name, files.split(), options.split(), make


def row(name, files, options):
    def register(make):
        ROWS[name] = Row(name, files, options, make)
        return make
    return register


def text(path, *lines):
    with open(path, "w", newline="") as out:
        out.write("".join(line + "\n" for line in lines))


def lines(path, *objects):
    text(path, *(json.dumps(o) for o in objects))


def document(path, value):
    with open(path, "w") as out:
        json.dump(value, out)


# ---- edits: each returns a function that changes a file of the current directory ---------------------


def cut(path, size):
    """Keeps `size` bytes, or leaves -size away."""
    def edit():
        data = open(path, "rb").read()
        assert 0 < abs(size) < len(data)
        open(path, "wb").write(data[:size])
    return edit


def raw(path, change):
    def edit():
        data = open(path, "rb").read()
        changed = change(data)
        assert changed != data, "the edit changed nothing"
        open(path, "wb").write(changed)
    return edit


def swap(path, old, new, count=1):
    """The first `count` times that `old` stands in the file."""
    return raw(path, lambda data: data.replace(old.encode(), new.encode(), count))


def line(path, number, change):
    """Line `number` (from 1) of JSON lines, through a function that changes the object."""
    def edit():
        held = [json.loads(one) for one in open(path)]
        change(held[number - 1])
        lines(path, *held)
    return edit


def drop(path, number):
    return raw(path, lambda data: b"".join(data.splitlines(True)[:number - 1] + data.splitlines(True)[number:]))


def whole(path, change):
    """A JSON document."""
    def edit():
        value = json.load(open(path))
        change(value)
        document(path, value)
    return edit


def array(path, change):
    """A .npy file."""
    def edit():
        np.save(path, change(np.load(path)))
    return edit


def put(*place):
    """For `line` and `whole`: puts the last argument where the others lead to."""
    def change(value):
        for key in place[:-2]:
            value = value[key]
        value[place[-2]] = place[-1]
    return change


def without(*place):
    def change(value):
        for key in place[:-1]:
            value = value[key]
        del value[place[-1]]
    return change


# ---- the rows ----------------------------------------------------------------------------------------


@row("smartmoe-log", "table_iter1_rank1.log table_iter1_rank0.log", "--top-k 2")
def smartmoe_log():
    text("table_iter1_rank0.log", "0:[[2.0, 1.0, 1.0], [2.0, 2.0, 0.0]]", "1:[[0.0, 2.0, 2.0], [1.0, 1.0, 2.0]]")
    text("table_iter1_rank1.log", "0:[[1.0, 1.0, 0.0], [2.0, 2.0, 0.0]]", "1:[[0.0, 1.0, 1.0], [1.0, 2.0, 1.0]]")


@row("smartmoe-npy", "history.npy", "--top-k 2")
def smartmoe_npy():
    np.save("history.npy", np.full((2, 3, 2, 1, 4), 2, np.uint16))


IDS = np.array([[[0, 1], [2, 3]], [[4, 5], [1, 0]], [[2, 7], [6, 5]]], np.int32)  # [tokens, layers, k] of 8 experts


@row("npy-ids", "ids.npy", "--experts 8 --phase decode")
def npy_ids():
    np.save("ids.npy", IDS)


@row("gpt-oss-json", "prints.json", "--experts 8")
def gpt_oss_json():
    weights = [0.75, 0.25]
    document("prints.json", dict(full_text="x", original_prompt="y", router_data=[
        {f"token_{5 + t}": {f"layer_{l}": dict(selected_experts=IDS[t, l].tolist(), selected_probs=weights)
                            for l in range(2)}} for t in range(3)]))


@row("laer-csv", "loads.csv", "--top-k 2")
def laer_csv():
    loads = [(6, 2), (4, 4), (3, 5), (8, 0)]
    text("loads.csv", "rank,method,model_name,layer,iter,token_num",
         *(f"{r},laer,m,{c % 2},{c // 2},{load[r]}" for c, load in enumerate(loads) for r in range(2)))


@row("megatron-route", "router_trace_rank1.jsonl router_trace_rank0.jsonl", "--experts 8 --phase train")
def megatron_route():
    for rank in range(2):
        lines(f"router_trace_rank{rank}.jsonl",
              *(dict(step=s, stage="pre_dispatch", block="decoder", layer=l, rank=rank, num_tokens=3, topk=2,
                     top_indices=IDS[:, l].tolist()) for s in (4, 5) for l in range(2)))


@row("megatron-tpe", "rank1.jsonl rank0.jsonl", "--top-k 2 --ep-size 2")
def megatron_tpe():
    for rank in range(2):
        lines(f"rank{rank}.jsonl", *(dict(iter=i, block="decoder", layer=l, tpe=[[4, 2], [2, 2]])
                                     for i in (100, 200) for l in range(2)))


@row("sglang-json", "counts.json", "--top-k 2 --phase decode")
def sglang_json():
    document("counts.json", dict(logical_count=[[[2, 2, 0], [1, 1, 2]], [[4, 0, 4], [3, 3, 2]]]))


@row("nf4-jsonl", "a.jsonl", "")
def nf4_jsonl():
    lines("a.jsonl", dict(meta=dict(model="tiny", prompt="p", steps=3, layers=2, top_k=2, n_experts=8)),
          *(dict(step=t, routed={str(l): IDS[t, l].tolist() for l in range(2)}) for t in range(3)))


def route(**members):
    return dict(dict(type="route", req_id="r", topk_weights=[0.75, 0.25]), **members)


@row("vllm-logger", "log.jsonl", "--experts 8 --phase decode")
def vllm_logger():
    lines("log.jsonl", dict(type="meta", model_id="tiny", layers_logged=[0, 1], top_k=2),
          *(route(token_idx=t, layer=l, topk_ids=IDS[t, l].tolist()) for t in range(3) for l in range(2)))


@row("speculative", "log.jsonl", "--experts 8 --phase decode")
def speculative():
    lines("log.jsonl", *(dict(dataset="d", problem_id=1, layer=l, token_idx=t, experts=IDS[t, l].tolist(),
                              gating_probs=[0.5, 0.25]) for t in range(3) for l in range(2)))


@row("moe-balance", "log.jsonl", "--experts 8 --phase prefill")
def moe_balance():
    lines("log.jsonl", *(dict(layer=l, batch_id=b, origin_rows=[0, 1, 0], topk_experts=IDS[:, l].tolist(),
                              topk_weights=[[0.75, 0.25]] * 3) for b in range(2) for l in range(2)))


@row("routed-json", "answers.json", "--experts 8 --phase decode")
def routed_json():
    lines("answers.json", dict(model="m", choices=[dict(routed_experts=IDS.tolist())],
                               usage=dict(prompt_tokens=1, completion_tokens=3)),
          dict(choices=[dict(routed_experts=dict(data=base64.b64encode(IDS.astype("<i2").tobytes()).decode(),
                                                 shape=list(IDS.shape)))]))


@row("esft-text", "expert_weights_2.txt expert_weights_1.txt", "--experts 8 --top-k 2 --phase prefill")
def esft_text():
    for l in range(2):
        text(f"expert_weights_{l + 1}.txt", *("\t".join(map(str, ids)) + "\t\t" + "\t".join(["0.25"] * len(ids))
                                              for ids in (IDS[:2, l].ravel(), IDS[2:, l].ravel())))


@row("counts-csv", "table.csv", "--top-k 2 --phase train")
def counts_csv():
    text("table.csv", "step,layer,expert,count",
         *(f"{s},{l},{e},{2 + (e + l) % 2 * 2}" for s in (10, 20) for l in range(2) for e in range(4)))


def trt_meta(**members):
    document("meta_info.json", dict(num_experts=8, num_experts_per_token=2, **members))


@row("trt-stat", "rank0_raw.safetensors rank1_raw.safetensors meta_info.json", "--phase decode")
def trt_stat(change=lambda arrays: None, **members):
    trt_meta()
    for rank in range(2):
        arrays = {f"{s}_{l}": IDS[:, l - 3].copy() for s in (100, 101) for l in (3, 4)}
        if rank == 0:
            change(arrays)
        safetensors(f"rank{rank}_raw.safetensors", arrays, **(members if rank == 0 else {}))


@row("sglang-stat", "expert_distribution_recorder_1.5.pt", "--top-k 2 --phase decode")
def sglang_stat(change=lambda root: None):
    root = dict(rank=0, logical_count=Tensor(np.array([[[2, 2, 0], [1, 1, 2]], [[4, 0, 4], [3, 3, 2]]], np.int32)),
                average_utilization_rate_over_window=0.5)
    change(root)
    torch_save("expert_distribution_recorder_1.5.pt", root)


SLOTS = np.array([[0, 1, 2, 3, 0, 2], [3, 2, 1, 0, 1, 1]])  # physical experts of two layers: 4 logical ones


@row("sglang-records", "recorder_7.5_0.pt recorder_7.5_1.pt", "--ranks-hold tokens --phase decode")
def sglang_records(change=lambda root: None, ranks=(0,)):
    for rank in range(2):
        ids = np.full((2, 3, 8), -1, np.int32)
        ids[:, :, :2] = [[[0, 1], [4, 5], [2, 3]], [[0, 4], [1, 2], [5, 3]]]
        root = dict(records=[dict(forward_pass_id=p, rank=rank, gatherer_key="primary", input_ids=[1, 2, 3],
                                  positions=[0, 1, 2], extend_seq_lens=[2, 1], forward_mode=1,
                                  topk_ids_of_layer=Tensor(ids.copy()), misc_objects=[]) for p in (3, 4)],
                    last_physical_to_logical_map=Tensor(SLOTS.copy()))
        if rank in ranks:
            change(root)
        torch_save(f"recorder_7.5_{rank}.pt", root)


@row("slime-pt", "rollout_3.pt", "--experts 8 --phase decode")
def slime_pt(change=lambda root: None):
    root = dict(rollout_id=3, samples=[dict(index=i, tokens=[1, 2, 3, 4], rollout_routed_experts=Tensor(IDS.copy()))
                                       for i in range(2)])
    change(root)
    torch_save("rollout_3.pt", root)


@row("verl-pt", "batch.pt", "--experts 8 --padding none --filler-last no --phase decode")
def verl_pt(change=lambda root: None):
    root = dict(routed_experts=Tensor(np.stack([IDS, IDS]).astype(np.int16)))
    change(root)
    torch_save("batch.pt", root)


@row("imatrix", "m.gguf", "--top-k 2")
def imatrix(change=lambda tensors: None, keys=None):
    tensors = {}
    for layer in (1, 2):
        for kind in ("gate", "up", "down"):
            tensors[f"blk.{layer}.ffn_{kind}_exps.weight.counts"] = np.array([[4], [2], [0], [2]], np.float32)
    change(tensors)
    gguf("m.gguf", tensors, keys)


@row("hrtr", "t.hrtr", "--phase decode")
def hrtr(ids=IDS, head=(0x52545248, 1, 4, 8, 2, 2)):
    with open("t.hrtr", "wb") as out:
        out.write(np.array(head, "<u4").tobytes() + ids.astype("<u2").tobytes())


@row("router-logits", "logits.npy", "--top-k 2 --scores softmax-all --phase prefill")
def router_logits():
    np.save("logits.npy", np.linspace(-2, 2, 2 * 3 * 4).reshape(2, 3, 4).astype(np.float32))


@row("moe-infinity", "matrices.npy", "--top-k 2 --phase decode")
def moe_infinity():
    np.save("matrices.npy", np.array([[[2, 2, 0], [1, 1, 2]], [[0] * 3] * 2, [[4, 0, 4], [3, 3, 2]]], np.float32))


def ultraep_chunk(number, **change):
    arrays = dict(layers=np.array([3, 4, 3, 4]), microbatches=2 * number + np.array([0, 0, 1, 1]),
                  pre_logical_loads=np.array([[2, 2, 0], [1, 1, 2], [4, 0, 4], [3, 3, 2]]))
    arrays.update(change)
    np.savez(f"t.chunk{number:06d}.npz", **{n: a for n, a in arrays.items() if a is not None})


@row("ultraep", "t.manifest.json", "--top-k 2 --phase train")
def ultraep():
    document("t.manifest.json", dict(schema="ultra_ep_trace_v1", trace_id="t", ep_size=4, chunks=2,
                                     num_global_logical_experts=3, num_layers=2, dropped_records=0))
    ultraep_chunk(0)
    ultraep_chunk(1)


# ---- running -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def folder():
    """An empty current directory, with an empty directory for temporary files beside it."""
    back = os.getcwd()
    with tempfile.TemporaryDirectory() as path:
        os.makedirs(path + "/here")
        os.makedirs(path + "/tmp")
        os.chdir(path + "/here")
        try:
            yield path
        finally:
            os.chdir(back)


class Import:
    """One run of `mizan trace import`, and what it left behind."""

    def __init__(self, mizan, name, files, options):
        before = set(os.listdir())
        command = [mizan, "trace", "import", *(["-f", name] if name else []), *files, *options, "-o", "out.h5"]
        done = subprocess.run(command, capture_output=True, timeout=120,
                              env=dict(os.environ, TMPDIR=os.path.abspath("../tmp")))
        self.command, self.code = " ".join(command[1:]), done.returncode
        self.said = done.stderr.decode(errors="replace")
        self.out = done.stdout.decode(errors="replace")
        self.left = sorted(set(os.listdir()) - before) + sorted(os.listdir("../tmp"))

    def refusal_fault(self, *words):
        """What is wrong with this as a refusal that holds all `words`, or None."""
        if self.code != 2:
            return f"exit code {self.code}, not 2"
        if self.said.count("\n") != 1 or self.out:
            return "not one line on stderr alone"
        if self.left:
            return f"left behind: {self.left}"
        for word in words:
            if word not in self.said:
                return f"the message does not say '{word}'"
        return None


def registry(mizan):
    done = subprocess.run([mizan, "trace", "import", "--list"], capture_output=True, text=True, check=True)
    return [one.split()[0] for one in done.stdout.splitlines()]


def missing_rows(mizan, table, what):
    """The two lists must be the same, whichever has grown."""
    have = set(registry(mizan))
    return [f"importer {n} has no row in the table of {what}" for n in sorted(have - set(table))] + \
           [f"the table of {what} has a row for {n}, which is no importer" for n in sorted(set(table) - have)]


def packed(path, how):
    """Packs a file in place."""
    data = open(path, "rb").read()
    open(path, "wb").write(dict(gzip=gzip.compress, xz=lzma.compress)[how](data))


def npy_bytes(value):
    out = io.BytesIO()
    np.save(out, value)
    return out.getvalue()
