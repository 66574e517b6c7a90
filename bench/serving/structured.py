"""JSON-schema output with the bundled model: is it valid, and what does it cost per token?

    python -m bench.serving.structured [--prompts 200] [--concurrency 64]

Every schema is asked for with every prompt, at temperature 1; each answer that was not cut off by
max_tokens is parsed and checked by `jsonschema`, which shares nothing with the server. The cost
is rank 0's time per token (forward pass, masks and sampling; by the clock and of the CPU) of
streams that a schema keeps from ending, beside equally many and long ones without a constraint,
in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from typing import Any, NamedTuple

import httpx
import jsonschema

from bench.serving.server import Server, running_server
from tools.tiny_model.corpus import draw_exchange

MAX_TOKENS = 256


def closed(properties: dict[str, Any], **other: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **other,
    }


NAME = {"type": "string", "minLength": 1, "maxLength": 20}
POINT = closed({"x": {"type": "number"}, "y": {"type": "number"}})
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": closed({"name": NAME, "age": {"type": "integer", "minimum": 0, "maximum": 150}}),
    "booleans and null": closed({"ok": {"type": "boolean"}, "why": {"type": ["null", "boolean"]}}),
    "enum and const": closed({"kind": {"const": "event"}, "level": {"enum": ["low", 2, None]}}),
    "list of words": {"type": "array", "items": NAME, "minItems": 1, "maxItems": 5},
    "nested": closed({"a": closed({"b": closed({"c": {"type": "array", "items": POINT,
                                                         "minItems": 1, "maxItems": 2}})})}),
    "any of": closed({"value": {"anyOf": [{"type": "integer", "minimum": -99, "maximum": 99},
                                           NAME, POINT]}}),
    "references": {
        "$defs": {"place": closed({"city": NAME, "at": {"$ref": "#/$defs/point"}}),
                  "point": POINT},
        **closed({"from": {"$ref": "#/$defs/place"}, "to": {"$ref": "#/$defs/place"}}),
    },
    "recursive": {
        "$defs": {"tree": closed({"leaf": {"type": "boolean"},
                                  "rest": {"anyOf": [{"type": "null"},
                                                     {"$ref": "#/$defs/tree"}]}})},
        "$ref": "#/$defs/tree",
    },
    "patterns": closed({"date": {"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]$"},
                        "id": {"type": "string", "format": "uuid"}}),
    "optional and tuple": {
        "type": "object",
        "properties": {
            "pair": {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["a", "é☃"]}],
                     "items": False, "minItems": 2},
            "note": {"type": "string", "maxLength": 10},
        },
        "required": ["pair"],
        "additionalProperties": False,
    },
}  # fmt: skip
ENDLESS: dict[str, dict[str, Any]] = {
    "list of integers": {"type": "array", "items": {"type": "integer"}, "minItems": 500},
    "list of strings": {"type": "array", "items": {"type": "string"}, "minItems": 500},
    "list of objects": {"type": "array", "items": SCHEMAS["person"], "minItems": 500},
}
"""Nothing satisfies them within the tokens that the cost is measured over."""


async def ask(client: httpx.AsyncClient, gate: asyncio.Semaphore, body: dict[str, Any]) -> Any:
    """Send one chat and return its answer."""
    async with gate:
        answer = await client.post("/v1/chat/completions", json=body)
    return answer.raise_for_status().json()


def body_of(server: Server, prompt: str, seed: int, schema: Any = None) -> dict[str, Any]:
    """Return a chat's body."""
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "seed": seed,
        "temperature": 1.0,
    }
    if schema is not None:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "strict": True, "schema": schema},
        }
    return body


