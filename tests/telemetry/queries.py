"""The Prometheus queries of the chart's dashboards and rules. Depends on the format of those files."""

import json
import pathlib
import re

import yaml

FILES = pathlib.Path(__file__).resolve().parents[2] / "helm" / "lockstep" / "files"
SERIES = re.compile(r"(?<![\w:])(?:(?:lockstep|vllm):|gen_ai_(?:server|client)_)\w+")
# Grafana's variables, as Prometheus gets them.
VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$namespace": ".*", "$model": ".*", "$replica": ".*"}


def expressions():
    """Returns (where, PromQL)."""
    groups = yaml.safe_load((FILES / "rules.yaml").read_text())["groups"]
    found = [(rule.get("record") or rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]
    for path in sorted((FILES / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            found += [(f"{path.stem}: {panel['title']}", target["expr"]) for target in panel["targets"]]
    return [(where, as_prometheus(expression)) for where, expression in found]


def as_prometheus(expression):
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def names():
    """Returns every series that a query names."""
    return sorted({name for _, expression in expressions() for name in SERIES.findall(expression)})
