"""Drafts: tokens that are guessed, and verified many at a time by one pass of the model.

A row with k drafts computes its last known token and the drafts behind it, and draws behind each of
them as it would without drafts: a draw depends on the seed, the position and the tokens before. The
first draft is accepted if it is the token that was drawn in its place, the second if that holds of
the first as well, and so on; the draw behind the last accepted one counts too. So drafts change no
token. For drafts that are guessed without chance this accepts as often as the rule of speculative
sampling does (Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative
Decoding", 2023, section 2.3).

    positions    0 … L-1     L … L+k-1                    L = known tokens of the row
    tokens       known       drafts
    computed            L-1, L … L+k-1                    k + 1 tokens
    drawn                    L … L+k                      of which 1 … k + 1 count

KV behind the last accepted draft is not read: the next step begins there, and overwrites it. The
router has sent that step's plan perhaps before this one's result: it names the furthest position
that the row can be at, and `true_starts` says where the row is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightserve.worker.device import DeviceQueue

_Int64Array = npt.NDArray[np.int64]


class Proposal(NamedTuple):
    """Guesses of what comes next in some rows."""

    token_ids: Tensor
    """int64 [rows, most]."""
    counts: Tensor
    """int64 [rows], how many of them are guesses."""


class Proposer(Protocol):
    """Guesses tokens. Waits for nothing on a GPU, and guesses the same on all ranks."""

    def propose(self, token_ids: Tensor, lengths: Tensor, most: int) -> Proposal:
        """Guess up to `most` tokens of each row.

        Args:
            token_ids: int32 [rows, width], of which a row's first `lengths` are known.
            lengths: int64 [rows], at least 1.
            most: at least 1.
        """


class NGrams:
    """Guesses that what followed the last tokens of a row before will follow again.

    Of all places at which its last SHORTEST to LONGEST tokens stand, the latest of those counts
    that agree in most. What would follow the end of the row is taken from the guess itself, as if
    it went on in a circle.
    """

    LONGEST, SHORTEST = 4, 2

    def propose(self, token_ids: Tensor, lengths: Tensor, most: int) -> Proposal:
        """See `Proposer.propose`."""
        width, device = token_ids.shape[1], token_ids.device
        ends = torch.arange(width, dtype=torch.int32, device=device)
        same = ends < lengths[:, None] - 1
        agreeing = torch.zeros_like(token_ids)
        for back in range(self.LONGEST):
            wanted = token_ids.gather(1, (lengths - 1 - back).clamp(min=0)[:, None])
            same = same & (ends >= back) & (token_ids.roll(back, dims=1) == wanted)
            agreeing += same
        score = torch.where(agreeing >= self.SHORTEST, agreeing * width + ends, -1).amax(dim=1)
        is_found = score >= 0
        end = torch.where(is_found, score % width, 0).long()
        period = (lengths - 1 - end).clamp(min=1)[:, None]
        places = end[:, None] + 1 + torch.arange(most, device=device) % period
        guesses = token_ids.gather(1, places.clamp(max=width - 1)).long()
        return Proposal(guesses, torch.where(is_found, most, 0))


@dataclass(frozen=True, eq=False)
class Drafted:
    """The rows of a step that have drafts, D of them, and at most K drafts each."""

    rows: Tensor
    """int64 [D], of the tables."""
    lengths: Tensor
    """int64 [D], known tokens of each."""
    counts: Tensor
    """int64 [D], drafts of each."""
    places: Tensor
    """int64 [D, K], where drafts are in the token table; meaningless behind the last of a row."""
    decodes: _Int64Array
    """[D], which of the plan's decodes they are."""


