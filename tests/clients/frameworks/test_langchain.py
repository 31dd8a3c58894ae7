"""LangChain's OpenAI classes, unmodified, against the HTTP API."""

import unittest

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

from server import Server

server = None
ASK = [SystemMessage("You are brief."), HumanMessage("Name three colours.")]


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
        reply = self.model().invoke(ASK)
        self.assertTrue(reply.content.strip())
        usage = reply.usage_metadata
        self.assertEqual(usage["total_tokens"], usage["input_tokens"] + usage["output_tokens"])
        self.assertIn(reply.response_metadata["finish_reason"], ["stop", "length"])

    def test_stream_says_the_same(self):
        chunks = list(self.model(stream_usage=True).stream(ASK))
        self.assertEqual("".join(chunk.content for chunk in chunks), self.model().invoke(ASK).content)
        self.assertTrue(any(chunk.usage_metadata for chunk in chunks))

    def test_stop_and_logprobs(self):
        whole = self.model().invoke(ASK).content
        stop = whole[len(whole) // 2 :][:3]
        self.assertEqual(self.model().invoke(ASK, stop=[stop]).content, whole[: whole.index(stop)])
        reply = self.model(logprobs=True, top_logprobs=2).invoke(ASK)
        content = reply.response_metadata["logprobs"]["content"]
        self.assertEqual({len(one["top_logprobs"]) for one in content}, {2})

    def test_batch(self):
        alone = [self.model().invoke(f"Say {word}.").content for word in ["one", "two"]]
        self.assertEqual([reply.content for reply in self.model().batch(["Say one.", "Say two."])], alone)


class Completions(unittest.TestCase):
    def test_answer_and_stream(self):
        # It asks for several prompts in one request.
        model = OpenAI(**options(temperature=0, max_tokens=8))
        prompts = ["The capital of France is", "Two and two are"]
        reply = model.generate(prompts)
        texts = [choices[0].text for choices in reply.generations]
        self.assertIn("Paris", texts[0])
        self.assertEqual("".join(model.stream(prompts[0])), texts[0])
        self.assertEqual(texts[1], model.invoke(prompts[1]))


class Embeddings(unittest.TestCase):
    def test_like_is_near(self):
        model = OpenAIEmbeddings(**options(check_embedding_ctx_length=False))
        vectors = model.embed_documents(["A cat sat on the mat.", "A cat sat on a mat.", "def f(x): return x + 1"])
        near, far = (sum(a * b for a, b in zip(vectors[0], other)) for other in vectors[1:])
        self.assertGreater(near, far)
        self.assertEqual(model.embed_query("A cat sat on the mat."), vectors[0])


if __name__ == "__main__":
    unittest.main()
