"""Do the tests of `make test` find faults? Plants small ones, one at a time, and runs what should.

    python -m tools.planted_faults [--only WORD] [--below FOLDER] [--tests all] [--at-once] [--list]

Each fault of `planted_faults.toml` is an edit of one line in a copy of the tree; the tests named
with it are run there as `make test` runs them, or with `--tests all` the long ones too. Faults are
of the kind that reviews miss: a bound that is off by one, a factor left out, a check that is gone.
Where one is missed, a test is missing.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("lightserve", "tests", "bench", "tools", "docs", "examples", "requirements", "docker")
FILES = ("pyproject.toml", "setup.py", "Makefile", "README.md", "CHANGELOG.md", "LICENSE")
PRELOADED = (
    "torch",
    "numpy",
    "hypothesis",
    "msgspec",
    "pydantic",
    "starlette",
    "httpx",
    "zmq",
    "click",
)
TIMES_S = itertools.count(1_000_000_000)
"""When files were changed: a fault and what is right may be equally long and a moment apart, and by
its own time each is told from the bytecode of the other."""
FOUND, MISSED = 1, 0
"""Exit codes of pytest."""


class Fault(NamedTuple):
    """One line that is wrong."""

    path: str
    """Below lightserve/."""
    right: str
    """Stands in the file exactly once."""
    wrong: str
    tests: tuple[str, ...]
    """Files below tests/."""


def read_faults() -> list[Fault]:
    """Return the faults of `planted_faults.toml`, in its order."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return [
        Fault(path, right, wrong, tuple(tests))
        for path, faults in rows.items()
        for right, wrong, *tests in faults
    ]


class Result(NamedTuple):
    """What became of a fault."""

    fault: Fault
    exit_code: int
    seconds: float
    last_line: str


def copy_tree(source: Path, target: Path) -> None:
    """Copy what tests need, the native core as it is built included."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, ignore=ignored)
    for name in FILES:
        if (source / name).exists():
            shutil.copy2(source / name, target / name)


def run_tests(tree: Path, tests: list[str], *, with_long: bool) -> tuple[int, str]:
    """Run test files of a tree; returns pytest's exit code, and what failed or the last line.

    In a copy of this process, which has imported what takes long and nothing of lightserve.
    """
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "--timeout=300", *tests]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what was imported before
    if with_long:
        arguments += ["-m", "not soak"]
    with tempfile.TemporaryFile() as output:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _be_pytest(tree, arguments, output.fileno())
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines() or [""]
    failed = (line for line in lines if line.startswith(("FAILED", "ERROR")))
    return os.waitstatus_to_exitcode(status), next(failed, lines[-1])


def _be_pytest(tree: Path, arguments: list[str], output_fd: int) -> NoReturn:
    code = -1
    try:
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        # What did not change is compiled once.
        sys.dont_write_bytecode = False
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.path[:] = [str(tree), *(entry for entry in sys.path if Path(entry) != ROOT)]
        sys.modules.pop("tools", None)
        code = int(pytest.main(arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


def write(path: Path, text: str) -> None:
    """Write a file whose bytecode is stale from now on."""
    path.write_text(text)
    time_s = next(TIMES_S)
    os.utime(path, (time_s, time_s))


def build_core(tree: Path) -> bool:
    """Build a tree's native core; returns whether it is what the sources say now."""
    build = "import setup; setup.build_core(setup.CPU)"
    check = "from lightserve.kernels.cpu.core import load_core; load_core()"
    command = [sys.executable, "-c", f"{build}; {check}"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run(command, cwd=tree, env=environment, check=False).returncode == 0


def try_fault(tree: Path, planted: Fault, *, with_long: bool) -> Result:
    """Plant a fault, run its tests, and take it out again."""
    path = tree / "lightserve" / planted.path
    text = path.read_text()
    if text.count(planted.right) != 1:
        return Result(planted, -1, 0.0, f"{text.count(planted.right)} places to plant it in")
    start_s = time.monotonic()
    library = tree / "lightserve/kernels/cpu/libcore.so"
    built = library.read_bytes() if library.exists() else None
    write(path, text.replace(planted.right, planted.wrong))
    try:
        if path.suffix in (".cpp", ".h") and not build_core(tree):
            return Result(planted, -1, 0.0, "the native core cannot be built with it")
        tests = [f"tests/{name}" for name in planted.tests]
        code, line = run_tests(tree, tests, with_long=with_long)
    finally:
        write(path, text)
        if built is not None:
            library.write_bytes(built)
    return Result(planted, code, time.monotonic() - start_s, line)


def main() -> int:
    """Try all faults; returns how many were not found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="faults in paths that hold this")
    parser.add_argument("--below", default="", help="only tests below this folder of tests/")
    parser.add_argument("--at-once", action="store_true", help="no run without a fault first")
    parser.add_argument("--list", action="store_true", help="say what there is, and stop")
    parser.add_argument("--tests", choices=("quick", "all"), default="quick")
    parser.add_argument("--tree", type=Path, default=ROOT, help="which tree is copied")
    options = parser.parse_args()
    chosen = [
        each._replace(tests=tests)
        for each in read_faults()
        if options.only in each.path
        and (tests := tuple(name for name in each.tests if name.startswith(options.below)))
    ]
    if options.list:
        for each in chosen:
            print(f"{each.path}: {each.right!r} -> {each.wrong!r}")
        return 0
    for name in PRELOADED:
        importlib.import_module(name)
    results = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tree = Path(folder)
        copy_tree(options.tree, tree)
        if not options.at_once:
            whole = sorted({f"tests/{name}" for each in chosen for name in each.tests})
            code, line = run_tests(tree, whole, with_long=options.tests == "all")
            print(f"without a fault: {line}", flush=True)
            if code != MISSED:
                return 1
        for each in chosen:
            result = try_fault(tree, each, with_long=options.tests == "all")
            word = {FOUND: "found", MISSED: "MISSED"}.get(result.exit_code, "ERROR")
            print(
                f"{word:6} {result.seconds:6.1f} s  {each.path}: {each.wrong[:60]!r}"
                f"  {result.last_line}",
                flush=True,
            )
            results.append(result)
    num_found = sum(result.exit_code == FOUND for result in results)
    print(f"{num_found} of {len(results)} found")
    return len(results) - num_found


if __name__ == "__main__":
    sys.exit(main())
