"""Before a server serves: do its kernels compute as the reference does, on its own shapes?

Run by every rank at its start, whatever the kernels: a driver, a compiler or a chip that is wrong
must not answer requests. Fresh random data of a fixed seed; memory that kernels allocate is filled
with NaN first; inputs are views and strides as the model has them. Small batches and parts of large
weights keep it to milliseconds and some hundred megabytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightserve.errors import LightserveError, StartupError
from lightserve.kernels.check_pair import (
    LIMITS,
    LINEAR_ROWS,
    CheckBatch,
    Comparison,
    Pair,
    Poison,
    check_batches,
)
from lightserve.kernels.check_products import (
    expert_choices,
    expert_products,
    fp8_linears,
    int4_linears,
    int8_linears,
    linears,
    packed_expert_products,
)
from lightserve.kernels.interface import WORD_BYTES, Can, Kernels, QKNorm, ScoreMod
from lightserve.kernels.recurrent import read_states, write_states
from lightserve.kernels.reference import ReferenceKernels, kv_in_8_bits, numbers_of_8_bit_kv
from lightserve.kernels.select import make_kernels
from lightserve.kernels.weights import (
    ConvolutionSizes,
    DeltaRule,
    KeptInputs,
    KernelShapes,
    MambaRule,
    Packed,
    StateBank,
    StateSizes,
)
from lightserve.logs import one_line

STEPS = 2.0
"""A number of 8 bits may be off by so many of its steps: half of one, and earlier roundings."""
STATE_SLOTS = 3
"""Slots of a state tensor that is tried."""
CHECKED_CAP = 2.0
"""Cap of random scores, which are about 1: a model's own cap would change next to nothing."""


def check_kernels(kernels: Kernels, shapes: KernelShapes, device: torch.device) -> None:
    """Compare every operation with the reference.

    Raises:
        StartupError: one disagrees; names it, its shape, error, limit, and kernels that do not.
    """
    if reason := disagreement(kernels, shapes, device):
        raise StartupError(
            f"the {kernels.name} kernels do not agree with the reference on {device}: {reason};"
            f" {_advice(kernels, shapes, device)}"
        )


def check_quantized(
    kernels: Kernels, shapes: KernelShapes, device: torch.device, kinds: Packed
) -> None:
    """Compare products of packed weights with the reference's, of the same numbers.

    `kinds`: of the model's weights; kernels that have no such kind made others of them.

    Raises:
        StartupError: one disagrees.
    """
    pair, can = Pair(kernels, shapes, device), kernels.can
    comparisons = chain(
        int8_linears(pair) if Packed.INT8 in kinds and Can.INTEGERS in can else (),
        int4_linears(pair) if Packed.INT4 in kinds and Can.INTEGERS in can else (),
        fp8_linears(pair) if Packed.FP8 in kinds and Can.FP8 in can else (),
        packed_expert_products(pair)
        if Packed.FP4_EXPERTS in kinds and shapes.num_experts and Can.PACKED_EXPERTS in can
        else (),
    )
    _compare_packed(pair, comparisons, "--quantization none")


def check_small_kv(kernels: Kernels, shapes: KernelShapes, device: torch.device) -> None:
    """Compare keys and values of 8 bits, written and attended, with the reference's of the same.

    `shapes.pool_dtype` says of which.

    Raises:
        StartupError: one disagrees.
    """
    assert shapes.pool_dtype is not None
    pair = Pair(kernels, shapes, device)
    _compare_packed(pair, _small_kv(pair, shapes.pool_dtype), "--kv-dtype auto")


def _compare_packed(pair: Pair, comparisons: Iterator[Comparison], option: str) -> None:
    """Raise StartupError if one disagrees; `option` does without what is compared."""
    if reason := _first_difference(comparisons, LIMITS[pair.shapes.dtype]):
        raise StartupError(
            f"the {pair.kernels.name} kernels do not agree with the reference: {reason};"
            f" {option} does without them"
        )


