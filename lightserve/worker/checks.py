"""Checks of a model against options and kernels, before its weights are read, and of kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.interface import FACTOR_BYTES, Can, Kernels
from lightserve.kernels.select import missing_core
from lightserve.kernels.self_check import check_kernels, check_quantized, check_small_kv
from lightserve.kernels.weights import KernelShapes, Packed
from lightserve.models.config import ModelConfig


def check_options(
    config: ServeConfig, model_config: ModelConfig, kernels: Kernels, device: torch.device
) -> None:
    """Check that a model can be served as options say, by these kernels.

    Raises:
        ConfigError: an option, or the kernels, do not go with the model.
    """
    _check_latents(config, model_config, kernels)
    _check_recurrent(config, model_config)
    is_kept_small = config.kv_dtype != "auto" and device.type == "cuda"
    sizes = [model_config.shape_of(layers[0]).head_dim for layers in model_config.kv_groups]
    if is_kept_small and (odd := [size for size in sizes if size % FACTOR_BYTES]):
        raise ConfigError(
            f"--kv-dtype {config.kv_dtype} on a GPU needs heads of a multiple of {FACTOR_BYTES}"
            f" numbers, got {odd[0]}"
        )
    if config.speculation != "off" and device.type != "cpu" and Can.GRAPHS not in kernels.can:
        raise ConfigError(
            f"--speculation {config.speculation} needs kernels that read on the device where rows"
            f" are: not --attention-backend {config.attention_backend}"
        )


def _check_latents(config: ServeConfig, model_config: ModelConfig, kernels: Kernels) -> None:
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


def _check_recurrent(config: ServeConfig, model_config: ModelConfig) -> None:
    """Check that a model with recurrent layers is served as it can be.

    Raises:
        ConfigError: blocks of one request do not go with it.
    """
    if model_config.recurrent is not None and config.block_owner == "exclusive":
        raise ConfigError(
            f"--block-owner exclusive does not go with {model_config.architecture}: the state of"
            " its recurrent layers takes more slots than a block has, and prefixes keep some"
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
    check_need(what, Can.INT8_KV, kernels, getattr(torch, dtype))
    return config.kv_dtype


def check_need(what: str, need: Can, kernels: Kernels, dtype: torch.dtype) -> None:
    """Check that kernels have a capability for the model's type; on CPUs the native core has."""
    if need not in kernels.can:
        reason = missing_core() if kernels.name == TorchKernels.name else ""
        why = f", which is missing, as {reason}" if reason else f", got {kernels.name} kernels"
        raise ConfigError(f"{what} needs the native core for CPUs{why}")
    if dtype not in kernels.types:
        raise ConfigError(f"{what} needs --dtype bfloat16 or float32: the model's own is float16")


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


def check_fp8(capability: tuple[int, int]) -> None:
    """Check that a GPU has products of 8-bit floating point.

    Raises:
        ConfigError: it has not.
    """
    if capability < (8, 9):
        own = ".".join(map(str, capability))
        raise ConfigError(
            f"--quantization fp8 needs a GPU of compute capability 8.9 or newer, got {own}:"
            " --quantization int8 does without"
        )


def check_shapes(
    kernels: Kernels,
    shapes: Sequence[KernelShapes],
    device: torch.device,
    *,
    kinds: Packed,
) -> None:
    """Compare all that kernels will do with the reference.

    `shapes`: of each size of heads. `kinds`: of weights.

    Raises:
        StartupError: an operation disagrees.
    """
    for own in shapes:
        check_kernels(kernels, own, device)
        if own.pool_dtype is not None:
            check_small_kv(kernels, own, device)
    check_quantized(kernels, shapes[0], device, kinds)
