"""Fitting the step model, its shapes, and the file that a profile is kept in."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grids import choose, more_when_long

from lightserve.cost.model import StepModel, StepSample, StepShape, fit, held_out_errors, knee_grid
from lightserve.cost.profile import (
    SCHEMA_VERSION,
    ProfileKey,
    StepProfile,
    cache_dir,
    cached_path,
    is_worse,
    load_profile,
    save_profile,
    slowness,
)
from lightserve.messages.common import NO_SIZES, GraphSizes, StepCoefficients
from lightserve.router.step_cost import StepCost

COEFFICIENTS = StepCoefficients(
    floor_s=9.4e-3,
    knee=112.0,
    per_new_s=64e-6,
    per_decode_s=5e-6,
    per_chunk_s=2e-4,
    per_decode_context_s=3.3e-7,
    per_chunk_context_s=2e-7,
    per_chunk_pair_s=3.5e-9,
    per_saved_token_s=21e-6,
    per_loaded_token_s=22e-6,
)
MODEL = StepModel(COEFFICIENTS)
SIZES = GraphSizes((1, 2, 4, 8, 16), (16, 32, 64, 128, 192, 256, 384, 512, 1024))
"""To which the steps of a GPU's workers may be padded."""
ROWS = st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 400)), max_size=10)


def shape_of(rows: list[tuple[int, int]]) -> StepShape:
    shape = StepShape()
    for start, num_tokens in rows:
        shape = shape.plus(start, num_tokens)
    return shape


def samples_of(model: StepModel, count: int, *, noise: float, seed: int = 0) -> list[StepSample]:
    rng = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        rows = []
        if number % 3 != 1:
            rows += [(int(rng.integers(1, 3000)), 1)] * int(np.exp(rng.uniform(0, 5.5)))
        if number % 3 != 0:
            rows += [(int(rng.integers(0, 3000)), int(np.exp(rng.uniform(0.7, 7))))]
        shape = shape_of(rows)
        seconds = model.seconds(shape) * float(np.exp(rng.normal(0.0, noise)))
        samples.append(StepSample(shape, seconds))
    return samples


@given(rows=ROWS, number=st.integers(0, 9))
def test_a_share_is_added_exactly(rows: list[tuple[int, int]], number: int) -> None:
    shape = shape_of(rows)
    assert shape.num_new == sum(count for _, count in rows)
    assert shape.decode_context == sum(start for start, count in rows if count == 1)
    assert shape.chunk_pairs == sum(
        position for start, count in rows if count > 1 for position in range(start, start + count)
    )
    assert shape.chunk_context == sum(start for start, count in rows if count > 1)
    assert shape.num_decodes + shape.num_chunks == len(rows)
    if number < len(rows):
        others = rows[:number] + rows[number + 1 :]
        assert shape_of(others).plus(*rows[number]) == shape
    decodes, chunks = shape.decodes, shape.chunks
    assert decodes == shape_of([row for row in rows if row[1] == 1])
    assert chunks == shape_of([row for row in rows if row[1] > 1])


def test_a_draft_costs_a_token_its_context_and_its_logits() -> None:
    """As `d` of a decode, and the shape less its drafts is that without them."""
    shape = shape_of([(300, 1)] * 4 + [(9, 130)])
    drafted = shape.plus_drafts(3, 900)
    tokens_s = 3 * COEFFICIENTS.per_new_s + 900 * COEFFICIENTS.per_chunk_pair_s
    added_s = tokens_s + 3 * COEFFICIENTS.per_decode_s
    assert MODEL.seconds(drafted) - MODEL.seconds(shape) == pytest.approx(added_s)
    assert drafted.decodes == shape.decodes and drafted.plus_drafts(-3, -900) == shape
    assert MODEL.seconds(drafted.chunks) - MODEL.seconds(shape.chunks) == pytest.approx(added_s)
    assert drafted.plus(7, 1) == shape.plus(7, 1).plus_drafts(3, 900)
    assert drafted.plus(7, 5) == shape.plus(7, 5).plus_drafts(3, 900)


def test_drafts_are_fitted_as_rows_with_logits() -> None:
    """Of a model with many words, without a profile: so their price is learnt while serving."""
    model = StepModel(StepCoefficients(2e-2, 64.0, 1e-5, 1e-3, 1e-3, 0.0, 0.0, 0.0))
    shapes = [
        shape_of([(50, 1)] * rows).plus_drafts(drafts, 50 * drafts)
        for rows in (1, 3, 5, 9)
        for drafts in (0, 4, 8, 24)
    ] + [shape_of([(0, count)]) for count in (9, 30, 60, 90)]
    found = fit([StepSample(shape, model.seconds(shape)) for shape in shapes])
    assert found.per_decode_s == pytest.approx(1e-3, rel=0.02)


