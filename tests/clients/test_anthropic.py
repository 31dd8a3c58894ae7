"""The unmodified `anthropic` client against `/v1/messages`."""

import json
import unittest
from typing import Literal

import anthropic
import openai

from server import Server

server = None
client = None
MESSAGES = [{"role": "user", "content": "Name three colours."}]
KEY = "the-key"


def setUpModule():
    global server, client
    server = Server("--api-key", KEY)
    client = anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=60)


def tearDownModule():
    client.close()
    server.stop()


def request(**more):
    # The client no longer has an argument `temperature`.
    greedy = {"extra_body": {"temperature": 0}}
    return {"model": "smollm2", "messages": MESSAGES, "max_tokens": 24} | greedy | more


class Messages(unittest.TestCase):
    def test_answer(self):
        reply = client.messages.create(**request())
        self.assertEqual((reply.type, reply.role, reply.content[0].type), ("message", "assistant", "text"))
        self.assertTrue(reply.content[0].text.strip())
        self.assertIn(reply.stop_reason, ["end_turn", "max_tokens"])
        self.assertGreater(reply.usage.output_tokens, 0)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as other:
            same = other.chat.completions.create(**request())
        self.assertEqual(same.choices[0].message.content, reply.content[0].text)

    def test_stream_equals_the_answer(self):
        whole = client.messages.create(**request())
        with client.messages.stream(**request()) as stream:
            text = "".join(stream.text_stream)
            last = stream.get_final_message()
        self.assertEqual(text, whole.content[0].text)
        self.assertEqual(last.content[0].text, text)
        self.assertEqual((last.stop_reason, last.usage.output_tokens), (whole.stop_reason, whole.usage.output_tokens))

    def test_events(self):
        kinds = [event.type for event in client.messages.create(**request(stream=True, max_tokens=3))]
        self.assertEqual(kinds[:2], ["message_start", "content_block_start"])
        self.assertEqual(kinds[-3:], ["content_block_stop", "message_delta", "message_stop"])
        self.assertIn("content_block_delta", kinds)

    def test_system_is_part_of_the_prompt(self):
        count = lambda **more: client.messages.count_tokens(model="smollm2", messages=MESSAGES, **more).input_tokens
        self.assertNotEqual(count(system="Answer in French, and in one word."), count())
        reply = client.messages.create(**request(system="Be brief.", max_tokens=1))
        usage = reply.usage
        n_prompt = usage.input_tokens + usage.cache_read_input_tokens
        self.assertEqual(n_prompt, count(system="Be brief."))

    def test_stop_sequence(self):
        whole = client.messages.create(**request()).content[0].text
        stop = whole[6:9]
        cut = client.messages.create(**request(stop_sequences=[stop]))
        self.assertEqual((cut.stop_reason, cut.stop_sequence), ("stop_sequence", stop))
        self.assertEqual(cut.content[0].text, whole[: whole.index(stop)])


CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"],
        "additionalProperties": False}
TOOLS = [{"name": "look_at", "description": "Looks.", "input_schema": CITY},
         {"name": "listen_to", "description": "Listens.", "input_schema": CITY, "cache_control": {"type": "ephemeral"}}]


