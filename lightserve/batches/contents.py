"""Contents of files: rows of the store, or objects beside it that a row names.

A row comes before its objects and goes after them, so that none is ever without. What is deleted or
has expired becomes an upload that was given up, which clients do not see: its objects go, then its
row. Results are rows until their batch is over, and are moved then. Whichever step a process dies
in, the next one goes on from there.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from lightserve.batches.database import Database
from lightserve.batches.files import START, Cursor, Doomed, Files, no_file
from lightserve.batches.forecast import Forecasts
from lightserve.batches.jobs import Jobs
from lightserve.batches.records import CHUNK_BYTES, OBJECT_BYTES, FileRecord, LeasedLine
from lightserve.batches.responses import Responses
from lightserve.errors import InvalidRequest, StoreError

if TYPE_CHECKING:
    from lightserve.batches.objects import Objects

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_SPAN_BYTES = 8 * OBJECT_BYTES
"""Lines that follow one another are read at once, up to so many bytes."""

Lines = dict[tuple[int, int], bytes]
"""Texts of lines, by batch and number."""


class Store:
    """The parts of a store, over one open database."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.files = Files(database)
        self.jobs = Jobs(database)
        self.forecasts = Forecasts(database)
        self.responses = Responses(database)


class _Run(Protocol):
    """Calls of `StoreThread.run`."""

    async def __call__(self, work: Callable[[Store], T]) -> T: ...


class Contents:
    """See the module. Methods raise StoreError: store or objects cannot be read or written now."""

    def __init__(self, run: _Run, objects: Objects | None) -> None:
        """`objects` None: all contents are rows."""
        self._run = run
        self._objects = objects
        self.piece_bytes = CHUNK_BYTES if objects is None else OBJECT_BYTES
        """Bytes of an upload that are written at a time."""

    # ------------------------------------------------------------------ uploads

    async def begin(self, key_name: str) -> int:
        """Begin an upload; see `Files.begin`."""
        in_objects = self._objects is not None
        return await self._run(
            lambda store: store.files.begin(key_name, time.time(), in_objects=in_objects)
        )

    async def append(self, number: int, piece: int, data: bytes, *, quota: int) -> None:
        """Add a piece of `piece_bytes`, the last one perhaps of fewer; see `Files.append`."""

        def append(store: Store) -> str | None:
            store.files.sweep()
            return store.files.append(number, piece, data, time.time(), quota=quota)

        file_id = await self._run(append)
        if file_id is not None:
            await self._of_file_store().put(file_id, piece, data)

    async def drop(self, number: int, *, has_failed: bool = False) -> None:
        """Forget an upload that will not become whole.

        `has_failed`: an object may still come to be, so all go later.
        """
        doomed = await self._run(lambda store: store.files.drop(number, time.time()))
        if doomed is not None and not has_failed:
            await self._remove(doomed)

    # ------------------------------------------------------------------ reading

    async def read(self, file: FileRecord, cursor: Cursor = START) -> tuple[bytes, Cursor | None]:
        """Return a piece of a file and where the next one begins; None: this was the last.

        Raises:
            InvalidRequest: it was deleted meanwhile (404).
        """
        if not file.is_in_objects:
            found = await self._run(lambda store: store.files.read(file, cursor))
            if found is not None:
                return found
        start = cursor.position
        end = min(file.num_bytes, (start // OBJECT_BYTES + 1) * OBJECT_BYTES)
        data = await self._of_file_store().read(file.id, start, end - start)
        if data is None:
            raise no_file(file.id)
        return data, None if end == file.num_bytes else Cursor(position=end)

    async def texts(self, lines: Iterable[LeasedLine]) -> Lines:
        """Return what lines say that are in objects; those that are lost are left out."""
        found: Lines = {}
        for span in _spans(lines):
            first, last = span[0], span[-1]
            num_bytes = last.position + last.num_bytes - first.position
            data = await self._of_file_store().read(first.object_id, first.position, num_bytes)
            if data is None:
                log.error("file %s is not where its objects should be", first.object_id)
                continue
            for line in span:
                start = line.position - first.position
                found[line.batch, line.number] = data[start : start + line.num_bytes]
        return found

    # ------------------------------------------------------------------ the end

    async def delete(self, key_name: str, file_id: str) -> None:
        """Delete a file; see `Files.delete`."""
        doomed = await self._run(lambda store: store.files.delete(key_name, file_id, time.time()))
        if doomed is not None:
            try:
                await self._remove(doomed)
            except StoreError as error:  # it is gone for clients, and its objects go later
                log.warning("objects of a deleted file are left for later: %s", error)

    async def purge(self, now_s: float) -> bool:
        """Delete some of what is over; return whether there may be more."""
        num_gone, doomed = await self._run(lambda store: store.files.purge(now_s))
        for each in doomed:
            await self._remove(each)
        return num_gone > 0 or bool(doomed)

    async def _remove(self, doomed: Doomed) -> None:
        await self._of_file_store().delete(doomed.id, doomed.num_bytes)
        await self._run(lambda store: store.files.forget(doomed.number))

    async def move(self) -> bool:
        """Make objects of the results of a batch that is over; return whether there were any.

        Several servers may do so at once: they write the same bytes, and never fewer.
        """
        if self._objects is None:
            return False
        file = await self._run(lambda store: store.files.begin_move())
        if file is None:
            return False
        with contextlib.suppress(InvalidRequest):  # it was deleted meanwhile
            await self._move(file, self._objects)
        return True

    async def _move(self, file: FileRecord, objects: Objects) -> None:
        cursor: Cursor | None = START
        buffer, num_written = bytearray(), 0
        while cursor is not None:
            start = cursor
            found = await self._run(lambda store: store.files.read(file, start))  # noqa: B023
            if found is None:
                return  # another server has done it
            buffer += found[0]
            cursor = found[1]
            is_last = cursor is None
            if is_last and num_written * OBJECT_BYTES + len(buffer) != file.num_bytes:
                return  # it was deleted meanwhile
            while len(buffer) >= OBJECT_BYTES or (is_last and buffer):
                data = bytes(buffer[:OBJECT_BYTES])
                del buffer[:OBJECT_BYTES]
                await objects.put(file.id, num_written, data)
                num_written += 1
        await self._run(lambda store: store.files.end_move(file.number))

    def _of_file_store(self) -> Objects:
        if self._objects is None:
            raise StoreError("a file is in an object store, and there is no --file-store")
        return self._objects


def _spans(lines: Iterable[LeasedLine]) -> Iterator[Sequence[LeasedLine]]:
    """Yield lines that follow one another in their file."""
    span: list[LeasedLine] = []
    for line in sorted(lines, key=lambda line: (line.object_id, line.position)):
        if span:
            first, last = span[0], span[-1]
            follows = line.object_id == first.object_id
            follows &= line.position <= last.position + last.num_bytes + 2
            if not follows or line.position + line.num_bytes - first.position > MAX_SPAN_BYTES:
                yield span
                span = []
        span.append(line)
    if span:
        yield span
