"""Each request as an OpenTelemetry span (--otlp-endpoint), with what was decided as events.

A span lasts from the head of the request to the last byte of its answer. Its attributes have the
names of OpenTelemetry's conventions for generative AI where there is one, and begin with
`lightserve.` where there is none. Decisions are asked of the router once the request is over, and
are those of its timeline. No text of a prompt or an answer is in a span, and nothing that a client
made up but its `X-Request-Id` and W3C `traceparent` and `tracestate`.

Spans are sent by a thread, in batches, from a queue of bounded length: a collector that is slow or
away costs spans, which are counted, and no request any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

import lightserve
from lightserve.errors import InvalidRequest
from lightserve.frontend.errors import RequestFailed
from lightserve.frontend.middleware import ARRIVAL_KEY, ROUTE_KEY
from lightserve.logs import request_id
from lightserve.messages.frontend_router import RequestLife
from lightserve.metrics.catalogue import TRACE_SPANS
from lightserve.metrics.recording import Recorder

if TYPE_CHECKING:
    from lightserve.config import ServeConfig
    from lightserve.frontend.completion import Choices
    from lightserve.frontend.request_options import ServiceLevel
    from lightserve.frontend.router_client import RouterClient

log = logging.getLogger(__name__)

Value = str | bool | int | float | list[str]

MAX_QUEUED_SPANS = 2048
SPANS_PER_BATCH = 64
"""Each takes the interpreter for about 0.1 ms to encode."""
BATCH_INTERVAL_S = 1.0
EXPORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0
MAX_OPEN_QUESTIONS = 16
"""To the router at once, of those that it takes: spans beyond have no decisions."""
MAX_EVENTS = 256
"""Most events of a span; the first ones are lost."""

_TEXT_ROUTES = frozenset({"/", "/generate", "/generate_stream", "/v1/completions"})
_HEADERS = (b"traceparent", b"tracestate")


class SpanQueue(SpanProcessor):
    """Takes spans that have ended, on the event loop; a thread sends them."""

    def __init__(self, exporter: SpanExporter, recorder: Recorder) -> None:
        self._exporter = exporter
        # Each of these is counted by one thread alone.
        self._sent = recorder.counter(TRACE_SPANS, "sent")
        self._failed = recorder.counter(TRACE_SPANS, "failed")
        self._dropped = recorder.counter(TRACE_SPANS, "dropped")
        self._queue: queue.Queue[ReadableSpan | None] = queue.Queue(MAX_QUEUED_SPANS)
        self._is_closing = threading.Event()
        self._is_failing = False
        self._thread = threading.Thread(target=self._send_all, name="spans", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """Take in a span, or drop it if too many wait."""
        try:
            self._queue.put_nowait(span)
        except queue.Full:
            self._dropped.value += 1

    def shutdown(self) -> None:
        """Send what waits, if that is possible in a moment."""
        self._is_closing.set()
        with contextlib.suppress(queue.Full):  # then the thread sees by itself that this is the end
            self._queue.put_nowait(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._exporter.shutdown()  # ends its attempts

    def _send_all(self) -> None:
        while (batch := self._next_batch()) is not None:
            result = self._exporter.export(batch)
            has_failed = result is not SpanExportResult.SUCCESS
            (self._failed if has_failed else self._sent).value += len(batch)
            if has_failed != self._is_failing:
                self._is_failing = has_failed
                if has_failed:
                    log.warning("the collector of --otlp-endpoint takes no spans: they are lost")
                else:
                    log.info("the collector of --otlp-endpoint takes spans again")

    def _next_batch(self) -> list[ReadableSpan] | None:
        """Wait for spans; None: there are none any more."""
        if self._is_closing.is_set() and self._queue.empty():
            return None
        if (first := self._queue.get()) is None:
            return None
        batch = [first]
        self._is_closing.wait(BATCH_INTERVAL_S)
        while len(batch) < SPANS_PER_BATCH:
            try:
                span = self._queue.get_nowait()
            except queue.Empty:
                break
            if span is None:
                break
            batch.append(span)
        return batch


class RequestTracer:
    """Makes the spans of a frontend's requests."""

    def __init__(
        self,
        config: ServeConfig,
        router: RouterClient,
        recorder: Recorder,
        exporter: SpanExporter | None = None,
    ) -> None:
        """`exporter`: for tests, in place of one to --otlp-endpoint."""
        # Its own words about each failure would come with every batch.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        self._router = router
        self._model_name = config.model_name
        self._questions: set[asyncio.Task[None]] = set()
        self._queue = SpanQueue(exporter or _exporter_to(config.otlp_endpoint), recorder)
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.otlp_sample)),
            resource=Resource.create(
                {SERVICE_NAME: "lightserve", SERVICE_VERSION: lightserve.__version__}
            ),
            span_limits=SpanLimits(max_events=MAX_EVENTS),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._queue)
        self._tracer = provider.get_tracer("lightserve", lightserve.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Scope, level: ServiceLevel, answer_id: str) -> RequestTrace | None:
        """Return the trace of a request; None: it is not one of the sample."""
        carrier = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _HEADERS
        }
        route = scope.get(ROUTE_KEY, scope["path"])  # lines of batches have routes' own paths
        operation = "text_completion" if route in _TEXT_ROUTES else "chat"
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "lightserve",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.id": answer_id,
            "http.request.method": scope["method"],
            "http.route": route,
            "lightserve.request_id": request_id.get(),
            "lightserve.class": level.request_class.value,
        }
        arrival_s: float = scope[ARRIVAL_KEY]
        zero_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=zero_ns + int(arrival_s * 1e9),
        )
        if not span.is_recording():
            return None
        return RequestTrace(self, span, answer_id, arrival_s, zero_ns)

    def finish(self, trace: RequestTrace, *, num_completions: int) -> None:
        """End a span, after the router has said what it decided, if anything was asked of it."""
        if num_completions == 0:
            trace.close()
            return
        if len(self._questions) >= MAX_OPEN_QUESTIONS:
            trace.set({"lightserve.decisions_missing": True})
            trace.close()
            return
        question = asyncio.create_task(self._finish_later(trace))
        self._questions.add(question)
        question.add_done_callback(self._questions.discard)

    async def _finish_later(self, trace: RequestTrace) -> None:
        try:
            lives = await self._router.describe_request(trace.answer_id, None)
        except (InvalidRequest, RequestFailed):
            lives = []
        if not lives:
            trace.set({"lightserve.decisions_missing": True})
        for index, life in enumerate(lives):
            trace.add_decisions(index, life)
        trace.close()

    def close(self) -> None:
        """Send what waits."""
        for question in self._questions:
            question.cancel()
        self._queue.shutdown()


