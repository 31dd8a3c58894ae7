#!/usr/bin/env python3
"""Generates deploy/METRICS.md, the table of every metric and span, from telemetry's sources. Depends on the form of
those sources and not on what they measure. `metrics.py --check` only checks that the page is up to date."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "deploy" / "METRICS.md"
SOURCES = ROOT / "telemetry" / "src"
HEAD = """# Metrics and spans

`deploy/metrics.py` generates this page from `telemetry/src`: make changes there. A router has the page `/metrics` on
`--http`, a coordinator and a worker on `--health`. `serve` has all metrics on `--http`. The column `role` lists the
roles that export a metric. Every series has the label `model_name` besides those below. With a collector
(`--otlp-endpoint`), the process also sends all metrics there. Metrics and labels that OpenTelemetry defines then have
its names, with dots (`gen_ai.operation.name`).
"""
LLAMA_CPP = """
The pages of a router and of `serve` end with the names of llama.cpp's server. They have no labels. Each is computed
from the series above, and is left out if the process has none of these.
"""
TAIL = """
A span `request` is named by its operation and model: `chat MODEL`, `text_completion MODEL`, `embeddings MODEL`. Its
`gen_ai.input.messages`, `gen_ai.output.messages` and `gen_ai.request.stop_sequences` exist only with `--otlp-content`.
The scope of a log is its target in `--log`. A log of a request has the trace and span of that request.
"""


def constants(text):
    """Returns name of the constant -> (our name, vLLM's names, OpenTelemetry's name or none, help)."""
    found = {}
    made = r"const (\w+): Metric =\s*((?:metric|alias|conventional)\(.*?\));"
    for name, of in re.findall(made, text, re.S):
        strings = re.findall(r'"((?:[^"\\]|\\.)*)"', of)
        is_conventional = of.startswith("conventional")
        theirs = [] if is_conventional else strings[1:-1]
        found[name] = (strings[0], theirs, strings[1] if is_conventional else "", strings[-1])
    return found


def kinds(text):
    """Returns name of the constant -> counter, gauge or histogram."""
    lists = re.findall(r"const (GAUGES|COUNTERS|HISTOGRAMS): \[[^=]*=\s*\[(.*?)\];", text, re.S)
    return {name: kind[:-1].lower() for kind, of in lists for name in re.findall(r"\(?&(\w+)(?:, &\w+\))?", of)}


def functions(text):
    """Returns the body of each function outside of tests."""
    shipped = text.split("#[cfg(test)]")[0]
    return re.findall(r"^(?:pub(?:\(crate\))? )?fn \w+\([^{]*\{\n(.*?)^\}", shipped, re.S | re.M)


def labels_of(expression):
    """Returns the labels that an expression makes."""
    found = set(re.findall(r'Label::\w+\("(\w+)"', expression))
    if "of.label()" in expression or "of_rank(" in expression:
        found.add("replica")
    if "of_rank(" in expression:
        found.add("rank")
    if "tenant(label)" in expression:
        found.add("tenant")
    return found


def labels(text):
    """Returns name of the constant -> its labels."""
    found = {}
    for body in functions(text):
        held = {name: labels_of(made) for name, made in re.findall(r"let (?:mut )?(\w+) = (.*?);", body, re.S)}
        for name, pushed in re.findall(r"(\w+)\.push\((.*?)\);", body, re.S):
            held[name] |= labels_of(pushed)
        setter = r"\b([A-Z_]+)\.(?:set|add|total|observe|record|histograms)\((.*?)\);"
        for name, arguments in re.findall(setter, body, re.S):
            used = [held.get(word, set()) for word in re.findall(r"\w+", arguments)]
            found.setdefault(name, set()).update(labels_of(arguments), *used)
    return {name: sorted(of) for name, of in found.items()}


def metrics():
    """Returns (kind, name, role, vLLM's names, OpenTelemetry's, labels, help) of each metric, in the source's order."""
    text = (SOURCES / "metrics.rs").read_text()
    kind, label, role = kinds(text), labels(text), roles()
    return [(kind[name], ours, role[name], theirs, conventional, label[name], description)
            for name, (ours, theirs, conventional, description) in constants(text).items()]


