"""Every relative link of a page leads to a file that exists, and to a heading of it; every file of
the repository that a page names is there.
"""

from __future__ import annotations

import ast
import dataclasses
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

import lightserve
from lightserve.batches import database
from lightserve.batches.sqlite import DATABASE
from lightserve.cli.main import SUBCOMMANDS
from lightserve.config import ServeConfig
from lightserve.config.fields import flag_name
from lightserve.cost import profile
from lightserve.decisions.records import FORMAT_VERSION
from lightserve.frontend.anthropic.request import MessagesRequest
from lightserve.frontend.json_body import StrictModel
from lightserve.frontend.openai.chat import ChatRequest
from lightserve.frontend.openai.completions import CompletionRequest
from lightserve.frontend.openai.responses_request import ResponsesRequest
from lightserve.frontend.request_options import TARGET_HEADERS
from lightserve.metrics.catalogue import all_families
from lightserve.models.architectures import CROSS_ENCODERS, HEADLESS, Architecture
from lightserve.models.decoder import PLAIN
from lightserve.models.families import FAMILIES
from lightserve.models.gguf_config import FAMILIES as GGUF_FAMILIES
from lightserve.types import SAMPLING_FIELDS, SLO
from tools.structure import follow_body, follow_plan

PACKAGE = Path(lightserve.__file__).parent
ROOT = PACKAGE.parent
PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
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


# Tables that are written by hand have what the code has.

DOCS = PACKAGE.parent / "docs"
API_PAGE = (DOCS / "api.md").read_text()


@pytest.mark.parametrize(
    "model", [ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest]
)
def test_every_field_of_the_api_is_described(model: type[StrictModel]) -> None:
    described = set(re.findall(r"`(\w+)`", API_PAGE))
    assert set(model.model_fields) - described == set()


def _promised(heading: str) -> tuple[set[str], set[str]]:
    """Return the names that docs/stable.md has under a heading: stable, and experimental."""
    page = (DOCS / "stable.md").read_text()
    _, _, section = page.partition(f"## {heading}\n")
    section, _, _ = section.partition("\n## ")
    stable, found, experimental = section.partition("**Experimental**")
    _, begun, stable = stable.partition("**Stable**")
    assert found and begun, heading
    names = [re.findall(r"`([^`]+)`", text) for text in (stable, experimental)]
    both = (set(names[0]), set(names[1]))
    assert len(names[0]) + len(names[1]) == len(both[0] | both[1]), "a name stands twice"
    return both


def test_flags_that_are_called_stable_are_flags() -> None:
    stable, experimental = _promised("Flags")
    flags = {flag_name(spec.name) for spec in dataclasses.fields(ServeConfig)}
    assert stable < flags and not experimental, "all others are experimental"


def test_metrics_that_are_called_stable_are_metrics() -> None:
    stable, experimental = _promised("Metrics")
    assert stable < {family.name for family in all_families()} and not experimental


def test_every_command_is_called_stable_or_experimental() -> None:
    stable, experimental = _promised("Commands")
    assert stable | experimental == set(SUBCOMMANDS)


def test_every_own_field_and_header_is_called_stable_or_experimental() -> None:
    stable, experimental = _promised("Fields of its own")
    fields = {f"slo.{name}" for name in SLO.__struct_fields__}
    names = stable | experimental
    assert {name for name in names if name.startswith("slo.")} == fields
    assert {name for name in names if name.startswith("x-")} == set(TARGET_HEADERS)


def _mapped(page: Path) -> list[tuple[str, str]]:
    """Return both columns of the rows of a page's tables."""
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", page.read_text(), re.MULTILINE)
    return [(theirs, ours) for theirs, ours in rows if not theirs.startswith("---")]


