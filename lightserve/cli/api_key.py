"""The API key of commands that are clients: from a file or the environment, never an argument."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from lightserve.errors import ConfigError

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def api_key_options(function: FunctionT) -> FunctionT:
    """Decorate a command with --api-key-env and --api-key-file; `read_api_key` takes them."""
    function = click.option(
        "--api-key-file", help="File with the API key; stands before the variable."
    )(function)
    return click.option(
        "--api-key-env",
        default="OPENAI_API_KEY",
        show_default=True,
        help="Environment variable with the API key; never an argument, which others could read.",
    )(function)


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
