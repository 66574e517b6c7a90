"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable

from lightserve.router.policies.base import Policy
from lightserve.router.policies.chunked import ChunkedPolicy
from lightserve.router.policies.fcfs import FcfsPolicy
from lightserve.router.policies.priority import PriorityPolicy

POLICIES: dict[str, Callable[[], Policy]] = {
    "chunked": ChunkedPolicy,
    "fcfs": FcfsPolicy,
    "priority": PriorityPolicy,
}
"""Factories of the choices of --policy."""
