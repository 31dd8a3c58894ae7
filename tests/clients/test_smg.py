"""The gateway `smg` drives a server through `vllm.grpc.engine`, and the unmodified `openai` client calls the
gateway."""

import unittest

import openai

from gateway import Gateway
from server import Server

WAIT_S = 60
server = None
gateway = None
through = None
direct = None
MESSAGES = [{"role": "user", "content": "Name three colours."}]


def setUpModule():
    global server, gateway, through, direct
    server = Server()
    try:
        gateway = Gateway(server)
    except BaseException:
        server.stop()
        raise
    through = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60)
    direct = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def tearDownModule():
    through.close()
    direct.close()
    gateway.stop()
    server.stop()


def chat(client, **more):
    options = {"model": "smollm2", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    return client.chat.completions.create(**(options | more))


def text(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


class Chat(unittest.TestCase):
    def test_answer_is_the_servers_own(self):
        """Template, tokenizer and detokenizer run in the gateway here, made from the server's files."""
        theirs, ours = chat(through), chat(direct)
        self.assertTrue(ours.choices[0].message.content.strip())
        self.assertEqual(theirs.choices[0].message.content, ours.choices[0].message.content)
        self.assertEqual(theirs.choices[0].finish_reason, ours.choices[0].finish_reason)
        self.assertEqual(theirs.usage.prompt_tokens, ours.usage.prompt_tokens)
        self.assertEqual(theirs.usage.completion_tokens, ours.usage.completion_tokens)

    def test_stream_equals_the_answer(self):
        chunks = list(chat(through, stream=True))
        self.assertGreater(len(chunks), 3)
        self.assertEqual(text(chunks), chat(direct).choices[0].message.content)
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        self.assertEqual([reason for reason in reasons if reason], ["length"])

    def test_seed_repeats_the_draw(self):
        drawn = chat(direct, temperature=1, seed=7, top_p=0.9)
        again = chat(through, temperature=1, seed=7, top_p=0.9)
        self.assertEqual(again.choices[0].message.content, drawn.choices[0].message.content)

    def test_stop_string(self):
        whole = chat(direct).choices[0].message.content
        stop = whole[6:9]
        for client in (through, direct):
            cut = chat(client, stop=[stop]).choices[0]
            self.assertEqual((cut.message.content, cut.finish_reason), (whole[: whole.index(stop)], "stop"))

    def test_logprobs(self):
        theirs = chat(through, logprobs=True, top_logprobs=2, max_tokens=4).choices[0].logprobs.content
        ours = chat(direct, logprobs=True, top_logprobs=2, max_tokens=4).choices[0].logprobs.content
        self.assertEqual([one.token for one in theirs], [one.token for one in ours])
        for one, other in zip(theirs, ours):
            self.assertAlmostEqual(one.logprob, other.logprob, places=5)

    def test_choices(self):
        theirs = chat(through, n=2, temperature=1, seed=3, max_tokens=6).choices
        ours = chat(direct, n=2, temperature=1, seed=3, max_tokens=6).choices
        self.assertEqual([one.message.content for one in theirs], [one.message.content for one in ours])


class Leaving(unittest.TestCase):
    def test_cancel_frees_the_blocks(self):
        endless = {"messages": [{"role": "user", "content": "Tell a long story."}], "max_tokens": 4000}
        stream = chat(through, stream=True, extra_body={"ignore_eos": True}, **endless)
        for _ in range(3):
            next(stream)
        server.wait_until(lambda: server.metric("lockstep:requests_running") == 1, WAIT_S, "running")
        self.assertGreater(server.metric("lockstep:kv_usage_ratio"), 0)
        stream.close()
        server.wait_until(server.is_idle, WAIT_S, "idle after its client left the gateway")


class Others(unittest.TestCase):
    def test_model_is_known_by_name(self):
        self.assertIn("smollm2", [model.id for model in through.models.list().data])

    def test_refusal_is_passed_on(self):
        with self.assertRaises(openai.APIStatusError) as caught:
            chat(through, messages=[{"role": "user", "content": "word " * 10_000}])
        self.assertGreaterEqual(caught.exception.status_code, 400)


if __name__ == "__main__":
    unittest.main()
