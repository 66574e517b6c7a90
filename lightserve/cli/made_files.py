"""`lightserve node-key` and `convert`: commands that write files for a server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from lightserve.node_key import write_node_key

_PROGRAM = "lightserve.models.pickled_weights"


@click.command("convert")
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
def convert(source: Path, target: Path) -> None:
    """Write the model of directory SOURCE, whose weights are pickles, to TARGET as safetensors.

    A separate process opens the pickles and takes only plain tensors from them, at most four times
    the bytes of their file. TARGET must not exist.
    """
    python = [sys.executable, "-P", "-W", "ignore"]  # torch warns of types that are refused
    program = [*python, "-m", _PROGRAM, str(source.absolute()), str(target.absolute())]
    code = subprocess.run(program, check=False).returncode
    if code < 0:
        click.echo(f"lightserve: error: {source}: signal {-code} ended its reader", err=True)
    if code:
        sys.exit(1)
    click.echo(f"{target}: written; lightserve serve --model {target}")


@click.command("node-key")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def node_key(file: Path) -> int:
    """Make the key of a server that runs on several machines.

    FILE must not exist. Copy it to every node, for --node-key-file, and nowhere else.
    """
    write_node_key(file)
    click.echo(f"{file}: a new key; every node needs this file")
    return 0
