"""What each user sees if the server requires keys."""

import tempfile
import urllib.error

from browser import until
from common import PageTest

KEYS = "alice:key-of-alice\nbob:key-of-bob\nann:key-of-ann role=operator\n"
WORDS = "a prompt that nobody else may read"


class Keys(PageTest):
    @classmethod
    def setUpClass(cls):
        cls.keys = tempfile.NamedTemporaryFile("w", suffix=".keys")
        cls.keys.write(KEYS)
        cls.keys.flush()
        cls.flags = ("--api-keys", cls.keys.name)
        super().setUpClass()

    def entered(self, key, path="/"):
        tab = self.tab(path)
        tab.until("document.getElementById('key')?.hidden === false", 20, "a key is asked for")
        self.judge_access(tab, "the key")
        self.assertEqual(tab.text("main").strip(), "", "without a key there is nothing")
        tab.write("input[name=key]", key)
        tab.press("Enter")
        return tab

    def test_a_wrong_key_sees_nothing(self):
        tab = self.entered("key-of-nobody")
        tab.until("document.getElementById('told').textContent.includes('not known')", 10, "it is refused")
        self.assertEqual(
            (tab.text("main").strip(), tab.run("return document.querySelectorAll('nav a').length")), ("", 0)
        )
        for path in ("/viewer", "/requests", "/cluster", "/load/hour", "/events?of=requests"):
            with self.assertRaises(urllib.error.HTTPError) as refused:
                self.ask(path, key="key-of-nobody")
            self.assertEqual(refused.exception.code, 401, path)
            refused.exception.close()

    def test_a_tenant_sees_its_own_and_an_operator_all_without_words(self):
        for name in ("alice", "bob"):
            self.ask("/v1/completions", {"model": "smollm2", "prompt": WORDS, "max_tokens": 3}, key=f"key-of-{name}")
        tab = self.entered("key-of-alice")
        tab.until("document.querySelectorAll('nav a').length === 2", 20, "two views")
        self.assertEqual(tab.text("nav").split(), ["Chat", "Requests"])
        tab.click("nav a", "Requests")
        tab.until("document.querySelector('.row[href*=\"/\"]')", 10, "its request")
        self.assertNotIn("bob", tab.text("main"))
        operator = self.entered("key-of-ann", "/#requests")
        operator.until(
            "document.body.innerText.includes('bob') && document.body.innerText.includes('alice')",
            20,
            "everybody's requests",
        )
        operator.click("nav a", "Cluster")
        operator.until("document.querySelector('.rank.ready')", 20, "the cluster")
        for one in (tab, operator):
            self.assertNotIn(WORDS, one.run("return document.documentElement.outerHTML"))
            self.assertFalse(
                [asked for asked in one.asked if "key-of" in asked or "prompt" in asked], "nothing in an address"
            )

    def test_a_page_ends_with_its_key(self):
        tab = self.entered("key-of-bob")
        tab.until("document.querySelectorAll('nav a').length === 2", 20, "two views")
        tab.click("nav a", "Requests")
        tab.until("document.querySelector('h1')?.textContent === 'Requests'", 10, "requests")
        self.keys.seek(0)
        self.keys.truncate()
        self.keys.write(KEYS.replace("bob:key-of-bob\n", ""))
        self.keys.flush()
        try:
            tab.until(
                "!document.getElementById('key').hidden && document.querySelector('main').innerText.trim() === ''",
                20,
                "nothing is left",
            )
        finally:
            self.keys.seek(0)
            self.keys.truncate()
            self.keys.write(KEYS)
            self.keys.flush()
        until(lambda: self.works("key-of-bob"), 20, "the key is known again")

    def works(self, key):
        try:
            return self.ask("/viewer", key=key)
        except urllib.error.HTTPError as error:
            error.close()
            return False
