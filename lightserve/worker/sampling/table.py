"""How each row of the token table is sampled, on the host; and the parameters of a step's rows.

Options become numbers once, when a sequence comes. A step's rows are picked from them with
vectorised indexing and go to the device in one upload; in steady decoding, when the same rows are
asked for again and again, nothing is done at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightserve.messages.common import MAX_INT32, Int32Array
from lightserve.messages.router_worker import AddSequence
from lightserve.types import PLAIN_SAMPLING, SAMPLING_FIELDS, Changes, RowId, SamplingParams
from lightserve.worker.sampling.interface import Adjustments, SampledRows, sequence_state

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


def _draws_before(rows: npt.NDArray[np.int64]) -> Int32Array:
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
