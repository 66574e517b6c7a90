"""Images in simulated runs: the encoder takes its time, in plans, reports and recordings alike."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from lightserve import sim
from lightserve.cli.decision_logs import replay as replay_command
from lightserve.cli.simulate import command as simulate_command
from lightserve.decisions.replaying import DecisionLogReader
from lightserve.errors import ConfigError
from lightserve.sim.capacity import PlanConfig, Row, make_plan, read_rows
from lightserve.sim.hybrid import HybridRun
from lightserve.sim.images import draw_images
from lightserve.sim.virtual_gpus import VirtualHardware
from lightserve.sim.whatif import Settings, read_recording
from lightserve.types import RequestClass

HARDWARE = sim.read_hardware("llava-1.5-7b@a100-80g")
assert isinstance(HARDWARE, VirtualHardware) and HARDWARE.encoder is not None
SLOW = dataclasses.replace(HARDWARE, per_encoder_token_s=10 * HARDWARE.per_encoder_token_s)
TARGETS = sim.Targets(ttft_s=2.0, tpot_s=0.2)
CONFIG = sim.HybridConfig(
    rt="poisson:4",
    rt_lengths="uniform:20-60,5-20",
    rt_images="1:576",
    be="closed:6",
    be_lengths="uniform:50-100,20-40",
    be_images="2:300",
    duration_s=8.0,
    margin_s=2.0,
    capacity_tokens=12_000,
    targets=TARGETS,
    hardware=HARDWARE,
    noise=0.0,
    checks_kv=True,
)


def finished(config: sim.HybridConfig) -> HybridRun:
    run = HybridRun(config)
    run.advance(config.duration_s)
    run.simulation.core.check_integrity()  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize("policy", ["unified", "chunked", "past-future"])
def test_each_image_is_encoded_once_and_its_time_is_a_step_s(policy: str) -> None:
    options: dict[str, Any] = {"policy": policy}
    if policy == "past-future":
        options = {"policy": "chunked", "admission": "past-future"}
    run = HybridRun(dataclasses.replace(CONFIG, **options))
    execute, encoded, seconds = run.worker.execute, [], []

    def noted(plan: Any, **times: float) -> Any:
        result = execute(plan, **times)
        encoded.append(result.encoded)
        seconds.append(result.encode_s)
        assert result.encode_s <= result.exec_s
        return result

    run.worker.execute = noted  # type: ignore[method-assign]
    run.advance(CONFIG.duration_s)
    assert sum(seconds) == pytest.approx(HARDWARE.per_encoder_token_s * sum(encoded))
    work = HARDWARE.encoder
    assert work is not None
    of_class = {
        each: sum(
            of.finish_reason is not None
            for key, of in run.simulation.outcomes.items()
            if key.frontend_id == number
        )
        for number, each in enumerate((RequestClass.RT, RequestClass.BE))
    }
    rng = np.random.default_rng(0)
    of_rt = work.num_layers * work.of_layer(draw_images((576,), rng)[0])
    of_be = 2 * work.num_layers * work.of_layer(draw_images((300,), rng)[0])
    least = of_class[RequestClass.RT] * of_rt + of_class[RequestClass.BE] * of_be
    sent = {c.request_class: len(c.arrivals_s) for c in run.clients.values()}
    assert least <= sum(encoded) <= sent[RequestClass.RT] * of_rt + sent[RequestClass.BE] * of_be
    assert min(of_class.values()) > 10


def test_the_same_seed_is_the_same_and_a_slower_encoder_is_felt() -> None:
    first, again, slow = (
        finished(dataclasses.replace(CONFIG, hardware=hardware)).report()
        for hardware in (HARDWARE, HARDWARE, SLOW)
    )
    assert first.rt == again.rt and first.be == again.be
    assert slow.rt.ttft_ms_p50 > first.rt.ttft_ms_p50 + 10.0  # type: ignore[operator]
    assert slow.be.throughput_tps < first.be.throughput_tps


@pytest.mark.parametrize("sees_itself", [False, True])
def test_images_see_themselves_where_those_of_the_hardware_do(sees_itself: bool) -> None:
    """No step ends within one then, however few tokens it may have."""
    work = dataclasses.replace(HARDWARE, encoder=replace(HARDWARE.encoder, sees_itself=sees_itself))
    run = HybridRun(dataclasses.replace(CONFIG, hardware=work, budget_tokens=128))
    execute, images, cut = run.worker.execute, {}, []

    def noted(plan: Any, **times: float) -> Any:
        images.update({each.row: each.images for each in plan.sequences})
        cut.extend(
            image
            for row in plan.rows
            for image in images[row.row]
            if image.start < row.start_position + row.num_tokens < image.end
        )
        return execute(plan, **times)

    run.worker.execute = noted  # type: ignore[method-assign]
    run.advance(CONFIG.duration_s)
    assert bool(cut) != sees_itself and any(images.values())


def test_routers_are_told_what_layers_take() -> None:
    """A step's predicted time has its images in it, from the first one on."""
    run = HybridRun(dataclasses.replace(CONFIG, be=None, be_lengths=None, be_images="0"))
    planned = []
    commit = run.core.commit

    def noted(step: Any, now_s: float) -> Any:
        planned.append(step)
        return commit(step, now_s)

    run.core.commit = noted  # type: ignore[method-assign]
    run.advance(CONFIG.duration_s)
    predicted = np.array([step.predicted_s for step in planned])
    taken = np.array(run.worker.sums.step_s[: len(predicted)])
    predicted = predicted[: len(taken)]
    assert np.median(np.abs(predicted / taken - 1.0)) < 0.1
    first = next(n for n, step in enumerate(planned) if step.chunks)
    assert predicted[first] == pytest.approx(taken[first], rel=0.15)


