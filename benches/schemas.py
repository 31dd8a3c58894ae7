#!/usr/bin/env python3
"""Checks that answers match their schemas: sends many schemas to a server, each once at temperature 1, and validates
the answers with `jsonschema`.

An answer that ends by itself must be valid JSON that its schema accepts. An answer that `max_tokens` cuts off must have
the finish reason for that, and is counted apart. Exits with 1 if one answer is wrong.
"""

import argparse
import collections
import concurrent.futures
import http.client
import json
import random

import jsonschema

# Formats of the draft that the server implements: the general checker has draft 3's `time`, which has no zone.
CHECKED = jsonschema.Draft202012Validator.FORMAT_CHECKER
WORDS = ["name", "city", "count", "state", "tags", "note", "when", "size", "kind", "owner", "price", "a b", 'q"x', "é"]


def scalar(draw):
    kind = draw.randrange(9)
    if kind == 0:
        return {"type": "string", "maxLength": draw.randrange(1, 25)}
    if kind == 1:
        return {"type": "integer", "minimum": draw.randrange(-50, 0), "maximum": draw.randrange(1, 500)}
    if kind == 2:
        return {"type": "number", "exclusiveMinimum": 0, "maximum": 100}
    if kind == 3:
        return {"enum": draw.sample(["red", "green", 1, 2.5, None, True, "x y"], draw.randrange(1, 5))}
    if kind == 4:
        return {"type": "string", "pattern": draw.choice(["^[A-Z]{2}-[0-9]{1,4}$", "^a+b?$", "^(yes|no)$"])}
    if kind == 5:
        return {"type": "string", "format": draw.choice(["date", "time", "date-time", "uuid", "ipv4", "email"])}
    if kind == 6:
        return {"type": ["boolean", "null"]}
    if kind == 7:
        return {"const": draw.choice(["done", 0, False, {"k": [1]}])}
    return {"type": "integer", "multipleOf": draw.choice([2, 5, 10])}


def schema(draw, depth):
    kind = draw.randrange(7) if depth else 6
    if kind <= 2:
        names = draw.sample(WORDS, draw.randrange(1, 5))
        value = {
            "type": "object",
            "properties": {name: schema(draw, depth - 1) for name in names},
            "required": [name for name in names if draw.random() < 0.7],
        }
        if draw.random() < 0.8:
            value["additionalProperties"] = False
        return value
    if kind == 3:
        return {"type": "array", "items": schema(draw, depth - 1), "minItems": draw.randrange(2), "maxItems": 4}
    if kind == 4:
        return {"anyOf": [schema(draw, depth - 1), scalar(draw)]}
    if kind == 5:
        letters = draw.sample(["a", "b", "c", "d", "e"], 3)
        return {"type": "array", "items": {"enum": letters}, "uniqueItems": True, "minItems": 1}
    return scalar(draw)


def check_one(address, options, i):
    draw = random.Random(options.seed * 10_000 + i)
    names = draw.sample(WORDS, 2)
    expected = {
        "type": "object",
        "properties": {name: schema(draw, 2) for name in names},
        "required": names,
        "additionalProperties": False,
    }
    body = {
        "messages": [{"role": "user", "content": f"Make up number {i} as JSON."}],
        "max_tokens": options.tokens,
        "temperature": 1.0,
        "seed": i,
        "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": expected}},
    }
    connection = http.client.HTTPConnection(*address, timeout=600)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    reply = connection.getresponse()
    answer = json.loads(reply.read())
    connection.close()
    return outcome_of(reply.status, answer, expected)


def outcome_of(status, answer, expected):
    """Returns a word for the outcome, and what is wrong."""
    if status != 200:
        return "refused", f"{answer.get('error', {}).get('message')}: {json.dumps(expected)}"
    choice = answer["choices"][0]
    text = choice["message"]["content"]
    if choice["finish_reason"] == "length":
        return "cut", None
    if choice["finish_reason"] != "stop":
        return "wrong", f"the finish reason is {choice['finish_reason']}"
    try:
        jsonschema.validate(json.loads(text), expected, format_checker=CHECKED)
    except (ValueError, jsonschema.ValidationError) as error:
        return "wrong", f"{text!r}: {error} of {json.dumps(expected)}"
    return "valid", None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="HOST:PORT of a server")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--together", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    host, port = options.address.rsplit(":", 1)
    with concurrent.futures.ThreadPoolExecutor(options.together) as pool:
        outcomes = list(pool.map(lambda i: check_one((host, int(port)), options, i), range(options.schemas)))
    for i, (word, what) in enumerate(outcomes):
        if what:
            print(f"schema {i}, {word}: {what}")
    counts = collections.Counter(word for word, _ in outcomes)
    words = ["valid", "cut", "refused", "wrong"]
    print(f"of {options.schemas}: " + ", ".join(f"{counts[word]} {word}" for word in words))
    if counts["wrong"] or counts["refused"] or not counts["valid"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
