"""Attacks that a server has to stand: hostile clients, clients that leave, crowds, floods.

    python -m bench.abuse                 every attack, and one table
    python -m bench.abuse memory 'step'   attacks whose subject or name has one of these words
    python -m bench.abuse storm crowd overload
    python -m bench.abuse all             attacks, then those three parts
    python -m bench.abuse --list

Attacks are tried on live servers with the bundled model; abuse/arena.py says how one is
written. A part starts servers of its own and prints its own figures. Ends with
code 1 if a bound was missed.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.abuse import connections, constraints, files, overload, requests, shares
from bench.abuse.arena import (
    GRAMMARS,
    Arena,
    Attack,
    Outcome,
    Seen,
    Setup,
    percentile,
    raise_file_limit,
    running_arena,
)
from bench.table import print_head, print_row

SUBJECTS: Mapping[str, Sequence[Attack]] = {
    "calm": requests.CALM,
    "answers": requests.ANSWERS,
    "constraints": constraints.CONSTRAINTS,
    "doors": connections.DOORS,
    "memory": requests.MEMORY,
    "batches": files.FILES,
    "prefixes": requests.PREFIXES,
    "router_load": requests.ROUTER_LOAD,
    "shares": shares.SHARES,
}
"""What there is without an attack comes first."""
PARTS: Mapping[str, Callable[[], bool]] = {
    "storm": connections.storm,
    "crowd": connections.crowd,
    "overload": overload.overload,
}
MAX_TURN_S = 0.1
MAX_LIVEZ_MS = 100.0
LOOPS = ("frontend", "router")
SHOWN_MEMORY = ("frontend", "router", "worker", "batches", GRAMMARS)


@dataclass
class Row:
    """What one attack came to."""

    attack: Attack
    outcome: Outcome
    seen: Seen
    num_restarts: int
    num_tracebacks: int
    turns_s: dict[tuple[str, str], float]
    """The server's longest turn so far, by role and clock."""
    is_alive: bool
    seconds: float

    @property
    def met(self) -> bool:
        """Whether the bound was kept, and the server with it."""
        is_calm = self.attack.may_restart or not (self.num_restarts or self.num_tracebacks)
        return self.outcome.met and self.is_alive and is_calm

    @property
    def figures(self) -> str:
        """The attack's own, and what else went wrong."""
        wrong = [] if self.is_alive else ["SERVER GONE"]
        if self.num_restarts:
            wrong.append(f"{self.num_restarts} restarts")
        if self.num_tracebacks:
            wrong.append(f"{self.num_tracebacks} tracebacks")
        return "; ".join([self.outcome.figures, *wrong])


def run_attack(arena: Arena, attack: Attack) -> Row:
    """Try one; never raises for what the server does."""
    arena.watcher.set_victim(attack.has_victim)
    time.sleep(1.0)
    pids = arena.pids()
    arena.begin()
    start_s = time.monotonic()
    try:
        outcome = attack.run(arena)
    except Exception as error:
        outcome = Outcome(f"the attack failed: {type(error).__name__}: {error}", met=False)
    is_alive = arena.settle()
    seen = arena.seen()
    turns_s = arena.worst_turns_s() if is_alive else {}
    now = arena.pids() if arena.is_alive else {}
    num_restarts = sum(now.get(name) != pid for name, pid in pids.items()) if now else 0
    num_tracebacks = arena.log().count("Traceback (most recent call last)")
    seconds = time.monotonic() - start_s
    return Row(attack, outcome, seen, num_restarts, num_tracebacks, turns_s, is_alive, seconds)


def run_attacks(attacks: Iterable[Attack]) -> list[Row]:
    """Try all, on one server per setup; a server that has died is replaced for the next."""
    by_setup: dict[Setup, list[Attack]] = {}
    for attack in attacks:
        by_setup.setdefault(attack.setup, []).append(attack)
    rows: list[Row] = []
    for setup, group in by_setup.items():
        left = list(group)
        while left:
            num_before = len(left)
            try:
                with running_arena(setup) as arena:
                    while left and arena.is_alive:
                        rows.append(run_attack(arena, left.pop(0)))
                        _say(rows[-1])
                        if not rows[-1].is_alive:
                            break
            except (OSError, SystemExit, subprocess.TimeoutExpired) as error:
                attack = left.pop(0) if len(left) == num_before else group[-len(left) - 1]
                outcome = Outcome(f"no orderly start or end: {error}", met=False)
                rows.append(Row(attack, outcome, Seen(), 0, 0, {}, False, 0.0))
                _say(rows[-1])
    return rows


def _say(row: Row) -> None:
    verdict = "met" if row.met else "MISSED"
    print(f"{verdict:7}{row.attack.name}: {row.figures} ({row.seconds:.0f} s)", flush=True)


