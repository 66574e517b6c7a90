"""A model's own layer guesses tokens as its report says, and changes no answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import head_runs
from support.graph_recorders import Tape
from support.grids import choose, more_when_long
from support.head_runs import MAX_LEN, PROMPT, Formula, OneRow, config_of, run_row, write_with_head
from support.late_queue import LateQueue
from support.lossless import Catalogue, Tally, make_schedule
from support.lossless import make_runner as make_lossless_runner
from support.tensor_kernels import FromTensors, TensorKernels
from support.tiny_encoders import TINY_ENCODERS, write_tiny_encoder
from torch import Tensor

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError, ModelLoadError
from lightserve.kernels.interface import Kernels
from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.messages.common import unpack_int32
from lightserve.messages.router_worker import StepPlan, StepResult, pack_decodes
from lightserve.models.config import load_model_config
from lightserve.models.layers.linear import UnquantizedMethod
from lightserve.supervisor.startup import check_model
from lightserve.types import DraftSource
from lightserve.worker import build
from lightserve.worker.build import build_runner
from lightserve.worker.checks import check_options
from lightserve.worker.head_drafts import HeadDrafts
from lightserve.worker.model_runner import ModelRunner

FAMILIES = ("glm4-moe", "deepseek-v3", "glm4-moe-lite")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("name", FAMILIES)
def test_guesses_are_those_of_the_formula(name: str, backend: str, tmp_path: Path) -> None:
    formula = Formula(tmp_path, write_with_head(name, tmp_path))
    guesses = run_row(build_runner(config_of(tmp_path, attention_backend=backend)))
    assert [len(found) for _, found in guesses] == [4, 1, 8, 2, 5, 3, 3]
    for known, found in guesses:
        assert found == formula.guesses(known, len(found))


@pytest.mark.parametrize("name", FAMILIES[:2])
def test_a_row_behind_a_prefix_does_without_the_state_before_it(name: str, tmp_path: Path) -> None:
    """What was computed of the prefix is read; its last state counts as zeros."""
    formula = Formula(tmp_path, write_with_head(name, tmp_path))
    row = OneRow(build_runner(config_of(tmp_path)))
    row.begin(PROMPT)
    row.decode(2)
    row.begin([*PROMPT[:11], 3, 4, 5], start=11, cuts=(13,))
    row.decode(3)
    row.decode(3)
    for known, found in row.guesses[1:]:
        assert found == formula.guesses(known, 3, start=11)
        assert known[:11] == PROMPT[:11]


def test_two_ranks_guess_the_same(tmp_path: Path) -> None:
    write_with_head("glm4-moe", tmp_path)
    alone = run_row(build_runner(config_of(tmp_path)))
    root = Path(__file__).parents[1]
    paths = os.pathsep.join((str(root.parent), str(root)))
    words = [sys.executable, "-m", "support.head_runs"]
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*words, str(rank), "2", str(tmp_path)], env=environment)
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=300.0) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = json.loads((tmp_path / "guesses.json").read_text())
    assert found == [[known, tokens] for known, tokens in alone]


class Counted:
    """Counts a runner's guesses."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.counts: Counter[str] = Counter()
        runner = catalogue._runner
        self._execute, runner.execute = runner.execute, self.execute  # type: ignore[method-assign]

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._execute(plan)
        if result.drafted:
            counts, sources = unpack_int32(result.drafted).reshape(2, -1)
            assert {*sources[counts > 0].tolist()} <= {DraftSource.MTP}
            own = unpack_int32(result.token_ids).reshape(-1, result.tokens_per_row)
            self.counts["drafted"] += int(counts.sum())
            self.counts["accepted"] += int((own[: len(counts)] >= 0).sum(1).clip(1).sum()) - len(
                counts
            )
        return result


