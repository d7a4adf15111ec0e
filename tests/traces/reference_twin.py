"""Synthetic twins of recorded traces, and traces from profiles, against what real traces show.

usage: reference_twin.py MIZAN TRACES

A twin has each statistic within the tolerance of `mizan trace compare`, and those that make a generator realistic within
the range published for them; taken apart, it has what independent draws have. Exit status 1: something differs."""
import json, os, subprocess, sys, tempfile

import h5py
import numpy as np

MIZAN, TRACES = sys.argv[1], os.environ.get("MIZAN_TRACES") or sys.argv[2]
wrong = 0


def run(*arguments, code=0):
    out = subprocess.run([MIZAN, "trace", *arguments], capture_output=True, text=True)
    if out.returncode != code:
        sys.exit(f"mizan trace {' '.join(arguments)}: exit {out.returncode}: {out.stderr}")
    return out.stdout


def check(what, value, low, high):
    global wrong
    if value is None or not low <= value <= high:
        wrong += 1
        print(f"{what}: {value} is not from {low} to {high}")


def within(name, a, b, ranks, but=()):
    result = json.loads(run("compare", "-q", "--json", "-r", str(ranks), a, b))
    for key, row in result["statistics"].items():
        if row["within"] is False and key not in but:
            check(f"{name}: {key} {row['first']:.4g}", row["second"], row["first"], row["first"])
    s = result["statistics"]["rank_max_over_mean"]
    check(f"{name}: imbalance of the static placement", s["second"] / s["first"], 0.9, 1.1)


def figures(path, *options):
    return json.loads(run("info", "-q", "--json", *options, path))["statistics"]


def statistics(path, *options):
    return {k: v and v["mean"] for k, v in figures(path, *options).items()}


def domains(path, least=5000):
    """Correlations between the popularity, around uniform, of all pairs of domains of at least so many tokens."""
    with h5py.File(path) as f:
        layers, experts, k = (int(f["model"].attrs[n]) for n in ("layers", "experts", "top_k"))
        layer, begin, tokens, pairs = (f["calls/" + n][:] for n in ("layer", "token_begin", "tokens", "pairs"))
        of_token = np.full((begin + tokens).max(), -1)
        for at, n, domain in zip(*(f["sequences/" + n][:] for n in ("token_begin", "tokens", "domain"))):
            of_token[at:at + n] = domain
        load, first, expert = np.zeros((of_token.max() + 1, layers, experts)), 0, f["pairs/expert"][:]
        for i in range(len(layer)):
            domain = np.repeat(of_token[begin[i]:begin[i] + tokens[i]], k)
            np.add.at(load[:, layer[i]], (domain[domain >= 0], expert[first:first + pairs[i]][domain >= 0]), 1)
            first += pairs[i]
    load = load[load.sum((1, 2)) >= least * layers * k]
    d = load / load.sum(2, keepdims=True) - 1 / experts
    d /= np.sqrt((d * d).sum(2, keepdims=True))
    return np.array([(d[a] * d[b]).sum(1).mean() for a in range(len(d)) for b in range(a)])


# Means over layers, unless said. Sigma of a mix of texts and of one domain:
MIX, ONE_DOMAIN = (0.4, 0.8), (0.6, 1.2)


def realistic(name, path, sigma):
    s = figures(path)
    v = lambda key: s[key]["mean"]
    check(f"{name}: sigma", v("expert_log_sigma"), *sigma)
    check(f"{name}: CV", v("expert_cv"), 0.4, 1.2)
    check(f"{name}: CV of the most over the least uneven layer", s["expert_cv"]["high"] / s["expert_cv"]["low"], 2, 3)
    check(f"{name}: max/mean", v("expert_max_over_mean"), 2.45, 4)  # "near 2.5 to 4"
    check(f"{name}: halves", v("half_correlation_same"), 0.4, 0.805)  # 0.80, as printed
    check(f"{name}: inflation", v("window_inflation_64"), 3, 13)
    check(f"{name}: reuse at lag 1", v("reuse_lag_1") / v("reuse_independent"), 1.3, 2.3)
    check(f"{name}: reuse settles", v("reuse_lag_128") / v("reuse_independent"), 1.0, 1.7)
    check(f"{name}: reuse in the first layer over the lowest", s["reuse_lag_1"]["layers"][0] / s["reuse_lag_1"]["low"], 1, 1.05)
    check(f"{name}: mutual information", v("layer_information_share"), 0.25, 0.40)
    check(f"{name}: best partner, over independent", v("team_best_partner") / v("expert_top1_share"), 2, 10)
    check(f"{name}: lift of pairs", v("team_lift_p99"), 3, 15)
    return v


