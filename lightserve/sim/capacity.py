"""How many replicas, how large a pool, how much best-effort work: `lightserve plan`.

As Echo's estimator does it (section 5.4): the busiest minutes of a trace are simulated with more
and more replicas until the real-time targets are met, then with smaller and smaller pools; what
best-effort work fits beside the real-time requests is simulated in windows spread over the trace.
Replicas get requests in turn, so that one stands for all.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lightserve.config.scheduling import AUTO_BATCHED_TOKENS
from lightserve.decisions.replaying import DecisionLogReader
from lightserve.errors import ConfigError
from lightserve.sim.hybrid import HybridConfig, run_hybrid
from lightserve.sim.report import HybridReport, Targets
from lightserve.sim.traffic import next_power_of_two, parse_lengths, read_trace
from lightserve.sim.virtual_gpus import A100_LLAMA2_7B, Hardware, ProfiledHardware
from lightserve.sim.whatif import read_recording
from lightserve.types import RequestClass

TAIL_S = 60.0
"""After a window, for its last requests to end."""
NUM_BE_WINDOWS, BE_WINDOW_S = 4, 60.0
POOL_STEP = 1.1
"""Quotient of the pools between which the smallest is found."""
DAY_S = 86_400.0


class Row(NamedTuple):
    """A request of a trace."""

    at_s: float
    num_prompt: int
    num_output: int
    block_ids: str = ""
    """See `Trace.block_ids`."""
    image_tokens: str = ""
    """Tokens of each image of its prompt, separated by blanks."""


class _MooncakeLine(msgspec.Struct):
    """A line of Mooncake's traces; times in milliseconds."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = msgspec.field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The traffic, the targets and the server that a plan is made for."""

    rows: list[Row]
    """In order of time."""
    attainment: float
    """Share of the real-time requests that have to meet all targets."""
    targets: Targets
    max_kv_tokens: int
    """The largest pool that a replica can have."""
    max_replicas: int = 64
    window_s: float = 300.0
    policy: str = "unified"
    max_num_batched_tokens: int = 0
    """The server's option; 0: what a server takes on this hardware."""
    be_lengths: str = "uniform:512-1024,32-128"
    be_clients: int = 64
    """Best-effort clients of each replica."""
    hardware: Hardware = A100_LLAMA2_7B

    @property
    def budget_tokens(self) -> int:
        """Most new tokens in a step."""
        return self.max_num_batched_tokens or self.hardware.server_budget


class Trial(NamedTuple):
    """One simulation of the busiest window."""

    num_replicas: int
    kv_tokens: int
    attainment: float


@dataclass
class Plan:
    """The answer."""

    busiest_s: float
    """When the busiest window begins, in seconds of the trace."""
    num_requests: int
    """In it."""
    num_replicas: int = 0
    kv_tokens: int = 0
    """Smallest KV pool of each replica that was found to be enough, in tokens."""
    attainment: float = 0.0
    be_tokens_per_day: float = 0.0
    """Output tokens of all replicas."""
    trials: list[Trial] = field(default_factory=list)


def read_rows(path: Path) -> tuple[list[Row], Hardware | None]:
    """Return the real-time requests of a CSV, Mooncake's JSON lines, or a decision log, and of the
    latter its hardware.

    Raises:
        ConfigError, DecisionLogError: it is none of these.
    """
    try:
        with path.open("rb") as file:
            first = file.readline(1 << 20)
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from error
    if first.startswith(b'{"kind":"header"'):
        recording = read_recording(DecisionLogReader(path))
        rows = [
            Row(
                asked.came_s - recording.start_s,
                asked.num_prompt,
                len(asked.token_times_s),
                image_tokens=" ".join(str(image.num_tokens) for image in asked.submit.images),
            )
            for asked in recording.requests.values()
            if asked.submit.request_class is RequestClass.RT and asked.token_times_s
        ]
        budget = recording.token_budget or AUTO_BATCHED_TOKENS["cpu"]
        hardware = ProfiledHardware(
            recording.step_cost,
            kv_bytes_per_token=0,
            server_budget=budget,
            graph_sizes=recording.workers.graph_sizes,
            encoder=recording.workers.encoder,
        )
        return sorted(rows), hardware
    if first.startswith(b"{"):
        return _read_mooncake(path), None
    trace = read_trace(path, flag="--trace")
    if trace.arrival_s is None:
        raise ConfigError(f"--trace {path}: needs a column t, when requests come")
    blocks = trace.block_ids or [""] * len(trace.arrival_s)
    images = [" ".join(map(str, own)) for own in trace.images or [()] * len(trace.arrival_s)]
    columns = (trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist())
    return [Row(*row) for row in zip(*columns, blocks, images, strict=True)], None


def _read_mooncake(path: Path) -> list[Row]:
    decoder, rows = msgspec.json.Decoder(_MooncakeLine), []
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            line = decoder.decode(text)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--trace {path}, line {number}: {error}") from error
        if min(line.input_length, line.output_length) < 1 or line.timestamp < 0:
            raise ConfigError(f"--trace {path}, line {number}: needs lengths >= 1, and a time >= 0")
        blocks = " ".join(map(str, line.hash_ids))
        rows.append(Row(line.timestamp / 1e3, line.input_length, line.output_length, blocks))
    return sorted(rows)


def busiest_window(rows: list[Row], window_s: float) -> list[Row]:
    """Return the requests of the window in which most tokens are asked for."""
    times = np.array([row.at_s for row in rows])
    tokens = np.array([row.num_prompt + row.num_output for row in rows])
    before = np.concatenate([[0], np.cumsum(tokens)])
    ends = np.searchsorted(times, times + window_s)
    first = int(np.argmax(before[ends] - before[:-1]))
    return rows[first : int(ends[first])]


