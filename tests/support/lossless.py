"""Random schedules of the real core over a real model runner: tokens and KV have to survive them.

One process, virtual time. A `Catalogue` has requests with what each answers alone; a schedule
draws some of them, a pool that is too small, a way of preemption and moments of arrivals and
aborts, all from its number.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from lightserve.config import ServeConfig
from lightserve.messages.common import (
    StepCoefficients,
    TokenLogprob,
    TokenSegment,
    pack_int32,
    unpack_int32,
)
from lightserve.messages.frontend_router import Abort, Submit
from lightserve.messages.router_worker import StepPlan, StepResult
from lightserve.router.config import SchedulerConfig
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.router.from_submit import QueueLimits
from lightserve.router.kv.cache import KVOptions, Preemption
from lightserve.router.kv.prefix_node import least_recently_used, task_aware
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.policies import POLICIES
from lightserve.router.scheduler import Scheduler
from lightserve.sim.simulation import Simulation, TimedEvent
from lightserve.types import FrontendId, RequestClass, RequestId, SamplingParams
from lightserve.worker.build import build_runner
from lightserve.worker.model_runner import ModelRunner
from support.core_scenes import RecklessAdmission
from support.drafted import Scripted, force_drafts
from support.kv_watch import Seen, WatchedModel
from support.tiny_models import TinyModel, write_tiny_model

NUM_SLOTS, MAX_LEN, MAX_SEQS = 600, 128, 6
STATES = 3
"""States that a pool holds beside the tokens of a schedule, in models with recurrent layers."""
NUM_CATALOGUE = 40
STEP_S = 0.01
MODEL = TinyModel("lossless", "Qwen3", {"head_dim": 16, "max_position_embeddings": MAX_LEN})

SLOW_LINK = StepCoefficients(
    floor_s=STEP_S,
    knee=1.0,
    per_new_s=0.0,
    per_decode_s=0.0,
    per_chunk_s=0.0,
    per_decode_context_s=0.0,
    per_chunk_context_s=0.0,
    per_chunk_pair_s=0.0,
    per_loaded_token_s=STEP_S / 12,
)
"""Beside a step, about ten tokens come back."""

Answer = tuple[list[int], list[TokenLogprob]]
"""Tokens, and their log-probabilities where the request wants them."""

Fault = Callable[[ModelRunner, StepPlan], StepPlan]
"""Spoils a plan, or the pools, before the plan is executed."""


def make_runner(
    directory: Path,
    *,
    model: TinyModel | None = MODEL,
    dtype: str = "float32",
    invariant: bool = True,
    **flags: Any,
) -> ModelRunner:
    """Return a runner of a small random model, written to `directory`; None: it is there."""
    if model is not None:
        write_tiny_model(model, directory)
    config = ServeConfig(
        model=str(directory),
        dtype=dtype,
        batch_invariant=invariant,
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_SEQS,
        max_kv_tokens=5 * NUM_SLOTS,  # of which states may take most
        host_kv_memory="4MiB",
        **({"speculation": "ngram"} | flags),
    )
    runner = build_runner(config)
    assert runner.host_pool.num_slots >= NUM_SLOTS
    return runner


@dataclass(frozen=True)
class Schedule:
    """One run: which requests, when, in what memory."""

    requests: list[int]
    times_s: list[float]
    classes: list[RequestClass]
    abort_times_s: list[float | None]
    policy: str
    budget: int
    num_slots: int
    num_host_slots: int
    copied_token_s: float
    """Virtual seconds per copied token: decides between loading and computing again."""
    kv: KVOptions
    step_cost: StepCoefficients | None = None
    """What the core is told of steps; with it, loads may be split over them."""
    overlaps_copies: bool = False
    max_drafts: int = 0
    """Drafts of a request in a step; with any, as many as may be are drawn."""


def make_schedule(
    number: int, *, preemption: Preemption | None = None, num_host_slots: int | None = None
) -> Schedule:
    """Draw a schedule; what is given is not drawn."""
    rng = random.Random(number)
    count = rng.randint(6, 14)
    times_s = sorted(rng.choice((0.0, 0.1, 0.4)) + 0.2 * rng.random() for _ in range(count))
    way = rng.choice((*Preemption, Preemption.CHECKPOINT, Preemption.CHECKPOINT))
    drawn_host_slots = rng.choice((0, 24, 100, NUM_SLOTS, NUM_SLOTS))
    return Schedule(
        requests=rng.sample(range(NUM_CATALOGUE), count),
        times_s=times_s,
        classes=[rng.choice(tuple(RequestClass)) for _ in range(count)],
        abort_times_s=[
            time_s + 0.3 * rng.random() if rng.random() < 0.15 else None for time_s in times_s
        ],
        policy=rng.choice(("priority", "priority", "chunked")),
        budget=rng.choice((16, 40, 200)),
        num_slots=rng.choice((130, 130, 160, 250)),
        num_host_slots=drawn_host_slots if num_host_slots is None else num_host_slots,
        copied_token_s=rng.choice((0.0, 1e-5, 1e-3)),
        kv=KVOptions(
            cache_order=rng.choice((None, task_aware, task_aware, least_recently_used)),
            block_size=rng.choice((1, 2, 4, 8, 16)),
            preemption=way if preemption is None else preemption,
            rt_cache_min_tokens=rng.choice((0, 30)),
        ),
        step_cost=rng.choice((None, SLOW_LINK)),
        overlaps_copies=rng.random() < 0.7,
    )


def make_requests(catalogue: int) -> list[Submit]:
    """Return requests of which some begin alike, told apart by their seeds."""
    rng = random.Random(1_000_000 + catalogue)
    options_rng = random.Random(2_000_000 + catalogue)
    families = [[rng.randrange(5, 200) for _ in range(50)] for _ in range(4)]
    requests = []
    for number in range(NUM_CATALOGUE):
        shared = rng.choice(families)[: rng.choice((0, 0, 20, 50))]
        own = [rng.randrange(5, 200) for _ in range(rng.choice((1, 6, 30)))]
        sampling = SamplingParams(
            temperature=rng.choice((0.0, 1.0, 0.7)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 20)),
            seed=number,
            frequency_penalty=rng.choice((0.0, 0.0, 0.8)),
            **_some_options(options_rng),
        )
        requests.append(
            Submit(
                request_id=RequestId(number),
                prompt=[TokenSegment(token_ids=pack_int32([*shared, *own]))],
                max_tokens=rng.randrange(4, 44),
                eos_token_ids=[2],
                sampling=sampling,
                request_class=RequestClass.RT,
                age_s=0.0,
            )
        )
    return requests


def _some_options(rng: random.Random) -> dict[str, Any]:
    """Return values of some of the other sampling parameters; each is there in a sixth."""
    values: dict[str, Any] = {
        "min_p": 0.02,
        "presence_penalty": rng.choice((-0.5, 0.5)),
        "repetition_penalty": rng.choice((0.9, 1.2)),
        "logit_bias": ((rng.randrange(5, 200), 4.0), (2, -1.0)),
        "allowed_token_ids": tuple(range(2, 200, 2)),
        "min_tokens": 10,
        "bad_words": ((rng.randrange(5, 200),), (7, 8)),
        "typical_p": 0.9,
        "num_logprobs": 2,
    }
    return {name: value for name, value in values.items() if rng.random() < 1 / 6}


@dataclass
class Tally:
    """What schedules contained; sums over them."""

    num_schedules: int = 0
    num_compared: int = 0
    num_different: int = 0
    num_aborts: int = 0
    num_prefix_hits: int = 0
    cached_tokens: int = 0
    num_pauses: int = 0
    num_evictions: int = 0
    taken_tokens: int = 0
    saved_tokens: int = 0
    loaded_tokens: int = 0
    lost_tokens: int = 0
    seen: Seen = field(default_factory=Seen)

    def add(self, other: Tally) -> None:
        """Add another's sums to these."""
        for key, value in asdict(other).items():
            if key != "seen":
                setattr(self, key, getattr(self, key) + value)
        for part in fields(Seen):
            total = getattr(self.seen, part.name) + getattr(other.seen, part.name)
            setattr(self.seen, part.name, total)


