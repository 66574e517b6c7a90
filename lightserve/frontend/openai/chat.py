"""POST /v1/chat/completions."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from msgspec.json import encode
from pydantic import BeforeValidator, Field
from starlette.responses import Response

from lightserve.config.fields import flag_name
from lightserve.errors import InvalidRequest
from lightserve.frontend.columns import ITEMS_PER_PIECE, Piece, PieceColumns, json_list, json_object
from lightserve.frontend.completion import Choices, Completion, TextDelta, raised_slo
from lightserve.frontend.errors import OWN_NAMES, renamed
from lightserve.frontend.json_body import (
    BODY_BYTES_KEY,
    MAX_VALUES,
    Integer,
    count_values_in_texts,
    show,
)
from lightserve.frontend.openai.fields import CHAT_NO_EFFECT, CommonFields
from lightserve.frontend.openai.messages import CacheMarks, Message, Prediction, pictures_of
from lightserve.frontend.openai.output_parser import MessageBuffer, OutputParser, ParserOptions
from lightserve.frontend.openai.thinking import (
    Start,
    budget_within,
    start_behind,
    takes_levels,
    thinking_of,
)
from lightserve.frontend.openai.tools import ToolChoice, Tools, ToolUse, resolve_tools
from lightserve.frontend.openai.writing import (
    ChunkWriter,
    chat_logprobs,
    chat_logprobs_json,
    end_fields,
    prompt_logprobs_json,
    whole_answer,
)
from lightserve.frontend.prompts import EncodedChat
from lightserve.frontend.request_options import (
    MaxTokens,
    NumLogprobs,
    Prepared,
    ServiceLevel,
    with_images,
    with_objective,
)
from lightserve.frontend.response import (
    BeforeEnd,
    CompletionResponse,
    ResponseWriter,
    new_request_id,
)
from lightserve.frontend.service import AnswerSize, Service
from lightserve.messages.common import MAX_INT32, Thinking, pack_int32
from lightserve.messages.images import Image
from lightserve.model_formats import CALL_FORMATS, HARMONY, NONE, REASONING_FORMATS
from lightserve.tokenization.chat_template import ChatTemplate
from lightserve.tokenization.conversation import (
    THINKING_SWITCHES,
    ChatMessage,
    Conversation,
    Ending,
    Place,
)
from lightserve.types import PLAIN_SAMPLING, SAMPLING_FIELDS, FinishReason

MAX_MESSAGES = 2048
MAX_TEMPLATE_OPTIONS = 16
_ROLE = {"role": "assistant", "content": ""}


def _plain(value: Any) -> Any:
    if isinstance(value, dict | list):
        raise ValueError(f"must be a string, a number, true, false or null, got {show(value)}")
    if isinstance(value, int) and value.bit_length() > 63:
        raise ValueError(f"must be a number of at most 64 bits, got {show(value)}")
    return value


TemplateOptions = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[Any, BeforeValidator(_plain)]],
    Field(max_length=MAX_TEMPLATE_OPTIONS),
]
"""`chat_template_kwargs`, as vLLM has it: values of variables of the model's chat template."""


