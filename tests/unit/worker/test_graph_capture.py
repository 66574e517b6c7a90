"""What the CUDA recorder asks of torch, and what a start says about its graphs."""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.graph_recorders import TapeRecorder
from support.random_model import RECURRENT, layout_of, random_model, tiny_config
from support.tensor_kernels import TensorKernels
from triton.runtime.errors import OutOfResources

from lightserve.cli.profile import FIELDS
from lightserve.config import ServeConfig
from lightserve.errors import ConfigError, StartupError
from lightserve.kernels.reference import ReferenceKernels
from lightserve.messages.common import GraphSizes
from lightserve.models.base import SingleRank
from lightserve.worker import capture
from lightserve.worker.capture import capture_graphs, graph_sizes
from lightserve.worker.device import HostQueue
from lightserve.worker.draft_states import DraftStates, StateGraphs
from lightserve.worker.graphs import (
    NUM_WARM_UPS,
    CudaGraphRecorder,
    DecodeGraphs,
    DecodeTables,
    MemoryUse,
    ladder,
)
from lightserve.worker.memory import KVPool, StateTable
from lightserve.worker.mixed_graphs import MixedGraphs, mixed_ladder
from lightserve.worker.profiling import profile_key

CUDA = torch.device("cuda", 0)


class FakeCuda:
    """torch.cuda without a GPU: notes what happens, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.stack = ["outer"]
        self.graph_signature = inspect.signature(torch.cuda.graph.__init__)
        self.pools: list[str] = []
        """To which the allocator gives what is asked for."""
        for name in ("Stream", "CUDAGraph", "current_stream", "stream", "graph", "set_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, f"_{name.lower()}"))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "memory")
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self._end, raising=False)

    def run(self) -> None:
        self.log.append(("run", self.stack[-1], gc.isenabled()))

    def _stream(self, argument: Any) -> Any:
        """Stand for both: `Stream(device)` makes one, `stream(one)` makes it the current one."""
        return _Stream(self, "side") if argument == CUDA else self._within(argument.name)

    def _current_stream(self, device: torch.device) -> _Stream:
        assert device == CUDA
        return _Stream(self, self.stack[-1])

    def _cudagraph(self) -> _Graph:
        return _Graph(self)

    def _graph(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.graph_signature.bind(None, *args, **kwargs).arguments
        self.log.append(("capture", bound["pool"], bound["capture_error_mode"]))
        return self._capturing(f"capture on {bound['stream'].name}", bound["pool"])

    @contextlib.contextmanager
    def _capturing(self, name: str, pool: str) -> Iterator[None]:
        """As torch does it: one that is broken off cannot be ended, and leaves both behind."""
        self.stack.append(name)
        self.pools.append(pool)
        yield
        self._end(0, pool)
        self.stack.pop()

    def _set_stream(self, stream: _Stream) -> None:
        self.stack = [stream.name]

    def _end(self, device: int, pool: str) -> None:
        if pool not in self.pools:
            raise RuntimeError("not currently recording to it")
        self.pools.remove(pool)

    @contextlib.contextmanager
    def _within(self, name: str) -> Iterator[None]:
        self.stack.append(name)
        try:
            yield
        finally:
            self.stack.pop()


class _Stream:
    device_index = 0

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: _Stream) -> None:
        self._cuda.log.append((self.name, "waits for", other.name))


class _Graph:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def replay(self) -> None:
        self._cuda.log.append("replay")


def test_warmed_up_aside_then_captured_without_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    recorder = CudaGraphRecorder(CUDA)
    replays = [recorder.record(cuda.run) for _ in range(2)]
    once = [
        ("side", "waits for", "outer"),
        *[("run", "side", True)] * NUM_WARM_UPS,
        ("outer", "waits for", "side"),
        ("capture", "memory", "thread_local"),
        ("run", "capture on side", False),
    ]
    assert cuda.log == once * 2
    assert gc.isenabled()
    replays[1]()
    assert cuda.log[-1] == "replay"


def test_behind_a_capture_that_was_broken_off_none_is_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch would say no more than that it records already; a failed warm-up breaks nothing."""
    cuda = FakeCuda(monkeypatch)
    recorder = CudaGraphRecorder(CUDA)

    def fail_if(is_capturing: bool) -> None:
        if is_capturing == cuda.stack[-1].startswith("capture"):
            raise RuntimeError("it waits for the device")

    with pytest.raises(RuntimeError, match="it waits"):
        recorder.record(lambda: fail_if(False))
    recorder.record(cuda.run)
    with pytest.raises(RuntimeError, match=r"^it waits"):
        recorder.record(lambda: fail_if(True))
    assert (cuda.stack, cuda.pools) == (["outer"], []), "what follows is outside of it"
    with pytest.raises(
        RuntimeError, match=r"before it was broken off \(RuntimeError: it waits for the device\)"
    ):
        recorder.record(cuda.run)


