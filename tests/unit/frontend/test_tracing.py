"""Spans of requests: what is in them, what is not, and that a collector costs no request time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from support.fake_router import Setup, eventually, frontend, says
from support.span_collector import SpanCollector, span_collector, values

from lightserve import extras
from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.extras import need_packages
from lightserve.frontend import tracing
from lightserve.frontend.tracing import RequestTracer, SpanQueue
from lightserve.messages.frontend_router import (
    DescribeRequest,
    Moment,
    RequestLife,
    RequestTimeline,
    Stretch,
)
from lightserve.metrics.catalogue import TRACE_SPANS
from lightserve.metrics.recording import Recorder
from lightserve.types import SLO, RequestClass

SECRET = "a secret that the prompt has"
BODY = {"model": BUNDLED_MODEL_NAME, "prompt": SECRET, "max_tokens": 3}
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "BATCH_INTERVAL_S", 0.01)


@pytest.fixture
def collector() -> Iterator[SpanCollector]:
    with span_collector() as running:
        yield running


def life() -> RequestLife:
    waits = Stretch(
        what="kv_future",
        at_s=0.0,
        seconds=0.25,
        num_steps=7,
        num_tokens=0,
        tokens_of_others={RequestClass.BE: 40},
        predicted_s=0.2,
        observed_s=0.3,
    )
    return RequestLife(
        request_class=RequestClass.RT,
        slo=SLO(),
        age_s=1.0,
        end="stop",
        first_token_s=0.5,
        max_gap_s=0.1,
        token_span_s=0.2,
        num_output_tokens=3,
        before_first_token={"kv_future": 0.25},
        after_first_token={},
        stretches=[waits],
        moments=[
            Moment(what="starts", at_s=0.25, num_tokens=7),
            Moment(what="preempted", at_s=0.375, num_tokens=0),
        ],
    )


async def spans_of(setup: Setup, collector: SpanCollector, count: int = 1) -> list[Span]:
    """Answer the frontend's questions about decisions until so many spans have arrived."""
    num_answered = 0

    def have_arrived() -> bool:
        nonlocal num_answered
        asked = [each for each in setup.router.sent if isinstance(each, DescribeRequest)]
        for question in asked[num_answered:]:
            answer = RequestTimeline(query_id=question.query_id, lives=[life()])
            setup.service.router.on_message(answer)
        num_answered = len(asked)
        return len(collector.spans) >= count

    await eventually(have_arrived)
    return collector.spans


def with_spans(collector: SpanCollector, scenario: Callable[[Setup], Any], **flags: Any) -> None:
    async def run() -> None:
        flags.setdefault("otlp_endpoint", collector.url)
        async with frontend(says([5, 6, 2]), **flags) as setup:
            await scenario(setup)

    asyncio.run(run())


def num_spans(setup: Setup, outcome: str) -> float:
    return setup.service.observation.recorder.counter(TRACE_SPANS, outcome).value


