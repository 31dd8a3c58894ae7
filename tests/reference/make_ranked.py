"""Vocabularies that list tokens by rank, and the ids of the packages that read them, for the documents of corpus.py.

    python make_ranked.py     writes tokenizers/: tekken.json, ranked.json

The tokens are those of tokenizers/bpe.json (make_tokenizers.py), in the order of its merges. ranked.json has a digest of
the ids of each document: tekken's are those of mistral-common's Tekkenizer.
"""
import base64
import hashlib
import json
import pathlib
import re

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


expected = {}
tekken(expected)
(OUT / "ranked.json").write_text(json.dumps(expected, indent=0, ensure_ascii=False))
