"""The real router core drives the real model: tokens do not depend on the schedule."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from support.graph_recorders import TapeRecorder
from support.late_queue import LateQueue
from support.recorded_plans import RecordedStep, make_runner, record_steps
from support.tensor_kernels import TensorKernels

from lightserve.config import ServeConfig
from lightserve.errors import ProtocolError
from lightserve.messages.common import TokenLogprob, TokenSegment, pack_int32, unpack_int32
from lightserve.messages.frontend_router import Abort, Submit
from lightserve.messages.router_worker import (
    OutputKind,
    RowResult,
    SlotRange,
    StepPlan,
    StepResult,
    plan_rows,
    row_results,
)
from lightserve.router.admission.base import AdmissionRule
from lightserve.router.admission.baselines import ConservativeAdmission
from lightserve.router.config import SchedulerConfig
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.router.from_submit import QueueLimits
from lightserve.router.kv.cache import Preemption
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.policies import POLICIES
from lightserve.router.request import Request
from lightserve.router.scheduler import Scheduler
from lightserve.sim.simulation import Simulation, TimedEvent
from lightserve.types import FrontendId, RequestClass, RequestId, RowId, SamplingParams, StepId
from lightserve.worker.build import build_runner
from lightserve.worker.graphs import DecodeGraphs
from lightserve.worker.model_runner import ModelRunner
from lightserve.worker.step_results import Pending

NUM_SLOTS, MAX_LEN = 1200, 512
NUM_REQUESTS = 14


OPTIONS: list[dict[str, Any]] = [
    {},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5, "num_logprobs": 3},
    {"repetition_penalty": 1.6, "num_prompt_logprobs": 2},
    {"min_p": 0.2, "logit_bias": ((20, 4.0), (21, -100.0)), "num_logprobs": 0},
    {"allowed_token_ids": tuple(range(1, 400)), "min_tokens": 12},
]
"""Given to the requests in turn."""


class RunnerWorker:
    """Lets the simulation drive a real model runner; only the clock is virtual."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def execute(self, plan: StepPlan, *, exec_s: float, idle_s: float) -> StepResult:
        del exec_s, idle_s
        return self._runner.execute(plan)


class RecklessAdmission:
    """Admits all requests, so that some are preempted and recomputed."""

    forecast_peak = None

    def begin(self, live: Collection[Request], num_slots: int) -> RecklessAdmission:
        return self

    def admit(self, request: Request) -> bool:
        return True


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield build_runner(
        ServeConfig(batch_invariant=True, max_model_len=MAX_LEN, max_kv_tokens=NUM_SLOTS)
    )
    torch.set_num_threads(threads)


class Answer(NamedTuple):
    """All that a request was told."""

    token_ids: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]


def make_requests() -> list[Submit]:
    rng = random.Random(3)
    requests = []
    for number in range(NUM_REQUESTS):
        prompt = [rng.randrange(10, 500) for _ in range(rng.choice((1, 5, 40, 130)))]
        greedy = number % 3 == 0
        requests.append(
            Submit(
                request_id=RequestId(number),
                prompt=[TokenSegment(token_ids=pack_int32(prompt))],
                max_tokens=rng.randrange(5, 60),
                eos_token_ids=[1],
                sampling=SamplingParams(
                    temperature=0.0 if greedy else 1.0,
                    top_p=0.95 if number % 2 else 1.0,
                    seed=number,
                    **OPTIONS[number % len(OPTIONS)],
                ),
                request_class=RequestClass.RT,
                age_s=0.0,
            )
        )
    return requests


def run(
    runner: ModelRunner,
    requests: list[Submit],
    *,
    policy: str = "chunked",
    budget: int = 512,
    num_slots: int = NUM_SLOTS,
    admission: AdmissionRule | None = None,
    extra: list[TimedEvent] | None = None,
) -> tuple[dict[int, Answer], Scheduler]:
    core = Scheduler(
        SchedulerConfig(
            max_model_len=MAX_LEN,
            max_num_seqs=32,
            max_num_batched_tokens=budget,
            queue_limits=dict.fromkeys(RequestClass, QueueLimits(100, 1 << 30)),
            policy=POLICIES[policy](),
            admission=admission or ConservativeAdmission(),
            lengths=OutputLengths(max_output_tokens=MAX_LEN),
        )
    )
    simulation = Simulation(core, RunnerWorker(runner), lambda plan: 0.01, WorkersReady(num_slots))
    events = [
        TimedEvent(0.015 * index, FromFrontend(FrontendId(0), request))
        for index, request in enumerate(requests)
    ]
    simulation.run([*events, *(extra or [])])
    core.check_integrity()
    answers = {
        key.request_id: Answer(o.token_ids, o.logprobs, o.prompt_logprobs)
        for key, o in simulation.outcomes.items()
    }
    return answers, core


