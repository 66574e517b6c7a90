"""Real-time bursts over best-effort work in a pool too small, on two ranks: the text stays."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live_server import LiveServer, live_server

FLAGS = (
    *("--tp", "2", "--batch-invariant", "--dtype", "float32", "--cache-policy", "off"),
    *("--max-kv-tokens", "400", "--max-num-seqs", "16", "--admission", "aggressive"),
)


def prompt_of(number: int) -> list[int]:
    return [10 + (number * 37 + i * 11) % 400 for i in range(40)]


async def complete(http: httpx.AsyncClient, server: LiveServer, number: int, tier: str) -> str:
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": prompt_of(number),
        "max_tokens": 60 if tier == "flex" else 30,
        "ignore_eos": True,
        "service_tier": tier,
        "temperature": 0.7,
        "seed": number,
    }
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


async def scene(server: LiveServer) -> tuple[list[str], list[str]]:
    """Return all answers, asked for one by one and then all at once, real-time ones last."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as http:
        wanted = [(number, "flex") for number in range(5)]
        wanted += [(number, "default") for number in range(5, 10)]
        alone = [await complete(http, server, *one) for one in wanted]
        best_effort = [asyncio.create_task(complete(http, server, *one)) for one in wanted[:5]]
        await asyncio.sleep(0.3)
        real_time = [asyncio.create_task(complete(http, server, *one)) for one in wanted[5:]]
        return alone, list(await asyncio.gather(*best_effort, *real_time))


@pytest.mark.parametrize("policy", ["priority", "unified"])
def test_paused_requests_go_on_where_they_were(run_parent: Path, policy: str) -> None:
    with live_server(run_parent, *FLAGS, "--policy", policy) as server:
        alone, together = asyncio.run(scene(server))
        assert together == alone
        samples = httpx.get(f"{server.url}/metrics").text.splitlines()
        loaded = [
            float(line.rsplit(" ", 1)[1])
            for line in samples
            if line.startswith("lightserve_kv_tokens_loaded_total") and 'request_class="be"' in line
        ]
        assert sum(loaded) > 0, "nobody was paused"
