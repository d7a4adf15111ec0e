#!/usr/bin/python3
"""Runs the README's examples and holds what they print against what it shows.

usage: tests/cli/readme.py [--write] MIZAN [EXAMPLE...]

MIZAN      The program that stands for build/demo/mizan in the examples.
EXAMPLE    Names of the marks `<!-- example:NAME -->`; default: all whose blocks have lines that begin with "$ ".
--write    Puts what is printed into the README instead of comparing.

Examples that name $MIZAN_TRACES are left out, with a line that says so, where the variable names no folder. Exit status 1: an
example prints something else; 2: no such example, or a command failed.
"""
import difflib
import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
README = os.path.join(ROOT, "README.md")
EXAMPLE = re.compile(r"^<!-- example:(?P<name>[a-z-]+) -->$.*?^<!-- end:(?P=name) -->$", re.M | re.S)
SESSION = re.compile(r"^```\n(\$ .*?)^```$", re.M | re.S)
COMMAND = re.compile(r"^\$ (?:.*\\\n)*.*\n", re.M)  # with the lines that it goes on in


def stop(text):
    print(f"readme.py: {text}", file=sys.stderr)
    sys.exit(2)


def printed(session, folder):
    """The session with what its commands print now."""
    text = ""
    for command in COMMAND.findall(session):
        result = subprocess.run(["bash", "-o", "pipefail", "-c", command[2:]], cwd=folder, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)
        if result.returncode:
            stop(f"{command}exit status {result.returncode}: {result.stderr}")
        text += command + result.stdout
    return text


def run_example(example, mizan):
    with tempfile.TemporaryDirectory() as folder:
        os.makedirs(os.path.join(folder, "build/demo"))
        os.symlink(mizan, os.path.join(folder, "build/demo/mizan"))
        os.symlink(os.path.join(ROOT, "traces"), os.path.join(folder, "traces"))
        return SESSION.sub(lambda m: f"```\n{printed(m[1], folder)}```", example)


def main(arguments):
    write = "--write" in arguments
    mizan, *names = [a for a in arguments if a != "--write"] or [None]
    if mizan is None or not os.access(mizan, os.X_OK):
        stop(f"no program {mizan or ''}: usage: tests/cli/readme.py [--write] MIZAN [EXAMPLE...]")
    with open(README) as file:
        text = before = file.read()
    examples = {m["name"]: m[0] for m in EXAMPLE.finditer(text) if SESSION.search(m[0])}
    for name in names or examples:
        if name not in examples:
            stop(f"README.md has no example {name} with commands; there are {', '.join(examples)}")
        if "$MIZAN_TRACES" in examples[name] and not os.path.isdir(os.environ.get("MIZAN_TRACES", "")):
            print(f"{name}: left out, it needs the recordings of $MIZAN_TRACES")
            continue
        text = text.replace(examples[name], run_example(examples[name], os.path.abspath(mizan)))
        print(f"{name}: run")
    if write:
        with open(README, "w") as file:
            file.write(text)
        return 0
    lines = list(difflib.unified_diff(before.splitlines(), text.splitlines(), "README.md", "printed", lineterm=""))
    print("\n".join(lines), end="\n" if lines else "")
    return 1 if lines else 0


sys.exit(main(sys.argv[1:]))
