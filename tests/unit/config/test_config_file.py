"""YAML files for --config: what they may say, what stands over what, what is logged of it."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import lightserve
from lightserve.cli import main as cli_main
from lightserve.config import ServeConfig
from lightserve.config.fields import Need, flag_name
from lightserve.config.file import (
    Origin,
    log_configuration,
    merge,
    read_config_file,
)
from lightserve.errors import MAX_FILE_BYTES, ConfigError
from lightserve.http_access import read_api_keys
from lightserve.logs import JsonFormatter
from lightserve.node_key import read_node_key
from lightserve.supervisor import loop
from lightserve.supervisor.spawn import num_frontends
from lightserve.tokenization.chat_template import find_chat_template
from tools.config_page import document

_POLICIES = ", ".join(ServeConfig.__dataclass_fields__["policy"].metadata["choices"])


def _read(tmp_path: Path, text: str | bytes) -> dict[str, Any]:
    path = tmp_path / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_config_file(path, ServeConfig)


def test_every_field_can_be_set_by_both_spellings(tmp_path: Path) -> None:
    defaults = {spec.name: spec.default for spec in dataclasses.fields(ServeConfig)}
    assert _read(tmp_path, yaml.safe_dump(defaults)) == defaults
    dashed = {name.replace("_", "-"): value for name, value in defaults.items()}
    assert _read(tmp_path, yaml.safe_dump(dashed)) == defaults


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("# nothing\n", {}),
        ("{}", {}),
        ("port: 0\nhost: localhost", {"port": 0, "host": "localhost"}),
        ("start_timeout_s: 5", {"start_timeout_s": 5.0}),
        ("start_timeout_s: 2.5", {"start_timeout_s": 2.5}),
        ("max_body_bytes: 4_194_304", {"max_body_bytes": 4_194_304}),
        ("batch_invariant: true", {"batch_invariant": True}),
        ("model: '123'", {"model": "123"}),
        ("num_threads: auto", {"num_threads": 0}),
        ("num_threads: 3", {"num_threads": 3}),
    ],
)
def test_values_keep_their_types(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    values = _read(tmp_path, text)
    assert values == expected
    assert [type(value) for value in values.values()] == [type(v) for v in expected.values()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port: 65536", "line 1: --port must be at most 65535, got 65536"),
        ("\ntp: 0", "line 2: --tp must be at least 1, got 0"),
        ("policy: lifo", f"line 1: --policy must be one of {_POLICIES}, got 'lifo'"),
        ("prot: 1", "line 1: no such option 'prot'"),
        ("config: other.yaml", "line 1: no such option 'config'"),
        ("port: 1\nport: 1", "line 2: 'port' is given twice"),
        ("max-model-len: 5\nmax_model_len: 5", "line 2: 'max_model_len' is given twice"),
        ("num_threads: all", "line 1: num_threads must be an integer or auto, got 'all'"),
        ("port: auto", "line 1: port must be an integer, got 'auto'"),
        ("port: '80'", "line 1: port must be an integer, got '80'"),
        ("port: 80.0", "line 1: port must be an integer, got '80.0'"),
        ("port: true", "line 1: port must be an integer, got 'true'"),
        ("port: 1:30", "line 1: port must be an integer, got '1:30'"),
        ("port: 010", "line 1: port must be an integer, got '010'"),
        ("port:", "line 1: port must be an integer, got ''"),
        ("model: 5", "line 1: model must be a string, got '5'"),
        ("model: no", "line 1: model must be a string, got 'no'"),
        ("model: 2026-01-01", "line 1: model must be a string, got '2026-01-01'"),
        ("batch_invariant: 1", "line 1: batch_invariant must be true or false, got '1'"),
        ("start_timeout_s: true", "line 1: start_timeout_s must be a number, got 'true'"),
        ("start_timeout_s: .inf", "line 1: start_timeout_s must be a number, got '.inf'"),
        ("start_timeout_s: .nan", "line 1: start_timeout_s must be a number, got '.nan'"),
        ("port: [1]", "line 1: port must be a plain value, got a sequence"),
        ("port: {a: 1}", "line 1: port must be a plain value, got a mapping"),
        ("[port]: 1", "line 1: names of options are strings, got a sequence"),
        ("- port", "must be a mapping of options, got a sequence"),
        ("port", "must be a mapping of options, got a scalar"),
        ("a: &x {port: 1}\n<<: *x", "line 1: a must be a plain value, got a mapping"),
        ("<<: {port: 1}", "line 1: << must be a plain value, got a mapping"),
        ("port: 1\n---\nport: 2", "is not valid YAML: expected a single document"),
        ("port: !!python/object/apply:os.getpid []", "must be a plain value"),
        ("model: !!python/name:os.system x", "is not valid YAML"),
        ("port: !!int x", "is not valid YAML"),
        ("port: *nowhere", "is not valid YAML"),
        ("port: 'x", "is not valid YAML"),
        ("[" * 20_000, "is not valid YAML"),
        (b"model: \x00", "has control characters"),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_anything_else_is_an_error_that_says_where(
    tmp_path: Path, text: str | bytes, expected: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        _read(tmp_path, text)
    assert expected in str(raised.value)
    assert str(raised.value).startswith(f"--config {tmp_path / 'config.yaml'}")


@given(data=st.binary(max_size=200))
def test_whatever_it_holds_only_configuration_errors_come_out(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(data)
    try:
        values = read_config_file(path, ServeConfig)
    except ConfigError:
        return
    assert values.keys() <= {spec.name for spec in dataclasses.fields(ServeConfig)}


NAMED_FILES: dict[str, Callable[[Path], object]] = {
    "--config": lambda path: read_config_file(path, ServeConfig),
    "--api-key-file": read_api_keys,
    "--node-key-file": read_node_key,
    "--chat-template": lambda path: find_chat_template(path.parent, str(path)),
}


@pytest.mark.parametrize("flag", NAMED_FILES)
@pytest.mark.timeout(30)  # opening a pipe waits for its other end
def test_files_that_options_name(flag: str, tmp_path: Path) -> None:
    (folder := tmp_path / "folder").mkdir()
    os.mkfifo(pipe := tmp_path / "pipe")
    (large := tmp_path / "large").write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    (no_text := tmp_path / "no_text").write_bytes(b"a: \xff")
    for path, complaint in (
        (tmp_path / "missing", "no such file"),
        (folder, "must be a file, not a directory or a pipe"),
        (pipe, "must be a file, not a directory or a pipe"),
        (large, f"larger than {MAX_FILE_BYTES} bytes"),
        (no_text, "not valid UTF-8"),
    ):
        with pytest.raises(ConfigError) as raised:
            NAMED_FILES[flag](path)
        assert str(raised.value) == f"{flag} {path}: {complaint}"


def test_a_path_that_is_not_text_is_refused_by_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"--model must be UTF-8, got '/models/\\udcff'"):
        ServeConfig(model="/models/\udcff")


def test_flags_stand_over_the_file_and_the_file_over_defaults() -> None:
    effective = merge({"a": 1, "b": 2, "c": 3}, given={"a"}, from_file={"a": 10, "b": 20})
    assert effective.values == {"a": 1, "b": 20, "c": 3}
    assert effective.origins == {"a": Origin.FLAG, "b": Origin.FILE, "c": Origin.DEFAULT}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"port": 9001, "batch_invariant": True}),
        (["--num-threads", "auto"], {"port": 9001, "batch_invariant": True, "num_threads": 0}),
        (["--num-threads", "2"], {"port": 9001, "batch_invariant": True, "num_threads": 2}),
        (["--port", "9002"], {"port": 9002, "batch_invariant": True}),
        # A flag that repeats the default stands over the file as well.
        (["--port", "8000", "--no-batch-invariant"], {"port": 8000, "batch_invariant": False}),
    ],
)
def test_the_command_merges_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    expected: dict[str, Any],
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("port: 9001\nbatch-invariant: true\n")
    served: list[tuple[ServeConfig, dict[str, Origin]]] = []
    monkeypatch.setattr(
        loop, "serve", lambda config, origins: served.append((config, origins)) or 0
    )
    with pytest.raises(SystemExit) as exited:
        cli_main.main(["serve", "--config", str(path), *arguments])
    assert exited.value.code == 0
    [(config, origins)] = served
    assert config == ServeConfig(**expected)
    assert origins["port"] is (Origin.FLAG if "--port" in arguments else Origin.FILE)
    assert origins["host"] is Origin.DEFAULT


def test_a_wrong_file_ends_with_code_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("port: many\n")
    with pytest.raises(SystemExit) as exited:
        cli_main.main(["serve", "--config", str(path)])
    assert exited.value.code == 2
    assert capsys.readouterr().err == (
        f"lightserve: error: --config {path}, line 1: port must be an integer, got 'many'\n"
    )


def test_every_value_is_logged_once_with_its_origin(caplog: pytest.LogCaptureFixture) -> None:
    config = ServeConfig(port=9001, host="localhost")
    origins = {"port": Origin.FLAG, "host": Origin.FILE}
    with caplog.at_level(logging.DEBUG):
        log_configuration(logging.getLogger("test"), config, origins)
    flag, file, default = caplog.messages
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.INFO, logging.INFO, logging.DEBUG]
    assert flag == "configuration by flag: port=9001"
    assert file == "configuration by file: host='localhost'"
    assert default.startswith("configuration by default: model=")
    seen: dict[str, Any] = {}
    for record in caplog.records:
        line = json.loads(JsonFormatter("supervisor").format(record))
        assert line["origin"] in ("flag", "file", "default")
        assert not seen.keys() & line["configuration"].keys()
        seen |= line["configuration"]
    assert seen == dataclasses.asdict(config)


@pytest.mark.parametrize(
    ("asked", "num_cores", "expected"),
    [(0, 1, 1), (0, 7, 1), (0, 8, 2), (0, 16, 4), (0, 96, 8), (3, 96, 3), (12, 2, 12)],
)
def test_frontends_follow_the_cores_unless_their_number_is_given(
    monkeypatch: pytest.MonkeyPatch, asked: int, num_cores: int, expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(num_cores)))
    assert num_frontends(ServeConfig(http_workers=asked)) == expected


NEEDS = [
    (spec.name, need) for spec in dataclasses.fields(ServeConfig) for need in spec.metadata["needs"]
]


@pytest.mark.parametrize(("name", "need"), NEEDS, ids=[f"{n}-{need.option}" for n, need in NEEDS])
def test_needs_name_options_and_values_that_there_are(name: str, need: Need) -> None:
    """With a value that is not met for each: an error, else the option could be given alone."""
    other = ServeConfig.__dataclass_fields__[need.option]
    choices = other.metadata["choices"]
    assert need.option != name and set(need.allowed) <= {*choices, other.default}
    unmet = [v for v in (*choices, other.default, *need.refused, "x") if not need.is_met(v)]
    assert unmet and flag_name(need.option) in need.complaint(unmet[0])
    assert any(need.is_met(value) for value in (*choices, other.default, "x"))


# docs/configuration.md is what the declaration says.


def test_the_page_is_up_to_date() -> None:
    page = Path(lightserve.__file__).parents[1] / "docs" / "configuration.md"
    assert page.read_text() == document(), "python -m tools.config_page > docs/configuration.md"


def test_the_page_has_a_whole_row_for_every_option() -> None:
    rows = [line for line in document().splitlines() if line.startswith("| `--")]
    for row, spec in zip(rows, dataclasses.fields(ServeConfig), strict=True):
        assert row.startswith(f"| `{flag_name(spec.name)}` |")
        assert row.replace(r"\|", "").count("|") == 6
        assert str(Path(lightserve.__file__).parent) not in row
