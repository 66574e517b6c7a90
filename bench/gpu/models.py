"""Plans as the router would send them, executed by the worker's own loop.

A decode never needs its input token from the router, so all plans of a measurement are made
beforehand and the loop finds the next one waiting whenever it looks: what is measured is the
worker, in a steady state, with one plan ahead.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from bench.gpu.attention import Order, slot_table
from bench.gpu.device import Machine, device_intervals, length, profiled, union
from bench.gpu.table import Bench
from lightserve.config import ServeConfig
from lightserve.errors import ModelLoadError
from lightserve.kernels.interface import Kernels
from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.messages.router_worker import (
    AddSequence,
    OutputKind,
    PlanRow,
    RouterToWorker,
    SlotRange,
    StepPlan,
    StepResult,
    WorkerToRouter,
    pack_decodes,
    row_results,
)
from lightserve.models.base import Model, Part, TensorParallel, kv_layout
from lightserve.models.config import CONFIG_FILE, ModelConfig, load_model_config
from lightserve.models.families import build_model
from lightserve.models.image_processor import CLIP, PREPROCESSOR_FILE
from lightserve.models.layers.linear import ModelContext, UnquantizedMethod
from lightserve.models.layers.quantized import StoredMethod
from lightserve.models.stored_weights import StoredWeight
from lightserve.models.weight_files import EMBEDDING, LM_HEAD, expected_tensors
from lightserve.types import RowId, SamplingParams, StepId
from lightserve.worker.build import build_runner
from lightserve.worker.model_runner import ModelRunner
from lightserve.worker.step_loop import serve

GREEDY = SamplingParams(temperature=0.0)
WARM_STEPS = 5
"""At the beginning of a run that do not count."""


class _OutOfPlans(Exception):
    pass


class ScriptedLink:
    """The worker's end of a link whose plans are all there already."""

    def __init__(self, plans: Sequence[StepPlan]) -> None:
        self.results: list[StepResult] = []
        self.sent_s: list[float] = []
        """When each result left."""
        self.num_rejected = 0
        self._plans = deque(plans)
        self._quiet_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def send(self, message: WorkerToRouter) -> None:
        """Take a result."""
        self.sent_s.append(time.perf_counter())
        assert isinstance(message, StepResult)
        self.results.append(message)

    def receive(self, timeout_s: float | None = 0.0) -> RouterToWorker | None:
        """Return the next plan; when there is none, end the loop as soon as it would block."""
        if self._plans:
            return self._plans.popleft()
        if timeout_s is None:
            raise _OutOfPlans
        return None

    def close(self) -> None:
        """Close what `fileno` returns."""
        os.close(self._quiet_fd)

    def fileno(self) -> int:
        """Return a descriptor that is never readable."""
        return self._quiet_fd

    def is_readable(self) -> bool:
        """Whether a plan is there."""
        return bool(self._plans)


@dataclass(frozen=True)
class Run:
    """What a run of plans gave."""

    plans: Sequence[StepPlan]
    results: list[StepResult]
    gaps_s: list[float]
    """Between successive results, those of the first steps left out."""
    whole_s: float
    """From the first plan to the last result."""

    @property
    def median_s(self) -> float:
        """Of a step."""
        return statistics.median(self.gaps_s)

    @property
    def token_ids(self) -> dict[RowId, list[int]]:
        """Return the tokens of each row, in order."""
        found: dict[RowId, list[int]] = {}
        for plan, result in zip(self.plans, self.results, strict=True):
            for row in row_results(plan, result):
                assert row.error is None, row
                found.setdefault(row.row, []).extend(row.token_ids)
        return found


def run_plans(runner: ModelRunner, plans: Sequence[StepPlan]) -> Run:
    """Have the worker's loop execute plans, one after the other."""
    numbered = [replace(plan, step_id=StepId(number)) for number, plan in enumerate(plans)]
    link = ScriptedLink(numbered)
    gc.disable()  # the worker freezes what is there before it serves: it has no long collections
    start_s = time.perf_counter()
    try:
        serve(runner, link, is_first_rank=True)
    except _OutOfPlans:
        pass
    finally:
        gc.enable()
        link.close()
    assert len(link.results) == len(plans), (len(link.results), len(plans))
    gaps_s = [after - before for before, after in pairwise(link.sent_s)]
    skipped = max(0, min(WARM_STEPS, len(gaps_s) - 1))
    return Run(numbered, link.results, gaps_s[skipped:], link.sent_s[-1] - start_s)


