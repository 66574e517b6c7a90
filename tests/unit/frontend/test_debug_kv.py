"""GET /debug/kv: its shape, what waits for what, and what happens without an answer."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
from support.fake_router import BOOT_ID, Setup, eventually, frontend, kv_pool, router_status

from lightserve.frontend import router_client
from lightserve.frontend.admin import RUNS_PER_PIECE
from lightserve.messages.frontend_router import RouterWelcome
from lightserve.messages.kv_map import DescribeKV, KVMap, pack_kinds


def _questions(setup: Setup) -> list[DescribeKV]:
    return [message for message in setup.router.sent if isinstance(message, DescribeKV)]


def _error(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def _answer_of(setup: Setup) -> Any:
    response = await setup.http.get("/debug/kv")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()


def test_the_answer_in_full() -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            assert await _answer_of(setup) == {
                "num_slots": 8,
                "block_size": 4,
                "counts": {"free": 1, "rt": 3, "be": 2, "cached": 1, "checkpointed": 1},
                "classes": {
                    "rt": {"num_requests": 1, "num_slots": 3, "num_checkpointed_slots": 0},
                    "be": {"num_requests": 1, "num_slots": 3, "num_checkpointed_slots": 1},
                },
                "num_free_blocks": 0,
                "num_shared_blocks": 1,
                "mean_run_length": 2.0,
                "num_host_slots": 10,
                "num_used_host_slots": 7,
                "kinds": ["free", "rt", "be", "cached", "checkpointed"],
                "slots": [[1, 1], [1, 1], [3, 1], [0, 1], [1, 1], [4, 1], [2, 1], [2, 1]],
            }
            setup.router.kv_answer = kv_pool(slots=None)
            assert (await _answer_of(setup))["slots"] is None

    asyncio.run(scenario())


@pytest.mark.parametrize("num_runs", [1, RUNS_PER_PIECE, RUNS_PER_PIECE + 1, 3 * RUNS_PER_PIECE])
@pytest.mark.parametrize("length", [1, 9])
def test_any_number_of_runs(num_runs: int, length: int) -> None:
    kinds = np.repeat(np.arange(num_runs, dtype=np.uint8) % 5, length)

    async def scenario() -> None:
        async with frontend() as setup:
            setup.router.kv_answer = kv_pool(num_slots=len(kinds), slots=pack_kinds(kinds))
            runs = np.array((await _answer_of(setup))["slots"])
            assert np.repeat(runs[:, 0], runs[:, 1]).tolist() == kinds.tolist()

    asyncio.run(scenario())


def test_parameters_are_refused() -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            for query in ("a=1", "a", "block=3&slots=4"):
                response = await setup.http.get(f"/debug/kv?{query}")
                assert _error(response) == (400, "unknown_parameter")
            assert '"block"' in response.json()["error"]["message"]
            assert _questions(setup) == []

    asyncio.run(scenario())


def test_askers_at_the_same_time_cost_one_map() -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            answers = await asyncio.gather(*(_answer_of(setup) for _ in range(5)))
            assert all(answer == answers[0] for answer in answers)
            assert len(_questions(setup)) == 1
            setup.router.kv_answer = kv_pool(num_free_blocks=1)
            assert (await _answer_of(setup))["num_free_blocks"] == 1
            assert len(_questions(setup)) == 2

    asyncio.run(scenario())


def test_without_workers_or_router() -> None:
    async def scenario() -> None:
        async with frontend(welcome=False) as setup:
            assert _error(await setup.http.get("/debug/kv")) == (503, "not_ready")
            assert _questions(setup) == []
            client = setup.service.router
            client.on_message(RouterWelcome(boot_id=BOOT_ID, num_kv_slots=8))
            client.on_message(router_status())
            setup.router.kv_answer = None  # they were lost just now
            assert _error(await setup.http.get("/debug/kv")) == (503, "not_ready")
            setup.router.is_full = True
            assert _error(await setup.http.get("/debug/kv")) == (429, "overloaded")

    asyncio.run(scenario())


def test_a_router_that_is_lost_or_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(setup: Setup, number: int, num_free_blocks: int) -> None:
        """Answer the question of this number."""
        pool = kv_pool(num_free_blocks=num_free_blocks)
        query_id = _questions(setup)[number].query_id
        setup.service.router.on_message(KVMap(query_id=query_id, pool=pool))

    async def scenario() -> None:
        async with frontend() as setup:
            client, router = setup.service.router, setup.router
            router.ignores_kv = True
            waiting = asyncio.create_task(setup.http.get("/debug/kv"))
            await eventually(lambda: len(_questions(setup)) == 1)
            client.detach()
            assert _error(await waiting) == (503, "router_lost")

            client.attach(router, BOOT_ID)
            client.on_message(RouterWelcome(boot_id=BOOT_ID, num_kv_slots=8))
            monkeypatch.setattr(router_client, "ANSWER_TIMEOUT_S", 0.02)
            assert _error(await setup.http.get("/debug/kv")) == (504, "router_timeout")
            answer(setup, 1, 7)  # no longer waited for

            monkeypatch.setattr(router_client, "ANSWER_TIMEOUT_S", 30.0)
            waiting = asyncio.create_task(setup.http.get("/debug/kv"))
            await eventually(lambda: len(_questions(setup)) == 3)
            answer(setup, 1, 7)  # nor for it a second time
            await asyncio.sleep(0)
            assert not waiting.done()
            answer(setup, 2, 1)
            assert (await waiting).json()["num_free_blocks"] == 1

    asyncio.run(scenario())
