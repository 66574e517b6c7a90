"""Lives noted beside a core, against the log of the same core: every second has its name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from support.core_scenes import Arrival, submit

from lightserve.cli.simulate import command as simulate_command
from lightserve.decisions.lives import COMPUTES, MAX_STRETCHES, Lives, WatchedCore
from lightserve.decisions.records import Decision, MessageReceived, RequestName, event_of
from lightserve.decisions.replaying import DecisionLogReader, make_core_of
from lightserve.decisions.why import explain
from lightserve.messages.frontend_router import Abort, Client, Finish, RequestLife, Submit
from lightserve.messages.router_worker import StepResult
from lightserve.router.events import FromFrontend, FrontendGone
from lightserve.router.step import PlannedStep
from lightserve.types import FrontendId, RequestClass, RequestId, RequestKey

TRAFFIC = (
    *("--rt", "poisson:12", "--rt-lengths", "uniform:10-200,5-60", "--rt-max-tokens", "80"),
    *("--be", "closed:20", "--be-lengths", "uniform:100-300,20-60", "--ttft-slo-ms", "1000"),
    *("--duration-s", "3", "--margin-s", "1", "--capacity-tokens", "2000", "--json"),
)


ARRIVAL = Arrival(0.0, 3, 4, 5)


class _Named(Lives):
    """Lives of a simulation, whose requests have no names: FRONTEND/REQUEST is one."""

    def on_submit(self, key: RequestKey, submit: Submit, now_s: float) -> None:
        names = (f"{key.frontend_id}/{key.request_id}",)
        super().on_submit(key, msgspec.structs.replace(submit, names=names), now_s)


def watched(path: Path, max_kept: int = 10_000) -> tuple[Lives, float]:
    """Replay a log through a core that is watched."""
    reader, lives, now_s = DecisionLogReader(path), _Named(max_kept), 0.0
    core = WatchedCore(make_core_of(reader.header), lives)
    for line in reader.lines():
        record = line.record
        if isinstance(record, Decision):
            step = core.plan(record.planned_at_s)
            assert isinstance(step, PlannedStep)
            core.commit(step, record.committed_at_s)
            continue
        event, now_s = event_of(record), record.now_s
        if isinstance(event, StepResult):
            core.on_result(event, now_s)
        else:
            core.on_message(event, now_s)
    return lives, now_s


@pytest.fixture(scope="module", params=["chunked", "unified"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lives") / "log.jsonl"
    arguments = (*TRAFFIC, "--policy", request.param, "--decision-log", str(path))
    result = CliRunner().invoke(simulate_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return path


def _names(path: Path) -> list[RequestName]:
    return [
        RequestName(line.record.frontend_id, line.record.message.request_id)
        for line in DecisionLogReader(path).lines()
        if isinstance(line.record, MessageReceived) and isinstance(line.record.message, Submit)
    ]


def _life(lives: Lives, name: RequestName, now_s: float) -> RequestLife:
    (life,) = lives.tell(f"{name.frontend_id}/{name.request_id}", None, now_s)
    return life


def test_every_second_has_its_name(path: Path) -> None:
    lives, now_s = watched(path)
    num_ended = num_whole = 0
    for name in _names(path):
        life = _life(lives, name, now_s)
        if life.before_first_token:
            seconds = [*life.before_first_token.values(), *life.after_first_token.values()]
            assert sum(seconds) == pytest.approx(life.age_s)
        if life.end is None or len(life.stretches) == MAX_STRETCHES:
            continue
        num_ended += 1
        assert sum(each.seconds for each in life.stretches) == pytest.approx(life.age_s)
        ends = [each.at_s + each.seconds for each in life.stretches]
        assert [each.at_s for each in life.stretches[1:]] == pytest.approx(ends[:-1])
        computed = sum(each.num_tokens for each in life.stretches)
        assert computed == sum(each.num_tokens for each in life.stretches if each.what == COMPUTES)
        num_whole += computed > life.num_output_tokens
    assert num_ended > 20 and num_whole > 20


@pytest.mark.parametrize("number", [4, 30])
def test_it_is_what_the_log_says(path: Path, number: int) -> None:
    lives, now_s = watched(path)
    lived = [(name, _life(lives, name, now_s)) for name in _names(path)]
    name, life = [pair for pair in lived if pair[1].first_token_s is not None][number]
    why = explain(DecisionLogReader(path), name)
    assert life.first_token_s is not None and life.request_class is why.request_class
    assert why.explains == "ttft" and life.first_token_s == pytest.approx(why.to_s)
    # What is not looked at keeps the reason of the first such step: of those it is the sum.
    assert life.before_first_token[COMPUTES] == pytest.approx(why.seconds_of[COMPUTES])
    assert sum(life.before_first_token.values()) == pytest.approx(sum(why.seconds_of.values()))
    before = [each for each in life.stretches if each.at_s < life.first_token_s]
    others = Counter[RequestClass]()
    for each in before:
        if each.what != COMPUTES:
            others.update(each.tokens_of_others)
    assert +others == Counter(why.tokens_instead)


def test_decisions_are_in_order_and_are_what_the_log_says(path: Path) -> None:
    lives, now_s = watched(path)
    decisions = [
        line.record for line in DecisionLogReader(path).lines() if isinstance(line.record, Decision)
    ]
    num_paused = 0
    for name in _names(path):
        life = _life(lives, name, now_s)
        found = Counter(each.what for each in life.moments)
        of_log = Counter(
            paused=sum(name in each.paused for each in decisions),
            preempted=sum(name in each.preempted for each in decisions),
            checkpointed=sum(
                name == RequestName(*share[:2]) for each in decisions for share in each.checkpointed
            ),
        )
        num_paused += of_log["paused"]
        assert {what: found[what] for what in of_log} == of_log
        if any(name == RequestName(*share[:2]) for each in decisions for share in each.advancing):
            assert life.moments[0].what == "starts" and found["starts"] == 1
            assert found["resumes"] <= found["paused"] <= found["resumes"] + 1
        else:
            assert not life.moments
        assert [each.at_s for each in life.moments] == sorted(each.at_s for each in life.moments)
    assert num_paused > 0


def test_only_so_many_that_have_ended_are_kept(path: Path) -> None:
    lives, now_s = watched(path, max_kept=3)
    told = [lives.tell(f"{n.frontend_id}/{n.request_id}", None, now_s) for n in _names(path)]
    assert sum(life[0].end is not None for life in told if life) == 3
    assert sum(not life for life in told) > 10


def test_it_is_told_to_its_own_key_alone_and_ends_with_its_client() -> None:
    lives = Lives(10)
    key = RequestKey(FrontendId(0), RequestId(1))
    mine = submit(1, ARRIVAL, client=Client(key="mine"), names=("chatcmpl-1", "x-1"))

    class _Silent:
        def on_message(self, event: object, now_s: float) -> list[object]:
            return []

    core = WatchedCore(_Silent(), lives)  # type: ignore[arg-type]
    core.on_message(FromFrontend(FrontendId(0), mine), 5.0)
    for name in ("chatcmpl-1", "x-1"):
        assert len(lives.tell(name, "mine", 6.0)) == len(lives.tell(name, None, 6.0)) == 1
        assert lives.tell(name, "another", 6.0) == lives.tell(name, "", 6.0) == []
    core.on_message(FromFrontend(FrontendId(0), Abort(request_id=key.request_id)), 7.0)
    assert lives.tell("x-1", "mine", 9.0)[0].end == "abort"
    core.on_message(FromFrontend(FrontendId(0), submit(3, ARRIVAL, names=("x-3",))), 7.5)
    core.on_message(FromFrontend(FrontendId(0), Finish(request_id=RequestId(3), num_tokens=1)), 8.0)
    assert lives.tell("x-3", None, 9.0)[0].end == "stop"
    core.on_message(FromFrontend(FrontendId(0), submit(2, ARRIVAL, names=("x-2",))), 8.0)
    core.on_message(FrontendGone(FrontendId(1)), 8.5)
    assert lives.tell("x-2", None, 9.0)[0].end is None
    core.on_message(FrontendGone(FrontendId(0)), 9.0)
    assert lives.tell("x-2", None, 9.5)[0].end == "frontend_gone"
