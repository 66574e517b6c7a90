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
that the row can be at, and `Drafts.begin` says where the row is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightserve.messages.common import Int32Array, unpack_int32
from lightserve.messages.router_worker import NO_TOKEN, DecodeColumns, StepPlan
from lightserve.types import DraftSource, RowId
from lightserve.worker.device import DeviceQueue

_Int64Array = npt.NDArray[np.int64]


class Rows(NamedTuple):
    """Rows of the token table that are to have drafts, D of them."""

    numbers: _Int64Array
    """[D]."""
    ids: Tensor
    """int64 [D], the same on the device."""
    lengths: Tensor
    """int64 [D], known tokens of each, at least 1."""
    ends: _Int64Array
    """[D], the same on the host, or more: see `too_far`."""
    too_far: Tensor | None
    """int64 [D] on the device, by how much `ends` are more; None: by nothing."""
    most: _Int64Array
    """[D], guesses that each may have, at least 1."""
    slots: Tensor
    """int32 [rows of the table, positions], where the KV of each position is, see `SequenceTable`;
    each has slots for its last known token and all guesses but the last."""


class Proposal(NamedTuple):
    """Guesses of what comes next in some rows."""

    token_ids: Tensor
    """int64 [rows, most]."""
    counts: Tensor
    """int64 [rows], how many of them are guesses."""
    sources: Tensor
    """int64 [rows], the `DraftSource` of each."""


class Proposer(Protocol):
    """Guesses tokens. Waits for nothing on a GPU, and guesses the same on all ranks."""

    needs_lengths: bool
    """Whether `begin` reads lengths."""
    needs_slots: bool
    """Whether `propose` writes KV."""

    def begin(self, plan: StepPlan, decodes: DecodeColumns, table: Tensor, lengths: Tensor) -> None:
        """Take in a plan, before anything of it is in the token table, int32.

        `lengths`, int64 [rows of the table]: known tokens of each row.
        """

    def propose(self, table: Tensor, rows: Rows) -> Proposal:
        """Guess tokens of rows of the token table."""

    def learn(self, drafted: Drafted, accepted: Tensor) -> None:
        """Take in how many drafts of each row are accepted, int64 [D]."""


