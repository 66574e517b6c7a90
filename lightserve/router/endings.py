"""When a request ends, and whether it survives the death of its workers. Pure."""

from __future__ import annotations

from lightserve.router.request import Request
from lightserve.types import BE, FinishReason

MAX_REPLAYS = 1
"""A request that was in flight at one more death than this gets an error: it is the poison."""


def until_end(request: Request, token_ids: list[int]) -> tuple[list[int], FinishReason | None]:
    """Return those of a request's next tokens that count, and why it ends with the last of them.

    Workers give one token at a time, simulated ones may give many.
    """
    num_left = request.max_tokens - len(request.output_token_ids)
    if num_left < len(token_ids):
        token_ids = token_ids[:num_left]
    if not request.eos_token_ids.isdisjoint(token_ids):
        end = next(i for i, token_id in enumerate(token_ids) if token_id in request.eos_token_ids)
        return token_ids[: end + 1], FinishReason.STOP
    if len(token_ids) >= num_left:
        return token_ids, FinishReason.LENGTH
    return token_ids, None


def can_replay(request: Request, *, was_in_flight: bool) -> bool:
    """Best-effort requests go on where they were; a real-time one only if nothing was sent.

    Whoever was not in flight, since a suspect ran alone, had no part in the death and goes on.
    """
    if not was_in_flight:
        return True
    if request.num_replays >= MAX_REPLAYS:
        return False
    return request.request_class is BE or not request.output_token_ids
