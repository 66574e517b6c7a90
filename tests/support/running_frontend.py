"""A frontend on a real socket with a real ZeroMQ link to a scripted router, in one event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from lightserve.channels import bind_hub
from lightserve.config import ServeConfig
from lightserve.errors import ChannelFull
from lightserve.frontend.process import _serve
from lightserve.messages.frontend_router import (
    FrontendHello,
    FrontendMessage,
    RouterMessage,
    RouterStatus,
    RouterWelcome,
    Submit,
    TokenDelta,
)
from lightserve.messages.supervision import (
    ChildMessage,
    ChildReady,
    ChildSpec,
    Drain,
    Role,
    RouterDown,
    RouterUp,
    SupervisorMessage,
)
from lightserve.metrics.turns import TurnSelector
from support.fake_router import Answer, eventually, router_status, token_delta
from support.processes import PATIENCE_S

NUM_KV_SLOTS = 10_000_000
"""Of the pool of a `ScriptedHub`: statuses must say the same, as requests are measured by it."""


class FakeControl:
    """The frontend's end of the control link."""

    def __init__(self) -> None:
        self.num_rejected = 0
        self.num_refused = 0
        self.is_full = False
        self.sent: list[ChildMessage] = []
        self.orders: asyncio.Queue[SupervisorMessage] = asyncio.Queue()

    def send(self, message: ChildMessage) -> None:
        if self.is_full:
            self.num_refused += 1
            raise ChannelFull("full")
        self.sent.append(message)

    async def receive(self) -> SupervisorMessage:
        return await self.orders.get()

    def close(self) -> None:
        pass


class ScriptedHub:
    """The router's hub, in a thread of its own; answers each request by script."""

    def __init__(self, path: Path, boot_id: str, answer: Answer | None = None) -> None:
        self.address = f"ipc://{path}"
        self.boot_id = boot_id
        self.answer = answer
        self.is_silent = False
        """Whether hellos are not answered."""
        self.received: list[FrontendMessage] = []
        self._outbox: list[RouterMessage | bytes] = []
        self._is_stopping = False
        self._session = self._num_deltas = 0
        self.num_to_lose = 0
        """So many of the next messages with tokens never arrive."""
        self.loses_welcomes = False
        self._hub = bind_hub(self.address, send_type=RouterMessage, recv_type=FrontendMessage)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def say(self, message: RouterMessage | bytes) -> None:
        """Send a message, or a frame that may be broken."""
        self._outbox.append(message)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.received if isinstance(message, kind)]

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join(timeout=PATIENCE_S)
        assert not self._thread.is_alive()
        self._hub.close()

    def _send(self, peer: str, message: RouterMessage) -> None:
        """Send, numbered as a router does."""
        if isinstance(message, TokenDelta):
            self._num_deltas += 1
            if self.num_to_lose > 0:
                self.num_to_lose -= 1
                return
        elif isinstance(message, RouterWelcome) and self.loses_welcomes:
            return
        elif isinstance(message, RouterStatus):
            session = message.session or self._session
            numbers = {"session": session, "num_deltas": self._num_deltas}
            message = msgspec.structs.replace(message, **numbers)
        self._hub.send(peer, message)

    def _run(self) -> None:
        while not self._is_stopping:
            while self._outbox:
                message = self._outbox.pop(0)
                if isinstance(message, bytes):
                    self._hub._socket.raw.send_multipart([b"frontend-0", message])
                else:
                    self._send("frontend-0", message)
            if (received := self._hub.receive(timeout_s=0.002)) is not None:
                self._take(*received)

    def _take(self, peer: str, message: FrontendMessage) -> None:
        if isinstance(message, FrontendHello) and not self.is_silent:
            self._session, self._num_deltas = message.session, 0
            self._send(peer, router_status())
            self._send(peer, RouterWelcome(boot_id=self.boot_id, num_kv_slots=NUM_KV_SLOTS))
        if isinstance(message, Submit) and self.answer is not None:
            for delta in self.answer(message):
                self._send(peer, token_delta([delta]))
        self.received.append(message)


@dataclass
class Running:
    """A served frontend."""

    port: int
    control: FakeControl
    task: asyncio.Task[int]
    run_dir: Path
    hubs: list[ScriptedHub] = field(default_factory=list)

    async def router_up(self, answer: Answer | None = None) -> ScriptedHub:
        """Start a router, introduce it, and wait until the frontend is ready."""
        number = len(self.hubs)
        hub = ScriptedHub(self.run_dir / f"hub-{number}", f"boot-{number}", answer)
        self.hubs.append(hub)
        await self.control.orders.put(RouterUp(address=hub.address, boot_id=hub.boot_id))
        await self.until_status("/readyz", 200)
        return hub

    async def router_down(self) -> None:
        await self.control.orders.put(RouterDown())

    async def drain(self, timeout_s: float) -> None:
        await self.control.orders.put(Drain(timeout_s=timeout_s))

    async def until_status(self, path: str, status: int) -> None:
        async with asyncio.timeout(60):
            while (await self.get(path))[0] != status:
                await asyncio.sleep(0.005)

    async def get(self, path: str) -> tuple[int, bytes]:
        client = await self.send(
            f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
        return await client.rest()

    async def send(self, request: str, *, receive_buffer_bytes: int | None = None) -> Client:
        connection = socket.socket()
        if receive_buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
        writer.write(request.encode())
        await writer.drain()
        return Client(reader, writer)

    async def post(
        self,
        path: str,
        body: str,
        *,
        close: bool = False,
        receive_buffer_bytes: int | None = None,
    ) -> Client:
        connection = "connection: close\r\n" if close else ""
        return await self.send(
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{connection}"
            f"content-type: application/json\r\ncontent-length: {len(body.encode())}\r\n\r\n{body}",
            receive_buffer_bytes=receive_buffer_bytes,
        )


@dataclass
class Client:
    """One connection, seen from the client."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    data: bytes = b""
    """Everything received so far."""

    async def until(self, text: bytes, count: int = 1) -> None:
        """Read until `text` has come so often."""
        async with asyncio.timeout(60):
            while self.data.count(text) < count:
                chunk = await self.reader.read(1024)
                assert chunk, self.data
                self.data += chunk

    async def rest(self) -> tuple[int, bytes]:
        """Read to the end of the connection; return status and everything after the head."""
        async with asyncio.timeout(60):
            self.data += await self.reader.read(-1)
        self.hang_up()
        head, _, body = self.data.partition(b"\r\n\r\n")
        return int(head.split()[1]), body

    def hang_up(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def running_frontend(
    run_dir: Path, *, send_buffer_bytes: int | None = None, **flags: Any
) -> AsyncIterator[Running]:
    """Serve the bundled model on a free port; the router comes with `router_up`."""
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer_bytes is not None:  # connections inherit it
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    port: int = listener.getsockname()[1]
    control = FakeControl()
    spec = ChildSpec(
        role=Role.FRONTEND,
        index=0,
        incarnation=0,
        boot_id="",
        config=ServeConfig(**flags),
        control_address="",
        listen_fd=listener.detach(),
    )
    connect: Callable[[], FakeControl] = lambda: control  # noqa: E731
    task = asyncio.create_task(_serve(spec, connect, TurnSelector()))
    running = Running(port, control, task, run_dir)
    try:
        await eventually(lambda: ChildReady() in control.sent or task.done())
        yield running
        if not task.done():
            await running.drain(0.0)
        assert await asyncio.wait_for(task, 60) == 0
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for hub in running.hubs:
            hub.stop()
