"""Chat messages to prompt text through the model's own Jinja template.

Looked for in this order: the file given with --chat-template; `chat_template.jinja` beside the
model, with `additional_chat_templates/tool_use.jinja`; `chat_template` in tokenizer_config.json;
the same in chat_template.json. A key holds a text or named ones: `default` is taken, and `tool_use`
for conversations with tools. Qwen 1 and the first Qwen-VL have none: `chat_format` of
generation_config.json says what their authors' program writes. The environment offers the
functions that transformers offers.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from lightserve.errors import InvalidRequest, ModelLoadError, read_named_file
from lightserve.models.config import CONFIG_FILE
from lightserve.models.json_fields import JsonFields
from lightserve.models.vision_families import VISION_KEY
from lightserve.tokenization.conversation import (
    PROBED_TOOL,
    TOOLS_NAMES,
    ChatMessage,
    Conversation,
    Ending,
    Forms,
    Need,
    Place,
    find_forms,
    needs_of,
)
from lightserve.tokenization.description import TOKENIZER_CONFIG_FILE
from lightserve.tokenization.template_sandbox import (
    DEADLINE_S,
    MAX_OUTPUT_CHARS,
    TemplateLimit,
    TemplateSandbox,
)
from lightserve.tokenization.tokenizer import CHATML, GENERATION_CONFIG_FILE, read_optional

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES_DIR = "additional_chat_templates"
TEMPLATE_JSON_FILE = "chat_template.json"
_DEFAULT, _TOOL_USE = "default", "tool_use"
MAX_TEMPLATE_BYTES = 1_000_000
_MAX_JSON_INDENT = 16
_MAX_SEPARATOR_CHARS = 16


_CONTENT = (
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% set seen.number = 0 %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{% set seen.number = seen.number + 1 %}"
    "{{ 'Picture ' ~ seen.number ~ ': <img><imgpad></img>\n' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
)
_FORMATS = {
    CHATML: (
        "{% set seen = namespace(number=0) %}{% if messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}{% if m['role'] not in ('system', 'user', 'assistant') %}"
        "{{ raise_exception('it has system, user and assistant alone') }}{% endif %}"
        "{{ '<|im_start|>' + m['role'] + '\n' }}" + _CONTENT + "{{ '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "raw": (
        "{% if messages | length > 1 or messages[0]['role'] != 'user' %}"
        "{{ raise_exception('it has one message, of a user: the model is none for chats') }}"
        "{% endif %}{% set m = messages[0] %}{% set seen = namespace(number=0) %}" + _CONTENT
    ),
}
"""By `chat_format`. Images have numbers in each message, as `from_list_format` has it. Variables
are set for all of a template: those of a part of it would be options of requests."""
_BLANK = "\t"
"""Behind a tag in a message: where it is gone, the template takes blanks off its end."""


@dataclass(frozen=True)
class TemplateSource:
    """A template's text and the place to name in complaints."""

    text: str
    origin: str
    tool_use: str | None = None
    """The text of another one, for conversations with tools."""

    @property
    def texts(self) -> str:
        """All that shows how the model writes: for tools first."""
        return self.text if self.tool_use is None else f"{self.tool_use}\n{self.text}"

    def has_roles(self, *roles: str) -> bool:
        """Whether the template names all of these roles."""
        return all(re.search(rf"""(['"]){role}\1""", self.text) for role in roles)


class TemplateRejection(jinja2.TemplateError):
    """The error of `raise_exception`: the template refuses these messages."""


class _Compiled:
    """One template, for conversations with tools or for others."""

    def __init__(
        self,
        text: str,
        sandbox: TemplateSandbox,
        special_tokens: dict[str, str],
        *,
        has_tools: bool,
        deadline_s: float,
    ) -> None:
        """Compile it and try it. Passes errors of the parser on, and errors of limits."""
        self._special_tokens = special_tokens
        self._deadline_s = deadline_s
        self._sandbox = sandbox
        self._template = sandbox.from_string(text)
        self.variables = jinja2.meta.find_undeclared_variables(sandbox.parse(text))
        tools = [PROBED_TOOL] if has_tools else None
        hello = Conversation(messages=[ChatMessage("user", "Hello")], tools=tools)
        own = {*self._values(hello, Forms()), *sandbox.globals, *TOOLS_NAMES}
        self.option_names = frozenset(self.variables - own)
        self.forms = Forms()
        self._try(hello)  # what takes too long would do so in each probe
        self.forms = find_forms(self._render, self.variables, has_tools=has_tools)
        self.failure = self._try(hello)
        """Why it cannot be used, if so."""

    def _try(self, conversation: Conversation) -> Exception | None:
        try:
            self.render(conversation)
        except TemplateRejection:
            return None  # it may well insist on other roles
        except TemplateLimit:
            raise
        except Exception as error:  # a template can raise anything
            return error
        return None

    def render(self, conversation: Conversation) -> str:
        """Return the text. Passes errors of templates on."""
        return self._render(conversation, self.forms)

    def _render(self, conversation: Conversation, forms: Forms) -> str:
        values = {**conversation.options, **self._values(conversation, forms)}
        return self._sandbox.render(self._template, values, deadline_s=self._deadline_s)

    def _values(self, conversation: Conversation, forms: Forms) -> dict[str, Any]:
        return {
            **self._special_tokens,
            "tools": None,
            "messages": forms.rendered(conversation.messages),
            forms.tools_name: conversation.tools,
            "documents": None,
            "add_generation_prompt": conversation.ending is Ending.ANSWER,
        }