@pytest.mark.parametrize("knee", [8.0, 40.0, 112.0, 300.0, 700.0])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_knee_is_found_within_one_step_of_the_grid(knee: float, noise: float) -> None:
    model = StepModel(msgspec.structs.replace(COEFFICIENTS, knee=knee))
    samples = samples_of(model, 300, noise=noise)
    grid = knee_grid(np.array([float(sample.shape.num_new) for sample in samples]))
    nearest = int(np.argmin([abs(np.log(max(at, 0.5) / knee)) for at in grid]))
    assert fit(samples).knee in grid[max(0, nearest - 1) : nearest + 2]


def test_the_fit_survives_steps_that_were_held_up() -> None:
    samples = samples_of(MODEL, 120, noise=0.02)
    held_up = [
        StepSample(shape, seconds * (8.0 if number % 8 == 0 else 1.0))
        for number, (shape, seconds) in enumerate(samples)
    ]
    model = StepModel(fit(held_up))
    off = [abs(model.seconds(s.shape) / MODEL.seconds(s.shape) - 1.0) for s in samples]
    assert np.median(off) < 0.05
    assert held_out_errors(samples).median < 0.04


def test_no_coefficient_is_negative_though_noise_says_so() -> None:
    for seed in range(5):
        values = msgspec.structs.astuple(fit(samples_of(MODEL, 14, noise=0.8, seed=seed)))
        assert all(value >= 0 for value in values)


@given(
    shape=ROWS.map(shape_of),
    more=st.tuples(*[st.integers(0, 1000)] * 7),
    copies=st.tuples(st.integers(0, 500), st.integers(0, 500)),
)
def test_time_grows_with_every_part_of_a_shape(
    shape: StepShape, more: tuple[int, ...], copies: tuple[int, int]
) -> None:
    larger = StepShape(
        shape.num_new + more[0],
        shape.decode_context + more[1],
        shape.chunk_pairs + more[2],
        shape.num_decodes + more[3],
        shape.num_chunks + more[4],
        shape.chunk_context + more[5],
        shape.num_drafts + more[6],
    )
    assert MODEL.seconds(larger) >= MODEL.seconds(shape)


@given(
    rows=ROWS,
    start=st.integers(0, 4000),
    num_tokens=st.integers(2, 500),
    ratios=st.tuples(*[st.floats(0.5, 2.0)] * 3),
    sizes=st.sampled_from([NO_SIZES, SIZES]),
)
def test_corrected_time_grows_with_every_row(
    rows: list[tuple[int, int]],
    start: int,
    num_tokens: int,
    ratios: tuple[float, ...],
    sizes: GraphSizes,
) -> None:
    cost = corrected(ratios, sizes)
    shape = shape_of(rows)
    for row in ((start, 1), (start, num_tokens)):
        assert cost.seconds(shape.plus(*row)) >= cost.seconds(shape)
    assert cost.seconds(shape.plus(start, num_tokens + 1)) >= cost.seconds(
        shape.plus(start, num_tokens)
    )


@more_when_long
@settings(max_examples=choose(100, 300))
@given(
    rows=ROWS,
    limit_s=st.floats(0.0, 0.5),
    start=st.integers(0, 4000),
    most=st.integers(0, 3000),
    ratios=st.tuples(*[st.floats(0.5, 2.0)] * 3),
)
@pytest.mark.parametrize("sizes", [NO_SIZES, SIZES])
def test_the_budget_fits_and_one_more_does_not(
    rows: list[tuple[int, int]],
    limit_s: float,
    start: int,
    most: int,
    ratios: tuple[float, ...],
    *,
    sizes: GraphSizes,
) -> None:
    cost, shape = corrected(ratios, sizes), shape_of(rows)
    count = cost.tokens_within(shape, limit_s, start, most)
    assert 0 <= count <= most
    if count > 0:
        assert cost.seconds(shape.plus(start, count)) <= limit_s
    if count < most:
        assert cost.seconds(shape.plus(start, count + 1)) > limit_s
    if count == 0 and most > 1:
        assert cost.seconds(shape.plus(start, 2)) > limit_s


