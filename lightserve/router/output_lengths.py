"""The past: how long outputs have been lately, and samples of how long they will be.

Past-Future, section 3.2: the lengths of the last w finished requests are the distribution P(l);
a running request that has generated g tokens will end at a length drawn from P(l | l > g).

Beyond the paper: histories per prediction key, shrunk towards the pooled one where a key has
few lengths; a weak prior (log-spaced pseudo-lengths) at a cold start instead of a preset
maximum; uniform numbers that come from outside, so that a caller can use common ones; and budgets:
where reasoning ends after b tokens at the latest, a request that has reasoned for r tokens and
answered in a would have had min(r, b) + a.

Samples are drawn from tables of the history, which are renewed when one in sixteen of its lengths
is new, and when its window is full. In between they stay as they are, whatever is recorded and
whenever they are read.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lightserve.config import ServeConfig
from lightserve.types import RequestClass

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
LengthArray = npt.NDArray[np.int32]
UniformArray = npt.NDArray[np.float32]

PRIOR_MOST = 1024
"""Longest output that is assumed on average where clients set no larger limit."""
NUM_PRIOR_LENGTHS = 20
"""Pseudo-lengths that stand beside the finished ones until the window is full; a shorter history
says nothing about the spread, and a key with as many of its own is drawn from half of the time."""
MAX_KEYS = 1024
AVERAGE_WEIGHT = 0.01
MOST_NEW = 16
"""Tables are renewed when one in so many lengths of the history is not in them yet."""
_TABLE_SIZE = 1024
_ROW_OFFSET = 1 << 40
"""More than any length."""


class WithBudget(NamedTuple):
    """A prediction key of requests whose reasoning has a budget."""

    request_class: RequestClass
    user: str
    budget: int
    """A power of two or three quarters of one, that of the request or the next."""


def prediction_key(
    request_class: RequestClass, user: str = "", budget: int | None = None
) -> tuple[RequestClass, str] | WithBudget:
    """Return what requests have in common whose outputs are taken to be of like length.

    `budget`: most tokens of reasoning, None: as many as the output may have.
    """
    if budget is None:
        return request_class, user
    power = 1 << max(0, budget - 1).bit_length()
    return WithBudget(request_class, user, 3 * power // 4 if budget <= 3 * power // 4 else power)


MAX_REMEMBERED = 100_000
_Lengths = Annotated[
    list[Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]],
    msgspec.Meta(max_length=MAX_REMEMBERED),
]


class RememberedLengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lengths without a user, the oldest first; at most MAX_REMEMBERED."""

    lengths: _Lengths
    """Lengths of all requests."""
    by_class: dict[RequestClass, _Lengths]
    """Lengths of requests that name no user."""


class _Window:
    """The last `size` lengths, and sorted."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.recent: deque[int] = deque()
        self.num_added = 0
        self.sorted: IntArray = np.empty(0, dtype=np.int64)
        """Replaced by each addition, never changed: a reference to it stays as it is."""

    def __len__(self) -> int:
        return len(self.recent)

    def add(self, length: int) -> None:
        if len(self.recent) == self._size:
            oldest = self.recent.popleft()
            self.sorted = np.delete(self.sorted, np.searchsorted(self.sorted, oldest))
        self.recent.append(length)
        self.num_added += 1
        self.sorted = np.insert(self.sorted, np.searchsorted(self.sorted, length), length)


@dataclass(slots=True)
class _OfKey:
    """The lengths of a prediction key."""

    window: _Window
    in_table: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Lengths in the table of version `version`; later tables hold those of the window."""
    version: int = -1

    def known(self, version: int) -> IntArray:
        """Return the lengths that a table of this version, the latest, has."""
        return self.in_table if self.version == version else self.window.sorted


@dataclass(slots=True)
class _Row:
    """Where the table of a key is, and of which version it is."""

    index: int
    version: int = -1


