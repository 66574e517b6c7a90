"""The table of `make gpu-check`: verdicts, parts that fail, traces, the arithmetic of floors."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.processes import wait_gone

from bench.gpu import table
from bench.gpu.__main__ import PARTS, with_weights
from bench.gpu.attention import Chunk, Heads, Order, slot_table
from bench.gpu.device import DELAY_CYCLES, MAX_ROUNDS, Machine, idle_pct, overlapped_pct
from bench.gpu.models import LLAMA_8B, QWEN_HALF_B, TINY_LLAMA, RandomModel
from bench.gpu.table import (
    Job,
    Row,
    RowFile,
    Verdict,
    exit_status,
    markdown_row,
    read_rows,
    run_job,
    run_jobs,
    summary,
)

ROOT = Path(__file__).parents[3]


def rows_of(path: Path, *, is_rehearsal: bool) -> list[Row]:
    rows = RowFile(path, "part", is_rehearsal=is_rehearsal)
    rows.figure("high enough", 80.0, "%", at_least=80.0)
    rows.figure("too slow", 1.26, "x", at_most=1.25)
    rows.figure("no number", float("nan"), "x", at_most=1.25)
    rows.figure("reported", 3.0, "GB/s", note="why")
    rows.claim("true", True, "")
    rows.claim("false", False, "by 3")
    rows.skip("elsewhere", "one GPU")
    return read_rows(path)


def test_figures_are_judged(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "rows", is_rehearsal=False)
    assert [row.verdict for row in rows] == [
        Verdict.MET,
        Verdict.MISSED,
        Verdict.MISSED,
        Verdict.REPORTED,
        Verdict.MET,
        Verdict.FAILED,
        Verdict.SKIPPED,
    ]
    lines = [markdown_row(row) for row in rows]
    assert lines[0] == "| part | high enough | 80 % | >= 80 | met |"
    assert lines[3] == "| part | reported (why) | 3 GB/s |  |  |"
    assert summary(rows).splitlines()[1] == "met 2, MISSED 2, FAILED 1, not run 1"
    assert summary(rows).splitlines()[2:] == [lines[1], lines[2], lines[5]]


def test_a_rehearsal_judges_no_figure_but_what_is_wrong(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "rows", is_rehearsal=True)
    assert [row.verdict for row in rows[:4]] == [Verdict.REHEARSED] * 4
    assert [row.verdict for row in rows[4:]] == [Verdict.MET, Verdict.FAILED, Verdict.SKIPPED]


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        ([Verdict.MET, Verdict.REPORTED, Verdict.SKIPPED], 0),
        ([Verdict.MET, Verdict.MISSED], 1),
        ([Verdict.MISSED, Verdict.FAILED, Verdict.MET], 2),
    ],
)
def test_exit_status_says_the_worst(verdicts: list[Verdict], status: int) -> None:
    rows = [Row("part", "name", None, "", "", verdict) for verdict in verdicts]
    assert exit_status(rows) == status


ROW = json.dumps(
    {
        "part": "p",
        "name": "n",
        "value": 1.0,
        "unit": "",
        "target": "",
        "verdict": "",
        "note": "",
    }
)
WRITE = f"import sys, time; open(sys.argv[1], 'a').write({ROW!r} + chr(10)); "


@pytest.mark.parametrize(
    ("code", "notes"),
    [
        (WRITE, []),
        (WRITE + "raise ValueError('in a | kernel')", ["exit code 1: ValueError: in a / kernel"]),
        (WRITE + "open(sys.argv[1], 'a').write('{half'); time.sleep(600)", ["ended after its 5 s"]),
        ("pass", ["gave no figure"]),
    ],
)
def test_a_part_that_fails_keeps_its_rows(code: str, notes: list[str], tmp_path: Path) -> None:
    limit_s = 5.0 if "sleep" in code else 300.0
    job = Job("p", [sys.executable, "-S", "-c", code], limit_s, {})
    rows = run_job(job, tmp_path, left_s=400.0)
    failures = [row for row in rows if row.verdict is Verdict.FAILED]
    assert [row.note for row in failures] == notes
    assert rows[-1].unit == "s" and rows[-1].name == "the part"
    assert len(rows) - len(failures) == (2 if "write" in code else 1)


def test_parts_run_in_their_order_and_only_untimed_ones_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_run = Barrier(2, timeout=60)
    events: list[str] = []

    def run(job: Job, out: Path, *, left_s: float) -> list[Row]:
        events.append(f"begin {job.part}")
        if not job.is_timed:
            both_run.wait()
        events.append(f"end {job.part}")
        return [Row(job.part, "", left_s, "", "", Verdict.REPORTED)]

    monkeypatch.setattr(table, "run_job", run)
    jobs = [
        Job(name, [], 60.0, {}, is_timed=is_timed)
        for name, is_timed in (("a", True), ("b", False), ("c", False), ("d", True))
    ]
    found = list(run_jobs(jobs, tmp_path, limit_s=100.0, at_once=2))
    assert [row.part for [row] in found] == ["a", "b", "c", "d"]
    assert all(90.0 < (row.value or 0.0) <= 100.0 for [row] in found)
    assert events[:2] == ["begin a", "end a"] and events[-2:] == ["begin d", "end d"]
    assert set(events[2:4]) == {"begin b", "begin c"}


def test_weights_are_written_only_for_parts_that_need_them() -> None:
    assert with_weights(["sampling", "ceilings"]) == ["ceilings", "sampling"]
    assert with_weights(["through-http", "mission"]) == ["weights", "mission", "through-http"]
    assert with_weights(list(PARTS)) == list(PARTS)
    kinds = [PARTS[name].is_timed for name in PARTS]
    assert [key for key, _ in groupby(kinds)] == [True, False, True]  # checks: one group


def test_what_a_part_started_ends_with_it(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = (
        "import subprocess, sys; "
        f"p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"open({str(started)!r}, 'w').write(str(p.pid)); raise SystemExit(3)"
    )
    run_job(Job("p", [sys.executable, "-c", code], 300.0, {}), tmp_path, left_s=400.0)
    wait_gone([int(started.read_text())])


def test_no_part_begins_when_the_time_is_up(tmp_path: Path) -> None:
    [row] = run_job(Job("p", ["false"], 60.0, {}), tmp_path, left_s=1.0)
    assert row.verdict is Verdict.FAILED and "time is up" in row.note


def event(
    start: float, duration: float, *, stream: int, cat: str = "kernel", name: str = "gemm"
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": start,
        "dur": duration,
        "args": {"stream": stream},
    }


def test_traces_are_read(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    events = [
        event(0, 40, stream=7),
        event(50, 30, stream=9),  # 10 us idle before it; of a graph, which has its own stream
        event(55, 10, stream=7, cat="gpu_memcpy"),  # inside, of a pass
        event(70, 15, stream=20, name="_move_kernel"),  # beside the passes from 70 to 80
        event(85, 15, stream=21, cat="gpu_memcpy"),
        event(0, 500, stream=0, cat="cpu_op"),
    ]
    trace.write_text(json.dumps({"traceEvents": events}))
    assert idle_pct(trace) == pytest.approx(10.0)
    assert overlapped_pct(trace) == pytest.approx(100 / 3)
    trace.write_text(json.dumps({"traceEvents": events[:3]}))
    assert overlapped_pct(trace) is None
    trace.write_text(json.dumps({"traceEvents": events[5:]}))
    assert idle_pct(trace) is None


def test_bytes_and_operations_of_the_shapes(tmp_path: Path) -> None:
    llama = RandomModel.make(tmp_path / "llama", LLAMA_8B)
    qwen = RandomModel.make(tmp_path / "qwen", QWEN_HALF_B)
    # 8.03 billion parameters, of which the embedding's 0.53 are not read by a decode.
    assert llama.decode_weight_bytes == pytest.approx(2 * (8.03e9 - 0.525e9), rel=1e-3)
    assert qwen.decode_weight_bytes == pytest.approx(2 * 0.494e9, rel=1e-3)
    assert (llama.kv_bytes_per_token, qwen.kv_bytes_per_token) == (131_072, 12_288)
    tiny = RandomModel.make(tmp_path / "tiny", TINY_LLAMA)
    layer = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96)
    last = 2 * 64 * 200
    pairs = 4 * 2 * 64 * (1 + 2 + 3)
    qkv_alone = 2 * 64 * (64 + 2 * 32)
    assert tiny.prefill_operations(3) == 3 * layer + 2 * qkv_alone + layer + last + pairs
    visible = sum(position + 1 for position in range(14, 20))
    assert Chunk(6, 20).operations(Heads(4, 2, 16)) == 4 * 4 * 16 * visible


@pytest.mark.parametrize("order", Order)
def test_no_slot_has_two_owners(order: Order) -> None:
    table = slot_table(order, 5, 39)
    assert sorted(table.flatten().tolist()) == list(range(5 * 39))
    runs = int((table.flatten().diff() == 1).sum())
    assert runs == {Order.CONTIGUOUS: 194}.get(order, runs)
    assert order is not Order.SCATTERED or runs < 20
    assert order is not Order.BLOCKS or 150 < runs < 194


PYTHON_OF_GPU = {
    "python_version": "3.12",
    "python_full_version": "3.12.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
}


def present_on_gpu_machine() -> set[str]:
    """What docs/gpu.md says is there already."""
    text = (ROOT / "docs" / "gpu.md").read_text()
    [listed] = re.findall(r"What is taken to be there: (.*?)\.\n", text, flags=re.DOTALL)
    return {canonicalize_name(name) for name in re.findall("`([^`]+)`", listed)}


def listed_wheels() -> dict[str, str]:
    lines = (ROOT / "bench" / "gpu" / "wheels.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_wheels_are_those_that_lightserve_needs() -> None:
    """All that is needed, and what that needs, unless it is there with all that it needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    present, needed = present_on_gpu_machine(), set()
    waiting = [Requirement(text) for text in project["dependencies"]]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in present | needed:
            continue
        needed.add(name)
        for text in importlib.metadata.requires(name) or []:
            of_it = Requirement(text)
            extras = ("", *requirement.extras)
            if of_it.marker is None or any(
                of_it.marker.evaluate(PYTHON_OF_GPU | {"extra": extra}) for extra in extras
            ):
                waiting.append(of_it)
    wheels = listed_wheels()
    assert set(wheels) == needed
    locked = (ROOT / "requirements" / "serve.txt").read_text()
    assert all(f"{name}=={version} " in locked for name, version in wheels.items())