_NOT_WITH_PREDICTION = ("logprobs", "tools", "max_completion_tokens")
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatRequest(CommonFields):
    """The body."""

    no_effect = CHAT_NO_EFFECT
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[Integer, Field(ge=-1)] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: Prediction | None = None

    @property
    def limit_param(self) -> str:
        """The name under which this request gives its limit of tokens."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def asked_tokens(self) -> int | None:
        """The most tokens of an answer, if it says so."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self, service: Service) -> None:
        """Check what types cannot. Raises InvalidRequest."""
        super().check(service)
        self.check_count(service, 1)
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens mean the same; give one of them",
                param="max_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.parallel_tool_calls is not None and not self.tools:
            raise InvalidRequest("parallel_tool_calls needs tools", param="parallel_tool_calls")
        if self.continue_final_message:
            self._check_continued()
        if self.prediction is not None:
            self._check_prediction(service)
        if self.cache_marks is not None:
            self.check_retention(service, "cache_control", param="messages")

    def _check_continued(self) -> None:
        if self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt cannot both be true",
                param="continue_final_message",
            )
        last = self.messages[-1]
        if last.role != "assistant" or last.content is None or last.tool_calls:
            raise InvalidRequest(
                "continue_final_message needs a last message of the assistant with content, and"
                " without tool_calls",
                param="continue_final_message",
            )

    def _check_prediction(self, service: Service) -> None:
        if (found := service.config.speculation) not in ("ngram", "suffix"):
            raise InvalidRequest(
                f"prediction is not available: this server guesses no tokens from texts"
                f" ({flag_name('speculation')} {found})",
                param="prediction",
            )
        refused = {name: bool(getattr(self, name)) for name in _NOT_WITH_PREDICTION}
        refused["n"] = self.num_choices > 1
        # OpenAI's penalties are 0 where they change nothing.
        for name in [name for name in SAMPLING_FIELDS if "penalty" in name]:
            if getattr(PLAIN_SAMPLING, name) == 0:
                refused[name] = (getattr(self, name) or 0) > 0
        for name in [name for name, is_there in refused.items() if is_there]:
            raise InvalidRequest(
                f"prediction cannot be combined with {name}, got {show(getattr(self, name))}",
                param=name,
            )

    @property
    def cache_marks(self) -> CacheMarks | None:
        """Where the last `cache_control` is, and the longest time that one of them asks for."""
        marks = [(n, m.cache_mark) for n, m in enumerate(self.messages) if m.cache_mark is not None]
        if not marks:
            return None
        number, last = marks[-1]
        return CacheMarks(Place(number, last.num_chars), max(mark.seconds for _, mark in marks))

    @property
    def begun(self) -> str:
        """The message that the output continues; empty: it continues none."""
        return (self.messages[-1].content or "") if self.continue_final_message else ""

    @property
    def ending(self) -> Ending:
        """End of the prompt."""
        if self.continue_final_message:
            return Ending.OPEN
        return Ending.MESSAGE if self.add_generation_prompt is False else Ending.ANSWER

    def level_of(self, template: ChatTemplate, reasoning: str) -> str | None:
        """Return the level of reasoning that becomes a budget; None: none does.

        `reasoning`: a key of `REASONING_FORMATS`, or none.
        """
        is_own = "reasoning_effort" in template.option_names
        return None if is_own or not takes_levels(reasoning) else self.reasoning_effort

    def template_options(self, template: ChatTemplate, reasoning: str) -> dict[str, Any]:
        """Return values of the template's variables. Raises InvalidRequest: it has no such.

        `reasoning` as in `level_of`: such a level switches thinking on or off.
        """
        options = dict(self.chat_template_kwargs or {})
        fields = {name: f"chat_template_kwargs.{name[:64]}" for name in options}
        level = self.level_of(template, reasoning)
        for name in ("reasoning_effort", "verbosity"):
            if (value := getattr(self, name)) is None:
                continue
            if name == "reasoning_effort" and level is not None:
                switch = next((s for s in THINKING_SWITCHES if s in template.option_names), None)
                if switch is not None:
                    options.setdefault(switch, level != "none")
                continue
            if name in options:
                raise InvalidRequest(
                    f"{name} and chat_template_kwargs.{name} mean the same; give one of them",
                    param=name,
                )
            options[name], fields[name] = value, name
        for name, field in fields.items():
            if name not in template.option_names:
                known = ", ".join(sorted(template.option_names))[:256] or "none"
                raise InvalidRequest(
                    f"{field} is no variable of the model's chat template; it has {known}",
                    param=field.partition(".")[0],
                )
        if self.add_generation_prompt is False and not template.can_end_with_message:
            raise InvalidRequest(
                "add_generation_prompt is no variable of the model's chat template: it cannot be"
                " false",
                param="add_generation_prompt",
            )
        return options

    def rendered(self) -> list[ChatMessage]:
        """Return the messages as chat templates know them. Raises InvalidRequest."""
        if count_values_in_texts(self._arguments) > MAX_VALUES:
            raise InvalidRequest(
                f"messages must have at most {MAX_VALUES} values in the arguments of their"
                " tool_calls together",
                param="messages",
            )
        return [message.rendered() for message in self.messages]

    @property
    def _arguments(self) -> list[str]:
        calls = (call for message in self.messages for call in message.tool_calls or ())
        return [call.function.arguments for call in calls]

    def tool_use(self, service: Service) -> ToolUse:
        """Return what is to be done with the tools. Raises InvalidRequest."""
        return resolve_tools(
            self.tools,
            self.tool_choice,
            is_parallel=self.parallel_tool_calls is not False,
            tool_format=service.formats.tools,
        )


