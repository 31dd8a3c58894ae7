"""Reads the spans that a collector prints. Independent of the containers."""

import re

# Spans of a request that a router and a coordinator make, and of the steps that a coordinator and its ranks make.
REQUEST = ("prepare", "place", "queue")
STEP, PASS = "step", "pass"
FIELD = re.compile(r"\s*(?:-> )?(Trace ID|Parent ID|ID|Name|service\.instance\.id)\s*: (.*)")


def parse(log):
    """Returns each span as a dictionary: its process, trace, parent, id and name."""
    found, instance, span = [], None, {}
    for line in log.splitlines():
        field = FIELD.fullmatch(line.rstrip())
        if line.startswith("Span #"):
            span = {"instance": instance}
            found.append(span)
        elif field and field[1] == "service.instance.id":
            instance = field[2]
        elif field and field[1] not in span:
            span[field[1]] = field[2].strip()
    return found


def missing(log, n_ranks):
    """Returns what no span shows yet: a request through a router and a coordinator, or a step through all ranks."""
    found = [span for span in parse(log) if "Name" in span]
    named = {name: [span for span in found if span["Name"] == name] for name in (*REQUEST, STEP, PASS)}
    traces = set.intersection(*({span["Trace ID"] for span in named[name]} for name in REQUEST))
    lacks = [] if traces else [f"a trace with {', '.join(REQUEST)}"]
    in_a_request = [span for span in found if span["Trace ID"] in traces]
    if len({span["instance"] for span in in_a_request}) < 2:
        lacks.append("a request's spans from two processes")
    steps = {span["ID"] for span in named[STEP]}
    ranks = {span["instance"] for span in named[PASS] if span.get("Parent ID") in steps}
    if len(ranks) != n_ranks:
        lacks.append(f"passes of steps from {n_ranks} ranks: there are {len(ranks)}")
    return lacks
