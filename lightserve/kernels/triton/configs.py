"""How attention kernels are cut up: block sizes, warps, stages, splits.

The built-in ones were chosen by reading compiled kernels (bench/engine/kernels_offline.py), with
the reasons in docs/results/kernels_offline.md; `tuning` measures better ones for a machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from lightserve.kernels.interface import FACTOR_BYTES, WORD_BYTES


@dataclass(frozen=True)
class PrefillConfig:
    """One program takes `block_m` queries: tokens x heads of a group."""

    block_m: int
    block_n: int
    """Positions of the context that are taken at once."""
    num_warps: int
    num_stages: int
    split_len: int = 512
    """Shortest stretch of a context that is worth a program of its own, in tokens."""

    def tokens(self, group: int) -> int:
        """Return the tokens of a block, each with all query heads of a KV head."""
        return max(1, self.block_m // group)


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
    """The sizes that layers with the same attention share, on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    has_window: bool
    kv: str = "plain"
    """Kind of keys and values: one of `KV_KINDS`, or plain."""
    turned_dim: int = 0
    """Numbers of a key behind its value, for latents: the first `head_dim` numbers of a key are its
    value. KV heads are blocks of query heads then, which share one."""

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token, in one layer."""
        if self.kv != "plain":
            return 2 * self.num_kv_heads * (self.head_dim + WORD_BYTES)
        numbers = 2 * self.num_kv_heads * self.head_dim
        if self.turned_dim:
            numbers = self.head_dim + self.turned_dim
        return numbers * self.dtype.itemsize


KV_KINDS = {torch.int8: "int8", torch.uint8: "fp8"}
"""Kinds of keys and values by the type of a pool; others are plain."""


class KVOptions(NamedTuple):
    """Facts by which kernels read a pool."""

    kind: str
    """One of `KV_KINDS`; GPUs before sm_89 read "fp8" as "bits"."""
    unit: int
    """Numbers of which strides are multiples, so that kernels know how wide loads may be."""
    strides: list[int]
    """Strides of slots and of heads, in units."""

    @classmethod
    def of(cls, pool: Tensor, gpu: Gpu) -> KVOptions:
        """Return those of a pool [S, Hkv, D], or of 8 bits, and then with factors behind."""
        kind = KV_KINDS.get(pool.dtype, "plain")
        if kind == "fp8" and gpu.capability < 89:
            kind = "bits"
        strides = pool.stride()[:2]
        unit = 1
        if kind != "plain":
            unit = math.gcd(*strides, WORD_BYTES)
            assert unit % FACTOR_BYTES == 0, "a factor is not aligned"
        return cls(kind, unit, [stride // unit for stride in strides])


LATENT_HEADS = 16
"""Most query heads that a program takes over latents."""


def attention_shape(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    has_window: bool,
    value_dim: int,
    kv: str = "plain",
) -> AttentionShape:
    """Return the shape of a rank's attention; values shorter than keys are latents'."""
    if value_dim == head_dim:
        return AttentionShape(num_heads, num_kv_heads, head_dim, dtype, has_window, kv)
    assert num_kv_heads == 1, "heads share latents"
    group = max(size for size in range(1, LATENT_HEADS + 1) if num_heads % size == 0)
    return AttentionShape(
        num_heads, num_heads // group, value_dim, dtype, has_window, kv, head_dim - value_dim
    )


class ChunkClass(StrEnum):
    """Classes of prefill work that different configurations may suit."""

    SHORT = "short"
    """Few tokens: the blocks of all heads do not fill the GPU."""
    WHOLE = "whole"
    """Prompts, mostly from their beginning."""
    CACHED = "cached"
    """Chunks whose context is mostly in the pool already."""


@dataclass(frozen=True)
class Gpu:
    """The GPU that kernels are fitted to."""

    name: str
    capability: int
    """Compute capability: 80, 90, …; 0 is Triton's interpreter."""
    num_sms: int
    shared_bytes: int
    """Most shared memory of a block."""


INTERPRETER = Gpu("interpreter", 0, 16, 1 << 20)
GPUS = {
    gpu.capability: gpu
    for gpu in (
        Gpu("sm_80", 80, 108, 163 << 10),  # A100
        Gpu("sm_89", 89, 58, 99 << 10),  # L4
        Gpu("sm_90", 90, 132, 227 << 10),  # H200
        Gpu("sm_100", 100, 148, 227 << 10),  # B200
        Gpu("sm_120", 120, 170, 99 << 10),  # RTX 5090
    )
}
"""The GPUs that kernels are compiled for offline, by compute capability."""


