"""The messages of a conversation, as chat completions have them, and the parts of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, model_validator

from lightserve.frontend.json_body import StrictModel, show
from lightserve.frontend.openai.fields import MESSAGE_NO_EFFECT, NoEffectModel
from lightserve.frontend.openai.tools import ToolCall
from lightserve.frontend.pictures import DETAILS, Picture
from lightserve.models.image_processor import MAX_PIXELS
from lightserve.tokenization.conversation import JOINT, ChatMessage, Place


def _text_of(content: Any) -> Any:
    """Reduce a list of parts to one string, its texts on lines of their own."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"must be a string or a list of text parts, got {show(content)}")
    if not content:
        raise ValueError("must have at least one part, got 0")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in _PART_FIELDS:
            raise ValueError(_PART_FORM)
        required, allowed = {"type", kind}, _PART_FIELDS[kind]
        if not required <= set(part) <= allowed:
            raise ValueError(_PART_FORM)
        if kind == "text" and not isinstance(part["text"], str):
            raise ValueError(_PART_FORM)
        if kind == "image_url":
            _check_image(part["image_url"])
        _check_cache_control(part.get("cache_control"))
    return JOINT.join(_texts_in(content))


def _texts_in(parts: list[Any]) -> list[str]:
    return [part["text"] for part in parts if part["type"] == "text"]


def _check_image(value: Any) -> None:
    if not isinstance(value, dict) or not {"url"} <= set(value) <= {"url", *_IMAGE_OPTIONS}:
        raise ValueError('must have image_url only as {"url": "data:image/…;base64,…"}')
    if not isinstance(value["url"], str):
        raise ValueError(f"must have image_url.url as a string, got {show(value['url'])}")
    if (detail := value.get("detail")) not in (None, *DETAILS):
        raise ValueError(f"must have image_url.detail {', '.join(DETAILS)}, got {show(detail)}")
    for name in ("min_pixels", "max_pixels"):
        given = value.get(name)
        if given is not None and (type(given) is not int or not 1 <= given <= MAX_PIXELS):
            raise ValueError(
                f"must have image_url.{name} as an integer from 1 to {MAX_PIXELS}, got"
                f" {show(given)}"
            )


_IMAGE_OPTIONS = ("detail", "min_pixels", "max_pixels")
_PART_FIELDS = {
    "text": {"type", "text", "cache_control"},
    "image_url": {"type", "image_url", "cache_control"},
}
"""Fields that a part of a type may have."""
_PART_FORM = (
    'must have only parts of the form {"type": "text", "text": "…"} or {"type": "image_url",'
    ' "image_url": {"url": "…"}}'
)
_TTL_S = {"5m": 300.0, "1h": 3600.0}
_DEFAULT_TTL = "5m"


def _check_cache_control(value: Any) -> None:
    if value is None:
        return
    is_known = isinstance(value, dict) and value.get("type") == "ephemeral"
    if not is_known or not set(value) <= {"type", "ttl"}:
        raise ValueError('must have cache_control only as {"type": "ephemeral", "ttl": "5m"}')
    if (ttl := value.get("ttl")) is not None and (not isinstance(ttl, str) or ttl not in _TTL_S):
        raise ValueError(f"must have cache_control.ttl {' or '.join(_TTL_S)}, got {show(ttl)}")


class CacheMark(NamedTuple):
    """The wishes of the `cache_control`s of a message."""

    num_chars: int
    """Length of the content up to the last of them."""
    seconds: float
    """The longest of them."""


class CacheMarks(NamedTuple):
    """The wishes of the `cache_control`s of all messages."""

    place: Place
    seconds: float


def _mark_of(content: Any) -> CacheMark | None:
    """Return what a content that `_text_of` takes is marked with."""
    if not isinstance(content, list):
        return None
    controls = [part.get("cache_control") for part in content]
    if (seconds := [_TTL_S[c.get("ttl") or _DEFAULT_TTL] for c in controls if c is not None]) == []:
        return None
    last = max(number for number, control in enumerate(controls) if control is not None)
    before = JOINT.join(_texts_in(content[: last + 1]))
    return CacheMark(len(before), max(seconds))


class CacheControl(StrictModel):
    """Up to the end of the part that has it, the prompt should stay in the prefix cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextPart(StrictModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ImageFields(StrictModel):
    """`image_url`."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None
    min_pixels: Annotated[int, Field(ge=1, le=MAX_PIXELS)] | None = None
    max_pixels: Annotated[int, Field(ge=1, le=MAX_PIXELS)] | None = None


class ImagePart(StrictModel):
    """A picture in a message's content."""

    type: Literal["image_url"]
    image_url: ImageFields
    cache_control: CacheControl | None = None


_Content = str | Annotated[list[TextPart | ImagePart], Field(min_length=1)]
"""Input of `_text_of`."""


