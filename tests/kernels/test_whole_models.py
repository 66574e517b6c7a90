"""Whole models on Triton's kernels, in the interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.decode_scene import Scene, places, scene
from support.graph_recorders import RerunRecorder
from support.grids import choose, long_but
from support.model_runs import LoadedModel, load_tiny, standard_sequences
from support.parity import DirectDriver, ParityReport, compare_all, run_sequences, schedule
from support.random_model import RECURRENT
from support.tiny_models import VOCAB_SIZE, find_tiny_model, load_reference, write_tiny_model
from torch import Tensor

from lightserve.errors import ConfigError, StartupError
from lightserve.kernels import select
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.cpu.invariant import InvariantKernels
from lightserve.kernels.cpu.native import InvariantNativeKernels
from lightserve.kernels.interface import (
    MAX_FEW_TOKENS,
    AttentionBatch,
    Can,
    Kernels,
    MostTokens,
    UnknownValues,
)
from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.select import make_kernels, missing_core
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.models.layers.attention import in_chunks
from lightserve.models.moe_config import MoeConfig
from lightserve.types import Activation
from lightserve.worker.graphs import DecodeGraphs

NUM_SEQUENCES = choose(2, 3)
CASES = [
    ("llama-mqa-tied", torch.float32),
    ("llama-head-dim", torch.bfloat16),
    ("mistral-window", torch.float32),
    ("qwen3", torch.bfloat16),
    ("gemma2", torch.float32),
    ("bloom-6-heads", torch.bfloat16),
    ("deepseek-v2", torch.float32),
    ("deepseek-v3", torch.float32),
    ("qwen3.5", torch.float32),
    ("qwen3-next", torch.bfloat16),
    ("granite-hybrid", torch.float32),
    ("nemotron-h", torch.bfloat16),
    ("kimi-linear", torch.float32),
    ("nemotron-h-latent", torch.float32),
    ("nemotron-h-moe", torch.float32),  # the interpreter rounds to bfloat16 towards zero
    ("gemma4-moe", torch.float32),
]


def report_of(
    name: str, dtype: torch.dtype, path: Path, num_sequences: int = NUM_SEQUENCES, **changes: object
) -> ParityReport:
    write_tiny_model(find_tiny_model(name), path, dtype=dtype)
    sequences = standard_sequences(load_reference(path, torch.float32), num_sequences)
    loaded = load_tiny(path, dtype, make_kernels("triton", batch_invariant=False), **changes)
    lengths = [len(sequence.tokens) for sequence in sequences]
    logits = loaded.run(sequences, schedule(lengths, chunk=37, num_decodes=2))
    assert logits is not None
    return compare_all(sequences, logits, dtype)


@pytest.mark.parametrize(("name", "dtype"), long_but(CASES, [*CASES[:10:2], CASES[-3]]))
def test_parity_with_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    report = report_of(name, dtype, tmp_path)
    assert report.holds(dtype), report


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.uint8], ids=["int8", "fp8"])
@pytest.mark.parametrize(
    ("name",),
    long_but(
        [("mistral-window",), ("qwen3",), ("gemma2",), ("bloom-6-heads",)], [("mistral-window",)]
    ),
)
def test_keys_and_values_of_8_bits(name: str, kv_dtype: torch.dtype, tmp_path: Path) -> None:
    """The same numbers as the reference's, from chunks and decodes, with bytes of its pools."""
    write_tiny_model(find_tiny_model(name), tmp_path, dtype=torch.float32)
    sequences = standard_sequences(load_reference(tmp_path, torch.float32), NUM_SEQUENCES)
    passes = schedule([len(one.tokens) for one in sequences], chunk=37, num_decodes=2)
    found = []
    for kernels in (make_kernels("triton", batch_invariant=False), ReferenceKernels()):
        loaded = replace(load_tiny(tmp_path, torch.float32, kernels), kv_dtype=kv_dtype)
        logits = loaded.run(sequences, passes)
        assert logits is not None
        found.append(torch.cat(logits))
    # A number at the border between two codes may go either way.
    assert ((found[0] - found[1]).norm() / found[1].norm()) < 2e-2
    assert not compare_all(sequences, logits, torch.float32).holds(torch.float32), (
        "rounding is to be seen"
    )


