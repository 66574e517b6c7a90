"""Which configuration of the kernels is fastest on this GPU, measured at the start.

Per kind of work: kernel, shape and, for prefill, class of chunks; `product_tuning` has those of
products. For decodes one configuration serves all batches, as a row's bits must not depend on its
neighbours: the best over several. Done before the pool is made, graphs are recorded or anything is
served; kept in a file. The timer is an argument, so that the choice can be tested without a GPU.
"""

from __future__ import annotations

import hashlib
import logging
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import torch
import triton
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources, PTXASError

from lightserve import __version__
from lightserve.cost.profile import cache_dir, write_whole
from lightserve.kernels.interface import WORD_BYTES, AttentionBatch
from lightserve.kernels.reference import kv_in_8_bits
from lightserve.kernels.triton.attention import attention
from lightserve.kernels.triton.configs import (
    KV_KINDS,
    AttentionConfigs,
    AttentionShape,
    ChunkClass,
    DecodeConfig,
    Gpu,
    PrefillConfig,
    attention_shape,
    decode_config,
    default_decode,
    default_prefill,
    gpu_of,
    padded_dim,
    prefill_bytes,
    programs_per_sm,
)
from lightserve.kernels.triton.merge import MIN_DOT
from lightserve.kernels.weights import KernelShapes

log = logging.getLogger(__name__)

# Measured configurations of kernels, kept beside the profiles of step times (versioned JSON).
#
# One file per GPU model, Triton version and version of the kernels. One that cannot be read or is
# of another version is as good as none: it is measured anew.

SCHEMA_VERSION = 1
_MAX_BYTES = 1 << 20


class TuningKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The conditions to which measured configurations belong."""

    gpu: str
    triton_version: str
    kernel_version: int
    """Raised whenever a kernel changes so that others may be faster."""

    @property
    def digest(self) -> str:
        """Hash of all of it: the name of the file."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fastest configuration of one kind of work."""

    work: str
    """Kernel and shape class (see `tuning.Work.name`)."""
    config: dict[str, int]
    time_us: float
    """Geometric mean over the measured batches."""
    default_time_us: float
    """Time of the built-in configuration; 0: it does not run here."""


class TuningFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All choices for one key."""

    schema_version: int
    lightserve_version: str
    key: TuningKey
    choices: list[Choice]


def tuning_path(key: TuningKey, directory: Path | None = None) -> Path:
    """Return the file of a key."""
    return (directory or cache_dir().parent / "kernels") / f"{key.digest}.json"


def load_choices(path: Path, key: TuningKey) -> dict[str, Choice]:
    """Return a key's choices by work; none, with a warning if there is such a file, if no use."""
    try:
        with path.open("rb") as file:
            found = msgspec.json.decode(file.read(_MAX_BYTES + 1), type=TuningFile)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("measured kernel configurations %s are ignored: %s", path, error)
        return {}
    if found.schema_version != SCHEMA_VERSION or found.key != key:
        log.warning("measured kernel configurations %s are ignored: of %s", path, found.key)
        return {}
    return {choice.work: choice for choice in found.choices}


def save_choices(path: Path, key: TuningKey, choices: dict[str, Choice]) -> None:
    """Write a key's choices; readers see the old file or the new one, whole. Raises OSError."""
    content = TuningFile(SCHEMA_VERSION, __version__, key, list(choices.values()))
    write_whole(path, msgspec.json.format(msgspec.json.encode(content)) + b"\n")


KERNEL_VERSION = 6
"""Version of the kernels: raised when measured configurations may no longer be the best."""
MAX_POOL_BYTES = 1 << 30
"""Most bytes of the keys and values that are made up for a measurement."""
HEAD_START_CYCLES = 4_000_000
"""About two milliseconds in which the GPU waits while a slow host launches the timed calls."""
MIN_GAIN = 0.02
"""A configuration must beat the built-in one by this share: less may be chance."""
DECODE_SCENES = ((1, 2048), (16, 4096), (128, 2048), (64, 8192))
"""(rows, context); cut to the possible sizes."""
CHUNK_SCENES = {
    ChunkClass.SHORT: ((64, 2048), (128, 16384)),
    ChunkClass.WHOLE: ((2048, 2048), (8192, 8192)),
    ChunkClass.CACHED: ((1024, 8192),),
}
"""(new tokens, context) of one row."""

