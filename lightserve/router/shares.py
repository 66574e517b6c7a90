"""Who gets what of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lightserve.cost.model import StepShape, chunk_pairs
from lightserve.router.request import Request


class Allotment(NamedTuple):
    """One request's share of a step: its next `num_tokens` tokens."""

    request: Request
    num_tokens: int


class Loading(NamedTuple):
    """One request's share of the copies beside a step: so much more of its KV comes back.

    It is paused and stays so; it runs in a later step.
    """

    request: Request
    num_tokens: int


Share = Allotment | Loading


def shape_of(allotments: Iterable[Allotment]) -> StepShape:
    """Return a step's shape, before its requests have moved."""
    num_new = decode_context = chunk_context = pairs = num_decodes = num_chunks = 0
    for request, num_tokens in allotments:
        start = request.next_position
        num_new += num_tokens
        if num_tokens == 1:
            decode_context += start
            num_decodes += 1
        else:
            pairs += chunk_pairs(start, num_tokens)
            chunk_context += start
            num_chunks += 1
    return StepShape(num_new, decode_context, pairs, num_decodes, num_chunks, chunk_context)
