"""Parity at the level of the model: every family against transformers, with teeth."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.grids import choose, every_value, long_but, long_unless
from support.model_runs import NUM_DECODES, LoadedModel, load_tiny, standard_sequences
from support.parity import (
    FP32_LOGPROB,
    ParityReport,
    TokenSequence,
    compare,
    compare_all,
    logits_of,
    run_sequences,
    schedule,
)
from support.tiny_models import (
    TINY_MODELS,
    TinyModel,
    find_tiny_model,
    load_reference,
    write_tiny_model,
)
from torch import Tensor

from lightserve.kernels.select import make_kernels, missing_core
from lightserve.models.decoder import DecoderModel

KERNELS = ("reference", "torch", *(() if missing_core() else ("native",)))
BF16_LOGPROB = 0.3
"""No contract, but several times what is measured: a gross error would exceed it."""
REROUTED_SHARE = 0.01
"""Of positions whose token went to another expert for its rounding: 0.4 % are measured."""


@dataclass(frozen=True)
class Prepared:
    """A model directory, lightserve's model and the reference's sequences."""

    tiny: TinyModel
    path: Path
    kernels: str
    loaded: LoadedModel
    sequences: list[TokenSequence]

    def run(self, *, chunk: int | None) -> list[Tensor]:
        """Logits of all sequences, in common passes."""
        lengths = [len(sequence.tokens) for sequence in self.sequences]
        passes = schedule(lengths, chunk=chunk, num_decodes=NUM_DECODES)
        logits = self.loaded.run(self.sequences, passes)
        assert logits is not None
        return logits

    def report(self, *, chunk: int | None, alone: bool) -> ParityReport:
        chosen = dataclasses.replace(self, sequences=self.sequences[:1]) if alone else self
        return compare_all(chosen.sequences, chosen.run(chunk=chunk), self.loaded.dtype)


def prepare(tiny: TinyModel, path: Path, dtype: torch.dtype, kernels: str) -> Prepared:
    write_tiny_model(tiny, path, dtype=dtype)
    loaded = load_tiny(path, dtype, make_kernels(kernels, batch_invariant=False))
    sequences = standard_sequences(load_reference(path, torch.float32))
    return Prepared(tiny, path, kernels, loaded, sequences)


def case_name(case: tuple[TinyModel, str]) -> str:
    return f"{case[0].name}-{case[1]}"


CASES = list(itertools.product(TINY_MODELS, KERNELS))
OWN_ROUNDING = {"qwen3-next": 2.6e-4}
"""Limits where transformers' own float32 is not within FP32_LOGPROB of float64: it differs by
1.2e-4 on Zen 4, and ours by 0.8e-4 (torch), 1.0e-4 (native) and 1.4e-4 (reference)."""
QUICK = [(tiny, KERNELS[i % len(KERNELS)]) for i, tiny in enumerate(TINY_MODELS)]
"""Each model on one kind of kernels."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, marks=long_unless(case in QUICK), id=case_name(case)) for case in CASES
    ],
)
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    tiny, kernels = request.param
    return prepare(tiny, tmp_path_factory.mktemp("tiny"), torch.float32, kernels)


@pytest.mark.parametrize(("chunk", "alone"), every_value([None, 16, 37], [False, True]))
def test_float32_keeps_n3(prepared: Prepared, chunk: int | None, alone: bool) -> None:
    report = prepared.report(chunk=chunk, alone=alone)
    assert report.num_positions >= 124
    limit = OWN_ROUNDING.get(prepared.tiny.name, FP32_LOGPROB)
    assert report.holds(torch.float32, logprob=limit), report


def swap_early_tokens(prepared: Prepared, count: int = 2) -> ParityReport:
    """Turn so many tokens round, at most six.

    Only positions behind them are compared, so context alone can show it.
    """
    sequence = prepared.sequences[0]
    tokens = sequence.tokens.clone()
    tokens[2 : 2 + count] = tokens[2 : 2 + count].flip(0)
    assert not torch.equal(tokens, sequence.tokens)
    passes = schedule([len(tokens)], chunk=None, num_decodes=NUM_DECODES)
    logits = run_sequences(prepared.loaded.driver([sequence]), [tokens], passes)
    assert logits is not None
    behind = slice(8, None)
    return compare(sequence.logits[behind], logits[0][behind], prepared.loaded.dtype)


def corrupt_one_slot(prepared: Prepared) -> ParityReport:
    """The key of one token is negated in one layer before the decodes, within any window."""
    sequence = prepared.sequences[0]
    length = len(sequence.tokens)
    driver = prepared.loaded.driver([sequence])
    slot = int(driver.req_to_slot[0, length - NUM_DECODES - 3])

    def corrupt(number: int) -> None:
        if number == 1:
            driver.pool.k[0][slot].neg_()

    passes = schedule([length], chunk=None, num_decodes=NUM_DECODES)
    logits = run_sequences(driver, [sequence.tokens], passes, before_pass=corrupt)
    assert logits is not None
    return compare_all([sequence], logits, torch.float32)


def other_rope_base(prepared: Prepared) -> ParityReport:
    rope = prepared.loaded.config.rope
    changed = dataclasses.replace(rope, theta=rope.theta * 1.05)
    return run_changed(prepared, rope=changed)


def other_window(prepared: Prepared) -> ParityReport:
    """Every window is one token shorter."""
    windows = prepared.loaded.config.sliding_windows
    return run_changed(
        prepared, sliding_windows=tuple(None if w is None else w - 1 for w in windows)
    )


