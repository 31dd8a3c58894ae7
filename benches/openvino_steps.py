"""Serves one model in OpenVINO GenAI until its input ends: `openvino_steps.py MODEL.gguf THREADS`. Reads a line of JSON
for each request, {"tokens": the prompt, "n_predict": new tokens}, and writes a line: {"ttft_ms", "tpot_ms"}. The first
line is {"is_ready": true}.

Runs with OpenVINO's own packages; `engines.py` starts it.
"""

import json
import sys

import numpy
import openvino
import openvino_genai


def main(model, threads):
    pipeline = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=int(threads))
    answer({"is_ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        answer(times(pipeline, request["tokens"], request["n_predict"]))


def times(pipeline, tokens, n_predict):
    """Returns the milliseconds to the first token and per later token; the latter is None if `n_predict` is one."""
    ids = numpy.array([tokens], numpy.int64)
    prompt = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
    config = openvino_genai.GenerationConfig(max_new_tokens=n_predict, ignore_eos=True, do_sample=False)
    metrics = pipeline.generate(prompt, config).perf_metrics
    n = metrics.get_num_generated_tokens()
    if n != n_predict:
        sys.exit(f"the model generated {n} tokens, not {n_predict}")
    return {"ttft_ms": metrics.get_ttft().mean, "tpot_ms": metrics.get_tpot().mean if n > 1 else None}


def answer(content):
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
