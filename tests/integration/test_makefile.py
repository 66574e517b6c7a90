"""The Makefile's stamps, with commands that only print; clients without the server's packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lightserve

ROOT = Path(lightserve.__file__).parents[1]
OF_OUTER_MAKE = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
"""What `make test` would hand on."""


ALONE = "--no-deps --no-build-isolation"
"""Of the package itself: what it needs is there, by hashes, its build backend included."""


def _install(venv: Path, torch: str) -> list[str]:
    """Have everything for `make serve` installed; returns what pip would have been given."""
    settings = [f"VENV={venv}", f"TORCH={torch}", "PYTHON=true", "PIP=@echo install"]
    done = subprocess.run(
        ["make", str(venv / ".has-serve"), *settings],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    lines = done.stdout.splitlines()
    return [line.split(" ", 1)[1] for line in lines if line.startswith("install ")]


def test_each_change_of_torch_installs_it_and_no_other_time_does(tmp_path: Path) -> None:
    first = [_install(tmp_path, torch) for torch in ("torch==2", "torch==1", "torch==2")]
    locked, package = "--require-hashes --requirement requirements/serve.txt", f"{ALONE} -e ."
    assert first == [[locked, f"torch=={version}", package] for version in (2, 1, 2)]
    assert _install(tmp_path, "torch==2") == []


def _dry_run(*arguments: str) -> str:
    done = subprocess.run(
        ["make", "--dry-run", "PYTHON=python-of-it", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in OF_OUTER_MAKE},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return done.stdout


def test_the_tests_install_nothing_without_a_hash_but_torch() -> None:
    commands = _dry_run("VENV=new", "new/.has-test", "new/supply/.has-supply", "TORCH=some-torch")
    installs = [line for line in commands.splitlines() if "pip install" in line]
    assert [line for line in installs if "--require-hashes" not in line and ALONE not in line] == [
        "new/bin/python -m pip install --quiet --disable-pip-version-check 'some-torch'"
    ]
    # torch after what it needs, so that nothing of that is taken from elsewhere.
    assert ["serve.txt" in line for line in installs][:2] == [True, False]
    assert "some-torch" in installs[1]


def test_long_tests_run_only_where_they_are_asked_for() -> None:
    assert "SOAK_MINUTES=10 " in (long := _dry_run("test-long", "SOAK_MINUTES=10"))
    assert "-m 'long and not soak'" in long and "-m soak" in long and "long" not in _dry_run("test")
    assert "-m soak" not in _dry_run("test-long", "SOAK_MINUTES=0")
    with (ROOT / "pyproject.toml").open("rb") as file:
        pytest_options = tomllib.load(file)["tool"]["pytest"]["ini_options"]
    assert "-m 'not long'" in pytest_options["addopts"]


def test_the_gpu_check_with_wheels_fetches_nothing() -> None:
    commands = _dry_run("gpu-check", "WHEELS=some-wheels", "GPU_OUT=there", "ARGS=ceilings")
    assert "python-of-it -m pip install" in commands and "some-wheels/*.whl" in commands
    assert "--no-index" in commands and "--no-deps" in commands and "venv" not in commands
    assert commands.rstrip().endswith("python-of-it -m bench.gpu --out there ceilings")


def test_wheels_for_the_gpu_check_are_downloaded_for_its_python() -> None:
    commands = _dry_run("gpu-wheels", "WHEELS_FOR=3.13")
    assert "pip download" in commands and "--python-version 3.13" in commands
    assert "--dest .whl --requirement bench/gpu/wheels.txt" in commands


CLIENT_EXTRAS = ("bench", "chat", "plots")


def _client_requirements() -> list[str]:
    command = [sys.executable, "requirements/clients.py", "pyproject.toml", *CLIENT_EXTRAS]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True
    )
    return [re.split(r"[^A-Za-z0-9_.-]", line)[0] for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("target", "program"),
    [
        ("chat", "bin/lightserve chat --more"),
        ("bench-client", "bin/lightserve bench --more"),
    ],
)
def test_clients_get_an_environment_without_torch(
    target: str, program: str, tmp_path: Path
) -> None:
    clients = tmp_path / "clients"
    commands = _dry_run(target, f"CLIENTS={clients}", "ARGS=--more", "VENV=not-this-one")
    assert commands.rstrip().endswith(f"{clients}/{program}")
    assert f"{ALONE} -e ." in commands
    assert "--require-hashes --requirement requirements/clients.txt" in commands
    assert f"pyproject.toml {' '.join(CLIENT_EXTRAS)} >" in _dry_run("lock")
    assert "not-this-one" not in commands and "torch==" not in commands
    assert "torch" not in _client_requirements()


def _without_the_server(*arguments: str, question: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program where of the project's packages only those of clients can be imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[^A-Za-z0-9_.-]", line)[0] for line in project["dependencies"]}
    modules = {"pyzmq": "zmq", "pyyaml": "yaml"}
    hidden = {modules.get(name, name) for name in names - set(_client_requirements())}
    assert {"torch", "fastapi", "zmq"} <= hidden and not hidden & {"httpx", "click", "aiohttp"}
    script = (
        f"import runpy, sys\nsys.modules.update(dict.fromkeys({sorted(hidden)}))\n"
        "sys.argv = sys.argv[1:]\n"
        "import os; sys.path.insert(0, os.path.dirname(sys.argv[0]) or '.')\n"
        "runpy.run_path(sys.argv[0], run_name='__main__') if sys.argv[0].endswith('.py') else "
        "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        input=question,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("lightserve", "chat", "--url", "http://127.0.0.1:1"), "lightserve: error: "),
        (("bench/load_test.py", "--url", "http://127.0.0.1:1", "--rate", "1"), "127.0.0.1:1"),
        (("lightserve", "bench", "--url", "http://127.0.0.1:1", "--rate", "1"), "127.0.0.1:1"),
    ],
    ids=lambda value: str(value)[:32],
)
def test_clients_run_without_the_servers_packages(
    arguments: tuple[str, ...], expected: str
) -> None:
    done = _without_the_server(*arguments, question="Hello")
    assert done.returncode == 1, done.stderr
    assert expected in done.stderr and "is missing" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_without_its_packages_says_how_to_get_them() -> None:
    done = _without_the_server("lightserve", "serve")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "is missing: this command needs the packages of the server" in done.stderr
    assert "pip install -e ." in done.stderr


def test_the_first_install_says_how_large_it_is() -> None:
    commands = _dry_run("serve", "VENV=none-there", "TORCH=some-torch")
    echo, install = (commands.index(words) for words in ("about 1 GB", "pip install"))
    assert echo < install and "some-torch" in commands[echo - 200 : echo]


def test_the_cache_outside_is_named_and_removed_on_demand(tmp_path: Path) -> None:
    assert "XDG_CACHE_HOME" in _dry_run("clean") and "clean-cache" in _dry_run("clean")
    (tmp_path / "lightserve" / "profiles").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    subprocess.run(
        ["make", "clean-cache"],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        timeout=600,
        check=True,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