class Tools(unittest.TestCase):
    """Calls are forced: the tests check how a call is passed, not how well a small model chooses."""

    def request(self, messages, **more):
        choice = {"type": "any", "disable_parallel_tool_use": True}
        # A call's id is a function of the seed too.
        arguments = {"tool_choice": choice, "extra_body": {"temperature": 0, "seed": 7}}
        return request(messages=messages, tools=TOOLS, max_tokens=100, **(arguments | more))

    def whole(self, **arguments):
        return client.messages.create(**arguments)

    def streamed(self, **arguments):
        with client.messages.stream(**arguments) as stream:
            return stream.get_final_message()

    def loop(self, send):
        """Three turns, each with a call and its result, and then an answer."""
        messages, blocks = list(MESSAGES), []
        for turn in range(3):
            reply = send(**self.request(messages))
            self.assertEqual(reply.stop_reason, "tool_use")
            calls = [block for block in reply.content if block.type == "tool_use"]
            self.assertEqual([list(call.input) for call in calls], [["city"]])
            result = {"type": "tool_result", "tool_use_id": calls[0].id, "content": f"{turn}.", "is_error": turn == 1}
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
            blocks.append(calls[0].model_dump())
        last = send(**self.request(messages, tool_choice={"type": "none"}))
        self.assertIn(last.stop_reason, ["end_turn", "max_tokens"])
        return blocks, last.content[0].text

    def test_three_turns_streamed_and_whole(self):
        self.assertEqual(self.loop(self.whole), self.loop(self.streamed))

    def test_one_tool_by_its_name(self):
        reply = client.messages.create(**self.request(MESSAGES, tool_choice={"type": "tool", "name": "listen_to"}))
        self.assertEqual([block.name for block in reply.content], ["listen_to"])

    def test_tools_count(self):
        arguments = {"model": "smollm2", "messages": MESSAGES, "system": [{"type": "text", "text": "Be brief."}]}
        counted = client.messages.count_tokens(tools=TOOLS, **arguments).input_tokens
        self.assertGreater(counted, client.messages.count_tokens(**arguments).input_tokens)
        usage = client.messages.create(tools=TOOLS, max_tokens=1, **arguments).usage
        self.assertEqual(usage.input_tokens + usage.cache_read_input_tokens, counted)

    def test_the_tool_runner_of_the_client(self):
        seen = []

        @anthropic.beta_tool
        def look_at(city: Literal["Oslo", "Lima"]) -> str:
            """Looks at a city."""
            seen.append(city)
            return "sunny"

        forced = {"type": "tool", "name": "look_at"}
        runner = client.beta.messages.tool_runner(
            model="smollm2", max_tokens=60, messages=MESSAGES, tools=[look_at], tool_choice=forced, max_iterations=3
        )
        replies = [reply.stop_reason for reply in runner]
        self.assertEqual(len(replies), 3)
        self.assertEqual(len(seen), replies.count("tool_use"))


class Structures(unittest.TestCase):
    def test_a_schema_is_met(self):
        config = {"format": {"type": "json_schema", "schema": CITY}}
        reply = client.messages.create(**request(output_config=config, max_tokens=100))
        self.assertEqual((reply.stop_reason, list(json.loads(reply.content[0].text))), ("end_turn", ["city"]))

    def test_a_model_without_reasoning_answers(self):
        for thinking in [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}, {"type": "disabled"}]:
            reply = client.messages.create(**request(thinking=thinking))
            self.assertEqual([block.type for block in reply.content], ["text"])


class Caching(unittest.TestCase):
    def test_a_changing_billing_header_keeps_the_cache(self):
        def usage(billing):
            head = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.7; cch={billing};"}
            text = {"type": "text", "text": "Be careful. " * 60, "cache_control": {"type": "ephemeral"}}
            return client.messages.create(**request(system=[head, text], max_tokens=1)).usage

        first, second = usage("00000"), usage("a1b2c")
        n_prompt = first.input_tokens + first.cache_read_input_tokens
        self.assertEqual(second.input_tokens + second.cache_read_input_tokens, n_prompt)
        self.assertGreater(second.cache_read_input_tokens, 100)


class Refusals(unittest.TestCase):
    def refused(self, error, **more):
        with self.assertRaises(error) as caught:
            client.messages.create(**request(**more))
        body = caught.exception.body
        self.assertEqual(body["type"], "error")
        self.assertTrue(body["error"]["type"] and body["error"]["message"])
        return body["error"]["message"]

    def test_typed(self):
        invalid = anthropic.BadRequestError
        search = {"type": "web_search_20250305", "name": "web_search"}
        self.assertIn("web_search_20250305", self.refused(invalid, tools=[search]))
        self.assertIn("thinking", self.refused(invalid, thinking={"type": "sometimes"}))
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
        self.assertIn("image", self.refused(invalid, messages=[{"role": "user", "content": [image]}]))
        self.refused(invalid, messages=[{"role": "user", "content": "word " * 10_000}])
        self.refused(anthropic.NotFoundError, model="no-such-model")

    def test_a_wrong_key(self):
        with anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0, timeout=60) as other:
            with self.assertRaises(anthropic.AuthenticationError):
                other.messages.create(**request())


if __name__ == "__main__":
    unittest.main()
