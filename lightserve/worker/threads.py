"""How many CPU threads a rank computes with: by the model's size at the start, by the machine's
other load while it serves.

Threads wait for each other at the end of every operation, so the slowest sets the pace: where one
shares its core with another process, all have half of theirs. But fewer threads have a smaller
share of a crowded machine. A small model gains little from a second thread, as each of its
operations is over too soon.

With `--num-threads N` nothing is chosen. With `auto`, each rank begins with its share of the cores,
or with fewer threads if its weights are small; between steps, a few times a second, it estimates
from the waits of its own threads, and from idle cores, how many other threads want a core, and goes
on with the number that is fastest beside them: without those that would share a core as long as a
few do, with all of them where most would, and on two cores always. Ranks do so each for itself, in
the belief that the others use as much as they. After a time without requests it begins anew: the
load of that time says nothing about now.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from lightserve.config import ServeConfig
from lightserve.models.config import load_model_config
from lightserve.models.weight_files import expected_tensors
from lightserve.worker.memory import usable_cores

log = logging.getLogger(__name__)

WEIGHTS_PER_THREAD = 8_000_000
"""Parameters that are worth a thread: with fewer, a step of decodes gains about a tenth."""
WINDOW_S = 0.25
"""The load is measured over so long: the system counts idle cores in hundredths of a second."""
REST_S = 0.5
"""A wait for a plan after which a rank begins anew, with all its threads."""
LOG_INTERVAL_S = 60.0
_WAITS = 0.5
"""Threads of others beyond the idle cores that are noise: router, frontends and a client compute in
bursts, which end sooner than a change of this rank's threads pays."""


class CpuTimes(NamedTuple):
    """Readings of clocks that only go forward, in seconds."""

    at_s: float
    busy_s: float
    """Busy time of all processes on the cores that this one may use, and the hypervisor's."""
    idle_s: float
    own_s: float
    """This process's."""
    kept_s: float
    """Time that threads of this process could have run, and had no core."""


@dataclass(frozen=True)
class Cores:
    """The cores of this machine, and the number of ranks that share them."""

    num_allowed: int
    """Cores that this process may run on."""
    num_usable: int
    """Cores that its container may keep busy."""
    num_ranks: int


def read_cpu_times(root: Path = Path("/")) -> CpuTimes:
    """Read the clocks now. Raises OSError, ValueError, IndexError where the system has none."""
    allowed = os.sched_getaffinity(0)
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    busy = idle = 0
    for line in (root / "proc/stat").read_text().splitlines():
        name, _, numbers = line.partition(" ")
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in allowed:
            user, nice, system, idling, iowait, irq, softirq, steal = map(int, numbers.split()[:8])
            busy += user + nice + system + irq + softirq + steal
            idle += idling + iowait
    kept_s = _waiting_s(root / "proc/self/task")
    return CpuTimes(time.monotonic(), busy * tick_s, idle * tick_s, time.process_time(), kept_s)


def _waiting_s(tasks: Path) -> float:
    """Return the time that the remaining threads of a process have waited for a core."""
    total_ns = 0
    for task in tasks.iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            total_ns += int((task / "schedstat").read_text().split()[1])
    return total_ns / 1e9


def cores_had(before: CpuTimes, after: CpuTimes, num_threads: int) -> float | None:
    """Return how many cores so many threads had between two readings; None: they did nothing."""
    ran_s = after.own_s - before.own_s
    kept_s = max(0.0, after.kept_s - before.kept_s)
    return num_threads * ran_s / (ran_s + kept_s) if ran_s > 0 else None


def cores_left(before: CpuTimes, after: CpuTimes, cores: Cores) -> float | None:
    """Return how many cores others left to each rank between two readings; None: unknown."""
    seconds = after.at_s - before.at_s
    busy_s = after.busy_s - before.busy_s
    if seconds <= 0 or busy_s + after.idle_s - before.idle_s <= 0:
        return None
    ranks_s = cores.num_ranks * (after.own_s - before.own_s)
    others = max(0.0, busy_s - ranks_s) / seconds
    return max(0.0, min(cores.num_usable, cores.num_allowed - others)) / cores.num_ranks


