"""The grounds of four papers: who runs there can be made, and the loads are what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.scheduling.papers import (
    GROUNDS,
    LONG_SHARE,
    LONG_TOKENS,
    NUM_DOCUMENTS,
    accelgen_load,
    echo_load,
)
from lightserve.sim import HybridConfig
from lightserve.sim.hybrid import HybridRun
from lightserve.sim.traffic import parse_block_ids, read_trace


@pytest.mark.parametrize("name", GROUNDS)
def test_every_system_can_be_made(name: str, tmp_path: Path) -> None:
    load = GROUNDS[name].workload(tmp_path, 0)
    short = {"rt": "poisson:1", "rt_lengths": "uniform:8-8,4-4", "be": None, "be_lengths": None}
    assert {"bros", "echo", "accelgen", "past-future"} < {s.name for s in GROUNDS[name].systems}
    for system in GROUNDS[name].systems:
        HybridRun(HybridConfig(**load | short, **system.config()))


def test_questions_are_about_few_documents(tmp_path: Path) -> None:
    trace = read_trace(Path(echo_load(tmp_path, 0)["be"]))
    assert trace.block_ids is not None
    assert len({parse_block_ids(ids)[0] for ids in trace.block_ids}) == NUM_DOCUMENTS
    assert 6_000 < trace.prompt_tokens.mean() < 10_000


def test_a_third_of_the_mix_is_long_and_each_has_targets_of_its_own(tmp_path: Path) -> None:
    trace = read_trace(Path(accelgen_load(tmp_path, 0)["rt"]))
    assert abs(np.mean(trace.prompt_tokens >= LONG_TOKENS[0]) - LONG_SHARE) < 0.08
    assert trace.slos is not None and len(set(trace.slos)) > 0.9 * len(trace.slos)
