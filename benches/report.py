"""Writes the plots and the README's section "How fast" from the newest results of `make bench-peers`.

    python3 benches/report.py            writes docs/pictures/speed-*.svg, and README.md between its two markers
    python3 benches/report.py --check    writes nothing; fails with the names of files that would change
    python3 benches/report.py --stale    prints results that are older than the code that they measure

No figure of speed is typed by hand: `--check` also fails where the section has one outside of the markers.
"""

import argparse
import os
import re
import subprocess
import sys
import textwrap
from fnmatch import fnmatch
from pathlib import Path

import cells
import plots
from svg import figure

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
HEADING = "## How fast"
BY_HAND = re.compile(r"\d[\d.,]*\s*(?:tokens/s|ms\b|[µμ]s\b)")
NOTHING_YET = "There are no figures yet: `make bench-peers` measures them, and `make report` writes them here."
# The rows are the formats, HTTP with each number of clients, and one large model.
LARGE = ("random-8B", "Q4_K")
SHOWN_PLOTS = ("speed-formats", "speed-load")

SERVING = ("worker", "coordinator", "router")
# The code that each result measures, by the name of the result's file.
MEASURES = {
    "*-nvidia-*.json": ("worker/backend/src/cuda",),
    "*-peers.json": SERVING,
    "bench.md": SERVING,
    "chaos*.md": SERVING,
    "encoders.md": ("worker/backend", "worker/model"),
    "grids.md": SERVING,
    "hostile.md": ("router",),
    "kl.md": ("worker/backend",),
    "links.md": ("worker/collective", "wire"),
    "nightly.md": SERVING,
    "overload.md": ("router",),
    "peer_tests.md": ("router/faces",),
    "peer_tests_pooling.md": ("router/faces",),
    "ready.md": ("src", "worker/src/load"),
    "router.md": ("router",),
    "scheduler.md": ("coordinator/scheduler",),
    "simulate.md": ("tools/src/simulate",),
    "simulation.md": SERVING,
    "soak.md": SERVING,
    "sums.md": ("worker/collective", "wire"),
    "tenants.md": ("router/src/limits", "coordinator/scheduler"),
    "topologies.md": SERVING,
}
# Documents and tests do not slow a server down.
NOT_MEASURED = (":(exclude)*.md", ":(exclude,glob)**/tests/**")
DAY_S = 24 * 60 * 60
COLUMNS_MAX = 120


def main(argv=None):
    arguments = parse(argv)
    try:
        if arguments.stale:
            print("\n".join(stale(arguments.results)))
            return 0
        return check(arguments) if arguments.check else write(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file would change")
    parser.add_argument("--stale", action="store_true", help="print results that are older than what they measure")
    parser.add_argument("--results", type=Path, default=ROOT / "benches" / "results", metavar="FOLDER")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", metavar="FILE")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs" / "pictures", metavar="FOLDER")
    return parser.parse_args(argv)


def write(arguments):
    for path, text in changes(arguments).items():
        if text is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        print(f"{'removed' if text is None else 'wrote'} {shown(path)}")
    return 0


def check(arguments):
    wrong = [f"{shown(path)} would change: make report" for path in changes(arguments)]
    wrong += typed_by_hand(arguments.readme) + outside_of_the_table(arguments.results)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def changes(arguments):
    """Returns each file that differs from the results, with its correct text; None for a file that is not needed."""
    newest = cells.newest(arguments.results)
    results = cells.Results(newest) if newest else None
    drawn = plots.draw(results)
    files = {arguments.pictures / name: drawn.get(name) for name in plots.every_file()}
    files[arguments.readme] = with_section(arguments, results, drawn)
    return {path: text for path, text in files.items() if text_of(path) != text}


def text_of(path):
    return path.read_text(encoding="utf-8") if path.exists() else None


def shown(path):
    path = path.resolve()
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


# The README.

