"""Clients that disconnect and servers that end: nothing is left behind, and other requests are not affected."""

import json
import threading
import unittest
import urllib.error
import urllib.request

from server import Server

WAIT_S = 30
server = None


def setUpModule():
    global server
    server = Server()


def tearDownModule():
    server.stop()


def stream(target, max_tokens, prompt="Once upon a time"):
    """Opens an event stream of a request that does not end before `max_tokens`."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{target.url}/v1/completions", data=json.dumps(body).encode(), headers=headers)
    return urllib.request.urlopen(request, timeout=60)


def read(reply, n_events=None):
    """Returns the text of the next events; without a number, of all events up to [DONE]."""
    text, n_read = "", 0
    while n_events is None or n_read < n_events:
        line = reply.readline().decode()
        assert line, f"the stream broke off after {n_read} events: {text!r}"
        if line.strip() == "data: [DONE]":
            return text
        if line.startswith("data: "):
            part = json.loads(line.removeprefix("data: "))
            assert "error" not in part, part
            text += "".join(choice["text"] for choice in part["choices"])
            n_read += 1
    return text


class Disconnects(unittest.TestCase):
    def test_disconnects_free_blocks(self):
        with stream(server, 24) as reply:
            alone = read(reply)
        leaving = [stream(server, 4000, f"{i}. Once upon a time") for i in range(4)]
        with stream(server, 24) as staying:
            for reply in leaving:
                read(reply, 2)
            server.wait_until(lambda: server.metric("lockstep:requests_running") >= len(leaving), WAIT_S, "running")
            self.assertGreater(server.metric("lockstep:kv_usage_ratio"), 0)
            for reply in leaving:
                reply.close()
            self.assertEqual(read(staying), alone)
        server.wait_until(server.is_idle, WAIT_S, "idle after its clients left")


class Ending(unittest.TestCase):
    def test_sigterm_lets_streams_finish(self):
        own = Server("--drain-seconds", "60")
        # Enough streams that some of them still run when the signal comes.
        n_streams, texts, errors = 6, [], []
        begun = threading.Barrier(n_streams + 1, timeout=WAIT_S)

        def client():
            try:
                with stream(own, 192) as reply:
                    text = read(reply, 1)
                    begun.wait()
                    texts.append(text + read(reply))
            except Exception as error:  # an exception in a thread does not fail the test
                errors.append(error)
                begun.abort()

        clients = [threading.Thread(target=client) for _ in range(n_streams)]
        try:
            for thread in clients:
                thread.start()
            self.assert_begun(begun, errors)
            own.terminate()
            self.assert_refuses(own)
            for thread in clients:
                thread.join(WAIT_S * 2)
            self.assertEqual(errors, [])
            self.assertEqual((len(texts), len(set(texts))), (n_streams, 1), "every stream is whole, and all are equal")
            self.assertEqual(own.exit_status(), 0)
        finally:
            own.stop()

    def assert_begun(self, begun, errors):
        try:
            begun.wait()
        except threading.BrokenBarrierError:
            self.fail(f"not every stream began: {errors}")

    def assert_refuses(self, own):
        """A server that drains rejects new requests with a 503 and Retry-After, and its readiness reports the drain."""

        def refuses():
            try:
                stream(own, 1).close()
                return False
            except urllib.error.HTTPError as error:
                self.assertEqual(error.code, 503)
                self.assertTrue(error.headers["retry-after"])
                return True
            except OSError:
                return True

        own.wait_until(refuses, WAIT_S, "refusing new requests")
        self.assertEqual(own.get("/ready")[0], 503)

    def test_idle_server_ends(self):
        own = Server()
        own.stop()


if __name__ == "__main__":
    unittest.main()
