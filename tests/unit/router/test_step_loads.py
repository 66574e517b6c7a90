"""How much of requests that resume comes back beside a step, and for which that is free."""

from __future__ import annotations

import math

import pytest

from lightserve.router.policies.step_budget import CopyTimes, StepLoads

STEP_S, TOKEN_S = 0.01, 1e-4


def make_loads(*, overlaps: bool = True, token_s: float = TOKEN_S) -> StepLoads:
    def seconds(num_tokens: int) -> float:
        return token_s * num_tokens

    return StepLoads(CopyTimes(seconds, seconds, overlaps))


def add_beside(loads: StepLoads, num_lacking: int, limit_s: float) -> int:
    num_tokens = loads.tokens_beside(num_lacking, STEP_S, limit_s)
    loads.add_beside(num_tokens)
    return num_tokens


def test_beside_a_step_comes_what_the_link_can_do_in_its_time() -> None:
    loads = make_loads()
    most = int(STEP_S / TOKEN_S)
    assert add_beside(loads, 40, 0.0) == 40
    assert add_beside(loads, 500, 0.0) == most - 40
    assert loads.seconds() == 0.0, "not waited for"
    assert add_beside(loads, 1, 0.0) == 0


def test_where_nothing_overlaps_it_takes_the_time_that_is_left() -> None:
    loads = make_loads(overlaps=False)
    loads.wait_for(30)
    limit_s = STEP_S + 100.5 * TOKEN_S
    assert add_beside(loads, 500, limit_s) == 70
    assert loads.seconds() == pytest.approx(100 * TOKEN_S)
    assert loads.seconds(5) == pytest.approx(105 * TOKEN_S)
    assert add_beside(loads, 500, limit_s) == 0
    assert add_beside(loads, 500, 0.0) == 0, "there is less than no time"


@pytest.mark.parametrize(
    ("overlaps", "num_lacking", "due_s", "is_free"),
    [
        (True, 500, math.inf, True),
        (False, 500, math.inf, False),
        (True, 80, 2 * STEP_S, True),  # one step, and that in which it runs
        (True, 80, 1.9 * STEP_S, False),
        (True, 550, 7 * STEP_S, True),  # six steps of 100 tokens
        (True, 550, 6.9 * STEP_S, False),
        (True, 1, -0.1, False),
    ],
)
def test_it_is_free_unless_its_own_deadline_is_too_near(
    overlaps: bool, num_lacking: int, due_s: float, is_free: bool
) -> None:
    loads = make_loads(overlaps=overlaps)
    assert loads.is_free_for(num_lacking, STEP_S, due_s) is is_free


def test_none_loads_beside_nothing_or_for_an_unknown_time() -> None:
    assert make_loads().can_go_beside(500, STEP_S)
    assert not make_loads().can_go_beside(500, 0.0)
    assert not make_loads(token_s=0.0).can_go_beside(500, STEP_S)