class PredictionPart(StrictModel):
    """A part of the text of a prediction."""

    type: Literal["text"]
    text: str


class Prediction(StrictModel):
    """A text that most of the answer is expected to be."""

    type: Literal["content"]
    content: str | Annotated[list[PredictionPart], Field(min_length=1)]

    @property
    def text(self) -> str:
        """The whole of it."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class Message(NoEffectModel):
    """One turn; `developer` is another word for `system`."""

    no_effect = MESSAGE_NO_EFFECT

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    content: Annotated[
        str | None, BeforeValidator(_text_of, json_schema_input_type=_Content | None)
    ] = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """Another name of `reasoning`."""
    _cache_mark: CacheMark | None = None
    _parts: tuple[str | None, ...] = ()
    """The texts of which the content is made, and None for each image, if it was a list."""
    _images: tuple[Picture, ...] = ()
    """Images, each with the place of its part in the content."""

    @model_validator(mode="wrap")
    @classmethod
    def _checked(cls, body: Any, validate: ModelWrapValidatorHandler[Message]) -> Message:
        message = validate(body)
        calls, thoughts = message.tool_calls, message.thoughts
        if message.role != "assistant" and (calls or thoughts):
            raise ValueError("may have tool_calls and reasoning only if its role is assistant")
        if None not in (given := {message.reasoning, message.reasoning_content}) and len(given) > 1:
            raise ValueError("may have reasoning and reasoning_content only if they are equal")
        if (message.role == "tool") != (message.tool_call_id is not None):
            raise ValueError("must have tool_call_id if its role is tool, and only then")
        if message.content is None and not calls and not thoughts:
            raise ValueError("must have content, which is null only beside tool_calls or reasoning")
        content = body.get("content")
        message._cache_mark = _mark_of(content)
        if isinstance(content, list):
            message._parts = tuple(part.get("text") for part in content)
            message._images = tuple(
                Picture(place=f"content[{number}].image_url", **part["image_url"])
                for number, part in enumerate(content)
                if part["type"] == "image_url"
            )
        if message._images and message.role != "user":
            raise ValueError("may have images only if its role is user")
        return message

    @property
    def images(self) -> tuple[Picture, ...]:
        """Images in its content, each with its part's place there."""
        return self._images

    @property
    def cache_mark(self) -> CacheMark | None:
        """The last `cache_control` in its content."""
        return self._cache_mark

    @property
    def thoughts(self) -> str | None:
        """Earlier reasoning of the assistant."""
        return self.reasoning_content if self.reasoning is None else self.reasoning

    def rendered(self) -> ChatMessage:
        """Return it as chat templates know it."""
        others: dict[str, Any] = {} if self.name is None else {"name": self.name}
        if self.tool_calls:
            others["tool_calls"] = [call.rendered() for call in self.tool_calls]
        if self.tool_call_id is not None:
            others["tool_call_id"] = self.tool_call_id
        if self.thoughts is not None:  # templates know it by either name
            others["reasoning"] = others["reasoning_content"] = self.thoughts
            if self.tool_calls and not self.content:  # gpt-oss's by a third, and before calls alone
                others["thinking"] = self.thoughts
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(
            role, self.content or "", others, self._parts, is_null=self.content is None
        )


def pictures_of(messages: Sequence[Message]) -> list[Picture]:
    """Return the images of all messages, in order."""
    return [
        picture._replace(place=f"messages[{number}].{picture.place}")
        for number, message in enumerate(messages)
        for picture in message.images
    ]


def names_of_pictures(messages: Sequence[Message], places: Sequence[str]) -> dict[str, str]:
    """Return what errors about the images of messages are to call them: `places`, in order."""
    return {
        picture.place: place for picture, place in zip(pictures_of(messages), places, strict=True)
    }


# ----------------------------------------------------------------------
# The parts of an answer, one after the other, for routes that do not call them fields of a message.


class AnswerPart(NamedTuple):
    """The next of a text, or the beginning of a call."""

    kind: Literal["text", "reasoning", "call"]
    text: str
    """The text; for a call, of its arguments."""
    call_id: str = ""
    """Given where a call begins, random."""
    name: str = ""
    """Name of the tool, where a call begins."""


def parts_of(parts: Iterable[dict[str, Any]]) -> Iterator[AnswerPart]:
    """Yield parts of a message one by one."""
    for part in parts:
        ((field, value),) = part.items()
        if field == "content":
            yield AnswerPart("text", value)
        elif field == "reasoning_content":
            yield AnswerPart("reasoning", value)
        else:
            for call in value:
                function = call["function"]
                name, call_id = function.get("name", ""), call.get("id", "")
                yield AnswerPart("call", function["arguments"], call_id, name)
