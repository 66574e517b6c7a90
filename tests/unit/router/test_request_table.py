"""Columns of requests that run say what their requests would say one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.policy_scenes import BE, RT, make_request

from lightserve.router.request import Request
from lightserve.router.request_table import RequestTable, Running
from lightserve.router.slo import CompletionLedger, TokenDeadlines
from lightserve.types import SLO

MS = st.none() | st.floats(1, 500)
SLOS = st.builds(
    lambda ttft, tpot, factor: SLO(
        ttft_ms=ttft, tpot_ms=tpot, mtpot_ms=None if tpot is None else tpot * factor
    ),
    MS,
    MS,
    st.floats(1, 5),
)
GAPS = st.lists(st.floats(0, 0.3), max_size=6)


def decoding(number: int, slo: SLO, *, output: int = 1) -> Request:
    request = make_request(number, output=output)
    request.deadlines = TokenDeadlines(slo, 0.0)
    return request


@given(st.lists(st.tuples(SLOS, GAPS, st.booleans()), min_size=1, max_size=5), st.floats(0, 1))
def test_deadlines_move_as_those_of_each_request(
    histories: list[tuple[SLO, list[float], bool]], wait_s: float
) -> None:
    """Tokens one by one, some of them from rows of a table; then with one in flight or none."""
    table = RequestTable(len(histories))
    for number, (slo, gaps, is_in_flight) in enumerate(histories):
        request, alone = decoding(number, slo), TokenDeadlines(slo, 0.0)
        row = table.acquire(request)
        now_s = 0.0
        for index, gap_s in enumerate(gaps):
            now_s += gap_s
            alone.on_tokens(1, now_s)
            if index == 0 or index % 3 == 2:  # the first one, and others, come alone
                table.on_tokens(request, 1, now_s)
            else:
                table.append(np.array([row]), np.array([7], np.int32), now_s)
        if is_in_flight:
            table.send(np.array([row]))
        start_s = now_s + wait_s
        due, lent, of_late = (column[row] for column in table.residuals(start_s))
        count = int(is_in_flight)
        expected = alone.residual_behind(1, start_s) if is_in_flight else alone.residual(start_s)
        assert due == pytest.approx(expected)
        assert lent == pytest.approx(alone.lent_behind(count, start_s))
        assert of_late == pytest.approx(alone.residual_of_late(count, start_s))
        if not is_in_flight:
            table.release(request)
            assert isinstance(request.deadlines, TokenDeadlines)
            assert request.deadlines.kept == alone.kept
            assert request.deadlines.residual(start_s) == pytest.approx(alone.residual(start_s))


def test_what_has_no_deadline_is_never_due() -> None:
    table = RequestTable(2)
    row = table.acquire(make_request(0, output=3))
    job = make_request(1, BE, output=3)
    job.deadlines = CompletionLedger(10.0, 0.0, num_tokens_to_come=5)
    other = table.acquire(job)
    residuals = table.residuals(1.0)
    assert [column[row] for column in residuals] == [math.inf] * 3
    assert residuals.due[other] == job.deadlines.residual(1.0)
    assert residuals.lent[other] == job.deadlines.lent_behind(0, 1.0)


@given(st.data())
def test_what_can_be_scheduled_is_what_each_request_says(data: st.DataObject) -> None:
    table, requests = RequestTable(6), []
    for number in range(data.draw(st.integers(1, 6))):
        output = data.draw(st.none() | st.integers(1, 20))
        computed = None if output else data.draw(st.integers(0, 7))
        request = make_request(number, prompt=8, output=output, computed=computed)
        request.max_tokens = data.draw(st.integers(1, 25))
        request.num_acknowledged_tokens = data.draw(st.none() | st.integers(0, 20))
        row = table.acquire(request)
        if request.num_schedulable_tokens == 1 and data.draw(st.booleans()):
            table.send(np.array([row]))
        request.acknowledge(data.draw(st.integers(0, 20)))
        request.set_awaits_grammar(data.draw(st.booleans()))
        requests.append(request)
    if data.draw(st.booleans()):
        table.end(requests.pop(0))
    running = Running(table)
    assert list(running) == requests
    expected = [request.num_schedulable_tokens for request in requests]
    assert running.schedulable[running.rows].tolist() == expected
    decodes, prompts, blocked = running.sort_out(running.rows)
    assert table.of(decodes) == [r for r in requests if r.num_schedulable_tokens == 1]
    assert prompts == [r for r in requests if r.num_schedulable_tokens > 1]
    assert table.of(blocked) == [r for r in requests if r.num_schedulable_tokens == 0]


def test_rows_that_end() -> None:
    """By a token that ends one of them (perhaps of another row), or by number."""
    table = RequestTable(4)
    rows = np.array([table.acquire(make_request(number, output=3)) for number in range(4)])
    requests = table.of(rows)
    assert not table.ends_with(rows, np.array([1, 2, 3, 4], np.int32)).any()
    table.release(requests[1])
    requests[1].eos_token_ids = frozenset({9})
    table.acquire(requests[1])
    tokens = np.array([9, 9, 3, 4], np.int32)
    assert table.ends_with(rows, tokens).tolist() == [True, True, False, False]
    table.release(requests[1])
    rest = rows[[0, 2, 3]]
    assert not table.ends_with(rest, np.array([9, 9, 9], np.int32)).any()
    table.cells["max_tokens"][int(rows[3])] = 4
    assert table.ends_with(rest, np.array([5, 5, 5], np.int32)).tolist() == [False, False, True]


def test_progress_goes_into_the_row_and_comes_back() -> None:
    table = RequestTable(2)
    request = make_request(0, RT, prompt=8, output=3)
    row = np.array([table.acquire(request)])
    assert (request.next_position, request.num_known_tokens) == (10, 11)
    table.send(row)
    assert (request.next_position, request.num_known_tokens) == (11, 12)
    assert (request.num_computed_tokens, request.num_inflight_steps) == (10, 1)
    table.receive(row)
    table.append(row, np.array([5], np.int32), 1.0)
    assert request.output_token_ids[-1] == 5 and request.num_known_tokens == 12
    table.release(request)
    assert request.row is None and request.next_position == 11
    assert table.take_left() == (0,) and table.take_left() == ()
    assert len(table) == 0 and table.num_free == 2
