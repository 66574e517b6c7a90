"""A PostgreSQL server of a test's own: on a free port of 127.0.0.1, with its data in /tmp."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NO_USER = 65534
"""The number of the user, and of the group, without any rights."""
BINARIES = ("postgres", "initdb", "pg_ctl")


def missing() -> str | None:
    """Why there can be no such server here; None: there can."""
    if absent := [name for name in BINARIES if shutil.which(name) is None]:
        return f"PostgreSQL is not installed: {', '.join(absent)}"
    try:
        import psycopg  # noqa: F401
    except ModuleNotFoundError:
        return "psycopg is not installed"
    return None


class PostgresServer:
    """See the module; ended by `close`."""

    def __init__(self, *, is_durable: bool = False) -> None:
        """`is_durable`: whether commits wait for the disk."""
        self._base = Path(tempfile.mkdtemp(prefix="lightserve-postgres-"))
        self._base.chmod(0o755)
        self._data = self._base / "data"
        self._data.mkdir()
        self._user: dict[str, Any] = {}
        if os.getuid() == 0:  # PostgreSQL refuses to run as root
            self._user = {"user": NO_USER, "group": NO_USER, "extra_groups": []}
            for path in (self._base, self._data):
                os.chown(path, NO_USER, NO_USER)
        self._databases: set[str] = set()
        initdb = ("initdb", "-U", "store", "-A", "trust", "-N", "-E", "UTF8", "--no-locale")
        self._call(*initdb, "-D", str(self._data))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        settings = {
            "listen_addresses": "'127.0.0.1'",
            "port": self.port,
            "unix_socket_directories": "''",
            "max_connections": 50,
            "fsync": "on" if is_durable else "off",
        }
        with (self._data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = {value}\n" for name, value in settings.items())
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        log = str(self._base / "log")
        self._call("pg_ctl", "-D", str(self._data), "-w", "-l", log, "start")

    def stop(self, mode: str = "fast") -> None:
        """Stop it; `immediate`: as a crash does."""
        self._call("pg_ctl", "-D", str(self._data), "-w", "-m", mode, "stop")

    def database(self, name: str) -> str:
        """The URL of a database, which is made when it is named first."""
        import psycopg

        if name not in self._databases:
            with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
                connection.execute(f'CREATE DATABASE "{name}"'.encode())
            self._databases.add(name)
        return self._url(name)

    def _url(self, name: str) -> str:
        return f"postgresql://store@127.0.0.1:{self.port}/{name}"

    def close(self) -> None:
        """End it and remove its data."""
        if (self._data / "postmaster.pid").exists():
            self.stop("immediate")
        shutil.rmtree(self._base)

    def _call(self, *command: str) -> None:
        subprocess.run(
            command,
            check=True,
            cwd=self._base,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            timeout=60,
            **self._user,
        )
