"""`lightserve batch`: files of requests for a server, and what has become of them."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lightserve.cli.options import FiniteRange, read_api_key, server_options
from lightserve.errors import BatchError
from lightserve.extras import packages_of

if TYPE_CHECKING:
    import httpx

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
OVER = ("completed", "expired", "cancelled", "failed")
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
TIMEOUT_S = 600.0
"""An upload of a large file takes a while, and so does a batch of many lines."""


class BatchClient:
    """Files and batches of one server. Every method raises BatchError."""

    def __init__(
        self, url: str, api_key: str = "", transport: httpx.BaseTransport | None = None
    ) -> None:
        with packages_of("batch"):
            import httpx  # noqa: PLC0415 - an extra
        base = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._errors = (httpx.HTTPError, httpx.InvalidURL)
        timeout = httpx.Timeout(TIMEOUT_S, connect=10.0)
        try:
            self._http = httpx.Client(
                base_url=f"{base}/v1", headers=headers, timeout=timeout, transport=transport
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise BatchError(f"--url {url!r}: {error}") from error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def submit(
        self, path: Path, endpoint: str, window: str, *, accept_late: bool = False
    ) -> dict[str, Any]:
        """Upload a file, and make a batch of it."""
        try:
            with path.open("rb") as file:
                uploaded = self._ask(
                    "POST", "/files", data={"purpose": "batch"}, files={"file": (path.name, file)}
                )
        except OSError as error:
            raise BatchError(f"{path}: {error.strerror}") from error
        asked: dict[str, Any] = {
            "input_file_id": uploaded["id"],
            "endpoint": endpoint,
            "completion_window": window,
        }
        if accept_late:
            asked["x_accept_late"] = True
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        try:
            return self._ask("POST", "/batches", json=asked, headers=headers)
        except BatchError:
            self._ask("DELETE", f"/files/{uploaded['id']}")
            raise

    def get(self, batch_id: str) -> dict[str, Any]:
        """Return a batch."""
        return self._ask("GET", f"/batches/{batch_id}")

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Cancel a batch; return what it is then."""
        return self._ask("POST", f"/batches/{batch_id}/cancel")

    def newest(self, limit: int) -> list[dict[str, Any]]:
        """Return the batches that were made last."""
        found: list[dict[str, Any]] = self._ask("GET", "/batches", params={"limit": limit})["data"]
        return found

    def content(self, file_id: str) -> Iterator[bytes]:
        """Yield what is in a file, in pieces."""
        try:
            with self._http.stream("GET", f"/files/{file_id}/content") as response:
                if response.is_error:
                    response.read()
                    raise BatchError(self._refusal(response))
                yield from response.iter_bytes()
        except self._errors as error:
            raise self._unreachable(error) from error

    def _ask(self, method: str, path: str, **values: Any) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, **values)
        except self._errors as error:
            raise self._unreachable(error) from error
        if response.is_error:
            raise BatchError(self._refusal(response))
        try:
            answer: dict[str, Any] = response.json()
        except ValueError as error:
            raise BatchError(f"{method} {path} gave no JSON: is this an LLM server?") from error
        return answer

    def _refusal(self, response: httpx.Response) -> str:
        from lightserve.chat_client import refusal_text  # noqa: PLC0415 - needs httpx

        return refusal_text(response)

    def _unreachable(self, error: Exception) -> BatchError:
        from lightserve.chat_client import unreachable_text  # noqa: PLC0415 - needs httpx

        return BatchError(unreachable_text(self._http.base_url, error))


def _batch_options(function: FunctionT) -> FunctionT:
    endpoint = click.option(
        "--endpoint",
        type=click.Choice(ENDPOINTS),
        default=ENDPOINTS[0],
        show_default=True,
        help="Route that the lines are for.",
    )
    window = click.option(
        "--window",
        default="24h",
        show_default=True,
        help="Time in which the batch has to end, such as 30m, 24h or 7d.",
    )
    late = click.option(
        "--accept-late", is_flag=True, help="Make the batch even if its window is too short."
    )
    return endpoint(window(late(function)))


@contextmanager
def _client(values: dict[str, Any]) -> Iterator[BatchClient]:
    key = read_api_key(api_key_env=values["api_key_env"], api_key_file=values["api_key_file"])
    client = BatchClient(values["url"], key)
    try:
        yield client
    finally:
        client.close()


