"""The load client against a mock server in the same event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mock_server import Behaviour, MockServer, count_tokens

from lightserve.loadtest.client import EventLines, StreamClient, api_base, clock
from lightserve.loadtest.options import ArrivalKind, ServerOptions, Targets, Traffic
from lightserve.loadtest.result import Record, Run
from lightserve.loadtest.runner import Runner, RunOutcome, RunSettings
from lightserve.loadtest.session import (
    Point,
    SessionOptions,
    counting_window,
    make_plans,
    make_run,
    run_session,
)
from lightserve.loadtest.workload import UNCALIBRATED, PromptMaker

Meanwhile = Callable[[MockServer, Runner], Coroutine[Any, Any, None]]


async def _nothing(server: MockServer, runner: Runner) -> None:
    pass


def run(
    *traffic: Traffic,
    behaviour: Behaviour | None = None,
    meanwhile: Meanwhile = _nothing,
    is_gated: bool = False,
    drain_s: float = 30.0,
    api_key: str | None = None,
    **server_options: Any,
) -> tuple[RunOutcome, MockServer]:
    async def inside() -> tuple[RunOutcome, MockServer]:
        async with MockServer(behaviour or Behaviour()) as server:
            if is_gated:
                server.gate.clear()
            options = ServerOptions(**{"url": server.url, "model": "mock"} | server_options)
            async with StreamClient(options, api_key=api_key, ca_file=None) as client:
                prompts = PromptMaker(UNCALIBRATED, 0)
                runner = Runner(client, prompts, RunSettings(drain_s, "test"), clock())
                other = asyncio.ensure_future(meanwhile(server, runner))
                outcome = await runner.run(make_plans(traffic, 0))
                await other
            server.gate.set()
            return outcome, server

    return asyncio.run(asyncio.wait_for(inside(), 60))


def open_loop(count: int, **fields: Any) -> Traffic:
    values = {"rate": 200.0, "prompt_tokens": "20", "output_tokens": "5"} | fields
    return Traffic(arrivals=ArrivalKind.POISSON, num_requests=count, **values)


def test_an_open_loop_does_not_wait_for_a_server_that_does_not_answer() -> None:
    """The mock answers no request before all have arrived: waiting for it would be for ever."""
    count = 40

    async def open_when_all_are_there(server: MockServer, runner: Runner) -> None:
        while len(server.received) < count:
            await asyncio.sleep(0.001)
        assert runner.progress["rt"].num_done == 0
        server.gate.set()

    outcome, _ = run(open_loop(count), is_gated=True, meanwhile=open_when_all_are_there)
    assert len(outcome.records) == count
    assert all(record.is_completed for record in outcome.records)
    # The wait is in every latency: no request had anything before the last one had arrived.
    last_s = max(record.intended_s for record in outcome.records)
    assert min(record.event_times_s[0] for record in outcome.records) > last_s


def test_a_closed_loop_never_has_more_in_flight_than_clients() -> None:
    most = 0

    async def watch(_: MockServer, runner: Runner) -> None:
        nonlocal most
        counts = runner.progress["rt"]
        while counts.num_done < 30:
            most = max(most, counts.num_sent - counts.num_done)
            await asyncio.sleep(0)

    traffic = Traffic(arrivals=ArrivalKind.CLOSED, concurrency=3, num_requests=30)
    outcome, _ = run(traffic, meanwhile=watch)
    assert len(outcome.records) == 30 and most == 3


@pytest.mark.parametrize(
    ("retry_after", "think_s", "waits_s"),
    [
        ("7", 0.0, [7.0] * 4),
        ("7", 2.0, [2.0] * 5 + [7.0] * 4),
        ("1", 2.0, [2.0] * 9),
        ("600", 0.0, [50.0] * 4),  # no longer than for an answer
        ("", 0.0, []),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0, []),
    ],
)
def test_a_client_that_is_refused_waits_as_long_as_it_is_told(
    retry_after: str, think_s: float, waits_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that stands still; each is counted as refused, and sent once. An open loop does
    not wait."""
    waited_s: list[float] = []

    async def wait_until(runner: Runner, moment_s: float, *, is_exact: bool) -> None:
        waited_s.append(moment_s)
        await asyncio.sleep(0)

    monkeypatch.setattr(Runner, "_wait_until", wait_until)
    monkeypatch.setattr(f"{__name__}.clock", lambda: lambda: 0.0)
    refusing = Behaviour(status=429, retry_after=retry_after, num_refused=4)
    closed = Traffic(arrivals=ArrivalKind.CLOSED, concurrency=1, num_requests=10, think_s=think_s)
    outcome, server = run(closed, behaviour=refusing, timeout_s=50.0)
    assert sorted(waited_s) == waits_s
    assert [record.error for record in outcome.records] == ["http_429"] * 4 + [None] * 6
    assert len(server.received) == 10
    waited_s.clear()
    traffic = open_loop(10)
    run(traffic, behaviour=refusing)
    (plan,) = make_plans([traffic], 0)
    assert plan.offsets_s is not None and waited_s == plan.offsets_s.tolist()


