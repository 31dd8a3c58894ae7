// The time line of one request: a lane for each kind of work, over one axis of time, and its tokens below.

import {draw, make, millis} from "./dom.js";

const [WIDTH, HEIGHT] = [1000, 14];
const TICKS = 2;
/** The lanes from the top: a kind, its label, and its colour. */
const LANES = [["waits", "In the queue", "idle"], ["computed", "Prompt computed", "compute"], ["answered", "Answer", "answered"], ["paused", "Paused", "lost"], ["again", "Computed again", "wait"]];
const PAUSES = ["preempted", "lost", "moved"];

/** Sets `again` on events that a choice repeats after a preemption or a loss. */
export function withRepeats(events) {
  const starts = new Map();
  return events.map((event) => {
    if (event.what === "started") starts.set(event.choice, (starts.get(event.choice) ?? 0) + 1);
    const again = ["started", "chunk"].includes(event.what) && (starts.get(event.choice) ?? 0) > 1;
    return {...event, again};
  });
}

/** Returns the spans of a request, `{kind, from, to}` in milliseconds, from its arrival to its end or to now. */
export function spans(request, events) {
  const found = [];
  let [since, kind] = [0, "waits"];
  const until = (at) => {
    if (at > since) {
      const last = found.at(-1);
      if (last?.kind === kind && last.to === since) last.to = at;
      else found.push({kind, from: since, to: at});
    }
    since = Math.max(since, at);
  };
  const {counts, width_ms} = request.tokens;
  // No event marks the end of a recomputation: the next token does.
  const tokenAfter = (ms) => {
    const first = Math.ceil(ms / width_ms);
    const at = counts.findIndex((n, bin) => bin >= first && n);
    return at < 0 ? Infinity : at * width_ms;
  };
  const advance = (to) => {
    const nextToken = tokenAfter(since);
    if (kind === "again" && nextToken < to) {
      until(nextToken);
      kind = "answered";
    }
    until(to);
  };
  for (const event of events) {
    advance(event.at_ms);
    if (event.what === "started" || event.what === "chunk") kind = event.again ? "again" : "computed";
    else if (event.what === "first token") kind = "answered";
    else if (PAUSES.includes(event.what)) kind = "paused";
  }
  advance(request.took_ms);
  return found;
}

/** `found` are the spans of the request. */
export function waterfall(request, found) {
  const all = Math.max(request.took_ms, 1);
  const x = (ms) => (WIDTH * ms) / all;
  const lanes = LANES.flatMap(([kind, label, colour]) => {
    const own = found.filter((span) => span.kind === kind);
    if (!own.length) return [];
    const sum = own.reduce((total, {from, to}) => total + to - from, 0);
    const bars = own.map(({from, to}) => draw("rect", {class: `span ${kind} fill-${colour}`, x: x(from), width: Math.max(x(to - from), 2), y: 1, height: HEIGHT - 2, rx: 2}));
    return [lane(label, bars, millis(sum), `${label}: ${millis(sum)}`)];
  });
  const {counts, width_ms} = request.tokens;
  const top = Math.max(...counts, 1);
  const tokens = counts.map((n, at) => draw("rect", {class: "fill-memory", x: x(at * width_ms), width: Math.max(x(width_ms) - 1, 1), y: HEIGHT * (1 - n / top), height: (HEIGHT * n) / top}));
  const ticks = Array.from({length: TICKS + 1}, (_, at) => make("span", {}, millis((all * at) / TICKS)));
  return make("div", {class: "waterfall", role: "group", "aria-label": "Where the time went"}, lanes,
    request.output ? lane("Tokens", tokens, `${request.output}`, `${request.output} tokens`) : null,
    make("div", {class: "lane axis", "aria-hidden": "true"}, make("span", {}), make("span", {class: "ticks"}, ticks), make("span", {})));
}

function lane(label, bars, sum, name) {
  return make("div", {class: "lane"}, make("span", {class: "quiet"}, label),
    draw("svg", {class: "track", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": name}, bars), make("span", {class: "number"}, sum));
}
