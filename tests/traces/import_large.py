"""import_large.py MIZAN: a shuffled log whose rows are more than an importer may hold (64 MiB): the trace is right,
memory stays far below the size of the rows, and nothing is left of what was sorted outside of it."""
import random
import resource
import sys

import h5py
import numpy as np

import import_table as table

K, EXPERTS, SEQUENCES, TOKENS = 512, 4096, 30, 900  # 27,000 rows of 16 + 6 K bytes: 83 MB


CHOICES = [[(first + 1023 * i) % EXPERTS for i in range(K)] for first in range(64)]  # K different ids, in no order
TEXTS = [str(ids) for ids in CHOICES]


def choice(sequence, token):
    return (sequence * 31 + token * 7) % len(CHOICES)


def write_log(path):
    order = [(s, t) for s in range(SEQUENCES) for t in range(TOKENS)]
    first = [(s, 0) for s in range(SEQUENCES)]  # sequences are numbered as they appear
    rest = order.copy()
    random.Random(4).shuffle(rest)
    weights = ",".join(["1"] * K)
    with open(path, "w") as out:
        for s, t in first + [one for one in rest if one[1] > 0]:
            out.write(f'{{"type":"route","req_id":{s},"token_idx":{t},"layer":3,"topk_ids":{TEXTS[choice(s, t)]},'
                      f'"topk_weights":[{weights}]}}\n')


def check(mizan):
    with table.folder():
        write_log("log.jsonl")
        done = table.Import(mizan, "vllm-logger", ["log.jsonl"], "--experts 4096 --phase decode --deflate 0 -q".split())
        if done.code or done.left != ["out.h5"]:
            return f"exit code {done.code}, left {done.left}: {done.said}"
        with h5py.File("out.h5") as trace:
            if trace["sequences/tokens"][:].tolist() != [TOKENS] * SEQUENCES:
                return "the sequences are not those of the log"
            have = trace["pairs/expert"][:].reshape(SEQUENCES, TOKENS, K)
        for s in range(SEQUENCES):
            if not np.array_equal(have[s], [CHOICES[choice(s, t)] for t in range(TOKENS)]):
                return f"sequence {s} has other ids"
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    print(f"peak {peak} MiB for {SEQUENCES * TOKENS * (16 + 6 * K) >> 20} MiB of rows")
    sanitized = b"__asan_init" in open(mizan, "rb").read()
    return None if peak < 112 or sanitized else f"{peak} MiB at the peak"


if __name__ == "__main__":
    sys.exit(check(sys.argv[1]))
