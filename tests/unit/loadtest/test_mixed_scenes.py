"""The scenes of `lightserve bench mixed`, and what is said of them, by runs made by hand."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from rich.console import Console

from lightserve.errors import LoadTestError
from lightserve.loadtest.mixed import (
    Mix,
    check_scenes,
    keeps_pace,
    makespan_s,
    print_scenes,
    scenes,
    verdict,
)
from lightserve.loadtest.options import BE, RT, ArrivalKind, ServerOptions, Traffic
from lightserve.loadtest.result import Record, Run
from lightserve.loadtest.runner import RunOutcome
from lightserve.loadtest.session import counting_window, make_run

MIX = Mix(
    chats=Traffic(arrivals=ArrivalKind.POISSON, rate=2.0, duration_s=20.0),
    batch=Traffic(request_class=BE, arrivals=ArrivalKind.CLOSED, num_requests=6),
    caps=(2, 8),
    class_body={"priority": 1},
    limit_s=45.0,
)


def answer(request_class: str, start_s: float, ttft_s: float, gap_s: float) -> Record:
    """Return a completed request of three events."""
    made = Record(int(request_class == BE), request_class, start_s, 10, 3)
    made.sent_s = start_s
    first_s = start_s + ttft_s
    made.event_times_s = array("d", [first_s, first_s + gap_s, first_s + 2 * gap_s])
    made.event_chars = array("q", [4, 4, 4])
    made.prompt_tokens, made.output_tokens = 10, 3
    made.end_s = first_s + 2 * gap_s
    return made


def scene(
    label: str,
    ttft_ms: float = 100.0,
    itl_ms: float = 10.0,
    *,
    cap: int = 6,
    batch_s: float = 8.0,
    num_done: int = 6,
    num_failed: int = 0,
    num_chats: int = 4,
    body: dict[str, Any] | None = None,
) -> Run:
    """Return a run whose chats all have these latencies, and whose batch takes `batch_s`."""
    chats = [answer(RT, 0.1 * n, ttft_ms / 1e3, itl_ms / 1e3) for n in range(num_chats)]
    for failed in range(num_failed):
        chats[failed].fail("torn", "no end", 1.0)
    batch = [] if label == "alone" else [answer(BE, 0.0, batch_s, 0.0) for _ in range(6)]
    for left in batch[num_done:]:
        left.fail("unfinished", "the run ended", 45.0)
    traffic = [MIX.chats]
    if batch:
        closed = Traffic(
            request_class=BE, arrivals=ArrivalKind.CLOSED, num_requests=6, concurrency=cap
        )
        traffic.append(closed)
    outcome = RunOutcome([*chats, *batch], 1.0, 10.0, 0.1, was_interrupted=False)
    return make_run(
        outcome,
        label=label,
        started_at="",
        server=ServerOptions(url="http://x", model="m", be_body=body or {}),
        traffic=traffic,
        seed=0,
        text_seed=0,
        window=counting_window(outcome, skip_first_s=0, skip_last_s=0),
        is_calibrated=True,
        saves_requests=False,
    )


ALONE = scene("alone")


def test_every_scene_has_the_same_chats_and_its_own_batch() -> None:
    alone, unguarded, two, eight, own = scenes(MIX)
    assert alone.traffic == (MIX.chats,) and not alone.ends_with_last
    labels = [point.label for point in (unguarded, two, eight, own)]
    assert labels == ["unguarded", "cap 2", "cap 8", "own class"]
    for point, at_once in ((unguarded, 6), (two, 2), (eight, 6), (own, 6)):
        chats, batch = point.traffic
        assert (chats.rate, chats.duration_s) == (2.0, 45.0) and point.ends_with_last
        assert (batch.concurrency, batch.num_requests, batch.duration_s) == (at_once, 6, 45.0)
    assert own.be_body == {"priority": 1} and unguarded.be_body == two.be_body == {}


def test_a_server_without_a_class_has_no_scene_of_it() -> None:
    points = scenes(Mix(MIX.chats, MIX.batch, (), {}, 45.0))
    assert [point.label for point in points] == ["alone", "unguarded"]


@pytest.mark.parametrize(
    ("ttft_ms", "itl_ms", "num_failed", "is_kept"),
    [
        (149.0, 16.9, 0, True),
        (151.0, 10.0, 0, False),
        (100.0, 17.1, 0, False),
        (100.0, 10.0, 1, False),
        (50.0, 5.0, 0, True),
    ],
)
def test_chats_are_left_in_peace_within_both_limits(
    ttft_ms: float, itl_ms: float, num_failed: int, is_kept: bool
) -> None:
    run = scene("cap 2", ttft_ms, itl_ms, num_failed=num_failed)
    assert keeps_pace(run, ALONE) == is_kept


def test_chats_that_all_failed_are_not_left_in_peace() -> None:
    assert not keeps_pace(scene("cap 2", num_failed=4), ALONE)


def test_the_verdict_names_the_largest_cap_that_keeps_both() -> None:
    text = verdict(
        [
            ALONE,
            scene("unguarded"),  # within the limits, but no cap
            scene("cap 1", cap=1, batch_s=40.0),
            scene("cap 2", cap=2, batch_s=20.0),
            scene("cap 4", cap=4, itl_ms=40.0),
            scene("own class", batch_s=19.0),
        ]
    )
    assert "of alone is 2: the batch took 20" in text
    assert text.endswith("the server's own class keeps it: the batch took 19.0 s")


def test_the_verdict_without_such_a_cap_and_of_a_batch_that_did_not_end() -> None:
    slow = scene("own class", itl_ms=40.0, num_done=5)
    assert makespan_s(slow) is None and makespan_s(ALONE) is None
    text = verdict([ALONE, scene("cap 2", ttft_ms=300.0), slow])
    assert text.startswith("no cap keeps TTFT p99 within 1.5 x and ITL p99 within 1.7 x")
    assert text.endswith(
        "does not keep it: the batch took longer than the scene (5 of 6 completed)"
    )
    assert "own class" not in verdict([ALONE, scene("unguarded")])


def test_a_batch_that_ended_before_a_chat_arrived_is_nothing_to_compare() -> None:
    check_scenes([ALONE, scene("unguarded", num_chats=1)])
    with pytest.raises(LoadTestError, match=r"scene cap 2: .* before a chat .* --rate or --batch"):
        check_scenes([ALONE, scene("unguarded"), scene("cap 2", num_chats=0)])


def test_few_chats_and_a_class_that_may_be_ignored_are_said() -> None:
    console = Console(width=200, record=True)
    print_scenes(console, [scene("alone", num_chats=60), scene("own class", body={"priority": 1})])
    text = console.export_text()
    assert "fewer than 50 chats in: own class;" in text
    assert '{"priority":1}; a server that ignores it is unguarded' in text
