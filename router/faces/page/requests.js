// Requests under way and those that ended last; for one request, its events with their times.

import {count, draw, facts, make, millis, setAttr, setText} from "./dom.js";
import {get} from "./server.js";
import {List} from "./list.js";

const COLUMNS = ["number", "state", "id", "prompt", "cached", "output", "first_token_ms", "took_ms"];
const NAMES = ["Request", "State", "Answer", "Prompt", "Cached", "Output", "First token", "Took"];
/** The columns that narrow windows leave out. */
const OPTIONAL = new Set(["prompt", "cached", "output", "first_token_ms"]);

export class Requests {
  constructor(open) {
    this.counts = make("p", {class: "quiet"}, "");
    this.list = new List("List of requests", row, fill);
    this.one = make("div", {"aria-live": "polite"});
    this.empty = make("p", {class: "quiet"}, "");
    const head = make("div", {class: "row head", "aria-hidden": "true"}, NAMES.map((name, at) => make("span", {class: OPTIONAL.has(COLUMNS[at]) ? "optional" : ""}, name)));
    this.node = make("section", {"aria-labelledby": "requests"}, make("h1", {id: "requests"}, "Requests"),
      this.counts, this.empty, head, this.list.node, this.one);
    if (open) this.open(open);
  }

  topics() {
    return ["requests"];
  }

  update(_, {waiting, running, requests}) {
    const own = waiting === null;
    setText(this.counts, own ? `Your requests: ${requests.filter((of) => !of.over).length} under way` : `${waiting} waiting for the first token, ${running} answering`);
    setText(this.empty, requests.length ? "" : "No requests since this router started.");
    this.list.show(requests);
    // Loads the open request again while it runs.
    const open = this.shown && requests.find((of) => of.number === this.shown);
    if (open && (!open.over || !this.isOver)) this.open(this.shown);
  }

  async open(number) {
    if (this.busy) return;
    this.busy = true;
    try {
      const request = await get(`requests/${encodeURIComponent(number)}`);
      [this.shown, this.isOver] = [request.number, request.over];
      this.one.replaceChildren(timeline(request));
    } catch (error) {
      this.one.replaceChildren(make("p", {class: "bad"}, error.message));
    } finally {
      this.busy = false;
    }
  }
}

function row() {
  return make("a", {class: "row", href: "#requests"}, COLUMNS.map((name) => make("span", {class: OPTIONAL.has(name) ? "optional" : ""})));
}

function fill(node, request) {
  setAttr(node, "href", `#requests/${request.number}`);
  COLUMNS.forEach((name, at) => setText(node.children[at], text(name, request)));
  setAttr(node.children[1], "class", request.over ? (request.state === "ok" ? "good" : "bad") : "warn");
}

function text(name, request) {
  const value = request[name];
  if (name === "number") return `${value}`;
  if (name === "state" && request.computed) return `prompt ${Math.floor((100 * request.computed) / request.prompt)}%`;
  if (name === "id") return [request.model || "–", request.tenant, request.id ?? ""].join(" · ");
  if (name.endsWith("_ms")) return millis(value);
  return typeof value === "number" ? count(value) : `${value ?? "–"}`;
}

const EVENT_TEXTS = {
  placed: (of) => `Waits at ${of.replica || "a replica"}`,
  started: (of) => (of.again ? `Begins again${of.cached ? `: ${of.cached} positions from the cache` : ""}` : of.cached ? `Begins: ${of.cached} positions were in the prefix cache` : "Begins: no positions were in the prefix cache"),
  chunk: (of) => `${of.again ? "Replays" : "Computes"} positions ${of.start} to ${of.end - 1}`,
  "first token": () => "First token",
  preempted: () => "Preempted: released its blocks and waits",
  lost: () => "Lost: a rank of its replica was lost",
  moved: () => "Moved to another replica",
};

/** Sets `again` on events that a choice repeats after a preemption or a loss. */
export function withRepeats(events) {
  const starts = new Map();
  return events.map((event) => {
    if (event.what === "started") starts.set(event.choice, (starts.get(event.choice) ?? 0) + 1);
    const again = ["started", "chunk"].includes(event.what) && (starts.get(event.choice) ?? 0) > 1;
    return {...event, again};
  });
}

function timeline(request) {
  const events = withRepeats(request.events);
  const isOne = request.choices <= 1;
  const list = events.map((event) => make("tr", {},
    make("td", {}, millis(event.at_ms)),
    isOne ? null : make("td", {}, `${event.choice}`),
    make("td", {class: event.what === "lost" ? "bad" : event.what === "preempted" || event.what === "moved" ? "warn" : ""}, EVENT_TEXTS[event.what]?.(event) ?? event.what)));
  const end = request.over ? make("tr", {}, make("td", {}, millis(request.took_ms)), isOne ? null : make("td"), make("td", {}, `Ends: ${request.state}`)) : null;
  return make("article", {class: "card", "aria-label": `Request ${request.number}`},
    make("h2", {}, `Request ${request.number} · ${request.state}`),
    facts([["Answer", request.id], ["Model", request.model], ["Replica", request.replica], ["Prompt", `${request.prompt} tokens`],
      ["From cache", request.over ? `${request.cached}` : null], ["Output", `${request.output} tokens`], ["First token", millis(request.first_token_ms)], ["Took", millis(request.took_ms)]]),
    diagram(request, events),
    make("ul", {class: "legend"}, [["idle", "waits"], ["compute", "prompt computed"], ["wait", "computed again"], ["answered", "answers"], ["kv", "tokens"]]
      .map(([name, label]) => make("li", {}, make("span", {class: `swatch ${name}`}), label))),
    make("div", {class: "wide"}, make("table", {},
      make("thead", {}, make("tr", {}, ["After", isOne ? null : "Choice", "What"].map((name) => name && make("th", {scope: "col"}, name)))),
      make("tbody", {}, list, end))),
    request.events_unkept ? make("p", {class: "quiet"}, `${request.events_unkept} events in between were not recorded.`) : null);
}

function diagram(request, events) {
  const all = Math.max(request.took_ms, 1);
  const x = (ms) => (1000 * ms) / all;
  const spans = [];
  let [since, state] = [0, "span"];
  const until = (at) => {
    if (at > since) spans.push(draw("rect", {class: state, x: x(since), width: Math.max(x(at - since), 1), y: 4, height: 20}));
    since = at;
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
    if (state === "span again" && nextToken < to) {
      until(nextToken);
      state = "span answered";
    }
    until(to);
  };
  for (const event of events) {
    advance(event.at_ms);
    if (event.what === "started" || event.what === "chunk") state = event.again ? "span again" : "span computed";
    else if (event.what === "first token") state = "span answered";
    else if (event.what !== "placed") state = "span";
  }
  advance(request.took_ms);
  const marks = events.filter((event) => ["preempted", "lost", "moved"].includes(event.what))
    .map((event) => draw("line", {class: "mark", x1: x(event.at_ms), x2: x(event.at_ms), y1: 0, y2: 60}));
  const top = Math.max(...counts, 1);
  const bars = counts.map((n, at) => draw("rect", {class: "part kv", x: x(at * width_ms), width: Math.max(x(width_ms), 1), y: 60 - (30 * n) / top, height: (30 * n) / top}));
  const label = `From its arrival to ${millis(request.took_ms)}: the table below lists the same events.`;
  return draw("svg", {class: "timeline", viewBox: "0 0 1000 60", preserveAspectRatio: "none", role: "img", "aria-label": label}, spans, bars, marks);
}
