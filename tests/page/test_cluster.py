"""The grid of ranks, requests and load, of a cluster that is hurt while it is looked at."""

import os
import signal
import threading
import time

from browser import until
from common import PICTURES, PageTest

LONG = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Count from one to a thousand in words."}],
    "seed": 3,
    "temperature": 1,
    "max_tokens": 350,
    "ignore_eos": True,
    "return_token_ids": True,
}


class Clusters(PageTest):
    # Room for one context: a second request beside it is preempted sooner or later.
    flags = ("--tp", "2", "--context", "512", "--kv-memory", "16MiB", "--max-running", "4")

    def ranks(self):
        return self.ask("/cluster")["replicas"][0]["ranks"]

    def answered(self, n=1):
        """Answers under way, and where they will be."""
        answers = [None] * n

        def one(at):
            answers[at] = self.ask("/v1/chat/completions", {**LONG, "seed": 3 + at})["choices"][0]

        threads = [threading.Thread(target=one, args=(at,)) for at in range(n)]
        for thread in threads:
            thread.start()
        return answers, threads

    def requests(self, n):
        return self.ask("/requests")["requests"][:n]

    def whole(self):
        until(
            lambda: len(self.ranks()) == 2 and all(rank["state"] == "ready" for rank in self.ranks()),
            60,
            "both ranks are ready",
        )

    def test_a_worker_that_is_killed_is_named_within_a_second_and_requests_say_what_befell_them(self):
        self.whole()
        tab = self.tab("/#cluster")
        tab.until("document.querySelectorAll('.rank.ready').length === 2", 20, "two ranks")
        told, threads = self.answered()
        for thread in threads:
            thread.join()
        expected = told[0]["token_ids"]
        answers, threads = self.answered()
        until(lambda: not self.requests(1)[0]["over"] and self.requests(1)[0]["output"] > 40, 60, "tokens come")
        pid = self.ranks()[1]["pid"]
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        tab.until(
            f"document.body.innerText.includes('was lost') && document.body.innerText.includes('pid {pid}')",
            10,
            "the loss is named",
        )
        took = time.monotonic() - began
        print(f"a killed worker is named after {took:.2f} s")
        self.assertLess(took, 1.0)
        loss = tab.text(".losses")
        self.assertRegex(loss, rf"Rank 1 was lost .* pid {pid} on .*, gone")
        tab.until(
            "document.querySelector('.losses').innerText.includes('holds it since')", 60, "its successor is named"
        )
        self.assertRegex(tab.text(".losses"), r"the replica paused .*, \d+ positions were computed again")
        for thread in threads:
            thread.join()
        self.assertEqual(answers[0]["token_ids"], expected, "the same tokens")
        number = self.requests(1)[0]["number"]
        tab.open(f"{self.server.url}/#requests/{number}")
        tab.until("document.querySelector('article table')", 20, "its timeline")
        self.assertIn("Lost: the ranks that had it are gone", tab.text("article table"))
        self.assertRegex(
            tab.text("article table"), r"(?s)First token.*Lost.*Begins again.*Replays positions 0 to .*Ends: ok"
        )
        timeline = self.ask(f"/requests/{number}")
        self.assertEqual(sum(timeline["tokens"]["counts"]), len(expected))
        times = [event["at_ms"] for event in timeline["events"]]
        self.assertEqual(times, sorted(times))
        tab.picture(PICTURES / "timeline-lost.png")

    def test_a_preempted_request_says_so(self):
        self.whole()
        answers, threads = self.answered(4)
        for thread in threads:
            thread.join()
        timelines = [self.ask(f"/requests/{of['number']}") for of in self.requests(4)]
        preempted = [of for of in timelines if any(event["what"] == "preempted" for event in of["events"])]
        self.assertTrue(preempted, timelines)
        what = [event["what"] for event in preempted[0]["events"]]
        at = what.index("preempted")
        self.assertEqual(what[0], "placed")
        self.assertIn("started", what[at:], "it began again")
        tab = self.tab(f"/#requests/{preempted[0]['number']}")
        tab.until("document.querySelector('article table')?.innerText.includes('Preempted')", 20, "it is shown")
        self.judge_access(tab, "timeline")
        alone = self.ask("/v1/chat/completions", LONG)["choices"][0]
        self.assertEqual(answers[0]["token_ids"], alone["token_ids"])

    def test_pictures(self):
        self.whole()
        self.ask("/v1/chat/completions", {**LONG, "max_tokens": 30})
        number = self.requests(1)[0]["number"]
        answers, threads = self.answered()
        self.pictures(
            "/#cluster",
            "cluster",
            lambda tab: tab.until("document.querySelectorAll('.rank.ready').length === 2", 20, "two ranks"),
        )
        self.pictures(
            f"/#requests/{number}",
            "requests",
            lambda tab: tab.until(
                "document.querySelector('article') && document.querySelector('.row[href]')", 20, "requests"
            ),
        )
        self.pictures(
            "/#load",
            "load",
            lambda tab: tab.until("document.querySelectorAll('svg.chart').length === 6", 20, "charts"),
        )
        for thread in threads:
            thread.join()

    def test_by_keyboard_alone(self):
        tab = self.tab("/#cluster")
        tab.until("document.querySelectorAll('nav a').length === 4", 20, "the views are named")
        tab.press("Tab")
        self.assertEqual(tab.run("return document.activeElement.className"), "skip")
        names = []
        for _ in range(4):
            tab.press("Tab")
            names.append(tab.run("return document.activeElement.textContent"))
        self.assertEqual(names, ["Chat", "Cluster", "Requests", "Load"])
        tab.press("Enter")
        tab.until("document.querySelector('h1')?.textContent === 'Load'", 10, "the view by Enter")

    def test_nobody_is_asked_while_nobody_looks(self):
        tab = self.tab("/#cluster")
        tab.until("document.querySelector('.rank')", 20, "ranks")
        tab.open(self.server.url + "/#chat")
        tab.until("document.querySelector('h1')?.textContent === 'Chat'", 10, "the chat")
        time.sleep(0.5)
        before = len(tab.asked)
        time.sleep(1.5)
        self.assertEqual(tab.asked[before:], [])


