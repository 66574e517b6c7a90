"""GET /debug/kv: what every slot of the KV pool is for, for operators and `lightserve kv-map`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import StreamingResponse

from lightserve.errors import InvalidRequest
from lightserve.frontend.json_body import UNKNOWN_PARAMETER, show
from lightserve.frontend.service import Service
from lightserve.messages.kv_map import KindRuns, KVPool, unpack_kinds
from lightserve.types import SlotKind

RUNS_PER_PIECE = 8192
"""Runs that are written at a time, so that other requests have their turn in between."""
KIND_NAMES = tuple(kind.name.lower() for kind in SlotKind)


def debug_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.get("/debug/kv")
    async def kv(request: Request) -> StreamingResponse:
        """Say what every slot of the KV pool is for."""
        if (name := next(iter(request.query_params), None)) is not None:
            raise InvalidRequest(
                f"the query parameter {show(name)} is not supported", code=UNKNOWN_PARAMETER
            )
        pool = await service.router.describe_kv()
        return StreamingResponse(_json(pool), media_type="application/json")

    return router


def _figures(pool: KVPool) -> dict[str, Any]:
    """Return all but `slots`."""
    return {
        "num_slots": pool.num_slots,
        "block_size": pool.block_size,
        "counts": dict(zip(KIND_NAMES, pool.num_slots_of_kind, strict=True)),
        "classes": {
            request_class.value: {
                "num_requests": slots.num_requests,
                "num_slots": slots.num_slots,
                "num_checkpointed_slots": slots.num_checkpointed_slots,
            }
            for request_class, slots in pool.classes.items()
        },
        "num_free_blocks": pool.num_free_blocks,
        "num_shared_blocks": pool.num_shared_blocks,
        "mean_run_length": pool.mean_run_length,
        "num_host_slots": pool.num_host_slots,
        "num_used_host_slots": pool.num_used_host_slots,
        "kinds": KIND_NAMES,
    }


async def _json(pool: KVPool) -> AsyncIterator[bytes]:
    """Write a `KVMapObject` piece by piece: millions of runs are neither held nor waited for."""
    yield msgspec.json.encode(_figures(pool)).removesuffix(b"}") + b',"slots":'
    if pool.slots is None:
        yield b"null}"
        return
    runs = unpack_kinds(pool.slots)
    yield b"["
    for start in range(0, len(runs.kinds), RUNS_PER_PIECE):
        yield (b"," if start else b"") + _pairs(runs, slice(start, start + RUNS_PER_PIECE))
        await asyncio.sleep(0)
    yield b"]}"


def _pairs(runs: KindRuns, part: slice) -> bytes:
    """Return `[kind, length],[kind, length]…` of some runs."""
    pairs = np.column_stack([runs.kinds[part], runs.lengths[part]])
    return msgspec.json.encode(pairs.tolist())[1:-1]
