"""Plots as SVG: grouped bars, and lines over a few places on an axis, each with a whisker from the least to the most.
The same input gives the same bytes. Independent of what is measured.
"""

import math
from collections import namedtuple
from xml.sax.saxutils import escape

# One figure; `least` and `most` may be None.
Point = namedtuple("Point", "median least most")
# `points` are keyed by the name of a group, or by the place on the x axis.
Series = namedtuple("Series", "name colour points dashed", defaults=(False,))
# The content of a panel; `places` are the groups of bars, or the places on the x axis from left to right.
Panel = namedtuple("Panel", "title x_label y_label places series kind is_log is_even", defaults=("bars", False, False))
Box = namedtuple("Box", "left top right bottom")
Theme = namedtuple("Theme", "ink muted grid colours")

THEMES = {
    "light": Theme("#1f2328", "#59636e", "#d8dee4",
                   ["#0b5fc0", "#bc4c00", "#0f766e", "#8250df", "#b3257a", "#57606a"]),
    "dark": Theme("#e6edf3", "#9198a1", "#343b44",
                  ["#58a6ff", "#f0883e", "#2dd4bf", "#bc8cff", "#f778ba", "#a8b1bb"]),
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
WIDTH = 840
LEGEND = 30
# The size of a panel, including its title and the labels of its axes.
BARS_HEIGHT, LINES_HEIGHT = 225, 300
# The distance from the box of a panel to its axes.
LEFT, RIGHT = 60, 12
# The width of one character at size 10. Text is not measured, so this is an upper estimate.
CHARACTER = 6.2


def figure(value):
    """Formats with three significant digits and commas between thousands."""
    if value == 0 or abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def picture(title, panels, theme):
    """Draws all panels below one legend: bars one above the other, lines side by side."""
    canvas = Canvas(THEMES[theme])
    names = {series.name: series.colour for panel in panels for series in panel.series}
    has_lines = any(panel.kind == "lines" for panel in panels)
    canvas.legend(names, has_lines)
    height = LEGEND
    if has_lines:
        wide = WIDTH / len(panels)
        for i, panel in enumerate(panels):
            lines(canvas, Box(i * wide, LEGEND, (i + 1) * wide, LEGEND + LINES_HEIGHT), panel)
        height += LINES_HEIGHT
    else:
        for panel in panels:
            bars(canvas, Box(0, height, WIDTH, height + BARS_HEIGHT), panel)
            height += BARS_HEIGHT
    return canvas.finish(title, height)


class Canvas:
    def __init__(self, theme):
        self.theme, self.parts = theme, []

    def colour(self, i):
        return self.theme.colours[i % len(self.theme.colours)]

    def text(self, x, y, words, anchor="middle", size=11, colour=None, **more):
        self.parts.append(f'<text{attributes(x=x, y=y, text_anchor=anchor, font_size=size)}'
                          f'{attributes(fill=colour or self.theme.ink, **more)}>{escape(words)}</text>')

    def line(self, x1, y1, x2, y2, colour, width=1.0, **more):
        self.parts.append(f'<line{attributes(x1=x1, y1=y1, x2=x2, y2=y2, stroke=colour, stroke_width=width, **more)}/>')

    def rectangle(self, x, y, width, height, colour):
        self.parts.append(f'<rect{attributes(x=x, y=y, width=width, height=height, fill=colour)}/>')

    def path(self, places, colour, dashed):
        dashes = {"stroke_dasharray": "5 4"} if dashed else {}
        points = " ".join(f"{number(x)},{number(y)}" for x, y in places)
        look = attributes(points=points, fill="none", stroke=colour, stroke_width=2, **dashes)
        self.parts.append(f"<polyline{look}/>")

    def mark(self, x, y, i):
        """Draws a shape for each colour, so that lines differ without colours."""
        shapes = [[(0, -4), (4, 0), (0, 4), (-4, 0)], [(-3.5, -3.5), (3.5, -3.5), (3.5, 3.5), (-3.5, 3.5)],
                  [(0, -4.5), (4.5, 3.5), (-4.5, 3.5)], [(-4.5, -3.5), (4.5, -3.5), (0, 4.5)]]
        points = " ".join(f"{number(x + dx)},{number(y + dy)}" for dx, dy in shapes[i % len(shapes)])
        self.parts.append(f'<polygon{attributes(points=points, fill=self.colour(i))}/>')

    def whisker(self, x, y_of, point, colour, cap=3):
        if point.least is None or point.most is None or point.least == point.most:
            return
        least, most = y_of(point.least), y_of(point.most)
        self.line(x, least, x, most, colour, 1.2)
        for y in (least, most):
            self.line(x - cap, y, x + cap, y, colour, 1.2)

    def legend(self, names, with_marks):
        x = LEFT
        for name, colour in names.items():
            if with_marks:
                self.mark(x + 5, 14, colour)
            else:
                self.rectangle(x, 9, 10, 10, self.colour(colour))
            self.text(x + 15, 18, name, "start", 12)
            x += 36 + 7.2 * len(name)

    def finish(self, title, height):
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" role="img"'
                f'{attributes(viewBox=f"0 0 {WIDTH} {number(height)}", width=WIDTH, height=height, font_family=FONT)}>')
        return "\n".join([head, f"<title>{escape(title)}</title>", *self.parts, "</svg>"]) + "\n"


def attributes(**pairs):
    def of(value):
        text = number(value) if isinstance(value, (int, float)) else value
        return escape(text, {'"': "&quot;"})
    return "".join(f' {name.replace("_", "-")}="{of(value)}"' for name, value in pairs.items())


def turned(x, y):
    return f"rotate(-90 {number(x)} {number(y)})"


