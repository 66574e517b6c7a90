"""`tools/structure.py` counts right on a package of a few lines."""

from __future__ import annotations

from pathlib import Path

from tools.structure import (
    Sources,
    circles,
    code_lines,
    constants,
    floors,
    followed,
    long_functions,
    measure,
    one_importer,
    public_members,
)

PERSON = "".join(["No", "body"])
FILES = {
    "lightserve/__init__.py": "",
    "lightserve/a.py": f'"""A.\n\n{PERSON}."""\n\nfrom lightserve.router import b\nx = b.y  # 1\n',
    "lightserve/router/__init__.py": '"""The router."""\n',
    "lightserve/router/b.py": "from lightserve.router.c import y\nimport lightserve.router.d\n",
    "lightserve/router/c.py": "from lightserve.router.d import z\ny = z\n",
    "lightserve/router/d.py": "z = '''one\ntwo'''\n",
    "bench/one.py": "import os\n\n",
    "tests/test_one.py": "",
}


def make(root: Path) -> None:
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_counts_of_a_tiny_package(tmp_path: Path) -> None:
    make(tmp_path)
    assert measure(tmp_path) == {
        "product: files": 6,
        "product: lines": 13,
        "product: lines of code": 8,
        "product: modules with one importer": 2,
        "product: circles of imports": 0,
        "product: constants": 0,
        "product: persons in the prose": 1,
        "router: files": 4,
        "router: lines": 7,
        "router: constants": 0,
        "router: floors": 3,
        "router: arrows": 3,
        "bench: files": 1,
        "bench: lines": 2,
        "tests: files": 1,
    }
    edges = Sources.of(tmp_path, "lightserve").edges()
    assert one_importer(edges) == ["lightserve.router.b", "lightserve.router.c"]


def test_a_circle_of_imports_ends() -> None:
    assert floors({("a", "b"), ("b", "c"), ("c", "a")}) == 3


def test_modules_that_import_each_other_are_a_circle() -> None:
    two = {("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("e", "f"), ("f", "e"), ("g", "a")}
    assert circles(two) == [["a", "b", "c"], ["e", "f"]]
    assert circles({("a", "b"), ("b", "c"), ("a", "c")}) == []


def test_public_members_are_counted_where_there_is_behaviour() -> None:
    source = """
class Slots:
    size: int = 3
    FREE, _used = 1, 2
    mode: str = option("--mode")
    def __init__(self):
        self.table, self._rows = [], []
        self.size = 4
    @property
    def count(self): ...
    async def take(self): ...
    def _hide(self): ...
class Record:
    a: int
    b: int
"""
    assert public_members(source) == {"Slots": 4}


def test_constants_are_numbers_set_by_hand() -> None:
    source = (
        'A, B = 1, 2\nC: float = 2 * A\nD = {"x": 0.5}\nE = "1"\nF = True\nlower = 3\n_G = -1\n'
    )
    assert constants(source) == ["A", "B", "C", "D", "_G"]


def test_functions_are_as_long_as_their_lines() -> None:
    source = "def f():\n    a = 1\n    return a\n\ndef g():\n    return 1\n"
    assert long_functions(source, 2) == ["f"]


def test_code_is_what_is_no_comment_and_no_docstring() -> None:
    assert (
        code_lines('"""Doc."""\n\n# note\ndef f():\n    """Doc\n    more."""\n    return 1\n') == 2
    )


def test_calls_of_a_package_are_followed() -> None:
    with followed("tools") as way:
        code_lines("x = 1\n")
    assert len(way.files) == 1
    assert len(way.functions) == 1
    assert way.depth == 1
