"""How large the project is and how it hangs together: `python -m tools.structure [ROOT]`.

Counts of the sources under ROOT, by default here, as a table; and what one request runs through,
followed in a process of its own that imports ROOT's code. `--json` prints the figures alone.
`make check` refuses figures above those of `tools/ceilings.toml`; `--lower` writes today's figures
there wherever they are lower.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import io
import json
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MAX_MEMBERS = 25
CEILINGS = Path(__file__).with_name("ceilings.toml")
PERSONS = re.compile(r"\b((no|some|every|any)bod[y]|who(ever|m))\b", re.IGNORECASE)
OLD_OPENINGS = re.compile(r"(What|Of|Those|As|The same)\b")
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Sources:
    """The modules of a package, by dotted name."""

    texts: dict[str, str]

    @classmethod
    def of(cls, root: Path, package: str) -> Sources:
        """Read the package (or folder) under a root."""
        texts = {}
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            texts[".".join(parts).removesuffix(".__init__")] = path.read_text()
        return cls(texts)

    @property
    def num_lines(self) -> int:
        """Lines of all files."""
        return sum(len(text.splitlines()) for text in self.texts.values())

    @property
    def num_code_lines(self) -> int:
        """Lines without comments, docstrings and blank ones."""
        return sum(map(code_lines, self.texts.values()))

    def edges(self) -> set[tuple[str, str]]:
        """Return which module imports which; for type checkers and within functions as well."""
        found = set()
        for name, text in self.texts.items():
            for node in ast.walk(ast.parse(text)):
                found |= {(name, other) for other in self._imported(node) if other != name}
        return found

    def _imported(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in self.texts)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in self.texts:
                    yield name
                elif node.module in self.texts:
                    yield node.module


def code_lines(text: str) -> int:
    """Return how many lines of a module hold code: no comments, docstrings or blank lines."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def floors(edges: set[tuple[str, str]]) -> int:
    """Return how many modules the longest chain of imports has; circles are cut."""
    below: dict[str, set[str]] = defaultdict(set)
    for importer, imported in edges:
        below[importer].add(imported)
    heights: dict[str, int] = {}

    def height(module: str, above: frozenset[str]) -> int:
        if module not in heights:
            others = below[module] - above
            heights[module] = 1 + max((height(m, above | {module}) for m in others), default=0)
        return heights[module]

    return max((height(module, frozenset()) for module in list(below)), default=0)


def one_importer(edges: set[tuple[str, str]]) -> list[str]:
    """Return the modules that exactly one other imports."""
    importers: dict[str, set[str]] = defaultdict(set)
    for importer, imported in edges:
        importers[imported].add(importer)
    return sorted(module for module, those in importers.items() if len(those) == 1)


def circles(edges: set[tuple[str, str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    imported: dict[str, set[str]] = defaultdict(set)
    for importer, other in edges:
        imported[importer].add(other)

    def reached(start: str) -> frozenset[str]:
        seen: set[str] = set()
        ahead = set(imported[start])
        while ahead:
            seen |= ahead
            ahead = {other for module in ahead for other in imported.get(module, ())} - seen
        return frozenset(seen)

    reach = {module: reached(module) for module in list(imported)}
    groups = {
        frozenset(other for other in others if module in reach.get(other, ()))
        for module, others in reach.items()
        if module in others
    }
    return sorted(map(sorted, groups))


def public_members(text: str) -> dict[str, int]:
    """Return how many public members each class of a module defines, by the class's name.

    Members are methods, properties, fields and what `__init__` sets on `self`, but for fields that
    are options of a command. Classes without a public method or property (records, enumerations)
    are lists of names and are left out.
    """
    counts = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            functions = {f.name for f in node.body if isinstance(f, FUNCTIONS)}
            members = {name for name in functions | set(_fields(node)) if name[0] != "_"}
            if members & functions:
                counts[node.name] = len(members)
    return counts


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        match statement:
            case ast.AnnAssign(value=ast.Call(func=ast.Name(id=kind))) if kind.endswith("option"):
                pass
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.FunctionDef(name="__init__"):
                for part in ast.walk(statement):
                    match part:
                        case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                            yield name


def constants(text: str) -> list[str]:
    """Return the names that a module writes in capitals and sets to numbers by hand."""
    names = []
    for node in ast.parse(text).body:
        match node:
            case ast.Assign(targets=[target], value=value):
                pass
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                pass
            case _:
                continue
        named = [part.id for part in ast.walk(target) if isinstance(part, ast.Name)]
        if all(name.isupper() for name in named) and any(map(_is_number, ast.walk(value))):
            names += named
    return names


def old_openings(text: str) -> int:
    """Return how many docstrings of a module begin with a word that needs the name above it."""
    found = 0
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as docstring)):
                found += bool(OLD_OPENINGS.match(docstring))
    return found


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def long_functions(text: str, most: int) -> list[str]:
    """Return the names of a module's functions that have more lines than `most`."""
    return [
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, FUNCTIONS) and (node.end_lineno or 0) - node.lineno >= most
    ]


