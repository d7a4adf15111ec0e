#!/usr/bin/env python3
"""limits.py FILE.cu REPORT ...: what ptxas reported of the kernels of each file against what a launch
needs: no spills, shared memory within 227 KiB, and __launch_bounds__ at every kernel, with which
ptxas keeps registers x threads within a multiprocessor's 65,536 (a report of more than 64 registers
would otherwise refuse 1,024 threads only on a device). No notes of lost performance either: ptxas
says so where it runs wgmmas one after another or ignores setmaxnreg. Dynamic shared memory is
asserted where it is asked for."""
import re
import sys

SHARED = 227 * 1024


def kernels(report):
    """(name, architecture, registers, bytes spilled, bytes of shared memory) of each kernel."""
    name = arch = None
    spilled = 0
    for line in report.splitlines():
        if entry := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            name, arch = entry.groups()
            spilled = 0
        elif spill := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(spill[1]) + int(spill[2])
        elif name and (used := re.search(r"Used (\d+) registers", line)):
            shared = re.search(r"(\d+) bytes smem", line)
            yield name, arch, int(used[1]), spilled, int(shared[1]) if shared else 0
            name = None


def unbounded(source):
    """Kernels of a source without __launch_bounds__, by line."""
    source = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), source, flags=re.S)
    for kernel in re.finditer(r"__global__([^{;]*)\{", source):
        if "__launch_bounds__" not in kernel[1]:
            yield source.count("\n", 0, kernel.start()) + 1


def main(files):
    wrong = []
    for source, report in zip(files[::2], files[1::2]):
        with open(source, encoding="utf-8") as file:
            wrong += [f"{source}:{line}: no __launch_bounds__" for line in unbounded(file.read())]
        with open(report, encoding="utf-8") as file:
            text = file.read()
        found = list(kernels(text))
        wrong += [line for line in text.splitlines() if "Performance Loss" in line]
        if not found:
            wrong.append(f"{report}: no kernel in it")
        for name, arch, registers, spilled, shared in found:
            if spilled:
                wrong.append(f"{name}, {arch}: {spilled} bytes spilled")
            if shared > SHARED:
                wrong.append(f"{name}, {arch}: {shared} bytes of shared memory")
        print(f"{source}: {len(found)} kernels, at most {max((k[2] for k in found), default=0)} "
              f"registers, {max((k[4] for k in found), default=0)} bytes of static shared memory")
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
