"""Kernels that are wrong in one way each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.interface import AttentionBatch, Can, ScoreMod
from lightserve.kernels.weights import DeltaRule


class _WindowOffByOne(TorchKernels):
    def attention(self, *args: Any, sliding_window: int | None, **options: Any) -> Tensor:
        wider = None if sliding_window is None else sliding_window + 1
        return super().attention(*args, sliding_window=wider, **options)


class _WrongScale(TorchKernels):
    def attention(self, *args: Any, scale: float, **options: Any) -> Tensor:
        return super().attention(*args, scale=1.1 * scale, **options)


class _CapLost(TorchKernels):
    def attention(self, *args: Any, score_mod: ScoreMod | None, **options: Any) -> Tensor:
        mod = score_mod and score_mod._replace(soft_cap=None)
        return super().attention(*args, score_mod=mod, **options)


class _OneSlopeForAll(TorchKernels):
    def attention(self, *args: Any, score_mod: ScoreMod | None, **options: Any) -> Tensor:
        if score_mod is not None and score_mod.slopes is not None:
            score_mod = score_mod._replace(slopes=score_mod.slopes.mean().expand(args[0].shape[1]))
        return super().attention(*args, score_mod=score_mod, **options)


class _DropsTheFirstPosition(TorchKernels):
    """Where a context fills whole blocks of 64."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, batch: Any, **options: Any) -> Tensor:
        table = batch.req_to_slot.clone()
        for row, end in zip(batch.host_rows, batch.host_context_lens, strict=True):
            if end % 64 == 0:
                table[row, 0] = table[row, 1]
        return super().attention(q, k, v, replace(batch, req_to_slot=table, prepared={}), **options)


class _HeadsInTurn(TorchKernels):
    """Query head h reads KV head h mod Hkv."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        order = torch.arange(q.shape[1]).view(-1, k.shape[1]).T.reshape(-1)
        out = torch.empty_like(q)
        out[:, order] = super().attention(q[:, order], k, v, *args, **options)
        return out


class _LastRowUnwritten(TorchKernels):
    def attention(self, *args: Any, **options: Any) -> Tensor:
        right = super().attention(*args, **options)
        out = torch.empty_like(right)
        out[:-3] = right[:-3]
        return out


class _PaddingSeen(TorchKernels):
    """A row of one position, as padding rows are, reads the slot of the row before it."""

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, **options: Any
    ) -> Tensor:
        out = super().attention(q, k, v, batch, **options)
        ends = list(batch.host_context_lens)
        if ends[-1] == 1 and len(set(batch.host_q_lens)) == 1:
            out[:-1] += 0.5 * out[-1]
        return out


class _KVBesideItsSlot(TorchKernels):
    def write_kv(self, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
        super().write_kv(k, v, k_pool, v_pool, (slots + 1) % len(k_pool))


class _KVToTheFirstSlot(TorchKernels):
    """Padding rows write to a slot of a request."""

    def write_kv(self, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
        super().write_kv(k, v, k_pool, v_pool, slots)
        k_pool[0] = k[-1]


class _BackwardRotary(TorchKernels):
    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotary(q, k, cos, -sin)


class _UnrotatedKeys(TorchKernels):
    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotary(q, k, cos, sin)[0], k


class _OneNormForBoth(TorchKernels):
    def rotate_and_write(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        norm = options.pop("qk_norm")
        same = norm._replace(k_weight=norm.q_weight)
        return super().rotate_and_write(q, k, v, qk_norm=same, **options)


class _UnrotatedQueries(TorchKernels):
    def rotate_and_write(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        before = q.clone()
        super().rotate_and_write(q, k, v, **options)
        return before


class _NormWithoutEps(TorchKernels):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return super().rms_norm(x, weight, eps + 0.1)


class _NormOfTheSummand(TorchKernels):
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
        return self.rms_norm(x, weight, eps), residual + x


class _MeanKept(TorchKernels):
    """What RMSNorm would make of it."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        normed = self.rms_norm(x, weight, eps)
        return normed if bias is None else normed + bias


class _NoUp(TorchKernels):
    def gelu(self, x: Tensor, up: Tensor | None = None, *, is_exact: bool = False) -> Tensor:
        return super().gelu(x, is_exact=is_exact)


class _GateAndUpSwapped(TorchKernels):
    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return super().silu_and_mul(torch.cat(gate_up.chunk(2, dim=-1)[::-1], dim=-1))


class _LastColumnLost(TorchKernels):
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        out = super().linear(x, weight, bias, **options)
        if len(x) > 1:
            out[-1, -1] = 0.0
        return out


class _NoBias(TorchKernels):
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        return super().linear(x, weight, None, **options)


class _FailedLaunch(TorchKernels):
    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        raise RuntimeError("no kernel image is available")


class _TooLarge(TorchKernels):
    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        raise OutOfResources(300_000, 232_448, "shared memory")


class _ReadsTheHost(TorchKernels):
    """Says that its decodes can be recorded, and plans them by lengths on the host."""

    can = TorchKernels.can | Can.GRAPHS


class _DecayLost(TorchKernels):
    def delta_rule(self, *args: Any, rule: DeltaRule, **options: Any) -> Tensor:
        return super().delta_rule(*args, rule=rule._replace(decay=0 * rule.decay), **options)


class _BetasOfOne(TorchKernels):
    def delta_rule(self, *args: Any, rule: DeltaRule, **options: Any) -> Tensor:
        return super().delta_rule(*args, rule=rule._replace(beta_scale=1.0), **options)


class _OldState(TorchKernels):
    """Rows that begin find what their slots hold."""

    def delta_rule(self, *args: Any, batch: AttentionBatch, **options: Any) -> Tensor:
        older = replace(batch, context_lens=batch.context_lens + 1)
        return super().delta_rule(*args, batch=older, **options)


class _OtherInputs(TorchKernels):
    def convolve(self, x: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        return super().convolve(x, weight.flip(0), *args, **options)


FAULTS: dict[str, type[TorchKernels]] = {
    "window off by one": _WindowOffByOne,
    "wrong scale": _WrongScale,
    "cap lost": _CapLost,
    "one slope for all heads": _OneSlopeForAll,
    "first position dropped": _DropsTheFirstPosition,
    "heads in turn": _HeadsInTurn,
    "last rows unwritten": _LastRowUnwritten,
    "padding seen": _PaddingSeen,
    "decay lost": _DecayLost,
    "betas of one": _BetasOfOne,
    "an old state": _OldState,
    "other inputs of a convolution": _OtherInputs,
    "KV beside its slot": _KVBesideItsSlot,
    "KV to another slot": _KVToTheFirstSlot,
    "rotary backwards": _BackwardRotary,
    "keys not rotated": _UnrotatedKeys,
    "one norm for q and k": _OneNormForBoth,
    "queries not rotated": _UnrotatedQueries,
    "another eps": _NormWithoutEps,
    "norm of the summand": _NormOfTheSummand,
    "mean kept": _MeanKept,
    "no up": _NoUp,
    "gate and up swapped": _GateAndUpSwapped,
    "last column lost": _LastColumnLost,
    "no bias": _NoBias,
    "failed launch": _FailedLaunch,
    "too large": _TooLarge,
    "reads the host": _ReadsTheHost,
}