@dataclass
class Way:
    """What was called of a package while something ran."""

    files: set[str] = field(default_factory=set)
    functions: dict[tuple[str, str], None] = field(default_factory=dict)
    """File and qualified name of each function, in the order of their first calls."""
    depth: int = 0
    """The most calls of the package that were within each other."""


@contextmanager
def followed(package: str) -> Iterator[Way]:
    """Note every call of a package's functions in this thread; comprehensions are none."""
    way, marker = Way(), f"{os.sep}{package}{os.sep}"

    def is_ours(frame: FrameType) -> bool:
        code = frame.f_code
        return marker in code.co_filename and code.co_name != "followed" and code.co_name[0] != "<"

    def note(frame: FrameType, event: str, argument: object) -> None:
        del argument
        if event != "call" or not is_ours(frame):
            return
        way.files.add(frame.f_code.co_filename)
        way.functions[frame.f_code.co_filename, frame.f_code.co_qualname] = None
        depth, caller = 0, frame
        while caller is not None:
            depth += is_ours(caller)
            caller = caller.f_back  # type: ignore[assignment]
        way.depth = max(way.depth, depth)

    sys.setprofile(note)
    try:
        yield way
    finally:
        sys.setprofile(None)


def follow_plan() -> Way:
    """Submit one request to a router core with a server's defaults; plan and commit its first step.

    It is real-time, as requests are that name no class, and workers have measured no step times.
    """
    from support.core_scenes import Arrival, submit  # noqa: PLC0415

    from lightserve.config import ServeConfig  # noqa: PLC0415
    from lightserve.router.config import make_scheduler_config  # noqa: PLC0415
    from lightserve.router.events import FromFrontend, WorkersReady  # noqa: PLC0415
    from lightserve.router.scheduler import Scheduler  # noqa: PLC0415
    from lightserve.types import FrontendId  # noqa: PLC0415

    core: Any = Scheduler(make_scheduler_config(ServeConfig(), max_model_len=64))
    core.on_message(WorkersReady(num_kv_slots=100), 0.0)
    event = FromFrontend(FrontendId(0), submit(0, Arrival(0.0, 8, 4, 4)))
    with followed("lightserve") as way:
        core.on_message(event, 0.0)
        core.commit(core.plan(0.0), 0.0)
    return way


def follow_body() -> Way:
    """Send a chat completion to a frontend and stop where its `Submit` leaves for the router."""
    from support.fake_router import frontend, says  # noqa: PLC0415

    ways = []

    async def ask() -> None:
        async with frontend(says([5])) as setup:
            send: Callable[[Any], None] = setup.router.send
            with followed("lightserve") as way:

                def send_and_stop(message: Any) -> None:
                    sys.setprofile(None)
                    send(message)

                setup.router.send = send_and_stop
                body: dict[str, Any] = {"messages": [{"role": "user", "content": "Where is Mira?"}]}
                body |= {"model": "lightserve-tiny", "max_tokens": 2}
                answer = await setup.http.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
            ways.append(way)

    asyncio.run(ask())
    return ways[0]


WAYS = {
    "submit, plan and commit of one request": follow_plan,
    "HTTP body to Submit": follow_body,
}


