"""The commands of README, docs and examples, and what is done with each by tests."""

from __future__ import annotations

import ast
import re
import subprocess
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from shutil import which
from typing import NamedTuple

from support import postgres

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(sh|bash|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_UNNAMED = re.compile(r"^```\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PROGRAMS = re.compile(r"^(\$ |[A-Z_]+=\S+ )*(make|lightserve|python3?|pip|curl|docker)\b", re.M)
_COMMENT = re.compile(r"\s+#\s.*$", re.MULTILINE)


class Treatment(Enum):
    """What tests do with a command."""

    RUN = "run"
    SLOW = "run by make test-long alone"
    CHECKED = "its options checked by make test, run by make test-long"
    OPTIONS = "what it is told checked, no more"
    NOT_RUN = "not run"


class Rule(NamedTuple):
    """Which commands are not simply run."""

    pattern: str
    treatment: Treatment
    reason: str


RUN, SLOW, CHECKED, OPTIONS, NOT_RUN = Treatment
POSTGRES = postgres.missing()

RULES = (
    Rule(r"(^|\s)docker (compose|build|run)\b", OPTIONS, "a container engine"),
    Rule(r'"prediction"', NOT_RUN, "needs --speculation; test_openai_client asks such a server"),
    Rule(r"^kubectl ", OPTIONS, "a cluster; the files are held to Kubernetes' schemas as well"),
    Rule(r"^make serve TORCH=|^PIP_EXTRA_INDEX_URL=", OPTIONS, "installs from a package index"),
    Rule(r"^pip install\b", OPTIONS, "installs from a package index"),
    Rule(r"^make gpu-(wheels|check)", OPTIONS, "a package index, a GPU"),
    Rule(r"^python -m bench\.gpu --rehearse", NOT_RUN, "minutes; test_gpu_check runs a part"),
    Rule(r"^smg launch", NOT_RUN, "needs sglang-router"),
    Rule(r"bench mixed --url", NOT_RUN, "other servers"),
    Rule(r"bench mixed ", SLOW, "a minute of load"),
    Rule(r"--nnodes", OPTIONS, "several machines; test_two_nodes has two on one"),
    Rule(r"postgresql://", OPTIONS if POSTGRES else CHECKED, POSTGRES or ""),
    Rule(r"^make (check|test|test-long|fmt)\b", OPTIONS, "is what runs this, or changes files"),
    Rule(r"^make bench( |$)", OPTIONS, "minutes of measuring"),
    Rule(r"^(prometheus|promtool) ", RUN if which("promtool") else NOT_RUN, "needs prometheus"),
    Rule(r"lightserve (simulate|plan) ", SLOW, "seconds of computing"),
    Rule(r"examples/load_test\.sh|--targets ttft=150ms", SLOW, "seconds of load"),
    Rule(r"bin/pytest tests/|tools\.structure", SLOW, "seconds; the tests run anyway"),
    Rule(r"lightserve serve --help", RUN, ""),
    Rule(r"lightserve serve --config", RUN, ""),
    Rule(r"lightserve serve |^make serve\b", CHECKED, "seconds for each server"),
)


@dataclass(frozen=True)
class Command:
    """One command as it is printed."""

    text: str

    @property
    def rule(self) -> Rule | None:
        """The first that is about it."""
        text = _COMMENT.sub("", self.text)
        return next((rule for rule in RULES if re.search(rule.pattern, text)), None)

    @property
    def treatment(self) -> Treatment:
        return Treatment.RUN if self.rule is None else self.rule.treatment


@dataclass(frozen=True)
class Block:
    """Commands that are printed together, and follow each other in one shell."""

    file: str
    line: int
    commands: tuple[Command, ...]

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}"


def pages() -> list[Path]:
    """Return what is read."""
    folders = (
        "docs",
        "docs/from",
        "docs/results",
        "docker",
        "docker/kubernetes",
        "docker/monitoring",
    )
    found = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "bench" / "README.md"]
    return found + [path for folder in folders for path in sorted((ROOT / folder).glob("*.md"))]


def blocks() -> list[Block]:
    """Return all blocks of pages, and those in the heads of the examples."""
    found = [block for path in pages() for block in _blocks_of(path)]
    examples = sorted((ROOT / "examples").iterdir())
    return found + [block for path in examples for block in _usage_of(path)]


def unnamed(path: Path) -> list[str]:
    """Return commands in blocks that do not say that they are some."""
    return [match[1] for match in _UNNAMED.finditer(path.read_text()) if _PROGRAMS.search(match[1])]


def split(script: str) -> list[str]:
    """Return a script's commands, each with all of its lines; bash says where one ends."""
    found: list[str] = []
    lines: list[str] = []
    for line in script.splitlines():
        if not lines and (not line.strip() or line.lstrip().startswith("#")):
            continue
        lines.append(line)
        if not line.endswith("\\") and _is_whole("\n".join(lines)):
            found.append("\n".join(lines))
            lines = []
    assert not lines, f"a command that does not end: {lines}"
    return found


def _is_whole(text: str) -> bool:
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    return done.returncode == 0 and "here-document" not in done.stderr


def _blocks_of(path: Path) -> list[Block]:
    text, found = path.read_text(), []
    for match in _BLOCK.finditer(text):
        script = match[2]
        if match[1] == "console":
            typed = [line[2:] for line in script.splitlines() if line.startswith("$ ")]
            script = "\n".join(typed)
        line = text[: match.start()].count("\n") + 1
        found.append(_block(path, line, script))
    return found


def _usage_of(path: Path) -> list[Block]:
    """Return what the head of an example says how it is run."""
    text = path.read_text()
    if path.suffix == ".py":
        head = ast.get_docstring(ast.parse(text)) or ""
    elif path.suffix == ".sh":
        head = "\n".join(line[2:] for line in text.split("\n\n")[0].splitlines()[1:])
    else:
        return []
    lines = [line[4:] for line in head.splitlines() if line.startswith("    ")]
    return [_block(path, 1, "\n".join(lines))] if lines else []


def _block(path: Path, line: int, script: str) -> Block:
    name = str(path.relative_to(ROOT))
    return Block(name, line, tuple(Command(text) for text in split(script)))
