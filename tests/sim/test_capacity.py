"""`lightserve plan`: the busiest window, the fewest replicas, the smallest pool; three formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.axes import Axes

from lightserve.cli.plan import command as plan_command
from lightserve.cli.simulate import command as simulate_command
from lightserve.errors import ConfigError
from lightserve.messages.common import StepCoefficients
from lightserve.sim import (
    HybridConfig,
    HybridReport,
    ProfiledHardware,
    Targets,
    capacity,
    run_hybrid,
)
from lightserve.sim.capacity import (
    POOL_STEP,
    PlanConfig,
    Row,
    Trial,
    busiest_window,
    make_plan,
    read_rows,
)
from lightserve.sim.pictures import draw_plan

TARGETS = Targets(ttft_s=0.5, tpot_s=0.1)


def load(rate: float, seconds: float, start_s: float = 0.0) -> list[Row]:
    """Requests at even times."""
    rng = np.random.default_rng(0)
    times = start_s + np.arange(0.0, seconds, 1.0 / rate)
    return [Row(float(t), int(rng.integers(50, 400)), int(rng.integers(5, 60))) for t in times]


def test_the_busiest_window_is_that_with_the_most_tokens() -> None:
    rows = [*load(1, 20), *load(8, 10, 20.0), *load(1, 20, 30.0)]
    window = busiest_window(rows, 10.0)
    assert 19.0 <= window[0].at_s <= 21.0 and len(window) >= 79
    asked = [
        sum(r.num_prompt + r.num_output for r in rows if row.at_s <= r.at_s < row.at_s + 10.0)
        for row in rows
    ]
    assert sum(r.num_prompt + r.num_output for r in window) == max(asked)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "TAIL_S", 10.0)
    monkeypatch.setattr(capacity, "BE_WINDOW_S", 5.0)


def test_the_answer_is_enough_and_less_is_not() -> None:
    rows, told = load(60, 8), list[str]()
    config = PlanConfig(
        rows=rows,
        attainment=0.95,
        targets=TARGETS,
        max_kv_tokens=8000,
        window_s=8.0,
        be_clients=8,
    )
    plan = make_plan(config, progress=told.append)
    assert plan.num_replicas > 1 and plan.attainment >= 0.95
    tried = {trial[:2]: trial.attainment for trial in plan.trials}
    assert tried[plan.num_replicas - 1, 8000] < 0.95
    assert tried[plan.num_replicas, plan.kv_tokens] == plan.attainment
    smaller = [kv for (n, kv), kept in tried.items() if n == plan.num_replicas and kept < 0.95]
    assert plan.kv_tokens < 8000 and max(smaller) * POOL_STEP >= plan.kv_tokens - 1
    assert plan.be_tokens_per_day > 1e6
    assert len(told) == len(plan.trials) + capacity.NUM_BE_WINDOWS


def test_steps_have_the_budget_that_a_server_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = set()

    def run(config: HybridConfig) -> HybridReport:
        budgets.add(config.budget_tokens)
        return run_hybrid(config)

    monkeypatch.setattr(capacity, "run_hybrid", run)
    few = ProfiledHardware(StepCoefficients(0.01, *[0.0] * 7), 1, server_budget=96)
    values: dict[str, Any] = {"rows": load(2, 4), "attainment": 0.5, "window_s": 10.0}
    values |= {"targets": Targets(ttft_s=5.0), "max_kv_tokens": 2000, "be_clients": 1}
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 8192),
        ({"max_num_batched_tokens": 64}, 64),
        ({"hardware": few}, 96),
    ]
    for changes, expected in cases:
        budgets.clear()
        make_plan(PlanConfig(**values | changes))
        assert budgets == {expected}, changes


def test_what_cannot_be_planned() -> None:
    def config(**changes: Any) -> PlanConfig:
        values = {"rows": load(2, 4), "attainment": 0.9, "targets": TARGETS}
        return PlanConfig(**(values | {"max_kv_tokens": 4000, "window_s": 10.0} | changes))

    with pytest.raises(ConfigError, match="no real-time request"):
        make_plan(config(rows=[]))
    with pytest.raises(ConfigError, match="not even 2 replicas"):
        make_plan(config(targets=Targets(ttft_s=1e-6), max_replicas=2))
    with pytest.raises(ConfigError, match="must be at least"):
        make_plan(config(max_kv_tokens=100))


def test_three_formats(tmp_path: Path) -> None:
    table = tmp_path / "trace.csv"
    table.write_text("t,prompt_tokens,output_tokens\n0.5,10,3\n2,20,4\n")
    rows = [Row(0.5, 10, 3), Row(2.0, 20, 4)]
    assert read_rows(table) == (rows, None)

    lines = tmp_path / "mooncake.jsonl"
    mooncake = [
        {"timestamp": 2000, "input_length": 20, "output_length": 4, "hash_ids": [0, 7]},
        {"timestamp": 500, "input_length": 10, "output_length": 3, "hash_ids": []},
    ]
    lines.write_text("\n".join(map(json.dumps, mooncake)))
    assert read_rows(lines) == ([rows[0], rows[1]._replace(block_ids="0 7")], None)

    log = tmp_path / "log.jsonl"
    arguments = (
        *("--rt", "poisson:8", "--rt-lengths", "uniform:10-99,5-60", "--be", "closed:4"),
        *("--be-lengths", "uniform:100-300,20-60", "--duration-s", "4", "--margin-s", "1"),
        *("--capacity-tokens", "3000", "--json", "--decision-log", str(log)),
    )
    result = CliRunner().invoke(simulate_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    of_log, hardware = read_rows(log)
    assert len(of_log) > 10 and all(10 <= row.num_prompt <= 99 for row in of_log)
    assert hardware is not None and hardware.step_cost is not None
    assert hardware.server_budget == 512


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt_tokens,output_tokens\n1,2\n", "needs a column t"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "line 1: needs lengths >= 1"),
        ('{"timestamp": 0}', "line 1: .*input_length"),
        ("", "is not a trace"),
    ],
)
def test_what_is_no_trace(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_rows(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_rows(tmp_path / "nothing")


def test_the_command(tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.csv", tmp_path / "plan.png"
    rows = "".join(f"{row.at_s},{row.num_prompt},{row.num_output}\n" for row in load(4, 11))
    trace.write_text("t,prompt_tokens,output_tokens\n" + rows)
    common = ["--trace", str(trace), "--max-kv-tokens", "3000", "--window-s", "10"]
    with pytest.raises(ConfigError, match="is needed"):
        CliRunner().invoke(plan_command, common, catch_exceptions=False)
    arguments = [*common, "--ttft-slo-ms", "900", "--plot", str(picture), "--json"]
    wrong = CliRunner().invoke(plan_command, [*arguments, "--max-num-batched-tokens", "-1"])
    assert wrong.exit_code == 2 and "'--max-num-batched-tokens': -1 is not in" in wrong.output
    result = CliRunner().invoke(plan_command, arguments, catch_exceptions=False)
    document = json.loads(result.stdout)
    assert document["num_replicas"] == 1 and document["kv_tokens"] <= 3000
    assert document["trials"][0]["num_replicas"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_one_pool_names_its_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest pool was the smallest, too: no trial had another."""
    labels = list[str]()
    monkeypatch.setattr(Axes, "set_xlabel", lambda _axes, label: labels.append(label))
    trials = [Trial(1, 900, 0.5), Trial(2, 900, 0.99), Trial(2, 900, 0.99)]
    draw_plan(trials, 0.9, tmp_path / "plan.svg")
    assert labels == ["replicas", "KV slots of each of 2 replicas"]