def test_a_wrong_window_is_seen(tmp_path: Path) -> None:
    report = report_of("mistral-window", torch.float32, tmp_path, 1, sliding_windows=(23,) * 3)
    assert not report.holds(torch.float32), report


def test_neither_gpu_nor_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a GPU"):
        make_kernels("triton", batch_invariant=False)


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the extra gpu"):
        make_kernels("triton", batch_invariant=False)


# Decodes as a graph has them, on Triton's kernels: padding rows, and nothing known of the host.


@torch.inference_mode()
def test_padded_decodes_give_the_logits_of_plain_ones() -> None:
    ours, reference = scene(make_kernels("triton", batch_invariant=False)), scene()
    graphs = ours.graphs(RerunRecorder(), sizes=(4,))
    graphs.capture()
    rng = np.random.default_rng(0)
    for num_rows in (3, 4, 1):
        rows, positions = places(rng, num_rows)
        logits = graphs.logits(rows, positions)
        assert logits is not None
        torch.testing.assert_close(logits, reference.eager(rows, positions), rtol=1e-4, atol=1e-4)


def compare_recorded(**changes: Any) -> tuple[Scene, Scene, DecodeGraphs]:
    """Compare decodes alone, and chunks beside them, padded; rows that begin, and that go on."""
    ours = scene(make_kernels("triton", batch_invariant=False), **changes)
    reference = scene(make_kernels("torch", batch_invariant=False), **changes)
    recorder = RerunRecorder()
    decodes, mixed = ours.graphs(recorder, sizes=(1, 4)), ours.mixed(recorder, sizes=(16, 40))
    mixed.capture()
    decodes.capture()
    lens = [(20, 20), (1, 1), (0, 3), (3, 3)]
    for number in range(4):
        rows = torch.tensor([3, 7, 1, 5])
        found = mixed.hidden(40, rows.tolist(), *zip(*lens, strict=True))
        wanted = reference.hidden(rows.tolist(), lens)
        torch.testing.assert_close(found[: len(wanted)], wanted, rtol=1e-4, atol=1e-4)
        ends = torch.tensor([end for _, end in lens])
        logits = decodes.logits(rows, ends)
        assert logits is not None
        torch.testing.assert_close(logits, reference.eager(rows, ends), rtol=1e-4, atol=1e-4)
        counts = (1, 2, 1, 0) if number % 2 else (0, 1, 4, 1)
        lens = [(new, end + 1 + new) for new, (_, end) in zip(counts, lens, strict=True)]
    mixed.check()
    decodes.check(1e-3)
    return ours, reference, decodes


@torch.inference_mode()
@pytest.mark.parametrize(("kind",), long_but([("delta",), ("mamba",)], [("delta",)]))
def test_recorded_passes_move_states_on_as_plain_ones_do(kind: str) -> None:
    ours, reference, decodes = compare_recorded(recurrent=RECURRENT[kind])
    before = ours.tables.state_slots
    assert before is not None
    before[3] = before[7].clone()  # another row's state is other numbers
    at = torch.tensor([3]), torch.tensor([30])
    logits = decodes.logits(*at)
    assert logits is not None
    assert (logits - reference.eager(*at)).abs().max() > 0.1


MOE = MoeConfig(
    layers=frozenset({0, 1}), num_experts=4, num_chosen=2, intermediate_size=40, normalises=True
)
GELU_GATES = {"moe": MOE, "has_gelu": True}
SQUARES = {
    "moe": replace(MOE, projections=("up_proj", "down_proj"), latent_size=24),
    "activation": Activation.RELU_SQUARED,
}


@torch.inference_mode()
@pytest.mark.parametrize(("changes",), long_but([(GELU_GATES,), (SQUARES,)], [(SQUARES,)]))
def test_recorded_passes_go_through_experts(changes: dict[str, Any]) -> None:
    """No operation waits for the device, and which experts are chosen follows each replay's tokens.

    One expert after the other, as kernels without `Can.EXPERTS` have it, waits.
    """

    class OneByOne(TritonKernels):
        can = TritonKernels.can & ~(Can.EXPERTS | Can.PACKED_EXPERTS)

    compare_recorded(**changes)
    with pytest.raises(StartupError, match="waits for the device"):
        scene(OneByOne(), **changes).graphs(RerunRecorder(), sizes=(4,)).capture()


