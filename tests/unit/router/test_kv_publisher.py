"""Events of the prefix cache, from the tree to a subscriber."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import zmq
import zmq.auth

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.router import kv_publisher
from lightserve.router.config import make_scheduler_config
from lightserve.router.kv.block_events import (
    AllBlocksCleared,
    BlockEvents,
    BlockRemoved,
    BlockStored,
    block_hashes,
)
from lightserve.router.kv.prefix_tree import PrefixTree
from lightserve.router.kv_publisher import EventBatch, KVPublisher

WAIT_MS = 20_000
SILENCE_MS = 300
STORED = BlockStored(
    block_hashes=[1, 2**64 - 1],
    parent_block_hash=None,
    token_ids=[5, 6],
    block_size=1,
    lora_id=None,
    medium="GPU",
    lora_name=None,
)


def tokens(start: int, end: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.arange(start, end, dtype=np.int32)


def test_blocks_of_a_prompt_that_grows_and_goes() -> None:
    events = BlockEvents(4)
    tree = PrefixTree(events=events)
    lease, _ = tree.acquire("salt", tokens(0, 0), is_real_time=True)
    tree.extend(lease, tokens(0, 6), tokens(100, 106))
    hashes = block_hashes("salt", tokens(0, 12), 4)
    assert len(set(hashes)) == 3 and hashes != block_hashes("", tokens(0, 12), 4)
    (stored,) = events.take()
    assert stored == BlockStored(
        block_hashes=hashes[:1],
        parent_block_hash=None,
        token_ids=[0, 1, 2, 3],
        block_size=4,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[("salt",)],
    )
    tree.extend(lease, tokens(6, 7), tokens(106, 107))
    assert events.take() == []  # no block has ended
    tree.extend(lease, tokens(7, 13), tokens(107, 113))
    (stored,) = events.take()
    assert isinstance(stored, BlockStored)
    assert (stored.parent_block_hash, stored.block_hashes) == (hashes[0], hashes[1:])
    assert stored.token_ids == list(range(4, 12)) and stored.extra_keys is None
    tree.release(lease)
    tree.evict(2)  # tokens 12 and 11: the last block has lost its end
    removed = [one for event in events.take() for one in event.block_hashes]  # type: ignore[union-attr]
    assert removed == hashes[2:]
    tree.evict(11)
    assert tree.num_resident == 0
    removed = [one for event in events.take() for one in event.block_hashes]  # type: ignore[union-attr]
    assert sorted(removed) == sorted(hashes[:2])


@contextmanager
def subscriber(address: str, **options: bytes) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        for name, value in options.items():
            setattr(socket, name, value)
        socket.linger = 0
        socket.connect(address)
        socket.subscribe(b"")
        yield socket


def first_message(publisher: KVPublisher, socket: zmq.Socket[bytes]) -> list[bytes]:
    """Publish until the subscription has arrived."""
    for _ in range(WAIT_MS // 20):
        publisher.publish([STORED], now_s=5.0)
        if socket.poll(20):
            return socket.recv_multipart()
    raise AssertionError("no message came")


def test_a_message_is_what_vllm_writes() -> None:
    publisher = KVPublisher("tcp://127.0.0.1:*")
    try:
        publisher.publish([], now_s=1.0)
        with subscriber(publisher.address) as socket:
            topic, number, payload = first_message(publisher, socket)
            assert topic == b"" and len(number) == 8
            assert msgspec.msgpack.decode(payload) == [
                5.0,
                [
                    {
                        "type": "BlockStored",
                        "block_hashes": [1, 2**64 - 1],
                        "parent_block_hash": None,
                        "token_ids": [5, 6],
                        "block_size": 1,
                        "lora_id": None,
                        "medium": "GPU",
                        "lora_name": None,
                    }
                ],
                None,
            ]
            publisher.publish(
                [BlockRemoved(block_hashes=[7], medium="GPU"), AllBlocksCleared()], now_s=6.0
            )
            while True:
                assert socket.poll(WAIT_MS)
                _, later, payload = socket.recv_multipart()
                if (message := msgspec.msgpack.decode(payload))[0] == 6.0:
                    break
            assert int.from_bytes(later, "big") > int.from_bytes(number, "big")
            assert message[1] == [
                {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"},
                {"type": "AllBlocksCleared"},
            ]
    finally:
        publisher.close()


@pytest.fixture
def keys_dir(tmp_path: Path) -> Path:
    zmq.auth.create_certificates(tmp_path, "server")
    (tmp_path / "clients").mkdir()
    zmq.auth.create_certificates(tmp_path / "clients", "gateway")
    zmq.auth.create_certificates(tmp_path, "stranger")
    return tmp_path


def test_keys_decide_on_subscribers(keys_dir: Path) -> None:
    server, _ = zmq.auth.load_certificate(keys_dir / "server.key")
    publisher = KVPublisher("tcp://127.0.0.1:*", str(keys_dir))

    def options(path: Path) -> dict[str, bytes]:
        public, secret = zmq.auth.load_certificate(path)
        assert secret is not None
        return {"curve_serverkey": server, "curve_publickey": public, "curve_secretkey": secret}

    try:
        known = options(keys_dir / "clients" / "gateway.key_secret")
        stranger = options(keys_dir / "stranger.key_secret")
        with (
            subscriber(publisher.address) as plain,
            subscriber(publisher.address, **stranger) as unknown,
            subscriber(publisher.address, **known) as gateway,
        ):
            assert first_message(publisher, gateway)[0] == b""
            publisher.publish([STORED], now_s=6.0)
            assert not plain.poll(SILENCE_MS) and not unknown.poll(SILENCE_MS)
    finally:
        publisher.close()


def test_what_cannot_be_used_is_named(keys_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--kv-events-keys.*nowhere"):
        KVPublisher("tcp://127.0.0.1:*", str(tmp_path / "nowhere"))
    for path in (keys_dir / "clients").iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match="no client's public key"):
        KVPublisher("tcp://127.0.0.1:*", str(keys_dir))
    taken = KVPublisher("tcp://127.0.0.1:*")
    try:
        with pytest.raises(ConfigError, match="--kv-events: cannot bind"):
            KVPublisher(taken.address)
    finally:
        taken.close()


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"kv_events": "127.0.0.1:5557"}, "--kv-events must be an address"),
        ({"kv_events": "tcp://127.0.0.1"}, "--kv-events must be an address"),
        ({"kv_events": "tcp://0.0.0.0:5557"}, "--kv-events-insecure"),
        ({"kv_events": "tcp://*:5557"}, "--kv-events-insecure"),
        ({"kv_events": "tcp://127.0.0.1:5557", "cache_policy": "off"}, "--cache-policy"),
        ({"kv_events_keys": "keys"}, "--kv-events-keys needs --kv-events"),
        ({"kv_events_insecure": True}, "--kv-events-insecure needs --kv-events"),
        ({"kv_events_block_size": 32}, "--kv-events-block-size needs --kv-events"),
        (
            {"kv_events": "tcp://*:5557", "kv_events_keys": "keys", "kv_events_insecure": True},
            "--kv-events-insecure contradicts --kv-events-keys",
        ),
    ],
)
def test_addresses_that_are_refused(flags: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig(**flags)
    assert word in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        {"kv_events": "ipc:///run/kv-events"},
        {"kv_events": "tcp://[::1]:5557"},
        {"kv_events": "tcp://*:5557", "kv_events_keys": "keys"},
        {"kv_events": "tcp://*:5557", "kv_events_insecure": True},
    ],
)
def test_addresses_that_are_taken(flags: dict[str, Any]) -> None:
    config = ServeConfig(kv_events_block_size=32, **flags)
    assert make_scheduler_config(config, max_model_len=64).kv.event_block_size == 32
    without = make_scheduler_config(ServeConfig(), max_model_len=64)
    assert without.kv.event_block_size == 0


def test_long_news_come_in_short_messages(tmp_path: Path) -> None:
    """So that the number of those that wait for a subscriber bounds their bytes."""
    num_blocks, size = 3000, 4
    stored = msgspec.structs.replace(
        STORED,
        block_hashes=[2**63 + number for number in range(num_blocks)],
        parent_block_hash=7,
        token_ids=list(range(num_blocks * size)),
        block_size=size,
        extra_keys=[("salt",), *[None] * (num_blocks - 1)],
    )
    removed = BlockRemoved(block_hashes=stored.block_hashes, medium="GPU")
    messages = list(kv_publisher._payloads([stored, AllBlocksCleared(), removed], 1.0))
    assert max(map(len, messages)) <= kv_publisher.MAX_MESSAGE_BYTES
    batches = [msgspec.msgpack.decode(message, type=EventBatch) for message in messages]
    events = [event for batch in batches for event in batch.events]
    parts = [event for event in events if isinstance(event, BlockStored)]
    assert [each for part in parts for each in part.block_hashes] == stored.block_hashes
    assert [each for part in parts for each in part.token_ids] == stored.token_ids
    parents = [part.parent_block_hash for part in parts]
    assert parents == [7, *(part.block_hashes[-1] for part in parts[:-1])]
    assert parts[0].extra_keys is not None and parts[0].extra_keys[0] == ("salt",)
    assert all(part.extra_keys is None for part in parts[1:])
    ends = [event for event in events if isinstance(event, BlockRemoved)]
    assert [each for end in ends for each in end.block_hashes] == removed.block_hashes
    assert events.index(AllBlocksCleared()) == len(parts)


def test_what_waits_for_a_subscriber_that_is_stopped_is_bounded_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_publisher, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(kv_publisher, "SILENCE_S", 1.0)
    address = f"ipc://{tmp_path / 'events'}"
    code = "import sys, zmq; s = zmq.Context().socket(zmq.SUB); s.subscribe(b'');"
    code += "s.connect(sys.argv[1]); s.recv(); print('here', flush=True); s.recv(); input()"
    publisher = KVPublisher(address)
    monitor = publisher._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    process = subprocess.Popen(
        [sys.executable, "-c", code, address], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        while not select.select([process.stdout], [], [], 0.02)[0]:
            publisher.publish([AllBlocksCleared()], now_s=1.0)
        process.send_signal(signal.SIGSTOP)
        stored = msgspec.structs.replace(
            STORED, block_hashes=[2**63] * 1000, token_ids=[70_000] * 1000
        )
        before = psutil.Process().memory_info().rss
        for _ in range(15_000):
            publisher.publish([stored], now_s=1.0)
        grown = psutil.Process().memory_info().rss - before
        assert grown <= 2 * kv_publisher.MAX_UNSENT * kv_publisher.MAX_MESSAGE_BYTES
        assert monitor.poll(WAIT_MS), "it is disconnected"
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()
        publisher._socket.disable_monitor()
        monitor.close(linger=0)
        publisher.close()
