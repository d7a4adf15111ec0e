#!/usr/bin/python3
"""Optimizer steps of libmizan-kernels against the published formulas in numpy, 200 steps each.

usage: reference_update.py LIBRARY [cuda]

With "cuda" the library is one with an emulated device, which takes fewer steps of all but SkewAdam.

The formulas are those of the SkewAdam study's code (moe-variants-and-optimizers.md 6.3), in double
precision; state is carried by this script alone. Parameters of fp32 are carried as well. Parameters
of bf16 are taken from the library before each step, so that one rounding that fell the other way does
not hide the next: each must be what the formula and the same random bits give, for the
unrounded value or for a neighbour of it that fp32 sums may have led to."""

import ctypes
import sys

import numpy as np

STEPS = 200
EMULATED_STEPS = 8  # of what writes value by value, on an emulated device
HIDDEN, VISIBLE = 0.05, 1.0  # decay: times the rate below and above 2^-9, half a last place of bf16
SKEWADAM, ADAMW, ADAFACTOR, LION, MUON = range(5)
F32, BF16 = 0, 1
NEAREST, DITHER, STOCHASTIC = range(3)
i32, i64, u64, f32, flag, pointer = (ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_float,
                                     ctypes.c_bool, ctypes.c_void_p)


class Options(ctypes.Structure):
    _fields_ = [("backend", i32), ("device", i32), ("threads", i32), ("streams", i32),
                ("library_dir", ctypes.c_char_p)]


class Update(ctypes.Structure):
    _fields_ = [("kind", i32), ("matrices", i64), ("rows", i64), ("cols", i64), ("type", i32),
                ("gradient_type", i32), ("parameter", pointer), ("gradient", pointer),
                ("grad_scale", pointer), ("rate", f32), ("beta1", f32), ("decay", f32), ("beta2", f32),
                ("eps", f32), ("step", i64), ("momentum", flag), ("factored", flag),
                ("clip_rms", flag), ("clip_tensor", flag), ("newton_schulz", i32), ("nesterov", flag),
                ("update_scale", f32), ("rounding", i32), ("seed", u64), ("tensor", u64),
                ("m", pointer), ("v", pointer), ("row", pointer), ("col", pointer)]


# ---- bf16 and random bits -------------------------------------------------------------------------

