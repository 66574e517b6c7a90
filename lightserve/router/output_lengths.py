"""The past: how long outputs have been lately, and samples of how long they will be.

Past-Future, section 3.2: the lengths of the last w finished requests are the distribution P(l);
a running request that has generated g tokens will end at a length drawn from P(l | l > g).

Beyond the paper: histories per prediction key, shrunk towards the pooled one where a key has
few lengths; a weak prior (log-spaced pseudo-lengths) at a cold start instead of a preset
maximum; and uniform numbers that come from outside, so that a caller can use common ones.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
LengthArray = npt.NDArray[np.int32]

DEFAULT_WINDOW = 1000
PRIOR_MOST = 1024
"""Longest output that is assumed on average where clients set no larger limit."""
NUM_PRIOR_LENGTHS = 20
"""Pseudo-lengths that stand beside the finished ones until the window is full."""
SHRINKAGE = 50.0
"""A key with this many lengths of its own is drawn from half of the time."""
MAX_KEYS = 1024
AVERAGE_WEIGHT = 0.01
MAX_LAG = 32
"""Pooled lengths that a key's mixture may lag behind: making one takes a sort."""
OWN_LAG = 1 / 128
"""The key's own, as a share of them."""
_EVEN_RANKS = (np.arange(32) + 0.5) / 32
_TABLE_SIZE = 1024
_ROW_OFFSET = 1 << 40
"""More than any length."""


class Keys(NamedTuple):
    """Prediction keys of several requests."""

    known: Sequence[Hashable]
    """Each once, perhaps some of nobody."""
    numbers: IntArray
    """Which of them is whose, int64 [n]."""


class _Window:
    """The last `size` lengths, and sorted."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._recent: deque[int] = deque()
        self.num_added = 0
        self.sorted: IntArray = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, length: int) -> None:
        if len(self._recent) == self._size:
            oldest = self._recent.popleft()
            self.sorted = np.delete(self.sorted, np.searchsorted(self.sorted, oldest))
        self._recent.append(length)
        self.num_added += 1
        self.sorted = np.insert(self.sorted, np.searchsorted(self.sorted, length), length)


@dataclass(slots=True)
class _Row:
    """Where a key's distribution is, and how much history was in it when it was made."""

    index: int
    num_own: int = -1
    num_pooled: int = 0
    is_fresh_at: int = -1
    """How many lengths were recorded when it was last found fresh enough."""


