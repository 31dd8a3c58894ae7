"""Texts per second of an encoder: Lockstep beside sentence-transformers (torch) and OpenVINO, all with two threads.

The texts, the tokens and the order are the same for all. Engines take turns, round by round; the table has the median
and the range of each. A control is the first engine a second time.

    python encoders.py target/release/lockstep FOLDER_OF_MINILM [ROUNDS]

Needs torch, transformers, sentence-transformers and openvino.
"""

import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
import urllib.request

import quiet

THREADS = 2
BATCHES = [1, 8, 64]
# A window in which others used more of a core does not count.
FOREIGN_MAX = 0.3
WORDS = ("the model reads a text and returns one vector for it so that two texts about the same thing are close while "
         "others are far and a search finds what was meant rather than what was written").split()


def texts(n, seed):
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(5, 120))) for _ in range(n)]


@contextlib.contextmanager
def lockstep(binary, folder):
    command = [binary, "serve", folder, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--threads", str(THREADS)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    url = None
    for line in server.stderr:
        if " serves " in line:
            url = line.split(" on ")[1].split()[0]
            break

    def embed(batch):
        body = json.dumps({"input": batch, "encoding_format": "base64"}).encode()
        request = urllib.request.Request(f"{url}/embeddings", body, {"content-type": "application/json"})
        return json.load(urllib.request.urlopen(request))["data"]

    try:
        yield embed
    finally:
        server.terminate()
        server.wait()


def torch_engine(folder):
    import torch
    from sentence_transformers import SentenceTransformer
    torch.set_num_threads(THREADS)
    model = SentenceTransformer(folder, device="cpu")
    model.max_seq_length = 512
    return lambda batch: model.encode(batch, batch_size=len(batch), show_progress_bar=False)


def openvino_engine(folder):
    import openvino
    import torch
    from transformers import AutoTokenizer, BertModel
    tokenizer, model = AutoTokenizer.from_pretrained(folder), BertModel.from_pretrained(folder).eval()
    example = dict(tokenizer(["a", "a b"], padding=True, return_tensors="pt"))
    converted = openvino.convert_model(model, example_input=example)
    compiled = openvino.compile_model(converted, "CPU", {
        "INFERENCE_NUM_THREADS": THREADS, "INFERENCE_PRECISION_HINT": "f32"})

    def embed(batch):
        inputs = tokenizer(batch, padding=True, truncation=True, max_length=512, return_tensors="pt")
        states = torch.from_numpy(compiled(dict(inputs))[0])
        mask = inputs["attention_mask"][..., None]
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1))

    return embed


def main():
    binary, folder = sys.argv[1:3]
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    with lockstep(binary, folder) as ours:
        engines = {"Lockstep": ours, "torch": torch_engine(folder), "OpenVINO": openvino_engine(folder)}
        engines["Lockstep again"] = ours
        report = {"machine": quiet.machine(), "model": "MiniLM-L6, f32", "threads": THREADS, "texts_per_second": {}}
        for batch in BATCHES:
            speeds = {name: [] for name in engines}
            for embed in engines.values():
                embed(texts(batch, 0))
            for turn in range(rounds):
                for name, embed in engines.items():
                    batches = [texts(batch, seed) for seed in range(max(1, 64 // batch))]
                    watch, begun = quiet.Watch(), time.monotonic()
                    for one in batches:
                        embed(one)
                    took = time.monotonic() - begun
                    if watch.foreign_cores() < FOREIGN_MAX:
                        speeds[name].append(batch * len(batches) / took)
            of = {name: [round(statistics.median(all), 1), round(min(all), 1), round(max(all), 1), len(all)]
                  for name, all in speeds.items() if all}
            report["texts_per_second"][str(batch)] = of
            print(batch, of, file=sys.stderr)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
