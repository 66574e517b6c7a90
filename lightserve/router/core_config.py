"""What a RouterCore is made of: limits, and the choice of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightserve.router.admission.base import AdmissionRule
from lightserve.router.intake import QueueLimits
from lightserve.router.kv.cache import KVOptions
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.pipeline import MAX_STEPS_IN_FLIGHT
from lightserve.router.policies.base import NO_LIMIT, Policy
from lightserve.router.slo import SLOClock, curve_clock
from lightserve.types import RequestClass


@dataclass(frozen=True, kw_only=True)
class CoreConfig:
    """What the core needs of the server's configuration, and its two choices."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    """Of a step, unless the workers say otherwise."""
    max_be_seqs: int = NO_LIMIT
    """Most best-effort requests that run at once."""
    burst_headroom_s: float = 0.0
    """What real-time requests bring in this time stays free of best-effort ones; 0: nothing."""
    queue_limits: Mapping[RequestClass, QueueLimits]
    """Of every class."""
    max_parameter_bytes: int = NO_LIMIT
    """Memory of the parameters of all requests of a class, prompts aside."""
    policy: Policy
    be_by_sharing: bool = True
    """Whether best-effort requests start by what is cached of them; otherwise as they came."""
    slo_clock: SLOClock = curve_clock
    """Which deadlines targets mean, for policies that look at them."""
    admission: AdmissionRule
    lengths: OutputLengths
    """Learns every finished request's length; the admission rule may read it."""
    admission_limit: int | None = None
    """Most output tokens that admission believes any request can reach (simulation of others)."""
    kv: KVOptions = field(default_factory=KVOptions)
    max_steps_in_flight: int = MAX_STEPS_IN_FLIGHT
    """1 plans every step on the results of all before it, as simulations of other systems do."""
