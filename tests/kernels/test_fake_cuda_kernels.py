"""Kernels of plain torch on tensors that say they are on a GPU: none on the host, none read back.

Needs a build of torch with CUDA, though no GPU: the CPU build cannot index such tensors.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException

from lightserve.kernels.device import DeviceTorchKernels
from lightserve.kernels.interface import AttentionBatch, Kernels, KernelShapes
from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.self_check import _comparisons, _Pair

CUDA = torch.device("cuda", 0)
ROWS = [(1, 50), (17, 17), (1, 51), (40, 90), (1, 700), (3, 20), (1, 2)]

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="a build of torch without CUDA")


def fake_batch() -> AttentionBatch:
    num_tokens = sum(new for new, _ in ROWS)
    return AttentionBatch(
        positions=torch.empty(num_tokens, dtype=torch.int64, device=CUDA),
        slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device=CUDA),
        req_to_slot=torch.empty(9, 768, dtype=torch.int32, device=CUDA),
        rows=torch.empty(7, dtype=torch.int64, device=CUDA),
        cu_seqlens_q=torch.empty(8, dtype=torch.int32, device=CUDA),
        context_lens=torch.empty(7, dtype=torch.int32, device=CUDA),
        host_rows=tuple(range(1, 8)),
        host_q_lens=tuple(new for new, _ in ROWS),
        host_context_lens=tuple(context for _, context in ROWS),
    )


@pytest.mark.parametrize("kernels", [ReferenceKernels(), DeviceTorchKernels()])
@pytest.mark.parametrize("window", [None, 24])
def test_a_layer(kernels: Kernels, window: int | None) -> None:
    with FakeTensorMode():
        batch = fake_batch()
        num_tokens = len(batch.positions)
        x = torch.empty(num_tokens, 96, device=CUDA, dtype=torch.bfloat16)
        pools = [torch.empty(2, 1000, 16, device=CUDA, dtype=x.dtype) for _ in range(2)]
        k_pool, v_pool = (pool.transpose(0, 1) for pool in pools)
        norm = torch.empty(96, device=CUDA, dtype=x.dtype)
        x, residual = kernels.add_rms_norm(x, x.clone(), norm, 1e-5)
        weight = kernels.pack_weight(torch.empty(128, 96, device=CUDA, dtype=x.dtype))
        heads = kernels.linear(x, weight, None).view(num_tokens, 8, 16)
        q, k, v = heads.split([4, 2, 2], dim=1)
        cos = torch.empty(num_tokens, 8, device=CUDA)
        q, k = kernels.rotary(q, k, cos, cos)
        kernels.write_kv(k, v, k_pool, v_pool, batch.slot_mapping)
        out = kernels.attention(q, k_pool, v_pool, batch, scale=0.25, sliding_window=window)
        assert (out.shape, out.dtype, out.device) == ((num_tokens, 4, 16), x.dtype, CUDA)
        assert kernels.silu_and_mul(residual).device == CUDA


def test_what_would_be_seen() -> None:
    """A tensor on the host among those of the device, or one that the host reads."""
    with FakeTensorMode():
        batch = fake_batch()
        with pytest.raises(DataDependentOutputException):
            batch.context_lens.tolist()
        with pytest.raises(RuntimeError, match="two different devices"):
            batch.positions + torch.arange(len(batch.positions))


@pytest.mark.parametrize("kernels", [ReferenceKernels(), DeviceTorchKernels()])
def test_the_check_at_the_start(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it compares is on the device; only the errors are read."""
    monkeypatch.setattr(torch, "Generator", NoGenerator)
    shapes = KernelShapes(
        dtype=torch.bfloat16,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rotary_dim=128,
        sliding_windows=(4096, None),
        rms_norm_eps=1e-5,
        qk_norm=True,
        qkv_bias=True,
        context_len=32768,
    )
    with FakeTensorMode():
        operations = set()
        for comparison in _comparisons(_Pair(kernels, shapes, CUDA)):
            assert comparison.result.device == comparison.truth.device == CUDA, comparison
            assert comparison.result.shape == comparison.truth.shape, comparison
            operations.add(comparison.operation)
    assert {"attention", "write_kv", "rotary", "add_rms_norm"} <= operations


class NoGenerator:
    """There is none for a GPU that is not there; nothing is drawn anyhow."""

    def __init__(self, device: torch.device) -> None:
        assert device == CUDA

    def manual_seed(self, seed: int) -> None:
        return None
