"""Stories of the last requests, while the server runs: `GET /v1/requests/ID/timeline`.

Noted beside the router's core, as the decision log is, and off unless asked for
(--request-timelines): a life has its stretches, steps in a row in which the same happened to the
request, with what others computed meanwhile. Nothing is decided by it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightserve.decisions.records import COMPUTES, CoreCalls
from lightserve.messages.common import unpack_int64
from lightserve.messages.frontend_router import Abort, Finish, Moment, RequestLife, Stretch, Submit
from lightserve.messages.router_worker import StepPlan, StepResult
from lightserve.router.events import FromFrontend, FrontendGone, Outgoing, SchedulerEvent
from lightserve.router.step import PlannedStep, Reason, WaitUntil
from lightserve.types import FinishReason, RequestClass, RequestId, RequestKey

MAX_STRETCHES = 64
"""Most stretches of a life; later ones are in its sums alone."""
MAX_MOMENTS = 64


class _Totals(NamedTuple):
    """Since the beginning; a stretch is the difference of two."""

    num_tokens: Counter[RequestClass]
    predicted_s: float
    observed_s: float


@dataclass(eq=False)
class _Life:
    """One request."""

    key: RequestKey
    submit: Submit
    came_s: float
    what: str = ""
    """Since `since_s`; empty: no step was planned yet."""
    since_s: float = 0.0
    first_step: int = 0
    num_own_tokens: int = 0
    at_start: _Totals | None = None
    stretches: list[Stretch] = field(default_factory=list)
    before_first: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    after_first: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    first_token_s: float | None = None
    last_token_s: float = 0.0
    max_gap_s: float = 0.0
    num_output_tokens: int = 0
    moments: list[Moment] = field(default_factory=list)
    is_out: bool = True
    """Whether it waits: it has not started, or is paused."""
    end: str | None = None
    ended_s: float | None = None


class Lives:
    """Running requests, and the last `max_kept` that have ended. Belongs to the router's loop."""

    def __init__(self, max_kept: int) -> None:
        self._live: dict[RequestKey, _Life] = {}
        self._ended: deque[_Life] = deque()
        self._max_kept = max_kept
        self._by_name: defaultdict[str, list[_Life]] = defaultdict(list)
        self._named: set[_Life] = set()
        """Requests that the last step named, and those that have come since."""
        self._num_tokens: Counter[RequestClass] = Counter()
        self._predicted_s = self._observed_s = 0.0
        self._step_id = 0

    def on_submit(self, key: RequestKey, submit: Submit, now_s: float) -> None:
        """Begin a life."""
        life = _Life(key, submit, now_s - submit.age_s, since_s=now_s - submit.age_s)
        self._live[key] = life
        self._named.add(life)
        for name in submit.names:
            self._by_name[name].append(life)

    def on_step(self, step: PlannedStep, now_s: float) -> None:
        """Note what a step that is sent does with each; call before the core books it."""
        parts: dict[_Life, tuple[str, int]] = {}
        for request, reason in step.left_out.each():
            if (life := self._live.get(request.key)) is not None:
                parts[life] = reason.value, 0
        for request, _ in step.loaded:
            if (life := self._live.get(request.key)) is not None:
                parts[life] = Reason.LOADING.value, 0
        self._step_id = step.step_id
        before = self._totals()
        self._note_losses(step, now_s)
        for request, count in step.scheduled:
            self._num_tokens[request.request_class] += count
            if (life := self._live.get(request.key)) is not None:
                parts[life] = COMPUTES, count
                if life.is_out:
                    self._mark(life, "resumes" if life.moments else "starts", count, now_s)
                    life.is_out = False
                    if (found := step.found.get(request)) and found.num_loaded:
                        self._mark(life, "loads", found.num_loaded, now_s)
        self._predicted_s += step.predicted_s
        for life in self._named - parts.keys():
            unseen = step.unseen.get(life.submit.request_class)
            if unseen is not None and unseen.stopped_by is not None:
                self._turn(life, unseen.stopped_by.value, 0, before, now_s)
        for life, (what, count) in parts.items():
            self._turn(life, what, count, before, now_s)
        self._named = set(parts)

    def on_result(self, exec_s: float) -> None:
        """Note what a step took."""
        self._observed_s += exec_s

    def on_news(self, news: Sequence[Outgoing], now_s: float) -> None:
        """Note tokens and ends."""
        for outgoing in news:
            message = outgoing.message
            for request_id in unpack_int64(message.request_ids).tolist():
                key = RequestKey(outgoing.frontend_id, RequestId(request_id))
                if (life := self._live.get(key)) is not None:
                    self._on_tokens(life, 1, now_s)
            for delta in message.requests:
                key = RequestKey(outgoing.frontend_id, delta.request_id)
                if (life := self._live.get(key)) is None:
                    continue
                if delta.token_ids:
                    self._on_tokens(life, len(delta.token_ids), now_s)
                if (end := delta.error or delta.finish_reason) is not None:
                    self._end(life, end.value, now_s)

    def on_gone(self, keys: Sequence[RequestKey], end: str, now_s: float) -> None:
        """End lives that the core is not going to say anything of."""
        for key in keys:
            if (life := self._live.get(key)) is not None:
                self._end(life, end, now_s)

    def keys_of(self, event: FrontendGone) -> list[RequestKey]:
        """Return what lives of a frontend."""
        return [key for key in self._live if key.frontend_id == event.frontend_id]

    def tell(self, name: str, client_key: str | None, now_s: float) -> list[RequestLife]:
        """Return the lives that have a name, for the client whose they are; None: for any."""
        lives = self._by_name.get(name, [])
        return [
            self._told(life, now_s)
            for life in lives
            if client_key is None or life.submit.client.key == client_key
        ]

    def _note_losses(self, step: PlannedStep, now_s: float) -> None:
        """Note who is paused before a step, and who loses KV."""
        losses = [
            *((request, "paused", 0) for request in step.paused),
            *((request, "checkpointed", count) for request, count in step.checkpointed),
            *((request, "preempted", 0) for request in step.preempted),
        ]
        for request, what, count in losses:
            if (life := self._live.get(request.key)) is not None:
                self._mark(life, what, count, now_s)
                life.is_out = True

    # ------------------------------------------------------------------ one life

    @staticmethod
    def _mark(life: _Life, what: str, count: int, now_s: float) -> None:
        if len(life.moments) < MAX_MOMENTS:
            at_s = now_s - life.came_s
            life.moments.append(Moment(what=what, at_s=at_s, num_tokens=count))

    def _totals(self) -> _Totals:
        return _Totals(self._num_tokens.copy(), self._predicted_s, self._observed_s)

    def _turn(self, life: _Life, what: str, count: int, before: _Totals, now_s: float) -> None:
        """Go on with a stretch, or begin the next one."""
        if life.what != what:
            if life.what:
                self._close(life, before, self._step_id, now_s)
                life.since_s = now_s
            life.what, life.first_step, life.at_start = what, self._step_id, before
            life.num_own_tokens = 0
        life.num_own_tokens += count

    def _close(self, life: _Life, totals: _Totals, end_step: int, now_s: float) -> None:
        """End the stretch that goes on, before a step."""
        sums = life.before_first if life.first_token_s is None else life.after_first
        sums[life.what] += now_s - life.since_s
        if len(life.stretches) < MAX_STRETCHES:
            life.stretches.append(_stretch(life, totals, end_step, now_s))

    def _on_tokens(self, life: _Life, count: int, now_s: float) -> None:
        if life.first_token_s is None:
            if life.what:  # what was before the first token counts apart
                totals = self._totals()
                self._close(life, totals, self._step_id + 1, now_s)
                life.since_s, life.at_start, life.num_own_tokens = now_s, totals, 0
                life.first_step = self._step_id + 1
            life.first_token_s = now_s
        else:
            life.max_gap_s = max(life.max_gap_s, now_s - life.last_token_s)
        life.last_token_s = now_s
        life.num_output_tokens += count

    def _end(self, life: _Life, end: str, now_s: float) -> None:
        if life.what:
            self._close(life, self._totals(), self._step_id + 1, now_s)
        life.end, life.ended_s = end, now_s
        del self._live[life.key]
        self._named.discard(life)
        self._ended.append(life)
        if len(self._ended) > self._max_kept:
            forgotten = self._ended.popleft()
            for name in forgotten.submit.names:
                self._by_name[name].remove(forgotten)
                if not self._by_name[name]:
                    del self._by_name[name]

    def _told(self, life: _Life, now_s: float) -> RequestLife:
        stretches, before = list(life.stretches), Counter(life.before_first)
        after = Counter(life.after_first)
        if life.end is None and life.what:
            stretches.append(_stretch(life, self._totals(), self._step_id + 1, now_s))
            sums = before if life.first_token_s is None else after
            sums[life.what] += now_s - life.since_s  # type: ignore[assignment]
        return RequestLife(
            request_class=life.submit.request_class,
            slo=life.submit.slo,
            age_s=(now_s if life.ended_s is None else life.ended_s) - life.came_s,
            end=life.end,
            first_token_s=None if life.first_token_s is None else life.first_token_s - life.came_s,
            max_gap_s=life.max_gap_s,
            token_span_s=life.last_token_s - (life.first_token_s or life.last_token_s),
            num_output_tokens=life.num_output_tokens,
            before_first_token=dict(before),
            after_first_token=dict(after),
            stretches=stretches,
            moments=list(life.moments),
        )


