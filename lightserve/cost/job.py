"""What `lightserve profile` and the worker processes that it starts tell each other."""

from __future__ import annotations

import msgspec

from lightserve.config import ServeConfig
from lightserve.cost.profile import StepProfile


class ProfileJob(msgspec.Struct, frozen=True):
    """What one rank is to do."""

    config: ServeConfig
    rank: int
    store_path: str
    """Where the ranks meet."""
    seconds: float


class ProfileNews(msgspec.Struct, frozen=True):
    """One line of rank 0."""

    share: float = 0.0
    """Of the time, 0 … 1."""
    profile: StepProfile | None = None
    """At the end."""
    error: str = ""
    """Why there will be none."""
