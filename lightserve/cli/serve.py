"""`lightserve serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from lightserve.cli.options import SectionCommand, config_options, preset_option
from lightserve.config import SECTIONS, ServeConfig
from lightserve.config.file import merge, read_config_file


@click.command("serve", cls=SectionCommand, sections=SECTIONS)
@config_options(ServeConfig)
@click.option(
    "--config",
    "config_file",
    metavar="FILE",
    help="YAML file of these options, without the dashes; flags stand over it.",
)
@preset_option
@click.pass_context
def command(
    context: click.Context, /, config_file: str | None, preset: str | None, **values: Any
) -> int:
    """Serve a model over HTTP until SIGTERM or Ctrl-C.

    Exit codes: 0 after a drained stop, 1 when the server cannot start or keeps failing, 2 for
    wrong arguments.
    """
    from_file = {} if config_file is None else read_config_file(Path(config_file), ServeConfig)
    given = {
        name for name in values if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    effective = merge(values, given=given, from_file=from_file, preset=preset)
    config = ServeConfig(**effective.values)
    from lightserve.supervisor.loop import serve  # noqa: PLC0415 - not needed for --help

    return serve(config, origins=effective.origins)
