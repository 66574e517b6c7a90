"""A process that compiles constraints for a frontend: `python -m lightserve.grammar_process`.

Compiling is bounded by counts of work (see `structured`), but they do not see all of it: a number
in a schema can stand for gigabytes. Here the kernel bounds what one constraint may take. A process
that goes beyond is gone, and with it no more than that constraint.

Standard input is a socket. It brings constraints and takes a verdict for each, in order: four bytes
of length, then msgpack. The process ends with its input.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, NoReturn

import msgspec
from llguidance import LLTokenizer

from lightserve.errors import GrammarError
from lightserve.messages.common import Constraint, GrammarConstraint
from lightserve.structured import (
    MAX_COMPILED_BYTES,
    MiB,
    byte_vocabulary,
    compile_matcher,
    in_lark,
    yield_to_others,
)

COMMAND = (sys.executable, "-P", "-m", "lightserve.grammar_process")
MAX_WORK_BYTES = 256 * MiB
"""Memory for compiling one constraint, beside the memory of the process at its start."""
MAX_CPU_S = 1
"""Processor time of one constraint; the kernel counts whole seconds: it may be one more."""
OUT_OF_MEMORY = 3
"""Exit code where Python noticed it; where llguidance did, a signal ends the process."""
_PR_SET_NAME = 15
HEADER = struct.Struct(">I")
_WORN_BYTES = MAX_WORK_BYTES // 4
"""A process that did not get rid of so much makes room for a new one."""
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR", "XDG_CACHE_HOME")


class Verdict(msgspec.Struct, frozen=True):
    """Result of checking a constraint."""

    complaint: str = ""
    """The fault; empty: there is none."""
    translated: Constraint | None = None
    """A grammar of another notation in Lark's."""


ENCODER = msgspec.msgpack.Encoder()


def environment() -> dict[str, str]:
    """Return the environment of the process: without the secrets that others may have."""
    own = {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT_VARIABLES or name.startswith(("PYTHON", "LC_"))
    }
    return kept | own


def complaint_of_death(exit_code: int) -> str | None:
    """Return what an end of the process says of the constraint that it was at; None: nothing."""
    names: Mapping[int, str] = {
        OUT_OF_MEMORY: f"it takes more than {MAX_WORK_BYTES // MiB} MiB of memory to compile",
        -signal.SIGABRT: f"it takes more than {MAX_WORK_BYTES // MiB} MiB of memory to compile",
        -signal.SIGSEGV: "it is nested too deeply",  # the stack is full
        -signal.SIGXCPU: f"it takes more than {MAX_CPU_S} s of a processor to compile",
    }
    return names.get(exit_code)


_LIBC = ctypes.CDLL(None)


def _counter(name: str, number: type[ctypes.c_size_t | ctypes.c_uint]) -> Callable[[], int]:
    """Return what asks the C library's function `name`, whose figures are of type `number`."""

    class Facts(ctypes.Structure):
        """`struct mallinfo` or `struct mallinfo2`."""

        _fields_ = tuple(
            (field, number)
            for field in (
                *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
                *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
            )
        )

    function = getattr(_LIBC, name)
    function.restype = Facts

    def count() -> int:
        facts = function()
        return int(facts.uordblks + facts.hblkhd)

    return count


# Before version 2.33 the C library counts up to 4 GiB: enough, where a process may have 3.
used_bytes = (
    _counter("mallinfo2", ctypes.c_size_t)
    if hasattr(_LIBC, "mallinfo2")
    else _counter("mallinfo", ctypes.c_uint)
)
"""Returns how much of this process's memory is in use, as its allocator counts."""


def main() -> NoReturn:
    """Compile what comes until no more does, or until the process is worn out."""
    begin_process("grammars-check")
    vocabulary = byte_vocabulary()
    compile_matcher(GrammarConstraint(grammar='start: "a"'), vocabulary)  # what all need is there
    yield_to_others()
    source, sink = os.fdopen(0, "rb"), os.fdopen(os.dup(0), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # llguidance writes there what ends it
    at_start = address_space()
    limit_memory(at_start + MAX_WORK_BYTES)
    decoder = msgspec.msgpack.Decoder(Constraint)
    try:
        while (data := read_frame(source)) is not None:
            limit_cpu()
            verdict = _judge(decoder.decode(data), vocabulary)
            write_frame(sink, ENCODER.encode(verdict))
            trim()
            if address_space() - at_start > _WORN_BYTES:
                break
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    os._exit(0)


def limit_memory(num_bytes: int) -> None:
    """Have more memory than so many bytes refused."""
    _lower(resource.RLIMIT_AS, num_bytes)


def limit_cpu(seconds: int = MAX_CPU_S) -> None:
    """Give the process so many more seconds of a processor from now on."""
    _lower(resource.RLIMIT_CPU, math.ceil(time.process_time()) + seconds)


def _lower(limit: int, value: int) -> None:
    """Set a limit, which may have been lower before."""
    _, most = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def _judge(constraint: Constraint, vocabulary: LLTokenizer) -> Verdict:
    try:
        asked = in_lark(constraint)
        before = used_bytes()
        matcher = compile_matcher(asked, vocabulary)
        num_bytes = used_bytes() - before
    except GrammarError as error:
        return Verdict(complaint=str(error))
    if num_bytes > MAX_COMPILED_BYTES:
        return Verdict(
            complaint=f"compiled, it must take at most {MAX_COMPILED_BYTES // MiB} MiB of memory,"
            f" got {math.ceil(num_bytes / MiB)}"
        )
    del matcher
    return Verdict(translated=None if asked is constraint else asked)


def read_frame(source: BinaryIO) -> bytes | None:
    """Return the next message; None: there are no more, or no whole one."""
    head = source.read(HEADER.size)
    if len(head) < HEADER.size:
        return None
    (length,) = HEADER.unpack(head)
    data = source.read(length)
    return data if len(data) == length else None


def write_frame(sink: BinaryIO, data: bytes) -> None:
    """Send a message."""
    sink.write(HEADER.pack(len(data)) + data)
    sink.flush()


def begin_process(name: str) -> None:
    """Take a name for `ps`, and leave signals to the supervisor, for which they are meant."""
    _LIBC.prctl(_PR_SET_NAME, name.encode())
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)


def trim() -> None:
    """Give memory that is free back to the system."""
    _LIBC.malloc_trim(0)


def address_space() -> int:
    """Return the size of this process's memory, in use or not, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