@pytest.fixture(scope="module")
def solo(runner: ModelRunner) -> dict[int, Answer]:
    """Each request alone, its prompt in one chunk."""
    answers: dict[int, Answer] = {}
    for request in make_requests():
        answers |= run(runner, [request])[0]
    assert len({tuple(answer.token_ids) for answer in answers.values()}) == NUM_REQUESTS
    return answers


def test_every_log_probability_is_told_once(solo: dict[int, Answer]) -> None:
    for number, request in enumerate(make_requests()):
        answer, sampling = solo[number], request.sampling
        num_prompt_tokens = len(request.prompt[0].token_ids) // 4
        wanted = (sampling.num_logprobs, sampling.num_prompt_logprobs)
        places = (len(answer.token_ids), num_prompt_tokens - 1)
        told = (answer.logprobs, answer.prompt_logprobs)
        for num_top, num_places, logprobs in zip(wanted, places, told, strict=True):
            assert len(logprobs) == (0 if num_top is None else num_places)
            for logprob in logprobs:
                assert len(logprob.top_logprobs) == num_top and logprob.logprob <= 0.0
                assert logprob.top_logprobs == sorted(logprob.top_logprobs, reverse=True)
                assert not num_top or logprob.logprob <= logprob.top_logprobs[0] + 1e-6


def test_prompt_and_output_log_probabilities_are_the_same_numbers(runner: ModelRunner) -> None:
    """What was generated greedily, given as a prompt: each token is the most probable one."""
    request = make_requests()[3]
    sampling = SamplingParams(temperature=0.0, num_logprobs=2)
    greedy = msgspec.structs.replace(request, sampling=sampling)
    first = run(runner, [greedy])[0][3]
    known = unpack_int32(request.prompt[0].token_ids).tolist()
    prompt = [TokenSegment(token_ids=pack_int32([*known, *first.token_ids]))]
    sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=2)
    again = msgspec.structs.replace(request, prompt=prompt, sampling=sampling)
    second = run(runner, [again], budget=33)[0][3]
    assert second.prompt_logprobs[len(known) - 1 :] == first.logprobs
    assert [logprob.top_token_ids[0] for logprob in first.logprobs] == first.token_ids


@pytest.mark.parametrize(
    ("policy", "budget"), [("chunked", 512), ("chunked", 32), ("chunked", 45), ("fcfs", 100)]
)
def test_tokens_do_not_depend_on_batch_and_chunks(
    runner: ModelRunner, solo: dict[int, Answer], policy: str, budget: int
) -> None:
    """The number of requests that differ from their solo run is 0."""
    together, _ = run(runner, make_requests(), policy=policy, budget=budget)
    assert together == solo


def test_tokens_survive_preemption_and_scattered_slots(
    runner: ModelRunner, solo: dict[int, Answer]
) -> None:
    """A pool too small for all, and aborts that leave holes in it."""
    extra = []
    for number in range(6):
        noise = make_requests()[number]
        noise = Submit(
            request_id=RequestId(100 + number),
            prompt=noise.prompt,
            max_tokens=200,
            eos_token_ids=[],
            sampling=noise.sampling,
            request_class=RequestClass.RT,
            age_s=0.0,
        )
        extra.append(TimedEvent(0.02 * number, FromFrontend(FrontendId(0), noise)))
        abort = Abort(request_id=RequestId(100 + number))
        extra.append(TimedEvent(0.1 + 0.05 * number, FromFrontend(FrontendId(0), abort)))
    together, core = run(
        runner,
        make_requests(),
        budget=64,
        num_slots=520,
        admission=RecklessAdmission(),
        extra=extra,
    )
    assert core.num_preemptions > 0
    assert together == solo


def test_a_model_without_states_refuses_plans_with_them(runner: ModelRunner) -> None:
    state = SlotRange(RowId(0), -1, pack_int32([5]))
    with pytest.raises(ProtocolError, match="position -1, where a state has 0 slots"):
        runner.launch(StepPlan(StepId(0), [], [state], []))


# A step launched before the one ahead of it is finished gives what it gives after it.

SCHEDULES = [(0, Preemption.CHECKPOINT), (1, Preemption.CHECKPOINT), (2, Preemption.RECOMPUTE)]

NUM_WITH_GRAPHS = 60


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def recorded(seed: int, preemption: Preemption) -> list[RecordedStep]:
    return record_steps(make_runner(), seed, preemption=preemption)


