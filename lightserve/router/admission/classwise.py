"""Admission by class: best-effort memory is a loan that real-time requests may call in.

A real-time request is tested against the future of real-time requests alone, in the whole pool:
whatever best-effort ones hold can be taken from them. A best-effort request is tested against
the future of all, in the pool less the burst headroom; and it has to leave the host room for
all that real-time requests may come to take from its class (`PoolView.be_room`), as what cannot be
saved is computed again. So real-time requests are evicted
as rarely as their own risk says, and best-effort ones absorb the rest.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lightserve.router.admission.base import AdmissionRound, AdmissionRule, PoolView
from lightserve.router.admission.peak import SharedPrefixes
from lightserve.router.request import Request
from lightserve.types import BE, RT, RequestClass


class ClasswiseAdmission:
    """Asks `rt_rule` about real-time requests and `be_rule` about best-effort ones."""

    def __init__(self, rt_rule: AdmissionRule, be_rule: AdmissionRule) -> None:
        self._rules = {RT: rt_rule, BE: be_rule}

    def begin(self, live: Collection[Request], pool: PoolView) -> ClasswiseRound:
        """Start a round; a class that is not asked about costs nothing."""
        return ClasswiseRound(self._rules, list(live), pool)


class ClasswiseRound:
    """An `AdmissionRound` that begins one of each class when it is first asked about it."""

    def __init__(
        self, rules: dict[RequestClass, AdmissionRule], live: list[Request], pool: PoolView
    ) -> None:
        self._rules = rules
        self._counted = live
        """All with a share in the future, those admitted in this round at the end."""
        self._pool = pool
        self._num_brought = 0
        """Tokens that best-effort newcomers of this round bring."""
        self._shared: SharedPrefixes | None = None
        self._rounds: dict[RequestClass, AdmissionRound] = {}
        self.forecast_peak: int | None = None
        """By the rule that admitted last: what real-time requests need, or all."""

    def admit(self, request: Request) -> bool:
        """Admit by the rule of its class; it counts for later ones of both classes."""
        request_class = request.request_class
        is_newcomer = request_class is BE and request.num_requeues == 0
        num_brought = 0
        be_room = self._pool.be_room() if is_newcomer else None
        if be_room is not None:
            num_brought = request.num_known_tokens + request.recurrent.num_slots
            num_brought -= self._best_effort().num_held_of(request)
            if be_room - self._num_brought < num_brought:
                return False
        if not self._round_of(request_class).admit(request):
            return False
        self._counted.append(request)
        if be_room is not None:
            self._num_brought += num_brought
            self._best_effort().add(request)
        self.forecast_peak = self._rounds[request_class].forecast_peak
        if request_class is RT:  # best-effort ones have to be forecast again
            self._rounds.pop(BE, None)
        return True

    def _best_effort(self) -> SharedPrefixes:
        """Return what those of the class read together, which takes room once."""
        if self._shared is None:
            self._shared = SharedPrefixes(
                (r for r in self._counted if r.request_class is BE), self._pool.found
            )
        return self._shared

    def _round_of(self, request_class: RequestClass) -> AdmissionRound:
        if request_class not in self._rounds:
            self._rounds[request_class] = self._begin(request_class)
        return self._rounds[request_class]

    def _begin(self, request_class: RequestClass) -> AdmissionRound:
        counted, pool = self._counted, self._pool
        if request_class is RT:
            counted = [r for r in counted if r.request_class is RT]
        else:
            num_slots = max(0, pool.num_slots - pool.headroom)
            pool = replace(pool, num_slots=num_slots, headroom=0)
        return self._rules[request_class].begin(counted, pool)
