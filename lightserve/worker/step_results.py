"""A step between `launch` and `finish`: its place in the device's work, and its results.

Everything that the result needs of the rows is taken when the step is launched: the next plan,
launched before this one is finished, may already have put other sequences there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from lightserve.messages.common import Int32Array, TokenLogprob
from lightserve.messages.router_worker import NO_TOKEN, RowError, RowResult, StepPlan, plan_columns
from lightserve.models.pooling import Pooling
from lightserve.types import RowId
from lightserve.worker.device import DeviceQueue, Mark
from lightserve.worker.host_pool import CopyWait
from lightserve.worker.images import NO_ENCODE_TIME, EncodeTime
from lightserve.worker.sampling.interface import LogprobTensors
from lightserve.worker.sampling.sampler import to_token_logprobs

# Vectors of prompts: one for each row that is there for it, of length 1.


class Vectors(NamedTuple):
    """The vectors of a step."""

    indices: Sequence[int]
    """Indices of their rows among the rows that sample."""
    values: Tensor
    """float32 [len(indices), hidden_size]; fewer numbers of scores."""
    asked: Mapping[int, tuple[int, ...]] = MappingProxyType({})
    """Tokens by index: the first values of such a row are their logits."""

    def items(self) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Yield each with its index, once they are on the host and the step is over."""
        for index, value in zip(self.indices, self.values.numpy(), strict=True):
            yield index, value[: len(self.asked[index])] if index in self.asked else value

    def on_host(self, queue: DeviceQueue) -> Vectors:
        """Return the same as they will be on the host."""
        return self._replace(values=queue.download([self.values])[0])


def row_vectors(indices: Sequence[int], hidden: Tensor) -> Vectors:
    """Return the vectors of rows from pooled hidden states, [len(indices), hidden_size]."""
    return Vectors(indices, functional.normalize(hidden.float(), dim=-1))


def with_logits(
    vectors: Vectors,
    asked: Mapping[int, tuple[int, ...]],
    hidden: Tensor,
    logits: Callable[[Tensor], Tensor | None],
    queue: DeviceQueue,
) -> Vectors:
    """Put the logits of tokens in the places of vectors.

    Args:
        vectors: of a step's rows.
        asked: tokens by index, of some of these rows.
        hidden: [len(vectors.indices), hidden_size], of the rows of all vectors.
        logits: makes logits [n, vocab_size] of states; None on all ranks but rank 0.
        queue: brings indices to the device; for lists torch would wait until it is idle.
    """
    places = [place for place, index in enumerate(vectors.indices) if index in asked]
    if not places:
        return vectors
    wanted: list[Sequence[int]] = [places, *(asked[vectors.indices[place]] for place in places)]
    rows, *token_ids = queue.upload([np.array(part, dtype=np.int64) for part in wanted])
    if (found := logits(hidden.index_select(0, rows))) is not None:
        for own, place, ids in zip(found, places, token_ids, strict=True):
            vectors.values[place, : len(ids)] = own.index_select(0, ids).float()
    return vectors._replace(asked=asked)


def pooled(hidden: Tensor, lengths: Sequence[int], rows: Sequence[int], kind: Pooling) -> Tensor:
    """Return the pooled hidden states of whole prompts, from which vectors are made.

    Args:
        hidden: [T, hidden_size], of all tokens of a step.
        lengths: how many of them each row has, in order.
        rows: which rows, by their place among those.
        kind: how a prompt's tokens become one.

    Returns:
        float32 [len(rows), hidden_size].
    """
    prompts = hidden.split_with_sizes(list(lengths))
    chosen = [prompts[row] for row in rows]
    match kind:
        case Pooling.CLS | Pooling.SCORE:
            return torch.stack([prompt[0] for prompt in chosen]).float()
        case Pooling.MEAN:
            return torch.stack([prompt.float().mean(0) for prompt in chosen])
        case Pooling.LAST | Pooling.YES_NO:
            return torch.stack([prompt[-1] for prompt in chosen]).float()


# Tokens, log-probabilities, and the step as a whole.


class StepMarks(NamedTuple):
    """The place of a step in its device's work."""

    idle_since: Mark
    """The end of the work before it."""
    start: Mark
    end: Mark
    """Its results are on the host."""


