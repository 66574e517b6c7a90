"""One rank of `lightserve profile`: `python -m lightserve.worker.profile_run`, started by it.

Standard input brings a `ProfileJob` as JSON. Rank 0 writes JSON lines to standard output: shares
of the time that have passed, then the profile; or, instead, what is wrong.
"""

from __future__ import annotations

import gc
import sys
from typing import NoReturn

import msgspec

from lightserve.cost.job import ProfileJob, ProfileNews
from lightserve.errors import LightserveError
from lightserve.logs import one_line, setup_logging
from lightserve.worker.device import resolve_device
from lightserve.worker.engine import build_runner
from lightserve.worker.profiling import take_profile
from lightserve.worker.tensor_parallel import join_group
from lightserve.worker.threads import set_threads


def main() -> NoReturn:
    """Be a rank; exit code 1 where there is no profile."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=ProfileJob)
    setup_logging(f"worker-{job.rank}", "warning", "text")
    try:
        _run(job)
    except LightserveError as error:
        _tell(job, ProfileNews(error=one_line(error)))
        sys.exit(1)
    sys.exit(0)


def _run(job: ProfileJob) -> None:
    config = job.config
    set_threads(config)
    tp = join_group(
        rank=job.rank,
        size=config.tp,
        store_path=job.store_path,
        timeout_s=config.start_timeout_s,
        device=resolve_device(config.device, job.rank),
    )
    runner = build_runner(config, tp=tp)
    profile = take_profile(
        runner,
        config,
        tp,
        seconds=job.seconds,
        progress=lambda share: _tell(job, ProfileNews(share=share)),
    )
    _tell(job, ProfileNews(share=1.0, profile=profile))
    # NCCL does not end while there are CUDA graphs that its kernels are part of.
    del runner
    gc.collect()
    tp.close()


def _tell(job: ProfileJob, news: ProfileNews) -> None:
    if job.rank == 0 or news.error:
        sys.stdout.buffer.write(msgspec.json.encode(news) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
