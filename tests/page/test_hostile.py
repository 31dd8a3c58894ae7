"""Hostile answers: the page shows them, and runs nothing of them."""

import time

from common import LAST, OVER, PICTURES, PageTest, send
from hostile import ANSWERS, Hostile


class HostileAnswers(PageTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.bad = Hostile(cls.server.url)
        cls.addClassCleanup(cls.bad.close)

    def shown(self, kind):
        tab = self.tab("/#chat", url=self.bad.url)
        tab.until("document.querySelector('select[name=model]')?.options.length > 0", 20, "the models are listed")
        send(tab, kind)
        tab.until(OVER, 60, f"{kind} is over")
        harmed = tab.run(
            "const bad = ['script', 'iframe', 'img', 'base', 'style', 'svg'].map((name) => `main ${name}`).join();"
            "return [window.harmed ?? null, document.querySelectorAll(bad).length]"
        )
        self.assertEqual(harmed, [None, 0], kind)
        return tab

    def test_html_is_text(self):
        tab = self.shown("html")
        text = tab.run(f"return {LAST}.querySelector('.content').textContent")
        self.assertEqual(text, ANSWERS["html"])
        tab.click(".turn.assistant button", "Tokens")
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
            for (const start of ["", "|", "x ", "# ", "- ", "> ", "```", "[", "a|b\\n"]) {
              const delimiters = [..."*_`~[]()| >#!<&", "| ", " |", "> ", "- ", "\\n", "\\\\", "**a", "](", "~~"];
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
            tab.click(".turn.assistant button", "Tokens")
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
