"""Windows that were promised, in virtual time: `python -m bench.scheduling.windows`.

The real store, runner and router (`support.virtual_batches`) on a tenth of the virtual A100.
Real-time requests rise and fall by a third within 400 s, a closed loop of best-effort requests of
others goes on beside them. After a batch from which the pace is known, four are made one after the
other, each with the window that is asked for or the shortest that is promised in its place.
*Plain*: the same batches with the same windows, their lines as any other best-effort requests.
*Outside*: after the third of these batches real-time requests come at SURGE times their rate.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from support.virtual_batches import run_virtually, server

from bench.table import print_head, print_row
from lightserve.batches.records import BatchRecord
from lightserve.sim.hybrid import HybridConfig
from lightserve.sim.report import Targets
from lightserve.sim.worker import A100_LLAMA2_7B
from lightserve.types import FrontendId

SLOW = dataclasses.replace(
    A100_LLAMA2_7B,
    floor_s=0.094,
    per_new_token_s=641e-6,
    constant_s=0.0225,
    per_decode_context_s=3.3e-6,
)
RT_RPS, SURGE, PERIOD_S = 1.2, 4.0, 400.0
HISTORY_S = 200.0
MOST_S = 2500.0
IN_FLIGHT = 16
TARGETS = Targets(ttft_s=4.0, tpot_s=0.5)


class Batch(NamedTuple):
    """What is made after the history."""

    lines: list[tuple[int, int]]
    asked_s: int
    gap_s: float
    """Until the next one."""


class Kept(NamedTuple):
    """What became of one."""

    window_s: int
    is_kept: bool
    said_late_s: float | None
    """How long before its window's end it was first said that it will be late."""
    forecast_error: float | None
    """Of the time that was left when it was made; None: a later batch went before it."""


class Scene:
    """One seed's traffic and batches."""

    def __init__(self, seed: int, directory: Path, *, has_surge: bool) -> None:
        self.seed = seed
        rng = np.random.default_rng(seed)
        phase = rng.uniform(0, 2 * math.pi)
        made = [self._batch(rng) for _ in range(4)]
        surge_s = HISTORY_S + sum(batch.gap_s for batch in made[:3]) if has_surge else MOST_S
        rows, now_s = ["t,prompt_tokens,output_tokens"], 0.0
        while now_s < MOST_S:
            rate = RT_RPS * (1 + math.sin(2 * math.pi * now_s / PERIOD_S + phase) / 3)
            rate *= SURGE if now_s > surge_s else 1.0
            now_s += rng.exponential(1 / rate)
            rows.append(f"{now_s},{rng.integers(64, 257)},{rng.integers(16, 65)}")
        self.trace = directory / f"rt-{seed}-{has_surge}.csv"
        self.trace.write_text("\n".join(rows))
        self.batches = made
        self.history = self._lines(rng, 400)

    @staticmethod
    def _lines(rng: np.random.Generator, num_lines: int) -> list[tuple[int, int]]:
        outputs = np.minimum(96, 1 + rng.exponential(30.0, num_lines)).astype(int).tolist()
        return [(int(rng.integers(40, 200)), output) for output in outputs]

    def _batch(self, rng: np.random.Generator) -> Batch:
        lines = self._lines(rng, int(rng.integers(80, 240)))
        return Batch(lines, int(rng.choice([60, 120, 600])), float(rng.uniform(20, 60)))

    def play(self, windows_s: list[int] | None) -> list[Kept]:
        """Return what became of the four: promised, or plain work with these windows."""
        config = HybridConfig(
            rt=str(self.trace),
            rt_max_tokens=64,
            be="closed:12",
            be_lengths="uniform:128-256,32-96",
            duration_s=MOST_S,
            margin_s=1.0,
            seed=self.seed,
            hardware=SLOW,
            targets=TARGETS,
            capacity_tokens=20_000,
        )
        with (
            tempfile.TemporaryDirectory() as directory,
            server(Path(directory) / "store", config, max_in_flight=IN_FLIGHT) as made,
        ):
            made.is_plain = windows_s is not None

            async def work() -> list[Kept]:
                loop = asyncio.get_running_loop()
                said_s: dict[str, float] = {}
                batches: list[BatchRecord] = []

                def look() -> None:
                    for batch in batches:
                        forecast = made.find(batch).forecast
                        if forecast is not None and not forecast.is_in_time:
                            said_s.setdefault(batch.id, batch.expires_s - made.clock())

                async def wait(until_s: float) -> None:
                    while loop.time() < until_s and not (until_s == math.inf and made.is_idle()):
                        await asyncio.sleep(1.0)
                        look()

                async with made.serving():
                    made.make(self.history, 86_400, accepts_late=True)
                    await wait(HISTORY_S)
                    for number, (lines, asked_s, gap_s) in enumerate(self.batches):
                        if windows_s is None:
                            batches.append(made.promise(lines, asked_s))
                        else:
                            batches.append(made.make(lines, windows_s[number], accepts_late=True))
                        await wait(loop.time() + gap_s)
                    await wait(math.inf)
                assert loop.time() < MOST_S
                return [
                    _kept(batch, made.find(batch), batches, said_s.get(batch.id))
                    for batch in batches
                ]

            found: list[Kept] = run_virtually(work())
            self.rt_in_time = _in_time(made.simulation.outcomes, made.simulation.now_s)
            return found


