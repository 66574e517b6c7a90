"""The native core with its AMX tiles in plain C++: built by a test, for machines without them."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from lightserve.kernels.cpu import core
from lightserve.kernels.cpu.core import Core, Level, load_core

HEADER = Path(__file__).with_suffix(".h")
OPTIONS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wno-psabi")


def build(directory: Path) -> Path:
    """Compile the core into `directory`: what multiplies tiles well, the rest fast."""

    def run(*arguments: str) -> None:
        subprocess.run(["c++", *OPTIONS, *arguments], check=True, timeout=600)

    def compiled(source: Path) -> str:
        made = str(directory / f"{source.stem}.o")
        has_tiles = "_tile_" in source.read_text()
        own = ("-O1", "-include", str(HEADER)) if has_tiles else ("-O0",)
        run(f'-DSOURCES="{core.sources_hash()}"', *own, "-c", str(source), "-o", made)
        return made

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(compiled, sorted(core.SOURCES.glob("*.cpp"))))
    library = directory / "libcore.so"
    run("-shared", *parts, "-o", str(library))
    return library


@functools.cache
def software_core() -> Core | None:
    """Return it, or none where there is no compiler, or no AVX512-bf16 for all but tiles."""
    if shutil.which("c++") is None or load_core().level < Level.AVX512_BF16:
        return None
    with (
        TemporaryDirectory() as directory,
        mock.patch.object(core, "LIBRARY", build(Path(directory))),
    ):
        loaded = load_core.__wrapped__()  # not the one that is kept
    loaded.library.tiles_fault.restype = ctypes.c_char_p
    loaded.library.tiles_products.restype = ctypes.c_int64
    return dataclasses.replace(loaded, level=Level.AMX)


def check_tiles() -> None:
    """Find what a processor would have refused since the last time."""
    own = software_core() if software_core.cache_info().currsize else None
    fault = own.library.tiles_fault() if own else None
    assert fault is None, fault.decode()