def print_tables(rows: Sequence[Row]) -> bool:
    """Print the table of attacks and what others noticed; return whether all bounds were kept."""
    _print_table(
        ("attack", "before", "now", "bound", "met"),
        [
            (r.attack.name, r.attack.before, r.figures, r.attack.bound, "yes" if r.met else "NO")
            for r in rows
        ],
    )
    print("\nMeanwhile: /livez of an uninvolved client and gaps of a stream (ms, p99 / worst),")
    print("resident memory (MiB, before / most / after), longest turns of the loops up to then")
    print("(ms, the thread's CPU time / wall time).\n")
    _print_table(
        ("attack", "s", "/livez", "gaps", *SHOWN_MEMORY, *(f"{role}'s turn" for role in LOOPS)),
        [
            (
                row.attack.name,
                f"{row.seconds:.0f}",
                _times(row.seen.livez_ms, row.seen.num_livez_failed),
                _times(row.seen.gaps_ms, row.seen.num_broken_streams),
                *(_memory(row.seen, role) for role in SHOWN_MEMORY),
                *(_turn(row, role) for role in LOOPS),
            )
            for row in rows
        ],
    )
    return _print_whole_run(rows) and all(row.met for row in rows)


def _print_whole_run(rows: Sequence[Row]) -> bool:
    idle_ms = [ms for row in rows if not row.attack.has_victim for ms in row.seen.livez_ms]
    p99_ms = percentile(idle_ms, 0.99)
    idle = f"{p99_ms:.1f} ms" if idle_ms else "not measured"
    lines = [("/livez p99, worker idle", idle, f"<= {MAX_LIVEZ_MS:.0f} ms")]
    is_good = not idle_ms or p99_ms <= MAX_LIVEZ_MS
    for role in LOOPS:
        worst = {
            clock: max((row.turns_s.get((role, clock), 0.0) for row in rows), default=0.0)
            for clock in ("cpu", "wall")
        }
        is_good = is_good and worst["cpu"] <= MAX_TURN_S
        figures = f"{worst['cpu'] * 1e3:.1f} ms CPU, {worst['wall'] * 1e3:.1f} ms wall"
        lines.append((f"longest turn of a {role}'s loop", figures, "<= 100 ms CPU"))
    print()
    _print_table(("whole run", "measured", "bound"), lines)
    return is_good


def _times(times_ms: Sequence[float], num_failed: int) -> str:
    if not times_ms:
        return f"{num_failed} failed" if num_failed else "-"
    shown = f"{percentile(times_ms, 0.99):.0f} / {max(times_ms):.0f}"
    return f"{shown}, {num_failed} failed" if num_failed else shown


def _memory(seen: Seen, role: str) -> str:
    if not any(name.startswith(role) for name in seen.peak_mib):
        return "-"
    moments = [
        sum(mib for name, mib in at.items() if name.startswith(role))
        for at in (seen.first_mib, seen.peak_mib, seen.last_mib)
    ]
    return " / ".join(f"{mib:.0f}" for mib in moments)


def _turn(row: Row, role: str) -> str:
    clocks = [row.turns_s.get((role, clock)) for clock in ("cpu", "wall")]
    return " / ".join("?" if s is None else f"{s * 1e3:.0f}" for s in clocks)


def _print_table(names: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    print_head(*names)
    for line in lines:
        print_row(*line)


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", help="parts, or words of attacks; all attacks if none")
    parser.add_argument("--list", action="store_true", help="print what there is, and stop")
    args = parser.parse_args()
    raise_file_limit()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end, and files go, on the way
    if args.list:
        for subject, attacks in SUBJECTS.items():
            for attack in attacks:
                print(f"{subject:16} {attack.name}")
        print("parts:", *PARTS)
        return 0
    everything = "all" in args.what
    parts = [name for name in PARTS if everything or name in args.what]
    words = [word for word in args.what if word not in PARTS and word != "all"]
    chosen = [
        attack
        for subject, attacks in SUBJECTS.items()
        for attack in attacks
        if everything or not args.what or any(w == subject or w in attack.name for w in words)
    ]
    if words and not chosen:
        parser.error(f"no attack has any of these words: {' '.join(words)} (see --list)")
    is_good = print_tables(run_attacks(chosen)) if chosen else True
    missed = []
    for name in parts:
        start_s = time.monotonic()
        if not PARTS[name]():
            missed.append(name)
        print(f"  ({time.monotonic() - start_s:.0f} s)\n", flush=True)
    if missed:
        print("targets missed: " + ", ".join(missed), file=sys.stderr)
    return 0 if is_good and not missed else 1


if __name__ == "__main__":
    sys.exit(main())
