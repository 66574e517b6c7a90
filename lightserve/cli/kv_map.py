"""`lightserve kv-map`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lightserve.cli.options import FiniteRange, api_key_options, read_api_key
from lightserve.errors import ConfigError
from lightserve.extras import missing_extra

SUFFIXES = (".png", ".svg", ".pdf")


@click.command("kv-map")
@click.argument("url")
@click.option(
    "-o",
    "--output",
    default="kv.png",
    type=click.Path(dir_okay=False, path_type=Path),
    show_default=True,
    help="File to write (.png, .svg, .pdf).",
)
@api_key_options
@click.option(
    "--timeout-s",
    default=60.0,
    type=FiniteRange(0.1),
    show_default=True,
    help="Longest silence of the server.",
)
def command(url: str, output: Path, timeout_s: float, **key: Any) -> int:
    """Draw what every slot of a server's KV pool is for.

    URL is that of a lightserve server, such as http://127.0.0.1:8000. Where it needs keys, an
    operator's is needed.
    """
    if output.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--output must end with {', '.join(SUFFIXES)}, got {str(output)!r}")
    api_key = read_api_key(**key)
    try:
        # Imported late: matplotlib takes a second, and both are an extra.
        from lightserve.kv_map import draw_map, fetch_map  # noqa: PLC0415
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        raise missing_extra(name, "plots") from error
    pool = fetch_map(url, api_key=api_key, timeout_s=timeout_s)
    draw_map(pool, output)
    click.echo(f"{output}: {pool.summary()}")
    return 0
