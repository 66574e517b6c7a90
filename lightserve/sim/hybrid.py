"""Real-time and best-effort requests together through the real Scheduler.

Time passes as on a server: the core plans one step ahead, virtual hardware takes its time with
noise, requests come by a Poisson process, from a closed loop, or as a trace says. The first and
the last `margin_s` do not count. The same configuration gives the same report, but for CPU times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from lightserve.config import ServeConfig
from lightserve.cost.model import StepSample, StepShape, fit
from lightserve.decisions.records import CoreCalls, DecisionLogFile, RecordedCore, header_of
from lightserve.errors import ConfigError
from lightserve.messages.common import StepCoefficients
from lightserve.messages.frontend_router import RequestDelta
from lightserve.messages.images import EncoderWork
from lightserve.router.admission.base import AdmissionRule
from lightserve.router.admission.baselines import OracleAdmission
from lightserve.router.admission.classwise import ClasswiseAdmission
from lightserve.router.config import SchedulerConfig, make_scheduler_config
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.router.request import Request
from lightserve.sim.report import HybridReport, Seen, Targets, Window, hybrid_report
from lightserve.sim.simulation import (
    RouterTimes,
    Simulation,
    TimedCore,
    TimedEvent,
    Worker,
    router_seconds,
)
from lightserve.sim.traffic import Job, Traffic, parse_traffic
from lightserve.sim.virtual_gpus import A100_LLAMA2_7B, Hardware, check_hardware
from lightserve.sim.worker import LengthWorker, SimulatedWorker, VirtualWorker
from lightserve.types import FinishReason, FrontendId, RequestClass

# What a profile of virtual hardware says: fitted to noisy samples of it, its formula unseen.
#
# The router of a server knows its workers by a profile that `lightserve profile` has measured; that
# of a simulation knows them by the same fit to as many samples as a short profile takes.

NUM_SAMPLES = 150
_MAX_DECODES = 200
_CONTEXT = (50, 2000)
"""Tokens that rows have before the step, both ends included."""
_MAX_CHUNK = 2048
_COPIED_TOKENS = 2000


def fitted_profile(
    hardware: Hardware, *, noise: float, rng: np.random.Generator
) -> StepCoefficients:
    """Return the coefficients fitted to samples of steps and copies.

    A third each are decodes, chunks, and both; chunks are log-uniform in length. `noise`:
    standard deviation of the logarithm of a sample.
    """
    samples = []
    for number in range(NUM_SAMPLES):
        shape = StepShape() if number % 3 == 1 else _decodes(rng)
        if number % 3:
            count = round(np.exp(rng.uniform(np.log(2), np.log(_MAX_CHUNK))))
            shape = shape.plus(int(rng.integers(_CONTEXT[1], endpoint=True)), count)
        samples.append(StepSample(shape, hardware.step_seconds(shape) * _factor(noise, rng)))
    saved_s = hardware.copy_seconds(num_saved=_COPIED_TOKENS) * _factor(noise, rng)
    loaded_s = hardware.copy_seconds(num_loaded=_COPIED_TOKENS) * _factor(noise, rng)
    return replace(
        fit(samples),
        per_encoder_token_s=hardware.per_encoder_token_s
        and hardware.per_encoder_token_s * _factor(noise, rng),
        per_saved_token_s=saved_s / _COPIED_TOKENS,
        per_loaded_token_s=loaded_s / _COPIED_TOKENS,
    )


def _decodes(rng: np.random.Generator) -> StepShape:
    contexts = rng.integers(*_CONTEXT, size=rng.integers(1, _MAX_DECODES), endpoint=True)
    return StepShape().plus_decodes(len(contexts), int(contexts.sum()))


def _factor(noise: float, rng: np.random.Generator) -> float:
    """Return a lognormal factor of mean one."""
    return float(rng.lognormal(-0.5 * noise**2, noise))


MAX_NUM_SEQS = 512
MAX_LOG_BYTES = 4 << 30
DEFAULT_TARGETS = Targets(ttft_s=0.4, tpot_s=0.2, mtpot_s=0.2)
_FRONTENDS = {RequestClass.RT: FrontendId(0), RequestClass.BE: FrontendId(1)}
_CLASSES = {frontend_id: request_class for request_class, frontend_id in _FRONTENDS.items()}
_QUEUE_LIMITS = (
    "rt_max_waiting_requests",
    "rt_max_waiting_tokens",
    "be_max_waiting_requests",
    "be_max_waiting_tokens",
    "max_parameter_bytes",  # pixels of images
)
_UNBOUNDED = 1 << 60


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """One run. Fields named as options of `lightserve serve` mean the same."""

    rt: str | None = None
    """poisson:RATE (per second), closed:N, batch:N, a trace file, or None: none come."""
    rt_lengths: str | None = None
    """With the first three: uniform:P1-P2,O1-O2 or a trace file."""
    rt_max_tokens: int | None = 2048
    """Declared limit of real-time outputs; None: the next power of two over the longest one."""
    rt_images: str = "0"
    """Images of each real-time request but those of a trace, N:TOKENS; 0: none."""
    be: str | None = None
    """Best-effort traffic, in the words of `rt`."""
    be_lengths: str | None = None
    be_max_tokens: int | None = None
    """None: the end of a range; for a trace the next power of two over its longest output."""
    be_images: str = "0"
    duration_s: float = 90.0
    margin_s: float = 30.0
    """At the start and at the end: not in the statistics."""
    capacity_tokens: int = 60_000
    host_kv_tokens: int = -1
    """-1: half of the pool."""
    prefix_host_tokens: int = 0
    """More of them, for prefixes that leave the pool."""
    policy: str = "unified"
    admission: str = "risk"
    """A choice of --admission, or "oracle"."""
    budget_tokens: int = 512
    serve_options: dict[str, float | str] = field(default_factory=dict)
    """Further fields of ServeConfig: those of the admission rule and of the KV pool."""
    targets: Targets = DEFAULT_TARGETS
    """Targets of real-time requests."""
    noise: float | None = None
    """Lognormal, of the time of a step; None: the spread that the hardware has."""
    router_time_factor: float = 1.0
    """Times what a router takes that this one does, see `Simulation`; 0: no time."""
    router_times: RouterTimes | None = None
    """Times of a router that was measured; None: a formula gives them."""
    is_profiled: bool = True
    """Whether the router starts from a profile of the hardware, fitted to noisy samples of it;
    otherwise it learns what steps take as it serves."""
    draft_acceptance: float = 0.6
    """Chance that a draft is right whose predecessors are, where the options have any."""
    checks_kv: bool = False
    """Whether the worker checks every read of KV (several times slower)."""
    seed: int = 0
    hardware: Hardware = A100_LLAMA2_7B
    decision_log: str | None = None
    """File to record the core's inputs and decisions in; not with the oracle."""


