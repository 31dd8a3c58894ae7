"""Small tokenizers of every kind, trained here, and the ids of transformers for a megabyte of mixed text with each.

    python make_tokenizers.py     writes tokenizers/: corpus.json, bpe.json, llama.json, llama.gguf, unigram.json,
                                  expected.json

The text is made from corpus.json by `documents` (corpus.py), which the Rust test repeats; expected.json has a digest of
the ids of each document.
"""
import hashlib
import json
import pathlib
import sysconfig

import gguf
import sentencepiece
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from corpus import SNIPPETS, documents

OUT = pathlib.Path("tokenizers")
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def training_text():
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    code = [(library / name).read_text() for name in ["argparse.py", "ast.py", "typing.py", "inspect.py", "pydoc.py"]]
    return code + list(documents())[:12]


def digests(tokenizer, add_special):
    out = []
    for text in documents():
        ids = tokenizer(text, add_special_tokens=add_special)["input_ids"]
        packed = b"".join(i.to_bytes(4, "little") for i in ids)
        out.append(f"{len(ids)}:{hashlib.sha256(packed).hexdigest()[:16]}")
    return out


def split(*regexes):
    return [pre_tokenizers.Split(Regex(regex), "isolated") for regex in regexes]


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
END = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = [rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"]
TEKKEN = "|".join(WORDS) + r"|\p{N}|" + END
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = "|".join(word + SUFFIX for word in WORDS) + r"|\p{N}{1,3}|" + END
CJK = "[一-龥ࠀ-一가-\ud7ff]+"
DEEPSEEK3 = (r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^""" "\r\n" r"""\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
             r"| ?[\p{P}\p{S}]+[" "\r\n" r"]*|\s*[" "\r\n" r"]+|\s+(?!\S)|\s+")
LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    r"Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥ"
    r"ῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⲳⳲꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
    .replace(r"\u1fbe", "\u1fbe").replace(r"\u1fd3", "\u1fd3").replace(r"\u1fdb", "\u1fdb").replace(r"\u2126", "\u2126")
    .replace(r"\u212a", "\u212a").replace(r"\u1f7d", "\u1f7d"))
FINNISH = r" ?[^(\s|.,!?…。，、।۔،)]+"
WHOLE = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
BYTES = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
DIGITS = [pre_tokenizers.Digits(individual_digits=True)]
# The name in a GGUF, how its model's tokenizer.json splits, whether it normalizes to NFC, whether it ignores merges.
CUTS = {
    "gpt-2": (WHOLE, False, False), "smollm": (DIGITS + WHOLE, False, False), "command-r": (DIGITS + WHOLE, True,
    False),
    "llama-bpe": (split(LLAMA3) + BYTES, False, True), "dbrx": (split(LLAMA3) + BYTES, False, False),
    "qwen2": (split(QWEN2) + BYTES, True, False), "stablelm2": (split(QWEN2) + BYTES, False, False),
    "tekken": (split(TEKKEN) + BYTES, False, True), "gpt-4o": (split(GPT4O) + BYTES, False, False),
    "deepseek-llm": (split("[\r\n]", LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", CJK, r"\p{N}+") + BYTES, False,
    False),
    "deepseek-coder": (split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK) + DIGITS + BYTES, False, False),
    "deepseek-v3": (split(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK3) + BYTES, False, False),
    "falcon": (split(r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]") + BYTES, False, False),
    "bloom": (split(FINNISH) + BYTES, False, False), "viking": (split(FINNISH) + DIGITS + BYTES, False, False),
}


def byte_level(expected):
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(split(LLAMA3) + BYTES)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(training_text(), trainers.BpeTrainer(vocab_size=1800, initial_alphabet=alphabet))
    trained.add_special_tokens(CONTROL)
    trained.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    trained.decoder = decoders.ByteLevel()
    (OUT / "bpe.json").write_text(trained.to_str())
    for name, (cuts, nfc, ignore_merges) in CUTS.items():
        described = json.loads(trained.to_str())
        described["model"]["ignore_merges"] = ignore_merges
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(described))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
        if nfc:
            tokenizer.normalizer = normalizers.NFC()
        changed = json.loads(tokenizer.to_str())
        wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        expected[f"bpe {name}"] = {
            "change": {"pre_tokenizer": changed["pre_tokenizer"], "normalizer": changed["normalizer"]},
            "model": {"ignore_merges": ignore_merges}, "ids": digests(wrapped, False)}


