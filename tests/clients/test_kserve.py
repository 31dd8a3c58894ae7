"""The Open Inference Protocol by a gRPC client that gets all its types from reflection."""

import struct
import unittest

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from server import Server

SERVICE = "inference.GRPCInferenceService"
WAIT_S = 60
server = None
channel = None
pool = None


def setUpModule():
    global server, channel, pool
    server = Server()
    channel = grpc.insecure_channel(server.grpc)
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))


def tearDownModule():
    channel.close()
    server.stop()


def method(name):
    found = pool.FindServiceByName(SERVICE).FindMethodByName(name)
    return GetMessageClass(found.input_type), GetMessageClass(found.output_type), f"/{SERVICE}/{name}"


def call(name, /, **fields):
    Request, Reply, path = method(name)
    return channel.unary_unary(path, Request.SerializeToString, Reply.FromString)(Request(**fields), timeout=WAIT_S)


def infer(text, sampling="{}", **more):
    """Encodes a request as Triton's clients do: contents in a field of their own, each element after its length."""
    values = [("text_input", "BYTES", framed(text)), ("sampling_parameters", "BYTES", framed(sampling))]
    values += [(name, "BOOL", struct.pack("?", value)) for name, value in more.items()]
    inputs = [{"name": name, "datatype": kind, "shape": [1]} for name, kind, _ in values]
    return {"model_name": "smollm2", "inputs": inputs, "raw_input_contents": [value for _, _, value in values]}


def framed(text):
    return struct.pack("<I", len(text.encode())) + text.encode()


def text_of(response):
    raw = response.raw_output_contents[0]
    assert struct.unpack("<I", raw[:4])[0] == len(raw) - 4
    return raw[4:].decode()


GREEDY = '{"temperature": 0, "max_tokens": "12"}'


class Infer(unittest.TestCase):
    def test_text(self):
        whole = text_of(call("ModelInfer", **infer("The capital of France is", GREEDY)))
        self.assertTrue(whole.startswith("The capital of France is"))
        self.assertIn("Paris", whole)
        answer = text_of(call("ModelInfer", **infer("The capital of France is", GREEDY, exclude_input_in_output=True)))
        self.assertEqual(whole, "The capital of France is" + answer)

    def test_stream(self):
        Request, Reply, path = method("ModelStreamInfer")
        request = Request(**infer("The capital of France is", GREEDY, stream=True))
        stub = channel.stream_stream(path, Request.SerializeToString, Reply.FromString)
        replies = list(stub(iter([request]), timeout=WAIT_S))
        self.assertGreater(len(replies), 2)
        self.assertEqual([reply.error_message for reply in replies if reply.error_message], [])
        whole = text_of(call("ModelInfer", **infer("The capital of France is", GREEDY, exclude_input_in_output=True)))
        self.assertEqual("".join(text_of(reply.infer_response) for reply in replies), whole)

    def test_refusals(self):
        for more, code in (
            (infer("x", '{"temperature": -1}'), grpc.StatusCode.INVALID_ARGUMENT),
            (infer("x", stream=True), grpc.StatusCode.INVALID_ARGUMENT),
            (infer("x") | {"model_name": "no-such-model"}, grpc.StatusCode.NOT_FOUND),
        ):
            with self.assertRaises(grpc.RpcError) as caught:
                call("ModelInfer", **more)
            self.assertEqual(caught.exception.code(), code, caught.exception.details())


class Others(unittest.TestCase):
    def test_live_and_ready(self):
        self.assertTrue(call("ServerLive").live)
        self.assertTrue(call("ServerReady").ready)
        self.assertTrue(call("ModelReady", name="smollm2").ready)
        self.assertFalse(call("ModelReady", name="no-such-model").ready)

    def test_metadata(self):
        self.assertEqual(call("ServerMetadata").name, "lockstep")
        model = call("ModelMetadata", name="smollm2")
        self.assertIn("text_input", [tensor.name for tensor in model.inputs])
        self.assertIn("text_output", [tensor.name for tensor in model.outputs])


if __name__ == "__main__":
    unittest.main()
