"""Models with a draft head: random ones, a plain formula of their guesses, and runs of one row.

    python -m support.head_runs RANK SIZE DIR

runs the model of DIR on SIZE ranks, and writes rank 0's guesses to `guesses.json` there.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightserve.config import ServeConfig
from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.messages.router_worker import (
    AddSequence,
    OutputKind,
    PlanRow,
    SlotRange,
    StepPlan,
    pack_decodes,
    row_results,
)
from lightserve.types import MAX_DRAFTS, RowId, SamplingParams, StepId
from lightserve.worker.build import build_runner
from lightserve.worker.drafts import Proposal, Rows
from lightserve.worker.model_runner import ModelRunner
from lightserve.worker.tensor_parallel import join_group
from support.tiny_models import find_tiny_model, load_reference, write_tiny_model

MAX_LEN = 96
ROW = RowId(1)


def write_with_head(
    name: str, path: Path, *, agrees: bool = False, **changes: Any
) -> dict[str, Tensor]:
    """Write a small model whose file has a draft head, and return the tensors of it.

    `path/whole` has the head's layer as the model's last. With `agrees` the next token follows from
    the last one alone, so that most guesses are right. `changes` are those of `config.json`.
    """
    tiny = find_tiny_model(name)
    config = dict(tiny.config)
    num_layers = config.get("num_hidden_layers", 2)
    config["num_hidden_layers"] = num_layers + 1
    if "mlp_layer_types" in config:
        config["mlp_layer_types"] = [*config["mlp_layer_types"], "sparse"]
    write_tiny_model(replace(tiny, config=config, sharded=False), path / "whole")
    values = json.loads((path / "whole/config.json").read_text())
    if "mlp_layer_types" in config:
        values["mlp_layer_types"] = config["mlp_layer_types"][:-1]
    values |= {"num_hidden_layers": num_layers, "num_nextn_predict_layers": 1} | changes
    (path / "config.json").write_text(json.dumps(values))
    tensors = load_file(path / "whole/model.safetensors")
    size, generator = values["hidden_size"], torch.Generator().manual_seed(5)
    prefix = f"model.layers.{num_layers}"
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        noise = 0.0 if agrees else 0.2
        tensors[f"{prefix}.{norm}.weight"] = 1 + noise * torch.randn(size, generator=generator)
    join = torch.randn(size, 2 * size, generator=generator) * (2 * size) ** -0.5
    if agrees:
        join = torch.cat([torch.eye(size), 0.1 * join[:, size:]], dim=1)
        for key in tensors:
            if key.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[key] *= 0.02
        tensors["model.norm.weight"] = torch.ones(size)
    tensors[f"{prefix}.eh_proj.weight"] = join
    # As real files have them, though they are the model's own.
    tensors[f"{prefix}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{prefix}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return tensors


class Formula:
    """Guesses by the formula of the DeepSeek-V3 report, section 2.2, all anew for each.

    Its block is transformers' layer, the model's states are transformers'.
    """

    def __init__(self, path: Path, tensors: dict[str, Tensor]) -> None:
        self._model = load_reference(path / "whole", torch.float32)
        inner = self._model.model
        self._block, inner.layers = inner.layers[-1], inner.layers[:-1]
        prefix = f"model.layers.{len(inner.layers)}"
        self._weights = {
            name: tensors[f"{prefix}.{name}.weight"]
            for name in ("enorm", "hnorm", "shared_head.norm", "eh_proj")
        }

    def _norm(self, x: Tensor, name: str) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        eps = self._model.config.rms_norm_eps
        return x * torch.rsqrt(variance + eps) * self._weights[name]

    def _states(self, tokens: list[int], before: Tensor) -> Tensor:
        """Return the head's states of all tokens but the first; `before` has those before each."""
        words = self._model.model.embed_tokens(torch.tensor(tokens[1:]))
        joined = torch.cat([self._norm(words, "enorm"), self._norm(before, "hnorm")], dim=-1)
        x = (joined @ self._weights["eh_proj"].T)[None]
        positions = torch.arange(x.shape[1])[None]
        rotary = self._model.model.rotary_emb(x, position_ids=positions)
        x = self._block(x, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        x = x[0] if isinstance(x, tuple) else x
        return self._norm(x[0], "shared_head.norm")

    @torch.inference_mode()
    def guesses(self, tokens: Sequence[int], count: int, *, start: int = 0) -> list[int]:
        """Return guesses behind `tokens`, of which all from `start` on were computed in one row."""
        known = list(tokens)
        hidden = self._model.model(torch.tensor([known])).last_hidden_state[0]
        before = hidden[:-1].clone()
        if start:
            before[start - 1] = 0.0
        for _ in range(count):
            states = self._states(known, before)
            known.append(int(self._model.lm_head(states[-1]).argmax()))
            before = torch.cat([before, states[-1:]])
        return known[len(tokens) :]


class OneRow:
    """A row of a runner, whose guesses are noted with what was known before them."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.guesses: list[tuple[list[int], list[int]]] = []
        self._known: list[int] = []
        self._step = 0
        assert runner._head is not None
        self._propose, runner._head.propose = runner._head.propose, self._noted

    def _noted(self, table: Tensor, rows: Rows) -> Proposal:
        found = self._propose(table, rows)
        known = table[ROW, : int(rows.lengths[0])].tolist()
        assert known == self._known
        self.guesses.append((known, found.token_ids[0, : int(found.counts[0])].tolist()))
        return found

    def begin(self, tokens: list[int], *, start: int = 0, cuts: Sequence[int] = ()) -> None:
        """Compute a sequence from `start` on, in chunks that end at `cuts`, and draw."""
        self._known = list(tokens)
        places = [start, *cuts, len(tokens)]
        sequences = [
            AddSequence(
                ROW,
                [TokenSegment(token_ids=pack_int32(tokens))],
                SamplingParams(temperature=0.0),
                len(tokens),
                [],
            )
        ]
        known = [SlotRange(ROW, 0, _slots(0, start))] if start else []
        for first, end in itertools.pairwise(places):
            output = OutputKind.SAMPLE if end == len(tokens) else OutputKind.NONE
            ranges = [*known, SlotRange(ROW, first, _slots(first, end))]
            self._run(sequences, ranges, [PlanRow(ROW, first, end - first, output)])
            sequences, known = [], []

    def decode(self, num_drafts: int) -> None:
        """Compute the last known token and guesses."""
        start = len(self._known) - 1
        slots = [_slot(place) for place in range(start, start + 1 + num_drafts)]
        self._run([], [], [], pack_decodes([ROW], [start], slots, [num_drafts]))

    def _run(self, sequences: Any, ranges: Any, rows: Any, *decodes: Any) -> None:
        plan = StepPlan(StepId(self._step), sequences, ranges, rows, *decodes)
        self._step += 1
        found = torch.full((MAX_DRAFTS + 1,), -1)
        result, tp = self._runner.execute(plan), self._runner._tp
        for row in row_results(plan, result) if tp.rank == 0 else ():
            found[: len(row.token_ids)] = torch.tensor(row.token_ids)
        drawn = tp.broadcast(found).tolist()
        self._known += [token for token in drawn if token >= 0]


def _slot(position: int) -> int:
    """Return slots in no order."""
    return position * 7 % MAX_LEN


def _slots(start: int, end: int) -> bytes:
    return pack_int32([_slot(place) for place in range(start, end)])


def config_of(path: Path, **flags: Any) -> ServeConfig:
    options: dict[str, Any] = {
        "dtype": "float32",
        "speculation": "mtp",
        "max_model_len": MAX_LEN,
        "max_num_seqs": 3,
        "max_kv_tokens": 2 * MAX_LEN,
    }
    return ServeConfig(model=str(path), **(options | flags))


PROMPT = [5, 9, 40, 77, 5, 9, 120, 33, 8, 61, 7, 99, 150, 21, 4, 18, 73]


def run_row(runner: ModelRunner) -> list[tuple[list[int], list[int]]]:
    """Return the guesses of a row: chunks, steps with and without guesses, another sequence."""
    row = OneRow(runner)
    row.begin(PROMPT, cuts=(1, 6))
    for num_drafts in (4, 0, 0, 1, 8, 2, 0, 5):
        row.decode(num_drafts)
    row.begin(PROMPT[:1])
    row.decode(3)
    row.decode(3)
    return row.guesses


def main() -> None:
    rank, size, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    store = str(directory / "store")
    cpu = torch.device("cpu")
    tp = join_group(rank=rank, size=size, store=store, timeout_s=300.0, device=cpu)
    guesses = run_row(build_runner(config_of(directory, tp=size), tp=tp))
    if rank == 0:
        (directory / "guesses.json").write_text(json.dumps(guesses))
    os._exit(0)  # whatever torch's threads still hold


if __name__ == "__main__":
    main()
