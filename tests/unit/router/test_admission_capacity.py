"""No rule ever plans beyond the capacity: what it admits fits by its own forecast, and by brute
force where the rule knows the truth or the worst case."""

from __future__ import annotations

import numpy as np
import pytest
from test_admission import history, make_request, make_rule
from test_future_memory import brute_force_peak

from lightserve.router.admission.base import AdmissionRule, PoolView
from lightserve.router.admission.baselines import OracleAdmission
from lightserve.router.request import Request
from lightserve.types import RequestClass

RULES = ("oracle", "risk", "past-future", "ema", "conservative", "aggressive")


def true_peak(batch: list[Request], lengths: dict[int, int]) -> int:
    base = [request.num_known_tokens for request in batch]
    rest = [lengths[r.key.request_id] - len(r.output_token_ids) for r in batch]
    return brute_force_peak(base, rest)


@pytest.mark.parametrize("name", RULES)
def test_no_admission_plans_beyond_the_capacity(name: str) -> None:
    rng = np.random.default_rng(7)
    truth: dict[int, int] = {}
    oracle = OracleAdmission(lambda request: truth[request.key.request_id])
    rule: AdmissionRule = oracle if name == "oracle" else make_rule(name, history(5, 30, 90))
    num_admitted = num_refused = 0
    for _ in range(150):
        batch = []
        for number in range(int(rng.integers(0, 6))):
            generated = int(rng.integers(1, 50))
            batch.append(make_request(number, prompt=int(rng.integers(1, 80)), generated=generated))
            truth[number] = int(rng.integers(generated + 1, 101))
        capacity = 100 + int(rng.integers(0, 600))
        round_ = rule.begin(list(batch), PoolView(capacity))
        for number in range(10, 18):
            request_class = RequestClass.BE if rng.random() < 0.5 else RequestClass.RT
            newcomer = make_request(
                number, prompt=int(rng.integers(1, 80)), request_class=request_class
            )
            truth[number] = int(rng.integers(1, 101))
            if not round_.admit(newcomer):
                num_refused += 1
                continue
            batch.append(newcomer)
            if len(batch) == 1:
                continue  # alone: what can run at all must run at some time
            num_admitted += 1
            assert sum(request.num_known_tokens for request in batch) <= capacity
            assert round_.forecast_peak is None or round_.forecast_peak <= capacity
            if name == "oracle":
                assert true_peak(batch, truth) <= capacity
            if name == "conservative":
                assert true_peak(batch, {r.key.request_id: 99 for r in batch}) <= capacity
    assert num_admitted > 50 and num_refused > 100
