// Requests under way and those that ended last, with filters; for one request, where its time went.

import {bar, clock, count, facts, iconButton, make, millis, percent, setAttr, setText} from "./dom.js";
import {List} from "./list.js";
import {get} from "./server.js";
import {spans, waterfall, withRepeats} from "./waterfall.js";

const COLUMNS = [
  ["arrived_ms", "Arrived"], ["state", "State"], ["id", "Model and request"], ["prompt", "Prompt"], ["cached", "Reused"], ["output", "Output"], ["first_token_ms", "First token"], ["speed", "Tokens/s"], ["took_ms", "Took"],
];
/** The columns that narrow windows leave out. */
const OPTIONAL = new Set(["prompt", "cached", "output", "first_token_ms", "speed"]);
/** A request is slow if its first token came this many times later than the median, and later than the time below. */
const [SLOW_TIMES, SLOW_MS] = [3, 500];
const FILTERS = [["all", "All"], ["running", "Running"], ["slow", "Slow"], ["failed", "Failed"]];

export class Requests {
  constructor(open) {
    [this.filter, this.tenant, this.all] = ["all", "", []];
    this.counts = make("span", {class: "quiet small"});
    this.counted = FILTERS.map(() => make("span", {class: "quiet number"}));
    this.buttons = FILTERS.map(([name, label], at) => make("button", {type: "button", "aria-pressed": `${name === "all"}`, click: () => this.setFilter(name)}, label, this.counted[at]));
    this.tenants = make("select", {"aria-label": "Tenant", hidden: true, change: () => ((this.tenant = this.tenants.value), this.draw())});
    const head = make("div", {class: "row head", "aria-hidden": "true"}, COLUMNS.map(([name, label]) => make("span", {class: kindOf(name)}, label)));
    this.list = new List("List of requests", row, (node, request) => fill(node, request, this), (request) => request.number, head);
    this.one = make("aside", {class: "one", "aria-label": "One request", hidden: true});
    this.empty = make("p", {class: "note"});
    this.node = make("section", {class: "view requests", "aria-labelledby": "requests"},
      bar("requests", "Requests", this.counts, make("span", {class: "push"}), make("div", {class: "segments", role: "group", "aria-label": "Filter"}, this.buttons), this.tenants),
      make("div", {class: "split"}, make("div", {class: "main-part"}, this.empty, this.list.node), this.one));
    if (open) this.open(open);
  }

  topics() {
    return ["requests"];
  }

  commands() {
    return FILTERS.map(([name, label]) => ({icon: "filter", name: `Show requests: ${label.toLowerCase()}`, run: () => this.setFilter(name)}));
  }

  setFilter(name) {
    this.filter = name;
    FILTERS.forEach(([of], at) => setAttr(this.buttons[at], "aria-pressed", `${of === name}`));
    this.draw();
  }

  update(_, {waiting, running, requests}) {
    this.all = requests.sort((a, b) => b.number - a.number);
    const isOwn = waiting === null;
    setText(this.counts, isOwn ? `Your requests: ${requests.filter((of) => !of.over).length} running` : `${waiting} in the queue, ${running} answering`);
    this.showTenants();
    this.draw();
    // Loads the open request again while it runs.
    const open = this.shown && requests.find((of) => of.number === this.shown);
    if (open && (!open.over || !this.isOver) && !this.busy) this.open(this.shown);
  }

  showTenants() {
    const names = [...new Set(this.all.map((of) => of.tenant))].sort();
    const key = names.join("\n");
    // Without API keys there is one tenant, whose name means nothing.
    this.hasTenants = names.length > 1 || names[0] !== "other";
    this.tenants.hidden = names.length < 2;
    if (this.tenantsShown === key) return;
    this.tenantsShown = key;
    this.tenants.replaceChildren(make("option", {value: ""}, "All tenants"), ...names.map((name) => make("option", {value: name}, name)));
    this.tenants.value = names.includes(this.tenant) ? this.tenant : (this.tenant = "");
  }