def independent(name, path, q):
    """What the columns of independent draws say, from the popularity q [layers, experts] of tokens."""
    s = statistics(path)
    k = q.sum(1).mean()
    expected = ((q * q).sum(1) / q.sum(1)).mean()
    for lag in (1, 2, 4, 16, 64, 128):
        check(f"{name}: reuse at lag {lag}", s[f"reuse_lag_{lag}"] / expected, 0.97, 1.03)
    for n in (64, 256):
        check(f"{name}: inflation of {n} tokens", s[f"window_inflation_{n}"], 0.9, 1.1)
    for n in (8, 16, 32, 64, 128):
        check(f"{name}: distinct experts in {n}", s[f"distinct_experts_{n}"] / (1 - (1 - q) ** n).sum(1).mean(), 0.98, 1.02)
    check(f"{name}: experts of a token", k, 4, 4)
    check(f"{name}: mutual information", s["layer_information_bits"], 0, 0.02)
    check(f"{name}: guesses right, knowing the layer before", s["layer_hit_rate"] / s["layer_guess_rate"], 1, 1.15)
    check(f"{name}: halves", s["half_correlation_same"], -0.05, 0.05)


def gpt_oss(directory):
    folder, path = os.path.join(TRACES, "gpt-oss-20b"), lambda n: os.path.join(directory, n)
    if not os.path.exists(os.path.join(folder, "ids.npy.xz")):
        print("skipped: no gpt-oss-20b in", TRACES, "(set MIZAN_TRACES)")
        return False
    run("import", "-q", "--experts", "32", "--phase", "decode", "--deflate", "1", "--weights", os.path.join(folder, "weights.npy.xz"),
        "--sequences", os.path.join(folder, "sequences.csv"), os.path.join(folder, "ids.npy.xz"), "-o", path("real.h5"))
    run("synth", "-q", "--deflate", "1", "--like", path("real.h5"), "-o", path("twin.h5"))
    within("gpt-oss-20b", path("real.h5"), path("twin.h5"), 8)
    # Its own sigma, 1.17, is that of one domain.
    realistic("gpt-oss-20b's twin", path("twin.h5"), ONE_DOMAIN)
    real, twin = domains(path("real.h5")), domains(path("twin.h5"))
    check(f"gpt-oss-20b: domains, recorded from {real.min():.2f}", twin.min(), real.min() - 0.25, 0.25)
    check(f"gpt-oss-20b: domains, recorded mean {real.mean():.2f}", twin.mean(), real.mean() - 0.15, real.mean() + 0.15)
    run("cut", "-q", "--first-layer", "8", "--layers", "5", "--deflate", "1", path("real.h5"), "-o", path("five.h5"))
    run("synth", "-q", "--deflate", "1", "--like", path("five.h5"), "--shuffle", "sequences,layers", "-o", path("apart.h5"))
    with h5py.File(path("five.h5")) as f:
        layer = np.repeat(f["calls/layer"][:], f["calls/pairs"][:])
        load = np.zeros((5, 32))
        np.add.at(load, (layer, f["pairs/expert"][:]), 1)
    independent("apart", path("apart.h5"), 4 * load / load.sum(1, keepdims=True))
    return True