class ConversationWriter(ResponseWriter):
    """A way of writing the answer to a conversation down."""

    def __init__(self) -> None:
        self.parser_options = ParserOptions()
        """The parts to look for in the output; set before it begins."""
        self.parsers: dict[int, OutputParser] = {}
        """Parsers of the choices that have begun."""

    def parts(self, index: int, delta: TextDelta) -> list[dict[str, Any]]:
        """Return the parts of a choice's message that some news complete."""
        if index not in self.parsers:
            self.parsers[index] = OutputParser(self.parser_options)
        parser = self.parsers[index]
        parts = parser.push(delta.text)
        if delta.finish_reason is not None:
            parts += parser.finish()
        return parts


class ChatWriter(ConversationWriter):
    """OpenAI's chat completion objects."""

    def __init__(self, service: Service, request: ChatRequest) -> None:
        super().__init__()
        self.request_id = new_request_id("chatcmpl")
        self._request = request
        self.wants_pieces = bool(request.logprobs or request.return_token_ids)
        self._tokenizer = service.model.tokenizer
        self._envelope = {
            "id": self.request_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "service_tier": request.used_tier,
        }
        chunk_envelope = self._envelope | {"object": "chat.completion.chunk"}
        self._writer = ChunkWriter(chunk_envelope, usage=request.usage_chunks)
        self._frames: dict[tuple[int, str], tuple[bytes, bytes] | None] = {}
        """By choice and field of its message: what chunks with that field alone have in common."""
        self._messages: defaultdict[int, MessageBuffer] = defaultdict(MessageBuffer)
        self._pieces: defaultdict[int, PieceColumns] = defaultdict(PieceColumns)
        """Tokens of the choices, for an answer that is not streamed."""

    def delta(self, index: int, delta: TextDelta, choices: Choices) -> Iterator[bytes]:
        """Yield chunks with the parts of the text, if any; the last has the finish reason."""
        completion = choices.completions[index]
        if index not in self.parsers:
            yield self._first_chunk(index, completion)
        parts = self.parts(index, delta)
        if len(parts) == 1 and delta.finish_reason is None and not self.wants_pieces:
            ((field, text),) = parts[0].items()
            if isinstance(text, str) and (frame := self._frame(index, field)) is not None:
                yield frame[0] + encode(text) + frame[1]
                return
        reason = self._reason(index, delta.finish_reason)
        if not parts and (delta.pieces or reason is not None):
            parts = [{"content": ""} if reason is None else {}]
        pieces: Sequence[Piece] = delta.pieces
        for number, part in enumerate(parts, 1):
            is_last = number == len(parts)
            choice = self._choice(index, part, pieces)
            choice |= end_fields(completion, reason if is_last else None)
            yield self._writer.chunk(choice, completion.usage)
            pieces = ()

    def _frame(self, index: int, field: str) -> tuple[bytes, bytes] | None:
        """Return what stands before and behind a text that is all that a chunk has."""
        if (index, field) not in self._frames:
            choice = self._choice(index, {field: ""}, ())
            self._frames[index, field] = self._writer.frame(choice | {"finish_reason": None})
        return self._frames[index, field]

    def _first_chunk(self, index: int, completion: Completion) -> bytes:
        """Return the chunk that names a choice's role."""
        fields = raised_slo([completion])
        if self._request.return_token_ids and not self.parsers:
            fields["prompt_token_ids"] = list(completion.options.prompt_token_ids)
        choice = {"index": index, "delta": _ROLE, "logprobs": None, "finish_reason": None}
        usage = dataclasses.replace(completion.usage, completion_tokens=0)
        return self._writer.chunk(choice, usage, fields)

    def _choice(self, index: int, part: dict[str, Any], pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the choice of a chunk, with the tokens behind its and all following parts."""
        logprobs = None
        if self._request.logprobs and pieces:
            logprobs = chat_logprobs(self._tokenizer, pieces)
        choice = {"index": index, "delta": part, "logprobs": logprobs}
        if self._request.return_token_ids:
            choice["token_ids"] = [piece.token_id for piece in pieces]
        return choice

    def closing(self, choices: Choices) -> bytes:
        """Return usage, if wanted, and the end."""
        return self._writer.closing(choices.usage)

    def keep(self, index: int, delta: TextDelta) -> None:
        """Take in some news for `whole`."""
        self._messages[index].extend(self.parts(index, delta))
        self._pieces[index].extend(delta.pieces)

    def whole(self, choices: Choices) -> Iterator[bytes]:
        """Yield the chat completion object."""
        objects = (self._object(*numbered) for numbered in enumerate(choices.completions))
        return whole_answer(self._envelope, objects, choices, self._of_prompt(choices.first))

    def _of_prompt(self, first: Completion) -> dict[str, Any]:
        """Return what a whole answer says of the prompt."""
        own = first.options.prompt_token_ids
        fields: dict[str, Any] = {"prompt_logprobs": None, "prompt_token_ids": None}
        if self._request.prompt_logprobs is not None:
            known = prompt_logprobs_json(self._tokenizer, own, first.prompt_logprobs)
            fields["prompt_logprobs"] = known
        if self._request.return_token_ids:
            fields["prompt_token_ids"] = json_list(own, ITEMS_PER_PIECE)
        return fields

    def _object(self, index: int, completion: Completion) -> Iterator[bytes]:
        message = {"role": "assistant", "refusal": None, **self._messages[index].fields()}
        logprobs = token_ids = None
        if self._request.logprobs:
            logprobs = chat_logprobs_json(self._tokenizer, self._pieces[index])
        if self._request.return_token_ids:
            token_ids = json_list(self._pieces[index].token_ids, ITEMS_PER_PIECE)
        return json_object(
            {
                "index": index,
                "message": json_object(message),
                "logprobs": logprobs,
                **end_fields(completion, self._reason(index, completion.finish_reason)),
                "token_ids": token_ids,
            }
        )

    def _reason(self, index: int, reason: FinishReason | None) -> str | None:
        """Return why a choice ended, in OpenAI's words."""
        is_call = reason is FinishReason.STOP and self.parsers[index].num_calls > 0
        return "tool_calls" if is_call else reason


def chat_router(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        body = await service.bodies.read(request, ChatRequest)
        body = with_objective(body, request.headers, service.config.objectives)
        return answer_chat(service, request, body, ChatWriter(service, body))

    return router


def answer_chat(
    service: Service,
    request: Request,
    body: ChatRequest,
    writer: ConversationWriter,
    *,
    most_tokens: int | None = None,
    names: Mapping[str, str] = OWN_NAMES,
    before_end: BeforeEnd | None = None,
) -> CompletionResponse:
    """Return the answer to a conversation, whichever route it came by.

    `most_tokens`: a limit that the context may cut. `names`: what errors call fields on that route.

    Raises:
        InvalidRequest: what types cannot check is wrong.
    """
    with renamed(names):
        body.check(service)
        level = body.service_level(service, request)
        tools = body.tool_use(service)

    async def prepare() -> list[Prepared]:
        size: int = request.scope[BODY_BYTES_KEY]
        own = functools.partial(
            _prepare, service, body, tools, level, size, most_tokens=most_tokens
        )
        with renamed(names):
            async with service.pictures.measured(pictures_of(body.messages)) as pictures:
                requests, prompt = await own(images=pictures.images)
                if pictures.images:
                    ask = functools.partial(service.router.ask, requests[0][0])
                    images = await pictures.read(ask)
                    if not all(map(_is_as_large, images, pictures.images)):
                        requests, prompt = await own(images=images)
                    requests = with_images(requests, images)
        writer.parser_options = _parser_options(service, body, tools, prompt.ending, requests[0])
        return requests

    return CompletionResponse(
        service,
        writer,
        prepare,
        level,
        stream=body.stream or False,
        per_prompt=body.num_choices,
        before_end=before_end,
    )


async def encode_chat(
    service: Service, body: ChatRequest, tools: ToolUse, size: int
) -> EncodedChat:
    """Render and encode a body of this size, of whose pictures none is decoded.

    Raises:
        InvalidRequest, RequestFailed: as `PictureReader.measured` and `PromptEncoder.encode_chat`.
    """
    async with service.pictures.measured(pictures_of(body.messages)) as pictures:
        return await _encode(service, body, tools, size, pictures.images)


def _is_as_large(image: Image, measured: Image) -> bool:
    return (image.height, image.width) == (measured.height, measured.width)


async def _encode(
    service: Service, body: ChatRequest, tools: ToolUse, size: int, images: Sequence[Image]
) -> EncodedChat:
    options = body.template_options(service.encoder.template, service.formats.reasoning)
    marks = body.cache_marks
    size -= sum(len(picture.url) for picture in pictures_of(body.messages))
    if images and body.truncate_prompt_tokens is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens cannot be combined with images", param="truncate_prompt_tokens"
        )

    def conversation() -> Conversation:
        return Conversation(
            messages=body.rendered(),
            tools=tools.descriptions,
            options=options,
            ending=body.ending,
            mark=None if marks is None else marks.place,
        )

    keep = service.resolve_truncation(body.truncate_prompt_tokens, max_tokens=body.asked_tokens)
    return await service.encoder.encode_chat(conversation, size=size, keep=keep, images=images)


def _has_tags(tool_format: str) -> bool:
    """Whether arguments stand between tags, so that strings are known by the schema alone."""
    return tool_format != NONE and CALL_FORMATS[tool_format].tags is not None


def _parser_options(
    service: Service, body: ChatRequest, tools: ToolUse, ending: str, request: Prepared
) -> ParserOptions:
    """Return what to look for in the output behind a prompt that ends like this."""
    formats, has_constraint = service.formats, request[0].constraint is not None
    tool_format = formats.enforced_tools if has_constraint else formats.tools
    is_answer = has_constraint and request[1].thinking is None
    options = ParserOptions(
        reasoning=NONE if is_answer else formats.reasoning,
        tool_format=tool_format if tools.offered else NONE,
        tool_names=tools.names,
        text_arguments=tools.text_arguments if _has_tags(tool_format) else {},
        max_calls=None if tools.is_parallel else 1,
        num_earlier_calls=sum(len(message.tool_calls or ()) for message in body.messages),
        is_constrained=has_constraint,
    )
    if options.reasoning == NONE:
        return options
    start = start_behind(ending, body.begun, formats.reasoning)
    if formats.reasoning == HARMONY:
        return options._replace(continues=start is Start.ANSWER)
    form = REASONING_FORMATS[options.reasoning]
    continues = start is Start.INSIDE and bool(body.begun)
    return options._replace(
        starts_in_reasoning=start is Start.INSIDE,
        continues=continues and not body.begun.rstrip().endswith(form.openings),
    )


def _thinking(
    service: Service, body: ChatRequest, ending: str, max_tokens: int, *, has_constraint: bool
) -> Thinking | None:
    """Return the reasoning with which an output may begin; None: none that is known.

    Raises:
        InvalidRequest: it is to have a budget, or an answer that a grammar writes, and its end is
            not known, or the budget leaves no answer.
    """
    reasoning = service.formats.reasoning
    if reasoning == NONE:
        options = body.chat_template_kwargs or {}
        switched = [s for s in THINKING_SWITCHES if options.get(s) is True and has_constraint]
        if body.thinking_token_budget is not None or switched:
            name = f"chat_template_kwargs.{switched[0]}" if switched else "thinking_token_budget"
            raise InvalidRequest(
                f"{name} needs a model whose end of reasoning is known, which is not so here:"
                f" its chat template shows none, and neither does {flag_name('reasoning_parser')}"
                + (" (for structured output behind it)" if switched else ""),
                param=name.partition(".")[0],
                code="unknown_reasoning",
            )
        return None
    level = body.level_of(service.encoder.template, reasoning)
    asked = body.thinking_token_budget
    budget = functools.partial(budget_within, asked, level, max_tokens, body.limit_param)
    start = start_behind(ending, body.begun, reasoning)
    return thinking_of(service, start, budget, has_constraint=has_constraint)


async def _prepare(
    service: Service,
    body: ChatRequest,
    tools: ToolUse,
    level: ServiceLevel,
    size: int,
    *,
    most_tokens: int | None,
    images: Sequence[Image],
) -> tuple[list[Prepared], EncodedChat]:
    """Encode and resolve a body of this size. Raises InvalidRequest, RequestFailed."""
    prompt = await _encode(service, body, tools, size, images)
    num_logprobs = body.top_logprobs or 0
    (max_tokens,) = service.resolve_max_tokens(
        [len(prompt.token_ids)],
        body.asked_tokens,
        default=most_tokens or service.model.sampling_defaults.max_tokens,
        param=body.limit_param,
        size=AnswerSize(
            num_choices=body.num_choices, num_logprobs=num_logprobs, prompt_items=body.prompt_items
        ),
    )
    sampling = await body.sampling(
        service,
        num_logprobs=num_logprobs if body.logprobs else None,
        num_prompt_logprobs=body.prompt_logprobs,
    )
    written = functools.partial(tools.spec, service.config, service.formats.enforced_tools)
    spec = await service.encoder.run(written, size=size)
    constraint = await body.resolve_constraint(service, level, spec)
    if tools.offered and constraint is not None and not tools.required:
        raise InvalidRequest(
            "tools cannot be combined with other structured output unless tool_choice is none",
            param="tools",
        )
    prompts = [(prompt.token_ids, max_tokens)]
    thinking = _thinking(
        service, body, prompt.ending, max_tokens, has_constraint=constraint is not None
    )
    prediction = b""
    if body.prediction is not None:
        is_budgeted = thinking is not None and thinking.budget < MAX_INT32
        if constraint is not None or is_budgeted:  # of such outputs nothing is guessed
            raise InvalidRequest(
                "prediction cannot be combined with structured output or a budget of reasoning",
                param="prediction",
            )
        text, param = body.prediction.text, "prediction.content"
        tokens = await service.encoder.encode_text(text, param=param, is_output=True)
        prediction = pack_int32(tokens)
    marks = body.cache_marks
    retained = (0, 0.0) if marks is None else (prompt.num_marked, marks.seconds)
    requests = body.new_requests(
        *(service, prompts, sampling, level, constraint),
        retained=retained,
        thinking=thinking,
        prediction=prediction,
        images=prompt.images,
    )
    return list(requests), prompt
