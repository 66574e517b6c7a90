"""The real RouterCore under a virtual clock, with a simulated worker."""

from lightserve.sim.class_report import Targets
from lightserve.sim.hardware import ProfiledHardware
from lightserve.sim.hybrid import HybridConfig, run_hybrid
from lightserve.sim.hybrid_report import HybridReport
from lightserve.sim.report import Report
from lightserve.sim.run import SimulationConfig, make_workload, run

__all__ = [
    "HybridConfig",
    "HybridReport",
    "ProfiledHardware",
    "Report",
    "SimulationConfig",
    "Targets",
    "make_workload",
    "run",
    "run_hybrid",
]