  draw() {
    const limit = (this.limit = slowLimit(this.all));
    const fits = {all: () => true, running: (of) => !of.over, failed: (of) => of.over && of.state !== "ok", slow: (of) => (of.first_token_ms ?? (of.over ? 0 : of.took_ms)) > limit};
    const own = this.tenant ? this.all.filter((of) => of.tenant === this.tenant) : this.all;
    FILTERS.forEach(([name], at) => setText(this.counted[at], `${count(own.filter(fits[name]).length)}`));
    setAttr(this.buttons[2], "title", `The first token came after ${millis(limit)}: ${SLOW_TIMES} times the median, and at least ${SLOW_MS} ms`);
    const shown = this.filter === "all" ? own : own.filter(fits[this.filter]);
    this.empty.hidden = shown.length > 0;
    setText(this.empty, this.all.length ? "No request has these properties." : "No requests since this router started.");
    this.list.show(shown);
  }

  /** Opens a request. The last call counts, whichever reply comes first. */
  async open(number) {
    const mine = (this.opening = (this.opening ?? 0) + 1);
    this.busy = true;
    let shown = null;
    try {
      const request = await get(`requests/${encodeURIComponent(number)}`);
      if (mine !== this.opening) return;
      [this.shown, this.isOver] = [request.number, request.over];
      shown = details(request, () => this.closeOne());
    } catch (error) {
      if (mine !== this.opening) return;
      shown = make("article", {class: "card row-of"}, make("p", {class: "bad"}, error.message), iconButton("close", "Close", () => this.closeOne(), {class: "bare push"}));
    }
    this.busy = false;
    const hasFocus = this.one.contains(document.activeElement);
    this.one.replaceChildren(shown);
    this.one.hidden = false;
    if (hasFocus) this.one.querySelector("button")?.focus();
    this.node.classList.add("with-one");
    this.list.drawSoon();
  }

  /** The address names no request. */
  openNone() {
    if (!this.one.hidden) this.closeOne();
  }

  closeOne() {
    [this.shown, this.one.hidden, this.busy] = [null, true, false];
    this.opening = (this.opening ?? 0) + 1;
    this.node.classList.remove("with-one");
    history.replaceState(null, "", "#requests");
    this.list.drawSoon();
    this.list.node.focus();
  }
}

/** The time of a first token above which a request is slow. */
function slowLimit(requests) {
  const times = requests.map((of) => of.first_token_ms).filter((ms) => ms !== null).sort((a, b) => a - b);
  return Math.max(SLOW_MS, SLOW_TIMES * (times[times.length >> 1] ?? 0));
}

const stateKind = (request) => (request.over && !request.pauses ? (request.state === "ok" ? "" : "bad") : "warn");
const kindOf = (name) => (OPTIONAL.has(name) ? "optional to-end" : name === "took_ms" ? "to-end" : "");

function row() {
  return make("a", {class: "row", href: "#requests"}, COLUMNS.map(([name]) => make("span", {class: kindOf(name)})));
}

function fill(node, request, {shown, hasTenants, limit}) {
  setAttr(node, "href", `#requests/${request.number}`);
  COLUMNS.forEach(([name], at) => setText(node.children[at], text(name, request, hasTenants)));
  setAttr(node.children[6], "class", request.first_token_ms > limit ? "optional to-end warn" : "optional to-end");
  setAttr(node.children[1], "class", `badge ${stateKind(request)}`);
  if (request.number === shown) node.setAttribute("aria-current", "true");
  else node.removeAttribute("aria-current");
}

function text(name, request, hasTenants) {
  const value = request[name];
  if (name === "arrived_ms") return value ? clock(value) : "–";
  if (name === "state" && request.computed) return `prompt ${percent(request.computed / request.prompt)}`;
  if (name === "state" && request.pauses) return `${request.state}, was paused`;
  if (name === "id") return [`#${request.number}`, request.model || "–", hasTenants ? request.tenant : ""].filter(Boolean).join(" · ");
  if (name === "speed") return speedOf(request)?.toFixed(1) ?? "–";
  if (name.endsWith("_ms")) return millis(value);
  return typeof value === "number" ? count(value) : `${value ?? "–"}`;
}

