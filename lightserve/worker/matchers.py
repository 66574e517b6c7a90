"""Which tokens each constrained row may draw next: `python -m lightserve.worker.matchers FD`.

A constraint is of the answer: before it a row may think, within a budget that a row without a
constraint may have, too.

A process of rank 0, so that the memory of grammars is measured, bounded by the kernel, and no part
of the worker: the bytes that its allocator has in use are the grammars'. Compiling is one thread's,
at low priority and one grammar after the other; the main one computes masks. llguidance lets other
threads run. Standard input is a socket: it brings `Request`s and takes a reply for each `Ask` and
`Wait`, in order, each four bytes of length, then msgpack. The process ends with its input.

FD is a file in memory, `AT_WORK`: digests of the constraints at which the two threads are. It is
still there when they are not.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from struct import Struct
from typing import BinaryIO, NamedTuple, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from lightserve.errors import GrammarError
from lightserve.grammar_process import (
    address_space,
    begin_process,
    limit_memory,
    read_frame,
    trim,
    used_bytes,
    write_frame,
)
from lightserve.messages.common import Constraint, Thinking, unpack_int32
from lightserve.structured import (
    MAX_COMPILED_BYTES,
    MiB,
    compile_matcher,
    model_vocabulary,
    yield_to_others,
)
from lightserve.tokenization.thought import Phase, Thought
from lightserve.tokenization.tokenizer import Tokenizer

MAX_KEPT_BYTES = 256 * MiB
"""Most bytes of all grammars while some are kept for sequences to come."""
MAX_USED_BYTES = 1024 * MiB
"""Most bytes of all grammars while more rows get theirs. Grammars at work still grow by the tokens
that they have seen."""
MAX_GROWN_BYTES = 2 * MAX_USED_BYTES
"""Most bytes of all grammars: beyond it the grammar fails that has grown most."""
BEST_EFFORT_SHARE = 0.75
"""Share of `MAX_USED_BYTES` that best-effort rows may fill: they may go on for minutes."""
MAX_BYTES = 3 * MAX_USED_BYTES
"""Bytes beside its memory at the start at which the kernel ends the process."""
MAX_COMPILE_S = 10.0
"""Processor seconds for a grammar that took a frontend's process a second at most."""
PATIENCE_S = 0.02
"""Longest wait of a step that has nothing to do but ask for tokens whose grammars are not ready."""
REPAIR_S = 10.0
"""Longest wait of a step for grammars that were ready before the process that had them ended."""
AT_WORK = Struct("<16s16s")
"""The constraint that is compiled, and the one under which a row draws."""
NOTHING = bytes(16)
"""The digest of no constraint."""


def digest_of(constraint: Constraint) -> bytes:
    """Return 16 bytes that tell a constraint from others, in every process."""
    return hashlib.blake2b(msgspec.msgpack.encode(constraint), digest_size=16).digest()


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message: the model's vocabulary."""

    model_dir: str
    shown: tuple[str, ...]
    """See `Tokenizer`."""
    vocab_size: int


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """A row that is under a constraint from now on."""

    row: int
    constraint: Constraint | None
    token_ids: bytes
    """int32, see `pack_int32`: output so far, which was drawn under the same constraint."""
    is_real_time: bool
    thinking: Thinking | None = None
    """None: the output is the answer from its beginning on, and has a constraint."""


