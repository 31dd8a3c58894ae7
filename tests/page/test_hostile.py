"""Hostile answers: the page shows them, and runs nothing of them."""

import time

from common import LAST, OVER, PICTURES, READY, PageTest, act, send
from hostile import ANSWERS, Hostile


class HostileAnswers(PageTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.bad = Hostile(cls.server.url)
        cls.addClassCleanup(cls.bad.close)

    def shown(self, kind):
        tab = self.tab("/#chat", url=self.bad.url)
        tab.until(READY, 20, "the models are listed")
        send(tab, kind)
        tab.until(OVER, 60, f"{kind} is over")
        harmed = tab.run(
            "const names = ['script', 'iframe', 'img', 'base', 'style', 'svg:not(.icon)'];"
            "const bad = names.map((name) => `main ${name}`).join();"
            "return [window.harmed ?? null, document.querySelectorAll(bad).length]"
        )
        self.assertEqual(harmed, [None, 0], kind)
        return tab

    def test_html_is_text(self):
        tab = self.shown("html")
        text = tab.run(f"return {LAST}.querySelector('.content').textContent")
        self.assertEqual(text, ANSWERS["html"])
        act(tab, "Probabilities")
        tab.run("document.querySelector('.token').focus()")
        self.assertIn("<script>", tab.text(".alternatives"))
        self.assertEqual(tab.run("return window.harmed ?? null"), None)
        tab.screenshot(PICTURES / "hostile.png")

    def test_links_show_their_targets(self):
        tab = self.shown("links")
        links = tab.run(f"return [...{LAST}.querySelectorAll('.content a')].map((a) => [a.href, a.textContent, a.rel])")
        self.assertTrue(links)
        for href, text, rel in links:
            self.assertTrue(href.startswith(("http://", "https://")), href)
            self.assertIn(href.rstrip("/"), text, "a link shows its target")
            self.assertIn("noopener", rel)

    def test_invisible_characters_are_shown_by_their_code_points(self):
        for kind, chars in (("ansi", "\x1b\x07\x00\x08"), ("bidi", "\u202e\u2066\u2069")):
            text = self.shown(kind).run(f"return {LAST}.querySelector('.content').textContent")
            self.assertFalse(set(chars) & set(text), f"{kind}: {text!r}")
            self.assertIn(f"\u2039{ord(chars[0]):04x}\u203a", text)

    def test_words_in_tables_are_whole(self):
        tab = self.shown("markdown")
        breaks = tab.run(
            f"return [...{LAST}.querySelectorAll('.content td')].map((cell) => getComputedStyle(cell).overflowWrap)"
        )
        self.assertTrue(breaks and set(breaks) == {"break-word"}, breaks)

    def test_markup_takes_time_in_proportion_to_the_text(self):
        """Repeats each delimiter 100,000 times, after a prefix that may change its meaning."""
        tab = self.tab("/#chat", url=self.bad.url)
        slowest = tab.run("""
            const {finalLength, markdown} = await import("/page/markdown.js");
            let slowest = [0, ""];
            const starts = ["", "|", "x ", "# ", "- ", "> ", "```", "```js\\n", "[", "a|b\\n", "$", "$$", "\\\\("];
            for (const start of starts) {
              const delimiters = [
                ..."*_`~[]()| >#!<&", "| ", " |", "> ", "- ", "\\n", "\\\\", "**a", "](", "~~", "$", "$x",
                "$ a", "\\\\(", "\\\\[x", "\\\\frac", "{", "^",
              ];
              for (const delimiter of delimiters) {
                const text = start + delimiter.repeat(100000);
                const began = performance.now();
                finalLength(text, 0);
                markdown(text);
                const took = performance.now() - began;
                if (took > slowest[0]) slowest = [took, JSON.stringify([start, delimiter])];
              }
            }
            return slowest;""")
        self.assertLess(slowest[0], 4000, slowest)

    def test_nested_and_repeated_markup_is_fast(self):
        for kind in ("quotes", "stars", "lists", "table", "lines", "megabyte"):
            began = time.monotonic()
            tab = self.shown(kind)
            took = time.monotonic() - began
            n_nodes = tab.run("return document.querySelectorAll('*').length")
            self.assertLess(n_nodes, 60_000, kind)
            # The page still responds at once.
            began = time.monotonic()
            act(tab, "Probabilities")
            tab.until("document.querySelector('.tokens')", 10, "tokens")
            print(
                f"{kind}: shown after {took:.1f} s, {n_nodes} nodes, a click after {time.monotonic() - began:.2f} s"
            )
            if kind == "megabyte":
                self.assertEqual(tab.run(f"return {LAST}.querySelector('.content').textContent"), ANSWERS[kind])

    def test_markdown_is_drawn(self):
        tab = self.shown("markdown")
        of = tab.run(
            f"const n = (name) => {LAST}.querySelectorAll('.content ' + name).length;"
            "return ['.heading', 'strong', 'code', 'pre', 'ul', 'li', 'table', 'td'].map(n)"
        )
        self.assertEqual(of, [1, 1, 2, 1, 1, 2, 1, 2])
        self.check_accessibility(tab, "markdown")

    def test_code_formulas_tasks_and_alignment_are_drawn(self):
        tab = self.shown("rich")
        of = tab.run(
            f"const n = (name) => {LAST}.querySelectorAll('.content ' + name).length;"
            "return ['math', 'math[display=block] mfrac', 'msqrt', 'munderover, msubsup', 'mtable', 'li.task',"
            " '.t-key', '.t-str', '.t-com', 'td.to-end', 'td.to-center'].map(n)"
        )
        self.assertEqual(of, [3, 1, 1, 1, 1, 2, 2, 1, 1, 1, 1])
        self.assertIn("\\unknown{x}", tab.text(".turn.assistant:last-child"), "other commands stay text")
        self.check_accessibility(tab, "rich markup")

    def test_calls_are_cards_that_take_results(self):
        tab = self.shown("calls")
        names = "return [...document.querySelectorAll('.call h2')].map((of) => of.textContent)"
        self.assertEqual(tab.run(names), ["weather", "<b>clock</b>"])
        self.assertIn('"city": "Paris"', tab.text(".call pre"))
        self.check_accessibility(tab, "calls")
        for at, text in enumerate(("sunny", "noon")):
            tab.run("document.querySelectorAll('.call textarea')[at].value = text", at=at, text=text)
        tab.click(".calls button.main")
        tab.until(f"{OVER} && {LAST}.innerText.includes('tool?')", 20, "the answer behind the results")
        sent = self.bad.requests[-1]["messages"]
        self.assertEqual([message["role"] for message in sent], ["user", "assistant", "tool", "tool"])
        self.assertEqual([call["id"] for call in sent[1]["tool_calls"]], ["call-1", "call-2"])
        self.assertEqual(
            [(message["tool_call_id"], message["content"]) for message in sent[2:]],
            [("call-1", "sunny"), ("call-2", "noon")],
        )

    def test_thoughts_can_be_closed_and_switched_off(self):
        tab = self.shown("thought")
        self.assertFalse(tab.run(f"return {LAST}.querySelector('.thought').open"), "a thought is closed at first")
        tab.click(".thought summary")
        thought = "[...document.querySelectorAll('.thought')].at(-1).innerText"
        tab.until(f"{thought}.includes('First, <i>think</i>.')", 10, "it opens")
        tab.click("button.chip", "Think")
        send(tab, "html")
        tab.until(f"{OVER} && document.querySelectorAll('.turn').length === 4", 20, "another answer")
        self.assertIs(self.bad.requests[-1]["chat_template_kwargs"]["enable_thinking"], False)

    def test_tools_and_a_schema_are_sent(self):
        tab = self.tab("/#chat", url=self.bad.url)
        tab.until(READY, 20, "the models are listed")
        tab.click("button[aria-label=Settings]")
        tab.write("textarea[name=tools]", '{"name": "weather"')
        self.assertIn("Not used", tab.text("#about-tools"))
        tab.write("textarea[name=tools]", "}")
        tab.write("textarea[name=schema]", '{"type": "object"}')
        tab.run("document.querySelector('.settings').dispatchEvent(new Event('change'))")
        self.check_accessibility(tab, "the settings")
        send(tab, "html")
        tab.until(OVER, 20, "the answer is over")
        sent = self.bad.requests[-1]
        self.assertEqual(sent["tools"], [{"type": "function", "function": {"name": "weather"}}])
        self.assertEqual(sent["response_format"]["json_schema"]["schema"], {"type": "object"})
