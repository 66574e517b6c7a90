"""Streams under load: what exactly each client saw."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx


class Outcome(StrEnum):
    """How a streaming request ended, as its client saw it."""

    WHOLE = "whole answer"
    ERROR_EVENT = "error event"
    STATUS = "error status"
    BROKEN = "connection broken"
    TORN = "closed without an end"
    """A well-formed end of the body without [DONE] or an error: must never happen."""


@dataclass(frozen=True)
class StreamResult:
    """One request."""

    start_s: float
    end_s: float
    outcome: Outcome
    num_chunks: int
    detail: str = ""
    first_chunk_s: float = float("inf")
    """Infinite without one."""


def stream_once(url: str, body: dict[str, Any], on_chunk: Any = None) -> StreamResult:
    """Send one streaming chat completion and read it to its end; never raises for its fate."""
    start_s, first_chunk_s = time.monotonic(), float("inf")
    num_chunks = 0

    def result(outcome: Outcome, detail: str = "") -> StreamResult:
        return StreamResult(start_s, time.monotonic(), outcome, num_chunks, detail, first_chunk_s)

    try:
        with (
            # A connection of its own; no certificates, whose loading takes longer than a request.
            httpx.Client(base_url=url, timeout=120.0, verify=False, trust_env=False) as client,
            client.stream(
                "POST", "/v1/chat/completions", json={**body, "stream": True}
            ) as response,
        ):
            if response.status_code != 200:
                return result(Outcome.STATUS, f"{response.status_code} {response.read()[:200]!r}")
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return result(Outcome.WHOLE)
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return result(Outcome.ERROR_EVENT, event["error"]["message"])
                num_chunks += 1
                first_chunk_s = min(first_chunk_s, time.monotonic())
                if on_chunk is not None:
                    on_chunk()
    except httpx.TransportError as error:
        return result(Outcome.BROKEN, repr(error))
    return result(Outcome.TORN)


class StreamLoad:
    """Keeps `num_streams` requests streaming, each thread one after the other, until stopped."""

    def __init__(self, url: str, body: dict[str, Any], num_streams: int) -> None:
        self._url = url
        self._body = body
        self._is_stopped = threading.Event()
        self._stopped_s = float("inf")
        self._results: list[StreamResult] = []
        self._results_of_clients: list[list[StreamResult]] = [[] for _ in range(num_streams)]
        self._streaming: set[int] = set()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(num_streams)
        ]

    def __enter__(self) -> StreamLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def wait_all_streaming(self, timeout_s: float = 60.0) -> None:
        """Wait until every client has had a first chunk of its current or an earlier answer."""
        deadline_s = time.monotonic() + timeout_s
        while len(self._streaming) < len(self._threads):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{len(self._streaming)} of {len(self._threads)} stream")
            time.sleep(0.005)

    def stop(self) -> list[StreamResult]:
        """Let every client finish a request that ends after this call; return all results."""
        if not self._is_stopped.is_set():
            self._stopped_s = time.monotonic()
        self._is_stopped.set()
        for thread in self._threads:
            thread.join()
        return self._results

    def in_flight_at(self, moment_s: float) -> list[StreamResult]:
        """Return, after `stop`, the requests that were under way at a moment (monotonic)."""
        return [r for r in self._results if r.start_s <= moment_s <= r.end_s]

    def streaming_at(self, moment_s: float) -> list[StreamResult]:
        """Return, after `stop`, those whose answers had begun and not ended at a moment."""
        return [r for r in self._results if r.first_chunk_s <= moment_s <= r.end_s]

    def fates_of(self, moment_s: float) -> list[StreamResult]:
        """Return, after a `stop` later than a moment, each client's first request to end after it.

        Under way then, or, for a client that was between two requests, the next one.
        """
        return [
            next(result for result in results if result.end_s >= moment_s)
            for results in self._results_of_clients
        ]

    def _run(self, number: int) -> None:
        body = dict(self._body)
        end_s = 0.0
        while end_s < self._stopped_s:
            result = stream_once(self._url, body, lambda: self._streaming.add(number))
            end_s = result.end_s
            self._results.append(result)
            self._results_of_clients[number].append(result)
            if result.outcome is not Outcome.WHOLE:
                self._is_stopped.wait(0.02)  # a dead server is asked again, not hammered
