"""One invocation: model, calibration, warm-up, then a run per point of the sweep."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import secrets
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from lightserve.errors import ConfigError, LoadTestError
from lightserve.loadtest import result
from lightserve.loadtest.client import StreamClient, clock
from lightserve.loadtest.options import (
    BE,
    CLASSES,
    RT,
    ArrivalKind,
    ServerOptions,
    Targets,
    Traffic,
)
from lightserve.loadtest.result import ClientReport, Percentiles, Record, RequestRow, Run, Timeline
from lightserve.loadtest.runner import Runner, RunOutcome, RunSettings, raise_file_limit, wall_clock
from lightserve.loadtest.statistics import FloatArray, Measures, Window, spread, summarize
from lightserve.loadtest.tables import TITLES
from lightserve.loadtest.workload import (
    UNCALIBRATED,
    UNIQUE,
    Calibration,
    Plan,
    PromptMaker,
    Segment,
    calibrate,
    ends_by_itself,
    make_plan,
)

_TEXT_SEEDS = 1 << 31


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """Settings of every run of an invocation."""

    server: ServerOptions
    """With an empty model, the server's first one is taken."""
    api_key: str | None
    ca_file: str | None
    seed: int
    text_seed: int | None
    """None: other texts in every run, so that no run meets what the last one left in a cache."""
    num_warmup: int
    skip_first_s: float
    skip_last_s: float
    drain_s: float
    saves_requests: bool
    shows_progress: bool


@dataclasses.dataclass(frozen=True)
class Point:
    """A run to make."""

    label: str
    traffic: tuple[Traffic, ...]
    be_body: dict[str, Any] | None = None
    """Merged into best-effort bodies; None: what the session says."""
    ends_with_last: bool = False
    """Whether arrivals end as soon as the last traffic has ended."""


async def run_session(
    options: SessionOptions, points: Sequence[Point], on_run: Callable[[Run], None]
) -> list[Run]:
    """Make all runs, one after the other; Ctrl-C ends the one under way and those after it.

    Raises:
        LoadTestError: no such server or model.
        ConfigError: traffic that cannot be planned.
    """
    plans = [make_plans(point.traffic, options.seed) for point in points]
    raise_file_limit()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    server = options.server
    if not server.model:
        async with _client(options, server) as client:
            server = msgspec.structs.replace(server, model=await _find_model(client, server.url))
    runs: list[Run] = []
    async with _client(options, server) as client:
        keeps = await keeps_connections(client)
    async with _client(options, server, reuses_connections=keeps) as client:
        calibration = await calibrate_client(client)
        await _warm_up(client, calibration, options.num_warmup)
        for point, point_plans in zip(points, plans, strict=True):
            if stop.is_set():
                break
            own = server
            if point.be_body is not None:
                own = msgspec.structs.replace(server, be_body=point.be_body)
            single = dataclasses.replace(options, server=own)
            async with _client(single, own, reuses_connections=keeps) as sender:
                run = await _run_point(single, sender, calibration, point, point_plans, stop=stop)
            runs.append(run)
            on_run(run)
    return runs


def make_plans(traffic: Sequence[Traffic], seed: int) -> list[Plan]:
    """Plan all traffic of a run; an endless open loop ends with the first one's arrivals.

    Raises:
        ConfigError: it never ends, or make_plan's.
    """
    plans: list[Plan] = []
    for number, each in enumerate(traffic):
        bounded = each
        if not ends_by_itself(each) and each.arrivals is not ArrivalKind.CLOSED:
            offsets = plans[0].offsets_s if plans else None
            duration_s = traffic[0].duration_s if offsets is None else float(offsets[-1])
            if number == 0 or duration_s is None:
                raise ConfigError("--be needs num-requests or duration-s: when does it end?")
            bounded = msgspec.structs.replace(each, duration_s=max(duration_s, 1e-3))
        plans.append(make_plan(bounded, np.random.default_rng((seed, number))))
    return plans


def _client(
    options: SessionOptions, server: ServerOptions, *, reuses_connections: bool = True
) -> StreamClient:
    return StreamClient(
        server,
        api_key=options.api_key,
        ca_file=options.ca_file,
        reuses_connections=reuses_connections,
    )