def test_collectives_of_graphs_have_a_communicator_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a function warms up and is captured, and not when it is replayed."""
    cuda = FakeCuda(monkeypatch)
    is_recording: list[bool] = []

    @contextlib.contextmanager
    def recording() -> Iterator[None]:
        is_recording.append(True)
        yield
        is_recording.pop()

    ran: list[bool] = []
    replay = CudaGraphRecorder(CUDA, recording=recording).record(
        lambda: ran.append(bool(is_recording))
    )
    assert ran == [True] * (NUM_WARM_UPS + 1) and not is_recording
    replay()
    assert cuda.log[-1] == "replay"


class Runner:
    """The two things that a capture needs of one."""

    def __init__(self) -> None:
        tables = [torch.zeros(5, 65, dtype=torch.int32) for _ in range(2)]
        self.tables = DecodeTables(*tables)
        self.graphs: DecodeGraphs | None = None

        self.mixed: MixedGraphs | None = None
        self.states: StateGraphs | None = None
        self.device = torch.device("cpu")

    def use_graphs(
        self, graphs: DecodeGraphs, mixed: MixedGraphs | None, states: StateGraphs | None
    ) -> None:
        self.graphs, self.mixed, self.states = graphs, mixed, states


def captured(
    kernels: TensorKernels,
    sizes: tuple[int, ...],
    mixed: tuple[int, ...] = (),
    kind: str | None = None,
    **options: Any,
) -> Runner:
    """Return a runner with graphs; `kind`: of recurrent layers, whose states wait for drafts."""
    config, runner = tiny_config(recurrent=None if kind is None else RECURRENT[kind]), Runner()
    pool = KVPool(layout_of(config), 200, torch.device("cpu"))
    model = random_model(kernels, config)
    if kind is not None:
        queue = HostQueue()
        states = StateTable(4, pool, queue)
        room = DraftStates(model, pool, states, queue, most=20).room
        runner.tables = runner.tables._replace(state_slots=states.slots, kept=room)
    capture_graphs(runner, model, pool, GraphSizes(sizes, mixed), tp=SingleRank(), **options)
    return runner


def test_a_start_with_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(capture, "CudaGraphRecorder", lambda device, recording: TapeRecorder())
    with caplog.at_level(logging.INFO):
        graphs = captured(TensorKernels(), (1, 2, 4)).graphs
    assert graphs is not None and graphs.sizes == (1, 2, 4)
    first, *_, last = (record.getMessage() for record in caplog.records)
    assert first == "capturing CUDA graphs: 3"
    assert last.startswith("3 CUDA graphs of 1 to 4 decodes: ") and last.endswith(" GiB")


def test_graphs_over_keys_of_8_bits_have_the_type_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hidden states and logits in the type of such a pool would be cut to its integers."""
    monkeypatch.setattr(capture, "CudaGraphRecorder", lambda device, recording: TapeRecorder())
    config = tiny_config()
    pool = KVPool(layout_of(config, dtype="int8"), 20, torch.device("cpu"))
    model = random_model(TensorKernels(), config)
    make = capture.make_graphs(model, pool, Runner().tables, tp=SingleRank(), dtype=torch.float32)
    graphs = make.decodes((1, 4))
    assert graphs._logits is not None
    assert graphs._hidden.dtype == graphs._logits.dtype == torch.float32


