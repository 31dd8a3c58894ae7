"""A gRPC client without generated code: it gets all types from the server's reflection."""

import unittest

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from server import Server

server = None
channel = None
pool = None
WAIT_S = 60


def setUpModule():
    global server, channel, pool
    server = Server()
    channel = grpc.insecure_channel(server.grpc)
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))


def tearDownModule():
    channel.close()
    server.stop()


def call(service, method, /, **fields):
    """Calls a method found by reflection. Returns the reply, or an iterator of replies."""
    found = pool.FindServiceByName(service).FindMethodByName(method)
    kind = channel.unary_stream if found.server_streaming else channel.unary_unary
    Request, Reply = GetMessageClass(found.input_type), GetMessageClass(found.output_type)
    stub = kind(f"/{service}/{method}", Request.SerializeToString, Reply.FromString)
    return stub(Request(**fields), timeout=WAIT_S)


def inference(method, **fields):
    return call("lockstep.v1.Inference", method, **fields)


class Answer:
    """Runs one Generate, and asserts what holds for every stream."""

    def __init__(self, test, **fields):
        events = list(inference("Generate", **fields))
        kinds = [event.WhichOneof("event") for event in events]
        test.assertEqual(kinds[0], "started")
        test.assertEqual(kinds[-1], "finished")
        test.assertEqual(set(kinds[1:-1]) - {"delta"}, set())
        self.started, self.finished = events[0].started, events[-1].finished
        self.deltas = [event.delta for event in events[1:-1]]
        self.ids, self.text = [], ""
        for delta in self.deltas:
            if delta.token_ids:
                test.assertEqual(delta.position, len(self.ids), "positions have no gap")
            self.ids += delta.token_ids
            self.text += delta.text
        test.assertEqual(self.finished.usage.completion_tokens, len(self.ids))
        test.assertEqual(self.finished.usage.prompt_tokens, self.started.prompt_tokens)


GREEDY = {"temperature": 0, "max_tokens": 12}
CHAT = {"messages": [{"role": "user", "content": "Name three colours."}]}


class Generate(unittest.TestCase):
    def reason(self, answer):
        field = answer.finished.DESCRIPTOR.fields_by_name["reason"]
        return field.enum_type.values_by_number[answer.finished.reason].name

    def test_text(self):
        answer = Answer(self, text="The capital of France is", sampling=GREEDY)
        self.assertIn("Paris", answer.text)
        self.assertEqual(answer.started.prompt_tokens, 5)
        self.assertEqual(self.reason(answer), "REASON_LENGTH")

    def test_chat_is_its_token_ids(self):
        chat = Answer(self, chat=CHAT, sampling=GREEDY)
        ids = inference("Tokenize", chat=CHAT).token_ids
        self.assertEqual(len(ids), chat.started.prompt_tokens)
        same = Answer(self, token_ids={"ids": ids}, sampling=GREEDY)
        self.assertEqual((same.ids, same.text), (chat.ids, chat.text))

    def test_started_has_the_seed_that_repeats_it(self):
        drawn = Answer(self, chat=CHAT, sampling={"temperature": 1, "max_tokens": 12})
        again = Answer(self, chat=CHAT, sampling={"temperature": 1, "max_tokens": 12, "seed": drawn.started.seed})
        self.assertEqual(again.ids, drawn.ids)

    def test_stop_string(self):
        whole = Answer(self, text="1, 2, 3, 4, 5, 6,", sampling=GREEDY)
        stop = whole.text.strip()[2:4]
        cut = Answer(self, text="1, 2, 3, 4, 5, 6,", sampling=GREEDY | {"stop": [stop]})
        self.assertEqual(cut.text, whole.text[: whole.text.index(stop)])
        self.assertEqual((self.reason(cut), cut.finished.stop), ("REASON_STOP", stop))

    def test_logprobs(self):
        answer = Answer(self, chat=CHAT, sampling=GREEDY | {"logprobs": 2})
        logprobs = [one for delta in answer.deltas for one in delta.logprobs]
        self.assertEqual([one.token_id for one in logprobs], answer.ids)
        self.assertTrue(all(len(one.top) == 2 and one.top[0].token_id == one.token_id for one in logprobs))


