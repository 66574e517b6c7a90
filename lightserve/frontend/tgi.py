"""POST /generate, /generate_stream and /, in the shapes of text-completion-inference (TGI).

As there, decoding is greedy unless `do_sample` is true or a sampling parameter is given, and the
model's own generation_config is not consulted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from lightserve.errors import InvalidRequest
from lightserve.frontend.columns import (
    ITEMS_PER_PIECE,
    Piece,
    PieceColumns,
    TextBuffer,
    json_list,
    json_object,
    json_text,
)
from lightserve.frontend.completion import Choices, Completion, TextDelta, raised_slo
from lightserve.frontend.json_body import Integer, StrictModel, show
from lightserve.frontend.openai.fields import NoEffect, NoEffectModel
from lightserve.frontend.openai.writing import LOWEST, token_text
from lightserve.frontend.request_options import (
    MAX_STOP_STRINGS,
    MaxTokens,
    NumLogprobs,
    OutputOptions,
    Prepared,
    Priority,
    Seconds,
    ServiceLevel,
    SLOFields,
    StopString,
    given_sampling,
    new_submit,
    resolve_sampling,
    resolve_service_level,
    sampling_model,
    with_objective,
)
from lightserve.frontend.response import (
    CompletionResponse,
    ResponseWriter,
    new_request_id,
    sse_event,
)
from lightserve.frontend.service import AnswerSize, Service
from lightserve.frontend.structured_output import NativeGrammar, resolve_constraint, spec_of_grammar
from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.types import (
    PLAIN_SAMPLING,
    SAMPLING_FIELDS,
    Changes,
    FinishReason,
    GivenBy,
    RequestClass,
    SamplingParams,
)

DEFAULT_MAX_NEW_TOKENS = 100
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]
_GREEDY = SamplingParams(temperature=0.0)
_NO_EFFECT: NoEffect = {
    # What huggingface_hub's client has for TGI, at the values that change nothing.
    "watermark": (False,),
    "best_of": (1,),
    "adapter_id": (),
}


class GenerateParameters(NoEffectModel, sampling_model(GivenBy.TGI)):  # type: ignore[misc]
    """`parameters`; null is the same as absent."""

    no_effect = _NO_EFFECT

    max_new_tokens: MaxTokens | None = None
    do_sample: bool | None = None
    stop: StopStrings | None = None
    stop_sequences: StopStrings | None = None
    """An older name of `stop`."""
    truncate: Annotated[Integer, Field(ge=1, le=2**31 - 1)] | None = None
    """Only so many tokens at the prompt's end are read."""
    return_full_text: bool | None = None
    top_n_tokens: NumLogprobs | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    grammar: NativeGrammar | None = None
    slo: SLOFields | None = None
    priority: Priority | None = None
    timeout: Seconds | None = None

    def sampling(self, *, vocab_size: int) -> SamplingParams:
        """Return the parameters that it asks for. Raises InvalidRequest."""
        given = given_sampling(self)
        samples = bool(self.do_sample) or any(
            Changes.DRAW in SAMPLING_FIELDS[name].changes for name in given
        )
        given["num_logprobs"] = self.top_n_tokens or 0
        given["num_prompt_logprobs"] = 0 if self.decoder_input_details else None
        return resolve_sampling(
            PLAIN_SAMPLING if samples else _GREEDY, given, vocab_size=vocab_size
        )