def bf16_bits(x):
    """Nearest even, of float32 values."""
    u = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7fff + (u >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def philox(seed, a, b, c):
    """The four words of counter (a low, a high, b, c), for an array of a."""
    mask = np.uint64(0xffffffff)
    a = np.asarray(a, np.uint64)
    x = [a & mask, a >> np.uint64(32), np.full_like(a, b & 0xffffffff), np.full_like(a, c & 0xffffffff)]
    k0, k1 = seed & 0xffffffff, seed >> 32
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * x[0], np.uint64(0xCD9E8D57) * x[2]
        x = [(second >> np.uint64(32)) ^ x[1] ^ np.uint64(k0), second & mask,
             (first >> np.uint64(32)) ^ x[3] ^ np.uint64(k1), first & mask]
        k0, k1 = (k0 + 0x9E3779B9) & 0xffffffff, (k1 + 0xBB67AE85) & 0xffffffff
    return np.stack(x, -1)


def element_bits(seed, step, tensor, n):
    """16 bits an element (kernels/arithmetic.h). Philox gives each 8192 elements a key; their words are
    counted and mixed; two elements share a word, the lower half first."""
    stream = philox(seed, [tensor], step & 0xffffffff, step >> 32)[0]
    numbers = np.arange((n + 8191) // 8192)
    start, increment, *masks = philox(int(stream[1]) << 32 | int(stream[0]), numbers, int(stream[2]),
                                      int(stream[3])).T[:, :, None]
    mask = np.uint64(0xffffffff)
    x = start + np.arange(4096, dtype=np.uint64) * (increment | np.uint64(1)) & mask
    for shift, key, factor in ((17, np.uint64(0), 0xed5ad4bb), (11, masks[0], 0xac4c1b51), (15, masks[1], 0x31848bab)):
        x = (x ^ x >> np.uint64(shift) ^ key) * np.uint64(factor) & mask
    x ^= x >> np.uint64(14)
    return np.stack([x & np.uint64(0xffff), x >> np.uint64(16)], -1).reshape(-1)[:n].astype(np.uint32)


def written(q, rounding, bits):
    """The bf16 bits that are written for the fp32 value q."""
    q = np.asarray(q, np.float32)
    if rounding == DITHER:
        # |q| of the formula written as q: the draw is mirrored where q is negative
        s = (bits.astype(np.float64) / 65536 - 0.5) * 2.0 ** -7
        q = q * (1 + s).astype(np.float32)
    elif rounding == STOCHASTIC:
        return ((q.view(np.uint32) + bits) >> 16).astype(np.uint16)
    return bf16_bits(q)


# ---- the formulas ---------------------------------------------------------------------------------

class Reference:
    def __init__(self, u, shape):
        self.u, self.t = u, 0
        self.m, self.v = np.zeros(shape), np.zeros(shape)
        self.row, self.col = np.zeros(shape[:2]), np.zeros((shape[0], shape[2]))
        vector = shape[2] == 1
        self.factored = not vector and (u.kind == ADAFACTOR or (u.kind == SKEWADAM and u.factored))

    def denominators(self, g2, beta2, floor, mean_floor):
        if not self.factored:
            self.v = beta2 * self.v + (1 - beta2) * g2
            return np.sqrt(np.maximum(self.v, floor))
        self.row = beta2 * self.row + (1 - beta2) * g2.mean(2)
        self.col = beta2 * self.col + (1 - beta2) * g2.mean(1)
        mean = np.maximum(self.row.mean(1, keepdims=True), mean_floor)
        return (np.sqrt(np.maximum(self.row / mean, floor))[:, :, None] *
                np.sqrt(np.maximum(self.col, floor))[:, None, :])

    def clipped(self, x):
        if not self.u.clip_rms:
            return x
        axes = None if self.u.clip_tensor else (1, 2)
        return x / np.maximum(1, np.sqrt(np.mean(x * x, axis=axes, keepdims=True)))

    def update(self, g):
        """What is subtracted, before the rate."""
        u, b1, b2 = self.u, float(self.u.beta1), float(self.u.beta2)
        self.t += 1
        t = self.t
        if u.kind == LION:
            direction = np.sign(b1 * self.m + (1 - b1) * g)
            self.m = b2 * self.m + (1 - b2) * g
            return direction
        if u.kind == ADAMW:
            self.m = b1 * self.m + (1 - b1) * g
            self.v = b2 * self.v + (1 - b2) * g * g
            return self.m / (np.sqrt(self.v) / np.sqrt(1 - b2 ** t) + float(u.eps)) / (1 - b1 ** t)
        if u.kind == ADAFACTOR:
            return self.clipped(g / self.denominators(g * g + float(u.eps), 1 - t ** -0.8, 0, 0))
        base = g * np.sqrt(1 - b2 ** t)
        if u.momentum:
            self.m = b1 * self.m + (1 - b1) * g
            base = self.m * np.sqrt(1 - b2 ** t) / (1 - b1 ** t)
        return self.clipped(base / self.denominators(g * g, b2, float(u.eps), 1e-15))

    def muon(self, g):
        u = self.u
        self.m = float(u.beta1) * self.m + g
        used = g + float(u.beta1) * self.m if u.nesterov else self.m
        near = lambda x: from_bf16(bf16_bits(x))
        out = np.empty_like(used)
        for i, one in enumerate(used):
            x = near(one.T if one.shape[0] > one.shape[1] else one)
            x = near(x / (np.linalg.norm(x.astype(np.float64)) + 1e-7))
            for _ in range(u.newton_schulz):
                a = near(x @ x.T)
                b = near(-4.7750 * a + 2.0315 * near(a @ a))
                x = near(3.4445 * x + near(b @ x))
            out[i] = x.T if one.shape[0] > one.shape[1] else x
        return out * float(u.update_scale)


# ---- comparison -----------------------------------------------------------------------------------

COPY_IN, COPY_OUT = range(2)


class Library:
    def __init__(self, path, cuda):
        self.lib, self.cuda = ctypes.CDLL(path), cuda
        self.context = pointer()
        self.lib.mz_update_workspace.restype = ctypes.c_size_t
        self.lib.mz_update_state_bytes.restype = i64
        self.lib.mz_kernels_error.restype = ctypes.c_char_p
        options = Options(backend=1 if cuda else 0, threads=2, streams=1)
        if self.lib.mz_kernels_open(ctypes.byref(options), ctypes.byref(self.context), None, 0):
            sys.exit("cannot open the backend")

    def must(self, status):
        if status:
            sys.exit(self.lib.mz_kernels_error(self.context).decode())

    def placed(self, array):
        """Context memory with a copy; on the host the array itself."""
        if not self.cuda:
            return pointer(array.ctypes.data)
        memory = pointer()
        self.must(self.lib.mz_kernels_alloc(self.context, ctypes.c_size_t(array.nbytes), ctypes.byref(memory)))
        self.copy(COPY_IN, memory, pointer(array.ctypes.data), array.nbytes)
        return memory

    def copy(self, kind, to, source, size):
        self.must(self.lib.mz_kernels_copy(self.context, 0, kind, to, source, ctypes.c_size_t(size)))
        self.must(self.lib.mz_kernels_sync(self.context, 0))

    def step(self, u, arrays):
        """arrays: by the names of u's pointers, changed in place."""
        memory = {name: self.placed(array) for name, array in arrays.items()}
        for name, place in memory.items():
            setattr(u, name, place)
        need = self.lib.mz_update_workspace(self.context, ctypes.byref(u))
        scratch = np.full(need + 256, 0xff, np.uint8)
        place = self.placed(scratch)
        aligned = pointer(place.value + -place.value % 256)
        self.must(self.lib.mz_update_step(self.context, 0, ctypes.byref(u), aligned))
        if self.cuda:
            for name, array in arrays.items():
                self.copy(COPY_OUT, pointer(array.ctypes.data), memory[name], array.nbytes)
            for place in (place, *memory.values()):
                self.lib.mz_kernels_free(self.context, place)


def gradients(rng, shape, regime):
    g = rng.standard_normal(shape)
    if regime == "tiny":  # below the floor inside the roots, 1e-8
        return g * 1e-6
    if regime == "rows":  # rows of very different size, some without any gradient, some far below others
        scale = 10.0 ** rng.integers(-7, 0, shape[:2] + (1,))
        return g * scale * (rng.random(shape[:2] + (1,)) < 0.9)
    return g * 0.1


def fail(name, t, what):
    sys.exit("%s: step %d: %s" % (name, t, what))


def near(name, t, what, got, want, relative, absolute):
    wrong = ~(np.abs(got - want) <= relative * np.abs(want) + absolute)
    if wrong.any():
        i = np.unravel_index(np.argmax(wrong), wrong.shape)
        fail(name, t, "%s%s is %.9g, not %.9g" % (what, list(i), got[i], want[i]))


def check_written(name, t, u, p, before, x, bits):
    """p: what the library wrote for `before` and the update x. Returns the share that is the formula's
    bit by bit."""
    keep = np.float32(1 - np.float32(u.rate) * np.float32(u.decay))
    start = before * keep if u.kind == ADAFACTOR else from_bf16(bf16_bits(before * keep))
    q = start.astype(np.float64) - float(u.rate) * x
    slack = 2e-7 * np.abs(start) + 5e-6 * float(u.rate) * np.abs(x) + 1e-30
    low, exact, high = (written(v, u.rounding, bits.reshape(q.shape)) for v in (q - slack, q, q + slack))
    ends = np.sort([from_bf16(low), from_bf16(high)], axis=0)
    wrong = (from_bf16(p) < ends[0]) | (from_bf16(p) > ends[1])
    if wrong.any():
        i = np.unravel_index(np.argmax(wrong), p.shape)
        fail(name, t, "wrote 0x%04x at %s for %.9g, not 0x%04x" % (p[i], list(i), q[i], exact[i]))
    return np.mean(p == exact)


def check_muon(name, t, u, before, p, x):
    """Sums of another order may end in other bits of X: what was subtracted is x up to 0.05 of the
    update's scale, on average up to 0.004; of bf16 also up to what their rounding moves."""
    old, new = (from_bf16(v) if u.type == BF16 else v for v in (before, p))
    rate, scale = float(u.rate), float(u.update_scale)
    kept = old.astype(np.float64) * (1 - rate * float(u.decay))
    ulps = 2.0 ** -7 * np.maximum(np.abs(old), np.abs(new)) if u.type == BF16 else 1e-6 * np.abs(old)
    off = np.maximum(np.abs(kept - new - rate * x) - ulps, 0) / (rate * scale)
    if off.max() > 0.05 or off.mean() > 0.004:
        fail(name, t, "orthogonal update off by %g" % off.max())


def compare(library, name, shape, regime, seed, steps=STEPS, **settings):
    rng = np.random.default_rng(seed)
    u = Update(matrices=shape[0], rows=shape[1], cols=shape[2], rate=3e-3, beta1=0.9, beta2=0.999, eps=1e-8,
               decay=VISIBLE if seed % 4 < 2 else HIDDEN, update_scale=1, seed=seed * 977, tensor=seed)
    for key, value in settings.items():
        setattr(u, key, value)
    reference = Reference(u, shape)
    p = (rng.standard_normal(shape) * 0.02).astype(np.float32)
    if u.type == BF16:
        p = bf16_bits(p)
    model = p.astype(np.float64)
    state = {"m": np.zeros(shape, np.float32), "v": np.zeros(shape, np.float32),
             "row": np.zeros(shape[:2], np.float32), "col": np.zeros((shape[0], shape[2]), np.float32)}
    kept = (["m"] if u.kind in (ADAMW, LION, MUON) or (u.kind == SKEWADAM and u.momentum) else [])
    kept += ["row", "col"] if reference.factored else [] if u.kind in (LION, MUON) else ["v"]
    if library.lib.mz_update_state_bytes(ctypes.byref(u)) != sum(state[s].nbytes for s in kept):
        fail(name, 0, "state bytes")
    arrays = {"parameter": p, "grad_scale": np.array([0.25], np.float32), **{s: state[s] for s in kept}}
    exact = []
    for t in range(1, steps + 1):
        g = gradients(rng, shape, regime).astype(np.float32)
        if u.gradient_type == BF16:
            stored = bf16_bits(g)
            g = from_bf16(stored)
        else:
            stored = g
        u.step = t
        before = p.copy()
        library.step(u, {**arrays, "gradient": stored})
        if u.kind == MUON:
            x = reference.muon(0.25 * g.astype(np.float64))
            check_muon(name, t, u, before, p, x)
            continue
        x = reference.update(0.25 * g.astype(np.float64))
        if u.type == BF16:
            bits = element_bits(u.seed, t, u.tensor, p.size)
            exact.append(check_written(name, t, u, p, from_bf16(before), x, bits))
        else:
            model = model * (1 - float(u.rate) * float(u.decay)) - float(u.rate) * x
            near(name, t, "p", p.astype(np.float64), model, 1e-5, 2e-6 * float(u.rate) * t)
    for s in kept:
        want = getattr(reference, s)
        near(name, steps, s, state[s].astype(np.float64), want, 2e-5, 1e-6 * np.abs(want).max())
    if exact and np.mean(exact) < 0.999:
        fail(name, steps, "only %.5f of the writes are the formula's bits" % np.mean(exact))
    print("%-58s %d steps%s" % (name, steps, ", %.5f of the bits" % np.mean(exact) if exact else ""))


def published_vectors():
    want = [[0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8], [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]]
    ones = 0xffffffff
    got = [philox(0, [0], 0, 0)[0], philox(ones << 32 | ones, np.array([ones << 32 | ones], np.uint64), ones, ones)[0]]
    if not np.array_equal(np.array(got), np.array(want, np.uint64)):
        sys.exit("this script's random bits are not Philox's")


TIERS = [("backbone", True, True), ("experts", False, True), ("router", False, False),
         ("router with momentum", True, False)]
WIDE, TALL, VECTOR = (2, 11, 40), (3, 34, 8), (1, 70, 1)  # rows are no multiple of the host's three at a time


def skewadam(library):
    """Every tier at every size of gradients; emulated, with one of the shapes in turn."""
    seed = 1
    for i, regime in enumerate(("tiny", "rows", "large")):
        for j, (tier, momentum, factored) in enumerate(TIERS):
            for k, (shape, kind) in enumerate(((WIDE, F32), (TALL, BF16), (VECTOR, F32))):
                seed += 1
                if library.cuda and (i + j + k) % 3:
                    continue
                compare(library, "skewadam %s, %s, %s" % (tier, regime, shape), shape, regime, seed,
                        kind=SKEWADAM, type=kind, gradient_type=kind, momentum=momentum,
                        factored=factored, clip_rms=True, clip_tensor=seed % 2 == 0,
                        decay=HIDDEN if (i + j) % 2 else VISIBLE, rounding=DITHER if seed // 3 % 2 else STOCHASTIC)
    compare(library, "skewadam experts, eps 1e-16, no clip", WIDE, "tiny", 80, kind=SKEWADAM, eps=1e-16,
            factored=True, type=BF16, rounding=DITHER, gradient_type=F32)
    if library.cuda:
        return
    for rounding in (NEAREST, DITHER, STOCHASTIC):
        for decay in (HIDDEN, VISIBLE):
            compare(library, "skewadam experts, rows, bf16, %s, rounding %d, decay %g" % (WIDE, rounding, decay), WIDE,
                    "rows", 81 + rounding, kind=SKEWADAM, factored=True, clip_rms=True, type=BF16, gradient_type=BF16,
                    decay=decay, rounding=rounding)


def main():
    library = Library(sys.argv[1], sys.argv[2:] == ["cuda"])
    published_vectors()
    skewadam(library)
    if not library.cuda:
        long_rows(library)
    others(library, EMULATED_STEPS if library.cuda else STEPS)
    muons(library, 2 if library.cuda else STEPS)


def long_rows(library):
    """A substream of random bits ends within a row."""
    for shape in ((1, 3, 4099), (1, 3, 4098)):
        for momentum in (False, True):
            compare(library, "skewadam bf16, %s, momentum %d" % (shape, momentum), shape, "large", 88 + momentum,
                    kind=SKEWADAM, momentum=momentum, factored=True, clip_rms=True, type=BF16, gradient_type=BF16,
                    rounding=STOCHASTIC if momentum else DITHER, tensor=977 << 40)


def others(library, steps):
    seed = 37
    for shape in (WIDE, VECTOR):
        for kind, rounding in ((F32, NEAREST), (BF16, DITHER)):
            for name, number, more in (("adamw", ADAMW, {}), ("lion", LION, {"beta2": 0.99}),
                                       ("adafactor", ADAFACTOR, {"eps": 1e-30, "clip_rms": True})):
                seed += 1
                rounding = NEAREST if number == ADAFACTOR else rounding
                compare(library, "%s, %s, type %d" % (name, shape, kind), shape, "rows", seed, steps,
                        kind=number, type=kind, gradient_type=kind, rounding=rounding, **more)


def muons(library, steps):
    """Several matrices with sides that are no multiple of 8, decay, a scale; either type."""
    for shape, nesterov, kind, scale in ((WIDE, False, F32, 1), (TALL, True, F32, 0.2), (WIDE, True, BF16, 3),
                                         (TALL, False, BF16, 1)):
        compare(library, "muon, %s, type %d" % (shape, kind), shape, "large", 90, steps, kind=MUON, beta1=0.95,
                decay=2, newton_schulz=5 if nesterov else 3, nesterov=nesterov, rate=0.02, update_scale=scale,
                type=kind, gradient_type=kind, rounding=STOCHASTIC)


main()
