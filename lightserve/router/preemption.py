"""Memory and rows for a step: what of it fits, and from whom the rest is taken. Pure, a dry run.

Requests that hold KV have an order of seniority: (for class-aware policies) real-time before
best-effort, in a class running before paused, then order of admission and of the queue. Whoever
needs more than there is free or cached takes it from those strictly behind, the last first:

    paused ones      lose tokens from the end of their KV, saved on the host
    running ones     are paused first; then the same
    and if that is not enough, or nothing is saved (--preemption recompute), they lose all of it

Nothing is taken unless it makes the taker fit, so nobody is paused for nothing, and nobody can
take back what it lost to a senior (no ping-pong; architecture 6, invariant 6). A newcomer that
never ran is junior to all of its class and takes from other classes alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

from lightserve.router.fit import Fit, of_running
from lightserve.router.kv.cache import KVStore
from lightserve.router.placement import Placement
from lightserve.router.reasons import Reason
from lightserve.router.request import Request
from lightserve.router.request_table import Decodes
from lightserve.router.shares import Allotment, Loading, Share, each_allotment
from lightserve.types import RT, RequestClass


def fit_into_memory(
    shares: Sequence[Share],
    kv: KVStore,
    holders: Callable[[], Sequence[Request]],
    num_free_rows: int,
    *,
    is_class_aware: bool,
) -> Fit:
    """Return the part of a step that fits.

    Args:
        shares: what the policy chose, in its order of preference.
        kv: the pool as it is.
        holders: returns the running and paused requests, the most senior first.
        num_free_rows: rows that newcomers get without anybody's stopping.
        is_class_aware: whether a real-time newcomer may take from best-effort requests.

    What is reserved for real-time's cache gives way where nobody could ever advance otherwise: a
    best-effort request may need more than the rest of the pool.
    """
    num_reserved = kv.num_reserved_for_rt
    holders = functools.cache(holders)

    def attempt(num_reserved: int, pinned: Iterable[Request] = ()) -> tuple[Fit, list[Request]]:
        plan = Placement(kv, holders, num_free_rows, num_reserved, is_class_aware=is_class_aware)
        plan.pin(pinned)
        return _fit(shares, plan, is_class_aware=is_class_aware), plan.robbed

    fit, robbed = attempt(num_reserved)
    if robbed:
        spared, _ = attempt(num_reserved, robbed)
        if _real_time(fit) < _real_time(spared):
            return spared
    if fit or num_reserved == 0 or any(holder.num_inflight_steps for holder in holders()):
        return fit
    return attempt(0)[0]


def _real_time(fit: Fit) -> set[Allotment]:
    return {part for part in each_allotment(fit.parts) if part.request.request_class is RT}


def _fit(shares: Sequence[Share], plan: Placement, *, is_class_aware: bool) -> Fit:
    """Place what fits, in order."""
    if is_class_aware:
        running = [part for part in shares if of_running(part)]
        plan.make_room_for([part for part in running if not isinstance(part, Loading)])
    refused: dict[Request, Reason] = {}
    shut: set[RequestClass] = set()
    for is_running, parts in itertools.groupby(shares, key=of_running):
        if is_running:
            plan.place_running([part for part in parts if not isinstance(part, Loading)], refused)
            continue
        for part in parts:
            assert not isinstance(part, Decodes)
            request = part.request
            if request.request_class in shut:
                refused[request] = Reason.ORDER
            elif (reason := plan.place_waiting(part)) is not None:
                refused[request] = reason
                shut.add(request.request_class)  # nobody of a class passes another here
    return plan.result(refused)
