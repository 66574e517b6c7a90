"""Measures steps of random shapes on a model runner and fits the step model to them.

All ranks run the same plans: shapes come from one seed, and rank 0's clock decides how many.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

import lightserve
from lightserve.config import ServeConfig
from lightserve.cost.model import (
    StepModel,
    StepSample,
    StepShape,
    fit,
    held_out_errors,
)
from lightserve.cost.profile import (
    SCHEMA_VERSION,
    ProfileKey,
    StepProfile,
    cached_path,
    hash_of_model,
    load_profile,
    save_profile,
)
from lightserve.errors import ConfigError
from lightserve.messages.common import NO_SIZES, GraphSizes, Int32Array, TokenSegment, pack_int32
from lightserve.messages.images import EncodeOrder
from lightserve.messages.router_worker import (
    AddSequence,
    KVCopies,
    OutputKind,
    PlanRow,
    SlotRange,
    StepPlan,
    pack_decodes,
)
from lightserve.models.base import TensorParallel
from lightserve.models.config import load_model_config, resolve_dtype
from lightserve.types import RowId, SamplingParams, StepId
from lightserve.worker.device import facts_of, resolve_device
from lightserve.worker.memory import give_back_freed_memory
from lightserve.worker.model_runner import ModelRunner
from lightserve.worker.threads import LoadWatch

IDLE_SECONDS = 4.0
"""Seconds for the profile that is taken after a server's start, as long as no plan comes: each
shape is run once, as more shapes say more than more runs of the same."""
LONGEST_S = 0.25
"""Steps that earlier measurements predict to take longer are left out of it: the first request may
have to wait for one to end."""
SMALL_TOKENS, SMALL_CONTEXT = 32, 2048
"""Largest steps while nothing is known of how long they take."""
MIN_SAMPLES = 24
"""Shapes that are measured even when they take longer …"""
PATIENCE = 2.0
"""… but not longer than this times as long, …"""
MIN_FITTED = 8
"""… without which nothing can be fitted."""
NUM_REPEATS = 3
COPIED_TOKENS = 256
Row = tuple[int, int]
"""First position and number of tokens."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShapeLimits:
    """The limits of this server's steps."""

    max_rows: int
    max_tokens: int
    context_len: int
    num_slots: int
    graph_sizes: GraphSizes = NO_SIZES
    """To which steps are padded."""


def limits_of(runner: ModelRunner, config: ServeConfig) -> ShapeLimits:
    """Return the largest steps that a router would plan."""
    return ShapeLimits(
        config.max_num_seqs,
        config.max_tokens_of_step(runner.device.type),
        runner.context_len,
        runner.pool.num_slots,
        runner.graph_sizes,
    )


