// The last hour or the last five minutes, as the router records them. A bin without activity has rates of zero and no
// waits. A bin from before the router started is not drawn.

import {bar, count, make, millis, percent, setAttr, setText} from "./dom.js";
import {Chart} from "./chart.js";

const OLD_MS = 10000;
const RANGES = [["hour", "Last hour", 3600], ["minutes", "Last 5 minutes", 300]];

const rate = (n) => `${n === 0 ? "0" : n < 10 ? n.toFixed(1) : count(n)}/s`;
const time = (s) => millis(s * 1000);

/** Each chart: its title, the form of its values, and its lines as functions of a bin and the seconds of a bin. */
const CHARTS = [
  ["Tokens", rate, [["generated", (bin, s) => bin.output / s], ["in prompts", (bin, s) => bin.prompt / s]]],
  ["Time to first token", time, [["p50", (bin) => bin.first_token_s?.p50 ?? null], ["p99", (bin) => bin.first_token_s?.p99 ?? null]]],
  ["Time between tokens", time, [["p50", (bin) => bin.between_tokens_s?.p50 ?? null], ["p99", (bin) => bin.between_tokens_s?.p99 ?? null]]],
  ["Requests", rate, [["arrived", (bin, s) => bin.arrived / s], ["refused", (bin, s) => bin.refused / s], ["interrupted", (bin, s) => bin.broken / s]]],
  ["Concurrent requests, highest", count, [["waiting", (bin) => bin.waiting_max], ["answering", (bin) => bin.running_max]]],
  ["Prompt tokens reused", percent, [["of all prompts", (bin) => (bin.prompt ? bin.cached / bin.prompt : null)]]],
];

export class Load {
  constructor() {
    this.range = "hour";
    this.age = make("span", {class: "quiet small", role: "status"});
    this.buttons = RANGES.map(([name, label]) => make("button", {type: "button", "aria-pressed": `${name === this.range}`, click: () => this.setRange(name)}, label));
    this.charts = CHARTS.map(([title, format]) => new Chart(title, format));
    this.sums = make("dl", {class: "sums"});
    this.tenants = make("div");
    this.node = make("section", {class: "view", "aria-labelledby": "load"},
      bar("load", "Load", this.age, make("span", {class: "push"}), make("div", {class: "segments", role: "group", "aria-label": "Time range"}, this.buttons)),
      this.sums, make("div", {class: "charts"}, this.charts.map((chart) => chart.node)), this.tenants);
    this.timer = setInterval(() => this.showAge(), 1000);
  }

  topics() {
    return ["load"];
  }

  commands() {
    return RANGES.map(([name, label]) => ({icon: "chart", name: `Load of the ${label.toLowerCase()}`, run: () => this.setRange(name)}));
  }

  close() {
    clearInterval(this.timer);
  }

  setRange(name) {
    this.range = name;
    this.showAge();
    RANGES.forEach(([of], at) => setAttr(this.buttons[at], "aria-pressed", `${of === name}`));
    if (this.load) this.draw();
  }

  showAge() {
    if (!this.receivedAt) return;
    const age = Date.now() - this.receivedAt;
    this.age.className = age > OLD_MS ? "badge warn" : "quiet small";
    setText(this.age, age > OLD_MS ? `These figures are ${millis(age)} old` : `${this.load.seconds < RANGES.find(([name]) => name === this.range)[2] ? `the server started ${millis(this.load.seconds * 1000)} ago · ` : ""}averages of ${this.load.bin_seconds} s`);
  }

  update(_, load) {
    [this.receivedAt, this.load] = [Date.now(), load];
    this.showAge();
    this.draw();
  }

  draw() {
    const {load} = this;
    const seconds = RANGES.find(([name]) => name === this.range)[2];
    const all = series(load, seconds);
    const when = (at) => {
      const ago = Math.round((all.length - 1 - at) * load.bin_seconds);
      return ago === 0 ? "now" : ago < 120 ? `${ago} s ago` : `${Math.round(ago / 60)} min ago`;
    };
    CHARTS.forEach(([, , lines], at) => this.charts[at].show(lines.map(([name, value]) => ({name, values: all.map((bin) => value(bin, load.bin_seconds))})), when));
    this.sums.replaceChildren(...sums(all).map(([name, value]) => make("div", {class: "card"}, make("dt", {}, name), make("dd", {}, value))));
    const first = load.now - Math.floor(seconds / load.bin_seconds);
    this.tenants.replaceChildren(tenants(load.bins.filter((bin) => bin.number > first)));
  }
}

/** One entry for each bin since the router started, at most these seconds: zeros where there was no activity. */
export function series(load, seconds = 3600) {
  const known = new Map(load.bins.map((bin) => [bin.number, bin]));
  // The bin of this moment is incomplete, so it is not drawn while there are others.
  const last = Math.max(load.now - 1, 0);
  const n = Math.min(last + 1, Math.floor(seconds / load.bin_seconds));
  const empty = {arrived: 0, ended: 0, refused: 0, broken: 0, prompt: 0, cached: 0, output: 0, waiting_max: null, running_max: null};
  return Array.from({length: n}, (_, at) => known.get(last - n + 1 + at) ?? empty);
}

function sums(bins) {
  const sum = (name) => bins.reduce((total, bin) => total + bin[name], 0);
  const worst = (name) => bins.reduce((most, bin) => Math.max(most, bin[name]?.p99 ?? 0), 0);
  const [prompt, ended, refused] = [sum("prompt"), sum("ended"), sum("refused")];
  return [["Answered", count(ended)], ["Generated tokens", count(sum("output"))], ["First token, p99", worst("first_token_s") ? time(worst("first_token_s")) : "–"],
    ["Between tokens, p99", worst("between_tokens_s") ? time(worst("between_tokens_s")) : "–"], ["Prompts reused", prompt ? percent(sum("cached") / prompt) : "–"], ["Refused", count(refused)]];
}

function tenants(bins) {
  const sums = new Map();
  for (const bin of bins) {
    for (const [name, n] of Object.entries(bin.tenants)) sums.set(name, (sums.get(name) ?? 0) + n);
  }
  const all = [...sums.values()].reduce((sum, n) => sum + n, 0);
  if (!all) return make("p", {class: "quiet small"}, "No tokens were generated in this time.");
  const rows = [...sums.entries()].sort(([, a], [, b]) => b - a);
  return make("div", {class: "card wide"}, make("table", {}, make("caption", {}, "Generated tokens by tenant"),
    make("thead", {}, make("tr", {}, ["Tenant", "Tokens", "Share"].map((name) => make("th", {scope: "col"}, name)))),
    make("tbody", {}, rows.map(([name, n]) => make("tr", {}, make("td", {}, name), make("td", {}, count(n)), make("td", {}, percent(n / all)))))));
}
