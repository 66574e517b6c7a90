"""Real-time requests beside a batch, on a live server: `python -m bench.serving.beside_batch`.

Two cores (`bench/serving/server.py` says which process runs where); lengths of the Azure
conversations, scaled and cut to the model's context.

1. capacity: real-time requests per second of closed-loop clients
2. targets: 1.2 times the p95 TTFT and 1.1 times the p95 gap of real-time requests alone, Poisson at
   a share of the capacity; how busy the worker is under them
3. the batch alone: lines per second in its steady part
4. the same arrivals, alone and beside the batch, judged by these targets

Bars: attainment 99 %, and at most a point below that of alone; lines per second beside at least
0.78 * (1 - busy) of those alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import httpx

from bench.serving.server import (
    Server,
    load,
    load_average,
    pinned_server,
    write_profile,
    write_random_model,
)
from bench.table import print_head, print_row
from lightserve.loadtest.options import RT

NUM_CLIENTS = 16
TTFT_FACTOR, GAP_FACTOR = 1.2, 1.1
P95 = 190
"""Place of the 95th percentile in `Spread.quantiles`."""
WINDOW = "24h"


class Batch:
    """A batch of stories on a server."""

    def __init__(self, server: Server, num_lines: int, max_tokens: int) -> None:
        self._url = f"{server.url}/v1"
        lines = (
            json.dumps(
                {
                    "custom_id": str(number),
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": {
                        "model": server.model,
                        "prompt": f"Tell story {number}. " + "The sea was calm. " * 20,
                        "max_tokens": max_tokens,
                        "ignore_eos": True,
                    },
                }
            )
            for number in range(num_lines)
        )
        files = {"file": ("in.jsonl", "\n".join(lines).encode())}
        file = httpx.post(f"{self._url}/files", files=files, data={"purpose": "batch"}).json()
        body = {
            "input_file_id": file["id"],
            "endpoint": "/v1/completions",
            "completion_window": WINDOW,
        }
        self._id = httpx.post(f"{self._url}/batches", json=body).json()["id"]

    @property
    def num_done(self) -> int:
        """Lines that have ended; all of them without an error."""
        counts = httpx.get(f"{self._url}/batches/{self._id}").json()["request_counts"]
        assert counts["failed"] == 0, counts
        return int(counts["completed"])

    def rate_over(self, seconds: float) -> float:
        """Return lines per second over a stretch that begins when the first have ended."""
        while not self.num_done:
            time.sleep(0.2)
        start_s, before = time.perf_counter(), self.num_done
        time.sleep(seconds)
        return (self.num_done - before) / (time.perf_counter() - start_s)

    def cancel(self) -> None:
        """End it."""
        httpx.post(f"{self._url}/batches/{self._id}/cancel")
        while httpx.get(f"{self._url}/batches/{self._id}").json()["status"] == "cancelling":
            time.sleep(0.2)


def run(server: Server, lengths: list[str], share: float, seconds: float, lines: int) -> None:
    """Print what comes of one model."""
    clients = ("--concurrency", str(NUM_CLIENTS), "--duration-s", f"{seconds / 2}")
    capacity = load(server, *lengths, *clients).classes[RT].requests_per_s
    traffic = [
        *(*lengths, "--arrivals", "poisson", "--rate", f"{share * capacity:.4f}"),
        *("--duration-s", f"{seconds}", "--skip-first-s", "3"),
    ]
    busy_s, start_s = server.health()["worker_busy_s"], time.perf_counter()
    first = load(server, *traffic, "--seed", "1").classes[RT]
    busy = (server.health()["worker_busy_s"] - busy_s) / (time.perf_counter() - start_s)
    ttft_ms = TTFT_FACTOR * first.ttft_ms.quantiles[P95]
    gap_ms = GAP_FACTOR * first.itl_ms.quantiles[P95]
    judged = [*traffic, "--seed", "2", "--targets", f"ttft={ttft_ms:.1f}ms,tpot={gap_ms:.2f}ms"]
    alone = load(server, *judged, "--send-targets").classes[RT]
    batch = Batch(server, lines, 64)
    steady = batch.rate_over(seconds / 2)
    batch.cancel()
    batch = Batch(server, lines, 64)
    while not batch.num_done:
        time.sleep(0.2)
    start_s, before = time.perf_counter(), batch.num_done
    beside = load(server, *judged, "--send-targets").classes[RT]
    rate = (batch.num_done - before) / (time.perf_counter() - start_s)
    batch.cancel()
    print_row(
        f"{capacity:.2f}",
        f"{share * capacity:.2f}",
        f"{ttft_ms:.0f}, {gap_ms:.1f}",
        f"{busy:.2f}",
        *(f"{part.attainment or 0.0:.1%} of {part.num_arrivals}" for part in (alone, beside)),
        *(f"{part.ttft_ms.p50 or 0:.0f}, {part.ttft_ms.p99 or 0:.0f}" for part in (alone, beside)),
        f"{steady:.2f}",
        f"{rate:.2f}",
        f"{rate / (steady * max(1e-9, 1.0 - busy)):.2f}",
    )


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--models", default="bundled,random", help="random: 150 M parameters; or directories"
    )
    parser.add_argument("--share", type=float, default=0.3, help="of the capacity")
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals in each run")
    parser.add_argument("--lines", type=int, default=5000)
    args = parser.parse_args()
    print(f"load average {load_average()}\n")
    heads = ("capacity/s", "RT/s", "TTFT, gap targets (ms)", "worker busy", "alone", "beside")
    more = (
        "TTFT p50, p99 alone (ms)",
        "beside",
        "lines/s alone",
        "beside",
        "of alone x (1 - busy)",
    )
    print_head(*heads, *more)
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory)
            given = path / "model" if name == "random" else Path(name)
            if name == "random":
                write_random_model(given)
            flags = [] if name == "bundled" else ["--model", str(given)]
            write_profile(path / "profile.json", flags, seconds=6.0)
            flags += ["--profile", str(path / "profile.json")]
            flags += ["--batch-store", str(path / "store"), "--batch-max-in-flight", "32"]
            # The conversations' lengths, cut so that they fit the model and a run many of them.
            scale = "0.25" if name == "bundled" else "0.1"
            lengths = ["--trace", "azure2023_conv", "--length-scale", scale]
            lengths += ["--max-prompt-tokens", "1024", "--max-output-tokens", "128"]
            with pinned_server(flags) as server:
                run(server, lengths, args.share, args.seconds, args.lines)


if __name__ == "__main__":
    main()
