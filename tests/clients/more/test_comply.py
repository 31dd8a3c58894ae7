"""llm-comply, unmodified: it holds answers against the vendors' own descriptions of their APIs."""

import json
import subprocess
import sys
import unittest

from server import Server

server = None
# A model of text sees no image, and a request that names no model gets the one that is served.
UNMET = {"anthropic": {"anth-image-input"}, "openai-chat": {"chat-image-input", "chat-error-handling"}}


def setUpModule():
    global server
    server = Server()


def tearDownModule():
    server.stop()


class Comply(unittest.TestCase):
    def results(self, api):
        program = [sys.executable, "-c", "from llm_comply.cli import main; main()", "--format", api, "--json"]
        asked = ["--base-url", f"{server.url}/v1", "-k", "x", "-m", "smollm2"]
        told = subprocess.run([*program, *asked], capture_output=True, text=True, timeout=600)
        self.assertTrue(told.stdout, told.stderr)
        return json.loads(told.stdout)["results"]

    def test_all_but_what_is_not_served(self):
        for api, unmet in UNMET.items():
            results = self.results(api)
            failed = {result["id"]: result.get("errors") for result in results if result["status"] == "failed"}
            self.assertEqual(set(failed), unmet, failed)
            warned = {result["id"]: result["warnings"] for result in results if result.get("warnings")}
            self.assertEqual(warned, {})


if __name__ == "__main__":
    unittest.main()
