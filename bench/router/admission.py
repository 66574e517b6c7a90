"""CPU time of the admission decision (T14): `python -m bench.router.admission`.

The real router core with 256 live and 10,000 queued requests (lengths of ShareGPT, forty clients)
in a pool that is just too small for more, one plan per step as in a server. What is measured is
the admission rule's part of each plan: its round and every answer, in CPU time of the thread.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np

from lightserve.config import ServeConfig
from lightserve.router.admission.base import AdmissionRound, AdmissionRule, PoolView
from lightserve.router.admission.registry import ADMISSION_RULES
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.request import Request
from lightserve.sim.offline import OfflineConfig, OfflineRun
from lightserve.sim.workload import Workload, load_workload
from lightserve.types import RequestClass, StepId

TRACE = str(Path(__file__).parents[1] / "traces" / "sharegpt_lengths.csv.gz")
CAPACITY_TOKENS = 62_000
NUM_LIVE, NUM_QUEUED, NUM_CLIENTS, NUM_WARM_UP = 256, 10_000, 40, 1000
P50_TARGET_MS, P99_TARGET_MS = 0.5, 1.5


class TimedRule:
    """Another rule, and how long each of its rounds took."""

    def __init__(self, rule: AdmissionRule) -> None:
        self._rule = rule
        self.rounds_s: list[float] = []
        self.num_live: list[int] = []

    @property
    def forecast_peak(self) -> int | None:
        """See `AdmissionRule.forecast_peak`."""
        return self._rule.forecast_peak

    def begin(self, live: Collection[Request], pool: PoolView, step_id: StepId) -> TimedRound:
        """Start a round, and the clock."""
        start_s = time.thread_time()
        inner = self._rule.begin(live, pool, step_id)
        self.rounds_s.append(time.thread_time() - start_s)
        self.num_live.append(len(live))
        return TimedRound(inner, self.rounds_s)


class TimedRound:
    """See `TimedRule`."""

    def __init__(self, inner: AdmissionRound, rounds_s: list[float]) -> None:
        self._inner = inner
        self._rounds_s = rounds_s

    def admit(self, request: Request) -> bool:
        """Pass on the answer, and add its time to the round's."""
        start_s = time.thread_time()
        answer = self._inner.admit(request)
        self._rounds_s[-1] += time.thread_time() - start_s
        return answer

    def steps_refused(self, request: Request) -> int:
        """See `AdmissionRound.steps_refused`."""
        return self._inner.steps_refused(request)


def measure(request_class: RequestClass, num_steps: int) -> tuple[float, float, float]:
    """Return p50 and p99 in ms of the rounds of a run, and the mean number of live requests."""
    rows = _workload()
    timed: list[TimedRule] = []

    def rule_of(lengths: OutputLengths) -> AdmissionRule:
        timed.append(TimedRule(ADMISSION_RULES["risk"](ServeConfig(), lengths, 0)))
        return timed[0]

    config = OfflineConfig(
        capacity_tokens=CAPACITY_TOKENS,
        admission="risk",
        policy="chunked",
        request_class=request_class,
        num_warm_up=NUM_WARM_UP,
        steps_at_once=False,
        keeps_timeline=False,
    )
    run = OfflineRun(rows, config, rule_of=rule_of)
    run.step()
    gc.collect()
    gc.freeze()  # the queue is no garbage to look through while times are taken
    for _ in range(num_steps):
        run.step()
    gc.unfreeze()
    [rule] = timed
    full = slice(num_steps // 4, None)  # the batch has filled up
    p50, p99 = np.percentile(rule.rounds_s[full], [50, 99]) * 1e3
    return float(p50), float(p99), float(np.mean(rule.num_live[full]))


def _workload() -> Workload:
    rows = load_workload(TRACE, num_requests=NUM_WARM_UP + NUM_QUEUED, rng=np.random.default_rng(0))
    clients = np.random.default_rng(1).integers(0, NUM_CLIENTS, len(rows))
    return replace(rows, clients=tuple(map(str, clients)))


def main() -> None:
    """Print p50 and p99 of the best of several runs, for both classes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=800)
    args = parser.parse_args()
    start_s = time.perf_counter()
    print("| class | live, mean | p50 ms (≤0.5) | p99 ms (≤1.5) | |")
    print("| --- | --- | --- | --- | --- |")
    for request_class in RequestClass:
        runs = [measure(request_class, args.steps) for _ in range(args.runs)]
        p50, p99, num_live = min(runs)
        verdict = "met" if p50 <= P50_TARGET_MS and p99 <= P99_TARGET_MS else "missed"
        print(f"| {request_class.value} | {num_live:.0f} | {p50:.2f} | {p99:.2f} | {verdict} |")
    print(f"\n{time.perf_counter() - start_s:.0f} s, best of {args.runs} runs")


if __name__ == "__main__":
    main()
