"""--quantization int8: the whole model, its accuracy, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.model_runs import LoadedModel, load_tiny
from support.parity import TokenSequence, compare, schedule
from support.random_model import layout_of, random_model, tiny_config
from torch import Tensor

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.config import ServeConfig
from lightserve.errors import ConfigError, StartupError
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.cpu.native import NativeKernels
from lightserve.kernels.interface import Int8Weight, Kernels
from lightserve.kernels.reference import ReferenceKernels, rounded_to_int8
from lightserve.kernels.select import missing_core
from lightserve.models.layers.linear import Int8Method, Linear, LinearMethod, UnquantizedMethod
from lightserve.worker import engine
from lightserve.worker.engine import build_runner, linear_method
from tools.tiny_model.check import chat_prompt, draw_exchanges, load_bundle

pytestmark = pytest.mark.skipif(bool(missing_core()), reason=missing_core())
LARGEST_SHARE = 0.01
"""Of tokens whose most probable successor is another one, and no tie."""
LARGEST_DIVERGENCE = 3e-4
"""Nats of a token; bfloat16 itself is 0.5e-4 from float32."""


class RoundedMethod(UnquantizedMethod):
    """Plain weights that have been rounded."""

    def make(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return super().make(rounded_to_int8(weight), bias)


class FourBitMethod(UnquantizedMethod):
    """Plain weights with 15 values for each output."""

    def make(self, weight: Tensor, bias: Tensor | None) -> Linear:
        step = weight.abs().amax(dim=1, keepdim=True) / 7
        return super().make((weight / step).round() * step, bias)


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": False, "qk_norm": True, "qkv_bias": False}]
)
def test_every_product_of_a_model_is_by_rounded_weights(changes: dict[str, object]) -> None:
    config = tiny_config(**changes)
    tokens = torch.arange(7, 57)
    passes = schedule([len(tokens)], chunk=20, num_decodes=6)

    def logits(kernels: Kernels, method: LinearMethod) -> Tensor:
        model = random_model(kernels, config, method=method)
        heads = layout_of(config).groups[0].num_kv_heads
        loaded = LoadedModel(model, config, torch.float32, heads)
        results = loaded.run([TokenSequence(tokens, torch.empty(0))], passes)
        assert results is not None
        return results[0]

    native, reference = NativeKernels(), ReferenceKernels()
    found = logits(native, Int8Method(native))
    expected = logits(reference, RoundedMethod(reference))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    plain = logits(reference, UnquantizedMethod(reference))
    assert (plain - expected).abs().max() > 1e-2, "rounding is to be seen"


def bundled_texts() -> list[Tensor]:
    """Return what the model was trained to say, from a seed that it was not trained on."""
    tokenizer = load_bundle(BUNDLED_MODEL_DIR).tokenizer
    texts = [
        chat_prompt(exchange.prompt, tokenizer=tokenizer) + exchange.answer
        for exchange in draw_exchanges(5, num=16)
    ]
    return [
        torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"][:250]) for text in texts
    ]


def bundled_logits(texts: list[Tensor], method: LinearMethod | None) -> Tensor:
    """Return the logits in bfloat16 after each token, the last of each text as decodes."""
    loaded = load_tiny(BUNDLED_MODEL_DIR, torch.bfloat16, NativeKernels(), method=method)
    results: list[Tensor] = []
    for first in range(0, len(texts), 8):
        some = texts[first : first + 8]
        passes = schedule([len(text) for text in some], chunk=64, num_decodes=8)
        logits = loaded.run([TokenSequence(text, torch.empty(0)) for text in some], passes)
        assert logits is not None
        results += logits
    return torch.cat(results).float()


def test_the_bundled_model_says_the_same() -> None:
    texts, kernels = bundled_texts(), NativeKernels()
    plain = bundled_logits(texts, None)

    def differs(method: LinearMethod) -> tuple[float, float]:
        """Return the share of other tokens and the mean divergence."""
        logits = bundled_logits(texts, method)
        report = compare(plain, logits, torch.bfloat16)
        probabilities = plain.log_softmax(-1)
        divergence = (probabilities.exp() * (probabilities - logits.log_softmax(-1))).sum(-1)
        return report.num_different / report.num_positions, float(divergence.mean())

    share, divergence = differs(Int8Method(kernels))
    assert share <= LARGEST_SHARE
    assert divergence <= LARGEST_DIVERGENCE
    _, coarse = differs(FourBitMethod(kernels))
    assert coarse > 3 * LARGEST_DIVERGENCE, "fewer bits would have been noticed"


def config_of(**changes: object) -> ServeConfig:
    return ServeConfig(
        model=str(BUNDLED_MODEL_DIR),
        quantization="int8",
        kv_memory="1MiB",
        max_num_seqs=4,
        max_model_len=64,
        max_num_batched_tokens=64,
        **changes,  # type: ignore[arg-type]
    )


def test_a_worker_starts_with_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        build_runner(config_of(), load=load_checked)
    assert "bfloat16 with int8 weights, native kernels on cpu" in caplog.text


def load_checked(path: Path, *arguments: object, **options: object) -> object:
    assert isinstance(options["method"], Int8Method)
    return engine.load_model(path, *arguments, **options)  # type: ignore[arg-type]


def test_a_worker_without_the_core_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "make_kernels", lambda *_, **__: TorchKernels())
    monkeypatch.setattr(engine, "missing_core", lambda: "it was not built")
    message = "--quantization int8 needs the native core for CPUs, which is missing, as it was not"
    with pytest.raises(ConfigError, match=message):
        build_runner(config_of())


def test_other_kernels_and_types_are_refused() -> None:
    native = NativeKernels()
    with pytest.raises(ConfigError, match="needs the native core for CPUs, got reference kernels"):
        linear_method("int8", ReferenceKernels(), torch.bfloat16)
    with pytest.raises(ConfigError, match="needs --dtype bfloat16 or float32: the model's own is"):
        linear_method("int8", native, torch.float16)
    assert type(linear_method("none", native, torch.float16)) is UnquantizedMethod


def test_a_wrong_product_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = NativeKernels.linear_int8

    def swapped(self: NativeKernels, x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
        return multiply(self, x, weight, bias).flip(1)

    monkeypatch.setattr(NativeKernels, "linear_int8", swapped)
    with pytest.raises(StartupError, match=r"int8 linear \(qkv\) .* --quantization none"):
        build_runner(config_of())
