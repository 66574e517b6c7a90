"""The worker process: one per tensor-parallel rank.

Plans arrive over a link, and one may wait while another runs; see `step_loop`. A step that raises,
when it is launched or when it is waited for, ends the process: the supervisor replaces the whole
group and the router replays the requests that can be replayed.
"""

from __future__ import annotations

import gc
import sys
from typing import NoReturn

import msgspec

from lightserve.channels import Link, connect_link, wait_readable
from lightserve.cost.profile import ProfileJob, ProfileNews, tokens_of_step
from lightserve.errors import LightserveError
from lightserve.logs import one_line, setup_logging
from lightserve.messages.common import PROTOCOL_VERSION
from lightserve.messages.router_worker import (
    RouterToWorker,
    StepTimesMeasured,
    WorkerHello,
    WorkerToRouter,
)
from lightserve.messages.supervision import ChildMessage, ChildReady, ChildSpec, SupervisorMessage
from lightserve.models.base import TensorParallel
from lightserve.worker.build import build_runner
from lightserve.worker.device import device_of_rank, facts_of
from lightserve.worker.memory import keep_freed_memory
from lightserve.worker.model_runner import ModelRunner
from lightserve.worker.profiling import (
    agreed,
    profile_while_idle,
    stored_profile,
    take_profile,
)
from lightserve.worker.step_loop import serve
from lightserve.worker.tensor_parallel import join_group
from lightserve.worker.threads import adapted_threads, set_threads

# One rank of `lightserve profile`: `python -m lightserve.worker.process`, started by it.
#
# Standard input brings a `ProfileJob` as JSON. Rank 0 writes JSON lines to standard output: shares
# of the time that have passed, then the profile; or, instead, what is wrong.


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
        store=job.store_path,
        timeout_s=config.start_timeout_s,
        device=device_of_rank(config, job.rank),
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


def run(spec: ChildSpec, control: Link[ChildMessage, SupervisorMessage]) -> int:
    """Load the model, say hello, and execute plans until killed.

    Raises:
        LightserveError: the model cannot be served; becomes `ChildFailed`.
    """
    set_threads(spec.config)
    tp = join_group(
        rank=spec.index,
        size=spec.config.tp,
        store=spec.collective_store,
        store_fd=spec.listen_fd,
        timeout_s=spec.config.start_timeout_s,
        device=device_of_rank(spec.config, spec.index),
    )
    runner = build_runner(spec.config, tp=tp, incarnation=spec.incarnation)
    is_first_rank = spec.index == 0
    profile = stored_profile(spec.config, runner.graph_sizes) if is_first_rank else None
    step_cost = None if profile is None else profile.coefficients
    if runner.device.type == "cpu":
        keep_freed_memory()  # what loading has freed went back
    link: Link[WorkerToRouter, RouterToWorker] = connect_link(
        spec.workers_address,
        name=f"worker-{spec.index}",
        send_type=WorkerToRouter,
        recv_type=RouterToWorker,
        node_key=spec.node_key if spec.workers_address.startswith("tcp://") else b"",
    )
    # What was built so far lives as long as the process: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    link.send(
        WorkerHello(
            protocol_version=PROTOCOL_VERSION,
            boot_id=spec.boot_id,
            config_hash=spec.config.ranks_digest,
            incarnation=spec.incarnation,
            rank=spec.index,
            num_kv_slots=runner.pool.num_slots,
            num_host_slots=runner.host_pool.num_request_slots,
            num_prefix_slots=runner.host_pool.num_prefix_slots,
            num_state_slots=runner.pool.num_state_slots,
            encoder=runner.encoder,
            step_cost=step_cost,
            device=facts_of(spec.config, runner.device),
            overlaps_copies=runner.host_pool.overlaps_copies,
            graph_sizes=runner.graph_sizes,
            max_num_batched_tokens=tokens_of_step(spec.config, runner.device.type, step_cost),
        )
    )
    control.send(ChildReady())
    if spec.config.profile == "auto" and not agreed(tp, is_true=profile is not None):
        _measure_while_idle(spec, runner, tp, link)
    threads = adapted_threads(spec.config, runner.device, is_first_rank=is_first_rank)
    serve(runner, link, is_first_rank=is_first_rank, threads=threads)
    return 0


def _measure_while_idle(
    spec: ChildSpec,
    runner: ModelRunner,
    tp: TensorParallel,
    link: Link[WorkerToRouter, RouterToWorker],
) -> None:
    """Measure steps until the first plan comes, and tell the router; all ranks call."""
    config = spec.config
    profile = profile_while_idle(runner, config, tp, lambda: not wait_readable([link], 0.0))
    if profile is None:
        return
    step_cost = profile.coefficients
    link.send(
        StepTimesMeasured(
            incarnation=spec.incarnation,
            step_cost=step_cost,
            max_num_batched_tokens=tokens_of_step(config, runner.device.type, step_cost),
        )
    )