Call = Callable[[], object]
Timer = Callable[[Call], float]
"""Returns the median time of a call in seconds, after others that are not counted."""
Config = PrefillConfig | DecodeConfig
Scene = tuple[tuple[int, int], ...]
"""(new tokens, context) of each row."""


@dataclass(frozen=True)
class Work:
    """One kind of work that gets a configuration."""

    shape: AttentionShape
    window: int | None
    chunks: ChunkClass | None
    """None: decodes."""

    @property
    def name(self) -> str:
        """Its name in the file."""
        shape = self.shape
        kind = "decode" if self.chunks is None else f"prefill {self.chunks}"
        dtype = str(shape.dtype).removeprefix("torch.")
        window = f" window {self.window}" if self.window else ""
        dim = f"{shape.head_dim}+{shape.turned_dim}" if shape.turned_dim else f"{shape.head_dim}"
        kv = "" if shape.kv == "plain" else f" {shape.kv} KV"
        return f"{kind} {shape.num_heads}/{shape.num_kv_heads}x{dim} {dtype}{kv}{window}"


def tuned_configs(
    shapes: KernelShapes,
    device: torch.device,
    *,
    timer: Timer,
    directory: Path | None = None,
    advance: Callable[[int], None] = lambda _: None,
    base: AttentionConfigs | None = None,
) -> AttentionConfigs:
    """Return `base` with the fastest configurations for a model, measuring those no file has.

    `advance` is told of each of `num_works(shapes)` kinds of work when it is done.
    """
    gpu = gpu_of(device)
    kept = Kept(gpu, directory)
    configs = base or AttentionConfigs()
    for work in works(shapes):
        measure = partial(choose, work, shapes.context_len, device, timer)
        config = _read(work, kept.choice(work.name, partial(_read, work), measure))
        assert config is not None, "a choice of today can be read"
        configs = configs.plus(work.shape, work.chunks, config)
        advance(1)
    return configs


class Kept:
    """The choices of a GPU's file, to which others are added."""

    def __init__(self, gpu: Gpu, directory: Path | None) -> None:
        self._key = TuningKey(gpu.name, triton.__version__, KERNEL_VERSION)
        self._path = tuning_path(self._key, directory)
        self._choices = load_choices(self._path, self._key)

    def choice(
        self, work: str, is_readable: Callable[[Choice], object], measure: Callable[[], Choice]
    ) -> Choice:
        """Return a work's choice, measured and kept if there is none that can be read.

        `is_readable` gives something true for one that can. The last rank to write wins, with the
        choices that others had by then.
        """
        found = self._choices.get(work)
        if found is None or not is_readable(found):
            found = measure()
            known = load_choices(self._path, self._key)
            self._choices = {**known, **self._choices, work: found}
            _save(self._path, self._key, self._choices)
        return found


def works(shapes: KernelShapes) -> list[Work]:
    """Return a model's kinds of work, the first window for all layers that have one."""
    found = []
    for window in {window is None: window for window in shapes.sliding_windows}.values():
        shape = attention_shape(
            shapes.num_heads,
            shapes.num_kv_heads,
            shapes.head_dim,
            shapes.dtype,
            has_window=window is not None,
            value_dim=shapes.value_dim or shapes.head_dim,
            kv=KV_KINDS.get(shapes.pool_dtype or shapes.dtype, "plain"),
        )
        found += [Work(shape, window, chunks) for chunks in (None, *ChunkClass)]
    return found


def choose(work: Work, context_len: int, device: torch.device, timer: Timer) -> Choice:
    """Measure a work's candidates and return the fastest, the built-in one in doubt."""
    gpu = gpu_of(device)
    default = default_config(work, gpu)
    configs = list(dict.fromkeys([default, *candidates(work, gpu)]))
    times: dict[Config, list[float]] = {config: [] for config in configs}
    for scene in scenes(work, context_len):
        scenery = Scenery(work, scene, device, width=context_len + 1)
        calls = {config: scenery.call(config) for config in times}
        if device.type == "cuda":
            compile_ahead(list(calls.values()), device, num_threads=torch.get_num_threads())
        for config, call in calls.items():
            time_s = time_of(call, timer)
            if time_s is None:
                del times[config]
            else:
                times[config].append(time_s)
    means = {config: _geometric_mean(some) for config, some in times.items()}
    best = min(means, key=means.__getitem__, default=default)
    if default in means and means[best] > (1 - MIN_GAIN) * means[default]:
        best = default
    best_us, default_us = (1e6 * means.get(config, 0.0) for config in (best, default))
    log.info("%s: %s, %.0f us (built in: %.0f)", work.name, best, best_us, default_us)
    return Choice(work.name, asdict(best), best_us, default_us)


