"""Writes a tiny random checkpoint of each kind of encoder, and beside each the results of transformers in float64.

Each has the features of its family: windows shorter than the text, positions that begin behind the first rows of their
table, pairs of texts, scores by distance, a module behind pooling, a classifier.

    python make_encoders.py [NAME ..]
"""

import json

import safetensors.torch
import torch
import transformers
from tokenizers import Tokenizer, processors

import make_llama
import reference

SMALL = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=264,
    max_position_embeddings=320, pad_token_id=0,
)
# The first rows of the table of positions are those of padding.
PADDED = SMALL | dict(max_position_embeddings=322, pad_token_id=1, type_vocab_size=1)
MPNET = {k: v for k, v in PADDED.items() if k != "type_vocab_size"} | dict(hidden_size=64, num_attention_heads=4)
MODERN = SMALL | dict(
    num_hidden_layers=3, local_attention=32, global_attn_every_n_layers=2, bos_token_id=256, eos_token_id=257,
    cls_token_id=256, sep_token_id=257)
GEMMA = SMALL | dict(
    head_dim=16, num_key_value_heads=1, sliding_window=32, use_bidirectional_attention=True,
    layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=16)
QWEN = SMALL | dict(head_dim=16, num_key_value_heads=1, tie_word_embeddings=True, use_cache=False)

# With work for two ranks.
WIDE = dict(hidden_size=64, num_attention_heads=4)

LENGTHS = [1, 2, 17, 40, 300]


def of(kind, classifier=False, labels=0, pooling=None, dense=None, **config):
    return dict(kind=kind, classifier=classifier, labels=labels, pooling=pooling, dense=dense, config=config)


CHECKPOINTS = {
    "bert": of("Bert", pooling="mean", **SMALL),
    "bert-cls": of("Bert", pooling="cls", **SMALL),
    "bert-rank": of("Bert", classifier=True, labels=1, **SMALL | WIDE),
    "roberta": of("Roberta", pooling="mean", **PADDED),
    "xlm-roberta-rank": of("XLMRoberta", classifier=True, labels=1, **PADDED),
    "mpnet": of("MPNet", pooling="mean", **MPNET),
    "nomic-bert": of("NomicBert", pooling="mean", **SMALL | WIDE),
    "modern-bert": of("ModernBert", pooling="cls", **MODERN),
    "modern-bert-class": of("ModernBert", classifier=True, labels=3, classifier_pooling="mean",
                            **MODERN | WIDE | dict(intermediate_size=32)),
    "gemma-embedding": of("Gemma3Text", pooling="mean", dense=[(48, "Identity"), (32, "Tanh")], **GEMMA | WIDE),
    "qwen3-embedding": of("Qwen3", pooling="lasttoken", **QWEN),
    "qwen3-class": of("Qwen3", classifier=True, labels=2, **QWEN),
}


def main():
    reference.configure_torch()
    for seed, (name, folder) in enumerate(reference.folders(CHECKPOINTS)):
        make(name, folder, 700 + list(CHECKPOINTS).index(name), **CHECKPOINTS[name])


def make(name, folder, seed, kind, classifier, labels, pooling, dense, config):
    if classifier:
        config = config | dict(id2label={i: f"label {i}" for i in range(labels)}, problem_type=None)
    made = getattr(transformers, f"{kind}Config")(**config)
    built = getattr(transformers, f"{kind}{'ForSequenceClassification' if classifier else 'Model'}")
    model = built._from_config(made, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    make_llama.randomize(model, generator)
    model.save_pretrained(folder)
    write_tokenizer(folder, made.vocab_size)
    stored = built.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval().double()
    layers = []
    if pooling:
        layers = write_modules(folder, made.hidden_size, pooling, dense or [], generator)
    cases = [case(stored, length, classifier, pooling, layers, generator) for length in LENGTHS]
    if kind == "Bert":
        cases.append(case(stored, 40, classifier, pooling, layers, generator, second=17))
    reference.write(folder / "expected.json", {"model": name, "versions": reference.versions()}, cases)
    n_bytes = sum(f.stat().st_size for f in folder.rglob("*.safetensors"))
    print(f"{name}: {n_bytes // 1024} KiB")
    assert n_bytes < 400 * 1024, f"{name}: {n_bytes} bytes of weights are too many for a repository"


def case(model, length, classifier, pooling, layers, generator, second=0):
    tokens = torch.randint(2, model.config.vocab_size, (length,), generator=generator)
    inputs = dict(input_ids=tokens[None], attention_mask=torch.ones(1, length, dtype=torch.long))
    if second:
        inputs["token_type_ids"] = (torch.arange(length) >= second).long()[None]
    out = model(**inputs)
    vector = out.logits[0] if classifier else pooled(out.last_hidden_state[0], pooling)
    for weight, bias, activation in layers:
        vector = vector @ weight.double().T + bias.double()
        vector = torch.tanh(vector) if activation == "Tanh" else vector
    return {
        "name": f"{length} tokens" + (f", a pair from {second}" if second else ""),
        "prompt": tokens.tolist(),
        "second": second,
        "vector": [reference.float_of(v) for v in vector],
    }


def pooled(states, how):
    return {"mean": states.mean(0), "cls": states[0], "lasttoken": states[-1]}[how]


def write_modules(folder, hidden, pooling, dense, generator):
    """The files of sentence-transformers. Returns the modules behind pooling."""
    modules = [("", "models.Transformer"), ("1_Pooling", "models.Pooling")]
    modes = {f"pooling_mode_{mode}": mode in (pooling, f"{pooling}_token", f"{pooling}_tokens") for mode in
             ["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken"]}
    write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": hidden} | modes)
    layers, n_in = [], hidden
    for i, (n_out, activation) in enumerate(dense, 2):
        weight = torch.randn(n_out, n_in, generator=generator) / n_in ** 0.5
        bias = 0.1 * torch.randn(n_out, generator=generator)
        path = folder / f"{i}_Dense"
        module = {"Identity": "linear", "Tanh": "activation"}[activation]
        write_json(path / "config.json", {
            "in_features": n_in, "out_features": n_out, "bias": True,
            "activation_function": f"torch.nn.modules.{module}.{activation}",
        })
        safetensors.torch.save_file({"linear.weight": weight, "linear.bias": bias}, path / "model.safetensors")
        modules.append((path.name, "models.Dense"))
        layers.append((weight, bias, activation))
        n_in = n_out
    modules.append((f"{len(modules)}_Normalize", "models.Normalize"))
    write_json(folder / "modules.json", [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (path, kind) in enumerate(modules)])
    return layers


def write_json(path, value):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_tokenizer(folder, vocab):
    """The tokenizer of the other tiny checkpoints, with tokens around each text and between two."""
    make_llama.write_tokenizer(folder, vocab)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    begin, end = make_llama.SPECIAL[:2]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}", pair=f"{begin} $A {end} $B:1 {end}:1",
        special_tokens=[(begin, make_llama.BEGIN), (end, make_llama.END)])
    tokenizer.save(path)


if __name__ == "__main__":
    main()
