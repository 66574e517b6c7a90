"""Builds a model runner from the configuration: kernels, group, weights, pool, warm-up."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from lightserve.config import ServeConfig
from lightserve.errors import StartupError
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.interface import Can, Kernels
from lightserve.kernels.select import make_kernels, missing_core, tune_kernels
from lightserve.messages.common import GraphSizes
from lightserve.messages.router_worker import StepPlan
from lightserve.model_formats import choose_formats
from lightserve.models.base import (
    KVLayout,
    Model,
    SingleRank,
    TensorParallel,
    kernel_shapes,
    kv_layout,
)
from lightserve.models.config import (
    ModelConfig,
    load_model_config,
    resolve_context_len,
    resolve_dtype,
)
from lightserve.models.image_processor import MAX_PIXELS
from lightserve.models.layers.linear import LinearMethod, UnquantizedMethod
from lightserve.models.layers.quantized import (
    Fp8Method,
    Int4Method,
    Int8Method,
    RoundingPromptsMethod,
    StoredMethod,
)
from lightserve.models.loader import load_model
from lightserve.models.pooling import load_embedding
from lightserve.models.weight_files import quantised_as
from lightserve.tokenization.chat_template import find_chat_template
from lightserve.tokenization.description import tokenizer_file
from lightserve.tokenization.tokenizer import Tokenizer
from lightserve.worker.capture import capture_graphs, graph_sizes, make_graphs
from lightserve.worker.checks import (
    check_fp8,
    check_need,
    check_options,
    check_rounded_prompts,
    check_shapes,
    kv_dtype,
)
from lightserve.worker.constraints import RowConstraints
from lightserve.worker.device import device_of_rank, make_queue
from lightserve.worker.draft_states import kept_bytes
from lightserve.worker.drafts import Lookup
from lightserve.worker.graphs import DecodeTables, estimated_graph_bytes
from lightserve.worker.host_pool import DirectHostPool, HostPool
from lightserve.worker.memory import (
    MIN_SLOTS,
    CudaStatistics,
    DeviceMemory,
    KVPool,
    MemoryStatistics,
    check_kept,
    free_memory_bytes,
    host_sizes,
    measure_step,
    num_device_slots,
    num_kv_slots,
    num_staged_slots,
)
from lightserve.worker.model_runner import ModelRunner
from lightserve.worker.staged_host_pool import make_host_pool
from lightserve.worker.warm_up import largest_steps, warm_up

log = logging.getLogger(__name__)

# The KV pool and host pool of a rank, as large as flags and free memory allow.


class Pools(NamedTuple):
    """The pools of a rank's KV."""

    kv: KVPool
    host: HostPool


def make_pools(
    config: ServeConfig,
    layout: KVLayout,
    device: torch.device,
    *,
    is_shown: bool,
    measure: Callable[[KVPool], DeviceMemory],
    kept_bytes: int = 0,
) -> Pools:
    """Return the pools of a rank.

    Args:
        config: sizes, given or auto.
        layout: of both pools.
        device: of the KV pool.
        is_shown: whether to show progress: rank 0 does.
        measure: called on a GPU with a pool of a few slots: the memory of everything else there.
        kept_bytes: of a rank for the inputs of guesses, see `DraftStates`.

    Raises:
        ConfigError, StartupError: they do not fit.
    """
    free_bytes, num_staged = free_memory_bytes(), 0
    is_on_gpu = device.type == "cuda"
    if is_on_gpu:
        memory = measure(KVPool(layout, MIN_SLOTS, device))
        num_staged = num_staged_slots(config, layout, total_bytes=memory.total)
        memory = dataclasses.replace(memory, staging=num_staged * layout.bytes_per_token)
        # The room for those inputs was there beside the weights.
        weights = memory.weights - kept_bytes
        memory = dataclasses.replace(memory, weights=weights, kept=kept_bytes)
        num_slots = num_device_slots(config, layout, memory)
        log.info(
            "of %.1f GiB on %s: %s, KV pool %.2f GiB",
            memory.total / 2**30,
            device,
            memory,
            (num_slots + 1) * layout.bytes_per_token / 2**30,
        )
    else:
        num_slots = num_kv_slots(config, layout, free_bytes=free_bytes, kept_bytes=kept_bytes)
        free_bytes -= kept_bytes * len(config.local_ranks)
    sizes = host_sizes(
        config, layout, num_slots=num_slots, free_bytes=free_bytes, is_beside_gpu=is_on_gpu
    )
    pool = KVPool(layout, num_slots, device)
    num_staged = min(num_staged, sum(sizes))
    host_pool = make_host_pool(sum(sizes), pool, num_staged=num_staged, is_shown=is_shown)
    host_pool.num_prefix_slots = sizes.num_prefix_slots
    return Pools(pool, host_pool)


