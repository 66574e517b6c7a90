"""The check of kernels at the start of a server: passes, notices a wrong kernel, takes how long."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from bench.gpu.context import Bench
from lightserve.errors import StartupError
from lightserve.kernels.self_check import check_kernels
from lightserve.kernels.shapes import KernelShapes
from lightserve.kernels.triton.kernels import TritonKernels


def _shapes(
    sizes: tuple[int, ...], *, windows: tuple[int | None, ...], **more: Any
) -> KernelShapes:
    """`sizes`: hidden, intermediate, query heads, KV heads, head size, longest context."""
    hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, context_len = sizes
    return KernelShapes(
        dtype=torch.bfloat16,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=head_dim,
        sliding_windows=windows,
        rms_norm_eps=1e-5,
        qk_norm=more.get("qk_norm", False),
        qkv_bias=more.get("qkv_bias", False),
        context_len=context_len,
    )


SHAPES = {
    "Llama-3-8B": _shapes((4096, 14_336, 32, 8, 128, 8192), windows=(None,)),
    "Mistral-7B": _shapes((4096, 14_336, 32, 8, 128, 32_768), windows=(4096,)),
    "Qwen2.5-0.5B": _shapes((896, 4864, 14, 2, 64, 32_768), windows=(None,), qkv_bias=True),
    "Qwen3-8B": _shapes((4096, 12_288, 32, 8, 128, 32_768), windows=(None,), qk_norm=True),
}
REHEARSED_SHAPES = {"tiny": _shapes((64, 96, 4, 2, 16, 20), windows=(None,))}


class WrongScale(TritonKernels):
    """Scores that are a tenth too large: no shape and no type shows it."""

    def attention(self, *args: Any, scale: float, **options: Any) -> Tensor:
        """See `Kernels.attention`."""
        return super().attention(*args, scale=1.1 * scale, **options)


def run(bench: Bench) -> None:
    """Check the shapes of well-known models."""
    for name, shapes in (REHEARSED_SHAPES if bench.rehearse else SHAPES).items():
        first_s, error = _timed(bench, TritonKernels(), shapes)
        again_s, _ = _timed(bench, TritonKernels(), shapes)
        note = error or f"{first_s:.2g} s with compilation, {again_s:.2g} s without"
        bench.rows.claim(f"{name} shape: kernels agree with the reference", not error, note)
        _, error = _timed(bench, WrongScale(), shapes)
        bench.rows.claim(f"{name} shape: a wrong scale is refused", "attention" in error, error)


def _timed(bench: Bench, kernels: TritonKernels, shapes: KernelShapes) -> tuple[float, str]:
    """Return the seconds of a check, and what it found wrong or nothing."""
    start_s, found = time.perf_counter(), ""
    try:
        check_kernels(kernels, shapes, bench.machine.device)
    except StartupError as error:
        found = str(error)[:120]
    return time.perf_counter() - start_s, found
