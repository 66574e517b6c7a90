"""`lightserve chat`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightserve.errors import ConfigError

if TYPE_CHECKING:
    from lightserve.chat.client import Piece
    from lightserve.chat.session import Session


@click.command("chat")
@click.option(
    "--url", default="http://127.0.0.1:8000", show_default=True, help="With or without /v1."
)
@click.option("--model", default="", help="Default: the first of GET /v1/models.")
@click.option("--system", default="", help="System prompt.")
@click.option("--temperature", type=float, help="Default of this and the next three: the server's.")
@click.option("--top-p", type=float)
@click.option("--max-tokens", type=int)
@click.option("--seed", type=int)
@click.option(
    "--api-key-env",
    default="OPENAI_API_KEY",
    show_default=True,
    help="Environment variable with the API key; never an argument, which others could read.",
)
@click.option("--api-key-file", help="File with the API key; stands before the variable.")
@click.option(
    "--timeout-s",
    default=600.0,
    type=click.FloatRange(0.1),
    show_default=True,
    help="Longest silence of the server.",
)
def command(**values: Any) -> int:
    """Chat with a server that speaks OpenAI's HTTP API.

    /help shows the commands. With standard input from a pipe, all of it is one question, and the
    answer alone is printed.
    """
    try:
        from lightserve.chat.client import ChatClient  # noqa: PLC0415 - an extra
        from lightserve.chat.session import Session  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is missing: pip install 'lightserve[chat]'") from error
    client = ChatClient(values["url"], api_key=_api_key(values), timeout_s=values["timeout_s"])
    try:
        session = Session(
            client,
            values["model"] or client.models()[0],
            system=values["system"],
            options={
                name: values[name]
                for name in ("temperature", "top_p", "max_tokens", "seed")
                if values[name] is not None
            },
        )
        if not sys.stdin.isatty():
            return _answer_once(session, sys.stdin.read())
        from lightserve.chat.terminal import talk  # noqa: PLC0415 - not needed in a pipe

        return talk(session)
    finally:
        client.close()


def _answer_once(session: Session, question: str) -> int:
    """Print the answer to all of standard input, which is never a command."""
    if not question.strip():
        raise ConfigError("standard input holds no question")
    for piece in session.client.stream(
        session.model, [*session.messages, {"role": "user", "content": question}], session.options
    ):
        _print(piece)
    click.echo()
    return 0


def _print(piece: Piece) -> None:
    click.echo(piece.text, nl=False)
    sys.stdout.flush()


def _api_key(values: dict[str, Any]) -> str:
    name = values["api_key_file"]
    if not name:
        return os.environ.get(values["api_key_env"], "").strip()
    try:
        key = Path(name).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not ASCII text"
        raise ConfigError(f"--api-key-file {name}: {reason}") from error
    if not key or len(key.split()) != 1:
        raise ConfigError(f"--api-key-file {name}: must hold one key and nothing else")
    return key