def gpu_of(device: torch.device) -> Gpu:
    """Return the GPU of a device; "meta" is the GPU of compilation (see `offline`)."""
    if device.type == "cpu":
        return INTERPRETER
    if device.type == "meta":
        return GPUS[driver.active.get_current_target().arch]
    return _cuda_gpu(device)


@cache
def _cuda_gpu(device: torch.device) -> Gpu:
    facts = torch.cuda.get_device_properties(device)
    return Gpu(
        name=facts.name,
        capability=10 * facts.major + facts.minor,
        num_sms=facts.multi_processor_count,
        shared_bytes=facts.shared_memory_per_block_optin,  # type: ignore[attr-defined]
    )


class AttentionConfigs:
    """Configurations by shape: measured ones where there are any, else the built-in ones."""

    def __init__(self) -> None:
        self._measured: dict[
            tuple[AttentionShape, ChunkClass | None], PrefillConfig | DecodeConfig
        ] = {}

    def plus(
        self, shape: AttentionShape, chunks: ChunkClass | None, config: PrefillConfig | DecodeConfig
    ) -> AttentionConfigs:
        """Return these and one more; `chunks` None: for decodes."""
        both = AttentionConfigs()
        both._measured = {**self._measured, (shape, chunks): config}
        return both

    def prefill(self, shape: AttentionShape, gpu: Gpu, chunks: ChunkClass) -> PrefillConfig:
        """Return the configuration of a step's prefill work."""
        found = self._measured.get((shape, chunks))
        return found if isinstance(found, PrefillConfig) else default_prefill(shape, gpu)

    def decode(self, shape: AttentionShape, gpu: Gpu) -> DecodeConfig:
        """Return the configuration of decodes; one for all batches (see `decode`)."""
        found = self._measured.get((shape, None))
        return found if isinstance(found, DecodeConfig) else default_decode(shape, gpu)


def default_prefill(shape: AttentionShape, gpu: Gpu) -> PrefillConfig:
    """Return the built-in configuration of prefill work."""
    if gpu.capability == 0:
        return PrefillConfig(64, 64, 4, 2, 128)
    if shape.dtype == torch.float32:  # for tests: no matrix products on tensor cores
        if shape.turned_dim:
            return PrefillConfig(16, 16, 4, 1)
        return PrefillConfig(32, 32 if padded_dim(shape) <= 128 else 16, 4, 1)
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
    if shape.kv != "plain":  # numbers are made of them in registers, of which there are few
        if padded_dim(shape) <= 64:
            return [PrefillConfig(64, 32, 4, 2)]
        if padded_dim(shape) == 128 and gpu.capability in (90, 100):
            return [PrefillConfig(128, 32, 8, 3 if gpu.capability == 90 else 2)]
        return [PrefillConfig(64, 32, 8, 2)]
    if shape.turned_dim:
        return [*LATENT_PREFILLS.get(gpu.capability, ()), PrefillConfig(32, 32, 8, 2)]
    has_wgmma = gpu.capability == 90
    width = padded_dim(shape)
    if width <= 64:
        two_per_sm = [PrefillConfig(128, 64, 4, 3)] if has_wgmma else []
        if gpu.capability != 100:  # there three stages spill registers
            two_per_sm.append(PrefillConfig(128, 64, 8, 3))
        return [*two_per_sm, PrefillConfig(128, 64, 8, 2), PrefillConfig(64, 32, 4, 2)]
    if width <= 128:
        wide = [PrefillConfig(128, 128, 8, 3)] if has_wgmma else []
        return [
            *wide,
            PrefillConfig(128, 64, 8, 3),
            PrefillConfig(128, 64, 8, 2),
            PrefillConfig(64, 32, 4, 2),
        ]
    if width > 256:  # sums of 64 queries take half of all registers
        return [PrefillConfig(64, 16, 8, 2), PrefillConfig(32, 16, 8, 2)]
    wide = [PrefillConfig(128, 32, 8, 3)] if has_wgmma else []
    if gpu.capability == 100:  # there blocks of 32 positions spill registers
        wide.append(PrefillConfig(64, 64, 8, 2))
    elif gpu.capability != 80 or shape.group.bit_count() == 1:  # there others spill
        wide.append(PrefillConfig(128, 32, 8, 2))
    return [*wide, PrefillConfig(64, 32, 8, 2), PrefillConfig(64, 16, 4, 2)]


