"""Builds a model runner from the configuration: kernels, group, weights, pool, warm-up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from lightserve.config import ServeConfig
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.cpu.native import NativeKernels
from lightserve.kernels.interface import Kernels
from lightserve.kernels.select import make_kernels, missing_core
from lightserve.kernels.self_check import check_kernels
from lightserve.kernels.tune import tune_kernels
from lightserve.models.base import Model
from lightserve.models.config import (
    ModelConfig,
    load_model_config,
    resolve_context_len,
    resolve_dtype,
)
from lightserve.models.kernel_shapes import kernel_shapes
from lightserve.models.kv_layout import kv_layout
from lightserve.models.loader import load_model
from lightserve.models.parallel import SingleRank, TensorParallel
from lightserve.structured.vocabulary import model_vocabulary
from lightserve.tokenization.tokenizer import TOKENIZER_FILE, Tokenizer
from lightserve.worker.constraints import RowConstraints
from lightserve.worker.device import resolve_device
from lightserve.worker.device_memory import DeviceMemory
from lightserve.worker.device_queue import make_queue
from lightserve.worker.graph_capture import capture_graphs, graph_sizes
from lightserve.worker.host_pool import DirectHostPool, HostPool
from lightserve.worker.kv_pool import KVPool
from lightserve.worker.model_runner import ModelRunner
from lightserve.worker.pools import make_pools, measure_gpu
from lightserve.worker.warm_up import warm_up

log = logging.getLogger(__name__)


def build_runner(
    config: ServeConfig,
    *,
    tp: TensorParallel | None = None,
    generation: int = 0,
    load: Callable[..., Model] = load_model,
) -> ModelRunner:
    """Load `config.model` (a local directory) and return a runner that has run once.

    `load` has the signature of `load_model`; benchmarks give one that makes random weights.

    Raises:
        ModelLoadError, ConfigError, StartupError: one line for the operator.
    """
    tp = tp or SingleRank()
    path = Path(config.model)
    model_config = load_model_config(path)
    device = resolve_device(config.device, tp.rank)
    dtype = _dtype(config, model_config, device, is_said=tp.rank == 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    kernels = make_kernels(
        config.attention_backend, batch_invariant=config.batch_invariant, device=device
    )
    sizes = graph_sizes(config, kernels, device)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    context_len = resolve_context_len(config.max_model_len, model_config)
    model = load(
        path,
        model_config,
        dtype=torch_dtype,
        kernels=kernels,
        tp=tp,
        context_len=context_len,
        device=device,
    )
    shapes = kernel_shapes(model_config, tp, dtype=torch_dtype, context_len=context_len)
    tune_kernels(kernels, shapes, device, mode=config.kernel_tuning, is_shown=tp.rank == 0)
    check_kernels(kernels, shapes, device)
    layout = kv_layout(model_config, tp_size=tp.size, dtype=dtype)
    constraints = None
    if tp.rank == 0:
        constraints = _row_constraints(path, model_config.vocab_size, device)

    def make_runner(pool: KVPool, host_pool: HostPool) -> ModelRunner:
        return ModelRunner(
            model,
            pool,
            tp,
            host_pool=host_pool,
            queue=make_queue(device),
            max_num_seqs=config.max_num_seqs,
            generation=generation,
            constraints=constraints,
        )

    def measure(pool: KVPool) -> DeviceMemory:
        make = partial(make_runner, host_pool=DirectHostPool(0, pool))
        return measure_gpu(config, model, pool, make, graph_sizes=sizes, tp=tp)

    pool, host_pool = make_pools(config, layout, device, is_shown=tp.rank == 0, measure=measure)
    log.info(
        "%s, %s kernels on %s, %d KV slots, %d on the host",
        dtype,
        kernels.name,
        device,
        pool.num_slots,
        host_pool.num_slots,
    )
    if tp.rank == 0 and device.type == "cpu" and config.attention_backend == "auto":
        _tell_of_slower_kernels(kernels, torch_dtype)
    runner = make_runner(pool, host_pool)
    # In this order: a capture begins by giving back the memory that steps have got ready.
    capture_graphs(runner, model, pool, sizes, tp=tp)
    warm_up(runner, max_num_batched_tokens=config.max_tokens_of_step(device.type))
    return runner


def _tell_of_slower_kernels(kernels: Kernels, dtype: torch.dtype) -> None:
    """Log why the CPU does not compute as fast as it could, where a user can change that."""
    reason = missing_core()
    if kernels.name == TorchKernels.name and reason:
        log.warning(
            "torch's kernels compute, a step takes 1.1 to 1.7 times as long: the native core for"
            " CPUs is missing, as %s",
            reason,
        )
    elif kernels.name == NativeKernels.name and dtype is torch.float16:
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
    if is_said and config.dtype == "auto" and not config.batch_invariant and dtype != own:
        what = "is of float32" if model_config.dtype else "names no dtype, which means float32"
        log.warning(
            "the model %s: on a GPU it is served in %s (--dtype float32 keeps it)", what, dtype
        )
    return dtype


def _row_constraints(
    model_dir: Path, vocab_size: int, device: torch.device
) -> RowConstraints | None:
    """Return what enforces constraints, None where frontends refuse them all.

    Loaded at the start, as no step may wait for it: a second for a vocabulary of 150,000 tokens.
    """
    if not (model_dir / TOKENIZER_FILE).is_file():
        return None  # no frontend can start either
    tokenizer = Tokenizer(model_dir)
    if not tokenizer.eos_token_ids:
        return None  # an output could never end where its grammar does
    vocabulary = model_vocabulary(tokenizer, vocab_size)
    return RowConstraints(vocabulary, unpack=device.type == "cpu")
