"""Shortest prompt first: `priority`, whose real-time newcomers start in the order of their lengths.

What is short waits least and counts as much as what is long, so that past capacity no order that
knows deadlines alone meets more of them; long prompts then wait for as long as shorter ones come.
A baseline for overload.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightserve.router.policies.base import Waiting
from lightserve.router.policies.priority import PriorityPolicy
from lightserve.router.request import Request
from lightserve.types import RT


class SjfPolicy(PriorityPolicy):
    """See the module."""

    def newcomers(self, waiting: Waiting) -> Iterable[Request]:
        """Return real-time requests that wait, those with least to compute first."""
        return sorted(waiting.of(RT), key=lambda request: request.num_schedulable_tokens)
