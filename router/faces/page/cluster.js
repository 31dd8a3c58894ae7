// Every replica: its state, its figures, the grid of its ranks by stage and tensor rank, and the ranks that were lost.

import {bar, bytes, clock, count, draw, facts, make, millis, openDialog, percent, redraw, setAttr, setText} from "./dom.js";
import {nearby} from "./near.js";

const PARTS = ["compute", "wait", "idle"];
const PART_NAMES = {compute: "computing", wait: "waiting for other ranks", idle: "idle"};
/** Grids of more ranks have small cells: the figures of a rank are in its dialog. */
const LARGE_CELLS_MAX = 32;
/** The figures that are always shown; the others are in a part that opens. */
const MAIN_FACTS = 5;
const HELP = {
  grid: "Tensor-parallel ranks in each stage × pipeline stages",
  changes: "How often this grid was built or changed. Each loss and each replacement of a rank changes it.",
  digest: "A hash of all that decides the bits of an answer. Replicas with the same hash give the same tokens.",
  blocks: "The KV cache is kept in blocks of equal size",
  spares: "Workers that take the place of a lost rank",
  predicted: "What `lockstep plan` predicts for one request alone",
  bubble: "The time in which a pipeline stage has nothing to compute",
};

export class Cluster {
  constructor() {
    this.summary = make("div", {class: "stack"});
    this.replicas = make("div", {class: "stack"});
    /** The shown replicas by name. They are updated in place. */
    this.shown = new Map();
    const keys = [...PARTS.map((part) => [part, PART_NAMES[part]]), ["weights", "weights"], ["kv", "KV in use"], ["room", "KV free"]];
    const legend = make("ul", {class: "legend", "aria-label": "Colours of the ranks"}, keys.map(([kind, label]) => make("li", {}, make("span", {class: `swatch ${kind}`}), label)));
    this.node = make("section", {class: "view", "aria-labelledby": "cluster"}, bar("cluster", "Cluster", make("span", {class: "push"}), legend), this.summary, this.replicas);
  }

  topics() {
    return ["cluster"];
  }

  update(_, cluster) {
    const {store, models, next} = cluster;
    redraw(this.summary, [store, models, next, !cluster.replicas.length], () => summaryNodes(cluster));
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
}

function summaryNodes({store, models, replicas, next}) {
  const nodes = [];
  if (!replicas.length) nodes.push(make("p", {class: "note warn"}, "No replica is attached. Start one with: lockstep coordinator"));
  if (store) {
    const text = store.connected ? `${store.kind} is connected` : `${store.kind} is not connected: ${store.reason}`;
    nodes.push(make("p", {class: store.connected ? "quiet small" : "note bad"}, `Store: ${text}`));
  }
  if (next !== null && next !== undefined) nodes.push(make("p", {class: "quiet small"}, "There are more replicas than this page shows. `lockstep status` lists all."));
  const versions = models.flatMap((model) => model.versions.map((version) => ({name: model.name, ...version})));
  if (versions.length > 1) {
    nodes.push(make("div", {class: "card wide"}, make("table", {},
      make("caption", {}, "Models and their versions"),
      make("thead", {}, make("tr", {}, ["Name", "Model", "Hash", "Share of requests", "Replicas"].map((name) => make("th", {scope: "col"}, name)))),
      make("tbody", {}, versions.map((of) => make("tr", {},
        make("td", {}, of.name), make("td", {}, of.model), make("td", {class: "mono"}, (of.policy_digest ?? "–").slice(0, 12)),
        make("td", {}, `${of.weight ?? "–"}`), make("td", {}, `${of.ready} of ${of.replicas} ready`)))))));
  }
  return nodes;
}

/**
 * The problems and losses of a replica are always nodes. The rest are nodes only while the replica is near the visible
 * part of the page.
 */
class Replica {
  constructor() {
    this.name = make("h2");
    this.phase = make("span", {class: "badge"});
    this.model = make("span", {class: "quiet small"});
    this.lost = make("span", {class: "badge", hidden: true});
    this.head = make("header", {class: "row-of"});
    [this.why, this.losses, this.main, this.more] = [make("div", {class: "stack"}), make("div"), make("div", {class: "main-facts"}), make("div")];
    this.facts = make("div", {class: "stack"}, this.main, make("details", {}, make("summary", {class: "small"}, "More figures"), this.more));
    this.grid = make("div", {class: "grid"});
    this.stages = [];
    this.times = new Map();
    this.far = [this.name];
    this.node = make("article", {class: "card stack"}, this.name);
    this.isNear = nearby(this.node, (isNear, height) => this.setNear(isNear, height));
  }