def test_an_endless_closed_loop_ends_with_the_open_one() -> None:
    background = Traffic(
        arrivals=ArrivalKind.CLOSED, concurrency=2, request_class="be", output_tokens="3"
    )
    outcome, server = run(open_loop(20), background, be_body={"service_tier": "flex"})
    classes = [record.request_class for record in outcome.records]
    assert classes.count("rt") == 20 and classes.count("be") > 2
    assert all(record.is_completed for record in outcome.records)
    flex = [received.body.get("service_tier") == "flex" for received in server.received]
    assert sum(flex) == classes.count("be")


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_what_is_sent_and_what_is_read(endpoint: str) -> None:
    traffic = open_loop(3, targets=Targets(ttft_ms=400, e2el_ms=9000))
    outcome, server = run(
        traffic,
        behaviour=Behaviour(tokens_per_event=2),
        endpoint=endpoint,
        force_lengths=True,
        sends_targets=True,
        api_key="secret",
        body={"temperature": 0},
    )
    sent = server.received[0]
    assert sent.headers["authorization"] == "Bearer secret"
    assert float(sent.headers["x-slo-ttft-ms"]) == 400.0
    assert "slo" not in sent.body  # a completion time excludes targets of tokens
    assert sent.body["max_tokens"] == sent.body["min_tokens"] == 5
    assert sent.body["ignore_eos"] is True and sent.body["temperature"] == 0
    is_chat = endpoint == "chat"
    text = sent.body["messages"][0]["content"] if is_chat else sent.body["prompt"]
    for record in outcome.records:
        assert (record.output_tokens, len(record.event_times_s)) == (5, 3)
    assert outcome.records[0].prompt_tokens == count_tokens(text, is_chat=is_chat)


@pytest.mark.parametrize(
    ("request_class", "targets", "headers", "slo"),
    [
        ("rt", Targets(tpot_ms=50.5, normalized_ms=9), {"x-slo-tpot-ms": "50.5"}, None),
        ("rt", Targets(e2el_ms=9000), {}, {"completion_s": 9.0}),
        ("be", Targets(ttft_ms=400, e2el_ms=9500), {}, {"completion_s": 9.5}),
        ("be", Targets(ttft_ms=400), {}, None),
    ],
)
def test_targets_are_sent_as_lightserve_takes_them(
    request_class: str, targets: Targets, headers: dict[str, str], slo: dict[str, float] | None
) -> None:
    of_class = {"be_targets" if request_class == "be" else "targets": targets}
    traffic = open_loop(1, request_class=request_class, **of_class)
    _, server = run(traffic, sends_targets=True)
    (sent,) = server.received
    assert {k: v for k, v in sent.headers.items() if k.startswith("x-slo-")} == headers
    assert sent.body.get("slo") == slo


