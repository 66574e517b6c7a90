"""The output-length history over a restart: what is written is what the next router begins with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lightserve.config import ServeConfig
from lightserve.decisions.records import header_of
from lightserve.decisions.replaying import make_core_of
from lightserve.router.kept_lengths import SAVE_INTERVAL_S, LengthFile
from lightserve.router.output_lengths import OutputLengths, prediction_key
from lightserve.types import BE, RT


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LengthFile:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return LengthFile(model_in(tmp_path / "model", "{}"))


def model_in(path: Path, config: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(config)
    return path


def learnt(*, window: int, num_lengths: int) -> OutputLengths:
    lengths = OutputLengths(max_output_tokens=4096, window=window)
    rng = np.random.default_rng(1)
    for index, length in enumerate(rng.geometric(1 / 200, num_lengths).tolist()):
        key = [prediction_key(RT), prediction_key(BE), prediction_key(RT, "ann")][index % 3]
        lengths.record(length if key[0] is RT else 3 * length, key)
    return lengths


def samples(lengths: OutputLengths) -> list[list[int]]:
    uniforms = np.tile((np.arange(50) + 0.5) / 50, (3, 1))
    keys = [None, prediction_key(RT), prediction_key(BE)]
    drawn = lengths.sample(np.array([0, 10, 300]), np.full(3, 4096), uniforms, keys)
    return [list(map(int, row)) for row in drawn]


def written(file: LengthFile, lengths: OutputLengths) -> bytes:
    file.keep(OutputLengths(max_output_tokens=9))
    file.keep(lengths)
    file._num_saved = 0
    file.save(0.0)
    file.wait()
    return file.path.read_bytes()


@pytest.mark.parametrize(("window", "num_lengths"), [(1000, 90), (60, 300)])
def test_a_router_goes_on_with_what_the_one_before_it_knew(
    file: LengthFile, window: int, num_lengths: int
) -> None:
    before = learnt(window=window, num_lengths=num_lengths)
    before._renew()
    assert b"ann" not in written(file, before)
    remembered = file.read()
    assert remembered is not None
    after = OutputLengths(max_output_tokens=4096, window=window)
    after.restore(remembered)
    assert after.remembered() == before.remembered() == remembered
    assert len(after) == len(before) == min(window, num_lengths)
    assert samples(after) == samples(before)
    assert samples(after) != samples(OutputLengths(max_output_tokens=4096, window=window))


def test_a_smaller_window_keeps_the_newest() -> None:
    before = learnt(window=1000, num_lengths=90)
    after = OutputLengths(max_output_tokens=4096, window=20)
    after.restore(before.remembered())
    assert after.remembered().lengths == before.remembered().lengths[-20:]


def test_it_is_written_now_and_then_and_only_where_there_is_news(file: LengthFile) -> None:
    lengths = OutputLengths(max_output_tokens=100)
    lengths.record(5)
    file.keep(lengths)

    def found(now_s: float) -> list[int] | None:
        file.save(now_s)
        file.wait()
        remembered = file.read()
        return None if remembered is None else remembered.lengths

    assert found(0.0) is None, "it was there from the start"
    lengths.record(6)
    assert found(1.0) == [5, 6]
    lengths.record(7)
    assert found(1.0 + 0.9 * SAVE_INTERVAL_S) == [5, 6]
    assert found(1.0 + SAVE_INTERVAL_S) == [5, 6, 7]
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]


def _change(**changes: object) -> Callable[[bytes], bytes]:
    return lambda data: msgspec.json.encode(msgspec.json.decode(data) | changes)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-20],
        lambda data: b"",
        _change(schema_version=2),
        _change(model_hash="0" * 16),
        _change(user="ann"),
        _change(remembered={"lengths": [3, 0], "by_class": {}}),
        _change(remembered={"lengths": [3, "4"], "by_class": {}}),
        _change(remembered={"lengths": [1] * 100_001, "by_class": {}}),
        _change(remembered={"lengths": [], "by_class": {"other": [1]}}),
    ],
)
def test_a_file_that_is_damaged_or_of_another_is_ignored_with_one_line(
    file: LengthFile, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    file.path.parent.mkdir(parents=True, exist_ok=True)
    file.path.write_bytes(damage(written(file, learnt(window=1000, num_lengths=30))))
    assert file.read() is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(file.path) in caplog.text and "\n" not in caplog.records[0].getMessage()


def test_models_have_files_of_their_own(file: LengthFile, tmp_path: Path) -> None:
    written(file, learnt(window=1000, num_lengths=30))
    other = LengthFile(model_in(tmp_path / "other", '{"a": 1}'))
    assert other.path != file.path and other.read() is None


def test_a_full_disk_stops_nothing(
    file: LengthFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "lightserve").write_text("a file where the folder should be")
    file.keep(OutputLengths(max_output_tokens=9))
    assert file._lengths is not None
    file._lengths.record(3)
    file.save(0.0)
    file.wait()
    assert "not kept" in caplog.text


def test_a_replayed_core_begins_with_the_same() -> None:
    remembered = learnt(window=1000, num_lengths=30).remembered()
    header = header_of(ServeConfig(), max_model_len=64, seed=0, remembered=remembered)
    again = msgspec.json.decode(msgspec.json.encode(header), type=type(header))
    assert make_core_of(again)._config.lengths.remembered() == remembered
