"""What each hand-set number on the planning path buys: `python -m bench.scheduling.margins`.

Short runs in virtual time, each with one number (or a few that hold up one rule) made to mean
nothing, and beside them all as it is. `chance` is all as it is with other noise of step times: what
two runs differ by that nothing was changed in. `echo` and `accelgen` are these policies instead.
A run that is in the file of `--runs` is not made again; without it none are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from bench.scheduling.paper_loads import SHAREGPT, accelgen_load, echo_load
from bench.table import print_head, print_row
from lightserve.config.scheduling import AUTO_BATCHED_TOKENS
from lightserve.cost.model import StepShape
from lightserve.sim import HybridConfig, Targets
from lightserve.sim.hybrid import HybridRun
from lightserve.sim.virtual_gpus import A100_LLAMA2_7B, VirtualHardware
from lightserve.types import RequestClass

STALLED_SHARE, STALL_S = 0.02, 0.1


@dataclass(frozen=True)
class StallingHardware(VirtualHardware):
    """Virtual hardware of which others have the machine at times: some steps take much longer."""

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def step_seconds(self, shape: StepShape) -> float:
        """See `Hardware`; 2 % of the steps wait for a tenth of a second."""
        stall_s = STALL_S if self.rng.random() < STALLED_SHARE else 0.0
        return super().step_seconds(shape) + stall_s


def _chats(rate: float, capacity_tokens: int, targets: Targets) -> dict[str, Any]:
    return {
        "rt": f"poisson:{rate}",
        "rt_lengths": SHAREGPT,
        "be": "closed:256",
        "be_lengths": "uniform:512-1024,32-128",
        "capacity_tokens": capacity_tokens,
        "targets": targets,
        "duration_s": 30.0,
    }


def _unsteady(_folder: Path, seed: int) -> dict[str, Any]:
    formula = vars(A100_LLAMA2_7B) | {"spread": 0.15, "rng": np.random.default_rng(seed)}
    return _chats(12.0, 60_000, Targets(0.4, 0.06, 0.24)) | {
        "hardware": StallingHardware(**formula)
    }


USUAL = Targets(0.4, 0.2, 0.2)
SCENES: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "short memory": lambda _folder, _seed: _chats(16.0, 20_000, USUAL),
    "half loaded": lambda _folder, _seed: _chats(12.0, 60_000, USUAL),
    "overload": lambda _folder, _seed: _chats(32.0, 60_000, USUAL) | {"duration_s": 45.0},
    "tight targets": lambda _folder, _seed: _chats(14.0, 60_000, Targets(0.4, 0.04, 0.16)),
    "unsteady": _unsteady,
    "documents": lambda folder, seed: (
        echo_load(folder, seed) | {"duration_s": 30.0, "margin_s": 1.0}
    ),
    "near capacity": lambda _folder, _seed: (
        _chats(20.0, 60_000, USUAL) | {"duration_s": 150.0, "margin_s": 30.0, "budget_tokens": 512}
    ),
    "long prompts": lambda folder, seed: (
        accelgen_load(folder, seed)
        | {"capacity_tokens": 60_000, "duration_s": 60.0, "be": "closed:64"}
        | {"be_lengths": "uniform:512-1024,32-128", "margin_s": 1.0}
    ),
}
"""What of `HybridConfig` each is."""
EARLY_S, LATE_S = 5.0, 2.0
"""At the start and at the end, unless a scene's margin is longer: not in the figures."""

