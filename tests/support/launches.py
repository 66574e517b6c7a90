"""Launches of kernels on a GPU that is not there: `python -m support.launches [steps]`.

Not under TRITON_INTERPRET=1, where kernels are Python functions: so a program. Kernels are compiled
and loaded; the driver only notes what it gets. It prints as JSON

    (nothing)   random launches of a kernel of every kind of argument: how many there were, by what
                they were launched, and where the short way differs from Triton's own
    steps       launches of an 8B decode of 64 rows and of a mixed step without graphs, and the
                host's microseconds in them, both ways
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from lightserve.kernels.interface import AttentionBatch
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.kernels.triton.launch import Kernel, launched
from lightserve.worker.memory import KVPool
from support.device_steps import an_h200
from support.random_model import layout_of, random_model, tiny_config
from tools.triton_offline import Loaded, loading


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots"])
def plain_kernel(
    x, other, slots, count, stride, scale, flag, SIZE: tl.constexpr, IS_LARGE: tl.constexpr
):
    places = tl.arange(0, SIZE) * stride
    value = tl.load(x + places, mask=places < count).to(tl.float32) * scale
    value += tl.load(slots)
    if flag:
        value += 1.0
    if IS_LARGE:
        value *= 2.0
    tl.store(x + places, value.to(x.dtype.element_ty), mask=places < count)
    if other is not None:
        tl.store(other + places, value)


short_kernel = launched(plain_kernel)

MEMORY = torch.zeros(256, dtype=torch.uint8)


def at(offset: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor that begins so many bytes behind a multiple of 16."""
    first = -MEMORY.data_ptr() % 16 + offset
    return MEMORY[first : first + 64].view(dtype)


X = [at(0, torch.float32), at(16, torch.float32), at(4, torch.float32), at(0, torch.bfloat16)]
SLOTS = [at(0, torch.int64), at(8, torch.int64), at(0, torch.int32)]
CHOICES: dict[str, list[Any]] = {
    "device": [0, 1],
    "grid": [(1,), (3, 2), (2, 1, 4)],
    "x": [*X, torch.nn.Parameter(X[0])],
    "other": [None, X[0]],
    "slots": SLOTS,
    "count": [7, 0, 1, 16, 2**31, 2**40],
    "stride": [7, 5, 0, 1, 16, 48, 2**31 - 1, 2**31, 2**31 + 1, 2**63, -1, -16],
    "scale": [0.5, 1.0, 3],
    "flag": [True, False],
    "SIZE": [16, 32],
    "IS_LARGE": [False, True],
    "num_warps": [4, 2],
}
"""The first of each is the usual one."""
NUM_LAUNCHES = 2000
KEPT = ("x", "other", "slots", "count", "stride", "scale", "flag")


def launch(kernel: Any, chosen: dict[str, Any]) -> Loaded:
    """Launch one choice and return what the driver got."""
    with mock.patch.object(DRIVER, "device", chosen["device"]):
        options = {name: chosen[name] for name in ("SIZE", "IS_LARGE", "num_warps")}
        options["enable_fp_fusion"] = True
        kernel[chosen["grid"]](*(chosen[name] for name in KEPT), **options)
    return DRIVER.launches[-1]


def choices() -> Iterator[dict[str, Any]]:
    """Yield the usual launch, those that differ from it in one place or two, and all once more."""
    usual = {name: values[0] for name, values in CHOICES.items()}
    found = [usual]
    for name, values in CHOICES.items():
        found += [usual | {name: value} for value in values[1:]]
    rng = random.Random(0)
    singles = found[1:]
    found += [
        one | {name: value for name, value in two.items() if value is not usual[name]}
        for one, two in (rng.sample(singles, 2) for _ in range(20))
    ]
    yield from found
    yield from (rng.choice(found) for _ in range(NUM_LAUNCHES))


