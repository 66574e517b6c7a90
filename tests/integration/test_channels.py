"""The channel contract, the same for ZeroMQ and memory, and what ZeroMQ alone must withstand."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from support import memory_channel
from support.grids import choose, more_when_long
from support.processes import PATIENCE_S, wait_for

from lightserve import channels as zmq_channels
from lightserve.channels import VERSION_BYTE, Codec, wait_readable
from lightserve.child import _report_failure, connect_control, control_name, last_words_name
from lightserve.config import ServeConfig
from lightserve.errors import ChannelFull, ProtocolError
from lightserve.messages.common import TokenSegment
from lightserve.messages.frontend_router import (
    Abort,
    ClassLoad,
    FrontendMessage,
    RequestDelta,
    RouterMessage,
    RouterStatus,
    Submit,
    TokenDelta,
)
from lightserve.messages.supervision import (
    ChildFailed,
    ChildMessage,
    ChildSpec,
    Drain,
    Role,
    SupervisorMessage,
)
from lightserve.types import FinishReason, RequestClass, RequestId, SamplingParams

TIMEOUT_S = PATIENCE_S
SUBMIT = Submit(
    request_id=RequestId(7),
    prompt=[TokenSegment(token_ids=b"\1\0\0\0")],
    max_tokens=3,
    eos_token_ids=[2],
    sampling=SamplingParams(temperature=0.5, seed=-(2**63)),
    request_class=RequestClass.BE,
    age_s=0.25,
)
DELTA = TokenDelta(
    requests=[
        RequestDelta(RequestId(1), [4, 5]),
        RequestDelta(RequestId(2), [], FinishReason.STOP),
    ]
)


@dataclass
class Wire:
    """One implementation: a hub, and how to connect to it."""

    hub: Any
    link: Callable[[str], Any]
    async_link: Callable[[str], Any]
    send_raw: Callable[[str, bytes], None]
    move: Callable[[], None] = lambda: None
    """No peer that is connected now can connect again."""


@pytest.fixture(params=["zmq", "memory"])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    with (_zmq_wire if request.param == "zmq" else _memory_wire)() as made:
        yield made


@contextmanager
def _zmq_wire(max_queued: int = 4096) -> Iterator[Wire]:
    up: dict[str, Any] = {"send_type": FrontendMessage, "recv_type": RouterMessage}
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/hub"
        hub = zmq_channels.bind_hub(
            address, send_type=RouterMessage, recv_type=FrontendMessage, max_queued=max_queued
        )
        ends: list[Any] = [hub]

        def link(name: str) -> Any:
            end = zmq_channels.connect_link(address, name=name, max_queued=max_queued, **up)
            ends.append(end)
            return end

        def async_link(name: str) -> Any:
            return zmq_channels.connect_async_link(address, name=name, **up)

        def send_raw(name: str, frame: bytes) -> None:
            _send_raw(address, name.encode(), frame)

        def move() -> None:
            nonlocal address
            Path(folder, "hub").rename(Path(folder, "moved"))
            address = f"ipc://{folder}/moved"

        try:
            yield Wire(hub, link, async_link, send_raw, move)
        finally:
            for end in ends:
                end.close()


@contextmanager
def _memory_wire(max_queued: int = 4096) -> Iterator[Wire]:
    hub = memory_channel.bind_hub(
        send_type=RouterMessage, recv_type=FrontendMessage, max_queued=max_queued
    )
    try:
        yield Wire(
            hub,
            hub.connect_link,
            hub.connect_async_link,
            lambda name, frame: hub.inject(frame, peer=name),
        )
    finally:
        hub.close()


def _send_raw(address: str, identity: bytes, *parts: bytes) -> None:
    """Send frames past the codec, as a hostile peer would."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, round(1e3 * TIMEOUT_S))
        if identity:  # otherwise ZeroMQ invents a name, which is not one of ours
            socket.setsockopt(zmq.IDENTITY, identity)
        socket.connect(address)
        socket.send_multipart(parts)


