"""Steps of a model runner on a GPU that is not there: `python -m support.device_steps`.

Not under TRITON_INTERPRET=1, where Triton's kernels would be Python functions: so a program.
Everything is what a GPU gets, model, kernels, sampler, copies, graphs, but nothing is computed:

    fake      FakeTensorMode: a tensor on the wrong device is an error, and so is reading a value,
              which is what waiting for the device would be. Launches look at their arguments too.
    variants  tensors of the device "meta" and Triton's own choice of what to compile for each
              launch: prints what a server's start compiles, and what the steps after it would.

Plans are those that the real router core made for a model on the CPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lightserve.kernels.triton.configs import (
    AttentionConfigs,
    AttentionShape,
    ChunkClass,
    Gpu,
    PrefillConfig,
)
from lightserve.kernels.triton.copies import TritonCopies
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.messages.common import RegexConstraint, TokenSegment, pack_int32
from lightserve.messages.router_worker import AddSequence, OutputKind, PlanRow, StepPlan
from lightserve.models.base import SingleRank
from lightserve.router.kv.cache import Preemption
from lightserve.types import MAX_DRAFTS, RequestOutput, RowId, SamplingParams, StepId
from lightserve.worker.constraints import StepMasks
from lightserve.worker.device import CopyStreams, CudaQueue, Event, HostMark, Mark
from lightserve.worker.draft_states import StateGraphs
from lightserve.worker.drafts import Lookup
from lightserve.worker.graphs import DecodeGraphs, ladder
from lightserve.worker.memory import KVPool
from lightserve.worker.mixed_graphs import MixedGraphs
from lightserve.worker.model_runner import ModelRunner
from lightserve.worker.profiling import ShapeLimits, random_steps
from lightserve.worker.staged_host_pool import StagedHostPool
from lightserve.worker.step_results import Pending
from lightserve.worker.warm_up import warm_up
from support.graph_recorders import RerunRecorder
from support.immediate_copies import ImmediateEvent
from support.lossless import MAX_LEN, MAX_SEQS, NUM_SLOTS
from support.random_model import RECURRENT, layout_of, random_model, tiny_config
from support.recorded_plans import make_runner as make_cpu_runner
from support.recorded_plans import record_steps
from tools.triton_offline import _NoGpu

NUM_STAGED = 24
SEED = 0


class WaitedError(Exception):
    """The host waited for the device where it must not."""


class EndlessMark(HostMark):
    """Of a device that is never done."""

    def is_past(self) -> bool:
        return False

    def wait(self) -> None:
        raise WaitedError


class StepQueue(CudaQueue):
    """As a GPU's, but for what only a driver can do."""

    def mark(self) -> Mark:
        return EndlessMark()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype)


class LastingQueue(StepQueue):
    """Its results are never there: tensors on "meta" cannot be copied to the host."""

    def download(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]


class TunedConfigs(AttentionConfigs):
    """Every class of chunks has a configuration of its own, as after tuning."""

    def prefill(self, shape: AttentionShape, gpu: Gpu, chunks: ChunkClass) -> PrefillConfig:
        config = super().prefill(shape, gpu, chunks)
        return dataclasses.replace(config, num_stages=1 + list(ChunkClass).index(chunks))


