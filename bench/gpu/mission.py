"""The mission on real hardware: chats with targets over best-effort streams, through HTTP.

Chats arrive by Poisson, at two rates one after the other, while best-effort streams keep the server
busy. What came of them is read from the router's own decision log, which is replayed for it. The
load comes from processes of `lightserve bench`, several, so that none of them is the bottleneck.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import multiprocessing
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from bench.gpu.device import copy_bandwidth
from bench.gpu.table import Bench
from bench.gpu.weights import served_model
from bench.serving.server import Server, running_server
from lightserve.cost.profile import read_profile
from lightserve.decisions.records import Decision, ResultReceived
from lightserve.decisions.replaying import DecisionLogReader
from lightserve.loadtest import result
from lightserve.sim.report import ClassReport, Seen, Targets, Window, class_report
from lightserve.sim.whatif import Clients, read_recording
from lightserve.types import RequestClass

LOAD_TEST = Path(__file__).parents[1] / "load_test.py"
TTFT_MS, TPOT_MS = 150, 20
CHAT_TOKENS, BATCH_TOKENS = 80, 200
EXACT = json.dumps({"temperature": 0.0, "ignore_eos": True})
"""So that every answer has as many tokens as it may."""
POLICIES = ("unified", "priority")
JUDGED = "unified"
H200_COPY = 4257e9
"""Bytes per second, read and written, of the card that the best-effort targets were set for."""
MAX_MEDIAN_ERROR_PCT, MAX_P95_ERROR_PCT = 5.0, 25.0


class Phase(NamedTuple):
    """A stretch of time with one rate of chats."""

    rate: float
    """Chats per second."""
    min_in_time_pct: float
    min_tokens_per_s: float
    """Best-effort tokens per second beside the chats, on an H200."""


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurement."""

    phases: Sequence[Phase]
    phase_s: float
    skip_s: float
    """Seconds at the beginning of a phase that do not count."""
    streams: int
    streams_per_client: int
    chat_clients: int
    prompt_tokens: str
    """20 to 600 random words, as the bundled tokenizer has them, in a chat."""
    server: Sequence[str]


GPU = Scale(
    phases=(Phase(20.0, 100.0, 5000.0), Phase(40.0, 97.0, 2500.0)),
    phase_s=13.0,
    skip_s=1.0,
    streams=256,
    streams_per_client=32,
    chat_clients=2,
    prompt_tokens="52:1135",
    server=(
        *("--max-num-seqs", "320", "--max-model-len", "4096", "--http-workers", "4"),
        *("--host-kv-memory", "4GiB", "--gpu-memory-utilization", "0.8", "--prefix-host-memory=0"),
    ),
)
REHEARSED = Scale(
    phases=(Phase(12.0, 100.0, 1.0), Phase(24.0, 97.0, 1.0)),
    phase_s=2.0,
    skip_s=0.2,
    streams=2,
    streams_per_client=1,
    chat_clients=2,
    prompt_tokens="20:60",
    server=(
        *("--max-num-seqs", "8", "--kv-memory", "8MiB", "--max-model-len", "400"),
        *("--num-threads", "1"),
    ),
)
PROFILE_S = 10.0
"""Longest wait for the profile of step times, which a server measures while it is idle."""
PROFILE_FILES = "[0-9a-f]*.json"
"""Beside them is what output lengths were."""


def mission(bench: Bench) -> None:
    """Run the same chats under each policy."""
    scale = REHEARSED if bench.rehearse else GPU
    model = served_model(bench)
    faster = copy_bandwidth(bench.machine) / H200_COPY
    bench.machine.release()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as reader:
        reading: dict[str, Future[Found]] = {}
        for policy in POLICIES:
            log = bench.out / f"decisions-{policy}"
            flags = ("--model", str(model.path), "--policy", policy, "--decision-log", str(log))
            with running_server([*flags, *scale.server, "--log-level", "warning"]) as server:
                if policy == POLICIES[0]:
                    _report_profile(bench)
                # Read while this server started: a part that is ended keeps what was before.
                _report_all(bench, scale, reading, faster)
                sent = send(server, scale)
            bench.rows.figure(f"{policy}: busiest client", sent.busiest_pct, "% of a core")
            reading[policy] = reader.submit(read_log, log, sent.windows)
        _report_all(bench, scale, reading, faster)


