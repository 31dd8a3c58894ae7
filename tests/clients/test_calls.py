"""Several calls in one answer, by the unmodified `openai` and `anthropic` clients: the same whole and streamed.

`min_tokens` keeps the model from ending its answer after the first call. `test_ollama` has the same for Ollama's API.
"""

import json
import unittest

import anthropic
import openai

from server import Server

server = None
by_openai = None
by_anthropic = None
QUESTION = {"role": "user", "content": "How is the weather?"}
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}
TOOL = {"name": "get_weather", "description": "The weather in a city."}
# The ids of calls come from the seed.
LONG = {"seed": 3, "min_tokens": 30}


def setUpModule():
    global server, by_openai, by_anthropic
    server = Server()
    by_openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    by_anthropic = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


def tearDownModule():
    by_openai.close()
    by_anthropic.close()
    server.stop()


class Calls(unittest.TestCase):
    def check(self, calls):
        """Takes (id, name, arguments) of each call of an answer."""
        self.assertGreater(len(calls), 1)
        self.assertEqual(len({id for id, _, _ in calls}), len(calls))
        for id, name, arguments in calls:
            self.assertRegex(id, "^[0-9A-Za-z]{9}$")
            self.assertEqual((name, list(arguments)), ("get_weather", ["city"]))
        return calls


class Chat(Calls):
    def request(self, messages):
        tools = [{"type": "function", "function": {**TOOL, "parameters": CITY, "strict": True}}]
        return {"model": "smollm2", "messages": messages, "tools": tools, "tool_choice": "required", "temperature": 0,
                "max_tokens": 200, "extra_body": LONG}

    def whole(self, messages):
        return by_openai.chat.completions.create(**self.request(messages)).choices[0]

    def streamed(self, messages):
        with by_openai.chat.completions.stream(**self.request(messages)) as stream:
            parts = [part for event in stream if event.type == "chunk" and event.chunk.choices
                     for part in event.chunk.choices[0].delta.tool_calls or []]
            choice = stream.get_final_completion().choices[0]
        # A call's parts come one after the other, and only the first one has its id and name.
        at = [part.index for part in parts]
        self.assertEqual(at, sorted(at))
        calls = choice.message.tool_calls
        self.assertEqual([part.index for part in parts if part.id], list(range(len(calls))))
        self.assertEqual([part.function.name for part in parts if part.id], [call.function.name for call in calls])
        return choice

    def loop(self, send):
        messages, turns = [QUESTION], []
        for _ in range(2):
            choice = send(messages)
            self.assertEqual(choice.finish_reason, "tool_calls")
            calls = [(call.id, call.function.name, json.loads(call.function.arguments))
                     for call in choice.message.tool_calls]
            turns.append(self.check(calls))
            functions = [{"id": call.id, "type": "function", "function": {"name": call.function.name,
                          "arguments": call.function.arguments}} for call in choice.message.tool_calls]
            messages.append({"role": "assistant", "content": None, "tool_calls": functions})
            messages += [{"role": "tool", "tool_call_id": id, "content": "21 degrees"} for id, _, _ in calls]
        return turns

    def test_streamed_and_whole(self):
        self.assertEqual(self.loop(self.whole), self.loop(self.streamed))

    def test_one_call_at_most(self):
        request = self.request([QUESTION]) | {"parallel_tool_calls": False, "extra_body": {"seed": 3}}
        (call,) = by_openai.chat.completions.create(**request).choices[0].message.tool_calls
        self.assertEqual(call.id, self.whole([QUESTION]).message.tool_calls[0].id)