class Lookup:
    """Guesses that what followed the last tokens of a row before will follow again.

    It looks in the row itself, in what its request says that the output will be, and in recent
    answers to its like. Of all places of a text at which the row's last SHORTEST to LONGEST tokens
    stand, those count that agree in most; of these the latest of the row, and in other texts the
    nearest to where the row was in them. What would follow the end of the row is taken from the
    guess itself, as if it went on in a circle. Of several texts the one is taken that has been
    right most often of late in this row, weighted by how much agrees.
    """

    needs_slots = False
    LONGEST, SHORTEST = 4, 2
    MOST_SEARCHED = 1 << 21
    """Tokens that are looked at together, which bounds the memory."""
    FIRST_CHANCES = (0.4, 0.8, 0.5)
    """Chances of `DraftSource`s of which nothing is known."""
    PRIOR_DRAFTS, MEMORY = 3.0, 0.85
    """Drafts that these count for; weight of what is known of a row after more of its drafts."""

    def __init__(self, num_rows: int, queue: DeviceQueue, *, keeps_answers: bool = False) -> None:
        """`num_rows` of the token table; with `keeps_answers` it looks in recent ones, too."""
        self.needs_lengths = keeps_answers
        self._queue = queue
        self._answers = RecentAnswers(num_rows, queue) if keeps_answers else None
        self._predictions: dict[int, Tensor] = {}
        """Texts of rows, int32 [n, at least 1]."""
        self._num_prompt = np.zeros(num_rows, dtype=np.int64)
        shape = (num_rows, len(self.FIRST_CHANCES))
        self._records = torch.zeros(*shape, 2, device=queue.device)
        """Drafts of rows that were accepted, and tried, by source."""
        self._offsets = torch.zeros(shape, dtype=torch.int64, device=queue.device)
        """Where rows were in other texts: places of their last tokens less their lengths."""
        self._first_chances = torch.tensor(self.FIRST_CHANCES, device=queue.device)

    def begin(self, plan: StepPlan, decodes: DecodeColumns, table: Tensor, lengths: Tensor) -> None:
        """See `Proposer.begin`."""
        if self._answers is not None:
            self._answers.begin(plan, decodes, table, lengths)
        rows, offsets = [], []
        for sequence in plan.sequences:
            row = sequence.row
            self._predictions.pop(row, None)
            if not sequence.prediction and not sequence.draft_scope:
                continue
            if sequence.prediction:
                tokens = unpack_int32(sequence.prediction).copy()
                self._predictions[row] = self._queue.upload([tokens])[0]
            self._num_prompt[row] = sequence.num_prompt_tokens
            place = 0 if self._answers is None else self._answers.place(row)
            rows.append(row)
            num_known = sum(len(part.token_ids) for part in sequence.segments) // 4
            offsets.append((0, -1 - sequence.num_prompt_tokens, place - num_known))
        if rows:
            ids, own = self._queue.upload(
                [np.array(part, dtype=np.int64) for part in (rows, offsets)]
            )
            self._records.index_fill_(0, ids, 0.0)
            self._offsets.index_copy_(0, ids, own)

    def propose(self, table: Tensor, rows: Rows) -> Proposal:
        """See `Proposer.propose`."""
        most = int(rows.most.max())
        texts: dict[DraftSource, _Texts] = {}
        if self._predictions:
            own = [self._predictions.get(row) for row in rows.numbers.tolist()]
            texts[DraftSource.PREDICTION] = own
        if self._answers is not None:
            texts[DraftSource.SUFFIX] = [self._answers.text(row) for row in rows.numbers.tolist()]
        texts = {source: own for source, own in texts.items() if own.count(None) < len(own)}
        guess = self._on_host if self._queue.is_at_once else self._on_device
        guesses = [guess(DraftSource.NGRAM, [], table, rows, most)]
        guesses += [guess(source, own, table, rows, most) for source, own in texts.items()]
        token_ids = torch.stack([guess.token_ids for guess in guesses])
        counts = (token_ids >= 0).cumprod(2).sum(2)
        if not texts:
            return Proposal(token_ids[0], counts[0], torch.zeros_like(counts[0]))
        # Not as a list: torch would wait for the device while it brings it there.
        (sources,) = self._queue.upload([np.array([DraftSource.NGRAM, *texts], dtype=np.int64)])
        records = self._records.index_select(0, rows.ids).index_select(1, sources)
        first = self.PRIOR_DRAFTS * self._first_chances.index_select(0, sources)
        chances = (records[..., 0] + first) / (records[..., 1] + self.PRIOR_DRAFTS)
        agreeing = torch.stack([guess.agreeing for guess in guesses])
        best = torch.where(counts > 0, agreeing * chances.T, -1.0).argmax(dim=0)
        chosen = best, torch.arange(len(rows.ids), device=table.device)
        return Proposal(token_ids[chosen], counts[chosen], sources.index_select(0, best))

    def learn(self, drafted: Drafted, accepted: Tensor) -> None:
        """See `Proposer.learn`."""
        if self._answers is None and not self._predictions:
            return  # there is nothing to choose from
        sources, tried = drafted.sources, torch.minimum(accepted + 1, drafted.counts)
        news = torch.stack([accepted, tried], dim=1).float()
        self._records[drafted.rows, sources] = (
            self.MEMORY * self._records[drafted.rows, sources] + news
        )

    def _on_host(
        self, source: DraftSource, texts: _Texts, table: Tensor, rows: Rows, most: int
    ) -> _Guess:
        """Look row by row at the few places where the last token stands; see `_on_device`."""
        is_own, offsets = source is DraftSource.NGRAM, self._offsets.numpy()[:, source]
        guesses = np.full((len(rows.numbers), most), NO_TOKEN, dtype=np.int64)
        agreeing, steps = np.zeros(len(guesses), dtype=np.int64), np.arange(most)
        firsts = self._firsts(source, rows).tolist()
        each = zip(rows.numbers.tolist(), rows.lengths.tolist(), firsts, strict=True)
        for index, (row, length, first) in enumerate(each):
            known = table[row, :length].numpy()
            text = known[:-1] if is_own else texts[index]
            if text is None or length <= first:
                continue
            tail = known[max(first, length - self.LONGEST) :]
            end, agree = find(np.asarray(text), tail, int(offsets[row]) + length)
            if agree >= min(self.SHORTEST, length - first):
                agreeing[index] = agree
                if is_own:
                    guesses[index] = known[end + 1 + steps % (length - 1 - end)]
                else:
                    own = text[end + 1 : end + 1 + most]
                    guesses[index, : len(own)] = own
                    offsets[row] = end - length
        return _Guess(torch.from_numpy(guesses), torch.from_numpy(agreeing))

    def _on_device(
        self, source: DraftSource, texts: _Texts, table: Tensor, rows: Rows, most: int
    ) -> _Guess:
        """Look in the rows themselves, or in a text of each, or none; at all places at once."""
        is_own, steps = source is DraftSource.NGRAM, torch.arange(most, device=table.device)
        firsts = self._queue.upload([self._firsts(source, rows)])[0]
        empty, parts = table.new_full((1,), NO_TOKEN), []
        width = (
            int(rows.ends.max()) if is_own else max(len(text) for text in texts if text is not None)
        )
        num_together = max(1, self.MOST_SEARCHED // width)
        for begin in range(0, len(rows.ids), num_together):
            some = slice(begin, begin + num_together)
            ids, lengths, first = rows.ids[some], rows.lengths[some], firsts[some]
            if is_own:
                known, sizes = table[:, :width].index_select(0, ids), lengths - 1
            else:
                own = [empty if text is None else text for text in texts[some]]
                known = pad_sequence(own, batch_first=True, padding_value=NO_TOKEN)
                sizes = torch.full_like(lengths, known.shape[1])
            offsets = self._offsets[ids, source]
            tails = _tails(table, ids, lengths, first, self.LONGEST)
            ends, agreeing = search(known, sizes, tails, offsets + lengths)
            is_found = agreeing >= (lengths - first).clamp(1, self.SHORTEST)
            period = (lengths - 1 - ends).clamp(min=1)[:, None] if is_own else most
            places = ends[:, None] + 1 + steps % period
            is_there = is_found[:, None] & (places < known.shape[1])
            guesses = known.gather(1, places.clamp(max=known.shape[1] - 1)).long()
            if not is_own:
                self._offsets[ids, source] = torch.where(is_found, ends - lengths, offsets)
            parts.append((torch.where(is_there, guesses, NO_TOKEN), agreeing))
        return _Guess(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def _firsts(self, source: DraftSource, rows: Rows) -> _Int64Array:
        """Return from where on rows are compared with a text: predictions are of the output."""
        return self._num_prompt[rows.numbers] * (source is DraftSource.PREDICTION)


_Texts = Sequence[Tensor | None]
"""int32 [n] of each row, at least one token; None: there is none."""


class _Guess(NamedTuple):
    """Guesses from a text of each row."""

    token_ids: Tensor
    """int64 [rows, most], NO_TOKEN behind the last."""
    agreeing: Tensor
    """int64 [rows], how many tokens before them are the row's last ones."""


def _tails(table: Tensor, rows: Tensor, lengths: Tensor, firsts: Tensor, longest: int) -> Tensor:
    """Return the last tokens of rows, the very last first, int64 [rows, longest]; -2: none.

    Rows have tokens at positions first … length - 1, int64 [rows] both.
    """
    positions = lengths[:, None] - 1 - torch.arange(longest, device=table.device)
    tails = table[rows[:, None], positions.clamp(min=0)].long()
    return torch.where(positions >= firsts[:, None], tails, NO_TOKEN - 1)


def search(texts: Tensor, sizes: Tensor, tails: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Return where in texts most of some last tokens stand, and how many, int64 [rows] both.

    Args:
        texts: int32 [rows, width], of which a row's first `sizes` are searched, int64 [rows].
        sizes: see above.
        tails: as `_tails` returns them.
        expected: int64 [rows]; of several places the nearest to it is taken.
    """
    width = texts.shape[1]
    ends = torch.arange(width, device=texts.device)
    same = ends < sizes[:, None]
    agreeing = torch.zeros(texts.shape, dtype=torch.int64, device=texts.device)
    for back in range(tails.shape[1]):
        same = same & (ends >= back) & (texts.roll(back, dims=1) == tails[:, back, None])
        agreeing += same
    away = ends - expected.clamp(0, width)[:, None]
    # Where as many agree and two are as near, the later one: no two scores are equal.
    scores = 2 * (agreeing * (width + 1) - away.abs()) + (away > 0)
    best = scores.argmax(dim=1)
    return best, agreeing.gather(1, best[:, None]).squeeze(1)


def find(text: Int32Array, tail: Int32Array, expected: int) -> tuple[int, int]:
    """Return the same of one text; `tail` has the very last token last."""
    found, agreeing = np.flatnonzero(text == tail[-1]), 0
    ends = found
    while len(found) and agreeing < len(tail):
        ends, agreeing = found, agreeing + 1
        if agreeing < len(tail):
            found = ends[ends >= agreeing]
            found = found[text[found - agreeing] == tail[-1 - agreeing]]
    if not agreeing:
        return 0, 0
    away = ends - min(max(expected, 0), len(text))
    return int(ends[np.argmin(2 * np.abs(away) - (away > 0))]), agreeing


@dataclass(eq=False)
class _Ring:
    """The last tokens of a scope's answers, and the place of the next one."""

    token_ids: Tensor
    """int32 [TOKENS]; NO_TOKEN behind each answer."""
    end: int = 0


class RecentAnswers:
    """The last answers of each draft scope, on the device: what rows of the scope may be like.

    Bounded: TOKENS of each scope, MOST of one answer, SCOPES, those used longest ago go first.
    """

    TOKENS, MOST, SCOPES = 8192, 2048, 64
    FEWEST = 8
    """Shorter answers are not kept."""

    def __init__(self, num_rows: int, queue: DeviceQueue) -> None:
        self._queue = queue
        self._rings: OrderedDict[int, _Ring] = OrderedDict()
        self._scopes: dict[int, int] = {}
        """Scopes of rows."""
        self._firsts = np.zeros(num_rows, dtype=np.int64)
        """Positions from which rows are kept: a little of the prompt, by which the beginning of an
        answer is found."""
        self._furthest = np.zeros(num_rows, dtype=np.int64)
        """Most tokens that rows may have."""

    def begin(self, plan: StepPlan, decodes: DecodeColumns, table: Tensor, lengths: Tensor) -> None:
        """Keep the answers of rows that are left, and note new ones; see `Proposer.begin`."""
        for row in {*plan.left_rows, *(sequence.row for sequence in plan.sequences)}:
            if scope := self._scopes.pop(row, 0):
                self._keep(scope, row, table, lengths)
        for sequence in plan.sequences:
            row = sequence.row
            if sequence.draft_scope:
                self._scopes[row] = sequence.draft_scope
                self._firsts[row] = max(0, sequence.num_prompt_tokens - Lookup.LONGEST)
                self._furthest[row] = 0
        self._furthest[decodes.rows] = decodes.start_positions + decodes.num_tokens + 1

    def text(self, row: RowId | int) -> Tensor | None:
        """Return recent answers of a row's scope, int32 [TOKENS]; None: there are none."""
        ring = self._rings.get(self._scopes.get(row, 0))
        return None if ring is None else ring.token_ids

    def place(self, row: RowId) -> int:
        """Return where the latest answer of a row's scope ends."""
        ring = self._rings.get(self._scopes.get(row, 0))
        return 0 if ring is None else ring.end

    def _keep(self, scope: int, row: int, table: Tensor, lengths: Tensor) -> None:
        first, furthest = int(self._firsts[row]), int(self._furthest[row])
        count = min(furthest - first, self.MOST)
        if count < self.FEWEST + Lookup.LONGEST:
            return
        if (ring := self._rings.get(scope)) is None:
            ring = self._rings[scope] = _Ring(table.new_full((self.TOKENS,), NO_TOKEN))
            if len(self._rings) > self.SCOPES:
                self._rings.popitem(last=False)
        self._rings.move_to_end(scope)
        steps = torch.arange(count + 1, device=table.device)
        positions = lengths[row] - count + steps  # the last one is behind the row
        is_kept = (positions >= first) & (steps < count)
        tokens = table[row].index_select(0, positions.clamp(0, table.shape[1] - 1))
        tokens = torch.where(is_kept, tokens, NO_TOKEN)
        ring.token_ids.index_copy_(0, (ring.end + steps) % self.TOKENS, tokens)
        ring.end = (ring.end + count + 1) % self.TOKENS


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
    sources: Tensor
    """int64 [D], see `Proposal`."""


class Begun(NamedTuple):
    """The decodes of a plan, n of them, some of which have drafts or are not where it says."""

    starts: _Int64Array
    """[n], positions at which they begin, or more: see `too_far`."""
    too_far: Tensor | None
    """int64 [rows of the plan] on the device, by how much they are more; None: by nothing."""
    num_drafts: _Int64Array
    """[n], drafts that each computes."""
    drafted: Drafted | None
    """None: no row computes any."""


class Drafts:
    """State of rows with drafts, on the device; see the module's docstring."""

    def __init__(
        self, token_ids: Tensor, slots: Tensor, queue: DeviceQueue, proposer: Proposer
    ) -> None:
        """`token_ids` is the token table, int32 [max_num_seqs + 1, width], its last row spare, and
        `slots` that of slots."""
        self._token_ids, self._flat_tokens = token_ids, token_ids.view(-1)
        self._slots = slots
        self._queue = queue
        self._proposer = proposer
        self._lengths = torch.zeros(len(token_ids), dtype=torch.int64, device=queue.device)
        """Known tokens of the rows of `_unsure`, of all if the proposer needs them."""
        self._unsure: _Int64Array = np.empty(0, dtype=np.int64)
        """Rows that had drafts in the last plan: the router may not know where they are."""

    @property
    def needs_slots(self) -> bool:
        """Whether the slots of a plan's decodes must be in their table before `begin`."""
        return self._proposer.needs_slots

    def begin(self, plan: StepPlan, decodes: DecodeColumns) -> Begun | None:
        """Put drafts behind the known tokens of a plan's decodes, and say where these begin.

        Before anything else of the plan is in the tables. None: no row has drafts, and all are
        where the plan says.
        """
        self._proposer.begin(plan, decodes, self._token_ids, self._lengths)
        unsure, self._unsure = self._unsure, self._unsure[:0]
        some = decodes.num_drafts.nonzero()[0]
        if not len(some) and (not len(unsure) or not np.isin(decodes.rows, unsure).any()):
            return None
        rows, starts = decodes.rows.astype(np.int64), decodes.start_positions.astype(np.int64)
        num_rows = len(rows) + len(plan.rows)
        too_far = self._correct(rows, starts, unsure, num_rows) if len(unsure) else None
        num_drafts, drafted = decodes.num_tokens.astype(np.int64) - 1, None
        if len(some):
            self._unsure = rows[some]
            drafted = self._propose(some, rows[some], starts[some], num_drafts[some], too_far)
            if self._queue.is_at_once:
                num_drafts[some] = 0 if drafted is None else drafted.counts.numpy()
        return Begun(starts, too_far, num_drafts, drafted)

    def _correct(
        self, rows: _Int64Array, starts: _Int64Array, unsure: _Int64Array, num_rows: int
    ) -> Tensor | None:
        """Put decodes to where they are, in `starts`, if steps are over when they are launched.

        Elsewhere by how much `starts`, the furthest that they can be at, are too far: int64
        [num_rows] on the device; None: by nothing.
        """
        some = np.flatnonzero(np.isin(rows, unsure))
        if not len(some):
            return None
        if self._queue.is_at_once:
            starts[some] = np.minimum(starts[some], self._lengths.numpy()[rows[some]] - 1)
            return None
        places, row_ids, furthest = self._queue.upload([some, rows[some], starts[some]])
        off = (furthest + 1 - self._lengths.index_select(0, row_ids)).clamp(min=0)
        too_far = torch.zeros(num_rows, dtype=torch.int64, device=self._queue.device)
        return too_far.index_copy_(0, places, off)

    def _propose(
        self,
        decodes: _Int64Array,
        rows: _Int64Array,
        starts: _Int64Array,
        most: _Int64Array,
        too_far: Tensor | None,
    ) -> Drafted | None:
        """Put drafts behind the known tokens of rows; None: there are none, which is known.

        Args:
            decodes: [D], which decodes of the plan have drafts.
            rows: [D], of the tables.
            starts: [D], positions that are computed, or more: see `too_far`.
            most: [D], drafts that each may have.
            too_far: see `Begun`.
        """
        index, row_ids, lengths, counts = self._queue.upload([decodes, rows, starts + 1, most])
        own_too_far = None
        if too_far is not None:
            own_too_far = too_far.index_select(0, index)
            lengths = lengths - own_too_far
        known = Rows(rows, row_ids, lengths, starts + 1, own_too_far, most, self._slots)
        guesses, found, sources = self._proposer.propose(self._token_ids, known)
        if self._queue.is_at_once and not found.any():
            self._lengths.index_copy_(0, row_ids, lengths + 1)
            return None
        counts = torch.minimum(counts, found)
        steps = torch.arange(guesses.shape[1], device=counts.device)
        places = (row_ids * self._token_ids.shape[1] + lengths)[:, None] + steps
        spare = self._flat_tokens.shape[0] - 1
        places = torch.where(steps < counts[:, None], places, spare)
        self._flat_tokens.index_copy_(0, places.view(-1), guesses.view(-1).int())
        return Drafted(row_ids, lengths, counts, places, decodes, sources)

    def note_draws(self, places: Tensor, positions: Tensor) -> None:
        """Note how long rows become that draw at these places and positions, int64 [L] both."""
        if self._proposer.needs_lengths:
            rows = places // self._token_ids.shape[1]
            self._lengths.index_copy_(0, rows, positions + 1)

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
        self._proposer.learn(drafted, accepted)
        return accepted
