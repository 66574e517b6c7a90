"""The `lightserve` command. The module of a subcommand is imported when the command is used."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

import click

from lightserve.errors import ConfigError, LightserveError
from lightserve.logs import one_line, say_last

SUBCOMMANDS: Mapping[str, str] = {
    "serve": "Serve a model over HTTP.",
    "chat": "Chat with a running server in the terminal.",
    "batch": "Have a server answer a file of requests as best-effort work.",
    "bench": "Load a server and report latencies and goodput.",
    "convert": "Make safetensors of a model that has pytorch_model*.bin alone.",
    "models": "List the models that are here, and whether they can be served.",
    "doctor": "Check this machine, and say what to change; facts for bug reports.",
    "node-key": "Make the key of a server that runs on several machines.",
    "profile": "Measure step times on this machine for the router to plan with.",
    "replay": "Repeat every decision of a decision log.",
    "why": "Explain why a request was late, from a decision log.",
    "whatif": "Run a decision log's traffic again with other settings.",
    "plan": "Say how many replicas a trace needs, and how large a KV pool.",
    "simulate": "Run requests through the router core on virtual hardware.",
}
"""Name to one-line help."""
_PLACES = {
    "convert": "made_files:convert",
    "node-key": "made_files:node_key",
    "replay": "decision_logs:replay",
    "why": "decision_logs:why",
    "whatif": "decision_logs:whatif",
}
"""Module and click command of a subcommand; of all others `lightserve.cli.NAME:command`."""


class _LazyGroup(click.Group):
    """A group whose help needs no subcommand's imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        place = _PLACES.get(cmd_name, f"{cmd_name.replace('-', '_')}:command")
        module, _, name = place.partition(":")
        command = getattr(importlib.import_module(f"lightserve.cli.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(SUBCOMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda context, _, is_asked: _print_version(context) if is_asked else None,
    help="Print version, commit and native core.",
)
def cli() -> None:
    """LLM serving for real-time and best-effort traffic on one engine."""


def _print_version(context: click.Context) -> NoReturn:
    click.echo(importlib.import_module("lightserve.cli.doctor").version_line())
    context.exit()


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Exit codes: 2 for wrong arguments, 1 for anything else that lightserve reports on purpose;
    either way with one line on stderr.
    """
    try:
        exit_code = cli.main(arguments, prog_name="lightserve", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except click.Abort:
        sys.exit(130)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "lightserve"):
            raise
        _fail(
            f"{package} is missing: this command needs the packages of the server. In a checkout,"
            " make serve installs that into .venv; pip install -e . does so here, with torch",
            1,
        )
    except LightserveError as error:
        logging.getLogger(__name__).debug("failed", exc_info=True)
        _fail(one_line(error), 2 if isinstance(error, ConfigError) else 1)
    sys.exit(exit_code)


def _fail(message: str, exit_code: int) -> NoReturn:
    say_last(f"lightserve: error: {' '.join(message.split())}")
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
