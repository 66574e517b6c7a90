"""Nodes of one server: who is taken, when one is lost, and what a node does; without processes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from support.processes import PATIENCE_S, wait_for
from unit.supervisor.test_fleet import _Spawner

from lightserve.channels import Codec, ZmqLink
from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.messages.common import PROTOCOL_VERSION
from lightserve.messages.supervision import (
    NODE_LINK_VERSION,
    ChildFailed,
    ChildReady,
    NodeGroup,
    NodeOrder,
    NodeReport,
)
from lightserve.node_key import read_node_key, write_node_key
from lightserve.supervisor.node import Node
from lightserve.supervisor.nodes import QUIET_S, Nodes, terms_of, url_of
from lightserve.supervisor.spawn import RunDir, SpecWriter

GROUP = NodeGroup(
    boot_id="boot",
    boot_number=0,
    incarnation=3,
    workers_address="tcp://127.0.0.1:1",
    store_address="tcp://127.0.0.1:2",
)


def _config(key: Path, **changes: object) -> ServeConfig:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"nnodes": 2, "tp": 4, "master_addr": "127.0.0.1", "master_port": port}
    return ServeConfig(**{**options, "node_key_file": str(key), **changes})  # type: ignore[arg-type]


NodeLink = ZmqLink[NodeReport, NodeOrder]


class _Scene:
    """Node 0's end, on a clock that is put forward, and node 1's link."""

    def __init__(self, key: Path) -> None:
        self.key = key
        self.config = _config(key)
        self.nodes = Nodes(self.config, read_node_key(key))
        self.now_s = 1000.0
        self.report = NodeReport(
            protocol_version=PROTOCOL_VERSION,
            node_rank=1,
            session=7,
            terms=terms_of(self.config),
        )
        self.links: list[NodeLink] = []

    def link(self, name: str = "node-1-7", key: bytes | None = None) -> NodeLink:
        codec = Codec[NodeReport, NodeOrder](
            send_type=NodeReport, recv_type=NodeOrder, version=NODE_LINK_VERSION
        )
        address = f"tcp://127.0.0.1:{self.config.master_port}"
        secret = read_node_key(self.key) if key is None else key
        self.links.append(ZmqLink(address, name, codec, node_key=secret))
        return self.links[-1]

    def say(self, link: NodeLink, **changes: object) -> str:
        """Have node 1 report, and node 0 take it in; returns the loss that this means."""
        link.send(msgspec.structs.replace(self.report, **changes))
        wait_for(self.nodes.hub.is_readable, "the report")
        return self.nodes.turn(self.now_s)

    def order(self, link: NodeLink) -> NodeOrder:
        """Return what node 1 is told next."""
        order = link.receive(PATIENCE_S)
        assert order is not None
        return order


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[_Scene]:
    write_node_key(tmp_path / "key")
    scene = _Scene(tmp_path / "key")
    yield scene
    for link in scene.links:
        link.close()
    scene.nodes.hub.close()


def test_a_node_is_there_runs_a_group_and_is_lost_when_it_is_silent(scene: _Scene) -> None:
    link = scene.link()
    assert scene.nodes.missing() == "1"
    assert scene.say(link) == ""
    assert scene.order(link) == NodeOrder()
    assert not scene.nodes.missing() and not scene.nodes.are_ready

    scene.nodes.order(GROUP)
    wait_for(lambda: scene.order(link).group == GROUP, "the order")
    assert scene.say(link, group=GROUP.name) == "" and not scene.nodes.are_ready
    assert scene.say(link, group=GROUP.name, is_ready=True) == "" and scene.nodes.are_ready
    assert scene.nodes.missing() == "1", "it has to be clear before another one"

    scene.now_s += scene.config.node_timeout_s - 0.1
    assert scene.nodes.turn(scene.now_s) == ""
    scene.now_s += 0.2
    assert scene.nodes.turn(scene.now_s) == "node 1 was silent for 10 s (--node-timeout-s)"
    assert not scene.nodes.are_ready

    scene.nodes.order(None)
    assert scene.say(link, group=GROUP.name, is_ready=True) == ""
    assert scene.nodes.missing() == "1", "it is back, with remains"
    assert scene.say(link) == "" and not scene.nodes.missing()


def test_why_a_group_is_lost(scene: _Scene) -> None:
    link = scene.link()
    scene.say(link)
    scene.nodes.order(GROUP)
    scene.say(link, group=GROUP.name)
    failure = "worker-2: no memory"
    assert scene.say(link, group=GROUP.name, failure=failure) == f"node 1: {failure}"

    again = scene.link("node-1-8")
    assert scene.say(again, session=8) == "", "the first may still be there"
    scene.now_s += QUIET_S
    assert scene.say(again, session=8) == "node 1 has been started again"
    assert scene.say(again, session=8, is_leaving=True) == "node 1 was told to end"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol_version": 1}, "node 1 speaks version 1 of the protocol, node 0 "),
        ({"kv_memory": '"1GiB"'}, '--kv-memory: node 1 has "1GiB", node 0 "auto"'),
        ({"dtype": '"bfloat16"'}, '--dtype: node 1 has "bfloat16", node 0 "auto"'),
        ({"model": "other"}, "--model: node 1 has other files of it than node 0"),
        ({"node_rank": 2}, "--node-rank must be 1 to 1, got 2"),
    ],
)
def test_a_node_that_differs_is_told_in_what(
    scene: _Scene, changes: dict[str, object], reason: str
) -> None:
    link = scene.link()
    own = {name: value for name, value in changes.items() if name in NodeReport.__struct_fields__}
    terms = {name: value for name, value in changes.items() if name not in own}
    scene.say(link, **own, terms={**scene.report.terms, **terms})
    assert scene.order(link).refusal.startswith(reason)
    assert scene.nodes.missing() == "1"


def test_what_has_not_the_key_gets_no_word_in_and_no_answer(scene: _Scene, tmp_path: Path) -> None:
    write_node_key(tmp_path / "other")
    strangers = [
        scene.link("node-1-1", b""),
        scene.link("node-1-2", read_node_key(tmp_path / "other")),
    ]
    for stranger in strangers:
        stranger.send(scene.report)
    wait_for(lambda: scene.nodes.hub.num_rejected >= 2, "both are refused")
    scene.nodes.turn(scene.now_s)
    assert scene.nodes.missing() == "1"
    friend = scene.link()
    scene.say(friend)
    assert scene.order(friend) == NodeOrder()
    assert [stranger.receive(0.05) for stranger in strangers] == [None, None]


def test_node_zero_says_why_it_ends(scene: _Scene) -> None:
    link = scene.link()
    scene.say(link)
    assert scene.order(link) == NodeOrder()
    with pytest.raises(ConfigError), scene.nodes:
        raise ConfigError("no reason")
    wait_for(lambda: scene.order(link).end == "no reason", "the last word")


def test_a_key_is_written_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_node_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(zmq.curve_public(read_node_key(path))) == 40
    with pytest.raises(ConfigError, match="File exists"):
        write_node_key(path)
    for text in ("", "short", "x" * 41, "\\" * 40):
        path.write_text(text)
        with pytest.raises(ConfigError, match="has no key"):
            read_node_key(path)


class _OtherNode:
    """Node 1 of two with four ranks, whose workers are no processes."""

    def __init__(self, folder: Path) -> None:
        write_node_key(folder / "key")
        config = _config(folder / "key", node_rank=1)
        run_dir = RunDir(str(folder))
        self.spawner = _Spawner()
        specs = SpecWriter(config, run_dir, run_dir.address("control"), -1, node_key=b"key")
        always = NodeReport(protocol_version=1, node_rank=1, session=7, terms={})
        self.node = Node(specs, self.spawner, always)

    def follow(self, group: NodeGroup | None) -> NodeReport:
        self.node.wanted = group
        self.node.follow()
        return self.node.report()


def test_a_nodes_workers_live_and_die_as_one(tmp_path: Path) -> None:
    scene = _OtherNode(tmp_path)
    node = scene.node
    assert scene.follow(None).group == ""
    assert scene.follow(GROUP) == msgspec.structs.replace(node.report(), group=GROUP.name)
    first, second = scene.spawner.children
    assert [child.spec.index for child in (first, second)] == [2, 3], "its share of the ranks"
    assert {child.spec.workers_address for child in (first, second)} == {GROUP.workers_address}
    assert first.spec.collective_store == GROUP.store_address and first.spec.listen_fd == -1
    node.on_message(first.control_name, ChildReady())
    assert not node.report().is_ready
    node.on_message(second.control_name, ChildReady())
    assert node.report().is_ready

    node.on_message(second.control_name, ChildFailed(reason="no memory"))
    node.on_exit(second)
    assert first.was_killed and first.is_doomed
    failed = node.report()
    assert (failed.failure, failed.group) == ("worker-3: no memory", GROUP.name)
    node.on_exit(first)
    assert scene.follow(GROUP).failure == "worker-3: no memory", "it is not tried again unasked"
    assert (scene.follow(None).failure, node.report().group) == ("", "")

    following = msgspec.structs.replace(GROUP, incarnation=4)
    scene.follow(following)
    third = scene.spawner.children[-1]
    assert scene.follow(None).group == following.name, "there are remains"
    assert third.was_killed and len(scene.spawner.children) == 4
    for child in scene.spawner.children[2:]:
        node.on_exit(child)
    assert scene.follow(None).group == ""


def test_workers_that_are_not_ready_in_time_are_given_up(tmp_path: Path) -> None:
    scene = _OtherNode(tmp_path)
    scene.follow(GROUP)
    scene.node.check_deadlines(time.monotonic() + 601.0)
    assert all(child.was_killed for child in scene.spawner.children)
    assert scene.node.report().failure == "worker-2 was not ready after 600 s (--start-timeout-s)"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"nnodes": 1}, "--master-addr needs --nnodes, at least 2"),
        ({"tp": 3}, r"--tp must be a multiple of --nnodes \(2\), got 3"),
        ({"node_rank": 2}, r"--node-rank must be below --nnodes \(2\), got 2"),
        ({"node_key_file": ""}, "--nnodes needs --node-key-file"),
        *(
            ({"master_addr": address}, "--master-addr must be node 0's own IPv4 address")
            for address in ("", "*", "0.0.0.0", "::", "fd00::1", "[::]", "10.0.0.1:29500")
        ),
    ],
)
def test_nodes_without_a_key_or_an_address_of_their_own_are_refused(
    options: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{reason}"):
        _config(Path("key"), **options)


def test_each_node_has_its_share_of_the_ranks_and_agrees_on_what_they_compute_by() -> None:
    nodes = [_config(Path("key"), node_rank=rank, master_port=1) for rank in (0, 1)]
    assert [list(node.local_ranks) for node in nodes] == [[0, 1], [2, 3]]
    assert nodes[0].ranks_digest == nodes[1].ranks_digest
    assert nodes[0].ranks_digest != _config(Path("key"), master_port=1, max_num_seqs=3).ranks_digest
    assert nodes[0].ranks_digest == _config(Path("key"), master_port=1, port=1).ranks_digest


def test_the_address_of_a_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert url_of(listener) == f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        assert os.get_inheritable(listener.fileno()) is False
