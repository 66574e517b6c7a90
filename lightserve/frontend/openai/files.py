"""/v1/files: upload into the batch store, list, retrieve, content, delete."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from msgspec.json import encode
from pydantic import Field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from lightserve.batches.contents import Store
from lightserve.batches.files import START, Cursor
from lightserve.batches.records import (
    MAX_FILE_BYTES,
    MAX_FILENAME_CHARS,
    MAX_TTL_S,
    MIN_TTL_S,
    FileRecord,
    Purpose,
)
from lightserve.errors import InvalidRequest
from lightserve.frontend.errors import ClientGone, RequestFailed
from lightserve.frontend.json_body import UNKNOWN_PARAMETER, StrictModel, printable, show
from lightserve.frontend.middleware import caller_of
from lightserve.frontend.openai.stored import Page, StoredAnswer, in_store, of_contents
from lightserve.frontend.service import Service

MAX_VALUE_BYTES = 1024
MAX_FILES_LISTED = 10_000
DEFAULT_FILES_LISTED = 10_000
FILES_PER_PAGE = 256
_FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")

_Count = Annotated[int, Field(ge=0)]

UPLOAD_FORM: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": ["batch"]},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_TTL_S, "maximum": MAX_TTL_S},
    },
    "required": ["file", "purpose"],
    "additionalProperties": False,
}
"""The schema of an upload."""
FILE_QUERY: Mapping[str, Any] = {
    "purpose": {"enum": ["batch", "batch_output"]},
    "order": {"enum": ["asc", "desc"]},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_FILES_LISTED},
    "after": {"type": "string"},
}
"""Schemas of what a list is asked with."""


class FileObject(StrictModel):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: _Count
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Purpose
    status: Literal["processed"]
    status_details: None


class DeletedFile(StrictModel):
    """The answer to a deletion of a file."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class FilePage(Page):
    """A page of files."""

    data: list[FileObject]


def read_query(request: Request, names: Iterable[str]) -> dict[str, str]:
    """Return the query's parameters.

    Raises:
        InvalidRequest: an unknown one, one twice, or one with control characters.
    """
    known = tuple(names)
    query: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise InvalidRequest(
                f"the query parameter {show(name)} is not supported", code=UNKNOWN_PARAMETER
            )
        if name in query:
            raise InvalidRequest(f"the query parameter {name} must be given once", param=name)
        try:
            query[name] = printable(value)
        except ValueError as error:
            raise InvalidRequest(f"{name} {error}", param=name) from None
    return query


def read_limit(query: dict[str, str], *, default: int, most: int) -> int:
    """Return `limit` of a query. Raises InvalidRequest."""
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise InvalidRequest(
            f"limit must be an integer from 1 to {most}, got {show(text)}", param="limit"
        )
    return int(text)


def files_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.post("/v1/files")
    async def upload_file(request: Request) -> JSONResponse:
        """Take in a file of requests, for a batch."""
        file = await _Upload(service, caller_of(request.scope).name).read(request)
        return JSONResponse(file.body())

    @router.get("/v1/files")
    async def list_files(request: Request) -> Response:
        """List the files of the key."""
        query = read_query(request, ("purpose", "limit", "order", "after"))
        limit = read_limit(query, default=DEFAULT_FILES_LISTED, most=MAX_FILES_LISTED)
        check_choice(query, "order", ("asc", "desc"))
        check_choice(query, "purpose", ("batch", "batch_output"))
        return StoredAnswer(service, _list(service, caller_of(request.scope).name, query, limit))

    async def find(request: Request, file_id: str) -> FileRecord:
        key_name = caller_of(request.scope).name
        return await in_store(service, lambda s: s.files.get(key_name, file_id, time.time()))

    @router.get("/v1/files/{file_id}")
    async def retrieve_file(request: Request, file_id: str) -> JSONResponse:
        """Describe a file."""
        return JSONResponse((await find(request, file_id)).body())

    @router.get("/v1/files/{file_id}/content")
    async def retrieve_content(request: Request, file_id: str) -> Response:
        """Return what is in a file."""
        file = await find(request, file_id)
        return StoredAnswer(
            service,
            read_file(service, file),
            media_type="application/octet-stream",
            headers={
                "content-length": str(file.num_bytes),
                "x-content-type-options": "nosniff",
                "content-disposition": "attachment",
            },
        )

    @router.delete("/v1/files/{file_id}")
    async def delete_file(request: Request, file_id: str) -> Response:
        """Delete a file."""
        key_name = caller_of(request.scope).name
        await of_contents(service, lambda contents: contents.delete(key_name, file_id))
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    return router


