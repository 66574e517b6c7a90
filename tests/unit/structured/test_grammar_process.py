"""What one constraint may take: every keyword with large numbers, and what else repeats."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine
from contextlib import suppress
from ctypes import c_size_t, c_uint
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.grids import choose, more_when_long

from lightserve import grammar_process
from lightserve.errors import InvalidRequest
from lightserve.frontend import structured_output
from lightserve.frontend.errors import RequestFailed
from lightserve.frontend.structured_output import ConstraintChecker, GrammarProcess
from lightserve.grammar_process import MAX_WORK_BYTES, Verdict, environment
from lightserve.messages.common import (
    Constraint,
    GrammarConstraint,
    JsonSchemaConstraint,
    RegexConstraint,
)
from lightserve.structured import MiB, byte_vocabulary, compile_matcher, in_lark, unforced

PATIENCE_S = 120.0
MAX_PROCESS_BYTES = MAX_WORK_BYTES + 64 * MiB
NUMBERS: list[Any] = [
    *(10_000, 9_999_991, 2**31 - 1, 2**31, 2**63, 10**30, -(10**18), 10**300, 1e-9, 1e300, 0.1),
    99_999.99999,
]
SIZES = [
    *("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const"),
]
BASES: dict[str, Any] = {
    "Items": {"type": "array", "items": {"const": "b" * 500}},
    "Properties": {"type": "object", "additionalProperties": {"type": "integer"}},
    "Length": {"type": "string", "pattern": "^(a|b)*$"},
    "": {"type": "number"},
}


def schema(value: Any) -> JsonSchemaConstraint:
    return JsonSchemaConstraint(schema=json.dumps(value))


def doubled(num_levels: int, last: Any, combine: Any) -> Any:
    """A schema of references in which each level stands for two of the next."""
    definitions = {
        str(level): combine({"$ref": f"#/$defs/{level + 1}"}) for level in range(num_levels)
    }
    return {"$ref": "#/$defs/0", "$defs": {**definitions, str(num_levels): last}}


RULES = "".join(f"r{level}: r{level + 1} r{level + 1}\n" for level in range(24))
COUNTED = [
    *("a{9999991}", "a{1,2000000000}", "(a{1000}){1000}", "((a{1,100}){1,100}){1,100}"),
    *("((((a{100}){100}){100}){100}){100}", "(a?){5000}a{5000}", "(.{0,50}x){500}"),
    *("(a|b)*a(a|b){400}", "((a*)*)*b", r"(\w{1,500} ){1,500}", r"\p{L}{5000}", "(a|aa)+$"),
    *("(" * 3900 + "a" + ")" * 3900, "[^a]{1,100000}(b{3,9999}|c)", "|".join(["a{999}"] * 900)),
]
GRAMMARS = [
    *('start: "a"{9999991}', 'start: "a"{1,9999991}', "start: ((A{99}){99}){99}\nA: /a{99}/"),
    *("start: A{5000}\nA: /a{5000}/", 'start: "x" (A{5000} | "b")\nA: /a{5000}/'),
    *(f'start: r0\n{RULES}r24: "aaaaaaaaa"', f"start: R0\n{RULES.upper()}" + 'R24: "a"'),
    *("start: A\nA: ~(/(a|b)*a(a|b){25}/)", "start: A\nA: /(a|b)*a(a|b){22}/ & /(a|b)*b(a|b){23}/"),
    "start: A\nA: " + " & ".join(f"/(.*a.{{{n}}})/" for n in range(100, 300)),
    'start: %json {"type": "integer", "multipleOf": 9999991}',
    'start: %regex {"substring_chars": "' + "abcdefgh" * 1500 + '"}',
    'start: s\ns: /[a-z]?/ s /[a-z]?/ s | "a"',
    "start: A A A A\n%ignore /[ a-z]{1,20000}/\nA: /a[0-9]{5000}/",
    "start: a{1,5000}\na[capture]: /[a-z]+/",
    "start: " + "(" * 15_000 + '"a"' + ")" * 15_000,
    "root ::= " + "(" * 4000 + '"a"' + ")" * 4000,
    'root ::= (("a"{9999}){9999}){9999}',
    'root ::= "a"{99999999}',
]
OTHERS: dict[str, Any] = {
    "enum": {"enum": [str(number) for number in range(4000)]},
    "anyOf": {"anyOf": [{"const": number} for number in range(1500)]},
    "allOf": {"allOf": [{"multipleOf": 9_000 + number} for number in range(9)], "type": "integer"},
    "alternatives of allOf": {
        "allOf": [{"anyOf": [{"minimum": n}, {"maximum": -n}]} for n in range(24)],
        "type": "integer",
    },
    "oneOf": {"oneOf": [{"const": number} for number in range(900)]},
    "prefixItems": {
        "prefixItems": [{"type": "integer", "multipleOf": 9_000 + n} for n in range(600)],
        "minItems": 600,
    },
    "patternProperties": {"patternProperties": {f"^a{{{n}}}b": {} for n in range(9_000, 9_200)}},
    "patterns": {"prefixItems": [{"pattern": f"^a{{{n}}}$"} for n in range(9_000, 9_400)]},
    "required": {"properties": {}, "required": [f"p{n}" for n in range(2000)]},
    "formats": {"prefixItems": [{"type": "string", "format": "uri"}] * 500},
    "one pattern and a length": {"pattern": "^(a|b)*a(a|b){20}$", "minLength": 1000},
    "a chain of references": doubled(24, {"type": "integer"}, lambda ref: {"allOf": [ref, ref]}),
    "a tree of references": doubled(
        24, {"type": "integer"}, lambda ref: {"type": "array", "prefixItems": [ref, ref]}
    ),
    "depth": {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}},
    "guidance": {
        "x-guidance": {"whitespace_flexible": False, "whitespace_pattern": ""},
        **{"type": "array", "minItems": 9999, "items": {"const": "b" * 9000}},
    },
}
KEYWORDS = [
    schema({**BASES[kind], name: number})
    for place, name in enumerate(SIZES)
    for kind in [next(kind for kind in BASES if name.endswith(kind))]
    for number in NUMBERS[choose(place % 3, 0) :: choose(3, 1)]
]
WALK: list[Constraint] = [
    *KEYWORDS,
    *map(schema, OTHERS.values()),
    *(JsonSchemaConstraint(schema=text) for text in ('{"items":' * 3000 + "{}" + "}" * 3000,)),
    *(JsonSchemaConstraint(schema='{"maximum":' + "9" * 30_000 + "}") for _ in range(1)),
    *(RegexConstraint(pattern=pattern) for pattern in COUNTED),
    *(schema({"type": "string", "pattern": f"^{pattern}"}) for pattern in COUNTED),
    *(GrammarConstraint(grammar=unforced(grammar)) for grammar in GRAMMARS),
    GrammarConstraint(grammar="start: A{5000}\nA: /a{5000}/"),  # as no client's grammar is
]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, PATIENCE_S))


def children() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            found += [process] * ("lightserve.grammar_process" in process.cmdline())
    return found


async def found(checker: ConstraintChecker, constraint: Constraint) -> str:
    """What is wrong with a constraint; empty: nothing."""
    try:
        await checker.check(constraint, param="field")
    except InvalidRequest as error:
        assert error.status == 400 and error.message.startswith("field cannot be enforced: ")
        return error.message
    return ""


@more_when_long
def test_no_number_takes_more_than_the_limits() -> None:
    """This process stays as it is, and what is not refused takes little where it is used."""
    own = psutil.Process()
    most = [0]

    async def watch() -> None:
        while True:
            for process in children():
                most[0] = max(most[0], process.memory_info().rss)
            await asyncio.sleep(0.005)

    async def scenario() -> None:
        checker = ConstraintChecker()
        watching = asyncio.create_task(watch())
        before = own.memory_info().rss
        complaints = [await found(checker, constraint) for constraint in WALK]
        watching.cancel()
        assert own.memory_info().rss - before <= 32 * MiB
        assert 0 < most[0] <= MAX_PROCESS_BYTES
        assert any("to compile" in complaint for complaint in complaints)
        assert any("multipleOf may be at most 10000" in complaint for complaint in complaints)
        accepted.extend(c for c, complaint in zip(WALK, complaints, strict=True) if not complaint)
        assert not await found(checker, RegexConstraint(pattern="[ab]+")), "the next one is served"
        checker.close()
        while children():
            await asyncio.sleep(0.01)

    accepted: list[Constraint] = []
    run(scenario())
    assert len(accepted) > len(WALK) // 3
    vocabulary = byte_vocabulary()
    before = own.memory_info().rss
    for constraint in accepted:  # as a worker does it, and some tokens further
        matcher = compile_matcher(in_lark(constraint), vocabulary)
        for _ in range(20):
            mask = matcher.compute_bitmask()
            token_id = next(
                (
                    8 * at + bit
                    for at, byte in enumerate(mask)
                    for bit in range(8)
                    if byte >> bit & 1
                ),
                None,
            )
            if token_id is None or not matcher.consume_token(token_id):
                break
        assert own.memory_info().rss - before <= 128 * MiB


@pytest.mark.parametrize(
    ("signum", "status"),
    [(signal.SIGKILL, 503), (signal.SIGABRT, 400), (signal.SIGXCPU, 400), (signal.SIGSEGV, 400)],
)
def test_a_process_that_ends_takes_one_check_with_it(signum: int, status: int) -> None:
    """Those behind it have a new one; what is no fault of the constraint is no refusal of it."""

    async def scenario() -> None:
        checker = ConstraintChecker()
        await checker.check(RegexConstraint(pattern="a"), param="field")
        (process,) = children()
        process.suspend()
        asked, behind = (
            asyncio.create_task(checker.check(RegexConstraint(pattern=text), param="field"))
            for text in "bc"
        )
        await asyncio.sleep(0.01)
        os.kill(process.pid, signum)
        process.resume()
        with pytest.raises((InvalidRequest, RequestFailed)) as refused:
            await asked
        assert refused.value.status == status  # type: ignore[attr-defined]
        await behind
        assert [child.pid for child in children()] != [process.pid]
        checker.close()

    run(scenario())


def test_the_event_loop_never_waits_for_the_end_of_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that does not end at once would hold up every request of the frontend."""
    waited_in: list[threading.Thread] = []
    wait = subprocess.Popen.wait

    def noted_wait(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        waited_in.append(threading.current_thread())
        return wait(process, timeout)

    async def scenario() -> None:
        checker = ConstraintChecker()
        for number, end_timeout_s in enumerate([PATIENCE_S, 0.05]):
            await checker.check(RegexConstraint(pattern=f"a{number}"), param="field")
            (process,) = children()
            process.suspend()
            monkeypatch.setattr(structured_output, "END_TIMEOUT_S", end_timeout_s)
            asked = asyncio.create_task(
                checker.check(RegexConstraint(pattern=f"b{number}"), param="field")
            )
            await asyncio.sleep(0.01)
            if end_timeout_s == PATIENCE_S:
                process.kill()
            with pytest.raises(RequestFailed):
                await asked
            monkeypatch.setattr(structured_output, "END_TIMEOUT_S", PATIENCE_S)
        await checker.check(RegexConstraint(pattern="c"), param="field")
        checker.close()

    monkeypatch.setattr(subprocess.Popen, "wait", noted_wait)
    run(scenario())
    assert len(waited_in) >= 3
    assert threading.main_thread() not in waited_in


def test_an_error_that_is_no_refusal_ends_one_check_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as a process that cannot be started; clients learn nothing of why."""
    judge = GrammarProcess.judge

    async def broken_judge(self: GrammarProcess, constraint: Constraint) -> Verdict:
        if constraint == RegexConstraint(pattern="a"):
            raise RuntimeError("/secret/path")
        return await judge(self, constraint)

    async def scenario() -> None:
        monkeypatch.setattr(GrammarProcess, "judge", broken_judge)
        checker = ConstraintChecker()
        broken, behind = (
            asyncio.create_task(checker.check(RegexConstraint(pattern=text), param="field"))
            for text in "ab"
        )
        with pytest.raises(RequestFailed, match=r"^an internal error occurred$") as failed:
            await asyncio.wait_for(broken, 20.0)
        assert failed.value.status == 500
        assert await behind == RegexConstraint(pattern="b")
        checker.close()

    run(scenario())


def test_the_process_ends_with_its_parent(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(
        "import asyncio\n"
        "from lightserve.frontend.structured_output import ConstraintChecker\n"
        "from lightserve.messages.common import RegexConstraint\n"
        "async def main():\n"
        "    checker = ConstraintChecker()\n"
        "    await checker.check(RegexConstraint(pattern='a'), param='x')\n"
        "    print(checker._process._process.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        process.wait(PATIENCE_S)


def test_limits_of_the_whole_server_are_no_hindrance() -> None:
    """They may be lower than the process's own, and no program may raise them."""
    gib = 2**30
    code = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({3 * gib}, {3 * gib}))\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (50, 50))\n"
        "from lightserve import grammar_process\n"
        f"grammar_process.limit_memory({4 * gib})\n"
        "grammar_process.limit_cpu()\n"
        "print(resource.getrlimit(resource.RLIMIT_AS)[0], resource.getrlimit(resource.RLIMIT_CPU))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    memory, cpu = result.stdout.split(maxsplit=1)
    assert int(memory) == 3 * gib
    assert cpu.strip() in {f"({second}, 50)" for second in range(2, 9)}


def test_the_process_gets_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "LIGHTSERVE_API_KEY"):
        monkeypatch.setenv(name, "secret")
    assert "secret" not in environment().values()


@pytest.mark.parametrize(("name", "number"), [("mallinfo2", c_size_t), ("mallinfo", c_uint)])
def test_memory_in_use_is_counted_with_old_and_new_libraries(name: str, number: Any) -> None:
    count = grammar_process._counter(name, number)
    before = count()
    data = bytearray(50 * MiB)
    assert 50 * MiB <= count() - before <= 51 * MiB
    del data
    assert count() - before <= MiB