class RunnerWorker:
    """Lets the simulation drive the runner; times are virtual, so that runs can be repeated."""

    def __init__(
        self, runner: ModelRunner, model: WatchedModel, schedule: Schedule, fault: Fault | None
    ) -> None:
        self._runner, self._model, self._fault = runner, model, fault
        self._copied_token_s = schedule.copied_token_s

    def execute(self, plan: StepPlan, *, exec_s: float, idle_s: float) -> StepResult:
        self._model.note_plan(plan)
        num_copied = (len(plan.saves.slots) + len(plan.loads.slots)) // 4
        if self._fault is not None:
            plan = self._fault(self._runner, plan)
        result = self._runner.execute(plan)
        self._runner.copy_ahead(plan)
        copy_s = num_copied * self._copied_token_s
        return msgspec.structs.replace(result, exec_s=exec_s + copy_s, idle_s=idle_s, copy_s=copy_s)


class Catalogue:
    """A runner, and requests with their answers alone."""

    def __init__(
        self,
        runner: ModelRunner,
        number: int = 0,
        *,
        chosen: Iterable[int] = range(NUM_CATALOGUE),
        requests: list[Submit] | None = None,
    ) -> None:
        """`chosen`: requests whose answers schedules need; `requests`: others than the usual."""
        self._runner = runner
        self.requests = requests or make_requests(number)
        self.alone: dict[int, Answer] = {}
        for index in chosen:
            schedule = Schedule(
                [index],
                [0.0],
                [RequestClass.RT],
                [None],
                "chunked",
                512,
                NUM_SLOTS,
                0,
                0.0,
                KVOptions(),
            )
            self.alone |= self._answers(schedule)[0]

    def script_drafts(self, acceptance: float) -> Scripted:
        """Have the runner propose what each answers alone, each token right with some chance."""
        prompts = [
            unpack_int32(b"".join(part.token_ids for part in request.prompt)).tolist()
            for request in self.requests
        ]
        alone = {tuple(prompts[number]): answer[0] for number, answer in self.alone.items()}
        scripted = Scripted(alone, acceptance)
        drafts = self._runner._table._drafts
        assert drafts is not None
        drafts._proposer = scripted
        return scripted

    def run(self, schedule: Schedule, *, checks: bool = True, fault: Fault | None = None) -> Tally:
        """Play a schedule and compare. Raises KVChanged unless told not to check KV."""
        answers, tally = self._answers(schedule, checks=checks, fault=fault)
        tally.num_compared = len(answers)
        tally.num_different = sum(
            self.alone[number] != answer for number, answer in answers.items()
        )
        return tally

    def _answers(
        self, schedule: Schedule, *, checks: bool = True, fault: Fault | None = None
    ) -> tuple[dict[int, Answer], Tally]:
        core = make_core(schedule)
        model = WatchedModel(self._runner, checks=checks)
        plain = self._runner._model
        self._runner._model = model  # type: ignore[assignment]  # what a runner calls, no more
        worker = RunnerWorker(self._runner, model, schedule, fault)
        simulation = Simulation(
            core,
            worker,
            lambda plan: STEP_S,
            WorkersReady(
                schedule.num_slots + STATES * self._runner.pool.num_state_slots,
                num_state_slots=self._runner.pool.num_state_slots,
                num_host_slots=schedule.num_host_slots,
                step_cost=schedule.step_cost,
                overlaps_copies=schedule.overlaps_copies,
            ),
        )
        try:
            simulation.run(self._events(schedule))
        finally:
            self._runner._model = plain
        core.check_integrity()
        assert core.kv is not None and core.num_used_slots == core.kv.checkpoints.num_used == 0
        assert all(o.finish_reason and not o.error for o in simulation.outcomes.values())
        outcomes = simulation.outcomes.items()
        answers = {
            int(key.request_id): (outcome.token_ids, outcome.logprobs) for key, outcome in outcomes
        }
        return answers, _tally(core, model, simulation, len(schedule.requests))

    def _events(self, schedule: Schedule) -> list[TimedEvent]:
        events = []
        for index, number in enumerate(schedule.requests):
            request = msgspec.structs.replace(
                self.requests[number], request_class=schedule.classes[index]
            )
            events.append(TimedEvent(schedule.times_s[index], FromFrontend(FrontendId(0), request)))
            if (abort_s := schedule.abort_times_s[index]) is not None:
                abort = Abort(request_id=RequestId(number))
                events.append(TimedEvent(abort_s, FromFrontend(FrontendId(0), abort)))
        return events


