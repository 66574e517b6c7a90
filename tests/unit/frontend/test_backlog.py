"""Bursts: what waits for threads is bounded, but not before the router's own queue would be."""

from __future__ import annotations

import asyncio
import functools
import gc
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_router import eventually, frontend, made_logprobs, says

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.config import ServeConfig
from lightserve.errors import InvalidRequest
from lightserve.frontend import json_body, structured_output
from lightserve.frontend.connections import ConnectionTable, Held, InFlight, Seats
from lightserve.frontend.errors import RequestFailed
from lightserve.frontend.json_body import MAX_ITEMS, Backlog
from lightserve.frontend.openai.completions import CompletionRequest
from lightserve.frontend.prompts import BYTES_PER_ID
from lightserve.frontend.structured_output import ConstraintChecker
from lightserve.grammar_process import Verdict
from lightserve.messages.common import Constraint, RegexConstraint
from lightserve.messages.frontend_router import RequestDelta, Submit, TokenDelta
from lightserve.turn_threads import WHOSE, TurnThreads
from lightserve.types import FinishReason, RequestId

PATIENCE_S = 60.0
EOS = 2
MIB = 2**20


def test_number_and_size_are_bounded() -> None:
    backlog = Backlog(max_items=3, max_size=10)
    for _ in range(2):  # what has left counts no more
        with ExitStack() as waiting:
            waiting.enter_context(backlog.admitted(6))
            with pytest.raises(RequestFailed), backlog.admitted(5):
                pass
            waiting.enter_context(backlog.admitted(4))
            waiting.enter_context(backlog.admitted(0))
            with pytest.raises(RequestFailed), backlog.admitted(0):
                pass
    with backlog.admitted(11):  # alone
        pass


def test_a_key_leaves_half_of_the_rest_to_others() -> None:
    """One that sends more than the threads can take does not use up the places of others."""
    backlog = Backlog(max_items=8, max_size=80)
    of_key = {"": copy_context(), "a": copy_context(), "b": copy_context()}
    for key, context in of_key.items():
        context.run(WHOSE.set, key)

    def is_let_in(key: str, size: int) -> bool:
        try:
            of_key[key].run(held.enter_context, backlog.admitted(size))
        except RequestFailed:
            return False
        return True

    for _ in range(2):  # what has left counts no more
        with ExitStack() as held:
            assert [is_let_in("a", 1) for _ in range(5)] == [True] * 4 + [False]
            assert [is_let_in("b", 1) for _ in range(3)] == [True] * 2 + [False]
            assert is_let_in("", 1)
        with ExitStack() as held:
            assert [is_let_in("a", 15) for _ in range(3)] == [True, True, False]
            assert [is_let_in("b", 30), is_let_in("b", 1)] == [True, False]
        with ExitStack() as held:
            assert [is_let_in("a", 79), is_let_in("a", 1), is_let_in("b", 1)] == [True, False, True]


def test_work_that_is_given_up_keeps_nothing_alive() -> None:
    """Its text, of megabytes perhaps, would wait with it for the threads, counted by no limit."""

    class Work:
        def __call__(self) -> None:
            pass

    async def scenario() -> None:
        backlog, threads, go_on = Backlog(max_items=1), TurnThreads(1, "work"), threading.Event()
        try:
            running = asyncio.create_task(threads.run(lambda: go_on.wait(PATIENCE_S)))
            await asyncio.sleep(0)
            work = Work()
            seen = weakref.ref(work)
            given_up = asyncio.create_task(backlog.in_thread(threads, work, 1))
            del work
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.wait({given_up})
            del given_up
            gc.collect()
            assert seen() is None
            following = asyncio.create_task(backlog.in_thread(threads, lambda: 5, 1))
            go_on.set()
            assert await running and await following == 5
        finally:
            go_on.set()
            threads.close()

    asyncio.run(scenario())


