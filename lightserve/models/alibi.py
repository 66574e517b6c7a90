"""ALiBi: how much less a head's scores are with each position that lies between. Torch-free.

Source: Press et al. 2022, "Train Short, Test Long", section 3; heads whose number is no power of
two as in its authors' code.
"""

from __future__ import annotations

import struct


def slopes_of(num_heads: int) -> tuple[float, ...]:
    """Return each head's slope: those of a power of two, then every other one of twice as many."""
    power = 1 << (num_heads.bit_length() - 1)
    return (_of_power(power) + _of_power(2 * power)[::2])[:num_heads]


def _of_power(num_heads: int) -> tuple[float, ...]:
    """Return 2 ** (-8 / n), its square, and so on."""
    return tuple(2.0 ** (-8.0 * head / num_heads) for head in range(1, num_heads + 1))


def mpt_slopes(num_heads: int, max_bias: float) -> tuple[float, ...]:
    """Return MPT's: of the next power of two, the steep half first."""
    power = 1 << (num_heads - 1).bit_length()
    slopes = tuple(2.0 ** (-max_bias * head / power) for head in range(1, power + 1))
    return slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


def as_bfloat16(number: float) -> float:
    """Return the nearest number of type bfloat16, ties to even."""
    bits = int.from_bytes(struct.pack(">f", number), "big")
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack(">f", bits.to_bytes(4, "big"))[0])