def test_a_start_with_graphs_of_steps_with_prompts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(capture, "CudaGraphRecorder", lambda device, recording: TapeRecorder())
    with caplog.at_level(logging.INFO):
        runner = captured(TensorKernels(), (1, 4), (16, 48), is_limited=True)
    assert runner.graphs is not None and runner.graphs.sizes == (1, 4)
    assert runner.mixed is not None and runner.mixed.sizes[-1] == 48
    first, *_, last = (record.getMessage() for record in caplog.records)
    assert first == "capturing CUDA graphs: 4"
    assert f"decodes, and of {runner.mixed.sizes[0]} to 48 new tokens: " in last
    for table in runner.tables[:2]:
        assert not table.any(), "a check leaves the tables as they were"


def test_a_start_with_graphs_of_states_that_wait_for_drafts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether or not steps with prompts have any."""
    monkeypatch.setattr(capture, "CudaGraphRecorder", lambda device, recording: TapeRecorder())
    with caplog.at_level(logging.INFO):
        runner = captured(TensorKernels(), (1, 4), kind="delta")
    assert runner.mixed is None and runner.states is not None
    first, *_, last = (record.getMessage() for record in caplog.records)
    assert first == "capturing CUDA graphs: 4"
    assert last.startswith("4 CUDA graphs of 1 to 4 decodes, and of up to 20 inputs of guesses: ")
    assert captured(TensorKernels(), (1, 4)).states is None
    assert captured(TensorKernels(), (), kind="delta").states is None


@pytest.mark.parametrize("is_broken_off", [False, True])
def test_states_that_cannot_be_recorded_move_on_kernel_by_kernel(
    is_broken_off: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so, and all else has graphs; behind a capture that breaks off nothing is
    recorded."""

    class NoStates(TapeRecorder):
        is_broken = False

        def record(self, function: Any) -> Any:
            assert not self.is_broken, "torch's allocator stays within the broken capture"
            graphs = function.func.__self__
            if isinstance(graphs, StateGraphs) and self.num_recorded == 5:
                self.is_broken = is_broken_off
                raise RuntimeError("CUDA error: out of memory")
            return super().record(function)

    monkeypatch.setattr(capture, "CudaGraphRecorder", lambda device, recording: NoStates())
    with caplog.at_level(logging.INFO):
        runner = captured(TensorKernels(), (1, 4), (16, 48), kind="delta", is_limited=True)
    assert runner.graphs is not None and runner.mixed is not None and runner.states is None
    said = [record.getMessage() for record in caplog.records]
    (line,) = [line for line in said if "kernel by kernel" in line]
    assert line.startswith("states of rows with guesses are moved on kernel by kernel, which takes")
    assert "graph of 16 inputs of guesses could not be captured: RuntimeError: CUDA error" in line
    assert "guesses" not in said[-1]


class NoChunks(TensorKernels):
    """Kernels that read the host's numbers of a pass with chunks, as experts one by one do."""

    def attention(self, *args: Any, **kwargs: Any) -> Any:
        if args[3].most is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().attention(*args, **kwargs)


def test_passes_that_cannot_be_recorded_are_launched_kernel_by_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so, and decodes have graphs. Where a size was asked for it is an error."""
    monkeypatch.setattr(capture, "CudaGraphRecorder", lambda device, recording: TapeRecorder())
    with caplog.at_level(logging.INFO):
        runner = captured(NoChunks(), (1, 4), (16, 48))
    assert runner.graphs is not None and runner.mixed is None
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "steps with prompts are launched kernel by" in line]) == 1
    with pytest.raises(StartupError, match="not permitted"):
        captured(NoChunks(), (1, 4), (16, 48), is_limited=True)


def test_without_sizes_nothing_is_captured() -> None:
    assert captured(TensorKernels(), ()).graphs is None


def test_why_a_capture_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the end of a broken capture fails too, and that is not what went wrong."""

    class Broken(TapeRecorder):
        def record(self, function: Any) -> Any:
            try:
                raise RuntimeError("out of memory")
            finally:
                raise RuntimeError("capture was invalidated")

    monkeypatch.setattr(capture, "CudaGraphRecorder", lambda device, recording: Broken())
    with pytest.raises(
        StartupError, match=r"graph of 4 decodes .* out of memory; --cuda-graphs off"
    ):
        captured(TensorKernels(), (1, 2, 4))


