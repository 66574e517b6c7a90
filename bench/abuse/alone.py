"""Attacks on parts that need no server: what a model brings, what a subscriber leaves unread.

Each is done by a process of its own, whose memory is measured: this module, by the name of a
function. Its standard output is what it found, its last line.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.abuse.arena import Arena, Attack, Outcome

MiB = 2**20
PATIENCE_S = 120.0
_PEAK = re.compile(r"VmHWM:\s+(\d+) kB")


class Ended(NamedTuple):
    """A program that has ended."""

    exit_code: int
    output: str
    error: str
    peak_mib: float
    seconds: float


def _peaks_mib(pid: int) -> Iterator[float]:
    """Yield the most that a process has taken, and each that it has started."""
    yield 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            # Not what `wait4` says: that counts what this process had when it started the other.
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                if match := _PEAK.search(status):
                    yield int(match[1]) / 1024


def _run(*command: str) -> Ended:
    """Run a program of this project to its end, for `PATIENCE_S` at most."""
    start_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as error:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], stdin=subprocess.DEVNULL, stdout=output, stderr=error
        )
        peak_mib = 0.0
        while process.poll() is None:
            peak_mib = max(peak_mib, *_peaks_mib(process.pid))
            if time.monotonic() > start_s + PATIENCE_S:
                process.kill()
            time.sleep(0.01)
        for file in (output, error):
            file.seek(0)
        seconds = time.monotonic() - start_s
        return Ended(process.returncode, output.read(), error.read(), peak_mib, seconds)


TEMPLATE = "{% macro f(x) %}{% set y = x + 'a' %}{{ f(y) }}{% endmacro %}{{ f('x' * 990000) }}"
"""Each call of the macro keeps a megabyte."""
MAX_TEMPLATE_MIB = 400


def render_template() -> None:
    """Render it, and say why that ended."""
    from lightserve.errors import LightserveError  # noqa: PLC0415 - for the child alone
    from lightserve.tokenization.chat_template import (  # noqa: PLC0415
        ChatTemplate,
        TemplateSource,
    )
    from lightserve.tokenization.conversation import ChatMessage, Conversation  # noqa: PLC0415

    try:
        template = ChatTemplate(TemplateSource(TEMPLATE, "template"), special_tokens={})
        template.render(Conversation(messages=[ChatMessage("user", "Hello")]))
    except LightserveError as error:
        print(f"refused: {error}"[:160])
    else:
        print("rendered")


def large_template(_: Arena) -> Outcome:
    """Have a short chat template rendered that keeps a gigabyte of slices."""
    ended = _run("bench.abuse.alone", "render_template")
    found = (ended.output.splitlines() or ended.error.splitlines() or [""])[-1]
    is_met = found.startswith("refused") and ended.peak_mib <= MAX_TEMPLATE_MIB
    return Outcome(f"{found}; {ended.peak_mib:.0f} MiB, {ended.seconds:.1f} s", met=is_met)


STOPPED = (
    "import sys, zmq; s = zmq.Context().socket(zmq.SUB); s.subscribe(b'');"
    "s.connect(sys.argv[1]); s.recv(); print('here', flush=True); s.recv(); input()"
)
"""A subscriber that says when it is there."""
NUM_MESSAGES = 10_000
MAX_UNREAD_MIB = 160


def publish_to_stopped() -> None:
    """Publish long events to a subscriber that is stopped; say how much this process grew."""
    import select  # noqa: PLC0415 - for the child alone

    from lightserve.router.kv.block_events import AllBlocksCleared, BlockRemoved  # noqa: PLC0415
    from lightserve.router.kv_publisher import KVPublisher  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as name:
        address = f"ipc://{name}/events"
        publisher = KVPublisher(address)
        subscriber = subprocess.Popen(
            [sys.executable, "-c", STOPPED, address], stdout=subprocess.PIPE, stdin=subprocess.PIPE
        )
        try:
            assert subscriber.stdout is not None
            while not select.select([subscriber.stdout], [], [], 0.02)[0]:
                publisher.publish([AllBlocksCleared()], now_s=1.0)
            subscriber.send_signal(signal.SIGSTOP)
            event = BlockRemoved(block_hashes=[2**63] * 8000, medium="GPU")
            before = psutil.Process().memory_info().rss
            for _ in range(NUM_MESSAGES):
                publisher.publish([event], now_s=1.0)
            print((psutil.Process().memory_info().rss - before) / MiB)
        finally:
            subscriber.kill()
            subscriber.wait()
            publisher.close()


def stopped_subscriber(_: Arena) -> Outcome:
    """Stop a subscriber of KV events, and go on with them."""
    ended = _run("bench.abuse.alone", "publish_to_stopped")
    if ended.exit_code:
        return Outcome(f"failed: {(ended.error.splitlines() or [''])[-1]}", met=False)
    grown = float(ended.output)
    figures = f"publisher +{grown:.0f} MiB after {NUM_MESSAGES:,} steps of 8,000 blocks"
    return Outcome(figures, met=grown <= MAX_UNREAD_MIB)


MAX_CONVERT_MIB = 1024
"""Torch alone takes some 400."""


def write_pickle() -> None:
    """Write a file of 1.6 KB that says it has a tensor of 1 GiB, into the directory named next."""
    import torch  # noqa: PLC0415 - for the child alone

    held = {"w": torch.ones(16).as_strided((1 << 28,), (0,))}
    torch.save(held, Path(sys.argv[2]) / "pytorch_model.bin")


def small_pickle(_: Arena) -> Outcome:
    """Convert a small file that stands for a large tensor."""
    with tempfile.TemporaryDirectory() as name:
        source, target = Path(name) / "model", Path(name) / "out"
        source.mkdir()
        _run("bench.abuse.alone", "write_pickle", str(source))
        size = (source / "pytorch_model.bin").stat().st_size
        ended = _run("lightserve.cli.main", "convert", str(source), str(target))
        written = sum(file.stat().st_size for file in target.glob("*"))
    num_lines = len(ended.error.splitlines())
    figures = (
        f"{size} bytes: exit code {ended.exit_code}, {num_lines} lines of error,"
        f" {written / MiB:.0f} MiB written, {ended.peak_mib:.0f} MiB of memory"
    )
    is_met = (ended.exit_code, num_lines, written) == (1, 1, 0)
    return Outcome(figures, met=is_met and ended.peak_mib <= MAX_CONVERT_MIB)


ALONE: Sequence[Attack] = [
    Attack(
        f"a chat template of {len(TEMPLATE)} bytes that keeps 1 GB",
        large_template,
        before="1 GB, 28 s",
        bound=f"refused; {MAX_TEMPLATE_MIB} MiB",
        has_victim=False,
    ),
    Attack(
        "a subscriber of KV events that is stopped",
        stopped_subscriber,
        before="10,000 messages: 0.5 to 4 GB",
        bound=f"+{MAX_UNREAD_MIB} MiB",
        has_victim=False,
    ),
    Attack(
        "convert of a 1.6 KB file that stands for 1 GiB",
        small_pickle,
        before="1 GiB written; other broken files three tracebacks",
        bound=f"exit code 1, one line, nothing written, {MAX_CONVERT_MIB} MiB",
        has_victim=False,
    ),
]

if __name__ == "__main__":
    {each.__name__: each for each in (render_template, publish_to_stopped, write_pickle)}[
        sys.argv[1]
    ]()
