"""--quantization int8, int4 and fp8, --kv-dtype int8: whole models, accuracy, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_runs import LoadedModel, load_tiny
from support.parity import TokenSequence, compare, schedule
from support.random_model import layout_of, random_model, tiny_config
from torch import Tensor

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.config import ServeConfig
from lightserve.errors import ConfigError, ModelLoadError, StartupError
from lightserve.kernels.cpu.core import Level
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.cpu.native import NativeKernels
from lightserve.kernels.interface import Kernels
from lightserve.kernels.reference import ReferenceKernels, rounded_to_int8
from lightserve.kernels.select import missing_core
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.kernels.weights import GroupedWeight, Int8Weight, Weight
from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.messages.router_worker import AddSequence, OutputKind, PlanRow, SlotRange, StepPlan
from lightserve.models.base import Part, kv_layout
from lightserve.models.config import load_model_config
from lightserve.models.layers.linear import (
    Linear,
    LinearMethod,
    ModuleShard,
    UnquantizedMethod,
    WeightLinear,
)
from lightserve.models.layers.quantized import (
    Fp8Method,
    Int4Method,
    Int8Method,
    RoundingLinear,
    RoundingPromptsMethod,
    rounded_to_fp8,
)
from lightserve.models.moe_config import MoeConfig
from lightserve.types import RowId, SamplingParams, StepId
from lightserve.worker import build, checks
from lightserve.worker.build import build_runner, linear_method
from tools.tiny_model.check import chat_prompt, draw_exchanges, load_bundle

pytestmark = pytest.mark.skipif(bool(missing_core()), reason=missing_core())
LARGEST_SHARE = {
    "int8": 0.01, "w8a8": 0.02, "int4": 0.05, "fp8": 0.1, "int8 KV": 0.01, "fp8 KV": 0.03
}  # fmt: skip
"""Of tokens whose most probable successor is another one, and no tie."""
LARGEST_DIVERGENCE = {
    "int8": 3e-4, "w8a8": 1e-3, "int4": 5e-4, "fp8": 5e-3, "int8 KV": 3e-4, "fp8 KV": 1e-3
}  # fmt: skip
"""Nats of a token; bfloat16 itself is 0.5e-4 from float32."""


EXPERTS = MoeConfig(
    layers=frozenset({1}),
    num_experts=5,
    num_chosen=2,
    intermediate_size=40,
    normalises=True,
    shared_size=24,
    shared_module="shared",
)


class RoundedLinear(WeightLinear):
    """Whose rows, as embeddings, are rounded too."""

    def rows(self, in_size: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        return lambda indices: self.weight[indices].to(dtype)


class OneByOne(TorchKernels):
    """The reference's products, without those of several experts at once."""

    linear = ReferenceKernels.linear
    gated_linear = ReferenceKernels.gated_linear
    pack_weight = ReferenceKernels.pack_weight


class RoundedMethod(UnquantizedMethod):
    """Plain weights that have been rounded."""

    def make(self, weight: Tensor, bias: Tensor | None, *, is_gated: bool = False) -> Linear:
        return RoundedLinear(self.kernels, rounded_to_int8(weight), bias, is_gated=is_gated)


class CoarseMethod(UnquantizedMethod):
    """Plain weights with few values for each output."""

    def __init__(self, kernels: Kernels, largest: int) -> None:
        super().__init__(kernels)
        self._largest = largest

    def make(self, weight: Tensor, bias: Tensor | None, *, is_gated: bool = False) -> Linear:
        step = weight.abs().amax(dim=1, keepdim=True) / self._largest
        return super().make((weight / step).round() * step, bias, is_gated=is_gated)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "qk_norm": True, "qkv_bias": False},
        {"moe": EXPERTS},
    ],
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

    native, reference = NativeKernels(), OneByOne()
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


