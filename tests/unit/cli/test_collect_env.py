"""`lightserve collect-env`: true, complete, and silent about secrets."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

import lightserve
from lightserve.cli import collect_env
from lightserve.config import ServeConfig


def test_json_and_text_say_the_same_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cret-value")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(collect_env, "torch_facts", lambda: {"version": "1.2"})
    as_json = CliRunner().invoke(collect_env.command, ["--json"], catch_exceptions=False)
    as_text = CliRunner().invoke(collect_env.command, [], catch_exceptions=False)
    document = json.loads(as_json.output)
    assert document["versions"]["lightserve"] == lightserve.__version__
    assert document["versions"]["pyzmq"][0].isdigit()
    assert document["environment"]["OMP_NUM_THREADS"] == "1"
    assert document["environment"]["HF_TOKEN"] == "***"
    assert document["torch"] == {"version": "1.2"}
    assert document["cpu"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert 0 < document["memory"]["available_bytes"] < document["memory"]["total_bytes"]
    fields = {spec.name: spec.default for spec in dataclasses.fields(ServeConfig)}
    assert document["defaults"] == fields
    for section, values in document.items():
        assert f"{section}:\n" in as_text.output
        assert all(f"  {name}: " in as_text.output for name in values)
    assert "s3cret" not in as_json.output + as_text.output


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
    assert collect_env.environment({name: value}) == ({} if shown is None else {name: shown})


def test_files_of_the_kernel_are_read_as_they_are_written() -> None:
    text = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 avx512f amx_tile\n"
    facts = collect_env.cpu(text)
    assert facts["model"] == "Some CPU"
    assert facts["features"] == ["avx2", "avx512f", "amx_tile"]
    assert collect_env.memory("MemTotal:  10 kB\nMemFree: 3 kB\nMemAvailable: 4 kB\n") == {
        "total_bytes": 10240,
        "available_bytes": 4096,
    }


def test_a_gpus_driver() -> None:
    text = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
        "GCC version:  gcc version 12.3.0 (Ubuntu)\n"
    )
    assert collect_env.gpu_driver(text) == {
        "nvrm": "NVIDIA UNIX Open Kernel Module for x86_64 580.159.04 Release Build",
        "gcc": "gcc version 12.3.0 (Ubuntu)",
    }
    assert collect_env.gpu_driver("") == {}


def test_torch_is_asked_elsewhere() -> None:
    facts = collect_env.torch_facts()
    assert isinstance(facts["version"], str), facts
    assert isinstance(facts["gpus"], list)
    script = (
        "import sys, lightserve.cli.collect_env as command\n"
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
    assert expected in collect_env.torch_facts((sys.executable, "-c", script))["error"]
