"""Writes recordings in the text formats of other programs, following the description of each format,
and what a trace made from them must hold (expected.npz). `make_text.py check TRACE` compares."""
import base64
import json
import os
import sys

import numpy as np

rng = np.random.default_rng(20)


def expect(**values):
    np.savez("expected.npz", **{k.replace("__", "/"): np.asarray(v) for k, v in values.items()})


def draw(tokens, layers, experts, top_k, ordered=False):
    """Ids [tokens, layers, top_k], without repetition, popularity uneven."""
    share = 1.0 / (1 + np.arange(experts))
    ids = np.stack([rng.choice(experts, top_k, False, share / share.sum()) for _ in range(tokens * layers)])
    return (np.sort(ids) if ordered else ids).reshape(tokens, layers, top_k).astype(np.int64)


def calls(rows):
    """Columns of /calls from (step, micro_batch, layer, rank, tokens) in any order."""
    rows = sorted(rows)
    begin, at = {}, 0
    for step, batch in sorted({r[:2] for r in rows}):
        for rank in sorted({r[3] for r in rows if r[:2] == (step, batch)}):
            begin[step, batch, rank] = at
            at += next(r[4] for r in rows if r[:2] == (step, batch) and r[3] == rank)
    return dict(calls__step=[r[0] for r in rows], calls__micro_batch=[r[1] for r in rows],
                calls__layer=[r[2] for r in rows], calls__rank=[r[3] for r in rows],
                calls__tokens=[r[4] for r in rows],
                calls__token_begin=[begin[r[0], r[1], r[3]] for r in rows])


def blocks(ids, weights=None, sequences=None, domains=None):
    """A log without steps that fits one block: [tokens, layers, k] becomes one call per layer."""
    tokens, layers, k = ids.shape
    more = {} if weights is None else dict(pairs__weight=weights.transpose(1, 0, 2).ravel().astype(np.float32))
    if sequences is not None:
        more.update(sequences__tokens=sequences, sequences__token_begin=np.cumsum([0] + list(sequences))[:-1])
    if domains is not None:
        more.update(sequences__domain=domains)
    expect(pairs__expert=ids.transpose(1, 0, 2).ravel(), **more,
           **calls([(0, 0, l, 0, tokens) for l in range(layers)]))


def bfloat16(x):
    """Truncated to bfloat16: (bytes, values)."""
    bits = np.asarray(x, "<f4").view("<u4") >> 16
    return bits.astype("<u2").tobytes(), (bits << 16).view("<f4")


def softmax(x):
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def megatron_router(stages=1, logits=False):
    """Ranks 0, 1 of each pipeline stage; layers 0 and 2 of a stage; steps 3 and 4, 2 micro-batches."""
    experts, k, held, weight = 8, 2, {}, {}
    for stage in range(stages):
        for source in range(2):
            rank, offset = stage * 2 + source, 0
            out, raw = open(f"router_trace_rank{rank}.jsonl", "w"), open(f"logits_rank{rank}.bin", "wb")
            for step in 3, 4:
                for batch in range(2):
                    for layer in 0, 2:
                        tokens = 5 + source + batch
                        x = rng.normal(size=(tokens, experts)).astype(np.float32)
                        stored, x = bfloat16(x)
                        ids = np.argsort(-x, 1, "stable")[:, :k]
                        line = dict(step=step, stage="pre_dispatch", block="decoder", layer=layer, rank=rank,
                                    num_tokens=tokens, topk=k, top_indices=ids.tolist())
                        if logits:
                            line.update(logit_offset=raw.tell(), logit_bytes=len(stored),
                                        logit_shape=[tokens, experts])
                        raw.write(stored)
                        out.write(json.dumps(line) + "\n")
                        key = step, batch, stage * 2 + layer // 2, source
                        held[key] = ids
                        chosen = np.take_along_axis(x, ids, 1)
                        weight[key] = softmax(chosen)
                    out.write(json.dumps(dict(step=step, stage="pre_dispatch", block="mtp", mtp_idx=0, layer=0,
                                              rank=rank, num_tokens=1, topk=k, top_indices=[[0, 1]])) + "\n")
    order = sorted(held)
    more = dict(pairs__weight=np.concatenate([weight[o].ravel() for o in order]).astype(np.float32)) if logits else {}
    expect(pairs__expert=np.concatenate([held[o].ravel() for o in order]), **more,
           **calls([o + (len(held[o]),) for o in order]))


