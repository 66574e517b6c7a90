"""Sizes of launches. Triton's own `cdiv` and `next_power_of_2` are decorated: ten times as slow."""

from __future__ import annotations


def cdiv(number: int, size: int) -> int:
    """Return number / size, rounded up."""
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    """Return the least power of 2 that is not below `number`, at least 1."""
    return 1 << max(0, number - 1).bit_length()
