"""Every relative link of a page leads to a file that exists, and to a heading of it; every file of
the repository that a page names is there."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

import lightserve

PACKAGE = Path(lightserve.__file__).parent
ROOT = PACKAGE.parent
_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(\s*<?([^)\s>]+)")
_HTML_LINK = re.compile(r"(?:src|srcset|href)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#+\s+(.*?)\s*#*$", re.MULTILINE)


def _pages() -> list[Path]:
    folders = [
        folder
        for folder in ROOT.iterdir()
        if folder.is_dir() and not re.match(r"\.|build$|dist$", folder.name)
    ]
    return sorted([*ROOT.glob("*.md"), *(page for top in folders for page in top.rglob("*.md"))])


def anchors_of(page: str) -> set[str]:
    """Return the anchors of the headings, as GitHub makes them."""
    made: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", page)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        number = sum(anchor == re.sub(r"-\d+$", "", other) for other in made)
        made.add(f"{anchor}-{number}" if anchor in made else anchor)
    return made


def links_of(page: str) -> list[str]:
    """Return what the page links to, outside of code."""
    text = _FENCE.sub("", page)
    text = re.sub(r"`[^`\n]*`", "", text)
    return _LINK.findall(text) + _HTML_LINK.findall(text)


def broken_links(path: Path) -> list[str]:
    """Return the links that lead nowhere."""
    broken = []
    for link in links_of(path.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors_of(target.read_text())
        ):
            broken.append(link)
    return broken


def missing_files(page: str) -> list[str]:
    """Return the paths in backticks, from the root or from the package, at which nothing is.

    A name in capitals stands for any.
    """
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", _FENCE.sub("", page))
    tops = {path.name for top in (ROOT, PACKAGE) for path in top.iterdir() if path.is_dir()}
    return [
        name
        for name in named
        if name.split("/")[0] in tops - {"build"}
        and not re.search(r"[A-Z]{3}", name)
        and not any((top / name).exists() for top in (ROOT, PACKAGE))
    ]


@pytest.mark.parametrize("path", _pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    assert broken_links(path) == []


@pytest.mark.parametrize("path", _pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_are_there(path: Path) -> None:
    assert missing_files(path.read_text()) == []


def test_paths_are_told_from_other_words() -> None:
    text = (
        "`router/gone.py` `lightserve/router/process.py` `router/NAME.py` `a/b` `docs/` `tests/x/`"
    )
    assert missing_files(text) == ["router/gone.py", "tests/x/"]


def test_headings_and_links_are_read_as_they_are_shown(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `code`: heading (2)\n## Twice\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#a-code-heading-2) [b](other.md#twice-1) [c](#own) [d](https://x.example/y)\n"
        "[e](missing.md) [f](other.md#missing) `[g](not-a-link.md)`\n# Own\n"
        '```\n[h](in-code.md)\n# comment\n```\n<img src="missing.svg">\n'
    )
    assert broken_links(page) == ["missing.md", "other.md#missing", "missing.svg"]
