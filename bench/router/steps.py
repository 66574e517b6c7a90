"""CPU time of the router's core per step of a full server, in virtual time: `bench.router.steps`.

What `bench.router.process` measures live, without its processes: the same requests and pool, steps
of 20 ms, so that every run takes the same decisions and step n of one run is step n of another. Of
each step the smallest of several runs counts, which a busy machine leaves comparable, and a hash of
all plans tells whether two versions of the router decide alike.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, ParamSpec, TypeVar

import msgspec
import numpy as np

from bench.router.clock import MAX_MODEL_LEN, Enough
from bench.router.process import (
    CONFIG,
    NUM_QUEUED,
    NUM_REAL_TIME,
    NUM_SLOTS,
    PROFILE,
    STEP_S,
    TARGETS,
    jobs,
)
from lightserve.messages.frontend_router import RequestDelta
from lightserve.messages.router_worker import StepPlan, StepResult
from lightserve.router.config import make_scheduler_config
from lightserve.router.events import FromFrontend, Outgoing, SchedulerEvent, WorkersReady
from lightserve.router.process import Collector
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep, WaitUntil
from lightserve.sim.simulation import Simulation, TimedEvent
from lightserve.sim.worker import LengthWorker
from lightserve.types import SLO, FrontendId, RequestClass

P = ParamSpec("P")
T = TypeVar("T")

FRONTEND = FrontendId(0)
ANSWER_S = 0.0005
"""After which a client whose request has ended sends the next one."""
CALLS = ("on_message", "plan", "commit", "on_result")


class MeasuredCore(Scheduler):
    """The real core; it decides as one that does not measure itself."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(make_scheduler_config(CONFIG, max_model_len=MAX_MODEL_LEN))
        self.steps_s: list[dict[str, float]] = []
        """Of each step the CPU seconds of each call, from one commit to the next."""
        self.num_live: list[int] = []
        self.plans = hashlib.sha256()
        self._num_steps = num_steps
        self._spent_s = dict.fromkeys(CALLS, 0.0)

    def _spent(self, call: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call, and note the CPU time of it."""
        start_s = time.thread_time()
        result = function(*args, **kwargs)
        self._spent_s[call] += time.thread_time() - start_s
        return result

    def on_message(self, event: SchedulerEvent, now_s: float) -> list[Outgoing]:
        """See `Scheduler.on_message`."""
        return self._spent("on_message", super().on_message, event, now_s)

    def plan(self, now_s: float) -> PlannedStep | WaitUntil:
        """See `Scheduler.plan`."""
        return self._spent("plan", super().plan, now_s)

    def commit(self, planned: PlannedStep, now_s: float) -> StepPlan:
        """See `Scheduler.commit`. Raises Enough."""
        plan = self._spent("commit", super().commit, planned, now_s)
        skipped = [(*request.key, reason.value) for request, reason in planned.left_out.each()]
        self.plans.update(msgspec.msgpack.encode((plan, planned.predicted_s, skipped)))
        self.steps_s.append(self._spent_s)
        self.num_live.append(len(self._rows))
        if len(self.steps_s) == self._num_steps:
            raise Enough
        self._spent_s = dict.fromkeys(CALLS, 0.0)
        return plan

    def on_result(self, result: StepResult, now_s: float) -> list[Outgoing]:
        """See `Scheduler.on_result`."""
        return self._spent("on_result", super().on_result, result, now_s)


class Clients:
    """A request that ends is replaced by one of its class."""

    def __init__(self) -> None:
        self._jobs = jobs(np.random.default_rng(0))
        self._classes: list[RequestClass] = []
        """Of all requests, by number."""

    def send(self, request_class: RequestClass, now_s: float) -> TimedEvent:
        """Return a request of a class."""
        slo = TARGETS if request_class is RequestClass.RT else SLO()
        submit = next(self._jobs).submit(len(self._classes), request_class, slo)
        self._classes.append(request_class)
        return TimedEvent(now_s, FromFrontend(FRONTEND, submit))

    def on_news(
        self, frontend_id: FrontendId, delta: RequestDelta, now_s: float
    ) -> list[TimedEvent]:
        """Answer news of a request."""
        del frontend_id
        if delta.finish_reason is None:
            return []
        return [self.send(self._classes[delta.request_id], now_s + ANSWER_S)]


class Run(NamedTuple):
    """What one run came to; the steps that warm it up are left out."""

    steps_ms: dict[str, list[float]]
    """CPU time of each step, by call."""
    num_live: float
    digest: str
    """Of all plans."""


def measure(num_warm_up: int, num_steps: int) -> Run:
    """Run the scene once."""
    core, clients = MeasuredCore(num_warm_up + num_steps), Clients()
    worker = LengthWorker(max_num_seqs=CONFIG.max_num_seqs, max_model_len=MAX_MODEL_LEN)
    simulation = Simulation(
        core,
        worker,
        lambda _plan: STEP_S,
        WorkersReady(NUM_SLOTS, num_host_slots=NUM_SLOTS // 2, step_cost=PROFILE),
        frontend=clients.on_news,
    )
    classes = [RequestClass.BE] * NUM_QUEUED + [RequestClass.RT] * NUM_REAL_TIME
    first = [clients.send(one, number * 1e-5) for number, one in enumerate(classes)]
    Collector()  # the queue is no garbage to look through
    with suppress(Enough):
        simulation.run(first)
    gc.unfreeze()
    steps = core.steps_s[num_warm_up:]
    return Run(
        {call: [1e3 * step[call] for step in steps] for call in CALLS},
        float(np.mean(core.num_live[num_warm_up:])),
        core.plans.hexdigest(),
    )


def main() -> None:
    """Print p50 and p99 of each call, and of all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=500, help="steps that do not count")
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    start_s = time.perf_counter()
    runs = [measure(args.warm_up, args.steps) for _ in range(args.runs)]
    assert len({run.digest for run in runs}) == 1, "the runs did not decide alike"
    columns = {call: np.min([run.steps_ms[call] for run in runs], axis=0) for call in CALLS}
    whole = np.min([np.sum(list(run.steps_ms.values()), axis=0) for run in runs], axis=0)
    print("| per step | mean ms | p50 ms | p99 ms |\n| --- | --- | --- | --- |")
    for name, column in {**columns, "all": whole}.items():
        p50, p99 = np.percentile(column, [50, 99])
        print(f"| {name} | {column.mean():.2f} | {p50:.2f} | {p99:.2f} |")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\n{runs[0].num_live:.0f} live; plans {runs[0].digest[:16]}")
    print(f"{time.perf_counter() - start_s:.0f} s, each step the best of {args.runs}; load {load}")


if __name__ == "__main__":
    main()
