"""Checks constraints before a request is taken: off the event loop, bounded, each one once.

Requests with the same one wait for the same check, however many come before it has ended.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from lightserve.errors import GrammarError, InvalidRequest
from lightserve.frontend.backlog import Backlog
from lightserve.frontend.failures import overloaded
from lightserve.messages.common import Constraint, GrammarConstraint
from lightserve.structured.limits import is_gbnf, yield_to_others

if TYPE_CHECKING:
    from llguidance import LLTokenizer

NUM_THREADS = 2
MAX_WAITING = 64
"""Constraints, whoever waits for them."""
MAX_KNOWN = 1024
START_TIMEOUT_S = 5.0
"""For a thread to begin: later is too much load, which says nothing about the constraint."""
COMPILE_TIMEOUT_S = 5.0
"""From then on; compiling by itself is bounded by its work (see `structured`)."""
LARGE_SHARE = 0.5
"""Of that time: who has had less of a processor is held up by others, not by the constraint."""


@dataclass
class _Thread:
    """Which thread works on a constraint, once one does."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    _clock_id: int = 0
    _start_s: float = 0.0

    def begin(self) -> None:
        """Note that it is the calling one."""
        self._clock_id = time.pthread_getcpuclockid(threading.get_ident())
        self._start_s = time.thread_time()

    def cpu_s(self) -> float:
        """Return what CPU time it has spent on the constraint."""
        return time.clock_gettime(self._clock_id) - self._start_s


@dataclass
class _Check:
    """One that has yet to end."""

    thread: _Thread
    work: asyncio.Future[str | None]
    waiting: list[Constraint]
    """It, until the thread takes it: its place among what threads have yet to do may stay."""
    num_waiting: int = 0


class ConstraintChecker:
    """Knows which constraints compile.

    llguidance is loaded with the first one. Grammars are compiled against a vocabulary of bytes:
    whether they are valid does not depend on the model's, which takes a hundred times the memory.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(
            NUM_THREADS, thread_name_prefix="grammar", initializer=yield_to_others
        )
        self._checks: dict[bytes, _Check] = {}
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        """By digest: what is wrong with a constraint, None if nothing is."""
        self._translations = Backlog(max_items=MAX_WAITING)

    async def in_lark(self, constraint: Constraint, *, param: str) -> Constraint:
        """Return a grammar in Lark's notation, and every other constraint as it is.

        Raises:
            InvalidRequest: it is in another notation, and cannot be translated.
            RequestFailed: too many are waiting.
        """
        if not (isinstance(constraint, GrammarConstraint) and is_gbnf(constraint.grammar)):
            return constraint
        grammar = constraint.grammar
        try:
            lark = await self._translations.in_thread(
                self._threads, functools.partial(_lark_of, grammar), len(grammar)
            )
        except GrammarError as error:
            raise _refusal(param, str(error)) from None
        return GrammarConstraint(grammar=lark)

    async def check(self, constraint: Constraint, *, param: str) -> None:
        """Check that a constraint can be enforced.

        Raises:
            InvalidRequest: it cannot; names the field and says why.
            RequestFailed: too many are waiting.
        """
        key = hashlib.blake2b(repr(constraint).encode(errors="replace"), digest_size=16).digest()
        if key not in self._known:
            self._known[key] = await self._in_thread(key, constraint, param)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        if (complaint := self._known[key]) is not None:
            raise _refusal(param, complaint)

    def close(self) -> None:
        """Let running work end; drop what waits."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, key: bytes, constraint: Constraint, param: str) -> str | None:
        check = self._checks.get(key)
        if check is None:
            if len(self._checks) >= MAX_WAITING:
                raise overloaded()
            self._checks[key] = check = self._begin(constraint)
        check.num_waiting += 1
        try:
            return await _result(check, param)
        finally:
            check.num_waiting -= 1
            if check.num_waiting == 0:
                check.work.cancel()  # nobody wants it any more, if it has not ended
                check.waiting.clear()
                del self._checks[key]

    def _begin(self, constraint: Constraint) -> _Check:
        """Hand a constraint to a thread."""
        loop, thread, waiting = asyncio.get_running_loop(), _Thread(), [constraint]

        def work() -> str | None:
            thread.begin()
            loop.call_soon_threadsafe(thread.begun.set)
            return self._complaint(waiting.pop())

        return _Check(thread, loop.run_in_executor(self._threads, work), waiting)

    # ------------------------------------------------------------------ in a thread

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from lightserve.structured.vocabulary import byte_vocabulary  # noqa: PLC0415

        return byte_vocabulary()

    def _complaint(self, constraint: Constraint) -> str | None:
        """Return what is wrong with a constraint."""
        # Most frontends never see one: llguidance is 10 MB.
        from lightserve.structured.grammars import compile_matcher  # noqa: PLC0415

        try:
            compile_matcher(constraint, self._vocabulary)
        except GrammarError as error:
            return str(error)
        return None


def _lark_of(grammar: str) -> str:
    from lightserve.structured.grammars import lark_of_gbnf  # noqa: PLC0415

    return lark_of_gbnf(grammar)


def _refusal(param: str, complaint: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param} cannot be enforced: {complaint}", param=param, code="invalid_constraint"
    )


async def _result(check: _Check, param: str) -> str | None:
    """Return what is wrong with a constraint. Raises what `ConstraintChecker.check` does."""
    try:
        await asyncio.wait_for(check.thread.begun.wait(), START_TIMEOUT_S)
    except TimeoutError:
        raise overloaded() from None
    try:
        return await asyncio.wait_for(asyncio.shield(check.work), COMPILE_TIMEOUT_S)
    except TimeoutError:
        if check.thread.cpu_s() < LARGE_SHARE * COMPILE_TIMEOUT_S:
            raise overloaded() from None
        raise InvalidRequest(
            f"{param} takes more than {COMPILE_TIMEOUT_S:g} s to compile",
            param=param,
            code="invalid_constraint",
        ) from None
