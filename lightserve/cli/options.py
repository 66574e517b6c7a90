"""Command-line options made from the fields of a configuration dataclass."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import click

from lightserve.config.fields import flag_name
from lightserve.config.scheduling import PRESETS
from lightserve.errors import ConfigError

# Commands that are clients. The API key comes from a file or the environment, never an argument.

URL_HELP = "Address of the server, with or without /v1."
KEY_HELP = "Environment variable with the API key. (Other users could read an argument.)"
KEY_FILE_HELP = "File with the API key, in place of the variable."


def server_options(function: FunctionT) -> FunctionT:
    """Decorate a command with --url, and the options that `read_api_key` takes."""
    function = click.option("--api-key-file", help=KEY_FILE_HELP)(function)
    function = click.option(
        "--api-key-env", default="OPENAI_API_KEY", show_default=True, help=KEY_HELP
    )(function)
    return click.option("--url", default="http://127.0.0.1:8000", show_default=True, help=URL_HELP)(
        function
    )


def read_api_key(*, api_key_env: str, api_key_file: str | None) -> str:
    """Return the key, empty if there is none.

    Raises:
        ConfigError: the file cannot be read, or holds something else than one key.
    """
    if not api_key_file:
        return os.environ.get(api_key_env, "").strip()
    try:
        key = Path(api_key_file).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not ASCII text"
        raise ConfigError(f"--api-key-file {api_key_file}: {reason}") from error
    if not key or len(key.split()) != 1:
        raise ConfigError(f"--api-key-file {api_key_file}: must hold one key and nothing else")
    return key


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def option(*names: str, **keywords: Any) -> Callable[[FunctionT], FunctionT]:
    """Return `click.option` of a command; help shows the default where there is one."""
    return click.option(*names, show_default="default" in keywords, **keywords)


def preset_option(function: FunctionT) -> FunctionT:
    """Decorate a command with --preset."""
    return click.option(
        "--preset",
        type=click.Choice(tuple(PRESETS)),
        help="Policy, admission, cache, preemption and meaning of targets as in the paper of this"
        " name. Options that you give override the preset.",
    )(function)


class FiniteRange(click.FloatRange):
    """A number within limits; unlike click's own, NaN is never one, nor infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; fails with a message about it otherwise."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


class SectionCommand(click.Command):
    """A command whose --help has sections, each of which begins with the option it is keyed by."""

    def __init__(self, *args: Any, sections: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, a section after the other, in the order of declaration."""
        title, rows = "Options", dict[str, list[tuple[str, str]]]()
        for param in self.get_params(ctx):
            title = self._sections.get(param.name or "", title)
            if (record := param.get_help_record(ctx)) is not None:
                rows.setdefault(title, []).append(record)
        for heading, records in rows.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class WordOrNumber(click.ParamType[int]):
    """An integer, or the word that stands for 0."""

    name = "integer"

    def __init__(self, zero_word: str) -> None:
        self._zero_word = zero_word

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number; fails with a message that has both otherwise."""
        if value == self._zero_word:
            return 0
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither {self._zero_word} nor an integer.", param, ctx)


def config_options(
    config_type: type[Any], names: Collection[str] | None = None
) -> Callable[[FunctionT], FunctionT]:
    """Decorate a command with one option per field of `config_type`, in the order declared.

    `names` are the fields that become options; None: all.

    Flag, help, default and limits come from the field. Limits are checked by the configuration
    itself when it is built, so that every way to build one is checked alike.
    """
    types = get_type_hints(config_type)

    def decorate(function: FunctionT) -> FunctionT:
        for spec in reversed(dataclasses.fields(config_type)):
            if names is None or spec.name in names:
                function = _option(spec, types[spec.name])(function)
        return function

    return decorate


def _option(spec: dataclasses.Field[Any], kind: type) -> Callable[[FunctionT], FunctionT]:
    choices: tuple[str, ...] = spec.metadata["choices"]
    zero_word: str = spec.metadata["zero_word"]
    flag = flag_name(spec.name)
    number = WordOrNumber(zero_word) if zero_word else kind
    return click.option(
        # The second form is for the command line to stand over a file that says true.
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        spec.name,
        type=None if kind is bool else number,
        is_flag=kind is bool,
        default=spec.default,
        metavar=f"[{'|'.join(choices)}]" if choices else f"[{zero_word}|N]" if zero_word else None,
        help=_help_text(spec, kind),
    )


def _help_text(spec: dataclasses.Field[Any], kind: type) -> str:
    text: str = spec.metadata["help"]
    notes = []
    # Where a default needs explaining, the help text itself does it.
    if kind is not bool and spec.default != "" and "Default:" not in text:
        notes.append(f"default: {shown_default(spec)}")
    if limits := limits_text(spec):
        notes.append(limits)
    return text + (f" [{'; '.join(notes)}]" if notes else "")


def shown_default(spec: dataclasses.Field[Any]) -> Any:
    """Return a field's default as people would write it."""
    return (
        spec.metadata["zero_word"]
        if spec.default == 0 and spec.metadata["zero_word"]
        else spec.default
    )


def limits_text(spec: dataclasses.Field[Any]) -> str:
    """Return the limits of a field in words, or nothing."""
    low, high = spec.metadata["low"], spec.metadata["high"]
    if low is None and high is None:
        return ""
    if high is None:
        return f"at least {_plain(low)}"
    return f"at most {_plain(high)}" if low is None else f"{_plain(low)} to {_plain(high)}"


def _plain(limit: float) -> str:
    """Return a limit in digits: whole numbers in full, never 1e+06."""
    return str(int(limit)) if limit == int(limit) else f"{limit:g}"
