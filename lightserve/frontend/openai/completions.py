"""POST /v1/completions."""

from __future__ import annotations

import itertools
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from msgspec.json import encode
from pydantic import BeforeValidator, Field
from starlette.responses import JSONResponse, Response

from lightserve.errors import InvalidRequest
from lightserve.frontend.columns import (
    ITEMS_PER_PIECE,
    Piece,
    PieceColumns,
    TextBuffer,
    batches,
    json_list,
    json_object,
    json_text,
    text_parts,
)
from lightserve.frontend.completion import Choices, TextDelta, raised_slo
from lightserve.frontend.json_body import Integer, show, whole_numbers
from lightserve.frontend.openai.fields import COMPLETION_NO_EFFECT, CommonFields
from lightserve.frontend.openai.writing import (
    ChunkWriter,
    CompletionLogprobs,
    completion_logprobs_json,
    end_fields,
    prompt_logprobs_json,
    prompt_pieces,
    whole_answer,
)
from lightserve.frontend.request_options import (
    NumChoices,
    NumLogprobs,
    Prepared,
    ServiceLevel,
    with_objective,
)
from lightserve.frontend.response import CompletionResponse, ResponseWriter, new_request_id
from lightserve.frontend.service import AnswerSize, Service

# ----------------------------------------------------------------------
# GET /v1/models and /v1/models/{id}.


def models_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    def model_object(name: str) -> dict[str, Any]:
        model = service.model
        return {
            "id": name,
            "object": "model",
            "created": model.created_s,
            "owned_by": "lightserve",
            "root": model.names[0],
            "max_model_len": service.context_len,
        }

    @router.get("/v1/models")
    async def list_models() -> JSONResponse:
        """List the served model under each of its names."""
        data = [model_object(name) for name in service.model.names]
        return JSONResponse({"object": "list", "data": data})

    @router.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> JSONResponse:
        """Describe the served model."""
        service.check_model(model_id)
        return JSONResponse(model_object(model_id))

    return router


DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 64
TOKENS_PER_CHUNK = 64
"""Tokens in a chunk of an echoed prompt with log-probabilities."""

Prompt = str | list[int]


def _prompts_of(value: Any) -> Any:
    return texts_or_ids(value, most=MAX_PROMPTS, name="prompts")