class CopyQueue:
    """A stream of copies, all of which are launched at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def run(self, work: Callable[[], None]) -> None:
        work()

    def upload(self, host: Tensor) -> Tensor:
        return host.to(self._device, non_blocking=True)

    def record(self, *, is_timed: bool = False) -> Event:
        return ImmediateEvent()

    def wait(self, event: Event) -> None:
        assert isinstance(event, ImmediateEvent)


class KnownMasks:
    """Constraints whose masks are there at once."""

    def __init__(self) -> None:
        self._rows: set[RowId] = set()

    def update(self, left_rows: Sequence[RowId], sequences: Sequence[AddSequence]) -> None:
        self._rows.difference_update(left_rows)
        for sequence in sequences:
            change = self._rows.discard if sequence.constraint is None else self._rows.add
            change(sequence.row)

    def among(self, rows: Sequence[RowId], *_: object) -> frozenset[RowId]:
        return frozenset(self._rows.intersection(rows))

    def begin(self, rows: Sequence[RowId], *_: object) -> Callable[[], StepMasks] | None:
        indices = [index for index, row in enumerate(rows) if row in self._rows]
        bits = np.full((len(indices), 28), 255, dtype=np.uint8)
        return (
            (lambda: StepMasks(indices, bits, None, frozenset(), frozenset())) if indices else None
        )


@dataclass(frozen=True)
class Size:
    """Of a runner; on "meta" nothing takes memory."""

    num_slots: int
    max_seqs: int
    max_len: int
    max_tokens: int


SMALL = Size(NUM_SLOTS, MAX_SEQS, MAX_LEN, 40)
"""What the recorded plans are for."""
LARGE = Size(200_000, 64, 32_768, 8192)


def make_runner(
    queue: StepQueue, size: Size = SMALL, kind: str | None = None, *, has_mixed: bool = False
) -> ModelRunner:
    """Return a runner as a GPU has it, with graphs for some numbers of decodes.

    `kind`: of recurrent layers, see `RECURRENT`. `has_mixed`: other steps have graphs, too.
    """
    device = queue.device
    recurrent = None if kind is None else RECURRENT[kind]
    config = tiny_config(
        sliding_windows=(None, 24), max_position_embeddings=size.max_len, recurrent=recurrent
    )
    dtype = torch.bfloat16 if kind is None else torch.float32  # states as long as in the plans
    name = str(dtype).removeprefix("torch.")
    pool = KVPool(layout_of(config, name), size.num_slots, device)
    pieces = [(tensor.shape[:3].numel(), tensor.shape[4]) for tensor in pool.tensors]

    def rows(number: int) -> list[Tensor]:
        return [torch.empty(number, *piece, dtype=dtype, device=device) for piece in pieces]

    copies = CopyQueue(device)
    model = random_model(
        TritonKernels(TunedConfigs()),
        config,
        context_len=size.max_len,
        device=device,
        dtype=dtype,
    )
    host_pool = StagedHostPool(
        pool,
        rows(NUM_SLOTS),
        rows(NUM_STAGED),
        queues=CopyStreams(copies, copies, copies),
        kernels=TritonCopies(),
    )
    host_pool.warm_up()
    runner = ModelRunner(
        model,
        pool,
        SingleRank(),
        host_pool=host_pool,
        queue=queue,
        max_num_seqs=size.max_seqs,
        constraints=KnownMasks(),  # type: ignore[arg-type]  # what a runner calls
        proposer=Lookup(size.max_seqs + 1, queue),
        max_drafted_tokens=size.max_tokens,
    )
    recorder, tables, mixed, states = RerunRecorder(), runner.tables, None, None
    graphs = DecodeGraphs(model, pool, tables, sizes=ladder(4), recorder=recorder, has_logits=True)
    with torch.inference_mode():
        if has_mixed:
            mixed = MixedGraphs(model, pool, tables, sizes=(16, size.max_tokens), recorder=recorder)
            mixed.capture()
        if has_mixed and kind is not None:
            sizes = (16, size.max_tokens)
            states = StateGraphs(model, pool, tables, sizes=sizes, recorder=recorder)
            states.capture()
        graphs.capture()
    runner.use_graphs(graphs, mixed, states)
    return runner


@contextmanager
def an_h200() -> Iterator[None]:
    """Have torch and Triton say that there is one."""
    facts = SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        shared_memory_per_block_optin=227 << 10,
    )
    before = driver._active
    driver.set_active(_NoGpu(90))
    try:
        with mock.patch.object(torch.cuda, "get_device_properties", lambda _: facts):
            yield
    finally:
        driver._active = before


def launch_all(runner: ModelRunner, plans: Sequence[StepPlan]) -> Pending:
    for plan in plans:
        pending = runner.launch(plan)
        runner.copy_ahead(plan)
    return pending


VECTORS = [
    {"output": RequestOutput.VECTOR, "sampling": SamplingParams(allowed_token_ids=ids)}
    for ids in ((), (5, 7))  # and logits of tokens in its place
]


def recorded_plans() -> list[StepPlan]:
    """Return the plans of a schedule, some sequences under a constraint, some for a vector."""
    changes = itertools.cycle([{"constraint": RegexConstraint(pattern="a")}, {}, *VECTORS, {}])
    plans = []
    for step in record_steps(make_cpu_runner(), SEED, preemption=Preemption.CHECKPOINT):
        sequences = [
            msgspec.structs.replace(sequence, **next(changes)) for sequence in step.plan.sequences
        ]
        plans.append(msgspec.structs.replace(step.plan, sequences=sequences))
    return [*plans, *drafted_plans()]


def drafted_plans(kind: str | None = None) -> list[StepPlan]:
    """Return the plans of a schedule with drafts; `kind`: of recurrent layers, see `RECURRENT`."""
    runner = make_cpu_runner(kind=kind)
    steps = record_steps(runner, SEED, preemption=Preemption.CHECKPOINT, max_drafts=MAX_DRAFTS)
    return [step.plan for step in steps]


def large_plans() -> list[StepPlan]:
    """Return steps of all sizes: decodes, chunks behind cached tokens, both; plain sampling."""
    limits = ShapeLimits(LARGE.max_seqs, LARGE.max_tokens, LARGE.max_len, LARGE.num_slots)
    shapes = [
        rows for seed in range(3) for rows in itertools.islice(random_steps(limits, seed), 40)
    ]
    sampling, known = SamplingParams(temperature=0.0), [TokenSegment(token_ids=pack_int32([1]))]
    return [
        StepPlan(
            step_id=StepId(number),
            sequences=[AddSequence(RowId(row), known, sampling, 1, []) for row in range(len(rows))],
            slot_ranges=[],
            rows=[
                PlanRow(RowId(row), start, count, OutputKind.SAMPLE)
                for row, (start, count) in enumerate(rows)
            ],
        )
        for number, rows in enumerate(shapes)
    ]


# fake


class WaitingForNothing(TorchDispatchMode):
    """An operation on tensors of two devices is an error, but for copies that the host leaves to
    run."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_flatten((args, kwargs))[0]
        devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            devices.add(kwargs["device"])
        if len(devices) > 1:
            is_left_to_run = kwargs.get("non_blocking") or args[2:] == (True,)
            if func not in COPIES or not is_left_to_run:
                raise WaitedError(f"{func} on {devices}")
        return func(*args, **kwargs)


