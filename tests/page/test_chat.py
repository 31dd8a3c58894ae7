"""Chats with a model: the page shows what the API returns, through reloads, edits and a second run."""

import re
import unittest

from common import LAST, OVER, READY, PageTest, act, reload, send, store_settings

PROMPT = "Write a long story about a lighthouse, a storm and a ship."
STORED = """
    const done = (request) => new Promise((resolve) => {
      request.onsuccess = () => resolve(request.result);
    });
    const opened = await done(indexedDB.open("lockstep", 1));
    const all = await done(opened.transaction("conversations").objectStore("conversations").getAll());
    opened.close();
    const newest = all.sort((a, b) => b.changed - a.changed)[0];
    const turn = newest?.turns.filter((turn) => turn.role === "assistant").at(-1);
    const {body} = await import("/page/conversations.js");
    return turn ? {...turn, body: body(newest, turn)} : null;"""


class Chats(PageTest):
    flags = ("--context", "1024")

    def chat(self, **settings):
        tab = self.tab("/")
        store_settings(tab, model="smollm2", **settings)
        reload(tab)
        return tab

    def api_choice(self, turn):
        body = {**turn["body"], "seed": int(turn["seed"])}
        return self.request("/v1/chat/completions", body)["choices"][0]

    def test_an_answer_is_what_the_api_returns(self):
        tab = self.chat(temperature=0.8, seed=7, max_tokens=48, logprobs=True)
        send(tab, "Name three colours.")
        tab.until(OVER, 60, "the answer is over")
        turn = tab.run(STORED)
        choice = self.api_choice(turn)
        self.assertEqual((turn["text"], turn["ids"]), (choice["message"]["content"], choice["token_ids"]))
        self.assertEqual(turn["certificate"], choice["certificate"])
        # The page shows the text without its markup.
        shown = tab.run(f"return {LAST}.querySelector('.content').innerText")
        words = re.compile(r"[A-Za-z]{2,}")
        self.assertEqual(words.findall(shown), words.findall(turn["text"]))
        act(tab, "Verify")
        tab.until(
            f"{LAST}.innerText.includes('all {len(turn['ids'])} tokens are the same')", 60, "the second answer is equal"
        )
        usage = turn["usage"]
        stats = tab.text(".turn.assistant:last-child .stats")
        used = f"{usage['total_tokens']} of 1024 context"
        for part in (f"{len(turn['ids'])} tokens", "tokens/s", "first token", used):
            self.assertIn(part, stats)
        act(tab, "Probabilities")
        tab.until(f"{LAST}.querySelectorAll('.token').length === {len(turn['tokens'])}", 10, "its tokens are shown")
        tab.run(f"{LAST}.querySelector('.token').focus()")
        tab.press("ArrowRight")
        self.assertIn("%", tab.text(".alternatives"))
        self.check_accessibility(tab, "tokens")

    def test_an_answer_continues_after_a_reload(self):
        tab = self.chat(temperature=1, seed=11, max_tokens=400, logprobs=False)
        send(tab, PROMPT)
        tab.until(f"{LAST}?.querySelector('.content').innerText.length > 60", 60, "the answer has begun")
        tab.run("location.reload()")
        tab.until("document.querySelector('.turn.assistant')", 20, "the conversation is shown again")
        self.assertFalse(tab.run(f"return {OVER}"), "the answer was not over")
        tab.until(OVER, 180, "the answer is complete")
        turn = tab.run(STORED)
        self.assertEqual((turn["over"], turn["broken"]), ("ended", None))
        choice = self.api_choice(turn)
        self.assertEqual((turn["text"], turn["ids"]), (choice["message"]["content"], choice["token_ids"]))

    def test_stop_continue_edit_and_branch(self):
        tab = self.chat(temperature=1, max_tokens=300, logprobs=False)
        send(tab, PROMPT)
        tab.until(f"{LAST}?.querySelector('.content').innerText.length > 20", 60, "the answer has begun")
        tab.click(".compose button[aria-label=Stop]")
        tab.until(f"{OVER} && {LAST}.innerText.includes('Stopped')", 10, "the answer stops")
        first = tab.run(STORED)
        act(tab, "Continue")
        tab.until(f"!({OVER})", 20, "a new answer begins")
        tab.until(
            f"{LAST}.querySelector('.content').innerText.length > {len(first['text'])} + 20", 60, "it has more text"
        )
        tab.click(".compose button[aria-label=Stop]")
        tab.until(OVER, 10, "the new answer stops")
        second = tab.run(STORED)
        self.assertTrue(second["text"].startswith(first["text"]), "the answer goes on behind the first text")
        act(tab, "Verify")
        tab.until(f"{LAST}.innerText.includes('all {len(second['ids'])} tokens are the same')", 60, "it is verified")
        self.assertIn("2 of 2", tab.text(".turn.assistant"))
        tab.click("button[aria-label='Previous version']")
        tab.until(f"{LAST}.innerText.includes('1 of 2')", 10, "the previous version")
        act(tab, "Regenerate")
        tab.until(f"!({OVER})", 20, "another answer begins")
        tab.click(".compose button[aria-label=Stop]")
        tab.until(f"{OVER} && {LAST}.innerText.includes('3 of 3')", 10, "it is a third version")
        act(tab, "Edit", ".turn.user")
        tab.run("document.querySelector('.turn.user textarea').value = 'Say hello.'")
        tab.click(".turn.user .extra button", "Send")
        tab.until(f"document.querySelector('.turn.user').innerText.includes('Say hello.')", 10, "the edited turn")
        tab.until(OVER, 90, "its answer")
        self.assertIn("2 of 2", tab.text(".turn.user"))
        act(tab, "Branch into a new conversation")
        tab.until("document.querySelectorAll('.chats .name').length === 2", 20, "a second conversation")
        self.assertEqual(tab.run("return document.querySelectorAll('.turn').length"), 2)
        act(tab, "Delete from here", ".turn.user")
        tab.until("document.querySelector('.welcome')", 10, "the conversation is empty")

    def test_answers_continue_while_another_conversation_is_shown(self):
        tab = self.chat(temperature=1, seed=12, max_tokens=200, logprobs=False)
        send(tab, PROMPT)
        tab.until(f"{LAST}?.querySelector('.content').innerText.length > 20", 60, "the answer has begun")
        tab.click("button.new", "New conversation")
        tab.until("!document.querySelector('.turn')", 10, "the new conversation is empty")
        send(tab, "Say hello.")
        tab.click("nav a", "Requests")
        tab.until("!document.querySelector('.compose')", 10, "another view")
        tab.click("nav a", "Chat")
        tab.until("document.querySelectorAll('.chats li').length === 2", 20, "both are listed")
        tab.until("!document.querySelector('.chats button[aria-busy]')", 120, "both answers are over")
        tab.click(".chats li:last-child button:first-child")
        tab.until(OVER, 20, "the first conversation is shown")
        turns = tab.run("""
            const {all} = await import("/page/conversations.js");
            return (await all()).map(({turns}) => turns.at(-1));""")
        self.assertEqual([(turn["over"], turn["broken"]) for turn in turns], [("ended", None)] * 2)
        self.assertEqual({turn["usage"]["completion_tokens"] for turn in turns if turn["reason"] == "length"}, {200})

    def test_a_conversation_is_stored_once(self):
        tab = self.chat(max_tokens=4, logprobs=False)
        n_bytes = tab.run("""
            const {fresh, add, save, one, body} = await import("/page/conversations.js");
            const {blank} = await import("/page/answer.js");
            const all = fresh();
            for (let n = 0; n < 100; n++) {
              add(all, {role: "user", parent: all.at, text: "a question ".repeat(100)});
              const answer = add(all, blank(all.at, {model: "m", system: "Be brief."}));
              Object.assign(answer, {text: "an answer ".repeat(100), over: "ended"});
            }
            await save(all);
            const stored = await one(all.id);
            const {messages} = body(stored, stored.turns.at(-1));
            return [JSON.stringify(stored).length, messages.length, messages[0].content];""")
        self.assertEqual(n_bytes[1:], [200, "Be brief."])
        self.assertLess(n_bytes[0], 260_000, "the messages have 210,000 characters")

    def test_a_long_prompt_shows_its_progress(self):
        tab = self.chat(max_tokens=4, logprobs=False)
        tab.run("""
            window.states = new Set();
            const states = () => [...document.querySelectorAll(".turn .state")].map((node) => node.textContent);
            const look = () => states().forEach((state) => window.states.add(state));
            const all = {subtree: true, childList: true, characterData: true};
            new MutationObserver(look).observe(document.body, all);""")
        send(tab, "one two three four five six seven eight " * 90)
        tab.until(OVER, 120, "the answer is over")
        states = tab.run("return [...window.states]")
        self.assertTrue(any(re.match(r"Reading the prompt: \d+ of \d+ tokens", state) for state in states), states)

    def test_on_a_phone_the_chat_comes_first(self):
        tab = self.tab("/#chat", width=390, height=800)
        tab.until(READY, 20, "the chat is shown")
        visible = "getComputedStyle(document.getElementById('side')).visibility === 'visible'"
        self.assertFalse(tab.run(f"return {visible}"), "the navigation is closed")
        bottom = tab.run("return document.querySelector('textarea[name=text]').getBoundingClientRect().bottom")
        self.assertLess(bottom, 800, "the message box is on the first screen")
        tab.click("button.drawer")
        tab.until(visible, 10, "the navigation opens")
        self.check_accessibility(tab, "the drawer")
        tab.click("nav a", "Requests")
        tab.until(f"!({visible}) && document.querySelector('h1')?.textContent === 'Requests'", 10, "it closes")

    def test_two_hundred_messages(self):
        tab = self.chat(max_tokens=4)
        tab.run("""
            const {fresh, add, save} = await import("/page/conversations.js");
            const {blank} = await import("/page/answer.js");
            const all = fresh();
            for (let n = 0; n < 100; n++) {
              add(all, {role: "user", parent: all.at, text: `Question ${n}`});
              const text = `**Answer** ${n}\\n\\n~~~\\ncode ${n}\\n~~~`;
              Object.assign(add(all, blank(all.at, null)), {text, over: "ended"});
            }
            await save(all);
            location.reload();""")
        tab.until("document.querySelectorAll('.turn').length === 200", 20, "all turns are shown")
        self.assertEqual(tab.run("return document.querySelectorAll('.turn.assistant pre').length"), 100)

    def test_pictures(self):
        def ready(tab):
            store_settings(tab, model="smollm2", temperature=0, max_tokens=40, logprobs=True)
            reload(tab)
            send(tab, "Name three colours.")
            tab.until(OVER, 60, "the answer is over")
            act(tab, "Probabilities")
            tab.run("document.querySelector('.token:nth-child(4)').focus()")

        self.pictures("/#chat", "chat", ready)


class Replicas(PageTest):
    flags = ("--context", "512", "--replicas", "2", "--threads", "1")

    def test_another_replica_verifies_an_answer(self):
        tab = self.tab("/#chat")
        tab.until(READY, 20, "the chat is ready")
        store_settings(tab, model="smollm2", temperature=1, seed=5, max_tokens=16)
        reload(tab)
        send(tab, "Name three colours.")
        tab.until(OVER, 60, "the answer is over")
        act(tab, "Verify")
        tab.until(f"{LAST}.innerText.includes('tokens are the same')", 60, "it is verified")
        self.assertRegex(tab.text(".badge.good"), r"computed again on (\S+) \(before: (?!\1)\S+\)")


if __name__ == "__main__":
    unittest.main()
