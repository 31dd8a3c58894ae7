"""curl against every page, and bodies that no client library sends."""

import json
import subprocess
import unittest

from server import Server, post

server = None


def setUpModule():
    global server
    server = Server()


def tearDownModule():
    server.stop()


def curl(path, *options):
    command = ["curl", "-sS", "-N", "--max-time", "60", *options, server.url + path]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def chat(**more):
    messages = [{"role": "user", "content": "Name three colours."}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 12} | more
    return curl("/v1/chat/completions", "-H", "content-type: application/json", "-d", json.dumps(body))


class Curl(unittest.TestCase):
    def test_chat(self):
        self.assertTrue(json.loads(chat())["choices"][0]["message"]["content"].strip())

    def test_chat_streams_events(self):
        blocks = [block.split("\n") for block in chat(stream=True).split("\n\n") if block]
        # An id to resume from, and then the data.
        self.assertTrue(all(block[0].startswith("id: ") for block in blocks[:-1]), blocks)
        events = [block[-1] for block in blocks]
        self.assertTrue(all(event.startswith("data: ") for event in events), events)
        self.assertEqual(events[-1], "data: [DONE]")
        parts = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
        self.assertEqual(text, json.loads(chat())["choices"][0]["message"]["content"])

    def test_pages(self):
        for path in ["/livez", "/health", "/ready", "/cluster", "/v1/models", "/metrics"]:
            self.assertEqual(server.get(path)[0], 200, path)
        self.assertEqual(server.get("/no/such/page")[0], 404)
        json.loads(server.get("/cluster")[1])

    def test_metrics_count(self):
        before = server.metric("vllm:generation_tokens_total")
        chat(max_tokens=5, ignore_eos=True)
        counted = lambda: server.metric("vllm:generation_tokens_total") >= before + 5
        server.wait_until(counted, 5, "counted")

    def test_broken_bodies(self):
        url = f"{server.url}/v1/chat/completions"
        bodies = [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b'{"messages": 3}', b'{"messages": [{"role": "user"}]}']
        for body in bodies + [b"[" * 100_000]:
            status, headers, reply = post(url, body)
            self.assertEqual(status, 400, body[:40])
            self.assertIn("application/json", headers["content-type"])
            self.assertTrue(reply["error"]["message"], body[:40])


if __name__ == "__main__":
    unittest.main()