def device_busy_s(bench: Bench, runner: ModelRunner, plans: Sequence[StepPlan]) -> float | None:
    """Return the seconds per plan in which the device did anything, by a profiled run.

    None: nothing ran on a device.
    """
    path = bench.out / "steps.trace.json"
    with profiled(bench.machine, path):
        run_plans(runner, plans)
    busy = union(device_intervals(path))
    path.unlink()
    return 1e-6 * length(busy) / len(plans) if busy else None


class Sequences:
    """Rows 0 … of random prompts, with slots in the order in which the allocator gives them."""

    def __init__(
        self,
        num_rows: int,
        length: int,
        *,
        vocab_size: int,
        sampling: SamplingParams = GREEDY,
        first_row: int = 0,
        first_slot: int = 0,
        num_state_slots: int = 0,
        seed: int = 0,
    ) -> None:
        """`length`: positions of each row; slots first_slot … are taken, then those of states."""
        rng = np.random.default_rng(seed)
        self.num_rows, self.length, self._first_row = num_rows, length, first_row
        self.slots = slot_table(Order.BLOCKS, num_rows, length, seed=seed).numpy() + first_slot
        states = first_slot + num_rows * length + np.arange(num_rows * num_state_slots)
        self._state_slots = states.reshape(num_rows, num_state_slots)
        self._tokens = rng.integers(0, vocab_size, (num_rows, length), dtype=np.int32)
        self._sampling = sampling

    def prefills(self, context: int, *, budget: int) -> list[StepPlan]:
        """Return plans of at most `budget` tokens that compute the first `context` of each row.

        The chunk that ends there gives a token.
        """
        plans: list[StepPlan] = []
        pieces: list[tuple[int, int, int]] = []
        left = budget
        for row in range(self.num_rows):
            start = 0
            while start < context:
                count = min(left, context - start)
                pieces.append((row, start, count))
                start, left = start + count, left - count
                if left == 0:
                    plans.append(self.plan(pieces, context))
                    pieces, left = [], budget
        return [*plans, self.plan(pieces, context)] if pieces else plans

    def decodes(
        self, context: int, num_steps: int, *, num_rows: int | None = None
    ) -> list[StepPlan]:
        """Return successive decodes of the first `num_rows` rows from `context` tokens on."""
        rows = range(num_rows or self.num_rows)
        return [
            self.plan([(row, context + step, 1) for row in rows], 0) for step in range(num_steps)
        ]

    def guessed(self, context: int, num_steps: int, num_guesses: int) -> list[StepPlan]:
        """Return decodes of the first row with guesses; plans say where it is at most."""
        plans, width = [], 1 + num_guesses
        for start in range(context, context + num_steps * width, width):
            own = self.slots[0, start : start + width]
            decodes = pack_decodes([self._id(0)], [start], own, [num_guesses])
            plans.append(StepPlan(StepId(0), [], [], [], decodes))
        return plans

    def plan(
        self,
        pieces: Iterable[tuple[int, int, int]],
        context: int,
    ) -> StepPlan:
        """Return a plan of (row, start, number of tokens); `context`: where prompts end."""
        pieces = list(pieces)
        decodes = [piece for piece in pieces if piece[1] and piece[2] == 1 and piece[1] >= context]
        held = [self.slots[row, start] for row, start, _ in decodes]
        others = [piece for piece in pieces if piece not in decodes]
        ranges = [
            SlotRange(self._id(row), start, pack_int32(self.slots[row, start : start + count]))
            for row, start, count in others
        ]
        begun = [row for row, start, _ in pieces if start == 0]
        for row in begun:
            if len(own := self._state_slots[row]):
                ranges.append(SlotRange(self._id(row), -len(own), pack_int32(own)))
        return StepPlan(
            step_id=StepId(0),
            sequences=[self._sequence(row, context) for row in begun],
            slot_ranges=ranges,
            decodes=pack_decodes(
                [self._id(row) for row, _, _ in decodes], [start for _, start, _ in decodes], held
            ),
            rows=[
                PlanRow(
                    self._id(row),
                    start,
                    count,
                    OutputKind.SAMPLE if start + count >= context else OutputKind.NONE,
                )
                for row, start, count in others
            ],
        )

    def move(self, row: int, slots: Sequence[int]) -> SlotRange:
        """Give the first positions of a row other slots."""
        self.slots[row, : len(slots)] = slots
        return SlotRange(self._id(row), 0, pack_int32(slots))

    def _sequence(self, row: int, context: int) -> AddSequence:
        tokens = TokenSegment(token_ids=pack_int32(self._tokens[row, :context]))
        return AddSequence(self._id(row), [tokens], self._sampling, context, [])

    def _id(self, row: int) -> RowId:
        return RowId(self._first_row + row)