class OutputLengths:
    """The output-length history. `record` what finished; `sample` what will be."""

    def __init__(self, *, max_output_tokens: int, window: int = DEFAULT_WINDOW) -> None:
        self._window = window
        self._pooled = _Window(window)
        self._by_key: OrderedDict[Hashable, _Window] = OrderedDict()
        self._rows: dict[Hashable, _Row] = {}
        """By key, None for those without a history."""
        self._lengths: LengthArray = np.zeros((4, _TABLE_SIZE), dtype=np.int32)
        """Of each row equally likely ones, ascending."""
        self._raised: IntArray = _empty_rows(0, 4)
        """The same, those of a row raised by its index times `_ROW_OFFSET`: one search in all."""
        self._free_rows = list(range(4))
        prior = np.geomspace(1, max(1, max_output_tokens), NUM_PRIOR_LENGTHS)
        self.prior: IntArray = np.rint(prior).astype(np.int64)
        """Lengths, equally likely, that are believed in before any has been seen."""
        self._with_prior: IntArray = self.prior
        """Those and finished ones, ascending."""
        self._with_prior_at = 0
        """How many had been recorded then."""
        self.average: float = float(self.prior.mean())
        """Exponential average of the finished lengths."""

    def __len__(self) -> int:
        """Return how many finished lengths the pooled history holds."""
        return len(self._pooled)

    @property
    def num_recorded(self) -> int:
        """How many lengths were ever recorded: as long as it is the same, samples are."""
        return self._pooled.num_added

    def record(self, length: int, key: Hashable = None) -> None:
        """Learn the output length (>= 1) of a finished request."""
        self._pooled.add(length)
        self.average += AVERAGE_WEIGHT * (length - self.average)
        if key is None:
            return
        if key not in self._by_key:
            self._by_key[key] = _Window(self._window)
            if len(self._by_key) > MAX_KEYS:
                oldest, _ = self._by_key.popitem(last=False)
                if (row := self._rows.pop(oldest, None)) is not None:
                    self._free_rows.append(row.index)
        self._by_key.move_to_end(key)
        self._by_key[key].add(length)

    def expected_rest(
        self, generated: IntArray, max_tokens: IntArray, keys: Sequence[Hashable]
    ) -> FloatArray:
        """Return how many more tokens are to come on average, float64 [n]; see `sample`."""
        uniforms = np.tile(_EVEN_RANKS, (len(generated), 1))
        totals = self.sample(generated, max_tokens, uniforms, keys)
        rest: FloatArray = totals.mean(axis=1) - generated
        return rest

    def sample(
        self,
        generated: IntArray,
        max_tokens: IntArray,
        uniforms: FloatArray,
        keys: Sequence[Hashable] | Keys | None = None,
    ) -> LengthArray:
        """Return output lengths drawn from P(l | l > generated), int32 [n, num_futures].

        Args:
            generated: tokens each request has, int64 [n].
            max_tokens: its limit, > generated, int64 [n]; samples are cut there.
            uniforms: in [0, 1), float64 or float32 [n, num_futures]; larger means longer.
            keys: prediction key of each request; None or unknown keys draw from the pool.
        """
        if keys is None or not self._by_key:
            table = self._pooled_table()
            first = np.searchsorted(table, generated, side="right")
            num_left = len(table) - first
            lengths = table.astype(np.int32)
        else:
            rows = self._rows_of(keys)
            raised = generated + rows * _ROW_OFFSET
            first = np.searchsorted(self._raised.ravel(), raised, side="right")
            num_left = (rows + 1) * _TABLE_SIZE - first
            lengths = self._lengths.ravel()
        chosen = _choose(lengths, first, num_left, uniforms)
        # Longer than anything seen: log-uniform up to the limit.
        beyond = num_left == 0
        if beyond.any():
            low = generated[beyond, None] + 1.0
            ratio = np.maximum(max_tokens[beyond, None] / low, 1.0)
            chosen[beyond] = (low * ratio ** uniforms[beyond]).astype(np.int32)
        np.maximum(chosen, (generated + 1).astype(np.int32)[:, None], out=chosen)
        np.minimum(chosen, max_tokens.astype(np.int32)[:, None], out=chosen)
        return chosen

    def _rows_of(self, keys: Sequence[Hashable] | Keys) -> IntArray:
        """Return the row of each request, int64 [n]; distributions of nobody stay as they are."""
        if not isinstance(keys, Keys):
            row_of = {key: self._row_of(key) for key in dict.fromkeys(keys)}
            return np.array([row_of[key] for key in keys], dtype=np.int64)
        rows = np.zeros(len(keys.known), dtype=np.int64)
        for number in np.flatnonzero(np.bincount(keys.numbers)).tolist():
            rows[number] = self._row_of(keys.known[number])
        of_all: IntArray = rows[keys.numbers]
        return of_all

    def _row_of(self, key: Hashable) -> int:
        """Return the row of `_quantiles` that holds a key's distribution about as it is now."""
        row = self._rows.get(key)
        if row is not None and row.is_fresh_at == self._pooled.num_added:
            return row.index
        own = self._by_key.get(key)
        if own is None:
            key = None
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = _Row(self._new_row())
        row.is_fresh_at = self._pooled.num_added
        num_own, max_own_lag = (0, 0.0) if own is None else (own.num_added, OWN_LAG * len(own))
        lag = self._pooled.num_added - row.num_pooled
        if num_own - row.num_own > max_own_lag or lag > min(MAX_LAG, row.num_pooled // 4):
            row.num_own, row.num_pooled = num_own, self._pooled.num_added
            share = 0.0 if own is None else len(own) / (len(own) + SHRINKAGE)
            lengths = np.empty(0, dtype=np.int64) if own is None else own.sorted
            mixture = _mix(lengths, self._pooled_table(), share)
            self._lengths[row.index] = mixture
            self._raised[row.index] = mixture + row.index * _ROW_OFFSET
        return row.index

    def _new_row(self) -> int:
        if not self._free_rows:
            size = len(self._lengths)
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
            self._raised = np.concatenate([self._raised, _empty_rows(size, size)])
            self._free_rows.extend(range(size, 2 * size))
        return self._free_rows.pop()

    def _pooled_table(self) -> IntArray:
        if len(self._pooled) >= self._window:
            return self._pooled.sorted
        if self._with_prior_at != self._pooled.num_added:
            self._with_prior_at = self._pooled.num_added
            self._with_prior = np.sort(np.concatenate([self._pooled.sorted, self.prior]))
        return self._with_prior


def expected_output(limit: float) -> float:
    """Return what is assumed of an output of at most `limit` >= 1 tokens while none was seen.

    The mean of a length that is log-uniform in 1 … PRIOR_MOST, or the limit if that is more, and
    cut at the limit.
    """
    whole = math.log(max(PRIOR_MOST, limit))
    return (limit - 1) / whole + limit * (1 - math.log(limit) / whole)


def _empty_rows(first: int, count: int) -> IntArray:
    """Return rows of `_raised` that hold nothing yet, int64 [count, _TABLE_SIZE]."""
    offsets = np.arange(first, first + count, dtype=np.int64) * _ROW_OFFSET
    return np.repeat(offsets[:, None], _TABLE_SIZE, axis=1)


def _choose(
    lengths: LengthArray, first: IntArray, num_left: IntArray, uniforms: FloatArray
) -> LengthArray:
    """Return one of the `num_left` lengths from `first` on by each uniform number, int32."""
    index = (num_left.astype(uniforms.dtype)[:, None] * uniforms).astype(np.int32)
    index += first.astype(np.int32)[:, None]
    return lengths.take(index, mode="clip")


def _mix(own: IntArray, pooled: IntArray, own_share: float) -> IntArray:
    """Return `_TABLE_SIZE` equally likely lengths of own_share * own + (1 - own_share) * pooled."""
    values = np.concatenate([own, pooled])
    weights = np.concatenate(
        [
            np.full(len(own), own_share / max(1, len(own))),
            np.full(len(pooled), (1 - own_share) / len(pooled)),
        ]
    )
    order = np.argsort(values, kind="stable")
    cumulative = np.cumsum(weights[order])
    quantiles = (np.arange(_TABLE_SIZE) + 0.5) / _TABLE_SIZE
    index = np.minimum(np.searchsorted(cumulative, quantiles), len(values) - 1)
    result: IntArray = values[order][index]
    return result
