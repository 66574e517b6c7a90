"""A worker that gets no more memory: as when it dies, and nothing else may notice."""

from __future__ import annotations

import contextlib
import random
import resource
import time

import psutil

from bench.abuse.arena import Arena, Attack, Outcome

WITHIN_S = 120.0


def no_more_addresses(arena: Arena) -> Outcome:
    """Forbid the worker to map anything new, and send prompts that need memory."""
    before = arena.pids()
    worker = psutil.Process(before["worker-0"])
    size = worker.memory_info().vms
    worker.rlimit(resource.RLIMIT_AS, (size, size))
    deadline_s = time.monotonic() + WITHIN_S
    rng = random.Random(1)
    while worker.is_running() and time.monotonic() < deadline_s:
        prompt = [rng.randrange(300, 2000) for _ in range(1500)]
        body = {"model": arena.model, "prompt": prompt, "max_tokens": 1}
        arena.ask(arena.post("/v1/completions", body), timeout_s=0.3)  # those that wait, wait on
        with contextlib.suppress(psutil.NoSuchProcess):
            if worker.status() == psutil.STATUS_ZOMBIE:
                break
    died_s = time.monotonic()
    while arena.ask(arena.get("/readyz")).status != 200 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    recovery_s = time.monotonic() - died_s
    after = arena.pids()
    replaced = sorted(name for name, pid in before.items() if after.get(name) != pid)
    return Outcome(
        f"replaced: {', '.join(replaced)}; ready again after {recovery_s:.1f} s",
        met=replaced == ["worker-0"],
    )


ATTACKS = [
    Attack(
        "a worker that gets no more memory",
        no_more_addresses,
        before="not tried",
        bound="the worker alone is replaced",
        may_restart=True,
    )
]
