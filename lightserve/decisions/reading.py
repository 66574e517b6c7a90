"""Reads decision logs: format, chain of hashes, a last line that was cut off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from lightserve.decisions.records import (
    FORMAT_VERSION,
    AnyRecord,
    Decision,
    Header,
    Input,
    new_hash,
)
from lightserve.errors import DecisionLogError


class Line(NamedTuple):
    """One record, and where it is."""

    number: int
    """From 1."""
    record: Input | Decision


class _Version(msgspec.Struct):
    """What the first line of every version has."""

    kind: str
    format_version: int


class DecisionLogReader:
    """One file; read line by line, as often as wanted."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises DecisionLogError."""
        self.path = path
        self.is_cut_off = False
        """Whether the last line is not whole: known once all lines were read."""
        self._decoder = msgspec.json.Decoder(AnyRecord)
        self.header = self._read_header()

    def lines(self) -> Iterator[Line]:
        """Yield what follows the header.

        Raises:
            DecisionLogError: a line is none of this format, or what is before it was changed.
        """
        chain = new_hash()
        for number, text in self._texts():
            record = self._decode(number, text)
            if isinstance(record, Decision) and record.chain != chain.hexdigest():
                raise DecisionLogError(
                    f"{self.path}, line {number}: the lines before it are not as they were written"
                )
            chain.update(text)
            if not isinstance(record, Header):
                yield Line(number, record)

    def _texts(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self.path.open("rb") as file:
                for number, text in enumerate(file, start=1):
                    if not text.endswith(b"\n"):
                        self.is_cut_off = True
                        return
                    yield number, text
        except OSError as error:
            raise DecisionLogError(f"{self.path}: {error.strerror}") from error

    def _decode(self, number: int, text: bytes) -> AnyRecord:
        try:
            record: AnyRecord = self._decoder.decode(text)
        except msgspec.MsgspecError as error:
            raise DecisionLogError(f"{self.path}, line {number}: {error}") from error
        if isinstance(record, Header) != (number == 1):
            raise DecisionLogError(f"{self.path}, line {number}: a header, not in the first line")
        return record

    def _read_header(self) -> Header:
        _, text = next(self._texts(), (1, b""))
        try:
            version = msgspec.json.decode(text, type=_Version)
        except msgspec.MsgspecError as error:
            raise DecisionLogError(f"{self.path}: not a decision log: {error}") from error
        if version.kind != "header":
            raise DecisionLogError(f"{self.path}: not a decision log: it has no header")
        if version.format_version != FORMAT_VERSION:
            raise DecisionLogError(
                f"{self.path}: format version {version.format_version}; this lightserve reads"
                f" version {FORMAT_VERSION}"
            )
        header = self._decode(1, text)
        assert isinstance(header, Header)
        return header
