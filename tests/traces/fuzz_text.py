"""fuzz_text.py MIZAN N SEED: damages the files of make_text.py N times per format at random. Every import
must end with 0 and a sound trace, or with 2, one line on stderr and no file."""
import os
import random
import re
import subprocess
import sys
import tempfile

mizan, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
make = os.path.join(os.path.dirname(os.path.abspath(__file__)), "make_text.py")

CASES = [  # what make_text.py writes, the format, its files, what it must be told
    ("megatron_router_logits", "megatron-route", "router_trace_rank0.jsonl router_trace_rank1.jsonl", "--scores softmax-all --phase train"),
    ("megatron_tpe", "megatron-tpe", "rank0.jsonl rank1.jsonl", "--top-k 2 --ep-size 2 --dropped"),
    ("sglang_json 3", "sglang-json", "counts.json", "--top-k 2 --phase decode"),
    ("nf4", "nf4-jsonl", "a.jsonl b.jsonl", "--experts 7"),
    ("vllm_logger", "vllm-logger", "log.jsonl", "--experts 8 --phase decode"),
    ("speculative", "speculative", "log.jsonl", "--experts 8 --phase decode"),
    ("moe_balance", "moe-balance", "log.jsonl", "--experts 8 --phase decode"),
    ("routed_sglang", "routed-json", "answers.json", "--experts 300 --phase decode --layers 4 --top-k 3"),
    ("routed_vllm npy", "routed-json", "a.json b.json", "--experts 300 --phase decode"),
    ("routed_vllm shape", "routed-json", "a.json b.json", "--experts 300 --phase decode"),
    ("routed_vllm lists", "routed-json", "a.json b.json", "--experts 300 --phase decode"),
    ("esft", "esft-text", "rank_0/expert_weights_1.txt rank_0/expert_weights_2.txt rank_0/expert_weights_10.txt",
     "--experts 12 --top-k 3 --phase prefill"),
    ("csv prob", "counts-csv", "table.csv", "--top-k 2 --tokens 50 --phase train"),
    ("csv domains", "counts-csv", "table.csv", "--top-k 2 --phase prefill --method top2"),
]
TOKENS = [b"-1", b"1e400", b"null", b"[]", b"{}", b'""', b"99999999999999999999", b"true", b"0", b"[[]]", b"1.5",
          b'"\\u0000"', b"\xff", b"\n", b",", b"\t", b"9223372036854775807", b"65535", b'"a"', b"\x00"]


def replace(rnd, data, pattern):
    found = list(re.finditer(pattern, bytes(data)))
    if found:
        one = rnd.choice(found)
        data[one.start():one.end()] = rnd.choice(TOKENS)
    return data


def damage(rnd, data):
    place, kind = rnd.randrange(len(data)), rnd.randrange(7)
    if kind == 0:
        data[place] = rnd.randrange(256)
    elif kind == 1:
        del data[place:place + rnd.randint(1, 40)]
    elif kind == 2:
        data[place:place] = rnd.choice(TOKENS)
    elif kind == 3:
        del data[place:]
    elif kind == 4:
        data = replace(rnd, data, rb"-?\d+(\.\d+)?")
    elif kind == 5:
        lines = bytes(data).split(b"\n")
        a, b = rnd.randrange(len(lines)), rnd.randrange(len(lines))
        lines[a], lines[b] = lines[b], lines[a]
        data = bytearray(b"\n".join(lines))
    else:
        data = replace(rnd, data, rb'"[a-z_]+"|\[[^\[\]]*\]')
    return data


def judge(result):
    """What is wrong with an import's end, or None."""
    left = [name for name in os.listdir() if name.startswith("out.h5")]
    if result.returncode == 2:
        return "more than one line" if result.stderr.count(b"\n") != 1 else "files are left" if left else None
    if result.returncode:
        return "wrong exit code"
    sound = subprocess.run([mizan, "trace", "check", "out.h5"], capture_output=True, timeout=60)
    os.unlink("out.h5")
    return "the trace is not sound" if sound.returncode else None


for what, form, files, options in CASES:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        subprocess.run([sys.executable, make, *what.split()], check=True)
        files, rnd = files.split(), random.Random(f"{seed} {what}")
        command = [mizan, "trace", "import", "-q", "-f", form, "--force", *files, *options.split(), "-o", "out.h5"]
        for i in range(count):
            name = rnd.choice(files)
            good = open(name, "rb").read()
            data = bytearray(good)
            for _ in range(rnd.randint(1, 3)):
                data = damage(rnd, data) if data else data
            open(name, "wb").write(data)
            result = subprocess.run(command, capture_output=True, timeout=60)
            fault = judge(result)
            if fault:
                sys.exit(f"{what}, damage {i} of seed {seed}: {fault}: exit code {result.returncode}: "
                         f"{result.stderr.decode(errors='replace')}\n{bytes(data[:2000])}")
            open(name, "wb").write(good)
        os.chdir("/")
