"""WordPiece and Unigram vocabularies as GGUFs, and the ids of Hugging Face's tokenizers for the documents of corpus.py.

    python make_words.py     writes tokenizers/: bert.gguf, t5.gguf, words.json

The vocabularies are trained on the documents. bert.gguf marks the first part of a word with `▁`; tokenizers marks the
others with `##`. t5.gguf pads the vocabulary and lowers the scores of added tokens. llama.cpp's converters do the same
(conversion/bert.py and conversion/t5.py). The map of characters has a few rules, listed here.
"""
import hashlib
import io
import json
import pathlib
import tempfile

import gguf
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from corpus import documents

OUT = pathlib.Path("tokenizers")
N_PADDING = 5
Kind = gguf.TokenType
# Blanks become spaces, some compatibility characters are spelled out, one is dropped, and accents are composed.
RULES = {"\t": " ", "\n": " ", "\r": " ", "\u00a0": " ", "\u3000": " ", "\u2003": " ", "ﬁ": "fi", "ﬀ": "ff", "½": "1/2",
         "²": "2", "Ⅷ": "VIII", "ⅷ": "viii", "①": "1", "\u200b": "", "\ufeff": "", "e\u0301": "é", "o\u0308": "ö",
         "n\u0303": "ñ", "A\u030a": "Å", "\u212b": "Å", "…": "..."}
RULES |= {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}


def digests(tokenizer):
    out = []
    for text in documents():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        packed = b"".join(i.to_bytes(4, "little") for i in ids)
        out.append(f"{len(ids)}:{hashlib.sha256(packed).hexdigest()[:16]}")
    return out


def expectation(tokenizer):
    return {"ids": digests(tokenizer), "with_special": " ".join(map(str, tokenizer.encode("Naïve 漢字").ids))}


def writer_of(name, model, tokens, kinds):
    writer = gguf.GGUFWriter(str(OUT / name), "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    return writer


def write(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def bert_tokenizer(tokenizer, lowercase):
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def bert(expected):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = bert_tokenizer(tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]")), True)
    # Some characters stay unknown.
    trainer = trainers.WordPieceTrainer(vocab_size=1500, limit_alphabet=300, special_tokens=special)
    # A file cannot tell `##▁x` from `x`.
    tokenizer.train_from_iterator([text.replace("▁", "") for text in list(documents())[:12]], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(text, tokenizer.token_to_id(text)) for text in ["[CLS]", "[SEP]"]])
    tokenizer.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    expected["bert"] = expectation(tokenizer)
    tokenizer = bert_tokenizer(tokenizer, False)
    expected["bert cased"] = expectation(tokenizer)
    texts = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    kinds = [Kind.CONTROL if text in special else Kind.NORMAL for text in texts]
    kinds[texts.index("<tool>")] = Kind.USER_DEFINED
    marked = [text if kind == Kind.CONTROL else text[2:] if text.startswith("##") else "▁" + text
              for text, kind in zip(texts, kinds)]
    writer = writer_of("bert.gguf", "bert", marked, kinds)
    writer.add_bos_token_id(tokenizer.token_to_id("[CLS]"))
    writer.add_sep_token_id(tokenizer.token_to_id("[SEP]"))
    writer.add_unk_token_id(tokenizer.token_to_id("[UNK]"))
    write(writer)


def trained_unigram():
    def codes(text):
        return " ".join(f"{ord(character):X}" for character in text)
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        rules.write("".join(f"{codes(before)}\t{codes(after)}\n" for before, after in RULES.items()))
        rules.flush()
        model = io.BytesIO()
        lines = [line for text in list(documents())[:12] for line in text.replace("\0", "").split("\n")]
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, model_type="unigram", vocab_size=1000,
            character_coverage=0.99, normalization_rule_tsv=rules.name, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
            num_threads=1, max_sentence_length=100_000, minloglevel=2)
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model.getvalue())
    return proto


def t5(expected):
    proto = trained_unigram()
    charsmap = proto.normalizer_spec.precompiled_charsmap
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    added = ["<extra_id_1>", "<extra_id_0>", "<tool>"]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces + [(text, 0.0) for text in added], unk_id=2))
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in added])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.normalizer = normalizers.Precompiled(charsmap)
    metaspace = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    expected["t5"] = expectation(tokenizer)
    tokenizer.pre_tokenizer = metaspace
    expected["t5 with blanks"] = expectation(tokenizer)
    tokens = [text for text, _ in pieces] + added + [f"[PAD{i}]" for i in range(N_PADDING)]
    kinds = [piece.type for piece in proto.pieces] + [Kind.USER_DEFINED] * len(added) + [Kind.UNUSED] * N_PADDING
    writer = writer_of("t5.gguf", "t5", tokens, kinds)
    writer.add_token_scores([score for _, score in pieces] + [-1000.0] * len(added) + [-10000.0] * N_PADDING)
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    writer.add_precompiled_charsmap(charsmap)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_pad_token_id(0)
    write(writer)


expected = {}
bert(expected)
t5(expected)
(OUT / "words.json").write_text(json.dumps(expected, indent=0))