class GenerateRequest(StrictModel):
    """The body; null `parameters` are the same as absent."""

    inputs: str
    parameters: GenerateParameters | None = None
    stream: bool | None = None
    """Chooses on POST /; elsewhere it may only say what the route does anyway."""

    def check(self, *, stream: bool) -> None:
        """Check what types cannot. Raises InvalidRequest."""
        if self.stream is not None and self.stream != stream:
            other = "/generate_stream" if self.stream else "/generate"
            raise InvalidRequest(
                f"stream must be {show(stream)} on this route, got {show(self.stream)}; use"
                f" {other}, or POST /",
                param="stream",
            )
        parameters = self.parameters or GenerateParameters()
        if parameters.stop is not None and parameters.stop_sequences is not None:
            raise InvalidRequest(
                "parameters.stop_sequences is another name of parameters.stop: give one of them",
                param="parameters.stop_sequences",
            )
        if parameters.decoder_input_details and (stream or not parameters.details):
            raise InvalidRequest(
                "parameters.decoder_input_details needs details to be true, and /generate",
                param="parameters.decoder_input_details",
            )

    def service_level(self, service: Service, request: Request) -> ServiceLevel:
        """Return how it is to be served. Raises InvalidRequest."""
        parameters = self.parameters or GenerateParameters()
        return resolve_service_level(
            request,
            service.config,
            request_class=RequestClass.RT,
            slo=parameters.slo,
            priority=parameters.priority,
            timeout_s=parameters.timeout,
            param_prefix="parameters.",
        )