class Drafts:
    """State of rows with drafts, on the device; see the module's docstring.

    Proposers look at MOST_SEARCHED tokens at a time, which bounds their memory.
    """

    MOST_SEARCHED = 1 << 21

    def __init__(self, token_ids: Tensor, queue: DeviceQueue, proposer: Proposer) -> None:
        """`token_ids` is the token table, int32 [max_num_seqs + 1, width], its last row spare."""
        self._token_ids, self._flat_tokens = token_ids, token_ids.view(-1)
        self._queue = queue
        self._proposer = proposer
        self._lengths = torch.zeros(len(token_ids), dtype=torch.int64, device=queue.device)
        """Known tokens of the rows of `_unsure`."""
        self._unsure: _Int64Array = np.empty(0, dtype=np.int64)
        """Rows that had drafts in the last plan: the router may not know where they are."""

    def are_at(self, rows: npt.NDArray[np.integer]) -> bool:
        """Whether the router knows where each of some rows is."""
        return not len(self._unsure) or not np.isin(rows, self._unsure).any()

    def true_starts(
        self, rows: _Int64Array, starts: _Int64Array, num_decodes: int
    ) -> tuple[_Int64Array, Tensor | None]:
        """Return where rows of the next plan begin to compute, and by how much that is too far.

        Args:
            rows: int64 [R], of the plan.
            starts: int64 [R], the furthest position that each can be at.
            num_decodes: how many of them are decodes; where the others are is known.

        Returns:
            Where steps are over when they have been launched, the true positions and None.
            Elsewhere `starts`, and on the device int64 [R], by how much they are too far; None:
            they are right.
        """
        unsure, self._unsure = self._unsure, self._unsure[:0]
        some = np.flatnonzero(np.isin(rows[:num_decodes], unsure)) if len(unsure) else unsure
        if not len(some):
            return starts, None
        if self._queue.is_at_once:
            starts = starts.copy()
            starts[some] = np.minimum(starts[some], self._lengths.numpy()[rows[some]] - 1)
            return starts, None
        places, row_ids, furthest = self._queue.upload([some, rows[some], starts[some]])
        off = (furthest + 1 - self._lengths.index_select(0, row_ids)).clamp(min=0)
        too_far = torch.zeros(len(rows), dtype=torch.int64, device=self._queue.device)
        return starts, too_far.index_copy_(0, places, off)

    def propose(
        self,
        decodes: _Int64Array,
        rows: _Int64Array,
        starts: _Int64Array,
        most: _Int64Array,
        too_far: Tensor | None,
    ) -> Drafted:
        """Put drafts behind the known tokens of rows.

        Args:
            decodes: [D], which decodes of the plan have drafts.
            rows: [D], of the tables.
            starts: [D], as `true_starts` returns them.
            most: [D], drafts that each may have.
            too_far: int64 [decodes of the plan or more] on the device, as `true_starts` returns it.
        """
        index, row_ids, lengths, counts = self._queue.upload([decodes, rows, starts + 1, most])
        if too_far is not None:
            lengths = lengths - too_far.index_select(0, index)
        num_steps, width = int(most.max()), int(starts.max()) + 1
        parts = []
        num_together = max(1, self.MOST_SEARCHED // width)
        for first in range(0, len(rows), num_together):
            some = slice(first, first + num_together)
            known = self._token_ids[:, :width].index_select(0, row_ids[some])
            parts.append(self._proposer.propose(known, lengths[some], num_steps))
        guesses, found = (torch.cat(part) for part in zip(*parts, strict=True))
        counts = torch.minimum(counts, found)
        steps = torch.arange(num_steps, device=counts.device)
        places = (row_ids * self._token_ids.shape[1] + lengths)[:, None] + steps
        is_draft = steps < counts[:, None]
        spare = self._flat_tokens.shape[0] - 1
        places = torch.where(is_draft, places, spare)
        self._flat_tokens.index_copy_(0, places.view(-1), guesses.view(-1).int())
        self._unsure = rows
        return Drafted(row_ids, lengths, counts, places, decodes)

    def accept(self, drafted: Drafted, firsts: Tensor, token_ids: Tensor) -> Tensor:
        """Return how many drafts of each row are accepted, int64 [D]; before draws are stored.

        Args:
            drafted: the step's rows with drafts.
            firsts: int64 [D], the first draw of each.
            token_ids: int64 [L], all draws of the step.
        """
        steps = torch.arange(drafted.places.shape[1], device=token_ids.device)
        draws = (firsts[:, None] + steps).clamp(max=len(token_ids) - 1)
        drawn = token_ids[draws]
        is_right = (self._flat_tokens[drafted.places] == drawn) & (steps < drafted.counts[:, None])
        accepted = is_right.long().cumprod(dim=1).sum(dim=1)
        self._lengths.index_copy_(0, drafted.rows, drafted.lengths + 1 + accepted)
        return accepted
