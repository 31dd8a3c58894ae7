"""Dashboards, rules and the table of metrics: every name in them exists, and promtool accepts them."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys

import chart
import pytest
import yaml
from chart import CHART, ROOT, TOOLS

RULES = CHART / "files" / "rules.yaml"
DASHBOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))
SERIES = re.compile(r"(?<![\w:])(?:(?:lockstep|vllm):|gen_ai_(?:server|client)_)\w+")
RECORDED = re.compile(r"(?<![\w:])\w+:lockstep_\w+:\w+")
# Grafana's variables, as Prometheus would get them.
VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$namespace": ".*", "$model": ".*", "$replica": ".*"}


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def groups():
    return yaml.safe_load(RULES.read_text())["groups"]


def rules():
    return [rule for group in groups() for rule in group["rules"]]


def panels():
    return [(path.stem, panel) for path in DASHBOARDS for panel in json.loads(path.read_text())["panels"]]


def expressions():
    """Returns (where, PromQL) of every query to Prometheus."""
    found = [(rule.get("record") or rule["alert"], rule["expr"]) for rule in rules()]
    found += [(f"{name}: {panel['title']}", target["expr"]) for name, panel in panels() for target in panel["targets"]]
    for path in DASHBOARDS:
        for variable in json.loads(path.read_text())["templating"]["list"]:
            query = re.fullmatch(r"label_values\((.*), \w+\)", variable["query"])
            found += [(f"{path.stem}: ${variable['name']}", query.group(1))] if query else []
    scaler = chart.of_kind(chart.rendered("everything-pod"), "ScaledObject")[0]
    return [*found, *(("ScaledObject", trigger["metadata"]["query"]) for trigger in scaler["spec"]["triggers"])]


def as_prometheus(expression):
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def known_series():
    """Returns telemetry's metrics on a page: a histogram is three series."""
    names = {}
    for kind, ours, _, theirs, _, labels, _ in loaded(ROOT / "deploy" / "metrics.py").metrics():
        for name in (ours, *theirs):
            for end in ("_bucket", "_sum", "_count") if kind == "histogram" else ("",):
                names[name + end] = {*labels, *(["le"] if end == "_bucket" else [])}
    return names


def test_there_are_files_to_check():
    assert len(DASHBOARDS) == 4 and len(rules()) > 15 and len(expressions()) > 50 and len(known_series()) > 40


@pytest.mark.parametrize("where, expression", expressions())
def test_every_metric_exists(where, expression):
    series, recorded = SERIES.findall(expression), RECORDED.findall(expression)
    assert series or recorded, f"{where} names no metric"
    for name in series:
        assert name in known_series(), f"{where}: {name} is not a metric of telemetry"
    for name in recorded:
        assert name in {rule.get("record") for rule in rules()}, f"{where}: {name} is not recorded"


@pytest.mark.parametrize("where, expression", expressions())
def test_every_label_exists(where, expression):
    """Checks labels in selectors: a selector with a label that a series lacks selects nothing, silently."""
    # Labels of the scrape, of every page, and of recording rules.
    everywhere = {"namespace", "pod", "model_name"}
    for name, chosen in re.findall(r"(?<![\w:])((?:lockstep|vllm):\w+|gen_ai_\w+)\{([^}]*)\}", expression):
        for label in re.findall(r"(\w+)\s*(?:=|!)", chosen):
            assert label in known_series()[name] | everywhere, f"{where}: {name} has no label {label}"


def test_outcomes_that_rules_choose_exist():
    sources = [ROOT / "router" / "src" / "refusal.rs", ROOT / "router" / "src" / "audit" / "mod.rs"]
    source = "".join(path.read_text() for path in sources)
    chosen = {outcome for _, expression in expressions()
              for outcomes in re.findall(r'outcome=~?"([^"]*)"', expression) for outcome in outcomes.split("|")}
    assert chosen
    for outcome in chosen:
        assert f'=> "{outcome}"' in source, f"no request ends as {outcome}"


def test_every_alert_has_a_runbook():
    for rule in rules():
        if "alert" in rule:
            assert set(rule["annotations"]) == {"summary", "description", "runbook"}, rule["alert"]
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert len(rule["annotations"]["runbook"]) > 80


def promtool(*arguments, cwd):
    command = [str(TOOLS / "promtool"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_promtool_accepts_the_rules(tmp_path):
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_reads_every_expression(tmp_path):
    """Wraps the queries as rules, because the tool accepts no other form."""
    made = [{"record": f"probe:number:{n}", "expr": as_prometheus(expression)}
            for n, (_, expression) in enumerate(expressions())]
    file = tmp_path / "probe.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "probe", "rules": made}]}))
    done = promtool("check", "rules", str(file), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    file.write_text(yaml.safe_dump({"groups": [{"name": "probe", "rules": [{"record": "a", "expr": "sum by (a"}]}]}))
    assert promtool("check", "rules", str(file), cwd=tmp_path).returncode != 0


def test_alerts_fire_when_they_should(tmp_path):
    shutil.copy(RULES, tmp_path / "rules.yaml")
    shutil.copy(ROOT / "tests" / "helm" / "rules_test.yaml", tmp_path)
    done = promtool("test", "rules", "rules_test.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    # Checks that expectations are compared: with another threshold the tests fail.
    text = (tmp_path / "rules.yaml").read_text()
    (tmp_path / "rules.yaml").write_text(text.replace("lockstep:ranks_ready == 0", "lockstep:ranks_ready == 1"))
    assert promtool("test", "rules", "rules_test.yaml", cwd=tmp_path).returncode != 0


def test_promtool_accepts_the_scrape_configuration(tmp_path):
    for path in (ROOT / "deploy" / "prometheus" / "prometheus.yaml", RULES):
        shutil.copy(path, tmp_path)
    done = promtool("check", "config", "prometheus.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_cluster_gets_the_same_files():
    objects = chart.rendered("everything-pod")
    rule = chart.of_kind(objects, "PrometheusRule")[0]
    assert rule["spec"] == {"groups": groups()}
    maps = {name: text for made in chart.of_kind(objects, "ConfigMap") for name, text in made["data"].items()}
    assert set(maps) == {f"lockstep-{path.name}" for path in DASHBOARDS}
    for path in DASHBOARDS:
        assert json.loads(maps[f"lockstep-{path.name}"]) == json.loads(path.read_text())
    for made in chart.of_kind(objects, "ConfigMap"):
        assert made["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_panels_do_not_overlap():
    for path in DASHBOARDS:
        taken = set()
        for panel in json.loads(path.read_text())["panels"]:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert at["x"] + at["w"] <= 24 and not cells & taken, f"{path.stem}: {panel['title']}"
            taken |= cells


@pytest.mark.parametrize("script", ["helm/dashboards.py", "deploy/metrics.py"])
def test_generated_files_are_up_to_date(script):
    done = subprocess.run([sys.executable, str(ROOT / script), "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
