"""The best setting of a baseline, by coordinates: budget, best-effort requests, admission, order.

A whole grid (4 x 3 x 2 x 2, per baseline, rate and seed) is out of reach; of it the search sees
eight settings: four budgets, three limits of best-effort requests at the best of them, both
admission rules at the best of those, and of these both orders of best-effort requests. One seed;
where load is heavy, shorter runs than those of the tables.
(Where it is light, requests take the longer the more best-effort work is done beside them, and
those that are unfinished when a short run ends would count as misses.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.scheduling.hybrid_cells import Cell, Figures, Runner, Setting

BASELINES = ("fcfs", "chunked", "round-robin", "mlfq", "priority", "sjf")
BUDGETS = (256, 512, 1024, 2048)
MAX_BE = (16, 64, 256)
ADMISSIONS = ("risk", "aggressive 0.95")
ORDERS = ("auto", "sharing")
"""That of these policies is by arrival unless told otherwise."""
TUNING_S, TUNING_MARGIN_S = 50.0, 15.0
BLIND_RPS = 24.0
LIGHT_RPS = 16.0
"""Up to this rate a setting is judged by a run as long as those of the tables."""
ATTAINED_PCT = 99.0

Score = Callable[[Figures], tuple[float, ...]]


def by_goodput(figures: Figures) -> tuple[float, ...]:
    """T7: most real-time requests that met their targets; between equals, the lower latency."""
    return figures.goodput, -figures.latency_ms


def by_best_effort(figures: Figures) -> tuple[float, ...]:
    """T9, T10: most best-effort work where 99 % is attained, else at the highest attainment."""
    attained = min(figures.ttft_pct, figures.mtpot_pct)
    return min(attained, ATTAINED_PCT), figures.be_rps


@dataclass(frozen=True)
class Load:
    """Where a setting is tuned."""

    rate: float
    capacity_tokens: int = 60_000


def tuned(runner: Runner, policy: str, load: Load, score: Score) -> Setting:
    """Return the best setting that the search sees."""
    # Class-blind policies serve real-time best with little beside it, priority anyhow.
    best = Setting(policy, max_be=64 if policy in ("priority", "sjf") else 16)
    best = _best(runner, [best._replace(budget=value) for value in BUDGETS], load, score)
    best = _best(runner, [best._replace(max_be=value) for value in MAX_BE], load, score)
    best = _best(runner, [best._replace(admission=rule) for rule in ADMISSIONS], load, score)
    return _best(runner, [best._replace(be_order=order) for order in ORDERS], load, score)


def tuned_for_goodput(runner: Runner, policy: str, load: Load) -> Setting:
    """Return the setting of T7; that of class-blind policies is sought at 24/s alone.

    Each of them is far below `priority` beyond, and at 16/s `unified` leaves nothing to gain.
    """
    sought = load if policy in ("priority", "sjf") else Load(BLIND_RPS, load.capacity_tokens)
    return tuned(runner, policy, sought, by_goodput)


def _best(runner: Runner, settings: Sequence[Setting], load: Load, score: Score) -> Setting:
    scores = [score(figures) for figures in runner.play([trial(s, load) for s in settings])]
    return settings[max(range(len(settings)), key=scores.__getitem__)]


def trial(setting: Setting, load: Load) -> Cell:
    """Return the run by which a setting is judged."""
    if load.rate <= LIGHT_RPS:
        return Cell(setting, load.rate, 0, capacity_tokens=load.capacity_tokens)
    return Cell(setting, load.rate, 0, TUNING_S, TUNING_MARGIN_S, load.capacity_tokens)
