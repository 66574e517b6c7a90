"""`lightserve simulate` from the command line."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.memory import past_future as table1
from lightserve.cli.simulate import command
from lightserve.errors import ConfigError


def simulate(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_has_the_stable_keys_and_depends_on_the_seed() -> None:
    arguments = [
        "--workload",
        "dist3",
        "--num-requests",
        "12",
        "--capacity-tokens",
        "20000",
        "--json",
    ]
    first, again, other = (
        json.loads(simulate(*arguments, "--seed", seed)) for seed in ("1", "1", "2")
    )
    assert set(first) == {"config", "kv", "requests", "router"}
    assert set(first["kv"]) == {
        "decode_steps",
        "consumed_pct",
        "future_pct",
        "evicted_pct",
        "recomputed_tokens",
        "total_work_s",
    }
    assert set(first["router"]) == {"cpu_ms_p50", "cpu_ms_p99"}
    assert first["requests"]["finished"] == 12
    assert first["kv"] == again["kv"] != other["kv"]


def test_every_rule_runs_and_its_option_matters() -> None:
    base = ["--workload", "dist3", "--num-requests", "15", "--capacity-tokens", "14000"]

    def steps(*arguments: str) -> int:
        document = json.loads(simulate(*base, "--json", *arguments))
        return int(document["kv"]["decode_steps"])

    assert steps("--admission", "oracle") <= steps("--admission", "conservative")
    for rule, flag, low, high in (
        ("past-future", "--reserve", "0.0", "0.4"),
        ("past-future", "--samples", "1", "50"),
        ("aggressive", "--watermark", "0.4", "1.0"),
        ("conservative", "--overcommit", "1.0", "2.0"),
        ("risk", "--risk", "0.01", "0.9"),
    ):
        chosen = ["--admission", rule, "--warm-up-requests", "5"]
        assert steps(*chosen, flag, low) != steps(*chosen, flag, high), flag


def test_the_table_names_every_figure() -> None:
    table = simulate("--workload", "dist3", "--num-requests", "2", "--best-effort")
    assert "decode_steps" in table and "max_overtaken" in table


def test_a_timeline_is_drawn(tmp_path: Path) -> None:
    """Used and forecast memory, evictions and the capacity are in the picture."""
    base = ["--workload", "uniform:50-400:5-400", "--num-requests", "60"]
    simulate(
        *base,
        *("--capacity-tokens", "2500", "--admission", "risk", "--risk", "0.9"),
        *("--timeline", str(tmp_path / "out.png")),
    )
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    simulate(
        *base,
        *("--capacity-tokens", "2500", "--admission", "risk", "--risk", "0.9"),
        *("--timeline", str(tmp_path / "out.svg")),
    )
    labels = (tmp_path / "out.svg").read_text()
    for label in ("used", "peak expected at the last admission", "evictions", "capacity"):
        assert f"<!-- {label}" in labels


@pytest.mark.parametrize(
    ("file", "missing", "match"),
    [
        ("nowhere/out.png", "", "--timeline: .* cannot be written: .*nowhere is no directory"),
        ("out.xyz", "", r"--timeline: .*out.xyz must end with one of .*\.png.*\.svg"),
        ("out.png", "matplotlib.figure", "matplotlib is missing: .* -m pip install"),
    ],
)
def test_a_picture_that_cannot_be_is_refused_before_the_run(
    file: str, missing: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may take minutes, and its report is lost with the picture."""
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr("lightserve.sim.offline", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(ConfigError, match=match):
        simulate("--workload", "dist3", "--timeline", str(tmp_path / file))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arrivals", ["poisson:1.5", "closed:4", "trace", "queued"])
def test_arrivals(arrivals: str) -> None:
    """Who waits for others to come or to go takes longer, and waits less for a first token."""
    base = ["--workload", "bench/traces/azure2023_conv.csv.gz", "--num-requests", "40", "--json"]
    queued = json.loads(simulate(*base))["requests"]
    requests = json.loads(simulate(*base, "--arrivals", arrivals))["requests"]
    assert requests["finished"] == 40
    if arrivals == "queued":
        assert requests == queued
    else:
        assert requests["duration_s"] > queued["duration_s"]
        assert requests["ttft_s_p50"] < queued["ttft_s_p50"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--risk", "0.1"], "--risk needs --admission risk, got 'past-future'"),
        (["--capacity-tokens", "5000"], "--capacity-tokens must be at least"),
        (["--arrivals", "poisson:0"], "--arrivals must be queued, trace, poisson:RATE"),
        (["--arrivals", "closed:0"], "--arrivals must be queued, trace, poisson:RATE"),
        (["--arrivals", "trace"], "--arrivals trace needs one --workload file"),
        (
            ["--workload", "bench/traces/burstgpt_burst120.csv.gz", "--warm-up-requests", "120"],
            "--warm-up-requests must be below",
        ),
        (["--workload", "uniform:9-3:1-2"], "needs ranges 1 <= low <= high"),
        (["--admission", "risk", "--risk", "2"], "--rt-memory-risk must be at most 1"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate("--workload", "dist3", "--num-requests", "3", *arguments)


def test_the_tables_script_counts_its_runs_and_says_what_a_smaller_run_is_worth(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ThreadPoolExecutor(1) as pool:
        table1.show_progress([pool.submit(int) for _ in range(3)])
    assert re.findall(r"(\d/3) runs", capsys.readouterr().err) == ["1/3", "2/3", "3/3"]
    assert table1.note(table1.PAPER_REQUESTS) == ""
    assert "hold for 3,000 requests" in table1.note(300) and "300" in table1.note(300)
