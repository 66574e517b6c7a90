"""`lightserve chat`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from lightserve.cli.options import FiniteRange, read_api_key, server_options
from lightserve.errors import ConfigError
from lightserve.extras import need_packages, packages_of

if TYPE_CHECKING:
    from lightserve.chat import Session
    from lightserve.chat_client import Piece


@click.command("chat")
@server_options
@click.option("--model", default="", help="Name of the model. Default: the server's first model.")
@click.option("--system", default="", help="System prompt.")
@click.option("--temperature", type=float, help="Default: the server's.")
@click.option("--top-p", type=float, help="Default: the server's.")
@click.option("--max-tokens", type=int, help="Longest answer. Default: the server's.")
@click.option("--seed", type=int, help="Seed of the sampling. Default: another one each time.")
@click.option(
    "--timeout-s",
    default=600.0,
    type=FiniteRange(0.1),
    show_default=True,
    help="Longest wait for the server's next token.",
)
def command(**values: Any) -> int:
    """Chat with a server that speaks OpenAI's HTTP API.

    Type /help to see the commands. Text from a pipe is taken as one question, and only the answer
    is printed.
    """
    with packages_of("chat"):
        from lightserve.chat import Session  # noqa: PLC0415
        from lightserve.chat_client import ChatClient  # noqa: PLC0415 - an extra
    api_key = read_api_key(api_key_env=values["api_key_env"], api_key_file=values["api_key_file"])
    client = ChatClient(values["url"], api_key=api_key, timeout_s=values["timeout_s"])
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
        from lightserve.chat import talk  # noqa: PLC0415 - not needed in a pipe

        need_packages(("prompt_toolkit",), "chat")
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
