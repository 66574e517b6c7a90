"""Streams without targets beside long prompts, in virtual time; and that targets know no pace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.scheduling.h200 import MIXES, POLICIES, Mix, play
from lightserve.decisions.replaying import DecisionLogReader, find_request
from lightserve.decisions.why import explain
from lightserve.sim import HybridConfig, Targets, run_hybrid
from tools.day_picture import PICTURE, course_of, draw_day

PACED = ("priority", "unified")
SCENE = Mix("cpu", 1, 2, 7000)


RT_MIXES = [mix for mix in MIXES if mix.prompt_class == "rt"]


@pytest.mark.parametrize(
    ("mix", "policy"), [(mix, "unified") for mix in RT_MIXES] + [(SCENE, "priority")]
)
def test_streams_keep_half_of_their_pace_or_thirty_tokens_a_second(mix: Mix, policy: str) -> None:
    kept = play(mix, policy=policy)
    assert kept.keeps
    assert kept.gaps_ms[1] < 1.2 * max(33.0, 2e3 / kept.alone_per_s)


def test_without_a_pace_they_do_not() -> None:
    without, paced = play(SCENE, pace_ms=0.0), play(SCENE)
    assert not without.keeps and without.gaps_ms[2] > 300
    assert paced.prompts_s < 1.5 * without.prompts_s, "a part of the time is the stream's now"


def test_two_prompts_of_64k_on_an_h200_leave_fifteen_tokens_a_second() -> None:
    mix = Mix("h200", 1, 2, 64_000)
    assert play(mix).beside_per_s >= 15 > play(mix, pace_ms=0.0).beside_per_s


@pytest.mark.parametrize("policy", PACED)
def test_a_batch_stretches_steps_by_half_and_comes_to_its_end(policy: str) -> None:
    mix = Mix("cpu", 1, 2, 3000, "be")
    without, paced = (play(mix, policy=policy, **options) for options in ({"pace_ms": 0.0}, {}))
    assert paced.gaps_ms[1] <= 1.7 * 1e3 / paced.alone_per_s < without.gaps_ms[1]
    assert paced.beside_per_s >= 0.6 * paced.alone_per_s


def decisions(path: Path, policy: str, targets: Targets, **options: float | str) -> list[Any]:
    """Return the decisions of a run of chats over a backlog, without the hashes of lines."""
    run_hybrid(
        HybridConfig(
            rt="poisson:16",
            rt_lengths="uniform:50-1500,20-200",
            be="closed:64",
            be_lengths="uniform:512-1024,32-128",
            duration_s=5.0,
            margin_s=1.0,
            capacity_tokens=20_000,
            policy=policy,
            targets=targets,
            serve_options=options,
            decision_log=str(path),
        )
    )
    records = map(json.loads, path.read_text().splitlines())
    return [record | {"chain": ""} for record in records if record["kind"] == "decision"]


@pytest.mark.parametrize("policy", PACED)
def test_where_requests_have_targets_every_decision_is_as_without_a_pace(
    policy: str, tmp_path: Path
) -> None:
    targets = Targets(ttft_s=0.4, tpot_s=0.2, mtpot_s=0.2)
    paced = decisions(tmp_path / "a", policy, targets)
    assert len(paced) > 100
    assert paced == decisions(tmp_path / "b", policy, targets, pace_ms=0.0)


@pytest.mark.parametrize("policy", PACED)
def test_a_pace_that_limits_nothing_changes_nothing(policy: str, tmp_path: Path) -> None:
    wide: dict[str, float | str] = {"pace_ms": 60_000.0, "be_stretch": 1000.0}
    paced = decisions(tmp_path / "a", policy, Targets(), **wide)
    assert paced == decisions(tmp_path / "b", policy, Targets(), pace_ms=0.0)
    assert paced != decisions(tmp_path / "c", policy, Targets())


def test_why_names_the_pace(tmp_path: Path) -> None:
    path = tmp_path / "log"
    decided = decisions(path, "unified", Targets(), pace_ms=20.0)
    waited = [
        left[:2]
        for step in decided
        for left in step["skipped"]
        if left[0] == 0 and left[2] == "pace"  # a real-time one
    ]
    name = max(set(map(tuple, waited)), key=[*map(tuple, waited)].count)
    reader = DecisionLogReader(path)
    why = explain(reader, find_request(reader, f"{name[0]}/{name[1]}")[0])
    assert why.steps_of["pace"] > 0
    assert any("the pace of others' tokens leaves no time (pace)" in line for line in why.text())


def test_a_day_of_chats_has_a_picture(tmp_path: Path) -> None:
    courses = {policy: course_of(policy, (20, 40), 4.0) for policy in POLICIES}
    assert {len(values) for course in courses.values() for values in course} == {4}
    unified, priority = courses["unified"], courses["priority"]
    assert np.mean(unified.in_time_pct) > 95
    assert np.mean(priority.in_time_pct) < 50
    assert 0 < unified.best_effort_per_s[-1] < unified.best_effort_per_s[0]
    for name in ("one.svg", "two.svg"):
        draw_day(courses, tmp_path / name)
    drawn = (tmp_path / "one.svg").read_text()
    assert drawn == (tmp_path / "two.svg").read_text(), "the same for the same courses"
    shown = PICTURE.read_text()
    for text in ("lightserve: unified", "chats in time, %", "50 chats/s"):
        assert f">{text}</text>" in drawn and f">{text}</text>" in shown
