"""The statistics of traces/stats.h, computed from arrays with numpy, against `mizan trace info --json`.

usage: reference_stats.py MIZAN TRACES

Random traces of every shape, made here with h5py; then recorded ones (MIZAN_TRACES, else TRACES) with the
figures published for them. Exit status 77: skipped, numpy or h5py is missing."""
import io, json, lzma, os, subprocess, sys, tempfile

try:
    import h5py
    import numpy as np
except ImportError as missing:
    print("skipped:", missing)
    sys.exit(77)

STEP_LAGS, TOKEN_LAGS = (1, 5, 10, 20, 50, 100), (1, 2, 4, 16, 64, 128)
MIZAN = sys.argv[1]
wrong = 0


def check(what, got, wanted, absolute=0.0, relative=1e-9):
    global wrong
    got = np.nan if got is None else got
    if np.isnan(got) and np.isnan(wanted):
        return
    if not abs(got - wanted) <= absolute + relative * abs(wanted):
        wrong += 1
        print(f"{what}: {got!r} is not {wanted!r}")


def published(what, got, value, unit):
    """Equal to what is published, within one unit of its last printed digit."""
    check(f"{what}: published", got, value, unit * (1 + 1e-9), 0)


def not_reproduced(what, got, value, unit, ours):
    """A published figure that no definition tried gives. Fails where ours moves, and where it comes to agree."""
    global wrong
    check(f"{what}: not reproduced (published {value}), but", got, ours, unit / 10, 0)
    if got is not None and abs(got - value) <= unit:
        wrong += 1
        print(f"{what}: {got!r} agrees with {value} as published: no exception any more")


class Trace:
    """A trace as arrays; tokens numbered from 0 in order of (step, micro-batch, rank)."""

    def __init__(self, path):
        with h5py.File(path, "r") as f:
            self.L, self.E = int(f["model"].attrs["layers"]), int(f["model"].attrs["experts"])
            k = int(f["model"].attrs["top_k"])
            text = lambda v: v.decode() if isinstance(v, bytes) else str(v)
            self.steps_known = text(f["run"].attrs["step"]) != "none"
            self.pairs = text(f["run"].attrs["kind"]) == "pairs"
            self.ranks = int(f["run"].attrs["ranks"])
            c = {n: f["calls/" + n][:].astype(np.int64) for n in f["calls"]}
            self.call = c
            if self.pairs:
                expert = f["pairs/expert"][:].astype(np.int64)
                weight = f["pairs/weight"][:].astype(np.float64) if "pairs/weight" in f else None
                rows = f["rows/pairs"][:].astype(np.int64) if k == 0 else np.full(c["tokens"].sum(), k)
                first = np.concatenate(([0], np.cumsum(rows)))
                row = np.concatenate(([0], np.cumsum(c["tokens"])))
                token_end = int((c["token_begin"] + c["tokens"]).max())
                # [L] lists of (token, expert, weight, place within the token)
                self.tok, self.exp, self.wt = [], [], []
                for layer in range(self.L):
                    t, e, w = [], [], []
                    for i in np.flatnonzero(c["layer"] == layer):
                        n = rows[row[i]:row[i + 1]]
                        t.append(np.repeat(c["token_begin"][i] + np.arange(len(n)), n))
                        e.append(expert[first[row[i]]:first[row[i + 1]]])
                        if weight is not None:
                            w.append(weight[first[row[i]]:first[row[i + 1]]])
                    self.tok.append(np.concatenate(t)), self.exp.append(np.concatenate(e))
                    self.wt.append(np.concatenate(w) if w else None)
                self.token_end = token_end
                self.sequences = ([] if "sequences/token_begin" not in f else
                                  list(zip(f["sequences/token_begin"][:].astype(int),
                                           f["sequences/tokens"][:].astype(int))))
                self.counts = np.stack([np.bincount(expert[first[row[i]]:first[row[i + 1]]],
                                                    minlength=self.E) for i in range(len(c["step"]))])
            else:
                self.counts, self.sequences = f["counts"][:].astype(np.int64), []


