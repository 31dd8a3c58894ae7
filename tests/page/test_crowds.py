"""Synthetic data through the page's own modules: 1,000 ranks in one replica, in many and each alone; 10,000 requests.

The cost of a frame is checked by counts: how many nodes there are, and how many a frame has changed. Times depend on
other load on the machine: they are printed, and checked only with PAGE_TIMES.
"""

import os

from common import PageTest

FRAME_MAX_MS = 60
# A window shows some fifty ranks of twenty nodes, or forty rows of ten; nodes near the window are added to that.
NODES_MAX = 2500
TOUCHED_MAX = 1000
TRIES = 3

DATA = """
    const {Cluster} = await import("/page/cluster.js");
    const {Requests} = await import("/page/requests.js");
    const memory = {total: 8e10, weights: 2e10, kv: 4e10};
    const rank = (n, k) => ({
      rank: n, stage: n >> 3, tp: n & 7, pid: 1000 + n, host: `node-${n >> 3}`,
      state: (n + k) % 97 ? "ready" : "slow",
      device: "cpu", layers: [n >> 3, (n >> 3) + 1], memory, kv: {tokens: 100, used: ((n * 7 + k) % 100) / 100},
      time: {compute: 0.5, wait: ((n + k) % 5) / 10, idle: 0.1, bubble: 0.4},
      step_micros: {steps: 10 + k, compute: 900 + k, wait: 100, idle: 0}});
    const lost = (at, k) => ({
      rank: at, pid: 7000 + at, host: "node-far", cause: "gone", why: "its socket closed", seconds_ago: k,
      pause_seconds: null, successor: null, tokens_replayed: 0});
    const replica = (at, n, k, hasLoss) => ({
      replica: `replica-${at}`, phase: "ready", model: "m", epoch: `1.${k}`,
      grid: {tp: Math.min(n, 8), pp: n >> 3 || 1}, blocks: {used: k, total: 1e6},
      requests: {waiting: k, running: 1}, tokens_per_s: {}, spares: 0,
      lost: hasLoss ? [lost(n - 1, k)] : [], apart: [],
      ranks: Array.from({length: n}, (_, of) => rank(of, k))});
    const clusters = (n, each) => (k) => ({store: null, models: [], next: null,
      replicas: Array.from({length: n}, (_, at) => replica(at, each, k, at === n - 1 && k > 20))});
    const request = (n, k) => ({
      number: 10000 - n, id: `id${n}`, state: n % 9 ? "ok" : "answering", over: n % 9 > 0, tenant: "t", model: "m",
      prompt: n, cached: 0, output: n + k, first_token_ms: 12, took_ms: 100 + k});
    const requests = (k) => ({
      waiting: 1, running: 2, requests: Array.from({length: 10000}, (_, n) => request(n, k))});
    const place = document.querySelector("main");
    const frame = () => new Promise(requestAnimationFrame);"""

FRAMES = """
    const list = new Requests();
    const [make, data, scroll] = {
      "one replica": [() => new Cluster(), clusters(1, 1000), (k) => scrollTo(0, k * 100)],
      "replicas of eight": [() => new Cluster(), clusters(125, 8), (k) => scrollTo(0, k * 100)],
      "replicas of one": [() => new Cluster(), clusters(1000, 1), (k) => scrollTo(0, k * 100)],
      "requests": [() => list, requests, (k) => { list.list.node.scrollTop = k * 5000; }],
    }[of];
    const view = make();
    const texts = Array.from({length: 11}, (_, k) => JSON.stringify(data(4 * k)));
    place.replaceChildren(view.node);
    scrollTo(0, 0);
    view.update("", JSON.parse(texts[0]));
    await new Promise((resolve) => setTimeout(resolve, 500));

    const touched = (records) => {
      const nodes = new Set();
      for (const {target, addedNodes} of records) {
        nodes.add(target);
        for (const added of addedNodes) {
          nodes.add(added);
          added.querySelectorAll?.("*").forEach((node) => nodes.add(node));
        }
      }
      return nodes.size;
    };
    let records = [];
    const seen = new MutationObserver((more) => records.push(...more));
    seen.observe(view.node, {subtree: true, childList: true, attributes: true, characterData: true});
    let [took, most, last] = [[], 0, performance.now()];
    for (let k = 1; k <= 40; k++) {
      if (k % 4 === 0) view.update("", JSON.parse(texts[k / 4]));
      scroll(k);
      await frame();
      const now = performance.now();
      took.push(now - last);
      most = Math.max(most, touched(records));
      records = [];
      last = performance.now();
    }
    const text = view.node.textContent;
    return {
      p90: Math.round(took.sort((a, b) => a - b)[35]), max: Math.round(took.at(-1)), most,
      nodes: view.node.querySelectorAll("*").length, shows_loss: text.includes("pid 7") && text.includes("was lost"),
      ranks: view.node.querySelectorAll(".rank").length};"""


class Crowds(PageTest):
    def frames(self, of):
        tab = self.tab("/#requests")
        tab.until("document.querySelector('h1')", 20, "the page")
        # Other processes may use the machine for a moment, so only the best of three tries counts.
        tries = []
        for _ in range(TRIES):
            tab.call("Performance.enable", timeDomain="threadTicks")
            before = self.busy(tab)
            result = tab.run(DATA + FRAMES, of=of)
            tries.append({**result, "cpu": round((self.busy(tab) - before) * 1000 / 40)})
        best = min(tries, key=lambda result: result["p90"])
        print(f"{of}: {best}")
        for result in tries:
            self.assertLess(result["nodes"], NODES_MAX, f"{of}: only ranks and rows near the window are nodes")
            self.assertLess(result["most"], TOUCHED_MAX, f"{of}: a frame touches only nodes near the window")
        if os.environ.get("PAGE_TIMES"):
            self.assertLess(best["p90"], FRAME_MAX_MS, of)
        return best

    def busy(self, tab):
        """Returns the CPU seconds of the page's own thread."""
        metrics = tab.call("Performance.getMetrics")["metrics"]
        return next(of["value"] for of in metrics if of["name"] == "TaskDuration")

    def test_a_thousand_ranks_stay_smooth(self):
        for of in ("one replica", "replicas of eight", "replicas of one"):
            with self.subTest(of=of):
                result = self.frames(of)
                self.assertGreater(result["ranks"], 0, "the window shows ranks after scrolling")
                self.assertTrue(result["shows_loss"], "the page shows a lost rank, wherever it is")

    def test_ten_thousand_requests_stay_smooth(self):
        self.frames("requests")
