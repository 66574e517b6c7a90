"""`make gpu-check`, rehearsed: every line of its parts runs on the CPU before it sees a GPU."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernel_grid import AttentionCase
from torch import Tensor

from bench.gpu import attention, correctness, parity
from bench.gpu.__main__ import function_of
from bench.gpu.attention import Heads, Order, make_batch, make_pool, worst_error
from bench.gpu.correctness import WrongScale
from bench.gpu.device import Machine, this_machine
from bench.gpu.models import TINY_LLAMA, RandomModel, Sequences, run_plans
from bench.gpu.table import Bench, Row, RowFile, Verdict, read_rows
from lightserve.decisions.replaying import DecisionLogReader
from lightserve.kernels.interface import Kernels
from lightserve.kernels.select import make_kernels
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.messages.router_worker import plan_rows, row_results
from lightserve.models.layers.feed_forward import _Router

ROOT = Path(__file__).parents[2]


def rehearse(part: str, out: Path) -> list[Row]:
    rows = RowFile(out / "rows", part, is_rehearsal=True)
    bench = Bench(this_machine(rehearse=True), rows, out, out / "shared", rehearse=True)
    function_of(part)(bench)
    return read_rows(out / "rows")


@pytest.mark.parametrize(
    ("part", "num_rows"),
    [
        ("ceilings", 2),
        ("decode-attention", 7),
        pytest.param("prefill-attention", 17, marks=pytest.mark.long),
        ("packed-products", 6),
        ("sampling", 14),
        ("whole-model", 19),
        ("eight-bits", 8),
        ("checkpoints", 5),
        ("guesses", 5),
        ("images", 2),
    ],
)
def test_parts_run(part: str, num_rows: int, tmp_path: Path) -> None:
    rows = rehearse(part, tmp_path)
    assert len(rows) >= num_rows
    verdicts = {row.verdict for row in rows}
    assert verdicts <= {Verdict.REHEARSED, Verdict.MET, Verdict.SKIPPED}, rows
    trace = tmp_path / "checkpoint.trace.json.gz"
    assert part != "checkpoints" or trace.stat().st_size > 1000


def test_a_timed_kernel_is_checked_first() -> None:
    heads = Heads(4, 2, 16)
    machine = Machine(torch.device("cpu"))
    pool = make_pool(machine, heads, 80)
    batch = make_batch(attention.slot_table(Order.BLOCKS, 2, 40), [0, 1], q_len=1, context=40)
    q = machine.random(2, heads.num_heads, heads.head_dim)

    class Unwritten(TritonKernels):
        def attention(self, q: Tensor, *args: object, **options: object) -> Tensor:
            return torch.empty_like(q)

    errors = [
        worst_error(some, q, pool, replace(batch, prepared={}), last_queries=1)
        for some in (TritonKernels(), WrongScale(), Unwritten())
    ]
    assert errors[0] <= attention.MAX_ERROR < errors[1]
    assert errors[2] == float("inf")


@pytest.mark.long
def test_parity_notices_a_wrong_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: str, **options: Any) -> Kernels:
        return WrongScale() if name == "triton" else make_kernels(name, **options)

    monkeypatch.setattr(parity, "make_kernels", make)
    rows = rehearse("parity", tmp_path)
    assert len(rows) == 4 and {row.verdict for row in rows} == {Verdict.FAILED}, rows


def on_torch(monkeypatch: pytest.MonkeyPatch, models: Sequence[str]) -> list[parity.Compared]:
    """Compare models in bfloat16 with torch's kernels in the place of the device's."""

    def make(name: str, **options: Any) -> Kernels:
        return make_kernels("torch" if name == "triton" else name, **options)

    monkeypatch.setattr(parity, "make_kernels", make)
    scale = replace(parity.GPU, lengths=((60, 20), (30, 8)), chunks=(37,))
    cases = [parity.Case(name, torch.bfloat16, scale, "cpu") for name in models]
    return [parity.compare_models(case) for case in cases]


@pytest.mark.parametrize("model", ["mixtral", "deepseek-v2", "gpt-oss"])
def test_near_ties_of_routers_are_no_faults(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [compared] = on_torch(monkeypatch, [model])
    assert compared.is_right, compared
    assert "experts chosen otherwise" in compared.note


@pytest.mark.parametrize("model", ["mixtral", "gpt-oss"])
def test_experts_that_no_tie_explains_are_faults(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = _Router.__call__

    def wrong(router: _Router, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen, weights = choose(router, x)
        on_device = x.dtype is torch.bfloat16  # the reference is right
        return (chosen + 1) % router._moe.num_experts if on_device else chosen, weights

    monkeypatch.setattr(_Router, "__call__", wrong)
    [compared] = on_torch(monkeypatch, [model])
    assert not compared.is_right, compared


def test_the_loop_runs_plans_as_the_runner_does(tmp_path: Path) -> None:
    model = RandomModel.make(tmp_path, TINY_LLAMA)
    tokens = []
    for runs_loop in (True, False):
        runner = model.runner(this_machine(rehearse=True), max_kv_tokens=200)
        rows = Sequences(3, 30, vocab_size=200)
        plans = [*rows.prefills(20, budget=13), *rows.decodes(20, 8)]
        assert max(sum(row.num_tokens for row in plan_rows(plan)) for plan in plans) == 13
        if runs_loop:
            tokens.append(run_plans(runner, plans).token_ids)
        else:
            results = [row_results(plan, runner.execute(plan)) for plan in plans]
            tokens.append(
                {
                    number: [
                        token
                        for r in results
                        for row in r
                        if row.row == number
                        for token in row.token_ids
                    ]
                    for number in range(3)
                }
            )
    assert tokens[0] == tokens[1]
    assert [len(ids) for ids in tokens[0].values()] == [9, 9, 9]


def test_the_command_prints_one_table(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu"]
    done = subprocess.run(
        [*command, "ceilings", "--rehearse", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    table = done.stdout.splitlines()
    assert table[0] == "| part | figure | value | target | |"
    assert table[-3].startswith("| ceilings | the part | ")  # its seconds
    assert table[-1] == "rehearsed 2"
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["part"] for row in report] == ["ceilings"] * 3
    refused = subprocess.run(
        [*command, "nonsense"], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert refused.returncode == 2 and "no such part: nonsense" in refused.stderr


def test_servers_are_loaded(tmp_path: Path) -> None:
    """Weights are written once; what the mission keeps is small and can be replayed."""
    command = [sys.executable, "-m", "bench.gpu", "mission", "through-http", "--rehearse"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    log = (tmp_path / "parts.log").read_text()
    assert done.returncode == 0, done.stdout + log
    assert log.count("| weights written") == 1
    rows = [Row(**row) for row in json.loads((tmp_path / "report.json").read_text())]
    parts = list(dict.fromkeys(row.part for row in rows))
    assert parts == ["weights", "mission", "through-http"]
    assert {row.verdict for row in rows} <= {Verdict.REHEARSED, Verdict.SKIPPED, Verdict.REPORTED}
    found = {row.name: row.value for row in rows if row.part == "mission"}
    for policy in ("unified", "priority"):
        for rate in (12, 24):
            in_time = found[f"{policy}, {rate} chats/s: in time"]
            assert in_time is not None and 0 <= in_time <= 100
            assert (found[f"{policy}, {rate} chats/s: best effort"] or 0) > 0
        with gzip.open(tmp_path / f"decisions-{policy}.gz") as packed:
            (tmp_path / policy).write_bytes(packed.read())
        header = DecisionLogReader(tmp_path / policy).header
        assert header.config["policy"] == policy
    kept = {path.name for path in tmp_path.iterdir()} - {"unified", "priority", "profile.json"}
    assert kept == {*("report.json", "parts.log", "decisions-unified.gz", "decisions-priority.gz")}


def test_reports_of_the_grid_are_added_up() -> None:
    case = AttentionCase("one decode", "scattered", (4, 4, 64), None, torch.bfloat16)
    some = correctness.attention([case], "cpu")
    other = replace(some, num_cases=3, worst={"attention bfloat16": 0.5}, failures=["a case"])
    whole = correctness.merged([some, other])
    assert (whole.num_cases, whole.failures) == (4, ["a case"])
    assert whole.worst == {"attention bfloat16": 0.5}
    assert some.worst["attention bfloat16"] < 2e-2 and not some.failures
