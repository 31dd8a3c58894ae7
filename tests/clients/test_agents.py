"""`openai-agents`, unmodified, against `/v1/responses`: loops of calls and results, whole and streamed."""

import asyncio
import unittest
from typing import Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    ToolsToFinalOutputResult,
    function_tool,
    set_tracing_disabled,
)

from server import Server

server = None
N_TURNS = 3


def setUpModule():
    global server
    set_tracing_disabled(True)
    server = Server()


def tearDownModule():
    server.stop()


class Loop:
    """An agent that must call a tool, and stops after its third result."""

    def __init__(self, **settings):
        self.calls = []

        @function_tool
        def weather(city: Literal["Paris", "Rome"], day: Literal["today", "tomorrow"]) -> str:
            """The weather in a city."""
            self.calls.append((city, day))
            return f"{20 + len(self.calls)} degrees in {city}"

        def behavior(_context, results):
            is_done = len(self.calls) >= N_TURNS
            return ToolsToFinalOutputResult(is_final_output=is_done, final_output=results[-1].output)

        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        self.agent = Agent(
            name="reporter",
            instructions="Report the weather.",
            model=OpenAIResponsesModel(model="smollm2", openai_client=client),
            model_settings=ModelSettings(
                tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=64, **settings
            ),
            tools=[weather],
            tool_use_behavior=behavior,
            reset_tool_choice=False,
        )

    def whole(self):
        return asyncio.run(Runner.run(self.agent, "How is the weather?", max_turns=N_TURNS))

    def streamed(self):
        async def run():
            result = Runner.run_streamed(self.agent, "How is the weather?", max_turns=N_TURNS)
            names = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
            return result, names

        return asyncio.run(run())


class Agents(unittest.TestCase):
    def check(self, loop, result):
        self.assertEqual(len(loop.calls), N_TURNS)
        self.assertTrue(result.final_output.startswith(f"{20 + N_TURNS} degrees in "), result.final_output)
        self.assertEqual(len(result.raw_responses), N_TURNS)
        kinds = [item.type for item in result.new_items]
        self.assertEqual(kinds, ["tool_call_item", "tool_call_output_item"] * N_TURNS)

    def test_a_loop_of_three_turns(self):
        loop = Loop()
        self.check(loop, loop.whole())

    def test_a_streamed_loop_is_the_same(self):
        whole, streamed = Loop(), Loop()
        whole.whole()
        result, names = streamed.streamed()
        self.check(streamed, result)
        self.assertEqual(streamed.calls, whole.calls)
        self.assertEqual(names.count("response.completed"), N_TURNS)
        self.assertGreater(names.count("response.function_call_arguments.delta"), N_TURNS)

    def test_by_previous_responses(self):
        """The server keeps the conversation, and the answers are the same."""
        whole, stored = Loop(), Loop()
        whole.whole()
        run = Runner.run(
            stored.agent, "How is the weather?", max_turns=N_TURNS, auto_previous_response_id=True
        )
        self.check(stored, asyncio.run(run))
        self.assertEqual(stored.calls, whole.calls)


if __name__ == "__main__":
    unittest.main()
