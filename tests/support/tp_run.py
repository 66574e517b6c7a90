"""Runs sequences through models split over processes: `support.tp_run RANK SIZE DIR cpu|cuda`.

DIR holds `jobs.pt`, a list of `Job`; rank 0 writes `logits.pt`, for each job the logits of each
sequence. `run_ranks` is the parent's side.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from lightserve.kernels.select import make_kernels
from lightserve.models.config import load_model_config
from lightserve.models.weight_files import quantised_as
from lightserve.worker.build import linear_method
from lightserve.worker.tensor_parallel import join_group
from support.model_runs import NUM_DECODES, load_tiny
from support.parity import DirectDriver, run_sequences, schedule

TIMEOUT_S = 600.0


class Job(TypedDict):
    """One model and what to run through it; plain values, so that no pickled code is loaded."""

    path: str
    dtype: str
    kernels: str
    chunk: int
    """Tokens per prefill chunk; 0: whole."""
    tokens: list[Tensor]


def run_ranks(
    jobs: Sequence[Job], size: int, directory: Path, *, device: str = "cpu"
) -> list[list[Tensor]]:
    """Run all jobs on `size` processes and return rank 0's logits; `device`: cpu or cuda."""
    torch.save(list(jobs), directory / "jobs.pt")
    root = Path(__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(root.parent), str(root))),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "support.tp_run", str(rank), str(size), str(directory), device],
            env=environment,
        )
        for rank in range(size)
    ]
    try:
        codes = [rank.wait(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(codes):
        raise AssertionError(f"exit codes of the ranks: {codes}")
    logits: list[list[Tensor]] = torch.load(directory / "logits.pt")
    return logits


def main() -> None:
    rank, size, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    jobs: list[Job] = torch.load(directory / "jobs.pt")
    device = torch.device(sys.argv[4])
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    tp = join_group(
        rank=rank,
        size=size,
        store=str(directory / "store"),
        timeout_s=TIMEOUT_S,
        device=device,
    )
    results = []
    for job in jobs:
        kernels = make_kernels(job["kernels"], batch_invariant=False, device=device)
        dtype: torch.dtype = getattr(torch, job["dtype"])
        path = Path(job["path"])
        is_stored = quantised_as(path, load_model_config(path)) is not None
        method = linear_method("none", kernels, dtype, is_stored=is_stored)
        loaded = load_tiny(path, dtype, kernels, tp=tp, device=device, method=method)
        lengths = [len(tokens) for tokens in job["tokens"]]
        driver = DirectDriver(
            loaded.model,
            num_kv_heads=loaded.num_kv_heads,
            dtype=dtype,
            lengths=lengths,
            device=device,
        )
        passes = schedule(lengths, chunk=job["chunk"] or None, num_decodes=NUM_DECODES)
        results.append(run_sequences(driver, job["tokens"], passes))
    if rank == 0:
        torch.save(results, directory / "logits.pt")
    else:
        assert results == [None] * len(jobs)
    tp.close()


if __name__ == "__main__":
    main()
    os._exit(0)  # whatever torch's threads still hold