class Choices(unittest.TestCase):
    SAMPLING = {"temperature": 1, "max_tokens": 12, "seed": 7}

    def test_several_in_one_stream_are_those_of_single_requests(self):
        ids, finished = {0: [], 1: [], 2: []}, []
        for event in inference("Generate", chat=CHAT, sampling=self.SAMPLING, n=3):
            if event.WhichOneof("event") == "delta":
                self.assertEqual(event.delta.position, len(ids[event.delta.choice]))
                ids[event.delta.choice] += event.delta.token_ids
            elif event.WhichOneof("event") == "finished":
                finished.append(event.finished.choice)
        self.assertEqual(sorted(finished), [0, 1, 2])
        self.assertNotEqual(ids[0], ids[1])
        self.assertEqual(ids, {i: Answer(self, chat=CHAT, sampling=self.SAMPLING, choice=i).ids for i in ids})

    def test_parts_are_lines_of_one_text(self):
        parts = [{"text": "Name three"}, {"text": "colours."}]
        joined = {"messages": [{"role": "user", "content": "Name three\ncolours."}]}
        ids = inference("Tokenize", chat={"messages": [{"role": "user", "parts": parts}]}).token_ids
        self.assertEqual(ids, inference("Tokenize", chat=joined).token_ids)


class VllmServer(unittest.TestCase):
    """The services of vLLM's own gRPC server give the tokens of `lockstep.v1`."""

    STOPPING = {"max_new_tokens": 12}
    RESPONSE = {"output_token_ids": True}

    def test_answer_and_stream(self):
        ours = Answer(self, text="The capital of France is", sampling=GREEDY)
        fields = {"text": "The capital of France is", "stopping": self.STOPPING, "response": self.RESPONSE}
        whole = call("vllm.Inference", "Generate", **fields)
        self.assertEqual((list(whole.outputs.token_ids), whole.outputs.text), (ours.ids, ours.text))
        self.assertEqual(whole.prompt_info.num_prompt_tokens, ours.started.prompt_tokens)
        self.assertEqual(whole.outputs.finish_info.num_output_tokens, 12)
        parts = list(call("vllm.Inference", "GenerateStream", **fields))
        self.assertTrue(parts[0].HasField("prompt_info") and parts[-1].outputs.HasField("finish_info"))
        self.assertEqual([token for part in parts for token in part.outputs.token_ids], ours.ids)

    def test_control(self):
        info = call("vllm.Control", "GetServerInfo")
        self.assertEqual((info.max_model_len, info.parallelism.tensor_parallel_size), (8192, 1))
        self.assertTrue(call("vllm.Control", "GetModelInfo").supports_text_input)
        self.assertFalse(call("vllm.Control", "IsPaused").paused)


class Others(unittest.TestCase):
    def test_health(self):
        # SERVING = 1 in grpc.health.v1.
        self.assertEqual(call("grpc.health.v1.Health", "Check").status, 1)
        self.assertEqual(call("grpc.health.v1.Health", "Check", service="lockstep.v1.Inference").status, 1)

    def test_text_to_tokens_and_back(self):
        text = "naïve café — 東京 🙂 123"
        ids = inference("Tokenize", text=text).token_ids
        self.assertEqual(inference("Detokenize", token_ids=ids).text, text)

    def test_models(self):
        models = inference("ListModels").models
        self.assertEqual([model.context for model in models], [8192])
        self.assertEqual(len(models[0].policy_digest), 32)


class Refusals(unittest.TestCase):
    def refused(self, code, **fields):
        with self.assertRaises(grpc.RpcError) as caught:
            list(inference("Generate", **fields))
        self.assertEqual(caught.exception.code(), code, caught.exception.details())
        self.assertTrue(caught.exception.details())

    def test_typed(self):
        invalid = grpc.StatusCode.INVALID_ARGUMENT
        self.refused(invalid)
        self.refused(invalid, text="x", sampling={"temperature": -1})
        self.refused(invalid, token_ids={"ids": [4_000_000]}, sampling=GREEDY)
        self.refused(invalid, text="word " * 10_000, sampling=GREEDY)
        self.refused(grpc.StatusCode.NOT_FOUND, model="no-such-model", text="x", sampling=GREEDY)


if __name__ == "__main__":
    unittest.main()
