"""A disk under SQLite that knows what of its files a loss of power would leave, and that can fail.

What is written counts as safe once its file was synced. What was written since may be lost, or be
there in part, whatever came first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import apsw

Image = dict[str, bytes]
"""Files by name."""


class Disk:
    """See the module. Connections that are opened within `mounted` have it."""

    def __init__(self) -> None:
        self.num_calls = 0
        """Writes and syncs so far."""
        self.fails_at: int | None = None
        self.failure: type[apsw.Error] = apsw.IOError
        self.images: list[Image] = []
        """What would be left, taken before each sync, with some of what was not synced, and after
        it."""
        self._safe: dict[str, bytearray] = {}
        self._unsafe: dict[str, list[tuple[int, bytes | None]]] = {}
        """Places and what is written there; None: the file is cut there."""
        self._random = random.Random(0)

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Have connections use the disk: one at a time, as it has no shared memory."""
        vfs = _VFS(self)
        connect = apsw.Connection

        def opened(*args: Any, **kwargs: Any) -> apsw.Connection:
            connection = connect(*args, vfs=vfs.name, **kwargs)
            connection.execute("PRAGMA locking_mode=EXCLUSIVE; PRAGMA wal_autocheckpoint=8")
            return connection

        with mock.patch("apsw.Connection", opened):
            yield
        vfs.unregister()

    def call(self) -> None:
        """Count a write or a sync. Raises what `failure` says, once."""
        self.num_calls += 1
        if self.num_calls == self.fails_at:
            raise self.failure(f"{self.failure.__name__} at call {self.num_calls}")

    def note(self, name: str, place: int, data: bytes | None) -> None:
        """Take in a write, or a cut."""
        self._unsafe[name].append((place, data))

    def open(self, name: str) -> None:
        """Take in that there is a file; what is in it is safe."""
        if name not in self._safe:
            self._safe[name] = bytearray(Path(name).read_bytes())
            self._unsafe[name] = []

    def delete(self, name: str) -> None:
        """Take in that a file is gone."""
        self._safe.pop(name, None)
        self._unsafe.pop(name, None)

    def sync(self, name: str) -> None:
        """Take in that what was written to a file is safe."""
        self.images.append(self.image())
        self.images.append(self.image(keeps_some=True))
        for write in self._unsafe[name]:
            _apply(self._safe[name], write)
        self._unsafe[name].clear()
        self.images.append(self.image())

    def image(self, *, keeps_some: bool = False) -> Image:
        """Return what a loss of power would leave now; `keeps_some`: with some writes more."""
        left = {name: bytearray(data) for name, data in self._safe.items()}
        if keeps_some:
            for name, writes in self._unsafe.items():
                for write in writes:
                    if self._random.random() < 0.5:
                        _apply(left[name], write)
        return {name: bytes(data) for name, data in left.items()}


def _apply(data: bytearray, write: tuple[int, bytes | None]) -> None:
    place, written = write
    if written is None:
        del data[place:]
        return
    data.extend(bytes(max(0, place - len(data))))
    data[place : place + len(written)] = written


class _File(apsw.VFSFile):
    def __init__(self, disk: Disk, filename: Any, flags: list[int]) -> None:
        super().__init__("", filename, flags)
        self._disk = disk
        self._name = filename if isinstance(filename, str) else filename.filename()
        disk.open(self._name)

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        self._disk.call()
        super().xWrite(data, offset)
        self._disk.note(self._name, offset, bytes(data))

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        super().xTruncate(newsize)
        self._disk.note(self._name, newsize, None)

    def xSync(self, flags: int) -> None:  # noqa: N802
        self._disk.call()
        super().xSync(flags)
        self._disk.sync(self._name)


class _VFS(apsw.VFS):
    def __init__(self, disk: Disk) -> None:
        self.name = f"disk-{id(disk)}"
        self._disk = disk
        super().__init__(self.name, base="")

    def xOpen(self, name: Any, flags: list[int]) -> _File:  # noqa: N802
        return _File(self._disk, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        super().xDelete(filename, syncdir)
        self._disk.delete(filename)
