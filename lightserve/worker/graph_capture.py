"""Whether this worker runs decodes as CUDA graphs, and their capture at the start."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.kernels.interface import Kernels
from lightserve.kernels.self_check import LIMITS
from lightserve.models.base import KVPool, Model
from lightserve.models.parallel import TensorParallel
from lightserve.progress import progress
from lightserve.worker.graph_ladder import MAX_ROWS, ladder
from lightserve.worker.graph_recorder import CudaGraphRecorder
from lightserve.worker.graphs import DecodeGraphs, DecodeTables
from lightserve.worker.model_runner import ModelRunner

log = logging.getLogger(__name__)


def graph_sizes(config: ServeConfig, kernels: Kernels, device: torch.device) -> tuple[int, ...]:
    """Return the numbers of rows to capture graphs for; none where there are to be no graphs.

    Raises:
        ConfigError: options of graphs are given, and nothing here has a use for them.
    """
    can_capture = device.type == "cuda" and kernels.is_capturable
    if not can_capture:
        for flag in config.given_graph_flags:
            raise ConfigError(
                f"{flag} needs a GPU and --attention-backend triton,"
                f" got {device.type} and {kernels.name}"
            )
    if not can_capture or config.cuda_graphs == "off":
        return ()
    return ladder(config.cuda_graph_max_seqs or min(config.max_num_seqs, MAX_ROWS))


def make_graphs(
    model: Model,
    pool: KVPool,
    tables: DecodeTables,
    sizes: Sequence[int],
    *,
    tp: TensorParallel,
) -> DecodeGraphs:
    """Return CUDA graphs that are yet to be captured, on the device of the tables."""
    return DecodeGraphs(
        model,
        pool,
        tables,
        sizes=sizes,
        recorder=CudaGraphRecorder(tables.token_ids.device, recording=tp.recording),
        has_logits=tp.rank == 0,
    )


def capture_graphs(
    runner: ModelRunner,
    model: Model,
    pool: KVPool,
    sizes: Sequence[int],
    *,
    tp: TensorParallel,
) -> None:
    """Capture graphs with a progress bar, for `runner` to use; nothing without sizes.

    Every rank does, in the same order: collectives are part of the graphs.

    Raises:
        StartupError: one could not be captured, or replays other logits than its kernels give one
            by one. That ends the process, and with it the group.
    """
    if not sizes:
        return
    start_s = time.monotonic()
    graphs = make_graphs(model, pool, runner.tables, sizes, tp=tp)
    with progress("capturing CUDA graphs", len(sizes), is_shown=tp.rank == 0) as advance:
        used = graphs.capture(advance)
    graphs.check(LIMITS[pool.k[0].dtype])
    log.info(
        "%d CUDA graphs of 1 to %d decodes: %.1f s, %.2f GiB",
        len(sizes),
        sizes[-1],
        time.monotonic() - start_s,
        (sum(used) + graphs.static_bytes) / 2**30,
    )
    runner.use_graphs(graphs)