def megatron_router_stages():
    megatron_router(stages=2)


def megatron_router_logits():
    megatron_router(logits=True)


def megatron_router_short(kind):
    """Of every micro-batch the last token is padding: without ids in both layers. `dropped` and `logits`: in layer
    0 a capacity took the second id of token 0 and both of token 1."""
    experts, k, rows, pairs, weight, held = 8, 2, [], [], [], []
    out = [open(f"router_trace_rank{rank}.jsonl", "w") for rank in range(2)]
    raw = [open(f"logits_rank{rank}.bin", "wb") for rank in range(2)]
    for step in 3, 4:
        for batch in range(2):
            for layer in range(2):
                for rank in range(2):
                    tokens = 5 + rank + batch
                    stored, x = bfloat16(rng.normal(size=(tokens, experts)))
                    ids = np.argsort(-x, 1, "stable")[:, :k].tolist()
                    ids[-1] = []
                    if kind != "padding" and layer == 0:
                        ids[0], ids[1] = ids[0][:1], []
                    line = dict(step=step, stage="pre_dispatch", block="decoder", layer=layer, rank=rank,
                                num_tokens=tokens, topk=k, top_indices=ids)
                    if kind == "logits":
                        line.update(logit_offset=raw[rank].tell(), logit_bytes=len(stored), logit_shape=[tokens, experts])
                    raw[rank].write(stored)
                    out[rank].write(json.dumps(line) + "\n")
                    rows += [len(row) for row in ids[:-1]]
                    pairs += sum(ids, [])
                    weight += [softmax(x)[t, e] for t, row in enumerate(ids) for e in row]
                    held.append((step, batch, layer, rank, tokens - 1))
    more = {} if kind == "padding" else dict(rows__pairs=rows)
    if kind == "logits":
        more.update(pairs__weight=np.array(weight, np.float32))
    expect(pairs__expert=pairs, **more, **calls(held))


def counts_of(ids, experts):
    """[layers, experts] of ids [tokens, layers, k]."""
    return np.stack([np.bincount(ids[:, l].ravel(), minlength=experts) for l in range(ids.shape[1])])