async def _find_model(client: StreamClient, url: str) -> str:
    try:
        return await client.first_model()
    except ValueError as error:
        raise LoadTestError(f"{url} does not list its models: {error}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise LoadTestError(f"no answer from {url}: {error}; is it up?") from error


async def _single(client: StreamClient, text: str, max_tokens: int) -> Record:
    now = clock()
    record = Record(0, RT, 0.0, 0, max_tokens)
    await client.send(record, client.outgoing(record, text, Targets()), now)
    return record


def _check(record: Record) -> Record:
    if record.error is not None:
        raise LoadTestError(f"a test request failed: {record.error}: {record.error_detail}")
    return record


async def keeps_connections(client: StreamClient) -> bool:
    """Return whether a second request went out on the connection of the first.

    Some servers close a connection after each answer that streams and announce the opposite: a
    request that a client sends on it fails, or not, as the two race. The first request also shows
    whether the server answers at all.

    Raises:
        LoadTestError: it does not.
    """
    _check(await _single(client, "hello", 1))
    second = await _single(client, "hello", 1)
    if second.error == result.DISCONNECTED:
        return False
    _check(second)
    return client.num_connections == 1


async def calibrate_client(client: StreamClient) -> Calibration:
    """Calibrate. Raises LoadTestError where a request fails."""

    async def count_tokens(text: str) -> int | None:
        return _check(await _single(client, text, 1)).prompt_tokens

    if await count_tokens("hello") is None:
        return UNCALIBRATED
    return await calibrate(count_tokens)


async def _warm_up(client: StreamClient, calibration: Calibration, count: int) -> None:
    prompts = PromptMaker(calibration, secrets.randbelow(_TEXT_SEEDS))
    answers: list[Awaitable[Record]] = [
        _single(client, prompts.text([Segment(UNIQUE, 128)]), 16) for _ in range(count)
    ]
    for answer in answers:
        await answer


async def _run_point(
    options: SessionOptions,
    client: StreamClient,
    calibration: Calibration,
    point: Point,
    plans: Sequence[Plan],
    *,
    stop: asyncio.Event,
) -> Run:
    text_seed = secrets.randbelow(_TEXT_SEEDS) if options.text_seed is None else options.text_seed
    runner = Runner(
        client,
        PromptMaker(calibration, text_seed),
        RunSettings(drain_s=options.drain_s, run_id=f"load-{secrets.token_hex(4)}"),
        clock(),
        stop=stop,
    )
    with _progress_bars(point.label, plans, runner, is_shown=options.shows_progress):
        # The clock of a run starts when everything is ready to be sent.
        runner.now, started_at = clock(), wall_clock()
        outcome = await runner.run(plans, ends_with_last=point.ends_with_last)
    if not outcome.records:
        raise LoadTestError("interrupted before the first arrival")
    return make_run(
        outcome,
        label=point.label,
        started_at=started_at,
        server=options.server,
        traffic=[plan.traffic for plan in plans],
        seed=options.seed,
        text_seed=text_seed,
        window=counting_window(
            outcome, skip_first_s=options.skip_first_s, skip_last_s=options.skip_last_s
        ),
        is_calibrated=calibration.is_measured,
        saves_requests=options.saves_requests,
    )


@contextmanager
def _progress_bars(
    label: str, plans: Sequence[Plan], runner: Runner, *, is_shown: bool
) -> Iterator[None]:
    """Show on a terminal, for each class, how many requests have ended and are in flight."""
    console = Console(stderr=True)
    if not is_shown or not console.is_terminal:
        yield
        return
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        *(TextColumn("{task.fields[state]}"), TimeElapsedColumn(), TimeRemainingColumn()),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as bars:
        tasks: dict[str, TaskID] = {}
        for name, total in _sizes(plans).items():
            title = escape(f"{label}, {TITLES[name]}")
            tasks[name] = bars.add_task(title, total=total, state="")

        def update(name: str) -> None:
            counts = runner.progress[name]
            state = f"{counts.num_sent - counts.num_done} in flight"
            if counts.num_failed:
                state += f", [red]{counts.num_failed} failed[/]"
            bars.update(tasks[name], completed=counts.num_done, state=state)

        runner.on_progress = update
        yield


def _sizes(plans: Sequence[Plan]) -> dict[str, int | None]:
    """Return how many requests of each class there will be; None where that is open."""
    sizes: dict[str, int | None] = {}
    for plan in plans:
        is_open = plan.offsets_s is None and not plan.traffic.num_requests
        for name, count in ((RT, int((~plan.is_be).sum())), (BE, int(plan.is_be.sum()))):
            if count:
                before = sizes.get(name, 0)
                sizes[name] = None if is_open or before is None else before + count
    return sizes


def run_to_end(
    options: SessionOptions, points: Sequence[Point], on_run: Callable[[Run], None]
) -> list[Run]:
    """`run_session` with an event loop of its own."""
    with suppress(KeyboardInterrupt):  # a second Ctrl-C, before anything was to be told
        return asyncio.run(run_session(options, points, on_run))
    return []


_MAX_BINS = 300


def counting_window(outcome: RunOutcome, *, skip_first_s: float, skip_last_s: float) -> Window:
    """Return what counts: all of the run, unless its ends are cut off.

    `skip_last_s` cuts before the end of *arrivals*, so that the window has a steady load.
    """
    end_s = max((record.end_s or 0.0 for record in outcome.records), default=outcome.end_s)
    if skip_last_s > 0:
        end_s = outcome.arrivals_end_s - skip_last_s
    return Window(skip_first_s, max(end_s, skip_first_s))


def make_run(
    outcome: RunOutcome,
    *,
    label: str,
    started_at: str,
    server: ServerOptions,
    traffic: Sequence[Traffic],
    seed: int,
    text_seed: int,
    window: Window,
    is_calibrated: bool,
    saves_requests: bool,
) -> Run:
    """Summarize everything, per class and, where there are two, together."""
    measures = [Measures(record) for record in outcome.records]

    def targets_of(record: Record) -> Targets:
        return record.targets or traffic[record.source].targets_of(record.request_class)

    by_class = {
        name: [each for each in measures if each.record.request_class == name] for name in CLASSES
    }
    groups = {name: group for name, group in by_class.items() if group}
    if len(groups) != 1:
        groups["all"] = measures
    counted = [each for each in outcome.records if window.holds(each.intended_s)]
    return Run(
        label=label,
        started_at=started_at,
        server=server,
        traffic=list(traffic),
        seed=seed,
        text_seed=text_seed,
        window_s=(round(window.start_s, 3), round(window.end_s, 3)),
        duration_s=round(outcome.end_s, 3),
        was_interrupted=outcome.was_interrupted,
        offered_requests_per_s=len(counted)
        / max(1e-9, min(window.end_s, outcome.arrivals_end_s) - window.start_s),
        client=_client_report(outcome, measures, is_calibrated),
        classes={name: summarize(group, window, targets_of) for name, group in groups.items()},
        timeline=make_timeline(outcome, by_class, targets_of),
        requests=[_row(each, targets_of(each.record)) for each in measures]
        if saves_requests
        else [],
    )


def _client_report(
    outcome: RunOutcome, measures: Sequence[Measures], is_calibrated: bool
) -> ClientReport:
    num_events = sum(len(each.times_s) for each in measures)
    lags = [(r.sent_s - r.intended_s) * 1e3 for r in outcome.records if r.sent_s is not None]
    return ClientReport(
        cpu_share=round(outcome.cpu_s / max(1e-9, outcome.end_s), 4),
        cpu_us_per_event=round(outcome.cpu_s * 1e6 / num_events, 1) if num_events else None,
        num_events=num_events,
        lag_ms=spread(np.array(lags)),
        is_calibrated=is_calibrated,
    )


def _row(measures: Measures, targets: Targets) -> RequestRow:
    record = measures.record
    return RequestRow(
        request_class=record.request_class,
        intended_s=round(record.intended_s, 6),
        sent_s=None if record.sent_s is None else round(record.sent_s, 6),
        first_s=round(float(measures.times_s[0]), 6) if len(measures.times_s) else None,
        end_s=None if record.end_s is None else round(record.end_s, 6),
        prompt_tokens=record.prompt_tokens,
        output_tokens=measures.num_tokens if record.is_completed else None,
        mtpot_ms=measures.mtpot_ms,
        is_met=measures.is_met(targets),
        error=record.error,
        priority=record.priority,
    )


def make_timeline(
    outcome: RunOutcome,
    by_class: dict[str, list[Measures]],
    targets_of: Callable[[Record], Targets],
) -> Timeline:
    """Take figures per bin of a second, or of several in runs over five minutes."""
    bin_s = float(max(1, math.ceil(outcome.end_s / _MAX_BINS)))
    num_bins = max(1, math.ceil(outcome.end_s / bin_s))
    edges: FloatArray = np.arange(num_bins + 1, dtype=np.float64) * bin_s

    def counts(moments_s: Sequence[float]) -> list[int]:
        return [int(count) for count in np.histogram(moments_s, edges)[0]]

    timeline = Timeline(bin_s, {}, {}, {}, {}, {}, {}, {})
    for name, group in by_class.items():
        if not group:
            continue
        records = [each.record for each in group]
        timeline.arrivals[name] = counts([record.intended_s for record in records])
        timeline.failures[name] = counts([r.end_s or 0.0 for r in records if r.error is not None])
        ends = counts([r.end_s for r in records if r.end_s is not None])
        in_flight = np.cumsum(timeline.arrivals[name]) - np.cumsum(ends)
        timeline.in_flight[name] = in_flight.tolist()
        times = np.concatenate([each.times_s for each in group])
        weights = np.concatenate([each.event_tokens for each in group])
        tokens = np.histogram(times, edges, weights=weights)[0]
        timeline.tokens[name] = np.round(tokens, 2).tolist()
        started = [each for each in group if len(each.times_s)]
        timeline.ttft_ms[name] = _by_bin(
            np.array([each.times_s[0] for each in started]),
            np.array([each.ttft_ms for each in started], dtype=np.float64),
            edges,
        )
        timeline.itl_ms[name] = _by_bin(
            np.concatenate([each.times_s[1:] for each in group]),
            np.concatenate([each.gaps_ms for each in group]),
            edges,
        )
        met = [each.record.end_s or 0.0 for each in group if each.is_met(targets_of(each.record))]
        timeline.goodput_requests_per_s[name] = [count / bin_s for count in counts(met)]
    return timeline


def _by_bin(times_s: FloatArray, values: FloatArray, edges: FloatArray) -> list[Percentiles | None]:
    """Return quantiles of the values whose moments are in each bin."""
    order = np.argsort(times_s, kind="stable")
    values, cuts = values[order], np.searchsorted(times_s[order], edges)
    return [
        Percentiles(*(round(float(value), 4) for value in np.quantile(part, [0.5, 0.99])))
        if len(part := values[start:stop])
        else None
        for start, stop in pairwise(cuts)
    ]
