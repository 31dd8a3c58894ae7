#!/usr/bin/env python3
"""Checks forced tool calls: sends the tool sets of the Berkeley Function Calling Leaderboard to a server.

Each request forces a call: `tool_choice` names the function if the set has only one, and else is `required`. A call
that ends by itself must name a tool and have arguments that the tool's schema accepts. A call that `max_tokens` cuts
off must have the finish reason for that, and is counted apart. The number of calls that match the leaderboard's
expectation is printed, but has no effect: it depends on the model. Exits with 1 if a set is refused or a call is
wrong.
"""

import argparse
import collections
import concurrent.futures
import http.client
import json
import pathlib
import random

import jsonschema

FILES = ["simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple"]
# Maps the leaderboard's types to JSON Schema's, as its own harness does.
TYPES = {
    "integer": ["integer", "byte", "short", "long", "bigint"],
    "number": ["number", "float", "double"],
    "string": ["string", "any", "char", ""],
    "boolean": ["boolean", "bool"],
    "array": ["array", "list", "tuple", "arraylist", "queue", "stack"],
    "object": ["object", "dict", "hashmap", "hashtable"],
}
JSON_SCHEMA_TYPES = {theirs: ours for ours, all_theirs in TYPES.items() for theirs in all_theirs}
# Annotations in the schemas of its files that JSON Schema does not define.
NOTES = {"optional", "format", "default"}


def to_json_schema(schema):
    """Converts a schema of the leaderboard to JSON Schema."""
    kept = {key: value for key, value in schema.items() if key not in NOTES}
    kept["type"] = JSON_SCHEMA_TYPES[schema.get("type", "object").lower()]
    if "properties" in kept:
        kept["properties"] = {name: to_json_schema(value) for name, value in kept["properties"].items()}
    if "items" in kept:
        kept["items"] = to_json_schema(kept["items"])
    return kept


def tools_of(entry):
    """Returns the tools by the names that a server gets; such a name has no dots."""
    named = {tool["name"].replace(".", "_"): tool for tool in entry["function"]}
    return {name: (tool["description"], to_json_schema(tool["parameters"])) for name, tool in named.items()}


def body(entry, tools, options, tokens):
    functions = [
        {"name": name, "description": description, "parameters": parameters, "strict": True}
        for name, (description, parameters) in tools.items()
    ]
    only = next(iter(tools))
    choice = {"type": "function", "function": {"name": only}} if entry["is_simple"] else "required"
    return {
        "messages": entry["question"][0],
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": choice,
        "parallel_tool_calls": entry["is_parallel"],
        "max_tokens": tokens,
        "temperature": options.temperature,
        "seed": 1,
    }


def post(address, request):
    connection = http.client.HTTPConnection(*address, timeout=600)
    connection.request("POST", "/v1/chat/completions", json.dumps(request), {"content-type": "application/json"})
    reply = connection.getresponse()
    answer = json.loads(reply.read())
    connection.close()
    return reply.status, answer


def outcome_of(status, answer, tools):
    """Returns a word for the outcome, what is wrong, and the calls."""
    if status != 200:
        return "refused", json.dumps(answer.get("error")), []
    choice = answer["choices"][0]
    if choice["finish_reason"] == "length":
        return "cut", None, []
    calls = choice["message"].get("tool_calls") or []
    if choice["finish_reason"] != "tool_calls" or not calls or choice["message"].get("content"):
        return "wrong", f"no call: {json.dumps(choice)}", []
    made = []
    for call in calls:
        name, text = call["function"]["name"], call["function"]["arguments"]
        if name not in tools:
            return "wrong", f"no tool is named {name!r}", []
        try:
            arguments = json.loads(text)
            jsonschema.validate(arguments, tools[name][1], cls=jsonschema.Draft202012Validator)
        except (ValueError, jsonschema.ValidationError) as error:
            return "wrong", f"{text!r}: {error}", []
        made.append((name, arguments))
    return "valid", None, made


def plain(value):
    """Normalizes texts as the leaderboard does before it compares them."""
    if isinstance(value, str):
        return "".join(c for c in value.lower() if c not in " ,./-_*^")
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value


def is_expected(made, expected):
    [(name, parameters)] = expected.items()
    if made[0] != name.replace(".", "_") or not made[1].keys() <= parameters.keys():
        return False
    may_lack = [name for name, values in parameters.items() if "" in values]
    fits = all(plain(value) in plain(parameters[name]) for name, value in made[1].items())
    return fits and all(name in made[1] or name in may_lack for name in parameters)


def are_expected(made, expected):
    left = list(expected)
    for one in made:
        found = next((other for other in left if is_expected(one, other)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def entries(folder, name, n_max):
    """Returns all entries of a file, and a random sample with their expected calls."""
    lines = lambda path: [json.loads(line) for line in path.read_text().splitlines()]
    all_entries = lines(folder / f"BFCL_v4_{name}.json")
    answers = {one["id"]: one["ground_truth"] for one in lines(folder / "possible_answer" / f"BFCL_v4_{name}.json")}
    picked = random.Random(1).sample(all_entries, min(n_max, len(all_entries)))
    for entry in picked:
        entry["expected"] = answers[entry["id"]]
        entry["is_simple"], entry["is_parallel"] = name.startswith("simple"), name.startswith("parallel")
    return all_entries, picked


def compiles(address, entry, options):
    entry.setdefault("is_simple", len(entry["function"]) == 1)
    entry.setdefault("is_parallel", True)
    status, answer = post(address, body(entry, tools_of(entry), options, 1))
    return None if status == 200 else f"{entry['id']}: {json.dumps(answer)}"


def calls(address, entry, options):
    tools = tools_of(entry)
    word, what, made = outcome_of(*post(address, body(entry, tools, options, options.tokens)), tools)
    return word, what and f"{entry['id']}: {what}", word == "valid" and are_expected(made, entry["expected"])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="HOST:PORT of a server")
    parser.add_argument("folder", type=pathlib.Path, help="the leaderboard's data")
    parser.add_argument("--files", nargs="+", choices=FILES, default=FILES)
    parser.add_argument("--sets", type=int, default=10_000, help="the most tool sets of each file to compile")
    parser.add_argument("--calls", type=int, default=10_000, help="the most tool sets of each file to call")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--together", type=int, default=16)
    options = parser.parse_args()
    host, port = options.address.rsplit(":", 1)
    address, is_bad = (host, int(port)), False
    with concurrent.futures.ThreadPoolExecutor(options.together) as pool:
        for name in options.files:
            all_entries, picked = entries(options.folder, name, options.calls)
            compiled = pool.map(lambda it: compiles(address, it, options), all_entries[: options.sets])
            refused = [what for what in compiled if what]
            outcomes = list(pool.map(lambda it: calls(address, it, options), picked))
            for what in refused + [what for _, what, _ in outcomes if what]:
                print(what)
            counts = collections.Counter(word for word, _, _ in outcomes)
            summary = ", ".join(f"{counts[word]} {word}" for word in ["valid", "cut", "refused", "wrong"])
            n_expected = sum(expected for _, _, expected in outcomes)
            n_sets = min(options.sets, len(all_entries))
            print(f"{name}: {n_sets - len(refused)} of {n_sets} sets compile; calls: {summary}; "
                  f"{n_expected} as expected", flush=True)
            is_bad |= bool(refused or counts["wrong"] or counts["refused"] or picked and not counts["valid"])
    if is_bad:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
