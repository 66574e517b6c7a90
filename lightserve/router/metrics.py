"""Counters of the router: queues, steps, memory. Its loop calls this around the core's calls."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from lightserve.messages.common import DeviceFacts
from lightserve.messages.frontend_router import RouterStatus, StepNote
from lightserve.messages.router_worker import StepResult
from lightserve.metrics import catalogue
from lightserve.metrics.recording import Recorder
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
        self._peak_slots, peak_slots = 0, max(self._peak_slots, status.num_used_slots)
        kv, num_slots = core.kv, status.num_kv_slots
        gauges = {
            catalogue.KV_SLOTS_USED: status.num_used_slots,
            catalogue.KV_SLOTS: num_slots,
            catalogue.KV_CACHE_USAGE: status.num_used_slots / num_slots if num_slots else 0.0,
            catalogue.KV_STATE_SLOTS: status.num_state_slots,
            catalogue.KV_SLOTS_SNAPSHOTS: status.num_snapshot_slots,
            catalogue.KV_SLOTS_FORECAST: core.forecast_peak or 0,
            catalogue.KV_SLOTS_PEAK: peak_slots,
            catalogue.KV_SLOTS_CACHED: 0 if kv is None else kv.num_cached,
            catalogue.KV_HOST_SLOTS: 0 if kv is None else kv.checkpoints.num_slots,
            catalogue.KV_HOST_SLOTS_USED: 0 if kv is None else kv.checkpoints.num_used,
            catalogue.REQUESTS_UNFINISHED: core.num_unfinished,
            catalogue.BURST_HEADROOM: core.burst_headroom_tokens,
            catalogue.STALLED: status.stalled_s,
        }
        for family, value in gauges.items():
            self.recorder.gauge(family).value = value
        counters = {
            catalogue.NUM_PREEMPTIONS: core.num_preemptions,
            catalogue.PREEMPTED_TOKENS: core.num_preempted_tokens,
            catalogue.STEPS: status.num_steps,
            catalogue.WORKER_BUSY: status.worker_busy_s,
            catalogue.WORKER_IDLE: status.worker_idle_s,
        }
        for family, value in counters.items():
            self.recorder.counter(family).value = value
        self.recorder.counter(catalogue.IPC_REJECTED, "router").value = num_rejected
        if kv is not None and kv.tree is not None and (tier := kv.tree.tier) is not None:
            self.recorder.gauge(catalogue.PREFIX_HOST_SLOTS).value = tier.num_slots
            self.recorder.gauge(catalogue.PREFIX_HOST_SLOTS_USED).value = tier.num_used
            for event, num_tokens in tier.num_tokens.items():
                self.recorder.counter(catalogue.PREFIX_HOST_TOKENS, event).value = num_tokens
        self._count_prefixes()
        for request_class in RequestClass:
            self._collect_class(core, status, request_class)

    def _collect_class(
        self, core: Scheduler, status: RouterStatus, request_class: RequestClass
    ) -> None:
        """Take over the figures of a class."""
        label, load = request_class.value, status.load[request_class]
        for family, value in (
            (catalogue.NUM_REQUESTS_RUNNING, load.num_running),
            (catalogue.NUM_REQUESTS_WAITING, load.num_waiting),
            (catalogue.NUM_TOKENS_WAITING, load.num_waiting_tokens),
            (catalogue.PREDICTED_WAIT, core.predicted_wait_s(request_class)),
            (catalogue.REQUEST_PARAMETER_BYTES, core.parameter_bytes[request_class]),
        ):
            self.recorder.gauge(family, label).value = value
        moved, work = core.counters[request_class], core.computed_tokens[request_class]
        counters = [
            (catalogue.PAUSES, (), moved.num_pauses),
            (catalogue.KV_TOKENS_TAKEN, (), moved.taken_tokens),
            (catalogue.KV_TOKENS_SAVED, (), moved.saved_tokens),
            (catalogue.KV_TOKENS_LOADED, (), moved.loaded_tokens),
            (catalogue.STATE_SNAPSHOTS, (), moved.num_snapshots),
            (catalogue.COMPUTED_TOKENS, ("prompt",), work.num_prompt),
            (catalogue.COMPUTED_TOKENS, ("decode",), work.num_decodes),
        ]
        for source in DraftSource:
            name, of = (source.name.lower(),), (request_class, source)
            counters += [
                (catalogue.DRAFT_TOKENS, name, core.drafting.num_drafted[of]),
                (catalogue.ACCEPTED_TOKENS, name, core.drafting.num_accepted[of]),
            ]
        for target in SLO.__struct_fields__:
            name = (target.rpartition("_")[0],)  # as `slo_requests_total` names them
            num_raised = core.num_raised_targets.get(RaisedTarget(request_class, target), 0)
            counters.append((catalogue.RAISED_TARGETS, name, num_raised))
        for reason in Reason:
            skips = core.skip_counters
            counters += [
                (catalogue.REQUESTS_SKIPPED, (reason.value,), skips.skipped[request_class][reason]),
                (catalogue.REQUESTS_UNSEEN, (reason.value,), skips.unseen[request_class][reason]),
            ]
        for family, labels, value in counters:
            self.recorder.counter(family, label, *labels).value = value

    def _count_prefixes(self) -> None:
        for request in self._newcomers:
            label = request.request_class.value
            queries = self.recorder.counter(catalogue.PREFIX_CACHE_QUERIES, label)
            queries.value += request.num_prompt_tokens
            hits = self.recorder.counter(catalogue.PREFIX_CACHE_HITS, label)
            hits.value += request.num_cached_tokens or 0
        self._newcomers.clear()


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
