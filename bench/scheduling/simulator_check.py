"""The simulator against the live server: `python -m bench.scheduling.simulator_check`.

300 rows of a trace, scaled, at 0.6 of what the simulated server can do, and all at once. The
simulator knows of the machine: a profile (`lightserve profile`), measured first, and three
constants, printed with the result. Of single requests on the idle server: what a TTFT has besides
its steps (HTTP, tokens, links), and what passes between two steps. Of 100 other rows, all at once:
how many times as long steps take as the profile says while client and frontend work beside them.
Of the three live runs the mean counts; the spread is theirs. Bars: throughput and mean TTFT within
10 %, p90 of TTFT within 20 %.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gzip
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from bench.serving.server import Server, load, load_average, pinned_server, write_profile
from bench.table import print_head, print_row
from lightserve.cost.model import StepShape
from lightserve.loadtest.result import RequestRow, Run
from lightserve.loadtest.workload import load_trace
from lightserve.sim.hybrid import HybridConfig, HybridRun
from lightserve.sim.report import Targets
from lightserve.sim.worker import ProfiledHardware

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

TRACE = "azure2023_conv"
NUM_ROWS, NUM_OTHER_ROWS = 300, 100
LENGTH_SCALE, MAX_PROMPT, MAX_OUTPUT = 0.3, 1024, 256
KV_TOKENS = 60_000
LOAD = 0.6
POLICIES = ("chunked", "unified")
TARGETS_MS = {"ttft": 1000.0, "tpot": 100.0, "mtpot": 400.0}
"""Those of all requests; `unified` plans by them."""
BARS = {"tokens/s": 0.10, "TTFT mean": 0.10, "TTFT p90": 0.20}


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


@dataclass(frozen=True)
class Machine:
    """What the simulator is told."""

    hardware: ProfiledHardware
    outside_s: float = 0.0
    """Of a TTFT, outside of steps."""
    factor: float = 1.0
    """Of the times in the profile; `hardware` has it."""

    def slowed(self, factor: float) -> Machine:
        """Return the same machine, its steps so many times as long."""
        cost = self.hardware.step_cost
        times = {
            name: factor * getattr(cost, name)
            for name in cost.__struct_fields__
            if name.endswith("_s")
        }
        slow = dataclasses.replace(
            self.hardware,
            step_cost=msgspec.structs.replace(cost, **times),
            per_step_s=factor * self.hardware.per_step_s,
        )
        return Machine(slow, self.outside_s, self.factor * factor)


def simulated(path: Path, policy: str, machine: Machine) -> Outcome:
    """Run the simulator."""
    config = HybridConfig(
        rt=str(path),
        rt_max_tokens=None,
        duration_s=3600.0,
        margin_s=0.0,
        capacity_tokens=KV_TOKENS,
        policy=policy,
        serve_options={"max_num_seqs": 256},
        targets=Targets(*(limit / 1e3 for limit in TARGETS_MS.values())),
        hardware=machine.hardware,
    )
    run = HybridRun(config)
    run.advance(config.duration_s)
    seen = list(run.simulation.outcomes.values())
    assert all(one.finish_reason is not None for one in seen)
    last_s = max(one.token_times_s[-1] for one in seen)
    length_s = last_s - seen[0].arrival_s + machine.outside_s
    ttft_s = np.array([one.token_times_s[0] - one.arrival_s for one in seen]) + machine.outside_s
    num_tokens = sum(len(one.token_times_s) for one in seen)
    return Outcome(num_tokens / length_s, length_s, ttft_s)


def live(server: Server, path: Path) -> tuple[Outcome, Run]:
    """Run the load client."""
    targets = ",".join(f"{name}={limit:g}ms" for name, limit in TARGETS_MS.items())
    run = load(
        server,
        *("--trace", str(path), "--num-requests", str(NUM_ROWS), "--save-requests"),
        *("--targets", targets, "--send-targets"),
    )
    rows = run.requests
    assert not any(row.error for row in rows), run.classes["rt"].errors
    length_s = max(_end_s(row) for row in rows) - rows[0].intended_s
    num_tokens = sum(row.output_tokens or 0 for row in rows)
    ttft_s = np.array([_ttft_s(row) for row in rows])
    return Outcome(num_tokens / length_s, length_s, ttft_s), run


def _end_s(row: RequestRow) -> float:
    assert row.end_s is not None
    return row.end_s


def _ttft_s(row: RequestRow) -> float:
    assert row.first_s is not None
    return row.first_s - row.intended_s


def calibrated(server: Server, hardware: ProfiledHardware, others: Path) -> Machine:
    """Return the machine, its constants measured; `others` is a trace of other requests."""
    outside_s, between_s = idle_constants(server, hardware)
    machine = Machine(dataclasses.replace(hardware, per_step_s=between_s), outside_s)
    outcome, _ = live(server, others)
    return machine.slowed(outcome.length_s / simulated(others, "chunked", machine).length_s)


def idle_constants(server: Server, hardware: ProfiledHardware) -> tuple[float, float]:
    """Return seconds outside of steps per TTFT, and between two steps: medians, one at a time."""
    run = load(
        server,
        *("--concurrency", "1", "--num-requests", "30", "--save-requests"),
        *("--prompt-tokens", "32:480", "--output-tokens", "64"),
    )
    outside, between = [], []
    for row in run.requests:
        assert row.prompt_tokens is not None and row.output_tokens is not None
        prompt, output = row.prompt_tokens, row.output_tokens
        decode = StepShape().plus(prompt + output // 2, 1)
        per_token_s = (_end_s(row) - row.intended_s - _ttft_s(row)) / (output - 1)
        outside.append(_ttft_s(row) - hardware.step_seconds(StepShape().plus(0, prompt)))
        between.append(per_token_s - hardware.step_seconds(decode))
    return max(0.0, float(np.median(outside))), max(0.0, float(np.median(between)))


def print_line(name: str, expected: Outcome, seen: Sequence[Outcome]) -> bool:
    """Print a line per figure; returns whether all are within their bars."""
    is_near = True
    for figure, bar in BARS.items():
        values = [outcome.figures[figure] for outcome in seen]
        mean, predicted = float(np.mean(values)), expected.figures[figure]
        off = predicted / mean - 1
        is_near &= abs(off) <= bar
        unit = "" if figure == "tokens/s" else ", ms"
        spread = (max(values) - min(values)) / mean
        runs = " / ".join(f"{value:.0f}" for value in values)
        print_row(
            *(name, f"{figure}{unit}", f"{predicted:.0f}", f"{mean:.0f}", runs),
            *(f"{spread:.0%}", f"{off:+.1%}", f"{bar:.0%}"),
        )
    return is_near


def main() -> None:
    """Print the table; exit code 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--profile-seconds", type=float, default=30.0)
    args = parser.parse_args()
    requests = scaled_trace(0, NUM_ROWS)
    others = scaled_trace(NUM_ROWS, NUM_OTHER_ROWS)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        profile = Path(directory) / "profile.json"
        write_profile(profile, [], seconds=args.profile_seconds)
        common = ["--profile", str(profile), "--max-kv-tokens", str(KV_TOKENS)]
        servers = {
            policy: stack.enter_context(pinned_server([*common, "--policy", policy]))
            for policy in POLICIES
        }
        hardware = ProfiledHardware.read(profile)
        other, at_once, stretched = (
            Path(directory) / f"{name}.csv.gz" for name in ("other", "at_once", "stretched")
        )
        others.at(np.zeros(NUM_OTHER_ROWS)).write(other)
        requests.at(np.zeros(NUM_ROWS)).write(at_once)
        machine = calibrated(servers["chunked"], hardware, other)
        work_s = simulated(at_once, "chunked", machine).length_s
        times_s = requests.times_s * (work_s / LOAD / requests.times_s[-1])
        requests.at(times_s).write(stretched)
        cases = {
            f"chunked, at {LOAD:g}": ("chunked", stretched),
            "chunked, all at once": ("chunked", at_once),
            f"unified, at {LOAD:g}": ("unified", stretched),
        }
        seen: dict[str, list[Outcome]] = {name: [] for name in cases}
        cpu: list[float] = []
        for _ in range(args.runs):
            for name, (policy, path) in cases.items():
                outcome, run = live(servers[policy], path)
                seen[name].append(outcome)
                cpu.append(run.client.cpu_share)
        print(
            f"{NUM_ROWS} rows of {TRACE}, lengths times {LENGTH_SCALE:g}: prompts of"
            f" {requests.prompt_tokens.mean():.0f}, outputs of {requests.output_tokens.mean():.0f}"
            f" tokens in the mean, over {times_s[-1]:.0f} s. Outside of steps"
            f" {1e3 * machine.outside_s:.1f} ms per TTFT, between steps"
            f" {1e3 * machine.hardware.per_step_s:.2f} ms, steps {machine.factor:.2f} times as"
            f" long as profiled; client's CPU {np.mean(cpu):.0%}; load average {load_average()}\n"
        )
        heads = ["policy, load", "figure", "simulated", "live mean", "live runs", "spread"]
        heads += ["off by", "bar"]
        print_head(*heads)
        near = [
            print_line(name, simulated(path, policy, machine), seen[name])
            for name, (policy, path) in cases.items()
        ]
    raise SystemExit(not all(near))


if __name__ == "__main__":
    main()
