"""`lightserve convert`: what pickles hold becomes safetensors; what is no tensor never runs."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from support.tiny_models import TinyModel, write_tiny_model
from torch import Tensor

from lightserve.cli.made_files import convert as command
from lightserve.errors import ModelLoadError
from lightserve.models.config import load_model_config
from lightserve.models.pickled_weights import (
    MAX_COPIED_BYTES,
    PICKLED_FILE,
    PICKLED_INDEX,
    convert,
    main,
)
from lightserve.models.weight_files import INDEX_FILE, SINGLE_FILE, check_weights


def write_pickled(path: Path, *, num_shards: int = 1, **options: object) -> dict[str, Tensor]:
    write_tiny_model(TinyModel("", "Llama"), path)
    tensors = load_file(path / SINGLE_FILE)
    (path / SINGLE_FILE).unlink()
    names = sorted(tensors)
    if num_shards == 1:
        torch.save(tensors, path / "pytorch_model.bin", **options)  # type: ignore[arg-type]
        return tensors
    weight_map: dict[str, str] = {}
    for number in range(num_shards):
        file = f"pytorch_model-{number + 1:05}-of-{num_shards:05}.bin"
        own = names[number::num_shards]
        torch.save({name: tensors[name] for name in own}, path / file)
        weight_map |= dict.fromkeys(own, file)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def run(*arguments: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lightserve.cli.main", "convert", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_the_command_that_a_refusal_names_works(tmp_path: Path) -> None:
    source, target = tmp_path / "a model", tmp_path / "converted"
    tensors = write_pickled(source)
    config = load_model_config(source)
    with pytest.raises(ModelLoadError, match=r"lightserve convert '.*/a model' OUT makes safeten"):
        check_weights(source, config)
    result = run(source, target)
    assert result.returncode == 0, result.stderr
    assert "lightserve serve --model" in result.stdout
    check_weights(target, load_model_config(target))
    found = load_file(target / SINGLE_FILE)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    again = run(source, target)
    assert (again.returncode, again.stderr) == (
        1,
        f"lightserve: error: {target}: is there already\n",
    )


def test_shards_old_files_and_tied_weights(tmp_path: Path) -> None:
    tensors = write_pickled(tmp_path / "shards", num_shards=3)
    convert(tmp_path / "shards", tmp_path / "out")
    check_weights(tmp_path / "out", load_model_config(tmp_path / "out"))
    weight_map = json.loads((tmp_path / "out" / INDEX_FILE).read_text())["weight_map"]
    assert weight_map.keys() == tensors.keys() and len(set(weight_map.values())) == 3
    write_pickled(tmp_path / "old", _use_new_zipfile_serialization=False)
    convert(tmp_path / "old", tmp_path / "new")
    assert load_file(tmp_path / "new" / SINGLE_FILE).keys() == tensors.keys()
    tied = tmp_path / "tied"
    write_pickled(tied)
    weight = torch.arange(12.0).view(3, 4)
    torch.save({"a": weight, "b": weight, "c": weight.T}, tied / "pytorch_model.bin")
    convert(tied, tmp_path / "untied")
    found = load_file(tmp_path / "untied" / SINGLE_FILE)
    assert torch.equal(found["a"], found["b"]) and torch.equal(found["c"], weight.T)


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_what_is_no_tensor_is_refused_and_never_runs(tmp_path: Path) -> None:
    source, marker, target = tmp_path / "model", tmp_path / "ran", tmp_path / "out"
    write_pickled(source)
    file = source / "pytorch_model.bin"
    whole = file.read_bytes()
    bad = {
        "holds no plain tensors": [
            pickle.dumps({"w": Evil(marker)}),
            whole[: len(whole) // 2],
            b"",
            b"nothing of that kind",
        ],
    }
    for complaint, contents in bad.items():
        for content in contents:
            file.write_bytes(content)
            with pytest.raises(ModelLoadError, match=complaint) as caught:
                convert(source, target)
            assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    torch.save({"w": Evil(marker)}, file)
    with pytest.raises(ModelLoadError, match="holds no plain tensors"):
        convert(source, target)
    for held, complaint in (
        ([torch.ones(2)], "holds a list, not tensors by name"),
        ({"epoch": 3}, "'epoch' is no plain tensor"),
        ({"w": {"x": torch.ones(2)}}, "'w' is no plain tensor"),
    ):
        torch.save(held, file)
        with pytest.raises(ModelLoadError, match=complaint):
            convert(source, target)
    file.unlink()
    with pytest.raises(ModelLoadError, match=r"has neither pytorch_model\.bin nor"):
        convert(source, target)
    (source / "pytorch_model.bin.index.json").write_text('{"weight_map": {"w": "../evil.bin"}}')
    with pytest.raises(ModelLoadError, match=r"names '../evil.bin', which is no shard"):
        convert(source, target)
    assert not marker.exists() and not target.exists()


def rezipped(
    file: Path, *, kind: int = zipfile.ZIP_STORED, twice: str = "", data: bytes = b""
) -> None:
    """Write a file of torch's again: compressed, with two of a name, or another pickle."""
    with zipfile.ZipFile(file) as opened:
        contents = [(entry.filename, opened.read(entry)) for entry in opened.infolist()]
    with zipfile.ZipFile(file, "w", kind) as written:
        for name, content in contents:
            written.writestr(name, data if data and name.endswith("data.pkl") else content)
            if twice and name.endswith(twice):
                written.writestr(name, content)