def measure_gpu(
    config: ServeConfig,
    model: Model,
    pool: KVPool,
    make_runner: Callable[[KVPool], ModelRunner],
    *,
    graph_sizes: GraphSizes,
    tp: TensorParallel,
    dtype: torch.dtype | None = None,
) -> DeviceMemory:
    """Run the largest steps on `pool`, capture some CUDA graphs, and return the memory of it all.

    Every rank does; nothing of it is kept. `make_runner` makes a runner on a pool; `dtype` is the
    model's type, None: that of keys and values.

    Raises:
        StartupError: inputs of guesses do not fit, or a graph could not be recorded.
    """
    statistics = CudaStatistics(pool.device)
    free_bytes = statistics.total() - statistics.begin() - statistics.others()
    kept = kept_bytes(model.recurrent, config.drafted_tokens_of_step(pool.device.type))
    check_kept(kept, free_bytes, f"on {pool.device}")
    most = config.max_tokens_of_step(pool.device.type)
    if model.config.encoder is not None:  # a prompt that is longer is a step of its own
        most = max(most, model.context_len)
    vision = model.config.vision
    if vision is not None and vision.prompt.sees_itself:  # an image may go beyond
        most += vision.num_tokens(*vision.processor.largest(MAX_PIXELS))
    plans = largest_steps(
        max_num_batched_tokens=most,
        max_num_seqs=config.max_num_seqs,
        context_len=model.context_len,
        num_kv_tokens=statistics.total() // max(1, pool.bytes_per_token),
        num_state_slots=pool.num_state_slots,
    )

    def graph_bytes(tables: DecodeTables) -> int:
        if not graph_sizes.decodes:
            return 0
        make, taken = make_graphs(model, pool, tables, tp=tp, dtype=dtype), 0
        # The capture itself says what cannot be recorded; ranks must not differ in passes.
        if graph_sizes.mixed:
            with suppress(*([StartupError] if tp.size == 1 else [])):
                taken = estimated_graph_bytes(make.mixed, graph_sizes.mixed)
        taken += estimated_graph_bytes(make.decodes, graph_sizes.decodes)
        if make.state_sizes:
            with suppress(StartupError):
                taken += estimated_graph_bytes(make.states, make.state_sizes)
        return taken

    memory = _measure(statistics, make_runner(pool), plans, graph_bytes)
    gc.collect()  # the runner, before the pool takes all there is
    statistics.end()
    return memory


def _measure(
    statistics: MemoryStatistics,
    runner: ModelRunner,
    plans: list[StepPlan],
    graph_bytes: Callable[[DecodeTables], int],
) -> DeviceMemory:
    def run() -> None:
        runner.encode_any()
        for plan in plans:
            runner.execute(plan)

    memory = measure_step(statistics, run)
    return dataclasses.replace(memory, graphs=graph_bytes(runner.tables))


