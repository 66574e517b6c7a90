"""Runs every kind of step once before the first request, so that none pays for first-time work.

On a GPU that is above all the compilation of kernels, of which each kind of step and each
sampling option needs others; on the CPU two steps do. What is in the KV pool means nothing yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightserve.kernels.interface import FEW_TOKENS, MAX_FEW_TOKENS
from lightserve.messages.common import Constraint, RegexConstraint, TokenSegment, pack_int32
from lightserve.messages.router_worker import (
    NO_DECODES,
    AddSequence,
    DecodeRows,
    OutputKind,
    PlanRow,
    SlotRange,
    StepPlan,
    pack_decodes,
)
from lightserve.types import SAMPLING_FIELDS, RowId, SamplingParams, StepId
from lightserve.worker.memory import MIN_SLOTS
from lightserve.worker.model_runner import ModelRunner

# The steps that take the most memory beside weights and KV: run once, before the pool is sized.
#
# They name positions that were never filled: tables are zero there, so every token is token 0 with
# its KV in slot 0. What comes out means nothing; what it takes is what the real ones take.

_EXAMPLES: dict[str, Any] = {
    name: spec.example for name, spec in SAMPLING_FIELDS.items() if spec.example is not None
}
EVERYTHING = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=50,
    num_logprobs=20,
    **{name: _EXAMPLES[name] for name, spec in SAMPLING_FIELDS.items() if spec.is_wide},
)
"""Every option that takes a vocabulary's memory for each row; typical-p takes one row's."""


def largest_steps(
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    context_len: int,
    num_kv_tokens: int,
    num_state_slots: int = 0,
) -> list[StepPlan]:
    """Return the largest steps that a router would plan.

    Args:
        max_num_batched_tokens: new tokens of a step.
        max_num_seqs: rows of a step.
        context_len: longest sequence.
        num_kv_tokens: more than all sequences of a step hold, however large the pool will be.
        num_state_slots: of each row's states.

    Returns:
        As many rows as there can be with as many tokens as there can be, spread evenly; as many
        decodes, of contexts as long as they can be; as many rows of a few tokens as are attended
        like decodes; and one row with all the tokens, at the end of the longest context. All rows
        have logits and every option of sampling.
    """
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    each, rest = divmod(max_num_batched_tokens, num_rows)
    longest = max(1, min(context_len - 1, num_kv_tokens))
    shared = max(1, min(longest, num_kv_tokens // num_rows))
    prefills = [(0, min(longest, each + (row < rest))) for row in range(num_rows)]
    decodes = [(shared - 1, 1)] * num_rows
    new = min(FEW_TOKENS, shared, max_num_batched_tokens)
    num_few = min(num_rows, min(MAX_FEW_TOKENS, max_num_batched_tokens) // new)
    few = [(shared - new, new)] * num_few
    chunk = min(longest, max_num_batched_tokens)
    steps = (prefills, decodes, few, [(longest - chunk, chunk)])
    return [_step(rows, num_state_slots) for rows in steps]


def _step(rows: list[tuple[int, int]], num_state_slots: int) -> StepPlan:
    """Return a step of rows (first position, number of tokens) that all sample."""
    known = [TokenSegment(token_ids=pack_int32([0]))]
    sequences = [
        AddSequence(RowId(row), known, EVERYTHING, num_prompt_tokens=1, eos_token_ids=[])
        for row in range(len(rows))
    ]
    return StepPlan(
        step_id=StepId(0),
        sequences=sequences,
        slot_ranges=_states_of(sequences, num_state_slots),
        rows=[
            PlanRow(RowId(row), start, count, OutputKind.SAMPLE)
            for row, (start, count) in enumerate(rows)
        ],
    )


def _states_of(sequences: Sequence[AddSequence], num_state_slots: int) -> list[SlotRange]:
    """Return slots for the states of rows that begin, which all have the same: none counts."""
    own = pack_int32(range(MIN_SLOTS, MIN_SLOTS + num_state_slots))
    return [SlotRange(part.row, -num_state_slots, own) for part in sequences if num_state_slots]


_PROMPT = 4
"""Tokens of a prompt, which is computed in one chunk or in two."""
_SLOTS_PER_ROW = MIN_SLOTS // 2
_EOS = 0
_SHORT_CHUNK = 256
"""With twice as much before it still a context that one program walks alone."""
_FEW = 16
"""Tokens of a chunk that is one block of queries."""


@dataclass(frozen=True)
class _Kind:
    """The options of a sequence."""

    params: SamplingParams
    constraint: Constraint | None = None


_PLAIN = _Kind(SamplingParams(temperature=1.0))
_GREEDY = _Kind(SamplingParams(temperature=0.0))
_TRUNCATED = _Kind(SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01))
_MIN_P = _Kind(SamplingParams(temperature=1.0, min_p=0.01, num_logprobs=0))
_PENALTY = _Kind(SamplingParams(temperature=1.0, frequency_penalty=0.5))
_BIAS = _Kind(SamplingParams(temperature=1.0, logit_bias=((1, 1.0),), num_prompt_logprobs=0))
_EVERYTHING = SamplingParams(
    logit_bias=((1, 1.0),),
    allowed_token_ids=(0, 1, 2, 3),
    bad_words=((4,), (1, 5)),
    num_logprobs=2,
    num_prompt_logprobs=2,
    **_EXAMPLES,
)
_CONSTRAINT = RegexConstraint(pattern="[a-z]*")

_PAIRS = (
    *((kind, kind) for kind in (_PLAIN, _GREEDY, _TRUNCATED, _MIN_P, _PENALTY, _BIAS)),
    (_Kind(_EVERYTHING), _Kind(_EVERYTHING)),
    (_GREEDY, _Kind(_EVERYTHING)),
    (_TRUNCATED, _PLAIN),
    (_PLAIN, _Kind(_PLAIN.params, _CONSTRAINT)),
    (_TRUNCATED, _Kind(_EVERYTHING, _CONSTRAINT)),
)


_Rows = list[PlanRow]


class _Part(NamedTuple):
    """A row's part in a step."""

    row: int
    start: int
    num_tokens: int
    is_sampled: bool = True