class NoLists(TorchFunctionMode):
    """A list as an index is an error: it would wait for all that the device has to do."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].device.type != "cpu":
            parts = args[1] if isinstance(args[1], tuple) else args[1:2]
            if any(isinstance(part, list) for part in parts):
                raise WaitedError(f"an index of {args[0].device} is a list")
        return func(*args, **(kwargs or {}))


COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


@contextmanager
def looking_at_launches(device: torch.device) -> Iterator[list[str]]:
    """Have launches look at their arguments and do nothing; yields the kernels' names."""
    names: list[str] = []

    def look(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        for value in (*args, *options.values()):
            if isinstance(value, Tensor) and value.device != device:
                raise RuntimeError(f"{self.fn.__name__}: an argument is on {value.device}")
        names.append(self.fn.__name__)

    run, JITFunction.run = JITFunction.run, look
    try:
        yield names
    finally:
        JITFunction.run = run


def run_fake(
    plans: Sequence[StepPlan], kind: str | None = None, *, has_mixed: bool = False
) -> dict[str, Any]:
    """Launch all plans on fake tensors; see `make_runner`."""
    device = torch.device("cuda:0" if torch.version.cuda else "meta")
    functorch_config.fake_tensor_allow_meta = True
    as_it_is = mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor)  # fake tensors cannot
    with an_h200(), FakeTensorMode(), as_it_is, looking_at_launches(device) as names:
        runner = make_runner(StepQueue(device), kind=kind, has_mixed=has_mixed)
        with NoLists(), WaitingForNothing():
            pending = launch_all(runner, plans)
            try:
                runner.finish(pending)
            except WaitedError:
                waited = "in finish"
            faults = {name: _raised_by(runner, plans[-1], fault) for name, fault in FAULTS.items()}
    return {
        "num_plans": len(plans),
        "kernels": sorted(set(names)),
        "waited": waited,
        "launch_s": pending.launch_s,
        "faults": faults,
    }


