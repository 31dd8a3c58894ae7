"""LangChain's OpenAI classes, unmodified, against the HTTP API."""

import unittest
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

from server import Server

server = None
MESSAGES = [SystemMessage("You are brief."), HumanMessage("Name three colours.")]


def setUpModule():
    global server
    server = Server()


def tearDownModule():
    server.stop()


def options(**more):
    here = {"model": "smollm2", "base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60}
    return here | more


class Chat(unittest.TestCase):
    def model(self, **more):
        return ChatOpenAI(**options(temperature=0, max_tokens=16, **more))

    def test_answer(self):
        reply = self.model().invoke(MESSAGES)
        self.assertTrue(reply.content.strip())
        usage = reply.usage_metadata
        self.assertEqual(usage["total_tokens"], usage["input_tokens"] + usage["output_tokens"])
        self.assertIn(reply.response_metadata["finish_reason"], ["stop", "length"])

    def test_stream_equals_the_answer(self):
        chunks = list(self.model(stream_usage=True).stream(MESSAGES))
        self.assertEqual("".join(chunk.content for chunk in chunks), self.model().invoke(MESSAGES).content)
        self.assertTrue(any(chunk.usage_metadata for chunk in chunks))

    def test_stop_and_logprobs(self):
        whole = self.model().invoke(MESSAGES).content
        stop = whole[len(whole) // 2 :][:3]
        self.assertEqual(self.model().invoke(MESSAGES, stop=[stop]).content, whole[: whole.index(stop)])
        reply = self.model(logprobs=True, top_logprobs=2).invoke(MESSAGES)
        content = reply.response_metadata["logprobs"]["content"]
        self.assertEqual({len(one["top_logprobs"]) for one in content}, {2})

    def test_batch(self):
        alone = [self.model().invoke(f"Say {word}.").content for word in ["one", "two"]]
        self.assertEqual([reply.content for reply in self.model().batch(["Say one.", "Say two."])], alone)


@tool
def look_at(city: Literal["Oslo", "Lima"]) -> str:
    """Returns the weather of a city."""
    return f"{len(city)} letters"


class Tools(unittest.TestCase):
    """Calls are forced: the tests check how a call is passed, not how well a small model chooses."""

    def loop(self, send):
        # A call's id is a function of the seed too.
        plain = ChatOpenAI(**options(temperature=0, max_tokens=80, seed=7))
        forced = plain.bind_tools([look_at], tool_choice="required", parallel_tool_calls=False)
        messages, calls = list(MESSAGES), []
        for _ in range(3):
            reply = send(forced, messages)
            self.assertEqual([call["name"] for call in reply.tool_calls], ["look_at"])
            messages += [reply, look_at.invoke(reply.tool_calls[0])]
            calls += reply.tool_calls
        last = send(plain.bind_tools([look_at], tool_choice="none"), messages)
        self.assertEqual(last.tool_calls, [])
        return calls, last.content

    def test_three_turns_streamed_and_whole(self):
        def streamed(model, messages):
            parts = list(model.stream(messages))
            return AIMessage(sum(parts[1:], parts[0]).content, tool_calls=sum(parts[1:], parts[0]).tool_calls)

        self.assertEqual(self.loop(lambda model, messages: model.invoke(messages)), self.loop(streamed))

    def test_a_schema_is_met(self):
        schema = {"title": "place", "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}},
                  "required": ["city"], "additionalProperties": False}
        model = ChatOpenAI(**options(temperature=0, max_tokens=80))
        for method in ["json_schema", "function_calling"]:
            self.assertEqual(list(model.with_structured_output(schema, method=method).invoke(MESSAGES)), ["city"])


class Completions(unittest.TestCase):
    def test_answer_and_stream(self):
        # The client sends several prompts in one request.
        model = OpenAI(**options(temperature=0, max_tokens=8))
        prompts = ["The capital of France is", "Two and two are"]
        reply = model.generate(prompts)
        texts = [choices[0].text for choices in reply.generations]
        self.assertIn("Paris", texts[0])
        self.assertEqual("".join(model.stream(prompts[0])), texts[0])
        self.assertEqual(texts[1], model.invoke(prompts[1]))


class Embeddings(unittest.TestCase):
    def test_similar_texts_are_near(self):
        model = OpenAIEmbeddings(**options(check_embedding_ctx_length=False))
        vectors = model.embed_documents(["A cat sat on the mat.", "A cat sat on a mat.", "def f(x): return x + 1"])
        near, far = (sum(a * b for a, b in zip(vectors[0], other)) for other in vectors[1:])
        self.assertGreater(near, far)
        self.assertEqual(model.embed_query("A cat sat on the mat."), vectors[0])


if __name__ == "__main__":
    unittest.main()
