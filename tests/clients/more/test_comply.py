"""llm-comply, unmodified: it checks answers against the vendors' own descriptions of their APIs."""

import json
import subprocess
import sys
import unittest

from server import Server

server = None
# A text model supports no images, and a request without a model's name gets the served model.
EXPECTED_FAILURES = {"anthropic": {"anth-image-input"}, "openai-chat": {"chat-image-input", "chat-error-handling"}}


def setUpModule():
    global server
    server = Server()


def tearDownModule():
    server.stop()


class Comply(unittest.TestCase):
    def results(self, api):
        program = [sys.executable, "-c", "from llm_comply.cli import main; main()", "--format", api, "--json"]
        flags = ["--base-url", f"{server.url}/v1", "-k", "x", "-m", "smollm2"]
        done = subprocess.run([*program, *flags], capture_output=True, text=True, timeout=600)
        self.assertTrue(done.stdout, done.stderr)
        return json.loads(done.stdout)["results"]

    def test_only_known_checks_fail(self):
        for api, expected in EXPECTED_FAILURES.items():
            results = self.results(api)
            failed = {result["id"]: result.get("errors") for result in results if result["status"] == "failed"}
            self.assertEqual(set(failed), expected, failed)
            warned = {result["id"]: result["warnings"] for result in results if result.get("warnings")}
            self.assertEqual(warned, {})


if __name__ == "__main__":
    unittest.main()