def smartmoe(directory):
    file = os.path.join(TRACES, "smartmoe-training-history", "counts_iter_layer_rank_microbatch_expert.u16.npy.xz")
    path = lambda n: os.path.join(directory, n)
    if not os.path.exists(file):
        print("skipped: no smartmoe-training-history in", TRACES, "(set MIZAN_TRACES)")
        return False
    run("import", "-q", "--top-k", "2", "--deflate", "1", file, "-o", path("history.h5"))
    run("cut", "-q", "--layers", "6", "--deflate", "1", path("history.h5"), "-o", path("real.h5"))
    run("synth", "-q", "--deflate", "1", "--like", path("real.h5"), "-o", path("twin.h5"))
    within("smartmoe", path("real.h5"), path("twin.h5"), 16)
    for first, last, error in ((1, 200, 0.20), (201, 1000, 0.04), (1001, 5001, 0.02)):
        window = ("--from-step", str(first), "--to-step", str(last))
        real, twin = statistics(path("real.h5"), *window), statistics(path("twin.h5"), *window)
        for key in ("forecast_error_last", "forecast_error_mean", "scatter_rank", "scatter_rank_micro_batch",
                    "rank_max_over_mean", "expert_cv"):
            check(f"smartmoe {first}-{last} {key}", twin[key] / real[key], 0.75, 1.33)
        check(f"smartmoe {first}-{last} error of the last value", twin["forecast_error_last"], error * 0.8, error * 1.25)
    # Collapse within ten iterations, recovery over hundreds, hardening over thousands: each phase's unevenness is the recorded
    # one, and so is its change from phase to phase.
    before = None
    for first, last in ((1, 1), (11, 11), (31, 31), (301, 301), (501, 1000), (4001, 5001)):
        window = ("--from-step", str(first), "--to-step", str(last))
        twin, real = (statistics(path(n), *window) for n in ("twin.h5", "real.h5"))
        for key in ("expert_max_over_mean", "expert_cv", "expert_entropy_over_log"):
            check(f"smartmoe {first}-{last} {key} over the recorded", twin[key] / real[key], 0.9, 1.1)
        now = [s["expert_max_over_mean"] for s in (twin, real)]
        if before:
            check(f"smartmoe: change of max/mean up to {last} over the recorded", now[0] / before[0] / now[1] * before[1], 0.9, 1.1)
        check("smartmoe: collapses", now[1], *{1: (1, 2), 11: (10, 16)}.get(first, (8, 16)))
        before = now
    late = [statistics(path(n), "--from-step", "1001") for n in ("twin.h5", "real.h5")]
    for lag in (1, 10, 100):
        key = f"step_correlation_lag_{lag}"
        check(f"smartmoe late {key}, recorded {late[1][key]:.4f}", late[0][key], late[1][key] - 0.004, late[1][key] + 0.004)
    check("smartmoe: scatter between micro-batches over binomial", late[0]["scatter_rank_micro_batch"], 1.6, 2.2)
    return True


def profiles(directory):
    """The ranges that a generator must keep to be realistic."""
    path = os.path.join(directory, "profile.h5")
    shape = ("--experts", "32", "--top-k", "4", "--layers", "8", "--tokens", "10000", "--ranks", "2", "--steps", "2",
             "--sequence", "328", "--deflate", "1", "-o", path)
    run("synth", "-q", "--profile", "mixed", *shape)
    realistic("mixed", path, MIX)
    between = domains(path)
    check("mixed: domains", between.mean(), 0, 0.2)
    run("synth", "-q", "--profile", "one-domain", *shape)
    realistic("one-domain", path, ONE_DOMAIN)
    shape = ("--experts", "32", "--top-k", "2", "--layers", "6", "--tokens", "4096", "--ranks", "8", "--deflate", "1",
             "-o", path)
    run("synth", "-q", "--profile", "balanced", "--steps", "40", *shape)
    s = statistics(path)
    check("balanced: MaxVio", s["expert_max_violation"], 0.02, 0.07)
    check("balanced: scatter", s["scatter_rank"], 1.5, 2.5)
    run("synth", "-q", "--profile", "collapse", "--steps", "300", *shape)
    s = statistics(path, "--to-step", "0")
    check("collapse: CV at the start", s["expert_cv"], 0.1, 0.35)
    s = statistics(path, "--from-step", "10", "--to-step", "50")
    check("collapse: cold experts at the worst", s["expert_cold_fraction"], 0.5, 0.9)
    s = statistics(path, "--from-step", "1001")
    check("collapse: error of the last value, late", s["forecast_error_last"], 0.01, 0.03)
    check("collapse: max/mean, late", s["expert_max_over_mean"], 8, 15)


STEPS, RANKS, LAYERS, EXPERTS, TOP_K, SHARE = 48, 3, 3, 16, 2, (0.5, 1.0, 1.5)


