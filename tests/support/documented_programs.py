"""`lightserve` and `make` as documented commands call them: on free ports, ending by themselves.

`lightserve serve` ends, in order, as soon as it is ready; with LIGHTSERVE_ONLY_CHECK it only looks
at its options. Clients that are told of no server take the one of the test. `make` takes what would
be installed for installed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

_STAMPS = (".venv/.has-serve", ".venv/.has-test", ".venv-clients/.has-clients")


def lightserve(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("bench", "chat") and "--url" not in arguments:
        arguments = [*arguments, "--url", os.environ["LIGHTSERVE_URL"]]
    command = [sys.executable, "-m", "lightserve", *arguments]
    if arguments[:1] != ["serve"] or "--help" in arguments:
        return subprocess.call(command)
    if os.environ.get("LIGHTSERVE_ONLY_CHECK"):
        return _check_options(arguments)
    with tempfile.TemporaryDirectory(prefix="ls-") as run_dir:
        more = ("--port=0", "--metrics-port=0", "--num-threads=1", "--profile=off")
        server = subprocess.Popen(
            [*command, *more, f"--run-dir={run_dir}"], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        is_ready = any("lightserve: ready on" in line for line in server.stdout)
        server.send_signal(signal.SIGTERM)
        server.stdout.read()
        return server.wait() or not is_ready


def _check_options(arguments: list[str]) -> int:
    """Do all that comes before processes are started."""
    from lightserve.cli.main import main
    from lightserve.supervisor import loop

    checked = []

    def note(*_values: object, **_more: object) -> int:
        checked.append(True)
        return 0

    loop.serve = note
    sys.argv = ["lightserve", *arguments]
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    return 0 if code in (0, None) and checked else 1


def make(arguments: list[str]) -> int:
    flags = [flag for stamp in _STAMPS for flag in ("-o", stamp)]
    return subprocess.call(["/usr/bin/make", *flags, *arguments])


if __name__ == "__main__":
    name = Path(sys.argv[1]).name
    sys.exit({"lightserve": lightserve, "make": make}[name](sys.argv[2:]))