def bundled_logits(
    texts: list[Tensor], method: LinearMethod | None, kv_dtype: torch.dtype | None = None
) -> Tensor:
    """Return the logits in bfloat16 after each token, the last of each text as decodes."""
    kernels = ReferenceKernels() if kv_dtype is torch.uint8 else NativeKernels()
    loaded = load_tiny(BUNDLED_MODEL_DIR, torch.bfloat16, kernels, method=method)
    loaded = replace(loaded, kv_dtype=kv_dtype, num_generated=8)
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

    def differs(
        method: LinearMethod | None, kv_dtype: torch.dtype | None = None
    ) -> tuple[float, float]:
        """Return the share of other tokens and the mean divergence."""
        logits = bundled_logits(texts, method, kv_dtype)
        report = compare(plain, logits, torch.bfloat16)
        probabilities = plain.log_softmax(-1)
        divergence = (probabilities.exp() * (probabilities - logits.log_softmax(-1))).sum(-1)
        return report.num_different / report.num_positions, float(divergence.mean())

    found = {
        "int8": differs(Int8Method(kernels)),
        "w8a8": differs(RoundingPromptsMethod(kernels)),
        "int4": differs(Int4Method(kernels)),
        "fp8": differs(Fp8Method(kernels)),
        "int8 KV": differs(None, torch.int8),
        "fp8 KV": differs(None, torch.uint8),
    }
    assert found["w8a8"][1] > found["int8"][1], "rounding of prompts is to be seen"
    for name, (share, divergence) in found.items():
        assert share <= LARGEST_SHARE[name], name
        assert divergence <= LARGEST_DIVERGENCE[name], name
    for name, largest in (("int8", 7), ("int4", 3)):
        _, coarse = differs(CoarseMethod(kernels, largest))
        assert coarse > 2 * LARGEST_DIVERGENCE[name], "fewer bits would have been noticed"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_of_8_bit_floating_point_is_torchs_own(dtype: torch.dtype) -> None:
    """As GPUs have it, by numbers that are rounded on both sides; rows of nothing stay so."""
    torch.manual_seed(3)
    x, weight, bias = torch.randn(9, 96).to(dtype), torch.randn(64, 96).to(dtype), torch.randn(64)
    x[2], x[5, 3], weight[7] = 0.0, torch.nan, 0.0
    linear = RoundingLinear(NativeKernels(), weight, bias.to(dtype), is_gated=False)
    found = linear.apply(x).float()
    (values, of_rows), (own, of_outputs) = rounded_to_fp8(x), rounded_to_fp8(weight)
    truth = torch._scaled_mm(
        values,
        own.T,
        bias=bias.bfloat16(),
        scale_a=of_rows,
        scale_b=of_outputs.T.contiguous(),
        out_dtype=torch.bfloat16,
    ).float()
    is_good = torch.arange(9) != 5
    assert found[5].isnan().all() and found[is_good].isfinite().all()
    torch.testing.assert_close(found[is_good], truth[is_good], rtol=2e-2, atol=2e-2)
    exact = x.float() @ weight.float().T + bias
    lost = (found - exact)[is_good].norm() / exact[is_good].norm()
    assert 0.01 < lost < 0.05, "rounding of three bits is to be seen"


def test_8_bit_floating_point_where_it_is_not() -> None:
    checks.check_fp8((8, 9))
    with pytest.raises(ConfigError, match=r"compute capability 8.9 or newer, got 8.0: --quant"):
        checks.check_fp8((8, 0))
    with pytest.raises(ConfigError, match="--quantization fp8 needs the native core for CPUs"):
        linear_method("fp8", ReferenceKernels(), torch.bfloat16)


def test_a_tied_embedding_is_kept_once() -> None:
    kernels = NativeKernels()
    for method in (UnquantizedMethod(kernels), Int8Method(kernels), Int4Method(kernels)):
        model = random_model(kernels, tiny_config(tie_word_embeddings=True), method=method)
        assert model._embedding._weight.tensor.nbytes == 0
    untied = random_model(kernels, tiny_config(tie_word_embeddings=False))
    assert untied._embedding._weight.tensor.nbytes > 0
    plain = random_model(TorchKernels(), tiny_config(tie_word_embeddings=True))
    assert plain._embedding._weight.tensor.nbytes > 0, "torch's packed weights cannot be read"


def test_4_bit_weights_are_held_in_less_than_5() -> None:
    kernels = NativeKernels()
    weight = kernels.quantize_groups(torch.randn(64, 640), Int4Method.GROUP_SIZE)
    assert sum(part.nbytes for part in weight[:3]) * 8 == 4.75 * 64 * 640
    output = Int4Method(kernels).make(torch.randn(64, 640), None)
    assert type(output) is WeightLinear and type(output.weight) is Int8Weight, (
        "the output layer decides between tokens"
    )


def test_weights_that_4_bits_cannot_hold_are_refused() -> None:
    kernels = NativeKernels()

    class Reader:
        dtype, device = torch.bfloat16, torch.device("cpu")

        def has(self, name: str) -> bool:
            return True

        def read_into(self, target: Tensor, name: str, **_: object) -> None:
            target.fill_(3e6)

    shard = ModuleShard(name="model.q", rows=Part(0, 8), columns=Part(0, 64), has_bias=False)
    with pytest.raises(ModelLoadError, match=r"model\.q: numbers as large as 3e\+06 are beyond"):
        Int4Method(kernels).create(Reader(), [shard])


