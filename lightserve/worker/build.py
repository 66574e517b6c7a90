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
from lightserve.errors import ConfigError, StartupError
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.interface import FACTOR_BYTES, Can, Kernels, KernelShapes
from lightserve.kernels.select import make_kernels, missing_core, tune_kernels
from lightserve.kernels.self_check import check_kernels, check_quantized, check_small_kv
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
from lightserve.worker.constraints import RowConstraints
from lightserve.worker.device import device_of_rank, make_queue
from lightserve.worker.drafts import Lookup
from lightserve.worker.graphs import DecodeTables, estimated_graph_bytes
from lightserve.worker.host_pool import DirectHostPool, HostPool
from lightserve.worker.memory import (
    MIN_SLOTS,
    CudaStatistics,
    DeviceMemory,
    KVPool,
    MemoryStatistics,
    check_recurrent,
    free_memory_bytes,
    measure_step,
    num_device_slots,
    num_host_slots,
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
) -> Pools:
    """Return the pools of a rank.

    Args:
        config: sizes, given or auto.
        layout: of both pools.
        device: of the KV pool.
        is_shown: whether to show progress: rank 0 does.
        measure: called on a GPU with a pool of a few slots: the memory of everything else there.

    Raises:
        ConfigError, StartupError: they do not fit.
    """
    free_bytes, num_staged = free_memory_bytes(), 0
    is_on_gpu = device.type == "cuda"
    if is_on_gpu:
        memory = measure(KVPool(layout, MIN_SLOTS, device))
        num_staged = num_staged_slots(config, layout, total_bytes=memory.total)
        memory = dataclasses.replace(memory, staging=num_staged * layout.bytes_per_token)
        num_slots = num_device_slots(config, layout, memory)
        log.info(
            "of %.1f GiB on %s: %s, KV pool %.2f GiB",
            memory.total / 2**30,
            device,
            memory,
            (num_slots + 1) * layout.bytes_per_token / 2**30,
        )
    else:
        num_slots = num_kv_slots(config, layout, free_bytes=free_bytes)
    num_on_host = num_host_slots(
        config, layout, num_slots=num_slots, free_bytes=free_bytes, is_beside_gpu=is_on_gpu
    )
    pool = KVPool(layout, num_slots, device)
    num_staged = min(num_staged, num_on_host)
    return Pools(pool, make_host_pool(num_on_host, pool, num_staged=num_staged, is_shown=is_shown))


def measure_gpu(
    config: ServeConfig,
    model: Model,
    pool: KVPool,
    make_runner: Callable[[KVPool], ModelRunner],
    *,
    graph_sizes: GraphSizes,
    tp: TensorParallel,
) -> DeviceMemory:
    """Run the largest steps on `pool`, capture some CUDA graphs, and return the memory of it all.

    Every rank does; nothing of it is kept. `make_runner` makes a runner on a pool.
    """
    statistics = CudaStatistics(pool.device)
    most = config.max_tokens_of_step(pool.device.type)
    if model.config.encoder is not None:  # a prompt that is longer is a step of its own
        most = max(most, model.context_len)
    plans = largest_steps(
        max_num_batched_tokens=most,
        max_num_seqs=config.max_num_seqs,
        context_len=model.context_len,
        num_kv_tokens=statistics.total() // max(1, pool.bytes_per_token),
        num_state_slots=pool.num_state_slots,
    )

    def graph_bytes(tables: DecodeTables) -> int:
        make = make_graphs(model, pool, tables, tp=tp) if graph_sizes.decodes else None
        if make is None:
            return 0
        taken = 0
        if graph_sizes.mixed:
            # The capture itself says what cannot be recorded; ranks must not differ in it.
            with suppress(*([StartupError] if tp.size == 1 else [])):
                taken = estimated_graph_bytes(make.mixed, graph_sizes.mixed)
        return taken + estimated_graph_bytes(make.decodes, graph_sizes.decodes)

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
    _check_options(config, model_config, kernels, device)
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
    shapes = kernel_shapes(model_config, tp, dtype=torch_dtype, context_len=context_len)
    layout, shapes = _kept_as(kv_type, model_config, shapes, device, tp_size=tp.size)
    tune_kernels(kernels, shapes, device, mode=config.kernel_tuning, is_shown=tp.rank == 0)
    _check(kernels, shapes, device, method=method)
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
        )

    def measure(pool: KVPool) -> DeviceMemory:
        make = partial(make_runner, host_pool=DirectHostPool(0, pool))
        return measure_gpu(config, model, pool, make, graph_sizes=sizes, tp=tp)

    pool, host_pool = make_pools(config, layout, device, is_shown=tp.rank == 0, measure=measure)
    log.info(
        "%s%s, %s kernels on %s, %d KV slots%s, %d on the host",
        dtype,
        _unlike_the_model(config, dtype, kv_type),
        kernels.name,
        device,
        pool.num_slots,
        f" ({pool.num_state_slots} for the state of a sequence)" if pool.num_state_slots else "",
        host_pool.num_slots,
    )
    if tp.rank == 0 and device.type == "cpu" and backend == "auto":
        _tell_of_slower_kernels(kernels, torch_dtype)
    runner = make_runner(pool, host_pool)
    # In this order: a capture begins by giving back the memory that steps have got ready.
    capture_graphs(runner, model, pool, sizes, tp=tp, is_limited=config.cuda_graph_max_tokens > 0)
    warm_up(runner, max_num_batched_tokens=config.max_tokens_of_step(device.type))
    return runner


