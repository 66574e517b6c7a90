"""Starts that must fail: exit code, one line that names the culprit, no traceback, nothing left."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from click.testing import CliRunner
from support.model_files import CONFIG, write_model_files

from lightserve.cli import main as cli_main
from lightserve.cli import serve as cli_serve
from lightserve.config import ServeConfig
from lightserve.config.fields import flag_name
from lightserve.errors import ConfigError, StartupError
from lightserve.frontend.connections import MIN_CONNECTIONS, connection_table
from lightserve.supervisor import loop
from lightserve.supervisor.spawn import RunDir
from lightserve.supervisor.startup import check_model, check_threads, resolve_model

FORKING = """
import json, os, sys
from lightserve.cli import main, serve
from lightserve.supervisor import loop
for line in sys.stdin:
    arguments, environment, *files = json.loads(line)
    if (pid := os.fork()) == 0:
        os.environ.update(environment)
        for number, file in enumerate(("/dev/null", *files)):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
        main.main(arguments)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""Runs each command in a process of its own that has imported already what commands need."""

_POLICIES = ", ".join(ServeConfig.__dataclass_fields__["policy"].metadata["choices"])


@pytest.fixture(scope="module", autouse=True)
def forking() -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", FORKING], stdin=pipe, stdout=pipe, text=True
    ) as process:
        _serve.process = process  # type: ignore[attr-defined]
        yield process


def _serve(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `lightserve serve` to its end."""
    process = _serve.process  # type: ignore[attr-defined]
    arguments = ["serve", "--metrics-port", "0", *flags]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "stdout", Path(folder) / "stderr"]
        print(
            json.dumps([arguments, environment, *map(str, files)]), file=process.stdin, flush=True
        )
        code = int(process.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, *(file.read_text() for file in files))


def _assert_one_line(
    result: subprocess.CompletedProcess[str], *expected: str, exit_code: int = 1
) -> None:
    assert result.returncode == exit_code
    assert result.stdout == ""
    assert result.stderr.startswith("lightserve: error: ")
    assert result.stderr.count("\n") == 1
    for text in expected:
        assert text in result.stderr


def test_port_in_use_names_host_and_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = _serve("--port", str(port))
    _assert_one_line(result, f"cannot listen on 127.0.0.1 port {port}", "in use", "--port takes")


def test_metrics_port_in_use_names_flag_and_value() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = _serve("--port", "0", "--metrics-port", str(port), "--model", "/nowhere")
    _assert_one_line(result, f"--metrics-port {port}", "in use")


def test_the_port_is_taken_before_the_model_is_looked_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = _serve("--port", str(port), "--model", "/nowhere")
    _assert_one_line(result, f"port {port}")


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-16])


def _config(**changes: object) -> Callable[[Path], object]:
    text = json.dumps({**CONFIG, **changes})
    return lambda folder: (folder / "config.json").write_text(text)


BAD_MODELS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no config": (lambda d: (d / "config.json").unlink(), ["config.json"]),
    "truncated config": (lambda d: (d / "config.json").write_text("{"), ["config.json"]),
    "wrong type": (_config(hidden_size="16"), ["config.json", "hidden_size"]),
    "unknown architecture": (_config(architectures=["GPT5"]), ["architectures", "GPT5"]),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), ["model.safetensors"]),
    "truncated weights": (lambda d: _truncate(d / "model.safetensors"), ["model.safetensors"]),
    "missing tensor": (_config(num_hidden_layers=2), ["model.safetensors", "model.layers.1"]),
    "wrong shape": (_config(vocab_size=65), ["model.safetensors", "model.embed_tokens.weight"]),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), ["tokenizer.json"]),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_bad_model_directories_name_file_and_key(case: str, tmp_path: Path) -> None:
    spoil, expected = BAD_MODELS[case]
    model = write_model_files(tmp_path / "model")
    spoil(model)
    _assert_one_line(_serve("--port", "0", "--model", str(model)), *expected)


