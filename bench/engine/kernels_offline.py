"""Compile every Triton kernel for GPUs that need not be there and print what the compiler made.

    python -m bench.engine.kernels_offline [--name PART ...] [--capability 80 90 120] [--json FILE]

Exits with 1 if a kernel spills registers, does not fit, or lacks the instructions that it is built
on: 16-byte loads, and warp-group products for prefill on sm_90. A new kernel is one more `Case`:
call the function that launches it, with tensors made by `meta`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightserve.kernels.interface import (
    WORD_BYTES,
    AttentionBatch,
    MostTokens,
    QKNorm,
    ScoreMod,
    UnknownValues,
)
from lightserve.kernels.triton import experts, norms, quantized
from lightserve.kernels.triton.attention import attention
from lightserve.kernels.triton.configs import GPUS, KV_KINDS, AttentionConfigs, gpu_of
from lightserve.kernels.triton.copies import TritonCopies
from lightserve.kernels.triton.elementwise import rotate_and_write
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.kernels.triton.products import PRODUCT_ROWS, NormInputs, ProductKey, candidates
from lightserve.kernels.triton.products import multiply as multiply_rows
from lightserve.kernels.weights import (
    SILU_GATES,
    BlockActivation,
    DeltaRule,
    ExpertBiases,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    KeptInputs,
    MambaRule,
    PackedExperts,
    StateBank,
)
from lightserve.messages.router_worker import AddSequence
from lightserve.types import Activation, RowId, SamplingParams
from lightserve.worker.sampling.interface import KnownCounts, SamplingBatch
from lightserve.worker.sampling.sampler import sample
from lightserve.worker.sampling.table import SamplingTable
from tools.triton_offline import Launch, Resources, compiling, max_shared_bytes, read


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor that has no memory: launches on it are compiled."""
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class Case:
    """One call whose launches are compiled."""

    name: str
    call: Callable[[], object]
    wide_loads: str = ".*"
    """Kernels that must have loads of 16 bytes per thread, as a regular expression."""
    wgmma: str = "$^"
    """Kernels that must have warp-group products on sm_90."""
    resident: str = "$^"
    """Kernels whose programs must all be on the GPU at once: they share the work evenly."""
    spills: str = "$^"
    """Kernels that may spill registers: where no choice of blocks avoids it."""


@dataclass(frozen=True)
class Line:
    """One launch of a case."""

    case: Case
    launch: Launch
    resources: Resources

    @property
    def faults(self) -> list[str]:
        """What may not be."""
        found = []
        resources, name = self.resources, self.launch.name
        if resources.num_local and not re.search(self.case.spills, name):
            found.append(f"{resources.num_local} accesses to local memory: registers spilled")
        if resources.shared_bytes > max_shared_bytes(self.launch.capability):
            found.append(f"{resources.shared_bytes} bytes of shared memory")
        if not resources.num_wide_loads and re.search(self.case.wide_loads, name):
            found.append("no loads of 16 bytes")
        if not self.launch.is_fused:
            found.append("products and sums are not fused")
        num_sms = GPUS[self.launch.capability].num_sms
        if re.search(self.case.resident, name) and (
            self.launch.grid[0] > resources.blocks_per_sm * num_sms
        ):
            found.append(f"{self.launch.grid[0]} programs are not on the GPU all at once")
        is_hopper = self.launch.capability == 90
        if is_hopper and not resources.num_wgmma and re.search(self.case.wgmma, name):
            found.append("no warp-group products")
        return found


DECODES = ((1, 1024),) * 63
"""(new tokens, context) of each row."""
BATCHES = {
    "mixed": (*DECODES, (512, 1024)),
    "decodes alone": (*DECODES, (1, 1024)),
    "cut": ((64, 8192),),
    "16,384 decodes": ((1, 64),) * 16_384,
    "recorded": ((8, 1024),) * 256,
}
RECORDED = {"recorded": MostTokens(2048, 512)}
"""Batches of passes that are recorded, with their upper bounds: rows of a few tokens may be more
than there is room for."""


