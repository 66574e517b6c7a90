"""A long request goes to the host and comes back while decodes go on.

Its KV is saved and loaded in pieces, a piece per step, as the router paces copies that nobody in
a step waits for; then all at once, which is reported only. In between, its old and its new slots
are poisoned, and what comes back must be the same bytes (contract N1), from which the request goes
on. The decodes' tokens must be those of a run without copies. The trace is for ui.perfetto.dev.
"""

from __future__ import annotations

import gzip
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from bench.gpu.context import Bench
from bench.gpu.driver import WARM_STEPS, Run, Sequences, run_plans
from bench.gpu.models import LLAMA_8B, TINY_LLAMA, RandomModel
from bench.gpu.overlap import overlapped_pct, profiled
from lightserve.messages.common import pack_int32
from lightserve.messages.router_worker import KVCopies, StepPlan
from lightserve.worker.model_runner import ModelRunner

MAX_RATIO = 1.2
REPEATS = 3
TRACE = "checkpoint.trace.json.gz"


@dataclass(frozen=True)
class Scale:
    """Sizes of the scene."""

    shape: Mapping[str, Any]
    num_rows: int
    context: int
    long_tokens: int
    piece: int
    budget: int
    host_memory: str
    quiet_steps: int
    """Without copies, before the first and behind the last."""

    @property
    def num_steps(self) -> int:
        """Steps of one way, to the host or back."""
        return WARM_STEPS + self.long_tokens // self.piece + 2 * self.quiet_steps


GPU = Scale(LLAMA_8B, 64, 1024, 8192, 1024, 8192, "1280MiB", 8)
REHEARSED = Scale(TINY_LLAMA, 2, 12, 24, 8, 16, "1MiB", 1)


def run(bench: Bench) -> None:
    """Measure both ways of copying, and write a trace."""
    scale = REHEARSED if bench.rehearse else GPU
    with TemporaryDirectory() as directory:
        model = RandomModel.make(Path(directory), scale.shape)
        scene = Scene(bench, model, scale)
        pieces = [
            range(start, start + scale.piece) for start in range(0, scale.long_tokens, scale.piece)
        ]
        for name, ranges, limit in (
            (f"{scale.piece} tokens per step", pieces, MAX_RATIO),
            ("all at once", [range(scale.long_tokens)], None),
        ):
            ratios = [scene.longest_ratio(ranges) for _ in range(REPEATS)]
            bench.rows.figure(
                f"{scale.long_tokens} tokens out and back, {name}: longest step to median",
                statistics.median(ratios),
                "x",
                at_most=limit,
                note=", ".join(f"{ratio:.3g}" for ratio in ratios),
            )
        gigabytes = scale.long_tokens * model.kv_bytes_per_token / 1e9
        bench.rows.claim(
            f"KV bytes are the same, {gigabytes:.3g} GB", scene.is_equal, "old slots poisoned"
        )
        bench.rows.claim("the decodes' tokens are those without copies", scene.is_undisturbed, "")
        bench.rows.claim("the long request goes on with the same token", scene.is_resumed, "")
        _trace(bench, scene, pieces)