def moving(path, rng, shift, walk, tokens):
    """Pairs of sequences with a mix of their own, whose popularity walks from step to step; with `shift` the text domain
    changes in the middle. Ranks are ragged, steps are numbered 5, 15, ..."""
    f = h5py.File(path, "w")
    f.attrs.update(format="mizan-trace", format_version=1)
    f.create_group("model").attrs.update(layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
    f.create_group("run").attrs.update(kind="pairs", phase="train", step="iteration", ranks=RANKS, step_stride=10)
    taste = rng.normal(0, 0.6, (2, LAYERS, EXPERTS))
    calls, ids, sequences, token = [], [], [], 0
    for step in range(STEPS):
        taste += rng.normal(0, walk, taste.shape)
        blocks, domain = [], int(shift and step >= STEPS // 2)
        for rank in range(RANKS):
            begin, parts = token, []
            while token - begin < tokens * SHARE[rank]:
                n = int(rng.integers(40, 120))
                odds = taste[domain] + rng.normal(0, 0.7, (LAYERS, EXPERTS))
                score = odds + rng.gumbel(size=(n, LAYERS, EXPERTS))
                parts.append(np.argsort(-score, -1)[..., :TOP_K])
                sequences.append((token, n, domain))
                token += n
            blocks.append((begin, np.concatenate(parts)))
        for layer in range(LAYERS):
            for rank, (begin, block) in enumerate(blocks):
                calls.append((10 * step + 5, 0, layer, rank, begin, len(block), len(block) * TOP_K))
                ids.append(block[:, layer].ravel())
    put = lambda name, data, dtype: f.create_dataset(
        name, data=np.asarray(data, dtype), chunks=(4096,), maxshape=(None,), fletcher32=True)
    for name, column in zip(("step", "micro_batch", "layer", "rank", "token_begin", "tokens", "pairs"), zip(*calls)):
        put("calls/" + name, column, "<i8")
    put("pairs/expert", np.concatenate(ids), "<u2")
    for name, column in zip(("token_begin", "tokens", "domain"), zip(*sequences)):
        put("sequences/" + name, column, "<i8")
    f.close()


class Loads:
    """What a trace holds over its steps."""

    def __init__(self, path):
        f = h5py.File(path)
        step, layer, rank, tokens, pairs = (f["calls/" + n][:] for n in ("step", "layer", "rank", "tokens", "pairs"))
        self.steps, at = np.unique(step, return_inverse=True)
        self.load = np.zeros((len(self.steps), LAYERS, EXPERTS))
        np.add.at(self.load, (np.repeat(at, pairs), np.repeat(layer, pairs), f["pairs/expert"][:]), 1)
        self.rank = np.bincount(rank, tokens, RANKS) / tokens.sum()
        first = f["calls/token_begin"][:][(layer == 0) & (rank == 0)]
        where = np.searchsorted(first, f["sequences/token_begin"][:], "right") - 1
        self.domain = [set(f["sequences/domain"][:][where == s].tolist()) for s in range(len(self.steps))]

    def across(self):
        """Correlation of popularity, around uniform, in the first and the second half of the steps."""
        half = len(self.steps) // 2
        a, b = (x.sum(0) / x.sum((0, 2))[:, None] - 1 / EXPERTS for x in (self.load[:half], self.load[half:]))
        return ((a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))).mean()


def drift(directory):
    """Twins of pairs over many steps: drift, a change of domain, and ragged ranks come back."""
    real, twin = (os.path.join(directory, n) for n in ("moving.h5", "moving-twin.h5"))
    for name, shift, walk, tokens in (("domain shift", True, 0.12, 1500), ("walk", False, 0.2, 3000), ("still", False, 0, 1500)):
        moving(real, np.random.default_rng(7), shift, walk, tokens)
        run("synth", "-q", "--deflate", "1", "--like", real, "-o", twin)
        run("check", "-q", twin)
        # Bits of nearly independent layers, and lifts of rare pairs whose experts have their time.
        within(name, real, twin, RANKS, ("layer_information_bits", "team_lift_p99"))
        a, b = Loads(real), Loads(twin)
        check(f"{name}: steps", b.steps.tolist() == a.steps.tolist(), True, True)
        for rank in range(RANKS):
            check(f"{name}: tokens of rank {rank}", b.rank[rank] / a.rank[rank], 0.95, 1.05)
        check(f"{name}: popularity across the middle {a.across():.3f}", b.across(), a.across() - 0.1, a.across() + 0.1)
        if shift:
            check(f"{name}: domains of the first steps", b.domain[:22] == [{0}] * 22, True, True)
            check(f"{name}: domains of the last steps", b.domain[26:] == [{1}] * 22, True, True)
    # More steps than recorded: the last ones stay as they are.
    run("synth", "-q", "--deflate", "1", "--like", real, "--steps", "60", "-o", twin)
    check("more steps", len(Loads(twin).steps), 60, 60)


with tempfile.TemporaryDirectory() as directory:
    profiles(directory)
    drift(directory)
    found = [gpt_oss(directory), smartmoe(directory)]
print(f"{wrong} differences" if wrong else "all within range")
sys.exit(1 if wrong else 0)
