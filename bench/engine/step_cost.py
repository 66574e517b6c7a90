"""How well a step's time is predicted on this machine.

    python -m bench.engine.step_cost [--seconds 60] [--threads 1 [--cpu-time]]
                              [--only bundled,random]

Steps of log-uniform random shapes run on a real worker engine: some are fitted, others, drawn from
another seed, are predicted. All of them run in turns, several rounds, and medians count: on a
machine with other work, what one round says of a step is worth little.

What no model can beat stands in a line of its own: the same shapes, measured in the odd rounds,
as predictions of the even ones. `--cpu-time` takes the thread's CPU time instead of the clock's,
which leaves out what other processes took, though not what they did to the caches.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.engine.throughput import write_model
from bench.table import print_head, print_row
from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.config import ServeConfig
from lightserve.cost.model import FitError, StepModel, StepSample, StepShape, fit
from lightserve.worker.build import build_runner
from lightserve.worker.profiling import (
    Row,
    StepTimer,
    limits_of,
    random_steps,
    shape_of_rows,
)
from lightserve.worker.threads import set_threads

Predictor = Callable[[StepShape], float]
MODEL = "as served"
MEDIAN_TARGET, P95_TARGET = 0.08, 0.25


def error_of(predict: Predictor, samples: Sequence[StepSample]) -> FitError:
    """Return the relative errors of predictions."""
    off = [abs(predict(shape) / seconds - 1.0) for shape, seconds in samples]
    return FitError(float(np.median(off)), float(np.quantile(off, 0.95)))


class Measured(NamedTuple):
    """Times of steps that ran in turns."""

    fitted: list[StepSample]
    others: list[StepSample]
    again: FitError
    """Of all of them, odd rounds as predictions of even ones."""


def time_step(timer: StepTimer, rows: list[Row], *, is_cpu_time: bool) -> float:
    """Return the seconds of one step."""
    timer.prepare(rows)
    start_s = time.process_time()
    seconds = timer.run(rows)
    return time.process_time() - start_s if is_cpu_time else seconds


def measure(config: ServeConfig, seconds: float, rounds: int, *, is_cpu_time: bool) -> Measured:
    """Return samples to fit and samples to predict, interleaved while they ran."""
    set_threads(config)
    runner = build_runner(config)
    timer, limits = StepTimer(runner), limits_of(runner, config)
    sources = [random_steps(limits, seed) for seed in (1, 2)]
    steps: list[list[list[Row]]] = [[], []]
    times: list[list[list[float]]] = [[], []]
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < seconds / rounds:
        for side, source in enumerate(sources):
            rows = next(source)
            steps[side].append(rows)
            times[side].append([time_step(timer, rows, is_cpu_time=is_cpu_time)])
    for _ in range(rounds - 1):
        for index in range(len(steps[0])):
            for side in range(2):
                step_s = time_step(timer, steps[side][index], is_cpu_time=is_cpu_time)
                times[side][index].append(step_s)
    fitted, others = (
        [StepSample(shape_of_rows(r), float(np.median(t))) for r, t in zip(rows, ts, strict=True)]
        for rows, ts in zip(steps, times, strict=True)
    )
    of_all = [ts for side in times for ts in side]
    off = [abs(np.median(ts[1::2]) / np.median(ts[::2]) - 1.0) for ts in of_all]
    return Measured(fitted, others, FitError(float(np.median(off)), float(np.quantile(off, 0.95))))


def report_worker(name: str, measured: Measured) -> list[dict[str, object]]:
    """Return two lines: errors of the model on steps that were not fitted, and of a repetition."""
    fitted, others, again = measured
    num_measured = len(fitted) + len(others)
    seen = {sample.shape for sample in fitted}
    others = [sample for sample in others if sample.shape not in seen]
    model = StepModel(fit(fitted))
    mixed = [s for s in others if s.shape.num_chunks and s.shape.num_decodes]
    of_all, of_mixed = error_of(model.seconds, others), error_of(model.seconds, mixed)
    return [
        {
            "workers": name,
            "model": MODEL,
            "shapes": len(others),
            "median %": 100 * of_all.median,
            "p95 %": 100 * of_all.p95,
            "mixed median %": 100 * of_mixed.median,
            "mixed p95 %": 100 * of_mixed.p95,
            "pivot": model.coefficients.knee,
        },
        {
            "workers": name,
            "model": "none: the same shapes again",
            "shapes": num_measured,
            "median %": 100 * again.median,
            "p95 %": 100 * again.p95,
        },
    ]


def print_table(lines: Sequence[dict[str, object]]) -> None:
    """Print Markdown."""
    heads = list(lines[0])
    print_head(*heads)
    for line in lines:
        cells = [
            "" if v is None else f"{v:.1f}" if isinstance(v, float) else str(v)
            for v in map(line.get, heads)
        ]
        print_row(*cells)


def main() -> None:
    """Run the parts that were asked for; exit code 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0, help="per model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--only", default="bundled,random")
    parser.add_argument("--cpu-time", action="store_true", help="with --threads 1")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.cpu_time and arguments.threads != 1:
        parser.error("--cpu-time needs --threads 1: CPU time of several threads adds up")
    if arguments.rounds < 2:
        parser.error("--rounds: at least 2, for shapes to be measured again")
    parts = arguments.only.split(",")
    lines: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as directory:
        for name, path in (("bundled", BUNDLED_MODEL_DIR), ("random", Path(directory))):
            if name not in parts:
                continue
            if name == "random":
                write_model(path)
            config = ServeConfig(model=str(path), num_threads=arguments.threads, kv_memory="512MiB")
            measured = measure(
                config, arguments.seconds, arguments.rounds, is_cpu_time=arguments.cpu_time
            )
            lines += report_worker(name, measured)
    if arguments.json:
        print(json.dumps(lines, indent=2))
    elif lines:
        print_table(lines)
    ours = [line for line in lines if line["model"] == MODEL]
    raise SystemExit(
        any(
            float(str(line["median %"])) > 100 * MEDIAN_TARGET
            or float(str(line["p95 %"])) > 100 * P95_TARGET
            for line in ours
        )
    )


if __name__ == "__main__":
    main()
