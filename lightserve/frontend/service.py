"""The parts of a frontend that its routes use, and how they are loaded from a model's directory."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightserve.batches.access import StoreThread
from lightserve.config import ServeConfig
from lightserve.config.fields import flag_name
from lightserve.errors import ConfigError, InvalidRequest
from lightserve.frontend.completion import Completion
from lightserve.frontend.connections import Crowded, Held, InFlight, Seats, Turns
from lightserve.frontend.errors import RequestFailed
from lightserve.frontend.harmony import MARKS
from lightserve.frontend.json_body import BodyReader, show
from lightserve.frontend.observation import Observation
from lightserve.frontend.pictures import PictureReader
from lightserve.frontend.prompts import PromptEncoder
from lightserve.frontend.request_options import Prepared, SamplingDefaults, read_sampling_defaults
from lightserve.frontend.router_client import RouterClient
from lightserve.frontend.structured_output import ConstraintChecker
from lightserve.model_formats import HARMONY, ModelFormats, choose_formats
from lightserve.models.architectures import Architecture
from lightserve.models.config import load_model_config, resolve_context_len
from lightserve.models.pooling import Embedding, Pooling, load_embedding
from lightserve.tokenization.chat_template import ChatTemplate, find_chat_template
from lightserve.tokenization.tokenizer import Tokenizer, check_vocabulary

if TYPE_CHECKING:
    from lightserve.frontend.tracing import RequestTracer

log = logging.getLogger(__name__)

CHECKS_AT_ONCE = 2
MAX_CHECKS_WAITING = 16
"""Checks that may wait for each client."""
MAX_NAME_CHARS = 256
"""Longest name of a model where any is accepted."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Facts about the model that requests are checked against."""

    names: tuple[str, ...]
    """All that clients may use, its own first."""
    takes_any_name: bool
    """Whether they may use others too."""
    created_s: int
    """Unix time at which this process began to serve it."""
    architecture: Architecture
    vocab_size: int
    max_model_len: int
    tokenizer: Tokenizer
    sampling_defaults: SamplingDefaults
    embedding: Embedding | None = None
    """How it makes vectors of prompts, or scores of pairs; None: it does neither."""
    judge: ChatTemplate | None = None
    """Renders a query and a document whose score is asked for; None: as Qwen3-Reranker has it."""


