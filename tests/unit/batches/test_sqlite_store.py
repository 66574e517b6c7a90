"""What is SQLite's own of a batch store: its directory, and stores that are none."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import apsw
import pytest
from support.batch_store import (
    KEY,
    NOW_S,
    create,
    jsonl,
    line,
    make_batch,
    new_batch,
    next_version,
    open_store,
    upload,
)

from lightserve.batches.access import location_of, prepare
from lightserve.batches.contents import Store
from lightserve.batches.database import OLDEST_VERSION, SCHEMA_VERSION
from lightserve.batches.records import LeasedLine, Outcome
from lightserve.batches.sqlite import DATABASE, LOCK
from lightserve.config import ServeConfig
from lightserve.errors import ConfigError, StartupError, StoreError, StoreUnusable
from lightserve.supervisor.startup import TakenStore, take_store


def lease(store: Store, epoch: int) -> list[LeasedLine]:
    return store.jobs.lease("north", epoch, NOW_S, lease_s=30.0, max_lines=1, max_bytes=10**6)


def test_a_store_is_private_and_has_one_server(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "store"
    with open_store(directory) as store:
        upload(store, b"x")
        assert directory.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
        assert len(list(directory.iterdir())) == 4  # the lock, and SQLite's three
        with pytest.raises(StartupError, match="another server uses it"):
            prepare(str(directory))
        assert store.database.value("PRAGMA synchronous") == 2
        assert store.database.value("PRAGMA journal_mode") == "wal"
    prepare(str(directory)).close()


def test_the_names_of_a_new_store_are_synced_up_to_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loss of power could take all of it, whatever was synced inside."""
    synced = []

    def fsync(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())

    monkeypatch.setattr(os, "fsync", fsync)
    directory = tmp_path / "a" / "store"
    for expected in ({directory, directory.parent, tmp_path}, {directory}):
        prepare(str(directory)).close()
        assert set(synced) == expected
        synced.clear()


def test_a_store_that_cannot_be_used_says_so_in_one_line(tmp_path: Path) -> None:
    with open_store(tmp_path):
        make_all = apsw.Connection(str(tmp_path / DATABASE))
        make_all.pragma("user_version", SCHEMA_VERSION + 1)
        make_all.close()
    with pytest.raises(StartupError, match="written by a newer one"):
        prepare(str(tmp_path))
    path = tmp_path / DATABASE
    path.write_bytes(os.urandom(8192))
    with pytest.raises(StartupError, match="not a database"):
        prepare(str(tmp_path))
    path.unlink()
    foreign = apsw.Connection(str(path))
    foreign.execute("CREATE TABLE t (x)")
    foreign.close()
    with pytest.raises(StartupError, match="no store of lightserve"):
        prepare(str(tmp_path))
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StartupError, match="--batch-store"):
        prepare(str(file))


def test_a_store_of_the_version_before_is_kept_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path) as store:
        file = upload(store, jsonl([line("a")]))
        (data,) = store.database.rows("SELECT data FROM chunks")
    next_version(monkeypatch)
    prepare(str(tmp_path)).close()
    (kept,) = tmp_path.glob(f"{DATABASE}.schema-*")
    assert kept.name.endswith(f".schema-{SCHEMA_VERSION}") and kept.stat().st_mode & 0o777 == 0o600
    before, state = apsw.Connection(str(kept)), kept.stat()
    assert before.pragma("user_version") == SCHEMA_VERSION
    assert before.pragma("quick_check") == "ok"
    assert list(before.execute("SELECT data FROM chunks")) == [data]
    before.close()
    prepare(str(tmp_path)).close()
    assert kept.stat().st_mtime_ns == state.st_mtime_ns
    assert [path.name for path in tmp_path.glob("*schema*")] == [kept.name]
    with open_store(tmp_path) as store:
        assert store.files.get("alice", file.id, NOW_S) == file


def test_a_store_of_before_the_first_release_is_refused(tmp_path: Path) -> None:
    prepare(str(tmp_path)).close()
    old = apsw.Connection(str(tmp_path / DATABASE))
    old.pragma("user_version", OLDEST_VERSION - 1)
    old.close()
    with pytest.raises(StartupError, match=f"version {OLDEST_VERSION - 1}, of before the first"):
        prepare(str(tmp_path))
    assert not list(tmp_path.glob("*schema*"))