MANY = 1e9
NEUTRAL: dict[str, Mapping[str, float]] = {
    "(as it is)": {},
    "(chance)": {},
    "(echo)": {},
    "(accelgen)": {},
    # deadlines
    "FEASIBLE_FACTOR": {"FEASIBLE_FACTOR": 1.0},
    "LEAST_SHARE": {"LEAST_SHARE": 1.0},
    "RESERVE_SHARE": {"RESERVE_SHARE": 0.0},
    "MAX_RESERVE_SHARE": {"MAX_RESERVE_SHARE": 1.0},
    # step times
    "GUARD_DEVIATIONS": {"GUARD_DEVIATIONS": 0.0},
    "LEAST_OUTLIER": {"LEAST_OUTLIER": MANY},
    "LEAD_FACTOR": {"LEAD_FACTOR": 1.0},
    "MIN_LEAD_S": {"MIN_LEAD_S": 0.0},
    # lending
    "MAX_SHARE": {"MAX_SHARE": MANY},
    "MAX_SHARE of 0.85": {"MAX_SHARE": 0.85},
    "SHARE_PER_FREE": {"SHARE_PER_FREE": MANY},
    "SHARE_PER_FREE of 2": {"SHARE_PER_FREE": 2.0},
    "SHARE_PER_FREE of 3": {"SHARE_PER_FREE": 3.0},
    "MUCH_FREE": {"MUCH_FREE": 0.0},
    "NEARLY_FREE": {"NEARLY_FREE": 0.0},
    "MUCH_FREE, NEARLY_FREE": {"MUCH_FREE": 1.0},
    "IDLE_FLOORS": {"IDLE_FLOORS": 1.0},
    "IDLE_LIMIT_S": {"IDLE_LIMIT_S": 0.5},
    "IDLE_SHARE": {"IDLE_SHARE": MANY},
    "MAX_IDLE_LIMIT_S": {"MAX_IDLE_LIMIT_S": MANY},
    "FIXED_SHARE": {"FIXED_SHARE": 1e-9},
    # what arrives
    "MIN_SEEN_S": {"MIN_SEEN_S": 1e-9},
    "NUM_PRIOR": {"NUM_PRIOR": 1},
    "NEWEST_WEIGHT": {"NEWEST_WEIGHT": 0.0},
    "NEWEST_WEIGHT of 0.01": {"NEWEST_WEIGHT": 0.01},
    "RT_GROWTH": {"RT_GROWTH": 0},
    # who goes first
    "MIN_CHUNK": {"MIN_CHUNK": 1},
    "ALIKE": {"ALIKE": 0.0},
    "LOOK_AHEAD": {"LOOK_AHEAD": 1},
    "queue.MAX_CANDIDATES": {"queue.MAX_CANDIDATES": 8},
    # memory
    "WAVES": {"WAVES": 0.0},
    "LEVEL_STEP": {"LEVEL_STEP": 0.0},
    "PRIOR_MOST": {"PRIOR_MOST": MANY},
    "MOST_NEW": {"MOST_NEW": 1},
    "EVICTION_PORTIONS": {"EVICTION_PORTIONS": 1 << 40},
}
"""By row: numbers of the router, and the values at which they mean nothing."""


@contextlib.contextmanager
def neutral(numbers: Mapping[str, float]) -> Iterator[None]:
    """Give numbers of the router other values wherever they are read. Raises KeyError.

    One that several modules have by the same name says which: `step_cost.NUM_KNEES`.
    """
    with contextlib.ExitStack() as stack:
        for name, value in numbers.items():
            of, _, constant = name.rpartition(".")
            owners = [
                module
                for path, module in list(sys.modules.items())
                if path.startswith("lightserve.")
                and path.endswith(of and f".{of}")
                and hasattr(module, constant)
            ]
            if not owners:
                raise KeyError(name)
            for module in owners:
                stack.enter_context(patch.object(module, constant, value))
        yield


class Figures(NamedTuple):
    """What a run came to, between the margins."""

    in_time_pct: float
    """Real-time arrivals that had missed no target when the run ended, finished or not."""
    be_tps: float
    """Best-effort output tokens per second."""
    be_work_tps: float
    """Those and prompt tokens whose first token came."""
    evictions: float
    """Of real-time requests."""
    rt_gap_ms: float
    """Mean time between two tokens of real-time requests."""
    steps_per_s: float = math.nan
    """Each takes the hardware's constant once."""


