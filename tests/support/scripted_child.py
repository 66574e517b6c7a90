"""A child process for supervisor tests: speaks the control protocol and does what a script says.

Run as `scripted_child.py SCRIPT_DIR NAME PARENT_PID`. `SCRIPT_DIR/script.json` maps "NAME" or
"NAME/INCARNATION" to a behaviour (default "serve"); everything that happens is appended to
`SCRIPT_DIR/journal.jsonl`, from which a frontend learns when it is welcomed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from lightserve import child
from lightserve.errors import ModelLoadError
from lightserve.messages.supervision import (
    ChildReady,
    ChildSpec,
    Drain,
    FrontendServing,
    Heartbeat,
    Role,
    RouterUp,
    WorkersStalled,
)

BEAT_S = 0.1
"""Far more often than the real ones, for short silences."""


def read_journal(folder: Path) -> list[Any]:
    """Return the entries so far; one that is just being written, of which a part shows, is not."""
    path = folder / "journal.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class Journal:
    """Appends events, one JSON line each, in one write."""

    def __init__(self, folder: Path, spec: ChildSpec) -> None:
        self._folder = folder
        self._fd = os.open(folder / "journal.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        # The number of the router boot ends the address; frontends belong to none.
        boot = int(spec.workers_address.rsplit("-", 1)[1]) if spec.workers_address else 0
        name = f"{spec.role}-{spec.index}"
        self._who = {
            "name": name,
            "incarnation": spec.incarnation,
            "boot": boot,
            "boot_id": spec.boot_id,
        }

    def add(self, event: str, **details: Any) -> None:
        """Append an event of this child."""
        line = {"event": event, "pid": os.getpid(), "time_s": time.monotonic()}
        os.write(self._fd, json.dumps({**self._who, **line, **details}).encode() + b"\n")

    def newest_group(self, boot_id: str) -> int | None:
        """Return the newest incarnation of this boot with a ready worker, None without any."""
        return max(
            (
                entry["incarnation"]
                for entry in read_journal(self._folder)
                if entry["event"] == "ready"
                and entry["name"].startswith("worker-")
                and entry["boot_id"] == boot_id
            ),
            default=None,
        )


class Welcomes:
    """A frontend's FrontendServing: once for each group of workers that its router has."""

    def __init__(self, journal: Journal, folder: Path, behaviour: str) -> None:
        self._journal = journal
        self._folder = folder
        self._behaviour = behaviour
        self._boot_id = ""
        self._welcomed: int | None = None

    def on_router(self, boot_id: str) -> None:
        """Take in RouterUp."""
        self._boot_id, self._welcomed = boot_id, None

    def is_due(self) -> bool:
        """Whether to say FrontendServing now."""
        if not self._boot_id:
            return False
        group = self._journal.newest_group(self._boot_id)
        if group is None or group == self._welcomed:
            return False
        if self._behaviour == "never-serve":
            return False
        if self._behaviour == "serve-first-group" and group > 0:
            return False
        if self._behaviour == "serve-late" and group > 0 and not (self._folder / "serve").exists():
            return False
        self._welcomed = group
        return True


def run(spec: ChildSpec) -> int:
    """Be one scripted child."""
    folder = Path(os.environ["SCRIPT_DIR"])
    script: dict[str, str] = json.loads((folder / "script.json").read_text())
    name = f"{spec.role}-{spec.index}"
    behaviour = script.get(f"{name}/{spec.incarnation}", script.get(name, "serve"))
    journal = Journal(folder, spec)
    journal.add("start", spec=msgspec.to_builtins(spec))
    match behaviour:
        case "refuse":
            raise ModelLoadError("config.json: key 'x' is wrong\nin two lines")
        case "bug":
            raise ZeroDivisionError("oops")
        case "crash":
            os._exit(7)
        case "hang":
            time.sleep(3600)
    control = child.connect_control(spec)
    control.send(ChildReady())
    journal.add("ready")
    if behaviour == "crash-when-ready":
        time.sleep(0.05)
        os._exit(9)
    if behaviour == "stall":
        while not (folder / "stall").exists():
            time.sleep(0.02)
        control.send(WorkersStalled(incarnation=5, stalled_s=0.5))  # of no group: ignored
        control.send(WorkersStalled(incarnation=0, stalled_s=1.5))
    _serve(spec, control, journal, Welcomes(journal, folder, behaviour), behaviour)
    control.close()
    return 0


def _serve(
    spec: ChildSpec,
    control: child.ControlLink,
    journal: Journal,
    welcomes: Welcomes,
    behaviour: str,
) -> None:
    """Follow the supervisor until drained."""
    if behaviour.startswith("compute"):
        folder = Path(os.environ["SCRIPT_DIR"])
        while not (folder / "compute").exists():
            control.send(Heartbeat())
            time.sleep(BEAT_S)
        end_s = time.thread_time() + float(behaviour.removeprefix("compute "))
        while time.thread_time() < end_s:
            pass
        journal.add("computed")
    while True:
        message = control.receive(BEAT_S)
        if spec.role is not Role.WORKER and behaviour != "fall-silent":
            control.send(Heartbeat())
        if welcomes.is_due():
            control.send(FrontendServing())
        if message is None:
            continue
        journal.add("message", message=msgspec.to_builtins(message))
        if isinstance(message, RouterUp):
            welcomes.on_router(message.boot_id)
        if isinstance(message, Drain) and behaviour != "never-drain":
            time.sleep(0.2 if behaviour == "drain-slowly" else 0.0)
            journal.add("drained")
            return


if __name__ == "__main__":
    os.environ["SCRIPT_DIR"] = sys.argv.pop(1)
    child.main(dict.fromkeys(Role, run))
