#!/usr/bin/env python3
"""Makes deploy/METRICS.md, the table of every metric and span, out of telemetry's sources. Knows how those are written
and nothing of what they measure. `metrics.py --check` only says whether the page is what it would make."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "deploy" / "METRICS.md"
SOURCES = ROOT / "telemetry" / "src"
HEAD = """# Metrics and spans

Made by `deploy/metrics.py` out of `telemetry/src`: change it there. A router's page is `/metrics` on its `--http`, a
coordinator's and a worker's on their `--health`; `serve` has all of them on its own. Every series has the label
`model_name` besides those below.
"""


def constants(text):
    """name of the constant -> (our name, their name or none, help)"""
    found = {}
    for name, of in re.findall(r"const (\w+): Metric =\s*((?:metric|alias)\(.*?\));", text, re.S):
        strings = re.findall(r'"((?:[^"\\]|\\.)*)"', of)
        found[name] = (strings[0], strings[1] if len(strings) == 3 else "", strings[-1])
    return found


def kinds(text):
    """name of the constant -> counter, gauge or histogram"""
    lists = re.findall(r"const (GAUGES|COUNTERS|HISTOGRAMS): \[&Metric; \d+\] =\s*\[(.*?)\];", text, re.S)
    return {name: kind[:-1].lower() for kind, of in lists for name in re.findall(r"&(\w+)", of)}


def functions(text):
    """(signature, body) of each function outside of tests."""
    shipped = text.split("#[cfg(test)]")[0]
    return re.findall(r"^((?:pub )?fn \w+\([^{]*)\{\n(.*?)^\}", shipped, re.S | re.M)


def labels(text):
    """name of the constant -> its labels"""
    found = {}
    for _, body in functions(text):
        every = set(re.findall(r'from_static_parts\("(\w+)"', body))
        if "of.label()" in body or "of_rank(" in body:
            every.add("replica")
        if "of_rank(" in body:
            every.add("rank")
        if "tenant(label)" in body:
            every.add("tenant")
        for name, arguments in re.findall(r"\b([A-Z_]+)\.(?:set|add|total|observe)\(([^;]*)\);", body):
            found[name] = sorted(set() if arguments.rstrip().endswith("&[]") else every)
    return found


def metrics():
    """(kind, name, alias, labels, help) of every metric, as they stand in the source."""
    text = (SOURCES / "metrics.rs").read_text()
    kind, label = kinds(text), labels(text)
    return [(kind[name], ours, theirs, label[name], told) for name, (ours, theirs, told) in constants(text).items()]


def spans():
    """(name, what it is, attributes) of every span."""
    text = (SOURCES / "spans.rs").read_text()
    found = []
    for span in re.finditer(r"span!\((.*?)\)[);]", text, re.S):
        # What is said of the function that makes it.
        told = re.findall(r"((?:[ ]*///[^\n]*\n)+)[ ]*pub fn", text[:span.start()])[-1]
        told = " ".join(line.strip().removeprefix("///").strip() for line in told.strip().splitlines())
        fields = span.group(1)
        found.append((re.search(r'"(\w+)"', fields).group(1), told, re.findall(r"\b((?:\w+\.)+\w+) = ", fields)))
    return found


def page():
    lines = [HEAD, "| metric | vLLM's name for it | labels | tells |", "|---|---|---|---|"]
    for kind, ours, theirs, label, told in metrics():
        names = " ".join(f"`{name}`" for name in label)
        lines.append(f"| `{ours}` ({kind}) | {f'`{theirs}`' if theirs else ''} | {names} | {told} |")
    lines += ["", "| span | is | attributes |", "|---|---|---|"]
    lines += [f"| `{name}` | {told} | {' '.join(f'`{field}`' for field in fields)} |" for name, told, fields in spans()]
    return "\n".join(lines) + "\n"


def main():
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        sys.exit(f"{PAGE.name} is not what deploy/metrics.py makes of telemetry: run it")


if __name__ == "__main__":
    main()