def _report_all(
    bench: Bench, scale: Scale, reading: dict[str, Future[Found]], faster: float
) -> None:
    """Say what came of the servers whose logs are being read, and take them out."""
    while reading:
        policy = next(iter(reading))
        _report(bench, policy, scale, reading.pop(policy).result(), faster)


def _report_profile(bench: Bench) -> None:
    """Wait until the server has measured its steps, keep the profile, and judge it."""
    profiles, end_s = bench.shared / "cache" / "lightserve" / "profiles", time.monotonic()
    while not (paths := list(profiles.glob(PROFILE_FILES))):
        if time.monotonic() > end_s + PROFILE_S:
            bench.rows.skip("profile of step times", f"not there after {PROFILE_S:g} s")
            return
        time.sleep(0.1)
    profile = read_profile(paths[0])
    shutil.copy(paths[0], bench.out / "profile.json")
    note = f"{profile.num_samples} steps"
    for which, error, most_pct in (
        ("median", profile.median_error, MAX_MEDIAN_ERROR_PCT),
        ("p95", profile.p95_error, MAX_P95_ERROR_PCT),
    ):
        name = f"profile of step times: {which} error"
        bench.rows.figure(name, 100 * error, "%", at_most=most_pct, note=note)


def _report(bench: Bench, policy: str, scale: Scale, found: Found, faster: float) -> None:
    """Say what came of each phase; `faster`: than the H200, by the copy."""
    rows, is_judged = bench.rows, policy == JUDGED
    for phase, seen in zip(scale.phases, found.phases, strict=True):
        name = f"{policy}, {phase.rate:g} chats/s"
        chats, batch = seen.chats, seen.batch
        if not seen.tpot_ms:
            rows.claim(name, False, "no chat had an answer")
            continue
        num_good = round(chats.goodput_rps * seen.seconds)
        in_time = 100 * num_good / chats.arrivals
        note = (
            f"{chats.arrivals} in {seen.seconds:.1f} s;"
            f" TTFT {_percent(chats.ttft_attainment)}, TPOT {_percent(chats.tpot_attainment)}"
        )
        least = phase.min_in_time_pct if is_judged else None
        rows.figure(f"{name}: in time", in_time, "%", at_least=least, note=note)
        for what, values in (("TTFT", seen.ttft_ms), ("TPOT", seen.tpot_ms)):
            p50, p99 = (float(np.percentile(values, q)) for q in (50, 99))
            rows.figure(f"{name}: {what} p50", p50, "ms", note=f"p99 {p99:.4g} ms")
        bar = phase.min_tokens_per_s * faster
        note = f"target {phase.min_tokens_per_s:g} on an H200, by the copy rate {faster:.3f} of it"
        rows.figure(
            f"{name}: best effort",
            batch.throughput_tps,
            "tokens/s",
            at_least=bar if is_judged else None,
            note=note if is_judged else "",
        )
    name = f"{policy}: steps off from their prediction, median"
    p50, p95 = found.step_errors_pct
    rows.figure(name, p50, "%", note=f"p95 {p95:.3g} %, {found.num_steps} steps")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.4g} %"


# The load.


class Sent(NamedTuple):
    """Results of the clients of a server."""

    windows: list[Window]
    """When chats of each rate came, in the router's time."""
    busiest_pct: float
    """Share of a core that the busiest client of chats took."""


