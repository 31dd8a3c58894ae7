"""The unmodified `openai` client against `/v1/responses`."""

import json
import time
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


def request(**more):
    return {"model": "smollm2", "input": "Name three colours.", "temperature": 0, "max_output_tokens": 24} | more


class Responses(unittest.TestCase):
    def test_answer_equals_chat(self):
        reply = client.responses.create(**request())
        chat = client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "Name three colours."}], temperature=0, max_tokens=24
        )
        self.assertEqual(reply.output_text, chat.choices[0].message.content)
        self.assertEqual((reply.object, reply.status), ("response", "incomplete"))
        self.assertEqual(reply.incomplete_details.reason, "max_output_tokens")
        self.assertEqual((reply.usage.input_tokens, reply.usage.output_tokens), (chat.usage.prompt_tokens, 24))
        self.assertEqual((reply.store, reply.previous_response_id), (True, None))

    def test_stream_equals_the_answer(self):
        whole = client.responses.create(**request())
        events = list(client.responses.create(**request(stream=True)))
        self.assertEqual(events[0].type, "response.created")
        self.assertEqual(events[-1].type, "response.incomplete")
        self.assertEqual([event.sequence_number for event in events], list(range(len(events))))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        self.assertEqual((text, events[-1].response.output_text), (whole.output_text, whole.output_text))
        self.assertEqual(events[-1].response.usage, whole.usage.model_copy(update={
            "input_tokens_details": events[-1].response.usage.input_tokens_details}))

    def test_the_clients_own_stream(self):
        with client.responses.stream(**request()) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        self.assertEqual(text, client.responses.create(**request()).output_text)

    def test_messages_and_instructions(self):
        turns = [
            {"role": "user", "content": "My name is Ada."},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Hello, Ada."}]},
            {"role": "user", "content": [{"type": "input_text", "text": "What is my name?"}]},
        ]
        reply = client.responses.create(**request(input=turns, instructions="Be brief."))
        same = client.responses.create(**request(input=[{"role": "system", "content": "Be brief."}, *turns]))
        self.assertEqual(reply.output_text, same.output_text)
        self.assertEqual(reply.instructions, "Be brief.")

    def test_a_call_equals_chat(self):
        # The ids of calls come from the seed.
        body = request(tools=[TOOL], tool_choice="required", max_output_tokens=64, extra_body={"seed": 5})
        called = client.responses.create(**body)
        (call,) = called.output
        self.assertEqual((call.type, call.name, call.status), ("function_call", "get_weather", "completed"))
        self.assertEqual(set(json.loads(call.arguments)), {"city"})
        function = {name: value for name, value in TOOL.items() if name != "type"}
        messages = [{"role": "user", "content": request()["input"]}]
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
        """Sends the whole conversation each time, or the previous response's id: the calls are equal."""
        calls = []
        for is_stored in (False, True):
            items, turn, previous = [], [{"role": "user", "content": "How is the weather?"}], openai.omit
            for _ in range(3):
                items += turn
                reply = client.responses.create(**request(
                    input=turn if is_stored else items, previous_response_id=previous, store=is_stored, tools=[TOOL],
                    tool_choice={"type": "function", "name": "get_weather"}, max_output_tokens=64,
                ))
                (call,) = reply.output
                calls.append((call.name, call.arguments))
                items += [call.model_dump(exclude_none=True)]
                turn = [{"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}]
                previous = reply.id if is_stored else openai.omit
        self.assertEqual(calls[:3], calls[3:])

    def test_text_with_a_schema(self):
        class Colour(pydantic.BaseModel):
            name: Literal["red", "green"]
            number: int

        reply = client.responses.parse(**request(text_format=Colour, max_output_tokens=64))
        self.assertIn(reply.output_parsed.name, ["red", "green"])
        self.assertEqual(reply.text.format.type, "json_schema")

    def test_stored_responses(self):
        first = client.responses.create(**request())
        self.assertEqual(client.responses.retrieve(first.id).model_dump(), first.model_dump())
        items = client.responses.input_items.list(first.id).data
        self.assertEqual([item.content[0].text for item in items], [request()["input"]])
        with self.assertRaises(openai.BadRequestError):
            client.responses.cancel(first.id)
        client.responses.delete(first.id)
        with self.assertRaises(openai.NotFoundError):
            client.responses.retrieve(first.id)

    def test_references_to_stored_items(self):
        first = client.responses.create(**request())
        (item,) = first.output
        (own,) = client.responses.input_items.list(first.id).data
        reference = lambda id: {"type": "item_reference", "id": id}
        question = {"role": "user", "content": "And three more?"}
        reply = client.responses.create(**request(input=[reference(own.id), reference(item.id), question]))
        items = [{"role": "user", "content": request()["input"]}, item.model_dump(exclude_none=True), question]
        self.assertEqual(reply.output_text, client.responses.create(**request(input=items)).output_text)
        with self.assertRaises(openai.NotFoundError) as caught:
            client.responses.create(**request(input=[reference("msg_1"), question]))
        self.assertEqual((caught.exception.param, caught.exception.code), ("input", "item_not_found"))

    def test_in_the_background(self):
        whole = client.responses.create(**request())
        begun = client.responses.create(**request(background=True))
        self.assertEqual((begun.status, begun.background), ("queued", True))
        ended = self.ended(begun)
        self.assertEqual((ended.status, ended.output_text), ("incomplete", whole.output_text))
        with self.assertRaises(openai.BadRequestError):
            client.responses.cancel(begun.id)
        endless = {"ignore_eos": True}
        long = client.responses.create(**request(background=True, max_output_tokens=2000, extra_body=endless))
        self.assertEqual(client.responses.cancel(long.id).status, "cancelled")
        self.assertEqual(client.responses.retrieve(long.id).status, "cancelled")

    def ended(self, response):
        for _ in range(300):
            response = client.responses.retrieve(response.id)
            if response.status not in ("queued", "in_progress"):
                break
            time.sleep(0.1)
        return response

    def test_a_background_stream_is_resumed(self):
        first = []
        with client.responses.create(**request(background=True, stream=True)) as stream:
            for event in stream:
                first.append(event)
                if event.type == "response.output_text.delta":
                    break
        begun, last = first[0].response, first[-1].sequence_number
        rest = list(client.responses.retrieve(begun.id, stream=True, starting_after=last))
        self.assertEqual([event.sequence_number for event in rest], list(range(last + 1, last + 1 + len(rest))))
        text = "".join(event.delta for event in first + rest if event.type == "response.output_text.delta")
        self.assertEqual(text, rest[-1].response.output_text)
        self.assertEqual(client.responses.retrieve(begun.id).output_text, text)

    def test_conversations(self):
        conversation = client.conversations.create(
            metadata={"topic": "colours"},
            items=[{"type": "message", "role": "user", "content": "My name is Ada."}],
        )
        self.assertEqual((conversation.object, conversation.metadata), ("conversation", {"topic": "colours"}))
        self.assertEqual(client.conversations.retrieve(conversation.id), conversation)
        changed = client.conversations.update(conversation.id, metadata={"topic": "names"})
        self.assertEqual((changed.id, changed.metadata), (conversation.id, {"topic": "names"}))
        reply = client.responses.create(**request(conversation=conversation.id))
        self.assertEqual(reply.conversation.id, conversation.id)
        turns = [{"role": "user", "content": "My name is Ada."}, {"role": "user", "content": request()["input"]}]
        self.assertEqual(reply.output_text, client.responses.create(**request(input=turns)).output_text)
        added = client.conversations.items.create(
            conversation.id, items=[{"type": "message", "role": "user", "content": "And now?"}]
        )
        items = list(client.conversations.items.list(conversation.id, order="asc", limit=2))
        texts = [item.content[0].text for item in items]
        self.assertEqual(texts, ["My name is Ada.", request()["input"], reply.output_text, "And now?"])
        self.assertEqual(items[-1], added.data[0])
        one = client.conversations.items.retrieve(items[0].id, conversation_id=conversation.id)
        self.assertEqual(one, items[0])
        client.conversations.items.delete(items[0].id, conversation_id=conversation.id)
        self.assertEqual(len(list(client.conversations.items.list(conversation.id))), 3)
        self.assertTrue(client.conversations.delete(conversation.id).deleted)
        with self.assertRaises(openai.NotFoundError):
            client.conversations.retrieve(conversation.id)

    def test_refusals(self):
        for more, param in (
            ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"background": True, "store": False}, "background"),
            ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
        ):
            with self.assertRaises(openai.BadRequestError) as caught:
                client.responses.create(**request(**more))
            self.assertEqual(caught.exception.param, param)
        # A model without reasoning ignores the effort, and no prompt is truncated here.
        reply = client.responses.create(**request(reasoning={"effort": "high"}, truncation="auto"))
        self.assertEqual(reply.output_text, client.responses.create(**request()).output_text)
        with self.assertRaises(openai.NotFoundError) as caught:
            client.responses.create(**request(previous_response_id="resp_1"))
        self.assertEqual(caught.exception.param, "previous_response_id")


