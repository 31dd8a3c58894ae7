"""Draws names for a blind test: can a reader without knowledge of the code explain what a name is?

    blind.py FOLDER [--seed N] [--n 60]           names with their signature and file, without bodies and comments
    blind.py FOLDER [--seed N] [--n 60] --key     the same names with their comments and bodies, to mark the answers

Half are types, half are functions, public and private, from shipped code: no tests, benches, examples, build scripts.
Another code base of the same kind, such as tokio's, is the control.
"""

import argparse
import random
import re
from pathlib import Path

TYPE = re.compile(r"^[ \t]*(?:pub(?:\([^)]*\))?[ \t]+)?(?:struct|enum|trait|union)[ \t]+(\w+)", re.MULTILINE)
FUNCTION = re.compile(r'^[ \t]*(?:pub(?:\([^)]*\))?[ \t]+)?(?:(?:default|const|async|unsafe|extern "C")[ \t]+)*fn[ \t]+'
                      r"(\w+)", re.MULTILINE)
OUTSIDE = {"tests", "benches", "examples", "target", "node_modules"}
# Names that every Rust program has: they reveal nothing about this one.
COMMON = {"new", "default", "fmt", "from", "into", "clone", "drop", "eq", "cmp", "partial_cmp", "hash", "deref",
          "deref_mut", "next", "poll", "main", "as_ref", "try_from", "index", "borrow", "from_str", "len", "is_empty"}
BODY_LINES_MAX = 60


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--n", type=int, default=60)
    parser.add_argument("--key", action="store_true", help="with comments and bodies")
    arguments = parser.parse_args()
    for i, (path, definition) in enumerate(drawn(arguments.folder, arguments.seed, arguments.n), 1):
        print(f"{i}. {path}")
        print(definition if arguments.key else signature(definition))
        print()


def drawn(folder, seed, n):
    """Yields (file, definition) of names, types and functions with the same chance."""
    chance = random.Random(seed)
    found = {TYPE: [], FUNCTION: []}
    for path in sorted(folder.rglob("*.rs")):
        inner = path.relative_to(folder)
        is_test = OUTSIDE & set(inner.parts) or path.name in ("tests.rs", "build.rs") or path.name.startswith("test")
        if not is_test:
            text = path.read_text(encoding="utf-8").split("#[cfg(test)]\nmod ")[0]
            for kind, places in found.items():
                places += [(inner, definition(text, match)) for match in kind.finditer(text)
                           if match.group(1) not in COMMON]
    names = chance.sample(found[TYPE], n // 2) + chance.sample(found[FUNCTION], n - n // 2)
    chance.shuffle(names)
    return names


def definition(text, match):
    """Returns the item with the comments and attributes above it, up to its closing brace or semicolon."""
    lines = text[:match.start()].split("\n")
    first = len(lines) - 1
    while first and lines[first - 1].strip().startswith(("//", "#[", "#!")):
        first -= 1
    above = "\n".join(lines[first:])
    end, depth = match.end(), 0
    for i in range(match.end(), len(text)):
        depth += {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}.get(text[i], 0)
        if depth == 0 and (text[i] == "}" or text[i] == ";"):
            end = i + 1
            break
    return "\n".join((above + text[match.start():end]).split("\n")[:BODY_LINES_MAX])


def signature(definition):
    """Returns the item without comments, attributes and bodies; of a type its first line."""
    lines = [line for line in definition.split("\n") if not line.strip().startswith(("//", "#[", "#!"))]
    text = "\n".join(lines).strip()
    if found := TYPE.match(text):
        return found.group().strip()
    depth = 0
    for i, c in enumerate(text):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(c, 0)
        if depth == 0 and c in "{;":
            return " ".join(text[:i].split())
    return " ".join(text.split())


if __name__ == "__main__":
    main()
