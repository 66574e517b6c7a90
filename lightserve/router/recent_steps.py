"""The last steps in short, for people that look at the dashboard; nothing is decided by them.

Steps are noted only while they are asked for, so that they cost nothing otherwise.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from lightserve.messages.frontend_router import StepNote
from lightserve.router.step import PlannedStep
from lightserve.types import RequestClass, StepId

MAX_STEPS = 48
WATCH_S = 5.0
"""So long after a question steps are noted for the next one."""


@dataclass(slots=True)
class _Noted:
    step: PlannedStep
    sent_s: float
    num_decodes: dict[RequestClass, int]
    """Rows change hands: counted when it is sent."""
    exec_s: float | None = None


class RecentSteps:
    """Belongs to the router's loop."""

    def __init__(self) -> None:
        self._watched_until_s = float("-inf")
        self._noted: deque[_Noted] = deque(maxlen=MAX_STEPS)

    def on_commit(self, step: PlannedStep, now_s: float) -> None:
        """Note a step that is sent; call before the core books it."""
        if now_s < self._watched_until_s:
            num_decodes = {each: step.decodes.count(each) for each in RequestClass}
            self._noted.append(_Noted(step, now_s, num_decodes))
        else:
            self._noted.clear()

    def on_result(self, step_id: StepId, exec_s: float) -> None:
        """Note what a step took."""
        for noted in reversed(self._noted):
            if noted.step.step_id == step_id:
                noted.exec_s = exec_s
                return

    def tell(self, now_s: float) -> list[StepNote]:
        """Return what was noted, oldest first, and note what comes for `WATCH_S`."""
        if now_s >= self._watched_until_s:
            self._noted.clear()
        self._watched_until_s = now_s + WATCH_S
        return [_told(noted, now_s) for noted in self._noted]


def _told(noted: _Noted, now_s: float) -> StepNote:
    step = noted.step
    num_requests, num_tokens = Counter(noted.num_decodes), Counter(noted.num_decodes)
    for request, count in step.chunks:
        num_requests[request.request_class] += 1
        num_tokens[request.request_class] += count
    return StepNote(
        step_id=step.step_id,
        age_s=now_s - noted.sent_s,
        predicted_s=float(step.predicted_s),
        limit_s=None if step.limit_s in (None, float("inf")) else float(step.limit_s or 0.0),
        exec_s=noted.exec_s,
        num_requests={each: count for each, count in num_requests.items() if count},
        num_tokens={each: count for each, count in num_tokens.items() if count},
        num_paused=len(step.paused),
        num_preempted=len(step.preempted),
        left_out={
            each: {reason.value: count for reason, count in reasons.items()}
            for each, reasons in step.left_out.count().items()
            if reasons
        },
        unseen={
            each: {unseen.stopped_by.value: unseen.num_requests}
            for each, unseen in step.unseen.items()
            if unseen.stopped_by is not None and unseen.num_requests
        },
    )