def test_keys_take_turns_in_threads() -> None:
    """Of pieces that take as long, one waits for one of each other key, however many they sent."""

    async def scenario() -> None:
        threads, order = TurnThreads(1, "work", clock=lambda: 0.0), list[str]()
        go_on = threading.Event()

        def send(key: str, number: int) -> asyncio.Task[None]:
            WHOSE.set(key)
            return asyncio.create_task(threads.run(lambda: order.append(f"{key}{number}")))

        running = asyncio.create_task(threads.run(lambda: go_on.wait(PATIENCE_S)))
        await asyncio.sleep(0)
        sent = [send("a", number) for number in range(4)]
        sent += [send("b", number) for number in range(2)]
        sent += [send("c", 0)]
        await asyncio.sleep(0)
        given_up = sent.pop(1)
        given_up.cancel()
        await asyncio.wait({given_up})
        go_on.set()
        await asyncio.gather(running, *sent)
        assert order == ["a0", "b0", "c0", "b1", "a2", "a3"], "a1 was given up in its turn"
        threads.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_keys_share_the_time_of_threads() -> None:
    """One whose pieces take ten times as long has one for ten of another's, running ones too."""

    async def scenario() -> None:
        now_s, order = 0.0, list[str]()
        threads, go_on = TurnThreads(1, "work", clock=lambda: now_s), threading.Event()

        def send(key: str, number: int, seconds: float) -> asyncio.Task[None]:
            def work() -> None:
                nonlocal now_s
                go_on.wait(PATIENCE_S)
                now_s += seconds
                order.append(f"{key}{number}")

            WHOSE.set(key)
            return asyncio.create_task(threads.run(work))

        sent = [send("large", number, 10.0) for number in range(100)]
        await asyncio.sleep(0)  # the first of them runs
        sent += [send("small", number, 1.0) for number in range(25)]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(*sent)
        places = [order.index(f"small{number}") for number in range(25)]
        assert places[0] == 1 and places[:9] == [*range(1, 10)]
        assert sum(name.startswith("large") for name in order[: places[-1]]) == 3
        late = asyncio.create_task(threads.run(lambda: 5))
        assert await late == 5
        await eventually(lambda: not threads._had_s)  # nothing is kept of keys without work
        threads.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


class TurnsByHand:
    """Threads of `TurnThreads` whose turns the test takes."""

    def __init__(self) -> None:
        self._turns: list[Callable[[], None]] = []

    def submit(self, turn: Callable[[], None]) -> None:
        self._turns.append(turn)

    def take(self) -> None:
        self._turns.pop()()


def test_a_key_that_sends_one_piece_after_the_other_has_no_more_time() -> None:
    """Between two pieces it has no work: what it has had counts all the same."""

    async def scenario() -> None:
        now_s, had_s, turns = 0.0, Counter[str](), TurnsByHand()
        threads = TurnThreads(1, "work", clock=lambda: now_s)
        threads._threads = turns  # type: ignore[assignment]

        def send(key: str, seconds: float) -> asyncio.Task[None]:
            def work() -> None:
                nonlocal now_s
                now_s += seconds
                had_s[key] += seconds

            WHOSE.set(key)
            return asyncio.create_task(threads.run(work))

        waiting = [send("many", 1.0) for _ in range(100)]
        one: asyncio.Task[None] | None = None
        for _ in range(100):
            if one is None or one.done():
                one = send("one", 4.0)
                waiting.append(one)
            await asyncio.sleep(0)
            turns.take()
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # the task learns that its work is done
        assert abs(had_s["one"] - had_s["many"]) <= 4.0, had_s
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_key_does_not_pay_later_for_what_others_left_it() -> None:
    """One thread has a long piece of a key that asks for no more, the other is another's alone."""

    async def scenario() -> None:
        now_s, had_s, turns = 0.0, Counter[str](), TurnsByHand()
        threads = TurnThreads(2, "work", clock=lambda: now_s)
        threads._threads = turns  # type: ignore[assignment]
        begun: list[Coroutine[object, None, None]] = []

        def send(key: str, work: Callable[[], None]) -> None:
            WHOSE.set(key)
            begun.append(threads.run(work))
            begun[-1].send(None)

        def piece(key: str) -> None:
            nonlocal now_s
            now_s += 1.0
            had_s[key] += 1.0

        def long() -> None:
            for _ in range(200):
                send("early", functools.partial(piece, "early"))
            for _ in range(100):
                turns.take()
            for _ in range(200):
                send("late", functools.partial(piece, "late"))
            for _ in range(40):
                turns.take()

        send("long", long)
        turns.take()
        assert had_s == {"early": 120.0, "late": 20.0}
        for waiting in begun:
            waiting.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_what_waits_in_threads_is_dropped_at_the_end() -> None:
    async def scenario() -> None:
        threads, go_on, done = TurnThreads(1, "work"), threading.Event(), list[str]()
        running = asyncio.create_task(threads.run(lambda: go_on.wait(PATIENCE_S)))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(threads.run(lambda: done.append("waited")))
        await asyncio.sleep(0)
        threads.close(lambda: done.append("last"))
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go_on.set()
        assert await running
        await eventually(lambda: bool(done))
        assert done == ["last"]

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_burst_of_chats_is_for_the_router_to_refuse() -> None:
    async def scenario() -> None:
        async with frontend(says([5, EOS])) as setup:
            assert setup.service.config.rt_max_waiting_requests <= MAX_ITEMS
            body = {
                "model": BUNDLED_MODEL_NAME,
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 2,
            }
            posts = [setup.post("/v1/chat/completions", body) for _ in range(300)]
            assert {answer.status_code for answer in await asyncio.gather(*posts)} == {200}

    asyncio.run(scenario())


