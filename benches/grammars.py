#!/usr/bin/env python3
"""Measures the cost of grammars in decoding: rounds with and without them in turn, at one server or more.

A round is `--batch` concurrent requests, each with its own schema. It counts the tokens per second while all requests
decode: from the last first token to the first end. The schemas let no answer end before `--tokens`.
"""

import argparse
import concurrent.futures
import http.client
import json
import statistics
import time


def schema(i):
    """Returns a schema with names and limits that differ for each `i`."""
    word = {"type": "string", "minLength": 1, "maxLength": 30}
    item = {
        "type": "object",
        "properties": {
            f"name_{i}": word,
            f"count_{i}": {"type": "integer", "minimum": 0, "maximum": 1000 + i},
            "tags": {"type": "array", "items": word, "maxItems": 2 + i % 3},
            "state": {"enum": ["open", "paid", "sent", f"other_{i}"]},
        },
        "required": [f"name_{i}", f"count_{i}", "tags", "state"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": 200, "maxItems": 300}


def stream(address, i, options, with_grammar):
    """Returns the times of the tokens of one streamed answer."""
    body = {
        "messages": [{"role": "user", "content": f"List the orders of shop {i} as JSON."}],
        "max_tokens": options.tokens,
        "temperature": 1.0,
        "seed": i,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if with_grammar:
        shape = {"name": "orders", "schema": schema(i), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": shape}
    connection = http.client.HTTPConnection(*address, timeout=300)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise SystemExit(f"{reply.status}: {reply.read(2000)}")
    times = []
    for line in reply:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise SystemExit(event["error"])
        n = sum(len(choice.get("token_ids") or []) for choice in event.get("choices", []))
        times += [time.monotonic()] * n
    connection.close()
    if len(times) != options.tokens:
        raise SystemExit(f"request {i} has {len(times)} tokens of {options.tokens}")
    return times


def one_round(address, options, with_grammar, first):
    """Returns the tokens per second while all requests of a batch decode."""
    with concurrent.futures.ThreadPoolExecutor(options.batch) as pool:
        futures = [pool.submit(stream, address, first + i, options, with_grammar) for i in range(options.batch)]
        answers = [one.result() for one in futures]
    begin, end = max(times[0] for times in answers), min(times[-1] for times in answers)
    n = sum(sum(begin < at <= end for at in times) for times in answers)
    return n / (end - begin)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", nargs="+", help="HOST:PORT of a server; each round measures all of them")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--fresh", action="store_true", help="use new schemas in each round")
    options = parser.parse_args()
    addresses = [(host, int(port)) for host, port in (text.rsplit(":", 1) for text in options.address)]
    for address in addresses:
        one_round(address, options, True, 0)
    ratios = {address: [] for address in addresses}
    for i in range(options.rounds):
        first = 1000 * (i + 1) if options.fresh else 0
        for address in addresses if i % 2 else reversed(addresses):
            kinds = [False, True] if i % 2 else [True, False]
            rates = {kind: one_round(address, options, kind, first) for kind in kinds}
            ratios[address].append(rates[True] / rates[False])
            summary = f"{rates[False]:.1f} tokens/s without, {rates[True]:.1f} with: {ratios[address][-1]:.3f}"
            print(f"round {i}, {address[1]}: {summary}", flush=True)
    for (host, port), of in ratios.items():
        print(f"{host}:{port}: median {statistics.median(of):.3f} ({min(of):.3f} to {max(of):.3f}, n={len(of)})")


if __name__ == "__main__":
    main()