def _host_tokens(config: HybridConfig) -> int:
    """Return the tokens of the host pool, those of prefixes aside."""
    return config.capacity_tokens // 2 if config.host_kv_tokens < 0 else config.host_kv_tokens


def run_hybrid(
    config: HybridConfig, *, progress: Callable[[float], None] | None = None
) -> HybridReport:
    """Run `duration_s` virtual seconds; `progress` is told of each that has passed.

    Raises:
        ConfigError: an option that cannot be, or a request that can never fit.
    """
    run = HybridRun(config)
    time_s = 0.0
    with contextlib.closing(run):
        while time_s < config.duration_s:
            step_s = min(1.0, config.duration_s - time_s)
            time_s += step_s
            run.advance(time_s)
            if progress is not None:
                progress(step_s)
    return run.report()


class HybridRun:
    """The core, the worker, and the clients of both classes."""

    def __init__(self, config: HybridConfig) -> None:
        """Make everything. Raises ConfigError."""
        if config.duration_s <= 2 * config.margin_s:
            raise ConfigError(
                f"--duration-s must be above {2 * config.margin_s:g}: the first and the last"
                f" {config.margin_s:g} s do not count, got {config.duration_s:g}"
            )
        if num_tokens := config.prefix_host_tokens:
            if config.hardware.num_state_slots:
                raise ConfigError(
                    f"--prefix-host-tokens {num_tokens} does not go with --hardware of a model that"
                    " has recurrent layers: its prefixes stay in the KV pool"
                )
            if config.serve_options.get("cache_policy") == "off":
                raise ConfigError(
                    f"--prefix-host-tokens {num_tokens} needs --cache-policy task-aware or lru"
                )
        self.config = config
        rt_seed, be_seed, noise_seed, profile_seed = np.random.SeedSequence(config.seed).spawn(4)
        seeds = {RequestClass.RT: rt_seed, RequestClass.BE: be_seed}
        self.clients = {
            request_class: Clients(
                request_class,
                traffic,
                np.random.default_rng(seeds[request_class]),
                config.targets if request_class is RequestClass.RT else Targets(),
                config.hardware.encoder,
            )
            for request_class, traffic in _traffic(config).items()
        }
        core_config = make_core_config_of(config, self.clients)
        self.core = TimedCore(core_config)
        self.lengths_worker = LengthWorker(
            max_num_seqs=core_config.max_num_seqs,
            max_model_len=core_config.max_model_len,
            acceptance=config.draft_acceptance,
        )
        noise = config.hardware.spread if config.noise is None else config.noise
        self.worker = VirtualWorker(
            config.hardware,
            self._inner_worker(core_config),
            noise=noise,
            rng=np.random.default_rng(noise_seed),
        )
        profile = config.hardware.step_cost
        if profile is None and config.is_profiled:
            rng = np.random.default_rng(profile_seed)
            profile = fitted_profile(config.hardware, noise=noise, rng=rng)
        self._decision_log = _open_log(config, core_config)
        calls: CoreCalls = self.core
        if self._decision_log is not None:
            calls = RecordedCore(self.core, self._decision_log)
        self.simulation = Simulation(
            calls,
            self.worker,
            self.worker.seconds,
            WorkersReady(
                config.capacity_tokens,
                num_host_slots=_host_tokens(config),
                num_prefix_slots=config.prefix_host_tokens,
                num_state_slots=config.hardware.num_state_slots,
                step_cost=profile,
                overlaps_copies=config.hardware.overlaps_copies,
                graph_sizes=config.hardware.graph_sizes,
                encoder=config.hardware.encoder,
            ),
            frontend=self._on_news,
            hears_tokens=False,
            router_time_factor=config.router_time_factor,
            router_time=config.router_times or router_seconds,
        )
        self._events = [
            event
            for clients in self.clients.values()
            for event in clients.first_events(config.duration_s)
        ]

    def _inner_worker(self, core_config: SchedulerConfig) -> Worker:
        if not self.config.checks_kv:
            return self.lengths_worker
        return SimulatedWorker(
            num_slots=self.config.capacity_tokens,
            num_host_slots=_host_tokens(self.config) + self.config.prefix_host_tokens,
            num_state_slots=self.config.hardware.num_state_slots,
            max_num_seqs=core_config.max_num_seqs,
            max_model_len=core_config.max_model_len,
            acceptance=self.config.draft_acceptance,
        )

    def advance(self, until_s: float) -> None:
        """Let everything happen up to a time."""
        events, self._events = self._events, []
        self.simulation.run(events, until_s=until_s)

    def _on_news(
        self, frontend_id: FrontendId, delta: RequestDelta, now_s: float
    ) -> list[TimedEvent]:
        """In a closed loop, send a request when one has ended, or a batch when all have."""
        if delta.finish_reason is None:
            return []
        return self.clients[_CLASSES[frontend_id]].on_end(now_s)

    def close(self) -> None:
        """Write what is left of the decision log."""
        if self._decision_log is not None:
            self._decision_log.close()

    def seen(self) -> dict[RequestClass, list[Seen]]:
        """Return what clients saw so far of their requests, by class."""
        seen: dict[RequestClass, list[Seen]] = {request_class: [] for request_class in RequestClass}
        for key, outcome in self.simulation.outcomes.items():
            clients = self.clients[_CLASSES[key.frontend_id]]
            seen[clients.request_class].append(
                Seen(
                    outcome.arrival_s,
                    clients.num_output_tokens[key.request_id],
                    outcome.token_times_s,
                    outcome.finish_reason in (FinishReason.STOP, FinishReason.LENGTH),
                    clients.num_prompt_tokens[key.request_id],
                    outcome.num_cached_tokens,
                    outcome.error is not None,
                    clients.targets[key.request_id],
                )
            )
        return seen

    def report(self) -> HybridReport:
        """Return what the run came to so far."""
        config = self.config
        window = Window(config.margin_s, config.duration_s - config.margin_s, config.duration_s)
        return hybrid_report(
            self.seen(),
            {RequestClass.RT: config.targets, RequestClass.BE: Targets()},
            window,
            core=self.core,
            sums=self.worker.sums,
            run_lengths=self.lengths_worker.run_lengths,
            num_slots=config.capacity_tokens,
            hardware=config.hardware,
        )


