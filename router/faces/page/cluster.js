// The grid of ranks of every replica, lost ranks and the cost of each loss, versions with their shares, and planned
// beside measured speed.

import {bytes, count, draw, facts, make, millis, percent, redraw, setAttr, setText} from "./dom.js";
import {nearby} from "./near.js";

const PARTS = ["compute", "wait", "idle"];

export class Cluster {
  constructor() {
    this.summary = make("div");
    this.replicas = make("div");
    /** The shown replicas by name. They are updated in place. */
    this.shown = new Map();
    this.node = make("section", {"aria-labelledby": "cluster"},
      make("h1", {id: "cluster"}, "Cluster"),
      make("ul", {class: "legend", "aria-label": "Colours of a rank's time"},
        PARTS.map((part) => make("li", {}, make("span", {class: `swatch ${part}`}), part === "wait" ? "waits for peers" : part)),
        make("li", {}, make("span", {class: "swatch kv"}), "KV in use")),
      this.summary, this.replicas);
  }

  topics() {
    return ["cluster"];
  }

  update(_, cluster) {
    const {store, models, next} = cluster;
    redraw(this.summary, [store, models, next, !cluster.replicas.length], () => this.summaryNodes(cluster));
    const names = new Set();
    cluster.replicas.forEach((replica, at) => {
      const name = `${at} ${replica.replica}`;
      names.add(name);
      if (!this.shown.has(name)) {
        this.shown.set(name, new Replica());
        this.replicas.append(this.shown.get(name).node);
      }
      this.shown.get(name).show(replica);
    });
    for (const [name, shown] of this.shown) {
      if (!names.has(name)) {
        shown.node.remove();
        this.shown.delete(name);
      }
    }
  }

  summaryNodes({store, models, replicas, next}) {
    const nodes = [];
    if (!replicas.length) nodes.push(make("p", {class: "warn"}, "No replica is attached."));
    if (store) {
      const text = store.connected ? `${store.kind} is connected` : `${store.kind} is not connected: ${store.reason}`;
      nodes.push(make("p", {class: store.connected ? "quiet" : "bad"}, `Store: ${text}`));
    }
    if (next !== null && next !== undefined) {
      nodes.push(make("p", {class: "quiet"}, "There are more replicas than this page shows: lockstep status lists all."));
    }
    const versions = models.flatMap((model) => model.versions.map((version) => ({name: model.name, ...version})));
    if (versions.length > 1) {
      nodes.push(make("div", {class: "wide"}, make("table", {},
        make("caption", {}, "Versions"),
        make("thead", {}, make("tr", {}, ["Name", "Model", "Policy", "Share", "Replicas"].map((name) => make("th", {scope: "col"}, name)))),
        make("tbody", {}, versions.map((of) => make("tr", {},
          make("td", {}, of.name), make("td", {}, of.model), make("td", {class: "mono"}, (of.policy_digest ?? "–").slice(0, 12)),
          make("td", {}, `${of.weight ?? "–"}`), make("td", {}, `${of.ready} of ${of.replicas} ready`)))))));
    }
    return nodes;
  }
}

/**
 * The problems and losses of a replica are always nodes. The rest are nodes only while the replica is near the visible
 * part of the page.
 */
class Replica {
  constructor() {
    this.head = make("h2");
    this.why = make("div");
    this.facts = make("div");
    this.losses = make("div");
    this.grid = make("div", {class: "grid"});
    this.stages = [];
    this.far = [this.head];
    this.node = make("article", {class: "card"}, this.head);
    this.isNear = nearby(this.node, (isNear, height) => this.setNear(isNear, height));
  }

  show(replica) {
    this.replica = replica;
    setText(this.head, `${replica.replica ?? "replica"} · ${replica.phase}${replica.model ? ` · ${replica.model}` : ""}`);
    setAttr(this.head, "class", replica.phase === "ready" ? "good" : "warn");
    const why = reasons(replica);
    redraw(this.why, why, () => why.map((of) => make("p", {class: "warn"}, of)));
    const lost = (replica.lost ?? []).map((of) => ({...of, seconds_ago: Math.floor(of.seconds_ago)}));
    redraw(this.losses, lost, () => losses(lost));
    this.far = [this.head, ...(why.length ? [this.why] : []), ...(lost.length ? [this.losses] : [])];
    if (this.isNear) this.draw();
    else if (this.node.childElementCount !== this.far.length) this.node.replaceChildren(...this.far);
  }

