"""Both classes in the simulator: the load is what was asked for, the figures are those of the
log, the same seed gives the same run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.grids import every_value, long_but

from lightserve import sim
from lightserve.errors import ConfigError
from lightserve.messages.common import StepCoefficients, pack_int32
from lightserve.messages.images import EncoderWork
from lightserve.messages.router_worker import (
    KVCopies,
    OutputKind,
    PlanRow,
    StepPlan,
)
from lightserve.sim.hybrid import HybridRun
from lightserve.sim.report import ClassReport, Seen, Targets, Window, class_report
from lightserve.sim.simulation import Outcome
from lightserve.sim.traffic import Job, Traffic, parse_block_ids, parse_traffic, read_trace
from lightserve.sim.virtual_gpus import (
    A100_LLAMA2_7B,
    Hardware,
    ProfiledHardware,
    VirtualHardware,
    read_hardware,
)
from lightserve.sim.worker import LengthWorker, VirtualWorker
from lightserve.types import RequestClass, RowId, StepId

SHAREGPT = "bench/traces/sharegpt_lengths.csv.gz"
SMALL = sim.HybridConfig(
    rt="poisson:6",
    rt_lengths="uniform:10-200,5-80",
    rt_max_tokens=100,
    be="closed:30",
    be_lengths="uniform:100-300,20-60",
    duration_s=9.0,
    margin_s=2.0,
    capacity_tokens=3000,
    policy="priority",
    serve_options={"block_size": 4},
)


def figures(report: sim.HybridReport) -> dict[str, object]:
    """Return all of a report but what a clock measured."""
    return {name: value for name, value in dataclasses.asdict(report).items() if name != "router"}


def take(traffic: Traffic, count: int, seed: int = 0) -> list[tuple[float, Job]]:
    return list(itertools.islice(traffic.jobs(np.random.default_rng(seed)), count))


class TestTraffic:
    def test_poisson_arrivals_with_the_lengths_of_a_trace(self) -> None:
        traffic = parse_traffic(
            "poisson:16", SHAREGPT, request_class=RequestClass.RT, max_tokens=2048
        )
        timed = take(traffic, 40_000)
        trace = read_trace(Path(SHAREGPT))
        assert len(timed) / timed[-1][0] == pytest.approx(16.0, rel=0.02)
        gaps = np.diff([time_s for time_s, _ in timed])
        assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.02)
        jobs = [job for _, job in timed]
        prompts = np.array([len(job.prompt_token_ids) for job in jobs])
        outputs = np.array([job.num_output_tokens for job in jobs])
        assert prompts.mean() == pytest.approx(trace.prompt_tokens.mean(), rel=0.02)
        assert outputs.mean() == pytest.approx(trace.output_tokens.mean(), rel=0.02)
        assert np.corrcoef(prompts, outputs)[0, 1] == pytest.approx(
            np.corrcoef(trace.prompt_tokens, trace.output_tokens)[0, 1], abs=0.03
        )
        assert {job.max_tokens for job in jobs} == {2048}

    def test_a_closed_loop_with_lengths_from_ranges(self) -> None:
        traffic = parse_traffic(
            "closed:7", "uniform:512-1024,32-128", request_class=RequestClass.BE, max_tokens=None
        )
        jobs = [job for _, job in take(traffic, 5000)]
        prompts = np.array([len(job.prompt_token_ids) for job in jobs])
        outputs = np.array([job.num_output_tokens for job in jobs])
        assert traffic.num_clients == 7
        assert (prompts.min(), prompts.max()) == (512, 1024)
        assert (outputs.min(), outputs.max()) == (32, 128)
        assert prompts.mean() == pytest.approx(768, rel=0.02)
        assert outputs.mean() == pytest.approx(80, rel=0.02)
        assert {job.max_tokens for job in jobs} == {128}, "declared; the true length is hidden"
        assert jobs[0].submit(3, RequestClass.BE).max_tokens == 128

    def test_prompts_of_a_trace_share_the_blocks_that_it_names(self) -> None:
        path = Path("bench/traces/mooncake_conversation.csv.gz")
        traffic = parse_traffic(str(path), None, request_class=RequestClass.BE, max_tokens=None)
        trace = read_trace(path)
        assert trace.block_ids is not None and trace.arrival_s is not None
        first, second = take(traffic, 2)
        assert [parse_block_ids(text)[:2] for text in trace.block_ids[:2]] == [[0, 1], [0, 14]]
        same = first[1].prompt_token_ids[:1024] == second[1].prompt_token_ids[:1024]
        assert same[:512].all() and same[512:].mean() < 0.01
        assert [time_s for time_s, _ in take(traffic, 9)] == trace.arrival_s[:9].tolist()

    def test_block_ids(self) -> None:
        assert parse_block_ids("0 14-17 3") == [0, 14, 15, 16, 17, 3]


class TestClassReport:
    WINDOW = Window(10.0, 20.0, 30.0)
    TARGETS = Targets(ttft_s=0.5, tpot_s=0.2, mtpot_s=0.3)

    def report(self, *requests: Seen, targets: Targets = TARGETS) -> ClassReport:
        return class_report(requests, targets, self.WINDOW, evictions=4, recomputed_tokens=9)

    def test_a_log_made_by_hand(self) -> None:
        requests = (
            Seen(9.9, 2, [10.0, 10.1], True),  # came too early; its end and tokens count
            Seen(10.0, 3, [10.4, 10.6, 10.7], True),  # met all
            Seen(11.0, 3, [11.6, 11.7, 11.8], True),  # late first token
            Seen(12.0, 4, [12.1, 12.2, 12.3, 12.65], True),  # one long gap, but a good mean
            Seen(13.0, 2, [13.2, 13.7], True),  # long mean and gap
            Seen(14.0, 9, [14.1, 14.2]),  # unfinished
            Seen(15.0, 10),  # never started, or refused
            Seen(19.5, 2, [19.9, 20.05], True),  # met all, ends after the window
            Seen(20.0, 2, [20.1, 20.2], True),  # came too late
        )
        report = self.report(*requests)
        assert report.arrivals == 7
        assert report.ttft_attainment == pytest.approx(5 / 7)
        assert report.tpot_attainment == pytest.approx(4 / 7)
        assert report.mtpot_attainment == pytest.approx(3 / 7)
        assert report.goodput_rps == pytest.approx(2 / 10)
        assert report.goodput_tps == pytest.approx(5 / 10)
        assert report.throughput_rps == pytest.approx(5 / 10)
        assert report.throughput_tps == pytest.approx((2 + 3 + 3 + 4 + 2 + 2 + 1) / 10)
        per_token_s = [0.7 / 3, 0.8 / 3, 0.65 / 4, 0.7 / 2, 16 / 9, 15 / 10, 0.55 / 2]
        assert report.normalized_latency_ms == pytest.approx(1e3 * np.mean(per_token_s))
        assert report.ttft_ms_p50 == pytest.approx(400.0)
        missed_s = [0.8, 0.65, 0.7, 16.0, 15.0]
        assert report.missed_e2e_s_p99 == pytest.approx(np.percentile(missed_s, 99))
        assert (report.evictions, report.recomputed_tokens) == (4, 9)

    def test_without_targets_who_finishes_is_good(self) -> None:
        done, left = Seen(10.0, 1, [19.0], True), Seen(11.0, 4, [12.0])
        report = self.report(done, left, targets=Targets())
        assert report.ttft_attainment is report.mtpot_attainment is None
        assert report.goodput_rps == report.throughput_rps == pytest.approx(0.1)

    def test_the_mean_gap_is_that_of_gaps_not_of_tokens(self) -> None:
        three = Seen(10.0, 3, [10.1, 10.3, 10.5], True)
        for tpot_s, kept in ((0.19, 0.0), (0.21, 1.0)):
            assert self.report(three, targets=Targets(tpot_s=tpot_s)).tpot_attainment == kept

    def test_what_was_found_of_the_prompts(self) -> None:
        first = Seen(10.0, 1, [19.0], True, num_prompt_tokens=30, num_cached_tokens=12)
        second = Seen(11.0, 4, [12.0], num_prompt_tokens=10)
        waiting = Seen(12.0, 4, num_prompt_tokens=100)
        assert self.report(first, second, waiting).cached_pct == pytest.approx(30.0)

    def test_refused_requests_have_no_end_to_wait_for(self) -> None:
        done, refused = Seen(10.0, 1, [13.0], True), Seen(11.0, 4, is_refused=True)
        report = self.report(done, refused)
        assert report.missed_e2e_s_p99 == pytest.approx(3.0)
        assert report.ttft_attainment == 0.0 and report.goodput_rps == 0.0

    def test_no_request_came(self) -> None:
        report = self.report()
        assert (report.arrivals, report.ttft_attainment, report.ttft_ms_p99) == (0, None, None)


class TestVirtualWorker:
    def worker(self, noise: float = 0.0, hardware: Hardware = A100_LLAMA2_7B) -> VirtualWorker:
        inner = LengthWorker(max_num_seqs=4, max_model_len=2000)
        rng = np.random.default_rng(1)
        return VirtualWorker(hardware, inner, noise=noise, rng=rng)

    def plan(self, *rows: tuple[int, int], **copies: int) -> StepPlan:
        """Return a step of rows (start, tokens), and copies of so many tokens."""
        merged = {
            name: KVCopies(pack_int32(range(count)), pack_int32(range(count)))
            for name, count in copies.items()
        }
        return StepPlan(
            step_id=StepId(1),
            sequences=[],
            slot_ranges=[],
            rows=[
                PlanRow(RowId(number), start, count, OutputKind.NONE)
                for number, (start, count) in enumerate(rows)
            ],
            **merged,
        )

    def test_a_step_takes_what_the_formula_says(self) -> None:
        seconds = self.worker().seconds(self.plan((1000, 1), (500, 1), (100, 400)))
        expected = 64.1e-6 * 402 + 2.25e-3 + 0.33e-6 * 1500 + 3.5e-9 * 400 * 300
        assert seconds == pytest.approx(expected)
        assert self.worker().seconds(self.plan((0, 1))) == pytest.approx(9.4e-3)

    def test_a_profiled_step_takes_what_the_profile_says(self) -> None:
        cost = StepCoefficients(1e-2, 16.0, 1e-4, 1e-5, 1e-3, 1e-6, 2e-6, 1e-8, 1e-5, 3e-5)
        hardware = ProfiledHardware(cost, kv_bytes_per_token=8, per_step_s=0.1)
        worker = self.worker(hardware=hardware)
        pairs = 400 * 100 + 400 * 399 / 2
        step_s = 0.11 + 1e-4 * 386 + 2e-5 + 1e-3 + 1e-6 * 1500 + 2e-6 * 100 + 1e-8 * pairs
        plan = self.plan((1000, 1), (500, 1), (100, 400), saves=100, loads=50)
        assert worker.seconds(plan) == pytest.approx(step_s + 100 * 1e-5 + 50 * 3e-5)

    def test_noise_has_the_stated_spread_and_no_bias(self) -> None:
        worker = self.worker(noise=0.05)
        ratios = np.array([worker.seconds(self.plan((0, 1))) for _ in range(4000)]) / 9.4e-3
        assert ratios.mean() == pytest.approx(1.0, abs=0.003)
        assert np.log(ratios).std() == pytest.approx(0.05, rel=0.05)

    def test_a_step_waits_for_its_copies_and_for_what_is_left_of_copies_ahead(self) -> None:
        worker, floor_s = self.worker(), 9.4e-3
        plan = self.plan((0, 1), saves=100, loads=50)
        assert worker.seconds(plan) == pytest.approx(floor_s + 150 * 21e-6)
        assert worker.execute(plan, exec_s=1.0, idle_s=0.0).copy_s == pytest.approx(150 * 21e-6)
        ahead = self.plan((0, 1), ahead_loads=400)
        assert worker.seconds(ahead) == pytest.approx(floor_s)
        assert worker.seconds(plan) == pytest.approx(floor_s + 150 * 21e-6), "made beside it"
        assert worker.seconds(self.plan((0, 1), ahead_loads=1000)) == pytest.approx(floor_s)
        left_s = 1000 * 21e-6 - floor_s
        assert worker.seconds(plan) == pytest.approx(left_s + floor_s + 150 * 21e-6)
        result = worker.execute(plan, exec_s=1.0, idle_s=0.0)
        assert result.exec_s == pytest.approx(1.0 - left_s), "that was before it began"
        assert result.copy_s == pytest.approx(150 * 21e-6)
        assert worker.seconds(plan) == pytest.approx(floor_s + 150 * 21e-6)
        sums = worker.sums
        assert (sums.saved_tokens, sums.loaded_tokens) == (400, 1600)
        assert sums.ahead_wait_s == pytest.approx(left_s)

    def test_copies_ahead_follow_a_step_that_they_do_not_overlap(self) -> None:
        cost = StepCoefficients(1e-2, 16.0, 1e-4, 0.0, 0.0, 0.0, 0.0, 0.0, 1e-5, 3e-5)
        worker = self.worker(hardware=ProfiledHardware(cost, kv_bytes_per_token=8))
        assert worker.seconds(self.plan((0, 1), ahead_loads=100)) == pytest.approx(1e-2)
        assert worker.seconds(self.plan((0, 1))) == pytest.approx(1e-2 + 100 * 3e-5)


class TestRuns:
    def test_the_same_seed_gives_the_same_run_and_every_read_of_kv_is_right(self) -> None:
        """Memory is short, so that best-effort requests are paused and resume.

        The worker that checks what is read decides no more than the one that checks nothing.
        """
        short = dataclasses.replace(SMALL, duration_s=6.0)
        first = sim.run_hybrid(dataclasses.replace(short, checks_kv=True))
        again = sim.run_hybrid(dataclasses.replace(short, checks_kv=True))
        assert figures(first) == figures(again)
        cheap = sim.run_hybrid(short)
        assert (cheap.rt, cheap.be) == (first.rt, first.be)
        other = sim.run_hybrid(dataclasses.replace(short, seed=1))
        assert figures(first) != figures(other)
        assert first.kv.pauses > 0 and first.kv.loaded_tokens > 0
        assert first.rt.evictions == 0 < first.be.evictions
        assert first.kv.copied_bytes == 524_288 * (first.kv.saved_tokens + first.kv.loaded_tokens)

    def test_clients_of_one_class_do_not_depend_on_the_rest(self) -> None:
        def arrivals(config: sim.HybridConfig, request_class: RequestClass) -> list[float]:
            run = HybridRun(config)
            run.advance(config.duration_s)
            sent = run.clients[request_class].num_output_tokens
            times = [o.arrival_s for k, o in run.simulation.outcomes.items() if k.frontend_id == 0]
            return [*times, *sent] if request_class is RequestClass.RT else list(sent)

        short = dataclasses.replace(SMALL, duration_s=4.5)
        alone = dataclasses.replace(short, be=None, be_lengths=None)
        blind = dataclasses.replace(short, policy="chunked")
        both = arrivals(short, RequestClass.RT)
        assert both == arrivals(alone, RequestClass.RT) == arrivals(blind, RequestClass.RT)
        sent, sent_blind = arrivals(short, RequestClass.BE), arrivals(blind, RequestClass.BE)
        num = min(len(sent), len(sent_blind))
        assert num > 30 and sent[:num] == sent_blind[:num]

    def test_what_came_before_the_margin_is_told(self) -> None:
        run = HybridRun(dataclasses.replace(SMALL, duration_s=5.0))
        run.advance(5.0)
        early = run.report().warm_up
        of_class: dict[int, list[Outcome]] = {0: [], 1: []}
        for key, outcome in run.simulation.outcomes.items():
            of_class[key.frontend_id].append(outcome)
        came = [outcome for outcome in of_class[0] if outcome.arrival_s < 2.0]
        first_s = [o.token_times_s[0] - o.arrival_s for o in came if o.token_times_s]
        assert (early.seconds, early.rt_arrivals) == (2.0, len(came))
        assert early.rt_ttft_attainment == sum(time_s <= 0.4 for time_s in first_s) / len(came)
        times_s = [time_s for outcome in of_class[1] for time_s in outcome.token_times_s]
        assert early.be_throughput_tps == sum(time_s < 2.0 for time_s in times_s) / 2.0 > 0
        none = HybridRun(dataclasses.replace(SMALL, margin_s=0.0)).report().warm_up
        assert (none.seconds, none.be_throughput_tps) == (0.0, None)

    def test_a_closed_loop_keeps_so_many_there(self) -> None:
        run = HybridRun(dataclasses.replace(SMALL, rt=None, rt_lengths=None))
        for second in range(1, 8):
            run.advance(float(second))
            outcomes = run.simulation.outcomes.values()
            unfinished = sum(outcome.finish_reason is None for outcome in outcomes)
            assert unfinished == 30
        assert len(run.simulation.outcomes) > 60

    def test_the_limit_of_best_effort_requests(self) -> None:
        run = HybridRun(
            dataclasses.replace(SMALL, serve_options={"max_be_seqs": 3}, capacity_tokens=9000)
        )
        for tenth in range(1, 40):
            run.advance(tenth / 10)
            classes = [request.request_class for request in run.core.running]
            assert classes.count(RequestClass.BE) <= 3
        assert classes.count(RequestClass.BE) == 3

    def test_real_time_requests_lose_kv_beside_best_effort_ones_where_classes_are_unknown(
        self,
    ) -> None:
        config = dataclasses.replace(
            SMALL,
            duration_s=6.0,
            capacity_tokens=1500,
            rt="poisson:20",
            admission="aggressive",
            serve_options={"block_size": 4, "watermark": 1.0},
        )
        blind = sim.run_hybrid(dataclasses.replace(config, policy="chunked"))
        assert blind.kv.rt_evictions_beside_be > 20
        aware = sim.run_hybrid(config)
        assert aware.rt.evictions > 20 and aware.be.evictions > 20
        assert aware.kv.rt_evictions_beside_be == 0

    def test_priority_keeps_the_targets_that_a_class_blind_policy_misses(self) -> None:
        config = dataclasses.replace(SMALL, targets=Targets(ttft_s=0.15))
        blind = sim.run_hybrid(dataclasses.replace(config, policy="chunked"))
        priority = sim.run_hybrid(config)
        assert blind.rt.ttft_attainment is not None and priority.rt.ttft_attainment is not None
        assert blind.rt.ttft_attainment < 0.5
        assert priority.rt.ttft_attainment > 0.9

    def test_prompts_that_a_trace_says_are_alike_are_found(self) -> None:
        def cached_pct(cache_policy: str) -> float | None:
            config = sim.HybridConfig(
                be="bench/traces/mooncake_conversation.csv.gz",
                capacity_tokens=400_000,
                duration_s=8.0,
                margin_s=0.0,
                budget_tokens=8192,
                serve_options={"cache_policy": cache_policy},
            )
            return sim.run_hybrid(config).be.cached_pct

        found = cached_pct("task-aware")
        assert found is not None and found > 2.0
        assert cached_pct("off") == 0.0

    def test_the_oracle_and_traces_run(self) -> None:
        config = dataclasses.replace(
            SMALL,
            rt="bench/traces/burstgpt_burst120.csv.gz",
            rt_lengths=None,
            rt_max_tokens=None,
            admission="oracle",
            capacity_tokens=6000,
        )
        report = sim.run_hybrid(config)
        assert report.rt.arrivals > 50 and report.rt.evictions == 0


# Orderings of the hybrid benchmark in short runs, as `bench.scheduling.hybrid` has.
#
# Hardware a quarter as fast as the virtual A100, so that a few requests a second are a full load.
# About 19 real-time requests per second are all that it can serve; 8,000 tokens of KV are short.

SLOW = dataclasses.replace(
    A100_LLAMA2_7B,
    floor_s=4 * A100_LLAMA2_7B.floor_s,
    per_new_token_s=4 * A100_LLAMA2_7B.per_new_token_s,
    constant_s=4 * A100_LLAMA2_7B.constant_s,
    per_decode_context_s=4 * A100_LLAMA2_7B.per_decode_context_s,
    per_chunk_context_s=4 * A100_LLAMA2_7B.per_chunk_context_s,
)
LIGHT, FULL, OVERLOAD = 8.0, 20.0, 26.0
SEEDS = (0, 1)


@functools.cache
def run(policy: str, rate: float, seed: int, *, budget_tokens: int = 512) -> sim.HybridReport:
    return sim.run_hybrid(
        sim.HybridConfig(
            rt=f"poisson:{rate}",
            rt_lengths="uniform:40-160,20-60",
            rt_max_tokens=64,
            be="closed:32",
            be_lengths="uniform:256-512,16-64",
            capacity_tokens=8000,
            duration_s=20.0,
            margin_s=5.0,
            hardware=SLOW,
            policy=policy,
            budget_tokens=budget_tokens,
            seed=seed,
        )
    )


def best_of_priority(rate: float, seed: int) -> float:
    return max(
        run("priority", rate, seed, budget_tokens=budget).rt.goodput_rps for budget in (256, 512)
    )


@pytest.mark.parametrize("seed", long_but([(seed,) for seed in SEEDS], [(SEEDS[0],)]))
def test_a_light_load_meets_all_targets_and_leaves_most_of_the_time_to_best_effort(
    seed: int,
) -> None:
    unified, priority = run("unified", LIGHT, seed), run("priority", LIGHT, seed)
    assert unified.rt.ttft_attainment == unified.rt.mtpot_attainment == 1.0
    assert unified.be.throughput_rps >= 0.5 * priority.be.throughput_rps > 1.0


@pytest.mark.parametrize("seed", long_but([(seed,) for seed in SEEDS], [(SEEDS[0],)]))
def test_at_capacity_more_requests_are_good_than_under_priority(seed: int) -> None:
    assert run("unified", FULL, seed).rt.goodput_rps >= 1.05 * best_of_priority(FULL, seed)


@pytest.mark.parametrize("seed", long_but([(seed,) for seed in SEEDS], [(SEEDS[0],)]))
def test_overload_leaves_goodput_where_priority_has_next_to_none(seed: int) -> None:
    goodput = run("unified", OVERLOAD, seed).rt.goodput_rps
    assert goodput >= 3.0 and goodput >= 2.0 * best_of_priority(OVERLOAD, seed)


@pytest.mark.parametrize("seed", long_but([(seed,) for seed in SEEDS], [(SEEDS[0],)]))
def test_in_overload_deadlines_serve_more_than_shortest_prompts_first(seed: int) -> None:
    """Prompts of 50 to 700 tokens, half as many again as can be served in time."""
    unified, shortest_first = (
        sim.run_hybrid(
            sim.HybridConfig(
                rt="poisson:50",
                rt_lengths="uniform:50-700,5-40",
                be="closed:64",
                be_lengths="uniform:512-1024,32-128",
                duration_s=8.0,
                margin_s=0.0,
                capacity_tokens=20_000,
                policy=policy,
                seed=seed,
            )
        ).rt.goodput_rps
        for policy in ("unified", "sjf")
    )
    assert unified >= 1.03 * shortest_first > 25.0


@pytest.mark.parametrize(("rate", "seed"), every_value([FULL, OVERLOAD], SEEDS))
def test_real_time_requests_keep_their_kv_while_best_effort_ones_have_any(
    rate: float, seed: int
) -> None:
    for policy in ("unified", "priority"):
        report = run(policy, rate, seed)
        assert report.be.evictions > 0, "memory is short"
        assert report.kv.rt_evictions_beside_be == 0


class TestPrefixesOnTheHost:
    def test_there_is_room_for_as_many(self) -> None:
        config = dataclasses.replace(SMALL, host_kv_tokens=70, prefix_host_tokens=300)
        with contextlib.closing(HybridRun(config)) as run:
            assert run.core.kv is not None and run.core.kv.tree is not None
            tier = run.core.kv.tree.tier
            assert tier is not None and tier.num_slots == 370
            assert run.core.kv.checkpoints.num_slots == 70

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"serve_options": {"cache_policy": "off"}}, "300 needs --cache-policy"),
            ({"hardware": read_hardware("qwen3.5-0.8b@a100-80g")}, "300 does not go with"),
        ],
    )
    def test_where_none_is_kept_there_it_is_refused(
        self, fields: dict[str, Any], message: str
    ) -> None:
        config = dataclasses.replace(SMALL, prefix_host_tokens=300, **fields)
        with pytest.raises(ConfigError, match=f"--prefix-host-tokens {message}"):
            HybridRun(config)


SLOW_CPU = VirtualHardware(
    floor_s=8e-3,
    per_new_token_s=0.5e-3,
    constant_s=6e-3,
    per_decode_context_s=1.4e-6,
    per_chunk_context_s=1e-7,
    per_copied_token_s=5e-6,
    kv_bytes_per_token=14_336,
    overlaps_copies=False,
    spread=0.1,
    encoder=EncoderWork(12, 1 / 600),
    per_encoder_token_s=0.1 / (12 * 576 * (1 + 576 / 600)),
)
"""A LLaVA of 140 M parameters on two cores of a CPU, about: 0.1 s for an image of 576 tokens, and
0.3 s for these."""


def test_chats_with_an_image_keep_their_targets_beside_documents_with_one() -> None:
    """Chats come by Poisson at a third of what there is time for; all else is the documents'."""
    chats = sim.HybridConfig(
        rt="poisson:0.4",
        rt_lengths="uniform:32-128,16-64",
        rt_max_tokens=None,
        rt_images="1:576",
        duration_s=110.0,
        margin_s=10.0,
        capacity_tokens=299_593,
        targets=Targets(ttft_s=1.5, mtpot_s=0.4),
        is_profiled=False,
        hardware=SLOW_CPU,
    )
    beside = dataclasses.replace(
        chats, be="batch:300", be_lengths="uniform:64-256,16-64", be_images="1:576"
    )
    (alone, _), (own, documents) = (
        (report.rt, report.be) for report in map(sim.run_hybrid, (chats, beside))
    )
    assert alone.arrivals == own.arrivals > 30
    assert alone.goodput_rps - own.goodput_rps <= 0.02 * alone.goodput_rps
    assert documents.throughput_rps > 1.1, "they have the time that is left"
