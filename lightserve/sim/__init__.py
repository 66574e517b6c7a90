"""The real RouterCore under a virtual clock, with a simulated worker."""

from lightserve.sim.report import Report
from lightserve.sim.run import SimulationConfig, make_workload, run

__all__ = ["Report", "SimulationConfig", "make_workload", "run"]
