"""An independent reader of what `mizan place` writes: each file by the rules of the program that it is for, against the
JSON report and the loads.

usage: read_placement.py report REPORT.json
       read_placement.py FORMAT FILE REPORT.json [DENSE_LAYERS]

`report` recomputes loads, imbalance and bounds from experts and hosts alone. FORMAT reads FILE as sglang,
tensorrt-llm, vllm or deepspeed does and checks that every copy of the report is in it, and nothing that the program would
refuse."""
import json
import sys
from collections import Counter


def fail(text):
    sys.exit(f"wrong: {text}")


def check(truth, text):
    if not truth:
        fail(text)


def least_peak(loads, hosts, ranks):
    """Fewest rows on the busiest rank with these hosts: bisection over a maximum flow (Edmonds and Karp)."""
    experts = len(loads)
    source, sink = experts + ranks, experts + ranks + 1

    def fits(cap):
        room = Counter({(source, e): n for e, n in enumerate(loads)})
        for e in range(experts):
            for host in set(hosts[e]):
                room[e, experts + host] = loads[e]
        room.update({(experts + host, sink): cap for host in range(ranks)})
        near = {}
        for a, b in list(room):
            near.setdefault(a, set()).add(b)
            near.setdefault(b, set()).add(a)
        flow = 0
        while True:
            came, queue = {source: None}, [source]
            for at in queue:
                for to in near[at]:
                    if to not in came and room[at, to] > 0:
                        came[to] = at
                        queue.append(to)
            if sink not in came:
                return flow == sum(loads)
            path, at = [], sink
            while came[at] is not None:
                path.append((came[at], at))
                at = came[at]
            push = min(room[edge] for edge in path)
            for x, y in path:
                room[x, y] -= push
                room[y, x] += push
            flow += push

    low, high = -(-sum(loads) // ranks), sum(loads)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def report(name):
    r = json.load(open(name))
    check(r["schema"] == "mizan-place/1", "schema")
    check(r["planner_measured_s"] >= 0, "planner_measured_s")
    for layer in r["layers"]:
        pairs = [e["load"] for e in layer["experts"]]
        check([e["id"] for e in layer["experts"]] == list(range(r["experts"])), "ids")
        load, used = [0] * r["ranks"], [0] * r["ranks"]
        for e in layer["experts"]:
            check(e["replicas"] == len(e["hosts"]) >= 1, f"replicas of {e['id']}")
            check(len(e["pairs"]) == len(e["hosts"]), f"pairs of {e['id']}")
            if "quota" not in layer:
                check(sum(e["pairs"]) == e["load"], f"pairs of {e['id']}: {e}")
            for host, n in zip(e["hosts"], e["pairs"]):
                load[host] += n
                used[host] += 1
        check([x["load"] for x in layer["ranks"]] == load, "loads of ranks")
        check([x["slots_used"] for x in layer["ranks"]] == used, "slots of ranks")
        check(r["slots"] is None or max(used) <= r["slots"], "slots")
        mean = sum(load) / r["ranks"]
        imbalance = max(load) / mean if mean else 1
        check(abs(layer["imbalance"] - imbalance) < 1e-12 * imbalance, f"imbalance {imbalance}")
        if "quota" in layer:
            check(all(q <= n for q, n in zip(layer["quota"], pairs)), "quota")
            check(sum(load) + layer["dropped_pairs"] == sum(pairs), "dropped_pairs")
            continue
        check(1 <= layer["imbalance_bound"] <= layer["imbalance_bound_hosts"] + 1e-12, "bounds")
        check(layer["imbalance_bound_hosts"] <= layer["imbalance"] + 1e-12, "bound of the hosts")
        if sum(pairs) and r["experts"] <= 16 and r["ranks"] <= 8:
            own = least_peak(pairs, [e["hosts"] for e in layer["experts"]], r["ranks"]) / mean
            check(abs(own - layer["imbalance_bound_hosts"]) < 1e-9, f"bound of the hosts is {own}")


def same_copies(slots, layer, ranks, filled):
    """Slots of all ranks against the hosts of one layer of the report."""
    each = len(slots) // ranks
    check(each * ranks == len(slots), "slots do not divide over the ranks")
    have = Counter((slots[i], i // each) for i in range(len(slots)))
    want = Counter((e["id"], h) for e in layer["experts"] for h in e["hosts"])
    check(not want - have, f"missing: {want - have}")
    extra = have - want
    filled[0] += sum(extra.values())
    for r in range(ranks):
        free = each - layer["ranks"][r]["slots_used"]
        check(sum(n for (_, host), n in extra.items() if host == r) == free, f"rank {r}: copies that nobody placed")


def dense_rows(r, dense):
    """Numbers of the placed layers and of all layers, dense ones in front."""
    numbers = [l["layer"] for l in r["layers"]]
    check(numbers == list(range(dense, dense + len(numbers))), f"layers {numbers}")
    return numbers


def sglang(data, r, dense, filled):
    check(list(data) == ["physical_to_logical_map"], "other keys are arguments that SGLang does not know")
    rows = data["physical_to_logical_map"]
    check(len({len(row) for row in rows}) == 1, "ragged")
    numbers = dense_rows(r, dense)
    check(len(rows) == dense + len(numbers), "one row per layer of the model")
    for row in rows:
        check(set(row) == set(range(r["experts"])), "an expert without a slot")
    for number, layer in zip(numbers, r["layers"]):
        same_copies(rows[number], layer, r["ranks"], filled)


def tensorrt(text, r, dense, filled):
    """The part of YAML that the file uses, read by hand: there may be no YAML library."""
    top, table = {}, {}
    for line in text.splitlines():
        key, value = line.split(":", 1)
        if line.startswith("  "):
            table[int(key)] = json.loads(value)
        elif value.strip():
            top[key] = int(value)
        else:
            check(key == "initial_global_assignments", key)
    check(set(top) == {"num_slots", "layer_updates_per_iter"} and top["layer_updates_per_iter"] == 0, top)
    check(list(table) == dense_rows(r, dense), "layers")
    for layer in r["layers"]:
        slots = table[layer["layer"]]
        check(len(slots) == top["num_slots"] >= r["experts"], "num_slots")
        check(top["num_slots"] % r["ranks"] == 0, "num_slots over ranks")
        same_copies(slots, layer, r["ranks"], filled)


def vllm(data, r, dense, filled):
    check(data["moe_layer_count"] == len(data["layer_list"]) == len(r["layers"]), "layers")
    for i, (entry, layer) in enumerate(zip(data["layer_list"], r["layers"])):
        check(entry["layer_id"] == i and entry["device_count"] == r["ranks"], "layer_id, device_count")
        devices = [d["device_expert"] for d in entry["device_list"]]
        check([d["device_id"] for d in entry["device_list"]] == list(range(r["ranks"])), "device_id")
        check(len({len(d) for d in devices}) == 1, "torch.tensor would refuse ragged lists")
        check(all(len(set(d)) == len(d) for d in devices), "an expert twice on a device")
        flat = [e for d in devices for e in d]
        check(data["physical_to_logical_map"][i] == flat, "physical_to_logical_map")
        same_copies(flat, layer, r["ranks"], filled)


def deepspeed(data, r, dense, filled):
    check(data["ep_size"] == r["ranks"] and data["num_experts"] == r["experts"], "sizes")
    for entry, layer in zip(data["layers"], r["layers"]):
        want = Counter((e["id"], h) for e in layer["experts"] for h in e["hosts"])
        have = Counter((e, rank) for rank, local in enumerate(entry["local_experts"]) for e in local)
        check(want == have, "local_experts")
        check(entry["expert_data_parallel_ranks"] == [sorted(set(e["hosts"])) for e in layer["experts"]], "groups")
        each = r["experts"] // r["ranks"]
        if entry["expert_order"] is not None:
            check(sorted(entry["expert_order"]) == list(range(r["experts"])), "expert_order")
            for number, e in enumerate(entry["expert_order"]):
                check(layer["experts"][e]["hosts"] == [number // each], "expert_order")


if sys.argv[1] == "report":
    report(sys.argv[2])
else:
    text = open(sys.argv[2]).read()
    result = json.load(open(sys.argv[3]))
    dense = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    filled = [0]
    reader = {"sglang": sglang, "tensorrt-llm": tensorrt, "vllm": vllm, "deepspeed": deepspeed}[sys.argv[1]]
    reader(text if sys.argv[1] == "tensorrt-llm" else json.loads(text), result, dense, filled)
    print(f"filled {filled[0]}")