async def read_file(service: Service, file: FileRecord) -> AsyncIterator[bytes]:
    """Yield a file; one that is deleted meanwhile ends early, and so the connection."""
    cursor: Cursor | None = START
    while cursor is not None:
        start = cursor
        data, cursor = await of_contents(service, lambda contents: contents.read(file, start))  # noqa: B023
        yield data


async def _list(
    service: Service, key_name: str, query: Mapping[str, str], limit: int
) -> AsyncIterator[bytes]:
    """Yield a list of files; it is read from the store in portions."""
    after: str | int | None = query.get("after")
    first_id = last_id = None
    num_left, has_more, separator = limit, True, b'{"object":"list","data":['
    while num_left and has_more:

        def page(store: Store) -> tuple[list[FileRecord], bytes, bool]:
            files, more = store.files.page(
                *(key_name, time.time()),
                limit=min(num_left, FILES_PER_PAGE),  # noqa: B023
                after=after,  # noqa: B023
                purpose=query.get("purpose"),
                is_ascending=query.get("order") == "asc",
            )
            return files, encode([file.body() for file in files])[1:-1], more

        files, text, has_more = await in_store(service, page)
        if files:
            first_id, last_id = first_id or files[0].id, files[-1].id
            after = files[-1].number
        num_left -= len(files)
        yield separator + text
        separator = b","
    end = {"first_id": first_id, "last_id": last_id, "has_more": has_more}
    yield b"]," + encode(end)[1:]


def check_choice(query: dict[str, str], name: str, choices: tuple[str, ...]) -> None:
    """Check a parameter that has few values, if it is given. Raises InvalidRequest."""
    if query.get(name, choices[0]) not in choices:
        raise InvalidRequest(
            f"{name} must be {' or '.join(choices)}, got {show(query[name])}", param=name
        )


def check_ttl(seconds: int, name: str) -> int:
    """Return how long a file is to be kept. Raises InvalidRequest."""
    if not MIN_TTL_S <= seconds <= MAX_TTL_S:
        raise InvalidRequest(
            f"{name}.seconds must be from {MIN_TTL_S} to {MAX_TTL_S}, got {str(seconds)[:64]}",
            param=name,
        )
    return seconds


# ----------------------------------------------------------------------
# A form with a file in it, as it arrives: the file goes to the store in chunks.


