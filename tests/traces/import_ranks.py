"""import_ranks.py MIZAN: recordings of several ranks of which files are missing or given twice. Where every rank
recorded its own tokens the import says in one line which ranks are missing, notes it in the trace and makes the
trace that the others make alone; where a rank held experts of its own it refuses. An importer of the registry that
is in neither table fails the test."""
import os
import shutil
import sys

import h5py
import numpy as np

import import_table as table
from import_table import IDS, SLOTS, Tensor, lines, safetensors, text, torch_save

ONE_FILE = {  # why files of several ranks cannot be missing
    "smartmoe-npy": "an array holds all ranks", "npy-ids": "a file is one sequence", "gpt-oss-json": "a file is one sequence",
    "laer-csv": "a log holds all ranks", "sglang-json": "counts are summed over ranks", "nf4-jsonl": "a file is one sequence",
    "vllm-logger": "a log is of one server", "speculative": "a log is of one process",
    "moe-balance": "a log names the devices of all tokens", "routed-json": "answers of one server",
    "counts-csv": "a table is of all ranks", "sglang-stat": "counts are summed over ranks",
    "slime-pt": "rollouts hold whole sequences", "verl-pt": "a batch holds whole sequences",
    "imatrix": "one process counted", "hrtr": "no ranks are recorded", "router-logits": "one process recorded",
    "moe-infinity": "one process recorded", "ultraep": "loads are of the whole expert group"}
CASES = {}


def case(name, pattern, options, **more):
    def register(make):
        CASES[name] = dict(name=name.split()[0], pattern=pattern, options=options.split(), make=make, **more)
    return register


@case("smartmoe-log", "table_iter5_rank{}.log", "--top-k 2")
def smartmoe(rank, path):
    text(path, *(f"{l}:[[{2 + rank}, {rank}, 2], [{2 + rank}, {rank + 2}, {2 * rank}]]" for l in range(2)))


@case("megatron-route", "router_trace_rank{}.jsonl", "--experts 8 --phase train")
def route(rank, path):
    own = int(path[len("router_trace_rank")])
    lines(path, *(dict(step=4, block="decoder", layer=l, rank=own, num_tokens=2, topk=2,
                       top_indices=((IDS[:2, l] + rank) % 8).tolist()) for l in range(2)))


@case("megatron-tpe", "rank{}.jsonl", "--top-k 2 --ep-size 2", refuses="the files of ranks 2 are missing: with --ep-size 2")
def tpe(rank, path):
    lines(path, *(dict(iter=9, block="decoder", layer=l, tpe=[[2 + 2 * rank, 2, 0]]) for l in range(2)))


@case("trt-stat counts", "rank{}.safetensors", "--experts 8 --top-k 2 --phase decode")
def trt_counts(rank, path):
    safetensors(path, {f"7_{l}": np.bincount((IDS[:, l] + rank).ravel() % 8, minlength=8).astype(np.int64) for l in (0, 1)})


@case("trt-stat ids", "rank{}_raw.safetensors", "--experts 8 --top-k 2 --phase prefill")
def trt_ids(rank, path):
    safetensors(path, {f"7_{l}": (IDS[:, l] + rank) % 8 for l in (0, 1)})


def recorder(rank, path, world=0, **members):
    own = int(path.split(".")[0][-1])
    misc = [dict(layer_id=l, num_tokens_per_rank=[3] * world) for l in range(2)] if world else []
    torch_save(path, dict(records=[dict(forward_pass_id=1, rank=own, gatherer_key="primary", misc_objects=misc, **members)],
                          last_physical_to_logical_map=Tensor(SLOTS.copy())))


def counts_of_pass(rank, path, world=0):
    recorder(rank, path, world, global_physical_count=Tensor(np.array([[2 + rank, 2, 0, 2 * rank, rank, 0]] * 2)))


@case("sglang-records tokens", "r_{}.pt", "--top-k 2 --ranks-hold tokens --phase decode")
def records(rank, path):
    counts_of_pass(rank, path)


@case("sglang-records experts", "r_{}.pt", "--top-k 2 --ranks-hold experts --phase decode", refuses="the files of ranks 2 are missing")
def experts(rank, path):
    counts_of_pass(rank, path)


