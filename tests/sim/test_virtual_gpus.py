"""Virtual hardware by name."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lightserve.cost.model import StepShape
from lightserve.errors import ConfigError
from lightserve.sim import HybridConfig, read_hardware, run_hybrid
from lightserve.sim.report import Targets
from lightserve.sim.virtual_gpus import (
    A100_LLAMA2_7B,
    GPUS,
    MODELS,
    VirtualHardware,
    num_slots,
    virtual_gpus,
)

OPT, GPU = MODELS["opt-175b"], GPUS["a100-80g"]


def test_llama_on_one_gpu_is_what_was_fitted() -> None:
    found = virtual_gpus(MODELS["llama-2-7b"], GPUS["a100-80g"], 1)
    assert 0 < found.per_gathered_token_s < 0.05 * found.per_copied_token_s
    fitted = replace(A100_LLAMA2_7B, per_gathered_token_s=found.per_gathered_token_s)
    numbers, expected = asdict(found), asdict(fitted)
    assert numbers.pop("name") == expected.pop("name") == ""
    assert numbers.pop("encoder") is expected.pop("encoder") is None
    assert numbers == pytest.approx(expected, rel=0.02)


def test_ranks_share_the_work_and_pay_for_what_they_exchange() -> None:
    four, eight = virtual_gpus(OPT, GPU, 4), virtual_gpus(OPT, GPU, 8)
    assert eight.per_decode_context_s == pytest.approx(four.per_decode_context_s / 2)
    assert eight.floor_s < four.floor_s < 2 * eight.floor_s
    reduces_s = 2 * 96 * 2 * 12_288 * 2 * 7 / 8 / 210e9  # 192 of 12,288 numbers of two bytes
    flops_s = 2 * 175e9 / 8 / (0.674 * 312e12)
    assert eight.per_new_token_s == pytest.approx(flops_s + reduces_s)


def test_logits_of_drafts_take_time() -> None:
    """Whether reading weights bounds the step or not; ranks share them."""
    four, eight = virtual_gpus(OPT, GPU, 4), virtual_gpus(OPT, GPU, 8)
    assert four.per_draft_s == 2 * eight.per_draft_s == 2 * 50_272 * 12_288 / 4 / (0.674 * 312e12)
    for num_decodes in (1, 1000):
        decodes = StepShape().plus_decodes(num_decodes, 0)
        logits_s = four.step_seconds(decodes.plus_drafts(8, 0)) - four.step_seconds(
            decodes.plus_drafts(8, 0)._replace(num_drafts=0)
        )
        assert logits_s == pytest.approx(8 * four.per_draft_s)


def test_what_has_room_beside_the_weights() -> None:
    assert num_slots(OPT, GPU, 8) == pytest.approx((576e9 - 350e9) / 4_718_592, abs=1)
    assert num_slots(OPT, GPU, 4) < 0


def test_a_name_or_a_file(tmp_path: Path) -> None:
    assert isinstance(read_hardware("qwen2.5-14b@a100-40gx2"), VirtualHardware)
    for wrong, said in (
        ("qwen2.5-14b@a100-40gx99", "N of 1 to 16"),
        ("gpt@a100-40g", "qwen2.5-14b"),
        ("opt-175b@a100-40g", "do not fit"),
        (str(tmp_path / "missing.json"), "is no profile"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_hardware(wrong)


def test_what_was_measured_on_an_h200() -> None:
    """Steps of both kinds as they were timed there, in ms, at a context of 1,024."""
    graphs, eager = read_hardware("h200-llama-8b"), read_hardware("h200-llama-8b-eager")
    for num_rows, ms in ((1, 4.65), (8, 4.94), (16, 5.33), (32, 6.05), (64, 7.22)):
        decodes = StepShape().plus_decodes(num_rows, num_rows * 1024)
        assert graphs.step_seconds(decodes) == pytest.approx(ms / 1e3, rel=0.1)
        assert eager.step_seconds(decodes) == graphs.step_seconds(decodes)
    decodes = StepShape().plus_decodes(32, 32 * 1024)
    for num_new, ms in ((64, 6.43), (128, 6.83), (256, 8.63), (512, 14.68), (1024, 26.15)):
        mixed = decodes.plus(0, num_new - 32)
        assert graphs.step_seconds(mixed) == pytest.approx(ms / 1e3, rel=0.1)
        assert eager.step_seconds(mixed) == max(0.0203, graphs.step_seconds(mixed))
    one_more, whole = decodes.plus(0, 385 - 32), decodes.plus(0, 512 - 32)
    assert graphs.step_seconds(one_more) == pytest.approx(graphs.step_seconds(whole), rel=0.01)
    prompt = StepShape().plus(0, 8192)
    assert graphs.step_seconds(prompt) == pytest.approx(0.213, rel=0.1)
    assert graphs.overlaps_copies and graphs.server_budget == eager.server_budget == 8192


@pytest.mark.parametrize("name", ["h200-llama-8b", "h200-llama-8b-eager"])
def test_a_router_learns_the_measured_gpu(name: str) -> None:
    """Of workers that launch chunks kernel by kernel a router is told no formula: none fits."""
    hardware = read_hardware(name)
    config = HybridConfig(
        rt="poisson:20",
        rt_lengths="uniform:53-1127,80-80",
        be="closed:64",
        be_lengths="uniform:53-1127,200-200",
        targets=Targets(0.15, 0.02, 0.08),
        duration_s=6.0,
        margin_s=2.0,
        capacity_tokens=760_287,
        budget_tokens=8192,
        hardware=hardware,
    )
    report = run_hybrid(config)
    assert (hardware.step_cost is None) == name.endswith("eager")
    assert report.rt.arrivals > 20
    in_time = 2.0 * report.rt.goodput_rps / report.rt.arrivals
    assert (in_time > 0.97) == (not name.endswith("eager"))


def test_two_gpus_serve_more_than_one() -> None:
    served = []
    for name in ("llama-13b@a100-40g", "llama-13b@a100-40gx2"):
        config = HybridConfig(
            be="closed:64",
            be_lengths="uniform:256-512,16-32",
            duration_s=8.0,
            margin_s=1.0,
            capacity_tokens=30_000,
            hardware=read_hardware(name),
        )
        served.append(run_hybrid(config).be.throughput_tps)
    assert 1.4 * served[0] < served[1] < 2.0 * served[0]