class Update(msgspec.Struct, frozen=True, tag=True):
    """Rows that were left, whose grammars are compiled no more, then those that begin."""

    left: Sequence[int]
    begun: Sequence[Begun]


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A question for the tokens that rows may draw; `is_repair`: waits for every grammar that can
    be ready."""

    number: int
    """Number of the question, which its reply repeats."""
    rows: Sequence[int]
    is_repair: bool = False


class Drawn(msgspec.Struct, frozen=True, tag=True):
    """The tokens that rows have drawn."""

    rows: Sequence[int]
    token_ids: Sequence[int]


class Wait(msgspec.Struct, frozen=True, tag=True):
    """Answer in a moment, or as soon as the grammar of one of these rows is ready."""

    number: int
    rows: Sequence[int]


Request = Setup | Update | Ask | Drawn | Wait


class Masks(msgspec.Struct, frozen=True, array_like=True):
    """The reply to `Ask`; `Wait` has an empty one."""

    number: int = 0
    bits: bytes = b""
    """uint8 [rows, bytes], bit t % 8 of byte t // 8: whether token t is allowed; a multiple of four
    bytes for each."""
    failed: tuple[int, ...] = ()
    """Indices of rows whose grammar failed; they may draw nothing."""
    unready: tuple[int, ...] = ()
    """Indices of rows whose grammar is not compiled yet; their tokens mean nothing."""
    forced: tuple[tuple[int, int], ...] = ()
    """Indices of rows that draw one token, whatever their options say; and that token."""
    free: tuple[int, ...] = ()
    """Indices of rows that may draw anything from now on."""


_Matcher = Future[LLMatcher | None]
"""A row's; None: the grammar failed."""


def _matcher_of(work: _Matcher) -> LLMatcher | None:
    """Return the result of a finished compilation; one that broke down has failed as well."""
    return None if work.exception() is not None else work.result()


class _Row(NamedTuple):
    constraint: Constraint | None
    digest: bytes
    matcher: _Matcher
    """Never done while it waits for its turn; that of no constraint has no result that counts."""
    thought: Thought | None = None
    """The compiler's until `matcher` is done."""

    @property
    def is_free(self) -> bool:
        """Whether it may draw anything from now on."""
        return self.constraint is None and self.thought is not None and self.thought.is_over


_NO_ROW = _Row(None, NOTHING, Future())
"""One that is not known, or has failed."""
_NO_ROW.matcher.set_result(None)


def _own_clock() -> int:
    """Return the clock of the calling thread's CPU time."""
    return time.pthread_getcpuclockid(threading.get_ident())


def _is_best_effort(waiting: tuple[int, Begun]) -> bool:
    return not waiting[1].is_real_time


