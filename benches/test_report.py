"""Tests of `report.py` with invented results: python3 -m unittest benches/test_report.py"""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import xml.etree.ElementTree as xml
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cells  # noqa: E402
import plots  # noqa: E402
import report  # noqa: E402
import svg  # noqa: E402

README = f"""# A program

## How fast

{report.BEGIN}
{report.END}

Elsewhere: 5 places.

## Later

It takes 5 ms.
"""
NAME = "2026-01-02-made-up-peers.json"


def sample():
    """Lockstep, its control and two peers; Lockstep is behind in two places."""
    made = [cell("decode-128", kind, 100 + 50 * i) for i, kind in enumerate(cells.FORMATS)]
    made += [cell("prefill-512", kind, 1000 + 200 * i) for i, kind in enumerate(cells.FORMATS)]
    for n in cells.CLIENTS:
        made += [cell(f"http-{n}", "Q4_0", 150 + 10 * n), cell(f"http-{n}-itl-p50", "Q4_0", 5 * n, "ms"),
                 cell(f"http-{n}-itl-p99", "Q4_0", 12 * n, "ms")]
    for n in (4096, 7800):
        made += [cell(f"{test}-at-{n}", "Q8_0", 100_000 / n) for test in ("prefill", "decode")]
    made += [cell("memory-peak", "Q4_0", 210, "MB"), cell("decode-128", "Q4_K", 4.2, model="random-8B")]
    every = [one for ours in made for one in with_peers(ours)]
    set_ratio(every, "decode-128", "BF16", 0.914)
    set_ratio(every, "http-8-itl-p99", "Q4_0", 1.25)
    machine = {"cpu": "A <CPU> & more", "isa": ["avx2"], "cores": 2, "kernel": "6.1"}
    engines = {"lockstep": {"version": "0.1.0", "commit": "abcdef12"},
               "llama.cpp": {"version": "b1", "commit": "0c1e5"}}
    return {"date": "2026-01-02", "command": "make bench-peers", "machine": machine, "engines": engines,
            "not_run": [{"engine": "vLLM", "why": "no wheel for this processor"}], "cells": every}


def cell(test, kind, median, unit="tokens/s", model=cells.DEFAULT_MODEL):
    return {"engine": "lockstep", "model": model, "format": kind, "test": test, "unit": unit, "threads": 2,
            "rounds": 5, "median": median, "min": median * 0.95, "max": median * 1.05,
            "ratio_to_best_peer": 2.0 if unit == "tokens/s" else 0.5}


def with_peers(ours):
    factor = 0.5 if ours["unit"] == "tokens/s" else 2
    others = [(cells.CONTROL, 1.02), ("llama.cpp", factor), ("another", factor ** 2)]
    scaled = [{**ours, "engine": name, "ratio_to_best_peer": None,
               **{key: ours[key] * by for key in ("median", "min", "max")}} for name, by in others]
    return [ours, *scaled]


def set_ratio(every, test, kind, ratio):
    found = [one for one in every if (one["engine"], one["test"], one["format"]) == ("lockstep", test, kind)]
    found[0]["ratio_to_best_peer"] = ratio


