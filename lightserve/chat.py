"""A conversation and its commands, apart from any terminal.

    line ──► Session.enter ──► answer pieces to `show`, or a notice
             /system TEXT  /reset  /undo  /set NAME VALUE  /show  /save FILE  /help  /exit

A turn joins the history only when its answer is whole, or when the person stopped it.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightserve.chat_client import ChatClient, Piece
from lightserve.errors import ChatError

if TYPE_CHECKING:
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.key_binding.key_processor import KeyPressEvent
    from prompt_toolkit.output import Output

HELP = """\
/system TEXT      set the system prompt (without TEXT: none) and begin anew
/reset            begin anew, with the same system prompt
/undo             forget the last question and its answer
/set NAME VALUE   set temperature, top_p, max_tokens or seed; without VALUE: the server's own
/show             show model, options and the conversation
/save FILE        write the conversation to a new file as JSON
/help, /exit      this; leave (or Ctrl-D)
Ctrl-C stops an answer. Alt-Enter, or Esc and then Enter, begins another line."""

OPTION_TYPES: dict[str, Callable[[str], float | int]] = {
    "temperature": float,
    "top_p": float,
    "max_tokens": int,
    "seed": int,
}


@dataclass
class Session:
    """One conversation; the only writer of its history."""

    client: ChatClient
    model: str
    system: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, str]] = field(default_factory=list)
    is_over: bool = False

    @property
    def messages(self) -> list[dict[str, str]]:
        """System prompt and history, as a server takes them."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.history]

    def enter(self, line: str, show: Callable[[Piece], None]) -> str:
        """Run a command or ask a question; returns a notice for the person, perhaps empty.

        Raises:
            ChatError: no whole answer; the history is as before.
            KeyboardInterrupt: stopped; what had arrived is in the history.
        """
        text = line.strip()
        if not text:
            return ""
        if text.startswith("/"):
            name, _, rest = text[1:].partition(" ")
            return self._run(name, rest.strip())
        self._ask(text, show)
        return ""

    def _ask(self, question: str, show: Callable[[Piece], None]) -> None:
        asked = {"role": "user", "content": question}
        parts: list[str] = []
        answer = self.client.stream(self.model, [*self.messages, asked], self.options)
        is_kept = False
        try:
            with closing(answer):  # which ends the request
                for piece in answer:
                    parts.append(piece.text)
                    show(piece)
            is_kept = True
        except KeyboardInterrupt:
            is_kept = any(parts)
            raise
        finally:
            if is_kept:
                self.history += [asked, {"role": "assistant", "content": "".join(parts)}]

    def _run(self, name: str, rest: str) -> str:
        match name:
            case "system":
                self.system = rest
                self.history.clear()
                return "system prompt set" if rest else "no system prompt"
            case "reset":
                self.history.clear()
                return "begun anew"
            case "undo":
                forgotten = len(self.history[-2:])
                del self.history[-2:]
                return "forgotten" if forgotten else "there is nothing to forget"
            case "set":
                return self._set(*rest.partition(" ")[::2])
            case "show":
                return json.dumps(self._document(), indent=2, ensure_ascii=False)
            case "save":
                return self._save(rest)
            case "help":
                return HELP
            case "exit" | "quit":
                self.is_over = True
                return ""
        return f"no such command: /{name} (see /help)"

    def _set(self, name: str, text: str) -> str:
        if name not in OPTION_TYPES:
            return f"/set knows {', '.join(OPTION_TYPES)}"
        if not text.strip():
            self.options.pop(name, None)
            return f"{name} is the server's own"
        try:
            self.options[name] = OPTION_TYPES[name](text)
        except ValueError:
            return f"{name} must be a number, got {text!r}"
        return f"{name} = {self.options[name]}"

    def _save(self, name: str) -> str:
        if not name:
            return "/save needs a file"
        try:
            with Path(name).expanduser().open("x", encoding="utf-8") as file:
                json.dump(self._document(), file, indent=2, ensure_ascii=False)
                file.write("\n")
        except OSError as error:
            return f"{name}: {error.strerror}"
        return f"saved to {name}"

    def _document(self) -> dict[str, Any]:
        return {"model": self.model, "options": self.options, "messages": self.messages}


# The chat's terminal: an editor for questions, answers as they arrive.
#
# Whatever a server sends is shown without its control characters, so that an answer cannot drive
# the terminal.


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
    # Only a terminal needs the package: a pipe is answered without it.
    from prompt_toolkit import PromptSession  # noqa: PLC0415
    from prompt_toolkit.history import InMemoryHistory  # noqa: PLC0415

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
    from prompt_toolkit.key_binding import KeyBindings  # noqa: PLC0415

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