def disagreement(kernels: Kernels, shapes: KernelShapes, device: torch.device) -> str | None:
    """Return the first difference from the reference, None if there is none."""
    return _first_difference(_comparisons(Pair(kernels, shapes, device)), LIMITS[shapes.dtype])


def _first_difference(comparisons: Iterator[Comparison], limit: float) -> str | None:
    """Return the first comparison beyond `limit`, or the failure, in words."""
    with torch.inference_mode():
        while True:
            try:
                comparison = next(comparisons, None)
            except LightserveError:
                raise
            except Exception as failure:  # of a launch (Triton has types of its own), or a compiler
                return f"an operation failed: {one_line(failure)}"
            if comparison is None:
                return None
            error = comparison.error()
            if not error <= limit:
                dtype = str(comparison.result.dtype).removeprefix("torch.")
                return (
                    f"{comparison.operation} of {comparison.shape} in {dtype} has a relative error"
                    f" of {error:.2g}, at most {limit:g} is allowed"
                )


def _advice(kernels: Kernels, shapes: KernelShapes, device: torch.device) -> str:
    """Return which --attention-backend works."""
    for name in ("triton", "torch"):
        try:
            other = make_kernels(name, batch_invariant=False, device=device)
            works = other.name != kernels.name and disagreement(other, shapes, device) is None
        except (LightserveError, RuntimeError):
            continue
        if works:
            return f"--attention-backend {name} does"
    return "--attention-backend reference is slow, but right"


def _comparisons(pair: Pair) -> Iterator[Comparison]:
    yield from linears(pair)
    yield from _norms(pair)
    yield from _activations(pair)
    if pair.shapes.num_experts:
        yield from expert_products(pair)
    yield from expert_choices(pair)
    for case in check_batches(pair.shapes, pair.device, pair.generator):
        yield from _heads(pair, case)
        if (sizes := pair.shapes.delta or pair.shapes.convolution) is not None:
            yield from _states(pair, case, sizes)


