#!/usr/bin/env python3
"""Generates Grafana's dashboards: helm/lockstep/files/dashboards/*.json. A test checks that the metrics
exist. `dashboards.py --check` only checks that the files are up to date."""

import json
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent / "lockstep" / "files" / "dashboards"
WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Selectors for coordinators, and for routers, which have no label `replica`.
OF = '{namespace=~"$namespace", model_name=~"$model", replica=~"$replica"}'
DOOR = '{namespace=~"$namespace", model_name=~"$model"}'


def quantile(q, name, of, by=""):
    return f"histogram_quantile({q}, sum by (le{by}) (rate({name}_bucket{of}[$__rate_interval])))"


def quantiles(name):
    return [(quantile(q, name, DOOR), f"p{q * 100:g}") for q in (0.5, 0.9, 0.99)]


def target(expr, legend, ref):
    return {"datasource": SOURCE, "expr": expr, "legendFormat": legend, "refId": ref}


def panel(title, unit, *series, kind="timeseries", width=8, height=8, about="", **options):
    """Returns a panel; each of `series` is (expression, legend)."""
    targets = [target(expr, legend, chr(ord("A") + n)) for n, (expr, legend) in enumerate(series)]
    defaults = {"unit": unit, **options}
    made = {"title": title, "type": kind, "datasource": SOURCE, "description": about, "targets": targets}
    if kind == "timeseries":
        defaults["custom"] = {"fillOpacity": 10, "showPoints": "never"}
        made["options"] = {"legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
                           "tooltip": {"mode": "multi", "sort": "desc"}}
    made["fieldConfig"] = {"defaults": defaults, "overrides": []}
    made["gridPos"] = {"w": width, "h": height}
    return made


def stat(title, unit, expr, about="", **options):
    made = panel(title, unit, (expr, ""), kind="stat", width=4, height=4, about=about, **options)
    made["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
    return made


def thresholds(*steps):
    """Takes (None, colour) first, then (value, colour) for each value at which a colour begins."""
    return {"thresholds": {"mode": "absolute", "steps": [{"value": at, "color": colour} for at, colour in steps]}}


def variable(name, label, metric, of=""):
    query = f"label_values({metric}{of}, {name if name != 'model' else 'model_name'})"
    return {"name": name, "label": label, "type": "query", "datasource": SOURCE, "query": query, "definition": query,
            "refresh": 2, "includeAll": True, "multi": True, "allValue": ".*", "sort": 1,
            "current": {"text": "All", "value": "$__all"}}


def placed(panels):
    """Places panels from left to right, and begins a new row where the next does not fit."""
    x = y = row = 0
    for n, made in enumerate(panels):
        width, height = made["gridPos"]["w"], made["gridPos"]["h"]
        if x + width > WIDTH:
            x, y, row = 0, y + row, 0
        made["gridPos"] = {"x": x, "y": y, "w": width, "h": height}
        made["id"] = n + 1
        x, row = x + width, max(row, height)
    return panels


def dashboard(name, title, about, panels, has_replica):
    variables = [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}},
        variable("namespace", "Namespace", "lockstep:requests_total"),
        variable("model", "Model", "lockstep:requests_total", '{namespace=~"$namespace"}'),
    ]
    if has_replica:
        variables.append(variable("replica", "Replica", "lockstep:epoch", DOOR))
    return name, {
        "uid": f"lockstep-{name}", "title": f"Lockstep: {title}", "description": about, "tags": ["lockstep"],
        "schemaVersion": 39, "version": 1, "editable": True, "refresh": "30s", "time": {"from": "now-1h", "to": "now"},
        "timezone": "", "templating": {"list": variables}, "panels": placed(panels),
        "links": [{"type": "dashboards", "title": "Lockstep", "tags": ["lockstep"], "asDropdown": True,
                   "includeVars": True, "keepTime": True}],
    }


