"""Every admission rule on scenes that can be worked out by hand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.router.admission import ADMISSION_RULES
from lightserve.router.admission.base import AdmissionRule, PoolView
from lightserve.router.admission.baselines import OracleAdmission, PastFutureAdmission
from lightserve.router.admission.risk import (
    LEVEL_STEP,
    MOST_LEVEL,
    NUM_FUTURES,
    AcceptedRisk,
    RiskAdmission,
    peak_at,
)
from lightserve.router.config import make_accepted_risk
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.request import Request, RequestState
from lightserve.types import (
    FrontendId,
    RequestClass,
    RequestId,
    RequestKey,
    SamplingParams,
)


def make_request(
    number: int,
    *,
    prompt: int,
    generated: int = 0,
    max_tokens: int = 100,
    request_class: RequestClass = RequestClass.RT,
) -> Request:
    """A request that has generated something is running with all its KV computed."""
    request = Request(
        key=RequestKey(FrontendId(0), RequestId(number)),
        prompt_token_ids=np.zeros(prompt, dtype=np.int32),
        max_tokens=max_tokens,
        eos_token_ids=frozenset(),
        sampling=SamplingParams(),
        request_class=request_class,
        arrival_s=0.0,
        arrival_number=number,
    )
    if generated:
        request.state = RequestState.RUNNING
        request.output_token_ids = [1] * generated
        request.num_computed_tokens = prompt + generated - 1
    return request


def history(*lengths: int) -> OutputLengths:
    """A full window of the given lengths in equal shares."""
    result = OutputLengths(max_output_tokens=100, window=1000)
    for length in lengths * (1000 // len(lengths)):
        result.record(length)
    return result


def make_rule(name: str, lengths: OutputLengths, **options: float) -> AdmissionRule:
    config = ServeConfig(admission=name, **options)
    return ADMISSION_RULES[name](config, lengths, make_accepted_risk(config), 0)


def accepted(rt: float = 0.05, be: float = 0.2) -> AcceptedRisk:
    return AcceptedRisk({RequestClass.RT: rt, RequestClass.BE: be})


LIVE = [make_request(0, prompt=20, generated=10), make_request(1, prompt=30, generated=5)]
"""They hold 65 tokens. Ending at 20, their peak is 30 + 35 + 2 * 10 = 85 (then 35 + 10 + 5)."""
NEWCOMER = make_request(2, prompt=10)


@pytest.mark.parametrize(
    ("name", "options", "capacity", "admits"),
    [
        # All at max_tokens: 20 + 99 + 30 + 99 + 10 + 99, the last token's KV is never written.
        ("conservative", {}, 357, True),
        ("conservative", {}, 356, False),
        ("conservative", {"overcommit": 2.0}, 179, True),
        ("conservative", {"overcommit": 2.0}, 178, False),
        ("aggressive", {"watermark": 1.0}, 75, True),
        ("aggressive", {"watermark": 1.0}, 74, False),
        ("aggressive", {"watermark": 0.5}, 150, True),
        ("aggressive", {"watermark": 0.5}, 149, False),
        # All end at 20: when the first does, 30 + 35 + 10 are held and all three grew by 10.
        ("past-future", {"reserve": 0.0}, 105, True),
        ("past-future", {"reserve": 0.0}, 104, False),
        ("past-future", {"reserve": 0.5}, 210, True),
        ("past-future", {"reserve": 0.5}, 209, False),
        ("risk", {}, 105, True),
        ("risk", {}, 104, False),
    ],
)
def test_where_each_rule_draws_the_line(
    name: str, options: dict[str, float], capacity: int, admits: bool
) -> None:
    rule = make_rule(name, history(20), **options)
    assert rule.begin(LIVE, PoolView(capacity)).admit(NEWCOMER) is admits


def test_ema_takes_the_average_or_a_tenth_more_and_the_limit_when_busy() -> None:
    lengths = history(20)
    assert lengths.average == pytest.approx(20, abs=0.01)
    rule = make_rule("ema", lengths)
    old = [make_request(0, prompt=20, generated=40)]  # guessed to end at 44
    # Peak: when the old one ends after 4 steps, 60 + 10 + 2 * 4 are held.
    assert rule.begin(old, PoolView(78)).admit(NEWCOMER)
    assert not rule.begin(old, PoolView(77)).admit(NEWCOMER)
    # 59 slots in use of 69 are over 85 %: both are taken to reach max_tokens.
    assert not rule.begin(old, PoolView(69)).admit(NEWCOMER)


def test_oracle_knows() -> None:
    rule = OracleAdmission(lambda request: 12 if request.key.request_id == 0 else 7)
    # Rests are 2, 2 and 7: after two steps 30 + 35 + 10 + 3 * 2 are held.
    assert rule.begin(LIVE, PoolView(81)).admit(NEWCOMER)
    assert not rule.begin(LIVE, PoolView(80)).admit(NEWCOMER)


@pytest.mark.parametrize("name", sorted(ADMISSION_RULES))
def test_an_empty_batch_always_takes_one(name: str) -> None:
    """Otherwise a request that fits alone, but not below a reserve, would wait for ever."""
    round_ = make_rule(name, history(90)).begin([], PoolView(109))
    assert round_.admit(make_request(0, prompt=10, max_tokens=100))
    assert not round_.admit(make_request(1, prompt=100, max_tokens=100))


@pytest.mark.parametrize("name", sorted(ADMISSION_RULES))
def test_the_same_state_gives_the_same_decision(name: str) -> None:
    rule = make_rule(name, history(5, 60, 95))
    for capacity in range(75, 360, 15):
        decisions = {rule.begin(LIVE, PoolView(capacity)).admit(NEWCOMER) for _ in range(5)}
        assert len(decisions) == 1


def test_risk_is_a_calibrated_probability_per_class() -> None:
    """Outputs are 10 or 100 with equal chance; five of six long ones do not fit."""
    lengths = history(10, 100)
    rule = RiskAdmission(lengths, accepted(rt=0.004, be=0.2), seed=1)
    # Six requests of prompt 10; k of them long have a peak of about k * 110.
    live = [make_request(i, prompt=10, generated=1, max_tokens=100) for i in range(5)]
    capacities = {RequestClass.RT: 0, RequestClass.BE: 0}
    for request_class in capacities:
        newcomer = make_request(5, prompt=10, request_class=request_class)
        capacities[request_class] = next(
            capacity
            for capacity in range(100, 700)
            if rule.begin(live, PoolView(capacity)).admit(newcomer)
        )
    # P(six long) = 1/64 > 0.4 %: RT needs room for all. P(five or six) = 7/64 < 20 %: BE for four.
    assert capacities[RequestClass.RT] == pytest.approx(6 * 110, abs=12)
    assert capacities[RequestClass.BE] == pytest.approx(4 * 110, abs=12)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("risk", 105), ("past-future", 105), ("ema", 105), ("conservative", None)],
)
def test_rules_tell_the_peak_they_expect(name: str, expected: int | None) -> None:
    capacity = _most_tokens([*LIVE, NEWCOMER]) - 1
    round_ = make_rule(name, history(20)).begin(LIVE, PoolView(capacity))
    assert round_.forecast_peak is None
    assert round_.admit(NEWCOMER)
    assert round_.forecast_peak == expected
    assert not round_.admit(make_request(3, prompt=400))
    assert round_.forecast_peak == expected, "of those that were admitted"


def _most_tokens(requests: Sequence[Request]) -> int:
    return sum(request.num_prompt_tokens + request.max_tokens for request in requests)


def test_risk_samples_nothing_while_the_limits_of_all_have_room_together() -> None:
    """The same requests are admitted as if it did; what it tells is then their sum."""

    class Sampled(OutputLengths):
        num_draws = 0

        def draw(self, *args: Any) -> Any:
            self.num_draws += 1
            return super().draw(*args)

    rng = np.random.default_rng(3)
    num_admitted, num_refused, num_without = 0, 0, 0
    for _ in range(60):
        lengths = Sampled(max_output_tokens=100)
        for length in rng.integers(1, 100, 30).tolist():
            lengths.record(length)
        live = [
            make_request(i, prompt=int(prompt), generated=int(generated), max_tokens=100)
            for i, (prompt, generated) in enumerate(rng.integers(1, 90, (int(rng.integers(6)), 2)))
        ]
        asked = [make_request(9 + i, prompt=int(rng.integers(1, 90))) for i in range(5)]
        pool = PoolView(int(rng.integers(100, 1500)))
        rule = RiskAdmission(lengths, accepted(), seed=0)
        round_, without = rule.begin(live, pool), rule.begin(live, pool)
        without._is_capped = False
        counted = list(live)
        for request in asked:
            before = lengths.num_draws
            is_admitted = round_.admit(request)
            counted += [request] * is_admitted
            if is_admitted and _most_tokens(counted) <= pool.num_slots:
                assert lengths.num_draws == before
                assert round_.forecast_peak == _most_tokens(counted)
                num_without += 1
            assert without.admit(request) == is_admitted
            num_admitted, num_refused = num_admitted + is_admitted, num_refused + (not is_admitted)
    assert min(num_admitted, num_refused, num_without) > 40


def test_a_short_history_is_trusted_less() -> None:
    """The same lengths seen more often: less room is kept for a history that is wrong."""

    def room_needed(num_recorded: int, seed: int) -> int:
        lengths = OutputLengths(max_output_tokens=100, window=num_recorded)
        for index in range(num_recorded):
            lengths.record(1 + 4 * (index % 25))
        rule = RiskAdmission(lengths, accepted(), seed=seed)
        live = [make_request(i, prompt=10, generated=1, max_tokens=100) for i in range(60)]
        newcomer = make_request(99, prompt=10)
        return next(
            capacity
            for capacity in range(600, 7000, 10)
            if rule.begin(live, PoolView(capacity)).admit(newcomer)
        )

    for seed in range(3):
        assert room_needed(25, seed) > 1.01 * room_needed(1000, seed)


def test_the_quantile_of_sampled_peaks() -> None:
    peaks = np.random.default_rng(4).permutation(np.arange(1, NUM_FUTURES + 1) * 10)
    levels = [-9.0, -1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0]
    found = [peak_at(peaks, level) for level in levels]
    assert found[0] == 10
    assert found[2] == 325, "the median"
    assert found[4] == pytest.approx(10 * (0.8413 * NUM_FUTURES + 0.5), abs=1)
    assert found == sorted(found)
    assert found[-1] - found[-2] == pytest.approx(peaks.std(), abs=1), "beyond the highest"
    assert {peak_at(np.full(NUM_FUTURES, 7), level) for level in levels} == {7}


@pytest.mark.parametrize("share", [0.005, 0.02, 0.1])
def test_as_many_are_evicted_as_is_accepted_whatever_forecasts_are_wrong_by(share: float) -> None:
    """The forecast is off by a deviation to one side, then by two to the other."""
    rng = np.random.default_rng(0)
    risk = accepted(rt=share)
    num_requests = 40_000
    for off in (-1.0, 2.0):
        num_evicted = 0
        for _ in range(num_requests):
            chance = 1.0 - NormalDist().cdf(risk.level(RequestClass.RT) + off)
            if rng.random() < chance:
                risk.note_evicted(RequestClass.RT)
                num_evicted += 1
            risk.note_ended(RequestClass.RT, others_wait=True)
        assert num_evicted / num_requests == pytest.approx(share, rel=0.2)


def test_caution_is_given_up_only_where_that_buys_something_and_by_class() -> None:
    risk = accepted(rt=0.1)
    levels = {request_class: risk.level(request_class) for request_class in RequestClass}
    for _ in range(1000):
        risk.note_ended(RequestClass.RT, others_wait=False)
    assert risk.level(RequestClass.RT) == levels[RequestClass.RT]
    risk.note_evicted(RequestClass.RT)
    assert risk.level(RequestClass.RT) == pytest.approx(levels[RequestClass.RT] + LEVEL_STEP)
    for _ in range(10):
        risk.note_ended(RequestClass.RT, others_wait=True)
    assert risk.level(RequestClass.RT) == pytest.approx(levels[RequestClass.RT])
    assert risk.level(RequestClass.BE) == levels[RequestClass.BE]
    for _ in range(1000):
        risk.note_evicted(RequestClass.BE)
    assert risk.level(RequestClass.BE) == MOST_LEVEL


def test_past_future_draws_more_for_small_batches() -> None:
    """The maximum of more futures is larger: a batch of one needs more room than one of 200."""
    lengths = history(*range(1, 101))
    newcomer = make_request(999, prompt=10)

    def needed(samples: int) -> float:
        rule = PastFutureAdmission(lengths, seed=0, reserve=0.0, samples=samples)
        live = [make_request(0, prompt=10, generated=1)]
        return float(
            np.mean(
                [
                    next(
                        capacity
                        for capacity in range(20, 300, 2)
                        if rule.begin(live, PoolView(capacity)).admit(newcomer)
                    )
                    for step in range(40)
                ]
            )
        )

    assert needed(5) > needed(1) + 15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"watermark": 0.5}, "--watermark needs --admission aggressive, got 'risk'"),
        ({"admission": "risk", "reserve": 0.1}, "--reserve needs --admission past-future"),
        ({"admission": "aggressive", "watermark": 1.5}, "--watermark must be at most 1.0"),
        ({"overcommit": 0.5}, "--overcommit must be at least 1.0"),
    ],
)
def test_options_of_other_rules_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeConfig(**options)  # type: ignore[arg-type]


def test_samples_keep_no_request_alive() -> None:
    """Each would keep its prompt, which may be of a hundred thousand tokens."""
    rule = make_rule("risk", history(5, 60, 95))
    requests = [make_request(number, prompt=10, generated=1) for number in range(20)]
    newcomer = make_request(20, prompt=10)
    before = [sys.getrefcount(request) for request in [*requests, newcomer]]
    assert rule.begin(requests, PoolView(10_000)).admit(newcomer)
    assert [sys.getrefcount(request) for request in [*requests, newcomer]] == before
