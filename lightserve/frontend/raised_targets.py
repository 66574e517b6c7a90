"""What an answer says of targets that no server could have met: `slo`, on every route.

It is there only if the router schedules by others than were asked for (architecture 7). A whole
answer has it once; in a stream the first event of each choice has it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.frontend.generation import Generation
from lightserve.frontend.json_body import StrictModel
from lightserve.types import SLO

_DIGITS = 3


class TargetsObject(StrictModel):
    """Targets in the units of a request's `slo`; those that there are."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    mtpot_ms: float | None = None
    completion_s: float | None = None


class RaisedSLOObject(StrictModel):
    """`slo` of an answer."""

    asked: TargetsObject
    """By the request, or else by the server for it; attainment is judged by these."""
    scheduled: TargetsObject
    """What it is scheduled by."""


def raised_slo(generations: Sequence[Generation]) -> dict[str, dict[str, float]] | None:
    """Return `slo` of an answer with these completions, None if all are scheduled as asked.

    Of several, the loosest targets count.
    """
    if all(generation.scheduled_slo is None for generation in generations):
        return None
    asked = generations[0].request.slo  # one request, one set of targets
    scheduled = [_targets(g.scheduled_slo or asked) for g in generations]
    loosest = {name: max(slo[name] for slo in scheduled) for name in scheduled[0]}
    return {"asked": _targets(asked), "scheduled": loosest}


def _targets(slo: SLO) -> dict[str, float]:
    values = {name: getattr(slo, name) for name in SLO.__struct_fields__}
    return {name: round(value, _DIGITS) for name, value in values.items() if value is not None}
