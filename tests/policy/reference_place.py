"""The placement rules of the policies, coded a second time from their published descriptions, against `mizan place`.

usage: reference_place.py MIZAN [seed]

Nothing of sim/policy is used here. Loads are random and adversarial (ties, one hot expert, one hot source, empty layers);
step 0 is the history and step 1 is placed, so a rule that reads the wrong one is found. Where a description leaves ties or
rounding open, the value that the rule minimizes is compared instead of the placement. Exit status 77: numpy is missing."""
import json, os, subprocess, sys, tempfile
from fractions import Fraction
from math import ceil, floor

try:
    import numpy as np
except ImportError as missing:
    print("skipped:", missing)
    sys.exit(77)

MIZAN = sys.argv[1]
SEED = int(sys.argv[2]) if len(sys.argv) > 2 else 1
PROFILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../sim/cluster/profiles/h200.json")
wrong = compared = 0


def differ(case, policy, layer, what, got, wanted):
    global wrong
    wrong += 1
    if wrong <= 40:
        print(f"{policy}: {case}, layer {layer}: {what} {got}, but {wanted} by the reference")


# ---- loads ----------------------------------------------------------------------------------------------------------


def loads_of(rng, R, E):
    """[layers][R][E]: one layer of every kind."""
    zipf = lambda a: rng.permutation((np.arange(E) + 1.0) ** -a)
    draw = lambda n, p: np.array([rng.multinomial(n, p / p.sum()) for _ in range(R)])
    ranks = np.repeat((np.arange(R) + 1.0) ** -1.5, -(-E // R))[:E]
    kinds = [
        rng.integers(0, 1000, (R, E)),
        draw(4096, zipf(1.2)),
        draw(20000, np.sort(zipf(1.5))[::-1]),       # hot experts beside each other
        draw(300, zipf(0.5)),
        draw(30000, ranks),                          # hot ranks
        np.full((R, E), 64),                         # nothing but ties
        np.full((R, E), 8) + 1000 * (np.arange(E) == rng.integers(E)),
        np.full((R, E), 8) + 500 * (np.arange(E) % 3 == 0),
        np.zeros((R, E), int),
        rng.integers(0, 2, (R, E)),                  # fewer pairs than ranks in places
        draw(5000, zipf(1.0)) * (np.arange(R) == rng.integers(R))[:, None],  # one source
        np.where(np.arange(E) == rng.integers(E), 7919, 0) * np.ones((R, 1), int),  # one expert
        rng.integers(0, 4, (R, E)) * 1000,
        draw(8192, zipf(1.2)) * np.arange(1, R + 1)[:, None],
        rng.poisson(40, (R, E)),
        (rng.integers(0, 3, E) * 500)[None, :] * np.ones((R, 1), int),
    ]
    return np.array(kinds)


class Case:
    def __init__(self, rng, R, E, extra, nodes=1, groups=1):
        self.R, self.E, self.M, self.groups, self.extra = R, E, nodes, groups, extra
        self.S = -(-E // R) + extra
        self.home = [r for r in range(R) for _ in range(E // R + (r < E % R))]
        self.dom = [r // (R // nodes) for r in range(R)]
        self.history, self.current = loads_of(rng, R, E), loads_of(rng, R, E)
        self.layers = len(self.current)
        self.hidden, self.inner = 64, int(rng.choice([16, 128, 1024]))
        self.W, self.row = 6 * self.hidden * self.inner, 2 * self.hidden

    def __str__(self):
        return f"R={self.R} E={self.E} S={self.S} nodes={self.M} groups={self.groups}"

    def write(self, folder):
        np.save(folder + "/loads.npy", np.stack([self.history, self.current]).astype(np.int64))
        with open(PROFILE) as f:
            machine = json.load(f)
        machine["node"]["gpus"]["value"] = self.R // self.M
        machine["scale_out"]["nics"]["value"] = self.R // self.M
        with open(folder + "/machine.json", "w") as f:
            json.dump(machine, f)
        with open(folder + "/model.json", "w") as f:
            json.dump({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "torch_dtype": "bfloat16",
                       "hidden_size": self.hidden, "num_hidden_layers": self.layers, "num_attention_heads": 4,
                       "num_key_value_heads": 4, "intermediate_size": self.inner, "num_local_experts": self.E,
                       "num_experts_per_tok": 2, "sliding_window": None, "tie_word_embeddings": False,
                       "vocab_size": 1000}, f)

    def place(self, folder, policy, slots=True):
        run = subprocess.run(
            [MIZAN, "place", "-q", "--counts", folder + "/loads.npy", "--axes", "steps,layers,sources,experts",
             "--first-step", "1", "--policy", policy, "--model", folder + "/model.json", "--cluster",
             f"{folder}/machine.json:{self.R}", "--groups", str(self.groups), "--json"]
            + (["--slots", str(self.S)] if slots else []), capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"{policy}, {self}: {run.stderr.strip()}")
        return json.loads(run.stdout)["layers"]


# ---- what several rules share ---------------------------------------------------------------------------------------


def falling(values, ids=None):
    """Indices by value descending, ties in order."""
    return sorted(range(len(values)) if ids is None else ids, key=lambda i: -values[i])


def first_max(values):
    return max(range(len(values)), key=lambda i: (values[i], -i))


def first_min(values, ids=None):
    return min(range(len(values)) if ids is None else ids, key=lambda i: (values[i], i))


def even(n, parts):
    return [n // parts + (i < n % parts) for i in range(parts)]


def by_remainder(n, share):
    """n split in proportion to `share`: floors, then one each by largest remainder, ties in order."""
    total = sum(share)
    if total == 0:
        return [0] * len(share)
    part = [n * s // total for s in share]
    order = sorted(range(len(share)), key=lambda j: (-(n * share[j] % total), j))
    for j in order[:n - sum(part)]:
        part[j] += 1
    return part


def least_peak(load, hosts, R, guess=None):
    """Least load of the busiest rank when the pairs of every expert may be split freely over its hosts, whole pairs.
    Bisection over a maximum flow (augmenting paths by breadth-first search); a right guess is proved at once."""
    E = len(load)
    hosts = [sorted(set(h)) for h in hosts]

    def feasible(cap):
        flow = [dict.fromkeys(h, 0) for h in hosts]
        room = [cap] * R
        on = [[] for _ in range(R)]
        for e in range(E):
            for g in hosts[e]:
                on[g].append(e)
        for e in range(E):
            rest = load[e]
            for g in hosts[e]:
                x = min(rest, room[g])
                flow[e][g] += x
                room[g] -= x
                rest -= x
            while rest > 0:
                came, seen, queue, end = {}, {e}, [e], None
                while queue and end is None:
                    f = queue.pop(0)
                    for g in hosts[f]:
                        if g in came:
                            continue
                        came[g] = f
                        if room[g] > 0:
                            end = g
                            break
                        for h in on[g]:
                            if h not in seen and flow[h][g] > 0:
                                seen.add(h)
                                queue.append(h)
                                came[("e", h)] = g
                if end is None:
                    return False
                path, g = [], end
                while True:
                    f = came[g]
                    path.append((f, g))
                    if f == e:
                        break
                    g = came[("e", f)]
                    path.append((f, g))
                x = min([rest, room[end]] + [flow[f][g] for f, g in path[1::2]])
                for i, (f, g) in enumerate(path):
                    flow[f][g] += x if i % 2 == 0 else -x
                room[end] -= x
                rest -= x
        return True

    lo, hi = -(-sum(load) // R), sum(load)
    if guess is not None and lo <= guess <= hi:
        if feasible(guess):
            hi = guess
            lo = guess if guess > lo and not feasible(guess - 1) else lo
        else:
            lo = guess + 1
    while lo < hi:
        mid = (lo + hi) // 2
        lo, hi = (lo, mid) if feasible(mid) else (mid + 1, hi)
    return lo


# ---- the rules ------------------------------------------------------------------------------------------------------
#
# (case, history [R][E], current [R][E]) -> hosts of every expert, and their pairs: a list per expert in order of its hosts;
# or one number per expert, shared evenly; or an array [expert][source][rank]; or None, where any split will do.


def totals(counts):
    return [int(x) for x in counts.sum(axis=0)]


def static(c, history, current):
    return [[h] for h in c.home], [[n] for n in totals(current)]


def capacity(c, history, current, cf="1", least=4):
    cap = [max(ceil(Fraction(cf) * int(row.sum()) / c.E), least) for row in current]
    kept = [sum(min(int(current[s][e]), cap[s]) for s in range(c.R)) for e in range(c.E)]
    return [[h] for h in c.home], [[n] for n in kept]


def symi(c, history, current, cf=None):
    pop, slots = totals(history), c.R * c.S
    pop = pop if sum(pop) else [1] * c.E
    one = sum(pop)  # goals and differences are multiples of 1 / sum
    goal = [p * slots for p in pop]
    count = [max(g // one, 1) for g in goal]
    diff = [n * one - g for n, g in zip(count, goal)]
    while sum(count) > slots:
        i = first_max(diff)
        if count[i] > 1:
            count[i] -= 1
        diff[i] -= one
    while sum(count) < slots:
        i = first_min(diff)
        count[i] += 1
        diff[i] += one
    slot = [e for e in range(c.E) for _ in range(count[e])]
    n = totals(current)
    if cf is not None:
        n = [min(x, ceil(Fraction(cf) * sum(n) * k / slots)) for x, k in zip(n, count)]
    return [[j // c.S for j in range(slots) if slot[j] == e] for e in range(c.E)], n


def ultraep_solve(load, home, ranks, free, u_min, eps, zero_main, bt):
    """Plan of one domain: list of (expert, rank, quota). load: dict of its experts, free: extra slots of its ranks."""
    R = len(ranks)
    rank_load = {r: sum(n for e, n in load.items() if home[e] == r) for r in ranks}
    sources = sorted(ranks, key=lambda r: (-rank_load[r], r))
    mains = {r: sorted((e for e in load if home[e] == r), key=lambda e: (-load[e], e)) for r in ranks}
    total = sum(load.values())
    lo = ceil(Fraction(total, R) * max(Fraction(bt), 1))
    hi = max(max(rank_load.values()), lo)

    def build(T, dynamic):
        excess = {r: max(rank_load[r] - T, 0) for r in ranks}
        slack = {r: max(T - rank_load[r], 0) for r in ranks}
        if sum(excess.values()) == 0:
            return []
        if sum(excess.values()) > sum(slack.values()):
            return None
        room, plan, hosts = dict(free), [], {e: {home[e]} for e in load}
        for r in sources:
            need = excess[r]
            if need == 0:
                continue
            if need > sum(slack.values()):
                return None
            for e in mains[r]:
                avail = load[e] - (1 if load[e] > 0 and not zero_main else 0)
                while need > 0 and avail > 0:
                    cand = [t for t in ranks if slack[t] > 0 and room[t] > 0 and t not in hosts[e]]
                    if not cand:
                        break
                    least = max(1, -(-need // len(cand))) if dynamic else u_min
                    cand = [t for t in cand if min(need, slack[t], avail) >= least]
                    if not cand:
                        break
                    t = min(cand, key=lambda t: (-slack[t], t))
                    q = min(need, slack[t], avail)
                    plan.append((e, t, q))
                    hosts[e].add(t)
                    room[t] -= 1
                    slack[t] -= q
                    need -= q
                    avail -= q
                    excess[r] -= q
                if need == 0:
                    break
            if need > 0 or sum(excess.values()) > sum(slack.values()):
                return None
        return plan

    T = min(ceil(lo * (1 + Fraction(eps))), hi)
    for _ in range(3):
        plan = build(T, True)
        if plan is not None:
            return plan
        T = min(T + -(-hi // 100), hi)

    a, b = lo, hi
    while a < b:
        mid = (a + b) // 2
        enough = sum(max(x - mid, 0) for x in rank_load.values()) <= sum(max(mid - x, 0) for x in rank_load.values())
        a, b = (a, mid) if enough else (mid + 1, b)
    if build(a, False) is not None:
        return build(a, False)
    lo, hi = a, hi
    while hi - lo > 1:
        width = hi - lo
        probes = [lo + w + 1 for w in range(4)] if width <= 4 else [lo + width * (w + 1) // 5 for w in range(4)]
        good = [p for p in probes if p < hi and build(p, False) is not None]
        if good:
            lo, hi = max([p for p in probes if p < min(good)] + [lo]), min(good)
        else:
            lo = max([p for p in probes if p < hi] + [lo])
    return build(hi, False)


def ultraep(c, history, current, u_min=1024, eps="0.01", zero_main=False, locality=True, group=False, bt=1):
    n, hosts, quota = totals(current), [[h] for h in c.home], [[x] for x in totals(current)]
    for d in range(1 if group else c.M):
        ranks = [r for r in range(c.R) if group or c.dom[r] == d]
        load = {e: n[e] for e in range(c.E) if c.home[e] in ranks}
        free = dict.fromkeys(ranks, c.extra)  # N_slot on every rank, also where it has a main less
        for e, t, q in ultraep_solve(load, c.home, ranks, free, u_min, eps, zero_main, bt):
            hosts[e].append(t)
            quota[e].append(q)
            quota[e][0] -= q
    pairs = []
    for e in range(c.E):
        got, local = [0] * len(hosts[e]), [0] * c.R
        if locality:
            for j, h in enumerate(hosts[e]):
                got[j] = local[h] = min(int(current[h][e]), quota[e][j])
        cap = [u - x for u, x in zip(quota[e], got)]
        order = sorted(range(len(cap)), key=lambda j: (hosts[e][j], j))
        for s in range(c.R):
            part = by_remainder(int(current[s][e]) - local[s], [cap[j] for j in order])
            for j, x in zip(order, part):
                got[j] += x
        pairs.append(got)
    return hosts, pairs


def topoep(c, history, current, rounds=64):
    n = current.astype(int)
    hosts = [[h] for h in c.home]
    used = [c.home.count(r) for r in range(c.R)]
    for d in range(c.M):
        ranks = [r for r in range(c.R) if c.dom[r] == d]
        gain = {e: 2 * int(n[ranks, e].sum()) * c.row - c.W for e in range(c.E) if c.dom[c.home[e]] != d}
        for e in sorted((e for e in gain if gain[e] > 0), key=lambda e: (-gain[e], e)):
            room = [r for r in ranks if used[r] < c.S]
            if room:
                t = min(room, key=lambda r: (used[r], r))
                hosts[e].append(t)
                used[t] += 1
    q = np.zeros((c.E, c.R, c.R), int)  # expert, rank that computes, source
    for e in range(c.E):
        for s in range(c.R):
            near = sorted(h for h in hosts[e] if c.dom[h] == c.dom[s]) or sorted(hosts[e])
            for h, x in zip(near, even(int(n[s][e]), len(near))):
                q[e][h][s] += x
    for d in range(c.M):
        ranks = [r for r in range(c.R) if c.dom[r] == d]
        stuck = set()
        for _ in range(rounds):
            load = q.sum(axis=(0, 2))
            awake = [r for r in ranks if r not in stuck]
            if not awake:
                break
            b = min(awake, key=lambda r: (-load[r], r))
            best = None
            for e in range(c.E):
                on = int(q[e][b].sum())
                for t in ranks:
                    if on == 0 or load[t] >= load[b] or (t not in hosts[e] and used[t] >= c.S):
                        continue
                    delta = min(on, int(load[b] - load[t]) // 2)
                    # "Lower cost": no copy, one from inside the domain, one from outside.
                    cost = 0 if t in hosts[e] else 1 + (c.dom[c.home[e]] != d)
                    if delta >= 1 and (best is None or (-delta, load[t], cost, e, t) < best):
                        best = (-delta, load[t], cost, e, t)
            if best is None:
                stuck.add(b)
                continue
            stuck.clear()
            delta, e, t = -best[0], best[3], best[4]
            if t not in hosts[e]:
                hosts[e].append(t)
                used[t] += 1
            for s in range(c.R):
                x = min(delta, q[e][b][s])
                q[e][b][s] -= x
                q[e][t][s] += x
                delta -= x
    done = q.sum(axis=2)
    # A copy that ends without pairs need not be sent.
    hosts = [[h for i, h in enumerate(hs) if i == 0 or done[e][h] > 0] for e, hs in enumerate(hosts)]
    return hosts, [[int(done[e][h]) for h in hs] for e, hs in enumerate(hosts)]


def packed(weight, bins):
    """Balanced packing: bin and place within it of every item."""
    size = len(weight) // bins
    if size == 1:
        return list(range(len(weight))), [0] * len(weight)
    at, place, load, fill = [0] * len(weight), [0] * len(weight), [0.0] * bins, [0] * bins
    for i in falling(weight):
        b = first_min(load, [b for b in range(bins) if fill[b] < size])
        at[i], place[i] = b, fill[b]
        load[b] += weight[i]
        fill[b] += 1
    return at, place


def eplb(c, history, current, mode="auto", exact=False, slots=None, of=None):
    load, slots = totals(current if exact else history), slots or c.R * c.S
    load = load if sum(load) else [1] * c.E
    groups = of or c.groups
    nodes, groups = (c.M, groups) if mode != "global" and groups % c.M == 0 else (1, 1)
    size = c.E // groups
    node, place = packed([float(sum(load[g * size:(g + 1) * size])) for g in range(groups)], nodes)
    hosts = [[] for _ in range(c.E)]
    for m in range(nodes):
        mine = [g * size + i for g in sorted((g for g in range(groups) if node[g] == m), key=lambda g: place[g])
                for i in range(size)]
        count, item = [1] * len(mine), list(range(len(mine)))
        while len(item) < slots // nodes:
            i = first_max([load[e] / n for e, n in zip(mine, count)])
            count[i] += 1
            item.append(i)
        at, _ = packed([load[mine[i]] / count[i] for i in item], c.R // nodes)
        for i, b in zip(item, at):
            hosts[mine[i]].append(m * (c.R // nodes) + b)
    return hosts, totals(current)


def lplb(c, history, current, graph=None):
    """Rank g's j-th replica is that of the j-th heaviest expert of rank holds[j][g], in groups of eight ranks; their
    number is that of the reorder's groups of experts too."""
    graph = graph or ("ring" if c.extra < 2 else "cube")
    holds = {"ring": [[1, 2, 3, 4, 5, 6, 7, 0]], "cube": [[3, 0, 1, 2, 7, 4, 5, 6], [6, 7, 4, 5, 0, 1, 2, 3]]}[graph]
    load = totals(history)
    hosts = eplb(c, history, current, slots=c.E, of=c.R // 8)[0] if sum(load) else [[h] for h in c.home]
    mine = [[e for e in falling(load) if hosts[e][0] == r] for r in range(c.R)]
    for r in range(c.R):
        for j, e in enumerate(mine[r][:c.extra]):
            hosts[e] = hosts[e] + [r // 8 * 8 + holds[j % len(holds)].index(r % 8)]
    return hosts, None


def llep(c, history, current, variant="paper", alpha=1, m=1024, measure="experts", resort=True):
    n = totals(current)
    total, native = sum(n), [0] * c.R
    for e in range(c.E):
        native[c.home[e]] += n[e]
    hosts, pairs = [[h] for h in c.home], [[x] for x in n]
    if total == 0:
        return hosts, pairs
    if variant == "paper":
        seen = n if measure == "experts" else native
        if Fraction(max(seen) * len(seen), total) < Fraction("1.3"):
            return hosts, pairs
        cap = ceil(Fraction(alpha) * total / c.R)  # rounded up, so that all caps carry all pairs
    else:
        cap = floor(Fraction(alpha) * (total // c.R))
    assigned, pending = [0] * c.R, list(native)
    for e in falling(n):
        if n[e] == 0:
            continue
        h = c.home[e]
        pending[h] -= n[e]
        room = cap - assigned[h] - pending[h]
        kept = min(n[e], max(room, 0))
        assigned[h] += kept
        pairs[e][0], rest = kept, n[e] - kept
        others = None
        while rest > 0:
            if others is None or resort or kept > 0:
                others = sorted((g for g in range(c.R) if g != h), key=lambda g: (assigned[g] + pending[g], g))
            for g in others:
                avail = cap - assigned[g] - pending[g]
                chunk = min(rest, avail)
                if avail > 0 and not (chunk < m and rest > chunk):
                    break
            else:
                g, chunk = others[0], rest
            assigned[g] += chunk
            rest -= chunk
            if g in hosts[e]:
                pairs[e][hosts[e].index(g)] += chunk
            else:
                hosts[e].append(g)
                pairs[e].append(chunk)
    return hosts, pairs


def smartmoe(c, history, current):
    """The greedy assignment; it is taken where it lowers the modelled peak of the history."""
    load = totals(history)
    used, sum_, at = [0] * c.R, [0] * c.R, [0] * c.E
    for e in falling(load):
        r = first_min(sum_, [r for r in range(c.R) if used[r] < -(-c.E // c.R)])
        at[e] = r
        used[r] += 1
        sum_[r] += load[e]
    before = max(sum(load[e] for e in range(c.E) if c.home[e] == r) for r in range(c.R))
    if max(sum_) >= before:
        at = c.home
    return [[r] for r in at], [[n] for n in totals(current)]


def scale_flexmoe(c, history, current):
    n = totals(current)
    count, free, mean = [1] * c.E, c.R * c.S - c.E, Fraction(sum(n), c.R)
    cap = [Fraction(x) for x in n]
    while free > 0 and max(cap) > mean * Fraction("1.2"):
        e = first_max(cap)
        after = cap[:e] + [Fraction(n[e], count[e] + 1)] + cap[e + 1:]
        if not max(max(after), mean) < max(max(cap), mean):
            break
        cap, free = after, free - 1
        count[e] += 1
    item = [e for e in range(c.E) for _ in range(count[e])]
    hosts, load, used = [[] for _ in range(c.E)], [0.0] * c.R, [0] * c.R
    for i in falling([cap[e] for e in item]):
        r = first_min(load, [r for r in range(c.R) if used[r] < c.S])
        hosts[item[i]].append(r)
        load[r] += float(cap[item[i]])
        used[r] += 1
    return hosts, n


def lite(c, hosts, counts):
    """[E][R][R]: pairs of every expert and source on every rank."""
    q = np.zeros((c.E, c.R, c.R), np.int64)
    for e in range(c.E):
        place = sorted(hosts[e])
        for s in range(c.R):
            near = [h for h in place if c.dom[h] == c.dom[s]] or place
            for h, x in zip(near, even(int(counts[s][e]), len(near))):
                q[e][s][h] += x
    return q


def laer_place(c, load, count):
    hosts, at, used = [[] for _ in range(c.E)], [0.0] * c.R, [0] * c.R
    share = [load[e] / count[e] for e in range(c.E)]
    item = [e for e in range(c.E) for _ in range(count[e])]
    for i in falling([share[e] for e in item]):
        e = item[i]
        copies = [sum(c.dom[h] == m for h in hosts[e]) for m in range(c.M)]
        room = [r for r in range(c.R) if used[r] < c.S]
        best = [r for r in room if copies[c.dom[r]] == min(copies)] or room
        r = first_min(at, best)
        hosts[e].append(r)
        at[r] += share[e]
        used[r] += 1
    return hosts


def laer(c, history, current, even_too=True, queue_too=True, comm="sum"):
    load, slots, tried = totals(history), c.R * c.S, []
    load = load if sum(load) else [1] * c.E
    if even_too and slots % c.E == 0:
        tried.append([slots // c.E] * c.E)
    if queue_too or not tried:
        count = [c.M if c.M * c.E <= slots else 1] * c.E
        live = set(range(c.E))
        while sum(count) < slots and live:
            e = min(live, key=lambda e: (-Fraction(load[e], count[e]), e))
            more = c.M if count[e] >= c.M else 1
            if sum(count) + more > slots:
                live.remove(e)
            else:
                count[e] += more
        tried.append(count)
    best = None
    for count in tried:
        hosts = laer_place(c, load, count)
        pairs = lite(c, hosts, history).sum(axis=0)  # [source][rank]
        bytes_s = [[0 if s == t else 1 / (216.269e9 if c.dom[s] == c.dom[t] else 88.9539e9) for t in range(c.R)]
                   for s in range(c.R)]
        each = (pairs * np.array(bytes_s)).sum(axis=0) * c.row * 1e3
        score = 4 * (each.sum() if comm == "sum" else each.max()) + 3 * int(pairs.sum(axis=0).max()) * 0.001484375
        if best is None or score < best[0]:
            best = score, hosts
    return best[1], lite(c, best[1], current)


def laer_flexmoe(c, history, current):
    """Changes from the first placement: slot i of rank j holds expert i * n + j mod n, n = E / slots."""
    n = -(-c.E // c.S)
    on = np.zeros((c.E, c.R), int)
    for r in range(c.R):
        for i in range(c.S):
            on[(i * n + r % n) % c.E][r] += 1
    as_hosts = lambda on: [[r for r in range(c.R) for _ in range(on[e][r])] for e in range(c.E)]

    def judge(on):
        load = lite(c, as_hosts(on), history).sum(axis=(0, 1))
        return load, load.max(), load.max() / load.min() if load.min() else np.inf

    load, most, ratio = judge(on)
    for _ in range(10 if history.sum() else 0):
        if not ratio > 1:
            break
        copies = on.sum(axis=1)
        share = [x // int(k) for x, k in zip(totals(history), copies)]
        order = falling(share)
        cold = next((e for e in reversed(order) if copies[e] > c.M), order[0])
        hot, trial = order[0], on.copy()
        if cold == hot:
            break
        for d in range(c.M):
            ranks = [r for r in range(c.R) if c.dom[r] == d]
            givers = [r for r in ranks if trial[cold][r] > 0]
            if not givers:
                continue
            giver = first_min(load, givers)
            joined = next((r for r in ranks if 0 < trial[hot][r] < c.S), giver)
            trial[cold][giver] -= 1
            trial[hot][joined] += 1
            if joined != giver:
                others = [e for e in range(c.E) if e != hot and trial[e][joined] > 0]
                moved = max(others, key=lambda e: (share[e], -e))
                trial[moved][joined] -= 1
                trial[moved][giver] += 1
        after = judge(trial)
        if not (after[1] < most or after[2] < ratio):
            break
        on, (load, most, ratio) = trial, after
    return as_hosts(on), lite(c, as_hosts(on), current)


def shadowed(c, current, order, accept):
    """Greedy over candidates (lists of experts that are broadcast together) until one is not accepted."""
    hosts = [[h] for h in c.home]
    on = current.astype(int)  # a shadowed expert's pairs stay with their sources
    load = [sum(totals(on)[e] for e in range(c.E) if c.home[e] == r) for r in range(c.R)]
    for i, experts in enumerate(order):
        after = list(load)
        for e in experts:
            for s in range(c.R):
                after[c.home[e]] -= int(on[s][e])
                after[s] += int(on[s][e])
        if not accept(i, load, after, experts):
            break
        load = after
        for e in experts:
            hosts[e] = [c.home[e]] + [r for r in range(c.R) if r != c.home[e]]
    pairs = [[totals(on)[e]] if len(h) == 1 else [int(on[r][e]) for r in h] for e, h in enumerate(hosts)]
    return hosts, pairs


def fastermoe_port(c, history, current):
    comp, bw, state = 3 * 4 * (c.W / 2) / 11.5e12, 6.25e9, {}
    used = [0] * c.R  # extra slots

    def accept(i, load, after, experts):
        if i == 0:
            state.update(time=comp * max(load) + 4 * max(load) * c.row / bw, bytes=0)
        time = comp * max(after) + 2 * (state["bytes"] + c.W) / bw
        room = all(used[r] < c.extra for r in range(c.R) if r != c.home[experts[0]])
        if not room or not time < state["time"]:
            return False
        for r in range(c.R):
            used[r] += r != c.home[experts[0]]
        state.update(time=time, bytes=state["bytes"] + c.W)
        return True

    return shadowed(c, current, [[e] for e in falling(totals(current))], accept)


def fastermoe_fastmoe(c, history, current):
    d, flops, bw = 2048, 11.5e12, 50e9 / 8
    a = 2 * d * d
    feat, model, comp = d * 4 / bw, 2 * a * 4 / bw, 4 * a / flops
    n = totals(current)
    order = falling(n)
    B = [n[e] for e in order]
    state = {"lat": 3 * comp * B[0] + 4 * feat * B[0], "extra": 0.0}

    def accept(i, load, after, experts):
        if i + 1 == len(B):
            return False
        state["extra"] += model
        new = 3 * comp * B[i + 1] + 4 * feat * B[i + 1] + state["extra"]
        if not new < state["lat"]:
            return False
        state["lat"] = new
        return True

    return shadowed(c, current, [[e] for e in order], accept)


def fastermoe_prototype(c, history, current):
    """Whole ranks; experts per rank must be equal. 4 a in the products is the source's slip."""
    flops, bw = 11.5e12, 50e9 / 8
    a = c.hidden * c.inner  # alpha d^2 with alpha = I / H
    load = [sum(n for n, h in zip(totals(current), c.home) if h == r) for r in range(c.R)]
    state = {"lat": 12 * 4 * a * max(load) / flops + 4 * max(load) * c.hidden * 4 / bw}

    def accept(i, load, after, experts):
        new = 12 * 4 * a * max(after) / flops + (i + 1) * 2 * a * 4 * (c.E // c.R) / bw * 2
        if i + 1 == c.R or new > state["lat"]:  # goes on through equal times, and never takes the last rank
            return False
        state["lat"] = new
        return True

    return shadowed(c, current, [[e for e in range(c.E) if c.home[e] == r] for r in falling(load)], accept)


# ---- comparison -----------------------------------------------------------------------------------------------------


def compare(c, folder, policy, rule, slots=True, least=False, peak=None, **options):
    """rule: as above; least: the split over the hosts must be the best one; peak: what the busiest rank must have."""
    global compared
    layers = c.place(folder, policy, slots)
    for l, got in enumerate(layers):
        current, R = c.current[l], c.R
        compared += 1
        n = totals(current)
        hosts, pairs = [x["hosts"] for x in got["experts"]], [x["pairs"] for x in got["experts"]]
        load = [x["load"] for x in got["ranks"]]
        fail = lambda what, have, want: differ(c, policy, l, what, have, want)
        # What holds for every policy.
        if [x["load"] for x in got["experts"]] != n:
            fail("loads", [x["load"] for x in got["experts"]], n)
        sums = [sum(p for hs, ps in zip(hosts, pairs) for h, p in zip(hs, ps) if h == r) for r in range(R)]
        if sums != load:
            fail("rank loads beside pairs", load, sums)
        home = [sum(n[e] for e in range(c.E) if c.home[e] == r) for r in range(R)]
        kept = sum(n) - got.get("dropped_pairs", 0)
        ratio = lambda most, all_: most * R / all_ if all_ else 1.0
        for key, want in (("imbalance", ratio(max(load), kept)), ("imbalance_static", ratio(max(home), sum(n)))):
            if abs(got[key] - want) > 1e-12 * want:
                fail(key, got[key], want)
        best = least_peak(n, hosts, R, round(got["imbalance_bound_hosts"] * sum(n) / R))
        if abs(got["imbalance_bound_hosts"] - ratio(best, sum(n))) > 1e-12 * ratio(best, sum(n)):
            fail("imbalance_bound_hosts", got["imbalance_bound_hosts"], ratio(best, sum(n)))
        if kept == sum(n) and got["imbalance_bound"] > got["imbalance_bound_hosts"] * (1 + 1e-12):
            fail("imbalance_bound", got["imbalance_bound"], got["imbalance_bound_hosts"])
        most = best if least else peak(n) if peak else max(load)
        if max(load) != most:
            fail("busiest rank", max(load), most)
        want = rule(c, c.history[l], current, **options) if rule else None
        if want is None:
            continue
        want_hosts, want_pairs = want
        if [sorted(h) for h in hosts] != [sorted(h) for h in want_hosts]:
            e = next(e for e in range(c.E) if sorted(hosts[e]) != sorted(want_hosts[e]))
            fail(f"expert {e} of {n[e]} pairs lies on", hosts[e], want_hosts[e])
        elif isinstance(want_pairs, np.ndarray):  # [E][source][rank]
            if load != [int(x) for x in want_pairs.sum(axis=(0, 1))]:
                fail("rank loads", load, want_pairs.sum(axis=(0, 1)))
        elif want_pairs and isinstance(want_pairs[0], int):
            # Replicas share these pairs of their expert evenly; which of them take the remainder is open.
            for e in range(c.E):
                if sorted(pairs[e]) != sorted(even(want_pairs[e], len(pairs[e]))):
                    fail(f"pairs of expert {e}", pairs[e], even(want_pairs[e], len(pairs[e])))
        elif want_pairs:
            want_load = [0] * R
            for hs, ps in zip(want_hosts, want_pairs):
                for h, p in zip(hs, ps):
                    want_load[h] += p
            if load != want_load:
                fail("rank loads", load, want_load)
    return layers


def compare_finemoe(c, folder):
    """Re-placement is random; it may not be worse on the history than the symmetric placement."""
    d = 2 if c.R > 1 and c.R * c.S >= 2 * c.E else 1
    adaptive = compare(c, folder, f"finemoe[d={d}]", None, least=True)
    symmetric = compare(c, folder, f"finemoe[d={d},placement=symmetric]", None, least=True)
    for l in range(c.layers):
        a, b = (least_peak(totals(c.history[l]), [x["hosts"] for x in layers[l]["experts"]], c.R)
                for layers in (adaptive, symmetric))
        if a > b:
            differ(c, "finemoe", l, "peak of the history", a, b)


def main():
    rng = np.random.default_rng(SEED)
    shapes = [dict(R=4, E=8, extra=1), dict(R=4, E=8, extra=0, nodes=2), dict(R=8, E=8, extra=1, nodes=2, groups=4),
              dict(R=8, E=32, extra=2, nodes=4, groups=8), dict(R=6, E=15, extra=3, nodes=3), dict(R=5, E=13, extra=1),
              dict(R=8, E=16, extra=4, nodes=2, groups=4), dict(R=12, E=24, extra=2, nodes=3, groups=6),
              dict(R=3, E=9, extra=4, groups=3), dict(R=16, E=48, extra=1, nodes=2, groups=8)]
    shapes += [dict(R=1, E=4, extra=1), dict(R=8, E=6, extra=1, nodes=2), dict(R=2, E=7, extra=2, nodes=2)]
    nodes, groups = int(rng.integers(1, 5)), int(rng.integers(1, 9))
    shapes.append(dict(R=nodes * int(rng.integers(1, 5)), E=groups * int(rng.integers(1, 6)),
                       extra=int(rng.integers(0, 5)), nodes=nodes, groups=groups))
    for shape in shapes:
        c = Case(rng, **shape)
        with tempfile.TemporaryDirectory() as folder:
            c.write(folder)
            do = lambda policy, rule, **more: compare(c, folder, policy, rule, **more)
            do("static", static)
            do("capacity", capacity)
            do("capacity[cf=1.25,min_cap=0]", capacity, cf="1.25", least=0)
            do("ideal", None, peak=lambda n: -(-sum(n) // c.R))
            do("symi[drop=no]", symi)
            do("symi", symi, cf="1")
            do("symi[cf=0.8]", symi, cf="0.8")
            do("ultraep", ultraep)
            do("ultraep[u_min=1,eps=0]", ultraep, u_min=1, eps="0")
            do("ultraep[u_min=50,eps=0.001,zero_main=yes,locality=no,scope=group]", ultraep, u_min=50, eps="0.001",
               zero_main=True, locality=False, group=True)
            do("ultraep[threshold=1.5]", ultraep, bt="1.5")
            do("topoep", topoep)
            do("eplb", eplb)
            do("eplb[lag=0]", eplb, exact=True)
            do("eplb[mode=global]", eplb, mode="global")
            partners = c.R % 8 == 0 and c.E % c.R == 0  # what the source has graphs for
            do("lplb[map=exact]", lplb if partners else None, least=True)
            if partners:
                do("lplb[graph=ring]", lplb, graph="ring")
                do("lplb[graph=cube]", lplb, graph="cube")
            do("llep", llep)
            do("llep[m=1,alpha=1.25,measure=ranks]", llep, m=1, alpha="1.25", measure="ranks")
            do("llep[m=300,resort=no]", llep, m=300, resort=False)
            do("llep[variant=code]", llep, variant="code", alpha="1.1", resort=False)
            do("llep[variant=code,m=200,alpha=1]", llep, variant="code", m=200, resort=False)
            do("smartmoe[bytes=0]", smartmoe)
            do("flexmoe[form=scale-eplb]", scale_flexmoe)
            do("flexmoe[form=laer]", laer_flexmoe)
            do("laer[rates=code]", laer)
            do("laer[rates=code,even=no]", laer, even_too=False)
            if c.R * c.S % c.E == 0:
                do("laer[rates=code,queue=no]", laer, queue_too=False)
            do("laer[rates=code,comm=max]", laer, comm="max")
            do("fastermoe[rule=port]", fastermoe_port)
            do("fastermoe[rule=fastmoe]", fastermoe_fastmoe, slots=False)
            if c.E % c.R == 0:
                do("fastermoe[rule=prototype]", fastermoe_prototype, slots=False)
            compare_finemoe(c, folder)
    print(f"{compared} placements compared, {wrong} differences")
    return 1 if wrong else 0


sys.exit(main())
