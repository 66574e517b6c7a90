"""`lightserve serve`."""

from __future__ import annotations

from typing import Any

import click

from lightserve.cli.options import config_options
from lightserve.config import ServeConfig


@click.command("serve")
@config_options(ServeConfig)
def command(**values: Any) -> int:
    """Serve a model over HTTP until SIGTERM or Ctrl-C.

    Exit codes: 0 after a drained stop, 1 when the server cannot start or keeps failing, 2 for
    wrong arguments.
    """
    config = ServeConfig(**values)
    from lightserve.supervisor.loop import serve  # noqa: PLC0415 - not needed for --help

    return serve(config)