@dataclass(frozen=True, kw_only=True)
class AnswerSize:
    """Size of an answer, apart from the tokens of its prompts."""

    num_choices: int = 1
    """Choices of each prompt."""
    num_logprobs: int = 0
    """Log-probabilities of each token of the output, besides its own."""
    prompt_items: int = 0
    """Ids and log-probabilities for each token of a prompt, in all choices together."""

    @property
    def _items_per_token(self) -> int:
        return self.num_choices * (1 + self.num_logprobs)

    def most_tokens(self, max_items: int, prompt_lens: Sequence[int]) -> int:
        """Return how many tokens every completion may have, at least one."""
        num_left = max_items - self.prompt_items * sum(prompt_lens)
        return max(1, num_left // self._items_per_token // len(prompt_lens))

    def check(
        self, max_items: int, prompt_lens: Sequence[int], limits: Sequence[int], param: str
    ) -> None:
        """Raise InvalidRequest if an answer of this size has too many items."""
        num_of_prompts = self.prompt_items * sum(prompt_lens)
        num_items = num_of_prompts + self._items_per_token * sum(limits)
        if num_items <= max_items:
            return
        raise InvalidRequest(
            f"the answer must have at most {max_items} tokens and log-probabilities"
            f" ({flag_name('max_answer_items')}), got {num_items}: {sum(limits)} tokens of"
            f" {len(limits)} prompts by {param} times n {self.num_choices} times"
            f" (1 + {self.num_logprobs} log-probabilities), and {num_of_prompts} of the prompts",
            param=param,
            code="answer_too_large",
        )


TGI_NAMES = frozenset({"tgi", "dummy"})
"""Model names that clients of text-generation-inference send: it serves one model."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """The frontend's parts, handed to the routes."""

    config: ServeConfig
    model: ServedModel
    formats: ModelFormats
    """How the model writes reasoning and tool calls."""
    bodies: BodyReader
    encoder: PromptEncoder
    constraints: ConstraintChecker
    pictures: PictureReader
    router: RouterClient
    in_flight: InFlight
    turns: Turns
    kept: Held[Crowded]
    """Answers that are not streamed, until they are read."""
    checks: Seats
    """For checks of stored files, from their first line to their last."""
    observation: Observation
    store: StoreThread | None
    """Files and batches; None: the server keeps none, or cannot."""
    store_problem: str
    """Why it cannot; empty: it can, or was told to keep none."""
    tracer: RequestTracer | None
    """None: no traces are asked for."""

    def close(self) -> None:
        """Let running work in threads end; drop what waits."""
        if self.store is not None:
            self.store.close()
        if self.tracer is not None:
            self.tracer.close()
        self.bodies.close()
        self.encoder.close()
        self.constraints.close()
        self.pictures.close()

    def start(
        self, prepared: Prepared, is_first: bool, *, names: tuple[str, ...] = (), by_token: bool
    ) -> Completion:
        """Submit a request.

        Args:
            prepared: as a route has checked it.
            is_first: whether it is the first of its HTTP request.
            names: as in `Submit`.
            by_token: whether the completion tells the tokens behind its text as well.

        Raises:
            InvalidRequest: the router cannot take it.
            RequestFailed: the router cannot take it now.
        """
        request, options = prepared
        metrics = self.observation.requests.request(
            request.request_class,
            arrival_s=options.arrival_s,
            num_prompt_tokens=len(options.prompt_token_ids),
            slo=request.slo,
        )
        try:
            live = self.router.submit(request, options, is_first=is_first, names=names)
        except (InvalidRequest, RequestFailed) as failure:
            metrics.on_failure(failure.code)
            raise
        log.debug("is request %d of this frontend to the router", live.request_id)
        return Completion(self.model.tokenizer, prepared, live, metrics, by_token=by_token)

    def check_model(self, name: str) -> None:
        """Check that a request names the served model. Raises InvalidRequest (404)."""
        if self.model.takes_any_name:
            # It stands in every event of a stream.
            if not 1 <= len(name) <= MAX_NAME_CHARS:
                raise InvalidRequest(
                    f"model must have 1 to {MAX_NAME_CHARS} characters, got {len(name)}",
                    param="model",
                )
        elif name not in self.model.names and name not in TGI_NAMES:
            known = " and ".join(map(show, self.model.names))
            raise InvalidRequest(
                f"the model {show(name)} does not exist; this server has {known}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def check_generates(self) -> None:
        """Check that the model has tokens generated. Raises InvalidRequest."""
        embedding = self.model.embedding
        if embedding is not None and embedding.embeds_only:
            made = "scores of pairs" if embedding.scores else "vectors"
            route = "/v1/rerank and /v1/score" if embedding.scores else "/v1/embeddings"
            raise InvalidRequest(
                f"the model {show(self.model.names[0])} makes {made} of texts alone: this server"
                f" answers {route}",
                param="model",
                code="model_embeds_only",
            )

    def scoring(self) -> Embedding:
        """Return how the model makes scores of pairs. Raises InvalidRequest: it does not."""
        if self.model.embedding is None or not self.model.embedding.scores:
            raise InvalidRequest(
                f"the model {show(self.model.names[0])} makes no scores of pairs: it is no"
                f" cross-encoder ({flag_name('pooling')} yes-no takes the logits of yes and no)",
                param="model",
                code="model_does_not_score",
            )
        return self.model.embedding

    def embedding(self) -> Embedding:
        """Return how the model makes vectors. Raises InvalidRequest: it does not."""
        if self.model.embedding is None or self.model.embedding.scores:
            raise InvalidRequest(
                f"the model {show(self.model.names[0])} makes no vectors: its files name no"
                f" pooling ({flag_name('pooling')} last takes the last token's)",
                param="model",
                code="model_does_not_embed",
            )
        return self.model.embedding

    @property
    def context_len(self) -> int:
        """Longest sequence that can be served; the model's own while no workers are ready."""
        longest = self.model.max_model_len
        return min(longest, self.router.num_kv_slots) if self.router.is_ready else longest

    def resolve_truncation(self, asked: int | None, *, max_tokens: int | None) -> int | None:
        """Return how many tokens at the end of a prompt are kept; None: all of them.

        -1 asks for what the context leaves beside an output of `max_tokens`, or of one.
        """
        return asked if asked != -1 else max(1, self.context_len - (max_tokens or 1))

    def resolve_max_tokens(
        self,
        prompt_lens: Sequence[int],
        asked: int | None,
        *,
        default: int | None,
        param: str,
        size: AnswerSize,
    ) -> list[int]:
        """Return how many tokens may be generated for each prompt.

        `default` None: as many as fit; a default is cut to what fits, a wish is not.

        Raises:
            InvalidRequest: a prompt leaves no room, or not as much as asked for, or the answer
                would have too many items.
            RequestFailed: no router is ready, so the KV pool's size is not known.
        """
        most = size.most_tokens(self.config.max_answer_items, prompt_lens)
        limits = []
        for num_prompt_tokens in prompt_lens:
            room = self._room(num_prompt_tokens, asked, param)
            limits.append(min(default or room, room, most) if asked is None else asked)
        size.check(self.config.max_answer_items, prompt_lens, limits, param)
        return limits

    def _room(self, num_prompt_tokens: int, asked: int | None, param: str) -> int:
        """Return how many tokens the context has room for. Raises as `resolve_max_tokens`."""
        limit = min(self.model.max_model_len, self.router.num_kv_slots)
        room = limit - num_prompt_tokens
        if room < 1 or (asked is not None and asked > room):
            wish = "1" if asked is None else str(asked)[:64]
            raise InvalidRequest(
                f"This model's maximum context length is {limit} tokens, for prompt and output"
                f" together, but the prompt has {num_prompt_tokens} and {param} is {wish}",
                param=param,
                code="context_length_exceeded",
            )
        return room


def load_service(config: ServeConfig, router: RouterClient, *, store_problem: str = "") -> Service:
    """Load what a frontend needs from the model's directory.

    Raises:
        ModelLoadError: a file cannot be used; names file and key.
        ConfigError: --chat-template cannot be read, --max-model-len is too large, or
            --max-pending-body-bytes too small.
    """
    model_dir = Path(config.model)
    model_config = load_model_config(model_dir)
    vocab_size = model_config.vocab_size
    source = find_chat_template(model_dir, config.chat_template)
    formats = choose_formats(
        None if source is None else source.texts,
        tools=config.tool_call_parser,
        reasoning=config.reasoning_parser,
    )
    shown = MARKS if formats.reasoning == HARMONY else formats.marks
    tokenizer = Tokenizer(model_dir, shown=shown, vocab_size=vocab_size)
    check_vocabulary(model_dir, tokenizer, vocab_size=vocab_size)
    names = tokenizer.special_tokens.names
    template = None if source is None else ChatTemplate(source, special_tokens=names)
    if template is not None and template.left_out:
        log.info(
            "the model's chat template leaves out: %s; conversations that have these are refused",
            ", ".join(template.left_out),
        )
    max_model_len = resolve_context_len(config.max_model_len, model_config)
    model = ServedModel(
        names=config.model_names,
        takes_any_name=config.takes_any_model_name,
        created_s=int(time.time()),
        architecture=model_config.architecture,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        tokenizer=tokenizer,
        embedding=_with_tokens(load_embedding(model_dir, model_config, config.pooling), tokenizer),
        judge=template if source is not None and source.has_roles("query", "document") else None,
        sampling_defaults=(
            read_sampling_defaults(model_dir, vocab_size=vocab_size)
            if config.generation_config == "auto"
            else SamplingDefaults()
        ),
    )
    encoder = PromptEncoder(
        tokenizer,
        template,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        vision=model_config.vision,
    )
    observation = Observation()
    pictures = PictureReader(model_config.vision, config, observation.recorder)
    if config.max_pending_body_bytes < (most := config.max_body_bytes + pictures.max_bytes):
        raise ConfigError(
            "--max-pending-body-bytes must be at least --max-body-bytes and --max-image-bytes"
            f" together, {most}, got {config.max_pending_body_bytes}"
        )
    has_store = config.batch_store != "none" and not store_problem
    return Service(
        config=config,
        model=model,
        formats=formats,
        bodies=BodyReader(max_depth=config.max_json_depth, max_bytes=config.max_body_bytes),
        encoder=encoder,
        constraints=ConstraintChecker(),
        pictures=pictures,
        router=router,
        in_flight=InFlight(max_bytes=config.max_held_body_bytes),
        turns=Turns(),
        kept=Held(config.max_kept_answer_bytes),
        checks=Seats(num_seats=CHECKS_AT_ONCE, max_waiting=MAX_CHECKS_WAITING),
        observation=observation,
        store=observation.open_store(config) if has_store else None,
        store_problem=store_problem,
        tracer=_tracer(config, router, observation) if config.otlp_endpoint else None,
    )


def _with_tokens(embedding: Embedding | None, tokenizer: Tokenizer) -> Embedding | None:
    """Return how the model embeds or scores, with the tokens yes and no where it needs them.

    Raises:
        ConfigError: the model has no such tokens.
    """
    if embedding is None or embedding.kind is not Pooling.YES_NO or embedding.yes_no is not None:
        return embedding
    yes, no = tokenizer.id_of("yes"), tokenizer.id_of("no")
    if yes is None or no is None:
        raise ConfigError("--pooling yes-no needs a model with the tokens yes and no")
    return replace(embedding, yes_no=(yes, no))


def _tracer(config: ServeConfig, router: RouterClient, observation: Observation) -> RequestTracer:
    from lightserve.frontend.tracing import RequestTracer  # noqa: PLC0415 - an extra

    return RequestTracer(config, router, observation.recorder)
