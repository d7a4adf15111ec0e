"""What these benchmarks have in common: starting the program, its place and that of the recordings, traces made from these."""
import argparse
import lzma
import os
import subprocess
import sys
from collections import namedtuple

import numpy

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SMARTMOE = "SmartMoE history"
Recording = namedtuple("Recording", "file options beside")  # beside: option -> file
RECORDINGS = {
    "gpt-oss-20b": Recording("gpt-oss-20b/ids.npy.xz", ["--experts", "32", "--phase", "decode", "--name", "gpt-oss-20b"],
                             {"--weights": "gpt-oss-20b/weights.npy.xz", "--sequences": "gpt-oss-20b/sequences.csv"}),
    SMARTMOE: Recording("smartmoe-training-history/counts_iter_layer_rank_microbatch_expert.u16.npy.xz", ["--top-k", "2"], {}),
}


def stop(text):
    sys.exit(f"tests/bench/{os.path.basename(sys.argv[0])}: {text}")


def run(*command, ok=(0,)):
    """What the command prints; ends the benchmark unless its exit status is one of `ok`."""
    command = list(map(str, command))
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        stop(f"{command[0]}: {error.strerror}")
    if done.returncode not in ok:
        stop(f"{' '.join(command)}\n{done.stderr.strip()}")
    return done.stdout


class Parser(argparse.ArgumentParser):
    """Takes MIZAN and TRACES; its help is the docstring of the script."""

    def __init__(self, doc):
        super().__init__()
        self.doc = doc
        self.add_argument("mizan", nargs="?", default=os.path.join(ROOT, "build", "demo", "mizan"))
        self.add_argument("traces", nargs="?",
                          default=os.environ.get("MIZAN_TRACES") or os.path.join(os.path.dirname(ROOT), "shared", "traces"))

    def format_help(self):
        return self.doc.strip() + "\n"


def words(folder, name):
    """What `mizan trace import` takes for a recording, its main file first."""
    recording = RECORDINGS[name]
    beside = [word for option, file in recording.beside.items() for word in (option, os.path.join(folder, file))]
    return [os.path.join(folder, recording.file), *recording.options, *beside]


def absent(folder, name):
    """Whether a file of the recording is missing, which is said in a line."""
    for file in (RECORDINGS[name].file, *RECORDINGS[name].beside.values()):
        path = os.path.join(folder, file)
        if not os.path.exists(path):
            print(f"skipped: {path} is absent (MIZAN_TRACES names the folder)")
            return True
    return False


def imported(args, name, trace):
    """The recording as a trace in that file; None where it is absent."""
    if absent(args.traces, name):
        return None
    run(args.mizan, "trace", "import", "-q", *words(args.traces, name), "-o", trace)
    return trace


def apportioned(shares, total):
    """Whole numbers with that sum, each next to its share of it (largest remainders); over the last axis."""
    shares = numpy.asarray(shares, float)
    exact = shares * (total / shares.sum(-1, keepdims=True))
    whole = numpy.floor(exact).astype(int)
    place = numpy.argsort(numpy.argsort(whole - exact, axis=-1, kind="stable"), axis=-1)
    return whole + (place < total - whole.sum(-1, keepdims=True))


def of_counts(args, counts, top_k, trace):
    """A trace of counts [steps][layers][ranks][micro-batches][experts] in that file."""
    numpy.save(trace + ".npy", counts.astype(numpy.uint16))
    run(args.mizan, "trace", "import", "-q", trace + ".npy", "--top-k", top_k, "-o", trace)
    os.remove(trace + ".npy")
    return trace


def thinned(args, first, steps, tokens, trace):
    """Steps of the SmartMoE history with fewer tokens per rank and micro-batch, in the recorded shares; None where it is absent."""
    if absent(args.traces, SMARTMOE):
        return None
    with lzma.open(words(args.traces, SMARTMOE)[0]) as packed:
        recorded = numpy.load(packed)[first:first + steps]
    return of_counts(args, apportioned(recorded, 2 * tokens), 2, trace)
