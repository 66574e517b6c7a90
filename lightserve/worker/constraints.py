"""Rank 0's side of structured output: which tokens each constrained row may draw next.

Two threads do it beside the forward pass: llguidance lets other threads run. One compiles, at low
priority and one grammar after the other, from when a sequence is added, which is during its
prefill. The other computes a step's masks while its forward pass runs. No step waits for a
grammar: a row whose own is not ready yields no token, and the router asks again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from lightserve.errors import GrammarError
from lightserve.messages.common import Constraint, unpack_int32
from lightserve.messages.router_worker import AddSequence
from lightserve.structured import compile_matcher, kept_bytes, yield_to_others
from lightserve.types import RowId
from lightserve.worker.sampling.interface import RowMasks
from lightserve.worker.tables import Upload

MAX_KEPT_BYTES = 64 * 1024
"""Of the texts of compiled grammars that are kept for sequences to come, see `kept_bytes`."""
MAX_USED_BYTES = 512 * 1024
"""Of the different texts that rows are under at once. Compiled, most take some 100 times as much
memory, and texts of one long word 600 times: 256 rows, each with its own, took 5 GiB."""
BEST_EFFORT_SHARE = 0.75
"""Of these, what best-effort rows may fill: they may go on for minutes."""
PATIENCE_S = 0.02
"""What a step waits that has nothing to do but ask for tokens whose grammars are not ready."""


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
    unready: frozenset[int]
    """Those of `indices` whose grammar is not compiled yet; what they draw means nothing."""

    def upload(self, num_rows: int, upload: Upload) -> RowMasks:
        """Return them beside the logits of the `num_rows` rows that the step samples."""
        rows = np.full(num_rows, -1, dtype=np.int32)
        rows[self.indices] = np.arange(len(self.indices))
        row_bits, bits = upload([rows, self.bits.view(np.int32)])
        return RowMasks(row_bits, bits, self.indices, self.allowed)


_Matcher = Future[LLMatcher | None]
"""A row's; None: the grammar failed."""


def _matcher_of(work: _Matcher) -> LLMatcher | None:
    """Return what a compilation that is over gave; one that broke down has failed as well."""
    return None if work.exception() is not None else work.result()


class _Row(NamedTuple):
    constraint: Constraint
    matcher: _Matcher
    """Never done while it waits for its turn."""


def _is_best_effort(waiting: tuple[RowId, AddSequence]) -> bool:
    return not waiting[1].is_real_time