def compile_ahead(calls: Sequence[Call], device: torch.device, *, num_threads: int) -> None:
    """Make each call once, several at a time, as the first one compiles its kernels.

    Compilers run beside each other, most of the time without Python's lock. Ranks share the cores:
    `num_threads` are this one's.
    """

    def first(call: Call) -> None:
        with torch.cuda.device(device):  # a thread begins on the first GPU
            time_of(call, _once)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as threads:
        list(threads.map(first, calls))


def default_config(work: Work, gpu: Gpu) -> Config:
    """Return the built-in configuration of a work."""
    if work.chunks is None:
        return default_decode(work.shape, gpu)
    return default_prefill(work.shape, gpu)


def candidates(work: Work, gpu: Gpu) -> Iterator[Config]:
    """Yield configurations that fit and may be faster than the built-in one."""
    shape = work.shape
    if shape.turned_dim:
        yield from _latent_candidates(work, gpu)
        return
    if work.chunks is None:
        base = default_decode(shape, gpu)
        blocks = [
            (base.block_n, 4, 2), (base.block_n, 4, 3), (base.block_n, 4, 4), (base.block_n, 2, 3),
            (2 * base.block_n, 4, 2), (2 * base.block_n, 8, 3), (max(16, base.block_n // 2), 4, 4),
        ]  # fmt: skip
        for block_n, num_warps, num_stages in blocks:
            if programs_per_sm(block_n, num_warps, num_stages, shape, gpu):
                yield decode_config(block_n, num_warps, num_stages, base.split_len, shape, gpu)
        yield replace(base, split_len=2 * base.split_len)
        return
    wide = padded_dim(shape) > 128
    sizes = [
        (128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 3),
        (64, 64, 4, 3), (64, 128, 4, 2), (64, 64, 4, 2),
    ]  # fmt: skip
    if wide:
        sizes = [(128, 64, 8, 2), (128, 32, 8, 3), (64, 32, 8, 3), (64, 32, 4, 2), (64, 64, 8, 2)]
    if shape.kv != "plain":
        sizes = [
            (128, 64, 8, 2), (128, 32, 8, 2), (128, 32, 8, 3), (64, 64, 8, 2), (64, 64, 4, 2),
            (64, 32, 4, 2),
        ]  # fmt: skip
    for config in (PrefillConfig(*size) for size in sizes):
        if prefill_bytes(config, shape) <= gpu.shared_bytes:
            yield config


def _latent_candidates(work: Work, gpu: Gpu) -> Iterator[Config]:
    """Yield the same for latents."""
    if work.chunks is None:
        for block_n, num_warps, num_stages, per_sm in (
            (32, 4, 2, 2), (32, 4, 3, 2), (32, 8, 2, 2), (32, 8, 3, 2), (64, 8, 2, 1),
            (64, 8, 3, 1),
        ):  # fmt: skip
            config = PrefillConfig(MIN_DOT, block_n, num_warps, num_stages - 1)
            if per_sm * prefill_bytes(config, work.shape) <= gpu.shared_bytes:
                yield DecodeConfig(block_n, num_warps, num_stages, per_sm, 512)
        return
    for config in (PrefillConfig(64, 32, 8, 2), PrefillConfig(64, 16, 8, 2)):
        if prefill_bytes(config, work.shape) <= gpu.shared_bytes:
            yield config


def scenes(work: Work, context_len: int) -> list[Scene]:
    """Return the measured rows: as many as fit into `MAX_POOL_BYTES` and `context_len`."""
    shape = work.shape
    max_tokens = MAX_POOL_BYTES // shape.token_bytes
    if work.chunks is None:
        found = [
            ((1, min(context, context_len, max_tokens // rows)),) * rows
            for rows, context in DECODE_SCENES
        ]
        return list(dict.fromkeys(found))
    longest = min(context_len, max_tokens)
    chunks = [
        ((max(2, new * min(longest, context) // context), min(longest, context)),)
        for new, context in CHUNK_SCENES[work.chunks]
    ]
    return list(dict.fromkeys(chunks))


class Scenery:
    """Queries, keys and values of one scene on the device; calls run attention over them."""

    def __init__(self, work: Work, scene: Scene, device: torch.device, *, width: int) -> None:
        """`width`: of the table, as wide as a server's: into how many parts rows are cut at most
        depends on it.
        """
        shape = work.shape
        num_new = sum(new for new, _ in scene)
        num_slots = sum(context for _, context in scene)
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=shape.dtype)

        self._work = work
        key_dim = shape.head_dim + shape.turned_dim
        self._q = normal(num_new, shape.num_heads, key_dim)
        if shape.turned_dim:
            latents = normal(1, num_slots, key_dim).transpose(0, 1)
            self._pools = (latents, latents[..., : shape.head_dim])
        else:
            pools = normal(2, shape.num_kv_heads, num_slots, key_dim)
            for kept in (dtype for dtype, kv in KV_KINDS.items() if kv == shape.kv):
                pools = kv_in_8_bits(pools, kept, WORD_BYTES)
            self._pools = (pools[0].transpose(0, 1), pools[1].transpose(0, 1))
        self._batch = _batch(scene, device, width)

    def call(self, config: Config) -> Call:
        """Return a call of attention with a configuration; the plan is made once."""
        work, batch = self._work, replace(self._batch, prepared={})
        configs = AttentionConfigs()
        for chunks in (None, *ChunkClass):
            if (chunks is None) == (work.chunks is None):
                configs = configs.plus(work.shape, chunks, config)
        return lambda: attention(
            self._q,
            self._pools[0],
            self._pools[1],
            batch,
            configs=configs,
            scale=self._q.shape[2] ** -0.5,
            sliding_window=work.window,
        )


def cuda_timer(call: Call) -> float:
    """Return the median time of a call on the current GPU, in seconds."""
    for _ in range(3):
        call()
    times: list[float] = []
    for _ in range(15):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Launching a few rows' attention takes the host longer than the GPU takes to run it.
        torch.cuda._sleep(HEAD_START_CYCLES)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _once(call: Call) -> float:
    """Make a call without a look at the clock."""
    call()
    return 0.0


def time_of(call: Call, timer: Timer) -> float | None:
    """Return a call's time in seconds; None: the GPU cannot run it."""
    try:
        return timer(call)
    except (OutOfResources, PTXASError, RuntimeError) as error:
        # A compiler that gives up says so with a RuntimeError, as does a GPU that has failed.
        if isinstance(error, RuntimeError) and "PassManager" not in str(error):
            raise
        log.debug("a configuration does not run here: %s", error)
        return None


def _geometric_mean(times: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(time_s) for time_s in times))


def _batch(scene: Scene, device: torch.device, width: int) -> AttentionBatch:
    """Return rows with slots in the order of their positions, as most have."""
    new = torch.tensor([new for new, _ in scene])
    contexts = torch.tensor([context for _, context in scene])
    firsts = contexts.cumsum(0) - contexts
    table = firsts[:, None] + torch.arange(int(contexts.max()))
    positions = torch.cat([torch.arange(context - n, context) for n, context in scene])
    rows = torch.arange(len(scene))
    return AttentionBatch(
        positions=positions.to(device),
        slot_mapping=table[rows.repeat_interleave(new), positions].to(device),
        req_to_slot=F.pad(table.int(), (0, width - table.shape[1])).to(device),
        rows=rows.to(device),
        cu_seqlens_q=torch.cat([torch.zeros(1), new.cumsum(0)]).int().to(device),
        context_lens=contexts.int().to(device),
        host_rows=tuple(range(len(scene))),
        host_q_lens=tuple(n for n, _ in scene),
        host_context_lens=tuple(context for _, context in scene),
    )


def _read(work: Work, choice: Choice) -> Config | None:
    """Return a choice's configuration; None: it is not one."""
    kind = DecodeConfig if work.chunks is None else PrefillConfig
    try:
        return kind(**choice.config)
    except TypeError:
        return None


def _save(path: Path, key: TuningKey, choices: dict[str, Choice]) -> None:
    try:
        save_choices(path, key, choices)
    except OSError as error:
        log.warning("measured kernel configurations are not kept: %s", error)
