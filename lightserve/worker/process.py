"""The worker process: one per tensor-parallel rank.

Plans arrive over a link, of which one may wait while another runs; see `step_loop`. A step that
raises, when it is launched or when it is waited for, ends the process: the supervisor replaces
the whole group and the router replays what can be replayed.
"""

from __future__ import annotations

import gc

from lightserve.channels.base import Link
from lightserve.channels.zmq import connect_link
from lightserve.messages.common import PROTOCOL_VERSION
from lightserve.messages.router_worker import RouterToWorker, WorkerHello, WorkerToRouter
from lightserve.messages.supervision import ChildMessage, ChildReady, ChildSpec, SupervisorMessage
from lightserve.worker.device import resolve_device
from lightserve.worker.device_facts import facts_of
from lightserve.worker.engine import build_runner
from lightserve.worker.profiling import profile_at_start
from lightserve.worker.step_loop import serve
from lightserve.worker.tensor_parallel import join_group
from lightserve.worker.threads import adapted_threads, set_threads


def run(spec: ChildSpec, control: Link[ChildMessage, SupervisorMessage]) -> int:
    """Load the model, say hello, and execute plans until killed.

    Raises:
        LightserveError: the model cannot be served; becomes `ChildFailed`.
    """
    set_threads(spec.config)
    tp = join_group(
        rank=spec.index,
        size=spec.config.tp,
        store_path=spec.collective_store,
        timeout_s=spec.config.start_timeout_s,
        device=resolve_device(spec.config.device, spec.index),
    )
    runner = build_runner(spec.config, tp=tp, generation=spec.generation)
    profile = profile_at_start(runner, spec.config, tp)
    link: Link[WorkerToRouter, RouterToWorker] = connect_link(
        spec.workers_address,
        name=f"worker-{spec.index}",
        send_type=WorkerToRouter,
        recv_type=RouterToWorker,
    )
    # What was built so far lives as long as the process: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    link.send(
        WorkerHello(
            protocol_version=PROTOCOL_VERSION,
            boot_id=spec.boot_id,
            config_hash=spec.config.digest,
            generation=spec.generation,
            rank=spec.index,
            num_kv_slots=runner.num_kv_slots,
            num_host_slots=runner.num_host_slots,
            step_cost=None if profile is None else profile.coefficients,
            device=facts_of(spec.config, runner.device),
            overlaps_copies=runner.overlaps_copies,
            max_num_batched_tokens=spec.config.max_tokens_of_step(runner.device.type),
        )
    )
    control.send(ChildReady())
    is_first_rank = spec.index == 0
    threads = adapted_threads(spec.config, runner.device, is_first_rank=is_first_rank)
    serve(runner, link, is_first_rank=is_first_rank, threads=threads)
    return 0