def _kept_as(
    kv_type: str,
    model_config: ModelConfig,
    shapes: KernelShapes,
    device: torch.device,
    *,
    tp_size: int,
) -> tuple[KVLayout, KernelShapes]:
    """Return the layout of keys and values of a type, and shapes that say it to kernels."""
    is_on_gpu = device.type == "cuda"
    layout = kv_layout(
        model_config,
        tp_size=tp_size,
        dtype=kv_type,
        model_dtype=str(shapes.dtype).removeprefix("torch."),
        is_on_gpu=is_on_gpu,
    )
    pool_dtype = layout.groups[0].pool_dtype
    if pool_dtype is shapes.dtype:
        return layout, shapes
    return layout, dataclasses.replace(shapes, pool_dtype=pool_dtype)


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


def _check(
    kernels: Kernels,
    shapes: KernelShapes,
    device: torch.device,
    *,
    method: LinearMethod,
) -> None:
    """Compare all that the kernels will do with the reference."""
    check_kernels(kernels, shapes, device)
    if method.fewest_bits is not None:
        check_quantized(kernels, shapes, device, has_int4=method.fewest_bits == 4)
    if shapes.pool_dtype is not None:
        check_small_kv(kernels, shapes, device)


def _proposer(config: ServeConfig, device: torch.device) -> Lookup | None:
    """Return what guesses drafts from texts; None: nothing does."""
    if config.speculation in ("off", "mtp"):
        return None
    num_rows, has_answers = config.max_num_seqs, config.speculation == "suffix"
    return Lookup(num_rows, make_queue(device), keeps_answers=has_answers)


def _check_options(
    config: ServeConfig, model_config: ModelConfig, kernels: Kernels, device: torch.device
) -> None:
    """Refuse options that do not go with the kernels."""
    check_latents(config, model_config, kernels)
    check_chunks(config, model_config, kernels)
    check_recurrent(config, model_config)
    is_kept_small = config.kv_dtype != "auto" and device.type == "cuda"
    if is_kept_small and model_config.head_dim % FACTOR_BYTES:
        raise ConfigError(
            f"--kv-dtype {config.kv_dtype} on a GPU needs heads of a multiple of {FACTOR_BYTES}"
            f" numbers, got {model_config.head_dim}"
        )
    if config.has_draft_head and device.type != "cpu":
        raise ConfigError("--speculation mtp needs --device cpu: ngram and suffix guess on GPUs")
    if config.speculation != "off" and device.type != "cpu" and Can.GRAPHS not in kernels.can:
        raise ConfigError(
            f"--speculation {config.speculation} needs kernels that read on the device where rows"
            f" are: not --attention-backend {config.attention_backend}"
        )


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
        _need(what, Can.INTEGERS, kernels, dtype)
        if quantization == "w8a8":
            check_rounded_prompts(kernels, dtype)
            return RoundingPromptsMethod(kernels)
        return Int4Method(kernels) if quantization == "int4" else Int8Method(kernels)
    if Can.FP8 in kernels.can and torch.cuda.is_available():
        check_fp8(torch.cuda.get_device_capability(), dtype)
    else:
        _need(what, Can.WIDE_SUMS, kernels, dtype)
        log.warning(
            "%s on a CPU saves neither memory nor time: weights are held as %s, and"
            " activations are rounded besides; its answers are those of a GPU of compute capability"
            " 8.9 or newer",
            what,
            str(dtype).removeprefix("torch."),
        )
    return Fp8Method(kernels)


