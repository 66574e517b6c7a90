"""Who gets what of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from lightserve.cost.model import StepShape, chunk_pairs
from lightserve.router.request import Request
from lightserve.router.request_table import Decodes, RequestTable, Rows


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


Share = Decodes | Allotment | Loading
"""A part of what a policy chooses."""


def each_allotment(parts: Iterable[Decodes | Allotment]) -> Iterator[Allotment]:
    """Iterate over the requests of parts, one by one."""
    for part in parts:
        if isinstance(part, Decodes):
            yield from (Allotment(request, 1) for request in part.requests)
        else:
            yield part


def decodes_and_chunks(
    table: RequestTable, parts: Iterable[Decodes | Allotment]
) -> tuple[Decodes, tuple[Allotment, ...]]:
    """Return all decodes of a step together, and the rest of it, both in order."""
    rows: list[Rows] = []
    chunks: list[Allotment] = []
    for part in parts:
        if isinstance(part, Decodes):
            rows.append(part.rows)
        elif part.num_tokens == 1 and part.request.is_decoding:
            rows.append(np.array([part.request.row], dtype=np.int64))
        else:
            chunks.append(part)
    all_rows = np.concatenate([np.empty(0, dtype=np.int64), *rows]) if len(rows) != 1 else rows[0]
    return Decodes(table, all_rows).kept(), tuple(chunks)


def shape_of(parts: Iterable[Decodes | Allotment]) -> StepShape:
    """Return a step's shape, before its requests have moved."""
    num_new = decode_context = chunk_context = pairs = num_decodes = num_chunks = 0
    for part in parts:
        if isinstance(part, Decodes):
            num_new += len(part.rows)
            num_decodes += len(part.rows)
            decode_context += part.num_context_tokens
            continue
        request, num_tokens = part
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
