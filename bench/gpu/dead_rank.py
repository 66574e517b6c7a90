"""A rank that dies, or hangs, while the other's GPU waits for it in an all-reduce.

What `bench/faults/dead_ranks.py` shows on CPUs, over NCCL.
"""

from __future__ import annotations

import signal

import torch

from bench.faults.dead_ranks import fault_in_all_reduce
from bench.gpu.context import Bench

STEP_TIMEOUT_S = 5.0
SECONDS = {signal.SIGKILL: 3.0, signal.SIGSTOP: STEP_TIMEOUT_S + 3.0}
"""Most seconds until the other rank is gone: who dies is seen at once, who hangs after the step's
time limit; the router looks once a second."""


def run(bench: Bench) -> None:
    """Kill a rank, stop another."""
    if bench.rehearse:
        bench.rows.skip("a rank that dies", "its rehearsal is bench/faults/dead_ranks.py")
        return
    if torch.cuda.device_count() < 2:
        bench.rows.skip("a rank that dies", f"{torch.cuda.device_count()} GPU")
        return
    for signum, most_s in SECONDS.items():
        fault = fault_in_all_reduce(signum, step_timeout_s=STEP_TIMEOUT_S, decodes=True)
        name = f"{signum.name} to a rank of 2 in an all-reduce"
        note = f"ready again {fault.ready_again_s:.1f} s later, the request: {fault.outcome}"
        bench.rows.figure(f"{name}: detected", fault.detected_s, "s", at_most=most_s, note=note)
        bench.rows.claim(f"{name}: nothing left", fault.num_orphans == 0, "")