def measure(root: Path) -> dict[str, int]:
    """Return the counts of the sources under a root."""
    product = Sources.of(root, "lightserve")
    edges = product.edges()
    router = {name for name in product.texts if f"{name}.".startswith("lightserve.router.")}
    router_edges = {(a, b) for a, b in edges if {a, b} <= router}
    bench = Sources.of(root, "bench")
    return {
        "product: files": len(product.texts),
        "product: lines": product.num_lines,
        "product: lines of code": product.num_code_lines,
        "product: modules with one importer": len(one_importer(edges)),
        "product: circles of imports": len(circles(edges)),
        "product: constants": sum(len(constants(text)) for text in product.texts.values()),
        "product: persons in the prose": sum(
            len(list(PERSONS.finditer(text))) for text in product.texts.values()
        ),
        "router: files": len(router),
        "router: lines": sum(len(product.texts[name].splitlines()) for name in router),
        "router: constants": sum(len(constants(product.texts[name])) for name in router),
        "router: floors": floors(router_edges),
        "router: arrows": len(router_edges),
        "bench: files": len(bench.texts),
        "bench: lines": bench.num_lines,
        "tests: files": len(Sources.of(root, "tests").texts),
    } | {
        f"docstrings with old openings: {name}": count
        for name, count in _openings_by_room(product).items()
    }


def _openings_by_room(product: Sources) -> dict[str, int]:
    """Return how many docstrings begin the old way in each package, or module beside them."""
    counts: dict[str, int] = defaultdict(int)
    for name, text in product.texts.items():
        counts[".".join(name.split(".")[:2])] += old_openings(text)
    return {room: count for room, count in counts.items() if count}


def measure_ways(root: Path) -> dict[str, int]:
    """Return what one request runs through, in a process that imports the root's code."""
    found: dict[str, int] = {}
    path = os.pathsep.join([str(root), str(root / "tests")])
    for index, name in enumerate(WAYS):
        command = [sys.executable, __file__, "--way", str(index)]
        run = subprocess.run(
            command,
            cwd=root,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            print(f"{name}: {run.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            continue
        found |= {f"{name}: {what}": count for what, count in json.loads(run.stdout).items()}
    return found


def read_ceilings() -> dict[str, dict[str, int]]:
    """Return the most that each figure and the members of each class may be, by table."""
    tables: dict[str, dict[str, int]] = tomllib.loads(CEILINGS.read_text())
    return tables


def large_classes(root: Path, most: int) -> dict[str, int]:
    """Return the product's classes with more public members than `most`, as `module.Class`."""
    texts = Sources.of(root, "lightserve").texts
    return {
        f"{module}.{name}": count
        for module, text in texts.items()
        for name, count in public_members(text).items()
        if count > most
    }


def lower_ceilings(figures: dict[str, int], members: dict[str, int]) -> None:
    """Write the figures and members into the file of ceilings where they are lower."""
    ceilings = read_ceilings()
    lower = {key: min(most, figures.get(key, most)) for key, most in ceilings["figures"].items()}
    kept = {key: most for key, most in ceilings["members"].items() if key in members}
    classes = {key: min(most, members[key]) for key, most in kept.items()}
    head = CEILINGS.read_text().split("[figures]")[0]
    tables = [
        f"[{name}]\n" + "".join(f'"{key}" = {most}\n' for key, most in table.items())
        for name, table in (("figures", lower), ("members", classes))
    ]
    CEILINGS.write_text(head + "\n".join(tables))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path.cwd())
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.add_argument("--list", action="store_true", help="Name modules with one importer.")
    parser.add_argument("--lower", action="store_true", help="Lower ceilings to today's figures.")
    parser.add_argument("--way", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        way = list(WAYS.values())[options.way]()
        counts = {"files": len(way.files), "functions": len(way.functions), "depth": way.depth}
        print(json.dumps(counts))
        return
    root = options.root.resolve()
    if options.list:
        print(*one_importer(Sources.of(root, "lightserve").edges()), sep="\n")
        return
    figures = measure(root) | measure_ways(root)
    if options.lower:
        lower_ceilings(figures, large_classes(root, MAX_MEMBERS))
    if options.json:
        print(json.dumps(figures))
        return
    width = max(map(len, figures))
    for name, count in figures.items():
        print(f"{name:<{width}}  {count:>7,}")


if __name__ == "__main__":
    main()