def number(value):
    """Formats with at most one digit after the point."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def steps(most, n=4):
    """Returns about `n` round steps from zero, the last of them at or above `most`."""
    rough = (most or 1) / n
    power = 10 ** math.floor(math.log10(rough))
    step = power * next(round_one for round_one in (1, 2, 2.5, 5, 10) if round_one * power >= rough * 0.999)
    return [i * step for i in range(math.ceil(most / step - 1e-9) + 1 if most else 2)]


def log_steps(least, most):
    """Returns 1, 2 and 5 times each power of ten, from the last below `least` to the first above `most`."""
    powers = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(most)) + 2)
    every = [digit * 10.0 ** power for power in powers for digit in (1, 2, 5)]
    low = max(i for i, step in enumerate(every) if step <= least)
    high = min(i for i, step in enumerate(every) if step >= most)
    return every[low:max(high, low + 1) + 1]


def points_of(panel):
    return [point for series in panel.series for point in series.points.values()]


def ends(panel):
    values = [value for point in points_of(panel) for value in point if value is not None]
    return min(values), max(values)


def axes(canvas, box, panel, room=1.0):
    """Draws the title, the grid and the y axis. Returns the inner box and the height of a value. `room` is the space on
    the axis for the highest value and the text above it.
    """
    right = 46 if panel.kind == "lines" else RIGHT
    inner = Box(box.left + LEFT, box.top + 34, box.right - right, box.bottom - 40)
    least, most = ends(panel)
    ticks = log_steps(least, most) if panel.is_log else steps(most * room)

    def y_of(value):
        if panel.is_log:
            share = (math.log(value) - math.log(ticks[0])) / (math.log(ticks[-1]) - math.log(ticks[0]))
        else:
            share = value / ticks[-1]
        return inner.bottom - share * (inner.bottom - inner.top)

    theme = canvas.theme
    canvas.text(inner.left, box.top + 16, panel.title, "start", 13, font_weight=600)
    for tick in ticks:
        canvas.line(inner.left, y_of(tick), inner.right, y_of(tick), theme.grid)
        words = f"{tick:,.0f}" if tick >= 10 or tick == int(tick) else f"{tick:g}"
        canvas.text(inner.left - 6, y_of(tick) + 3.5, words, "end", 10, theme.muted)
    middle = (inner.top + inner.bottom) / 2
    x = box.left + 14
    canvas.text(x, middle, panel.y_label, size=11, colour=theme.muted, transform=turned(x, middle))
    canvas.text((inner.left + inner.right) / 2, box.bottom - 8, panel.x_label, size=11, colour=theme.muted)
    return inner, y_of


def bars(canvas, box, panel):
    slot = (box.right - box.left - LEFT - RIGHT) / len(panel.places)
    width = min(slot * 0.84 / len(panel.series), 60)
    inner, y_of = axes(canvas, box, panel, 1.3 if any(is_turned(point, width) for point in points_of(panel)) else 1.12)
    for i, place in enumerate(panel.places):
        middle = inner.left + (i + 0.5) * slot
        canvas.text(middle, inner.bottom + 16, str(place))
        for j, series in enumerate(panel.series):
            if place in series.points:
                x = middle + (j - len(panel.series) / 2) * width
                bar(canvas, (x, width, inner.bottom), series.points[place], series.colour, y_of)
    canvas.line(inner.left, inner.bottom, inner.right, inner.bottom, canvas.theme.muted)


def bar(canvas, place, point, colour, y_of):
    x, width, bottom = place
    y = y_of(point.median)
    canvas.rectangle(x + 1, y, width - 2, bottom - y, canvas.colour(colour))
    middle = x + width / 2
    canvas.whisker(middle, y_of, point, canvas.theme.ink, min(3, width / 4))
    top = y_of(max(value for value in point if value is not None)) - 4
    words = figure(point.median)
    if is_turned(point, width):
        canvas.text(middle + 3.5, top, words, "start", 10, transform=turned(middle + 3.5, top))
    else:
        canvas.text(middle, top, words, size=10)


def is_turned(point, width):
    """Returns whether the label of a bar is wider than the bar."""
    return len(figure(point.median)) * CHARACTER > width


def lines(canvas, box, panel):
    inner, y_of = axes(canvas, box, panel)
    first, last = min(panel.places), max(panel.places)

    def x_of(place):
        if panel.is_even or first == last:
            share = (panel.places.index(place) + 0.5) / len(panel.places)
        else:
            share = 0.06 + 0.88 * (place - first) / (last - first)
        return inner.left + share * (inner.right - inner.left)

    for place in panel.places:
        canvas.text(x_of(place), inner.bottom + 16, f"{place:,}")
    canvas.line(inner.left, inner.bottom, inner.right, inner.bottom, canvas.theme.muted)
    labels = []
    for series in panel.series:
        seen = [(place, series.points[place]) for place in panel.places if place in series.points]
        where = [(x_of(place), y_of(point.median)) for place, point in seen]
        colour = canvas.colour(series.colour)
        canvas.path(where, colour, series.dashed)
        for (x, y), (_, point) in zip(where, seen):
            canvas.whisker(x, y_of, point, colour)
            canvas.mark(x, y, series.colour)
        labels.append((where[-1][1], where[-1][0], figure(seen[-1][1].median), colour))
    at_ends(canvas, labels)


def at_ends(canvas, labels, apart=12):
    """Writes the last value of each line on its right, moved down where it would cover the one above."""
    below = {}
    for y, x, words, colour in sorted(labels):
        y = max(y + 3.5, below.get(x, -math.inf) + apart)
        below[x] = y
        canvas.text(x + 9, y, words, "start", 10, colour)