def check_rounded_prompts(kernels: Kernels, dtype: torch.dtype) -> None:
    """Check that prompts can be multiplied by integers.

    Raises:
        ConfigError: these kernels, this processor, or the model's type, do not go with it.
    """
    if Can.ROUNDED_PROMPTS not in kernels.can:
        raise ConfigError(
            "--quantization w8a8 needs a CPU with AVX512-VNNI and AVX512-bf16, which this machine"
            " has not: --quantization int8 does without"
        )
    if dtype is not torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"--quantization w8a8 needs --dtype bfloat16, got {name}")


def check_fp8(capability: tuple[int, int], dtype: torch.dtype) -> None:
    """Check that a GPU has products of 8-bit floating point, with factors for each row.

    Raises:
        ConfigError: it has not, or not with results of the model's type.
    """
    if capability < (8, 9):
        own = ".".join(map(str, capability))
        raise ConfigError(
            f"--quantization fp8 needs a GPU of compute capability 8.9 or newer, got {own}:"
            " --quantization int8 does without"
        )
    if dtype is not torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"--quantization fp8 needs --dtype bfloat16 on a GPU, got {name}")


def check_chunks(config: ServeConfig, model_config: ModelConfig, kernels: Kernels) -> None:
    """Check that chunks of attention are cut where rows are known on the host.

    Raises:
        ConfigError: passes are recorded, and the context is longer than a chunk.
    """
    chunk = model_config.attention_chunk
    length = resolve_context_len(config.max_model_len, model_config)
    if chunk is not None and length > chunk and Can.GRAPHS in kernels.can:
        raise ConfigError(
            f"--max-model-len must be at most {chunk} with the {kernels.name} kernels, which do not"
            f" attend within chunks (attention_chunk_size), got {length}"
        )


def check_latents(config: ServeConfig, model_config: ModelConfig, kernels: Kernels) -> None:
    """Check that a model of latent attention is served as it can be.

    Raises:
        ConfigError: these kernels, or 8 bits, do not go with it.
    """
    if model_config.latent is None:
        return
    name = model_config.architecture
    if config.kv_dtype != "auto":
        raise ConfigError(
            f"--kv-dtype {config.kv_dtype} does not go with {name}: the kept vector of a token"
            " has parts of different sizes, which cannot share a factor"
        )
    if Can.LATENTS not in kernels.can:
        raise ConfigError(
            f"the {kernels.name} kernels do not go with {name}: --attention-backend torch does,"
            " without --batch-invariant"
        )


def kv_dtype(config: ServeConfig, kernels: Kernels, dtype: str) -> str:
    """Return the type of keys and values of a model of type `dtype`, as --kv-dtype says.

    Raises:
        ConfigError: these kernels, or the model's type, do not go with it.
    """
    if config.kv_dtype == "auto":
        return dtype
    what = f"--kv-dtype {config.kv_dtype}"
    if config.kv_dtype == "fp8" and Can.FP8_KV not in kernels.can:
        raise ConfigError(
            f"{what} needs a GPU, got {kernels.name} kernels on a CPU: --kv-dtype int8 does without"
        )
    _need(what, Can.INT8_KV, kernels, getattr(torch, dtype))
    return config.kv_dtype


def _need(what: str, need: Can, kernels: Kernels, dtype: torch.dtype) -> None:
    """Check that kernels have a capability for the model's type; on CPUs the native core has."""
    if need not in kernels.can:
        reason = missing_core() if kernels.name == TorchKernels.name else ""
        why = f", which is missing, as {reason}" if reason else f", got {kernels.name} kernels"
        raise ConfigError(f"{what} needs the native core for CPUs{why}")
    if dtype not in kernels.types:
        raise ConfigError(f"{what} needs --dtype bfloat16 or float32: the model's own is float16")


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