_COUNTERS = (
    "num_pauses",
    "num_evictions",
    "taken_tokens",
    "saved_tokens",
    "loaded_tokens",
    "lost_tokens",
)


def make_core(schedule: Schedule) -> Scheduler:
    """Return a core that admits all requests, so that memory runs out."""
    core = Scheduler(
        SchedulerConfig(
            max_model_len=MAX_LEN,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=schedule.budget,
            queue_limits=dict.fromkeys(RequestClass, QueueLimits(100, 1 << 30)),
            policy=POLICIES[schedule.policy](),
            admission=RecklessAdmission(),
            lengths=OutputLengths(max_output_tokens=MAX_LEN),
            kv=schedule.kv,
        )
    )
    return force_drafts(core, len(schedule.times_s), most=schedule.max_drafts)


def _tally(
    core: Scheduler, model: WatchedModel, simulation: Simulation, num_requests: int
) -> Tally:
    hits = [outcome.num_cached_tokens for outcome in simulation.outcomes.values()]
    tally = Tally(
        num_schedules=1,
        num_aborts=num_requests - len(simulation.outcomes),
        num_prefix_hits=sum(hit > 0 for hit in hits),
        cached_tokens=sum(hits),
        seen=model.end(),
    )
    for counters in core.counters.values():
        for name in _COUNTERS:
            setattr(tally, name, getattr(tally, name) + getattr(counters, name))
    return tally
