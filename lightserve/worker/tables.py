"""The state of each row that a worker keeps, its tokens and their slots, and the step's inputs.

    token_ids[row, position]      known tokens; sampling writes the next one
    req_to_slot[row, position]    where the KV of that position is

Both tables are on the device. What a plan changes and what its step needs is worked out on the
host with vectorised indexing, no loop over tokens, and goes there in one upload. A *place* is
row * width + position: an index into a flat table.

The tables have a row more than there are sequences: the padding row, of position 0 in the KV
pool's scratch slot, which rows stand for that a CUDA graph has too many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch
from lightserve.messages.common import MAX_INT32, Int32Array, unpack_int32
from lightserve.messages.router_worker import (
    AddSequence,
    DecodeColumns,
    OutputKind,
    PlanRow,
    StepPlan,
    plan_columns,
    unpack_decodes,
)
from lightserve.types import PLAIN_SAMPLING, SAMPLING_FIELDS, Changes, RowId, SamplingParams
from lightserve.worker.device import Array, DeviceQueue
from lightserve.worker.drafts import Drafted, Drafts, NGrams, Proposer
from lightserve.worker.sampling.interface import Adjustments, SampledRows, sequence_state

_Int64Array = npt.NDArray[np.int64]
_NO_PLACES: _Int64Array = np.empty(0, dtype=np.int64)
_NO_TOKENS: Int32Array = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class PromptSpan:
    """Consecutive tokens of a prompt whose successors' log-probabilities are wanted."""

    row: RowId
    next_ids: Tensor
    """int64 [n], the prompt's token after each of them, on the device; n may be 0."""
    num_top: int
    """Most probable tokens that are wanted at each place."""


class StepTensors(NamedTuple):
    """The numbers that a step needs on the device, however its pass runs."""

    logit_rows: Tensor
    """int64 [L + sum of n]: tokens whose logits are wanted: those behind which is drawn, then those
    of `prompt_spans`, one span after the other."""
    sampled_places: Tensor
    """int64 [L], where each new token will be stored."""
    sampled_positions: Tensor
    """int64 [L], position that each new token will have."""


@dataclass(frozen=True, eq=False)
class StepInputs:
    """The inputs of one forward pass and its sampling."""

    tensors: StepTensors
    prompt_spans: list[PromptSpan]
    """Spans of the rows that want log-probabilities of their prompt, in the plan's order."""
    sampled_rows: list[RowId]
    """Row of each of the first L of `logit_rows`."""
    rows: _Int64Array
    """[R], the plan's rows, …"""
    q_lens: _Int64Array
    """… the new tokens of each, …"""
    context_lens: _Int64Array
    """… and its length with them, or more: see `too_far`."""
    too_far: Tensor | None = None
    """int64 [R] on the device, by how much `context_lens` are more than that; None: by nothing."""
    draws: Draws | None = None
    """The draws of each row that samples; None: one each."""
    num_verified: int = 0
    """Tokens of drafts, proposed or not."""

    @property
    def lengths(self) -> dict[RowId, int]:
        """Return how many tokens of each row are known before the one that it samples."""
        rows = zip(self.rows.tolist(), self.context_lens.tolist(), strict=True)
        return {RowId(row): length for row, length in rows}

    @property
    def is_decode(self) -> bool:
        """Whether every row has one new token."""
        return bool((self.q_lens == 1).all())

    @property
    def is_plain_decode(self) -> bool:
        """Whether that is so, and every row samples the next token and wants nothing else."""
        num_rows = len(self.rows)
        return self.is_decode and num_rows == len(self.sampled_rows) == len(self.tensors.logit_rows)


class Draws(NamedTuple):
    """Where the draws of rows are in a step some of whose rows have drafts."""

    drafted: Drafted
    firsts: _Int64Array
    """[rows that sample], the first draw of each; the others follow it."""
    of_drafted: Tensor
    """int64 [D], the same of those with drafts, on the device."""


