"""Products by packed weights, decodes over latents: right first, then timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.attention import MAX_ERROR, Order, attend, make_batch, slot_table, worst_error
from bench.gpu.device import Machine, copy_bandwidth
from bench.gpu.table import Bench
from lightserve.kernels.interface import Can
from lightserve.kernels.reference import numbers_of_groups, rounded_to_e4m3
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.models.base import KVGroup, KVLayout
from lightserve.models.layers.quantized import rounded_to_fp8
from lightserve.worker.memory import KVPool

SIZES, REHEARSED_SIZES = (14_336, 4096), (96, 128)
"""Outputs and inputs: gates of Llama-3-8B."""
ROWS, REHEARSED_ROWS = (8, 512), (3, 40)
GROUP = 128


class Packed(NamedTuple):
    """A kind of packed weight."""

    name: str
    multiply: Callable[[Tensor], Tensor]
    numbers: Tensor
    """Float32 [M, K], what it stands for."""


def kinds(machine: Machine, num_outputs: int, num_inputs: int) -> Iterator[Packed]:
    """Yield each kind with random numbers."""
    kernels, device = TritonKernels(), machine.device
    int8 = kernels.quantize(weight := machine.random(num_outputs, num_inputs) / num_inputs**0.5)
    look_up = kernels.rows_of(int8, num_inputs, torch.float32)
    every = torch.arange(num_outputs, device=device)
    yield Packed("int8", lambda x: kernels.linear(x, int8, None), look_up(every))
    name, by_integers = "int8 by int8", int8._replace(rounds_rows=True)
    yield Packed(name, lambda x: kernels.linear(x, by_integers, None), look_up(every))
    sizes = (num_outputs, num_inputs // GROUP)
    for bits in (4, 8):
        integers = torch.randint(2**bits, weight.shape, dtype=torch.uint8, device=device)
        zeros = torch.randint(2**bits, sizes, dtype=torch.uint8, device=device)
        factors = (machine.random(*sizes) * 0.01).half()
        groups = kernels.pack_groups(integers, factors, zeros, bits=bits, group_size=GROUP)
        yield Packed(
            f"int{bits} in groups of {GROUP}",
            lambda x, groups=groups: kernels.linear(x, groups, None),  # type: ignore[misc]
            numbers_of_groups(integers, factors, zeros, GROUP),
        )
    values, factors = rounded_to_fp8(weight)
    fp8 = kernels.pack_fp8(values, factors, group_size=num_inputs)
    yield Packed("fp8", lambda x: kernels.linear(x, fp8, None), values.float() * factors)
    if Can.FP8_PRODUCTS not in kernels.can:
        return
    both = fp8._replace(rounds_rows=True)
    yield Packed("fp8 by fp8", lambda x: kernels.linear(x, both, None), values.float() * factors)


def packed_products(bench: Bench) -> None:
    """Compare each kind with the product by its numbers, and report its time beside bfloat16's."""
    machine = bench.machine
    outputs, inputs = REHEARSED_SIZES if bench.rehearse else SIZES
    plain = machine.random(outputs, inputs)
    for num_rows in REHEARSED_ROWS if bench.rehearse else ROWS:
        x = machine.random(num_rows, inputs)
        plain_s = machine.median_s(lambda _, x=x: functional.linear(x, plain))  # type: ignore[misc]
        for packed in kinds(machine, outputs, inputs):
            own = rounded_to_e4m3(x, inputs) if "by fp8" in packed.name else x.float()
            name, truth = f"{packed.name}, {num_rows} rows", own @ packed.numbers.T
            error = float((packed.multiply(x).float() - truth).norm() / truth.norm())
            if not error <= MAX_ERROR:
                bench.rows.claim(name, False, f"relative error {error:.2g}")
                continue
            seconds = machine.median_s(lambda _, p=packed, x=x: p.multiply(x))  # type: ignore[misc]
            note = f"{1e6 * seconds:.1f} us, bfloat16 {1e6 * plain_s:.1f} us"
            bench.rows.figure(f"{name}, beside bfloat16", seconds / plain_s, "x", note=note)
    _latents(bench)


LATENT, REHEARSED_LATENT = (576, 512, 16), (40, 32, 4)
"""What is kept of a token, its value, and query heads: DeepSeek-V2-Lite's."""
LATENT_SHAPES, REHEARSED_LATENT_SHAPES = ((1, 32_768), (64, 8192)), ((2, 40),)


def _latents(bench: Bench) -> None:
    """Report decodes over latents beside the copy; slots as the allocator hands them out."""
    machine, kernels = bench.machine, TritonKernels()
    key_dim, value_dim, num_heads = REHEARSED_LATENT if bench.rehearse else LATENT
    bandwidth = copy_bandwidth(machine)
    for batch, context in REHEARSED_LATENT_SHAPES if bench.rehearse else LATENT_SHAPES:
        group = KVGroup(
            num_layers=1, num_kv_heads=1, head_dim=key_dim, dtype="bfloat16", value_dim=value_dim
        )
        pool = KVPool(KVLayout((group,)), batch * context, machine.device)
        for tensor in pool.tensors:
            tensor.normal_()
        table = slot_table(Order.BLOCKS, batch, context).to(machine.device)
        rows = make_batch(table, range(batch), q_len=1, context=context)
        q = machine.random(batch, num_heads, key_dim)
        name = f"latents, batch {batch}, context {context}"
        error = worst_error(kernels, q, pool, rows, last_queries=1)
        if not error <= MAX_ERROR:
            bench.rows.claim(name, False, f"relative error {error:.2g}")
            continue
        seconds = machine.median_s(lambda _, args=(q, pool, rows): attend(kernels, *args))  # type: ignore[misc]
        share = 100 * batch * context * key_dim * 2 / seconds / bandwidth
        bench.rows.figure(name, share, "% of copy", note=f"{1e6 * seconds:.1f} us")
