"""Decision logs of simulations: replayed, every decision is the same; changes are found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from support.grids import long_but

from lightserve.cli.decision_logs import replay as replay_command
from lightserve.cli.simulate import command as simulate_command
from lightserve.config import ServeConfig
from lightserve.cost.profile import SCHEMA_VERSION, ProfileKey, StepProfile, save_profile
from lightserve.decisions.records import DECIDING_OPTIONS, new_hash
from lightserve.decisions.replaying import MAX_LINES, DecisionLogReader, find_request, story_of
from lightserve.errors import ConfigError, DecisionLogError
from lightserve.messages.common import StepCoefficients
from lightserve.router.config import make_scheduler_config
from lightserve.router.policies import POLICIES

TRAFFIC = (
    *("--rt", "poisson:8", "--rt-lengths", "uniform:10-200,5-60", "--rt-max-tokens", "80"),
    *("--be", "closed:20", "--be-lengths", "uniform:100-300,20-60"),
    *("--duration-s", "3", "--margin-s", "1", "--capacity-tokens", "2000", "--json"),
)


def record(path: Path, *arguments: str) -> Path:
    arguments = (*TRAFFIC, "--decision-log", str(path), *arguments)
    result = CliRunner().invoke(simulate_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return path


def replayed(path: Path, *arguments: str) -> Result:
    """Return the command's result; its `return_value` is the exit code."""
    arguments = (str(path), *arguments)
    return CliRunner().invoke(
        replay_command, arguments, catch_exceptions=False, standalone_mode=False
    )


@pytest.mark.parametrize(
    "policy", long_but([(policy,) for policy in sorted(POLICIES)], [("mlfq",), ("unified",)])
)
def test_every_decision_is_repeated(policy: str, tmp_path: Path) -> None:
    path = record(tmp_path / "log.jsonl", "--policy", policy)
    assert path.stat().st_mode & 0o777 == 0o600
    results = [replayed(path, "--json") for _ in range(2)]
    assert [result.return_value for result in results] == [0, 0]
    first, second = (json.loads(result.stdout) for result in results)
    assert first == second and first["is_equal"] and first["num_decisions"] > 100


@pytest.mark.parametrize("policy", long_but([("priority",), ("unified",)], [("priority",)]))
def test_who_loads_bit_by_bit_is_in_the_log_and_in_the_story(policy: str, tmp_path: Path) -> None:
    path = record(tmp_path / "log.jsonl", "--policy", policy)
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    decisions = [fields for fields in records if fields["kind"] == "decision"]
    loads = [load for fields in decisions for load in fields["loaded"]]
    assert loads
    for fields in decisions:
        names = [load[:2] for load in fields["loaded"]]
        assert names == [s[:2] for s in fields["skipped"] if s[:2] in names and s[2] == "loading"]
    frontend_id, request_id, num_tokens = loads[0]
    story = replayed(path, "--request", f"{frontend_id}/{request_id}").output
    assert f"loads from the host {num_tokens} tokens" in story