def corrected(ratios: tuple[float, ...], sizes: GraphSizes = NO_SIZES) -> StepCost:
    """Return a model whose kinds of steps take so many times as long as profiled."""
    cost, kinds = StepCost(), ([(9, 1)], [(9, 1), (9, 2)], [(9, 2)])
    cost.use_workers(COEFFICIENTS, sizes)
    for rows, ratio in zip(kinds, ratios, strict=True):
        cost.observe(shape_of(rows), ratio * MODEL.seconds(shape_of(rows)))
    return cost


# Workers that pad steps to some sizes.


@pytest.mark.parametrize(
    ("num_rows", "computed"), [(1, 1), (3, 4), (16, 16), (17, 32), (1024, 1024), (1025, 1025)]
)
def test_decodes_are_padded_to_their_own_sizes(num_rows: int, computed: int) -> None:
    """Beyond the last of them to those of other steps, and beyond these to none."""
    coefficients = StepCoefficients(1e-3, 0.0, 1e-5, 0.0, 0.0, 0.0, 0.0, 0.0)
    model, shape = StepModel(coefficients, SIZES), StepShape().plus_decodes(num_rows, 9)
    expected_s = StepModel(coefficients).seconds(shape._replace(num_new=computed))
    assert model.seconds(shape) == expected_s
    assert model.seconds_of_parts(shape)[:2] == (expected_s, expected_s)
    unknown = StepModel(coefficients, GraphSizes(mixed=SIZES.mixed))
    assert unknown.seconds(shape) == StepModel(coefficients).seconds(shape)


@given(rows=ROWS, start=st.integers(0, 4000), num_tokens=st.integers(2, 500))
def test_a_step_with_a_chunk_takes_what_its_size_takes(
    rows: list[tuple[int, int]], start: int, num_tokens: int
) -> None:
    """All but the attention of its rows."""
    shape = shape_of(rows).plus(start, num_tokens)
    above = [size for size in SIZES.mixed if size >= shape.num_new]
    whole = shape._replace(num_new=above[0]) if above else shape
    assert StepModel(COEFFICIENTS, SIZES).seconds(shape) == MODEL.seconds(whole)


def test_what_a_shape_adds_to_a_large_step_is_not_padded() -> None:
    shape = StepShape().plus(0, 130)
    assert StepModel(COEFFICIENTS, SIZES).work(shape) == MODEL.work(shape)


def test_the_time_up_to_the_next_size_is_no_reason_to_cut_a_prompt() -> None:
    """One token past a size, and a step takes as long as with all up to the next one."""
    cost, decodes = StepCost(), StepShape().plus_decodes(60, 60_000)
    cost.use_workers(COEFFICIENTS, SIZES)
    of_512_s = cost.seconds(decodes.plus(0, 512 - 60))
    pair_s = COEFFICIENTS.per_chunk_pair_s
    assert of_512_s - cost.seconds(decodes.plus(0, 385 - 60)) < 100_000 * pair_s
    # As much as the tokens of the next size cost is left of the limit, but for one.
    limit_s = of_512_s + 511 * COEFFICIENTS.per_new_s
    assert cost.tokens_within(decodes, limit_s, 0, 4000) == 512 - 60
    assert cost.tokens_within(decodes, of_512_s * 1.0001, 0, 4000) == 512 - 60


@pytest.mark.parametrize("is_told", [True, False])
def test_steps_of_sizes_are_fitted_as_such(is_told: bool) -> None:
    """Teeth: a line through the steps of the sizes is off by much more."""
    padding = StepModel(COEFFICIENTS, SIZES)
    samples = samples_of(padding, 300, noise=0.02)
    sizes = SIZES if is_told else NO_SIZES
    error = held_out_errors(samples, sizes=sizes)
    assert (error.median < 0.03 and error.p95 < 0.07) == is_told


@pytest.mark.parametrize("is_told", [True, False])
def test_sizes_are_learnt_while_serving_and_doubts_with_them(is_told: bool) -> None:
    """A router without a profile: its guard shrinks as its steps are no riddle."""
    padding, cost = StepModel(COEFFICIENTS, SIZES), StepCost()
    cost.use_workers(None, SIZES if is_told else NO_SIZES)
    for shape, seconds in samples_of(padding, 600, noise=0.02):
        cost.observe(shape, seconds)
    samples = samples_of(padding, 300, noise=0.02, seed=1)
    off = [abs(cost.seconds(shape) / seconds - 1) for shape, seconds in samples]
    assert (float(np.quantile(off, 0.95)) < 0.08) == is_told
    assert (cost.guard < 1.25) == is_told


