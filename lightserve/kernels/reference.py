"""Plain torch, computed in float32: slow, and obviously right.

Every other implementation is tested against it; `--attention-backend reference` serves with it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.kernels.interface import FACTOR_BYTES, AttentionBatch, Can, ScoreMod, features_of
from lightserve.kernels.recurrent import RecurrentOperations
from lightserve.kernels.weights import (
    SILU_GATES,
    BlockActivation,
    ExpertBiases,
    PackedExperts,
    Weight,
)


def rounded_to_int8(weight: Tensor) -> Tensor:
    """Return the numbers that `Kernels.quantize` makes of a weight [M, K], in float32."""
    wide = weight.float()
    largest = wide.abs().amax(dim=1, keepdim=True)
    is_zero = largest < 1e-30
    # A number over a tensor would be its reciprocal times the number: rounded twice.
    inverse = torch.full_like(largest, 127.0) / largest
    integers = (wide * torch.where(is_zero, 0.0, inverse)).round()
    return integers * torch.where(is_zero, 0.0, largest / 127.0)


def int8_by_int8(x: Tensor, integers: Tensor, factors: Tensor) -> Tensor:
    """Return the product of rows x [N, K], rounded to 8 bits by the largest number of each, and a
    weight of integers int8 [M, K] with factors float32 [M]; float32 [N, M].

    Sums are exact. Each is rounded to float32 and multiplied by (the output's factor times the
    row's): in this order kernels give these bits, whatever instructions they use.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=1, keepdim=True)
    is_zero = largest < 1e-30
    inverse = torch.full_like(largest, 127.0) / largest
    rows = (wide * torch.where(is_zero, 0.0, inverse)).round()
    sums = (rows.double() @ integers.double().T).float()
    return sums * (factors * torch.where(is_zero, 0.0, largest / 127.0))


def kv_in_8_bits(kv: Tensor, dtype: torch.dtype, word: int = 1) -> Tensor:
    """Return keys or values [..., D] as pools of `dtype` have them, int8 or uint8 [..., D + 4].

    Zeros behind them fill up a multiple of `word` bytes.
    """
    wide = kv.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    is_zero = largest < 1e-30
    top = torch.full_like(largest, 127.0 if dtype is torch.int8 else 448.0)
    scaled = wide * torch.where(is_zero, 0.0, top / largest)
    own = scaled.round().to(dtype) if dtype is torch.int8 else scaled.to(torch.float8_e4m3fn)
    factors = torch.where(is_zero, 0.0, largest / top)
    found = torch.cat([own.view(dtype), factors.view(dtype)], dim=-1)
    return F.pad(found, (0, -found.shape[-1] % word))


def numbers_of_8_bit_kv(kv: Tensor, head_dim: int) -> Tensor:
    """Return the numbers that int8 or uint8 [..., D + 4 or more] stands for, float32 [..., D]."""
    own, factors = kv[..., :head_dim].contiguous(), kv[..., head_dim : head_dim + FACTOR_BYTES]
    numbers = own.float() if kv.dtype is torch.int8 else own.view(torch.float8_e4m3fn).float()
    return numbers * factors.contiguous().view(torch.float32)


def rounded_to_e4m3(x: Tensor, group_size: int) -> Tensor:
    """Return the numbers that kernels of `Can.FP8_PRODUCTS` make of rows [N, K], in float32."""
    parts = [x[:, start : start + group_size] for start in range(0, x.shape[1], group_size)]
    small = [kv_in_8_bits(part, torch.uint8) for part in parts]
    pairs = zip(small, parts, strict=True)
    return torch.cat([numbers_of_8_bit_kv(own, part.shape[1]) for own, part in pairs], dim=1)


def numbers_of_groups(integers: Tensor, factors: Tensor, zeros: Tensor, group_size: int) -> Tensor:
    """Return the numbers that `Kernels.pack_groups` packs, [M, K] in float32."""
    num_inputs = integers.shape[1]
    factors, zeros = (
        part.float().repeat_interleave(group_size, dim=1)[:, :num_inputs]
        for part in (factors, zeros)
    )
    return (integers.float() - zeros) * factors


def numbers_of_fp4(codes: Tensor, factors: Tensor, group_size: int) -> Tensor:
    """Return the numbers that `Kernels.pack_fp4` packs, [M, K] in float32."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
    signs = 1.0 - 2.0 * (codes >> 3)
    grid = factors.float().repeat_interleave(group_size, dim=1)[:, : codes.shape[1]]
    return table[(codes & 7).long()] * signs * grid


class ReferenceKernels(RecurrentOperations):
    """See `Kernels`."""

    name = "reference"
    can = Can.LATENTS | Can.EXPERTS | Can.INT8_KV | Can.FP8_KV
    chunk_size = 1

    def pack_weight(self, weight: Tensor, *, is_gated: bool = False) -> Tensor:
        """See `Kernels.pack_weight`: as it is."""
        return weight

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `Kernels.linear`."""
        assert isinstance(weight, Tensor)
        product = x.float() @ weight.float().T
        return (product if bias is None else product + bias.float()).to(dtype or x.dtype)

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
        """See `Kernels.mix_experts`: every token through every expert."""
        assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
        share = torch.zeros(len(x), len(down), dtype=torch.float32, device=x.device)
        share.scatter_(1, chosen, weights)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(len(down)):
            own = (None, None) if biases is None else (part[expert] for part in biases)
            first, second = own
            features = features_of(self, self.linear(x, gate_up[expert], first), activation)
            added = self.linear(features, down[expert], second)
            out += added.float() * share[:, expert, None]
        return out.to(x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (weight * (wide * scale).to(weight.dtype)).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_rms_norm`."""
        residual = x + residual
        return self.rms_norm(residual, weight, eps), residual

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See `Kernels.rotary`."""
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Kernels.silu_and_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def write_kv(
        self, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor
    ) -> None:
        """See `Kernels.write_kv`; also of 8 bits."""
        for pool, numbers in ((k_pool, k), (v_pool, v)):
            own = numbers
            if pool.dtype.itemsize == 1:
                own = kv_in_8_bits(numbers, pool.dtype)
            pool[slot_mapping, :, : own.shape[2]] = own

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
        """See `Kernels.attention`: one row after the other, all of its context gathered."""
        is_small, mod = k_pool.dtype.itemsize == 1, score_mod or ScoreMod()
        out = q.new_empty(*q.shape[:2], (q if is_small else v_pool).shape[2])
        start = 0
        for row, q_len, context_len in zip(
            batch.host_rows, batch.host_q_lens, batch.host_context_lens, strict=True
        ):
            if q_len == 0:
                continue
            slots = batch.req_to_slot[row, :context_len].long()
            rows = slice(start, start + q_len)
            k, v = k_pool[slots], v_pool[slots]
            if is_small:
                k, v = (numbers_of_8_bit_kv(part, q.shape[2]) for part in (k, v))
            out[rows] = _attend(q[rows], k, v, scale, sliding_window, mod=mod)
            start += q_len
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * cos.shape[1] dimensions of x [T, H, D]."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), x[..., 2 * half :]], dim=-1)


def modified(scores: Tensor, mod: ScoreMod, distances: Tensor) -> Tensor:
    """Return scores [Hq, N, C] with a `ScoreMod` applied.

    `distances` [N, C]: how far each key stands before the query.
    """
    if mod.soft_cap is not None:
        scores = mod.soft_cap * torch.tanh(scores / mod.soft_cap)
    if mod.slopes is not None:
        scores = scores - mod.slopes[:, None, None] * distances
    return scores


def weights_of(scores: Tensor, mod: ScoreMod) -> Tensor:
    """Return the softmax of scores [Hq, N, C]; sinks take a share of it."""
    if mod.sinks is None:
        return scores.softmax(dim=-1)
    last = mod.sinks[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, last], dim=-1).softmax(dim=-1)[..., :-1]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sliding_window: int | None, *, mod: ScoreMod
) -> Tensor:
    """Attend the last q.shape[0] positions of a context; q [N, Hq, D], k and v [C, Hkv, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    k_positions = torch.arange(k.shape[0], device=q.device)
    q_positions = k_positions[-q.shape[0] :, None]
    scores = modified(scores, mod, q_positions - k_positions)
    hidden = k_positions > q_positions
    if sliding_window is not None:
        hidden |= k_positions <= q_positions - sliding_window
    weights = weights_of(scores.masked_fill(hidden, float("-inf")), mod)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