def _introduce(wire: Wire, link: Any, name: str) -> None:
    link.send(Abort(request_id=RequestId(0)))
    assert wire.hub.receive(TIMEOUT_S) == (name, Abort(request_id=RequestId(0)))


def test_round_trip_keeps_values_order_and_peers(wire: Wire) -> None:
    links = {name: wire.link(name) for name in ("frontend-0", "frontend-1")}
    for name, link in links.items():
        link.send(SUBMIT)
        assert wire.hub.receive(TIMEOUT_S) == (name, SUBMIT)
    for number in range(50):
        for link in links.values():
            link.send(Abort(request_id=RequestId(number)))
    got: dict[str, list[int]] = {name: [] for name in links}
    for _ in range(100):
        peer, message = wire.hub.receive(TIMEOUT_S)
        got[peer].append(message.request_id)
    assert got == {name: list(range(50)) for name in links}
    for name in links:
        wire.hub.send(name, DELTA)
    assert [link.receive(TIMEOUT_S) for link in links.values()] == [DELTA, DELTA]


def test_receive_without_a_message_returns_none_after_the_timeout(wire: Wire) -> None:
    link = wire.link("router")
    assert link.receive() is None
    assert wire.hub.receive() is None
    start_s = time.monotonic()
    assert link.receive(0.05) is None
    assert wire.hub.receive(0.05) is None
    assert time.monotonic() - start_s >= 0.1


def test_a_message_wakes_a_receiver_that_waits_for_ever(wire: Wire) -> None:
    link = wire.link("worker-0")
    _introduce(wire, link, "worker-0")
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(link.receive(None)))
    thread.start()
    time.sleep(0.05)
    wire.hub.send("worker-0", DELTA)
    thread.join(TIMEOUT_S)
    assert got == [DELTA]


def test_a_vanished_peer_loses_messages_silently(wire: Wire) -> None:
    wire.hub.send("frontend-9", DELTA)


