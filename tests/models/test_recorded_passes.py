"""Passes that are recorded and run in one call: to the bit what one operation at a time gives."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.grids import every_value
from support.model_runs import CONTEXT_LEN, LoadedModel, load_tiny
from support.parity import Chunk, TokenSequence
from support.random_model import random_model, tiny_config
from support.tiny_models import find_tiny_model, write_tiny_model
from torch import Tensor

from lightserve.kernels.cpu.native import InvariantNativeKernels, NativeKernels
from lightserve.kernels.interface import NotRecordableError, PassInputs
from lightserve.kernels.select import make_kernels, missing_core
from lightserve.models.base import SingleRank
from lightserve.models.layers.linear import LinearMethod
from lightserve.models.layers.quantized import Int4Method, Int8Method, RoundingPromptsMethod

pytestmark = pytest.mark.skipif(bool(missing_core()), reason=missing_core())

LENGTHS = (23, 40, 9, 1, 17)
RECORDED = (
    *("llama-mqa-tied", "llama-llama3", "mistral-full", "qwen2", "qwen3", "phi3", "smollm3"),
    *("glm", "gemma", "gemma2", "gemma3", "granite", "olmo2", "gpt-neox", "opt", "falcon"),
    *("mixtral", "qwen3-moe", "olmoe", "glm4-moe"),
)
LEFT = ("qwen2-moe", "ministral3", "deepseek-v2", "gemma4", "falcon-h1", "nemotron-h")
"""Their layers ask torch for something."""


def one_by_one(model: LoadedModel) -> LoadedModel:
    """Have the model run without a recording."""
    model.model._passes._kernels = None
    return model


def tokens_of(model: LoadedModel) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(1)
    return [
        TokenSequence(
            torch.randint(0, model.config.vocab_size, (n,), generator=generator), torch.empty(0)
        )
        for n in LENGTHS
    ]


@torch.inference_mode()
def everything(model: LoadedModel) -> list[Tensor]:
    """Return what prompts in chunks beside decodes, and decodes alone, give; and all KV."""
    sequences = tokens_of(model)
    driver = model.driver(sequences)
    half = [Chunk(row, 0, n - n // 2) for row, n in enumerate(LENGTHS)]
    most = [Chunk(row, n - n // 2, n // 2 - 2) for row, n in enumerate(LENGTHS) if n > 5]
    mixed = [most[0], Chunk(1, 20, 1), Chunk(2, 5, 2)]
    decodes = [Chunk(0, 21, 1), Chunk(1, 21, 1), Chunk(2, 7, 1)]
    results = []
    for chunks, wanted in (
        (half, [23, 11, 4]),
        (mixed, None),
        (decodes, [0, 1, 2]),
        ([Chunk(4, 9, 1)], [0]),
        ([Chunk(4, 10, 3)], []),
    ):
        ids = torch.cat([sequences[c.row].tokens[c.start : c.start + c.num_tokens] for c in chunks])
        rows = None if wanted is None else torch.tensor(wanted, dtype=torch.int64)
        hidden = model.model.hidden(ids, driver.batch(chunks), driver.pool, rows)
        if wanted != []:  # without any, what comes back is of no width that counts
            results.append(hidden.clone())
    return [*results, *driver.pool.k, *driver.pool.v]


def are_same(a: list[Tensor], b: list[Tensor]) -> bool:
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.int8: torch.int8}
    return all(
        torch.equal(x.view(bits[x.dtype]), y.view(bits[y.dtype])) for x, y in zip(a, b, strict=True)
    )


def was_recorded(model: LoadedModel) -> bool:
    return len(model.model._passes._recorded) == 2


@pytest.mark.parametrize(("name", "dtype"), every_value(RECORDED, [torch.bfloat16, torch.float32]))
def test_families(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    write_tiny_model(find_tiny_model(name), tmp_path, dtype=dtype)
    kernels = make_kernels("native", batch_invariant=False)
    model = load_tiny(tmp_path, dtype, kernels)
    recorded = everything(model)
    assert was_recorded(model)
    assert are_same(recorded, everything(one_by_one(load_tiny(tmp_path, dtype, kernels))))
    assert not are_same(recorded, [part + 1 for part in recorded])


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_recorded_is_said(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_model(find_tiny_model(name), tmp_path, dtype=torch.float32)
    model = load_tiny(tmp_path, torch.float32, make_kernels("native", batch_invariant=False))
    with caplog.at_level(logging.INFO):
        everything(model)
    assert not was_recorded(model)
    assert caplog.text.count("one operation at a time, which takes longer: they ") == 1


@torch.inference_mode()
def test_one_kind_that_cannot_be_recorded_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(find_tiny_model("llama-mqa-tied"), tmp_path, dtype=torch.float32)
    model = load_tiny(tmp_path, torch.float32, make_kernels("native", batch_invariant=False))
    passes = model.model._passes
    assert passes._kernels is not None
    record = passes._kernels.record

    def refuse_all_wanted(layers: object, inputs: PassInputs, ranks: object) -> object:
        if inputs.logit_rows is None:
            raise NotRecordableError("they ask for all")
        return record(layers, inputs, ranks)

    monkeypatch.setattr(passes._kernels, "record", refuse_all_wanted)
    everything(model)
    assert len(passes._recorded) == 1


def random(
    *, method: Callable[[NativeKernels], LinearMethod] | None = None, invariant: bool = False
) -> LoadedModel:
    kernels = InvariantNativeKernels() if invariant else NativeKernels()
    config = tiny_config(sliding_windows=(None, 8))
    dtype = torch.float32 if invariant else torch.bfloat16
    # With kernels of its own, whose calls have to be noted as well.
    own = None if method is None else method(NativeKernels())
    model = random_model(kernels, config, context_len=CONTEXT_LEN, dtype=dtype, method=own)
    return LoadedModel(model, config, dtype, num_kv_heads=2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: random(method=Int8Method),
        lambda: random(method=Int4Method),
        lambda: dataclasses.replace(random(method=RoundingPromptsMethod), num_generated=8),
        lambda: random(invariant=True),
        lambda: dataclasses.replace(random(), kv_dtype=torch.int8),
    ],
    ids=["int8", "int4", "w8a8", "invariant", "kv-int8"],
)
def test_options(make: Callable[[], LoadedModel]) -> None:
    model = make()
    recorded = everything(model)
    assert was_recorded(model)
    assert are_same(recorded, everything(one_by_one(make())))


class Doubling(SingleRank):
    """One of two ranks, which have the same results."""

    size = 2

    def __init__(self, *, in_place: bool) -> None:
        self.in_place = in_place
        self.num_sums = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_sums += 1
        return x.mul_(2.0) if self.in_place else x * 2.0


@pytest.mark.parametrize("in_place", [True, False])
def test_sums_over_ranks_stand_between_calls(*, in_place: bool) -> None:
    def of_two(*, is_recorded: bool) -> tuple[list[Tensor], int]:
        ranks = Doubling(in_place=in_place)
        config = tiny_config(sliding_windows=(None, 8))
        built = random_model(NativeKernels(), config, context_len=CONTEXT_LEN, tp=ranks)
        model = LoadedModel(built, config, torch.float32, num_kv_heads=1)
        results = everything(model if is_recorded else one_by_one(model))
        assert was_recorded(model) == is_recorded
        assert "all_reduce" not in vars(ranks)
        return results, ranks.num_sums

    recorded, num_sums = of_two(is_recorded=True)
    expected, expected_sums = of_two(is_recorded=False)
    assert are_same(recorded, expected)
    # Five passes of two layers, and their embeddings'; that which wants none ends in the last.
    assert num_sums == expected_sums == 5 * (1 + 2 * 2) - 2


def test_threads_are_those_of_the_pass() -> None:
    model = random()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = everything(model)
        torch.set_num_threads(3)
        assert are_same(first, everything(model))
    finally:
        torch.set_num_threads(before)


def inputs_of(slot: int = 0, wanted: int = 0) -> PassInputs:
    model = random()
    batch = model.driver(tokens_of(model)).batch([Chunk(1, 0, 3)])
    batch = dataclasses.replace(batch, slot_mapping=torch.tensor([0, 1, slot]))
    tables = (torch.ones(3, 8), torch.zeros(3, 8))
    return PassInputs(torch.ones(3, 64), batch, tables, torch.tensor([wanted]))


def layers_of(kernels: NativeKernels) -> Callable[[PassInputs], Tensor]:
    """Return a layer of one product, the KV of it, and one row of that."""
    weight = kernels.pack_weight(torch.randn(48, 64))
    pool = torch.zeros(10, 1, 16)

    def layers(inputs: PassInputs) -> Tensor:
        q, k, v = kernels.linear(inputs.x, weight, None).split_with_sizes((16, 16, 16), dim=-1)
        q, k, v = (part.view(len(inputs.x), 1, 16) for part in (q, k, v))
        q = kernels.rotate_and_write(
            *(q, k, v),
            cos=inputs.tables[0],
            sin=inputs.tables[1],
            k_pool=pool,
            v_pool=pool,
            slot_mapping=inputs.batch.slot_mapping,
            qk_norm=None,
        )
        heads = kernels.attention(q, pool, pool, inputs.batch, scale=1.0, sliding_window=None)
        assert inputs.logit_rows is not None
        return heads.reshape(len(heads), 16).index_select(0, inputs.logit_rows)

    return layers


@pytest.mark.parametrize("wrong", [{"slot": 10}, {"slot": -1}, {"wanted": 3}, {"wanted": -1}])
def test_places_beyond_the_end_are_refused(wrong: dict[str, int]) -> None:
    kernels = NativeKernels()
    run = kernels.record(layers_of(kernels), inputs_of())
    with torch.inference_mode():
        run(inputs_of())
        with pytest.raises(IndexError):
            run(inputs_of(**wrong))


def test_layers_that_look_at_the_number_of_rows_are_not_recorded() -> None:
    kernels = NativeKernels()
    few, many = kernels.pack_weight(torch.randn(8, 64)), kernels.pack_weight(torch.randn(8, 64))

    def layers(inputs: PassInputs) -> Tensor:
        return kernels.linear(inputs.x, many if len(inputs.x) > 50 else few, None)

    with pytest.raises(NotRecordableError, match="depend on the number of rows"):
        kernels.record(layers, inputs_of())


@pytest.mark.parametrize(
    "layers",
    [
        lambda inputs: inputs.x + 1,
        lambda inputs: inputs.x * inputs.x[:1],
        lambda inputs: torch.add(inputs.x, inputs.x, alpha=2.0),
        lambda inputs: inputs.x.mul_(inputs.x.float()).float(),
        lambda inputs: inputs.x.t().reshape(-1, 64),
        lambda inputs: inputs.x,
        lambda inputs: inputs.x.new_empty(7, 64),
        lambda inputs: inputs.x.index_select(0, inputs.batch.rows),
        lambda inputs: inputs.x.new_empty(len(inputs.x), 64)[1:],
    ],
    ids=["sum", "broadcast", "alpha", "type", "copy", "input", "other rows", "look-up", "part"],
)
def test_other_layers_are_not_recorded(layers: Callable[[PassInputs], Tensor]) -> None:
    with pytest.raises(NotRecordableError):
        NativeKernels().record(layers, inputs_of())