  show(replica) {
    this.replica = replica;
    const isReady = replica.phase === "ready";
    setText(this.name, replica.replica ?? "replica");
    setAttr(this.node, "aria-label", `Replica ${replica.replica ?? ""}`);
    setText(this.phase, replica.phase);
    setAttr(this.phase, "class", `badge ${isReady ? "good" : "warn"}`);
    setText(this.model, replica.model ?? "");
    const why = reasons(replica);
    redraw(this.why, why, () => why.map((of) => make("p", {class: "note warn"}, of)));
    const lost = (replica.lost ?? []).map((of) => ({...of, at: this.timeOf(of), seconds_ago: Math.floor(of.seconds_ago)}));
    redraw(this.losses, lost, () => losses(lost));
    const last = lost.at(-1);
    setText(this.lost, last ? `Rank ${last.rank} lost ${millis(last.seconds_ago * 1000)} ago, ${last.pause_seconds === null ? "not yet replaced" : last.successor ? "replaced" : "the grid is smaller"}` : "");
    this.lost.hidden = !last;
    setAttr(this.lost, "class", `badge ${last?.pause_seconds === null ? "bad" : "warn"}`);
    this.far = [this.name, ...(why.length ? [this.why] : []), ...(lost.length ? [this.losses] : [])];
    if (this.isNear) this.draw();
    else if (this.node.childElementCount !== this.far.length) this.node.replaceChildren(...this.far);
  }

  /** The time of a loss by this browser's clock. It stays what it was when the loss came. */
  timeOf({rank, pid, seconds_ago: ago}) {
    const name = `${rank} ${pid}`;
    if (!this.times.has(name)) this.times.set(name, Date.now() - ago * 1000);
    return this.times.get(name);
  }

  setNear(isNear, height) {
    if (isNear === this.isNear) return;
    this.isNear = isNear;
    if (isNear) {
      this.head.replaceChildren(this.name, this.phase, this.lost, this.model);
      this.node.replaceChildren(this.head, this.why, this.grid, this.losses, this.facts);
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
    redraw(this.main, pairs.slice(0, MAIN_FACTS), () => [facts(pairs.slice(0, MAIN_FACTS))]);
    redraw(this.more, pairs.slice(MAIN_FACTS), () => [facts(pairs.slice(MAIN_FACTS))]);
    const stages = new Map();
    for (const rank of replica.ranks) {
      if (!stages.has(rank.stage)) stages.set(rank.stage, []);
      stages.get(rank.stage).push(rank);
    }
    const isSmall = replica.ranks.length > LARGE_CELLS_MAX;
    setAttr(this.grid, "class", isSmall ? "grid small" : "grid");
    const unreplaced = (replica.lost ?? []).filter((lost) => lost.pause_seconds === null && !replica.ranks.some((rank) => rank.rank === lost.rank && rank.state === "ready"));
    while (this.stages.length > stages.size) this.stages.pop().node.remove();
    while (this.stages.length < stages.size) {
      this.stages.push(new Stage());
      this.grid.append(this.stages.at(-1).node);
    }
    [...stages.entries()].sort(([a], [b]) => a - b).forEach(([stage, ranks], at) => this.stages[at].show(stage, ranks, unreplaced, isSmall));
  }
}

/**
 * A row of the grid: the ranks of a stage. They are nodes only while the stage is near the visible part of the page, so
 * a grid of thousands costs no more than one window of it.
 */
class Stage {
  constructor() {
    this.title = make("p", {class: "small"});
    this.list = make("ul", {class: "ranks"});
    this.node = make("div", {class: "stage"}, this.title, this.list);
    this.ranks = [];
    this.isNear = nearby(this.node, (isNear, height) => this.setNear(isNear, height));
  }