def _invalid_form(what: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not a valid form: {what}", code="invalid_form")


class _Upload:
    """One upload: nothing is left of it unless it comes to its end."""

    def __init__(self, service: Service, key_name: str) -> None:
        self._service = service
        self._key_name = key_name
        self._values: dict[str, bytes] = {}
        self._filename = ""
        self._number: int | None = None
        """Number of the file in the store, once the upload has begun."""
        self._piece_bytes = self._num_pieces = self._num_bytes = 0
        self._buffer = bytearray()
        self._field = ""
        """Whose value is arriving."""
        self._is_over = False
        self._headers: dict[str, str] = {}
        self._header = [b"", b""]

    async def read(self, request: Request) -> FileRecord:
        """Return the file, durable.

        Raises:
            InvalidRequest: the form is none, or too large, or says what it may not.
            RequestFailed: the store cannot take it.
            ClientGone: the client hung up.
        """
        parser = MultipartParser(_boundary(request), self._callbacks())  # type: ignore[arg-type]
        try:
            await self._begin()
            async for data in request.stream():
                try:
                    parser.write(data)
                except FormParserError:
                    raise _invalid_form("its parts are not as its boundary says") from None
                await self._flush(self._piece_bytes)
            if not self._is_over:
                raise _invalid_form("it ends before its last boundary")
            await self._flush(1)
            return await self._finish()
        except BaseException as error:
            if self._number is not None:
                number, has_failed = self._number, isinstance(error, RequestFailed)
                with contextlib.suppress(RequestFailed):  # it is dropped later
                    await of_contents(
                        self._service, lambda each: each.drop(number, has_failed=has_failed)
                    )
            if isinstance(error, ClientDisconnect):
                raise ClientGone from error
            raise

    async def _begin(self) -> None:
        self._number = await of_contents(self._service, lambda each: each.begin(self._key_name))
        assert self._service.store is not None
        self._piece_bytes = self._service.store.contents.piece_bytes

    async def _flush(self, least: int) -> None:
        """Write pieces while the buffer has so many bytes."""
        number = self._number
        assert number is not None
        while len(self._buffer) >= least:
            piece, data = self._num_pieces, bytes(self._buffer[: self._piece_bytes])
            del self._buffer[: self._piece_bytes]
            self._num_pieces += 1
            quota = self._service.config.batch_max_stored_bytes
            await of_contents(
                self._service,
                lambda each: each.append(number, piece, data, quota=quota),  # noqa: B023
            )

    async def _finish(self) -> FileRecord:
        values = self._checked()
        ttl_s = _ttl_of(values)
        number = self._number
        assert number is not None
        return await in_store(
            self._service,
            lambda s: s.files.finish(number, "batch", self._filename, time.time(), ttl_s=ttl_s),
        )

    def _checked(self) -> dict[str, str]:
        """Return the form's values. Raises InvalidRequest."""
        if "file" not in self._values:
            raise InvalidRequest(
                "file is required", param="file", code="missing_required_parameter"
            )
        if self._num_bytes == 0:
            raise InvalidRequest("file must have at least 1 byte, got 0", param="file")
        try:
            values = {name: value.decode() for name, value in self._values.items()}
        except UnicodeDecodeError:
            raise _invalid_form("its values are not valid UTF-8") from None
        if "purpose" not in values:
            raise InvalidRequest(
                "purpose is required", param="purpose", code="missing_required_parameter"
            )
        if values["purpose"] != "batch":
            raise InvalidRequest(
                f"purpose must be batch, got {show(values['purpose'])}", param="purpose"
            )
        return values

    # ------------------------------------------------------------------ the parser's calls

    def _callbacks(self) -> dict[str, Callable[..., None]]:
        return {
            "on_part_begin": self._on_part_begin,
            "on_header_field": lambda data, start, end: self._on_header(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._on_header(1, data[start:end]),
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": lambda data, start, end: self._on_data(data[start:end]),
            "on_end": self._on_end,
        }

    def _on_part_begin(self) -> None:
        self._headers = {}
        self._header = [b"", b""]

    def _on_header(self, part: int, data: bytes) -> None:
        self._header[part] += data

    def _on_header_end(self) -> None:
        name, value = self._header
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        self._header = [b"", b""]

    def _on_headers_finished(self) -> None:
        kind, options = parse_options_header(self._headers.get("content-disposition", ""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if kind != b"form-data" or not name:
            raise _invalid_form("a part has no name")
        if name not in _FIELDS:
            raise InvalidRequest(
                f"{show(name).strip(chr(34))} is not supported; fields are {', '.join(_FIELDS)}",
                code=UNKNOWN_PARAMETER,
            )
        if name in self._values:
            raise InvalidRequest(f"{name} must be given once", param=name)
        if name == "file":
            self._filename = _filename(options.get(b"filename", b""))
        self._field = name
        self._values[name] = b""

    def _on_data(self, data: bytes) -> None:
        if self._field != "file":
            self._values[self._field] += data
            if len(self._values[self._field]) > MAX_VALUE_BYTES:
                raise InvalidRequest(
                    f"{self._field} must have at most {MAX_VALUE_BYTES} bytes", param=self._field
                )
            return
        self._num_bytes += len(data)
        if self._num_bytes > MAX_FILE_BYTES:
            raise InvalidRequest(
                f"file must have at most {MAX_FILE_BYTES} bytes, got more",
                param="file",
                code="request_too_large",
                status=413,
            )
        self._buffer += data

    def _on_end(self) -> None:
        self._is_over = True


def _boundary(request: Request) -> bytes:
    """Return what separates the parts of a form. Raises InvalidRequest (415)."""
    given = request.headers.getlist("content-type")
    kind, options = parse_options_header(given[0] if len(given) == 1 else "")
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 70:
        raise InvalidRequest(
            "a file must come as a form: with the header Content-Type: multipart/form-data and a"
            " boundary of 1 to 70 characters (curl: -F file=@FILE)",
            code="unsupported_media_type",
            status=415,
        )
    return boundary


def _filename(given: bytes) -> str:
    """Return the name of a file: it is shown, and never a path. Raises InvalidRequest."""
    try:
        name = given.decode()
    except UnicodeDecodeError:
        raise _invalid_form("the file's name is not valid UTF-8") from None
    if len(name) > MAX_FILENAME_CHARS:
        raise InvalidRequest(
            f"the file's name must have at most {MAX_FILENAME_CHARS} characters, got {len(name)}",
            param="file",
        )
    try:
        return printable(name)
    except ValueError as error:
        raise InvalidRequest(f"the file's name {error}", param="file") from None


def _ttl_of(values: dict[str, str]) -> int | None:
    """Return how long an uploaded file is to be kept. Raises InvalidRequest."""
    anchor, seconds = (values.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(
            f"expires_after.anchor must be created_at, got {show(anchor)}", param="expires_after"
        )
    if seconds is None or not (seconds.isascii() and seconds.isdigit() and len(seconds) < 20):
        raise InvalidRequest(
            f"expires_after.seconds must be an integer, got {show(seconds)}", param="expires_after"
        )
    return check_ttl(int(seconds), "expires_after")
