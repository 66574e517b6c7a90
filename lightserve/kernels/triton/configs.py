"""How attention kernels are cut up: block sizes, warps, stages, splits.

The built-in ones are made by reading what the compiler makes of them (bench/kernels_offline.py,
with the reasons in bench/README.md); `tuning` measures better ones for a machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import torch


@dataclass(frozen=True)
class PrefillConfig:
    """One program takes `block_m` queries: tokens x heads of a group."""

    block_m: int
    block_n: int
    """Positions of the context that are taken at once."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class DecodeConfig:
    """One program takes stretches of contexts, each with all query heads of a KV head."""

    block_n: int
    """Positions of the context that are taken at once."""
    num_warps: int
    num_stages: int
    programs_per_sm: int
    split_len: int
    """Shortest stretch of a context that is worth a split, in tokens; a multiple of block_n."""


@dataclass(frozen=True)
class AttentionShape:
    """What layers with the same attention have in common, on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


class ChunkClass(StrEnum):
    """What prefill work looks like, as far as another configuration may suit it better."""

    SHORT = "short"
    """Few tokens: the blocks of all heads do not fill the GPU."""
    WHOLE = "whole"
    """Prompts, mostly from their beginning."""
    CACHED = "cached"
    """Chunks whose context is mostly in the pool already."""


@dataclass(frozen=True)
class Gpu:
    """What kernels are fitted to."""

    name: str
    capability: int
    """Compute capability: 80, 90, …; 0 is Triton's interpreter."""
    num_sms: int
    shared_bytes: int
    """Most shared memory of a block."""


INTERPRETER = Gpu("interpreter", 0, 2, 1 << 20)
HOPPER = Gpu("sm_90", 90, 132, 227 << 10)
AMPERE = Gpu("sm_80", 80, 108, 163 << 10)


@cache
def gpu_of(device: torch.device) -> Gpu:
    """Return what a device is; "meta", for which kernels are only compiled, is a Hopper GPU."""
    if device.type == "cpu":
        return INTERPRETER
    if device.type == "meta":
        return HOPPER
    facts = torch.cuda.get_device_properties(device)
    return Gpu(
        name=facts.name,
        capability=10 * facts.major + facts.minor,
        num_sms=facts.multi_processor_count,
        shared_bytes=facts.shared_memory_per_block_optin,
    )


class AttentionConfigs:
    """Configurations by shape: measured ones where there are any, else the built-in ones."""

    def __init__(
        self,
        prefill: Mapping[tuple[AttentionShape, ChunkClass], PrefillConfig] | None = None,
        decode: Mapping[AttentionShape, DecodeConfig] | None = None,
    ) -> None:
        self._prefill = dict(prefill or {})
        self._decode = dict(decode or {})

    def prefill(self, shape: AttentionShape, gpu: Gpu, chunks: ChunkClass) -> PrefillConfig:
        """Return the configuration of a step's prefill work."""
        return self._prefill.get((shape, chunks)) or default_prefill(shape, gpu)

    def decode(self, shape: AttentionShape, gpu: Gpu) -> DecodeConfig:
        """Return the configuration of decodes; one for all batches (see `decode`)."""
        return self._decode.get(shape) or default_decode(shape, gpu)


def default_prefill(shape: AttentionShape, gpu: Gpu) -> PrefillConfig:
    """Return the built-in configuration of prefill work."""
    if gpu.capability == 0:
        return PrefillConfig(64, 64, 4, 2)
    if shape.dtype == torch.float32:  # for tests: no matrix products on tensor cores
        return PrefillConfig(32, 32 if _padded(shape) <= 128 else 16, 4, 1)
    return next(
        (
            config
            for config in _prefills(shape, gpu)
            if prefill_bytes(config, shape) <= gpu.shared_bytes
        ),
        PrefillConfig(64, 16, 4, 1),
    )


def _prefills(shape: AttentionShape, gpu: Gpu) -> list[PrefillConfig]:
    """Return built-in configurations, best first."""
    has_wgmma = gpu.capability == 90
    width = _padded(shape)
    if width <= 64:
        return [
            PrefillConfig(128, 64, 4, 3),
            PrefillConfig(128, 64, 8, 2),
            PrefillConfig(64, 32, 4, 2),
        ]
    if width <= 128:
        wide = [PrefillConfig(128, 128, 8, 3)] if has_wgmma else []
        return [
            *wide,
            PrefillConfig(128, 64, 8, 3),
            PrefillConfig(128, 64, 8, 2),
            PrefillConfig(64, 32, 4, 2),
        ]
    wide = [PrefillConfig(128, 32, 8, 3)] if has_wgmma else []
    return [
        *wide,
        PrefillConfig(128, 32, 8, 2),
        PrefillConfig(64, 32, 8, 2),
        PrefillConfig(64, 16, 4, 2),
    ]


def default_decode(shape: AttentionShape, gpu: Gpu) -> DecodeConfig:
    """Return the built-in configuration of decodes.

    A block of keys and values is 32 KiB, and three programs per multiprocessor have one or two of
    them on the way each: about three times what the latency of memory asks for on an H200.
    """
    if gpu.capability == 0:
        return DecodeConfig(64, 4, 2, 2, 128)
    if shape.dtype == torch.float32:
        return DecodeConfig(16, 4, 1, 4, 256)
    block_n = max(16, 8192 // max(64, _padded(shape)))
    stages = 3
    while stages > 1 and decode_bytes(block_n, stages, shape) > gpu.shared_bytes:
        stages -= 1
    per_sm = max(
        1, min(4 if stages == 1 else 3, gpu.shared_bytes // decode_bytes(block_n, stages, shape))
    )
    return DecodeConfig(block_n, 4, stages, per_sm, 256)


def prefill_bytes(config: PrefillConfig, shape: AttentionShape) -> int:
    """Return about how much shared memory a prefill program takes."""
    tokens = config.block_m + 2 * config.num_stages * config.block_n
    return tokens * _padded(shape) * shape.dtype.itemsize


def decode_bytes(block_n: int, num_stages: int, shape: AttentionShape) -> int:
    """Return about how much shared memory a decode program takes."""
    queries = max(16, 1 << (shape.group - 1).bit_length())
    tokens = queries + 2 * max(1, num_stages - 1) * block_n
    return tokens * _padded(shape) * shape.dtype.itemsize + 4096


def _padded(shape: AttentionShape) -> int:
    return max(16, 1 << (shape.head_dim - 1).bit_length())
