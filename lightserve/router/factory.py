"""Builds a RouterCore from the server's configuration."""

from __future__ import annotations

from lightserve.config import ServeConfig
from lightserve.router.admission import ADMISSION_RULES
from lightserve.router.admission.base import AdmissionRule
from lightserve.router.admission.classwise import ClasswiseAdmission
from lightserve.router.core import RouterCore
from lightserve.router.core_config import CoreConfig
from lightserve.router.intake import QueueLimits
from lightserve.router.kv.cache import KVOptions, Preemption
from lightserve.router.kv.prefix_node import EvictionOrder, least_recently_used, task_aware
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.policies.base import NO_LIMIT
from lightserve.router.policies.registry import make_policy
from lightserve.router.slo import SLO_CLOCKS
from lightserve.types import RequestClass

CACHE_ORDERS: dict[str, EvictionOrder | None] = {
    "task-aware": task_aware,
    "lru": least_recently_used,
    "off": None,
}
"""By `--cache-policy`."""


def make_core(config: ServeConfig, *, max_model_len: int, seed: int = 0) -> RouterCore:
    """Return a core with the configured policy and admission rule."""
    return RouterCore(make_core_config(config, max_model_len=max_model_len, seed=seed))


def make_core_config(config: ServeConfig, *, max_model_len: int, seed: int = 0) -> CoreConfig:
    """Return what a core needs to know of the server's configuration."""
    lengths = OutputLengths(max_output_tokens=max_model_len)
    policy = make_policy(config)
    return CoreConfig(
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_tokens_of_step("cpu"),
        max_be_seqs=config.max_be_seqs or NO_LIMIT,
        burst_headroom_s=config.burst_headroom_s,
        queue_limits={
            RequestClass.RT: QueueLimits(
                config.rt_max_waiting_requests, config.rt_max_waiting_tokens
            ),
            RequestClass.BE: QueueLimits(
                config.be_max_waiting_requests, config.be_max_waiting_tokens
            ),
        },
        max_parameter_bytes=config.max_parameter_bytes,
        policy=policy,
        be_by_sharing=config.be_by_sharing(),
        slo_clock=SLO_CLOCKS[config.slo_clock],
        admission=make_admission(config, lengths, seed, is_class_aware=policy.is_class_aware),
        lengths=lengths,
        kv=KVOptions(
            cache_order=CACHE_ORDERS[config.cache_policy],
            block_size=config.block_size,
            is_exclusive=config.block_owner == "exclusive",
            preemption=Preemption(config.preemption),
            clean_ahead_tokens=config.clean_ahead_tokens,
            rt_cache_min_tokens=config.rt_cache_min_tokens,
            max_retained_tokens=config.max_retained_tokens,
        ),
    )


def make_admission(
    config: ServeConfig, lengths: OutputLengths, seed: int, *, is_class_aware: bool
) -> AdmissionRule:
    """Return the configured rule; for a policy that knows classes, one of each class."""
    make_rule = ADMISSION_RULES[config.admission]
    if not is_class_aware:
        return make_rule(config, lengths, seed)
    return ClasswiseAdmission(make_rule(config, lengths, seed), make_rule(config, lengths, seed))
