"""Rank 0's side of structured output: which tokens each constrained row may draw next.

Rows that think within a budget are constrained from where it may be used up to the answer.

A process of its own does it beside the forward pass. It compiles from when a sequence is added,
which is during its prefill, and computes a step's masks while its forward pass runs. No step waits
for a grammar: a row whose own is not ready yields no token, and the router asks again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import subprocess
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightserve.grammar_process import HEADER, environment
from lightserve.messages.common import Constraint, Thinking, pack_int32, unpack_int32
from lightserve.messages.router_worker import AddSequence
from lightserve.types import RowId
from lightserve.worker.matchers import (
    AT_WORK,
    NOTHING,
    Ask,
    Begun,
    Drawn,
    Masks,
    Request,
    Setup,
    Update,
    Wait,
    digest_of,
)
from lightserve.worker.sampling.interface import RowMasks
from lightserve.worker.sampling.table import Upload

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "lightserve.worker.matchers")
START_TIMEOUT_S = 60.0
"""For the first answer of a process, which reads the vocabulary before it."""
ANSWER_TIMEOUT_S = 20.0
"""For each other."""
MAX_GUILTY = 256
MAX_REPAIRS = 3
"""Processes that may end in one step before all of its constrained rows fail."""


Lengths = Callable[[], Mapping[RowId, int]]
TokensOf = Callable[[RowId, int, int], list[int]]


@dataclass(frozen=True, eq=False)
class StepMasks:
    """The tokens that the constrained rows of a step may draw."""

    indices: list[int]
    """Among the step's sampled rows."""
    bits: npt.NDArray[np.uint8]
    """[len(indices), bytes], bit t % 8 of byte t // 8: whether token t is allowed; a multiple of
    four bytes."""
    allowed: Tensor | None
    """bool [len(indices), vocab], the same; where the CPU samples."""
    failed: frozenset[int]
    """`indices` of rows whose grammar failed; they may draw nothing."""
    unready: frozenset[int]
    """`indices` of rows whose grammar is not compiled yet; their tokens mean nothing."""
    forced: tuple[tuple[int, int], ...] = ()
    """`indices` of rows that draw one token, whatever their options say; and that token."""

    def upload(self, num_rows: int, upload: Upload) -> RowMasks:
        """Return them beside the logits of the `num_rows` rows that the step samples."""
        rows = np.full(num_rows, -1, dtype=np.int32)
        rows[self.indices] = np.arange(len(self.indices))
        arrays = [rows, self.bits.view(np.int32)]
        if self.forced:
            arrays += list(np.array(self.forced, dtype=np.int64).T.copy())
        row_bits, bits, *forced = upload(arrays)
        return RowMasks(row_bits, bits, self.indices, self.allowed, *forced)


