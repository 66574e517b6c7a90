"""What every route needs: the model's facts, the prompt encoder, the router, and the life cycle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lightserve.batches.access import StoreThread, location_of
from lightserve.config import ServeConfig
from lightserve.config.fields import flag_name
from lightserve.errors import ChannelFull, ConfigError, InvalidRequest
from lightserve.frontend.connections import Held, Shares
from lightserve.frontend.errors import RequestFailed, draining, overloaded, queue_full
from lightserve.frontend.harmony import MARKS
from lightserve.frontend.json_body import BodyReader, show
from lightserve.frontend.prompts import PromptEncoder
from lightserve.frontend.request_options import SamplingDefaults, read_sampling_defaults
from lightserve.frontend.router_client import RouterClient
from lightserve.frontend.structured_output import ConstraintChecker
from lightserve.logs import num_dropped_lines
from lightserve.messages.supervision import MetricsRequest, MetricsSnapshot, MetricsText, StoreUsed
from lightserve.metrics.catalogue import (
    BATCH_STORE_TIME,
    HTTP_REJECTIONS,
    HTTP_RESPONSES,
    IPC_REJECTED,
    IPC_SESSIONS_LOST,
    LOG_LINES_DROPPED,
    REQUESTS_IN_FLIGHT,
)
from lightserve.metrics.recording import Recorder
from lightserve.metrics.requests import FrontendMetrics
from lightserve.model_formats import HARMONY, ModelFormats, choose_formats
from lightserve.models.architectures import Architecture
from lightserve.models.config import load_model_config, resolve_context_len
from lightserve.models.pooling import Embedding, Pooling, load_embedding
from lightserve.tokenization.chat_template import ChatTemplate, find_chat_template
from lightserve.tokenization.tokenizer import Tokenizer, check_vocabulary

if TYPE_CHECKING:
    from lightserve.frontend.tracing import RequestTracer

log = logging.getLogger(__name__)

T = TypeVar("T")

# ----------------------------------------------------------------------
# What a frontend counts, and its question to the supervisor for the counts of all processes.


SCRAPE_TIMEOUT_S = 2.0


class Scrapes:
    """Asks the supervisor for all metrics; askers at the same time share one answer."""

    def __init__(self, *, is_dashboard: bool = False) -> None:
        """`is_dashboard`: those that the dashboard draws, in its form."""
        self._is_dashboard = is_dashboard
        self._send: Callable[[MetricsRequest], None] | None = None
        self._number = 0
        self._pending: asyncio.Future[MetricsText] | None = None

    def attach(self, send: Callable[[MetricsRequest], None]) -> None:
        """Use this way to the supervisor."""
        self._send = send

    async def ask(self) -> MetricsText:
        """Return all metrics. Raises RequestFailed (503) if the supervisor does not answer."""
        pending = self._pending or self._ask()
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                return await asyncio.shield(pending)
        except TimeoutError:
            if self._pending is pending:
                self._pending = None
            raise _no_answer() from None

    def on_text(self, message: MetricsText) -> None:
        """Take in an answer; one that no request waits for any more is dropped."""
        if self._pending is not None and message.number == self._number:
            self._pending.set_result(message)
            self._pending = None

    def _ask(self) -> asyncio.Future[MetricsText]:
        if self._send is None:
            raise _no_answer()
        self._number += 1
        try:
            self._send(MetricsRequest(number=self._number, is_dashboard=self._is_dashboard))
        except ChannelFull:
            raise _no_answer() from None
        self._pending = asyncio.get_running_loop().create_future()
        return self._pending


def _no_answer() -> RequestFailed:
    return RequestFailed(
        "the supervisor does not answer; try again", code="metrics_unavailable", status=503
    )


class Observation:
    """All that a frontend counts."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.requests = FrontendMetrics(self.recorder)
        self.scrapes = Scrapes()
        self.figures = Scrapes(is_dashboard=True)
        self.before_snapshot: Callable[[], None] | None = None
        """Brings figures up to date."""
        self.rejects: Counter[str] = Counter()
        """Requests and connections refused before any route, by error code."""

        self._say_store_used: Callable[[StoreUsed], None] | None = None

    def attach(self, send: Callable[[MetricsRequest | StoreUsed], None]) -> None:
        """Use this way to the supervisor."""
        self.scrapes.attach(send)
        self.figures.attach(send)
        self._say_store_used = send

    def on_store_use(self) -> None:
        """Tell the supervisor, once, that a client uses the store: it has the batches process run.

        Where the queue to it is full, the next use tells it.
        """
        if self._say_store_used is not None:
            with contextlib.suppress(ChannelFull):
                self._say_store_used(StoreUsed())
                self._say_store_used = None

    def on_text(self, message: MetricsText) -> None:
        """Take in an answer of the supervisor."""
        (self.figures if message.is_dashboard else self.scrapes).on_text(message)

    def open_store(self, config: ServeConfig) -> StoreThread:
        """Return the batch store, whose calls are counted."""
        return StoreThread(
            location_of(config),
            file_store=config.file_store,
            min_free_bytes=config.batch_min_free_bytes,
            observe=self.recorder.histogram(BATCH_STORE_TIME).observe,
        )

    def on_response(self, method: str, route: str, status: int) -> None:
        """Count an HTTP response."""
        self.recorder.counter(HTTP_RESPONSES, method, route, str(status)).value += 1

    def snapshot(
        self, *, num_in_flight: int, num_rejected_frames: int, num_sessions_lost: int = 0
    ) -> MetricsSnapshot:
        """Return everything as it stands."""
        recorder = self.recorder
        if self.before_snapshot is not None:
            self.before_snapshot()
        for code, count in self.rejects.items():
            recorder.counter(HTTP_REJECTIONS, code).value = count
        recorder.gauge(REQUESTS_IN_FLIGHT).value = num_in_flight
        recorder.counter(IPC_REJECTED, "frontend").value = num_rejected_frames
        recorder.counter(IPC_SESSIONS_LOST).value = num_sessions_lost
        recorder.counter(LOG_LINES_DROPPED, "frontend").value = num_dropped_lines()
        return MetricsSnapshot(samples=recorder.snapshot())


