// Lines over time. A missing value is a gap, not zero.

import {draw, make} from "./dom.js";

const [WIDTH, HEIGHT, HEAD] = [360, 120, 18];
const ORDER = ["first", "second", "third"];

/** `series` is a list of `{name, values}`, each value a number or null; all have the same length. */
export function chart(title, series, write, span) {
  const all = series.flatMap((of) => of.values).filter((value) => value !== null);
  const top = Math.max(...all, 0) || 1;
  const lines = series.map((of, at) => draw("path", {class: `line ${ORDER[at]}`, d: path(of.values, top)}));
  const last = series.map((of) => `${of.name}: ${said(of.values, write)}`).join(", ");
  const label = `${title}, ${span}. ${all.length ? `Highest ${write(top)}. Now ${last}` : "Nothing was measured."}`;
  return make("figure", {class: "card"},
    make("figcaption", {}, make("h2", {}, title)),
    draw("svg", {class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label},
      draw("line", {class: "axis", x1: 0, x2: WIDTH, y1: HEIGHT - 1, y2: HEIGHT - 1}), lines),
    make("ul", {class: "legend"},
      make("li", {class: "quiet"}, all.length ? `top ${write(top)}` : "not measured"),
      series.map((of, at) => make("li", {}, make("span", {class: `swatch ${ORDER[at]}`}), `${of.name} ${said(of.values, write)}`))));
}

function said(values, write) {
  const last = values.at(-1);
  return last === null || last === undefined ? "–" : write(last);
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
