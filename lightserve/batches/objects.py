"""Objects in which the bytes of files are kept: in S3 or what speaks its protocol, or a directory.

A file is objects of OBJECT_BYTES each, `ID/0`, `ID/1` and so on: each is there whole or not at all.
Credentials and place, `obstore` takes from the environment (AWS_…).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
import pydantic
from obstore.exceptions import BaseError
from obstore.store import from_url

from lightserve.batches.records import OBJECT_BYTES
from lightserve.batches.sqlite import make_directory
from lightserve.errors import StoreError

CONNECT_S = 3
REQUEST_S = 10
"""For one try of a request."""
TRIES_S = 15
"""For all tries."""
MAX_REASON_CHARS = 200


class _Missing(StoreError):
    """There is no such object."""


class Objects:
    """See the module. Methods raise StoreError: it cannot be done now."""

    def __init__(self, url: str) -> None:
        """`url`: as --file-store says."""
        with _errors():
            if url.startswith("file:"):
                self._directory: Path | None = Path(unquote(urlsplit(url).path))
                make_directory(self._directory)
                self._store: Any = from_url(url)
                return
            self._directory = None
            _check_environment()
            endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT", "")
            self._store = from_url(
                url,
                client_options={
                    "connect_timeout": timedelta(seconds=CONNECT_S),
                    "timeout": timedelta(seconds=REQUEST_S),
                    "allow_http": endpoint.startswith("http://"),
                },
                retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=TRIES_S)},
            )

    async def put(self, file_id: str, number: int, data: bytes) -> None:
        """Write an object: once this returns, it is durable.

        A task that is cancelled meanwhile waits all the same: nothing comes to be after its end.
        """
        task = asyncio.ensure_future(self._put(f"{file_id}/{number}", data))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})
            raise

    async def _put(self, path: str, data: bytes) -> None:
        with _errors():
            await obstore.put_async(self._store, path, data, use_multipart=False)
            if self._directory is not None:
                await asyncio.to_thread(_sync, self._directory, path)

    async def read(self, file_id: str, position: int, num_bytes: int) -> bytes | None:
        """Return a stretch of a file; None: not all of it is there."""
        end, pieces = position + num_bytes, []
        for number in range(position // OBJECT_BYTES, (end - 1) // OBJECT_BYTES + 1):
            begins = number * OBJECT_BYTES
            start, stop = max(position - begins, 0), min(end - begins, OBJECT_BYTES)
            try:
                with _errors():
                    piece = await obstore.get_range_async(
                        self._store, f"{file_id}/{number}", start=start, end=stop
                    )
            except _Missing:
                return None
            pieces.append(bytes(piece))
        data = b"".join(pieces)
        return data if len(data) == num_bytes else None

    async def delete(self, file_id: str, num_bytes: int) -> None:
        """Delete the objects of a file of at most so many bytes, those that are there."""
        if self._directory is not None:  # and what a write that was cut off has left there
            with contextlib.suppress(_Missing), _errors():
                await asyncio.to_thread(shutil.rmtree, self._directory / file_id)
            return
        num_objects = (num_bytes + OBJECT_BYTES - 1) // OBJECT_BYTES
        paths = [f"{file_id}/{number}" for number in range(num_objects)]
        with contextlib.suppress(_Missing), _errors():
            await obstore.delete_async(self._store, paths)

    def check(self) -> None:
        """Check, once at the start, that objects can be written, read and deleted."""
        path = f"check-{secrets.token_hex(8)}"
        with _errors():
            self._store.put(path, b"lightserve")
            self._store.get_range(path, start=0, end=10)
            self._store.delete(path)

    def has(self, file_id: str, num_bytes: int) -> bool:
        """Return whether the last object of a file of so many bytes is there."""
        try:
            with _errors():
                self._store.head(f"{file_id}/{(num_bytes - 1) // OBJECT_BYTES}")
        except _Missing:
            return False
        return True


def _check_environment() -> None:
    """Look at what addresses are made of: `obstore` panics where that is no address."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        if not re.fullmatch("[A-Za-z0-9-]*", value := os.environ.get(name, "")):
            raise StoreError(f"{name} is no region: {value!r}")
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL"):
        if (value := os.environ.get(name, "")) and (reason := _why_no_url(value)):
            raise StoreError(f"{name} is no URL: {value!r}: {reason}")


def _why_no_url(text: str) -> str:
    if not re.fullmatch("[!-~]+", text):
        return "it has characters that do not belong there"
    try:
        pydantic.TypeAdapter(pydantic.HttpUrl).validate_python(text)
    except pydantic.ValidationError as error:
        return str(error.errors()[0]["msg"])
    return ""


def _sync(directory: Path, path: str) -> None:
    """Have an object in a directory survive a loss of power, and its name."""
    for place in (directory / path, (directory / path).parent, directory):
        fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn what `obstore` raises into StoreError, of one line."""
    try:
        yield
    except FileNotFoundError as error:
        raise _Missing(_reason(error)) from error
    except (BaseError, OSError, ValueError) as error:
        reason = _reason(error)
        raise StoreError(reason, is_full="(os error 28)" in reason) from error


def _reason(error: Exception) -> str:
    (first, *_) = str(error).splitlines() or [type(error).__name__]
    return first[:MAX_REASON_CHARS]
