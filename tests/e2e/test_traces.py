"""Spans of a live server's requests, with what its router decided."""

from __future__ import annotations

from pathlib import Path

import httpx
from support.live_server import live_server
from support.processes import PATIENCE_S, wait_for
from support.span_collector import span_collector, values


def test_a_request_becomes_a_span_with_its_decisions(run_parent: Path) -> None:
    with (
        span_collector() as collector,
        live_server(run_parent, "--otlp-endpoint", collector.url) as server,
    ):
        body = {"model": server.model, "prompt": "The fox", "max_tokens": 30, "stop": ["e"]}
        url = f"{server.url}/v1/completions"
        for stream in (False, True):
            answer = httpx.post(url, json=body | {"stream": stream}, timeout=PATIENCE_S)
            assert answer.status_code == 200
        wait_for(lambda: len(collector.spans) == 2, "two spans")
        for span in collector.spans:
            facts, names = values(span.attributes), [event.name for event in span.events]
            assert facts["gen_ai.usage.output_tokens"] >= 1
            assert "lightserve.decisions_missing" not in facts
            assert "lightserve.starts" in names and "lightserve.computes" in names
            for event in span.events:
                slack_ns = 50_000_000  # the router's clock is the same, its message takes a moment
                assert event.time_unix_nano >= span.start_time_unix_nano - slack_ns
        # Timelines themselves were not asked for.
        path = f"{server.url}/v1/requests/{facts['gen_ai.response.id']}/timeline"
        assert httpx.get(path).json()["error"]["code"] == "timelines_off"
        assert "lightserve_trace_spans_total{" in server.metrics()