def send(server: Server, scale: Scale) -> Sent:
    """Load a server with all phases, over best-effort streams that end with them.

    Raises:
        RuntimeError: a client failed.
    """
    with TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        for number in range(scale.streams // scale.streams_per_client):
            lasting = (
                *("--be-share", "1", "--concurrency", str(scale.streams_per_client)),
                *("--output-tokens", str(BATCH_TOKENS), "--duration-s", "600"),
            )
            stack.enter_context(_client(server, scale, lasting, seed=100 + number))
        paths = [Path(directory) / f"{number}.json" for number in range(scale.chat_clients)]
        rates = ",".join(f"{phase.rate / scale.chat_clients:g}" for phase in scale.phases)
        clients = [
            stack.enter_context(
                _client(
                    server,
                    scale,
                    (
                        *("--rates", rates, "--duration-s", str(scale.phase_s), "--drain-s", "5"),
                        *("--targets", f"ttft={TTFT_MS}ms,tpot={TPOT_MS}ms", "--send-targets"),
                        *("--output-tokens", str(CHAT_TOKENS), "--output", str(path)),
                    ),
                    seed=number,
                )
            )
            for number, path in enumerate(paths)
        ]
        outputs = [client.communicate()[0] for client in clients]
        for path, output in zip(paths, outputs, strict=True):
            if not path.exists():
                raise RuntimeError(f"the load client failed: {output[-300:]}")
        results = [result.load(path) for path in paths]
    to_router_s = time.monotonic() - time.time()
    windows = []
    for runs in zip(*results, strict=True):
        starts = [datetime.fromisoformat(run.started_at).timestamp() for run in runs]
        start_s, end_s = max(starts) + scale.skip_s, min(starts) + scale.phase_s
        windows.append(Window(start_s + to_router_s, end_s + to_router_s, math.inf))
    busiest = max(run.client.cpu_share for runs in results for run in runs)
    return Sent(windows, 100 * busiest)


@contextlib.contextmanager
def _client(
    server: Server, scale: Scale, args: Sequence[str], *, seed: int
) -> Iterator[subprocess.Popen[str]]:
    """Run a load client; it is ended with the context."""
    command = (
        *(sys.executable, str(LOAD_TEST), "--url", server.url, "--model", server.model),
        *("--body", EXACT, "--prompt-tokens", scale.prompt_tokens, "--warmup", "0"),
        *("--quiet", "--seed", str(seed), *args),
    )
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


# What came of it.


class PhaseSeen(NamedTuple):
    """What clients saw of the requests of a phase."""

    seconds: float
    chats: ClassReport
    batch: ClassReport
    ttft_ms: list[float]
    """Of each chat; infinite: it had no token."""
    tpot_ms: list[float]
    """Of each chat that had two."""


class Found(NamedTuple):
    """What a decision log says."""

    phases: list[PhaseSeen]
    step_errors_pct: tuple[float, float]
    """By how much steps were off from the router's prediction: median, 95th percentile."""
    num_steps: int


def read_log(path: Path, windows: Sequence[Window]) -> Found:
    """Return what a log says of some stretches of the router's time; it is compressed for it."""
    try:
        recording = read_recording(DecisionLogReader(path))
        errors = _step_errors(path)
    finally:
        with path.open("rb") as log, gzip.open(f"{path}.gz", "wb", compresslevel=6) as packed:
            shutil.copyfileobj(log, packed)
        path.unlink()
    clients = recording.clients()
    phases = []
    for window in windows:
        moved = Window(
            window.start_s - recording.start_s,
            window.end_s - recording.start_s,
            recording.end_s - recording.start_s,
        )
        phases.append(_phase(clients, moved))
    p50, p95 = (float(np.percentile(errors, q)) for q in (50, 95))
    return Found(phases, (p50, p95), len(errors))


def _phase(clients: Clients, window: Window) -> PhaseSeen:
    """Return a stretch; requests without targets, with which clients begin, are no chats."""
    of_class: dict[RequestClass, list[Seen]] = {each: [] for each in RequestClass}
    for key, seen in clients.seen.items():
        request_class = clients.asked[key].submit.request_class
        if request_class is RequestClass.BE or seen.targets != Targets():
            of_class[request_class].append(seen)
    chats, batch = (
        class_report(of_class[each], Targets(), window, evictions=0, recomputed_tokens=0)
        for each in (RequestClass.RT, RequestClass.BE)
    )
    own = [seen for seen in of_class[RequestClass.RT] if window.has(seen.arrival_s)]
    ttft_ms = [
        1e3 * (seen.token_times_s[0] - seen.arrival_s) if seen.token_times_s else math.inf
        for seen in own
    ]
    tpot_ms = [
        1e3 * (seen.token_times_s[-1] - seen.token_times_s[0]) / (len(seen.token_times_s) - 1)
        for seen in own
        if len(seen.token_times_s) > 1
    ]
    return PhaseSeen(window.seconds, chats, batch, ttft_ms, tpot_ms)


def _step_errors(path: Path) -> list[float]:
    """Return by how many percent each step was off from its prediction."""
    predicted_s: dict[int, float] = {}
    errors = []
    for _, record in DecisionLogReader(path).lines():
        if isinstance(record, Decision):
            predicted_s[record.step_id] = record.predicted_s
        elif isinstance(record, ResultReceived) and record.result.step_id in predicted_s:
            exec_s = record.result.exec_s
            errors.append(100 * abs(predicted_s.pop(record.result.step_id) / exec_s - 1))
    return errors