def closure(names: Iterable[str], *, without: Iterable[str]) -> set[str]:
    """Return installed distributions and what they need, but for some."""
    waiting, found = list(names), set()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found or name in without:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        wanted = [Requirement(text) for text in needs]
        waiting += [of.name for of in wanted if of.marker is None or of.marker.evaluate()]
    return found


IMPORT_ALL = """
import importlib, pkgutil, sys
import lightserve
missing = set()
for module in pkgutil.walk_packages(lightserve.__path__, "lightserve."):
    if module.name.rpartition(".")[2] in ("__main__", "libcore"):  # which is no module
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        missing.add(error.name.partition(".")[0])
print(" ".join(sorted(missing)))
print(sys.modules["typing_inspection"].__file__)
"""


def test_a_server_has_all_it_imports_on_the_gpu_machine(tmp_path: Path) -> None:
    """The list beside exactly what is there already, and nothing else that is installed here."""
    present, wheels = present_on_gpu_machine(), listed_wheels()
    assert not present & set(wheels)
    # What is installed here may be newer, and need what is not there: then the list has to have it.
    there = closure(present, without={*wheels, "lightserve"})
    for name in [*there, *wheels]:
        distribution = importlib.metadata.distribution(name)
        assert name not in wheels or distribution.version == wheels[name]
        for file in distribution.files or []:
            top = file.parts[0]
            if top in ("..", "__pycache__"):
                continue
            link = tmp_path / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))).resolve())
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", IMPORT_ALL],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    missing, one_of_the_list = done.stdout.splitlines()
    assert one_of_the_list.startswith(str(tmp_path))
    # What the server does without: extras that are imported where they are asked for.
    assert set(missing.split()) <= {"prompt_toolkit", "psycopg", "obstore"}


