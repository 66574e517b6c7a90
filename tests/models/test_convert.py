"""`lightserve convert`: what pickles hold becomes safetensors; what is no tensor never runs."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_models import TinyModel, write_tiny_model
from torch import Tensor

from lightserve.errors import ModelLoadError
from lightserve.models.config import load_model_config
from lightserve.models.pickled_weights import convert
from lightserve.models.weight_files import INDEX_FILE, SINGLE_FILE, check_weights


def write_pickled(path: Path, *, num_shards: int = 1, **options: object) -> dict[str, Tensor]:
    write_tiny_model(TinyModel("", "Llama"), path)
    tensors = load_file(path / SINGLE_FILE)
    (path / SINGLE_FILE).unlink()
    names = sorted(tensors)
    if num_shards == 1:
        torch.save(tensors, path / "pytorch_model.bin", **options)
        return tensors
    weight_map = {}
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
