"""The native core: a small library of C++, built where the package is installed.

It has a plain C ABI and knows nothing of torch: buffers go in as addresses. One build serves every
machine and every torch; which instructions are used is decided here, when it is loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).with_name("csrc")
LIBRARY = Path(__file__).with_name("libcore.so")

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Level(IntEnum):
    """Sets of instructions, each containing those before it; as in `core.h`."""

    NONE = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3
    AMX = 4


PANEL = 32
"""Outputs that are packed together, as in `core.h`: factors are padded to a multiple."""
BYTE_BLOCK = 64
"""Inputs of 8 bits that are packed together, as in `core.h`."""


def num_panels(num_outputs: int, *, is_gated: bool) -> int:
    """Return how many panels a packed weight has: gates and ups share them, half of each."""
    return -(-num_outputs // 2 // (PANEL // 2)) if is_gated else -(-num_outputs // PANEL)


class Form(IntEnum):
    """Results that a product's sums may become, as in `core.h`."""

    PLAIN = 0
    GATED = 1
    WIDE = 2


class Element(IntEnum):
    """Operations on single numbers, as in `core.h`."""

    COPY = 0
    SUM = 1
    PRODUCT = 2
    SCALED = 3
    RELU = 4
    GELU = 5
    GELU_TANH = 6
    GATE = 7


class CoreMissingError(Exception):
    """The core cannot be used here; says why."""


def sources_hash() -> str:
    """Return a name for the contents of the sources; a library built from others is not used."""
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


_TYPES = {"p": _POINTER, "l": _LONG, "n": _LONG, "i": _INT, "t": _INT, "f": _FLOAT}


class Noted(NamedTuple):
    """A function whose calls can be noted, to be made later by `core_run`."""

    arguments: str
    """See `_typed`."""
    by_words: int
    """Address of the function that calls it with words of 64 bits."""


def _typed(function: Callable[..., int], arguments: str) -> Callable[..., int]:
    """Tell ctypes the types: p for an address, l and i for integers of 64 and 32 bits, f.

    n is an l that counts rows (of tokens, of sequences), t an i that counts threads.
    """
    function.argtypes = [_TYPES[letter] for letter in arguments]  # type: ignore[attr-defined]
    function.restype = None  # type: ignore[attr-defined]
    return function


def _noted(library: ctypes.CDLL, name: str, arguments: str) -> Noted:
    address = ctypes.cast(getattr(library, f"{name}_by_words"), _POINTER).value
    assert address is not None
    return Noted(arguments, address)


class Operations:
    """The functions for one type of numbers; see the C++ for their arguments."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        def function(operation: str, arguments: str) -> Callable[..., int]:
            return _typed(getattr(library, f"core_{operation}_{name}"), arguments)

        def noted(operation: str, arguments: str) -> Callable[..., int]:
            self.noted[operation] = _noted(library, f"core_{operation}_{name}", arguments)
            return function(operation, arguments)

        self.noted: dict[str, Noted] = {}
        self.pack = function("pack", "pllipi")
        self.pack_int8 = function("pack_int8", "pllippi")
        self.quantize_groups = function("quantize_groups", "plllipppi")
        self.linear = noted("linear", "plnpppllllpippit")
        self.rows = function("rows", "pllplpi")
        self.rows.restype = _INT  # type: ignore[attr-defined]
        self.rows_int8 = function("rows_int8", "ppllplpi")
        self.rows_int8.restype = _INT  # type: ignore[attr-defined]
        self.norm = noted("norm", "plppifnlpit")
        self.layer_norm = noted("layer_norm", "plppfnlpit")
        self.elements = noted("elements", "iplplfnlplit")
        self.mix_experts = noted("mix_experts", "plnpplplllpit")
        self.mix_experts.restype = _INT  # type: ignore[attr-defined]
        if name == "f32":
            self.choose_experts = noted("choose_experts", "pnpllllliiffppt")
        self.rotate = noted("rotate", "ppplnlllpplpplliplppifit")
        self.rotate.restype = _INT  # type: ignore[attr-defined]
        states = "pllllllplllpnp"
        self.convolve = noted("convolve", f"plpplli{states}pit")
        self.convolve.restype = _INT  # type: ignore[attr-defined]
        self.delta_rule = noted("delta_rule", f"plplplpppffllll{states}pit")
        self.delta_rule.restype = _INT  # type: ignore[attr-defined]
        self.mamba = noted("mamba", f"plplplpppllll{states}pit")
        self.mamba.restype = _INT  # type: ignore[attr-defined]
        self.attention = noted("attention", "plpplliplpnllllffppipit")


class Drawing:
    """The functions that draw tokens; see the C++ for their arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.scan = _typed(library.core_scan_logits, "plllppii")
        self.draw = _typed(library.core_draw_tokens, "pllplpppppii")
        self.top = _typed(library.core_top_tokens, "pllplppplpppii")


