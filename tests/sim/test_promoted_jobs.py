"""Best-effort jobs with a completion time end in time on a feasible load."""

from __future__ import annotations

import numpy as np
import pytest
from support.policy_scenes import (
    BE,
    RT,
    Admitting,
    Queue,
    filled,
    make_limits,
    make_request,
    running_of,
)

from lightserve.config import ServeConfig
from lightserve.router.config import make_scheduler_config
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.router.policies.unified import UnifiedPolicy
from lightserve.router.queue import WaitingQueue
from lightserve.router.request import Request
from lightserve.router.scheduler import Scheduler
from lightserve.router.slo import CompletionLedger, LineDeadline, SharedDue, TokenDeadlines
from lightserve.router.step_cost import StepCost, StepShape
from lightserve.sim.simulation import Simulation, TimedEvent
from lightserve.sim.traffic import Job
from lightserve.sim.virtual_gpus import A100_LLAMA2_7B
from lightserve.sim.worker import LengthWorker, VirtualWorker
from lightserve.types import NO_SLO, SLO, FrontendId, RequestId, RequestKey

COMPLETION_S = 4.0
NUM_JOBS = 10


@pytest.fixture(scope="module")
def cost() -> StepCost:
    """Steps take 0.1 ms per token, whatever the context."""
    model = StepCost()
    for _ in range(4):
        for exponent in range(12):
            model.observe(StepShape(num_new=2**exponent), 1e-4 * 2**exponent)
    return model


def ending(request: Request, in_s: float, *, to_come: float = 10) -> Request:
    request.deadlines = CompletionLedger(in_s, 0.0, num_tokens_to_come=to_come)
    return request


def play(cost: StepCost, running: list[Request], waiting: list[Request]) -> dict[int, int]:
    limits = make_limits(
        512, num_free_rows=8, step_number=1, num_slots=10**6, cost=cost, average_step_s=0.01
    )
    in_rows = running_of(running)
    step = filled(UnifiedPolicy(), in_rows, Queue(waiting), limits, Admitting())
    return {request.arrival_number: count for request, count in step.budget.parts}


@pytest.mark.parametrize(
    ("in_s", "is_promoted"), [(0.11, False), (0.13, True), (0.16, True), (0.2, False)]
)
def test_a_job_goes_with_real_time_while_it_is_urgent(
    cost: StepCost, in_s: float, is_promoted: bool
) -> None:
    """20 ms of prompt and ten tokens of 10 ms: from 1.5 times as much on, while it can be met."""
    long = make_request(0, RT, prompt=5000, computed=100)
    long.deadlines = TokenDeadlines(SLO(ttft_ms=2000.0), 0.0)
    for job in (make_request(1, BE, prompt=200), make_request(1, BE, prompt=300, computed=100)):
        ending(job, in_s)
        is_running = job.num_computed_tokens > 0
        shares = play(cost, [long, *[job] * is_running], [job] * (not is_running))
        assert shares == ({1: 200, 0: 312} if is_promoted else {0: 512})


def test_an_urgent_job_decodes_with_real_time(cost: StepCost) -> None:
    late = make_request(0, RT, prompt=5000, computed=100)
    late.deadlines = TokenDeadlines(SLO(ttft_ms=2000.0), 0.0)
    jobs = [ending(make_request(1 + i, BE, output=4), in_s) for i, in_s in enumerate([0.12, 9.0])]
    assert play(cost, [late, *jobs], []) == {1: 1, 0: 119}, "12 ms are granted per token"


@pytest.mark.parametrize(("due_ms", "shares"), [(0.15, {0: 1}), (0.25, {0: 1, 1: 1})])
def test_an_urgent_job_makes_no_real_time_decode_late(
    cost: StepCost, due_ms: float, shares: dict[int, int]
) -> None:
    """Each of the two takes 0.1 ms; nor does a prompt that is late join in the job's place."""
    decode = make_request(0, RT, output=4)
    decode.deadlines = TokenDeadlines(SLO(ttft_ms=due_ms), 0.0)
    late = make_request(2, RT, prompt=200)
    late.deadlines = TokenDeadlines(SLO(ttft_ms=5.0), -1.0)
    job = ending(make_request(1, BE, output=4), 0.12)
    assert play(cost, [decode, job], [late]) == shares


def test_the_queue_knows_its_jobs_by_their_ends() -> None:
    queue = WaitingQueue()
    requests = [ending(make_request(i, BE), in_s) for i, in_s in enumerate([9.0, 3.0, 5.0])]
    for request in [*requests, make_request(7, BE)]:
        queue.append(request)
    queue.admit(requests[1])
    assert list(queue.jobs()) == [requests[2], requests[0]]
    queue.requeue([requests[1]])
    queue.remove(requests[2])
    assert list(queue.jobs()) == [requests[1], requests[0]]


def line(number: int, shared: SharedDue, **fields: int) -> Request:
    request = make_request(number, BE, **fields)
    request.deadlines = LineDeadline(shared, num_tokens_to_come=10)
    return request


