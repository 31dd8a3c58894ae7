"""Writes stand-ins for the models of vLLM's tests of pooling: `stand_ins.py MINILM FOLDER`.

MINILM is the folder of a real encoder, all-MiniLM-L6. The others are its weights with another head, or small random
ones.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import processors

# One length of a shorter embedding, as in vLLM's own test.
SHORTER = 256
# The tests send ids of a larger vocabulary.
N_TOKENS = 40_000
# The models whose weights are random have a template, because the tests send them chats.
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def main(minilm, folder):
    to = Path(folder)
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    embedder = shutil.copytree(minilm, to / "embedder")
    shortened = shutil.copytree(minilm, to / "shortened")
    config = json.loads((shortened / "config.json").read_text())
    (shortened / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [SHORTER]}))
    torch.manual_seed(7)
    tokenizer = transformers.AutoTokenizer.from_pretrained(embedder)
    labels = {"id2label": {0: "Default", 1: "Spoiled"}, "num_labels": 2}
    ranker = transformers.BertForSequenceClassification.from_pretrained(embedder, num_labels=1)
    # A random head of a usual size gives all pairs nearly the same score.
    ranker.classifier.weight.data *= 20
    save(ranker, tokenizer, to / "ranker")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 2048, "vocab_size": N_TOKENS}
    made = transformers.Qwen2Config(**sizes, **labels, pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=True)
    # As Qwen's tokenizer, it adds nothing to a text.
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    tokenizer.chat_template = TEMPLATE
    classifier = transformers.Qwen2ForSequenceClassification(made)
    classifier.score.weight.data *= 20
    save(classifier, tokenizer, to / "classifier")


def save(model, tokenizer, folder):
    model.float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
