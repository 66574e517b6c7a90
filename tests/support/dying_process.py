"""A batches process that dies at a point of its life, and an engine that counts its work."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lightserve.batches.access import StoreThread
from lightserve.batches.contents import Store
from lightserve.batches.forecast import Costs
from lightserve.batches.records import LeasedLine
from lightserve.batches.runner import OWNER, Answer, Runner
from support.batch_store import place

T = TypeVar("T")
STEPS = ("begin", "lease", "settle", "expire", "held", "renew")
"""Of a process's work with the store: it can die before and after each."""


class Death(Exception):
    """The process is no more: nothing of it runs on."""


class CountingEngine:
    """Computes a few tokens for each line, one in each turn of the event loop."""

    is_ending = False
    costs = Costs(0.0, 0.0)

    def __init__(self, num_tokens: int = 3) -> None:
        self.is_ready = True
        self.tokens: Counter[str] = Counter()
        """By custom_id."""
        self.answered: Counter[str] = Counter()
        self.gate = asyncio.Event()
        """Lines go on to their ends once it is set."""
        self.gate.set()
        self._num_tokens = num_tokens

    def move_batch(self, batch: int, due_in_s: float) -> bool:
        """See `runner.Engine`."""
        return True

    async def answer(self, line: LeasedLine, *, due_in_s: float) -> Answer:
        """See `runner.Engine`."""
        for number in range(self._num_tokens):
            self.tokens[line.custom_id] += 1
            await asyncio.sleep(0)
            if number == 0:
                await self.gate.wait()
        self.answered[line.custom_id] += 1
        body = json.dumps({"text": line.custom_id, "usage": {}}).encode()
        return Answer(status=200, body=body, request_id=line.id)


class _Thread(StoreThread):
    def __init__(self, directory: Path, dies: str) -> None:
        super().__init__(place(directory))
        self._dies = dies
        self.is_dead = False

    async def run(self, work: Callable[[Store], T]) -> T:
        if self.is_dead:
            raise Death
        return await super().run(work)

    def _run(self, work: Callable[[Store], T]) -> T:
        return super()._run(lambda store: work(self._hooked(store)))

    def _hooked(self, store: Store) -> Store:
        for step in STEPS:
            if step not in vars(store.jobs):
                method = functools.partial(self._step, step, getattr(store.jobs, step))
                setattr(store.jobs, step, method)
        return store

    def _step(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._die_at(f"before {name}")
        result = method(*args, **kwargs)
        self._die_at(f"after {name}")
        return result

    def _die_at(self, point: str) -> None:
        if self.is_dead or point == self._dies:
            self.is_dead = True
            raise Death


class Process:
    """A batches process, as far as the store and the engine see it."""

    def __init__(
        self,
        directory: Path,
        engine: CountingEngine,
        *,
        dies: str = "",
        owner: str = OWNER,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`dies`: "before" or "after" one of STEPS."""
        self.thread = _Thread(directory, dies)
        self.runner = Runner(self.thread, engine, max_in_flight=2, owner=owner, clock=clock)
        self._task = asyncio.create_task(self.runner.serve())

    async def death(self) -> None:
        """Wait until it has died at its point."""
        done, _ = await asyncio.wait({self._task}, timeout=20)
        assert done and isinstance(self._task.exception(), Death)
        await self.kill()

    async def kill(self) -> None:
        """End it as SIGKILL does."""
        self.thread.is_dead = True
        tasks = [*self.runner._tasks.values(), self._task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.thread.close()

    async def stop(self) -> None:
        """End it in order."""
        self.runner.should_exit = True
        self.runner._wake.set()
        await self._task
        self.thread.close()
