"""LlamaIndex, unmodified, by OpenAI's API: three turns of forced calls and their results, streamed and whole."""

import unittest
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from server import Server

server = None


def setUpModule():
    global server
    server = Server()


def tearDownModule():
    server.stop()


def look_at(city: Literal["Oslo", "Lima"]) -> str:
    """Looks at a city."""
    return "sunny"


def model():
    chat = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 8192}
    common = {"max_tokens": 100, "temperature": 0.0, "max_retries": 0, "api_key": "none"}
    return OpenAILike(model="smollm2", api_base=f"{server.url}/v1", **chat, **common)


class Tools(unittest.TestCase):
    def test_three_turns(self):
        tool = FunctionTool.from_defaults(fn=look_at)
        messages = [ChatMessage(role="user", content="Which city do you like?")]
        for _ in range(3):
            reply = model().chat_with_tools([tool], chat_history=messages, tool_required=True)
            [call, *_] = model().get_tool_calls_from_response(reply)
            self.assertEqual((call.tool_name, list(call.tool_kwargs)), ("look_at", ["city"]))
            result = {"tool_call_id": call.tool_id}
            messages += [reply.message, ChatMessage(role="tool", content="sunny", additional_kwargs=result)]
        self.assertIsNotNone(model().chat(messages).message.content)

    def test_streamed_and_whole(self):
        tool = FunctionTool.from_defaults(fn=look_at)
        arguments = {"user_msg": "Which city?", "tool_required": True}
        whole = model().get_tool_calls_from_response(model().chat_with_tools([tool], **arguments))
        *_, last = model().stream_chat_with_tools([tool], **arguments)
        streamed = model().get_tool_calls_from_response(last)
        self.assertEqual([call.tool_kwargs for call in whole], [call.tool_kwargs for call in streamed])


if __name__ == "__main__":
    unittest.main()
