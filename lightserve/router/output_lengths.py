"""The past: how long outputs have been lately, and samples of how long they will be.

Past-Future, section 3.2: the lengths of the last w finished requests are the distribution P(l);
a running request that has generated g tokens will end at a length drawn from P(l | l > g).

Beyond the paper: histories per prediction key, shrunk towards the pooled one where a key has
few lengths; a weak prior (log-spaced pseudo-lengths) at a cold start instead of a preset
maximum; and uniform numbers that come from outside, so that a caller can use common ones.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

DEFAULT_WINDOW = 1000
NUM_PRIOR_LENGTHS = 20
"""Pseudo-lengths that stand beside the finished ones until the window is full."""
SHRINKAGE = 50.0
"""A key with this many lengths of its own is drawn from half of the time."""
MAX_KEYS = 4096
AVERAGE_WEIGHT = 0.01
_TABLE_SIZE = 2048


class _Window:
    """The last `size` lengths, and sorted."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._recent: deque[int] = deque()
        self.sorted: IntArray = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, length: int) -> None:
        if len(self._recent) == self._size:
            oldest = self._recent.popleft()
            self.sorted = np.delete(self.sorted, np.searchsorted(self.sorted, oldest))
        self._recent.append(length)
        self.sorted = np.insert(self.sorted, np.searchsorted(self.sorted, length), length)


class OutputLengths:
    """The output-length history. `record` what finished; `sample` what will be."""

    def __init__(self, *, max_output_tokens: int, window: int = DEFAULT_WINDOW) -> None:
        self._window = window
        self._pooled = _Window(window)
        self._by_key: OrderedDict[Hashable, _Window] = OrderedDict()
        self._tables: dict[Hashable, IntArray] = {}
        prior = np.geomspace(1, max(1, max_output_tokens), NUM_PRIOR_LENGTHS)
        self._prior: IntArray = np.rint(prior).astype(np.int64)
        self.average: float = float(self._prior.mean())
        """Exponential average of the finished lengths."""

    def __len__(self) -> int:
        """Return how many finished lengths the pooled history holds."""
        return len(self._pooled)

    def record(self, length: int, key: Hashable = None) -> None:
        """Learn the output length (>= 1) of a finished request."""
        self._pooled.add(length)
        self.average += AVERAGE_WEIGHT * (length - self.average)
        self._tables.clear()
        if key is None:
            return
        if key not in self._by_key:
            self._by_key[key] = _Window(self._window)
            if len(self._by_key) > MAX_KEYS:
                self._by_key.popitem(last=False)
        self._by_key.move_to_end(key)
        self._by_key[key].add(length)

    def sample(
        self,
        generated: IntArray,
        max_tokens: IntArray,
        uniforms: FloatArray,
        keys: Sequence[Hashable] | None = None,
    ) -> IntArray:
        """Return output lengths drawn from P(l | l > generated), int64 [n, num_futures].

        Args:
            generated: tokens each request has, int64 [n].
            max_tokens: its limit, > generated, int64 [n]; samples are cut there.
            uniforms: in [0, 1), float64 [n, num_futures]; larger means longer.
            keys: prediction key of each request; None or unknown keys draw from the pool.
        """
        if keys is None or not self._by_key:
            return self._draw(self._table(None), generated, max_tokens, uniforms)
        lengths = np.empty(uniforms.shape, dtype=np.int64)
        for key in set(keys):
            of_key = np.array([own == key for own in keys])
            lengths[of_key] = self._draw(
                self._table(key), generated[of_key], max_tokens[of_key], uniforms[of_key]
            )
        return lengths

    @staticmethod
    def _draw(
        table: IntArray, generated: IntArray, max_tokens: IntArray, uniforms: FloatArray
    ) -> IntArray:
        """Invert the conditional distribution; `table` holds equally likely lengths, sorted."""
        first = np.searchsorted(table, generated, side="right")[:, None]
        index = first + ((len(table) - first) * uniforms).astype(np.int64)
        lengths = table[np.minimum(index, len(table) - 1)]
        # Longer than anything seen: log-uniform up to the limit.
        beyond = (first == len(table))[:, 0]
        if beyond.any():
            low = generated[beyond, None] + 1.0
            ratio = np.maximum(max_tokens[beyond, None] / low, 1.0)
            lengths[beyond] = (low * ratio ** uniforms[beyond]).astype(np.int64)
        result: IntArray = np.clip(lengths, generated[:, None] + 1, max_tokens[:, None])
        return result

    def _table(self, key: Hashable) -> IntArray:
        """Return equally likely lengths, sorted, for a key (None: pooled)."""
        own = self._by_key.get(key) if key is not None else None
        cache_key = key if own is not None else None
        table = self._tables.get(cache_key)
        if table is None:
            table = self._pooled_table()
            if own is not None:
                table = _mix(own.sorted, table, len(own) / (len(own) + SHRINKAGE))
            self._tables[cache_key] = table
        return table

    def _pooled_table(self) -> IntArray:
        if len(self._pooled) >= self._window:
            return self._pooled.sorted
        return np.sort(np.concatenate([self._pooled.sorted, self._prior]))


def _mix(own: IntArray, pooled: IntArray, own_share: float) -> IntArray:
    """Return `_TABLE_SIZE` equally likely lengths of own_share * own + (1 - own_share) * pooled."""
    values = np.concatenate([own, pooled])
    weights = np.concatenate(
        [
            np.full(len(own), own_share / len(own)),
            np.full(len(pooled), (1 - own_share) / len(pooled)),
        ]
    )
    order = np.argsort(values, kind="stable")
    cumulative = np.cumsum(weights[order])
    quantiles = (np.arange(_TABLE_SIZE) + 0.5) / _TABLE_SIZE
    index = np.minimum(np.searchsorted(cumulative, quantiles), len(values) - 1)
    result: IntArray = values[order][index]
    return result