@dataclass(frozen=True)
class Core:
    """A loaded library and the instructions it may use."""

    library: ctypes.CDLL
    level: Level
    f32: Operations
    bf16: Operations
    drawing: Drawing
    gather: Noted
    """Copies chosen rows."""

    def packed_size(
        self, num_outputs: int, num_inputs: int, *, is_bf16: bool, is_gated: bool
    ) -> int:
        """Return how many numbers a weight has when it is packed."""
        return int(self.library.core_packed_size(num_outputs, num_inputs, is_bf16, is_gated))

    def packed_bytes(self, num_outputs: int, num_inputs: int, *, is_gated: bool) -> int:
        """Return how many bytes a packed weight of 8 bits has."""
        return int(self.library.core_packed_size_int8(num_outputs, num_inputs, is_gated))

    def packed_group_bytes(
        self, num_outputs: int, num_inputs: int, bits: int, *, is_gated: bool
    ) -> int:
        """Return how many bytes the integers of a weight in groups have."""
        return int(self.library.core_packed_size_groups(num_outputs, num_inputs, bits, is_gated))

    def pack_groups(
        self, integers: int, shape: tuple[int, int], bits: int, packed: int, num_threads: int
    ) -> None:
        """Pack integers of `shape`, a byte each, from one address to another."""
        self.library.core_pack_groups(integers, *shape, bits, packed, num_threads)

    def use_large_pages(self, address: int, num_bytes: int) -> None:
        """Ask the system for large pages under memory that is not written yet."""
        self.library.core_large_pages(address, num_bytes)


@functools.cache
def load_core() -> Core:
    """Return the core with the best instructions of this machine.

    Raises:
        CoreMissingError: it was not built, or not from these sources, or not for this processor.
    """
    if not LIBRARY.exists():
        raise CoreMissingError("it was not built when the package was installed (no C++ compiler)")
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise CoreMissingError(f"it cannot be loaded: {error}") from error
    library.core_sources.restype = ctypes.c_char_p
    if library.core_sources().decode() != sources_hash():
        raise CoreMissingError("it was built from other sources: install the package again")
    level = Level(library.core_level())
    if level is Level.NONE:
        raise CoreMissingError("this processor has no AVX2")
    library.core_packed_size.argtypes = [_LONG, _LONG, _INT, _INT]
    library.core_packed_size.restype = _LONG
    library.core_packed_size_int8.argtypes = [_LONG, _LONG, _INT]
    library.core_packed_size_int8.restype = _LONG
    library.core_packed_size_groups.argtypes = [_LONG, _LONG, _LONG, _INT]
    library.core_packed_size_groups.restype = _LONG
    _typed(library.core_pack_groups, "plllpi")
    library.core_large_pages.argtypes = [_POINTER, _LONG]
    f32, bf16 = Operations(library, "f32"), Operations(library, "bf16")
    library.core_run.argtypes = [_POINTER, _LONG, _POINTER, _POINTER, _LONG, _POINTER]
    library.core_run.restype = _LONG
    gather = _noted(library, "core_gather", "pnllpnp")
    return Core(library, level, f32, bf16, Drawing(library), gather)
