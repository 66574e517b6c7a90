"""Decodes with time to spare give way: to who would be late, and to prompts that gain more."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import pytest
from support.policy_scenes import (
    BE,
    RT,
    Admitting,
    Queue,
    filled,
    make_limits,
    make_request,
    running_of,
)

from lightserve.messages.common import StepCoefficients
from lightserve.router.policies.unified import UnifiedPolicy
from lightserve.router.request import Request
from lightserve.router.slo import TokenDeadlines
from lightserve.router.step import Reason, Skips
from lightserve.router.step_cost import StepCost
from lightserve.types import SLO

AVERAGE_STEP_S = 0.02


def decode(number: int, residual_ms: float, context: int = 10) -> Request:
    request = make_request(number, RT, prompt=context, output=2)
    request.slo = SLO(tpot_ms=residual_ms)
    request.deadlines = TokenDeadlines(SLO(ttft_ms=residual_ms), 0.0)
    return request


def _coefficients(per_context_s: float) -> StepCoefficients:
    return msgspec.structs.replace(
        StepCoefficients(0.0, 0.0, 1e-4, 0.0, 0.0, 0.0, 0.0, 0.0),
        per_decode_context_s=per_context_s,
    )


def play(
    running: list[Request],
    waiting: list[Request],
    *,
    per_context_s: float = 1e-6,
    average_step_s: float = AVERAGE_STEP_S,
    refused: Collection[int] = (),
) -> tuple[dict[int, int], Skips]:
    """0.1 ms per token, and (unless told otherwise) 1 ms per 1000 tokens of a decode's context."""
    cost = StepCost()
    cost.use_profile(_coefficients(per_context_s))
    in_rows = running_of(running)
    limits = make_limits(
        2048,
        num_free_rows=8,
        step_number=1,
        num_slots=10**6,
        cost=cost,
        average_step_s=average_step_s,
    )
    step = filled(UnifiedPolicy(), in_rows, Queue(waiting), limits, Admitting(refused))
    return {request.arrival_number: count for request, count in step.budget.parts}, step.skips


def test_an_ample_decode_gives_way_to_a_prompt() -> None:
    """Its 5 ms are 50 tokens of a prompt, in a step that is to end after 30 ms."""
    ample, prompt = decode(1, 500, context=5000), make_request(5, BE, prompt=5000)
    shares, skips = play([decode(0, 30), ample], [prompt])
    assert shares == {0: 1, 5: pytest.approx(299, abs=2)}
    assert skips.reason_of(ample) is Reason.TIME


@pytest.mark.parametrize("residual_ms", [31, 60, 69])
def test_one_that_would_be_late_after_one_more_step_stays(residual_ms: float) -> None:
    prompt = make_request(5, BE, prompt=5000)
    shares, _ = play([decode(0, 30), decode(1, residual_ms, context=5000)], [prompt])
    assert shares == {0: 1, 1: 1, 5: pytest.approx(249, abs=2)}


def test_it_stays_where_nothing_is_gained() -> None:
    running, prompt = (
        [decode(0, 30), decode(1, 500, context=5000)],
        make_request(5, BE, prompt=5000),
    )
    shares, _ = play(running, [prompt], per_context_s=0.0)
    assert shares == {0: 1, 1: 1, 5: pytest.approx(298, abs=2)}
    assert play(running, [])[0] == {0: 1, 1: 1}, "time is left: it comes back"


def test_it_stays_while_it_is_not_known_how_long_steps_are() -> None:
    running, prompt = [decode(0, 30), decode(1, 500, context=5000)], make_request(5, BE, prompt=500)
    assert 1 in play(running, [prompt], average_step_s=0.0)[0]


def first_token(number: int, residual_ms: float, num_tokens: int) -> Request:
    request = make_request(number, RT, prompt=num_tokens)
    request.deadlines = TokenDeadlines(SLO(ttft_ms=residual_ms), 0.0)
    return request


