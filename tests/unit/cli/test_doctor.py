"""`lightserve doctor`: true, complete, and silent about secrets; `--version`, `models`."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from huggingface_hub import constants, errors

import lightserve
from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.cli import doctor, models
from lightserve.cli.main import cli
from lightserve.config import ServeConfig
from lightserve.errors import StartupError
from lightserve.logs import one_line
from lightserve.supervisor.startup import resolve_model


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "HF_HOME" / "hub"))


def test_the_facts_are_whole_and_have_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cret-value")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(doctor, "torch_facts", lambda: {"version": "1.2", "gpus": []})
    as_json = CliRunner().invoke(doctor.command, ["--json"], catch_exceptions=False)
    as_text = CliRunner().invoke(doctor.command, [], catch_exceptions=False)
    document = json.loads(as_json.output)
    assert document["versions"]["lightserve"] == lightserve.__version__
    assert document["versions"]["pyzmq"][0].isdigit()
    assert document["environment"]["OMP_NUM_THREADS"] == "1"
    assert document["environment"]["HF_TOKEN"] == "***"
    assert document["torch"]["version"] == "1.2"
    assert document["cpu"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert 0 < document["memory"]["available_bytes"] < document["memory"]["total_bytes"]
    fields = {spec.name: spec.default for spec in dataclasses.fields(ServeConfig)}
    assert document["defaults"] == fields
    names = [check["name"] for check in document["checks"]]
    assert names == [
        *("packages", "native core", "cores", "memory", "huge pages", "GPU", "open files"),
        *("threads", "port", "batch store", "cache"),
    ]
    assert [name for name in names if f"{name:<12}" not in as_text.output] == []
    assert "s3cret" not in as_json.output + as_text.output


GPU = {"name": "H100"}
FACTS: dict[str, Any] = {
    "versions": {"lightserve": "0", "triton": "3.6"},
    "core": {"level": "AVX2", "sources": "0"},
    "cpu": {"usable_cores": 2, "model": "m"},
    "memory": {"available_bytes": 1 << 33},
    "huge_pages": {"transparent": "madvise"},
    "torch": {"version": "2", "cuda": None, "gpus": []},
    "gpu_driver": {},
}


@pytest.mark.parametrize(
    ("changes", "name", "advice", "is_fatal"),
    [
        ({"versions": {"pyzmq": "not installed"}}, "packages", "pip install pyzmq", True),
        ({"core": {"missing": "no compiler"}}, "native core", "--force-reinstall", False),
        ({"cpu": {"usable_cores": 1, "model": "m"}}, "cores", "two or more", False),
        ({"memory": {"available_bytes": 1 << 29}}, "memory", "--kv-memory", False),
        (
            {"memory": {"available_bytes": 1 << 40, "cgroup_limit_bytes": 1}},
            "memory",
            "--kv-memory",
            False,
        ),
        ({"huge_pages": {"transparent": "never"}}, "huge pages", "echo madvise", False),
        ({"torch": {"error": "broken"}}, "torch", "install torch anew", True),
        ({"gpu_driver": {"nvrm": "580"}}, "GPU", "build of torch for CUDA", False),
        (
            {"torch": {"version": "2", "gpus": [GPU]}, "versions": {}},
            "GPU",
            "triton is missing",
            False,
        ),
    ],
    ids=str,
)
def test_what_a_machine_lacks_is_named_with_the_remedy(
    changes: dict[str, Any], name: str, advice: str, is_fatal: bool
) -> None:
    assert [check for check in doctor.checks(FACTS) if check.advice] == []
    found = {check.name: check for check in doctor.checks(FACTS | changes)}
    assert advice in found[name].advice and found[name].is_fatal is is_fatal
    assert [check.name for check in found.values() if check.advice and check.name != name] == []


def test_places_and_ports_that_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "file" / "below"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor, "ServeConfig", lambda: ServeConfig(port=port))
        found = {check.name: check for check in doctor._tried()}
    assert found["port"].is_fatal and "--port takes another" in found["port"].advice
    for name, variable in (("batch store", "XDG_STATE_HOME"), ("cache", "XDG_CACHE_HOME")):
        assert found[name].fact == f"{tmp_path / 'file'} cannot be written"
        assert variable in found[name].advice and not found[name].is_fatal
    assert not found["threads"].advice


def test_the_version_names_commit_and_core() -> None:
    printed = CliRunner().invoke(cli, ["--version"], catch_exceptions=False).output
    form = rf"lightserve {lightserve.__version__} \(commit (\S+); native core: .+\)\n"
    assert re.fullmatch(form, printed)


def test_the_models_that_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = tmp_path / "HF_HOME" / "hub"
    for name, architecture in (("good", None), ("odd", "MambaForCausalLM")):
        snapshot = hub / f"models--me--{name}" / "snapshots" / ("0" * 40)
        shutil.copytree(BUNDLED_MODEL_DIR, snapshot)
        if architecture:
            config = json.loads((snapshot / "config.json").read_text())
            config["architectures"] = [architecture]
            (snapshot / "config.json").write_text(json.dumps(config))
    done = CliRunner().invoke(models.command, [], catch_exceptions=False)
    lines = {line.split()[0]: line for line in done.output.splitlines()}
    assert list(lines) == ["lightserve-tiny", "me/good", "me/odd"]
    assert lines["me/good"].endswith("GiB  LlamaForCausalLM")
    assert "not served: " in lines["me/odd"] and "MambaForCausalLM" in lines["me/odd"]
    as_json = CliRunner().invoke(models.command, ["--json"], catch_exceptions=False)
    assert [model["name"] for model in json.loads(as_json.output)] == list(lines)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            errors.LocalEntryNotFoundError("Got: ConnectError: no network\nAnd more."),
            "the hub cannot be reached: ConnectError: no network (",
        ),
        (
            errors.RepositoryNotFoundError("x", response=Mock()),
            "no such repository, or a private one (HF_TOKEN)",
        ),
        (errors.GatedRepoError("x", response=Mock()), "accepted its terms there (HF_TOKEN)"),
        (OSError("disk\nfull"), "the hub did not give it: "),
    ],
)
def test_a_model_that_the_hub_does_not_give(
    error: Exception, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=error))
    with pytest.raises(StartupError) as caught:
        resolve_model(ServeConfig(model="me/none"))
    message = one_line(caught.value)
    assert message.startswith("--model me/none: no such directory, and ") and why in message
    assert message.endswith("(lightserve models lists what is here)")


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("OPENAI_API_KEY", "sk-1", "***"),
        ("HUGGING_FACE_HUB_TOKEN", "hf", "***"),
        ("LIGHTSERVE_PASSWORD", "x", "***"),
        ("TOKENIZERS_PARALLELISM", "false", "false"),
        ("CUDA_VISIBLE_DEVICES", "0,1", "0,1"),
        ("HF_ENDPOINT", "https://me:pw@hub.example/x", "https://***@hub.example/x"),
        ("HOME", "/home/me", None),
        ("AWS_SECRET_ACCESS_KEY", "x", None),
    ],
)
def test_variables(name: str, value: str, shown: str | None) -> None:
    assert doctor.environment({name: value}) == ({} if shown is None else {name: shown})


def test_files_of_the_kernel_are_read_as_they_are_written() -> None:
    text = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 avx512f amx_tile\n"
    facts = doctor.cpu(text)
    assert facts["model"] == "Some CPU"
    assert facts["features"] == ["avx2", "avx512f", "amx_tile"]
    assert doctor.memory("MemTotal:  10 kB\nMemFree: 3 kB\nMemAvailable: 4 kB\n") == {
        "total_bytes": 10240,
        "available_bytes": 4096,
    }


def test_a_gpus_driver() -> None:
    text = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
        "GCC version:  gcc version 12.3.0 (Ubuntu)\n"
    )
    assert doctor.gpu_driver(text) == {
        "nvrm": "NVIDIA UNIX Open Kernel Module for x86_64 580.159.04 Release Build",
        "gcc": "gcc version 12.3.0 (Ubuntu)",
    }
    assert doctor.gpu_driver("") == {}


def test_torch_is_asked_elsewhere() -> None:
    facts = doctor.torch_facts()
    assert isinstance(facts["version"], str), facts
    assert isinstance(facts["gpus"], list)
    script = (
        "import sys, lightserve.cli.doctor as command\n"
        "command.collect()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("print('no json')", "JSONDecodeError"),
        ("pass", "IndexError"),
    ],
)
def test_a_broken_torch_is_reported(script: str, expected: str) -> None:
    assert expected in doctor.torch_facts((sys.executable, "-c", script))["error"]