def test_a_model_without_a_layer_that_guesses_does_not_start() -> None:
    result = _serve("--port", "0", "--speculation", "mtp")
    _assert_one_line(
        result, "config.json", "'architectures'", "--speculation mtp", "LlamaForCausalLM"
    )


def _flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 16  # within the last tensor: the file is whole, and its numbers are finite
    file.write_bytes(data)


def test_a_flipped_bit_is_found_before_listening(tmp_path: Path) -> None:
    model = write_model_files(tmp_path / "model")
    weights = model / "model.safetensors"
    manifest = tmp_path / "manifest.json"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    manifest.write_text(json.dumps({weights.name: digest}))
    config = ServeConfig(model=str(model), model_sha256=str(manifest))
    check_model(config)
    _flip_a_bit(weights)
    check_model(dataclasses.replace(config, model_sha256=""))  # which cannot see it
    result = _serve("--port", "0", "--model", str(model), "--model-sha256", str(manifest))
    _assert_one_line(result, str(weights), digest, str(manifest))


def test_an_empty_directory(tmp_path: Path) -> None:
    _assert_one_line(_serve("--port", "0", "--model", str(tmp_path)), "config.json")


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    _assert_one_line(_serve("--port", "0", "--model", missing), "--model", missing)


@pytest.mark.parametrize(
    ("flag", "content", "expected"),
    [
        ("--profile", None, "no such file"),
        ("--profile", "{}", "is no profile"),
        ("--chat-template", None, "no such file"),
        ("--model-sha256", None, "no such file"),
    ],
)
def test_files_that_are_no_use_are_found_before_the_weights_are_loaded(
    flag: str, content: str | None, expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_text(content)
    result = _serve("--port", "0", flag, str(file))
    _assert_one_line(result, f"{flag} {file}", expected, exit_code=2)


def test_a_hub_id_without_network() -> None:
    result = _serve("--port", "0", "--model", "no-org/no-model", HF_HUB_OFFLINE="1")
    _assert_one_line(
        result, "--model no-org/no-model", "HF_HUB_OFFLINE is set", "lightserve models"
    )


def test_tensor_parallel_degree_that_does_not_divide(tmp_path: Path) -> None:
    model = write_model_files(tmp_path)
    result = _serve("--port", "0", "--model", str(model), "--tp", "3")
    _assert_one_line(result, "num_attention_heads", "4", "--tp 3")


WRONG_ARGUMENTS: dict[str, tuple[list[str], list[str]]] = {
    "no size": (["--kv-memory", "banana"], ["--kv-memory", "'banana'"]),
    "no memory": (["--kv-memory", "0MiB"], ["--kv-memory", "'0MiB'"]),
    "above the model": (["--max-model-len", "129"], ["--max-model-len", "128", "129"]),
    "no room for output": (["--max-model-len", "1"], ["--max-model-len", "at least 2"]),
    "no template": (["--chat-template", "/nowhere/x.jinja"], ["--chat-template", "/nowhere"]),
    "directory as template": (["--chat-template", "/"], ["--chat-template /:"]),
    "no text": (["--chat-template", sys.executable], ["--chat-template", "UTF-8"]),
    "kernels that do not exist": (
        ["--batch-invariant", "--attention-backend", "reference"],
        ["--batch-invariant", "--attention-backend", "reference"],
    ),
    "type that varies": (["--batch-invariant", "--dtype", "bfloat16"], ["--dtype", "bfloat16"]),
}


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_wrong_arguments_are_found_before_anything_is_started(case: str, tmp_path: Path) -> None:
    flags, expected = WRONG_ARGUMENTS[case]
    model = write_model_files(tmp_path / "model")
    (run_parent := tmp_path / "run").mkdir()
    made_ns = run_parent.stat().st_mtime_ns
    result = _serve("--port", "0", "--model", str(model), "--run-dir", str(run_parent), *flags)
    _assert_one_line(result, *expected, exit_code=2)
    assert run_parent.stat().st_mtime_ns == made_ns  # no run directory was ever made in it


def test_weights_are_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some repositories hold the makers' own format too."""
    files = [
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    others = ["consolidated.safetensors", "original/x.safetensors", "original/params.json", "a.bin"]
    fetched: list[str] = []

    def download(repo_id: str, **options: Any) -> str:
        patterns = {key: options[key] for key in ("allow_patterns", "ignore_patterns")}
        fetched.extend(huggingface_hub.utils.filter_repo_objects([*files, *others], **patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_model(ServeConfig(model="makers/model"))
    assert fetched == files


def test_run_dir_that_cannot_be_used(tmp_path: Path) -> None:
    model = str(write_model_files(tmp_path / "model"))
    (tmp_path / "file").touch()
    result = _serve("--port", "0", "--model", model, "--run-dir", str(tmp_path / "file"))
    _assert_one_line(result, "--run-dir", str(tmp_path / "file"))
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    result = _serve("--port", "0", "--model", model, "--run-dir", str(deep))
    _assert_one_line(result, "--run-dir", "limit is 107")
    assert list(deep.iterdir()) == []


def test_no_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    with pytest.raises(StartupError, match="--run-dir: there is no temporary directory"):
        RunDir("")


def test_too_few_threads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any process is started, which would end in the middle of a library."""
    check_threads(ServeConfig())
    num_before = threading.active_count()
    start, started = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if len(started) == 30:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(StartupError, match=r"\(ulimit -u, .*\) leaves 30, but 104 are needed"):
        check_threads(ServeConfig(http_workers=2, tp=2))
    assert threading.active_count() == num_before


@pytest.mark.parametrize("num_left", [50, 240])
def test_a_limit_of_open_files(num_left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few are refused in words; with few there are fewer connections."""
    num_files = num_left + len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counts itself as well
    fake = SimpleNamespace(**vars(resource))
    fake.getrlimit, fake.setrlimit = lambda _: (num_files, num_files), lambda *_: None
    monkeypatch.setattr("lightserve.frontend.connections.resource", fake)
    if num_left == 50:
        refusal = rf"open files \(ulimit -n\) must be .*, got {num_files}"
        with pytest.raises(ConfigError, match=refusal):
            connection_table(ServeConfig(), Counter())
        return
    table = connection_table(ServeConfig(), Counter())
    members = [Idle() for _ in range(300)]
    for member in members:
        table.add(member, "ip")
    assert MIN_CONNECTIONS <= table.num_open < num_left


class Idle:
    def evict(self) -> None:
        pass

    def refuse_body(self) -> None:
        pass


def test_debug_logging_brings_the_traceback() -> None:
    result = _serve("--port", "0", "--model", "/nowhere", "--log-level", "debug")
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("lightserve: error: --model")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    result = _serve("--port", "0", "--device", "cuda", "--profile", "off", "--log-level", "error")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert "worker-0: --device cuda: rank 0 needs a GPU, found 0" in last


# The command line: flags come from the configuration, mistakes end with code 2 and one line.


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
        (["serve", "--policy", "lifo"], f"--policy must be one of {_POLICIES}, got 'lifo'"),
        (["serve", "--host", "0.0.0.0"], "give --api-key-file, or --insecure-no-auth"),
        (["serve", "--host", ""], "can be reached from other machines"),
        (["serve", "--allowed-hosts", "x", "--api-key-file", "y"], "--allowed-hosts needs"),
        (["serve", "--insecure-no-auth", "--api-key-file", "y"], "--insecure-no-auth contradicts"),
        (["serve", "--served-model-name", " ,"], "--served-model-name must have at least one name"),
        (["serve", "--allowed-hosts", ","], "--allowed-hosts must have at least one name"),
        (["serve", "--ssl-keyfile", "x"], "--ssl-keyfile needs --ssl-certfile"),
        (
            ["serve", "--metrics-host", "0.0.0.0", "--metrics-port", "-1"],
            "--metrics-host needs --metrics-port, got -1",
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
