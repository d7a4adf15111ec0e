"""The Python package: reading, writing, merging, and recording a small router without Hugging
Face.

Runs with python3 -m unittest. MIZAN names the program whose `trace check` judges what is written.
"""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
import unittest
import warnings

import h5py
import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "traces", "python"))

import mizan  # noqa: E402

PROGRAM = os.environ.get("MIZAN", os.path.join(ROOT, "build", "demo", "mizan"))
FACTS = {"layers": 2, "experts": 8, "top_k": 2, "phase": "train", "ranks": 1}


def check(test, *paths):
    """`mizan trace check` finds the traces sound."""
    done = subprocess.run([PROGRAM, "trace", "check", *paths], capture_output=True, text=True)
    test.assertEqual(done.returncode, 0, done.stdout + done.stderr)


def draw(rng, tokens, top_k=2, experts=8):
    ids = [rng.permutation(experts)[:top_k] for _ in range(tokens)]
    return np.array(ids, int).reshape(tokens, top_k), rng.random((tokens, top_k), np.float32)


class InFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "t.h5")
        self.folder = folder.name


class Writing(InFolder):
    def write(self, path, rank=0, ranks=1, steps=3, seed=1, **options):
        """Random calls; returns them by (step, micro-batch, layer, rank)."""
        rng, data, token = np.random.default_rng(seed), {}, 0
        writer = mizan.Writer(
            path, dict(FACTS, ranks=ranks), weights=True, sequences=True, **options
        )
        for step in range(steps):
            for micro_batch in range(2):
                tokens = int(rng.integers(0, 9))
                for layer in range(2):
                    ids, weights = draw(rng, tokens)
                    writer.call(
                        step * 5, micro_batch, layer, rank, token, tokens, ids=ids, weights=weights
                    )
                    data[step * 5, micro_batch, layer, rank] = ids, weights
                if tokens > 1:
                    writer.sequence(token + 1, tokens - 1, step)
                token += tokens
            writer.step(step * 5, loss=1.5 - step)
            writer.flush()
        writer.close()
        return data

    def compare(self, trace, data):
        self.assertEqual(len(trace), len(data))
        for step in trace:
            for call in step:
                ids, weights = data[call.step, call.micro_batch, call.layer, call.rank]
                np.testing.assert_array_equal(call.ids, ids)
                np.testing.assert_array_equal(call.weights, weights)
                np.testing.assert_array_equal(call.counts(), np.bincount(ids.ravel(), minlength=8))
                self.assertIsNone(call.grad_norm2)

    def test_what_is_written_is_read_and_sound(self):
        data = self.write(self.path)
        check(self, self.path)
        self.assertEqual(os.listdir(self.folder), ["t.h5"])
        with mizan.open(self.path) as trace:
            self.assertTrue(trace.complete)
            self.assertEqual(trace.facts["experts"], 8)
            self.assertEqual(trace.facts["step"], "iteration")
            self.compare(trace, data)
            self.assertEqual(trace.steps["loss"].tolist(), [1.5, 0.5, -0.5])
            self.assertTrue(np.isnan(trace.steps["wall_time"]).all())
            self.assertEqual([calls[0].step for calls in trace], [0, 5, 10])

    def test_filters_and_bytes(self):
        self.write(self.path)
        other = os.path.join(self.folder, "u.h5")
        time.sleep(1.1)  # a time stamp would differ now
        self.write(other)
        with open(self.path, "rb") as a, open(other, "rb") as b:
            self.assertEqual(a.read(), b.read())
        with h5py.File(self.path) as file:
            plist = file["pairs/weight"].id.get_create_plist()
            self.assertEqual(
                [plist.get_filter(i)[0] for i in range(plist.get_nfilters())], [2, 1, 3]
            )

    def test_variable_top_k_and_counts(self):
        rng = np.random.default_rng(3)
        each = [2, 0, 3]
        writer = mizan.Writer(
            self.path, {"layers": 1, "experts": 300, "top_k": 0, "phase": "prefill"}
        )
        writer.call(0, 0, 0, 0, 0, 3, ids=[4, 299, 1, 2, 3], token_pairs=each)
        writer.close()
        check(self, self.path)
        with mizan.open(self.path) as trace:
            self.assertEqual(trace.call(0).ids.tolist(), [4, 299, 1, 2, 3])
            self.assertEqual(trace.call(-1).token_pairs.tolist(), each)
        counts = rng.integers(0, 50, 8) * 2
        facts = dict(FACTS, layers=1, kind="counts")
        writer = mizan.Writer(self.path, facts)
        writer.call(0, 0, 0, 0, 0, counts.sum() // 2, counts=counts)
        writer.close()
        check(self, self.path)
        with mizan.open(self.path) as trace:
            np.testing.assert_array_equal(trace.call(0).counts(), counts)
            self.assertIsNone(trace.call(0).ids)

    def test_a_flush_writes_calls_last(self):
        writer = mizan.Writer(self.path, FACTS)
        order, extend = [], writer._extend
        writer._extend = lambda name: (order.append(name), extend(name))
        writer.flush()
        writer.abandon()
        self.assertIn("pairs/expert", order)
        self.assertEqual({n for n in order[-7:]}, {n for n in order if n.startswith("calls/")})

    def test_bad_calls_are_refused(self):
        ids, weights = draw(np.random.default_rng(1), 3)
        bad = {
            "is not within": dict(ids=ids + 8, weights=weights),
            "pairs, not 6": dict(ids=ids[:2], weights=weights),
            "not finite": dict(ids=ids, weights=weights * np.nan),
            "weight is missing": dict(ids=ids),
            "has 4 values": dict(ids=ids, weights=weights[:2]),
        }
        for text, data in bad.items():
            writer = mizan.Writer(self.path, FACTS, weights=True)
            with self.assertRaisesRegex(ValueError, text):
                writer.call(0, 0, 0, 0, 0, 3, **data)
            writer.abandon()
        writer = mizan.Writer(self.path, FACTS, weights=True)
        writer.call(0, 0, 1, 0, 0, 3, ids=ids, weights=weights)
        with self.assertRaisesRegex(ValueError, "does not follow"):
            writer.call(0, 0, 0, 0, 0, 3, ids=ids, weights=weights)
        writer.abandon()
        self.assertEqual(os.listdir(self.folder), [])
        with self.assertRaisesRegex(ValueError, "'phase' is missing"):
            mizan.Writer(self.path, {"layers": 1, "experts": 4, "top_k": 1})
        with self.assertRaisesRegex(ValueError, "unknown facts: expert"):
            mizan.Writer(self.path, dict(FACTS, expert=4))

    def test_values_that_would_be_converted_are_refused(self):
        bad = {
            "float64, not integers": dict(ids=[[1.5, 2]]),
            "neither ids nor counts": {},
            "in a trace of pairs": dict(counts=[1] * 8),
            "not finite and at least 0": dict(ids=[[1, 2]], weights=[[-1, 2]]),
        }
        for text, data in bad.items():
            writer = mizan.Writer(self.path, FACTS, weights="weights" in data)
            with self.assertRaisesRegex(ValueError, text):
                writer.call(0, 0, 0, 0, 0, 1, **data)
            writer.abandon()
        bad = [
            ("in a trace of counts", dict(ids=[[1, 2]])),
            ("not 8 integers", dict(counts=[2.0] * 8)),
            ("not 8 integers", dict(counts=[1] * 7)),
            ("not within 0 to 2", dict(counts=[1 << 32] + [0] * 7)),
            ("not within 0 to 2", dict(counts=[-1] + [1] * 7)),
        ]
        for text, data in bad:
            writer = mizan.Writer(self.path, dict(FACTS, kind="counts"))
            with self.assertRaisesRegex(ValueError, text):
                writer.call(0, 0, 0, 0, 0, 1, **data)
            writer.abandon()
        keys = {
            (0, 0, 2, 0): "layer 2 of 2",
            (0, 0, 0, 1): "rank 1 of 1",
            (-1, 0, 0, 0): "0 or more",
        }
        for key, text in keys.items():
            writer = mizan.Writer(self.path, FACTS)
            with self.assertRaisesRegex(ValueError, text):
                writer.call(*key, 0, 1, ids=[[1, 2]])
            writer.abandon()
        writer = mizan.Writer(self.path, dict(FACTS, top_k=0))
        with self.assertRaisesRegex(ValueError, "pass token_pairs"):
            writer.call(0, 0, 0, 0, 0, 1, ids=[1, 2])
        writer.abandon()
        self.assertEqual(os.listdir(self.folder), [])

    def test_a_refused_call_leaves_nothing_in_the_trace(self):
        ids, weights = draw(np.random.default_rng(1), 3)
        writer = mizan.Writer(self.path, FACTS, weights=True)
        with self.assertRaisesRegex(ValueError, "weight is missing"):
            writer.call(0, 0, 0, 0, 0, 3, ids=(ids + 1) % 8)
        writer.call(0, 0, 0, 0, 0, 3, ids=ids, weights=weights)
        with self.assertRaisesRegex(ValueError, "differ from those of the layer before"):
            writer.call(0, 0, 1, 0, 1, 3, ids=ids, weights=weights)
        writer.close()
        check(self, self.path)
        with mizan.open(self.path) as trace:
            self.assertEqual(trace.call(0).ids.tolist(), ids.tolist())

    def test_sequences_and_steps_out_of_order_are_refused(self):
        writer = mizan.Writer(self.path, FACTS, sequences=True)
        writer.sequence(4, 3)
        for begin, tokens in ((6, 1), (7, 0), (0, 4)):
            with self.assertRaisesRegex(ValueError, "the end of the one before, 7"):
                writer.sequence(begin, tokens)
        writer.step(3)
        with self.assertRaisesRegex(ValueError, "the next is 4 or later"):
            writer.step(3)
        writer.abandon()
        writer = mizan.Writer(self.path, dict(FACTS, kind="counts"))
        with self.assertRaisesRegex(ValueError, "8 pairs of no tokens"):
            writer.call(0, 0, 0, 0, 0, 0, counts=[1] * 8)
        writer.abandon()
        writer = mizan.Writer(self.path, dict(FACTS, top_k=0))
        with self.assertRaisesRegex(ValueError, "pass sequences=True"):
            writer.sequence(0, 1)
        with self.assertRaisesRegex(ValueError, "more than 65535 pairs"):
            writer.call(0, 0, 0, 0, 0, 1, ids=[0] * 65536, token_pairs=[65536])
        writer.abandon()

    def test_a_recorder_whose_last_step_fails_keeps_the_steps_before(self):
        recorder = mizan.Recorder.__new__(mizan.Recorder)  # without PyTorch
        writer = mizan.Writer(self.path, FACTS)
        recorder._handles, recorder._pending, recorder._writer = [], ["unfinished"], writer
        recorder.step = lambda: self.fail("no gradient reached layer 0")
        with self.assertRaisesRegex(AssertionError, "no gradient"):
            recorder.__exit__(None, None, None)
        self.assertEqual(os.listdir(self.folder), ["t.h5"])

    def test_a_recorder_that_saw_nothing_says_so(self):
        recorder = mizan.Recorder.__new__(mizan.Recorder)
        recorder._handles, recorder._pending, recorder._writer = [], [], None
        recorder.path, recorder._phase = self.path, "decode"
        with self.assertWarnsRegex(UserWarning, "t.h5 is not written: no step of phase 'decode'"):
            recorder.__exit__(None, None, None)

    def test_a_forward_pass_that_failed_leaves_nothing_to_the_next(self):
        recorder = mizan.Recorder.__new__(mizan.Recorder)
        recorder._blocks, recorder._current = [], None
        recorder._begin(None, (), {})
        failed = recorder._current
        recorder._begin(None, (), {})
        self.assertIsNot(recorder._current, failed)

    def test_facts_that_no_reader_takes_are_refused(self):
        for fact, value, text in (
            ("layers", 0, "is 0"),
            ("hidden", -1, "is -1"),
            ("top_k", 9, "more than 8"),
        ):
            with self.assertRaisesRegex(mizan.TraceError, text):
                mizan.Writer(self.path, {**FACTS, fact: value})

    def test_outputs_that_cannot_be_written_are_refused_first(self):
        fifo = os.path.join(self.folder, "fifo")
        os.mkfifo(fifo)
        os.symlink(fifo, fifo + "-link")
        for path in (fifo, fifo + "-link", self.folder, ""):
            with self.assertRaisesRegex(ValueError, "not a regular file|path is empty"):
                mizan.Writer(path, FACTS)
        with self.assertRaisesRegex(FileNotFoundError, "no folder"):
            mizan.Writer(os.path.join(self.folder, "missing", "t.h5"), FACTS)
        self.assertEqual(sorted(os.listdir(self.folder)), ["fifo", "fifo-link"])
        self.assertTrue(stat.S_ISFIFO(os.stat(fifo).st_mode))

    def test_merge(self):
        parts, data = [], {}
        for rank in range(3):
            parts.append(os.path.join(self.folder, f"part{rank}"))
            data.update(self.write(parts[-1], rank, 3, seed=10 + rank))
        mizan.merge(parts, self.path)
        check(self, self.path, *parts)
        with mizan.open(self.path) as trace:
            self.compare(trace, data)
            keys = [(c.step, c.micro_batch, c.layer, c.rank) for step in trace for c in step]
            self.assertEqual(keys, sorted(data))
            self.assertEqual(len(trace.steps), 3)
            # The k-th sequence of a part covers all but the first token of its call.
            lengths = [
                len(data[key][0]) - 1
                for key in sorted(data)
                if key[2] == 0 and len(data[key][0]) > 1
            ]
            self.assertEqual(trace.sequences["tokens"].tolist(), lengths)
        with self.assertRaisesRegex(ValueError, "rank 1 is in"):
            mizan.merge([parts[1], parts[1]], self.path)
        with self.assertRaisesRegex(ValueError, "ranks is 1, but 3"):
            self.write(os.path.join(self.folder, "alone"))
            mizan.merge([parts[0], os.path.join(self.folder, "alone")], self.path)
        with self.assertRaisesRegex(ValueError, "would replace a part"):
            mizan.merge(parts, parts[1])
        check(self, *parts)

    def test_merge_with_a_part_that_was_cut_off(self):
        parts = [os.path.join(self.folder, f"part{rank}") for rank in range(2)]
        self.write(parts[0], 0, 2, steps=4)
        data = self.write(parts[1], 1, 2, steps=2)
        with h5py.File(parts[1], "r+") as file:
            file.attrs.modify("complete", np.int64(0))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            mizan.merge(parts, self.path)
        self.assertIn("steps after 5 are left out", str(seen[0].message))
        check(self, self.path)
        with mizan.open(self.path) as trace:
            self.assertEqual(sorted(set(trace.calls["step"].tolist())), [0, 5])
            self.assertEqual(len(trace), 2 * len(data))

    def test_attributes_that_are_something_else(self):
        self.write(self.path)
        bad = {
            "/": {"format": ["mizan-trace"] * 2, "complete": [0, 0]},
            "run": {"kind": ["pairs", "counts"]},
            "model": {"name": np.bytes_(b"\xff\xfe"), "layers": [2, 2]},
        }
        cases = [(group, name, value) for group in bad for name, value in bad[group].items()]
        cases += [("/", "complete", 2), ("/", "complete", "0"), ("model", "router", b"\xff")]
        for group, name, value in cases:
            with h5py.File(self.path, "r+") as file:
                before = file[group].attrs[name]
                kind = h5py.string_dtype() if name == "router" else None  # of variable length
                file[group].attrs.create(name, value, dtype=kind)
            with self.subTest(name=name, value=value):
                with self.assertRaisesRegex(mizan.TraceError, name):
                    mizan.open(self.path)
            with h5py.File(self.path, "r+") as file:
                file[group].attrs[name] = before
        with h5py.File(self.path, "r+") as file:
            file["model"].attrs["layers"] = [2]  # one integer all the same
        mizan.open(self.path).close()
        with h5py.File(self.path, "r+") as file:
            file.move("model", "elsewhere")
            file["model"] = h5py.SoftLink("/elsewhere")
        with self.assertRaisesRegex(mizan.TraceError, "'layers' is missing"):
            mizan.open(self.path)

    def test_columns_without_the_one_that_they_describe_are_not_used(self):
        self.write(self.path)
        with h5py.File(self.path, "r+") as file:
            del file["steps/step"], file["sequences/token_begin"]
        check(self, self.path)
        with mizan.open(self.path) as trace:
            self.assertEqual((len(trace.steps), len(trace.sequences)), (0, 0))

    def test_what_is_no_trace(self):
        with self.assertRaises(FileNotFoundError):
            mizan.open(self.path)
        with open(self.path, "w") as file:
            file.write("text")
        with self.assertRaisesRegex(mizan.TraceError, "not an HDF5 file"):
            mizan.open(self.path)
        fifo = os.path.join(self.folder, "fifo")
        os.mkfifo(fifo)
        for path in (fifo, self.folder):  # never waits for a writer
            with self.assertRaisesRegex(mizan.TraceError, "not a regular file"):
                mizan.open(path)
        with h5py.File(self.path, "w") as file:
            file.attrs["format"] = "mizan-trace"
            file.attrs["format_version"] = 2
        with self.assertRaisesRegex(mizan.TraceError, "version 2, but this reader knows 1 to 1"):
            mizan.open(self.path)


KILLED = """
import sys
sys.path.insert(0, {package!r})
import mizan
writer = mizan.Writer({path!r}, {facts!r})
for step in range(1000000):
    for layer in range(2):
        ids = [[0, 1], [2, 3], [step % 8, (step + 1) % 8]]
        writer.call(step, 0, layer, 0, step * 3, 3, ids=ids)
        if layer == 0 and step % 3 == 2:
            writer.flush()
    print(step, flush=True)
"""


class Killed(InFolder):
    def test_a_killed_writer_leaves_what_it_flushed(self):
        script = KILLED.format(
            package=os.path.join(ROOT, "traces", "python"), path=self.path, facts=FACTS
        )
        with subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
        ) as writer:
            for line in writer.stdout:
                if int(line) >= 40:
                    break
            writer.send_signal(signal.SIGKILL)
        (name,) = os.listdir(self.folder)
        self.assertIn(".partial-", name)
        partial = os.path.join(self.folder, name)
        with mizan.open(partial) as trace:
            self.assertFalse(trace.complete)
            self.assertGreaterEqual(len(trace), 2 * 38)
            self.assertEqual(len(trace) % 2, 0)
            last = trace.call(-1)
            self.assertEqual(last.layer, 1)
            self.assertEqual(last.ids.tolist()[2], [last.step % 8, (last.step + 1) % 8])
        check(self, partial)


class Programs(InFolder):
    def test_a_trace_of_the_program_reads_the_same(self):
        subprocess.run(
            [
                PROGRAM,
                "trace",
                "synth",
                "-q",
                "--layers",
                "2",
                "--experts",
                "8",
                "--top-k",
                "2",
                "--ranks",
                "2",
                "--tokens",
                "16",
                "--sequence",
                "8",
                "--steps",
                "2",
                "-o",
                self.path,
            ],
            check=True,
        )
        with mizan.open(self.path) as trace, h5py.File(self.path) as file:
            self.assertEqual([len(step) for step in trace], [4, 4])
            ids = np.concatenate([call.ids.ravel() for step in trace for call in step])
            np.testing.assert_array_equal(ids, file["pairs/expert"][:])
            self.assertEqual(len(trace.sequences), 8)
            self.assertEqual(trace.facts["name"], "synthetic-realistic")


if __name__ == "__main__":
    unittest.main()
