"""Who advances in a step: one short file per policy."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

from lightserve.config import ServeConfig
from lightserve.config.fields import is_class_path
from lightserve.config.options import split_names
from lightserve.errors import ConfigError
from lightserve.router.policies.base import Policy
from lightserve.router.policies.baselines import (
    ChunkedPolicy,
    FcfsPolicy,
    MlfqPolicy,
    PriorityPolicy,
    RoundRobinPolicy,
    SjfPolicy,
)
from lightserve.router.policies.pace import Pace
from lightserve.router.policies.unified import UnifiedOptions, UnifiedPolicy

PAPERS = {
    "accelgen": "lightserve.papers.accelgen:AccelGenPolicy",
    "bros": "lightserve.papers.bros:BrosPolicy",
    "echo": "lightserve.papers.echo:EchoPolicy",
}
"""Published systems: they come through the same door as a policy of one's own."""


def make_policy(config: ServeConfig) -> Policy:
    """Return the configured policy.

    Raises:
        ConfigError: a class of another package cannot be had, or is no policy.
    """
    if is_class_path(path := PAPERS.get(config.policy, config.policy)):
        return _imported(path, config)
    pace = Pace(config.pace_ms / 1e3, config.be_stretch) if config.pace_ms > 0 else None
    if config.policy == "unified":
        return UnifiedPolicy(
            UnifiedOptions(
                late_min_share=config.late_min_share,
                be_min_share=config.be_min_share,
                best_first=config.be_by_sharing(),
                long_prompt_tokens=config.long_prompt_tokens,
                pace=pace,
            )
        )
    if config.policy == "priority":
        return PriorityPolicy(pace)
    if config.policy == "round-robin":
        return RoundRobinPolicy(is_whole="chunking" in split_names(config.without))
    return POLICIES[config.policy]()


def _imported(path: str, config: ServeConfig | None = None) -> Policy:
    """Return a policy of MODULE:CLASS, by its `of_config` if it has one and there is a `config`."""
    module_name, _, name = path.partition(":")
    try:
        kind = getattr(importlib.import_module(module_name), name)
        of_config = None if config is None else getattr(kind, "of_config", None)
        policy = kind() if of_config is None else of_config(config)
    except Exception as error:
        raise ConfigError(f"--policy {path}: {type(error).__name__}: {error}") from error
    members = ("is_class_aware", "meets_deadlines", "fill")
    missing = [member for member in members if not hasattr(policy, member)]
    if missing:
        raise ConfigError(f"--policy {path} is no policy: it has no {', '.join(missing)}")
    made: Policy = policy
    return made


POLICIES: dict[str, Callable[[], Policy]] = {
    "chunked": ChunkedPolicy,
    "fcfs": FcfsPolicy,
    "mlfq": MlfqPolicy,
    "priority": partial(PriorityPolicy, Pace()),
    "unified": UnifiedPolicy,
    "round-robin": RoundRobinPolicy,
    "sjf": SjfPolicy,
    **{name: partial(_imported, path) for name, path in PAPERS.items()},
}
"""Factories of the choices of --policy, with what they take unless told otherwise."""