class Clients:
    """Who sends the requests of one class."""

    def __init__(
        self,
        request_class: RequestClass,
        traffic: Traffic,
        rng: np.random.Generator,
        targets: Targets,
        encoder: EncoderWork | None = None,
    ) -> None:
        """`targets` are sent along, unless a request has its own: what the report judges by.

        `encoder`: of the images, where there are any.
        """
        self._sees_itself = encoder is not None and encoder.sees_itself
        self._slo = targets.slo()
        self.targets: list[Targets | None] = []
        """Targets of all requests sent, by number; None: the targets of the run."""
        self.request_class = request_class
        self.traffic = traffic
        self.num_output_tokens: list[int] = []
        """True lengths of all requests sent, by number."""
        self.num_prompt_tokens: list[int] = []
        self.arrivals_s: list[float] = []
        self._jobs = traffic.jobs(rng)
        self._num_ended = 0
        """Ended requests of the current batch."""

    def first_events(self, duration_s: float) -> list[TimedEvent]:
        """Return what is sent within the run without an answer: all, or a closed loop's start."""
        if self.traffic.num_clients is not None:
            jobs = list(itertools.islice(self._jobs, self.traffic.num_clients))
        else:
            jobs = list(itertools.takewhile(lambda timed: timed[0] < duration_s, self._jobs))
        return [self._send(time_s, job) for time_s, job in jobs]

    def on_end(self, now_s: float) -> list[TimedEvent]:
        """Return what is sent when a request has ended."""
        if self.traffic.num_clients is None:
            return []
        num_sent = 1
        if self.traffic.is_batch:
            self._num_ended = (self._num_ended + 1) % self.traffic.num_clients
            num_sent = 0 if self._num_ended else self.traffic.num_clients
        return [self._send(now_s, job) for _, job in itertools.islice(self._jobs, num_sent)]

    def _send(self, time_s: float, job: Job) -> TimedEvent:
        images = tuple(replace(each, sees_itself=self._sees_itself) for each in job.images)
        job = job._replace(images=images)
        submit = job.submit(len(self.num_output_tokens), self.request_class, self._slo)
        self.num_output_tokens.append(job.num_output_tokens)
        self.num_prompt_tokens.append(len(job.prompt_token_ids))
        self.arrivals_s.append(time_s)
        self.targets.append(None if job.slo is None else Targets.of(job.slo))
        return TimedEvent(time_s, FromFrontend(_FRONTENDS[self.request_class], submit))