def default_decode(shape: AttentionShape, gpu: Gpu) -> DecodeConfig:
    """Return the built-in configuration of decodes.

    A block of keys and values is 32 KiB, and three programs per multiprocessor have one or two of
    them on the way each: about three times as much as the latency of memory asks for on an H200.
    """
    if gpu.capability == 0:
        return DecodeConfig(64, 4, 2, 1, 128)
    if shape.dtype == torch.float32:
        return DecodeConfig(16, 4, 1, 1 if shape.turned_dim else 4, 256)
    if shape.turned_dim:
        is_small = shape.group < LATENT_HEADS or (shape.head_dim <= 256 and gpu.capability == 90)
        if gpu.capability in (90, 100) and is_small:
            return DecodeConfig(64, 8, 3, 1, 512)  # two of the smaller ones have too many registers
        return LATENT_DECODES.get(gpu.capability, DecodeConfig(64, 8, 2, 1, 512))
    block_n = max(16, 8192 // max(64, padded_dim(shape)))
    if shape.kv != "plain":
        block_n = 32 if padded_dim(shape) <= 128 else 16
    for num_stages in (3, 2):
        if programs_per_sm(block_n, 4, num_stages, shape, gpu):
            return decode_config(block_n, 4, num_stages, 256, shape, gpu)
    return DecodeConfig(16, 4, 1, 2, 256)


def decode_config(
    block_n: int, num_warps: int, num_stages: int, split_len: int, shape: AttentionShape, gpu: Gpu
) -> DecodeConfig:
    """Return a configuration with as many programs as fit on a multiprocessor."""
    per_sm = programs_per_sm(block_n, num_warps, num_stages, shape, gpu)
    return DecodeConfig(block_n, num_warps, num_stages, max(1, per_sm), split_len)


def programs_per_sm(
    block_n: int, num_warps: int, num_stages: int, shape: AttentionShape, gpu: Gpu
) -> int:
    """Return about how many decode programs fit on a multiprocessor; 0: not even one.

    At most 12 warps: up to 168 registers per thread.
    """
    queries = max(16, 1 << (shape.group - 1).bit_length())
    tokens = 2 * max(1, num_stages - 1) * block_n
    kv_bytes = shape.dtype.itemsize if shape.kv == "plain" else 1
    token_bytes = queries * shape.dtype.itemsize + tokens * kv_bytes
    shared = token_bytes * padded_dim(shape) + 2048
    return min(12 // num_warps, gpu.shared_bytes // shared)


def num_prefill_programs(config: PrefillConfig, shape: AttentionShape, gpu: Gpu) -> int:
    """Return about how many prefill programs run at once: 8 warps take all registers there are."""
    fitting = gpu.shared_bytes // prefill_bytes(config, shape)
    return gpu.num_sms * max(1, min(8 // config.num_warps, fitting))


def prefill_bytes(config: PrefillConfig, shape: AttentionShape) -> int:
    """Return about how much shared memory a prefill program takes."""
    width = (padded_dim(shape) + shape.turned_dim) * shape.dtype.itemsize
    if shape.kv != "plain":  # as they are kept, and as numbers
        kept = 2 * max(1, config.num_stages - 1) * config.block_n * padded_dim(shape)
        return (config.block_m + 2 * config.block_n) * width + kept
    if shape.turned_dim:
        return (config.block_m + max(1, config.num_stages - 1) * config.block_n) * width
    return (config.block_m + 2 * config.num_stages * config.block_n) * width


LATENT_DECODES = {
    80: DecodeConfig(16, 4, 3, 2, 512),
    90: DecodeConfig(32, 8, 3, 2, 512),
    100: DecodeConfig(32, 8, 3, 2, 512),
}
"""Over latents, by compute capability. Sums of 16 heads, of 512 numbers each, and their queries
take half of all registers, or more."""
LATENT_PREFILLS = {80: (PrefillConfig(64, 32, 8, 2),), 100: (PrefillConfig(64, 16, 8, 3),)}
"""Configurations for several new tokens, best first."""


def padded_dim(shape: AttentionShape) -> int:
    """Return the head size that kernels compute with, a power of two."""
    return max(16, 1 << (shape.head_dim - 1).bit_length())