def sentence_piece(expected):
    text = OUT / "training.txt"
    text.write_text("\n".join(line for part in training_text() for line in part.splitlines() if line.strip()))
    common = dict(input=str(text), vocab_size=1800, character_coverage=0.995, byte_fallback=True,
        max_sentence_length=20000,
                  normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
                  add_dummy_prefix=True, num_threads=1)
    for kind in ["bpe", "unigram"]:
        extra = dict(split_digits=True, allow_whitespace_only_pieces=True,
            user_defined_symbols=["<tool>"]) if kind == "bpe" else {}
        sentencepiece.SentencePieceTrainer.train(model_prefix=str(OUT / kind), model_type=kind, **common, **extra)
    text.unlink()
    llama(expected, sentencepiece.SentencePieceProcessor(model_file=str(OUT / "bpe.model")))
    unigram(expected, sentencepiece.SentencePieceProcessor(model_file=str(OUT / "unigram.model")))
    for path in OUT.glob("*.model"):
        path.unlink()
    for path in OUT.glob("*.vocab"):
        path.unlink()


def merges_by_score(pieces):
    """As transformers converts a SentencePiece model."""
    ids = {piece: i for i, (piece, _) in enumerate(pieces)}
    merges = []
    for piece, score in pieces:
        ways = [(piece[:at], piece[at:]) for at in range(1, len(piece)) if piece[:at] in ids and piece[at:] in ids]
        merges += [(left, right, score) for left, right in sorted(ways, key=lambda way: (ids[way[0]], ids[way[1]]))]
    return [(left, right) for left, right, _ in sorted(merges, key=lambda merge: merge[2], reverse=True)]


def llama(expected, model):
    pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
    tokenizer = tokenizers.Tokenizer(models.BPE({piece: i for i, (piece, _) in enumerate(pieces)},
        merges_by_score(pieces),
                                                unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in ["<unk>", "<s>", "</s>"]])
    tokenizer.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    (OUT / "llama.json").write_text(tokenizer.to_str())
    spaces = normalizers.Replace(" ", "▁")
    # Llama 2 as it was published, Mistral as transformers converts it today, Gemma.
    forms = {"llama": (normalizers.Sequence([normalizers.Prepend("▁"), spaces]), None),
             "mistral": (None, pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)),
             "gemma": (spaces, pre_tokenizers.Split(" ", "merged_with_previous"))}
    for name, (normalizer, cut) in forms.items():
        form = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        if normalizer:
            form.normalizer = normalizer
        if cut:
            form.pre_tokenizer = cut
        changed = json.loads(form.to_str())
        expected[f"llama {name}"] = {
            "change": {"pre_tokenizer": changed["pre_tokenizer"], "normalizer": changed["normalizer"]}, "model": {},
            "ids": digests(PreTrainedTokenizerFast(tokenizer_object=form), False)}
    kinds = []
    for i in range(model.get_piece_size()):
        kind = gguf.TokenType.NORMAL
        if model.is_unknown(i):
            kind = gguf.TokenType.UNKNOWN
        elif model.is_control(i):
            kind = gguf.TokenType.CONTROL
        elif model.is_byte(i):
            kind = gguf.TokenType.BYTE
        elif pieces[i][0] == "<tool>":
            kind = gguf.TokenType.USER_DEFINED
        kinds.append(kind)
    writer = gguf.GGUFWriter(str(OUT / "llama.gguf"), "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece for piece, _ in pieces])
    writer.add_token_scores([score for _, score in pieces])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def unigram(expected, model):
    pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", prepend_scheme="always")])
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in ["<unk>", "<s>", "</s>"]])
    (OUT / "unigram.json").write_text(tokenizer.to_str())
    expected["unigram"] = {"change": {}, "model": {},
                           "ids": digests(PreTrainedTokenizerFast(tokenizer_object=tokenizer), False)}


OUT.mkdir(exist_ok=True)
(OUT / "corpus.json").write_text(json.dumps(SNIPPETS))
expected = {}
byte_level(expected)
sentence_piece(expected)
(OUT / "expected.json").write_text(json.dumps(expected, indent=0))
print(sum(len(text.encode()) for text in documents()), "bytes of text")
