"""The other nodes, as node 0 sees them: who is there, what they run, and when one is lost.

What they are to run is said over and over (`NodeOrder`), and they say over and over what they run
(`NodeReport`); a node whose last word is older than `--node-timeout-s` is not there. The fleet
alone decides what the loss of a node means.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from lightserve.channels import Codec, ZmqHub
from lightserve.config import ServeConfig
from lightserve.config.fields import flag_name
from lightserve.errors import ChannelFull, LightserveError, StartupError
from lightserve.logs import one_line
from lightserve.messages.common import PROTOCOL_VERSION
from lightserve.messages.supervision import (
    BEAT_S,
    NODE_LINK_VERSION,
    STOPPED,
    NodeGroup,
    NodeOrder,
    NodeReport,
)
from lightserve.models.config import load_model_config
from lightserve.models.weight_files import check_weights

log = logging.getLogger(__name__)

QUIET_S = 3.0
"""A node that was heard of within this time is no other that has the same rank."""
_MAX_QUEUED = 16
"""Messages to a node: each says all, so that old ones are worth nothing."""
_MODEL = "model"
"""Stands among the options for the files that --model has."""


def terms_of(config: ServeConfig) -> dict[str, str]:
    """Return what all nodes must agree on; `config.model` is a directory that has been checked.

    Of the model: its configuration, and the names and sizes of its weights.
    """
    path = Path(config.model)
    digest = hashlib.sha256((path / "config.json").read_bytes())
    model = load_model_config(path, has_draft_head=config.has_draft_head)
    files = check_weights(path, model)
    for file in sorted(set(files.file_of.values())):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return {**config.of_ranks, _MODEL: digest.hexdigest()[:16]}


def master_address(config: ServeConfig) -> str:
    """Return the IPv4 address that --master-addr stands for. Raises StartupError."""
    try:
        found = socket.getaddrinfo(config.master_addr, None, socket.AF_INET)
    except OSError as error:
        raise StartupError(f"--master-addr {config.master_addr}: {error.strerror}") from error
    return str(found[0][4][0])


def url_of(listener: socket.socket) -> str:
    """Return the address of a bound socket as channels and stores have it."""
    host, port = listener.getsockname()
    return f"tcp://{host}:{port}"


@dataclass
class _Node:
    """One of them, since it was heard of for the first time in its present life."""

    name: str
    """Under which it speaks."""
    report: NodeReport
    heard_s: float
    refusal: str = ""
    """Why it is not taken."""


class Nodes:
    """Node 0's end of the links. A context: at its end the other nodes end, too."""

    def __init__(self, config: ServeConfig, node_key: bytes) -> None:
        """Listen. `config.model` is a directory that has been checked.

        Raises:
            StartupError: --master-addr is no address of this machine, or its port is taken.
        """
        self.node_key = node_key
        self.host = master_address(config)
        self._config = config
        self._terms = terms_of(config)
        self._nodes: dict[int, _Node] = {}
        self._wanted: NodeGroup | None = None
        self._next_beat_s = 0.0
        listener = self.new_listener(config.master_port)
        codec = Codec[NodeOrder, NodeReport](
            send_type=NodeOrder, recv_type=NodeReport, version=NODE_LINK_VERSION
        )
        self.hub: ZmqHub[NodeOrder, NodeReport] = ZmqHub(codec, _MAX_QUEUED)
        self.hub.listen(listener, node_key, silence_s=config.node_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        reason = one_line(error) if isinstance(error, LightserveError) else STOPPED
        for node in self._nodes.values():
            self._send(node, NodeOrder(end=reason))
        self.hub.close()

    @property
    def next_due_s(self) -> float:
        """When (monotonic) `turn` has to be called next, whatever comes."""
        return self._next_beat_s

    def new_listener(self, port: int = 0) -> socket.socket:
        """Return a socket bound to node 0's address; 0 takes a free port. Raises StartupError."""
        try:
            return socket.create_server((self.host, port))
        except OSError as error:
            raise StartupError(
                f"--master-addr: cannot listen on {self.host} port {port}: {error.strerror}"
            ) from error

    def order(self, group: NodeGroup | None) -> None:
        """Have every node run this group, or nothing."""
        self._wanted = group
        self._beat()

    def turn(self, now_s: float) -> str:
        """Take in what has come; return why the group that was ordered is lost, or nothing."""
        losses = []
        while (item := self.hub.receive(0.0)) is not None:
            losses.append(self._on_report(*item, now_s))
        losses += [self._silence(node, now_s) for node in list(self._nodes.values())]
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + BEAT_S
            self._beat()
        lost = next((loss for loss in losses if loss), "")
        return lost if self._wanted is not None else ""

    def missing(self) -> str:
        """Name the nodes that are not there, or still have something of an earlier group."""
        others = range(1, self._config.nnodes)
        away = [str(rank) for rank in others if not self._is_clear(rank)]
        return ", ".join(away)

    @property
    def are_ready(self) -> bool:
        """Whether all run the group that was ordered."""
        wanted = self._wanted
        reports = [node.report for node in self._nodes.values() if not node.refusal]
        ready = [wanted is not None and r.group == wanted.name and r.is_ready for r in reports]
        return len(reports) == self._config.nnodes - 1 and all(ready)

    def _is_clear(self, rank: int) -> bool:
        node = self._nodes.get(rank)
        return node is not None and not node.refusal and not node.report.group

    def _on_report(self, name: str, report: NodeReport, now_s: float) -> str:
        """Take in what a node says; return why its workers are lost, if they are."""
        rank = report.node_rank
        node = self._nodes.get(rank)
        loss = ""
        if node is None or node.report.session != report.session:
            if node is not None and now_s < node.heard_s + QUIET_S:
                log.warning("node %d is there twice, or has been started again", rank)
                return ""
            loss = f"node {rank} has been started again" if node is not None else ""
            node = _Node(name, report, now_s, self._refusal(report))
            self._nodes[rank] = node
            if node.refusal:
                log.error("refused a node: %s", node.refusal)
            else:
                log.info("node %d is there", rank)
            self._send(node, self._order_for(node))
        if report.is_leaving:
            del self._nodes[rank]
            return f"node {rank} was told to end"
        node.heard_s, node.report = now_s, report
        if report.failure and self._wanted is not None and report.group == self._wanted.name:
            loss = f"node {rank}: {report.failure}"
        if node.refusal:
            del self._nodes[rank]
            return ""
        return loss

    def _silence(self, node: _Node, now_s: float) -> str:
        timeout_s = self._config.node_timeout_s
        if now_s < node.heard_s + timeout_s:
            return ""
        del self._nodes[node.report.node_rank]
        if self._wanted is None:
            log.warning("node %d has gone silent", node.report.node_rank)
        return f"node {node.report.node_rank} was silent for {timeout_s:g} s (--node-timeout-s)"

    def _refusal(self, report: NodeReport) -> str:
        """Return why a node cannot be one of this server's, in one line."""
        who = f"node {report.node_rank}"
        if report.protocol_version != PROTOCOL_VERSION:
            return (
                f"{who} speaks version {report.protocol_version} of the protocol, node 0"
                f" {PROTOCOL_VERSION}: they are different releases of lightserve"
            )
        for name, ours in self._terms.items():
            theirs = report.terms.get(name, "")
            if theirs == ours:
                continue
            if name == _MODEL:
                return f"--model: {who} has other files of it than node 0"
            return f"{flag_name(name)}: {who} has {theirs}, node 0 {ours}"
        if not 0 < report.node_rank < self._config.nnodes:
            return f"--node-rank must be 1 to {self._config.nnodes - 1}, got {report.node_rank}"
        return ""

    def _order_for(self, node: _Node) -> NodeOrder:
        return NodeOrder(refusal=node.refusal) if node.refusal else NodeOrder(group=self._wanted)

    def _beat(self) -> None:
        for node in self._nodes.values():
            self._send(node, self._order_for(node))

    def _send(self, node: _Node, order: NodeOrder) -> None:
        try:
            self.hub.send(node.name, order)
        except ChannelFull:
            log.debug("node %d does not read", node.report.node_rank)