  show(number, ranks, unreplaced, isSmall) {
    this.data = [ranks, unreplaced, isSmall];
    const [first, last] = ranks[0].layers;
    setText(this.title, `Stage ${number} · layers ${first}–${last - 1}`);
    setAttr(this.list, "aria-label", `Ranks of stage ${number}`);
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
    this.list.replaceChildren();
    // Without a height the node is in no document, and its real height is unknown.
    if (height) this.node.style.minHeight = `${height}px`;
  }

  draw() {
    if (!this.data) return;
    const [ranks, unreplaced, isSmall] = this.data;
    while (this.ranks.length > ranks.length) this.ranks.pop().node.remove();
    while (this.ranks.length < ranks.length) {
      this.ranks.push(new Rank());
      this.list.append(this.ranks.at(-1).node);
    }
    ranks.forEach((rank, at) => this.ranks[at].show(rank, unreplaced.find((lost) => lost.rank === rank.rank), isSmall));
  }
}

/** A cell of the grid: where a rank's time goes, and what is in its memory. */
class Rank {
  constructor() {
    // The state, or of a ready rank how much of its time it computes.
    [this.name, this.state, this.text] = [make("strong"), make("span", {class: "state"}), make("span", {class: "figures"})];
    this.time = Object.fromEntries(PARTS.map((part) => [part, draw("rect", {class: `part ${part}`, height: 10})]));
    [this.weights, this.kv] = [draw("rect", {class: "part weights", height: 10, x: 0}), draw("rect", {class: "part kv", height: 10})];
    this.bars = [bars(Object.values(this.time)), bars([this.weights, this.kv])];
    this.where = make("span", {class: "figures"});
    this.button = make("button", {type: "button", class: "cell", click: () => openRank(this.rank)}, this.name, this.state, this.bars);
    this.node = make("li", {class: "rank"}, this.button);
  }

