"""Who of a class loses memory first: the orders of `--victims` but `newest`, which is none.

Each says of a request how well it can be done without; those of the greatest number lose memory
first. The oldest of a class is always the last, whatever they say (`Planner.holders`): so one that
all others take from in turn is not among them for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lightserve.router.encoding import NO_ENCODING, Encoding
from lightserve.router.kv.cache import KVStore
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.request import Request
from lightserve.router.request_table import DueTimes
from lightserve.router.step_cost import StepCost, StepShape
from lightserve.types import BE


class VictimView(NamedTuple):
    """State that the orders read."""

    kv: KVStore
    due: DueTimes
    cost: StepCost
    lengths: OutputLengths
    encoding: Encoding = NO_ENCODING


Dispensability = Callable[[Request, VictimView], float]


def emptiest(request: Request, view: VictimView) -> float:
    """BROS, section V-B: best-effort blocks with most free slots, then by the time that is left."""
    if request.request_class is BE:
        return float(view.kv.num_free_beside(request))
    return view.due.of(request)


def latest(request: Request, view: VictimView) -> float:
    """AccelGen, Algorithm 1: the request with most time left."""
    return view.due.of(request)


def cheapest(request: Request, view: VictimView) -> float:
    """AccelGen, section 8: least to compute again per slot; those that are soon done stay."""
    num_held = max(1, request.num_held_tokens)
    again_s = view.cost.work(StepShape().plus(0, num_held))
    again_s = (again_s + view.encoding.seconds_left(request, 0, num_held)) / num_held
    num_output = len(request.output_token_ids) + request.num_inflight_samples
    num_to_come = max(1.0, min(request.max_tokens, view.lengths.average) - num_output)
    return num_to_come / again_s if again_s > 0 else num_to_come


VICTIMS: dict[str, Dispensability | None] = {
    "newest": None,
    "emptiest": emptiest,
    "latest": latest,
    "cheapest": cheapest,
}
"""By `--victims`."""