def _traffic(config: HybridConfig) -> dict[RequestClass, Traffic]:
    """Return the traffic of each class that has any. Raises ConfigError."""
    of_class = {
        RequestClass.RT: (config.rt, config.rt_lengths, config.rt_max_tokens, config.rt_images),
        RequestClass.BE: (config.be, config.be_lengths, config.be_max_tokens, config.be_images),
    }
    traffic = {}
    for request_class, (spec, lengths, max_tokens, images) in of_class.items():
        if spec is not None:
            traffic[request_class] = parse_traffic(
                spec, lengths, request_class=request_class, max_tokens=max_tokens, images=images
            )
        elif lengths is not None or images != "0":
            option = "lengths" if lengths is not None else "images"
            raise ConfigError(f"--{request_class}-{option} needs --{request_class}")
    if not traffic:
        raise ConfigError("there is nothing to simulate: --rt or --be is needed")
    return traffic


def make_core_config_of(
    config: HybridConfig, clients: Mapping[RequestClass, Clients]
) -> SchedulerConfig:
    """Return the core that a server with these options would have. Raises ConfigError."""
    longest = max(c.traffic.max_prompt_tokens + c.traffic.max_tokens for c in clients.values())
    if (most := longest - 1 + config.hardware.num_state_slots) > config.capacity_tokens:
        raise ConfigError(
            f"--capacity-tokens must be at least {most}, the most that one request may need,"
            f" got {config.capacity_tokens}"
        )
    serve = _serve_config(config)
    check_hardware(serve, config.hardware)
    core_config = make_scheduler_config(serve, max_model_len=longest, seed=config.seed)
    if config.admission != "oracle":
        return core_config

    def true_length(request: Request) -> int:
        sender = clients[_CLASSES[request.key.frontend_id]]
        return sender.num_output_tokens[request.key.request_id]

    rule: AdmissionRule = OracleAdmission(true_length)
    if core_config.policy.is_class_aware:
        rule = ClasswiseAdmission(rule, OracleAdmission(true_length))
    return dataclasses.replace(core_config, admission=rule)


def _serve_config(config: HybridConfig) -> ServeConfig:
    """Return the options of such a server; those of the oracle have another admission rule."""
    options: dict[str, Any] = {
        "policy": config.policy,
        "max_num_batched_tokens": config.budget_tokens,
        "max_num_seqs": min(MAX_NUM_SEQS, config.budget_tokens),
        **dict.fromkeys(_QUEUE_LIMITS, _UNBOUNDED),
        **config.serve_options,
    }
    if config.admission != "oracle":
        options["admission"] = config.admission
    return ServeConfig(**options)


def _open_log(config: HybridConfig, core_config: SchedulerConfig) -> DecisionLogFile | None:
    """Return the decision log that is wanted. Raises ConfigError."""
    if config.decision_log is None:
        return None
    if config.admission == "oracle":
        raise ConfigError("--decision-log cannot be combined with --admission oracle")
    header = header_of(
        _serve_config(config), max_model_len=core_config.max_model_len, seed=config.seed
    )
    return DecisionLogFile(Path(config.decision_log), header, max_bytes=MAX_LOG_BYTES)
