"""What click lacks: options in titled sections, and a text of options as the value of another."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class SectionOption(click.Option):
    """An option that `SectionCommand` lists under a title."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class SectionCommand(click.Command):
    """A command whose --help has sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, a section after the other, in the order of declaration."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Argument):
                continue
            if (record := param.get_help_record(ctx)) is not None:
                title = param.section if isinstance(param, SectionOption) else "Help"
                sections.setdefault(title, []).append(record)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def add_options(options: Sequence[SectionOption]) -> Callable[[FunctionT], FunctionT]:
    """Decorate a function with options, in their order."""

    def decorate(function: FunctionT) -> FunctionT:
        params: list[click.Parameter] = function.__dict__.setdefault("__click_params__", [])
        params.extend(reversed(options))  # click reverses them again
        return function

    return decorate


def parse_nested(text: str, options: Sequence[SectionOption], *, param_hint: str) -> dict[str, Any]:
    """Parse "rate=4 prompt-tokens=64:256" into values by name, as a command line would be.

    Raises:
        click.BadParameter: an unknown name or a value that its option refuses.
    """
    command = click.Command(param_hint, params=list(options), add_help_option=False)
    try:
        args = [f"--{part}" for part in shlex.split(text)]
        return command.make_context(param_hint, args).params
    except click.UsageError as error:
        raise click.BadParameter(error.format_message(), param_hint=param_hint) from error
    except ValueError as error:  # quotes that do not close
        raise click.BadParameter(str(error), param_hint=param_hint) from error