class Scene:
    """Decodes, and beside them one long request that does not run."""

    def __init__(self, bench: Bench, model: RandomModel, scale: Scale) -> None:
        self._machine, self._scale = bench.machine, scale
        length = scale.context + scale.num_steps
        num_short = scale.num_rows * length
        self._runner = self._make_runner(model, num_short + 2 * scale.long_tokens)
        vocab_size = model.config.vocab_size
        self._rows = Sequences(scale.num_rows, length, vocab_size=vocab_size)
        self._long = Sequences(
            1,
            scale.long_tokens,
            vocab_size=vocab_size,
            first_row=scale.num_rows,
            first_slot=num_short,
        )
        run_plans(self._runner, self._rows.prefills(scale.context, budget=scale.budget))
        run_plans(self._runner, self._long.prefills(scale.long_tokens, budget=scale.budget))
        self._slots = self._long.slots[0].copy()
        self._spare = np.arange(num_short + scale.long_tokens, num_short + 2 * scale.long_tokens)
        self._expected = run_plans(self._runner, self._decodes()).token_ids
        self._next = self._resume()
        self._kv = self._read()
        self.is_equal = self.is_undisturbed = self.is_resumed = True

    def longest_ratio(self, ranges: Sequence[range]) -> float:
        """Save and load the long request's ranges of tokens; the longest step over the median."""
        there = self._note(run_plans(self._runner, self.plans("ahead_saves", ranges)))
        self._poison()
        self._slots, self._spare = self._spare, self._slots
        back = self._note(run_plans(self._runner, self.plans("ahead_loads", ranges)))
        self.is_equal &= all(
            torch.equal(before, now) for before, now in zip(self._kv, self._read(), strict=True)
        )
        self.is_resumed &= self._resume() == self._next
        gaps_s = there.gaps_s + back.gaps_s
        return max(gaps_s) / statistics.median(gaps_s)

    def plans(self, kind: str, ranges: Sequence[range]) -> list[StepPlan]:
        """Return decodes, some of which copy a range of the long request's tokens each."""
        plans = self._decodes()
        for number, tokens in enumerate(ranges, WARM_STEPS + self._scale.quiet_steps):
            slots = self._slots[tokens.start : tokens.stop]
            copies = KVCopies(pack_int32(slots), pack_int32(tokens))
            plans[number] = replace(plans[number], **{kind: copies})
        return plans

    def run(self, plans: Sequence[StepPlan]) -> None:
        """Execute plans."""
        run_plans(self._runner, plans)

    def _decodes(self) -> list[StepPlan]:
        return self._rows.decodes(self._scale.context, self._scale.num_steps)

    def _note(self, run: Run) -> Run:
        self.is_undisturbed &= run.token_ids == self._expected
        return run

    def _make_runner(self, model: RandomModel, num_slots: int) -> ModelRunner:
        scale = self._scale
        return model.runner(
            self._machine,
            max_num_seqs=scale.num_rows + 1,
            max_num_batched_tokens=scale.budget,
            max_kv_tokens=num_slots,
            host_kv_memory=scale.host_memory,
        )

    def _resume(self) -> list[int]:
        """Compute the long request's last token where its KV is now; return what follows it."""
        moved = self._long.move(0, self._slots)
        last = self._long.plan([(0, self._scale.long_tokens - 1, 1)], self._scale.long_tokens)
        [tokens] = run_plans(self._runner, [replace(last, slot_ranges=[moved])]).token_ids.values()
        return tokens

    def _read(self) -> list[Tensor]:
        """Return the long request's KV, on the host."""
        slots = torch.from_numpy(self._slots.astype(np.int64)).to(self._machine.device)
        return [tensor.index_select(3, slots).cpu() for tensor in self._runner._pool.tensors]

    def _poison(self) -> None:
        self._machine.synchronize()
        for places in (self._slots, self._spare):
            slots = torch.from_numpy(places.astype(np.int64)).to(self._machine.device)
            for tensor in self._runner._pool.tensors:
                tensor.index_fill_(3, slots, torch.nan)


def _trace(bench: Bench, scene: Scene, ranges: Sequence[range]) -> None:
    """Write the trace of both ways, and report how much of the copies passes ran beside."""
    plain = bench.out / TRACE.removesuffix(".gz")
    with profiled(bench.machine, plain):
        scene.run(scene.plans("ahead_saves", ranges))
        scene.run(scene.plans("ahead_loads", ranges))
    (bench.out / TRACE).write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    share = overlapped_pct(bench.out / TRACE)
    if share is None:
        bench.rows.skip("copies beside passes", "copies have no stream of their own here")
    else:
        bench.rows.figure("copies beside passes", share, "%", note=f"trace: {TRACE}")