def saved(held: object) -> Callable[[Path], None]:
    return lambda file: torch.save(held, file)


def made(tensor: Callable[[], Tensor]) -> Callable[[Path], None]:
    """As `saved`, of a tensor that torch warns of."""
    return lambda file: torch.save({"w": tensor()}, file)


def changed(**options: object) -> Callable[[Path], None]:
    def make(file: Path) -> None:
        torch.save({"w": torch.zeros(4096)}, file)
        rezipped(file, **options)  # type: ignore[arg-type]

    return make


def truncated(file: Path) -> None:
    torch.save({"w": torch.zeros(4096)}, file)
    file.write_bytes(file.read_bytes()[:8000])


def lying_about_sizes(file: Path) -> None:
    """A file of the old form whose storage says that it has 8 Gi numbers."""
    torch.save({"w": torch.ones(4)}, file, _use_new_zipfile_serialization=False)
    content = file.read_bytes()
    place = content.index(b"K\x04", content.index(b"cpu"))
    huge = b"\x8a\x05" + (1 << 33).to_bytes(5, "little")
    file.write_bytes(content[:place] + huge + content[place + 2 :])


def linked(file: Path) -> None:
    torch.save({"w": torch.ones(3)}, file.parent.parent / "elsewhere.bin")
    file.symlink_to(file.parent.parent / "elsewhere.bin")


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "strides of 0": (
        saved({"w": torch.ones(16).as_strided((1 << 28,), (0,))}),
        "must have at most 6732 bytes, 4 times its own, got 1073741824",
    ),
    "overlapping rows": (
        saved({"w": torch.ones(20_000).as_strided((10_000, 10_000), (1, 1))}),
        "4 times its own, got 400000000",
    ),
    "many names": (
        saved(dict.fromkeys(map(str, range(5000)), torch.ones(1000))),
        "4 times its own, got 20000000",
    ),
    "compressed": (changed(kind=zipfile.ZIP_DEFLATED), "files in it are compressed"),
    "two pickles": (changed(twice="data.pkl"), "two files in it have one name"),
    "truncated": (truncated, "holds no plain tensors: "),
    "no pickle": (changed(data=b"\xff"), "Unsupported operand 255"),
    "an empty pickle": (changed(data=b"\x80\x02}0."), "Unsupported operand 48"),
    "2 GiB from 1 KiB": (
        changed(data=b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R."),
        "holds no plain tensors: MemoryError",
    ),
    "32 GiB by its own word": (lying_about_sizes, "tried to allocate 34359738368 bytes"),
    "another object": (saved({"w": {"x": torch.ones(3)}}), "'w' is no plain tensor"),
    "sparse": (saved({"w": torch.eye(4).to_sparse()}), "'w' is no plain tensor"),
    "sparse rows": (made(lambda: torch.eye(4).to_sparse_csr()), "'w' is no plain tensor"),
    "quantised": (
        made(lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)),
        "'w' is no plain tensor: qint8 on cpu",
    ),
    "complex": (saved({"w": torch.ones(4, dtype=torch.complex128)}), "complex128 on cpu"),
    "bits": (saved({"w": torch.ones(3, dtype=torch.uint8).view(torch.bits8)}), "bits8 on cpu"),
    "without memory": (saved({"w": torch.empty(1 << 40, device="meta")}), "float32 on meta"),
    "a number as a name": (saved({1: torch.ones(3)}), "a key of type int is no name of a tensor"),
    "half a character": (saved({"\ud800": torch.ones(3)}), r"'\ud800' is no name of a tensor"),
    "lines in a name": (saved({"a\0b\n": torch.ones(3)}), r"'a\x00b\n' is no name of a tensor"),
    "a long name": (saved({"w" * 513: torch.ones(3)}), "w…' is no name of a tensor"),
    "what headers have": (saved({"__metadata__": torch.ones(3)}), "is no name of a tensor"),
    "a link": (linked, "leads out of the model directory"),
    "a directory": (lambda file: file.mkdir(), "has neither pytorch_model.bin nor"),
    "a pipe": (os.mkfifo, "has neither pytorch_model.bin nor"),
}


