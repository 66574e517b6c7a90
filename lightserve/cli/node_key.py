"""`lightserve node-key`."""

from __future__ import annotations

from pathlib import Path

import click

from lightserve.node_key import write_node_key


@click.command("node-key")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def command(file: Path) -> int:
    """Make the key of a server that runs on several machines.

    FILE must not exist. Copy it to every node, for --node-key-file, and nowhere else.
    """
    write_node_key(file)
    click.echo(f"{file}: a new key; every node needs this file")
    return 0
