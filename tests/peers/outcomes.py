"""A pytest plugin: writes how each test ended, as lines of JSON, to the file that PEER_OUTCOMES names. Tests that
PEER_LEFT_OUT lists, in JSON, do not run, and get the outcome `left out`.
"""

import fnmatch
import json
import os

import pytest


def fits(test, pattern):
    """Returns whether the pattern matches. Brackets are literal."""
    return fnmatch.fnmatchcase(test, pattern.replace("[", "[[]"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    patterns = json.loads(os.environ.get("PEER_LEFT_OUT", "[]"))
    left_out = [item for item in items if any(fits(item.nodeid, one) for one in patterns)]
    for item in left_out:
        write({"test": item.nodeid, "when": "collect", "outcome": "left out", "why": ""})
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    ended = report.when == "call" or report.outcome != "passed"
    if not ended:
        return
    why = ""
    if report.outcome == "failed":
        why = call.excinfo.exconly()[:300]
    elif report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        why = report.longrepr[2]
    write({"test": item.nodeid, "when": report.when, "outcome": report.outcome, "why": why})


def pytest_collectreport(report):
    """Reports a file that cannot be read as a failed test: its tests would be missing without a trace."""
    if report.failed:
        write({"test": report.nodeid, "when": "collect", "outcome": "failed", "why": str(report.longrepr)[-300:]})


def write(line):
    with open(os.environ["PEER_OUTCOMES"], "a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")