def swapped_sinks(prepared: Prepared) -> ParityReport:
    """Each head has another's."""
    kernels = make_kernels(prepared.kernels, batch_invariant=False)
    loaded = load_tiny(prepared.path, torch.float32, kernels)
    assert isinstance(loaded.model, DecoderModel)
    for layer in loaded.model._layers:
        mod = layer._attention._score_mod
        assert mod is not None and mod.sinks is not None
        mod.sinks.copy_(mod.sinks.flip(0))
    return dataclasses.replace(prepared, loaded=loaded).report(chunk=None, alone=True)


def run_changed(prepared: Prepared, **changes: object) -> ParityReport:
    kernels = make_kernels(prepared.kernels, batch_invariant=False)
    loaded = load_tiny(prepared.path, torch.float32, kernels, **changes)
    return dataclasses.replace(prepared, loaded=loaded).report(chunk=None, alone=True)


def damages(prepared: Prepared) -> list[Callable[[Prepared], ParityReport]]:
    """Return what can be wrong in a model."""
    config, found = prepared.loaded.config, [swap_early_tokens, corrupt_one_slot]
    if len(config.unrotated_layers) < config.num_layers:
        found.append(other_rope_base)
    else:
        knows_no_place = config.position_offset is None and config.alibi_slopes is None
        assert not knows_no_place or config.recurrent is not None
    assert prepared.tiny.has_window or {*config.sliding_windows} == {None}
    if prepared.tiny.has_window:
        found.append(other_window)
    assert config.has_sinks == (prepared.tiny.family == "GptOss")
    if config.has_sinks:
        found.append(swapped_sinks)
    return found


def test_comparison_has_teeth(prepared: Prepared) -> None:
    found = damages(prepared)
    number = TINY_MODELS.index(prepared.tiny)
    for damage in found[choose(number % len(found), 0) :: choose(2, 1)]:
        report = damage(prepared)
        assert not report.holds(torch.float32), (damage, report)
        assert report.max_logprob_delta > 1e-3, damage


def accepted_in_bfloat16(report: ParityReport) -> bool:
    return report.holds(torch.bfloat16) and report.max_logprob_delta < BF16_LOGPROB


@pytest.mark.parametrize(
    ("tiny", "kernels"),
    long_but(
        CASES, [(tiny, KERNELS[(i + 1) % len(KERNELS)]) for i, tiny in enumerate(TINY_MODELS[::3])]
    ),
)
def test_bfloat16_keeps_n3(tiny: TinyModel, kernels: str, tmp_path: Path) -> None:
    prepared = prepare(tiny, tmp_path, torch.bfloat16, kernels)
    # Rounding stays in states: of 1,572 positions of one model here, 43 are excused and one differs
    # between transformers' bfloat16 and its float32; of Nemotron-H 46 and 8, as here.
    # Gemma 4's rounding as well: transformers' own has 4 that differ and 55 that are excused, here
    # 3 to 6 and 56 to 63.
    is_rough = prepared.loaded.config.recurrent is not None or tiny.family == "Gemma4"
    largest = 0.0
    for chunk, alone in ((None, True), (16, False)):
        report = prepared.report(chunk=chunk, alone=alone)
        largest = max(largest, report.max_logprob_delta)
        if is_rough:
            assert report.num_different <= max(1, 0.006 * report.num_positions), report
            assert report.num_excused <= 0.08 * report.num_positions, report
            continue
        if tiny.chooses_experts:
            assert report.num_different <= REROUTED_SHARE * report.num_positions, report
        else:
            assert accepted_in_bfloat16(report), report
        assert report.num_excused <= 0.05 * report.num_positions, report
    if tiny.chooses_experts or is_rough:
        return  # rounding sends tokens elsewhere, which hides more than a swap: float32 shows that
    # Gemma's noise on torch's kernels is near what two tokens change.
    damaged = swap_early_tokens(prepared, 6)
    assert damaged.max_logprob_delta > 2.0 * largest, (damaged, largest)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "name",
    [
        *(
            "llama-mha",
            "gemma",
            "gemma3",
            "gemma4",
            "qwen3-next",
            "qwen3.5",
            "olmo2",
            "olmo-hybrid",
        ),
        *("gpt-oss", "nemotron-h"),
    ],
)
def test_norms_and_embeddings_of_bfloat16_are_transformers(
    name: str, kernels: str, tmp_path: Path
) -> None:
    """Weights above one, products before rounding, and factors that are rounded themselves."""
    write_tiny_model(find_tiny_model(name), tmp_path, dtype=torch.bfloat16)
    reference = load_reference(tmp_path, torch.bfloat16)
    loaded = load_tiny(tmp_path, torch.bfloat16, make_kernels(kernels, batch_invariant=False))
    model = loaded.model
    assert isinstance(model, DecoderModel)
    tokens = torch.arange(3, 160)
    with torch.inference_mode():
        words = reference.get_input_embeddings()(tokens)
        assert torch.equal(model._embedding(tokens) * model._multiplier, words)
        norm = getattr(reference.model, "norm_f", None) or reference.model.norm
        differs = (model._norm(words) != norm(words)).float().mean()
    assert differs < 0.005, differs  # roots may differ in their last bit


def test_bfloat16_is_close_to_transformers_in_bfloat16(tmp_path: Path) -> None:
    """Both round, so a position in ten thousand may lie beyond four ulps."""
    prepared = prepare(find_tiny_model("qwen3"), tmp_path, torch.bfloat16, "torch")
    theirs = logits_of(load_reference(tmp_path, torch.bfloat16), prepared.sequences)
    total = ParityReport()
    for expected, actual in zip(theirs, prepared.run(chunk=37), strict=True):
        total += compare(expected, actual, torch.bfloat16)
    assert total.num_different <= 2, total
    assert total.max_logprob_delta < BF16_LOGPROB, total