class OutputLengths:
    """The output-length history. `record` what finished; `sample` what will be."""

    def __init__(self, *, max_output_tokens: int, window: int = ServeConfig.window) -> None:
        self._window = window
        self._pooled = _Window(window)
        self._by_key: OrderedDict[Hashable, _OfKey] = OrderedDict()
        self._rows: dict[Hashable, _Row] = {}
        """By key, None for those without a history."""
        self._lengths: LengthArray = np.zeros((4, _TABLE_SIZE), dtype=np.int32)
        """Equally likely lengths of each row, ascending."""
        self._raised: IntArray = _empty_rows(0, 4)
        """Lengths of each row raised by its index times `_ROW_OFFSET`: one search for all rows."""
        self._free_rows = list(range(4))
        self._reasoned: deque[tuple[int, int]] = deque(maxlen=window)
        """Tokens of the reasoning of finished outputs that had some, and of the rest of each."""
        self._reasoned_in_table: IntArray = np.empty((0, 2), dtype=np.int64)
        self._table_of: dict[Hashable, int] = {}
        """By key, those asked for since the tables were renewed: their numbers."""
        prior = np.geomspace(1, max(1, max_output_tokens), NUM_PRIOR_LENGTHS)
        self.prior: IntArray = np.rint(prior).astype(np.int64)
        """Lengths, equally likely, that are believed in before any has been seen."""
        self._table: IntArray = self.prior
        """Lengths from which samples without a key are drawn, ascending."""
        self._num_in_table = 0
        """How many lengths had been recorded when it was made."""
        self.version = 0
        """How often the tables were renewed: samples are the same as long as this is."""
        self.num_known = 0
        """Lengths of the pooled history that the tables have."""
        self.average: float = float(self.prior.mean())
        """Exponential average of the finished lengths."""

    def __len__(self) -> int:
        """Return how many finished lengths the pooled history holds."""
        return len(self._pooled)

    @property
    def num_recorded(self) -> int:
        """Return how many finished lengths there have been."""
        return self._pooled.num_added

    def remembered(self) -> RememberedLengths:
        """Return what another history may begin with."""
        keys = {of: prediction_key(of) for of in RequestClass}
        return RememberedLengths(
            list(self._pooled.recent)[-MAX_REMEMBERED:],
            {
                of: list(self._by_key[key].window.recent)[-MAX_REMEMBERED:]
                for of, key in keys.items()
                if key in self._by_key
            },
        )

    def restore(self, remembered: RememberedLengths) -> None:
        """Begin with what another history remembered, as far as the window reaches."""
        for length in remembered.lengths:
            self.record(length)
        for of, lengths in remembered.by_class.items():
            window = self._by_key.setdefault(
                prediction_key(of), _OfKey(_Window(self._window))
            ).window
            for length in lengths:
                window.add(length)
        if remembered.lengths:
            self._renew()

    def record(self, length: int, key: Hashable = None, num_reasoning: int | None = None) -> None:
        """Learn the output length (>= 1) of a finished request.

        `num_reasoning`: how many of its tokens were reasoning; None: none, or that is not known.
        """
        if num_reasoning is not None:
            self._reasoned.append((num_reasoning, length - num_reasoning))
        self._pooled.add(length)
        self.average += AVERAGE_WEIGHT * (length - self.average)
        if key is not None:
            if (own := self._by_key.get(key)) is None:
                own = self._by_key[key] = _OfKey(_Window(self._window))
            if own.version != self.version:
                own.in_table, own.version = own.window.sorted, self.version
            self._by_key.move_to_end(key)
            own.window.add(length)
        num_new = self._pooled.num_added - self._num_in_table
        has_become_full = self._pooled.num_added == self._window
        if has_become_full or num_new * MOST_NEW >= len(self._pooled):
            self._renew()

    def _renew(self) -> None:
        """Let all that was recorded count."""
        self.version += 1
        self._table_of.clear()
        self.num_known = len(self._pooled)
        self._num_in_table = self._pooled.num_added
        if self._reasoned:
            self._reasoned_in_table = np.array(self._reasoned, dtype=np.int64)
        self._table = self._pooled.sorted
        if len(self._pooled) < self._window:
            self._table = np.sort(np.concatenate([self._table, self.prior]))
        while len(self._by_key) > MAX_KEYS:
            oldest, _ = self._by_key.popitem(last=False)
            if (row := self._rows.pop(oldest, None)) is not None:
                self._free_rows.append(row.index)

    def expected_rest(
        self, generated: IntArray, max_tokens: IntArray, keys: Sequence[Hashable]
    ) -> FloatArray:
        """Return how many more tokens are to come on average, float64 [n]; see `sample`."""
        even = (np.arange(32) + 0.5) / 32
        uniforms = np.tile(even, (len(generated), 1))
        totals = self.sample(generated, max_tokens, uniforms, keys)
        rest: FloatArray = totals.mean(axis=1) - generated
        return rest

    def sample(
        self,
        generated: IntArray,
        max_tokens: IntArray,
        uniforms: FloatArray | UniformArray,
        keys: Sequence[Hashable] | None = None,
    ) -> LengthArray:
        """Return output lengths drawn from P(l | l > generated), int32 [n, num_futures].

        Cut at `max_tokens`, which are more than the tokens that each has, int64 [n] both. Larger
        `uniforms`, in [0, 1), float64 or float32 [n, num_futures], mean longer ones. Without keys,
        and for those that are not known, they are drawn from the pool.
        """
        rows = self.tables([None] * len(generated) if keys is None else keys)
        return self.draw(generated, max_tokens, uniforms, rows)

    def tables(self, keys: Sequence[Hashable]) -> IntArray:
        """Return the number of the table of each key, int64 [n]; good for this `version`."""
        known = self._table_of
        if unknown := [key for key in keys if key not in known]:
            known.update({key: self._row_of(key) for key in unknown})
        return np.array([known[key] for key in keys], dtype=np.int64)

    def draw(
        self,
        generated: IntArray,
        max_tokens: IntArray,
        uniforms: FloatArray | UniformArray,
        tables: IntArray,
    ) -> LengthArray:
        """Do as `sample`, with numbers of tables in place of keys."""
        raised = generated + tables * _ROW_OFFSET
        first = np.searchsorted(self._raised.ravel(), raised, side="right")
        num_left = (tables + 1) * _TABLE_SIZE - first
        index = (num_left.astype(np.float32)[:, None] * uniforms).astype(np.int32)
        index += first.astype(np.int32)[:, None]
        chosen: LengthArray = self._lengths.ravel().take(index, mode="clip")
        # Longer than anything seen: log-uniform up to the limit.
        beyond = num_left == 0
        if beyond.any():
            low = generated[beyond, None] + 1.0
            ratio = np.maximum(max_tokens[beyond, None] / low, 1.0)
            chosen[beyond] = (low * ratio ** uniforms[beyond]).astype(np.int32)
        np.maximum(chosen, (generated + 1).astype(np.int32)[:, None], out=chosen)
        np.minimum(chosen, max_tokens.astype(np.int32)[:, None], out=chosen)
        return chosen

    def _row_of(self, key: Hashable) -> int:
        """Return the row of `_lengths` that holds a key's distribution."""
        row = self._rows.get(key)
        if row is not None and row.version == self.version:
            return row.index
        own, others = self._by_key.get(key), self._table
        lengths = others[:0] if own is None else own.known(self.version)
        budget = key.budget if isinstance(key, WithBudget) else None
        if budget is not None and len(self._reasoned_in_table):
            reasoning, rest = self._reasoned_in_table.T
            others = np.sort(np.minimum(reasoning, budget) + rest)
        if len(lengths) == 0:
            key = budget if others is not self._table else None
            row = self._rows.get(key)
            if row is not None and row.version == self.version:
                return row.index
        if row is None:
            row = self._rows[key] = _Row(self._new_row())
        row.version = self.version
        mixture = _mix(lengths, others, len(lengths) / (len(lengths) + NUM_PRIOR_LENGTHS))
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


def _mix(own: IntArray, pooled: IntArray, own_share: float) -> IntArray:
    """Return `_TABLE_SIZE` equally likely lengths of own_share * own + (1 - own_share) * pooled.

    Both are ascending; each gives as many lengths as its share says, spread evenly over its ranks.
    """
    num_own = min(round(own_share * _TABLE_SIZE), _TABLE_SIZE - 1)
    taken = [own[_even_ranks(num_own, len(own))]] if num_own else []
    taken.append(pooled[_even_ranks(_TABLE_SIZE - num_own, len(pooled))])
    lengths: IntArray = np.concatenate(taken)
    lengths.sort()
    return lengths


@lru_cache(maxsize=128)
def _even_ranks(count: int, size: int) -> IntArray:
    """Return `count` indices into `size` sorted values, each in the middle of its share."""
    ranks: IntArray = ((np.arange(count) + 0.5) * (size / count)).astype(np.int64)
    return ranks