def config_of(quantization: str = "int8", **changes: object) -> ServeConfig:
    return ServeConfig(
        model=str(BUNDLED_MODEL_DIR),
        quantization=quantization,
        kv_memory="1MiB",
        max_num_seqs=4,
        max_model_len=64,
        max_num_batched_tokens=64,
        **changes,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("int8", Int8Method),
        ("w8a8", RoundingPromptsMethod),
        ("int4", Int4Method),
        ("fp8", Fp8Method),
    ],
)
def test_a_worker_starts_with_it(
    name: str, method: type[LinearMethod], caplog: pytest.LogCaptureFixture
) -> None:
    def load(path: Path, *arguments: object, **options: object) -> object:
        assert type(options["method"]) is method
        return build.load_model(path, *arguments, **options)  # type: ignore[arg-type]

    with caplog.at_level("INFO"):
        build_runner(config_of(name), load=load)  # type: ignore[arg-type]
    assert f"bfloat16 with {name} weights, native kernels on cpu" in caplog.text
    is_warned = "on a CPU saves neither memory nor time: weights are held as bf" in caplog.text
    assert is_warned == (name == "fp8")


def test_a_worker_keeps_its_kv_in_8_bits(caplog: pytest.LogCaptureFixture) -> None:
    """Twice the slots but for the factors; copies to the host are of the same bytes."""
    with caplog.at_level("INFO"):
        plain, small = (
            build_runner(
                config_of("none", kv_dtype=name, host_kv_memory="512KiB", prefix_host_memory="0")
            )
            for name in ("auto", "int8")
        )
    assert "bfloat16 and int8 KV, native kernels on cpu" in caplog.text
    assert plain.pool.bytes_per_token == 4 * 2 * 4 * 32 * 2
    assert small.pool.bytes_per_token == 4 * 2 * 4 * (32 + 4)
    for runner in (plain, small):
        assert runner.pool.num_slots == 2**20 // runner.pool.bytes_per_token
        assert runner.host_pool.num_slots == 2**19 // runner.pool.bytes_per_token


def test_a_worker_keeps_its_kv_in_8_bits_of_floating_point(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The reference has it on CPUs; a GPU's heads are whole words."""
    with caplog.at_level("INFO"):
        small = build_runner(config_of("none", kv_dtype="fp8", attention_backend="reference"))
    assert "bfloat16 and fp8 KV, reference kernels on cpu" in caplog.text
    assert small.pool.bytes_per_token == 4 * 2 * 4 * (32 + 4)
    assert small.pool.k[0].dtype is torch.uint8
    config = load_model_config(BUNDLED_MODEL_DIR)
    layout = kv_layout(config, tp_size=1, dtype="fp8", is_on_gpu=True)
    assert layout.bytes_per_token == 4 * 2 * 4 * 40


def test_heads_that_no_factor_fits_behind_are_refused() -> None:
    """A float32 behind a head of a GPU's pool must have an address of its own size."""
    model = replace(load_model_config(BUNDLED_MODEL_DIR), head_dim=18)
    config = config_of("none", kv_dtype="fp8")
    with pytest.raises(ConfigError, match="fp8 on a GPU needs heads of a multiple of 4 numbers, g"):
        checks.check_options(config, model, TritonKernels(), torch.device("cuda"))
    checks.check_options(config, model, ReferenceKernels(), torch.device("cpu"))


def test_wrong_8_bit_kv_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = NativeKernels.rotate_and_write

    def swapped(self: NativeKernels, *inputs: Tensor, **others: Any) -> Tensor:
        q = rotate(self, *inputs, **others)
        if others["k_pool"].dtype is torch.int8:
            others["v_pool"].neg_()
        return q

    monkeypatch.setattr(NativeKernels, "rotate_and_write", swapped)
    with pytest.raises(StartupError, match=r"written values of .* --kv-dtype auto does without"):
        build_runner(config_of("none", kv_dtype="int8"))


def test_8_bit_kv_of_other_kernels_and_types_is_refused() -> None:
    config = ServeConfig(kv_dtype="int8")
    with pytest.raises(ConfigError, match="--kv-dtype int8 needs the native core for CPUs"):
        checks.kv_dtype(config, TorchKernels(), "bfloat16")
    with pytest.raises(ConfigError, match="fp8 needs a GPU, got native kernels on a CPU: --kv-dty"):
        checks.kv_dtype(ServeConfig(kv_dtype="fp8"), NativeKernels(), "bfloat16")
    assert checks.kv_dtype(ServeConfig(kv_dtype="fp8"), TritonKernels(), "float16") == "fp8"
    with pytest.raises(ConfigError, match="--kv-dtype int8 needs --dtype bfloat16 or float32: the"):
        checks.kv_dtype(config, NativeKernels(), "float16")
    assert checks.kv_dtype(ServeConfig(), ReferenceKernels(), "float16") == "float16"


def test_a_worker_without_the_core_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "make_kernels", lambda *_, **__: TorchKernels())
    monkeypatch.setattr(checks, "missing_core", lambda: "it was not built")
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


