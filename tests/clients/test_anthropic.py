"""The unmodified `anthropic` client against `/v1/messages`."""

import unittest

import anthropic
import openai

from server import Server

server = None
client = None
ASK = [{"role": "user", "content": "Name three colours."}]
KEY = "the-key"


def setUpModule():
    global server, client
    server = Server("--api-key", KEY)
    client = anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=60)


def tearDownModule():
    client.close()
    server.stop()


def asked(**more):
    # The client has no argument of that name any more.
    greedy = {"extra_body": {"temperature": 0}}
    return {"model": "smollm2", "messages": ASK, "max_tokens": 24} | greedy | more


class Messages(unittest.TestCase):
    def test_answer(self):
        reply = client.messages.create(**asked())
        self.assertEqual((reply.type, reply.role, reply.content[0].type), ("message", "assistant", "text"))
        self.assertTrue(reply.content[0].text.strip())
        self.assertIn(reply.stop_reason, ["end_turn", "max_tokens"])
        self.assertGreater(reply.usage.output_tokens, 0)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as other:
            same = other.chat.completions.create(**asked())
        self.assertEqual(same.choices[0].message.content, reply.content[0].text)

    def test_stream_says_the_same(self):
        whole = client.messages.create(**asked())
        with client.messages.stream(**asked()) as stream:
            text = "".join(stream.text_stream)
            last = stream.get_final_message()
        self.assertEqual(text, whole.content[0].text)
        self.assertEqual(last.content[0].text, text)
        self.assertEqual((last.stop_reason, last.usage.output_tokens), (whole.stop_reason, whole.usage.output_tokens))

    def test_events(self):
        kinds = [event.type for event in client.messages.create(**asked(stream=True, max_tokens=3))]
        self.assertEqual(kinds[:2], ["message_start", "content_block_start"])
        self.assertEqual(kinds[-3:], ["content_block_stop", "message_delta", "message_stop"])
        self.assertIn("content_block_delta", kinds)

    def test_system_is_part_of_the_prompt(self):
        count = lambda **more: client.messages.count_tokens(model="smollm2", messages=ASK, **more).input_tokens
        self.assertNotEqual(count(system="Answer in French, and in one word."), count())
        reply = client.messages.create(**asked(system="Be brief.", max_tokens=1))
        usage = reply.usage
        n_prompt = usage.input_tokens + usage.cache_read_input_tokens
        self.assertEqual(n_prompt, count(system="Be brief."))

    def test_stop_sequence(self):
        whole = client.messages.create(**asked()).content[0].text
        stop = whole[6:9]
        cut = client.messages.create(**asked(stop_sequences=[stop]))
        self.assertEqual((cut.stop_reason, cut.stop_sequence), ("stop_sequence", stop))
        self.assertEqual(cut.content[0].text, whole[: whole.index(stop)])


class Refusals(unittest.TestCase):
    def refused(self, error, **more):
        with self.assertRaises(error) as caught:
            client.messages.create(**asked(**more))
        body = caught.exception.body
        self.assertEqual(body["type"], "error")
        self.assertTrue(body["error"]["type"] and body["error"]["message"])
        return body["error"]["message"]

    def test_typed(self):
        invalid = anthropic.BadRequestError
        self.assertIn("tools", self.refused(invalid, tools=[{"name": "f", "input_schema": {"type": "object"}}]))
        self.assertIn("thinking", self.refused(invalid, thinking={"type": "enabled", "budget_tokens": 1024}))
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
        self.assertIn("image", self.refused(invalid, messages=[{"role": "user", "content": [image]}]))
        self.refused(invalid, messages=[{"role": "user", "content": "word " * 10_000}])
        self.refused(anthropic.NotFoundError, model="no-such-model")

    def test_a_wrong_key(self):
        with anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0, timeout=60) as other:
            with self.assertRaises(anthropic.AuthenticationError):
                other.messages.create(**asked())


if __name__ == "__main__":
    unittest.main()
