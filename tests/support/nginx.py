"""nginx with the shipped file docker/nginx.conf, before replicas on this machine."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from support.processes import PATIENCE_S, wait_for

CONFIG = Path(__file__).resolve().parents[2] / "docker" / "nginx.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
"""None: not installed."""


@contextmanager
def running_nginx(folder: Path, ports: Sequence[int], *changes: tuple[str, str]) -> Iterator[str]:
    """Run it with the three replicas on these ports of 127.0.0.1; yields its URL.

    Only addresses and paths differ from the shipped file, but for `changes`: what stands there, and
    what stands in its place.
    """
    assert NGINX is not None
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    changes += (("/tmp/", f"{folder}/"), ("listen 8080", f"listen 127.0.0.1:{port}"))
    changes += tuple((f"replica-{n}:8000", f"127.0.0.1:{p}") for n, p in enumerate(ports, start=1))
    text = CONFIG.read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text("daemon off;\n" + text)
    process = subprocess.Popen([NGINX, "-c", str(folder / "nginx.conf")], stderr=subprocess.PIPE)
    try:
        wait_for(lambda: _answers(port), "nginx")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