@torch.inference_mode()
def test_recorded_passes_attend_within_chunks() -> None:
    """Of 8 positions: a row may have new tokens in several."""
    _, reference, decodes = compare_recorded(attention_chunk=8)
    rows, positions = torch.tensor([3]), torch.tensor([30])
    logits = decodes.logits(rows, positions)
    assert logits is not None
    torch.testing.assert_close(logits, reference.eager(rows, positions), rtol=1e-4, atol=1e-4)
    whole = scene(make_kernels("torch", batch_invariant=False))
    assert (logits - whole.eager(rows, positions)).abs().max() > 0.1


@torch.inference_mode()
def test_chunks_are_those_of_rows_where_the_device_has_them() -> None:
    """Guesses that were refused: the host takes rows to be longer, beyond a chunk's end or not."""
    ours = scene(make_kernels("triton", batch_invariant=False), attention_chunk=8)
    reference = scene(make_kernels("torch", batch_invariant=False), attention_chunk=8)
    rows = [3, 7, 1, 5]
    for lens in ([(3, 8), (3, 10), (1, 16), (5, 21)], [(1, 7), (1, 8), (1, 9), (1, 24)]):
        found, wanted = ours.hidden(rows, lens, too_far=2), reference.hidden(rows, lens)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("most", [8192, 8448, 16_384])
def test_lines_of_chunks_stay_in_the_table(most: int) -> None:
    """Of a table of 257 rows: a pass of `most` new tokens has two or three parts of each."""
    table, offsets = torch.zeros(257, 16_384, dtype=torch.int32), torch.arange(5).int()
    unknown = UnknownValues("host_rows", 4)
    lengths, bounds = torch.full((4,), 5, dtype=torch.int32), MostTokens(most, 256)
    batch = AttentionBatch(
        *(offsets[:4], offsets[:4], table, torch.arange(4), offsets, lengths),
        *(unknown, unknown, unknown),
        most=bounds,
    )
    chunks = in_chunks(batch, 8192)
    assert chunks.req_to_slot.shape == (257, 8192) and chunks.most is not None
    assert len(chunks.rows) == 4 * (1 + -(-(most - 1) // 8192))
    chunks = in_chunks(replace(batch, most=None, host_q_lens=[most] * 4), 8192)
    assert chunks.most == MostTokens(4 * most, MAX_FEW_TOKENS), "scratch is bounded"


# Batch invariance of whole models: logits are bit-equal over batches, chunks and slots.

MODELS = ("llama-mha", "llama-biases-sharded", "mistral-window-mqa", "qwen3-window-yarn")
LENGTHS = (100, 17, 64, 3, 81)
NUM_DECODES = 6


def make_tokens() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


def run(
    loaded: LoadedModel, tokens: Sequence[Tensor], *, chunk: int | None, num_decodes: int, seed: int
) -> list[Tensor]:
    lengths = [len(sequence) for sequence in tokens]
    driver = DirectDriver(
        loaded.model,
        num_kv_heads=loaded.num_kv_heads,
        dtype=loaded.dtype,
        lengths=lengths,
        seed=seed,
    )
    logits = run_sequences(driver, tokens, schedule(lengths, chunk=chunk, num_decodes=num_decodes))
    assert logits is not None
    return logits


def num_different(kernels: Kernels, path: Path) -> int:
    """Return the sequences with other logits than alone and whole, over several schedules."""
    loaded = load_tiny(path, torch.float32, kernels)
    tokens = make_tokens()
    alone = [run(loaded, [one], chunk=None, num_decodes=0, seed=1)[0] for one in tokens]
    count = 0
    for seed, chunk in enumerate((None, 16, 7)):
        together = run(loaded, tokens, chunk=chunk, num_decodes=NUM_DECODES, seed=seed)
        count += sum(not torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    return count


@pytest.mark.parametrize("name", MODELS)
def test_logits_do_not_depend_on_batch_chunks_or_slots(name: str, tmp_path: Path) -> None:
    path = write_tiny_model(find_tiny_model(name), tmp_path)
    assert num_different(InvariantKernels(), path) == 0
    if not missing_core():
        assert num_different(InvariantNativeKernels(), path) == 0
    assert num_different(TorchKernels(), path) > 0, "the test can tell"
