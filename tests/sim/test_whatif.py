"""`lightserve whatif`: a log's traffic again, as it was and with other settings."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.core_scenes import Arrival, submit

from lightserve.cli.decision_logs import whatif as whatif_command
from lightserve.cli.simulate import command as simulate_command
from lightserve.decisions.records import MessageReceived
from lightserve.decisions.replaying import DecisionLogReader
from lightserve.errors import ConfigError, DecisionLogError
from lightserve.sim.virtual_gpus import read_hardware
from lightserve.sim.whatif import (
    Asked,
    Outcome,
    Recording,
    Settings,
    _Taker,
    find_loop,
    parse_options,
    read_recording,
)
from lightserve.types import FinishReason, FrontendId, RequestClass, RequestId, RequestKey

RT, BE = RequestClass.RT, RequestClass.BE
TRAFFIC = (
    *("--rt", "poisson:8", "--rt-lengths", "uniform:10-200,5-60", "--rt-max-tokens", "80"),
    *("--be", "closed:12", "--be-lengths", "uniform:100-300,20-60", "--ttft-slo-ms", "250"),
    *("--duration-s", "8", "--margin-s", "1", "--capacity-tokens", "3000", "--json"),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whatif") / "log.jsonl"
    arguments = (*TRAFFIC, "--policy", "unified", "--decision-log", str(path))
    result = CliRunner().invoke(simulate_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture(scope="module")
def recording(path: Path) -> Recording:
    return read_recording(DecisionLogReader(path))


@pytest.fixture(scope="module")
def same(recording: Recording) -> Outcome:
    """What comes of the settings that were."""
    return recording.run(Settings())


def test_the_same_settings_give_the_same(recording: Recording, same: Outcome) -> None:
    """Within points: the simulated machine is one that was fitted to the simulated machine."""
    was, again = recording.report(), same
    for each in RequestClass:
        arrivals = was.classes[each].arrivals
        # Those that wait for answers come a little later or sooner.
        off = 0 if each is RT else 0.05
        assert again.classes[each].arrivals == pytest.approx(arrivals, rel=off) and arrivals > 10
        before, after = was.attainment_pct(each), again.attainment_pct(each)
        assert before is not None and after == pytest.approx(before, abs=5.0)
        assert again.classes[each].throughput_tps == pytest.approx(
            was.classes[each].throughput_tps, rel=0.1
        )


def test_guesses_are_right_as_often_as_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    few = ("--rt", "closed:2", "--rt-lengths", "uniform:10-50,60-90", "--speculation", "ngram")
    rest = ("--duration-s", "6", "--margin-s", "1", "--draft-acceptance", "0.7")
    arguments = (*few, *rest, "--policy", "unified", "--decision-log", str(log))
    result = CliRunner().invoke(simulate_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    recording = read_recording(DecisionLogReader(log))
    assert recording.acceptance == pytest.approx(0.7, abs=0.05)
    was, again = recording.report().classes[RT], recording.run(Settings()).classes[RT]
    assert again.throughput_tps == pytest.approx(was.throughput_tps, rel=0.1)
    without = recording.run(Settings({"speculation": "off"})).classes[RT]
    assert without.throughput_tps < 0.7 * was.throughput_tps


def test_the_same_is_asked_twice_and_the_same_is_said(recording: Recording, same: Outcome) -> None:
    assert recording.run(Settings()) == same


def test_a_policy_that_knows_no_classes_is_worse_for_real_time(
    recording: Recording, same: Outcome
) -> None:
    blind = recording.run(Settings({"policy": "fcfs"})).classes[RT].ttft_ms_p99
    sharp = same.classes[RT].ttft_ms_p99
    assert blind is not None and sharp is not None and blind > 1.5 * sharp


def test_another_policy_gives_what_it_gives_when_it_is_run(
    recording: Recording, tmp_path: Path
) -> None:
    """Best-effort clients ask again once they are answered: with another policy at other times."""
    log = tmp_path / "log.jsonl"
    arguments = (*TRAFFIC, "--policy", "chunked", "--decision-log", str(log))
    assert CliRunner().invoke(simulate_command, arguments).exit_code == 0
    real = read_recording(DecisionLogReader(log)).report()
    told = recording.run(Settings({"policy": "chunked"}))
    for each in RequestClass:
        would, does = told.attainment_pct(each), real.attainment_pct(each)
        assert would == pytest.approx(does, abs=5.5)  # of 59, three are 5.1 points
        arrivals = real.classes[each].arrivals
        assert told.classes[each].arrivals == pytest.approx(arrivals, rel=0.08)


def _request(came_s: float, ended_s: float, gone: bool = False) -> Asked:
    of = submit(1, Arrival(0.0, 3, 4, 5))
    if gone:
        return Asked(of, came_s, gone_s=ended_s)
    return Asked(of, came_s, [ended_s], FinishReason.STOP)


def test_clients_that_wait_for_answers_are_found() -> None:
    rng = np.random.default_rng(0)
    durations = rng.uniform(0.5, 2.0, 90)
    # Three clients, each with a next question 0.1 s after an answer.
    turns = [itertools.accumulate(durations[i::3] + 0.1) for i in range(3)]
    closed = [
        _request(e - d - 0.1, e - 0.1)
        for i in range(3)
        for e, d in zip(turns[i], durations[i::3], strict=True)
    ]
    loop = find_loop(closed)
    assert loop is not None and loop.num_clients == 3
    assert loop.think_s == pytest.approx(0.1, abs=0.03)
    # By chance, in time and too many; one after the other with long pauses; too few to say.
    times = rng.exponential(0.5, 200).cumsum()
    assert find_loop([_request(at_s, at_s + 0.6) for at_s in times]) is None
    assert find_loop([_request(at_s, 3.0 * n) for n, at_s in enumerate(times, 1)]) is None
    assert find_loop([_request(10.0 * n, 10.0 * n + 1.0) for n in range(50)]) is None
    assert find_loop([_request(0.0, 1.0 + n, gone=n > 3) for n in range(9)]) is None
    assert find_loop([]) is None


def test_a_faster_machine_is_felt(recording: Recording, same: Outcome) -> None:
    fast = recording.run(Settings(speed=2.0))
    assert same.classes[BE].throughput_tps * 1.3 < fast.classes[BE].throughput_tps
    assert fast.classes[RT].ttft_ms_p50 < 0.8 * same.classes[RT].ttft_ms_p50  # type: ignore[operator]
    # Clients that are answered sooner ask more, if need be what was asked before.
    assert fast.classes[BE].arrivals > 1.2 * same.classes[BE].arrivals
    assert fast.classes[RT].arrivals == same.classes[RT].arrivals


def test_a_smaller_pool_and_a_higher_rate_are_felt(recording: Recording, same: Outcome) -> None:
    small = recording.run(Settings(max_kv_tokens=700)).classes[BE]
    assert small.throughput_tps < same.classes[BE].throughput_tps
    fast = recording.run(Settings(rate=2.0))
    assert fast.window_s == pytest.approx(recording.report().window_s / 2, rel=0.05)
    assert fast.classes[RT].arrivals == recording.report().classes[RT].arrivals


def test_what_belongs_to_the_old_policy_goes_with_it(recording: Recording) -> None:
    recording.config["late_min_share"] = 0.2
    try:
        recording.run(Settings({"policy": "chunked"}))
        with pytest.raises(ConfigError, match="--late-min-share needs --policy unified"):
            recording.run(Settings({"policy": "chunked", "late_min_share": 0.2}))
    finally:
        recording.config["late_min_share"] = 0.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy", "NAME=VALUE"),
        ("port=8000", "NAME=VALUE"),
        ("kv-events-insecure=maybe", "kv_events_insecure: must be true or false, got 'maybe'"),
        ("max-num-seqs=many", "max_num_seqs: must be int, got 'many'"),
    ],
)
def test_options_are_checked(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_options((text,))


def test_options_have_their_types() -> None:
    options = parse_options(("max-num-seqs=7", "--policy=fcfs", "late_min_share=0.1"))
    assert options == {"max_num_seqs": 7, "policy": "fcfs", "late_min_share": 0.1}
    for text, value in (("True", True), ("false", False)):
        assert parse_options((f"kv-events-insecure={text}",)) == {"kv_events_insecure": value}


def test_a_recording_says_what_its_requests_were(path: Path) -> None:
    """The first may come at zero; a refused one is one; mean outputs are those of whole ones."""
    taker = _Taker(DecisionLogReader(path))
    for number, now_s in ((1, 0.0), (2, 1.5)):
        message = submit(number, Arrival(0.0, 3, 4, 5))
        taker.feed(MessageReceived(now_s=now_s, frontend_id=FrontendId(0), message=message))
    assert taker.start_s == 0.0 and len(taker.requests) == 2

    keys = [RequestKey(FrontendId(0), RequestId(number)) for number in range(3)]
    requests = {key: _request(0.0, 1.0) for key in keys}
    requests[keys[0]].token_times_s = [0.5, 0.6, 1.0]
    requests[keys[1]].token_times_s = [0.5, 0.6, 1.0]
    requests[keys[2]].finish = FinishReason.ERROR
    recording = dataclasses.replace(read_recording(DecisionLogReader(path)), requests=requests)
    of_class = requests[keys[0]].submit.request_class
    assert recording.mean_outputs() == {each: 3 if each is of_class else 1 for each in RequestClass}
    seen = recording.clients().seen
    assert [seen[key].is_refused for key in keys] == [False, False, True]


def _asked(path: Path, *arguments: str) -> Any:
    return CliRunner().invoke(whatif_command, [str(path), *arguments], catch_exceptions=False)


def test_the_command(path: Path) -> None:
    lines = _asked(path, "--policy", "fcfs").output.splitlines()
    assert lines[1].split() == ["recorded", "same", "settings", "as", "asked"]
    assert sum(line.startswith("rt ") for line in lines) == 7
    document = json.loads(_asked(path, "--rate", "2", "--json").output)
    assert set(document) == {"num_steps", "recorded", "same settings", "as asked"}
    assert document["as asked"]["rt"]["arrivals"] == document["recorded"]["rt"]["arrivals"]
    with pytest.raises(ConfigError, match="--set policy cannot be combined with --policy"):
        _asked(path, "--policy", "fcfs", "--set", "policy=sjf")


def test_another_machine(path: Path, recording: Recording) -> None:
    """An H200 is faster than the virtual A100 that the log is of, but without graphs."""
    document = json.loads(_asked(path, "--hardware", "h200-llama-8b", "--json").output)
    fast, recorded = document["as asked"]["rt"], document["recorded"]["rt"]
    assert fast["arrivals"] == recorded["arrivals"]
    slow = recording.run(Settings(hardware=read_hardware("h200-llama-8b-eager"))).classes[RT]
    assert slow.ttft_ms_p50 is not None
    assert fast["ttft_ms_p50"] < recorded["ttft_ms_p50"] < slow.ttft_ms_p50
    with pytest.raises(ConfigError, match="--speed cannot be combined with --hardware"):
        _asked(path, "--hardware", "h200-llama-8b", "--speed", "2")
    with pytest.raises(ConfigError, match="--block-owner must be two-ended with --hardware qwen"):
        alone = ("block_owner=exclusive", "preemption=recompute", "cache_policy=off")
        options = [part for option in alone for part in ("--set", option)]
        _asked(path, "--hardware", "qwen3.5-0.8b@a100-80g", *options)
    with pytest.raises(ConfigError, match="--hardware must be a profile, h200-llama-8b"):
        _asked(path, "--hardware", "gpt@h200")


def test_a_log_that_says_too_little(path: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.jsonl"
    short.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:60]))
    with pytest.raises(DecisionLogError, match="at least 100 steps"):
        read_recording(DecisionLogReader(short))