@more_when_long
def test_no_schedule_changes_a_token(tmp_path: Path) -> None:
    """Batch invariant, with pauses, replays, aborts and copies, most guesses being right."""
    write_with_head("glm4-moe", tmp_path, agrees=True, max_position_embeddings=128)
    catalogue = Catalogue(make_lossless_runner(tmp_path, model=None, speculation="mtp"))
    counts, total = Counted(catalogue).counts, Tally()
    for number in range(choose(5, 40)):
        schedule = replace(make_schedule(number), max_drafts=(8, 3, 1)[number % 3])
        total.add(catalogue.run(schedule))
    assert (total.num_different, total.seen.num_variants) == (0, 0)
    assert total.num_compared > choose(30, 300)
    assert total.num_pauses > choose(3, 20) and total.num_prefix_hits > choose(2, 20)
    assert counts["drafted"] > choose(100, 1000)
    assert counts["accepted"] > choose(30, 300)


def test_a_model_without_a_head_does_not_start(tmp_path: Path) -> None:
    write_with_head("deepseek-v3", tmp_path, num_nextn_predict_layers=0)
    said = r"config.json: key 'num_nextn_predict_layers' must be at least 1 with --speculation mtp"
    with pytest.raises(ModelLoadError, match=said):
        check_model(config_of(tmp_path))
    values = json.loads((tmp_path / "config.json").read_text())
    values |= {"architectures": ["LlamaForCausalLM"], "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match="'architectures' with --speculation mtp must be one"):
        check_model(config_of(tmp_path))


@pytest.mark.parametrize(
    ("tensor", "shape", "said"),
    [
        ("eh_proj", None, r"tensor 'model.layers.3.eh_proj.weight' is missing"),
        ("hnorm", None, r"tensor 'model.layers.3.hnorm.weight' is missing"),
        ("self_attn.o_proj", None, r"tensor 'model.layers.3.self_attn.o_proj.weight' is missing"),
        ("eh_proj", (64, 64), r"has shape \[64, 64\], config.json implies \[64, 128\]"),
        ("shared_head.norm", (128,), r"has shape \[128\], config.json implies \[64\]"),
        ("mlp.gate", (4, 64), r"has shape \[4, 64\], config.json implies \[8, 64\]"),
    ],
)
def test_a_head_that_is_not_whole_does_not_start(
    tensor: str, shape: tuple[int, ...] | None, said: str, tmp_path: Path
) -> None:
    """And does not matter to a server that guesses otherwise."""
    write_with_head("glm4-moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.3.{tensor}.weight"
    if shape is None:
        del tensors[name]
    else:
        tensors[name] = torch.ones(shape)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"model.safetensors: .*{said}"):
        build_runner(config_of(tmp_path))
    assert build_runner(config_of(tmp_path, speculation="ngram"))._model.draft_head is None


def test_a_model_that_writes_no_tokens_guesses_none(tmp_path: Path) -> None:
    write_tiny_encoder(TINY_ENCODERS[0], tmp_path)
    with pytest.raises(ConfigError, match="--speculation ngram: BertModel writes no tokens"):
        check_model(ServeConfig(model=str(tmp_path), speculation="ngram"))


# As on a GPU: where a row is the device alone knows, nothing waits for it, and passes are graphs.


class FarRow(OneRow):
    """Plans say the furthest that the row can be at, as they leave before the last result."""

    surplus = 0

    def decode(self, num_drafts: int) -> None:
        before, start = len(self._known), len(self._known) - 1 + self.surplus
        slots = [head_runs._slot(place) for place in range(start, start + 1 + num_drafts)]
        self._run([], [], [], pack_decodes([head_runs.ROW], [start], slots, [num_drafts]))
        most = 1 + num_drafts + self.surplus
        self.surplus = most - (len(self._known) - before) if num_drafts else 0


def late_runner(path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """Return a runner of a late device; its head is not to wait for it."""
    monkeypatch.setattr(build, "make_queue", lambda _: LateQueue())

    def load(*args: Any, **options: Any) -> Any:
        own = {"kernels": kernels, "method": UnquantizedMethod(kernels)}
        return build.load_model(*args, **(options | own))

    runner = build_runner(config_of(path), load=load)
    for name in ("propose", "take_in", "learn"):
        plain = getattr(HeadDrafts, name)

        def taped(self: HeadDrafts, *args: Any, plain: Any = plain) -> Any:
            if not isinstance(kernels, TensorKernels):
                return plain(self, *args)
            with Tape():
                return plain(self, *args)

        monkeypatch.setattr(HeadDrafts, name, taped)
    return runner


class Padded:
    """Stands for graphs: passes with a token more, whose states are overwritten by the next."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self.num_passes = runner, 0
        size = runner._model.config.hidden_size
        self._hidden = torch.zeros(MAX_LEN + 1, size)
        self.num_logits = 0

    def covers(self, num_rows: int) -> bool:
        return num_rows > 0

    def size_of(self, q_lens: np.ndarray) -> int:
        return 1 + int(q_lens.sum())

    def hidden(self, rows: np.ndarray, positions: np.ndarray, too_far: Tensor | None) -> Tensor:
        return self._pass(rows, np.ones_like(rows), positions + 1, too_far)

    def logits(self, rows: np.ndarray, positions: np.ndarray, too_far: Tensor | None) -> Any:
        self.num_logits += 1
        return self._runner._model.logits(self.hidden(rows, positions, too_far)[: len(rows)])

    def states(self, num_rows: int) -> Tensor:
        return self._hidden[:num_rows]

    def _pass(self, *inputs: Any) -> Tensor:
        self.num_passes += 1
        rows, q_lens, ends, too_far = inputs
        tensors = SimpleNamespace(rows=rows, q_lens=q_lens, context_lens=ends, too_far=too_far)
        runner = self._runner
        tokens, batch = runner._table.unrecorded(tensors)  # type: ignore[arg-type]
        self._hidden.fill_(torch.nan)
        self._hidden[: len(tokens)] = runner._model.hidden(tokens, batch, runner.pool, None)
        return self._hidden[: len(tokens) + 1]


class PaddedMixed(Padded):
    def hidden(self, size: int, *inputs: Any) -> Tensor:  # type: ignore[override]
        return self._pass(*inputs)


@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_late_device_guesses_the_same(
    has_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    formula = Formula(tmp_path, write_with_head("glm4-moe", tmp_path))
    runner = late_runner(tmp_path, FromTensors(), monkeypatch)
    if has_graphs:
        graphs, mixed = Padded(runner), PaddedMixed(runner)
        runner.use_graphs(graphs, mixed)  # type: ignore[arg-type]
    row, num_far = FarRow(runner), 0
    row.begin(PROMPT, cuts=(1, 6))
    for num_drafts in (4, 3, 0, 1, 8, 2, 0, 5):
        num_far += row.surplus > 0
        row.decode(num_drafts)
    assert num_far > 3 and len(row.guesses) == 6
    for known, found in row.guesses:
        assert found == formula.guesses(known, len(found))
    if has_graphs:
        assert graphs.num_logits == 2 and mixed.num_passes > 0, "both plain decodes"


@pytest.mark.parametrize("name", FAMILIES[:2])
def test_gpu_kernels_guess_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's, interpreted: over heads, and over latents."""
    formula = Formula(tmp_path, write_with_head(name, tmp_path))
    row = FarRow(late_runner(tmp_path, TritonKernels(), monkeypatch))
    row.begin(PROMPT[:9], cuts=(5,))
    for num_drafts in (2, 3, 0, 1):
        row.decode(num_drafts)
    for known, found in row.guesses:
        assert found == formula.guesses(known, len(found))


def test_gpus_have_such_guesses(tmp_path: Path) -> None:
    """By kernels that read on the device where rows are."""
    write_with_head("glm4-moe", tmp_path)
    config, cuda = config_of(tmp_path), torch.device("cuda")
    model_config = load_model_config(tmp_path, has_draft_head=True)
    check_options(config, model_config, TritonKernels(), cuda)
    with pytest.raises(ConfigError, match="mtp needs kernels that read on the device"):
        check_options(config, model_config, ReferenceKernels(), cuda)


def test_its_keys_and_values_are_one_layer_more(tmp_path: Path) -> None:
    write_with_head("glm4-moe", tmp_path)
    plain, own = (build_runner(config_of(tmp_path, speculation=s)).pool for s in ("off", "mtp"))
    assert (len(plain.k), len(own.k)) == (3, 4)
    assert own.bytes_per_token * 3 == plain.bytes_per_token * 4