def test_what_a_span_says(collector: SpanCollector) -> None:
    async def scenario(setup: Setup) -> None:
        slo = {"ttft_ms": 60_000.0, "mtpot_ms": 0.001}
        answer = await setup.post("/v1/completions", BODY | {"slo": slo})
        assert answer.status_code == 200, answer.text
        (span,) = await spans_of(setup, collector)
        facts = values(span.attributes)
        assert (
            span.name == f"text_completion {BUNDLED_MODEL_NAME}"
            and span.kind == Span.SPAN_KIND_SERVER
        )
        assert facts["gen_ai.request.model"] == BUNDLED_MODEL_NAME
        assert facts["gen_ai.response.id"] == answer.json()["id"]
        assert facts["lightserve.request_id"] == answer.headers["x-request-id"]
        usage = answer.json()["usage"]
        assert facts["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert facts["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 3
        assert facts["gen_ai.response.finish_reasons"] == ["stop"]
        assert facts["lightserve.class"] == "rt" and facts["http.route"] == "/v1/completions"
        assert facts["lightserve.target.ttft_ms"] == 60_000.0
        assert facts["lightserve.attained"] is False
        assert facts["lightserve.missed"] == ["mtpot"]
        assert "lightserve.decisions_missing" not in facts
        assert not span.parent_span_id and span.status.code == Status.STATUS_CODE_UNSET
        at = {event.name: event.time_unix_nano - span.start_time_unix_nano for event in span.events}
        steps = ("tokenised", "submitted", "first_token")
        times = [at[f"lightserve.{name}"] for name in steps]
        last = span.end_time_unix_nano - span.start_time_unix_nano
        assert 0 < times[0] <= times[1] <= times[2] <= last
        assert at["lightserve.waits"] == pytest.approx(0.0, abs=1000)
        assert at["lightserve.starts"] == pytest.approx(0.25e9, abs=1000)
        assert at["lightserve.preempted"] == pytest.approx(0.375e9, abs=1000)
        (waits,) = (event for event in span.events if event.name == "lightserve.waits")
        of_wait = values(waits.attributes)
        assert of_wait["lightserve.reason"] == "kv_future"
        assert of_wait["lightserve.tokens_of_others.be"] == 40
        await eventually(lambda: num_spans(setup, "sent") == 1)

    with_spans(collector, scenario)
    answer_text = b"".join(collector.bodies)
    assert SECRET.encode() not in answer_text and b"secret" not in answer_text


def test_the_trace_of_the_client_goes_on(collector: SpanCollector) -> None:
    async def scenario(setup: Setup) -> None:
        setup.http.headers["tracestate"] = "vendor=1"
        for flags in ("00", "01"):
            setup.http.headers["traceparent"] = f"00-{TRACE_ID}-{PARENT_ID}-{flags}"
            assert (await setup.post("/v1/completions", BODY)).status_code == 200
        del setup.http.headers["traceparent"]
        assert (await setup.post("/v1/completions", BODY)).status_code == 200
        (span,) = await spans_of(setup, collector)
        assert span.trace_id.hex() == TRACE_ID and span.parent_span_id.hex() == PARENT_ID
        assert span.trace_state == "vendor=1"

    with_spans(collector, scenario, otlp_sample=0.0)
    assert len(collector.spans) == 1  # neither one that says no nor one that says nothing


@pytest.mark.parametrize("header", ["00-zz-11-01", f"00-{'0' * 32}-{PARENT_ID}-01", "x" * 400])
def test_a_broken_traceparent_begins_a_new_trace(collector: SpanCollector, header: str) -> None:
    async def scenario(setup: Setup) -> None:
        setup.http.headers["traceparent"] = header
        assert (await setup.post("/v1/completions", BODY)).status_code == 200
        (span,) = await spans_of(setup, collector)
        assert any(span.trace_id) and not span.parent_span_id

    with_spans(collector, scenario)


def test_refused_ones_and_those_without_decisions(
    collector: SpanCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MAX_OPEN_QUESTIONS", 0)

    async def scenario(setup: Setup) -> None:
        chat = {
            "model": BUNDLED_MODEL_NAME,
            "messages": [{"role": "user", "content": SECRET}],
            "n": 2,
        }
        assert (await setup.post("/v1/chat/completions", chat)).status_code == 200
        too_long = BODY | {"max_tokens": 1_000_000}
        assert (await setup.post("/v1/completions", too_long)).status_code == 400
        first, second = await spans_of(setup, collector, 2)
        facts = values(first.attributes)
        assert (
            first.name == f"chat {BUNDLED_MODEL_NAME}" and facts["gen_ai.request.choice.count"] == 2
        )
        assert facts["lightserve.decisions_missing"] is True
        assert values(second.attributes)["error.type"] == "context_length_exceeded"
        assert second.status.code == Status.STATUS_CODE_ERROR

    with_spans(collector, scenario)


def test_a_collector_that_takes_nothing_is_told_of_once(
    collector: SpanCollector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 400

    async def scenario(setup: Setup) -> None:
        for number in (1, 2):
            assert (await setup.post("/v1/completions", BODY)).status_code == 200
            setup.service.router.detach()  # nor does it wait for a router that is gone
            await eventually(lambda count=number: num_spans(setup, "failed") == count)
            setup.service.router.attach(setup.router, "boot")
            setup.service.router._connection.workers_ready = True  # type: ignore[union-attr]
            setup.service.router._connection.num_kv_slots = 1000  # type: ignore[union-attr]

    with_spans(collector, scenario)
    assert caplog.text.count("takes no spans") == 1


class Stuck(SpanExporter):
    """A collector that does not answer."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.began = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.began.set()
        self.is_over.wait()
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.is_over.set()


@contextmanager
def stuck_queue(recorder: Recorder) -> Iterator[tuple[SpanQueue, Stuck]]:
    exporter = Stuck()
    spans = SpanQueue(exporter, recorder)
    yield spans, exporter
    spans.shutdown()
    spans._thread.join(60)
    assert exporter.is_over.is_set() and not spans._thread.is_alive()


def test_more_than_can_wait_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_QUEUED_SPANS", 4)
    monkeypatch.setattr(tracing, "CLOSE_TIMEOUT_S", 0.05)
    recorder = Recorder()
    span: Any = object()
    with stuck_queue(recorder) as (spans, exporter):
        spans.on_end(span)
        assert exporter.began.wait(60)
        for _ in range(10):
            spans.on_end(span)
        assert recorder.counter(TRACE_SPANS, "dropped").value == 6


def test_what_waits_is_sent_at_the_end(collector: SpanCollector) -> None:
    async def scenario(setup: Setup) -> None:
        too_long = BODY | {"max_tokens": 1_000_000}
        for _ in range(3):
            assert (await setup.post("/v1/completions", too_long)).status_code == 400

    tracing.BATCH_INTERVAL_S = 600.0  # put back by the fixture
    with_spans(collector, scenario)
    assert len(collector.spans) == 3 and len(collector.bodies) == 1


@pytest.mark.parametrize(
    "endpoint", ["collector:4318", "ftp://host", "http://", "http://me:word@host", "http://h?a=b"]
)
def test_odd_addresses_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint must be an address such as") as refusal:
        ServeConfig(otlp_endpoint=endpoint)
    assert "word" not in str(refusal.value).replace("password", "")


def test_options_that_would_have_no_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match="--otlp-sample needs --otlp-endpoint"):
        ServeConfig(otlp_sample=0.5)
    with pytest.raises(ConfigError, match=r"--otlp-sample must be"):
        ServeConfig(otlp_endpoint="http://127.0.0.1:1", otlp_sample=1.5)


def test_the_router_notes_lives_for_spans_even_if_nothing_else_asks_for_them() -> None:
    assert ServeConfig().num_kept_lives == 0
    assert ServeConfig(request_timelines=7).num_kept_lives == 7
    assert ServeConfig(otlp_endpoint="http://127.0.0.1:1").num_kept_lives == 1000


def test_a_missing_package_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"is missing: .* -m pip install .*opentelemetry"):
        need_packages(("opentelemetry.sdk",), "otel")


def test_a_tracer_needs_no_collector_to_begin() -> None:
    config = ServeConfig(otlp_endpoint="http://127.0.0.1:1")
    tracer = RequestTracer(config, router=None, recorder=Recorder())  # type: ignore[arg-type]
    tracer.close()