def warm_up(runner: ModelRunner, *, max_num_batched_tokens: int) -> None:
    """Run the steps; every rank does.

    Args:
        runner: whose tables and pools mean nothing yet.
        max_num_batched_tokens: of the steps that it will get.
    """
    num_tokens = min(MIN_SLOTS - 1, runner.context_len - 1)
    if runner.device.type == "cpu" or runner.context_len < 2 * _PROMPT:
        _execute(runner, [_Part(0, 0, num_tokens)], {0: _PLAIN}, prompt=num_tokens)
        _execute(runner, [_Part(0, num_tokens, 1)], {}, prompt=num_tokens)
        return
    for pair in _PAIRS:
        for wanted in _kinds_of_steps(min(2, runner.max_num_seqs, max_num_batched_tokens)):
            fits = sum(part.num_tokens for part in wanted) <= max_num_batched_tokens
            parts = wanted if fits else wanted[:1]
            _execute(runner, parts, dict(enumerate(pair)), prompt=_PROMPT)
    # With one row and one guess there is no room for the inputs of more tokens than these.
    if (num_drafts := min(2, runner.max_drafted_tokens - 1)) > 0:
        firsts = [0, 1][: min(runner.max_num_seqs, max_num_batched_tokens - num_drafts)]
        parts = [_Part(row, 0, 1, is_sampled=False) for row in firsts]
        _execute(runner, parts, dict.fromkeys(firsts, _GREEDY), prompt=2)
        counts = [num_drafts, 0][: len(firsts)]
        places = [_Part(row, 1 + i, 1) for row in firsts for i in range(1 + counts[row])]
        slots = [_first_slot(place) for place in places]
        _run(runner, [], [], [], pack_decodes(firsts, [1] * len(firsts), slots, counts))
    # Positions that were never filled are token 0 in slot 0.
    for rows in _chunks(runner.context_len, runner.max_num_seqs, max_num_batched_tokens):
        _run(runner, [], [], rows)