def codex_request(items, **more):
    """Returns the body that Codex sends for each turn: the whole conversation, and nothing is stored."""
    text = lambda name: {"type": "string", "description": f"The {name}."}
    form = lambda required, **members: {"type": "object", "properties": members, "required": required,
                                        "additionalProperties": False}
    function = lambda name, parameters: {"type": "function", "name": name, "description": f"Runs {name}.",
                                         "strict": False, "parameters": parameters}
    step = form(["step", "status"], step=text("step"), status={"enum": ["pending", "in_progress", "completed"]})
    tools = [
        function("shell", form(["command"], command={"type": "array", "items": {"type": "string"}, "maxItems": 3},
                               workdir=text("folder"), timeout_ms={"type": "number"})),
        function("update_plan", form(["plan"], explanation=text("reason"), plan={"type": "array", "items": step})),
        function("apply_patch", form(["input"], input=text("patch"))),
        {"type": "web_search", "external_web_access": False},
    ]
    message = lambda role, text: {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
    before = [
        message("developer", "<permissions instructions>The sandbox is read-only.</permissions instructions>"),
        message("user", "<environment_context>\n  <cwd>/tmp</cwd>\n  <shell>bash</shell>\n</environment_context>"),
        message("user", "Show the file README.md."),
    ]
    return {
        "model": "smollm2", "instructions": "You are a coding agent.\n" * 20, "input": before + items, "tools": tools,
        "tool_choice": {"type": "function", "name": "shell"}, "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"}, "store": False,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0190-7f1e", "text": {"verbosity": "medium"},
        "temperature": 0, "max_output_tokens": 200, "extra_body": {"seed": 3, "client_metadata": {"a": "b"}},
    } | more