def overview():
    rate = "[$__rate_interval]"
    ratio = {"min": 0, "max": 1}
    return dashboard("overview", "overview", "Requests as clients see them, and the load of the replicas.", [
        stat("Requests", "reqps", f"sum(rate(lockstep:requests_total{DOOR}{rate}))"),
        stat("Tokens out", "short", f"sum(rate(lockstep:generation_tokens_total{DOOR}{rate}))", about="Per second."),
        stat("First token, p99", "s", quantile(0.99, "lockstep:time_to_first_token_seconds", DOOR)),
        stat("Between tokens, p99", "s", quantile(0.99, "lockstep:inter_token_latency_seconds", DOOR)),
        stat("Running", "short", f"sum(lockstep:requests_running{DOOR})"),
        stat("Waiting", "short", f"sum(lockstep:requests_waiting{DOOR})",
             **thresholds((None, "green"), (1, "orange"))),
        panel("Requests by outcome", "reqps",
              (f"sum by (face, outcome) (rate(lockstep:requests_total{DOOR}{rate}))", "{{face}} {{outcome}}")),
        panel("Time to first token", "s",
              *quantiles("lockstep:time_to_first_token_seconds")),
        panel("Time between tokens", "s",
              *quantiles("lockstep:inter_token_latency_seconds")),
        panel("Request duration", "s",
              *quantiles("lockstep:request_seconds")),
        panel("Tokens per second", "short",
              (f"sum(rate(lockstep:prompt_tokens_total{DOOR}{rate}))", "prompt"),
              (f"sum(rate(lockstep:generation_tokens_total{DOOR}{rate}))", "output"),
              (f"sum(rate(lockstep:discarded_tokens_total{DOOR}{rate}))", "discarded")),
        panel("Requests at the replicas", "short",
              (f"sum by (replica) (lockstep:requests_running{DOOR})", "{{replica}} running"),
              (f"sum by (replica) (lockstep:requests_waiting{DOOR})", "{{replica}} waiting")),
        panel("KV in use", "percentunit", (f"lockstep:kv_usage_ratio{DOOR}", "{{replica}}"), **ratio),
        panel("Prefix cache hit ratio", "percentunit",
              (f"sum by (replica) (rate(lockstep:prefix_hits_total{DOOR}{rate})) "
               f"/ sum by (replica) (rate(lockstep:prefix_queries_total{DOOR}{rate}))", "{{replica}}"), **ratio),
        panel("Refused by coordinators", "reqps",
              (f"sum by (reason) (rate(lockstep:requests_refused_total{DOOR}{rate}))", "{{reason}}")),
    ], has_replica=False)


def replica():
    rate = "[$__rate_interval]"
    return dashboard("replica", "replica", "A coordinator: its queue, steps, KV blocks, and lost ranks.", [
        stat("Ranks ready", "short", f"sum(lockstep:ranks_ready{OF})", **thresholds((None, "red"), (1, "green"))),
        stat("Epoch", "short", f"max(lockstep:epoch{OF})", about="Grows when a placement begins and when one ends."),
        stat("Ranks lost", "short", f"sum(increase(lockstep:ranks_lost_total{OF}[$__range]))", about="In this range.",
             **thresholds((None, "green"), (1, "orange"))),
        stat("Steps per second", "short", f"sum(rate(lockstep:steps_total{OF}{rate}))"),
        stat("KV blocks", "short", f"max(lockstep:kv_blocks{OF})"),
        stat("Preemptions per second", "short", f"sum(rate(lockstep:preemptions_total{OF}{rate}))"),
        panel("Requests", "short", (f"lockstep:requests_running{OF}", "{{replica}} running"),
              (f"lockstep:requests_waiting{OF}", "{{replica}} waiting")),
        panel("Time of a step", "s",
              *[(quantile(q, "lockstep:step_seconds", OF, ", replica"), "{{replica}} p%g" % (q * 100))
                for q in (0.5, 0.99)]),
        panel("Finished requests", "reqps",
              (f"sum by (replica, finished_reason) (rate(lockstep:requests_finished_total{OF}{rate}))",
               "{{replica}} {{finished_reason}}")),
        panel("KV in use", "percentunit", (f"lockstep:kv_usage_ratio{OF}", "{{replica}}"), min=0, max=1),
        panel("Preemptions", "short",
              (f"rate(lockstep:preemptions_total{OF}{rate})", "{{replica}}")),
        panel("Prefix cache", "short",
              (f"rate(lockstep:prefix_queries_total{OF}{rate})", "{{replica}} looked up"),
              (f"rate(lockstep:prefix_hits_total{OF}{rate})", "{{replica}} found")),
        panel("Placements", "short", (f"changes(lockstep:epoch{OF}[5m])", "{{replica}} changes in 5 min"),
              (f"increase(lockstep:ranks_lost_total{OF}[5m])", "{{replica}} lost rank {{rank}} in 5 min: {{cause}}")),
        panel("Recovery time", "s",
              *[(quantile(q, "lockstep:recovery_seconds", OF, ", replica, cause"),
                 "{{replica}} {{cause}} p%g" % (q * 100)) for q in (0.5, 0.99)],
              about="From the detection of a loss, or a requested change, until the replica serves again."),
        panel("Recomputed positions", "short", (f"rate(lockstep:replayed_tokens_total{OF}{rate})", "{{replica}}")),
        panel("Store connected", "short", (f"min by (pod) (lockstep:store_connected{DOOR})", "{{pod}}"), min=0, max=1,
              about="For routers and coordinators with etcd: 1 while it answers."),
        panel("Time of a step, measured over predicted", "short",
              *[(quantile(q, "lockstep:step_time_ratio", OF, ", replica"), "{{replica}} p%g" % (q * 100))
                for q in (0.05, 0.5, 0.95)],
              about="The scheduler learns what a step costs, and cuts prompts so that streams keep their pace."),
        panel("Prompts cut", "short",
              (f"sum by (replica, reason) (rate(lockstep:chunk_cuts_total{OF}{rate}))", "{{replica}} {{reason}}"),
              about="Steps that compute less of the prompts than they could, by the limit."),
        panel("Starved stages", "short", (f"rate(lockstep:starved_total{OF}{rate})", "{{replica}}"),
              about="A stage was free, and no step was left to plan for it."),
        panel("Steps too close to another", "short", (f"rate(lockstep:steps_early_total{OF}{rate})", "{{replica}}"),
              about="Fewer steps after the last one of the same sequence than there are stages: a stage waits."),
    ], has_replica=True)


