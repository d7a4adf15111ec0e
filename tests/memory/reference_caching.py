#!/usr/bin/python3
"""The caching allocator once more, written from its description alone (sim/memory/caching.h) without linked blocks or
ordered pools: a segment is a list of parts in address order, and every search looks at all of them. Compares what
replay_caching, given as the argument, answers on random sequences, step by step.

usage: reference_caching.py REPLAY_CACHING
"""
import random
import subprocess
import sys

MIB = 1 << 20


class Allocator:
    def __init__(self, device):
        self.device = device
        self.segments = []  # [address, bytes, small, [[address, bytes, owner or None], ...]]
        self.end = 0

    def reserved(self):
        return sum(s[1] for s in self.segments)

    def allocated(self):
        return sum(p[1] for s in self.segments for p in s[3] if p[2] is not None)

    def take(self, owner, request):
        size = -(-request // 512) * 512
        small = size <= MIB
        fits = [(p[1], p[0], s, i) for s in self.segments if s[2] == small
                for i, p in enumerate(s[3]) if p[2] is None and p[1] >= size]
        if fits:
            _, _, segment, i = min(fits, key=lambda f: f[:2])
        else:
            segment, i = self.new_segment(size, small), 0
        part = segment[3][i]
        rest = part[1] - size
        if rest >= 512 if small else rest > MIB:
            segment[3].insert(i + 1, [part[0] + size, rest, None])
            part[1] = size
        part[2] = owner
        return part[0], part[1]

    def new_segment(self, size, small):
        total = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved() + total > self.device:
            self.segments = [s for s in self.segments if any(p[2] is not None for p in s[3])]
        segment = [self.end, total, small, [[self.end, total, None]]]
        self.segments.append(segment)
        self.end += total
        return segment

    def give(self, owner):
        for segment in self.segments:
            for part in segment[3]:
                if part[2] == owner:
                    part[2] = None
                    merged = []
                    for p in segment[3]:
                        if merged and merged[-1][2] is None and p[2] is None:
                            merged[-1][1] += p[1]
                        else:
                            merged.append(p)
                    segment[3] = merged
                    return
        raise AssertionError(owner)


def request(rng):
    kind = rng.random()
    if kind < 0.1:  # at the limits between the rules
        return rng.choice([1, 512, 513, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB - 511, 10 * MIB, 2 * MIB, 11 * MIB, 13 * MIB]) \
            + rng.choice([0, 0, -1 if kind > 0.05 else 0, 1])
    return int(2 ** rng.uniform(0, 27))


def sequence(seed):
    rng = random.Random(seed)
    device = rng.choice([1 << 50, 500 * MIB, 150 * MIB])
    ours = Allocator(device)
    lines, wanted, live = [f"room {device}"], [], []
    for number in range(rng.choice([50, 400, 1200])):
        if live and rng.random() < (0.5 if len(live) > 40 else 0.3):
            # the last one, as in a step, or any
            gone = live.pop() if rng.random() < 0.5 else live.pop(rng.randrange(len(live)))
            ours.give(gone)
            lines.append(f"give {gone}")
            wanted.append(f"{ours.reserved()} {ours.allocated()}")
        else:
            size = max(1, request(rng))
            address, got = ours.take(number, size)
            live.append(number)
            lines.append(f"take {number} {size}")
            wanted.append(f"{ours.reserved()} {ours.allocated()} {address} {got}")
    return lines, wanted


def main():
    returned = steps = 0
    for seed in range(60):
        lines, wanted = sequence(seed)
        run = subprocess.run([sys.argv[1]], input="\n".join(lines), capture_output=True, text=True, timeout=60)
        answers = run.stdout.splitlines()
        if run.returncode or len(answers) != len(wanted):
            sys.exit(f"seed {seed}: exit code {run.returncode}, {len(answers)} answers of {len(wanted)}; {run.stderr}")
        before = 0
        for line, want, got in zip(lines[1:], wanted, answers):
            if want != got:
                sys.exit(f"seed {seed}, {line}: wanted {want}, got {got}")
            returned += int(got.split()[0]) < before
            before = int(got.split()[0])
        steps += len(wanted)
    if returned == 0:
        sys.exit("no sequence made the allocator return a segment")
    print(f"{steps} operations agree; {returned} of them returned more than they reserved")


main()