  setNear(isNear, height) {
    if (isNear === this.isNear) return;
    this.isNear = isNear;
    if (isNear) {
      this.node.replaceChildren(this.head, this.why, this.facts, this.losses, this.grid);
      this.draw();
    } else {
      this.node.replaceChildren(...this.far);
    }
    this.node.style.minHeight = isNear ? "" : `${height}px`;
  }

  draw() {
    const {replica} = this;
    if (!replica) return;
    const pairs = factPairs(replica);
    redraw(this.facts, pairs, () => [facts(pairs)]);
    const stages = new Map();
    for (const rank of replica.ranks) {
      if (!stages.has(rank.stage)) stages.set(rank.stage, []);
      stages.get(rank.stage).push(rank);
    }
    const unreplaced = (replica.lost ?? []).filter((lost) => lost.pause_seconds === null && !replica.ranks.some((rank) => rank.rank === lost.rank && rank.state === "ready"));
    while (this.stages.length > stages.size) this.stages.pop().node.remove();
    while (this.stages.length < stages.size) {
      this.stages.push(new Stage());
      this.grid.append(this.stages.at(-1).node);
    }
    [...stages.entries()].sort(([a], [b]) => a - b).forEach(([stage, ranks], at) => this.stages[at].show(stage, ranks, unreplaced));
  }
}

/**
 * The ranks of a stage are nodes only while the stage is near the visible part of the page. A grid of thousands costs
 * no more than one window of it.
 */
class Stage {
  constructor() {
    this.node = make("ul", {class: "stage"});
    this.ranks = [];
    this.isNear = nearby(this.node, (isNear, height) => this.setNear(isNear, height));
  }

  show(number, ranks, unreplaced) {
    this.data = [ranks, unreplaced];
    setAttr(this.node, "aria-label", `Stage ${number}`);
    if (this.isNear) this.draw();
  }

  setNear(isNear, height) {
    if (isNear === this.isNear) return;
    this.isNear = isNear;
    if (isNear) {
      this.node.style.minHeight = "";
      return this.draw();
    }
    this.ranks = [];
    this.node.replaceChildren();
    // Without a height the node is in no document, and its real height is unknown.
    if (height) this.node.style.minHeight = `${height}px`;
  }

  draw() {
    if (!this.data) return;
    const [ranks, unreplaced] = this.data;
    while (this.ranks.length > ranks.length) this.ranks.pop().node.remove();
    while (this.ranks.length < ranks.length) {
      this.ranks.push(new Rank());
      this.node.append(this.ranks.at(-1).node);
    }
    ranks.forEach((rank, at) => this.ranks[at].show(rank, unreplaced.find((lost) => lost.rank === rank.rank)));
  }
}

function reasons(replica) {
  const why = [];
  if (replica.unplaced) why.push(`Not placed for ${replica.unplaced.seconds} s: ${replica.unplaced.why}`);
  const grid = replica.requested_grid;
  if (grid) why.push(`The requested grid is tp ${grid.tp} × pp ${grid.pp}`);
  if (replica.shortened) why.push(`Context ${replica.shortened.has} instead of ${replica.shortened.requested}: ${replica.shortened.why}`);
  if (replica.suspected) why.push("The coordinator does not respond");
  if (replica.shunned) why.push(`Gets no new requests: ${replica.shunned}`);
  if (replica.differs) why.push(`Its weights differ from those of ${replica.differs.replica}: ${replica.differs.weight}, piece ${replica.differs.piece}`);
  for (const apart of replica.apart ?? []) why.push(`${apart.host} and ${apart.other_host} do not reach each other: ${apart.why}`);
  return why;
}

function factPairs(replica) {
  const speed = replica.tokens_per_s ?? {};
  const planned = speed.predicted ? `${speed.predicted.low.toFixed(1)} to ${speed.predicted.high.toFixed(1)} tokens/s (${speed.predicted.bottleneck})` : null;
  const {used, total} = replica.blocks;
  return [
    ["Grid", `tp ${replica.grid.tp} × pp ${replica.grid.pp}`],
    ["Epoch", replica.epoch],
    ["Policy", replica.policy_digest?.slice(0, 12)],
    ["Context", replica.context],
    ["Requests", `${replica.requests.running} run, ${replica.requests.waiting} wait`],
    ["KV blocks", total ? `${count(used)} of ${count(total)}` : null],
    ["Spares", replica.spares],
    ["One request: planned", planned],
    ["One request: measured", speed.alone ? `${speed.alone.toFixed(1)} tokens/s` : planned ? "not yet" : null],
    ["All requests: measured", speed.busy ? `${speed.busy.toFixed(1)} tokens/s` : null],
    ...stepPairs(replica.step_speed),
    ...draftPairs(replica.drafts),
  ];
}

