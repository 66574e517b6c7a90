"""Real-time requests beside a batch, in virtual time: `python -m bench.scheduling.beside_batch`.

The real store, runner and router on the virtual A100 (`support.virtual_batches`). Real-time
requests come by a Poisson process at shares of the engine's capacity, which is what 64 closed-loop
clients get; their lengths are the Azure conversations', cut to the context. Targets: 1.2 times the
p95 of the time to the first token, and 1.1 times the p95 of the gaps between tokens, of the same
arrivals alone. A request has kept them if its first token came in time, and its mean gap is not
above.

The batch is made with the shortest window that is promised. *Steady* is its rate without real-time
requests. Attainment beside it and alone is of the same arrivals: those while it ran, but for the
last 15 s.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from support.virtual_batches import run_virtually, server

from bench.table import print_head, print_row
from lightserve.sim.hybrid import HybridConfig, HybridRun
from lightserve.sim.report import Targets
from lightserve.sim.simulation import Outcome
from lightserve.sim.traffic import read_trace
from lightserve.types import FrontendId

TRACE = Path(__file__).parents[1] / "traces" / "azure2023_conv.csv.gz"
CONTEXT, MOST_OUTPUT = 4096, 512
NUM_CLIENTS = 64
TTFT_FACTOR, ITL_FACTOR = 1.2, 1.1
TAIL_S = 15.0
PROBE_S = 400.0
MOST_S = 1500.0
"""Real-time requests come for so long: a batch takes less."""
SHARES = (0.3, 0.6)


class Beside(NamedTuple):
    """What a batch came to, and what real-time requests had of it."""

    num_lines: int
    seconds: float
    window_s: int
    is_complete: bool
    outcomes: list[Outcome]


def cut_lengths(directory: Path) -> str:
    """Write the trace's lengths, cut to the context; return the file."""
    trace = read_trace(TRACE)
    prompts = np.minimum(trace.prompt_tokens, CONTEXT - MOST_OUTPUT)
    outputs = np.minimum(trace.output_tokens, MOST_OUTPUT)
    rows = [f"{p},{o}" for p, o in zip(prompts, outputs, strict=True)]
    path = directory / "conversations.csv"
    path.write_text("\n".join(["prompt_tokens,output_tokens", *rows]))
    return str(path)


def config(rt: str, lengths: str, duration_s: float, seed: int, targets: Targets) -> HybridConfig:
    """Return a run."""
    return HybridConfig(
        rt=rt,
        rt_lengths=lengths,
        rt_max_tokens=MOST_OUTPUT,
        duration_s=duration_s,
        margin_s=1.0,
        seed=seed,
        targets=targets,
    )


def real_time_of(run: HybridRun) -> list[Outcome]:
    """Return what became of real-time requests."""
    return [o for key, o in run.simulation.outcomes.items() if key.frontend_id == FrontendId(0)]


def alone(rt: str, lengths: str, duration_s: float, seed: int, targets: Targets) -> HybridRun:
    """Run real-time requests alone."""
    run = HybridRun(config(rt, lengths, duration_s, seed, targets))
    run.advance(duration_s)
    return run


def capacity_rps(lengths: str) -> float:
    """Return how many requests per second as many clients as NUM_CLIENTS get."""
    run = alone(f"closed:{NUM_CLIENTS}", lengths, 150.0, 0, Targets())
    ends = [o.token_times_s[-1] for o in real_time_of(run) if o.finish_reason is not None]
    return sum(30.0 < end_s <= 150.0 for end_s in ends) / 120.0


def targets_of(outcomes: Iterable[Outcome]) -> Targets:
    """Return targets from what requests had alone."""
    firsts, gaps = [], []
    for outcome in outcomes:
        if outcome.token_times_s:
            firsts.append(outcome.token_times_s[0] - outcome.arrival_s)
            gaps += np.diff(outcome.token_times_s).tolist()
    ttft_s, itl_s = np.percentile(firsts, 95), np.percentile(gaps, 95)
    return Targets(ttft_s=TTFT_FACTOR * float(ttft_s), tpot_s=ITL_FACTOR * float(itl_s))