def arguments(log: Path, *more: str) -> tuple[str, ...]:
    return (
        *("--hardware", "llava-1.5-7b@a100-80g", "--rt", "poisson:6", "--rt-images", "1:576"),
        *("--rt-lengths", "uniform:20-60,5-20", "--be", "closed:4", "--be-images", "1:200"),
        *("--be-lengths", "uniform:50-99,20-40", "--duration-s", "6", "--margin-s", "1"),
        *("--capacity-tokens", "20000", "--json", "--decision-log", str(log), *more),
    )


def test_a_log_of_images_is_replayed_asked_and_planned_from(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    done = CliRunner().invoke(simulate_command, arguments(log), catch_exceptions=False)
    assert done.exit_code == 0 and json.loads(done.stdout)["rt"]["arrivals"] > 10
    again = CliRunner().invoke(replay_command, [str(log), "--json"], catch_exceptions=False)
    assert json.loads(again.stdout)["is_equal"]

    recording = read_recording(DecisionLogReader(log))
    rate = recording.step_cost.per_encoder_token_s
    assert rate == pytest.approx(HARDWARE.per_encoder_token_s, rel=0.05)
    was, same = recording.report(), recording.run(Settings()).classes[RequestClass.RT]
    assert same.ttft_ms_p50 == pytest.approx(
        was.classes[RequestClass.RT].ttft_ms_p50, rel=0.25, abs=10.0
    )
    slow = recording.run(Settings(hardware=SLOW)).classes[RequestClass.RT]
    assert slow.ttft_ms_p50 > same.ttft_ms_p50 + 5.0  # type: ignore[operator]
    with pytest.raises(ConfigError, match="requests with images need --hardware"):
        recording.run(Settings(hardware=sim.read_hardware("llama-2-7b@a100-80g")))

    rows, hardware = read_rows(log)
    assert hardware is not None and hardware.encoder == HARDWARE.encoder
    assert {row.image_tokens for row in rows} == {"576"}
    plan = make_plan(
        PlanConfig(
            rows=rows,
            attainment=0.9,
            targets=TARGETS,
            max_kv_tokens=20_000,
            window_s=10.0,
            be_clients=1,
            hardware=hardware,
        )
    )
    assert plan.num_replicas == 1


def test_a_trace_says_which_prompts_have_images(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("t,prompt_tokens,output_tokens,image_tokens\n0.5,700,3,576 100\n2,20,4,\n")
    rows, hardware = read_rows(trace)
    assert hardware is None
    assert rows == [Row(0.5, 700, 3, "", "576 100"), Row(2.0, 20, 4)]
    config = dataclasses.replace(
        CONFIG,
        rt=str(trace),
        rt_lengths=None,
        rt_images="0",
        be=None,
        be_lengths=None,
        be_images="0",
    )
    run = finished(config)
    jobs = [job for _, job in run.clients[RequestClass.RT].traffic.jobs(np.random.default_rng(0))]
    assert [[(i.start, i.num_tokens) for i in job.images] for job in jobs] == [
        [(1, 576), (577, 100)],
        [],
    ]
    assert run.report().rt.arrivals >= 0 and run.worker.sums.num_tokens >= 720
    drawn = dataclasses.replace(
        config, rt="poisson:3", rt_lengths=str(trace), rt_images="1:50", duration_s=5.0
    )
    prompts = finished(drawn).clients[RequestClass.RT].num_prompt_tokens
    assert {*prompts} == {750, 70}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rt_images": "576"}, "--rt-images must be N:TOKENS"),
        ({"rt_images": "0:576"}, "--rt-images must be N:TOKENS"),
        ({"rt_images": "1:99999999"}, "--rt-images must be N:TOKENS"),
        ({"rt_images": "65:1"}, "--rt-images must be N:TOKENS"),
        ({"rt_images": "1:0"}, "--rt-images must be N:TOKENS"),
        ({"be_images": "2x576"}, "--be-images must be N:TOKENS"),
        ({"be": None, "be_lengths": None}, "--be-images needs --be"),
        ({"hardware": sim.read_hardware("h200-llama-8b")}, "need --hardware of a model whose"),
        (
            {"hardware": dataclasses.replace(HARDWARE, per_encoder_token_s=0.0)},
            "a model whose encoder was measured",
        ),
    ],
)
def test_what_no_server_would_take(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        finished(dataclasses.replace(CONFIG, **changes))


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        ("image_tokens", "11", "row 1: image_tokens must be"),
        ("image_tokens", "0 3", "row 1: image_tokens must be"),
        ("image_tokens", " ".join(["-1"] * 3), "row 1: image_tokens must be"),
        ("image_tokens", "a", "is not a trace"),
        ("image_tokens", " ".join(["1"] * 65), "row 1: image_tokens must be at most 64"),
        ("image_tokens,block_ids_512", "3,1", "not beside block_ids_512"),
    ],
)
def test_columns_that_cannot_be(header: str, row: str, message: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(f"t,prompt_tokens,output_tokens,{header}\n0,{len(row) + 9},3,{row}\n")
    with pytest.raises(ConfigError, match=message):
        read_rows(trace)


def test_a_trace_has_its_own_images(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("t,prompt_tokens,output_tokens\n0,10,3\n")
    config = dataclasses.replace(CONFIG, rt=str(trace), rt_lengths=None)
    with pytest.raises(ConfigError, match="--rt-images needs --rt poisson"):
        HybridRun(config)
