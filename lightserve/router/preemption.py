"""When a step does not fit into memory: who waits, and who is preempted. Pure.

Nothing is taken from a request that could merely wait: newcomers stay out first, then prompts
in progress get shorter chunks. Only if a decode still finds no slot is somebody preempted: the
KV goes, the text stays, and the request is recomputed later from the head of the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightserve.router.policies.base import Allotment
from lightserve.router.request import Request, RequestState


@dataclass(frozen=True)
class Fit:
    """What of a step fits, and who must go for it."""

    allotments: tuple[Allotment, ...]
    victims: tuple[Request, ...] = ()

    def __bool__(self) -> bool:
        """Whether anybody advances."""
        return bool(self.allotments)


def fit_into_memory(
    allotments: Sequence[Allotment],
    num_free_slots: int,
    victims_first: Sequence[Request],
    num_freed_by: Callable[[Sequence[Request]], int],
) -> Fit:
    """Return the part of a step that fits into memory.

    Args:
        allotments: what the policy chose, in its order of preference.
        num_free_slots: slots that can be had without taking any from a live request.
        victims_first: running requests that may be preempted, the first to go first.
        num_freed_by: how many slots become free without these requests.
    """
    if sum(map(_num_slots_for, allotments)) <= num_free_slots:
        return Fit(tuple(allotments))
    decodes = [part for part in allotments if part.request.is_decoding]
    prompts = [part for part in allotments if not part.request.is_decoding]
    num_left = num_free_slots - len(decodes)  # a run of several steps is cut to one
    if num_left >= 0 and decodes:
        return Fit(_keep_order(allotments, _trim(prompts, num_left)))
    trimmed = _trim(prompts, num_free_slots) if not decodes else ()
    if trimmed:
        return Fit(trimmed)
    in_progress = [part for part in prompts if part.request.state is RequestState.RUNNING]
    return _preempt(decodes or in_progress[:1], num_free_slots, victims_first, num_freed_by)


def _num_slots_for(part: Allotment) -> int:
    """Return what a share takes: its new tokens, and the cached ones that it will hold on to."""
    request, num_tokens = part
    is_new = request.state is RequestState.WAITING
    return num_tokens + (request.num_pinned_by_start if is_new else 0)


def _trim(prompts: Sequence[Allotment], num_slots: int) -> tuple[Allotment, ...]:
    """Cut chunks where the slots end; a newcomer starts only with its whole chunk."""
    kept: list[Allotment] = []
    for request, num_tokens in prompts:
        is_new = request.state is RequestState.WAITING
        part = Allotment(request, num_tokens if is_new else min(num_tokens, num_slots))
        if part.num_tokens == 0 or _num_slots_for(part) > num_slots:
            break
        kept.append(part)
        num_slots -= _num_slots_for(part)
    return tuple(kept)


def _keep_order(
    allotments: Sequence[Allotment], prompts: Sequence[Allotment]
) -> tuple[Allotment, ...]:
    chunks = {id(request): num_tokens for request, num_tokens in prompts}
    return tuple(
        Allotment(request, chunks.get(id(request), 1))
        for request, _ in allotments
        if request.is_decoding or id(request) in chunks
    )


def _preempt(
    wanted: Sequence[Allotment],
    num_free_slots: int,
    victims_first: Sequence[Request],
    num_freed_by: Callable[[Sequence[Request]], int],
) -> Fit:
    """Preempt until every remaining request of `wanted` finds a slot; nobody for nobody."""
    remaining = list(wanted)
    victims: list[Request] = []
    for victim in victims_first:
        if num_free_slots + num_freed_by(victims) >= len(remaining):
            break
        victims.append(victim)
        remaining = [part for part in remaining if part.request is not victim]
    return Fit(tuple(Allotment(request, 1) for request, _ in remaining), tuple(victims))
