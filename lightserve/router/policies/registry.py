"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable

from lightserve.config import ServeConfig
from lightserve.router.policies.base import Policy
from lightserve.router.policies.chunked import ChunkedPolicy
from lightserve.router.policies.fcfs import FcfsPolicy
from lightserve.router.policies.mlfq import MlfqPolicy
from lightserve.router.policies.priority import PriorityPolicy
from lightserve.router.policies.round_robin import RoundRobinPolicy
from lightserve.router.policies.sjf import SjfPolicy
from lightserve.router.policies.unified import UnifiedOptions, UnifiedPolicy

POLICIES: dict[str, Callable[[], Policy]] = {
    "chunked": ChunkedPolicy,
    "fcfs": FcfsPolicy,
    "mlfq": MlfqPolicy,
    "priority": PriorityPolicy,
    "unified": UnifiedPolicy,
    "round-robin": RoundRobinPolicy,
    "sjf": SjfPolicy,
}
"""Factories of the choices of --policy, with what they take unless told otherwise."""


def make_policy(config: ServeConfig) -> Policy:
    """Return the configured policy."""
    if config.policy == "unified":
        return UnifiedPolicy(
            UnifiedOptions(
                late_min_share=config.late_min_share,
                be_min_share=config.be_min_share,
                best_first=config.be_by_sharing(),
                long_prompt_tokens=config.long_prompt_tokens,
            )
        )
    return POLICIES[config.policy]()
