"""The load client's statistics against cases computed by hand, and against numpy."""

from __future__ import annotations

import itertools
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg

from lightserve import sim as simulated
from lightserve.config import ServeConfig
from lightserve.dashboard import greeting
from lightserve.errors import ConfigError
from lightserve.frontend.request_options import server_slo
from lightserve.loadtest import plots
from lightserve.loadtest.options import Targets
from lightserve.loadtest.result import Record
from lightserve.loadtest.statistics import (
    QUANTILES,
    Measures,
    Window,
    spread,
    summarize,
    weighted_quantile,
)
from lightserve.metrics.recording import Recorder
from lightserve.metrics.requests import FrontendMetrics
from lightserve.sim.report import Seen, is_in_time
from lightserve.types import SLO, FinishReason, RequestClass

ALL = Window(0.0, 10.0)


def record(
    arrival_s: float,
    events_s: list[float],
    *,
    tokens: int | None = None,
    chars: list[int] | None = None,
    error: str | None = None,
    end_s: float | None = None,
) -> Record:
    made = Record(0, "rt", arrival_s, wanted_prompt_tokens=100, wanted_output_tokens=10)
    made.event_times_s = array("d", events_s)
    made.event_chars = array("q", chars or [4] * len(events_s))
    made.output_tokens = tokens
    made.prompt_tokens = None if tokens is None else 110
    made.end_s = end_s if end_s is not None else (events_s[-1] if events_s else None)
    made.error = error
    made.error_detail = f"detail of {error}"
    return made


@pytest.mark.parametrize(("longest_s", "is_met"), [(0.39, True), (0.41, False)])
def test_one_stall_is_judged_alike_by_all(longest_s: float, is_met: bool) -> None:
    """Server, client and simulator: where only the mean has a target, four times that."""
    times_s = [1.0 + 0.01 * n for n in range(10)]
    times_s += [times_s[-1] + longest_s + 0.01 * n for n in range(10)]
    assert Measures(record(0.9, times_s)).is_met(Targets.parse("tpot=100ms")) == is_met
    assert Measures(record(0.9, times_s)).is_met(Targets.of(SLO(tpot_ms=100.0))) == is_met
    seen = Seen(0.9, len(times_s), times_s, is_finished=True, targets=simulated.Targets(tpot_s=0.1))
    assert is_in_time(seen) == is_met
    config = ServeConfig(tpot_slo_ms=100.0)
    request = FrontendMetrics(Recorder()).request(
        RequestClass.RT, arrival_s=0.9, num_prompt_tokens=5, slo=server_slo(config)
    )
    for time_s in times_s:
        request.on_tokens(1, time_s)
    request.on_finish(FinishReason.LENGTH)
    assert request.missed == ([] if is_met else ["mtpot"])
    assert simulated.Targets(tpot_s=0.1).slo() == server_slo(config)
    assert greeting(config)["targets"]["mtpot_s"] == 0.4


def test_one_request_by_hand() -> None:
    one = Measures(record(1.0, [1.5, 1.6, 2.0, 2.1], tokens=4, end_s=2.2))
    assert one.ttft_ms == pytest.approx(500)
    assert one.gaps_ms.tolist() == pytest.approx([100, 400, 100])
    assert one.mtpot_ms == pytest.approx(400)
    assert one.tpot_ms == pytest.approx(200)
    assert one.e2el_ms == pytest.approx(1200)
    assert one.normalized_ms == pytest.approx(300)


def test_an_event_of_several_tokens_is_one_gap_undivided_and_several_per_token() -> None:
    """7 tokens in 3 events; the 4 that are more than events go by characters 0:2:6."""
    one = Measures(record(0.0, [1.0, 1.2, 1.8], tokens=7, chars=[0, 2, 6]))
    assert one.event_tokens.tolist() == pytest.approx([1, 2, 4])
    assert one.gaps_ms.tolist() == pytest.approx([200, 600])
    assert one.tpot_ms == pytest.approx(800 / 6)
    summary = summarize([one], ALL, lambda _: Targets())
    assert summary.tokens_per_event == pytest.approx(7 / 3)
    assert summary.itl_ms.max == pytest.approx(600)
    # 100 ms twice, 150 ms four times
    assert summary.itl_per_token_ms.mean == pytest.approx(800 / 6, abs=1e-3)
    assert summary.itl_per_token_ms.p50 == pytest.approx(150)


def test_tokens_without_usage_are_events() -> None:
    one = Measures(record(0.0, [1.0, 1.1, 1.2]))
    assert one.num_tokens == 3
    assert summarize([one], ALL, lambda _: Targets()).tokens_are_counted_by == "events"


def test_an_answer_without_text_has_a_ttft_and_meets_gap_targets() -> None:
    one = Measures(record(0.0, [], tokens=1, end_s=0.3))
    assert one.ttft_ms == pytest.approx(300)
    assert one.tpot_ms is None and one.mtpot_ms is None
    assert one.is_met(Targets(ttft_ms=400, tpot_ms=1, mtpot_ms=1))
    assert not one.is_met(Targets(ttft_ms=200))


