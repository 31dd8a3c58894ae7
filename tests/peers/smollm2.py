"""The tokenizer of the model that is served, for tests that count tokens. Built from the model's GGUF."""

import functools
import os


@functools.cache
def tokenizer():
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(os.environ["PEER_MODEL"]).fields
    of = {name: fields[name].contents() for name in fields if name.startswith("tokenizer.")}
    tokens, kinds = of["tokenizer.ggml.tokens"], of["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in of["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    made.decoder = decoders.ByteLevel()
    control = 3
    made.add_special_tokens([AddedToken(t, special=True) for t, kind in zip(tokens, kinds) if kind == control])
    named = {
        "bos_token": tokens[of["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[of["tokenizer.ggml.eos_token_id"]],
    }
    template = of["tokenizer.chat_template"]
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **named)