def megatron_tpe(dropped=False):
    """8 ranks of 2 stages; expert groups of 2 ranks, so 2 groups a stage; 3 local experts; layers 0, 1."""
    k, held = 2, {}
    out = [open(f"rank{r}.jsonl", "w") for r in range(8)]
    for step in 100, 200:
        for stage in range(2):
            for layer in 0, 1:
                tpe = {r: [] for r in range(4)}
                for batch in range(2):
                    for group in range(2):
                        load = counts_of(draw(10 + 2 * batch, 1, 6, k), 6)[0]
                        if dropped:
                            load = np.minimum(load, 6)
                        tpe[2 * group].append(load[:3].tolist())
                        tpe[2 * group + 1].append(load[3:].tolist())
                        deal, turn = np.zeros((2, 6), int), 0
                        for e, pairs in enumerate(load):
                            deal[:, e] += pairs // 2
                            if pairs % 2:
                                deal[turn, e] += 1
                                turn = 1 - turn
                        for s in range(2):
                            held[step, batch, 2 * stage + layer, 2 * group + s] = deal[s]
                for r, lists in tpe.items():
                    out[4 * stage + r].write(json.dumps(dict(iter=step, block="decoder", layer=layer, tpe=lists)) + "\n")
        for o in out:
            o.write(json.dumps(dict(iter=step, block="mtp", layer=0, tpe=[[1, 2, 3]])) + "\n")
    order = sorted(held)
    most = {}
    for step, batch, layer, rank in order:
        load = held[step, batch, layer, rank].sum()
        most[step, batch, rank] = max(most.get((step, batch, rank), 0), -(-load // k))
    expect(counts=[held[o] for o in order], **calls([o + (most[o[0], o[1], o[3]],) for o in order]))


def megatron_tpe_dropped():
    megatron_tpe(dropped=True)


def sglang_json(steps="3"):
    """Layers 0 and 3 of 5 are dense; the second step is empty."""
    n, k = int(steps), 2
    counts = np.zeros((n, 5, 6), int)
    for s in range(n):
        if s != 1:
            counts[s][[1, 2, 4]] = counts_of(draw(7 + s, 3, 6, k), 6)
    used = [s for s in range(n) if s != 1]
    json.dump(dict(logical_count=(counts if n > 1 else counts[0]).tolist()), open("counts.json", "w"))
    expect(counts=[counts[s, l] for s in used for l in (1, 2, 4)],
           **calls([(s, 0, i, 0, 7 + s) for s in used for i in range(3)]))


def nf4(k="3", meta="{}"):
    """Two sequences, layers 1 to 3, 7 experts."""
    parts = []
    for name, tokens in ("a", 9), ("b", 4):
        ids = draw(tokens, 3, 7, int(k), ordered=True)
        parts.append(ids)
        with open(name + ".jsonl", "w") as out:
            head = dict(model="/models/tiny", prompt=name, steps=tokens, layers=3, top_k=int(k), n_experts=None)
            out.write(json.dumps(dict(meta=dict(head, **json.loads(meta)))) + "\n")
            for t, row in enumerate(ids.tolist()):
                out.write(json.dumps(dict(step=t, routed={str(l + 1): e for l, e in enumerate(row)})) + "\n")
    blocks(np.concatenate(parts), sequences=[9, 4], domains=[0, 1])


def nf4_recorded(*files):
    """What a recorded file (.jsonl.xz) holds."""
    import lzma
    parts = []
    for name in files:
        lines = [json.loads(l) for l in lzma.open(name)]
        layers = lines[0]["meta"]["layers"]
        parts.append(np.array([[l["routed"][str(i)] for i in range(layers)] for l in lines[1:]]))
    blocks(np.concatenate(parts), sequences=[len(p) for p in parts])


def weights_of(ids):
    w = np.sort(rng.random(ids.shape), -1)[..., ::-1]
    return (w / w.sum(-1, keepdims=True)).round(6)


def vllm_logger(profile="100"):
    """Three requests of 6, 2 and 4 tokens, layers 3 and 5, interleaved batch by batch."""
    lengths, layers = [6, 2, 4], [3, 5]
    parts = [draw(n, 2, 8, 2) for n in lengths]
    weights = [weights_of(p) for p in parts]
    with open("log.jsonl", "w") as out:
        def route(req, t, layer, ids, w):
            out.write(json.dumps(dict(type="route", req_id=req, token_idx=t, layer=layer, topk_ids=ids,
                                      topk_weights=w)) + "\n")
        out.write(json.dumps(dict(type="meta", model_id="org/tiny", layers_logged=layers, top_k=2)) + "\n")
        for i in range(int(profile)):
            route("profile", i, layers[i % 2], [i % 2, 7], [0.6, 0.4])
        for first in 0, 2, 4:
            for l in (1, 0):
                for r, n in enumerate(lengths):
                    for t in range(first, min(first + 2, n)):
                        route(f"r{r}", t, layers[l], parts[r][t, l].tolist(), weights[r][t, l].tolist())
    blocks(np.concatenate(parts), np.concatenate(weights), sequences=lengths)


def speculative():
    """Problems 1 of two datasets (6 and 2 tokens), problem 2 of the first (4)."""
    names, lengths = [("gsm", 1), ("mmlu", 1), ("gsm", 2)], [6, 2, 4]
    parts = [draw(n, 2, 8, 2) for n in lengths]
    weights = [weights_of(p) / 2 for p in parts]
    with open("log.jsonl", "w") as out:
        for (dataset, problem), ids, w in zip(names, parts, weights):
            for l in range(2):
                for t in range(len(ids)):
                    out.write(json.dumps(dict(dataset=dataset, problem_id=problem, layer=l, token_idx=t,
                                              experts=ids[t, l].tolist(), gating_probs=w[t, l].tolist())) + "\n")
    blocks(np.concatenate(parts), np.concatenate(weights), sequences=lengths, domains=[0, 1, 0])


def moe_balance(weighted="yes"):
    """Batches 4 and 6, layers 1 and 2, tokens of devices 0, 1 and 3 mixed; layer by layer."""
    held, rows = {}, {2: [], 1: []}
    for batch in 6, 4:
        origin = rng.permutation([0] * 5 + [1] * 3 + [3] * 4)
        ids = draw(12, 2, 8, 2)
        w = weights_of(ids)
        for l in range(2):
            line = dict(layer=l + 1, batch_id=batch, origin_rows=origin.tolist(), topk_experts=ids[:, l].tolist())
            if weighted == "yes":
                line["topk_weights"] = w[:, l].tolist()
            rows[l + 1].append(line)
            for r in 0, 1, 3:
                held[batch, 0, l, r] = ids[origin == r, l], w[origin == r, l]
    with open("log.jsonl", "w") as out:
        for layer in rows:
            out.writelines(json.dumps(line) + "\n" for line in rows[layer])
    order = sorted(held)
    more = dict(pairs__weight=np.concatenate([held[o][1].ravel() for o in order])) if weighted == "yes" else {}
    expect(pairs__expert=np.concatenate([held[o][0].ravel() for o in order]), **more,
           **calls([o + (len(held[o][0]),) for o in order]))


def blob(ids, dtype):
    return base64.b64encode(ids.astype(dtype).tobytes()).decode()


def with_dense(ids):
    """A dense layer before the MoE layers, as rows of zeros."""
    return np.concatenate([np.zeros_like(ids[:, :1]), ids], 1)


def routed_sglang(form="meta_info", spread="1"):
    """Answers of 7, 1 and 5 rows over 4 layers, the first dense, and a filler row in the last one."""
    parts, answers = [draw(n, 3, 300, 3) * int(spread) for n in (7, 1, 5)], []
    for i, ids in enumerate(parts):
        rows = with_dense(ids)
        if i == 2:
            rows = np.concatenate([rows[:2], np.zeros_like(rows[:1]), rows[2:]])
        text = blob(rows, "<i4")
        count = dict(prompt_tokens=1, completion_tokens=len(rows))
        if form == "meta_info":
            answers.append(dict(text="x", meta_info=dict(count, routed_experts=text)))
        else:
            answers.append(dict(choices=[dict(index=0, sgl_ext=dict(routed_experts=text))], usage=count, model="m"))
    with open("answers.json", "w") as out:
        if form == "meta_info":
            out.writelines(json.dumps(a) + "\n" for a in answers)
        else:
            json.dump(answers, out, indent=1)
    blocks(np.concatenate(parts), sequences=[7, 1, 5])


def routed_vllm(form="npy"):
    """Two answers: prompts of 4 and 3 rows, one with two choices of 2 and 3 rows, one with 1 of 5."""
    import io

    def pack(ids, how):
        if how == "flat":
            return blob(ids, "<i2")
        if how == "shape":
            return dict(data=blob(ids, "<i2"), shape=list(ids.shape))
        if how == "lists":
            return ids.tolist()
        out = io.BytesIO()
        np.save(out, ids.astype(np.int16))
        return base64.b64encode(out.getvalue()).decode().rstrip("=")
    parts = [draw(n, 3, 300, 3) for n in (4, 2, 3, 3, 5)]
    a, b = [dict(model="tiny", prompt_routed_experts=pack(prompt, form),
                 choices=[dict(routed_experts=pack(c, form)) for c in choices], usage=usage)
            for prompt, choices, usage in ((parts[0], parts[1:3], {}),
                                           (parts[3], parts[4:], dict(prompt_tokens=3, completion_tokens=6)))]
    json.dump(a, open("a.json", "w"))
    json.dump(b, open("b.json", "w"), indent=2)
    blocks(np.concatenate(parts), sequences=[6, 3, 8])


def esft():
    """Two folders with layers 1, 2 and 10; sequences of 5 and 3 tokens, then of 4."""
    parts = [[draw(n, 3, 12, 3) for n in lengths] for lengths in ((5, 3), (4,))]
    weights = [[weights_of(p) / 4 for p in folder] for folder in parts]
    for folder in range(2):
        os.makedirs(f"rank_{folder}", exist_ok=True)
        for l, layer in enumerate((1, 2, 10)):
            with open(f"rank_{folder}/expert_weights_{layer}.txt", "w") as out:
                for ids, w in zip(parts[folder], weights[folder]):
                    out.write("\t".join(map(str, ids[:, l].ravel())) + "\t\t" +
                              "\t".join(map(str, w[:, l].ravel())) + "\n")
    blocks(np.concatenate(sum(parts, [])), np.concatenate(sum(weights, [])), sequences=[5, 3, 4])


def largest_remainders(share, total):
    exact = np.asarray(share, float) / np.sum(share) * total
    count = np.floor(exact).astype(int)
    for e in np.argsort(-(exact - count), kind="stable")[:total - count.sum()]:
        count[e] += 1
    return count


def csv(dialect):
    """Steps 10 and 20 (two epochs where there are some), layers 1 and 2, 6 experts, top-2 of 50
    tokens; shares are told to be of 53."""
    tokens, held = 50, {}
    told = 53 if dialect in ("prob", "distr") else tokens
    epochs = (0, 1) if dialect == "epochs" else (0,)
    head = dict(prob="step,layer,expert,prob", epochs="epoch,step,layer,expert,count",
                domains="model,kind,domain,layer,expert,count",
                distr="step,layer,expert,token_distr,expert_imp,token_dropped,expert_bias")[dialect]
    rows = []
    for epoch in epochs:
        for place, step in enumerate((10, 20)):
            for layer in 1, 2:
                load = counts_of(draw(tokens, 1, 6, 2), 6)[0]
                share = (load / load.sum()).round(4)
                step_of = dict(prob=step, distr=step, epochs=epoch * 21 + step, domains=0)[dialect]
                key = step_of, place if dialect == "domains" else 0, layer - 1, 0
                held[key] = load if dialect in ("epochs", "domains") else largest_remainders(share, 2 * told)
                for e in range(6):
                    rows.append(dict(prob=f"{step},{layer},{e},{share[e]}", epochs=f"{epoch},{step},{layer},{e},{load[e]}",
                                     distr=f"{step},{layer},{e},{share[e]},0.5,0,-0.01",
                                     domains=f"m,top2,d{place},idx{layer},{e},{load[e]}")[dialect])
                    if dialect == "domains":
                        rows.append(f"m,top1,d{place},idx{layer},{e},7")
    open("table.csv", "w").write("\n".join([head] + rows) + "\n")
    order = sorted(held)
    expect(counts=[held[o] for o in order], **calls([o + (told,) for o in order]))


def csv_recorded(path, model):
    """The table of counts of OLMoE and Mixtral by domain."""
    lines = [l.rstrip("\n").split(",") for l in open(path)][1:]
    lines = [l for l in lines if l[0] == model and l[1] == "expert_counts"]
    domains, layers = list(dict.fromkeys(l[2] for l in lines)), []
    k, experts = (2, 8) if "Mixtral" in model else (8, 64)
    counts = {}
    for _, _, domain, layer, expert, count in lines:
        layer = int(layer.removeprefix("idx"))
        counts.setdefault((0, domains.index(domain), layer, 0), np.zeros(experts, int))[int(expert)] = int(count)
    layers = sorted({key[2] for key in counts})
    order = sorted(counts)
    expect(counts=[counts[o] for o in order],
           **calls([(o[0], o[1], layers.index(o[2]), 0, counts[o].sum() // k) for o in order]))


def check(path):
    import h5py
    trace, expected = h5py.File(path), np.load("expected.npz")
    for name in expected.files:
        have, want = trace[name][:], expected[name]
        assert have.shape == want.shape, (name, have.shape, want.shape)
        close = np.allclose(have, want, 1e-6, 0) if want.dtype.kind == "f" else (have == want).all()
        assert close, (name, have, want)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
