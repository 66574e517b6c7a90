"""Who advances in the next step: the policy's choice, as far as memory and rows allow.

Reads the router's state and changes nothing but notes on waiting requests (what starting them
would take), which are made anew for every plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightserve.router.admission.base import PoolView
from lightserve.router.be_pool import prefix_in_flight
from lightserve.router.core_config import CoreConfig
from lightserve.router.kv.store import KVStore
from lightserve.router.pipeline import Pipeline
from lightserve.router.policies.base import StepLimits, Waiting
from lightserve.router.preemption import Fit, fit_into_memory
from lightserve.router.prompt_logprobs import cap_positions
from lightserve.router.queues import RowTable, WaitingQueue
from lightserve.router.request import Request, RequestState
from lightserve.types import RequestClass


class StepPlanner:
    """Chooses steps over the core's queues, rows and pipeline."""

    def __init__(
        self, config: CoreConfig, waiting: WaitingQueue, rows: RowTable, pipeline: Pipeline
    ) -> None:
        self._config = config
        self._waiting = waiting
        self._rows = rows
        self._pipeline = pipeline
        self._is_class_aware = config.policy.is_class_aware

    def running(self) -> list[Request]:
        """Return the requests that hold rows and have not ended, in order of admission."""
        return [request for request in self._rows if request.state is RequestState.RUNNING]

    def choose(self, kv: KVStore, suspects: Sequence[Request], headroom: int) -> Fit:
        """Return who advances: a suspect alone if there is one, else whom the policy selects.

        Args:
            kv: the pool.
            suspects: requests that may have killed workers, the next to be tried first.
            headroom: slots that best-effort newcomers may not count on.
        """
        running = self.running()
        everybody = _LookedUp(self._waiting, kv, running)
        if not suspects:
            fit = self._select(kv, running, everybody, headroom)
            return fit or self._select(kv, running, _Only([]), headroom)
        suspect = suspects[0]
        if suspect.state is RequestState.RUNNING:
            return self._select(kv, [suspect], _Only([]), headroom)
        if not self._pipeline.is_empty:
            return Fit(())
        # Where there is no room for it, those before it that were cleared make some.
        alone = self._select(kv, [], _Only([kv.look_up(suspect)]), headroom)
        return alone or self._select(kv, running, _Only([]), headroom)

    def _select(
        self, kv: KVStore, running: Sequence[Request], waiting: Waiting, headroom: int
    ) -> Fit:
        """Ask the policy who of these advances, and see that it fits; falsy if nobody can."""
        num_yielding = sum(request.request_class is RequestClass.BE for request in running)
        limits = StepLimits(
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            num_free_rows=self._rows.num_free,
            max_be_seqs=self._config.max_be_seqs,
            step_number=self._pipeline.next_step_id,
            num_yielding_rows=num_yielding if self._is_class_aware else 0,
        )
        admission = self._config.admission.begin(
            list(self._rows),
            PoolView(kv.num_slots, headroom, kv.lease_version),
            self._pipeline.next_step_id,
        )
        chosen = cap_positions(self._config.policy.select(running, waiting, limits, admission))
        return fit_into_memory(
            chosen,
            kv,
            self.holders(),
            self._rows.num_free,
            is_class_aware=self._is_class_aware,
        )

    def holders(self) -> list[Request]:
        """Return the running and paused requests, the most senior first (see `preemption`)."""
        paused = {c: list(self._waiting.paused(c)) for c in RequestClass}
        running = self.running()
        if not self._is_class_aware:
            return running + paused[RequestClass.RT] + paused[RequestClass.BE]
        holders: list[Request] = []
        for request_class in (RequestClass.RT, RequestClass.BE):
            holders += [r for r in running if r.request_class is request_class]
            holders += paused[request_class]
        return holders


class _LookedUp:
    """The waiting, each with notes on what starting it takes; see `policies.base.Waiting`."""

    def __init__(self, waiting: WaitingQueue, kv: KVStore, running: Sequence[Request]) -> None:
        self._waiting = waiting
        self._kv = kv
        self._running = running

    def __iter__(self) -> Iterator[Request]:
        return map(self._kv.look_up, self._waiting)

    def of(self, request_class: RequestClass) -> Iterator[Request]:
        """Iterate over one class.

        A best-effort request whose prefix is just being computed by another waits for it; a
        real-time one does not (architecture 6).
        """
        if request_class is RequestClass.RT:
            return map(self._kv.look_up, self._waiting.real_time())
        count = max(1, len(self._running))
        context_len = sum(request.next_position for request in self._running) / count
        best_effort = map(self._kv.look_up, self._waiting.best_effort(self._kv.tree, context_len))
        if self._kv.tree is None:
            return best_effort
        prefilling = [request for request in self._running if not request.is_prompt_shared]
        return (r for r in best_effort if not prefix_in_flight(r, prefilling))


class _Only:
    """These requests and no others; see `policies.base.Waiting`."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def of(self, request_class: RequestClass) -> Iterator[Request]:
        """Iterate over one class."""
        return (r for r in self._requests if r.request_class is request_class)
