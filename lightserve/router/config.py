"""Configuration of a Scheduler: limits, and the choice of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightserve.config import ServeConfig
from lightserve.router.admission import ADMISSION_RULES
from lightserve.router.admission.base import AdmissionRule
from lightserve.router.admission.classwise import ClasswiseAdmission
from lightserve.router.admission.risk import AcceptedRisk
from lightserve.router.from_submit import QueueLimits
from lightserve.router.kv.cache import KVOptions, Preemption
from lightserve.router.kv.prefix_node import EvictionOrder, least_recently_used, task_aware
from lightserve.router.output_lengths import OutputLengths, RememberedLengths
from lightserve.router.pipeline import MAX_STEPS_IN_FLIGHT
from lightserve.router.policies import make_policy
from lightserve.router.policies.base import Policy
from lightserve.router.policies.step_budget import NO_LIMIT
from lightserve.router.slo import SLO_CLOCKS, SLOClock, curve_clock
from lightserve.router.victims import VICTIMS, Dispensability
from lightserve.types import BE, RT, RequestClass


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The server's configuration, as far as the core needs it, and its two choices."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    """Most tokens of a step, unless the workers say otherwise."""
    max_be_seqs: int = NO_LIMIT
    """Most best-effort requests that run at once."""
    rt_kv_deviations: float = 0.0
    """Standard deviations above what real-time requests held on average that stay free of
    best-effort ones; 0: nothing."""
    queue_limits: Mapping[RequestClass, QueueLimits]
    """Queue limits of every class."""
    last_ones_go: bool = False
    """Whether a real-time request leaves a full queue for a newcomer that would start before it:
    where late ones go last, and the shortest first if there are too many."""
    max_parameter_bytes: int = NO_LIMIT
    """Memory of the parameters of all requests of a class, prompts aside."""
    policy: Policy
    victims: Dispensability | None = None
    """Who of a class loses memory first; None: the newest."""
    keys_take_turns: bool = False
    """Whether requests without deadlines start, and keep their seats, in turns by key."""
    be_by_sharing: bool = True
    """Whether best-effort requests start by what is cached of them; otherwise as they came."""
    slo_clock: SLOClock = curve_clock
    """Which deadlines targets mean, for policies that look at them."""
    admission: AdmissionRule
    lengths: OutputLengths
    """Learns every finished request's length; the admission rule may read it."""
    accepted_risk: AcceptedRisk = field(
        default_factory=lambda: AcceptedRisk(dict.fromkeys(RequestClass, 0.0))
    )
    """Learns which requests memory is taken from; the admission rule may read it."""
    admission_limit: int | None = None
    """Most output tokens that admission believes any request can reach (simulation of others)."""
    kv: KVOptions = field(default_factory=KVOptions)
    max_draft_tokens: int = 0
    """Most drafts of a request in a step; 0: none has any."""
    shares_answers: bool = False
    """Whether answers to requests of a key may be guesses of others."""
    max_steps_in_flight: int = MAX_STEPS_IN_FLIGHT
    """1 plans every step on the results of all before it, as simulations of other systems do."""


# From the server's configuration.

KEYS_TAKE_TURNS = ("priority", "unified")
"""Policies in which keys take turns where no deadline says who goes first."""

CACHE_ORDERS: dict[str, EvictionOrder | None] = {
    "task-aware": task_aware,
    "lru": least_recently_used,
    "off": None,
}
"""By `--cache-policy`."""


def make_scheduler_config(
    config: ServeConfig,
    *,
    max_model_len: int,
    seed: int = 0,
    remembered: RememberedLengths | None = None,
) -> SchedulerConfig:
    """Return what a core needs to know: of the server's configuration, and of one before it."""
    lengths = OutputLengths(max_output_tokens=max_model_len, window=config.window)
    if remembered is not None:
        lengths.restore(remembered)
    accepted_risk = make_accepted_risk(config)
    policy = make_policy(config)
    return SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_tokens_of_step("cpu"),
        max_be_seqs=config.max_be_seqs or NO_LIMIT,
        rt_kv_deviations=config.rt_kv_deviations,
        last_ones_go=config.policy == "unified",
        keys_take_turns=config.policy in KEYS_TAKE_TURNS,
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
        victims=VICTIMS[config.victims],
        be_by_sharing=config.be_by_sharing(),
        slo_clock=SLO_CLOCKS[config.slo_clock],
        admission=make_admission(
            config, lengths, accepted_risk, seed, is_class_aware=policy.is_class_aware
        ),
        lengths=lengths,
        accepted_risk=accepted_risk,
        max_draft_tokens=config.drafts_per_row,
        shares_answers=config.speculation == "suffix",
        kv=KVOptions(
            cache_order=CACHE_ORDERS[config.cache_policy],
            block_size=config.block_size,
            is_exclusive=config.block_owner == "exclusive",
            preemption=Preemption(config.preemption),
            rt_cache_min_tokens=config.rt_cache_min_tokens,
            max_retained_tokens=config.max_retained_tokens,
            event_block_size=config.kv_events_block_size if config.kv_events else 0,
        ),
    )


def make_accepted_risk(config: ServeConfig) -> AcceptedRisk:
    """Return what is accepted of each class, nothing learnt yet."""
    return AcceptedRisk({RT: config.rt_memory_risk, BE: config.be_memory_risk})


def make_admission(
    config: ServeConfig,
    lengths: OutputLengths,
    risk: AcceptedRisk,
    seed: int,
    *,
    is_class_aware: bool,
) -> AdmissionRule:
    """Return the configured rule; for a policy that knows classes, one of each class."""
    make_rule = ADMISSION_RULES[config.admission]
    if not is_class_aware:
        return make_rule(config, lengths, risk, seed)
    rules = [make_rule(config, lengths, risk, seed) for _ in range(2)]
    return ClasswiseAdmission(*rules)
