"""Rules that hold for every source file: nothing that can run code from data, no torch in
the processes that must stay light, functions, classes and rooms that stay small."""

from __future__ import annotations

import ast
import collections
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightserve
from tools.planted_faults import read_faults
from tools.structure import (
    MAX_MEMBERS,
    large_classes,
    long_functions,
    measure,
    measure_ways,
    old_openings,
    read_ceilings,
)

PACKAGE = Path(lightserve.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
ROOT = PACKAGE.parent
PROSE = sorted(
    path
    for folder in ("lightserve", "tests", "bench", "docs", "examples", "docker")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".md", ".sh", ".cpp", ".h"}
    and PACKAGE / "bundled" not in path.parents
)
PERSONS = re.compile(r"(?<![a-z])((no|some|every|any)body|who(ever|m))(?![a-z])", re.IGNORECASE)
FOREIGN_IDS = re.compile(r"(?<![\w./-])(?!L2\b|L4\b|S3\b|P[12]\b|O[12]\b)[A-Z]\d{1,2}\b")
"""But for caches, a GPU, a protocol and the names of two bounds."""
MAX_FUNCTION_LINES = 80

FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "multiprocessing",
}
FORBIDDEN_BUILTINS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    "recv_pyobj",
    "send_pyobj",
    "load_module",
    "Manager",
    "all_gather_object",
    "broadcast_object_list",
}
FORBIDDEN_CALLS = {
    ("torch", "load"),
    ("torch", "save"),
    ("numpy", "load"),
    ("np", "load"),
    ("os", "system"),
    # What is left are compose, SafeLoader and safe_load, which make plain values only.
    *(("yaml", f"{kind}load{all_}") for kind in ("", "full_", "unsafe_") for all_ in ("", "_all")),
    *(("yaml", f"{kind}Loader") for kind in ("", "C", "Full", "CFull", "Unsafe", "CUnsafe")),
}


def violations(source: str) -> Iterator[str]:
    """Yield what `source` does that no module of lightserve may do."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=module, level=0) if module:
                modules = [module]
            case _:
                modules = []
        yield from (f"import {m}" for m in modules if m.split(".")[0] in FORBIDDEN_MODULES)
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_BUILTINS:
                yield f"{name}()"
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (
                owner,
                name,
            ) in FORBIDDEN_CALLS:
                yield f"{owner}.{name}"
            case ast.Attribute(attr=name) if name in FORBIDDEN_ATTRIBUTES:
                yield name
            case ast.keyword(arg="shell", value=ast.Constant(value=True)):
                yield "shell=True"
            case ast.keyword(arg="trust_remote_code"):
                yield "trust_remote_code"
            case ast.keyword(arg="allow_pickle"):
                yield "allow_pickle"


OPENS_PICKLES = PACKAGE / "models" / "pickled_weights.py"
"""The program of `lightserve convert`, which no process of a server imports or starts: torch's
loader makes plain tensors of pickles there (`weights_only`) and nothing else."""


def test_nothing_runs_code_from_data() -> None:
    found = {path: list(violations(path.read_text())) for path in SOURCES}
    assert {path: bad for path, bad in found.items() if bad} == {OPENS_PICKLES: ["torch.load"]}


def test_pickles_are_opened_by_one_program_for_tensors_alone() -> None:
    assert 'torch.load(file, map_location="cpu", weights_only=True,' in OPENS_PICKLES.read_text()
    named = [path.name for path in SOURCES if "pickled_weights" in path.read_text()]
    assert sorted(named) == ["made_files.py", "pickled_weights.py"]


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing import Queue",
        "import numpy, shelve",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "yaml.unsafe_load(text)",
        "yaml.UnsafeLoader(text)",
        "eval('1')",
        "def f():\n    exec(x)",
        "torch.load(path)",
        "socket.recv_pyobj()",
        "subprocess.run(x, shell=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "np.load(x, allow_pickle=True)",
    ],
)
def test_the_rules_have_teeth(source: str) -> None:
    assert list(violations(source))


def test_the_rules_let_lookalikes_pass() -> None:
    assert (
        list(
            violations(
                "model.eval()\nre.compile(x)\nyaml.safe_load(x)\nsafetensors.torch.load_file(x)"
            )
        )
        == []
    )


def test_functions_are_short() -> None:
    found = {path: long_functions(path.read_text(), MAX_FUNCTION_LINES) for path in SOURCES}
    assert {path: functions for path, functions in found.items() if functions} == {}


def test_classes_have_few_public_members() -> None:
    """A class above `MAX_MEMBERS` keeps below its own ceiling, which may only fall."""
    large, ceilings = large_classes(ROOT, MAX_MEMBERS), read_ceilings()["members"]
    assert large.keys() == ceilings.keys()
    assert {name: count for name, count in large.items() if count > ceilings[name]} == {}


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    return measure(ROOT)


def test_the_house_only_gets_smaller(sizes: dict[str, int]) -> None:
    """Ceilings may only fall: `python -m tools.structure --lower` writes lower ones."""
    figures, ceilings = sizes | measure_ways(ROOT), read_ceilings()["figures"]
    over = {name: figures[name] for name, most in ceilings.items() if figures[name] > most}
    assert over == {}


def test_docstrings_begin_with_a_noun_or_a_verb(sizes: dict[str, int]) -> None:
    """Each can be read without the name above it."""
    assert old_openings('"""What x is."""\ny = 1\n"""Of y."""\n"""Office."""') == 2
    assert {name for name in sizes if "old openings" in name} == set()


def test_every_fault_that_is_planted_has_one_place() -> None:
    """A file that is gone, or a row whose text stands in it no more, is an error as well."""
    for each in read_faults():
        assert (PACKAGE / each.path).read_text().count(each.right) == 1, each
        assert all((ROOT / "tests" / name).exists() for name in each.tests), each


def test_no_pattern_needs_what_older_pythons_get_wrong() -> None:
    """Before Python 3.11.5 a possessive group that may be absent matched nothing, or too much."""
    found = [path for path in SOURCES if ")?" + "+" in path.read_text()]
    assert found == []


def test_files_of_tests_are_told_apart_by_name_alone() -> None:
    """pytest imports them by it, and reports, logs and remarks name them so."""
    files = collections.Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(files) > 100
    assert [name for name, count in files.items() if count > 1] == []


@pytest.mark.parametrize(
    "module",
    [
        "lightserve.cli.serve",
        "lightserve.supervisor.loop",
        "lightserve.router.process",
        "lightserve.frontend.process",
    ],
)
def test_light_processes_import_no_torch(module: str) -> None:
    """At run time as well: import-linter sees the package's own imports only."""
    script = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'transformers', 'triton', 'huggingface_hub'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr


