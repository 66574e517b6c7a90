"""The simulator against the live server: `python -m bench.scheduling.simulator_check`.

300 rows of a trace, scaled, at 0.6 of what the simulated server can do, and all at once. Each live
run writes a decision log, and the same requests are simulated again with what that log says of the
machine, step by step (`lightserve.sim.whatif`): what differs then is not its speed, which changes
from minute to minute, but the simulator. What a TTFT has besides (HTTP, tokens, links) is measured
before on 100 other rows, see `Outside`. Bars: throughput and mean TTFT within 10 %, p90 of TTFT
within 20 %, of the mean of the live runs.

Printed beside each other are what the load client saw, and what is simulated.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gzip
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bench.serving.server import Server, load, load_average, pinned_server, write_profile
from bench.table import print_head, print_row
from lightserve.decisions.replaying import DecisionLogReader
from lightserve.loadtest.result import RequestRow
from lightserve.loadtest.workload import load_trace
from lightserve.sim.hybrid import HybridConfig, HybridRun
from lightserve.sim.report import Targets
from lightserve.sim.virtual_gpus import ProfiledHardware
from lightserve.sim.whatif import Clients, Settings, read_recording

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

TRACE = "azure2023_conv"
NUM_ROWS, NUM_OTHER_ROWS = 300, 100
NUM_BURSTS = 3
"""Trials with all rows in one moment: one alone may fall into a moment of others."""
LENGTH_SCALE, MAX_PROMPT, MAX_OUTPUT = 0.3, 1024, 256
KV_TOKENS = 60_000
LOAD = 0.6
TARGETS_MS = {"ttft": 1000.0, "tpot": 100.0, "mtpot": 400.0}
"""Those of all requests; `unified` plans by them."""
BARS = {"tokens/s": 0.10, "TTFT mean": 0.10, "TTFT p90": 0.20}


@dataclass(frozen=True)
class Scaled:
    """Requests as both play them."""

    times_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray

    def __len__(self) -> int:
        """Count them."""
        return len(self.times_s)

    def at(self, times_s: FloatArray) -> Scaled:
        """Return the same requests at other times."""
        return dataclasses.replace(self, times_s=times_s)

    def at_once(self) -> Scaled:
        """Return the same requests in one moment."""
        return self.at(np.zeros(len(self)))

    def write(self, path: Path) -> None:
        """Write a trace file."""
        rows = zip(self.times_s, self.prompt_tokens, self.output_tokens, strict=True)
        with gzip.open(path, "wt", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["t", "prompt_tokens", "output_tokens"])
            writer.writerows((f"{t:.6f}", p, o) for t, p, o in rows)


def scaled_trace(first_row: int, num_rows: int) -> Scaled:
    """Return rows, times as in the trace."""
    trace = load_trace(TRACE, first_row=first_row, num_rows=num_rows)
    assert trace.times_s is not None
    prompt, output = (
        np.clip(np.rint(LENGTH_SCALE * tokens), low, most).astype(np.int64)
        for tokens, low, most in (
            (trace.prompt_tokens, 16, MAX_PROMPT),
            (trace.output_tokens, 2, MAX_OUTPUT),
        )
    )
    return Scaled(trace.times_s - trace.times_s[0], prompt, output)


class Case(NamedTuple):
    """What is played."""

    name: str
    policy: str
    requests: Scaled


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    tokens_per_s: float
    """Output tokens by `length_s`."""
    length_s: float
    """From the first arrival to the last token."""
    ttft_s: FloatArray

    @property
    def figures(self) -> dict[str, float]:
        """By name of `BARS`; times in ms."""
        return {
            "tokens/s": self.tokens_per_s,
            "TTFT mean": 1e3 * float(self.ttft_s.mean()),
            "TTFT p90": 1e3 * float(np.quantile(self.ttft_s, 0.9)),
        }


@dataclass(frozen=True)
class Outside:
    """What a TTFT has besides what the router's log says: client, HTTP, tokenizer, links.

    Load client, frontend and router share a core, so that requests pass them one after the other:
    one server with a queue. Of a request that finds it idle this is a constant.
    """

    alone_s: float
    """Of a request that finds it idle."""
    turn_s: float
    """What the next one waits for it."""

    @classmethod
    def of(cls, spread: Mapping[str, Outcome], at_once: Sequence[Mapping[str, Outcome]]) -> Outside:
        """Return it as runs of the same requests show it, all but the first in one moment."""
        alone_s, *queued_s = (
            float(run["client"].ttft_s.mean() - run["router"].ttft_s.mean())
            for run in (spread, *at_once)
        )
        mean_before = (len(spread["client"].ttft_s) - 1) / 2
        return cls(alone_s, max(0.0, float(np.median(queued_s)) - alone_s) / mean_before)

    def seconds(self, times_s: FloatArray) -> FloatArray:
        """Return it of each of requests that are sent at these times, in their order."""
        waits_s, free_s = [], -np.inf
        for time_s in times_s.tolist():
            waits_s.append(max(0.0, free_s - time_s))
            free_s = max(free_s, time_s) + self.turn_s
        return self.alone_s + np.array(waits_s)


def work_seconds(path: Path, hardware: ProfiledHardware) -> float:
    """Return how long a simulated server needs for a trace."""
    config = HybridConfig(
        rt=str(path),
        rt_max_tokens=None,
        duration_s=3600.0,
        margin_s=0.0,
        capacity_tokens=KV_TOKENS,
        policy="chunked",
        serve_options={"max_num_seqs": 256},
        targets=Targets(*(limit / 1e3 for limit in TARGETS_MS.values())),
        hardware=hardware,
    )
    run = HybridRun(config)
    run.advance(config.duration_s)
    return max(one.token_times_s[-1] for one in run.simulation.outcomes.values())


def live(server: Server, path: Path, num_rows: int) -> Outcome:
    """Run the load client."""
    targets = ",".join(f"{name}={limit:g}ms" for name, limit in TARGETS_MS.items())
    run = load(
        server,
        *("--trace", str(path), "--num-requests", str(num_rows), "--save-requests"),
        *("--targets", targets, "--send-targets"),
    )
    rows = run.requests
    assert not any(row.error for row in rows), run.classes["rt"].errors
    length_s = max(_end_s(row) for row in rows) - rows[0].intended_s
    num_tokens = sum(row.output_tokens or 0 for row in rows)
    return Outcome(num_tokens / length_s, length_s, np.array([_ttft_s(row) for row in rows]))


def _end_s(row: RequestRow) -> float:
    assert row.end_s is not None
    return row.end_s


def _ttft_s(row: RequestRow) -> float:
    assert row.first_s is not None
    return row.first_s - row.intended_s


def replayed(log: Path, num_rows: int) -> dict[str, Outcome]:
    """Return what the last requests of a log came to: in the log, and simulated by it."""
    recording = read_recording(DecisionLogReader(log))
    return {
        "router": _of_clients(recording.clients(), num_rows),
        "replayed": _of_clients(recording.simulate(Settings()), num_rows),
    }


def _of_clients(clients: Clients, num_rows: int) -> Outcome:
    """Return what the last that came came to: those before are the load client's own trials."""
    seen = sorted(clients.seen.values(), key=lambda each: each.arrival_s)[-num_rows:]
    length_s = max(each.token_times_s[-1] for each in seen) - seen[0].arrival_s
    ttft_s = np.array([each.token_times_s[0] - each.arrival_s for each in seen])
    return Outcome(sum(len(each.token_times_s) for each in seen) / length_s, length_s, ttft_s)


