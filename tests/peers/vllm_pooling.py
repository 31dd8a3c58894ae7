"""A pytest plugin for vLLM's tests of models that embed, classify and score: a Lockstep server with a stand-in for each
of their models, and the results of sentence-transformers for the same stand-in.

`stand_ins.py` makes the stand-ins. Requires torch, which the other tests only import.
"""

import dataclasses
import os
import sys
import types

import pytest
import transformers

own_tokenizer = transformers.AutoTokenizer.from_pretrained
import vllm_server  # noqa: E402

# These packages are real here, and so are tokenizers.
vllm_server.ROOTS -= {"torch", "torchvision", "PIL"}
transformers.AutoTokenizer.from_pretrained = own_tokenizer

import torch  # noqa: E402
from sentence_transformers import CrossEncoder, SentenceTransformer  # noqa: E402

# The folder with the stand-in of a model.
FOLDERS = {
    "BAAI/bge-base-en-v1.5": "embedder", "intfloat/multilingual-e5-small": "embedder",
    "sentence-transformers/all-MiniLM-L12-v2": "embedder", "Snowflake/snowflake-arctic-embed-m-v1.5": "shortened",
    "BAAI/bge-reranker-base": "ranker", "jason9693/Qwen2.5-1.5B-apeach": "classifier",
}


def folder(model):
    return os.path.join(os.environ["PEER_STAND_INS"], FOLDERS[model])


class HfRunner:
    """The results of sentence-transformers."""

    def __init__(self, model, *, is_cross_encoder=False, **_):
        kind = CrossEncoder if is_cross_encoder else SentenceTransformer
        self.model = kind(folder(model), device="cpu")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def encode(self, prompts):
        return self.model.encode(prompts, show_progress_bar=False)

    def predict(self, pairs, **_):
        return torch.as_tensor(self.model.predict(pairs, show_progress_bar=False))


@pytest.fixture(scope="module")
def hf_runner():
    return HfRunner


class Reply:
    """A reply of a server: a member that is missing in it fails the test that reads it."""

    def __init__(self, members):
        self.__dict__.update({name: Reply.of(value) for name, value in members.items()})

    @staticmethod
    def of(value):
        if isinstance(value, list):
            return [Reply.of(one) for one in value]
        return Reply(value) if isinstance(value, dict) else value

    @classmethod
    def model_validate(cls, members):
        assert "error" not in members, members
        return cls(members)

    def model_dump(self, exclude=frozenset(), **_):
        def plain(value):
            if isinstance(value, list):
                return [plain(one) for one in value]
            return value.model_dump() if isinstance(value, Reply) else value

        return {name: plain(value) for name, value in vars(self).items() if name not in exclude}


@dataclasses.dataclass
class MetadataItem:
    index: int
    embed_dtype: str
    endianness: str
    start: int
    end: int
    shape: tuple

    def tensor(self, body):
        return binary2tensor(body[self.start:self.end], self.shape, self.embed_dtype, self.endianness)


# Each type's number of bytes.
DTYPES = {
    "float32": (torch.float32, 4), "float16": (torch.float16, 2), "bfloat16": (torch.bfloat16, 2),
    "fp8_e4m3": (torch.float8_e4m3fn, 1), "fp8_e5m2": (torch.float8_e5m2, 1),
}


def binary2tensor(binary, shape, dtype, endianness):
    kind, n_bytes = DTYPES[dtype]
    numbers = [binary[at:at + n_bytes] for at in range(0, len(binary), n_bytes)]
    if endianness == "big":
        numbers = [number[::-1] for number in numbers]
    return torch.frombuffer(bytearray(b"".join(numbers)), dtype=kind).reshape(shape)


def metadata_items(embed_dtype, endianness, shape, n_request):
    n_bytes = DTYPES[embed_dtype][1] * shape[0]
    return [MetadataItem(i, embed_dtype, endianness, i * n_bytes, (i + 1) * n_bytes, shape) for i in range(n_request)]


def in_place(name, **members):
    module = vllm_server.StandIn(name)
    vars(module).update(members)
    sys.modules[name] = module


def stand_in():
    in_place("tests.conftest", HfRunner=HfRunner)
    in_place("tests.models.registry", HF_EXAMPLE_MODELS=None)
    for kind, replies in {
        "embed": ["EmbeddingResponse"], "pooling": ["PoolingResponse"], "classify": ["ClassificationResponse"],
        "scoring": ["RerankResponse", "ScoreResponse"],
    }.items():
        in_place(f"vllm.entrypoints.pooling.{kind}.protocol", **dict.fromkeys(replies, Reply))
    in_place("vllm.entrypoints.pooling.utils", MetadataItem=MetadataItem, build_metadata_items=metadata_items,
             decode_pooling_output=lambda items, body: [item.tensor(body) for item in items])
    in_place("vllm.utils.serial_utils", EMBED_DTYPES=list(DTYPES), ENDIANNESS=["native", "big", "little"],
             binary2tensor=binary2tensor)
    in_place("vllm.platforms", current_platform=types.SimpleNamespace(is_rocm=lambda: False))
    in_place("vllm.tokenizers", get_tokenizer=lambda tokenizer_name: own_tokenizer(folder(tokenizer_name)))
    vllm_server.served = folder


stand_in()