class CustomTools(unittest.TestCase):
    """A tool whose calls have a text instead of arguments."""

    TOOL = {
        "type": "custom", "name": "plot", "description": "Draws a line through points.",
        "format": {"type": "grammar", "syntax": "regex", "definition": r'(\d,\d\n){3}"\\end"'},
    }

    def send(self, **more):
        items = [{"role": "user", "content": "Draw three points."}]
        return request(input=items, tools=[self.TOOL, TOOL], max_output_tokens=200) | more

    def test_a_forced_call_streamed_and_whole(self):
        for choice in ["required", {"type": "custom", "name": "plot"}]:
            sent = self.send(tool_choice=choice) | ({"tools": [self.TOOL]} if choice == "required" else {})
            (call,) = client.responses.create(**sent, parallel_tool_calls=False).output
            self.assertEqual((call.type, call.name, call.status), ("custom_tool_call", "plot", "completed"))
            self.assertRegex(call.input, r'^(\d,\d\n){3}"\\end"$')
            deltas, done, items = "", None, []
            for event in client.responses.create(**sent, parallel_tool_calls=False, stream=True):
                if event.type == "response.custom_tool_call_input.delta":
                    deltas += event.delta
                elif event.type == "response.custom_tool_call_input.done":
                    done = event.input
                elif event.type == "response.output_item.done":
                    items.append(event.item)
            self.assertEqual((deltas, done), (call.input, call.input))
            self.assertEqual([(item.type, item.name, item.input) for item in items], [(call.type, "plot", call.input)])

    def test_the_output_of_a_call_continues_the_conversation(self):
        first = client.responses.create(**self.send(tool_choice="required", tools=[self.TOOL]))
        call = first.output[0]
        result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "drawn"}
        stored = client.responses.create(**request(
            input=[result], previous_response_id=first.id, tools=[self.TOOL], tool_choice="none"))
        sent = [*self.send()["input"], *(item.model_dump(exclude_none=True) for item in first.output), result]
        again = client.responses.create(**request(input=sent, tools=[self.TOOL], tool_choice="none"))
        self.assertEqual((stored.output_text, stored.usage.input_tokens), (again.output_text, again.usage.input_tokens))
        self.assertEqual(stored.tools[0].model_dump(exclude_none=True), self.TOOL)


