"""llm-comply, unmodified: it checks answers against the vendors' own descriptions of their APIs."""

import json
import subprocess
import sys
import unittest
from pathlib import Path

from llm_comply import schema
from llm_comply.schema import SpecLoader

from server import Server, post

server = None
# A text model supports no images, and a request without a model's name gets the served model.
EXPECTED_FAILURES = {
    "anthropic": {"anth-image-input"},
    "openai-chat": {"chat-image-input", "chat-error-handling"},
    "open-responses": {"image-input", "error-handling"},
}
# There is no compaction: its path is a 404, which the suite accepts with a warning.
EXPECTED_WARNINGS = {"compact-response"}
# The suites do not limit answers, and require that they end or call. With this seed, the small model does both.
SEED = "5"


def setUpModule():
    global server
    server = Server("--seed", SEED)


def tearDownModule():
    server.stop()


class Comply(unittest.TestCase):
    def results(self, api):
        program = [sys.executable, "-c", "from llm_comply.cli import main; main()", "--format", api, "--json"]
        flags = ["--base-url", f"{server.url}/v1", "-k", "x", "-m", "smollm2"]
        done = subprocess.run([*program, *flags], capture_output=True, text=True, timeout=600)
        self.assertTrue(done.stdout, done.stderr)
        return json.loads(done.stdout)["results"]

    def check(self, api):
        results = self.results(api)
        failed = {result["id"]: result.get("errors") for result in results if result["status"] == "failed"}
        self.assertEqual(set(failed), EXPECTED_FAILURES[api], failed)
        warned = {result["id"]: result["warnings"] for result in results if result.get("warnings")}
        self.assertLessEqual(set(warned), EXPECTED_WARNINGS, warned)
        passed = [result["id"] for result in results if result["status"] == "passed"]
        self.assertGreater(len(passed), 5)

    def test_anthropic(self):
        self.check("anthropic")

    def test_openai_chat(self):
        self.check("openai-chat")

    def test_open_responses(self):
        self.check("open-responses")

    def test_errors_have_the_vendors_form(self):
        """The suites check only the status of an error. Their descriptions also have its form."""
        message = {"role": "user", "content": "Hi"}
        chat = {"model": "smollm2", "messages": [message], "max_tokens": 1}
        for path, name, body in (
            ("/v1/chat/completions", "openai_chat", chat),
            ("/v1/responses", "openai_chat", {"model": "smollm2", "input": "Hi", "max_output_tokens": 1}),
            ("/v1/messages", "anthropic", chat),
        ):
            spec = SpecLoader(str(Path(schema.__file__).parent / "specs" / f"{name}.json"))
            self.assertEqual(post(server.url + path, body)[0], 200, path)
            for more, status in (({"temperature": -1}, 400), ({"tools": [{"type": "unknown"}]}, 400),
                                 ({"messages": 5, "input": 5}, 400), ({"model": "no-such-model"}, 404)):
                found, _, reply = post(server.url + path, body | more)
                self.assertEqual((found, spec.validate(reply, "ErrorResponse")), (status, []), (path, more, reply))


if __name__ == "__main__":
    unittest.main()