def test_each_request_has_one_of_the_priorities() -> None:
    outcome, server = run(open_loop(40, priorities=[-5, 0, 7]))
    sent = [received.body["priority"] for received in server.received]
    assert set(sent) == {-5, 0, 7} and sent != sorted(sent)
    assert sorted(sent) == sorted(record.priority or 0 for record in outcome.records)
    _, silent = run(open_loop(1))
    assert "priority" not in silent.received[0].body


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (Behaviour(status=429), "http_429"),
        (Behaviour(status=500), "http_500"),
        (Behaviour(ending="torn"), "torn"),
        (Behaviour(ending="reset"), "disconnected"),
        (Behaviour(ending="error"), "error_event"),
        (Behaviour(ending="malformed"), "malformed"),
    ],
)
def test_failures_have_their_kind(behaviour: Behaviour, kind: str) -> None:
    outcome, _ = run(open_loop(4), behaviour=behaviour)
    assert [record.error for record in outcome.records] == [kind] * 4
    assert all(record.error_detail and record.end_s is not None for record in outcome.records)


def test_a_server_that_wants_a_key_is_told_of_with_where_to_name_one() -> None:
    async def ask() -> None:
        async with MockServer(Behaviour(status=401)) as server:
            options = ServerOptions(url=server.url, model="mock")
            async with StreamClient(options, api_key=None, ca_file=None) as client:
                await client.first_model()

    with pytest.raises(ValueError, match=r"^status 401: .*a valid key.*--api-key-file"):
        asyncio.run(ask())


def test_no_server_is_a_failure_to_connect() -> None:
    outcome, _ = run(open_loop(3), url="http://127.0.0.1:1")
    assert [record.error for record in outcome.records] == ["connect"] * 3


def test_a_request_without_an_answer_times_out() -> None:
    outcome, _ = run(open_loop(3), is_gated=True, timeout_s=0.05)
    assert [record.error for record in outcome.records] == ["timeout"] * 3


@pytest.mark.parametrize(("late_s", "error"), [(0.0, None), (31.0, "timeout")])
def test_a_timeout_counts_from_the_intended_arrival(late_s: float, error: str | None) -> None:
    """A client that is behind by more than the timeout has nothing left to wait with."""

    async def send() -> Record:
        async with MockServer(Behaviour()) as server:
            options = ServerOptions(url=server.url, model="mock", timeout_s=30.0)
            async with StreamClient(options, api_key=None, ca_file=None) as client:
                record = Record(0, "rt", 0.0, 20, 5)
                now = clock()
                outgoing = client.outgoing(record, "hi", Targets())
                await client.send(record, outgoing, lambda: now() + late_s)
                return record

    assert asyncio.run(send()).error == error


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_what_does_not_end_is_unfinished(is_interrupted: bool) -> None:
    async def interrupt(server: MockServer, runner: Runner) -> None:
        while is_interrupted and len(server.received) < 3:
            await asyncio.sleep(0.001)
        if is_interrupted:
            runner.stop.set()

    drain_s = 60.0 if is_interrupted else 0.05
    outcome, _ = run(open_loop(3), is_gated=True, drain_s=drain_s, meanwhile=interrupt)
    assert outcome.was_interrupted == is_interrupted
    assert [record.error for record in outcome.records] == ["unfinished"] * 3