def attention_batch(name: str) -> AttentionBatch:
    """Return one of `BATCHES`."""
    q_lens, context_lens = zip(*BATCHES[name], strict=True)
    num_rows, num_tokens, most = len(q_lens), sum(q_lens), RECORDED.get(name)
    host = [
        numbers if most is None else UnknownValues(field, num_rows)
        for field, numbers in (
            ("host_rows", range(num_rows)),
            ("host_q_lens", q_lens),
            ("host_context_lens", context_lens),
        )
    ]
    return AttentionBatch(
        positions=meta(num_tokens, dtype=torch.int64),
        slot_mapping=meta(num_tokens, dtype=torch.int64),
        req_to_slot=meta(max(256, num_rows) + 1, 8193, dtype=torch.int32),
        rows=meta(num_rows, dtype=torch.int64),
        cu_seqlens_q=meta(num_rows + 1, dtype=torch.int32),
        context_lens=meta(num_rows, dtype=torch.int32),
        host_rows=host[0],
        host_q_lens=host[1],
        host_context_lens=host[2],
        most=most,
    )


def pools_of(num_kv_heads: int, head_dim: int, dtype: torch.dtype, kv: str) -> Tensor:
    """Return pools of keys and values of a kind, one of `KV_KINDS` or plain."""
    of_kind = {kind: (head_dim + WORD_BYTES, own) for own, kind in KV_KINDS.items()}
    size, own = of_kind.get(kv, (head_dim, dtype))
    return meta(2, num_kv_heads, 100_001, size, dtype=own).transpose(1, 2)


