"""What speaks as much of S3's protocol as is needed here, on a free port of 127.0.0.1."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

BUCKET = "bucket"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key-of-the-test",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
}


class FakeS3:
    """See the module; ended by `close`. Objects are in memory, by bucket and key."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        """Methods and paths."""
        self.is_away = False
        """Whether it answers that it cannot, as S3 does now and then."""
        handler = type("_Handler", (_Handler,), {"store": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """By which a client finds it, and is let in."""
        return {**ENVIRONMENT, "AWS_ENDPOINT_URL": self.url}

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def fake_s3() -> Iterator[FakeS3]:
    store = FakeS3()
    try:
        yield store
    finally:
        store.close()


class _Handler(BaseHTTPRequestHandler):
    store: ClassVar[FakeS3]
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _is_let_in(self) -> bool:
        """Answer what is refused; return whether it was not."""
        self.store.requests.append(f"{self.command} {self.path}")
        signed = f"AWS4-HMAC-SHA256 Credential={ENVIRONMENT['AWS_ACCESS_KEY_ID']}/"
        if not self.headers.get("authorization", "").startswith(signed):
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif not self.path.startswith((f"/{BUCKET}/", f"/{BUCKET}?")):
            self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        elif self.store.is_away:
            self._answer(503, b"<Error><Code>SlowDown</Code></Error>")
        else:
            return True
        return False

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        if self._is_let_in():
            self.store.objects[self.path] = data
            self._answer(200, etag='"x"')

    def do_GET(self) -> None:
        if not self._is_let_in():
            return
        data = self.store.objects.get(self.path)
        if data is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        span = self.headers.get("range", "")
        first, _, last = span.removeprefix("bytes=").partition("-")
        start, end = int(first or 0), min(int(last or len(data)), len(data) - 1)
        if start >= len(data):
            self._answer(416)
            return
        self._answer(
            206,
            data[start : end + 1],
            etag='"x"',
            last_modified="Tue, 24 Nov 2026 00:00:00 GMT",
            content_range=f"bytes {start}-{end}/{len(data)}",
        )

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        """Delete several objects."""
        wanted = self.rfile.read(int(self.headers["content-length"])).decode()
        if not self._is_let_in():
            return
        names = re.findall(r"<Key>([^<]*)</Key>", wanted)
        for name in names:
            self.store.objects.pop(f"/{BUCKET}/{name}", None)
        gone = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
        self._answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())
