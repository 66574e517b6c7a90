"""The simulator against the live server: `python -m bench.scheduling.simulator_check`.

300 rows of a trace, scaled, at 0.6 of what the simulated server can do, and all at once. Each live
run writes a decision log, and the same requests are simulated again with what that log says of the
machine, step by step (`lightserve.sim.whatif`): what differs then is not its speed, which changes
from minute to minute, but the simulator. What a TTFT has besides (HTTP, tokens, links) is measured
under the same load before, on 100 other rows. Bars: throughput and mean TTFT within 10 %, p90 of
TTFT within 20 %, of the mean of the live runs.

A second table takes the difference apart, from what clients saw to what a profile alone predicts:

    client      as the load client saw it
    router      from the log: without HTTP, tokens, links
    replayed    the same requests, each step as long as the log's, one after the other
    even        each step as long as a formula fitted to the log says
    profiled    each step as long as `lightserve profile` said before, gaps as in the log's mean
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
from lightserve.cost.model import StepModel
from lightserve.decisions.replaying import DecisionLogReader
from lightserve.loadtest.result import RequestRow
from lightserve.loadtest.workload import load_trace
from lightserve.messages.common import StepCoefficients
from lightserve.sim.hybrid import HybridConfig, HybridRun
from lightserve.sim.report import Targets
from lightserve.sim.whatif import Clients, Recording, Settings, read_recording
from lightserve.sim.worker import ProfiledHardware

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

TRACE = "azure2023_conv"
NUM_ROWS, NUM_OTHER_ROWS = 300, 100
LENGTH_SCALE, MAX_PROMPT, MAX_OUTPUT = 0.3, 1024, 256
KV_TOKENS = 60_000
LOAD = 0.6
TARGETS_MS = {"ttft": 1000.0, "tpot": 100.0, "mtpot": 400.0}
"""Those of all requests; `unified` plans by them."""
BARS = {"tokens/s": 0.10, "TTFT mean": 0.10, "TTFT p90": 0.20}
TERMS = ("client", "router", "replayed", "even", "profiled")
"""See the module."""


class Case(NamedTuple):
    """What is played."""

    name: str
    policy: str
    path: Path
    num_rows: int


@dataclass(frozen=True)
class Scaled:
    """Requests as both play them."""

    times_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray

    def at(self, times_s: FloatArray) -> Scaled:
        """Return the same requests at other times."""
        return dataclasses.replace(self, times_s=times_s)

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


def replayed(log: Path, profile: StepCoefficients, num_rows: int) -> dict[str, Outcome]:
    """Return what the last requests of a log came to, by the names of `TERMS` but for the first."""
    recording = read_recording(DecisionLogReader(log))
    gap_s = float(np.mean([step.gap_s for step in recording.steps]))
    return {
        "router": _of_clients(recording.clients(), num_rows),
        "replayed": _of_clients(recording.simulate(Settings()), num_rows),
        "even": _of_clients(_even(recording, recording.step_cost, gap_s), num_rows),
        "profiled": _of_clients(_even(recording, profile, gap_s), num_rows),
    }


def _even(recording: Recording, cost: StepCoefficients, gap_s: float) -> Clients:
    """Simulate with steps that take what a formula says, and a gap before each."""
    model = StepModel(cost)
    steps = [
        step._replace(exec_s=model.seconds(step.shape), gap_s=gap_s) for step in recording.steps
    ]
    return dataclasses.replace(recording, step_cost=cost, steps=steps).simulate(Settings())


def _of_clients(clients: Clients, num_rows: int) -> Outcome:
    """Return what the last that came came to: those before are the load client's own trials."""
    seen = sorted(clients.seen.values(), key=lambda each: each.arrival_s)[-num_rows:]
    length_s = max(each.token_times_s[-1] for each in seen) - seen[0].arrival_s
    ttft_s = np.array([each.token_times_s[0] - each.arrival_s for each in seen])
    return Outcome(sum(len(each.token_times_s) for each in seen) / length_s, length_s, ttft_s)


def print_bars(name: str, runs: Sequence[Mapping[str, Outcome]], outside_s: float) -> bool:
    """Print a line per figure; returns whether all are within their bars."""
    is_near = True
    for figure, bar in BARS.items():
        seen = [run["client"].figures[figure] for run in runs]
        added = 0.0 if figure == "tokens/s" else 1e3 * outside_s
        told = [run["replayed"].figures[figure] + added for run in runs]
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


def print_terms(name: str, runs: Sequence[Mapping[str, Outcome]]) -> None:
    """Print a line per figure: what each of `TERMS` says, means over runs."""
    for figure in BARS:
        means = [np.mean([run[term].figures[figure] for run in runs]) for term in TERMS]
        print_row(name, figure, *(f"{mean:.1f}" for mean in means))


def played(
    case: Case, folder: Path, options: Sequence[str], profile: StepCoefficients
) -> dict[str, Outcome]:
    """Play one case on a server of its own; return what `TERMS` say of it."""
    log = folder / "decisions.jsonl"
    log.unlink(missing_ok=True)
    with pinned_server([*options, "--policy", case.policy, "--decision-log", str(log)]) as server:
        client = live(server, case.path, case.num_rows)
    return {"client": client} | replayed(log, profile, case.num_rows)


def main() -> None:
    """Print the tables; exit code 1 if a bar is missed."""
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
        other, at_once, stretched = (
            folder / f"{name}.csv.gz" for name in ("other", "at_once", "stretched")
        )
        requests.at(np.zeros(NUM_ROWS)).write(at_once)
        times_s = requests.times_s * (work_seconds(at_once, hardware) / LOAD / requests.times_s[-1])
        requests.at(times_s).write(stretched)
        rate = NUM_OTHER_ROWS / NUM_ROWS * times_s[-1] / others.times_s[-1]
        others.at(others.times_s * rate).write(other)
        trial = played(
            Case("trial", "chunked", other, NUM_OTHER_ROWS), folder, options, hardware.step_cost
        )
        outside_s = float(np.mean(trial["client"].ttft_s) - np.mean(trial["router"].ttft_s))
        cases = [
            Case(f"chunked, at {LOAD:g}", "chunked", stretched, NUM_ROWS),
            Case("chunked, all at once", "chunked", at_once, NUM_ROWS),
            Case(f"unified, at {LOAD:g}", "unified", stretched, NUM_ROWS),
        ]
        runs: dict[str, list[dict[str, Outcome]]] = {case.name: [] for case in cases}
        for _ in range(args.runs):
            for case in cases:
                runs[case.name].append(played(case, folder, options, hardware.step_cost))
    print(
        f"{NUM_ROWS} rows of {TRACE}, lengths times {LENGTH_SCALE:g}: prompts of"
        f" {requests.prompt_tokens.mean():.0f}, outputs of {requests.output_tokens.mean():.0f}"
        f" tokens in the mean, over {times_s[-1]:.0f} s. Outside of the router"
        f" {1e3 * outside_s:.1f} ms per TTFT; load average {load_average()}\n"
    )
    heads = ["policy, load", "figure", "simulated", "live mean", "live runs", "spread"]
    print_head(*heads, "off by", "bar")
    near = [print_bars(name, of, outside_s) for name, of in runs.items()]
    print()
    print_head("policy, load", "figure", *TERMS)
    for name, of in runs.items():
        print_terms(name, of)
    raise SystemExit(not all(near))


if __name__ == "__main__":
    main()