@pytest.mark.parametrize("decodes", [(), (2, 4, 8)])
def test_the_times_of_a_steps_parts_are_padded_alike(decodes: tuple[int, ...]) -> None:
    coefficients = StepCoefficients(1e-3, 0.0, 1e-5, 0.0, 0.0, 0.0, 0.0, 0.0)
    model = StepModel(coefficients, GraphSizes(decodes, (16, 32)))
    for rows in ([(200, 1)] * 3, [(200, 1)] * 3 + [(0, 5)]):
        for shape in (shape_of(rows), shape_of(rows).plus_drafts(4, 800)):
            apart = [model.seconds(part) for part in (shape, shape.decodes, shape.chunks)]
            assert model.seconds_of_parts(shape) == tuple(apart)


def test_new_workers_may_pad_otherwise() -> None:
    """What was learnt of the group before is kept, and its sizes are not."""
    cost, shape = StepCost(), StepShape().plus(0, 130)
    cost.use_workers(COEFFICIENTS, SIZES)
    assert cost.seconds(shape) == MODEL.seconds(shape._replace(num_new=192))
    cost.use_workers(None, NO_SIZES)
    assert cost.seconds(shape) == MODEL.seconds(shape)


KEY = ProfileKey("abc", "bfloat16", "a device", 1, 2, "auto")
PROFILE = StepProfile(SCHEMA_VERSION, "0.1.0", "a model", KEY, COEFFICIENTS, 4096, 50, 0.03, 0.1)


def test_a_profile_comes_back_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cached_path(KEY)
    assert path.parent == cache_dir() == tmp_path / "lightserve" / "profiles"
    assert load_profile(path, KEY) is None
    save_profile(PROFILE, path)
    save_profile(PROFILE, path)
    assert load_profile(path, KEY) == PROFILE
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("factor", "error", "cached_error", "version", "expected"),
    [
        (2.0, 0.05, 0.03, "0.1.0", True),
        (2.0, 0.03, 0.05, "0.1.0", True),  # a steady load: it fits well and is wrong
        (1.05, 0.05, 0.03, "0.1.0", False),  # as fast, and newer
        (0.5, 0.05, 0.03, "0.1.0", False),
        (2.0, 0.05, 0.3, "0.1.0", False),  # the cached one was a guess
        (2.0, 0.3, 0.3, "0.1.0", True),
        (2.0, 0.05, 0.03, "0.0.9", False),  # of other code
    ],
)
def test_the_better_profile_is_kept(
    factor: float, error: float, cached_error: float, version: str, expected: bool
) -> None:
    slower = {
        name: value if name == "knee" else factor * value
        for name, value in msgspec.structs.asdict(COEFFICIENTS).items()
    }
    new = msgspec.structs.replace(
        PROFILE, coefficients=StepCoefficients(**slower), median_error=error
    )
    cached = msgspec.structs.replace(PROFILE, median_error=cached_error, lightserve_version=version)
    assert slowness(new, cached) == pytest.approx(factor)
    assert is_worse(new, cached) is expected


def test_profiles_are_compared_by_the_steps_that_workers_pad() -> None:
    coefficients = StepCoefficients(1e-3, 0.0, 1e-5, 0.0, 0.0, 0.0, 0.0, 0.0)
    plain = msgspec.structs.replace(PROFILE, coefficients=coefficients)
    assert slowness(msgspec.structs.replace(plain, mixed_sizes=(1024,)), plain) > 1.1


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    assert cache_dir() == Path.home() / ".cache" / "lightserve" / "profiles"


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.json"
    save_profile(PROFILE, path)

    def fail(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_profile(msgspec.structs.replace(PROFILE, num_samples=1), path)
    assert load_profile(path, KEY) == PROFILE
    assert list(tmp_path.iterdir()) == [path]


def _with(**changes: object) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(PROFILE, **changes))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated"),
        (b"{}", "missing required field"),
        (b"\xff\xfe", "malformed"),
        (msgspec.json.encode(PROFILE)[:-20], "truncated"),
        (b"[]", "got `array`"),
        (_with(schema_version=99), "schema version 99, not 2"),
        (_with(key=msgspec.structs.replace(KEY, tp=2)), "its tp is 2, this server's is 1"),
        (_with(key=msgspec.structs.replace(KEY, device="x")), "its device is 'x'"),
        (
            _with(coefficients=msgspec.structs.replace(COEFFICIENTS, floor_s=-1.0)),
            "coefficients that no worker has",
        ),
    ],
)
def test_other_files_are_ignored_with_a_warning(
    content: bytes, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert load_profile(path, KEY) is None
    assert f"profile {path} is ignored" in caplog.text
    assert reason in caplog.text
