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


class Tools(unittest.TestCase):
    """Ollama's API cannot force a call. The model repeats one, or a `format` allows nothing else."""

    def chat(self, messages, **more):
        # A call's id is a function of the seed too.
        options = {"temperature": 0, "repeat_penalty": 1.0, "seed": 7, "num_predict": 60} | more.pop("options", {})
        return client.chat("smollm2", messages, tools=[get_weather], options=options, **more)

    def whole(self, messages, **more):
        return self.chat(messages, **more)

    def streamed(self, messages, **more):
        """Returns the last part, with the text and the calls of all parts."""
        parts = list(self.chat(messages, stream=True, **more))
        self.assertEqual([part.done for part in parts], [False] * (len(parts) - 1) + [True])
        calls = [call for part in parts for call in part.message.tool_calls or []]
        parts[-1].message.content = "".join(part.message.content for part in parts)
        parts[-1].message.tool_calls = calls or None
        return parts[-1]

    def loop(self, send):
        """Two turns, each with a call and its result, and then an answer."""
        messages, calls = [{"role": "user", "content": "How is the weather in Paris and in Rome?"}], []
        for turn in range(2):
            reply = send(messages, format=form_of_a_call())
            self.assertEqual(reply.message.content, "")
            (call,) = reply.message.tool_calls
            self.assertIsInstance(call.function.arguments, dict)
            self.assertEqual((call.function.name, list(call.function.arguments)), ("get_weather", ["city"]))
            calls.append((call, reply.eval_count, reply.done_reason))
            # The client sends back its own object, whose calls have no ids.
            result = {"role": "tool", "tool_name": call.function.name, "content": f"{20 + turn} degrees"}
            messages += [reply.message, result]
        last = send([*messages, {"role": "user", "content": "Answer in words."}], options={"num_predict": 24})
        self.assertIn(last.done_reason, ["stop", "length"])
        return calls, last.message, last.eval_count, last.prompt_eval_count

    def test_three_turns_streamed_and_whole(self):
        self.assertEqual(self.loop(self.whole), self.loop(self.streamed))

    def test_a_free_call_after_an_example(self):
        messages = [*called("Paris"), {"role": "user", "content": "How is the weather in Rome?"}]
        whole, streamed = self.whole(messages), self.streamed(messages)
        (call,) = whole.message.tool_calls
        self.assertEqual((call.function.name, call.function.arguments), ("get_weather", {"city": "Rome"}))
        self.assertEqual((streamed.message, streamed.done_reason), (whole.message, whole.done_reason))

    def test_two_calls_in_one_answer(self):
        messages = [*called("Paris", "Rome"), {"role": "user", "content": "How is the weather in Paris and Rome?"}]
        whole, streamed = self.whole(messages), self.streamed(messages)
        arguments = [call.function.arguments for call in whole.message.tool_calls]
        self.assertEqual(arguments, [{"city": "Paris"}, {"city": "Rome"}])
        self.assertEqual((streamed.message, streamed.eval_count), (whole.message, whole.eval_count))
        self.assertEqual(self.calls_on_the_wire(messages, False), self.calls_on_the_wire(messages, True))

    def calls_on_the_wire(self, messages, is_stream):
        """Returns calls with their ids and indices, which the client drops, after checks."""
        options = {"temperature": 0, "repeat_penalty": 1.0, "seed": 7, "num_predict": 60}
        tool = ollama._utils.convert_function_to_tool(get_weather).model_dump(exclude_none=True)
        body = {"model": "smollm2", "messages": messages, "tools": [tool], "options": options, "stream": is_stream}
        lines = client._client.post("/api/chat", json=body).text.splitlines()
        calls = [call for line in lines for call in json.loads(line)["message"].get("tool_calls", [])]
        self.assertEqual([call["function"]["index"] for call in calls], [0, 1])
        self.assertEqual((len(calls), len({call["id"] for call in calls})), (2, 2))
        return calls


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    return "21 degrees"


def form_of_a_call():
    """Returns a schema that only a call of the tool meets."""
    form = lambda **members: {"type": "object", "properties": members, "required": list(members),
                              "additionalProperties": False}
    return form(name={"const": "get_weather"}, arguments=form(city={"enum": ["Paris", "Rome"]}))


def called(*cities):
    """Returns a turn with a call for each city, and their results."""
    calls = [{"function": {"name": "get_weather", "arguments": {"city": city}}} for city in cities]
    results = [{"role": "tool", "tool_name": "get_weather", "content": "21 degrees"} for _ in cities]
    question = {"role": "user", "content": f"How is the weather in {' and '.join(cities)}?"}
    return [question, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


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
