"""Stand-ins for values of the host in a pass that is recorded as a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn


class UnknownValues(Sequence[int]):
    """Values of the host that change from replay to replay: only their number can be read."""

    def __init__(self, name: str, length: int) -> None:
        self._name = name
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: object) -> NoReturn:
        """Refuse: a graph would keep the values of its capture for ever."""
        raise RuntimeError(f"{self._name} of a recorded pass was read: every replay has others")
