"""Vectors of prompts: encoders and decoders against transformers, at the level of the runner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.grids import every_value
from support.tiny_encoders import (
    TINY_ENCODERS,
    VOCAB_SIZE,
    TinyEncoder,
    reference_vectors,
    write_pooling,
    write_tiny_encoder,
    write_tokenizer,
)
from support.tiny_models import find_tiny_model, load_reference, write_tiny_model
from torch.nn import functional

from lightserve.config import ServeConfig
from lightserve.kernels.select import missing_core
from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.messages.router_worker import (
    AddSequence,
    OutputKind,
    PlanRow,
    SlotRange,
    StepPlan,
    row_results,
)
from lightserve.models import encoder
from lightserve.models.config import load_model_config
from lightserve.models.encoder import groups_of
from lightserve.types import RequestOutput, RowId, SamplingParams, StepId
from lightserve.worker.build import build_runner
from lightserve.worker.model_runner import ModelRunner

PROMPTS = [[2, *range(4, 4 + n), 3] for n in (1, 7, 20, 3, 38)]
BACKENDS = ("reference", "torch", *(() if missing_core() else ("auto",)))
BF16_COSINE = 0.999


def runner_of(path: Path, backend: str = "torch", **options: object) -> ModelRunner:
    config = ServeConfig(
        model=str(path),
        attention_backend=backend,
        max_num_seqs=8,
        max_kv_tokens=512,
        num_threads=1,
        device="cpu",
        **options,  # type: ignore[arg-type]
    )
    return build_runner(config)


def plan_of(
    prompts: Sequence[Sequence[int]],
    output: RequestOutput,
    *,
    step: int = 0,
    start: int = 0,
    end: int | None = None,
    wanted: Sequence[bool] | None = None,
) -> StepPlan:
    """Return a step that computes positions [start, end) of each prompt, the ends sampled."""
    rows, ranges, sequences, slot = [], [], [], 0
    for number, prompt in enumerate(prompts):
        stop = len(prompt) if end is None else min(end, len(prompt))
        row = RowId(number)
        if step == 0:
            is_wanted = wanted is None or wanted[number]
            sequences.append(
                AddSequence(
                    row,
                    [TokenSegment(token_ids=pack_int32(prompt))],
                    SamplingParams(temperature=0.0),
                    len(prompt),
                    [],
                    output=output if is_wanted else RequestOutput.TOKENS,
                )
            )
        slots = range(slot, slot + len(prompt))
        slot += len(prompt)
        if start >= stop:
            continue
        ranges.append(SlotRange(row, start, pack_int32(list(slots[start:stop]))))
        kind = OutputKind.SAMPLE if stop == len(prompt) else OutputKind.NONE
        rows.append(PlanRow(row, start, stop - start, kind))
    return StepPlan(step_id=StepId(step), sequences=sequences, slot_ranges=ranges, rows=rows)


def vectors_of(runner: ModelRunner, plan: StepPlan) -> dict[int, npt.NDArray[np.float32]]:
    results = row_results(plan, runner.execute(plan))
    return {int(r.row): np.frombuffer(r.vector, dtype=np.float32) for r in results if r.vector}


def whole(runner: ModelRunner, prompts: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
    found = vectors_of(runner, plan_of(prompts, RequestOutput.WHOLE_VECTOR))
    return [found[number] for number in range(len(prompts))]


@pytest.mark.parametrize(
    ("tiny", "backend"),
    every_value(TINY_ENCODERS, BACKENDS),
    ids=lambda value: value.name if isinstance(value, TinyEncoder) else value,
)
def test_encoders_make_the_vectors_of_transformers(
    tiny: TinyEncoder, backend: str, tmp_path: Path
) -> None:
    write_tiny_encoder(tiny, tmp_path)
    expected = reference_vectors(tmp_path, PROMPTS, tiny.pooling, family=tiny.family)
    found = whole(runner_of(tmp_path, backend, dtype="float32"), PROMPTS)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.allclose(ours, theirs.numpy(), atol=2e-6), np.abs(ours - theirs.numpy()).max()
    rounded = whole(runner_of(tmp_path, backend, dtype="bfloat16"), PROMPTS)
    for ours, theirs in zip(rounded, expected, strict=True):
        assert float(ours @ theirs.numpy()) > BF16_COSINE
    swapped = [[prompt[0], *prompt[-2:0:-1], prompt[-1]] for prompt in PROMPTS[1:]]
    others = whole(runner_of(tmp_path, backend, dtype="float32"), swapped)
    for ours, theirs in zip(others, expected[1:], strict=True):  # positions count
        assert np.abs(ours - theirs.numpy()).max() > 1e-4


@pytest.mark.parametrize(("share", "calls"), [(1.0, 5), (0.75, 3)])
def test_prompts_of_about_one_length_are_attended_together(
    share: float, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a CPU and as on a GPU: calls of a layer for seven prompts, one each before."""
    tiny = TINY_ENCODERS[0]
    write_tiny_encoder(tiny, tmp_path)
    prompts = [[2, *range(4 + i, 4 + i + n), 3] for i, n in enumerate((7, 20, 3, 20, 18, 17, 7))]
    expected = reference_vectors(tmp_path, prompts, tiny.pooling, family=tiny.family)
    counted = Mock(side_effect=functional.scaled_dot_product_attention)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    monkeypatch.setattr(encoder, "groups_of", lambda batch, _: groups_of(batch, share))
    runner = runner_of(tmp_path, dtype="float32")
    counted.reset_mock()
    for ours, theirs in zip(whole(runner, prompts), expected, strict=True):
        assert np.allclose(ours, theirs.numpy(), atol=2e-6)
    assert counted.call_count == calls * load_model_config(tmp_path).num_layers


