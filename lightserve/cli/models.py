"""`lightserve models`: what is cached, and whether it can be served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from lightserve.bundled import BUNDLED_MODEL_DIR, BUNDLED_MODEL_NAME
from lightserve.config import ServeConfig
from lightserve.errors import LightserveError
from lightserve.logs import one_line
from lightserve.models.config import load_model_config
from lightserve.models.gguf_model import WEIGHTS_FILE, unpacked_root
from lightserve.supervisor.startup import check_model


class Cached(NamedTuple):
    """A model on this machine."""

    name: str
    """Value for `lightserve serve --model`; the bundled model is its default."""
    architecture: str
    """Empty: it is not known."""
    num_bytes: int
    problem: str
    """Why it cannot be served; empty: it can."""


@click.command("models")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool) -> None:
    """List the bundled model, those of the hub's cache, and GGUF files that were served.

    Their configuration, and the headers of their weights, are checked as at a start.
    """
    found = [_checked(name, path) for name, path in sorted({*_bundled(), *_of_hub(), *_files()})]
    if as_json:
        click.echo(json.dumps([model._asdict() for model in found], indent=2))
        return
    width = max(len(model.name) for model in found)
    for model in found:
        size = f"{model.num_bytes / 2**30:.2f} GiB"
        state = f"not served: {model.problem}" if model.problem else model.architecture
        click.echo(f"{model.name:<{width}}  {size:>11}  {state}")


def _bundled() -> Iterator[tuple[str, Path]]:
    yield BUNDLED_MODEL_NAME, BUNDLED_MODEL_DIR


def _of_hub() -> Iterator[tuple[str, Path]]:
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir  # noqa: PLC0415 - slow

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repository in repositories:
        newest = max(repository.revisions, key=lambda one: one.last_modified, default=None)
        if repository.repo_type == "model" and newest is not None:
            yield repository.repo_id, newest.snapshot_path


def _files() -> Iterator[tuple[str, Path]]:
    for link in unpacked_root().glob(f"*/{WEIGHTS_FILE}"):
        if link.exists():
            yield str(link.resolve()), link.parent


def _checked(name: str, path: Path) -> Cached:
    num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    architecture = problem = ""
    try:
        architecture = load_model_config(path).architecture.value
        check_model(ServeConfig(model=str(path)))
    except (LightserveError, OSError) as error:
        problem = one_line(error)
    return Cached(name, architecture, num_bytes, problem)