BYTES = 2
"""Of a bfloat16."""
FP8_BLOCK, FP8_SPREAD = 128, 64.0
"""Inputs that share a factor, and the standard deviation of their values."""


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _shape(
    architecture: str, sizes: tuple[int, ...], *, theta: float = 10_000.0, **more: Any
) -> Mapping[str, Any]:
    """`sizes`: hidden, intermediate, layers, query heads, KV heads, vocabulary, positions."""
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
    )
    return {
        "architectures": [architecture],
        **dict(zip(names, sizes, strict=True)),
        "rms_norm_eps": 1e-5,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        **_rope(theta),
        **more,
    }


LLAMA_8B = _shape("LlamaForCausalLM", (4096, 14_336, 32, 32, 8, 128_256, 16_384), theta=500_000.0)
"""Llama 3 8B, for longer sequences."""
QWEN_HALF_B = _shape(
    "Qwen2ForCausalLM",
    (896, 4864, 24, 14, 2, 151_936, 16_384),
    theta=1_000_000.0,
    tie_word_embeddings=True,
)
"""Qwen2.5 0.5B."""


def _recurrent(heads: tuple[int, int, int, int], head_dim: int, *sizes: int) -> Mapping[str, Any]:
    """Return Qwen3.5's; `heads`: key and value heads of recurrent layers, and their sizes."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    own = {f"linear_{name}": size for name, size in zip(names, heads, strict=True)}
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    own |= {"head_dim": head_dim, "rope_parameters": rope}
    return _shape("Qwen3_5ForCausalLM", sizes, **own)


QWEN_9B = _recurrent((16, 32, 128, 128), 256, 4096, 12_288, 32, 16, 4, 248_320, 16_384)
"""Qwen3.5 9B: three layers with states for each with attention."""
TINY_HYBRID = _recurrent((2, 4, 16, 12), 32, 64, 96, 4, 4, 2, 200, 64)


def _seeing(text: Mapping[str, Any], side: int, patch: int, *sizes: int) -> Mapping[str, Any]:
    """Return LLaVA-1.5's: a CLIP before a Llama; sizes as of `_shape`, up to heads."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    own = dict(zip(names, sizes, strict=True)) | {"image_size": side, "patch_size": patch}
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "dtype": "bfloat16",
        "text_config": {"model_type": "llama", **text},
        "vision_config": {"model_type": "clip_vision_model", **own},
        "image_token_index": text["vocab_size"] - 64,
    }


_LLAMA_7B = _shape("LlamaForCausalLM", (4096, 11_008, 32, 32, 32, 32_064, 4096))
LLAVA_7B = _seeing(_LLAMA_7B, 336, 14, 1024, 4096, 24, 16)
"""LLaVA-1.5 7B."""
TINY_LLAMA = _shape("LlamaForCausalLM", (64, 96, 2, 4, 2, 200, 64))
TINY_LLAVA = _seeing(TINY_LLAMA, 28, 7, 32, 64, 3, 2)
TINY_QWEN = _shape("Qwen2ForCausalLM", (32, 48, 2, 2, 1, 200, 64), tie_word_embeddings=True)


