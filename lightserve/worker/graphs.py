"""Decodes as CUDA graphs: a step in which every row has one new token is one launch.

Launching a model's kernels one by one takes the host longer than a GPU takes to run them for a few
rows. So the whole pass, from the tables to the logits, is recorded at the start for a ladder of
batch sizes, and a step runs as the smallest that has room:

    rows         row  row  row  pad │ pad …        static, filled by the step in one copy; behind
    positions     p    p    p    0  │  0  …        the step's last row is padding
    token_ids, req_to_slot [row, position]         read by the graph itself
    logits [L, vocab]                              a view of the graph's own

A padding row is a row like others to every kernel: the tables' last one, whose position 0 has the
pool's scratch slot. Its logits are cut off.

The LM head is part of the graph, as the gather over the ranks is. Sampling is not: what it does
depends on the rows' options, and the host has all of the graph's time to launch it.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import ClassVar, NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightserve.errors import StartupError
from lightserve.kernels.interface import AttentionBatch, UnknownValues
from lightserve.kernels.weights import KeptInputs
from lightserve.logs import one_line
from lightserve.messages.common import size_within
from lightserve.models.base import KVTensors, Model, logits_dtype
from lightserve.progress import Advance
from lightserve.worker.device import put

# The batch sizes that decodes are captured for.
#
# A step of L rows runs as the smallest captured size that has room, so a ladder trades rows
# computed for nothing against graphs to capture and to keep. What a padding row costs: attention to
# one token, and its share of the products, which up to about 180 rows of bfloat16 wait for the
# weights anyway (an H200's operations per byte). So the steps may grow with the size;
# docs/results/host_step.md has the figures.
#
#     1 2 4 8 16 24 32 … 64 80 96 … 256 288 320 … 512 576 640 …

MAX_ROWS = 512
"""Largest size unless --cuda-graph-max-seqs says otherwise: beyond it a step takes long enough for
the host to launch the next one's kernels one by one."""
_STEPS = ((64, 8), (256, 16), (512, 32))
"""(up to this size, distance of a size to the next), from 8 on."""
_LAST_STEP = 64


def ladder(max_rows: int) -> tuple[int, ...]:
    """Return the sizes to capture, rising, the last of which is `max_rows` (at least 1)."""
    sizes, size = [], 1
    while size < max_rows:
        sizes.append(size)
        size = _next(size)
    return (*sizes, max_rows)


def _next(size: int) -> int:
    if size < 8:
        return 2 * size
    return size + next((step for end, step in _STEPS if size < end), _LAST_STEP)


# Records device work once and repeats it: CUDA graphs behind a small interface.
#
# What is recorded are launches on fixed addresses with fixed scalars. A function that is recorded
# therefore may read no value from the device, may let no value of the host decide anything that
# changes later, and must find its inputs and leave its outputs in the same tensors every time.
# Tests have forms of the interface for the CPU (tests/support/graph_recorders.py).

NUM_WARM_UPS = 2
"""Runs before a function is recorded: the first compiles kernels and makes handles, the second
finds them made."""


MAX_DRIVER_BYTES = 64 << 20
"""Most that a driver takes for a graph of some thousand launches, of which each is some KiB."""


class MemoryUse(NamedTuple):
    """Bytes of a device."""

    reserved: int
    """By this process's allocator."""
    in_all: int
    """By drivers and other processes as well."""

    def since(self, earlier: MemoryUse) -> int:
        """Return what the recording of one graph has taken.

        What the allocator took is exact. A driver keeps a graph's launches elsewhere, of which
        only the device as a whole is known, and others take and give back memory meanwhile: no
        more counts than a graph can need.
        """
        reserved = self.reserved - earlier.reserved
        outside = self.in_all - earlier.in_all - reserved
        return reserved + min(max(0, outside), MAX_DRIVER_BYTES)


class GraphRecorder(Protocol):
    """Makes graphs that are replayed one at a time, in any order, and never side by side."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run `function` to warm it up, record it, and return what repeats its work.

        Work that was launched before is done before the replay's, and this before what follows.

        Raises:
            RuntimeError: the function did what cannot be recorded, or memory ran out.
            TritonError: a kernel does not compile, or not fit the device.
        """

    def memory(self) -> MemoryUse:
        """Return what is taken, after giving back what is only kept for later."""