class RowConstraints:
    """Asks a process which tokens all constrained rows may draw, see `matchers`.

    Where that process ends, rows under the constraint that it ended with fail, and all other rows
    go on with a new one.
    """

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        *,
        shown: tuple[str, ...] = (),
        unpack: bool = True,
    ) -> None:
        """Start the process, which takes a second to read a vocabulary of 150,000 tokens.

        `shown`: see `Tokenizer`; `unpack`: the CPU samples, which wants a byte for each token.
        """
        self._setup = Setup(str(model_dir), shown, vocab_size)
        self._unpack = unpack
        self._rows: dict[RowId, _Row] = {}
        self._guilty: OrderedDict[bytes, None] = OrderedDict()
        """Digests of constraints that have ended a process; rows under them fail."""
        self._num_asked = 0
        self._at_work = os.memfd_create("constraints")
        self._process, self._link = self._start()

    def close(self) -> None:
        """End the process."""
        self._end()
        if self._at_work >= 0:
            os.close(self._at_work)
            self._at_work = -1

    def __del__(self) -> None:
        """End the process with a worker that does not end with its own."""
        self.close()

    def update(self, left_rows: Sequence[RowId], sequences: Sequence[AddSequence]) -> None:
        """Forget rows that have left, whose grammars are compiled no more, then take in new
        sequences.

        Output that these bring was drawn under the same constraint.
        """
        gone = [row for row in left_rows if self._rows.pop(row, None) is not None]
        begun = []
        for sequence in sequences:
            if self._rows.pop(sequence.row, None) is not None:
                gone.append(sequence.row)
            if sequence.constraint is not None or sequence.thinking is not None:
                tokens = np.concatenate(
                    [unpack_int32(part.token_ids) for part in sequence.segments]
                )
                output = array("i", tokens[sequence.num_prompt_tokens :].tolist())
                row = self._rows[sequence.row] = _Row(
                    sequence.constraint,
                    output,
                    sequence.is_real_time,
                    sequence.thinking,
                    num_prompt_tokens=sequence.num_prompt_tokens,
                    is_told=sequence.constraint is not None,
                )
                if row.is_told and row.digest not in self._guilty:
                    begun.append(row.begun(sequence.row))
        if gone or begun:
            self._send(Update(gone, begun))

    def among(self, rows: Sequence[RowId], lengths: Lengths) -> frozenset[RowId]:
        """Return the rows of `rows` that are constrained, or will be in the next step.

        `lengths`: of each row's known tokens, before the one that it samples.
        """
        known = self._rows.keys() & rows
        if not known:
            return frozenset()
        sizes = lengths()
        return frozenset(row for row in known if self._rows[row].needs_masks(sizes[row] + 1))

    def begin(
        self, rows: Sequence[RowId], lengths: Lengths, tokens: TokensOf
    ) -> Callable[[], StepMasks] | None:
        """Start on the masks of a step that samples these rows, and return how to wait for them.

        None: none of the rows is constrained.

        Args:
            rows: that the step samples.
            lengths: as `among` has them.
            tokens: returns what a row has from one position to another.
        """
        if self._rows.keys().isdisjoint(rows):
            return None
        sizes, known = lengths(), self._rows
        indices = [
            index
            for index, row in enumerate(rows)
            if row in known and known[row].needs_masks(sizes[row])
        ]
        if not indices:
            return None
        asked = [rows[index] for index in indices]
        begun = []
        for row in (row for row in asked if not known[row].is_told):
            start = known[row].num_prompt_tokens
            known[row].output = array("i", tokens(row, start, sizes[row]))
            known[row].is_told = True
            begun.append(known[row].begun(row))
        if begun:
            self._send(Update([], begun))
        live = self._live(asked)
        self._ask(live)
        return lambda: self._step_masks(indices, asked, live)

    def advance(
        self,
        rows: Sequence[RowId],
        token_ids: Sequence[int],
        unready: frozenset[int],
        among: frozenset[RowId],
    ) -> None:
        """Take in the tokens of a step's rows that are `among` the constrained ones.

        `unready` as the step's masks had it.
        """
        drawn = [
            (row, token_id)
            for index, (row, token_id) in enumerate(zip(rows, token_ids, strict=True))
            if index not in unready and row in among and self._live([row])
        ]
        for row, token_id in drawn:
            self._rows[row].output.append(token_id)
        if drawn:
            self._send(Drawn([row for row, _ in drawn], [token_id for _, token_id in drawn]))

    def wait_for_any(self, rows: Sequence[RowId]) -> None:
        """Wait a moment for the grammar of one of these rows, if they have not been left."""
        self._num_asked += 1
        self._send(Wait(self._num_asked, self._live(rows)))
        self._receive()

    def _live(self, rows: Sequence[RowId]) -> list[RowId]:
        """Return the rows of `rows` that the process knows."""
        known, guilty = self._rows, self._guilty
        return [
            row
            for row in rows
            if row in known and known[row].is_told and known[row].digest not in guilty
        ]

    def _ask(self, rows: Sequence[RowId], *, is_repair: bool = False) -> None:
        self._num_asked += 1
        self._send(Ask(self._num_asked, rows, is_repair))

    def _step_masks(
        self, indices: list[int], asked: Sequence[RowId], live: Sequence[RowId]
    ) -> StepMasks:
        masks = self._receive()
        for _ in range(MAX_REPAIRS):
            if masks is not None:
                break
            live = self._live(asked)
            self._ask(live, is_repair=True)
            masks = self._receive()
        if masks is None:
            masks, live = Masks(), []
        num_bytes = -(-self._setup.vocab_size // 32) * 4
        place_of = {row: place for place, row in enumerate(live)}
        bits = np.zeros((len(asked), num_bytes), dtype=np.uint8)
        failed, unready = set[int](), set[int]()
        forced, forced_of = list[tuple[int, int]](), dict(masks.forced)
        found = np.frombuffer(masks.bits, dtype=np.uint8).reshape(-1, num_bytes)
        for number, (index, row) in enumerate(zip(indices, asked, strict=True)):
            place = place_of.get(row)
            if place is None or place in masks.failed:
                failed.add(index)
                continue
            bits[number] = found[place]
            if place in masks.unready:
                unready.add(index)
            if place in masks.free:
                self._rows[row].is_free = True
            if place in forced_of:
                forced.append((index, forced_of[place]))
        allowed = None
        if self._unpack:
            vocab_size = self._setup.vocab_size
            unpacked = np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little")
            allowed = torch.from_numpy(unpacked.view(np.bool_))
        sets = frozenset(failed), frozenset(unready)
        return StepMasks(indices, bits, allowed, *sets, tuple(forced))

    # ------------------------------------------------------------------ the process

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        os.pwrite(self._at_work, AT_WORK.pack(NOTHING, NOTHING), 0)
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [*COMMAND, str(self._at_work)],
                stdin=theirs.fileno(),
                pass_fds=[self._at_work],
                env=environment(),
            )
        ours.settimeout(START_TIMEOUT_S)
        data = msgspec.msgpack.encode(self._setup)
        ours.sendall(HEADER.pack(len(data)) + data)
        return process, ours

    def _send(self, request: Request) -> None:
        """Send a request; one that is not taken is known from the missing answer."""
        data = msgspec.msgpack.encode(request)
        with contextlib.suppress(OSError):
            self._link.sendall(HEADER.pack(len(data)) + data)

    def _receive(self) -> Masks | None:
        """Return the answer to a request; None: the process has ended, and there is a new one."""
        try:
            return self._answer()
        except TimeoutError:
            self._replace(is_late=True)
        except _BROKEN:
            self._replace(is_late=False)
        return None

    def _answer(self) -> Masks:
        while True:
            (length,) = HEADER.unpack(self._read(HEADER.size))
            masks = _MASKS.decode(self._read(length))
            self._link.settimeout(ANSWER_TIMEOUT_S)
            if masks.number == self._num_asked:
                return masks  # an older one was asked for in a step that broke down

    def _read(self, length: int) -> bytes:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            num_read = self._link.recv_into(view)
            if not num_read:
                raise EOFError
            view = view[num_read:]
        return bytes(data)

    def _end(self) -> int:
        """End the process; return its exit code."""
        self._link.close()
        self._process.kill()
        return self._process.wait()

    def _replace(self, *, is_late: bool) -> None:
        """Start the process anew; rows under the constraint that is to blame fail.

        `is_late`: it has not ended by itself, and does not answer.
        """
        code = self._end()
        compiled, masked = AT_WORK.unpack(os.pread(self._at_work, AT_WORK.size, 0))
        blamed = {compiled, masked} - {NOTHING}
        if is_late and masked != NOTHING:
            blamed = {masked}  # the thread that answers is at that one
        elif len(blamed) > 1:
            taken = {digest: self._bytes_alone(digest) for digest in blamed}
            blamed = {digest for digest in blamed if taken[digest] == max(taken.values())}
        log.error("the process of constraints ended with code %d; %d blamed", code, len(blamed))
        self._process, self._link = self._start()
        self._guilty.update(dict.fromkeys(blamed))
        while len(self._guilty) > MAX_GUILTY:
            self._guilty.popitem(last=False)
        live = self._live(list(self._rows))
        self._send(Update([], [self._rows[row].begun(row) for row in live]))

    def _bytes_alone(self, digest: bytes) -> float:
        """Return the most memory that a process takes which has one constraint alone.

        Infinite: the process ends, or has no mask in time. A constraint whose rows have all left
        cannot be tried: it comes before the infinite ones, and after all others.
        """
        row = next((row for row, one in self._rows.items() if one.digest == digest), None)
        if row is None:
            return sys.float_info.max
        self._process, self._link = self._start()
        self._send(Update([], [self._rows[row].begun(row)]))
        self._ask([row], is_repair=True)
        try:
            return math.inf if self._answer().unready else _peak_bytes(self._process.pid)
        except _BROKEN:
            return math.inf
        finally:
            self._end()


def _peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


_BROKEN = (OSError, EOFError, msgspec.MsgspecError)
"""Raised where a process ends while it is read from."""
_MASKS = msgspec.msgpack.Decoder(Masks)


@dataclass
class _Row:
    """The state of a constrained row."""

    constraint: Constraint | None
    output: array[int]
    """Its tokens so far, if the process is told of them."""
    is_real_time: bool
    thinking: Thinking | None
    num_prompt_tokens: int
    is_told: bool
    """Whether the process knows it: of one without a constraint not before its budget."""
    is_free: bool = False
    """Whether it may draw anything from now on."""

    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.digest = NOTHING if self.constraint is None else digest_of(self.constraint)

    def needs_masks(self, length: int) -> bool:
        """Whether it may not draw anything as its next token behind so many."""
        if self.thinking is None or self.constraint is not None:
            return True
        return not self.is_free and length - self.num_prompt_tokens >= self.thinking.budget

    def begun(self, row: RowId) -> Begun:
        """Return how the process is told of it."""
        output = pack_int32(self.output)
        return Begun(row, self.constraint, output, self.is_real_time, self.thinking)
