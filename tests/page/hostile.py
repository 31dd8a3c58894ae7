"""A server of the page's files with answers of its own: any text that a model could generate, as hostile as possible,
and calls and thoughts that a small model would not write.

Files come from the real server, so its content security policy applies.
"""

import json
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HTML = (
    "<script>window.harmed = 1</script><img src=x onerror=\"window.harmed = 2\">"
    "<iframe src='javascript:parent.harmed=3'></iframe>"
    "<svg onload=\"window.harmed = 4\"></svg><style>body{display:none}</style><base href='http://evil.example/'>"
)
LINKS = (
    "[a](javascript:window.harmed=5) [b](data:text/html,<script>1</script>) ![i](http://evil.example/i.png) "
    "[https://good.example](https://evil.example/steal)"
)
ANSI = "\x1b[2J\x1b[31mred\x1b]0;title\x07 \x00\x08 bell"
BIDI = "user\u202e\u2066// \u2069\u2066 esac"
QUOTES = "\n".join(">" * n for n in range(1, 2000))
STARS = "*" * 20000 + "_" * 20000 + "`" * 20001 + "[" * 20000
LISTS = "\n".join(" " * (2 * n) + "- x" for n in range(200))
LINES = "\n".join(f"line {n}" for n in range(100_000))
TABLE = "|" + "a|" * 3000 + "\n|" + "-|" * 3000 + "\n" + "\n".join("|" + "b|" * 30 for _ in range(300))

ANSWERS = {
    "html": HTML,
    "links": LINKS,
    "ansi": ANSI,
    "bidi": BIDI,
    "quotes": QUOTES,
    "stars": STARS,
    "lists": LISTS,
    "lines": LINES,
    "table": TABLE,
    "thought": "An answer.",
    "rich": "For $a^2$ and $\\unknown{x}$:\n\n$$x = \\frac{-b \\pm \\sqrt{b}}{2a}$$\n\n"
    "\\(\\sum_{i=1}^n \\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}\\)\n\n- [x] done\n- [ ] open\n\n"
    "| a | b |\n|--:|:-:|\n| 1 | 2 |\n\n```rust\n// a comment\nlet a = if b { \"text\" };\n```\n",
    "megabyte": "word and word, " * 70_000,
    "markdown": "# Head\n\nA **bold** and `code`.\n\n```python\nprint('<b>')\n```\n\n- one\n- two\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n",
}
CALLS = [{"index": 0, "id": "call-1", "function": {"name": "weather", "arguments": '{"city": '}},
         {"index": 0, "function": {"arguments": '"Paris"}'}},
         {"index": 1, "id": "call-2", "function": {"name": "<b>clock</b>", "arguments": "{}"}}]
# The other parts of a delta, before the text of an answer.
BEFORE = {
    "calls": [{"tool_calls": [call]} for call in CALLS],
    "thought": [{"reasoning_content": "First, <i>think</i>."}],
}


class Hostile:
    def __init__(self, real):
        self.requests = []
        hostile = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                if self.path == "/" or self.path.startswith("/page/"):
                    with urllib.request.urlopen(real + self.path, timeout=30) as reply:
                        self.answer(
                            reply.read(), reply.headers["content-type"], reply.headers["content-security-policy"]
                        )
                elif self.path == "/viewer":
                    self.json(
                        {
                            "version": "0",
                            "sees": {"cluster": False, "requests": "own"},
                            "asks_for_keys": False,
                            "operators_apart": False,
                        }
                    )
                elif self.path == "/v1/models":
                    self.json({"data": [{"id": "<b>bad</b>\u202emodel"}]})
                else:
                    self.send_error(404)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.path == "/api/show":
                    return self.json({"capabilities": ["completion", "tools", "thinking"], "details": {}})
                hostile.requests.append(body)
                last = body["messages"][-1]
                text = "" if last["content"] == "calls" else ANSWERS.get(last["content"], f"{last['role']}?")
                self.send_response(200)
                for name, value in (
                    ("content-type", "text/event-stream"),
                    ("x-lockstep-seed", "1"),
                    ("connection", "close"),
                ):
                    self.send_header(name, value)
                self.end_headers()
                for delta in BEFORE.get(last["content"], []):
                    self.event({"id": "x", "choices": [{"index": 0, "delta": delta, "token_ids": [2]}]})
                step = max(7, len(text) // 200)
                for at in range(0, len(text), step):
                    delta = {
                        "index": 0,
                        "delta": {"content": text[at : at + step]},
                        "finish_reason": None,
                        "token_ids": [1],
                        "logprobs": {
                            "content": [
                                {
                                    "token": text[at : at + 5],
                                    "logprob": -0.1,
                                    "top_logprobs": [{"token": HTML, "logprob": -3}],
                                }
                            ]
                        },
                    }
                    self.event({"id": "x", "model": "<i>m</i>", "choices": [delta]})
                self.event({"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
                self.wfile.write(b"data: [DONE]\n\n")
                self.close_connection = True

            def event(self, value):
                self.wfile.write(f"id: h:{len(hostile.requests)}\ndata: {json.dumps(value)}\n\n".encode())

            def json(self, value):
                self.answer(json.dumps(value).encode(), "application/json", "default-src 'none'")

            def answer(self, body, kind, policy):
                self.send_response(200)
                for name, value in (
                    ("content-type", kind),
                    ("content-security-policy", policy),
                    ("content-length", str(len(body))),
                ):
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self):
        self.server.shutdown()
        self.server.server_close()
