"""Workers that measure their own steps: which shapes, what is cached, `lightserve profile`."""

from __future__ import annotations

import contextlib
import itertools
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result
from support.tiny_models import TINY_MODELS, write_tiny_model
from support.tiny_vision import write_llava
from torch import Tensor

from lightserve.cli import profile as profile_command
from lightserve.cli.profile import command
from lightserve.config import ServeConfig
from lightserve.cost.model import StepSample, StepShape
from lightserve.cost.profile import (
    SCHEMA_VERSION,
    ProfileKey,
    StepProfile,
    cached_path,
    load_profile,
    save_profile,
)
from lightserve.errors import ConfigError, StartupError
from lightserve.messages.common import GraphSizes, StepCoefficients
from lightserve.messages.router_worker import StepPlan, StepResult
from lightserve.models.base import SingleRank
from lightserve.sim.virtual_gpus import ProfiledHardware
from lightserve.worker import profiling
from lightserve.worker.build import build_runner
from lightserve.worker.model_runner import ModelRunner
from lightserve.worker.profiling import (
    ShapeLimits,
    StepTimer,
    limits_of,
    profile_key,
    profile_while_idle,
    random_steps,
    shape_of_rows,
    stored_profile,
    take_profile,
)

FLAGS = {"kv_memory": "1MiB", "max_num_seqs": 8, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServeConfig:
    path = write_tiny_model(TINY_MODELS[0], tmp_path_factory.mktemp("model"))
    return ServeConfig(model=str(path), num_threads=1, **FLAGS)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def runner(config: ServeConfig) -> Iterator[ModelRunner]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield build_runner(config)
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profiling, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(profiling, "PATIENCE", 1000.0)
    monkeypatch.setattr("lightserve.cost.profile.MAX_MEDIAN_ERROR", 1e9)
    monkeypatch.setattr("lightserve.cost.profile.MAX_CROWDING", 1e9)
    return tmp_path / "lightserve" / "profiles"


@pytest.mark.parametrize(
    "limits",
    [
        ShapeLimits(256, 512, 4096, 100_000),
        ShapeLimits(256, 512, 4096, 100_000, GraphSizes(mixed=(16, 64, 256))),
        ShapeLimits(1, 1, 4096, 64),
        ShapeLimits(1, 512, 128, 64),
        ShapeLimits(64, 64, 16, 24),
        ShapeLimits(8, 512, 8, 100_000),
    ],
)
def test_steps_are_such_as_a_router_plans(limits: ShapeLimits) -> None:
    steps = list(itertools.islice(random_steps(limits, seed=3), 300))
    for rows in steps:
        assert 1 <= len(rows) <= limits.max_rows
        assert sum(count for _, count in rows) <= limits.max_tokens
        for start, count in rows:
            assert start >= 0 and count >= 1
            assert start + count <= limits.context_len - 1
            assert start + count <= limits.num_slots
        if limits.graph_sizes.mixed and any(count > 1 for _, count in rows):
            num_new = sum(count for _, count in rows)
            assert num_new in limits.graph_sizes.mixed or num_new > limits.graph_sizes.mixed[-1]
    assert steps == list(itertools.islice(random_steps(limits, seed=3), 300)), "every rank alike"
    if limits.max_rows > 1 and limits.max_tokens > 2:
        shapes = [shape_of_rows(rows) for rows in steps]
        kinds = {(shape.num_decodes > 0, shape.num_chunks > 0) for shape in shapes}
        assert kinds == {(True, False), (False, True), (True, True)}


def test_a_worker_measures_steps_and_copies(runner: ModelRunner, config: ServeConfig) -> None:
    timer = StepTimer(runner)
    for rows in itertools.islice(random_steps(limits_of(runner, config), seed=5), 12):
        sample = timer.measure(rows)
        assert sample.seconds > 0 and sample.shape == shape_of_rows(rows)
    saved_s, loaded_s = timer.copy_seconds(runner.host_pool.num_slots)
    assert saved_s > 0 and loaded_s > 0


def test_a_worker_measures_layers_of_its_encoder_of_images(tmp_path: Path) -> None:
    path = write_llava(tmp_path)
    config = ServeConfig(model=str(path), num_threads=1, **FLAGS)  # type: ignore[arg-type]
    runner = build_runner(config)
    encoded: list[float] = []
    execute = runner.execute

    def noted(plan: StepPlan) -> StepResult:
        result = execute(plan)
        if plan.encodes:
            encoded.append(result.encoded)
        return result

    runner.execute = noted  # type: ignore[method-assign]
    profile = take_profile(runner, config, SingleRank(), seconds=0.01)
    assert runner.encoder is not None and profile.encoder == runner.encoder
    layer = runner.encoder.of_layer(runner.black_image())  # type: ignore[arg-type]
    assert encoded == [layer, layer, 0.0, 0.0], "a layer at a time; it has two that count"
    assert 0.0 < profile.coefficients.per_encoder_token_s < 0.1
    save_profile(profile, tmp_path / "profile.json")
    assert ProfiledHardware.read(tmp_path / "profile.json").encoder == runner.encoder


def test_one_without_an_encoder_has_nothing_of_it_in_its_profile(
    runner: ModelRunner, config: ServeConfig
) -> None:
    profile = take_profile(runner, config, SingleRank(), seconds=0.01)
    assert profile.encoder is None and profile.coefficients.per_encoder_token_s == 0.0


def test_steps_that_are_measured_read_memory_that_was_written(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once each, and no more of it than caches need to be passed by."""
    monkeypatch.setattr(profiling, "TOUCHED_BYTES", 40 * runner.pool.bytes_per_token)
    touched: list[tuple[int, int]] = []
    monkeypatch.setattr(runner.pool, "touch", lambda first, end: touched.append((first, end)))
    timer = StepTimer(runner)
    for rows in ([(10, 1)], [(3, 2)], [(10, 1), (5, 4)], [(50, 1)], [(20, 1)] * 5):
        assert timer.measure(rows, 1).seconds > 0
    assert touched == [(0, 12), (12, 22), (22, 40)]


class OneOfTwo(SingleRank):
    """Beside a rank whose pools have so many slots."""

    size = 2

    def __init__(self, rank: int, *others: int) -> None:
        self.rank = rank
        self._others = iter(others)
        self._smallest = 0

    def gather(self, x: Tensor) -> Tensor | None:
        self._smallest = min(int(x), next(self._others))
        return torch.tensor([[int(x), self._smallest]]) if self.rank == 0 else None

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's is what it makes of all."""
        assert self.rank == 1 or int(x) == self._smallest
        return torch.full_like(x, self._smallest)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("num_on_host", [0, 7, 10**6])
def test_ranks_run_the_same_whatever_their_own_pools_hold(
    rank: int,
    num_on_host: int,
    runner: ModelRunner,
    config: ServeConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a rank ran alone would wait for the others in its first collective, for ever."""
    limits: list[ShapeLimits] = []
    copied: list[int] = []
    copy_seconds = StepTimer.copy_seconds

    def noted(self: StepTimer, num_places: int) -> tuple[float, float]:
        copied.append(num_places)
        copy_seconds(self, num_places)
        raise InterruptedError

    def no_steps(found: ShapeLimits, seed: int) -> None:
        limits.append(found)

    monkeypatch.setattr(StepTimer, "copy_seconds", noted)
    monkeypatch.setattr(profiling, "random_steps", no_steps)
    with pytest.raises(InterruptedError):
        profiling.take_profile(runner, config, OneOfTwo(rank, 24, num_on_host), seconds=1.0)
    assert limits[0].num_slots == 24 != runner.pool.num_slots
    assert copied == [min(24, num_on_host)]


def measured(runner: ModelRunner, config: ServeConfig) -> StepProfile | None:
    """Return what is measured where no request ever comes."""
    return profile_while_idle(runner, config, SingleRank(), lambda: True)


def test_what_the_first_start_has_measured_is_there_at_the_second(
    runner: ModelRunner, config: ServeConfig, cache: Path
) -> None:
    assert stored_profile(config) is None
    first = measured(runner, config)
    assert first is not None and first.num_samples == profiling.MIN_SAMPLES
    assert [entry.name for entry in cache.iterdir()] == [f"{profile_key(config).digest}.json"]
    assert stored_profile(config) == first
    given = ServeConfig(
        model=config.model,
        num_threads=1,
        profile=str(cached_path(first.key)),
        **FLAGS,  # type: ignore[arg-type]
    )
    assert stored_profile(given) == first
    with pytest.raises(ConfigError, match=r"is no profile of this .* CUDA graphs"):
        stored_profile(given, GraphSizes(mixed=(16, 32)))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("then", "now", "serves"),
    [((), (16, 32), False), ((16, 32), (), False), ((16, 32), (16, 48), True), ((), (), True)],
)
def test_a_profile_of_steps_with_prompts_that_ran_otherwise_is_measured_anew(
    then: tuple[int, ...],
    now: tuple[int, ...],
    serves: bool,
    config: ServeConfig,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As CUDA graphs or kernel by kernel: that is a matter of the start, and not in the key."""
    key = profile_key(config)
    coefficients = StepCoefficients(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    kept = StepProfile(
        SCHEMA_VERSION, "0", "name", key, coefficients, 1, 9, 0.0, 0.0, mixed_sizes=then
    )
    save_profile(kept, cached_path(key))
    assert stored_profile(config, GraphSizes(mixed=now)) == (kept if serves else None)
    assert ("ran steps with prompts" in caplog.text) != serves


@pytest.mark.parametrize("num_steps", [0, 3, profiling.MIN_SAMPLES - 1])
def test_a_request_ends_the_measuring_and_too_few_steps_say_nothing(
    num_steps: int,
    runner: ModelRunner,
    config: ServeConfig,
    cache: Path,
    *,
    caplog: pytest.LogCaptureFixture,
) -> None:
    idle = iter([True] * num_steps)
    with caplog.at_level(logging.INFO):
        found = profile_while_idle(runner, config, SingleRank(), lambda: next(idle, False))
    assert found is None and not cache.exists()
    assert "a request came first" in caplog.text
    assert next(idle, None) is None, "it went on as long as there was nothing to do"


def test_steps_for_which_a_request_would_wait_long_are_left_out(
    runner: ModelRunner, config: ServeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that takes 10 ms for each token and each 100 tokens of context."""
    run: list[StepShape] = []

    def measure(_: StepTimer, rows: list[tuple[int, int]], num_repeats: int) -> StepSample:
        run.append(shape := shape_of_rows(rows))
        return StepSample(shape, 0.01 * shape.num_new + 1e-4 * shape.decode_context + 1e-3)

    monkeypatch.setattr(StepTimer, "measure", measure)
    wide = ServeConfig(model=config.model, num_threads=1, max_num_seqs=8, kv_memory="1MiB")
    assert profile_while_idle(runner, wide, SingleRank(), lambda: True) is not None
    first, rest = run[: profiling.MIN_FITTED], run[profiling.MIN_FITTED :]
    assert all(shape.num_new <= profiling.SMALL_TOKENS for shape in first)
    longest = max(shape.num_new for shape in rest)
    assert 12 <= longest <= 40, "of up to 512 tokens, those of about 0.25 s"


def test_a_damaged_cache_is_measured_anew(
    runner: ModelRunner, config: ServeConfig, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = cached_path(profile_key(config))
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with caplog.at_level(logging.WARNING):
        assert stored_profile(config) is None
    assert "is ignored" in caplog.text
    profile = measured(runner, config)
    assert profile is not None and load_profile(path, profile.key) == profile


@pytest.mark.parametrize("limit", ["MAX_MEDIAN_ERROR", "MAX_CROWDING"])
def test_a_profile_that_is_mostly_noise_is_not_used(
    limit: str,
    runner: ModelRunner,
    config: ServeConfig,
    cache: Path,
    *,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(f"lightserve.cost.profile.{limit}", -1.0)
    assert measured(runner, config) is None
    assert "too much else runs here" in caplog.text
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_stops_nothing(
    runner: ModelRunner, config: ServeConfig, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.write_text("a file")
    with caplog.at_level(logging.WARNING):
        assert measured(runner, config) is not None
    assert "the profile is not kept" in caplog.text


def test_off_reads_nothing_and_a_wrong_file_is_refused(config: ServeConfig) -> None:
    def asking(profile: str) -> ServeConfig:
        return ServeConfig(
            model=config.model,
            num_threads=1,
            profile=profile,
            **FLAGS,  # type: ignore[arg-type]
        )

    assert stored_profile(asking("off")) is None
    with pytest.raises(ConfigError, match="--profile '/nowhere' is no profile of this model"):
        stored_profile(asking("/nowhere"))


@pytest.mark.parametrize("tp", [1, 2])
def test_the_command_measures_in_processes_of_its_own(
    tp: int, config: ServeConfig, tmp_path: Path
) -> None:
    output = tmp_path / "profile.json"
    arguments = ["--model", config.model, "--tp", str(tp), "--num-threads", "1", "--seconds", "1"]
    arguments += ["--kv-memory", "1MiB", "--max-num-seqs", "8", "--max-num-batched-tokens", "32"]
    result = CliRunner().invoke(command, [*arguments, "--output", str(output), "--json"])
    assert result.exit_code == 0, result.output
    profile = msgspec.json.decode(output.read_bytes(), type=StepProfile)
    assert profile.key.tp == tp and profile.num_samples >= profiling.MIN_FITTED
    assert msgspec.json.decode(result.stdout, type=StepProfile) == profile
    assert f"written to {output}" in result.stderr


def test_a_busy_machine_does_not_spoil_a_good_profile(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured beside other work, its steps take twice as long, however well it fits."""
    monkeypatch.setattr("lightserve.cost.profile.MAX_CROWDING", 0.25)
    key = ProfileKey("hash", "float32", "cpu", 1, 1, "torch")
    good, slow = (
        StepProfile(
            SCHEMA_VERSION,
            "0",
            "name",
            key,
            StepCoefficients(factor * 5e-3, 64.0, factor * 6e-5, 0.0, 0.0, 0.0, 0.0, 0.0),
            *(1, 30, 0.05, 0.1),
        )
        for factor in (1.0, 2.0)
    )

    def run(found: StepProfile, *arguments: str) -> Result:
        monkeypatch.setattr(profile_command, "measure", lambda *_: found)
        return CliRunner().invoke(command, [*arguments])

    path = cached_path(key)
    assert f"written to {path}" in run(good).stderr
    result = run(slow)
    assert result.exit_code == 0 and f"2.00 times as long as in {path}, which" in result.stderr
    assert load_profile(path, key) == good
    assert "written to" in run(slow, "--replace").stderr
    assert load_profile(path, key) == slow
    assert "written to" in run(good).stderr  # a faster one takes its place
    assert load_profile(path, key) == good
    crowded = run(msgspec.structs.replace(good, crowding=0.5))
    assert isinstance(crowded.exception, StartupError) and "50% of the cores" in str(
        crowded.exception
    )
    assert load_profile(path, key) == good


@pytest.mark.parametrize("has_output", [False, True])
def test_the_command_does_not_keep_noise(
    has_output: bool, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be what servers plan with from then on."""
    monkeypatch.setattr("lightserve.cost.profile.MAX_MEDIAN_ERROR", 0.35)
    key = ProfileKey("hash", "float32", "cpu", 1, 1, "torch")
    coefficients = StepCoefficients(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    noisy = StepProfile(SCHEMA_VERSION, "0", "name", key, coefficients, 1, 9, 0.8, 5.0)
    monkeypatch.setattr(profile_command, "measure", lambda *_: noisy)
    output = tmp_path / "profile.json"
    arguments = ["--output", str(output)] if has_output else []
    result = CliRunner().invoke(command, arguments)
    assert "off by 80% in the median" in result.stderr + str(result.exception)
    assert isinstance(result.exception, StartupError) != has_output
    assert output.exists() == has_output
    assert not list(cache.glob("*.json"))


def test_the_command_finds_out_first_that_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(profile_command, "measure", lambda *_: pytest.fail("measured"))
    result = CliRunner().invoke(command, ["--output", str(tmp_path / "file" / "profile.json")])
    assert isinstance(result.exception, StartupError)
    assert "cannot be written" in str(result.exception)


def test_no_rank_waits_for_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 goes on for ever, as one whose GPU waits for a peer's does."""
    monkeypatch.setattr(profile_command, "LAST_WORDS_S", 0.1)
    scripts = (
        "import time; print('a\\nb', flush=True); time.sleep(1000)",
        "print('c'); raise SystemExit(3)",
    )
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
            )
            for script in scripts
        ]
        stack.callback(ranks[0].kill)
        seen = list(profile_command._lines(ranks))
    assert sorted(seen) in ([b"a", b"b", b"c"], [b"c"])  # rank 1 may have been the faster


def test_a_rank_that_is_done_is_no_dead_one() -> None:
    scripts = ("import time; time.sleep(0.2); print('a')", "pass")
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
            )
            for script in scripts
        ]
        assert list(profile_command._lines(ranks)) == [b"a"]