def test_little_space_is_left_to_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is added and nothing begun until there is twice the least; results are taken in."""
    with open_store(tmp_path, min_free_bytes=1000) as store:
        batch = make_batch(store, 2)
        file = store.files.get(KEY, batch.input_file_id, NOW_S)
        epoch = store.jobs.begin("north", NOW_S)
        (held,) = lease(store, epoch)
        free = [999]
        monkeypatch.setattr(
            "lightserve.batches.sqlite.os.statvfs",
            lambda path: SimpleNamespace(f_bavail=free[0], f_frsize=1),
        )
        for free[0] in (999, 1999):
            assert lease(store, epoch) == []
            for add in (
                lambda: store.files.begin(KEY, NOW_S),
                lambda: create(store, new_batch(file), [], NOW_S),
            ):
                with pytest.raises(StoreError, match="less than 1000 bytes") as error:
                    add()
                assert error.value.is_full
        outcome = Outcome(batch=held.batch, number=held.number, result=b"{}")
        assert store.jobs.settle("north", epoch, [outcome], NOW_S) == 0
        free[0] = 2000
        assert len(lease(store, epoch)) == 1
        free[0] = 1001
        store.files.begin(KEY, NOW_S)


def test_a_place_that_others_may_write_to_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(StartupError, match="others may write"):
        prepare(str(tmp_path / "open"))
    target, store = tmp_path / "target", tmp_path / "store"
    store.mkdir(mode=0o700)
    (store / LOCK).symlink_to(target)
    with pytest.raises(StartupError, match="symbolic links"):
        prepare(str(store))
    assert not target.exists()


def test_a_server_that_is_told_of_no_store_has_one_for_its_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert location_of(ServeConfig()) == "/state/lightserve/batches-8000"
    assert location_of(ServeConfig(port=9000)) == "/state/lightserve/batches-9000"
    assert location_of(ServeConfig(batch_store="none")) == ""
    assert location_of(ServeConfig(batch_store="x")) == "x"
    monkeypatch.setenv("HOME", "/home/me")
    for relative in ("", "state"):
        monkeypatch.setenv("XDG_STATE_HOME", relative)
        assert location_of(ServeConfig()) == "/home/me/.local/state/lightserve/batches-8000"


def test_a_store_of_ones_own_is_needed_at_the_start_when_something_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    directory = tmp_path / "lightserve" / "batches-8000"
    with ExitStack() as held:
        assert take_store(ServeConfig(), held) == TakenStore(is_needed=False)
        assert directory.stat().st_mode & 0o777 == 0o700
    with open_store(directory) as store:
        upload(store, b"x")
    with ExitStack() as held:
        assert take_store(ServeConfig(), held) == TakenStore(is_needed=True)
    with ExitStack() as held:
        named = ServeConfig(batch_store=str(tmp_path / "named"))
        assert take_store(named, held) == TakenStore(is_needed=True)
        assert take_store(ServeConfig(batch_store="none"), held) == TakenStore()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["lightserve", "named"]


def test_a_store_of_ones_own_that_cannot_be_had_is_told_and_one_that_was_named_is_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "lightserve")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    directory = tmp_path / "lightserve" / "batches-8000"
    named = ServeConfig(batch_store=str(directory))

    def problem() -> str:
        caplog.clear()
        with ExitStack() as held:
            found = take_store(ServeConfig(), held)
            assert not found.is_needed
        (record,) = caplog.records
        assert record.levelno == logging.INFO and found.problem in record.message
        assert str(tmp_path) not in found.problem
        return found.problem

    with ExitStack() as held:
        take_store(ServeConfig(), held)
        assert problem() == "another server uses it"
        with pytest.raises(StoreUnusable, match="another server uses it"):
            take_store(named, held)
    directory.chmod(0o777)
    assert "others may write" in problem()
    directory.chmod(0o700)
    (directory / DATABASE).write_bytes(b"no database" * 1000)
    assert problem()
    with pytest.raises(StoreUnusable), ExitStack() as held:
        take_store(named, held)
    monkeypatch.setenv("XDG_STATE_HOME", str(directory / DATABASE))
    assert problem() == "Not a directory"
    monkeypatch.setenv("XDG_STATE_HOME", "")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda _: {}["none"])
    assert problem() == "there is no home directory, and XDG_STATE_HOME names no place"


def test_flags_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"--batch-store must be a directory, .*, got ''"):
        ServeConfig(batch_store="")
    with pytest.raises(ConfigError, match="--responses-ttl-s needs --batch-store, got none"):
        ServeConfig(batch_store="none", responses_ttl_s=60)
    with pytest.raises(ConfigError, match="--file-store needs --batch-store"):
        ServeConfig(batch_store="none", file_store="s3://bucket")
    ServeConfig(responses_ttl_s=60)