def _states(
    pair: Pair, case: CheckBatch, sizes: StateSizes | ConvolutionSizes
) -> Iterator[Comparison]:
    """Results and states of a layer, of rows some of which begin, and some of which are held."""
    random, delta = pair.random, sizes if isinstance(sizes, StateSizes) else None
    channels = sizes.channels
    num_decays = delta.key_dim if delta and delta.decays_channels else 1
    num_tokens, num_rows = len(case.batch.positions), len(case.batch.host_rows)
    num_slots = 2 * STATE_SLOTS * num_rows
    slots = torch.randperm(2 * num_slots, generator=pair.generator, device=pair.device).int()
    own: dict[str, Any] = {
        "rows": torch.arange(num_rows, device=pair.device),
        "state_slots": slots[:num_slots].view(num_rows, -1),
        "prepared": {},
    }
    batch = replace(case.batch, host_rows=range(num_rows), **own)
    behind = replace(batch, context_lens=batch.context_lens + 1)
    is_held = (torch.arange(num_rows, device=pair.device) % 2).to(torch.uint8)

    def run(kernels: Kernels, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        wide, weight, bias, kept, *others = inputs
        given, states, banks = batch, [kept, *(one.float() for one in others[3:])], []
        if case.num_padding and Can.GRAPHS in kernels.can:
            given = replace(case.recorded(), **own)
        for number, state in enumerate(states):
            size = -(-state[0].nbytes // (8 * STATE_SLOTS)) * 4  # a piece, of two parts of a slot
            pieces = torch.zeros(2, 1, len(slots), size, dtype=torch.uint8, device=pair.device)
            banks.append(StateBank(pieces, number * STATE_SLOTS, STATE_SLOTS))
            write_states(banks[-1], batch, state)
        mixed, z, is_plain = wide[:, :channels], wide[:, channels:], delta is None
        held = replace(given, kept=KeptInputs(is_held, *[wide[:0]] * 3), prepared={})
        results = [
            kernels.convolve(mixed, weight, own_bias, banks[0], seen, is_plain=is_plain)
            for own_bias, seen in ((None, given), (bias, held))
        ]
        if delta is not None:
            norm, gates, rates, _ = others
            own_gates = gates.float()
            mamba = MambaRule(
                *(delta.num_key_heads, delta.key_dim, delta.value_dim, -rates.float().exp()),
                *(rates.float().repeat_interleave(num_decays), rates.float()),
            )
            rule = DeltaRule(
                *(delta.num_key_heads, delta.key_dim, delta.value_dim),
                decay=-rates.float().exp(),
                rate_bias=rates.float().repeat_interleave(num_decays),
                norm=norm,
                eps=pair.shapes.rms_norm_eps,
                beta_scale=delta.beta_scale,
                gates_by_sigmoid=delta.decays_channels,
            )
            results += [
                kernels.mamba(mixed, z, own_gates, rule=mamba, bank=banks[1], batch=seen)
                if delta.is_mamba
                else kernels.delta_rule(mixed, z, own_gates, rule=rule, bank=banks[1], batch=seen)
                for seen in (given, held)
            ]
        after = (
            read_states(bank, behind, state.shape[1:], state.dtype).flatten(1)
            for bank, state in zip(banks, states, strict=True)
        )
        return *results, *after

    z_size = delta.num_heads * delta.value_dim if delta else 0
    inputs = [
        random(num_tokens, channels + z_size),
        random(sizes.width, channels),
        random(channels),
        random(num_rows, sizes.width - 1, channels),
    ]
    if delta is not None:
        heads = delta.num_heads
        num_gates = heads if delta.is_mamba else heads * (1 + num_decays)
        inputs += [random(delta.value_dim), random(num_tokens, num_gates), random(heads)]
        inputs.append(random(num_rows, heads, delta.key_dim, delta.value_dim))
    yield from pair.compare("states", f"{case.name}, {num_rows} rows, {sizes}", run, tuple(inputs))


def _norms(pair: Pair) -> Iterator[Comparison]:
    shapes, eps = pair.shapes, pair.shapes.rms_norm_eps

    def norm(kernels: Kernels, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (kernels.rms_norm(inputs[0], pair.norm_weight(inputs[1]), eps),)

    x = pair.random(LINEAR_ROWS[-1], shapes.hidden_size)
    residual, weight = pair.random(*x.shape), pair.random(shapes.hidden_size)
    shape = f"{list(x.shape)}"
    yield from pair.compare("rms_norm", shape, norm, (x, weight))
    yield from pair.compare(
        "add_rms_norm",
        shape,
        lambda kernels, a: kernels.add_rms_norm(a[0], a[1], pair.norm_weight(a[2]), eps),
        (x, residual, weight),
    )
    bias = pair.random(shapes.hidden_size)
    yield from pair.compare(
        "layer_norm",
        shape,
        lambda kernels, a: (
            kernels.layer_norm(a[0], a[1], a[2], eps),
            kernels.layer_norm(a[0], a[1], None, eps),
        ),
        (x + 1.0, weight, bias),
    )
    if shapes.qk_norm:
        heads = pair.random(LINEAR_ROWS[-1], shapes.num_heads, shapes.head_dim)
        weight = pair.random(shapes.head_dim)
        yield from pair.compare("rms_norm", f"{list(heads.shape)}", norm, (heads, weight))


def _activations(pair: Pair) -> Iterator[Comparison]:
    gate_up = pair.random(LINEAR_ROWS[-1], 2 * pair.shapes.intermediate_size)
    shape = f"{list(gate_up.shape)}"

    def gelu(kernels: Kernels, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        gate, up = inputs[0].chunk(2, dim=-1)
        return tuple(
            kernels.gelu(gate, second, is_exact=is_exact)
            for second in (None, up)
            for is_exact in (False, True)
        )

    yield from pair.compare(
        "silu_and_mul", shape, lambda kernels, a: (kernels.silu_and_mul(a[0]),), (gate_up,)
    )
    yield from pair.compare("gelu", shape, gelu, (gate_up,))


class _Heads(NamedTuple):
    """A batch's heads as they lie in one product's output, and how they are turned."""

    qkv: Tensor
    """[T, Hq + 2 * Hkv, D]."""
    sizes: tuple[int, int, int]
    cos: Tensor
    """float32 [T, rotated dimensions / 2]."""
    sin: Tensor
    text: str

    def split(self, qkv: Tensor) -> list[Tensor]:
        """Return q, k and v of a copy of `qkv`: views with its strides."""
        return list(qkv.split_with_sizes(self.sizes, dim=1))

    def written(self, pools: Sequence[Tensor], slots: Tensor) -> dict[str, Tensor]:
        """Return what `rotate_and_write` is told by name: turns, pools and the tokens' slots."""
        k_pool, v_pool = pools
        turns = {"cos": self.cos, "sin": self.sin}
        return {**turns, "k_pool": k_pool, "v_pool": v_pool, "slot_mapping": slots}


def _heads_of(pair: Pair, case: CheckBatch) -> _Heads:
    shapes, num_tokens = pair.shapes, len(case.batch.positions)
    sizes = (shapes.num_heads, shapes.num_kv_heads, shapes.num_kv_heads)
    qkv = pair.random(num_tokens, sum(sizes), shapes.head_dim)
    angles = pair.random(num_tokens, shapes.rotary_dim // 2).float() * torch.pi
    if case.num_padding:  # which of them is stored in their one slot does not matter then
        qkv[-case.num_padding :] = qkv[-1]
        angles[-case.num_padding :] = angles[-1]
    text = f"{sizes[0]} query and {sizes[1]} KV heads of {shapes.head_dim}"
    return _Heads(qkv, sizes, angles.cos(), angles.sin(), text)


def _heads(pair: Pair, case: CheckBatch) -> Iterator[Comparison]:
    """Rotary embedding, writing KV, both at once as models do it, and attention."""
    batch, heads = case.batch, _heads_of(pair, case)
    rows = f"{case.name}, {len(batch.host_rows)} rows, {heads.text}"
    num_real, mod = len(batch.positions) - case.num_padding, _score_mod(pair)

    def rotary(kernels: Kernels, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, k, _ = heads.split(inputs[0])
        return kernels.rotary(q, k, inputs[1], inputs[2])

    def write(kernels: Kernels, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        _, k, v = heads.split(inputs[0])
        kernels.write_kv(k, v, *_pools(inputs), batch.slot_mapping)
        return inputs[1:]

    def attend(kernels: Kernels, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        k_pool, v_pool = _pools(inputs)
        if pair.shapes.value_dim is not None:
            v_pool = k_pool[..., : pair.shapes.value_dim]
        seen = case.recorded() if case.num_padding and Can.GRAPHS in kernels.can else batch
        out = kernels.attention(
            heads.split(inputs[0])[0],
            k_pool,
            v_pool,
            seen,
            scale=pair.shapes.head_dim**-0.5,
            sliding_window=case.window,
            score_mod=mod,
        )
        return (out[:num_real],)

    yield from pair.compare("rotary", heads.text, rotary, (heads.qkv, heads.cos, heads.sin))
    ones = torch.ones_like(case.k_pool)
    yield from pair.compare("write_kv", rows, write, (heads.qkv, ones, ones))
    yield from _rotated_and_written(pair, case, heads, rows)
    window = "" if case.window is None else f", a window of {case.window}"
    inputs = (heads.qkv, case.k_pool, case.v_pool)
    yield from pair.compare("attention", rows + window, attend, inputs)


def _score_mod(pair: Pair) -> ScoreMod | None:
    """Return the changes of the model's scores, with slopes of the usual sizes."""
    shapes = pair.shapes
    if not shapes.has_alibi and shapes.soft_cap is None and not shapes.has_sinks:
        return None
    sinks = torch.linspace(-2.0, 4.0, shapes.num_heads, device=pair.device)
    exponents = torch.linspace(0.5, 8.0, shapes.num_heads, device=pair.device)
    cap = None if shapes.soft_cap is None else min(shapes.soft_cap, CHECKED_CAP)
    slopes = 2.0**-exponents if shapes.has_alibi else None
    return ScoreMod(cap, slopes, sinks if shapes.has_sinks else None)


def _small_kv(pair: Pair, dtype: torch.dtype) -> Iterator[Comparison]:
    """Attention over a batch's keys and values as they are, and once more over those written."""
    word = WORD_BYTES if pair.device.type == "cuda" else 1
    for case in check_batches(pair.shapes, pair.device, pair.generator):
        heads = _heads_of(pair, case)
        rows = f"{case.name}, {len(case.batch.host_rows)} rows, {heads.text}, of 8 bits"
        num_real = len(case.batch.positions) - case.num_padding
        options: dict[str, Any] = {
            "scale": pair.shapes.head_dim**-0.5,
            "sliding_window": case.window,
            "score_mod": _score_mod(pair),
        }
        pools = [
            kv_in_8_bits(pool.nan_to_num(), dtype, word).transpose(0, 1)
            for pool in (case.k_pool, case.v_pool)
        ]
        norm = _qk_norm(pair, [pair.random(pair.shapes.head_dim) for _ in range(2)])
        with Poison():
            turned = pair.kernels.rotate_and_write(
                *heads.split(heads.qkv.clone()),
                **heads.written(pools, case.batch.slot_mapping),
                qk_norm=norm,
            )
            found = pair.kernels.attention(turned, pools[0], pools[1], case.batch, **options)
        reference, slots = ReferenceKernels(), case.batch.slot_mapping
        wide_norm = norm and QKNorm(norm.q_weight.float(), norm.k_weight.float(), norm.eps)
        q, k, v = heads.split(heads.qkv.float())
        if wide_norm is not None:
            k = reference.rms_norm(k, wide_norm.k_weight, wide_norm.eps)
        _, k = reference.rotary(q, k, heads.cos, heads.sin)
        wide = [numbers_of_8_bit_kv(pool, pair.shapes.head_dim) for pool in pools]
        for name, pool, expected in zip(("keys", "values"), wide, (k, v), strict=True):
            # A rounding of 8 bits is beyond the limit of float32, and is told apart by its size.
            largest = expected.abs().amax(dim=-1, keepdim=True)
            step = largest / 127
            if dtype is torch.uint8:  # three bits behind a number's first
                step = step.maximum(expected.abs() / 8)
            off = ((pool[slots] - expected) / step.clamp_min(1e-30)).abs().clamp(max=1e3)
            good = (off <= STEPS) | (expected == pool[slots])
            yield Comparison(f"written {name}", rows, good.float(), torch.ones_like(off))
        truth = reference.attention(turned.float(), wide[0], wide[1], case.batch, **options)
        yield Comparison("attention", rows, found[:num_real], truth[:num_real])


def _rotated_and_written(
    pair: Pair, case: CheckBatch, heads: _Heads, rows: str
) -> Iterator[Comparison]:
    shapes = pair.shapes

    def run(kernels: Kernels, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        out = kernels.rotate_and_write(
            *heads.split(inputs[0]),
            **heads.written(_pools(inputs), case.batch.slot_mapping),
            qk_norm=_qk_norm(pair, inputs[3:]),
        )
        return out, *inputs[1:3]

    ones = torch.ones_like(case.k_pool)
    weights = (pair.random(shapes.head_dim), pair.random(shapes.head_dim))
    name = "rotate_and_write with norms" if shapes.qk_norm else "rotate_and_write"
    yield from pair.compare(name, rows, run, (heads.qkv, ones, ones, *weights))


def _qk_norm(pair: Pair, weights: Sequence[Tensor]) -> QKNorm | None:
    """Return the model's norms of queries and keys, if it has any, with these weights."""
    if not pair.shapes.qk_norm:
        return None
    q_weight, k_weight = map(pair.norm_weight, weights)
    return QKNorm(q_weight, k_weight, pair.shapes.rms_norm_eps)


def _pools(inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return pools [S, Hkv, D] of inputs (qkv, keys, values), as `KVPool` has them."""
    return inputs[1].transpose(0, 1), inputs[2].transpose(0, 1)