class Codex(unittest.TestCase):
    """Calls are forced: the tests check how a call is passed, not how well a small model chooses."""

    def whole(self, items, **more):
        return client.responses.create(**codex_request(items, **more)).model_dump()

    def streamed(self, items, **more):
        """Returns the response that the events add up to. Codex takes its items from `output_item.done`."""
        output, last, deltas = [], None, ""
        for i, event in enumerate(client.responses.create(**codex_request(items, **more), stream=True)):
            self.assertEqual(event.sequence_number, i)
            if event.type == "response.output_item.added":
                self.assertEqual(event.output_index, len(output))
            elif event.type in ("response.function_call_arguments.delta", "response.output_text.delta"):
                deltas += event.delta
            elif event.type == "response.output_item.done":
                output.append(event.item.model_dump())
            last = event
        self.assertEqual(last.type.removeprefix("response."), last.response.status)
        response = last.response.model_dump()
        self.assertEqual(response["output"], output)
        (item,) = output
        self.assertEqual(deltas, item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        return response

    def loop(self, send):
        """Three turns, each with a call and its output, and then an answer."""
        items, replies = [], []
        for turn in range(3):
            reply = send(items)
            (call,) = reply["output"]
            self.assertEqual((reply["status"], call["type"], call["name"]), ("completed", "function_call", "shell"))
            self.assertIsInstance(json.loads(call["arguments"])["command"], list)
            replies.append(reply)
            # Codex sends items back without their ids.
            sent = {name: call[name] for name in ("type", "name", "arguments", "call_id")}
            output = json.dumps({"output": f"# {turn}", "metadata": {"exit_code": 0, "duration_seconds": 0.1}})
            items += [sent, {"type": "function_call_output", "call_id": call["call_id"], "output": output}]
        last = send(items, tool_choice="none", max_output_tokens=24)
        self.assertEqual([item["type"] for item in last["output"]], ["message"])
        return [*replies, last]

    def comparable(self, reply):
        """Drops the ids and times, and what the prefix cache held."""
        for name in ("id", "created_at", "completed_at"):
            del reply[name]
        del reply["usage"]["input_tokens_details"]
        for item in reply["output"]:
            del item["id"]
        return reply

    def test_three_turns_streamed_and_whole(self):
        whole, streamed = self.loop(self.whole), self.loop(self.streamed)
        self.assertEqual(list(map(self.comparable, whole)), list(map(self.comparable, streamed)))
        self.assertEqual(whole[0]["store"], False)
        self.assertEqual([tool["name"] for tool in whole[0]["tools"]], ["shell", "update_plan", "apply_patch"])

    def test_free_calls(self):
        """As Codex sends it, a model may also answer in words."""
        whole, streamed = (send([], tool_choice="auto", max_output_tokens=24) for send in (self.whole, self.streamed))
        self.assertEqual(self.comparable(whole), self.comparable(streamed))


if __name__ == "__main__":
    unittest.main()
