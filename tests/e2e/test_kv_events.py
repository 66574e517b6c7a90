"""What a gateway hears of a live server's prefix cache."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq
from support.live_server import LiveServer, live_server
from support.processes import PATIENCE_S

PROMPT = "The fox went into the wood and saw a light far away behind the old trees."
BLOCK = 4


def answer(server: LiveServer) -> dict[str, Any]:
    body = {"model": server.model, "prompt": PROMPT, "max_tokens": 1, "return_token_ids": True}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    value: dict[str, Any] = response.json()
    return value


class Mirror:
    """What is cached, as the events have it."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        """Hash of the block before, and tokens, by hash."""
        self.num_cleared = 0
        self.numbers: list[int] = []

    def read(self, timeout_ms: int) -> None:
        """Take in what comes until nothing does for so long."""
        while self._socket.poll(timeout_ms):
            _, number, payload = self._socket.recv_multipart()
            self.numbers.append(int.from_bytes(number, "big"))
            for event in msgspec.msgpack.decode(payload)[1]:
                self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "BlockStored":
            before = event["parent_block_hash"]
            for index, block in enumerate(event["block_hashes"]):
                start = index * event["block_size"]
                tokens = event["token_ids"][start : start + event["block_size"]]
                self.blocks[block] = (before, tokens)
                before = block
        elif event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                del self.blocks[block]
        else:
            self.blocks.clear()
            self.num_cleared += 1

    def prefixes(self) -> list[list[int]]:
        """The tokens up to the end of each block."""
        found = []
        for at in self.blocks:
            tokens: list[int] = []
            block: int | None = at
            while block is not None:
                block, own = self.blocks[block]
                tokens = own + tokens
            found.append(tokens)
        return found


def test_blocks_come_and_go_with_prompts_and_workers(run_parent: Path, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/kv-events"
    flags = ("--kv-events", address, "--kv-events-block-size", str(BLOCK))
    with (
        live_server(run_parent, *flags) as server,
        zmq.Context() as context,
        context.socket(zmq.SUB) as socket,
    ):
        socket.linger = 0
        socket.connect(address)
        socket.subscribe(b"")
        time.sleep(0.5)  # for the subscription to arrive; what comes before is not of interest
        mirror = Mirror(socket)
        prompt = answer(server)["choices"][0]["prompt_token_ids"]
        mirror.read(2000)
        longest = max(mirror.prefixes(), key=len)
        assert longest == prompt[: len(longest)]
        assert 0 <= len(prompt) - len(longest) < 2 * BLOCK  # the last token is never looked up
        answer(server)
        before = set(mirror.blocks)
        mirror.read(2000)
        assert set(mirror.blocks) == before, "the same prompt, no other block"
        server.tree()["worker-0"].send_signal(signal.SIGKILL)
        deadline_s = time.monotonic() + PATIENCE_S
        while mirror.num_cleared == 0 and time.monotonic() < deadline_s:
            mirror.read(200)
        assert mirror.num_cleared == 1 and not mirror.blocks
        server.wait_ready()
        assert mirror.numbers == list(range(mirror.numbers[0], mirror.numbers[-1] + 1))


def test_an_address_that_cannot_be_bound_ends_the_start(run_parent: Path, tmp_path: Path) -> None:
    server = LiveServer(("--kv-events", f"ipc://{tmp_path}/no/such/directory"), run_parent)
    try:
        assert server.process.wait(60.0) == 1
    finally:
        server.process.kill()
        server.close()
    assert "--kv-events: cannot bind" in server.stderr