  show(rank, lost, isSmall) {
    this.rank = rank;
    const state = lost ? "lost" : rank.state;
    setAttr(this.node, "class", `rank ${state}`);
    setText(this.name, `Rank ${rank.rank}`);
    setText(this.state, lost ? `lost, ${rank.state} again` : state === "ready" ? `computing ${percent(rank.time.compute ?? 0)}` : state);
    let x = 0;
    for (const part of PARTS) {
      const share = rank.time[part] ?? 0;
      setAttr(this.time[part], "x", x.toFixed(1));
      setAttr(this.time[part], "width", (share * 100).toFixed(1));
      x += share * 100;
    }
    const {weights, kv} = rank.memory;
    const used = rank.kv.used ?? 0;
    // The bar is what the rank has allocated: its weights, and the KV cache in use and free.
    const part = (n) => ((100 * n) / (weights + kv || 1)).toFixed(1);
    setAttr(this.weights, "width", part(weights));
    setAttr(this.kv, "x", part(weights));
    setAttr(this.kv, "width", part(kv * used));
    // Small cells have no room for it.
    if (!isSmall) {
      if (!this.text.parentNode) this.button.append(this.text, this.where);
      setText(this.text, `weights ${bytes(weights)} · KV ${percent(used)} of ${bytes(kv)}`);
      setText(this.where, `${rank.host} · pid ${rank.pid}`);
    }
    const shares = PARTS.map((name) => `${PART_NAMES[name]} ${percent(rank.time[name] ?? 0)}`).join(", ");
    setAttr(this.button, "aria-label", `Rank ${rank.rank}, stage ${rank.stage}, ${state}: ${shares}; KV in use ${percent(used)}`);
    setAttr(this.button, "title", `${rank.host}: ${shares}; KV in use ${percent(used)}`);
  }
}

function bars(parts) {
  return draw("svg", {class: "bars", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true"}, parts);
}

function openRank(rank) {
  const {steps, compute, wait} = rank.step_micros;
  const {weights, kv, total} = rank.memory;
  openDialog(`Rank ${rank.rank}`, [
    facts([["State", rank.state], ["Stage", `${rank.stage}`], ["Layers", `${rank.layers[0]} to ${rank.layers[1] - 1}`], ["Host", rank.host], ["Process", `${rank.pid}`], ["Device", rank.device]]),
    make("h3", {}, "Memory"),
    facts([["Weights", bytes(weights)], ["KV cache", bytes(kv)], ["KV in use", percent(rank.kv.used ?? 0)], ["Free or for other uses", bytes(Math.max(total - weights - kv, 0))], ["Total", bytes(total)]]),
    make("h3", {}, "The last second"),
    facts([...PARTS.map((part) => [PART_NAMES[part][0].toUpperCase() + PART_NAMES[part].slice(1), percent(rank.time[part] ?? 0)]), ["Bubble", percent(rank.time.bubble ?? 0), HELP.bubble],
      ["Steps", `${steps}`], ["A step computes", steps ? millis(compute / 1000) : null], ["A step waits", steps ? millis(wait / 1000) : null]])]);
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
  const planned = speed.predicted ? `${speed.predicted.low.toFixed(0)} to ${speed.predicted.high.toFixed(0)} tokens/s` : null;
  const {used, total} = replica.blocks;
  return [
    ["One request, measured", speed.alone ? `${speed.alone.toFixed(1)} tokens/s` : planned ? "not yet" : null, "The speed of a request that runs alone, when there was one last"],
    ["One request, predicted", planned, `${HELP.predicted}${speed.predicted?.bottleneck ? `. Limited by ${speed.predicted.bottleneck}` : ""}`],
    ["All requests, measured", speed.busy ? `${speed.busy.toFixed(1)} tokens/s` : "–", "The sum over all requests in the last seconds"],
    ["Requests", `${replica.requests.running} running, ${replica.requests.waiting} waiting`],
    ["KV blocks in use", total ? `${count(used)} of ${count(total)}` : "–", HELP.blocks],
    ["Grid", `${replica.grid.tp} tensor × ${replica.grid.pp} pipeline`, HELP.grid],
    ["Context", replica.context ? `${count(replica.context)} tokens` : null],
    ["Spare workers", replica.spares, HELP.spares],
    ...stepPairs(replica.step_speed),
    ...draftPairs(replica.drafts),
    ["Grid changes", replica.epoch === undefined ? null : `${replica.epoch}`.split(".").at(-1), HELP.changes],
    ["Numerics hash", replica.policy_digest?.slice(0, 12), HELP.digest],
  ];
}

/** What steps of some widths take, how often that is predicted, and what limited the chunks of prompts. */
function stepPairs(steps) {
  if (!steps?.predicted) return [];
  const shown = [1, 32, 512].map((rows) => steps.costs.findLast((cost) => cost.rows <= rows));
  const costs = shown.filter((cost, at) => cost && cost !== shown[at - 1]);
  const cuts = Object.entries(steps.cuts).filter(([, n]) => n > 0);
  return [
    ["Time of a step", costs.map(({rows, ms}) => `${count(rows)} ${rows === 1 ? "token" : "tokens"} in ${millis(ms)}`).join(", ")],
    ["Steps as predicted", percent(steps.as_predicted / steps.predicted), "Steps that took at most a fifth more or less than the scheduler expected"],
    ["Prompt chunks limited by", cuts.map(([reason, n]) => `${reason} (${count(n)})`).join(", ") || null, "What limited the chunks in which prompts are computed"],
  ];
}

/** How many guessed tokens were verified, and how many of them became tokens. */
function draftPairs(drafts) {
  if (!drafts?.verified) return [];
  return [["Drafted tokens", `${percent(drafts.accepted / drafts.verified)} of ${count(drafts.verified)} accepted`, "Tokens that speculation guessed, and that the model confirmed"]];
}

/** The lost ranks as a time line, the newest first. */
function losses(lost) {
  if (!lost.length) return [];
  const items = [...lost].reverse().map((of) => {
    const isOver = of.pause_seconds !== null;
    const pause = isOver ? `The replica paused ${millis(of.pause_seconds * 1000)}, ${of.tokens_replayed} positions were computed again` : "The replica pauses";
    const since = of.successor ? `, pid ${of.successor.pid} on ${of.successor.host} replaced it` : isOver ? ", the grid continues without it" : "";
    return make("li", {class: isOver ? "" : "open"}, make("span", {class: "when"}, clock(of.at), make("br"), `${millis(of.seconds_ago * 1000)} ago`),
      make("div", {}, make("p", {}, make("strong", {}, `Rank ${of.rank} was lost`), `: pid ${of.pid} on ${of.host}, ${of.cause} (${of.why})`), make("p", {class: "quiet small"}, `${pause}${since}.`)));
  });
  return [make("h3", {}, "Lost ranks"), make("ol", {class: "losses"}, items)];
}