def test_a_worker_on_a_cpu_needs_no_triton() -> None:
    """It is an extra, which plain installations such as `make serve` are without."""
    script = "import sys\nsys.modules['triton'] = None\nimport lightserve.worker.process\n"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr


def test_every_launch_says_whether_products_and_sums_are_fused() -> None:
    """Triton's default changes, and bits with it."""
    launches = [
        (path.name, node)
        for path in SOURCES
        if path.parent.name == "triton"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and ast.unparse(node.func.value).endswith("kernel")
    ]
    assert len(launches) >= 20
    for name, launch in launches:
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in launch.keywords}
        assert given.get("enable_fp_fusion") == "True", (name, launch.lineno)


def remarks(source: str) -> Iterator[str]:
    """Yield comments and docstrings."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and token.string.startswith('"""')
        if is_docstring or token.type == tokenize.COMMENT:
            yield token.string


@pytest.mark.parametrize("folder", sorted({path.relative_to(ROOT).parts[0] for path in PROSE}))
def test_things_are_things(folder: str) -> None:
    """Requests, clients and processes are called that; no word makes persons of them."""
    found = [
        f"{path}:{number}: {match.group()}"
        for path in (ROOT / "README.md", *PROSE)
        if path.is_relative_to(ROOT / folder) or path.parent == ROOT
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := PERSONS.search(line))
    ]
    assert found == []


def test_remarks_cite_nothing_that_is_not_here() -> None:
    """Ids stand in some document, and that is for other readers."""
    found = [
        f"{path}: {match.group()}"
        for path in PROSE
        if path.suffix == ".py"
        for remark in remarks(path.read_text())
        if (match := FOREIGN_IDS.search(remark))
    ]
    assert found == []


@pytest.mark.parametrize(
    "text", ["# so that no" + "body waits", "a_wait_for_who" + "ever", "Who" + "m"]
)
def test_words_for_persons_are_found(text: str) -> None:
    assert PERSONS.search(text)


def test_ids_are_found() -> None:
    assert FOREIGN_IDS.search("kept (F" + "3)") and FOREIGN_IDS.search("contract N" + "1.")
    assert not FOREIGN_IDS.search(
        "an H100, fp8, twice the L2 cache, 0x1F3, UTF-8, uniform:P1-P2:O1-O2"
    )