def random_steps(limits: ShapeLimits, seed: int) -> Iterator[list[Row]]:
    """Yield steps for ever, decodes, chunks and both in turn; sizes are log-uniform.

    A step with a chunk has as many tokens as it is padded to, if it is.
    """
    rng = np.random.default_rng(seed)

    def log_uniform(low: int, high: int) -> int:
        return int(np.exp(rng.uniform(np.log(low), np.log(max(low, high) + 1)))) if low else 0

    number = 0
    while True:
        kind, number = number % 3, number + 1
        rows: list[Row] = []
        if kind != 1:
            num_rows = log_uniform(1, min(limits.max_rows, limits.max_tokens))
            longest = min(limits.context_len - 2, limits.num_slots // num_rows - 1)
            mean = log_uniform(1, max(1, longest))
            spread = rng.uniform(0.5, 1.5, num_rows)
            rows = [(min(max(1, int(mean * s)), max(1, longest)), 1) for s in spread]
        room = min(limits.max_tokens - len(rows), limits.context_len - 1, limits.num_slots - 1)
        if kind != 0 and room > 1 and len(rows) < limits.max_rows:
            count = min(room, log_uniform(2, room))
            size = limits.graph_sizes.padded(len(rows) + count, has_chunks=True)
            count = min(room, size - len(rows))
            most = min(limits.context_len - 1, limits.num_slots - 1) - count
            start = log_uniform(1, most) - 1 if most > 0 else 0
            rows.append((min(start, max(0, most)), count))
        if rows:
            yield rows


def shape_of_rows(rows: list[Row]) -> StepShape:
    """Return the shape of a step."""
    shape = StepShape()
    for start, num_tokens in rows:
        shape = shape.plus(start, num_tokens)
    return shape


TOUCHED_BYTES = 256 * 2**20
"""Most KV on a CPU that measured steps read: several times the caches' size, and touched for the
first time in some tenths of a second."""


class StepTimer:
    """Runs steps of given shapes; KV is whatever the pool holds, which costs the same.

    On a CPU that is so of memory that was written once, so it is, before a step reads it.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._slots: list[Int32Array] = []
        """Slots of each row that was prepared, by position."""
        self._num_touched = 0
        """Slots, the first ones of the pool."""

    def prepare(self, rows: list[Row]) -> None:
        """Put sequences into the tables; one row of them is run, as a plan needs a row."""
        sequences, ranges, first_slot = [], [], 0
        num_states = self._runner.pool.num_state_slots
        num_slots = self._touched_slots(
            sum(num_states + start + count + 1 for start, count in rows)
        )
        self._slots = []
        for row, (start, count) in enumerate(rows):
            tokens = TokenSegment(token_ids=pack_int32([0] * (start + count)))
            num_prompt = start + count if count > 1 else start
            sequences.append(AddSequence(RowId(row), [tokens], SamplingParams(), num_prompt, []))
            slots = first_slot + np.arange(num_states + start + count + 1)
            own = (slots % num_slots).astype(np.int32)
            self._slots.append(own[num_states:])
            ranges.append(SlotRange(RowId(row), 0, pack_int32(self._slots[-1])))
            if num_states:
                ranges.append(SlotRange(RowId(row), -num_states, pack_int32(own[:num_states])))
            first_slot += len(slots)
        self._runner.execute(
            StepPlan(
                step_id=StepId(0),
                sequences=sequences,
                slot_ranges=ranges,
                rows=[PlanRow(RowId(0), 0, 1, OutputKind.NONE)],
            )
        )

    def _touched_slots(self, num_wanted: int) -> int:
        """Return how many slots there are for so many tokens; several may share one."""
        runner = self._runner
        if runner.device.type != "cpu":
            return runner.pool.num_slots
        most = min(
            runner.pool.num_slots, max(1, TOUCHED_BYTES // max(1, runner.pool.bytes_per_token))
        )
        num_slots = min(most, num_wanted)
        if num_slots > self._num_touched:
            runner.pool.touch(self._num_touched, num_slots)
            self._num_touched = num_slots
        return num_slots

    def run(self, rows: list[Row]) -> float:
        """Return the seconds of a step that was prepared.

        On a GPU it runs behind the same one, as in serving: alone, its time would be the host's for
        the launch.
        """
        decodes = [
            (row, start, self._slots[row][start])
            for row, (start, count) in enumerate(rows)
            if count == 1
        ]
        plan = StepPlan(
            step_id=StepId(0),
            sequences=[],
            slot_ranges=[],
            rows=[
                PlanRow(RowId(row), start, count, OutputKind.SAMPLE)
                for row, (start, count) in enumerate(rows)
                if count > 1
            ],
            decodes=pack_decodes(*np.array(decodes, dtype=np.int32).reshape(-1, 3).T),
        )
        if self._runner.device.type == "cpu":
            return self._runner.execute(plan).exec_s
        first, second = self._runner.launch(plan), self._runner.launch(plan)
        self._runner.finish(first)
        return self._runner.finish(second).exec_s

    def measure(self, rows: list[Row], num_repeats: int = NUM_REPEATS) -> StepSample:
        """Return the median of a few runs."""
        self.prepare(rows)
        seconds = [self.run(rows) for _ in range(num_repeats)]
        return StepSample(shape_of_rows(rows), float(np.median(seconds)))

    def copy_seconds(self, num_places: int) -> tuple[float, float]:
        """Return seconds per token saved to the host and loaded back; 0 where there is no place.

        `num_places` of both pools are on every rank: each runs the same steps.
        """
        count = min(COPIED_TOKENS, num_places)
        if count == 0:
            return 0.0, 0.0
        places = pack_int32(range(count))
        copies = KVCopies(places, places)
        self.prepare([(1, 1)])
        row = [PlanRow(RowId(0), 1, 1, OutputKind.NONE)]
        save = StepPlan(step_id=StepId(0), sequences=[], slot_ranges=[], rows=row, saves=copies)
        load = StepPlan(step_id=StepId(0), sequences=[], slot_ranges=[], rows=row, loads=copies)
        return self._copy_s(save) / count, self._copy_s(load) / count

    def encoder_token_s(self) -> float:
        """Return the seconds of a token's work in the encoder of images; 0 where there is none.

        The layers of one black image are measured one by one: a whole one may take seconds.
        """
        if (image := self._runner.black_image()) is None:
            return 0.0
        self.prepare([(1, 1)])
        plan = StepPlan(
            step_id=StepId(0),
            sequences=[],
            slot_ranges=[],
            rows=[PlanRow(RowId(0), 1, 1, OutputKind.NONE)],
            encodes=(EncodeOrder(image, 1),),
        )
        results = [self._runner.execute(plan) for _ in range(NUM_REPEATS + 1)]
        rates = [each.encode_s / each.encoded for each in results if each.encoded]
        return float(np.median(rates[1:] or rates))  # the first one touches the weights

    def _copy_s(self, plan: StepPlan) -> float:
        seconds = [self._runner.execute(plan).copy_s for _ in range(NUM_REPEATS + 1)]
        return float(np.median(seconds[1:]))  # the first one touches the pages


def take_profile(
    runner: ModelRunner,
    config: ServeConfig,
    tp: TensorParallel,
    *,
    seconds: float,
    progress: Callable[[float], None] | None = None,
) -> StepProfile:
    """Measure for about so many seconds, every rank alike, and fit; `progress` gets the share."""
    measuring = _Measuring(runner, config, tp)
    samples = measuring.samples
    while agreed(tp, is_true=_goes_on(len(samples), measuring.elapsed_s, seconds)):
        measuring.measure(NUM_REPEATS)
        if progress is not None:
            progress(min(1.0, measuring.elapsed_s / seconds))
    return measuring.profile()


def profile_while_idle(
    runner: ModelRunner, config: ServeConfig, tp: TensorParallel, is_idle: Callable[[], bool]
) -> StepProfile | None:
    """Measure until a plan comes, for `IDLE_SECONDS` or so; the measurements are kept in a file.

    All ranks call, before the first plan: the pool and its tables are written over. Rank 0's
    `is_idle` decides. None: on other ranks, and where too little was measured, or too badly.
    """
    if tp.rank == 0:
        log.info("measuring step times while there is nothing to do, once for this configuration")
    measuring = _Measuring(runner, config, tp)
    samples = measuring.samples
    while agreed(
        tp, is_true=_goes_on(len(samples), measuring.elapsed_s, IDLE_SECONDS) and is_idle()
    ):
        measuring.measure(1, longest_s=LONGEST_S)
    runner.pool.forget()  # steps of all sizes have written all over the pool
    if runner.device.type == "cpu":
        give_back_freed_memory()  # the largest of them took more than most that are to come
    if tp.rank != 0:
        return None
    if len(samples) < MIN_FITTED or (len(samples) < MIN_SAMPLES and not is_idle()):
        log.info("a request came first: step times are learnt while serving")
        return None
    profile = measuring.profile()
    log.info(
        "profiled: %d shapes, off by %.0f %% in the median, pivot %.0f tokens",
        profile.num_samples,
        100 * profile.median_error,
        profile.coefficients.knee,
    )
    if profile.noise:
        log.warning("%s: step times are learnt while serving", profile.noise)
        return None
    try:
        save_profile(profile, cached_path(profile.key))
    except OSError as error:
        log.warning("the profile is not kept: %s", error)
    return profile


class _Measuring:
    """Steps of random shapes, measured one after another, the same ones on every rank."""

    def __init__(self, runner: ModelRunner, config: ServeConfig, tp: TensorParallel) -> None:
        self._runner, self._config, self._tp = runner, config, tp
        self._timer = StepTimer(runner)
        # Ranks measure their memory each for itself, and collectives need equal shapes.
        num_slots = _smallest(tp, runner.pool.num_slots)
        num_on_host = _smallest(tp, runner.host_pool.num_slots)
        limits = dataclasses.replace(limits_of(runner, config), num_slots=num_slots)
        self._sizes = runner.graph_sizes
        self._steps = random_steps(limits, seed=0)
        self._copy_s = self._timer.copy_seconds(min(num_slots, num_on_host))
        self._encoder_token_s = self._timer.encoder_token_s()
        self._load = LoadWatch(config)
        self._start_s = time.perf_counter()
        self.samples: list[StepSample] = []

    @property
    def elapsed_s(self) -> float:
        """Since the first step."""
        return time.perf_counter() - self._start_s

    def measure(self, num_repeats: int, longest_s: float = math.inf) -> None:
        """Run the next shape that takes no longer than that, as far as can be told."""
        rows = next(self._steps)
        while not agreed(self._tp, is_true=self._is_short(rows, longest_s)):
            rows = next(self._steps)
        self.samples.append(self._timer.measure(rows, num_repeats))

    def _is_short(self, rows: list[Row], longest_s: float) -> bool:
        if longest_s == math.inf:
            return True
        shape = shape_of_rows(rows)
        if len(self.samples) < MIN_FITTED:
            context = shape.decode_context + shape.chunk_context
            return shape.num_new <= SMALL_TOKENS and context <= SMALL_CONTEXT
        # Where even the shortest takes longer, something has to be measured all the same.
        longest_s = max(longest_s, 2.0 * min(sample.seconds for sample in self.samples))
        coefficients = fit(self.samples, sizes=self._sizes, num_knees=1)
        return StepModel(coefficients, self._sizes).seconds(shape) <= longest_s

    def profile(self) -> StepProfile:
        """Return the measurements, fitted."""
        held_out = held_out_errors(self.samples, sizes=self._sizes)
        saved_s, loaded_s = self._copy_s
        return StepProfile(
            schema_version=SCHEMA_VERSION,
            lightserve_version=lightserve.__version__,
            model=self._config.model_name,
            key=profile_key(self._config),
            coefficients=msgspec.structs.replace(
                fit(self.samples, sizes=self._sizes),
                per_saved_token_s=saved_s,
                per_loaded_token_s=loaded_s,
                per_encoder_token_s=self._encoder_token_s,
            ),
            kv_bytes_per_token=self._config.tp * self._runner.pool.bytes_per_token,
            num_samples=len(self.samples),
            median_error=held_out.median,
            p95_error=held_out.p95,
            mixed_sizes=self._sizes.mixed,
            decode_sizes=self._sizes.decodes,
            encoder=self._runner.encoder,
            crowding=self._load.crowding(),
        )


def stored_profile(config: ServeConfig, sizes: GraphSizes = NO_SIZES) -> StepProfile | None:
    """Return the profile that --profile names, or the one that an earlier start has kept.

    `sizes` are the runner's: whether steps with prompts have any depends on the start, and these
    take several times as long without.

    Raises:
        ConfigError: the file that --profile names does not serve.
    """
    if config.profile == "off":
        return None
    key = profile_key(config)
    is_auto = config.profile == "auto"
    path = cached_path(key) if is_auto else Path(config.profile)
    profile = load_profile(path, key)
    if profile is not None and bool(profile.mixed_sizes) != bool(sizes.mixed):
        how = "as CUDA graphs" if profile.mixed_sizes else "kernel by kernel"
        log.warning("profile %s is ignored: it ran steps with prompts %s", path, how)
        profile = None
    if profile is None and not is_auto:
        raise ConfigError(
            f"--profile {config.profile!r} is no profile of this model, type, device, threads, TP"
            " and CUDA graphs; lightserve profile makes one"
        )
    return profile


def profile_key(config: ServeConfig) -> ProfileKey:
    """Return the key of this configuration's profile; read in the worker itself.

    Raises:
        ModelLoadError: there is no such model.
    """
    path = Path(config.model)
    model_config = load_model_config(path)
    device = resolve_device(config.device, 0)
    dtype = resolve_dtype(
        config.dtype,
        model_config,
        device_type=device.type,
        batch_invariant=config.batch_invariant,
    )
    facts = facts_of(config, device)
    return ProfileKey(
        model_hash=hash_of_model(path),
        dtype=dtype,
        device=facts.summary,
        tp=config.tp,
        num_threads=torch.get_num_threads(),
        kernels=facts.kernels + _differences(config),
    )


def _differences(config: ServeConfig) -> str:
    """Return how a step differs from the default's; options that mean nothing here are refused."""
    found = []
    if config.quantization != "none":
        found.append(f"{config.quantization} weights")
    if config.kv_dtype != "auto":
        found.append(f"{config.kv_dtype} KV")
    if config.has_draft_head:  # which takes in every token
        found.append("mtp")
    if config.kernel_tuning == "off":
        found.append("untuned")
    if config.cuda_graphs == "off":
        found.append("no CUDA graphs")
    else:
        if config.cuda_graph_max_seqs:
            found.append(f"CUDA graphs to {config.cuda_graph_max_seqs}")
        if config.cuda_graph_max_tokens >= 0:
            found.append(f"to {config.cuda_graph_max_tokens} tokens")
    if config.nnodes > 1:  # sums over ranks take longer
        found.append(f"{config.nnodes} nodes")
    return "".join(f", {difference}" for difference in found)


def _goes_on(num_samples: int, elapsed_s: float, seconds: float) -> bool:
    """Whether to measure another shape: time is left, or there are too few and some patience."""
    if num_samples < MIN_SAMPLES:
        return num_samples < MIN_FITTED or elapsed_s < PATIENCE * seconds
    return elapsed_s < seconds


def agreed(tp: TensorParallel, *, is_true: bool) -> bool:
    """Return rank 0's `is_true`, on every rank."""
    return bool(_rank_0s(tp, int(is_true)))


def _rank_0s(tp: TensorParallel, number: int) -> int:
    """Return rank 0's number."""
    return int(tp.broadcast(torch.tensor([number])).item())


def _smallest(tp: TensorParallel, number: int) -> int:
    """Return the smallest of the ranks' numbers."""
    numbers = tp.gather(torch.tensor([[number]]))
    return _rank_0s(tp, number if numbers is None else int(numbers.min()))