def test_one_message_to_several_peers_is_encoded_once(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its order among other messages is kept; a peer that is not there loses it, no other does."""
    links = {name: wire.link(name) for name in ("worker-0", "worker-1")}
    for name, link in links.items():
        _introduce(wire, link, name)
    encoded: list[object] = []

    class Noting(Codec[Any, Any]):
        def encode(self, message: object) -> bytes:
            encoded.append(message)
            return super().encode(message)

    monkeypatch.setattr(wire.hub._codec, "__class__", Noting)
    wire.hub.send("worker-1", other := TokenDelta(requests=[]))
    wire.hub.send_to_all(iter(["worker-0", "worker-9", "worker-1"]), DELTA)
    assert encoded == [other, DELTA]
    assert links["worker-0"].receive(TIMEOUT_S) == DELTA
    assert [links["worker-1"].receive(TIMEOUT_S) for _ in range(2)] == [other, DELTA]


def test_a_reconnecting_peer_takes_over_its_name(wire: Wire) -> None:
    old = wire.link("frontend-0")
    _introduce(wire, old, "frontend-0")
    wire.move()  # ZeroMQ would have the old one come back and take the name in its turn
    new = wire.link("frontend-0")
    _introduce(wire, new, "frontend-0")
    wire.hub.send("frontend-0", DELTA)
    assert new.receive(TIMEOUT_S) == DELTA
    assert old.receive() is None


@pytest.mark.parametrize("make", [_zmq_wire, _memory_wire])
def test_a_full_queue_raises_channel_full(
    make: Callable[..., AbstractContextManager[Wire]],
) -> None:
    with make(max_queued=8) as wire:
        _fill_both_ways(wire)


def _fill_both_ways(wire: Wire) -> None:
    link = wire.link("frontend-0")
    _introduce(wire, link, "frontend-0")
    # Large frames: the kernel's socket buffers must not hide the limit.
    big = TokenDelta(requests=[RequestDelta(RequestId(1), [70000] * 100_000)])
    with pytest.raises(ChannelFull):
        for _ in range(200):
            wire.hub.send("frontend-0", big)
    big_up = msgspec.structs.replace(SUBMIT, prompt=[TokenSegment(token_ids=bytes(400_000))])
    with pytest.raises(ChannelFull):
        for _ in range(200):
            link.send(big_up)


@pytest.mark.parametrize("name", ["", "Router", "worker-", "worker-x", "a b", "../x", "x" * 40])
def test_peer_names_are_checked(wire: Wire, name: str) -> None:
    with pytest.raises(ValueError, match="not a peer name"):
        wire.link(name)


def test_messages_of_another_channel_and_giants_are_refused_at_the_sender(wire: Wire) -> None:
    link = wire.link("router")
    with pytest.raises(TypeError, match="Drain"):
        link.send(Drain(timeout_s=1.0))
    with pytest.raises(ProtocolError, match="exceeds"):
        giant = TokenSegment(token_ids=bytes(Submit.MAX_BYTES))
        link.send(msgspec.structs.replace(SUBMIT, prompt=[giant]))


BAD_FRAMES = {
    "empty": b"",
    "version only": VERSION_BYTE,
    "other version": b"\x7f" + msgspec.msgpack.encode(SUBMIT),
    "unknown tag": VERSION_BYTE + msgspec.msgpack.encode({"type": "Nope"}),
    "wrong direction": VERSION_BYTE + msgspec.msgpack.encode(DELTA),
    "unknown field": VERSION_BYTE
    + msgspec.msgpack.encode({"type": "Abort", "request_id": 1, "x": 2}),
    "wrong type": VERSION_BYTE + msgspec.msgpack.encode({"type": "Abort", "request_id": "1"}),
    "trailing bytes": VERSION_BYTE + msgspec.msgpack.encode(SUBMIT) + b"\0",
    "deep nesting": VERSION_BYTE + b"\x91" * 100_000,
    "bomb header": VERSION_BYTE + b"\xdd\xff\xff\xff\xff",
    "oversized": VERSION_BYTE + bytes(Submit.MAX_BYTES),
}


@pytest.mark.parametrize("frame", BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
def test_bad_frames_are_dropped_and_counted(wire: Wire, frame: bytes) -> None:
    wire.send_raw("frontend-0", frame)
    messages = []

    def is_rejected() -> bool:
        messages.append(wire.hub.receive(0.01))
        return bool(wire.hub.num_rejected)

    wait_for(is_rejected, "the frame")
    assert wire.hub.num_rejected == 1
    assert set(messages) == {None}
    _introduce(wire, wire.link("frontend-1"), "frontend-1")


def test_wait_readable_names_exactly_the_readable_sources(wire: Wire) -> None:
    link = wire.link("router")
    read_end, write_end = os.pipe()
    try:
        sources = [wire.hub, link, read_end]
        assert wait_readable(sources, 0.01) == []
        os.write(write_end, b"x")
        assert wait_readable(sources, None) == [read_end]
        link.send(SUBMIT)
        while wire.hub not in (ready := wait_readable(sources, None)):
            pass
        assert set(map(id, ready)) == {id(wire.hub), id(read_end)}
        os.read(read_end, 1)
        assert wire.hub.receive(TIMEOUT_S) == ("router", SUBMIT)
        wire.hub.send("router", DELTA)
        assert wait_readable(sources, TIMEOUT_S) == [link]
    finally:
        os.close(read_end)
        os.close(write_end)


def test_async_link_loses_nothing_to_cancellation(wire: Wire) -> None:
    """Cancel a receive at many moments while numbered messages arrive: all come, in order."""

    async def scenario() -> list[int]:
        link = wire.async_link("frontend-0")
        link.send(SUBMIT)
        await asyncio.to_thread(wire.hub.receive, TIMEOUT_S)
        got: list[int] = []

        async def collect() -> None:
            while True:
                message = await link.receive()
                got.append(message.num_steps)

        for number in range(200):
            task = asyncio.create_task(collect())
            wire.hub.send("frontend-0", _status(number))
            for _ in range(number % 5):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        while len(got) < 200:
            got.append((await asyncio.wait_for(link.receive(), TIMEOUT_S)).num_steps)
        link.close()
        return got

    assert asyncio.run(scenario()) == list(range(200))


def test_async_link_hears_what_arrives_while_it_sends(wire: Wire) -> None:
    """Sending must not swallow the edge that announces an arrival."""

    async def scenario() -> None:
        link = wire.async_link("frontend-0")
        link.send(SUBMIT)
        await asyncio.to_thread(wire.hub.receive, TIMEOUT_S)
        for number in range(100):
            receiving = asyncio.create_task(link.receive())
            await asyncio.sleep(0)
            wire.hub.send("frontend-0", _status(number))
            for _ in range(20):
                link.send(Abort(request_id=RequestId(number)))
            message = await asyncio.wait_for(receiving, TIMEOUT_S)
            assert message.num_steps == number
        link.close()

    asyncio.run(scenario())


def test_other_tasks_go_on_while_messages_wait(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightserve.channels.MAX_TURN_S", 0.0)

    async def scenario() -> list[int]:
        link = wire.async_link("frontend-0")
        link.send(SUBMIT)
        await asyncio.to_thread(wire.hub.receive, TIMEOUT_S)
        for number in range(51):
            wire.hub.send("frontend-0", _status(number))
        while not link.is_readable():
            await asyncio.sleep(0.001)
        turns: list[int] = []
        last = 0

        async def other() -> None:
            while last < 50:
                turns.append(last)
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        while last < 50:
            last = (await link.receive()).num_steps
        await task
        link.close()
        return turns

    assert set(asyncio.run(scenario())) == set(range(50))


def _status(number: int) -> RouterStatus:
    return RouterStatus(
        workers_ready=True,
        load=dict.fromkeys(RequestClass, ClassLoad(0, 0, 0)),
        num_used_slots=0,
        num_kv_slots=0,
        num_steps=number,
        stalled_s=0.0,
        worker_busy_s=0.0,
        worker_idle_s=0.0,
    )


MUTATIONS = st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), max_size=6)


@more_when_long
@settings(max_examples=choose(100, 300), deadline=None)
@given(noise=st.binary(max_size=200), mutations=MUTATIONS)
def test_fuzz_codec_never_raises_anything_but_protocol_error(
    noise: bytes, mutations: list[tuple[int, int]]
) -> None:
    codec: Codec[Any, Any] = Codec(send_type=FrontendMessage, recv_type=FrontendMessage)
    flipped = bytearray(codec.encode(SUBMIT))
    for position, mask in mutations:
        flipped[position % len(flipped)] ^= mask
    for frame in (noise, VERSION_BYTE + noise, bytes(flipped)):
        try:
            message = codec.decode(frame)
        except ProtocolError:
            continue
        assert isinstance(message, FrontendMessage)


NUM_NOISES = choose(60, 200)


@more_when_long
def test_fuzz_socket_survives_and_counts() -> None:
    """Random and bit-flipped frames, strange identities, extra parts, over a real socket."""
    with _zmq_wire() as wire:
        _fuzz(wire)


def _fuzz(wire: Wire) -> None:
    address = wire.hub._socket.raw.getsockopt_string(zmq.LAST_ENDPOINT)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.IDENTITY, b"frontend-3")
        socket.connect(address)
        valid = VERSION_BYTE + msgspec.msgpack.encode(SUBMIT)

        @settings(max_examples=NUM_NOISES, deadline=None)
        @given(noise=st.binary(max_size=300), position=st.integers(0, len(valid) - 1))
        def fuzz(noise: bytes, position: int) -> None:
            flipped = valid[:position] + bytes([valid[position] ^ 0xFF]) + valid[position + 1 :]
            socket.send(noise)
            socket.send(flipped)
            socket.send_multipart([valid, noise])

        fuzz()
        socket.send(VERSION_BYTE + msgspec.msgpack.encode(Abort(request_id=RequestId(99))))
        while (item := wire.hub.receive(TIMEOUT_S)) is not None:
            if item == ("frontend-3", Abort(request_id=RequestId(99))):
                break
        assert item is not None
    _send_raw(address, b"\xff\0evil", valid)
    _send_raw(address, b"", valid)
    rejected = wire.hub.num_rejected
    assert rejected >= 2 * NUM_NOISES
    _introduce(wire, wire.link("frontend-1"), "frontend-1")
    messages = []

    def are_rejected() -> bool:
        messages.append(wire.hub.receive(0.01))
        return bool(wire.hub.num_rejected == rejected + 2)

    wait_for(are_rejected, "both frames")
    assert set(messages) == {None}


def test_a_frame_above_zeromqs_limit_cuts_that_peer_only() -> None:
    with _zmq_wire() as wire:
        _send_giant(wire)


def _send_giant(wire: Wire) -> None:
    address = wire.hub._socket.raw.getsockopt_string(zmq.LAST_ENDPOINT)
    good = wire.link("frontend-1")
    _introduce(wire, good, "frontend-1")
    _send_raw(address, b"frontend-2", bytes(2 * Submit.MAX_BYTES))
    _introduce(wire, good, "frontend-1")
    assert wire.hub.receive(0.1) is None


def test_socket_files_are_private(tmp_path: Path) -> None:
    hub = zmq_channels.bind_hub(
        f"ipc://{tmp_path}/hub", send_type=RouterMessage, recv_type=FrontendMessage
    )
    assert stat.S_IMODE((tmp_path / "hub").stat().st_mode) == 0o600
    hub.close()


def test_the_reason_of_a_failure_arrives_although_the_childs_own_link_comes_later(
    tmp_path: Path,
) -> None:
    """One of the same name would take over, and what the first has sent would often be lost."""
    hub = zmq_channels.bind_hub(
        f"ipc://{tmp_path}/hub", send_type=SupervisorMessage, recv_type=ChildMessage
    )
    config = ServeConfig(model="none")
    for number in range(10):
        spec = ChildSpec(
            role=Role.WORKER,
            index=number,
            incarnation=0,
            config=config,
            control_address=f"ipc://{tmp_path}/hub",
            boot_id="0123456789abcdef",
        )
        speaking = threading.Thread(target=_report_failure, args=(spec, f"reason {number}"))
        speaking.start()
        own = connect_control(spec)
        speaking.join()
        name = last_words_name(control_name(spec))
        assert hub.receive(TIMEOUT_S) == (name, ChildFailed(f"reason {number}"))
        own.close()
    hub.close()


def test_a_message_sent_just_before_close_and_exit_arrives(tmp_path: Path) -> None:
    """A child's last word (ChildFailed) is queued, closed, and the process is gone."""
    hub = zmq_channels.bind_hub(
        f"ipc://{tmp_path}/hub", send_type=RouterMessage, recv_type=FrontendMessage
    )
    script = (
        "import os, sys\n"
        "from lightserve.channels import connect_link\n"
        "from lightserve.messages.frontend_router import *\n"
        "link = connect_link(sys.argv[1], name='router', send_type=FrontendMessage,"
        " recv_type=RouterMessage, linger_s=60.0)\n"
        "link.send(Abort(request_id=5)); link.close(); os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", script, f"ipc://{tmp_path}/hub"], check=True, timeout=600)
    assert hub.receive(TIMEOUT_S) == ("router", Abort(request_id=RequestId(5)))
    hub.close()
