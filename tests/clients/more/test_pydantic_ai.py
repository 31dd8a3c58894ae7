"""pydantic-ai, unmodified, by both APIs: an agent's loop of calls and results, streamed and whole."""

import unittest
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelSettings, UsageLimits
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from server import Server

server = None


class Place(BaseModel):
    city: str = Field(max_length=12)


def setUpModule():
    global server
    server = Server()


def tearDownModule():
    server.stop()


def models():
    by_openai = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    by_anthropic = AnthropicProvider(base_url=server.url, api_key="none")
    return [OpenAIChatModel("smollm2", provider=by_openai), AnthropicModel("smollm2", provider=by_anthropic)]


class Agents(unittest.IsolatedAsyncioTestCase):
    def agent(self, model):
        """It must answer with a call of its own tool or of the output tool, so every call is forced."""
        agent = Agent(model, output_type=Place, retries=3, model_settings=ModelSettings(max_tokens=100, temperature=0))
        self.seen = []

        @agent.tool_plain
        def look_at(city: Literal["Oslo", "Lima"]) -> str:
            """Looks at a city."""
            self.seen.append(city)
            return "sunny"

        return agent

    async def test_an_answer_has_its_class(self):
        for model in models():
            try:
                result = await self.agent(model).run("Which city?", usage_limits=UsageLimits(request_limit=4))
            except UsageLimitExceeded:
                # A small model may call the tool up to the limit: each of its turns has calls and their results.
                self.assertGreaterEqual(len(self.seen), 4)
                continue
            self.assertIsInstance(result.output, Place)
            self.assertGreater(result.usage.input_tokens, 0)

    async def test_a_stream_is_the_same_run(self):
        for model in models():
            agent = Agent(model, output_type=Place, model_settings=ModelSettings(max_tokens=100, temperature=0))
            whole = (await agent.run("Which city?")).output
            async with agent.run_stream("Which city?") as stream:
                self.assertEqual(await stream.get_output(), whole)


if __name__ == "__main__":
    unittest.main()
