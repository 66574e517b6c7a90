"""`tools/structure.py` counts right on a package of a few lines."""

from __future__ import annotations

from pathlib import Path

from tools.structure import Sources, code_lines, floors, followed, measure, one_importer

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
        "product: persons in the prose": 1,
        "router: files": 4,
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
