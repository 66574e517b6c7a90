"""What a forecast reads of every request and never changes, kept as columns.

Forecasts are made anew in most steps, over hundreds of requests of which a few are others than the
step before. So what is constant of them is read once, and gathered by numpy from then on.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from lightserve.router.future_memory import IntArray
from lightserve.router.output_lengths import Keys
from lightserve.router.request import Request

_SPARE = 256
"""Requests that have left and are still known, before everything is read again."""


class Constants(NamedTuple):
    """Of requests; int64 [n] each."""

    limits: IntArray
    """Output tokens that admission believes each can reach."""
    numbers: IntArray
    """How many requests came before each."""
    keys: Keys


class Roster:
    """Knows requests from when it was first asked about them among others until they are gone.

    By their numbers: it keeps nothing of them alive, such as their prompts.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._columns: IntArray = np.empty((3, 0), dtype=np.int64)
        self._keys: dict[Hashable, int] = {}
        """Prediction keys of all who are known, each with its number."""

    def constants(self, requests: Sequence[Request]) -> Constants:
        """Return the columns of these requests, in their order."""
        wanted = [request.arrival_number for request in requests]
        unknown = [r for r in requests if r.arrival_number not in self._places]
        if len(self._places) + len(unknown) > 2 * len(requests) + _SPARE:
            self._places, self._keys, unknown = {}, {}, list(requests)
            self._columns = self._columns[:, :0]
        if unknown:
            self._read(unknown)
        places = np.fromiter(map(self._places.__getitem__, wanted), np.int64, len(requests))
        limits, numbers, keys = self._columns[:, places]
        return Constants(limits, numbers, Keys(list(self._keys), keys))

    def _read(self, requests: Sequence[Request]) -> None:
        """Take in requests that are not known."""
        known = self._keys
        columns = (
            [request.admission_limit for request in requests],
            [request.arrival_number for request in requests],
            [known.setdefault(request.prediction_key, len(known)) for request in requests],
        )
        self._columns = np.concatenate([self._columns, np.array(columns, np.int64)], axis=1)
        for request in requests:
            self._places[request.arrival_number] = len(self._places)
