"""Chat messages to prompt text through the model's own Jinja template.

Looked for in this order: the file given with --chat-template, `chat_template.jinja` beside the
model, `chat_template` in tokenizer_config.json (a string, or a list of named ones of which
`default` is taken). The environment offers what transformers offers to templates.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.meta

from lightserve.errors import ConfigError, InvalidRequest, ModelLoadError
from lightserve.tokenization.description import TOKENIZER_CONFIG_FILE
from lightserve.tokenization.template_sandbox import DEADLINE_S, TemplateLimit, TemplateSandbox
from lightserve.tokenization.tokenizer import read_optional

TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 1_000_000
_MAX_JSON_INDENT = 16


@dataclass(frozen=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str
    others: dict[str, Any] = field(default_factory=dict)
    """What else templates may look at: name, tool_calls, tool_call_id, reasoning."""


class Ending(Enum):
    """What a prompt ends with."""

    ANSWER = "answer"
    """What begins an answer of the assistant."""
    MESSAGE = "message"
    """The last message and what the template puts behind it."""
    OPEN = "open"
    """The last message alone, as far as it goes: the output continues it."""


class Place(NamedTuple):
    """A place in the messages: behind so many characters of one's content."""

    message: int
    num_chars: int


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a prompt is made of."""

    messages: list[ChatMessage]
    tools: Sequence[dict[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values of `ChatTemplate.option_names`."""
    ending: Ending = Ending.ANSWER
    mark: Place | None = None
    """Where `ChatTemplate.marked_length` ends."""


_BLANK = "\t"
"""Behind a tag in a message: where it is gone, the template takes blanks off its end."""


@dataclass(frozen=True)
class TemplateSource:
    """A template's text and the place to name in complaints."""

    text: str
    origin: str


class TemplateRejection(jinja2.TemplateError):
    """What `raise_exception` raises: the template refuses these messages."""


class ChatTemplate:
    """A compiled template. Thread-safe."""

    def __init__(
        self,
        source: TemplateSource,
        *,
        special_tokens: dict[str, str],
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Compile it and try it once.

        Raises:
            ModelLoadError: it does not compile, or goes beyond its limits for one short message.
        """
        self._special_tokens = special_tokens
        self._deadline_s = deadline_s
        self._sandbox = TemplateSandbox()
        self._sandbox.filters["tojson"] = _tojson
        self._sandbox.globals["raise_exception"] = _raise_exception
        self._sandbox.globals["strftime_now"] = _strftime_now
        try:
            self._template = self._sandbox.from_string(source.text)
            variables = jinja2.meta.find_undeclared_variables(self._sandbox.parse(source.text))
            hello = Conversation(messages=[ChatMessage("user", "Hello")])
            own = {*self._values(hello), *self._sandbox.globals}
            self.option_names = frozenset(variables - own)
            """Variables that requests may give a value, such as Qwen3's `enable_thinking`."""
            self.can_end_with_message = "add_generation_prompt" in variables
            """Whether it leaves out what begins an answer where it is told to."""
            self._render(hello)
        except TemplateRejection:
            pass  # it may well insist on other roles
        except Exception as error:  # a template can raise anything
            raise ModelLoadError(
                f"{source.origin}: chat template cannot be used: {_one_line(error)}"
            ) from error

    def render(self, conversation: Conversation) -> str:
        """Return the prompt text.

        Raises:
            InvalidRequest: the template refuses the messages, fails on them, leaves out the one to
                be continued, or goes beyond its limits of time and length.
        """
        with _refusing():
            if conversation.ending is not Ending.OPEN:
                return self._render(conversation)
            last = len(conversation.messages) - 1
            end = Place(last, len(conversation.messages[last].content))
            text = self._text_before(end, conversation)
        if text is None:
            raise _refusal("it leaves out the last one, which is to be continued")
        return text

    def marked_length(self, conversation: Conversation, text: str) -> int:
        """Return how many characters of its text a conversation has before its mark.

        0: the template leaves it out. Raises InvalidRequest, as `render` does.
        """
        if conversation.mark is None:
            return 0
        with _refusing():
            before = self._text_before(conversation.mark, conversation) or ""
        if text.startswith(before):
            return len(before)
        return len(os.path.commonprefix([before, text]))  # noqa: RUF071 - of any texts

    def _text_before(self, place: Place, conversation: Conversation) -> str | None:
        """Return the text up to a place in a message; None: the template leaves it out."""
        messages = list(conversation.messages)
        content = messages[place.message].content
        tag = secrets.token_hex(16)
        tagged = f"{content[: place.num_chars]}{tag}{_BLANK}{content[place.num_chars :]}"
        messages[place.message] = replace(messages[place.message], content=tagged)
        text = self._render(replace(conversation, messages=messages))
        start, found, rest = text.rpartition(tag)
        if not found:
            return None
        return start if rest.startswith(_BLANK) else start.rstrip()

    def _render(self, conversation: Conversation) -> str:
        values = {**conversation.options, **self._values(conversation)}
        return self._sandbox.render(self._template, values, deadline_s=self._deadline_s)

    def _values(self, conversation: Conversation) -> dict[str, Any]:
        return {
            **self._special_tokens,
            "messages": [
                {"role": m.role, "content": m.content, **m.others} for m in conversation.messages
            ],
            "tools": conversation.tools,
            "documents": None,
            "add_generation_prompt": conversation.ending is Ending.ANSWER,
        }


@contextmanager
def _refusing() -> Iterator[None]:
    """Raise InvalidRequest where a template fails on messages."""
    try:
        yield
    except TemplateRejection as error:
        detail = _one_line(error)
    except TemplateLimit as error:
        detail = f"it {_one_line(error)}"
    except Exception:
        detail = "it fails on them"
    else:
        return
    raise _refusal(detail)


def _refusal(detail: str) -> InvalidRequest:
    return InvalidRequest(
        f"messages cannot be rendered by the model's chat template: {detail}",
        param="messages",
        code="chat_template_error",
    )


def find_chat_template(model_dir: Path, override: str = "") -> TemplateSource | None:
    """Return the template to use, None if the model has none.

    Raises:
        ConfigError: the file given with --chat-template cannot be read.
        ModelLoadError: the model's own cannot; names file and key.
    """
    if override:
        try:
            return _read_template(Path(override))
        except ModelLoadError as error:
            raise ConfigError(f"--chat-template {error}") from error
    beside = model_dir / TEMPLATE_FILE
    if beside.is_file():
        return _read_template(beside)
    fields = read_optional(model_dir, TOKENIZER_CONFIG_FILE)
    if not fields.has("chat_template"):
        return None
    value: Any = dict(fields.items())["chat_template"]
    origin = f"{fields.path}: key 'chat_template'"
    if not isinstance(value, list):
        return TemplateSource(fields.string("chat_template"), origin)
    named = {
        entry["name"]: entry["template"]
        for entry in value
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }
    if "default" not in named:
        raise fields.error("chat_template", "is a list without a template named 'default'")
    return TemplateSource(named["default"], origin)


def _read_template(path: Path) -> TemplateSource:
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ModelLoadError(f"{path}: more than {MAX_TEMPLATE_BYTES} bytes")
        return TemplateSource(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path}: not valid UTF-8") from error


def _raise_exception(message: str) -> None:
    raise TemplateRejection(message)


def _strftime_now(format_: str) -> str:
    return datetime.datetime.now().strftime(format_[:256])  # local time, as transformers has it


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON that is not escaped for HTML, as transformers' templates expect."""
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= _MAX_JSON_INDENT):
        raise TemplateLimit(f"indents JSON by other than 0 to {_MAX_JSON_INDENT}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "…"
