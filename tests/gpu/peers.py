"""peers.py COUNTS SECONDS: times what torch and triton offer for the operations of timing.c, on the same
numbers of rows per expert; one line each: operation, shape, peer, milliseconds. Whatever is missing or
fails is named on standard error and left out."""
import statistics
import sys
import time

import torch

DEADLINE = time.monotonic() + float(sys.argv[2])


def milliseconds(run):
    """Median of three stretches of about 50 ms after two calls to warm up."""
    def stretch(calls):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(calls):
            run()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / calls
    stretch(1)
    once = stretch(1)
    calls = max(1, int(50 / max(once, 0.1)))
    return statistics.median(stretch(calls) for _ in range(3))


def report(operation, shape, peer, make):
    """make() sets up and returns the call to time."""
    if time.monotonic() > DEADLINE:
        return
    try:
        print(operation, shape, peer, f"{milliseconds(make()):.5f}", sep="\t", flush=True)
    except Exception as error:  # a peer that refuses is no failure of ours
        print(f"peers: {peer}, {operation}, {shape}: {str(error).splitlines()[0][:120]}", file=sys.stderr)
    torch.cuda.empty_cache()


def rows(n, width):
    return torch.randn(n, width, device="cuda", dtype=torch.bfloat16)


def torch_forward(counts, k, n):
    x, w = rows(sum(counts), k), rows(len(counts) * n, k).view(len(counts), n, k)
    ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    return lambda: torch._grouped_mm(x, w.transpose(-2, -1), offs=ends)


def torch_dgrad(counts, k, n):
    dy, w = rows(sum(counts), n), rows(len(counts) * n, k).view(len(counts), n, k)
    ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    return lambda: torch._grouped_mm(dy, w, offs=ends)


def torch_wgrad(counts, k, n):
    dy, x = rows(sum(counts), n), rows(sum(counts), k)
    ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    return lambda: torch._grouped_mm(dy.t(), x, offs=ends)


def make_triton():
    """A grouped product in the manner of triton's tutorials: one program per tile, found in a list."""
    import triton
    import triton.language as tl

    @triton.jit
    def product(x, w, y, tile_group, tile_row, ends, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
        tile = tl.program_id(0)
        group = tl.load(tile_group + tile).to(tl.int64)
        row = tl.load(tile_row + tile) + tl.arange(0, M)
        col = tl.program_id(1) * N + tl.arange(0, N)
        depth = tl.arange(0, K)
        inside = row < tl.load(ends + group)
        a = x + row[:, None] * k + depth[None, :]
        b = w + group * n * k + col[None, :] * k + depth[:, None]
        total = tl.zeros((M, N), dtype=tl.float32)
        for _ in range(0, k, K):
            total = tl.dot(tl.load(a, mask=inside[:, None], other=0.0), tl.load(b), total)
            a += K
            b += K
        tl.store(y + row[:, None] * n + col[None, :], total.to(tl.bfloat16), mask=inside[:, None])

    def forward(counts, k, n):
        M, N, K = 128, 128, 64
        if n % N or k % K:
            raise ValueError("sizes that fill no tile")
        x, w, y = rows(sum(counts), k), rows(len(counts) * n, k), rows(sum(counts), n)
        ends = torch.tensor(counts, device="cuda").cumsum(0)
        group, row, begin = [], [], 0
        for g, count in enumerate(counts):
            group += [g] * (-(-count // M))
            row += range(begin, begin + count, M)
            begin += count
        group, row = torch.tensor(group, device="cuda"), torch.tensor(row, device="cuda")
        grid = (len(group), n // N)
        return lambda: product[grid](x, w, y, group, row, ends, n, k, M=M, N=N, K=K, num_warps=8, num_stages=3)
    return forward


def fused_adamw(counts, k, n):
    parameter = torch.nn.Parameter(rows(len(counts) * n, k))
    parameter.grad = rows(len(counts) * n, k)
    optimizer = torch.optim.AdamW([parameter], lr=1e-6, fused=True)
    return optimizer.step


def index_rows(counts, k, top):
    x = rows(sum(counts) // top, k)
    token = torch.randint(0, len(x), (sum(counts),), device="cuda")
    return lambda: torch.index_select(x, 0, token)


def softmax_topk(counts, top):
    logits = torch.randn(sum(counts) // top, len(counts), device="cuda")

    def run():
        weight, _ = torch.topk(torch.softmax(logits, -1), top)
        return weight / weight.sum(-1, keepdim=True)
    return run


def silu_product(counts, width):
    both = rows(sum(counts), 2 * width)
    return lambda: torch.nn.functional.silu(both[:, :width]) * both[:, width:]


def main():
    try:
        triton_forward = make_triton()
    except ImportError:
        triton_forward = None
    top = 8  # pairs of a token in every shape of timing.c
    for line in open(sys.argv[1]):
        shape, hidden, width, *counts = line.rstrip("\n").split("\t")
        hidden, width, counts = int(hidden), int(width), [int(c) for c in counts]
        both = 2 * width
        report("up forward", shape, "torch._grouped_mm", lambda: torch_forward(counts, hidden, both))
        report("down forward", shape, "torch._grouped_mm", lambda: torch_forward(counts, width, hidden))
        report("up dgrad", shape, "torch._grouped_mm", lambda: torch_dgrad(counts, hidden, both))
        report("up wgrad", shape, "torch._grouped_mm", lambda: torch_wgrad(counts, hidden, both))
        if triton_forward:
            report("up forward", shape, "triton", lambda: triton_forward(counts, hidden, both))
        report("pack", shape, "torch.index_select", lambda: index_rows(counts, hidden, top))
        report("swiglu forward", shape, "torch silu * up", lambda: silu_product(counts, width))
        report("router softmax top-k", shape, "torch softmax, topk", lambda: softmax_topk(counts, top))
        report("adamw", shape, "torch fused AdamW, bf16 state", lambda: fused_adamw(counts, hidden, both))


main()
