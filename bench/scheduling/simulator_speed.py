"""How many virtual seconds the simulator plays in one, and what takes the time.

    python -m bench.scheduling.simulator_speed [--seconds 120]

The hybrid workload: 16 real-time requests/s of ShareGPT's lengths over 256 best-effort ones, 60,000
slots. CPU time of one thread; then the same run again, looked at every few milliseconds.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections import Counter
from pathlib import Path
from types import FrameType

from bench.scheduling.paper_loads import bros_load
from lightserve.sim import HybridConfig
from lightserve.sim.hybrid import HybridRun

WARM_S = 10.0
"""Virtual seconds before it counts: the pool fills up."""
SAMPLE_S = 0.004
PARTS = {
    "admit": "forecasts of memory",
    "phases": "the policy",
    "best_first": "which best-effort request next",
    "plan": "planning besides",
    "acquire_one_each": "slots of decodes",
    "commit": "booking besides",
    "on_result": "results",
    "on_message": "messages",
    "_start_next": "the worker",
    "_deliver": "news to clients",
}
"""By function: the innermost of these on the stack counts."""


def _run(end_s: float) -> HybridRun:
    """Return a run that is warm; what comes until its end is there from the start."""
    load = bros_load(Path(), 0) | {"be": "closed:256", "duration_s": end_s, "margin_s": 1.0}
    run = HybridRun(HybridConfig(**load))
    run.advance(WARM_S)
    return run


def sampled(run: HybridRun, until_s: float) -> Counter[str]:
    """Return how many samples fell into which part."""
    counts: Counter[str] = Counter()

    def note(_signal: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_name not in PARTS:
            frame = frame.f_back
        counts[PARTS[frame.f_code.co_name] if frame else "the rest"] += 1

    before = signal.signal(signal.SIGPROF, note)
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)
    try:
        run.advance(until_s)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
    return counts


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="virtual ones")
    args = parser.parse_args()
    end_s = WARM_S + args.seconds
    run = _run(end_s)
    num_before, start_s = run.worker.sums.num_steps, time.process_time()
    run.advance(end_s)
    cpu_s = time.process_time() - start_s
    num_steps = run.worker.sums.num_steps - num_before
    print(
        f"{args.seconds / cpu_s:.1f} virtual seconds per second; {num_steps} steps,"
        f" {1e3 * cpu_s / num_steps:.2f} ms each\n"
    )
    counts = sampled(_run(end_s), end_s)
    for part, count in counts.most_common():
        print(f"{count / counts.total():5.1%} {part}")


if __name__ == "__main__":
    main()
