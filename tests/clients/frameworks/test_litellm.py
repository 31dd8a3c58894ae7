"""litellm, unmodified, with this server as an OpenAI-compatible one."""

import json
import os
import unittest

# Its table of prices comes from its own package, so that a test sends no request to the internet.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

from server import Server

server = None
MESSAGES = [{"role": "user", "content": "Name three colours."}]


def setUpModule():
    global server
    litellm.telemetry = False
    server = Server()


def tearDownModule():
    server.stop()


def options(**more):
    here = {"api_base": f"{server.url}/v1", "api_key": "none", "max_retries": 0, "temperature": 0, "max_tokens": 16}
    return here | more


def chat(**more):
    return litellm.completion(**({"model": "openai/smollm2", "messages": MESSAGES} | options() | more))


class LiteLlm(unittest.TestCase):
    def test_chat(self):
        reply = chat()
        self.assertTrue(reply.choices[0].message.content.strip())
        self.assertEqual(reply.usage.total_tokens, reply.usage.prompt_tokens + reply.usage.completion_tokens)

    def test_stream_equals_the_answer(self):
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chat(stream=True))
        self.assertEqual(text, chat().choices[0].message.content)

    def test_seed_and_choices(self):
        draw = lambda seed: [choice.message.content for choice in chat(temperature=1, n=2, seed=seed).choices]
        self.assertEqual(draw(5), draw(5))
        self.assertEqual(len(set(draw(5))), 2)

    def test_completion(self):
        reply = litellm.text_completion(
            model="text-completion-openai/smollm2", prompt="The capital of France is", **options(max_tokens=8)
        )
        self.assertIn("Paris", reply.choices[0].text)

    def test_three_turns_of_calls_by_both_apis(self):
        parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}},
                      "required": ["city"], "additionalProperties": False}
        tool = {"type": "function", "function": {"name": "look_at", "description": "Looks.", "parameters": parameters}}

        def whole(**arguments):
            return chat(**arguments).choices[0].message

        def streamed(**arguments):
            chunks = list(chat(stream=True, **arguments))
            return litellm.stream_chunk_builder(chunks).choices[0].message

        def loop(send, **more):
            messages, calls = list(MESSAGES), []
            for turn in range(3):
                message = send(messages=messages, tools=[tool], tool_choice="required", max_tokens=80, **more)
                call = message.tool_calls[0]
                messages.append({"role": "assistant", "content": "", "tool_calls": [call.model_dump()]})
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"Result {turn}."})
                calls.append((call.function.name, list(json.loads(call.function.arguments))))
            self.assertTrue(send(messages=messages, tools=[tool], **more).role)
            return calls

        anthropic = {"model": "anthropic/smollm2", "api_base": server.url}
        for more in [{}, anthropic]:
            self.assertEqual(loop(whole, **more), [("look_at", ["city"])] * 3)
            self.assertEqual(loop(streamed, **more), [("look_at", ["city"])] * 3)

    def test_errors_have_their_classes(self):
        with self.assertRaises(litellm.BadRequestError):
            chat(temperature=5)
        with self.assertRaises(litellm.NotFoundError):
            chat(model="openai/no-such-model")
        with self.assertRaises(litellm.BadRequestError):
            chat(messages=[{"role": "user", "content": "word " * 10_000}])


if __name__ == "__main__":
    unittest.main()
