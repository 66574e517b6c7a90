"""Every type of blocks of GGUF files, against what llama.cpp's structures say, number by number."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
from support.gguf_files import KINDS

from lightserve.models.gguf import BLOCK_TYPES
from lightserve.models.gguf_reader import numbers_of_blocks


def half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def six_bits(packed: bytes, index: int) -> tuple[int, int]:
    if index < 4:
        return packed[index] & 63, packed[index + 4] & 63
    low, high = packed[index + 4] & 15, packed[index + 4] >> 4
    return low | packed[index - 4] >> 6 << 4, high | packed[index] >> 6 << 4


def k_number(block: bytes, n: int, *, has_fifth: bool) -> float:
    packed = block[48:] if has_fifth else block[16:]
    byte = packed[n // 64 * 32 + n % 32]
    integer = byte >> 4 if n % 64 >= 32 else byte & 15
    if has_fifth:
        integer |= (block[16 + n % 32] >> (n // 32) & 1) << 4
    factor, least = six_bits(block[4:16], n // 32)
    return half(block, 0) * factor * integer - half(block, 2) * least


def q6_number(block: bytes, n: int) -> float:
    part, place = n // 128, n % 128
    quarter, lane = place // 32, place % 32
    low = block[part * 64 + lane + 32 * (quarter % 2)]
    low = low >> 4 if quarter >= 2 else low & 15
    high = block[128 + part * 32 + lane] >> (2 * quarter) & 3
    return half(block, 208) * signed(block[192 + n // 16]) * ((low | high << 4) - 32)


def fp4_number(block: bytes, n: int) -> float:
    code = block[1 + n % 16] >> 4 if n >= 16 else block[1 + n] & 15
    exponent, mantissa = code >> 1 & 3, code & 1
    size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return float((-1) ** (code >> 3) * size * 2.0 ** (block[0] - 127))


def fifth_bit(block: bytes, at: int, n: int) -> int:
    return (int.from_bytes(block[at : at + 4], "little") >> n & 1) << 4


def nibble(packed: bytes, n: int) -> int:
    """One of 32: the low halves of 16 bytes, then the high ones."""
    return packed[n % 16] >> 4 if n >= 16 else packed[n] & 15


def two_bits(packed: bytes, n: int) -> int:
    return packed[n // 128 * 32 + n % 32] >> (n % 128 // 32 * 2) & 3


def q2_number(block: bytes, n: int) -> float:
    scale = block[n // 16]
    integer = two_bits(block[16:80], n)
    return half(block, 80) * (scale & 15) * integer - half(block, 82) * (scale >> 4)


def q3_number(block: bytes, n: int) -> float:
    index, packed = n // 16, block[96:108]
    low = packed[index] & 15 if index < 8 else packed[index - 8] >> 4
    high = packed[8 + index % 4] >> (index // 4 * 2) & 3
    has_third = block[n % 32] >> (n // 32) & 1
    integer = two_bits(block[32:96], n) - (0 if has_third else 4)
    return half(block, 108) * ((low | high << 4) - 32) * integer


IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def iq4_number(block: bytes, n: int) -> float:
    index = n // 32
    low = block[4 + index // 2] >> (index % 2 * 4) & 15
    high = int.from_bytes(block[2:4], "little") >> (2 * index) & 3
    code = nibble(block[8 + 16 * index : 24 + 16 * index], n % 32)
    return half(block, 0) * ((low | high << 4) - 32) * IQ4[code]


FORMULAS: dict[str, Callable[[bytes, int], float]] = {
    "Q8_0": lambda block, n: half(block, 0) * signed(block[2 + n]),
    "Q4_0": lambda b, n: half(b, 0) * ((b[2 + n % 16] >> 4 if n >= 16 else b[2 + n] & 15) - 8),
    "Q4_1": lambda b, n: half(b, 0) * nibble(b[4:], n) + half(b, 2),
    "Q5_0": lambda b, n: half(b, 0) * ((nibble(b[6:], n) | fifth_bit(b, 2, n)) - 16),
    "Q5_1": lambda b, n: half(b, 0) * (nibble(b[8:], n) | fifth_bit(b, 4, n)) + half(b, 2),
    "Q2_K": q2_number,
    "Q3_K": q3_number,
    "IQ4_NL": lambda b, n: half(b, 0) * IQ4[nibble(b[2:], n)],
    "IQ4_XS": iq4_number,
    "Q4_K": lambda block, n: k_number(block, n, has_fifth=False),
    "Q5_K": lambda block, n: k_number(block, n, has_fifth=True),
    "Q6_K": q6_number,
    "MXFP4": fp4_number,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_blocks(name: str) -> None:
    block = BLOCK_TYPES[KINDS[name]]
    generator = np.random.default_rng(1)
    data = generator.integers(0, 256, (3, 2 * block.num_bytes), dtype=np.uint8)
    halves = {"Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,)}.get(name, (0,))
    if name in ("Q4_K", "Q5_K", "Q4_1", "Q5_1"):
        halves = (0, 2)
    for start in [at + offset for at in halves for offset in (0, block.num_bytes)]:
        data[:, start + 1] = 0x31  # of the size of one: no NaN
    if name == "MXFP4":
        data[:, [0, block.num_bytes]] = [[0, 1], [127, 120], [130, 135]]
    found = numbers_of_blocks(data, KINDS[name])
    assert found.shape == (3, 2 * block.num_numbers)
    for row in range(3):
        for number in range(2 * block.num_numbers):
            first = number // block.num_numbers * block.num_bytes
            bytes_of_block = data[row, first : first + block.num_bytes].tobytes()
            expected = FORMULAS[name](bytes_of_block, number % block.num_numbers)
            assert found[row, number] == pytest.approx(expected, rel=1e-5, abs=1e-5)
