#!/usr/bin/env python3
"""Which pairs of tokens and experts stay in the backward pass, from Python through ctypes.

usage: selection.py [LIBRARY]

LIBRARY: libmizan-kernels.so of a build (default: the installed one). 1,000 tokens choose 2 of 8 experts;
each expert may keep 100 pairs: those whose gradient of the down projection is largest,
w^2 ||g||^2 ||h||^2. Prints what each expert kept and checks it against a sort."""

import ctypes
import random
import sys

TOKENS, K, EXPERTS, QUOTA = 1000, 2, 8, 100
PAIRS = TOKENS * K
i32, i64, u64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p


class Options(ctypes.Structure):  # mz_kernels_options
    _fields_ = [("backend", i32), ("device", i32), ("threads", i32), ("streams", i32),
                ("library_dir", ctypes.c_char_p)]


class Score(ctypes.Structure):  # mz_score_args
    _fields_ = [("kind", i32), ("tokens", i64), ("pairs", i64), ("token_begin", pointer), ("k", i32),
                ("weight", pointer), ("grad_norm2", pointer), ("input_norm2", pointer),
                ("hidden_norm2", pointer), ("seed", u64), ("first_pair", u64), ("score", pointer)]


class Grouping(ctypes.Structure):  # mz_grouping
    _fields_ = [("expert", pointer), ("pairs", i64), ("experts", i32), ("count", pointer),
                ("begin", pointer), ("order", pointer)]


class Selection(ctypes.Structure):  # mz_selection
    _fields_ = [("score", pointer), ("order", pointer), ("begin", pointer), ("quota", pointer),
                ("pairs", i64), ("experts", i32), ("kept", pointer), ("kept_begin", pointer),
                ("keep", pointer), ("threshold", pointer), ("scaled", pointer), ("weight", pointer),
                ("seed", u64), ("first_pair", u64)]


class Context:
    def __init__(self, path):
        self.k = pointer()
        try:
            self.lib = ctypes.CDLL(path)
        except OSError as error:
            print(f"selection.py: {error}; give the library's path: selection.py LIBRARY", file=sys.stderr)
            sys.exit(2)
        for name in ("mz_kernels_error", "mz_kernels_describe"):
            getattr(self.lib, name).restype = ctypes.c_char_p
        for name in ("mz_group_pairs_workspace", "mz_select_workspace"):
            getattr(self.lib, name).restype = ctypes.c_size_t
        message = ctypes.create_string_buffer(300)
        options = Options(backend=0, streams=1)
        if self.lib.mz_kernels_open(ctypes.byref(options), ctypes.byref(self.k), message, 300):
            sys.exit("selection.py: " + message.value.decode())

    def call(self, name, args, workspace=None):
        """One operation on stream 0. On the host context memory is ordinary memory."""
        extra = ()
        if workspace:
            need = getattr(self.lib, workspace)(self.k, ctypes.byref(args))
            extra = (ctypes.create_string_buffer(need + 1),)
        if getattr(self.lib, name)(self.k, i32(0), ctypes.byref(args), *extra):
            sys.exit("selection.py: " + self.lib.mz_kernels_error(self.k).decode())


def address(array):
    return ctypes.cast(array, pointer)


def main():
    context = Context(sys.argv[1] if len(sys.argv) > 1 else "libmizan-kernels.so.1")
    draw = random.Random(1)
    floats, ints = ctypes.c_float * PAIRS, i64 * PAIRS
    expert = (i32 * PAIRS)(*[e for _ in range(TOKENS) for e in draw.sample(range(EXPERTS), K)])
    weight, hidden = (floats(*[draw.random() for _ in range(PAIRS)]) for _ in range(2))
    gradient = (ctypes.c_float * TOKENS)(*[draw.random() for _ in range(TOKENS)])
    score, order, kept = floats(), ints(), ints()
    begin, kept_begin = (i64 * (EXPERTS + 1))(), (i64 * (EXPERTS + 1))()
    quota = (i64 * EXPERTS)(*[QUOTA] * EXPERTS)

    context.call("mz_score_pairs", Score(kind=0, tokens=TOKENS, pairs=PAIRS, k=K, weight=address(weight),
                                         grad_norm2=address(gradient), hidden_norm2=address(hidden),
                                         score=address(score)))
    context.call("mz_group_pairs", Grouping(address(expert), PAIRS, EXPERTS, None, address(begin),
                                            address(order)), "mz_group_pairs_workspace")
    context.call("mz_select_pairs", Selection(address(score), address(order), address(begin),
                                              address(quota), PAIRS, EXPERTS, address(kept),
                                              address(kept_begin)), "mz_select_workspace")
    print(context.lib.mz_kernels_describe(context.k).decode())
    for e in range(EXPERTS):
        pairs = list(order[begin[e]:begin[e + 1]])
        mine = list(kept[kept_begin[e]:kept_begin[e + 1]])
        best = sorted(pairs, key=lambda p: -score[p])[:QUOTA]
        mass = sum(score[p] for p in mine) / sum(score[p] for p in pairs)
        print("expert %d keeps %3d of %3d pairs, %2.0f %% of their score" %
              (e, len(mine), len(pairs), 100 * mass))
        if mine != sorted(best):
            sys.exit("selection.py: expert %d: a sort keeps other pairs" % e)
    context.lib.mz_kernels_close(ctypes.byref(context.k))


main()