CHECKS_AT_ONCE = 2
MAX_CHECKS_WAITING = 16
"""Of each client."""
MAX_NAME_CHARS = 256
"""Of a model's name where any is accepted."""


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


class Turns:
    """Lets long answers be written in turns: in one turn of the event loop, one of them goes on."""

    def __init__(self) -> None:
        self._gate = asyncio.Lock()

    async def next(self) -> None:
        """Wait for the next turn; others have theirs before."""
        async with self._gate:
            await asyncio.sleep(0)


class Seats:
    """Work of which a frontend does little at once: one piece for each client, clients in turn."""

    def __init__(self, *, num_seats: int, max_waiting: int) -> None:
        """`max_waiting`: pieces of one client, the one that is done included."""
        self._seats = asyncio.Semaphore(num_seats)
        self._max_waiting = max_waiting
        self._turns: dict[str, asyncio.Lock] = {}
        self._counts: Counter[str] = Counter()

    @asynccontextmanager
    async def taken(self, owner: str) -> AsyncIterator[None]:
        """Wait for a seat. Raises RequestFailed (429): too much of the client's waits."""
        if self._counts[owner] >= self._max_waiting:
            raise overloaded()
        self._counts[owner] += 1
        try:
            # Of each client only one waits for a seat, and seats go to those who came first.
            async with self._turns.setdefault(owner, asyncio.Lock()), self._seats:
                yield
        finally:
            self._counts[owner] -= 1
            if not self._counts[owner]:
                del self._counts[owner], self._turns[owner]


class Crowded(Protocol):
    """What holds memory for a client."""

    def crowd_out(self) -> None:
        """Give the memory back: the client holds more than any other."""


class InFlight:
    """Counts requests between admission and their last byte; knows whether to take more.

    Each keeps what its body said until then, so that the bodies are bounded in sum, see `Shares`:
    none is kept out by one client alone, however much it sends.
    """

    def __init__(self, *, max_bytes: int) -> None:
        """`max_bytes` of bodies; a request that is its client's only one may have a larger one."""
        self.is_draining = False
        self.bodies = Shares(max_size=max_bytes)
        self._max_bytes = max_bytes
        self._preparing: set[asyncio.Future[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        """Requests in flight."""
        return self.bodies.count

    @contextmanager
    def admitted(self, owner: str, num_bytes: int) -> Iterator[None]:
        """Count one request of a client, which keeps so many bytes.

        Raises:
            RequestFailed: draining, or too much is in flight.
        """
        if self.is_draining:
            raise draining()
        if self.bodies.is_full(owner, num_bytes):
            raise queue_full(
                f"the bodies of requests in progress may take {self._max_bytes} bytes"
                f" ({flag_name('max_held_body_bytes')}), and those of a client half of what others"
                f" leave: now {self.bodies.most_of(owner)}, of which {self.bodies.sizes[owner]} are"
                f" taken and this one needs {num_bytes}; try again"
            )
        self._idle.clear()
        try:
            with self.bodies.counted(owner, num_bytes):
                yield
        finally:
            if not self.count:
                self._idle.set()

    def prepare(self, work: Awaitable[T]) -> asyncio.Future[T]:
        """Start what a request needs before it can be submitted; see `end_preparing`."""
        task = asyncio.ensure_future(work)
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)
        return task

    def end_preparing(self) -> None:
        """Cancel what requests need before they can be submitted: there is no time for it."""
        for task in self._preparing:
            task.cancel()

    async def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()


@dataclass(frozen=True, kw_only=True)
class AnswerSize:
    """What the size of an answer depends on besides the tokens of its prompts."""

    num_choices: int = 1
    """Of each prompt."""
    num_logprobs: int = 0
    """Of each token of the output, besides its own."""
    prompt_items: int = 0
    """Of each token of a prompt, in all choices together: ids and log-probabilities."""

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
"""What clients of text-generation-inference, which serves one model, call it."""


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
        ConfigError: --chat-template cannot be read, or --max-model-len is too large.
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
    encoder = PromptEncoder(tokenizer, template, vocab_size=vocab_size, max_model_len=max_model_len)
    observation = Observation()
    has_store = config.batch_store != "none" and not store_problem
    return Service(
        config=config,
        model=model,
        formats=formats,
        bodies=BodyReader(max_depth=config.max_json_depth),
        encoder=encoder,
        constraints=ConstraintChecker(),
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
