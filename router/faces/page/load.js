// The last hour, as the router records it. A bin without activity has rates of zero and no waits. A bin from before the
// router started is not drawn.

import {count, make, millis, percent, setText} from "./dom.js";
import {chart} from "./chart.js";

const OLD_MS = 10000;

export class Load {
  constructor() {
    this.age = make("p", {class: "quiet", role: "status"});
    this.charts = make("div", {class: "charts"});
    this.tenants = make("div");
    this.node = make("section", {"aria-labelledby": "load"}, make("h1", {id: "load"}, "Load"), this.age, this.charts, this.tenants);
    this.timer = setInterval(() => this.showAge(), 1000);
  }

  topics() {
    return ["load"];
  }

  close() {
    clearInterval(this.timer);
  }

  showAge() {
    if (!this.receivedAt) return;
    const age = Date.now() - this.receivedAt;
    this.age.className = age > OLD_MS ? "warn" : "quiet";
    setText(this.age, age > OLD_MS ? `These figures are ${millis(age)} old` : `The last ${this.span}, in bins of ${this.bin} s`);
  }

  update(_, load) {
    this.receivedAt = Date.now();
    const all = series(load);
    [this.bin, this.span] = [load.bin_seconds, millis(Math.min(load.seconds, 3600) * 1000)];
    this.showAge();
    const per = (name) => all.map((bin) => bin && bin[name] / load.bin_seconds);
    const seconds = (name, part) => all.map((bin) => bin?.[name]?.[part] ?? null);
    const rate = (n) => `${n < 10 ? n.toFixed(1) : count(n)}/s`;
    const time = (s) => millis(s * 1000);
    const share = all.map((bin) => (bin?.prompt ? bin.cached / bin.prompt : null));
    this.charts.replaceChildren(
      chart("Tokens", [{name: "generated", values: per("output")}, {name: "in prompts", values: per("prompt")}], rate, this.span),
      chart("First token", [{name: "p50", values: seconds("first_token_s", "p50")}, {name: "p99", values: seconds("first_token_s", "p99")}], time, this.span),
      chart("Between tokens", [{name: "p50", values: seconds("between_tokens_s", "p50")}, {name: "p99", values: seconds("between_tokens_s", "p99")}], time, this.span),
      chart("Requests", [{name: "arrived", values: per("arrived")}, {name: "refused", values: per("refused")}, {name: "interrupted", values: per("broken")}], rate, this.span),
      chart("Concurrent requests, highest", [{name: "waiting", values: all.map((bin) => bin && bin.waiting_max)}, {name: "answering", values: all.map((bin) => bin && bin.running_max)}], count, this.span),
      chart("Work saved by the prefix cache", [{name: "of prompts", values: share}], percent, this.span));
    this.tenants.replaceChildren(tenants(load.bins));
  }
}

/** One entry for each bin since the router started, at most an hour: zeros where there was no activity. */
export function series(load) {
  const known = new Map(load.bins.map((bin) => [bin.number, bin]));
  const n = Math.min(load.now + 1, Math.floor(3600 / load.bin_seconds));
  const empty = {arrived: 0, ended: 0, refused: 0, broken: 0, prompt: 0, cached: 0, output: 0, waiting_max: null, running_max: null};
  return Array.from({length: n}, (_, at) => known.get(load.now - n + 1 + at) ?? empty);
}

function tenants(bins) {
  const sums = new Map();
  for (const bin of bins) {
    for (const [name, n] of Object.entries(bin.tenants)) sums.set(name, (sums.get(name) ?? 0) + n);
  }
  const all = [...sums.values()].reduce((sum, n) => sum + n, 0);
  if (!all) return make("p", {class: "quiet"}, "No tokens were generated in the last hour.");
  const rows = [...sums.entries()].sort(([, a], [, b]) => b - a);
  return make("div", {class: "wide"}, make("table", {}, make("caption", {}, "Tenants' shares of the generated tokens"),
    make("thead", {}, make("tr", {}, ["Tenant", "Tokens", "Share"].map((name) => make("th", {scope: "col"}, name)))),
    make("tbody", {}, rows.map(([name, n]) => make("tr", {}, make("td", {}, name), make("td", {}, count(n)), make("td", {}, percent(n / all)))))));
}
