"""What is wrong with a line of an input file is said with its number, its field and its value."""

from __future__ import annotations

import codecs
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from support.batch_store import ENDPOINT, check_lines, jsonl, line, open_store, upload

from lightserve.batches import lines as lines_module
from lightserve.batches.lines import LineCheck, body_of
from lightserve.batches.records import CHUNK_BYTES, MAX_LINE_BYTES, MAX_LINES, NewLine
from lightserve.errors import InvalidRequest


def check(tmp_path: Path, data: bytes) -> list[NewLine]:
    def check_model(name: str) -> None:
        if name != "m":
            raise InvalidRequest(f'model "{name}" is none', code="model_not_found", status=404)

    with open_store(tmp_path) as store:
        file = upload(store, data)
        lines = check_lines(store.files, file, ENDPOINT, check_model)
        for each in lines:
            text = store.files.read_span(file.number, each.position, each.num_bytes)
            assert json.loads(text)["custom_id"] == each.custom_id
        return lines


def test_a_file_may_end_with_a_line_feed_behind_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINES", 3)
    with open_store(tmp_path) as store:
        for num_lines, ending in ((3, b""), (3, b"\n"), (4, b"")):
            data = jsonl([line(f"r{number}") for number in range(num_lines)]) + ending
            file = upload(store, data)
            if num_lines == 3:
                found = check_lines(store.files, file, ENDPOINT, lambda name: None)
                assert len(found) == 3
                continue
            with pytest.raises(InvalidRequest, match=r"line 4 .* at most 3 lines"):
                check_lines(store.files, file, ENDPOINT, lambda name: None)


def test_lines_are_found_wherever_chunks_are_cut(tmp_path: Path) -> None:
    sizes = [10, CHUNK_BYTES - 200, CHUNK_BYTES, 3 * CHUNK_BYTES, 1]
    lines = [line(f"r{n}", body={"prompt": "é" * (size // 2)}) for n, size in enumerate(sizes)]
    data = jsonl([json.dumps(each, ensure_ascii=False).encode() for each in lines])
    for tail in (b"", b"\n", b"\r\n\n  \n"):
        assert [each.custom_id for each in check(tmp_path, data + tail)] == [
            each["custom_id"] for each in lines
        ]


GOOD = line("a")


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"{", "line 2 of the input file: it is not valid JSON"),
        (b"[1]", "line 2 of the input file: Expected"),
        (b'{"custom_id": "\xff"}', "line 2 of the input file: it is not valid UTF-8"),
        (line("a"), 'line 2 of the input file: custom_id must be unique, got "a" as in line 1'),
        (line(""), "line 2 of the input file: custom_id must have 1 to 512 characters, got 0"),
        (line("x" * 513), "custom_id must have 1 to 512 characters, got 513"),
        (line("a\0"), 'custom_id must not have the character U+0000, got "a\\u0000"'),
        (line("b", method="GET"), 'line 2 of the input file: method must be "POST", got "GET"'),
        (line("b", url="/v1/x"), 'url must be the batch\'s endpoint /v1/completions, got "/v1/x"'),
        (line("b", more=1), "unknown field `more`"),
        (
            line("b") | {"custom_id": 5},
            "line 2 of the input file: custom_id: Expected `str`, got `int`",
        ),
        (line("b", body={"model": "other"}), 'line 2 of the input file: body.model "other"'),
        (line("b", body={"stream": True}), "body.stream must be false, got true"),
        (line("b", body={"service_tier": "auto"}), 'service_tier must be "flex", got "auto"'),
        (line("b", body={"slo": {"ttft_ms": 1}}), "body.slo is not supported"),
        (b"x" * (MAX_LINE_BYTES + 1), f"at most {MAX_LINE_BYTES} bytes"),
        (b"x" * (3 * MAX_LINE_BYTES), f"at most {MAX_LINE_BYTES} bytes"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, bad: Any, said: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        check(tmp_path, jsonl([GOOD, bad]))
    assert said in error.value.message
    assert error.value.status == 400 and error.value.param == "input_file_id"


@pytest.mark.parametrize("before", [b"", b"\n", b" "])
def test_a_byte_order_mark_is_passed_over(tmp_path: Path, before: bytes) -> None:
    """At the beginning alone: elsewhere it is no JSON. `check` holds the spans against the file."""
    data = codecs.BOM_UTF8 + before + jsonl([line("a"), line("b")])
    assert [each.custom_id for each in check(tmp_path, data)] == ["a", "b"]
    with pytest.raises(InvalidRequest, match="at least one line, got 0"):
        check(tmp_path, codecs.BOM_UTF8 + before)
    line_check = LineCheck(ENDPOINT, lambda name: None)
    found = [found for byte in data for found in line_check.add(bytes([byte]))]
    for each, name in zip(found + line_check.finish(), "ab", strict=True):
        span = data[each.position : each.position + each.num_bytes]
        assert json.loads(span)["custom_id"] == name
    with pytest.raises(InvalidRequest, match=r"line 2 .* not valid JSON"):
        check(tmp_path, jsonl([line("a")]) + b"\n" + codecs.BOM_UTF8 + jsonl([line("b")]))


def test_a_file_has_at_least_one_line_and_not_too_many(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="at least one line, got 0"):
        check(tmp_path, b"\n\n")
    with pytest.raises(InvalidRequest, match=f"line {MAX_LINES + 1} .* at most {MAX_LINES} lines"):
        check(tmp_path, b"\n" * (MAX_LINES + 5))


def test_a_line_becomes_a_request_of_best_effort() -> None:
    plain = line("a", body={"prompt": [1, 2]})
    assert json.loads(body_of(json.dumps(plain).encode())) == {
        **plain["body"],
        "service_tier": "flex",
    }
    told = line("a", body={"service_tier": "flex"})
    assert json.loads(body_of(json.dumps(told).encode())) == told["body"]
    absent = line("a", body={"service_tier": None, "max_tokens": 3})
    expected = json.dumps(absent["body"] | {"service_tier": "flex"}, sort_keys=True)
    pairs = json.loads(body_of(json.dumps(absent).encode()), object_pairs_hook=list)
    assert json.dumps(dict(sorted(pairs))) == expected and len(dict(pairs)) == len(pairs)


def test_a_check_keeps_little_of_the_lines_that_it_has_seen() -> None:
    line_check = LineCheck(ENDPOINT, lambda name: None)
    num_lines = 0
    tracemalloc.start()
    try:
        for start in range(0, 20_000, 500):
            lines = [line(f"{n:>500}") for n in range(start, start + 500)]
            num_lines += len(line_check.add(jsonl(lines) + b"\n"))
        del lines
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_lines == 20_000 and line_check.finish() == []
    assert kept_bytes < 200 * num_lines, "less than half of the ids alone"
