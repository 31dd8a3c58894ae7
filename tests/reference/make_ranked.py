"""Vocabularies that list tokens by rank, and the ids of the packages that read them, for the documents of corpus.py.

    python make_ranked.py     writes tokenizers/: tekken.json, small.tiktoken, ranked.json

The tokens are those of tokenizers/bpe.json (make_tokenizers.py), in the order of its merges. ranked.json has a digest
of the ids of each document: those of mistral-common's Tekkenizer for tekken.json, and those of the package tiktoken
for small.tiktoken with the split patterns and special tokens of several models' Python code.
"""
import base64
import hashlib
import json
import pathlib
import re
import unicodedata

import tiktoken
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from corpus import documents

OUT = pathlib.Path("tokenizers")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def alphabet():
    """GPT-2's characters for bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def ranked_tokens(n):
    byte_of = alphabet()
    merges = json.loads((OUT / "bpe.json").read_text())["model"]["merges"]
    tokens = {bytes([byte]): None for byte in range(256)}
    for left, right in merges:
        tokens[bytes(byte_of[character] for character in left + right)] = None
    return list(tokens)[:n]


def digests(encode, special):
    """Splits at the special tokens, which the packages encode only where a caller asks for them."""
    cut = re.compile("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")")
    out = []
    for text in documents():
        parts = [part for part in cut.split(text) if part]
        ids = [i for part in parts for i in ([special[part]] if part in special else encode(part))]
        packed = b"".join(i.to_bytes(4, "little") for i in ids)
        out.append(f"{len(ids)}:{hashlib.sha256(packed).hexdigest()[:16]}")
    return out


def tekken(expected):
    tokens = ranked_tokens(1000)
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<tool>"]
    config = {"pattern": TEKKEN, "num_vocab_tokens": 1000, "default_vocab_size": 980, "default_num_special_tokens": 20,
              "version": "v13"}
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
             for rank, token in enumerate(tokens)]
    listed = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(special)]
    path = OUT / "tekken.json"
    path.write_text(json.dumps({"config": config, "vocab": vocab, "special_tokens": listed}, separators=(",", ":")))
    theirs = Tekkenizer.from_file(path)
    ids = {text: theirs.get_special_token(text) for text in special}
    expected["tekken"] = {
        "ids": digests(lambda text: theirs.encode(text, bos=False, eos=False), ids),
        "with_bos": " ".join(map(str, theirs.encode("naïve 漢字", bos=True, eos=False))),
        "special": " ".join(theirs.id_to_piece(i) for i in range(20)),
    }


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = (CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
NO_HAN = r"&&[^\p{Han}]]"
KIMI_UPPER, KIMI_LOWER = UPPER[:-1] + NO_HAN, LOWER[:-1] + NO_HAN
KIMI = (rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{KIMI_UPPER}*{KIMI_LOWER}+{CONTRACTIONS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{KIMI_UPPER}+{KIMI_LOWER}*{CONTRACTIONS}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
GLM = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
       "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"]


def of_tiktoken(expected):
    tokens = ranked_tokens(1500)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (OUT / "small.tiktoken").write_text("\n".join(lines) + "\n")
    n = len(ranks)
    # Kimi's special tokens come from tokenizer_config.json, and the others of 256 are reserved.
    of_config = {n: "[BOS]", n + 1: "[EOS]", n + 2: "<|im_end|>", n + 3: "<tool>", n + 4: "<s>"}
    kimi = [of_config.get(i, f"<|reserved_token_{i}|>") for i in range(n, n + 256)]
    qwen = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [f"<|extra_{i}|>" for i in range(205)]
    classes = [("TikTokenTokenizer", KIMI, kimi, None), ("ChatGLM4Tokenizer", LLAMA3, GLM, None),
               ("QWenTokenizer", QWEN, qwen, "NFC")]
    for name, pattern, special, form in classes:
        special = {text: i for i, text in enumerate(special, n)}
        theirs = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)

        def encode(text):
            text = unicodedata.normalize(form, text) if form else text
            return theirs.encode(text, allowed_special="all", disallowed_special=())
        ids = digests(encode, {"\0no text": 0})
        expected[name] = {"ids": ids, "n_vocab": theirs.n_vocab, "last": theirs.decode([theirs.n_vocab - 1])}
    added = {str(i): {"content": text, "special": text != "<tool>"} for i, text in of_config.items()}
    expected["added_tokens_decoder"] = added


expected = {}
tekken(expected)
of_tiktoken(expected)
(OUT / "ranked.json").write_text(json.dumps(expected, indent=0, ensure_ascii=False))
