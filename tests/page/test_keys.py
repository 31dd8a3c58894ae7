"""What each user sees if the server requires keys."""

import tempfile
import urllib.error

from browser import until
from common import PageTest

KEYS = "alice:key-of-alice\nbob:key-of-bob\nann:key-of-ann role=operator\n"
WORDS = "a prompt that no other key may read"


class Keys(PageTest):
    @classmethod
    def setUpClass(cls):
        cls.keys = tempfile.NamedTemporaryFile("w", suffix=".keys")
        cls.keys.write(KEYS)
        cls.keys.flush()
        cls.flags = ("--api-keys", cls.keys.name)
        super().setUpClass()

    def open_with_key(self, key, path="/"):
        tab = self.tab(path)
        tab.until("document.querySelector('#key input')", 20, "the page shows a form for a key")
        self.check_accessibility(tab, "the key")
        self.assertTrue(self.is_empty(tab), "without a key the page is empty")
        tab.write("input[name=key]", key)
        tab.press("Enter")
        return tab

    def is_empty(self, tab):
        return tab.run("return !document.querySelector('nav a, .view, .of-view *')")

    def test_a_wrong_key_sees_nothing(self):
        tab = self.open_with_key("key-of-none")
        tab.until("document.getElementById('key')?.textContent.includes('unknown')", 10, "the key is refused")
        self.assertTrue(self.is_empty(tab))
        for path in ("/viewer", "/requests", "/cluster", "/load/hour", "/events?of=requests"):
            with self.assertRaises(urllib.error.HTTPError) as refused:
                self.request(path, key="key-of-none")
            self.assertEqual(refused.exception.code, 401, path)
            refused.exception.close()

    def test_a_tenant_sees_its_requests_and_an_operator_all_without_texts(self):
        for name in ("alice", "bob"):
            body = {"model": "smollm2", "prompt": WORDS, "max_tokens": 3}
            self.request("/v1/completions", body, key=f"key-of-{name}")
        tab = self.open_with_key("key-of-alice")
        tab.until("document.querySelectorAll('nav a').length === 3", 20, "three views")
        self.assertEqual(tab.text("nav").split(), ["Chat", "Models", "Requests"])
        tab.click("nav a", "Requests")
        tab.until("document.querySelector('.row[href*=\"/\"]')", 10, "its request")
        self.assertNotIn("bob", tab.text("main"))
        operator = self.open_with_key("key-of-ann", "/#requests")
        operator.until(
            "document.body.innerText.includes('bob') && document.body.innerText.includes('alice')",
            20,
            "the requests of all tenants",
        )
        operator.click("nav a", "Cluster")
        operator.until("document.querySelector('.rank.ready')", 20, "the cluster")
        for one in (tab, operator):
            self.assertNotIn(WORDS, one.run("return document.documentElement.outerHTML"))
            self.assertFalse(
                [url for url in one.requested if "key-of" in url or "prompt" in url], "no URL has a key or a prompt"
            )

    def test_the_page_is_empty_after_its_key_is_removed(self):
        tab = self.open_with_key("key-of-bob")
        tab.until("document.querySelectorAll('nav a').length === 3", 20, "three views")
        tab.click("nav a", "Requests")
        tab.until("document.querySelector('h1')?.textContent === 'Requests'", 10, "requests")
        self.keys.seek(0)
        self.keys.truncate()
        self.keys.write(KEYS.replace("bob:key-of-bob\n", ""))
        self.keys.flush()
        try:
            tab.until("document.querySelector('#key input')", 20, "the page requires a key again")
            self.assertTrue(self.is_empty(tab))
        finally:
            self.keys.seek(0)
            self.keys.truncate()
            self.keys.write(KEYS)
            self.keys.flush()
        until(lambda: self.is_valid("key-of-bob"), 20, "the key is valid again")

    def is_valid(self, key):
        try:
            return self.request("/viewer", key=key)
        except urllib.error.HTTPError as error:
            error.close()
            return False
