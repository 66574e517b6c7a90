"""Options of a server whose ranks are spread over several machines (nodes)."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from lightserve.config.fields import flag_name, option
from lightserve.errors import ConfigError

DEFAULT_NODE_PORT = 29500
DEFAULT_NODE_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """See the module's docstring."""

    nnodes: int = option(
        1,
        "Machines over which the ranks of --tp are spread, as many on each. All are given the same"
        " options but for --node-rank.",
        low=1,
        high=64,
    )
    node_rank: int = option(
        0,
        "Which of the --nnodes this is: 0 serves, the others run workers for it and nothing else.",
        low=0,
        high=63,
    )
    master_addr: str = option(
        "",
        "Address of node 0 in a network that is the nodes' own: IPv4, or a name for it.",
    )
    master_port: int = option(
        DEFAULT_NODE_PORT,
        "Port of --master-addr where node 0 awaits the others; it takes further ones as needed.",
        low=1,
        high=65535,
    )
    node_key_file: str = option(
        "",
        "The key that all nodes have and nothing else may, as lightserve node-key writes it.",
    )
    node_timeout_s: float = option(
        DEFAULT_NODE_TIMEOUT_S,
        "A node that is silent for this time is lost, and its group of workers replaced once it is"
        " back.",
        low=1.0,
        high=3600.0,
    )

    def check_nodes(self, *, tp: int) -> None:
        """Refuse nodes without a key or an address of their own; `tp` is another field."""
        if self.nnodes == 1:
            for name, plain in (
                *(("node_rank", 0), ("master_addr", ""), ("node_key_file", "")),
                ("master_port", DEFAULT_NODE_PORT),
                ("node_timeout_s", DEFAULT_NODE_TIMEOUT_S),
            ):
                if getattr(self, name) != plain:
                    raise ConfigError(f"{flag_name(name)} needs --nnodes, at least 2")
            return
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"--node-rank must be below --nnodes ({self.nnodes}), got {self.node_rank}"
            )
        if tp % self.nnodes:
            raise ConfigError(f"--tp must be a multiple of --nnodes ({self.nnodes}), got {tp}")
        if not self.node_key_file:
            raise ConfigError(
                "--nnodes needs --node-key-file: nothing else keeps strangers from the workers"
            )
        if not self.master_addr or "*" in self.master_addr or _is_no_ipv4(self.master_addr):
            raise ConfigError(
                "--master-addr must be node 0's own IPv4 address, or a name that stands for it, and"
                f" never that of all interfaces, got {self.master_addr!r}"
            )


def _is_no_ipv4(text: str) -> bool:
    """Whether it is an address, but of IPv6, or one that stands for all of a machine's."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return not text.strip("[]") or ":" in text or "/" in text
    return address.version != 4 or address.is_unspecified or address.is_multicast