class DraftResults(NamedTuple):
    """Results of a step's drafts; tensors are on the host once the step is over."""

    firsts: npt.NDArray[np.int64]
    """[rows that sample], the first draw of each; the others follow it."""
    decodes: npt.NDArray[np.int64]
    """[D], which of the plan's decodes, and so of the rows that sample, have drafts."""
    counts: Tensor
    """int64 [D], drafts of each, …"""
    accepted: Tensor
    """… how many of them are accepted, …"""
    sources: Tensor
    """… and where they come from."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """A step's draws; tensors are on the host once the step is over."""

    rows: list[RowId]
    """Row of each draw."""
    token_ids: Tensor
    """int64 [len(rows)]."""
    drafted: DraftResults | None = None
    """None: each row has one draw."""
    is_finite: Tensor | None = None
    """bool [len(rows)]; rank 0 alone has it."""
    failed: frozenset[int] = frozenset()
    """Indices of rows whose grammar failed."""
    unready: frozenset[int] = frozenset()
    """Indices of rows whose grammar is not compiled yet: they have drawn nothing."""
    logprobs: LogprobTensors | None = None
    """Log-probabilities of the rows of `logprob_indices`."""
    logprob_indices: Sequence[int] = ()
    num_logprobs: Sequence[int] = ()
    """… and how many of the most probable tokens each of them wants."""
    vectors: Vectors | None = None
    """Vectors of the rows that ask for one."""

    def others(self) -> dict[int, _Token | None]:
        """Return by index the results of draws that have more to say than a token.

        None: the grammar of the row is not compiled yet.
        """
        found: dict[int, _Token | None] = {}
        if self.logprobs is not None:
            logprobs = to_token_logprobs(self.logprobs, self.num_logprobs)
            for index, logprob in zip(self.logprob_indices, logprobs, strict=True):
                found[index] = _Token(int(self.token_ids[index]), None, logprob)
        if self.is_finite is not None and not self.is_finite.numpy().all():
            for index in (~self.is_finite.numpy()).nonzero()[0].tolist():
                found[index] = _Token(NO_TOKEN, self._error(index), None)
        for index, vector in () if self.vectors is None else self.vectors.items():
            error = None if np.isfinite(vector).all() else RowError.NON_FINITE_LOGITS
            found[index] = _Token(0, error, None, vector.tobytes())
        found.update(dict.fromkeys(self.unready))
        return found

    def _error(self, index: int) -> RowError:
        """Return the error that kept a row from a token."""
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
    num_rows: int
    """Rows of the step."""
    drawn: Drawn
    prompts: Mapping[RowId, PromptLogprobs]
    """By row with PROMPT_LOGPROBS."""
    constrained_rows: frozenset[RowId]
    """Rows that sample under a constraint, whose tokens the host must know before their next."""
    marks: StepMarks
    copies: CopyWait
    launch_s: float
    """Seconds that the host took to launch it beside its work; 0 on the CPU."""
    num_verified: int = 0
    """See `StepResult`."""
    encoding: EncodeTime = NO_ENCODE_TIME

    def is_done(self) -> bool:
        """Whether `finish` would not wait."""
        return self.marks.end.is_past()

    def must_precede(self, plan: StepPlan) -> bool:
        """Whether this step must be finished before `plan`, the next one, draws tokens.

        Its own tokens decide which tokens its constrained rows may draw next.
        """
        return bool(self.constrained_rows) and not self.constrained_rows.isdisjoint(
            [*plan_columns(plan).rows.tolist(), *(sequence.row for sequence in plan.sequences)]
        )

    def row_results(self) -> tuple[Int32Array, list[RowResult]]:
        """Return the results of a step that is over, as `StepResult` has them.

        Its `token_ids`, and the rows that have more to say.
        """
        drawn, prompts = self.drawn, self.prompts
        draws = drawn.token_ids.numpy().astype(np.int32)
        others = drawn.others()
        if drawn.drafted is None and not others and not prompts:
            return draws[:, None], []
        firsts, counts = _kept_draws(drawn)
        steps = np.arange(counts.max(initial=1))
        places = np.minimum(firsts[:, None] + steps, max(0, len(draws) - 1))
        token_ids = np.where(steps < counts[:, None], draws[places] if len(draws) else 0, NO_TOKEN)
        results = []
        if others or prompts:
            spans = zip(firsts.tolist(), counts.tolist(), strict=True)
            for index, (first, count) in enumerate(spans):
                row = drawn.rows[first]
                if row not in prompts and others.keys().isdisjoint(range(first, first + count)):
                    continue
                tokens = [
                    others.get(place, _Token(int(draws[place]), None, None))
                    for place in range(first, first + count)
                ]
                results.append(_row_result(row, tokens, prompts.get(row)))
                token_ids[index] = NO_TOKEN
        sampled = set(drawn.rows) if prompts else set()
        results += [_row_result(row, [], own) for row, own in prompts.items() if row not in sampled]
        return token_ids.astype(np.int32), results

    def drafted(self) -> Int32Array:
        """Return `StepResult.drafted` of a step that is over, int32 [2, n]."""
        found = np.zeros((2, len(self.plan.decodes.num_drafts) // 4), dtype=np.int32)
        if (drafted := self.drawn.drafted) is not None:
            found[:, drafted.decodes] = drafted.counts.numpy(), drafted.sources.numpy()
        return found


def _kept_draws(drawn: Drawn) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return which draws count, int64 [rows that sample] both: the first of each row, and how many.

    One of each row, and one more for each accepted draft.
    """
    drafted = drawn.drafted
    if drafted is None:
        num_rows = len(drawn.rows)
        return np.arange(num_rows), np.ones(num_rows, dtype=np.int64)
    counts = np.ones(len(drafted.firsts), dtype=np.int64)
    counts[drafted.decodes] += drafted.accepted.numpy()
    return drafted.firsts, counts


class _Token(NamedTuple):
    token_id: int
    error: RowError | None
    """Why the token means nothing."""
    logprob: TokenLogprob | None
    vector: bytes = b""


def _row_result(
    row: RowId, tokens: Sequence[_Token | None], prompt: PromptLogprobs | None
) -> RowResult:
    """Return a row's share of the result.

    `tokens` empty, and `prompt` None: none was wanted. A token None: the row's grammar is not
    compiled yet.
    """
    prompt_logprobs = [] if prompt is None else prompt.result()
    if prompt_logprobs is None:
        return RowResult(row, [], RowError.NON_FINITE_LOGITS)
    known = [token for token in tokens if token is not None]
    if error := next((token.error for token in known if token.error is not None), None):
        return RowResult(row, [], error)
    return RowResult(
        row,
        [token.token_id for token in known],
        logprobs=[token.logprob for token in known if token.logprob is not None],
        prompt_logprobs=prompt_logprobs,
        vector=b"".join(token.vector for token in known),
    )
