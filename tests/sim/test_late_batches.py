"""A batch that falls behind is promoted in time, one that is early gives way: in virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np
from support.virtual_batches import run_virtually, server

from lightserve.sim.hybrid import HybridConfig
from lightserve.sim.report import Targets
from lightserve.sim.virtual_gpus import A100_LLAMA2_7B
from lightserve.types import FrontendId

SLOW = dataclasses.replace(
    A100_LLAMA2_7B,
    floor_s=0.094,
    per_new_token_s=641e-6,
    constant_s=0.0225,
    per_decode_context_s=3.3e-6,
)
"""A tenth of it: as much happens in as many steps."""
TTFT_S = 4.0
LINES = [(200, 40)] * 100


class Seen(NamedTuple):
    window_s: int
    status: str
    rt_in_time: float
    others: int
    """Best-effort requests of others that ended in the first minute of the batch."""


def play(tmp_path: Path, window_s: int, *, is_plain: bool = False) -> Seen:
    """A hundred lines, 8 at once, beside 48 clients of best-effort requests and real-time ones.

    The window is this one, or that which is promised in its place.
    """
    config = HybridConfig(
        rt="poisson:0.4",
        rt_lengths="uniform:64-256,16-64",
        rt_max_tokens=64,
        be="closed:48",
        be_lengths="uniform:128-256,32-96",
        duration_s=1e3,
        margin_s=1.0,
        hardware=SLOW,
        targets=Targets(ttft_s=TTFT_S, tpot_s=0.4),
        capacity_tokens=20_000,
    )
    with server(tmp_path / f"{window_s}-{is_plain}", config, max_in_flight=8) as made:
        made.is_plain = is_plain

        async def work() -> Seen:
            loop = asyncio.get_running_loop()
            await made.serve(lambda: loop.time() > 10.0)
            batch = made.promise(LINES, window_s)
            window = batch.expires_s - batch.created_s
            end_s = loop.time() + (window + 2 if window < 120 else 61)
            await made.serve(lambda: loop.time() > end_s)
            outcomes = made.simulation.outcomes.items()
            first_s = [
                o.token_times_s[0] - o.arrival_s if o.token_times_s else np.inf
                for key, o in outcomes
                if key.frontend_id == FrontendId(0) and o.arrival_s < end_s - TTFT_S
            ]
            others = [o for key, o in outcomes if key.frontend_id == FrontendId(1)]
            return Seen(
                window,
                made.find(batch).status,
                float(np.mean(np.array(first_s) <= TTFT_S)),
                sum(o.finish_reason is not None and o.token_times_s[-1] < 70.0 for o in others),
            )

        return run_virtually(work())


def test_a_batch_that_falls_behind_is_promoted_and_an_early_one_gives_way(tmp_path: Path) -> None:
    plain = play(tmp_path, 60, is_plain=True)
    promised = play(tmp_path, 60)
    early = play(tmp_path, 900)
    assert plain.window_s == promised.window_s > 60
    assert plain.status == "expired", "without promotion it is too late"
    assert promised.status == "completed"
    assert promised.rt_in_time == plain.rt_in_time == 1.0
    assert early.status == "in_progress", "it takes its time"
    assert early.others == plain.others > promised.others
