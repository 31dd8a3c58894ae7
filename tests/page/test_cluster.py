"""The views of the cluster, requests and load, while ranks are lost and requests are preempted."""

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
    # The KV memory holds one context, so a second request is preempted.
    flags = ("--tp", "2", "--context", "512", "--kv-memory", "16MiB", "--max-running", "4")

    def ranks(self):
        return self.request("/cluster")["replicas"][0]["ranks"]

    def start_requests(self, n=1):
        """Starts `n` requests. Returns a list that their answers fill, and their threads."""
        answers = [None] * n

        def one(at):
            answers[at] = self.request("/v1/chat/completions", {**LONG, "seed": 3 + at})["choices"][0]

        threads = [threading.Thread(target=one, args=(at,)) for at in range(n)]
        for thread in threads:
            thread.start()
        return answers, threads

    def requests(self, n):
        return self.request("/requests")["requests"][:n]

    def wait_until_ready(self):
        until(
            lambda: len(self.ranks()) == 2 and all(rank["state"] == "ready" for rank in self.ranks()),
            60,
            "both ranks are ready",
        )

    def test_a_killed_worker_is_shown_within_a_second_and_in_the_timeline(self):
        self.wait_until_ready()
        tab = self.tab("/#cluster")
        tab.until("document.querySelectorAll('.rank.ready').length === 2", 20, "two ranks")
        before, threads = self.start_requests()
        for thread in threads:
            thread.join()
        expected = before[0]["token_ids"]
        answers, threads = self.start_requests()
        until(lambda: not self.requests(1)[0]["over"] and self.requests(1)[0]["output"] > 40, 60, "tokens come")
        pid = self.ranks()[1]["pid"]
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        tab.until(
            f"document.body.innerText.includes('was lost') && document.body.innerText.includes('pid {pid}')",
            10,
            "the loss is shown",
        )
        took = time.monotonic() - began
        print(f"a killed worker is shown after {took:.2f} s")
        self.assertLess(took, 1.0)
        loss = tab.text(".losses")
        self.assertRegex(loss, rf"Rank 1 was lost: pid {pid} on .*, gone")
        tab.until(
            "document.querySelector('.losses').innerText.includes('replaced it')", 60, "its successor is shown"
        )
        self.assertRegex(tab.text(".losses"), r"The replica paused .*, \d+ positions were computed again")
        for thread in threads:
            thread.join()
        self.assertEqual(answers[0]["token_ids"], expected, "the same tokens")
        number = self.requests(1)[0]["number"]
        tab.open(f"{self.server.url}/#requests/{number}")
        tab.until("document.querySelector('article table')", 20, "its timeline")
        self.assertIn("Lost: a rank of its replica was lost", tab.text("article table"))
        self.assertRegex(
            tab.text("article table"), r"(?s)First token.*Lost.*Begins again.*Replays positions 0 to .*Ends: ok"
        )
        timeline = self.request(f"/requests/{number}")
        self.assertEqual(sum(timeline["tokens"]["counts"]), len(expected))
        times = [event["at_ms"] for event in timeline["events"]]
        self.assertEqual(times, sorted(times))
        spans = tab.run("""
            const {spans, withRepeats} = await import("/page/waterfall.js");
            return spans(timeline, withRepeats(timeline.events)).map(({kind}) => kind);""", timeline=timeline)
        self.assertEqual(spans[-4:], ["answered", "paused", "again", "answered"], "the timeline's spans")
        lanes = tab.run("return [...document.querySelectorAll('.lane > span:first-child')].map((of) => of.textContent)")
        self.assertIn("Paused", lanes)
        self.assertIn("Computed again", lanes)
        tab.run("document.querySelector('article').scrollIntoView()")
        tab.screenshot(PICTURES / "timeline-lost.png")

    def test_a_preemption_is_in_the_timeline(self):
        self.wait_until_ready()
        answers, threads = self.start_requests(4)
        for thread in threads:
            thread.join()
        timelines = [self.request(f"/requests/{of['number']}") for of in self.requests(4)]
        preempted = [of for of in timelines if any(event["what"] == "preempted" for event in of["events"])]
        self.assertTrue(preempted, timelines)
        what = [event["what"] for event in preempted[0]["events"]]
        at = what.index("preempted")
        self.assertEqual(what[0], "placed")
        self.assertIn("started", what[at:], "the request began again")
        tab = self.tab(f"/#requests/{preempted[0]['number']}")
        tab.until("document.querySelector('article table')?.innerText.includes('Preempted')", 20, "its preemption")
        shown = tab.text("article table")
        self.assertRegex(shown, r"(?s)Preempted: released its blocks.*Begins again.*Replays positions \d+ to \d+")
        n_rows = tab.run("return document.querySelectorAll('article tbody tr').length")
        self.assertEqual(n_rows, len(what) + 1, "a line for each event, and one for the end")
        self.check_accessibility(tab, "timeline")
        alone = self.request("/v1/chat/completions", LONG)["choices"][0]
        self.assertEqual(answers[0]["token_ids"], alone["token_ids"])

    def test_pictures(self):
        self.wait_until_ready()
        self.request("/v1/chat/completions", {**LONG, "max_tokens": 30})
        number = self.requests(1)[0]["number"]
        answers, threads = self.start_requests()
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

    def test_the_keyboard_reaches_every_view(self):
        tab = self.tab("/#cluster")
        tab.until("document.querySelectorAll('nav a').length === 5", 20, "five views")
        tab.press("Tab")
        self.assertEqual(tab.run("return document.activeElement.className"), "skip")
        names = []
        for _ in range(5):
            tab.press("Tab")
            names.append(tab.run("return document.activeElement.textContent"))
        self.assertEqual(names, ["Chat", "Models", "Cluster", "Requests", "Load"])
        tab.press("Enter")
        tab.until("document.querySelector('h1')?.textContent === 'Load'", 10, "Enter opens the view")

    def test_the_chat_view_sends_no_requests_in_the_background(self):
        tab = self.tab("/#cluster")
        tab.until("document.querySelector('.rank')", 20, "ranks")
        tab.open(self.server.url + "/#chat")
        tab.until("document.querySelector('h1')?.textContent === 'Chat'", 10, "the chat")
        time.sleep(0.5)
        before = len(tab.requested)
        time.sleep(1.5)
        self.assertEqual(tab.requested[before:], [])