def texts_or_ids(value: Any, *, most: int, name: str) -> list[Any]:
    """Reduce a text, a list of ids, or a list of both to the last of these.

    Raises ValueError: it is none, or has more than `most` of what it calls `name`.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"must be a string or a list of token ids, got {show(value)}")
    if not any(isinstance(item, str | list) for item in value):
        return [_ids_of(value)]
    if len(value) > most:
        raise ValueError(f"must have at most {most} {name}, got {len(value)}")
    return [item if isinstance(item, str) else _ids_of(item) for item in value]


def _ids_of(value: Any) -> list[int]:
    """Return a list of token ids. Raises ValueError: it is none."""
    if not isinstance(value, list):
        raise ValueError(f"must hold strings or lists of token ids, got {show(value)}")
    token_ids: list[int] = whole_numbers(value)
    if not set(map(type, token_ids)) <= {int}:
        other = next(item for item in token_ids if type(item) is not int)
        raise ValueError(f"must hold token ids, which are integers, got {show(other)}")
    return token_ids


_PromptInput = (
    str | list[int] | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS)]
)
"""Input of `_prompts_of`."""


class CompletionRequest(CommonFields):
    """The body: `prompt` is a text, a list of token ids, or a list of these."""

    no_effect = COMPLETION_NO_EFFECT
    prompt: Annotated[list[Any], BeforeValidator(_prompts_of, json_schema_input_type=_PromptInput)]
    max_tokens: Annotated[Integer, Field(ge=0)] | None = None
    logprobs: NumLogprobs | None = None
    suffix: str | None = None
    echo: bool | None = None
    best_of: NumChoices | None = None

    def check(self, service: Service) -> None:
        """Check what types cannot. Raises InvalidRequest."""
        super().check(service)
        self.check_count(service, len(self.prompt))
        if self.best_of not in (None, self.num_choices):
            raise InvalidRequest(
                f"best_of must be equal to n ({self.num_choices}), got {self.best_of}",
                param="best_of",
            )
        if self.suffix:
            self._check_suffix()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest(
                "max_tokens must be at least 1 unless echo is true, got 0", param="max_tokens"
            )
        known = self.prompt_logprobs
        if self.echo and None not in (known, self.logprobs) and known != self.logprobs:
            raise InvalidRequest(
                f"prompt_logprobs must be equal to logprobs ({self.logprobs}) where echo is true,"
                f" got {known}",
                param="prompt_logprobs",
            )

    @property
    def echoes(self) -> bool:
        """Whether each completion begins with the prompt."""
        return bool(self.echo)

    @property
    def prompt_items(self) -> int:
        """Entries of each completion for each token of its prompt: ids and log-probabilities."""
        return super().prompt_items + (1 + (self.logprobs or 0) if self.echo else 0)

    def _check_suffix(self) -> None:
        if not all(isinstance(prompt, str) for prompt in self.prompt):
            raise InvalidRequest("suffix needs prompts that are texts", param="suffix")
        for name in ("echo", "truncate_prompt_tokens"):
            if getattr(self, name):
                raise InvalidRequest(f"suffix cannot be combined with {name}", param="suffix")

    @property
    def only_echoes(self) -> bool:
        """Whether nothing is to be generated."""
        return self.max_tokens == 0


class CompletionWriter(ResponseWriter):
    """OpenAI's text completion objects."""

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        self.request_id = new_request_id("cmpl")
        self.wants_pieces = request.logprobs is not None or bool(request.return_token_ids)
        self.prompt_texts: list[str] = []
        """Text of each echoed prompt; set once they are encoded."""
        self._request = request
        self._tokenizer = service.model.tokenizer
        self._envelope = {
            "id": self.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model,
            "service_tier": request.used_tier,
        }
        self._writer = ChunkWriter(self._envelope, usage=request.usage_chunks)
        self._begun: dict[int, CompletionLogprobs] = {}
        """Log-probabilities of the completions that have begun, in a stream."""
        self._frames: dict[int, tuple[bytes, bytes] | None] = {}
        """The common parts of the chunks of each completion that has begun."""
        self._texts: defaultdict[int, TextBuffer] = defaultdict(TextBuffer)
        self._pieces: defaultdict[int, PieceColumns] = defaultdict(PieceColumns)
        """Tokens of the completions, for an answer that is not streamed."""

    def delta(self, index: int, delta: TextDelta, choices: Choices) -> Iterable[bytes]:
        """Return one chunk; after those of an echoed prompt, if it is long."""
        frame = self._frames.get(index)
        if frame is None or delta.finish_reason is not None:
            return self._chunks(index, delta, choices)
        return (frame[0] + encode(delta.text) + frame[1],)

    def _chunks(self, index: int, delta: TextDelta, choices: Choices) -> Iterator[bytes]:
        completion = choices.completions[index]
        usage, text = completion.usage, delta.text
        first: dict[str, Any] = {}
        """Fields that only the first chunk of a choice has."""
        fields: dict[str, Any] = {}
        prompt: Iterable[Piece] = ()
        if index not in self._begun:
            self._begun[index] = CompletionLogprobs(self._tokenizer)
            if not self.wants_pieces:
                plain = self._choice(index, "", ([], True), end_fields(completion, None))
                self._frames[index] = self._writer.frame(plain)
            fields = raised_slo([completion])
            text = self._prompt_text(index) + text
            own, known = completion.options.prompt_token_ids, completion.prompt_logprobs
            if self.prompt_texts and self._request.logprobs is not None:
                prompt = prompt_pieces(self._tokenizer, own, known)
            if self._request.return_token_ids:
                first = {"prompt_token_ids": list(own)}
        parts = itertools.chain(
            ((part, False) for part in batches(prompt, TOKENS_PER_CHUNK)),
            ((part, True) for part in batches(delta.pieces, TOKENS_PER_CHUNK)),
        )
        part = next(parts, ([], True))
        for following in parts:
            choice = self._choice(index, text, part, end_fields(completion, None))
            yield self._writer.chunk(choice | first, usage, fields)
            part, text, first, fields = following, "", {}, {}
        last = self._choice(index, text, part, end_fields(completion, delta.finish_reason))
        yield self._writer.chunk(last | first, usage, fields)

    def _choice(
        self, index: int, text: str, part: tuple[Sequence[Piece], bool], end: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the choice of a chunk; `part`: tokens, and whether they are output."""
        pieces, is_output = part
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = self._begun[index].of_pieces(pieces)
        choice = {"index": index, "text": text, "logprobs": logprobs, **end}
        if self._request.return_token_ids:
            choice["token_ids"] = [piece.token_id for piece in pieces] if is_output else []
        return choice

    def closing(self, choices: Choices) -> bytes:
        """Return usage, if wanted, and the end."""
        return self._writer.closing(choices.usage)

    def keep(self, index: int, delta: TextDelta) -> None:
        """Take in some news for `whole`."""
        self._texts[index].append(delta.text)
        self._pieces[index].extend(delta.pieces)

    def whole(self, choices: Choices) -> Iterator[bytes]:
        """Yield the completion object."""
        objects = (self._object(index, choices) for index in range(len(choices.completions)))
        return whole_answer(self._envelope, objects, choices)

    def _object(self, index: int, choices: Choices) -> Iterator[bytes]:
        completion = choices.completions[index]
        text = itertools.chain(text_parts(self._prompt_text(index)), self._texts[index].parts())
        own, pieces = completion.options.prompt_token_ids, self._pieces[index]
        logprobs = prompt_logprobs = prompt_token_ids = token_ids = None
        if self._request.logprobs is not None:
            prompt = (own, completion.prompt_logprobs) if self.prompt_texts else None
            logprobs = completion_logprobs_json(self._tokenizer, prompt, pieces)
        if self._request.prompt_logprobs is not None:
            first = choices.completions[index - index % self._request.num_choices]
            prompt_logprobs = prompt_logprobs_json(self._tokenizer, own, first.prompt_logprobs)
        if self._request.return_token_ids:
            prompt_token_ids = json_list(own, ITEMS_PER_PIECE)
            token_ids = json_list(pieces.token_ids, ITEMS_PER_PIECE)
        return json_object(
            {
                "index": index,
                "text": json_text(text),
                "logprobs": logprobs,
                **end_fields(completion, completion.finish_reason),
                "prompt_logprobs": prompt_logprobs,
                "prompt_token_ids": prompt_token_ids,
                "token_ids": token_ids,
            }
        )

    def _prompt_text(self, index: int) -> str:
        """Return what of the prompt stands in front of a completion."""
        return self.prompt_texts[index // self._request.num_choices] if self.prompt_texts else ""


def completions_router(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        """Complete one or several prompts."""
        body = await service.bodies.read(request, CompletionRequest)
        body = with_objective(body, request.headers, service.config.objectives)
        body.check(service)
        level = body.service_level(service, request)
        writer = CompletionWriter(service, body)

        async def prepare() -> list[Prepared]:
            prompts = await encode_prompts(service, body)
            if body.echo:
                is_cut = body.truncate_prompt_tokens is not None
                writer.prompt_texts = await _texts(service, prompts if is_cut else body.prompt)
            return await _requests(service, body, prompts, level)

        return CompletionResponse(
            service,
            writer,
            prepare,
            level,
            stream=body.stream or False,
            per_prompt=body.num_choices,
        )

    return router


async def encode_prompts(service: Service, body: CompletionRequest) -> list[array[int]]:
    """Return each prompt's ids. Raises InvalidRequest, RequestFailed."""
    encoder = service.encoder
    if body.suffix:
        return [await encoder.encode_between(prompt, body.suffix) for prompt in body.prompt]
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    keep = service.resolve_truncation(body.truncate_prompt_tokens, max_tokens=max_tokens)
    return [
        await encoder.encode_text(prompt, param="prompt", keep=keep)
        if isinstance(prompt, str)
        else await encoder.encode_ids(prompt, param="prompt", keep=keep)
        for prompt in body.prompt
    ]


async def _texts(service: Service, prompts: Sequence[str | Sequence[int]]) -> list[str]:
    decode = service.encoder.decode
    return [prompt if isinstance(prompt, str) else await decode(prompt) for prompt in prompts]


async def _requests(
    service: Service, body: CompletionRequest, prompts: Sequence[array[int]], level: ServiceLevel
) -> list[Prepared]:
    """Resolve all parameters. Raises InvalidRequest, RequestFailed."""
    asked = 1 if body.only_echoes else body.max_tokens
    limits = service.resolve_max_tokens(
        [len(prompt) for prompt in prompts],
        asked,
        default=service.model.sampling_defaults.max_tokens or DEFAULT_MAX_TOKENS,
        param="max_tokens",
        size=AnswerSize(
            num_choices=body.num_choices,
            num_logprobs=body.logprobs or 0,
            prompt_items=body.num_choices * body.prompt_items,
        ),
    )
    echoed = body.logprobs if body.echo else None
    sampling = await body.sampling(
        service,
        num_logprobs=body.logprobs,
        num_prompt_logprobs=echoed if body.prompt_logprobs is None else body.prompt_logprobs,
    )
    constraint = await body.resolve_constraint(service, level)
    infilling = service.encoder.infilling if body.suffix and not body.ignore_eos else None
    return list(
        body.new_requests(
            service,
            list(zip(prompts, limits, strict=True)),
            sampling,
            level,
            constraint,
            end_token_ids=() if infilling is None else infilling.end_token_ids,
            discards_output=body.only_echoes,
        )
    )
