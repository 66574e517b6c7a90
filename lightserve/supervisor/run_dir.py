"""The private directory (0700) in which the sockets of one server lie.

Each holds a locked file while its server lives. A server killed by SIGKILL leaves its directory
behind; the next one to start under the same parent finds the lock free and removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from lightserve.errors import StartupError

_PREFIX = "lightserve-"
_LOCK_FILE = "lock"
_MAX_SOCKET_PATH_BYTES = 107
_LONGEST_SOCKET_NAME = "workers-999999"


class RunDir:
    """A fresh run directory; removed by `close`."""

    def __init__(self, parent: str) -> None:
        """Make one under `parent` ("" is the system's temporary directory).

        Raises:
            StartupError: the directory cannot be made, or its path is too long for sockets.
        """
        try:
            base = Path(parent or tempfile.gettempdir()).resolve()
        except FileNotFoundError as error:
            raise StartupError(
                "--run-dir: there is no temporary directory that can be written; name a directory"
            ) from error
        remove_stale(base)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        except OSError as error:
            raise StartupError(
                f"--run-dir: cannot make a directory in {base}: {error.strerror}"
            ) from error
        self._lock_fd = _lock_before_visible(self.path)
        length = len(os.fsencode(self.path / _LONGEST_SOCKET_NAME))
        if length > _MAX_SOCKET_PATH_BYTES:
            self.close()
            raise StartupError(
                f"--run-dir: socket paths under {base} would have {length} bytes,"
                f" the limit is {_MAX_SOCKET_PATH_BYTES}"
            )

    def address(self, name: str) -> str:
        """Return the channel address of a socket in this directory."""
        return f"ipc://{self.path / name}"

    def close(self) -> None:
        """Remove the directory and all in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def remove_stale(base: Path) -> None:
    """Remove this user's run directories under `base` whose servers no longer live."""
    for path in base.glob(_PREFIX + "*"):
        try:
            if path.lstat().st_uid != os.getuid() or path.is_symlink():
                continue
            lock_fd = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # not one of ours, or it is going away at this moment
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # its server lives
        else:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock_fd)


def _lock_before_visible(path: Path) -> int:
    """Lock the file under another name first, so that no process ever sees it unlocked."""
    hidden = path / (_LOCK_FILE + ".new")
    lock_fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock_fd, fcntl.LOCK_EX)
    hidden.rename(path / _LOCK_FILE)
    return lock_fd