class RowConstraints:
    """The matchers of all constrained rows.

    Rows under the same constraint share what was compiled. Those whose constraint would be too
    much beside the others' wait until enough rows have left: real-time ones first, those of a class
    in the order in which they came.
    """

    def __init__(self, vocabulary: LLTokenizer, *, unpack: bool = True) -> None:
        """`unpack`: whether the CPU samples, which wants a byte per token, not a bit."""
        self._vocabulary = vocabulary
        self._unpack = unpack
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="constraints")
        self._compiler = ThreadPoolExecutor(
            1, thread_name_prefix="grammars", initializer=yield_to_others
        )
        self._rows: dict[RowId, _Row] = {}
        """Rows with a constraint. A matcher belongs to the compiler until it is done, then to the
        thread of the masks."""
        self._waiting: dict[RowId, AddSequence] = {}
        """Those of them whose turn has yet to come."""
        self._used: Counter[Constraint] = Counter()
        """How many of the others are under each."""
        self._num_used_bytes = 0
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        """The compiler's, as is …"""
        self._num_kept_bytes = 0

    def update(self, left_rows: Sequence[RowId], sequences: Sequence[AddSequence]) -> None:
        """Forget what was left, whose grammars are compiled no more, then take in new sequences.

        Output that these bring was drawn under the same constraint.
        """
        for row in (*left_rows, *(sequence.row for sequence in sequences)):
            if (before := self._rows.pop(row, None)) is not None:
                before.matcher.cancel()
                if self._waiting.pop(row, None) is None:
                    self._release(before.constraint)
        for sequence in sequences:
            if sequence.constraint is not None:
                self._rows[sequence.row] = _Row(sequence.constraint, Future())
                self._waiting[sequence.row] = sequence
        for row, sequence in sorted(self._waiting.items(), key=_is_best_effort):
            constraint = self._rows[row].constraint
            if not self._reserve(constraint, is_real_time=sequence.is_real_time):
                break
            del self._waiting[row]
            matcher = self._compiler.submit(self._matcher, sequence, constraint)
            self._rows[row] = _Row(constraint, matcher)

    def _reserve(self, constraint: Constraint, *, is_real_time: bool) -> bool:
        """Count a row under `constraint`, unless that is too much."""
        if constraint not in self._used:
            more = kept_bytes(constraint)
            most = MAX_USED_BYTES if is_real_time else BEST_EFFORT_SHARE * MAX_USED_BYTES
            if self._used and self._num_used_bytes + more > most:
                return False
            self._num_used_bytes += more
        self._used[constraint] += 1
        return True

    def _release(self, constraint: Constraint) -> None:
        self._used[constraint] -= 1
        if not self._used[constraint]:
            del self._used[constraint]
            self._num_used_bytes -= kept_bytes(constraint)

    def among(self, rows: Sequence[RowId]) -> frozenset[RowId]:
        """Return those of `rows` that are constrained."""
        return frozenset(self._rows.keys() & rows) if self._rows else frozenset()

    def begin(self, rows: Sequence[RowId]) -> Callable[[], StepMasks] | None:
        """Start on the masks of a step that samples these rows, and return how to wait for them.

        None: none of the rows is constrained.
        """
        if self._rows.keys().isdisjoint(rows):
            return None
        indices = [index for index, row in enumerate(rows) if row in self._rows]
        masks: Future[StepMasks] = self._thread.submit(
            self._masks, indices, [self._rows[rows[index]].matcher for index in indices]
        )
        return masks.result

    def advance(
        self, rows: Sequence[RowId], token_ids: Sequence[int], unready: frozenset[int]
    ) -> None:
        """Take in what the rows of a step drew; `unready` as its masks had it."""
        drawn = [
            (self._rows[row].matcher, token_id)
            for index, (row, token_id) in enumerate(zip(rows, token_ids, strict=True))
            if row in self._rows and index not in unready
        ]
        if drawn:
            self._thread.submit(self._consume, drawn)

    def wait_for_any(self, rows: Sequence[RowId]) -> None:
        """Wait a moment for the grammar of one of these rows, if they have not been left."""
        compiling = [self._rows[row].matcher for row in rows if row in self._rows]
        wait(compiling, PATIENCE_S, FIRST_COMPLETED)

    # ------------------------------------------------------------------ in the compiler's thread

    def _matcher(self, sequence: AddSequence, constraint: Constraint) -> LLMatcher | None:
        try:
            matcher = self._compile(constraint).deep_copy()
        except GrammarError:
            return None
        tokens = np.concatenate([unpack_int32(part.token_ids) for part in sequence.segments])
        matcher.consume_tokens(tokens[sequence.num_prompt_tokens :].tolist())
        return matcher

    def _compile(self, constraint: Constraint) -> LLMatcher:
        known = self._compiled.get(constraint)
        if known is None:
            known = compile_matcher(constraint, self._vocabulary)
            self._compiled[constraint] = known
            self._num_kept_bytes += kept_bytes(constraint)
            # What rows are under stays, so that others of the same share it.
            unused = [one for one in self._compiled if one not in self._used]
            for oldest in unused:
                if self._num_kept_bytes <= MAX_KEPT_BYTES:
                    break
                del self._compiled[oldest]
                self._num_kept_bytes -= kept_bytes(oldest)
        else:
            self._compiled.move_to_end(constraint)
        return known

    # ------------------------------------------------------------------ in the masks' thread

    def _masks(self, indices: list[int], matchers: list[_Matcher]) -> StepMasks:
        vocab_size = self._vocabulary.vocab_size
        bits = np.zeros((len(matchers), -(-vocab_size // 32) * 4), dtype=np.uint8)
        failed, unready = set[int](), set[int]()
        for number, (index, work) in enumerate(zip(indices, matchers, strict=True)):
            if not work.done():
                unready.add(index)
                bits[number] = 255
                continue
            mask = b""
            if (matcher := _matcher_of(work)) is not None:
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
        return StepMasks(indices, bits, allowed, frozenset(failed), frozenset(unready))

    def _consume(self, drawn: list[tuple[_Matcher, int]]) -> None:
        for work, token_id in drawn:
            if (matcher := _matcher_of(work)) is not None:
                matcher.consume_token(token_id)  # if it does not fit, the next mask says so
