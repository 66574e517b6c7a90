"""What must hold between any two calls of the core (architecture 6, invariant 1). Pure."""

from __future__ import annotations

from collections.abc import Mapping

from lightserve.router.kv.cache import KVStore
from lightserve.router.queue import WaitingQueue
from lightserve.router.request import Request, RequestState
from lightserve.router.request_table import RequestTable
from lightserve.types import RequestKey


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