@pytest.mark.parametrize("page", sorted((DOCS / "from").glob("*.md")), ids=lambda page: page.stem)
def test_flags_and_routes_that_others_are_led_to_are_there(page: Path) -> None:
    flags = {flag_name(spec.name) for spec in dataclasses.fields(ServeConfig)}
    flags |= {"--preset", "--config"}
    routes = {name.split()[-1] for names in _promised("Routes") for name in names}
    rows = _mapped(page)
    for theirs, ours in rows:
        named = f"{theirs} {ours}" if ours.startswith("the same") else ours
        if ours.startswith("missing"):
            continue
        named = re.sub(r"\]\([^)]*\)|https?://", "", named)
        assert set(re.findall(r"--[a-z][a-z0-9-]+", named)) <= flags, theirs
        paths = set(re.findall(r"`(?:GET |POST )?(/[a-z0-9_/]*)[`,?]", named))
        assert paths <= routes | {"/v1"}, theirs
    assert len(rows) > 15 and len(page.read_text().splitlines()) < 100


def test_the_versions_of_files_are_those_of_the_code() -> None:
    section = (DOCS / "stable.md").read_text().partition("\n## Files\n")[2]
    versions = re.findall(r"^\| ([a-z][^|]*?) \| (\d+) \|", section, re.MULTILINE)
    assert {name: int(number) for name, number in versions} == {
        "batch store, SQLite": database.SCHEMA_VERSION,
        "batch store, PostgreSQL": database.SCHEMA_VERSION,
        "decision log": FORMAT_VERSION,
        "step-time profile": profile.SCHEMA_VERSION,
    }
    assert f"`{DATABASE}.schema-N`" in section


@pytest.mark.parametrize("name", ["temperature", "min_p", "top_p", *PENALTIES])
def test_limits_of_sampling_are_those_of_the_declaration(name: str) -> None:
    spec = SAMPLING_FIELDS[name]
    limits = "(0, 1]" if spec.excludes_low else f"{spec.low:g} to {spec.high:g}"
    row = re.search(rf"^\| [^|]*`{name}`[^|]*\| ([^|]*) \|", API_PAGE, re.MULTILINE)
    assert row is not None and limits in row[1].split("; ")


# ---------------------------------------------------------------------- the numbers of the router

HEADING = "The numbers at which the router guesses"
BOUNDS = {
    "HEARTBEAT_S",
    "MAX_MESSAGE_BYTES",
    "SILENCE_S",
    "SAVE_INTERVAL_S",
    "MAX_UNSENT",
    "ALWAYS",
    "BIAS_BYTES",
    "CHARACTER_BYTES",
    "COPY_BYTES",
    "EOS_BYTES",
    "FEW_NEWCOMER_BYTES",
    "IDLE_TICKS",
    "ID_BYTES",
    "LEAST_FOR_FRONTENDS_S",
    "MAX_ACCOUNTS",
    "MAX_ADDED",
    "MAX_STEPS",
    "WATCH_S",
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_TOKENS",
    "MAX_BLOCK_SIZE",
    "MAX_CLIENT_CHARS",
    "MAX_DELTAS",
    "MAX_DEPTH",
    "MAX_KEYS",
    "MAX_NEWCOMER_BYTES",
    "MAX_REMEMBERED",
    "MAX_SECONDS",
    "MAX_SPARE_NODES",
    "MAX_STEPS_IN_FLIGHT",
    "MAX_TURN_S",
    "MAX_VISITS",
    "MINUTE_S",
    "NOWHERE",
    "NO_LIMIT",
    "REST_BYTES",
    "ROW_BYTES",
    "SCHEMA_VERSION",
    "SEQUENCE_BYTES",
    "SLOT_BYTES",
    "STATUS_INTERVAL_S",
    "TOKEN_BYTES",
    "WORD_BYTES",
    "YOUNG_OBJECTS",
}
"""Numbers that guess nothing: sizes of messages and memory, bounds of work, marks of no value."""
_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.LShift: lambda left, right: int(left) << int(right),
}

Number = float | tuple[float, ...]