def build_runner(
    config: ServeConfig,
    *,
    tp: TensorParallel | None = None,
    incarnation: int = 0,
    load: Callable[..., Model] = load_model,
) -> ModelRunner:
    """Load `config.model` (a local directory) and return a runner that has run once.

    `load` has the signature of `load_model`; benchmarks give one that makes random weights.

    Raises:
        ModelLoadError, ConfigError, StartupError: one line for the operator.
    """
    tp, path = tp or SingleRank(), Path(config.model)
    model_config = load_model_config(path, has_draft_head=config.has_draft_head)
    device = _device(config, tp.rank)
    dtype = _dtype(config, model_config, device, is_said=tp.rank == 0)
    backend, invariant = config.attention_backend, config.batch_invariant
    kernels = make_kernels(backend, batch_invariant=invariant, device=device)
    sizes = graph_sizes(config, kernels, device, has_decodes=model_config.encoder is None)
    embedding = load_embedding(path, model_config, config.pooling)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    method, stored_as = _method(config, model_config, kernels, torch_dtype)
    check_options(config, model_config, kernels, device)
    kv_type = kv_dtype(config, kernels, dtype)
    context_len = resolve_context_len(config.max_model_len, model_config)
    model = load(
        path,
        model_config,
        dtype=torch_dtype,
        kernels=kernels,
        tp=tp,
        method=method,
        context_len=context_len,
        device=device,
    )
    _tell_of_stored(stored_as, method, dtype, is_said=tp.rank == 0)
    layout = _layout(model_config, device, tp, dtype=dtype, kv_type=kv_type)
    shapes = kernel_shapes(model_config, tp, layout, dtype=torch_dtype, context_len=context_len)
    is_shown, has_rows = tp.rank == 0, method.has_fp8_rows
    mode = config.kernel_tuning
    tune_kernels(kernels, shapes, device, mode=mode, is_shown=is_shown, has_fp8_rows=has_rows)
    check_shapes(kernels, shapes, device, kinds=method.kinds)
    constraints = None if tp.rank else _row_constraints(config, model_config.vocab_size, device)

    def make_runner(pool: KVPool, host_pool: HostPool) -> ModelRunner:
        return ModelRunner(
            model,
            pool,
            tp,
            host_pool=host_pool,
            queue=make_queue(device),
            max_num_seqs=config.max_num_seqs,
            incarnation=incarnation,
            constraints=constraints,
            pooling=embedding.kind if embedding and embedding.is_whole else None,
            proposer=_proposer(config, device),
            max_drafted_tokens=config.drafted_tokens_of_step(device.type),
        )

    def measure(pool: KVPool) -> DeviceMemory:
        make = partial(make_runner, host_pool=DirectHostPool(0, pool))
        return measure_gpu(config, model, pool, make, graph_sizes=sizes, tp=tp, dtype=torch_dtype)

    kept = kept_bytes(model.recurrent, config.drafted_tokens_of_step(device.type))
    pools = make_pools(config, layout, device, is_shown=is_shown, measure=measure, kept_bytes=kept)
    pool, host_pool = pools
    kinds = dtype + _unlike_the_model(config, dtype, kv_type)
    slots = _slots_in_words(pool, host_pool)
    log.info("%s, %s kernels on %s, %s", kinds, kernels.name, device, slots)
    if tp.rank == 0 and device.type == "cpu" and backend == "auto":
        _tell_of_slower_kernels(kernels, torch_dtype)
    runner = make_runner(pool, host_pool)
    # In this order: a capture begins by giving back the memory that steps have got ready.
    is_limited = config.cuda_graph_max_tokens > 0
    capture_graphs(runner, model, pool, sizes, tp=tp, dtype=torch_dtype, is_limited=is_limited)
    warm_up(runner, max_num_batched_tokens=config.max_tokens_of_step(device.type))
    return runner


def _layout(
    model_config: ModelConfig, device: torch.device, tp: TensorParallel, *, dtype: str, kv_type: str
) -> KVLayout:
    """Return the layout of keys and values of a type, of a model of type `dtype`."""
    return kv_layout(
        model_config,
        tp_size=tp.size,
        dtype=kv_type,
        model_dtype=dtype,
        is_on_gpu=device.type == "cuda",
    )


def _slots_in_words(pool: KVPool, host_pool: HostPool) -> str:
    states = f" ({pool.num_state_slots} for the state of a sequence)" * bool(pool.num_state_slots)
    return f"{pool.num_slots} KV slots{states}, {host_pool} on the host"


def _unlike_the_model(config: ServeConfig, dtype: str, kv_type: str) -> str:
    """Return how weights and KV are kept where that is not as numbers of `dtype`."""
    weights = "" if config.quantization == "none" else f" with {config.quantization} weights"
    return weights + ("" if kv_type == dtype else f" and {kv_type} KV")


