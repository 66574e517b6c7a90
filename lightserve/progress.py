"""How far something slow has come: a bar on a terminal, log lines where there is none.

For what a start does once and takes seconds: weights to the device, CUDA graphs. One process shows
it, rank 0's worker, on standard error beside the log.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from lightserve.logs import prints_text

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0
"""Between two log lines."""
_LABEL_LENGTH = 24

Advance = Callable[[int], None]
"""Takes what has been done since the last call, in the units of the total."""


@contextmanager
def progress(
    label: str, total: int, *, is_shown: bool = True, in_bytes: bool = False
) -> Iterator[Advance]:
    """Show how much of `total` is done, until the block ends.

    Args:
        label: what goes on ("loading weights").
        total: all there is to do, at least 1, in bytes or in pieces.
        is_shown: False on the ranks that do the same as rank 0.
        in_bytes: show GiB and not pieces.

    A bar needs a terminal and a log of text lines, at the level info or below. Otherwise the log
    says when it begins, at most every `LOG_INTERVAL_S` how far it is, and when it has ended.
    """
    if not is_shown or not log.isEnabledFor(logging.INFO):
        yield lambda _: None
        return
    amount = _gib if in_bytes else str
    if sys.stderr.isatty() and prints_text():
        # click's types know no item of a bar that has a length only.
        made: Any = click.progressbar(
            length=total,
            label=label.ljust(_LABEL_LENGTH),
            item_show_func=lambda done: f"{amount(done or 0)} of {amount(total)}",
            file=sys.stderr,
        )
        with made as bar:
            done = 0

            def advance(count: int) -> None:
                nonlocal done
                done += count
                bar.update(count, done)

            yield advance
        return
    lines = _Lines(label, total, amount)
    yield lines.advance
    lines.end()


class _Lines:
    """Progress as lines of a log."""

    def __init__(self, label: str, total: int, amount: Callable[[int], str]) -> None:
        self._label, self._total, self._amount = label, total, amount
        self._done = 0
        self._start_s = self._last_s = time.monotonic()
        log.info("%s: %s", label, amount(total))

    def advance(self, count: int) -> None:
        """Log how far it is, unless that was done lately."""
        self._done += count
        now_s = time.monotonic()
        if now_s - self._last_s >= LOG_INTERVAL_S and self._done < self._total:
            self._last_s = now_s
            done, total = self._amount(self._done), self._amount(self._total)
            log.info("%s: %s of %s", self._label, done, total)

    def end(self) -> None:
        """Log how long it took."""
        log.info("%s: done in %.1f s", self._label, time.monotonic() - self._start_s)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