def roles():
    """Returns name of the constant -> the roles with code that sets it."""
    text = (SOURCES / "metrics.rs").read_text().split("#[cfg(test)]")[0]
    bodies = re.findall(r"^(?:pub(?:\(crate\))? )?fn (\w+)\([^{]*\{\n(.*?)^\}", text, re.S | re.M)
    # Methods that set metrics count for every role with a value of their type.
    held = re.findall(r"^impl (\w+) \{\n(.*?)^\}", text, re.S | re.M)
    set_by = {}
    for name, body in [*bodies, *held]:
        for constant in re.findall(r"\b([A-Z][A-Z_]+)\.(?:set|add|total|observe|record|histograms)\(", body):
            set_by.setdefault(constant, set()).add(name)
    # Every role has the metrics that the binary itself or telemetry sets.
    shared = callers("src") | callers("telemetry/src")
    named = {role: callers(f"{role}/src") | callers(f"{role}/*/src") for role in ("router", "coordinator", "worker")}
    found = {}
    for constant, names in set_by.items():
        of = [role for role, words in named.items() if names & words]
        found[constant] = "each" if names & shared or len(of) == len(named) else ", ".join(of)
    return found


def callers(folders):
    """Returns the words of sources that may name a function or a type of telemetry's metrics."""
    sources = [path for path in sorted(ROOT.glob(f"{folders}/**/*.rs")) if path.name != "metrics.rs"]
    text = "".join(path.read_text() for path in sources)
    return set(re.findall(r"\bmetrics::(?:\w+::)?(\w+)", text)) | set(re.findall(r"\b([A-Z]\w+)::(?:new|of)\(", text))


def spans():
    """Returns (name, description, attributes) of every span."""
    text = (SOURCES / "spans.rs").read_text().split("#[cfg(test)]")[0]
    found = []
    for span in re.finditer(r"span!\((.*?)\)[);]", text, re.S):
        # The description is the doc comment of the function that makes the span.
        comment = re.findall(r"((?:[ ]*///[^\n]*\n)+)[ ]*pub fn", text[:span.start()])[-1]
        description = " ".join(line.strip().removeprefix("///").strip() for line in comment.strip().splitlines())
        fields = re.findall(r"\b((?:\w+\.)+\w+) = ", span.group(1))
        # Fields that OpenTelemetry's layer uses itself are not attributes.
        fields = [field for field in fields if not field.startswith("otel.")]
        found.append((re.search(r'"(\w+)"', span.group(1)).group(1), description, fields))
    declared = {field for _, _, fields in found for field in fields}
    # Lists and attributes of only some spans are set beside the fields, on requests alone.
    found[0][2].extend(sorted(set(re.findall(r'"(gen_ai\.[\w.]+)"', text)) - declared))
    return found


def llama_cpp():
    """Returns (name, kind, help) of each of llama.cpp's names."""
    text = (SOURCES / "llama_cpp.rs").read_text().split("#[cfg(test)]")[0]
    rows = re.findall(r'^    (counter|gauge)\(\s*"(\w+)",\s*"([^"]+)"', text, re.M)
    return [(f"llamacpp:{name}", kind, description) for kind, name, description in rows]


def code(names):
    return " ".join(f"`{name}`" for name in names)


def page():
    columns = "| metric | role | vLLM's name for it | OpenTelemetry's | labels | meaning |"
    lines = [HEAD, columns, "|---|---|---|---|---|---|"]
    for kind, ours, role, theirs, conventional, label, description in metrics():
        names = [code(theirs), code(filter(None, [conventional])), code(label)]
        cells = [f"`{ours}` ({kind})", role, *names, description]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [LLAMA_CPP, "| metric | meaning |", "|---|---|"]
    lines += [f"| `{name}` ({kind}) | {description} |" for name, kind, description in llama_cpp()]
    lines += ["", "| span | meaning | attributes |", "|---|---|---|"]
    lines += [f"| `{name}` | {description} | {code(fields)} |" for name, description, fields in spans()]
    return "\n".join([*lines, TAIL])


def main():
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        sys.exit(f"{PAGE.name} is out of date: run deploy/metrics.py")


if __name__ == "__main__":
    main()