class GenerateWriter(ResponseWriter):
    """TGI's response and events, one event per token."""

    wants_pieces = True

    def __init__(
        self, service: Service, request: GenerateRequest, *, in_list: bool = False
    ) -> None:
        """With `in_list` the answer as a whole is the only entry of a list."""
        self._in_list = in_list
        self.request_id = new_request_id("gen")
        self._parameters = request.parameters or GenerateParameters()
        self._prefix = request.inputs if self._parameters.return_full_text else ""
        self._tokenizer = service.model.tokenizer
        self._num_sent = 0
        self._text = TextBuffer(self._prefix)
        self._pieces = PieceColumns()
        """Tokens, for an answer that is not streamed."""
        self._pending: dict[str, Any] | None = None

    def delta(self, index: int, delta: TextDelta, choices: Choices) -> Iterator[bytes]:
        """Yield one event per token; the last token's waits for `closing`."""
        self._text.append(delta.text)
        for piece in delta.pieces:
            yield self._flush()
            self._num_sent += 1
            self._pending = {
                "index": self._num_sent,
                "token": self._token(piece),
                "generated_text": None,
                "details": None,
            }
            if self._num_sent == 1:
                self._pending |= raised_slo(choices.completions)
            if self._parameters.top_n_tokens:
                self._pending["top_tokens"] = self._top_tokens(piece)
        if delta.finish_reason is None:
            yield self._flush()

    def closing(self, choices: Choices) -> bytes:
        """Return the last token's event, which has the whole text."""
        assert self._pending is not None, "a completion has at least one token"
        completion = choices.first
        self._pending["generated_text"] = str(self._text)
        if self._parameters.details:
            input_length = completion.usage.prompt_tokens
            self._pending["details"] = {**_details(completion), "input_length": input_length}
        return self._flush()

    def keep(self, index: int, delta: TextDelta) -> None:
        """Take in some news for `whole`."""
        self._text.append(delta.text)
        if self._parameters.details:
            self._pieces.extend(delta.pieces)

    def whole(self, choices: Choices) -> Iterator[bytes]:
        """Yield the response."""
        text = json_text(self._text.parts())
        answer: dict[str, Any] = {"generated_text": text, **raised_slo(choices.completions)}
        if self._parameters.details:
            per_piece = self._pieces.logprobs.tokens_per_piece
            details = {
                **_details(choices.first),
                "prefill": json_list(self._prefill(choices.first), ITEMS_PER_PIECE),
                "tokens": json_list(map(self._token, self._pieces), ITEMS_PER_PIECE),
            }
            if self._parameters.top_n_tokens:
                details["top_tokens"] = json_list(map(self._top_tokens, self._pieces), per_piece)
            answer["details"] = json_object(details)
        if self._in_list:
            return itertools.chain([b"["], json_object(answer), [b"]"])
        return json_object(answer)

    def _flush(self) -> bytes:
        pending, self._pending = self._pending, None
        return b"" if pending is None else sse_event(msgspec.json.encode(pending))

    def _token(self, piece: Piece) -> dict[str, Any]:
        assert piece.logprob is not None
        return {
            "id": piece.token_id,
            "text": piece.text,
            "logprob": max(piece.logprob.logprob, LOWEST),
            "special": self._tokenizer.is_special(piece.token_id),
        }

    def _top_tokens(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the most probable tokens at a place."""
        assert piece.logprob is not None
        pairs = zip(piece.logprob.top_token_ids, piece.logprob.top_logprobs, strict=True)
        return [self._named(token_id, logprob) for token_id, logprob in pairs]

    def _prefill(self, completion: Completion) -> Iterator[dict[str, Any]]:
        if not self._parameters.decoder_input_details:
            return
        known = itertools.chain([None], completion.prompt_logprobs.own)
        for token_id, logprob in zip(completion.options.prompt_token_ids, known, strict=True):
            text = token_text(self._tokenizer, token_id)
            shown = None if logprob is None else max(logprob, LOWEST)
            yield {"id": token_id, "text": text, "logprob": shown}

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "id": token_id,
            "text": token_text(self._tokenizer, token_id),
            "logprob": max(logprob, LOWEST),
            "special": self._tokenizer.is_special(token_id),
        }


def _details(completion: Completion) -> dict[str, Any]:
    reason = "length"
    if completion.finish_reason is FinishReason.STOP:
        reason = "eos_token" if completion.stop_string is None else "stop_sequence"
    return {
        "finish_reason": reason,
        "generated_tokens": completion.num_tokens,
        "seed": completion.request.sampling.seed,
    }


def tgi_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    async def respond(request: Request, *, stream: bool | None) -> Response:
        body = await service.bodies.read(request, GenerateRequest)
        is_root = stream is None
        stream = bool(body.stream) if stream is None else stream
        body.check(stream=stream)
        parameters = with_objective(
            body.parameters or GenerateParameters(),
            request.headers,
            service.config.objectives,
            param="parameters.priority",
        )
        body = body.model_copy(update={"parameters": parameters})
        level = body.service_level(service, request)

        async def prepare() -> list[Prepared]:
            return await _prepare(service, body, level)

        writer = GenerateWriter(service, body, in_list=is_root)
        return CompletionResponse(service, writer, prepare, level, stream=stream)

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        """Generate, answering once."""
        return await respond(request, stream=False)

    @router.post("/generate_stream")
    async def generate_stream(request: Request) -> Response:
        """Generate, one event per token."""
        return await respond(request, stream=True)

    @router.post("/")
    async def root(request: Request) -> Response:
        """Generate, answering as `stream` says."""
        return await respond(request, stream=None)

    return router


async def _prepare(service: Service, body: GenerateRequest, level: ServiceLevel) -> list[Prepared]:
    """Encode and resolve. Raises InvalidRequest, RequestFailed."""
    service.check_generates()
    parameters = body.parameters or GenerateParameters()
    stops = parameters.stop or parameters.stop_sequences or ()
    prompt_token_ids = await service.encoder.encode_text(
        body.inputs, param="inputs", keep=parameters.truncate
    )
    size = AnswerSize(
        num_logprobs=parameters.top_n_tokens or 0,
        prompt_items=int(bool(parameters.decoder_input_details)),
    )
    (max_tokens,) = service.resolve_max_tokens(
        [len(prompt_token_ids)],
        parameters.max_new_tokens,
        default=DEFAULT_MAX_NEW_TOKENS,
        param="parameters.max_new_tokens",
        size=size,
    )
    eos_token_ids = service.model.tokenizer.eos_token_ids
    constraint = await resolve_constraint(
        [spec_of_grammar(parameters.grammar)],
        service.constraints,
        sharer=level.sharer,
        can_end=bool(eos_token_ids),
        barred=[],
        closes=service.config.closed_schemas,
    )
    return [
        (
            new_submit(
                TokenSegment(token_ids=pack_int32(prompt_token_ids)),
                level,
                max_tokens=max_tokens,
                eos_token_ids=list(eos_token_ids),
                constraint=constraint,
                sampling=parameters.sampling(vocab_size=service.model.vocab_size),
                needs_acknowledgement=bool(stops),
            ),
            OutputOptions(
                prompt_token_ids=prompt_token_ids,
                arrival_s=level.arrival_s,
                stop_strings=tuple(stops),
                includes_stop=True,  # as TGI does
            ),
        )
    ]
