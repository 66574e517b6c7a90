"""Virtual hardware by name."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lightserve.errors import ConfigError
from lightserve.sim import HybridConfig, read_hardware, run_hybrid
from lightserve.sim.virtual_gpus import GPUS, MODELS, num_slots, virtual_gpus
from lightserve.sim.worker import A100_LLAMA2_7B, VirtualHardware

OPT, GPU = MODELS["opt-175b"], GPUS["a100-80g"]


def test_llama_on_one_gpu_is_what_was_fitted() -> None:
    found = virtual_gpus(MODELS["llama-2-7b"], GPUS["a100-80g"], 1)
    assert 0 < found.per_gathered_token_s < 0.05 * found.per_copied_token_s
    fitted = replace(A100_LLAMA2_7B, per_gathered_token_s=found.per_gathered_token_s)
    assert asdict(found) == pytest.approx(asdict(fitted), rel=0.02)


def test_ranks_share_the_work_and_pay_for_what_they_exchange() -> None:
    four, eight = virtual_gpus(OPT, GPU, 4), virtual_gpus(OPT, GPU, 8)
    assert eight.per_decode_context_s == pytest.approx(four.per_decode_context_s / 2)
    assert eight.floor_s < four.floor_s < 2 * eight.floor_s
    reduces_s = 2 * 96 * 2 * 12_288 * 2 * 7 / 8 / 210e9  # 192 of 12,288 numbers of two bytes
    flops_s = 2 * 175e9 / 8 / (0.674 * 312e12)
    assert eight.per_new_token_s == pytest.approx(flops_s + reduces_s)


def test_what_has_room_beside_the_weights() -> None:
    assert num_slots(OPT, GPU, 8) == pytest.approx((576e9 - 350e9) / 4_718_592, abs=1)
    assert num_slots(OPT, GPU, 4) < 0


def test_a_name_or_a_file(tmp_path: Path) -> None:
    assert isinstance(read_hardware("qwen2.5-14b@a100-40gx2"), VirtualHardware)
    for wrong, said in (
        ("qwen2.5-14b@a100-40gx99", "N of 1 to 16"),
        ("gpt@a100-40g", "qwen2.5-14b"),
        ("opt-175b@a100-40g", "have no room"),
        (str(tmp_path / "missing.json"), "is no profile"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_hardware(wrong)


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