def rank_grid():
    def share(name):
        return f"rate(lockstep:rank_{name}_micros_total{OF}[$__rate_interval]) / 1e6"

    def grid(title, name, about, colours):
        made = panel(title, "percentunit", (share(name), "{{replica}} {{rank}}"), kind="bargauge", width=12, height=9,
                     about=about, min=0, max=1, **thresholds(*colours))
        made["options"] = {"orientation": "horizontal", "displayMode": "lcd",
                           "reduceOptions": {"calcs": ["lastNotNull"]}}
        return made

    good, bad = ((None, "blue"), (0.5, "green")), ((None, "green"), (0.25, "orange"), (0.5, "red"))
    lines = [panel(f"{title} over time", "percentunit", (share(name), "{{replica}} {{rank}}"), width=12, min=0)
             for title, name in (("Computing", "compute"), ("Bubble", "bubble"))]
    slow = panel("Slow ranks", "short", (f"lockstep:rank_slow{OF} == 1", "{{replica}} {{rank}}"), width=24, height=5,
                 about="Ranks that need much longer than others for the same work.")
    about = "Where the time of each rank goes. Rank = stage x tp + place in the stage."
    return dashboard("ranks", "rank grid", about, [
        grid("Computing", "compute", "Time in which a rank computed.", good),
        grid("Waiting for peers", "wait", "Waiting within a step for sums and rows of other ranks.", bad),
        grid("Idle", "idle", "Waiting for a step.", ((None, "green"), (0.9, "blue"))),
        grid("Bubble", "bubble", "Not computing although the replica had a step in flight.", bad),
        *lines,
        slow,
    ], has_replica=True)


def slo():
    def in_time(name, le):
        every = f"rate(lockstep:{name}_count{DOOR}[$__range])"
        return f'sum(rate(lockstep:{name}_bucket{{namespace=~"$namespace", model_name=~"$model", le="{le}"}}' \
               f"[$__range])) / sum({every})"

    bad = 'rate(lockstep:requests_total{namespace=~"$namespace", model_name=~"$model", ' \
          'outcome=~"failed|lost|lost_too_often|not_ready"}[$__range])'
    every = f"rate(lockstep:requests_total{DOOR}[$__range])"
    goal = {"min": 0, "max": 1, "decimals": 3}
    windows = [(f"model:lockstep_request_failures:ratio_rate{window}{DOOR} / 0.001", "{{model_name}} %s" % window)
               for window in ("5m", "30m", "1h", "6h")]
    return dashboard("slo", "objectives", "99.9 % of requests served, 95 % of first tokens within 2.5 s.", [
        stat("Served", "percentunit", f"1 - (sum({bad}) or vector(0)) / sum({every})",
             about="In this range; goal 99.9 %.", **goal, **thresholds((None, "red"), (0.999, "green"))),
        stat("Error budget left", "percentunit", f"1 - ((sum({bad}) or vector(0)) / sum({every})) / 0.001",
             about="Of the budget of this range.", **thresholds((None, "red"), (0, "orange"), (0.5, "green"))),
        stat("First tokens in time", "percentunit", in_time("time_to_first_token_seconds", "2.5"),
             about="Within 2.5 s; goal 95 %.", **goal, **thresholds((None, "red"), (0.95, "green"))),
        stat("Tokens in time", "percentunit", in_time("inter_token_latency_seconds", "0.1"),
             about="Within 100 ms of the previous one; goal 99 %.", **goal,
             **thresholds((None, "red"), (0.99, "green"))),
        panel("Burn rate", "short", *windows, width=12, about="1 uses up the budget exactly; alerts at 14.4 and 6."),
        panel("First tokens within 2.5 s", "percentunit",
              (f"model:lockstep_first_token_in_time:ratio_rate5m{DOOR}", "{{model_name}}"), width=12, **goal),
        panel("Tokens within 100 ms", "percentunit",
              (f"model:lockstep_tokens_in_time:ratio_rate5m{DOOR}", "{{model_name}}"), width=12, **goal),
        panel("First token, p99", "s", (f"model:lockstep_first_token_seconds:p99_rate5m{DOOR}", "{{model_name}}"),
              width=12),
    ], has_replica=False)


def main():
    is_check = "--check" in sys.argv[1:]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, made in (overview(), replica(), rank_grid(), slo()):
        path, text = FOLDER / f"{name}.json", json.dumps(made, indent=1) + "\n"
        if not is_check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"{path.name} is out of date: run helm/dashboards.py")


if __name__ == "__main__":
    main()
