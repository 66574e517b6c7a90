"""The router's pulse, from the state of its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from lightserve.messages.frontend_router import ClassLoad, RouterStatus
from lightserve.router.kv.cache import KVStore
from lightserve.router.pipeline import Pipeline
from lightserve.router.queue import Backlog, WaitingQueue
from lightserve.router.request import Request, RequestState
from lightserve.router.request_table import RequestTable
from lightserve.router.step_cost import StepShape
from lightserve.types import RequestClass, RequestKey

_USUAL_TOKENS = 512
"""Of a sequence, where what an engine could do is said in one number."""

# What must hold between any two calls of the core. Pure.


def check_integrity(
    requests: Mapping[RequestKey, Request],
    waiting: WaitingQueue,
    rows: RequestTable,
    kv: KVStore | None,
) -> None:
    """Assert that every slot, row and request has its one place."""
    if kv is not None:
        kv.check_integrity([*rows, *(request for request in waiting if request.is_paused)])
    for request in rows:
        ended = request.state is RequestState.ENDED
        assert ended == (request.key not in requests)
        assert not ended or request.num_inflight_steps > 0, "an ended request holds its row"
        assert request.row is not None and rows.requests[request.row] is request
        assert rows.is_running[request.row] == (not ended)
        assert rows.num_output[request.row] == len(request.output_token_ids)
        assert rows.outputs[request.row] is request.output_token_ids
    live = sum(request.state is RequestState.RUNNING for request in rows)
    assert len(waiting) + live == len(requests), "a request is in no queue"


def router_status(
    waiting: WaitingQueue, rows: RequestTable, kv: KVStore | None, pipeline: Pipeline, now_s: float
) -> RouterStatus:
    """Return what frontends are told; `kv` is None while there are no workers."""
    num_running = Counter(request.request_class for request in rows)
    num_decodes = 1 if kv is None else min(rows.num_rows, max(1, kv.num_slots // _USUAL_TOKENS))
    decodes = StepShape().plus_decodes(num_decodes, num_decodes * _USUAL_TOKENS // 2)
    prompt = StepShape().plus(0, _USUAL_TOKENS)
    return RouterStatus(
        workers_ready=kv is not None,
        load={
            request_class: _load(waiting.backlog(request_class), num_running[request_class])
            for request_class in RequestClass
        },
        num_used_slots=0 if kv is None else kv.num_used,
        num_kv_slots=0 if kv is None else kv.num_slots,
        num_steps=pipeline.num_finished,
        stalled_s=pipeline.stalled_s(now_s),
        worker_busy_s=pipeline.busy_s,
        worker_idle_s=pipeline.idle_s,
        prompt_token_s=pipeline.cost.seconds(prompt) / _USUAL_TOKENS,
        output_token_s=pipeline.cost.seconds(decodes) / num_decodes,
    )


def _load(backlog: Backlog, num_running: int) -> ClassLoad:
    return ClassLoad(backlog.num_requests, backlog.num_tokens, num_running)
