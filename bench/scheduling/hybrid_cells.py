"""One run of the hybrid workload (mechanisms, section 6), and the file that remembers it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from lightserve.sim import HybridConfig, HybridReport, run_hybrid

LENGTHS = str(Path(__file__).parents[1] / "traces/sharegpt_lengths.csv.gz")
LINK_TOKENS_PER_S = 1 / 21e-6
"""What the virtual hardware copies, one way at a time."""


class Setting(NamedTuple):
    """What is tuned."""

    policy: str
    budget: int = 512
    """New tokens in a step at most."""
    max_be: int = 0
    """Best-effort requests that run at once at most; 0: no limit."""
    admission: str = "risk"
    be_order: str = "auto"
    """Of best-effort requests that wait."""

    def __str__(self) -> str:
        limit = self.max_be or "any"
        order = "" if self.be_order == "auto" else f"/{self.be_order}"
        return f"{self.policy} {self.budget}/{limit}/{self.admission}{order}"


@dataclass(frozen=True)
class Cell:
    """One run."""

    setting: Setting
    rate: float
    """Real-time arrivals per second."""
    seed: int = 0
    duration_s: float = 90.0
    margin_s: float = 30.0
    capacity_tokens: int = 60_000
    max_waiting: int = 0
    """Real-time requests that may wait; more are refused. 0: as many as come."""
    host_kv_tokens: int = -1

    @property
    def key(self) -> str:
        """All of it, as text."""
        return json.dumps(dataclasses.astuple(self))


class Figures(NamedTuple):
    """What a run came to: of real-time requests if nothing else is said."""

    ttft_pct: float
    mtpot_pct: float
    goodput: float
    """Requests per second that met all targets."""
    latency_ms: float
    """Normalised: per token."""
    be_rps: float
    be_tps: float
    evictions: float
    evictions_beside_be: float
    recomputed: float
    """Tokens of both classes whose KV was given up, in the whole run."""
    link_pct: float
    """Of the time, the link was copying."""
    missed_e2e_s: float
    """p99 over requests that missed a target."""
    ttft_ms_p99: float
    arrivals: float
    """Within the margins."""


def play(cell: Cell) -> Figures:
    """Run one cell."""
    policy, budget, max_be, admission, be_order = cell.setting
    options: dict[str, float | str] = {"max_be_seqs": max_be, "be_order": be_order}
    if admission.startswith("aggressive"):
        options["watermark"] = float(admission.split()[1])
    if cell.max_waiting:
        options["rt_max_waiting_requests"] = cell.max_waiting
    report = run_hybrid(
        HybridConfig(
            rt=f"poisson:{cell.rate}",
            rt_lengths=LENGTHS,
            be="closed:256",
            be_lengths="uniform:512-1024,32-128",
            duration_s=cell.duration_s,
            margin_s=cell.margin_s,
            capacity_tokens=cell.capacity_tokens,
            host_kv_tokens=cell.host_kv_tokens,
            policy=policy,
            budget_tokens=budget,
            admission=admission.split()[0],
            serve_options=options,
            seed=cell.seed,
        )
    )
    return _figures(report, cell.duration_s)


def _figures(report: HybridReport, duration_s: float) -> Figures:
    rt, be, kv = report.rt, report.be, report.kv
    return Figures(
        100.0 * (rt.ttft_attainment or 0.0),
        100.0 * (rt.mtpot_attainment or 0.0),
        rt.goodput_rps,
        rt.normalized_latency_ms or 0.0,
        be.throughput_rps,
        be.throughput_tps,
        rt.evictions,
        kv.rt_evictions_beside_be,
        report.kv.recomputed_tokens,
        100.0 * kv.copied_tokens / LINK_TOKENS_PER_S / duration_s,
        rt.missed_e2e_s_p99 or 0.0,
        rt.ttft_ms_p99 or 0.0,
        rt.arrivals,
    )


class Runner:
    """Plays cells that the file does not know yet, several at a time, and adds them to it."""

    def __init__(self, path: Path, *, num_jobs: int) -> None:
        """`path` is a file of JSON lines, made at the first run."""
        self._path = path
        self._num_jobs = num_jobs
        self._known: dict[str, Figures] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                key, values = json.loads(line)
                self._known[key] = Figures(*values)

    def play(self, cells: Sequence[Cell]) -> list[Figures]:
        """Return the figures of cells, in order."""
        missing = {cell.key: cell for cell in cells if cell.key not in self._known}
        if missing:
            with ProcessPoolExecutor(self._num_jobs, mp_context=get_context("spawn")) as pool:
                futures = {pool.submit(play, cell): key for key, cell in missing.items()}
                for future in as_completed(futures):
                    self._remember(futures[future], future.result())
        return [self._known[cell.key] for cell in cells]

    def everything(self) -> dict[Cell, Figures]:
        """Return all that the file knows."""
        return {_cell(json.loads(key)): figures for key, figures in self._known.items()}

    def _remember(self, key: str, figures: Figures) -> None:
        self._known[key] = figures
        with self._path.open("a") as file:
            file.write(json.dumps([key, figures]) + "\n")


def _cell(values: list[Any]) -> Cell:
    setting, *others = values
    return Cell(Setting(*setting), *others)


def mean(figures: Sequence[Figures]) -> Figures:
    """Return the means over runs; evictions are summed, the p99 of misses is the largest."""
    means = Figures(*(fmean(column) for column in zip(*figures, strict=True)))
    return means._replace(
        evictions=sum(run.evictions for run in figures),
        evictions_beside_be=sum(run.evictions_beside_be for run in figures),
        missed_e2e_s=max(run.missed_e2e_s for run in figures),
    )