def make_plan(config: PlanConfig, *, progress: Callable[[str], None] = lambda _: None) -> Plan:
    """Return the smallest number of replicas, then the smallest pool, that keep the targets.

    Raises:
        ConfigError: not even `max_replicas` do, or a request is larger than the largest pool.
    """
    if not config.rows:
        raise ConfigError("--trace: there is no real-time request in it")
    if (low := _largest_request(config)) > config.max_kv_tokens:
        raise ConfigError(
            f"--max-kv-tokens must be at least {low}, the most that one request may need, got"
            f" {config.max_kv_tokens}"
        )
    window = busiest_window(config.rows, config.window_s)
    plan = Plan(window[0].at_s, len(window))

    def is_enough(num_replicas: int, kv_tokens: int) -> bool:
        trial = Trial(num_replicas, kv_tokens, _attained(config, window, num_replicas, kv_tokens))
        plan.trials.append(trial)
        progress(
            f"replicas {num_replicas}, KV slots {kv_tokens}: {100 * trial.attainment:.1f} % in time"
        )
        return trial.attainment >= config.attainment

    plan.num_replicas = _fewest(config, is_enough)
    plan.kv_tokens = _smallest_pool(config, plan.num_replicas, is_enough)
    plan.attainment = next(
        trial.attainment
        for trial in plan.trials
        if trial[:2] == (plan.num_replicas, plan.kv_tokens)
    )
    plan.be_tokens_per_day = _be_tokens_per_day(config, plan, progress)
    return plan


def _fewest(config: PlanConfig, is_enough: Callable[[int, int], bool]) -> int:
    """Return the fewest replicas with the largest pool: doubled, then halved between."""
    low, high = 0, 1
    while not is_enough(high, config.max_kv_tokens):
        if high >= config.max_replicas:
            raise ConfigError(
                f"not even {high} replicas (--max-replicas) keep the targets of"
                f" {100 * config.attainment:g} %: check whether one request alone can"
            )
        low, high = high, min(2 * high, config.max_replicas)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle, config.max_kv_tokens) else (middle, high)
    return high


def _smallest_pool(
    config: PlanConfig, num_replicas: int, is_enough: Callable[[int, int], bool]
) -> int:
    """Return the smallest pool, up to `POOL_STEP`, in which every request has room."""
    low = _largest_request(config)
    high = config.max_kv_tokens
    if is_enough(num_replicas, low):
        return low
    while high / low > POOL_STEP:
        middle = int((low * high) ** 0.5)
        if is_enough(num_replicas, middle):
            high = middle
        else:
            low = middle
    return high


def _largest_request(config: PlanConfig) -> int:
    """Return the slots that one request of either class may come to need."""
    best_effort = parse_lengths(config.be_lengths, flag="--be-lengths")
    return config.hardware.num_state_slots + max(
        max(row.num_prompt for row in config.rows)
        + next_power_of_two(max(row.num_output for row in config.rows)),
        best_effort.max_prompt_tokens + next_power_of_two(best_effort.max_output_tokens),
    )


def _attained(config: PlanConfig, window: list[Row], num_replicas: int, kv_tokens: int) -> float:
    """Return the share of the first replica's requests that meet all targets."""
    duration_s = window[-1].at_s - window[0].at_s + TAIL_S
    report = _run(config, window[::num_replicas], kv_tokens, duration_s=duration_s, margin_s=0.0)
    return report.rt.goodput_rps * duration_s / report.rt.arrivals


def _run(config: PlanConfig, rows: list[Row], kv_tokens: int, **others: Any) -> HybridReport:
    """Simulate the real-time requests of one replica; `others`: further fields of the run."""
    with tempfile.TemporaryDirectory() as folder:
        path = _written(rows, Path(folder) / "window.csv") if rows else None
        return run_hybrid(
            HybridConfig(
                rt=None if path is None else str(path),
                rt_max_tokens=None,
                capacity_tokens=kv_tokens,
                policy=config.policy,
                budget_tokens=config.budget_tokens,
                targets=config.targets,
                hardware=config.hardware,
                **others,
            )
        )


def _be_tokens_per_day(config: PlanConfig, plan: Plan, progress: Callable[[str], None]) -> float:
    """Return what best-effort requests get beside real-time ones, in windows over the trace."""
    first_s, last_s = config.rows[0].at_s, config.rows[-1].at_s
    span_s = min(BE_WINDOW_S, max(1.0, last_s - first_s))
    rates = []
    for number in range(NUM_BE_WINDOWS):
        start_s = first_s + (last_s - first_s - span_s) * number / (NUM_BE_WINDOWS - 1)
        rows = [row for row in config.rows if start_s <= row.at_s < start_s + span_s]
        report = _run(
            config,
            rows[:: plan.num_replicas],
            plan.kv_tokens,
            be=f"closed:{config.be_clients}",
            be_lengths=config.be_lengths,
            duration_s=span_s,
            margin_s=span_s / 10,
        )
        rates.append(report.be.throughput_tps)
        progress(f"best-effort work from {start_s:.0f} s on: {rates[-1]:.0f} tokens/s of a replica")
    return plan.num_replicas * DAY_S * float(np.mean(rates))


def _written(rows: list[Row], path: Path) -> Path:
    """Write a trace as simulations read it."""
    columns = {"t": "at_s", "prompt_tokens": "num_prompt", "output_tokens": "num_output"}
    others = {"block_ids_512": "block_ids", "image_tokens": "image_tokens"}
    columns |= {name: of for name, of in others.items() if any(getattr(row, of) for row in rows)}
    with path.open("w", encoding="ascii", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in rows:
            writer.writerow([getattr(row, of) for of in columns.values()])
    return path