/** Tokens in a second, from the first token to the end: pauses count. */
function speedOf(request) {
  const decoded = request.first_token_ms === null ? 0 : request.took_ms - request.first_token_ms;
  return request.output > 1 && decoded > 0 ? ((request.output - 1) * 1000) / decoded : null;
}

const CAUSES = {preempted: "a preemption", lost: "the loss of a rank", moved: "a move to another replica"};

/** What took the time of a request, in a sentence. */
function summary(request, events, all) {
  const sums = {};
  for (const {kind, from, to} of all) sums[kind] = (sums[kind] ?? 0) + to - from;
  const causes = [...new Set(events.map((event) => CAUSES[event.what]).filter(Boolean))].join(" and ");
  const [paused, again] = [sums.paused ?? 0, sums.again ?? 0];
  if (causes) return `Slowed by ${causes}: ${millis(paused + again)} of ${millis(request.took_ms)} (${millis(paused)} paused, ${millis(again)} computed again).`;
  const [kind, most] = Object.entries(sums).sort(([, a], [, b]) => b - a)[0] ?? [];
  const name = {waits: "in the queue", computed: "for the prompt", answered: "for the answer"}[kind];
  return name ? `Most of the time, ${millis(most)} of ${millis(request.took_ms)}, was ${name}.` : null;
}

const EVENT_TEXTS = {
  placed: (of) => `Waits at the replica ${of.replica ?? ""}`,
  started: (of) => (of.again ? `Begins again${of.cached ? `: ${of.cached} positions from the cache` : ""}` : of.cached ? `Begins: ${of.cached} positions were in the prefix cache` : "Begins: no positions were in the prefix cache"),
  chunk: (of) => `${of.again ? "Replays" : "Computes"} positions ${of.start} to ${of.end - 1}`,
  "first token": () => "First token",
  preempted: () => "Preempted: released its blocks and waits",
  lost: () => "Lost: a rank of its replica was lost",
  moved: () => "Moved to another replica",
};

function details(request, close) {
  const events = withRepeats(request.events);
  const isOne = request.choices <= 1;
  const list = events.map((event) => make("tr", {},
    make("td", {}, millis(event.at_ms)),
    isOne ? null : make("td", {}, `${event.choice}`),
    make("td", {class: event.what === "lost" ? "bad" : event.what === "preempted" || event.what === "moved" ? "warn" : ""}, EVENT_TEXTS[event.what]?.(event) ?? event.what)));
  const end = request.over ? make("tr", {}, make("td", {}, millis(request.took_ms)), isOne ? null : make("td"), make("td", {}, `Ends: ${request.state}`)) : null;
  const all = spans(request, events);
  const [speed, sentence] = [speedOf(request), summary(request, events, all)];
  return make("article", {class: "card stack", "aria-label": `Request ${request.number}`},
    make("header", {class: "row-of"}, make("h2", {}, `Request #${request.number}`), make("span", {class: `badge ${stateKind(request)}`}, text("state", request)), iconButton("close", "Close", close, {class: "bare push"})),
    facts([["First token", millis(request.first_token_ms)], ["Took", millis(request.took_ms)], ["Speed", speed && `${speed.toFixed(1)} tokens/s`, "From the first token to the end"], ["Prompt", `${count(request.prompt)} tokens`],
      ["Prompt reused", request.over ? percent(request.prompt ? request.cached / request.prompt : 0) : null], ["Output", `${count(request.output)} tokens`]]),
    sentence ? make("p", {class: "note"}, sentence) : null,
    waterfall(request, all),
    make("div", {class: "wide"}, make("table", {class: "events"},
      make("thead", {}, make("tr", {}, ["After", isOne ? null : "Choice", "Event"].map((name) => name && make("th", {scope: "col"}, name)))),
      make("tbody", {}, list, end))),
    request.events_unkept ? make("p", {class: "quiet small"}, `${request.events_unkept} events in between were not recorded.`) : null,
    facts([["Model", request.model], ["Replica", request.replica], ["Tenant", request.tenant === "other" ? null : request.tenant], ["API", request.api], ["Id", request.id && make("span", {class: "mono"}, request.id)]]));
}
