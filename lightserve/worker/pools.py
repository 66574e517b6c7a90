"""Makes a rank's KV pool and host pool, as large as flags and what is free allow."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from lightserve.config import ServeConfig
from lightserve.messages.router_worker import StepPlan
from lightserve.models.base import Model
from lightserve.models.kv_layout import KVLayout
from lightserve.models.parallel import TensorParallel
from lightserve.worker.device_memory import (
    CudaStatistics,
    DeviceMemory,
    MemoryStatistics,
    measure_step,
    num_device_slots,
    num_staged_slots,
)
from lightserve.worker.graph_capture import make_graphs
from lightserve.worker.graphs import DecodeTables, estimated_graph_bytes
from lightserve.worker.host_pool import HostPool
from lightserve.worker.kv_pool import KVPool
from lightserve.worker.largest_steps import largest_steps
from lightserve.worker.memory import MIN_SLOTS, free_memory_bytes, num_host_slots, num_kv_slots
from lightserve.worker.model_runner import ModelRunner
from lightserve.worker.staged_host_pool import make_host_pool

log = logging.getLogger(__name__)


class Pools(NamedTuple):
    """Where a rank keeps KV."""

    kv: KVPool
    host: HostPool


def make_pools(
    config: ServeConfig,
    layout: KVLayout,
    device: torch.device,
    *,
    is_shown: bool,
    measure: Callable[[KVPool], DeviceMemory],
) -> Pools:
    """Return the pools of a rank.

    Args:
        config: sizes, given or auto.
        layout: of both pools.
        device: of the KV pool.
        is_shown: whether to show progress: rank 0 does.
        measure: called on a GPU with a pool of a few slots: what everything else takes there.

    Raises:
        ConfigError, StartupError: they do not fit.
    """
    free_bytes, num_staged = free_memory_bytes(), 0
    is_on_gpu = device.type == "cuda"
    if is_on_gpu:
        memory = measure(KVPool(layout, MIN_SLOTS, device))
        num_staged = num_staged_slots(config, layout, total_bytes=memory.total)
        memory = dataclasses.replace(memory, staging=num_staged * layout.bytes_per_token)
        num_slots = num_device_slots(config, layout, memory)
        log.info(
            "of %.1f GiB on %s: %s, KV pool %.2f GiB",
            memory.total / 2**30,
            device,
            memory,
            (num_slots + 1) * layout.bytes_per_token / 2**30,
        )
    else:
        num_slots = num_kv_slots(config, layout, free_bytes=free_bytes)
    num_on_host = num_host_slots(
        config, layout, num_slots=num_slots, free_bytes=free_bytes, is_beside_gpu=is_on_gpu
    )
    pool = KVPool(layout, num_slots, device)
    num_staged = min(num_staged, num_on_host)
    return Pools(pool, make_host_pool(num_on_host, pool, num_staged=num_staged, is_shown=is_shown))


def measure_gpu(
    config: ServeConfig,
    model: Model,
    pool: KVPool,
    make_runner: Callable[[KVPool], ModelRunner],
    *,
    graph_sizes: Sequence[int],
    tp: TensorParallel,
) -> DeviceMemory:
    """Run the largest steps on `pool`, capture two CUDA graphs, and return what it all takes.

    Every rank does; nothing of it is kept. `make_runner` makes a runner on a pool.
    """
    statistics = CudaStatistics(pool.device)
    plans = largest_steps(
        max_num_batched_tokens=config.max_tokens_of_step(pool.device.type),
        max_num_seqs=config.max_num_seqs,
        context_len=model.context_len,
        num_kv_tokens=statistics.total() // pool.bytes_per_token,
    )

    def graph_bytes(tables: DecodeTables) -> int:
        if not graph_sizes:
            return 0
        return estimated_graph_bytes(partial(make_graphs, model, pool, tables, tp=tp), graph_sizes)

    memory = _measure(statistics, make_runner(pool), plans, graph_bytes)
    gc.collect()  # the runner, before the pool takes all there is
    statistics.end()
    return memory


def _measure(
    statistics: MemoryStatistics,
    runner: ModelRunner,
    plans: list[StepPlan],
    graph_bytes: Callable[[DecodeTables], int],
) -> DeviceMemory:
    def run() -> None:
        for plan in plans:
            runner.execute(plan)

    memory = measure_step(statistics, run)
    return dataclasses.replace(memory, graphs=graph_bytes(runner.tables))
