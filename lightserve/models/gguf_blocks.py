"""Blocks of quantised numbers as GGUF files have them, made numbers of float32. Torch-free.

The layouts are those of llama.cpp's `ggml-quants` (`block_q8_0`, `block_q4_0`, `block_q4_K`,
`block_q5_K`, `block_q6_K`, `block_mxfp4`). K-quants: 256 numbers in sub-blocks of 32 or 16, whose
factors (and, in Q4_K and Q5_K, least values) are themselves integers times a factor of the whole
block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightserve.models.gguf import BLOCK_TYPES
from lightserve.models.moe_config import FP4_HALVES, MXFP4_BIAS, MXFP4_NO_NUMBER

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def numbers_of_blocks(data: Bytes, kind: int) -> Floats:
    """Return the numbers of whole rows; data [R, row bytes], `kind` of BLOCK_TYPES -> [R, N]."""
    block = BLOCK_TYPES[kind]
    match block.name:
        case "F32":
            return data.view("<f4")
        case "F16":
            return data.view("<f2").astype(np.float32)
        case "BF16":
            return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    blocks = data.reshape(-1, block.num_bytes)
    numbers = _UNPACK[block.name](blocks)
    return numbers.reshape(len(data), -1)


def integers_of_blocks(data: Bytes, kind: int) -> tuple[Bytes, Floats, int] | None:
    """Return what rows are made of if all their blocks have one factor and whole numbers.

    Integers [R, N], without a sign, factors [R, blocks] and a zero; None: they are not.
    """
    block = BLOCK_TYPES[kind]
    if block.name not in ("Q8_0", "Q4_0"):
        return None
    blocks = data.reshape(-1, block.num_bytes)
    packed = blocks[:, 2:]
    if block.name == "Q8_0":
        integers, zero = packed ^ np.uint8(128), 128
    else:
        integers, zero = np.concatenate([packed & 15, packed >> 4], axis=1), 8
    return integers.reshape(len(data), -1), _halves(blocks, 0).reshape(len(data), -1), zero


def codes_of_blocks(data: Bytes) -> tuple[Bytes, Bytes]:
    """Return what rows of MXFP4 are made of; data [R, row bytes].

    Codes [R, N] of numbers of 4 bits, and the exponent [R, N / 32] that 32 of them share.
    """
    blocks = data.reshape(-1, 17)
    packed = blocks[:, 1:]
    codes = np.concatenate([packed & 15, packed >> 4], axis=1)
    return codes.reshape(len(data), -1), blocks[:, 0].reshape(len(data), -1)


def _halves(blocks: Bytes, start: int) -> Floats:
    """Return the float16 at byte `start` of every block, [B, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _halves(blocks, 0)


def _q4_0(blocks: Bytes) -> Floats:
    packed = blocks[:, 2:]
    integers = np.concatenate([packed & 15, packed >> 4], axis=1)
    return (integers.astype(np.float32) - 8) * _halves(blocks, 0)


def _six_bits(packed: Bytes) -> tuple[Floats, Floats]:
    """Return eight factors and eight least values, each [B, 8, 1], of 6 bits in 12 bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    factors = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    least = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return factors.astype(np.float32)[:, :, None], least.astype(np.float32)[:, :, None]


def _with_least(blocks: Bytes, integers: Bytes) -> Floats:
    """Return the numbers of Q4_K or Q5_K blocks; integers [B, 8, 32]."""
    factors, least = _six_bits(blocks[:, 4:16])
    factors = factors * _halves(blocks, 0)[:, :, None]
    return integers.astype(np.float32) * factors - least * _halves(blocks, 2)[:, :, None]


def _nibbles(packed: Bytes) -> Bytes:
    """Return [B, 8, 32] of [B, 128]: of each 32 bytes the low nibbles, then the high ones."""
    chunks = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([chunks & 15, chunks >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: Bytes) -> Floats:
    return _with_least(blocks, _nibbles(blocks[:, 16:]))


def _q5_k(blocks: Bytes) -> Floats:
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = (blocks[:, None, 16:48] >> shifts & 1).astype(np.uint8)
    return _with_least(blocks, _nibbles(blocks[:, 48:]) | fifth << np.uint8(4))


def _q6_k(blocks: Bytes) -> Floats:
    # Two halves of 128 numbers: four times 32, whose low bits are nibbles of 64 bytes.
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    integers = (low | (high << 4)).astype(np.float32) - 32
    factors = blocks[:, 192:208].view(np.int8).astype(np.float32) * _halves(blocks, 208)
    return integers.reshape(-1, 16, 16) * factors[:, :, None]


_FP4: Floats = (np.array(FP4_HALVES) / 2).astype(np.float32)


def _mxfp4(blocks: Bytes) -> Floats:
    codes, exponents = codes_of_blocks(blocks)
    powers = np.minimum(exponents, MXFP4_NO_NUMBER - 1).astype(np.int32) - MXFP4_BIAS
    factors = np.ldexp(np.float32(1), powers).astype(np.float32)
    factors[exponents == MXFP4_NO_NUMBER] = np.nan
    return _FP4[codes] * factors


_UNPACK = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