def test_a_kernel_that_does_not_compile_for_a_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton's errors are none of torch's: they end the start in words, and chunks do without."""

    class TooLarge(TensorKernels):
        def attention(self, *args: Any, **kwargs: Any) -> Any:
            if args[3].most is not None or self.name == "of decodes":
                raise OutOfResources(300_000, 232_448, "shared memory")
            return super().attention(*args, **kwargs)

    monkeypatch.setattr(capture, "CudaGraphRecorder", lambda device, recording: TapeRecorder())
    with caplog.at_level(logging.INFO):
        assert captured(TooLarge(), (1, 4), (16, 48)).mixed is None
    assert "launched kernel by kernel, which takes longer" in caplog.text
    kernels = TooLarge()
    kernels.name = "of decodes"
    with pytest.raises(StartupError, match=r"graph of 4 decodes .* shared memory, .*graphs off"):
        captured(kernels, (1, 4))


def test_a_capture_that_triton_breaks_off_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    recorder = CudaGraphRecorder(CUDA)

    def fail() -> None:
        if cuda.stack[-1].startswith("capture"):
            raise OutOfResources(300_000, 232_448, "shared memory")

    with pytest.raises(OutOfResources):
        recorder.record(fail)
    with pytest.raises(RuntimeError, match=r"broken off \(OutOfResources: .*shared memory"):
        recorder.record(cuda.run)


@pytest.mark.parametrize("fault", ["old positions", "no KV is written", "nothing is replayed"])
def test_a_graph_that_replays_something_else(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay is compared with the same pass: on the first token of rows, and on the second."""

    class Wrong(TapeRecorder):
        def record(self, function: Any) -> Any:
            replay, graphs = super().record(function), function.func.__self__

            def wrong() -> None:
                pools = (*graphs._pool.k, *graphs._pool.v)
                before = [pool.clone() for pool in pools]
                if fault == "old positions":
                    graphs._positions.zero_()
                if fault != "nothing is replayed":
                    replay()
                if fault == "no KV is written":
                    for pool, old in zip(pools, before, strict=True):
                        pool.copy_(old)

            return replay if self.num_recorded == 1 else wrong

    monkeypatch.setattr(capture, "CudaGraphRecorder", lambda device, recording: Wrong())
    with pytest.raises(StartupError, match=r"graph of [12] decodes replays other logits .*limit"):
        captured(TensorKernels(), (1, 2, 4))


def test_a_check_leaves_the_tables_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "CudaGraphRecorder", lambda device, recording: TapeRecorder())
    for table in captured(TensorKernels(), (1, 2, 4)).tables[:2]:
        assert not table.any()


