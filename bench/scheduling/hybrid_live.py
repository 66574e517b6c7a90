"""Real-time requests over an endless backlog, live: `python -m bench.scheduling.hybrid_live`.

Two cores, one server per system (a policy or a preset), all up at once; they are loaded in turns,
several rounds, so that whatever else the machine does falls on all alike
(`bench/serving/server.py` says who runs where).

1. capacity: real-time requests per second of 64 closed-loop clients, the best system's
2. targets: three times the p99 of TTFT, TPOT and largest gap, real-time requests alone, Poisson at
   0.6 of the capacity
3. the same arrivals over a backlog, every system in turn; real-time alone and best effort alone

Bars: attainment 99 %; best-effort tokens per second 0.85 * 0.4 of what they are alone, as 0.4 is
what real-time requests at 0.6 leave.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.serving.server import (
    Server,
    load,
    load_average,
    pinned_server,
    write_profile,
    write_random_model,
)
from bench.table import print_head, print_row
from lightserve.config.scheduling import PRESETS
from lightserve.loadtest.options import BE, RT
from lightserve.loadtest.result import RequestRow, Run

SYSTEMS = "unified,fcfs,chunked,priority"
"""Policies, and presets by their names."""
NUM_CLIENTS = 64
RT_SHARE = 0.6
TARGET_FACTOR = 3.0
ATTAINMENT_BAR, BE_BAR = 0.99, 0.85 * (1 - RT_SHARE)
RAMP_S = 3.0
"""At the start of a run: not counted."""
DRAIN_S = 30.0
"""For who is in flight at the end of a run, until targets are known: who is left then is late."""


@dataclass(frozen=True)
class Case:
    """A model and its traffic: (prompt, output) tokens, uniform."""

    rt: tuple[str, str]
    be: tuple[str, str]
    num_be_clients: int


CASES = {
    "bundled": Case(("64:256", "32:96"), ("256:512", "64:128"), 48),
    "random": Case(("16:64", "8:24"), ("32:96", "16:32"), 32),
}


@dataclass
class Sums:
    """What came of one line of the table."""

    rows: list[RequestRow] = field(default_factory=list)
    attainments: list[float] = field(default_factory=list)
    """Of each round, as the load client judges."""
    be_tokens_per_s: list[float] = field(default_factory=list)
    client_cpu: list[float] = field(default_factory=list)

    def add(self, run: Run) -> None:
        """Take in a run."""
        self.client_cpu.append(run.client.cpu_share)
        self.rows += [row for row in run.requests if _counts(run, row)]
        if (rt := run.classes.get(RT)) is not None and rt.attainment is not None:
            self.attainments.append(rt.attainment)
        if (be := run.classes.get(BE)) is not None:
            self.be_tokens_per_s.append(be.output_tokens_per_s)

    @property
    def attainment(self) -> float:
        """Over all rounds."""
        return float(np.mean([row.is_met for row in self.rows]))

    def quantile_ms(self, name: str, share: float) -> float:
        """Return a quantile of ttft, tpot or mtpot over requests that have it."""
        values = [value for row in self.rows if (value := _measure_ms(row, name)) is not None]
        return float(np.quantile(values, share)) if values else float("nan")


def _counts(run: Run, row: RequestRow) -> bool:
    start_s, end_s = run.window_s
    return row.request_class == RT and start_s <= row.intended_s <= end_s


def _measure_ms(row: RequestRow, name: str) -> float | None:
    if row.first_s is None:
        return None
    if name == "ttft":
        return 1e3 * (row.first_s - row.intended_s)
    if row.error is not None or row.end_s is None or not row.output_tokens:
        return None
    if name == "tpot":
        return 1e3 * (row.end_s - row.first_s) / max(1, row.output_tokens - 1)
    return row.mtpot_ms


class Bench:
    """One model on a server per system."""

    def __init__(self, name: str, servers: Mapping[str, Server], seconds: float) -> None:
        self.case = CASES[name]
        self.servers = servers
        self.seconds = seconds
        self._rt_lengths = _lengths(*self.case.rt)
        self.targets: tuple[str, ...] = ()
        self._drain_s = DRAIN_S

    def _window(self, seconds: float) -> tuple[str, ...]:
        skipped = ("--skip-first-s", str(RAMP_S), "--skip-last-s", "1")
        return ("--duration-s", str(RAMP_S + seconds + 1), *skipped)

    def capacity_rps(self, system: str) -> float:
        """Return requests per second that end, of 64 closed-loop clients.

        Counted from the end of half as many requests until the last one is sent: then all
        clients are busy, however slow the machine is.
        """
        traffic = ("--concurrency", str(NUM_CLIENTS), "--num-requests", str(3 * NUM_CLIENTS))
        run = load(self.servers[system], *self._rt_lengths, *traffic, "--save-requests")
        ends = sorted(row.end_s for row in run.requests if row.error is None and row.end_s)
        start_s, end_s = ends[NUM_CLIENTS // 2], max(row.intended_s for row in run.requests)
        return sum(start_s < moment_s <= end_s for moment_s in ends) / (end_s - start_s)

    def alone(self, rate_rps: float, seed: int, *, scale: float = 1.0) -> Run:
        """Run real-time requests alone, on the unified server."""
        return load(self.servers["unified"], *self._rt(rate_rps, seed, scale), *self.targets)

    def mixed(self, system: str, rate_rps: float, seed: int) -> Run:
        """Run both classes."""
        prompts, outputs = self.case.be
        backlog = (
            f"concurrency={self.case.num_be_clients} prompt-tokens={prompts}"
            f" output-tokens={outputs}"
        )
        traffic = (*self._rt(rate_rps, seed, 1.0), "--be", backlog)
        return load(self.servers[system], *traffic, *self.targets)

    def backlog_alone(self, seed: int) -> Run:
        """Run best-effort requests alone, on the unified server."""
        traffic = ("--be-share", "1", "--concurrency", str(self.case.num_be_clients))
        return load(
            self.servers["unified"],
            *(*_lengths(*self.case.be), *traffic, "--seed", str(seed)),
            *(*self._window(self.seconds * 0.7), "--drain-s", "0.1"),
        )

    def _rt(self, rate_rps: float, seed: int, scale: float) -> tuple[str, ...]:
        arrivals = ("--rate", f"{rate_rps:.3f}", "--seed", str(seed))
        ending = ("--save-requests", "--drain-s", f"{self._drain_s:.1f}")
        return (*self._rt_lengths, *arrivals, *self._window(scale * self.seconds), *ending)

    def set_targets(self, alone: Sums) -> dict[str, float]:
        """Take targets from a run without others; returns them in ms."""
        limits = {
            name: TARGET_FACTOR * alone.quantile_ms(name, 0.99)
            for name in ("ttft", "tpot", "mtpot")
        }
        most_tokens = int(self.case.rt[1].partition(":")[2])
        self._drain_s = (limits["ttft"] + most_tokens * limits["tpot"]) / 1e3
        text = ",".join(f"{name}={limit:.1f}ms" for name, limit in limits.items())
        self.targets = ("--targets", text, "--send-targets")
        return limits


def _lengths(prompts: str, outputs: str) -> tuple[str, ...]:
    return ("--prompt-tokens", prompts, "--output-tokens", outputs)


def compare(bench: Bench, rounds: int) -> None:
    """Print capacity, targets and the table of systems."""
    capacities = {system: bench.capacity_rps(system) for system in bench.servers}
    rate_rps = RT_SHARE * max(capacities.values())
    print("capacity, requests/s: " + ", ".join(f"{p} {c:.2f}" for p, c in capacities.items()))
    first = Sums()
    first.add(bench.alone(rate_rps, 100, scale=2.0))
    limits = bench.set_targets(first)
    print(
        f"real-time at {rate_rps:.2f}/s; targets, ms: "
        + ", ".join(f"{name} {limit:.0f}" for name, limit in limits.items())
        + f" ({len(first.rows)} requests alone)\n",
        flush=True,
    )
    lines = {system: Sums() for system in bench.servers}
    alone, backlog = Sums(), Sums()
    for number in range(rounds):
        for system, sums in lines.items():
            sums.add(bench.mixed(system, rate_rps, number))
        alone.add(bench.alone(rate_rps, number))
        backlog.add(bench.backlog_alone(number))
    print_comparison(lines | {"no best effort": alone}, float(np.mean(backlog.be_tokens_per_s)))
    of_rounds = " / ".join(f"{value:.0f}" for value in backlog.be_tokens_per_s)
    print(f"\nbest effort alone, tokens/s by round: {of_rounds}; load average {load_average()}\n")


def print_comparison(lines: Mapping[str, Sums], be_alone: float) -> None:
    """Print a line per system, by round in parentheses."""
    heads = (
        *("system", "arrivals", f"attainment (≥ {ATTAINMENT_BAR:.0%})", "TTFT p50 / p99, ms"),
        *("TPOT p50 / p99, ms", "largest gap p99, ms", "BE tokens/s"),
        *(f"of BE alone (≥ {BE_BAR:.2f})", "client's CPU"),
    )
    print_head(*heads)
    for name, sums in lines.items():
        be = float(np.mean(sums.be_tokens_per_s or [0.0]))
        pairs = {
            measure: " / ".join(f"{sums.quantile_ms(measure, q):.0f}" for q in (0.5, 0.99))
            for measure in ("ttft", "tpot")
        }
        cells = (
            *(name, len(sums.rows), f"{sums.attainment:.1%}{_rounds(sums.attainments, '.0%')}"),
            *(pairs["ttft"], pairs["tpot"], f"{sums.quantile_ms('mtpot', 0.99):.0f}"),
            *(f"{be:.0f}{_rounds(sums.be_tokens_per_s, '.0f')}", f"{be / be_alone:.2f}"),
            f"{np.mean(sums.client_cpu):.0%}",
        )
        print_row(*cells)


def _rounds(values: Sequence[float], spec: str) -> str:
    return f" ({', '.join(format(value, spec) for value in values)})" if len(values) > 1 else ""


def run_case(name: str, systems: Sequence[str], seconds: float, rounds: int) -> None:
    """Start a server per system and load them."""
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model = Path(directory) / "model"
        args = ["--model", str(model)] if name == "random" else []
        if args:
            write_random_model(model)
        profile = Path(directory) / "profile.json"
        write_profile(profile, args, seconds=seconds)
        args += ["--profile", str(profile)]
        servers = {
            system: stack.enter_context(pinned_server([*args, *_flags(system)]))
            for system in systems
        }
        bench = Bench(name, servers, seconds)
        print(f"#### {name} model; load average {load_average()}\n", flush=True)
        compare(bench, rounds)
    print(f"{time.perf_counter() - start_s:.0f} s\n", flush=True)


def _flags(system: str) -> tuple[str, str]:
    return ("--preset" if system in PRESETS else "--policy", system)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="bundled,random")
    parser.add_argument("--systems", default=SYSTEMS, help="unified among them")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="counted, of a run")
    args = parser.parse_args()
    models, systems = args.models.split(","), args.systems.split(",")
    if unknown := set(models).difference(CASES):
        parser.error(f"--models: {', '.join(sorted(unknown))} is none of {', '.join(CASES)}")
    if "unified" not in systems:
        parser.error("--systems: what runs alone runs on unified")
    for name in models:
        run_case(name, systems, args.seconds, args.rounds)


if __name__ == "__main__":
    main()
