"""`lightserve simulate` from the command line."""

from __future__ import annotations

import gzip
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.grids import choose, every_value, long_but

from bench.memory import past_future as table1
from lightserve.cli.simulate import HYBRID_DEFAULTS, QUEUE_DEFAULTS, command
from lightserve.cost.profile import SCHEMA_VERSION, ProfileKey, StepProfile, save_profile
from lightserve.errors import ConfigError
from lightserve.messages.common import StepCoefficients
from lightserve.router.step import Reason
from lightserve.sim.offline import OfflineConfig, run_offline
from lightserve.sim.report import Report
from lightserve.sim.traffic import Workload, load_workload
from lightserve.types import RequestClass


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
        "evicted_requests_pct",
        "recomputed_tokens",
        "total_work_s",
    }
    assert set(first["router"]) == {"cpu_ms_p50", "cpu_ms_p99"}
    assert first["requests"]["finished"] == 12
    assert first["kv"] == again["kv"] != other["kv"]


def decode_steps(*arguments: str) -> int:
    base = ["--workload", "dist3", "--num-requests", "15", "--capacity-tokens", "14000"]
    document = json.loads(simulate(*base, "--json", *arguments))
    return int(document["kv"]["decode_steps"])


OPTIONS_OF_RULES = [
    ("past-future", "--reserve", "0.0", "0.4"),
    ("past-future", "--samples", "1", "50"),
    ("aggressive", "--watermark", "0.4", "1.0"),
    ("conservative", "--overcommit", "1.0", "2.0"),
    ("risk", "--risk", "0.01", "0.9"),
]


@pytest.mark.parametrize(
    ("rule", "flag", "low", "high"),
    long_but(OPTIONS_OF_RULES, [OPTIONS_OF_RULES[0], OPTIONS_OF_RULES[4]]),
)
def test_every_rule_runs_and_its_option_matters(rule: str, flag: str, low: str, high: str) -> None:
    chosen = ["--admission", rule, "--warm-up-requests", "5"]
    assert decode_steps(*chosen, flag, low) != decode_steps(*chosen, flag, high)


def test_knowing_the_lengths_takes_no_more_steps_than_reserving_the_worst_case() -> None:
    assert decode_steps("--admission", "oracle") <= decode_steps("--admission", "conservative")


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


# `lightserve simulate --rt --be` from the command line.

RT = ("--rt", "poisson:6", "--rt-lengths", "uniform:10-200,5-80", "--rt-max-tokens", "100")
BE = ("--be", "closed:30", "--be-lengths", "uniform:100-300,20-60")
SHORT = ("--duration-s", "5", "--margin-s", "1", "--capacity-tokens", "3000")
CLASS_KEYS = {
    "arrivals",
    "ttft_attainment",
    "tpot_attainment",
    "mtpot_attainment",
    "goodput_rps",
    "goodput_tps",
    "normalized_latency_ms",
    "throughput_rps",
    "throughput_tps",
    "evictions",
    "recomputed_tokens",
}


def test_json_of_both_classes_has_the_stable_keys_and_depends_on_the_seed() -> None:
    arguments = [*RT, *BE, *SHORT, "--policy", "priority", "--json"]
    first, again, other = (
        json.loads(simulate(*arguments, "--seed", seed)) for seed in ("1", "1", "2")
    )
    assert set(first) == {"config", "warm_up", "rt", "be", "kv", "steps", "router"}
    assert set(first["rt"]) >= CLASS_KEYS and set(first["be"]) >= CLASS_KEYS
    assert {"copied_tokens", "copied_bytes", "recomputed_tokens"} <= set(first["kv"])
    assert {"cpu_ms_p50", "cpu_ms_p99"} <= set(first["router"])
    reasons = first["router"]["reasons"]
    assert reasons == again["router"]["reasons"] and set(reasons) == {"rt", "be"}
    assert all(set(counts) == set(Reason) for counts in reasons.values())
    assert sum(reasons["be"].values()) > 0
    assert first["config"]["admission"] == "risk" and "workload" not in first["config"]
    for section in ("rt", "be", "kv", "steps"):
        assert first[section] == again[section] != other[section]


def test_the_table_shows_both_classes() -> None:
    table = simulate(*BE, *SHORT)
    sections = [table.index(f"{name}\n") for name in ("warm_up", "rt", "be", "kv")]
    assert sections == sorted(sections)
    assert "normalized_latency_ms" in table and "copied_bytes" in table