class Report(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.results, self.readme = self.folder / "results", self.folder / "README.md"
        self.pictures = self.folder / "pictures"
        self.results.mkdir()
        self.readme.write_text(README)

    def put(self, content, name=NAME):
        (self.results / name).write_text(json.dumps(content))

    def run_with(self, *flags):
        """Returns the status and all that was printed."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            status = report.main([*flags, "--results", str(self.results), "--readme", str(self.readme),
                                  "--pictures", str(self.pictures)])
        return status, printed.getvalue()

    def check_fails_with(self, words):
        status, printed = self.run_with("--check")
        self.assertEqual(status, 1, printed)
        self.assertIn(words, printed)

    def write(self):
        self.assertEqual(self.run_with()[0], 0)
        self.assertEqual(self.run_with("--check"), (0, ""))
        return self.readme.read_text()

    def test_no_results(self):
        self.assertIn(report.NOTHING_YET, self.write())
        self.assertFalse(self.pictures.exists())

    def test_readme(self):
        self.put(sample())
        text = self.write()
        for words in [
            "On A <CPU> & more, 2 cores, AVX2, Linux 6.1, 2026-01-02: Lockstep 0.1.0 (`abcdef12`) beside llama.cpp b1 "
            "(`0c1e5`), 2 threads each, the median of 5 rounds, by `make bench-peers`.",
            "| Q4_0: prefill, decode | 1,200; 150 tokens/s | llama.cpp: 600; 75.0 tokens/s | 2.00; 2.00 |",
            "| Q4_0, HTTP, 8 clients: output, p99 inter-token latency | 230 tokens/s; 96.0 ms "
            "| llama.cpp: 115 tokens/s; 192 ms | 2.00; 1.25 |",
            "| random-8B, Q4_K: prefill, decode | -; 4.20 tokens/s | llama.cpp: -; 2.10 tokens/s | -; 2.00 |",
            "behind the best peer in 2 of 25 cells: of SmolLM2-135M decode in BF16 (0.91), p99 inter-token latency "
            "with 8 clients in Q4_0 (1.25).",
            "Two runs of Lockstep differ by up to 2%.", "Not run: vLLM (no wheel for this processor).",
            f"[{NAME}](results/{NAME})", 'srcset="pictures/speed-formats-dark.svg"',
            'src="pictures/speed-load-light.svg"',
        ]:
            self.assertIn(words, " ".join(text.split()))
        before, _, rest = text.partition(report.BEGIN)
        self.assertEqual(before + rest.partition(report.END)[2], README.replace(f"{report.BEGIN}\n{report.END}", ""))

    def test_a_digit_by_hand(self):
        self.put(sample())
        text = self.write()
        for typed in ["149 tokens/s", "5 ms", "2.5 µs", "1,203 tokens/s"]:
            self.readme.write_text(text.replace("5 places", f"{typed} there"))
            self.check_fails_with(f'"{typed}" is typed by hand')
        self.readme.write_text(text.replace("llama.cpp: 600", "llama.cpp: 601"))
        self.check_fails_with("README.md would change")

    def test_another_figure(self):
        self.put(sample())
        self.write()
        changed = sample()
        changed["cells"][0]["median"] += 3
        self.put(changed)
        self.check_fails_with("README.md would change")
        self.check_fails_with("speed-formats-dark.svg would change")

    def test_newer_results_win(self):
        self.put(sample())
        newer = {**sample(), "date": "2026-02-01", "cells": sample()["cells"][:4]}
        self.put(newer, "2025-01-01-named-earlier-peers.json")
        self.assertIn("2026-02-01", self.write())
        self.assertFalse((self.pictures / "speed-load-light.svg").exists())

    def test_plots_that_lost_their_cells_are_removed(self):
        self.put(sample())
        self.write()
        self.put({**sample(), "cells": []})
        self.check_fails_with("speed-load-light.svg would change")
        self.assertNotIn("<picture>", self.write())
        self.assertEqual(list(self.pictures.iterdir()), [])

    def test_missing_cells(self):
        everything = sample()
        n = len(everything["cells"])
        # Each engine, each kind of test, each format may be gone, and so may every other cell.
        for key in ("engine", "test", "format", "unit"):
            for value in {one[key] for one in everything["cells"]}:
                self.put({**everything, "cells": [one for one in everything["cells"] if one[key] != value]})
                self.assertEqual(self.run_with()[0], 0, f"without {value}")
        for value in ("http-8", "http-8-itl-p50", "decode-128", "prefill-at-4096", "memory-peak"):
            self.put({**everything, "cells": [one for one in everything["cells"] if one["test"] == value]})
            self.assertEqual(self.run_with()[0], 0, f"only {value}")
        for step in (2, 3, 7):
            self.put({**everything, "cells": everything["cells"][n % step::step]})
            self.write()
        for bare in ({}, {"cells": None}, {"cells": [{"engine": "lockstep", "median": 1.0}]},
                     {"cells": [{**cell("http-8-itl-p99", "Q4_0", 0, "ms"), "min": None, "max": None}]}):
            self.put(bare)
            self.write()

    def test_files_that_cannot_be_read(self):
        (self.results / NAME).write_text("{")
        self.check_fails_with(NAME)
        self.put(sample())
        self.readme.write_text(README.replace(report.END, ""))
        self.check_fails_with("How fast")

    def test_a_result_in_no_row(self):
        (self.results / "unknown.md").write_text("")
        self.run_with()
        self.check_fails_with("unknown.md is in no row")

    def git(self, *words, at):
        # Within a hook of git these name the repository of the hook.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environment.update({name: f"{at} +0000" for name in ("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE")})
        subprocess.run(["git", "-C", self.folder, "-c", "user.name=t", "-c", "user.email=t@localhost", *words],
                       check=True, env=environment, stdout=subprocess.DEVNULL)

    def commit(self, name, at):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(at))
        self.git("add", name, at=at)
        self.git("commit", "--quiet", "--message", name, at=at)

    @unittest.skipUnless(shutil.which("git"), "git is missing")
    def test_stale(self):
        day, began = report.DAY_S, 1_700_000_000
        self.git("init", "--quiet", at=began)
        for i, name in enumerate(["router/src/a.rs", "results/router.md", "router/src/a.rs", "router/src/b.rs",
                                  "results/overload.md", "router/DESIGN.md", "router/tests/t.rs"]):
            self.commit(name, began + i * day)
        (self.results / "hostile.md").write_text("in no commit")
        with unittest.mock.patch.object(report, "ROOT", self.folder.resolve()):
            self.assertEqual(self.run_with("--stale"),
                             (0, "results/router.md is 2.0 days and 2 commits older than router\n"))
            self.commit("results/router.md", began + 9 * day)
            self.assertEqual(self.run_with("--stale"), (0, "no result is older than the code that it measures\n"))

    def test_stale_without_git(self):
        with unittest.mock.patch.object(report, "ROOT", self.folder / "nowhere"):
            self.assertEqual(self.run_with("--stale"),
                             (0, "git does not show here which results are older than the code\n"))

    def test_svg(self):
        self.put(sample())
        self.write()
        results = cells.Results(self.results / NAME)
        first, again = plots.draw(results), plots.draw(cells.Results(self.results / NAME))
        self.assertEqual(first, again)
        self.assertEqual(sorted(first), sorted(plots.every_file()))
        for name, text in first.items():
            self.assertEqual((self.pictures / name).read_text(), text)
            root = xml.fromstring(text)
            self.assertEqual(root.tag, "{http://www.w3.org/2000/svg}svg")
            self.assertNotIn("nan", text)
        self.assertNotEqual(first["speed-load-dark.svg"], first["speed-load-light.svg"])

    def test_a_narrow_bar_has_its_value_turned(self):
        points = {kind: svg.Point(1234.0, None, None) for kind in cells.FORMATS}
        for n, is_turned in [(2, False), (7, True)]:
            series = [svg.Series(f"engine {i}", i, points) for i in range(n)]
            text = svg.picture("t", [svg.Panel("p", "x", "y", cells.FORMATS, series)], "dark")
            values = [one for one in xml.fromstring(text).iter() if one.text == "1,234"]
            self.assertEqual(len(values), 5 * n)
            self.assertEqual({"transform" in one.attrib for one in values}, {is_turned})

    def test_words(self):
        for test, words in [("prefill-512", "prefill"), ("decode-at-4096", "decode after 4,096 positions"),
                            ("http-1", "output with one client"),
                            ("prefill-12000", "prefill of 12,000 tokens"),
                            ("http-32-ttft-p50", "p50 time to first token with 32 clients"),
                            ("new-1", "new-1"), ("", "")]:
            self.assertEqual(cells.words(test), words)

    def test_figures(self):
        cases = [(0, "0"), (0.914, "0.91"), (9.999, "10.0"), (49.23, "49.2"), (99.97, "100"), (1203.4, "1,203")]
        for value, words in cases:
            self.assertEqual(svg.figure(value), words)
        for most, last in [(0, 0.25), (7, 8), (100, 100), (1051, 1500), (0.03, 0.03)]:
            self.assertAlmostEqual(svg.steps(most)[-1], last)
        self.assertEqual(svg.log_steps(4.8, 332), [2, 5, 10, 20, 50, 100, 200, 500])
        self.assertEqual(svg.log_steps(5, 5), [5, 10])


if __name__ == "__main__":
    unittest.main()