def _chunks(context_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> Iterator[_Rows]:
    """Yield chunks for which kernels may be others.

    Large ones, and those with much before them: one row, and as many as there may be, of contexts
    that are too short to be cut; and a few tokens behind so much that their context is cut.
    """
    size = min(max_num_batched_tokens, (context_len - 1) // 3)
    short = min(_SHORT_CHUNK, size)
    rows = range(min(max_num_seqs, max_num_batched_tokens // short))
    for factor in (0, 2):
        yield [PlanRow(RowId(0), factor * size, size, OutputKind.SAMPLE)]
        yield [PlanRow(RowId(row), factor * short, short, OutputKind.NONE) for row in rows]
    few = min(_FEW, size)
    yield [PlanRow(RowId(0), context_len - 1 - few, few, OutputKind.SAMPLE)]


def _kinds_of_steps(num_rows: int) -> Iterator[list[_Part]]:
    """Yield chunks, chunks behind them, decodes, a decode alone, and one beside a chunk."""
    chunk, rows = _PROMPT // 2, range(num_rows)
    yield [_Part(row, 0, chunk, is_sampled=False) for row in rows]
    yield [_Part(row, chunk, chunk) for row in rows]
    yield [_Part(row, _PROMPT, 1) for row in rows]
    yield [_Part(0, _PROMPT + 1, 1)]
    if num_rows > 1:
        yield [_Part(0, _PROMPT + 2, 1), _Part(1, 0, _PROMPT)]


def _execute(
    runner: ModelRunner, parts: Sequence[_Part], kinds: Mapping[int, _Kind], *, prompt: int
) -> None:
    """Run a step; rows that begin in it get sequences of `kinds` with `prompt` tokens.

    Every rank runs the same number of steps, though rank 0 alone may know constraints.
    """
    tokens = [TokenSegment(token_ids=pack_int32([0] * prompt))]
    decodes = [part for part in parts if part.num_tokens == 1 and part.start >= prompt]
    begun = [(RowId(part.row), kinds[part.row]) for part in parts if part.start == 0]
    _run(
        runner,
        [
            AddSequence(
                row,
                tokens,
                kind.params,
                prompt,
                [_EOS],
                kind.constraint if runner.has_constraints else None,
            )
            for row, kind in begun
        ],
        [_slots_of(part) for part in parts if part not in decodes],
        [
            PlanRow(RowId(p.row), p.start, p.num_tokens, _output(p, kinds.get(p.row, _PLAIN)))
            for p in parts
            if p not in decodes
        ],
        pack_decodes(
            [part.row for part in decodes],
            [part.start for part in decodes],
            [_first_slot(part) for part in decodes],
        ),
    )


def _run(
    runner: ModelRunner,
    sequences: list[AddSequence],
    slot_ranges: list[SlotRange],
    rows: list[PlanRow],
    decodes: DecodeRows = NO_DECODES,
) -> None:
    ranges = slot_ranges + _states_of(sequences, runner.pool.num_state_slots)
    runner.execute(StepPlan(StepId(0), sequences, ranges, rows, decodes))


def _first_slot(part: _Part) -> int:
    return part.row * _SLOTS_PER_ROW + part.start


def _slots_of(part: _Part) -> SlotRange:
    first = _first_slot(part)
    slots = pack_int32(range(first, first + part.num_tokens))
    return SlotRange(RowId(part.row), part.start, slots)


def _output(part: _Part, kind: _Kind) -> OutputKind:
    if not part.is_sampled:
        return OutputKind.NONE
    if part.start >= _PROMPT or kind.params.num_prompt_logprobs is None:
        return OutputKind.SAMPLE
    return OutputKind.SAMPLE | OutputKind.PROMPT_LOGPROBS