def test_nothing_depends_on_the_process(tmp_path: Path) -> None:
    """Sets of strings and of objects iterate in another order in each of these processes."""
    path = record(tmp_path / "log.jsonl", "--policy", "unified", "--admission", "past-future")
    hashes = set()
    for seed in ("1", "2"):
        code = f"from lightserve.cli.main import main; main(['replay', {str(path)!r}])"
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=600,
        )
        hashes.add(run.stdout)
    assert len(hashes) == 1


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a log whose decisions are the same whatever targets its requests have."""
    path = tmp_path_factory.mktemp("decisions") / "log.jsonl"
    return record(path, "--policy", "priority", "--pace-ms", "0")


Edit = Callable[[list[dict[str, Any]]], None]


def rewritten(path: Path, edit: Edit, target: Path, *, is_chained: bool) -> Path:
    """Write a log with other contents; with `is_chained` the hashes over the lines fit it."""
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    edit(records)
    chain = new_hash()
    with target.open("wb") as file:
        for fields in records:
            if is_chained and fields["kind"] == "decision":
                fields["chain"] = chain.hexdigest()
            line = msgspec.json.encode(fields) + b"\n"
            chain.update(line)
            file.write(line)
    return target


def later_arrival(records: list[dict[str, Any]]) -> None:
    next(fields for fields in records[50:] if fields["kind"] == "result")["now_s"] += 1e-9


def more_tokens(records: list[dict[str, Any]]) -> None:
    decision = next(fields for fields in records[50:] if fields["kind"] == "decision")
    decision["advancing"][0][2] += 1


def other_reason(records: list[dict[str, Any]]) -> None:
    decision = next(f for f in records if f["kind"] == "decision" and f["skipped"])
    decision["skipped"][0][2] = "blocked"


def other_budget(records: list[dict[str, Any]]) -> None:
    records[0]["config"]["max_num_batched_tokens"] = 600


@pytest.mark.parametrize("edit", [later_arrival, other_budget])
def test_a_changed_input_is_found(edit: Edit, log_path: Path, tmp_path: Path) -> None:
    path = rewritten(log_path, edit, tmp_path / "log.jsonl", is_chained=False)
    with pytest.raises(DecisionLogError, match=r"line \d+: the lines before it were changed"):
        replayed(path)


@pytest.mark.parametrize("edit", [more_tokens, other_reason])
def test_a_changed_decision_is_found(edit: Edit, log_path: Path, tmp_path: Path) -> None:
    path = rewritten(log_path, edit, tmp_path / "log.jsonl", is_chained=False)
    assert replayed(path).return_value == 1


@pytest.mark.parametrize(
    ("edit", "field"),
    [(more_tokens, "advancing"), (other_reason, "skipped"), (other_budget, "advancing")],
)
def test_the_first_difference_is_shown(
    edit: Edit, field: str, log_path: Path, tmp_path: Path
) -> None:
    path = rewritten(log_path, edit, tmp_path / "log.jsonl", is_chained=True)
    result = replayed(path, "--json")
    assert result.return_value == 1
    difference = json.loads(result.stdout)["difference"]
    assert difference["recorded"][field] != difference["replayed"][field]
    text = replayed(path)
    assert text.return_value == 1
    assert f"step {difference['step_id']} differs" in text.stdout and "replayed" in text.stdout


def test_rewriting_as_such_changes_nothing(log_path: Path, tmp_path: Path) -> None:
    path = rewritten(log_path, lambda _: None, tmp_path / "log.jsonl", is_chained=True)
    assert replayed(path).return_value == 0


def without_sizes(records: list[dict[str, Any]]) -> None:
    del next(fields for fields in records if fields["kind"] == "workers_ready")["mixed_sizes"]


def test_the_sizes_of_the_workers_steps_are_in_the_log(tmp_path: Path) -> None:
    """A log of before there were any has none, and none is what it is read as."""
    key = ProfileKey("0", "bfloat16", "a GPU, CUDA 13", 1, 1, "triton")
    cost = StepCoefficients(5e-3, 16.0, 1e-4, *[0.0] * 7)
    profile = StepProfile(
        SCHEMA_VERSION, "0", "m", key, cost, 8, 50, 0.01, 0.1, mixed_sizes=(64, 128, 256)
    )
    save_profile(profile, tmp_path / "profile.json")
    path = record(tmp_path / "log.jsonl", "--hardware", str(tmp_path / "profile.json"))
    assert replayed(path).return_value == 0
    other = rewritten(path, without_sizes, tmp_path / "other.jsonl", is_chained=True)
    result = replayed(other, "--json")
    assert result.return_value == 1
    difference = json.loads(result.stdout)["difference"]
    assert difference["replayed"].keys() >= {"predicted_s"}


def test_a_last_line_cut_off_is_left_out(log_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(log_path.read_bytes()[:-20])
    result = replayed(path)
    assert result.return_value == 0 and "last line is incomplete" in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a decision log"),
        (b"hello\n", "not a decision log"),
        (b'{"kind":"header","format_version":99}\n', "format version 99"),
        (b'{"kind":"result","format_version":3}\n', "not a decision log"),
        (b'{"kind":"header","format_version":3}\n', "line 1: .*missing"),
    ],
)
def test_what_is_no_log_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    with pytest.raises(DecisionLogError, match=message):
        replayed(path)


def test_a_log_with_an_option_that_is_gone_is_refused(log_path: Path, tmp_path: Path) -> None:
    header, _, rest = log_path.read_bytes().partition(b"\n")
    path = tmp_path / "log.jsonl"
    changed = header.replace(b'"config":{', b'"config":{"old_option":3,')
    path.write_bytes(changed + b"\n" + rest)
    with pytest.raises(DecisionLogError, match=r"that are gone \(old_option\): read it with"):
        replayed(path)


def test_garbage_in_the_middle_names_its_line(log_path: Path, tmp_path: Path) -> None:
    lines = log_path.read_bytes().splitlines(keepends=True)
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join([*lines[:30], b"{}\n", *lines[30:]]))
    with pytest.raises(DecisionLogError, match="line 31"):
        replayed(path)


def story(path: Path, *arguments: str) -> list[str]:
    result = replayed(path, *arguments)
    assert result.return_value == 0
    return result.stdout.splitlines()


def test_the_story_of_a_request(log_path: Path) -> None:
    lines = story(log_path, "--request", "0/3")
    text = "\n".join(lines)
    assert "arrives: class rt" in lines[0] and "its first token is there" in text
    summary = lines.index("in all:")
    assert any("ends: " in line for line in lines[:summary])
    assert not text.endswith(" 1 steps") and " 1 steps\n" not in text
    spent_s = [float(line.split(" s")[0]) for line in lines[summary + 1 :]]
    assert spent_s == sorted(spent_s, reverse=True) and spent_s[0] > 0
    for unknown in ("0/9999", "chatcmpl-1", "9"):
        with pytest.raises(DecisionLogError, match=f"no request {unknown}; it is named by the id"):
            replayed(log_path, "--request", unknown)
    with pytest.raises(ConfigError, match="--all needs --request"):
        replayed(log_path, "--all")


def _set_submits(fields: dict[str, Any]) -> Callable[[list[dict[str, Any]]], None]:
    """Return an edit that changes what real-time requests are; the first two share their names."""

    def edit(records: list[dict[str, Any]]) -> None:
        numbers = iter(range(10**6))
        for record in records:
            message = record.get("message", {})
            if message.get("type") == "Submit" and message["request_class"] == "rt":
                number = max(1, next(numbers))
                record["message"] |= fields | {"names": [f"chatcmpl-{number}", f"trace-{number}"]}

    return edit


def test_a_request_goes_by_the_names_that_its_client_has(log_path: Path, tmp_path: Path) -> None:
    path = rewritten(log_path, _set_submits({}), tmp_path / "log.jsonl", is_chained=True)
    number = story(path, "--request", "0/3")
    assert story(path, "--request", "chatcmpl-3") == story(path, "--request", "trace-3") == number
    shared = replayed(path, "--request", "trace-1")
    assert "2 completions: 0/0, 0/1; the first:" in shared.stderr
    assert shared.stdout.splitlines() == story(path, "--request", "0/0")


@pytest.mark.parametrize(
    ("slo", "age_s", "expected"),
    [
        ([None, None, None, None], 0.0, [r"has no targets"]),
        (
            [60_000.0, 60_000.0, 90_000.0, None],
            0.25,
            [
                r"0\.250 s  arrives",
                r"targets: ttft 60000 ms, tpot 60000 ms, mtpot 90000 ms, first token",
                r"first token due at 60\.000 s",
                r"first token is there, in time by 5\d\.\d+ s",
                r"mean time per token after the first \S+ ms, in time by",
                r"largest gap between tokens \S+ ms, in time by",
            ],
        ),
        (
            [1.0, 0.5, 0.5, None],
            10.0,
            [
                r"first token is there, late by 1\d\.\d+ s",
                r"mean time per token after the first \S+ ms, late by 0\.\d+ s",
                r"largest gap between tokens \S+ ms, late by",
            ],
        ),
        (
            [None, None, None, 2.0],
            10.0,
            [r"targets: completion 2 s, due at 2\.000 s", r"ends: \w+, \d+ tokens, late by"],
        ),
    ],
)
def test_the_story_says_what_was_late_and_by_how_much(
    slo: list[float | None], age_s: float, expected: list[str], log_path: Path, tmp_path: Path
) -> None:
    edit = _set_submits({"slo": slo, "age_s": age_s})
    path = rewritten(log_path, edit, tmp_path / "log.jsonl", is_chained=True)
    text = "\n".join(story(path, "--request", "chatcmpl-3"))
    for line in expected:
        assert re.search(line, text), f"{line} in\n{text}"
    assert ("in time" in text) == ("in time" in str(expected))
    assert ("late" in text) == ("late" in str(expected))


def test_a_long_story_is_told_in_forty_lines(tmp_path: Path) -> None:
    path = record(tmp_path / "log.jsonl", "--policy", "unified")
    reader = DecisionLogReader(path)
    (name,) = find_request(reader, "1/18")
    whole, most = story_of(reader, name, max_lines=None), 14
    assert len(whole) > most
    short = story_of(reader, name, max_lines=most)
    assert len(short) == most
    (left_out,) = (line for line in short if "shorter stretches" in line)
    assert int(left_out.split()[0]) == len(whole) - len(short) + 1
    assert [line for line in whole if line in short] == [line for line in short if line != left_out]
    assert story(path, "--request", "1/18", "--all") == whole
    assert story(path, "--request", "1/18") == story_of(reader, name, max_lines=MAX_LINES)
    assert MAX_LINES == 40
    for event in ("arrives", "its first token is there", "ends: ", "in all:"):
        assert any(event in line for line in short)


def test_the_oracle_cannot_be_recorded(tmp_path: Path) -> None:
    arguments = (*TRAFFIC, "--decision-log", str(tmp_path / "log"), "--admission", "oracle")
    with pytest.raises(ConfigError, match="oracle"):
        CliRunner().invoke(simulate_command, arguments, catch_exceptions=False)


def test_all_options_that_decide_are_recorded() -> None:
    config = ServeConfig()
    read: set[str] = set()

    class Watched:
        def __getattr__(self, name: str) -> object:
            if callable(method := getattr(ServeConfig, name, None)):
                return partial(method, self)  # what it reads counts
            if isinstance(method, property) and method.fget is not None:
                value: object = method.fget(self)
                return value
            read.add(name)
            return getattr(config, name)

    for policy in ("chunked", "unified"):
        config = ServeConfig(policy=policy)
        make_scheduler_config(Watched(), max_model_len=100)  # type: ignore[arg-type]
    assert read and read <= set(DECIDING_OPTIONS)
