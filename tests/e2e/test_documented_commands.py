"""Every command of README, docs and examples: run, or in a table with the reason why not.

Commands of a block follow each other in one shell, in a directory that looks like the repository,
with the address of a server of this test in place of the usual one.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import torch
from support import documented
from support.documented import ROOT, RULES, Block, Treatment, pages, unnamed
from support.gguf_files import tokens_of, write_gguf
from support.live_server import LiveServer, live_server
from support.object_store import BUCKET, fake_s3
from support.postgres import PostgresServer
from support.processes import PATIENCE_S, wait_for
from support.tiny_encoders import TINY_ENCODERS, write_tiny_encoder

from lightserve.bundled import BUNDLED_MODEL_DIR

BLOCKS = documented.blocks()
SHORTER = (
    ("--duration-s 60", "--duration-s 1"),
    ("--duration-s 30 --skip-first-s 5", "--duration-s 2 --skip-first-s 0"),
    ("--rate 4 --num-requests 100", "--rate 20 --num-requests 10"),
    ("--rate 4 --targets", "--rate 20 --num-requests 10 --targets"),
    ("concurrency=192", "concurrency=4"),
)
"""What would take a minute takes seconds."""
QUICK = {Treatment.RUN, Treatment.CHECKED, Treatment.OPTIONS}


class Place(NamedTuple):
    """Where commands run."""

    root: Path
    programs: Path
    server: LiveServer
    printed: dict[str, str]
    """What they are told in place of what is printed."""


def _wrapper(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    script = ROOT / "tests" / "support" / "documented_programs.py"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$0" "$@"\n')
    path.chmod(0o755)


def _environment_at(path: Path) -> None:
    """Make what stands for a virtual environment that `make` has made."""
    _wrapper(path / "bin" / "lightserve")
    for name in ("python", "pytest"):
        module = "" if name == "python" else "-m pytest -p no:cacheprovider"
        program = path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        program.chmod(0o755)
    (path / "bin" / "activate").write_text(f'PATH="{path}/bin:$PATH"\n')


def _looks_like_the_repository(root: Path) -> None:
    root.mkdir()
    for path in ROOT.iterdir():
        if path.name == "docker":
            shutil.copytree(path, root / path.name, ignore=shutil.ignore_patterns("secrets"))
        elif not path.name.startswith("."):
            (root / path.name).symlink_to(path)
    for name in (".venv", ".venv-clients"):
        _environment_at(root / name)
    secrets = root / "docker" / "secrets"
    secrets.mkdir()
    for name in ("loadtest", "operator"):
        (secrets / f"{name}_key").write_text("a-key-of-at-least-16-characters\n")


def _have_a_log(server: LiveServer, log: Path, path: Path) -> str:
    """Keep a decision log with a request in it; return its name."""
    chat = {"messages": [{"role": "user", "content": "Tell me a story."}]}
    body = {"model": server.model, "max_tokens": 160, "min_tokens": 160, **chat}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    wait_for(lambda: log.read_bytes().count(b'"decision"') > 120, "the log")
    path.write_bytes(log.read_bytes())
    name: str = answer.json()["id"]
    return name


@pytest.fixture(scope="module")
def place(run_parent: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("documented") / "lightserve-repository"
    _looks_like_the_repository(root)
    programs = root.parent / "bin"
    for name in ("lightserve", "make", "docker", "kubectl", "pip", "prometheus"):
        _wrapper(programs / name)
    real_curl = shutil.which("curl")
    (programs / "curl").write_text(f'#!/bin/sh\nexec {real_curl} --fail-with-body -s "$@"\n')
    for name in ("python", "python3"):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    (root / "DIR").symlink_to(BUNDLED_MODEL_DIR)
    # A model that has been downloaded before.
    cached = root.parent / "hub" / "models--Qwen--Qwen2.5-0.5B-Instruct"
    (cached / "snapshots").mkdir(parents=True)
    (cached / "snapshots" / "0").symlink_to(BUNDLED_MODEL_DIR)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0")
    (root / "encoder").mkdir()
    write_tiny_encoder(TINY_ENCODERS[0], root / "encoder")
    (root / "pickled").mkdir()
    torch.save({"weight": torch.ones(2)}, root / "pickled" / "pytorch_model.bin")
    sums = {"model.safetensors": _sha256(BUNDLED_MODEL_DIR / "model.safetensors")}
    (root / "sums.json").write_text(json.dumps(sums))
    log = root.parent / "live.jsonl"
    flags = ("--decision-log", str(log), "--tool-call-parser=hermes")
    with ExitStack() as stack:
        server = stack.enter_context(live_server(run_parent, *flags))
        free = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        database = "postgresql://db.example/lightserve"
        if documented.POSTGRES is None:
            postgres = PostgresServer()
            stack.callback(postgres.close)
            database = postgres.database("lightserve")
        keys = stack.enter_context(fake_s3()).environment.items()
        printed = {
            "AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=… AWS_REGION=…": " ".join(
                f"{name}={value}" for name, value in keys
            ),
            "s3://bucket/": f"s3://{BUCKET}/",
            "/path/to/bge-small-en-v1.5": str(root / "encoder"),
            "/path/to/Qwen3-0.6B": str(root / "DIR"),
            "postgresql://lightserve@db.example/lightserve": database,
            "http://127.0.0.1:8000": server.url,
            "chatcmpl-4f6d0c0b8f1e4c5c9d7d3b1f5a7e2c90": _have_a_log(
                server, log, root / "decisions.jsonl"
            ),
            "/path/to/Qwen2.5-0.5B-Instruct-Q4_K_M.gguf": str(root / "model.gguf"),
            "/path/to/blobs/sha256-00e1317c": str(root / "sha256-00e1317c"),
            "/path/to/old-model": str(root / "pickled"),
            "/path/to/Qwen2.5-0.5B-Instruct": str(root / "DIR"),
            "/path/to/Llama-3-8B": str(root / "DIR"),
            "tcp://127.0.0.1:5557": f"ipc://{server.run_parent}/kv-events",
            "tcp://*:5557": f"tcp://127.0.0.1:{free.getsockname()[1]}",
        }
        free.close()
        yield Place(root, programs, server, printed)


def _sha256(path: Path) -> str:
    return subprocess.run(
        ["sha256sum", path], capture_output=True, text=True, check=True
    ).stdout.split()[0]


def run(place: Place, block: Block, treatments: set[Treatment], *, only_check: bool) -> None:
    """Run what of a block has these treatments, in one shell, up to the first that fails."""
    lines = ["set -eo pipefail"]
    for command in block.commands:
        if command.treatment in treatments:
            text = command.text
            for printed, real in (*place.printed.items(), *SHORTER):
                text = text.replace(printed, real)
            lines.append(text)
    environment = {
        **os.environ,
        "PATH": f"{place.programs}:{os.environ['PATH']}",
        "LIGHTSERVE_URL": place.server.url,
        "HF_HUB_CACHE": str(place.root.parent / "hub"),
        "LIGHTSERVE_ONLY_CHECK": "1" if only_check else "",
        "OMP_NUM_THREADS": "1",
    }
    for name in ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "VENV", "CLIENTS", "PORT", "ARGS"):
        environment.pop(name, None)  # those of the `make test` that runs this
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        input="Where is Mira?\n",  # a question for `make chat`
        cwd=place.root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, f"{block.name}\n{done.stdout}\n{done.stderr}"


def _with(treatments: set[Treatment]) -> list[Block]:
    return [block for block in BLOCKS if any(c.treatment in treatments for c in block.commands)]


@pytest.mark.parametrize("block", _with(QUICK), ids=lambda block: block.name)
def test_what_is_quick(place: Place, block: Block) -> None:
    run(place, block, QUICK, only_check=True)


@pytest.mark.long
@pytest.mark.parametrize(
    "block", _with({Treatment.SLOW, Treatment.CHECKED}), ids=lambda block: block.name
)
def test_everything(place: Place, block: Block) -> None:
    for ending, name in ((".gguf", "model.gguf"), ("/blobs/", "sha256-00e1317c")):
        if any(ending in command.text for command in block.commands):
            tokens = tokens_of(BUNDLED_MODEL_DIR)
            write_gguf(BUNDLED_MODEL_DIR, place.root / name, name="llama", tokens=tokens)
    run(place, block, {Treatment.RUN, Treatment.SLOW, Treatment.CHECKED}, only_check=False)


def test_every_rule_is_about_a_command() -> None:
    commands = [command for block in BLOCKS for command in block.commands]
    used = {command.rule for command in commands}
    assert [rule.pattern for rule in RULES if rule not in used] == []
    counts = Counter(command.treatment for command in commands)
    assert counts[Treatment.NOT_RUN] < 0.1 * len(commands)
    assert counts.total() > 100


def test_no_command_hides_in_a_block_without_a_name() -> None:
    assert {path.name: unnamed(path) for path in pages() if unnamed(path)} == {}


def test_a_command_that_fails_is_found(place: Place) -> None:
    for text in (
        "false",
        "lightserve serve --no-such-flag",
        "curl http://127.0.0.1:8000/nothing",
        "make nothing",
        "docker compose --profile nothing up",
        "docker compose up nginx",  # not in its profile
        "kubectl apply -f nothing.yaml",
        "kubectl rollout status deployment/nothing",
        "pip install 'lightserve[nothing]'",
    ):
        block = Block("page", 1, (documented.Command(text),))
        with pytest.raises(AssertionError, match="page:1"):
            run(place, block, {*Treatment}, only_check=True)


def test_commands_are_split_where_bash_says() -> None:
    script = "# no\n\nfor x in a b\ndo echo $x  # each\ndone\necho 'two\nlines' \\\n  more\n"
    assert documented.split(script) == [
        "for x in a b\ndo echo $x  # each\ndone",
        "echo 'two\nlines' \\\n  more",
    ]
    assert documented.Command("lightserve serve --tp 2").treatment is Treatment.CHECKED
