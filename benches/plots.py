"""The plots of the README, and the cells of the results that each needs. `svg` draws them."""

import cells
import svg

THEMES = tuple(svg.THEMES)
# The tests of each context: the plain tests begin at zero.
CONTEXTS = {0: ("prefill-512", "decode-128"), 4096: ("prefill-at-4096", "decode-at-4096"),
            7800: ("prefill-at-7800", "decode-at-7800")}


def file_name(plot, theme):
    return f"{plot}-{theme}.svg"


def every_file():
    """Returns the names of all plots' files, including plots without cells."""
    return [file_name(plot, theme) for plot in PLOTS for theme in THEMES]


def draw(results):
    """Returns the text of each file by its name, without plots that have no cells."""
    files = {}
    for plot, panels_of in PLOTS.items() if results else ():
        title, panels = panels_of(results)
        panels = [panel for panel in panels if panel.series]
        if panels:
            files.update({file_name(plot, theme): svg.picture(title, panels, theme) for theme in THEMES})
    return files


def formats(results):
    def of(test, title):
        series = several(results, lambda engine: {
            kind: results.get(engine, cells.DEFAULT_MODEL, kind, test) for kind in cells.FORMATS})
        return svg.Panel(title, "format of the weights", cells.RATE, in_use(cells.FORMATS, series), series)
    panels = [of("prefill-512", "Prefill of 512 tokens"), of("decode-128", "Decode of 128 tokens")]
    return f"Prefill and decode of {cells.DEFAULT_MODEL} by format", panels


def load(results):
    kind = results.format_of("http-", "Q4_0")

    def of(ending, is_dashed=False):
        return several(results, lambda engine: {
            n: results.get(engine, cells.DEFAULT_MODEL, kind, f"http-{n}{ending}") for n in cells.CLIENTS}, is_dashed)

    def panel(title, unit, series, is_log):
        places = in_use(cells.CLIENTS, series)
        return svg.Panel(title, "clients at once", unit, places, series, "lines", is_log, True)
    latency = [above_zero(series) for series in of("-itl-p99") + of("-itl-p50", True)]
    latency = [series for series in latency if series.points]
    panels = [panel(f"Output over HTTP, {kind}", cells.RATE, of(""), False),
              panel("Inter-token latency: p99 (line), p50 (dashes)", "ms, on a log axis", latency, True)]
    return f"Output and inter-token latency of {cells.DEFAULT_MODEL} over HTTP, by clients", panels


def context(results):
    kind = results.format_of("decode-at-", "Q8_0")

    def of(i, title):
        series = several(results, lambda engine: {
            n: results.get(engine, cells.DEFAULT_MODEL, kind, tests[i]) for n, tests in CONTEXTS.items()})
        # The plain tests alone are a point and no line: another plot shows them.
        is_line = any(len(one.points) > 1 for one in series)
        places = in_use(list(CONTEXTS), series)
        return svg.Panel(title, "positions before", cells.RATE, places, series if is_line else [], "lines")
    panels = [of(0, f"Prefill after a context, {kind}"), of(1, f"Decode after a context, {kind}")]
    return f"Prefill and decode of {cells.DEFAULT_MODEL} after a context", panels


def several(results, cells_of, is_dashed=False):
    """Returns a series for each engine with any of these cells; an engine has one colour in all plots."""
    series = []
    for i, engine in enumerate(results.names()):
        found = {place: cell for place, cell in cells_of(engine).items() if cell}
        points = {place: svg.Point(cell["median"], cell.get("min"), cell.get("max")) for place, cell in found.items()}
        if points:
            series.append(svg.Series(cells.engine_name(engine), i, points, is_dashed))
    return series


def above_zero(series):
    """Removes values that a log axis cannot show."""
    points = {place: point for place, point in series.points.items() if point.median > 0}
    points = {place: point if (point.least or 0) > 0 else svg.Point(point.median, None, None)
              for place, point in points.items()}
    return series._replace(points=points)


def in_use(places, series):
    return [place for place in places if any(place in one.points for one in series)]


PLOTS = {"speed-formats": formats, "speed-load": load, "speed-context": context}