@pytest.mark.filterwarnings("ignore")
def test_what_is_broken_is_one_line_and_takes_no_more_than_it_has(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for number, (kind, (make, complaint)) in enumerate(BROKEN.items()):
        source = tmp_path / str(number) / "model"
        source.mkdir(parents=True)
        make(source / PICKLED_FILE)
        with unlimited_afterwards():
            code = main([str(source), str(tmp_path / "out")])
        error = capfd.readouterr().err
        assert code == 1 and complaint in error, (kind, error)
        assert error.startswith(f"lightserve: error: {source}") and error.count("\n") == 1, kind
        assert "weights_only` set" not in error and len(error) < 800, kind
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("tmp*"))


@contextlib.contextmanager
def unlimited_afterwards() -> Iterator[None]:
    """Undo the limits that the program sets itself."""
    before, num_threads = resource.getrlimit(resource.RLIMIT_AS), torch.get_num_threads()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        torch.set_num_threads(num_threads)


ONE, TWO = (f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2))


@pytest.mark.parametrize(
    ("weight_map", "contents", "complaint"),
    [
        ({"a": TWO, "b": ONE}, {ONE: "a", TWO: "b"}, "the index names 'b', which is not in it"),
        ({"a": ONE, "b": TWO, "c": TWO}, {ONE: "a", TWO: "b"}, "names 'c', which is not in it"),
        ({"a": ONE, "b": TWO}, {ONE: "ab", TWO: "b"}, "'b' is in another shard as well"),
        ({"a": ONE, "b": TWO}, {ONE: "a"}, f"names '{TWO}', which is no shard beside it"),
        ({"a": "x" * 5000}, {}, "xx…', which is no shard beside it"),
        ({"a": 3}, {}, "key 'weight_map.a' must be a string, got 3"),
        ({}, {}, "key 'weight_map' names no shard"),
        ([], {}, "key 'weight_map' must be an object"),
    ],
)
def test_an_index_that_lies_is_refused(
    tmp_path: Path, weight_map: object, contents: dict[str, str], complaint: str
) -> None:
    source, target = tmp_path / "model", tmp_path / "out"
    source.mkdir()
    (source / PICKLED_INDEX).write_text(json.dumps({"weight_map": weight_map}))
    for file, names in contents.items():
        torch.save({name: torch.ones(2) for name in names}, source / file)
    with pytest.raises(ModelLoadError, match=re.escape(complaint)):
        convert(source, target)
    assert not target.exists()


def test_what_lies_beside_the_weights_is_copied_within_bounds(tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "out"
    source.mkdir()
    torch.save({"w": torch.ones(3)}, source / PICKLED_FILE)
    (source / "evil.json").symlink_to("/etc/passwd")
    with pytest.raises(ModelLoadError, match=r"evil.json: leads out of the model directory"):
        convert(source, target)
    (source / "evil.json").unlink()
    with (source / "huge.json").open("wb") as file:
        file.truncate(MAX_COPIED_BYTES + 1)
    with pytest.raises(ModelLoadError, match=r"at most 268435456 bytes in all, got 268435457"):
        convert(source, target)
    (source / "huge.json").unlink()
    for place, complaint in (
        (source / PICKLED_FILE / "out", "exists"),
        (tmp_path / ("x" * 300), "File name too long"),
        (Path("/proc/out"), "No such file"),
    ):
        with pytest.raises(ModelLoadError, match=complaint):
            convert(source, place)
    target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match="is there already"):
        convert(source, target)


def test_a_reader_that_is_killed_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    result = CliRunner().invoke(command, [str(tmp_path), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert result.output == f"lightserve: error: {tmp_path}: signal 9 ended its reader\n"