def parts(readme):
    """Returns the text before the section, the section up to the first marker, the part between the markers, the rest
    of the section, and the text after it."""
    text = readme.read_text(encoding="utf-8")
    found = re.search(rf"^{HEADING}\n.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    section = found.group() if found else ""
    if section.count(BEGIN) != 1 or section.count(END) != 1 or section.index(BEGIN) > section.index(END):
        raise ValueError(f'{shown(readme)}: the section "{HEADING}" needs one {BEGIN} and one {END}')
    above, _, rest = section.partition(BEGIN)
    between, _, below = rest.partition(END)
    return text[:found.start()], above, between, below, text[found.end():]


def with_section(arguments, results, drawn):
    before, above, _, below, after = parts(arguments.readme)
    return f"{before}{above}{BEGIN}\n{section(arguments, results, drawn)}\n{END}{below}{after}"


def typed_by_hand(readme):
    _, above, _, below, _ = parts(readme)
    found = [match.group() for text in (above, below) for match in BY_HAND.finditer(text)]
    return [f'{shown(readme)}: "{figure}" is typed by hand in "{HEADING}"' for figure in found]


def section(arguments, results, drawn):
    """Returns the text between the markers; `drawn` are the plots that have cells."""
    if not results:
        return NOTHING_YET
    here = arguments.readme.resolve().parent
    link = os.path.relpath(results.path.resolve(), here)
    folder = Path(os.path.relpath(arguments.pictures.resolve(), here)).as_posix()
    pictures = [picture(plot, folder) for plot in SHOWN_PLOTS if plots.file_name(plot, "light") in drawn]
    last = f"Every figure, with its range: [{results.path.name}]({Path(link).as_posix()})."
    context = plots.file_name("speed-context", "light")
    if context in drawn:
        last += f" After longer contexts: [a plot]({folder}/{context})."
    blocks = [wrapped(sentence(results)), table(results), *pictures, wrapped(comparison(results)),
              wrapped(not_run(results)), wrapped(last)]
    return "\n\n".join(block for block in blocks if block)


def wrapped(paragraph):
    return textwrap.fill(paragraph, COLUMNS_MAX, break_long_words=False, break_on_hyphens=False)


def sentence(results):
    machine = results.machine
    cores = machine.get("cores")
    where = [machine.get("cpu"), f"{cores} {'core' if cores == 1 else 'cores'}" if cores else None,
             ", ".join(machine.get("isa") or []).upper(),
             f"Linux {machine['kernel']}" if machine.get("kernel") else None]
    where = ", ".join(part for part in where if part) or "an unnamed machine"
    engines = [engine(results, name) for name in results.names() if name in results.engines]
    ours = [cell for cell in results.by_key.values() if cell["engine"] == cells.LOCKSTEP]
    threads = " or ".join(str(n) for n in sorted({cell["threads"] for cell in ours if cell.get("threads")}))
    rounds = sorted({cell["rounds"] for cell in ours if cell.get("rounds")})
    how = [f"{threads} {'thread' if threads == '1' else 'threads'} each" if threads else None,
           f"the median of {' to '.join(str(n) for n in dict.fromkeys([rounds[0], rounds[-1]]))} rounds"
           if rounds else None, f"by `{results.command}`" if results.command else None]
    what = " beside ".join(part for part in [engines[0] if engines else "Lockstep", ", ".join(engines[1:])] if part)
    date = f", {results.date}" if results.date else ""
    return f"On {where}{date}: {', '.join([what, *(part for part in how if part)])}."


def engine(results, name):
    of = results.engines.get(name) or {}
    # The version may already end with its commit.
    version, commit = str(of.get("version") or ""), str(of.get("commit") or "")[:9]
    commit = f"(`{commit}`)" if commit and commit not in version else ""
    return " ".join(part for part in [cells.engine_name(name), version, commit] if part)


def table(results):
    model, kind = cells.DEFAULT_MODEL, results.format_of("http-", "Q4_0")
    speeds = ("prefill-512", "decode-128")
    rows = [row(results, f"{of}: prefill, decode", model, of, speeds) for of in cells.FORMATS]
    for n in cells.CLIENTS:
        clients = "one client" if n == 1 else f"{n} clients"
        rows.append(row(results, f"{kind}, HTTP, {clients}: output, p99 inter-token latency", model, kind,
                        (f"http-{n}", f"http-{n}-itl-p99")))
    large, of = LARGE
    rows.append(row(results, f"{large}, {of}: prefill, decode", large, of, speeds))
    rows = [one for one in rows if one]
    return "\n".join([f"| {model} | Lockstep | best peer | ratio |", "|---|---|---|---|", *rows]) if rows else ""


def row(results, label, model, kind, tests):
    """Returns one line for the tests with a cell of Lockstep; nothing if there is none."""
    ours = [results.get(cells.LOCKSTEP, model, kind, test) for test in tests]
    if not any(ours):
        return ""
    peers = [results.best_peer(model, kind, test) for test in tests]
    ratios = [ratio_in_words(cells.ratio(cell)) for cell in ours]
    return f"| {label} | {in_words(ours)} | {of_peers(peers)} | {in_one(ratios)} |"


def in_words(some):
    """Formats figures with their units; a shared unit appears once."""
    units = [unit(cell) for cell in some if cell]
    if len(units) > 1 and len(set(units)) == 1:
        return f"{in_one([figure(cell['median']) for cell in some])} {units[0]}"
    return in_one([f"{figure(cell['median'])} {unit(cell)}" if cell else "-" for cell in some])


def of_peers(some):
    names = {cells.engine_name(cell["engine"]) for cell in some if cell}
    if len(names) == 1:
        return f"{names.pop()}: {in_words(some)}"
    return in_one([f"{cells.engine_name(cell['engine'])}: {in_words([cell])}" if cell else "-" for cell in some])


def in_one(texts):
    return "; ".join(texts) if any(text != "-" for text in texts) else "-"


def unit(cell):
    return cell.get("unit") or ""


def ratio_in_words(value):
    if value is None:
        return "-"
    # Rounds so that a small deficit does not look like a tie.
    return f"{value:.2f}" if value == 1 or f"{value:.2f}" != "1.00" else f"{value:.4g}"


def picture(plot, folder):
    dark, light = (f"{folder}/{plots.file_name(plot, theme)}" for theme in ("dark", "light"))
    words = {"speed-formats": "Prefill and decode by format", "speed-load": "Output and latency over HTTP by clients"}
    return (f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
            f'  <img src="{light}" alt="{words[plot]}">\n</picture>')


def comparison(results):
    """Returns where Lockstep is slower, and by how much two runs of it differ."""
    compared, behind = results.compared(), results.behind()
    if not compared:
        text = "No peer has figures to compare."
    elif not behind:
        text = f"Lockstep is behind the best peer in none of {len(compared)} cells."
    else:
        text = f"Lockstep is behind the best peer in {len(behind)} of {len(compared)} cells: {named(behind)}."
    text += " The ratio is Lockstep's median divided by the best peer's; for milliseconds and MB, lower is better."
    noise = results.noise()
    return text if noise is None else f"{text} Two runs of Lockstep differ by up to {100 * noise:.0f}%."


def named(some):
    """Returns each test of each model, with the formats and the ratios."""
    of_model = {}
    for cell in some:
        ratio = f"{cell.get('format')} ({ratio_in_words(cells.ratio(cell))})"
        of_model.setdefault(cell.get("model"), {}).setdefault(cell.get("test") or "", []).append(ratio)
    return "; ".join(f"of {model} " + ", ".join(f"{cells.words(test)} in {' and '.join(kinds)}"
                                                for test, kinds in tests.items())
                     for model, tests in of_model.items())


def not_run(results):
    why = [f"{one.get('engine')} ({one['why']})" if one.get("why") else str(one.get("engine"))
           for one in results.not_run]
    return f"Not run: {', '.join(why)}." if why else ""


# Results that are older than their code.

def measured_by(name):
    return next((paths for pattern, paths in MEASURES.items() if fnmatch(name, pattern)), None)


def result_files(folder):
    return sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def outside_of_the_table(folder):
    wrong = [f"{shown(path)} is in no row of MEASURES in benches/report.py" for path in result_files(folder)
             if measured_by(path.name) is None]
    gone = {path for paths in MEASURES.values() for path in paths if not (ROOT / path).exists()}
    return wrong + [f"MEASURES in benches/report.py names {path}, which does not exist" for path in sorted(gone)]


def stale(folder):
    """Returns a line for each result that was committed before the last change of the code that it measures."""
    try:
        if git("rev-parse", "--is-shallow-repository") != "false":
            return ["a shallow clone does not show which results are older than the code"]
        ages = [age(path.resolve()) for path in result_files(folder) if measured_by(path.name)]
    except (OSError, subprocess.CalledProcessError):
        return ["git does not show here which results are older than the code"]
    lines = [line for line in ages if line]
    return lines or ["no result is older than the code that it measures"]


def age(path):
    """Returns None for a result that is as new as its code, or that is not committed in its present form."""
    paths = measured_by(path.name)
    if not path.is_relative_to(ROOT) or git("status", "--porcelain", "--", path):
        return None
    ours = git("log", "-1", "--format=%ct %H", "--", path)
    code = git("log", "-1", "--format=%ct", "--", *paths, *NOT_MEASURED)
    if not ours or not code:
        return None
    time, commit = ours.split()
    seconds = int(code) - int(time)
    if seconds <= 0:
        return None
    n = int(git("rev-list", "--count", f"{commit}..HEAD", "--", *paths, *NOT_MEASURED))
    days, commits = f"{seconds / DAY_S:.1f} days", "one commit" if n == 1 else f"{n} commits"
    return f"{shown(path)} is {days} and {commits} older than {', '.join(paths)}"


def git(*words):
    command = ["git", "-C", ROOT, *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