def _stretch(life: _Life, totals: _Totals, end_step: int, now_s: float) -> Stretch:
    start = life.at_start
    assert start is not None
    others = totals.num_tokens - start.num_tokens
    others[life.submit.request_class] -= life.num_own_tokens
    return Stretch(
        what=life.what,
        at_s=life.since_s - life.came_s,
        seconds=now_s - life.since_s,
        num_steps=max(0, end_step - life.first_step),
        num_tokens=life.num_own_tokens,
        tokens_of_others={each: count for each, count in others.items() if count > 0},
        predicted_s=totals.predicted_s - start.predicted_s,
        observed_s=totals.observed_s - start.observed_s,
    )


class WatchedCore:
    """A core whose requests' lives are noted: the same four calls, in front of it."""

    def __init__(self, core: CoreCalls, lives: Lives) -> None:
        self._core = core
        self._lives = lives

    def on_message(self, event: SchedulerEvent, now_s: float) -> list[Outgoing]:
        """See `Scheduler.on_message`."""
        match event:
            case FromFrontend(frontend_id, Submit() as submit):
                self._lives.on_submit(RequestKey(frontend_id, submit.request_id), submit, now_s)
            case FromFrontend(frontend_id, Abort(request_id=request_id)):
                self._lives.on_gone([RequestKey(frontend_id, request_id)], "abort", now_s)
            case FromFrontend(frontend_id, Finish(request_id=request_id)):
                key = RequestKey(frontend_id, request_id)
                self._lives.on_gone([key], FinishReason.STOP.value, now_s)
            case FrontendGone():
                self._lives.on_gone(self._lives.keys_of(event), "frontend_gone", now_s)
        news = self._core.on_message(event, now_s)
        self._lives.on_news(news, now_s)
        return news

    def plan(self, now_s: float) -> PlannedStep | WaitUntil:
        """See `Scheduler.plan`."""
        return self._core.plan(now_s)

    def commit(self, planned: PlannedStep, now_s: float) -> StepPlan:
        """See `Scheduler.commit`."""
        self._lives.on_step(planned, now_s)
        return self._core.commit(planned, now_s)

    def on_result(self, result: StepResult, now_s: float) -> list[Outgoing]:
        """See `Scheduler.on_result`."""
        self._lives.on_result(result.exec_s)
        news = self._core.on_result(result, now_s)
        self._lives.on_news(news, now_s)
        return news
