"""The cells of one file of results, as `make bench-peers` writes it, and descriptions of tests. Any cell may be
missing. Independent of plots and of the README.
"""

import json

LOCKSTEP, CONTROL = "lockstep", "lockstep (control)"
DEFAULT_MODEL = "SmolLM2-135M"
FORMATS = ["Q4_1", "Q4_0", "Q8_0", "Q4_K_M", "BF16"]
CLIENTS = [1, 8, 32]
RATE = "tokens/s"


def newest(folder):
    """Returns the newest file of results by its date, then by its name; None if there is none."""
    found = [(read(path).get("date") or "", path.name, path) for path in folder.glob("*-peers.json")]
    return max(found)[2] if found else None


def read(path):
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not an object")
    return content


def engine_name(engine):
    return "Lockstep" if engine == LOCKSTEP else engine


class Results:
    def __init__(self, path):
        content = read(path)
        self.path, self.date, self.command = path, content.get("date"), content.get("command")
        self.machine = content.get("machine") or {}
        self.engines = content.get("engines") or {}
        self.not_run = content.get("not_run") or []
        self.cells = [cell for cell in content.get("cells") or [] if cell.get("median") is not None]
        self.by_key = {}
        for cell in self.cells:
            # For each key the first cell with the most threads counts.
            key = (cell.get("engine"), cell.get("model"), cell.get("format"), cell.get("test"))
            if key not in self.by_key or (cell.get("threads") or 0) > (self.by_key[key].get("threads") or 0):
                self.by_key[key] = cell

    def get(self, engine, model, kind, test):
        """Returns the cell of an engine; None if it is missing. `kind` is the format of the weights."""
        return self.by_key.get((engine, model, kind, test))

    def names(self):
        """Returns Lockstep, then each peer in the order of the file, without the control."""
        all_of_them = [*self.engines, *(cell.get("engine") for cell in self.cells)]
        peers = dict.fromkeys(name for name in all_of_them if name not in (None, LOCKSTEP, CONTROL))
        return [LOCKSTEP, *peers]

    def best_peer(self, model, kind, test):
        """Returns the cell of the best peer: the highest rate, or the least time or memory."""
        cells = [self.get(engine, model, kind, test) for engine in self.names()[1:]]
        cells = [cell for cell in cells if cell]
        if not cells:
            return None
        return (max if more_is_better(cells[0]) else min)(cells, key=lambda cell: cell["median"])

    def format_of(self, prefix, preferred):
        """Returns the format for tests that begin with `prefix`: the preferred one, or the first with such cells."""
        with_cells = {key[2] for key in self.by_key if key[1] == DEFAULT_MODEL and (key[3] or "").startswith(prefix)}
        return next((kind for kind in [preferred, *FORMATS] if kind in with_cells), preferred)

    def behind(self):
        """Returns Lockstep's cells that are worse than the best peer's."""
        return [cell for cell in self.by_key.values() if cell["engine"] == LOCKSTEP and is_behind(cell)]

    def compared(self):
        return [cell for cell in self.by_key.values() if cell["engine"] == LOCKSTEP and ratio(cell) is not None]

    def noise(self):
        """Returns the largest relative difference between the control and Lockstep; None without a control."""
        pairs = [(cell, self.get(CONTROL, *key[1:])) for key, cell in self.by_key.items() if key[0] == LOCKSTEP]
        shares = [abs(again["median"] / cell["median"] - 1) for cell, again in pairs if again and cell["median"]]
        return max(shares, default=None)


def more_is_better(cell):
    return cell.get("unit") == RATE


def ratio(cell):
    return cell.get("ratio_to_best_peer") if cell else None


def is_behind(cell):
    value = ratio(cell)
    return value is not None and (value < 1 if more_is_better(cell) else value > 1)


def words(test):
    """Describes a test: `decode-at-4096` is the decode after 4,096 positions."""
    fixed = {"memory-peak": "peak memory", "prefill-512": "prefill", "decode-128": "decode"}
    if test in fixed:
        return fixed[test]
    kind, _, rest = test.partition("-")
    positions = rest.removeprefix("at-")
    if kind in ("prefill", "decode") and positions != rest and positions.isdigit():
        return f"{kind} after {int(positions):,} positions"
    count, _, figure = rest.partition("-")
    if kind == "http" and count.isdigit():
        clients = "one client" if count == "1" else f"{count} clients"
        of = {"": "output", "itl-p50": "p50 inter-token latency", "itl-p99": "p99 inter-token latency",
              "ttft-p50": "p50 time to first token"}
        return f"{of.get(figure, figure)} with {clients}"
    if kind in ("prefill", "decode") and rest.isdigit():
        return f"{kind} of {int(rest):,} tokens"
    return test