def test_what_the_gpu_check_itself_imports_is_there() -> None:
    present = present_on_gpu_machine() | set(listed_wheels())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in ("bench", "gpu"):
        names = {
            canonicalize_name(Requirement(need).name)
            for need in project["optional-dependencies"][extra]
        }
        assert names <= present
    assert {"transformers", "psutil", "httpx", "pytest"} <= present


class FakeEvent:
    """A point of a made-up device's time."""

    now_ms = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms = 0.0

    def record(self) -> None:
        self.at_ms = FakeEvent.now_ms

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.at_ms - self.at_ms


def test_device_time_is_the_median_of_queued_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's time, which is next to nothing here, does not count."""
    delays: list[int] = []
    buffers: list[int] = []

    def work(number: int) -> None:
        buffers.append(number)
        FakeEvent.now_ms += (2.0, 3.0, 50.0)[number % 3]

    monkeypatch.setattr("torch.cuda.Event", FakeEvent)
    monkeypatch.setattr("torch.cuda._sleep", delays.append)
    monkeypatch.setattr("torch.cuda.synchronize", lambda _: None)
    seconds = Machine(torch.device("cuda", 0)).median_s(work)
    assert seconds == pytest.approx(0.003)
    assert delays == [DELAY_CYCLES]
    assert buffers == [0, 0, 0, *range(MAX_ROUNDS)]
