"""`why`, `whatif` and `plan` beside live servers.

    python -m bench.serving.explained why            # 50 late requests of two loads
    python -m bench.serving.explained whatif         # told beside really run, each way
    python -m bench.serving.explained plan           # the answer run live

`why`: a server with the bundled model is given more than it can do, once of computing and once of
memory, and keeps its decision log. Of 50 late requests each has a constraint that `lightserve why`
names; the log's traffic is simulated again without that constraint, and it counts whether the
request is in time then. What stands for "without" is in `REMOVALS`. Beside it: how many are in time
with nothing removed (the simulation is not the server), and with the others removed.

Counts and shares; only the load depends on how fast the machine is.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.serving.server import load_average, running_server
from lightserve.decisions.records import RequestName
from lightserve.decisions.replaying import DecisionLogReader
from lightserve.decisions.why import explain_all
from lightserve.sim.capacity import PlanConfig, make_plan, read_rows
from lightserve.sim.report import Seen, Targets, is_in_time
from lightserve.sim.whatif import Recording, Settings, read_recording
from lightserve.types import RequestClass, RequestKey

RT, BE = RequestClass.RT, RequestClass.BE
NUM_LATE = 50
MORE = 4
"""Times as much of what held a request up."""
COMPUTES = "computes"
REMOVALS: Mapping[str, Settings] = {
    # No step takes long enough to be over a limit, and its own computation takes less.
    "time": Settings(speed=MORE),
    COMPUTES: Settings(speed=MORE),
    # A budget is what a machine can do in the time of a step: with more of it on the same one,
    # steps would be too long.
    "tokens": Settings(speed=MORE),
    "rows": Settings(),  # as many as there are tokens in a step, which the recording knows
    "kv_now": Settings(),  # with MORE times the pool, which the recording knows
    "kv_future": Settings(),
    "loading": Settings(),
}
"""`order` is removed request by request: it is the first of its class; what follows from the rules
of a request alone (`blocked`, `bytes`) cannot be removed."""
POOL = ("kv_now", "kv_future", "loading")


class Load(NamedTuple):
    """What a server is given."""

    name: str
    flags: tuple[str, ...]
    """Of the server."""
    arguments: tuple[str, ...]
    """Of `lightserve bench`."""


BE_LOAD = "concurrency=24 prompt-tokens=32:256 output-tokens=60:160"


def loads(rate: float, duration_s: float) -> tuple[Load, Load]:
    """Return too much to compute, and too much to remember."""
    targets = ("--targets", "ttft=250ms,mtpot=150ms", "--send-targets")
    lasts = ("--duration-s", f"{duration_s:g}", "--seed", "1", "--force-lengths")
    short = ("--prompt-tokens", "32:256", "--output-tokens", "20:120")
    rate_of = ("--rate", f"{rate:g}")
    return (
        Load("computing", (), (*rate_of, *short, *lasts, *targets, "--be", BE_LOAD)),
        Load(
            "memory",
            ("--max-kv-tokens", "3000"),
            ("--rate", f"{rate / 2:g}", *short, *lasts, *targets, "--be", BE_LOAD),
        ),
    )


def record(load: Load, path: Path, flags: tuple[str, ...] = ()) -> None:
    """Run a server under a load, and keep its decisions."""
    logged = ("--decision-log", str(path), "--log-level", "warning", *load.flags, *flags)
    with running_server(logged) as server:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "lightserve",
                "bench",
                "--url",
                server.url,
                "--quiet",
                *list(load.arguments),
            ],
            check=True,
        )


# ------------------------------------------------------------------------------------ why


def why_late(load: Load, path: Path, num_wanted: int) -> Counter[str]:
    """Print and return what became of late requests without what had held them up."""
    recording = read_recording(DecisionLogReader(path))
    late = [
        key
        for key, seen in recording.clients().seen.items()
        if not is_in_time(seen) and seen.is_finished
    ]
    chosen = late[:: max(1, len(late) // num_wanted)][:num_wanted]
    names = [RequestName(*key) for key in chosen]
    found = dict(zip(chosen, explain_all(DecisionLogReader(path), names), strict=True))
    same = recording.simulate(Settings()).seen
    without = _Without(recording)
    counts = Counter[str](late=len(late), asked=len(chosen))
    for key, why in found.items():
        constraint = why.constraint or COMPUTES
        counts[f"named {constraint}"] += 1
        if constraint not in REMOVALS and constraint != "order":
            counts["cannot be removed"] += 1
            continue
        with_it = _is_in_time(same, key)
        seen = _first(recording, key) if constraint == "order" else without[constraint]
        is_good = _is_in_time(seen, key)
        counts["in time without it"] += is_good
        counts[f"in time without {constraint}"] += is_good
        counts["in time with nothing removed"] += with_it
        if not with_it:
            counts["late in the replay too"] += 1
            counts["late in the replay, in time without it"] += is_good
            # Those of the machine, of memory and of rows stand for all that are removed alike.
            alike = [("time", "tokens", COMPUTES), POOL, ("rows",)]
            others = [each[0] for each in alike if constraint not in each]
            for other in others:
                counts["others removed"] += 1
                counts["others removed, in time"] += _is_in_time(without[other], key)
    print(f"{load.name}:")
    for what, count in counts.items():
        print(f"    {what:42} {count}")
    return counts


class _Without(dict[str, Mapping[RequestKey, Seen]]):
    """What clients would have seen without a constraint, simulated once."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def __missing__(self, what: str) -> Mapping[RequestKey, Seen]:
        settings, workers = REMOVALS[what], self._recording.workers
        if what in POOL:
            settings = settings._replace(max_kv_tokens=MORE * workers.num_kv_slots)
        config = self._recording.config
        budget = workers.max_num_batched_tokens or int(config["max_num_batched_tokens"])
        if what == "tokens":
            settings = settings._replace(options={"max_num_batched_tokens": MORE * budget})
        if what == "rows":
            rows = max(budget, int(config["max_num_seqs"]))
            settings = settings._replace(options={"max_num_seqs": rows})
        self[what] = self._recording.simulate(settings).seen
        return self[what]


