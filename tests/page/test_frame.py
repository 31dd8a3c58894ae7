"""The frame around all views and what each view lets a user do: themes, the palette, conversations, models, filters."""

import json

from common import OVER, READY, PageTest, reload, send, store_settings

CONVERSATIONS = """
    const {fresh, add, save} = await import("/page/conversations.js");
    const {blank} = await import("/page/answer.js");
    for (const text of ["About the sea", "About the sky", "About bread"]) {
      const one = fresh();
      add(one, {role: "user", parent: one.at, text});
      Object.assign(add(one, blank(one.at, null)), {text: `An answer ${text.toLowerCase()}.`, over: "ended"});
      await save(one);
    }
    location.reload();"""
NAMES = "[...document.querySelectorAll('.chats .name')].map((of) => of.textContent)"
# The contrast of each text with the ground behind it, as the browser draws both.
CONTRASTS = """
    const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
    const draw = (color) => {
      const context = document.createElement("canvas").getContext("2d");
      context.fillStyle = color;
      context.fillRect(0, 0, 1, 1);
      return [...context.getImageData(0, 0, 1, 1).data];
    };
    const light = ([r, g, b]) => [r, g, b].map((of) => of / 255)
      .map((of) => (of <= 0.04045 ? of / 12.92 : ((of + 0.055) / 1.055) ** 2.4))
      .reduce((sum, of, at) => sum + of * [0.2126, 0.7152, 0.0722][at], 0);
    const style = getComputedStyle(document.documentElement);
    const of = (name) => {
      const probe = document.createElement("p");
      probe.style.color = `var(--${name})`;
      document.body.append(probe);
      const color = draw(getComputedStyle(probe).color);
      probe.remove();
      return light(color);
    };
    const ratio = (a, b) => (Math.max(of(a), of(b)) + 0.05) / (Math.min(of(a), of(b)) + 0.05);
    return pairs.map(([text, ground]) => [text, ground, ratio(text, ground)]).filter(([, , found]) => found < 4.5);"""
PAIRS = [
    *((text, ground) for text in ("text", "quiet") for ground in ("ground", "side", "raised", "hover")),
    *((text, "ground") for text in ("accent", "good", "warn", "bad")),
    *((f"{kind}", f"{kind}-ground") for kind in ("good", "warn", "bad")),
    ("accent", "tint"), ("on-accent", "accent"),
]