def test_rounded_prompts_where_they_are_not() -> None:
    with pytest.raises(ConfigError, match="w8a8 needs --dtype bfloat16, got float32"):
        linear_method("w8a8", NativeKernels(), torch.float32)
    with pytest.raises(ConfigError, match="w8a8 needs a CPU with AVX512-VNNI and AVX512-bf16"):
        linear_method("w8a8", NativeKernels(level=Level.AVX512), torch.bfloat16)
    with pytest.raises(ConfigError, match="needs the native core for CPUs, got reference kernels"):
        linear_method("w8a8", ReferenceKernels(), torch.bfloat16)
    for changes, words in (
        ({"device": "cuda"}, "needs --device auto or cpu, got 'cuda'"),
        ({"attention_backend": "triton"}, "needs --attention-backend auto, got 'triton'"),
        ({"batch_invariant": True}, "cannot be had with --batch-invariant"),
    ):
        with pytest.raises(ConfigError, match=f"--quantization w8a8 {words}"):
            ServeConfig(quantization="w8a8", **changes)  # type: ignore[arg-type]


def test_only_tokens_of_prompts_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However their prompt is cut, beside whichever others, and also when they are computed anew;
    and in the last layer none is."""
    seen, begin = list[list[int]](), RoundingPromptsMethod.begin_pass
    monkeypatch.setattr(
        RoundingPromptsMethod,
        "begin_pass",
        lambda self, batch: (seen.append(batch.prompt_runs().tolist()), begin(self, batch))[1],
    )
    runner = build_runner(config_of("w8a8"))
    monkeypatch.setattr(runner._model._passes, "_kernels", None)
    seen.clear()
    tokens = [TokenSegment(token_ids=pack_int32(range(20, 50)))]
    sequences = [
        AddSequence(RowId(row), tokens, SamplingParams(), num_prompt, [])
        for row, num_prompt in enumerate((25, 30, 1))
    ]
    rounds = {
        name: linear.weight.prompts is not None
        for name, linear in (
            ("first", runner._model._layers[0]._attention._out.linear),
            ("its queries", runner._model._layers[0]._attention._qkv.linear),
            ("last", runner._model._layers[-1]._attention._out.linear),
            ("output", runner._model._lm_head._linear),
        )
    }
    assert rounds == {"first": True, "its queries": False, "last": False, "output": False}
    for number, (plan, runs) in enumerate(
        (
            ([(0, 0, 10), (1, 0, 30), (2, 0, 1)], [41, 1, 0, 41]),
            ([(0, 10, 20)], [20, 1, 0, 15]),
            ([(2, 1, 20), (1, 29, 1), (0, 24, 6)], [27, 1, 20, 22]),
            ([(0, 29, 1), (2, 29, 1)], [0, 0]),
        )
    ):
        runner.execute(
            StepPlan(
                step_id=StepId(number),
                sequences=[] if number else sequences,
                slot_ranges=[]
                if number
                else [
                    SlotRange(RowId(row), 0, pack_int32(range(40 * row, 40 * row + 31)))
                    for row in range(3)
                ],
                rows=[PlanRow(RowId(row), at, n, OutputKind.SAMPLE) for row, at, n in plan],
            )
        )
        assert seen == [runs]
        seen.clear()


@pytest.mark.parametrize(("name", "kind"), [("int8", Int8Weight), ("int4", GroupedWeight)])
def test_a_wrong_product_ends_the_start(
    name: str, kind: type[Weight], monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply = NativeKernels.linear

    def swapped(
        self: NativeKernels, x: Tensor, weight: Weight, *others: Any, **options: Any
    ) -> Tensor:
        result = multiply(self, x, weight, *others, **options)
        return result.flip(1) if isinstance(weight, kind) else result

    monkeypatch.setattr(NativeKernels, "linear", swapped)
    with pytest.raises(StartupError, match=rf"{name} linear \(qkv\) .* --quantization none"):
        build_runner(config_of(name))