class CudaGraphRecorder:
    """CUDA graphs on one device, all with one pool of memory for what is between.

    Every graph's intermediate tensors are free again when it ends, so that the next may take the
    same memory: record the largest first. Ranks that share collectives record the same functions
    in the same order, as NCCL's kernels are part of the graphs.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        recording: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`recording`: what functions run within, see `TensorParallel.recording`."""
        self._device = device
        self._recording = recording
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()
        self._failure = ""
        """Why a capture was broken off: none is begun behind it."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """See `GraphRecorder.record`."""
        if self._failure:
            raise RuntimeError(
                f"a capture before it was broken off ({self._failure}), which"
                " --cuda-graph-max-tokens 0 leaves out"
            )
        with self._recording():
            return self._record(function)

    def _record(self, function: Callable[[], None]) -> Callable[[], None]:
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                function()
        outer.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (NCCL's watchdog, pinned memory) may do what this one must not.
            with (
                _no_collection(),
                torch.cuda.graph(
                    graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                function()
        except Exception as error:  # of torch, or of Triton, whose types are its own
            self._failure = _reason(error)
            # Its end has failed as well: torch would stay on its stream, and give no memory back.
            torch.cuda.set_stream(outer)
            with suppress(RuntimeError):  # this is done
                torch._C._cuda_endAllocateToPool(outer.device_index, self._memory)
            raise
        return graph.replay

    def memory(self) -> MemoryUse:
        """See `GraphRecorder.memory`; the graphs' pool is the allocator's."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return MemoryUse(torch.cuda.memory_reserved(self._device), total_bytes - free_bytes)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector off: a tensor's or a graph's end must not fall into a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _reason(error: Exception) -> str:
    """Return why a capture failed: the end of a broken one fails as well, for another reason."""
    first = error.__context__ if isinstance(error, RuntimeError) else None
    return one_line(first or error)


HostIntegers = Sequence[int] | npt.NDArray[np.int64]


class DecodeTables(NamedTuple):
    """The state of all rows on the device; the last row is for padding."""

    token_ids: Tensor
    """int32 [max_num_seqs + 1, max_model_len + 1], tokens by position."""
    req_to_slot: Tensor
    """int32, the same shape: slots by position, those of the last row all the scratch slot."""
    state_slots: Tensor | None = None
    """See `AttentionBatch.state_slots`."""
    shifts: npt.NDArray[np.int64] | None = None
    """See `RowImages.shifts`; on the host."""
    kept: KeptInputs | None = None
    """See `DraftStates.room`; steps with chunks write it. None: no states wait for drafts."""

    @property
    def num_state_slots(self) -> int:
        """Slots of each row's states."""
        return 0 if self.state_slots is None else self.state_slots.shape[1]

    @contextmanager
    def with_rows(self, tokens: Tensor) -> Iterator[None]:
        """Have tokens [N, width] in the first rows meanwhile, and slots of their own."""
        num_rows, width = tokens.shape
        own = [(self.token_ids, tokens)]
        slots = torch.arange(num_rows * (width + self.num_state_slots))
        own.append((self.req_to_slot, slots[: tokens.numel()].view(tokens.shape)))
        if self.state_slots is not None:
            own.append((self.state_slots, slots[tokens.numel() :].view(num_rows, -1)))
        before = [table[:num_rows, : part.shape[1]].clone() for table, part in own]
        for table, part in own:
            table[:num_rows, : part.shape[1]].copy_(part)
        yield
        for (table, part), old in zip(own, before, strict=True):
            table[:num_rows, : part.shape[1]].copy_(old)