def test_an_ample_decode_gives_way_to_one_that_would_be_late() -> None:
    """Together they take 10.2 ms, without it 5.1; its own 5 ms come a step later."""
    tight, ample = decode(0, 8, context=5000), decode(1, 50, context=5000)
    shares, skips = play([tight, ample], [])
    assert shares == {0: 1}
    assert skips.reason_of(ample) is Reason.TIME


def test_an_ample_decode_gives_way_to_a_first_token() -> None:
    """Of the prompt's 10 ms and the decodes' 0.1 and 5 the deadline has 12; with 30, for all."""
    ample = [decode(1, 50), decode(2, 60, context=5000)]
    shares, skips = play(ample, [first_token(5, 12, 100)])
    assert shares == {1: 1, 5: 100}
    assert skips.reason_of(ample[1]) is Reason.TIME and skips.reason_of(ample[0]) is None
    assert play(ample, [first_token(5, 30, 100)])[0].keys() == {1, 2, 5}


@pytest.mark.parametrize(
    ("tight_ms", "ample_ms", "prompt_ms"),
    [
        (8, 27, None),  # it would be late after one more step
        (4, 500, None),  # the other is late even without it
        (-1, 500, None),  # the other is late
        (500, 31, 12),  # for a first token as for others
        (500, 500, 9),  # that is late even alone
    ],
)
def test_none_gives_way_in_vain(tight_ms: float, ample_ms: float, prompt_ms: float | None) -> None:
    running = [decode(0, tight_ms, context=5000), decode(1, ample_ms, context=5000)]
    waiting = [] if prompt_ms is None else [first_token(5, prompt_ms, 100)]
    assert play(running, waiting)[0].keys() >= {0, 1}


@pytest.mark.parametrize(("prompt_ms", "who"), [(13, {0, 1, 5}), (15, {0, 5})])
def test_none_gives_way_to_a_prompt_that_takes_more_steps_than_it_has(
    prompt_ms: float, who: set[int]
) -> None:
    """Beside a decode of 2 ms that is due after 9, its 100 tokens take 14 ms in two steps, not 12.

    With the 5 ms of the other decode there would be three steps, of 21 ms.
    """
    running = [decode(0, 9, context=2000), decode(1, 500, context=5000)]
    assert play(running, [first_token(5, prompt_ms, 100)])[0].keys() == who


@pytest.mark.parametrize(
    ("residual_ms", "context", "who"),
    [
        (50, 5000, {1, 2, 4}),  # they come back: 0.1 ms and 5, behind 12 of the long prompt
        (33, 25000, {4}),  # the first of them takes 25 ms: there is time in the next step
    ],
)
def test_no_other_prompt_makes_those_late_that_gave_way(
    residual_ms: float, context: int, who: set[int]
) -> None:
    """They give way to a first token that is due in 12 ms; one that nothing is due of is first.

    It would take 100 ms. (Found by the storm of the host tier with seed 7815.)
    """
    ample = [decode(1, 60), decode(2, residual_ms, context=context)]
    waiting = [make_request(4, RT, prompt=1000), first_token(5, 12, 100)]
    shares, _ = play(ample, waiting)
    assert shares.keys() == who
    assert shares[4] == pytest.approx(120, abs=1)


def test_those_that_gave_way_to_one_without_memory_come_back() -> None:
    """Together they take 10.2 ms; the first token that they gave way to is due in 6."""
    ample = [decode(1, 50, context=5000), decode(2, 60, context=5000)]
    shares, skips = play(ample, [tight := first_token(5, 6, 50)], refused=(5,))
    assert shares == {1: 1, 2: 1}
    assert skips.reason_of(tight) is Reason.KV_FUTURE


def test_time_that_is_not_lent_is_no_gain() -> None:
    """100 ms are lent, and the nearest deadline is behind that."""
    prompt = make_request(5, BE, prompt=5000)
    shares, _ = play([decode(0, 300), decode(1, 900, context=5000)], [prompt])
    assert shares.keys() == {0, 1, 5}