class RequestTrace:
    """One HTTP request's span. Times are monotonic seconds."""

    def __init__(
        self, tracer: RequestTracer, span: Span, answer_id: str, arrival_s: float, zero_ns: int
    ) -> None:
        """`zero_ns`: Unix time at which the monotonic clock was zero."""
        self._tracer = tracer
        self._span = span
        self.answer_id = answer_id
        self._arrival_s = arrival_s
        self._zero_ns = zero_ns
        self._end_ns = 0

    def mark(self, name: str, at_s: float | None = None) -> None:
        """Add an event, now unless told when."""
        self._event(name, time.monotonic() if at_s is None else at_s, {})

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Add attributes."""
        self._span.set_attributes(attributes)

    def refuse(self, code: str) -> None:
        """End it: the request was refused before it was submitted."""
        self._end(code, num_completions=0)

    def end(self, choices: Choices, outcome: str) -> None:
        """End it, with what became of the request."""
        first, usage = choices.first, choices.usage
        sampling, slo = first.request.sampling, first.request.slo
        missed = [each.missed for each in choices.completions]
        attributes: dict[str, Value | None] = {
            "gen_ai.request.max_tokens": first.request.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.choice.count": len(choices.completions),
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.response.finish_reasons": [
                each.finish_reason.value if each.finish_reason else "error"
                for each in choices.completions
            ],
            "lightserve.priority": first.request.priority,
            "lightserve.target.ttft_ms": slo.ttft_ms,
            "lightserve.target.tpot_ms": slo.tpot_ms,
            "lightserve.target.mtpot_ms": slo.mtpot_ms,
            "lightserve.target.completion_s": slo.completion_s,
            "lightserve.outcome": outcome,
        }
        if None not in missed:
            names = {name for each in missed for name in each or ()}
            attributes["lightserve.attained"] = not names
            attributes["lightserve.missed"] = sorted(names)
        if first.first_token_s is not None:
            ttft_s = first.first_token_s - self._arrival_s
            attributes["gen_ai.response.time_to_first_chunk"] = ttft_s
            self.mark("lightserve.first_token", first.first_token_s)
        self.set({name: value for name, value in attributes.items() if value is not None})
        is_whole = all(each.finish_reason is not None for each in choices.completions)
        self._end(None if is_whole else outcome, num_completions=len(choices.completions))

    def add_decisions(self, index: int, life: RequestLife) -> None:
        """Add what the router did with one of the request's completions, as events."""
        for stretch in life.stretches:
            others = {
                f"lightserve.tokens_of_others.{of.value}": count
                for of, count in stretch.tokens_of_others.items()
            }
            self._event(
                "lightserve.computes" if stretch.what == "computes" else "lightserve.waits",
                self._arrival_s + stretch.at_s,
                {
                    "lightserve.choice": index,
                    "lightserve.reason": stretch.what,
                    "lightserve.seconds": stretch.seconds,
                    "lightserve.steps": stretch.num_steps,
                    "lightserve.tokens": stretch.num_tokens,
                    "lightserve.predicted_s": stretch.predicted_s,
                    "lightserve.observed_s": stretch.observed_s,
                    **others,
                },
            )
        for moment in life.moments:
            self._event(
                f"lightserve.{moment.what}",
                self._arrival_s + moment.at_s,
                {"lightserve.choice": index, "lightserve.tokens": moment.num_tokens},
            )

    def close(self) -> None:
        """Hand the span over, as it is."""
        self._span.end(end_time=self._end_ns)

    def _end(self, error: str | None, *, num_completions: int) -> None:
        self._end_ns = self._zero_ns + time.monotonic_ns()
        if error is not None:
            self.set({"error.type": error})
            self._span.set_status(Status(StatusCode.ERROR))
        self._tracer.finish(self, num_completions=num_completions)

    def _event(self, name: str, at_s: float, attributes: Mapping[str, Value]) -> None:
        self._span.add_event(name, attributes, timestamp=self._zero_ns + int(at_s * 1e9))


def _exporter_to(endpoint: str) -> SpanExporter:
    return OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)