def attend(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    rows: str = "mixed",
    mod: str = "",
    kv: str = "plain",
) -> None:
    """Launch attention as a model does: queries are a view, pools have a head's slots together."""
    batch = attention_batch(rows)
    qkv = meta(len(batch.positions), num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    pools = pools_of(num_kv_heads, head_dim, dtype, kv)
    configs = AttentionConfigs()
    attention(
        qkv[:, :num_heads],
        pools[0],
        pools[1],
        batch,
        configs=configs,
        scale=head_dim**-0.5,
        sliding_window=window,
        score_mod=ScoreMod(
            50.0 if "cap" in mod else None,
            meta(num_heads, dtype=torch.float32) if "slopes" in mod else None,
            meta(num_heads, dtype=torch.float32) if "sinks" in mod else None,
        ),
    )


def attention_case(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    dtype: torch.dtype,
    *,
    rows: str = "mixed",
    mod: str = "",
    kv: str = "plain",
) -> Case:
    """Return a batch of this shape; `mod`: what is done to scores."""
    name = f"attention {num_heads}/{num_kv_heads} heads of {head_dim}"
    name += "" if kv == "plain" else f", {kv} KV"
    name += f", {mod}" if mod else ""
    name += f", window {window}" if window else ""
    name += "" if dtype == torch.bfloat16 else f", {str(dtype).removeprefix('torch.')}"
    name += "" if rows == "mixed" else f", {rows}"
    return Case(
        name,
        lambda: attend(
            num_heads, num_kv_heads, head_dim, window=window, dtype=dtype, rows=rows, mod=mod, kv=kv
        ),
        wide_loads="prefill|decode|merge" if kv == "plain" else "merge",
        wgmma="prefill" if dtype.itemsize == 2 else "$^",
        resident="decode",
    )


def attend_latents(num_heads: int, rank: int, rows: str) -> None:
    """Launch attention over latents: so many numbers, and 64 that are rotated."""
    batch = attention_batch(rows)
    pool = meta(1, 100_001, rank + 64).transpose(0, 1)
    q = meta(len(batch.positions), num_heads, rank + 64)
    configs, values = AttentionConfigs(), pool[..., :rank]
    attention(q, pool, values, batch, configs=configs, scale=0.07, sliding_window=None)


def latent_case(num_heads: int, rank: int, rows: str) -> Case:
    """Return a batch with so many query heads over latents."""
    return Case(
        f"attention over latents of {rank}, {num_heads} heads, {rows}",
        partial(attend_latents, num_heads, rank, rows),
        wide_loads="prefill|decode|merge",
        resident="decode",
    )


def rows(width: int, group: int | None) -> None:
    """Normalise, alone and with a residual; with `group`, also by gates, and round what is made."""
    x, weight, gate_up = meta(256, width), meta(width), meta(256, 2 * width)
    if group is None:
        norms.rms_norm(x, weight, 1e-5)
        norms.add_rms_norm(x, meta(256, width), weight, 1e-5)
    else:
        norms.round_rows(x, group)
        norms.add_rms_norm_rounded(x, meta(256, width), weight, 1e-5, group)
        norms.silu_and_mul_rounded(gate_up, group)


def rotate_case(
    num_heads: int, num_kv_heads: int, head_dim: int, *, has_norm: bool, kv: str = "plain"
) -> Case:
    """Return rotary and KV write of a model's heads, views of one product."""

    def call() -> None:
        qkv = meta(256, num_heads + 2 * num_kv_heads, head_dim)
        q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
        pools = pools_of(num_kv_heads, head_dim, torch.bfloat16, kv)
        angles = meta(256, head_dim // 2, dtype=torch.float32)
        rotate_and_write(
            q,
            k,
            v,
            cos=angles,
            sin=angles,
            k_pool=pools[0],
            v_pool=pools[1],
            slot_mapping=meta(256, dtype=torch.int64),
            qk_norm=QKNorm(meta(head_dim), meta(head_dim), 1e-6) if has_norm else None,
        )

    name = f"rotate, write {num_heads}/{num_kv_heads} heads of {head_dim}"
    name += "" if kv == "plain" else f", {kv} KV"
    return Case(name + (", QK-norm" if has_norm else ""), call)


def few_rows_case(name: str, num_outputs: int, num_inputs: int, num_rows: int) -> Case:
    """Return all that a start measures for a product: qkv, out, gate_up or down."""

    def call() -> None:
        key = ProductKey(num_inputs, num_rows, name in {"qkv", "gate_up"}, name == "gate_up")
        x, weight = meta(num_rows, num_inputs), meta(num_outputs, num_inputs)
        norm = NormInputs(meta(*x.shape), meta(num_inputs), 1e-5) if key.has_norm else None
        for config in candidates(key, x.dtype):
            multiply_rows(x, weight, None, config, norm=norm, is_gated=key.is_gated)

    return Case(f"few rows, {name} {num_inputs} to {num_outputs}, {num_rows}", call)


class Mixture(NamedTuple):
    """A block of experts; those with clamped gates have biases, as gpt-oss's."""

    num_experts: int
    num_chosen: int
    hidden: int
    size: int
    """Intermediate features."""
    activation: BlockActivation = SILU_GATES

    def run(self, num_tokens: int, first: PackedExperts, second: PackedExperts) -> None:
        """Send tokens through them."""
        num_experts, num_chosen, hidden, size, activation = self
        x, chosen = meta(num_tokens, hidden), meta(num_tokens, num_chosen, dtype=torch.int64)
        biases = None
        if activation.kind is Activation.CLAMPED_SILU:
            biases = ExpertBiases(meta(num_experts, 2 * size), meta(num_experts, hidden))
        own = x, chosen, chosen.float(), first, second
        experts.mix_experts(*own, biases=biases, activation=activation)


MIXTURES = {
    "Mixtral 8x7B": Mixture(8, 2, 4096, 14336),
    "Qwen3-30B-A3B": Mixture(128, 8, 2048, 768),
    "gpt-oss": Mixture(
        32, 4, 2880, 2880, BlockActivation(Activation.CLAMPED_SILU, alpha=1.702, limit=7.0)
    ),
    "Gemma 4 26B-A4B": Mixture(128, 8, 2816, 704, BlockActivation(Activation.GELU_TANH)),
    "Nemotron 3 Nano": Mixture(
        128, 6, 2688, 1856, BlockActivation(Activation.RELU_SQUARED, is_gated=False)
    ),
}
PACKED_MIXTURES = (
    ("fp4", "gpt-oss"),
    ("int4", "Mixtral 8x7B"),
    ("int8", "Qwen3-30B-A3B"),
    ("fp8 by fp8", "Qwen3-30B-A3B"),
    ("int8", "Gemma 4 26B-A4B"),
    *((kind, "Nemotron 3 Nano") for kind in ("int4", "int8", "fp8 by fp8")),
)


def mix(mixture: Mixture, num_tokens: int) -> None:
    """Go through a block of experts whose weights are plain."""
    num_experts, _, hidden, size, activation = mixture
    first = meta(num_experts, activation.num_parts * size, hidden)
    second = meta(num_experts, hidden, size)
    mixture.run(num_tokens, experts.plain_experts(first), experts.plain_experts(second))


def multiply(kind: str, num_rows: int, num_outputs: int, num_inputs: int) -> None:
    """Multiply by a packed weight, one of `PACKED_KINDS`; groups are of 128 inputs, or 32."""
    x, group = meta(num_rows, num_inputs), 128
    if kind == "int8":
        integers = meta(num_outputs, num_inputs, dtype=torch.int8)
        factors = meta(1, num_outputs, dtype=torch.float32)
        quantized.linear_int8(x, Int8Weight(integers, factors, num_outputs), None, None)
    elif kind == "int8 by int8":
        integers = meta(num_outputs, num_inputs, dtype=torch.int8)
        factors = meta(1, num_outputs, dtype=torch.float32)
        quantized.linear_rounded(x, Int8Weight(integers, factors, num_outputs), None)
    elif kind.startswith("fp8"):
        group = num_inputs if "of outputs" in kind else group
        values = meta(num_outputs, num_inputs, dtype=torch.float8_e4m3fn)
        factors = meta(num_inputs // group, num_outputs, dtype=torch.float32)
        is_rounded = "by fp8" in kind and gpu_of(x.device).capability >= 89
        quantized.linear_fp8(x, Fp8Weight(values, factors, group, rounds_rows=is_rounded), None)
    else:
        bits = 4 if kind == "int4" else 8
        group = 32 if kind == "uint8" else group
        packed = meta(num_outputs, num_inputs * bits // 8, dtype=torch.uint8)
        factors = meta(num_inputs // group, num_outputs, dtype=torch.float16)
        zeros = meta(num_inputs // group, num_outputs, dtype=torch.uint8)
        weight = GroupedWeight(packed, factors, zeros, num_outputs, num_inputs, bits, group)
        quantized.linear_groups(x, weight, None)


def mix_packed(kind: str, mixture: Mixture, num_tokens: int) -> None:
    """Go through a block of experts that are packed, one of `PACKED_MIXTURES`."""
    num_experts, _, hidden, size, activation = mixture
    group, block_k, bits = {
        "fp4": (32, 32, 4), "int4": (128, 64, 4), "int8": (0, 128, 8), "fp8 by fp8": (128, 128, 8)
    }[kind]  # fmt: skip
    has_fp8 = kind.startswith("fp8") and gpu_of(meta(1).device).capability >= 89

    def experts_of(outputs: int, inputs: int) -> PackedExperts:
        rows, groups = num_experts * outputs, inputs // group if group else 1
        value_dtype = torch.int8 if kind == "int8" else torch.uint8
        factor_dtype = torch.float16 if kind == "int4" else torch.float32
        return PackedExperts(
            kind.partition(" ")[0],
            meta(rows, -(-inputs // (2 * block_k)) * block_k, dtype=value_dtype)
            if bits == 4
            else meta(rows, inputs, dtype=value_dtype),
            meta(groups, rows, dtype=factor_dtype),
            meta(groups, rows, dtype=torch.uint8) if kind == "int4" else None,
            num_experts,
            group,
            block_k if has_fp8 or bits == 4 or not group else 64,
            has_fp8,
        )

    first = experts_of(activation.num_parts * size, hidden)
    mixture.run(num_tokens, first, experts_of(hidden, size))


PACKED_KINDS = (
    "int8", "int8 by int8", "int4", "uint8", "fp8 of outputs", "fp8 in blocks",
    "fp8 by fp8 of outputs", "fp8 by fp8 in blocks",
)  # fmt: skip

RECURRENT = {
    "delta rule of 16 heads": (16, 16, 128, 128),
    "delta rule of 32 heads": (16, 32, 128, 128),
    "Kimi's delta rule of 32 heads": (32, 32, 128, 128),
    "Mamba-2 of 48 heads": (1, 48, 128, 64),
    "Mamba-2 of 128 heads": (8, 128, 128, 80),
    "Mamba-2 of 32 heads, states of 256": (2, 32, 256, 128),
    "Mamba-2 of 48 heads, states of 256": (1, 48, 256, 64),
}
"""Key heads or groups, heads, size of keys or states, size of values."""


def scan_rows(name: str, rows: str) -> None:
    """Update the states of a layer, one of `RECURRENT`."""
    num_groups, num_heads, key_dim, size = RECURRENT[name]
    batch = replace(attention_batch(rows), state_slots=meta(257, 1590, dtype=torch.int32))
    if rows == "recorded":  # as where tokens are guessed
        is_held = meta(257, dtype=torch.uint8)
        batch = replace(batch, kept=KeptInputs(is_held, *[meta(0, 0)] * 3))
    channels, num_tokens = 2 * num_groups * key_dim + num_heads * size, len(batch.positions)
    pieces = meta(2, 2, 100_000, 512, dtype=torch.uint8)
    wide = meta(num_tokens, channels + num_heads * size)
    heads = meta(num_heads, dtype=torch.float32)
    has_bias = "Mamba" in name
    bias = meta(channels) if has_bias else None
    kernels = TritonKernels()
    mixed = kernels.convolve(
        wide[:, :channels], meta(4, channels), bias, StateBank(pieces, 0, 18), batch
    )
    own = {"bank": StateBank(pieces, 18, 512), "batch": batch}
    if has_bias:
        rates = meta(num_tokens, num_heads, dtype=torch.float32)
        mamba = MambaRule(num_groups, key_dim, size, heads, heads, heads)
        kernels.mamba(mixed, wide[:, channels:], rates, rule=mamba, **own)
        return
    by_channel = key_dim if "Kimi" in name else 1
    gates = meta(num_tokens, num_heads * (1 + by_channel), dtype=torch.float32)
    biases = meta(num_heads * by_channel, dtype=torch.float32)
    rule = DeltaRule(num_groups, key_dim, size, heads, biases, meta(size), 1e-6)
    kernels.delta_rule(
        mixed, wide[:, channels:], gates, rule=rule._replace(gates_by_sigmoid=by_channel > 1), **own
    )


def copy_slots(num_layers: int, num_kv_heads: int, head_dim: int) -> None:
    """Move 1,000 slots to staging memory, to the host and back."""
    kernels, ids = TritonCopies(), meta(1000, dtype=torch.int32)
    pool = meta(2, num_layers, num_kv_heads, 100_001, head_dim)
    rows = meta(1000, 2 * num_layers * num_kv_heads, head_dim)
    kernels.gather(pool, ids, rows)
    kernels.put_rows(rows, rows, ids)
    kernels.take_rows(rows, ids, rows)
    kernels.scatter(rows, pool, ids)


def sample_rows(vocab_size: int, params: SamplingParams) -> None:
    """Sample 64 rows that all have these parameters."""
    rows, table = [RowId(row) for row in range(64)], SamplingTable(64)
    table.update([AddSequence(row, [], params, 1, [2]) for row in rows])
    picked = table.rows(rows, lambda arrays: [torch.from_numpy(a).to("meta") for a in arrays])
    positions = meta(64, dtype=torch.int64)
    known = meta(65, 8193, dtype=torch.int32)
    counts = KnownCounts(64, vocab_size, torch.device("meta"))
    batch = SamplingBatch(picked, positions, known, known_counts=counts)
    sample(meta(64, vocab_size), batch)


SAMPLED = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(),
    "top-p": SamplingParams(top_p=0.9),
    "options": SamplingParams(
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        allowed_token_ids=(1, 2),
        min_tokens=3,
        num_logprobs=5,
    ),
    "bias": SamplingParams(temperature=0.0, logit_bias=((1, 2.0),)),
}
"""Together every sampling kernel; their common variants."""

FEW_ROWS = [
    ("qkv", 6144, 4096),
    ("out", 4096, 4096),
    ("gate_up", 28_672, 4096),
    ("down", 4096, 14_336),
    ("qkv", 1152, 896),
    ("gate_up", 9728, 896),
    ("down", 896, 4864),
]
"""Products of Llama-3-8B and of Qwen2.5-0.5B."""

HEADS = [(32, 32), (32, 8), (28, 4), (32, 4)]
"""Groups of 1, 4, 7 and 8."""
ATTENTION_CASES = [
    attention_case(*heads, head_dim, window, torch.bfloat16, rows=rows)
    for head_dim in (64, 80, 96, 128, 256)
    for heads in HEADS
    for window in (None, 4096)
    for rows in ("mixed", "cut")
]

CASES: list[Case] = [
    *ATTENTION_CASES,
    attention_case(32, 8, 128, None, torch.bfloat16, rows="decodes alone"),
    attention_case(28, 4, 128, 4096, torch.bfloat16, rows="16,384 decodes"),
    *(
        attention_case(*heads, head_dim, window, torch.bfloat16, rows="recorded")
        for heads, head_dim in (((32, 8), 128), ((28, 4), 128), ((14, 2), 64), ((32, 16), 256))
        for window in (None, 4096)
    ),
    *(
        attention_case(*heads, window, torch.bfloat16, rows=rows, mod=mod)
        for heads, window, mod in (
            ((32, 32, 64), None, "slopes"),
            ((40, 40, 128), None, "slopes"),
            ((8, 4, 256), None, "cap"),
            ((8, 4, 256), 4096, "cap"),
            ((32, 16, 128), None, "cap"),
            ((32, 16, 128), 4096, "cap"),
            ((64, 8, 64), None, "sinks"),
            ((64, 8, 64), 128, "sinks"),
        )
        for rows in ("mixed", "cut")
    ),
    *(
        attention_case(*heads, window, torch.bfloat16, rows=rows, mod=mod, kv=kv)
        for heads, window, mod in (
            ((32, 8, 128), None, ""),
            ((28, 4, 128), 4096, ""),
            ((32, 32, 64), None, ""),
            ((14, 2, 64), None, ""),
            ((32, 32, 96), None, ""),
            ((32, 16, 256), None, ""),
            ((8, 4, 256), 4096, "cap"),
            ((64, 8, 64), 128, "sinks"),
        )
        for rows in ("mixed", "cut", "recorded")
        for kv in KV_KINDS.values()
    ),
    *(
        latent_case(heads, rank, rows)
        for heads, rank in ((16, 512), (8, 512), (128, 512), (20, 256), (32, 256))
        for rows in ("mixed", "cut", "recorded")
    ),
    *(
        attention_case(*heads, 512, None, torch.bfloat16, rows=rows)
        for heads in ((8, 1), (32, 4), (16, 2))
        for rows in ("mixed", "cut", "recorded")
    ),
    attention_case(32, 8, 128, None, torch.float16),
    attention_case(32, 8, 128, None, torch.float32),
    *(
        Case(f"norms of {width}, groups of {group}", partial(rows, width, group))
        for width in (64, 128, 896, 4096, 5120, 8192, 14336, 29568)
        for group in (None, 0, 64, 128)
        if group is None or width > 512
    ),
    *(
        Case(f"silu_and_mul {width}", partial(norms.silu_and_mul, meta(256, 2 * width)))
        for width in (4864, 14336)
    ),
    *(
        rotate_case(*heads, has_norm=has_norm)
        for heads in ((32, 8, 128), (14, 2, 64), (40, 40, 80), (4, 1, 128))
        for has_norm in (False, True)
    ),
    *(
        rotate_case(*heads, has_norm=has_norm, kv=kv)
        for heads, has_norm in (((32, 8, 128), False), ((40, 40, 80), True))
        for kv in KV_KINDS.values()
    ),
    *(few_rows_case(*sizes, num_rows) for sizes in FEW_ROWS for num_rows in PRODUCT_ROWS),
    *(
        Case(f"experts of {name}, {num_tokens} tokens", partial(mix, mixture, num_tokens))
        for name, mixture in MIXTURES.items()
        for num_tokens in (8, 4096)
    ),
    *(
        Case(f"products of {kind}, {num_rows} rows", partial(multiply, kind, num_rows, *sizes))
        for kind in PACKED_KINDS
        for num_rows in (8, 512)
        for sizes in ((4096, 14336), (896, 896))
    ),
    *(
        Case(
            f"packed experts, {name}, {kind}, {num_tokens} tokens",
            partial(mix_packed, kind, MIXTURES[name], num_tokens),
        )
        for kind, name in PACKED_MIXTURES
        for num_tokens in (8, 4096)
    ),
    *(
        Case(
            f"{name}, {rows}",
            partial(scan_rows, name, rows),
            wide_loads="$^",  # numbers of a state lie where its slots are
        )
        for name in RECURRENT
        for rows in ("mixed", "recorded", "decodes alone")
    ),
    *(
        Case(f"copies of slots, {heads[1]} KV heads of {heads[2]}", partial(copy_slots, *heads))
        for heads in ((32, 8, 128), (24, 2, 64), (4, 3, 80))
    ),
    *(
        Case(
            f"sampling of {vocab_size}, {name}",
            partial(sample_rows, vocab_size, params),
            # Those that read logits; counts of tokens go to scattered places.
            wide_loads="scan|gather|adjust|draw",
        )
        for vocab_size in (128_256, 151_936)
        for name, params in SAMPLED.items()
    ),
]


def compile_cases(cases: list[Case], capability: int) -> Iterator[Line]:
    """Compile each case's launches for a compute capability; the same code is read once."""
    seen: set[bytes] = set()
    for case in cases:
        with compiling(capability) as launches:
            case.call()
        assert launches, f"{case.name} launches nothing"
        for launch in launches:
            if launch.cubin not in seen:
                seen.add(launch.cubin)
                yield Line(case, launch, read(launch))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", nargs="+", default=[""], help="only cases with one of these")
    parser.add_argument("--capability", type=int, nargs="+", default=list(GPUS))
    parser.add_argument("--json", type=Path, help="also write the table here")
    options = parser.parse_args()
    cases = [case for case in CASES if any(part in case.name for part in options.name)]
    table, num_faults = [], 0
    header = "sm warps stages regs local  shared blocks wgmma tcmma  mma 16B"
    print(f"{'case':40} {'kernel':24}  {header}")
    for capability in options.capability:
        for line in compile_cases(cases, capability):
            launch, r = line.launch, line.resources
            print(
                f"{line.case.name:40} {launch.name:24} {capability:3} {launch.num_warps:5}"
                f" {launch.num_stages:6} {r.num_registers:4} {r.num_local:5} {r.shared_bytes:7}"
                f" {r.blocks_per_sm:6} {r.num_wgmma:5} {r.num_tensor_memory:5} {r.num_mma:4}"
                f" {r.num_wide_loads:3}" + "".join(f"  FAULT: {fault}" for fault in line.faults),
                flush=True,
            )
            num_faults += len(line.faults)
            row = {"case": line.case.name, "kernel": launch.name, "capability": capability}
            table.append({**row, **asdict(r), "faults": line.faults})
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{len(table)} kernels, {num_faults} faults")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
