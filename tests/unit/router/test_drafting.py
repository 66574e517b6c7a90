"""Drafts are planned where they pay, by measured times and by what came of the last ones."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from support.policy_scenes import make_request, running_of

from lightserve.cost.model import StepModel, StepShape
from lightserve.messages.common import StepCoefficients
from lightserve.router.drafting import FADING, FIRST_CHANCE, Drafting, can_draft
from lightserve.router.request import Request
from lightserve.router.request_table import Decodes
from lightserve.types import MAX_DRAFTS, RequestOutput, SamplingParams

STEP_S = 0.01
BOUND_BY_WEIGHTS = StepCoefficients(STEP_S, 64.0, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0)
"""64 tokens take as long as one."""
BOUND_BY_COMPUTE = StepCoefficients(0.0, 0.0, STEP_S, 0.0, 0.0, 0.0, 0.0, 0.0)


class Scene:
    def __init__(self, requests: list[Request], coefficients: StepCoefficients) -> None:
        self.table = running_of(requests).table
        self.decodes = Decodes(self.table, self.table.rows).kept()
        self.drafting = Drafting(MAX_DRAFTS, self.table)
        self.model = StepModel(coefficients)
        self.choose()

    def choose(self, *, chunk: int = 0, **changes: Any) -> list[int]:
        shape = StepShape().plus_decodes(len(self.decodes), self.decodes.num_context_tokens)
        if chunk:
            shape = shape.plus(0, chunk)
        options = {"room": 1000, "limit_s": 1e9} | changes
        return self.drafting.choose(self.decodes, shape, self.model.seconds, **options).tolist()

    def learn(self, number: int, accepted: int, times: int = 1) -> None:
        for _ in range(times):
            tried = min(MAX_DRAFTS, accepted + 1)
            self.drafting._learn(self.decodes.requests[number], tried, accepted)


def decoding(number: int, **changes: Any) -> Request:
    request = make_request(number, output=5)
    for name, value in changes.items():
        setattr(request, name, value)
    return request


def test_free_tokens_are_all_taken() -> None:
    scene = Scene([decoding(0), decoding(1)], BOUND_BY_WEIGHTS)
    assert scene.choose() == [MAX_DRAFTS] * 2


def test_none_where_a_token_costs_what_it_is_worth() -> None:
    scene = Scene([decoding(number) for number in range(4)], BOUND_BY_COMPUTE)
    assert scene.choose() == []
    scene.learn(0, MAX_DRAFTS, 50)  # even if nearly all are right
    assert scene.choose() == []


def test_as_many_as_pay_and_to_the_row_that_is_right() -> None:
    """A token costs a fifth of the step of one row."""
    costs = msgspec.structs.replace(BOUND_BY_WEIGHTS, knee=2.0, per_new_s=STEP_S / 5)
    scene = Scene([decoding(0), decoding(1)], costs)
    scene.learn(0, MAX_DRAFTS, 30)
    scene.learn(1, 0, 30)
    right, wrong = scene.choose()
    assert right > 2 and wrong == 0


@pytest.mark.parametrize("is_reading", [False, True])
def test_one_that_is_wrong_again_and_again_is_left(is_reading: bool) -> None:
    """And tries again after a while; where contexts are long to read, or tokens to compute."""
    costs = {"per_chunk_pair_s": 2e-3 / 12} if is_reading else {"knee": 1.0, "per_new_s": 2e-3}
    scene = Scene([decoding(0)], msgspec.structs.replace(BOUND_BY_WEIGHTS, **costs))
    assert scene.choose()
    scene.learn(0, 0, 60)
    scene.drafting._keys.clear()  # of others of its key it knows nothing
    assert scene.choose() == []
    num_steps = next(number for number in range(10_000) if scene.choose())
    assert 10 < num_steps < 10 / (1 - FADING)


def test_a_new_request_begins_with_what_its_key_had() -> None:
    first, other = decoding(0, prediction_key="a"), decoding(1, prediction_key="b")
    scene = Scene([first, other], BOUND_BY_WEIGHTS)
    scene.learn(0, 0, 100)
    scene.table.release(first)
    newcomer = decoding(2, prediction_key="a")
    scene.table.acquire(newcomer)
    scene.decodes = Decodes(scene.table, scene.table.rows).kept()
    scene.drafting._most_of(scene.decodes)
    chances = dict(zip(scene.decodes.requests, scene.drafting._chances(scene.decodes), strict=True))
    assert chances[newcomer] < 0.1 < chances[other] == pytest.approx(FIRST_CHANCE)


def test_bounds() -> None:
    """The last token, memory, a deadline that is kept without; none of those that may not."""
    short = decoding(0, max_tokens=5 + 1 + 3)  # of which one is in the step
    grammar = decoding(1, constraint=object())
    scene = Scene([short, grammar, decoding(2)], BOUND_BY_WEIGHTS)
    assert scene.choose() == [3, 0, MAX_DRAFTS]
    assert sum(scene.choose(room=5)) == 5
    assert scene.choose(room=0) == []
    costs = msgspec.structs.replace(BOUND_BY_WEIGHTS, knee=3.0, per_new_s=STEP_S / 100)
    scene = Scene([decoding(number) for number in range(3)], costs)
    num_all = sum(scene.choose())
    assert 0 < sum(scene.choose(limit_s=1.02 * STEP_S)) <= 2 < num_all
    assert sum(scene.choose(limit_s=0.9 * STEP_S)) == num_all  # late in any case


def test_a_late_row_gets_them_for_what_they_cost() -> None:
    chance = FIRST_CHANCE
    costs = StepCoefficients(STEP_S, 1.0, STEP_S * chance / 1.1, 0.0, 0.0, 0.0, 0.0, 0.0)
    scene = Scene([decoding(0)], costs)
    assert scene.choose() == []
    assert scene.choose(is_late=np.array([True])) == [1]


@pytest.mark.parametrize(
    ("changes", "can"),
    [
        ({}, True),
        ({"sampling": SamplingParams(temperature=0.7, logit_bias=((5, 1.0),), min_tokens=3)}, True),
        ({"sampling": SamplingParams(frequency_penalty=0.1, repetition_penalty=1.1)}, True),
        ({"output": RequestOutput.VECTOR}, False),
        ({"constraint": object()}, False),
    ],
)
def test_who_may_have_drafts(changes: dict[str, Any], can: bool) -> None:
    assert can_draft(decoding(0, **changes)) is can
