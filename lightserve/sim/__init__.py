"""The real Scheduler under a virtual clock, with a simulated worker."""

from lightserve.sim.hybrid import HybridConfig, run_hybrid
from lightserve.sim.offline import SimulationConfig, make_workload, run
from lightserve.sim.report import HybridReport, Report, Targets
from lightserve.sim.simulation import RouterTimes
from lightserve.sim.virtual_gpus import ProfiledHardware, read_hardware

__all__ = [
    "HybridConfig",
    "HybridReport",
    "ProfiledHardware",
    "Report",
    "RouterTimes",
    "SimulationConfig",
    "Targets",
    "make_workload",
    "read_hardware",
    "run",
    "run_hybrid",
]