def _number(node: ast.expr) -> Number | None:
    """Return what an expression of nothing but numbers is."""
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _number(operand)
            return -value if isinstance(value, int | float) else None
        case ast.BinOp(left=left, op=operation, right=right):
            first, second = _number(left), _number(right)
            if isinstance(first, int | float) and isinstance(second, int | float):
                return _OPERATIONS[type(operation)](first, second)
        case ast.Tuple(elts=parts):
            numbers = [number for part in parts if isinstance(number := _number(part), int | float)]
            return tuple(numbers) if len(numbers) == len(parts) else None
    return None


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a module assigns, each with its expression."""
    for node in tree.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield name, value
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                for part, value in zip(names, values, strict=True):
                    if isinstance(part, ast.Name):
                        yield part.id, value
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    if isinstance(target, ast.Name):
                        yield target.id, value


def _numbers_of_the_router() -> dict[str, Number]:
    """Return its constants that are numbers, as MODULE.NAME where a name occurs twice."""
    parts = ("router", "papers", "cost")
    found = [
        (path.stem, name, number)
        for part in parts
        for path in sorted(PACKAGE.glob(f"{part}/**/*.py"))
        for name, value in _assigned(ast.parse(path.read_text()))
        if name.isupper() and (number := _number(value)) is not None
    ]
    times = Counter(name for _, name, _ in found)
    return {
        name if times[name] == 1 else f"{module}.{name}": number for module, name, number in found
    }


def _told() -> dict[str, object]:
    """Return the numbers of the table of docs/scheduling.md."""
    _, _, section = (DOCS / "scheduling.md").read_text().partition(f"\n## {HEADING}\n")
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+?) \| [^|]+ \| [^|]+ \|$", section, re.MULTILINE)
    return {name: ast.literal_eval(value) for name, value in rows}


def test_the_numbers_of_the_router_are_those_of_the_table() -> None:
    """A new number has a row in docs/scheduling.md, with how it was found, or stands in BOUNDS."""
    told = {name: value for name, value in _told().items() if not name.startswith("--")}
    numbers = _numbers_of_the_router()
    guesses = {
        name: value
        for name, value in numbers.items()
        if name in told or not (name in BOUNDS or name.rsplit(".", 1)[-1].startswith("_"))
    }
    assert told == guesses


def test_the_defaults_of_the_table_are_those_of_the_options() -> None:
    told = {name: value for name, value in _told().items() if name.startswith("--")}
    defaults = {flag_name(spec.name): spec.default for spec in dataclasses.fields(ServeConfig)}
    assert told == {name: defaults.get(name) for name in told}
    assert len(told) >= 10


def test_layers_and_attention_of_a_familys_own_are_told() -> None:
    """docs/models.md has each class of `FAMILIES` that is not the plain decoder's."""
    told = re.findall(r"^\| `(\w+)`(?: \(`\w+\.py`\))?: ", (DOCS / "models.md").read_text(), re.M)
    own = {part for family in FAMILIES.values() for part in family} - set(PLAIN)
    assert sorted(told) == sorted(part.__name__ for part in own)


def test_the_models_that_are_told_are_those_that_are_served() -> None:
    """The tables of docs/models.md name all that a refusal at the start names, and no other."""
    page = (DOCS / "models.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    names = re.compile(r"`(\w+(?:ForCausalLM|Model|ForConditionalGeneration|Classification))`")
    assert set(names.findall("\n".join(rows))) == {*Architecture, *HEADLESS, *CROSS_ENCODERS}
    files = page.partition("of the architectures `llama`")[2].partition("tensors in F32")[0]
    assert {"llama", *re.findall(r"`([\w-]+)`", files)} == set(GGUF_FAMILIES)


STEP = re.compile(r"^\d+\. \*\*\w+\*\*: `([\w.]+)` in `([\w/.]+)`\.", re.M)


def test_the_steps_of_a_request_are_those_that_it_goes_through() -> None:
    """A traced request calls the functions of docs/architecture.md in the order of the page."""
    told = [(path, name) for name, path in STEP.findall((DOCS / "architecture.md").read_text())]
    assert len(told) == 10
    called = [
        (str(Path(file).relative_to(PACKAGE)), name)
        for way in (follow_body(), follow_plan())
        for file, name in way.functions
    ]
    places = [called.index(step) for step in told[:7]]
    assert places == sorted(places)
    for path, name in told[7:]:  # after it has left for the workers
        module = ast.parse((PACKAGE / path).read_text())
        kind, _, method = name.partition(".")
        classes = [c for c in ast.walk(module) if isinstance(c, ast.ClassDef) and c.name == kind]
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        assert any(isinstance(f, functions) and f.name == method for c in classes for f in c.body)