def threads_for(num_weights: int, cores: Cores) -> int:
    """Return how many threads a rank with so many parameters takes on a quiet machine."""
    share = cores.num_usable // cores.num_ranks
    return max(1, min(share, num_weights // WEIGHTS_PER_THREAD))


def other_threads(now: int, had: float, left: float, cores: Cores) -> float:
    """Return how many threads of other processes want a core, in the mean.

    The system deals out its cores equally: of C cores, `now` threads of each of R ranks beside
    others have C * now / (R * now + others).

    Args:
        now: threads of this rank.
        had: cores that they had.
        left: cores that others left to this rank.
        cores: the machine's.
    """
    num_free = cores.num_allowed - cores.num_ranks * now
    wanting = now * (cores.num_allowed / had - cores.num_ranks)
    if wanting > num_free + _WAITS:
        return wanting
    # Cores that were busy while this rank slept are not missing.
    return min(num_free, cores.num_allowed - cores.num_ranks * left)


def fastest_threads(most: int, others: float, cores: Cores) -> int:
    """Return the number of threads, at most `most`, that computes fastest beside so many others.

    All go at the pace of the one on the fullest core. So it was on two cores: two threads took 0.9
    to 1.1 of the time of one beside one process that never rests, 0.8 in the mean beside two, and
    0.5 to 0.7 alone (docs/results/engine.md). Of numbers that are equally fast the largest is
    taken, as other processes rest now and then; so two threads never become one.
    """

    def pace(number: int, others: int) -> float:
        return 1.0 / math.ceil((cores.num_ranks * number + others) / cores.num_allowed)

    def speed(number: int) -> float:
        part = others - (fewer := int(others))
        return number * ((1.0 - part) * pace(number, fewer) + part * pace(number, fewer + 1))

    return max(range(1, most + 1), key=lambda number: (speed(number), number))


class Threads:
    """The threads of this rank, adapted between steps."""

    def __init__(
        self,
        most: int,
        cores: Cores,
        *,
        is_logged: bool,
        read: Callable[[], CpuTimes] = read_cpu_times,
        use: Callable[[int], None] = torch.set_num_threads,
        window_s: float = WINDOW_S,
    ) -> None:
        self._most = self._now = most
        self._cores = cores
        self._is_logged = is_logged
        self._read = read
        self._use = use
        self._window_s = window_s
        self._before = most
        """The number that the window before the last one asked for."""
        self._last: CpuTimes | None = None
        self._due_s = 0.0
        self._logged_s = -math.inf

    def adapt(self, now_s: float, waited_s: float) -> None:
        """Take as many threads as there is room for, if it is time to look; call between steps.

        `waited_s`: how long there was nothing to do before.
        """
        if waited_s >= REST_S:
            self._begin_anew()
        if now_s < self._due_s or self._most <= 2:  # two never become one
            return
        try:
            times = self._read()
        except (OSError, ValueError, IndexError):
            self._give_up()
            return
        last, self._last, self._due_s = self._last, times, now_s + self._window_s
        if last is None:
            return
        left, had = cores_left(last, times, self._cores), cores_had(last, times, self._now)
        if left is None or had is None:
            self._give_up()
            return
        others = other_threads(self._now, had, left, self._cores)
        before, self._before = self._before, fastest_threads(self._most, others, self._cores)
        # Two windows in a row have to agree, else a burst of another process is taken for a load.
        wanted = sorted((before, self._before, self._now))[1]
        if wanted != self._now:
            self._tell(wanted, others, now_s)
            self._set(wanted)

    def _begin_anew(self) -> None:
        if self._due_s == math.inf:
            return
        self._last, self._due_s = None, 0.0
        self._set(self._most)

    def _set(self, number: int) -> None:
        self._before = number
        if number != self._now:
            self._now = number
            self._use(number)

    def _tell(self, wanted: int, others: float, now_s: float) -> None:
        """Log a change, at most one a minute where people look."""
        if not self._is_logged:
            return
        is_shown = now_s - self._logged_s >= LOG_INTERVAL_S
        if is_shown:
            self._logged_s = now_s
        log.log(
            logging.INFO if is_shown else logging.DEBUG,
            "threads of other processes that want one of the %d cores: %.1f; CPU threads of each"
            " worker: %d instead of %d",
            *(self._cores.num_allowed, others, wanted, self._now),
        )

    def _give_up(self) -> None:
        self._due_s = math.inf
        if self._is_logged:
            log.warning("the machine's load cannot be read: CPU threads stay at %d", self._now)


class LoadWatch:
    """Time that other processes took of the cores that this rank's threads needed, from now on."""

    def __init__(self, config: ServeConfig, read: Callable[[], CpuTimes] = read_cpu_times) -> None:
        self._cores = _cores(config)
        self._read = read
        self._before = self._now()

    def crowding(self) -> float:
        """Return the share that was missing, 0 where the system does not tell its load."""
        after = self._now()
        if self._before is None or after is None:
            return 0.0
        left = cores_left(self._before, after, self._cores)
        needed = torch.get_num_threads()
        return 0.0 if left is None else max(0.0, 1.0 - left / needed)

    def _now(self) -> CpuTimes | None:
        try:
            return self._read()
        except (OSError, ValueError, IndexError):
            return None


def set_threads(config: ServeConfig) -> None:
    """Give this process the threads that --num-threads says, or those of a quiet machine."""
    torch.set_num_threads(config.num_threads or _at_rest(config, _cores(config)))


def adapted_threads(
    config: ServeConfig, device: torch.device, *, is_first_rank: bool
) -> Threads | None:
    """Return the part that adapts this rank's threads, and log their number; None: they are fixed.

    They are where the option says how many, beside a GPU, and with --batch-invariant: another
    number of threads may add up in another order.
    """
    if is_first_rank and device.type == "cpu":
        log.info("%s", _beginning(config))
    if config.num_threads or config.batch_invariant or device.type != "cpu":
        return None
    return Threads(torch.get_num_threads(), _cores(config), is_logged=is_first_rank)


def _beginning(config: ServeConfig) -> str:
    number, cores = torch.get_num_threads(), _cores(config)
    words = f"CPU threads of each worker: {number}"
    if config.num_threads:
        return f"{words}, by --num-threads"
    if number < cores.num_usable // cores.num_ranks:
        return f"{words}: the model is too small for more of the {cores.num_usable} cores"
    if config.batch_invariant:
        return f"{words}, which --batch-invariant keeps"
    return f"{words}; fewer where that is faster beside other processes" if number > 2 else words


def _at_rest(config: ServeConfig, cores: Cores) -> int:
    model = load_model_config(Path(config.model), has_draft_head=config.has_draft_head)
    shapes = expected_tensors(model).values()
    return threads_for(sum(math.prod(shape) for shape in shapes) // config.tp, cores)


def _cores(config: ServeConfig) -> Cores:
    return Cores(len(os.sched_getaffinity(0)), usable_cores(), len(config.local_ranks))
