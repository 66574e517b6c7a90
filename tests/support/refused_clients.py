"""Clients that are refused because a queue is full, in virtual time, and how long they wait.

The real router core on virtual hardware (A100, Llama-2-7B, 60,000 tokens of KV). While the other
class goes on as it does, a burst fills the queue of one class up to its bound, and the next client
is refused. *Predicted* is the wait that the refused client is told. *Measured* is the time from the
refusal until all that waited then have begun; *retried* is the time until the client itself has
begun, which comes back when it was told to, as often as it is refused. *Cold* is a server that has
done nothing before, *warm* one that has served the class for a while, *later* a refusal in the
middle: the queue is filled once more when it has drained for 20 s.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightserve.config import ServeConfig
from lightserve.messages.frontend_router import ErrorCode, RequestDelta, Submit
from lightserve.messages.router_worker import StepPlan
from lightserve.router.config import SchedulerConfig, make_scheduler_config
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep
from lightserve.sim.hybrid import fitted_profile
from lightserve.sim.simulation import Simulation, TimedEvent
from lightserve.sim.traffic import Job, Lengths, TraceLengths, UniformLengths, read_trace
from lightserve.sim.virtual_gpus import A100_LLAMA2_7B
from lightserve.sim.worker import LengthWorker, VirtualWorker
from lightserve.types import FrontendId, RequestClass, RequestKey

RT, BE = RequestClass.RT, RequestClass.BE
LENGTHS = Path(__file__).parents[2] / "bench/traces/sharegpt_lengths.csv.gz"
CAPACITY_TOKENS, BUDGET, MAX_SEQS = 60_000, 512, 256
LATER_S = 20.0
NOISE = 0.05
_FRONTENDS = {RT: FrontendId(0), BE: FrontendId(1)}
_PROBES = FrontendId(2)


class Scene(NamedTuple):
    """What happens."""

    request_class: RequestClass
    """Whose queue is full."""
    backlog: int
    """Its bound, in requests."""
    when: str = "warm"
    """cold, warm or later."""
    scale: float = 1.0
    """Of memory, rows and rates."""
    warm_s: float = 40.0
    seed: int = 0

    def scaled(self, number: int) -> int:
        """Return what is left of so many."""
        return max(1, round(self.scale * number))


class Waited(NamedTuple):
    """What came of it, in seconds."""

    predicted_s: float
    measured_s: float
    retried_s: float

    @property
    def is_within_half(self) -> bool:
        """Whether the prediction is within 50 % of both waits."""
        return all(abs(self.predicted_s - wait_s) <= 0.5 * wait_s for wait_s in self[1:])


class WatchedCore(Scheduler):
    """Notes when each request begins."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.begun_s: dict[RequestKey, float] = {}

    def commit(self, planned: PlannedStep, now_s: float) -> StepPlan:
        """See `Scheduler.commit`."""
        for request, _ in planned.scheduled:
            self.begun_s.setdefault(request.key, now_s)
        return super().commit(planned, now_s)


