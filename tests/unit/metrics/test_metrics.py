"""Recording, summing over processes, rendering; and the page made from the catalogue."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

import lightserve
from lightserve.errors import ProtocolError
from lightserve.messages.supervision import MetricSample
from lightserve.metrics import catalogue
from lightserve.metrics.catalogue import all_families
from lightserve.metrics.recording import (
    MAX_SERIES_PER_FAMILY,
    OTHER,
    Family,
    Histogram,
    Kind,
    Recorder,
)
from lightserve.metrics.requests import FrontendMetrics, RequestMetrics
from lightserve.metrics.turns import TurnClock, TurnSelector
from lightserve.supervisor.metrics import Ledger, make_registry
from lightserve.types import NO_SLO, SLO, FinishReason, RequestClass
from tools.metrics_page import document

BOUNDS = (0.1, 0.5, 1.0)


def values_of(ledger: Ledger) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every line of the rendered text: (name, labels but the common ones) -> value."""
    text = generate_latest(make_registry(ledger, "tiny")).decode()
    lines = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == ("tiny", "0")
            lines[sample.name, frozenset(labels.items())] = sample.value
    return lines


def line(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return f"lightserve_{name}", frozenset(labels.items())


@given(st.lists(st.floats(0, 2) | st.sampled_from(BOUNDS)))
def test_a_bucket_counts_what_is_at_most_its_bound(values: list[float]) -> None:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    total, *counts = histogram.values()
    assert total == pytest.approx(sum(values))
    at_most = [sum(value <= bound for value in values) for bound in BOUNDS]
    assert [sum(counts[: index + 1]) for index in range(len(BOUNDS))] == at_most
    assert sum(counts) == len(values)


def test_the_ledger_adds_processes_up_and_never_falls_over_a_restart() -> None:
    ledger = Ledger()

    def frontend(tokens: int, in_flight: int, gaps: list[float]) -> list[MetricSample]:
        recorder = Recorder()
        recorder.counter(catalogue.GENERATION_TOKENS, "rt").value = tokens
        recorder.gauge(catalogue.REQUESTS_IN_FLIGHT).value = in_flight
        for gap_s in gaps:
            recorder.histogram(catalogue.INTER_TOKEN_LATENCY, "rt").observe(gap_s)
        return recorder.snapshot()

    tokens = line("generation_tokens_total", request_class="rt")
    in_flight = line("http_requests_in_flight")
    num_gaps = line("inter_token_latency_seconds_count", request_class="rt")
    gaps_s = line("inter_token_latency_seconds_sum", request_class="rt")
    fast = line("inter_token_latency_seconds_bucket", request_class="rt", le="0.01")

    ledger.update("frontend-0-0", frontend(10, 2, [0.004]))
    ledger.update("frontend-0-0", frontend(12, 3, [0.004, 0.02]))  # replaces what it said before
    ledger.update("frontend-1-0", frontend(5, 1, [0.3]))
    lines = values_of(ledger)
    assert (lines[tokens], lines[in_flight], lines[num_gaps], lines[fast]) == (17, 4, 3, 1)
    assert lines[gaps_s] == pytest.approx(0.324)

    ledger.retire("frontend-0-0")
    lines = values_of(ledger)
    assert (lines[tokens], lines[in_flight], lines[num_gaps], lines[fast]) == (17, 1, 3, 1)

    ledger.update("frontend-0-1", frontend(1, 7, []))
    ledger.retire("frontend-0-1")
    ledger.retire("frontend-0-1")  # nothing is counted twice
    ledger.retire("never-heard-of")
    lines = values_of(ledger)
    assert (lines[tokens], lines[in_flight], lines[num_gaps]) == (18, 1, 3)


@pytest.mark.parametrize(
    "sample",
    [
        MetricSample("lightserve_nothing", [], [1.0]),
        MetricSample(catalogue.GENERATION_TOKENS.name, [], [1.0]),
        MetricSample(catalogue.GENERATION_TOKENS.name, ["rt", "x"], [1.0]),
        MetricSample(catalogue.GENERATION_TOKENS.name, ["rt"], []),
        MetricSample(catalogue.INTER_TOKEN_LATENCY.name, ["rt"], [1.0]),
    ],
)
def test_the_ledger_refuses_what_is_not_in_the_catalogue(sample: MetricSample) -> None:
    ledger = Ledger()
    ledger.update("a", [MetricSample(catalogue.STEPS.name, [], [3.0])])
    with pytest.raises(ProtocolError):
        ledger.update("a", [sample])
    assert values_of(ledger) == {line("steps_total"): 3.0}


def test_names_end_as_their_kinds_do() -> None:
    for family in all_families():
        assert family.name.endswith("_total") == (family.kind is Kind.COUNTER), family.name


def test_every_family_is_rendered_as_its_kind() -> None:
    recorder = Recorder()
    for family in all_families():
        labels = [f"{label}-1" for label in family.labels]
        if family.kind is Kind.HISTOGRAM:
            recorder.histogram(family, *labels).observe(family.buckets[0])
        elif family.kind is Kind.COUNTER:
            recorder.counter(family, *labels).value = 4.0
        else:
            recorder.gauge(family, *labels).value = -1.5
    ledger = Ledger()
    ledger.update("all", recorder.snapshot())
    lines = values_of(ledger)
    for family in all_families():
        labels = {label: f"{label}-1" for label in family.labels}
        name = family.name.removeprefix("lightserve_")
        if family.kind is Kind.HISTOGRAM:
            buckets = [
                value
                for (bucket_name, bucket_labels), value in lines.items()
                if bucket_name == f"{family.name}_bucket"
            ]
            assert buckets == [1.0] * (len(family.buckets) + 1)
            assert lines[line(f"{name}_count", **labels)] == 1.0
            assert lines[line(f"{name}_sum", **labels)] == family.buckets[0]
            assert list(family.buckets) == sorted(set(family.buckets))
        else:
            assert lines[line(name, **labels)] == (4.0 if family.kind is Kind.COUNTER else -1.5)
            assert name.endswith("_total") == (family.kind is Kind.COUNTER)


def test_series_of_a_family_are_bounded() -> None:
    recorder = Recorder()
    for number in range(MAX_SERIES_PER_FAMILY + 1000):
        recorder.counter(catalogue.REQUEST_FAILURE, "rt", f"code-{number}").value += 1
    samples = recorder.snapshot()
    assert len(samples) == MAX_SERIES_PER_FAMILY + 1
    assert samples[-1] == MetricSample(catalogue.REQUEST_FAILURE.name, [OTHER, OTHER], [1000.0])


SLACK_MS = 1e-6
"""Times are exact binary fractions away from each other only up to rounding."""
TARGETS = SLO(*(value + SLACK_MS for value in (1000.0, 100.0, 400.0)))


@pytest.mark.parametrize(
    ("token_times_s", "end", "met"),
    [
        # arrival is at 100
        ([100.5, 100.6, 100.7], "stop", {"ttft", "tpot", "mtpot", "all"}),
        ([101.0, 101.1], "length", {"ttft", "tpot", "mtpot", "all"}),
        ([101.1, 101.2], "stop", {"tpot", "mtpot"}),
        ([100.5, 100.55, 101.0, 101.05], "stop", {"ttft"}),  # tpot 0.18, gap 0.45
        ([100.5, 100.55, 100.6, 100.65, 100.99], "stop", {"ttft", "mtpot"}),
        ([100.5, 100.55, 100.6, 100.65, 101.06], "stop", {"ttft"}),
        ([100.5], "stop", {"ttft", "tpot", "mtpot", "all"}),
        ([], "stop", {"ttft", "tpot", "mtpot", "all"}),
        ([100.5, 100.6], "abort", set()),
        ([], "overloaded", set()),
        ([100.5], "worker_lost", set()),
    ],
)
def test_a_request_is_judged_by_its_targets(
    token_times_s: list[float], end: str, met: set[str]
) -> None:
    recorder = Recorder()
    metrics = FrontendMetrics(recorder)
    request = metrics.request(RequestClass.RT, arrival_s=100.0, num_prompt_tokens=7, slo=TARGETS)
    for now_s in token_times_s:
        request.on_tokens(1, now_s)
    _end(request, end)
    _end(request, "stop")  # only the first end counts
    ledger = Ledger()
    ledger.update("frontend", recorder.snapshot())
    lines = values_of(ledger)
    for target in ("ttft", "tpot", "mtpot", "all"):
        outcome = "met" if target in met else "missed"
        key = line("slo_requests_total", request_class="rt", target=target, outcome=outcome)
        assert lines[key] == 1, target
    is_good = "all" in met
    assert lines[line("goodput_requests_total", request_class="rt")] == is_good
    num_good_tokens = len(token_times_s) if is_good else 0
    assert lines[line("goodput_tokens_total", request_class="rt")] == num_good_tokens
    ended = sum(
        value
        for (name, _), value in lines.items()
        if name in ("lightserve_request_success_total", "lightserve_request_failure_total")
    )
    assert ended == 1


def _end(request: RequestMetrics, end: str) -> None:
    if end == "abort":
        request.on_abort()
    elif end in ("stop", "length"):
        request.on_finish(FinishReason(end))
    else:
        request.on_failure(end)


def test_latencies_and_tokens_of_a_request() -> None:
    recorder = Recorder()
    metrics = FrontendMetrics(recorder)
    request = metrics.request(RequestClass.BE, arrival_s=10.0, num_prompt_tokens=300, slo=NO_SLO)
    for num_tokens, now_s in ((1, 10.25), (1, 10.5), (3, 12.5)):
        request.on_tokens(num_tokens, now_s)
    request.on_finish(FinishReason.LENGTH)
    ledger = Ledger()
    ledger.update("frontend", recorder.snapshot())
    lines = values_of(ledger)
    for name, count, total in (
        ("time_to_first_token_seconds", 1, 0.25),
        ("inter_token_latency_seconds", 2, 2.25),
        ("time_per_output_token_seconds", 1, 2.25 / 4),
        ("max_inter_token_latency_seconds", 1, 2.0),
        ("e2e_request_latency_seconds", 1, 2.5),
        ("request_prompt_tokens", 1, 300),
        ("request_generation_tokens", 1, 5),
    ):
        assert lines[line(f"{name}_count", request_class="be")] == count, name
        assert lines[line(f"{name}_sum", request_class="be")] == pytest.approx(total), name
        assert lines[line(f"{name}_count", request_class="rt")] == 0, name
    assert lines[line("prompt_tokens_total", request_class="be")] == 300
    assert lines[line("generation_tokens_total", request_class="be")] == 5
    key = line("request_success_total", request_class="be", finished_reason="length")
    assert lines[key] == 1
    # Without targets, whatever is answered to its end is good.
    assert not any(name == "lightserve_slo_requests_total" for name, _ in lines)
    assert lines[line("goodput_requests_total", request_class="be")] == 1
    assert lines[line("goodput_tokens_total", request_class="be")] == 5


@pytest.mark.parametrize(("completion_s", "outcome"), [(2.5, "met"), (2.4, "missed")])
def test_a_job_is_judged_by_its_completion(completion_s: float, outcome: str) -> None:
    recorder = Recorder()
    slo = SLO(completion_s=completion_s)
    request = FrontendMetrics(recorder).request(
        RequestClass.BE, arrival_s=10.0, num_prompt_tokens=3, slo=slo
    )
    for now_s in (10.25, 12.5):
        request.on_tokens(1, now_s)
    request.on_finish(FinishReason.STOP)
    ledger = Ledger()
    ledger.update("frontend", recorder.snapshot())
    lines = values_of(ledger)
    for target in ("completion", "all"):
        labels = {"request_class": "be", "target": target, "outcome": outcome}
        assert lines[line("slo_requests_total", **labels)] == 1
    assert lines[line("goodput_requests_total", request_class="be")] == (outcome == "met")


def test_no_metric_is_declared_and_never_recorded() -> None:
    package = Path(catalogue.__file__).parents[1]
    texts = [path.read_text() for path in package.rglob("*.py") if path.name != "catalogue.py"]
    words = set(re.findall(r"\w+", "\n".join(texts)))
    families = {name for name, value in vars(catalogue).items() if isinstance(value, Family)}
    assert len(families) > 50 and families - words == set()


def test_the_page_is_that_of_the_catalogue() -> None:
    page = Path(lightserve.__file__).parent.parent / "docs" / "metrics.md"
    assert page.read_text() == document(), "python -m tools.metrics_page > docs/metrics.md"


# Turns of loops, by the clock on the wall and by the thread's own.

WORK_S = 0.02


def burn(cpu_s: float) -> None:
    """Compute for so much of this thread's time."""
    end_s = time.thread_time() + cpu_s
    while time.thread_time() < end_s:
        pass


def figures(recorder: Recorder) -> tuple[float, float, float]:
    """Return the longest turn by CPU and by wall time, and the number of turns."""
    values = {(s.family, *s.labels): s.values for s in recorder.snapshot()}
    cpu = values["lightserve_loop_turn_max_seconds", "router-0", "cpu"][0]
    wall = values["lightserve_loop_turn_max_seconds", "router-0", "wall"][0]
    _, *counts = values["lightserve_loop_turn_seconds", "router", "cpu"]
    return cpu, wall, sum(counts)


def test_what_the_thread_computes_is_cpu_time_and_what_it_waits_for_is_not() -> None:
    recorder = Recorder()
    clock = TurnClock(recorder, "router-0")
    clock.end()  # none has begun
    assert figures(recorder) == (0, 0, 0)
    clock.begin()
    time.sleep(WORK_S)
    clock.end()
    cpu_s, wall_s, num_turns = figures(recorder)
    assert wall_s >= WORK_S > cpu_s
    assert num_turns == 1
    clock.begin()
    burn(WORK_S)
    clock.end()
    assert figures(recorder)[0] >= WORK_S
    clock.begin()
    clock.end()
    assert figures(recorder)[0] >= WORK_S, "the longest stays"
    assert figures(recorder)[2] == 3


def test_another_threads_work_is_not_the_loops() -> None:
    recorder = Recorder()
    clock = TurnClock(recorder, "router-0")
    clock.begin()
    thread = threading.Thread(target=burn, args=(WORK_S,))
    thread.start()
    thread.join()
    clock.end()
    cpu_s, wall_s, _ = figures(recorder)
    assert cpu_s < WORK_S <= wall_s


def test_turns_of_an_event_loop_count_from_the_first_wait_on() -> None:
    recorder = Recorder()
    selector = TurnSelector()

    async def serve() -> None:
        burn(WORK_S)  # a start: no clock yet
        selector.clock = TurnClock(recorder, "router-0")
        burn(WORK_S)  # still the turn of the start
        for _ in range(5):
            await asyncio.sleep(0)
        before = figures(recorder)
        assert before[0] < WORK_S
        assert before[2] >= 4
        burn(WORK_S)
        await asyncio.sleep(0)
        assert figures(recorder)[0] >= WORK_S

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(serve())
