"""`lightserve why`: the time of a request by what held it up, against the log itself."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lightserve.cli.decision_logs import why as why_command
from lightserve.cli.simulate import command as simulate_command
from lightserve.decisions.records import Decision, RequestName
from lightserve.decisions.replaying import DecisionLogReader, find_request, story_of
from lightserve.decisions.why import COMPUTES, MAX_OTHERS, Why, explain
from lightserve.errors import DecisionLogError
from lightserve.types import FrontendId, RequestId

TRAFFIC = (
    *("--rt", "poisson:12", "--rt-lengths", "uniform:10-200,5-60", "--rt-max-tokens", "80"),
    *("--be", "closed:20", "--be-lengths", "uniform:100-300,20-60", "--ttft-slo-ms", "1000"),
    *("--duration-s", "3", "--margin-s", "1", "--capacity-tokens", "2000", "--json"),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("why") / "log.jsonl"
    arguments = (*TRAFFIC, "--policy", "chunked", "--decision-log", str(path))
    result = CliRunner().invoke(simulate_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return path


def asked(path: Path, name: str, *arguments: str) -> Result:
    return CliRunner().invoke(
        why_command, [name, "--log", str(path), *arguments], catch_exceptions=False
    )


def explained(path: Path, frontend_id: int, request_id: int) -> Why:
    name = RequestName(FrontendId(frontend_id), RequestId(request_id))
    return explain(DecisionLogReader(path), name)


@pytest.mark.parametrize("request_id", [3, 9, 15])
@pytest.mark.parametrize("frontend_id", [0, 1])
def test_all_time_is_accounted_for(path: Path, frontend_id: int, request_id: int) -> None:
    why = explained(path, frontend_id, request_id)
    assert sum(why.seconds_of.values()) == pytest.approx(why.to_s - why.from_s)
    reasons = {what: s for what, s in why.seconds_of.items() if what != COMPUTES}
    assert why.constraint == max(reasons, key=lambda what: reasons[what], default=None)
    assert set(why.steps_of) == set(why.seconds_of)
    assert len(why.served_instead) <= MAX_OTHERS
    assert why.num_served_instead >= len(why.served_instead)
    assert all(other.name != why.request for other in why.served_instead)


def test_what_was_served_instead_is_what_the_log_says(path: Path) -> None:
    why = explained(path, 1, 15)
    assert why.constraint == "kv_future" and why.explains == "ttft" and why.missed == []
    name, tokens, came = (1, 15), Counter[Any](), False
    for line in DecisionLogReader(path).lines():
        record = line.record
        if not isinstance(record, Decision):
            message = getattr(record, "message", None)
            came |= message is not None and (record.frontend_id, message.request_id) == name  # type: ignore[union-attr]
            continue
        if not came:
            continue
        if any(share[:2] == name for share in record.advancing):
            break
        tokens.update({share[:2]: share.num_tokens for share in record.advancing})
    assert sum(why.tokens_instead.values()) == sum(tokens.values()) > 0
    assert why.num_served_instead == len(tokens)
    best = why.served_instead[0]
    assert tokens[tuple(map(int, best.name.split("/")))] == best.num_tokens == max(tokens.values())


def test_what_was_missed_is_what_the_story_says(path: Path) -> None:
    late = in_time = 0
    for request_id in range(1, 20, 2):
        try:
            name = find_request(DecisionLogReader(path), f"0/{request_id}")[0]
        except DecisionLogError:
            break
        story = "\n".join(story_of(DecisionLogReader(path), name))
        why = explain(DecisionLogReader(path), name)
        if "its first token is there" in story:
            assert ("ttft" in why.missed) == ("its first token is there, late" in story)
            late += "ttft" in why.missed
            in_time += "ttft" not in why.missed
        assert ("mtpot" in why.missed) == any(
            "largest gap" in line and "late by" in line for line in story.split("\n")
        )
        if why.missed:
            assert why.explains == why.missed[0]
    assert late and in_time


def test_in_words_and_as_json(path: Path) -> None:
    words = asked(path, "1/15").output.splitlines()
    assert words[0] == "request 1/15, class be: met every target it had"
    assert any(line.startswith("held up by kv_future: memory is expected") for line in words)
    assert any(line.startswith("served instead: ") for line in words)
    assert any(line.startswith("steps in that time: predicted ") for line in words)
    document = json.loads(asked(path, "1/15", "--json").output)
    assert document["request"] == "1/15" and document["constraint"] == "kv_future"
    assert document["observed_s"] == pytest.approx(document["predicted_s"], rel=0.2)


def test_who_is_not_in_the_log(path: Path, tmp_path: Path) -> None:
    with pytest.raises(DecisionLogError, match="there is no request 7/7"):
        asked(path, "7/7")
    short = tmp_path / "short.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if b'"kind":"decision"' in line)
    short.write_bytes(b"".join(lines[:first]))
    name = "1/" + str(json.loads(lines[first - 1])["message"]["request_id"])
    with pytest.raises(DecisionLogError, match="ends before a step"):
        asked(short, name)
