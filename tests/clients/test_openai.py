"""The unmodified `openai` client against the HTTP API."""

import json
import unittest
from concurrent.futures import ThreadPoolExecutor

import openai

from server import Server

server = None
client = None
MESSAGES = [{"role": "user", "content": "Name three colours."}]


def setUpModule():
    global server, client
    server = Server()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def tearDownModule():
    client.close()
    server.stop()


def chat(**more):
    options = {"model": "smollm2", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    return client.chat.completions.create(**(options | more))


def text(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


class Chat(unittest.TestCase):
    def test_answer(self):
        reply = chat()
        self.assertEqual(reply.object, "chat.completion")
        self.assertTrue(reply.id and reply.model)
        self.assertEqual(reply.choices[0].message.role, "assistant")
        self.assertTrue(reply.choices[0].message.content.strip())
        self.assertIn(reply.choices[0].finish_reason, ["stop", "length"])
        usage = reply.usage
        self.assertEqual(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
        # The template puts its system message in front, so the prompt has more than 30 tokens, as in the reference.
        self.assertGreater(usage.prompt_tokens, 20)

    def test_stream_equals_the_answer(self):
        whole = chat().choices[0]
        chunks = list(chat(stream=True))
        self.assertEqual(text(chunks), whole.message.content)
        self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
        self.assertEqual({chunk.id for chunk in chunks}, {chunks[0].id})
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        self.assertEqual([reason for reason in reasons if reason], [whole.finish_reason])
        self.assertEqual(reasons[-1], whole.finish_reason)

    def test_stream_with_usage(self):
        chunks = list(chat(stream=True, stream_options={"include_usage": True}))
        self.assertEqual(chunks[-1].choices, [])
        self.assertEqual(chunks[-1].usage.completion_tokens, chat().usage.completion_tokens)

    def test_max_tokens(self):
        for name in ["max_tokens", "max_completion_tokens"]:
            reply = chat(**{"max_tokens": openai.omit, name: 3})
            self.assertEqual(reply.usage.completion_tokens, 3)
            self.assertEqual(reply.choices[0].finish_reason, "length")

    def test_stop(self):
        whole = chat(max_tokens=40).choices[0].message.content
        stop = whole[len(whole) // 2 :][:3]
        cut = chat(max_tokens=40, stop=[stop, "no such text"])
        self.assertEqual(cut.choices[0].message.content, whole[: whole.index(stop)])
        self.assertEqual(cut.choices[0].finish_reason, "stop")
        self.assertEqual(text(chat(max_tokens=40, stop=stop, stream=True)), whole[: whole.index(stop)])

    def test_logprobs(self):
        reply = chat(logprobs=True, top_logprobs=3, max_tokens=8)
        content = reply.choices[0].logprobs.content
        self.assertEqual(len(content), reply.usage.completion_tokens)
        self.assertEqual("".join(one.token for one in content), reply.choices[0].message.content)
        for one in content:
            self.assertEqual(len(one.top_logprobs), 3)
            self.assertLessEqual(one.logprob, 0.0)
            # Greedy: the drawn token is the most likely one.
            self.assertEqual(one.token, one.top_logprobs[0].token)
            self.assertEqual(one.logprob, one.top_logprobs[0].logprob)
        chunks = chat(logprobs=True, top_logprobs=3, max_tokens=8, stream=True)
        parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
        tokens = [one for part in parts if part for one in part.content or []]
        self.assertEqual([(one.token, one.logprob) for one in tokens], [(one.token, one.logprob) for one in content])


class Seeds(unittest.TestCase):
    def draw(self, seed, **more):
        reply = chat(temperature=1.0, top_p=0.95, seed=seed, max_tokens=16, **more)
        return [choice.message.content for choice in reply.choices]

    def test_a_seed_repeats(self):
        self.assertEqual(self.draw(7), self.draw(7))
        self.assertGreater(len({self.draw(seed)[0] for seed in range(4)}), 1)

    def test_neighbours_change_nothing(self):
        alone = [self.draw(seed) for seed in range(8)]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(self.draw, range(8)))
        self.assertEqual(alone, together)

    def test_all_of_sampling_repeats(self):
        more = {
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "logit_bias": {"28": -100},
            "extra_body": {
                "top_k": 50,
                "typical_p": 0.9,
                "top_n_sigma": 3,
                "xtc_probability": 0.5,
                "repetition_penalty": 1.2,
                "dry_multiplier": 0.8,
                "bad_words": ["the"],
            },
        }
        one = self.draw(7, **more)
        self.assertEqual(one, self.draw(7, **more))
        self.assertNotIn(" the ", one[0])

    def test_choices_differ_and_repeat(self):
        several = self.draw(3, n=3)
        self.assertEqual(len(several), 3)
        self.assertEqual(several, self.draw(3, n=3))
        self.assertEqual(several[0], self.draw(3)[0])
        self.assertGreater(len(set(several)), 1)


class Completions(unittest.TestCase):
    def complete(self, **more):
        options = {"model": "smollm2", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
        return client.completions.create(**(options | more))

    def test_answer(self):
        reply = self.complete()
        self.assertEqual(reply.object, "text_completion")
        self.assertIn("Paris", reply.choices[0].text)
        self.assertEqual(reply.usage.prompt_tokens, 5)

    def test_token_ids_are_a_prompt(self):
        # The prompts of tests/reference/smollm2.json.
        ids = self.complete(prompt=[504, 3575, 282, 4649, 314])
        self.assertEqual(ids.choices[0].text, self.complete().choices[0].text)

    def test_several_prompts(self):
        prompts = ["The capital of France is", "The capital of Italy is"]
        reply = self.complete(prompt=prompts, n=2)
        self.assertEqual([choice.index for choice in reply.choices], [0, 1, 2, 3])
        alone = [self.complete(prompt=prompt).choices[0].text for prompt in prompts]
        self.assertEqual([choice.text for choice in reply.choices], [alone[0], alone[0], alone[1], alone[1]])

    def test_echo(self):
        plain = self.complete().choices[0].text
        self.assertEqual(self.complete(echo=True).choices[0].text, "The capital of France is" + plain)
        streamed = "".join(chunk.choices[0].text for chunk in self.complete(echo=True, stream=True) if chunk.choices)
        self.assertEqual(streamed, "The capital of France is" + plain)

    def test_echo_with_logprobs(self):
        reply = self.complete(echo=True, logprobs=2)
        logprobs, whole = reply.choices[0].logprobs, reply.choices[0].text
        self.assertEqual("".join(logprobs.tokens), whole)
        self.assertEqual(len(logprobs.tokens), reply.usage.prompt_tokens + reply.usage.completion_tokens)
        self.assertIsNone(logprobs.token_logprobs[0])
        self.assertTrue(all(logprob <= 0 for logprob in logprobs.token_logprobs[1:]))
        is_at_offset = [whole[at:].startswith(token) for at, token in zip(logprobs.text_offset, logprobs.tokens)]
        self.assertEqual(is_at_offset, [True] * len(logprobs.tokens))
        # An answer that is scored as a prompt has the same logprobs as before.
        again = self.complete(prompt=whole, echo=True, logprobs=2, max_tokens=0)
        self.assertEqual(again.choices[0].text, whole)
        self.assertEqual(again.choices[0].logprobs.token_logprobs, logprobs.token_logprobs)

    def test_stream_equals_the_answer(self):
        whole = self.complete().choices[0].text
        streamed = "".join(chunk.choices[0].text for chunk in self.complete(stream=True) if chunk.choices)
        self.assertEqual(streamed, whole)


class Embeddings(unittest.TestCase):
    def embed(self, texts, **more):
        reply = client.embeddings.create(model="smollm2", input=texts, **more)
        return [one.embedding for one in reply.data]

    def test_similar_texts_are_near(self):
        same, near, far = self.embed(["A cat sat on the mat.", "A cat sat on a mat.", "def f(x): return x + 1"])
        self.assertEqual(len(same), 576)
        self.assertAlmostEqual(sum(a * a for a in same), 1, places=4)
        dot = lambda a, b: sum(x * y for x, y in zip(a, b))
        self.assertGreater(dot(same, near), dot(same, far))

    def test_alone_and_among_others(self):
        texts = ["One.", "Two and " * 200, "Three."]
        self.assertEqual(self.embed(texts), [self.embed(text)[0] for text in texts])
        self.assertEqual(self.embed("One.", encoding_format="float"), self.embed("One."))


class Models(unittest.TestCase):
    def test_the_one_that_is_served(self):
        served = list(client.models.list())
        self.assertEqual(len(served), 1)
        self.assertEqual(served[0].object, "model")
        self.assertEqual(chat(model=served[0].id, max_tokens=1).usage.completion_tokens, 1)


class Refusals(unittest.TestCase):
    def refused(self, error, *words, call=chat, **more):
        with self.assertRaises(error) as caught:
            call(**more)
        for word in words:
            self.assertIn(word, str(caught.exception))
        self.assertTrue(caught.exception.type, "an error has OpenAI's fields")
        return caught.exception

    def test_unknown_model(self):
        self.refused(openai.NotFoundError, "no-such-model", model="no-such-model")

    def test_a_key_is_needed(self):
        keyed = Server("--api-key", "k1")
        try:
            with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="none", max_retries=0) as without_key:
                self.refused(openai.AuthenticationError, "key", call=without_key.models.list)
            with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="k1", max_retries=0) as with_key:
                self.assertEqual(len(list(with_key.models.list())), 1)
        finally:
            keyed.stop()

    def test_unknown_page(self):
        self.refused(openai.NotFoundError, call=lambda: client.post("/nothing", cast_to=object, body={}))

    def test_values_out_of_range(self):
        self.refused(openai.BadRequestError, "temperature", temperature=-1)
        self.refused(openai.BadRequestError, "top_p", top_p=1.5)
        self.refused(openai.BadRequestError, "max_tokens", max_tokens=-5)
        self.refused(openai.BadRequestError, "top_logprobs", logprobs=True, top_logprobs=10_000)
        self.refused(openai.BadRequestError, messages=[])

    def test_prompt_too_long(self):
        self.refused(openai.BadRequestError, "8192", messages=[{"role": "user", "content": "word " * 10_000}])

    def test_a_field_that_would_change_the_answer(self):
        self.refused(openai.BadRequestError, "tools", tools=[{"type": "web_search"}])
        self.refused(openai.BadRequestError, "thinking_token_budget", extra_body={"thinking_token_budget": 9})
        schema = {"type": "object", "unknownKeyword": 1}
        schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        self.refused(openai.BadRequestError, "response_format", response_format=schema)

    def test_harmless_unknown_fields_are_ignored(self):
        plain = chat().choices[0].message.content
        self.assertEqual(chat(extra_body={"some_new_field": 1}, user="me").choices[0].message.content, plain)


PLACE = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"],
         "additionalProperties": False}


class Structures(unittest.TestCase):
    def test_a_schema_is_met(self):
        schema = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": PLACE}}
        reply = chat(response_format=schema, max_tokens=100).choices[0]
        self.assertEqual(reply.finish_reason, "stop")
        self.assertEqual(list(json.loads(reply.message.content)), ["city"])

    def test_a_choice_is_made(self):
        reply = chat(extra_body={"structured_outputs": {"choice": ["red", "green"]}}).choices[0]
        self.assertIn(reply.message.content, ["red", "green"])

    def test_a_tool_that_must_be_called_is_called(self):
        tool = {"type": "function", "function": {"name": "look_at", "description": "Looks.", "parameters": PLACE}}
        arguments = {"tools": [tool], "tool_choice": "required", "max_tokens": 100, "parallel_tool_calls": False}
        whole = chat(**arguments).choices[0]
        self.assertEqual(whole.finish_reason, "tool_calls")
        function = whole.message.tool_calls[0].function
        self.assertEqual((function.name, list(json.loads(function.arguments))), ("look_at", ["city"]))
        parts = [part for chunk in chat(stream=True, **arguments) for part in chunk.choices[0].delta.tool_calls or []]
        self.assertEqual(parts[0].function.name, "look_at")
        self.assertEqual("".join(part.function.arguments for part in parts), function.arguments)
        called = {"role": "assistant", "content": None, "tool_calls": [whole.message.tool_calls[0].model_dump()]}
        result = {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "It is sunny."}
        self.assertTrue(chat(messages=[*MESSAGES, called, result], tools=[tool]).choices[0].finish_reason)

    def test_three_turns_of_calls_streamed_and_whole(self):
        tool = {"type": "function", "function": {"name": "look_at", "description": "Looks.", "parameters": PLACE}}

        def whole(**arguments):
            message = chat(**arguments).choices[0].message
            return message.content, message.tool_calls[0].model_dump() if message.tool_calls else None

        def streamed(**arguments):
            with client.chat.completions.stream(**({"model": "smollm2", "temperature": 0} | arguments)) as stream:
                message = stream.get_final_completion().choices[0].message
            if not message.tool_calls:
                return message.content, None
            call = message.tool_calls[0]
            function = {"name": call.function.name, "arguments": call.function.arguments}
            return message.content, {"id": call.id, "type": "function", "function": function}

        def loop(send):
            messages, results = list(MESSAGES), []
            # A call's id is a function of the seed too.
            arguments = {"tools": [tool], "max_tokens": 60, "parallel_tool_calls": False, "seed": 7}
            for turn in range(3):
                _, call = send(messages=messages, tool_choice="required", **arguments)
                called = {"role": "assistant", "content": None, "tool_calls": [call]}
                messages += [called, {"role": "tool", "tool_call_id": call["id"], "content": f"Result {turn}."}]
                results.append((call["id"], call["function"]))
            results.append(send(messages=messages, tool_choice="none", **arguments))
            return results

        self.assertEqual(loop(whole), loop(streamed))

    def test_fields_that_validators_require(self):
        reply = chat()
        self.assertEqual((reply.service_tier, reply.choices[0].message.annotations), ("default", []))
        self.assertEqual(reply.usage.completion_tokens_details.reasoning_tokens, 0)
        self.assertEqual(reply.usage.prompt_tokens_details.audio_tokens, 0)


if __name__ == "__main__":
    unittest.main()
