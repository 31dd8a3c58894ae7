"""The unmodified `openai` client against `/v1/responses`."""

import unittest

import openai

from server import Server

server = None
client = None


def setUpModule():
    global server, client
    server = Server()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def tearDownModule():
    client.close()
    server.stop()


def asked(**more):
    return {"model": "smollm2", "input": "Name three colours.", "temperature": 0, "max_output_tokens": 24} | more


class Responses(unittest.TestCase):
    def test_answer_is_that_of_chat(self):
        reply = client.responses.create(**asked())
        chat = client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "Name three colours."}], temperature=0, max_tokens=24
        )
        self.assertEqual(reply.output_text, chat.choices[0].message.content)
        self.assertEqual((reply.object, reply.status), ("response", "incomplete"))
        self.assertEqual(reply.incomplete_details.reason, "max_output_tokens")
        self.assertEqual((reply.usage.input_tokens, reply.usage.output_tokens), (chat.usage.prompt_tokens, 24))
        self.assertEqual((reply.store, reply.previous_response_id), (False, None))

    def test_stream_says_the_same(self):
        whole = client.responses.create(**asked())
        events = list(client.responses.create(**asked(stream=True)))
        self.assertEqual(events[0].type, "response.created")
        self.assertEqual(events[-1].type, "response.incomplete")
        self.assertEqual([event.sequence_number for event in events], list(range(len(events))))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        self.assertEqual((text, events[-1].response.output_text), (whole.output_text, whole.output_text))
        self.assertEqual(events[-1].response.usage, whole.usage.model_copy(update={
            "input_tokens_details": events[-1].response.usage.input_tokens_details}))

    def test_the_clients_own_stream(self):
        with client.responses.stream(**asked()) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        self.assertEqual(text, client.responses.create(**asked()).output_text)

    def test_messages_and_instructions(self):
        turns = [
            {"role": "user", "content": "My name is Ada."},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Hello, Ada."}]},
            {"role": "user", "content": [{"type": "input_text", "text": "What is my name?"}]},
        ]
        reply = client.responses.create(**asked(input=turns, instructions="Be brief."))
        same = client.responses.create(**asked(input=[{"role": "system", "content": "Be brief."}, *turns]))
        self.assertEqual(reply.output_text, same.output_text)
        self.assertEqual(reply.instructions, "Be brief.")

    def test_refusals(self):
        for more in (
            {"previous_response_id": "resp_1"},
            {"tools": [{"type": "web_search"}]},
            {"reasoning": {"effort": "high"}},
            {"background": True},
        ):
            with self.assertRaises(openai.BadRequestError) as caught:
                client.responses.create(**asked(**more))
            self.assertEqual(caught.exception.param, next(iter(more)))


if __name__ == "__main__":
    unittest.main()