@case("esft-text", "rank_{}/expert_weights_1.txt", "--experts 8 --top-k 2 --phase prefill")
def esft(rank, path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    text(path, f"{rank}\t7\t{(rank + 1) % 6}\t6\t\t0.5\t0.25\t0.5\t0.25")


def contents(path):
    """Every dataset, and the attributes but for the notes of missing ranks."""
    held, notes = {}, ""
    with h5py.File(path) as f:
        f.visititems(lambda name, o: held.update({name: o[()].tolist()}) if isinstance(o, h5py.Dataset) else None)
        for group in "model", "run":
            held.update({f"{group}.{k}": v for k, v in f[group].attrs.items() if k != "import_notes"})
        notes = f["run"].attrs.get("import_notes", b"").decode()
    return held, notes


def run(mizan, case, ranks, names=None, force=()):
    """Files of the contents `ranks` under the names of `names`."""
    files = []
    for rank, name in zip(ranks, names or ranks):
        path = case["pattern"].format(name)
        case["make"](rank, path)
        files.append(path)
    done = table.Import(mizan, case["name"], files, [*case["options"], *force])
    found = contents("out.h5") if os.path.exists("out.h5") else (None, "")
    for left in os.listdir():
        shutil.rmtree(left) if os.path.isdir(left) else os.remove(left)
    return done, found


def missing_in_the_middle(mizan, case):
    done, (held, notes) = run(mizan, case, (0, 1, 3), force=["-q"] if "refuses" in case else [])
    if "refuses" in case:
        return done.refusal_fault(case["refuses"])
    said = [one for one in done.said.splitlines() if "files of ranks are missing (2)" in one]
    if done.code or len(said) != 1 or "missing ranks=2" not in notes:
        return f"missing rank 2: exit code {done.code}, notes '{notes}', {done.said}"
    alone, (wanted, clean) = run(mizan, case, (0, 1, 3), (0, 1, 2))
    if alone.code or "missing" in alone.said + clean:
        return f"ranks 0 to 2: exit code {alone.code}, notes '{clean}', {alone.said}"
    return None if held == wanted else f"missing rank 2: not what the others make alone: {held} {wanted}"


def twice(mizan, case):
    case["make"](0, case["pattern"].format(0))
    case["make"](1, case["pattern"].format(1))
    files = [case["pattern"].format(r) for r in (0, 1)]
    again = os.path.join("again", files[0]) if "/" not in files[0] else files[0].replace("_1.", "_01.")
    os.makedirs(os.path.dirname(again), exist_ok=True)
    shutil.copy(files[0], again)
    files.append(again)
    done = table.Import(mizan, case["name"], files, case["options"] + ["-q"])
    words = ["twice"] if case["name"] == "esft-text" else ["0", "twice" if case["name"] == "sglang-records" else "rank 0"]
    wrong = done.refusal_fault(again if case["name"] == "esft-text" else files[0], *words)
    return wrong and f"{wrong}: {done.said}"


def stated_world(mizan):
    """The dispatch of four ranks is noted in files of which two are there, or one."""
    for ranks, missing in (((0, 1), "2-3"), ((0,), "1-3"), ((3, 1), "0, 2")):
        for rank in ranks:
            counts_of_pass(rank, f"r_{rank}.pt", world=4)
        files = [f"r_{rank}.pt" for rank in ranks]
        done = table.Import(mizan, None, files, "--top-k 2 --ranks-hold tokens --phase decode".split())
        notes = contents("out.h5")[1] if done.code == 0 else ""
        if f"files of ranks are missing ({missing})" not in done.said or f"missing ranks={missing}" not in notes:
            return f"world of 4: {done.code} {notes} {done.said}"
        os.remove("out.h5")
        done = table.Import(mizan, None, files, "--top-k 2 --ranks-hold experts --phase decode -q".split())
        wrong = done.refusal_fault(f"the files of ranks {missing} are missing", "pass the files of all ranks")
        if wrong:
            return f"world of 4, experts: {wrong}: {done.said}"
    return None


def others(mizan):
    """What is particular to one format."""
    for rank in (0, 1, 2):
        lines(f"router_trace_rank{rank}.jsonl", dict(step=1, block="decoder", layer=0, rank=rank, num_tokens=1, topk=1,
                                                     top_indices=[[0]]))
    files = [f"router_trace_rank{r}.jsonl" for r in range(3)]
    done = table.Import(mizan, None, files[:1] + files[2:], "--experts 8 -q --phase train --layer-offsets 0:0,2:1".split())
    if done.code or "(1)" not in done.said:
        return f"one rank of each of two stages: {done.said}"
    os.remove("out.h5")
    lines("router_trace_rank4.jsonl", dict(step=1, block="decoder", layer=0, rank=4, num_tokens=1, topk=1, top_indices=[[0]]))
    done = table.Import(mizan, None, files + ["router_trace_rank4.jsonl"], "--experts 8 -q --phase train --layer-offsets 0:0,3:1".split())
    wrong = done.refusal_fault("every pipeline stage must have the same number of ranks; there is no file of rank 3")
    if wrong:
        return f"{wrong}: {done.said}"
    for iteration, ranks in ((1, (0, 1, 3)), (11, (0, 3))):
        for rank in ranks:
            text(f"table_iter{iteration}_rank{rank}.log", "0:[[2, 2]]")
    files = sorted(name for name in os.listdir() if name.startswith("table"))
    done = table.Import(mizan, None, files, "--top-k 2 -q".split())
    wrong = done.refusal_fault("table_iter11_rank0.log", "iteration 11 does not have the ranks that iteration 1 has",
                               "rank 1, as of table_iter1_rank1.log")
    return wrong and f"{wrong}: {done.said}"


def check(mizan):
    known = {one["name"] for one in CASES.values()} | set(ONE_FILE)
    faults = table.missing_rows(mizan, dict.fromkeys(known), "ranks")
    for name, case in CASES.items():
        for test in missing_in_the_middle, twice:
            with table.folder():
                wrong = test(mizan, case)
                faults += [f"{name}, {test.__name__}: {wrong}"] if wrong else []
    for test in stated_world, others:
        with table.folder():
            wrong = test(mizan)
            faults += [wrong] if wrong else []
    return faults


if __name__ == "__main__":
    found = check(sys.argv[1])
    sys.exit("\n".join(found) if found else 0)
