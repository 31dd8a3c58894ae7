// Lines over time, with axes, and the values at the pointer or the cursor. A missing value is a gap, not zero.

import {draw, make, setText} from "./dom.js";

const [WIDTH, HEIGHT] = [360, 120];
const ORDER = ["first", "second", "third"];
const DIVISIONS = 4;

/** `series` is a list of `{name, values}` of one length. A value is a number or null. `when(at)` names a position. */
export class Chart {
  constructor(title, format) {
    [this.format, this.at] = [format, null];
    this.title = title;
    this.lines = ORDER.map((name) => draw("path", {class: `line ${name}`}));
    this.cursor = draw("line", {class: "cursor", y1: 0, y2: HEIGHT, x1: -1, x2: -1});
    const rules = Array.from({length: DIVISIONS}, (_, at) => draw("line", {class: "rule", x1: 0, x2: WIDTH, y1: (HEIGHT * at) / DIVISIONS, y2: (HEIGHT * at) / DIVISIONS}));
    this.svg = draw("svg", {class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", tabindex: "0",
      pointermove: (event) => this.point(event), pointerleave: () => this.move(null), keydown: (event) => this.key(event), blur: () => this.move(null)},
      rules, draw("line", {class: "axis", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT}), this.lines, this.cursor);
    [this.top, this.middle] = [make("span"), make("span")];
    [this.from, this.half] = [make("span"), make("span")];
    this.legend = make("ul", {class: "legend"});
    this.value = make("p", {class: "at", role: "status"});
    this.node = make("figure", {class: "card"}, make("figcaption", {}, make("h2", {}, title), this.value),
      make("div", {class: "plot"}, make("div", {class: "scale", "aria-hidden": "true"}, this.top, this.middle, make("span", {}, "0")), this.svg,
        make("div", {class: "ticks", "aria-hidden": "true"}, this.from, this.half, make("span", {}, "now"))), this.legend);
  }

  show(series, when) {
    [this.series, this.when] = [series, when];
    const all = series.flatMap((line) => line.values).filter((value) => value !== null);
    const top = niceTop(Math.max(...all, 0));
    this.lines.forEach((line, at) => line.setAttribute("d", series[at] ? path(series[at].values, top) : ""));
    setText(this.top, all.length ? this.format(top) : "–");
    setText(this.middle, all.length ? this.format(top / 2) : "");
    const n = this.length();
    setText(this.from, when(0));
    setText(this.half, when((n - 1) / 2));
    const nows = series.map((line) => `${line.name} ${this.text(line, n - 1)}`);
    this.svg.setAttribute("aria-label", `${this.title} from ${when(0)} to now. ${all.length ? `Highest ${this.format(Math.max(...all))}. Now ${nows.join(", ")}` : "Not measured."}`);
    if (this.legend.childElementCount !== series.length) this.legend.replaceChildren(...series.map((_, at) => make("li", {}, draw("svg", {class: "sample", viewBox: "0 0 20 4", "aria-hidden": "true"}, draw("path", {class: `line ${ORDER[at]}`, d: "M0 2h20"})), make("span"))));
    series.forEach((line, at) => setText(this.legend.children[at].lastChild, nows[at]));
    this.move(this.at);
  }

  length() {
    return this.series?.[0].values.length ?? 0;
  }

  text(line, at) {
    const value = line.values[at];
    return value === null || value === undefined ? "–" : this.format(value);
  }

  point(event) {
    const {left, width} = this.svg.getBoundingClientRect();
    this.move(Math.round(((event.clientX - left) / width) * (this.length() - 1)));
  }

  key(event) {
    const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!by || !this.series) return;
    event.preventDefault();
    this.move((this.at ?? this.length()) + by);
  }

  /** Moves the cursor, and shows the values there. */
  move(at) {
    const n = this.length();
    this.at = at === null || !n ? null : Math.max(0, Math.min(n - 1, at));
    const x = this.at === null ? -1 : (this.at * WIDTH) / Math.max(n - 1, 1);
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
    setText(this.value, this.at === null ? "" : `${this.when(this.at)}: ${this.series.map((line) => `${line.name} ${this.text(line, this.at)}`).join(", ")}`);
  }
}

/** The next number of the form 1, 2 or 5 times a power of ten. */
function niceTop(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * unit).find((top) => top >= value * 0.999) ?? value;
}

function path(values, top) {
  const step = WIDTH / Math.max(values.length - 1, 1);
  let [out, pen] = ["", false];
  values.forEach((value, at) => {
    if (value === null) {
      pen = false;
      return;
    }
    const [x, y] = [at * step, HEIGHT - (value / top) * HEIGHT];
    // A value between two gaps is a short line, because a point would not be visible.
    out += pen ? `L${x.toFixed(1)} ${y.toFixed(1)}` : `M${x.toFixed(1)} ${y.toFixed(1)}h1`;
    pen = true;
  });
  return out;
}