def skew(total, ranks):
    E, sum_ = len(total), total.sum()
    s, x = np.sort(total)[::-1] / sum_, total.astype(float)
    head = s[:int(0.75 * E)]
    head = head[head > 0]
    used = x[x > 0]
    blocks = np.array([x[[e for e in range(E) if e * ranks // E == r]].sum() for r in range(ranks)])
    p = s[s > 0]
    return dict(
        expert_max_over_mean=s[0] * E, expert_max_violation=s[0] * E - 1, expert_balancedness=1 / (s[0] * E),
        expert_top1_share=s[0], expert_cv=x.std() / x.mean(),
        expert_gini=np.abs(x[:, None] - x[None, :]).sum() / (2 * E * E * x.mean()),
        expert_entropy_over_log=-(p * np.log(p)).sum() / np.log(E),
        expert_zipf_exponent=-np.polyfit(np.log(np.arange(1, len(head) + 1)), np.log(head), 1)[0]
        if len(head) > 1 else np.nan,
        expert_log_sigma=np.log(used / x.mean()).std(), expert_cold_fraction=(x < 0.1 * x.mean()).mean(),
        rank_max_over_mean=blocks.max() / blocks.mean(), rank_balancedness=blocks.mean() / blocks.max())


def drift(trace, layer, inside):
    """inside: steps of the window."""
    c, out = trace.call, {}
    mine = np.flatnonzero(c["layer"] == layer)
    counts, rank_of = trace.counts[mine], c["rank"][mine]
    steps, begin = np.unique(c["step"][mine], return_index=True)
    rows_of = [slice(a, b) for a, b in zip(begin, list(begin[1:]) + [len(mine)])]
    load = np.stack([counts[rows].sum(0) for rows in rows_of]).astype(float)
    S = load / load.sum(1, keepdims=True)
    D = S - 1 / trace.E
    start = [i for i, s in enumerate(steps) if s in inside]
    cor = lambda a, b: (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())
    mean = lambda v: np.mean(v) if len(v) else np.nan
    for lag in STEP_LAGS:
        to = [(i, i + lag) for i in start if i + lag < len(steps)]
        out[f"step_correlation_lag_{lag}"] = mean([cor(D[i], D[j]) for i, j in to])
        out[f"busiest_same_lag_{lag}"] = mean([load[i].argmax() == load[j].argmax() for i, j in to])
    to = [i for i in start if i + 1 < len(steps)]
    out["forecast_error_last"] = mean([0.5 * np.abs(S[i + 1] - S[i]).sum() for i in to])
    out["forecast_error_mean"] = mean([0.5 * np.abs(S[i + 1] - S[max(0, i - 9):i + 1].mean(0)).sum() for i in to])
    batch, rank = np.zeros(2), np.zeros(2)
    for i in start:
        here, p = counts[rows_of[i]], S[i]
        by_rank = np.zeros((trace.ranks, trace.E))
        np.add.at(by_rank, rank_of[rows_of[i]], here)
        for rows, sums in ((here, batch), (by_rank, rank)):
            n = rows.sum(1, keepdims=True)
            if (n > 0).sum() > 1:
                sums += ((rows - n * p) ** 2).sum(), (n * p * (1 - p)).sum()
    out["scatter_rank_micro_batch"] = batch[0] / batch[1] if batch[1] else np.nan
    out["scatter_rank"] = rank[0] / rank[1] if rank[1] else np.nan
    return out


def presence(trace, layer):
    M = np.zeros((trace.token_end, trace.E), bool)
    M[trace.tok[layer], trace.exp[layer]] = True
    seen = np.zeros(trace.token_end, bool)
    for i in np.flatnonzero(trace.call["layer"] == layer):
        a = trace.call["token_begin"][i]
        seen[a:a + trace.call["tokens"][i]] = True
    return M, seen


def sequences(trace, M, q):
    out, k = {}, q.sum()
    out["reuse_uniform"], out["reuse_independent"] = k / trace.E, (q * q).sum() / k
    for lag in TOKEN_LAGS:
        shared = chosen = 0
        for a, m in trace.sequences:
            if m > lag:
                shared += (M[a + lag:a + m] & M[a:a + m - lag]).sum()
                chosen += M[a + lag:a + m].sum()
        out[f"reuse_lag_{lag}"] = shared / chosen if chosen else np.nan
    for n in (64, 256):
        w = np.array([M[b:b + n].sum(0) for a, m in trace.sequences for b in range(a, a + m - n + 1, n)])
        p = w.mean(0) / n if len(w) else None
        out[f"window_inflation_{n}"] = (w.var(0, ddof=1).sum() / (n * p * (1 - p)).sum()
                                        if len(w) > 1 else np.nan)
    for n in (8, 16, 32, 64, 128):
        w = [M[b:b + n].any(0).sum() for a, m in trace.sequences for b in range(a, a + m - n + 1, n)]
        out[f"distinct_experts_{n}"] = np.mean(w) if w else np.nan
        out[f"distinct_independent_{n}"] = (1 - (1 - q) ** n).sum()
    half = [(M[a:a + m // 2].mean(0) - q, M[a + m // 2:a + m].mean(0) - q) for a, m in trace.sequences if m >= 32]
    out["half_correlation_same"] = out["half_correlation_other"] = np.nan
    if half:
        A, B = np.stack([h[0] for h in half]), np.stack([h[1] for h in half])
        norm = np.sqrt((A * A).sum() * (B * B).sum())
        out["half_correlation_same"] = (A * B).sum() / norm
        if len(half) > 1:
            G = A @ B.T
            out["half_correlation_other"] = (G.sum() - np.trace(G)) / (len(half) - 1) / norm
    return out


def first_experts(trace, layer):
    top = np.full(trace.token_end, -1)
    tok, exp, wt = trace.tok[layer], trace.exp[layer], trace.wt[layer]
    if wt is None:
        top[tok[::-1]] = exp[::-1]
    else:
        keep = np.unique(tok * trace.E + exp, return_index=True)[1]
        order = keep[np.lexsort((keep, -wt[keep], tok[keep]))]
        top[tok[order][::-1]] = exp[order][::-1]
    return top


def links(a, b, E):
    ok = (a >= 0) & (b >= 0)
    if not ok.any():
        return {}
    j = np.bincount(a[ok] * E + b[ok], minlength=E * E).reshape(E, E) / ok.sum()
    H = lambda p: -(p[p > 0] * np.log2(p[p > 0])).sum()
    bits = H(j.sum(0)) + H(j.sum(1)) - H(j.ravel())
    return dict(layer_information_bits=bits, layer_information_share=bits / H(j.sum(0)),
                layer_hit_rate=j.max(1).sum(), layer_guess_rate=j.sum(0).max())


def teams(M):
    c = (M.astype(np.float32).T @ M.astype(np.float32)).astype(float)
    d = np.diag(c).copy()
    np.fill_diagonal(c, 0)
    used = d > 0
    if c.sum() == 0:
        return {}
    lift = (c / c.sum() / np.outer(d, d) * d.sum() ** 2)[np.ix_(used, used)] if used.all() else \
        c[np.ix_(used, used)] / c.sum() / np.outer(d[used], d[used]) * d.sum() ** 2
    upper = lift[np.triu_indices(used.sum(), 1)]
    return dict(team_best_partner=(c[used].max(1) / d[used]).mean(), team_lift_p99=np.percentile(upper, 99))


def weights(trace, layer):
    tok, wt, exp = trace.tok[layer], trace.wt[layer], trace.exp[layer]
    if wt is None:
        return {}
    keep = np.unique(tok * trace.E + exp, return_index=True)[1]  # the first of every (token, expert)
    order = keep[np.lexsort((-wt[keep], tok[keep]))]
    t, w = tok[order], wt[order]
    begin = np.flatnonzero(np.concatenate(([True], t[1:] != t[:-1])))
    place = np.arange(len(t)) - np.repeat(begin, np.diff(np.concatenate((begin, [len(t)]))))
    return {f"gate_weight_{j + 1}": w[place == j].mean() for j in range(8) if (place == j).any()}, w[place == 0]


def reference(trace, ranks, inside):
    layers = []
    c, tops, lasttop = trace.call, None, None
    window = np.isin(c["step"], list(inside))
    for l in range(trace.L):
        row = skew(trace.counts[window & (c["layer"] == l)].sum(0), ranks)
        if trace.steps_known:
            row.update(drift(trace, l, inside))
        if trace.pairs:
            M, seen = presence(trace, l)
            if trace.sequences:
                row.update(sequences(trace, M, M[seen].mean(0)))
            top = first_experts(trace, l)
            if l:
                row.update(links(lasttop, top, trace.E))
            lasttop = top
            row.update(teams(M))
            if trace.wt[l] is not None:
                profile, largest = weights(trace, l)
                row.update(profile)
                row["largest"] = np.sort(largest)
        layers.append(row)
    return layers


def statistics(path, *options):
    out = subprocess.run([MIZAN, "trace", "info", "-q", "--json", *options, path], capture_output=True, text=True)
    if out.returncode:
        sys.exit(f"mizan trace info {path}: {out.stderr}")
    return json.loads(out.stdout)


def compare(name, path, ranks, first=None, last=None):
    trace = Trace(path)
    steps = np.unique(trace.call["step"])
    inside = {int(s) for s in steps if (first is None or s >= first) and (last is None or s <= last)}
    options = ["--ranks", str(ranks)]
    options += ["--from-step", str(first)] if first is not None else []
    options += ["--to-step", str(last)] if last is not None else []
    got = statistics(path, *options)["statistics"]
    expected = reference(trace, ranks, inside)
    known = set().union(*expected) - {"largest"}
    for key, value in got.items():
        if key in ("gate_weight_1_p10", "gate_weight_1_p90"):
            for l, row in enumerate(expected):
                if "largest" in row:
                    n, share = len(row["largest"]), 0.1 if key.endswith("10") else 0.9
                    check(f"{name} {key} layer {l}", value["layers"][l],
                          row["largest"][int(np.floor(share * n))], relative=2.0 ** -10)
            continue
        rows = [row.get(key, np.nan) for row in expected]
        if value is None:
            check(f"{name} {key}", np.nan, np.nan if np.isnan(rows).all() else 0.0)
            continue
        for l, row in enumerate(rows):
            check(f"{name} {key} layer {l}", value["layers"][l], row)
        check(f"{name} {key} mean", value["mean"], np.nanmean(rows))
        check(f"{name} {key} low", value["low"], np.nanmin(rows))
        check(f"{name} {key} high", value["high"], np.nanmax(rows))
    if not known <= set(got):
        check(f"{name}: not printed: {known - set(got)}", 1, 0)
    return got


def write(path, rng, kind, steps, batches, layers, ranks, experts, k, tokens, has_weight, has_sequences, step,
          one_layer=False):
    """A trace with loads that drift, repeat along sequences and hang together across layers; one_layer: micro-batch m has
    layer m % layers alone."""
    f = h5py.File(path, "w")
    f.attrs.update(format="mizan-trace", format_version=1)
    f.create_group("model").attrs.update(layers=layers, experts=experts, top_k=k)
    f.create_group("run").attrs.update(kind=kind, phase="train", step=step, ranks=ranks)
    put = lambda name, data, dtype: f.create_dataset(
        name, data=np.asarray(data, dtype), chunks=(64,) + np.shape(data)[1:],
        maxshape=(None,) + np.shape(data)[1:], fletcher32=True)
    calls, ids, wts, rows, seqs, counts, token = [], [], [], [], [], [], 0
    taste = rng.normal(0, 1, (layers, experts))
    for s in range(steps):
        taste += rng.normal(0, 0.2, taste.shape)
        for m in range(batches):
            spans = []
            for r in range(ranks):
                n = int(rng.integers(0, tokens)) if r else tokens
                spans.append((token, n))
                at = token
                while has_sequences and at < token + n:
                    size = min(int(rng.integers(1, 400)), token + n - at)
                    seqs.append((at, size))
                    at += size + int(rng.integers(0, 3))
                token += n + int(rng.integers(0, 5))
            for l in [m % layers] if one_layer else range(layers):
                for r, (begin, n) in enumerate(spans):
                    p = np.exp(taste[l] + rng.normal(0, 1, experts))
                    p /= p.sum()
                    if kind == "counts":
                        c = rng.multinomial(n * k, p)
                        counts.append(c)
                        calls.append((10 * s + 1, m, l, r, begin, n, n * k))
                        continue
                    pairs, old = 0, None
                    for t in range(n):
                        size = k if k else int(rng.integers(0, min(6, experts)))
                        e = rng.choice(experts, size, p=p)  # may name one twice
                        if old is not None and size == len(old) and rng.random() < 0.4:
                            e = old
                        old = e
                        ids.extend(e), rows.append(size)
                        wts.extend(rng.integers(0, 40, size) / 64)  # ties included
                        pairs += size
                    calls.append((10 * s + 1, m, l, r, begin, n, pairs))
    for name, column in zip(("step", "micro_batch", "layer", "rank", "token_begin", "tokens", "pairs"), zip(*calls)):
        put("calls/" + name, column, "<i8")
    if kind == "counts":
        put("counts", counts, "<u4")
    else:
        put("pairs/expert", ids, "<u2")
        if k == 0:
            put("rows/pairs", rows, "<u2")
        if has_weight:
            put("pairs/weight", wts, "<f4")
    if has_sequences:
        put("sequences/token_begin", [a for a, _ in seqs], "<i8")
        put("sequences/tokens", [n for _, n in seqs], "<i8")
    f.close()


def random_traces(directory):
    rng = np.random.default_rng(5)
    shapes = [("pairs", 3, 2, 2, 3, 12, 3, 300, True, True, "iteration"),
              ("pairs", 1, 1, 3, 1, 8, 0, 700, True, True, "none"),
              ("pairs", 2, 1, 2, 2, 5, 2, 150, False, False, "forward"),
              ("pairs", 1, 2, 1, 1, 6, 1, 600, False, True, "none"),
              ("pairs", 2, 4, 2, 1, 6, 2, 200, False, False, "iteration", True),
              ("counts", 115, 2, 2, 3, 7, 2, 50, False, False, "iteration")]
    for i, shape in enumerate(shapes):
        path = os.path.join(directory, f"random{i}.h5")
        write(path, rng, *shape)
        compare(f"random {i}", path, min(2, shape[5]))
        if shape[0] == "counts":
            compare(f"random {i} window", path, 3, 61, 131)


def recorded(directory, traces):
    def run(*arguments):
        out = subprocess.run([MIZAN, "trace", *arguments], capture_output=True, text=True)
        if out.returncode:
            sys.exit(f"mizan trace {' '.join(arguments)}: {out.stderr}")

    gpt = os.path.join(traces, "gpt-oss-20b")
    path = os.path.join(directory, "gptoss.h5")
    if os.path.exists(os.path.join(gpt, "ids.npy.xz")):
        run("import", "-q", "--experts", "32", "--phase", "decode", "--deflate", "1", "--weights", os.path.join(gpt, "weights.npy.xz"),
            "--sequences", os.path.join(gpt, "sequences.csv"), os.path.join(gpt, "ids.npy.xz"), "-o", path)
        s = compare("gpt-oss-20b", path, 8)
        # As published for this trace.
        for key, mean, unit in (
                [(f"reuse_lag_{n}", v, 1e-3) for n, v in zip(TOKEN_LAGS, (.442, .386, .368, .339, .326, .321))] +
                [("reuse_independent", .193, 1e-3), ("window_inflation_64", 12.8, .1), ("window_inflation_256", 44, 1),
                 ("distinct_experts_8", 12.8, .1), ("distinct_experts_16", 16.5, .1), ("distinct_independent_8", 17.8, .1),
                 ("distinct_independent_16", 23.1, .1), ("half_correlation_same", .79, .01),
                 ("half_correlation_other", 0, .01), ("layer_information_bits", 1.48, .01),
                 ("layer_information_share", .35, .01), ("layer_hit_rate", .41, .01), ("layer_guess_rate", .135, 1e-3),
                 ("team_best_partner", .51, .01), ("team_lift_p99", 11, 1), ("expert_zipf_exponent", .59, .01),
                 ("expert_cv", .72, .01), ("expert_gini", .41, .01), ("expert_max_over_mean", 2.6, .1), ("expert_top1_share", .081, .001),
                 ("expert_entropy_over_log", .92, .01), ("expert_cold_fraction", .09, .01), ("reuse_uniform", .125, 1e-9),
                 ("distinct_independent_32", 26.5, .1),
                 ("distinct_independent_128", 30.2, .1), ("gate_weight_1_p10", .29, .01), ("gate_weight_1_p90", .43, .01)] +
                [(f"gate_weight_{j + 1}", v, 1e-3) for j, v in enumerate((.351, .264, .211, .174))]):
            published("gpt-oss-20b " + key, s[key]["mean"], mean, unit)
        for key, low, high, unit in (("window_inflation_64", 4.4, 21.6, .1), ("expert_max_over_mean", 1.9, 3.9, .1),
                                     ("expert_cv", .44, 1.02, .01), ("expert_gini", .25, .51, .01),
                                     ("expert_zipf_exponent", .36, .88, .01), ("expert_top1_share", .06, .12, .01),
                                     ("expert_cold_fraction", 0, .25, .01), ("reuse_lag_1", .20, .61, .01),
                                     ("layer_information_bits", 1.2, 1.9, .1)):
            published(f"gpt-oss-20b {key}, least layer", s[key]["low"], low, unit)
            published(f"gpt-oss-20b {key}, most layer", s[key]["high"], high, unit)
        # Ours is the expected number, sum 1 - (1 - q)^n: no drawing. So are 17.83, 23.00, 26.59 and 30.25 beside the 17.8, 23.1,
        # 26.5 and 30.2 published, which lie below and above in turn: no one formula gives all five. Sets of 64 tokens drawn
        # from the trace have a standard deviation of 0.52: the mean of 20 sets is as far off as 29.0 one time in five. Other
        # definitions give 28.82 (256 single experts by their shares), 29.03 but 18.04 in 8 tokens (four different ones by their
        # shares), 28.35 (the sequences of first_sequences).
        not_reproduced("gpt-oss-20b distinct_independent_64", s["distinct_independent_64"]["mean"], 29.0, .1, 28.851)
        first_sequences(run, directory, gpt)
    else:
        print("skipped: no gpt-oss-20b in", traces, "(set MIZAN_TRACES)")
    file = os.path.join(traces, "smartmoe-training-history", "counts_iter_layer_rank_microbatch_expert.u16.npy.xz")
    if not os.path.exists(file):
        print("skipped: no smartmoe-training-history in", traces, "(set MIZAN_TRACES)")
        return
    path = os.path.join(directory, "smart.h5")
    run("import", "-q", "--top-k", "2", "--deflate", "1", file, "-o", path)
    phases = ((1, 200, (.88, .77, .73, .70, .66), (.19, .37, .81, .64), .01),
              (201, 1000, (.997, .991, .986, .977, .954), (.037, .060, None, None), .001),
              (1001, 5001, (.999, None, None, None, None), (.022, .017, None, None), .001))
    for first, last, correlation, rest, unit in phases:
        s = compare(f"smartmoe {first}", path, 16, first, last)
        wanted = [(f"step_correlation_lag_{n}", v) for n, v in zip((1, 5, 10, 20, 100), correlation)]
        wanted += zip(("forecast_error_last", "forecast_error_mean", "busiest_same_lag_1", "busiest_same_lag_10"), rest)
        for key, mean in wanted:
            if mean is not None:
                published(f"smartmoe {first}-{last} {key}", s[key]["mean"], mean, unit)
        if first == 1:
            published("smartmoe 1-200 busiest_same_lag_50", s["busiest_same_lag_50"]["mean"], .54, .01)
    published("smartmoe scatter, micro-batch", s["scatter_rank_micro_batch"]["mean"], 1.9, .1)
    published("smartmoe scatter, rank", s["scatter_rank"]["mean"], 2.7, .1)
    # Of all starts after iteration 1000. Their median is 0.9972, all layers in one 0.9953, one rank's counts 0.9952, starts
    # 1000 apart 0.9936, starts up to iteration 2500 0.9943; not of deviations but of shares 0.9964, of square roots 0.9929, of
    # logarithms 0.958, of ranks 0.903, of sums of 10 steps 0.9969. Starts from 1001 to 2000 agree:
    not_reproduced("smartmoe 1001-5001 step_correlation_lag_100", s["step_correlation_lag_100"]["mean"], .994, .001, .9959)
    s = statistics(path, "--from-step", "1001", "--to-step", "2000")["statistics"]
    published("smartmoe 1001-2000 step_correlation_lag_100", s["step_correlation_lag_100"]["mean"], .994, .001)
    published("smartmoe 1001-2000 step_correlation_lag_1", s["step_correlation_lag_1"]["mean"], .999, .001)
    # Published as 98 % "late", for 10, 100 and 500 iterations alike: so it is from iteration 3001 on, and 95.7 to 96.8 % from 1001.
    s = statistics(path, "--from-step", "3001")["statistics"]
    for lag in (1, 10, 50):
        published(f"smartmoe 3001-5001 busiest_same_lag_{lag}", s[f"busiest_same_lag_{lag}"]["mean"], .98, .01)
    # Published as ranges over the thousands from iteration 500 on.
    for (first, last), values in zip(((501, 1000), (4001, 5001)), (
            (("expert_max_over_mean", 10, .5), ("expert_top1_share", .31, .01), ("expert_cv", 2.1, .1), ("expert_gini", .78, .01),
             ("expert_entropy_over_log", .63, .01), ("expert_zipf_exponent", 2.2, .1)),
            (("expert_max_over_mean", 12.5, .1), ("expert_top1_share", .39, .01), ("expert_cv", 2.5, .1), ("expert_gini", .81, .01),
             ("expert_entropy_over_log", .55, .01)))):
        s = statistics(path, "--from-step", str(first), "--to-step", str(last))["statistics"]
        for key, value, unit in values:
            published(f"smartmoe {first}-{last} {key}", s[key]["mean"], value, unit)
    # The upper end of the Zipf exponents is that of the whole row, iterations 500 on.
    s = statistics(path, "--from-step", "501")["statistics"]
    published("smartmoe 501-5001 expert_zipf_exponent", s["expert_zipf_exponent"]["mean"], 2.4, .1)
    course(run, path, os.path.join(directory, "counters.json"))


def first_sequences(run, directory, gpt):
    """Distinct experts were published for the first 150 of the 494 sequences: all five figures agree there, and on the
    whole recording only those in 8 and 16 tokens do."""
    rows = [line.split(",") for line in open(os.path.join(gpt, "sequences.csv")).read().splitlines()[:151]]
    tokens = int(rows[-1][1]) + int(rows[-1][2])
    with lzma.open(os.path.join(gpt, "ids.npy.xz")) as f:
        ids = np.load(io.BytesIO(f.read()))
    np.save(os.path.join(directory, "ids150.npy"), ids[:tokens])
    with open(os.path.join(directory, "sequences150.csv"), "w") as f:
        f.writelines(",".join(row) + "\n" for row in rows)
    path = os.path.join(directory, "gptoss150.h5")
    run("import", "-q", "--experts", "32", "--phase", "decode", "--sequences", os.path.join(directory, "sequences150.csv"),
        os.path.join(directory, "ids150.npy"), "-o", path)
    s = statistics(path)["statistics"]
    for n, value in ((8, 12.8), (16, 16.5), (32, 19.8), (64, 22.6), (128, 25.0)):
        published(f"gpt-oss-20b, first 150 sequences, distinct_experts_{n}", s[f"distinct_experts_{n}"]["mean"], value, .05)


def course(run, trace, path):
    """Means over layers and recorded steps of the loads of single steps, as published for SmartMoE. What is published as
    iterations 21-50 are the four steps 21, 31, 41 and 51: without the last it would be 15.7 and 0.88, not 15.3 and 0.85."""
    run("export", "-q", "--format", "perfetto", trace, "-o", path)
    steps, at = {}, {}
    for e in json.load(open(path))["traceEvents"]:
        if e["ph"] == "C" and e["pid"] == 0 and e["name"] == "step":
            at[e["ts"]] = e["args"]["value"]
        elif e["ph"] == "C":
            steps.setdefault((e["name"], at[e["ts"]]), []).append(e["args"]["value"])
    for name, first, last, value, unit in [
            ("experts: max/mean", 1, 1, 1.54, .01), ("experts: max/mean", 11, 11, 14.0, .1),
            ("experts: share of the busiest", 11, 11, .44, .01), ("experts: share below 0.1 x mean", 11, 11, .71, .01),
            ("experts: max/mean", 21, 51, 15.3, .1), ("experts: share below 0.1 x mean", 21, 51, .85, .01),
            ("experts: max/mean", 200, 500, 9.5, .1), ("experts: max/mean", 501, 1000, 10.0, .1),
            ("experts: max/mean", 1001, 2000, 11.1, .1), ("experts: max/mean", 2001, 3000, 11.9, .1),
            ("experts: max/mean", 3001, 4000, 12.2, .1), ("experts: max/mean", 4001, 5001, 12.5, .1)]:
        values = [np.mean(v) for (n, step), v in steps.items() if n == name and first <= step <= last]
        published(f"smartmoe {name}, {first}-{last}", np.mean(values), value, unit)


def decode_traces(directory, traces):
    """Logs of single sequences, batch 1; published values are means over the sets that each names."""
    folder = os.path.join(traces, "decode-traces")
    if not os.path.exists(os.path.join(folder, "olmoe_code.jsonl.xz")):
        print("skipped: no decode-traces in", traces, "(set MIZAN_TRACES)")
        return
    # What one set alone must have and what both sets of a model together: value and unit; ours where it is not reproduced.
    # Not reproduced: OLMoE's independent level and range of layers, and Granite's row. Tried: either set or both; sequences
    # pooled or averaged; without the first 1 to 64 tokens; every window of 96 to 512 tokens in steps of 32, whose nearest miss
    # the published values by 0.024 (OLMoE) and 0.020 (Granite). Granite's 0.35 and 0.34 at lags 64 and 128 are above those of
    # either set (0.306 and 0.323; 0.301 and 0.308), so no mean over both can give them. granite_code alone has the published
    # level (0.322) and reuse at lags 2 and 16 (0.385, 0.358), not the others.
    for name, files, more, known, exceptions in [
            ("olmoe_code", ["olmoe_code"], [], dict(reuse_uniform=(.125, 1e-9), reuse_lag_1=(.40, .01)), {}),
            ("olmoe_prose", ["olmoe_prose"], [], dict(reuse_lag_1=(.34, .01)), {}),
            ("olmoe", ["olmoe_code", "olmoe_prose"], [], {},
             dict(reuse_independent=(.22, .01, .20995), reuse_lag_1_low=(.30, .01, .280), reuse_lag_1_high=(.52, .01, .492))),
            ("granite", ["granite_code", "granite_prose"], ["--experts", "40"],
             dict(reuse_uniform=(.2, 1e-9), reuse_lag_4=(.35, .01)),
             dict(reuse_independent=(.32, .01, .2984), reuse_lag_1=(.44, .01, .4546), reuse_lag_2=(.39, .01, .3683),
                  reuse_lag_16=(.36, .01, .3354), reuse_lag_64=(.35, .01, .3144), reuse_lag_128=(.34, .01, .3049),
                  reuse_lag_1_low=(.31, .01, .348), reuse_lag_1_high=(.56, .01, .574))),
            ("qwen_prose", ["qwen_prose"], [],
             dict(reuse_uniform=(.067, .001), reuse_independent=(.09, .01), reuse_lag_1=(.16, .01)), {})]:
        path = os.path.join(directory, name + ".h5")
        done = subprocess.run([MIZAN, "trace", "import", "-q", *more, "-o", path] +
                              [os.path.join(folder, f + ".jsonl.xz") for f in files], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"mizan trace import {files}: {done.stderr}")
        s = compare(name, path, 1)
        value = lambda key: s[key[:-4]]["low"] if key.endswith("_low") else s[key[:-5]]["high"] if key.endswith("_high") else \
            s[key]["mean"]
        for key, (expected, unit) in known.items():
            published(f"{name} {key}", value(key), expected, unit)
        for key, (expected, unit, ours) in exceptions.items():
            not_reproduced(f"{name} {key}", value(key), expected, unit, ours)
        if name in ("olmoe", "granite"):  # published as 5 to 12
            check(f"{name} published window_inflation_64", s["window_inflation_64"]["mean"], 8.5, 4, 0)


with tempfile.TemporaryDirectory() as directory:
    random_traces(directory)
    decode_traces(directory, os.environ.get("MIZAN_TRACES") or sys.argv[-1])
    recorded(directory, os.environ.get("MIZAN_TRACES") or sys.argv[-1])
print(f"{wrong} differences" if wrong else "all equal")
sys.exit(1 if wrong else 0)
