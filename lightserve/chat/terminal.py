"""The chat's terminal: an editor for questions, answers as they arrive.

Whatever a server sends is shown without its control characters, so that an answer cannot drive the
terminal.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable

from prompt_toolkit import PromptSession
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.key_binding.key_processor import KeyPressEvent
from prompt_toolkit.output import Output

from lightserve.chat.client import Piece
from lightserve.chat.session import Session
from lightserve.errors import ChatError


def talk(
    session: Session,
    *,
    keyboard: Input | None = None,
    screen: Output | None = None,
    write: Callable[[str], object] = sys.stdout.write,
    flush: Callable[[], object] = sys.stdout.flush,
) -> int:
    """Read questions and show answers until the person leaves; returns the exit code.

    `keyboard` and `screen` are the terminal's unless a test brings its own.
    """
    editor: PromptSession[str] = PromptSession(
        history=InMemoryHistory(), key_bindings=_keys(), input=keyboard, output=screen
    )
    write(f"{printable(session.model)} · /help for commands, Ctrl-D to leave\n")

    def show(piece: Piece) -> None:
        write(printable(piece.reasoning) + printable(piece.text))
        flush()

    while not session.is_over:
        try:
            line = editor.prompt("> ")
        except KeyboardInterrupt:  # drops what has been typed
            continue
        except EOFError:
            break
        try:
            notice = session.enter(line, show)
        except KeyboardInterrupt:
            notice = "(stopped)"
        except ChatError as error:
            notice = f"error: {error}"
        write(f"{printable(notice)}\n")
        flush()
    return 0


def printable(text: str) -> str:
    """Return text without control characters except line ends and tabs."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def _keys() -> KeyBindings:
    """Enter sends; Alt-Enter begins another line."""
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
