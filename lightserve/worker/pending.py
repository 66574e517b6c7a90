"""A step between `launch` and `finish`: what was put into the queue, and what will come of it.

Whatever the result needs of the rows is taken when the step is launched: the next plan, launched
before this one is finished, may already have put other sequences there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lightserve.messages.common import TokenLogprob
from lightserve.messages.router_worker import PlanRow, RowError, RowResult, StepPlan
from lightserve.types import RowId
from lightserve.worker.device_queue import Mark
from lightserve.worker.host_pool import CopyWait
from lightserve.worker.sampling.interface import LogprobTensors
from lightserve.worker.sampling.logprobs import to_token_logprobs


class StepMarks(NamedTuple):
    """Where a step is in its device's work."""

    idle_since: Mark
    """The end of the work before it."""
    start: Mark
    end: Mark
    """Its results are on the host."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """A step's tokens; tensors are on the host once the step is over."""

    rows: list[RowId]
    """Of those that sample."""
    token_ids: Tensor
    """int64 [len(rows)]."""
    is_finite: Tensor | None = None
    """bool [len(rows)]; rank 0 alone has it."""
    failed: frozenset[int] = frozenset()
    """Indices of rows whose grammar failed."""
    unready: frozenset[int] = frozenset()
    """Indices of rows whose grammar is not compiled yet: they have drawn nothing."""
    logprobs: LogprobTensors | None = None
    """Of those of `rows` that want any: `logprob_indices`, …"""
    logprob_indices: Sequence[int] = ()
    num_logprobs: Sequence[int] = ()
    """… and how many of the most probable tokens each of them wants."""

    def plain_token_ids(self) -> list[int] | None:
        """Return the tokens if there is nothing else to say of any row; most steps are so."""
        if self.logprobs is not None or self.unready:
            return None
        if self.is_finite is not None and not bool(self.is_finite.all()):
            return None
        token_ids: list[int] = self.token_ids.tolist()
        return token_ids

    def results(self) -> dict[RowId, _Token]:
        """Return what came of each row."""
        token_ids = self.token_ids.tolist()
        is_finite = [True] * len(token_ids) if self.is_finite is None else self.is_finite.tolist()
        logprobs: dict[int, TokenLogprob] = {}
        if self.logprobs is not None:
            found = to_token_logprobs(self.logprobs, self.num_logprobs)
            logprobs = dict(zip(self.logprob_indices, found, strict=True))
        return {
            row: _Token(
                token_ids[index],
                None if is_finite[index] else self._error(index),
                logprobs.get(index),
            )
            for index, row in enumerate(self.rows)
            if index not in self.unready
        }

    def _error(self, index: int) -> RowError:
        """Return what kept a row from a token."""
        if index in self.failed:
            return RowError.CONSTRAINT_FAILED
        return RowError.NON_FINITE_LOGITS


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of the tokens of a prompt's chunk; on the host once the step is over."""

    parts: Sequence[LogprobTensors]
    """In the order of the tokens; rank 0 alone has them."""
    num_top: int

    def result(self) -> list[TokenLogprob] | None:
        """Return one per token; None if the model's logits of any are not finite."""
        if not all(bool(part.is_finite.all()) for part in self.parts):
            return None
        return [
            logprob
            for part in self.parts
            for logprob in to_token_logprobs(part, [self.num_top] * len(part.is_finite))
        ]


@dataclass(frozen=True, eq=False)
class Pending:
    """A launched step."""

    plan: StepPlan
    drawn: Drawn
    prompts: Mapping[RowId, PromptLogprobs]
    """By row with PROMPT_LOGPROBS."""
    constrained_rows: frozenset[RowId]
    """Rows that sample under a constraint, whose tokens the host must know before their next."""
    marks: StepMarks
    copies: CopyWait
    launch_s: float
    """What the host took to launch it beside its work; 0 on the CPU."""

    def is_done(self) -> bool:
        """Whether `finish` would not wait."""
        return self.marks.end.is_past()

    def must_precede(self, plan: StepPlan) -> bool:
        """Whether this step must be finished before `plan`, the next one, draws tokens.

        Its own tokens decide what its constrained rows may draw next.
        """
        return bool(self.constrained_rows) and not self.constrained_rows.isdisjoint(
            [row.row for row in plan.rows] + [sequence.row for sequence in plan.sequences]
        )

    def row_results(self) -> list[RowResult]:
        """Return the results of a step that is over, in the plan's order."""
        if not self.prompts and (token_ids := self.drawn.plain_token_ids()) is not None:
            rows = zip(self.drawn.rows, token_ids, strict=True)
            return [RowResult(row, [token_id]) for row, token_id in rows]
        tokens = self.drawn.results()
        return [
            _row_result(row, tokens.get(row.row), self.prompts.get(row.row))
            for row in self.plan.rows
            if row.output
        ]


class _Token(NamedTuple):
    token_id: int
    error: RowError | None
    """Why the token means nothing."""
    logprob: TokenLogprob | None


def _row_result(
    plan_row: PlanRow, token: _Token | None, prompt: PromptLogprobs | None
) -> RowResult:
    """Return a row's share of the result; `token` and `prompt` None: none was wanted."""
    prompt_logprobs = [] if prompt is None else prompt.result()
    if prompt_logprobs is None:
        return RowResult(plan_row.row, [], RowError.NON_FINITE_LOGITS)
    if token is not None and token.error is not None:
        return RowResult(plan_row.row, [], token.error)
    if token is None:
        return RowResult(plan_row.row, [], prompt_logprobs=prompt_logprobs)
    logprobs = [] if token.logprob is None else [token.logprob]
    return RowResult(
        plan_row.row, [token.token_id], logprobs=logprobs, prompt_logprobs=prompt_logprobs
    )