/** What steps of some widths take, how often that is predicted, and what limited the chunks of prompts. */
function stepPairs(steps) {
  if (!steps?.predicted) return [];
  const shown = [1, 32, 512].map((rows) => steps.costs.findLast((cost) => cost.rows <= rows));
  const costs = shown.filter((cost, at) => cost && cost !== shown[at - 1]);
  const cuts = Object.entries(steps.cuts).filter(([, n]) => n > 0);
  return [
    ["Steps", costs.map(({rows, ms}) => `${rows} ${rows === 1 ? "row" : "rows"} in ${millis(ms)}`).join(", ")],
    ["Predicted within a fifth", `${percent(steps.as_predicted / steps.predicted)} of steps`],
    ["Prompts were cut by", cuts.map(([reason, n]) => `${reason} ${count(n)}`).join(", ") || null],
  ];
}

/** How many guessed tokens were verified, and how many of them became tokens. */
function draftPairs(drafts) {
  if (!drafts?.verified) return [];
  const part = percent(drafts.accepted / drafts.verified);
  return [["Drafts", `${count(drafts.accepted)} of ${count(drafts.verified)} accepted (${part})`]];
}

function losses(lost) {
  if (!lost.length) return [];
  const items = [...lost].reverse().map((of) => {
    const pause = of.pause_seconds === null ? "the replica pauses" : `the replica paused ${millis(of.pause_seconds * 1000)}, ${of.tokens_replayed} positions were computed again`;
    const since = of.successor ? `, pid ${of.successor.pid} on ${of.successor.host} replaced it` : of.pause_seconds === null ? "" : ", the grid continues without it";
    return make("li", {}, make("strong", {}, `Rank ${of.rank} was lost`),
      ` ${millis(of.seconds_ago * 1000)} ago: pid ${of.pid} on ${of.host}, ${of.cause} (${of.why}); ${pause}${since}.`);
  });
  return [make("h3", {}, "Lost"), make("ul", {class: "losses"}, items)];
}

class Rank {
  constructor() {
    [this.head, this.where, this.memory, this.step] = [make("p"), make("p", {class: "quiet"}), make("p"), make("p", {class: "quiet"})];
    this.time = Object.fromEntries(PARTS.map((part) => [part, draw("rect", {class: `part ${part}`, y: 0, height: 10})]));
    this.kv = draw("rect", {class: "part kv", x: 0, y: 0, height: 10});
    this.bars = [bar(Object.values(this.time)), bar([this.kv])];
    this.node = make("li", {class: "rank"}, this.head, this.where, this.bars[0], this.bars[1], this.memory, this.step);
  }

  show(rank, lost) {
    const state = lost ? "lost" : rank.state;
    setAttr(this.node, "class", `rank ${state}`);
    setText(this.head, `Rank ${rank.rank} · stage ${rank.stage} · ${lost ? `${state}, ${rank.state} again` : state}`);
    setText(this.where, `${rank.host} · pid ${rank.pid} · ${rank.device} · layers ${rank.layers[0]}–${rank.layers[1] - 1}`);
    let x = 0;
    for (const part of PARTS) {
      const share = rank.time[part] ?? 0;
      setAttr(this.time[part], "x", x.toFixed(1));
      setAttr(this.time[part], "width", (share * 100).toFixed(1));
      x += share * 100;
    }
    setAttr(this.kv, "width", ((rank.kv.used ?? 0) * 100).toFixed(1));
    const shares = PARTS.map((part) => `${part} ${percent(rank.time[part] ?? 0)}`).join(", ");
    setAttr(this.bars[0], "aria-label", `Time: ${shares}, bubble ${percent(rank.time.bubble ?? 0)}`);
    setAttr(this.bars[1], "aria-label", `KV in use: ${percent(rank.kv.used ?? 0)}`);
    setText(this.memory, `${bytes(rank.memory.weights)} weights, ${bytes(rank.memory.kv)} KV of ${bytes(rank.memory.total)}`);
    const {steps, compute, wait} = rank.step_micros;
    setText(this.step, steps ? `a step: ${millis(compute / 1000)} + ${millis(wait / 1000)} waiting; bubble ${percent(rank.time.bubble)}` : "no step in the last second");
  }
}

function bar(parts) {
  return draw("svg", {class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img"}, draw("rect", {class: "ground", width: 100, height: 10}), parts);
}
