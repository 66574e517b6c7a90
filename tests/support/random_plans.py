"""Random plans as a router makes them: prompts in chunks, decodes, rows and slots used again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.messages.router_worker import (
    AddSequence,
    DecodeRows,
    OutputKind,
    PlanRow,
    SlotRange,
    StepPlan,
    pack_decodes,
    plan_rows,
    unpack_decodes,
)
from lightserve.types import RowId, SamplingParams, StepId

EOS = 2


@dataclass
class _Sequence:
    row: RowId
    num_prompt: int
    length: int
    """At which it ends."""
    slots: list[int]
    """Of the positions computed so far."""
    wants_prompt: bool


def row_by_row(plan: StepPlan) -> StepPlan:
    """Return a plan that does the same without columns."""
    ranges = [
        SlotRange(RowId(row), start, pack_int32([slot]))
        for row, start, slot in zip(
            *(c.tolist() for c in unpack_decodes(plan.decodes)[:3]), strict=True
        )
    ]
    return msgspec.structs.replace(
        plan,
        slot_ranges=[*plan.slot_ranges, *ranges],
        rows=plan_rows(plan),
        decodes=DecodeRows(),
    )


class PlanMaker:
    """Draws plans; it never needs a result."""

    def __init__(
        self,
        seed: int,
        *,
        max_seqs: int,
        num_slots: int,
        max_len: int,
        vocab_size: int,
        max_chunk: int = 19,
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._free_rows = [RowId(row) for row in range(max_seqs)]
        self._free_slots = self._rng.permutation(num_slots).tolist()
        self._live: list[_Sequence] = []
        self._max_len, self._vocab_size = max_len, vocab_size
        self._max_chunk = max_chunk
        assert num_slots >= max_seqs * max_len

    def plans(self, count: int) -> Iterator[StepPlan]:
        """Yield so many plans, each of at least one row."""
        for number in range(count):
            news = self._admit() if not self._live or self._rng.random() < 0.15 else []
            rows: list[PlanRow] = []
            decodes: list[tuple[RowId, int, int]] = []
            ranges: list[SlotRange] = []
            for sequence in self._rng.permutation(np.array(self._live, dtype=object)).tolist():
                if (rows or decodes) and self._rng.random() < 0.1:
                    continue  # it waits
                row = self._advance(sequence)
                start, added = row.start_position, sequence.slots[row.start_position :]
                if start and (row.num_tokens, row.output) == (1, OutputKind.SAMPLE):
                    decodes.append((row.row, start, *added))
                    continue
                rows.append(row)
                ranges.append(SlotRange(row.row, start, pack_int32(added)))
            yield StepPlan(
                step_id=StepId(number),
                sequences=news,
                slot_ranges=ranges,
                rows=rows,
                decodes=pack_decodes(*np.array(decodes, dtype=np.int32).reshape(-1, 3).T),
            )
            self._end_some()

    def _admit(self) -> list[AddSequence]:
        news = []
        for _ in range(int(self._rng.integers(1, 5))):
            if not self._free_rows:
                break
            row = self._free_rows.pop(int(self._rng.integers(len(self._free_rows))))
            num_prompt = int(self._rng.integers(1, self._max_len // 2))
            params = self._params()
            wants_prompt = params.num_prompt_logprobs is not None
            length = int(self._rng.integers(num_prompt + 1, self._max_len))
            self._live.append(_Sequence(row, num_prompt, length, [], wants_prompt))
            tokens = pack_int32(self._rng.integers(3, self._vocab_size, num_prompt).tolist())
            news.append(
                AddSequence(row, [TokenSegment(token_ids=tokens)], params, num_prompt, [EOS])
            )
        return news

    def _params(self) -> SamplingParams:
        seed = int(self._rng.integers(1, 2**40))
        match int(self._rng.integers(6)):
            case 0:
                return SamplingParams(temperature=0.8, top_k=9, top_p=0.9, seed=seed)
            case 1:
                return SamplingParams(seed=seed, num_logprobs=3, num_prompt_logprobs=2)
            case 2:
                return SamplingParams(seed=seed, frequency_penalty=0.7, repetition_penalty=1.3)
            case 3:
                return SamplingParams(seed=seed, min_p=0.1)
        return SamplingParams(temperature=0.0)

    def _advance(self, sequence: _Sequence) -> PlanRow:
        start = len(sequence.slots)
        rest = sequence.num_prompt - start
        count = 1 if rest <= 0 else min(rest, int(self._rng.integers(1, self._max_chunk + 1)))
        sequence.slots += [self._free_slots.pop() for _ in range(count)]
        output = OutputKind.SAMPLE if start + count >= sequence.num_prompt else OutputKind.NONE
        if rest > 0 and sequence.wants_prompt:
            output |= OutputKind.PROMPT_LOGPROBS
        return PlanRow(sequence.row, start, count, output)

    def _end_some(self) -> None:
        for sequence in [s for s in self._live if len(s.slots) >= s.length]:
            self._live.remove(sequence)
            self._free_rows.append(sequence.row)
            self._free_slots = [*sequence.slots, *self._free_slots]
