"""Keys of JSON that the program prints against those that a page documents.

usage: documented_keys.py PAGE JSON...

A key is documented by a word in backticks. Prints what is printed and not documented, and what the tables document and
none of the files has."""
import json
import re
import sys


def keys(value):
    if isinstance(value, dict):
        for key, member in value.items():
            yield key
            yield from keys(member)
    elif isinstance(value, list):
        for member in value:
            yield from keys(member)


text = open(sys.argv[1]).read()
documented = set(re.findall(r"`([a-z0-9_]+)`", text))
first = {word for line in text.splitlines() if line.startswith("| `") for word in re.findall(r"`([a-z0-9_]+)`", line.split("|")[1])}
printed = set()
for name in sys.argv[2:]:
    printed |= set(keys(json.load(open(name))))
wrong = [f"not documented: {key}" for key in sorted(printed - documented)]
wrong += [f"documented, never printed: {key}" for key in sorted(first - printed)]
print("\n".join(wrong) or f"{len(printed)} keys")
sys.exit(1 if wrong else 0)