class Crowds(PageTest):
    """Made data through the page's own modules: 1,000 ranks, 10,000 requests."""

    FEED = """
        const {Cluster} = await import("/page/cluster.js");
        const {Requests} = await import("/page/requests.js");
        const memory = {total: 8e10, weights: 2e10, kv: 4e10};
        const rank = (n, k) => ({
          rank: n, stage: n >> 3, tp: n & 7, pid: 1000 + n, host: `node-${n >> 3}`,
          state: (n + k) % 97 ? "ready" : "slow",
          device: "cpu", layers: [n >> 3, (n >> 3) + 1], memory, kv: {tokens: 100, used: ((n * 7 + k) % 100) / 100},
          time: {compute: 0.5, wait: ((n + k) % 5) / 10, idle: 0.1, bubble: 0.4},
          step_micros: {steps: 10 + k, compute: 900 + k, wait: 100, idle: 0}});
        const replica = (k) => ({
          replica: "many", phase: "ready", model: "m", epoch: `1.${k}`, grid: {tp: 8, pp: 125},
          blocks: {used: k, total: 1e6},
          requests: {waiting: k, running: 1}, tokens_per_s: {}, spares: 0, lost: [], apart: [],
          ranks: Array.from({length: 1000}, (_, n) => rank(n, k))});
        const cluster = (k) => ({store: null, models: [], next: null, replicas: [replica(k)]});
        const request = (n, k) => ({
          number: 10000 - n, id: `id${n}`, state: n % 9 ? "ok" : "answering", over: n % 9 > 0, tenant: "t", model: "m",
          prompt: n, cached: 0, output: n + k, first_token_ms: 12, took_ms: 100 + k});
        const all = (k) => Array.from({length: 10000}, (_, n) => request(n, k));
        const requests = (k) => ({waiting: 1, running: 2, requests: all(k)});
        const place = document.querySelector("main");
        const frames = async (view, data, work) => {
          place.replaceChildren(view.node);
          view.hear("", data(0));
          await new Promise((resolve) => setTimeout(resolve, 300));
          const took = [];
          let last = performance.now();
          for (let k = 1; k <= 40; k++) {
            if (k % 4 === 0) view.hear("", data(k));
            work(k);
            await new Promise(requestAnimationFrame);
            const now = performance.now();
            took.push(now - last);
            last = now;
          }
          const n_nodes = view.node.querySelectorAll("*").length;
          return {p90: took.sort((a, b) => a - b)[35], max: took.at(-1), n_nodes};
        };
        const list = new Requests();
        return {
          cluster: await frames(new Cluster(), cluster, (k) => scrollTo(0, k * 100)),
          requests: await frames(list, requests, (k) => { list.list.node.scrollTop = k * 5000; }),
        };"""

    def test_a_thousand_ranks_and_ten_thousand_requests_stay_smooth(self):
        tab = self.tab("/#requests")
        tab.until("document.querySelector('h1')", 20, "the page")
        # Others may hold the machine for a moment: the best of three is what the page can do.
        tries = [tab.run(self.FEED) for _ in range(3)]
        best = {of: min(tries, key=lambda told: told[of]["p90"])[of] for of in ("cluster", "requests")}
        print(best)
        for of, told in best.items():
            self.assertLess(told["p90"], 60, of)
        self.assertLess(best["requests"]["n_nodes"], 1500, "only rows that can be seen are nodes")
