"""The command line: flags come from the configuration, mistakes end with code 2 and one line."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner

import lightserve
from lightserve.cli import main as cli_main
from lightserve.cli import serve as cli_serve
from lightserve.config import ServeConfig
from lightserve.config.fields import flag_name
from lightserve.errors import StartupError
from lightserve.supervisor import loop


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """Configurations that `lightserve serve` would have served."""
    configs: list[ServeConfig] = []

    def record(config: ServeConfig, **_: Any) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(loop, "serve", record)
    return configs


def _main(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        cli_main.main(arguments)
    code = exit_info.value.code
    assert isinstance(code, int)
    return code


def test_help_shows_every_flag_with_its_default_and_limits() -> None:
    output = CliRunner().invoke(cli_serve.command, ["--help"], terminal_width=1000).output
    blocks = [" ".join(block.split()) for block in re.split(r"\n {2}(?=-)", output)[1:]]
    fields = dataclasses.fields(ServeConfig)
    for spec, line in zip(fields, blocks[: len(fields)], strict=True):
        assert line.startswith(flag_name(spec.name) + " ")
        assert spec.metadata["help"] in line
        for choice in spec.metadata["choices"]:
            assert choice in line
        if (low := spec.metadata["low"]) is not None:
            assert (str(int(low)) if low == int(low) else f"{low:g}") in line
        if spec.default not in ("", False) and "Default:" not in line:
            assert f"default: {spec.default}" in line


def test_defaults_of_the_command_are_those_of_the_configuration(served: list[ServeConfig]) -> None:
    assert _main("serve") == 0
    assert served == [ServeConfig()]


@pytest.mark.parametrize("spec", dataclasses.fields(ServeConfig), ids=lambda spec: spec.name)
def test_every_flag_reaches_its_field_and_no_other(
    spec: dataclasses.Field[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the checks, which may want flags in combination: what the configuration is given."""
    given: list[dict[str, object]] = []
    monkeypatch.setattr(cli_serve, "ServeConfig", lambda **values: given.append(values))
    monkeypatch.setattr(loop, "serve", lambda config, origins: 0)
    value = _other_value(spec)
    flag = flag_name(spec.name)
    assert _main("serve", *([flag] if value is True else [flag, str(value)])) == 0
    defaults = {field.name: field.default for field in dataclasses.fields(ServeConfig)}
    assert given == [{**defaults, spec.name: value}]


def _other_value(spec: dataclasses.Field[Any]) -> object:
    if isinstance(spec.default, bool):
        return True
    if isinstance(spec.default, int | float):
        return type(spec.default)(spec.default + 1)
    return "some text"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "--port", "65536"], "--port must be at most 65535, got 65536"),
        (["serve", "--port", "many"], "'--port': 'many' is not a valid integer"),
        (["serve", "--tp", "0"], "--tp must be at least 1, got 0"),
        (["serve", "--start-timeout-s", "nan"], "--start-timeout-s must be at least 1.0, got nan"),
        (
            ["serve", "--policy", "lifo"],
            "--policy must be one of chunked, fcfs, mlfq, priority, round-robin, sjf, unified,"
            " MODULE:CLASS, got 'lifo'",
        ),
        (["serve", "--host", "0.0.0.0"], "give --api-key-file, or --insecure-no-auth"),
        (["serve", "--host", ""], "can be reached from other machines"),
        (["serve", "--allowed-hosts", "x", "--api-key-file", "y"], "--allowed-hosts needs"),
        (["serve", "--insecure-no-auth", "--api-key-file", "y"], "--insecure-no-auth contradicts"),
        (["serve", "--served-model-name", " ,"], "--served-model-name must have at least one name"),
        (["serve", "--allowed-hosts", ","], "--allowed-hosts must have at least one name"),
        (["serve", "--ssl-keyfile", "x"], "--ssl-keyfile needs --ssl-certfile"),
        (
            ["serve", "--metrics-host", "0.0.0.0", "--metrics-port", "-1"],
            "--metrics-host '0.0.0.0' needs --metrics-port, not -1",
        ),
        (["serve", "--metrics-port", "-2"], "--metrics-port must be at least -1, got -2"),
        (
            ["serve", "--tpot-slo-ms", "50", "--mtpot-slo-ms", "20"],
            "--mtpot-slo-ms must be at least --tpot-slo-ms (50), got 20",
        ),
        (["serve", "--log-format", "xml"], "--log-format must be one of text, json, got 'xml'"),
        (["serve", "--nope"], "No such option '--nope'"),
        (["serve", "stray"], "unexpected extra argument (stray)"),
        (["nope"], "No such command 'nope'"),
    ],
)
def test_mistakes_end_with_code_2_and_one_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("lightserve: error: ")
    assert expected in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_failed_start_ends_with_code_1_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: ServeConfig, **_: Any) -> int:
        raise StartupError("cannot\nlisten")

    monkeypatch.setattr(loop, "serve", fail)
    assert _main("serve") == 1
    assert capsys.readouterr().err == "lightserve: error: cannot listen\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert _main("--version") == 0
    assert capsys.readouterr().out == f"lightserve {lightserve.__version__}\n"


def test_help_imports_no_subcommand_and_no_heavy_library() -> None:
    script = (
        "import sys\n"
        "from lightserve.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'zmq', 'numpy', 'lightserve.cli.serve'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600, capture_output=True)