class Graphs(ABC):
    """Passes of one rank that are recorded for a ladder of sizes."""

    unit: ClassVar[str]
    """Name of the things that a size counts, for errors."""
    otherwise: ClassVar[str] = "--cuda-graphs off serves without"
    """Options that do without, for errors."""

    def __init__(
        self,
        model: Model,
        pool: KVTensors,
        tables: DecodeTables,
        *,
        sizes: Sequence[int],
        recorder: GraphRecorder,
    ) -> None:
        """Make the static tensors; `capture` does the rest.

        Args:
            model: this rank's part.
            pool: its KV.
            tables: of which graphs keep the addresses.
            sizes: to record passes for, rising.
            recorder: records and repeats them.
        """
        self._model, self._pool, self._tables = model, pool, tables
        self._sizes, self._recorder = tuple(sizes), recorder
        self._replays: dict[int, Callable[[], None]] = {}
        self._max_rows = len(tables.token_ids) - 1
        """Rows of the tables but the last one, which is padding and has this number."""
        self._device = tables.token_ids.device
        self._static: list[Tensor] = []
        self._begin()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes that passes are recorded for, rising."""
        return self._sizes

    @property
    def static_bytes(self) -> int:
        """Memory of the tensors that are there before anything is recorded."""
        return sum(tensor.nbytes for tensor in self._static)

    @torch.inference_mode()
    def capture(self, advance: Advance = lambda _: None) -> list[int]:
        """Record every size and replay it once, the largest first; `advance` hears of each.

        Returns:
            The device memory that each took, in bytes, the largest first.

        Raises:
            StartupError: a pass could not be recorded.
        """
        used, memory = [], self._recorder.memory()
        for size in reversed(self._sizes):
            try:
                replay = self._recorder.record(partial(self._run, size))
                replay()  # of padding: the first one takes longer, and may fail
                before, memory = memory, self._recorder.memory()
            except Exception as error:  # Triton's have types of their own
                raise StartupError(
                    f"a CUDA graph of {size} {self.unit} could not be captured:"
                    f" {_reason(error)}; {self.otherwise}"
                ) from error
            self._replays[size] = replay
            used.append(memory.since(before))
            advance(1)
        return used

    def _refuse(self, size: int, what: str) -> NoReturn:
        """Raise StartupError: the graph of a size does something else than its kernels."""
        raise StartupError(f"the CUDA graph of {size} {self.unit} {what}; {self.otherwise}")

    @abstractmethod
    def _begin(self) -> None:
        """Make the tensors that are there before anything is recorded: `_static`."""

    @abstractmethod
    def _run(self, size: int) -> None:
        """Run the pass of a size, of the rows that are set and padding; this is recorded."""


class DecodeGraphs(Graphs):
    """Steps of decodes alone; sizes are numbers of rows."""

    unit = "decodes"
    otherwise = f"{Graphs.otherwise}, --cuda-graph-max-seqs limits their size"

    def __init__(
        self,
        model: Model,
        pool: KVTensors,
        tables: DecodeTables,
        *,
        sizes: Sequence[int],
        recorder: GraphRecorder,
        has_logits: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the static tensors; see `Graphs`.

        `has_logits`: True on rank 0, which alone gets any. `dtype`: type of the model; None: that
        of keys and values, which may have 8 bits.
        """
        super().__init__(model, pool, tables, sizes=sizes, recorder=recorder)
        device, largest, dtype = self._device, self._sizes[-1], dtype or pool.k[0].dtype
        self._hidden = torch.empty(largest, model.config.hidden_size, dtype=dtype, device=device)
        self._static.append(self._hidden)
        self._logits: Tensor | None = None
        if has_logits:
            shape, dtype = (largest, model.config.vocab_size), logits_dtype(dtype, device)
            self._logits = torch.empty(shape, dtype=dtype, device=device)
            self._static.append(self._logits)

    def _begin(self) -> None:
        """See `Graphs._begin`."""
        num_inputs, largest = 2 if self._tables.shifts is None else 3, self._sizes[-1]
        self._inputs = torch.zeros(num_inputs, largest, dtype=torch.int64, device=self._device)
        """Rows, positions, and where they are others those by which queries and keys are turned."""
        self._rows, self._positions, *_ = self._inputs
        self._rows.fill_(self._max_rows)
        self._offsets = torch.arange(largest + 1, dtype=torch.int32, device=self._device)
        self._static = [self._inputs, self._offsets]

    @torch.inference_mode()
    def check(self, limit: float) -> None:
        """Compare what every graph replays with the same pass, kernel by kernel.

        Two tokens of each row, one after the other, so that the second pass reads what the first
        has written. Every rank does the same; rank 0 compares. Tables are as before afterwards,
        what is in the pool is not.

        Raises:
            StartupError: logits are further apart than `limit`, as a share of their length.
        """
        tables, generator = self._tables, torch.Generator().manual_seed(0)
        vocab_size = self._model.config.vocab_size
        for size in self._sizes:
            most = (len(self._pool.k[0]) - 1) // (2 + tables.num_state_slots)
            num_rows = max(1, min(size, self._max_rows, most))
            tokens = torch.randint(vocab_size, (num_rows, 2), generator=generator)
            with tables.with_rows(tokens):
                positions = range(min(2, self._model.context_len))
                replayed = [self._replayed(num_rows, position, size) for position in positions]
                for position, found in enumerate(replayed):
                    self._set(range(num_rows), [position] * num_rows)
                    self._run(size)
                    if found is not None and self._logits is not None:
                        error = _difference(found, self._logits[:num_rows])
                        if not error <= limit:  # NaN is an error too
                            self._refuse(
                                size,
                                "replays other logits than its kernels give one by one:"
                                f" error {error:.2g}, limit {limit:g}",
                            )

    def _replayed(self, num_rows: int, position: int, size: int) -> Tensor | None:
        """Return what the graph of `size` gives for one position of the first rows."""
        self._set(range(num_rows), [position] * num_rows)
        self._replays[size]()
        return None if self._logits is None else self._logits[:num_rows].clone()

    def covers(self, num_rows: int) -> bool:
        """Whether a step of so many rows, each of one new token, has a graph."""
        return size_within(self._sizes, num_rows) is not None

    def logits(
        self, rows: HostIntegers, positions: HostIntegers, too_far: Tensor | None = None
    ) -> Tensor | None:
        """Run a step that `covers` is true for.

        Args:
            rows: L rows of the tables, each at most once.
            positions: of each row's one new token, which is in the tables.
            too_far: int64 [L] on the device, by how much they are too large; None: by nothing.

        Returns:
            logits [L, vocab_size] on rank 0, None elsewhere. They are the graph's own:
            the next call overwrites them, behind what has been launched until then.
        """
        self._replay(rows, positions, too_far)
        return None if self._logits is None else self._logits[: len(rows)]

    def hidden(
        self, rows: HostIntegers, positions: HostIntegers, too_far: Tensor | None = None
    ) -> Tensor:
        """Run a step as `logits` does, and return the hidden states [L, hidden_size] on all ranks.

        They are the graph's own, too.
        """
        self._replay(rows, positions, too_far)
        return self.states(len(rows))

    def states(self, num_rows: int) -> Tensor:
        """Return the last step's hidden states [num_rows, hidden_size], as `hidden` does."""
        return self._hidden[:num_rows]

    def _replay(self, rows: HostIntegers, positions: HostIntegers, too_far: Tensor | None) -> None:
        self._set(rows, positions)
        if too_far is not None:
            self._inputs[1:, : len(rows)].sub_(too_far)
        size = size_within(self._sizes, len(rows))
        assert size is not None, "`covers` says which steps have a graph"
        self._replays[size]()

    def _set(self, rows: HostIntegers, positions: HostIntegers) -> None:
        """Put a step's rows where passes read them, and padding behind."""
        inputs = np.zeros(self._inputs.shape, dtype=np.int64)
        inputs[0] = self._max_rows
        inputs[:2, : len(rows)] = rows, positions
        if self._tables.shifts is not None:
            inputs[2, : len(rows)] = inputs[1, : len(rows)] - self._tables.shifts[np.asarray(rows)]
        put(inputs, self._inputs)

    def _run(self, size: int) -> None:
        """See `Graphs._run`: the first `size` rows."""
        rows, positions = self._rows[:size], self._positions[:size]
        tables = self._tables
        batch = AttentionBatch(
            positions=positions,
            slot_mapping=tables.req_to_slot[rows, positions].long(),
            req_to_slot=tables.req_to_slot,
            rows=rows,
            cu_seqlens_q=self._offsets[: size + 1],
            context_lens=(positions + 1).int(),
            host_rows=UnknownValues("host_rows", size),
            host_q_lens=(1,) * size,
            host_context_lens=UnknownValues("host_context_lens", size),
            state_slots=tables.state_slots,
            turned=None if tables.shifts is None else self._inputs[2, :size],
        )
        input_ids = tables.token_ids[rows, positions].long()
        hidden = self._model.hidden(input_ids, batch, self._pool, None)
        self._hidden[:size].copy_(hidden)
        self._model.logits(hidden, None if self._logits is None else self._logits[:size])


def _difference(replayed: Tensor, expected: Tensor) -> float:
    """Return how far logits are apart, as a share of their length."""
    replayed, expected = replayed.float(), expected.float()
    return float((replayed - expected).norm() / expected.norm())


NUM_ESTIMATED = 4
"""Graphs from which the memory of all is estimated."""


def estimated_graph_bytes(
    make_graphs: Callable[[Sequence[int]], Graphs], sizes: Sequence[int]
) -> int:
    """Return about how much memory graphs of all `sizes` will take, from a few of them.

    The largest takes what all share; each other one its own launches, which are as many. Drivers
    take memory by the piece, so that one of them says little.

    Args:
        make_graphs: makes graphs of some sizes, on a small pool; they are dropped.
        sizes: rising.

    Raises:
        StartupError: even these could not be recorded.
    """
    graphs = make_graphs(sizes[-NUM_ESTIMATED:])
    first, *rest = graphs.capture()
    each = -(-sum(rest) // max(1, len(rest)))
    return graphs.static_bytes + first + each * (len(sizes) - 1)
