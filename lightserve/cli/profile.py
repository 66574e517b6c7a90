"""`lightserve profile`: measures step times for the router to plan with."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from lightserve.cli.options import FiniteRange, config_options
from lightserve.config import ServeConfig
from lightserve.config.fields import Scope, names_of
from lightserve.cost.profile import (
    ProfileJob,
    ProfileNews,
    StepProfile,
    cache_dir,
    cached_path,
    is_worse,
    load_profile,
    save_profile,
    slowness,
)
from lightserve.errors import StartupError
from lightserve.supervisor.startup import resolve_model

FIELDS = names_of(ServeConfig, Scope.PROFILE)
RANK_COMMAND = (sys.executable, "-P", "-m", "lightserve.worker.process")
LAST_WORDS_S = 5.0
"""When another rank has failed, rank 0 may go on this long."""
_BAR_LENGTH = 1000


@click.command("profile")
@config_options(ServeConfig, FIELDS)
@click.option(
    "--seconds",
    type=FiniteRange(1.0, 3600.0),
    default=60.0,
    show_default=True,
    help="Time to measure.",
)
@click.option(
    "--profile-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of profiles. Default: lightserve/profiles in XDG_CACHE_HOME or ~/.cache.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write instead of the cache, for lightserve serve --profile.",
)
@click.option(
    "--replace",
    is_flag=True,
    help="Keep the new measurements even if the cached profile has faster steps.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON.")
def command(
    seconds: float,
    profile_dir: Path | None,
    output: Path | None,
    replace: bool,
    as_json: bool,
    **values: Any,
) -> int:
    """Measure how long steps take on this machine, and keep it for the server.

    The model runs in processes of its own, without a server; run it on an idle machine.
    Measurements that other work disturbed are kept only with --output. If the cached profile has
    faster steps, the new one is kept only with --replace.
    """
    config = resolve_model(ServeConfig(**values))
    directory = output.parent if output else profile_dir or cache_dir()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # before the time is spent
        raise StartupError(
            f"profiles cannot be written to {directory}: {error.strerror}"
        ) from error
    with click.progressbar(length=_BAR_LENGTH, label="profiling", file=sys.stderr) as bar:
        profile = measure(config, seconds, lambda share: _advance(bar, share))
    noise = profile.noise
    if noise and output is None:
        raise StartupError(f"{noise}; nothing was written (--output FILE keeps it anyway)")
    path = output or cached_path(profile.key, profile_dir)
    kept = None if output or replace else _better_cached(profile, path)
    if kept is None:
        _save(profile, path)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(profile)).decode())
    else:
        click.echo(table(profile))
    if noise:
        click.echo(f"lightserve: warning: {noise}", err=True)
    if kept is None:
        click.echo(f"written to {path}", err=True)
    else:
        click.echo(
            f"not written: steps take {slowness(profile, kept):.2f} times as long as in {path},"
            " which is kept: other work never makes steps faster. If this machine is slower than it"
            " was: --replace",
            err=True,
        )
    return 0


def _better_cached(profile: StepProfile, path: Path) -> StepProfile | None:
    """Return the cached profile if it is the better one."""
    cached = load_profile(path, profile.key)
    return cached if cached is not None and is_worse(profile, cached) else None


def _save(profile: StepProfile, path: Path) -> None:
    try:
        save_profile(profile, path)
    except OSError as error:
        raise StartupError(f"the profile cannot be written to {path}: {error}") from error


def _advance(bar: Any, share: float) -> None:
    bar.update(round(_BAR_LENGTH * share) - bar.pos)


def measure(config: ServeConfig, seconds: float, progress: Any) -> StepProfile:
    """Run the ranks to their end and return the profile.

    Raises:
        StartupError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(_rank(ProfileJob(config, rank, f"{directory}/store", seconds)))
            for rank in range(config.tp)
        ]
        error = ""
        for line in _lines(ranks):
            news = msgspec.json.decode(line, type=ProfileNews)
            if news.profile is not None:
                return news.profile
            error = error or news.error
            progress(news.share)
        raise StartupError(error or "a worker ended without a profile")


def _lines(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[bytes]:
    """Yield what rank 0 writes, and the words of another that fails, shortly after which it ends.

    Nothing may wait for a dead rank: on GPUs its peers would, for ever.
    """
    assert ranks[0].stdout is not None
    output, rest, deadline_s = ranks[0].stdout.fileno(), b"", float("inf")
    with contextlib.ExitStack() as stack:
        others = {_pidfd(rank, stack): rank for rank in ranks[1:]}
        while (left_s := deadline_s - time.monotonic()) > 0:
            timeout_s = None if left_s == float("inf") else left_s
            ready, _, _ = select.select([output, *others], [], [], timeout_s)
            if output in ready:
                if not (data := os.read(output, 65536)):
                    return
                *lines, rest = (rest + data).split(b"\n")
                yield from lines
            for fd in set(ready) & set(others):
                rank = others.pop(fd)
                if rank.wait():
                    assert rank.stdout is not None
                    yield from rank.stdout.read().splitlines()
                    # Rank 0 perhaps knows more.
                    deadline_s = time.monotonic() + LAST_WORDS_S


def _pidfd(process: subprocess.Popen[bytes], stack: contextlib.ExitStack) -> int:
    """Return a descriptor that is readable once the process has ended."""
    fd = os.pidfd_open(process.pid)
    stack.callback(os.close, fd)
    return fd


@contextlib.contextmanager
def _rank(job: ProfileJob) -> Iterator[subprocess.Popen[bytes]]:
    """Start a rank; it is killed if it still runs at the end."""
    # torch's allocator asks for huge pages, as in the server's workers.
    environment = {"THP_MEM_ALLOC_ENABLE": "1", **os.environ}
    process = subprocess.Popen(
        RANK_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(msgspec.json.encode(job))
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def table(profile: StepProfile) -> str:
    """Return the profile for people."""
    key, c = profile.key, profile.coefficients
    rows = [
        ("model", profile.model),
        ("type, kernels", f"{key.dtype}, {key.kernels}"),
        ("device", f"{key.device}, TP {key.tp}, CPU threads: {key.num_threads}"),
        ("shapes measured", f"{profile.num_samples}"),
        ("other processes", f"{profile.crowding:.0%} of the cores measured"),
        ("error, not fitted", f"{profile.median_error:.1%} median, {profile.p95_error:.1%} p95"),
        ("floor", f"{1e3 * c.floor_s:.3f} ms"),
        ("pivot", f"{c.knee:.0f} new tokens"),
        ("new token beyond it", f"{1e6 * c.per_new_s:.2f} us"),
        ("row that decodes", f"{1e6 * c.per_decode_s:.2f} us"),
        ("row of a prompt", f"{1e6 * c.per_chunk_s:.2f} us"),
        ("1000 tokens of context of decodes", f"{1e9 * c.per_decode_context_s:.2f} us"),
        ("1000 tokens of context of prompts", f"{1e9 * c.per_chunk_context_s:.2f} us"),
        ("1000 pairs of a prompt", f"{1e9 * c.per_chunk_pair_s:.2f} us"),
        ("1000 tokens to the host", f"{1e6 * c.per_saved_token_s:.2f} ms"),
        ("1000 tokens back", f"{1e6 * c.per_loaded_token_s:.2f} ms"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