def _device(config: ServeConfig, rank: int) -> torch.device:
    """Return where a rank computes; on GPUs it is torch's own choice from now on."""
    device = device_of_rank(config, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _proposer(config: ServeConfig, device: torch.device) -> Lookup | None:
    """Return what guesses drafts from texts; None: nothing does."""
    if config.speculation in ("off", "mtp"):
        return None
    num_rows, has_answers = config.max_num_seqs, config.speculation == "suffix"
    return Lookup(num_rows, make_queue(device), keeps_answers=has_answers)


def _method(
    config: ServeConfig, model_config: ModelConfig, kernels: Kernels, dtype: torch.dtype
) -> tuple[LinearMethod, str | None]:
    """Return the method for weights, and the quantisation of the files' own; None: they are
    plain."""
    stored_as = quantised_as(Path(config.model), model_config)
    form = model_config.weight_format
    method = linear_method(
        config.quantization,
        kernels,
        dtype,
        is_stored=bool(stored_as),
        rounds_tokens=form is not None and form.rounds_tokens,
    )
    return method, stored_as


def linear_method(
    quantization: str,
    kernels: Kernels,
    dtype: torch.dtype,
    *,
    is_stored: bool = False,
    rounds_tokens: bool = False,
) -> LinearMethod:
    """Return how weights are kept, as --quantization says.

    `is_stored`: the files have quantised ones, which stay as they are where they can.
    `rounds_tokens`: see `WeightFormat`.

    Raises:
        ConfigError: these kernels, or the model's type, do not go with it.
    """
    if quantization == "none":
        if is_stored and Can.INTEGERS in kernels.can and dtype in kernels.types:
            return StoredMethod(kernels, rounds_tokens=rounds_tokens)
        return UnquantizedMethod(kernels)
    what = f"--quantization {quantization}"
    if quantization != "fp8":
        check_need(what, Can.INTEGERS, kernels, dtype)
        if quantization == "w8a8":
            check_rounded_prompts(kernels, dtype)
            return RoundingPromptsMethod(kernels)
        return Int4Method(kernels) if quantization == "int4" else Int8Method(kernels)
    if Can.FP8 in kernels.can and torch.cuda.is_available():
        check_fp8(torch.cuda.get_device_capability())
    else:
        check_need(what, Can.WIDE_SUMS, kernels, dtype)
        log.warning(
            "%s on a CPU saves neither memory nor time: weights are held as %s, and"
            " activations are rounded besides; its answers are those of a GPU of compute capability"
            " 8.9 or newer",
            what,
            str(dtype).removeprefix("torch."),
        )
    return Fp8Method(kernels)


def _tell_of_stored(
    stored_as: str | None, method: LinearMethod, dtype: str, *, is_said: bool
) -> None:
    """Log the fate of weights that are quantised in the files, None: there are none."""
    if stored_as is None or not is_said:
        return
    if isinstance(method, StoredMethod):
        log.info(
            "quantised weights (%s): %d products multiply by them as they are, %d by numbers of %s",
            stored_as,
            method.num_kept,
            method.num_widened,
            dtype,
        )
        if method.num_fp8:
            is_rounded = Can.FP8_PRODUCTS in method.kernels.can
            log.info(
                "FP8 weights: %s",
                "activations are rounded to FP8 as well, and tensor cores multiply the two"
                if is_rounded
                else f"weights alone, made numbers of {dtype}: FP8 products need a GPU of compute"
                " capability 8.9 or newer",
            )
    else:
        log.info("quantised weights (%s) became numbers of %s when loaded", stored_as, dtype)


def _tell_of_slower_kernels(kernels: Kernels, dtype: torch.dtype) -> None:
    """Log why the CPU does not compute as fast as it could, where a user can change that."""
    reason = missing_core()
    if kernels.name == TorchKernels.name and reason:
        log.warning(
            "torch's kernels compute, a step takes 1.1 to 1.7 times as long: the native core for"
            " CPUs is missing, as %s",
            reason,
        )
    elif dtype not in kernels.types:
        log.warning(
            "float16 is computed by torch, whose steps take longer than those of bfloat16:"
            " the native core for CPUs has bfloat16 and float32"
        )


def _dtype(
    config: ServeConfig, model_config: ModelConfig, device: torch.device, *, is_said: bool
) -> str:
    """Return the type of weights and KV; it is said if it is not the model's own."""
    dtype = resolve_dtype(
        config.dtype,
        model_config,
        device_type=device.type,
        batch_invariant=config.batch_invariant,
    )
    own = model_config.dtype or "float32"
    if is_said and config.dtype == "auto" and own == "float16" and dtype == "bfloat16":
        log.warning(
            "the model is of float16: on a CPU its quantised weights are multiplied in %s"
            " (--dtype float16 makes numbers of them)",
            dtype,
        )
    elif is_said and config.dtype == "auto" and not config.batch_invariant and dtype != own:
        what = "is of float32" if model_config.dtype else "names no dtype, which means float32"
        log.warning(
            "the model %s: on a GPU it is served in %s (--dtype float32 keeps it)", what, dtype
        )
    return dtype


def _row_constraints(
    config: ServeConfig, vocab_size: int, device: torch.device
) -> RowConstraints | None:
    """Return the part that enforces constraints, None where frontends refuse them all.

    Its process starts with the worker, as no step may wait for it.
    """
    model_dir = Path(config.model)
    if tokenizer_file(model_dir) is None:
        return None  # no frontend can start either
    source = find_chat_template(model_dir, config.chat_template)
    formats = choose_formats(
        None if source is None else source.texts,
        tools=config.tool_call_parser,
        reasoning=config.reasoning_parser,
    )
    # Calls that a grammar asks for begin with the model's own tokens, not with their letters.
    tokenizer = Tokenizer(model_dir, shown=formats.marks, vocab_size=vocab_size)
    if not tokenizer.eos_token_ids:
        return None  # an output could never end where its grammar does
    unpack = device.type == "cpu"
    return RowConstraints(model_dir, vocab_size, shown=tuple(formats.marks), unpack=unpack)