class Frame(PageTest):
    flags = ("--context", "1024")

    def chat(self, **view):
        tab = self.tab("/#chat", **view)
        tab.until(READY, 20, "the chat is ready")
        return tab

    def test_a_theme_is_kept(self):
        tab = self.chat()
        ground = "return getComputedStyle(document.documentElement).backgroundColor"
        light = tab.run(ground)
        tab.click("button[aria-label='Dark theme']")
        dark = tab.run(ground)
        self.assertNotEqual(light, dark)
        reload(tab)
        self.assertEqual(tab.run(ground), dark, "the theme is stored")
        tab.click('button[aria-label="The system\'s theme"]')
        self.assertEqual(tab.run(ground), light)

    def test_colours_have_enough_contrast(self):
        for scheme in ("light", "dark"):
            tab = self.chat(scheme=scheme)
            self.assertEqual(tab.run(CONTRASTS, pairs=PAIRS), [], scheme)

    def test_the_palette_runs_commands(self):
        tab = self.chat()
        tab.press("k", "KeyK", modifiers=2)
        tab.until("document.querySelector('dialog[open] input')", 10, "Ctrl-K opens the palette")
        self.check_accessibility(tab, "the palette")
        tab.call("Input.insertText", text="go to load")
        tab.press("Enter")
        tab.until("document.querySelector('h1')?.textContent === 'Load'", 10, "the command runs")
        self.assertFalse(tab.run("return Boolean(document.querySelector('dialog'))"), "the palette is closed")
        for key in ("g", "c"):
            tab.press(key, f"Key{key.upper()}")
        tab.until("document.querySelector('.compose')", 10, "two keys open the chat")
        tab.until(READY, 20, "the chat is ready")
        tab.run("document.activeElement.blur()")
        tab.press("?", "Slash")
        tab.until("document.querySelector('dialog .shortcuts')", 10, "? lists the shortcuts")
        self.check_accessibility(tab, "the shortcuts")

    def test_conversations_are_found_renamed_pinned_and_removed(self):
        tab = self.chat()
        tab.run(CONVERSATIONS)
        tab.until(f"{NAMES}.length === 3", 20, "three conversations")
        tab.write(".search input", "sky answer")
        tab.until(f"{NAMES}.join() === 'About the sky'", 10, "one has these words")
        self.menu(tab, "About the sky", "Rename")
        tab.until("document.querySelector('dialog input')", 10, "a dialog")
        self.check_accessibility(tab, "renaming")
        tab.run("document.querySelector('dialog input').value = 'Clouds'")
        tab.click("dialog button.main")
        tab.until(f"{NAMES}.join() === 'Clouds'", 10, "it has the name")
        tab.run("const input = document.querySelector('.search input'); input.value = '';"
                "input.dispatchEvent(new Event('input'))")
        tab.until(f"{NAMES}.length === 3", 10, "all are listed again")
        self.menu(tab, "About the sea", "Pin")
        tab.until(f"{NAMES}[0] === 'About the sea'", 10, "a pinned one is the first")
        self.menu(tab, "Clouds", "Delete")
        tab.until(f"{NAMES}.length === 2", 10, "it is removed")

    def menu(self, tab, name, entry):
        tab.click(f"button[aria-label='Change: {name}']")
        tab.until("document.querySelector('.menu')", 10, "a menu")
        tab.click(".menu button", entry)

    def test_conversations_move_to_another_browser(self):
        tab = self.chat()
        tab.run(CONVERSATIONS)
        tab.until(f"{NAMES}.length === 3", 20, "three conversations")
        text = tab.run('const {all, exported} = await import("/page/conversations.js"); return exported(await all());')
        other = self.chat()
        imported = 'const {imported} = await import("/page/conversations.js"); return imported(text);'
        self.assertEqual(other.run(imported, text=text), 3)
        other.run("location.reload()")
        other.until(f"{NAMES}.length === 3", 20, "all are there")
        self.assertEqual(sorted(other.run(f"return {NAMES}")), ["About bread", "About the sea", "About the sky"])
        circle = {"turns": [{"id": 1, "role": "user", "parent": 1, "text": "its own parent"}]}
        for wrong in ({}, {"turns": [{"role": "user"}]}, circle):
            text = json.dumps({"lockstep": "conversations", "version": 1, "conversations": [wrong]})
            with self.assertRaises(AssertionError):
                other.run(imported, text=text)
        self.assertEqual(len(other.run(f"return {NAMES}")), 3, "none of them was stored")

    def test_the_prompt_shows_what_was_reused(self):
        tab = self.chat()
        store_settings(tab, model="smollm2", temperature=0, max_tokens=4)
        reload(tab)
        for at in (2, 4):
            send(tab, "Tell me a short story about a lighthouse and the sea at night.")
            tab.until(f"{OVER} && document.querySelectorAll('.turn').length === {at}", 60, "the answer is over")
        tab.click(".turn.assistant:last-child button.link")
        tab.until("document.querySelector('mark.computed')", 20, "the prompt is shown")
        shown = tab.run("return ['reused', 'computed'].map((of) => document.querySelector(`mark.${of}`).textContent)")
        turn = "return JSON.stringify([...document.querySelectorAll('dialog dd')].map((of) => of.textContent))"
        reused, computed = json.loads(tab.run(turn))[:2]
        usage = int(reused) + int(computed)
        prompt = {"model": "smollm2", "prompt": "".join(shown), "add_special_tokens": False}
        rendered = self.request("/tokenize", prompt)
        self.assertEqual(rendered["count"], usage, "the text is the prompt")
        self.assertGreater(int(reused), 0)
        self.assertIn("lighthouse", "".join(shown))
        self.check_accessibility(tab, "the prompt")

    def test_models_are_listed_with_what_fits(self):
        rows = "document.querySelectorAll('tbody tr').length > 5"
        self.pictures("/#models", "models", lambda tab: tab.until(rows, 60, "the models"))
        tab = self.tab("/#models")
        tab.until(rows, 60, "the models")
        listed = self.request("/models/machine")
        shown = tab.text("main")
        self.assertIn("smollm2", shown)
        for model in listed["catalogue"]:
            self.assertIn(model["model"], shown)
        self.assertTrue(any(model["fit"]["fits"] for model in listed["catalogue"]))

    def test_requests_are_filtered_and_keep_the_focus(self):
        for n in range(3):
            self.request("/v1/completions", {"model": "smollm2", "prompt": f"number {n}", "max_tokens": 2})
        tab = self.tab("/#requests")
        rows = "[...document.querySelectorAll('.list a.row')]"
        tab.until(f"{rows}.length >= 3", 20, "requests")
        n_all = tab.run(f"return {rows}.length")
        tab.click(".segments button:last-child")
        tab.until(f"{rows}.length === 0", 10, "none has failed")
        tab.click(".segments button:first-child")
        tab.until(f"{rows}.length === {n_all}", 10, "all again")
        focused = tab.run(f"const row = {rows}[1]; row.focus(); return row.getAttribute('href')")
        self.request("/v1/completions", {"model": "smollm2", "prompt": "one more", "max_tokens": 2})
        tab.until(f"{rows}.length === {n_all} + 1", 10, "one more")
        self.assertEqual(tab.run("return document.activeElement.getAttribute('href')"), focused)
        tab.press("Enter")
        tab.until("document.querySelector('.waterfall')", 10, "its time line")
        self.check_accessibility(tab, "one request")

    def test_charts_have_values_and_two_ranges(self):
        self.request("/v1/completions", {"model": "smollm2", "prompt": "a", "max_tokens": 2})
        tab = self.tab("/#load")
        tab.until("document.querySelectorAll('svg.chart').length === 6", 20, "charts")
        tab.click(".segments button", "Last 5 minutes")
        tab.run("document.querySelector('svg.chart').focus()")
        tab.press("ArrowLeft")
        self.assertRegex(tab.text("figure .at"), r"^now: generated [\d.]+/s, in prompts [\d.]+/s$")
        drawn = tab.run("""
            const {Chart} = await import("/page/chart.js");
            const chart = new Chart("Title", (n) => `${n} ms`);
            document.querySelector("main").append(chart.node);
            const lines = [{name: "a", values: [1, null, 37]}, {name: "b", values: [0, 4, 2]}];
            chart.show(lines, (at) => `${2 - at} min ago`);
            const key = (key) => chart.svg.dispatchEvent(new KeyboardEvent("keydown", {key}));
            ["ArrowLeft", "ArrowLeft"].forEach(key);
            const scale = [...chart.node.querySelectorAll(".scale span")].map((of) => of.textContent);
            return [chart.value.textContent, scale, chart.svg.getAttribute("aria-label")];""")
        self.assertEqual(drawn, ["1 min ago: a –, b 4 ms", ["50 ms", "25 ms", "0"],
                                 "Title from 2 min ago to now. Highest 37 ms. Now a 37 ms, b 2 ms"])
