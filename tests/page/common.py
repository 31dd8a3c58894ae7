"""One browser for all tests, tabs that are checked at the end, and requests to the server without the page."""

import atexit
import json
import os
import unittest
import urllib.request
from functools import cache
from importlib.resources import files
from pathlib import Path

from browser import Browser
from server import Server

PICTURES = Path(os.environ.get("PAGE_PICTURES", "."))
VIEWS = {"light": {}, "dark": {"scheme": "dark"}, "phone": {"width": 390, "height": 800}}


@cache
def browser():
    made = Browser()
    atexit.register(made.close)
    return made


@cache
def axe():
    return (files("axe_playwright_python") / "axe.min.js").read_text()


class PageTest(unittest.TestCase):
    flags, model = (), "smollm2"

    @classmethod
    def setUpClass(cls):
        cls.server = Server(*cls.flags, model=cls.model)
        cls.addClassCleanup(cls.server.stop)

    def tab(self, path="/", url=None, **view):
        """Opens a tab. At the test's end it is closed and checked: requests only to its own origin, and no error."""
        own = url or self.server.url
        tab = browser().tab(own + path, **view)

        def check():
            foreign = [url for url in tab.requested if not url.startswith((own + "/", "about:"))]
            errors = tab.errors
            tab.close()
            self.assertEqual((foreign, errors), ([], []))

        self.addCleanup(check)
        return tab

    def check_accessibility(self, tab, what):
        """Checks that axe-core finds no violation of accessibility rules."""
        tab.call("Runtime.evaluate", expression=axe())
        found = tab.run(
            "const report = await axe.run(document, {resultTypes: ['violations']});"
            "const first = (of) => of.nodes.slice(0, 3).map((node) => node.html + ' ' + node.failureSummary);"
            "return report.violations.map((of) => [of.id, of.help, first(of)]);"
        )
        self.assertEqual(found, [], f"{what}: {json.dumps(found, indent=1)}")

    def pictures(self, path, name, ready):
        for kind, view in VIEWS.items():
            tab = self.tab(path, **view)
            ready(tab)
            self.check_accessibility(tab, f"{name}, {kind}")
            wide = tab.run("return document.documentElement.scrollWidth - innerWidth")
            self.assertLessEqual(wide, 0, f"{name}, {kind}: the page is wider than its window")
            tab.screenshot(PICTURES / f"{name}-{kind}.png")

    def request(self, path, body=None, key=None, base=None):
        head = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        data = None if body is None else json.dumps(body).encode()
        message = urllib.request.Request((base or self.server.url) + path, data=data, headers=head)
        with urllib.request.urlopen(message, timeout=120) as reply:
            return json.load(reply)


def store_settings(tab, **settings):
    """Writes values of the settings to this browser's storage, as a user's last ones."""
    tab.run("localStorage.setItem('lockstep chat settings', JSON.stringify(values))", values=settings)


def send(tab, text):
    tab.until(READY, 20, "the chat is ready")
    tab.write("textarea[name=text]", text)
    tab.press("Enter")


def reload(tab):
    tab.run("window.isOld = true; location.reload()")
    tab.until(f"!window.isOld && {READY}", 20, "the chat is ready again")


def act(tab, name, on=".turn.assistant:last-child"):
    """Presses a button below a message, or one in the menu there."""
    if not tab.run("return Boolean(document.querySelector(of))", of=f"{on} button[aria-label='{name}']"):
        tab.click(f"{on} button[aria-label=More]")
        return tab.click(".menu button", name)
    tab.click(f"{on} button[aria-label='{name}']")


READY = "document.querySelector('select[name=model]')?.value && !document.querySelector('button[aria-label=Stop]')"
LAST = "document.querySelector('.turn.assistant:last-child')"
OVER = f"{LAST} && {LAST}.getAttribute('aria-busy') === 'false'"
