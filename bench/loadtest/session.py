"""One invocation: model, calibration, warm-up, then a run per point of the sweep."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import aiohttp
import msgspec
import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

from .arrivals import ArrivalKind
from .calibration import UNCALIBRATED, Calibration, calibrate
from .client import StreamClient, clock
from .errors import LoadTestError
from .options import RT, ServerOptions, Targets, Traffic
from .prompts import UNIQUE, PromptMaker, Segment
from .records import Record
from .report import counting_window, make_run
from .result import Run
from .runner import Runner, RunSettings, raise_file_limit, wall_clock
from .workload import Plan, make_plan

_TEXT_SEEDS = 1 << 31


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """What holds for every run of an invocation."""

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


async def run_session(
    options: SessionOptions, points: Sequence[Point], on_run: Callable[[Run], None]
) -> list[Run]:
    """Make all runs, one after the other; Ctrl-C ends the one under way and those after it.

    Raises:
        LoadTestError: no such server or model, or traffic that cannot be planned.
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
        calibration = await calibrate_client(client)
        await _warm_up(client, calibration, options.num_warmup)
        for point, point_plans in zip(points, plans, strict=True):
            if stop.is_set():
                break
            single = dataclasses.replace(options, server=server)
            run = await _run_point(single, client, calibration, point, point_plans, stop=stop)
            runs.append(run)
            on_run(run)
    return runs


def make_plans(traffic: Sequence[Traffic], seed: int) -> list[Plan]:
    """Plan all traffic of a run; an endless open loop ends with the first one's arrivals.

    Raises:
        LoadTestError: it never ends, or make_plan's.
    """
    plans: list[Plan] = []
    for number, each in enumerate(traffic):
        bounded = each
        if not each.is_bounded and each.arrivals is not ArrivalKind.CLOSED:
            offsets = plans[0].offsets_s if plans else None
            duration_s = traffic[0].duration_s if offsets is None else float(offsets[-1])
            if number == 0 or duration_s is None:
                raise LoadTestError("say when best-effort traffic ends: num-requests or duration-s")
            bounded = msgspec.structs.replace(each, duration_s=max(duration_s, 1e-3))
        plans.append(make_plan(bounded, np.random.default_rng((seed, number))))
    return plans


def _client(options: SessionOptions, server: ServerOptions) -> StreamClient:
    return StreamClient(server, api_key=options.api_key, ca_file=options.ca_file)


async def _find_model(client: StreamClient, url: str) -> str:
    try:
        return await client.first_model()
    except ValueError as error:
        raise LoadTestError(f"{url} does not tell its models: {error}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise LoadTestError(f"no answer from {url}: {error}; is it up?") from error


async def _single(client: StreamClient, text: str, max_tokens: int) -> Record:
    now = clock()
    record = Record(0, RT, 0.0, 0, max_tokens)
    await client.send(record, client.outgoing(record, text, Targets()), now)
    return record


async def calibrate_client(client: StreamClient) -> Calibration:
    """Calibrate; the first request also shows whether the server answers at all."""

    async def count_tokens(text: str) -> int | None:
        record = await _single(client, text, 1)
        if record.error is not None:
            raise LoadTestError(f"a test request failed: {record.error}: {record.error_detail}")
        return record.prompt_tokens

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
    with _progress_bar(point.label, plans, runner, options.shows_progress):
        # The clock of a run starts when everything is ready to be sent.
        runner.now, started_at = clock(), wall_clock()
        outcome = await runner.run(plans)
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


def _progress_bar(label: str, plans: Sequence[Plan], runner: Runner, is_shown: bool) -> tqdm:
    """Return a bar that follows a runner; one that is not shown costs nothing."""
    sizes = [len(plan) for plan in plans if plan.offsets_s is not None or plan.traffic.num_requests]
    bar: tqdm = tqdm(
        total=sum(sizes) if len(sizes) == len(plans) else None,
        desc=label,
        unit="req",
        disable=None if is_shown else True,
        mininterval=0.5,
    )
    if bar.disable:
        return bar

    def update() -> None:
        counts = runner.progress
        in_flight = counts.num_sent - counts.num_done
        bar.set_postfix_str(f"in flight {in_flight}, failed {counts.num_failed}", refresh=False)
        bar.update()

    runner.on_progress = update
    return bar


def run_to_end(
    options: SessionOptions, points: Sequence[Point], on_run: Callable[[Run], None]
) -> list[Run]:
    """`run_session` with an event loop of its own."""
    with suppress(KeyboardInterrupt):  # a second Ctrl-C, before anything was to be told
        return asyncio.run(run_session(options, points, on_run))
    return []