FAULTS: dict[str, Callable[[Tensor], Any]] = {
    "a value is read": lambda hidden: hidden[0, 0].item(),
    "a size is read": lambda hidden: hidden[hidden > 0],
    "rows by a list": lambda hidden: hidden[[0, 0]],
    "a tensor on the host": lambda hidden: hidden + torch.ones(len(hidden), 1),
    "a kernel's argument on the host": lambda hidden: TritonKernels().rms_norm(
        hidden, torch.ones(hidden.shape[1]), 1e-5
    ),
}
"""What is done with the hidden states of a step."""


def _raised_by(runner: ModelRunner, plan: StepPlan, fault: Callable[[Tensor], Any]) -> str:
    """Return what launching a plan raises when the model does this as well."""
    model = runner._model
    hidden = model.hidden

    def faulty(*args: Any) -> Tensor:
        found = hidden(*args)
        fault(found)
        return found

    runner._graphs = None
    with mock.patch.object(model, "hidden", faulty):
        try:
            runner.launch(plan)
        except Exception as error:
            return type(error).__name__
    return "nothing"


# variants


@contextmanager
def noting_variants() -> Iterator[set[str]]:
    """Have launches work out what would be compiled for them; yields names with what they are."""
    found: set[str] = set()

    def note(*, key: Any, fn: Any, **_: Any) -> bool:
        found.add(f"{fn.name}: {key}")
        return True  # nothing is compiled

    knobs.runtime.jit_cache_hook = note
    try:
        with an_h200():
            yield found
    finally:
        knobs.runtime.jit_cache_hook = None


class _Executed(ModelRunner):
    """Launches where a warm-up executes: there are no results."""

    def execute(self, plan: StepPlan) -> Any:
        return self.launch(plan)


def run_variants(plans: Sequence[StepPlan]) -> dict[str, Any]:
    """Start, launch plans of all kinds, and say what these would compile."""
    found = {"small": _late(SMALL, plans), "large": _late(LARGE, large_plans())}
    cold = _late(SMALL, plans[:20], is_cold=True)
    return {"num_late_if_cold": len(cold), "late": found}


def run_states(kind: str) -> dict[str, Any]:
    """Launch plans with drafts of a model with states, with graphs of all steps and without."""
    plans, found = drafted_plans(kind), {}
    for has_mixed in (False, True):
        fake = run_fake(plans, kind, has_mixed=has_mixed)
        late = _late(SMALL, plans, kind=kind, has_mixed=has_mixed)
        found[f"mixed {has_mixed}"] = {"fake": fake, "late": late}
    return found


def _late(
    size: Size, plans: Sequence[StepPlan], *, is_cold: bool = False, **options: Any
) -> list[str]:
    """Return what plans would compile after a start, cold: one without a warm-up; `options` of
    `make_runner`."""
    with noting_variants() as found:
        runner = make_runner(LastingQueue(torch.device("meta")), size, **options)
        runner.__class__ = _Executed
        if not is_cold:
            warm_up(runner, max_num_batched_tokens=size.max_tokens)
        at_start = set(found)
        launch_all(runner, plans)
    return sorted(found - at_start)


if __name__ == "__main__":
    recorded = recorded_plans()
    results = {"fake": run_fake(recorded), "variants": run_variants(recorded)}
    print(json.dumps(results | {"states": run_states("delta")}))