class ChatTemplate:
    """A model's compiled template, or two of them: one for tools. Thread-safe."""

    def __init__(
        self,
        source: TemplateSource,
        *,
        special_tokens: dict[str, str],
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Compile it and try it.

        Raises:
            ModelLoadError: it does not compile, or goes beyond its limits for one short message.
        """
        sandbox = TemplateSandbox()
        sandbox.add_filter("tojson", _tojson)
        sandbox.globals["raise_exception"] = _raise_exception
        sandbox.globals["strftime_now"] = _strftime_now
        try:
            self._plain, self._with_tools = both = [
                _Compiled(text, sandbox, special_tokens, has_tools=has_tools, deadline_s=deadline_s)
                for text, has_tools in (
                    (source.text, False),
                    (source.tool_use or source.text, True),
                )
            ]
            if (failure := self._plain.failure) is not None and self._with_tools.failure:
                raise failure
        except Exception as error:  # a template can raise anything
            raise ModelLoadError(
                f"{source.origin}: chat template cannot be used: {_one_line(error)}"
            ) from error
        self.option_names = both[0].option_names | both[1].option_names
        """Variables that requests may give a value, such as Qwen3's `enable_thinking`."""
        self.can_end_with_message = all("add_generation_prompt" in one.variables for one in both)
        """Whether it leaves out the beginning of an answer where it is told to."""

    @property
    def left_out(self) -> list[str]:
        """Parts of conversations that the template does not show, in words."""
        left_out = self._plain.forms.left_out | self._with_tools.forms.left_out
        return [need.value for need in Need if need in left_out]

    def check(self, conversation: Conversation) -> None:
        """Raise InvalidRequest where the template leaves out a part of the conversation."""
        left_out = self._compiled(conversation).forms.left_out
        for need, place in needs_of(conversation) if left_out else ():
            if need in left_out:
                raise InvalidRequest(
                    f"{place} cannot be shown to the model: its chat template leaves out"
                    f" {need.value}",
                    param=place.partition("[")[0],
                    code="chat_template_error",
                )

    def render(self, conversation: Conversation) -> str:
        """Return the prompt text.

        Raises:
            InvalidRequest: the template refuses the messages, fails on them, leaves out the one to
                be continued, or goes beyond its limits of time and length.
        """
        with _refusing():
            if conversation.ending is not Ending.OPEN:
                return self._compiled(conversation).render(conversation)
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
        tag = secrets.token_hex(16)
        tagged = messages[place.message].with_insertion(tag + _BLANK, place.num_chars)
        messages[place.message] = tagged
        text = self._compiled(conversation).render(replace(conversation, messages=messages))
        start, found, rest = text.rpartition(tag)
        if not found:
            return None
        return start if rest.startswith(_BLANK) else start.rstrip()

    def _compiled(self, conversation: Conversation) -> _Compiled:
        return self._plain if conversation.tools is None else self._with_tools


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
        return TemplateSource(read_named_file("--chat-template", Path(override)), override)
    beside, more = model_dir / TEMPLATE_FILE, model_dir / TEMPLATES_DIR
    if beside.is_file():
        source, tool_use = _read_template(beside), more / f"{_TOOL_USE}.jinja"
        if tool_use.is_file():
            source = replace(source, tool_use=_read_template(tool_use).text)
        return source
    for name in (TOKENIZER_CONFIG_FILE, TEMPLATE_JSON_FILE):
        fields = read_optional(model_dir, name)
        if fields.has("chat_template"):
            return _from_key(fields)
    generation = read_optional(model_dir, GENERATION_CONFIG_FILE)
    form = generation.string("chat_format", default="")
    sees_images = read_optional(model_dir, CONFIG_FILE).has(VISION_KEY)
    if form not in _FORMATS or (form != CHATML and not sees_images):
        return None
    return TemplateSource(_FORMATS[form], f"{generation.path}: key 'chat_format'")


def _from_key(fields: JsonFields) -> TemplateSource:
    """Return the template under the key of a JSON file: a text, or named ones."""
    value: Any = dict(fields.items())["chat_template"]
    origin = f"{fields.path}: key 'chat_template'"
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
    elif isinstance(value, dict):
        named = value
    else:
        return TemplateSource(fields.string("chat_template"), origin)
    default, tool_use = named.get(_DEFAULT), named.get(_TOOL_USE)
    if not isinstance(default, str):
        raise fields.error("chat_template", "holds no template named 'default'")
    if tool_use is not None and not isinstance(tool_use, str):
        raise fields.error("chat_template", "holds something else than a text as 'tool_use'")
    return TemplateSource(default, origin, tool_use)


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
    if separators is not None and sum(map(len, separators)) > _MAX_SEPARATOR_CHARS:
        raise TemplateLimit(f"separates JSON by more than {_MAX_SEPARATOR_CHARS} characters")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    parts, num_chars = [], 0
    for part in encoder.iterencode(value):
        parts.append(part)
        num_chars += len(part)
        if num_chars > MAX_OUTPUT_CHARS:
            raise TemplateLimit(f"makes JSON of more than {MAX_OUTPUT_CHARS} characters")
    return "".join(parts)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "…"