def test_the_first_replay_is_part_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than others, and what fails on the device fails there."""
    replayed: list[int] = []

    class Failing(TapeRecorder):
        def record(self, function: Any) -> Any:
            super().record(function)
            number = self.num_recorded
            return lambda: replayed.append(number)

        def memory(self) -> MemoryUse:
            if replayed == [1, 2]:
                raise RuntimeError("an illegal memory access was encountered")
            return super().memory()

    monkeypatch.setattr(capture, "CudaGraphRecorder", lambda device, recording: Failing())
    with pytest.raises(StartupError, match=r"graph of 2 decodes .* an illegal memory access"):
        captured(TensorKernels(), (1, 2, 4))


MIB = 1 << 20


@pytest.mark.parametrize(
    ("before", "after", "taken"),
    [
        ((10, 90), (15, 97), 7),  # five of the allocator's, two of the driver's
        ((10, 90), (15, 95), 5),
        ((10, 90), (15, 40), 5),  # another process has ended meanwhile
        ((10, 90), (15, 9000), 5 + 64),  # another one has begun
        ((10, 90), (10, 92), 2),
        ((15, 95), (10, 90), -5),  # what the graphs before have left is enough
    ],
)
def test_what_a_graph_takes_on_a_device_that_others_use(
    before: tuple[int, int], after: tuple[int, int], taken: int
) -> None:
    first, second = (MemoryUse(*(MIB * number for number in use)) for use in (before, after))
    assert second.since(first) == taken * MIB


# Options of CUDA graphs: where nothing has a use for them they are refused.

CUDA_OPTIONS, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cuda_graphs": "on"}, "--cuda-graphs must be one of auto, off"),
        ({"cuda_graphs": "off", "cuda_graph_max_seqs": 8}, "needs --cuda-graphs auto"),
        ({"cuda_graph_max_seqs": 65, "max_num_seqs": 64}, r"at most --max-num-seqs \(64\), got 65"),
        ({"cuda_graphs": "off", "device": "cpu"}, "--cuda-graphs needs a GPU, got --device cpu"),
        ({"cuda_graph_max_seqs": 8, "device": "cpu"}, "--cuda-graph-max-seqs needs a GPU"),
        ({"cuda_graph_max_tokens": 0, "device": "cpu"}, "--cuda-graph-max-tokens needs a GPU"),
        ({"cuda_graphs": "off", "cuda_graph_max_tokens": 8}, "needs --cuda-graphs auto"),
        ({"cuda_graph_max_tokens": -2}, "--cuda-graph-max-tokens must be at least -1, got -2"),
        (
            {"cuda_graphs": "off", "attention_backend": "torch"},
            "--cuda-graphs needs --attention-backend triton, got 'torch'",
        ),
        (
            {"cuda_graph_max_seqs": 8, "attention_backend": "reference"},
            "--cuda-graph-max-seqs needs --attention-backend triton, got 'reference'",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ServeConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, ladder(256)),
        ({"max_num_seqs": 3}, (1, 2, 3)),
        ({"max_num_seqs": 512, "max_num_batched_tokens": 512}, ladder(512)),
        ({"max_num_seqs": 900, "max_num_batched_tokens": 900}, ladder(512)),
        (
            {"max_num_seqs": 900, "max_num_batched_tokens": 900, "cuda_graph_max_seqs": 700},
            ladder(700),
        ),
        ({"cuda_graph_max_seqs": 4}, (1, 2, 4)),
        ({"cuda_graphs": "off"}, ()),
    ],
)
def test_sizes_on_a_gpu(fields: dict[str, Any], sizes: tuple[int, ...]) -> None:
    assert graph_sizes(ServeConfig(**fields), TensorKernels(), CUDA_OPTIONS).decodes == sizes


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, mixed_ladder(2048)),
        ({"max_num_batched_tokens": 300}, mixed_ladder(300)),
        ({"cuda_graph_max_tokens": 5000}, mixed_ladder(5000)),
        ({"cuda_graph_max_tokens": 0}, ()),
        ({"cuda_graphs": "off"}, ()),
    ],
)
def test_sizes_of_steps_with_prompts(fields: dict[str, Any], sizes: tuple[int, ...]) -> None:
    assert graph_sizes(ServeConfig(**fields), TensorKernels(), CUDA_OPTIONS).mixed == sizes


@pytest.mark.parametrize(
    ("kernels", "device"), [(ReferenceKernels(), CUDA_OPTIONS), (TensorKernels(), CPU)]
)
def test_where_there_can_be_none(kernels: ReferenceKernels, device: torch.device) -> None:
    """What --device auto and --attention-backend auto came to is known in the worker alone."""
    assert graph_sizes(ServeConfig(), kernels, device) == GraphSizes()
    for fields in ({"cuda_graphs": "off"}, {"cuda_graph_max_seqs": 8}):
        with pytest.raises(
            ConfigError, match=r"--cuda-graph.* needs a GPU and --attention-backend"
        ):
            graph_sizes(ServeConfig(**fields), kernels, device)


def test_profiles_of_steps_with_and_without_graphs_or_tuned_kernels_differ() -> None:
    kinds = (
        {},
        {"kernel_tuning": "off"},
        {"kernel_tuning": "off", "cuda_graphs": "off"},
        {"cuda_graphs": "off"},
        {"cuda_graph_max_seqs": 8},
        {"cuda_graph_max_seqs": 9},
        {"cuda_graph_max_tokens": 0},
    )
    keys = [profile_key(ServeConfig(**fields)) for fields in kinds]
    assert len({key.digest for key in keys}) == len(kinds)
    assert {field for kind in kinds for field in kind} <= set(FIELDS)
