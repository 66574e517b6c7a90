"""A real-time newcomer whose prefix is just being taken from a best-effort request."""

from __future__ import annotations

from collections import deque

from support.core_scenes import Arrival, RecklessAdmission, submit

from lightserve.messages.router_worker import StepPlan
from lightserve.router.core import RouterCore
from lightserve.router.core_config import CoreConfig
from lightserve.router.events import FromFrontend, PlannedStep, WorkersReady
from lightserve.router.intake import QueueLimits
from lightserve.router.kv.cache import KVOptions, Preemption
from lightserve.router.kv.prefix_node import task_aware
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.policies.registry import POLICIES
from lightserve.sim.worker import SimulatedWorker
from lightserve.types import FrontendId, RequestClass

RT, BE = RequestClass.RT, RequestClass.BE
MAX_LEN, NUM_SLOTS = 700, 900
DOCUMENT = list(range(1, 301))


class Scene:
    """One step after the other; remembers the step of each request's first token."""

    def __init__(self) -> None:
        self.core = RouterCore(
            CoreConfig(
                max_model_len=MAX_LEN,
                max_num_seqs=16,
                max_num_batched_tokens=256,
                queue_limits=dict.fromkeys(RequestClass, QueueLimits(100, 1 << 30)),
                policy=POLICIES["priority"](),
                kv=KVOptions(cache_order=task_aware, preemption=Preemption.CHECKPOINT),
                admission=RecklessAdmission(),
                lengths=OutputLengths(max_output_tokens=MAX_LEN),
            )
        )
        self.worker = SimulatedWorker(
            num_slots=NUM_SLOTS, max_num_seqs=16, max_model_len=MAX_LEN, num_host_slots=1000
        )
        self.sent: deque[StepPlan] = deque()
        self.step = 0
        self.first_token: dict[int, int] = {}
        self.core.on_message(WorkersReady(NUM_SLOTS, 1000), 0.0)

    def add(self, number: int, request_class: RequestClass, prompt: list[int], out: int) -> None:
        arrival = Arrival(0.0, len(prompt), out, out, request_class=request_class)
        event = FromFrontend(FrontendId(0), submit(number, arrival, prompt=prompt))
        self.core.on_message(event, float(self.step))

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step += 1
            now_s = float(self.step)
            while isinstance(step := self.core.plan(now_s), PlannedStep):
                self.sent.append(self.core.commit(step, now_s))
            if self.sent:
                result = self.worker.execute(self.sent.popleft(), exec_s=0.01, idle_s=0.0)
                for outgoing in self.core.on_result(result, now_s):
                    for delta in outgoing.message.each():
                        if delta.token_ids:
                            self.first_token.setdefault(int(delta.request_id), self.step)
        self.core.check_integrity()


def test_it_starts_at_once_on_memory_of_another() -> None:
    """Decodes take the paused request's prompt token by token: waiting for its end is too long."""
    scene = Scene()
    scene.add(20, BE, [3000] * 200, 90)
    scene.run(3)
    scene.add(0, BE, [*DOCUMENT, 7], 90)
    scene.run(10)
    for number in range(1, 5):
        scene.add(number, RT, [1000 + number] * 60, 70)
    scene.run(2)
    kv = scene.core._kv
    assert kv is not None
    while kv.num_available > 0:
        scene.run(1)
    scene.run(15)
    arrived = scene.step
    scene.add(10, RT, [*DOCUMENT, *[9] * 10], 5)
    scene.run(60)
    assert scene.first_token[10] - arrived <= 3
