"""Checks constraints before a request is taken: off the event loop, bounded, each one once."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

from lightserve.errors import GrammarError, InvalidRequest
from lightserve.frontend.failures import overloaded
from lightserve.messages.common import Constraint

if TYPE_CHECKING:
    from llguidance import LLTokenizer

NUM_THREADS = 2
MAX_WAITING = 64
MAX_KNOWN = 1024
DEADLINE_S = 5.0
"""For waiting and compiling; compiling by itself is bounded by its work (see `structured`)."""


class ConstraintChecker:
    """Knows which constraints compile.

    llguidance is loaded with the first one. Grammars are compiled against a vocabulary of bytes:
    whether they are valid does not depend on the model's, which takes a hundred times the memory.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._num_waiting = 0
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        """By digest: what is wrong with a constraint, None if nothing is."""

    async def check(self, constraint: Constraint, *, param: str) -> None:
        """Check that a constraint can be enforced.

        Raises:
            InvalidRequest: it cannot; names the field and says why.
            RequestFailed: too many are waiting.
        """
        key = hashlib.blake2b(repr(constraint).encode(errors="replace"), digest_size=16).digest()
        if key not in self._known:
            self._known[key] = await self._in_thread(constraint, param)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        if (complaint := self._known[key]) is not None:
            raise InvalidRequest(
                f"{param} cannot be enforced: {complaint}", param=param, code="invalid_constraint"
            )

    def close(self) -> None:
        """Let running work end; drop what waits."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, constraint: Constraint, param: str) -> str | None:
        if self._num_waiting >= MAX_WAITING:
            raise overloaded()
        self._num_waiting += 1
        try:
            work = asyncio.get_running_loop().run_in_executor(
                self._threads, self._complaint, constraint
            )
            return await asyncio.wait_for(work, DEADLINE_S)
        except TimeoutError:
            raise InvalidRequest(
                f"{param} takes more than {DEADLINE_S:g} s to compile",
                param=param,
                code="invalid_constraint",
            ) from None
        finally:
            self._num_waiting -= 1

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
