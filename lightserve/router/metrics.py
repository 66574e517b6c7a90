"""Counters of the router: queues, steps, memory. Its loop calls this around the core's calls."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass

from lightserve.messages.common import DeviceFacts
from lightserve.messages.frontend_router import RouterStatus, StepNote
from lightserve.messages.router_worker import StepResult
from lightserve.metrics import catalogue
from lightserve.metrics.recording import Gauge, Recorder
from lightserve.router.request import WAITING, Request
from lightserve.router.scheduler import Scheduler
from lightserve.router.scheduling_targets import RaisedTarget
from lightserve.router.step import PlannedStep, Reason
from lightserve.router.step_cost import StepKind, kind_of
from lightserve.types import SLO, DraftSource, RequestClass, StepId


class RouterMetrics:
    """One router's record; its state belongs to the loop."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._sent: dict[StepId, tuple[StepKind, float | None]] = {}
        """The kinds and the limits of the steps in flight."""
        self._peak_slots = 0
        self._newcomers: list[Request] = []
        """Started since the last report; the core notes what it found of their prompts."""
        self._queue_time = {
            request_class: recorder.histogram(catalogue.REQUEST_QUEUE_TIME, request_class.value)
            for request_class in RequestClass
        }
        self._step_time = recorder.histogram(catalogue.STEP_TIME)
        self._predicted = recorder.histogram(catalogue.PREDICTED_STEP_TIME)
        self._error = recorder.histogram(catalogue.STEP_TIME_ERROR)
        self._ratio = {
            kind: recorder.histogram(catalogue.STEP_TIME_RATIO, kind.value) for kind in StepKind
        }
        self._headroom = recorder.histogram(catalogue.STEP_HEADROOM)
        self._batch_size = recorder.histogram(catalogue.STEP_BATCH_SIZE)
        self._tokens = recorder.histogram(catalogue.ITERATION_TOKENS)

    def on_commit(self, step: PlannedStep, now_s: float) -> None:
        """Count a step that was sent; call before the core books it."""
        for request, _ in step.chunks:
            if request.state is WAITING and request.num_requeues == 0:
                self._queue_time[request.request_class].observe(now_s - request.arrival_s)
                self._newcomers.append(request)
        self._sent[step.step_id] = kind_of(step.shape), step.limit_s
        self._batch_size.observe(len(step.decodes) + len(step.chunks))
        self._tokens.observe(step.shape.num_new)

    def on_result(self, result: StepResult, num_used_slots: int, predicted_s: float) -> None:
        """Count a step that has finished; what the core said of it before it took it in."""
        self._peak_slots = max(self._peak_slots, num_used_slots)
        if (sent := self._sent.pop(result.step_id, None)) is None:
            return  # its workers are gone
        kind, limit_s = sent
        if limit_s is not None:
            self._headroom.observe(limit_s - predicted_s)
        if predicted_s > 0:
            self._ratio[kind].observe(result.exec_s / predicted_s)
        self._step_time.observe(result.exec_s)
        self._predicted.observe(predicted_s)
        self._error.observe(abs(result.exec_s - predicted_s))

    def on_device(self, device: DeviceFacts) -> None:
        """Say what the workers compute on."""
        labels = (device.kind, device.name, device.driver, device.cuda, device.triton)
        self.recorder.gauge(catalogue.DEVICE_INFO, *labels, device.kernels).value = 1

    def on_workers_gone(self) -> None:
        """Forget the steps in flight."""
        self._sent.clear()

    def collect(self, core: Scheduler, status: RouterStatus, num_rejected: int) -> None:
        """Take over what others count; call before each snapshot."""
        recorder = self.recorder
        for request_class, load in status.load.items():
            label = request_class.value
            recorder.gauge(catalogue.NUM_REQUESTS_RUNNING, label).value = load.num_running
            recorder.gauge(catalogue.NUM_REQUESTS_WAITING, label).value = load.num_waiting
            recorder.gauge(catalogue.NUM_TOKENS_WAITING, label).value = load.num_waiting_tokens
            recorder.gauge(catalogue.PREDICTED_WAIT, label).value = core.predicted_wait_s(
                request_class
            )
        _set_memory(
            recorder.gauge(catalogue.KV_SLOTS_USED),
            recorder.gauge(catalogue.KV_SLOTS),
            recorder.gauge(catalogue.KV_CACHE_USAGE),
            status,
        )
        self._count_prefixes()
        recorder.gauge(catalogue.KV_STATE_SLOTS).value = status.num_state_slots
        recorder.gauge(catalogue.KV_SLOTS_SNAPSHOTS).value = status.num_snapshot_slots
        recorder.gauge(catalogue.KV_SLOTS_FORECAST).value = core.forecast_peak or 0
        peak = max(self._peak_slots, status.num_used_slots)
        recorder.gauge(catalogue.KV_SLOTS_PEAK).value = peak
        self._peak_slots = 0
        self._count_pauses(core)
        self._count_skips(core)
        self._count_raised(core)
        self._count_computed(core)
        self._count_drafts(core)
        for request_class, num_bytes in core.parameter_bytes.items():
            recorder.gauge(catalogue.REQUEST_PARAMETER_BYTES, request_class.value).value = num_bytes
        recorder.gauge(catalogue.REQUESTS_UNFINISHED).value = core.num_unfinished
        recorder.gauge(catalogue.BURST_HEADROOM).value = core.burst_headroom_tokens
        kv = core.kv
        recorder.gauge(catalogue.KV_SLOTS_CACHED).value = 0 if kv is None else kv.num_cached
        recorder.gauge(catalogue.KV_HOST_SLOTS).value = (
            0 if kv is None else kv.checkpoints.num_slots
        )
        recorder.gauge(catalogue.KV_HOST_SLOTS_USED).value = (
            0 if kv is None else kv.checkpoints.num_used
        )
        if kv is not None and kv.tree is not None and (tier := kv.tree.tier) is not None:
            recorder.gauge(catalogue.PREFIX_HOST_SLOTS).value = tier.num_slots
            recorder.gauge(catalogue.PREFIX_HOST_SLOTS_USED).value = tier.num_used
            for event, num_tokens in tier.num_tokens.items():
                recorder.counter(catalogue.PREFIX_HOST_TOKENS, event).value = num_tokens
        recorder.counter(catalogue.NUM_PREEMPTIONS).value = core.num_preemptions
        recorder.counter(catalogue.PREEMPTED_TOKENS).value = core.num_preempted_tokens
        recorder.counter(catalogue.STEPS).value = status.num_steps
        recorder.counter(catalogue.WORKER_BUSY).value = status.worker_busy_s
        recorder.counter(catalogue.WORKER_IDLE).value = status.worker_idle_s
        recorder.gauge(catalogue.STALLED).value = status.stalled_s
        recorder.counter(catalogue.IPC_REJECTED, "router").value = num_rejected

    def _count_pauses(self, core: Scheduler) -> None:
        for request_class, counters in core.counters.items():
            for family, value in (
                (catalogue.PAUSES, counters.num_pauses),
                (catalogue.KV_TOKENS_TAKEN, counters.taken_tokens),
                (catalogue.KV_TOKENS_SAVED, counters.saved_tokens),
                (catalogue.KV_TOKENS_LOADED, counters.loaded_tokens),
                (catalogue.STATE_SNAPSHOTS, counters.num_snapshots),
            ):
                self.recorder.counter(family, request_class.value).value = value

    def _count_computed(self, core: Scheduler) -> None:
        for request_class, work in core.computed_tokens.items():
            for kind, value in (("prompt", work.num_prompt), ("decode", work.num_decodes)):
                self.recorder.counter(
                    catalogue.COMPUTED_TOKENS, request_class.value, kind
                ).value = value

    def _count_drafts(self, core: Scheduler) -> None:
        counter, drafting = self.recorder.counter, core.drafting
        for of in itertools.product(RequestClass, DraftSource):
            labels = of[0].value, of[1].name.lower()
            counter(catalogue.DRAFT_TOKENS, *labels).value = drafting.num_drafted[of]
            counter(catalogue.ACCEPTED_TOKENS, *labels).value = drafting.num_accepted[of]

    def _count_raised(self, core: Scheduler) -> None:
        for request_class in RequestClass:
            for target in SLO.__struct_fields__:
                label = target.rpartition("_")[0]  # as `slo_requests_total` names them
                counter = self.recorder.counter(
                    catalogue.RAISED_TARGETS, request_class.value, label
                )
                counter.value = core.num_raised_targets.get(RaisedTarget(request_class, target), 0)

    def _count_skips(self, core: Scheduler) -> None:
        counters = core.skip_counters
        for family, counts in (
            (catalogue.REQUESTS_SKIPPED, counters.skipped),
            (catalogue.REQUESTS_UNSEEN, counters.unseen),
        ):
            for request_class, of_class in counts.items():
                for reason in Reason:
                    counter = self.recorder.counter(family, request_class.value, reason.value)
                    counter.value = of_class[reason]

    def _count_prefixes(self) -> None:
        for request in self._newcomers:
            label = request.request_class.value
            queries = self.recorder.counter(catalogue.PREFIX_CACHE_QUERIES, label)
            queries.value += request.num_prompt_tokens
            hits = self.recorder.counter(catalogue.PREFIX_CACHE_HITS, label)
            hits.value += request.num_cached_tokens or 0
        self._newcomers.clear()


