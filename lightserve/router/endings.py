"""When a request ends, and whether it survives the death of its workers. Pure."""

from __future__ import annotations

from lightserve.router.request import Request
from lightserve.types import FinishReason, RequestClass

MAX_REPLAYS = 1
"""A request that was in flight at one more death than this gets an error: it is the poison."""


def finish_reason(request: Request, token_id: int) -> FinishReason | None:
    """Return why a request ends with `token_id`, its newest token; None: it goes on."""
    if token_id in request.eos_token_ids:
        return FinishReason.STOP
    if len(request.output_token_ids) >= request.max_tokens:
        return FinishReason.LENGTH
    return None


def can_replay(request: Request, *, was_in_flight: bool) -> bool:
    """Best-effort requests go on where they were; a real-time one only if nothing was sent.

    Whoever was not in flight, since a suspect ran alone, had no part in the death and goes on.
    """
    if not was_in_flight:
        return True
    if request.num_replays >= MAX_REPLAYS:
        return False
    return request.request_class is RequestClass.BE or not request.output_token_ids
