"""The CPU kernels of the native core: products, attention and the operations between them.

bfloat16 and float32; other types (float16) go the way of `TorchKernels`. Nothing depends on how
many threads there are or on which of them did what: the same batch gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightserve.kernels.cpu import packing
from lightserve.kernels.cpu.core import Core, Element, Form, Level, Operations, load_core
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.cpu.program import record, row_numbers
from lightserve.kernels.interface import AttentionBatch, Can, PassInputs, QKNorm, ScoreMod, Summing
from lightserve.kernels.weights import (
    DeltaRule,
    ExpertChoice,
    GroupedWeight,
    Int8Weight,
    MambaRule,
    StateBank,
    Weight,
)

MAX_HEAD_DIM = 512


class NativeKernels(TorchKernels):
    """See `Kernels`."""

    name = "native"
    can = TorchKernels.can | Can.INT8_KV | Can.RECORD | Can.INTEGERS | Can.WIDE_SUMS
    types = frozenset({torch.float32, torch.bfloat16})
    _is_invariant = False
    """Whether a token's results may depend on nothing that stands beside it."""

    def __init__(self, core: Core | None = None, *, level: Level | None = None) -> None:
        """Compute with `core`, by default this machine's; `level` takes fewer instructions of it.

        Raises:
            CoreMissingError: there is none.
        """
        self._core = core or load_core()
        self._level = int(min(level or self._core.level, self._core.level))
        self._operations = {torch.float32: self._core.f32, torch.bfloat16: self._core.bf16}
        if self._level >= Level.AVX512_BF16:
            self.can |= Can.ROUNDED_PROMPTS

    def record(
        self, layers: Callable[[PassInputs], Tensor], like: PassInputs, ranks: Summing | None = None
    ) -> Callable[[PassInputs], Tensor]:
        """See `Kernels.record`."""
        return record(self._core, layers, like, level=self._level, ranks=ranks)

    def _fall_back(self) -> None:
        """Be told that an operation is about to be torch's."""

    def _native(self, x: Tensor, weight: Tensor, *, may_be_wide: bool = False) -> Operations | None:
        """Return the functions for x [N, size] and a vector, of one type and contiguous rows.

        `may_be_wide`: whether the vector may be float32, too.
        """
        is_plain = (x.stride(1) == 1 or x.shape[1] == 1) and weight.is_contiguous()
        is_good = weight.dtype is x.dtype or (may_be_wide and weight.dtype is torch.float32)
        return self._operations.get(x.dtype) if is_plain and is_good else None

    def pack_weight(self, weight: Tensor, *, is_gated: bool = False) -> Tensor:
        """See `Kernels.pack_weight`."""
        operations = self._operations.get(weight.dtype)
        if operations is None or weight.numel() == 0:
            return super().pack_weight(weight, is_gated=is_gated)
        return packing.pack(self._core, operations, weight, is_gated=is_gated)

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `Kernels.linear`."""
        if isinstance(weight, Tensor) and (x.dtype not in self._operations or not weight.numel()):
            self._fall_back()
            return super().linear(x, weight, bias, dtype=dtype)
        is_gated = not isinstance(weight, Tensor) and weight.is_gated
        return self._multiply(x, weight, bias, is_gated=is_gated, dtype=dtype)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.gated_linear`."""
        if x.dtype not in self._operations or weight.numel() == 0:
            self._fall_back()
            return super().gated_linear(x, weight, bias)
        return self._multiply(x, weight, bias, is_gated=True)

    def _multiply(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        *,
        is_gated: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return x @ weight.T + bias, or the gated features of it, of `dtype` (default: of x)."""
        num_outputs = packing.num_outputs_of(weight)
        num_rows, num_inputs = x.shape
        row_stride, step = x.stride()
        if step != 1:
            x, row_stride = x.contiguous(), num_inputs
        prompts = weight.prompts if isinstance(weight, Int8Weight) else None
        form = Form.PLAIN
        if is_gated:
            form, out = Form.GATED, x.new_empty(num_rows, num_outputs // 2)
        elif dtype is None or dtype is x.dtype:
            out = x.new_empty(num_rows, num_outputs)
        else:
            assert dtype is torch.float32, dtype
            form, out = Form.WIDE, x.new_empty(num_rows, num_outputs, dtype=dtype)
        if num_rows and num_outputs:
            self._operations[x.dtype].linear(
                *(x.data_ptr(), row_stride, num_rows),
                *(*packing.numbers_of(weight), num_inputs, num_outputs, _address(bias)),
                *(form, out.data_ptr(), None if prompts is None else prompts.runs.ctypes.data),
                *(self._level, torch.get_num_threads()),
            )
        return out

    def rows_of(
        self, weight: Weight, num_inputs: int, dtype: torch.dtype
    ) -> Callable[[Tensor], Tensor] | None:
        """See `Kernels.rows_of`."""
        operations = self._operations.get(dtype)
        is_int8 = isinstance(weight, Int8Weight)
        is_plain = isinstance(weight, Tensor) and weight.numel() > 0
        if operations is None or not (is_int8 or is_plain):
            return None
        num_outputs = packing.num_outputs_of(weight)

        def rows(indices: Tensor) -> Tensor:
            out = torch.empty(len(indices), num_inputs, dtype=dtype)
            numbers = packing.numbers_of(weight)
            addresses = numbers[:2] if is_int8 else numbers[:1]
            is_good = (operations.rows_int8 if is_int8 else operations.rows)(
                *(*addresses, num_outputs, num_inputs, indices.data_ptr(), len(indices)),
                *(out.data_ptr(), torch.get_num_threads()),
            )
            if not is_good:
                highest = int(indices.max())
                worst = highest if highest >= num_outputs else int(indices.min())
                raise IndexError(f"row {worst} of a weight of {num_outputs}")
            return out

        return rows

    def quantize(self, weight: Tensor, *, is_gated: bool = False) -> Int8Weight:
        """See `Kernels.quantize`."""
        operations = self._operations[weight.dtype]
        return packing.quantize(self._core, operations, weight, is_gated=is_gated)

    def quantize_groups(
        self, weight: Tensor, group_size: int, *, is_gated: bool = False
    ) -> GroupedWeight:
        """See `Kernels.quantize_groups`."""
        operations = self._operations[weight.dtype]
        return packing.quantize_groups(
            self._core, operations, weight, group_size, is_gated=is_gated
        )

    def pack_int8(self, integers: Tensor, factors: Tensor, *, is_gated: bool = False) -> Int8Weight:
        """See `Kernels.pack_int8`."""
        return packing.pack_int8(self._core, integers, factors, is_gated=is_gated)

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
        return packing.pack_groups(
            self._core,
            integers,
            factors,
            zeros,
            bits=bits,
            group_size=group_size,
            is_gated=is_gated,
        )

    def choose_experts(
        self, products: Tensor, bias: Tensor | None, choice: ExpertChoice
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.choose_experts`."""
        return packing.choose_experts(self._core.f32, products, bias, choice)

    def expert_mixer(
        self, experts: Sequence[tuple[Weight, Weight]], dtype: torch.dtype
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """See `Kernels.expert_mixer`."""
        if dtype not in self._operations:
            return None
        return packing.expert_mixer(self._operations[dtype], experts, self._level)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        operations = self._native(rows, weight, may_be_wide=True)
        if operations is None:
            self._fall_back()
            return super().rms_norm(x, weight, eps)
        others = None, weight.data_ptr(), weight.dtype is torch.float32
        return self._norm(operations.norm, rows, others, eps).view(x.shape)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_rms_norm`; overwrites `residual`."""
        operations = self._native(x, weight, may_be_wide=True)
        if operations is None or not residual.is_contiguous():
            self._fall_back()
            return super().add_rms_norm(x, residual, weight, eps)
        others = residual.data_ptr(), weight.data_ptr(), weight.dtype is torch.float32
        return self._norm(operations.norm, x, others, eps), residual

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """See `Kernels.layer_norm`."""
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        operations = self._native(rows, weight)
        if operations is None:
            self._fall_back()
            return super().layer_norm(x, weight, bias, eps)
        others = weight.data_ptr(), _address(bias)
        return self._norm(operations.layer_norm, rows, others, eps).view(x.shape)

    def _norm(
        self, norm: Callable[..., int], x: Tensor, others: tuple[int | None, ...], eps: float
    ) -> Tensor:
        """Return norm(x [N, size]); `others` are the further inputs of the core's function."""
        num_rows, size = x.shape
        out = x.new_empty(num_rows, size)
        if num_rows:
            norm(
                *(x.data_ptr(), x.stride(0), *others, eps, num_rows, size, out.data_ptr()),
                *(self._level, torch.get_num_threads()),
            )
        return out

    def gelu(self, x: Tensor, up: Tensor | None = None, *, is_exact: bool = False) -> Tensor:
        """See `Kernels.gelu`."""
        operations = self._operations.get(x.dtype)
        if operations is None or any(part.stride(1) != 1 for part in (x, up) if part is not None):
            self._fall_back()
            return super().gelu(x, up, is_exact=is_exact)
        return self._elements(operations, Element.GELU if is_exact else Element.GELU_TANH, x, up)

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """See `Kernels.gated`."""
        operations = self._operations.get(x.dtype)
        if operations is None or x.stride(1) != 1 or gate.stride(1) != 1:
            self._fall_back()
            return super().gated(x, gate)
        return self._elements(operations, Element.GATE, x, gate)

    def _elements(
        self, operations: Operations, element: Element, x: Tensor, other: Tensor | None
    ) -> Tensor:
        """Return an operation on single numbers of x [N, size] and perhaps of as many others."""
        out = x.new_empty(x.shape)
        if len(x):
            operations.elements(
                *(element, x.data_ptr(), x.stride(0)),
                *(_address(other), 0 if other is None else other.stride(0)),
                *(0.0, *x.shape, out.data_ptr(), x.shape[1]),
                *(self._level, torch.get_num_threads()),
            )
        return out

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        bank: StateBank,
        batch: AttentionBatch,
        *,
        is_plain: bool = False,
    ) -> Tensor:
        """See `Kernels.convolve`."""
        operations = self._native(x, weight)
        if operations is None:
            self._fall_back()
            return super().convolve(x, weight, bias, bank, batch, is_plain=is_plain)
        numbers, states = (*weight.shape, is_plain), (bank, batch)
        return self._with_states(
            operations.convolve, (x,), (weight, bias), numbers, states, size=x.shape[1]
        )

    def _with_states(
        self,
        operation: Callable[..., int],
        inputs: Sequence[Tensor],
        vectors: Sequence[Tensor | None],
        numbers: Sequence[float],
        states: tuple[StateBank, AttentionBatch],
        *,
        size: int,
    ) -> Tensor:
        """Return results [T, size] of an operation of `inputs` [T, n], and of states, changed."""
        out = inputs[0].new_empty(len(inputs[0]), size)
        strided = ((x.data_ptr(), x.stride(0)) for x in inputs)
        if len(out) and not operation(
            *(word for own in strided for word in own),
            *(*map(_address, vectors), *numbers, *_numbers_of(*states)),
            *(out.data_ptr(), self._level, torch.get_num_threads()),
        ):
            raise IndexError("a slot of a state is none of the pool")
        return out

    def delta_rule(
        self,
        mixed: Tensor,
        z: Tensor,
        gates: Tensor,
        *,
        rule: DeltaRule,
        bank: StateBank,
        batch: AttentionBatch,
    ) -> Tensor:
        """See `Kernels.delta_rule`: one token after the other."""
        operations = None if rule.decays_channels else self._native(mixed, rule.norm)
        if operations is None:
            self._fall_back()
            return super().delta_rule(mixed, z, gates, rule=rule, bank=bank, batch=batch)
        num_heads = len(rule.decay)
        vectors = (rule.decay, rule.rate_bias, rule.norm)
        sizes = (rule.num_key_heads, num_heads, rule.key_dim, rule.value_dim)
        numbers, function = (rule.eps, rule.beta_scale, *sizes), operations.delta_rule
        size, states = num_heads * rule.value_dim, (bank, batch)
        return self._with_states(function, (mixed, z, gates), vectors, numbers, states, size=size)

    def mamba(
        self,
        mixed: Tensor,
        z: Tensor,
        rates: Tensor,
        *,
        rule: MambaRule,
        bank: StateBank,
        batch: AttentionBatch,
    ) -> Tensor:
        """See `Kernels.mamba`: one token after the other."""
        operations = self._operations.get(mixed.dtype)
        if operations is None:
            self._fall_back()
            return super().mamba(mixed, z, rates, rule=rule, bank=bank, batch=batch)
        num_heads = len(rule.decay)
        vectors = (rule.decay, rule.rate_bias, rule.skip)
        numbers = (rule.num_groups, num_heads, rule.state_size, rule.head_dim)
        size, states = num_heads * rule.head_dim, (bank, batch)
        return self._with_states(
            operations.mamba, (mixed, z, rates), vectors, numbers, states, size=size
        )

    def rotate_and_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cos: Tensor,
        sin: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        slot_mapping: Tensor,
        qk_norm: QKNorm | None,
    ) -> Tensor:
        """See `Kernels.rotate_and_write`; overwrites q."""
        num_tokens, num_heads, head_dim = q.shape
        if not num_tokens:
            return q
        operations = self._operations.get(q.dtype)
        # How far it is from one token to the next means nothing where there is one.
        first = 1 if num_tokens == 1 else 0
        strides, pool_strides = q.stride(), k_pool.stride()
        is_plain = (
            strides[1:] == (head_dim, 1)
            and strides[first:] == k.stride()[first:] == v.stride()[first:]
            and cos.is_contiguous()
            and sin.is_contiguous()
            and pool_strides == v_pool.stride()
            and pool_strides[2] == 1
        )
        if operations is None or not is_plain:
            assert k_pool.dtype is not torch.int8, "torch knows no KV of 8 bits"
            self._fall_back()
            return super().rotate_and_write(
                q,
                k,
                v,
                cos=cos,
                sin=sin,
                k_pool=k_pool,
                v_pool=v_pool,
                slot_mapping=slot_mapping,
                qk_norm=qk_norm,
            )
        q_weight, k_weight, eps = qk_norm or (None, None, 0.0)
        are_slots_good = operations.rotate(
            *(q.data_ptr(), k.data_ptr(), v.data_ptr(), strides[0]),
            *(num_tokens, num_heads, k.shape[1], head_dim),
            *(cos.data_ptr(), sin.data_ptr(), cos.shape[1]),
            *(k_pool.data_ptr(), v_pool.data_ptr(), *pool_strides[:2], k_pool.dtype is torch.int8),
            *(slot_mapping.data_ptr(), k_pool.shape[0]),
            *(_address(q_weight), _address(k_weight)),
            *(q_weight is not None and q_weight.dtype is torch.float32, eps),
            *(self._level, torch.get_num_threads()),
        )
        if not are_slots_good:
            raise IndexError(f"a slot of {slot_mapping.tolist()} is not below {len(k_pool)}")
        return q

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
        """See `Kernels.attention`: straight over the slots, whichever they are."""
        num_tokens, num_heads, head_dim = q.shape
        operations = self._operations.get(q.dtype)
        token_stride, *strides = q.stride()
        pool_strides = k_pool.stride()
        is_plain = (
            strides == [head_dim, 1]
            and pool_strides == v_pool.stride()
            and pool_strides[2] == 1
            and head_dim <= MAX_HEAD_DIM
            and v_pool.shape[2] == k_pool.shape[2]  # no latent vectors
        )
        if operations is None or not is_plain:
            assert k_pool.dtype is not torch.int8, "torch knows no KV of 8 bits"
            self._fall_back()
            return super().attention(
                q,
                k_pool,
                v_pool,
                batch,
                scale=scale,
                sliding_window=sliding_window,
                score_mod=score_mod,
            )
        soft_cap, slopes, sinks = score_mod or ScoreMod()
        rows = row_numbers(batch)
        out = q.new_empty(num_tokens, num_heads, head_dim)
        if rows.num_rows:
            table = batch.req_to_slot
            operations.attention(
                *(q.data_ptr(), token_stride, k_pool.data_ptr(), v_pool.data_ptr()),
                *(*pool_strides[:2], k_pool.dtype is torch.int8),
                *(table.data_ptr(), table.stride(0), rows.address, rows.num_rows),
                *(num_heads, k_pool.shape[1], head_dim, sliding_window or 0, scale),
                *(soft_cap or 0.0, _address(slopes), _address(sinks), self._is_invariant),
                *(out.data_ptr(), self._level, torch.get_num_threads()),
            )
        return out


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _numbers_of(bank: StateBank, batch: AttentionBatch) -> tuple[int | None, ...]:
    """Return where states are as the core reads it, and whose they are."""
    table, rows, pieces = batch.state_slots, row_numbers(batch), bank.pieces
    assert table is not None and pieces.stride(3) == 1
    part_stride, head_stride, slot_stride, _ = pieces.stride()
    return (
        *(pieces.data_ptr(), part_stride, head_stride, slot_stride),
        *(pieces.shape[1], pieces.shape[3], pieces.shape[2]),
        *(table.data_ptr(), table.stride(0), bank.first, bank.num_slots),
        *(rows.address, rows.num_rows),
        None if batch.kept is None else batch.kept.is_held.data_ptr(),
    )


class InvariantNativeKernels(NativeKernels):
    """The native kernels in float32, where a token's results depend on nothing beside it.

    Products add their terms from the first input to the last, norms and activations know one row.
    Attention differs from that of `NativeKernels`: blocks begin at fixed positions, and contexts
    are in one piece. An operation that these kernels lack is an error: torch's would add in an
    order of its own.
    """

    name = "native-batch-invariant"
    can = NativeKernels.can & ~Can.LATENTS
    _is_invariant = True

    def _fall_back(self) -> None:
        raise AssertionError("--batch-invariant: an operation that the native core has not")