class RowMatchers:
    """The matchers of all constrained rows.

    Rows under the same constraint share the compiled grammar. Those whose constraint would be too
    much beside the others' wait until enough rows have left: real-time ones first, those of a class
    in the order in which they came.
    """

    def __init__(
        self,
        vocabulary: LLTokenizer,
        *,
        used: Callable[[], int] = used_bytes,
        note: Callable[[bytes, bytes], None] = lambda compiled, masked: None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """`used`: the memory that grammars take, in bytes, beside everything else.

        `note` is told the digests of the constraints of both threads' work, or `NOTHING`.
        `tokenizer`: for rows that think.
        """
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._spilling: dict[bytes, list[int]] = {}
        """By the rest of an ending: tokens that go on behind it."""
        self._used_before = used()
        self._used_bytes = used
        self._note = note
        self._compiler = ThreadPoolExecutor(
            1, thread_name_prefix="grammars", initializer=yield_to_others
        )
        self._rows: dict[int, _Row] = {}
        """Rows with a constraint. A matcher belongs to the compiler until it is done."""
        self._waiting: dict[int, Begun] = {}
        """Constrained rows whose turn has yet to come."""
        self._used: Counter[Constraint] = Counter()
        """Number of the other rows under each constraint."""
        self._pending: set[Constraint] = set()
        """Constraints that have yet to be compiled."""
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        """The compiler's."""
        self._grown: Counter[Constraint] = Counter()
        """By how many bytes each has grown since there is much of all, see `masks`."""
        self._compiling = NOTHING
        """The digest of the constraint that is, …"""
        self._compiling_since_s = 0.0
        """… and since when, …"""
        self._compiler_clock = self._compiler.submit(_own_clock).result()
        """… in the CPU time of its thread."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all grammars."""
        return self._used_bytes() - self._used_before

    def check_time(self) -> None:
        """End the process if a compilation takes too long: a thread cannot be ended."""
        now_s = time.clock_gettime(self._compiler_clock)
        if self._compiling != NOTHING and now_s - self._compiling_since_s > MAX_COMPILE_S:
            os._exit(1)

    def update(self, left: Sequence[int], begun: Sequence[Begun]) -> None:
        """Forget rows that have left, whose grammars are compiled no more, then take in new
        rows."""
        for row in (*left, *(one.row for one in begun)):
            if (before := self._rows.pop(row, None)) is not None:
                before.matcher.cancel()
                if self._waiting.pop(row, None) is None and before.constraint is not None:
                    self._release(before.constraint)
        for one in begun:
            thought = self._thought_of(one)
            digest = NOTHING if one.constraint is None else digest_of(one.constraint)
            self._rows[one.row] = _Row(one.constraint, digest, Future(), thought)
            if one.constraint is not None:
                self._waiting[one.row] = one
            elif thought is not None:
                for token_id in unpack_int32(one.token_ids).tolist():
                    self._consume(None, thought, token_id)
                self._rows[one.row].matcher.set_result(None)
        self._begin_waiting()

    def _thought_of(self, begun: Begun) -> Thought | None:
        if begun.thinking is None or self._tokenizer is None:
            return None
        is_strict = begun.constraint is not None
        return Thought(begun.thinking, self._tokenizer.bytes_of, is_strict=is_strict)

    def _begin_waiting(self) -> None:
        """Have the grammars of as many rows compiled as there is room for."""
        for row, one in sorted(self._waiting.items(), key=_is_best_effort):
            constraint, thought = one.constraint, self._rows[row].thought
            assert constraint is not None
            if not self._reserve(constraint, is_real_time=one.is_real_time):
                break
            del self._waiting[row]
            digest = self._rows[row].digest
            work = self._compiler.submit(self._matcher, one, constraint, digest, thought)
            self._rows[row] = _Row(constraint, digest, work, thought)

    def _reserve(self, constraint: Constraint, *, is_real_time: bool) -> bool:
        """Count a row under `constraint`, unless that is too much."""
        if constraint not in self._used:
            more = MAX_COMPILED_BYTES * (len(self._pending) + 1)
            most = MAX_USED_BYTES if is_real_time else BEST_EFFORT_SHARE * MAX_USED_BYTES
            if self._used and self.num_bytes + more > most:
                return False
            self._pending.add(constraint)
        self._used[constraint] += 1
        return True

    def _release(self, constraint: Constraint) -> None:
        self._used[constraint] -= 1
        if not self._used[constraint]:
            del self._used[constraint]
            self._pending.discard(constraint)
            self._grown.pop(constraint, None)
            self._compiler.submit(self._make_room)

    def masks(self, rows: Sequence[int], *, number: int = 0, is_repair: bool = False) -> Masks:
        """Return the tokens that rows may draw; `number` and `is_repair` as `Ask` has them."""
        self._begin_waiting()  # what was compiled since may take less than was kept for it
        if is_repair:
            begun = self._rows.keys() & set(rows) - self._waiting.keys()
            wait([self._rows[row].matcher for row in begun], REPAIR_S)
        vocab_size = self._vocabulary.vocab_size
        bits = np.zeros((len(rows), -(-vocab_size // 32) * 4), dtype=np.uint8)
        failed, unready, free = list[int](), list[int](), list[int]()
        forced: list[tuple[int, int]] = []
        is_much = self.num_bytes > MAX_USED_BYTES
        for index, row in enumerate(rows):
            known = self._rows.get(row, _NO_ROW)
            constraint, digest, work, thought = known
            if not work.done():
                unready.append(index)
                bits[index] = 255
                continue
            if thought is not None and (token_id := thought.forced()) is not None:
                forced.append((index, token_id))
                bits[index] = 255
                continue
            if known.is_free:
                free.append(index)
            before = self.num_bytes if is_much else 0
            self._note(self._compiling, digest)
            if not self._draw_of(known, bits[index]):
                failed.append(index)
            if is_much and constraint is not None:
                self._grown[constraint] += self.num_bytes - before
        self._note(self._compiling, NOTHING)
        if is_much and self.num_bytes > MAX_GROWN_BYTES and self._grown:
            self._fail(max(self._grown, key=self._grown.__getitem__))
        found = tuple(failed), tuple(unready), tuple(forced), tuple(free)
        return Masks(number, bits.tobytes(), *found)

    def _fail(self, constraint: Constraint) -> None:
        """Give up the compiled part of a constraint, and all rows under it."""
        del self._grown[constraint]
        for row, one in self._rows.items():
            if one.constraint == constraint and row not in self._waiting:
                self._rows[row] = one._replace(matcher=_NO_ROW.matcher)
        self._compiler.submit(self._forget, constraint)

    def _draw_of(self, row: _Row, bits: npt.NDArray[np.uint8]) -> bool:
        """Do as `_draw` for a row that may think, and draws what it likes."""
        matcher, thought = _matcher_of(row.matcher), row.thought
        if row.constraint is None and thought is not None:
            bits[:] = 255
            return True
        if thought is None or thought.is_over or matcher is None:
            return self._draw(bits, matcher)
        if thought.phase is Phase.OPENING:
            if not self._draw(bits, matcher):
                return False
            _set_bit(bits, thought.opening_token_id, value=True)
            return True
        bits[:] = 255
        # There is an answer to come, which begins with a token of its own.
        for token_id in (*self._vocabulary.eos_tokens, *self._spilling_at(thought)):
            _set_bit(bits, token_id, value=False)
        return True

    def _spilling_at(self, thought: Thought) -> Iterator[int]:
        """Yield tokens that would end the reasoning and go on."""
        tail = thought.tail
        for ending in thought.endings:
            for rest in (ending[n:] for n in range(len(ending)) if tail.endswith(ending[:n])):
                if rest not in self._spilling:
                    assert self._tokenizer is not None
                    tokens = map(self._tokenizer.bytes_of, range(self._vocabulary.vocab_size))
                    begun = [(n, data) for n, data in enumerate(tokens) if data.startswith(rest)]
                    self._spilling[rest] = [n for n, data in begun if len(data) > len(rest)]
                yield from self._spilling[rest]

    def _draw(self, bits: npt.NDArray[np.uint8], matcher: LLMatcher | None) -> bool:
        """Set the bits of tokens that may be drawn; return whether the grammar still holds."""
        mask = b"" if matcher is None else matcher.compute_bitmask()
        if matcher is None or matcher.is_error():
            return False
        if any(mask):
            # There may be a word more than the vocabulary needs.
            bits[:] = np.frombuffer(mask, dtype=np.uint8)[: len(bits)]
        else:
            bits[:] = 255  # it has ended: what an overlapping step draws is discarded
        return True

    def advance(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """Take in the tokens that rows drew."""
        for row, token_id in zip(rows, token_ids, strict=True):
            known = self._rows.get(row, _NO_ROW)
            # What is not compiled in this process has failed in the one before: no wait for it.
            if known.matcher.done():
                self._note(self._compiling, known.digest)
                self._consume(_matcher_of(known.matcher), known.thought, token_id)
        self._note(self._compiling, NOTHING)

    def _consume(self, matcher: LLMatcher | None, thought: Thought | None, token_id: int) -> None:
        """Take in a token; if it does not fit, the next mask says so."""
        if thought is not None and matcher is not None and _skips(thought, matcher, token_id):
            thought.skip()
        if thought is not None and not thought.is_over:
            thought.consume(token_id)
        elif matcher is not None:
            matcher.consume_token(token_id)

    def wait_for_any(self, rows: Sequence[int]) -> None:
        """Wait a moment for the grammar of one of these rows, if they have not been left."""
        compiling = [self._rows[row].matcher for row in rows if row in self._rows]
        wait(compiling, PATIENCE_S, FIRST_COMPLETED)

    # ------------------------------------------------------------------ in the compiler's thread

    def _matcher(
        self, begun: Begun, constraint: Constraint, digest: bytes, thought: Thought | None
    ) -> LLMatcher | None:
        self._compiling_since_s = time.thread_time()
        self._compiling = digest
        self._note(digest, NOTHING)
        try:
            matcher = self._compile(constraint).deep_copy()
            for token_id in unpack_int32(begun.token_ids).tolist():
                self._consume(matcher, thought, token_id)
        except GrammarError:
            return None
        finally:
            self._pending.discard(constraint)
            self._compiling = NOTHING
            self._note(NOTHING, NOTHING)
        return matcher

    def _compile(self, constraint: Constraint) -> LLMatcher:
        known = self._compiled.get(constraint)
        if known is None:
            known = compile_matcher(constraint, self._vocabulary)
            self._compiled[constraint] = known
            self._make_room()
        else:
            self._compiled.move_to_end(constraint)
        return known

    def _forget(self, constraint: Constraint) -> None:
        self._compiled.pop(constraint, None)
        trim()

    def _make_room(self) -> None:
        """Forget constraints that no row is under, as far as all take too much; rows share compiled
        ones."""
        num_bytes = self.num_bytes
        for oldest in [one for one in self._compiled if one not in self._used]:
            if num_bytes <= MAX_KEPT_BYTES:
                break
            del self._compiled[oldest]
            num_bytes = self.num_bytes
            trim()


def _skips(thought: Thought, matcher: LLMatcher, token_id: int) -> bool:
    """Whether a token begins the answer of a row that could have thought before it."""
    if thought.phase is not Phase.OPENING or thought.forced() is not None:
        return False
    if token_id != thought.opening_token_id:
        return True
    return not thought.opens_at_once and bool(matcher.validate_tokens([token_id]))


def _set_bit(bits: npt.NDArray[np.uint8], token_id: int, *, value: bool) -> None:
    if value:
        bits[token_id // 8] |= 1 << token_id % 8
    else:
        bits[token_id // 8] &= 255 ^ 1 << token_id % 8


def main() -> NoReturn:
    """Serve one worker until it is gone."""
    begin_process("grammars-work")
    source, sink = os.fdopen(0, "rb"), os.fdopen(os.dup(0), "wb")
    at_work = int(sys.argv[1])
    if (first := read_frame(source)) is None:
        os._exit(0)
    setup = msgspec.msgpack.decode(first, type=Setup)
    model_dir, vocab_size = Path(setup.model_dir), setup.vocab_size
    tokenizer = Tokenizer(model_dir, shown=setup.shown, vocab_size=vocab_size)
    vocabulary = model_vocabulary(tokenizer, vocab_size)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # llguidance writes there what ends it
    limit_memory(address_space() + MAX_BYTES)
    matchers = RowMatchers(
        vocabulary,
        note=lambda compiled, masked: _write(at_work, AT_WORK.pack(compiled, masked)),
        tokenizer=tokenizer,
    )
    try:
        _serve(source, sink, matchers)
    except BaseException:
        os._exit(1)  # at once: Python would wait for all that is to be compiled
    os._exit(0)


def _serve(source: BinaryIO, sink: BinaryIO, matchers: RowMatchers) -> None:
    decoder = msgspec.msgpack.Decoder(Request)
    while (data := read_frame(source)) is not None:
        matchers.check_time()
        match decoder.decode(data):
            case Update(left=left, begun=begun):
                matchers.update(left, begun)
            case Drawn(rows=rows, token_ids=token_ids):
                matchers.advance(rows, token_ids)
            case Ask(number=number, rows=rows, is_repair=is_repair):
                masks = matchers.masks(rows, number=number, is_repair=is_repair)
                write_frame(sink, msgspec.msgpack.encode(masks))
            case Wait(number=number, rows=rows):
                matchers.wait_for_any(rows)
                write_frame(sink, msgspec.msgpack.encode(Masks(number)))


def _write(descriptor: int, data: bytes) -> None:
    os.pwrite(descriptor, data, 0)


if __name__ == "__main__":
    main()
