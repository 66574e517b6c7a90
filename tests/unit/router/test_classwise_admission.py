"""Admission by class: what real-time requests may count on, what best-effort ones leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from test_admission import history, make_request

from lightserve.config import ServeConfig
from lightserve.router.admission import ADMISSION_RULES, risk
from lightserve.router.admission.base import AdmissionRule, PoolView
from lightserve.router.config import make_accepted_risk, make_admission
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.request import Request
from lightserve.router.request_table import RequestTable
from lightserve.types import RequestClass

RT, BE = RequestClass.RT, RequestClass.BE


def classwise(name: str, lengths: OutputLengths) -> AdmissionRule:
    config = ServeConfig(admission=name)
    return make_admission(config, lengths, make_accepted_risk(config), 0, is_class_aware=True)


def live_and_asked() -> tuple[list[Request], dict[str, Request]]:
    """All end at 20 tokens; when they do, a live one holds 40, a newcomer 30.

    Of two batches that end at once or a step apart, the first ends at its own peak.
    """
    live = [
        make_request(0, prompt=20, generated=10, request_class=RT),
        make_request(1, prompt=20, generated=10, request_class=BE),
    ]
    asked = {
        "rt": make_request(2, prompt=10, request_class=RT),
        "rt2": make_request(3, prompt=10, request_class=RT),
        "be": make_request(4, prompt=10, request_class=BE),
        "be2": make_request(5, prompt=10, request_class=BE),
    }
    return live, asked


# When the live ones end, each newcomer has grown to 20 tokens.
@pytest.mark.parametrize(
    ("order", "pool", "admitted"),
    [
        # Real-time requests see each other: 40 + 20, and another 20. Alone at the end: 2 * 30.
        (["rt"], PoolView(60), ["rt"]),
        (["rt"], PoolView(59), []),
        (["rt", "rt2"], PoolView(80), ["rt", "rt2"]),
        (["rt", "rt2"], PoolView(79), ["rt"]),
        # Best-effort ones see all: 40 + 40 + 20.
        (["be"], PoolView(100), ["be"]),
        (["be"], PoolView(99), []),
        (["rt", "be"], PoolView(120), ["rt", "be"]),
        (["rt", "be"], PoolView(119), ["rt"]),
        # Also a real-time one that is admitted after they were first asked about.
        (["be", "rt", "be2"], PoolView(140), ["be", "rt", "be2"]),
        (["be", "rt", "be2"], PoolView(139), ["be", "rt"]),
        # Real-time ones do not see best-effort newcomers either.
        (["be", "be2", "rt"], PoolView(120), ["be", "be2", "rt"]),
        # The headroom is for real-time ones.
        (["rt", "be"], PoolView(150, headroom=30), ["rt", "be"]),
        (["rt", "be"], PoolView(150, headroom=31), ["rt"]),
        (["rt", "be"], PoolView(60, headroom=1000), ["rt"]),
        # What could not be saved on the host does not start, whatever the pool.
        (["be", "be2", "rt"], PoolView(1000, be_room=lambda: 19), ["be", "rt"]),
        (["be", "be2"], PoolView(1000, be_room=lambda: 20), ["be", "be2"]),
        (["be", "rt"], PoolView(1000, be_room=lambda: 9), ["rt"]),
    ],
)
def test_which_requests_count_for_which(
    order: list[str], pool: PoolView, admitted: list[str]
) -> None:
    live, asked = live_and_asked()
    round_ = classwise("risk", history(20)).begin(live, pool)
    assert [name for name in order if round_.admit(asked[name])] == admitted


@pytest.mark.parametrize("name", sorted(ADMISSION_RULES))
def test_every_rule_by_class(name: str) -> None:
    """Whatever a rule counts: best-effort requests are no obstacle to a real-time one."""
    live, asked = live_and_asked()
    for request in live:
        request.request_class = BE
    rule = classwise(name, history(20))
    round_ = rule.begin(live, PoolView(75))
    assert round_.admit(asked["rt"]), "alone in its class"
    assert not round_.admit(asked["be"])
    round_ = rule.begin([], PoolView(120, headroom=120))
    assert round_.admit(asked["be"]), "it is alone, whatever is to be left free"
    assert not round_.admit(asked["be2"])


def test_a_class_that_is_not_asked_about_is_not_forecast() -> None:
    class Counted(OutputLengths):
        asked: list[list[RequestClass]] = []  # noqa: RUF012

        def tables(self, keys: Any) -> Any:
            self.asked.append([key[0] for key in keys])
            return super().tables(keys)

    lengths = Counted(max_output_tokens=100)
    live, asked = live_and_asked()
    for request in [*live, *asked.values()]:
        request.prediction_key = (request.request_class, "")
    rule = classwise("risk", lengths)
    small = PoolView(200)  # all of them might not have room at their limits
    round_ = rule.begin(live, small)
    assert lengths.asked == []
    round_.admit(asked["rt"])
    assert lengths.asked == [[RT], [RT]]
    lengths.asked.clear()
    rule.begin(live, small).admit(asked["be"])
    assert lengths.asked == [[RT, BE], [BE]]
    lengths.asked.clear()
    assert rule.begin(live, PoolView(10_000)).admit(asked["be"])
    assert lengths.asked == []


def test_the_forecast_peak_is_of_what_the_last_admission_counted() -> None:
    live, asked = live_and_asked()
    round_ = classwise("risk", history(20)).begin(live, PoolView(150))
    assert round_.forecast_peak is None
    assert round_.admit(asked["be"])
    assert round_.forecast_peak == 100
    assert round_.admit(asked["rt"])
    assert round_.forecast_peak == 60


def test_decisions_do_not_depend_on_the_rounds_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random batches of both classes that move on, gain newcomers and lose members.

    Some of the newcomers that were admitted do not start (as when slots are short), some waiting
    ones go away, some rounds are begun three times and some not at all, outputs end and are
    learnt. A rule that has seen it all answers like one that is asked for the first time.
    """
    monkeypatch.setattr(risk, "_NUM_ROWS", 64)  # quick to make
    rng = np.random.default_rng(5)
    num_refused = num_admitted = num_renewed = 0
    for _ in range(5):
        lengths = history(*rng.integers(1, 100, 100).tolist())
        rule = classwise("risk", lengths)
        numbers = iter(range(1000))
        waiting = [_random_request(rng, next(numbers)) for _ in range(6)]
        live: list[Request] = []
        for step in range(50):
            pool = PoolView(700, headroom=60 * (step // 25))
            asked = [waiting[i] for i in rng.permutation(len(waiting))]
            fresh = classwise("risk", lengths).begin(live, pool)
            admitted = [request for request in asked if fresh.admit(request)]
            for _ in range(int(rng.choice([0, 1, 1, 3]))):
                again = rule.begin(live, pool)
                assert admitted == [request for request in asked if again.admit(request)]
                assert again.forecast_peak == fresh.forecast_peak
            num_refused += len(asked) - len(admitted)
            num_admitted += len(admitted)
            before = [*live, *(r for r in admitted if rng.random() < 0.7)]
            live = _move_on(rng, before)
            version = lengths.version
            for request in set(before) - set(live):
                for _ in range(30):
                    lengths.record(len(request.output_token_ids) + 1, request.prediction_key)
            num_renewed += lengths.version - version
            waiting = [r for r in waiting if r not in live and rng.random() < 0.97]
            waiting += [_random_request(rng, next(numbers)) for _ in range(6 - len(waiting))]
    assert min(num_refused, num_admitted, num_renewed) > 10


def _random_request(rng: np.random.Generator, number: int) -> Request:
    request_class = BE if rng.random() < 0.5 else RT
    request = make_request(number, prompt=int(rng.integers(1, 150)), request_class=request_class)
    request.prediction_key = number % 3
    return request


def _move_on(rng: np.random.Generator, live: Sequence[Request]) -> list[Request]:
    """Let most requests generate a token; some lose one that was in flight, a few end."""
    rows = RequestTable(len(live) + 1)
    for request in live:
        if request.row is not None:
            request.leave()
        rows.acquire(request)
        request.num_inflight_samples = 0 if rng.random() < 0.05 else 1
        if rng.random() < 0.8:
            request.add_output([1])
    return [r for r in live if len(r.output_token_ids) < 98 and rng.random() < 0.98]