def run_overlapped(runner: ModelRunner, steps: list[RecordedStep]) -> list[list[RowResult]]:
    """Run the plans, each launched before the one ahead of it is finished."""
    launched: deque[Pending] = deque()
    found = []

    def finish() -> None:
        step = launched.popleft()
        found.append(row_results(step.plan, runner.finish(step)))

    for step in steps:
        must_wait = bool(launched) and launched[0].must_precede(step.plan)
        launched.append(runner.launch(step.plan, before_sampling=finish if must_wait else None))
        runner.copy_ahead(step.plan)
        if len(launched) > 1:
            finish()
    finish()
    return found


def expected(steps: list[RecordedStep]) -> list[list[RowResult]]:
    return [row_results(step.plan, step.result) for step in steps]


def has_everything(steps: list[RecordedStep]) -> bool:
    """Whether the plans show what there is: chunks beside decodes, copies, all outputs."""
    rows = [row for step in steps for row in plan_rows(step.plan)]
    lengths = [{row.num_tokens > 1 for row in plan_rows(step.plan)} for step in steps]
    results = [row for rows in expected(steps) for row in rows]
    return (
        {frozenset({False}), frozenset({False, True})} <= {frozenset(kinds) for kinds in lengths}
        and any(row.output & OutputKind.PROMPT_LOGPROBS for row in rows)
        and any(row.logprobs for row in results)
        and any(row.prompt_logprobs for row in results)
    )


@pytest.mark.parametrize(("seed", "preemption"), SCHEDULES)
def test_the_same_results(seed: int, preemption: Preemption) -> None:
    steps = recorded(seed, preemption)
    assert has_everything(steps)
    copied = sum(len(step.plan.saves.slots) + len(step.plan.loads.slots) for step in steps)
    assert bool(copied) == (preemption is not Preemption.RECOMPUTE)
    again = run_overlapped(make_runner(LateQueue()), steps)
    assert again == expected(steps)


def test_the_same_results_under_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step ahead that did not wait for the tokens before would have been noticed."""
    steps = record_steps(make_runner(is_constrained=True), 1, preemption=Preemption.CHECKPOINT)
    again = run_overlapped(make_runner(LateQueue(), is_constrained=True), steps)
    assert again == expected(steps)
    monkeypatch.setattr(Pending, "must_precede", lambda *_: False)
    with pytest.raises(AssertionError, match="is not known yet"):
        run_overlapped(make_runner(LateQueue(), is_constrained=True), steps)


def test_the_same_results_with_graphs() -> None:
    """Decodes as recorded passes, whose logits the next launch overwrites."""

    plans = [step.plan for step in recorded(*SCHEDULES[0])][:NUM_WITH_GRAPHS]
    plain = make_runner(kernels=TensorKernels())
    steps = []
    for plan in plans:
        steps.append(RecordedStep(plan, plain.execute(plan)))
        plain.copy_ahead(plan)
    runner = make_runner(LateQueue(), TensorKernels())
    recorder = TapeRecorder()
    graphs = DecodeGraphs(
        runner._model,
        runner.pool,
        runner.tables,
        sizes=(1, 2, 4, 6),
        recorder=recorder,
        has_logits=True,
    )
    with torch.inference_mode():
        graphs.capture(lambda _: None)
    runner.use_graphs(graphs)
    again = run_overlapped(runner, steps)
    assert recorder.num_recorded == 4
    assert any(len(plan.decodes.rows) > 4 and not plan.rows for plan in plans)
    tokens = [[row.token_ids for row in rows] for rows in again]
    assert tokens == [[row.token_ids for row in rows] for rows in expected(steps)]


def spoil_order(runner: ModelRunner, steps: list[RecordedStep]) -> list[list[RowResult]]:
    """Take a step's results before it was waited for."""
    found = []
    for step in steps:
        pending = runner.launch(step.plan)
        runner.copy_ahead(step.plan)
        token_ids, others = pending.row_results()
        early = StepResult(
            step.plan.step_id, 0, pack_int32(token_ids.ravel()), exec_s=0.0, idle_s=0.0, rows=others
        )
        found.append(row_results(step.plan, early))
    return found


def spoil_tokens(runner: ModelRunner, steps: list[RecordedStep]) -> list[list[RowResult]]:
    """Lose what a step has sampled before the next one is launched."""
    append, runner._table.append = runner._table.append, lambda *_: None  # type: ignore[method-assign]
    try:
        return run_overlapped(runner, steps)
    finally:
        runner._table.append = append  # type: ignore[method-assign]


@pytest.mark.parametrize("spoil", [spoil_order, spoil_tokens])
def test_teeth(
    spoil: Callable[[ModelRunner, list[RecordedStep]], list[list[RowResult]]],
) -> None:
    steps = recorded(*SCHEDULES[0])
    assert spoil(make_runner(LateQueue()), steps) != expected(steps)
