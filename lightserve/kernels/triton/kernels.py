"""The Triton implementation of the kernel interface; products of many rows stay with torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.kernels.interface import AttentionBatch, Can, ScoreMod
from lightserve.kernels.triton import elementwise, experts, norms, quantized
from lightserve.kernels.triton.attention import attention
from lightserve.kernels.triton.configs import AttentionConfigs
from lightserve.kernels.triton.products import NormInputs, ProductChoices, multiply, product_config
from lightserve.kernels.triton.scan import RecurrentKernels
from lightserve.kernels.weights import (
    SILU_GATES,
    BlockActivation,
    ExpertBiases,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    PackedExperts,
    Weight,
)

FP8_SINCE = (8, 9)
"""Compute capability from which GPUs multiply floating point of 8 bits."""


class TritonKernels(RecurrentKernels):
    """See `Kernels`."""

    name = "triton"
    can = (
        Can.LATENTS
        | Can.GRAPHS
        | Can.NORM_PRODUCTS
        | Can.INTEGERS
        | Can.FP8
        | Can.INT8_KV
        | Can.FP8_KV
        | Can.EXPERTS
        | Can.PACKED_EXPERTS
    )

    def __init__(
        self, configs: AttentionConfigs | None = None, products: ProductChoices | None = None
    ) -> None:
        self.configs = configs or AttentionConfigs()
        self.products = ProductChoices() if products is None else products
        self.scaled: frozenset[quantized.ScaledKey] = frozenset()
        """Products of e4m3 by e4m3 that are torch's."""
        if torch.cuda.is_available() and torch.cuda.get_device_capability() >= FP8_SINCE:
            self.can |= Can.FP8_PRODUCTS

    def pack_weight(self, weight: Tensor, *, is_gated: bool = False) -> Tensor:
        """See `Kernels.pack_weight`: as it is."""
        return weight

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `Kernels.linear`."""
        if not isinstance(weight, Tensor):
            product = quantized.linear(x, weight, bias, dtype, self.scaled)
            return self.silu_and_mul(product) if weight.is_gated else product
        if dtype is None or dtype is x.dtype:
            config = product_config(self.products, x, weight, has_norm=False, is_gated=False)
            if config is not None:
                return multiply(x, weight, bias, config)[0]
        return F.linear(x, weight, bias).to(dtype or x.dtype)

    def add_norm_linear(
        self,
        x: Tensor,
        residual: Tensor,
        norm: tuple[Tensor, float],
        weight: Weight,
        bias: Tensor | None,
        *,
        is_gated: bool,
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_norm_linear`."""
        if not isinstance(weight, Tensor):
            return quantized.multiply_behind(x, residual, norm, weight, bias, self.scaled)
        config = product_config(self.products, x, weight, has_norm=True, is_gated=is_gated)
        if config is not None:
            before = NormInputs(residual, *norm)
            return multiply(x, weight, bias, config, norm=before, is_gated=is_gated)
        return super().add_norm_linear(x, residual, norm, weight, bias, is_gated=is_gated)

    def mix_experts(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        gate_up: Tensor | PackedExperts,
        down: Tensor | PackedExperts,
        *,
        biases: ExpertBiases | None = None,
        activation: BlockActivation = SILU_GATES,
    ) -> Tensor:
        """See `Kernels.mix_experts`."""
        both = (
            experts.plain_experts(part) if isinstance(part, Tensor) else part
            for part in (gate_up, down)
        )
        return experts.mix_experts(x, chosen, weights, *both, biases=biases, activation=activation)

    def quantize(self, weight: Tensor, *, is_gated: bool = False) -> Int8Weight:
        """See `Kernels.quantize`."""
        return quantized.int8_of(weight)._replace(is_gated=is_gated)

    def pack_int8(self, integers: Tensor, factors: Tensor, *, is_gated: bool = False) -> Int8Weight:
        """See `Kernels.pack_int8`."""
        own = factors.float()[None].contiguous()
        return Int8Weight(integers.contiguous(), own, len(integers), is_gated)

    def rows_of(
        self, weight: Weight, num_inputs: int, dtype: torch.dtype
    ) -> Callable[[Tensor], Tensor] | None:
        """See `Kernels.rows_of`: plain weights stay as they are."""
        if not isinstance(weight, Int8Weight):
            return None
        packed, factors = weight.packed, weight.factors[0]
        return lambda rows: (packed[rows].float() * factors[rows, None]).to(dtype)

    def quantize_groups(
        self, weight: Tensor, group_size: int, *, is_gated: bool = False
    ) -> GroupedWeight:
        """See `Kernels.quantize_groups`."""
        return quantized.quantize_groups(weight, group_size)._replace(is_gated=is_gated)

    def pack_groups(
        self,
        integers: Tensor,
        factors: Tensor,
        zeros: Tensor,
        *,
        bits: int,
        group_size: int,
        is_gated: bool = False,
    ) -> GroupedWeight:
        """See `Kernels.pack_groups`."""
        weight = quantized.pack_groups(integers, factors, zeros, bits=bits, group_size=group_size)
        return weight._replace(is_gated=is_gated)

    def pack_fp8(
        self, values: Tensor, factors: Tensor, *, group_size: int, is_gated: bool = False
    ) -> Fp8Weight:
        """See `Kernels.pack_fp8`."""
        weight = quantized.pack_fp8(values, factors, group_size=group_size)
        return weight._replace(is_gated=is_gated)

    stack_experts = staticmethod(experts.stack_experts)
    rms_norm = staticmethod(norms.rms_norm)
    add_rms_norm = staticmethod(norms.add_rms_norm)
    silu_and_mul = staticmethod(norms.silu_and_mul)
    rotary = staticmethod(elementwise.rotary)
    write_kv = staticmethod(elementwise.write_kv)
    rotate_and_write = staticmethod(elementwise.rotate_and_write)
    pack_fp4 = staticmethod(quantized.pack_fp4)

    def attention(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None,
        score_mod: ScoreMod | None = None,
    ) -> Tensor:
        """See `Kernels.attention`."""
        return attention(
            q,
            k_pool,
            v_pool,
            batch,
            configs=self.configs,
            scale=scale,
            sliding_window=sliding_window,
            score_mod=score_mod,
        )
