"""A decision log's traffic, run again with other settings of the server.

The log is replayed, which says how long outputs are, what each step was, and what clients saw. A
formula of step times is fitted to the steps that really ran; then the same requests come, at the
same times or faster, to the same core with other settings, on workers that take as long as that
formula says and as the real steps were off from it at that time (`logged_hardware`).

Arrivals stay as they were, but for a class of which as many requests were there all the time: its
clients waited for an answer before they asked again, and so they do here (`_Loop`). Outputs keep
their lengths; requests that clients gave up are given up after the same time, and do not count.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lightserve.config import ServeConfig
from lightserve.config.fields import unmet_need
from lightserve.cost.model import StepSample, StepShape, fit
from lightserve.decisions.records import (
    DECIDING_OPTIONS,
    Decision,
    MessageReceived,
    ResultReceived,
    StepTimesWereMeasured,
    WorkersStarted,
    WorkersWereLost,
    event_of,
)
from lightserve.decisions.replaying import DecisionLogReader, make_core_of
from lightserve.errors import ConfigError, DecisionLogError, ProtocolError
from lightserve.messages.common import NO_SIZES, StepCoefficients
from lightserve.messages.frontend_router import Abort, RequestDelta, Submit
from lightserve.messages.router_worker import StepResult
from lightserve.router.config import make_scheduler_config
from lightserve.router.events import FromFrontend, Outgoing, WorkersReady
from lightserve.router.output_lengths import RememberedLengths
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep
from lightserve.sim.hybrid import fitted_profile
from lightserve.sim.logged_hardware import LoggedHardware, LoggedStep
from lightserve.sim.report import ClassReport, Seen, Targets, Window, class_report
from lightserve.sim.simulation import Simulation, TimedEvent
from lightserve.sim.virtual_gpus import Hardware, check_hardware, check_states
from lightserve.sim.worker import EOS_TOKEN_ID, LengthWorker, VirtualWorker
from lightserve.types import (
    FinishReason,
    FrontendId,
    RequestClass,
    RequestId,
    RequestKey,
    SamplingParams,
    StepId,
)

MIN_STEPS = 100
"""Fewer say too little of what steps take."""
MAX_SAMPLES = 2000
"""Steps that the formula is fitted to, evenly from all."""


@dataclass
class Asked:
    """A request of the log."""

    submit: Submit
    came_s: float
    """When the router had it; its client's clock began `age_s` before."""
    token_times_s: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    gone_s: float | None = None
    """When its client left."""

    @property
    def num_prompt(self) -> int:
        """Tokens of its prompt."""
        return sum(len(segment.token_ids) // 4 for segment in self.submit.prompt)

    @property
    def is_whole(self) -> bool:
        """Whether it was answered to its end."""
        return self.finish in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def is_refused(self) -> bool:
        """Whether an error ended it."""
        return self.finish is FinishReason.ERROR

    @property
    def ended_s(self) -> float | None:
        """When its client had all of it, or left; None: it had not when the log ended."""
        is_over = self.is_whole and self.token_times_s
        return self.token_times_s[-1] if is_over else self.gone_s


class Settings(NamedTuple):
    """The settings that are to differ from the log's."""

    options: Mapping[str, Any] = {}
    """Fields of `ServeConfig` that the core is made from."""
    max_kv_tokens: int | None = None
    rate: float = 1.0
    """Times as fast do requests come; of clients that wait for answers there are as many more."""
    speed: float = 1.0
    """Times as fast are steps."""
    hardware: Hardware | None = None
    """Hardware that runs the steps; None: the log's machine."""


class Clients(NamedTuple):
    """Requests that clients did not give up, as they saw them or would have seen them."""

    seen: Mapping[RequestKey, Seen]
    asked: Mapping[RequestKey, Asked]


class Outcome(NamedTuple):
    """Figures of requests as clients saw them, or would have seen them."""

    classes: dict[RequestClass, ClassReport]
    window_s: float

    def attainment_pct(self, request_class: RequestClass) -> float | None:
        """Return how many of a class's requests were answered to their end with all targets met."""
        report = self.classes[request_class]
        num_good = report.goodput_rps * self.window_s
        return 100 * num_good / report.arrivals if report.arrivals else None


@dataclass
class Recording:
    """The traffic and the machine of a log."""

    config: dict[str, Any]
    max_model_len: int
    seed: int
    remembered: RememberedLengths | None
    """Output lengths that the log's server began with."""
    requests: dict[RequestKey, Asked]
    workers: WorkersStarted
    step_cost: StepCoefficients
    """Fitted to the steps."""
    known_cost: StepCoefficients
    """Step times that the router was told, or, where it was told none, the fitted ones."""
    acceptance: float
    """Chance that a guess was right whose predecessors were."""
    steps: list[LoggedStep]
    start_s: float
    end_s: float

    def report(self) -> Outcome:
        """Return what clients saw."""
        return _outcome(self.clients(), self.arrivals_s)

    @property
    def arrivals_s(self) -> float:
        """How long requests came: what happens after that is their end, and no more load."""
        return max(asked.came_s for asked in self.requests.values()) - self.start_s

    @property
    def _is_whole(self) -> bool:
        """Whether every request had ended when the log did."""
        return all(a.is_whole or a.gone_s or a.is_refused for a in self.requests.values())

    def clients(self) -> Clients:
        """Return what each client saw."""
        seen = {
            key: Seen(
                asked.came_s - asked.submit.age_s - self.start_s,
                max(1, len(asked.token_times_s)),
                [at_s - self.start_s for at_s in asked.token_times_s],
                asked.is_whole,
                is_refused=asked.is_refused,
                targets=Targets.of(asked.submit.slo),
            )
            for key, asked in self.requests.items()
            if asked.gone_s is None
        }
        return Clients(seen, self.requests)

    def run(self, settings: Settings) -> Outcome:
        """Return what clients would have seen. Raises ConfigError: the settings cannot be."""
        return _outcome(self.simulate(settings), self.arrivals_s / settings.rate)

    def simulate(self, settings: Settings) -> Clients:
        """Return what each client would have seen. Raises ConfigError: the settings cannot be.

        Clients that wait for answers ask on as long as those of the log did; what the log has no
        request for, as others were answered sooner, has one of its own again, by another name.
        """
        hardware = settings.hardware or LoggedHardware(
            self.step_cost,
            self.steps,
            overlaps_copies=self.workers.overlaps_copies,
            graph_sizes=self.workers.graph_sizes,
            encoder=self.workers.encoder,
            speed=settings.speed,
            clock=lambda: simulation.now_s,
        )
        serve = self._serve_config(settings)
        if settings.hardware is not None:
            check_hardware(serve, settings.hardware)
        else:
            check_states(serve, self.workers.num_state_slots, "the log")
        core_config = make_scheduler_config(
            serve, max_model_len=self.max_model_len, seed=self.seed, remembered=self.remembered
        )
        num_slots = settings.max_kv_tokens or self.workers.num_kv_slots
        lengths = LengthWorker(
            max_num_seqs=core_config.max_num_seqs,
            max_model_len=core_config.max_model_len,
            acceptance=self.acceptance,
        )
        noise_rng, profile_rng = np.random.default_rng(0).spawn(2)
        worker = VirtualWorker(hardware, lengths, noise=hardware.spread, rng=noise_rng)
        known_cost = _times(self.known_cost, 1 / settings.speed)
        if settings.hardware is not None:
            known_cost = settings.hardware.step_cost or fitted_profile(
                hardware, noise=hardware.spread, rng=profile_rng
            )
        traffic = _Traffic(self, settings.rate)
        num_state_slots = (settings.hardware or self.workers).num_state_slots
        simulation = Simulation(
            Scheduler(core_config),
            worker,
            worker.seconds,
            WorkersReady(
                num_slots,
                num_host_slots=self.workers.num_host_slots,
                num_prefix_slots=0 if num_state_slots else self.workers.num_prefix_slots,
                num_state_slots=num_state_slots,
                step_cost=known_cost,
                overlaps_copies=hardware.overlaps_copies,
                graph_sizes=hardware.graph_sizes,
                encoder=hardware.encoder,
            ),
            frontend=traffic.on_news,
            hears_tokens=False,
            router_time_factor=1.0,
        )
        # A log that goes on to the end of all requests says nothing of a time at which it is over.
        span_s = (self.end_s - self.start_s) / settings.rate
        until_s = MOST_TIMES_AS_LONG * span_s if self._is_whole else span_s
        simulation.run(traffic.first_events(), until_s=until_s)
        seen = {
            key: Seen(
                outcome.arrival_s - traffic.asked[key].submit.age_s,
                max(1, len(outcome.token_ids)),
                outcome.token_times_s,
                outcome.finish_reason in (FinishReason.STOP, FinishReason.LENGTH),
                is_refused=outcome.error is not None,
                targets=Targets.of(traffic.asked[key].submit.slo),
            )
            for key, outcome in simulation.outcomes.items()
            if traffic.asked[key].gone_s is None
        }
        return Clients(seen, traffic.asked)

    def _serve_config(self, settings: Settings) -> ServeConfig:
        """Return the options; what only the old policy or rule had a use for goes with it."""
        options = {
            **self.config,
            "max_num_batched_tokens": (
                self.token_budget if settings.hardware is None else settings.hardware.server_budget
            ),
            **settings.options,
        }
        known = {**vars(_DEFAULTS), **options}
        for spec in dataclasses.fields(_DEFAULTS):
            is_old = spec.name in self.config and spec.name not in settings.options
            if is_old and unmet_need(spec, known) is not None:
                options[spec.name] = spec.default
        return ServeConfig(**options)

    @property
    def token_budget(self) -> int:
        """Return the token budget of a step that the workers said, or what was configured."""
        budget: int = self.workers.max_num_batched_tokens or self.config["max_num_batched_tokens"]
        return budget

    def mean_outputs(self) -> dict[RequestClass, int]:
        """Return the mean length of whole outputs, for those that are not; 1: none is whole."""
        lengths: dict[RequestClass, list[int]] = {each: [] for each in RequestClass}
        for asked in self.requests.values():
            if asked.is_whole:
                lengths[asked.submit.request_class].append(len(asked.token_times_s))
        return {each: max(1, round(float(np.mean(of or [1])))) for each, of in lengths.items()}


_DEFAULTS = ServeConfig()
_TRUTH = {"true": True, "false": False}

MOST_TIMES_AS_LONG = 20
"""Most lengths of its log that a simulation lasts: too small settings would never end it."""
_MOMENT_S = 1e-6

MIN_ROUNDS = 2
"""Requests of each client before it is taken for one that waits for answers."""
LEAST_FULL, LEAST_OFTEN = 0.9, 0.9
"""Clients of a class wait for answers where this share of its requests come while this share of
the most that were ever in flight is there."""


class _Loop(NamedTuple):
    """Clients of a class that ask again once they are answered."""

    num_clients: int
    think_s: float
    """Between an answer and the next question: the median."""


def find_loop(requests: Sequence[Asked]) -> _Loop | None:
    """Return the clients of a class's requests, if they wait for answers; None: they do not."""
    came = sorted(asked.came_s for asked in requests)
    ends = sorted(end_s for asked in requests if (end_s := asked.ended_s) is not None)
    if not ends:
        return None
    # How many are there once each has come, itself among them.
    num_there = np.arange(1, len(came) + 1) - np.searchsorted(ends, came, side="right")
    width = int(num_there.max())
    later = num_there[width:]
    full = min(LEAST_FULL * width, width - 1) if width > 2 else width  # one may be thinking
    if len(came) < MIN_ROUNDS * width or np.mean(later >= full) < LEAST_OFTEN:
        return None
    # The n-th that comes after all clients have begun follows the n-th answer.
    thinks = [max(0.0, at_s - end_s) for at_s, end_s in zip(came[width:], ends, strict=False)]
    durations = [asked.ended_s - asked.came_s for asked in requests if asked.ended_s is not None]
    think_s = float(np.median(thinks)) if thinks else 0.0
    return _Loop(width, think_s) if think_s <= float(np.median(durations)) else None


class _Traffic:
    """A recording's requests, as they come to a simulation."""

    def __init__(self, recording: Recording, rate: float) -> None:
        self.asked = dict(recording.requests)
        """By name, those that come again by another name included."""
        self._rate = rate
        self._start_s = recording.start_s
        self._means = recording.mean_outputs()
        self._loops: dict[RequestClass, _Loop] = {}
        self._waiting: dict[RequestClass, deque[RequestKey]] = {}
        self._until_s: dict[RequestClass, float] = {}
        """When clients that wait for answers ask for the last time."""
        self._next_id = 1 + max((key.request_id for key in self.asked), default=0)
        for each in RequestClass:
            keys = [key for key, of in self.asked.items() if of.submit.request_class is each]
            keys.sort(key=lambda key: self.asked[key].came_s)
            loop = find_loop([self.asked[key] for key in keys])
            if loop is not None:
                self._loops[each] = loop
                self._until_s[each] = (self.asked[keys[-1]].came_s - self._start_s) / rate
                num_first = max(1, round(loop.num_clients * rate))
                self._waiting[each] = deque(keys[num_first:])

    def first_events(self) -> list[TimedEvent]:
        """Return the requests that come whatever becomes of others."""
        later = {key for keys in self._waiting.values() for key in keys}
        return [
            event
            for key, asked in self.asked.items()
            if key not in later
            for event in self._events(key, (asked.came_s - self._start_s) / self._rate)
        ]

    def on_news(
        self, frontend_id: FrontendId, delta: RequestDelta, now_s: float
    ) -> list[TimedEvent]:
        """Return what a client asks next, if this was the end of what it asked before."""
        if delta.finish_reason is None:
            return []
        before = self.asked[RequestKey(frontend_id, delta.request_id)]
        of = before.submit.request_class
        loop = self._loops.get(of)
        if loop is None or (at_s := now_s + loop.think_s) > self._until_s[of]:
            return []
        return self._events(self._next(of), at_s)

    def _next(self, of: RequestClass) -> RequestKey:
        if self._waiting[of]:
            return self._waiting[of].popleft()
        known = [key for key, asked in self.asked.items() if asked.submit.request_class is of]
        model = known[self._next_id % len(known)]
        key = RequestKey(model.frontend_id, RequestId(self._next_id))
        self._next_id += 1
        asked = self.asked[model]
        submit = msgspec.structs.replace(asked.submit, request_id=key.request_id)
        self.asked[key] = dataclasses.replace(asked, submit=submit)
        return key

    def _events(self, key: RequestKey, at_s: float) -> list[TimedEvent]:
        """Return a request as it comes, and as it is given up."""
        asked = self.asked[key]
        submit = _with_length(asked, self._means[asked.submit.request_class])
        events = [TimedEvent(at_s, FromFrontend(key.frontend_id, submit))]
        if asked.gone_s is not None:
            abort = FromFrontend(key.frontend_id, Abort(request_id=key.request_id))
            events.append(TimedEvent(at_s + asked.gone_s - asked.came_s, abort))
        return events


def _times(cost: StepCoefficients, factor: float) -> StepCoefficients:
    """Return a formula whose steps take so many times as long."""
    seconds = {
        name: factor * getattr(cost, name) for name in cost.__struct_fields__ if name.endswith("_s")
    }
    return msgspec.structs.replace(cost, **seconds)


def _outcome(clients: Clients, arrivals_s: float) -> Outcome:
    """Return what requests that came in this time came to, however long they took."""
    first_s = min((each.arrival_s for each in clients.seen.values()), default=0.0)
    ends = [each.token_times_s[-1] for each in clients.seen.values() if each.token_times_s]
    stop_s = max([arrivals_s, *ends])
    window = Window(min(0.0, first_s), arrivals_s + _MOMENT_S, stop_s)
    reports = {
        each: class_report(
            [
                seen
                for key, seen in clients.seen.items()
                if clients.asked[key].submit.request_class is each
            ],
            Targets(),
            window,
            evictions=0,
            recomputed_tokens=0,
        )
        for each in RequestClass
    }
    return Outcome(reports, window.seconds)


def _with_length(asked: Asked, mean_output: int) -> Submit:
    """Return the request as simulated workers take it: its seed says where it ends."""
    num_output = len(asked.token_times_s)
    if not asked.is_whole:
        left = mean_output if asked.gone_s is None else asked.submit.max_tokens
        num_output = max(num_output + 1, left)
    num_output = min(max(1, num_output), asked.submit.max_tokens)
    return msgspec.structs.replace(
        asked.submit,
        eos_token_ids=[EOS_TOKEN_ID],
        sampling=SamplingParams(seed=asked.num_prompt + num_output),
        constraint=None,
        needs_acknowledgement=False,
    )


class _Taker:
    """Replays a log and takes down what it needs."""

    def __init__(self, reader: DecisionLogReader) -> None:
        self._core = make_core_of(reader.header)
        self.requests: dict[RequestKey, Asked] = {}
        self.workers: WorkersStarted | None = None
        self.step_cost: StepCoefficients | None = None
        self.steps: list[LoggedStep] = []
        self.start_s = 0.0
        """When the first request came."""
        self._encoded = self._encode_s = 0.0
        """Sums over steps: of the encoder's work, and of its time."""
        self._shapes: dict[StepId, tuple[StepShape, float]] = {}
        self._last_result_s = float("-inf")

    @property
    def acceptance(self) -> float:
        """Chance that a guess is right whose predecessors are; a guess itself if the log has
        none."""
        return self._core.drafting.of_all.value

    def decide(self, record: Decision) -> bool:
        """Let the core decide; False: it would wait."""
        step = self._core.plan(record.planned_at_s)
        if not isinstance(step, PlannedStep):
            return False
        self._shapes[step.step_id] = step.shape, record.committed_at_s
        self._core.commit(step, record.committed_at_s)
        return True

    def feed(self, record: Any) -> None:
        """Put an input in."""
        match record:
            case WorkersStarted():
                self.workers, self.step_cost = record, record.step_cost or self.step_cost
            case StepTimesWereMeasured(step_cost=step_cost):
                self.step_cost = step_cost
            case MessageReceived(frontend_id=frontend_id, message=Submit() as submit):
                self.start_s = record.now_s if not self.requests else self.start_s
                key = RequestKey(frontend_id, submit.request_id)
                self.requests[key] = Asked(submit, record.now_s)
            case MessageReceived(frontend_id=frontend_id, message=Abort(request_id=request_id)):
                asked = self.requests.get(RequestKey(frontend_id, request_id))
                if asked is not None and asked.finish is None:
                    asked.gone_s = record.now_s
            case ResultReceived(result=result):
                self._note_step(result, record.now_s)
        event = event_of(record)
        try:
            if isinstance(event, StepResult):
                news = self._core.on_result(event, record.now_s)
            else:
                news = self._core.on_message(event, record.now_s)
        except ProtocolError:  # which the server logged, and went on
            return
        self._note_news(news, record.now_s)

    def _note_step(self, result: StepResult, now_s: float) -> None:
        shape, committed_s = self._shapes.pop(result.step_id, (None, 0.0))
        self._encoded += result.encoded
        self._encode_s += result.encode_s
        exec_s = result.exec_s - result.copy_s - result.encode_s
        if shape is not None and exec_s > 0.0:
            gap_s = result.idle_s if committed_s < self._last_result_s else 0.0
            start_s = now_s - result.exec_s - self.start_s
            self.steps.append(LoggedStep(shape, exec_s, gap_s, start_s))
        self._last_result_s = now_s

    def _note_news(self, news: list[Outgoing], now_s: float) -> None:
        for outgoing in news:
            for delta in outgoing.message.each():
                asked = self.requests.get(RequestKey(outgoing.frontend_id, delta.request_id))
                if asked is None:
                    continue
                asked.token_times_s += [now_s] * len(delta.token_ids)
                asked.finish = delta.finish_reason or asked.finish

    def fitted(self) -> StepCoefficients:
        """Return the formula of these workers' steps; copies cost what their profile says."""
        chosen = self.steps[:: max(1, len(self.steps) // MAX_SAMPLES)]
        sizes = self.workers.graph_sizes if self.workers is not None else NO_SIZES
        cost = fit([StepSample(each.shape, each.exec_s) for each in chosen], sizes=sizes)
        if self._encoded > 0.0:
            token_s = self._encode_s / self._encoded
            cost = msgspec.structs.replace(cost, per_encoder_token_s=token_s)
        if self.step_cost is None:
            return cost
        return msgspec.structs.replace(
            cost,
            per_saved_token_s=self.step_cost.per_saved_token_s,
            per_loaded_token_s=self.step_cost.per_loaded_token_s,
        )


def read_recording(reader: DecisionLogReader) -> Recording:
    """Return what a log says of its traffic and its machine.

    Raises:
        DecisionLogError: it cannot be read, was changed, is not repeated, is too short, or has
            workers that were replaced.
    """
    taker = _Taker(reader)
    end_s = 0.0
    for number, record in reader.lines():
        if isinstance(record, Decision):
            if not taker.decide(record):
                message = f"{reader.path}, line {number}: this decision is not repeated"
                raise DecisionLogError(message)
            continue
        if isinstance(record, WorkersWereLost):
            raise DecisionLogError(
                f"{reader.path}, line {number}: the workers were replaced here; a log of one group"
                " of workers is needed"
            )
        end_s = record.now_s
        taker.feed(record)
    if len(taker.steps) < MIN_STEPS or taker.workers is None:
        raise DecisionLogError(
            f"{reader.path}: at least {MIN_STEPS} steps are needed to fit their times, got"
            f" {len(taker.steps)}"
        )
    fitted = taker.fitted()
    return Recording(
        config=dict(reader.header.config),
        max_model_len=reader.header.max_model_len,
        seed=reader.header.seed,
        remembered=reader.header.remembered,
        requests=taker.requests,
        workers=taker.workers,
        step_cost=fitted,
        known_cost=taker.step_cost or fitted,
        acceptance=taker.acceptance,
        steps=taker.steps,
        start_s=taker.start_s,
        end_s=end_s,
    )


def parse_options(texts: tuple[str, ...]) -> dict[str, Any]:
    """Return fields of the core's options from NAME=VALUE. Raises ConfigError."""
    options: dict[str, Any] = {}
    for text in texts:
        flag, equals, value = text.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not equals or name not in DECIDING_OPTIONS:
            raise ConfigError(
                "--set must be NAME=VALUE with the name of an option of scheduling or memory"
                f" (docs/configuration.md), got {text!r}"
            )
        kind = type(getattr(_DEFAULTS, name))
        try:
            options[name] = _TRUTH[value.lower()] if kind is bool else kind(value)
        except (KeyError, ValueError):
            wanted = "true or false" if kind is bool else kind.__name__
            raise ConfigError(f"--set {name}: must be {wanted}, got {value!r}") from None
    return options