@pytest.mark.parametrize("name", ["bert", "nomic"])
def test_a_vector_does_not_depend_on_what_is_beside_it(name: str, tmp_path: Path) -> None:
    tiny = next(each for each in TINY_ENCODERS if each.name == name)
    write_tiny_encoder(tiny, tmp_path)
    runner = runner_of(tmp_path, BACKENDS[-1], batch_invariant=True)
    prompts = [*PROMPTS, [2, *range(30, 50), 3], [2, 9, 8, 7, 3]]  # two of one length
    together = whole(runner, prompts)
    for prompt, vector in zip(prompts, together, strict=True):
        (alone,) = whole(runner, [prompt])
        assert (alone == vector).all()


@pytest.mark.skipif(bool(missing_core()), reason="needs the native core")
def test_encoders_have_weights_of_eight_bits(tmp_path: Path) -> None:
    tiny = TINY_ENCODERS[0]
    write_tiny_encoder(tiny, tmp_path)
    expected = reference_vectors(tmp_path, PROMPTS, tiny.pooling, family=tiny.family)
    found = whole(runner_of(tmp_path, "auto", dtype="float32", quantization="int8"), PROMPTS)
    for ours, theirs in zip(found, expected, strict=True):
        assert 0.99 < float(ours @ theirs.numpy()) < 1.0 - 1e-9


DECODER_PROMPTS = [[5, 9, 11], [7], list(range(20, 90))]


def expected_of_decoder(path: Path) -> list[npt.NDArray[np.float32]]:
    model = load_reference(path, torch.float32)
    found = []
    for prompt in DECODER_PROMPTS:
        with torch.no_grad():
            states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        vector = torch.nn.functional.normalize(states[-1][0, -1], dim=0)
        found.append(vector.numpy())
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_decoders_give_the_last_token_s_vector_in_chunks_and_beside_others(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(find_tiny_model("qwen3"), tmp_path, dtype=torch.float32)
    expected = expected_of_decoder(tmp_path)
    runner = runner_of(tmp_path, backend, pooling="last", dtype="float32")
    in_one = vectors_of(runner, plan_of(DECODER_PROMPTS, RequestOutput.VECTOR))
    chunks: dict[int, npt.NDArray[np.float32]] = {}
    for step, start in enumerate(range(0, 90, 30)):
        plan = plan_of(
            DECODER_PROMPTS, RequestOutput.VECTOR, step=step, start=start, end=start + 30
        )
        chunks |= vectors_of(runner, plan)
    beside = plan_of(DECODER_PROMPTS, RequestOutput.VECTOR, wanted=[True, False, True])
    logits = Mock(side_effect=runner._model.logits)
    monkeypatch.setattr(runner._model, "logits", logits)
    results = {int(r.row): r for r in row_results(beside, runner.execute(beside))}
    for number, theirs in enumerate(expected):
        assert np.allclose(in_one[number], theirs, atol=2e-6)
        assert np.allclose(chunks[number], theirs, atol=2e-6)
    assert not results[1].vector
    model = load_reference(tmp_path, torch.float32)
    best = model(torch.tensor([DECODER_PROMPTS[1]])).logits[0, -1].argmax()
    assert list(results[1].token_ids) == [int(best)]
    assert [len(call.args[0]) for call in logits.call_args_list] == [1], "none for vectors"
    assert np.allclose(np.frombuffer(results[2].vector, np.float32), expected[2], atol=2e-6)


@pytest.mark.parametrize("has_prefix", [True, False])
def test_a_decoder_that_was_saved_without_its_head(has_prefix: bool, tmp_path: Path) -> None:
    write_tiny_model(find_tiny_model("qwen3"), tmp_path, dtype=torch.float32)
    expected = expected_of_decoder(tmp_path)
    model = load_reference(tmp_path, torch.float32)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    (model if has_prefix else model.model).save_pretrained(tmp_path)
    write_pooling(tmp_path, "lasttoken")
    runner = runner_of(tmp_path, dtype="float32")
    found = vectors_of(runner, plan_of(DECODER_PROMPTS, RequestOutput.VECTOR))
    for number, theirs in enumerate(expected):
        assert np.allclose(found[number], theirs, atol=2e-6)


def test_the_tokenizer_of_these_tests_has_the_models_vocabulary(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert max(max(prompt) for prompt in PROMPTS) < VOCAB_SIZE