def _set_memory(used: Gauge, total: Gauge, usage: Gauge, status: RouterStatus) -> None:
    used.value = status.num_used_slots
    total.value = status.num_kv_slots
    usage.value = status.num_used_slots / status.num_kv_slots if status.num_kv_slots else 0.0


# The last steps in short, for people that look at the dashboard; nothing is decided by them.
#
# Steps are noted only while they are asked for, so that they cost nothing otherwise.

MAX_STEPS = 48
WATCH_S = 5.0
"""So long after a question steps are noted for the next one."""


@dataclass(slots=True)
class _Noted:
    step: PlannedStep
    sent_s: float
    predicted_s: float
    num_decodes: dict[RequestClass, int]
    """Rows change hands: counted when it is sent."""
    exec_s: float | None = None


class RecentSteps:
    """Belongs to the router's loop."""

    def __init__(self) -> None:
        self._watched_until_s = float("-inf")
        self._noted: deque[_Noted] = deque(maxlen=MAX_STEPS)

    def on_commit(self, step: PlannedStep, now_s: float) -> None:
        """Note a step that is sent; call before the core books it."""
        if now_s < self._watched_until_s:
            num_decodes = {each: step.decodes.count(each) for each in RequestClass}
            self._noted.append(_Noted(step, now_s, step.predicted_s, num_decodes))
        else:
            self._noted.clear()

    def on_result(self, step_id: StepId, exec_s: float, predicted_s: float) -> None:
        """Note what a step took, and what the core said of it once it was booked."""
        for noted in reversed(self._noted):
            if noted.step.step_id == step_id:
                noted.exec_s, noted.predicted_s = exec_s, predicted_s
                return

    def tell(self, now_s: float) -> list[StepNote]:
        """Return what was noted, oldest first, and note what comes for `WATCH_S`."""
        if now_s >= self._watched_until_s:
            self._noted.clear()
        self._watched_until_s = now_s + WATCH_S
        return [_told(noted, now_s) for noted in self._noted]


def _told(noted: _Noted, now_s: float) -> StepNote:
    step = noted.step
    num_requests, num_tokens = Counter(noted.num_decodes), Counter(noted.num_decodes)
    for request, count in step.chunks:
        num_requests[request.request_class] += 1
        num_tokens[request.request_class] += count
    return StepNote(
        step_id=step.step_id,
        age_s=now_s - noted.sent_s,
        predicted_s=float(noted.predicted_s),
        limit_s=None if step.limit_s is None else float(step.limit_s),
        exec_s=noted.exec_s,
        num_requests={each: count for each, count in num_requests.items() if count},
        num_tokens={each: count for each, count in num_tokens.items() if count},
        num_paused=len(step.paused),
        num_preempted=len(step.preempted),
        left_out={
            each: {reason.value: count for reason, count in reasons.items()}
            for each, reasons in step.left_out.count().items()
            if reasons
        },
        unseen={
            each: {unseen.stopped_by.value: unseen.num_requests}
            for each, unseen in step.unseen.items()
            if unseen.stopped_by is not None and unseen.num_requests
        },
    )