def attainment(outcomes: Sequence[Outcome], targets: Targets, until_s: float) -> float:
    """Return the share of requests that came before `until_s` and kept both."""
    kept = [_has_kept(o, targets) for o in outcomes if o.arrival_s < until_s]
    return float(np.mean(kept))


def _has_kept(outcome: Outcome, targets: Targets) -> bool:
    times = outcome.token_times_s
    if outcome.finish_reason is None or not times:
        return False
    assert targets.ttft_s is not None and targets.tpot_s is not None
    mean_s = (times[-1] - times[0]) / max(1, len(times) - 1)
    return times[0] - outcome.arrival_s <= targets.ttft_s and mean_s <= targets.tpot_s


def beside(
    rt: str, lengths: str, seed: int, targets: Targets, lines: Sequence[tuple[int, int]]
) -> Beside:
    """Run a batch beside real-time requests."""
    with tempfile.TemporaryDirectory() as directory:
        run = config(rt, lengths, MOST_S, seed, targets)
        with server(Path(directory) / "store", run) as made:

            async def work() -> Beside:
                await made.serve(lambda: made.store.forecasts.pace(made.clock()) is not None)
                begun_s = asyncio.get_running_loop().time()
                batch = made.promise(lines, 60)
                await made.serve(made.is_idle)
                seconds = asyncio.get_running_loop().time() - begun_s
                assert seconds < MOST_S
                ended = made.find(batch)
                window_s = batch.expires_s - batch.created_s
                is_complete = ended.status == "completed" and ended.num_done == len(lines)
                return Beside(len(lines), seconds, window_s, is_complete, real_time_of(made))

            found: Beside = run_virtually(work())
            return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--lines", type=int, default=5000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        lengths = cut_lengths(Path(directory))
        capacity = capacity_rps(lengths)
        print(f"capacity: {capacity:.2f} requests/s\n")
        print_head(
            *(
                "load",
                "seed",
                "busy alone",
                "targets, ms",
                "kept alone",
                "kept beside",
                "window, s",
            ),
            *("took, s", "complete", "lines/s", "steady", "of steady x idle", "of steady x unused"),
        )
        first = arguments.first_seed
        for seed in range(first, first + arguments.seeds):
            rng = np.random.default_rng(1000 + seed)
            lines = [
                (int(rng.integers(64, 512)), int(rng.integers(16, 128)))
                for _ in range(arguments.lines)
            ]
            nothing = beside("poisson:0.000001", lengths, seed, Targets(), lines)
            steady = nothing.num_lines / nothing.seconds
            for share in SHARES:
                _print(share, seed, capacity * share, lengths, lines, steady=steady)


def _print(
    share: float,
    seed: int,
    rate_rps: float,
    lengths: str,
    lines: Sequence[tuple[int, int]],
    *,
    steady: float,
) -> None:
    rt = f"poisson:{rate_rps:.4f}"
    probe = alone(rt, lengths, PROBE_S, seed, Targets())
    targets = targets_of(real_time_of(probe))
    busy = probe.worker.sums.busy_s / PROBE_S
    both = beside(rt, lengths, seed, targets, lines)
    same = real_time_of(alone(rt, lengths, both.seconds + 60.0, seed, targets))
    until_s = both.seconds - TAIL_S
    rate = both.num_lines / both.seconds
    assert targets.ttft_s is not None and targets.tpot_s is not None
    print_row(
        *(f"{share:.0%}", str(seed), f"{busy:.1%}"),
        f"{targets.ttft_s * 1e3:.0f} / {targets.tpot_s * 1e3:.1f}",
        *(f"{attainment(each, targets, until_s):.1%}" for each in (same, both.outcomes)),
        *(str(both.window_s), f"{both.seconds:.0f}", str(both.is_complete)),
        *(f"{rate:.1f}", f"{steady:.1f}"),
        *(f"{rate / (steady * (1 - each)):.0%}" for each in (busy, share)),
    )


if __name__ == "__main__":
    main()
