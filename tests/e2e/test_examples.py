"""Every script of examples/, run against one server, whose policy is an example as well."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.live_server import LiveServer, live_server

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[..., str]


@pytest.fixture(scope="module")
def server(run_parent: Path) -> Iterator[LiveServer]:
    flags = ("--tool-call-parser=hermes", "--policy=own_policy:DeadlinesFirst")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(EXAMPLES))
        with live_server(run_parent, *flags) as running:
            yield running


@pytest.fixture
def run(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Return a function that runs a script and returns what it has printed."""
    monkeypatch.setenv("LIGHTSERVE_URL", server.url)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_openai_client(run: Run) -> None:
    printed = run("openai_client.py")
    assert printed.startswith("model: lightserve-tiny\nanswer: ")
    assert "brass lantern" in printed.splitlines()[1]
    usage = re.search(r"\nusage: (\d+) \+ (\d+) tokens\n$", printed)
    assert usage is not None
    assert 0 < int(usage[1]) < int(usage[2]) <= 300


def test_flex_batch(run: Run) -> None:
    prompts = EXAMPLES / "prompts.txt"
    answers = [json.loads(line) for line in run("flex_batch.py", str(prompts)).splitlines()]
    assert sorted(answer["line"] for answer in answers) == list(
        range(1, 1 + len(prompts.read_text().splitlines()))
    )
    assert {answer["tier"] for answer in answers} == {"flex"}
    assert all(answer["answer"] for answer in answers)


def test_targets(run: Run) -> None:
    lines = run("targets.py").splitlines()
    verdict = re.compile(r"(\w+): asked \d+, seen [0-9.]+: (met|missed)")
    judged = [match[1] for line in lines if (match := verdict.fullmatch(line))]
    assert judged == ["ttft_ms", "tpot_ms", "mtpot_ms"]


def test_structured_output(run: Run) -> None:
    found, sentence = run("structured_output.py").splitlines()
    assert found.startswith("json: {'owner': ")
    assert re.fullmatch(r"regex: The paper kite is with [A-Z][a-z]+\.", sentence)


def test_tools(run: Run) -> None:
    called, said = run("tools.py").splitlines()
    assert re.fullmatch(r"find_thing\(\{'thing': '\w+'\}\) -> the \w+", called)
    assert said.startswith("answer: ")


def test_load_test(server: LiveServer, tmp_path: Path) -> None:
    bin_dir = Path(sys.executable).parent
    subprocess.run(
        [EXAMPLES / "load_test.sh", "--duration-s=1", "--rate=6", "--drain-s=300"],
        env={**os.environ, "LIGHTSERVE_URL": server.url, "PATH": f"{bin_dir}:{os.environ['PATH']}"},
        cwd=tmp_path,
        check=True,
    )
    (run,) = json.loads((tmp_path / "load_test.json").read_text())["runs"]
    assert set(run["classes"]) >= {"rt", "be"}, run.keys()
