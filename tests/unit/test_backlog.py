"""Bursts: what waits for threads is bounded, but not before the router's own queue would be."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from typing import Any

import pytest
from support.fake_router import eventually, frontend, says

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.errors import InvalidRequest
from lightserve.frontend import constraint_check
from lightserve.frontend.backlog import MAX_ITEMS, Backlog
from lightserve.frontend.constraint_check import ConstraintChecker
from lightserve.frontend.failures import RequestFailed
from lightserve.messages.common import Constraint, RegexConstraint

PATIENCE_S = 60.0
EOS = 2


def test_number_and_size_are_bounded() -> None:
    backlog = Backlog(max_items=3, max_size=10)
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


def test_waiting_for_a_check_is_no_fault_of_the_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes time only from when a thread has it; before that, being too many is the reason."""
    monkeypatch.setattr(constraint_check, "NUM_THREADS", 1)
    monkeypatch.setattr(constraint_check, "START_TIMEOUT_S", 0.05)
    may_go_on, checked = threading.Event(), []

    def slow(checker: ConstraintChecker, constraint: Constraint) -> str | None:
        checked.append(constraint)
        assert may_go_on.wait(PATIENCE_S)
        return None

    monkeypatch.setattr(ConstraintChecker, "_complaint", slow)

    async def scenario() -> None:
        checker = ConstraintChecker()
        first = asyncio.create_task(checker.check(RegexConstraint(pattern="a"), param="x"))
        await eventually(lambda: len(checked) == 1)
        with pytest.raises(RequestFailed) as refused:
            await checker.check(RegexConstraint(pattern="b"), param="x")
        assert refused.value.status == 429
        assert not first.done()
        may_go_on.set()
        await first
        await checker.check(RegexConstraint(pattern="b"), param="x")
        may_go_on.clear()
        monkeypatch.setattr(constraint_check, "COMPILE_TIMEOUT_S", 0.05)
        with pytest.raises(InvalidRequest, match=r"x takes more than 0.05 s to compile"):
            await checker.check(RegexConstraint(pattern="c"), param="x")
        may_go_on.set()
        checker.close()

    asyncio.run(scenario())


def test_requests_with_one_constraint_share_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint_check, "MAX_WAITING", 2)
    may_go_on, checked = threading.Event(), []

    def slow(checker: ConstraintChecker, constraint: Constraint) -> str | None:
        checked.append(constraint)
        assert may_go_on.wait(PATIENCE_S)
        return None

    monkeypatch.setattr(ConstraintChecker, "_complaint", slow)

    async def scenario() -> None:
        checker = ConstraintChecker()

        def asks(pattern: str) -> asyncio.Task[None]:
            return asyncio.create_task(checker.check(RegexConstraint(pattern=pattern), param="x"))

        same = [asks("a") for _ in range(100)]
        other = asks("b")
        await eventually(lambda: len(checked) == 2)
        with pytest.raises(RequestFailed):
            await asks("c")
        same[0].cancel()  # the others wait on
        may_go_on.set()
        ends: list[Any] = await asyncio.gather(*same, other, return_exceptions=True)
        assert isinstance(ends[0], asyncio.CancelledError)
        assert ends[1:] == [None] * 100
        await asks("a")
        assert len(checked) == 2
        checker.close()

    asyncio.run(scenario())
