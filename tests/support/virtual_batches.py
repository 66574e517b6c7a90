"""Batches in virtual time: the real store, runner and router, on virtual hardware.

The runner's event loop has a clock of its own: where it would wait, time jumps. So a day passes in
minutes, and the same run gives the same figures.
"""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from lightserve.batches.contents import Contents, Store
from lightserve.batches.forecast import Costs
from lightserve.batches.records import BatchRecord, LeasedLine
from lightserve.batches.runner import Answer, Runner
from lightserve.errors import InvalidRequest
from lightserve.messages.frontend_router import Abort, BatchDue, RequestDelta
from lightserve.router.events import FromFrontend
from lightserve.sim.hybrid import HybridConfig, HybridRun
from lightserve.sim.simulation import TimedEvent
from lightserve.sim.traffic import Job, next_power_of_two
from lightserve.types import SLO, FinishReason, FrontendId, RequestClass, RequestId
from support.batch_store import (
    ENDPOINT,
    KEY,
    NOW_S,
    check_lines,
    create,
    jsonl,
    line,
    new_batch,
    open_store,
    upload,
)

LINES = FrontendId(2)
"""The batches process."""
SLICE_S = 0.05
"""What happens to lines reaches the runner after so long at most."""

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    """Waits for nothing; its loop's clock passes instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "all wait for each other"
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine comes to, in no time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class InlineStore:
    """A store that is at hand: in virtual time it takes none."""

    def __init__(self, store: Store) -> None:
        store.database.write("PRAGMA synchronous=OFF")
        self._store = store
        self.contents = Contents(self.run, None)

    async def run(self, work: Callable[[Store], T]) -> T:
        return work(self._store)


class Server(HybridRun):
    """The router, its workers and clients of both classes; beside them lines of batches."""

    def __init__(self, config: HybridConfig, store: Store, *, max_in_flight: int = 256) -> None:
        super().__init__(config)
        self.store = store
        self.runner = Runner(
            InlineStore(store),  # type: ignore[arg-type]
            self,
            max_in_flight=max_in_flight,
            clock=self.clock,
        )
        self.is_ready, self.is_ending = True, False
        self.is_plain = False
        """Whether its lines are as any other best-effort requests."""
        self.num_moves = 0
        self._answers: dict[RequestId, asyncio.Future[None]] = {}
        self._news: list[TimedEvent] = []
        self._rng = np.random.default_rng(config.seed)

    def clock(self) -> float:
        """Of the world."""
        return NOW_S + asyncio.get_running_loop().time()

    @property
    def costs(self) -> Costs:
        status = self.core.status(self.simulation.now_s)
        return Costs(status.prompt_token_s, status.output_token_s)

    async def answer(self, leased: LeasedLine, *, due_in_s: float) -> Answer:
        """Have a line answered: its custom_id says of how many tokens it is."""
        num_prompt, num_output = map(int, leased.custom_id.split("-")[:2])
        loop, number = asyncio.get_running_loop(), RequestId(len(self._answers))
        prompt = self._rng.integers(1, 30_000, size=num_prompt, dtype=np.int32)
        job = Job(prompt, num_output, json.loads(leased.line)["body"]["max_tokens"])
        submit = job.submit(number, RequestClass.BE)
        if not self.is_plain:
            slo = SLO(completion_s=max(0.001, due_in_s))
            submit = msgspec.structs.replace(submit, slo=slo, batch=leased.batch)
        self._news.append(TimedEvent(loop.time(), FromFrontend(LINES, submit)))
        self._answers[number] = loop.create_future()
        try:
            await self._answers[number]
        except asyncio.CancelledError:
            abort = FromFrontend(LINES, Abort(request_id=number))
            self._news.append(TimedEvent(loop.time(), abort))
            raise
        usage = {"usage": {"prompt_tokens": num_prompt, "completion_tokens": num_output}}
        return Answer(status=200, body=json.dumps(usage).encode(), request_id=leased.id)

    def move_batch(self, batch: int, due_in_s: float) -> bool:
        """See `runner.Engine`."""
        self.num_moves += 1
        message = BatchDue(batch=batch, due_in_s=due_in_s)
        loop_s = asyncio.get_running_loop().time()
        self._news.append(TimedEvent(loop_s, FromFrontend(LINES, message)))
        return True

    def _on_news(
        self, frontend_id: FrontendId, delta: RequestDelta, now_s: float
    ) -> list[TimedEvent]:
        if frontend_id != LINES:
            return super()._on_news(frontend_id, delta, now_s)
        if delta.finish_reason is not None:
            assert delta.finish_reason is not FinishReason.ERROR, delta
            answer = self._answers[delta.request_id]
            if not answer.done():
                answer.set_result(None)
        return []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Work, while time passes."""
        self.runner.should_exit = False
        tasks = asyncio.create_task(self.runner.serve()), asyncio.create_task(self._pass())
        try:
            yield
        finally:
            self.runner.should_exit = True
            await tasks[0]
            tasks[1].cancel()

    async def _pass(self) -> None:
        """Let happen what happens to the router."""
        while True:
            await asyncio.sleep(SLICE_S)
            news, self._events, self._news = [*self._events, *self._news], [], []
            self.simulation.run(news, until_s=asyncio.get_running_loop().time())

    async def serve(self, until: Callable[[], bool]) -> None:
        """Work until that is so."""
        async with self.serving():
            while not until():
                await asyncio.sleep(SLICE_S)

    def make(self, lines: Sequence[tuple[int, int]], window_s: int, **options: Any) -> BatchRecord:
        """Make a batch of lines with so many tokens of prompt and output."""
        limit = next_power_of_two(max(output for _, output in lines))
        data = jsonl(
            [
                line(f"{p}-{o}-{n}", body={"prompt": "x" * 4 * p, "max_tokens": limit})
                for n, (p, o) in enumerate(lines)
            ]
        )
        now_s = self.clock()
        file = upload(self.store, data, now_s=now_s)
        checked = check_lines(self.store.files, file, ENDPOINT, lambda name: None)
        new = new_batch(file, window=f"{window_s}s", window_s=window_s, **options)
        return create(self.store, new, checked, now_s)

    def promise(self, lines: Sequence[tuple[int, int]], window_s: int) -> BatchRecord:
        """Make it with this window, or with the one that is named in its place."""
        try:
            return self.make(lines, window_s)
        except InvalidRequest as refusal:
            assert refusal.status == 409, refusal
            return self.make(lines, int(refusal.message.split("at least ")[1].split("s ")[0]))

    def find(self, batch: BatchRecord) -> BatchRecord:
        """Return a batch as it is now."""
        return self.store.jobs.get(KEY, batch.id, self.clock())

    def is_idle(self) -> bool:
        """Whether no batch is in progress."""
        return self.store.jobs.counts()[1]["in_progress"] == 0


@contextmanager
def server(directory: Path, config: HybridConfig, **options: Any) -> Iterator[Server]:
    """Make a server, to be run by `run_virtually`."""
    with open_store(directory) as store, closing(Server(config, store, **options)) as made:
        yield made
