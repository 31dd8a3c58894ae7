"""The unmodified `openai` client against `/v1/responses`."""

import json
import unittest
from typing import Literal

import openai
import pydantic

from server import Server

server = None
client = None
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False},
    "strict": True,
}


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
        self.assertEqual((reply.store, reply.previous_response_id), (True, None))

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

    def test_a_call_is_that_of_chat(self):
        # The ids of calls come from the seed.
        body = asked(tools=[TOOL], tool_choice="required", max_output_tokens=64, extra_body={"seed": 5})
        called = client.responses.create(**body)
        (call,) = called.output
        self.assertEqual((call.type, call.name, call.status), ("function_call", "get_weather", "completed"))
        self.assertEqual(set(json.loads(call.arguments)), {"city"})
        function = {name: value for name, value in TOOL.items() if name != "type"}
        messages = [{"role": "user", "content": asked()["input"]}]
        chat = client.chat.completions.create(
            model="smollm2", messages=messages, tools=[{"type": "function", "function": function}],
            tool_choice="required", temperature=0, max_tokens=64, seed=5,
        )
        (same,) = chat.choices[0].message.tool_calls
        self.assertEqual((call.call_id, call.arguments), (same.id, same.function.arguments))
        with client.responses.stream(**body) as stream:
            parts = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
            final = stream.get_final_response()
        self.assertEqual(("".join(parts), final.output[0].arguments), (call.arguments, call.arguments))

    def test_three_turns_of_calls(self):
        """Sent whole each time, and by the id of the response before: the same."""
        calls = []
        for is_stored in (False, True):
            said, turn, before = [], [{"role": "user", "content": "How is the weather?"}], openai.omit
            for _ in range(3):
                said += turn
                reply = client.responses.create(**asked(
                    input=turn if is_stored else said, previous_response_id=before, store=is_stored, tools=[TOOL],
                    tool_choice={"type": "function", "name": "get_weather"}, max_output_tokens=64,
                ))
                (call,) = reply.output
                calls.append((call.name, call.arguments))
                said += [call.model_dump(exclude_none=True)]
                turn = [{"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}]
                before = reply.id if is_stored else openai.omit
        self.assertEqual(calls[:3], calls[3:])

    def test_text_in_a_form(self):
        class Colour(pydantic.BaseModel):
            name: Literal["red", "green"]
            number: int

        reply = client.responses.parse(**asked(text_format=Colour, max_output_tokens=64))
        self.assertIn(reply.output_parsed.name, ["red", "green"])
        self.assertEqual(reply.text.format.type, "json_schema")

    def test_stored_responses(self):
        first = client.responses.create(**asked())
        self.assertEqual(client.responses.retrieve(first.id).model_dump(), first.model_dump())
        items = client.responses.input_items.list(first.id).data
        self.assertEqual([item.content[0].text for item in items], [asked()["input"]])
        with self.assertRaises(openai.BadRequestError):
            client.responses.cancel(first.id)
        client.responses.delete(first.id)
        with self.assertRaises(openai.NotFoundError):
            client.responses.retrieve(first.id)

    def test_refusals(self):
        for more, param in (
            ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
            ({"background": True}, "background"),
            ({"conversation": "conv_1"}, "conversation"),
        ):
            with self.assertRaises(openai.BadRequestError) as caught:
                client.responses.create(**asked(**more))
            self.assertEqual(caught.exception.param, param)
        with self.assertRaises(openai.NotFoundError) as caught:
            client.responses.create(**asked(previous_response_id="resp_1"))
        self.assertEqual(caught.exception.param, "previous_response_id")


if __name__ == "__main__":
    unittest.main()