def test_a_run_of_failures_and_answers_is_reported_whole() -> None:
    """8 arrivals, one slot of the mock taken for ever by no request: all there, all counted."""
    traffic = open_loop(8, be_share=0.5, targets=Targets(ttft_ms=60_000))
    outcome, _ = run(traffic, behaviour=Behaviour(has_usage=False))
    report: Run = make_run(
        outcome,
        label="x",
        started_at="",
        server=ServerOptions(url="", model=""),
        traffic=[traffic],
        seed=0,
        text_seed=0,
        window=counting_window(outcome, skip_first_s=0, skip_last_s=0),
        is_calibrated=False,
        saves_requests=True,
    )
    counts = {name: summary.num_arrivals for name, summary in report.classes.items()}
    assert counts["rt"] + counts["be"] == counts["all"] == 8 == len(report.requests)
    assert report.classes["rt"].attainment_by_target == {"ttft_ms": 1.0}
    assert report.classes["be"].attainment_by_target == {}
    assert report.classes["all"].tokens_are_counted_by == "events"
    timeline = report.timeline
    assert sum(map(sum, timeline.arrivals.values())) == 8
    assert sum(map(sum, timeline.tokens.values())) == 8 * 5
    assert all(counts[-1] == 0 for counts in timeline.in_flight.values())
    assert sum(map(sum, timeline.goodput_requests_per_s.values())) * timeline.bin_s == 8
    for name, bins in timeline.ttft_ms.items():
        seen = [point for point in bins if point is not None]
        assert max(point.p50 for point in seen) <= (report.classes[name].ttft_ms.max or 0) + 1e-3
    assert any(point is not None for point in timeline.itl_ms["rt"])


@pytest.mark.parametrize("is_closed", [False, True])
def test_pictures_are_drawn_beside_the_streams(
    is_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread that runs no event loop: that of the streams goes on."""
    drawn: list[tuple[int, int]] = []

    def draw(_: PromptMaker, width: int, height: int) -> str:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        drawn.append((width, height))
        return "data:image/png;base64,AA"

    monkeypatch.setattr(PromptMaker, "picture", draw)
    traffic = open_loop(3, images="2:32x24")
    if is_closed:
        traffic = Traffic(
            **{name: getattr(traffic, name) for name in traffic.__struct_fields__}
            | {"arrivals": ArrivalKind.CLOSED, "concurrency": 2, "rate": None}
        )
    outcome, _ = run(traffic, endpoint="chat")
    assert len(outcome.records) == 3 and drawn == [(32, 24)] * 6
    assert all(record.is_completed for record in outcome.records)


@given(st.lists(st.integers(0, 200), max_size=12))
def test_events_are_the_same_however_the_network_cuts_them(cuts: list[int]) -> None:
    stream = b': ping\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": 2}\n\ndata: [DONE]\n\n'
    places = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})
    lines = EventLines()
    found = [
        payload for start, end in pairwise(places) for payload in lines.feed(stream[start:end])
    ]
    assert found == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("http://h:1/v1/", "http://h:1/v1"),
        ("https://h/gateway/v1", "https://h/gateway/v1"),
    ],
)
def test_urls(url: str, base: str) -> None:
    assert api_base(url) == base


@pytest.mark.parametrize("closes", [False, True])
def test_a_server_that_closes_connections_silently_gets_one_for_each_request(closes: bool) -> None:
    async def session() -> tuple[Run, MockServer]:
        async with MockServer(Behaviour(closes_silently=closes)) as server:
            options = SessionOptions(
                server=ServerOptions(url=server.url, model=""),
                api_key=None,
                ca_file=None,
                seed=0,
                text_seed=0,
                num_warmup=2,
                skip_first_s=0.0,
                skip_last_s=0.0,
                drain_s=30.0,
                saves_requests=False,
                shows_progress=False,
            )
            traffic = Traffic(arrivals=ArrivalKind.CLOSED, concurrency=2, num_requests=40)
            (run,) = await run_session(options, [Point("x", (traffic,))], lambda _: None)
            return run, server

    made, server = asyncio.run(asyncio.wait_for(session(), 60))
    assert made.classes["rt"].num_completed == 40 and made.client.is_calibrated
    peers = [received.peer for received in server.received]
    # Kept: one for the first two requests, one for calibration and warm-up, two of the run.
    assert len(set(peers)) == len(peers) if closes else len(set(peers)) <= 1 + 1 + 2