def compare() -> dict[str, Any]:
    """Launch everything both ways."""
    calls = {"triton": 0}
    run = JITFunction.run

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        calls["triton"] += 1
        return run(self, *args, **options)

    different, functions, number = [], set(), 0
    with mock.patch.object(JITFunction, "run", counted):
        for chosen in choices():
            number += 1
            own = launch(plain_kernel, chosen)
            short = launch(short_kernel, chosen)
            functions.add(own.function)
            if own.function != short.function or own[2:] != short[2:]:
                different.append(repr((chosen, own, short)))
    usual = {name: values[0] for name, values in CHOICES.items()}
    first = launch(short_kernel, usual).function
    others = {
        name: [
            launch(short_kernel, usual | {name: value}).function != first for value in values[1:]
        ]
        for name, values in CHOICES.items()
    }
    with mock.patch.object(triton, "__version__", "3.10.0"):
        untried = launched(plain_kernel)
    return {
        "num_launches": number,
        "num_functions": len(functions),
        "num_of_triton": calls["triton"] - number,
        "others": others,
        "different": different[:5],
        "is_untried_plain": untried is plain_kernel,
    }


# A step of Llama-3-8B's shape


def batch_of(rows: list[tuple[int, int]]) -> AttentionBatch:
    """Return rows of (new tokens, context), without memory."""
    q_lens, contexts = zip(*rows, strict=True)
    count = sum(q_lens)

    def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return AttentionBatch(
        positions=integers(count),
        slot_mapping=integers(count),
        req_to_slot=integers(257, 8193, dtype=torch.int32),
        rows=integers(len(rows)),
        cu_seqlens_q=integers(len(rows) + 1, dtype=torch.int32),
        context_lens=integers(len(rows), dtype=torch.int32),
        host_rows=tuple(range(len(rows))),
        host_q_lens=q_lens,
        host_context_lens=contexts,
    )


STEPS = {"64 decodes": [(1, 1024)] * 64, "63 decodes, 512": [(1, 1024)] * 63 + [(512, 1024)]}
ROUNDS = 7


@contextmanager
def timed() -> Iterator[list[float]]:
    """Yield the seconds that all launches take together."""
    total = [0.0]
    way = Kernel._launch

    def measured(self: Kernel, *args: Any, **options: Any) -> Any:
        begun_s = time.perf_counter()
        try:
            return way(self, *args, **options)
        finally:
            total[0] += time.perf_counter() - begun_s

    with mock.patch.object(Kernel, "_launch", measured):
        yield total


def tritons(self: Kernel, grid: Any, *arguments: Any, **options: Any) -> Any:
    """Launch as Triton does."""
    return self.function[grid](*arguments, **options)


def steps() -> dict[str, Any]:
    """Return of each step its launches, and microseconds: all of the host's, and of launches."""
    config = tiny_config(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32,
        num_heads=32, num_kv_heads=8, head_dim=128, qkv_bias=False,
        max_position_embeddings=8192,
    )  # fmt: skip
    meta = torch.device("meta")
    model = random_model(
        TritonKernels(), config, context_len=8192, device=meta, dtype=torch.bfloat16
    )
    pool = KVPool(layout_of(config, "bfloat16"), 100_000, meta)
    found = {}
    ways: dict[str, Callable[..., Any]] = {"triton": tritons, "short": Kernel._launch}
    for name, rows in STEPS.items():
        ids = torch.empty(sum(new for new, _ in rows), dtype=torch.int64, device=meta)
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _, way in itertools.product(range(ROUNDS), ways):
            DRIVER.launches.clear()
            with mock.patch.object(Kernel, "_launch", ways[way]), timed() as total:
                begun_s = time.perf_counter()
                model.hidden(ids, batch_of(rows), pool, None)
                times[way].append((time.perf_counter() - begun_s, total[0]))
        found[name] = {"launches": len(DRIVER.launches)} | {
            way: [round(1e6 * sorted(part)[ROUNDS // 2]) for part in zip(*pairs, strict=True)]
            for way, pairs in times.items()
        }
    return found


if __name__ == "__main__":
    with an_h200(), loading(90) as DRIVER, torch.inference_mode():
        print(json.dumps(steps() if "steps" in sys.argv else compare(), indent=1))
