// Lines over time. A missing value is a gap, not zero.

import {draw, make} from "./dom.js";

const [WIDTH, HEIGHT, HEAD] = [360, 120, 18];
const ORDER = ["first", "second", "third"];

/** `series` is a list of `{name, values}`, all of one length. A value is a number or null. */
export function chart(title, series, format, span) {
  const all = series.flatMap((line) => line.values).filter((value) => value !== null);
  const top = Math.max(...all, 0) || 1;
  const lines = series.map((line, at) => draw("path", {class: `line ${ORDER[at]}`, d: path(line.values, top)}));
  const latestValues = series.map((line) => `${line.name}: ${latest(line.values, format)}`).join(", ");
  const label = `${title}, ${span}. ${all.length ? `Highest ${format(top)}. Now ${latestValues}` : "Not measured."}`;
  return make("figure", {class: "card"},
    make("figcaption", {}, make("h2", {}, title)),
    draw("svg", {class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label},
      draw("line", {class: "axis", x1: 0, x2: WIDTH, y1: HEIGHT - 1, y2: HEIGHT - 1}), lines),
    make("ul", {class: "legend"},
      make("li", {class: "quiet"}, all.length ? `top ${format(top)}` : "not measured"),
      series.map((line, at) => make("li", {}, make("span", {class: `swatch ${ORDER[at]}`}), `${line.name} ${latest(line.values, format)}`))));
}

function latest(values, format) {
  const last = values.at(-1);
  return last === null || last === undefined ? "–" : format(last);
}

function path(values, top) {
  const step = WIDTH / Math.max(values.length - 1, 1);
  let [out, pen] = ["", false];
  values.forEach((value, at) => {
    if (value === null) {
      pen = false;
      return;
    }
    const [x, y] = [at * step, HEIGHT - 1 - (value / top) * (HEIGHT - HEAD)];
    // A value between two gaps is a short line, because a point would not be visible.
    out += pen ? `L${x.toFixed(1)} ${y.toFixed(1)}` : `M${x.toFixed(1)} ${y.toFixed(1)}h1`;
    pen = true;
  });
  return out;
}
