"""Whether this worker runs steps as CUDA graphs, and their capture at the start."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError, StartupError
from lightserve.kernels.check_pair import LIMITS
from lightserve.kernels.interface import Can, Kernels
from lightserve.messages.common import NO_SIZES, GraphSizes
from lightserve.models.base import KVTensors, Model, TensorParallel
from lightserve.progress import Advance, progress
from lightserve.worker.draft_states import StateGraphs
from lightserve.worker.graphs import (
    MAX_ROWS,
    CudaGraphRecorder,
    DecodeGraphs,
    DecodeTables,
    GraphRecorder,
    Graphs,
    ladder,
)
from lightserve.worker.mixed_graphs import MAX_TOKENS, MixedGraphs, kept_sizes, mixed_ladder
from lightserve.worker.model_runner import ModelRunner

log = logging.getLogger(__name__)
G = TypeVar("G", bound=Graphs)


def graph_sizes(
    config: ServeConfig, kernels: Kernels, device: torch.device, *, has_decodes: bool = True
) -> GraphSizes:
    """Return the sizes to capture graphs for; none where there are to be no graphs.

    `has_decodes`: whether the model generates; an encoder does not.

    Raises:
        ConfigError: options of graphs are given, and nothing here has a use for them.
    """
    can_capture = device.type == "cuda" and Can.GRAPHS in kernels.can and has_decodes
    if not can_capture:
        for flag in config.given_graph_flags:
            got = f"{device.type} and {kernels.name}" if has_decodes else "an encoder"
            raise ConfigError(
                f"{flag} needs a GPU and --attention-backend triton, and a model that generates,"
                f" got {got}"
            )
    if not can_capture or config.cuda_graphs == "off":
        return NO_SIZES
    most = config.cuda_graph_max_tokens
    if most < 0:
        most = min(MAX_TOKENS, config.max_tokens_of_step(device.type))
    return GraphSizes(
        ladder(config.cuda_graph_max_seqs or min(config.max_num_seqs, MAX_ROWS)),
        mixed_ladder(most),
    )


class GraphMaker(NamedTuple):
    """Makes CUDA graphs, yet to be captured, on the device of a runner's tables."""

    model: Model
    pool: KVTensors
    tables: DecodeTables
    recorder: GraphRecorder
    """Recorder of all graphs, which share memory for intermediate results."""
    tp: TensorParallel
    dtype: torch.dtype | None = None
    """Type of the model; None: that of keys and values."""

    def decodes(self, sizes: Sequence[int]) -> DecodeGraphs:
        """Return graphs of steps of decodes alone."""
        return DecodeGraphs(
            self.model,
            self.pool,
            self.tables,
            sizes=sizes,
            recorder=self.recorder,
            has_logits=self.tp.rank == 0,
            dtype=self.dtype,
        )

    def mixed(self, sizes: Sequence[int]) -> MixedGraphs:
        """Return graphs of other steps."""
        return MixedGraphs(self.model, self.pool, self.tables, sizes=sizes, recorder=self.recorder)

    def states(self, sizes: Sequence[int]) -> StateGraphs:
        """Return graphs that move states on behind drafts."""
        return StateGraphs(self.model, self.pool, self.tables, sizes=sizes, recorder=self.recorder)

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Sizes of `states`; none where no states wait for drafts."""
        return () if self.tables.kept is None else mixed_ladder(len(self.tables.kept.tokens))


def make_graphs(
    model: Model,
    pool: KVTensors,
    tables: DecodeTables,
    *,
    tp: TensorParallel,
    dtype: torch.dtype | None = None,
) -> GraphMaker:
    """Return what makes the graphs of a rank."""
    recorder = CudaGraphRecorder(tables.token_ids.device, recording=tp.recording)
    return GraphMaker(model, pool, tables, recorder, tp, dtype)


def capture_graphs(
    runner: ModelRunner,
    model: Model,
    pool: KVTensors,
    sizes: GraphSizes,
    *,
    tp: TensorParallel,
    dtype: torch.dtype | None = None,
    is_limited: bool = False,
) -> None:
    """Capture graphs with a progress bar, for `runner` to use; nothing without sizes.

    Every rank does, in the same order: collectives are part of the graphs.

    Args:
        runner: gets the graphs.
        model: this rank's part.
        pool: its KV.
        sizes: what graphs are captured for.
        tp: this rank's group.
        dtype: type of the model; None: that of keys and values.
        is_limited: whether the largest number of new tokens was asked for.

    Raises:
        StartupError: one could not be captured, or replays other numbers than its kernels give one
            by one. That ends the process, and with it the group.
    """
    if not sizes.decodes:
        return
    start_s = time.monotonic()
    make = make_graphs(model, pool, runner.tables, tp=tp, dtype=dtype)
    count = len(sizes.decodes) + len(sizes.mixed) + len(make.state_sizes)
    used: list[int] = []
    with progress("capturing CUDA graphs", count, is_shown=tp.rank == 0) as advance:
        # In this order: what passes of many tokens need between them serves all others, and behind
        # a capture that is broken off there is none.
        mixed, states = None, None
        if sizes.mixed:
            # Of several ranks one alone might fail, and the others wait for it in a collective.
            is_needed = is_limited or tp.size > 1
            mixed = make.mixed(sizes.mixed)
            mixed = captured(mixed, used, advance, "steps with prompts are launched", is_needed)
        decodes = make.decodes(sizes.decodes)
        used += decodes.capture(advance)
        if make.state_sizes:
            states = make.states(make.state_sizes)
            states = captured(states, used, advance, "states of rows with guesses are moved on")
    decodes.check(LIMITS[dtype or pool.k[0].dtype])
    if states is not None:
        states.check()
    if mixed is not None:
        mixed.check()
        mixed.keep(_worth(mixed, runner.device, tp, is_limited=is_limited))
    kinds = [kind for kind in (decodes, mixed, states) if kind is not None]
    log.info(
        "%d CUDA graphs of 1 to %d decodes%s%s: %.1f s, %.2f GiB",
        sum(len(kind.sizes) for kind in kinds),
        sizes.decodes[-1],
        "" if mixed is None else f", and of {mixed.sizes[0]} to {mixed.sizes[-1]} new tokens",
        "" if states is None else f", and of up to {states.sizes[-1]} inputs of guesses",
        time.monotonic() - start_s,
        (sum(used) + sum(kind.static_bytes for kind in kinds)) / 2**30,
    )
    runner.use_graphs(decodes, mixed, states)


def captured(
    graphs: G, used: list[int], advance: Advance, instead: str, is_needed: bool = False
) -> G | None:
    """Capture graphs, add the memory that each took to `used`, and return them.

    None: this model's passes cannot be recorded. `instead` says in words which work is done kernel
    by kernel then.

    Raises:
        StartupError: they cannot, and `is_needed` says that nothing can stand for them.
    """
    try:
        used += graphs.capture(advance)
    except StartupError as error:
        if is_needed:
            raise
        log.info("%s kernel by kernel, which takes longer: %s", instead, error)
        return None
    return graphs


def _worth(
    mixed: MixedGraphs, device: torch.device, tp: TensorParallel, *, is_limited: bool
) -> tuple[int, ...]:
    """Return the sizes that rank 0 finds worth their graphs; the smallest where none is."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    sizes = mixed.sizes
    kept = kept_sizes(*mixed.times(wait), is_limited=is_limited) or sizes[:1]
    chosen = torch.tensor([size in kept for size in sizes], dtype=torch.int64, device=device)
    is_kept = tp.broadcast(chosen).tolist()
    return tuple(size for size, keeps in zip(sizes, is_kept, strict=True) if keeps)
