"""`sim.run(config) -> Report`: a simulation from one configuration, as `lightserve simulate`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lightserve.errors import ConfigError
from lightserve.sim.offline import OfflineConfig, run_offline
from lightserve.sim.report import Report
from lightserve.sim.workload import Workload, load_workload


@dataclass(frozen=True, kw_only=True)
class SimulationConfig(OfflineConfig):
    """A cell of a table with the workload by name; see `load_workload`."""

    workload: str
    """dist1, dist2, dist3, uniform:P1-P2:O1-O2 or a trace file, joined by + for a drift."""
    num_requests: int = 3000
    """Per part of the workload, the warm-up not counted."""
    arrivals: str = "queued"
    """queued, trace, poisson:RATE (per second) or closed:CLIENTS."""


def run(config: SimulationConfig, *, progress: Callable[[int, int], None] | None = None) -> Report:
    """Run a simulation to its end; the same configuration gives the same report.

    Args:
        config: all of it.
        progress: told how many requests have just finished, and how many there are.

    Raises:
        ConfigError: a workload that cannot be, a request that can never fit, a wrong option.
    """
    closed = re.fullmatch(r"closed:([1-9]\d*)", config.arrivals)
    workload = make_workload(config, "queued" if closed else config.arrivals)
    num_rows = len(workload) - config.num_warm_up
    if num_rows <= 0:
        raise ConfigError(
            f"--warm-up-requests must be below the {len(workload)} rows of --workload,"
            f" got {config.num_warm_up}"
        )
    if closed:
        config = dataclasses.replace(config, num_clients=int(closed[1]))
    tell = None if progress is None else lambda num_finished: progress(num_finished, num_rows)
    return run_offline(workload, config, progress=tell)


def make_workload(config: SimulationConfig, arrivals: str) -> Workload:
    """Return the configured rows, those of the warm-up first."""
    return load_workload(
        config.workload,
        num_requests=config.num_requests + config.num_warm_up,
        rng=np.random.default_rng(config.seed),
        cut_outputs=not config.paper_artifact,
        arrivals=arrivals,
    )
