"""Rank 0's side of structured output: which tokens each constrained row may draw next.

All of it happens in one thread, in the order in which it was asked for, beside the forward pass:
llguidance lets other threads run. A grammar is compiled when its first sequence is added, which
is during its prefill; the masks of a step are computed while its forward pass runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from lightserve.errors import GrammarError
from lightserve.messages.common import Constraint, unpack_int32
from lightserve.messages.router_worker import AddSequence
from lightserve.structured.grammars import compile_matcher
from lightserve.types import RowId
from lightserve.worker.sampling.interface import RowMasks
from lightserve.worker.sampling.table import Upload

MAX_GRAMMARS = 128
"""Compiled grammars that are kept."""


@dataclass(frozen=True, eq=False)
class StepMasks:
    """What the constrained rows of a step may draw."""

    indices: list[int]
    """Among the step's sampled rows."""
    bits: npt.NDArray[np.uint8]
    """[len(indices), bytes], bit t % 8 of byte t // 8: whether token t is allowed; a multiple of
    four bytes."""
    allowed: Tensor | None
    """bool [len(indices), vocab], the same; where the CPU samples."""
    failed: frozenset[int]
    """Those of `indices` whose grammar failed; they may draw nothing."""

    def upload(self, num_rows: int, upload: Upload) -> RowMasks:
        """Return them beside the logits of the `num_rows` rows that the step samples."""
        rows = np.full(num_rows, -1, dtype=np.int32)
        rows[self.indices] = np.arange(len(self.indices))
        row_bits, bits = upload([rows, self.bits.view(np.int32)])
        return RowMasks(row_bits, bits, self.indices, self.allowed)


class RowConstraints:
    """The matchers of all constrained rows."""

    def __init__(self, vocabulary: LLTokenizer, *, unpack: bool = True) -> None:
        """`unpack`: whether the CPU samples, which wants a byte per token, not a bit."""
        self._vocabulary = vocabulary
        self._unpack = unpack
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="constraints")
        self._rows: set[RowId] = set()
        """Rows with a constraint; what follows belongs to the thread."""
        self._matchers: dict[RowId, LLMatcher | None] = {}
        """None: the grammar failed."""
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()

    def update(self, sequences: Sequence[AddSequence]) -> None:
        """Take in new sequences; output that they bring was drawn under the same constraint."""
        for sequence in sequences:
            constraint = sequence.constraint
            if constraint is not None:
                self._rows.add(sequence.row)
                self._thread.submit(self._add, sequence, constraint)
            elif sequence.row in self._rows:
                self._rows.remove(sequence.row)
                self._thread.submit(self._matchers.pop, sequence.row)

    def among(self, rows: Sequence[RowId]) -> frozenset[RowId]:
        """Return those of `rows` that are constrained."""
        return frozenset(self._rows.intersection(rows))

    def begin(self, rows: Sequence[RowId]) -> Callable[[], StepMasks] | None:
        """Start on the masks of a step that samples these rows, and return how to wait for them.

        None: none of the rows is constrained.
        """
        indices = [index for index, row in enumerate(rows) if row in self._rows]
        if not indices:
            return None
        masks: Future[StepMasks] = self._thread.submit(
            self._masks, indices, [rows[index] for index in indices]
        )
        return masks.result

    def advance(self, rows: Sequence[RowId], token_ids: Sequence[int]) -> None:
        """Take in what the rows of a step drew."""
        drawn = [(row, t) for row, t in zip(rows, token_ids, strict=True) if row in self._rows]
        if drawn:
            self._thread.submit(self._consume, drawn)

    # ------------------------------------------------------------------ in the thread

    def _add(self, sequence: AddSequence, constraint: Constraint) -> None:
        self._matchers[sequence.row] = None
        try:
            matcher = self._compile(constraint).deep_copy()
        except GrammarError:
            return
        tokens = np.concatenate([unpack_int32(part.token_ids) for part in sequence.segments])
        matcher.consume_tokens(tokens[sequence.num_prompt_tokens :].tolist())
        self._matchers[sequence.row] = matcher

    def _compile(self, constraint: Constraint) -> LLMatcher:
        known = self._compiled.get(constraint)
        if known is None:
            known = compile_matcher(constraint, self._vocabulary)
            self._compiled[constraint] = known
            if len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(constraint)
        return known

    def _masks(self, indices: list[int], rows: list[RowId]) -> StepMasks:
        vocab_size = self._vocabulary.vocab_size
        bits = np.zeros((len(rows), -(-vocab_size // 32) * 4), dtype=np.uint8)
        failed = set()
        for number, (index, row) in enumerate(zip(indices, rows, strict=True)):
            mask = b""
            if (matcher := self._matchers[row]) is not None:
                mask = matcher.compute_bitmask()
            if matcher is None or matcher.is_error():
                failed.add(index)
            elif any(mask):
                # There may be a word more than the vocabulary needs.
                bits[number] = np.frombuffer(mask, dtype=np.uint8)[: bits.shape[1]]
            else:
                bits[number] = 255  # it has ended: what an overlapping step draws is discarded
        allowed = None
        if self._unpack:
            unpacked = np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little")
            allowed = torch.from_numpy(unpacked.view(np.bool_))
        return StepMasks(indices, bits, allowed, frozenset(failed))

    def _consume(self, drawn: list[tuple[RowId, int]]) -> None:
        for row, token_id in drawn:
            if (matcher := self._matchers[row]) is not None:
                matcher.consume_token(token_id)  # if it does not fit, the next mask says so
