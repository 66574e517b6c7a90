"""Runs of identical decode steps in one plan, with the decisions that single steps would bring.

Between two events (a request ends, memory is full, one arrives) decode steps differ only in
what admission answers. `WatchedAdmission` stands around the rule and sees the answers;
`RunPolicy` stands around the policy and makes its decode steps as long as the answer stays no.
It finds out by asking the very rule about the batch as it will be, skipping the steps for which
the answer cannot change.

A refusal lasts where outputs are forecast steadily: the forecast total length of a request only
grows as it generates. Let d steps pass in which nothing ends. What was alive at the old peak holds
as much at that moment or more, except for the newcomer, which starts d steps later and has grown
d tokens less. So no peak falls by more than 1 per step, and a newcomer that was e tokens too much
will still be too much after e - 1 steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from lightserve.router.admission.base import AdmissionRound, AdmissionRule, PoolView
from lightserve.router.admission.peak import PeakAdmission, PeakRound
from lightserve.router.future_memory import IntArray
from lightserve.router.policies.base import Policy, StepLimits, Waiting
from lightserve.router.request import Request
from lightserve.router.shares import Allotment, Share
from lightserve.types import RequestClass

OnAdmission = Callable[[Sequence[Request], IntArray | None], None]
"""Told of a batch with a newcomer in it, and of the rule's forecast of its peaks."""

RunLimit = Callable[[Sequence[Request]], int]
"""The most decode steps (>= 1) of these requests to the next event."""


class WatchedAdmission:
    """Another rule's answers, and a memory of the last round's refusals."""

    def __init__(self, rule: AdmissionRule, on_admission: OnAdmission) -> None:
        self._rule = rule
        self._on_admission = on_admission
        self._live: list[Request] = []
        self._pool = PoolView(0)
        self._refused: list[Request] = []
        self._round: AdmissionRound | None = None

    def begin(self, live: Collection[Request], pool: PoolView) -> WatchedRound:
        """Start a round of the rule's."""
        self._live, self._pool = list(live), pool
        self._refused = []
        self._round = self._rule.begin(live, pool)
        return WatchedRound(self._round, self._live, self._refused, self._on_admission)

    def run_length(self, limit: int, interval: int) -> int:
        """Return after how many decode steps of the whole batch the rule must be asked again.

        It is asked every `interval` steps, and would answer no before; at most `limit`.
        """
        refused_until = 0
        while self._refused and refused_until < limit:
            assert self._round is not None
            num_sure = refused_until + self._num_certain()
            asked = (num_sure // interval + 1) * interval
            if asked >= limit:
                return limit
            if not self._would_refuse_after(asked):
                return asked
            refused_until = asked
        return limit

    def _num_certain(self) -> int:
        """Return for how many decode steps the last round's refusals are certain to last."""
        if not (isinstance(self._rule, PeakAdmission) and self._rule.is_steady):
            return 0
        assert isinstance(self._round, PeakRound)
        return min(map(self._round.excess.__getitem__, self._refused)) - 1

    def _would_refuse_after(self, num_steps: int) -> bool:
        """Ask about the batch as it will be; what is asked becomes the last round."""
        _grow(self._live, num_steps)
        try:
            self._round = self._rule.begin(self._live, self._pool)
            return not any(self._round.admit(request) for request in self._refused)
        finally:
            _grow(self._live, -num_steps)


class WatchedRound:
    """See `WatchedAdmission`."""

    def __init__(
        self,
        inner: AdmissionRound,
        live: Sequence[Request],
        refused: list[Request],
        on_admission: OnAdmission,
    ) -> None:
        self._inner = inner
        self._batch = list(live)
        self._refused = refused
        self._on_admission = on_admission

    @property
    def forecast_peak(self) -> int | None:
        """See `AdmissionRound.forecast_peak`."""
        return self._inner.forecast_peak

    def admit(self, request: Request) -> bool:
        """Pass on the rule's answer, and note it."""
        if not self._inner.admit(request):
            self._refused.append(request)
            return False
        self._batch.append(request)
        self._on_admission(self._batch, getattr(self._inner, "peaks", None))
        return True


class RunPolicy:
    """Another policy that may admit every `interval` decode steps; decode steps come in runs."""

    def __init__(
        self,
        inner: Policy,
        admission: WatchedAdmission,
        *,
        interval: int,
        limit: RunLimit | None,
    ) -> None:
        self._inner = inner
        self.is_class_aware = inner.is_class_aware
        self.meets_deadlines = inner.meets_deadlines
        self._admission = admission
        self._interval = interval
        self._limit = limit
        self._steps_left = 0

    def advance(self, num_steps: int) -> None:
        """Say that decode steps have been made."""
        self._steps_left = (self._steps_left - num_steps) % self._interval

    def select(
        self,
        running: Collection[Request],
        waiting: Waiting,
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> Sequence[Share]:
        """See `Policy.select`."""
        may_admit = self._steps_left == 0 or not running
        chosen = self._inner.select(
            running, waiting if may_admit else _Nothing(), limits, admission
        )
        if self._limit is None or any(not request.is_decoding for request, _ in chosen):
            return chosen
        requests = [request for request, _ in chosen]
        num_steps = max(1, self._limit(requests)) if requests else 1
        if may_admit:
            num_steps = self._admission.run_length(num_steps, self._interval)
        else:
            num_steps = min(num_steps, self._steps_left)
        return [Allotment(request, num_steps) for request in requests]


class _Nothing:
    """No request waits; see `policies.base.Waiting`."""

    def __iter__(self) -> Iterator[Request]:
        return iter(())

    def of(self, request_class: RequestClass) -> Iterator[Request]:
        """Iterate over no request."""
        del request_class
        return iter(())

    def jobs(self) -> Iterator[Request]:
        """No request has a completion time."""
        return iter(())

    def late(self) -> Iterator[Request]:
        """Iterate over no request."""
        return iter(())


def _grow(requests: Iterable[Request], num_tokens: int) -> None:
    """Let requests look as if plans in flight brought them tokens (or take that back)."""
    for request in requests:
        request.num_inflight_samples += num_tokens
        request.num_inflight_tokens += num_tokens
        request.next_position += num_tokens