@click.group("batch")
def command() -> None:
    """Have a server answer files of requests as best-effort work."""


@command.command("submit")
@click.argument("file", type=click.Path(path_type=Path))
@_batch_options
@server_options
def submit(file: Path, endpoint: str, window: str, accept_late: bool, **values: Any) -> int:
    """Upload a JSONL file as a batch, and print the id of the batch."""
    with _client(values) as client:
        click.echo(client.submit(file, endpoint, window, accept_late=accept_late)["id"])
    return 0


@command.command("status")
@click.argument("batch_id", metavar="ID")
@server_options
def status(batch_id: str, **values: Any) -> int:
    """Print the progress of a batch."""
    with _client(values) as client:
        click.echo(describe(client.get(batch_id), time.time()))
    return 0


@command.command("list")
@click.option(
    "--limit",
    type=click.IntRange(1, 100),
    default=20,
    show_default=True,
    help="Most batches to print.",
)
@server_options
def list_(limit: int, **values: Any) -> int:
    """Print the batches of your API key, the newest first."""
    with _client(values) as client:
        for batch in client.newest(limit):
            click.echo(describe(batch, time.time()))
    return 0


@command.command("cancel")
@click.argument("batch_id", metavar="ID")
@server_options
def cancel(batch_id: str, **values: Any) -> int:
    """Cancel a batch; its results so far are kept."""
    with _client(values) as client:
        click.echo(describe(client.cancel(batch_id), time.time()))
    return 0


@command.command("results")
@click.argument("batch_id", metavar="ID")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Default: standard output.")
@click.option("--errors", is_flag=True, help="The lines that failed, instead of the others.")
@server_options
def results(batch_id: str, output: Path | None, errors: bool, **values: Any) -> int:
    """Write the results of a batch that is over."""
    with _client(values) as client:
        batch = client.get(batch_id)
        if batch["status"] not in OVER:
            raise BatchError(f"{describe(batch, time.time())}: its results come when it is over")
        file_id = batch["error_file_id" if errors else "output_file_id"]
        pieces = iter(()) if file_id is None else client.content(file_id)
        if output is None:
            for piece in pieces:
                sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            return 0
        try:
            with output.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
        except OSError as error:
            raise BatchError(f"{output}: {error.strerror}") from error
    return 0


@command.command("watch")
@click.argument("what", metavar="FILE|ID")
@click.option(
    "--every-s", type=FiniteRange(0.1), default=1.0, show_default=True, help="Seconds in between."
)
@_batch_options
@server_options
def watch(
    what: str, every_s: float, endpoint: str, window: str, accept_late: bool, **values: Any
) -> int:
    """Follow a batch, or one that is made of a file, to its end.

    The exit code is 0 if every line was answered.
    """
    with packages_of("batch"):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn  # noqa: PLC0415 - an extra
    with _client(values) as client:
        if Path(what).is_file():
            made = client.submit(Path(what), endpoint, window, accept_late=accept_late)
            what = made["id"]
        batch = client.get(what)
        bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with bar:
            task = bar.add_task(what, total=batch["request_counts"]["total"])
            while True:
                counts = batch["request_counts"]
                bar.update(
                    task,
                    completed=counts["completed"] + counts["failed"],
                    description=describe(batch, time.time()),
                )
                if batch["status"] in OVER:
                    break
                time.sleep(every_s)
                batch = client.get(what)
    return 0 if counts["completed"] == counts["total"] else 1


def describe(batch: dict[str, Any], now_s: float) -> str:
    """Return a batch in a line."""
    counts = batch["request_counts"]
    text = f"{batch['id']} {batch['status']} {counts['completed']}/{counts['total']}"
    if counts["failed"]:
        text += f", {counts['failed']} failed"
    if batch["status"] in OVER:
        return text
    text += f", its window ends in {_duration(batch['expires_at'] - now_s)}"
    if (forecast := batch.get("x_forecast")) is None:
        return text
    word = "done" if forecast["in_time"] else "late: done"
    return f"{text}, {word} in about {_duration(forecast['ends_at'] - now_s)}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, int(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
