"""What reasons and the decision log cost per step: `python -m bench.router.decision_log`.

A hybrid run (real-time lengths of ShareGPT over an endless best-effort backlog, virtual hardware)
is recorded, then its log is replayed again and again, so that every arm does the very same work:
without reasons, with them, and with the log as well. CPU time of the thread: of each step the
smallest of `--repeats` measurements, means over steps.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import numpy.typing as npt

from lightserve.decisions.records import (
    CoreCalls,
    Decision,
    DecisionLogFile,
    RecordedCore,
    event_of,
)
from lightserve.decisions.replaying import DecisionLogReader, Line, make_core_of
from lightserve.messages.router_worker import StepResult
from lightserve.router import planner
from lightserve.router.commit import SkipCounters
from lightserve.router.step import LeftOut, PlannedStep, Skips
from lightserve.sim import HybridConfig, run_hybrid

NUM_WARM_UP = 50
"""Steps that do not count."""
LENGTHS = str(Path(__file__).parents[1] / "traces/sharegpt_lengths.csv.gz")


class NoSkips(Skips):
    """Notes nothing."""

    def note(self, *_: Any) -> None:
        """Do nothing."""

    note_rows = stop = lose = note  # type: ignore[assignment]

    def of_step(self, *_: Any) -> LeftOut:
        """Return no request."""
        return LeftOut({})


@contextmanager
def without_reasons() -> Iterator[None]:
    """Let the router note, collect and count nothing."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(planner, "Skips", NoSkips))
        stack.enter_context(patch.object(planner.Planner, "_unseen", lambda *_: {}))
        stack.enter_context(patch.object(SkipCounters, "note", lambda *_: None))
        yield


Times = npt.NDArray[np.float64]


def drive(core: CoreCalls, lines: Iterable[Line]) -> Times:
    """Replay; return the CPU seconds of each step, [2, num_steps].

    First those of its plan and commit, then those of all calls since the step before.
    """
    plans_s: list[float] = []
    totals_s: list[float] = []
    start_s = time.thread_time()
    for _, record in lines:
        if isinstance(record, Decision):
            before_s = time.thread_time()
            step = core.plan(record.planned_at_s)
            assert isinstance(step, PlannedStep)
            core.commit(step, record.committed_at_s)
            end_s = time.thread_time()
            plans_s.append(end_s - before_s)
            totals_s.append(end_s - start_s)
            start_s = time.thread_time()
            continue
        event = event_of(record)
        if isinstance(event, StepResult):
            core.on_result(event, record.now_s)
        else:
            core.on_message(event, record.now_s)
    return np.array([plans_s, totals_s])


def measure(policy: str, args: argparse.Namespace, folder: Path) -> str:
    """Return a row of the table."""
    path = folder / f"{policy}.jsonl"
    config = HybridConfig(
        rt=f"poisson:{args.rate}",
        rt_lengths=LENGTHS,
        be=f"closed:{args.queued}",
        be_lengths="uniform:512-1024,32-128",
        duration_s=args.duration_s,
        margin_s=1.0,
        capacity_tokens=args.capacity_tokens,
        policy=policy,
        decision_log=str(path),
    )
    run_hybrid(config)
    reader = DecisionLogReader(path)
    lines = list(reader.lines())
    decisions = [record for _, record in lines if isinstance(record, Decision)]

    def plain() -> Times:
        return drive(make_core_of(reader.header), lines)

    def recorded() -> Times:
        log = DecisionLogFile(folder / "again.jsonl", reader.header, max_bytes=1 << 40)
        times = drive(RecordedCore(make_core_of(reader.header), log), lines)
        log.close()
        return times

    times: dict[str, list[Times]] = {"bare": [], "plain": [], "recorded": []}
    for _ in range(args.repeats):  # in turn, as others use the machine as well
        gc.collect()
        gc.disable()  # as in a router, where nothing is collected while a step waits
        with without_reasons():
            times["bare"].append(plain())
        times["plain"].append(plain())
        times["recorded"].append(recorded())
    gc.enable()
    best = {arm: 1e6 * np.min(runs, axis=0)[:, NUM_WARM_UP:] for arm, runs in times.items()}
    bare_us, with_us = best["bare"][0].mean(), best["plain"][0].mean()
    log_us = (best["recorded"][1] - best["plain"][1]).mean()
    count = len(decisions)
    decided_bytes = sum(len(msgspec.json.encode(d)) for d in decisions) / count
    num_named = sum(len(d.advancing) + len(d.skipped) for d in decisions) / count
    return (
        f"| {policy} | {count} | {num_named:.0f} | {bare_us:.0f} | {with_us:.0f}"
        f" | {100 * (with_us / bare_us - 1):+.1f} | {log_us:.0f} | {decided_bytes:.0f}"
        f" | {path.stat().st_size / count - decided_bytes:.0f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", default=["unified", "priority", "chunked"])
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--queued", type=int, default=2000)
    parser.add_argument("--duration-s", type=float, default=20.0)
    parser.add_argument("--capacity-tokens", type=int, default=120_000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(
        "| policy | steps | named per step | plan + commit µs, no reasons | with reasons | % |"
        " log µs | its bytes: decision | inputs |"
    )
    print("|" + " --- |" * 9)
    with tempfile.TemporaryDirectory() as folder:
        for policy in args.policies:
            print(measure(policy, args, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