class SequenceTable:
    """The tables of one rank, int32 [max_num_seqs + 1, max_model_len + 1]."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        queue: DeviceQueue,
        *,
        scratch_slot: int = 0,
        proposer: Proposer | None = None,
    ) -> None:
        """Make the tables.

        `scratch_slot` is the padding row's; `proposer` guesses the drafts of plans that want any.
        """
        # One more position than the model has: the last sampled token is stored, never computed.
        self._width = max_model_len + 1
        self.max_num_seqs = max_num_seqs
        shape = (max_num_seqs + 1, self._width)
        self._queue = queue
        self._token_ids = torch.zeros(shape, dtype=torch.int32, device=queue.device)
        self._req_to_slot = torch.zeros(shape, dtype=torch.int32, device=queue.device)
        self._req_to_slot[max_num_seqs, :1].fill_(scratch_slot)
        self._flat_tokens, self._flat_slots = self._token_ids.view(-1), self._req_to_slot.view(-1)
        self._drafts = Drafts(self._token_ids, queue, proposer or NGrams())
        self._indices = torch.arange(max_num_seqs, device=queue.device)
        """The logits that a step of decodes alone wants."""
        self._num_prompt = np.zeros(max_num_seqs + 1, dtype=np.int64)
        self._num_top = [0] * max_num_seqs
        """Most probable tokens that are wanted at each place of the prompt."""

    @property
    def token_ids(self) -> Tensor:
        """Known tokens, int32 [max_num_seqs + 1, max_model_len + 1]; the last row is padding."""
        return self._token_ids

    @property
    def req_to_slot(self) -> Tensor:
        """The slot of each position's KV, of the same shape."""
        return self._req_to_slot

    def begin(self, plan: StepPlan) -> StepInputs:
        """Take in a plan's new sequences and slots and return the inputs of its step."""
        decodes = unpack_decodes(plan.decodes)
        is_plain = not (plan.rows or plan.sequences or plan.slot_ranges or len(decodes.num_drafts))
        if is_plain and self._drafts.are_at(decodes.rows):
            return self._begin_decodes(decodes)
        columns = plan_columns(plan)
        rows, starts, counts = (
            part.astype(np.int64)
            for part in (columns.rows, columns.start_positions, columns.num_tokens)
        )
        news, wants = self._take_in(plan, decodes), columns.samples
        starts, too_far = self._drafts.true_starts(rows, starts, len(decodes.rows))
        num_drafts, drafted = np.zeros_like(counts), None
        if len(some := decodes.num_drafts.nonzero()[0]):
            self._write(self._queue.upload(news))
            news, most = [], counts[some] - 1
            drafted = self._drafts.propose(some, rows[some], starts[some], most, too_far)
            num_drafts[some] = drafted.counts.numpy() if self._queue.is_at_once else most
            counts[some] = 1 + num_drafts[some]
        ends, offsets = starts + counts, np.cumsum(counts)
        firsts = (offsets - counts)[len(rows) - len(plan.rows) :]
        spans = self._prompt_spans(list(zip(plan.rows, firsts.tolist(), strict=True)))
        before, num_draws = num_drafts[wants], 1 + num_drafts[wants]
        draws = _ranges(rows[wants], ends[wants] - before, num_draws)
        logit_rows = _ranges(rows[wants], offsets[wants] - 1 - before, num_draws).positions
        first_draws = np.cumsum(num_draws) - num_draws
        arrays: list[Array] = [
            np.concatenate([logit_rows, spans.indices]),
            draws.rows * self._width + draws.positions,
            draws.positions,
            spans.next_places,
            np.repeat(np.flatnonzero(wants), num_draws),
            first_draws[some],
            *news,
        ]
        uploaded = self._queue.upload(arrays)
        tensors, (next_places, owners, of_drafted, *uploaded_news) = uploaded[:3], uploaded[3:]
        self._write(uploaded_news)
        if too_far is not None:
            by_draw = too_far.index_select(0, owners)
            tensors[1:] = [tensor - by_draw for tensor in tensors[1:]]
        return StepInputs(
            StepTensors._make(tensors),
            self._with_next_ids(spans, next_places),
            cast("list[RowId]", draws.rows.tolist()),
            rows,
            counts,
            ends,
            too_far,
            None if drafted is None else Draws(drafted, first_draws, of_drafted),
            int(num_drafts.sum()),
        )

    def _write(self, news: Sequence[Tensor]) -> None:
        """Put what `_take_in` returns into the tables."""
        if news:
            token_places, tokens, slot_places, slots = news
            self._flat_tokens.index_copy_(0, token_places, tokens)
            self._flat_slots.index_copy_(0, slot_places, slots)

    def _begin_decodes(self, decodes: DecodeColumns) -> StepInputs:
        """Take in a plan of plain decodes; most of its inputs are known beforehand."""
        rows, starts = decodes.rows.astype(np.int64), decodes.start_positions.astype(np.int64)
        places, ends = rows * self._width + starts, starts + 1
        # A copy: what was read from a message may not be written, and torch warns of that.
        arrays = [places, places + 1, ends, decodes.slots.copy()]
        token_places, next_places, positions, slots = self._queue.upload(arrays)
        self._flat_slots.index_copy_(0, token_places, slots)
        tensors = StepTensors(self._indices[: len(rows)], next_places, positions)
        sampled_rows = cast("list[RowId]", rows.tolist())
        return StepInputs(tensors, [], sampled_rows, rows, np.ones_like(rows), ends)

    def unrecorded(self, inputs: StepInputs) -> tuple[Tensor, AttentionBatch]:
        """Return a step's new tokens, int64 [T], and attention's inputs, for a pass launched
        kernel by kernel."""
        rows, counts, ends = inputs.rows, inputs.q_lens, inputs.context_lens
        token_rows, positions = _ranges(rows, ends - counts, counts)
        row_ids, own_positions, places, offsets, context_lens = self._queue.upload(
            [
                rows,
                positions,
                token_rows * self._width + positions,
                np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
                ends.astype(np.int32),
            ]
        )
        if inputs.too_far is not None:
            context_lens = context_lens - inputs.too_far.int()
            by_token = inputs.too_far.repeat_interleave(
                self._queue.upload([counts])[0], output_size=int(counts.sum())
            )
            own_positions, places = own_positions - by_token, places - by_token
        batch = AttentionBatch(
            positions=own_positions,
            slot_mapping=self._flat_slots.index_select(0, places).long(),
            req_to_slot=self._req_to_slot,
            rows=row_ids,
            cu_seqlens_q=offsets,
            context_lens=context_lens,
            host_rows=rows.tolist(),
            host_q_lens=counts.tolist(),
            host_context_lens=ends.tolist(),
            host_prompt_lens=(self._num_prompt[rows] - ends + counts).clip(0, counts).tolist(),
        )
        return self._flat_tokens.index_select(0, places).long(), batch

    def tokens_of(self, row: RowId, start: int, stop: int) -> list[int]:
        """Return a row's tokens at positions start … stop-1; waits for the steps before."""
        token_ids: list[int] = self._token_ids[row, start:stop].tolist()
        return token_ids

    def append(self, inputs: StepInputs, token_ids: Tensor) -> Tensor | None:
        """Store the draws, int64 [L], at the positions that the next plan will name.

        Returns how many drafts of each row with drafts are accepted, int64 [D]; None: no row has.
        """
        draws, accepted = inputs.draws, None
        if draws is not None:
            accepted = self._drafts.accept(draws.drafted, draws.of_drafted, token_ids)
        self._flat_tokens.index_copy_(0, inputs.tensors.sampled_places, token_ids.int())
        return accepted

    def _take_in(self, plan: StepPlan, decodes: DecodeColumns) -> list[Array]:
        """Note new tokens and slots; return their places and contents, or nothing."""
        if not plan.sequences and not plan.slot_ranges and not len(decodes.rows):
            return []
        tokens = [_tokens_of(sequence) for sequence in plan.sequences]
        for sequence in plan.sequences:
            self._num_prompt[sequence.row] = sequence.num_prompt_tokens
            self._num_top[sequence.row] = sequence.sampling.num_prompt_logprobs or 0
        slots = [part.slots for part in plan.slot_ranges]
        return [
            self._places(
                [sequence.row for sequence in plan.sequences],
                [0] * len(tokens),
                [len(part) for part in tokens],
            ),
            np.concatenate([_NO_TOKENS, *tokens]),
            np.concatenate(
                [
                    self._places(decodes.rows, decodes.start_positions, decodes.num_tokens),
                    self._places(
                        [part.row for part in plan.slot_ranges],
                        [part.start_position for part in plan.slot_ranges],
                        [len(part) // _NO_TOKENS.itemsize for part in slots],
                    ),
                ]
            ),
            # A copy: what was read from a message may not be written, and torch warns of that.
            unpack_int32(b"".join([plan.decodes.slots, *slots])).copy(),
        ]

    def _places(
        self,
        rows: Sequence[int] | Int32Array,
        starts: Sequence[int] | Int32Array,
        counts: Sequence[int] | Int32Array,
    ) -> _Int64Array:
        """Return the places of ranges of positions, int64 [sum of counts]."""
        index = _ranges(*(np.array(part, dtype=np.int64) for part in (rows, starts, counts)))
        return index.rows * self._width + index.positions

    def _prompt_spans(self, rows: Sequence[tuple[PlanRow, int]]) -> _Spans:
        """Return the spans of a plan's rows, given with the places of their first tokens."""
        found = _Spans([], _NO_PLACES, _NO_PLACES)
        for row, offset in rows:
            if not row.output & OutputKind.PROMPT_LOGPROBS:
                continue
            start = row.start_position
            end = min(start + row.num_tokens, int(self._num_prompt[row.row]) - 1)
            num_tokens = max(0, end - start)
            steps = np.arange(num_tokens, dtype=np.int64)
            found = _Spans(
                [*found.rows, (row.row, num_tokens)],
                np.concatenate([found.indices, offset + steps]),
                np.concatenate([found.next_places, row.row * self._width + start + 1 + steps]),
            )
        return found

    def _with_next_ids(self, spans: _Spans, next_places: Tensor) -> list[PromptSpan]:
        if not spans.rows:
            return []
        next_ids = self._flat_tokens.index_select(0, next_places).long()
        parts = next_ids.split_with_sizes([num_tokens for _, num_tokens in spans.rows])
        return [
            PromptSpan(row, own, self._num_top[row])
            for (row, _), own in zip(spans.rows, parts, strict=True)
        ]


class _Spans(NamedTuple):
    """The parts that `PromptSpan`s are made of."""

    rows: list[tuple[RowId, int]]
    """And their numbers of tokens."""
    indices: _Int64Array
    """Indices of all their tokens among the step's."""
    next_places: _Int64Array
    """Places of the tokens after them."""


class _Index(NamedTuple):
    rows: _Int64Array
    positions: _Int64Array


def _ranges(rows: _Int64Array, starts: _Int64Array, counts: _Int64Array) -> _Index:
    """Return row and position of every token of ranges start … start+count-1, int64 [T] both."""
    if counts.size == counts.sum() and counts.all():  # one token each: decodes
        return _Index(rows, starts)
    offsets = np.repeat(np.cumsum(counts) - counts, counts)
    positions = np.arange(counts.sum()) - offsets + np.repeat(starts, counts)
    return _Index(np.repeat(rows, counts), positions)


def _tokens_of(sequence: AddSequence) -> Int32Array:
    return np.concatenate([unpack_int32(part.token_ids) for part in sequence.segments])


# How each row of the token table is sampled, on the host; and the parameters of a step's rows.
#
# Options become numbers once, when a sequence comes. A step's rows are picked from them with
# vectorised indexing and go to the device in one upload; in steady decoding, when the same rows are
# asked for again and again, nothing is done at all.

MIN_TEMPERATURE = 1e-6
"""Below this every float32 gap between logits decides; much below it they divide to NaN."""

Upload = Callable[[Sequence[npt.NDArray[Any]]], list[Tensor]]
"""Arrays to tensors on the device, as `DeviceQueue.upload`."""

_NUMBERS = tuple(name for name, spec in SAMPLING_FIELDS.items() if spec.column)
_COLUMNS = np.dtype(
    [
        ("state", np.uint64),
        ("temperature", np.float32),
        ("num_logprobs", np.int32),
        ("is_adjusted", np.bool_),
        ("num_prompt_tokens", np.int32),
        *((name, SAMPLING_FIELDS[name].column) for name in _NUMBERS),
    ]
)
_ADJUSTING = tuple(n for n, spec in SAMPLING_FIELDS.items() if Changes.LOGITS in spec.changes)
_NO_WORDS: npt.NDArray[np.uint32] = np.empty(0, dtype=np.uint32)


class _Lists(NamedTuple):
    """Options of a row that are not numbers."""

    eos_token_ids: list[int]
    bias_token_ids: npt.NDArray[np.int64]
    bias_values: npt.NDArray[np.float32]
    allowed_token_ids: npt.NDArray[np.int64]
    """Empty: all are allowed."""
    allowed_bits: npt.NDArray[np.uint32]
    word_starts: npt.NDArray[np.int32]
    """See `Adjustments`; as wide as the row's longest bad word needs."""
    word_ends: npt.NDArray[np.int64]


def is_adjusted(params: SamplingParams) -> bool:
    """Return whether a row's options change its logits at all."""
    return any(getattr(params, n) != getattr(PLAIN_SAMPLING, n) for n in _ADJUSTING)


class SamplingTable:
    """The rows' parameters; the model runner alone writes them."""

    def __init__(self, max_num_seqs: int) -> None:
        self._columns = np.zeros(max_num_seqs, dtype=_COLUMNS)
        self._lists: dict[RowId, _Lists] = {}
        """Lists of rows whose logits are changed, by options or a constraint."""
        self._asked: list[RowId] = []
        self._found: SampledRows | None = None

    def update(self, sequences: Sequence[AddSequence]) -> list[RowId]:
        """Take in a plan's new sequences and return the rows that have penalties."""
        if not sequences:
            return []
        for sequence in sequences:
            params = sequence.sampling
            changes = is_adjusted(params) or sequence.constraint is not None
            self._columns[sequence.row] = _as_numbers(params, sequence.num_prompt_tokens, changes)
            self._lists.pop(sequence.row, None)
            if changes:
                self._lists[sequence.row] = _as_lists(params, sequence.eos_token_ids)
            self._found = None
        rows = [sequence.row for sequence in sequences]
        return [rows[index] for index in _has_penalties(self._columns[rows]).nonzero()[0]]

    def rows(self, rows: Sequence[RowId], upload: Upload) -> SampledRows:
        """Return the parameters of the rows that a step samples, L >= 1, on the device."""
        if self._found is None or self._asked != rows:
            self._asked, self._found = list(rows), self._pick(rows, upload)
        return self._found

    def _pick(self, rows: Sequence[RowId], upload: Upload) -> SampledRows:
        columns = self._columns[np.array(rows)]
        random, cuts = columns["temperature"] > 0, (columns["top_k"] > 0) | (columns["top_p"] < 1)
        is_adjusted_row = columns["is_adjusted"]
        indices = is_adjusted_row.nonzero()[0]
        source = np.where(is_adjusted_row, np.cumsum(is_adjusted_row) - 1, -1)
        logprob_indices = (columns["num_logprobs"] >= 0).nonzero()[0]
        arrays = [np.array(rows, dtype=np.int64), columns["state"].view(np.int64)]
        arrays += [columns[name] for name in ("temperature", "min_p", "top_p", "top_k")]
        arrays += [source.astype(np.int32), logprob_indices]
        num_common = len(arrays)
        if len(indices):
            lists = [self._lists[rows[index]] for index in indices]
            before = _draws_before(arrays[0])[indices]
            arrays += _adjustment_arrays(indices, before, columns[indices], lists)
        tensors = upload([array.copy() for array in arrays])
        adjustments = None
        if len(indices):
            adjustments = Adjustments(
                *tensors[num_common:],
                has_penalties=bool(_has_penalties(columns[indices]).any()),
                allowed_token_ids=[p.allowed_token_ids for p in lists if len(p.allowed_bits)],
            )
        return SampledRows(
            *tensors[:num_common],
            adjustments=adjustments,
            drawn=(random & ~cuts).nonzero()[0].tolist(),
            truncated=(random & cuts).nonzero()[0].tolist(),
            has_min_p=bool((random & (columns["min_p"] > 0)).any()),
            logprob_indices=logprob_indices.tolist(),
            num_logprobs=columns["num_logprobs"][logprob_indices].tolist(),
        )


def _as_numbers(params: SamplingParams, num_prompt_tokens: int, changes: bool) -> tuple[Any, ...]:
    """Return a row of `_COLUMNS`."""
    temperature = max(params.temperature, MIN_TEMPERATURE) if params.temperature else 0.0
    return (
        sequence_state(params.seed, params.choice),
        temperature,
        -1 if params.num_logprobs is None else params.num_logprobs,
        changes,
        num_prompt_tokens,
        *(min(getattr(params, name), MAX_INT32) for name in _NUMBERS),
    )


def _as_lists(params: SamplingParams, eos_token_ids: Sequence[int]) -> _Lists:
    ids, values = zip(*params.logit_bias, strict=True) if params.logit_bias else ((), ())
    return _Lists(
        list(eos_token_ids) if params.min_tokens else [],
        np.array(ids, dtype=np.int64),
        np.array(values, dtype=np.float32),
        np.array(params.allowed_token_ids, dtype=np.int64),
        _pack(params.allowed_token_ids),
        *_words(params.bad_words),
    )


def _words(
    bad_words: Sequence[tuple[int, ...]],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Return `word_starts` and `word_ends` of a row."""
    width = max(map(len, bad_words), default=1) - 1
    starts = np.full((len(bad_words), width), -1, dtype=np.int32)
    for number, word in enumerate(bad_words):
        starts[number, width + 1 - len(word) :] = word[:-1]
    return starts, np.array([word[-1] for word in bad_words], dtype=np.int64)


def _pack(token_ids: Sequence[int]) -> npt.NDArray[np.uint32]:
    """Return bits with the tokens' bits set, bit t % 32 of word t // 32."""
    if not token_ids:
        return _NO_WORDS
    is_set = np.zeros(-(-(max(token_ids) + 1) // 32) * 32, dtype=np.bool_)
    is_set[list(token_ids)] = True
    return np.packbits(is_set, bitorder="little").view(np.uint32)


def _has_penalties(columns: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    is_neutral = (columns["repetition_penalty"] == 1) & (columns["frequency_penalty"] == 0)
    has_any: npt.NDArray[np.bool_] = ~(is_neutral & (columns["presence_penalty"] == 0))
    return has_any


def _draws_before(rows: _Int64Array) -> Int32Array:
    """Return how many draws of its row each draw of a step follows, int32 [L]."""
    places = np.arange(len(rows), dtype=np.int32)
    firsts = np.where(np.diff(rows, prepend=-1) != 0, places, 0)
    return places - np.maximum.accumulate(firsts)


def _adjustment_arrays(
    indices: npt.NDArray[np.int64],
    before: Int32Array,
    columns: npt.NDArray[np.void],
    lists: Sequence[_Lists],
) -> list[npt.NDArray[Any]]:
    """Return the arrays of `Adjustments`, in its order."""
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty", "min_tokens")
    eos = np.full((len(lists), max(len(part.eos_token_ids) for part in lists)), -1, dtype=np.int32)
    words = max(len(part.allowed_bits) for part in lists)
    typical = (columns["typical_p"] < 1).nonzero()[0]
    limited = [row for row, part in enumerate(lists) if len(part.allowed_bits)]
    allowed_rows = np.full(len(lists), -1, dtype=np.int32)
    allowed_rows[limited] = np.arange(len(limited))
    bits = np.zeros((len(limited), words), dtype=np.uint32)
    for row, part in enumerate(lists):
        eos[row, : len(part.eos_token_ids)] = part.eos_token_ids
        if len(part.allowed_bits):
            bits[allowed_rows[row], : len(part.allowed_bits)] = part.allowed_bits
    return [
        indices,
        columns["num_prompt_tokens"],
        before,
        *(columns[name] for name in names),
        eos,
        np.repeat(np.arange(len(lists)), [len(part.bias_values) for part in lists]),
        np.concatenate([part.bias_token_ids for part in lists]),
        np.concatenate([part.bias_values for part in lists]),
        allowed_rows,
        bits.view(np.int32),
        *_word_arrays(lists),
        typical,
        columns["typical_p"][typical],
    ]


def _word_arrays(lists: Sequence[_Lists]) -> list[npt.NDArray[Any]]:
    """Return `word_rows`, `word_starts` and `word_ends`."""
    rows = np.repeat(np.arange(len(lists)), [len(part.word_ends) for part in lists])
    width = max(part.word_starts.shape[1] for part in lists)
    starts = np.full((len(rows), width), -1, dtype=np.int32)
    begin = 0
    for part in lists:
        num_words, own_width = part.word_starts.shape
        starts[begin : begin + num_words, width - own_width :] = part.word_starts
        begin += num_words
    return [rows, starts, np.concatenate([part.word_ends for part in lists])]
