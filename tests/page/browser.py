"""Headless Chromium, driven by the DevTools protocol: the browser, its tabs and their requests. Knows no page.

Each tab records its requests, exceptions and console errors.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWER_MAX_S = 60


class Browser:
    def __init__(self):
        found = next((path for name in NAMES if (path := shutil.which(name))), None)
        assert found, f"none of {', '.join(NAMES)} is installed"
        self.folder = tempfile.TemporaryDirectory(prefix="lockstep-browser-", ignore_cleanup_errors=True)
        flags = [
            "--headless=new",
            "--remote-debugging-port=0",
            f"--user-data-dir={self.folder.name}",
            "--no-first-run",
            "--disable-gpu",
            "--disable-extensions",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-default-apps",
            "--no-default-browser-check",
            "--disable-dev-shm-usage",
        ]
        # Root in a container cannot use Chromium's sandbox.
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []
        self.log = open(Path(self.folder.name) / "log", "w")
        self.process = subprocess.Popen(
            [found, *flags, "about:blank"], stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL
        )
        port_file = Path(self.folder.name) / "DevToolsActivePort"
        until(lambda: port_file.exists() and port_file.read_text().count("\n"), 60, "the browser's port")
        self.port = int(port_file.read_text().split("\n")[0])

        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/json/version", timeout=30) as reply:
            self.socket = connect(json.load(reply)["webSocketDebuggerUrl"], max_size=None, open_timeout=30)

    def call(self, method, **params):
        self.socket.send(json.dumps({"id": 1, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv(timeout=ANSWER_MAX_S))
            if message.get("id") == 1:
                return message["result"]

    def tab(self, url="about:blank", **view):
        """Opens a tab with separate storage, like another browser profile."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        return Tab(f"ws://127.0.0.1:{self.port}/devtools/page/{target}", url, **view)

    def close(self):
        self.socket.close()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
        self.folder.cleanup()


class Tab:
    """One page. `requested` has the URLs of all its requests, `errors` every console error and exception."""

    def __init__(self, address, url, width=1280, height=900, scheme="light", scale=1):
        self.socket = connect(address, max_size=None, open_timeout=30)
        self.number, self.answers, self.lock = 0, {}, threading.Condition()
        self.requested, self.errors = [], []
        threading.Thread(target=self.listen, daemon=True).start()
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.size(width, height, scale)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.open(url)

    def listen(self):
        try:
            for text in self.socket:
                message = json.loads(text)
                with self.lock:
                    if "id" in message:
                        self.answers[message["id"]] = message
                    else:
                        self.on_event(message["method"], message["params"])
                    self.lock.notify_all()
        except Exception:
            pass

    def on_event(self, method, params):
        if method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded":
            entry = params["entry"]
            if entry["level"] == "error" and entry["source"] != "network":
                self.errors.append(entry["text"])
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"a dialog: {params['message']}")

    def call(self, method, **params):
        with self.lock:
            self.number += 1
            number = self.number
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        with self.lock:
            assert self.lock.wait_for(lambda: number in self.answers, ANSWER_MAX_S), f"no answer to {method}"
            answer = self.answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def size(self, width, height, scale=1):
        is_phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=is_phone
        )

    def open(self, url):
        self.url = url
        self.call("Page.navigate", url=url)

    def run(self, script, **values):
        """Returns the value of an async function's body, in which each name of `values` is defined."""
        constants = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in values.items())
        answer = self.call(
            "Runtime.evaluate",
            expression=f"(async () => {{ {constants} {script} }})()",
            awaitPromise=True,
            returnByValue=True,
        )
        if details := answer.get("exceptionDetails"):
            raise AssertionError(details.get("exception", {}).get("description", answer))
        return answer["result"].get("value")

    def text(self, of="body"):
        return self.run("return document.querySelector(of)?.innerText ?? ''", of=of)

    def until(self, script, seconds, what, **values):
        def holds():
            try:
                return self.run(f"return Boolean({script})", **values)
            except AssertionError as error:
                # The tab is between two pages.
                if "context" in str(error) or "navigated" in str(error):
                    return False
                raise

        def shown():
            return f"{what}; the page shows:\n{self.text()[:2000]}\nerrors: {self.errors}"

        return until(holds, seconds, shown)

    def click(self, of, text=None):
        """Clicks with the mouse, in the middle of the element."""
        script = """
            const matches = (node) => text === null || node.innerText.trim() === text;
            const node = [...document.querySelectorAll(of)].filter(matches).at(-1);
            if (!node) return null;
            node.scrollIntoView({block: "center"});
            const {x, y, width, height} = node.getBoundingClientRect();
            return [x + width / 2, y + height / 2];"""
        place = until(lambda: self.run(script, of=of, text=text), 10, f"{of} {text or ''} to click")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def write(self, of, text):
        self.run("document.querySelector(of).focus()", of=of)
        self.call("Input.insertText", text=text)

    def press(self, key, code=None, **more):
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=code or key,
                windowsVirtualKeyCode={"Enter": 13, "Tab": 9}.get(key, 0),
                **text,
                **more,
            )

    def screenshot(self, path):
        screenshot = self.call("Page.captureScreenshot", format="png")
        Path(path).write_bytes(base64.b64decode(screenshot["data"]))

    def close(self):
        try:
            self.call("Page.close")
        except Exception:
            pass
        self.socket.close()


def until(holds, seconds, what):
    deadline = time.monotonic() + seconds
    while True:
        if found := holds():
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what() if callable(what) else what}")
        time.sleep(0.03)
