"""Real-time bursts over best-effort work in a pool too small, on two ranks: the text stays."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.grids import long_but
from support.live_server import LiveServer, live_server
from support.processes import PATIENCE_S, wait_for

FLAGS = (
    *("--tp", "2", "--batch-invariant", "--dtype", "float32", "--cache-policy", "off"),
    *("--max-kv-tokens", "400", "--max-num-seqs", "16", "--admission", "aggressive"),
)


def prompt_of(number: int) -> list[int]:
    return [10 + (number * 37 + i * 11) % 400 for i in range(40)]


async def complete(
    http: httpx.AsyncClient,
    server: LiveServer,
    number: int,
    tier: str,
    begun: asyncio.Event | None = None,
) -> str:
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": prompt_of(number),
        "max_tokens": 60 if tier == "flex" else 30,
        "ignore_eos": True,
        "service_tier": tier,
        "temperature": 0.7,
        "seed": number,
        "stream": True,
    }
    text = ""
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if begun is not None:
                    begun.set()
    return text


WANTED = [(number, "flex" if number < 5 else "default") for number in range(10)]


async def one_by_one(server: LiveServer) -> list[str]:
    """Return all answers."""
    async with httpx.AsyncClient(base_url=server.url, timeout=300.0) as http:
        return [await complete(http, server, *one) for one in WANTED]


async def all_at_once(server: LiveServer) -> list[str]:
    """Return all answers; real-time work comes while all best-effort work streams."""
    async with httpx.AsyncClient(base_url=server.url, timeout=300.0) as http:
        begun = [asyncio.Event() for _ in range(5)]
        best_effort = [
            asyncio.create_task(complete(http, server, *one, event))
            for one, event in zip(WANTED[:5], begun, strict=True)
        ]
        for event in begun:
            await asyncio.wait_for(event.wait(), PATIENCE_S)
        real_time = [asyncio.create_task(complete(http, server, *one)) for one in WANTED[5:]]
        return list(await asyncio.gather(*best_effort, *real_time))


@pytest.mark.parametrize("policy", long_but([("priority",), ("unified",)], [("unified",)]))
def test_paused_requests_go_on_where_they_were(run_parent: Path, policy: str) -> None:
    with live_server(run_parent, *FLAGS, "--policy", policy) as server:
        alone = asyncio.run(one_by_one(server))

        def is_paused_work_back() -> bool:
            """Whether a burst came in time: this process may have stood still for a while."""
            assert asyncio.run(all_at_once(server)) == alone
            time.sleep(1.5)  # until it is reported
            return num_loaded(server) > 0

        wait_for(is_paused_work_back, "a request that was paused")


def num_loaded(server: LiveServer) -> float:
    """Return how many tokens of best-effort requests have come back, as far as is reported."""
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in server.metrics().splitlines()
        if line.startswith("lightserve_kv_tokens_loaded_total") and 'request_class="be"' in line
    )
