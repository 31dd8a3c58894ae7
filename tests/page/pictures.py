"""Draws the pictures of the README with a real browser and a real server: `pictures.py BINARY FOLDER`.

They have two pixels for each CSS pixel, for dense screens.
"""

import json
import os
import sys
import threading
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
GRID = ("--tp", "2", "--pp", "2", "--context", "1024")
VIEW = {"width": 1200, "height": 660, "scheme": "dark", "scale": 2}
LOAD = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Count from one to a thousand in words."}],
    "max_tokens": 600,
    "ignore_eos": True,
}


def main(binary, folder):
    os.environ["LOCKSTEP_BINARY"] = str(Path(binary).resolve())
    sys.path[:0] = [str(HERE), str(HERE.parent / "clients")]
    from browser import Browser
    from server import Server

    browser, server = Browser(), Server(*GRID)
    try:
        draw_chat(browser, server, Path(folder) / "chat.png")
        draw_cluster(browser, server, Path(folder) / "cluster.png")
    finally:
        browser.close()
        server.stop()


def draw_chat(browser, server, path):
    from common import OVER, act, reload, send, store_settings

    tab = browser.tab(server.url + "/#chat", **VIEW)
    store_settings(tab, model="smollm2", temperature=0, max_tokens=40, logprobs=True)
    reload(tab)
    send(tab, "Name three colours.")
    tab.until(OVER, 60, "the answer has ended")
    act(tab, "Probabilities")
    tab.run("document.querySelector('.token:nth-child(4)').focus()")
    draw(tab, path)


def draw_cluster(browser, server, path):
    """Draws the ranks while three requests run."""
    threads = [threading.Thread(target=post, args=(server, {**LOAD, "seed": seed})) for seed in range(3)]
    for thread in threads:
        thread.start()
    tab = browser.tab(server.url + "/#cluster", **VIEW)
    tab.until("document.querySelectorAll('.rank.ready').length === 4", 30, "four ranks")
    tab.until("document.body.innerText.includes('3 running')", 30, "three requests")
    # The measured rates are those of the last seconds.
    tab.run("await new Promise((done) => setTimeout(done, 4000))")
    draw(tab, path)
    for thread in threads:
        thread.join()


def draw(tab, path):
    tab.run("document.documentElement.style.overflow = 'hidden'; scrollTo(0, 0)")
    tab.run("await new Promise(requestAnimationFrame)")
    tab.screenshot(path)


def post(server, body):
    head = {"content-type": "application/json"}
    request = urllib.request.Request(server.url + "/v1/chat/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=300) as reply:
        reply.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
