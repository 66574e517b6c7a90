"""Real-time bursts over best-effort work, lines of a batch too, in a pool too small, on two ranks:
the text stays."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.batch_store import jsonl
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


NUM_LINES = 3


def lines_of(server: LiveServer) -> bytes:
    """Return the first best-effort requests as a batch; the pool has room for so many."""
    bodies = [
        {
            "model": server.model,
            "prompt": prompt_of(number),
            "max_tokens": 60,
            "ignore_eos": True,
            "temperature": 0.7,
            "seed": number,
        }
        for number in range(NUM_LINES)
    ]
    return jsonl(
        [
            {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body}
            for n, body in enumerate(bodies)
        ]
    )


async def batch_beside(server: LiveServer, real_time: Sequence[tuple[int, str]]) -> dict[str, str]:
    """Return a batch's answers by line; real-time work comes all the while."""
    async with httpx.AsyncClient(base_url=f"{server.url}/v1", timeout=300.0) as http:
        files = {"file": ("in.jsonl", lines_of(server))}
        file = (await http.post("/files", files=files, data={"purpose": "batch"})).json()
        body = {
            "input_file_id": file["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        batch = (await http.post("/batches", json=body)).json()
        async with httpx.AsyncClient(base_url=server.url, timeout=300.0) as others:
            while batch["status"] != "completed":
                await asyncio.gather(*(complete(others, server, *one) for one in real_time))
                await asyncio.sleep(0.1)
                batch = (await http.get(f"/batches/{batch['id']}")).json()
        assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        results = (await http.get(f"/files/{batch['output_file_id']}/content")).text
    found = map(json.loads, results.splitlines())
    return {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in found}


@pytest.mark.long
def test_lines_that_were_paused_go_on_where_they_were(run_parent: Path, tmp_path: Path) -> None:
    with live_server(run_parent, *FLAGS, "--batch-store", str(tmp_path / "store")) as server:
        alone = asyncio.run(batch_beside(server, ()))
        time.sleep(1.5)  # until it is reported
        assert len(alone) == NUM_LINES and num_loaded(server) == 0

        def is_paused_work_back() -> bool:
            assert asyncio.run(batch_beside(server, WANTED[5:])) == alone
            time.sleep(1.5)  # until it is reported
            return num_loaded(server) > 0

        wait_for(is_paused_work_back, "a line that was paused")


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