def play(scene: str, row: str, seed: int) -> Figures:
    """Run a scene with a row's numbers."""
    with tempfile.TemporaryDirectory() as folder, neutral(NEUTRAL[row]):
        options: dict[str, Any] = {
            "budget_tokens": AUTO_BATCHED_TOKENS["cuda"],
            "margin_s": 1.0,
            "seed": seed,
        }
        options |= SCENES[scene](Path(folder), seed)
        if row in ("(echo)", "(accelgen)"):
            options["policy"] = row.strip("()")
        run = HybridRun(HybridConfig(**options))
        if row == "(chance)":
            run.worker._rng = np.random.default_rng(1000 + seed)
        run.advance(run.config.duration_s)
        run.close()
    return figures_of(run)


def figures_of(run: HybridRun) -> Figures:
    """Return what a run came to."""
    stop_s = run.config.duration_s
    margin_s = run.config.margin_s
    start_s, end_s = max(EARLY_S, margin_s), stop_s - max(LATE_S, margin_s)
    in_time, gaps_s = [], []
    num_output = num_prompt = 0
    for key, outcome in run.simulation.outcomes.items():
        request_class = RequestClass.RT if key.frontend_id == 0 else RequestClass.BE
        clients, times = run.clients[request_class], outcome.token_times_s
        if request_class is RequestClass.BE:
            num_output += sum(start_s <= time_s < end_s for time_s in times)
            if times and start_s <= times[0] < end_s:
                num_prompt += clients.num_prompt_tokens[key.request_id]
        elif start_s <= outcome.arrival_s < end_s:
            targets = (clients.targets[key.request_id] or run.config.targets).counted()
            in_time.append(_is_in_time(outcome.arrival_s, times, targets, stop_s))
            gaps_s += np.diff(times).tolist()
    seconds = end_s - start_s
    return Figures(
        100.0 * fmean(in_time),
        num_output / seconds,
        (num_output + num_prompt) / seconds,
        run.core.counters[RequestClass.RT].num_evictions,
        1e3 * fmean(gaps_s),
        run.worker.sums.num_steps / stop_s,
    )


def _is_in_time(arrival_s: float, times: Sequence[float], targets: Targets, stop_s: float) -> bool:
    ttft_s, tpot_s, mtpot_s, _ = (np.inf if each is None else each for each in targets)
    if not times:
        return stop_s - arrival_s <= ttft_s
    gaps = np.diff(times)
    mean_s = float(gaps.mean()) if len(gaps) else 0.0
    longest_s = float(gaps.max()) if len(gaps) else 0.0
    return times[0] - arrival_s <= ttft_s and mean_s <= tpot_s and longest_s <= mtpot_s


def _keep(path: Path, run: list[Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(run) + "\n")


def main() -> None:
    """Print a table for each scene."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scene", choices=SCENES, action="append")
    parser.add_argument("--row", choices=NEUTRAL, action="append")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--runs", type=Path, help="file of runs, read and added to")
    args = parser.parse_args()
    known: dict[tuple[str, str, int], Figures] = {}
    if args.runs and args.runs.exists():
        for line in args.runs.read_text().splitlines():
            scene, row, seed, values = json.loads(line)
            known[scene, row, seed] = Figures(*values)
    for scene in args.scene or SCENES:
        print_head(
            "scene",
            "without",
            "in time %",
            "BE tokens/s",
            "BE work",
            "evictions",
            "gap ms",
            "steps/s",
        )
        for row in args.row or NEUTRAL:
            for seed in range(args.seeds):
                if (scene, row, seed) not in known:
                    known[scene, row, seed] = play(scene, row, seed)
                    if args.runs:
                        _keep(args.runs, [scene, row, seed, known[scene, row, seed]])
            runs = [known[scene, row, seed] for seed in range(args.seeds)]
            columns = zip(*runs, strict=True)
            print_row(scene, row, *(", ".join(f"{x:.1f}" for x in column) for column in columns))


if __name__ == "__main__":
    main()
