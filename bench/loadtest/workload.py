"""Turns a `Traffic` into the requests to send: arrival, class, prompt and output length of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .arrivals import ArrivalKind, FloatArray, arrival_offsets, count_for, trace_offsets
from .errors import LoadTestError
from .lengths import IntArray, LengthDistribution
from .options import BE, Traffic
from .prompts import UNIQUE, Segment
from .traces import BLOCK_TOKENS, Trace, read_trace

_CLOSED_DRAW = 20_000
"""Requests that an unbounded closed loop has before it starts over with other texts."""
_DOCUMENT_KEY = 1 << 40
"""Added to document numbers, so that they are not taken for block ids."""


@dataclass(frozen=True)
class Plan:
    """What is sent; all of it is known before the first request."""

    traffic: Traffic
    offsets_s: FloatArray | None
    """Intended arrivals, ascending; None in a closed loop."""
    segments: tuple[tuple[Segment, ...], ...]
    """Each prompt, as runs of tokens that are its own or shared."""
    output_tokens: IntArray
    is_be: npt.NDArray[np.bool_]
    priorities: IntArray | None = None
    """None: requests say nothing of theirs."""

    def __len__(self) -> int:
        return len(self.segments)


def make_plan(traffic: Traffic, rng: np.random.Generator) -> Plan:
    """Draw one. Raises LoadTestError: an unreadable trace, or options that contradict it."""
    if traffic.trace is not None and traffic.documents is not None:
        raise LoadTestError("documents are made, not taken from a trace: give one of the two")
    if traffic.documents is not None:
        segments, outputs = _documents(traffic, traffic.documents, rng)
        trace = None
    elif traffic.trace is not None:
        trace = read_trace(
            traffic.trace, first_row=traffic.first_row, num_rows=traffic.num_requests
        )
        segments, outputs = _from_trace(traffic, trace)
    else:
        segments, outputs = _drawn(traffic, _wanted(traffic), rng)
        trace = None
    offsets = _offsets(traffic, trace, len(segments), rng)
    if offsets is not None and traffic.duration_s is not None:
        count = int(np.searchsorted(offsets, traffic.duration_s))
        if count == 0:
            raise LoadTestError(f"no arrival within {traffic.duration_s:g} s")
        offsets, segments, outputs = offsets[:count], segments[:count], outputs[:count]
    is_be = rng.random(len(segments)) < traffic.be_share
    if traffic.request_class == BE:
        is_be[:] = True
    priorities = rng.choice(traffic.priorities, len(segments)) if traffic.priorities else None
    return Plan(traffic, offsets, tuple(segments), outputs, is_be, priorities)


def _wanted(traffic: Traffic) -> int:
    if traffic.num_requests is not None:
        return traffic.num_requests
    if traffic.arrivals is ArrivalKind.CLOSED:
        return _CLOSED_DRAW
    assert traffic.rate is not None and traffic.duration_s is not None, "checked by the cli"
    return count_for(traffic.arrivals, rate_per_s=traffic.rate, duration_s=traffic.duration_s)


def _offsets(
    traffic: Traffic, trace: Trace | None, count: int, rng: np.random.Generator
) -> FloatArray | None:
    if traffic.arrivals is ArrivalKind.CLOSED:
        return None
    if traffic.arrivals is ArrivalKind.TRACE:
        if trace is None or trace.times_s is None:
            raise LoadTestError("arrivals as in the trace need a trace that has times")
        return trace_offsets(trace.times_s, time_scale=traffic.time_scale, rate_per_s=traffic.rate)
    assert traffic.rate is not None, "checked by the cli"
    return arrival_offsets(
        traffic.arrivals,
        rate_per_s=traffic.rate,
        burstiness=traffic.burstiness,
        count=count,
        rng=rng,
    )


def _fit(traffic: Traffic, lengths: IntArray, limit: int | None) -> IntArray:
    scaled: IntArray = np.maximum(1, np.rint(lengths * traffic.length_scale)).astype(np.int64)
    return scaled if limit is None else np.minimum(scaled, limit, dtype=np.int64)


def _drawn(
    traffic: Traffic, count: int, rng: np.random.Generator
) -> tuple[list[tuple[Segment, ...]], IntArray]:
    prompt, output = (
        _fit(traffic, LengthDistribution.parse(text).draw(rng, count), limit)
        for text, limit in (
            (traffic.prompt_tokens, traffic.max_prompt_tokens),
            (traffic.output_tokens, traffic.max_output_tokens),
        )
    )
    return [(Segment(UNIQUE, int(tokens)),) for tokens in prompt], output


def _documents(
    traffic: Traffic, num_documents: int, rng: np.random.Generator
) -> tuple[list[tuple[Segment, ...]], IntArray]:
    """Every question about every document: `document + question`, the document shared."""
    questions, outputs = _drawn(traffic, num_documents * traffic.questions, rng)
    lengths = _fit(
        traffic, LengthDistribution.parse(traffic.document_tokens).draw(rng, num_documents), None
    )
    order = np.repeat(np.arange(num_documents), traffic.questions)
    if traffic.question_order == "mixed":
        rng.shuffle(order)
    rows = [
        (Segment(_DOCUMENT_KEY + int(number), int(lengths[number])), *question)
        for number, question in zip(order, questions, strict=True)
    ]
    return rows[: traffic.num_requests], outputs[: traffic.num_requests]


def _from_trace(traffic: Traffic, trace: Trace) -> tuple[list[tuple[Segment, ...]], IntArray]:
    prompt = _fit(traffic, trace.prompt_tokens, traffic.max_prompt_tokens)
    output = _fit(traffic, trace.output_tokens, traffic.max_output_tokens)
    if trace.blocks is None:
        return [(Segment(UNIQUE, int(tokens)),) for tokens in prompt], output
    block_tokens = max(1, round(BLOCK_TOKENS * traffic.length_scale))
    return [
        _blocks(ids, int(tokens), block_tokens)
        for ids, tokens in zip(trace.blocks, prompt, strict=True)
    ], output


def _blocks(ids: tuple[int, ...], num_tokens: int, block_tokens: int) -> tuple[Segment, ...]:
    """Return the blocks that a prompt of `num_tokens` has; the last takes what is left."""
    segments: list[Segment] = []
    for place, block_id in enumerate(ids):
        left = num_tokens - place * block_tokens
        if left <= 0:
            break
        is_last = place == len(ids) - 1
        segments.append(Segment(block_id, left if is_last else min(left, block_tokens)))
    return tuple(segments)