PRIORITY = (*RT, *BE, *SHORT, "--policy", "priority", "--json")


@pytest.fixture(scope="module")
def default() -> dict[str, Any]:
    report: dict[str, Any] = json.loads(simulate(*PRIORITY))
    return report


COMPARED = ("fcfs", "priority")


def test_policies_are_compared_in_one_table_and_one_picture(
    default: dict[str, Any], tmp_path: Path
) -> None:
    compare = (*RT, *BE, *SHORT, "--compare", ",".join(COMPARED))
    document = json.loads(simulate(*compare, "--json"))
    assert tuple(document["policies"]) == COMPARED and document["config"]["policy"] is None
    own = document["policies"]["priority"]
    assert [own[name] for name in ("rt", "be", "kv")] == [
        default[name] for name in ("rt", "be", "kv")
    ]
    assert document["policies"]["fcfs"]["rt"] != own["rt"]
    picture = tmp_path / "policies.svg"
    lines = simulate(*compare, "--plot", str(picture)).splitlines()
    assert lines[0].split() == list(COMPARED)
    (row,) = (line.split() for line in lines if line.split()[0] == "ttft_attainment")
    for shown, policy in zip(row[1:], COMPARED, strict=True):
        assert float(shown) == pytest.approx(
            document["policies"][policy]["rt"]["ttft_attainment"], abs=1e-3
        )
    assert picture.stat().st_size > 5000


def test_the_table_has_no_screens_of_zeros(default: dict[str, Any]) -> None:
    lines = simulate(*PRIORITY[:-1]).splitlines()
    assert not [line for line in lines if line.split()[-1] == "-"]
    assert not [line for line in lines if re.search(r"(reasons|unseen) .* 0$", line)]
    assert "are left out)" in lines[-1]
    zeros = [name for name, count in default["router"]["reasons"]["rt"].items() if count == 0]
    assert zeros and not [line for line in lines if f"reasons rt {zeros[0]}" in line]
    assert "rt\n  no requests\n" in simulate(*BE, *SHORT)


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz", "gzipped-all-the-same.csv"])
def test_a_trace_may_be_gzipped_or_not(name: str, tmp_path: Path) -> None:
    text = b"t,prompt_tokens,output_tokens\n0.5,30,4\n1.5,40,5\n"
    path = tmp_path / name
    path.write_bytes(text if name == "trace.csv" else gzip.compress(text))
    report = json.loads(simulate("--be", str(path), *SHORT, "--json"))
    assert report["be"]["arrivals"] == 1  # the other one came before the margin was over
    with pytest.raises(ConfigError, match="is not a trace"):
        path.write_bytes(b"a,b\n1,2\n")
        simulate("--be", str(path), *SHORT)


def test_help_names_the_defaults_that_the_code_has() -> None:
    help_text = " ".join(simulate("--help").split())
    shown = re.findall(r"\[default: (\S+); with --rt, --be (\S+)\]", help_text)
    assert shown == [
        (str(QUEUE_DEFAULTS[name]), str(HYBRID_DEFAULTS[name]))
        for name in ("capacity_tokens", "policy", "admission")
    ]
    config = json.loads(simulate(*BE, *SHORT, "--json"))["config"]
    assert {name: config[name] for name in HYBRID_DEFAULTS if name != "capacity_tokens"} == {
        name: value for name, value in HYBRID_DEFAULTS.items() if name != "capacity_tokens"
    }


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--preemption", "recompute"),
        ("--block-size", "1"),
        ("--host-kv-tokens", "0"),
        ("--budget-tokens", "64"),
        ("--max-be-seqs", "2"),
        ("--admission", "oracle"),
        ("--policy", "fcfs"),
        ("--ttft-slo-ms", "1"),
        ("--rt-kv-deviations", "2"),
        ("--router-time-factor", "20"),
        ("--step-noise", "0.3"),
    ],
)
def test_options_matter(flag: str, value: str, default: dict[str, Any]) -> None:
    changed = json.loads(simulate(*PRIORITY, flag, value))
    assert any(default[section] != changed[section] for section in ("rt", "be", "kv"))


