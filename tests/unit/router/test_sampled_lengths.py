"""Sampled lengths of `risk`: how they are distributed, and what they depend on."""

from __future__ import annotations

import numpy as np
import pytest
from test_admission import accepted, make_request

from lightserve.router.admission import risk
from lightserve.router.admission.peak import nums_generated
from lightserve.router.admission.risk import RiskAdmission
from lightserve.router.output_lengths import LengthArray, OutputLengths
from lightserve.router.request import Request
from lightserve.router.request_table import RequestTable

NUM_BINS = 20
CHI_SQUARE_LIMIT = 43.8
"""Exceeded by one in a thousand samples of the right distribution, with 19 degrees of freedom."""


def geometric_history(*, num_lengths: int = 1000) -> OutputLengths:
    lengths = OutputLengths(max_output_tokens=4096)
    for length in np.random.default_rng(2).geometric(1 / 200, num_lengths).tolist():
        lengths.record(length)
    return lengths


def make_rule(lengths: OutputLengths, seed: int = 0) -> RiskAdmission:
    return RiskAdmission(lengths, accepted(), seed=seed)


def generate(requests: list[Request], num_tokens: int) -> None:
    for request in requests:
        request.add_output([1] * num_tokens)


def totals_of(rule: RiskAdmission, requests: list[Request]) -> LengthArray:
    return rule.totals(requests, nums_generated(requests))


def chi_square(samples: np.ndarray, expected: np.ndarray) -> float:
    """Compare samples with equally likely lengths, in bins of about the same probability."""
    edges = np.unique(np.quantile(expected, np.linspace(0, 1, NUM_BINS + 1)[1:-1]))
    shares = np.bincount(np.searchsorted(edges, expected), minlength=len(edges) + 1)
    counts = np.bincount(np.searchsorted(edges, samples), minlength=len(edges) + 1)
    wanted = shares * (len(samples) / len(expected))
    return float(((counts - wanted) ** 2 / wanted).sum())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_over_a_life_samples_are_distributed_as_lengths_beyond_what_is_generated(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(risk, "_RANK_TILT", 0.0)  # the history is the truth
    lengths = geometric_history()
    rule = make_rule(lengths, seed)
    requests = [make_request(number, prompt=1, max_tokens=4096) for number in range(300)]
    table = lengths._lengths[lengths.tables([None])[0]]
    before = totals_of(rule, requests)
    for generated in (0, 30, 150, 400):
        generate(requests, generated - len(requests[0].output_token_ids))
        totals = totals_of(rule, requests)
        assert (totals > generated).all()
        assert (totals >= before).all(), "a forecast does not get shorter as tokens come"
        assert chi_square(totals.ravel(), table[table > generated]) < CHI_SQUARE_LIMIT
        before = totals
    assert chi_square(before.ravel(), table[table > 300]) > 2 * CHI_SQUARE_LIMIT, "it can tell"


def test_requests_are_independent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums over many requests spread as sums of independent lengths do."""
    monkeypatch.setattr(risk, "_RANK_TILT", 0.0)
    lengths = geometric_history()
    requests = [make_request(number, prompt=1, max_tokens=4096) for number in range(1000)]
    generate(requests, 150)
    totals = totals_of(make_rule(lengths), requests).astype(np.float64)
    table = lengths._lengths[lengths.tables([None])[0]].astype(np.float64)
    deviation = table[table > 150].std()
    by_future = totals.sum(axis=0) / np.sqrt(len(requests))
    assert by_future.std() == pytest.approx(deviation, rel=0.25)


def test_samples_depend_on_requests_and_tables_alone() -> None:
    """After a long life with newcomers, lost tokens and news, or from a new rule: the same."""
    rng = np.random.default_rng(4)
    lengths = geometric_history(num_lengths=100)
    kept = make_rule(lengths)
    numbers, rows = iter(range(10_000)), RequestTable(10_000)
    live: list[Request] = []
    for step in range(300):
        live += [
            make_request(next(numbers), prompt=1, max_tokens=int(rng.integers(1, 300)))
            for _ in range(int(rng.integers(0, 4)))
        ]
        for request in live:
            if request.row is None:
                rows.acquire(request)
            request.num_inflight_samples = int(rng.integers(0, 2))
        if step % 3:
            continue
        if step % 10 == 0:
            lengths.record(int(rng.integers(1, 400)))
        generated = [len(r.output_token_ids) + r.num_inflight_samples for r in live]
        totals = totals_of(kept, live)
        fresh = totals_of(make_rule(lengths), live) if step % 30 == 0 else totals
        assert (totals == fresh).all()
        limits = np.array([request.max_tokens for request in live])
        assert (totals <= limits[:, None]).all()
        assert (totals > np.minimum(generated, limits - 1)[:, None]).all()
        generate(live, int(rng.integers(1, 20)))
        live = [r for r in live if len(r.output_token_ids) <= r.max_tokens + 2]