@pytest.mark.parametrize(("in_s", "is_first"), [(-5.0, True), (0.16, True), (0.2, False)])
@pytest.mark.parametrize("computed", [0, 100])
def test_a_line_of_a_batch_that_is_behind_goes_before_other_best_effort_work(
    cost: StepCost, in_s: float, is_first: bool, computed: int
) -> None:
    """20 ms of prompt and ten tokens of 10 ms; that its time has passed makes it no less urgent.

    Beside it decodes of others go on, so that they end, but no prompt that makes the step longer.
    """
    other, decode = make_request(0, BE, prompt=700, computed=200), make_request(2, BE, output=4)
    shared = SharedDue(0.2)
    late = line(1, shared, prompt=200 + computed, computed=computed)
    shared.due_s = in_s
    running = [other, decode, *[late] * (computed > 0)]
    shares = play(cost, running, [late] * (computed == 0))
    assert shares == ({1: 200, 2: 1} if is_first else {2: 1, 0: 500})


def test_real_time_requests_have_theirs_before_lines_that_are_late(cost: StepCost) -> None:
    """A prompt that can be in time, and a decode that the line's prompt would make late."""
    late = line(1, SharedDue(-1.0), prompt=200)
    prompt = make_request(0, RT, prompt=612, computed=100)
    prompt.deadlines = TokenDeadlines(SLO(ttft_ms=80.0), 0.0)
    assert play(cost, [prompt], [late]) == {0: 512}
    decode = make_request(0, RT, output=4)
    decode.deadlines = TokenDeadlines(SLO(ttft_ms=5.0), 0.0)
    shares = play(cost, [decode], [late])
    assert shares[0] == 1 and sum(shares.values()) <= 50, "5 ms are 50 tokens"


def test_lines_wait_by_when_their_batches_are_due() -> None:
    queue, soon, later = WaitingQueue(), SharedDue(5.0), SharedDue(9.0)
    lines = [line(number, (later, soon)[number % 2]) for number in range(4)]
    for request in [*lines, make_request(9, BE)]:
        queue.append(request)
    assert [request.arrival_number for request in queue.lines()] == [1, 3, 0, 2]
    later.due_s = 1.0
    queue.remove(lines[1])
    assert [request.arrival_number for request in queue.lines()] == [0, 2, 3]
    queue.remove(lines[3])
    assert list(queue.lines()) == [lines[0], lines[2]] and not list(queue.jobs())


def ends(slo: SLO) -> tuple[list[float], float]:
    """Return how long ten jobs took behind a backlog, and the share of real-time first tokens
    that came in time."""
    core_config = make_scheduler_config(ServeConfig(policy="unified"), max_model_len=2048)
    core = Scheduler(core_config)
    worker = VirtualWorker(
        A100_LLAMA2_7B,
        LengthWorker(max_num_seqs=core_config.max_num_seqs, max_model_len=2048),
        noise=0.05,
        rng=np.random.default_rng(0),
    )
    simulation = Simulation(core, worker, worker.seconds, WorkersReady(60_000))
    rng = np.random.default_rng(1)
    rt, be = FrontendId(0), FrontendId(1)
    events = []
    for number in range(75):
        job = Job(np.full(int(rng.integers(50, 400)), 1, dtype=np.int32), 100, 128)
        submit = job.submit(number, RT, SLO(ttft_ms=400.0, tpot_ms=200.0))
        events.append(TimedEvent(number / 12, FromFrontend(rt, submit)))
    for number in range(200):
        prompt = np.full(int(rng.integers(512, 1024)), 2 + number, dtype=np.int32)
        submit = Job(prompt, 60, 64).submit(number, BE)
        events.append(TimedEvent(0.0, FromFrontend(be, submit)))
    for number in range(200, 200 + NUM_JOBS):
        prompt = np.full(800, 2 + number, dtype=np.int32)
        submit = Job(prompt, 60, 64).submit(number, BE, slo)
        events.append(TimedEvent(2.0, FromFrontend(be, submit)))
    simulation.run(events, until_s=6.2)
    outcomes = simulation.outcomes
    jobs = [outcomes[RequestKey(be, RequestId(200 + i))] for i in range(NUM_JOBS)]
    took_s = [o.token_times_s[-1] - 2.0 if o.finish_reason else np.inf for o in jobs]
    first = [o for key, o in outcomes.items() if key.frontend_id == rt and o.arrival_s < 5.5]
    in_time = [bool(o.token_times_s) and o.token_times_s[0] - o.arrival_s <= 0.4 for o in first]
    return took_s, float(np.mean(in_time))


def test_jobs_end_in_time_behind_a_backlog() -> None:
    took_s, in_time = ends(SLO(completion_s=COMPLETION_S))
    assert max(took_s) <= COMPLETION_S
    assert in_time >= 0.99
    took_s, _ = ends(NO_SLO)
    assert min(took_s) > COMPLETION_S, "without, the backlog is before them"
