"""The specifications of children: who is told what at birth."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from lightserve.api_keys import ApiKey
from lightserve.config import ServeConfig
from lightserve.messages.supervision import ChildSpec, Role
from lightserve.supervisor.run_dir import RunDir

MAX_FRONTENDS_BY_CORES = 8


def num_frontends(config: ServeConfig) -> int:
    """Return how many frontend processes there are."""
    by_cores = min(MAX_FRONTENDS_BY_CORES, len(os.sched_getaffinity(0)) // 4)
    return config.http_workers or max(1, by_cores)


@dataclass(frozen=True)
class RouterBoot:
    """One life of a router: a fresh id, and sockets that no earlier router's peers know."""

    number: int
    boot_id: str
    frontends_address: str
    workers_address: str


@dataclass(frozen=True)
class SpecWriter:
    """Writes the specifications of one server's children."""

    config: ServeConfig
    run_dir: RunDir
    control_address: str
    listen_fd: int

    def boot(self, number: int) -> RouterBoot:
        """Name the `number`-th router boot."""
        return RouterBoot(
            number=number,
            boot_id=secrets.token_hex(8),
            frontends_address=self.run_dir.address(f"frontends-{number}"),
            workers_address=self.run_dir.address(f"workers-{number}"),
        )

    def frontend(self, index: int, generation: int, api_keys: Sequence[ApiKey]) -> ChildSpec:
        """Specify a frontend's `generation`-th start."""
        return ChildSpec(
            role=Role.FRONTEND,
            index=index,
            generation=generation,
            boot_id="",
            config=self.config,
            control_address=self.control_address,
            listen_fd=self.listen_fd,
            api_keys=list(api_keys),
        )

    def router(self, boot: RouterBoot) -> ChildSpec:
        """Specify the router of this boot."""
        return ChildSpec(
            role=Role.ROUTER,
            index=0,
            generation=boot.number,
            boot_id=boot.boot_id,
            config=self.config,
            control_address=self.control_address,
            frontends_address=boot.frontends_address,
            workers_address=boot.workers_address,
        )

    def worker(self, boot: RouterBoot, rank: int, generation: int) -> ChildSpec:
        """Specify one rank of this boot's `generation`-th worker group."""
        store = self.run_dir.path / f"store-{boot.number}-{generation}"
        return ChildSpec(
            role=Role.WORKER,
            index=rank,
            generation=generation,
            boot_id=boot.boot_id,
            config=self.config,
            control_address=self.control_address,
            workers_address=boot.workers_address,
            collective_store=str(store) if self.config.tp > 1 else "",
        )
