"""Is the load client to be believed? Against a mock server whose every write is logged.

    python -m bench.serving.load_client [--rates 200,1000,3000]

Per rate of events: how much later the client saw an event than the mock wrote it, errors of TTFT
and ITL, and the client's CPU. The mock is a process of its own on the same machine and clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lightserve.loadtest.client import StreamClient
from lightserve.loadtest.options import ArrivalKind, ServerOptions, Traffic
from lightserve.loadtest.runner import Runner, RunOutcome, RunSettings
from lightserve.loadtest.session import make_plans
from lightserve.loadtest.workload import UNCALIBRATED, PromptMaker

TTFT_S, GAP_S, NUM_TOKENS = 0.1, 0.05, 40
ARRIVALS_S = 20.0


@contextmanager
def running_mock(ttft_s: float, gap_s: float) -> Iterator[str]:
    """Run the mock as a process; yields its address."""
    mock = Path(__file__).parents[2] / "tests" / "support" / "mock_server.py"
    process = subprocess.Popen(
        [sys.executable, str(mock), "--ttft-s", str(ttft_s), "--gap-s", str(gap_s)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(timeout=10)


async def _run(url: str, rate: float) -> tuple[RunOutcome, float]:
    traffic = Traffic(
        arrivals=ArrivalKind.POISSON,
        rate=rate,
        duration_s=ARRIVALS_S,
        prompt_tokens="64",
        output_tokens=str(NUM_TOKENS),
    )
    plans = make_plans([traffic], 0)
    server = ServerOptions(url=url, model="mock")
    async with StreamClient(server, api_key=None, ca_file=None) as client:
        start_s = time.monotonic()
        runner = Runner(
            client,
            PromptMaker(UNCALIBRATED, 0),
            RunSettings(drain_s=60.0, run_id=f"check-{rate:g}"),
            lambda: time.monotonic() - start_s,
        )
        # Building the prompts' tape took a while: arrivals count from here.
        start_s = time.monotonic()
        return await runner.run(plans), start_s


def _quantiles(values: Any) -> dict[str, float]:
    array = np.asarray(values) * 1e3
    names = ("p50", "p99", "max")
    points = (*np.quantile(array, [0.5, 0.99]), array.max())
    return {name: round(float(point), 3) for name, point in zip(names, points, strict=True)}


def accuracy(events_per_s: float) -> dict[str, Any]:
    """Run one rate; errors in ms."""
    with running_mock(TTFT_S, GAP_S) as url:
        outcome, start_s = asyncio.run(_run(url, events_per_s / NUM_TOKENS))
        with urllib.request.urlopen(f"{url}/log", timeout=10) as answer:
            log = json.load(answer)
    seen_late: list[float] = []
    ttft_error: list[float] = []
    sent_late: list[float] = []
    itl_error: list[float] = []
    for record in outcome.records:
        written = np.array(log[record.request_id][1:]) - start_s
        seen = np.array(record.event_times_s)
        seen_late.extend(seen - written)
        itl_error.extend(np.abs(np.diff(seen) - np.diff(written)))
        arrived = log[record.request_id][0] - start_s
        served_s = written[0] - arrived  # TTFT_S, and what the mock's own timer was late by
        ttft_error.append(seen[0] - record.intended_s - served_s)
        sent_late.append((record.sent_s or 0.0) - record.intended_s)
    return {
        "events_per_s": round(len(seen_late) / ARRIVALS_S, 1),
        "completed": sum(record.is_completed for record in outcome.records),
        "requests": len(outcome.records),
        "event_seen_after_write_ms": _quantiles(seen_late),
        "itl_error_ms": _quantiles(itl_error),
        "ttft_error_ms": _quantiles(ttft_error),
        "of_which_sent_late_ms": _quantiles(sent_late),
        "client_cpu_share": round(outcome.cpu_s / outcome.end_s, 4),
        "client_cpu_us_per_event": round(outcome.cpu_s * 1e6 / len(seen_late), 1),
    }


def main() -> None:
    """Print one JSON document; takes about 75 s."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="200,1000,3000", help="events per second")
    args = parser.parse_args()
    start_s = time.monotonic()
    report: dict[str, Any] = {
        "accuracy": [accuracy(float(rate)) for rate in args.rates.split(",")],
    }
    report["took_s"] = round(time.monotonic() - start_s, 1)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