def judge(answer: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return "cut" (by max_tokens), "valid" or "invalid"."""
    choice = answer["choices"][0]
    if choice["finish_reason"] == "length":
        return "cut"
    try:
        value = json.loads(choice["message"]["content"])
        jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError) as error:
        print("INVALID:", choice["message"]["content"], "::", str(error).splitlines()[0])
        return "invalid"
    return "valid"


async def validity(server: Server, prompts: list[str], concurrency: int) -> bool:
    """Print a line per schema; return whether every answer that ended is valid."""
    print("| schema | valid | cut by max_tokens | invalid | tokens per answer |")
    print("| --- | --- | --- | --- | --- |")
    gate, totals = asyncio.Semaphore(concurrency), Counter[str]()
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        for name, schema in SCHEMAS.items():
            answers = await asyncio.gather(
                *(
                    ask(client, gate, body_of(server, prompt, seed, schema))
                    for seed, prompt in enumerate(prompts)
                )
            )
            found = Counter(judge(answer, schema) for answer in answers)
            totals += found
            tokens = statistics.mean(a["usage"]["completion_tokens"] for a in answers)
            print(
                f"| {name} | {found['valid']} | {found['cut']} | {found['invalid']}"
                f" | {tokens:.0f} |",
                flush=True,
            )
    print(f"| all | {totals['valid']} | {totals['cut']} | {totals['invalid']} | |")
    return not totals["invalid"]


class Spent(NamedTuple):
    """What a token cost rank 0, in microseconds."""

    busy_us: float
    """Of the clock: what streams wait for."""
    cpu_us: float
    """Of all its threads: other work on the machine changes it little."""


def worker_times(server: Server) -> tuple[float, float]:
    """Return rank 0's busy time and CPU time so far, seconds."""
    tree = server.tree()
    (worker,) = (process for role, process in tree.items() if "worker" in role)
    cpu = worker.cpu_times()
    return server.health()["worker_busy_s"], cpu.user + cpu.system


async def spent_per_token(server: Server, prompts: list[str], schema: Any) -> Spent:
    """Run one stream per prompt, all to max_tokens, at once."""
    gate = asyncio.Semaphore(len(prompts))
    before = worker_times(server)
    bodies = [body_of(server, prompt, seed, schema) for seed, prompt in enumerate(prompts)]
    if schema is None:
        bodies = [{**body, "ignore_eos": True} for body in bodies]
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        answers = await asyncio.gather(*(ask(client, gate, body) for body in bodies))
    num_tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert num_tokens == MAX_TOKENS * len(prompts), "a stream ended early"
    after = worker_times(server)
    return Spent(*(1e6 * (b - a) / num_tokens for a, b in zip(before, after, strict=True)))


async def cost(server: Server, prompts: list[str], num_rounds: int) -> None:
    """Print what a token costs, with and without constraints, in turns."""
    kinds: dict[str, Any] = {"none": None, **ENDLESS}
    spent: dict[str, list[Spent]] = {name: [] for name in kinds}
    for number in range(num_rounds + 1):
        for name, schema in kinds.items():
            found = await spent_per_token(server, prompts, schema)
            if number:  # the first round warms up
                spent[name].append(found)
    middle = {
        name: Spent(*(statistics.median(values) for values in zip(*rounds, strict=True)))
        for name, rounds in spent.items()
    }
    base = middle["none"]
    print(f"\n{len(prompts)} streams of {MAX_TOKENS} tokens, median of {num_rounds} rounds")
    print("| constraint | busy us per token | ratio | CPU us per token | ratio |")
    print("| --- | --- | --- | --- | --- |")
    for name, (busy_us, cpu_us) in middle.items():
        print(
            f"| {name} | {busy_us:.0f} | {busy_us / base.busy_us:.2f}"
            f" | {cpu_us:.0f} | {cpu_us / base.cpu_us:.2f} |"
        )


def main() -> None:
    """Print both tables; exit with 1 if anything was invalid."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rng = random.Random(0)
    prompts = [draw_exchange(rng).prompt for _ in range(max(args.prompts, args.streams))]
    start_s = time.perf_counter()
    with running_server(["--num-threads", "1"]) as server:
        is_valid = asyncio.run(validity(server, prompts[: args.prompts], args.concurrency))
        if args.rounds:
            asyncio.run(cost(server, prompts[: args.streams], args.rounds))
    print(f"{time.perf_counter() - start_s:.0f} s in all")
    raise SystemExit(0 if is_valid else 1)


if __name__ == "__main__":
    main()