def test_hardware_is_what_a_profile_says(default: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    key = ProfileKey("abc", "bfloat16", "a device", 1, 2, "auto")
    fast = StepCoefficients(4e-3, 0.0, 1e-6, 0.0, 0.0, 0.0, 0.0, 0.0)
    save_profile(StepProfile(SCHEMA_VERSION, "0", "fast", key, fast, 8, 9, 0.0, 0.0), path)
    report = json.loads(simulate(*PRIORITY, "--hardware", str(path)))
    assert report["be"]["throughput_tps"] > 3 * default["be"]["throughput_tps"]
    assert report["kv"]["copied_bytes"] == 8 * report["kv"]["copied_tokens"]
    assert report["config"]["hardware"] == str(path)


def test_the_variants_of_deadlines_matter() -> None:
    arguments = (*RT, *BE, *SHORT, "--policy", "unified", "--json")
    curve, gap, loose, tight = (
        json.loads(simulate(*arguments, *variant))
        for variant in (
            ("--tpot-slo-ms", "30"),
            ("--tpot-slo-ms", "30", "--slo-clock", "gap"),
            ("--completion-slo-s", "60"),
            ("--completion-slo-s", "0.3"),
        )
    )
    assert curve["be"] != gap["be"]
    assert curve["rt"]["completion_attainment"] is None
    assert loose["rt"]["ttft_attainment"] is loose["rt"]["mtpot_attainment"] is None
    met = [report["rt"]["completion_attainment"] for report in (loose, tight)]
    assert 1.0 >= met[0] > met[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--workload .* or --rt and --be .* is needed, got neither"),
        ([*RT, "--workload", "dist1"], "is needed, got both"),
        ([*RT, "--paper-artifact"], "--paper-artifact belongs to --workload, not to --rt"),
        (
            ["--workload", "dist1", "--tpot-slo-ms", "5"],
            "--tpot-slo-ms belongs to --rt and --be, not to --workload",
        ),
        (["--workload", "dist1", "--policy", "priority"], "fcfs, chunked with --workload"),
        (["--rt", "poisson:0", *RT[2:]], "--rt must be poisson:RATE"),
        (["--rt", "closed:0", *RT[2:]], "--rt must be poisson:RATE"),
        (["--be", "closed:0", *BE[2:]], "--be must be poisson:RATE .* closed:N or batch:N"),
        (["--be", "closed:4"], "--be closed:4 needs --be-lengths"),
        ([*RT, "--be-lengths", "uniform:1-2,3-4"], "--be-lengths needs --be"),
        (["--be", "closed:4", "--be-lengths", "uniform:2-1,3-4"], "--be-lengths must be uniform:"),
        ([*RT, "--compare", "fcfs"], "--compare needs two policies or more"),
        ([*RT, "--compare", "fcfs,lifo"], "--policy must be one of"),
        ([*RT, "--compare", "fcfs,mlfq", "--policy", "fcfs"], "cannot be combined with --policy"),
        ([*RT, "--preset", "bros", "--compare", "fcfs,sjf"], "cannot be combined with --preset"),
        ([*RT, "--preset", "accelgen", "--without", "luck"], "--without must be some of batching"),
        ([*RT, "--plot", "x.png"], "--plot needs --compare"),
        (["--be", "no.csv.gz"], "--be: no.csv.gz cannot be read"),
        (["--be", "no.csv.gz", *BE[2:]], "--be-lengths needs --be poisson:RATE"),
        ([*BE, "--capacity-tokens", "300"], "--capacity-tokens must be at least 359"),
        ([*BE, "--duration-s", "60"], "--duration-s must be above 60"),
        ([*BE, "--policy", "lifo"], "--policy must be one of"),
        ([*BE, "--reserve", "0.1"], "--reserve needs --admission past-future"),
        ([*BE, "--block-owner", "exclusive"], "--block-owner needs"),
        ([*BE, "--hardware", "nowhere.json"], "--hardware 'nowhere.json' is no profile: .*No such"),
        (
            [*RT, "--completion-slo-s", "9", "--mtpot-slo-ms", "200"],
            "--completion-slo-s cannot be combined with --mtpot-slo-ms",
        ),
        ([*BE, "--policy", "fcfs", "--slo-clock", "gap"], "--slo-clock needs --policy unified"),
    ],
)
def test_wrong_arguments_for_both_classes(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(*arguments)


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(
    "flag", ["--duration-s", "--margin-s", "--ttft-slo-ms", "--completion-slo-s"]
)
def test_numbers_are_finite(flag: str, value: str) -> None:
    result = CliRunner().invoke(command, [*RT, flag, value])
    assert result.exit_code == 2
    assert f"{value} is not a finite number" in result.stderr


# The offline simulation: hand-made scenes, its report against a slow count, the rules' order.


def workload(*rows: tuple[int, int], limit: int = 64) -> Workload:
    prompt, output = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    return Workload(
        prompt, output, np.full(len(rows), limit), ("",) * len(rows), np.zeros(len(rows))
    )


def run(rows: Workload, capacity: int, admission: str = "oracle", **changes: object) -> Report:
    config = OfflineConfig(capacity_tokens=capacity, admission=admission)
    return run_offline(rows, replace(config, **changes))  # type: ignore[arg-type]


def test_one_request_by_hand() -> None:
    """Prompt 10, output 5: the prompt yields the first token, four decode steps the rest."""
    report = run(workload((10, 5)), 100)
    assert (report.decode_steps, report.finished, report.evicted_pct) == (4, 1, 0.0)
    assert report.consumed_pct == pytest.approx(np.mean([11, 12, 13, 14]))
    assert report.future_pct == pytest.approx(15)


def test_two_that_fit_only_one_after_the_other() -> None:
    both = workload((10, 5), (10, 5), limit=6)
    assert run(both, 100).decode_steps == 4
    assert run(both, 25).decode_steps == 8


def test_reckless_admission_evicts_and_still_finishes() -> None:
    rows = workload(*[(10, 40)] * 8)
    oracle = run(rows, 200)
    reckless = run(rows, 200, "aggressive", admission_options={"watermark": 1.0})
    assert oracle.evicted_pct == 0.0 and oracle.recomputed_tokens == 0
    assert reckless.evicted_pct > 0.0 and reckless.recomputed_tokens > 0
    assert reckless.finished == oracle.finished == 8
    assert reckless.future_pct > 100.0 >= oracle.future_pct


def test_the_same_seed_gives_the_same_report() -> None:
    rows = load_workload("dist3", num_requests=20, rng=np.random.default_rng(5))
    reports = [
        replace(run(rows, 60_000, "past-future", seed=seed), cpu_ms_p50=0.0, cpu_ms_p99=0.0)
        for seed in (1, 1, 2)
    ]
    assert reports[0] == reports[1] != reports[2]


@pytest.mark.parametrize(
    ("admission", "changes"),
    every_value(
        ["oracle", "risk", "past-future", "ema", "aggressive"],
        [
            {"paper_artifact": True},
            {"request_class": RequestClass.BE},
            {"num_warm_up": 10, "policy": "chunked"},
            {"num_clients": 9},
        ],
    ),
    ids=str,
)
def test_steps_at_once_change_no_decision(admission: str, changes: dict[str, Any]) -> None:
    """Runs of decode steps and single ones: the same admissions, evictions and times."""
    rng = np.random.default_rng(2)
    spec = "uniform:50-400:5-400"
    rows = load_workload(spec, num_requests=choose(30, 60), rng=rng, arrivals="poisson:2")
    if "num_warm_up" not in changes:
        rows = rows.arriving(np.zeros(len(rows)))
    runs, steps = (
        run(rows, 2500, admission, steps_at_once=at_once, **changes) for at_once in (True, False)
    )
    assert len(runs.timeline) < 0.5 * len(steps.timeline)
    assert runs.evicted_pct > 0 or admission != "aggressive"
    for name, value in asdict(steps).items():
        if not name.startswith(("cpu_", "timeline")):
            assert getattr(runs, name) == pytest.approx(value), name
    assert [p for p in steps.timeline if p in runs.timeline] == list(runs.timeline)


def test_warm_up_rows_are_history_only() -> None:
    rows = load_workload("dist1", num_requests=30, rng=np.random.default_rng(0))
    report = run(rows, 60_000, "risk", num_warm_up=20, request_class=RequestClass.BE)
    assert report.finished == 10


@pytest.mark.parametrize(
    ("spec", "message"),
    [("nowhere.csv.gz", "cannot be read"), ("tests/sim/test_simulate.py", "is not a trace")],
)
def test_bad_traces(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workload(spec, num_requests=1, rng=np.random.default_rng(0))


def test_traces_and_drift() -> None:
    rng = np.random.default_rng(0)
    spec = "bench/traces/servegen_mlarge_day3.csv.gz+dist2"
    rows = load_workload(spec, num_requests=50, rng=rng)
    assert len(rows) == 100 and rows.clients[0] and not rows.clients[99]
    assert set(rows.max_tokens[:50]) == {8192} and set(rows.max_tokens[50:]) == {4096}
    assert rows.output_tokens[50:].max() <= 4096
    assert (
        load_workload("dist2", num_requests=50, rng=rng, cut_outputs=False).output_tokens.max()
        > 4096
    )
