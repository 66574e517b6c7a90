"""The parts of a RouterCore, and what operators see of them: read-only from outside."""

from __future__ import annotations

from collections.abc import Mapping

from lightserve.messages.frontend_router import KVPool, RouterStatus
from lightserve.router.booking import KVCounters, SkipCounters, StepBooking
from lightserve.router.core_config import CoreConfig
from lightserve.router.demand import BurstHeadroom, RealTimeDemand
from lightserve.router.intake import HeldParameters
from lightserve.router.integrity import check_integrity
from lightserve.router.kv.cache import KVStore
from lightserve.router.kv.kv_map import describe_kv
from lightserve.router.pipeline import Pipeline
from lightserve.router.planner import Planner
from lightserve.router.queue import WaitingQueue
from lightserve.router.request import Request
from lightserve.router.request_table import RequestTable
from lightserve.router.scheduling_targets import RaisedTarget, SchedulingTargets
from lightserve.router.status import router_status
from lightserve.router.waits import WaitForecast, Work
from lightserve.types import RequestClass, RequestKey


class CoreState:
    """What `RouterCore`, its one writer, decides on."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._requests: dict[RequestKey, Request] = {}
        self._waiting = WaitingQueue()
        self._rows = RequestTable(config.max_num_seqs)
        self._kv: KVStore | None = None
        self._pipeline = Pipeline(
            max_steps_in_flight=config.max_steps_in_flight,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self._waits = WaitForecast(config, self._waiting, self._rows, self._pipeline)
        self._targets = SchedulingTargets(config, self._pipeline, self._waits)
        self._parameters = HeldParameters(config.max_parameter_bytes)
        self._unfinished: dict[RequestKey, Request] = {}
        """Requests whose last token was sent, but whose frontend still looks for a stop string."""
        self._demand = RealTimeDemand()
        self._planner = Planner(config, self._waiting, self._rows, self._pipeline, self._demand)
        self._booking = StepBooking(self._waiting, self._rows, self._pipeline, self._waits)
        self._burst = BurstHeadroom(config.burst_headroom_s)
        self._num_arrivals = 0
        self.forecast_peak: int | None = None
        """Slots that the batch was expected to need at its peak at the last admission."""
        self.burst_headroom_tokens = 0
        """Slots that best-effort newcomers had to leave free in the last step."""
        self._suspects: list[Request] = []
        """Requests that were in flight when workers died: each runs alone up to a token."""

    @property
    def running(self) -> list[Request]:
        """Requests that hold rows and have not ended, in order of admission."""
        return self._rows.of(self._rows.rows)

    @property
    def num_preemptions(self) -> int:
        """Times that a request lost KV to another."""
        return sum(counters.num_evictions for counters in self.counters.values())

    @property
    def num_preempted_tokens(self) -> int:
        """Tokens that these have to compute again, unless they find them as cache."""
        return sum(counters.lost_tokens for counters in self.counters.values())

    @property
    def counters(self) -> Mapping[RequestClass, KVCounters]:
        """What happened to requests' KV."""
        return self._booking.counters

    @property
    def skip_counters(self) -> SkipCounters:
        """Whom steps left out, and why."""
        return self._booking.skip_counters

    @property
    def computed_tokens(self) -> Mapping[RequestClass, Work]:
        """What steps have computed for each class."""
        return self._waits.computed

    def predicted_wait_s(self, request_class: RequestClass) -> float:
        """Return the predicted time until all of a class that waits has begun."""
        return self._waits.seconds(request_class, self._kv)

    @property
    def num_raised_targets(self) -> Mapping[RaisedTarget, int]:
        """Targets that an idle server could not have met: others are scheduled by."""
        return self._targets.num_raised

    @property
    def num_used_slots(self) -> int:
        """Slots of the KV pool that somebody holds."""
        return 0 if self._kv is None else self._kv.num_used

    @property
    def num_cached_slots(self) -> int:
        """Slots whose KV is kept although no live request reads it."""
        return 0 if self._kv is None else self._kv.num_cached

    @property
    def num_host_slots(self) -> int:
        """Size of the host pool."""
        return 0 if self._kv is None else self._kv.checkpoints.num_slots

    @property
    def num_used_host_slots(self) -> int:
        """Host slots that hold copies."""
        return 0 if self._kv is None else self._kv.checkpoints.num_used

    @property
    def parameter_bytes(self) -> Mapping[RequestClass, int]:
        """Memory of what requests have besides their prompts."""
        return self._parameters.num_bytes

    @property
    def num_unfinished(self) -> int:
        """Requests that have ended here, but whose frontend has not said at which token."""
        return len(self._unfinished)

    def kv_map(self) -> KVPool | None:
        """Return what every slot of the pool is for; None without workers."""
        return None if self._kv is None else describe_kv([*self._rows, *self._waiting], self._kv)

    def status(self, now_s: float) -> RouterStatus:
        """Return the pulse that frontends are told."""
        return router_status(self._waiting, self._rows, self._kv, self._pipeline, now_s)

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls (architecture 6, invariant 1)."""
        check_integrity(self._requests, self._waiting, self._rows, self._kv)
        held = [*self._requests.values(), *self._unfinished.values()]
        for request_class, num_bytes in self._parameters.num_bytes.items():
            kept = {r.parameters for r in held if r.request_class is request_class}
            assert num_bytes == sum(parameters.num_bytes for parameters in kept)