def print_bars(name: str, runs: Sequence[Mapping[str, Outcome]], outside_s: FloatArray) -> bool:
    """Print a line per figure; returns whether all are within their bars.

    `outside_s`: what each TTFT has besides, see `Outside`.
    """
    is_near = True
    simulated = [run["replayed"] for run in runs]
    simulated = [dataclasses.replace(run, ttft_s=run.ttft_s + outside_s) for run in simulated]
    for figure, bar in BARS.items():
        seen = [run["client"].figures[figure] for run in runs]
        told = [run.figures[figure] for run in simulated]
        mean, predicted = float(np.mean(seen)), float(np.mean(told))
        off = predicted / mean - 1
        is_near &= abs(off) <= bar
        unit = "" if figure == "tokens/s" else ", ms"
        spread = (max(seen) - min(seen)) / mean
        each = " / ".join(f"{value:.0f}" for value in seen)
        print_row(
            *(name, f"{figure}{unit}", f"{predicted:.0f}", f"{mean:.0f}", each),
            *(f"{spread:.0%}", f"{off:+.1%}", f"{bar:.0%}"),
        )
    return is_near


def played(case: Case, folder: Path, options: Sequence[str]) -> dict[str, Outcome]:
    """Play one case on a server of its own; return what the client saw, and `replayed`."""
    log, path, num_rows = folder / "decisions.jsonl", folder / "rows.csv.gz", len(case.requests)
    log.unlink(missing_ok=True)
    case.requests.write(path)
    with pinned_server([*options, "--policy", case.policy, "--decision-log", str(log)]) as server:
        client = live(server, path, num_rows)
    return {"client": client} | replayed(log, num_rows)