def _first(recording: Recording, key: RequestKey) -> Mapping[RequestKey, Seen]:
    """Return what clients would have seen had this been the first of its class."""
    asked = recording.requests[key]
    submit = msgspec.structs.replace(asked.submit, priority=-1000)
    recording.requests[key] = dataclasses.replace(asked, submit=submit)
    try:
        return recording.simulate(Settings()).seen
    finally:
        recording.requests[key] = asked


def _is_in_time(seen: Mapping[RequestKey, Seen], key: RequestKey) -> bool:
    return key in seen and is_in_time(seen[key])


# --------------------------------------------------------------------------------- whatif


def told_and_run(load: Load, folder: Path) -> None:
    """Print attainment and goodput per class as told and as run, each policy from the other.

    Each policy is run twice, in turns: what the same server with the same load differs by is what
    nothing could tell.
    """
    recordings: dict[str, list[Recording]] = {"unified": [], "chunked": []}
    for repeat in range(2):
        for policy, of_policy in recordings.items():
            path = folder / f"{load.name}-{policy}-{repeat}.jsonl"
            record(load, path, ("--policy", policy))
            of_policy.append(read_recording(DecisionLogReader(path)))
    for policy, other in (("unified", "chunked"), ("chunked", "unified")):
        recording, again = recordings[policy]
        columns = {
            f"{policy} recorded": recording.report(),
            f"{policy} same settings (2 points)": recording.run(Settings()),
            f"{policy} really run again": again.report(),
            f"{other} told (5 points)": recording.run(Settings({"policy": other})),
            f"{other} really run": recordings[other][0].report(),
            f"{other} really run again": recordings[other][1].report(),
        }
        for name, outcome in columns.items():
            figures = [
                f"{of.value} {outcome.attainment_pct(of):5.1f} %"
                f" {outcome.classes[of].goodput_rps:6.2f}/s of {outcome.classes[of].arrivals}"
                for of in (RT, BE)
                if outcome.classes[of].arrivals
            ]
            print(f"{load.name:10} {name:34} {'; '.join(figures)}")


# ----------------------------------------------------------------------------------- plan


def planned_and_run(load: Load, folder: Path, attainment: float) -> None:
    """Plan for a recorded load, and run one of the replicas on its share of the requests."""
    path = folder / "plan.jsonl"
    record(load, path)
    rows, hardware = read_rows(path)
    assert hardware is not None
    targets = Targets(ttft_s=0.25, mtpot_s=0.15)
    config = PlanConfig(
        rows=rows,
        attainment=attainment,
        targets=targets,
        max_kv_tokens=20_000,
        window_s=60.0,
        hardware=hardware,
    )
    plan = make_plan(config)
    print(
        f"planned: {plan.num_replicas} replicas of {plan.kv_tokens} tokens,"
        f" {100 * plan.attainment:.1f} % in time (wanted {100 * attainment:g} %)"
    )
    share = folder / "share.csv"
    with share.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("t", "prompt_tokens", "output_tokens"))
        writer.writerows(row[:3] for row in rows[:: plan.num_replicas])
    run = Load(
        "planned",
        ("--max-kv-tokens", str(plan.kv_tokens)),
        (
            "--trace",
            str(share),
            "--num-requests",
            str(len(rows[:: plan.num_replicas])),
            "--targets",
            "ttft=250ms,mtpot=150ms",
            "--send-targets",
            "--force-lengths",
        ),
    )
    live = folder / "planned.jsonl"
    record(run, live)
    clients = read_recording(DecisionLogReader(live)).clients().seen.values()
    judged = [is_in_time(each) for each in clients if each.targets != Targets()]
    print(f"run live: {100 * sum(judged) / len(judged):.1f} % of {len(judged)} in time")


@contextlib.contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("part", choices=("why", "whatif", "plan"))
    parser.add_argument("--rate", type=float, default=14.0, help="of real-time requests")
    parser.add_argument("--duration-s", type=float, default=30.0)
    parser.add_argument("--keep", type=Path, help="a folder for the logs")
    asked = parser.parse_args()
    computing, memory = loads(asked.rate, asked.duration_s)
    print(f"load average {load_average()}")
    with _folder(asked.keep) as folder:
        if asked.part == "why":
            total = Counter[str]()
            for load in (computing, memory):
                path = folder / f"{load.name}.jsonl"
                record(load, path)
                total += why_late(load, path, NUM_LATE // 2)
            done = total["in time without it"]
            print(f"in time without what was named: {done} of {total['asked']}")
        elif asked.part == "whatif":
            told_and_run(computing, folder)
        else:
            planned_and_run(memory._replace(flags=()), folder, 0.99)


if __name__ == "__main__":
    main()
