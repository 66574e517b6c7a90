"""Whether a better forecast of lengths would do: `python -m bench.memory.known_lengths`.

The second halves that miss their bar, with the *true* conditional distribution of lengths in place
of a history: the rows are shuffled, so that nothing drifts, and the forecast draws from the lengths
of those very rows, P(l | l > generated), with no error of a history added. What such a run takes
over the optimum no forecast that knows requests only by their distribution takes off, with this
admission. Then the quantile is not learnt either but the one constant that does best in hindsight;
and at last lengths are known to within a factor, as if a prompt said something of its answer.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from bench.memory.past_future import LOADS, NUM_WARM_UP, second_half
from bench.table import print_head, print_row
from lightserve.router.admission.accepted_risk import AcceptedRisk
from lightserve.router.admission.base import AdmissionRule, PoolView
from lightserve.router.admission.peak import PeakRound
from lightserve.router.admission.risk import RiskAdmission, peak_at
from lightserve.router.future_memory import IntArray
from lightserve.router.output_lengths import LengthArray, UniformArray
from lightserve.router.request import Request
from lightserve.sim.offline import OfflineConfig, OfflineRun
from lightserve.sim.traffic import Workload
from lightserve.types import RequestClass

BARS = {"sharegpt 30k": 3.0, "reason 120k": 3.0}
"""Steps over the optimum in percent, of the loads that miss them."""
MOST_EVICTED_PCT = 2.0
LEVELS = (0.75, 1.0, 1.25, 1.5, 2.0)
"""Quantiles of the peak in standard deviations, of which the best in hindsight is taken."""
POOLED, ARRIVAL = "pooled", "arrival"
"""What is known of a request: only that it is one of them; its client and the length of its prompt
to within a factor of two, which is all that a router sees. Otherwise a number: within which factor
its length is."""
FACTORS = ("2", "1.25")


class TrueLengths:
    """Draws from what is, by group, where `OutputLengths` draws from what was. Pure."""

    def __init__(self, lengths: Mapping[str, Sequence[int]]) -> None:
        """`lengths`: of the requests of each group, all that there are."""
        self._of_group = {name: np.sort(np.array(of)) for name, of in lengths.items()}

    def sample(
        self,
        generated: IntArray,
        max_tokens: IntArray,
        uniforms: UniformArray,
        keys: Sequence[tuple[RequestClass, str]],
    ) -> LengthArray:
        """Return lengths drawn from P(l | l > generated, group), as `OutputLengths.sample`."""
        drawn = np.empty(uniforms.shape, dtype=np.int32)
        for index, (_, group) in enumerate(keys):
            ordered = self._of_group[group]
            first = int(np.searchsorted(ordered, generated[index], side="right"))
            places = first + ((len(ordered) - first) * uniforms[index]).astype(np.int64)
            drawn[index] = ordered[np.minimum(places, len(ordered) - 1)]
        np.maximum(drawn, (generated + 1).astype(np.int32)[:, None], out=drawn)
        return np.minimum(drawn, max_tokens.astype(np.int32)[:, None])


class _FixedLevel(AcceptedRisk):
    """A quantile that learns nothing."""

    def __init__(self, level: float) -> None:
        super().__init__({})
        self._fixed = level

    def level(self, request_class: RequestClass) -> float:
        del request_class
        return self._fixed


class _Knowing(RiskAdmission):
    """`risk` with a distribution that has no error; notes how wide the forecasts are."""

    def __init__(self, lengths: Any, accepted: AcceptedRisk, *, seed: int) -> None:
        super().__init__(lengths, accepted, seed=seed)
        self.deviations: list[float] = []
        """Of the peaks of a batch over its futures, in tokens, each time a request was weighed."""

    def _tilt(self) -> UniformArray:
        return self._uniforms

    def begin(self, live: Collection[Request], pool: PoolView) -> PeakRound:
        def bound(peaks: IntArray, request: Request) -> int:
            self.deviations.append(float(peaks.std()))
            return peak_at(peaks, self._accepted.level(request.request_class))

        return PeakRound(live, self.totals, bound, pool.num_slots, is_capped=True)


class Case(NamedTuple):
    """A run."""

    load: str
    rule: str = "risk"
    """risk: the server's default, with a history; oracle: the optimum; known: this module's."""
    is_shuffled: bool = True
    level: float | None = None
    """Of the quantile; None: learnt."""
    known: str = POOLED
    """Of each request: see `POOLED`."""
    seed: int = 0


class Found(NamedTuple):
    """What a run came to."""

    steps: int
    evicted_pct: float
    deviation_pct: float
    """Of forecast peaks, of the pool; nan where none was noted."""


class _Run(OfflineRun):
    def __init__(self, workload: Workload, config: OfflineConfig, case: Case) -> None:
        self._case = case
        self.rule: _Knowing | None = None
        super().__init__(workload, config)

    def _make_admission(self) -> AdmissionRule:
        if self._case.rule != "known":
            return super()._make_admission()
        by_group: dict[str, list[int]] = {}
        rows = self._rows
        for group, length in zip(rows.clients, rows.output_tokens.tolist(), strict=True):
            by_group.setdefault(group, []).append(length)
        level = self._case.level
        accepted = self._risk if level is None else _FixedLevel(level)
        self.rule = _Knowing(TrueLengths(by_group), accepted, seed=self._case.seed)
        return self.rule


def play(case: Case) -> Found:
    """Run one case."""
    load = LOADS[case.load]
    rows = second_half(load)
    if case.is_shuffled:
        order = np.random.default_rng(case.seed).permutation(len(rows) - NUM_WARM_UP) + NUM_WARM_UP
        rows = reordered(rows, np.concatenate([np.arange(NUM_WARM_UP), order]))
    if case.rule == "known":
        rows = grouped(rows, case.known)
    config = OfflineConfig(
        capacity_tokens=load.capacity_tokens,
        admission="oracle" if case.rule == "oracle" else "risk",
        num_warm_up=NUM_WARM_UP,
        keeps_timeline=False,
        seed=case.seed,
    )
    run = _Run(rows, config, case)
    report = run.run(None)
    widths = [] if run.rule is None else run.rule.deviations
    width_pct = 100.0 * float(np.mean(widths)) / load.capacity_tokens if widths else math.nan
    return Found(report.decode_steps, report.evicted_requests_pct, width_pct)


def reordered(rows: Workload, order: IntArray) -> Workload:
    """Return rows in another order; when they come stays."""
    return Workload(
        rows.prompt_tokens[order],
        rows.output_tokens[order],
        rows.max_tokens[order],
        tuple(rows.clients[index] for index in order),
        rows.arrival_s,
    )


def grouped(rows: Workload, known: str) -> Workload:
    """Return rows whose clients say which of them cannot be told apart; see `POOLED`."""
    groups = [POOLED] * len(rows)
    if known == ARRIVAL:
        prompts = np.log2(rows.prompt_tokens).astype(int).tolist()
        groups = [f"{client} {size}" for client, size in zip(rows.clients, prompts, strict=True)]
    elif known != POOLED:
        sizes = (np.log(rows.output_tokens) / math.log(float(known))).astype(int).tolist()
        groups = list(map(str, sizes))
    return Workload(
        rows.prompt_tokens, rows.output_tokens, rows.max_tokens, tuple(groups), rows.arrival_s
    )


def best_in_hindsight(runs: Sequence[Found]) -> Found:
    """Return the one of fewest steps that evicts no more than may be, or the least that it does."""
    allowed = [run for run in runs if run.evicted_pct <= MOST_EVICTED_PCT]
    if allowed:
        return min(allowed, key=lambda run: run.steps)
    return min(runs, key=lambda run: run.evicted_pct)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    start_s = time.perf_counter()
    kinds: dict[str, list[Case]] = {}
    for name in BARS:
        kinds[f"{name}|as it comes, history"] = [Case(name, is_shuffled=False)]
        kinds[f"{name}|shuffled, history"] = [Case(name)]
        kinds[f"{name}|shuffled, distribution known"] = [Case(name, "known")]
        kinds[f"{name}|the same, best quantile in hindsight"] = [
            Case(name, "known", level=level) for level in LEVELS
        ]
        kinds[f"{name}|shuffled, that of its client and prompt length"] = [
            Case(name, "known", known=ARRIVAL)
        ]
        for factor in FACTORS:
            kinds[f"{name}|shuffled, each length known to within {factor} times"] = [
                Case(name, "known", known=factor)
            ]
    optima = [Case(name, "oracle", shuffled) for name in BARS for shuffled in (False, True)]
    cases = [*optima, *itertools.chain.from_iterable(kinds.values())]
    with ProcessPoolExecutor(args.jobs) as pool:
        found = dict(zip(cases, pool.map(play, cases), strict=True))
    print_head("load", "forecast", "steps over optimum %", "evicted %", "peak ±, % of pool", "")
    for kind, of_kind in kinds.items():
        name, what = kind.split("|")
        run = best_in_hindsight([found[case] for case in of_kind])
        optimum = found[Case(name, "oracle", of_kind[0].is_shuffled)]
        over_pct = 100.0 * (run.steps / optimum.steps - 1.0)
        is_met = over_pct <= BARS[name] and run.evicted_pct <= MOST_EVICTED_PCT
        width = "" if math.isnan(run.deviation_pct) else f"{run.deviation_pct:.1f}"
        print_row(
            *(name, what, f"{over_pct:+.2f} (≤{BARS[name]:g})", f"{run.evicted_pct:.2f} (≤2)"),
            *(width, "met" if is_met else "missed"),
        )
    print("\nEvery quantile, distribution known: steps over optimum % @ evicted %\n")
    for name in BARS:
        optimum = found[Case(name, "oracle", is_shuffled=True)]
        runs = [found[Case(name, "known", level=level)] for level in LEVELS]
        points = [f"{100 * (r.steps / optimum.steps - 1):+.2f} @{r.evicted_pct:.2f}" for r in runs]
        print_row(name, *points)
    print(f"\n{time.perf_counter() - start_s:.0f} s with --jobs {args.jobs}")


if __name__ == "__main__":
    main()