def test_every_arrival_is_in_every_denominator() -> None:
    targets = Targets(ttft_ms=600, mtpot_ms=300)
    records = [
        record(0.0, [0.5, 0.6], tokens=10),  # good
        record(1.0, [1.9, 2.0], tokens=20),  # late first token
        record(2.0, [2.1, 2.9], tokens=30),  # a long gap
        record(3.0, [3.1, 3.2], error="disconnected"),  # everything in time, but cut
        record(4.0, [], error="http_429", end_s=4.01),
        record(5.0, [], error="unfinished", end_s=9.0),
        record(6.0, [], error="http_429", end_s=6.01),
        record(7.0, [7.2, 7.3], tokens=40),  # good
    ]
    summary = summarize([Measures(each) for each in records], ALL, lambda _: targets)
    assert (summary.num_arrivals, summary.num_completed) == (8, 4)
    assert (summary.num_met, summary.num_failed) == (2, 4)
    assert summary.attainment == pytest.approx(2 / 8)
    assert summary.attainment_by_target == pytest.approx({"ttft_ms": 3 / 8, "mtpot_ms": 3 / 8})
    assert summary.goodput_requests_per_s == pytest.approx(0.2)
    assert summary.goodput_tokens_per_s == pytest.approx(5.0)
    assert summary.requests_per_s == pytest.approx(0.4)
    # All tokens that came, those of the request that was cut too (two events without usage).
    assert summary.output_tokens_per_s == pytest.approx((10 + 20 + 30 + 40 + 2) / 10)
    assert {kind: error.count for kind, error in summary.errors.items()} == {
        "disconnected": 1,
        "http_429": 2,
        "unfinished": 1,
    }
    assert summary.errors["http_429"].example == "detail of http_429"


def test_windows_choose_requests_by_arrival_and_tokens_by_their_own_time() -> None:
    records = [
        record(0.0, [0.5, 4.0], tokens=2),
        record(3.0, [3.5, 9.0], tokens=2),
        record(9.0, [9.5], tokens=1),
    ]
    summary = summarize([Measures(each) for each in records], Window(2.0, 8.0), lambda _: Targets())
    assert summary.num_arrivals == 1
    assert summary.output_tokens_per_s == pytest.approx(2 / 6)
    assert summary.requests_per_s == pytest.approx(1 / 6)


def test_without_arrivals_there_is_no_attainment() -> None:
    summary = summarize([], ALL, lambda _: Targets())
    assert summary.attainment is None and summary.ttft_ms.num == 0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_quantiles_are_those_of_numpy(values: list[float]) -> None:
    array_ = np.array(values)
    result = spread(array_)
    expected = np.quantile(array_, [0.5, 0.9, 0.99])
    assert [result.p50, result.p90, result.p99] == pytest.approx(expected.tolist(), abs=1e-4)
    assert result.quantiles[0] == pytest.approx(array_.min(), abs=1e-4)
    assert result.quantiles[-1] == result.max


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=60))
def test_weights_count_a_sample_several_times(samples: list[tuple[int, int]]) -> None:
    values, weights = np.array(samples, dtype=np.float64).T
    at = np.array([0.1, 0.5, 0.9])
    repeated = np.sort(np.repeat(values, weights.astype(int)))
    expected = np.quantile(repeated, at, method="inverted_cdf")
    assert weighted_quantile(values, weights, at).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("ttft=400ms,mtpot=1.5s", Targets(ttft_ms=400, mtpot_ms=1500)),
        ("tpot=50 e2el=60s", Targets(tpot_ms=50, mtpot_ms=200, e2el_ms=60_000)),
        ("tpot=50,mtpot=60", Targets(tpot_ms=50, mtpot_ms=60)),
        ("", Targets()),
    ],
)
def test_targets(text: str, targets: Targets) -> None:
    assert Targets.parse(text) == targets


@pytest.mark.parametrize("text", ["itl=5", "ttft", "ttft=0", "ttft=-1", "ttft=1m", "ttft=x"])
def test_bad_targets(text: str) -> None:
    with pytest.raises(ConfigError):
        Targets.parse(text)


# Plots of the load client: labels that can be read, colours that mean the same everywhere.

FIELDS = [field for field, _ in plots._CDF_FIELDS]


def run_with(lowest_ms: float, highest_ms: float) -> Any:
    """A run whose latencies lie between two values, most of them near the lower one."""
    shares = np.linspace(0.0, 1.0, len(QUANTILES))
    values = lowest_ms + (highest_ms - lowest_ms) * shares**8
    spread = SimpleNamespace(quantiles=list(values))
    summary = SimpleNamespace(targets=SimpleNamespace(), **dict.fromkeys(FIELDS, spread))
    return SimpleNamespace(label="a run", classes={"rt": summary, "be": summary})


@pytest.mark.parametrize(
    ("lowest_ms", "highest_ms"), [(0.02, 0.036), (99_990, 100_030), (3, 9), (1, 50_000)]
)
def test_labels_of_axes_do_not_overlap(lowest_ms: float, highest_ms: float) -> None:
    figure = plots.plot_cdfs([run_with(lowest_ms, highest_ms)])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()  # type: ignore[no-untyped-call]
    for axis in figure.axes:
        low, high = axis.get_xlim()
        labels = [
            (tick, text)
            for tick, text in zip(
                [*axis.get_xticks(), *axis.get_xticks(minor=True)],
                [*axis.get_xticklabels(), *axis.get_xticklabels(minor=True)],
                strict=True,
            )
            if text.get_text() and low <= tick <= high
        ]
        boxes = sorted(
            (text.get_window_extent(renderer) for _, text in labels), key=lambda box: box.x0
        )
        assert len(boxes) >= 2, axis.get_xlabel()
        for left, right in itertools.pairwise(boxes):
            assert left.x1 + 2 < right.x0, [text.get_text() for _, text in labels]