def _kept(
    batch: BatchRecord, ended: BatchRecord, batches: list[BatchRecord], said_s: float | None
) -> Kept:
    assert ended.ended_s is not None
    is_overtaken = any(
        batch.created_s < other.created_s < ended.ended_s and other.expires_s < batch.expires_s
        for other in batches
    )
    error = None
    if batch.forecast is not None and not is_overtaken and ended.status == "completed":
        error = (batch.forecast.ends_s - ended.ended_s) / max(1, ended.ended_s - batch.created_s)
    is_kept = ended.status == "completed" and ended.ended_s <= batch.expires_s
    return Kept(batch.expires_s - batch.created_s, is_kept, said_s, error)


def _in_time(outcomes: object, now_s: float) -> float:
    assert isinstance(outcomes, dict) and TARGETS.ttft_s is not None
    firsts = [
        bool(o.token_times_s) and o.token_times_s[0] - o.arrival_s <= TARGETS.ttft_s
        for key, o in outcomes.items()
        if key.frontend_id == FrontendId(0) and o.arrival_s < now_s - TARGETS.ttft_s
    ]
    return float(np.mean(firsts))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    errors: list[float] = []
    print_head(
        *("seed", "windows promised, s", "kept", "kept as plain work", "rt in time", "and plain"),
        *("kept outside", "of the others, said before", "seconds before the end"),
    )
    first = arguments.first_seed
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(first, first + arguments.seeds):
            scene = Scene(seed, Path(directory), has_surge=False)
            promised = scene.play(None)
            in_time = scene.rt_in_time
            errors += [k.forecast_error for k in promised if k.forecast_error is not None]
            plain = scene.play([each.window_s for each in promised])
            plain_in_time = scene.rt_in_time
            outside = Scene(seed, Path(directory), has_surge=True).play(None)
            late = [each for each in outside if not each.is_kept]
            said_s = [each.said_late_s for each in late if each.said_late_s is not None]
            print_row(
                *(str(seed), ", ".join(str(each.window_s) for each in promised)),
                *(f"{sum(k.is_kept for k in each)} of {len(each)}" for each in (promised, plain)),
                *(f"{in_time:.1%}", f"{plain_in_time:.1%}"),
                *(f"{len(outside) - len(late)} of {len(outside)}", f"{len(said_s)} of {len(late)}"),
                ", ".join(f"{seconds:.0f}" for seconds in said_s),
            )
    sizes = np.abs(errors)
    print(
        f"\nforecasts at creation, {len(errors)}: median error {np.median(sizes):.1%}, p90"
        f" {np.quantile(sizes, 0.9):.1%}, mean {np.mean(errors):+.1%} (positive: done before)"
    )


if __name__ == "__main__":
    main()