class CustomTools(unittest.TestCase):
    """A tool whose calls have a text instead of arguments, in chats."""

    PATTERN = r'(\d,\d\n){3}"\\end"'
    TOOL = {"type": "custom", "custom": {
        "name": "plot", "description": "Draws a line through points.",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": PATTERN}}}}

    def request(self, **more):
        return {"model": "smollm2", "messages": [QUESTION], "tools": [self.TOOL], "temperature": 0,
                "max_tokens": 200, "parallel_tool_calls": False, "extra_body": {"seed": 3}} | more

    def test_a_call_streamed_and_whole_and_its_result(self):
        for choice in ["required", {"type": "custom", "custom": {"name": "plot"}}]:
            answer = by_openai.chat.completions.create(**self.request(tool_choice=choice)).choices[0]
            (call,) = answer.message.tool_calls
            self.assertEqual((answer.finish_reason, call.type, call.custom.name), ("tool_calls", "custom", "plot"))
            self.assertRegex(call.custom.input, f"^{self.PATTERN}$")
            chunks = by_openai.chat.completions.create(**self.request(tool_choice=choice, stream=True))
            parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
            self.assertEqual((parts[0].id, parts[0].type, parts[0].custom["name"]), (call.id, "custom", "plot"))
            self.assertEqual("".join(part.custom["input"] for part in parts), call.custom.input)
        result = {"role": "tool", "tool_call_id": call.id, "content": "drawn"}
        history = [QUESTION, answer.message.model_dump(exclude_none=True), result]
        after = by_openai.chat.completions.create(**self.request(messages=history, tool_choice="none"))
        self.assertGreater(after.usage.prompt_tokens, 60)


class Responses(Calls):
    def request(self, items):
        tools = [{"type": "function", **TOOL, "parameters": CITY, "strict": True}]
        return {"model": "smollm2", "input": items, "tools": tools, "tool_choice": "required", "temperature": 0,
                "max_output_tokens": 200, "store": False, "extra_body": LONG}

    def whole(self, items):
        return by_openai.responses.create(**self.request(items)).output

    def streamed(self, items):
        """Returns the items that the events add up to, after checks of their order and indices."""
        output, ids, last = [], [], None
        for event in by_openai.responses.create(**self.request(items), stream=True):
            if event.type == "response.output_item.added":
                self.assertEqual(event.output_index, len(output))
                output.append(event.item)
                ids.append(event.item.id)
            elif event.type == "response.function_call_arguments.delta":
                self.assertEqual((event.output_index, event.item_id), (len(output) - 1, ids[-1]))
                output[-1].arguments += event.delta
            elif event.type == "response.function_call_arguments.done":
                self.assertEqual((event.item_id, event.arguments), (ids[-1], output[-1].arguments))
            elif event.type == "response.output_item.done":
                output[-1].status = "completed"
                self.assertEqual((event.output_index, event.item), (len(output) - 1, output[-1]))
            last = event
        self.assertEqual((last.type, last.response.output), ("response.completed", output))
        self.assertEqual(len(set(ids)), len(ids))
        return output

    def loop(self, send):
        items, turns = [QUESTION], []
        for _ in range(2):
            output = send(items)
            kinds = [(item.type, item.status) for item in output]
            self.assertEqual(kinds, [("function_call", "completed")] * len(output))
            calls = [(item.call_id, item.name, json.loads(item.arguments)) for item in output]
            turns.append(self.check(calls))
            items += [item.model_dump(exclude_none=True) for item in output]
            items += [{"type": "function_call_output", "call_id": id, "output": "21 degrees"} for id, _, _ in calls]
        return turns

    def test_streamed_and_whole(self):
        whole = self.loop(self.whole)
        self.assertEqual(whole, self.loop(self.streamed))
        self.assertEqual(whole, Chat().loop(Chat().whole))


class Messages(Calls):
    def request(self, messages, **more):
        request = {"messages": messages, "tool_choice": {"type": "any"}, "extra_body": LONG | {"min_tokens": 40}} | more
        request["extra_body"] = {"temperature": 0} | request["extra_body"]
        tools = [{**TOOL, "input_schema": CITY}]
        return {"model": "smollm2", "max_tokens": 200, "tools": tools} | request

    def whole(self, messages, **more):
        return by_anthropic.messages.create(**self.request(messages, **more))

    def streamed(self, messages, **more):
        started, stopped = [], []
        with by_anthropic.messages.stream(**self.request(messages, **more)) as stream:
            for event in stream:
                if event.type == "content_block_start":
                    self.assertEqual((event.content_block.type, event.content_block.input), ("tool_use", {}))
                    started.append(event.index)
                elif event.type == "content_block_delta":
                    self.assertEqual((event.index, event.delta.type), (started[-1], "input_json_delta"))
                elif event.type == "content_block_stop":
                    stopped.append(event.index)
            message = stream.get_final_message()
        self.assertEqual((started, stopped), (list(range(len(message.content))),) * 2)
        return message

    def loop(self, send):
        message = send([QUESTION])
        self.assertEqual(message.stop_reason, "tool_use")
        calls = self.check([(block.id, block.name, block.input) for block in message.content])
        results = [{"type": "tool_result", "tool_use_id": id, "content": "21 degrees"} for id, _, _ in calls]
        messages = [QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        # This answer has one call: the model may not write a second one.
        last = send(messages, tool_choice={"type": "any", "disable_parallel_tool_use": True}, extra_body={"seed": 3})
        (block,) = last.content
        return calls, (block.id, block.name, block.input), last.usage.output_tokens

    def test_streamed_and_whole(self):
        self.assertEqual(self.loop(self.whole), self.loop(self.streamed))


if __name__ == "__main__":
    unittest.main()