class SlowProcess:
    """Stands for the process that compiles: it notes what it gets, and answers when it may."""

    def __init__(self) -> None:
        self.asked: list[Constraint] = []
        self.may_go_on = asyncio.Event()

    async def judge(self, constraint: Constraint) -> Verdict:
        self.asked.append(constraint)
        await self.may_go_on.wait()
        return Verdict()

    def close(self) -> int:
        return 0


def slow_checker() -> tuple[ConstraintChecker, SlowProcess]:
    checker, process = ConstraintChecker(), SlowProcess()
    checker._process = process  # type: ignore[assignment]
    return checker, process


def asks(checker: ConstraintChecker, pattern: str, sharer: str = "") -> asyncio.Task[Constraint]:
    check = checker.check(RegexConstraint(pattern=pattern), param="x", sharer=sharer)
    return asyncio.create_task(check)


def test_waiting_for_a_check_is_no_fault_of_the_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the process has it, being too many is the reason."""
    monkeypatch.setattr(structured_output, "START_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        checker, process = slow_checker()
        first = asks(checker, "a")
        await eventually(lambda: len(process.asked) == 1)
        with pytest.raises(RequestFailed) as refused:
            await asks(checker, "b")
        assert refused.value.status == 429
        assert not first.done()
        process.may_go_on.set()
        await first
        await asks(checker, "b")
        checker.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_requests_with_one_constraint_share_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "MAX_WAITING", 1)

    async def scenario() -> None:
        checker, process = slow_checker()
        same = [asks(checker, "a") for _ in range(100)]
        await eventually(lambda: len(process.asked) == 1)
        other = asks(checker, "b")
        await asyncio.sleep(0)
        with pytest.raises(RequestFailed):
            await asks(checker, "c")
        same[0].cancel()  # the others wait on
        process.may_go_on.set()
        ends: list[Any] = await asyncio.gather(*same, other, return_exceptions=True)
        assert isinstance(ends[0], asyncio.CancelledError)
        assert not any(isinstance(end, BaseException) for end in ends[1:])
        await asks(checker, "a")
        assert len(process.asked) == 2
        checker.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_who_has_taken_least_of_checks_goes_first() -> None:
    """And finds a place where another fills all of these: that one loses its newest."""

    async def scenario() -> None:
        checker, process = slow_checker()
        num_places = structured_output.MAX_WAITING
        greedy = [asks(checker, f"g{number}", "greedy") for number in range(num_places + 6)]
        await eventually(lambda: len(process.asked) == 1)
        await asyncio.sleep(0.01)  # the first of them takes its time
        late = [asks(checker, f"l{number}", "late") for number in range(3)]
        await asyncio.sleep(0)
        assert sum(map(len, checker._lines.values())) == num_places
        checker._taken_s["late"] = -1e6  # far less than the others, however slow this machine is
        process.may_go_on.set()
        ends: list[Any] = await asyncio.gather(*greedy, *late, return_exceptions=True)
        refused = [number for number, end in enumerate(ends) if isinstance(end, RequestFailed)]
        assert len(refused) == 5 + 3 and max(refused) < len(greedy)
        patterns = [str(constraint.pattern) for constraint in process.asked]  # type: ignore[union-attr]
        assert [patterns.index(f"l{number}") for number in range(3)] == [1, 2, 3]
        assert not checker._lines and not checker._checks
        checker.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_who_wants_what_waits_in_the_line_of_another_has_a_turn_of_its_own() -> None:
    async def scenario() -> None:
        checker, process = slow_checker()
        checker._taken_s["greedy"] = 1e6
        greedy = [asks(checker, name, "greedy") for name in ("heavy", "more", "common")]
        await eventually(lambda: len(process.asked) == 1)
        late = asks(checker, "common", "late")
        await asyncio.sleep(0)
        checker._taken_s["late"] = 0.0  # it has had less
        process.may_go_on.set()
        await asyncio.gather(*greedy, late)
        patterns = [str(constraint.pattern) for constraint in process.asked]  # type: ignore[union-attr]
        assert patterns == ["heavy", "common", "more"], "checked once, in the turn of the late"
        assert not checker._lines and not checker._checks
        checker.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_constraint_may_come_again_as_its_check_is_given_up() -> None:
    async def scenario() -> None:
        checker, process = slow_checker()
        first = asks(checker, "a")
        await eventually(lambda: len(process.asked) == 1)
        refused = asks(checker, "b")
        await asyncio.sleep(0)
        (check,) = checker._lines[""]
        checker._refuse(check)
        again = asks(checker, "b")  # begins before the refused one has heard of it
        await asyncio.sleep(0)
        process.may_go_on.set()
        ends: list[Any] = await asyncio.gather(first, refused, again, return_exceptions=True)
        assert isinstance(ends[1], RequestFailed)
        assert not any(isinstance(end, BaseException) for end in (ends[0], ends[2]))
        assert not checker._lines and not checker._checks
        checker.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_nothing_is_kept_of_constraints_whose_requests_have_left() -> None:
    async def scenario() -> None:
        checker, process = slow_checker()
        first = asks(checker, "a")
        await eventually(lambda: len(process.asked) == 1)
        left = asks(checker, "b")
        await asyncio.sleep(0)
        seen = weakref.ref(checker._lines[""][0])
        left.cancel()
        await asyncio.wait({left})
        del left
        gc.collect()
        assert seen() is None
        process.may_go_on.set()
        await first
        checker.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_who_was_away_has_saved_up_no_share_of_checks() -> None:
    async def scenario() -> None:
        checker, process = slow_checker()
        checker._taken_s["busy"] = 50.0
        busy = [asks(checker, f"b{number}", "busy") for number in range(2)]
        await eventually(lambda: len(process.asked) == 1)
        new = asks(checker, "n", "new")
        await asyncio.sleep(0)
        assert checker._taken_s["new"] == 50.0
        process.may_go_on.set()
        await asyncio.gather(*busy, new)
        checker.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_chat_waits_with_all_that_its_template_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    admitted = Backlog.admitted

    def noting(backlog: Backlog, size: int) -> AbstractContextManager[None]:
        sizes.append(size)
        return admitted(backlog, size)

    monkeypatch.setattr(Backlog, "admitted", noting)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "x" * 3000}}
    tool = {"type": "function", "function": {"name": "f", "description": "y" * 3000}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "z"},
        {"role": "user", "content": "and?"},
    ]

    async def scenario() -> None:
        async with frontend(says([5, EOS]), tool_call_parser="hermes") as setup:
            body = {"model": BUNDLED_MODEL_NAME, "messages": messages, "tools": [tool]}
            await setup.post("/v1/chat/completions", {**body, "max_tokens": 2})
            assert sizes and sizes[-1] > 6000

    asyncio.run(scenario())


def test_lists_of_ids_wait_only_if_they_can_be_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    admitted = Backlog.admitted

    def noting(backlog: Backlog, size: int) -> AbstractContextManager[None]:
        sizes.append(size)
        return admitted(backlog, size)

    monkeypatch.setattr(Backlog, "admitted", noting)

    async def scenario() -> None:
        async with frontend(says([5, EOS])) as setup:
            prompts = setup.service.encoder
            assert len(await prompts.encode_ids([5] * 500, param="prompt")) == 500
            assert sizes == [500 * BYTES_PER_ID]
            with pytest.raises(InvalidRequest, match="maximum context length"):
                await prompts.encode_ids([5] * 100_000, param="prompt")
            assert len(sizes) == 1

    asyncio.run(scenario())


def test_bodies_in_flight_are_bounded_in_sum() -> None:
    def body(num_biases: int) -> dict[str, Any]:
        biases = {str(number): 1.0 for number in range(300, 300 + num_biases)}
        return {
            "model": BUNDLED_MODEL_NAME,
            "prompt": [5],
            "max_tokens": 2,
            "logit_bias": biases,
        }

    async def scenario() -> None:
        of_two = 2 * json_body.memory_of(body(500))
        async with frontend(max_held_body_bytes=2 * of_two + 10_000) as setup:
            waiting = [asyncio.create_task(setup.post("/v1/completions", body(500)))]
            await setup.router.submitted(1)
            waiting.append(asyncio.create_task(setup.post("/v1/completions", body(500))))
            await setup.router.submitted(2)
            refused = await setup.post("/v1/completions", body(500))
            assert refused.status_code == 429 and "retry-after" in refused.headers
            most, size = 2 * of_two + 10_000, setup.service.in_flight.bodies.size // 2
            assert refused.json()["error"]["message"] == (
                f"the bodies of requests in progress may take {most} bytes (--max-held-body-bytes),"
                f" and those of one client half of the bytes that others leave: now {most // 2};"
                f" {2 * size} are taken and this one needs {size}; try again"
            )
            waiting.append(asyncio.create_task(setup.post("/v1/completions", body(3))))
            await setup.router.submitted(3)
            for submit in setup.router.submits:
                end = RequestDelta(submit.request_id, [EOS], FinishReason.STOP)
                setup.service.router.on_message(TokenDelta(requests=[end]))
            answers = await asyncio.gather(*waiting)
            assert [answer.status_code for answer in answers] == [200] * 3
            assert (setup.service.in_flight.bodies.size, setup.service.in_flight.count) == (0, 0)
            setup.router.answer = says([EOS])
            alone = await setup.post("/v1/completions", {**body(1024), "user": "u" * 512})
            assert alone.status_code == 200, "it may be larger"

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_bodies_of_one_client_leave_room_for_those_of_others() -> None:
    in_flight = InFlight(max_bytes=64 * MIB)
    with ExitStack() as stack:
        for count in (8, 4, 2, 1):
            owner = f"key {count}"
            for _ in range(count):
                stack.enter_context(in_flight.admitted(owner, 4 * MIB))
            with pytest.raises(RequestFailed) as raised, in_flight.admitted(owner, 4 * MIB):
                pass
            assert raised.value.status == 429
            assert raised.value.is_queue_full, "it says nothing of the request: a batch's waits"
        with in_flight.admitted("key of small requests", 1000):
            assert in_flight.count == 16
    assert (in_flight.bodies.size, in_flight.count) == (0, 0)


def test_seats_go_to_clients_in_turn() -> None:
    async def scenario() -> None:
        seats, order, gate = Seats(num_seats=1, max_waiting=3), [], asyncio.Event()

        async def work(owner: str) -> None:
            async with seats.taken(owner):
                order.append(owner)
                await gate.wait()

        tasks = [asyncio.create_task(work(owner)) for owner in ("a", "a", "a", "b", "c")]
        await asyncio.sleep(0)
        with pytest.raises(RequestFailed) as raised:
            async with seats.taken("a"):
                pass
        assert raised.value.status == 429
        gate.set()
        await asyncio.gather(*tasks)
        assert order == ["a", "b", "c", "a", "a"]
        assert not seats._counts and not seats._turns

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_body_counts_by_the_memory_that_it_takes() -> None:
    async def counted(body: bytes) -> int:
        reader = json_body.BodyReader(max_depth=8, max_bytes=10**9)
        try:
            _, num_bytes = await reader._parse(body, CompletionRequest, 10**9)
            return num_bytes
        finally:
            reader.close()

    asked = b'{"model": "m", "prompt": %s}'
    blanks, text = b" " * 10**6, b'"' + b"x" * 10**6 + b'"'
    assert asyncio.run(counted(asked % (blanks + b'"hi"' + blanks))) < 2000
    assert 1_000_000 < asyncio.run(counted(asked % text)) < 1_002_000
    wide = b'"' + "\U0001f600".encode() + b"x" * 10**6 + b'"'
    assert 4_000_000 < asyncio.run(counted(asked % wide)) < 4_002_000, "four bytes a character"
    assert asyncio.run(counted(asked % (b"[" + b"5," * 10**5 + b"5]"))) >= 800_000


def test_a_prompt_that_waits_takes_four_bytes_a_token() -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            text = "word and another, " * 500
            token_ids = await setup.service.encoder.encode_text(text, param="prompt")
            assert sys.getsizeof(token_ids) <= 4 * len(token_ids) + 128

    asyncio.run(scenario())


def test_a_constraint_that_is_given_up_before_its_check_is_forgotten() -> None:
    async def scenario() -> None:
        checker, process = slow_checker()
        first, given_up = asks(checker, "a"), asks(checker, "b")
        await eventually(lambda: len(process.asked) == 1)
        assert len(checker._checks) == 2
        given_up.cancel()
        await asyncio.wait({given_up})
        assert len(checker._checks) == 1 and not checker._lines
        process.may_go_on.set()
        await first
        assert len(process.asked) == 1
        checker.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


# Memory held for clients: what makes room where it is too much.

MAX_BYTES = 1024


@dataclass(eq=False)
class Upload:
    is_refused: bool = False

    def evict(self) -> None:
        raise AssertionError("bodies are no idle connections")

    def refuse_body(self) -> None:
        self.is_refused = True


def _table() -> ConnectionTable:
    limits = ServeConfig(
        max_body_bytes=MAX_BYTES, max_pending_body_bytes=MAX_BYTES, max_connections_per_ip=9
    )
    return ConnectionTable(limits, max_connections=9, rejects=Counter())


@pytest.mark.parametrize("attacker", ["key mallory", "key alice"])
@pytest.mark.parametrize("num_bytes", [10, 100, 900])
def test_new_bodies_do_not_push_out_a_slow_upload(attacker: str, num_bytes: int) -> None:
    """Of another client, or of the same one, as long as it comes on and they do not."""
    table = _table()
    slow, others = Upload(), []
    for step in range(1, 91):
        table.hold_body(slow, "key alice", step)
        for _ in range(1 + 200 // num_bytes):
            others.append(Upload())
            table.hold_body(others[-1], attacker, num_bytes)
    assert not slow.is_refused
    assert table.num_pending_body_bytes <= MAX_BYTES
    assert sum(upload.is_refused for upload in others) > len(others) // 3
    assert table.rejects["pending_body_evicted"] == sum(other.is_refused for other in others)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.integers(0, 600)), max_size=60)
)
def test_the_sums_are_right_and_bounded(steps: list[tuple[int, str, int]]) -> None:
    held: Held[int] = Held(MAX_BYTES)
    expected: dict[int, tuple[str, int]] = {}
    for holder, owner, num_bytes in steps:
        if num_bytes == 0:
            held.release(holder)
            expected.pop(holder, None)
            continue
        expected[holder] = owner, num_bytes
        for gone in held.hold(holder, owner, num_bytes):
            shares: Counter[str] = Counter()
            for name, size in expected.values():
                shares[name] += size
            assert shares[expected.pop(gone)[0]] == max(shares.values())
        assert held.num_bytes == sum(size for _, size in expected.values()) <= MAX_BYTES
    for holder in range(6):
        held.release(holder)
    assert held.num_bytes == 0


BODY: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "prompt": [5, 6, 7], "max_tokens": 2000}


def test_kept_answers_are_bounded_in_sum() -> None:
    """Each has 2,000 tokens with 21 log-probabilities: half a megabyte."""

    def say(submit: Submit) -> list[RequestDelta]:
        return says([50] * 2000)(submit)[:-1]

    async def scenario() -> None:
        async with frontend(say, max_kept_answer_bytes=1_200_000) as setup:
            setup.router.turns_between = 0
            kept = setup.service.kept
            answers = []
            for number in range(3):
                answer = setup.post("/v1/completions", BODY | {"logprobs": 20})
                answers.append(asyncio.create_task(answer))
                await setup.router.submitted(number + 1)
                wanted = min(number + 1, 2) * 500_000
                await eventually(lambda wanted=wanted: kept.num_bytes > wanted)
            first = await answers[0]
            assert (first.status_code, first.json()["error"]["code"]) == (429, "overloaded")
            assert setup.service.observation.rejects["kept_answer_evicted"] == 1
            assert setup.router.aborted_ids == [0]
            await eventually(lambda: kept.num_bytes > 1_000_000)
            assert kept.num_bytes <= 1_200_000
            for number in (1, 2):
                logprobs = made_logprobs(20, 1999)
                end = RequestDelta(RequestId(number), [2], FinishReason.STOP, logprobs=logprobs)
                setup.service.router.on_message(TokenDelta(requests=[end]))
                answer = await answers[number]
                assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == 2000
            assert kept.num_bytes == 0

    asyncio.run(scenario())