class RandomReader:
    """A `WeightReader` whose tensors are random numbers, drawn on the device."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._shapes = expected_tensors(config)
        self._generator = torch.Generator(device).manual_seed(0)

    def has(self, name: str) -> bool:
        """See `WeightReader.has`."""
        return name in self._shapes

    def read_into(
        self, target: Tensor, name: str, *, rows: Part | None = None, columns: Part | None = None
    ) -> None:
        """See `WeightReader.read_into`."""
        if name not in self._shapes:
            raise ModelLoadError(f"random weights: tensor {name!r} is missing")
        shape = self._shapes[name]
        parts = (rows, columns, *[None] * len(shape))[: len(shape)]
        wanted = [
            size if part is None else part.size for size, part in zip(shape, parts, strict=True)
        ]
        if list(target.shape) != wanted:
            raise ModelLoadError(f"random weights: {name!r} is {wanted}, not {list(target.shape)}")
        mean, std = _moments(name, shape)
        target.normal_(mean, std, generator=self._generator)


class Fp8Reader(RandomReader):
    """Random weights of a checkpoint whose products' weights are FP8, in blocks of 128."""

    def read_stored(
        self, name: str, *, rows: Part | None = None, columns: Part | None = None
    ) -> StoredWeight | None:
        """See `WeightReader.read_stored`."""
        shape = self._shapes[name]
        if len(shape) < 2 or name in (EMBEDDING, LM_HEAD):
            return None
        wanted = [
            size if part is None else part.size
            for size, part in zip(shape, (rows, columns), strict=True)
        ]
        numbers = torch.empty(wanted, device=self.device).normal_(generator=self._generator)
        values = (numbers * FP8_SPREAD).to(torch.float8_e4m3fn)
        groups = -(-wanted[1] // FP8_BLOCK)
        factor = _moments(name, shape)[1] / FP8_SPREAD
        factors = torch.full((wanted[0], groups), factor, device=self.device)
        return StoredWeight(values, factors, None, 8, FP8_BLOCK)


def _moments(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return mean and standard deviation of a tensor's values."""
    if len(shape) == 1:
        return (1.0, 0.1) if name.endswith("weight") else (0.0, 0.3)
    return 0.0, 1.0 if name == EMBEDDING else 1.0 / math.sqrt(math.prod(shape[1:]))


def load_random(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    kernels: Kernels,
    tp: TensorParallel,
    context_len: int | None = None,
    device: torch.device | None = None,
    is_fp8: bool = False,
    **_: Any,
) -> Model:
    """Do what `load_model` does, without files but `path`/config.json."""
    del path
    make = Fp8Reader if is_fp8 else RandomReader
    context = ModelContext(
        config=config,
        reader=make(config, dtype=dtype, device=device or torch.device("cpu")),
        kernels=kernels,
        tp=tp,
        method=StoredMethod(kernels) if is_fp8 else UnquantizedMethod(kernels),
        context_len=context_len or config.max_position_embeddings,
    )
    return build_model(context)


@dataclass(frozen=True)
class RandomModel:
    """A directory with nothing but a config.json, and what follows from it."""

    path: Path
    config: ModelConfig

    @staticmethod
    def make(path: Path, values: Mapping[str, Any]) -> RandomModel:
        """Write the directory."""
        path.mkdir(parents=True, exist_ok=True)
        (path / CONFIG_FILE).write_text(json.dumps(values))
        side = values.get("vision_config", {}).get("image_size")
        processor = {
            "image_processor_type": CLIP,
            "size": {"shortest_edge": side},
            "crop_size": {"height": side, "width": side},
        }
        (path / PREPROCESSOR_FILE).write_text(json.dumps(processor))
        return RandomModel(path, load_model_config(path))

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers."""
        return kv_layout(self.config, tp_size=1, dtype="bfloat16").bytes_per_token

    @property
    def num_state_slots(self) -> int:
        """Slots of each row that hold its states."""
        return kv_layout(self.config, tp_size=1, dtype="bfloat16").num_state_slots

    @property
    def decode_weight_bytes(self) -> int:
        """Weights that a decode reads: all but an embedding that is not the LM head as well."""
        shapes = expected_tensors(self.config)
        if not self.config.tie_word_embeddings:
            del shapes[EMBEDDING]
        return BYTES * sum(math.prod(shape) for shape in shapes.values())

    def prefill_operations(self, num_tokens: int) -> int:
        """Operations of a prompt, a multiply-add as two.

        Attention counts the visible pairs. Past the last layer's attention only the last token
        is computed, and only its logits.
        """
        config = self.config
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = config.hidden_size * (heads + 2 * kv_heads)
        rest = config.hidden_size * (heads + 3 * config.intermediate_size)
        layers = config.num_layers
        per_token = layers * qkv + (layers - 1) * rest
        last = rest + config.hidden_size * config.vocab_size
        pairs = num_tokens * (num_tokens + 1) // 2
        return 2 * (num_tokens * per_token + last) + 4 * layers * heads * pairs

    def runner(
        self,
        machine: Machine,
        *,
        kernels: Kernels | None = None,
        is_fp8: bool = False,
        **flags: Any,
    ) -> ModelRunner:
        """Return the server's own runner over random weights; `flags` as `ServeConfig`'s.

        `kernels`: others than the configuration's. `is_fp8`: weights are as FP8 files have them.
        """
        machine.release()
        defaults: dict[str, Any] = {"dtype": "bfloat16", "host_kv_memory": "64MiB"}
        if machine.is_gpu:
            defaults |= {"device": "cuda", "prefix_host_memory": "0"}
        config = ServeConfig(model=str(self.path), **(defaults | flags))

        def load(*args: Any, **options: Any) -> Model:
            own = {"kernels": kernels} if kernels else {}
            return load_random(*args, **(options | own), is_fp8=is_fp8)

        return build_runner(config, load=load)


@contextmanager
def graphs_in_use(runner: ModelRunner, in_use: bool) -> Iterator[None]:
    """Let a runner use the graphs that it has, or do without for a while."""
    graphs, mixed = runner._graphs, runner._mixed
    if not in_use:
        runner._graphs = runner._mixed = None
    try:
        yield
    finally:
        runner._graphs, runner._mixed = graphs, mixed
