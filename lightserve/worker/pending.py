"""A step between `launch` and `finish`: what was put into the queue, and what will come of it.

Whatever the result needs of the rows is taken when the step is launched: the next plan, launched
before this one is finished, may already have put other sequences there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from lightserve.messages.common import TokenLogprob
from lightserve.messages.router_worker import PlanRow, RowError, RowResult, StepPlan
from lightserve.types import RowId, SamplingParams
from lightserve.worker.device_queue import Mark
from lightserve.worker.host_pool import CopyWait
from lightserve.worker.logprobs import token_logprobs
from lightserve.worker.sampler import Sampled

PromptNews = list[TokenLogprob] | None
"""Log-probabilities of a prompt's tokens; None: they are not finite."""


class StepMarks(NamedTuple):
    """Where a step is in its device's work."""

    idle_since: Mark
    """The end of the work before it."""
    start: Mark
    end: Mark
    """Its results are on the host."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """A step's tokens."""

    rows: list[RowId]
    """Of those that sample."""
    token_ids: Tensor
    """int64 [len(rows)], on the host once the step is over."""
    is_finite: Sequence[bool] = ()
    """Of each of `rows`; rank 0 alone has it."""
    failed: frozenset[int] = frozenset()
    """Indices of rows whose grammar failed."""
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)
    """By index, of the rows that want any."""

    def results(self) -> dict[RowId, _Token]:
        """Return what came of each row."""
        return {
            row: _Token(token_id, self._error(index), self.logprobs.get(index))
            for index, (row, token_id) in enumerate(
                zip(self.rows, self.token_ids.tolist(), strict=True)
            )
        }

    def _error(self, index: int) -> RowError | None:
        """Return what kept a row from a token."""
        if not self.is_finite or self.is_finite[index]:
            return None
        if index in self.failed:
            return RowError.CONSTRAINT_FAILED
        return RowError.NON_FINITE_LOGITS


@dataclass(frozen=True, eq=False)
class Pending:
    """A launched step."""

    plan: StepPlan
    drawn: Drawn
    prompts: Mapping[RowId, PromptNews]
    """By row with PROMPT_LOGPROBS."""
    constrained_rows: frozenset[RowId]
    """Rows that sample under a constraint, whose tokens the host must know before their next."""
    marks: StepMarks
    copies: CopyWait

    def is_done(self) -> bool:
        """Whether `finish` would not wait."""
        return self.marks.end.is_past()

    def must_precede(self, plan: StepPlan) -> bool:
        """Whether this step must be finished before `plan`, the next one, is launched.

        Its tokens decide what its constrained rows may draw next.
        """
        return bool(self.constrained_rows) and not self.constrained_rows.isdisjoint(
            [row.row for row in plan.rows] + [sequence.row for sequence in plan.sequences]
        )

    def row_results(self) -> list[RowResult]:
        """Return the results of a step that is over, in the plan's order."""
        tokens = self.drawn.results()
        return [
            _row_result(row, tokens.get(row.row), self.prompts.get(row.row, []))
            for row in self.plan.rows
            if row.output
        ]


class _Token(NamedTuple):
    token_id: int
    error: RowError | None
    """Why the token means nothing."""
    logprob: TokenLogprob | None


def wanted_logprobs(
    logits: Tensor, sampled: Sampled, params: Sequence[SamplingParams]
) -> dict[int, TokenLogprob]:
    """Return the log-probabilities of the rows that want any, by index."""
    wanted = {
        index: p.num_logprobs
        for index, p in enumerate(params)
        if p.num_logprobs is not None and sampled.is_finite[index]
    }
    if not wanted:
        return {}
    rows = list(wanted)
    found = token_logprobs(logits[rows], sampled.token_ids[rows], list(wanted.values()))
    return dict(zip(rows, found, strict=True))


def _row_result(plan_row: PlanRow, token: _Token | None, prompt: PromptNews) -> RowResult:
    """Return a row's share of the result; `token` None: none was wanted."""
    if prompt is None:
        return RowResult(plan_row.row, [], RowError.NON_FINITE_LOGITS)
    if token is not None and token.error is not None:
        return RowResult(plan_row.row, [], token.error)
    if token is None:
        return RowResult(plan_row.row, [], prompt_logprobs=prompt)
    logprobs = [] if token.logprob is None else [token.logprob]
    return RowResult(plan_row.row, [token.token_id], logprobs=logprobs, prompt_logprobs=prompt)
