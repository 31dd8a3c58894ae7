"""The unmodified `ollama` client against `/api`."""

import json
import unittest

import ollama
import openai

from server import Server

server = None
client = None
MESSAGES = [{"role": "user", "content": "Name three colours."}]
GREEDY = {"temperature": 0, "num_predict": 24}
KEY = "the-key"


def setUpModule():
    global server, client
    server = Server("--api-key", KEY)
    client = ollama.Client(host=server.url, timeout=60, headers={"authorization": f"Bearer {KEY}"})


def tearDownModule():
    server.stop()


class Chat(unittest.TestCase):
    def test_answer(self):
        reply = client.chat("smollm2", MESSAGES, options=GREEDY)
        self.assertEqual((reply.message.role, reply.done), ("assistant", True))
        self.assertIn(reply.done_reason, ["stop", "length"])
        self.assertTrue(reply.message.content.strip())
        self.assertGreater(reply.eval_count, 0)
        self.assertGreater(reply.prompt_eval_count, 0)
        self.assertGreaterEqual(reply.total_duration, reply.prompt_eval_duration + reply.eval_duration)
        plain = client.chat("smollm2", MESSAGES, options={**GREEDY, "repeat_penalty": 1.0})
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as other:
            # Ollama penalises repetition in the last 64 tokens by default, and OpenAI does not.
            for defaults, reply in (("ollama", reply), ("openai", plain)):
                same = other.chat.completions.create(model="smollm2", messages=MESSAGES, temperature=0, max_tokens=24,
                                                     extra_body={"sampling_defaults": defaults})
                self.assertEqual(same.choices[0].message.content, reply.message.content, defaults)

    def test_stream_equals_the_answer(self):
        whole = client.chat("smollm2:latest", MESSAGES, options=GREEDY)
        parts = list(client.chat("smollm2:latest", MESSAGES, options=GREEDY, stream=True))
        self.assertEqual("".join(part.message.content for part in parts), whole.message.content)
        self.assertEqual([part.done for part in parts], [False] * (len(parts) - 1) + [True])
        self.assertEqual(parts[-1].eval_count, whole.eval_count)

    def test_refusals_name_the_field(self):
        with self.assertRaises(ollama.ResponseError) as caught:
            client.chat("smollm2", MESSAGES, options={"mirostat": 2})
        self.assertEqual(caught.exception.status_code, 400)
        self.assertIn("mirostat", caught.exception.error)
        with self.assertRaises(ollama.ResponseError) as caught:
            client.chat("no-such-model", MESSAGES)
        self.assertEqual(caught.exception.status_code, 404)
        without_key = ollama.Client(host=server.url, headers={"authorization": "Bearer wrong"})
        with self.assertRaises(ollama.ResponseError) as caught:
            without_key.list()
        self.assertEqual(caught.exception.status_code, 401)


class Generate(unittest.TestCase):
    def test_context_continues(self):
        first = client.generate("smollm2", "Name a colour.", options=GREEDY)
        self.assertTrue(first.response.strip())
        next_one = client.generate("smollm2", "Another.", context=first.context, options=GREEDY)
        self.assertGreater(next_one.prompt_eval_count, len(first.context))
        self.assertEqual(list(next_one.context[: len(first.context)]), list(first.context))

    def test_raw_and_streamed(self):
        whole = client.generate("smollm2", "Once upon a time", raw=True, options=GREEDY)
        self.assertIsNone(whole.context)
        parts = client.generate("smollm2", "Once upon a time", raw=True, options=GREEDY, stream=True)
        self.assertEqual("".join(part.response for part in parts), whole.response)

    def test_stop(self):
        whole = client.generate("smollm2", "Once upon a time", raw=True, options=GREEDY).response
        stop = whole[6:9]
        cut = client.generate("smollm2", "Once upon a time", raw=True, options=GREEDY | {"stop": [stop]})
        self.assertEqual((cut.response, cut.done_reason), (whole[: whole.index(stop)], "stop"))

    def test_load(self):
        self.assertEqual(client.generate("smollm2", "").done_reason, "load")


class Models(unittest.TestCase):
    def test_listed(self):
        (model,) = client.list().models
        self.assertEqual(model.model, "smollm2:latest")
        self.assertEqual((model.details.family, len(model.digest)), ("llama", 64))
        (running,) = client.ps().models
        self.assertEqual(running.model, model.model)
        self.assertGreater(running.context_length, 1000)

    def test_shown(self):
        shown = client.show("smollm2")
        self.assertIn("completion", shown.capabilities)
        self.assertIn("messages", shown.template)
        self.assertEqual(shown.modelinfo["general.architecture"], "llama")
        self.assertAlmostEqual(shown.modelinfo["general.parameter_count"] / 1e6, 134.5, delta=0.1)

    def test_pull_fetches_nothing(self):
        self.assertEqual(client.pull("smollm2").status, "success")
        self.assertEqual([part.status for part in client.pull("smollm2", stream=True)], ["success"])
        with self.assertRaises(ollama.ResponseError) as caught:
            client.pull("llama3.2")
        self.assertIn("lockstep pull", caught.exception.error)
        with self.assertRaises(ollama.ResponseError) as caught:
            client.delete("smollm2")
        self.assertEqual(caught.exception.status_code, 403)


class Embed(unittest.TestCase):
    def test_embed(self):
        both = client.embed("smollm2", ["a cat", "a dog"])
        self.assertEqual(len(both.embeddings), 2)
        self.assertAlmostEqual(sum(x * x for x in both.embeddings[0]), 1, places=4)
        older = client.embeddings("smollm2", "a cat")
        self.assertEqual(json.dumps(list(older.embedding)), json.dumps(list(both.embeddings[0])))