class Play:
    """One run of a scene."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        other = BE if scene.request_class is RT else RT
        self._rng = np.random.default_rng(scene.seed)
        trace = TraceLengths(read_trace(LENGTHS))
        self._lengths: dict[RequestClass, Lengths] = {
            RT: trace,
            BE: UniformLengths((512, 1024), (32, 128)),
        }
        self._max_tokens = {RT: 2048, BE: 128}
        bounds = {f"{c}_max_waiting_requests": 1 << 30 for c in RequestClass}
        bounds[f"{scene.request_class}_max_waiting_requests"] = scene.backlog
        serve = ServeConfig(
            max_num_batched_tokens=BUDGET,
            max_num_seqs=scene.scaled(MAX_SEQS),
            rt_max_waiting_requests=bounds["rt_max_waiting_requests"],
            be_max_waiting_requests=bounds["be_max_waiting_requests"],
        )
        longest = trace.max_prompt_tokens + 2048
        config = make_scheduler_config(serve, max_model_len=longest, seed=scene.seed)
        self.core = WatchedCore(config)
        noise = np.random.default_rng(scene.seed + 1)
        worker = VirtualWorker(
            A100_LLAMA2_7B,
            LengthWorker(max_num_seqs=scene.scaled(MAX_SEQS), max_model_len=longest),
            noise=NOISE,
            rng=noise,
        )
        self.simulation = Simulation(
            self.core,
            worker,
            worker.seconds,
            WorkersReady(
                scene.scaled(CAPACITY_TOKENS),
                num_host_slots=scene.scaled(CAPACITY_TOKENS // 2),
                step_cost=fitted_profile(A100_LLAMA2_7B, noise=NOISE, rng=noise),
            ),
            frontend=self._on_news,
        )
        self._numbers = itertools.count()
        self._accepted: set[RequestKey] = set()
        """Of the class, all that were not refused."""
        self._first: tuple[float, float, frozenset[RequestKey]] | None = None
        """Of the probe's first refusal: when, what it was told, and who waited."""
        self._is_closed = other is BE

    # ------------------------------------------------------------ clients

    def _send(self, time_s: float, request_class: RequestClass) -> TimedEvent:
        submit = self._submit(request_class)
        frontend_id = _FRONTENDS[request_class]
        if request_class is self.scene.request_class:
            self._accepted.add(RequestKey(frontend_id, submit.request_id))
        return TimedEvent(time_s, FromFrontend(frontend_id, submit))

    def _submit(self, request_class: RequestClass) -> Submit:
        num_prompt, num_output, *_ = self._lengths[request_class].draw(self._rng)
        prompt = self._rng.integers(3, 30_000, size=num_prompt, dtype=np.int32)
        most = self._max_tokens[request_class]
        job = Job(prompt, min(num_output, most), most)
        return job.submit(next(self._numbers), request_class)

    def _probe(self, time_s: float) -> TimedEvent:
        submit = self._submit(self.scene.request_class)
        return TimedEvent(time_s, FromFrontend(_PROBES, submit))

    def _on_news(
        self, frontend_id: FrontendId, delta: RequestDelta, now_s: float
    ) -> list[TimedEvent]:
        key = RequestKey(frontend_id, delta.request_id)
        if delta.error is ErrorCode.QUEUE_FULL:
            self._accepted.discard(key)
            return self._on_refusal(delta, now_s) if frontend_id == _PROBES else []
        if delta.finish_reason is None:
            return []
        if frontend_id == _FRONTENDS[BE] and self._is_closed:
            return [self._send(now_s, BE)]
        return []

    def _on_refusal(self, delta: RequestDelta, now_s: float) -> list[TimedEvent]:
        wait_s = math.ceil(delta.retry_after_s)
        if self._first is None:
            waiting = frozenset(self._accepted - self.core.begun_s.keys())
            self._first = now_s, delta.retry_after_s, waiting
        return [self._probe(now_s + wait_s)]

    # ------------------------------------------------------------ the run

    def _background(self, until_s: float) -> Iterator[TimedEvent]:
        """The other class: half of what the server can do in real time, or a closed loop."""
        if self._is_closed:
            yield from (self._send(0.0, BE) for _ in range(self.scene.scaled(64)))
            return
        time_s = 0.0
        while (time_s := time_s + self._rng.exponential(1 / (5.0 * self.scene.scale))) < until_s:
            yield self._send(time_s, RT)

    def _own(self, until_s: float) -> Iterator[TimedEvent]:
        """The class itself before the burst: well below what the server can do."""
        rate = 10.0 if self.scene.request_class is RT else 2.0
        time_s = 0.0
        while (time_s := time_s + self._rng.exponential(1 / (rate * self.scene.scale))) < until_s:
            yield self._send(time_s, self.scene.request_class)

    def run(self) -> Waited:
        """Play it until the probe has begun, and all that waited when it was refused."""
        scene = self.scene
        burst_s = 0.0 if scene.when == "cold" else scene.warm_s
        times_s = [burst_s, burst_s + LATER_S] if scene.when == "later" else [burst_s]
        events = [*self._background(2000.0), *self._own(burst_s)]
        for time_s, _ in itertools.product(times_s, range(scene.backlog + scene.scaled(MAX_SEQS))):
            events.append(self._send(time_s, scene.request_class))
        probe_s = times_s[-1]  # right behind the burst
        self.simulation.run([*events, self._probe(probe_s)], until_s=probe_s)
        assert self._first is not None, "there was room"
        begun_s = self.core.begun_s
        while not self._is_over(self._first[2]):
            self.simulation.run([], until_s=self.simulation.now_s + 1.0)
            assert self.simulation.now_s < 1500.0, "it takes too long"
        refused_s, predicted_s, waiting = self._first
        last_s = max(begun_s[key] for key in waiting)
        own_s = next(s for key, s in begun_s.items() if key.frontend_id == _PROBES)
        return Waited(predicted_s, last_s - refused_s, own_s - refused_s)

    def _is_over(self, waiting: frozenset[RequestKey]) -> bool:
        begun = self.core.begun_s
        return waiting <= begun.keys() and any(key.frontend_id == _PROBES for key in begun)


def play(scene: Scene) -> Waited:
    """Run a scene."""
    return Play(scene).run()