def main() -> None:
    """Print the table; exit code 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--profile-seconds", type=float, default=20.0)
    args = parser.parse_args()
    requests = scaled_trace(0, NUM_ROWS)
    others = scaled_trace(NUM_ROWS, NUM_OTHER_ROWS)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        profile = folder / "profile.json"
        write_profile(profile, [], seconds=args.profile_seconds)
        options = ["--profile", str(profile), "--max-kv-tokens", str(KV_TOKENS)]
        hardware = ProfiledHardware.read(profile)
        burst = folder / "burst.csv.gz"
        requests.at_once().write(burst)
        times_s = requests.times_s * (work_seconds(burst, hardware) / LOAD / requests.times_s[-1])
        rate = NUM_OTHER_ROWS / NUM_ROWS * times_s[-1] / others.times_s[-1]
        spread, *at_once = (
            played(Case("trial", "chunked", each), folder, options)
            for each in (others.at(others.times_s * rate), *[others.at_once()] * NUM_BURSTS)
        )
        outside = Outside.of(spread, at_once)
        stretched = requests.at(times_s)
        cases = [
            Case(f"chunked, at {LOAD:g}", "chunked", stretched),
            Case("chunked, all at once", "chunked", requests.at_once()),
            Case(f"unified, at {LOAD:g}", "unified", stretched),
        ]
        runs: dict[str, list[dict[str, Outcome]]] = {case.name: [] for case in cases}
        for _ in range(args.runs):
            for case in cases:
                runs[case.name].append(played(case, folder, options))
    print(
        f"{NUM_ROWS} rows of {TRACE}, lengths times {LENGTH_SCALE:g}: prompts of"
        f" {requests.prompt_tokens.mean():.0f}, outputs of {requests.output_tokens.mean():.0f}"
        f" tokens in the mean, over {times_s[-1]:.0f} s. Outside of the router"
        f" {1e3 * outside.alone_s:.1f} ms per TTFT, and {1e3 * outside.turn_s:.2f} ms for each"
        f" request before it that is not through; load average {load_average()}\n"
    )
    heads = ["policy, load", "figure", "simulated", "live mean", "live runs", "spread"]
    print_head(*heads, "off by", "bar")
    near = [
        print_bars(case.name, runs[case.name], outside.seconds(case.requests.times_s))
        for case in cases
    ]
    raise SystemExit(not all(near))


if __name__ == "__main__":
    main()
